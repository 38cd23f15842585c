"""Model the decode time of a rollout, and bound it from below: step times affine in the batch size, with continuous batching.

    t(b) = t0 + t1 b        seconds of a step in which b samples get a token each

An instance works its queue in order: a free slot takes the next sample. In steps that is list scheduling on `max_batch` machines, so n
samples cost O(n log n), however long they are. Limits: prefill, growing context and preemption for want of KV cache are not modelled.

Lower bounds on the makespan hold for any schedule whatever it knows. Lengths L1 >= L2 >= ... of N samples, W their sum, n instances with
at most B samples at once each:

    longest             (t0 + t1) L1                             a token of a sample follows the one before it
    work                (t0/B + t1) W / n                        all slots taken, all the time
    k-longest           max_k (L1 + ... + Lk) / R_k              holds with free migration
    no migration        the fractional bound of `fractional_s`   each sample stays where it begins

They are for decode alone: prefill, engine switches and weight syncs come on top.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError

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
