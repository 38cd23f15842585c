"""The group that lacks the fewest answers first, so that whole groups can be scored and trained on early.

A sample that waits ranks by how many of its group are not done: those of a carried group, or of one whose other members ran elsewhere,
come before those of groups that have not begun.

Source: ROLL Flash and Seer take groups apart and have to put them together again; the rank is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.micro.rollouts.policy import Policy, Seen


class GroupCompleting(Policy):
    name = "group-completing"

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._left = [sum(sample not in seen.finished for sample in members) for members in seen.members]
        self._reranked: set[int] = set()

    def rank(self, sample: int) -> tuple[float, ...]:
        group = self.seen.groups[sample]
        return self._left[group], group

    def reranked(self) -> Iterable[int]:
        found, self._reranked = self._reranked, set()
        return found

    def ended(self, sample: int, length: int) -> None:
        group = self.seen.groups[sample]
        self._left[group] -= 1
        self._reranked.update(other for other in self.seen.members[group] if other in self.seen.waiting)
