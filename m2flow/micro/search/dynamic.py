"""The search: for every set of calls between two cuts, the plans that no other beats, made of those of its two halves.

    F(S) = unbeaten( leaves of S,  { A then B in turns, A and B split : cuts A | B of S,  a in F(A), b in F(B) } )

A row has the devices that a plan needs, its times and its memory (composing.py, memory.py), and its ties. Putting rows together is
monotone in every value and asks nothing else of a row but its ties, so a beaten row is part of no plan that an unbeaten one could not
replace: F(everything) has an optimal plan of the cost model among all trees of leaves, turns and splits. A plan may leave devices
idle: splits add up the devices that their parts need, turns take the greater need of each pool, and the sum need not be the cluster's.

Exact for all that `Problem.options` offers. Sets that no two cuts enclose never occur. Time grows with the square of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.calls import Cut
from m2flow.micro.search.composing import Times, in_turns, side_by_side, through_functions, zero_times
from m2flow.micro.search.fronts import FloatArray, Front, IntArray, codes, gathered, pruned, spread
from m2flow.micro.search.lending import lent_times, may_be_lent, may_lend
from m2flow.micro.search.limits import Limits
from m2flow.micro.search.memory import Memory, memory_slack
from m2flow.micro.search.options import Option
from m2flow.micro.search.problem import Problem

BoolArray = npt.NDArray[np.bool_]

TURNS, SPLIT, LENT = 0, 1, 2
NUM_HOWS = 3
APART, TOGETHER, UNKNOWN = 1, 0, -1
_NUM_TIMES = 4
_MOST_WHOLE = 100
_COMPARED = 0.05
"""Of the pairs of rows that may be looked at: rows that may be compared with each other, which takes longer. Where no plan is known,
none is dropped for being slower, and they would be too many."""


class TooLarge(Exception):
    """More pairs of rows than were allowed, or more of them left to be compared with each other."""


@dataclass(frozen=True)
class Tables:
    """What `solve` found, for whoever wants the plan of a row."""

    problem: Problem
    fronts: dict[int, Front]
    cuts: dict[int, tuple[Cut, ...]]
    chunks: dict[int, tuple[int, ...]]
    steps_s: FloatArray
    """[rows of everything]: the time of a step."""


class Solver:
    """Fills the tables of one problem."""

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
    ) -> None:
        """
        Args:
            known_s: the time of a plan that is known; what can't be as fast is dropped.
            slack_s: what is better than another by no more than this in each of its times is dropped, too.
            most_rows: of a front, the most promising of each number of devices; 0: all.
            most_pairs: of rows that may be looked at before `TooLarge` is raised.
            hows: ways to put two parts together that may be used.
            within: of a plan, by calls the cut and the way; only plans put together like this are looked at. None: all.
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
        self._hows = hows
        self._within = within
        self._pairs_left = most_pairs
        self._compared_left = most_pairs * _COMPARED
        self._slack = np.zeros(self._num_pools + _NUM_TIMES + self.memory.width)
        self._slack[self._times] = slack_s
        sets = np.ones(self.memory.shape[2])
        self._slack[self._bytes] = (memory_slack(problem, slack_s)[..., None] * sets).reshape(-1)
        exact = list(range(len(problem.tied) + len(problem.pairs)))
        self._compared = [i for i in exact if i < len(problem.placed) or i >= len(problem.tied)] if most_rows else exact
        """Ties that rows must share to be compared; where rows are few, what syncs cost is left out."""
        self._fronts: dict[int, Front] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        self._over: dict[int, list[int]] = {}
        self._sync_tables: dict[tuple[str, int], FloatArray] = {}
        """(role, how) -> seconds of the sync between each two options of its ends, as far as they were asked for."""

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
        """Calls of one engine are on the same devices."""
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
        return self._pruned(calls, self._promising(calls, Front(values, ties, work, origin)))

    # ---- two parts

    def _join(self, calls: int, cut: Cut, index: int, how: int) -> Front:
        """All pairs of rows of the two sides that fit together."""
        a, b = self._fronts[cut.first], self._fronts[cut.second]
        if not len(a) or not len(b):
            return self._nothing()
        self._pairs_left -= len(a) * len(b)
        if self._pairs_left < 0:
            raise TooLarge
        need = self._need(a, b, how)
        legal = (need <= self._sizes).all(axis=2) & self._agree(cut, a, b)
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
        bytes_ = self.memory.join(cut, a.values[ia, self._bytes], b.values[ib, self._bytes], ties, is_turns=how != SPLIT)
        ties = self._closed(calls, ties)
        fits = self.memory.fits(bytes_)
        bytes_ = self.memory.settled(calls, bytes_)
        values = np.concatenate([need[ia, ib], times, bytes_], axis=1)
        origin = np.empty((len(ia), 3), np.int64)
        origin[:, 0], origin[:, 1], origin[:, 2] = NUM_HOWS * index + how, ia, ib
        found = Front(values, ties, work, origin)
        found = self._promising(calls, found if fits.all() else found.take(fits))
        return self._few(calls, found, self._most_rows) if self._most_rows else self._pruned(calls, found)

    def _pruned(self, calls: int, front: Front) -> Front:
        """Of a whole plan only the time of a step matters; some are kept, since not all may have places."""
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
        groups = codes(np.concatenate([front.values[:, : self._num_pools].astype(np.int64), front.ties[:, self._compared]], axis=1))
        return spread(front, groups, self.limits.of_rows(calls, total, busy, front.work), most)

    def _promising(self, calls: int, front: Front) -> Front:
        keep = self._is_promising(calls, front.values[:, self._times], front.work)
        return front if keep.all() else front.take(keep)

    def _is_promising(self, calls: int, times: FloatArray, work: FloatArray) -> BoolArray:
        """Rows that a plan as fast as the one that is known may have."""
        if self._known_s == np.inf:
            return np.ones(len(times), np.bool_)
        return np.asarray(self.limits.of_rows(calls, times[:, 1], times[:, 3], work) <= self._known_s)

    def _need(self, a: Front, b: Front, how: int) -> FloatArray:
        of_a, of_b = a.values[:, None, : self._num_pools], b.values[None, :, : self._num_pools]
        return of_a + of_b if how == SPLIT else np.maximum(of_a, of_b)

    def _lendable(self, cut: Cut, a: Front, b: Front) -> BoolArray:
        """[rows of a, rows of b]: both are leaves, and the devices of the second can be lent to the first."""
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
            times[row] = lent_times(self.problem, cut, *options, *parts)[0].total
        return times

    def _agree(self, cut: Cut, a: Front, b: Front) -> BoolArray:
        """An engine that has calls on both sides has chosen the same, and what is apart on one side is so on the other."""
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
        """Of the two together. Engines that this cut brings together first are apart if it is a split."""
        problem = self.problem
        ties = np.maximum(a, b)
        first, second = problem.graph.engines(cut.first), problem.graph.engines(cut.second)
        for i, pair in enumerate(problem.pairs):
            here = first | second
            if here.issuperset(pair) and not first.issuperset(pair) and not second.issuperset(pair):
                ties[:, len(problem.tied) + i] = APART if how == SPLIT else TOGETHER
        return ties

    def _closed(self, calls: int, ties: IntArray) -> IntArray:
        """What no call outside of `calls` asks for is forgotten."""
        if calls not in self._over:
            problem = self.problem
            is_open = [problem.is_open(engine, calls) for engine in problem.tied]
            placed = {e for e in problem.placed if problem.calls_of(e) & ~calls}
            is_open += [placed.issuperset(pair) for pair in problem.pairs]
            self._over[calls] = [column for column, one in enumerate(is_open) if not one]
        ties[:, self._over[calls]] = UNKNOWN
        return ties

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
        """Seconds of the syncs whose calls this cut brings together."""
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
