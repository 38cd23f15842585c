"""Trainers of several ranks in real runs: each rank a process, which together are one worker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from disturbing import PATIENCE_S, Said, disturbed, run, same, started, undisturbed

SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    "arguments",
    [("ranks=3",), ("ranks=2", 'placement="time-shared"', "rollouts=1")],
    ids=["split", "time-shared"],
)
def test_a_trainer_of_several_ranks_gives_what_one_of_one_gives(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    said = run(tmp_path, "fake", *arguments)
    assert said.get("error") is None
    assert same(said, undisturbed("fake"))


@SLOW
@pytest.mark.parametrize("rank", ["#1", ""])
def test_a_trainer_that_loses_a_rank_is_restarted_as_a_whole_and_ends_with_the_same_weights(tmp_path: Path, rank: str) -> None:
    arguments = ("fake", "ranks=2", "retry_wait_s=0.0")
    said, lost = disturbed(tmp_path / "runs", arguments, f"train-0{rank}", 9_000, lambda process: process.kill(), returns=False)
    assert said.get("error") is None
    assert [incident[1:3] for incident in said["incidents"]] == [["lost", "train-0"]]
    assert lost.what.startswith("lost its rank 1, which was killed by signal 9 (pid " if rank else "was killed by signal 9 (pid ")
    assert same(said, undisturbed("fake"))


@SLOW
def test_a_rank_that_is_stopped_is_missed_by_its_number(tmp_path: Path) -> None:
    arguments = ("fake", "ranks=2", "retry_wait_s=0.0", "hung_after_s=5.0")
    said, lost = disturbed(tmp_path / "runs", arguments, "train-0#1", 9_000, lambda process: process.suspend(), returns=False)
    assert said.get("error") is None
    assert re.search(r"has a rank 1 that gave no sign of life for \d+ s", lost.what)
    assert same(said, undisturbed("fake"))


def test_an_error_of_one_rank_alone_ends_the_run_and_names_the_rank(tmp_path: Path) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'fails': '1@3'})}")
    assert "EngineError" in said["error"]
    assert "fail at micro-batch 3 (worker train-0, rank 1, pid " in said["error"]


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
def test_a_rank_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    options = json.dumps({"dies": "1@3"})
    said = run(tmp_path, "fake", "ranks=2", "retry_wait_s=0.0", "attempts=2", f"train_options={options}")
    assert "StateLost" in said["error"] or "WorkerError" in said["error"]
    assert "rank 1" in said["error"]


@SLOW
def test_no_rank_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path / "runs", "fake", "ranks=2", held_at=3) as running:
        running.until_generated()
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert any(child.cmdline()[-1:] == ["train-0#1"] for child in children)
        running.process.kill()
        running.process.communicate()
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]


def ran_short(said: Said) -> int:
    """How often a run began again in smaller parts."""
    assert said.get("error") is None
    return sum(kind == "out of memory" for _, kind, _, _ in said["incidents"])


@SLOW
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_ranks_one_of_which_has_no_room_for_a_micro_batch_go_on_in_smaller_parts(tmp_path: Path, rank: int) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'room': f'{rank}@4'})}")
    assert ran_short(said) >= 1
    assert same(said, undisturbed("fake"))
    config = json.loads((Path(said["run_dir"]) / "config.json").read_text())
    assert config["cluster"]["train"]["parts"] == 2 ** ran_short(said)
    metrics = [json.loads(line)["values"] for line in (Path(said["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert all(values["micro_batches_halved"] >= 1 for values in metrics if "loss" in values)


@pytest.mark.long
def test_ranks_that_have_no_room_for_one_sample_end_the_run_with_the_reason(tmp_path: Path) -> None:
    said = run(tmp_path, "fake", "ranks=2", f"train_options={json.dumps({'room': '1@0'})}")
    assert "in a micro-batch of 1 samples; one sample" in said["error"]
