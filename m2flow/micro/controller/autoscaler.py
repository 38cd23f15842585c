"""How many rollout workers a run should have: asked from outside, or from what it has measured.

m2flow cluster scale --ask--> RUN/control/<number>.ask --requests--> Controller --answered_by--> <number>.answer

Whoever may write to the run's directory may ask. The controller looks about once a second.

who is at work, now and then --Replanning.saw--> windows --decide--> a change of their number, and why --Staffing--> Crew

A window says for how long generation alone kept everybody waiting. Generation is taken to share out over workers, so with w of them
that part of the time would be w0 / w of what it was. One more joins if the run is then predicted to be shorter by `_PAYS`, over several
windows in a row, and if what that saves within `_HORIZON_S` is more than a worker took to start. One leaves if without it the run is
predicted to be hardly longer (`_IDLE`). Between these two, and for some windows after a change, nothing happens: what is gained by a
hair is lost by a hair in the next window.

`Replanning` is pure: told the time. Limits: it changes how many workers generate, and so which samples each of them gets. Who trains, on
which devices, in which layout, with which chunks and over which transports stays as the plan said; a resumption with another cluster
spec plans all of that anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import SpecError
from m2flow.micro.controller.supervisor import Supervisor
from m2flow.micro.protocol.events import Event
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.journal import Journal
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.spec import ClusterSpec

_DIRECTORY, _ASK, _ANSWER = "control", ".ask", ".answer"
_LOOKS_S = 0.1


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rollout: int
    """So many more, or fewer."""


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    now: str = ""
    is_done: bool = True


@final
class Request:
    """One that is not answered yet."""

    def __init__(self, path: Path, change: int) -> None:
        self._path = path
        self._change = change

    def answered_by(self, scale: Callable[[int], tuple[list[Event], str]]) -> list[Event]:
        """Have it done, and say so to who has asked."""
        try:
            events, what = scale(self._change)
            answer = _Answer(what)
        except SpecError as error:
            events, answer = [], _Answer(error.what, error.now, is_done=False)
        _write(self._path.with_suffix(_ANSWER), msgspec.json.encode(answer))
        return events


def requests(run_dir: Path) -> Iterator[Request]:
    """Those that have come; each is given once. What can't be read is passed over."""
    for path in sorted((run_dir / _DIRECTORY).glob(f"*{_ASK}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            change = msgspec.json.decode(path.read_bytes(), type=_Ask).rollout
            path.unlink()
            yield Request(path, change)


def ask(run_dir: Path, change: int, *, patience_s: float) -> str:
    """Ask for so many rollout workers more, or fewer; what was answered.

    Raises:
        SpecError: it can't be done, or nobody has answered: the run is over, or was killed.
    """
    directory = run_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"{time.time_ns()}-{secrets.token_hex(4)}{_ASK}"
    answer = path.with_suffix(_ANSWER)
    _write(path, msgspec.json.encode(_Ask(change)))
    deadline = time.monotonic() + patience_s
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(_LOOKS_S)
    if not answer.exists():
        path.unlink(missing_ok=True)
        raise SpecError(
            f"{run_dir} has not answered in {patience_s:.0f} s", now="Is it still running? `m2flow doctor RUN` says how it stands."
        )
    said = msgspec.json.decode(answer.read_bytes(), type=_Answer)
    answer.unlink()
    if not said.is_done:
        raise SpecError(said.what, now=said.now)
    return said.what


def _write(path: Path, body: bytes) -> None:
    """Whole, or not there."""
    made = path.with_name(f".{path.name}")
    made.write_bytes(body)
    os.replace(made, path)


_PAYS = 0.05
"""A run that would be so much shorter, of its time, is worth a change."""
_IDLE = 0.01
"""One that would be longer by no more than this is worth a worker."""
_IN_A_ROW = 3
"""Windows that must say the same."""
_HORIZON_S = 600.0
"""A change must have paid by then."""


@dataclass(frozen=True)
class Change:
    """Of the number of workers."""

    by: int
    why: str


@final
class Autoscaler:
    """Of one run.

    Args:
        window_s: seconds of a window.
    """

    def __init__(self, *, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._alone_s = 0.0
        self._num_up = self._num_down = 0

    def saw(self, now_s: float, *, generates: bool, trains: bool) -> None:
        """Whether somebody was generating since the last time, and whether anybody else was at work."""
        if self._began_s is None:
            self._began_s = self._seen_s = now_s
        if generates and not trains:
            self._alone_s += now_s - self._seen_s
        self._seen_s = now_s

    def decide(self, now_s: float, *, num_workers: int, num_spare: int, start_s: float) -> Change | None:
        """What to change, at the end of a window.

        Args:
            num_workers: that generate now. num_spare: that could join.
            start_s: seconds that a worker takes to come up.
        """
        if self._began_s is None or now_s - self._began_s < self._window_s:
            return None
        share = self._alone_s / (now_s - self._began_s)
        self._began_s, self._seen_s, self._alone_s = now_s, now_s, 0.0
        shorter = share * (1 - num_workers / (num_workers + 1))
        longer = share * (num_workers / (num_workers - 1) - 1) if num_workers > 1 else 1.0
        self._num_up = self._num_up + 1 if num_spare and shorter >= _PAYS else 0
        self._num_down = self._num_down + 1 if longer <= _IDLE else 0
        seen = f"generation alone took {share:.0%} of the last {self._window_s:.0f} s"
        if self._num_up >= _IN_A_ROW and shorter * _HORIZON_S > start_s:
            self._num_up = self._num_down = 0
            return Change(1, f"{seen}; with {num_workers + 1} rollout workers the run is predicted to take {shorter:.0%} less time")
        if self._num_down >= _IN_A_ROW:
            self._num_up = self._num_down = 0
            return Change(-1, f"{seen}; with {num_workers - 1} rollout workers the run is predicted to take {longer:.1%} more time")
        return None


@final
class Staffing:
    """Has the crew carry out what `Replanning` decides. The controller's thread asks it about once a second."""

    def __init__(self, spec: ClusterSpec, plan: Plan, crew: Supervisor, scheduler: Scheduler, journal: Journal) -> None:
        self._replanning = Autoscaler(window_s=spec.rollout.replan_s) if spec.rollout.scale == "auto" else None
        kinds = {worker.name: {slot.kind for slot in worker.engines} for worker in plan.workers}
        self._rollouts = {name for name, found in kinds.items() if found == {"rollout"}}
        self._trainers = {name for name, found in kinds.items() if "train" in found}
        self._crew = crew
        self._scheduler = scheduler
        self._journal = journal

    def look(self, now_s: float) -> list[Event]:
        """What the scheduler should know of workers that leave; those that join come up by themselves."""
        if self._replanning is None or not self._crew.is_ready:
            return []
        busy = self._scheduler.running().keys()
        self._replanning.saw(now_s, generates=not busy.isdisjoint(self._rollouts), trains=not busy.isdisjoint(self._trainers))
        there = self._crew.rollouts
        change = self._replanning.decide(now_s, num_workers=there.num_up, num_spare=there.num_away, start_s=there.start_s)
        if change is None:
            return []
        try:
            events, what = self._crew.scale(change.by)
        except SpecError:  # Somebody has left in this moment.
            return []
        self._journal.incident("re-planned", "controller", f"{change.why}: {what}")
        return events
