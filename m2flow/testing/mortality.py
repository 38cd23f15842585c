"""Workers that die and come back, for a whole cluster in one thread (`m2flow.testing.world`): who, and when, a seed decides.

    a worker dies -> what it had said and sent is heard and comes in part -> it is missed -> all have answered -> it is back

A trainer and a worker with a role's state are spared: what they have, no other has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

_ONCE_IN = 60
"""Turns between two deaths, and how long each stage of one takes, on average."""


@final
class Mortality:
    """When something happens to whom."""

    def __init__(self, seed: int, num_deaths: int) -> None:
        self._random = random.Random(seed)
        self._num_left = num_deaths
        self.dying: list[str] = []
        """Dead, and not missed yet."""
        self.away: list[str] = []
        """Known to be lost, and not back yet."""

    @property
    def is_at_work(self) -> bool:
        """Somebody is away, and will be back."""
        return bool(self.dying or self.away)

    @property
    def is_used(self) -> bool:
        """Somebody is away, or will die."""
        return bool(self._num_left or self.dying or self.away)

    def _is_time(self) -> bool:
        return self._random.randrange(_ONCE_IN) == 0

    def dies(self, candidates: Sequence[str]) -> str | None:
        """Who dies now."""
        if not self._num_left or not candidates or not self._is_time():
            return None
        self._num_left -= 1
        self.dying.append(self._random.choice(candidates))
        return self.dying[-1]

    def is_missed(self) -> str | None:
        """Whose death is noticed now."""
        return self.dying.pop(0) if self.dying and self._is_time() else None

    def returns(self) -> str | None:
        """Who is back now."""
        return self.away.pop(0) if self.away and self._is_time() else None

    def part_of(self, count: int) -> int:
        """How many of so many messages or parcels get through."""
        return self._random.randint(0, count)
