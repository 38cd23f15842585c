"""The calls of a run as a graph: a node for each call site, with where the plan put it and what it has done so far.

    KnownCalls, plan.json, RunTrace --graph_of--> Graph

The calls of all steps at one line of the flow are one node, so the picture has the size of the program and not of the run.
"""

from __future__ import annotations

import re
from typing import final

import msgspec
import numpy as np

from m2flow.micro.analysis.known_calls import KnownCall
from m2flow.micro.analysis.run_trace import FUNCTION, LIFE, TRAIN, RunTrace

_RECENT_NS = 10_000_000_000
_EFFECT = re.compile(r"(reads|writes) ((\S+\.weights)@\d+)")


@final
class Node(msgspec.Struct):
    """A call site."""

    name: str
    line: str
    text: str
    engine: str
    """`source`, `rollout`, `function`, `train`; empty: the plan does not name it."""
    unit: str
    is_barrier: bool
    workers: list[str]
    steps: list[int]
    """The first and the last step in which it was made."""
    num_calls: int
    num_samples: int
    """That it was done on."""
    busy_s: float
    per_s: float
    """Samples a second: in the last ten seconds of the work."""
    kind: int
    """Position among the schedule's kinds; -1: it has no span."""


@final
class Edge(msgspec.Struct):
    """What one call gives to another."""

    source: int
    target: int
    what: str
    """The parameter; of weights the resource."""
    is_effect: bool
    transport: str = ""
    capacity: int = 0
    per_s: float = 0.0
    """Samples a second that the first has finished lately."""
    waiting: int = 0
    """Samples that the first has finished and the second has not begun."""


@final
class Graph(msgspec.Struct):
    """A run's."""

    nodes: list[Node]
    edges: list[Edge]
    mode: str
    cluster: str


def graph_of(trace: RunTrace) -> Graph:
    """As far as the run has come."""
    sites: dict[tuple[str, str], int] = {}
    nodes: list[Node] = []
    members: list[list[KnownCall]] = []
    stages = _stages(trace)
    kinds = {(kind.label, kind.line): at for at, kind in enumerate(trace.kinds)}
    for ordinal, call in sorted(trace.calls.by_ordinal.items()):
        key = (call.name, call.site)
        if key not in sites:
            sites[key] = len(nodes)
            members.append([])
            engine, unit, is_barrier, workers = stages.get(ordinal, ("", "", False, []))
            nodes.append(
                Node(call.name, call.site, call.text.strip(), engine, unit, is_barrier, workers, [], 0, 0, 0.0, 0.0, kinds.get(key, -1))
            )
        members[sites[key]].append(call)
    for node, calls in zip(nodes, members, strict=True):
        node.num_calls = len(calls)
        node.steps = [min(call.step for call in calls), max(call.step for call in calls)]
        _count(trace, node, [call.ordinal for call in calls])
    plan = trace.plan
    edges = _edges(trace, sites, members)
    for edge in edges:
        edge.per_s = 0.0 if edge.is_effect else nodes[edge.source].per_s
    return Graph(nodes, edges, plan.mode if plan else "", plan.cluster if plan else "")


def _stages(trace: RunTrace) -> dict[int, tuple[str, str, bool, list[str]]]:
    """By ordinal: a plan lists the calls of the steps that it was made from in the order of the program."""
    found: dict[int, tuple[str, str, bool, list[str]]] = {}
    by_name: dict[str, tuple[str, str, bool, list[str]]] = {}
    stages = trace.plan.stages if trace.plan else ()
    for at, (_, call) in enumerate(sorted(trace.calls.by_ordinal.items())):
        if at < len(stages) and stages[at].call == call.name:
            by_name[call.name] = (stages[at].engine, stages[at].unit, stages[at].is_barrier, list(stages[at].workers))
        if call.name not in by_name:
            stage = next((stage for stage in stages if stage.call == call.name), None)
            if stage is not None:
                by_name[call.name] = (stage.engine, stage.unit, stage.is_barrier, list(stage.workers))
        if call.name in by_name:
            found[call.ordinal] = by_name[call.name]
    return found


def _count(trace: RunTrace, node: Node, ordinals: list[int]) -> None:
    columns = trace.columns
    if not columns.num_spans:
        return
    mine = np.isin(trace.call, ordinals)
    work = mine & ~np.isin(trace.group, (LIFE,))
    node.busy_s = float((columns["end"][work] - columns["start"][work]).sum() / 1e9)
    done = mine & (trace.group == LIFE) if node.engine == "rollout" else work & np.isin(trace.group, (FUNCTION, TRAIN))
    amount = np.ones(int(done.sum()), np.int64) if node.engine == "rollout" else np.maximum(columns["num_samples"][done], 0)
    node.num_samples = int(amount.sum())
    recent = columns["end"][done] > trace.worked_until - _RECENT_NS
    node.per_s = float(amount[recent].sum()) / max(min(trace.worked_until - trace.start, _RECENT_NS) / 1e9, 1e-9)


def _edges(trace: RunTrace, sites: dict[tuple[str, str], int], members: list[list[KnownCall]]) -> list[Edge]:
    found: dict[tuple[int, int, str], Edge] = {}
    writers: dict[str, set[int]] = {}
    readers: dict[str, set[int]] = {}
    """By a version of some role's weights."""
    done, begun = _progress(trace)
    routes = {(route.producer, route.consumer): route for route in reversed(trace.plan.routes)} if trace.plan else {}
    for at, calls in enumerate(members):
        for call in calls:
            for name, ordinal in call.inputs:
                source = trace.calls.by_ordinal.get(ordinal)
                if source is None:
                    continue
                key = (sites[source.name, source.site], at, name)
                route = routes.get((source.name, call.name))
                edge = found.setdefault(
                    key, Edge(key[0], at, name, False, route.transport if route else "", route.capacity if route else 0)
                )
                if call.ordinal in begun or done.get(ordinal):
                    edge.waiting += max(done.get(ordinal, 0) - begun.get(call.ordinal, 0), 0) if ordinal in done else 0
            for effect in call.effects:
                told = _EFFECT.match(effect)
                if told and (told[1] == "writes" or not any(other.startswith(f"writes {told[3]}@") for other in call.effects)):
                    (readers if told[1] == "reads" else writers).setdefault(told[2], set()).add(at)
    for version, sources in writers.items():
        for writer in sorted(sources):
            for reader in sorted(readers.get(version, set()) - {writer}):
                found.setdefault((writer, reader, _whose(version)), Edge(writer, reader, _whose(version), True))
    return list(found.values())


def _whose(version: str) -> str:
    """`policy.weights` of `policy.weights@3`."""
    return version.partition("@")[0]


def _progress(trace: RunTrace) -> tuple[dict[int, int], dict[int, int]]:
    """By call: samples that it has finished, and samples that it has begun."""
    columns = trace.columns
    if not columns.num_spans:
        return {}, {}
    lives = np.unique(trace.call[trace.group == LIFE], return_counts=True)
    tasks = np.isin(trace.group, (FUNCTION, TRAIN)) & (columns["num_samples"] > 0)
    calls, at = np.unique(trace.call[tasks], return_inverse=True)
    counts = np.bincount(at.reshape(-1), weights=columns["num_samples"][tasks], minlength=len(calls)).astype(np.int64)
    begun = dict(zip(calls.tolist(), counts.tolist(), strict=True))
    return {**begun, **dict(zip(lives[0].tolist(), lives[1].tolist(), strict=True))}, begun
