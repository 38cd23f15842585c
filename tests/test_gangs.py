"""Trainers of several ranks in real runs: each rank a process, which together are one worker."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from test_recovery import Said, disturbed, ended, start, undisturbed, worker

SLOW = pytest.mark.slow
SAME = ("samples", "weights")


def run(runs_dir: Path, *arguments: str) -> Said:
    return ended(start(runs_dir, *arguments))


@SLOW
@pytest.mark.parametrize(
    "arguments",
    [("ranks=3",), ("ranks=2", 'placement="time-shared"', "rollouts=1")],
    ids=["split", "time-shared"],
)
def test_a_trainer_of_several_ranks_gives_what_one_of_one_gives(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    said, alone = run(tmp_path, "fake", *arguments), undisturbed("fake")
    assert said.get("error") is None
    assert {key: said[key] for key in SAME} == {key: alone[key] for key in SAME}


@pytest.mark.parametrize("rank", ["#1", pytest.param("", marks=SLOW)])
def test_a_trainer_that_loses_a_rank_is_restarted_as_a_whole_and_ends_with_the_same_weights(tmp_path: Path, rank: str) -> None:
    said = disturbed(tmp_path, ("fake", "ranks=2", "retry_wait_s=0.0"), f"train-0{rank}", 9_000, lambda process: process.kill())
    assert said.get("error") is None
    kind, name, what = said["incidents"][0][1:]
    assert (kind, name) == ("lost", "train-0")
    assert what.startswith("lost its rank 1, which was killed by signal 9 (pid " if rank else "was killed by signal 9 (pid ")
    alone = undisturbed("fake")
    assert {key: said[key] for key in SAME} == {key: alone[key] for key in SAME}


@SLOW
def test_a_rank_that_is_stopped_is_missed_by_its_number(tmp_path: Path) -> None:
    arguments = ("fake", "ranks=2", "retry_wait_s=0.0", "hung_after_s=5.0")
    said = disturbed(tmp_path, arguments, "train-0#1", 9_000, lambda process: process.suspend())
    assert said.get("error") is None
    assert said["incidents"][0][1:3] == ["lost", "train-0"]
    assert "has a rank 1 that gave no sign of life for 5 s" in said["incidents"][0][3]
    assert said["weights"] == undisturbed("fake")["weights"]


def test_an_error_of_one_rank_alone_ends_the_run_and_names_the_rank(tmp_path: Path) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'fails': '1@3'})}")
    assert "EngineError" in said["error"]
    assert "this rank was told to fail at micro-batch 3 (worker train-0, rank 1, pid " in said["error"]


@SLOW
def test_an_error_of_the_first_rank_alone_is_that_of_the_call(tmp_path: Path) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'fails': '0@3'})}")
    assert "this rank was told to fail at micro-batch 3 (worker train-0, pid " in said["error"]
    assert "policy.update" in said["error"]


@SLOW
def test_an_error_of_all_ranks_is_that_of_the_call(tmp_path: Path) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'all_fail': 3})}")
    assert "every rank was told to fail at micro-batch 3 (worker train-0, pid " in said["error"]
    assert "recovery_run.py" in said["error"]


@SLOW
def test_a_rank_that_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, "fake", "ranks=2", "retry_wait_s=0.0", "attempts=2", "num_steps=200")
    killed: set[int] = set()
    try:
        while process.poll() is None:
            found = worker(process, "train-0#1")
            if found is not None and found.pid not in killed and any(tmp_path.glob("*/segments/*.seg")):
                killed.add(found.pid)
                found.kill()
            time.sleep(0.002)
        said = ended(process)
    finally:
        process.kill()
    assert "StateLost" in said["error"] or "WorkerError" in said["error"]
    assert "rank 1" in said["error"]


@SLOW
def test_no_rank_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "fake", "ranks=2", "num_steps=1000")
    try:
        while not any(tmp_path.glob("*/segments/*.seg")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        children = psutil.Process(process.pid).children(recursive=True)
        assert any(child.cmdline()[-1:] == ["train-0#1"] for child in children)
    finally:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not psutil.wait_procs(children, timeout=30)[1]
