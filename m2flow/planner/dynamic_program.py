"""Search by dynamic programming: for every set of calls between two cuts, the Pareto front of plans composed of those of its halves.

    F(S) = undominated( leaves of S,  { A then B in turns, A and B split : cuts A | B of S,  a in F(A), b in F(B) } )

A row has the devices that a plan needs, its times and its memory, and its ties (`problem`). Combining rows is monotone in every value and
depends on nothing else but the ties, so a dominated row is part of no plan that an undominated one could not replace: F(everything) has an
optimal plan of the cost model among all trees of leaves, turns and splits. A plan may leave devices idle: splits add up the devices that
their parts need, turns take the greater need of each pool, and the sum need not be the cluster's.

Exact for all that `Problem.options` offers. Sets that no two cuts enclose never occur. Time grows with the square of the rows.

Bounds (`Limits`). Both hold for every tree, so a row whose bound exceeds the time of a known plan is dropped, whatever its ties:

    path    l of what comes before + T + d of what comes after         linked parts never overlap in these
    work    (its device-seconds + the least of all other calls) / devices

T of two linked parts is at least l of the first + T of the second, and T of the first + d of the second; and devices times T is at least
the device-seconds of the parts, in turns as in splits.

Memory (`Memory`) has for each set of devices what is kept there while others work, and the peak:

    turns   kept = kA + kB        most = max(mA + kB, mB + kA)
    split   kept = max(kA, kB)    most = max(mA, mB)

The fullest devices of two parts that take turns are assumed to be the same. An engine with several calls is in one place in all of them,
so its devices are a set of their own until the last of its calls is inside: what it keeps is counted once, and what other engines keep
elsewhere is not added to it. Host memory for offloaded engines is reserved permanently, by the rule for what is kept. Memory that can't
run out whatever the rest of the plan is set to 0, so that rows which differ only there compare as equal.

Dominance (`prune_options`). An option is removed if another of the same engine and pool takes no more devices, memory and time. If the
model is both sampled and trained, the device counts must be equal and no sync may cost more: with any option of the other end where these
are few, otherwise with some of them, where a better plan may be lost by its syncs.

Borrowed devices (`lent_times`). A rollout on R instances uses the trainer's devices (r instances) until x:

    T(x) = x + t0 (remaining steps) + t1 (remaining tokens) / (R - r) + moving       end = min_x max(x + T_B, l' + T_B, T(x) + d_B)

with the letters of `problem`: A is the rollout, B the training on the devices of r instances. The remaining steps are those of the longest
sample, or of the rounds that fewer slots need; migrated samples repeat their prefill. Candidates for x are shares of ended samples, since
no scheduler knows times; the share that suits several steps of the lengths best is taken. Limits: only for steps that do not overlap
(staleness 0), with one generation and one trainer linked without a barrier. A row with fewer devices may beat one with more and leave less
to lend, so the best of these plans is not sure to be found.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.planner.problem import (
    Cut,
    FloatArray,
    Front,
    IntArray,
    Option,
    Problem,
    Times,
    codes,
    gathered,
    in_turns,
    instances,
    pruned,
    side_by_side,
    spread,
    through_functions,
    undominated,
    zero_times,
)
from m2flow.planner.workload import LentRollouts, lent_rollout

# ---- lower bounds


class Limits:
    """Lower bounds on the step time of any plan of one problem."""

    def __init__(self, problem: Problem, *, counts_work: bool = True) -> None:
        """`counts_work`: whether a part has all of its devices all of its time, which does not hold where devices are lent."""
        self._problem = problem
        self._counts_work = counts_work
        self._outside: dict[int, tuple[float, float]] = {}
        """Set of calls -> `around_s`, and the least device-seconds of all other calls."""

    @cached_property
    def _least(self) -> FloatArray:
        """The least l, T, d and device-seconds of each call over its options and chunks, [calls, 4]."""
        problem = self._problem
        found = []
        for call in problem.graph.device_calls:
            assert call.engine is not None
            options = problem.options.of[call.engine]
            times = problem.leaf(problem.graph.bits[call.name]).times
            work = times[..., 1] * np.array([option.num_devices for option in options])[:, None]
            found.append([times[..., 0].min(), times[..., 1].min(), times[..., 2].min(), work.min()])
        return np.array(found)

    @cached_property
    def _head(self) -> list[float]:
        """The least time from the start of the step until each call's first chunk is out."""
        found: list[float] = []
        for i, needs in enumerate(self._problem.graph.direct):
            found.append(self._least[i, 0] + max((found[j] for j in range(i) if needs >> j & 1), default=0.0))
        return found

    @cached_property
    def _tail(self) -> list[float]:
        """The least time from each call's last sample in to the end of the step."""
        direct = self._problem.graph.direct
        found = [0.0] * len(direct)
        for i in reversed(range(len(direct))):
            found[i] = self._least[i, 2] + max((found[j] for j in range(i + 1, len(direct)) if direct[j] >> i & 1), default=0.0)
        return found

    def path_s(self) -> float:
        """The critical path: the largest sum of a call's time and what must come before and after it."""
        return max(self.around_s(1 << i) + float(self._least[i, 1]) for i in range(len(self._least)))

    def work_s(self) -> float:
        """The least device-seconds of all calls over the number of devices."""
        return float(self._least[:, 3].sum()) / sum(self._problem.num_devices)

    def around_s(self, calls: int) -> float:
        """The least time of what must come before and after a set of calls."""
        direct = self._problem.graph.direct
        inside = [i for i in range(len(direct)) if calls >> i & 1]
        before = max((self._head[j] for i in inside for j in range(i) if direct[i] >> j & 1 and not calls >> j & 1), default=0.0)
        after = max(
            (self._tail[j] for i in inside for j in range(i + 1, len(direct)) if direct[j] >> i & 1 and not calls >> j & 1), default=0.0
        )
        return before + after

    def of_rows(self, calls: int, total: FloatArray, busy: FloatArray, work: FloatArray) -> FloatArray:
        """Lower bounds on the step time of plans that have each row for `calls`, [rows].

        Args:
            work: device-seconds of the rows.
        """
        if calls not in self._outside:
            rest = float(sum(self._least[i, 3] for i in range(len(self._least)) if not calls >> i & 1))
            self._outside[calls] = self.around_s(calls), rest
        around, rest = self._outside[calls]
        least = (total + around) / (self._problem.workload.staleness + 1)
        if self._problem.workload.staleness:
            least = np.maximum(least, busy)
        return np.maximum(least, (work + rest) / sum(self._problem.num_devices)) if self._counts_work else np.asarray(least)


# ---- memory of parts

KEPT, MOST, HOST = 0, 1, 2
_MEMORY_SLACK = 1 / 8
"""Slack in memory, as a share of all of it, in searches that have slack in time."""


@dataclass(frozen=True)
class Memory:
    """Memory of rows, flattened [3 (kept, most, host), pools, 1 + placed engines]. Set 0 are the devices of no open placed engine."""

    problem: Problem

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return 3, len(self.problem.pools), 1 + len(self.problem.placed)

    @property
    def width(self) -> int:
        return 3 * self.shape[1] * self.shape[2]

    def leaf(self, engine: EngineId, options: Sequence[Option], calls: int) -> FloatArray:
        """Memory of an engine's options, [options, width]."""
        place = self._set_of(engine, calls)
        found = np.zeros((len(options), *self.shape))
        for i, option in enumerate(options):
            pool = self.problem.pools.index(option.pool)
            found[i, :, pool, place] = option.kept_bytes, option.device_bytes, option.host_bytes
        return found.reshape(len(options), -1)

    def join(self, cut: Cut, a: FloatArray, b: FloatArray, ties: IntArray, *, is_turns: bool) -> FloatArray:
        """Memory of two parts combined, [rows, width]; `ties` are those before closing."""
        of_a, of_b = (side.reshape(-1, *self.shape) for side in (a, b))
        found = self._turns(cut, of_a, of_b, ties) if is_turns else np.maximum(of_a, of_b)
        return self._closed(cut.first | cut.second, found).reshape(len(a), self.width)

    def settled(self, calls: int, rows: FloatArray) -> FloatArray:
        """Set to 0 the memory that nothing outside of `calls` can bring to its limit."""
        found = rows.reshape(-1, *self.shape)
        kept, most, host = (number[:, None] for number in self._outside(calls))
        room, host_room = self.problem.room[:, :, None]
        is_safe = (found[:, KEPT] + kept + most <= room) & (found[:, MOST] + kept <= room)
        settled = found.copy()
        settled[:, KEPT][is_safe] = 0
        settled[:, MOST][is_safe] = 0
        settled[:, HOST][found[:, HOST] + host <= host_room] = 0
        return settled.reshape(len(rows), self.width)

    def _outside(self, calls: int) -> FloatArray:
        """The most that other engines may keep, need at work and have on the host, [3, pools]."""
        if calls not in self._known_outside:
            self._known_outside[calls] = self._computed_outside(calls)
        return self._known_outside[calls]

    @cached_property
    def _known_outside(self) -> dict[int, FloatArray]:
        return {}

    def _computed_outside(self, calls: int) -> FloatArray:
        found = np.zeros((3, len(self.problem.pools)))
        for mine, (kept, most, host) in self._largest:
            if mine & ~calls:
                found[MOST] = np.maximum(found[MOST], most)
                if not mine & calls:
                    found[KEPT] += kept
                    found[HOST] += host
        return found

    @cached_property
    def _largest(self) -> list[tuple[int, FloatArray]]:
        """(calls, [3, pools]) of each engine: the most that any of its options keeps, needs and has on the host."""
        problem = self.problem
        found = []
        for engine, options in problem.options.of.items():
            most = np.zeros((3, len(problem.pools)))
            for option in options:
                pool = problem.pools.index(option.pool)
                most[:, pool] = np.maximum(most[:, pool], (option.kept_bytes, option.device_bytes, option.host_bytes))
            found.append((problem.calls_of(engine), most))
        return found

    def is_full(self, rows: FloatArray) -> IntArray:
        """Whether what is kept leaves no room to anybody else on some devices, [rows, 1]."""
        kept = rows.reshape(-1, *self.shape)[:, KEPT]
        found = _any(kept >= self.problem.room[0][:, None])
        return found[:, None].astype(np.int64)

    def fits(self, rows: FloatArray) -> npt.NDArray[np.bool_]:
        found = rows.reshape(-1, *self.shape)
        room, host = self.problem.room
        return ~_any((found[:, MOST] > room[:, None]) | (found[:, HOST] > host[:, None]))

    def _turns(self, cut: Cut, a: FloatArray, b: FloatArray, ties: IntArray) -> FloatArray:
        found = np.zeros_like(a)
        any_a, any_b = (functools.reduce(np.maximum, np.moveaxis(side, 3, 0)) for side in (a, b))
        found[..., 0] = _stacked(a[..., 0], b[..., 0])
        for i, engine in enumerate(self.problem.placed, 1):
            in_a, in_b = (self._set_of(engine, calls) == i for calls in (cut.first, cut.second))
            if in_a and in_b:
                found[..., i] = np.maximum(_stacked(a[..., i], b[..., i]) - self._own(engine, ties), 0)
            elif in_a:
                found[..., i] = _stacked(a[..., i], any_b)
            elif in_b:
                found[..., i] = _stacked(any_a, b[..., i])
        return found

    def _own(self, engine: EngineId, ties: IntArray) -> FloatArray:
        """The memory of an engine that both sides have counted, [rows, 3, pools]."""
        if engine not in self._kept:
            options = self.problem.options.of[engine]
            table = np.zeros((len(options), 3, len(self.problem.pools)))
            for i, option in enumerate(options):
                pool = self.problem.pools.index(option.pool)
                table[i, :, pool] = option.kept_bytes, option.kept_bytes, option.host_bytes
            self._kept[engine] = table
        return self._kept[engine][ties[:, self.problem.tied.index(engine)]]

    @cached_property
    def _kept(self) -> dict[EngineId, FloatArray]:
        return {}

    def _closed(self, calls: int, found: FloatArray) -> FloatArray:
        """Merge the device sets of engines whose calls are all inside into set 0."""
        for i, engine in enumerate(self.problem.placed, 1):
            if self.problem.calls_of(engine) & ~calls == 0:
                found[..., 0] = np.maximum(found[..., 0], found[..., i])
                found[..., i] = 0
        return found

    def _set_of(self, engine: EngineId, calls: int) -> int:
        """The set in which a part with these calls counts an engine's devices; 0 if it has no set of its own."""
        problem = self.problem
        if engine not in problem.placed:
            return 0
        mine = problem.calls_of(engine)
        return 1 + problem.placed.index(engine) if mine & calls and mine & ~calls else 0


def _any(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether any flag of each row is set, [rows, ...] -> [rows]; the other axes are so short that `any` is several times as slow."""
    columns = flags.reshape(len(flags), -1).T
    return functools.reduce(np.logical_or, columns)


def memory_slack(problem: Problem, slack_s: float) -> FloatArray:
    """Slack in memory where there is slack in times, [3, pools]."""
    room, host = problem.room
    return np.stack([room, room, host]) * _MEMORY_SLACK * (slack_s > 0)


def _stacked(a: FloatArray, b: FloatArray) -> FloatArray:
    """Memory of two parts that take turns on the same fullest devices, [rows, 3, pools]."""
    most = np.maximum(a[:, MOST] + b[:, KEPT], b[:, MOST] + a[:, KEPT])
    found = a + b
    found[:, MOST] = most
    return found


# ---- dominated options

_MOST_PAIRS = 4000
"""Pairs of options up to which all syncs are compared."""
_FEW = 1
"""Options of the other end that are compared where pairs are more."""


def prune_options(problem: Problem, slack_s: float = 0.0) -> bool:
    """Remove dominated options from a problem, and those within `slack_s` of another.

    Returns:
        Whether nothing can have been lost except for the slack.
    """
    is_exact = True
    kept = {}
    for engine, options in problem.options.of.items():
        syncs, is_all = _syncs(problem, engine)
        is_exact &= is_all
        kept[engine] = _undominated(problem, engine, options, syncs, slack_s) if len(options) > 1 else list(range(len(options)))
    problem.keep(kept)
    return is_exact


def _undominated(problem: Problem, engine: EngineId, options: list[Option], syncs: FloatArray, slack_s: float) -> list[int]:
    calls = [problem.graph.bits[call.name] for call in problem.graph.members(problem.calls_of(engine))]
    times = [problem.leaf(call).times.reshape(len(options), -1) for call in calls]
    nums = np.array([[option.num_devices] for option in options], np.float64)
    bytes_ = np.array([[o.kept_bytes, o.device_bytes, o.host_bytes] for o in options], np.float64)
    values = np.concatenate([nums, bytes_, *times, syncs], axis=1)
    slack = np.full(values.shape[1], slack_s)
    slack[0] = 0
    slack[1:4] = memory_slack(problem, slack_s).max(axis=1)
    pools = np.array([problem.pools.index(option.pool) for option in options])
    codes = pools * (1 + int(nums.max())) + nums[:, 0].astype(np.int64)
    alike = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    rows = np.concatenate([same[undominated(values[same], codes[same], slack)] if len(same) > 1 else same for same in alike])
    if not syncs.size:
        rows = rows[undominated(values[rows], pools[rows], slack)]
    return [int(i) for i in rows]


def _syncs(problem: Problem, engine: EngineId) -> tuple[FloatArray, bool]:
    """Seconds of the syncs of each option with options of the other end, [options, others], and whether with all of them."""
    options = problem.options.of[engine]
    sync = next((sync for sync in problem.syncs if engine in (sync.source, sync.target)), None)
    if sync is None:
        return np.zeros((len(options), 0)), True
    others = problem.options.of[sync.target if engine == sync.source else sync.source]
    places = {(option.pool, msgspec.structs.astuple(option.layout)): option for option in others}
    is_all = len(options) * len(places) <= _MOST_PAIRS
    some = list(places.values()) if is_all else list(places.values())[:: -(-len(places) // _FEW)]
    mine = {(option.pool, msgspec.structs.astuple(option.layout)): option for option in options}  # Swapping does not change its syncs.
    rows = {place: row for row, place in enumerate(mine)}
    found = np.empty((len(mine), 2 * len(some)))
    for i, option in enumerate(mine.values()):
        for j, other in enumerate(some):
            ends = (option, other) if engine == sync.source else (other, option)
            for is_turns in (False, True):
                found[i, 2 * j + is_turns] = problem.sync_s(sync, *ends, is_turns=is_turns)
    return found[[rows[option.pool, msgspec.structs.astuple(option.layout)] for option in options]], is_all


# ---- lending a trainer's devices to rollout

WORTH = 0.02
"""Relative gain that a plan with lent devices must have, since the cost of migrating samples is only estimated."""
_STEPS = 4
"""Steps over which a share is averaged."""


def may_lend(problem: Problem, cut: Cut, first: Option, second: Option) -> bool:
    """Whether the second part's devices can be those of some of the first part's instances, but not of all."""
    size = first.num_devices // first.layout.dp
    is_inside = first.pool == second.pool and second.num_devices < first.num_devices and second.num_devices % size == 0
    return is_inside and may_be_lent(problem, cut)


def may_be_lent(problem: Problem, cut: Cut) -> bool:
    """Whether the first part is a generation whose samples the second part's trainer consumes as they come."""
    graph = problem.graph
    if problem.workload.staleness or cut.waits or not cut.is_linked:
        return False
    first, second = graph.members(cut.first), graph.members(cut.second)
    kinds = {call.engine.kind for call in second if call.engine is not None}
    engines = graph.engines(cut.second)
    return len(first) == 1 and first[0].work == "generate" and kinds == {"train"} and len(engines) == 1


def lent_times(
    problem: Problem, cut: Cut, first: Option, second: Option, a: Times, fed: Times, b: Times, *, is_bound: bool = False
) -> tuple[Times, float]:
    """Times of a pair of leaves with lent devices, and the share of samples after which these are given back.

    Args:
        is_bound: a lower bound suffices, the times for the share that is the best for the steps of the rest of the search alone.
    """
    lent = _lent(problem, cut, first, second, 0 if is_bound else _STEPS)
    total, ended = lent.best(float(a.total), (float(fed.first), float(fed.total)), (float(b.total), float(b.last)), problem.slowdowns(cut))
    end = np.asarray(total)
    return Times(end, end, end, end), ended


def _lent(problem: Problem, cut: Cut, first: Option, second: Option, num_steps: int) -> LentRollouts:
    (call,) = problem.graph.members(cut.first)
    assert call.engine is not None
    batch = problem.batches[call.name]
    key = (cut.first, first.pool, first.layout, first.is_swapped, first.max_running, second.num_devices, num_steps)
    known = problem.lent
    if key not in known:
        ways = instances(call.engine, [first], problem.costs)
        num_lent = second.num_devices // (first.num_devices // first.layout.dp)
        each = [lent_rollout(draw, ways, num_lent) for draw in batch.several(num_steps)]
        given_back, total = (np.stack([one[i] for one in each]) + first.come_s + first.leave_s for i in range(2))
        known[key] = LentRollouts(given_back, total, len(batch.draws))
    return known[key]


BoolArray = npt.NDArray[np.bool_]

TURNS, SPLIT, LENT = 0, 1, 2
NUM_HOWS = 3
APART, TOGETHER, UNKNOWN = 1, 0, -1
_NUM_TIMES = 4
_MOST_WHOLE = 100
_COMPARED = 0.05
"""Rows that may be compared with each other, as a share of the pairs that may be combined, since comparing takes longer. Where no plan is
known, none is dropped for being slower, and there would be too many."""


class TooLarge(Exception):
    """Raised when the search would combine or compare more rows than allowed."""


@dataclass(frozen=True)
class Tables:
    """The fronts that `solve` found, from which `plan_tree` reads the plan of a row."""

    problem: Problem
    fronts: dict[int, Front]
    cuts: dict[int, tuple[Cut, ...]]
    chunks: dict[int, tuple[int, ...]]
    steps_s: FloatArray
    """The step time of each row of the whole problem."""


class Solver:
    """Computes the fronts of one problem, bottom up."""

    def __init__(
        self,
        problem: Problem,
        known_s: float = np.inf,
        *,
        slack_s: float = 0.0,
        most_rows: int = 0,
        most_pairs: float = np.inf,
        hows: Sequence[int] = (TURNS, SPLIT),
        within: Mapping[int, tuple[Cut, int]] | None = None,
        bounds_lending: bool = False,
    ) -> None:
        """
        Args:
            known_s: the time of a plan that is known; what can't be as fast is dropped.
            slack_s: what is better than another by no more than this in each of its times is dropped, too.
            most_rows: of a front, the most promising of each number of devices; 0: all.
            most_pairs: pairs of rows that may be combined before `TooLarge` is raised.
            hows: allowed ways to combine two parts.
            within: (cut, way) for each set of calls; only plans of this structure are searched. None: all.
            bounds_lending: lower bounds of the times with lent devices, which are quicker than the times.
        """
        self.problem = problem
        self.limits = Limits(problem, counts_work=LENT not in hows)
        self._known_s = known_s * (1 + 1e-9)
        self.memory = Memory(problem)
        self._num_pools = len(problem.pools)
        self._sizes = np.array(problem.num_devices)
        self._times = slice(self._num_pools, self._num_pools + _NUM_TIMES)
        self._bytes = slice(self._num_pools + _NUM_TIMES, None)
        self._late = np.array([0.0, 1.0, 1.0, float(problem.workload.staleness > 0)])
        """The times to which a sync is added."""
        self._has_ends = bool(problem.graph.leading_functions or problem.graph.trailing_functions)
        self._most_rows = most_rows
        self._hows = tuple(hows)
        self._within = within
        self._bounds_lending = bounds_lending
        self._pairs_left = most_pairs
        self._compared_left = most_pairs * _COMPARED
        self._slack = np.zeros(self._num_pools + _NUM_TIMES + self.memory.width)
        self._slack[self._times] = slack_s
        sets = np.ones(self.memory.shape[2])
        self._slack[self._bytes] = (memory_slack(problem, slack_s)[..., None] * sets).reshape(-1)
        exact = list(range(len(problem.tied) + len(problem.pairs)))
        self._compared = [i for i in exact if i < len(problem.placed) or i >= len(problem.tied)] if most_rows else exact
        """Ties that rows must share to be compared; where the rows are limited, the costs of syncs are ignored."""
        self._fronts: dict[int, Front] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        self._closing: dict[int, list[int]] = {}
        self._sync_tables: dict[tuple[str, int], FloatArray] = {}
        """(role, how) -> seconds of the sync between each two options of its ends, filled on demand."""

    def solve(self) -> Tables:
        graph = self.problem.graph
        if self._within is not None:
            return self._solve_within(self._within)
        for calls in graph.convex_sets:
            self._cuts[calls] = tuple(graph.cuts(calls))
            found = [self._leaf(calls)] if len(graph.engines(calls)) == 1 else []
            for index, cut in enumerate(self._cuts[calls]):
                found += [self._join(calls, cut, index, how) for how in self._hows if self._may(cut, how)]
            self._fronts[calls] = self._pruned(calls, gathered(found)) if found else self._nothing()
        return Tables(self.problem, self._fronts, self._cuts, self._chunks, self._steps_s())

    def _solve_within(self, within: Mapping[int, tuple[Cut, int]]) -> Tables:
        parts = {part for cut, _ in within.values() for part in (cut.first, cut.second)} | {self.problem.graph.everything}
        for calls in sorted(parts, key=lambda part: part.bit_count()):
            self._cuts[calls] = ()
            found = self._leaf(calls) if calls not in within else None
            if found is None:
                cut, how = within[calls]
                self._cuts[calls] = (cut,)
                found = self._join(calls, cut, 0, how)
            self._fronts[calls] = self._pruned(calls, found)
        return Tables(self.problem, self._fronts, self._cuts, self._chunks, self._steps_s())

    def _may(self, cut: Cut, how: int) -> bool:
        """Whether a cut may be combined this way; calls of one engine are on the same devices, so they are never split."""
        graph = self.problem.graph
        if how == LENT and not may_be_lent(self.problem, cut):
            return False
        return how == TURNS or not graph.engines(cut.first) & graph.engines(cut.second)

    def _nothing(self) -> Front:
        return Front(
            np.zeros((0, self._num_pools + _NUM_TIMES + self.memory.width)),
            np.zeros((0, self._num_ties), np.int64),
            np.zeros(0),
            np.zeros((0, 3), np.int64),
        )

    @property
    def _num_ties(self) -> int:
        return len(self.problem.tied) + len(self.problem.pairs)

    # ---- leaves

    def _leaf(self, calls: int) -> Front:
        problem = self.problem
        members = problem.graph.members(calls)
        engine = members[0].engine
        assert engine is not None
        options = problem.options.of[engine]
        if not options:
            return self._nothing()
        leaf = problem.leaf(calls)
        self._chunks[calls] = leaf.chunks
        num_options, num_chunks = leaf.times.shape[:2]
        which = np.repeat(np.arange(num_options), num_chunks)
        times = leaf.times.reshape(-1, 3)
        useful = self._useful(options)[which]
        need = np.zeros((num_options, self._num_pools))
        need[np.arange(num_options), [problem.pools.index(option.pool) for option in options]] = [o.num_devices for o in options]
        busy = times[:, 1:2] * bool(problem.workload.staleness)
        values = np.concatenate(
            [need[which], times, busy, self.memory.settled(calls, self.memory.leaf(engine, options, calls))[which]], axis=1
        )
        ties = np.full((len(which), self._num_ties), UNKNOWN)
        if engine in problem.tied and problem.is_open(engine, calls):
            ties[:, problem.tied.index(engine)] = which
        origin = np.stack([np.full(len(which), -1), which, np.tile(np.arange(num_chunks), num_options)], axis=1)
        work = times[:, 1] * need[which].sum(axis=1)
        front = Front(values, ties, work, origin)
        return self._pruned(calls, self._promising(calls, front if useful.all() else front.take(useful)))

    def _useful(self, options: Sequence[Option]) -> BoolArray:
        """Whether each option can be of use: in turns none that leaves no room to others, in splits none that makes room for them."""
        found = np.ones(len(options), np.bool_)
        if len(self.problem.options.of) > 1 and self._hows == (TURNS,):
            found = np.array([option.kept_bytes < self.problem.costs.device_bytes(option.pool) for option in options])
        if self._hows == (SPLIT,):
            found = np.array([not option.is_swapped for option in options])
        return found if found.any() else ~found

    # ---- two parts

    def _join(self, calls: int, cut: Cut, index: int, how: int) -> Front:
        """Combine all compatible pairs of rows of the two sides of a cut."""
        a, b = self._fronts[cut.first], self._fronts[cut.second]
        if not len(a) or not len(b):
            return self._nothing()
        self._pairs_left -= len(a) * len(b)
        if self._pairs_left < 0:
            raise TooLarge
        need = self._need(a, b, how)
        legal = self._agree(cut, a, b)
        for pool, size in enumerate(self._sizes):
            legal &= need[..., pool] <= size
        if how == LENT:
            legal &= self._lendable(cut, a, b)
        ia, ib = np.nonzero(legal)
        if not len(ia):
            return self._nothing()
        times = self._lent_times(cut, a, b, ia, ib) if how == LENT else self._pair_times(cut, a, b, ia, ib, how)
        work = a.work[ia] + b.work[ib]
        keep = self._is_promising(calls, times, work)
        if not keep.all():
            ia, ib, times, work = ia[keep], ib[keep], times[keep], work[keep]
            if not len(ia):
                return self._nothing()
        ties = self._ties(cut, a.ties[ia], b.ties[ib], how)
        times += self._sync_s(cut, ties, how)[:, None] * self._late
        origin = np.empty((len(ia), 3), np.int64)
        origin[:, 0], origin[:, 1], origin[:, 2] = NUM_HOWS * index + how, ia, ib
        pairs = Front(np.concatenate([need[ia, ib], times], axis=1), ties, work, origin)
        found = self._with_memory(calls, cut, a, b, pairs, how)
        return self._few(calls, found, self._most_rows) if self._most_rows else self._pruned(calls, found)

    def _with_memory(self, calls: int, cut: Cut, a: Front, b: Front, pairs: Front, how: int) -> Front:
        """Those pairs of rows that fit the memory, with what they need of it and without the ties that end here."""
        of_a, of_b = (side.values[pairs.origin[:, i], self._bytes] for i, side in ((1, a), (2, b)))
        bytes_ = self.memory.join(cut, of_a, of_b, pairs.ties, is_turns=how != SPLIT)
        values = np.concatenate([pairs.values, self.memory.settled(calls, bytes_)], axis=1)
        found = Front(values, self._closed(calls, pairs.ties), pairs.work, pairs.origin)
        fits = self.memory.fits(bytes_)
        return self._promising(calls, found if fits.all() else found.take(fits))

    def _pruned(self, calls: int, front: Front) -> Front:
        """Prune a front. Of whole plans only the step time matters; several are kept, since not all may have places on the devices."""
        if calls == self.problem.graph.everything and not self._has_ends:
            best = np.argsort(self._objective(self._read(front)), kind="stable")[:_MOST_WHOLE]
            return front.take(np.sort(best))
        if not self._most_rows:
            self._compared_left -= len(front)
            if self._compared_left < 0:
                raise TooLarge
            return pruned(front, self._slack)
        found = pruned(self._few(calls, front, 2 * self._most_rows), self._slack, self._compared)
        return self._few(calls, found, self._most_rows)

    def _few(self, calls: int, front: Front, most: int) -> Front:
        if len(front) <= most:
            return front
        total, busy = front.values[:, self._times][:, 1], front.values[:, self._times][:, 3]
        devices = front.values[:, : self._num_pools].astype(np.int64)
        groups = codes(np.concatenate([devices, front.ties[:, self._compared], self.memory.is_full(front.values[:, self._bytes])], axis=1))
        return spread(front, groups, self.limits.of_rows(calls, total, busy, front.work), most)

    def _promising(self, calls: int, front: Front) -> Front:
        keep = self._is_promising(calls, front.values[:, self._times], front.work)
        return front if keep.all() else front.take(keep)

    def _is_promising(self, calls: int, times: FloatArray, work: FloatArray) -> BoolArray:
        """Whether each row may be part of a plan as fast as the known one."""
        if self._known_s == np.inf:
            return np.ones(len(times), np.bool_)
        return np.asarray(self.limits.of_rows(calls, times[:, 1], times[:, 3], work) <= self._known_s)

    def _need(self, a: Front, b: Front, how: int) -> FloatArray:
        of_a, of_b = a.values[:, None, : self._num_pools], b.values[None, :, : self._num_pools]
        return of_a + of_b if how == SPLIT else np.maximum(of_a, of_b)

    def _lendable(self, cut: Cut, a: Front, b: Front) -> BoolArray:
        """Whether both rows are leaves and the devices of the second can be lent to the first, [rows of a, rows of b]."""
        found = np.zeros((len(a), len(b)), np.bool_)
        known: dict[tuple[int, int], bool] = {}
        (first,), (second,) = (self.problem.graph.engines(side) for side in (cut.first, cut.second))
        for i in np.flatnonzero(a.origin[:, 0] < 0):
            for j in np.flatnonzero(b.origin[:, 0] < 0):
                ways = int(a.origin[i, 1]), int(b.origin[j, 1])
                if ways not in known:
                    options = option_of(self.problem, first, a.origin[i]), option_of(self.problem, second, b.origin[j])
                    known[ways] = may_lend(self.problem, cut, *options)
                found[i, j] = known[ways]
        return found

    def _lent_times(self, cut: Cut, a: Front, b: Front, ia: IntArray, ib: IntArray) -> FloatArray:
        of_a, of_b = self._read(a), self._read(b)
        fed = through_functions(of_a, cut.functions, self.problem.calls, self.problem.functions)
        (first,), (second,) = (self.problem.graph.engines(side) for side in (cut.first, cut.second))
        times = np.empty((len(ia), _NUM_TIMES))
        for row, (i, j) in enumerate(zip(ia, ib, strict=True)):
            options = option_of(self.problem, first, a.origin[i]), option_of(self.problem, second, b.origin[j])
            parts = (t.at(np.asarray(k)) for t, k in ((of_a, i), (fed, i), (of_b, j)))
            times[row] = lent_times(self.problem, cut, *options, *parts, is_bound=self._bounds_lending)[0].total
        return times

    def _agree(self, cut: Cut, a: Front, b: Front) -> BoolArray:
        """Whether rows agree: engines with calls on both sides have one option, and pairs are apart on both sides or on neither."""
        agree = np.ones((len(a), len(b)), np.bool_)
        for column in self._shared(cut):
            agree &= a.ties[:, None, column] == b.ties[None, :, column]
        return agree

    def _shared(self, cut: Cut) -> list[int]:
        problem = self.problem
        both = problem.graph.engines(cut.first) & problem.graph.engines(cut.second)
        engines = [i for i, engine in enumerate(problem.tied) if engine in both]
        return engines + [len(problem.tied) + i for i, pair in enumerate(problem.pairs) if both.issuperset(pair)]

    def _ties(self, cut: Cut, a: IntArray, b: IntArray, how: int) -> IntArray:
        """Combine ties; engines that this cut brings together first are apart if it is a split."""
        problem = self.problem
        ties = np.maximum(a, b)
        first, second = problem.graph.engines(cut.first), problem.graph.engines(cut.second)
        for i, pair in enumerate(problem.pairs):
            here = first | second
            if here.issuperset(pair) and not first.issuperset(pair) and not second.issuperset(pair):
                ties[:, len(problem.tied) + i] = APART if how == SPLIT else TOGETHER
        return ties

    def _closed(self, calls: int, ties: IntArray) -> IntArray:
        """Reset the ties that no call outside of `calls` needs."""
        if calls not in self._closing:
            problem = self.problem
            is_open = [problem.is_open(engine, calls) for engine in problem.tied]
            placed = {e for e in problem.placed if problem.calls_of(e) & ~calls}
            is_open += [placed.issuperset(pair) for pair in problem.pairs]
            self._closing[calls] = [column for column, one in enumerate(is_open) if not one]
        found = ties.copy()
        found[:, self._closing[calls]] = UNKNOWN
        return found

    def _pair_times(self, cut: Cut, a: Front, b: Front, ia: IntArray, ib: IntArray, how: int) -> FloatArray:
        of_a, of_b = self._read(a), self._read(b)
        fed = through_functions(of_a, cut.functions, self.problem.calls, self.problem.functions)
        parts = of_a.at(ia), fed.at(ia), of_b.at(ib)
        if how == TURNS:
            found = in_turns(*parts, is_linked=cut.is_linked, waits=cut.waits)
        else:
            found = side_by_side(*parts, is_linked=cut.is_linked, waits=cut.waits, slowdowns=self.problem.slowdowns(cut))
        times = np.empty((len(ia), _NUM_TIMES))
        times[:, 0], times[:, 1], times[:, 2] = found.first, found.total, found.last
        times[:, 3] = found.busy if self.problem.workload.staleness else 0.0
        return times

    def _read(self, front: Front) -> Times:
        first, total, last, busy = front.values[:, self._times].T
        return Times(first, total, last, busy)

    def _sync_s(self, cut: Cut, ties: IntArray, how: int) -> FloatArray:
        """Seconds of the weight syncs whose calls this cut brings together."""
        problem = self.problem
        found = np.zeros(len(ties))
        for sync in problem.syncs:
            if not sync.meets(cut):
                continue
            sources, targets = problem.options.of[sync.source], problem.options.of[sync.target]
            pairs = ties[:, problem.tied.index(sync.source)] * len(targets) + ties[:, problem.tied.index(sync.target)]
            table = self._sync_tables.setdefault((sync.role, how), np.full(len(sources) * len(targets), np.nan))
            for pair in np.flatnonzero(np.isnan(table) & (np.bincount(pairs, minlength=len(table)) > 0)).tolist():
                source, target = divmod(pair, len(targets))
                table[pair] = problem.sync_s(sync, sources[source], targets[target], is_turns=how == TURNS)
            found += table[pairs]
        return found

    # ---- the step

    def _steps_s(self) -> FloatArray:
        problem = self.problem
        whole = self._read(self._fronts[problem.graph.everything])
        fed = through_functions(zero_times(), problem.graph.leading_functions, problem.calls, problem.functions)
        total = np.maximum(fed.first + whole.total, fed.total + whole.last)
        step = Times(whole.first, total, whole.last, np.maximum(whole.busy, fed.busy))
        return self._objective(through_functions(step, problem.graph.trailing_functions, problem.calls, problem.functions))

    def _objective(self, whole: Times) -> FloatArray:
        staleness = self.problem.workload.staleness
        return whole.total if not staleness else np.maximum(whole.busy, whole.total / (staleness + 1))


def option_of(problem: Problem, engine: EngineId, row: IntArray) -> Option:
    """The option of a leaf's row."""
    return problem.options.of[engine][int(row[1])]
