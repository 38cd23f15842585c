"""Calls that may have work to hand out, earliest in the program first.

Whoever makes work possible (rows that came in, a call that was waited for) says `may_start`; whoever hands work out asks for the
first that really has some. Asking costs nothing while that one has more, so a step of a thousand calls is no slower a call than one
of ten.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import final

from m2flow.micro.tracking import CallState


@final
class StartQueue:
    """The calls of one kind of engine, by the workers that may run them."""

    def __init__(self, has_work: Callable[[CallState], bool]) -> None:
        self._has_work = has_work
        self._heaps: dict[tuple[str, ...], list[tuple[int, CallState]]] = {}
        self._queued: set[int] = set()

    def may_start(self, state: CallState) -> None:
        """A call may have work now."""
        ordinal = state.call.ordinal
        if ordinal not in self._queued:
            self._queued.add(ordinal)
            heapq.heappush(self._heaps.setdefault(state.stage.workers, []), (ordinal, state))

    def first(self, may_take: Callable[[tuple[str, ...]], bool]) -> CallState | None:
        """The earliest call with work, of those whose workers pass `may_take`."""
        found: CallState | None = None
        for workers, heap in self._heaps.items():
            if not may_take(workers):
                continue
            while heap and (heap[0][1].is_over or not self._has_work(heap[0][1])):
                self._queued.discard(heapq.heappop(heap)[0])
            if heap and (found is None or heap[0][0] < found.call.ordinal):
                found = heap[0][1]
        return found
