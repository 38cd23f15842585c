"""Explain why no plan fits: what is short, and which single change would make it fit, by the same costs as the search.

    engines, Costs, ClusterSpec --no_room--> DoesNotFit

Each engine alone comes first: the layout that is least short, by how many GiB on which pool, and which single change would fit (another
ZeRO stage, offloading, more tensor parallelism, more devices). If each fits alone but not all together, the same for the pool where they
are least short when they take turns: offloading, fewer samples that decode together, more nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from m2flow.errors import DoesNotFit
from m2flow.micro.protocol.cost_terms import Costs, EngineId, Footprint, Layout
from m2flow.planner.pools import PLANNED, device_list
from m2flow.spec import ClusterSpec, PoolSpec

Allows = Callable[[EngineId, str, Layout], bool]
"""Whether the spec's pins allow an engine this pool and layout."""

_GIB = 2**30
_MOST_NODES = 64
"""The largest multiple of the nodes that is tried."""


@dataclass(frozen=True)
class _Try:
    """An engine alone on some devices, and what it is short of."""

    pool: str
    layout: Layout
    footprint: Footprint
    short: int
    """Bytes by which the device or the host is short; 0 if it fits."""
    is_host: bool
    """Whether the host is short of more than the device."""


def no_room(flow: str, engines: Sequence[EngineId], costs: Costs, spec: ClusterSpec, allows: Allows | None = None) -> DoesNotFit:
    """Make (not raise) the error for a search that found no plan."""
    may = allows or (lambda engine, pool, layout: True)
    short: dict[EngineId, DoesNotFit] = {}
    for engine in engines:
        allowed = [one for one in _tries(engine, costs, spec) if may(engine, one.pool, one.layout)]
        if not any(one.short == 0 for one in allowed):
            short[engine] = _alone(engine, allowed, costs, spec)
    if not short:
        return _together(flow, engines, costs, spec, may)
    if len(short) == 1:
        return next(iter(short.values()))
    # All of them: what would do for one alone leaves the next.
    return DoesNotFit(
        "; ".join(error.what for error in short.values()),
        now="\n".join(f"For {engine}: {error.now[:1].lower()}{error.now[1:]}" for engine, error in short.items()),
    )


def _alone(engine: EngineId, allowed: Sequence[_Try], costs: Costs, spec: ClusterSpec) -> DoesNotFit:
    every = list(_tries(engine, costs, spec))
    if not every:
        sizes = ", ".join(f"{name or 'this machine'} ({_count(pool)})" for name, pool in spec.planned_pools.items())
        return DoesNotFit(f"{engine} has no legal layout on {sizes}", now=_now(_elsewhere(engine, costs, spec, is_host=False)))
    if not allowed:
        least = min(every, key=_rank)
        fits = f"; without it, this would fit: {_as(least)}" if not least.short else ""
        return DoesNotFit(f"the pin of {engine} leaves no legal layout{fits}", now="Change or drop `pin` in the cluster spec.")
    least = min(allowed, key=_rank)
    ways = _changes(least, every) or _elsewhere(engine, costs, spec, is_host=least.is_host)
    return DoesNotFit(f"{engine} does not fit: {_lacks(least, costs)}", now=_now(ways))


def _together(flow: str, engines: Sequence[EngineId], costs: Costs, spec: ClusterSpec, may: Allows) -> DoesNotFit:
    def need(asked: Costs, of: ClusterSpec) -> tuple[int, str, str]:
        found = [_turns(engines, asked, of, pool, may) for pool in of.planned_pools]
        return min(found, key=lambda one: one[0])

    short, pool, what = need(costs, spec)
    units = [(engine, min((unit for name in spec.planned_pools if (unit := costs.unit(engine, name))), default=0)) for engine in engines]
    apart = " + ".join(f"{unit} for {engine}" for engine, unit in units)
    ways = _first_of_each(_specs_together(spec), costs, spec, lambda asked, other: need(asked, other)[0] <= 0)
    if short <= 0:
        reason = f"each engine fits, and so do all when they take turns with {pool or 'this machine'}; what is pinned allows no plan"
        return DoesNotFit(f"no plan of {flow} fits {spec.name}: {reason}", now="Change or drop `pin` in the cluster spec.")
    now = _now(ways, f"On devices of their own they need {apart} at the least.")
    return DoesNotFit(f"no plan of {flow} fits {spec.name}: each engine fits alone, but {what}", now=now)


def _turns(engines: Sequence[EngineId], costs: Costs, spec: ClusterSpec, pool: str, may: Allows) -> tuple[int, str, str]:
    """By how much engines that take turns on a whole pool are short: (bytes, pool, description)."""
    num = spec.planned_pools[pool].num_devices
    capacity, host = costs.device_bytes(pool), costs.host_bytes(pool)
    chosen = []
    for engine in engines:
        found = [_try(engine, costs, pool, layout) for layout in costs.layouts(engine, pool, num) if may(engine, pool, layout)]
        if not found:
            return num * capacity, pool, f"{engine} has no layout on all of {pool or 'this machine'}, to take turns there"
        chosen.append(min(found, key=lambda one: (one.short, one.footprint.kept_bytes, one.footprint.device_bytes)))
    kept = sum(one.footprint.kept_bytes for one in chosen)
    most = max(one.footprint.device_bytes - one.footprint.kept_bytes for one in chosen)
    where = pool or "this machine"
    if not spec.may_offload or not host:
        words = f"taking turns they keep {_gib(kept)} on each device of {where} and need {_gib(most)} more to work"
        return kept + most - capacity, pool, f"{words}: {_gib(kept + most - capacity)} more than the {_gib(capacity)} there are"
    away = sum(one.footprint.kept_bytes + one.footprint.host for one in chosen)
    words = f"taking turns they keep {_gib(away)} for each device of {where} in the host's memory"
    return away - host, pool, f"{words}: {_gib(away - host)} more than the {_gib(host)} there are"


def _tries(engine: EngineId, costs: Costs, spec: ClusterSpec) -> Iterator[_Try]:
    """Try an engine on the divisors of a node, and on doubling numbers of nodes up to all of them."""
    for name, pool in spec.planned_pools.items():
        inside = [num for num in range(1, pool.devices_per_node + 1) if pool.devices_per_node % num == 0]
        whole = [pool.devices_per_node << i for i in range(1, 16) if 1 << i <= pool.nodes]
        for num in dict.fromkeys([*inside, *whole, pool.num_devices]):
            yield from (_try(engine, costs, name, layout) for layout in costs.layouts(engine, name, num))


def _try(engine: EngineId, costs: Costs, pool: str, layout: Layout) -> _Try:
    footprint = costs.footprint(engine, pool, layout)
    device, host = footprint.device_bytes - costs.device_bytes(pool), footprint.host - costs.host_bytes(pool)
    return _Try(pool, layout, footprint, max(device, host, 0), host > max(device, 0))


def _rank(one: _Try) -> tuple[int, int]:
    return one.short, one.layout.num_devices


def _lacks(one: _Try, costs: Costs) -> str:
    layout = f"{one.layout}" if one.layout.num_devices == 1 else f"{one.layout} ({one.layout.num_devices} devices)"
    where = one.pool or "this machine"
    if one.is_host:
        need, there = one.footprint.host, costs.host_bytes(one.pool)
        host = f"{_gib(need)} of the host for each device"
        return f"at the least, as {layout} on {where}, it needs {host}: {_gib(one.short)} more than the {_gib(there)} there are"
    parts = [(name, getattr(one.footprint, name)) for name in ("weights", "gradients", "optimizer", "kv", "activations")]
    named = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= _GIB / 10)
    need, there = one.footprint.device_bytes, costs.device_bytes(one.pool)
    return (
        f"at the least, as {layout} on {where}, it needs {_gib(need)} of a device: {_gib(one.short)} more than the {_gib(there)} "
        f"that engines may have ({named})"
    )


def _changes(base: _Try, every: Sequence[_Try]) -> list[str]:
    """Describe single changes that would fit on this cluster, but that the spec forbids."""
    fits = [one for one in every if not one.short]
    said: list[str] = []
    same = [one for one in fits if one.pool == base.pool and one.layout.num_devices == base.layout.num_devices]
    for kind, text in (("zero", "ZeRO {}"), ("tp", "tp={}"), ("pp", "pp={}"), ("sp", "sp={}"), ("ep", "ep={}")):
        changed = next((one for one in same if _is_only(kind, one.layout, base.layout)), None)
        if changed is not None:
            said.append(f"{text.format(getattr(changed.layout, kind))}: {_gib(changed.footprint.device_bytes)}")
    if any(_is_only("offload", one.layout, base.layout) for one in same):
        said.append("its optimiser in the host's memory (offload: true)")
    more = [one for one in fits if one.pool == base.pool and one.layout.num_devices > base.layout.num_devices]
    others = [one for one in fits if one.pool != base.pool]
    for found in (more, others):
        if found:
            said.append(_as(min(found, key=lambda one: one.layout.num_devices)))
    return said or [_as(one) for one in sorted(fits, key=_rank)[:1]]


def _is_only(kind: str, one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in this degree only (apart from the number of replicas)."""
    differ = {name for name in ("tp", "pp", "sp", "ep", "zero", "offload") if getattr(one, name) != getattr(other, name)}
    return differ == {kind}


def _elsewhere(engine: EngineId, costs: Costs, spec: ClusterSpec, *, is_host: bool) -> list[str]:
    """Describe changes to the spec that would make the engine fit: the smallest of each kind."""
    return _first_of_each(
        _specs_alone(engine, spec, is_host=is_host),
        costs,
        spec,
        lambda asked, other: any(asked.unit(engine, pool) for pool in other.planned_pools),
    )


def _first_of_each(
    ways: Iterator[tuple[str, str, ClusterSpec]], costs: Costs, spec: ClusterSpec, does_fit: Callable[[Costs, ClusterSpec], bool]
) -> list[str]:
    said: dict[str, str] = {}
    can_say = costs.for_spec(spec) is not None
    for kind, text, other in ways if can_say else ():
        if kind in said:
            continue
        asked = costs.for_spec(other)
        if asked is not None and does_fit(asked, other):
            said[kind] = text
    return list(said.values())


def _specs_alone(engine: EngineId, spec: ClusterSpec, *, is_host: bool) -> Iterator[tuple[str, str, ClusterSpec]]:
    """Yield (kind of change, description, changed spec)."""
    own = spec.rollout.engine if engine.kind == "rollout" else spec.train.engine
    for name, kind in PLANNED:
        if kind == engine.kind and name != own and spec.pools:
            part = (spec.rollout if kind == "rollout" else spec.train).model_copy(update={"engine": name})
            yield "engine", f"`{kind}: {{engine: {name}}}`, which spreads a model over devices", spec.model_copy(update={kind: part})
    if engine.kind == "train":
        budget = spec.train.token_budget
        while budget > 1024:
            budget //= 2
            smaller = spec.train.model_copy(update={"token_budget": budget})
            yield "budget", f"`train: {{token_budget: {budget}}}`: smaller micro-batches", spec.model_copy(update={"train": smaller})
    if is_host:
        yield from _more_host_memory(spec)
    elif spec.pools:
        devices = device_list(spec.devices)
        for device in sorted((devices.find(name) for name in devices.names), key=lambda device: device.memory_gib):
            if not device.shares_host_memory and all(device.memory_gib > _memory_gib(pool, spec) for pool in spec.pools.values()):
                larger = {
                    name: PoolSpec(device=device.name, nodes=p.nodes, devices_per_node=p.devices_per_node) for name, p in spec.pools.items()
                }
                yield "device", f"{device.name} devices, of {device.memory_gib:g} GiB each", spec.model_copy(update={"pools": larger})
    yield from _more_nodes(spec)


def _specs_together(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    if not spec.may_offload:
        yield "offload", "`may_offload: true`: engines that wait go to the host's memory", spec.model_copy(update={"may_offload": True})
    else:
        yield from _more_host_memory(spec)
    running = spec.rollout.max_running
    while running > 1:
        running //= 2
        fewer = spec.rollout.model_copy(update={"max_running": running})
        yield (
            "samples",
            f"`rollout: {{max_running: {running}}}`: fewer samples that decode together",
            spec.model_copy(update={"rollout": fewer}),
        )
    yield from _more_nodes(spec)


def _more_host_memory(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    devices = device_list(spec.devices)
    for times in (1.25, 1.5, 2, 3, 4):
        sizes = {name: times * (pool.host_memory_gib or devices.find(pool.device).host_memory_gib) for name, pool in spec.pools.items()}
        pools = {name: pool.model_copy(update={"host_memory_gib": sizes[name]}) for name, pool in spec.pools.items()}
        if pools:
            yield "host", f"{max(sizes.values()):.0f} GiB of host memory in a node", spec.model_copy(update={"pools": pools})


def _more_nodes(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    times = 2
    while spec.pools and times <= _MOST_NODES:
        pools = {name: pool.model_copy(update={"nodes": pool.nodes * times}) for name, pool in spec.pools.items()}
        total = sum(pool.num_devices for pool in pools.values())
        yield "nodes", f"{total} devices instead of {total // times}", spec.model_copy(update={"pools": pools})
        times *= 2


def _memory_gib(pool: PoolSpec, spec: ClusterSpec) -> float:
    return pool.memory_gib or device_list(spec.devices).find(pool.device).memory_gib


def _now(ways: Sequence[str], more: str = "") -> str:
    would = "\n".join(f"- {way}" for way in ways)
    text = (
        f"What would fit:\n{would}"
        if would
        else "Nothing that was tried would fit: shorter samples (max_new_tokens) or a smaller model might."
    )
    return f"{text}\n{more}" if more else text


def _as(one: _Try) -> str:
    where = f" of {one.pool}" if one.pool else ""
    return f"{_layout(one.layout)} on {one.layout.num_devices} devices{where}: {_gib(one.footprint.device_bytes)}"


def _layout(layout: Layout) -> str:
    return "an offloaded optimiser" if str(layout) == "offload" else str(layout)


def _count(pool: PoolSpec) -> str:
    return f"{pool.num_devices} x {pool.device}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
