"""Search for the fastest plan of a flow on a cluster: structures, then changes of the best of them, and an exact search if small.

    Workload, lengths, Costs, ClusterSpec --find_plan--> Choice

Structures (which parts there are, and which of them take turns or are split) come from two sources. Quick searches keep the most promising
rows of each front (`dynamic_program`), on a grid of device counts where there are many: confined to turns, to splits, and free. Where one
pool is planned, a table (`CountTable`) has one plan for each set of calls, chunk size and up to 64 device counts: its best structures are
priced again without interpolation. Then each plan is improved in its structure (`Climb`): the best small change is made as long as there is
one that helps; and the best plan also in the structures next to its own, and in its own with the devices divided anew for other chunk sizes
(`restructured`). Where devices and calls are few, an exact search
follows that drops what can't be as fast as the plan found. It is given up when it grows too large; the choice then says by how much a
better plan might be faster, from the lower bounds. All searches together have a budget of evaluations (`_BUDGET`), not of seconds, so that
a plan is the same on every machine: what begins when it is spent is left out, and the choice says so. The result is the fastest of
everything that was found.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from m2flow.errors import PlanError
from m2flow.macro.session import infrequent_gc
from m2flow.micro.protocol.cost_terms import Costs, EngineId
from m2flow.micro.protocol.plan import Bound, Choice, Loser, Mode
from m2flow.planner.breakdown import advice_of, bounds_of, held_by, interval_of, parts_of, settled, step_s, why_lost, works_of
from m2flow.planner.dynamic_program import LENT, SPLIT, TURNS, WORTH, Limits, Solver, Tables, TooLarge, memory_price, prune_options
from m2flow.planner.plan_tree import (
    MOST_COUNTS,
    NEVER,
    Book,
    Budget,
    Climb,
    Counts,
    Leaf,
    Node,
    Places,
    Seed,
    State,
    evenly,
    floors_s,
    form_of,
    grid_of,
    interpolated,
    least_of,
    least_unit,
    leaves_of,
    mode_of,
    nearest_of,
    num_left,
    num_units_of,
    parts_within,
    placements_of,
    places_of,
    restructured,
    scaled_up,
    side_by_side_s,
    step_of,
    tree_of,
    ways_in,
    ways_of,
)
from m2flow.planner.problem import Cut, FloatArray, IntArray, Option, Options, Problem
from m2flow.planner.workload import (
    FREE,
    Draws,
    Times,
    Workload,
    in_turns,
    num_minibatches,
    rigid_of,
    side_by_side,
    through_functions,
    total_side_by_side,
)
from m2flow.spec import ClusterSpec

# ---- structures from a table of device counts

_MOST_BETWEEN, _MOST_UNITS = 16, 2048
"""Counts that are looked at between two of the table, and counts among which the devices of a structure are divided."""
_NUM_VALUES, _AT_ONCE = 10, 4
"""Numbers of a row, and cuts that are computed at once: more do not fit the CPU's cache."""
_MERIT, _KEPT, _BUSIEST, _ORIGIN = 6, 7, 8, 9
"""Columns of a row after its six times: the step time if it were all, bytes kept on a device, bytes while it works, its parts in a code."""
_FAST, _FRUGAL, _LIGHT = 0, 1, 2
"""What rows may keep in memory: anything, what is worth its price, or the least (only engines that leave their devices)."""
_IS_FRUGAL = np.array([0.0, 1.0, 0.0])[:, None, None]


class CountTable:
    """One plan for each set of calls, number of devices, and pace: a quick search over many counts that finds structures, not plans.

        F(S, n, g) = the fastest of  leaves of S on n in chunks of g,
                                     { A and B split, on k and n - k : k about where both take equally long },
                                     { A then B in turns on n, chunk by chunk if they alternate }              over the cuts A | B of S

    and F(S, n) the fastest of these over all g, of splits of F(A, k) and F(B, n - k), and of A and B in turns as wholes. The times are
    those of `side_by_side` and `in_turns`. It keeps of each two rows, the fastest that fits the memory and the fastest whose engines leave
    their devices. Between counts of which an engine has options its times are interpolated. Passes over a chunk fall away at counts that
    lie between those of the table: a leaf has the best of the counts near n, as if it were n, and `divided` finds them for a structure.
    Not looked at: syncs, slowdowns, host memory.

    Source: the recurrence of Yu et al. (RLinf), arXiv:2509.15965, section on the scheduler, which has one row for each set and number of
    devices too, but tries all k.
    """

    def __init__(self, problem: Problem, hows: Sequence[int]) -> None:
        """
        Args:
            problem: with options on some counts, of one pool.
            hows: allowed ways to combine two parts.
        """
        self._problem, self._hows = problem, tuple(hows)
        self.step = step_of(problem)
        (size,) = problem.num_devices
        self._counts = np.arange(1, size // self.step + 1) * self.step
        self._unit = least_unit(problem, problem.pools[0])
        half, stride = self.step // self._unit // 2, max(1, self.step // self._unit // _MOST_BETWEEN)
        self._between = np.arange(-(half // stride), half // stride + 1) * stride * self._unit
        """Counts between two of the table, from the middle one."""
        graph = problem.graph
        self._is_leaf = {calls for calls in graph.convex_sets if len(graph.engines(calls)) == 1}
        self._whole = max(len(problem.leaf(calls).chunks) for calls in self._is_leaf)
        """The number of paces, and the index of the row over all of them."""
        self._solver = Solver(problem, hows=hows)
        self._shape = 3, self._whole + 1, len(self._counts)
        self._price = memory_price(problem) / 2
        self._sizes = {engine: np.array([one.layout.num_replica_devices for one in some]) for engine, some in problem.options.of.items()}
        """Devices of a replica in each option."""
        self._rows: dict[int, FloatArray] = {}
        """Set of calls -> [values, memories, paces + 1, counts]."""
        self._curves: dict[tuple[object, ...], FloatArray] = {}
        """Calls, devices of a replica, whether it is swapped, index of the chunk size -> seconds on each number of devices, of `divided`;
        and the same of parts: the way to combine, then the keys of the parts."""

    def seeds(self, most: int) -> list[Seed]:
        """The best structures, at most so many."""
        for _, sets in itertools.groupby(self._problem.graph.convex_sets, key=int.bit_count):
            self._fill(list(sets))
        if self._problem.graph.everything not in self._rows:
            return []
        tops = self._tops[..., -1].reshape(_NUM_VALUES, -1)
        found: dict[object, Seed] = {}
        for i in np.argsort(tops[_MERIT], kind="stable"):
            if tops[_MERIT, i] >= NEVER or len(found) == most:
                break
            seed = Seed(float(tops[_MERIT, i]), {}, {}, {})
            self._read(self._problem.graph.everything, int(tops[_ORIGIN, i]), seed)
            away = frozenset(engine for engine, ((like, _), *_) in seed.options.items() if like.is_swapped)
            found.setdefault((form_of(self._problem.graph.everything, seed.ways), away), seed)
        return list(found.values())

    def divided(self, seed: Seed, over: float = 0.0) -> tuple[float, dict[EngineId, list[tuple[Option, int]]]]:
        """Seconds and devices of the engines of a structure, of all counts, where the parts of each split take equally long; as in
        `Seed.options`. With `over`, the devices that suffice for so much more than this time, which leaves some.

        A part's time falls in steps, where one pass less goes over a chunk: min_P sum_i n_i(P), with n_i(P) the least devices on which
        part i takes at most P, finds the counts at these steps, which no table of few counts has.
        """
        (size,) = self._problem.num_devices
        unit = -(-size // self._unit // _MOST_UNITS) * self._unit
        nums = np.arange(1, size // unit + 1) * unit
        times: dict[int, FloatArray] = {}
        found: dict[EngineId, list[tuple[Option, int]]] = {}

        def solve(calls: int) -> tuple[object, ...]:
            if calls not in seed.ways:
                key = self._curve(calls, seed, nums)
            else:
                how, parts = seed.ways[calls][1], [solve(part) for part in parts_within(calls, seed.ways)]
                key = how, *parts
                if key not in self._curves:
                    every = [self._curves[part] for part in parts]
                    self._curves[key] = sum(every, np.zeros(len(nums))) if how == TURNS else side_by_side_s(every)
            times[calls] = self._curves[key]
            return key

        def give(calls: int, limit_s: float) -> None:
            num = min(int(np.searchsorted(-times[calls], -limit_s)), len(nums) - 1)
            if calls in seed.ways:
                is_split = seed.ways[calls][1] == SPLIT
                for part in parts_within(calls, seed.ways):
                    give(part, float(times[calls][num] if is_split else times[part][num]))
            else:
                (engine,) = self._problem.graph.engines(calls)
                found.setdefault(engine, []).append((seed.options[engine][0][0], int(nums[num])))

        solve(self._problem.graph.everything)
        step_s = float(times[self._problem.graph.everything][-1])
        give(self._problem.graph.everything, step_s * (1 + over))
        return step_s, found

    def _curve(self, calls: int, seed: Seed, nums: IntArray) -> tuple[object, ...]:
        """The key of a leaf's seconds on each number of devices, in options like a seed's and its chunk size; none is faster with fewer."""
        (engine,) = self._problem.graph.engines(calls)
        like, leaf = seed.options[engine][0][0], self._problem.leaf(calls)
        key = calls, like.layout.num_replica_devices, like.is_swapped, nearest_of(leaf.chunks, seed.chunks[calls])
        if key not in self._curves:
            self._curves[key] = np.minimum.accumulate(self._interpolated_curve(*key, nums))
        return key

    def _interpolated_curve(self, calls: int, size: int, is_swapped: bool, chunk: int, nums: IntArray) -> FloatArray:
        (engine,) = self._problem.graph.engines(calls)
        leaf, facts = self._problem.leaf(calls), self._problem.facts(engine)
        rows = np.flatnonzero((self._sizes[engine] == size) & (facts[5] == is_swapped))
        grid, which = np.unique(facts[1, rows], return_inverse=True)
        seconds, chunks, full = np.full(len(grid), NEVER), np.array([float(leaf.chunks[chunk])]), nums // size
        np.minimum.at(seconds, which, leaf.times[rows, chunk, 1])
        per = seconds / self._rounding(calls, chunks, grid / size)
        found = np.exp(np.interp(np.log(np.maximum(full, 1)), np.log(grid / size), np.log(np.maximum(per, 1e-12))))
        found *= self._rounding(calls, chunks, np.maximum(full, 1))
        return np.where((full > 0) & (nums >= grid[0]), found, NEVER)

    def _fill(self, sets: list[int]) -> None:
        """Compute the rows of sets of equally many calls."""
        made: dict[int, list[FloatArray]] = {calls: [self._leaf(calls)] if calls in self._is_leaf else [] for calls in sets}
        every = [(calls, index, cut, how) for calls in sets for index, cut, how in self._ways_of(calls)]
        for how, kind in itertools.product((SPLIT, TURNS), (0, 1, 2)):
            alike = [one for one in every if one[3] == how and one[2].is_linked + (one[2].is_linked and one[2].waits) == kind]
            for some in (alike[i : i + _AT_ONCE] for i in range(0, len(alike), _AT_ONCE)):
                joined = self._split(some) if how == SPLIT else self._turns(some)
                for i, one in enumerate(some):
                    made[one[0]].append(joined[:, i])
        for calls, rows in made.items():
            if rows:
                values = np.stack(rows, axis=1)
                if calls == self._problem.graph.everything:
                    self._tops = values
                self._rows[calls] = self._best(calls, values)

    def _ways_of(self, calls: int) -> Iterator[tuple[int, Cut, int]]:
        every = [(i, cut, how) for i, cut in enumerate(self._problem.cuts(calls)) for how in dict.fromkeys((TURNS, *self._hows))]
        for index, cut, how in every:
            if cut.first in self._rows and cut.second in self._rows and self._solver.may(cut, how):
                yield index, cut, how

    def _best(self, calls: int, every: FloatArray) -> FloatArray:
        """The best of [values, rows, ...]; then of all memories, of all paces, and of fewer devices."""
        values = least_of(every, self._merit_for_others(calls, every))
        fast = least_of(values, self._merit_for_others(calls, values, is_frugal=False))
        values[:, _FRUGAL] = least_of(values, self._merit_for_others(calls, values, is_frugal=True))
        values[:, _FAST] = fast
        values[:, :, -1] = least_of(values, self._price * values[_KEPT] * _IS_FRUGAL + values[_MERIT], 2)
        values[:_ORIGIN] = np.where(values[_MERIT] >= NEVER, NEVER, values[:_ORIGIN])
        merit, num = self._merit_for_others(calls, values), np.arange(len(self._counts))
        at = np.where(merit <= np.minimum.accumulate(merit, axis=-1), num, 0)
        at = np.maximum.accumulate(at, axis=-1) + np.arange(0, merit.size, len(num)).reshape(*merit.shape[:-1], 1)
        return values.reshape(_NUM_VALUES, -1).take(at, axis=1)

    def _merit_for_others(self, calls: int, values: FloatArray, *, is_frugal: bool | None = None) -> FloatArray:
        """The step time, that to the first output where other calls wait for it at the same pace, and the price of memory of frugal rows
        (of all or none if `is_frugal` says so)."""
        merit = values[_MERIT] + self._price * values[_KEPT] * (_IS_FRUGAL if is_frugal is None else is_frugal)
        if any(needs & calls for i, needs in enumerate(self._problem.graph.direct) if not calls >> i & 1):
            merit[..., :-1, :] += values[0, ..., :-1, :] / self._problem.steps_under_way
        return np.asarray(merit)

    def _leaf(self, calls: int) -> FloatArray:
        problem = self._problem
        (engine,) = problem.graph.engines(calls)
        leaf, facts = problem.leaf(calls), problem.facts(engine)
        rigid = rigid_of(problem.graph.members(calls), facts[5])
        values = np.full((_NUM_VALUES, *self._shape), NEVER)
        grid, num = np.unique(facts[1]), len(self._counts)
        fine = self._counts[:, None] + self._between
        share = fine / self._counts[:, None]
        below = np.searchsorted(grid, self._counts, side="right") - 1
        chunks = [max(0, pace - self._whole + len(leaf.chunks)) for pace in range(self._whole)]
        light = (
            facts[2]
            <= np.array([facts[2, facts[1] == num].min() for num in grid])[np.searchsorted(grid, facts[1])] + problem.room[0, 0] / 16
        )
        sizes, chunk_sizes = self._sizes[engine], np.array(leaf.chunks, np.float64)
        full = self._rounding(calls, chunk_sizes, (facts[1] / sizes)[:, None])
        for memory in (_FAST, _FRUGAL, _LIGHT):
            total = leaf.times[:, chunks, 1] + (self._price * facts[2] * (memory == _FRUGAL))[:, None]
            total = np.where((light | (memory != _LIGHT))[:, None], total, np.inf)
            best = np.array([(group := np.flatnonzero(facts[1] == num))[total[group].argmin(axis=0)] for num in grid])  # [grid, paces]
            at = best[below].T
            times = np.log(np.maximum(leaf.times[best, chunks] / full[best, chunks][..., None], 1e-12))
            here = values[:, memory, :-1]
            every = np.exp(interpolated(np.log(fine), np.log(grid), times)).transpose(3, 2, 0, 1)
            every = every * (share * self._rounding(calls, chunk_sizes[chunks][:, None, None], fine / sizes[at][..., None]))
            every[..., (fine < grid[0]) | (fine > self._counts[-1] + self.step)] = NEVER
            nearest = every[1].argmin(axis=-1)[None, ..., None]
            here[:3] = np.take_along_axis(every, nearest, axis=-1)[..., 0]
            here[3], here[4], here[5] = here[1] * problem.held_share(calls), leaf.grains[chunks][:, None], rigid[at]
            here[_MERIT], here[_KEPT], here[_BUSIEST] = self._merit(here[1], here[3]), facts[2, at], facts[3, at]
            here[_ORIGIN] = -1 - ((at * (self._whole + 1) + np.arange(self._whole)[:, None]) * num + np.arange(num))
        values[:_ORIGIN, ..., below < 0] = NEVER
        return values

    def _rounding(self, calls: int, chunks: FloatArray, replicas: FloatArray) -> FloatArray:
        """The factor by which passes take longer since the samples of a chunk are no multiple of the replicas."""
        members = self._problem.graph.members(calls)
        if any(call.work == "generate" or not call.num_samples for call in members):
            return np.ones(np.broadcast_shapes(chunks.shape, replicas.shape))
        each = [call.num_samples / (num_minibatches(call) if call.work == "update" else 1) for call in members]
        size = np.minimum(chunks, max(1.0, min(each)))
        return np.asarray(np.ceil(size / replicas) * replicas / size)

    def _merit(self, total: FloatArray, busy: FloatArray) -> FloatArray:
        problem = self._problem
        return np.asarray(np.maximum(busy, total / problem.steps_under_way) if problem.workload.staleness else total)

    def _parts(self, some: list[tuple[int, int, Cut, int]]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Rows of the first parts, their times with functions after them, and rows of the second, [values, cuts, 3, paces, counts]."""
        a = np.stack([self._rows[cut.first] for _, _, cut, _ in some], axis=1)
        b = np.stack([self._rows[cut.second] for _, _, cut, _ in some], axis=1)
        fed = a
        for i, (_, _, cut, _) in enumerate(some):
            if cut.functions:
                fed = a[:6].copy() if fed is a else fed
                fed[:6, i] = through_functions(Times(*a[:6, i]), cut.functions, self._problem.calls, self._problem.functions).all
        return a, fed, b

    def _split(self, some: list[tuple[int, int, Cut, int]]) -> FloatArray:
        """The best of a few divisions; of the others only what their merit depends on is computed."""
        a, fed, b = self._parts(some)
        lefts, rights = evenly(a[1], b[1])
        start, cut, nothing = np.arange(0, a[0].size, len(self._counts)).reshape(*a.shape[1:-1], 1), some[0][2], np.zeros(())
        needed = {1, *([0, 2, 4] if cut.is_linked and not cut.waits else []), *([3] if self._problem.workload.staleness else [])}

        def merit_of(left: IntArray, right: IntArray) -> FloatArray:
            sides = ((part, start + np.maximum(at, 0)) for part, at in ((a, left), (fed, left), (b, right)))
            parts = [Times(*(part[i].take(at) if i in needed else nothing for i in range(6))) for part, at in sides]
            total = total_side_by_side(*parts, is_linked=cut.is_linked, waits=cut.waits)
            return np.where((left < 0) | (right < 0), 2 * NEVER, self._merit(total, np.maximum(parts[1].busy, parts[2].busy)))

        merits = np.array([merit_of(left, right) for left, right in zip(lefts, rights, strict=True)])
        best = merits.argmin(axis=0)[None]
        left, right, merit = (np.take_along_axis(one, best, axis=0)[0] for one in (lefts, rights, merits))
        of_a, of_b = (part.reshape(_NUM_VALUES, -1).take(start + np.maximum(at, 0), axis=1) for part, at in ((a, left), (b, right)))
        of_fed = of_a if fed is a else fed.reshape(6, -1).take(start + np.maximum(left, 0), axis=1)
        parts = Times(*of_a[:6]), Times(*of_fed[:6]), Times(*of_b[:6])
        row = np.arange(3 * (self._whole + 1)).reshape(3, -1, 1)
        return np.stack([
            *side_by_side(*parts, is_linked=cut.is_linked, waits=cut.waits).all,
            merit, np.maximum(of_a[_KEPT], of_b[_KEPT]), np.maximum(of_a[_BUSIEST], of_b[_BUSIEST]),
            self._origin(some, left, right, row, row),
        ])  # fmt: skip

    def _turns(self, some: list[tuple[int, int, Cut, int]]) -> FloatArray:
        """Both parts on the same counts: in all paces if they alternate, and as wholes."""
        a, fed, b = self._parts(some)
        wholes = [(m * (self._whole + 1) + self._whole, n * (self._whole + 1) + self._whole) for m in range(3) for n in range(3)]
        pairs = np.array([*((pace, pace) for pace in range(self._whole)), *wholes]).T
        num = len(self._counts)
        of_a, of_fed, of_b = (
            part.reshape(len(part), len(some), -1, num)[:, :, which] for part, which in ((a, pairs[0]), (fed, pairs[0]), (b, pairs[1]))
        )
        cut, values = some[0][2], np.empty_like(of_a)
        values[:6] = in_turns(*(Times(*part[:6]) for part in (of_a, of_fed, of_b)), is_linked=cut.is_linked, waits=cut.waits).all
        values[_KEPT] = of_a[_KEPT] + of_b[_KEPT]
        values[_BUSIEST] = np.maximum(of_a[_BUSIEST] + of_b[_KEPT], of_b[_BUSIEST] + of_a[_KEPT])
        is_whole = np.arange(pairs.shape[1])[:, None] >= self._whole
        is_legal = (values[_BUSIEST] <= self._problem.room[0, 0]) & (is_whole | (values[5] == FREE))
        values[_MERIT] = np.where(is_legal, self._merit(values[1], values[3]), 2 * NEVER)
        values[_ORIGIN] = self._origin(some, np.arange(num), np.arange(num), *pairs[:, :, None])
        found = np.full((_NUM_VALUES, len(some), *self._shape), NEVER)
        found[:, :, _FAST, :-1] = values[:, :, : self._whole]
        late = values[:, :, self._whole :]
        found[:, :, _FAST, -1] = least_of(late, late[_MERIT], 2)
        found[:, :, _FRUGAL, -1] = least_of(late, late[_MERIT] + self._price * late[_KEPT], 2)
        found[:, :, _LIGHT, -1] = values[:, :, -1]
        return found

    def _origin(self, some: list[tuple[int, int, Cut, int]], left: IntArray, right: IntArray, row_a: IntArray, row_b: IntArray) -> IntArray:
        """Encode the cut, the way, the index of the count and the memory and pace of both parts."""
        kind = np.array([2 * index + how for _, index, _, how in some]).reshape(-1, *[1] * row_a.ndim)
        num, rows = len(self._counts), 3 * (self._whole + 1)
        return np.asarray(((kind * rows + row_a) * rows + row_b) * num * num + (np.maximum(left, 0) * num + np.maximum(right, 0)))

    def _read(self, calls: int, origin: int, seed: Seed) -> None:
        """Add the structure of a row and the places of its engines to a seed."""
        num, rows = len(self._counts), 3 * (self._whole + 1)
        if origin < 0:
            (engine,) = self._problem.graph.engines(calls)
            which, at = divmod(-1 - origin, num)
            which, pace = divmod(which, self._whole + 1)
            option, chunks = self._problem.options.of[engine][which], self._problem.leaf(calls).chunks
            size = option.layout.num_replica_devices
            seed.options.setdefault(engine, []).append((option, max(1, int(self._counts[at]) // size) * size))
            seed.chunks[calls] = chunks[max(0, pace - self._whole + len(chunks))]
            return
        rest, at = divmod(origin, num * num)
        kind, of = divmod(rest, rows * rows)
        cut = self._problem.cuts(calls)[kind // 2]
        seed.ways[calls] = cut, kind % 2
        for part, row, column in ((cut.first, of // rows, at // num), (cut.second, of % rows, at % num)):
            self._read(part, int(self._rows[part][_ORIGIN].reshape(rows, num)[row, column]), seed)


# ---- refinement between the counts of the grid

_MUCH_SLOWER = 1.5
"""Step time relative to the best plan beyond which refinement is not worth trying."""
_BEHIND = 1.2
"""The same of a plan that is not improved yet."""
_MOST_RESTRUCTURED, _BEHIND_RESTRUCTURED = 4, 1.05
"""Changes of a plan's structure, and step time relative to the plan up to which one is improved."""
_NEAR = 1.1
"""The same where only the best plan is asked for."""


# ---- the search

_MANY_DEVICES = 32
"""Units of devices above which a grid of counts is searched."""
_MANY_CALLS = 8
"""Calls on devices above which no exact search is tried."""
_MOST_DEVICES = 512
"""Units above which the first plan found is taken."""
_MOST_CHUNKS = 4
_MOST_ROWS, _MORE_ROWS, _MANY_ROWS = 16, 56, 1600
"""Rows kept of a front in a quick search; more where memory is short, which needs them, and where devices are few."""
_FEW_PAIRS = 40_000
"""Pairs of rows of all cuts, from which the number of rows of the last search follows above `_MOST_DEVICES`."""
_PACES = 7
"""Chunk sizes in the table of counts, where devices are many; otherwise all."""
_STRUCTURES, _SEEDS, _FEW_SEEDS = 16, 4, 3
"""Structures of the table of counts that are priced, and those of which the best plan is improved (few above `_MOST_DEVICES`)."""
_MOST_NEXT, _OVER = 2, (0.0, 0.1)
"""Changed structures that are improved, and by how much parts may take longer where one part is to have the devices that this saves."""
_BUDGET = 2_000_000
"""What the searches of one problem may evaluate together (`Tables.num_evaluated`)."""
_MOST_MOVES = 8
"""Rounds of moves of single engines after the search."""
_SLACK = 1e-3
"""Relative difference in step time that a quick search takes for equal."""
_ROUNDING = 1e-9
"""Relative difference up to which two plans are equal; the one known to be optimal is taken."""
_NEARLY = 1.02
"""Step time relative to the best plan up to which better chunk sizes may make a plan the best."""
_MOST_PAIRS, _MOST_OPTIONS, _RESERVE = 1e6, 100, 400_000
"""Most pairs of rows, and options of all engines, in an exact search: some seconds; and what it leaves of the budget to others."""


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
    is_cut: bool = False
    """Whether the budget of the search left out something."""

    @property
    def mode(self) -> Mode:
        return mode_of(placements_of(self.node, self.places))


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
        *([f"more changes: the search has spent its budget of {_BUDGET:,} evaluations"] if found.is_cut else []),
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
    placements, parts = settled(problem, placements_of(found.node, found.places)), parts_of(problem, found.node)
    gap_s = 0.0 if found.is_exact else max(0.0, found.step_s - max((bound.seconds for bound in found.bounds), default=0.0))
    return Choice(
        flow=problem.workload.flow,
        cluster=problem.spec.name,
        mode=mode_of(placements),
        placements=placements,
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
        held=held_by(problem, placements),
    )


def best_plan(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT)) -> Found:
    """Find the best plan with these ways to combine parts.

    Raises:
        PlanError: there is none.
    """
    return best_plans(problem, hows, is_alone=True)[0]


def best_plans(problem: Problem, hows: Sequence[int] = (TURNS, SPLIT), *, is_alone: bool = False) -> list[Found]:
    """Find the best plans of several searches, fastest first: unconstrained, confined to each mode, with lent devices, of several batches.

    A quick search keeps some of the rows only, so that a free one may lose what one that has less to look at finds.

    Raises:
        PlanError: there is none.
    """
    batches = problem.workload.staleness if SPLIT in hows else 0
    with infrequent_gc():
        each = [_searched(one, hows, is_alone=is_alone) for one in (problem, *([problem.at_once(batches)] if batches > 1 else []))]
        if not (found := sorted(itertools.chain.from_iterable(each), key=lambda one: one.step_s)):
            raise problem.no_room()
        bounds = tuple(min(alike, key=lambda bound: bound.seconds) for alike in zip(*(one.bounds for one in found), strict=True))
        is_exact = all(some[0].is_exact for some in each if some)
        return [replace(one, bounds=bounds, is_cut=any(some.is_cut for some in found), is_exact=one.is_exact and is_exact) for one in found]


def _searched(problem: Problem, hows: Sequence[int], *, is_alone: bool) -> list[Found]:
    """`best_plans` of one problem; none if there is none."""
    search = _Search.of(problem)
    found = search.finished(search.of_modes(is_alone=is_alone) if len(hows) > 1 else [(search.best(hows), hows)])
    if found and len(hows) > 1 and search.lends and (lent := search.lent(found[0])):
        found = [lent, *found]
    return [replace(one, is_cut=search.budget.has_cut) for one in found]


@dataclass(frozen=True)
class _Search:
    """A problem with the state that its searches share."""

    problem: Problem
    rough: Problem
    """The problem on a grid of device counts, with few chunk sizes and without dominated options."""
    every: Problem
    """The same with dominated options."""
    bounds: tuple[Bound, ...]
    units: int
    slack_s: float
    price: float
    """Price of memory that is kept (`memory_price`)."""
    budget: Budget

    @classmethod
    def of(cls, problem: Problem) -> _Search:
        """
        Raises:
            PlanError: some engine fits nowhere.
        """
        units = num_units_of(problem)
        grid = None if units <= _MANY_DEVICES else grid_of(problem)
        rough = problem.on_grid(grid, _MOST_CHUNKS)
        rough.check()
        every = rough.on_grid(grid, _PACES if grid else 0, chunk_step=1)
        every.options = rough.options
        slack_s = _SLACK * max(Limits(rough).path_s(), 1e-9)
        bounds = bounds_of(rough)
        prune_options(rough, slack_s)
        return cls(problem, rough, every, bounds, units, slack_s, memory_price(rough), Budget(_BUDGET))

    @property
    def is_small(self) -> bool:
        """Whether an exact search may come to an end."""
        return self.units <= _MANY_DEVICES and len(self.problem.graph.device_calls) <= _MANY_CALLS

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
        every = {hows: self._tables(hows, np.inf, _MOST_ROWS, self.price) for hows in ways}
        known_s = min(float(tables.steps_s.min(initial=np.inf)) for tables in every.values())
        seeds = [] if self.is_small else list(self.seeded(known_s))
        found: list[tuple[Found | None, Sequence[int]]] = [(one, free) for one in seeds]
        known_s = min([known_s] + [one.step_s for one in seeds])
        known = set[tuple[object, ...]]()
        for hows, tables in every.items():
            one = _best_of(tables, self.bounds, is_exact=False)
            placement = _placements_key(one) if one else ()
            if one and not self.is_small and placement not in known and not (is_alone and one.step_s > _NEAR * known_s):
                one = self.climbed(one)
            known.add(placement)
            found.append((one, hows))
        if not is_alone:
            found.append((self._mixed(every[free], known_s), free))
        for hows in ways:
            if self.is_small or hows == free or not any(one for one, its in found if set(its) <= set(hows)):
                found.append((self.best(hows, found), hows))
        if self.is_small and not any(one and one.is_exact and hows == free for one, hows in found):
            known_s = min((one.step_s for one, _ in found if one), default=np.inf)
            found += [(one, free) for one in self.seeded(known_s)]
        return found

    @cached_property
    def book(self) -> Book:
        """The options that climbs have tried."""
        return Book(self.problem)

    @cached_property
    def table(self) -> CountTable:
        """The count table of a search in one pool."""
        return CountTable(self.every, (TURNS, SPLIT))

    def seeded(self, known_s: float = np.inf) -> Iterator[Found]:
        """The best plans in the best structures of a table of counts, unless they begin far behind a known plan; none of several pools."""
        if len(self.problem.pools) > 1:
            return
        problem, tried = self.problem, list[tuple[float, Climb, State]]()
        table = self.table
        for seed in (one for one in table.seeds(_STRUCTURES) if one.step_s <= _BEHIND * known_s):
            climb = Climb(self.book, seed.ways, {engine: options[0][0] for engine, options in seed.options.items()}, self.budget)
            ways_to_start = [(seed.options, seed.chunks), *((table.divided(one)[1], one.chunks) for one in self._paced(seed))]
            starts = [start for options, chunks in ways_to_start for start in climb.starts(options, chunks)]
            if starts and (priced := climb.priced(starts, _BEHIND * known_s)):
                tried.append((priced[0], climb, priced[1]))
        most = _SEEDS if self.units <= _MOST_DEVICES else _FEW_SEEDS
        for number, (_, climb, start) in enumerate(sorted(tried, key=lambda one: one[0])[:most]):
            if number and self.budget.is_over():
                return
            found = climb.climbed(np.inf, [start], dict.fromkeys(problem.pools, step_of(problem)))
            if found and (one := self._found_at(climb, found[1])):
                yield one

    def _paced(self, seed: Seed) -> list[Seed]:
        """A structure at its own pace, with all chunks one size coarser or finer, and with all as large as one of its own."""
        every = [list(seed.chunks.values()), *([size] * len(seed.chunks) for size in dict.fromkeys(seed.chunks.values()))]
        found = dict[tuple[int, ...], Seed]()
        for wanted, step in itertools.product(every, (0, 1, -1)):
            chunks = {}
            for calls, size in zip(seed.chunks, wanted, strict=True):
                sizes = self.book.chunks(calls)
                chunks[calls] = sizes[min(max(nearest_of(sizes, size) + step, 0), len(sizes) - 1)]
            found.setdefault(tuple(chunks.values()), replace(seed, chunks=chunks))
        return list(found.values())

    def restructured(self, found: Found) -> Found:
        """The plan after changes of its structure, with its devices or those that a table divides, as long as one helps; in one pool."""
        ways = ways_in(found.node)
        if len(self.problem.pools) > 1 or found.is_exact or LENT in {how for _, how in ways.values()}:
            return found
        for _ in range(_MOST_RESTRUCTURED):
            better = None
            for known_s, climb, start in self._neighbours(found)[:_MOST_NEXT]:
                if known_s < np.inf and (
                    climbed := climb.climbed(np.inf, [start], dict.fromkeys(self.problem.pools, step_of(self.problem)))
                ):
                    better = min((one for one in (better, (*climbed, climb)) if one), key=lambda one: one[0])
            if better is None or better[0] >= found.step_s * (1 - 1e-6) or (one := self._found_at(better[2], better[1])) is None:
                return found
            found = one
        return found

    def _neighbours(self, found: Found) -> list[tuple[float, Climb, State]]:
        """The best plan in the structure of a plan with its devices divided anew, and in each one next to it, unless far behind."""
        leaves, near = leaves_of(found.node), list[tuple[float, Climb, State]]()
        like, chunks = {leaf.engine: leaf.option for leaf in leaves}, self._chunks_in(leaves)
        own = {engine: [(option, option.num_devices)] for engine, option in like.items()}
        for ways in (ways_in(found.node), *restructured(self.problem, ways_in(found.node))):
            if self.budget.is_over():
                break
            climb, seed = Climb(self.book, ways, like, self.budget), Seed(0.0, ways, own, chunks)
            starts = list[State]()
            if ways == ways_in(found.node):
                for one, over in itertools.product(self._paced(seed), _OVER):
                    least = self.table.divided(one, over)[1]
                    starts += [start for some in self._shared_out(ways, least) for start in climb.starts(some, one.chunks)]
            elif (divided := self.table.divided(seed))[0] < found.step_s:
                starts = [one for some in self._shared_out(ways, divided[1], own) for one in climb.starts(some, chunks)]
            priced = climb.priced(starts, _BEHIND_RESTRUCTURED * found.step_s) if starts else None
            if priced and abs(priced[0] - found.step_s) > _ROUNDING * found.step_s:  # Else it is the plan in another order.
                near.append((priced[0], climb, priced[1]))
        return sorted(near, key=lambda one: one[0])

    def _shared_out(self, ways: Mapping[int, tuple[Cut, int]], least: Counts, own: Counts | None = None) -> list[Counts]:
        """Devices for a structure: the least, or those of before, of which one engine has what the others leave, or several of the
        smallest have it in proportion. Each is there once."""
        (size,) = self.problem.num_devices
        found = dict[object, Counts]()
        mixed = ({**own, engine: least[engine]} for engine in own if least[engine] != own[engine]) if own else ()
        for base in (least, *([own] if own else []), *mixed):
            counts = {engine: options[0][1] for engine, options in base.items()}
            for engine, ((like, _), *_) in base.items():
                if (free := num_left(self.problem, ways, counts, engine, size)) > 0:
                    one = {**base, engine: [(like, free)]}
                    found.setdefault(frozenset((engine, tuple(options)) for engine, options in one.items()), one)
        units = {engine: options[0][0].layout.num_replica_devices for engine, options in least.items()}
        counts = {engine: options[0][1] for engine, options in least.items()}
        scaled = scaled_up(self.problem, ways, counts, units, size)
        return [*found.values(), *({e: [(least[e][0][0], num)] for e, num in more.items()} for more in scaled)]

    def _chunks_in(self, leaves: Sequence[Leaf]) -> dict[int, int]:
        """Set of calls of each leaf -> its chunk size."""
        bits = self.problem.graph.bits
        return {sum(bits[name] for name in leaf.names): leaf.chunk for leaf in leaves}

    def _found_at(self, climb: Climb, state: State) -> Found | None:
        """The plan of a climb; None if it has no places."""
        problem, node = climb.plan(state)
        places = places_of(problem, node)
        if places is None:
            return None
        bounds = tuple(min(pair, key=lambda bound: bound.seconds) for pair in zip(self.bounds, bounds_of(problem), strict=True))
        return Found(problem, node, places, step_s(problem, node), False, bounds)

    def climbed(self, found: Found) -> Found:
        """The best plan near a plan, in its structure, with small changes of devices, options and chunk sizes."""
        ways, leaves = ways_in(found.node), leaves_of(found.node)
        if found.is_exact or LENT in {how for _, how in ways.values()} or not ways or self.budget.is_over():
            return found
        climb = Climb(self.book, ways, {leaf.engine: leaf.option for leaf in leaves}, self.budget)
        chunks = self._chunks_in(leaves)
        start = climb.start({leaf.engine: (leaf.option, leaf.option.num_devices) for leaf in leaves}, chunks)
        reach = {pool: least_unit(self.problem, pool) * max(1, self.units // MOST_COUNTS) for pool in self.problem.pools}
        better = climb.climbed(np.inf, [start], reach) if start else None
        one = self._found_at(climb, better[1]) if better else None
        return one if one and one.step_s < found.step_s else found

    def _tables(self, hows: Sequence[int], known_s: float, most_rows: int, price: float) -> Tables:
        return self._solved(Solver(self.rough, known_s, slack_s=self.slack_s, most_rows=most_rows, hows=hows, price=price))

    def _solved(self, solver: Solver) -> Tables:
        """Solve, within the budget or not: whether there is any left is asked before."""
        try:
            return solver.solve()
        finally:
            self.budget.spend(solver.num_evaluated)

    def best(self, hows: Sequence[int], known: Sequence[tuple[Found | None, Sequence[int]]] = ()) -> Found | None:
        """The best plan with these ways to combine parts; None if there is none, or none that is faster than the known ones."""
        quick = min((one for one, its in known if one and set(its) <= set(hows)), key=lambda one: one.step_s, default=None)
        if self.is_small and quick and (exact := self._exact(quick, hows)):
            return exact
        before = quick
        least_s = min((one.step_s for one, its in known if one and set(its) <= set(hows)), default=np.inf)
        for rows, price in self._rows(hows, is_first=not known, is_only=least_s == np.inf):
            if (quick and rows > _MORE_ROWS) or ((quick or least_s < np.inf) and self.budget.is_over()):
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
        return self.climbed(found) if found and not self.is_small else found

    def finished(self, tried: Sequence[tuple[Found | None, Sequence[int]]]) -> list[Found]:
        """Improve plans that are nearly as fast as the best, and the best of each search unless devices are many; fastest first."""
        some = sorted(((one, hows) for one, hows in tried if one), key=lambda one: (not one[0].is_exact, -len(one[1])))
        is_quick = self.units > _MOST_DEVICES
        near_s = min((one.step_s for one, _ in some), default=0.0) * (1 + _SLACK if is_quick else _NEARLY)
        found: dict[tuple[Mode, float], Found] = {}
        done = set[tuple[object, ...]]()
        for one, hows in some:
            places = _placements_key(one)
            is_new, done = places not in done, done | {places}
            better = self.in_all_chunks(one, hows) if one.step_s <= near_s and is_new else one
            known = found.setdefault((better.mode, better.step_s), better)
            if better.is_exact and not known.is_exact:
                found[better.mode, better.step_s] = better
        least = {hows: min((one for one, its in some if its == hows), key=lambda one: one.step_s) for _, hows in some}
        least_s = [] if is_quick else [one.step_s for one in least.values() if one.step_s <= near_s * _NEAR**2]
        polished = [self.polished(one) if one.step_s <= near_s or one.step_s in least_s else one for one in found.values()]
        if not self.is_small:
            polished = [self.climbed(one) if one.step_s <= near_s else one for one in polished]
        ranked = sorted(polished, key=lambda one: one.step_s * (1 - _ROUNDING * one.is_exact))
        return [self.restructured(ranked[0]), *ranked[1:]] if ranked and not self.is_small else ranked

    def in_all_chunks(self, found: Found, hows: Sequence[int]) -> Found:
        """The best plan with the same place for each engine, over all chunk sizes."""
        if found.is_exact or self.budget.is_over():
            return found
        here = found.problem.with_options(Options({leaf.engine: [leaf.option] for leaf in leaves_of(found.node)}))
        more = _best_of(self._solved(Solver(here, found.step_s, most_rows=_MORE_ROWS, hows=hows)), found.bounds, is_exact=False)
        return more if more and more.mode == found.mode and more.step_s < found.step_s else found

    def polished(self, found: Found) -> Found:
        """Move one engine at a time, in the same structure, as long as that is faster: the result has no better neighbour of this kind."""
        engines = [] if found.is_exact else list(self.problem.workload.engines)
        num_moves = since = 0
        while since < len(engines) and num_moves < _MOST_MOVES * len(engines) and not self.budget.is_over():
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
        one = _best_of(self._solved(Solver(near, enough_s, most_rows=_MORE_ROWS, within=within)), found.bounds, is_exact=False)
        return one if one and one.step_s < enough_s else None

    def _exact(self, quick: Found | None, hows: Sequence[int]) -> Found | None:
        """Search exactly; None if that is too much work, or nothing better is found and nothing is known."""
        full, bounds, is_all = self._full
        if sum(map(len, full.options.of.values())) > _MOST_OPTIONS or (quick and self.budget.is_over()):
            return None
        most_pairs = min(_MOST_PAIRS, self.budget.left - _RESERVE) if quick else _MOST_PAIRS
        try:
            tables = self._solved(Solver(full, quick.step_s if quick else np.inf, most_pairs=most_pairs, hows=hows))
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
        for rows in (_MORE_ROWS, *((_MANY_ROWS,) if self.is_small else ())):
            if tables.steps_s.min(initial=np.inf) > _MUCH_SLOWER * known_s and not self.budget.is_over():
                tables = _only(self._tables((TURNS, SPLIT), np.inf, rows, self.price), lambda hows: hows == {TURNS, SPLIT})
        found = next((one for one in self._found(tables) if one.mode == "hybrid"), None)
        near = self.climbed(found) if found and not self.is_small else found
        return near if near and near.mode == "hybrid" else found

    def lent(self, known: Found) -> Found | None:
        """The best plan of a quick search that lends a trainer's devices to rollout; None where that is not worth it."""
        worth_s, rows = known.step_s * (1 - WORTH), _MORE_ROWS if self.is_small else _MOST_ROWS
        hows = TURNS, SPLIT, LENT
        if self.budget.is_over():
            return None
        if not Solver(self.rough, worth_s, slack_s=self.slack_s, most_rows=rows, hows=hows, bounds_lending=True).may_lend():
            return None
        for bounds_lending in (True, False):  # Bounds are quick, and mostly show that lending is not worth it.
            solver = Solver(self.rough, worth_s, slack_s=self.slack_s, most_rows=rows, hows=hows, bounds_lending=bounds_lending)
            tables = _only(self._solved(solver), lambda hows: LENT in hows)
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


def _placements_key(found: Found) -> tuple[object, ...]:
    return found.mode, frozenset((leaf.engine, leaf.option) for leaf in leaves_of(found.node))


def _only(tables: Tables, is_wanted: Callable[[set[int]], bool]) -> Tables:
    """Give plans of other structures infinite time."""
    hows = ({how for _, how in ways_of(tables, row).values()} for row in range(len(tables.steps_s)))
    wanted = np.fromiter(map(is_wanted, hows), np.bool_, len(tables.steps_s))
    return replace(tables, steps_s=np.where(wanted, tables.steps_s, np.inf))


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
            len({(placement.pool, device) for placement in placements_of(rival.node, rival.places) for device in placement.devices}),
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
