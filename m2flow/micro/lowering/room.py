"""Fifth pass, second half: how much may be under way in each channel, what must fit there at once, and what is spilled?

    Routes, graph --limit--> Routes with `capacity`, `needs`, `spills`
    Stages, Routes --give_rooms--> Stages with `rooms`, and without what is spilled in `forward_to`

What a generation sends on is limited, by the samples and bytes of the spec (`channels.max_samples`, `channels.max_bytes`): it is what
takes long, and from which all else follows. A consumer that takes rows as they come needs room for a group. One that can begin only
when the whole call is there needs room for all of it; so does an update, which fills its micro-batches, and whoever is across a lease,
which comes to it when the generation has nothing left to run. Where all of it does not fit, rows stay with who made them, in its segment
file, and go when a task needs them.

Limits of a later segment are those that the plan has for calls of the same name. A call that the plan has never seen has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.late import is_cut
from m2flow.micro.lowering.routing import BYTES_PER_TOKEN, longest_rows
from m2flow.micro.plan import Room, Route, Stage, WorkerPlan
from m2flow.spec import ClusterSpec


class _Need(NamedTuple):
    """What a call's consumers on one worker must be able to have at once."""

    samples: int
    """Of the whole call."""
    at_once: int
    num_bytes: int
    """Of what must be there at once, each sample as long as it may be."""
    is_whole: bool
    takers: int


def limit(
    graph: MacroGraph, stages: Sequence[Stage], routes: Iterable[Route], workers: Sequence[WorkerPlan], spec: ClusterSpec, *, staleness: int
) -> tuple[Route, ...]:
    """The routes of the plan with what each may hold and what it must."""
    needs = _needs(graph, stages, workers)
    by_name: dict[tuple[str, str, str], _Need] = {}
    names = dict(zip((call.ordinal for call in graph.calls), stages, strict=True))
    for (producer, consumer, target), need in needs.items():
        key = (names[producer].call, names[consumer].call, target)
        known = by_name.get(key, need)
        by_name[key] = _Need(*map(max, known, need))  # type: ignore[arg-type]
    return tuple(_limited(route, by_name, staleness, spec) for route in routes)


def _limited(route: Route, needs: Mapping[tuple[str, str, str], _Need], staleness: int, spec: ClusterSpec) -> Route:
    capacity = route.capacity * (1 + staleness)
    need = needs.get((route.producer, route.consumer, route.target))
    if route.source == route.target or need is None:
        return msgspec.structs.replace(route, capacity=capacity)
    most = min(capacity, spec.channels.max_samples or capacity)
    # Of so many steps samples can be there at once: those that staleness lets run, and the next.
    all_bytes = need.num_bytes // max(need.at_once, 1) * need.samples * (2 + staleness)
    is_limited = most < capacity or all_bytes > spec.channels.max_bytes
    return msgspec.structs.replace(
        route,
        capacity=most,
        capacity_bytes=spec.channels.max_bytes if is_limited else 0,
        needs=need.at_once,
        needs_bytes=need.num_bytes,
        is_whole=need.is_whole,
        spills=need.is_whole and not (need.at_once <= most and need.num_bytes <= spec.channels.max_bytes),
    )


def as_pinned(routes: Iterable[Route], pinned: Iterable[Route]) -> tuple[Route, ...]:
    """The routes with the room that a plan which may have been edited gives them."""
    known = {(r.producer, r.consumer, r.source, r.target): r for r in pinned}
    found = []
    for route in routes:
        old = known.get((route.producer, route.consumer, route.source, route.target), route)
        is_of_another_size = old.needs != route.needs and not old.capacity_bytes  # It was room for all, and for fewer samples.
        if old.is_whole == route.is_whole and not is_of_another_size:  # Else who takes it has changed, and with it what is needed.
            route = msgspec.structs.replace(route, capacity=old.capacity, capacity_bytes=old.capacity_bytes, spills=old.spills)
        found.append(route)
    return tuple(found)


def give_rooms(graph: MacroGraph, stages: Sequence[Stage], routes: Sequence[Route], workers: Sequence[WorkerPlan]) -> tuple[Stage, ...]:
    """The stages of generations with the rooms that their rows have, and without the targets that are spilled.

    Where the plan's routes from a call to a worker differ, the one that holds least counts for all. What would not fit is spilled, also of
    a call that the plan does not have with this consumer; unless the plan says that it is not, which the check must have passed.
    """
    limited = [route for route in routes if route.capacity_bytes]
    if not limited:
        return tuple(stages)
    needs: dict[tuple[int, str], dict[str, _Need]] = {}
    names = dict(zip((call.ordinal for call in graph.calls), stages, strict=True))
    for (producer, consumer, target), need in _needs(graph, stages, workers).items():
        same = needs.setdefault((producer, target), {})
        known = same.get(names[consumer].call)
        same[names[consumer].call] = need if known is None else _both(known, need)
    return tuple(_with_rooms(call, names[call.ordinal], needs, limited) for call in graph.calls)


def _both(one: _Need, other: _Need) -> _Need:
    """Of two consumers of the same name."""
    most = _Need(*map(max, one, other))  # type: ignore[arg-type]
    return most._replace(takers=one.takers + other.takers)


def _with_rooms(call: Call, stage: Stage, needs: Mapping[tuple[int, str], Mapping[str, _Need]], limited: Sequence[Route]) -> Stage:
    rooms: list[Room] = []
    forward_to: list[str] = []
    for target in stage.forward_to if stage.engine == "rollout" else ():
        known = {route.consumer: route for route in limited if (route.producer, route.target) == (stage.call, target)}
        takers = needs.get((call.ordinal, target), {})
        if not known or not takers:
            forward_to.append(target)
            continue
        samples = min(route.capacity for route in known.values())
        num_bytes = min(route.capacity_bytes for route in known.values())
        late = {name: need for name, need in takers.items() if need.is_whole}
        fits = all(need.at_once <= samples and need.num_bytes <= num_bytes for need in late.values())
        if not fits and not any(name in known and is_too_small(known[name]) for name in late):
            continue
        forward_to.append(target)
        rooms.append(Room(target, samples, num_bytes, sum(need.takers for need in takers.values()), bool(late), fits))
    if stage.engine != "rollout":
        return stage
    spills = len(forward_to) < len(stage.forward_to)
    return msgspec.structs.replace(stage, forward_to=tuple(forward_to), rooms=tuple(rooms), spills=spills)


def is_too_small(route: Route) -> bool:
    """Whether what must be in it at once does not fit, and is not spilled either: a plan with such a route is refused."""
    fits = route.needs <= route.capacity and (not route.capacity_bytes or route.needs_bytes <= route.capacity_bytes)
    return route.is_whole and not route.spills and not fits and route.source != route.target


def _needs(graph: MacroGraph, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> dict[tuple[int, int, str], _Need]:
    """Of each generation and each of its consumers on each worker."""
    leases = {worker.name: worker.lease for worker in workers}
    by_call = dict(zip((call.ordinal for call in graph.calls), stages, strict=True))
    longest = longest_rows(graph)
    found: dict[tuple[int, int, str], _Need] = {}
    for call in graph.calls:
        if call.engine != "rollout":
            continue
        producer, late = by_call[call.ordinal], _after_all_of(graph, call, by_call)
        samples, n = call.most_candidates, call.options.get("n", 1)
        assert isinstance(n, int)
        for consumer in graph.consumers(call.ordinal):
            taking = by_call[consumer.ordinal]
            for target in taking.workers:
                across = taking.engine == "train" and bool(leases[target]) and any(leases[w] == leases[target] for w in producer.workers)
                is_whole = consumer.ordinal in late or across
                at_once = samples if is_whole else n
                num_bytes = at_once * longest[call.ordinal] * BYTES_PER_TOKEN
                takers = int(taking.workers == (target,))
                found[call.ordinal, consumer.ordinal, target] = _Need(samples, at_once, num_bytes, is_whole, takers)
    return found


def _after_all_of(graph: MacroGraph, producer: Call, stages: Mapping[int, Stage]) -> set[int]:
    """Consumers of a generation that can take none of its rows before all are there: they wait for all rows of something that follows from
    it, or for a value or an effect that does, or the generation's result is known only at its end."""
    own = producer.ordinal
    follows = {own}
    late: set[int] = set()
    known_late = {c.ordinal for c in graph.calls if c.drops or (c.engine == "rollout" and (c.is_gated or is_cut(c.options)))}
    """Which rows are in their results is known at their end."""
    gated = {call.ordinal: call.is_gated for call in graph.calls}
    effects = {(e.resource, e.version): call.ordinal for call in graph.calls for e in call.writes}
    aligned = {call.ordinal: call.is_aligned for call in graph.calls}
    for call in graph.calls:
        inputs = {ref.call for _, ref in call.inputs}
        waits = {effects[e.resource, e.version] for e in call.reads if (e.resource, e.version) in effects} - {call.ordinal}
        if call.ordinal == own or not (inputs | waits) & follows:
            continue
        follows.add(call.ordinal)
        # An update waits until a micro-batch is full, or its mini-batch complete, and may have several of those.
        stage = stages[call.ordinal]
        waits_for_all = stage.is_barrier or stage.unit in ("batch", "minibatch") or call.method == "update"
        on_values = any(ref in follows and not aligned[ref] for ref in inputs)
        on_results = any(ref in follows and ref in known_late and not (call.is_gated and gated[ref]) for ref in inputs)
        if waits_for_all or on_values or on_results or waits & follows or inputs & late:
            late.add(call.ordinal)
    return late
