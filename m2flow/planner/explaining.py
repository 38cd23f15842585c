"""Explain a plan in words: placement, times, why it is not faster, differences between two plans; or why there is none.

    Choice --explain--> text,  --as_document--> the output of `m2flow plan --json`
    Plan, Plan --differences--> lines
    engines, Costs, ClusterSpec --no_room--> DoesNotFit: what is short, and which single change would make it fit

Why no plan fits is said by the same costs as the search has. Each engine alone comes first: the layout that is least short, by how many
GiB on which pool, and which single change would fit (another ZeRO stage, offloading, more tensor parallelism, more devices). If each fits
alone but not all together, the same for the pool where they are least short when they take turns: offloading, fewer samples that decode
together, more nodes.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from m2flow.engines.registry import ONE_F_ONE_B
from m2flow.errors import DoesNotFit
from m2flow.micro.protocol.cost_terms import Costs, EngineId, Footprint, HeldPart, Layout, StageOrder
from m2flow.micro.protocol.plan import Choice, Placement, Plan, Stage, TimeTerm, WorkerPlan, in_columns
from m2flow.planner.pools import device_list, host_memory_gib, spreading
from m2flow.spec import ClusterSpec, PoolSpec

_GIB = 2**30


def explain(choice: Choice, *, has_terms: bool = False, details: str | None = None) -> str:
    """Describe a plan in a screen of text.

    Args:
        has_terms: also each constant of the cost model with its source.
        details: `why`: also the comparison with other modes, term by term; `full`: and the memory of each engine by class of tensor, and
            the KV caches.
    """
    lines = [f"placement of {choice.flow} on {choice.cluster}: {choice.mode}"]
    lines += in_columns([_placement_row(placement) for placement in choice.placements])
    if choice.num_function_workers:
        num = choice.num_function_workers
        own = "".join(f", {own} of {role} alone" for role, own in (choice.num_own_workers or {}).items())
        lines.append(f"  functions: {num} process{'es' if num > 1 else ''}{own}, as many as are fastest")
    lines += held_lines(choice, is_full=details == "full")
    lines += ["", *step_lines(choice), *work_lines(choice)]
    lines += ["", *cache_lines(choice), *memory_lines(choice)] if details == "full" else []
    lines += ["", *why_lines(choice), ""] if details and choice.losers else []
    whole = choice.predicted_step_s or 1.0
    for loser in choice.losers:
        more = (loser.predicted_step_s / whole - 1) if choice.predicted_step_s else 0.0
        on = f" on {loser.num_devices} devices" if loser.num_devices != num_devices(choice.placements) else ""
        lines.append(f"instead: {loser.what}{on}, {seconds(loser.predicted_step_s)} ({more:+.0%}): {loser.why}")
    for constraint, cost in choice.constraints_cost_s.items():
        lines.append(f"constraint: {constraint} costs {seconds(cost)} a step" if cost > 0 else f"constraint: {constraint} costs nothing")
    found = "no plan of the cost model is faster" if choice.is_exact else f"a faster one by up to {seconds(choice.gap_s)} may exist"
    lines += [f"search: {seconds(choice.search_s)}; {found}. {_sources(choice)}"]
    lines += [f"not tried: {text}" for text in choice.not_tried]
    if has_terms:
        lines += ["", "terms"]
        lines += in_columns([(name, f"{c.value:.4g} {c.unit}", c.source) for name, c in sorted(choice.constants.items())])
    return "\n".join(lines)


_MOST_STAGES = 8
"""Stages of a trainer that are listed one by one, unless all details are asked for."""
_MOST_WIDTH = 72
"""Characters of a list of ranks in a row of details."""


def held_lines(choice: Choice, *, is_full: bool = False) -> list[str]:
    """The ranks and layers of each stage of trainers, and which ranks hold which experts: in short, or row by row."""
    lines = []
    for engine, parts in _by(choice.held, lambda part: part.engine).items():
        stages = _by(parts, lambda part: part.stage)
        rows = [_stage_row(of_stage) for of_stage in stages.values()] if len(stages) > 1 else []
        left = 0 if is_full else len(rows) - _MOST_STAGES
        shown = in_columns(rows)
        if left > 0:
            shown = [*shown[: _MOST_STAGES - 1], f"  and {left} stages more (--full)", shown[-1]]
        lines += [f"stages of {engine}, {_passes(choice, engine)}:", *shown] if rows else []
        some = [part for part in parts if part.experts is not None]
        if is_full:
            lines += [f"experts of {engine}:"] * bool(some)
            for part in some:
                ranks = textwrap.wrap(runs_of(part.ranks), _MOST_WIDTH)
                names = [f"stage {part.stage}" * bool(rows), f"experts {_span(part.experts)}" if part.experts else ""]
                lines += in_columns([(*names, f"ranks {ranks[0]}"), *(("", "", f"      {more}") for more in ranks[1:])])
        elif some:
            first, *others = stages[some[0].stage]
            said = [f"{_span(part.experts)} on ranks {_short(runs_of(part.ranks))}" for part in (first, *others[:1]) if part.experts]
            more = f"; and {len(others) - 1} parts more (--full)" if len(others) > 1 else ""
            lines.append(f"experts of {engine}: {'; '.join(said)}{more}")
    return lines


def _passes(choice: Choice, engine: EngineId) -> str:
    found = next(placement for placement in choice.placements if placement.engine == engine)
    chunks = f", {found.vpp} chunks of layers each, in turns (vpp)" if found.vpp > 1 else ""
    return f"each micro-batch in {found.micro_batches} parts{chunks}" + f", {found.schedule}" * (found.schedule != ONE_F_ONE_B)


_Key = TypeVar("_Key")


def _by(parts: Sequence[HeldPart], key: Callable[[HeldPart], _Key]) -> dict[_Key, list[HeldPart]]:
    found: dict[_Key, list[HeldPart]] = {}
    for part in parts:
        found.setdefault(key(part), []).append(part)
    return found


def _stage_row(parts: Sequence[HeldPart]) -> tuple[str, ...]:
    first = parts[0]
    ranks = runs_of(sorted(rank for part in parts for rank in part.ranks))
    layers = ", ".join(map(_span, first.layers))
    return f"stage {first.stage}:", f"ranks {ranks}", f"layers {layers}", ", ".join(first.beside)


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1] - 1}" if span[1] - span[0] > 1 else str(span[0])


_SHORT = 24


def _short(ranks: str) -> str:
    return ranks if len(ranks) <= _SHORT else f"{ranks[:_SHORT].rpartition(',')[0]}, ..."


def runs_of(numbers: Sequence[int]) -> str:
    """List ascending numbers, with those that follow each other as runs.

    >>> runs_of([0, 1, 2, 5, 8, 9])
    '0-2, 5, 8-9'
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return ", ".join(map(_span, runs))


def step_lines(choice: Choice) -> list[str]:
    """Describe a step: its time part by part, its bounds, and what limits it."""
    whole = choice.predicted_step_s or 1.0
    low, high = choice.interval_s
    about = f" ({seconds(low)} to {seconds(high)})" if high > low else ""
    lines = [f"step: {seconds(choice.predicted_step_s)} predicted{about}; {_bound(choice)}"]
    lines += in_columns(
        [
            (part.what, seconds(part.seconds), f"{part.seconds / whole:.0%}", "" if part.on_critical_path else "beside the others")
            for part in choice.parts
        ]
    )
    lines += ["bounds: " + ", ".join(f"{bound.name} {seconds(bound.seconds)}" for bound in choice.bounds)] if choice.bounds else []
    return lines + ([f"limited by: {choice.advice}"] if choice.advice else [])


def work_lines(choice: Choice) -> list[str]:
    """The work of each call in tokens, tokens a second, MFU and bandwidth, and what a step costs."""
    if not choice.works:
        return []
    rows: list[tuple[str, ...]] = [("work", "tokens", "whole", "exposed", "tokens/s", "a device", "MFU", "bandwidth")]
    for work in choice.works:
        rate = work.tokens / work.seconds if work.seconds else 0.0
        rows.append(
            (
                work.call,
                count(work.tokens),
                seconds(work.seconds),
                seconds(work.exposed_s) if work.exposed_s else "-",
                count(rate),
                count(rate / max(work.num_devices, 1)),
                f"{work.mfu:.0%}" if work.mfu else "-",
                f"{work.bandwidth:.0%}" if work.bandwidth else "-",
            )
        )
    num = num_devices(choice.placements)
    cost = f"cost: {num} devices x {seconds(choice.predicted_step_s)} = {num * choice.predicted_step_s / 3600:.3g} device-hours a step"
    return [*in_columns(rows), cost]


def cache_lines(choice: Choice) -> list[str]:
    """The KV caches of generations."""
    lines = []
    for work in choice.works:
        if work.kv_samples:
            waits = work.most_at_once > work.kv_samples
            risk = f"{work.most_at_once - work.kv_samples:,} wait for a place" if waits else "all run at once"
            room = f"{count(work.kv_tokens)} tokens, or {work.kv_samples:,} samples of mean length"
            lines.append(f"KV cache of {work.call}: {room}, for {work.most_at_once:,}: {risk}; if most are longer, some are preempted")
    return lines


def memory_lines(choice: Choice) -> list[str]:
    """Memory on a device of each engine by class of tensor, in GiB."""
    names = ("weights", "gradients", "optimizer", "activations", "kv")
    rows: list[tuple[str, ...]] = [("GiB on a device", *names, "sum", "between its calls")]
    for placement in {placement.engine: placement for placement in choice.placements}.values():
        parts = (f"{getattr(placement.footprint, name) / _GIB:.1f}" for name in names)
        stays = "offloaded" if placement.is_swapped else f"{placement.footprint.kept_bytes / _GIB:.1f}"
        rows.append((str(placement.engine), *parts, f"{placement.footprint.device_bytes / _GIB:.1f}", stays))
    return in_columns(rows)


def why_lines(choice: Choice) -> list[str]:
    """Compare the best plan of each mode term by term: seconds on the critical path."""
    plans: list[tuple[str, tuple[TimeTerm, ...], float, int]] = [
        (choice.mode, choice.parts, choice.predicted_step_s, num_devices(choice.placements))
    ]
    plans += [(loser.what, loser.parts, loser.predicted_step_s, loser.num_devices) for loser in choice.losers]
    terms: dict[str, list[float]] = {}
    for column, (_, parts, _, _) in enumerate(plans):
        for part in parts:
            if part.on_critical_path:
                terms.setdefault(part.what, [0.0] * len(plans))[column] += part.seconds
    least = _LEAST_SHARE * max(choice.predicted_step_s, 1e-12)
    few = {what: each for what, each in terms.items() if max(each) < least}
    rows = [("seconds of the step", *(f"{what} on {num}" for what, _, _, num in plans))]
    rows += [(what, *map(_or_dash, each)) for what, each in terms.items() if what not in few]
    if few:
        rows.append(("terms below 0.5%", *(_or_dash(sum(column)) for column in zip(*few.values(), strict=True))))
    rows.append(("whole step", *(seconds(step_s) for _, _, step_s, _ in plans)))
    return in_columns(rows)


_LEAST_SHARE = 0.005
"""Share of the step below which terms are added up."""


def _or_dash(value: float) -> str:
    return seconds(value) if value else "-"


def num_devices(placements: tuple[Placement, ...]) -> int:
    """The devices that placements use, each counted once."""
    return len({(placement.pool, device) for placement in placements for device in placement.devices})


def count(value: float) -> str:
    """Format a number of tokens.

    >>> count(950), count(18_260_000), count(12_300)
    ('950', '18.3 M', '12.3 k')
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def as_document(choice: Choice) -> dict[str, object]:
    """Make the `m2flow plan --json` document of a placement, by call."""
    by_call = {call: placement for placement in choice.placements for call in placement.calls}
    return {
        "works": [
            {name: getattr(work, name) for name in work.__struct_fields__}
            | {"tokens_per_s_per_device": work.tokens / work.seconds / work.num_devices if work.seconds else 0.0}
            for work in choice.works
        ],
        "device_hours_a_step": num_devices(choice.placements) * choice.predicted_step_s / 3600,
        "predicted_step_s": choice.predicted_step_s,
        "interval_s": list(choice.interval_s),
        "held": [msgspec.to_builtins(part) for part in choice.held],
        "lower_bound_s": choice.lower_bound_s,
        "efficiency": choice.efficiency,
        "mode": choice.mode,
        "placement": {
            call: {
                "devices": [f"{placement.pool or 'local'}:{i}" for i in placement.devices],
                **{name: getattr(placement, name) for name in StageOrder.__struct_fields__},
                "layout": {
                    name: getattr(placement.layout, name) for name in ("tp", "pp", "sp", "dp", "ep", "zero", "offload", "recompute")
                },
                "mode": placement.mode,
            }
            for call, placement in by_call.items()
        },
        "chunks": {call: placement.chunk for call, placement in by_call.items()},
        "memory_gib": {str(placement.engine): round(placement.footprint.device_bytes / _GIB, 3) for placement in choice.placements},
        "switches": [{"what": part.what, "seconds": part.seconds} for part in choice.parts if part.what.startswith("switch")],
        "parts_s": {part.what: part.seconds for part in choice.parts},
        "bounds_s": {bound.name: bound.seconds for bound in choice.bounds},
        "is_exact": choice.is_exact,
        "not_tried": list(choice.not_tried),
        "gap_s": choice.gap_s,
        "search_s": choice.search_s,
        "constraints_cost_s": choice.constraints_cost_s,
    }


def seconds(value: float) -> str:
    """Format a duration with a suitable unit.

    >>> seconds(83.4), seconds(0.0123), seconds(7500.0), seconds(0.00099999)
    ('83.4 s', '12.3 ms', '2.08 h', '1 ms')
    """
    value = float(f"{value:.3g}")
    if value >= 5400:
        return f"{value / 3600:.3g} h"
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def where(placement: Placement) -> str:
    """Format a placement's devices: `h100[0:48]`."""
    return f"{placement.pool or 'this machine'}[{placement.first_device}:{placement.devices.stop}]"


def _placement_row(placement: Placement) -> tuple[str, ...]:
    gib = f"{placement.footprint.device_bytes / _GIB:.3g} GiB a device"
    return (
        ", ".join(placement.calls),
        where(placement),
        str(placement.layout),
        f"{placement.chunk} sample{'s' * (placement.chunk > 1)} at a time" if placement.chunk else "",
        gib,
        _lease(placement),
    )


def _lease(placement: Placement) -> str:
    if placement.lent_until:
        return f"some devices lent ({placement.lease}), until {placement.lent_until * 100:.3g}% of its samples have ended"
    comes = f", comes when {placement.onload_at:.0%} of the samples have ended" if placement.onload_at else ""
    return f"takes turns ({placement.lease}){comes}" if placement.lease else ""


def _bound(choice: Choice) -> str:
    if not choice.bounds:
        return "no bound is known"
    tightest = max(choice.bounds, key=lambda bound: bound.seconds)
    return f"no schedule takes less than {seconds(tightest.seconds)} ({tightest.name}), so it is at {choice.efficiency:.0%} of the best"


def _sources(choice: Choice) -> str:
    if not choice.constants:
        return "The cost model has no terms."
    kinds = Counter(constant.source.partition(":")[0] for constant in choice.constants.values())
    others = kinds.total() - kinds["measured"] - kinds["modelled"]
    counts = {"measured": kinds["measured"], "modelled": kinds["modelled"], "of data sheets and estimates": others}
    return "Terms: " + ", ".join(f"{number} {source}" for source, number in counts.items() if number) + "; --terms lists them."


def differences(one: Plan, other: Plan) -> list[str]:
    """List the differences between two plans; empty if they would run alike."""
    lines = [f"{name}: {a} -> {b}" for name, a, b in _heads(one, other) if a != b]
    if one.choice is not None and other.choice is not None:
        lines += _choices(one.choice, other.choice)
    lines += _changes("worker", {w.name: _worker(w) for w in one.workers}, {w.name: _worker(w) for w in other.workers})
    lines += _changes("call", {s.call: _stage(s) for s in one.stages}, {s.call: _stage(s) for s in other.stages})
    lines += _changes("route", _routes(one), _routes(other))
    return lines + _changes("weights", _syncs(one), _syncs(other))


def _heads(one: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    yield "flow", one.flow, other.flow
    yield "cluster", one.cluster, other.cluster
    yield "mode", one.mode, other.mode
    yield "structure", one.structure[:12], other.structure[:12]


def _choices(one: Choice, other: Choice) -> list[str]:
    lines = []
    if one.predicted_step_s != other.predicted_step_s:
        change = other.predicted_step_s / one.predicted_step_s - 1 if one.predicted_step_s else 0.0
        lines.append(f"predicted step: {seconds(one.predicted_step_s)} -> {seconds(other.predicted_step_s)} ({change:+.1%})")
    lines += _changes("part", *({p.what: seconds(p.seconds) for p in c.parts} for c in (one, other)))
    lines += _changes("bound", *({b.name: seconds(b.seconds) for b in c.bounds} for c in (one, other)))
    places = [{call: f"{where(s)} {s.layout}, {s.mode}, chunk {s.chunk}" for s in c.placements for call in s.calls} for c in (one, other)]
    return lines + _changes("place", *places)


def _changes(what: str, one: dict[str, str], other: dict[str, str]) -> list[str]:
    lines = [f"{what} {key}: {one[key]} -> {other[key]}" for key in one if key in other and one[key] != other[key]]
    lines += [f"{what} {key}: only in the first ({value})" for key, value in one.items() if key not in other]
    return lines + [f"{what} {key}: only in the second ({value})" for key, value in other.items() if key not in one]


def _routes(plan: Plan) -> dict[str, str]:
    return {f"{r.producer} -> {r.consumer}, {r.source} -> {r.target}": f"{r.transport}, {r.capacity} samples" for r in plan.routes}


def _syncs(plan: Plan) -> dict[str, str]:
    return {f"{s.role}, {s.source} -> {s.target}": str(s.transport) for s in plan.syncs}


def _worker(worker: WorkerPlan) -> str:
    engines = ", ".join(f"{slot.role} {slot.kind} ({slot.engine})" for slot in worker.engines)
    return f"{worker.device}, {worker.threads} threads, {engines}" + (f", lease {worker.lease}" if worker.lease else "")


def _stage(stage: Stage) -> str:
    budget = f", {stage.token_budget} tokens a micro-batch" if stage.token_budget else ""
    return f"@{stage.unit} on {', '.join(stage.workers) or 'controller'}, chunk {stage.chunk}{budget}"


# ---- why no plan fits

Allows = Callable[[EngineId, str, Layout], bool]
"""Whether the spec's pins allow an engine this pool and layout."""

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
    ways = _single_changes(least, every) or _elsewhere(engine, costs, spec, is_host=least.is_host)
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
        what, field = ("what is pinned allows", "pin") if spec.pin else ("what the spec says of engines allows", "rollout` and `train")
        reason = f"each engine fits, and so do all when they take turns with {pool or 'this machine'}; {what} no plan"
        return DoesNotFit(f"no plan of {flow} fits {spec.name}: {reason}", now=f"Change or drop `{field}` in the cluster spec.")
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
    stays = [costs.switch(engine, pool, one.footprint).kept_bytes for engine, one in zip(engines, chosen, strict=True)]
    over = [one.footprint.device_bytes + sum(stays) - own - capacity for one, own in zip(chosen, stays, strict=True)]
    if (worst := max(over)) > 0:
        at = over.index(worst)
        others = sum(stays) - stays[at]
        words = f"offloaded, the others keep {_gib(others)} on each device of {where}, beside {_gib(chosen[at].footprint.device_bytes)}"
        return worst, pool, f"{words} of {engines[at]}: {_gib(worst)} more than the {_gib(capacity)} there are"
    away = sum(one.footprint.kept_bytes + one.footprint.host for one in chosen)
    words = f"taking turns they keep {_gib(away)} for each device of {where} in the host's memory"
    return away - host, pool, f"{words}: {_gib(away - host)} more than the {_gib(host)} there are"


def _tries(engine: EngineId, costs: Costs, spec: ClusterSpec) -> Iterator[_Try]:
    """Try an engine on the divisors of a node, on doubling numbers of nodes up to all of them, and on as many devices as a pin says."""
    pin = spec.pin_of(engine.role, engine.kind)
    own = pin.devices[1] - pin.devices[0] if pin.devices else pin.num_devices
    for name, pool in spec.planned_pools.items():
        inside = [num for num in range(1, pool.devices_per_node + 1) if pool.devices_per_node % num == 0]
        whole = [pool.devices_per_node << i for i in range(1, 16) if 1 << i <= pool.nodes]
        for num in dict.fromkeys([*inside, *whole, pool.num_devices, *([own] if own and own <= pool.num_devices else [])]):
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


def _single_changes(base: _Try, every: Sequence[_Try]) -> list[str]:
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
    if any(_is_only("recompute", one.layout, base.layout) for one in same):
        said.append("its layers computed again on the way back (recompute: true)")
    more = [one for one in fits if one.pool == base.pool and one.layout.num_devices > base.layout.num_devices]
    others = [one for one in fits if one.pool != base.pool]
    for found in (more, others):
        if found:
            said.append(_as(min(found, key=lambda one: one.layout.num_devices)))
    return said or [_as(one) for one in sorted(fits, key=_rank)[:1]]


def _is_only(kind: str, one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in this degree only (apart from the number of replicas)."""
    differ = {name for name in ("tp", "pp", "sp", "ep", "zero", "offload", "recompute") if getattr(one, name) != getattr(other, name)}
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
    kind = engine.kind
    for name in spreading(kind) if spec.pools and own not in spreading(kind) else ():
        part = (spec.rollout if kind == "rollout" else spec.train).model_copy(update={"engine": name})
        yield "engine", f"`{kind}: {{engine: {name}}}`, which spreads a model over devices", spec.model_copy(update={kind: part})
    if engine.kind == "train":
        yield from _smaller_budgets(spec)
    if is_host:
        yield from _more_host_memory(spec)
    else:
        yield from _larger_devices(spec)
    yield from _more_nodes(spec)


def _smaller_budgets(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    budget = spec.train.token_budget
    while budget > 1024:
        budget //= 2
        smaller = spec.train.model_copy(update={"token_budget": budget})
        yield "budget", f"`train: {{token_budget: {budget}}}`: smaller micro-batches", spec.model_copy(update={"train": smaller})


def _larger_devices(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    devices = device_list(spec.devices)
    for device in sorted((devices.find(name) for name in devices.names), key=lambda device: device.memory_gib) if spec.pools else ():
        if not device.shares_host_memory and all(device.memory_gib > _memory_gib(pool, spec) for pool in spec.pools.values()):
            larger = {
                name: PoolSpec(device=device.name, nodes=p.nodes, devices_per_node=p.devices_per_node) for name, p in spec.pools.items()
            }
            yield "device", f"{device.name} devices, of {device.memory_gib:g} GiB each", spec.model_copy(update={"pools": larger})


def _specs_together(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    yield from _smaller_budgets(spec)
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
    yield from _larger_devices(spec)
    yield from _more_nodes(spec)


def _more_host_memory(spec: ClusterSpec) -> Iterator[tuple[str, str, ClusterSpec]]:
    devices = device_list(spec.devices)
    for times in (1.25, 1.5, 2, 3, 4):
        sizes = {name: times * host_memory_gib(pool, devices.find(pool.device)) for name, pool in spec.pools.items()}
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
