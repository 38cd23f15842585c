"""`m2flow new` and `m2flow demo`: a project that works as it stands, from a checkout and from a wheel."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli
from m2flow.cli.new import _KINDS, shipped_flows

ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_flow_may_begin_a_project() -> None:
    others = {"grpo_smollm"}  # It needs a data package.
    assert set(_KINDS) == {path.stem for path in shipped_flows().glob("*.py")} - others


@pytest.mark.parametrize("kind", ["grpo", "chat", "distill"])
def test_a_new_project_has_a_flow_a_spec_a_readme_and_a_test_that_passes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, ["new", "mine", "--from", kind])
    assert made.exit_code == 0, made.output
    assert {f"{kind}.py", "cluster.yaml", "README.md", f"test_{kind}.py"} <= {path.name for path in Path("mine").iterdir()}
    runpy.run_path(f"mine/test_{kind}.py")["test_the_flow_is_the_same_planned_and_eager"]()
    if kind == "grpo":
        planned = CliRunner().invoke(cli, ["plan", f"mine/{kind}.py", "--cluster", "mine/cluster.yaml"])
        assert planned.exit_code == 0, planned.output


@pytest.mark.slow
def test_a_new_project_passes_a_strict_type_checker_that_knows_nothing_of_pydantic(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for kind in ("grpo", "chat"):
        assert CliRunner().invoke(cli, ["new", str(tmp_path / kind), "--from", kind]).exit_code == 0
        check = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), f"{kind}.py", f"test_{kind}.py"]
        done = subprocess.run(check, cwd=tmp_path / kind, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["new", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_has_all_that_the_demo_and_new_projects_need(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("m2flow", "flows"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("m2flow-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()

    def m2flow(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        ran = subprocess.run(
            [sys.executable, "-m", "m2flow", *words], cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    m2flow("new", "mine")
    said = json.loads(m2flow("demo", "--num-steps", "1", "--warm-steps", "1", "--batch", "2", "--n", "2", "--json", "--quiet"))
    assert str(Path("installed", "m2flow", "flows")) in (empty / said["run_dir"] / "config.json").read_text()
