"""One queue, the shortest expected first: the mean wait is least, and the makespan about the worst."""

from __future__ import annotations

from m2flow.micro.rollouts.policies.longest_first import LongestFirst


class ShortestFirst(LongestFirst):
    name = "shortest-first"

    def _rank(self, expected: float) -> float:
        return -super()._rank(expected)
