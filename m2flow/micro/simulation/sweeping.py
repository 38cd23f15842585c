"""The same steps on more and more devices: how far they scale, and what keeps them from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from m2flow.errors import OptionError, PlanError, SpecError
from m2flow.micro.simulation.scenario import Outcome, Scenario
from m2flow.spec import ClusterSpec

_INK, _QUIET, _GRID = "#1f2328", "#656d76", "#e4e7eb"
_STEP, _BOUND, _IDEAL = "#0072b2", "#d55e00", "#8c959f"


class Point(msgspec.Struct, frozen=True):
    """The steps on so many devices."""

    gpus: int
    mode: str
    """Of the plan; empty if none fits."""
    step_s: float
    """Mean makespan."""
    bound_s: float
    efficiency: float
    busy_share: float
    idle_share: dict[str, float]
    simulated_s: float
    why: str = ""
    """Why there is no plan."""


def parse_sweep(text: str) -> tuple[int, int]:
    """`gpus=8..4096`.

    Raises:
        OptionError: it is none.
    """
    name, _, numbers = text.partition("=")
    low, dots, high = numbers.partition("..")
    if name.strip() != "gpus" or not dots or not low.strip().isdigit() or not high.strip().isdigit() or not 1 <= int(low) <= int(high):
        raise OptionError(
            f"--sweep {text}: that is no range of GPUs", now="Write --sweep gpus=8..4096; each number is twice the one before."
        )
    return int(low), int(high)


def resized(spec: ClusterSpec, num_devices: int) -> ClusterSpec:
    """The cluster with so many devices in its first pool, in as many nodes as that takes; other pools grow alike.

    Raises:
        SpecError: it has no pools.
    """
    if not spec.pools:
        raise SpecError(
            "a sweep needs devices that there can be more of, and the cluster spec has no pools", now="See clusters/h100-8.yaml."
        )
    whole = sum(pool.num_devices for pool in spec.pools.values())
    pools = {}
    for name, pool in spec.pools.items():
        wanted = max(1, round(num_devices * pool.num_devices / whole))
        per_node = min(pool.devices_per_node, wanted)
        pools[name] = pool.model_copy(update={"nodes": max(1, math.ceil(wanted / per_node)), "devices_per_node": per_node})
    return spec.model_copy(update={"pools": pools})


def sweep(scenario: Scenario, low: int, high: int) -> Iterator[Point]:
    """One point after the other, each of twice the devices."""
    num = low
    while num <= high:
        try:
            at = scenario.on(resized(scenario.spec, num))
            yield _point(num, at.run(at.plan()))
        except PlanError as error:
            yield Point(num, "", 0.0, 0.0, 0.0, 0.0, {}, 0.0, error.what)
        num *= 2


def _point(num: int, outcome: Outcome) -> Point:
    totals, count = outcome.totals, max(len(outcome.report.steps), 1)
    device_s = totals.makespan_s * outcome.simulated.history.num_devices or 1.0
    return Point(
        gpus=num,
        mode=outcome.plan.mode,
        step_s=totals.makespan_s / count,
        bound_s=totals.bound_s / count,
        efficiency=totals.efficiency,
        busy_share=totals.busy_share,
        idle_share={cause: seconds / device_s for cause, seconds in totals.idle_s.items()},
        simulated_s=outcome.report.wall_s,
    )


def draw(points: list[Point], title: str, path: Path) -> None:
    """Seconds of a step, its bound, and perfect scaling from the first point, over devices; both axes in powers.

    Raises:
        SpecError: it can't be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    found = [point for point in points if point.mode]
    with rc_context({"font.family": "sans-serif", "font.size": 9.5, "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 4.0), dpi=160, layout="constrained", facecolor="white")
        axes = figure.subplots()
        gpus = [point.gpus for point in found]
        if found:
            axes.plot(gpus, [found[0].step_s * gpus[0] / n for n in gpus], "--", color=_IDEAL, linewidth=1, label="perfect scaling")
            axes.plot(gpus, [point.bound_s for point in found], color=_BOUND, linewidth=1.2, label="bound")
            axes.plot(gpus, [point.step_s for point in found], "o-", color=_STEP, linewidth=1.8, label="a step")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
            for point in found:
                axes.annotate(point.mode, (point.gpus, point.step_s), xytext=(0, 7), textcoords="offset points", fontsize=7, color=_QUIET)
            axes.legend(frameon=False)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("GPUs", color=_QUIET)
        axes.set_ylabel("seconds", color=_QUIET)
        axes.set_title(title, loc="left", color=_INK, fontsize=11)
        try:
            figure.savefig(path, metadata={"Software": None})
        except OSError as error:
            raise SpecError(f"can't write {path}: {error.strerror}") from None
