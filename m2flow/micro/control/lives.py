"""The workers' lives: who is up, when each was last heard of, and what is wrong with one that is not.

    beats, messages, exit codes --Lives--> None, or the WorkerError that says which worker is lost, and how

It asks the launcher which processes have ended and the scheduler what each was doing; it speaks on no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import final

from m2flow.errors import M2FlowError, StateLost, WorkerError
from m2flow.micro.control.launcher import LocalLauncher

_SETTLES_S = 1.0
"""A worker that dies is missed on its link first, and found to have ended a moment later."""


@final
class Lives:
    """Of one plan's workers. The controller's thread alone uses it."""

    def __init__(self, launcher: LocalLauncher, doing: Callable[[], Mapping[str, str]], *, hung_after_s: float) -> None:
        """
        Args:
            doing: what each worker does now, in words.
        """
        self._launcher = launcher
        self._doing = doing
        self._hung_after_s = hung_after_s
        self._last_seen_s: dict[str, float] = {}
        self._up: dict[str, None] = {}
        self._gone: set[str] = set()

    def seen(self, worker: str) -> None:
        """A sign of life."""
        self._last_seen_s[worker] = time.monotonic()

    def came_up(self, worker: str) -> None:
        """Its engines have loaded."""
        self._up[worker] = None

    def said_goodbye(self, worker: str) -> None:
        """Its last word, as it was told to."""
        self._gone.add(worker)

    @property
    def up(self) -> Iterable[str]:
        """Who has come up, in the order of their coming."""
        return self._up

    @property
    def have_all_gone(self) -> bool:
        """Whether everybody who came up has said goodbye."""
        return self._gone >= self._up.keys()

    @property
    def are_leaving(self) -> bool:
        """Whether somebody who came up has yet to say goodbye, or to die."""
        return bool(self._up.keys() - self._gone - self._launcher.ended().keys())

    def check(self) -> None:
        """Raises if a worker ended by itself or gave no sign of life for too long."""
        for worker, code in self._launcher.ended().items():
            if worker not in self._gone:
                raise self.ended(worker, f"was killed by signal {-code}" if code < 0 else f"ended with status {code}")
        now = time.monotonic()
        for worker in self._up:
            silent_s = now - self._last_seen_s.get(worker, now)
            if silent_s > self._hung_after_s:
                raise self._lost(worker, f"the worker {worker} gave no sign of life for {silent_s:.0f} s")

    def why(self, error: M2FlowError) -> M2FlowError:
        """A link is broken: which worker has died, if that is why."""
        deadline = time.monotonic() + _SETTLES_S
        while time.monotonic() < deadline:
            try:
                self.check()
            except WorkerError as lost:
                return lost
            time.sleep(0.02)
        return error

    def ended(self, worker: str, how: str = "ended") -> WorkerError:
        """The error of a worker that has ended in this way."""
        return self._lost(worker, f"the worker {worker} (pid {self._launcher.pid(worker)}) {how}")

    def _lost(self, worker: str, what: str) -> WorkerError:
        doing, log = self._doing().get(worker), self._launcher.log_path(worker)
        return (StateLost if self._launcher.has_trainer(worker) else WorkerError)(
            what + (f", in the middle of {doing}" if doing else ""),
            now=f"Samples and rewards up to here are in {log.parent.parent}. Its last words are in {log}.",
            remote=self._launcher.log_tail(worker),
        )
