"""What a part of a plan takes of its fullest device, and of the host behind it.

Of each set of devices: what is kept there while others work, and the most that is there at once.

    turns   kept = kA + kB        most = max(mA + kB, mB + kA)
    split   kept = max(kA, kB)    most = max(mA, mB)

The fullest devices of two parts that take turns are taken to be the same ones. An engine with several calls is in one place in all of
them, so its devices are a set of their own until the last of its calls is inside: what it keeps is counted once, and what other
engines keep elsewhere is not added to it. Room on the host for what leaves is reserved for good, by the rule for what is kept.

Where memory can't run out any more, whatever the rest of the plan, it is set to 0: rows that differ only there are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.calls import Cut
from m2flow.micro.search.fronts import FloatArray, IntArray
from m2flow.micro.search.options import Option
from m2flow.micro.search.problem import Problem

KEPT, MOST, HOST = 0, 1, 2
_MEMORY_SLACK = 1 / 8
"""Of all there is."""


@dataclass(frozen=True)
class Memory:
    """Rows of [3 (kept, most, host), pools, 1 + placed engines], flat. Set 0 are the devices of no placed engine that is open."""

    problem: Problem

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return 3, len(self.problem.pools), 1 + len(self.problem.placed)

    @property
    def width(self) -> int:
        return 3 * self.shape[1] * self.shape[2]

    def leaf(self, engine: EngineId, options: Sequence[Option], calls: int) -> FloatArray:
        """[options, width]."""
        place = self._set_of(engine, calls)
        found = np.zeros((len(options), *self.shape))
        for i, option in enumerate(options):
            pool = self.problem.pools.index(option.pool)
            found[i, :, pool, place] = option.kept_bytes, option.device_bytes, option.host_bytes
        return found.reshape(len(options), -1)

    def join(self, cut: Cut, a: FloatArray, b: FloatArray, ties: IntArray, *, is_turns: bool) -> FloatArray:
        """[rows, width] of two parts; `ties` as they are before anything is closed."""
        of_a, of_b = (side.reshape(-1, *self.shape) for side in (a, b))
        found = self._turns(cut, of_a, of_b, ties) if is_turns else np.maximum(of_a, of_b)
        return self._closed(cut.first | cut.second, found).reshape(len(a), self.width)

    def settled(self, calls: int, rows: FloatArray) -> FloatArray:
        """The same rows, with 0 for what nothing outside of `calls` can bring to its limit."""
        found = rows.reshape(-1, *self.shape)
        kept, most, host = (number[:, None] for number in self._outside(calls))
        room, host_room = self.problem.room[:, :, None]
        is_safe = (found[:, KEPT] + kept + most <= room) & (found[:, MOST] + kept <= room)
        settled = found.copy()
        settled[:, KEPT][is_safe] = 0
        settled[:, MOST][is_safe] = 0
        settled[:, HOST][found[:, HOST] + host <= host_room] = 0
        return settled.reshape(len(rows), self.width)

    def _outside(self, calls: int) -> FloatArray:
        """[3, pools]: the most that other engines may keep, that one of the other calls may need at work, and of the host."""
        if calls not in self._known_outside:
            self._known_outside[calls] = self._worked_out_outside(calls)
        return self._known_outside[calls]

    @cached_property
    def _known_outside(self) -> dict[int, FloatArray]:
        return {}

    def _worked_out_outside(self, calls: int) -> FloatArray:
        found = np.zeros((3, len(self.problem.pools)))
        for mine, (kept, most, host) in self._largest:
            if mine & ~calls:
                found[MOST] = np.maximum(found[MOST], most)
                if not mine & calls:
                    found[KEPT] += kept
                    found[HOST] += host
        return found

    @cached_property
    def _largest(self) -> list[tuple[int, FloatArray]]:
        """Of each engine: its calls, and the most that any of its options keeps, needs and has on the host, [3, pools]."""
        problem = self.problem
        found = []
        for engine, options in problem.options.of.items():
            most = np.zeros((3, len(problem.pools)))
            for option in options:
                pool = problem.pools.index(option.pool)
                most[:, pool] = np.maximum(most[:, pool], (option.kept_bytes, option.device_bytes, option.host_bytes))
            found.append((problem.calls_of(engine), most))
        return found

    def fits(self, rows: FloatArray) -> npt.NDArray[np.bool_]:
        found = rows.reshape(-1, *self.shape)
        room, host = self.problem.room
        return np.asarray(((found[:, MOST] <= room[:, None]) & (found[:, HOST] <= host[:, None])).all(axis=(1, 2)))

    def _turns(self, cut: Cut, a: FloatArray, b: FloatArray, ties: IntArray) -> FloatArray:
        found = np.zeros_like(a)
        any_a, any_b = a.max(axis=3), b.max(axis=3)
        found[..., 0] = _stacked(a[..., 0], b[..., 0])
        for i, engine in enumerate(self.problem.placed, 1):
            in_a, in_b = (self._set_of(engine, calls) == i for calls in (cut.first, cut.second))
            if in_a and in_b:
                found[..., i] = np.maximum(_stacked(a[..., i], b[..., i]) - self._own(engine, ties), 0)
            elif in_a:
                found[..., i] = _stacked(a[..., i], any_b)
            elif in_b:
                found[..., i] = _stacked(any_a, b[..., i])
        return found

    def _own(self, engine: EngineId, ties: IntArray) -> FloatArray:
        """[rows, 3, pools]: what both sides have counted."""
        if engine not in self._kept:
            options = self.problem.options.of[engine]
            table = np.zeros((len(options), 3, len(self.problem.pools)))
            for i, option in enumerate(options):
                pool = self.problem.pools.index(option.pool)
                table[i, :, pool] = option.kept_bytes, option.kept_bytes, option.host_bytes
            self._kept[engine] = table
        return self._kept[engine][ties[:, self.problem.tied.index(engine)]]

    @cached_property
    def _kept(self) -> dict[EngineId, FloatArray]:
        return {}

    def _closed(self, calls: int, found: FloatArray) -> FloatArray:
        """Devices of an engine all of whose calls are inside are like any others."""
        for i, engine in enumerate(self.problem.placed, 1):
            if self.problem.calls_of(engine) & ~calls == 0:
                found[..., 0] = np.maximum(found[..., 0], found[..., i])
                found[..., i] = 0
        return found

    def _set_of(self, engine: EngineId, calls: int) -> int:
        """The set in which a part with these calls counts an engine's devices; 0 if it is nothing special (or not there)."""
        problem = self.problem
        if engine not in problem.placed:
            return 0
        mine = problem.calls_of(engine)
        return 1 + problem.placed.index(engine) if mine & calls and mine & ~calls else 0


def memory_slack(problem: Problem, slack_s: float) -> FloatArray:
    """[3, pools]: what memory may differ by where times may, too."""
    room, host = problem.room
    return np.stack([room, room, host]) * _MEMORY_SLACK * (slack_s > 0)


def _stacked(a: FloatArray, b: FloatArray) -> FloatArray:
    """[rows, 3, pools] of two parts whose fullest devices are the same."""
    most = np.maximum(a[:, MOST] + b[:, KEPT], b[:, MOST] + a[:, KEPT])
    found = a + b
    found[:, MOST] = most
    return found
