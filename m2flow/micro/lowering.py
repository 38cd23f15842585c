"""Lowering: from the macro graph to the plan, pass by pass.

    legality -> placement -> chunking -> packing -> routing -> weight syncs and switches -> Plan

Processes are placed once for a run. The calls of each segment that is recorded later are lowered onto them by the same passes;
a segment whose structure was seen before reuses its stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from m2flow.macro.graph import MacroGraph
from m2flow.micro.arithmetic import arithmetic
from m2flow.micro.chunking import chunk
from m2flow.micro.legality import legal_stages
from m2flow.micro.packing import pack
from m2flow.micro.placement import check_places, place_stages, place_workers
from m2flow.micro.plan import Plan, Route, Stage, WorkerPlan
from m2flow.micro.routing import route
from m2flow.micro.syncs import plan_switches, plan_syncs
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec


def lower(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, *, num_steps: int = 0, deterministic: bool = False) -> Plan:
    """The plan of a run. Placement, stages and routes come from the first step; the arithmetic from all that was traced.

    Raises:
        PlanError: some call has no legal place.
    """
    first = graph.first_steps(1)
    workers = place_workers(graph, models, spec, deterministic=deterministic)
    routes, stages = _stages(first, workers, spec)
    names = graph.names()
    notes = tuple(
        f"Python waits for {names.get(seen.call, seen.call)} at {seen.site} ({seen.why}); later calls are placed by the same rules"
        for seen in graph.observations
    )
    return Plan(
        flow=graph.flow,
        cluster=spec.name,
        mode=spec.placement,
        structure=first.structure_hash(),
        workers=workers,
        stages=stages,
        routes=routes,
        syncs=plan_syncs(workers),
        switches=plan_switches(workers),
        arithmetic=arithmetic(graph, num_steps=num_steps, token_budget=spec.train.token_budget),
        notes=notes,
    ).verify()


class Lowering:
    """Lowers the segments of a running flow onto the plan's workers."""

    def __init__(self, plan: Plan, spec: ClusterSpec) -> None:
        self._plan = plan
        self._spec = spec
        self._cache: dict[str, tuple[Stage, ...]] = {}
        self.num_lowered = 0
        self.num_reused = 0

    def stages(self, segment: MacroGraph) -> tuple[Stage, ...]:
        """One stage a call.

        Raises:
            PlanError: no worker can run one of them.
        """
        key = segment.structure_hash()
        if key in self._cache:
            self.num_reused += 1
        else:
            self.num_lowered += 1
            self._cache[key] = _stages(segment, self._plan.workers, self._spec)[1]
        return self._cache[key]


def _stages(graph: MacroGraph, workers: tuple[WorkerPlan, ...], spec: ClusterSpec) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    check_places(graph, workers)
    stages = legal_stages(graph)
    stages = place_stages(stages, workers)
    stages = chunk(stages, spec)
    stages = pack(stages, spec)
    return route(graph, stages, spec)
