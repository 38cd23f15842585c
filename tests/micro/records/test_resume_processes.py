"""`m2flow run` with worker processes, killed with SIGKILL, and `m2flow run --resume`."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import programs
import pytest
from resumed_runs import SPLIT_YAML

FLOW = Path(__file__).parents[2] / "support" / "resume_flow.py"
ROOT = Path(__file__).parents[3]


def m2flow(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"M2FLOW_TEST_KILLS": str(tmp_path / "kills"), "M2FLOW_TEST_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "m2flow", "run", *arguments, "--json"]
    return programs.run(command, cwd=ROOT, env=environment, timeout=240)


def begun(tmp_path: Path, killed_in: str, flow: str = "dies", *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "cluster.yaml").write_text(SPLIT_YAML)
    options = ["--cluster", str(tmp_path / "cluster.yaml"), "--checkpoint-every", "1", "--runs-dir", str(tmp_path / "runs")]
    return m2flow(tmp_path, f"tests/support/resume_flow.py:{flow}", "--killed-in", killed_in, *options, *more)


@functools.cache
def whole_run() -> dict[str, object]:
    """The summary of a run that nothing befalls."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(json.loads(begun(Path(folder), "").stdout.splitlines()[-1]))


def check_killed_and_resumed(tmp_path: Path, killed_in: str, *more: str) -> None:
    whole = whole_run()
    (tmp_path / "kills").write_text("")
    killed = begun(tmp_path, killed_in, "dies", *more)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "kills").exists()
    (run_dir,) = (tmp_path / "runs").iterdir()
    has_checkpoint = any((run_dir / "checkpoints").glob("step-*"))  # Killed while its first is being written, a run rightly begins anew.
    resumed = m2flow(tmp_path, "--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert list((tmp_path / "runs").iterdir()) == [run_dir]
    same = ("steps", "samples", "tokens", "reward_first", "reward_last", "samples_sha256", "weights_sha256")
    assert {name: (summary[name], whole[name]) for name in same if summary[name] != whole[name]} == {}
    assert not has_checkpoint or "step 0\n" not in resumed.stderr
    assert not has_checkpoint or re.search(r"done +dies: \d+ steps, the last \d+ in ", resumed.stderr)
    again = m2flow(tmp_path, "--resume", str(run_dir))
    assert again.returncode == 2
    assert "there is nothing to resume" in again.stderr


@pytest.mark.slow
def test_a_run_killed_between_a_gradient_and_its_step_is_resumed_from_the_command_line(tmp_path):
    check_killed_and_resumed(tmp_path, "apply")


def test_a_run_whose_trainer_dies_goes_on_from_its_last_checkpoint_by_itself(tmp_path):
    whole = whole_run()
    (tmp_path / "kills").write_text("")
    went_on = begun(tmp_path, "trainer")
    assert went_on.returncode == 0, went_on.stderr
    assert not (tmp_path / "kills").exists()
    assert "the worker train-0" in went_on.stderr
    assert "the run goes on from" in went_on.stderr
    summary = json.loads(went_on.stdout.splitlines()[-1])
    same = ("steps", "samples", "tokens", "reward_first", "reward_last", "samples_sha256", "weights_sha256")
    assert {name: summary[name] for name in same} == {name: whole[name] for name in same}
    assert max(summary["busy_s"].values()) <= summary["wall_s"] + 0.01
    assert summary["tokens_per_s"] * summary["wall_s"] < 0.95 * summary["tokens"], "what was there before counts as made since"


@pytest.mark.slow
def test_a_trainer_that_dies_of_the_same_task_again_and_again_ends_the_run_with_the_reason(tmp_path):
    ended = begun(tmp_path, "trainers")
    assert ended.returncode == 1
    assert "come this far 3 times" in ended.stderr
    assert "the worker train-0" in ended.stderr.splitlines()[-12:].__str__()


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["generation", "after", "checkpoint", "final"])
def test_a_run_killed_at_other_moments_is_resumed_too(tmp_path, killed_in):
    check_killed_and_resumed(tmp_path, killed_in)


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["apply", "checkpoint"])
def test_a_run_killed_while_a_checkpoint_is_written_behind_its_steps_is_resumed_too(tmp_path, killed_in):
    check_killed_and_resumed(tmp_path, killed_in, "--setting", "checkpoint_behind=true")


def drawn_in(run_dir: Path) -> list[float]:
    """The rows that each step of `resume_flow.climbs` drew, as it logged them."""
    logged = (json.loads(line)["values"] for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [values["drawn"] for values in logged if "drawn" in values]


@pytest.mark.parametrize("killed_in", ["after", pytest.param("generation", marks=pytest.mark.slow)])
def test_a_killed_run_whose_rows_are_chosen_by_their_rewards_draws_and_ends_as_one_that_nothing_befell(tmp_path, killed_in):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = json.loads(begun(tmp_path / "whole", "", "climbs").stdout.splitlines()[-1])
    (tmp_path / "killed" / "kills").write_text("")
    killed = begun(tmp_path / "killed", killed_in, "climbs")
    assert killed.returncode == -9, killed.stderr
    (run_dir,) = (tmp_path / "killed" / "runs").iterdir()
    resumed = m2flow(tmp_path / "killed", "--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout.splitlines()[-1])
    same = ("steps", "samples", "tokens", "samples_sha256", "weights_sha256")
    assert {name: summary[name] for name in same} == {name: whole[name] for name in same}
    drawn = drawn_in(ROOT / whole["run_dir"])
    assert len(set(drawn[3:])) > 1
    assert sorted(drawn[3:6]) != sorted(drawn[:3]), "the rewards chose other rows than the first epoch had"
    assert drawn_in(run_dir) == drawn
