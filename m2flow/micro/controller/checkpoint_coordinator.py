"""Coordinate checkpoints: when they are made, where a stopped run can be saved, and when one is whole.

calls, as the program makes them --SoFar--> at(number of calls that are over) -> Stand (step, versions), or None

A checkpoint that is due anyway is of the end of a step (`m2flow.micro.controller.checkpoint_coordinator`). This one may be of any
place, so it must not
replace weights whose values something after it still needs: what a trainer computed with older weights (log-probabilities, a critic's
values) is in no record. Pure bookkeeping, on the flow's thread.

the flow's thread: end of a step --due--> a directory, if it is time
    whoever does the work:           --begun, saved--> parts gather --finish--> committed when all calls before its point are over

At the end of a step, so that a run which goes on from there has no values by older weights to make again; and where a run is stopped,
if it can be (`m2flow.micro.controller.checkpoint_coordinator`). Nobody waits for a checkpoint: while one is under way the next is not
begun, and a step
whose evaluation takes long holds up only its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, final

from m2flow.macro.graph import Call
from m2flow.macro.replay import Around
from m2flow.macro.session import Backend
from m2flow.micro.protocol.events import CheckpointDue
from m2flow.micro.protocol.execute import gives_reward
from m2flow.micro.records import checkpoints
from m2flow.micro.records.checkpoints import Checkpoint, Point
from m2flow.spec import RunSettings


class Stand(NamedTuple):
    """The program so far."""

    step: int
    """Of the last call that trained."""
    versions: dict[str, int]
    """Of each role's weights."""


@dataclass
class _Unrecorded:
    """Rows that a resume could only compute again with the weights of then."""

    read: list[tuple[str, int]]
    """Roles and versions."""
    is_released: bool = False
    users: list[int] = field(default_factory=list)


@final
class SoFar:
    """The program's calls, as far as they matter here."""

    def __init__(self) -> None:
        self._writes: list[tuple[int, int, str, int]] = []
        """Call, step, role and version, in program order; of what is long over, the last of each role."""
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
        """The program can't reach a call's result any more."""
        if ordinal in self._unrecorded:
            self._unrecorded[ordinal].is_released = True

    def at(self, num_calls: int) -> Stand | None:
        """After the first so many calls; None if a run could not go on from there."""
        step, versions = self._stand(num_calls)
        for ordinal, rows in self._unrecorded.items():
            is_needed = ordinal < num_calls and self._is_needed(rows, num_calls)
            if is_needed and any(version < versions.get(role, 0) for role, version in rows.read):
                return None
        return Stand(step, versions)

    def over(self, num_calls: int) -> None:
        """The first so many calls are over; earlier points will not be asked for."""
        latest = {role: entry for entry in self._writes if entry[0] < num_calls for role in [entry[2]]}
        self._writes = sorted([*latest.values(), *(entry for entry in self._writes if entry[0] >= num_calls)])
        self._unrecorded = {
            ordinal: rows for ordinal, rows in self._unrecorded.items() if ordinal >= num_calls or self._is_needed(rows, num_calls)
        }

    def _stand(self, num_calls: int) -> tuple[int, dict[str, int]]:
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
    """None until those who save have been told."""
    digests: dict[str, str] = field(default_factory=dict)


@final
class Keeper:
    """One run's checkpoints. The flow's thread asks `due`; one other, or the same, does the rest."""

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
        """A step has ended, after so many calls of the program: what to begin now, if it is time."""
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
            return CheckpointDue(step, str(path), dict(known))

    def last(self, num_calls: int, stand: Stand) -> CheckpointDue | None:
        """The run ends here, where so many calls are over: what to begin now; None: nothing, but for what is under way."""
        settings = self._settings
        with self._lock:
            found, newest = self._gathering, self._newest
            is_known = newest is not None and dict(newest.point.versions) == stand.versions
            if found is not None and found.versions == stand.versions:
                found.num_calls = min(found.num_calls, num_calls)  # What was to be over by then never will be.
                return None
            is_wanted = settings.checkpoint_steps is not None or settings.checkpoint_s is not None
            if is_known or not stand.versions or not is_wanted or (found is not None and found.step == stand.step):
                self._gathering = None
                return None
            path = checkpoints.partial_path(self._run_dir, stand.step, self._attempt)
            self._gathering = _Gathering(stand.step, num_calls, path)
            return CheckpointDue(stand.step, str(path), {} if newest is None else dict(newest.point.versions), stand.versions)

    @property
    def is_gathering(self) -> bool:
        """Whether a checkpoint is under way."""
        with self._lock:
            return self._gathering is not None

    def begun(self, versions: Mapping[str, int]) -> dict[str, Path]:
        """The versions are known; what has to be saved, by role, and where to. Parts that the checkpoint before has are linked, and one
        without a trained role is none."""
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
        """A part is on the disk: of the checkpoint of this step, which may have been given up."""
        with self._lock:
            if self._gathering is not None and self._gathering.step == step:
                self._gathering.digests[role] = digest

    def finish(self, are_well: Callable[[int], bool], make_durable: Callable[[], None]) -> Checkpoint | None:
        """Commit the checkpoint that is under way, if all of it is there.

        Args:
            are_well: whether the first so many calls of the program are over, and none of them failed.
            make_durable: makes sure that the ledger knows so, first.
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


class CheckpointCoordinator(Around):
    """A backend whose program's steps end in checkpoints, where one is due.

    Args:
        begin: tells who does the work, before the step's end is waited for. end: after it, of this step.
        num_over: how many of the program's calls, from the first, are over and well.
    """

    def __init__(
        self,
        live: Backend,
        keeper: Keeper,
        *,
        begin: Callable[[CheckpointDue], None],
        end: Callable[[int], None],
        num_over: Callable[[], int],
    ) -> None:
        super().__init__(live)
        self._keeper = keeper
        self._begin = begin
        self._end = end
        self._num_over = num_over
        self._num_calls = 0
        self._so_far = SoFar()

    def submit(self, call: Call) -> None:
        self._num_calls = call.ordinal + 1
        self._so_far.added(call)
        super().submit(call)

    def release(self, ordinal: int) -> None:
        self._so_far.released(ordinal)
        super().release(ordinal)

    def begin_last(self, holds: Callable[[Mapping[str, int]], bool]) -> CheckpointDue | None:
        """The run ends where it is: the checkpoint to begin for it, if it can be of this point, and the trainers have its weights."""
        num_calls = min(self._num_over(), self._num_calls)
        stand = self._so_far.at(num_calls)
        return self._keeper.last(num_calls, stand) if stand is not None and holds(stand.versions) else None

    def end_step(self, step: int) -> None:
        due = self._keeper.due(step, self._num_calls)
        if due is not None:
            self._begin(due)
        super().end_step(step)
        self._so_far.over(min(self._num_over(), self._num_calls))
        if due is not None:
            self._end(step)


class Saver(Protocol):
    """An eager run's engines (`m2flow.micro.worker.eager_executor`)."""

    @property
    def versions(self) -> Mapping[str, int]: ...

    def save_part(self, role: str, path: Path) -> str: ...


def keep_eagerly(keeper: Keeper, step: int, saver: Saver, make_durable: Callable[[], None]) -> None:
    """Write the checkpoint that is under way: all calls up to its point are over."""
    for role, path in keeper.begun(dict(saver.versions)).items():
        keeper.saved(step, role, saver.save_part(role, path))
    keeper.finish(lambda num_calls: True, make_durable)


def _sync_segments(run_dir: Path) -> None:
    """What the workers wrote of samples is on the disk after this."""
    for path in (run_dir / "segments").glob("*.seg"):
        with contextlib.suppress(FileNotFoundError):
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
