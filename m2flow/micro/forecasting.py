"""What a plan that nobody searched for takes a step: the search's own arithmetic, with every engine held where the plan has it.

    Plan, ClusterSpec, Question --forecast--> Forecast        what `m2flow view` and `analyze` lay beside what happened
    Forecast <--read, write--> RUN/forecast.json

A plan by rule (`split`, `time-shared`) or from a file is run as it is; this says only what it should take, with the costs of a profile or
of the model of the hardware. Limits: chunks are the search's, and what processes without a lease take from each other's devices is not
known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import M2FlowError, PlanError
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.planning import Question
from m2flow.micro.search.choice import Choice
from m2flow.micro.search.finding import find_plan
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec

_FILE = "forecast.json"
_AMPLE_GIB = 2.0**20


@final
class Forecast(msgspec.Struct, frozen=True):
    """Of one run's plan."""

    choice: Choice | None
    note: str = ""
    """Why there is none, or what it does not reckon with."""


def forecast(plan: Plan, spec: ClusterSpec, ask: Callable[[ClusterSpec], Question]) -> Forecast:
    """What a step of the plan takes, part by part. What can't be said is said so: nobody's run fails for it.

    Args:
        ask: about the flow on a cluster; with the calls of a step, and the costs and lengths to go by.
    """
    try:
        pins, used = _pins(plan, spec)
        (pool,) = spec.planned_pools.values()
        notes, there = [], pool.num_devices
        if used > there and spec.launcher == "local":
            what = "cores" if pool.device == "cpu" else "devices"
            notes.append(f"as if each process had {what} of its own: they use {used}, and there are {there}")
        choice = _choice(ask(_with_room(spec, pins, used)))
    except M2FlowError as error:
        return Forecast(None, str(error).partition("\n")[0])
    if not any(constant.source.startswith("measured") for constant in choice.constants.values()):
        notes.append("by a model of the hardware; `m2flow profile` measures this one")
    return Forecast(choice, "; ".join(notes))


def write_forecast(run_dir: Path, found: Forecast) -> None:
    (run_dir / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def read_forecast(run_dir: Path) -> Forecast | None:
    """None: nobody made one."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((run_dir / _FILE).read_bytes(), type=Forecast)
    return None


def read_prediction(run_dir: Path, plan: Plan | None) -> Choice | None:
    """What the plan should take: as it was searched for, or foreseen."""
    if plan is not None and plan.choice is not None:
        return plan.choice
    foreseen = read_forecast(run_dir)
    return foreseen.choice if foreseen else None


def _choice(question: Question) -> Choice:
    missing = [str(engine) for engine in question.workload.engines if str(engine) not in question.spec.pin]
    if missing:
        raise PlanError(f"the plan has no process for {', '.join(missing)}")
    return find_plan(question.workload, question.lengths, question.costs, question.spec, is_alone=True)


def _with_room(spec: ClusterSpec, pins: Mapping[str, PinSpec], used: int) -> ClusterSpec:
    """The spec with every engine where it is, and devices for all: it is not asked whether they fit, on a CPU not of memory either."""
    ((name, pool),) = spec.planned_pools.items()
    each = math.lcm(*(pin.devices[1] - pin.devices[0] for pin in pins.values() if pin.devices))
    size = max(used, pool.num_devices)
    room = pool.model_copy(update={"devices_per_node": -(-size // each) * each})  # Engines may have parts that come out even.
    if pool.device == "cpu":
        room = room.model_copy(update={"memory_gib": _AMPLE_GIB})
    return spec.model_copy(update={"placement": "auto", "pin": {**pins, **spec.pin}, "pools": {name: room}})


def _pins(plan: Plan, spec: ClusterSpec) -> tuple[dict[str, PinSpec], int]:
    """Workers beside each other on the devices of the machine, each engine on all that have it; and how many devices that are."""
    if spec.pools:
        raise PlanError("the plan's cluster has pools, and nobody searched for a place in them")
    ((name, pool),) = spec.planned_pools.items()
    at, places = 0, dict[str, list[tuple[WorkerPlan, int, int]]]()
    for worker in plan.workers:
        slots = [slot for slot in worker.engines if slot.kind in ("rollout", "train")]
        if not slots or worker.is_spare:
            continue
        each, ranks = worker.threads if pool.device == "cpu" else 1, max(worker.ranks, 1)
        for slot in slots:
            end = at + each * (ranks if slot.kind == "train" else 1)
            places.setdefault(f"{slot.role}.{slot.kind}", []).append((worker, at, end))
        at += each * ranks
    found = {}
    for engine, mine in places.items():
        first, last = mine[0][1], mine[-1][2]
        # What a trainer's ranks make of its devices is the spec's to say.
        layout = LayoutSpec() if engine.endswith(".train") else LayoutSpec(dp=len(mine), tp=(last - first) // len(mine))
        found[engine] = PinSpec(pool=name, devices=(first, last), layout=layout)
    return found, at
