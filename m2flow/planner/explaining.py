"""Explain a plan in words: placement, times, why it is not faster, and differences between two plans.

Choice --explain--> text,  --as_document--> the output of `m2flow plan --json`
Plan, Plan --differences--> lines
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from m2flow.micro.protocol.plan import Choice, Part, Plan, Seat, Stage, WorkerPlan, in_columns

_GIB = 2**30


def explain(choice: Choice, *, has_terms: bool = False, details: str | None = None) -> str:
    """Describe a plan in a screen of text.

    Args:
        has_terms: also each constant of the cost model with its source.
        details: `why`: also the comparison with other modes, term by term; `full`: and the memory of each engine by class of tensor, and
            the KV caches.
    """
    lines = [f"placement of {choice.flow} on {choice.cluster}: {choice.mode}"]
    lines += in_columns([_seat_row(seat) for seat in choice.seats])
    lines += ["", *step_lines(choice), *work_lines(choice)]
    lines += ["", *cache_lines(choice), *memory_lines(choice)] if details == "full" else []
    lines += ["", *why_lines(choice), ""] if details and choice.losers else []
    whole = choice.predicted_step_s or 1.0
    for loser in choice.losers:
        more = (loser.predicted_step_s / whole - 1) if choice.predicted_step_s else 0.0
        on = f" on {loser.num_devices} devices" if loser.num_devices != num_devices(choice.seats) else ""
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
    num = num_devices(choice.seats)
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
    for seat in {seat.engine: seat for seat in choice.seats}.values():
        parts = (f"{getattr(seat.footprint, name) / _GIB:.1f}" for name in names)
        stays = "offloaded" if seat.is_swapped else f"{seat.footprint.kept_bytes / _GIB:.1f}"
        rows.append((str(seat.engine), *parts, f"{seat.footprint.device_bytes / _GIB:.1f}", stays))
    return in_columns(rows)


def why_lines(choice: Choice) -> list[str]:
    """Compare the best plan of each mode term by term: seconds on the critical path."""
    plans: list[tuple[str, tuple[Part, ...], float, int]] = [
        (choice.mode, choice.parts, choice.predicted_step_s, num_devices(choice.seats))
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


def num_devices(seats: tuple[Seat, ...]) -> int:
    """The devices that seats use, each counted once."""
    return len({(seat.pool, device) for seat in seats for device in seat.devices})


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
    by_call = {call: seat for seat in choice.seats for call in seat.calls}
    return {
        "works": [
            {name: getattr(work, name) for name in work.__struct_fields__}
            | {"tokens_per_s_per_device": work.tokens / work.seconds / work.num_devices if work.seconds else 0.0}
            for work in choice.works
        ],
        "device_hours_a_step": num_devices(choice.seats) * choice.predicted_step_s / 3600,
        "predicted_step_s": choice.predicted_step_s,
        "interval_s": list(choice.interval_s),
        "lower_bound_s": choice.lower_bound_s,
        "efficiency": choice.efficiency,
        "mode": choice.mode,
        "placement": {
            call: {
                "devices": [f"{seat.pool or 'local'}:{i}" for i in seat.devices],
                "layout": {name: getattr(seat.layout, name) for name in ("tp", "pp", "sp", "dp", "ep", "zero", "offload")},
                "mode": seat.mode,
            }
            for call, seat in by_call.items()
        },
        "chunks": {call: seat.chunk for call, seat in by_call.items()},
        "memory_gib": {str(seat.engine): round(seat.footprint.device_bytes / _GIB, 3) for seat in choice.seats},
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


def where(seat: Seat) -> str:
    """Format a seat's devices: `h100[0:48]`."""
    return f"{seat.pool or 'this machine'}[{seat.first_device}:{seat.devices.stop}]"


def _seat_row(seat: Seat) -> tuple[str, ...]:
    gib = f"{seat.footprint.device_bytes / _GIB:.3g} GiB a device"
    return (
        ", ".join(seat.calls),
        where(seat),
        str(seat.layout),
        f"{seat.chunk} sample{'s' * (seat.chunk > 1)} at a time" if seat.chunk else "",
        gib,
        _lease(seat),
    )


def _lease(seat: Seat) -> str:
    if seat.lent_until:
        return f"some devices lent ({seat.lease}), until {seat.lent_until * 100:.3g}% of its samples have ended"
    comes = f", comes when {seat.onload_at:.0%} of the samples have ended" if seat.onload_at else ""
    return f"takes turns ({seat.lease}){comes}" if seat.lease else ""


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
    places = [{call: f"{where(s)} {s.layout}, {s.mode}, chunk {s.chunk}" for s in c.seats for call in s.calls} for c in (one, other)]
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
