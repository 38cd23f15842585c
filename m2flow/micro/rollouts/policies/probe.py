"""One sample of each group goes first and stands for the others: groups are taken longest first, by the longest that has ended.

A group of which nothing has ended counts as the longest there is. That pays only if members are alike, so it is done from the second
step on, and only if the correlation measured so far justifies it (`GATE`); else first come, first served.

Source: Seer (arXiv 2511.14617), context-aware scheduling; the gate is ours.
"""

from __future__ import annotations

import math

from m2flow.micro.rollouts.cluster import Policy, Seen
from m2flow.micro.rollouts.correlation import log_length_icc

GATE = 0.3
"""The least correlation of log length in a group, by the lower end of its 95% interval."""


class Probe(Policy):
    name = "probe"

    def __init__(self) -> None:
        self._correlation_low = -1.0

    @property
    def is_open(self) -> bool:
        """Whether what was measured justifies probing."""
        return self._correlation_low >= GATE

    def begin(self, seen: Seen) -> None:
        self._seen = seen
        self._longest = [0] * len(seen.members)
        self._left = [list(members) for members in seen.members]
        self._probes = list(range(len(seen.members)))[::-1]

    def ended(self, sample: int, length: int) -> None:
        group = self._seen.groups[sample]
        self._longest[group] = max(self._longest[group], length)

    def next_sample(self, instance: int) -> int | None:
        if not self.is_open:
            return next(iter(self._seen.waiting), None)
        if self._probes:
            return self._left[self._probes.pop()].pop(0)
        group = max((g for g, left in enumerate(self._left) if left), key=lambda g: self._longest[g] or math.inf, default=None)
        return self._left[group].pop(0) if group is not None else None

    def end(self) -> None:
        seen = self._seen
        self._correlation_low = log_length_icc([[seen.finished[sample] for sample in members] for members in seen.members]).low
