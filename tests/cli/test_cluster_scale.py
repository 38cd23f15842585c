"""Rollout workers that join a run while it goes on, and leave it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from disturbing import same, started, undisturbed

from m2flow.cli.main import cli
from m2flow.spec import ClusterSpec, RolloutSpec


def scale(run_dir: Path, change: str, *more: str) -> Result:
    return CliRunner().invoke(cli, ["cluster", "scale", str(run_dir), f"rollout={change}", *more])


@pytest.mark.slow
def test_workers_join_and_leave_and_the_samples_and_weights_stay_the_same(tmp_path: Path) -> None:
    with started(tmp_path / "runs", "fake", "rollouts=1", "spare=2", held_at=1) as running:
        running.until_generated()
        run_dir = running.run_dir()

        def happened(kind: str) -> list[str]:
            return sorted(one.worker for one in running.incidents(kind))

        refused = scale(run_dir, "+3", "--patience", "300")
        assert refused.exit_code == 2
        assert "2 more rollout workers can join this run, not 3" in refused.output
        said = scale(run_dir, "+2", "--patience", "300")
        assert said.output == "rollout-1, rollout-2 will join\n"
        running.until(lambda: happened("joined") == ["rollout-1", "rollout-2"], "both joined")
        assert "rollout-2 left" in scale(run_dir, "-1", "--patience", "300").output
        running.until(lambda: happened("lost") == ["rollout-2"], "one left")
        assert "1 rollout workers can leave this run, not 2" in scale(run_dir, "-2", "--patience", "300").output
        ended = running.ended()
    over = scale(run_dir, "+1")
    assert over.exit_code == 2
    assert "is over" in over.output
    assert same(ended, undisturbed("fake", "rollouts=1"))
    assert (run_dir / "segments" / "rollout-1.seg").stat().st_size > 0


def test_a_run_that_does_not_answer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = scale(tmp_path, "+1", "--patience", "0.2")
    assert said.exit_code == 2
    assert "has not answered" in said.output
    assert list((tmp_path / "control").iterdir()) == []


def attempted(run_dir: Path, reason: str | None) -> None:
    """A run whose only attempt ended so; None: it has not."""
    (run_dir / "config.json").write_text("{}")
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
        db.execute("CREATE TABLE attempts (number INTEGER, began REAL, ended REAL, reason TEXT)")
        db.execute("INSERT INTO attempts VALUES (0, 1.0, ?, ?)", (reason and 2.0, reason))
        db.commit()


@pytest.mark.parametrize(("reason", "said"), [("done", "is over"), ("Ctrl-C", "has stopped: Ctrl-C"), (None, "has not answered")])
def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path, reason: str | None, said: str) -> None:
    attempted(tmp_path, reason)
    answer = scale(tmp_path, "+1", "--patience", "0.2")
    assert (answer.exit_code, said in answer.output) == (2, True), answer.output
    assert ("--resume" in answer.output) == (reason == "Ctrl-C")


def test_one_that_is_taken_up_again_at_this_moment_is_asked(tmp_path: Path) -> None:
    attempted(tmp_path, "Ctrl-C")
    (tmp_path / "run.lock").write_text(f"{os.getpid()}\n")
    assert "has not answered" in scale(tmp_path, "+1", "--patience", "0.2").output


def test_a_simulated_run_has_no_workers(tmp_path: Path) -> None:
    for name in ("config.json", "report.json"):
        (tmp_path / name).write_text("{}")
    assert "is simulated" in scale(tmp_path, "+1").output


def test_what_is_no_change_of_rollout_workers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = scale(tmp_path, "2")
    assert said.exit_code == 2
    assert "Example: rollout=+2" in said.output


def test_nobody_is_spare_where_the_placement_is_searched_for() -> None:
    with pytest.raises(ValueError, match="nobody can join"):
        ClusterSpec(placement="auto", rollout=RolloutSpec(spare=1))


def test_a_simulation_is_of_those_who_are_there_from_the_start(tmp_path: Path) -> None:
    def simulated(spare: int) -> str:
        spec = tmp_path / f"spare-{spare}.yaml"
        spec.write_text(f"name: same\nplacement: split\ncores: 4\nrollout: {{workers: 2, spare: {spare}}}\n")
        flow = Path(__file__).parents[2] / "flows" / "grpo.py"
        options = ["--num-steps", "1", "--warm-steps", "1", "--eval-every", "9"]
        said = CliRunner().invoke(cli, ["simulate", str(flow), "--cluster", str(spec), *options])
        assert said.exit_code == 0, said.output
        return re.sub(r"simulated in [0-9.]+ s", "simulated", said.output)

    assert simulated(0) == simulated(3)
