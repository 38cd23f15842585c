"""Checkpoints that are written while training goes on: what is reported, what a full disk does, and what a killed run goes on from."""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, loss, steps
from m2flow.errors import HostError, error_from_record
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator, failed_checkpoint
from m2flow.micro.protocol import messages as m
from m2flow.micro.records import checkpoints
from m2flow.micro.records.checkpoints import PartWriter
from m2flow.micro.scheduler.state import Saves
from m2flow.recipe import Counts
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec


def writes(path: Path, body: bytes, before: Callable[[], object] = lambda: None) -> Callable[[], str]:
    def write() -> str:
        before()
        path.mkdir(parents=True)
        (path / "model").write_bytes(body)
        return f"digest of {body.decode()}"

    return write


def test_parts_are_written_one_after_the_other_and_sealed_while_their_owner_goes_on(tmp_path: Path) -> None:
    writer, may_go_on = PartWriter(), threading.Event()
    writer.begin(3, "policy", str(tmp_path / "policy"), writes(tmp_path / "policy", b"a", may_go_on.wait))
    writer.begin(
        3, "critic", str(tmp_path / "critic"), writes(tmp_path / "critic", b"b", lambda: seen.append((tmp_path / "policy").exists()))
    )
    seen: list[bool] = []
    assert writer.written() == []
    assert not (tmp_path / "policy").exists()
    may_go_on.set()
    writer.drain()
    assert [one[:3] for one in writer.written()] == [(3, "policy", "digest of a"), (3, "critic", "digest of b")]
    assert seen == [True]
    assert writer.written() == []
    for role in ("policy", "critic"):
        assert (tmp_path / role / "m2flow_seal.json").exists()


def test_what_can_not_be_written_is_named_and_the_next_part_is_written(tmp_path: Path) -> None:
    def fails() -> str:
        raise OSError(28, "No space left on device")

    writer = PartWriter()
    writer.begin(3, "policy", str(tmp_path / "policy"), fails)
    writer.begin(3, "critic", str(tmp_path / "critic"), lambda: str(1 // 0))
    writer.begin(4, "policy", str(tmp_path / "again"), writes(tmp_path / "again", b"c"))
    writer.drain()
    full, wrong, well = writer.written()
    assert isinstance(full.error, HostError)
    assert f"the checkpoint {tmp_path / 'policy'} can't be written" in str(full.error)
    assert "ZeroDivisionError" in str(wrong.error)
    assert (well.error, well.digest) == (None, "digest of c")
    said = failed_checkpoint(3, "policy", error_from_record(full.error.to_record()))
    assert re.search(r"the checkpoint after step 4 was not made, since policy could not be written: .*No space left.*Free some space", said)


def test_a_failed_checkpoint_is_dropped_and_the_next_step_ends_with_another(tmp_path: Path) -> None:
    settings = RunSettings(checkpoint_steps=2, checkpoint_s=600.0, checkpoint_behind=True)
    coordinator = CheckpointCoordinator(tmp_path, settings, 0, None)
    due = coordinator.due(1, 5)
    assert due is not None
    assert due.behind
    coordinator.begun({"policy": 2})
    (Path(due.directory) / "policy").mkdir()
    assert not coordinator.failed(0), "another checkpoint, which was dropped before"
    assert coordinator.is_gathering
    assert coordinator.failed(1)
    assert not coordinator.is_gathering
    assert not Path(due.directory).exists()
    (Path(due.directory) / "critic").mkdir(parents=True)  # Another trainer's, who had begun to write it.
    coordinator.saved(1, "critic", "late")
    assert not Path(due.directory).exists()
    assert coordinator.finish(lambda num_calls: True, lambda: None) is None
    again = coordinator.due(2, 9)
    assert again is not None
    assert again.step == 2


def test_a_part_that_may_be_written_behind_ends_its_task_first() -> None:
    for behind, step in ((True, 3), (False, -1)):
        saves = Saves()
        saves.add(3, "/run/.step", {"policy": 4}, behind=behind)
        assert saves.begin("policy", 17) == m.Save(17, -1, "policy", "/run/.step/policy", seals=True, step=step)


# Runs


def same_length(sample: Sample) -> float:
    return len(str(sample.text)) % 7 / 7


WATCHED: list[tuple[Path, list[str]]] = []
"""Where the latest run goes, and what it warned of."""


def wait_for_checkpoint_after(step: int) -> None:
    """Until it is there, or was given up; while the flow is traced there is no run."""
    runs_dir, warned = WATCHED[-1]
    ends_s = time.monotonic() + 120
    while any(runs_dir.glob("*/ledger.db")) and not any(runs_dir.glob(f"*/checkpoints/step-{step:06}")):
        if any(f"after step {step} was not made" in one for one in warned):
            break
        assert time.monotonic() < ends_s
        time.sleep(0.02)


@flow
def trains(broken_at: tuple[int, ...] = (), num_steps: int = 4) -> None:
    """In the trainer's process no file can have more than a byte while these steps' checkpoints are written."""
    policy, judge = Policy("fake"), Reward(same_length)
    prompts = Dataset([{"prompt": f"{i * i}="} for i in range(12)])
    for step in steps(num_steps):
        if step:
            wait_for_checkpoint_after(step)
        limit = 1 if step in broken_at else resource.RLIM_INFINITY

        def counted(counts: Counts, limit: int = limit) -> float:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return float(counts.num_tokens)

        @loss(needs=["logprobs", "advantages"], denominator=counted)
        def plain(logprobs, advantages):  # type: ignore[no-untyped-def]
            return -logprobs * advantages

        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        metrics = policy.update(responses, judge.score(responses), loss=plain, optimizer=AdamW(1e-3))
        float(metrics["num_tokens"])


def ran(runs_dir: Path, *, behind: bool, broken_at: tuple[int, ...] = ()) -> tuple[Summary, list[str]]:
    spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    settings = RunSettings(runs_dir=str(runs_dir), checkpoint_steps=1, checkpoint_s=None, checkpoints_kept=9, checkpoint_behind=behind)
    warned = list[str]()
    WATCHED.append((runs_dir, warned))
    run = Run(trains, {"broken_at": broken_at}, spec, settings, warn=warned.append)
    summary = run.execute()
    return summary, [one for one in warned if "checkpoint" in one]


@pytest.mark.slow
def test_a_disk_that_refuses_costs_a_checkpoint_and_no_step(tmp_path: Path) -> None:
    whole, nothing = ran(tmp_path / "at once", behind=False)
    found, warned = ran(tmp_path / "behind", behind=True, broken_at=(1,))
    assert not nothing
    assert found.weights_sha256 == whole.weights_sha256
    assert found.samples_sha256 == whole.samples_sha256
    (said,) = warned
    assert re.search(r"the checkpoint after step 2 was not made, since policy could not be written: .*File too large", said)
    assert "the next step ends with another try" in said
    directory = Path(found.run_dir) / "checkpoints"
    steps_of = {path.name for path in directory.glob("step-*")}
    assert "step-000002" not in steps_of
    assert {"step-000001", "step-000003"} <= steps_of
    for name in steps_of:
        checkpoints.read(directory / name)
    assert not list(directory.glob(".step-000002*"))
