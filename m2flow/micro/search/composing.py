"""How the times of two parts of a plan add up: one after the other on the same devices, or side by side with chunks handed on.

With (l, T, d) of leaves.py, A before B, both with what they need of functions between them already added to A as A' (below):

    split, linked       l = l' + lB             T = max(l' + TB, T' + dB)         d = d' + dB
    split, unlinked     l = max(lA, lB)         T = max(TA, TB)                   d = max(dA, dB)
    turns               l = max(TA, l') + lB    T = max(TA + TB, l' + TB, T' + dB)    d = max(dA + TB, d' + dB)

and where B waits for all of its input, l' is T' for B's start. A function f takes (l, T, d) to (l + lf, max(l + Tf, T + df), d + df).
All are sums and maxima: no time of a plan falls when one of a part grows. For stages whose chunks come at an even pace, T is
max_k(r_k + sum_{i>=k} p_i), which has its maximum at the first or the last chunk.

With staleness, steps overlap: `busy` is how long a part holds its devices in each step: T of what takes turns, the longest of what
is split. A step then takes max(busy, T/(staleness + 1)), since an answer waits for the update of staleness + 1 steps before.

Source: the pipeline of Yu et al. (RLinf), arXiv:2509.15965, T_critical + (M/m - 1) T_bottleneck, is the case of even chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from m2flow.micro.costs.terms import FunctionCost
from m2flow.micro.search.fronts import FloatArray, IntArray
from m2flow.micro.search.workload import CallLoad


@dataclass(frozen=True, eq=False)
class Times:
    """Arrays of one shape."""

    first: FloatArray
    total: FloatArray
    last: FloatArray
    busy: FloatArray

    def at(self, rows: IntArray) -> Times:
        return Times(self.first[rows], self.total[rows], self.last[rows], self.busy[rows])


def zero_times() -> Times:
    nothing = np.zeros(())
    return Times(nothing, nothing, nothing, nothing)


def side_by_side(a: Times, fed: Times, b: Times, *, is_linked: bool, waits: bool, slowdowns: tuple[float, float] = (1.0, 1.0)) -> Times:
    """A and B on devices of their own. `fed` is what B gets, when: A with the functions after it.

    `slowdowns`: how many times as long A, and B, take while the other works too, which they do for as long as the shorter lasts.
    """
    if waits:
        return Times(fed.total + b.first, fed.total + b.total, fed.last + b.total, np.maximum(fed.busy, b.busy))
    both = np.minimum(a.total, b.total)
    more_a, more_b = ((factor - 1) * both for factor in slowdowns)
    busy = np.maximum(fed.busy + more_a, b.busy + more_b)
    if not is_linked:
        total = np.maximum(a.total + more_a, b.total + more_b)
        return Times(np.maximum(a.first, b.first), total, np.maximum(a.last, b.last), busy)
    total = np.maximum(fed.first + b.total + more_b, fed.total + more_a + b.last)
    return Times(fed.first + b.first, total, fed.last + b.last, busy)


def in_turns(a: Times, fed: Times, b: Times, *, is_linked: bool, waits: bool) -> Times:
    """B when A has left the devices."""
    if not is_linked:
        total = a.total + b.total
        return Times(a.total + b.first, total, a.last + b.total, total)
    if waits:
        total = fed.total + b.total
        return Times(fed.total + b.first, total, fed.last + b.total, total)
    start = np.maximum(a.total, fed.first)
    total = np.maximum(start + b.total, fed.total + b.last)
    return Times(start + b.first, total, np.maximum(a.last + b.total, fed.last + b.last), total)


@dataclass(frozen=True)
class FunctionTimes:
    """Of all the units of a call on functions."""

    first: float
    total: float
    last: float

    def after(self, t: Times, *, waits: bool) -> Times:
        """What comes out, if `t` goes in."""
        if waits:
            return Times(t.total + self.first, t.total + self.total, t.last + self.total, np.maximum(t.busy, self.total))
        total = np.maximum(t.first + self.total, t.total + self.last)
        return Times(t.first + self.first, total, t.last + self.last, np.maximum(t.busy, self.total))


def function_times(call: CallLoad, cost: FunctionCost, num_processes: int, chunk: int) -> FunctionTimes:
    """A call whose units are taken in order, `chunk` in a task, by `num_processes` with `concurrency` units each.

    The last unit in is out when the slowest of those that were under way with it is: the quantile c/(c + 1) of the latency, c units.
    """
    units = {"sample": call.num_samples, "group": call.num_prompts, "minibatch": call.num_prompts, "batch": 1}[call.unit]
    under_way = min(units, num_processes * cost.concurrency)
    at = np.linspace(0, 1, len(cost.quantiles_s)) if len(cost.quantiles_s) > 1 else np.zeros(1)
    last = float(np.interp(under_way / (under_way + 1), at, cost.quantiles_s)) if under_way else 0.0
    tasks_s = cost.task_s * -(-units // chunk) / max(1, min(num_processes, units))
    total = max(last + cost.task_s * bool(units), units * cost.mean_s / max(1, under_way) + tasks_s)
    return FunctionTimes(cost.mean_s + cost.task_s, total, last + cost.task_s)


def through_functions(a: Times, names: Iterable[str], calls: Mapping[str, CallLoad], times: Mapping[str, FunctionTimes]) -> Times:
    """What a cut hands on when `names`, in program order, lie on it: each takes from `a` or from others of them."""
    made: dict[str, Times] = {}
    for name in names:
        inputs = [made[need] for need in calls[name].after if need in made] or [a]
        made[name] = times[name].after(_latest(inputs), waits=calls[name].is_barrier)
    return _latest([a, *made.values()])


def _latest(times: list[Times]) -> Times:
    found = times[0]
    for t in times[1:]:
        found = Times(
            np.maximum(found.first, t.first),
            np.maximum(found.total, t.total),
            np.maximum(found.last, t.last),
            np.maximum(found.busy, t.busy),
        )
    return found
