"""Fifth pass: which rows go from where to where, and over what?

    Stages, graph --routing--> Routes, Stages with `forward_to`

A call's rows are forwarded as soon as they are there to each consumer that has a single worker. Where several workers could take
them, the scheduler has them sent when it knows which one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.plan import Route, Stage
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec


def route(graph: MacroGraph, stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    """The channels, and each stage with where its rows go at once."""
    by_call = dict(zip((call.ordinal for call in graph.calls), stages, strict=True))
    routes: list[Route] = []
    routed = []
    for call in graph.calls:
        stage = by_call[call.ordinal]
        consumers = [by_call[c.ordinal] for c in graph.consumers(call.ordinal)]
        if call.is_aligned:
            capacity = count_samples(graph, call)
            for consumer in consumers:
                routes += _between(stage, consumer, spec, capacity)
        targets = {c.workers[0] for c in consumers if len(c.workers) == 1}
        routed.append(msgspec.structs.replace(stage, forward_to=tuple(sorted(targets))))
    return tuple(dict.fromkeys(routes)), tuple(routed)


def count_samples(graph: MacroGraph, call: Call) -> int:
    """How many candidates a call works on, at most; 0 if its input is not in this graph.

    Of a refill and of an over-sampled generation these are more than the rows that it gives, which are `Call.most_rows`.
    """
    rows = call.options.get("rows")
    if isinstance(rows, Batch):
        return len(rows)
    n = call.options.get("n", 1)
    assert isinstance(n, int)
    by_ordinal = {c.ordinal: c for c in graph.calls}
    sources = [by_ordinal[ref.call] for _, ref in call.inputs if ref.call in by_ordinal and by_ordinal[ref.call].is_aligned]
    if call.options.get("gives") != "concat":
        sources = sources[:1]
    return n * sum(count_samples(graph, source) for source in sources)


def _between(producer: Stage, consumer: Stage, spec: ClusterSpec, capacity: int) -> Sequence[Route]:
    wire = "zmq ipc" if spec.channels.transport == "ipc" else "zmq tcp"
    return [
        Route(producer.call, consumer.call, source, target, "same process" if source == target else wire, capacity)  # type: ignore[arg-type]
        for source in producer.workers or ("controller",)
        for target in consumer.workers
    ]
