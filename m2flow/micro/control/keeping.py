"""When checkpoints are made, and when one is whole.

    the flow's thread: end of a step --due--> a directory, if it is time
    whoever does the work:           --begun, saved--> parts gather --finish--> committed when all calls before its point are over

At the end of a step, so that a run which goes on from there has no values by older weights to make again; and where a run is stopped,
if it can be (`m2flow.micro.control.last_point`). Nobody waits for a checkpoint: while one is under way the next is not begun, and a step
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
from typing import Protocol, final

from m2flow.macro.graph import Call
from m2flow.macro.recording import Around
from m2flow.macro.session import Backend
from m2flow.micro.control.last_point import SoFar, Stand
from m2flow.micro.record import checkpoints
from m2flow.micro.record.checkpoints import Checkpoint, Point
from m2flow.micro.scheduling.events import CheckpointDue
from m2flow.spec import RunSettings


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


class Keeping(Around):
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
    """An eager run's engines (`m2flow.micro.work.inprocess`)."""

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
