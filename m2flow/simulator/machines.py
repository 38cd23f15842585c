"""Map the workers of a plan to devices and costs, for the simulator and for the scheduling policies.

    Plan, Costs --machines_of--> Machine for each worker
    Plan, ClusterSpec, Costs --with_paces--> Plan with a Pace for each sampled role --> the scheduler's policies

A worker of a searched plan is on the devices of its placements. A worker of a plan by rule is on this machine, whose devices are cores: as
many as it has threads; workers that take turns share theirs. A run and its simulation give a policy the same numbers. Limit: one pace for
a role, that of its slowest instance.

Engines of one worker (`Machine.lanes`). Its loop steps those that decode in its own process one after the other. Servers, which decode in
processes of their own, do so at the same time on a host's cores. On a GPU two processes have the device in turn, so their steps add up as
in one. Limits: servers on a host find cores for all their threads; a step leaves nothing of a GPU to others.

Rows. `RowTimes` has the times from which rows are available to each worker.

Interference (`Paces`). On this machine (`ClusterSpec.pools` empty) concurrent work slows other work down by a factor; several engines of a
kind as much as one. Devices of a pool have memory and caches of their own, and don't interfere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final, get_args

import msgspec

from m2flow.errors import InternalError, M2FlowError, PlanError
from m2flow.macro.graph import MacroGraph
from m2flow.micro.lowering.capabilities import is_self_paced, readable_offloaded
from m2flow.micro.protocol.cost_terms import Costs, DecodeCost, EngineId, EngineKind, Footprint, Layout, TrainCost
from m2flow.micro.protocol.plan import Pace, Placement, Plan, WorkerPlan
from m2flow.planner.planning import question_of
from m2flow.spec import ClusterSpec, base_of

if TYPE_CHECKING:
    from pathlib import Path

    from m2flow.recipe import Model

_DEVICE = re.compile(r"(?P<pool>.+)\[(?P<first>\d+)(:(?P<stop>\d+))?\]")


@dataclass(frozen=True)
class Place:
    """Devices of one pool that a worker is on."""

    pool: str
    first: int
    stop: int

    @property
    def num_devices(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Hosted:
    """An engine of a worker, with its memory and its costs of switching."""

    engine: EngineId
    layout: Layout
    footprint: Footprint
    leave_s: float
    come_s: float
    is_resident: bool
    """Whether it stays on the devices while other engines work there."""
    turn: str = ""
    """The turn of the lease in which it works."""
    gives_s: float = 0.0
    """Seconds to move what another trainer needs on the devices to copy the weights of this one while it is offloaded."""
    gives_bytes: int = 0
    """Bytes on each device during that copy."""


@dataclass(frozen=True)
class Machine:
    """The devices of one worker, and the costs of what it does."""

    worker: str
    place: Place | None
    """None: a process on the host, without devices."""
    lease: str = ""
    engines: tuple[Hosted, ...] = ()
    decode: Mapping[str, DecodeCost] = field(default_factory=dict)
    """By role."""
    train: Mapping[str, TrainCost] = field(default_factory=dict)
    """By role."""
    sync_s: Mapping[str, float] = field(default_factory=dict)
    """Role -> seconds to load new weights into its rollout engine here."""
    beside: frozenset[str] = frozenset()
    """Roles whose rollout engines decode here at the same time as any other."""

    @property
    def lanes(self) -> tuple[tuple[str, ...], ...]:
        """The roles that decode here, together those whose engines decode one after the other."""
        in_turn = tuple(role for role in self.decode if role not in self.beside)
        return *([in_turn] if in_turn else []), *((role,) for role in self.decode if role in self.beside)

    @property
    def pool(self) -> str:
        return self.place.pool if self.place else ""

    @property
    def num_devices(self) -> int:
        return self.place.num_devices if self.place else 0

    def switch_s(self, turn: str, to: str) -> float:
        """Seconds to offload the engines of one turn and onload those of another."""
        offload_s = sum(hosted.leave_s for hosted in self.engines if hosted.turn == turn)
        return offload_s + sum(hosted.come_s for hosted in self.engines if hosted.turn == to)

    @property
    def all_bytes(self) -> int:
        return sum(hosted.footprint.device_bytes for hosted in self.engines)

    def kept_bytes(self, turn: str) -> int:
        """Bytes that the engines of a turn onload to each device."""
        return sum(hosted.footprint.kept_bytes for hosted in self.engines if hosted.turn == turn and not hosted.is_resident)

    def copy_s(self, source: str, turn: str) -> float:
        """Seconds for a trainer here to copy the weights of another role's trainer. A copy between two models on the same devices takes
        no time that counts.
        """
        return sum(hosted.gives_s for hosted in self._away(source, turn))

    def copy_bytes(self, source: str, turn: str) -> int:
        """Bytes on each device during such a copy, beyond `resident_bytes`."""
        return sum(hosted.gives_bytes for hosted in self._away(source, turn))

    def _away(self, source: str, turn: str) -> list[Hosted]:
        return [h for h in self.engines if h.engine == EngineId(source, "train") and h.turn != turn and not h.is_resident]

    def resident_bytes(self, turn: str) -> int:
        """Bytes on each device while the engines of a turn work."""
        return sum(
            hosted.footprint.device_bytes if hosted.turn == turn else hosted.footprint.kept_bytes * hosted.is_resident
            for hosted in self.engines
        )


def machines_of(plan: Plan, spec: ClusterSpec, costs: Costs) -> dict[str, Machine]:
    """The machine of each worker.

    Raises:
        PlanError: a worker of a searched plan is where the search has placed no such engine.
    """
    places = _places(plan, spec)
    placements = {worker.name: _placements(plan, worker, places[worker.name]) if worker.name in places else [] for worker in plan.workers}
    trained: dict[str, tuple[str, Placement]] = {
        placement.engine.role: (worker, placement)
        for worker, found in placements.items()
        for placement in found
        if placement.engine.kind == "train"
    }
    # Of those that a search found the calls of a step; other calls may come before the steps.
    calls = [stage.call for stage in plan.stages] if plan.choice is None else [c for one in plan.choice.placements for c in one.calls]
    updated = {base_of(call) for call in calls if call.partition("@")[0].endswith(".update")}
    synced = next((sync.role for sync in plan.syncs if sync.role in updated), "")
    leases = {worker.name: worker.lease for worker in plan.workers}
    machines = {}
    for worker in plan.workers:
        found = placements[worker.name]
        hosted = []
        slots = {(slot.role, slot.kind): slot for slot in worker.engines}
        for placement in found:
            footprint = (
                placement.footprint if plan.choice is not None else costs.footprint(placement.engine, placement.pool, placement.layout)
            )
            switch = costs.switch(placement.engine, placement.pool, footprint)
            slot = slots[placement.engine.role, placement.engine.kind]
            is_resident = slot.stays or not worker.lease or (plan.choice is None and switch.is_resident)
            stays_s = (switch.come_s if switch.is_resident else switch.rebuild_s) if worker.lease else 0.0
            leave_s, come_s = (0.0, stays_s) if is_resident else (switch.leave_s, switch.come_s)
            gives_s, gives_bytes = leave_s + come_s, footprint.kept_bytes
            if readable_offloaded(slot.engine):
                gives_s, gives_bytes = costs.switch(placement.engine, placement.pool, Footprint(weights=footprint.weights)).come_s, 0
            hosted.append(
                Hosted(placement.engine, placement.layout, footprint, leave_s, come_s, is_resident, slot.takes_turn, gives_s, gives_bytes)
            )
        syncs = {}
        for placement in found:
            role = placement.engine.role
            if placement.engine.kind == "rollout" and role in trained:
                trainer, source = trained[role]
                is_same = trainer == worker.name or (bool(worker.lease) and worker.lease == leases[trainer])
                sync_s = costs.sync_s(role, (source.pool, source.layout), (placement.pool, placement.layout), is_same_devices=is_same)
                syncs[role] = sync_s + costs.rest_s() * (role == synced)  # Once a step, as in the search.
        machines[worker.name] = Machine(
            worker.name,
            places.get(worker.name),
            worker.lease,
            tuple(hosted),
            {s.engine.role: costs.decode(s.engine, s.pool, s.layout) for s in found if s.engine.kind == "rollout"},
            {s.engine.role: costs.train(s.engine, s.pool, s.layout) for s in found if s.engine.kind == "train"},
            syncs,
            frozenset(
                slot.role for slot in worker.engines if worker.device == "cpu" and slot.kind == "rollout" and is_self_paced(slot.engine)
            ),
        )
    return machines


def _placements(plan: Plan, worker: WorkerPlan, place: Place) -> list[Placement]:
    """The placements of a worker's engines, but for those that only speak in others' episodes."""
    engines = [EngineId(slot.role, slot.kind) for slot in worker.engines if slot.kind != "function"]
    placements = [_placement(plan, worker, place, engine) for engine in engines]
    samples = any(placement is not None and placement.engine.kind == "rollout" for placement in placements)
    for engine, placement in zip(engines, placements, strict=True):
        if placement is None and not (samples and engine.kind == "rollout"):
            raise PlanError(
                f"the worker {worker.name} on {worker.device} has {engine}, which the plan's search has not placed there",
                now="The plan's workers and its search are of different plans: make the plan anew (m2flow plan), and simulate that.",
            )
    return [placement for placement in placements if placement is not None]


def _placement(plan: Plan, worker: WorkerPlan, place: Place, engine: EngineId) -> Placement | None:
    if plan.choice is None:
        layout = Layout(tp=worker.threads, dp=worker.ranks if engine.kind == "train" else 1)
        return Placement(engine, (), "", place.first, layout.num_devices, layout, 0, Footprint(), worker.lease)
    for placement in plan.choice.placements:
        inside = not place.pool or (
            placement.pool == place.pool and placement.first_device <= place.first and place.stop <= placement.devices.stop
        )
        if placement.engine == engine and inside:
            return placement
    return None


def _places(plan: Plan, spec: ClusterSpec) -> dict[str, Place]:
    """The devices of each worker. Without pools they are this machine's cores, one for each thread of each rank: the workers follow one
    another, and a trainer that takes turns has the cores of the rollout workers that it takes them with.
    """
    places: dict[str, Place] = {}
    last = 0
    hosts = [worker for worker in plan.workers if any(slot.kind != "function" for slot in worker.engines)]
    for worker in sorted(hosts, key=lambda worker: (worker.lease, "rollout" not in {slot.kind for slot in worker.engines})):
        found = _DEVICE.fullmatch(worker.device)
        if spec.pools and found:
            first = int(found["first"])
            places[worker.name] = Place(found["pool"], first, int(found["stop"] or first + 1))
            continue
        shared = [places[other.name] for other in plan.workers if worker.lease and other.lease == worker.lease and other.name in places]
        if shared and not any(slot.kind == "rollout" for slot in worker.engines):
            places[worker.name] = Place("", min(place.first for place in shared), max(place.stop for place in shared))
            continue
        places[worker.name] = Place("", last, last + worker.threads * worker.ranks)
        last += worker.threads * worker.ranks
    return places


def kinds(machine: Machine) -> frozenset[EngineKind]:
    """Kinds of the engines that a worker has."""
    return frozenset(hosted.engine.kind for hosted in machine.engines)


def with_paces(plan: Plan, spec: ClusterSpec, costs: Costs) -> Plan:
    """The plan with the pace of each sampled role, by these costs."""
    found: dict[str, list[DecodeCost]] = {}
    for machine in machines_of(plan, spec, costs).values():
        for role, cost in machine.decode.items():
            found.setdefault(role, []).append(cost)
    slowest = {role: max(of, key=lambda cost: cost.seconds(cost.max_running)) for role, of in found.items()}
    sources = {name: constant.source.partition(":")[0] for name, constant in costs.constants().items()}
    paces = [
        Pace(
            role,
            cost.step_s,
            cost.sample_s,
            cost.prefill_token_s,
            cost.enter_s + cost.leave_s + cost.handover_s,
            sources.get(f"{role}.rollout.step_s", "given"),
            spec.rollout.max_running,
        )
        for role, cost in sorted(slowest.items())
    ]
    return msgspec.structs.replace(plan, paces=tuple(paces))


def paced(plan: Plan, graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, profile: Path | None) -> Plan:
    """The plan of a flow, whose policies go by the profile's costs, or by modelled ones; so do moves of episodes between instances.

    Where nothing says how large a model is, they go by those of the default model, and the plan says so.

    Raises:
        SpecError: a profile that can't be used.
    """
    if not plan.policies and not (plan.num_instances > 1 and any("agent" in call.options for call in graph.calls)):
        return plan
    try:
        return with_paces(plan, spec, question_of(graph, models, spec, profile=profile).costs)
    except M2FlowError as error:
        if profile is not None:
            raise
        if not plan.policies:
            return plan
        note = f"policies take a decode step to last what the default model says: {str(error).splitlines()[0]}"
        return msgspec.structs.replace(plan, notes=(*plan.notes, note))


# ---- where rows are


Hop = Callable[[int, str, str], float]
"""(bytes, source, target) -> seconds to send so many bytes from one worker to another."""

TOKEN_BYTES = 16
"""Bytes of a sample's columns for each token: id, log-probability and version 4 each, two masks, and about 2 of text."""
ROW_BYTES = 32
"""Bytes of a row besides its tokens: identity and a number or two."""


@final
class RowTimes:
    """The times from which rows are available, by call, worker and identity."""

    def __init__(self, hop_s: Hop) -> None:
        self._hop_s = hop_s
        self._there: dict[int, dict[str, dict[int, float]]] = {}

    def made(self, call: int, ids: Iterable[int], place: str, now_s: float) -> None:
        """Note that a call's rows are made."""
        self._there.setdefault(call, {}).setdefault(place, {}).update(dict.fromkeys(ids, now_s))

    def adopted(self, call: int, drawn: int, ids: Iterable[int], place: str) -> None:
        """Note that rows of one call belong to another one too."""
        here = self._at(drawn, place)
        self._there.setdefault(call, {}).setdefault(place, {}).update((row, here[row]) for row in ids)

    def hop_s(self, num_bytes: int, source: str, target: str) -> float:
        """Seconds to send so many bytes from one worker to another."""
        return 0.0 if source == target else self._hop_s(num_bytes, source, target)

    def send(self, call: int, ids: Iterable[int], source: str, target: str, now_s: float, num_tokens: Callable[[int], int]) -> None:
        """Send rows from one worker to another; rows still on their way to the source are sent on from there."""
        if source == target:
            return
        ids = list(ids)
        here, there = self._at(call, source), self._there.setdefault(call, {}).setdefault(target, {})
        try:
            start_s = max([now_s, *[here[row] for row in ids]])
        except KeyError as missing:
            raise InternalError(f"the scheduler lets {source} send row {missing} of call {call}, which it does not have") from None
        num_bytes = sum(ROW_BYTES + TOKEN_BYTES * num_tokens(row) for row in ids)
        there.update(dict.fromkeys(ids, start_s + self._hop_s(num_bytes, source, target)))

    def ready_s(self, call: int, ids: Iterable[int], place: str) -> float:
        """Time at which all of these rows are available.

        Raises:
            InternalError: one was never sent.
        """
        here = self._at(call, place)
        try:
            return max((here[row] for row in ids), default=0.0)
        except KeyError as missing:
            raise InternalError(f"a task on {place} needs row {missing} of call {call}, which nobody sent there") from None

    def forget(self, call: int, place: str) -> None:
        self._there.get(call, {}).pop(place, None)

    def written_down(self, place: str, ledger: str, now_s: float) -> None:
        """Make the rows of a worker available from where it wrote them down."""
        for places in self._there.values():
            here = [row for row, since_s in places.get(place, {}).items() if since_s <= now_s]
            places.setdefault(ledger, {}).update(dict.fromkeys(here, now_s))

    def lost(self, place: str) -> None:
        """Remove all rows of a lost worker."""
        for places in self._there.values():
            places.pop(place, None)

    def _at(self, call: int, place: str) -> dict[int, float]:
        return self._there.get(call, {}).get(place, {})


# ---- interference


Kind = Literal["rollout", "train", "function"]
Slowdown = Callable[[Kind, Kind], float]


def undisturbed(kind: Kind, beside: Kind) -> float:
    """A slowdown without any interference."""
    return 1.0


@final
class Paces:
    """Tracks who works, and how much that slows others down."""

    def __init__(self, slowdown: Slowdown, workers: Iterable[str]) -> None:
        kinds: tuple[Kind, ...] = get_args(Kind)
        self._factors = {(kind, beside): max(slowdown(kind, beside), 1.0) for kind in kinds if kind != "function" for beside in kinds}
        self.has_any = any(factor > 1.0 for (kind, beside), factor in self._factors.items() if kind != beside)
        self._busy: dict[str, Counter[Kind]] = {worker: Counter() for worker in workers}

    def change(self, worker: str, kind: Kind, by: int) -> bool:
        """Add `by` tasks of a kind on a worker, and return whether the pace of others may have changed."""
        before = self._busy[worker][kind]
        self._busy[worker][kind] += by
        return self.has_any and bool(before) != bool(before + by)

    def of(self, worker: str, kind: Kind) -> float:
        """Factor by which this kind of work takes longer on a worker now than alone."""
        if not self.has_any or kind == "function":
            return 1.0
        others = {beside for name, busy in self._busy.items() if name != worker for beside, count in busy.items() if count > 0}
        slower = [self._factors[kind, beside] - 1.0 for beside in others if beside != kind]
        return 1.0 + sum(slower)
