"""Rollout workers that join a run while it goes on, and leave it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from m2flow.cli.main import cli
from m2flow.micro.record.ledger import read_incidents
from m2flow.spec import ClusterSpec, RolloutSpec

SCRIPT = Path(__file__).with_name("recovery_run.py")


def scale(run_dir: Path, change: str, *more: str) -> Result:
    return CliRunner().invoke(cli, ["cluster", "scale", str(run_dir), f"rollout={change}", *more])


def until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_workers_join_and_leave_and_the_samples_and_weights_stay_the_same(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), "fake", "rollouts=1", "spare=2"]
    environment = {**os.environ, "HELD_BY": str(held)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        until(lambda: list((tmp_path / "runs").glob("*/segments/rollout-0.seg")), process)
        (run_dir,) = (tmp_path / "runs").iterdir()

        def happened(kind: str) -> list[str]:
            return sorted(one.worker for one in read_incidents(run_dir) if one.kind == kind)

        refused = scale(run_dir, "+3", "--patience", "60")
        assert refused.exit_code == 2
        assert "2 more rollout workers can join this run, not 3" in refused.output
        said = scale(run_dir, "+2", "--patience", "60")
        assert said.output == "rollout-1, rollout-2 will join\n"
        until(lambda: happened("joined") == ["rollout-1", "rollout-2"], process)
        assert "rollout-2 left" in scale(run_dir, "-1", "--patience", "60").output
        until(lambda: happened("lost") == ["rollout-2"], process)
        assert "1 rollout workers can leave this run, not 2" in scale(run_dir, "-2", "--patience", "60").output
        held.unlink()
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    said_at_end = json.loads(output.splitlines()[-1])
    plain = subprocess.run([*command[:2], str(tmp_path / "plain"), "fake", "rollouts=1"], capture_output=True, text=True, check=True)
    undisturbed = json.loads(plain.stdout.splitlines()[-1])
    assert [said_at_end[name] for name in ("samples", "weights", "count")] == [
        undisturbed[name] for name in ("samples", "weights", "count")
    ]
    assert (run_dir / "segments" / "rollout-1.seg").stat().st_size > 0


def test_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = scale(tmp_path, "+1", "--patience", "0.2")
    assert said.exit_code == 2
    assert "has not answered" in said.output
    assert list((tmp_path / "control").iterdir()) == []


def test_what_is_no_change_of_rollout_workers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = scale(tmp_path, "2")
    assert said.exit_code == 2
    assert "Example: rollout=+2" in said.output


def test_nobody_is_spare_where_the_placement_is_searched_for() -> None:
    with pytest.raises(ValueError, match="nobody can join where the placement is searched for"):
        ClusterSpec(placement="auto", rollout=RolloutSpec(spare=1))


def test_a_simulation_is_of_those_who_are_there_from_the_start(tmp_path: Path) -> None:
    def simulated(spare: int) -> str:
        spec = tmp_path / f"spare-{spare}.yaml"
        spec.write_text(f"name: same\nplacement: split\ncores: 4\nrollout: {{workers: 2, spare: {spare}}}\n")
        flow = Path(__file__).parent.parent / "flows" / "grpo.py"
        options = ["--num-steps", "1", "--warm-steps", "1", "--eval-every", "9"]
        said = CliRunner().invoke(cli, ["simulate", str(flow), "--cluster", str(spec), *options])
        assert said.exit_code == 0, said.output
        return re.sub(r"simulated in [0-9.]+ s", "simulated", said.output)

    assert simulated(0) == simulated(3)
