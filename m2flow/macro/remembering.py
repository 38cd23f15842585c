"""What is kept of calls that the program has let go of: `metrics.lagged(k)` may still ask for their values, for so many steps."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, final

T = TypeVar("T")

MOST_LAG = 1_000
"""Steps back that a flow may look. A run of any length keeps no more than these."""


@final
class Remembered(Generic[T]):
    """Something of each call, by its ordinal."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._let_go: deque[tuple[int, int]] = deque()
        """(step, call), in the order in which they were let go."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._kept

    def __getitem__(self, ordinal: int) -> T:
        return self._kept[ordinal]

    def __setitem__(self, ordinal: int, item: T) -> None:
        self._kept[ordinal] = item

    def forget(self, ordinal: int) -> None:
        """Nothing can ask for it."""
        self._kept.pop(ordinal, None)

    def let_go(self, ordinal: int, step: int) -> None:
        """The program has no handle of it any more; only `lagged` can ask for it, from this step on or the next ones."""
        if ordinal in self._kept:
            self._let_go.append((step, ordinal))
        while self._let_go and self._let_go[0][0] < step - MOST_LAG:
            self._kept.pop(self._let_go.popleft()[1], None)
