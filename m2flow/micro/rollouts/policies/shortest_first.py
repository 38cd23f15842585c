"""The shortest expected first: the mean wait is least, and the makespan about the worst. For early training.

Source: SortedRL (abstract) trains on short answers first.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policies.longest_first import LongestFirst


class ShortestFirst(LongestFirst):
    name = "shortest-first"

    def rank(self, sample: int) -> tuple[float, ...]:
        longest, turn = super().rank(sample)
        return -longest, turn
