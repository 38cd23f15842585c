"""Assign samples of known lengths to instances: the reference schedule that every policy without the lengths is measured against.

    lengths, model, n instances --assign--> Assignment: what runs when on each instance, and the makespan, exact in the decode model
        Remaining --fill--> Filling: slots of whole samples, and samples that fit only in pieces --lay_out--> pieces with a start step

The search follows the argument of the fractional bound (`decode_model.fractional_s`) with whole samples: fill instances in the order of
falling length, each with as much as it can do until T, and search for the least T. An instance of Z steps does W = min((T - t0 Z)/t1, B Z)
tokens until T, most at Z* = T/(t0 + t1 B); one that has a longer sample must run at least that long, and has less room for others.
Whole samples go by best fit, longest first.

The bound assumes slots filled without gaps. Where an instance has one or two samples a slot, all about equally long, whole samples leave
gaps of several percent. Then samples are paused: one stops and goes on later in another slot of the same instance, where its KV cache is.
McNaughton's wrap-around needs at most one pause a slot, and only slots with large gaps get one. Pauses are used only where they are
needed to come within `TOLERANCE` of the bound.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.rollout_scheduling.decode_model import DecodeModel, IntArray, num_steps, rollout_bounds, start_steps


class Piece(NamedTuple):
    """A contiguous part of a sample, in decode steps of its instance."""

    sample: int
    start: int
    steps: int


class Remaining:
    """The unassigned samples. Positions are in the order of falling length."""

    def __init__(self, longest_first: Sequence[int]) -> None:
        self.lengths = longest_first
        self._negated = [-length for length in longest_first]
        self._next = list(range(len(longest_first) + 1))
        """The next candidate after a taken position; a union-find forest with path halving."""

    def at_or_after(self, position: int) -> int:
        """The first unassigned position from here on; the number of samples if there is none."""
        following = self._next
        while following[position] != position:
            following[position] = position = following[following[position]]
        return position

    def longest_within(self, limit: int, after: int) -> int:
        """The position of the longest sample of at most `limit` tokens, from position `after` on."""
        return self.at_or_after(max(bisect.bisect_left(self._negated, -limit), after))

    def take(self, position: int) -> None:
        self._next[position] = position + 1


class Filling(NamedTuple):
    """The samples chosen for one instance."""

    height: int
    work: int
    slots: list[list[int]]
    """Positions of whole samples, one list a slot."""
    cut: list[int]
    """Positions of samples that need a pause; together with the whole ones they fit into slots x height."""


def fill(remaining: Remaining, height: int, work: int, max_batch: int, *, may_pause: bool) -> Filling:
    """Choose samples for an instance, the longest that fit first, without taking them from `remaining`.

    Args:
        height: steps, at least the longest sample's length.
        work: the most tokens.
    """
    gaps: list[tuple[int, int]] = []
    slots: list[list[int]] = []
    room = min(work, max_batch * height)
    total, num = 0, len(remaining.lengths)
    skipped: list[int] = []
    position = remaining.at_or_after(0)
    while position < num and total < room:
        length = remaining.lengths[position]
        if length > room - total:
            position = remaining.longest_within(room - total, position + 1)
            continue
        best = bisect.bisect_left(gaps, (length, -1))
        if best < len(gaps):
            gap, slot = gaps.pop(best)
            slots[slot].append(position)
            bisect.insort(gaps, (gap - length, slot))
        elif len(slots) < max_batch:
            bisect.insort(gaps, (height - length, len(slots)))
            slots.append([position])
        elif may_pause:
            skipped.append(position)
            position = remaining.at_or_after(position + 1)
            continue
        elif gaps[-1][0] <= 0:
            break
        else:
            position = remaining.longest_within(gaps[-1][0], position + 1)
            continue
        total += length
        position = remaining.at_or_after(position + 1)
    cut = []
    for position in skipped:
        if remaining.lengths[position] <= room - total:
            cut.append(position)
            total += remaining.lengths[position]
    return Filling(height, total, slots, cut)


def lay_out(filling: Filling, lengths: Sequence[int], max_batch: int) -> list[Piece]:
    """Schedule the pieces of a filling. No sample is in two slots at once, and no slot runs two samples at once.

    Slots with the largest gaps, as many as the cut samples need, are written one after the other on a line with them, and the line is
    cut into slots again: a sample across a border runs at the end of one slot and, before that, at the beginning of the next.

    Source: McNaughton 1959. Since no sample is longer than a slot, its two pieces never overlap in time.
    """
    height = filling.height
    slots = filling.slots + [[] for _ in range(max_batch - len(filling.slots))] if filling.cut else filling.slots
    by_gap = sorted(slots, key=lambda slot: sum(lengths[position] for position in slot))
    needed = sum(lengths[position] for position in filling.cut)
    shared = 0
    while needed > 0:
        needed -= height - sum(lengths[position] for position in by_gap[shared])
        shared += 1
    pieces = []
    for slot in by_gap[shared:]:
        start = 0
        for position in slot:
            pieces.append(Piece(position, start, lengths[position]))
            start += lengths[position]
    line = [position for slot in by_gap[:shared] for position in slot]
    at = 0
    for position in [*line, *filling.cut]:
        first = min(lengths[position], height - at)
        pieces.append(Piece(position, at, first))
        if rest := lengths[position] - first:
            pieces.append(Piece(position, 0, rest))
        at = (at + lengths[position]) % height
    return pieces


TOLERANCE = 0.009
"""Excess over the bound, relative, above which pauses are tried."""

_HEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)
"""Relative excess over Z* of the slot heights tried, where gaps cost more than height."""
_PRECISION = 5e-4
_FIRST_EXCESS = 1e-3
_ROUNDING = 1e-9


@dataclass(frozen=True)
class InstancePlan:
    """The schedule of one instance."""

    pieces: tuple[Piece, ...]
    """Sorted by start; a paused sample has two or more."""
    num_steps: int
    num_tokens: int

    @property
    def queue(self) -> list[int]:
        """The samples in the order of their start. Without pauses, running this queue gives the plan."""
        return list(dict.fromkeys(piece.sample for piece in self.pieces))

    @property
    def num_pauses(self) -> int:
        return len(self.pieces) - len({piece.sample for piece in self.pieces})

    def end_s(self, model: DecodeModel) -> float:
        """Seconds until the instance is done: t0 Z + t1 W."""
        return model.t0_s * self.num_steps + model.t1_s * self.num_tokens


@dataclass(frozen=True)
class Assignment:
    """The schedule of a rollout with known lengths."""

    instances: tuple[InstancePlan, ...]
    makespan_s: float
    bound_s: float
    """The no-migration bound, which no assignment beats."""

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s if self.bound_s else 1.0

    @property
    def num_pauses(self) -> int:
        return sum(plan.num_pauses for plan in self.instances)


def assign(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int, *, may_pause: bool = True) -> Assignment:
    """Search for the assignment with the least makespan, where each sample stays on its instance.

    Args:
        lengths: int [N], tokens to generate, at least 1 each.
        may_pause: whether a sample may pause on its instance with its KV cache kept.

    >>> plan = assign([40, 10, 10, 10], DecodeModel(1.0, 0.1, max_batch=2), 2)
    >>> [instance.queue for instance in plan.instances], round(plan.makespan_s, 6)
    ([[0], [1, 2, 3]], 44.0)
    """
    tokens = np.asarray(lengths, np.int64)
    bound_s = rollout_bounds(tokens, model, num_instances).no_migration_s
    order = np.argsort(-tokens, kind="stable")
    search = _Search(tokens[order].tolist(), model, num_instances, bound_s)
    plans = search.best(may_pause=False)
    if may_pause and search.makespan_s(plans) > bound_s * (1 + TOLERANCE):
        plans = min(plans, search.best(may_pause=True), key=search.makespan_s)
    named = [replace(plan, pieces=tuple(piece._replace(sample=int(order[piece.sample])) for piece in plan.pieces)) for plan in plans]
    idle = [InstancePlan((), 0, 0)] * (num_instances - len(named))
    return Assignment((*named, *idle), search.makespan_s(plans), bound_s)


class _Search:
    """The search for the least T by which all samples can end. Samples are positions in the order of falling length."""

    def __init__(self, longest_first: list[int], model: DecodeModel, num_instances: int, bound_s: float) -> None:
        self._lengths = longest_first
        self._model = model
        self._num_instances = num_instances
        self._bound_s = bound_s

    def makespan_s(self, plans: Sequence[InstancePlan]) -> float:
        return max((plan.end_s(self._model) for plan in plans), default=0.0)

    def best(self, *, may_pause: bool) -> list[InstancePlan]:
        """Widen the excess over the bound until a schedule fits, then bisect the last interval; with pauses, take the first that fits."""
        low = excess = TOLERANCE if may_pause else 0.0
        found = self._by(self._bound_s * (1 + excess), may_pause=may_pause)
        step = _FIRST_EXCESS
        while found is None:
            low, excess, step = excess, excess + step, 2 * step
            found = self._by(self._bound_s * (1 + excess), may_pause=may_pause)
        while not may_pause and excess - low > _PRECISION:
            middle = (low + excess) / 2
            better = self._by(self._bound_s * (1 + middle), may_pause=may_pause)
            if better is None:
                low = middle
            else:
                found, excess = better, middle
        return found

    def _by(self, limit_s: float, *, may_pause: bool) -> list[InstancePlan] | None:
        """Schedule all samples to end by `limit_s`, instance after instance, the longest first; None if they do not fit."""
        remaining = Remaining(self._lengths)
        fillings: list[Filling] = []
        while (head := remaining.at_or_after(0)) < len(self._lengths):
            if len(fillings) == self._num_instances:
                return None
            filling = self._fullest(remaining, self._lengths[head], limit_s, may_pause=may_pause)
            if filling is None:
                return None
            fillings.append(filling)
            for position in [*itertools.chain(*filling.slots), *filling.cut]:
                remaining.take(position)
        return [self._planned(filling) for filling in fillings]

    def _fullest(self, remaining: Remaining, longest: int, limit_s: float, *, may_pause: bool) -> Filling | None:
        """The filling with the most tokens over a few slot heights."""
        model = self._model
        flat = limit_s / (model.t0_s + model.t1_s * model.max_batch)
        best: Filling | None = None
        for height in sorted({max(longest, int(flat * (1 + more))) for more in ((0.0,) if may_pause else _HEIGHTS)}):
            left_s = limit_s * (1 + _ROUNDING) - model.t0_s * height
            work = min(int(left_s / model.t1_s) if model.t1_s > 0 else 1 << 62, model.max_batch * height)
            if left_s < 0 or work < longest:
                continue
            filling = fill(remaining, height, work, model.max_batch, may_pause=may_pause)
            if best is None or filling.work > best.work:
                best = filling
        return best

    def _planned(self, filling: Filling) -> InstancePlan:
        """Turn a filling into a plan: whole samples as a queue, in the better of two orders; paused ones as laid out."""
        pieces = sorted(lay_out(filling, self._lengths, self._model.max_batch), key=lambda piece: (piece.start, piece.sample))
        if not filling.cut:
            by_start = [piece.sample for piece in pieces]
            queue = min((sorted(by_start), by_start), key=lambda order: num_steps(self._tokens(order), self._model.max_batch))
            starts = start_steps(self._tokens(queue), self._model.max_batch).tolist()
            pieces = [Piece(sample, start, self._lengths[sample]) for sample, start in zip(queue, starts, strict=True)]
        end = max(piece.start + piece.steps for piece in pieces)
        return InstancePlan(tuple(pieces), end, filling.work)

    def _tokens(self, samples: Sequence[int]) -> IntArray:
        return np.array([self._lengths[sample] for sample in samples], np.int64)
