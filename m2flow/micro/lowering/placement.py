"""Second pass: which workers are there, and which of them runs each call?

    Stages, ClusterSpec --placement--> workers, Stages with a place

By rule, from the spec's `placement`. Time-shared: one worker hosts rollout and training of every model, which take turns with a
lease; further rollout workers only generate. Split: rollout workers and one trainer, side by side. Functions have processes of
their own either way, since they may hang, block or be slow without touching a device. Where the trace ended because Python waits
for a value, what comes after it is unknown: each model then gets both kinds of engine, but for references, critics and reward
models, which are not sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from m2flow.errors import PlanError, SpecError, did_you_mean
from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.lowering.degrees import pinned_degrees
from m2flow.micro.plan import EngineSlot, Stage, WorkerPlan
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

_CALL_EARLIER = "Processes are placed by what the first step of the flow calls. Make this call there too, in the first step."
_COPY_EARLIER = "No trace of the flow came to this line. Make it before the loop too: made again here, it takes the weights of then."


def check_pins(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec) -> None:
    """
    Raises:
        SpecError: a pin of a role that the flow does not have.
    """
    roles = list(dict.fromkeys([*models, *(call.role for call in graph.calls if call.engine in ("rollout", "train"))]))
    known = [*roles, *(f"{role}.{kind}" for role in roles for kind in ("rollout", "train")), "rollout", "train"]
    for name in spec.pin:
        if name not in known:
            others = f"It has {', '.join(roles) or 'none'}; a pin names a role, ROLE.rollout, ROLE.train, rollout or train."
            now = did_you_mean(name, known, others)
            raise SpecError(f"pin.{name}: the flow has no such role or engine", where=spec.where("pin", name), now=now)


def place_workers(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, *, deterministic: bool) -> tuple[WorkerPlan, ...]:
    """The processes of a run."""
    is_partial = bool(graph.observations)
    copied = {str(call.options["source"]) for call in graph.calls if call.method == "copy_of"}
    trained = [role for role in models if is_partial or role in copied or _has(graph, role, "train")]
    sampled = [role for role, model in models.items() if (is_partial and model.is_policy) or _has(graph, role, "rollout")]
    rollout = tuple(pinned_degrees(EngineSlot(role, "rollout", spec.rollout.engine), spec) for role in sampled)
    train = tuple(EngineSlot(role, "train", spec.train.engine) for role in trained)
    device = device_of(spec)
    is_shared = spec.placement == "time-shared"
    ranks = spec.train.ranks if train else 1
    # Time-shared, rank 0 is in a process with a rollout engine; the others have none beside them.
    num_device_workers = spec.rollout.workers + (ranks - 1 if is_shared or not train else ranks)
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
    functions = (EngineSlot("*", "function", "python"),)
    workers += [WorkerPlan(f"functions-{i}", "cpu", 1, functions) for i in range(spec.functions.workers)]
    return tuple(workers)


def _sampling(number: int, device: str, threads: int, slots: tuple[EngineSlot, ...], spec: ClusterSpec) -> WorkerPlan:
    """One that only generates."""
    return WorkerPlan(f"rollout-{number}", device, threads, slots, is_spare=number >= spec.rollout.workers)


def beside_sources(workers: tuple[WorkerPlan, ...], copies: Mapping[str, str]) -> tuple[WorkerPlan, ...]:
    """The workers with an engine for each role that takes another's weights and has none yet: where the other is trained."""
    for role, source in copies.items():
        hosted = places(workers)
        if (role, "train") not in hosted and (source, "train") in hosted:
            workers = tuple(_with_copy(worker, role, source) for worker in workers)
    return workers


def _with_copy(worker: WorkerPlan, role: str, source: str) -> WorkerPlan:
    beside = tuple(msgspec.structs.replace(slot, role=role) for slot in worker.engines if (slot.role, slot.kind) == (source, "train"))
    return msgspec.structs.replace(worker, engines=worker.engines + beside) if beside else worker


def check_places(graph: MacroGraph, workers: tuple[WorkerPlan, ...]) -> None:
    """Each call has a worker with its role's engine: one that came later than the traced steps may have none.

    Raises:
        PlanError: a call has none.
    """
    hosted = places(workers)
    for call in graph.calls:
        check_place(call, hosted)


def places(workers: Iterable[WorkerPlan]) -> frozenset[tuple[str, str]]:
    """(role, kind) of every engine that some worker has."""
    return frozenset((slot.role, slot.kind) for worker in workers for slot in worker.engines)


def check_place(call: Call, hosted: frozenset[tuple[str, str]]) -> None:
    """The same of one call, when the program makes it: in eager too, which could make the engine but must give the plan's answer."""
    if call.engine in ("rollout", "train") and (call.role, call.engine) not in hosted:
        raise PlanError(
            f"no worker has a {call.engine} engine for {call.role}, which {call.name} needs",
            where=call.site.describe(),
            now=_COPY_EARLIER if call.method == "copy_of" else _CALL_EARLIER,
        )


def place_stages(graph: MacroGraph, stages: tuple[Stage, ...], workers: tuple[WorkerPlan, ...]) -> tuple[Stage, ...]:
    """Each stage with the workers that host its role's engine; with the one that has the state it works on, if it does."""
    roles = ["*" if call.engine == "function" else call.role for call in graph.calls]
    hosts = {key: _hosts(*key, workers) for key in {(stage.engine, role) for stage, role in zip(stages, roles, strict=True)}}
    found = (hosts[stage.engine, role] for stage, role in zip(stages, roles, strict=True))
    return tuple(msgspec.structs.replace(s, workers=_home(s.state, at) if s.state else at) for s, at in zip(stages, found, strict=True))


def _home(role: str, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Where a role's state is: the same in every segment, since the name alone decides."""
    return (hosts[zlib.crc32(role.encode()) % len(hosts)],) if hosts else ()


def _hosts(kind: str, role: str, workers: tuple[WorkerPlan, ...]) -> tuple[str, ...]:
    return tuple(w.name for w in workers if any(slot.kind == kind and slot.role == role for slot in w.engines))


def _has(graph: MacroGraph, role: str, kind: str) -> bool:
    return any(call.role == role and call.engine == kind for call in graph.calls)


def device_of(spec: ClusterSpec) -> str:
    """`auto` is the first GPU where the driver shows one. Asked of the driver's device file, since torch is not loaded here."""
    if spec.device != "auto":
        return spec.device
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
