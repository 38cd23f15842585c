"""Break a plan down: the summands of its predicted time, lower bounds on any plan, the work of each call, and what limits it.

    Node --parts_of--> summands of the predicted time     --interval_of--> its interval
                                                          --works_of--> tokens, seconds, exposed seconds, MFU of each call
    Problem --bounds_of--> no plan is faster              --advice_of, why_lost--> what limits the step, why another plan is slower

By the formulas of `workload`, each time of a part is a sum of times of its own parts (`_way`). All numbers in words are those of the plans
and of the bounds; the text only names the largest.

`with_early_onload`: the share p of ended samples at which a trainer may be onloaded beside a co-located rollout,

    at share p: weights + activations + cache of the remaining samples + what the trainer keeps <= 0.95 memory

counting each remaining sample as long as the longest, and each instance with its part of them, rounded up. So the onload costs no time of
the step if the rest of the rollout takes that long; the search itself does not count on it. Limits: for a lease of one rollout engine
with several instances and one trainer, with no lent devices, and engines that can shrink their KV cache meanwhile. A single instance on
the trainer's own devices shares its process, which does one thing at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from m2flow.micro.lowering.capabilities import can_shrink_kv_cache
from m2flow.micro.lowering.placement import share_a_process
from m2flow.micro.protocol.cost_terms import HeldPart
from m2flow.micro.protocol.plan import Bound, CallWork, Placement, TimeTerm
from m2flow.planner.dynamic_program import LENT, Limits
from m2flow.planner.plan_tree import Leaf, Node, Pair, leaf_names, leaves_of
from m2flow.planner.problem import (
    Problem,
    call_times,
    instances,
)
from m2flow.planner.workload import (
    DRAINS,
    FREE,
    CallLoad,
    Times,
    end_of,
    more_last,
    start_of,
    through_functions,
    zero_times,
)

# ---- summands of the predicted time


def step_s(problem: Problem, node: Node) -> float:
    """The predicted time of a step."""
    return float(sum(part.seconds for part in parts_of(problem, node) if part.on_critical_path))


def parts_of(problem: Problem, node: Node) -> tuple[TimeTerm, ...]:
    """List the summands of the predicted time, then the parts off the critical path."""
    steps, path = problem.steps_under_way, _merged(_whole(problem, node))
    total = sum(part.seconds for part in path) / steps
    if problem.workload.staleness:
        path = [TimeTerm(f"{part.what} / {steps} steps under way", part.seconds / steps) for part in path]
        held = _merged(_busy(problem, node))
        ends = [
            TimeTerm(name, function.total)
            for name, function in problem.functions.items()
            if name in (*problem.graph.leading_functions, *problem.graph.trailing_functions)
        ]
        held = max([held, *([part] for part in ends)], key=lambda parts: sum(part.seconds for part in parts))
        path = held if sum(part.seconds for part in held) > total else path
    named = {part.what.split(" / ")[0] for part in path}
    beside = [TimeTerm(_called(leaf), float(leaf.times.total), False) for leaf in leaves_of(node) if _called(leaf) not in named]
    return tuple(part for part in (*path, *beside) if part.seconds > 0)


_ROUNDED = 1e-9
"""Share of a sum that may be the rounding of its summands, and no part of its own."""


def _whole(problem: Problem, node: Node) -> Iterator[TimeTerm]:
    """Summands of the whole step, with leading and trailing functions."""
    graph = problem.graph
    fed = through_functions(zero_times(), graph.leading_functions, problem.calls, problem.functions)
    grain = float(node.times.grain)
    early, late = fed.first + node.times.total, fed.total + end_of(node.times, node.times.grain)
    terms = [("total", 1.0)] if early >= late else _ended(node.times, grain)
    path, total = [part for what, share in terms for part in _path(problem, node, what, share)], float(max(early, late))
    step = Times(node.times.first, np.asarray(total), *node.times.all[2:])
    end = float(through_functions(step, graph.trailing_functions, problem.calls, problem.functions).total)
    before = total - sum(part.seconds for part in path)
    yield from [TimeTerm(", ".join(graph.leading_functions), before)] if before > _ROUNDED * total else []
    yield from path
    yield from [TimeTerm(", ".join(graph.trailing_functions), end - total)] if end - total > _ROUNDED * end else []


def _path(problem: Problem, node: Node, which: str, weight: float = 1.0) -> Iterator[TimeTerm]:
    """Summands of the first, total or last time of a part, each times `weight`."""
    if isinstance(node, Leaf):
        yield from (TimeTerm(part.what, part.seconds * weight) for part in _leaf_path(node, which))
        return
    a, b = node.first, node.second
    value, of_a, of_b = _way(problem, node, which)
    for what, share in of_a:
        yield from _path(problem, a, what, weight * share)
    between = value - sum(share * float(getattr(part.times, what)) for part, of in ((a, of_a), (b, of_b)) for what, share in of)
    if between > _ROUNDED * value:
        yield TimeTerm(_between(node), between * weight)
    for what, share in of_b:
        yield from _path(problem, b, what, weight * share)
    if which != "first":
        yield from (TimeTerm(part.what, part.seconds * weight) for part in _sync_parts(problem, node))


def _merged(parts: Iterable[TimeTerm]) -> list[TimeTerm]:
    """The same summands, each once."""
    seconds: dict[str, float] = {}
    for part in parts:
        seconds[part.what] = seconds.get(part.what, 0.0) + part.seconds
    return [TimeTerm(what, each) for what, each in seconds.items()]


def _sync_parts(problem: Problem, node: Pair) -> Iterator[TimeTerm]:
    for sync, seconds in node.syncs:
        rest_s = problem.rest_s(sync)
        yield from [TimeTerm(f"weight sync of {sync.role}", seconds - rest_s)] if seconds > rest_s else []
        yield from [TimeTerm(REST, rest_s)] if rest_s else []


REST = "between the calls"


def _between(node: Pair) -> str:
    """Name the time that belongs to neither part."""
    if node.how == LENT:
        return f"end of {', '.join(leaf_names(node.second))}, after devices were lent"
    return ", ".join(node.cut.functions) or "both at work on one host"


Terms = list[tuple[str, float]]
"""Times of a part, and how many times each counts."""
_Way = tuple[float, Terms, Terms]


def _way(problem: Problem, node: Pair, which: str) -> _Way:
    """What `which` is the sum of, without syncs: (seconds, times of the first part, times of the second)."""
    if node.how == LENT:
        return float(node.times.total) - sum(seconds for _, seconds in node.syncs), [("total", 1.0)], []
    if node.cut.waits and node.cut.is_linked:
        of_a, of_b = {"first": ("total", "first"), "total": ("total", "total"), "last": ("last", "total")}[which]
        return float(getattr(node.fed, of_a) + getattr(node.second.times, of_b)), [(_cause(problem, node, of_a), 1.0)], [(of_b, 1.0)]
    if not node.cut.is_linked:
        return _unlinked(problem, node, which)
    return _taking_turns(problem, node, which) if node.is_turns else _streaming(problem, node, which)


def _unlinked(problem: Problem, node: Pair, which: str) -> _Way:
    a, b = node.first.times, node.second.times
    if node.is_turns:
        alternates = max(float(a.rigid), float(b.rigid)) == FREE
        of_a, of_b = {
            "first": ("total", "first"),
            "total": ("total", "total"),
            "last": ("last", "last" if alternates else "total"),
        }[which]
        return float(getattr(a, of_a) + getattr(b, of_b)), [(of_a, 1.0)], [(of_b, 1.0)]
    more_a, more_b = ((s - 1) * float(min(a.total, b.total)) * (which == "total") for s in problem.slowdowns(node.cut))
    alone: list[_Way] = [(float(getattr(a, which)) + more_a, [(which, 1.0)], []), (float(getattr(b, which)) + more_b, [], [(which, 1.0)])]
    return max(alone, key=lambda way: way[0])


def _streaming(problem: Problem, node: Pair, which: str) -> _Way:
    """Find the critical path through linked parts that are split."""
    a, b, fed = node.first.times, node.second.times, node.fed
    grain = float(max(fed.grain, b.grain))
    start, end = float(start_of(fed, np.asarray(grain))), float(end_of(b, np.asarray(grain)))
    begun, ended = _started(problem, node, grain), _ended(b, grain)
    if which == "last":
        share = float(more_last(np.asarray(grain)))
        less = [("total", share)]
        value = float(fed.last + b.last) + share * float(min(a.total, b.total))
        is_a = bool(a.total <= b.total)
        return value, [("last", 1.0), *(less if is_a else [])], [("last", 1.0), *([] if is_a else less)]
    slow_a, slow_b = ((factor - 1) * float(min(a.total, b.total)) for factor in problem.slowdowns(node.cut))
    whole: list[_Way] = [
        (start + float(b.total) + slow_b, begun, [("total", 1.0)]),
        (float(fed.total) + end + slow_a, [(_cause(problem, node, "total"), 1.0)], ended),
    ]
    total = max(whole, key=lambda way: way[0])
    if which == "total":
        return total
    if float(b.rigid) == DRAINS:
        drained = float(fed.total + b.first)
        return (drained, [(_cause(problem, node, "total"), 1.0)], [("first", 1.0)]) if drained <= total[0] else total
    if start <= float(fed.first) + end:
        return start + float(b.first), begun, [("first", 1.0)]
    return float(fed.first) + end + float(b.first), [(_cause(problem, node, "first"), 1.0)], [*ended, ("first", 1.0)]


def _taking_turns(problem: Problem, node: Pair, which: str) -> _Way:
    """Find the critical path through linked parts on the same devices, chunk by chunk or one after the other."""
    a, b, fed = node.first.times, node.second.times, node.fed
    grain = float(max(fed.grain, b.grain))
    start, end = float(start_of(fed, np.asarray(grain))), float(end_of(b, np.asarray(grain)))
    alternates = max(float(a.rigid), float(b.rigid)) == FREE
    if which == "last":
        late = _ended(b, float(b.grain))
        every: list[_Way] = [
            (float(a.last + b.total), [("last", 1.0)], [("total", 1.0)]),
            (float(fed.last) + sum(share * float(getattr(b, what)) for what, share in late), [("last", 1.0)], late),
        ]
        drained = max(every, key=lambda way: way[0])
        free: _Way = float(fed.last + b.last), [("last", 1.0)], [("last", 1.0)]
        return min(free, drained, key=lambda way: way[0]) if alternates else drained
    begins: list[tuple[float, Terms]] = [(float(a.total), [("total", 1.0)]), (start, _started(problem, node, grain))]
    begun_s, begun = max(begins, key=lambda way: way[0])
    ways: list[_Way] = [(begun_s + float(getattr(b, which)), begun, [(which, 1.0)])]
    if which == "total":
        ways.append((float(fed.total) + end, [(_cause(problem, node, "total"), 1.0)], _ended(b, grain)))
    return max(ways, key=lambda way: way[0])


def _started(problem: Problem, node: Pair, grain: float) -> Terms:
    """What the time is the sum of when a share of the second part's input is there."""
    return [(_cause(problem, node, "first"), 1.0 - grain), (_cause(problem, node, "total"), grain)]


def _ended(b: Times, grain: float) -> Terms:
    """What the time of a part after its last input is the sum of."""
    return [("last", 1.0), ("total", grain)] if float(b.last + grain * b.total) < float(b.total) else [("total", 1.0)]


def _cause(problem: Problem, node: Pair, which: str) -> str:
    """The time of the first part that determines a time of its output; a slow function may be critical from the first sample on."""
    if which == "last":
        return "last"
    a = node.first.times
    late = Times(np.asarray(-np.inf), *a.all[1:])
    blind = through_functions(late, node.cut.functions, problem.calls, problem.functions)
    return "total" if float(getattr(blind, which)) >= float(getattr(node.fed, which)) * (1 - 1e-12) else "first"


def _leaf_path(leaf: Leaf, which: str) -> Iterator[TimeTerm]:
    seconds, option = float(getattr(leaf.times, which)), leaf.option
    if not float(leaf.times.total):  # It works in other steps alone, and is not switched to in this one.
        return
    come = option.come_s if which != "last" else 0.0
    leave = option.leave_s if which != "first" else 0.0
    what = f"switch to {leaf.engine}" if option.is_swapped else f"cache and graphs of {leaf.engine} rebuilt"
    yield from [TimeTerm(what, come)] if come else []
    yield TimeTerm(_called(leaf), seconds - come - leave)
    yield from [TimeTerm(f"switch from {leaf.engine}", leave)] if leave else []


def _called(leaf: Leaf) -> str:
    return ", ".join(leaf.names)


def _busy(problem: Problem, node: Node) -> Iterator[TimeTerm]:
    """Summands of the busy time of the busiest devices in each step."""
    if isinstance(node, Leaf) and float(node.times.busy) < float(node.times.total):
        yield TimeTerm(f"{_called(node)} / {problem.num_batches} steps at once", float(node.times.busy))
    elif isinstance(node, Leaf):
        yield from _leaf_path(node, "total")
    elif node.is_turns:
        yield from _path(problem, node, "total")
    else:
        a, b, fed = (float(times.busy) for times in (node.first.times, node.second.times, node.fed))
        both = 0.0 if node.cut.waits else min(float(node.first.times.total), float(node.second.times.total))
        more_a, more_b = ((factor - 1) * both for factor in problem.slowdowns(node.cut))
        more = more_a if fed + more_a >= b + more_b else more_b
        if b + more_b > fed + more_a:
            yield from _busy(problem, node.second)
        elif a >= fed:
            yield from _busy(problem, node.first)
        else:
            yield TimeTerm(", ".join(node.cut.functions), fed)
        yield from [TimeTerm("both at work on one host", more)] if more > 0 else []
        yield from _sync_parts(problem, node)


# ---- bounds and explanations

_MOSTLY = 0.75
"""The share from which on something counts as the limiting factor."""


def bounds_of(problem: Problem) -> tuple[Bound, ...]:
    """Lower bounds on the step time of all plans of the options tried.

        longest sample   (t0 + t1) L, and what must come after it        work            device-seconds / devices
        k-longest        the k longest samples, with migration           critical path   the longest chain of calls, each at its best

    With staleness a sample may take as many steps as are in flight: all but `work` are divided by their number.
    """
    limits = Limits(problem)
    steps = problem.steps_under_way
    longest = k_longest = 0.0
    for i, call in enumerate(problem.graph.device_calls):
        if call.work == "generate" and call.engine is not None:
            batch = problem.batches[call.name]
            ways = instances(call.engine, problem.options.of[call.engine], problem.costs)
            around = limits.around_s(1 << i)
            longest = max(longest, around + float(batch.longest_s(ways).min()))
            k_longest = max(k_longest, around + float(batch.k_longest_s(ways).min()))
    found = [("longest sample", longest / steps), ("k-longest", k_longest / steps)] if longest else []
    found += [("work", limits.work_s()), ("critical path", limits.path_s() / steps)]
    return tuple(Bound(name, float(seconds)) for name, seconds in found)


def works_of(problem: Problem, node: Node, parts: Sequence[TimeTerm]) -> Iterator[CallWork]:
    """The work of each call, and how much of it is on the critical path; calls of one part share that in proportion."""
    exposed: dict[str, float] = {}
    for part in parts:
        if part.on_critical_path:
            name = part.what.split(" / ")[0]
            exposed[name] = exposed.get(name, 0.0) + part.seconds
    for leaf in leaves_of(node):
        calls = [problem.calls[name] for name in leaf.names if problem.calls[name].num_samples]
        each = [_whole_s(problem, leaf, call) for call in calls]
        shown_s = exposed.get(", ".join(leaf.names), 0.0)
        for call, seconds in zip(calls, each, strict=True):
            yield _work_of(problem, leaf, call, seconds, shown_s * seconds / max(sum(each), 1e-12))


def _whole_s(problem: Problem, leaf: Leaf, call: CallLoad) -> float:
    chunks = tuple(dict.fromkeys([leaf.chunk, call.num_samples]))
    found = call_times(call, leaf.engine, [leaf.option], chunks, problem.costs, problem.batches[call.name])[0, 0, 1]
    return float(found) * problem.held_share(problem.graph.bits[call.name])


def _work_of(problem: Problem, leaf: Leaf, call: CallLoad, seconds: float, exposed_s: float) -> CallWork:
    batch, option = problem.batches[call.name], leaf.option
    generated = float(np.mean([draw.responses.sum() for draw in batch.draws]))
    tokens = generated if call.work == "generate" else call.num_samples * batch.mean_tokens * max(call.num_epochs, 1)
    found = CallWork(call.name, tokens, seconds, min(exposed_s, seconds), option.num_devices)
    known = problem.costs.arithmetic(leaf.engine, option.pool, option.layout)
    if known is None or not seconds:
        return found
    passes = 3 * call.num_epochs if call.work == "update" else 1
    flops = passes * call.num_samples * (batch.mean_tokens * known.token_flops + batch.mean_square * known.attention_flops)
    found = msgspec.structs.replace(found, mfu=flops / (seconds * option.num_devices * known.peak_flops))
    if call.work != "generate":
        return found
    ways = instances(leaf.engine, [option], problem.costs)
    num, slots = float(ways.num[0]), float(ways.slots[0])
    steps = max(float(np.mean([draw.responses.max(initial=0) for draw in batch.draws])), generated / max(slots, 1.0))
    lengths = np.concatenate([(draw.responses.astype(np.float64) + 2 * draw.prompts[:, None]).ravel() for draw in batch.draws])
    responses = np.concatenate([draw.responses.ravel() for draw in batch.draws]).astype(np.float64)
    cached = float((responses * lengths).sum()) / 2 / len(batch.draws)  # Each token reads the cache of all before it.
    read = steps * num * known.weights_bytes + cached * known.token_bytes
    mean = batch.mean_tokens
    return msgspec.structs.replace(
        found,
        bandwidth=min(1.0, read / (seconds * option.num_devices * known.bytes_s)),
        kv_tokens=slots * mean,
        kv_samples=int(slots),
        most_at_once=call.num_samples,
    )


def interval_of(problem: Problem, parts: Sequence[TimeTerm]) -> tuple[float, float]:
    """The interval of the step time: what each kind of work on the critical path may take, kinds being independent of each other."""
    seconds: dict[str, float] = {}
    for part in parts:
        if part.on_critical_path:
            seconds[_kind_of(problem, part)] = seconds.get(_kind_of(problem, part), 0.0) + part.seconds
    below = above = 0.0
    for kind, each in seconds.items():
        low, high = problem.costs.spread(kind)
        below, above = below + (each * (1 - low)) ** 2, above + (each * (high - 1)) ** 2
    whole = sum(seconds.values())
    return whole - math.sqrt(below), whole + math.sqrt(above)


def _kind_of(problem: Problem, part: TimeTerm) -> str:
    """The kind of work of a part, as `Costs.spread` takes it."""
    name = part.what.split(" / ")[0].split(", ")[0]
    if name in problem.calls:
        return problem.calls[name].work
    if name == REST:
        return "rest"
    return next((kind for kind, word in (("sync", "sync"), ("switch", "switch"), ("switch", "rebuilt")) if word in name), "")


def advice_of(problem: Problem, node: Node, parts: Sequence[TimeTerm], bounds: Sequence[Bound]) -> str:
    """Describe what limits the step and what would help."""
    step_s = sum(part.seconds for part in parts if part.on_critical_path)
    by_name = {bound.name: bound.seconds for bound in bounds}
    best = max(by_name.values(), default=0.0)
    longest, work = by_name.get("longest sample", 0.0), by_name.get("work", 0.0)
    generates = {call.name for call in problem.graph.device_calls if call.work == "generate"}
    generating = sum(part.seconds for part in parts if part.on_critical_path and generates & set(part.what.split(" / ")[0].split(", ")))
    if generating >= step_s / 2 and longest >= _MOSTLY * best and longest >= _MOSTLY * step_s:
        return (
            f"the longest sample is {longest / best:.0%} of the bound and {longest / step_s:.0%} of the step: more rollout devices are "
            f"waste; lower the cap, raise staleness, or raise TP{_tp_of(problem, node)}"
        )
    if work >= _MOSTLY * step_s:
        return f"the work itself is {work / step_s:.0%} of the step: the devices are busy, and only more or faster ones help"
    path = [part for part in parts if part.on_critical_path]
    largest = max(path, key=lambda part: part.seconds)
    text = f"{largest.what} takes {largest.seconds / step_s:.0%} of the step"
    moves = sum(part.seconds for part in path if part.what.startswith(("switch", "cache and graphs", "weight sync")))
    if moves > 0.1 * step_s:
        return (
            f"{text}; switches and weight syncs take {moves / step_s:.0%}: memory to keep engines resident, or staleness, would save them"
        )
    if generating >= step_s / 2 and longest >= step_s / 2:
        return f"{text}, and the longest sample alone is {longest / step_s:.0%}: lower the cap, raise staleness, or raise TP"
    if work and step_s > 2 * work:
        return f"{text}; all work together would take {work / step_s:.0%} of it if it were spread evenly: raise staleness, or batch more"
    return f"{text}; the bound is {best / step_s:.0%} of it"


def _tp_of(problem: Problem, node: Node) -> str:
    rollouts = [leaf.option.layout.tp for leaf in leaves_of(node) if leaf.engine.kind == "rollout"]
    return f" (now {max(rollouts)})" if rollouts else ""


_WORTH_SAYING = 2e-3
"""Share of the step below which a difference is not said."""


def why_lost(best: Problem, winner: Node, problem: Problem, loser: Node) -> str:
    """Describe the parts that differ most between two plans."""
    ours, theirs = _seconds(parts_of(best, winner)), _seconds(parts_of(problem, loser))
    more = {what: theirs.get(what, 0.0) - ours.get(what, 0.0) for what in {**ours, **theirs}}
    least = _WORTH_SAYING * sum(ours.values())
    more = {what: seconds for what, seconds in more.items() if abs(seconds) > least}
    slower = sorted((what for what in more if more[what] > 0), key=lambda what: -more[what])[:2]
    faster = sorted((what for what in more if more[what] < 0), key=lambda what: more[what])[:1]
    said = [f"{what} {_change(ours.get(what, 0.0), theirs.get(what, 0.0))}" for what in slower]
    saved = [f"though {what} {_change(ours.get(what, 0.0), theirs.get(what, 0.0))}" for what in faster]
    return ", ".join(said + saved) or "no part differs"


def _change(ours: float, theirs: float) -> str:
    if not ours:
        return f"takes {theirs:.3g} s more of the critical path"
    return f"takes {theirs:.3g} s instead of {ours:.3g} s" if theirs else f"({ours:.3g} s) is off the critical path"


def _seconds(parts: Iterable[TimeTerm]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        if part.on_critical_path:
            found[part.what] = found.get(part.what, 0.0) + part.seconds
    return found


# ---- trainers

_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Candidate shares of ended samples for an early onload."""
_FULL = 0.95
"""The share of a device's memory that may be in use during an early onload."""


def with_early_onload(problem: Problem, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Set on trainers' placements the share of ended samples at which they are onloaded."""
    if not can_shrink_kv_cache(problem.spec.rollout.engine):
        return placements
    found = []
    for placement in placements:
        others = [other for other in placements if other.lease == placement.lease and other is not placement]
        if (
            placement.lease
            and placement.engine.kind == "train"
            and placement.is_swapped
            and [other.engine.kind for other in others] == ["rollout"]
        ):
            (rollout,) = others
            has_one_process = rollout.layout.dp == 1 and rollout.devices == placement.devices
            if not rollout.lent_until and not has_one_process and not share_a_process(rollout, placement, problem.spec):
                placement = msgspec.structs.replace(placement, onload_at=_share(problem, rollout, placement))
        found.append(placement)
    return tuple(found)


def _share(problem: Problem, rollout: Placement, trainer: Placement) -> float:
    """The least share of ended samples at which the trainer fits; 0 if it does not before the end."""
    generations = [call for call in problem.workload.calls if call.work == "generate" and call.engine == rollout.engine]
    room = _FULL * problem.costs.device_bytes(rollout.pool) - trainer.footprint.kept_bytes
    room -= rollout.footprint.kept_bytes + rollout.footprint.activations
    cost = problem.costs.decode(rollout.engine, rollout.pool, rollout.layout)
    shares = []
    for call in generations:
        draws = problem.batches[call.name].draws
        longest = max(float(draw.responses.max(initial=1)) + float(draw.prompts.max(initial=0)) for draw in draws)
        mean = max(sum(float(draw.responses.mean() + draw.prompts.mean()) for draw in draws) / len(draws), 1.0)
        sample_bytes = rollout.footprint.kv / max(cost.max_running, 1) * longest / mean
        num = max(draw.responses.size for draw in draws)
        fits = [p for p in _SHARES if math.ceil(num * (1 - p) / rollout.layout.dp) * sample_bytes <= room]
        shares.append(fits[0] if fits else 0.0)
    return 0.0 if not shares or 0.0 in shares else max(shares)


def settled(problem: Problem, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Set on placements when trainers are onloaded, and how micro-batches pass through stages."""
    placements = with_early_onload(problem, placements)
    orders = (problem.costs.stage_order(one.engine, one.pool, one.layout) for one in placements)
    return tuple(msgspec.structs.replace(one, **msgspec.structs.asdict(order)) for one, order in zip(placements, orders, strict=True))


def held_by(problem: Problem, placements: Sequence[Placement]) -> tuple[HeldPart, ...]:
    """What the ranks of each trainer hold."""
    places = {placement.engine: (placement.pool, placement.layout) for placement in placements}
    return tuple(part for engine, place in places.items() for part in problem.costs.held_parts(engine, *place))
