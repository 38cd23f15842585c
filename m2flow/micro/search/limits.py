"""What a part of a plan says about the whole: no plan with this row is faster than so much.

    path    l of what comes before + T + d of what comes after         linked parts never overlap in these
    work    (its device-seconds + the least of all other calls) / devices

Both hold for every tree: T of two linked parts is at least l of the first + T of the second, and T of the first + d of the second; and
devices times T is at least the device-seconds of the parts, in turns as in splits. A row whose limit is above the time of a plan that
is known can be dropped, whatever its ties.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from m2flow.micro.search.fronts import FloatArray
from m2flow.micro.search.problem import Problem


class Limits:
    """Of one problem."""

    def __init__(self, problem: Problem, *, counts_work: bool = True) -> None:
        """`counts_work`: a part has all of its devices for all of its time, which is not so where they are lent."""
        self._problem = problem
        self._counts_work = counts_work
        self._outside: dict[int, tuple[float, float]] = {}
        """By calls: `around_s`, and the least device-seconds of all others."""

    @cached_property
    def _least(self) -> FloatArray:
        """[calls, 4]: the least l, T, d and device-seconds of each call, over its options and chunks."""
        problem = self._problem
        found = []
        for call in problem.graph.device_calls:
            assert call.engine is not None
            options = problem.options.of[call.engine]
            times = problem.leaf(problem.graph.bits[call.name]).times
            work = times[..., 1] * np.array([option.num_devices for option in options])[:, None]
            found.append([times[..., 0].min(), times[..., 1].min(), times[..., 2].min(), work.min()])
        return np.array(found)

    @cached_property
    def _head(self) -> list[float]:
        """For each call: the least time from the start of the step until its first chunk is out."""
        found: list[float] = []
        for i, needs in enumerate(self._problem.graph.direct):
            found.append(self._least[i, 0] + max((found[j] for j in range(i) if needs >> j & 1), default=0.0))
        return found

    @cached_property
    def _tail(self) -> list[float]:
        """For each call: the least time from its last sample in to the end of the step."""
        direct = self._problem.graph.direct
        found = [0.0] * len(direct)
        for i in reversed(range(len(direct))):
            found[i] = self._least[i, 2] + max((found[j] for j in range(i + 1, len(direct)) if direct[j] >> i & 1), default=0.0)
        return found

    def path_s(self) -> float:
        """The longest path: for some call, what must come before it, all of it, and what must come after it."""
        return max(self.around_s(1 << i) + float(self._least[i, 1]) for i in range(len(self._least)))

    def work_s(self) -> float:
        """All device-seconds at their least, on all devices."""
        return float(self._least[:, 3].sum()) / sum(self._problem.num_devices)

    def around_s(self, calls: int) -> float:
        """What must come before a set of calls, and after it."""
        direct = self._problem.graph.direct
        inside = [i for i in range(len(direct)) if calls >> i & 1]
        before = max((self._head[j] for i in inside for j in range(i) if direct[i] >> j & 1 and not calls >> j & 1), default=0.0)
        after = max(
            (self._tail[j] for i in inside for j in range(i + 1, len(direct)) if direct[j] >> i & 1 and not calls >> j & 1), default=0.0
        )
        return before + after

    def of_rows(self, calls: int, total: FloatArray, busy: FloatArray, work: FloatArray) -> FloatArray:
        """[rows]: no step of a plan that has this row for `calls` is shorter.

        Args:
            work: device-seconds of the rows.
        """
        if calls not in self._outside:
            rest = float(sum(self._least[i, 3] for i in range(len(self._least)) if not calls >> i & 1))
            self._outside[calls] = self.around_s(calls), rest
        around, rest = self._outside[calls]
        least = (total + around) / (self._problem.workload.staleness + 1)
        if self._problem.workload.staleness:
            least = np.maximum(least, busy)
        return np.maximum(least, (work + rest) / sum(self._problem.num_devices)) if self._counts_work else np.asarray(least)
