"""Who generates what, when lengths are known: the plan against which every policy that does not know them is measured.

    lengths, model, n instances --assign--> Assignment: for each instance what runs when, and the makespan, exact in the decode model

The bound's own argument, made whole (`bounds.fractional_s`): fill instances in the order of falling length, each with as much as it
can do until T, and search for the least T. An instance of Z steps does W = min((T - t0 Z)/t1, B Z) tokens until T, most at
Z* = T/(t0 + t1 B); the one that has a longer sample must run at least that long, and has the less room for others.

The bound counts on samples that fill slots without gaps. Where an instance has one or two samples a slot and all about equally long,
whole samples leave gaps of several percent; then samples are paused (`slots.lay_out`), but only if that is needed to come within
`TOLERANCE` of the bound, and no more than needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from m2flow.micro.rollouts.bounds import rollout_bounds
from m2flow.micro.rollouts.decode import DecodeModel, IntArray, num_steps, start_steps
from m2flow.micro.rollouts.slots import Filling, Piece, Remaining, fill, lay_out

TOLERANCE = 0.009
"""Relative to the bound: above it, whole samples are not good enough and pauses are tried."""

_HEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)
"""How much higher than Z* slots are tried, where gaps cost more than height."""
_PRECISION = 5e-4
_FIRST_EXCESS = 1e-3
_ROUNDING = 1e-9


@dataclass(frozen=True)
class InstancePlan:
    """What one instance does."""

    pieces: tuple[Piece, ...]
    """By their start; a sample that is paused has two or more."""
    num_steps: int
    num_tokens: int

    @property
    def queue(self) -> list[int]:
        """The samples, in the order in which they first get a slot. Without pauses, working this queue gives the plan."""
        return list(dict.fromkeys(piece.sample for piece in self.pieces))

    @property
    def num_pauses(self) -> int:
        return len(self.pieces) - len({piece.sample for piece in self.pieces})

    def end_s(self, model: DecodeModel) -> float:
        """The instance's time: t0 Z + t1 W."""
        return model.t0_s * self.num_steps + model.t1_s * self.num_tokens


@dataclass(frozen=True)
class Assignment:
    """A rollout, planned."""

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
    """The best assignment that is found; each sample stays on its instance.

    Args:
        lengths: int [N], tokens to generate, at least 1 each.
        may_pause: whether a sample may stop for a while on its instance, its KV cache kept.

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
    """For the least T by which everything can be done. Samples are positions in the order of falling length."""

    def __init__(self, longest_first: list[int], model: DecodeModel, num_instances: int, bound_s: float) -> None:
        self._lengths = longest_first
        self._model = model
        self._num_instances = num_instances
        self._bound_s = bound_s

    def makespan_s(self, plans: Sequence[InstancePlan]) -> float:
        return max((plan.end_s(self._model) for plan in plans), default=0.0)

    def best(self, *, may_pause: bool) -> list[InstancePlan]:
        """Widen the excess over the bound until it works, then halve the last interval; with pauses, the first that works will do."""
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
        """Everything done by this time, or nothing: instance after instance takes the longest that are left."""
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
        """The filling with the most tokens, over a few heights of the slots."""
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
        """Whole samples as a queue, in the better of two orders; cut ones as they are laid out."""
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
