"""Second pass: which workers are there, and which of them runs each call?

    Stages, ClusterSpec --placement--> workers, Stages with a place

By rule, from the spec's `placement`. Time-shared: one worker hosts rollout and training of every model, which take turns with a
lease; further rollout workers only generate. Split: rollout workers and one trainer, side by side. Functions have processes of
their own either way, since
they may hang, block or be slow without touching a device. The rule looks at a call's kind of engine alone, so a call that was not
in the traced steps has its place too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from m2flow.macro.graph import MacroGraph
from m2flow.micro.plan import EngineSlot, Stage, WorkerPlan
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec


def place_workers(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, *, deterministic: bool) -> tuple[WorkerPlan, ...]:
    """The processes of a run."""
    trained = [role for role in models if any(c.role == role and c.engine == "train" for c in graph.calls)]
    trained += [role for role in _copied_roles(graph) if role not in trained]
    sampled = [role for role in models if any(c.role == role and c.engine == "rollout" for c in graph.calls)]
    rollout = tuple(EngineSlot(role, "rollout", spec.rollout.engine) for role in sampled)
    train = tuple(EngineSlot(role, "train", spec.train.engine) for role in trained)
    device = _device(spec)
    is_shared = spec.placement == "time-shared"
    num_device_workers = spec.rollout.workers if is_shared or not train else spec.rollout.workers + 1
    share = max(1, spec.num_cores // max(num_device_workers, 1))
    threads = (1, 1) if deterministic else (spec.rollout.threads or share, spec.train.threads or share)

    workers = []
    if is_shared and (rollout or train):
        lease = "device-0" if rollout and train else ""
        workers.append(WorkerPlan("device-0", device, max(threads), rollout + train, lease))
        workers += [WorkerPlan(f"rollout-{i}", device, threads[0], rollout) for i in range(1, spec.rollout.workers) if rollout]
    else:
        workers += [WorkerPlan(f"rollout-{i}", device, threads[0], rollout) for i in range(spec.rollout.workers) if rollout]
        workers += [WorkerPlan("train-0", device, threads[1], train)] if train else []
    functions = (EngineSlot("*", "function", "python"),)
    workers += [WorkerPlan(f"functions-{i}", "cpu", 1, functions) for i in range(spec.functions.workers)]
    return tuple(workers)


def place_stages(stages: tuple[Stage, ...], workers: tuple[WorkerPlan, ...]) -> tuple[Stage, ...]:
    """Each stage with the workers that host its kind of engine."""
    return tuple(msgspec.structs.replace(stage, workers=_hosts(stage.engine, workers)) for stage in stages)


def _hosts(kind: str, workers: tuple[WorkerPlan, ...]) -> tuple[str, ...]:
    return tuple(w.name for w in workers if any(slot.kind == kind for slot in w.engines))


def _copied_roles(graph: MacroGraph) -> list[str]:
    """Roles whose trained weights another role copies; their train engine is needed although nothing updates it."""
    return [str(call.options["source"]) for call in graph.calls if call.method == "copy_of"]


def _device(spec: ClusterSpec) -> str:
    """`auto` is the first GPU where the driver shows one. Asked of the driver's device file, since torch is not loaded here."""
    if spec.device != "auto":
        return spec.device
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
