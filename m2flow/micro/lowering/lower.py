"""Lowering: from the macro graph to the plan, pass by pass.

    legality -> placement -> chunking -> packing -> routing -> weight syncs and switches -> Plan

Processes are placed once for a run. The calls of each segment that is recorded later are lowered onto them by the same passes;
a segment whose structure was seen before reuses its stages, and of a changed one only what changed is lowered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from m2flow.errors import InternalError
from m2flow.macro.graph import Call, CallKind, MacroGraph
from m2flow.macro.soundness import asynchrony
from m2flow.macro.structure import STRUCTURAL, Shape, shape_of, wiring_of
from m2flow.micro.lowering.abilities import adapters_alone, check_abilities, check_lora, notes_on_abilities, notes_on_difficulty
from m2flow.micro.lowering.arithmetic import arithmetic
from m2flow.micro.lowering.chunking import Sizes, chunk, resize, sizes_of
from m2flow.micro.lowering.deadlock import check_room
from m2flow.micro.lowering.degrees import check_degrees
from m2flow.micro.lowering.legality import legal_stages
from m2flow.micro.lowering.packing import pack
from m2flow.micro.lowering.placement import (
    beside_sources,
    check_pins,
    check_place,
    check_places,
    device_of,
    place_stages,
    place_workers,
    places,
)
from m2flow.micro.lowering.ranks import check_ranks
from m2flow.micro.lowering.room import as_pinned, give_rooms, limit
from m2flow.micro.lowering.routing import route
from m2flow.micro.lowering.seating import seat_sizes, seat_workers
from m2flow.micro.lowering.syncs import plan_switches, plan_syncs
from m2flow.micro.plan import Plan, Route, Stage, WorkerPlan
from m2flow.micro.rollouts.policies import make_policies
from m2flow.micro.search.choice import Choice, Mode
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

_UNCOUNTED = {"rows", "sampling"}
"""Read for routes alone (their room, and over what), which are planned once for a run."""
_MOST_SEGMENTS = 10_000
"""Structures that are remembered at most: a flow may make a new one in each step."""


def lower(
    graph: MacroGraph,
    models: Mapping[str, Model],
    spec: ClusterSpec,
    *,
    num_steps: int = 0,
    deterministic: bool = False,
    choice: Choice | None = None,
    pinned: Plan | None = None,
    copies: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a run. Placement, stages and routes come from the first step; the arithmetic from all that was traced.

    Processes and sizes are those of a `pinned` plan, which may have been made by hand; else those of a `choice`; else they go by the
    rule of the spec's `placement`. Roles that take the weights of another (`copies`: whose) have their engine beside that one's, wherever
    in the flow they are made.

    Raises:
        PlanError: some call has no legal place. SpecError: there is no such rollout policy, or no such role as one that is pinned.
    """
    make_policies(spec.rollout.policy, spec.rollout.predictor)
    check_pins(graph, models, spec)
    first = graph.first_steps(1)
    sizes: Mapping[str, Sizes] = {}
    mode: Mode = "split" if spec.placement == "split" else "time-shared"
    if pinned is not None:
        workers, choice, sizes, mode = pinned.workers, pinned.choice, sizes_of(pinned.stages), pinned.mode
    elif choice is not None:
        workers = seat_workers(choice, spec, device_of(spec), deterministic=deterministic)
        sizes, mode = seat_sizes(choice, pack(legal_stages(first), spec)), choice.mode
    else:
        workers = place_workers(graph, models, spec, deterministic=deterministic)
    if pinned is None:
        workers = beside_sources(workers, copies or {})
    check_ranks(workers)
    check_degrees(workers, spec.weights)
    routes, stages = _stages(first, workers, spec, sizes)
    # Staleness is what the whole trace says.
    routes = limit(first, stages, routes, workers, spec, staleness=graph.staleness)
    routes = routes if pinned is None else as_pinned(routes, pinned.routes)
    check_room(routes, stages, workers)
    stages = give_rooms(first, stages, routes, workers)
    check_lora(models, workers)
    for call in graph.calls:
        check_abilities(call, workers)
    names = graph.names()
    first_looks = {(seen.site, seen.why): seen for seen in reversed(graph.observations)}  # Of a loop's line, that of its first turn.
    notes = tuple(
        f"Python waits for {names.get(seen.call, seen.call)} at {seen.site} ({seen.why}); later calls are placed by the same rules"
        for seen in reversed(first_looks.values())
    )
    return Plan(
        flow=graph.flow,
        cluster=spec.name,
        mode=mode,
        structure=first.structure_hash(),
        workers=workers,
        stages=stages,
        routes=routes,
        syncs=plan_syncs(
            workers,
            spec.weights,
            is_one_host=spec.is_one_host,
            alone=adapters_alone(models, workers) if spec.weights.adapters == "alone" else (),
        ),
        switches=plan_switches(workers),
        arithmetic=arithmetic(
            graph,
            num_steps=num_steps,
            token_budget=spec.train.token_budget,
            num_ranks=max((worker.ranks for worker in workers), default=1),
        ),
        notes=notes + asynchrony(graph, names) + notes_on_abilities(graph, workers) + notes_on_difficulty(graph, spec.rollout),
        choice=choice,
        policies=spec.rollout.policy,
        predictor=spec.rollout.predictor,
        difficulty=spec.rollout.difficulty,
    ).verify()


class Lowering:
    """Lowers the segments of a running flow onto the plan's workers.

    The stage of a call depends on its own shape and on which shapes take its result, so that is what is remembered: a segment whose
    structure was seen before is not looked at, and of another one only the calls are lowered that are new, or newly wired.
    """

    def __init__(self, plan: Plan, spec: ClusterSpec) -> None:
        self._plan = plan
        self._spec = spec
        self._hosted = places(plan.workers)
        self._sizes = sizes_of(plan.stages)
        self._shapes: dict[Shape, int] = {}
        self._kinds: dict[CallKind, int] = {}
        """The numbers of the shapes of kinds of calls."""
        self._segments: dict[tuple[tuple[int, ...], ...], tuple[Stage, ...]] = {}
        self._calls: dict[tuple[int, ...], Stage] = {}
        """(number of a call's shape, those of its consumers' shapes) -> its stage."""
        self.num_lowered = 0
        """Calls."""
        self.num_reused = 0
        """Calls whose stage was there already."""

    def check(self, call: Call) -> None:
        """Raises PlanError: no worker has the engine that a new call needs."""
        check_place(call, self._hosted)
        check_abilities(call, self._plan.workers)

    def stages(self, segment: MacroGraph) -> tuple[Stage, ...]:
        """One stage a call.

        Raises:
            PlanError: no worker can run one of them.
        """
        if len(self._segments) >= _MOST_SEGMENTS:
            self._shapes, self._kinds, self._segments, self._calls = {}, {}, {}, {}
        calls = segment.calls
        first = calls[0].ordinal if calls else 0
        shapes = [self._number(call) for call in calls]
        key = tuple([(shape, *wiring_of(call, first)) for shape, call in zip(shapes, calls, strict=True)])
        if key not in self._segments:
            self._segments[key] = self._stages(segment, shapes)
        self.num_reused += len(calls)
        # Depends on sizes, and on all that lies between two calls: nothing to remember.
        return give_rooms(segment, self._segments[key], self._plan.routes, self._plan.workers)

    def _stages(self, segment: MacroGraph, shapes: list[int]) -> tuple[Stage, ...]:
        by_call = dict(zip([call.ordinal for call in segment.calls], shapes, strict=True))
        wired = [(by_call[o], *sorted({by_call[consumer.ordinal] for consumer in segment.consumers(o)})) for o in by_call]
        new: dict[tuple[int, ...], Call] = {}
        for wires, call in zip(wired, segment.calls, strict=True):
            if wires not in self._calls:
                new.setdefault(wires, call)
        self._calls.update(zip(new, self._lower(segment, new.values()), strict=True))
        self.num_lowered += len(new)
        self.num_reused -= len(new)
        return tuple([self._calls[wires] for wires in wired])

    def _number(self, call: Call) -> int:
        """The number of a call's shape, which all calls of a kind share: what changes among them is no structure."""
        number = self._kinds.get(call.kind) if call.kind is not None else None
        if number is None:
            number = self._shapes.setdefault(shape_of(call), len(self._shapes))
            if call.kind is not None:
                if len(self._kinds) >= _MOST_SEGMENTS:
                    self._kinds.clear()
                self._kinds[call.kind] = number
        return number

    def _lower(self, segment: MacroGraph, calls: Iterable[Call]) -> list[Stage]:
        """These calls of a segment, with the consumers that their stages depend on."""
        wanted = {call.ordinal for call in calls}
        needed = wanted | {consumer.ordinal for ordinal in wanted for consumer in segment.consumers(ordinal)}
        part = MacroGraph(segment.flow, tuple(_structural(call) for call in segment.calls if call.ordinal in needed))
        stages = _stages(part, self._plan.workers, self._spec, self._sizes)[1]
        return [stage for call, stage in zip(part.calls, stages, strict=True) if call.ordinal in wanted]


class _Structural(dict[str, object]):
    """The options of a call that a stage may depend on. Asking for another one is an error, not an absence."""

    def __getitem__(self, name: str) -> object:
        if name not in STRUCTURAL:
            raise InternalError(f"a lowering pass read the option {name!r}, which m2flow.macro.structure does not count as structure")
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> object:
        return self[name] if name in self or name not in STRUCTURAL | _UNCOUNTED else default


def _structural(call: Call) -> Call:
    return replace(call, options=_Structural({name: value for name, value in call.options.items() if name in STRUCTURAL}))


def _stages(
    graph: MacroGraph, workers: tuple[WorkerPlan, ...], spec: ClusterSpec, sizes: Mapping[str, Sizes]
) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    check_places(graph, workers)
    stages = legal_stages(graph)
    stages = place_stages(graph, stages, workers)
    stages = chunk(stages, spec)
    stages = pack(stages, spec)
    stages = resize(stages, sizes)
    return route(graph, stages, workers, spec)
