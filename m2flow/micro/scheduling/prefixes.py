"""Samples that have tokens: from where each can go on, and who is sent what to go on from.

    Flushed, Aborted (a worker) -> CallState.prefixes -> Generate(aborted_by=..., had=...), and the row, from who has it

A running sample is written down now and then, and one that is stopped always; what was written down last is its prefix here. A sample
that has one, and comes to be handed out (again), goes on from there, on whatever worker: the one that had it is gone, or its call is over
and the next of its line has taken it over. Its tokens are within its call's window of versions, and so are those that come, since it is
handed out only where a version of the window is held: an older one perhaps, if who had it is gone and others are behind. The rows of
prefixes go by the call that they were made for (`m2flow.micro.work.store.stopped_at`), and of each sample only the newest counts. Pure
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from m2flow.micro import messages as m
from m2flow.samples import SampleId


class Prefix(NamedTuple):
    """The tokens that a sample can go on from."""

    by: int
    """The call that it was generated for when it had got them."""
    oldest: int
    """Version among them."""
    num_generated: int

    def is_within(self, other: Prefix) -> bool:
        """Whether the other has all of its tokens."""
        return self.by == other.by and self.num_generated <= other.num_generated


class Together(NamedTuple):
    """Samples that can be handed out in one task."""

    drawn: int
    """The call that drew them."""
    stopped_by: int
    """The call that their prefixes go by; -1: they begin."""
    ids: list[int]
    had: list[int]


def prefixes_in(message: m.Flushed | m.Aborted) -> dict[int, Prefix]:
    """What a worker says of samples that it has written down."""
    told = zip(message.ids, message.stretches, message.num_generated, strict=True)
    return {packed: Prefix(message.call, min(stretch.version for stretch in of), count) for packed, of, count in told}


def batches(ordinal: int, prefixes: Mapping[int, Prefix], rows: Sequence[int], *, carries: bool) -> Iterator[Together]:
    """Samples of a call, by what a task must say of them."""
    if not prefixes and not carries:
        yield Together(ordinal, -1, list(rows), [])
        return
    found: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        by = prefixes[row].by if row in prefixes else -1
        found.setdefault((SampleId.unpack(row).call, by), []).append(row)
    for (drawn, by), together in found.items():
        yield Together(drawn, by, together, [prefixes[row].num_generated for row in together] if by >= 0 else [])
