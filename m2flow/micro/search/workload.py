"""What a step of a flow asks of the machines: its calls with their sizes, as the search and the simulator see them.

    MacroGraph, lengths --workload_of--> Workload --> search

A call on handles alone (`rewards - beta * kl`) costs next to nothing and is not here; what depends on it depends on what it is made of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from m2flow.errors import SpecError, TraceError, did_you_mean
from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.costs.terms import EngineId
from m2flow.micro.lowering.legality import accumulation_unit, legal_stages
from m2flow.recipe import Sampling
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec

DRAWS_PER_GROUP = 2.0
"""Prompts that a refill is expected to draw for each group that it keeps. An assumption, that a run's own count should replace.

Source:
    verl's synchronous DAPO trainer asks for two for each group that it lacks (`replay_buffer.py`).
"""

Work = Literal["generate", "forward", "update", "function"]


class CallLoad(msgspec.Struct, frozen=True):
    """One call of the step."""

    name: str
    """Unique in the step: `policy.generate`, or `policy.generate@31` (the line) where there are several."""
    work: Work
    engine: EngineId | None
    """None for functions, which need no device."""
    num_prompts: int
    num_per_prompt: int
    unit: Literal["sample", "group", "minibatch", "batch"]
    """The smallest set that it may be run on; an update adds up groups."""
    is_barrier: bool
    """It starts when all of its input is there."""
    after: tuple[str, ...]
    """Calls whose result it needs, by data or effect, in this step."""
    num_epochs: int = 1
    num_optimizer_steps: int = 0
    """Of an update: mini-batches times epochs."""
    token_budget: int = 0
    """Tokens of a micro-batch."""
    max_new_tokens: int = 0
    """Of a generate call: its limit."""
    prompt_bytes: float = 0.0
    """Of a generate call on a dataset's prompts: the mean size of their texts."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_per_prompt


class Workload(msgspec.Struct, frozen=True):
    """A step: its calls in program order, which is a topological order."""

    flow: str
    calls: tuple[CallLoad, ...]
    staleness: int = 0
    outside: tuple[EngineId, ...] = ()
    """Engines that are needed before or after the steps only: they need a place, and no time in a step."""
    step: int = 0
    """Which of the traced steps it is: the first of those that are most alike."""
    num_alike: int = 1
    num_traced: int = 1
    """Steps that were traced, and how many of them have the same calls."""

    def call(self, name: str) -> CallLoad:
        return next(call for call in self.calls if call.name == name)

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """In the order of their first call."""
        return tuple(dict.fromkeys(call.engine for call in self.calls if call.engine is not None))


def workload_of(graph: MacroGraph, spec: ClusterSpec, *, draws_per_group: float = DRAWS_PER_GROUP) -> Workload:
    """The step of a traced flow that stands for most of them: an evaluation in every tenth step is not counted.

    Args:
        graph: some steps of the flow, with what comes before and after them. Without an outermost iterator, all of it is the step.
        draws_per_group: how many prompts a refill draws for each group that it keeps.
    Raises:
        TraceError: the step makes no call that takes time.
        SpecError: `functions.latency_s` names a call that the flow does not make.
    """
    _check_latencies(spec, {call.name for call in graph.calls if call.engine == "function" and not _is_free(call)})
    steps = _by_step(graph)
    kept = {number: [call for call in calls if not _is_free(call)] for number, calls in steps.items()}
    shapes = {number: tuple((call.name, str(call.site), call.most_rows) for call in calls) for number, calls in kept.items()}
    alike = Counter(shapes.values())
    step = max(steps, key=lambda number: (bool(kept[number]), alike[shapes[number]], len(kept[number]), -number))
    if not kept[step]:
        raise TraceError(f"a step of {graph.flow} has nothing to plan: it neither generates, nor updates, nor calls a function")
    loads = _Step(graph, steps[step], spec, draws_per_group).loads()
    inside = {load.engine for load in loads}
    others = [engine for call in graph.calls if not _is_free(call) and (engine := _engine(call)) is not None and engine not in inside]
    return Workload(graph.flow, loads, graph.staleness, tuple(dict.fromkeys(others)), max(step, 0), alike[shapes[step]], len(steps))


def _check_latencies(spec: ClusterSpec, names: set[str]) -> None:
    for name in spec.functions.latency_s:
        if name not in names:
            now = did_you_mean(name, sorted(names), f"It has {', '.join(sorted(names)) or 'none'}.")
            where = spec.where("functions", "latency_s", name)
            raise SpecError(f"functions.latency_s.{name}: the flow has no such call on a function", where=where, now=now)


def _by_step(graph: MacroGraph) -> dict[int, list[Call]]:
    """The calls of each step; those of all, as one, where the flow has no steps."""
    steps: dict[int, list[Call]] = {}
    for call in graph.calls:
        steps.setdefault(call.step, []).append(call)
    return {number: calls for number, calls in steps.items() if number >= 0} or steps


def _is_free(call: Call) -> bool:
    """A read of a dataset, calculations on columns, a copy of weights in place: they take next to no time."""
    return call.engine == "source" or call.options.get("style") == "columns" or call.method == "copy_of"


def _engine(call: Call) -> EngineId | None:
    return EngineId(call.role, call.engine) if call.engine in ("rollout", "train") else None


class _Step:
    """The calls of one step, with those that are free contracted away."""

    def __init__(self, graph: MacroGraph, calls: Sequence[Call], spec: ClusterSpec, draws_per_group: float) -> None:
        self._graph = graph
        self._calls = {call.ordinal: call for call in graph.calls}
        self._step = tuple(calls)
        self._spec = spec
        self._draws = draws_per_group
        own = MacroGraph(graph.flow, self._step)
        self._stages = dict(zip([call.ordinal for call in calls], legal_stages(own), strict=True))
        digraph, members = own.digraph(), {call.ordinal for call in calls}
        self._needs = {o: sorted(before for before in digraph.predecessors(o) if before in members) for o in members}

    def loads(self) -> tuple[CallLoad, ...]:
        timed = [call for call in self._step if not _is_free(call)]
        names = self._names(timed)
        return tuple(self._load(call, names) for call in timed)

    def _load(self, call: Call, names: dict[int, str]) -> CallLoad:
        stage = self._stages[call.ordinal]
        after, waits = self._before(call)
        prompts, n = self._size(call)
        load = CallLoad(
            name=names[call.ordinal],
            work=self._work(call),
            engine=_engine(call),
            num_prompts=prompts,
            num_per_prompt=n,
            unit=stage.unit,
            is_barrier=stage.is_barrier or waits,
            after=tuple(names[ordinal] for ordinal in sorted(after)),
        )
        if call.method == "update":
            size, epochs = call.options["minibatch_size"], cast(int, call.options["epochs"])
            minibatches = math.ceil(prompts / size) if isinstance(size, int) else 1
            unit = cast(Literal["sample", "group"], accumulation_unit(call).value)
            load = msgspec.structs.replace(load, unit=unit, num_epochs=epochs, num_optimizer_steps=epochs * max(minibatches, 1))
        if call.engine == "train":
            load = msgspec.structs.replace(load, token_budget=self._spec.train.token_budget)
        sampling = call.options.get("sampling")
        if isinstance(sampling, Sampling):
            load = msgspec.structs.replace(load, max_new_tokens=sampling.max_new_tokens, prompt_bytes=self._prompt_bytes(call))
        return load

    def _work(self, call: Call) -> Work:
        if call.engine == "rollout":
            return "generate"
        if call.engine == "train":
            return "update" if call.method == "update" else "forward"
        return "function"

    def _before(self, call: Call) -> tuple[set[int], bool]:
        """The timed calls that it needs, directly or through free ones; and whether one of those gives nothing until it has everything."""
        found: set[int] = set()
        waits = False
        todo = [(before, False) for before in self._needs[call.ordinal]]
        seen = set(todo)
        while todo:
            ordinal, through_barrier = todo.pop()
            before = self._calls[ordinal]
            if not _is_free(before):
                found.add(ordinal)
                waits = waits or through_barrier
                continue
            is_barrier = through_barrier or (before.engine == "function" and self._stages[ordinal].is_barrier)
            further = {(one, is_barrier) for one in self._needs[ordinal]} - seen
            seen |= further
            todo += further
        return found, waits

    def _size(self, call: Call) -> tuple[int, int]:
        """Prompts, and samples for each. Of a refill the candidates that it is expected to need; of over-sampling all that is begun."""
        n = cast(int, self._origin(call).options.get("n", 1))
        if call.is_gated:
            count = cast(int, call.options["refill"])
            return min(math.ceil(count * self._draws), max(call.most_candidates // n, count)), n
        rows = call.most_candidates if call.engine == "rollout" else call.most_rows
        return math.ceil(rows / n), n

    def _origin(self, call: Call) -> Call:
        """The generate call whose samples it works on, itself if it is one; a call on a dataset's rows has none, and is its own."""
        while call.engine != "rollout":
            ref = call.input("samples") or call.input("prompts") or next((ref for _, ref in call.inputs), None)
            if ref is None or ref.call not in self._calls:
                break
            call = self._calls[ref.call]
        return call

    def _prompt_bytes(self, call: Call) -> float:
        while call.engine != "source":
            ref = call.input("prompts") or call.input("samples") or next((ref for _, ref in call.inputs), None)
            if ref is None or ref.call not in self._calls:
                return 0.0
            call = self._calls[ref.call]
        rows = call.options.get("rows")
        if not isinstance(rows, Batch) or "prompt" not in rows or not len(rows):
            return 0.0
        return float(rows.ragged("prompt").lengths.mean())

    def _names(self, timed: Sequence[Call]) -> dict[int, str]:
        """A call's name; with its line where there are several of it, and a number where a line makes several."""
        count = Counter(call.name for call in timed)
        names: dict[int, str] = {}
        turns: Counter[str] = Counter()
        for call in timed:
            name = call.name if count[call.name] == 1 else f"{call.name}@{call.site.line}"
            turns[name] += 1
            names[call.ordinal] = name if turns[name] == 1 else f"{name}#{turns[name]}"
        return names
