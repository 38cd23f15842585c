"""Coordinate checkpoints: decide when one is due and of which point of the program, gather its parts, and commit it when it is whole.

    flow's thread: end of a step --due--> a directory, if it is time
    whoever does the work:              --begun, saved--> parts gather --finish--> committed once all calls before its point are over

    calls, as the program makes them --ProgramHistory--> at(number of calls that are over) -> ProgramPoint (step, versions), or None

Periodic checkpoints are of the end of a step, so that a resumed run has no values by older weights to compute again. A run that is stopped
may be checkpointed at any point (`ProgramHistory`), unless that would replace weights whose values something after it still needs: what a
trainer computed with older weights (log-probabilities, a critic's values) is in no record.

Nobody waits for a checkpoint, with `RunSettings.checkpoint_behind` not even the trainer for its files. While one is under way the next is
not begun, and a step whose evaluation takes long delays only its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, final

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.macro.replay import BackendWrapper
from m2flow.macro.session import Backend
from m2flow.micro.protocol.call_semantics import gives_reward
from m2flow.micro.protocol.events import CheckpointDue
from m2flow.micro.records import checkpoints
from m2flow.micro.records.checkpoints import Checkpoint, Point
from m2flow.spec import RunSettings


class ProgramPoint(NamedTuple):
    """A point of the program that a run could resume from."""

    step: int
    """Step of the last call that trained."""
    versions: dict[str, int]
    """Role -> version of its weights."""


@dataclass
class _Unrecorded:
    """Rows in no record: a resumed run could only recompute them, with the weights of that time."""

    read: list[tuple[str, int]]
    """Roles and weight versions that they were computed with."""
    is_released: bool = False
    users: list[int] = field(default_factory=list)


@final
class ProgramHistory:
    """Remember weight versions written and unrecorded rows computed by the program's calls, to find points to resume from. Pure."""

    def __init__(self) -> None:
        self._writes: list[tuple[int, int, str, int]] = []
        """Call, step, role and version in program order; of calls that are over, only the last of each role."""
        self._unrecorded: dict[int, _Unrecorded] = {}

    def added(self, call: Call) -> None:
        for effect in call.writes if call.engine == "train" else ():
            self._writes.append((call.ordinal, call.step, call.role, effect.version))
        read = [(call.role, effect.version) for effect in call.reads] if call.engine == "train" else []
        for _, ref in call.inputs:
            if ref.call in self._unrecorded:
                self._unrecorded[ref.call].users.append(call.ordinal)
                read += self._unrecorded[ref.call].read if call.engine == "function" else []
        if call.is_aligned and not call.writes and read and not gives_reward(call):
            self._unrecorded[call.ordinal] = _Unrecorded(read)

    def released(self, ordinal: int) -> None:
        """Note that the program can't reach a call's result any more."""
        if ordinal in self._unrecorded:
            self._unrecorded[ordinal].is_released = True

    def at(self, num_calls: int) -> ProgramPoint | None:
        """Return the point after the first `num_calls` calls; None if a run could not resume from there."""
        step, versions = self._point(num_calls)
        for ordinal, rows in self._unrecorded.items():
            is_needed = ordinal < num_calls and self._is_needed(rows, num_calls)
            if is_needed and any(version < versions.get(role, 0) for role, version in rows.read):
                return None
        return ProgramPoint(step, versions)

    def over(self, num_calls: int) -> None:
        """Note that the first `num_calls` calls are over; earlier points will not be asked for."""
        latest = {role: entry for entry in self._writes if entry[0] < num_calls for role in [entry[2]]}
        self._writes = sorted([*latest.values(), *(entry for entry in self._writes if entry[0] >= num_calls)])
        self._unrecorded = {
            ordinal: rows for ordinal, rows in self._unrecorded.items() if ordinal >= num_calls or self._is_needed(rows, num_calls)
        }

    def _point(self, num_calls: int) -> tuple[int, dict[str, int]]:
        step, versions = -1, {}
        for ordinal, at_step, role, version in self._writes:
            if ordinal < num_calls:
                step, versions[role] = max(step, at_step), version
        return step, versions

    def _is_needed(self, rows: _Unrecorded, num_calls: int) -> bool:
        return not rows.is_released or any(user >= num_calls for user in rows.users)


@dataclass
class _Gathering:
    """A checkpoint under way."""

    step: int
    num_calls: int
    path: Path
    versions: dict[str, int] | None = None
    """None until `begun`, when the trainers are asked to save."""
    digests: dict[str, str] = field(default_factory=dict)


@final
class CheckpointCoordinator:
    """Begin, gather and commit one run's checkpoints. The flow's thread calls `due`; the controller's thread, or the same, the rest."""

    def __init__(
        self, run_dir: Path, settings: RunSettings, attempt: int, newest: Checkpoint | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._attempt = attempt
        self._newest = newest
        self._clock = clock
        self._lock = threading.Lock()
        self._gathering: _Gathering | None = None
        self._last_step = -1 if newest is None else newest.point.step
        self._last_s = clock()

    def due(self, step: int, num_calls: int) -> CheckpointDue | None:
        """Return the checkpoint to begin now that a step has ended after `num_calls` calls of the program; None if none is due."""
        settings = self._settings
        with self._lock:
            if self._gathering is not None or step <= self._last_step:
                return None
            by_steps = settings.checkpoint_steps is not None and step - self._last_step >= settings.checkpoint_steps
            by_time = settings.checkpoint_s is not None and self._clock() - self._last_s >= settings.checkpoint_s
            if not (by_steps or by_time):
                return None
            path = checkpoints.partial_path(self._run_dir, step, self._attempt)
            self._gathering = _Gathering(step, num_calls, path)
            self._last_step, self._last_s = step, self._clock()
            known = {} if self._newest is None else self._newest.point.versions
            return CheckpointDue(step, str(path), dict(known), behind=settings.checkpoint_behind)

    def last(self, num_calls: int, point: ProgramPoint | None) -> CheckpointDue | None:
        """Return the checkpoint to begin where the run stops, with `num_calls` calls over; None if none is needed or one is under way.

        One under way that can't be whole any more is dropped: it was not begun, or a call before its point will never be over.

        Args:
            point: what has been reached; None: the run can't resume from there.
        """
        settings = self._settings
        with self._lock:
            found, newest = self._gathering, self._newest
            if found is not None and found.versions is not None and point is not None and found.versions == point.versions:
                found.num_calls = min(found.num_calls, num_calls)
            if found is not None and found.versions is not None and found.num_calls <= num_calls:
                return None
            self._gathering = None
            is_wanted = settings.checkpoint_steps is not None or settings.checkpoint_s is not None
            is_known = newest is not None and point is not None and dict(newest.point.versions) == point.versions
            if point is None or is_known or not point.versions or not is_wanted or (found is not None and found.step == point.step):
                return None
            path = checkpoints.partial_path(self._run_dir, point.step, self._attempt)
            self._gathering = _Gathering(point.step, num_calls, path)
            return CheckpointDue(point.step, str(path), {} if newest is None else dict(newest.point.versions), point.versions)

    @property
    def is_gathering(self) -> bool:
        """Whether a checkpoint is under way."""
        with self._lock:
            return self._gathering is not None

    def begun(self, versions: Mapping[str, int]) -> dict[str, Path]:
        """Fix the versions of the checkpoint under way; return which roles must be saved, and where to.

        Parts whose version is in the checkpoint before are linked to it. Without a trained role the checkpoint is dropped.
        """
        with self._lock:
            found = self._gathering
            assert found is not None
            if not versions:
                self._gathering = None
                return {}
            found.versions = dict(versions)
            found.path.mkdir(parents=True, exist_ok=True)
            if self._newest is not None:
                before = self._newest.point
                for role, version in versions.items():
                    if before.versions.get(role) == version:
                        checkpoints.link(self._newest.path / role, found.path / role)
                        found.digests[role] = before.digests[role]
            return {role: found.path / role for role in versions if role not in found.digests}

    def saved(self, step: int, role: str, digest: str) -> None:
        """Note that a role's part of the checkpoint of this step is on disk. Of one that was dropped meanwhile, it is removed."""
        with self._lock:
            if self._gathering is not None and self._gathering.step == step:
                self._gathering.digests[role] = digest
            else:
                self._remove(step)

    def failed(self, step: int) -> bool:
        """Drop the checkpoint of this step, of which a part could not be written, so that the next step's end begins another; return
        whether it was under way."""
        with self._lock:
            found = self._gathering
            self._remove(step)
            if found is None or found.step != step:
                return False
            self._gathering = None
            self._last_step, self._last_s = -1 if self._newest is None else self._newest.point.step, -math.inf
            return True

    def _remove(self, step: int) -> None:
        """Remove what there is of a dropped checkpoint."""
        shutil.rmtree(checkpoints.partial_path(self._run_dir, step, self._attempt), ignore_errors=True)

    def finish(self, are_well: Callable[[int], bool], make_durable: Callable[[], None]) -> Checkpoint | None:
        """Commit the checkpoint under way if all its parts are on disk and all calls before its point are over.

        Args:
            are_well: whether the first so many calls of the program are over, and none of them failed.
            make_durable: writes the ledger to disk, before the commit.
        """
        with self._lock:
            found = self._gathering
            if found is None or found.versions is None or found.digests.keys() < found.versions.keys() or not are_well(found.num_calls):
                return None
            _sync_segments(self._run_dir)
            make_durable()
            self._newest = checkpoints.commit(found.path, Point(found.num_calls, found.step, found.versions, found.digests))
            checkpoints.keep_newest(self._run_dir, self._settings.checkpoints_kept)
            self._gathering = None
            return self._newest


class CheckpointingBackend(BackendWrapper):
    """A backend that begins a checkpoint at the end of each step where one is due.

    Args:
        begin: begins a checkpoint, before the end of the step is waited for. end: is told the step, after that wait.
        num_over: how many calls, from the program's first, are over without an error that is due.
    """

    def __init__(
        self,
        live: Backend,
        coordinator: CheckpointCoordinator,
        *,
        begin: Callable[[CheckpointDue], None],
        end: Callable[[int], None],
        num_over: Callable[[], int],
    ) -> None:
        super().__init__(live)
        self._coordinator = coordinator
        self._begin = begin
        self._end = end
        self._num_over = num_over
        self._num_calls = 0
        self._history = ProgramHistory()

    def submit(self, call: Call) -> None:
        self._num_calls = call.ordinal + 1
        self._history.added(call)
        super().submit(call)

    def release(self, ordinal: int) -> None:
        self._history.released(ordinal)
        super().release(ordinal)

    def begin_last(self, holds: Callable[[Mapping[str, int]], bool]) -> CheckpointDue | None:
        """Return the checkpoint to begin where the run stops, if it can resume from this point and the trainers hold its weights."""
        num_calls = min(self._num_over(), self._num_calls)
        point = self._history.at(num_calls)
        return self._coordinator.last(num_calls, point if point is not None and holds(point.versions) else None)

    def end_step(self, step: int) -> None:
        due = self._coordinator.due(step, self._num_calls)
        if due is not None:
            self._begin(due)
        super().end_step(step)
        self._history.over(min(self._num_over(), self._num_calls))
        if due is not None:
            self._end(step)


def failed_checkpoint(step: int, role: str, error: M2FlowError) -> str:
    """A warning: a part could not be written while training went on."""
    now = f" {error.now}" if error.now else ""
    what = f"the checkpoint after step {step + 1} was not made, since {role} could not be written: {error.what}"
    return f"{what}. The run goes on, and the next step ends with another try.{now}"


class Saver(Protocol):
    """What saves the parts of an eager run's checkpoint (`m2flow.micro.worker.eager_executor`)."""

    @property
    def versions(self) -> Mapping[str, int]: ...

    def save_part(self, role: str, path: Path) -> str: ...


def checkpoint_eagerly(coordinator: CheckpointCoordinator, step: int, saver: Saver, make_durable: Callable[[], None]) -> None:
    """Write the checkpoint under way in this thread: in an eager run all calls up to its point are over."""
    for role, path in coordinator.begun(dict(saver.versions)).items():
        coordinator.saved(step, role, saver.save_part(role, path))
    coordinator.finish(lambda num_calls: True, make_durable)


def _sync_segments(run_dir: Path) -> None:
    """Flush the workers' segment files to disk."""
    for path in (run_dir / "segments").glob("*.seg"):
        with contextlib.suppress(FileNotFoundError):
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
