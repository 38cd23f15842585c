"""Placement by choice: from the seats that the search found to the workers and leases of a plan.

    Choice --seating--> WorkerPlans

A rollout seat of n replicas is n workers; a trainer is one worker, however many devices it has, since its ranks work as one. Engines
of one kind on the same devices in the same layout share a worker. An engine that generates and one that trains share a worker too
if they take turns with a single device, so that samples and weights need not leave the process; on more devices than one they are
processes of their own, which take turns by the lease. All engines of a kind have one turn, unless their devices can't hold them at once.
"""

from __future__ import annotations

from m2flow.errors import PlanError
from m2flow.micro.costs.terms import EngineId
from m2flow.micro.lowering.abilities import can_rest
from m2flow.micro.lowering.chunking import Sizes
from m2flow.micro.lowering.degrees import seated_degrees
from m2flow.micro.plan import EngineSlot, Stage, WorkerPlan
from m2flow.micro.search.choice import Choice, Seat
from m2flow.spec import ClusterSpec

_Place = tuple[str, int, int]
"""A pool, the first device, and the one after the last."""


def seat_workers(choice: Choice, spec: ClusterSpec, device: str, *, deterministic: bool = False) -> tuple[WorkerPlan, ...]:
    """The processes of a choice, and those for functions.

    Args:
        device: what a device of this machine is called where the spec has no pools (`cpu`, `cuda:0`).
        deterministic: engines on cores of this machine have one thread, however many cores the seat has.
    Raises:
        PlanError: two seats have a device in common and take no turns with it.
    """
    _check_overlaps(choice.seats)
    slots: dict[tuple[str, _Place, str], list[EngineSlot]] = {}
    threads: dict[_Place, int] = {}
    turns = _turns(choice.seats)
    for seat in choice.seats:
        engine = spec.rollout.engine if seat.engine.kind == "rollout" else spec.train.engine
        for place in _replicas(seat):
            stays = bool(seat.lease) and not seat.is_swapped and (seat.engine.kind == "train" or can_rest(engine))
            lease = seat.lease if _shares(seat, place, choice.seats) else ""
            turn, stays = (turns.get(seat.engine, ""), stays) if lease else ("", False)
            slot = EngineSlot(seat.engine.role, seat.engine.kind, engine, turn, stays, seat.lent_until if lease else 0.0, seat.comes_at)
            laid = seated_degrees(slot, seat, spec) if seat.engine.kind == "rollout" else slot
            slots.setdefault((seat.engine.kind, place, lease), []).append(laid)
            threads[place] = place[2] - place[1] if device == "cpu" and not spec.pools and not deterministic else 1
    workers = []
    count = {"rollout": 0, "train": 0, "device": 0}
    for (kind, place, lease), engines in slots.items():
        other = ("train" if kind == "rollout" else "rollout", place, lease)
        is_one_process = bool(lease) and other in slots and _has_one_process(place, spec)
        if is_one_process and kind == "train":
            continue  # Its slots go to the worker of the rollout engines there.
        name = "device" if is_one_process else kind
        both = engines + slots[other] if is_one_process else engines
        ranks = _ranks(place, spec) if any(slot.kind == "train" for slot in both) else 1
        own = max(1, threads[place] // ranks)
        workers.append(
            WorkerPlan(f"{name}-{count[name]}", _device_name(place, spec, device), own, tuple(dict.fromkeys(both)), lease, ranks)
        )
        count[name] += 1
    functions = (EngineSlot("*", "function", "python"),)
    return *workers, *(WorkerPlan(f"functions-{i}", "cpu", 1, functions) for i in range(spec.functions.workers))


def _has_one_process(place: _Place, spec: ClusterSpec) -> bool:
    """Whether engines that generate and train there by turns are in one process."""
    return place[2] - place[1] == 1 or not spec.pools


def share_a_process(rollout: Seat, trainer: Seat, spec: ClusterSpec) -> bool:
    """Whether one of the replicas is in the trainer's process, which does one thing at a time, if the two seats take turns."""
    place = trainer.pool, trainer.first_device, trainer.devices.stop
    return place in _replicas(rollout) and _has_one_process(place, spec)


def _shares(seat: Seat, place: _Place, seats: tuple[Seat, ...]) -> bool:
    """Whether a replica takes turns: of a rollout engine that has lent devices, those that are on them do."""
    if not seat.lent_until:
        return bool(seat.lease)
    others = (other for other in seats if other.engine != seat.engine and other.lease == seat.lease and other.pool == place[0])
    return any(other.first_device < place[2] and place[1] < other.devices.stop for other in others)


def _turns(seats: tuple[Seat, ...]) -> dict[EngineId, str]:
    """The turns of engines that can't work on their devices while all others of their kind and lease do; nothing for those that can."""
    alike: dict[tuple[str, str], dict[EngineId, Seat]] = {}
    for seat in seats:
        if seat.lease:
            alike.setdefault((seat.lease, seat.engine.kind), {})[seat.engine] = seat
    found = {}
    for (_, kind), seat_of in alike.items():
        groups: list[list[Seat]] = []
        for seat in seat_of.values():
            group = next((group for group in groups if all(_may_share_a_turn(seat, other) for other in group)), None)
            groups += [[seat]] if group is None else []
            if group is not None:
                group.append(seat)
        for group in groups if len(groups) > 1 else ():
            found.update({seat.engine: f"{kind} {', '.join(other.engine.role for other in group)}" for seat in group})
    return found


def _may_share_a_turn(one: Seat, other: Seat) -> bool:
    """Without a common device; or in one process, which does one thing at a time, where the devices hold both."""
    is_apart = one.pool != other.pool or one.devices.stop <= other.first_device or other.devices.stop <= one.first_device
    return is_apart or (_replicas(one) == _replicas(other) and not one.is_swapped and not other.is_swapped)


def _ranks(place: _Place, spec: ClusterSpec) -> int:
    """Of a trainer: in a pool each device is one; on this machine the spec says it."""
    return place[2] - place[1] if spec.pools else spec.train.ranks


def seat_sizes(choice: Choice, stages: tuple[Stage, ...]) -> dict[str, Sizes]:
    """The sizes that the seats give calls. How many samples decode together is the engine's limit, not a seat's."""
    chunks = {call.partition("@")[0]: seat.chunk for seat in choice.seats for call in seat.calls if seat.chunk}
    return {s.call: Sizes(chunks[s.call], s.token_budget) for s in stages if s.engine != "rollout" and s.call in chunks}


def _replicas(seat: Seat) -> list[_Place]:
    if seat.engine.kind == "train":
        return [(seat.pool, seat.first_device, seat.devices.stop)]
    size = seat.num_devices // seat.layout.dp
    return [(seat.pool, first, first + size) for first in range(seat.first_device, seat.devices.stop, size)]


def _device_name(place: _Place, spec: ClusterSpec, device: str) -> str:
    pool, first, stop = place
    if not spec.pools:
        return device
    return f"{pool}[{first}]" if stop == first + 1 else f"{pool}[{first}:{stop}]"


def _check_overlaps(seats: tuple[Seat, ...]) -> None:
    for i, one in enumerate(seats):
        for other in seats[i + 1 :]:
            common = range(max(one.first_device, other.first_device), min(one.devices.stop, other.devices.stop))
            if one.pool != other.pool or not common or one.engine.kind == other.engine.kind:
                continue
            if not one.lease or one.lease != other.lease:
                where = one.pool or "this machine"
                raise PlanError(
                    f"{one.engine} and {other.engine} both have the devices {common.start} to {common.stop - 1} of {where}",
                    now="Give them the same lease, so that they take turns, or devices of their own.",
                )
