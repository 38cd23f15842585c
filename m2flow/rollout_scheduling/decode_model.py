"""Model the decode time of a rollout, bound it from below, and schedule samples of known lengths as the reference.

Step times are affine in the batch size, with continuous batching:

    t(b) = t0 + t1 b        seconds of a step in which b samples get a token each

An instance works its queue in order: a free slot takes the next sample. In steps that is list scheduling on `max_batch` machines, so n
samples cost O(n log n), however long they are. Limits: prefill, growing context and preemption for want of KV cache are not modelled.

Lower bounds on the makespan hold for any schedule whatever it knows. Lengths L1 >= L2 >= ... of N samples, W their sum, n instances with
at most B samples at once each:

    longest             (t0 + t1) L1                             a token of a sample follows the one before it
    work                (t0/B + t1) W / n                        all slots taken, all the time
    k-longest           max_k (L1 + ... + Lk) / R_k              holds with free migration
    no migration        the fractional bound of `fractional_s`   each sample stays where it begins

    unknown lengths     `unknown_lengths_s`                      expected, by whoever can't tell the samples apart

They are for decode alone: prefill, engine switches and weight syncs come on top.

The reference schedule, which every policy without the lengths is measured against, assigns samples of known lengths to instances.

    lengths, model, n instances --assign--> Assignment: what runs when on each instance, and the makespan, exact in the decode model
        Remaining --fill--> Filling: slots of whole samples, and samples that fit only in pieces --lay_out--> pieces with a start step

The search follows the argument of the fractional bound (`fractional_s`) with whole samples: fill instances in the order of falling length,
each with as much as it can do until T, and search for the least T. An instance of Z steps does W = min((T - t0 Z)/t1, B Z) tokens until T,
most at Z* = T/(t0 + t1 B); one that has a longer sample must run at least that long, and has less room for others. Whole samples go by
best fit, longest first.

The bound assumes slots filled without gaps. Where an instance has one or two samples a slot, all about equally long, whole samples leave
gaps of several percent. Then samples are paused: one stops and goes on later in another slot of the same instance, where its KV cache is.
McNaughton's wrap-around needs at most one pause a slot, and only slots with large gaps get one. Pauses are used only where they are
needed to come within `TOLERANCE` of the bound.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError

# ---- the model and the bounds


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_HALVINGS = 60
_SAFETY = 1e-12
"""Relative amount by which bounds are lowered against rounding, so that no makespan falls below them."""


@dataclass(frozen=True)
class DecodeModel:
    """The time of a decode step as a function of the batch size.

    The defaults are a 7B model in bf16 on one H200 at about 40% of its memory bandwidth.
    Source: weights 15.2 GB / 4.8 TB/s gives t0 >= 3.2 ms; vLLM and SGLang add launches and sampling.
    """

    t0_s: float = 0.008
    """Seconds of any step: the weights are read once."""
    t1_s: float = 0.00008
    """Seconds for each sample in the step: its KV cache is read, its token computed."""
    max_batch: int = 128
    """Most samples that run at once."""

    def __post_init__(self) -> None:
        if not (self.t0_s > 0 and self.t1_s >= 0 and np.isfinite(self.t0_s + self.t1_s)):
            raise SpecError(f"a decode step can't take t0={self.t0_s} s and t1={self.t1_s} s", now="Give t0 > 0 and t1 >= 0, in seconds.")
        if self.max_batch < 1:
            raise SpecError(f"an instance can't run {self.max_batch} samples at once", now="Give a max batch of 1 or more.")

    def step_s(self, batch: float) -> float:
        """Seconds of a step with this many samples.

        >>> DecodeModel(0.008, 0.00008, 128).step_s(100)
        0.016
        """
        return self.t0_s + self.t1_s * batch

    def tokens_per_s(self, batch: float) -> float:
        """Throughput of an instance that runs this many samples: b / t(b), increasing and concave in b."""
        return batch / self.step_s(batch)

    @property
    def best_token_s(self) -> float:
        """Seconds of an instance for a token at its best rate, with all slots taken: t0/B + t1."""
        return self.t0_s / self.max_batch + self.t1_s

    @property
    def alone_token_s(self) -> float:
        """Seconds for a token of a sample that runs alone: t0 + t1. No schedule is faster for one sample."""
        return self.t0_s + self.t1_s


@dataclass(frozen=True, eq=False)
class InstanceRun:
    """When each sample of an instance's queue runs. Arrays are [N], in the order of the queue."""

    start_s: FloatArray
    finish_s: FloatArray
    num_steps: int

    @property
    def end_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def run_queue(lengths: npt.ArrayLike, model: DecodeModel) -> InstanceRun:
    """Run a queue with continuous batching, exactly; the end is t0 Z + t1 W, Z the steps and W the tokens.

    Args:
        lengths: int [N], tokens to generate, at least 1 each, in the order of the queue.
    Returns:
        When each starts and ends, in seconds after the instance began.

    >>> run_queue([3, 1, 1], DecodeModel(1.0, 0.1, max_batch=2)).finish_s.round(6).tolist()
    [3.5, 1.2, 2.4]
    """
    tokens = np.asarray(lengths, np.int64)
    starts = start_steps(tokens, model.max_batch)
    ends = starts + tokens
    steps, changes = _batch_changes(starts, ends)
    batches = np.cumsum(changes)
    tokens_done = np.concatenate([[0], np.cumsum(batches[:-1] * np.diff(steps))]) if len(steps) else np.zeros(0, np.int64)
    seconds = model.t0_s * steps + model.t1_s * tokens_done
    return InstanceRun(seconds[np.searchsorted(steps, starts)], seconds[np.searchsorted(steps, ends)], num_steps=int(ends.max(initial=0)))


def queue_s(lengths: npt.ArrayLike, model: DecodeModel) -> float:
    """Seconds until a queue is empty; the end of `run_queue`."""
    tokens = np.asarray(lengths, np.int64)
    return model.t0_s * num_steps(tokens, model.max_batch) + model.t1_s * int(tokens.sum())


def num_steps(lengths: npt.ArrayLike, max_batch: int) -> int:
    """Decode steps until a queue is empty."""
    tokens = np.asarray(lengths, np.int64)
    return int((start_steps(tokens, max_batch) + tokens).max(initial=0))


def start_steps(tokens: IntArray, max_batch: int) -> IntArray:
    """The step at which each sample of a queue gets a slot, int64 [N]."""
    starts = np.zeros(len(tokens), np.int64)
    free = tokens[:max_batch].tolist()
    if len(tokens) > max_batch:
        heapq.heapify(free)
        for i, length in enumerate(tokens[max_batch:].tolist(), max_batch):
            starts[i] = free[0]
            heapq.heapreplace(free, free[0] + length)
    return starts


def _batch_changes(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The steps at which the batch changes, ascending and distinct, and by how much: int64 [K] each."""
    steps, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    signs = np.repeat(np.array([1, -1]), len(starts))
    return steps, np.bincount(where, weights=signs, minlength=len(steps)).astype(np.int64)


@dataclass(frozen=True)
class RolloutBounds:
    """Lower bounds on the makespan of one rollout, in seconds."""

    longest_s: float
    work_s: float
    k_longest_s: float
    fractional_s: float

    @property
    def with_migration_s(self) -> float:
        """The bound on schedules that may migrate samples. (The k-longest bound contains the other two.)"""
        return max(self.longest_s, self.work_s, self.k_longest_s)

    @property
    def no_migration_s(self) -> float:
        """The bound on schedules that leave each sample on the instance where it began."""
        return max(self.fractional_s, self.longest_s)


def rollout_bounds(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int) -> RolloutBounds:
    """Compute all four bounds.

    >>> found = rollout_bounds([4, 2, 2], DecodeModel(1.0, 0.5, max_batch=2), 2)
    >>> [round(bound_s, 3) for bound_s in (found.longest_s, found.work_s, found.k_longest_s, found.fractional_s)]
    [6.0, 4.0, 6.0, 6.0]
    """
    return RolloutBounds(
        longest_s=longest_s(lengths, model),
        work_s=work_s(lengths, model, num_instances),
        k_longest_s=k_longest_s(lengths, model, num_instances),
        fractional_s=fractional_s(lengths, model, num_instances),
    )


def longest_s(lengths: npt.ArrayLike, model: DecodeModel) -> float:
    """The longest sample, alone on an instance: (t0 + t1) max L."""
    return model.alone_token_s * int(np.max(np.asarray(lengths, np.int64), initial=0)) * (1 - _SAFETY)


def work_s(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int) -> float:
    """All instances full until the end: (t0/B + t1) sum L / n."""
    return model.best_token_s * int(np.sum(np.asarray(lengths, np.int64))) / _checked(num_instances) * (1 - _SAFETY)


def k_longest_s(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int) -> float:
    """The k longest samples at the best rate that k samples can have, for the worst k; samples may migrate freely.

        max_k (L1 + ... + Lk) / R_k,   R_k = r f(q + 1) + (n - r) f(q),   f(b) = b / t(b),   k = q n + r

    f is concave, so k samples run fastest spread evenly. From k = nB on R_k is n f(B). Tighter than with k/n in f's place by
    keeping batches whole.

    Source: scheduling with concave processing rates, the argument of McNaughton 1959 for preemptive machines.
    """
    longest_first = _descending(lengths)
    if not len(longest_first):
        return 0.0
    active = np.minimum(np.arange(1, len(longest_first) + 1), _checked(num_instances) * model.max_batch)
    whole, rest = np.divmod(active, num_instances)
    fuller, emptier = ((batch / (model.t0_s + model.t1_s * batch)) for batch in (whole + 1, whole))
    rates = rest * fuller + (num_instances - rest) * emptier
    return float((np.cumsum(longest_first) / rates).max()) * (1 - _SAFETY)


_RENEWAL_POINTS, _RENEWAL_LENGTHS, _BEGUN = 96, 4, 48
"""Points up to the longest sample; how many times as long a renewal function is followed, which then is straight; ages of samples."""


class InOrder:
    """Samples of unknown lengths that begin in a random order as slots become free (list scheduling), in decode steps.

    With m samples to a slot all slots are busy for as many steps as M(t) = m - 1, the renewal function of the lengths; then those that run
    end, of which some have begun lately and are long. Within a few percent of the schedule itself, for any number of slots at once.

    Args:
        ascending: lengths in tokens, [N].

    Source: Cox, Renewal Theory, 1962; Graham 1966 (list scheduling).

    >>> InOrder(np.array([4, 4, 4, 4])).steps(np.array([4.0, 2.0])).round(1).tolist()
    [4.0, 8.0]
    """

    def __init__(self, ascending: IntArray) -> None:
        self._ascending = ascending

    def steps(self, slots: FloatArray) -> FloatArray:
        """Decode steps until the last sample ends, for each number of slots."""
        num, longest = len(self._ascending), float(self._ascending[-1]) if len(self._ascending) else 0.0
        found, few = np.full(len(slots), longest), np.flatnonzero(slots < num)
        if not len(few) or not longest:
            return found
        tokens, (steps, ended) = float(self._ascending.sum()), self._renewals
        more, mean = num / slots[few] - 1, tokens / num
        after = np.minimum(np.searchsorted(ended, more * (1 - 1e-9)), len(ended) - 1)  # The first point at which so many have ended.
        rise = np.maximum(ended[after] - ended[after - 1], 1e-9)
        full = steps[after] - (ended[after] - more) * np.where(more > ended[-1], mean, (steps[1] - steps[0]) / rise)
        begun = np.geomspace(1.0, max(longest, 2.0), _BEGUN)
        each = slots[few, None] * begun / mean  # So many have begun since, of which the longest is their largest quantile.
        left = (self._ascending[np.minimum(num - 1, (each / (each + 1) * num).astype(np.int64))] - begun).max(axis=1)
        found[few] = np.maximum(full + np.maximum(left, 1.0), np.maximum(longest, tokens / slots[few]))
        return found

    @cached_property
    def _renewals(self) -> tuple[FloatArray, FloatArray]:
        """Decode steps, and how many samples have ended on average by then in a slot that always has one, [points] each."""
        num = _RENEWAL_POINTS
        steps = np.linspace(0.0, _RENEWAL_LENGTHS * float(self._ascending[-1]), _RENEWAL_LENGTHS * num + 1)
        ended = np.diff(np.searchsorted(self._ascending, steps, side="right"), prepend=0) / len(self._ascending)
        found = np.cumsum(ended)
        for i in range(1, len(found)):  # M(t) = F(t) + the sum of M(t - u) f(u)
            found[i] += float(found[max(0, i - num) : i][::-1] @ ended[1 : min(i, num) + 1])
        return steps, found


def judged_steps(longest: IntArray, num_allowed: int, judge: Callable[[int, float], int]) -> float:
    """Decode steps until groups are decided that run side by side, where how many have begun follows the verdicts so far.

    Args:
        longest: tokens of the longest sample of each group, in the order in which they begin, [P].
        num_allowed: groups that begin at once.
        judge: takes the position of a group that has ended, and the steps until then; gives how many may have begun by then, 0 if all
            is decided.

    >>> judged_steps(np.array([4, 4, 4]), 1, lambda position, steps: (position + 2) * (position < 1))
    8.0
    """
    running: list[tuple[int, int]] = []
    now = begun = 0
    while num_allowed:
        for position in range(begun, min(num_allowed, len(longest))):
            heapq.heappush(running, (now + int(longest[position]), position))
        begun = max(begun, min(num_allowed, len(longest)))
        if not running:
            break
        now, position = heapq.heappop(running)
        num_allowed = judge(position, float(now))
    return float(now)


def fractional_s(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int) -> float:
    """The least T for which samples, cut into pieces at will, fit n instances that each need at least

        t0 max(longest sample of which it has a piece, work / B) + t1 work

    An instance whose longest is h takes work up to cap(h) = min((T - t0 h)/t1, T/(t0/B + t1)). The cap falls with h, so the least T
    fills instances in the order of decreasing length, each to its cap: whoever takes longer samples than it must only lowers a cap.
    Whole samples without migration are one way to cut, so no such schedule is faster.

    Source: binary search over contiguous groups, as for partition problems (e.g. Karp and Steele); exchange argument above.
    """
    longest_first = _descending(lengths)
    _checked(num_instances)
    if not len(longest_first):
        return 0.0
    work = np.concatenate([[0.0], np.cumsum(longest_first, dtype=np.float64)])
    low = max(model.best_token_s * float(work[-1]) / num_instances, model.t0_s * float(longest_first[0]))
    high = max(low, model.t0_s * float(longest_first[0]) + (model.t0_s + model.t1_s) * float(work[-1]))
    if _fits(low, longest_first, work, model, num_instances):
        return low * (1 - _SAFETY)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _fits(middle, longest_first, work, model, num_instances):
            high = middle
        else:
            low = middle
    return low * (1 - _SAFETY)


def unknown_lengths_s(lengths: npt.ArrayLike, model: DecodeModel, num_instances: int) -> float:
    """A lower bound on the expected makespan of every policy that can't tell samples apart before they end.

    It may know all lengths, but not which sample has which: each assignment of lengths to samples is equally likely. It may preempt and
    migrate at no cost. The bound is not below that of known lengths with migration.

        max_y  a y + max(0, (W_y - y)/2 - (n - 1) a y / best) / max(n / best, 1/(2 t1) + (n - 1)/best) + a (L1 - y)

    W_y is the sum of all lengths cut at y, a = t0 + t1, best = t0/B + t1. Proof. Let T be when the longest sample, i, has y tokens; c_j are
    the lengths cut at y, and o_j the tokens of j in the steps and on the instance in which i runs until then. Swap the lengths of i
    and j: until the first of the two has its c_j-th token, say after s steps together on one instance, the policy sees the same in both
    worlds and does the same. In the world where that one is j, T is yet to come and j has c_j tokens, with o_j = s; in the other j has
    x >= s tokens then and m more by T, with o_j <= s + m. So the tokens of j before T and c_j + o_j relate, on average over the two, as
    (c_j + x + m)/2 >= (c_j + (s + s + m)/2)/2, and in expectation

        y + sum_j (c_j + o_j)/2 <= tokens by T <= y + O + (n - 1) R / best + n (T - R)/best,      O = sum_j o_j

    where i runs for R >= a y + t1 O of the T seconds. The least T of this linear program is the expression without its last term; from T
    on, i takes at least a for each token.
    """
    longest_first = _descending(lengths)
    _checked(num_instances)
    if not len(longest_first):
        return 0.0
    alone, best, n = model.alone_token_s, model.best_token_s, num_instances
    upward = longest_first[::-1]
    sums = np.concatenate([[0.0], np.cumsum(upward)])
    below = np.searchsorted(upward, upward, side="left")
    cut = sums[below] + upward * (len(upward) - below)
    rate = max(n / best, (0.5 / model.t1_s if model.t1_s > 0 else np.inf) + (n - 1) / best)
    missing = np.maximum(0.0, (cut - upward) / 2 - (n - 1) * alone * upward / best)
    found = float((alone * longest_first[0] + missing / rate).max()) * (1 - _SAFETY)
    return max(found, k_longest_s(lengths, model, num_instances))


def _fits(limit_s: float, longest_first: FloatArray, work: FloatArray, model: DecodeModel, num_instances: int) -> bool:
    """Whether the pieces fit instances that end by `limit_s`; O(instances whose longest sample is what limits them)."""
    full = limit_s / model.best_token_s
    taken = 0.0
    for used in range(num_instances):
        if taken >= work[-1]:
            return True
        head = float(longest_first[min(int(np.searchsorted(work, taken, side="right")) - 1, len(longest_first) - 1)])
        room = (limit_s - model.t0_s * head) / model.t1_s if model.t1_s > 0 else np.inf if limit_s >= model.t0_s * head else -1.0
        if room >= full:
            return bool(taken + full * (num_instances - used) >= work[-1])
        if room <= 0:
            return False
        taken += room
    return bool(taken >= work[-1])


def _descending(lengths: npt.ArrayLike) -> FloatArray:
    return -np.sort(-np.asarray(lengths, np.float64))


def _checked(num_instances: int) -> int:
    if num_instances < 1:
        raise SpecError(f"a rollout can't run on {num_instances} instances", now="Give one instance or more.")
    return num_instances


# ---- the reference schedule


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
