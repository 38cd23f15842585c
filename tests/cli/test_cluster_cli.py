"""`m2flow cluster`: specs are written, checked, and described for editors."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from m2flow.cli import doctor
from m2flow.cli.cluster import as_text, documentation
from m2flow.cli.main import cli
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[2]


def m2flow(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_published_schema_is_that_of_the_code() -> None:
    assert (ROOT / "clusters" / "schema.json").read_text() == as_text(), "m2flow cluster schema > clusters/schema.json"
    assert m2flow("cluster", "schema").output == as_text()


def test_the_schema_says_what_every_field_is() -> None:
    described = json.loads(as_text())
    sections = {**described["$defs"], "ClusterSpec": described}
    assert {"RolloutSpec", "RaySpec", "PoolSpec", "LayoutSpec"} <= sections.keys()
    for name, section in sections.items():
        assert section["additionalProperties"] is False
        assert all(field["description"] for field in section["properties"].values()), name
    assert described["properties"]["launcher"]["enum"] == ["local", "ray"]


def test_every_field_is_documented_where_it_is_declared() -> None:
    documented = documentation()
    models = [ClusterSpec, *(type(getattr(ClusterSpec(), name)) for name in ClusterSpec.model_fields)]
    for model in models:
        if model.__module__ == "m2flow.spec":
            assert {field for name, field in documented if name == model.__name__} == set(model.model_fields)


def test_init_writes_a_spec_of_this_machine_that_check_finds_nothing_missing_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    said = m2flow("cluster", "init", file)
    assert said.exit_code == 0, said.output
    spec = load_cluster(file)
    assert (spec.name, spec.launcher) == ("mine", "local")
    assert spec.num_cores >= 1
    checked = m2flow("cluster", "check", file, "--flow", ROOT / "flows" / "grpo.py", "--json")
    found = json.loads(checked.output)["this machine"]
    assert {"python", "shared memory", "disk", "rollout engine", "train engine", "model"} <= {one["name"] for one in found}
    assert [one for one in found if one["name"] in ("model", "train engine") and one["state"] != "ok"] == []


def test_init_does_not_write_over_a_spec(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\n")
    said = m2flow("cluster", "init", file)
    assert (said.exit_code, file.read_text()) == (2, "name: mine\n")
    assert "--force" in said.output


def missing(tmp_path: Path, text: str, *arguments: object) -> dict[str, str]:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    checked = m2flow("cluster", "check", file, "--json", *arguments)
    assert checked.exit_code == 1
    found = json.loads(checked.output.partition("\nmissing:")[0])["this machine"]
    return {one["name"]: one["value"] for one in found if one["state"] == "missing"}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("rollout: {engine: sglang, options: {python: nowhere/python}}\n", "rollout engine", "the interpreter nowhere/python can't be run"),
        ("channels: {transport: tcp, keys: nowhere.key}\n", "key", "can't read the key nowhere.key"),
        ("device: cuda:0\n", "gpu devices", "none, and the spec says device: cuda:0"),
    ],
)
def test_check_says_what_is_missing(tmp_path: Path, text: str, name: str, value: str) -> None:
    if name == "gpu devices" and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    assert value in missing(tmp_path, text)[name]


def test_check_refuses_a_spec_with_a_name_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("rollout:\n  engine: embeded\n")
    checked = m2flow("cluster", "check", tmp_path / "mine.yaml")
    assert checked.exit_code == 2
    assert "mine.yaml:2:3" in checked.output
    assert "Did you mean 'embedded'?" in checked.output


def test_check_finds_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in missing(tmp_path, f"channels: {{transport: tcp, port: {port}}}\n")["port"]


def test_what_is_only_thought_of_is_to_be_planned_and_what_is_here_to_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for least in ("_LEAST_SHARED_BYTES", "_LEAST_DISK_BYTES", "_LEAST_MEMORY_BYTES"):
        monkeypatch.setattr(doctor, least, 0)  # Of which others may have taken most at this moment.
    (tmp_path / "here.yaml").write_text("name: here\n")
    (tmp_path / "there.yaml").write_text("name: there\npools: {main: {device: h100}}\n")
    (tmp_path / "served.yaml").write_text(
        f"name: served\npools: {{main: {{device: h100}}}}\nrollout: {{engine: sglang, options: {{python: {sys.executable}}}}}\n"
    )
    assert "Nothing is missing: m2flow run" in m2flow("cluster", "check", tmp_path / "here.yaml").output
    assert "Nothing is missing: m2flow plan" in m2flow("cluster", "check", tmp_path / "there.yaml").output
    served = m2flow("cluster", "check", tmp_path / "served.yaml").output
    assert "optional  rollout engine     the rollout engine sglang needs sglang" in served
    assert "Nothing is missing: m2flow plan" in served


def test_check_looks_at_the_disk_where_runs_go(tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text("name: here\n")
    assert f"free in {tmp_path}\n" in m2flow("cluster", "check", tmp_path / "here.yaml", "--runs-dir", tmp_path / "not" / "yet").output
