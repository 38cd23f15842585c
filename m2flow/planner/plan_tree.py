"""Read a plan back from the search's tables as a tree: the time of each part, which parts are critical, and the devices of each engine.

    Tables, row --tree_of--> Node --parts_of--> summands of the predicted time
                             Node --places_of--> first device of each engine --seats_of--> Seats with their leases

Every node is priced again by the formulas of `problem`, one plan instead of thousands; a sum that differs from the search's is an error.

Parts of a split are placed next to each other, in either order; parts that take turns are placed on the same devices. An engine has one
place in all of its calls, and a pinned one that of its pin: orders are tried until all of this holds.

Derived from a plan:

- `with_early_onload`: the share p of ended samples at which a trainer may be onloaded beside a co-located rollout,

      at share p: weights + activations + cache of the remaining samples + what the trainer keeps <= 0.95 memory

  counting each remaining sample as long as the longest, and each instance with its part of them, rounded up. So the onload costs no time of
  the step if the rest of the rollout takes that long; the search itself does not count on it. Limits: for a lease of one rollout engine
  with several instances and one trainer, with no lent devices, and engines that can shrink their KV cache meanwhile. A single instance on
  the trainer's own devices shares its process, which does one thing at a time.
- `Climb`: better plans of the same structure.
- `bounds_of`, `advice_of`, `why_lost`: lower bounds, what limits the step, and why other plans are slower. All numbers are those of the
  plans and of the bounds; the text only names the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from m2flow.micro.lowering.capabilities import can_shrink_kv_cache
from m2flow.micro.lowering.placement import share_a_process
from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.micro.protocol.plan import Bound, CallWork, Mode, Part, Seat
from m2flow.planner.dynamic_program import LENT, NUM_HOWS, SPLIT, TURNS, Limits, Pricer, Tables, lent_times
from m2flow.planner.problem import (
    Cut,
    FloatArray,
    Option,
    Options,
    Problem,
    Sync,
    call_times,
    chunks_of,
    instances,
    options_near,
    outside_call,
    pin_of,
    rigid_of,
)
from m2flow.planner.workload import (
    DRAINS,
    FREE,
    CallLoad,
    Times,
    end_of,
    in_turns,
    num_minibatches,
    side_by_side,
    start_of,
    through_functions,
    zero_times,
)
from m2flow.spec import PinSpec


@dataclass(frozen=True, eq=False)
class Leaf:
    """An engine's calls, with the chosen option and chunk size."""

    engine: EngineId
    names: tuple[str, ...]
    option: Option
    chunk: int
    times: Times

    @property
    def need(self) -> dict[str, int]:
        return {self.option.pool: self.option.num_devices}


@dataclass(frozen=True, eq=False)
class Pair:
    """Two parts that are split, take turns, or lend devices."""

    how: int
    first: Node
    second: Node
    cut: Cut
    fed: Times
    """Times of the second part's input."""
    syncs: tuple[tuple[Sync, float], ...]
    """Weight syncs whose calls come together here, with their seconds."""
    times: Times
    lent_until: float = 0.0
    """If the second part's devices are lent to the first: the share of ended samples at which they are given back."""

    @property
    def is_turns(self) -> bool:
        return self.how == TURNS

    @property
    def need(self) -> dict[str, int]:
        a, b = self.first.need, self.second.need
        of = {pool: (a.get(pool, 0), b.get(pool, 0)) for pool in {**a, **b}}
        return {pool: sum(pair) if self.how == SPLIT else max(pair) for pool, pair in of.items()}


Node = Leaf | Pair


def tree_of(tables: Tables, row: int) -> Node:
    """Build the tree of a row of the whole problem."""
    return _node(tables, tables.problem.graph.everything, row)


def ways_of(tables: Tables, row: int) -> dict[int, tuple[Cut, int]]:
    """The structure of a row of the whole problem: set of calls -> (cut, way to combine)."""
    return _ways_inside(tables, tables.problem.graph.everything, row)


def _ways_inside(tables: Tables, calls: int, row: int) -> dict[int, tuple[Cut, int]]:
    kind, left, right = (int(number) for number in tables.fronts[calls].origin[:, row])
    if kind < 0:
        return {}
    cut = tables.cuts[calls][kind // NUM_HOWS]
    return {**_ways_inside(tables, cut.first, left), **_ways_inside(tables, cut.second, right), calls: (cut, kind % NUM_HOWS)}


def ways_in(node: Node) -> dict[int, tuple[Cut, int]]:
    """The structure of a plan: set of calls -> (cut, way to combine)."""
    if isinstance(node, Leaf):
        return {}
    return {**ways_in(node.first), **ways_in(node.second), node.cut.first | node.cut.second: (node.cut, node.how)}


def leaves_of(node: Node) -> list[Leaf]:
    return [node] if isinstance(node, Leaf) else leaves_of(node.first) + leaves_of(node.second)


def lent_of(node: Node) -> dict[EngineId, float]:
    """Rollout engine that borrows devices -> the share of its ended samples at which it gives them back."""
    if isinstance(node, Leaf):
        return {}
    here = {leaf.engine: node.lent_until for leaf in leaves_of(node.first)} if node.how == LENT else {}
    return {**lent_of(node.first), **lent_of(node.second), **here}


def _node(tables: Tables, calls: int, row: int) -> Node:
    problem = tables.problem
    kind, left, right = (int(number) for number in tables.fronts[calls].origin[:, row])
    if kind < 0:
        members = problem.graph.members(calls)
        engine = members[0].engine
        assert engine is not None
        option, chunk = problem.options.of[engine][left], tables.chunks[calls][right]
        leaf = problem.leaf(calls)
        first, total, last = leaf.times[left, right]
        times = Times(first, total, last, total, leaf.grains[right], np.asarray(rigid_of(members, option)))
        return Leaf(engine, tuple(call.name for call in members), option, chunk, times)
    cut, how = tables.cuts[calls][kind // NUM_HOWS], kind % NUM_HOWS
    return pair_of(problem, cut, _node(tables, cut.first, left), _node(tables, cut.second, right), how)


def pair_of(problem: Problem, cut: Cut, first: Node, second: Node, how: int) -> Pair:
    """Combine two parts."""
    fed = through_functions(first.times, cut.functions, problem.calls, problem.functions)
    parts = first.times, fed, second.times
    lent_until = 0.0
    if how == LENT:
        assert isinstance(first, Leaf)
        assert isinstance(second, Leaf)
        alone = (Times(*(np.atleast_1d(time) for time in part.all)) for part in parts)
        (end,), (lent_until,) = lent_times(problem, cut, first.option, second.option, *alone)
        times, lent_until = Times(end, end, end, end, np.zeros(()), np.asarray(DRAINS)), float(lent_until)
    elif how == TURNS:
        times = in_turns(*parts, is_linked=cut.is_linked, waits=cut.waits)
    else:
        times = side_by_side(*parts, is_linked=cut.is_linked, waits=cut.waits, slowdowns=problem.slowdowns(cut))
    where = {leaf.engine: leaf.option for leaf in leaves_of(first) + leaves_of(second)}
    syncs = tuple(
        (sync, problem.sync_s(sync, where[sync.source], where[sync.target], is_turns=how == TURNS))
        for sync in problem.syncs
        if sync.meets(cut)
    )
    more = sum(seconds for _, seconds in syncs)
    times = times.later(more)
    return Pair(how, first, second, cut, fed, syncs, times, lent_until)


def step_s(problem: Problem, node: Node) -> float:
    """The predicted time of a step."""
    return float(sum(part.seconds for part in parts_of(problem, node) if part.on_critical_path))


def floors_s(problem: Problem, node: Node) -> FloatArray:
    """Lower bounds on the step time of a plan of the same structure, for each of the options that one engine has in `problem`; all others
    have one. Chunk sizes are the best for each of l, T and d, and slowdowns are left out."""
    whole = _least_times(problem, node)
    fed = through_functions(zero_times(), problem.graph.leading_functions, problem.calls, problem.functions)
    total = np.maximum(fed.first + whole.total, fed.total + end_of(whole, whole.grain))
    step = Times(whole.first, total, whole.last, np.maximum(whole.busy, fed.busy), whole.grain, whole.rigid)
    step = through_functions(step, problem.graph.trailing_functions, problem.calls, problem.functions)
    staleness = problem.workload.staleness
    return np.maximum(step.busy, step.total / (staleness + 1)) if staleness else step.total


def _least_times(problem: Problem, node: Node) -> Times:
    if isinstance(node, Leaf):
        leaf, calls = problem.leaf(sum(problem.graph.bits[name] for name in node.names)), [problem.calls[name] for name in node.names]
        first, total, last = leaf.times.min(axis=1).T
        rigid = np.array([rigid_of(calls, option) for option in problem.options.of[node.engine]])
        return Times(first, total, last, total, np.full_like(total, leaf.grains.min()), rigid)
    a, b, cut = _least_times(problem, node.first), _least_times(problem, node.second), node.cut
    fed = through_functions(a, cut.functions, problem.calls, problem.functions)
    combine = in_turns if node.how == TURNS else side_by_side
    times = combine(a, fed, b, is_linked=cut.is_linked, waits=cut.waits)
    for sync, _ in node.syncs:
        ends = problem.options.of[sync.source], problem.options.of[sync.target]
        more = np.array([problem.sync_s(sync, *pair, is_turns=node.how == TURNS) for pair in itertools.product(*ends)])
        times = times.later(more)
    return times


def parts_of(problem: Problem, node: Node) -> tuple[Part, ...]:
    """List the summands of the predicted time, then the parts off the critical path."""
    staleness = problem.workload.staleness
    path = _merged(_whole(problem, node))
    total = sum(part.seconds for part in path) / (staleness + 1)
    if staleness:
        path = [Part(f"{part.what} / {staleness + 1} steps under way", part.seconds / (staleness + 1)) for part in path]
        held = _merged(_busy(problem, node))
        ends = [
            Part(name, function.total)
            for name, function in problem.functions.items()
            if name in (*problem.graph.leading_functions, *problem.graph.trailing_functions)
        ]
        held = max([held, *([part] for part in ends)], key=lambda parts: sum(part.seconds for part in parts))
        path = held if sum(part.seconds for part in held) > total else path
    named = {part.what.split(" / ")[0] for part in path}
    beside = [Part(_called(leaf), float(leaf.times.total), False) for leaf in leaves_of(node) if _called(leaf) not in named]
    return tuple(part for part in (*path, *beside) if part.seconds > 0)


def _whole(problem: Problem, node: Node) -> Iterator[Part]:
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
    yield from [Part(", ".join(graph.leading_functions), before)] if before > 0 else []
    yield from path
    yield from [Part(", ".join(graph.trailing_functions), end - total)] if end > total else []


def _path(problem: Problem, node: Node, which: str, weight: float = 1.0) -> Iterator[Part]:
    """Summands of the first, total or last time of a part, each times `weight`."""
    if isinstance(node, Leaf):
        yield from (Part(part.what, part.seconds * weight) for part in _leaf_path(node, which))
        return
    a, b = node.first, node.second
    value, of_a, of_b = _way(problem, node, which)
    for what, share in of_a:
        yield from _path(problem, a, what, weight * share)
    between = value - sum(share * float(getattr(part.times, what)) for part, of in ((a, of_a), (b, of_b)) for what, share in of)
    if between > 1e-9 * value:
        yield Part(_between(node), between * weight)
    for what, share in of_b:
        yield from _path(problem, b, what, weight * share)
    if which != "first":
        yield from (Part(part.what, part.seconds * weight) for part in _sync_parts(problem, node))


def _merged(parts: Iterable[Part]) -> list[Part]:
    """The same summands, each once."""
    seconds: dict[str, float] = {}
    for part in parts:
        seconds[part.what] = seconds.get(part.what, 0.0) + part.seconds
    return [Part(what, each) for what, each in seconds.items()]


def _sync_parts(problem: Problem, node: Pair) -> Iterator[Part]:
    for sync, seconds in node.syncs:
        rest_s = problem.rest_s(sync)
        yield from [Part(f"weight sync of {sync.role}", seconds - rest_s)] if seconds > rest_s else []
        yield from [Part(REST, rest_s)] if rest_s else []


REST = "between the calls"


def _between(node: Pair) -> str:
    """Name the time that belongs to neither part."""
    if node.how == LENT:
        return f"end of {', '.join(leaf_names(node.second))}, after devices were lent"
    return ", ".join(node.cut.functions) or "both at work on one host"


def leaf_names(node: Node) -> list[str]:
    return [name for leaf in leaves_of(node) for name in leaf.names]


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
    """Of linked parts that are split."""
    a, b, fed = node.first.times, node.second.times, node.fed
    grain = float(max(fed.grain, b.grain))
    start, end = float(start_of(fed, np.asarray(grain))), float(end_of(b, np.asarray(grain)))
    begun, ended = _started(problem, node, grain), _ended(b, grain)
    if which == "last":
        less = [("total", grain)]
        value = float(fed.last + b.last) + grain * float(min(a.total, b.total))
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
    """Of linked parts on the same devices, chunk by chunk or one after the other."""
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


def _leaf_path(leaf: Leaf, which: str) -> Iterator[Part]:
    seconds, option = float(getattr(leaf.times, which)), leaf.option
    come = option.come_s if which != "last" else 0.0
    leave = option.leave_s if which != "first" else 0.0
    what = f"switch to {leaf.engine}" if option.is_swapped else f"cache and graphs of {leaf.engine} rebuilt"
    yield from [Part(what, come)] if come else []
    yield Part(_called(leaf), seconds - come - leave)
    yield from [Part(f"switch from {leaf.engine}", leave)] if leave else []


def _called(leaf: Leaf) -> str:
    return ", ".join(leaf.names)


def _busy(problem: Problem, node: Node) -> Iterator[Part]:
    """Summands of the busy time of the busiest devices in each step."""
    if isinstance(node, Leaf):
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
            yield Part(", ".join(node.cut.functions), fed)
        yield from [Part("both at work on one host", more)] if more > 0 else []
        yield from _sync_parts(problem, node)


Block = dict[str, tuple[int, int]]
"""Pool -> the first device and the one after the last."""
Places = dict[EngineId, int]

_MOST_PLACES = 256
"""Most placements of one plan that are tried."""


def places_of(problem: Problem, node: Node) -> Places | None:
    """Find the first device of each engine; None if places conflict, or if no instances remain for rollout without the lent devices."""
    whole = {pool: (0, num) for pool, num in zip(problem.pools, problem.num_devices, strict=True)}
    pins = {e: pin.devices[0] for e in problem.workload.engines if (pin := pin_of(e, problem.spec)).devices is not None}
    if not _leaves_room_beside_loans(node, whole):
        return None
    every = itertools.islice(_placed(node, whole, {}, pins), _MOST_PLACES)
    return next((places for places in every if _has_stand_ins(node, places)), None)


def _leaves_room_beside_loans(node: Node, whole: Block) -> bool:
    """Whether every other engine has room next to the rollout instances on devices of their own; a quick test before trying places."""
    need = {leaf.engine: (leaf.option.pool, leaf.option.num_devices) for leaf in leaves_of(node)}
    for lender, borrower in _loans(node):
        pool, num = need[borrower]
        left = whole[pool][1] - (num - need[lender][1])
        if any(place[0] == pool and place[1] > left for other, place in need.items() if other not in (lender, borrower)):
            return False
    return True


def _has_stand_ins(node: Node, places: Places) -> bool:
    """Whether the rollout instances outside of lent devices share theirs with no other engine, so that they never wait for a lease."""
    at = {leaf.engine: (leaf.option.pool, places[leaf.engine], leaf.option.num_devices) for leaf in leaves_of(node)}
    for lender, borrower in _loans(node):
        pool, low, num = at[borrower]
        first, past = at[lender][1], at[lender][1] + at[lender][2]
        own = [(pool, low, first - low), (pool, past, low + num - past)]
        if any(_overlap(at[other], part) for other in at if other not in (lender, borrower) for part in own):
            return False
    return True


def _loans(node: Node) -> Iterator[tuple[EngineId, EngineId]]:
    """Yield (lender, borrower) of each loan."""
    if isinstance(node, Pair):
        if node.how == LENT:
            yield next(leaf.engine for leaf in leaves_of(node.second)), next(leaf.engine for leaf in leaves_of(node.first))
        yield from _loans(node.first)
        yield from _loans(node.second)


def _placed(node: Node, block: Block, fixed: Places, pins: Mapping[EngineId, int]) -> Iterator[Places]:
    if isinstance(node, Leaf):
        yield from _leaf_places(node, block, fixed, pins)
    elif node.how == LENT:
        yield from _lent_places(node, block, fixed, pins)
    elif node.is_turns:
        for so_far in _placed(node.first, block, fixed, pins):
            yield from _placed(node.second, block, so_far, pins)
    else:
        for left, right in ((node.first, node.second), (node.second, node.first)):
            for of_left, of_right in _divided(block, left.need, right.need):
                for so_far in _placed(left, of_left, fixed, pins):
                    yield from _placed(right, of_right, so_far, pins)


def _lent_places(node: Pair, block: Block, fixed: Places, pins: Mapping[EngineId, int]) -> Iterator[Places]:
    """Place the second part on the devices of some of the first part's instances."""
    assert isinstance(node.first, Leaf)
    assert isinstance(node.second, Leaf)
    option = node.first.option
    size = option.num_devices // option.layout.dp
    for so_far in _leaf_places(node.first, block, fixed, pins):
        low = so_far[node.first.engine]
        for found in _leaf_places(node.second, {**block, option.pool: (low, low + option.num_devices)}, so_far, pins):
            if (found[node.second.engine] - low) % size == 0:
                yield found


def _leaf_places(leaf: Leaf, block: Block, fixed: Places, pins: Mapping[EngineId, int]) -> Iterator[Places]:
    low, high = block[leaf.option.pool]
    known = fixed.get(leaf.engine, pins.get(leaf.engine))
    ends = dict.fromkeys([low, high - leaf.option.num_devices]) if known is None else [known]
    for first in ends:
        if low <= first and first + leaf.option.num_devices <= high:
            yield {**fixed, leaf.engine: first}


def _divided(block: Block, left: Mapping[str, int], right: Mapping[str, int]) -> Iterator[tuple[Block, Block]]:
    """Divide a block between two parts, with unused devices on the right, or on the left if there are any."""
    after = {pool: low + left.get(pool, 0) for pool, (low, _) in block.items()}
    before = {pool: high - right.get(pool, 0) for pool, (_, high) in block.items()}
    for border in (after, before) if after != before else (after,):
        yield (
            {pool: (low, border[pool]) for pool, (low, _) in block.items()},
            {pool: (border[pool], high) for pool, (_, high) in block.items()},
        )


def seats_of(node: Node, places: Places) -> tuple[Seat, ...]:
    """The seats of a plan, in the order of its calls."""
    leaves = leaves_of(node)
    lent = lent_of(node)
    leases = _leases({leaf.engine: (leaf.option.pool, places[leaf.engine], leaf.option.num_devices) for leaf in leaves})
    return tuple(
        Seat(
            engine=leaf.engine,
            calls=tuple(name for name in leaf.names if name != outside_call(leaf.engine)),
            pool=leaf.option.pool,
            first_device=places[leaf.engine],
            num_devices=leaf.option.num_devices,
            layout=leaf.option.layout,
            chunk=leaf.chunk,
            footprint=leaf.option.footprint,
            lease=leases.get(leaf.engine, ""),
            mode="time-shared" if leaf.engine in leases else "split",
            is_swapped=leaf.option.is_swapped,
            lent_until=lent.get(leaf.engine, 0.0),
        )
        for leaf in leaves
    )


def _leases(places: Mapping[EngineId, tuple[str, int, int]]) -> dict[EngineId, str]:
    """Engine -> the lease of the engines whose devices overlap (transitively); an engine alone on its devices has none."""
    groups: list[list[EngineId]] = []
    for engine, place in places.items():
        met = [group for group in groups if any(_overlap(place, places[other]) for other in group)]
        groups = [group for group in groups if group not in met] + [[engine, *(e for group in met for e in group)]]
    shared = sorted((group for group in groups if len(group) > 1), key=lambda group: min((places[e][0], places[e][1]) for e in group))
    return {engine: f"lease-{i}" for i, group in enumerate(shared) for engine in group}


def _overlap(a: tuple[str, int, int], b: tuple[str, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]


def mode_of(seats: Sequence[Seat]) -> Mode:
    """The mode by placement: all engines on common devices, none, or a mixture."""
    engines = {seat.engine: (seat.pool, seat.first_device, seat.num_devices) for seat in seats}
    pairs = [(a, b) for a in engines for b in engines if a < b]
    num_shared = sum(_overlap(engines[a], engines[b]) for a, b in pairs)
    if num_shared == len(pairs) and not any(seat.lent_until for seat in seats):
        return "time-shared"
    return "hybrid" if num_shared else "split"


# ---- bounds and explanations

_MOSTLY = 0.75
"""The share from which on something counts as the limiting factor."""


def bounds_of(problem: Problem) -> tuple[Bound, ...]:
    """Lower bounds on the step time of all plans of the options tried.

        longest sample   (t0 + t1) L, and what must come after it        work            device-seconds / devices
        k-longest        the k longest samples, with migration           critical path   the longest chain of calls, each at its best

    With staleness a sample may take as many steps as are in flight: all but `work` are divided by staleness + 1.
    """
    limits = Limits(problem)
    steps = problem.workload.staleness + 1
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


def works_of(problem: Problem, node: Node, parts: Sequence[Part]) -> Iterator[CallWork]:
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
    return float(call_times(call, leaf.engine, [leaf.option], chunks, problem.costs, problem.batches[call.name])[0, 0, 1])


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


def interval_of(problem: Problem, parts: Sequence[Part]) -> tuple[float, float]:
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


def _kind_of(problem: Problem, part: Part) -> str:
    """The kind of work of a part, as `Costs.spread` takes it."""
    name = part.what.split(" / ")[0].split(", ")[0]
    if name in problem.calls:
        return problem.calls[name].work
    if name == REST:
        return "rest"
    return next((kind for kind, word in (("sync", "sync"), ("switch", "switch"), ("switch", "rebuilt")) if word in name), "")


def advice_of(problem: Problem, node: Node, parts: Sequence[Part], bounds: Sequence[Bound]) -> str:
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


def _seconds(parts: Iterable[Part]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        if part.on_critical_path:
            found[part.what] = found.get(part.what, 0.0) + part.seconds
    return found


# ---- early onload

_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Candidate shares of ended samples for an early onload."""
_FULL = 0.95
"""The share of a device's memory that may be in use during an early onload."""


def with_early_onload(problem: Problem, seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    """Set on trainers' seats the share of ended samples at which they are onloaded."""
    if not can_shrink_kv_cache(problem.spec.rollout.engine):
        return seats
    found = []
    for seat in seats:
        others = [other for other in seats if other.lease == seat.lease and other is not seat]
        if seat.lease and seat.engine.kind == "train" and seat.is_swapped and [other.engine.kind for other in others] == ["rollout"]:
            (rollout,) = others
            has_one_process = rollout.layout.dp == 1 and rollout.devices == seat.devices
            if not rollout.lent_until and not has_one_process and not share_a_process(rollout, seat, problem.spec):
                seat = msgspec.structs.replace(seat, onload_at=_share(problem, rollout, seat))
        found.append(seat)
    return tuple(found)


def _share(problem: Problem, rollout: Seat, trainer: Seat) -> float:
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


# ---- counts to try


def pinned_counts(pin: PinSpec, size: int) -> list[int]:
    """Device counts that a pin leaves its engine in a pool of that size, where it restricts them: its own count, or multiples of the
    degrees that its layout fixes, whose other degrees are powers of two."""
    layout = pin.layout
    if pin.num_devices is not None or pin.devices is not None:
        num = pin.num_devices if pin.num_devices is not None else pin.devices[1] - pin.devices[0] if pin.devices else 0
        return [num] if num <= size else []
    fixed = math.prod(degree or 1 for degree in (layout.tp, layout.pp, layout.sp, layout.dp))
    return [fixed << i for i in range(size.bit_length()) if fixed << i <= size] if fixed > 1 else []


def least_unit(problem: Problem, pool: str) -> int:
    """The fewest devices of a pool that an engine can be given."""
    return min((unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))), default=1)


def grid_of(problem: Problem) -> dict[str, Sequence[int]]:
    """The grid of device counts of each pool: repeated halves, their complements, all but the smallest unit; and pins with complements."""
    found: dict[str, Sequence[int]] = {}
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        least = least_unit(problem, pool)
        counts, part = {size, size - least, least}, size // 2
        while part >= max(least, size // 16):
            counts |= {part, size - part}
            part //= 2
        for engine in problem.workload.engines:
            counts |= {part for num in pinned_counts(pin_of(engine, problem.spec), size) for part in (num, size - num)}
        found[pool] = sorted(counts - {0})
    return found


# ---- small changes of a plan

_MOST_CHANGES = 60
"""Most changes of a plan in a climb."""


class Climb:
    """Local search among plans of one structure: the best of all small changes is made, as long as that is faster.

    Changes: an engine gets a step more or fewer devices, or passes a step on to another engine; it gets another option on its devices
    (swapped or resident, a smaller cache); a leaf has the next finer or coarser chunks, or all leaves have. The step halves when no
    change helps, down to the unit of the engines. Last come counts with one pass more or fewer over a chunk. All changes are priced at
    once (`Pricer`).
    """

    def __init__(self, problem: Problem, ways: Mapping[int, tuple[Cut, int]], like: Mapping[EngineId, Option]) -> None:
        self._problem, self._ways, self._like = problem, dict(ways), dict(like)
        parts = {part for cut, _ in ways.values() for part in (cut.first, cut.second)} | {problem.graph.everything}
        self._leaves = sorted(parts - ways.keys())
        self._engine_of = {calls: next(iter(problem.graph.engines(calls))) for calls in self._leaves}
        self._known: dict[tuple[EngineId, int], list[Option]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}

    def _options(self, engine: EngineId, num: int) -> list[Option]:
        """The options of an engine on so many devices, in the layout of its replicas."""
        if (engine, num) not in self._known:
            like = self._like[engine]
            problem = self._problem
            near = {engine: (like.pool, like.layout, (num,))}
            self._known[engine, num] = options_near(near, problem.costs, problem.spec, num_engines=len(problem.workload.engines)).of[engine]
        return self._known[engine, num]

    def climbed(self, step_s: float, starts: list[State], reach: Mapping[str, int]) -> tuple[Tables, int] | None:
        """The best plan found from these, with its row in the tables; None if none is faster than `step_s`."""
        best: tuple[float, State, Tables, int] | None = None
        states, left = starts, dict(reach)
        for _ in range(_MOST_CHANGES):
            found = self.priced(states, best[0] * (1 - 1e-6) if best else step_s) if states else None
            if found:
                best = found
            elif best is None:
                return None
            else:
                if not any(left.values()):
                    break
                left = {pool: step // 2 // (unit := least_unit(self._problem, pool)) * unit for pool, step in left.items()}
            states = list(self._changes(best[1], left) if any(left.values()) else self._rounded(best[1]))
        return best[2:] if best else None

    def priced(self, states: list[State], known_s: float = np.inf) -> tuple[float, State, Tables, int] | None:
        """The fastest of these plans, if it is faster than known."""
        problem = self._problem
        of: dict[EngineId, list[Option]] = {}
        index: dict[tuple[EngineId, int, int], int] = {}
        for engine in self._like:
            of[engine] = []
            for num in dict.fromkeys(state[0][engine][0] for state in states):
                index.update(((engine, num, i), len(of[engine]) + i) for i in range(len(self._options(engine, num))))
                of[engine] += self._options(engine, num)
        near = problem.with_options(Options(of))
        picks = {}
        for calls in self._leaves:
            engine = self._engine_of[calls]
            which = np.array([index[(engine, *state[0][engine])] for state in states])
            picks[calls] = which, np.array([state[1][calls] for state in states])
        pricer = Pricer(near, known_s, self._ways, picks)
        tables = pricer.solve()
        if not len(tables.steps_s) or tables.steps_s.min() >= known_s:
            return None
        row = int(tables.steps_s.argmin())
        return float(tables.steps_s[row]), states[pricer.plans[problem.graph.everything][row]], tables, row

    def starts(self, options: Mapping[EngineId, Sequence[tuple[Option, int]]], chunks: Mapping[int, int]) -> Iterator[State]:
        """Yield plans with options like these; where the leaves of an engine have several counts, with some combinations of these."""
        for one in itertools.islice(itertools.product(*(dict.fromkeys(some) for some in options.values())), 16):
            if start := self.start(dict(zip(options, one, strict=True)), chunks):
                yield start

    def start(self, options: Mapping[EngineId, tuple[Option, int]], chunks: Mapping[int, int]) -> State | None:
        """The plan with options like these on these counts; None if an engine has none there."""
        places = {}
        for engine, (like, num) in options.items():
            num = num if self._options(engine, num) else like.num_devices  # A pin may allow no other.
            every = self._options(engine, num)
            if not every:
                return None
            same = [i for i, one in enumerate(every) if (one.is_swapped, one.max_running > 0) == (like.is_swapped, like.max_running > 0)]
            places[engine] = num, (same or [0])[0]
        at = {
            calls: min(range(len(self._sizes(calls))), key=lambda i: abs(self._sizes(calls)[i] - chunks[calls])) for calls in self._leaves
        }
        return places, at

    def _sizes(self, calls: int) -> tuple[int, ...]:
        """The chunk sizes of a leaf."""
        if calls not in self._chunks:
            self._chunks[calls] = chunks_of(self._problem.graph.members(calls))
        return self._chunks[calls]

    def _changes(self, state: State, reach: Mapping[str, int]) -> Iterator[State]:
        places, chunks = state
        for engine, step in ((engine, reach[like.pool]) for engine, like in self._like.items()):
            for more in (step, -step) if step else ():
                moved = self._moved(places, engine, more)
                if moved:
                    yield moved, chunks
                    for other in self._like if more > 0 else ():
                        if other != engine and (both := self._moved(moved, other, -more)):
                            yield both, chunks
            num, mine = places[engine]
            for i in range(len(self._options(engine, num))):
                if i != mine:
                    yield {**places, engine: (num, i)}, chunks
        for step in (1, -1):
            moves = {calls: at + step for calls, at in chunks.items() if 0 <= at + step < len(self._sizes(calls))}
            yield from ((places, {**chunks, calls: at}) for calls, at in moves.items())
            if len(moves) > 1:
                yield places, {**chunks, **moves}

    def _rounded(self, state: State) -> Iterator[State]:
        """Yield plans in which an engine has the next count with one pass more or fewer over a chunk, and another makes up for it."""
        places, chunks = state
        steps = {engine: self._to_rounds(engine, state) for engine in self._like}
        for engine, mine in steps.items():
            for more in mine:
                if not (moved := self._moved(places, engine, more)):
                    continue
                yield moved, chunks
                more = moved[engine][0] - places[engine][0]
                for other, its in steps.items():
                    for less in {-more, *its} if other != engine else ():
                        if less * more < 0 and (both := self._moved(moved, other, less)):
                            yield both, chunks

    def _to_rounds(self, engine: EngineId, state: State) -> set[int]:
        """How many devices more or fewer an engine needs for a pass less or more over a chunk, and how many it does not need."""
        num, size = state[0][engine][0], self._like[engine].layout.num_replica_devices
        found = set[int]()
        for calls in (calls for calls in self._leaves if self._engine_of[calls] == engine):
            for call in (call for call in self._problem.graph.members(calls) if call.num_samples and call.work != "generate"):
                chunk = min(self._sizes(calls)[state[1][calls]], call.num_samples)
                chunk = min(chunk, max(1, call.num_samples // num_minibatches(call))) if call.work == "update" else chunk
                passes = -(-chunk // (num // size))
                found |= {-(-chunk // more) * size - num for more in (passes - 1, passes, passes + 1) if more > 0}
        return found - {0}

    def _moved(self, places: _Counted, engine: EngineId, more: int) -> _Counted | None:
        num, variant = places[engine]
        size = self._like[engine].layout.num_replica_devices
        num = (num + (max(more, size) if more > 0 else min(more, -size))) // size * size
        most = dict(zip(self._problem.pools, self._problem.num_devices, strict=True))[self._like[engine].pool]
        if not 0 < num <= most or variant >= len(self._options(engine, num)):
            return None
        return {**places, engine: (num, variant)}


_Counted = dict[EngineId, tuple[int, int]]
"""Engine -> devices, and which of the options there."""
State = tuple[_Counted, dict[int, int]]
"""Places, and the index of each leaf's chunk size."""
