"""`m2flow new` and `m2flow demo`: a project that works as it stands; from a wheel: tests/test_packaging.py."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli
from m2flow.cli.new import _KINDS, _NICKNAMES, shipped_flows


def test_every_shipped_flow_may_begin_a_project() -> None:
    others = {"grpo_smollm", "gym_ppo"}  # They need a data package, and Gymnasium.
    assert set(_KINDS) == {path.stem for path in shipped_flows().glob("*.py")} - others


@pytest.mark.parametrize("kind", ["grpo", "chat", "agent", "distill"])
def test_a_new_project_has_a_flow_a_spec_a_readme_and_a_test_that_passes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, ["new", "mine", "--from", kind])
    assert made.exit_code == 0, made.output
    assert ("--model models/chat --init random" in made.output) == (kind == "chat")
    flow = _NICKNAMES.get(kind, kind)
    assert {f"{flow}.py", "cluster.yaml", "README.md", f"test_{flow}.py"} <= {path.name for path in Path("mine").iterdir()}
    runpy.run_path(f"mine/test_{flow}.py")["test_the_flow_is_the_same_planned_and_eager"]()
    if kind != "distill":
        model = ["--model", "mine/models/chat", "--init", "random"] if kind == "chat" else []
        planned = CliRunner().invoke(cli, ["plan", f"mine/{flow}.py", "--cluster", "mine/cluster.yaml", *model])
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
