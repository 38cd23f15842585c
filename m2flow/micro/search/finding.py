"""Find the best plan: what `m2flow plan` asks.

    Workload, lengths, Costs, ClusterSpec --find_plan--> Choice

First a quick search: the most promising rows of each front, on a grid of device counts where there are many; near the best plans of
that, then, between the counts of the grid (refining.py). Where devices and calls are few, an exact one (dynamic.py) follows, that drops
what can't be as fast as the plan found; it is given up when it grows too large, and the choice then says by how much a better plan might
be faster, reckoned from the lower bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
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
from m2flow.micro.search.options import Options, pin_of, pinned_counts
from m2flow.micro.search.problem import Problem
from m2flow.micro.search.refining import candidates, refined
from m2flow.micro.search.seats import Places, mode_of, places_of, seats_of
from m2flow.micro.search.thinning import thin
from m2flow.micro.search.trees import Node, leaves_of, parts_of, step_s, tree_of, ways_of
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
_ROUNDING = 1e-9
"""Relative: of two plans that are equal up to so much, one that is known to be the best is taken."""
_NEARLY = 1.02
"""Times as long as the best plan, at most: what a better chunk may make the best."""
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


def find_plan(
    workload: Workload,
    lengths: Draws,
    costs: Costs,
    spec: ClusterSpec,
    *,
    is_alone: bool = False,
    check: Callable[[Choice], object] | None = None,
) -> Choice:
    """The plan with the least predicted time of a step, of all that were looked at and can be run.

    Args:
        workload: the calls of a step.
        lengths: of prompts and answers.
        costs: of this workload's engines on this cluster.
        spec: its pools, pins and whether engines may go to the host's memory.
        is_alone: leave out what other plans would take: those of other modes, and those without a pin.
        check: raises PlanError for a choice that can't be run; the next best is taken instead, and the choice says so.
    Raises:
        PlanError: nothing fits, or nothing does that the pins allow; what is short, and what would fit. Or `check` refuses all.
    """
    started = time.perf_counter()
    problem = Problem(workload, lengths, costs, spec)
    plans, refused = list[Found](), list[tuple[Found, PlanError]]()
    for found in best_plans(problem):
        try:
            if check is not None and not (is_alone and plans):
                check(_choice(found))
            plans.append(found)
        except PlanError as error:
            refused.append((found, error))
    if not plans:
        raise refused[0][1]
    found, search_s = plans[0], time.perf_counter() - started
    not_tried = (
        *problem.graph.not_tried,
        *(f"a {plan.mode} plan of {plan.step_s:.4g} s, which can't be run: {error.what}" for plan, error in refused),
    )
    return msgspec.structs.replace(
        _choice(found),
        losers=() if is_alone else tuple(_losers(plans)),
        search_s=search_s,
        constraints_cost_s={} if is_alone else _constraints(found),
        not_tried=not_tried,
    )


def _choice(found: Found) -> Choice:
    """A plan by itself, not compared with others."""
    problem = found.problem
    seats, parts = coming_ahead(problem, seats_of(found.node, found.places)), parts_of(problem, found.node)
    gap_s = 0.0 if found.is_exact else max(0.0, found.step_s - max((bound.seconds for bound in found.bounds), default=0.0))
    return Choice(
        flow=problem.workload.flow,
        cluster=problem.spec.name,
        mode=mode_of(seats),
        seats=seats,
        predicted_step_s=found.step_s,
        parts=parts,
        bounds=found.bounds,
        is_exact=found.is_exact,
        gap_s=gap_s,
        advice=advice_of(problem, found.node, parts, found.bounds),
        losers=(),
        search_s=0.0,
        constraints_cost_s={},
        constants=problem.costs.constants(),
    )


def best_plan(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT)) -> Found:
    """The best plan with these ways to put parts together.

    Raises:
        PlanError: there is none.
    """
    return best_plans(problem, hows)[0]


def best_plans(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT)) -> list[Found]:
    """The best plans of several searches, the fastest first: a free one, one that is confined to each mode, and one that lends devices.

    A quick search keeps some of the rows only, so that a free one may lose what one that has less to look at finds.

    Raises:
        PlanError: there is none.
    """
    with seldom_collecting():
        search = _Search.of(problem)
        several = len(hows) > 1
        tried = [(search.best(hows), hows)]
        tried += [(search.best((TURNS,)), (TURNS,)), (search.best((SPLIT,)), (SPLIT,)), (search.mixed(), hows)] if several else []
        some = [(one, by) for one, by in tried if one is not None]
        if not some:
            raise problem.no_room()
        near_s = min(one.step_s for one, _ in some) * _NEARLY
        found = [search.in_all_chunks(one, by) if one.step_s <= near_s else one for one, by in some]
        found.sort(key=lambda one: one.step_s * (1 - _ROUNDING * one.is_exact))
        if several and search.lends:
            lent = search.lent(found[0])
            found = [lent, *found] if lent else found
        bounds = tuple(min(alike, key=lambda bound: bound.seconds) for alike in zip(*(one.bounds for one in found), strict=True))
        return [replace(one, bounds=bounds) for one in found]


@dataclass(frozen=True)
class _Search:
    """One question, and what all searches for its answer share."""

    problem: Problem
    rough: Problem
    """On a grid of device counts, if there are many, with few sizes of chunks, and thinned out."""
    bounds: tuple[Bound, ...]
    units: int
    slack_s: float

    @classmethod
    def of(cls, problem: Problem) -> _Search:
        """
        Raises:
            PlanError: some engine fits nowhere.
        """
        units = _num_units(problem)
        grid = None if units <= _MANY_DEVICES else grid_of(problem)
        rough = Problem(problem.workload, problem.lengths, problem.costs, problem.spec, grid, _MOST_CHUNKS)
        rough.check()
        slack_s = _SLACK * max(Limits(rough).path_s(), 1e-9)
        bounds = bounds_of(rough)
        thin(rough, slack_s)
        return cls(problem, rough, bounds, units, slack_s)

    @property
    def is_small(self) -> bool:
        return self.units <= _MANY_DEVICES

    @property
    def lends(self) -> bool:
        """Whether a trainer's devices may be lent to rollout."""
        spec = self.problem.spec
        return spec.lend == "auto" and not self.problem.workload.staleness and can_move(spec.rollout.engine)

    def best(self, hows: Sequence[int]) -> Found | None:
        """The best plan with these ways to put parts together; None: there is none."""
        quick = None
        for rows in (_ROWS, _MORE_ROWS, 4 * _MORE_ROWS):
            known_s = quick.step_s if quick else np.inf
            tables = Solver(self.rough, known_s, slack_s=self.slack_s, most_rows=rows, hows=hows).solve()
            more = _best_of(tables, self.bounds, is_exact=False)
            if not self.is_small:
                more = _near(tables, more, self.slack_s, self.units)
            quick = min((one for one in (quick, more) if one), key=lambda one: one.step_s, default=None)
            if quick and (rows == _MORE_ROWS or self.units > _MOST_DEVICES):
                break
        exact = self._exact(quick, hows) if self.is_small else None
        return exact or quick

    def in_all_chunks(self, found: Found, hows: Sequence[int]) -> Found:
        """The best plan with the same place for each engine, of which all sizes of chunks are tried."""
        if found.is_exact:
            return found
        here = found.problem.with_options(Options({leaf.engine: [leaf.option] for leaf in leaves_of(found.node)}))
        tables = Solver(here, found.step_s, most_rows=_MORE_ROWS, hows=hows).solve()
        more = _best_of(tables, found.bounds, is_exact=False)
        return more if more and more.mode == found.mode and more.step_s < found.step_s else found

    def _exact(self, quick: Found | None, hows: Sequence[int]) -> Found | None:
        """None where that is too much work, or nothing is better and nothing is known."""
        full, bounds, is_all = self._full
        if sum(map(len, full.options.of.values())) > _MOST_OPTIONS:
            return None
        try:
            tables = Solver(full, quick.step_s if quick else np.inf, most_pairs=_MOST_PAIRS, hows=hows).solve()
        except TooLarge:
            return None
        return _best_of(tables, bounds, is_exact=is_all and not full.graph.not_tried)

    @cached_property
    def _full(self) -> tuple[Problem, tuple[Bound, ...], bool]:
        """With all options that a plan may need, their bounds, and whether it is sure that no plan needs another."""
        full = Problem(self.problem.workload, self.problem.lengths, self.problem.costs, self.problem.spec)
        bounds = bounds_of(full)
        return full, bounds, thin(full)

    def mixed(self) -> Found | None:
        """The best plan in which some engines take turns and others are apart, of those that a quick search keeps; None: there is none."""
        tables = Solver(self.rough, slack_s=self.slack_s, most_rows=_MORE_ROWS).solve()
        tables = _only(tables, lambda hows: hows == {TURNS, SPLIT})
        found = next((one for one in self._found(tables) if one.mode == "hybrid"), None)
        near = found if self.is_small else _near(tables, found, self.slack_s, self.units)
        return near if near and near.mode == "hybrid" else found

    def lent(self, known: Found) -> Found | None:
        """The best plan that lends a trainer's devices to rollout, of those that a quick search keeps; None where it is not worth it."""
        worth_s, rows = known.step_s * (1 - WORTH), _MORE_ROWS if self.is_small else _ROWS
        tables = Solver(self.rough, worth_s, slack_s=self.slack_s, most_rows=rows, hows=(TURNS, SPLIT, LENT)).solve()
        found = next(self._found(_only(tables, lambda hows: LENT in hows)), None)
        return found if found and found.step_s <= worth_s else None

    def _found(self, tables: Tables) -> Iterator[Found]:
        """The plans of all rows that have places, the fastest first."""
        for row in np.argsort(tables.steps_s, kind="stable"):
            if tables.steps_s[row] == np.inf:
                return
            node = tree_of(tables, int(row))
            places = places_of(tables.problem, node)
            if places is not None:
                yield Found(tables.problem, node, places, step_s(tables.problem, node), False, self.bounds)


def _only(tables: Tables, is_wanted: Callable[[set[int]], bool]) -> Tables:
    """The tables, in which plans that are put together in other ways take for ever."""
    hows = ({how for _, how in ways_of(tables, row).values()} for row in range(len(tables.steps_s)))
    wanted = np.fromiter(map(is_wanted, hows), np.bool_, len(tables.steps_s))
    return replace(tables, steps_s=np.where(wanted, tables.steps_s, np.inf))


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
    """Device counts of each pool: halves of halves, what they leave, all but the smallest unit; those of pins, and what these leave."""
    found: dict[str, Sequence[int]] = {}
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
        least = min(units, default=1)
        counts, part = {size, size - least, least}, size // 2
        while part >= max(least, size // 16):
            counts |= {part, size - part}
            part //= 2
        for engine in problem.workload.engines:
            counts |= {part for num in pinned_counts(pin_of(engine, problem.spec), size) for part in (num, size - num)}
        found[pool] = sorted(counts - {0})
    return found


def _losers(plans: Sequence[Found]) -> list[Loser]:
    """The best plans of the other modes; `plans` begin with the best of all."""
    best, rivals = plans[0], dict[Mode, Found]()
    for plan in plans:
        if plan.mode != best.mode:
            rivals.setdefault(plan.mode, plan)
    return [Loser(mode, rival.step_s, why_lost(best.problem, best.node, rival.problem, rival.node)) for mode, rival in rivals.items()]


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
