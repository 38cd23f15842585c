"""The micro execution plan: who runs what, on how much at a time, how rows and weights move, and what the search found.

    MacroGraph --(m2flow.micro.lowering.passes)--> Plan --(controller, scheduler, workers)--> a run
    Workload, Costs --search--> Choice --(m2flow.micro.lowering.placement)--> the workers and leases of a Plan

A plan is frozen data with a checker (`Plan.verify`) and a printed form (`plan_text`). It serialises to JSON, is saved beside the run,
printed by `m2flow plan` and read by the simulator. It decides time only, never the result.

The printed form has tables of workers, calls, routes, weights, switches, and the numbers that people get wrong. Entries that differ only in
their number (three or more workers, and the routes between them) share one line, so that a plan of a thousand devices has hardly more
lines than one of eight; each by itself is in the plan's JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import Constant, EngineId, Footprint, HeldPart, Layout, StageSchedule
from m2flow.spec import WeightTransport

Mode = Literal["time-shared", "split", "hybrid"]


class Placement(msgspec.Struct, frozen=True):
    """The placement of an engine, for some calls of the step: `num_devices` of a pool, from `first_device` on."""

    engine: EngineId
    calls: tuple[str, ...]
    pool: str
    first_device: int
    num_devices: int
    layout: Layout
    chunk: int
    """Samples that it hands on at a time."""
    footprint: Footprint
    lease: str = ""
    """Placements with the same lease take turns on their devices; empty if the devices are not shared."""
    mode: Literal["time-shared", "split"] = "split"
    is_swapped: bool = False
    """Whether it is offloaded to the host's memory between its calls, so that its devices are free for others."""

    lent_until: float = 0.0
    """Share of its samples that have ended when a rollout engine gives back the devices that it borrows of a trainer."""

    onload_at: float = msgspec.field(default=0.0, name="comes_at")
    """Share of the samples before it that have ended when a swapped trainer onloads, while others still run. 0: all."""

    micro_batches: int = 1
    """Parts in which a micro-batch of a trainer passes through its stages."""
    vpp: int = 1
    """Chunks of layers that each of its stages has, in turns."""
    schedule: StageSchedule = "1f1b"
    """The order in which its stages compute."""

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_devices)


class TimeTerm(msgspec.Struct, frozen=True):
    """One term of the predicted step time."""

    what: str
    """`policy.generate`, `switch to train`, `weight sync`."""
    seconds: float
    on_critical_path: bool = True


class Bound(msgspec.Struct, frozen=True):
    """A lower bound on the step time of any schedule of this workload on this cluster."""

    name: str
    """`longest sample`, `work`, `k-longest`, `critical path`."""
    seconds: float


class Loser(msgspec.Struct, frozen=True):
    """The best plan of another shape, and why it lost."""

    what: str
    predicted_step_s: float
    why: str
    parts: tuple[TimeTerm, ...] = ()
    """The terms of its predicted step time."""
    num_devices: int = 0
    """The devices that it uses."""


class CallWork(msgspec.Struct, frozen=True):
    """The work of one call in units that people know."""

    call: str
    tokens: float
    """Generated tokens of a generation, tokens in all samples of other calls; an update counts them once an epoch."""
    seconds: float
    """The whole work of the call, on its devices alone."""
    exposed_s: float
    """The part of it on the critical path; the rest happens while others work."""
    num_devices: int
    mfu: float = 0.0
    """Model FLOPs utilisation: operations of the model, without recomputed ones, over what the devices could do. 0: not known."""
    bandwidth: float = 0.0
    """Share of the memory's bandwidth, of a generation."""
    kv_tokens: float = 0.0
    """Tokens that the KV caches of all instances hold, and `kv_samples` of mean length."""
    kv_samples: int = 0
    most_at_once: int = 0
    """Samples that want to run at once. More than `kv_samples`: some wait; and long ones may be preempted where the cache is full."""


class Choice(msgspec.Struct, frozen=True):
    """The best placement that the search found, with its predicted time and what it was compared with."""

    flow: str
    cluster: str
    mode: Mode
    placements: tuple[Placement, ...] = msgspec.field(name="seats")
    predicted_step_s: float
    parts: tuple[TimeTerm, ...]
    bounds: tuple[Bound, ...]
    is_exact: bool
    """Whether no plan is better by the cost model; otherwise one may be by up to `gap_s`."""
    gap_s: float
    advice: str
    """What limits the step time, and what would help."""
    losers: tuple[Loser, ...]
    search_s: float
    constraints_cost_s: dict[str, float]
    """Each constraint of the spec -> seconds a step that it costs against the plan without it."""
    constants: dict[str, Constant]
    not_tried: tuple[str, ...] = ()
    """What the search left out, and faster plans that can't be run."""
    works: tuple[CallWork, ...] = ()
    """The work of each call on devices."""
    interval_s: tuple[float, float] = (0.0, 0.0)
    """The interval in which the step time is believed to lie; two zeros: nobody knows."""
    held: tuple[HeldPart, ...] = ()
    """What the ranks of trainers hold whose ranks do not all hold the same."""
    num_function_workers: int = 0
    """Processes for functions, where the search chose their number; 0: those of the spec."""
    num_own_workers: dict[str, int] | None = None
    """Processes by the role whose own they are, where the search chose them; None: those of the spec."""

    @property
    def lower_bound_s(self) -> float:
        return max((bound.seconds for bound in self.bounds), default=0.0)

    @property
    def efficiency(self) -> float:
        return self.lower_bound_s / self.predicted_step_s if self.predicted_step_s else 1.0


SyncTransport = Literal["same process", WeightTransport]


class EngineSlot(msgspec.Struct, frozen=True):
    """An engine that a worker hosts."""

    role: str
    """The role whose model it holds; of functions, the one that has this process to itself, and `*` for all others."""
    kind: Literal["rollout", "train", "function"]
    engine: str
    """Its name in the registry."""
    turn: str = ""
    """Under a lease: the name of the engine's own turn, if it does not share the turn of its kind. Engines of one turn may work at once."""
    stays: bool = False
    """Under a lease: the engine stays on the devices while others work (a rollout engine's weights, all of a trainer but activations)."""
    lent_until: float = 0.0
    """Under a lease, of a rollout engine that borrows a trainer's devices while others of its role have their own: the share of a
    generation's samples that have ended when it gives them back, and its samples continue elsewhere. 0: it keeps its samples."""
    onload_at: float = msgspec.field(default=0.0, name="comes_at")
    """Under a lease, of a trainer that offloads: the share of a generation's samples that have ended when it onloads again, while the
    others still run. 0: when none runs."""
    tp: int = 1
    """Tensor parallel degree of a trainer, or of each instance of a rollout engine; likewise `pp` and `ep`."""
    pp: int = 1
    ep: int = 1
    recompute: bool = False
    """Whether each layer of a trainer keeps only what comes in, and is computed again in the backward pass."""
    sp: int = 1
    """Ranks of a trainer that share each sequence."""
    zero: int | None = None
    """ZeRO stage of a trainer's replicas; None: its own."""
    offload: bool = False
    """Whether a trainer's optimiser is in the host's memory."""
    micro_batches: int = 1
    """Parts in which a micro-batch of a trainer passes through its stages."""
    vpp: int = 1
    """Chunks of layers that each of its stages has, in turns."""
    schedule: StageSchedule = "1f1b"
    """The order in which its stages compute."""
    is_searched: bool = False
    """Whether a search chose these degrees of a trainer, those that are 1 too."""

    @property
    def planned(self) -> dict[str, int | bool | str]:
        """What a plan says of a trainer's layout, beyond one device."""
        plain = EngineSlot(self.role, self.kind, self.engine)
        names = ("tp", "pp", "sp", "ep", "zero", "offload", "recompute", "micro_batches", "vpp", "schedule", "is_searched")
        return {name: value for name in names if (value := getattr(self, name)) != getattr(plain, name)}

    @property
    def hosted(self) -> str:
        """What a worker hosts by it, in words."""
        own = f" of {self.role}" * (self.role != "*")
        return f"functions{own}" if self.kind == "function" else f"{self.role}: {self.kind} ({self.engine})"

    @property
    def takes_turn(self) -> str:
        """The turn in which it has its devices, where they are shared: `rollout`, `train`, or its own (`train critic`)."""
        return self.turn or self.kind


class WorkerPlan(msgspec.Struct, frozen=True):
    """A worker process and the engines that it hosts."""

    name: str
    device: str
    threads: int
    engines: tuple[EngineSlot, ...]
    lease: str = ""
    """The lease by which its engines share its devices with others in turns; empty if they don't."""
    ranks: int = 1
    """Processes of its trainer that hold one model together, each on its own device, or with its own threads."""
    is_spare: bool = False
    """Whether it is absent when the run begins, and may join later (`m2flow cluster scale`)."""

    @property
    def loads(self) -> str:
        """What it does when it starts, in words."""
        found = [f"{slot.role} for {slot.kind} ({slot.engine})" for slot in self.engines if slot.kind != "function"]
        return f"loads {', '.join(found)}" if found else "starts"


class Room(msgspec.Struct, frozen=True):
    """The limits on a generation's rows in flight to one worker (`m2flow.micro.scheduler.backpressure`)."""

    target: str
    samples: int
    num_bytes: int
    takers: int
    """Number of calls there that take each row."""
    is_whole: bool
    """Whether one of them needs all rows of the generation at once."""
    fits: bool
    """Whether the rows that must be there at once fit. Where they don't, they are never begun."""


class Stage(msgspec.Struct, frozen=True):
    """How one call is run."""

    call: str
    engine: str
    unit: Literal["sample", "group", "minibatch", "batch"]
    """The smallest set of samples that a task may have."""
    is_barrier: bool
    """Whether it starts only when all of its input is there."""
    workers: tuple[str, ...] = ()
    chunk: int = 0
    """Most samples in a task. 0: as many as the packing takes."""
    token_budget: int = 0
    """Tokens up to which a train engine fills a micro-batch. 0 elsewhere."""
    forward_to: tuple[str, ...] = ()
    """Workers to which each row is sent as soon as it is done."""
    rooms: tuple[Room, ...] = ()
    """Limits on a generation's rows in flight to each worker that they are sent to, where there are any."""
    spills: bool = False
    """Whether a generation's rows don't fit and so stay in the segment file of the worker that made them until a task needs them."""
    state: str = ""
    """The role whose state it reads or writes, which is on one worker; empty if the call has none."""


class Route(msgspec.Struct, frozen=True):
    """A channel for the rows of one call's result."""

    producer: str
    consumer: str
    source: str
    target: str
    transport: Literal["same process", "shared memory", "zmq ipc", "zmq tcp", "torch gloo", "torch nccl"]
    capacity: int
    """Most samples in flight; enough for all that a step produces, and those that staleness allows beside it, so that nothing waits
    for room across a lease."""
    reason: str = ""
    """Why this transport."""
    capacity_bytes: int = 0
    """Most bytes in flight; 0: no limit is within reach."""
    needs: int = 0
    """Samples of a generation that the consumer must be able to hold at once."""
    needs_bytes: int = 0
    """The same in bytes, each sample as long as it may be."""
    is_whole: bool = False
    """Whether these are all samples of the call, since the consumer can't begin with fewer."""
    spills: bool = False
    """Whether rows don't fit, and stay in the segment file of the worker that made them until a task needs them."""


class WeightSyncPlan(msgspec.Struct, frozen=True):
    """How new weights reach a rollout engine."""

    role: str
    source: str
    target: str
    transport: SyncTransport
    why: str = ""
    sends: Literal["weights", "adapters"] = "weights"
    """`adapters`: only these are sent; the rollout engine adds them to the weights that it began with."""


class SwitchPlan(msgspec.Struct, frozen=True):
    """A worker whose engines take turns on shared devices."""

    lease: str
    worker: str
    turns: tuple[str, ...] = ("rollout", "train")
    """Turns of all engines under this lease, in order."""


class Pace(msgspec.Struct, frozen=True):
    """The speed of a role's rollout instances, as scheduling policies assume it (`m2flow.simulator.machines`)."""

    role: str
    step_s: float
    """Time of a decode step without samples."""
    sample_s: float
    """Added to a step by each sample."""
    prefill_token_s: float
    """Prefill time for each token of a prefix, where a sample continues elsewhere."""
    move_s: float
    """Other time that moving a sample takes."""
    source: str
    """`measured` or `modelled`."""
    max_running: int = 0
    """Samples that an instance decodes at once; 0: as many as it holds."""


PREFILL = "prefill"
"""The difficulty of prompts that no column has: their embeddings, which the rollout engines compute (`RolloutEngine.embeddings`)."""


class Line(msgspec.Struct, frozen=True):
    """One derived number that people get wrong, with its formula."""

    name: str
    value: str
    formula: str


class Plan(msgspec.Struct, frozen=True):
    """The whole plan."""

    flow: str
    cluster: str
    mode: Literal["time-shared", "split", "hybrid"]
    structure: str
    """Hash of the graph it was lowered from."""
    workers: tuple[WorkerPlan, ...]
    stages: tuple[Stage, ...]
    routes: tuple[Route, ...]
    syncs: tuple[WeightSyncPlan, ...]
    switches: tuple[SwitchPlan, ...]
    arithmetic: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    choice: Choice | None = None
    """The search's choice that the placement is from, where it was searched for."""
    policies: tuple[str, ...] = ()
    """Scheduling policies of rollouts (`m2flow.rollout_scheduling.policies`); none: first come, first served."""
    predictor: str = "siblings"
    """The predictor of response lengths that policies use."""
    difficulty: str = ""
    """The column of prompts that has their difficulty, or `PREFILL`; empty if nothing says it."""
    paces: tuple[Pace, ...] = ()
    """Speeds that policies assume; a role without one has the default decode model's."""

    def worker(self, name: str) -> WorkerPlan:
        return next(worker for worker in self.workers if worker.name == name)

    @property
    def num_instances(self) -> int:
        """Workers with a rollout engine."""
        return sum(any(slot.kind == "rollout" for slot in worker.engines) for worker in self.workers)

    @property
    def device_names(self) -> dict[str, str]:
        """The device of each worker, by the worker's name."""
        return {worker.name: worker.device for worker in self.workers}

    def verify(self) -> Plan:
        """Check that every stage has a worker with its kind of engine and every route and sync has two ends; return the plan itself.

        Raises:
            PlanError: the plan is inconsistent.
        """
        hosts = {w.name: {slot.kind for slot in w.engines} for w in self.workers}
        if len(hosts) != len(self.workers):
            raise PlanError("two workers of this plan have the same name")
        for stage in self.stages:
            if stage.engine != "source" and not stage.workers:
                raise PlanError(f"no worker runs {stage.call}", now="The cluster spec gives it no place.")
            for name in stage.workers:
                if stage.engine not in hosts.get(name, set()):
                    raise PlanError(f"{stage.call} is placed on {name}, which hosts no {stage.engine} engine")
            if stage.engine == "train" and stage.token_budget < 1:
                raise PlanError(f"{stage.call} has no token budget for its micro-batches")
        for worker in self.workers:
            for slot in worker.engines:
                if slot.turn and not (worker.lease and slot.turn.startswith(f"{slot.kind} ")):
                    raise PlanError(
                        f"{worker.name}: the {slot.kind} engine of {slot.role} has the turn {slot.turn!r}",
                        now=f"Only engines of workers with a lease have turns of their own, with names like '{slot.kind} {slot.role}'.",
                    )
                if slot.stays and not worker.lease:
                    raise PlanError(
                        f"{worker.name}: the {slot.kind} engine of {slot.role} is said to stay, and shares its devices with nobody",
                        now="Leave `stays` out: it is about engines of workers with a lease.",
                    )
        check_borrowing(self.workers)
        check_early_onload(self.workers)
        ends = [(r.source, r.target) for r in self.routes] + [(s.source, s.target) for s in self.syncs]
        for source, target in ends:
            for end in (source, target):
                if end not in hosts and end != "controller":
                    raise PlanError(f"a route names the worker {end!r}, which the plan does not have")
        return self

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self))

    def __str__(self) -> str:
        return plan_text(self)


def check_borrowing(workers: Sequence[WorkerPlan]) -> None:
    """Check that devices are lent only to rollout engines whose samples can continue on others of their role.

    Raises:
        PlanError: they are lent to another engine, or a share is out of range.
    """
    own = {slot.role for worker in workers for slot in worker.engines if slot.kind == "rollout" and not slot.lent_until}
    for worker in workers:
        for slot in worker.engines:
            if slot.lent_until and not (worker.lease and slot.kind == "rollout" and 0 < slot.lent_until <= 1 and slot.role in own):
                raise PlanError(
                    f"{worker.name}: devices can't be lent to the {slot.kind} engine of {slot.role} until {slot.lent_until:.3g} has ended",
                    now="It must be a rollout engine under a lease, the share at most 1, and another worker must have the role's too.",
                )


def check_early_onload(workers: Sequence[WorkerPlan]) -> None:
    """Check that engines which onload early are trainers that offload for rollout engines in other processes.

    Raises:
        PlanError: it is another engine, it stays, it is in the process of a rollout engine, or the share is out of range.
    """
    for worker in workers:
        generates = any(slot.kind == "rollout" for slot in worker.engines)
        for slot in worker.engines:
            leaves = bool(worker.lease) and slot.kind == "train" and not slot.stays
            if slot.onload_at and not (leaves and not generates and 0 < slot.onload_at <= 1):
                raise PlanError(
                    f"{worker.name}: the {slot.kind} engine of {slot.role} can't be onloaded when {slot.onload_at:.3g} of the samples "
                    "have ended",
                    now="It must be a trainer under a lease, in a worker of its own, that does not stay; the share is at most 1.",
                )


# ---- the printed form


def in_columns(rows: Iterable[Sequence[object]]) -> list[str]:
    """Format rows as indented lines with aligned columns.

    >>> in_columns([("a", 1), ("bcd", 22)])
    ['  a    1', '  bcd  22']
    """
    cells = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


K = TypeVar("K", bound=Hashable)

_FEW = 2
"""Most names that are listed one by one."""


def plan_text(plan: Plan) -> str:
    """Format the whole plan."""
    lines = [f"plan of {plan.flow} on {plan.cluster}: {plan.mode}, {len(plan.workers)} workers"]
    lines += _table(_workers(plan.workers))
    lines += ["calls"]
    lines += _table((s.call, f"@{s.unit}", names_text(s.workers) or "controller", _how(s)) for s in plan.stages)
    lines += ["routes"]
    lines += _table(_routes(plan.routes, [worker.name for worker in plan.workers]))
    if plan.policies:
        by = f" and {plan.difficulty!r}" if plan.difficulty else ""
        lines += [f"rollout policy: {', '.join(plan.policies)}; lengths by {plan.predictor}{by}"]
        lines += [
            f"  {p.role}: a decode step takes {p.step_s * 1e3:.3g} ms, and {p.sample_s * 1e3:.3g} ms a sample ({p.source})"
            for p in plan.paces
        ]
    if plan.syncs:
        checked = "each tensor's checksum is compared"
        alike = _alike(((s.role, s.source, s.transport, "; ".join(filter(None, (_sent(s), s.why, checked)))), s.target) for s in plan.syncs)
        lines += ["weights"]
        lines += _table((role, f"{source} -> {names_text(targets)}", *how) for (role, source, *how), targets in alike)
    if plan.switches:
        when = "when the one has nothing left to run and the other has"
        alike_leases = _alike(((s.lease, " <-> ".join(s.turns)), s.worker) for s in plan.switches)
        lines += ["switches"]
        lines += _table((lease, turns, names_text(workers), when) for (lease, turns), workers in alike_leases)
    lines += ["arithmetic"]
    lines += _table((line.name, line.value, line.formula) for line in plan.arithmetic)
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def names_text(names: Iterable[str]) -> str:
    """Join names, with consecutively numbered ones as a range.

    >>> names_text(["rollout-0", "rollout-1"]), names_text(["device-0", "rollout-1", "rollout-2", "rollout-3"])
    ('rollout-0, rollout-1', 'device-0, rollout-1 to rollout-3')
    """
    parts = [(name, *name.rpartition("-")[::2]) for name in names]
    told: list[str] = []
    keyed = [((stem, int(number) - at) if number.isdecimal() else (name, at), name) for at, (name, stem, number) in enumerate(parts)]
    for _, run in itertools.groupby(keyed, key=lambda one: one[0]):
        alike = [name for _, name in run]
        told += alike if len(alike) <= _FEW else [f"{alike[0]} to {alike[-1]}"]
    return ", ".join(told)


def _alike(rows: Iterable[tuple[K, str]]) -> list[tuple[K, list[str]]]:
    """Group names by key, in the order of each key's first."""
    found: dict[K, list[str]] = {}
    for key, name in rows:
        found.setdefault(key, []).append(name)
    return list(found.items())


def _table(rows: Iterable[Sequence[object]]) -> list[str]:
    return in_columns(rows) or ["  none"]


def _workers(workers: Sequence[WorkerPlan]) -> list[tuple[str, str, str, str]]:
    """Format a line for each worker, or for each run of workers that are alike."""

    def told(worker: WorkerPlan) -> tuple[str, str, str, str]:
        joins = f"lease {worker.lease}" if worker.lease else "may join" * worker.is_spare
        return worker.name.rpartition("-")[0], _processes(worker), _slots(worker), joins

    lines = []
    for (_, processes, slots, joins), group in itertools.groupby(workers, key=told):
        alike = list(group)
        for few in [alike] if len(alike) > _FEW else [[one] for one in alike]:
            devices = few[0].device if few[0].device == few[-1].device else f"{few[0].device} to {few[-1].device}"
            lines.append((names_text(one.name for one in few), processes.format(devices), slots, joins))
    return lines


def _processes(worker: WorkerPlan) -> str:
    one = f"{{}}, {_count(worker.threads, 'thread')}"
    return f"{worker.ranks} ranks: {one} each" if worker.ranks > 1 else one


def _routes(routes: Sequence[Route], names: Sequence[str]) -> list[tuple[str, str, str, str, str]]:
    """Format a line for each pair of kinds of workers."""
    alike: dict[tuple[str, ...], list[Route]] = {}
    for route in routes:
        kinds = (end.rpartition("-")[0] for end in (route.source, route.target))
        alike.setdefault((route.producer, route.consumer, *kinds, route.transport, _room(route), route.reason), []).append(route)
    lines, order = [], {name: at for at, name in enumerate(["controller", *names])}
    for (producer, consumer, _, _, transport, room, reason), group in alike.items():
        sources, targets = (sorted(ends, key=order.__getitem__) for ends in ({r.source for r in group}, {r.target for r in group}))
        is_own = len(group) > 1 and all(route.source == route.target for route in group)
        ends = f"{names_text(sources)} -> {'each the same' if is_own else names_text(targets)}"
        lines.append((f"{producer} -> {consumer}", ends, transport, room, reason))
    return lines


def _slots(worker: WorkerPlan) -> str:
    return ", ".join(
        s.hosted if s.kind == "function" else f"{s.role}: {s.kind} ({s.engine}{_degrees(s)}){_turn(s)}" for s in worker.engines
    )


def _turn(slot: EngineSlot) -> str:
    lent = f", lent until {slot.lent_until * 100:.3g}% have ended" if slot.lent_until else ""
    comes = f", comes when {slot.onload_at * 100:.3g}% have ended" if slot.onload_at else ""
    return f" in turn {slot.turn!r}" * bool(slot.turn) + " stays" * slot.stays + lent + comes


def _degrees(slot: EngineSlot) -> str:
    degrees = [f", {name} {slot.planned[name]}" for name in ("tp", "pp", "sp", "ep", "zero") if name in slot.planned]
    return "".join(degrees) + ", optimizer offloaded" * slot.offload + _passes(slot) + ", layers recomputed" * slot.recompute


def _passes(slot: EngineSlot) -> str:
    parts = f", micro-batches in {slot.micro_batches} parts" if slot.micro_batches > 1 else ""
    chunks = f", {slot.vpp} chunks of layers a stage" if slot.vpp > 1 else ""
    return parts + chunks + f", {slot.schedule}" * (slot.schedule != "1f1b")


def _how(stage: Stage) -> str:
    if stage.engine == "source":
        return "read by the controller"
    if stage.engine == "rollout":
        return f"up to {stage.chunk} at once in an instance; each sample leaves when it is done"
    if stage.engine == "train" and stage.unit in ("minibatch", "batch") and not stage.is_barrier:
        return f"micro-batches of up to {stage.token_budget} tokens, as groups come in; one optimiser step a mini-batch"
    return "waits for all of its input" if stage.is_barrier else f"up to {stage.chunk} samples a task, as they come in"


def _sent(sync: WeightSyncPlan) -> str:
    return "adapters alone" if sync.sends == "adapters" else ""


def _room(route: Route) -> str:
    room = f"{route.capacity} samples" + (f", {route.capacity_bytes:,} bytes" if route.capacity_bytes else "")
    return f"{room}; spills to segment files" if route.spills else room


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
