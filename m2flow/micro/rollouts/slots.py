"""Put samples on the slots of one instance: each of at most B slots has room for `height` steps, the whole for `work` tokens.

    samples, longest first --fill--> slots of whole samples (+ what fits only in pieces) --lay_out--> pieces with a start step

Whole samples go by best fit, longest first. A sample in pieces is paused and goes on later in another slot of the same instance, so
it stays where its KV cache is; McNaughton's wrap-around needs one pause a slot at most, and only slots with large gaps get one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A stretch of a sample, in decode steps of its instance."""

    sample: int
    start: int
    steps: int


class Remaining:
    """The samples that no instance has yet, in the order of falling length. Positions are in that order."""

    def __init__(self, longest_first: Sequence[int]) -> None:
        self.lengths = longest_first
        self._negated = [-length for length in longest_first]
        self._next = list(range(len(longest_first) + 1))
        """Where to look on from a position that is taken; a forest with path halving."""

    def at_or_after(self, position: int) -> int:
        """The next one that is there; the number of samples if none is."""
        following = self._next
        while following[position] != position:
            following[position] = position = following[following[position]]
        return position

    def longest_within(self, limit: int, after: int) -> int:
        """The longest that is not longer than `limit`, from position `after` on."""
        return self.at_or_after(max(bisect.bisect_left(self._negated, -limit), after))

    def take(self, position: int) -> None:
        self._next[position] = position + 1


class Filling(NamedTuple):
    """What one instance gets."""

    height: int
    work: int
    slots: list[list[int]]
    """Positions of whole samples, one list a slot."""
    cut: list[int]
    """Positions of samples that need a pause; with the whole ones they fit into slots x height."""


def fill(remaining: Remaining, height: int, work: int, max_batch: int, *, may_pause: bool) -> Filling:
    """Choose samples for an instance, the longest that fit first; takes none away.

    Args:
        height: steps, at least the longest sample's length.
        work: most tokens.
    """
    gaps: list[tuple[int, int]] = []
    slots: list[list[int]] = []
    room = min(work, max_batch * height)
    total, num = 0, len(remaining.lengths)
    skipped: list[int] = []
    position = remaining.at_or_after(0)
    while position < num and total < room:
        length = remaining.lengths[position]
        if length > room - total:
            position = remaining.longest_within(room - total, position + 1)
            continue
        best = bisect.bisect_left(gaps, (length, -1))
        if best < len(gaps):
            gap, slot = gaps.pop(best)
            slots[slot].append(position)
            bisect.insort(gaps, (gap - length, slot))
        elif len(slots) < max_batch:
            bisect.insort(gaps, (height - length, len(slots)))
            slots.append([position])
        elif may_pause:
            skipped.append(position)
            position = remaining.at_or_after(position + 1)
            continue
        elif gaps[-1][0] <= 0:
            break
        else:
            position = remaining.longest_within(gaps[-1][0], position + 1)
            continue
        total += length
        position = remaining.at_or_after(position + 1)
    cut = []
    for position in skipped:
        if remaining.lengths[position] <= room - total:
            cut.append(position)
            total += remaining.lengths[position]
    return Filling(height, total, slots, cut)


def lay_out(filling: Filling, lengths: Sequence[int], max_batch: int) -> list[Piece]:
    """When each sample runs. No sample is in two slots at once, and no slot has two.

    Slots with the largest gaps, as many as the cut samples need, are written one after the other on a line with them, and the line is
    cut into slots again: a sample across a border runs at the end of one slot and, before that, at the beginning of the next.

    Source: McNaughton 1959. Since no sample is longer than a slot, its two pieces never overlap in time.
    """
    height = filling.height
    slots = filling.slots + [[] for _ in range(max_batch - len(filling.slots))] if filling.cut else filling.slots
    by_gap = sorted(slots, key=lambda slot: sum(lengths[position] for position in slot))
    needed = sum(lengths[position] for position in filling.cut)
    shared = 0
    while needed > 0:
        needed -= height - sum(lengths[position] for position in by_gap[shared])
        shared += 1
    pieces = []
    for slot in by_gap[shared:]:
        start = 0
        for position in slot:
            pieces.append(Piece(position, start, lengths[position]))
            start += lengths[position]
    line = [position for slot in by_gap[:shared] for position in slot]
    at = 0
    for position in [*line, *filling.cut]:
        first = min(lengths[position], height - at)
        pieces.append(Piece(position, at, first))
        if rest := lengths[position] - first:
            pieces.append(Piece(position, 0, rest))
        at = (at + lengths[position]) % height
    return pieces
