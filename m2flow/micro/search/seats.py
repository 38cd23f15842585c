"""Which devices each engine of a plan gets: the tree says how many, and who shares them.

    Node --places_of--> first device of each engine, --seats_of--> Seats with their leases

Parts of a split lie next to each other, in either order; parts that take turns lie over each other. An engine has one place in all
of its calls, and a pinned one that of its pin: the orders are tried until all of this holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.choice import Mode, Seat
from m2flow.micro.search.dynamic import LENT
from m2flow.micro.search.options import pin_of
from m2flow.micro.search.problem import Problem, outside_call
from m2flow.micro.search.trees import Leaf, Node, Pair, leaves_of, lent_of

Block = dict[str, tuple[int, int]]
"""Pool -> the first device and the one after the last."""
Places = dict[EngineId, int]

_MOST_PLACES = 256
"""Orders of the parts of one plan that are looked at."""


def places_of(problem: Problem, node: Node) -> Places | None:
    """The first device of each engine; None if its places contradict each other, or nobody can stand in for engines on lent devices."""
    whole = {pool: (0, num) for pool, num in zip(problem.pools, problem.num_devices, strict=True)}
    pins = {e: pin.devices[0] for e in problem.workload.engines if (pin := pin_of(e, problem.spec)).devices is not None}
    if not _leaves_room_beside_loans(node, whole):
        return None
    every = itertools.islice(_placed(node, whole, {}, pins), _MOST_PLACES)
    return next((places for places in every if _has_stand_ins(node, places)), None)


def _leaves_room_beside_loans(node: Node, whole: Block) -> bool:
    """Whether every engine has room beside the rollout instances that nobody lends devices to: else no places need to be tried."""
    need = {leaf.engine: (leaf.option.pool, leaf.option.num_devices) for leaf in leaves_of(node)}
    for lender, borrower in _loans(node):
        pool, num = need[borrower]
        left = whole[pool][1] - (num - need[lender][1])
        if any(place[0] == pool and place[1] > left for other, place in need.items() if other not in (lender, borrower)):
            return False
    return True


def _has_stand_ins(node: Node, places: Places) -> bool:
    """Whether rollout instances on devices that nobody lends share them with nobody: these must not wait for the lease."""
    at = {leaf.engine: (leaf.option.pool, places[leaf.engine], leaf.option.num_devices) for leaf in leaves_of(node)}
    for lender, borrower in _loans(node):
        pool, low, num = at[borrower]
        first, past = at[lender][1], at[lender][1] + at[lender][2]
        own = [(pool, low, first - low), (pool, past, low + num - past)]
        if any(_overlap(at[other], part) for other in at if other not in (lender, borrower) for part in own):
            return False
    return True


def _loans(node: Node) -> Iterator[tuple[EngineId, EngineId]]:
    """(who lends, to whom)."""
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
    """The second one's devices are some of the first one's instances."""
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
    """With what neither needs on the right, or on the left if there is any."""
    after = {pool: low + left.get(pool, 0) for pool, (low, _) in block.items()}
    before = {pool: high - right.get(pool, 0) for pool, (_, high) in block.items()}
    for border in (after, before) if after != before else (after,):
        yield (
            {pool: (low, border[pool]) for pool, (low, _) in block.items()},
            {pool: (border[pool], high) for pool, (_, high) in block.items()},
        )


def seats_of(node: Node, places: Places) -> tuple[Seat, ...]:
    """In the order of the plan."""
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
    """Engine -> the lease of all whose devices overlap, directly or by others; nothing for an engine that is alone on its own."""
    groups: list[list[EngineId]] = []
    for engine, place in places.items():
        met = [group for group in groups if any(_overlap(place, places[other]) for other in group)]
        groups = [group for group in groups if group not in met] + [[engine, *(e for group in met for e in group)]]
    shared = sorted((group for group in groups if len(group) > 1), key=lambda group: min((places[e][0], places[e][1]) for e in group))
    return {engine: f"lease-{i}" for i, group in enumerate(shared) for engine in group}


def _overlap(a: tuple[str, int, int], b: tuple[str, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]


def mode_of(seats: Sequence[Seat]) -> Mode:
    """By the devices: all engines on common ones, none, or something between."""
    engines = {seat.engine: (seat.pool, seat.first_device, seat.num_devices) for seat in seats}
    pairs = [(a, b) for a in engines for b in engines if a < b]
    num_shared = sum(_overlap(engines[a], engines[b]) for a, b in pairs)
    if num_shared == len(pairs) and not any(seat.lent_until for seat in seats):
        return "time-shared"
    return "hybrid" if num_shared else "split"
