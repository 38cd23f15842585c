"""One queue, the longest expected first, by what is known when a slot is free."""

from __future__ import annotations

from m2flow.micro.rollouts.cluster import Seen
from m2flow.micro.rollouts.policies.predicted import Predicted


class LongestFirst(Predicted):
    name = "longest-first"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._order()

    def next_sample(self, instance: int) -> int | None:
        if self.expected()[1]:
            self._order()
        while self._queue and self._queue[-1] not in self._seen.waiting:
            self._queue.pop()
        return self._queue[-1] if self._queue else None

    def _order(self) -> None:
        """The last is the next."""
        self._queue = sorted(self._seen.waiting, key=lambda sample: (self._rank(float(self._expected[sample])), -self._turn[sample]))

    def _rank(self, expected: float) -> float:
        """What is started last ranks first."""
        return round(expected, 6)
