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

_FEW = 160
"""Rows up to which all pairs are compared at once."""
_AT_ONCE = 60_000
"""Comparisons that are made in one go: more fall out of the cache."""
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


def pruned(front: Front, slack: FloatArray | float = 0.0, compared: list[int] | slice = slice(None)) -> Front:
    """Without rows that another one beats or equals, or misses by no more than `slack`, a number for each value.

    Args:
        compared: the ties that must be equal; all of them, or a better plan may be lost by what the others decide.
    """
    if len(front) < 2:
        return front
    return front.take(unbeaten(front.values, codes(front.ties[:, compared]), slack))


def unbeaten(every: FloatArray, kinds: IntArray, slack: FloatArray | float = 0.0) -> IntArray:
    """Indices of rows that no other row of the same code beats."""
    most = every.max(axis=0)
    differ = most > every.min(axis=0)  # A column in which all are equal decides nothing.
    values = every[:, differ]
    order = np.argsort(values @ (1 / most[differ]), kind="stable")
    room = np.broadcast_to(slack, every.shape[1:])[differ]
    return np.asarray(np.sort(order[_unbeaten(np.ascontiguousarray(values[order].T), kinds[order], room)]))


def spread(front: Front, groups: IntArray, merit: FloatArray, most: int) -> Front:
    """At most so many rows: the best of each group first (the least merit), then the second best, and so on."""
    if len(front) <= most:
        return front
    order = np.lexsort((merit, groups))
    grouped = groups[order]
    is_first = np.ones(len(order), np.bool_)
    np.not_equal(grouped[1:], grouped[:-1], out=is_first[1:])
    start = np.flatnonzero(is_first)
    if len(start) >= most:
        best = order[start]
        return front.take(np.sort(best[np.argsort(merit[best], kind="stable")[:most]]))
    rank = np.arange(len(order)) - start[np.cumsum(is_first) - 1]
    return front.take(np.sort(order[np.lexsort((merit[order], rank))[:most]]))


def codes(ties: IntArray) -> IntArray:
    """One number for each row of ties."""
    code = np.zeros(len(ties), np.int64)
    for column in ties.T:
        code = code * (int(column.max()) + 2) + column + 1
    return code


def _unbeaten(values: FloatArray, kinds: IntArray, room: FloatArray) -> IntArray:
    """Indices of the rows that no other beats, [values, rows] in an order in which a row comes before those that it beats."""
    if len(kinds) <= _FEW:
        return _not_beaten_by_kept(_beats(values, kinds, room))
    left = np.arange(len(kinds))
    slack = values * (1 + _ROUNDING) + room[:, None]
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        stays = kinds != kinds[0]
        for column, value in zip(slack, values[:, 0], strict=True):
            stays |= column < value
        stays[0] = False
        left, values, slack, kinds = left[stays], values[:, stays], slack[:, stays], kinds[stays]
    return np.array(kept, np.int64)


def _beats(values: FloatArray, kinds: IntArray, room: FloatArray) -> npt.NDArray[np.bool_]:
    """[rows, rows]: whether a row is no worse than another of its kind in any value, or not by more than there is room for."""
    beats = np.equal.outer(kinds, kinds)
    most = values * (1 + _ROUNDING) + room[:, None]
    if values.size * len(kinds) <= _AT_ONCE:
        beats &= (values[:, :, None] <= most[:, None, :]).all(axis=0)
        return beats
    for column, limit in zip(values, most, strict=True):
        beats &= np.less_equal.outer(column, limit)
    return beats


def _not_beaten_by_kept(beats: npt.NDArray[np.bool_]) -> IntArray:
    """The rows that no row which is kept before them beats. Rows of bits are compared as whole numbers, each in one operation."""
    rows = [int.from_bytes(row, "little") for row in np.packbits(beats, axis=1, bitorder="little")]
    kept, beaten = [], 0
    for row, mask in enumerate(rows):
        if not beaten >> row & 1:
            kept.append(row)
            beaten |= mask
    return np.array(kept, np.int64)
