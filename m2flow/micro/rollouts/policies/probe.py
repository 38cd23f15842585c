"""One sample of each group goes first and stands for the others: groups are taken longest first, by the longest that has ended.

A group of which nothing has ended counts as the longest there is. That pays only if members are alike, so it is done from the second
step on, and only if the correlation measured so far justifies it (`GATE`); else first come, first served.

Source: Seer (arXiv 2511.14617), context-aware scheduling; the gate is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from m2flow.micro.rollouts.correlation import log_length_icc
from m2flow.micro.rollouts.policy import Policy, Seen

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
        self.seen = seen
        self._probes = {members[0] for members in seen.members if members}
        self._longest = [0] * len(seen.members)
        for sample, length in seen.finished.items():
            self._longest[seen.groups[sample]] = max(self._longest[seen.groups[sample]], length)
        self._reranked: set[int] = set()

    def rank(self, sample: int) -> tuple[float, ...]:
        if not self.is_open:
            return (0.0,)
        return (0.0,) if sample in self._probes else (1.0, -(self._longest[self.seen.groups[sample]] or math.inf))

    def reranked(self) -> Iterable[int]:
        found, self._reranked = self._reranked, set()
        return found

    def ended(self, sample: int, length: int) -> None:
        group = self.seen.groups[sample]
        if length > self._longest[group]:
            self._longest[group] = length
            if self.is_open:
                self._reranked.update(other for other in self.seen.members[group] if other in self.seen.waiting)

    def end(self) -> None:
        finished = self.seen.finished
        groups = [[finished[sample] for sample in members if sample in finished] for members in self.seen.members]
        self._correlation_low = log_length_icc(groups).low
