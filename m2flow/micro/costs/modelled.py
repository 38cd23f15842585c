"""The cost model where nothing was measured: from the models' shapes and the devices' data sheets.

    ClusterSpec, Workload, ModelShape a role, Extent --ModelledCosts--> what the search and the simulator ask

Everything is a closed form, worked out once for each (engine, pool, layout). What the numbers leave out is said in the files that make
them; `constants` lists those in use. A profile replaces them term by term.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar, final

from m2flow.errors import ModelError, SpecError, did_you_mean
from m2flow.micro.costs import footprints
from m2flow.micro.costs.adapters import adapted
from m2flow.micro.costs.extents import Extent
from m2flow.micro.costs.layouts import adds_adapters, legal_layouts, offered, thread_layouts
from m2flow.micro.costs.moves import adding_s, hop_s, switch, sync_s
from m2flow.micro.costs.pools import Pool, pools_of
from m2flow.micro.costs.rollout_model import decode_constants, decode_cost
from m2flow.micro.costs.shapes import ModelShape, shape_named
from m2flow.micro.costs.terms import Constant, Costs, DecodeCost, EngineId, Footprint, FunctionCost, Layout, Switch, TrainCost
from m2flow.micro.costs.train_model import train_constants, train_cost
from m2flow.micro.search.workload import Workload
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

DEFAULT_LATENCY_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.002)
"""Of a reward or an op of which the spec says nothing: a rule that checks a text, now and then slowly. An estimate."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _once(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Answers of an object that is asked the same again and again are kept in it."""
    name = getattr(method, "__name__", "")

    @functools.wraps(method)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = args[0]._answers  # type: ignore[attr-defined]  # `args[0]` is the costs
        key = (name, *args[1:])
        try:
            found: _T = known[key]
        except KeyError:
            found = known[key] = method(*args, **kwargs)
        return found

    return answer


@final
class ModelledCosts(Costs):
    """Costs of one flow on one cluster.

    Args:
        shapes: of each role with a model; see `shapes_of`.
        extents: lengths of the samples, by role; `""` for roles that are not there.
    Raises:
        SpecError: a device that does not exist, or latencies of a function that are none.
    """

    def __init__(self, spec: ClusterSpec, workload: Workload, shapes: Mapping[str, ModelShape], extents: Mapping[str, Extent]) -> None:
        self._spec = spec
        self._workload = workload
        self._shapes = dict(shapes)
        self._extents = dict(extents)
        self._pools = pools_of(spec)
        self._answers: dict[object, object] = {}
        self._offers = {"rollout": offered(spec.rollout.engine, "rollout"), "train": offered(spec.train.engine, "train")}
        self._sends_adapters = spec.weights.adapters == "alone" and adds_adapters(spec.rollout.engine)
        self._trained = {call.engine.role for call in workload.calls if call.work == "update" and call.engine is not None}
        self._samples: dict[str, int] = {}
        for call in workload.calls:
            if call.work == "generate" and call.engine is not None:
                self._samples[call.engine.role] = max(self._samples.get(call.engine.role, 1), call.num_samples)
        _check_latencies(spec)

    @property
    def spec(self) -> ClusterSpec:
        return self._spec

    def for_spec(self, spec: ClusterSpec) -> ModelledCosts:
        """The same flow on another cluster, or under other settings."""
        return ModelledCosts(spec, self._workload, self._shapes, self._extents)

    def pool(self, name: str) -> Pool:
        return self._pools[name]

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def shape(self, engine: EngineId) -> ModelShape:
        """Raises `ModelError`: nothing says how large the role's model is."""
        if engine.role not in self._shapes:
            now = f"Say which model to plan for: `shapes: {{{engine.role}: Qwen2.5-7B}}` in the cluster spec."
            raise ModelError(f"there is no shape for {engine.role}", now=now)
        return self._shapes[engine.role]

    def extent(self, role: str) -> Extent:
        return self._extents.get(role) or self._extents.get("") or next(iter(self._extents.values()))

    def is_trained(self, engine: EngineId) -> bool:
        return engine.role in self._trained

    @_once
    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        found = self._pools[pool]
        if not 1 <= num_devices <= found.num_devices:
            return ()
        if found.device.shares_host_memory:
            return thread_layouts(engine.kind, num_devices, found.per_node, self._spec.train.ranks)
        return legal_layouts(self.shape(engine), self._offers[engine.kind], engine.kind, num_devices, found.per_node)

    @_once
    def unit(self, engine: EngineId, pool: str) -> int:
        found = self._pools[pool]
        inside = [count for count in range(1, found.per_node + 1) if found.per_node % count == 0]
        first = next((count for count in inside if self.fits(engine, pool, count)), 0)
        if first or found.num_nodes == 1:
            return first
        if engine.kind == "rollout":  # Instances have the sizes of replicas, which double.
            doubled = [found.per_node << i for i in range(1, 12) if 1 << i <= found.num_nodes]
            return next((count for count in doubled if self.fits(engine, pool, count)), 0)
        # What a trainer needs of a device does not grow with the number of nodes, so the smallest number is found by halving.
        few, many = 1, found.num_nodes
        if not self.fits(engine, pool, many * found.per_node):
            return 0
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if self.fits(engine, pool, middle * found.per_node) else (middle, many)
        return many * found.per_node

    def fits(self, engine: EngineId, pool: str, num_devices: int) -> bool:
        """Whether some layout on so many devices fits the memory, with nothing else on them."""
        layouts = self.layouts(engine, pool, num_devices)
        most = max((layout.zero for layout in layouts), default=0)
        needs = (self.footprint(engine, pool, layout) for layout in layouts if layout.zero == most)
        return any(need.device_bytes <= self.device_bytes(pool) and need.host <= self.host_bytes(pool) for need in needs)

    def like(self, engine: EngineId) -> EngineId:
        return self._first_like(engine) if engine.kind == "train" else engine

    @_once
    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        shape, extent = self.shape(engine), self.extent(engine.role)
        return decode_cost(shape, self._pools[pool], layout, extent, self._num_running(engine, pool, layout))

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return self._train(self._first_like(engine), pool, layout)

    @_once
    def _train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return train_cost(
            self.shape(engine),
            self._pools[pool],
            layout,
            microbatch_tokens=self._microbatch_tokens(engine.role),
            is_trained=self.is_trained(engine),
            recomputes=self._offers["train"].recomputes,
        )

    @_once
    def function(self, call: str) -> FunctionCost:
        given = self._spec.functions.latency_s.get(call.partition("@")[0], DEFAULT_LATENCY_S)
        quantiles = given if isinstance(given, tuple) else (given,)
        return FunctionCost(quantiles, self._spec.functions.concurrency)

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        if engine.kind == "rollout":
            return self._rollout_footprint(engine, pool, layout)
        return self._train_footprint(self._first_like(engine), layout)

    @_once
    def _rollout_footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        running = self._num_running(engine, pool, layout)
        return footprints.rollout_footprint(self.shape(engine), layout, self.extent(engine.role), running)

    @_once
    def _train_footprint(self, engine: EngineId, layout: Layout) -> Footprint:
        return footprints.train_footprint(
            self.shape(engine),
            layout,
            self._microbatch_tokens(engine.role),
            is_trained=self.is_trained(engine),
            recomputes=self._offers["train"].recomputes,
        )

    @_once
    def _first_like(self, engine: EngineId) -> EngineId:
        """The first trainer that costs the same: a policy's critic has the policy's shape."""

        def what(one: EngineId) -> tuple[ModelShape, float, bool]:
            return self.shape(one), self._microbatch_tokens(one.role), self.is_trained(one)

        mine = what(engine)
        return next((one for one in self._workload.engines if one.kind == "train" and what(one) == mine), engine)

    def device_bytes(self, pool: str) -> int:
        return self._pools[pool].memory_bytes

    def host_bytes(self, pool: str) -> int:
        return self._pools[pool].host_bytes

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return switch(engine, self._pools[pool], footprint, is_trained=self.is_trained(engine))

    @_once
    def _sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], is_same_devices: bool) -> float:
        shape = self._shapes[role]
        ends = (self._pools[source[0]], source[1]), (self._pools[target[0]], target[1])
        if shape.adapter_parameters and self._sends_adapters and not is_same_devices:
            sent_s = sync_s(shape.adapter_parameters * shape.bytes_each, *ends, is_same_devices=False)
            return sent_s + adding_s(shape.weight_bytes, ends[1])
        return sync_s(shape.weight_bytes, *ends, is_same_devices=is_same_devices)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return self._sync_s(role, source, target, is_same_devices)

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return hop_s(
            num_bytes, [self._pools[name] for name in (source, target) if name], is_same_pool=source == target or not (source and target)
        )

    def constants(self) -> dict[str, Constant]:
        """Of the devices, and of each engine at its smallest layout; `terms` gives those of another."""
        found: dict[str, Constant] = {}
        for name, pool in self._pools.items():
            found |= {f"{name}.{field}": constant for field, constant in pool.device.constants().items()}
            for engine in self._workload.engines:
                unit = self.unit(engine, name)
                layouts = self.layouts(engine, name, unit) if unit else ()
                layout = next((one for one in layouts if self._is_small(engine, name, one)), None)
                if layout is not None:
                    found |= {f"{engine}.{name}.{term}": constant for term, constant in self.terms(engine, name, layout).items()}
        for call in self._workload.calls:
            if call.work == "function":
                base = call.name.partition("@")[0]
                source = "the cluster spec" if base in self._spec.functions.latency_s else "estimate: a rule that checks a text"
                found[f"{base}.latency_s"] = Constant(self.function(call.name).mean_s, "s", f"modelled: {source}")
        return found

    def terms(self, engine: EngineId, pool: str, layout: Layout) -> dict[str, Constant]:
        """The constants of one engine in one layout, each with its formula."""
        shape, found = self.shape(engine), self._pools[pool]
        if engine.kind == "rollout":
            return decode_constants(shape, found, layout, self.decode(engine, pool, layout), self.extent(engine.role))
        return train_constants(shape, found, layout, self.train(engine, pool, layout))

    def _is_small(self, engine: EngineId, pool: str, layout: Layout) -> bool:
        need = self.footprint(engine, pool, layout)
        return need.device_bytes <= self.device_bytes(pool) and need.host <= self.host_bytes(pool)

    def _num_running(self, engine: EngineId, pool: str, layout: Layout) -> int:
        """Samples that decode together in an instance: no more than the engine allows, the step has for it, and the cache holds."""
        limit = min(self._spec.rollout.max_running, max(1, -(-self._samples.get(engine.role, 1) // layout.dp)))
        return footprints.most_running(self.shape(engine), layout, self.extent(engine.role), self._pools[pool].memory_bytes, limit)

    def _microbatch_tokens(self, role: str) -> float:
        """A micro-batch is filled up to its budget; a sample that is longer has one of its own."""
        return max(self._spec.train.token_budget, self.extent(role).longest)


def shapes_of(models: Mapping[str, Model], spec: ClusterSpec) -> dict[str, ModelShape]:
    """The shape of each role's model: what the spec says (`shapes`), else what its directory's config.json says, in the flow's dtype; with
    its adapters.

    A shape for a role is also that of the roles whose model was made from the same path: a policy's reference and critic.

    Raises:
        SpecError: a shape for a role that the flow does not have. ModelError: a name or a directory that is not there.
    """
    for role in spec.shapes:
        if role not in models:
            now = did_you_mean(role, models, f"It has {', '.join(models) or 'none'}.")
            raise SpecError(f"shapes.{role}: the flow has no model of that role", where=spec.where("shapes", role), now=now)
    by_path = {models[role].path: name for role, name in reversed(spec.shapes.items())}
    shapes = {}
    for role, model in models.items():
        named = spec.shapes.get(role) or by_path.get(model.path)
        shapes[role] = adapted(shape_named(named) if named else _own_shape(role, model), model.lora)
    return shapes


def _own_shape(role: str, model: Model) -> ModelShape:
    try:
        return ModelShape.from_config(model.path).with_dtype(model.dtype)
    except ModelError as error:
        now = f"Or say which model to plan for: `shapes: {{{role}: Qwen2.5-7B}}` in the cluster spec."
        raise ModelError(f"how large the model of {role} is can't be seen: {error.what}", now=f"{error.now}\n{now}") from None


def _check_latencies(spec: ClusterSpec) -> None:
    for name, given in spec.functions.latency_s.items():
        quantiles = given if isinstance(given, tuple) else (given,)
        if not quantiles or min(quantiles) < 0 or list(quantiles) != sorted(quantiles):
            raise SpecError(f"functions.latency_s.{name}: {given}; seconds, none of them negative, the shortest first")
