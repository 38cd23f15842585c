"""Compute lower bounds on the makespan of a rollout, which hold for any schedule whatever it knows.

Lengths L1 >= L2 >= ... of N samples, W their sum, n instances of the decode model t(b) = t0 + t1 b with at most B samples at once:

    longest             (t0 + t1) L1                             a token of a sample follows the one before it
    work                (t0/B + t1) W / n                        all slots taken, all the time
    k-longest           max_k (L1 + ... + Lk) / R_k              holds with free migration
    no migration        the fractional bound of `fractional_s`   each sample stays where it begins

The bounds are for decode alone: prefill, engine switches and weight syncs come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError
from m2flow.rollout_scheduling.decode_model import DecodeModel, FloatArray

_HALVINGS = 60
_SAFETY = 1e-12
"""Relative amount by which bounds are lowered against rounding, so that no makespan falls below them."""


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
