"""Compare simulated schedules: other placements and stalenesses, single mechanisms taken away (ablation), and more devices (scaling sweep).

    as it is -> lengths known -> no switches -> no weight syncs -> rewards and hops in no time -> no prefill -> micro-batches without
        fixed cost -> no barrier of groups -> the bound

Each rung of the ablation is a run of its own, on the same devices and samples, by the same scheduler; the last is the bound of the whole
run, which no schedule beats. With known lengths the longest samples begin first (`lpt`, by the predictor `oracle`), and may migrate
(`repack`), whichever is best. Without the barrier of groups a sample is trained on without its siblings.

Source: the order of the rungs is that of a simulated schedule's gap to its fractional bound; each difference is one mechanism's price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from m2flow.errors import OptionError, PlanError, SpecError
from m2flow.micro.protocol.cost_terms import (
    Arithmetic,
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    EngineKind,
    EpisodeCosts,
    Footprint,
    FunctionCost,
    HeldPart,
    Layout,
    StageOrder,
    Switch,
    TrainCost,
)
from m2flow.micro.protocol.plan import Plan
from m2flow.rollout_scheduling.predictors import Oracle
from m2flow.simulator.scenario import Outcome, Scenario
from m2flow.spec import ClusterSpec

STALENESS = (0, 1, 2)
NUM_STEPS = max(STALENESS) + 2
"""Steps that show the effect of staleness: with the largest one, the last of these waits for the first one's update."""
AS_PLANNED = "as planned"


class Row(msgspec.Struct, frozen=True):
    """One placement with one staleness, simulated."""

    placement: str
    """`time-shared`, `split`, `hybrid`, `as planned`."""
    staleness: int
    mode: str
    """Mode of its plan."""
    step_s: float
    """Mean makespan of a step."""
    bound_s: float
    """Mean bound of a step, as far as steps can be told apart."""
    efficiency: float
    busy_share: float
    idle_share: dict[str, float]
    """Share of all device time by the cause of idleness."""
    peak_memory_gib: float
    trained_tokens: int
    wasted_tokens: int


def compare(scenario: Scenario, tell: Callable[[str], object] = lambda text: None, costs: Costs | None = None) -> list[Row]:
    """Simulate the best plan of each placement with each staleness; what does not fit is left out.

    Args:
        costs: what plans are simulated with; by default what they are chosen with.
        tell: gets a line before each thing that takes time.
    Raises:
        PlanError: nothing fits at all.
    """
    rows = []
    for staleness in STALENESS:
        loosened = scenario.with_staleness(staleness)
        tell(f"staleness {staleness}: looking for plans of each placement")
        plans = loosened.plans()
        if not plans:
            raise PlanError(
                f"no plan of {scenario.program.flow} fits {scenario.spec.name}",
                now="Give the cluster more devices or memory, or the flow a smaller model or batch; `m2flow plan` says what does not fit.",
            )
        outcomes = dict[str, Outcome]()
        for mode, plan in plans.items():
            tell(f"staleness {staleness}: simulating {mode}")
            outcomes[mode] = loosened.run(plan, costs)
        rows += [_row(mode, staleness, outcome) for mode, outcome in outcomes.items()]
        tell(f"staleness {staleness}: the plan that would be taken")
        planned = loosened.plan()
        known = next((outcomes[mode] for mode, plan in plans.items() if plan.workers == planned.workers), None)
        rows.append(_row(AS_PLANNED, staleness, known or loosened.run(planned, costs)))
    return rows


def _row(placement: str, staleness: int, outcome: Outcome) -> Row:
    totals, steps = outcome.totals, outcome.report.steps
    device_s = totals.makespan_s * outcome.simulated.history.num_devices or 1.0
    return Row(
        placement=placement,
        staleness=staleness,
        mode=outcome.plan.mode,
        step_s=totals.makespan_s / max(len(steps), 1),
        bound_s=totals.bound_s / max(len(steps), 1),
        efficiency=totals.efficiency,
        busy_share=totals.busy_share,
        idle_share={cause: seconds / device_s for cause, seconds in totals.idle_s.items()},
        peak_memory_gib=max((step.peak_memory_gib for step in steps), default=0.0),
        trained_tokens=sum(step.trained_tokens for step in steps),
        wasted_tokens=sum(step.wasted_tokens for step in steps),
    )


def ablate(scenario: Scenario, plan: Plan) -> list[tuple[str, float]]:
    """Simulate with one more mechanism taken away at each rung: (what is taken away, makespan of all steps); the last is the bound."""
    costs: Costs = scenario.costs
    totals = scenario.run(plan).totals
    rungs = [("as it is", totals.makespan_s)]
    plan, best_s = _with_known_lengths(scenario, plan, totals.makespan_s)
    rungs.append(("with lengths known", best_s))
    for name, relax in _RUNGS:
        costs = relax(costs)
        totals = scenario.run(plan, costs).totals
        rungs.append((name, totals.makespan_s))
    totals = scenario.run(plan, costs, without_groups=True).totals
    return [*rungs, ("without waiting for whole groups", totals.makespan_s), ("the bound", totals.bound_s)]


def _with_known_lengths(scenario: Scenario, plan: Plan, makespan_s: float) -> tuple[Plan, float]:
    """The plan with the policies that make most of known lengths, and its makespan; unchanged if none of them helps."""
    best = plan, makespan_s
    for policies in _WITH_LENGTHS:
        knowing = msgspec.structs.replace(plan, policies=policies, predictor=Oracle.name)
        found_s = scenario.run(knowing).totals.makespan_s
        if found_s < best[1]:
            best = knowing, found_s
    return best


class AblatedCosts(Costs):
    """Costs of which subclasses set some to zero."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self._costs.layouts(engine, pool, num_devices)

    def layouts_like(self, engine: EngineId, pool: str, num_devices: int, like: Layout) -> Sequence[Layout]:
        return self._costs.layouts_like(engine, pool, num_devices, like)

    def unit(self, engine: EngineId, pool: str) -> int:
        return self._costs.unit(engine, pool)

    def stage_order(self, engine: EngineId, pool: str, layout: Layout) -> StageOrder:
        return self._costs.stage_order(engine, pool, layout)

    def held_parts(self, engine: EngineId, pool: str, layout: Layout) -> tuple[HeldPart, ...]:
        return self._costs.held_parts(engine, pool, layout)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return self._costs.decode(engine, pool, layout)

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return self._costs.train(engine, pool, layout)

    def function(self, call: str) -> FunctionCost:
        return self._costs.function(call)

    def episodes(self) -> EpisodeCosts:
        return self._costs.episodes()

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self._costs.footprint(engine, pool, layout)

    def device_bytes(self, pool: str) -> int:
        return self._costs.device_bytes(pool)

    def host_bytes(self, pool: str) -> int:
        return self._costs.host_bytes(pool)

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return self._costs.switch(engine, pool, footprint)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return self._costs.sync_s(role, source, target, is_same_devices=is_same_devices)

    def smaller_caches(self, engine: EngineId, pool: str, layout: Layout) -> Sequence[tuple[Footprint, int]]:
        return self._costs.smaller_caches(engine, pool, layout)

    def arithmetic(self, engine: EngineId, pool: str, layout: Layout) -> Arithmetic | None:
        return self._costs.arithmetic(engine, pool, layout)

    def rest_s(self) -> float:
        return self._costs.rest_s()

    def message_s(self) -> float:
        return self._costs.message_s()

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return self._costs.slowdown(engine, beside)

    def draws_per_group(self) -> float:
        return self._costs.draws_per_group()

    def spread(self, work: str) -> tuple[float, float]:
        return self._costs.spread(work)

    def like(self, engine: EngineId) -> EngineId:
        return self._costs.like(engine)

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return self._costs.hop_s(num_bytes, source, target)

    def constants(self) -> dict[str, Constant]:
        return self._costs.constants()


class NoSwitches(AblatedCosts):
    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return Switch(0.0, 0.0)


class NoSyncs(AblatedCosts):
    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return 0.0

    def rest_s(self) -> float:
        return 0.0


class NoRewards(AblatedCosts):
    def function(self, call: str) -> FunctionCost:
        return FunctionCost((0.0,))

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return 0.0

    def message_s(self) -> float:
        return 0.0


class NoPrefill(AblatedCosts):
    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        cost = self._costs.decode(engine, pool, layout)
        return msgspec.structs.replace(cost, prefill_token_s=0.0, enter_s=0.0, leave_s=0.0, handover_s=0.0, gather_s=0.0)


class WholeBatches(AblatedCosts):
    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        cost = self._costs.train(engine, pool, layout)
        return msgspec.structs.replace(
            cost,
            forward=msgspec.structs.replace(cost.forward, fixed_s=0.0, waits=0.0),
            update=msgspec.structs.replace(cost.update, fixed_s=0.0),
        )


_WITH_LENGTHS = (("lpt",), ("lpt", "repack"), ("longest-first", "repack"))
"""Policies to try; which one is best depends on how many samples an instance has at a time."""

_RUNGS: tuple[tuple[str, Callable[[Costs], Costs]], ...] = (
    ("without switches", NoSwitches),
    ("without weight syncs", NoSyncs),
    ("rewards and hops in no time", NoRewards),
    ("without prefill and handing over", NoPrefill),
    ("micro-batches without fixed cost", WholeBatches),
)


# ---- scaling sweep

_INK, _QUIET, _GRID = "#1f2328", "#656d76", "#e4e7eb"
_STEP, _BOUND, _IDEAL = "#0072b2", "#d55e00", "#8c959f"


class Point(msgspec.Struct, frozen=True):
    """One number of devices in a sweep, simulated."""

    gpus: int
    mode: str
    """Mode of the plan; empty if none fits."""
    step_s: float
    """Mean makespan of a step."""
    bound_s: float
    efficiency: float
    busy_share: float
    idle_share: dict[str, float]
    simulated_s: float
    why: str = ""
    """The reason why there is no plan; empty if there is one."""


def parse_sweep(text: str) -> tuple[int, int]:
    """Parse a range of devices such as `gpus=8..4096`.

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
    """The cluster with `num_devices` in all, in as many nodes as that takes; its pools keep their proportions.

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
    """Simulate with `low` devices, and on with twice as many at a time up to `high`."""
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
    """Plot seconds of a step, its bound, and perfect scaling from the first point, over devices; both axes are logarithmic.

    Raises:
        SpecError: it can't be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state.

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
            raise SpecError(
                f"can't write {path}: {error.strerror}", now="Give another file, in a directory that you may write to."
            ) from None
