"""Several policies as one, and ranks as a queue.

    ranks, compared one after the other  --heap-->  the next sample;   all must allow it;   the first who has his own queue is asked instead

A sample's place in the heap is that of the rank which it had last; policies say whose rank has changed. A change of many makes the heap
anew, so handing out n samples costs n log n and what the policies themselves take.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import final

from m2flow.micro.rollouts.policy import Move, Policy, Seen, has_own

_MANY = 8
"""If more than one in so many ranks has changed, the heap is made anew."""


def composed(policies: Sequence[Policy]) -> Policy:
    """One policy that hands out as these do together: itself, if there is one and it needs no queue."""
    if len(policies) == 1 and has_own(policies[0], "next_sample") and not has_own(policies[0], "allows"):
        return policies[0]
    return Composed(policies)


@final
class Composed(Policy):
    """Of any number, also of none: first come, first served."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.parts = tuple(policies)
        self.name = ", ".join(part.name for part in policies) or "first-come-first-served"
        self.needs_reports = any(part.needs_reports for part in policies)
        self._ranking = [part for part in policies if has_own(part, "rank")]
        self._changing = [part for part in policies if has_own(part, "reranked")]
        self._allowing = [part for part in policies if has_own(part, "allows")]
        self._moving = [part for part in policies if has_own(part, "moves")]
        self._growing = [part for part in policies if has_own(part, "added")]
        self._starting = [part for part in policies if has_own(part, "started")]
        self._listening = [part for part in policies if has_own(part, "ended")]
        self._own = next((part for part in policies if has_own(part, "next_sample")), None)
        self._heap: list[tuple[tuple[float, ...], int, int]] | None = None
        """Rank, turn and sample; None: to be made. An entry counts if the rank is the sample's."""
        self._rank_of: dict[int, tuple[float, ...]] = {}
        self._turn: dict[int, int] = {}
        """Sample -> how many were asked for before it."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        for part in self.parts:
            part.begin(seen)
        self._heap, self._rank_of, self._turn = None, {}, {}

    def added(self, samples: Sequence[int]) -> None:
        for part in self._growing:
            part.added(samples)
        if self._heap is not None:
            for sample in samples:
                self._rank_of.pop(sample, None)  # It may have been here before, and its entry be gone.
                self._enter(sample)

    def next_sample(self, instance: int) -> int | None:
        sample = self._own.next_sample(instance) if self._own is not None else self._first()
        return sample if sample is not None and self.allows(sample, instance) else None

    def allows(self, sample: int, instance: int) -> bool:
        return all(part.allows(sample, instance) for part in self._allowing)

    def started(self, sample: int, instance: int) -> None:
        for part in self._starting:
            part.started(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        for part in self._listening:
            part.ended(sample, length)

    def reported(self, instance: int) -> None:
        for part in self.parts:
            part.reported(instance)

    def moves(self) -> Sequence[Move]:
        moves: dict[int, Move] = {}
        for part in self._moving:
            for move in part.moves():
                moves.setdefault(move.sample, move)
        return list(moves.values())

    def end(self) -> None:
        for part in self.parts:
            part.end()

    def _first(self) -> int | None:
        waiting = self.seen.waiting
        if not self._ranking:
            return next(iter(waiting), None)
        changed: set[int] = set()
        for part in self._changing:
            changed.update(part.reranked())
        if self._heap is None or len(changed) * _MANY > len(waiting):
            self._order()
        else:
            for sample in changed:
                if sample in waiting:
                    self._enter(sample)
        assert self._heap is not None
        while self._heap:
            rank, _, sample = self._heap[0]
            if sample in waiting and self._rank_of.get(sample) == rank:
                return sample
            heapq.heappop(self._heap)
        return None

    def _order(self) -> None:
        """All that wait, anew."""
        for sample in self.seen.waiting:
            self._turn.setdefault(sample, len(self._turn))
        self._rank_of = {sample: self._rank(sample) for sample in self.seen.waiting}
        self._heap = [(rank, self._turn[sample], sample) for sample, rank in self._rank_of.items()]
        heapq.heapify(self._heap)

    def _enter(self, sample: int) -> None:
        assert self._heap is not None
        rank = self._rank(sample)
        if self._rank_of.get(sample) != rank:
            self._rank_of[sample] = rank
            heapq.heappush(self._heap, (rank, self._turn.setdefault(sample, len(self._turn)), sample))

    def _rank(self, sample: int) -> tuple[float, ...]:
        found: list[float] = []
        for part in self._ranking:
            rank = part.rank(sample)
            found.extend(rank) if isinstance(rank, tuple) else found.append(rank)
        return tuple(found)
