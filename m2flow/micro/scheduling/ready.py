"""Rows of a generation that a policy hands out in an order of its own: a queue from whose middle rows can be taken at no cost.

It stands where a call without a policy has a deque, and remembers what has changed since its reader last asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import final


@final
class Ready:
    """Rows, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()
        self._arrived: list[int] = []
        self.is_disturbed = False
        """Rows went by another way than `take`, or came back: whoever keeps a list of them must make it anew."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def extend(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row not in self._rows:
                self._rows[row] = None
                self._arrived.append(row)

    def extendleft(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows[row] = None
            self._rows.move_to_end(row, last=False)
            self.is_disturbed = True

    def come_back(self, row: int) -> None:
        """One that a worker had; whoever keeps a list knows of it."""
        self._rows[row] = None

    def popleft(self) -> int:
        self.is_disturbed = True
        return self._rows.popitem(last=False)[0]

    def clear(self) -> None:
        self._rows.clear()
        self.is_disturbed = True

    def keep(self, rows: Iterable[int]) -> None:
        """These and no others."""
        self._rows = OrderedDict.fromkeys(rows)
        self.is_disturbed = True

    def take(self, row: int) -> None:
        """This one goes to a worker."""
        del self._rows[row]

    def arrived(self) -> list[int]:
        """Rows that came since this was last asked."""
        found, self._arrived = self._arrived, []
        return found
