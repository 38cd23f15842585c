"""What differs between two plans, in the order in which people ask: time, then who moved, then how things are cut and routed.

Plan, Plan --differences--> lines
"""

from __future__ import annotations

from collections.abc import Iterator

from m2flow.micro.plan import Plan, Stage, WorkerPlan
from m2flow.micro.search.choice import Choice
from m2flow.micro.search.explaining import seconds, where


def differences(one: Plan, other: Plan) -> list[str]:
    """A line for each difference; none if the plans would run alike."""
    lines = [f"{name}: {a} -> {b}" for name, a, b in _heads(one, other) if a != b]
    if one.choice is not None and other.choice is not None:
        lines += _choices(one.choice, other.choice)
    lines += _changes("worker", {w.name: _worker(w) for w in one.workers}, {w.name: _worker(w) for w in other.workers})
    lines += _changes("call", {s.call: _stage(s) for s in one.stages}, {s.call: _stage(s) for s in other.stages})
    lines += _changes("route", _routes(one), _routes(other))
    return lines + _changes("weights", _syncs(one), _syncs(other))


def _heads(one: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    yield "flow", one.flow, other.flow
    yield "cluster", one.cluster, other.cluster
    yield "mode", one.mode, other.mode
    yield "structure", one.structure[:12], other.structure[:12]


def _choices(one: Choice, other: Choice) -> list[str]:
    lines = []
    if one.predicted_step_s != other.predicted_step_s:
        change = other.predicted_step_s / one.predicted_step_s - 1 if one.predicted_step_s else 0.0
        lines.append(f"predicted step: {seconds(one.predicted_step_s)} -> {seconds(other.predicted_step_s)} ({change:+.1%})")
    lines += _changes("part", *({p.what: seconds(p.seconds) for p in c.parts} for c in (one, other)))
    lines += _changes("bound", *({b.name: seconds(b.seconds) for b in c.bounds} for c in (one, other)))
    places = [{call: f"{where(s)} {s.layout}, {s.mode}, chunk {s.chunk}" for s in c.seats for call in s.calls} for c in (one, other)]
    return lines + _changes("place", *places)


def _changes(what: str, one: dict[str, str], other: dict[str, str]) -> list[str]:
    lines = [f"{what} {key}: {one[key]} -> {other[key]}" for key in one if key in other and one[key] != other[key]]
    lines += [f"{what} {key}: only in the first ({value})" for key, value in one.items() if key not in other]
    return lines + [f"{what} {key}: only in the second ({value})" for key, value in other.items() if key not in one]


def _routes(plan: Plan) -> dict[str, str]:
    return {f"{r.producer} -> {r.consumer}, {r.source} -> {r.target}": f"{r.transport}, {r.capacity} samples" for r in plan.routes}


def _syncs(plan: Plan) -> dict[str, str]:
    return {f"{s.role}, {s.source} -> {s.target}": str(s.transport) for s in plan.syncs}


def _worker(worker: WorkerPlan) -> str:
    engines = ", ".join(f"{slot.role} {slot.kind} ({slot.engine})" for slot in worker.engines)
    return f"{worker.device}, {worker.threads} threads, {engines}" + (f", lease {worker.lease}" if worker.lease else "")


def _stage(stage: Stage) -> str:
    budget = f", {stage.token_budget} tokens a micro-batch" if stage.token_budget else ""
    return f"@{stage.unit} on {', '.join(stage.workers) or 'controller'}, chunk {stage.chunk}{budget}"
