"""Search for the fastest plan of a flow on a cluster: quick searches on a grid, refinement between its points, an exact search if small.

    Workload, lengths, Costs, ClusterSpec --find_plan--> Choice

First a quick search keeps the most promising rows of each front (`dynamic_program`), on a grid of device counts where there are many. Then
refinement searches near the best plans between the counts of the grid: the structure of a plan (its parts, and which of them take turns)
and the layout of an engine's replicas are kept (`Solver(within=...)`), so a round costs a small part of a search; every engine may have a
step more or fewer devices than now, in any chunk size. The step begins at half of the gap in the grid and halves from round to round.
This is a local search: plans of another structure are not found. Where devices and calls are few, an exact search follows that drops what
can't be as fast as the plan found. It is given up when it grows too large; the choice then says by how much a better plan might be
faster, from the lower bounds.

The search also derives from the plan found:

- `with_early_onload`: the share p of ended samples at which a trainer may be onloaded beside a co-located rollout,

      at share p: weights + activations + cache of the remaining samples + what the trainer keeps <= 0.95 memory

  counting each remaining sample as long as the longest, and each instance with its part of them, rounded up. So the onload costs no time of
  the step if the rest of the rollout takes that long; the search itself does not count on it. Limits: for a lease of one rollout engine
  with several instances and one trainer, with no lent devices, and engines that can shrink their KV cache meanwhile. A single instance on
  the trainer's own devices shares its process, which does one thing at a time.
- `bounds_of`, `advice_of`, `why_lost`: lower bounds, what limits the step, and why other plans are slower. All numbers are those of the
  plans and of the bounds; the text only names the largest.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from m2flow.errors import PlanError
from m2flow.macro.session import infrequent_gc
from m2flow.micro.lowering.capabilities import can_shrink_kv_cache
from m2flow.micro.lowering.placement import share_a_process
from m2flow.micro.protocol.cost_terms import Costs, EngineId
from m2flow.micro.protocol.plan import Bound, CallWork, Choice, Loser, Mode, Part, Seat
from m2flow.planner.dynamic_program import LENT, SPLIT, TURNS, WORTH, Limits, Solver, Tables, TooLarge, memory_price, prune_options
from m2flow.planner.plan_tree import (
    REST,
    Leaf,
    Node,
    Places,
    floors_s,
    leaves_of,
    mode_of,
    parts_of,
    places_of,
    seats_of,
    step_s,
    tree_of,
    ways_in,
    ways_of,
)
from m2flow.planner.problem import Cut, Options, Problem, call_times, instances, options_near, pin_of
from m2flow.planner.workload import CallLoad, Draws, Workload
from m2flow.spec import ClusterSpec, PinSpec

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


# ---- refinement between the counts of the grid

_ROWS = 16
"""Rows kept of a front."""
_MUCH_SLOWER = 1.5
"""Step time relative to the best plan beyond which refinement is not worth trying."""
_NEAR = 1.1
"""The same where only the best plan is asked for."""


def candidates(tables: Tables, most: int) -> list[int]:
    """The best rows of different structures, at most `most` of them."""
    seen: dict[tuple[tuple[Cut, int], ...], int] = {}
    order = np.argsort(tables.steps_s, kind="stable")
    for row in order:
        if tables.steps_s[row] <= _MUCH_SLOWER * tables.steps_s[order[0]]:
            seen.setdefault(tuple(ways_of(tables, int(row)).values()), int(row))
        if len(seen) == most:
            break
    return list(seen.values())


def refined(tables: Tables, row: int, *, num_rounds: int, slack_s: float) -> Iterator[Tables]:
    """Search near the plan of a row, then near the best so far, round by round; yields the tables of rounds that find a better plan."""
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
    """Half of the widest gap in the grid next to a count in use."""
    gaps = [after - before for before, after in itertools.pairwise(grid) if used & {before, after}]
    return max(gaps, default=0) // 2 // unit * unit


def _around(leaf: Leaf, reach: int, size: int) -> list[int]:
    """An engine's number of devices, and a step more and less."""
    count = leaf.option.num_devices
    return sorted({count} | {near for near in (count - reach, count + reach) if 0 < near <= size})


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


# ---- the search

_MANY_DEVICES = 32
"""Units of devices above which a grid of counts is searched."""
_MOST_DEVICES = 512
"""Units above which the first plan found is taken."""
_MOST_CHUNKS = 4
_MOST_ROWS, _MORE_ROWS = 16, 56
"""Rows kept of a front in a quick search; more where memory is short, which needs them, and where devices are few."""
_FEW_PAIRS = 40_000
"""Pairs of rows of all cuts, from which the number of rows of the last search follows above `_MOST_DEVICES`."""
_MOST_MOVES = 8
"""Rounds of moves of single engines after the search."""
_FEW_ROUNDS, _ROUNDS, _CANDIDATES = 2, 5, 3
"""Rounds of the refinement (few of them above `_MOST_DEVICES`), and structures to refine."""
_SLACK = 1e-3
"""Relative difference in step time that a quick search takes for equal."""
_ROUNDING = 1e-9
"""Relative difference up to which two plans are equal; the one known to be optimal is taken."""
_NEARLY = 1.02
"""Step time relative to the best plan up to which better chunk sizes may make a plan the best."""
_MOST_PAIRS = 1e6
_MOST_OPTIONS = 100
"""Most pairs of rows, and options of all engines, in an exact search: some seconds."""


@dataclass(frozen=True)
class Found:
    """A plan that a search found, with its tree, its places and its bounds."""

    problem: Problem
    node: Node
    places: Places
    step_s: float
    is_exact: bool
    bounds: tuple[Bound, ...]
    """Bounds over all options searched."""

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
    """Find the plan with the least predicted step time among all that were searched and can be run.

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
    for found in best_plans(problem, is_alone=is_alone):
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
    """Describe a plan by itself, not compared with others."""
    problem = found.problem
    seats, parts = with_early_onload(problem, seats_of(found.node, found.places)), parts_of(problem, found.node)
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
        works=tuple(works_of(problem, found.node, parts)),
        interval_s=interval_of(problem, parts),
    )


def best_plan(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT)) -> Found:
    """Find the best plan with these ways to combine parts.

    Raises:
        PlanError: there is none.
    """
    return best_plans(problem, hows, is_alone=True)[0]


def best_plans(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT), *, is_alone: bool = False) -> list[Found]:
    """Find the best plans of several searches, fastest first: unconstrained, confined to each mode, and with lent devices.

    A quick search keeps some of the rows only, so that a free one may lose what one that has less to look at finds.

    Raises:
        PlanError: there is none.
    """
    with infrequent_gc():
        search = _Search.of(problem)
        found = search.finished(search.of_modes(is_alone=is_alone) if len(hows) > 1 else [(search.best(hows), hows)])
        if not found:
            raise problem.no_room()
        if len(hows) > 1 and search.lends:
            lent = search.lent(found[0])
            found = [lent, *found] if lent else found
        bounds = tuple(min(alike, key=lambda bound: bound.seconds) for alike in zip(*(one.bounds for one in found), strict=True))
        return [replace(one, bounds=bounds) for one in found]


@dataclass(frozen=True)
class _Search:
    """A problem with the state that its searches share."""

    problem: Problem
    rough: Problem
    """The problem on a grid of device counts, with few chunk sizes and without dominated options."""
    bounds: tuple[Bound, ...]
    units: int
    slack_s: float
    price: float
    """Of memory that is kept (`memory_price`)."""

    @classmethod
    def of(cls, problem: Problem) -> _Search:
        """
        Raises:
            PlanError: some engine fits nowhere.
        """
        units = _num_units(problem)
        grid = None if units <= _MANY_DEVICES else grid_of(problem)
        rough = problem.on_grid(grid, _MOST_CHUNKS)
        rough.check()
        slack_s = _SLACK * max(Limits(rough).path_s(), 1e-9)
        bounds = bounds_of(rough)
        prune_options(rough, slack_s)
        return cls(problem, rough, bounds, units, slack_s, memory_price(rough))

    @property
    def is_small(self) -> bool:
        return self.units <= _MANY_DEVICES

    @property
    def lends(self) -> bool:
        """Whether a trainer's devices may be lent to rollout."""
        spec = self.problem.spec
        return spec.lend == "auto" and not self.problem.workload.staleness

    def of_modes(self, *, is_alone: bool = False) -> list[tuple[Found | None, Sequence[int]]]:
        """The best plans of searches confined to turns and to splits, of free ones, and the best plan that mixes both. Some may be equal.

        The first searches keep few rows. Those with more rows that follow look only for what is faster than all plans before.

        Args:
            is_alone: only the best of all matters: plans of other modes need not be the best of these.
        """
        free = TURNS, SPLIT
        ways = (TURNS,), (SPLIT,), free
        found: list[tuple[Found | None, Sequence[int]]] = []
        every = {hows: self._tables(hows, np.inf, _MOST_ROWS, self.price) for hows in ways}
        known_s = min(float(tables.steps_s.min(initial=np.inf)) for tables in every.values())
        known = set[tuple[object, ...]]()
        for hows, tables in every.items():
            one = _best_of(tables, self.bounds, is_exact=False)
            seat = _seats_key(one) if one else ()
            if one and not self.is_small and seat not in known and not (is_alone and one.step_s > _NEAR * known_s):
                one = _near(tables, one, self.slack_s, self.units)
            known.add(seat)
            found.append((one, hows))
        if not is_alone:
            found.append((self._mixed(every[free], known_s), free))
        return [*found, *((self.best(hows, found), hows) for hows in (ways if self.units <= _MOST_DEVICES else [free]))]

    def _tables(self, hows: Sequence[int], known_s: float, most_rows: int, price: float) -> Tables:
        return Solver(self.rough, known_s, slack_s=self.slack_s, most_rows=most_rows, hows=hows, price=price).solve()

    def best(self, hows: Sequence[int], known: Sequence[tuple[Found | None, Sequence[int]]] = ()) -> Found | None:
        """The best plan with these ways to combine parts; None if there is none, or none that is faster than the known ones."""
        quick = min((one for one, its in known if one and set(its) <= set(hows)), key=lambda one: one.step_s, default=None)
        if self.is_small and quick and (exact := self._exact(quick, hows)):
            return exact
        before = quick
        least_s = min((one.step_s for one, its in known if one and set(its) <= set(hows)), default=np.inf)
        for rows, price in self._rows(hows, is_first=not known, is_only=least_s == np.inf):
            if quick and rows > _MORE_ROWS:
                break
            more = self._best_near(self._tables(hows, min(least_s, quick.step_s if quick else np.inf), rows, price))
            quick = min((one for one in (quick, more) if one), key=lambda one: one.step_s, default=None)
            if quick and self.units > _MOST_DEVICES:
                break
        exact = self._exact(quick, hows) if self.is_small and (quick is None or quick is not before) else None
        return exact or quick

    def _rows(self, hows: Sequence[int], *, is_first: bool, is_only: bool) -> Iterator[tuple[int, float]]:
        """Yield (rows of fronts, price of memory) to search with: more rows where few do not suffice, ever more where no plan is known."""
        if is_first:
            yield _MOST_ROWS, self.price
        if self.units > _MOST_DEVICES:
            num_cuts = sum(len(self.rough.cuts(calls)) for calls in self.rough.graph.convex_sets)
            yield min(_MORE_ROWS, max(_MOST_ROWS, math.isqrt(_FEW_PAIRS // max(num_cuts, 1)))), 0.0
        else:
            yield _MORE_ROWS, self.price
            if len(hows) > 1:
                yield _MORE_ROWS, 0.0
        if is_only:
            yield 4 * _MORE_ROWS, self.price

    def _best_near(self, tables: Tables) -> Found | None:
        """The best plan of the tables, or near it between the counts of the grid."""
        found = _best_of(tables, self.bounds, is_exact=False)
        return found if self.is_small else _near(tables, found, self.slack_s, self.units)

    def finished(self, tried: Sequence[tuple[Found | None, Sequence[int]]]) -> list[Found]:
        """Improve plans that are nearly as fast as the best, and the best of each search unless devices are many; fastest first."""
        some = sorted(((one, hows) for one, hows in tried if one), key=lambda one: (not one[0].is_exact, -len(one[1])))
        is_quick = self.units > _MOST_DEVICES
        near_s = min((one.step_s for one, _ in some), default=0.0) * (1 + _SLACK if is_quick else _NEARLY)
        found: dict[tuple[Mode, float], Found] = {}
        done = set[tuple[object, ...]]()
        for one, hows in some:
            places = _seats_key(one)
            is_new, done = places not in done, done | {places}
            better = self.in_all_chunks(one, hows) if one.step_s <= near_s and is_new else one
            known = found.setdefault((better.mode, better.step_s), better)
            if better.is_exact and not known.is_exact:
                found[better.mode, better.step_s] = better
        least = {hows: min((one for one, its in some if its == hows), key=lambda one: one.step_s) for _, hows in some}
        least_s = [] if is_quick else [one.step_s for one in least.values() if one.step_s <= near_s * _NEAR**2]
        polished = [self.polished(one) if one.step_s <= near_s or one.step_s in least_s else one for one in found.values()]
        return sorted(polished, key=lambda one: one.step_s * (1 - _ROUNDING * one.is_exact))

    def in_all_chunks(self, found: Found, hows: Sequence[int]) -> Found:
        """The best plan with the same place for each engine, over all chunk sizes."""
        if found.is_exact:
            return found
        here = found.problem.with_options(Options({leaf.engine: [leaf.option] for leaf in leaves_of(found.node)}))
        more = _best_of(Solver(here, found.step_s, most_rows=_MORE_ROWS, hows=hows).solve(), found.bounds, is_exact=False)
        return more if more and more.mode == found.mode and more.step_s < found.step_s else found

    def polished(self, found: Found) -> Found:
        """Move one engine at a time, in the same structure, as long as that is faster: the result has no better neighbour of this kind."""
        engines = [] if found.is_exact else list(self.problem.workload.engines)
        num_moves = since = 0
        while since < len(engines) and num_moves < _MOST_MOVES * len(engines):
            moved = self._moved(found, engines[0])
            engines.append(engines.pop(0))
            found, since, num_moves = moved or found, 0 if moved else since + 1, num_moves + 1
        return found

    def _moved(self, found: Found, engine: EngineId) -> Found | None:
        within, mine = ways_in(found.node), {leaf.engine: leaf.option for leaf in leaves_of(found.node)}
        enough_s = found.step_s * (1 - _SLACK)
        others = [one for one in self.rough.options.of[engine] if one != mine[engine]]
        only = {other: [option] for other, option in mine.items()}
        at_least = floors_s(self.problem.with_options(Options({**only, engine: others})), found.node) if others else ()
        some = [one for one, floor_s in zip(others, at_least, strict=True) if floor_s < enough_s]
        if not some:
            return None
        near = self.problem.with_options(Options({**only, engine: some}))
        one = _best_of(Solver(near, enough_s, most_rows=_MORE_ROWS, within=within).solve(), found.bounds, is_exact=False)
        return one if one and one.step_s < enough_s else None

    def _exact(self, quick: Found | None, hows: Sequence[int]) -> Found | None:
        """Search exactly; None if that is too much work, or nothing better is found and nothing is known."""
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
        """The problem with all undominated options, its bounds, and whether no plan can need another option."""
        full = self.problem.on_grid(None, 0)
        bounds = bounds_of(full)
        return full, bounds, prune_options(full)

    def _mixed(self, tables: Tables, known_s: float) -> Found | None:
        """The best plan that mixes turns and splits; None if there is none. Where the tables have no good one, more rows may have."""
        tables = _only(tables, lambda hows: hows == {TURNS, SPLIT})
        if tables.steps_s.min(initial=np.inf) > _MUCH_SLOWER * known_s:
            tables = _only(self._tables((TURNS, SPLIT), np.inf, _MORE_ROWS, self.price), lambda hows: hows == {TURNS, SPLIT})
        found = next((one for one in self._found(tables) if one.mode == "hybrid"), None)
        near = found if self.is_small else _near(tables, found, self.slack_s, self.units)
        return near if near and near.mode == "hybrid" else found

    def lent(self, known: Found) -> Found | None:
        """The best plan of a quick search that lends a trainer's devices to rollout; None where that is not worth it."""
        worth_s, rows = known.step_s * (1 - WORTH), _MORE_ROWS if self.is_small else _MOST_ROWS
        hows = TURNS, SPLIT, LENT
        if not Solver(self.rough, worth_s, slack_s=self.slack_s, most_rows=rows, hows=hows, bounds_lending=True).may_lend():
            return None
        for bounds_lending in (True, False):  # Bounds are quick, and mostly show that lending is not worth it.
            solver = Solver(self.rough, worth_s, slack_s=self.slack_s, most_rows=rows, hows=hows, bounds_lending=bounds_lending)
            tables = _only(solver.solve(), lambda hows: LENT in hows)
            if tables.steps_s.min(initial=np.inf) > worth_s:
                return None
        found = next(self._found(tables), None)
        return found if found and found.step_s <= worth_s else None

    def _found(self, tables: Tables) -> Iterator[Found]:
        """Yield the plans of all rows that have places, fastest first."""
        for row in np.argsort(tables.steps_s, kind="stable"):
            if tables.steps_s[row] == np.inf:
                return
            node = tree_of(tables, int(row))
            places = places_of(tables.problem, node)
            if places is not None:
                yield Found(tables.problem, node, places, step_s(tables.problem, node), False, self.bounds)


def _seats_key(found: Found) -> tuple[object, ...]:
    return found.mode, frozenset((leaf.engine, leaf.option) for leaf in leaves_of(found.node))


def _only(tables: Tables, is_wanted: Callable[[set[int]], bool]) -> Tables:
    """Give plans of other structures infinite time."""
    hows = ({how for _, how in ways_of(tables, row).values()} for row in range(len(tables.steps_s)))
    wanted = np.fromiter(map(is_wanted, hows), np.bool_, len(tables.steps_s))
    return replace(tables, steps_s=np.where(wanted, tables.steps_s, np.inf))


def _near(tables: Tables, found: Found | None, slack_s: float, units: int) -> Found | None:
    """The best plan between the counts of the grid, near the best plans on it."""
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
    best = _first_placed(tables)
    if best is None:
        return None
    node, places, loss_s = best
    return Found(tables.problem, node, places, step_s(tables.problem, node), is_exact and not loss_s, bounds)


def best_of(tables: Tables) -> tuple[Node, Places, float]:
    """The best plan in which every engine has a place, and its excess over the best without places.

    Raises:
        PlanError: there is none.
    """
    best = _first_placed(tables)
    if best is None:
        raise tables.problem.no_room()
    return best


def _first_placed(tables: Tables) -> tuple[Node, Places, float] | None:
    for row in np.argsort(tables.steps_s, kind="stable"):
        node = tree_of(tables, int(row))
        places = places_of(tables.problem, node)
        if places is not None:
            return node, places, float(tables.steps_s[row] - tables.steps_s.min())
    return None


def _num_units(problem: Problem) -> int:
    """Devices of all pools, in the least units of any engine."""
    num = 0
    for pool, size in zip(problem.pools, problem.num_devices, strict=True):
        units = [unit for engine in problem.workload.engines if (unit := problem.costs.unit(engine, pool))]
        num += size // min(units, default=size)
    return num


def pinned_counts(pin: PinSpec, size: int) -> list[int]:
    """Device counts that a pin leaves its engine in a pool of that size, where it restricts them: its own count, or multiples of the
    degrees that its layout fixes, whose other degrees are powers of two."""
    layout = pin.layout
    if pin.num_devices is not None or pin.devices is not None:
        num = pin.num_devices if pin.num_devices is not None else pin.devices[1] - pin.devices[0] if pin.devices else 0
        return [num] if num <= size else []
    fixed = math.prod(degree or 1 for degree in (layout.tp, layout.pp, layout.sp, layout.dp))
    return [fixed << i for i in range(size.bit_length()) if fixed << i <= size] if fixed > 1 else []


def grid_of(problem: Problem) -> dict[str, Sequence[int]]:
    """The grid of device counts of each pool: repeated halves, their complements, all but the smallest unit; and pins with complements."""
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
    """The best plans of the other modes; `plans` starts with the best of all."""
    best, rivals = plans[0], dict[Mode, Found]()
    for plan in plans:
        if plan.mode != best.mode:
            rivals.setdefault(plan.mode, plan)
    return [
        Loser(
            mode,
            rival.step_s,
            why_lost(best.problem, best.node, rival.problem, rival.node),
            parts_of(rival.problem, rival.node),
            len({(seat.pool, device) for seat in seats_of(rival.node, rival.places) for device in seat.devices}),
        )
        for mode, rival in rivals.items()
    ]


def _constraints(found: Found) -> dict[str, float]:
    """Constraint of the spec -> seconds that the best plan without it would save."""
    spec = found.problem.spec
    without = {f"pin {name}": spec.model_copy(update={"pin": {n: p for n, p in spec.pin.items() if n != name}}) for name in spec.pin}
    if not spec.may_offload:
        without["may_offload: false"] = spec.model_copy(update={"may_offload": True})
    if spec.lend == "never":
        without["lend: never"] = spec.model_copy(update={"lend": "auto"})
    problem = found.problem
    free = {name: best_plan(Problem(problem.workload, problem.lengths, problem.costs, other)) for name, other in without.items()}
    return {name: max(0.0, found.step_s - plan.step_s) for name, plan in free.items()}
