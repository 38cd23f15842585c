"""Scale the number of rollout workers of a running run: on request from outside, or automatically by what the run has measured.

    m2flow cluster scale --ask--> RUN/control/<number>.ask --requests--> Controller --answered_by--> <number>.answer
    who is at work, now and then --Autoscaler.saw--> windows --decide--> Change --ScalingLoop--> Supervisor.scale

Requests are files: whoever may write to the run's directory may ask, and the controller looks about once a second.

The autoscaler measures over windows how long generation alone kept everybody else waiting. Generation is taken to share out over workers,
so with w of them that part of the time would be w0 / w of what it was with w0. One more joins if the run is then predicted to be shorter
by `_PAYS`, over several windows in a row, and if what that saves within `_HORIZON_S` is more than a worker took to start. One leaves if
without it the run is predicted to be hardly longer (`_IDLE`). Between these two, and for some windows after a change, nothing happens
(hysteresis).

`Autoscaler` is pure: it is told the time. Limits: only the number of workers that generate changes, and so which samples each of them gets.
Which workers train, on which devices, in which layout, with which chunks and over which transports stays as planned; a resume with another
cluster spec plans all of that anew.
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
from m2flow.micro.controller.controller_core import Effect
from m2flow.micro.controller.supervisor import Supervisor
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.journal import Journal
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.spec import ClusterSpec

# ---- requests from outside

_DIRECTORY, _ASK, _ANSWER = "control", ".ask", ".answer"
_LOOKS_S = 0.1


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rollout: int
    """Change of the number of rollout workers."""


_read_ask = msgspec.json.Decoder(_Ask).decode


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    now: str = ""
    is_done: bool = True


_read_answer = msgspec.json.Decoder(_Answer).decode


@final
class Request:
    """A scaling request that is not answered yet."""

    def __init__(self, path: Path, change: int) -> None:
        self._path = path
        self._change = change

    def answered_by(self, scale: Callable[[int], tuple[list[Effect], str]]) -> list[Effect]:
        """Carry out the request with `scale`, write the answer, and return what follows."""
        try:
            effects, what = scale(self._change)
            answer = _Answer(what)
        except SpecError as error:
            effects, answer = [], _Answer(error.what, error.now, is_done=False)
        _write(self._path.with_suffix(_ANSWER), msgspec.json.encode(answer))
        return effects


def requests(run_dir: Path) -> Iterator[Request]:
    """Yield the requests that have arrived, each once. Files that can't be read are passed over."""
    for path in sorted((run_dir / _DIRECTORY).glob(f"*{_ASK}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            change = _read_ask(path.read_bytes()).rollout
            path.unlink()
            yield Request(path, change)


def ask(run_dir: Path, change: int, *, patience_s: float) -> str:
    """Ask a run for `change` more rollout workers, or fewer if negative; wait for its answer and return that.

    Raises:
        SpecError: the request was refused, or nobody has answered: the run is over, or was killed.
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
    said = _read_answer(answer.read_bytes())
    answer.unlink()
    if not said.is_done:
        raise SpecError(said.what, now=said.now)
    return said.what


def _write(path: Path, body: bytes) -> None:
    """Write a file atomically."""
    made = path.with_name(f".{path.name}")
    made.write_bytes(body)
    os.replace(made, path)


# ---- automatic scaling

_PAYS = 0.05
"""Predicted saving, as a share of the run's time, from which a worker is added."""
_IDLE = 0.01
"""Predicted loss, as a share of the run's time, up to which a worker is removed."""
_IN_A_ROW = 3
"""Windows in a row that must agree."""
_HORIZON_S = 600.0
"""Time within which an added worker must have saved its start-up time."""


@dataclass(frozen=True)
class Change:
    """A change of the number of rollout workers, and the reason in words."""

    by: int
    why: str


@final
class Autoscaler:
    """Decide when one run should have one rollout worker more or fewer. Pure.

    Args:
        window_s: length of a window of measurement, in seconds.
    """

    def __init__(self, *, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._alone_s = 0.0
        self._num_up = self._num_down = 0

    def saw(self, now_s: float, *, generates: bool, trains: bool) -> None:
        """Note whether anybody has been generating since the last call, and whether anybody has been training."""
        if self._began_s is None:
            self._began_s = self._seen_s = now_s
        if generates and not trains:
            self._alone_s += now_s - self._seen_s
        self._seen_s = now_s

    def decide(self, now_s: float, *, num_workers: int, num_spare: int, start_s: float) -> Change | None:
        """Return the change to make at the end of a window; None for none, or within a window.

        Args:
            num_workers: workers that generate now. num_spare: workers that could join.
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
class ScalingLoop:
    """Have the supervisor carry out what `Autoscaler` decides. The controller's thread calls `look` about once a second."""

    def __init__(self, spec: ClusterSpec, plan: Plan, supervisor: Supervisor, scheduler: Scheduler, journal: Journal) -> None:
        self._autoscaler = Autoscaler(window_s=spec.rollout.replan_s) if spec.rollout.scale == "auto" else None
        kinds = {worker.name: {slot.kind for slot in worker.engines} for worker in plan.workers}
        self._rollouts = {name for name, found in kinds.items() if found == {"rollout"}}
        self._trainers = {name for name, found in kinds.items() if "train" in found}
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._journal = journal

    def look(self, now_s: float) -> list[Effect]:
        """Measure, scale if it is time, and return what follows from workers that leave; those that join report when they are up."""
        if self._autoscaler is None or not self._supervisor.is_ready:
            return []
        busy = self._scheduler.running().keys()
        self._autoscaler.saw(now_s, generates=not busy.isdisjoint(self._rollouts), trains=not busy.isdisjoint(self._trainers))
        there = self._supervisor.rollouts
        change = self._autoscaler.decide(now_s, num_workers=there.num_up, num_spare=there.num_away, start_s=there.start_s)
        if change is None:
            return []
        try:
            effects, what = self._supervisor.scale(change.by)
        except SpecError:  # A worker has left in this moment.
            return []
        self._journal.incident("re-planned", "controller", f"{change.why}: {what}")
        return effects
