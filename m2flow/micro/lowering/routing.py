"""Route rows between the workers of a plan: targets, transports, capacities, spilling, and a proof that no run can deadlock on them.

    Stages, graph --route--> Routes, Stages with `forward_to`
    Routes, graph --limit--> Routes with `capacity`, `needs`, `spills`
    Stages, Routes --with_rooms--> Stages with `rooms`, and without spilled targets in `forward_to`
    Routes, stages, workers --check_deadlock_freedom--> nothing, or PlanError that names the cycle of waits

Targets. A call's rows are forwarded as soon as they exist to each consumer with a single worker. Where several workers could take them, the
scheduler sends them when it knows which. All rows from one worker to another use the same transport: shared memory if any of them has
large columns; else the sockets alone.

Capacity (backpressure). What a generation sends is limited by the samples and bytes of the spec (`channels.max_samples`,
`channels.max_bytes`): generation takes longest, and all else follows from it. A consumer that takes rows as they come needs room for a
group. One that can begin only when the whole call is there needs room for all of it; so does an update, which fills its micro-batches, and
a consumer across a lease, which gets it when the generation has nothing left to run. What does not fit is spilled: rows stay in the segment
file of the worker that made them, and are sent when a task needs them. Limits of a later segment are those that the plan has for calls of
the same name; a call that the plan has never seen has none.

Deadlock. A call waits for the calls that make its rows. A full channel holds up the producer until the consumer takes rows; a consumer that
needs more at once than the channel can hold never does. And a lease stays with generation until that has nothing left to run, which it has
while its samples wait for room: what trains on the same devices must find room for all of them. Everything else that a call waits for is
an earlier call, so only a channel can close a cycle: the check looks at each that is too small, and names the cycle. It assumes samples of
the greatest length. Spilled rows never wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from m2flow.channels.codec import INLINE_BYTES
from m2flow.errors import PlanError
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.oversampling import is_cut
from m2flow.micro.protocol.call_semantics import num_tokens_of
from m2flow.micro.protocol.plan import Room, Route, Stage, WorkerPlan
from m2flow.recipe import longest_response
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec

BYTES_PER_TOKEN = 16
"""Bytes of all columns of a sample, for each token: id, log-probability and version 4 each, two masks, and about 2 of text."""
_TOKEN_BYTES = 4
"""Bytes of the widest columns for each token: its id, its log-probability or its version."""


def route(
    graph: MacroGraph, stages: tuple[Stage, ...], workers: tuple[WorkerPlan, ...], spec: ClusterSpec
) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    """Make the routes, and give each stage the workers that its rows are forwarded to at once."""
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
    """Tokens of each call's longest row, if samples get as long as they may; of prompts, as predicted from their texts."""
    longest: dict[int, int] = {}
    for call in graph.calls:
        rows = call.options.get("rows")
        if isinstance(rows, Batch):
            longest[call.ordinal] = max(num_tokens_of(rows), default=0)
            continue
        before = max((longest.get(ref.call, 0) for _, ref in call.inputs), default=0)
        longest[call.ordinal] = before + longest_response(call.options)
    return longest


def _large_columns(graph: MacroGraph, stages: Mapping[int, Stage]) -> dict[str, int]:
    """Bytes of the largest column that a task of each generation sends, by call name, if its samples leave together and at full length.
    Other calls are left out: nothing is known of them that could be large.
    """
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
    """Give each route the transport of its pair of workers, and the reason."""
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
    """Whether the two workers have a GPU each: NCCL can't connect two processes on the same one."""
    return one.startswith("cuda") and other.startswith("cuda") and one != other


class _Need(NamedTuple):
    """Room that the consumers of a call on one worker need at the same time."""

    samples: int
    """Samples of the whole call."""
    at_once: int
    num_bytes: int
    """Bytes that must be there at once, with samples of the greatest length."""
    is_whole: bool
    takers: int


def limit(
    graph: MacroGraph, stages: Sequence[Stage], routes: Iterable[Route], workers: Sequence[WorkerPlan], spec: ClusterSpec, *, staleness: int
) -> tuple[Route, ...]:
    """Give each route its capacity and the room that its consumers need."""
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
    # Steps whose samples can exist at once: those that staleness lets run, and the next.
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


def with_pinned_capacities(routes: Iterable[Route], pinned: Iterable[Route]) -> tuple[Route, ...]:
    """Take the capacities over from a pinned plan, which may have been edited."""
    known = {(r.producer, r.consumer, r.source, r.target): r for r in pinned}
    found = []
    for route in routes:
        old = known.get((route.producer, route.consumer, route.source, route.target), route)
        is_of_another_size = old.needs != route.needs and not old.capacity_bytes  # It had room for all samples, of which there were fewer.
        if old.is_whole == route.is_whole and not is_of_another_size:  # Otherwise the consumers have changed, and with them what is needed.
            route = msgspec.structs.replace(route, capacity=old.capacity, capacity_bytes=old.capacity_bytes, spills=old.spills)
        found.append(route)
    return tuple(found)


def with_rooms(graph: MacroGraph, stages: Sequence[Stage], routes: Sequence[Route], workers: Sequence[WorkerPlan]) -> tuple[Stage, ...]:
    """Give the stages of generations the rooms of their rows, and remove spilled targets.

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
    """The needs of two consumers of the same name together."""
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
        if not fits and not any(name in known and is_below_need(known[name]) for name in late):
            continue
        forward_to.append(target)
        rooms.append(Room(target, samples, num_bytes, sum(need.takers for need in takers.values()), bool(late), fits))
    if stage.engine != "rollout":
        return stage
    spills = len(forward_to) < len(stage.forward_to)
    return msgspec.structs.replace(stage, forward_to=tuple(forward_to), rooms=tuple(rooms), spills=spills)


def is_below_need(route: Route) -> bool:
    """Whether what must be there at once neither fits nor is spilled; a plan with such a route is refused."""
    fits = route.needs <= route.capacity and (not route.capacity_bytes or route.needs_bytes <= route.capacity_bytes)
    return route.is_whole and not route.spills and not fits and route.source != route.target


def _needs(graph: MacroGraph, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> dict[tuple[int, int, str], _Need]:
    """The needs of each consumer of each generation, by (generation, consumer, worker)."""
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
    """Consumers of a generation that can't begin before all of its rows are there: they need all rows, a value or an effect of something
    that follows from it, or the generation's result is known only at its end.
    """
    own = producer.ordinal
    follows = {own}
    late: set[int] = set()
    known_late = {c.ordinal for c in graph.calls if c.drops or (c.engine == "rollout" and (c.is_gated or is_cut(c.options)))}
    """Calls that decide at their end which rows are in their result."""
    gated = {call.ordinal: call.is_gated for call in graph.calls}
    effects = {(e.resource, e.version): call.ordinal for call in graph.calls for e in call.writes}
    aligned = {call.ordinal: call.is_aligned for call in graph.calls}
    for call in graph.calls:
        inputs = {ref.call for _, ref in call.inputs}
        waits = {effects[e.resource, e.version] for e in call.reads if (e.resource, e.version) in effects} - {call.ordinal}
        if call.ordinal == own or not (inputs | waits) & follows:
            continue
        follows.add(call.ordinal)
        # An update waits until a micro-batch is full or its mini-batch is complete, and may have several of these.
        stage = stages[call.ordinal]
        waits_for_all = stage.is_barrier or stage.unit in ("batch", "minibatch") or call.method == "update"
        on_values = any(ref in follows and not aligned[ref] for ref in inputs)
        on_results = any(ref in follows and ref in known_late and not (call.is_gated and gated[ref]) for ref in inputs)
        if waits_for_all or on_values or on_results or waits & follows or inputs & late:
            late.add(call.ordinal)
    return late


Step = tuple[str, str]
"""(who waits, what for)."""


def check_deadlock_freedom(routes: Iterable[Route], stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> None:
    """Check that no channel can deadlock the run.

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
    """The cycle of waits that a channel closes if it is too small for what must be there at once; empty if there is none.

    A group may overdraw, so a channel into a call that takes groups as they come holds nobody up for ever.
    """
    if not is_below_need(route):
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
    """The lease that consumer and producer share; empty if there is none."""
    leases = {worker.name: worker.lease for worker in workers}
    kinds = {stage.call: stage for stage in stages}
    taker, maker = kinds.get(route.consumer), kinds.get(route.producer)
    if taker is None or maker is None or taker.engine != "train" or maker.engine != "rollout":
        return ""
    lease = leases.get(route.target, "")
    return lease if lease and any(leases.get(worker) == lease for worker in maker.workers) else ""
