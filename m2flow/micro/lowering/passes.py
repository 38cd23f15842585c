"""Lower a macro graph to a plan: the sequence of passes, and those that are short.

    legality -> placement -> chunking -> packing -> routing -> weight syncs and switches -> Plan

Placement and chunking are in `placement`, routing in `routing`. Processes are placed once for a run. The calls of each segment that is
traced later are lowered onto them by the same passes (`Lowering`): a segment whose structure was seen before reuses its stages, and of a
changed one only the changed calls are lowered.

Legality. A call may be chunked down to its declared granularity and no further. An update accumulates gradients group by group, since
advantages need whole groups, and steps at the end of its mini-batch; so it is no barrier although it is declared on a batch. A function on
a batch is a barrier, and so is one that writes a resource: it takes its units in the order of identity.

A schedule gives the sequential answer because of these rules (kept by the modules of `m2flow.micro.scheduler` in brackets):

- a task of a call has whole units of its granularity, never a part of one (`dispatch`, `call_state`);
- an update, whose advantages compare siblings, accumulates whole groups (`call_state`);
- what is declared on a batch starts when all of its rows are there (`call_state`);
- which rows are a mini-batch goes by identity, and is fixed before the first is there (`call_state`);
- a read of a resource waits for the write of the version that it reads (`call_lifecycle`);
- a write waits for the earlier reads of what it replaces, and for the write before it (`call_state`, `dispatch`);
- a call ends after all of its inputs have ended, also one that turns out to have no rows (`call_lifecycle`);
- a rollout engine samples for a call only with a version that the call may use (`weights`);
- a trainer replaces weights only after every engine that must sample from them has loaded them (`weights`);
- rows are forgotten when neither the program nor a call can ask for them (`call_lifecycle`);
- a refill judges whole groups, in which the earliest failing sample counts (`call_state`).

`tests/micro/lowering/test_legality.py` breaks each of them, and sees a wrong answer.

Packing. A micro-batch is filled with whole units (a group, or a sample where siblings do not matter) up to a budget of tokens; a unit that
is larger than the budget gets a micro-batch of its own. `cut` is that rule in the order of identity, for cuts that must not depend on
arrival.

Ranks. On this machine the spec's `train.ranks` says how many a trainer has, since cores can be threads of one rank as well as ranks; in a
pool each device of the trainer's placement is a rank. All ranks are one worker to the plan and the scheduler.

Weight syncs. The transport is the cheapest one, unless the spec names one: within a process one copy; between processes of a host a copy in
and one out for each receiver, at the speed of memory; to other hosts m2flow's own connections, which are encrypted. A broadcast, in which
all receivers share the bandwidth of the trainer's link, listens to a network without encryption. Files cost both a write and a read of the
storage. Both are taken only if the spec says so. Of a policy with adapters, only these are sent to other processes whose engines can apply
them; inside a process, and on a borrowed GPU, the merged weights are used. The local launcher has one host, so between processes the rule
finds shared memory. Workers of a Ray cluster, and of pools with several nodes, are on hosts that are unknown before the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from m2flow.channels.weights import TRANSPORTS
from m2flow.engines.contract import ParallelLayouts
from m2flow.engines.registry import engines
from m2flow.errors import InternalError, PlanError
from m2flow.macro.graph import STRUCTURAL, Call, CallKind, Granularity, MacroGraph, Shape, shape_of, wiring_of
from m2flow.macro.loss_declarations import asynchrony, notes_on_updates
from m2flow.micro.lowering.arithmetic import arithmetic
from m2flow.micro.lowering.capabilities import (
    check_lora,
    check_optimizers,
    check_routing,
    check_sampling,
    check_sequences,
    difficulty_of,
    notes_on_capabilities,
    notes_on_difficulty,
    policies_of,
    roles_syncing_adapters_only,
    sends_pieces,
)
from m2flow.micro.lowering.placement import (
    Sizes,
    check_degrees,
    check_pins,
    check_place,
    check_places,
    chunk,
    device_of,
    notes_on_speakers,
    place_stages,
    place_workers,
    places,
    resize,
    sizes_of,
    sizes_of_choice,
    with_speakers,
    with_weight_copies,
    workers_of_choice,
)
from m2flow.micro.lowering.routing import check_deadlock_freedom, limit, route, with_pinned_capacities, with_rooms
from m2flow.micro.protocol.plan import Choice, Mode, Plan, Route, Stage, SwitchPlan, SyncTransport, WeightSyncPlan, WorkerPlan
from m2flow.recipe import Model
from m2flow.rollout_scheduling.policies import make_policies
from m2flow.spec import ClusterSpec, WeightsSpec


def legal_stages(graph: MacroGraph) -> tuple[Stage, ...]:
    """Make one stage of each call, in program order."""
    return tuple(_stage(call) for call in graph.calls)


def _stage(call: Call) -> Stage:
    unit = call.granularity
    name: Literal["sample", "group", "minibatch", "batch"] = unit.value
    if call.is_gated and call.engine == "function":
        name = "group"  # A refill keeps or rejects whole groups, and an error in a group that was not needed must not count.
    if call.engine == "train" and call.method == "update":
        if not call.writes:
            raise PlanError(f"{call.name} declares no write, so nothing would order what comes after it", where=call.site.describe())
        return Stage(call.name, call.engine, name, is_barrier=False)
    if unit is Granularity.MINIBATCH and not call.options.get("minibatch_size"):
        raise PlanError(f"{call.name} runs on mini-batches and does not say of how many prompts", where=call.site.describe())
    is_barrier = unit is Granularity.BATCH or (call.engine == "function" and bool(call.writes))
    return Stage(call.name, call.engine, name, is_barrier=is_barrier, state=str(call.options.get("state", "")))


def accumulation_unit(call: Call) -> Granularity:
    """The unit by which an update may accumulate gradients: a group where siblings are compared or averaged over, else a sample."""
    return Granularity.GROUP if call.options.get("advantages") or call.options.get("by_group") else Granularity.SAMPLE


def pack(stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[Stage, ...]:
    """Give each train stage its token budget."""
    budget = spec.train.token_budget
    return tuple(msgspec.structs.replace(s, token_budget=budget) if s.engine == "train" else s for s in stages)


def cut(num_tokens: Sequence[int], budget: int) -> list[int]:
    """How many units each micro-batch takes, in the given order.

    >>> cut([3, 3, 3, 9, 1], budget=8)
    [2, 1, 1, 1]
    """
    sizes: list[int] = []
    filled = 0
    for tokens in num_tokens:
        if sizes and filled + tokens <= budget:
            sizes[-1] += 1
            filled += tokens
        else:
            sizes.append(1)
            filled = tokens
    return sizes


def most_ranks(layouts: ParallelLayouts) -> int | None:
    """Ranks that a train engine offers at most; None: any number."""
    degrees = (layouts.tp, layouts.pp, layouts.sp, layouts.dp)
    product = 1
    for degree in degrees:
        if degree is None:
            return None
        product *= degree
    return product


def check_ranks(workers: Iterable[WorkerPlan]) -> None:
    """Check that each worker has no more ranks than its train engines offer.

    Raises:
        PlanError: a worker has more ranks than one of its train engines offers, or has several and trains nothing.
    """
    known = {info.name: most_ranks(info.capabilities.parallel_layouts) for info in engines() if info.kind == "train"}
    for worker in workers:
        if worker.ranks < 1:
            raise PlanError(f"{worker.name} has {worker.ranks} ranks; it must be 1 or more", now="Set `train: {ranks: ...}` to 1 or more.")
        slots = [slot for slot in worker.engines if slot.kind == "train"]
        if worker.ranks > 1 and not slots:
            raise PlanError(f"{worker.name} has {worker.ranks} ranks and trains nothing", now="Only trainers have several.")
        for slot in slots:
            most = known.get(slot.engine)
            if slot.engine in known and most is not None and worker.ranks > most:
                others = ", ".join(name for name, can in known.items() if can is None or can >= worker.ranks)
                raise PlanError(
                    f"the train engine {slot.engine!r} has at most {most} rank{'s' if most > 1 else ''}, and {worker.name} is to have "
                    f"{worker.ranks}",
                    now=f"With so many there are {others}; or leave `ranks` out of the spec's `train`.",
                )


_OTHER_HOSTS = "other hosts: encrypted, a stream for each; a broadcast is faster, and neither encrypted nor authenticated"


def plan_syncs(
    workers: tuple[WorkerPlan, ...],
    spec: WeightsSpec,
    *,
    is_one_host: bool = True,
    alone: Collection[str] = (),
    adapted: Collection[str] = (),
) -> tuple[WeightSyncPlan, ...]:
    """Plan a weight sync for each pair of a role's trainer and one of its rollout engines.

    Args:
        alone: roles whose adapters go to other processes by themselves (`m2flow.micro.lowering.capabilities.roles_syncing_adapters_only`).
        adapted: roles that have adapters.
    Raises:
        PlanError: the spec's transport can't join one of them.
    """
    pairs = [
        (slot.role, trainer.name, worker.name)
        for worker in workers
        for slot in worker.engines
        if slot.kind == "rollout"
        for trainer in workers
        if any(other.kind == "train" and other.role == slot.role for other in trainer.engines)
    ]
    trainers = {worker.name: worker for worker in workers}
    devices = {worker.name: worker.device for worker in workers}
    others = Counter((role, source) for role, source, target in pairs if source != target)
    syncs = []
    for role, source, target in pairs:
        is_same_process = source == target
        transport, why = choose_transport(
            spec, is_same_process=is_same_process, is_same_host=is_one_host, num_receivers=others[role, source]
        )
        way = None if transport == "same process" else TRANSPORTS[transport]
        for name in (source, target):
            if way is not None and way.needs_gpu and not devices[name].startswith("cuda"):
                raise PlanError(
                    f"the weights of {role} go from {source} to {target} by {transport}, and {name} has no GPU (it has {devices[name]})",
                    now="Take another transport in the cluster spec: weights: {transport: auto}.",
                )
        if way is not None and not way.crosses_hosts and not is_one_host:
            why += "; it needs both on one host"
        sends: Literal["weights", "adapters"] = "weights"
        if role in alone and way is not None and way.takes_adapters:
            sends = "adapters"
        elif (num_ranks := trainers[source].ranks) > 1:
            engine = next(slot.engine for slot in trainers[source].engines if slot.kind == "train" and slot.role == role)
            is_spread = sends_pieces(engine) and role not in adapted and way is not None and way.takes_pieces
            is_compared = way is not None and way.sends_changes and spec.changes == "always"
            why += f"; {_who_sends(num_ranks, is_spread=is_spread, is_compared=is_compared)}"
        syncs.append(WeightSyncPlan(role, source, target, transport, why, sends))
    return tuple(syncs)


def _who_sends(num_ranks: int, *, is_spread: bool, is_compared: bool) -> str:
    if not is_spread:
        return f"gathered from {num_ranks} ranks"
    if is_compared:
        return f"gathered from {num_ranks} ranks, to compare with the version before"
    return f"each of {num_ranks} ranks sends what it holds"


def choose_transport(
    spec: WeightsSpec, *, is_same_process: bool, is_same_host: bool = True, num_receivers: int = 1
) -> tuple[SyncTransport, str]:
    """Choose the transport of one weight sync, and say why.

    >>> choose_transport(WeightsSpec(), is_same_process=False, num_receivers=2)
    ('shared memory', 'same host: one copy in, one out for 2 receivers')
    """
    if is_same_process:
        return "same process", "one copy"
    if spec.transport != "auto":
        return spec.transport, "as the cluster spec says"
    if is_same_host:
        return "shared memory", f"same host: one copy in, one out for {_receivers(num_receivers)}"
    return "tcp", _OTHER_HOSTS


def plan_switches(workers: tuple[WorkerPlan, ...]) -> tuple[SwitchPlan, ...]:
    turns: dict[str, dict[str, None]] = {}
    for worker in workers:
        of_worker = {slot.takes_turn: None for slot in worker.engines if slot.kind != "function"}
        turns.setdefault(worker.lease, {"rollout": None}).update(of_worker)
    return tuple(SwitchPlan(worker.lease, worker.name, tuple(turns[worker.lease])) for worker in workers if worker.lease)


def _receivers(number: int) -> str:
    return "its receiver" if number == 1 else f"{number} receivers"


_UNCOUNTED = {"episodes", "rows", "sampling"}
"""Options that only routes read (for capacity and transport), which are planned once for a run."""
_MOST_SEGMENTS = 10_000
"""Structures of segments that are remembered at most: a flow may make a new one in each step."""


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
    """Make the plan of a run. Placement, stages and routes come from the first step; the sizes (`arithmetic`) from all traced steps.

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
        workers, choice, mode = pinned.workers, pinned.choice, pinned.mode
        sizes = sizes_of(pinned.stages)
        if deterministic:  # See ClusterSpec.with_equal_micro_batches.
            budget = spec.train.token_budget
            sizes = {name: Sizes(size.chunk, min(size.token_budget, budget)) for name, size in sizes.items()}
    else:
        workers = with_weight_copies(_workers(graph, models, spec, choice, deterministic=deterministic), copies or {})
    if choice is not None and pinned is None:
        sizes, mode = sizes_of_choice(choice, pack(legal_stages(first), spec)), choice.mode
    check_ranks(workers)
    check_degrees(workers, spec.weights)
    routes, stages = _stages(first, workers, spec, sizes)
    # Staleness goes by the whole trace.
    routes = limit(first, stages, routes, workers, spec, staleness=graph.staleness)
    routes = routes if pinned is None else with_pinned_capacities(routes, pinned.routes)
    check_deadlock_freedom(routes, stages, workers)
    stages = with_rooms(first, stages, routes, workers)
    check_lora(models, workers)
    check_optimizers(graph, workers)
    check_sequences(graph, workers)
    check_routing(models, workers)
    check_sampling(graph, workers)
    alone = roles_syncing_adapters_only(models, workers) if spec.weights.adapters == "alone" else ()
    num_ranks = max((worker.ranks for worker in workers), default=1)
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
            alone=alone,
            adapted=[role for role, model in models.items() if model.lora is not None],
        ),
        switches=plan_switches(workers),
        arithmetic=arithmetic(graph, num_steps=num_steps, token_budget=spec.train.token_budget, num_ranks=num_ranks),
        notes=_notes(graph, workers, spec, is_searched=choice is not None),
        choice=choice,
        policies=policies_of(spec.rollout),
        predictor=spec.rollout.predictor,
        difficulty=difficulty_of(graph, spec.rollout),
    ).verify()


def _workers(
    graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, choice: Choice | None, *, deterministic: bool
) -> tuple[WorkerPlan, ...]:
    """Place the workers as the search has chosen, or by the rule of the spec's `placement`."""
    if choice is not None:
        return with_speakers(workers_of_choice(choice, spec, device_of(spec), deterministic=deterministic), graph, spec)
    return place_workers(graph, models, spec, deterministic=deterministic)


def _notes(graph: MacroGraph, workers: Sequence[WorkerPlan], spec: ClusterSpec, *, is_searched: bool) -> tuple[str, ...]:
    names = graph.names()
    return (
        *_notes_on_looks(graph, names),
        *asynchrony(graph, names),
        *notes_on_updates(graph),
        *notes_on_capabilities(graph, workers, spec.rollout.options),
        *notes_on_difficulty(graph, spec.rollout),
        *(notes_on_speakers(graph, spec) if is_searched else ()),
    )


def _notes_on_looks(graph: MacroGraph, names: Mapping[int, str]) -> tuple[str, ...]:
    """Notes for the plan: where Python waits for a value. Of a line that a loop repeats, the call of the first turn."""
    first_looks = {(seen.site, seen.why): seen for seen in reversed(graph.observations)}
    return tuple(
        f"Python waits for {names.get(seen.call, seen.call)} at {seen.site} ({seen.why}); later calls are placed by the same rules"
        for seen in reversed(first_looks.values())
    )


class Lowering:
    """Lowers the segments of a running flow onto the workers of the plan.

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
        """Kind of call -> the number of its shape."""
        self._segments: dict[tuple[tuple[int, ...], ...], tuple[Stage, ...]] = {}
        self._calls: dict[tuple[int, ...], Stage] = {}
        """(number of a call's shape, those of its consumers' shapes) -> its stage."""
        self.num_lowered = 0
        """Calls that were lowered."""
        self.num_reused = 0
        """Calls whose stage was reused."""

    def check(self, call: Call) -> None:
        """Raise PlanError if no worker has the engine that a new call needs."""
        check_place(call, self._hosted)

    def stages(self, segment: MacroGraph) -> tuple[Stage, ...]:
        """The stages of a segment, one for each call.

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
        # Depends on sizes and on all calls in between, so it is not cached.
        return with_rooms(segment, self._segments[key], self._plan.routes, self._plan.workers)

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
        """The number of a call's shape, which all calls of one kind share: what differs among them is not structure."""
        number = self._kinds.get(call.kind) if call.kind is not None else None
        if number is None:
            number = self._shapes.setdefault(shape_of(call), len(self._shapes))
            if call.kind is not None:
                if len(self._kinds) >= _MOST_SEGMENTS:
                    self._kinds.clear()
                self._kinds[call.kind] = number
        return number

    def _lower(self, segment: MacroGraph, calls: Iterable[Call]) -> list[Stage]:
        """Lower these calls of a segment, together with the consumers that their stages depend on."""
        wanted = {call.ordinal for call in calls}
        needed = wanted | {consumer.ordinal for ordinal in wanted for consumer in segment.consumers(ordinal)}
        part = MacroGraph(segment.flow, tuple(_structural(call) for call in segment.calls if call.ordinal in needed))
        stages = _stages(part, self._plan.workers, self._spec, self._sizes)[1]
        return [stage for call, stage in zip(part.calls, stages, strict=True) if call.ordinal in wanted]


class _Structural(dict[str, object]):
    """The options of a call that a stage may depend on. Reading any other is an error, so that no cached stage depends on it."""

    def __getitem__(self, name: str) -> object:
        if name not in STRUCTURAL:
            raise InternalError(f"a lowering pass read the option {name!r}, which m2flow.macro.graph does not count as structure")
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
    stages = chunk(graph, stages, spec)
    stages = pack(stages, spec)
    stages = resize(stages, sizes)
    return route(graph, stages, workers, spec)
