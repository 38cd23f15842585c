"""Read a plan back from the search's tables as a tree, give its engines their devices, and change it within its structure.

    Tables, row --tree_of--> Node --places_of--> first device of each engine --placements_of--> Placements with their leases
    structure, options, chunk sizes --Climb--> better ones

Every node is priced again by the formulas of `problem`, one plan instead of thousands; `breakdown` says what its time is the sum of.

Parts of a split are placed next to each other, in either order; parts that take turns are placed on the same devices. An engine has one
place in all of its calls, and a pinned one that of its pin: orders are tried until all of this holds.

`Climb` finds better plans of the same structure.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.micro.protocol.plan import Mode, Placement
from m2flow.planner.dynamic_program import HOST, KEPT, LENT, MOST, NUM_HOWS, SPLIT, TURNS, Memory, Own, Tables, lent_times
from m2flow.planner.problem import (
    TIMES,
    Cut,
    FloatArray,
    IntArray,
    Option,
    Options,
    Problem,
    Sync,
    facts_of,
    options_near,
    pin_of,
)
from m2flow.planner.workload import (
    DRAINS,
    Times,
    chunks_of,
    end_of,
    in_turns,
    num_minibatches,
    outside_call,
    rigid_of,
    side_by_side,
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


def parts_within(calls: int, ways: Mapping[int, tuple[Cut, int]]) -> list[int]:
    """The parts of a set of calls that are combined in one way, however deep: a split within a split has no shape of its own."""
    cut, how = ways[calls]
    return [
        part for side in (cut.first, cut.second) for part in (parts_within(side, ways) if side in ways and ways[side][1] == how else [side])
    ]


def form_of(calls: int, ways: Mapping[int, tuple[Cut, int]]) -> object:
    """What plans have in common that differ only in the order in which their splits and turns are written."""
    if calls not in ways:
        return calls
    parts = [form_of(part, ways) for part in parts_within(calls, ways)]
    return frozenset(parts) if ways[calls][1] == SPLIT else tuple(parts)


def restructured(problem: Problem, ways: Mapping[int, tuple[Cut, int]]) -> Iterator[dict[int, tuple[Cut, int]]]:
    """Yield the structures next to one: two parts are combined in the other way, or three in another order."""
    known = {_written(ways)}
    for calls, (cut, how) in ways.items():
        every = [{**ways, calls: (cut, TURNS + SPLIT - how)}] if how in (TURNS, SPLIT) else []
        for inner, other in ((cut.first, cut.second), (cut.second, cut.first)):
            if inner in ways:
                every += _regrouped(
                    problem, {k: v for k, v in ways.items() if k != inner}, (ways[inner][0].first, ways[inner][0].second, other)
                )
        for one in every:
            may = {SPLIT: problem.may_split, TURNS: problem.may_take_turns}
            if (written := _written(one)) not in known and all(how not in may or may[how](cut) for cut, how in one.values()):
                known.add(written)
                yield one


def _written(ways: Mapping[int, tuple[Cut, int]]) -> frozenset[tuple[int, int, int]]:
    """A structure as it is priced, which goes by the order in which its splits are written too."""
    return frozenset((calls, cut.first, how) for calls, (cut, how) in ways.items())


def _regrouped(problem: Problem, ways: Mapping[int, tuple[Cut, int]], parts: tuple[int, int, int]) -> Iterator[dict[int, tuple[Cut, int]]]:
    """Yield all ways to combine three parts two at a time."""
    whole = sum(parts)
    for apart in parts:
        inner = whole - apart
        for outer in (cut for cut in problem.cuts(whole) if apart in (cut.first, cut.second)):
            for within in (cut for cut in problem.cuts(inner) if cut.first in parts and cut.second in parts):
                for hows in itertools.product((TURNS, SPLIT), repeat=2):
                    yield {**ways, whole: (outer, hows[0]), inner: (within, hows[1])}


@dataclass(frozen=True, eq=False)
class Seed:
    """A structure with the devices of its engines, to search near."""

    step_s: float
    """As the table has it."""
    ways: dict[int, tuple[Cut, int]]
    options: dict[EngineId, list[tuple[Option, int]]]
    """Engine -> an option like its own, and its device count; several if the parts of the plan disagree."""
    chunks: dict[int, int]
    """Set of calls of a leaf -> chunk size."""


Counts = dict[EngineId, list[tuple[Option, int]]]
"""Engine -> options like its own, with the number of their devices."""

_Num = TypeVar("_Num", int, IntArray)
_HALVINGS = 8
NEVER = 1e18
"""Seconds of what is impossible."""


def num_left(
    problem: Problem, ways: Mapping[int, tuple[Cut, int]], counts: Mapping[EngineId, int], engine: EngineId, num: int, calls: int = 0
) -> int:
    """Devices that a structure on so many, of one pool, leaves to an engine, with so many for each of the others; below 0 if too few."""
    calls = calls or problem.graph.everything
    if calls not in ways:
        return num
    cut, how = ways[calls]
    left = num
    for part, other in ((cut.first, cut.second), (cut.second, cut.first)):
        if engine in problem.graph.engines(part):
            mine = num - _needed(problem, ways, counts, other, max) if how == SPLIT else num
            left = min(left, num_left(problem, ways, counts, engine, mine, part))
        elif _needed(problem, ways, counts, part, max) > num:
            return -1
    return left


def _needed(
    problem: Problem, ways: Mapping[int, tuple[Cut, int]], nums: Mapping[EngineId, _Num], calls: int, larger: Callable[[_Num, _Num], _Num]
) -> _Num:
    """Devices that one structure needs for some calls, of plans whose engines have so many."""
    if calls not in ways:
        (engine,) = problem.graph.engines(calls)
        return nums[engine]
    cut, how = ways[calls]
    a, b = _needed(problem, ways, nums, cut.first, larger), _needed(problem, ways, nums, cut.second, larger)
    return a + b if how == SPLIT else larger(a, b)


def scaled_up(
    problem: Problem, ways: Mapping[int, tuple[Cut, int]], counts: Mapping[EngineId, int], units: Mapping[EngineId, int], size: int
) -> list[dict[EngineId, int]]:
    """Device counts of which those of the 2, 3, ... smallest engines, by their units, are as many times larger as `size` devices allow."""
    smallest = sorted(counts, key=counts.__getitem__)
    most = np.arange(2, len(smallest) + 1)
    low, high = np.ones(len(most)), size / np.cumsum([counts[engine] for engine in smallest])[1:]
    found = {engine: np.full(len(most), num) for engine, num in counts.items()}
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        more = {
            engine: np.where(most > at, (counts[engine] * middle).astype(np.int64) // units[engine] * units[engine], counts[engine])
            for at, engine in enumerate(smallest)
        }
        fits = _needed(problem, ways, more, problem.graph.everything, np.maximum) <= size
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        found = {engine: np.where(fits, more[engine], nums) for engine, nums in found.items()}
    return [{engine: int(nums[i]) for engine, nums in found.items()} for i in range(len(most))]


@functools.lru_cache(maxsize=4096)
def nearest_of(sizes: tuple[int, ...], size: int) -> int:
    """The index of the size next to one."""
    return min(range(len(sizes)), key=lambda i: abs(sizes[i] - size))


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
        return leaf_of(problem, calls, left, right)
    cut, how = tables.cuts[calls][kind // NUM_HOWS], kind % NUM_HOWS
    return pair_of(problem, cut, _node(tables, cut.first, left), _node(tables, cut.second, right), how)


def leaf_of(problem: Problem, calls: int, option: int, chunk: int) -> Leaf:
    """Some calls of one engine, in one of its options and chunk sizes, by their indices."""
    members, leaf = problem.graph.members(calls), problem.leaf(calls)
    (engine,) = problem.graph.engines(calls)
    chosen = problem.options.of[engine][option]
    first, total, last = leaf.times[option, chunk]
    busy, rigid = total * problem.held_share(calls), rigid_of(members, np.asarray(chosen.is_swapped, np.float64))
    times = Times(first, total, last, busy, leaf.grains[chunk], rigid)
    return Leaf(engine, tuple(call.name for call in members), chosen, leaf.chunks[chunk], times)


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


def floors_s(problem: Problem, node: Node) -> FloatArray:
    """Lower bounds on the step time of a plan of the same structure, for each of the options that one engine has in `problem`; all others
    have one. Chunk sizes are the best for each of l, T and d, and slowdowns are left out."""
    return step_s_of(problem, _least_times(problem, node))


def step_s_of(problem: Problem, whole: Times) -> FloatArray:
    """Step times by those of all calls on devices: with the functions before and after them."""
    fed = through_functions(zero_times(), problem.graph.leading_functions, problem.calls, problem.functions)
    total = np.maximum(fed.first + whole.total, fed.total + end_of(whole, whole.grain))
    step = Times(whole.first, total, whole.last, np.maximum(whole.busy, fed.busy), whole.grain, whole.rigid)
    step = through_functions(step, problem.graph.trailing_functions, problem.calls, problem.functions)
    return np.maximum(step.busy, step.total / problem.steps_under_way) if problem.workload.staleness else step.total


def _least_times(problem: Problem, node: Node) -> Times:
    if isinstance(node, Leaf):
        leaf, calls = problem.leaf(sum(problem.graph.bits[name] for name in node.names)), [problem.calls[name] for name in node.names]
        first, total, last = leaf.times.min(axis=1).T
        rigid = rigid_of(calls, problem.facts(node.engine)[5])
        busy = total * problem.held_share(sum(problem.graph.bits[name] for name in node.names))
        return Times(first, total, last, busy, np.full_like(total, leaf.grains.min()), rigid)
    a, b, cut = _least_times(problem, node.first), _least_times(problem, node.second), node.cut
    fed = through_functions(a, cut.functions, problem.calls, problem.functions)
    combine = in_turns if node.how == TURNS else side_by_side
    times = combine(a, fed, b, is_linked=cut.is_linked, waits=cut.waits)
    for sync, _ in node.syncs:
        ends = problem.options.of[sync.source], problem.options.of[sync.target]
        more = np.array([problem.sync_s(sync, *pair, is_turns=node.how == TURNS) for pair in itertools.product(*ends)])
        times = times.later(more)
    return times


def leaf_names(node: Node) -> list[str]:
    return [name for leaf in leaves_of(node) for name in leaf.names]


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


def placements_of(node: Node, places: Places) -> tuple[Placement, ...]:
    """The placements of a plan, in the order of its calls."""
    leaves = leaves_of(node)
    lent = lent_of(node)
    leases = _leases({leaf.engine: (leaf.option.pool, places[leaf.engine], leaf.option.num_devices) for leaf in leaves})
    return tuple(
        Placement(
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


def mode_of(placements: Sequence[Placement]) -> Mode:
    """The mode by placement: all engines on common devices, none, or a mixture."""
    engines = {placement.engine: (placement.pool, placement.first_device, placement.num_devices) for placement in placements}
    pairs = [(a, b) for a in engines for b in engines if a < b]
    num_shared = sum(_overlap(engines[a], engines[b]) for a, b in pairs)
    if num_shared == len(pairs) and not any(placement.lent_until for placement in placements):
        return "time-shared"
    return "hybrid" if num_shared else "split"


# ---- counts to try

MOST_COUNTS = 64
"""Device counts of a table of all parts."""


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


def num_units_of(problem: Problem) -> int:
    """Devices of all pools, in the least units of any engine."""
    num = 0
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
        num += size // min(units, default=size)
    return num


def step_of(problem: Problem) -> int:
    """The step between the counts of a table."""
    (size,) = problem.num_devices
    unit = least_unit(problem, problem.pools[0])
    return -(-size // unit // MOST_COUNTS) * unit


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


def interpolated(at: FloatArray, grid: FloatArray, values: FloatArray) -> FloatArray:
    """Linear between the points of a grid, constant beyond: [grid, ...] -> [*at.shape, ...]."""
    right = np.clip(np.searchsorted(grid, at), 1, max(1, len(grid) - 1))
    low, high = grid[right - 1], grid[np.minimum(right, len(grid) - 1)]
    share = np.clip((at - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    share = share.reshape(*at.shape, *[1] * (values.ndim - 1))
    return np.asarray(values[right - 1] * (1 - share) + values[np.minimum(right, len(grid) - 1)] * share)


def evenly(a: FloatArray, b: FloatArray) -> tuple[IntArray, IntArray]:
    """Indices of the counts of both parts of a split, where these take about equally long: [..., counts] -> [4, ..., counts] each.

    Counts are 1 + their index. Indices below 0 are possible; these splits do not exist.
    """
    num = np.arange(a.shape[-1])
    start = np.arange(0, a.size, len(num)).reshape(*a.shape[:-1], 1)
    low, high = np.zeros(a.shape, np.int64), np.broadcast_to(np.maximum(num - 1, 0), a.shape).copy()
    for _ in range(len(num).bit_length()):
        middle = (low + high) // 2
        longer = a.take(start + middle) > b.take(start + np.maximum(num - 1 - middle, 0))
        low, high = np.where(longer, np.minimum(middle + 1, high), low), np.where(longer, high, middle)
    left = np.stack([low - 1, low, np.minimum(low + 1, num[-1]), np.broadcast_to(num // 2, low.shape)])
    return left, num - 1 - left


def side_by_side_s(every: Sequence[FloatArray]) -> FloatArray:
    """Seconds of parts side by side, on 1, 2, ... devices, by those of each, which do not rise: the least in which all end.

    Within a limit, a part needs a device more than it has times beyond the limit. So k parts on n devices leave n - k of all times beyond.
    """
    falling = -np.sort(-np.concatenate(every), kind="stable")
    return np.concatenate([np.full(len(every) - 1, NEVER), falling])[: len(every[0])]


def least_of(values: FloatArray, merit: FloatArray, axis: int = 1) -> FloatArray:
    """The rows of the least merit along an axis of [values, ...]."""
    every, best = np.moveaxis(values, axis, 0), merit.argmin(axis=axis - 1)
    found = every[0].copy()
    for i in range(1, len(every)):
        np.copyto(found, every[i], where=best == i)
    return np.asarray(found)


# ---- small changes of a plan

_MOST_CHANGES = 60
"""Most changes of a plan in a climb."""
_EACH = 128
"""What a pair of parts counts for in the budget each time that plans are priced, beside one for each plan."""


class Budget:
    """What all searches of a problem may evaluate together, as `Tables.num_evaluated` counts it: the same on every machine."""

    def __init__(self, most: float = np.inf) -> None:
        self.left = most
        self.has_cut = False
        """Whether something was left out because nothing was left."""

    def spend(self, num: int) -> None:
        self.left -= num

    def is_over(self) -> bool:
        """Whether nothing is left; whoever asks leaves something out then."""
        self.has_cut = self.has_cut or self.left <= 0
        return self.left <= 0


class Book:
    """Options next to plans with their facts and times, each computed once for all climbs of a search. A row is an option's index in it.

    Engines that cost the same share their options.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._rows: dict[tuple[object, ...], range] = {}
        self._variants: dict[tuple[EngineId, range], dict[tuple[bool, bool], int]] = {}
        self._options: dict[EngineId, list[Option]] = {}
        self._facts: dict[EngineId, FloatArray] = {}
        self._times: dict[int, FloatArray] = {}
        self._grains: dict[int, FloatArray] = {}
        self._syncs: dict[tuple[str, bool], dict[int, float]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        self._spans: dict[tuple[object, ...], IntArray] = {}
        is_free = {engine: pin_of(engine, problem.spec) == PinSpec() for engine in problem.workload.engines}
        likes = {engine: problem.costs.like(engine) for engine in is_free}
        self._like = {engine: like if is_free[engine] and is_free.get(like) else engine for engine, like in likes.items()}

    def rows(self, engine: EngineId, like: Option, num: int) -> range:
        """The options of an engine on so many devices, in the layout of the replicas of an option."""
        layout, of = like.layout, self._like[engine]
        key = of, like.pool, layout.tp, layout.pp, layout.sp, layout.ep, num
        if key not in self._rows:
            problem, every = self.problem, self._options.setdefault(of, [])
            start, near = len(every), {of: (like.pool, layout, (num,))}
            every += options_near(near, problem.costs, problem.spec, num_engines=len(problem.workload.engines)).of[of]
            self._rows[key] = range(start, len(every))
        return self._rows[key]

    def spans(self, engine: EngineId, like: Option, nums: IntArray) -> IntArray:
        """The first of `rows` and how many there are, on numbers of devices, [2, nums]."""
        layout = like.layout
        most = self.problem.num_devices[self.problem.pools.index(like.pool)]
        key = self._like[engine], like.pool, layout.tp, layout.pp, layout.sp, layout.ep
        if key not in self._spans:
            self._spans[key] = np.full((2, most + 1), -1)
        every = self._spans[key]
        found = every.take(nums, 1)
        if len(nums) and found[1].min() < 0:
            for num in set(nums[found[1] < 0].tolist()):
                rows = self.rows(engine, like, num)
                every[:, num] = rows.start, len(rows)
            found = every.take(nums, 1)
        return found

    def variant(self, engine: EngineId, rows: range, like: Option) -> int:
        """The place in some rows of the first option that is swapped, and has a smaller cache, as another; 0 if there is none."""
        key = self._like[engine], rows
        if key not in self._variants:
            every = [self.option(engine, row) for row in rows]
            self._variants[key] = {(one.is_swapped, one.max_running > 0): i for i, one in reversed(list(enumerate(every)))}
        return self._variants[key].get((like.is_swapped, like.max_running > 0), 0)

    def option(self, engine: EngineId, row: int) -> Option:
        return self._options[self._like[engine]][row]

    def facts(self, engine: EngineId) -> FloatArray:
        """The facts of all rows, as `Problem.facts`."""
        of = self._like[engine]
        known, every = self._facts.get(of, np.zeros((6, 0))), self._options[of]
        if known.shape[1] < len(every):
            known = self._facts[of] = np.concatenate([known, facts_of(every[known.shape[1] :], self.problem.pools)], axis=1)
        return known

    def chunks(self, calls: int) -> tuple[int, ...]:
        """The chunk sizes of a leaf."""
        if calls not in self._chunks:
            self._chunks[calls] = chunks_of(self.problem.graph.members(calls))
        return self._chunks[calls]

    def times(self, calls: int, rows: IntArray, chunks: IntArray) -> Times:
        """Times of a leaf in pairs of an option and a chunk size, by their indices."""
        known = self._times.get(calls)
        found = known[rows, chunks] if known is not None and len(known) > rows.max(initial=0) else None
        if found is None or np.isnan(found[:, 0]).any():
            found = self._filled(calls, rows)[rows, chunks]
        first, total, last, rigid = found.T
        return Times(first, total, last, total * self.problem.held_share(calls), self._grains[calls][chunks], rigid)

    def _filled(self, calls: int, rows: IntArray) -> FloatArray:
        """The times of a leaf with those of some rows, and how it may share its devices, [rows, chunks, 4]; those not asked for are nan."""
        members = self.problem.graph.members(calls)
        (engine,) = self.problem.graph.engines(calls)
        every = self._options[self._like[engine]]
        known = self._times.get(calls, np.zeros((0, len(self.chunks(calls)), TIMES + 1)))
        if len(known) < len(every):
            known = np.concatenate([known, np.full((2 * len(every) - len(known), *known.shape[1:]), np.nan)])
        missing = np.unique(rows[np.isnan(known[rows, 0, 0])])
        made = self.problem.times_of(calls, [every[row] for row in missing.tolist()])
        known[missing, :, :TIMES], self._grains[calls], self._times[calls] = made.times, made.grains, known
        known[missing, :, TIMES] = rigid_of(members, self.facts(engine)[5, missing])[:, None]
        return known

    def sync_s(self, sync: Sync, sources: IntArray, targets: IntArray, *, is_turns: bool) -> FloatArray:
        """Seconds of a weight sync between pairs of rows."""
        known = self._syncs.setdefault((sync.role, is_turns), {})
        pairs, which = np.unique(sources << 32 | targets, return_inverse=True)
        found = []
        for pair in pairs.tolist():
            if pair not in known:
                ends = self.option(sync.source, pair >> 32), self.option(sync.target, pair & 0xFFFFFFFF)
                known[pair] = self.problem.sync_s(sync, *ends, is_turns=is_turns)
            found.append(known[pair])
        return np.array(found)[which]


class Pricer:
    """Prices plans of one structure, all at once."""

    def __init__(self, book: Book, ways: Mapping[int, tuple[Cut, int]]) -> None:
        self._book, self._ways, self._problem = book, dict(ways), book.problem
        self._everything = self._problem.graph.everything
        self._memory = Memory(self._problem)
        parts = {part for cut, _ in ways.values() for part in (cut.first, cut.second)} | {self._everything}
        self.leaves = {calls: next(iter(self._problem.graph.engines(calls))) for calls in sorted(parts - ways.keys())}
        syncs = self._problem.syncs
        self._met = {calls: [sync for sync in syncs if sync.meets(cut)] for calls, (cut, _) in ways.items()}
        self._slow = {calls: self._problem.slowdowns(cut) for calls, (cut, how) in ways.items() if how == SPLIT}

    def steps_s(self, rows: Mapping[EngineId, IntArray], chunks: Mapping[int, IntArray], known_s: float = np.inf) -> FloatArray:
        """Step times of plans, by the row of each engine's option and the index of each leaf's chunk size.

        Infinite without the memory, which is computed of those alone that are faster than `known_s`, and of what is not.
        """
        steps_s = step_s_of(self._problem, self._times(self._everything, rows, chunks))
        some = np.flatnonzero(steps_s < known_s)
        found = np.full(len(steps_s), np.inf)
        if len(some):
            fit = some[self._fits({engine: which[some] for engine, which in rows.items()})]
            found[fit] = steps_s[fit]
        return found

    def _times(self, calls: int, rows: Mapping[EngineId, IntArray], chunks: Mapping[int, IntArray]) -> Times:
        """Times of a part of plans."""
        problem, book = self._problem, self._book
        if calls in self.leaves:
            return book.times(calls, rows[self.leaves[calls]], chunks[calls])
        cut, how = self._ways[calls]
        a, b = (self._times(part, rows, chunks) for part in (cut.first, cut.second))
        fed = through_functions(a, cut.functions, problem.calls, problem.functions)
        if how == TURNS:
            times = in_turns(a, fed, b, is_linked=cut.is_linked, waits=cut.waits)
        else:
            times = side_by_side(a, fed, b, is_linked=cut.is_linked, waits=cut.waits, slowdowns=self._slow[calls])
        for sync in self._met[calls]:
            times = times.later(book.sync_s(sync, rows[sync.source], rows[sync.target], is_turns=how == TURNS))
        return times

    def _fits(self, rows: Mapping[EngineId, IntArray]) -> npt.NDArray[np.bool_]:
        """Whether plans have the memory."""
        memory = self._memory_of(self._everything, rows)
        room, host = self._problem.room[:, :, None, None]
        return np.asarray(((memory[KEPT] <= room) & (memory[MOST] <= room) & (memory[HOST] <= host)).all(axis=(0, 1)))

    def _memory_of(self, calls: int, rows: Mapping[EngineId, IntArray]) -> FloatArray:
        """Memory of a part of plans."""
        if calls in self.leaves:
            engine = self.leaves[calls]
            return self._memory.leaf(engine, self._book.facts(engine)[:, rows[engine]], calls)
        cut, how = self._ways[calls]
        of_a, of_b = (self._memory_of(part, rows) for part in (cut.first, cut.second))
        num = of_a.shape[-1]
        return self._memory.join([cut], np.zeros(num, np.int64), of_a, of_b, self._own(rows), num * (how == TURNS))

    def _own(self, rows: Mapping[EngineId, IntArray]) -> Own:
        def own(engine: EngineId, which: IntArray) -> FloatArray:
            facts = self._book.facts(engine)[:, rows[engine][which]]
            found = np.zeros((3, len(self._problem.pools), len(which)))
            found[:, facts[0].astype(np.int64), np.arange(len(which))] = facts[[2, 2, 4]]
            return found

        return own

    def plan(self, options: Mapping[EngineId, Option], chunks: Mapping[int, int]) -> tuple[Problem, Node]:
        """A plan, with a problem that has only its options."""
        problem = self._problem.with_options(Options({engine: [option] for engine, option in options.items()}))

        def made(calls: int) -> Node:
            if calls in self.leaves:
                return leaf_of(problem, calls, 0, chunks[calls])
            cut, how = self._ways[calls]
            return pair_of(problem, cut, made(cut.first), made(cut.second), how)

        return problem, made(self._everything)


def _stage_of(problem: Problem, calls: int) -> int:
    """The number of calls on devices that come one after the other before the last of some."""
    found: list[int] = []
    for i, needs in enumerate(problem.graph.direct):
        found.append(1 + max((found[j] for j in range(i) if needs >> j & 1), default=-1))
    return max(stage for i, stage in enumerate(found) if calls >> i & 1)


class Climb:
    """Local search among plans of one structure: the best of all small changes is made, as long as that is faster.

    Changes: an engine gets a step more or fewer devices, or passes a step on to another engine; it gets another option on its devices
    (swapped or resident, a smaller cache); a leaf has the next finer or coarser chunks, or all leaves have, or all up to some stage of the
    step, or all after it. The step halves when no change helps, down to the unit of the engines. Last come counts with one pass more or
    fewer over a chunk. All changes are priced at once (`Pricer`), and so are those by all smaller steps.
    """

    def __init__(
        self, book: Book, ways: Mapping[int, tuple[Cut, int]], like: Mapping[EngineId, Option], budget: Budget | None = None
    ) -> None:
        self._book, self._like, self._budget = book, dict(like), budget or Budget()
        self._problem, self._pricer = book.problem, Pricer(book, ways)
        self._leaves, self._engines = self._pricer.leaves, tuple(like)
        self._ways = ways
        self._sizes = dict(zip(self._problem.pools, self._problem.num_devices, strict=True))
        self._known: dict[tuple[EngineId, int], range] = {}
        stage = {calls: _stage_of(self._problem, calls) for calls in self._leaves}
        last = max(stage.values())
        runs = [range(last + 1), *(run for i in range(last) for run in (range(i + 1), range(i + 1, last + 1)))]
        first = 2 * len(self._engines)
        self._runs = [[first + at for at, calls in enumerate(self._leaves) if stage[calls] in run] for run in runs]
        """Where a state has the chunks that change together."""
        self._sizes_of = {first + at: len(book.chunks(calls)) for at, calls in enumerate(self._leaves)}
        """Where a state has a leaf's chunk size, and how many there are."""

    def _rows(self, engine: EngineId, num: int) -> range:
        """The options of an engine on so many devices, in the layout of its replicas."""
        if (engine, num) not in self._known:
            self._known[engine, num] = self._book.rows(engine, self._like[engine], num)
        return self._known[engine, num]

    def climbed(self, step_s: float, starts: list[State], reach: Mapping[str, int]) -> tuple[float, State] | None:
        """The best plan found from these, with its step time; None if none is faster than `step_s`."""
        best: tuple[float, State] | None = None
        left, states, steps_s = dict(reach), starts, self._steps_s(starts, step_s)
        finer = list[tuple[dict[str, int], list[State], FloatArray]]()
        for _ in range(_MOST_CHANGES):
            if best and self._budget.is_over():
                break
            if states:
                self._budget.spend(len(self._ways) * (len(states) + _EACH))
            fastest = int(steps_s.argmin()) if states else -1
            if states and steps_s[fastest] < (best[0] * (1 - 1e-6) if best else step_s):
                best, finer = (float(steps_s[fastest]), states[fastest]), []
                states = list(self._changes(best[1], left) if any(left.values()) else self._rounded(best[1]))
                steps_s = self._steps_s(states, best[0] * (1 - 1e-6))
            elif best is None:
                return None
            elif not any(left.values()):
                break
            else:
                finer = finer or self._finer(best, left)
                left, states, steps_s = finer.pop(0)
        return best

    def _finer(self, best: tuple[float, State], left: Mapping[str, int]) -> list[tuple[dict[str, int], list[State], FloatArray]]:
        """The moves by all smaller steps, with their step times: mostly none is faster, and together they are priced in one go."""
        steps, every = dict(left), list[tuple[dict[str, int], list[State]]]()
        while any(steps.values()):
            steps = {pool: step // 2 // (unit := least_unit(self._problem, pool)) * unit for pool, step in steps.items()}
            every.append((steps, list(self._moves(best[1], steps) if any(steps.values()) else self._rounded(best[1]))))
        steps_s = self._steps_s([state for _, states in every for state in states], best[0] * (1 - 1e-6))
        ends = itertools.accumulate(len(states) for _, states in every)
        return [(steps, states, steps_s[end - len(states) : end]) for (steps, states), end in zip(every, ends, strict=True)]

    def priced(self, states: list[State], known_s: float = np.inf) -> tuple[float, State] | None:
        """The fastest of these plans, if it is faster than known."""
        self._budget.spend(len(self._ways) * (len(states) + _EACH))
        step_s, best = min(zip(self._steps_s(states, known_s).tolist(), range(len(states)), strict=True))
        return (step_s, states[best]) if step_s < known_s else None

    def _steps_s(self, states: list[State], known_s: float) -> FloatArray:
        """Step times of plans; infinite where that is not below `known_s`, and of those that there are not."""
        found = np.full(len(states), np.inf)
        if states:
            every = np.array(states).T
            possible, rows = self._possible(every)
            if len(possible):
                chunks = dict(zip(self._leaves, every[2 * len(self._engines) :].take(possible, 1), strict=True))
                found[possible] = self._pricer.steps_s(rows, chunks, known_s)
        return found

    def _possible(self, every: IntArray) -> tuple[IntArray, dict[EngineId, IntArray]]:
        """The states for which there are devices and options, by index, and the rows of each engine's; `every` is [values, states]."""
        num, legal = len(self._engines), np.ones(every.shape[1], np.bool_)
        for pool, size in self._sizes.items():
            its = {engine: every[i] * (self._like[engine].pool == pool) for i, engine in enumerate(self._engines)}
            legal &= _needed(self._problem, self._ways, its, self._problem.graph.everything, np.maximum) <= size
        found = np.flatnonzero(legal)
        for i, engine in enumerate(self._engines):
            there = self._book.spans(engine, self._like[engine], every[i].take(found))[1]
            found = found[every[num + i].take(found) < there]
        at = {engine: (every[i].take(found), every[num + i].take(found)) for i, engine in enumerate(self._engines)}
        return found, {engine: self._book.spans(engine, self._like[engine], nums)[0] + its for engine, (nums, its) in at.items()}

    def plan(self, state: State) -> tuple[Problem, Node]:
        """A plan, with a problem that has only its options."""
        num = len(self._engines)
        options = {e: self._book.option(e, self._rows(e, state[i])[state[num + i]]) for i, e in enumerate(self._engines)}
        return self._pricer.plan(options, dict(zip(self._leaves, state[2 * num :], strict=True)))

    def starts(self, options: Mapping[EngineId, Sequence[tuple[Option, int]]], chunks: Mapping[int, int]) -> Iterator[State]:
        """Yield plans with options like these; where the leaves of an engine have several counts, with some combinations of these."""
        for one in itertools.islice(itertools.product(*(dict.fromkeys(some) for some in options.values())), 16):
            if start := self.start(dict(zip(options, one, strict=True)), chunks):
                yield start

    def start(self, options: Mapping[EngineId, tuple[Option, int]], chunks: Mapping[int, int]) -> State | None:
        """The plan with options like these on these counts; None if an engine has none there."""
        nums, variants = [], []
        for engine in self._engines:
            like, num = options[engine]
            rows = self._rows(engine, num)
            if not rows:
                num = like.num_devices  # A pin may allow no other.
                if not (rows := self._rows(engine, num)):
                    return None
            nums.append(num)
            variants.append(self._book.variant(engine, rows, like))
        return [*nums, *variants, *(nearest_of(self._book.chunks(calls), chunks[calls]) for calls in self._leaves)]

    def _changes(self, state: State, reach: Mapping[str, int]) -> Iterator[State]:
        yield from self._moves(state, reach)
        for i, engine in enumerate(self._engines):
            at = len(self._engines) + i
            for variant in range(len(self._rows(engine, state[i]))):
                if variant != state[at]:
                    yield [*state[:at], variant, *state[at + 1 :]]
        for step in (1, -1):
            sizes = {at: state[at] + step for at, num in self._sizes_of.items() if 0 <= state[at] + step < num}
            for at, size in sizes.items():
                yield [*state[:at], size, *state[at + 1 :]]
            for some in self._runs:
                together = [at for at in some if at in sizes]
                if len(together) > 1:
                    yield [size + step if at in together else size for at, size in enumerate(state)]

    def _moves(self, state: State, reach: Mapping[str, int]) -> Iterator[State]:
        """Yield plans in which an engine has a step more or fewer devices, or one has what another gives."""
        for i, engine in enumerate(self._engines):
            step = reach[self._like[engine].pool]
            for more in (step, -step) if step else ():
                if moved := self._moved(state, i, more):
                    yield moved
                    for other in range(len(self._engines)) if more > 0 else ():
                        if other != i and (both := self._moved(moved, other, -more)):
                            yield both

    def _rounded(self, state: State) -> Iterator[State]:
        """Yield plans in which an engine has the next count with one pass more or fewer over a chunk, and another makes up for it."""
        steps = [self._to_rounds(i, state) for i in range(len(self._engines))]
        for i, mine in enumerate(steps):
            for more in mine:
                if not (moved := self._moved(state, i, more)):
                    continue
                yield moved
                more = moved[i] - state[i]
                for other, its in enumerate(steps):
                    for less in {-more, *its} if other != i else ():
                        if less * more < 0 and (both := self._moved(moved, other, less)):
                            yield both

    def _to_rounds(self, i: int, state: State) -> set[int]:
        """How many devices more or fewer an engine needs for a pass less or more over a chunk, and how many it does not need."""
        engine, num = self._engines[i], state[i]
        size, found = self._like[engine].layout.num_replica_devices, set[int]()
        for (calls, its), at in zip(self._leaves.items(), state[2 * len(self._engines) :], strict=True):
            for call in self._problem.graph.members(calls) if its == engine else ():
                if not call.num_samples or call.work == "generate":
                    continue
                chunk = min(self._book.chunks(calls)[at], call.num_samples)
                chunk = min(chunk, max(1, call.num_samples // num_minibatches(call))) if call.work == "update" else chunk
                passes = -(-chunk // (num // size))
                found |= {-(-chunk // more) * size - num for more in (passes - 1, passes, passes + 1) if more > 0}
        return found - {0}

    def _moved(self, state: State, i: int, more: int) -> State | None:
        like = self._like[self._engines[i]]
        size = like.layout.num_replica_devices
        num = (state[i] + (max(more, size) if more > 0 else min(more, -size))) // size * size
        return [*state[:i], num, *state[i + 1 :]] if 0 < num <= self._sizes[like.pool] else None


State = list[int]
"""A plan of one structure: the devices of each engine, which of the options there each has, and the index of each leaf's chunk size."""
