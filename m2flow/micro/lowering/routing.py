"""Fifth pass: which rows go from where to where, and over what?

    Stages, graph --routing--> Routes, Stages with `forward_to`

A call's rows are forwarded as soon as they are there to each consumer that has a single worker. Where several workers could take
them, the scheduler has them sent when it knows which one. The way from a worker to another is the same for all that goes between them:
shared memory, if anything does whose columns are large; else the sockets alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from m2flow.channels.codec import INLINE_BYTES
from m2flow.macro.graph import MacroGraph
from m2flow.micro.plan import Route, Stage, WorkerPlan
from m2flow.micro.work.performing import num_tokens_of
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
