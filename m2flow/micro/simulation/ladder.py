"""The ladder of relaxations: what each mechanism costs, by taking away one after the other and simulating again.

    as it is -> lengths known -> no switches -> no weight syncs -> rewards and hops in no time -> no prefill -> micro-batches without
    fixed cost -> no barrier of groups -> the bound

Each rung is a run of its own, on the same devices and samples, by the same scheduler; the last is the bound of the whole run, which no
schedule beats. With known lengths the longest begin first (`lpt`, by the predictor `oracle`), and may move (`repack`), as far as that
helps: the best of what was tried. Without the barrier of groups a sample is trained on without its siblings.

Source: the order of the rungs is that of a simulated schedule's gap to its fractional bound; each difference is one mechanism's price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from m2flow.micro.costs.terms import Constant, Costs, DecodeCost, EngineId, Footprint, FunctionCost, Layout, Switch, TrainCost
from m2flow.micro.plan import Plan
from m2flow.micro.rollouts.predictors import Oracle
from m2flow.micro.simulation.scenario import Scenario


def climb(scenario: Scenario, plan: Plan) -> list[tuple[str, float]]:
    """What is taken away, and the makespan of all steps without it; the last is the bound."""
    costs: Costs = scenario.costs
    totals = scenario.run(plan).totals
    rungs = [("as it is", totals.makespan_s)]
    plan, best_s = _knowing(scenario, plan, totals.makespan_s)
    rungs.append(("with lengths known", best_s))
    for name, relax in _RUNGS:
        costs = relax(costs)
        totals = scenario.run(plan, costs).totals
        rungs.append((name, totals.makespan_s))
    totals = scenario.run(plan, costs, without_groups=True).totals
    return [*rungs, ("without waiting for whole groups", totals.makespan_s), ("the bound", totals.bound_s)]


def _knowing(scenario: Scenario, plan: Plan, makespan_s: float) -> tuple[Plan, float]:
    """The plan with the policies that make most of known lengths, and its makespan; as it was, where they make nothing of them."""
    best = plan, makespan_s
    for policies in _WITH_LENGTHS:
        knowing = msgspec.structs.replace(plan, policies=policies, predictor=Oracle.name)
        found_s = scenario.run(knowing).totals.makespan_s
        if found_s < best[1]:
            best = knowing, found_s
    return best


class Relaxed(Costs):
    """Costs of which some are nothing."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self._costs.layouts(engine, pool, num_devices)

    def unit(self, engine: EngineId, pool: str) -> int:
        return self._costs.unit(engine, pool)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return self._costs.decode(engine, pool, layout)

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return self._costs.train(engine, pool, layout)

    def function(self, call: str) -> FunctionCost:
        return self._costs.function(call)

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

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return self._costs.hop_s(num_bytes, source, target)

    def constants(self) -> dict[str, Constant]:
        return self._costs.constants()


class NoSwitches(Relaxed):
    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return Switch(0.0, 0.0)


class NoSyncs(Relaxed):
    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return 0.0


class NoRewards(Relaxed):
    def function(self, call: str) -> FunctionCost:
        return FunctionCost((0.0,))

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return 0.0


class NoPrefill(Relaxed):
    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        cost = self._costs.decode(engine, pool, layout)
        return msgspec.structs.replace(cost, prefill_token_s=0.0, enter_s=0.0, leave_s=0.0, handover_s=0.0, gather_s=0.0)


class WholeBatches(Relaxed):
    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        cost = self._costs.train(engine, pool, layout)
        return msgspec.structs.replace(
            cost,
            forward=msgspec.structs.replace(cost.forward, fixed_s=0.0),
            update=msgspec.structs.replace(cost.update, fixed_s=0.0),
        )


_WITH_LENGTHS = (("lpt",), ("lpt", "repack"), ("longest-first", "repack"))
"""Policies to try; which of them is best depends on how many samples an instance has at a time."""

_RUNGS: tuple[tuple[str, Callable[[Costs], Costs]], ...] = (
    ("without switches", NoSwitches),
    ("without weight syncs", NoSyncs),
    ("rewards and hops in no time", NoRewards),
    ("without prefill and handing over", NoPrefill),
    ("micro-batches without fixed cost", WholeBatches),
)
