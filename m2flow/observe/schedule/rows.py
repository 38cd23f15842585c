"""As few rows as can hold intervals without overlap, added to as more intervals come.

    starts, ends of new intervals --Rows.add--> rows, each with its intervals in order and disjoint

Intervals that come together are laid as tightly as can be. What comes later and began earlier takes a row that is free since then.
"""

from __future__ import annotations

import heapq
from typing import final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@final
class Rows:
    """Positions of intervals by row."""

    def __init__(self) -> None:
        self._rows: list[list[IntArray]] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> IntArray:
        """The positions of a row's intervals, in order of time."""
        parts = self._rows[number]
        if len(parts) > 1:
            self._rows[number] = parts = [np.concatenate(parts)]
        return parts[0]

    def add(self, positions: IntArray, starts: IntArray, ends: IntArray) -> None:
        """
        Args:
            positions, starts, ends: int64 [N] of the new intervals, in any order.
        """
        if not len(positions):
            return
        # Of those that begin together points come first, then the longest.
        order = np.lexsort((-ends, ends > starts, starts))
        positions, starts, ends = positions[order], starts[order], ends[order]
        if bool((starts[1:] >= ends[:-1]).all()) and (not self._ends or starts[0] >= self._ends[0]):
            self._append(0, positions, int(ends[-1]))
            return
        found: dict[int, list[int]] = {}
        running = sorted((end, row) for row, end in enumerate(self._ends))
        free: list[int] = []
        for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            while running and running[0][0] <= start:
                heapq.heappush(free, heapq.heappop(running)[1])
            row = heapq.heappop(free) if free else len(self._rows)
            if row == len(self._rows):
                self._rows.append([])
                self._ends.append(end)
            self._ends[row] = end
            found.setdefault(row, []).append(at)
            heapq.heappush(running, (end, row))
        for row, members in found.items():
            self._rows[row].append(positions[members])

    def _append(self, row: int, positions: IntArray, end: int) -> None:
        if row == len(self._rows):
            self._rows.append([])
            self._ends.append(end)
        self._rows[row].append(positions)
        self._ends[row] = end
