"""The micro execution plan: who runs what, on how much at a time, how data and weights move, and what the search says of it.

Workload, Costs --search--> Choice --(m2flow.micro.lowering.placement)--> the workers and leases of a Plan

Data only; it is saved beside the run, printed by `m2flow plan` and read by the simulator.

MacroGraph --(m2flow.micro.lowering.passes)--> Plan --(controller, scheduler, workers)--> a run

A plan is frozen data with a checker and a printed form; it serialises to JSON. It decides time only, never the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import Constant, EngineId, Footprint, Layout
from m2flow.micro.protocol.plan_text import plan_text

Mode = Literal["time-shared", "split", "hybrid"]


class Seat(msgspec.Struct, frozen=True):
    """Where an engine is, for some calls of the step: it has `num_devices` of a pool from `first_device` on."""

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
    """Seats with the same lease take turns with their devices; empty if no other has any of them."""
    mode: Literal["time-shared", "split"] = "split"
    is_swapped: bool = False
    """Between its calls all that it keeps is in the host's memory, and its devices are free for others."""

    lent_until: float = 0.0
    """Of a rollout engine some of whose devices a trainer lends: the share of its samples that have ended when it gives those back."""

    comes_at: float = 0.0
    """Of a trainer that is swapped: the share of the samples before it that have ended when it comes, beside those that run. 0: all."""

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_devices)


class Part(msgspec.Struct, frozen=True):
    """One summand of the predicted time."""

    what: str
    """`policy.generate`, `switch to train`, `weight sync`."""
    seconds: float
    on_critical_path: bool = True


class Bound(msgspec.Struct, frozen=True):
    """A time that no schedule of this workload on this cluster can beat."""

    name: str
    """`longest sample`, `work`, `k-longest`, `critical path`."""
    seconds: float


class Loser(msgspec.Struct, frozen=True):
    """The best of the plans of another shape, and why it lost."""

    what: str
    predicted_step_s: float
    why: str


class Choice(msgspec.Struct, frozen=True):
    """The best plan that was found."""

    flow: str
    cluster: str
    mode: Mode
    seats: tuple[Seat, ...]
    predicted_step_s: float
    parts: tuple[Part, ...]
    bounds: tuple[Bound, ...]
    is_exact: bool
    """No plan of the cost model is better; otherwise `gap_s` says by how much one might be."""
    gap_s: float
    advice: str
    """What limits it, and what would help."""
    losers: tuple[Loser, ...]
    search_s: float
    constraints_cost_s: dict[str, float]
    """Each constraint of the spec -> seconds a step that it costs against the plan without it."""
    constants: dict[str, Constant]
    not_tried: tuple[str, ...] = ()
    """What the search left out, and faster plans that can't be run."""

    @property
    def lower_bound_s(self) -> float:
        return max((bound.seconds for bound in self.bounds), default=0.0)

    @property
    def efficiency(self) -> float:
        return self.lower_bound_s / self.predicted_step_s if self.predicted_step_s else 1.0


SyncTransport = Literal["same process", "shared memory", "cuda ipc", "broadcast", "tcp", "file"]


class EngineSlot(msgspec.Struct, frozen=True):
    """An engine that a worker hosts."""

    role: str
    """The role whose model it holds; `*` for functions."""
    kind: Literal["rollout", "train", "function"]
    engine: str
    """Its name in the registry."""
    turn: str = ""
    """Under a lease, of an engine that does not share the turn of all of its kind: the name of its own. Those with the same may work at
    once."""
    stays: bool = False
    """Under a lease: what it keeps (a rollout engine its weights, a trainer all but activations) stays there while others work."""
    lent_until: float = 0.0
    """Under a lease, of a rollout engine on devices that a trainer lends, while others of its role have their own: the share of a
    generation's samples that have ended when it gives them back, and what it still has goes on elsewhere. 0: it keeps what it has."""
    comes_at: float = 0.0
    """Under a lease, of a trainer that leaves the devices: the share of a generation's samples that have ended when it comes back, beside
    those that still run. 0: when none does."""
    tp: int = 1
    """Of a rollout engine, in each instance: devices that share each layer; `pp` stages of layers; `ep` that share the experts of one."""
    pp: int = 1
    ep: int = 1

    @property
    def takes_turn(self) -> str:
        """The turn in which it has its devices, where they are shared: `rollout`, `train`, or one of its own (`train critic`)."""
        return self.turn or self.kind


class WorkerPlan(msgspec.Struct, frozen=True):
    """A process."""

    name: str
    device: str
    threads: int
    engines: tuple[EngineSlot, ...]
    lease: str = ""
    """The lease that its rollout and train engines take turns with; empty if it has only one of them."""
    ranks: int = 1
    """Of its trainer: processes that hold one model together, each on a device, or with threads, of its own."""
    is_spare: bool = False
    """Not there when the run begins; it may join (`m2flow cluster scale`)."""


class Room(msgspec.Struct, frozen=True):
    """What a generation's rows may take up on the way to one worker (`m2flow.micro.scheduler.backpressure`)."""

    target: str
    samples: int
    num_bytes: int
    takers: int
    """Calls there that take each row."""
    is_whole: bool
    """One of them needs all rows of the generation at once."""
    fits: bool
    """What must be there at once does. Where it does not, it is never begun."""


class Stage(msgspec.Struct, frozen=True):
    """How one call is run."""

    call: str
    engine: str
    unit: Literal["sample", "group", "minibatch", "batch"]
    """The smallest set of samples that a task may have."""
    is_barrier: bool
    """It starts only when all of its input is there."""
    workers: tuple[str, ...] = ()
    chunk: int = 0
    """Most samples in a task. 0: as many as the packing takes."""
    token_budget: int = 0
    """Train: tokens that a micro-batch is filled up to. 0 elsewhere."""
    forward_to: tuple[str, ...] = ()
    """Workers that get each row as soon as it is there."""
    rooms: tuple[Room, ...] = ()
    """Of a generation: what may be under way to each worker that its rows are sent to, where that is limited."""
    spills: bool = False
    """Of a generation: rows stay in the segment file of who made them until a task needs them, where there is no room for them."""
    state: str = ""
    """The role whose state it reads or writes, which is on one worker; empty if it may run anywhere."""


class Route(msgspec.Struct, frozen=True):
    """A channel for the rows of one call's result."""

    producer: str
    consumer: str
    source: str
    target: str
    transport: Literal["same process", "shared memory", "zmq ipc", "zmq tcp", "torch gloo", "torch nccl"]
    capacity: int
    """Most samples under way; enough for all that a step produces, and those that staleness lets run beside it, so that nothing waits
    for room across a lease."""
    reason: str = ""
    """Why this transport."""
    capacity_bytes: int = 0
    """Most bytes under way; 0: no limit is within reach."""
    needs: int = 0
    """Of a generation: samples that the consumer must be able to have at once."""
    needs_bytes: int = 0
    """The same in bytes, each sample as long as it may be."""
    is_whole: bool = False
    """They are all of the call: the consumer can't begin with fewer."""
    spills: bool = False
    """They do not fit: rows stay in the segment file of who made them until a task needs them."""


class WeightSync(msgspec.Struct, frozen=True):
    """How new weights reach a rollout engine."""

    role: str
    source: str
    target: str
    transport: SyncTransport
    why: str = ""
    sends: Literal["weights", "adapters"] = "weights"
    """`adapters`: them alone; the rollout engine adds them to the weights that it began with."""


class SwitchPlan(msgspec.Struct, frozen=True):
    """A device that engines take turns with."""

    lease: str
    worker: str
    turns: tuple[str, ...] = ("rollout", "train")
    """Of all engines under this lease."""


class Pace(msgspec.Struct, frozen=True):
    """How fast a role's rollout instances are, as policies take it (`m2flow.simulator.machines`)."""

    role: str
    step_s: float
    """Of any decode step."""
    sample_s: float
    """Added by each sample."""
    prefill_token_s: float
    """For each token of a prefix that is computed again, where a sample goes on elsewhere."""
    move_s: float
    """What a sample's leaving and coming take besides."""
    source: str
    """`measured` or `modelled`."""


class Line(msgspec.Struct, frozen=True):
    """One number that people get wrong, with how it comes about."""

    name: str
    value: str
    formula: str


class Plan(msgspec.Struct, frozen=True):
    """The whole of it."""

    flow: str
    cluster: str
    mode: Literal["time-shared", "split", "hybrid"]
    structure: str
    """Hash of the graph it was lowered from."""
    workers: tuple[WorkerPlan, ...]
    stages: tuple[Stage, ...]
    routes: tuple[Route, ...]
    syncs: tuple[WeightSync, ...]
    switches: tuple[SwitchPlan, ...]
    arithmetic: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    choice: Choice | None = None
    """What the placement comes from, where it was searched for."""
    policies: tuple[str, ...] = ()
    """What goes first, and where, in a rollout (`m2flow.rollout_scheduling.policies`); none: first come, first served."""
    predictor: str = "siblings"
    """What policies take lengths to be."""
    difficulty: str = ""
    """The column of prompts that says how hard they are; empty: none does."""
    paces: tuple[Pace, ...] = ()
    """What policies take time to be; a role without one has the default model's."""

    def worker(self, name: str) -> WorkerPlan:
        return next(worker for worker in self.workers if worker.name == name)

    @property
    def device_names(self) -> dict[str, str]:
        """The device of each worker, by the worker's name."""
        return {worker.name: worker.device for worker in self.workers}

    def verify(self) -> Plan:
        """The plan itself, checked: every stage has a worker that hosts its kind of engine, every route and sync two ends."""
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
    """Devices are lent to rollout engines that some others of their role can stand in for.

    Raises:
        PlanError: they are not, or a share is none.
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
    """Who comes ahead is a trainer that leaves devices which others generate on.

    Raises:
        PlanError: it is another engine, it stays, it is in the process of a rollout engine, or the share is none.
    """
    for worker in workers:
        generates = any(slot.kind == "rollout" for slot in worker.engines)
        for slot in worker.engines:
            leaves = bool(worker.lease) and slot.kind == "train" and not slot.stays
            if slot.comes_at and not (leaves and not generates and 0 < slot.comes_at <= 1):
                raise PlanError(
                    f"{worker.name}: the {slot.kind} engine of {slot.role} can't come when {slot.comes_at:.3g} of the samples have ended",
                    now="It must be a trainer under a lease, in a worker of its own, that does not stay; the share is at most 1.",
                )
