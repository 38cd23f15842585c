"""Routing: which rows go where and over what, how much may be under way, what is spilled, and the proof that nobody waits for everybody.

Stages, graph --routing--> Routes, Stages with `forward_to`

A call's rows are forwarded as soon as they are there to each consumer that has a single worker. Where several workers could take
them, the scheduler has them sent when it knows which one. The way from a worker to another is the same for all that goes between them:
shared memory, if anything does whose columns are large; else the sockets alone.

Routes, graph --limit--> Routes with `capacity`, `needs`, `spills`
    Stages, Routes --give_rooms--> Stages with `rooms`, and without what is spilled in `forward_to`

What a generation sends on is limited, by the samples and bytes of the spec (`channels.max_samples`, `channels.max_bytes`): it is what
takes long, and from which all else follows. A consumer that takes rows as they come needs room for a group. One that can begin only
when the whole call is there needs room for all of it; so does an update, which fills its micro-batches, and whoever is across a lease,
which comes to it when the generation has nothing left to run. Where all of it does not fit, rows stay with who made them, in its segment
file, and go when a task needs them.

Limits of a later segment are those that the plan has for calls of the same name. A call that the plan has never seen has none.

Plan.routes, stages, workers --check_room--> the ring of waits is named, or nothing

A call that takes rows waits for those who make them. A channel holds up who fills it, until its taker takes; a taker that needs more
at once than the channel can hold never does. And a lease stays with generation until that has nothing left to run, which it has as
long as its samples wait for room: what trains on the same devices must find room for all of them. Everything else that a call waits for
is an earlier call, so a ring can be closed by a channel alone: the check looks at each that is too small, and names the ring.

It goes by the longest samples that there may be. What is spilled waits nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from m2flow.channels.codec import INLINE_BYTES
from m2flow.errors import PlanError
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.oversampling import is_cut
from m2flow.micro.protocol.execute import num_tokens_of
from m2flow.micro.protocol.plan import Room, Route, Stage, WorkerPlan
from m2flow.recipe import Sampling
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec

BYTES_PER_TOKEN = 16
"""Of all of a sample's columns: id, log-probability and version 4 each, two masks, and about 2 of text."""
_TOKEN_BYTES = 4
"""Of the widest columns: a token's id, its log-probability or its version."""


def route(
    graph: MacroGraph, stages: tuple[Stage, ...], workers: tuple[WorkerPlan, ...], spec: ClusterSpec
) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    """The channels, and each stage with where its rows go at once."""
    by_call = dict(zip((call.ordinal for call in graph.calls), stages, strict=True))
    routes: list[Route] = []
    routed = []
    for call in graph.calls:
        stage = by_call[call.ordinal]
        consumers = [by_call[c.ordinal] for c in graph.consumers(call.ordinal)]
        if call.is_aligned:
            capacity = call.most_candidates
            for consumer in consumers:
                routes += _between(stage, consumer, capacity)
        targets = {c.workers[0] for c in consumers if len(c.workers) == 1}
        routed.append(msgspec.structs.replace(stage, forward_to=tuple(sorted(targets))))
    devices = {worker.name: worker.device for worker in workers}
    return _with_transports(tuple(dict.fromkeys(routes)), _large_columns(graph, by_call), devices, spec), tuple(routed)


def _between(producer: Stage, consumer: Stage, capacity: int) -> Sequence[Route]:
    return [
        Route(producer.call, consumer.call, source, target, "same process", capacity)
        for source in producer.workers or ("controller",)
        for target in consumer.workers
    ]


def longest_rows(graph: MacroGraph) -> dict[int, int]:
    """Tokens of each call's longest row, if its samples become as long as they may; of prompts as their texts predict."""
    longest: dict[int, int] = {}
    for call in graph.calls:
        rows, sampling = call.options.get("rows"), call.options.get("sampling")
        if isinstance(rows, Batch):
            longest[call.ordinal] = max(num_tokens_of(rows), default=0)
            continue
        before = max((longest.get(ref.call, 0) for _, ref in call.inputs), default=0)
        longest[call.ordinal] = before + (sampling.max_new_tokens if isinstance(sampling, Sampling) else 0)
    return longest


def _large_columns(graph: MacroGraph, stages: Mapping[int, Stage]) -> dict[str, int]:
    """By the name of a call that gives tokens: bytes of its largest column, if a task's samples leave together and are as long as they may
    be. Of the other calls nothing is known that could be large."""
    longest = longest_rows(graph)
    found: dict[str, int] = {}
    for call in graph.calls:
        stage = stages[call.ordinal]
        if stage.engine in ("rollout", "train") and call.is_aligned:
            rows = min(stage.chunk, call.most_candidates)
            found[stage.call] = max(found.get(stage.call, 0), rows * longest[call.ordinal] * _TOKEN_BYTES)
    return found


def _with_transports(
    routes: tuple[Route, ...], large: Mapping[str, int], devices: Mapping[str, str], spec: ClusterSpec
) -> tuple[Route, ...]:
    """The routes with the way that each pair of workers has, and why."""
    largest: dict[tuple[str, str], int] = {}
    for route in routes:
        pair = (route.source, route.target)
        largest[pair] = max(largest.get(pair, 0), large.get(route.producer, 0))
    return tuple(_with_transport(route, largest[route.source, route.target], devices, spec) for route in routes)


def _with_transport(route: Route, num_bytes: int, devices: Mapping[str, str], spec: ClusterSpec) -> Route:
    by = spec.transport
    if route.source == route.target:
        return msgspec.structs.replace(route, reason="the rows stay where they are")
    if by == "tcp":
        reason = "they may be on different hosts" if not spec.is_one_host else "the spec says tcp"
        return msgspec.structs.replace(route, transport="zmq tcp", reason=reason)
    if by == "ipc" and not spec.channels.shared_bytes:
        return msgspec.structs.replace(route, transport="zmq ipc", reason="one host; the spec gives no shared memory")
    if num_bytes <= INLINE_BYTES or route.source == "controller":
        return msgspec.structs.replace(route, transport="zmq ipc", reason=f"one host; columns of up to {INLINE_BYTES >> 10} KiB")
    size = f"columns of up to {-(-num_bytes // 1024):,} KiB"
    if by == "ipc":
        return msgspec.structs.replace(route, transport="shared memory", reason=f"one host; {size}")
    if _have_gpus(devices[route.source], devices[route.target]):
        return msgspec.structs.replace(route, transport="torch nccl", reason=f"the spec says distributed; from GPU to GPU; {size}")
    return msgspec.structs.replace(route, transport="torch gloo", reason=f"the spec says distributed; {size}")


def _have_gpus(one: str, other: str) -> bool:
    """Whether each end has one of its own: NCCL joins no two processes on the same."""
    return one.startswith("cuda") and other.startswith("cuda") and one != other


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


Step = tuple[str, str]
"""Who waits, and for what."""


def check_room(routes: Iterable[Route], stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> None:
    """
    Raises:
        PlanError: the run could come to a halt; the ring of waits is named.
    """
    for route in routes:
        ring = ring_of(route, stages, workers)
        if ring:
            raise PlanError(
                f"this plan can come to a halt: {'; '.join(f'{who} waits for {what}' for who, what in ring)}",
                now=f"Give the channel room for {route.needs} samples and {route.needs_bytes:,} bytes, or let it spill (`spills`: true).",
            )


def ring_of(route: Route, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> list[Step]:
    """The ring of waits that a channel closes if it is too small for what must be in it at once; empty if there is none.

    A group may overdraw, so a channel into a call that takes groups as they come holds nobody up for ever.
    """
    if not is_too_small(route):
        return []
    place = f"{route.source} -> {route.target}"
    room = f"{route.capacity} samples" + (f" or {route.capacity_bytes:,} bytes" if route.capacity_bytes else "")
    ring = [(f"{route.consumer} on {route.target}", f"all {route.needs} samples of {route.producer} ({route.needs_bytes:,} bytes)")]
    ring.append((route.producer, f"room in the channel {place}, which holds {room}"))
    lease = shared_lease(route, stages, workers)
    if lease:
        ring.append((f"the channel {place}", f"{route.consumer}, which waits for the lease {lease}"))
        ring.append((f"the lease {lease}", f"{route.producer} to have nothing left to run"))
    else:
        ring.append((f"the channel {place}", f"{route.consumer} to take them"))
    return ring


def shared_lease(route: Route, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> str:
    """The lease that the taker needs and the maker has, if there is one."""
    leases = {worker.name: worker.lease for worker in workers}
    kinds = {stage.call: stage for stage in stages}
    taker, maker = kinds.get(route.consumer), kinds.get(route.producer)
    if taker is None or maker is None or taker.engine != "train" or maker.engine != "rollout":
        return ""
    lease = leases.get(route.target, "")
    return lease if lease and any(leases.get(worker) == lease for worker in maker.workers) else ""
