"""Search by dynamic programming: for every set of calls between two cuts, the Pareto front of plans composed of those of its halves.

    F(S) = undominated( leaves of S,  { A then B in turns, A and B split : cuts A | B of S,  a in F(A), b in F(B) } )

A row has the devices that a plan needs, its times and its memory, and its ties (`problem`). Combining rows is monotone in every value and
depends on nothing else but the ties, so a dominated row is part of no plan that an undominated one could not replace: F(everything) has an
optimal plan of the cost model among all trees of leaves, turns and splits. A plan may leave devices idle: splits add up the devices that
their parts need, turns take the greater need of each pool, and the sum need not be the cluster's.

Exact for all that `Problem.options` offers. Sets that no two cuts enclose never occur. Time grows with the square of the rows.

Bounds (`Limits`). These hold for every tree, so a row whose bound exceeds the time of a known plan is dropped, whatever its ties:

    path    first chunk of what comes before + T + last one of what comes after     linked parts never overlap in these
    work    (its device-seconds + the least of all other calls) / devices

T of two linked parts is at least the first's first chunk + T of the second, and T of the first + the second's last chunk; and devices times
T is at least the device-seconds of the parts, in turns as in splits. A part that idles on some of its devices has them nevertheless: its
device-seconds are those of its parts, or its devices times its time if that is more.

Where all is split, a third holds: what the engines outside of a part have to do, on the devices that it leaves them.

Memory (`Memory`) has for each set of devices what is kept there while others work, and the peak:

    turns   kept = kA + kB        most = max(mA + kB, mB + kA)
    split   kept = max(kA, kB)    most = max(mA, mB)

The fullest devices of two parts that take turns are assumed to be the same. An engine with several calls is in one place in all of them,
so its devices are a set of their own until the last of its calls is inside: what it keeps is counted once, and what other engines keep
elsewhere is not added to it. Host memory for offloaded engines is reserved permanently, by the rule for what is kept. Memory that can't
run out whatever the rest of the plan is set to 0, so that rows which differ only there compare as equal.

Few rows (`most_rows`). Where a front is limited, rows are kept by their bound and by what they keep in memory, at the price of swapping it
(`memory_price`), in turn from each number of devices, quarter of the memory and set of ties: the fastest rows alone would leave later parts
no room.

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
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    codes,
    gathered,
    instances,
    pruned,
    undominated,
)
from m2flow.planner.workload import (
    DRAINS,
    CallLoad,
    LentRollout,
    Times,
    best_lending,
    end_of,
    in_turns,
    rigid_of,
    side_by_side,
    start_of,
    through_functions,
    zero_times,
)

# ---- lower bounds


class Limits:
    """Lower bounds on the step time of any plan of one problem."""

    def __init__(self, problem: Problem, *, counts_work: bool = True, is_split: bool = False) -> None:
        """
        Args:
            counts_work: whether a part has all of its devices all of its time, which does not hold where devices are lent.
            is_split: whether no two engines share devices, so that a part leaves the other engines only those that it has not.
        """
        self._problem = problem
        self._counts_work = counts_work
        self._is_split = is_split
        self._outside: dict[int, tuple[float, float, float]] = {}
        """Set of calls -> `around_s`, and the least device-seconds of all other calls, and of other engines."""

    @cached_property
    def _least(self) -> FloatArray:
        """The least time of each call to its first chunk, T, time after its last input, and device-seconds, over its options and chunks."""
        problem = self._problem
        known, key = problem.options.least, (problem.most_chunks, problem.chunk_step)
        if key not in known:
            known[key] = np.array([_least_of(problem, call) for call in problem.graph.device_calls])
        return known[key]

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

    def of_rows(self, calls: int, total: FloatArray, busy: FloatArray, work: FloatArray, need: FloatArray) -> FloatArray:
        """Lower bounds on the step time of plans that have each row for `calls`, [rows].

        Args:
            work: device-seconds of the rows.
            need: devices of the rows.
        """
        if calls not in self._outside:
            here, each = self._problem.graph.engines(calls), self._problem.graph.device_calls
            rest = float(sum(self._least[i, 3] for i in range(len(each)) if not calls >> i & 1))
            others = float(sum(self._least[i, 3] for i, call in enumerate(each) if call.engine not in here))
            self._outside[calls] = self.around_s(calls), rest, others
        around, rest, others = self._outside[calls]
        least = (total + around) / self._problem.steps_under_way
        if self._problem.workload.staleness:
            least = np.maximum(least, busy)
        if self._is_split and others:
            left = sum(self._problem.num_devices) - need
            least = np.maximum(least, np.divide(others, left, out=np.full(len(need), np.inf), where=left > 0))
        return np.maximum(least, (work + rest) / sum(self._problem.num_devices)) if self._counts_work else np.asarray(least)


def _least_of(problem: Problem, call: CallLoad) -> tuple[float, ...]:
    assert call.engine is not None
    leaf, nums = problem.leaf(problem.graph.bits[call.name]), problem.facts(call.engine)[1]
    first, total, last = np.moveaxis(leaf.times, 2, 0)
    last = np.minimum(total, last + leaf.grains * total)
    work = total * problem.held_share(problem.graph.bits[call.name]) * nums[:, None]
    every = first + leaf.grains * (total - first), total, last, work
    return tuple(float(value.min()) for value in every)


# ---- memory of parts

KEPT, MOST, HOST = 0, 1, 2
_MEMORY_SLACK = 1 / 8
"""Slack in memory, as a share of all of it, in searches that have slack in time."""


Own = Callable[[EngineId, IntArray], FloatArray]
"""The memory of an engine with calls on both sides of some pairs, by their indices: [3, pools, pairs]."""


@dataclass(frozen=True)
class Memory:
    """Memory of rows, [3 (kept, most, host), pools, 1 + placed engines, rows]. Set 0 are the devices of no open placed engine."""

    problem: Problem
    all_take_turns: bool = False

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return 3, len(self.problem.pools), 1 + len(self.problem.placed)

    @property
    def width(self) -> int:
        return 3 * self.shape[1] * self.shape[2]

    def leaf(self, engine: EngineId, facts: FloatArray, calls: int) -> FloatArray:
        """Memory of an engine's options, from their `facts`."""
        num = facts.shape[1]
        found = np.zeros((*self.shape, num))
        found[:, facts[0].astype(np.int64), self._set_of(engine, calls), np.arange(num)] = facts[2:5]
        return found

    def join(self, cuts: Sequence[Cut], which: IntArray, a: FloatArray, b: FloatArray, own: Own, num_turns: int) -> FloatArray:
        """Memory of pairs of parts, of which the first `num_turns` take turns. `cuts[which]` is the cut of each."""
        found = np.empty_like(a)
        np.maximum(a[..., num_turns:], b[..., num_turns:], out=found[..., num_turns:])
        if num_turns:
            self._turns(cuts, which[:num_turns], a[..., :num_turns], b[..., :num_turns], own, found[..., :num_turns])
        self._close(cuts[0].first | cuts[0].second, found)
        return found

    def settle(self, calls: int, rows: FloatArray) -> None:
        """Set to 0 the memory that nothing outside of `calls` can bring to its limit."""
        kept, most, host = (number[:, None, None] for number in self._outside(calls))
        room, host_room = self.problem.room[:, :, None, None]
        rows[:HOST] *= (rows[KEPT] + (kept + most) > room) | (rows[MOST] + kept > room)
        rows[HOST] *= rows[HOST] + host > host_room

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
        found = []
        for engine in self.problem.options.of:
            facts = self.problem.facts(engine)
            most = np.zeros((3, len(self.problem.pools)))
            for pool in range(most.shape[1]):
                most[:, pool] = facts[2:5][:, facts[0] == pool].max(axis=1, initial=0)
            found.append((self.problem.calls_of(engine), most))
        return found

    def fullness(self, rows: FloatArray) -> tuple[FloatArray, IntArray]:
        """The most bytes that are kept on a device, and the quarter of its memory in which they end; 4 leaves nobody else room, [rows]."""
        kept = rows[KEPT].max(axis=1)
        quarter = (4 * kept / self.problem.room[0][:, None]).max(axis=0)
        return kept.max(axis=0), np.minimum(quarter, 4).astype(np.int64)

    def fits(self, calls: int, rows: FloatArray) -> npt.NDArray[np.bool_]:
        """Whether there is room for rows of `calls`, with what all others need at least if all engines take turns."""
        room, host = self.problem.room
        kept, most, on_host = self._least_outside(calls)
        too_much = (rows[MOST] > room[:, None, None] - kept) | (rows[HOST] > host[:, None, None] - on_host)
        return ~_any(too_much | (rows[KEPT] > room[:, None, None] - most) if most else too_much)

    def _least_outside(self, calls: int) -> tuple[float, float, float]:
        """The least that engines without a call inside keep, need while one of them works, and have on the host, on the same devices."""
        if not self.all_take_turns or len(self.problem.pools) > 1:
            return 0.0, 0.0, 0.0
        least = [
            self.problem.facts(engine)[2:5].min(axis=1) for engine in self.problem.options.of if not self.problem.calls_of(engine) & calls
        ]
        kept, host = (float(sum(facts[i] for facts in least)) for i in (KEPT, HOST))
        return kept, max((kept + float(facts[MOST] - facts[KEPT]) for facts in least), default=0.0), host

    def _turns(self, cuts: Sequence[Cut], which: IntArray, a: FloatArray, b: FloatArray, own: Own, found: FloatArray) -> None:
        _stack(a[:, :, 0], b[:, :, 0], found[:, :, 0])
        for i, engine in enumerate(self.problem.placed, 1):
            of_a = np.array([self._set_of(engine, cut.first) == i for cut in cuts])
            of_b = np.array([self._set_of(engine, cut.second) == i for cut in cuts])
            if not (of_a.any() or of_b.any()):
                found[:, :, i] = 0
                continue
            in_a, in_b = of_a[which], of_b[which]
            one = np.where(in_a, a[:, :, i], a.max(axis=2)), np.where(in_b, b[:, :, i], b.max(axis=2))
            _stack(*one, found[:, :, i])
            if (of_a & of_b).any():
                both: IntArray = np.flatnonzero(in_a & in_b)
                found[:, :, i, both] = np.maximum(found[:, :, i, both] - own(engine, both), 0)
            found[:, :, i] *= in_a | in_b

    def own(self, engine: EngineId, options: IntArray) -> FloatArray:
        """The memory of options of an engine that both sides of a pair have counted, [3, pools, options]."""
        if engine not in self._kept:
            facts = self.problem.facts(engine)
            table = np.zeros((3, len(self.problem.pools), facts.shape[1]))
            table[:, facts[0].astype(np.int64), np.arange(facts.shape[1])] = facts[[2, 2, 4]]
            self._kept[engine] = table
        return self._kept[engine][..., options]

    @cached_property
    def _kept(self) -> dict[EngineId, FloatArray]:
        return {}

    def _close(self, calls: int, found: FloatArray) -> None:
        """Merge the device sets of engines whose calls are all inside into set 0."""
        for i, engine in enumerate(self.problem.placed, 1):
            if self.problem.calls_of(engine) & ~calls == 0:
                np.maximum(found[:, :, 0], found[:, :, i], out=found[:, :, 0])
                found[:, :, i] = 0

    def _set_of(self, engine: EngineId, calls: int) -> int:
        """The set in which a part with these calls counts an engine's devices; 0 if it has no set of its own."""
        problem = self.problem
        if engine not in problem.placed:
            return 0
        mine = problem.calls_of(engine)
        return 1 + problem.placed.index(engine) if mine & calls and mine & ~calls else 0


def _spread(groups: IntArray, merit: FloatArray, most: int) -> IntArray:
    """At most so many rows: the best of each group (the least merit), then the second best of each, and so on."""
    if len(groups) <= most:
        return np.arange(len(groups))
    order = np.lexsort((merit, groups))
    grouped = groups[order]
    is_first = np.ones(len(order), np.bool_)
    np.not_equal(grouped[1:], grouped[:-1], out=is_first[1:])
    start = np.flatnonzero(is_first)
    if len(start) >= most:
        best = order[start]
        return np.asarray(np.sort(best[np.argsort(merit[best], kind="stable")[:most]]))
    rank = np.arange(len(order)) - start[np.cumsum(is_first) - 1]
    return np.asarray(np.sort(order[np.lexsort((merit[order], rank))[:most]]))


def _any(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether any flag of each row is set, [..., rows] -> [rows]."""
    return np.asarray(functools.reduce(np.logical_or, flags.reshape(-1, flags.shape[-1])))


def memory_price(problem: Problem) -> float:
    """Seconds that a byte which an engine keeps would take to be offloaded and onloaded: the median over all options that are swapped.

    Rows that are chosen by their times alone keep so much that later parts have no room; at this price, to keep is as good as to swap.
    """
    freed = [
        (option.come_s + option.leave_s, option.footprint.kept_bytes - option.kept_bytes)
        for options in problem.options.of.values()
        for option in options
        if option.is_swapped
    ]
    return float(np.median([seconds / num_bytes for seconds, num_bytes in freed if num_bytes > 0] or [0.0]))


def memory_slack(problem: Problem, slack_s: float) -> FloatArray:
    """Slack in memory where there is slack in times, [3, pools]."""
    room, host = problem.room
    return np.stack([room, room, host]) * _MEMORY_SLACK * (slack_s > 0)


def _stack(a: FloatArray, b: FloatArray, found: FloatArray) -> None:
    """Memory of two parts that take turns on the same fullest devices, [3, pools, rows], into `found`."""
    np.add(a, b, out=found)
    np.maximum(a[MOST] + b[KEPT], b[MOST] + a[KEPT], out=found[MOST])


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
    times = [problem.leaf(call).times.reshape(len(options), -1).T for call in calls]
    pools, nums, *bytes_ = problem.facts(engine)[:5]
    values = np.concatenate([np.stack([nums, *bytes_]), *times, syncs.T])
    slack = np.full(len(values), slack_s)
    slack[0] = 0
    slack[1:4] = memory_slack(problem, slack_s).max(axis=1)
    codes = (pools * (1 + nums.max()) + nums).astype(np.int64)
    alike = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    rows = np.concatenate([same[undominated(values[:, same], codes[same], slack)] if len(same) > 1 else same for same in alike])
    if not syncs.size:
        rows = rows[undominated(values[:, rows], pools[rows].astype(np.int64), slack)]
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


def may_be_lent(problem: Problem, cut: Cut) -> bool:
    """Whether the first part is a generation whose samples the second part's trainer consumes as they come."""
    graph = problem.graph
    if problem.workload.staleness or cut.waits or not cut.is_linked:
        return False
    first, second = graph.members(cut.first), graph.members(cut.second)
    kinds = {call.engine.kind for call in second if call.engine is not None}
    engines = graph.engines(cut.second)
    return len(first) == 1 and first[0].work == "generate" and not first[0].beside and kinds == {"train"} and len(engines) == 1


def lent_times(
    problem: Problem, cut: Cut, first: Option, second: Option, a: Times, fed: Times, b: Times, *, is_bound: bool = False
) -> tuple[FloatArray, FloatArray]:
    """When training ends in pairs of leaves with lent devices, and the share of samples after which these are given back, [pairs] each.

    Args:
        second: the option of the trainer, or one with as many devices.
        a, fed, b: times of the pairs, [pairs] each.
        is_bound: a lower bound suffices, the times for the share that is the best for the steps of the rest of the search alone.
    """
    (call,) = problem.graph.members(cut.first)
    assert call.engine is not None
    batch = problem.batches[call.name]
    draws = batch.several(0 if is_bound else _STEPS)
    known = problem.lent.setdefault((cut.first, first), [])
    if len(known) < len(draws):
        ways = instances(call.engine, [first], problem.costs)
        known += [LentRollout.of(draw, ways) for draw in draws[len(known) :]]
    num_lent = second.num_devices // (first.num_devices // first.layout.dp)
    away_s = first.come_s + first.leave_s
    each = [(back_s + away_s, end_s + away_s) for back_s, end_s in (one.lending(num_lent) for one in known[: len(draws)])]
    grain = np.maximum(fed.grain, b.grain)
    handed = start_of(fed, grain), fed.total
    return best_lending(each, len(batch.draws), a.total, handed, (b.total, end_of(b, grain)), problem.slowdowns(cut))


BoolArray = npt.NDArray[np.bool_]

TURNS, SPLIT, LENT = 0, 1, 2
NUM_HOWS = 3
APART, TOGETHER, UNKNOWN = 1, 0, -1
_NUM_TIMES = 6
_MOST_WHOLE = 100
_PAIRS_AT_ONCE = 100_000
"""Pairs of rows that are combined in one operation, or the pairs of one cut."""
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
    num_evaluated: int = 0
    """Pairs of rows that were combined, and 512 for each time that some were."""


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
        price: float = 0.0,
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
            price: seconds for a byte that is kept on a device while others work, in the choice of rows where these are limited.
        """
        self.problem, graph = problem, problem.graph
        self.limits = Limits(problem, counts_work=LENT not in hows, is_split=tuple(hows) == (SPLIT,) and within is None)
        self._known_s = known_s * (1 + 1e-9)
        self.memory = Memory(problem, all_take_turns=tuple(hows) == (TURNS,) and within is None)
        self._num_pools = len(problem.pools)
        self._sizes = np.array(problem.num_devices)
        self._times = slice(self._num_pools, self._num_pools + _NUM_TIMES)
        self._bytes = slice(self._num_pools + _NUM_TIMES, None)
        self._late = np.array([0.0, 1.0, 1.0, float(problem.workload.staleness > 0), 0.0, 0.0])
        """The times to which a sync is added."""
        self._has_ends = bool(graph.leading_functions or graph.trailing_functions)
        self._most_rows = most_rows
        self._hows = tuple(hows)
        self._within = within
        self._bounds_lending = bounds_lending
        self._price = price
        self.num_evaluated, self._pairs_left = 0, most_pairs
        self._compared_left = most_pairs * _COMPARED
        self._slack = np.zeros(self._num_pools + _NUM_TIMES + self.memory.width)
        self._slack[self._times][:4] = slack_s
        sets = np.ones(self.memory.shape[2])
        self._slack[self._bytes] = (memory_slack(problem, slack_s)[..., None] * sets).reshape(-1)
        exact = list(range(len(problem.tied) + len(problem.pairs)))
        self._compared = [i for i in exact if i < len(problem.placed) or i >= len(problem.tied)] if most_rows else exact
        """Ties that rows must share to be compared; where the rows are limited, the costs of syncs are ignored."""
        self._fronts: dict[int, Front] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        self._closing: dict[int, list[int]] = {}
        self._sync_tables: dict[str, FloatArray] = {}
        """Role -> seconds of the sync between each two options of its ends, split and in turns, filled on demand."""
        generations = {graph.bits[call.name] for call in graph.device_calls if call.work == "generate"}
        self._lends = generations if LENT in hows and within is None and len(generations) == 1 else set[int]()
        """The only generation, in a search for plans with lent devices: combined with other parts in any other way, it can't borrow."""
        self._rows, self._starts = _Rows(self._nothing()), dict[int, int]()
        self._fed_by: dict[tuple[int, tuple[str, ...]], int] = {}

    def solve(self) -> Tables:
        graph = self.problem.graph
        within, sets = self._within, graph.convex_sets
        if within is not None:
            parts = {part for cut, _ in within.values() for part in (cut.first, cut.second)} | {graph.everything}
            sets = tuple(sorted(parts, key=lambda part: part.bit_count()))
        for calls in sets:
            cut, how = within.get(calls, (None, -1)) if within is not None else (None, -1)
            self._cuts[calls] = (cut,) if cut else () if within is not None else self.problem.cuts(calls)
            found = [self._leaf(calls)] if len(graph.engines(calls)) == 1 and not cut else []
            found += self._combined(calls, (how,) if cut else dict.fromkeys((TURNS, *self._hows)) if SPLIT in self._hows else self._hows)
            self._add(calls, self._pruned(calls, gathered(found)) if found else self._nothing())
        return Tables(self.problem, self._fronts, self._cuts, self._chunks, self._steps_s(), self.num_evaluated)

    def may_lend(self) -> bool:
        """Whether devices may be lent in a plan as fast as the known one, judging by pairs of leaves alone."""
        for calls in self.problem.graph.convex_sets:
            for cut in self.problem.cuts(calls):
                if self.may(cut, LENT):
                    for side in {cut.first, cut.second} - self._fronts.keys():
                        self._add(side, self._leaf(side))
                    if len(self._joined(calls, [(0, cut, LENT)])):
                        return True
        return False

    def _add(self, calls: int, front: Front) -> None:
        self._fronts[calls], self._starts[calls] = front, self._rows.add(front)

    def may(self, cut: Cut, how: int) -> bool:
        """Whether a cut may be combined this way; calls of one engine are on the same devices, so they are never split.

        Where all is split, parts of the same engines still take turns: what a policy and a critic compute before both are updated.
        """
        graph = self.problem.graph
        if how == LENT:
            return may_be_lent(self.problem, cut)
        if self._lends and {cut.first, cut.second} & self._lends:
            return False
        if how == TURNS and self._hows == (SPLIT,):
            return graph.engines(cut.first) <= graph.engines(cut.second) or graph.engines(cut.second) <= graph.engines(cut.first)
        return self.problem.may_take_turns(cut) if how == TURNS else self.problem.may_split(cut)

    def _nothing(self) -> Front:
        num = self._num_pools + _NUM_TIMES + self.memory.width
        return Front(np.zeros((num, 0)), np.zeros((self._num_ties, 0), np.int64), np.zeros(0), np.zeros((3, 0), np.int64))

    @property
    def _num_ties(self) -> int:
        return len(self.problem.tied) + len(self.problem.pairs)

    # ---- leaves

    def _leaf(self, calls: int) -> Front:
        problem, members = self.problem, self.problem.graph.members(calls)
        engine = members[0].engine
        assert engine is not None
        options = problem.options.of[engine]
        if not options:
            return self._nothing()
        leaf, facts = problem.leaf(calls), problem.facts(engine)
        self._chunks[calls] = leaf.chunks
        which, chunk = _grid(*leaf.times.shape[:2])
        times = leaf.times[which, chunk].T
        bytes_, busy = self.memory.leaf(engine, facts, calls), times[1] * problem.held_share(calls)
        work = busy * facts[1, which]
        useful = self._useful(facts) & self.memory.fits(calls, bytes_)
        self.memory.settle(calls, bytes_)
        keep = np.flatnonzero(self._is_promising(calls, times[1], busy, work, facts[1, which]) & useful[which])
        which, times, busy, work = which[keep], times[:, keep], busy[keep], work[keep]
        values = np.zeros((self._num_pools + _NUM_TIMES + self.memory.width, len(which)))
        values[facts[0, which].astype(np.int64), np.arange(len(which))] = facts[1, which]
        values[self._times][:3] = times
        values[self._times][3] = busy * bool(problem.workload.staleness)
        values[self._times][4] = leaf.grains[chunk[keep]]
        values[self._times][5] = rigid_of(members, facts[5])[which]
        values[self._bytes] = bytes_.reshape(self.memory.width, -1)[:, which]
        ties = np.full((self._num_ties, len(which)), UNKNOWN)
        if engine in problem.tied and problem.is_open(engine, calls):
            ties[problem.tied.index(engine)] = which
        return self._pruned(calls, Front(values, ties, work, np.stack([np.full(len(which), -1), which, chunk[keep]])))

    def _useful(self, facts: FloatArray) -> BoolArray:
        """Whether each option can be of use: in turns none that leaves no room to others, in splits none that makes room for them."""
        found = np.ones(facts.shape[1], np.bool_)
        if len(self.problem.options.of) > 1 and self._hows == (TURNS,):
            found = facts[2] < self.problem.room[0][facts[0].astype(np.int64)]
        if self._hows == (SPLIT,):
            found = facts[5] == 0
        return found if found.any() else ~found

    # ---- two parts

    def _combined(self, calls: int, hows: Iterable[int]) -> list[Front]:
        """Combine all compatible pairs of rows of the two sides of each cut."""
        found: list[Front] = []
        some: list[tuple[int, Cut, int]] = []
        num = 0
        for index, cut in enumerate(self._cuts[calls]):
            size = len(self._fronts[cut.first]) * len(self._fronts[cut.second])
            for how in hows:
                if size and self.may(cut, how):
                    self._pairs_left -= size
                    num += size
                    some.append((index, cut, how))
            if self._pairs_left < 0:
                raise TooLarge
            if some and (num > _PAIRS_AT_ONCE or index == len(self._cuts[calls]) - 1):
                block = self._joined(calls, some)
                found.append(self._few(calls, block, 2 * self._most_rows) if self._most_rows else block)
                some, num = [], 0
        return [*found, *([self._joined(calls, some)] if some else [])]

    def _joined(self, calls: int, some: Sequence[tuple[int, Cut, int]]) -> Front:
        """The rows of some cuts, each combined in one way: the pairs of all of them are computed at once."""
        some = sorted(some, key=lambda one: (one[2] == SPLIT, one[2], _kind(one[1]), one[0]))  # What is computed alike lies together.
        a, b, fed, which = self._pairs(some)
        self.num_evaluated += len(a) + 512
        num_alone = sum(how != SPLIT for _, _, how in some)
        num_turns = int(np.count_nonzero(which < num_alone))
        every = self._rows.values
        need = self._need(every[: self._num_pools].take(a, 1), every[: self._num_pools].take(b, 1), num_turns)
        legal = np.flatnonzero((need <= self._sizes[:, None]).all(axis=0))
        legal = legal[self._may_do(calls, a.take(legal), b.take(legal), which.take(legal) < num_alone, need.take(legal, 1))]
        if len(legal) < len(a):
            a, b, fed, which, need = a.take(legal), b.take(legal), fed.take(legal), which.take(legal), need.take(legal, 1)
        times = self._pair_times(some, a, b, fed, which)
        held = times[3] if self.problem.workload.staleness else times[1]
        work = np.maximum(self._rows.work[a] + self._rows.work[b], need.sum(axis=0) * held)
        keep = np.flatnonzero(self._is_promising(calls, times[1], times[3], work, need.sum(axis=0)))
        if not len(keep):
            return self._nothing()
        if len(keep) < len(a):
            a, b, which, work = a.take(keep), b.take(keep), which.take(keep), work.take(keep)
            need, times = need.take(keep, 1), times.take(keep, 1)
        cuts, num_turns = [cut for _, cut, _ in some], int(np.count_nonzero(which < num_alone))
        ties = self._ties(some, self._rows.ties.take(a, 1), self._rows.ties.take(b, 1), which)
        self._add_syncs(some, ties, which, times)
        of_a, of_b = (every[self._bytes].take(side, 1).reshape(*self.memory.shape, len(a)) for side in (a, b))
        bytes_ = self.memory.join(
            cuts, which, of_a, of_b, lambda engine, both: self.memory.own(engine, ties[self.problem.tied.index(engine), both]), num_turns
        )
        fits = self.memory.fits(calls, bytes_) & self._is_promising(calls, times[1], times[3], work, need.sum(axis=0))
        self.memory.settle(calls, bytes_)
        ties[self._closed(calls)] = UNKNOWN
        codes = np.array([NUM_HOWS * index + how for index, _, how in some])[which]
        starts = np.array([(self._starts[cut.first], self._starts[cut.second]) for cut in cuts])[which].T
        values = np.concatenate([need, times, bytes_.reshape(self.memory.width, -1)])
        return Front(values, ties, work, np.stack([codes, a - starts[0], b - starts[1]])).where(fits)

    def _may_do(self, calls: int, a: IntArray, b: IntArray, is_turns: BoolArray, need: FloatArray) -> BoolArray:
        """Whether pairs are promising by the least time that each can take: both parts in turns, the longer one of a split."""
        if self._known_s == np.inf or LENT in self._hows or self.problem.workload.staleness:
            return np.ones(len(a), np.bool_)
        total = self._rows.values[self._num_pools + 1]
        of_a, of_b = total.take(a), total.take(b)
        least = np.where(is_turns, of_a + of_b, np.maximum(of_a, of_b))
        devices = need.sum(axis=0)
        work = np.maximum(self._rows.work.take(a) + self._rows.work.take(b), devices * least)
        return self._is_promising(calls, least, least, work, devices)

    def _pairs(self, some: Sequence[tuple[int, Cut, int]]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Compatible pairs: rows of the first part, of the second, of the second's input, and indices into `some`."""
        firsts, seconds, inputs = [], [], []
        for _, cut, how in some:
            first, second = self._fronts[cut.first], self._fronts[cut.second]
            a, b = _grid(len(first), len(second))
            shared = self._shared(cut)
            if shared or how == LENT:
                agree = np.ones(len(a), np.bool_) if how != LENT else self._lendable(cut, first, second).ravel()
                for column in shared:
                    agree &= first.ties[column, a] == second.ties[column, b]
                a, b = a[agree], b[agree]
            firsts.append(a + self._starts[cut.first])
            seconds.append(b + self._starts[cut.second])
            inputs.append(a + self._fed(cut))
        which = np.repeat(np.arange(len(some)), [len(rows) for rows in firsts])
        return np.concatenate(firsts), np.concatenate(seconds), np.concatenate(inputs), which

    def _fed(self, cut: Cut) -> int:
        """Where the rows start that have the times of the first part with the functions after it."""
        if not cut.functions:
            return self._starts[cut.first]
        key = cut.first, cut.functions
        if key not in self._fed_by:
            front = self._fronts[cut.first]
            fed = through_functions(self._read(front), cut.functions, self.problem.calls, self.problem.functions)
            values = front.values.copy()
            values[self._times] = fed.all
            self._fed_by[key] = self._rows.add(Front(values, front.ties, front.work, front.origin))
        return self._fed_by[key]

    def _need(self, a: FloatArray, b: FloatArray, num_turns: int) -> FloatArray:
        """Devices that pairs need, [pools, pairs], of which the first `num_turns` take turns or lend."""
        found = np.maximum(a, b)
        found[:, num_turns:] = a[:, num_turns:] + b[:, num_turns:]
        return found

    def _pair_times(self, some: Sequence[tuple[int, Cut, int]], a: IntArray, b: IntArray, fed: IntArray, which: IntArray) -> FloatArray:
        """The `Times` of pairs, [6, pairs], without syncs."""
        found = np.zeros((_NUM_TIMES, len(which)))
        every = self._rows.values[self._times]
        of_a, of_b = every.take(a, 1), every.take(b, 1)
        of_fed = every.take(fed, 1) if any(cut.functions for _, cut, _ in some) else of_a
        ends = [0, *np.cumsum(np.bincount(which, minlength=len(some))).tolist()]
        begin = 0
        for (how, kind), alike in itertools.groupby(some, key=lambda one: (one[2], _kind(one[1]))):
            cuts = [cut for _, cut, _ in alike]
            end, here = begin + len(cuts), slice(ends[begin], ends[begin + len(cuts)])
            parts = Times(*of_a[:, here]), Times(*of_fed[:, here]), Times(*of_b[:, here])
            if how == LENT:
                for cut, low, high in zip(cuts, ends[begin:end], ends[begin + 1 : end + 1], strict=True):
                    rows = a[low:high] - self._starts[cut.first], b[low:high] - self._starts[cut.second]
                    found[:, low:high] = self._lent_times(cut, *rows, Times(*of_fed[:, low:high]))
            elif how == TURNS:
                times = in_turns(*parts, is_linked=kind != UNLINKED, waits=kind == WAITS)
                found[:, here] = times.all
            else:
                slow = self._slowdowns(cuts, np.diff(ends[begin : end + 1]))
                times = side_by_side(*parts, is_linked=kind != UNLINKED, waits=kind == WAITS, slowdowns=slow)
                found[:, here] = times.all
            begin = end
        if not self.problem.workload.staleness:
            found[3] = 0.0
        return found

    def _slowdowns(self, cuts: Sequence[Cut], nums: IntArray) -> tuple[FloatArray | float, FloatArray | float]:
        """The slowdown factors of the two sides of each pair."""
        each = np.array([self.problem.slowdowns(cut) for cut in cuts])
        if (each == 1).all():
            return 1.0, 1.0
        return np.repeat(each[:, 0], nums), np.repeat(each[:, 1], nums)

    def _pruned(self, calls: int, front: Front) -> Front:
        """Prune a front. Of whole plans only the step time matters; several are kept, since not all may have places on the devices."""
        if calls == self.problem.graph.everything and not self._has_ends:
            best = np.argsort(self._objective(self._read(front)), kind="stable")[: max(_MOST_WHOLE, self._most_rows)]
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
        times = front.values[self._times]
        kept, quarter = self.memory.fullness(front.values[self._bytes].reshape(*self.memory.shape, -1))
        devices = front.values[: self._num_pools].astype(np.int64)
        groups = codes(np.concatenate([devices, front.ties[self._compared], quarter[None]]))
        merit = self.limits.of_rows(calls, times[1], times[3], front.work, devices.sum(axis=0).astype(np.float64)) + self._price * kept
        return front.take(_spread(groups, merit, most))

    def _is_promising(self, calls: int, total: FloatArray, busy: FloatArray, work: FloatArray, need: FloatArray) -> BoolArray:
        """Whether each row may be part of a plan as fast as the known one."""
        if self._known_s == np.inf:
            return np.ones(len(total), np.bool_)
        return np.asarray(self.limits.of_rows(calls, total, busy, work, need) <= self._known_s)

    def _lendable(self, cut: Cut, a: Front, b: Front) -> BoolArray:
        """Whether both rows are leaves, and the second's devices those of some of the first's instances but not of all, [of a, of b]."""
        (first,), (second,) = (self.problem.graph.engines(side) for side in (cut.first, cut.second))
        borrowers, lenders = self.problem.facts(first), self.problem.facts(second)
        sizes = np.array([option.num_devices // option.layout.dp for option in self.problem.options.of[first]])
        is_a, is_b = a.origin[0] < 0, b.origin[0] < 0
        i, j = a.origin[1] * is_a, b.origin[1] * is_b
        fits = (
            (borrowers[0, i][:, None] == lenders[0, j])
            & (lenders[1, j] < borrowers[1, i][:, None])
            & (lenders[1, j] % sizes[i][:, None] == 0)
        )
        return np.asarray(fits & is_a[:, None] & is_b)

    def _lent_times(self, cut: Cut, ia: IntArray, ib: IntArray, fed: Times) -> FloatArray:
        """Compute `_pair_times` of pairs of leaves that lend devices."""
        a, b = self._fronts[cut.first], self._fronts[cut.second]
        of_a, of_b = self._read(a), self._read(b)
        (first,), (second,) = (self.problem.graph.engines(side) for side in (cut.first, cut.second))
        times = np.empty(len(ia))
        nums = self.problem.facts(second)[1, b.origin[1, ib]].astype(np.int64)
        keys = a.origin[1, ia] * (1 + nums.max(initial=0)) + nums
        for key in np.unique(keys):
            rows = np.flatnonzero(keys == key)
            i, j = ia[rows], ib[rows]
            options = option_of(self.problem, first, a.origin[:, i[0]]), option_of(self.problem, second, b.origin[:, j[0]])
            parts = of_a.at(i), fed.at(rows), of_b.at(j)
            times[rows] = lent_times(self.problem, cut, *options, *parts, is_bound=self._bounds_lending)[0]
        return np.stack([times] * 4 + [np.zeros_like(times), np.full_like(times, DRAINS)])

    def _shared(self, cut: Cut) -> list[int]:
        """Ties that must agree: engines with calls on both sides have one option, and pairs are apart on both sides or on neither."""
        problem = self.problem
        both = problem.graph.engines(cut.first) & problem.graph.engines(cut.second)
        if not both:
            return []
        engines = [i for i, engine in enumerate(problem.tied) if engine in both]
        return engines + [len(problem.tied) + i for i, pair in enumerate(problem.pairs) if both.issuperset(pair)]

    def _ties(self, some: Sequence[tuple[int, Cut, int]], a: IntArray, b: IntArray, which: IntArray) -> IntArray:
        """Combine ties; engines that a cut brings together first are apart if it is a split."""
        problem = self.problem
        ties = np.maximum(a, b)
        for i, pair in enumerate(problem.pairs, len(problem.tied)):
            meets = [self._brings_together(cut, pair) for _, cut, _ in some]
            if any(meets):
                tie = np.array([APART if how == SPLIT else TOGETHER for _, _, how in some])
                ties[i] = np.where(np.array(meets)[which], tie[which], ties[i])
        return ties

    def _brings_together(self, cut: Cut, pair: tuple[EngineId, EngineId]) -> bool:
        first, second = self.problem.graph.engines(cut.first), self.problem.graph.engines(cut.second)
        return (first | second).issuperset(pair) and not first.issuperset(pair) and not second.issuperset(pair)

    def _closed(self, calls: int) -> list[int]:
        """The ties that no call outside of `calls` needs."""
        if calls not in self._closing:
            problem = self.problem
            is_open = [problem.is_open(engine, calls) for engine in problem.tied]
            placed = {e for e in problem.placed if problem.calls_of(e) & ~calls}
            is_open += [placed.issuperset(pair) for pair in problem.pairs]
            self._closing[calls] = [column for column, one in enumerate(is_open) if not one]
        return self._closing[calls]

    def _read(self, front: Front) -> Times:
        return Times(*front.values[self._times])

    def _add_syncs(self, some: Sequence[tuple[int, Cut, int]], ties: IntArray, which: IntArray, times: FloatArray) -> None:
        """Add the weight syncs whose calls a cut brings together to the times of its pairs."""
        problem = self.problem
        for sync in problem.syncs:
            meets = [sync.meets(cut) for _, cut, _ in some]
            if not any(meets):
                continue
            rows = np.flatnonzero(np.array(meets)[which]) if not all(meets) else np.arange(len(which))
            sources, targets = problem.options.of[sync.source], problem.options.of[sync.target]
            is_turns = np.array([how == TURNS for _, _, how in some])[which[rows]]
            source, target = (ties[problem.tied.index(end), rows] for end in (sync.source, sync.target))
            pairs = (source * len(targets) + target) * 2 + is_turns
            table = self._sync_tables.setdefault(sync.role, np.full(2 * len(sources) * len(targets), np.nan))
            if np.isnan(table[pairs]).any():
                for pair in np.flatnonzero(np.isnan(table) & (np.bincount(pairs, minlength=len(table)) > 0)).tolist():
                    source_i, target_i = divmod(pair // 2, len(targets))
                    table[pair] = problem.sync_s(sync, sources[source_i], targets[target_i], is_turns=bool(pair % 2))
            for i in np.flatnonzero(self._late):
                times[i, rows] += table[pairs]

    # ---- the step

    def _steps_s(self) -> FloatArray:
        problem = self.problem
        whole = self._read(self._fronts[problem.graph.everything])
        fed = through_functions(zero_times(), problem.graph.leading_functions, problem.calls, problem.functions)
        total = np.maximum(fed.first + whole.total, fed.total + end_of(whole, whole.grain))
        step = Times(whole.first, total, whole.last, np.maximum(whole.busy, fed.busy), whole.grain, whole.rigid)
        return self._objective(through_functions(step, problem.graph.trailing_functions, problem.calls, problem.functions))

    def _objective(self, whole: Times) -> FloatArray:
        problem = self.problem
        return np.maximum(whole.busy, whole.total / problem.steps_under_way) if problem.workload.staleness else whole.total


def option_of(problem: Problem, engine: EngineId, row: IntArray) -> Option:
    """The option of a leaf's row."""
    return problem.options.of[engine][int(row[1])]


UNLINKED, WAITS, STREAMS = 0, 1, 2


def _kind(cut: Cut) -> int:
    """How the second part of a cut gets its input."""
    return (WAITS if cut.waits else STREAMS) if cut.is_linked else UNLINKED


@functools.lru_cache(maxsize=4096)
def _grid(num: int, other: int) -> tuple[IntArray, IntArray]:
    """The indices of all pairs."""
    return np.repeat(np.arange(num), other), np.tile(np.arange(other), num)


class _Rows:
    """The rows of all fronts one after the other, so that one operation reads rows of many of them."""

    def __init__(self, like: Front) -> None:
        self.values, self.ties, self.work = like.values, like.ties, like.work
        self._num = 0

    def add(self, front: Front) -> int:
        """Copy the rows of a front; returns where they start."""
        start, self._num = self._num, self._num + len(front)
        if self._num > len(self.work):
            room = max(self._num, 1024, 2 * len(self.work)) - start
            of = self.values[:, :start], self.ties[:, :start], self.work[:start]
            self.values, self.ties, self.work = (np.concatenate([a, np.zeros((*a.shape[:-1], room), a.dtype)], axis=-1) for a in of)
        self.values[:, start : self._num], self.ties[:, start : self._num] = front.values, front.ties
        self.work[start : self._num] = front.work
        return start
