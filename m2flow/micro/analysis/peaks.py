"""The most memory that each worker took, step by step, beside what the plan said that its engines need.

    counters "peak ... bytes" (m2flow.micro.work.gauges), Plan.choice --memory_of--> WorkerMemory, ...

A peak is of the process from its start on, so a step's is that of all steps up to it, and it rises where a step needs more than those
before.

Limits: of a trainer of several ranks the first; the host's has Python and libraries in it, which the plan does not count; of an engine
whose model is in processes of its own (SGLang) only the worker beside them, so nothing is predicted there.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import final

import msgspec

from m2flow.micro.analysis.run_trace import RunTrace
from m2flow.micro.lowering.abilities import rollout_abilities
from m2flow.micro.plan import EngineSlot, WorkerPlan
from m2flow.micro.search.choice import Choice, Seat
from m2flow.micro.work.gauges import PEAKS


@final
class WorkerMemory(msgspec.Struct):
    """Of one process, in bytes."""

    worker: str
    of: str
    """`host` or `GPU`."""
    predicted: int | None
    """What its engines need at once, by the plan; None: the plan was not searched for, or does not know."""
    peak: int
    steps: list[int | None]
    """The peak at the end of each step; None before the first was said."""


def memory_of(trace: RunTrace) -> list[WorkerMemory]:
    """Of each worker that said so."""
    planned = {worker.name: worker for worker in trace.plan.workers} if trace.plan else {}
    choice = trace.plan.choice if trace.plan else None
    found = []
    for of, name in PEAKS.items():
        for (track, counter_name), counter in trace.columns.counters.items():
            if counter_name != name or not counter.values:
                continue
            values = [int(value) for value in counter.values]
            before = [bisect_right(counter.at_ns, step.end) for step in trace.steps]
            worker = planned.get(track)
            predicted = predicted_bytes(worker, choice) if worker is not None and choice is not None else None
            found.append(WorkerMemory(track, of, predicted, max(values), [max(values[:at], default=None) for at in before]))
    return sorted(found, key=lambda one: (one.worker, one.of))


def predicted_bytes(worker: WorkerPlan, choice: Choice) -> int | None:
    """What the engines of a process need at once: all of those that work in a turn, and what the others keep there meanwhile."""
    seats: list[tuple[EngineSlot, Seat]] = []
    for slot in worker.engines:
        if slot.kind == "function":
            continue
        seat = next((seat for seat in choice.seats if (seat.engine.role, seat.engine.kind) == (slot.role, slot.kind)), None)
        can = rollout_abilities(slot.engine) if slot.kind == "rollout" else None
        if seat is None or (can is not None and can.self_paced):
            return None
        seats.append((slot, seat))
    turns = {slot.takes_turn: None for slot, _ in seats}
    return max((sum(_bytes(slot, seat, turn, worker.device) for slot, seat in seats) for turn in turns), default=None)


def _bytes(slot: EngineSlot, seat: Seat, turn: str, device: str) -> int:
    """Of one engine while a turn lasts, in its process: that of one GPU, or of all of a CPU's cores."""
    need = seat.footprint
    if device.startswith("cpu"):
        works = need.device_bytes + need.host
        return (works if slot.takes_turn == turn else need.kept_bytes) * seat.layout.tp * seat.layout.pp
    if slot.takes_turn == turn:
        return need.device_bytes
    return 0 if seat.is_swapped else need.kept_bytes
