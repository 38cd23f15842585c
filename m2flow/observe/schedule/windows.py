"""Bars that a screen can show, of intervals that are too many for it.

    starts, ends, kinds [N] in order and disjoint --bars_in(window, width)--> Bars, at most about two for each pixel

What is wider than a pixel is shown as it is. What is narrower is gathered by the pixel in which it begins: the bar has the kind that
took most of that time, says how many it stands for, and how much of its extent they fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A stretch of time in ns, and how many pixels wide it is shown; 0: whole, however many bars that are."""

    start: int
    end: int
    width: int = 0


@dataclass(frozen=True, eq=False)
class Bars:
    """[B] each, in order."""

    start: IntArray
    end: IntArray
    kind: IntArray
    count: IntArray
    """Intervals that a bar stands for."""
    filled: FloatArray
    """The share of its extent that they fill."""
    index: IntArray
    """Of a bar that stands for one interval, its position among those given; else that of the longest of its kind."""

    def __len__(self) -> int:
        return len(self.start)


def bars_in(starts: IntArray, ends: IntArray, kinds: IntArray, window: Window) -> Bars:
    """The bars of one row.

    Args:
        starts, ends: int64 [N], ns; each interval ends before the next begins.
        kinds: int64 [N], small numbers from 0 on.
    """
    first, last = int(np.searchsorted(ends, window.start, side="right")), int(np.searchsorted(starts, window.end, side="left"))
    if first and ends[first - 1] == starts[first - 1] == window.start:
        first -= 1  # A point at the window's very beginning.
    last = max(first, last)
    s, e, k = starts[first:last], ends[first:last], kinds[first:last]
    index = np.arange(first, last)
    pixel = max((window.end - window.start) / window.width, 1.0) if window.width else 0.0
    is_wide = e - s >= pixel
    if not window.width or len(s) <= window.width or is_wide.all():
        return Bars(s, e, k, np.ones(len(s), np.int64), np.ones(len(s)), index)
    wide = np.flatnonzero(is_wide)
    narrow = np.flatnonzero(~is_wide)
    bucket = np.clip((s[narrow] - window.start) / pixel, 0, window.width).astype(np.int64)
    heads = np.flatnonzero(np.diff(bucket, prepend=-1))
    group = np.cumsum(np.diff(bucket, prepend=-1) != 0) - 1
    took = (e[narrow] - s[narrow]).astype(np.float64)
    num_kinds = int(k.max(initial=0)) + 1
    weight = np.bincount(group * num_kinds + k[narrow], weights=took + 1e-3, minlength=len(heads) * num_kinds)
    kind = weight.reshape(len(heads), num_kinds).argmax(axis=1)
    tails = np.append(heads[1:], len(narrow)) - 1
    start, end = s[narrow[heads]], e[narrow[tails]]
    order_in_group = np.lexsort((took * (k[narrow] == kind[group]), group))
    longest = narrow[order_in_group[tails]]
    filled = np.bincount(group, weights=took, minlength=len(heads)) / np.maximum(end - start, 1)
    all_start, all_end = np.concatenate([s[wide], start]), np.concatenate([e[wide], end])
    order = np.lexsort((all_end, all_start))  # A point before what begins there.
    return Bars(
        all_start[order],
        all_end[order],
        np.concatenate([k[wide], kind])[order],
        np.concatenate([np.ones(len(wide), np.int64), tails - heads + 1])[order],
        np.concatenate([np.ones(len(wide)), np.minimum(filled, 1.0)])[order],
        np.concatenate([wide, longest])[order] + first,
    )


def running_at(starts: IntArray, ends: IntArray, times: IntArray) -> IntArray:
    """How many intervals run at each time. Both [N] sorted, each by itself; they may overlap."""
    return np.searchsorted(starts, times, side="right") - np.searchsorted(ends, times, side="right")
