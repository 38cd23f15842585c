"""What a part of a plan costs, as a row of numbers of which less is better, and the rows that nothing beats.

A row of a `Front` is one plan for some of the calls. `values` are its devices (by pool), its times and its memory; `ties` is what it
has fixed for the rest of the plan, -1 where it has not. A row may be dropped if another with the same ties is no worse in any value:
whatever the rest of the plan, every formula that puts rows together is monotone in each value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ROUNDING = 1e-12
"""Relative: two ways to write the same sum are one plan."""


@dataclass(frozen=True, eq=False)
class Front:
    """Plans of one set of calls."""

    values: FloatArray
    """[rows, values], not negative."""
    ties: IntArray
    """[rows, ties]."""
    work: FloatArray
    """[rows], device-seconds; of no importance for what is beaten."""
    origin: IntArray
    """[rows, 3]: where a row is from: (-1 - cut, row of the first, row of the second), or (way, option, chunk) of a leaf."""

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: npt.NDArray[np.bool_] | IntArray) -> Front:
        return Front(self.values[rows], self.ties[rows], self.work[rows], self.origin[rows])


def gathered(fronts: list[Front]) -> Front:
    return Front(
        np.concatenate([front.values for front in fronts]),
        np.concatenate([front.ties for front in fronts]),
        np.concatenate([front.work for front in fronts]),
        np.concatenate([front.origin for front in fronts]),
    )


def pruned(front: Front) -> Front:
    """Without rows that another one beats or equals."""
    if len(front) < 2:
        return front
    most = front.values.max(axis=0)
    differ = most > front.values.min(axis=0)  # A column in which all are equal decides nothing.
    values = front.values[:, differ]
    order = np.argsort(values @ (1 / most[differ]), kind="stable")
    kept = order[_unbeaten(np.ascontiguousarray(values[order].T), _codes(front.ties)[order])]
    return front.take(np.sort(kept))


def _codes(ties: IntArray) -> IntArray:
    """One number for each row of ties."""
    code = np.zeros(len(ties), np.int64)
    for column in ties.T:
        code = code * (int(column.max()) + 2) + column + 1
    return code


def _unbeaten(values: FloatArray, codes: IntArray) -> IntArray:
    """Indices of the rows that no other beats, [values, rows] in an order in which a row comes before those that it beats."""
    left = np.arange(len(codes))
    slack = values * (1 + _ROUNDING)
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        stays = codes != codes[0]
        for column, value in zip(slack, values[:, 0], strict=True):
            stays |= column < value
        stays[0] = False
        left, values, slack, codes = left[stays], values[:, stays], slack[:, stays], codes[stays]
    return np.array(kept, np.int64)
