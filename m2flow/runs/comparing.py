"""Compare runs, one or several seeds a side: what was asked for, then the time, then the learning.

    config.json of each side --differences--> what was asked for        analysis --comparison_of--> the time
    metrics.jsonl of each side --learned--> reward, accuracy, entropy, with confidence over seeds

With several runs a side, only what differs between all of one side and all of the other counts as asked for: the seeds do not. The time
is that of the first run of each side.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import msgspec

from m2flow.errors import M2FlowError, OptionError
from m2flow.micro.records.provenance import Difference, differences, read_configuration
from m2flow.observe.metrics import read_metrics

if TYPE_CHECKING:
    from m2flow.viewer.comparison import Comparison

_LAST = 0.1
"""The last share of the steps, whose mean is what a run came to."""
_LEARNED = ("reward", "accuracy", "entropy", "eval/")
"""Metrics that say how a run learned, by name or beginning."""


class Learned(msgspec.Struct):
    """One metric at the end of the runs of both sides: the mean over the last tenth of the steps that all have."""

    name: str
    num_steps: int
    """Steps that all runs have."""
    one: float
    one_half: float | None
    """Half-width of the 95% confidence interval over the runs of a side; None of a single run."""
    other: float
    other_half: float | None
    difference_half: float | None
    """Half-width of the 95% confidence interval of the difference; None unless both sides have several runs."""

    @property
    def is_apart(self) -> bool | None:
        """Whether the interval of the difference leaves out 0; None where there is no interval."""
        return None if self.difference_half is None else abs(self.other - self.one) > self.difference_half


@final
@dataclass(frozen=True)
class RunComparison:
    """What differs between runs. Its text is what `m2flow compare` prints first."""

    ones: Sequence[Path]
    others: Sequence[Path]
    asked: list[Difference]
    """What was asked for differently."""
    learned: list[Learned]

    def time(self) -> Comparison | None:
        """Where the time of the first run of each side went; None if a run has no records of it."""
        from m2flow.viewer.analysis import analysis_of
        from m2flow.viewer.comparison import comparison_of
        from m2flow.viewer.idle import idle_of
        from m2flow.viewer.run_trace import RunTrace

        traces = [RunTrace(side[0]) for side in (self.ones, self.others)]
        try:
            for trace in traces:
                trace.refresh()
            first, second = ((trace, analysis_of(trace, idle_of(trace))) for trace in traces)
            return comparison_of(first, second, (self.ones[0].resolve().name, self.others[0].resolve().name))
        except M2FlowError:
            return None

    def __str__(self) -> str:
        time = self.time()
        return "\n".join([*self.asked_lines(), *(["", *time.explained] if time else []), "", *self.learned_lines()])

    def asked_lines(self) -> list[str]:
        """What was asked for differently, with the diffs of code."""
        if not self.asked:
            return ["asked for the same: options, calls, models, settings, cluster, versions and code are alike"]
        lines = ["asked for differently"]
        for kind in dict.fromkeys(one.kind for one in self.asked):
            lines.append(f"  {kind}")
            for one in (one for one in self.asked if one.kind == kind):
                lines += [f"    {one}", *(f"      {line}" for line in one.lines)]
        return lines

    def learned_lines(self) -> list[str]:
        """What the runs came to: a line for each metric."""
        if not self.learned:
            return ["learned: the runs have no reward, accuracy or entropy of the same steps"]
        counts = f"{len(self.ones)} and {len(self.others)} runs"
        lines = [f"learned (mean of the last tenth of the steps; {counts})"]
        for one in self.learned:
            lines.append(f"  {one.name}: {_measured(one.one, one.one_half)} -> {_measured(one.other, one.other_half)}{_judged(one)}")
        if any(one.difference_half is None for one in self.learned):
            lines.append("  How far seeds differ is not known: give several runs a side, A1,A2,A3 B1,B2,B3.")
        return lines

    def _repr_html_(self) -> str:
        return f"<pre style='font-size:12px'>{html.escape(str(self))}</pre>"


def compare(ones: Sequence[Path], others: Sequence[Path]) -> RunComparison:
    """Compare the runs of two sides.

    Raises:
        OptionError: a side has no run. SpecError: one is no run's directory.
    """
    if not ones or not others:
        raise OptionError("a comparison needs a run on each side")
    return RunComparison(ones, others, asked_differently(ones, others), learned(ones, others))


def asked_differently(ones: Sequence[Path], others: Sequence[Path]) -> list[Difference]:
    """What differs between every run of one side and every run of the other."""
    sides = [[read_configuration(path) for path in side] for side in (ones, others)]
    found = differences(sides[0][0], sides[1][0])
    varied = {(one.kind, one.name) for side in sides for config in side[1:] for one in differences(side[0], config)}
    return [one for one in found if (one.kind, one.name) not in varied]


def learned(ones: Sequence[Path], others: Sequence[Path]) -> list[Learned]:
    """What the runs of both sides came to, in the metrics that say how they learned."""
    sides = [[read_metrics(path) for path in side] for side in (ones, others)]
    runs = [metrics for side in sides for metrics in side]
    names = [name for name in runs[0] if name.startswith(_LEARNED) and all(name in metrics for metrics in runs)]
    found = []
    for name in names:
        values = [{step: value for step, value in metrics[name] if math.isfinite(value)} for metrics in runs]
        steps = sorted(set.intersection(*(set(of) for of in values)))
        if not steps:
            continue
        last = steps[-max(1, round(_LAST * len(steps))) :]
        ends = [sum(of[step] for step in last) / len(last) for of in values]
        one, other = ends[: len(ones)], ends[len(ones) :]
        (mean, half), (other_mean, other_half) = mean_and_interval(one), mean_and_interval(other)
        found.append(Learned(name, len(steps), mean, half, other_mean, other_half, interval_of_difference(one, other)))
    return found


def _measured(mean: float, half: float | None) -> str:
    return f"{mean:.4g}" + (f" \u00b1 {half:.2g}" if half is not None else "")


def _judged(one: Learned) -> str:
    more = one.other - one.one
    if one.difference_half is None:
        return f"  ({more:+.4g})"
    return f"  ({more:+.4g} \u00b1 {one.difference_half:.2g}{'' if one.is_apart else ': within what seeds differ by'})"


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over seeds, and the half-width of its 95% interval; None for a single value.

        m ± t(0.975, n - 1) s / sqrt(n)

    Args:
        values: one for each run, of any unit.
    Source:
        Student 1908, The probable error of a mean, Biometrika 6(1); quantiles from tables.

    >>> mean, half = mean_and_interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    mean = sum(values) / len(values)
    return mean, None if len(values) < 2 else _student(len(values) - 1) * math.sqrt(_variance(values) / len(values))


def interval_of_difference(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """The half-width of the 95% interval of the difference of two means; None unless both sides have several values.

        t(0.975, v) sqrt(a + b),  a = s1^2 / n1,  b = s2^2 / n2,  v = (a + b)^2 / (a^2 / (n1 - 1) + b^2 / (n2 - 1))

    Args:
        ones, others: one value for each run of a side, of the same unit.
    Source:
        Welch 1947, The generalization of Student's problem, Biometrika 34(1-2); v is rounded down.

    >>> round(interval_of_difference([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]), 3)
    2.267
    """
    if len(ones) < 2 or len(others) < 2:
        return None
    a, b = _variance(ones) / len(ones), _variance(others) / len(others)
    if a + b == 0:
        return 0.0
    degrees = (a + b) ** 2 / (a**2 / (len(ones) - 1) + b**2 / (len(others) - 1))
    return _student(int(degrees + 1e-9)) * math.sqrt(a + b)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _student(degrees: int) -> float:
    return _STUDENT[min(max(degrees, 1), len(_STUDENT)) - 1]


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 1.960)
"""97.5% quantiles of Student's t for 1, 2, ... degrees of freedom; the last is the normal distribution's, for more than 15."""
