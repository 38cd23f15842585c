"""What a simulated run came to, step by step: against the bounds, and why devices were idle.

    History --report_of--> Report

A step lasts from the end of the step before it to the end of its last call. With staleness, or with samples that are carried over,
steps overlap: the numbers of a step are then those of the work done between these ends, and the names of its bounds say so
(`..._between_releases`). No makespan may be below a bound of the same period, nor that of the whole run below the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.scheduling.staleness import window
from m2flow.micro.simulation.bounding import Span, span_bounds
from m2flow.micro.simulation.machines import Machine
from m2flow.micro.simulation.run import History, Period
from m2flow.micro.simulation.simulate import Simulated
from m2flow.samples import SampleId

_TOLERANCE = 1e-7
"""Relative, for sums in another order."""
_GIB = 2**30
BETWEEN = "_between_releases"


class StepReport(msgspec.Struct, frozen=True):
    """One step. Seconds of devices are summed over all of them."""

    makespan_s: float
    lower_bounds_s: dict[str, float]
    efficiency: float
    """The highest bound by the makespan."""
    idle_s: dict[str, float]
    """Device seconds by cause (`m2flow.micro.simulation.usage`)."""
    staleness: dict[str, int]
    """Versions behind -> samples that were trained on in this step."""
    trained_tokens: int
    """Generated, of samples that were trained on, once whatever the epochs."""
    wasted_tokens: int
    """Generated for samples that are in no result."""
    peak_memory_gib: float
    """Of the fullest device."""


class Report(msgspec.Struct, frozen=True):
    """A whole run."""

    steps: list[StepReport]
    num_events: int
    wall_s: float
    """That simulating it took."""


class RunTotals(msgspec.Struct, frozen=True):
    """The steps of a run together."""

    makespan_s: float
    bound_s: float
    """Of all steps: the sum of their highest bounds; where they overlap, the highest of the whole run."""
    efficiency: float
    idle_s: dict[str, float]
    busy_share: float
    """Of all device seconds."""


def report_of(simulated: Simulated, machines: Mapping[str, Machine], *, overlaps: bool) -> Report:
    """The report of every step.

    Args:
        overlaps: steps may overlap: there is staleness.
    Raises:
        InternalError: a makespan is below a bound: the simulator, a cost or a bound is wrong.
    """
    history = simulated.history
    before: Period | None = None
    steps = []
    for period in history.periods:
        if period.step >= 0 or (period.makespan_s and not any(s.step >= 0 for s in history.periods)):
            steps.append(_step(history, machines, period, before, overlaps=overlaps))
        before = period
    return Report(steps, history.num_events, simulated.wall_s)


def totals_of(report: Report, history: History, machines: Mapping[str, Machine], *, overlaps: bool) -> RunTotals:
    """Of all steps of the loop; of a flow without one, of all.

    Raises:
        InternalError: the whole run is below a bound.
    """
    periods = history.periods
    inside = [at for at, period in enumerate(periods) if period.step >= 0] or list(range(len(periods)))
    first, last = periods[inside[0]], periods[inside[-1]]
    before = periods[inside[0] - 1].turns if inside[0] else {}
    span = Span(first.start_s, last.end_s, before, last.turns)
    bounds = span_bounds(history, machines, span, is_self_contained=not overlaps and len(inside) == 1)
    makespan_s = span.end_s - span.start_s
    _check("the run", makespan_s, bounds)
    bound_s = max(bounds.values(), default=0.0)
    if not overlaps:
        bound_s = max(bound_s, sum(max(step.lower_bounds_s.values(), default=0.0) for step in report.steps))
    causes = {cause for at in inside for cause in periods[at].seconds}
    seconds = {cause: sum(periods[at].seconds.get(cause, 0.0) for at in inside) for cause in causes}
    whole = sum(seconds.values())
    idle = {cause: value for cause, value in sorted(seconds.items()) if cause != "work" and value > 0}
    return RunTotals(
        makespan_s, bound_s, bound_s / makespan_s if makespan_s else 1.0, idle, seconds.get("work", 0.0) / whole if whole else 0.0
    )


def _step(history: History, machines: Mapping[str, Machine], period: Period, before: Period | None, *, overlaps: bool) -> StepReport:
    span = Span(period.start_s, period.end_s, before.turns if before else {}, period.turns)
    bounds = span_bounds(history, machines, span, is_self_contained=not overlaps)
    _check(f"step {period.step}", period.makespan_s, bounds)
    staleness: Counter[int] = Counter()
    trained = 0
    for row in _consumed(history, period.step):
        if history.drawn.is_drawn(row) and row in history.versions:
            giver = history.given.get(row, SampleId.unpack(row).call)
            staleness[_staleness_of(history.calls[giver], history.versions[row])] += 1
            trained += history.drawn.response_tokens(row)
    return StepReport(
        makespan_s=period.makespan_s,
        lower_bounds_s={name + BETWEEN * overlaps: seconds for name, seconds in sorted(bounds.items())},
        efficiency=_efficiency(period.makespan_s, bounds),
        idle_s={cause: value for cause, value in sorted(period.seconds.items()) if cause != "work" and value > 0},
        staleness={str(behind): count for behind, count in sorted(staleness.items())},
        trained_tokens=trained,
        wasted_tokens=_wasted(history, period.step),
        peak_memory_gib=period.peak_bytes / _GIB,
    )


def _consumed(history: History, step: int) -> set[int]:
    return {
        row
        for did in history.dids
        if isinstance(did.task, m.Accumulate) and did.call is not None and did.call.step == step
        for row in did.task.ids
    }


def _wasted(history: History, step: int) -> int:
    total = 0.0
    for lives in history.lives.values():
        for life in lives:
            if (life.is_wasted or life.id in history.wasted) and history.calls[life.call].step == step:
                total += life.tokens_until(life.ended) - (0 if life.id in history.wasted else life.num_kept)
    return round(total)


def _efficiency(makespan_s: float, bounds: Mapping[str, float]) -> float:
    return max(bounds.values(), default=0.0) / makespan_s if makespan_s > 0 else 1.0


def _check(what: str, makespan_s: float, bounds: Mapping[str, float]) -> None:
    for name, seconds in bounds.items():
        if makespan_s < seconds * (1 - _TOLERANCE):
            raise InternalError(
                f"{what} took {makespan_s!r} s in the simulation, and no schedule takes less than {seconds!r} s ({name})",
                now="The simulator, the costs or the bound is wrong. Please report this, with the command.",
            )


def _staleness_of(call: Call, version: int) -> int:
    """How many versions a sample is behind what sequential execution would have used."""
    return max(window(call)[1] - version, 0) if call.reads else 0
