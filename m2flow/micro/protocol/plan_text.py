"""Print a plan for people: tables of workers, calls, routes, weights, switches, and the numbers that people get wrong.

    Plan --plan_text--> lines

Entries that differ only in their number (three or more workers, and the routes between them) share one line, so that a plan of a thousand
devices has hardly more lines than one of eight; each by itself is in the plan's JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import EngineSlot, Plan, Route, Stage, WeightSync, WorkerPlan


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
        "functions" if s.kind == "function" else f"{s.role}: {s.kind} ({s.engine}{_degrees(s)}){_turn(s)}" for s in worker.engines
    )


def _turn(slot: EngineSlot) -> str:
    lent = f", lent until {slot.lent_until * 100:.3g}% have ended" if slot.lent_until else ""
    comes = f", comes when {slot.comes_at * 100:.3g}% have ended" if slot.comes_at else ""
    return f" in turn {slot.turn!r}" * bool(slot.turn) + " stays" * slot.stays + lent + comes


def _degrees(slot: EngineSlot) -> str:
    return "".join(f", {name} {degree}" for name, degree in (("tp", slot.tp), ("pp", slot.pp), ("ep", slot.ep)) if degree > 1)


def _how(stage: Stage) -> str:
    if stage.engine == "source":
        return "read by the controller"
    if stage.engine == "rollout":
        return f"up to {stage.chunk} decode together; each sample leaves when it is done"
    if stage.engine == "train" and stage.unit in ("minibatch", "batch") and not stage.is_barrier:
        return f"micro-batches of up to {stage.token_budget} tokens, as groups come in; one optimiser step a mini-batch"
    return "waits for all of its input" if stage.is_barrier else f"up to {stage.chunk} samples a task, as they come in"


def _sent(sync: WeightSync) -> str:
    return "adapters alone" if sync.sends == "adapters" else ""


def _room(route: Route) -> str:
    room = f"{route.capacity} samples" + (f", {route.capacity_bytes:,} bytes" if route.capacity_bytes else "")
    return f"{room}; spills to segment files" if route.spills else room


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
