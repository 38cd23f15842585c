"""Calls of roles' engines that a desk may still hand something out of, by role, earliest in the program first.

A generation is open until all of its samples are handed out; it and a trainer's call have started when they wait for nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import final

from m2flow.micro.scheduling.tracking import CallState


@final
class OpenCalls:
    """Kept up to date by the board; a desk sees each call of interest and no other."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, CallState]] = {}
        self._started: dict[tuple[str, str], list[CallState]] = {}
        self._first: dict[str, CallState | None] = {}

    def add(self, state: CallState) -> None:
        """A new call, which may have to wait."""
        if state.call.engine == "rollout":
            self._open.setdefault(state.call.role, {})[state.call.ordinal] = state
            self.changed(state.call.role)

    def reopen(self, state: CallState) -> None:
        """A call has something to hand out again."""
        if state.call.engine == "rollout":
            known = self._open.setdefault(state.call.role, {})
            known[state.call.ordinal] = state
            self._open[state.call.role] = dict(sorted(known.items()))
            self.changed(state.call.role)

    def start(self, state: CallState) -> bool:
        """A call waits for nothing any more; False if that was known."""
        started = self._started.setdefault((state.call.engine, state.call.role), [])
        place = bisect.bisect_left(started, state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is state:
            return False
        started.insert(place, state)
        return True

    def close(self, state: CallState) -> bool:
        """Nothing of a call is left to hand out; False if that was known."""
        started = self._started.get((state.call.engine, state.call.role), [])
        place = bisect.bisect_left(started, state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is state:
            del started[place]
        if self._open.get(state.call.role, {}).pop(state.call.ordinal, None) is None:
            return False
        self.changed(state.call.role)
        return True

    def changed(self, role: str) -> None:
        """Which of a role's generations is the first may be another one now."""
        self._first.pop(role, None)

    def started(self, kind: str, role: str) -> Sequence[CallState]:
        """The calls that wait for nothing."""
        return self._started.get((kind, role), ())

    def first(self, role: str) -> tuple[bool, CallState | None]:
        """Whether `set_first` has said it since the last change; and the earliest open generation that can run."""
        return role in self._first, self._first.get(role)

    def set_first(self, role: str, can_run: Callable[[CallState], bool]) -> CallState | None:
        """Find the earliest open generation that can run."""
        self._first[role] = next((state for state in self._open.get(role, {}).values() if can_run(state)), None)
        return self._first[role]


def _ordinal(state: CallState) -> int:
    return state.call.ordinal
