"""Find the best plan: what `m2flow plan` asks.

    Workload, lengths, Costs, ClusterSpec --find_plan--> Choice

First a quick search: the most promising rows of each front, on a grid of device counts where there are many; near the best plans of
that, then, between the counts of the grid (refining.py). Where devices and calls are few, an exact one (dynamic.py) follows, that drops
what can't be as fast as the plan found; it is given up when it grows too large, and the choice then says by how much a better plan might
be faster, reckoned from the lower bounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from m2flow.errors import PlanError
from m2flow.macro.collecting import seldom_collecting
from m2flow.micro.costs.terms import Costs
from m2flow.micro.lowering.abilities import can_move
from m2flow.micro.search.advising import advice_of, bounds_of, why_lost
from m2flow.micro.search.ahead import coming_ahead
from m2flow.micro.search.batches import Draws
from m2flow.micro.search.choice import Bound, Choice, Loser, Mode
from m2flow.micro.search.dynamic import LENT, SPLIT, TURNS, Solver, Tables, TooLarge
from m2flow.micro.search.lending import WORTH
from m2flow.micro.search.limits import Limits
from m2flow.micro.search.problem import Problem
from m2flow.micro.search.refining import candidates, refined
from m2flow.micro.search.seats import Places, mode_of, places_of, seats_of
from m2flow.micro.search.thinning import thin
from m2flow.micro.search.trees import Node, parts_of, step_s, tree_of, ways_of
from m2flow.micro.search.workload import Workload
from m2flow.spec import ClusterSpec

_MANY_DEVICES = 32
"""Units of devices above which a grid of counts is searched."""
_MOST_DEVICES = 512
"""Units above which the first plan found will do."""
_MOST_CHUNKS = 4
_ROWS, _MORE_ROWS = 16, 64
"""Of a front, in a quick search; where memory is short, fronts need more of them, and where devices are few there is time for it."""
_FEW_ROUNDS, _ROUNDS, _CANDIDATES = 2, 5, 3
"""Of a search between the counts of the grid: halvings of the step, and ways to put parts together."""
_SLACK = 1e-3
"""Of the time of the step: what a quick search takes for equal."""
_MOST_PAIRS = 1e6
_MOST_OPTIONS = 100
"""Of rows, and of options of all engines, in an exact search: some seconds."""


@dataclass(frozen=True)
class Found:
    """A plan."""

    problem: Problem
    node: Node
    places: Places
    step_s: float
    is_exact: bool
    bounds: tuple[Bound, ...]
    """Of all options that were looked at."""

    @property
    def mode(self) -> Mode:
        return mode_of(seats_of(self.node, self.places))


def find_plan(workload: Workload, lengths: Draws, costs: Costs, spec: ClusterSpec, *, is_alone: bool = False) -> Choice:
    """The plan with the least predicted time of a step.

    Args:
        workload: the calls of a step.
        lengths: of prompts and answers.
        costs: of this workload's engines on this cluster.
        spec: its pools, pins and whether engines may go to the host's memory.
        is_alone: leave out what other plans would take: those of other modes, and those without a pin.
    Raises:
        PlanError: nothing fits, or nothing does that the pins allow; what is short, and what would fit.
    """
    started = time.perf_counter()
    problem = Problem(workload, lengths, costs, spec)
    found = best_plan(problem)
    search_s = time.perf_counter() - started
    seats, parts = coming_ahead(found.problem, seats_of(found.node, found.places)), parts_of(problem, found.node)
    bounds = found.bounds
    gap_s = 0.0 if found.is_exact else max(0.0, found.step_s - max((bound.seconds for bound in bounds), default=0.0))
    return Choice(
        flow=workload.flow,
        cluster=spec.name,
        mode=mode_of(seats),
        seats=seats,
        predicted_step_s=found.step_s,
        parts=parts,
        bounds=bounds,
        is_exact=found.is_exact,
        gap_s=gap_s,
        advice=advice_of(found.problem, found.node, parts, bounds),
        losers=() if is_alone else tuple(_losers(found)),
        search_s=search_s,
        constraints_cost_s={} if is_alone else _constraints(found),
        constants=costs.constants(),
    )


def best_plan(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT)) -> Found:
    """The best plan with these ways to put parts together.

    Raises:
        PlanError: there is none.
    """
    with seldom_collecting():
        return _best_plan(problem, hows)


def _best_plan(problem: Problem, hows: Sequence[int]) -> Found:
    units = _num_units(problem)
    is_small = units <= _MANY_DEVICES
    rough = Problem(problem.workload, problem.lengths, problem.costs, problem.spec, None if is_small else grid_of(problem), _MOST_CHUNKS)
    rough.check()
    slack_s = _SLACK * max(Limits(rough).path_s(), 1e-9)
    bounds = bounds_of(rough)
    thin(rough, slack_s)
    quick = None
    for rows in (_ROWS, _MORE_ROWS, 4 * _MORE_ROWS):
        known_s = quick.step_s if quick else np.inf
        tables = Solver(rough, known_s, slack_s=slack_s, most_rows=rows, hows=hows).solve()
        more = _best_of(tables, bounds, is_exact=False)
        if not is_small:
            more = _near(tables, more, slack_s, units)
        quick = min((one for one in (quick, more) if one), key=lambda one: one.step_s, default=None)
        if quick and (rows == _MORE_ROWS or units > _MOST_DEVICES):
            break
    exact = _exact(problem, quick, hows) if is_small else None
    found = exact or quick
    if found is None:
        raise problem.no_room()
    lends = len(hows) > 1 and problem.spec.lend == "auto" and not problem.workload.staleness
    lent = _lent(rough, found, slack_s, _MORE_ROWS if is_small else _ROWS) if lends and can_move(problem.spec.rollout.engine) else None
    return lent or found


def _lent(rough: Problem, found: Found, slack_s: float, most_rows: int) -> Found | None:
    """The best plan that lends a trainer's devices to rollout, of those that a quick search keeps; None where it is not worth it."""
    worth_s = found.step_s * (1 - WORTH)
    tables = Solver(rough, worth_s, slack_s=slack_s, most_rows=most_rows, hows=(TURNS, SPLIT, LENT)).solve()
    for row in np.argsort(tables.steps_s, kind="stable"):
        if tables.steps_s[row] > worth_s:
            return None
        if LENT in {how for _, how in ways_of(tables, int(row)).values()}:
            node = tree_of(tables, int(row))
            places = places_of(rough, node)
            if places is not None:
                return Found(rough, node, places, step_s(rough, node), False, found.bounds)
    return None


def _near(tables: Tables, found: Found | None, slack_s: float, units: int) -> Found | None:
    """The best plan between the counts of the grid, near the best ones on it."""
    num_rounds, most = (_FEW_ROUNDS, 1) if units > _MOST_DEVICES else (_ROUNDS, _CANDIDATES)
    for row in candidates(tables, most) if found else ():
        best_s = found.step_s if found else np.inf
        for more in refined(tables, row, num_rounds=num_rounds, slack_s=slack_s):
            if more.steps_s.min() < best_s:
                one = _best_of(more, bounds_of(more.problem), is_exact=False)
                if one and found and one.step_s < found.step_s:
                    bounds = tuple(min(pair, key=lambda bound: bound.seconds) for pair in zip(found.bounds, one.bounds, strict=True))
                    found = replace(one, bounds=bounds)
                    best_s = found.step_s
    return found


def _exact(problem: Problem, quick: Found | None, hows: Sequence[int]) -> Found | None:
    """None where that is too much work, or nothing is better and nothing is known."""
    full = Problem(problem.workload, problem.lengths, problem.costs, problem.spec)
    bounds = bounds_of(full)
    is_all = thin(full)
    if sum(map(len, full.options.of.values())) > _MOST_OPTIONS:
        return None
    try:
        tables = Solver(full, quick.step_s if quick else np.inf, most_pairs=_MOST_PAIRS, hows=hows).solve()
    except TooLarge:
        return None
    return _best_of(tables, bounds, is_exact=is_all)


def _best_of(tables: Tables, bounds: tuple[Bound, ...], *, is_exact: bool) -> Found | None:
    try:
        node, places, loss_s = best_of(tables)
    except PlanError:
        return None
    return Found(tables.problem, node, places, step_s(tables.problem, node), is_exact and not loss_s, bounds)


def best_of(tables: Tables) -> tuple[Node, Places, float]:
    """The best plan that has places for all, and what it takes more than the best without asking for places.

    Raises:
        PlanError: there is none.
    """
    for row in np.argsort(tables.steps_s, kind="stable"):
        node = tree_of(tables, int(row))
        places = places_of(tables.problem, node)
        if places is not None:
            return node, places, float(tables.steps_s[row] - tables.steps_s.min())
    raise tables.problem.no_room()


def _num_units(problem: Problem) -> int:
    """Devices of all pools, counted in the least unit of any engine."""
    num = 0
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
        num += size // min(units, default=size)
    return num


def grid_of(problem: Problem) -> dict[str, Sequence[int]]:
    """Device counts of each pool: halves of halves, what they leave, and all but the smallest unit."""
    found: dict[str, Sequence[int]] = {}
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
        least = min(units, default=1)
        counts, part = {size, size - least, least}, size // 2
        while part >= max(least, size // 16):
            counts |= {part, size - part}
            part //= 2
        found[pool] = sorted(counts - {0})
    return found


def _losers(found: Found) -> list[Loser]:
    """The best plans of the other modes."""
    rivals: dict[Mode, Found] = {}
    for hows in ((TURNS,), (SPLIT,)):
        try:
            rival = best_plan(found.problem, hows)
        except PlanError:
            continue
        rivals.setdefault(rival.mode, rival)
    if found.mode != "hybrid" and "hybrid" not in rivals and (mixed := _best_mixed(found.problem)) is not None:
        rivals["hybrid"] = mixed
    rivals.pop(found.mode, None)
    return [Loser(mode, rival.step_s, why_lost(found.problem, found.node, rival.problem, rival.node)) for mode, rival in rivals.items()]


def _best_mixed(problem: Problem) -> Found | None:
    """The best plan in which some engines take turns and others are apart, of those that a quick search keeps; None: there is none."""
    counts = None if _num_units(problem) <= _MANY_DEVICES else grid_of(problem)
    rough = Problem(problem.workload, problem.lengths, problem.costs, problem.spec, counts, _MOST_CHUNKS)
    slack_s = _SLACK * max(Limits(rough).path_s(), 1e-9)
    thin(rough, slack_s)
    tables = Solver(rough, slack_s=slack_s, most_rows=_MORE_ROWS).solve()
    for row in np.argsort(tables.steps_s, kind="stable"):
        if {how for _, how in ways_of(tables, int(row)).values()} == {TURNS, SPLIT}:
            node = tree_of(tables, int(row))
            places = places_of(rough, node)
            if places is not None and mode_of(seats_of(node, places)) == "hybrid":
                return Found(rough, node, places, step_s(rough, node), False, ())
    return None


def _constraints(found: Found) -> dict[str, float]:
    """Each constraint of the spec -> what the best plan without it would save."""
    spec = found.problem.spec
    without = {f"pin {name}": spec.model_copy(update={"pin": {n: p for n, p in spec.pin.items() if n != name}}) for name in spec.pin}
    if not spec.may_offload:
        without["may_offload: false"] = spec.model_copy(update={"may_offload": True})
    if spec.lend == "never":
        without["lend: never"] = spec.model_copy(update={"lend": "auto"})
    problem = found.problem
    free = {name: best_plan(Problem(problem.workload, problem.lengths, problem.costs, other)) for name, other in without.items()}
    return {name: max(0.0, found.step_s - plan.step_s) for name, plan in free.items()}
