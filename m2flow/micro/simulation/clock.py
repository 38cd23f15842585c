"""Virtual time: what happens next, in order of time; of two at the same time, what was set first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import final

Action = Callable[[], None]


@final
class Clock:
    """Starts at 0 seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, when_s: float, action: Action) -> None:
        """Do this then; at once if that is past."""
        self.num_events += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self.num_events, action))

    @property
    def next_s(self) -> float | None:
        """When the next thing happens; None: nothing does."""
        return self._heap[0][0] if self._heap else None

    def turn(self) -> None:
        """Go on to the next thing, and do it."""
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
