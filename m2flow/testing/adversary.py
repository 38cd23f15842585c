"""Provide rollout policies that decide at random, to test that no policy changes the result.

rollout: {policy: "m2flow/testing/adversary.py:Adversary:seed=3"}
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from m2flow.rollout_scheduling.policy import Move, SchedulingPolicy, Seen


class Adversary(SchedulingPolicy):
    """A policy that orders, places, holds back and moves samples at random, by its seed, and asserts what it is told."""

    name = "adversary"
    needs_reports = True

    def __init__(self, seed: float = 0) -> None:
        self._dice = random.Random(int(seed))
        self._kind = self._dice.randrange(3)
        """0 and 1: hands out waiting samples at random; 2: also holds them back most of the time."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        for sample in range(len(seen.groups)):
            assert seen.members[seen.groups[sample]].count(sample) == 1
        assert not seen.place.keys() & seen.finished.keys()
        assert not seen.waiting.keys() & (seen.place.keys() | seen.finished.keys())

    def added(self, samples: Sequence[int]) -> None:
        assert set(samples) <= self.seen.waiting.keys()

    def next_sample(self, instance: int) -> int | None:
        waiting = list(self.seen.waiting)
        if not waiting or (self._kind == 2 and self._dice.random() < 0.7):
            return None
        return self._dice.choice(waiting)

    def started(self, sample: int, instance: int) -> None:
        assert self.seen.place[sample] == instance
        assert instance not in self.seen.lost

    def ended(self, sample: int, length: int) -> None:
        assert self.seen.finished[sample] == length
        assert sample not in self.seen.place

    def moves(self) -> Sequence[Move]:
        running = sorted(self.seen.place)
        self._dice.shuffle(running)
        return [Move(sample, self._dice.randrange(self.seen.num_instances)) for sample in running[: self._dice.randrange(3)]]


class Shuffled(SchedulingPolicy):
    """A policy that ranks at random, differently each time; to be combined with others in a composed queue."""

    name = "shuffled"

    def __init__(self, seed: float = 0) -> None:
        self._dice = random.Random(int(seed))

    def rank(self, sample: int) -> float:
        return self._dice.random()

    def reranked(self) -> Iterable[int]:
        waiting = list(self.seen.waiting)
        return self._dice.sample(waiting, self._dice.randrange(min(len(waiting), 3) + 1))

    def allows(self, sample: int, instance: int) -> bool:
        return self._dice.random() < 0.6
