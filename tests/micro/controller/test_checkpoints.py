"""Checkpoints on disk, when they are due, and which writes wait for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from m2flow.errors import EngineError, ModelError
from m2flow.macro.graph import Call, Effect, Granularity, Site
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator, ProgramPoint
from m2flow.micro.records import checkpoints
from m2flow.micro.records.checkpoints import Point
from m2flow.micro.scheduler.state import Saves
from m2flow.spec import RunSettings


def update(version: int, role: str = "policy") -> Call:
    writes = (Effect(f"{role}.weights", version),)
    return Call(version, role, "update", "train", Granularity.BATCH, (), {}, (), writes, Site("a.py", 1, ""), 0, False)


def part(path: Path, body: bytes = b"weights") -> None:
    path.mkdir(parents=True)
    (path / "model").write_bytes(body)
    checkpoints.seal(path)


def made(run_dir: Path, step: int, versions: dict[str, int]) -> checkpoints.Checkpoint:
    partial = checkpoints.partial_path(run_dir, step, 0)
    for role, version in versions.items():
        part(partial / role, b"%d" % version)
    return checkpoints.commit(partial, Point(10 * (step + 1), step, versions, dict.fromkeys(versions, "digest")))


def test_a_write_of_newer_weights_waits_until_its_role_begins_to_save_and_no_other_write_does():
    saves = Saves()
    saves.add(3, "/run/.step", {"policy": 4, "critic": 8}, behind=False)
    assert not saves.holds(update(4))
    assert saves.holds(update(5))
    assert not saves.holds(update(5, "critic"))
    assert saves.holds(update(9, "critic"))
    assert not saves.holds(update(1, "other"))
    task = saves.begin("policy", 17)
    assert (task.role, task.path, task.seals) == ("policy", "/run/.step/policy", True)
    assert not saves.holds(update(5))
    assert saves.holds(update(9, "critic"))
    done = saves.done(17)
    assert done is not None
    assert (done[0], done[1].step, done[1].version) == ("policy", 3, 4)
    assert saves.done(17) is None


def test_a_checkpoint_is_read_back_as_it_was_committed_and_is_not_there_before(tmp_path):
    partial = checkpoints.partial_path(tmp_path, 6, 2)
    part(partial / "policy")
    assert checkpoints.newest_good(tmp_path, pytest.fail, lambda point: True) is None
    found = checkpoints.commit(partial, Point(70, 6, {"policy": 7}, {"policy": "digest"}))
    assert found.path == (tmp_path / "checkpoints" / "step-000007").resolve()
    assert checkpoints.newest_good(tmp_path, pytest.fail, lambda point: True) == found
    assert found.parts == {"policy": str(found.path / "policy")}
    assert not partial.exists()


def test_a_checkpoint_without_one_of_its_parts_is_not_committed(tmp_path):
    partial = checkpoints.partial_path(tmp_path, 0, 0)
    part(partial / "policy")
    with pytest.raises(EngineError, match="critic"):
        checkpoints.commit(partial, Point(10, 0, {"policy": 1, "critic": 1}))
    assert checkpoints.newest_good(tmp_path, pytest.fail, lambda point: True) is None


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_file_that_was_cut_short_is_found(tmp_path, cut):
    found = made(tmp_path, 0, {"policy": 123456})
    os.truncate(found.path / "policy" / "model", cut)
    with pytest.raises(ModelError, match=r"model is not what was written"):
        checkpoints.read(found.path)


def test_only_the_newest_stay_and_leftovers_go(tmp_path):
    for step in range(4):
        made(tmp_path, step, {"policy": step + 1})
    part(checkpoints.partial_path(tmp_path, 9, 0) / "policy")
    checkpoints.keep_newest(tmp_path, 2)
    checkpoints.clear_leftovers(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kept(coordinator: CheckpointCoordinator, versions: dict[str, int]) -> list[str]:
    """Carry out the checkpoint that is under way; the roles that were written."""
    assert coordinator._gathering is not None
    step, todo = coordinator._gathering.step, coordinator.begun(versions)
    for role, path in todo.items():
        part(path)
        coordinator.saved(step, role, f"digest of {role}@{versions[role]}")
    assert coordinator.finish(lambda num_calls: False, pytest.fail) is None
    durable: list[bool] = []
    assert coordinator.finish(lambda num_calls: True, lambda: durable.append(True)) is not None
    assert durable
    return list(todo)


def test_a_checkpoint_is_due_by_steps_or_by_time_and_none_while_one_is_under_way(tmp_path):
    clock = Clock()
    coordinator = CheckpointCoordinator(tmp_path, RunSettings(checkpoint_steps=3, checkpoint_s=100.0), 0, None, clock)
    assert coordinator.due(0, 5) is None
    assert coordinator.due(1, 10) is None
    due = coordinator.due(2, 15)
    assert due is not None
    assert due.known == {}
    assert coordinator.due(5, 30) is None
    assert kept(coordinator, {"policy": 3, "reference": 1}) == ["policy", "reference"]
    clock.now_s = 100.0
    due = coordinator.due(6, 35)
    assert due is not None
    assert due.known == {"policy": 3, "reference": 1}
    assert kept(coordinator, {"policy": 7, "reference": 1}) == ["policy"]
    newest = checkpoints.read(tmp_path / "checkpoints" / "step-000007")
    assert newest.point.digests == {"policy": "digest of policy@7", "reference": "digest of reference@1"}
    before = tmp_path / "checkpoints" / "step-000003" / "reference" / "model"
    assert os.path.samefile(before, newest.path / "reference" / "model")
    assert newest.point.num_calls == 35


def test_where_a_run_stops_a_checkpoint_that_can_not_be_whole_any_more_is_not_waited_for(tmp_path):
    point = ProgramPoint(2, {"policy": 3})
    for versions in (None, {"policy": 5}):
        for reached in (point, None):
            coordinator = CheckpointCoordinator(tmp_path, RunSettings(checkpoint_steps=1), 0, None)
            assert coordinator.due(4, 20) is not None
            if versions is not None:
                coordinator.begun(versions)
            due = coordinator.last(13, reached)
            assert (due is not None) == coordinator.is_gathering == (reached is not None)
    assert due is None
    coordinator = CheckpointCoordinator(tmp_path, RunSettings(checkpoint_steps=1), 0, None)
    coordinator.due(4, 13)
    coordinator.begun({"policy": 5})
    assert coordinator.last(13, None) is None
    assert coordinator.is_gathering, "all calls before its point are over"


def test_without_trained_roles_and_with_never_there_is_no_checkpoint(tmp_path):
    coordinator = CheckpointCoordinator(tmp_path, RunSettings(checkpoint_steps=1), 0, None)
    assert coordinator.due(0, 5) is not None
    assert coordinator.begun({}) == {}
    assert not (tmp_path / "checkpoints").exists()
    assert coordinator.due(1, 10) is not None
    assert CheckpointCoordinator(tmp_path, RunSettings(checkpoint_s=None), 0, None).due(10**6, 10**7) is None
