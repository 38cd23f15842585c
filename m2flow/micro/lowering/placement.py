"""Place a run on workers: which processes there are, which engines each has, where each call runs, and in what chunks.

    Stages --chunking--> Stages with `chunk`
    Stages, ClusterSpec --place_workers--> WorkerPlans        by the rule of the spec's `placement`
    Choice --workers_of_choice--> WorkerPlans                      as the search for a plan found
    Stages, WorkerPlans --place_stages--> Stages with a place

Chunks. A rollout engine gets as many samples as decode together well, and more episodes, since some wait for tools; a function gets a few
tens, so that its results can flow on while the next ones run. These are upper bounds: the scheduler dispatches what is ready and does not
wait for a chunk to fill.

By rule. Time-shared (co-located): one worker hosts rollout and training of every model, which take turns with a lease; further rollout
workers only generate. Split (disaggregated): rollout workers and one trainer run concurrently. Functions have processes of their own
either way, since they may hang, block or be slow without touching a device; all share these, but for roles that the spec gives some to
themselves (`functions.roles`). If the trace ended because the program needs a value, the calls after it are unknown: each model then gets
both kinds of engine, except references, critics and reward models, which are not sampled.

By search. A rollout engine of n replicas is n workers; a trainer is one worker, however many devices it has: its ranks work as one.
Engines of one kind on the same devices in the same layout share a worker. An engine that generates and one that trains share a worker
too if they take turns with a single device, so that samples and weights need not leave the process; on more devices they are processes of
their own, which take turns by the lease. All engines of a kind have one turn, unless their devices can't hold them at once.

Episodes in which several roles speak run beside the rollout engines of all of them: by rule every rollout worker has those of all roles; by
search each placement of the role whose episodes they are also has the others' engines (`with_speakers`). Limit: the search counts neither
the memory nor the time of these. A speaker that is pinned otherwise than the role whose episodes they are (`is_apart`) has workers of its
own: by rule as many as it has devices in the pin, by search where its turns, as a generation of its own, are best placed. Its turns are
asked for over channels (`m2flow.agents.turn_requests`).

Degrees of parallelism (`EngineSlot.tp`, `.pp`, `.ep`) become arguments of the inference server, and options of a trainer that does not
have them in the spec (`m2flow.engines.registry.train_options`). By rule the spec pins them
(`pin: {policy.rollout: {layout: {tp: 2}}}`); a search chooses them. If it searched the cores of this machine, degrees are threads of a
process, and no server is laid out by them (`m2flow.spec.ClusterSpec.planned_pools`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from m2flow.engines.registry import ONE_LAYOUT, engines
from m2flow.errors import PlanError, SpecError, did_you_mean
from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.lowering.capabilities import can_stay_resident
from m2flow.micro.protocol.cost_terms import EngineId, StageOrder
from m2flow.micro.protocol.plan import Choice, EngineSlot, Placement, Stage, WorkerPlan
from m2flow.micro.protocol.worker_state import ROLLOUT
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, WeightsSpec, base_of

_NAMES = ("tp", "pp", "ep")
_TRAINERS = (*_NAMES, "sp", "offload")


def pinned_degrees(slot: EngineSlot, spec: ClusterSpec) -> EngineSlot:
    """A rollout engine with the degrees that the spec pins."""
    layout = spec.pin_of(slot.role, "rollout").layout
    found = {name: getattr(layout, name) for name in _NAMES}
    return msgspec.structs.replace(slot, **{name: degree for name, degree in found.items() if degree})


def degrees_as_placed(slot: EngineSlot, placement: Placement, spec: ClusterSpec) -> EngineSlot:
    """An engine with the degrees of its placement, and a trainer with whether it recomputes layers there."""
    if placement.engine.kind == "train":
        is_planned_for = bool(spec.pools) and placement.footprint.gradients > 0 and slot.engine in _recomputing()
        layout = placement.layout
        degrees = {name: getattr(layout, name) for name in _TRAINERS} | {"is_searched": True} if spec.pools else {}
        if spec.pools and layout.num_sharing > 1:
            degrees["zero"] = layout.zero
        if spec.pools:
            degrees |= {name: getattr(placement, name) for name in StageOrder.__struct_fields__}
        return msgspec.structs.replace(slot, **degrees, recompute=layout.recompute or is_planned_for)
    if not spec.pools:
        return slot
    return msgspec.structs.replace(slot, **{name: getattr(placement.layout, name) for name in _NAMES})


def _recomputing() -> set[str]:
    """Trainers that recompute layers wherever they are placed by a search."""
    return {info.name for info in engines() if info.kind == "train" and info.capabilities.parallel_layouts.recomputes == "always"}


def check_degrees(workers: Iterable[WorkerPlan], weights: WeightsSpec) -> None:
    """Check that each rollout engine can be sharded as planned and takes weights by the spec's transport.

    Raises:
        PlanError: a rollout engine is laid over more devices than it can be, or has no server that takes weights as the spec says.
    """
    known = {info.name: info.capabilities for info in engines() if info.kind == "rollout"}
    for slot in (slot for worker in workers for slot in worker.engines if slot.kind == "rollout" and slot.engine in known):
        can = known[slot.engine]
        if weights.into_server not in ("auto", *can.into_server):
            others = ", ".join(name for name, other in known.items() if weights.into_server in other.into_server)
            raise PlanError(
                f"the spec has weights: {{into_server: {weights.into_server}}}, and the rollout engine {slot.engine!r} does not "
                "load weights that way",
                now=f"Leave it out, or take one of {others}.",
            )
        for name in _NAMES:
            degree, most = getattr(slot, name), getattr(can.parallel_layouts, name)
            if most is not None and degree > most:
                limits = {other: getattr(one.parallel_layouts, name) for other, one in known.items()}
                others = ", ".join(other for other, limit in limits.items() if limit is None or limit >= degree)
                raise PlanError(
                    f"the rollout engine {slot.engine!r} has {name} up to {most}, and {slot.role} is to have {degree}",
                    now=f"With so many there are {others or 'none'}; or mend `pin` in the cluster spec.",
                )


_EPISODES_A_SLOT = 8
"""Episodes that an instance holds for each sample that it decodes at once, so that it decodes others while some wait for tools. What of
them begins is the worker's to say (`TurnQueue`)."""


def chunk(graph: MacroGraph, stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[Stage, ...]:
    """Give each stage its chunk size."""

    def size(call: Call) -> int:
        if call.engine == "rollout":
            return spec.rollout.chunk or spec.rollout.max_running * (_EPISODES_A_SLOT if call.method in ("rollout", "branch") else 1)
        return spec.functions.chunk if call.engine in ("function", "train") else 0

    return tuple(msgspec.structs.replace(stage, chunk=size(call)) for call, stage in zip(graph.calls, stages, strict=True))


class Sizes(NamedTuple):
    """Sizes of a call's tasks."""

    chunk: int
    token_budget: int


def sizes_of(stages: tuple[Stage, ...]) -> dict[str, Sizes]:
    """Sizes by the name of the call; later calls of the same name use them too."""
    return {stage.call: Sizes(stage.chunk, stage.token_budget) for stage in stages}


def resize(stages: tuple[Stage, ...], sizes: Mapping[str, Sizes]) -> tuple[Stage, ...]:
    """The stages with the sizes that a plan has for calls of their names."""
    found = ((stage, sizes.get(stage.call)) for stage in stages)
    return tuple(msgspec.structs.replace(s, chunk=z.chunk, token_budget=z.token_budget) if z else s for s, z in found)


_CALL_EARLIER = "Processes are placed by what the first step of the flow calls. Make this call there too, in the first step."
_COPY_EARLIER = "No trace of the flow came to this line. Make it before the loop too: made again here, it takes the weights of then."


def check_pins(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec) -> None:
    """Check that pins, and functions' processes of their own, name roles of the flow.

    Raises:
        SpecError: one of a role that the flow does not have.
    """
    of_functions = dict.fromkeys(base_of(call.name) for call in graph.calls if call.engine == "function")
    for name in spec.functions.roles:
        if name not in of_functions:
            now = did_you_mean(name, of_functions, f"It has {', '.join(of_functions) or 'none'}.")
            what = f"functions.roles.{name}: the flow calls no such role, reward or op"
            raise SpecError(what, where=spec.where("functions", "roles", name), now=now)
    roles = list(dict.fromkeys([*models, *(call.role for call in graph.calls if call.engine in ("rollout", "train"))]))
    known = [*roles, *(f"{role}.{kind}" for role in roles for kind in ("rollout", "train")), "rollout", "train"]
    for name in spec.pin:
        if name not in known:
            others = f"It has {', '.join(roles) or 'none'}; a pin names a role, ROLE.rollout, ROLE.train, rollout or train."
            now = did_you_mean(name, known, others)
            raise SpecError(f"pin.{name}: the flow has no such role or engine", where=spec.where("pin", name), now=now)


def place_workers(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, *, deterministic: bool) -> tuple[WorkerPlan, ...]:
    """Place the workers of a run by the rule of the spec's `placement`."""
    is_partial = bool(graph.observations)
    copied = {str(call.options["source"]) for call in graph.calls if call.method == "copy_of"}
    trained = [role for role in models if is_partial or role in copied or _has(graph, role, "train")]
    sampled = [role for role, model in models.items() if (is_partial and model.is_policy) or _has(graph, role, "rollout")]
    alone = {role: num for role, num in _alone(graph, spec).items() if role in sampled}
    slots = {role: pinned_degrees(EngineSlot(role, "rollout", spec.rollout.engine), spec) for role in sampled}
    rollout = tuple(slot for role, slot in slots.items() if role not in alone)
    train = tuple(EngineSlot(role, "train", spec.train.engine) for role in trained)
    device = device_of(spec)
    is_shared = spec.placement == "time-shared"
    ranks = (spec.train.ranks or 1) if train else 1
    # Time-shared: only rank 0 shares its process with a rollout engine.
    num_device_workers = spec.rollout.workers + sum(map(len, alone.values())) + (ranks - 1 if is_shared or not train else ranks)
    share = max(1, spec.num_cores // max(num_device_workers, 1))
    threads = (1, 1) if deterministic else (spec.rollout.threads or share, spec.train.threads or share)

    workers = []
    if is_shared and (rollout or train):
        lease = "device-0" if rollout and train else ""
        workers.append(WorkerPlan("device-0", device, max(threads), rollout + train, lease, ranks))
        workers += [_sampling(i, device, threads[0], rollout, spec) for i in range(1, spec.rollout.workers + spec.rollout.spare) if rollout]
    else:
        workers += [_sampling(i, device, threads[0], rollout, spec) for i in range(spec.rollout.workers + spec.rollout.spare) if rollout]
        workers += [WorkerPlan("train-0", device, threads[1], train, ranks=ranks)] if train else []
    number = spec.rollout.workers + spec.rollout.spare
    for role, devices in alone.items():
        workers += [WorkerPlan(f"rollout-{number + i}", device, threads[0], (slots[role],)) for i, device in enumerate(devices)]
        number += len(devices)
    return *workers, *_for_functions(spec.functions.num_workers, spec.functions.num_own)


def _for_functions(num_shared: int, num_own: Mapping[str, int]) -> Iterable[WorkerPlan]:
    """Workers for functions: those that all share, and those of roles that have their own."""
    roles = [role for role, num in {"*": num_shared, **num_own}.items() for _ in range(num)]
    return (WorkerPlan(f"functions-{i}", "cpu", 1, (EngineSlot(role, "function", "python"),)) for i, role in enumerate(roles))


def is_apart(role: str, other: str, spec: ClusterSpec) -> bool:
    """Whether the spec pins, by name, the rollout engine of one that speaks in a role's episodes otherwise than this role's."""
    is_named = other in spec.pin or f"{other}.rollout" in spec.pin
    return is_named and spec.pin_of(other, "rollout") != spec.pin_of(role, "rollout")


def _alone(graph: MacroGraph, spec: ClusterSpec) -> dict[str, list[str]]:
    """By rule: the devices of each role that speaks in others' episodes from workers of its own, one for each worker."""
    device, found = device_of(spec), dict[str, list[str]]()
    for call, other in _spoken(graph):
        pin = spec.pin_of(other, "rollout")
        if not is_apart(call.role, other, spec):
            continue
        if pin.devices is not None:
            found[other] = [f"cuda:{i}" if device.startswith("cuda") else device for i in range(*pin.devices)]
        elif pin.num_devices is not None:
            found[other] = [device] * pin.num_devices
    return found


def _sampling(number: int, device: str, threads: int, slots: tuple[EngineSlot, ...], spec: ClusterSpec) -> WorkerPlan:
    """A worker that only generates."""
    return WorkerPlan(f"rollout-{number}", device, threads, slots, is_spare=number >= spec.rollout.workers)


def with_speakers(workers: tuple[WorkerPlan, ...], graph: MacroGraph, spec: ClusterSpec) -> tuple[WorkerPlan, ...]:
    """Add to the workers of a rollout the engines of those that speak in its episodes, as it is laid out there.

    Those that are pinned apart have been placed by the search.

    Raises:
        SpecError: one that is pinned apart has no place.
    """
    for call, other in _spoken(graph):
        has_own = any((slot.role, slot.kind) == (other, "rollout") for worker in workers for slot in worker.engines)
        if is_apart(call.role, other, spec) and not has_own:
            name = f"{other}.rollout" if f"{other}.rollout" in spec.pin else other
            raise SpecError(
                f"pin.{name} keeps the rollout engines of {call.role} and {other} apart, {other} speaks in the episodes of {call.name} at "
                f"{call.site}, and the plan's choice has no place for it",
                where=spec.where("pin", name),
                now="Plan again with this spec, or pin both alike.",
            )
        if has_own and (is_apart(call.role, other, spec) or is_apart(other, call.role, spec)):
            continue
        beside = {}
        for worker in workers:
            slots = {slot.role: slot for slot in worker.engines if slot.kind == "rollout"}
            if call.role in slots and other not in slots:
                beside[worker.name] = msgspec.structs.replace(slots[call.role], role=other)
        workers = tuple(msgspec.structs.replace(w, engines=(*w.engines, beside[w.name])) if w.name in beside else w for w in workers)
    return workers


def notes_on_speakers(graph: MacroGraph, spec: ClusterSpec) -> tuple[str, ...]:
    """What a searched plan takes the engines to be of those that speak in others' episodes."""
    notes = []
    for call, other in _spoken(graph):
        speaks = f"{other} speaks in the episodes of {call.name} at {call.site}"
        if is_apart(call.role, other, spec):
            notes.append(f"{speaks}: its turns are counted as a generation beside them")
        else:
            notes.append(
                f"{speaks}: its rollout engine shares the processes of {call.role}'s, and the search counts neither its memory nor its time"
            )
    return tuple(notes)


def _spoken(graph: MacroGraph) -> Iterable[tuple[Call, str]]:
    """Each rollout with each other role that speaks in its episodes, once."""
    return {(call.role, other): (call, other) for call in graph.calls if call.engine == "rollout" for other in call.speakers[1:]}.values()


def with_weight_copies(workers: tuple[WorkerPlan, ...], copies: Mapping[str, str]) -> tuple[WorkerPlan, ...]:
    """Add an engine for each role that copies another role's weights and has none yet, on the worker that trains the other."""
    for role, source in copies.items():
        hosted = places(workers)
        if (role, "train") not in hosted.engines and (source, "train") in hosted.engines:
            workers = tuple(_with_copy(worker, role, source) for worker in workers)
    return workers


def _with_copy(worker: WorkerPlan, role: str, source: str) -> WorkerPlan:
    beside = tuple(msgspec.structs.replace(slot, role=role) for slot in worker.engines if (slot.role, slot.kind) == (source, "train"))
    return msgspec.structs.replace(worker, engines=worker.engines + beside) if beside else worker


def check_places(graph: MacroGraph, workers: tuple[WorkerPlan, ...]) -> None:
    """Check that each call has a worker with its role's engine; the engine of a call after the traced steps may be missing.

    Raises:
        PlanError: a call has none.
    """
    hosted = places(workers)
    for call in graph.calls:
        check_place(call, hosted)


class Places(NamedTuple):
    """Where engines are, as far as it decides whether a call has a place."""

    engines: frozenset[tuple[str, str]]
    """(role, kind) of every engine."""
    apart: frozenset[tuple[str, str]]
    """Two roles of which the second can't speak in episodes of the first on some worker: its engine there has another turn, or there is
    none, and those in other processes have turns of which none is sure to come at the same time."""


def places(workers: Iterable[WorkerPlan]) -> Places:
    """The places of these workers' engines."""
    workers = list(workers)
    rollout = [(w.lease, {slot.role: slot.takes_turn for slot in w.engines if slot.kind == "rollout"}) for w in workers]
    of_role: dict[str, set[tuple[str, str]]] = {}
    for lease, turns in rollout:
        for role, turn in turns.items():
            of_role.setdefault(role, set()).add((lease, turn))
    apart = {
        (role, other)
        for lease, turns in rollout
        for role, turn in turns.items()
        for other, others in of_role.items()
        if turns.get(other, turn) != turn or not (other in turns or any(_may_be_heard(lease, turn, *one) for one in others))
    }
    return Places(frozenset((slot.role, slot.kind) for worker in workers for slot in worker.engines), frozenset(apart))


def _may_be_heard(lease: str, turn: str, of_speaker: str, its_turn: str) -> bool:
    """Whether an engine may speak in episodes that are run elsewhere: by lease and turn of both.

    Under one lease both must have the same turn; under another the speaker must have the one that all rollout engines share, since engines
    with turns of their own would make room for each other and wait.
    """
    return not of_speaker or (turn == its_turn if lease == of_speaker else its_turn == ROLLOUT)


def check_place(call: Call, hosted: Places) -> None:
    """Check the place of one call when the program makes it; also in eager mode, which could make the engine but must give the plan's
    answer.
    """
    if call.engine not in ("rollout", "train"):
        return
    for role in call.speakers:
        if (role, call.engine) not in hosted.engines:
            raise PlanError(
                f"no worker has a {call.engine} engine for {role}, which {call.name} needs",
                where=call.site.describe(),
                now=_COPY_EARLIER if call.method == "copy_of" else _CALL_EARLIER,
            )
        if call.engine == "rollout" and (call.role, role) in hosted.apart:
            raise PlanError(
                f"{role} speaks in the episodes of {call.name}, and a worker with a rollout engine of {call.role} has none of {role} that "
                "works in the same turn, nor is there one elsewhere that can",
                where=call.site.describe(),
                now="It needs the engines of all who speak in them beside it, or on devices of their own; let m2flow place them.",
            )


def place_stages(graph: MacroGraph, stages: tuple[Stage, ...], workers: tuple[WorkerPlan, ...]) -> tuple[Stage, ...]:
    """Give each stage the workers that host its role's engine; a call on state gets the one worker that holds it."""
    own = {slot.role for worker in workers for slot in worker.engines if slot.kind == "function"}
    bases = [base_of(call.name) for call in graph.calls]
    roles = [
        call.role if call.engine != "function" else base if base in own else "*" for call, base in zip(graph.calls, bases, strict=True)
    ]
    hosts = {key: _hosts(*key, workers) for key in {(stage.engine, role) for stage, role in zip(stages, roles, strict=True)}}
    found = (hosts[stage.engine, role] for stage, role in zip(stages, roles, strict=True))
    return tuple(msgspec.structs.replace(s, workers=_home(s.state, at) if s.state else at) for s, at in zip(stages, found, strict=True))


def _home(role: str, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The worker that holds a role's state: the same in every segment, since it depends on the name alone."""
    return (hosts[zlib.crc32(role.encode()) % len(hosts)],) if hosts else ()


def _hosts(kind: str, role: str, workers: tuple[WorkerPlan, ...]) -> tuple[str, ...]:
    return tuple(w.name for w in workers if any(slot.kind == kind and slot.role == role for slot in w.engines))


def _has(graph: MacroGraph, role: str, kind: str) -> bool:
    return any(role in call.speakers and call.engine == kind for call in graph.calls)


def device_of(spec: ClusterSpec) -> str:
    """The device that `auto` means: the first GPU if the driver shows one. Looks for the driver's device file, since torch is not loaded
    here.
    """
    if spec.device != "auto":
        return spec.device
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"


_Place = tuple[str, int, int]
"""(pool, first device, one past the last device)."""


def workers_of_choice(choice: Choice, spec: ClusterSpec, device: str, *, deterministic: bool = False) -> tuple[WorkerPlan, ...]:
    """The workers of a searched placement, and those for functions.

    Args:
        device: what a device of this machine is called where the spec has no pools (`cpu`, `cuda:0`).
        deterministic: engines on cores of this machine have one thread, however many cores the placement has.
    Raises:
        PlanError: two placements have a device in common and take no turns with it.
    """
    _check_overlaps(choice.placements)
    slots: dict[tuple[str, _Place, str, tuple[int, ...]], list[EngineSlot]] = {}
    threads: dict[_Place, int] = {}
    of_trainer: dict[_Place, int] = {}  # In a pool one rank for each device; on this machine as many as the layout has replicas.
    turns = _turns(choice.placements)
    for placement in choice.placements:
        engine = spec.rollout.engine if placement.engine.kind == "rollout" else spec.train.engine
        for place in _replicas(placement):
            stays = bool(placement.lease) and not placement.is_swapped and (placement.engine.kind == "train" or can_stay_resident(engine))
            lease = placement.lease if _shares(placement, place, choice.placements) else ""
            turn, stays = (turns.get(placement.engine, ""), stays) if lease else ("", False)
            slot = EngineSlot(
                placement.engine.role,
                placement.engine.kind,
                engine,
                turn,
                stays,
                placement.lent_until if lease else 0.0,
                placement.onload_at,
            )
            laid = degrees_as_placed(slot, placement, spec)
            slots.setdefault((placement.engine.kind, place, lease, _groups_of(laid)), []).append(laid)
            if placement.engine.kind == "train":
                of_trainer[place] = place[2] - place[1] if spec.pools else placement.layout.dp
            threads[place] = place[2] - place[1] if device == "cpu" and not spec.pools and not deterministic else 1
    workers = []
    count = {"rollout": 0, "train": 0, "device": 0}
    for (kind, place, lease, _), own_slots in slots.items():
        other = ("train" if kind == "rollout" else "rollout", place, lease, ())
        is_one_process = bool(lease) and other in slots and _has_one_process(place, spec)
        if is_one_process and kind == "train":
            continue  # Its engines join the worker of the rollout engines on the same devices.
        name = "device" if is_one_process else kind
        both = own_slots + slots[other] if is_one_process else own_slots
        ranks = of_trainer.get(place, 1) if any(slot.kind == "train" for slot in both) else 1
        own = max(1, threads[place] // ranks)
        workers.append(
            WorkerPlan(f"{name}-{count[name]}", _device_name(place, spec, device), own, tuple(dict.fromkeys(both)), lease, ranks)
        )
        count[name] += 1
    num_own = spec.functions.num_own if choice.num_own_workers is None else choice.num_own_workers
    return *workers, *_for_functions(choice.num_function_workers or spec.functions.num_workers, num_own)


def _groups_of(slot: EngineSlot) -> tuple[int, ...]:
    """What the groups of a trainer's ranks are made by, if those of a process are the same for all of its trainers."""
    if slot.kind != "train" or slot.engine not in ONE_LAYOUT:
        return ()
    degrees = slot.tp, slot.pp, slot.sp, slot.ep, slot.vpp
    return degrees if max(degrees) > 1 else ()


def _has_one_process(place: _Place, spec: ClusterSpec) -> bool:
    """Whether engines that generate and train on these devices by turns share a process."""
    return place[2] - place[1] == 1 or not spec.pools


def share_a_process(rollout: Placement, trainer: Placement, spec: ClusterSpec) -> bool:
    """Whether a rollout replica and the trainer share a process, which does one thing at a time, if the two placements take turns."""
    place = trainer.pool, trainer.first_device, trainer.devices.stop
    return place in _replicas(rollout) and _has_one_process(place, spec)


def _shares(placement: Placement, place: _Place, placements: tuple[Placement, ...]) -> bool:
    """Whether a replica takes turns with a trainer; of a rollout engine that borrows devices, only the replicas on these do."""
    if not placement.lent_until:
        return bool(placement.lease)
    others = (
        other for other in placements if other.engine != placement.engine and other.lease == placement.lease and other.pool == place[0]
    )
    return any(other.first_device < place[2] and place[1] < other.devices.stop for other in others)


def _turns(placements: tuple[Placement, ...]) -> dict[EngineId, str]:
    """Name turns for engines that don't fit on their devices together with all others of their kind and lease; the others get none."""
    alike: dict[tuple[str, str], dict[EngineId, Placement]] = {}
    for placement in placements:
        if placement.lease:
            alike.setdefault((placement.lease, placement.engine.kind), {})[placement.engine] = placement
    found = {}
    for (_, kind), placement_of in alike.items():
        groups: list[list[Placement]] = []
        for placement in placement_of.values():
            group = next((group for group in groups if all(_may_share_a_turn(placement, other) for other in group)), None)
            groups += [[placement]] if group is None else []
            if group is not None:
                group.append(placement)
        for group in groups if len(groups) > 1 else ():
            found.update({placement.engine: f"{kind} {', '.join(other.engine.role for other in group)}" for placement in group})
    return found


def _may_share_a_turn(one: Placement, other: Placement) -> bool:
    """Whether two placements fit into one turn: they have no common device, or are in one process and the devices hold both."""
    is_apart = one.pool != other.pool or one.devices.stop <= other.first_device or other.devices.stop <= one.first_device
    return is_apart or (_replicas(one) == _replicas(other) and not one.is_swapped and not other.is_swapped)


def sizes_of_choice(choice: Choice, stages: tuple[Stage, ...]) -> dict[str, Sizes]:
    """Sizes of calls as the search chose them. How many samples decode together is the limit of an engine, not of a placement."""
    chunks = {call.partition("@")[0]: placement.chunk for placement in choice.placements for call in placement.calls if placement.chunk}
    return {s.call: Sizes(chunks[s.call], s.token_budget) for s in stages if s.engine != "rollout" and s.call in chunks}


def _replicas(placement: Placement) -> list[_Place]:
    if placement.engine.kind == "train":
        return [(placement.pool, placement.first_device, placement.devices.stop)]
    size = placement.num_devices // placement.layout.dp
    return [(placement.pool, first, first + size) for first in range(placement.first_device, placement.devices.stop, size)]


def _device_name(place: _Place, spec: ClusterSpec, device: str) -> str:
    pool, first, stop = place
    if not spec.pools:
        return device
    return f"{pool}[{first}]" if stop == first + 1 else f"{pool}[{first}:{stop}]"


def _check_overlaps(placements: tuple[Placement, ...]) -> None:
    for i, one in enumerate(placements):
        for other in placements[i + 1 :]:
            common = range(max(one.first_device, other.first_device), min(one.devices.stop, other.devices.stop))
            if one.pool != other.pool or not common or one.engine.kind == other.engine.kind:
                continue
            if not one.lease or one.lease != other.lease:
                where = one.pool or "this machine"
                raise PlanError(
                    f"{one.engine} and {other.engine} both have the devices {common.start} to {common.stop - 1} of {where}",
                    now="Give them the same lease, so that they take turns, or devices of their own.",
                )
