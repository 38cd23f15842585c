"""Search between the counts of a grid: the plans that are put together as a good one is, on a few devices more here and fewer there.

    Tables of a quick search --refined--> Tables of plans near its best ones

A grid of device counts has gaps, and of chunk sizes a quick search tries few. Which parts a plan has, and which of them take turns, is
kept (`Solver(within=...)`), and how an engine's replicas are cut; so a round costs a small part of a search: every engine may have a
step more or less than now, in any chunk. The step begins at half of the gap in the grid and is halved from round to round. A local
search: what needs other parts is not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from m2flow.micro.search.calls import Cut
from m2flow.micro.search.dynamic import Solver, Tables
from m2flow.micro.search.options import options_near
from m2flow.micro.search.problem import Problem
from m2flow.micro.search.trees import Leaf, Node, leaves_of, tree_of, ways_of

_ROWS = 16
"""Of a front."""
_MUCH_SLOWER = 1.5
"""Than the best plan: what so small a change does not bring up."""


def candidates(tables: Tables, most: int) -> list[int]:
    """The best rows of as many ways to put parts together."""
    seen: dict[tuple[tuple[Cut, int], ...], int] = {}
    order = np.argsort(tables.steps_s, kind="stable")
    for row in order:
        if tables.steps_s[row] <= _MUCH_SLOWER * tables.steps_s[order[0]]:
            seen.setdefault(tuple(ways_of(tables, int(row)).values()), int(row))
        if len(seen) == most:
            break
    return list(seen.values())


def refined(tables: Tables, row: int, *, num_rounds: int, slack_s: float) -> Iterator[Tables]:
    """Round by round, the plans near that of a row, and then near the best one so far; rounds that find nothing better are left out."""
    problem, within = tables.problem, ways_of(tables, row)
    node, step_s = tree_of(tables, row), float(tables.steps_s[row])
    sizes = dict(zip(problem.pools, problem.num_devices, strict=True))
    units = {pool: _unit(problem, pool) for pool in problem.pools}
    reach = {pool: _reach((problem.counts or {}).get(pool, ()), _used(node, pool), units[pool]) for pool in problem.pools}
    for _ in range(num_rounds):
        if not any(reach.values()):
            return
        places = {
            leaf.engine: (leaf.option.pool, leaf.option.layout, _around(leaf, reach[leaf.option.pool], sizes[leaf.option.pool]))
            for leaf in leaves_of(node)
        }
        near = problem.with_options(options_near(places, problem.costs, problem.spec))
        if all(near.options.of.values()):
            found = Solver(near, step_s, slack_s=slack_s, most_rows=_ROWS, within=within).solve()
            if len(found.steps_s) and found.steps_s.min() < step_s:
                yield found
                best = int(np.argmin(found.steps_s))
                node, step_s = tree_of(found, best), float(found.steps_s[best])
        reach = {pool: step // 2 // units[pool] * units[pool] for pool, step in reach.items()}


def _used(node: Node, pool: str) -> set[int]:
    return {leaf.option.num_devices for leaf in leaves_of(node) if leaf.option.pool == pool}


def _unit(problem: Problem, pool: str) -> int:
    units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
    return min(units, default=1)


def _reach(grid: Sequence[int], used: set[int], unit: int) -> int:
    """Half of the widest gap beside a count in use."""
    gaps = [after - before for before, after in itertools.pairwise(grid) if used & {before, after}]
    return max(gaps, default=0) // 2 // unit * unit


def _around(leaf: Leaf, reach: int, size: int) -> list[int]:
    """An engine's count of devices, and a step more and less."""
    count = leaf.option.num_devices
    return sorted({count} | {near for near in (count - reach, count + reach) if 0 < near <= size})
