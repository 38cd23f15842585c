"""One search, set up: the call graph, every engine's options, every function's times, and what ties parts of a plan together.

Two kinds of engine are more than a leaf of their own. One with several calls (a critic's values and update) is in one place: wherever
a plan puts these calls, they have the same devices and the same layout. And a model that is both sampled and trained needs its new
weights sent, which costs what both layouts make it cost. What such an engine has chosen is part of a row's ties until all the calls
that it matters to are inside.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from m2flow.errors import PlanError
from m2flow.micro.costs.shortage import no_room
from m2flow.micro.costs.terms import Costs, EngineId, Layout
from m2flow.micro.search.batches import Batch, Draws, FloatArray
from m2flow.micro.search.calls import CallGraph, Cut
from m2flow.micro.search.composing import FunctionTimes, function_times
from m2flow.micro.search.leaves import LeafTimes, leaf_times
from m2flow.micro.search.options import Option, Options, is_allowed, options_of
from m2flow.micro.search.workload import CallLoad, Workload
from m2flow.spec import ClusterSpec

if TYPE_CHECKING:
    from m2flow.micro.search.lending import Lent


def outside_call(engine: EngineId) -> str:
    """What stands for the calls of an engine that are in no usual step."""
    return f"{engine} in other steps"


@dataclass(frozen=True)
class Sync:
    """New weights of a role on their way to its rollout engine."""

    role: str
    times: int
    """In a step."""
    calls: int
    """All that generate with the weights or update them."""

    def meets(self, cut: Cut) -> bool:
        """Whether its calls come together at this cut."""
        return not self.calls & ~(cut.first | cut.second) and bool(self.calls & ~cut.first) and bool(self.calls & ~cut.second)

    @property
    def source(self) -> EngineId:
        return EngineId(self.role, "train")

    @property
    def target(self) -> EngineId:
        return EngineId(self.role, "rollout")


@dataclass
class Problem:
    """What `find_plan` searches."""

    workload: Workload
    lengths: Draws
    costs: Costs
    spec: ClusterSpec
    counts: dict[str, Sequence[int]] | None = None
    """Device counts to try, by pool; None: all."""
    most_chunks: int = 0
    """Chunk sizes to try for a leaf; 0: all."""
    lent: dict[tuple[object, ...], Lent] = field(default_factory=dict)
    """What `lending` has worked out."""
    _leaves: dict[int, LeafTimes] = field(default_factory=dict)
    _syncs_s: dict[tuple[str, str, Layout, str, Layout, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Engines that only other steps need have a place too: calls of no sample stand for them."""
        calls = [CallLoad(outside_call(e), "forward", e, 0, 1, "batch", False, ()) for e in self.workload.outside]
        self.workload = msgspec.structs.replace(self.workload, calls=(*self.workload.calls, *calls), outside=())

    @cached_property
    def graph(self) -> CallGraph:
        return CallGraph(self.workload)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        return tuple(self.spec.planned_pools)

    @cached_property
    def calls(self) -> dict[str, CallLoad]:
        return {call.name: call for call in self.workload.calls}

    @cached_property
    def batches(self) -> dict[str, Batch]:
        """By call: what it generates, or the samples of the last call before it that does.

        Each call stops at its own limit.
        """
        made: dict[tuple[int, int, int], Batch] = {}
        found, limits = {}, dict[str, int]()
        for call in self.workload.calls:
            limits[call.name] = call.max_new_tokens or max((limits.get(name, 0) for name in call.after), default=0)
            shape = call.num_prompts, call.num_per_prompt, limits[call.name]
            if shape not in made:
                made[shape] = Batch(call, self.lengths, limit=limits[call.name])
            found[call.name] = made[shape]
        return found

    @cached_property
    def functions(self) -> dict[str, FunctionTimes]:
        size = self.spec.functions
        costs = {call: self.costs.function(call.name) for call in self.graph.function_calls}
        return {call.name: function_times(call, cost, size.workers, size.chunk) for call, cost in costs.items()}

    @cached_property
    def options(self) -> Options:
        return options_of(self.workload.engines, self.costs, self.spec, self.counts)

    def leaf(self, calls: int) -> LeafTimes:
        """Times of calls of one engine, for all of its options."""
        if calls not in self._leaves:
            members = self.graph.members(calls)
            engine = members[0].engine
            assert engine is not None
            self._leaves[calls] = leaf_times(members, self.options.of[engine], self.costs, self.batches, self.most_chunks)
        return self._leaves[calls]

    def keep(self, rows: Mapping[EngineId, Sequence[int]]) -> None:
        """Leave only these options of each engine."""
        for calls, leaf in self._leaves.items():
            (engine,) = self.graph.engines(calls)
            self._leaves[calls] = LeafTimes(leaf.chunks, leaf.times[rows[engine]])
        kept = {engine: [options[i] for i in rows[engine]] for engine, options in self.options.of.items()}
        self.options = Options(kept, self.options.unfit)

    def with_options(self, options: Options) -> Problem:
        """The same question of these options, in all of their chunks."""
        found = copy.copy(self)  # With all that does not depend on options and is worked out already.
        found.options, found.most_chunks, found._leaves = options, 0, {}
        return found

    def slowdowns(self, cut: Cut) -> tuple[float, float]:
        """How many times as long the two sides take while both work: on one host, engines of different kinds get into each other's way."""
        kinds = [{engine.kind for engine in self.graph.engines(side)} for side in (cut.first, cut.second)]
        if sum(pool.nodes for pool in self.spec.planned_pools.values()) > 1:
            return 1.0, 1.0
        first, second = (
            max((self.costs.slowdown(kind, other) for kind in own for other in others if kind != other), default=1.0)
            for own, others in (kinds, kinds[::-1])
        )
        return first, second

    def check(self) -> None:
        """Raises PlanError: some engine fits nowhere, however much of the cluster it has."""
        if not all(self.options.of.values()):
            raise self.no_room()

    def no_room(self) -> PlanError:
        """What is short, and what would fit."""
        spec = self.spec
        return no_room(
            self.workload.flow, self.workload.engines, self.costs, spec, lambda engine, pool, layout: is_allowed(engine, pool, layout, spec)
        )

    @cached_property
    def num_devices(self) -> tuple[int, ...]:
        return tuple(pool.num_devices for pool in self.spec.planned_pools.values())

    def calls_of(self, engine: EngineId) -> int:
        return self._calls_of.get(engine, 0)

    @cached_property
    def _calls_of(self) -> dict[EngineId, int]:
        found: dict[EngineId, int] = {}
        for i, call in enumerate(self.graph.device_calls):
            if call.engine is not None:
                found[call.engine] = found.get(call.engine, 0) | 1 << i
        return found

    @cached_property
    def room(self) -> FloatArray:
        """[2, pools]: bytes of a device, and of a device's part of its host."""
        return np.array([[of(pool) for pool in self.pools] for of in (self.costs.device_bytes, self.costs.host_bytes)], np.float64)

    @cached_property
    def placed(self) -> tuple[EngineId, ...]:
        """Engines with several calls, which must be in one place."""
        return tuple(engine for engine in self.workload.engines if self.calls_of(engine).bit_count() > 1)

    @cached_property
    def pairs(self) -> tuple[tuple[EngineId, EngineId], ...]:
        """Of `placed`: either apart (on devices of their own) or not, all through the plan."""
        return tuple(combinations(self.placed, 2))

    @cached_property
    def syncs(self) -> tuple[Sync, ...]:
        found = []
        for role in dict.fromkeys(engine.role for engine in self.workload.engines):
            mine = [call for call in self.graph.device_calls if call.engine is not None and call.engine.role == role]
            acts = [call.work for call in mine if call.work in ("generate", "update")]
            times = sum(a == "update" and b == "generate" for a, b in pairwise([*acts, *acts[:1]]))
            if times:
                concerned = sum(self.graph.bits[call.name] for call in mine if call.work in ("generate", "update"))
                found.append(Sync(role, times, concerned))
        return tuple(found)

    @cached_property
    def tied(self) -> tuple[EngineId, ...]:
        """Engines whose option is part of a row's ties: first `placed`, then those that only a sync ties."""
        synced = [engine for sync in self.syncs for engine in (sync.target, sync.source)]
        return tuple(dict.fromkeys([*self.placed, *synced]))

    def is_open(self, engine: EngineId, calls: int) -> bool:
        """Whether what `engine` has chosen in `calls` matters to calls outside."""
        return bool(self._scopes.get(engine, 0) & ~calls) and bool(self.calls_of(engine) & calls)

    @cached_property
    def _scopes(self) -> dict[EngineId, int]:
        """By engine: the calls that its choice matters to."""
        found = {engine: self.calls_of(engine) for engine in self.placed}
        for sync in self.syncs:
            for engine in (sync.source, sync.target):
                found[engine] = found.get(engine, 0) | sync.calls
        return found

    def sync_s(self, sync: Sync, source: Option, target: Option, *, is_turns: bool) -> float:
        """Seconds a step. On the same devices if they take turns and have equally many of one pool."""
        is_same = is_turns and source.pool == target.pool and source.num_devices == target.num_devices
        key = (sync.role, source.pool, source.layout, target.pool, target.layout, is_same)
        if key not in self._syncs_s:
            one = self.costs.sync_s(sync.role, (source.pool, source.layout), (target.pool, target.layout), is_same_devices=is_same)
            self._syncs_s[key] = one * sync.times
        return self._syncs_s[key]
