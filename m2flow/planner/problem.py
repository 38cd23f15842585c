"""Set up one search: calls as bits of a set, every engine's options and times, and how costs of parts add up to Pareto fronts.

    Workload --CallGraph--> convex sets, their cuts (A before B), and the functions on each cut
    Costs, ClusterSpec --options_of--> Options of each engine (resident, or offloaded to the host between its calls)
    CallLoad, Option, chunk --leaf_times--> (l, T, e)      --side_by_side, in_turns, through_functions--> (l, T, e) of more calls
    rows of plans --pruned--> Front

Cuts. A cut of a set S splits it into A and B such that no call of B comes before one of A; every down-set of S is tried, not only the
prefixes of one order. Sets are ints, a bit for each call on devices in program order. Functions have no devices; they count on the one cut
that separates what feeds them from what they feed. Calls that are independent of each other have 2^n down-sets. Where these are too many,
only the prefixes of a few orders of the calls and their intersections are tried; `not_tried` says so.

Options exclude what a pin forbids and what does not fit the device alone; `unfit` has the latter, for the error.

Times of a call or a part, whose output is a line from (0, l) to (1, T) that is nowhere earlier than the true one:

    first  (l)   where the line begins, if all of the input is there at 0
    total  (T)   the last chunk out
    last   (e)   last sample in -> last chunk out, beside the share g T of the work that a last chunk takes
    grain  (g)   the chunk, as a share of the batch: what is needed to begin, and handed on at a time

Of calls of one engine, the output is that of the last call which others need (`CallGraph.shown`).

A forward pass and an update work chunk by chunk: a chunk of m samples on R replicas costs what ceil(m/R) R samples cost, at least what its
longest sample costs on one replica, and a fixed time for each micro-batch. No chunk of an update goes over more than a mini-batch. An
update has no output before its end (l = T); only its first mini-batch can be worked on before the last sample is in. Legal chunks are the
call's unit times powers of two, and the whole batch.

With A before B, A' for A with the functions between them, g the larger grain of both, s = l' + g (T' - l') when the first such chunk of A'
is out, and d = min(TB, eB + g TB) the time of B after the last one:

    split, linked       l = min(s, l' + d) + lB     T = max(s + TB, T' + d)             e = e' + eB + g (1 - g) min(TA, TB)
    split, unlinked     l = max(lA, lB)             T = max(TA, TB)                     e = max(eA, eB)
    turns               l = max(TA, s) + lB         T = max(max(TA, s) + TB, T' + d)    e = eA + TB
    alternating         the same                    the same                            e = e' + eB

and where B waits for all of its input, it begins at T'. A function f maps (l, T, e) to (l + lf, max(l + Tf, T + ef), e + ef). No time of a
plan falls when one of a part grows. A stage that gets its input in coarser chunks than its own has all of the last one still to do (d),
and one whose own are coarser begins when enough of the others' are there (s). Chunks come at an even pace, so that
T = max_k(r_k + sum_{i>=k} p_i) has its maximum at the first or the last chunk.

Turns of trainers that stay on their devices alternate, chunk by chunk, as the scheduler lets them: a worker, or a lease whose holder has
nothing to do, goes on with the next call of the program that has input. Nothing else does: a generation runs all of its samples together,
and what is moved to the host and back would be so for each chunk. A part that drains (`workload.DRAINS`) hands on nothing before all of
its input was there.

With staleness, steps overlap: `busy` is how long a part holds its devices in each step: T of what takes turns, the longest of what is
split. A step then takes max(busy, T/(staleness + 1)), since a sample waits for the update of staleness + 1 steps before. With a staleness
s of 2 or more the batches of s steps may be generated at once, so that long samples of one leave room to others. They end together, and
the next ones begin as they are trained on: T = l = e of s batches, busy = T/s, a step takes max(busy, T/s). Both ways are searched.

A row of a `Front` is one plan for some of the calls. `values` are its devices (by pool), its times and its memory; `ties` is what it has
fixed for the rest of the plan, -1 where nothing. A row is dropped if another with the same ties is no worse in any value, since every
formula that combines rows is monotone in each value. Ties exist for two kinds of engine: one with several calls (a critic's values and
update) has the same devices and layout in all of them; and a model that is both sampled and trained needs weight syncs, whose cost depends
on both layouts. What such an engine has chosen is part of a row's ties until all the calls that depend on it are inside.

Source: the pipeline of Yu et al. (RLinf), arXiv:2509.15965, T_critical + (M/m - 1) T_bottleneck, is the case of even chunks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import Costs, EngineId, Footprint, Layout, StageOrder, Switch
from m2flow.planner.explaining import no_room
from m2flow.planner.workload import (
    BatchTimes,
    CallLoad,
    Draws,
    FunctionTimes,
    Instances,
    LentRollout,
    Workload,
    chunks_and_grains,
    drains,
    function_times,
    num_minibatches,
    outside_call,
)
from m2flow.spec import ClusterSpec, PinSpec

# ---- sets of calls and their cuts

_MOST_DOWN_SETS = 64
_MOST_CUTS = 1500
"""Most cuts of all parts. Time grows with their number; five independent calls have some 1,000, and so has a chain of twenty."""
_MOST_CUTS_OF_ORDERS = 700
"""The same where only a few orders of the calls are tried: with 1,500, twelve calls took 12 s instead of 4, and the plan was the same."""
_SHORT = 6
"""Most calls of a part that begins later than the step, where even the cuts of a few orders are too many."""


@dataclass(frozen=True)
class Cut:
    """A split of a set of calls, S = first | second, and how the second gets the output of the first."""

    first: int
    second: int
    is_linked: bool
    """Whether a call in `second` depends on one in `first`; otherwise they may run in parallel."""
    waits: bool
    """Whether the calls that start `second` need all of their input (a barrier)."""
    functions: tuple[str, ...]
    """Functions fed by `first` alone that feed `second`, in program order."""


@dataclass(frozen=True)
class CallGraph:
    """The calls on devices with their dependencies."""

    workload: Workload
    device_calls: tuple[CallLoad, ...] = field(init=False)
    function_calls: tuple[CallLoad, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, is_function in (("device_calls", False), ("function_calls", True)):
            object.__setattr__(self, name, tuple(call for call in self.workload.calls if (call.engine is None) == is_function))

    @property
    def everything(self) -> int:
        return (1 << len(self.device_calls)) - 1

    def members(self, calls: int) -> tuple[CallLoad, ...]:
        return tuple(call for i, call in enumerate(self.device_calls) if calls >> i & 1)

    def engines(self, calls: int) -> frozenset[EngineId]:
        if calls not in self._engines:
            self._engines[calls] = frozenset(call.engine for call in self.members(calls) if call.engine is not None)
        return self._engines[calls]

    @cached_property
    def _engines(self) -> dict[int, frozenset[EngineId]]:
        return {}

    @cached_property
    def bits(self) -> dict[str, int]:
        return {call.name: 1 << i for i, call in enumerate(self.device_calls)}

    @cached_property
    def at_once(self) -> list[int]:
        """Pairs of calls that run at the same time: a rollout, and one who speaks in its episodes."""
        return [self.bits[call.name] | self.bits[call.beside] for call in self.device_calls if call.beside]

    @cached_property
    def _through(self) -> dict[str, int]:
        """Function -> the calls on devices that feed it, directly or through functions."""
        found: dict[str, int] = {}
        for call in self.function_calls:
            found[call.name] = self._union(found.get(name, self.bits.get(name, 0)) for name in call.after)
        return found

    @cached_property
    def _fed(self) -> dict[str, int]:
        """Function -> the calls on devices that it feeds, directly or through functions."""
        found: dict[str, int] = {}
        for call in reversed(self.function_calls):
            takers = (taker for taker in self.workload.calls if call.name in taker.after)
            found[call.name] = self._union(found.get(taker.name, self.bits.get(taker.name, 0)) for taker in takers)
        return found

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """The calls on devices that each one depends on, directly or through functions alone."""
        return tuple(self._union(self._through.get(name, self.bits.get(name, 0)) for name in call.after) for call in self.device_calls)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """All calls on devices that come before each one."""
        found: list[int] = []
        for needs in self.direct:
            found.append(needs | self._union(found[i] for i in _indices(needs)))
        return tuple(found)

    @cached_property
    def _all_down_sets(self) -> tuple[int, ...] | None:
        """All down-sets; None if there are too many, or too many cuts between them."""
        found = {0}
        for i, needs in enumerate(self.before):
            found |= {done | 1 << i for done in found if needs & ~done == 0}
            if len(found) > _MOST_DOWN_SETS:
                return None
        return tuple(sorted(found)) if _num_cuts(found) <= _MOST_CUTS else None

    @cached_property
    def down_sets(self) -> tuple[int, ...]:
        """All down-sets, ascending; where there are too many, those of a few orders of the calls."""
        if self._all_down_sets is not None:
            return self._all_down_sets
        found = set[int]()
        for order in self._orders():
            more = found | set(itertools.accumulate((1 << i for i in order), operator.or_, initial=0))
            more |= {one & other for one, other in itertools.combinations(more, 2)}
            if not found or (len(more) <= _MOST_DOWN_SETS and _num_cuts(more) <= _MOST_CUTS_OF_ORDERS):
                found = more
        return tuple(sorted(found))

    def _orders(self) -> Iterator[list[int]]:
        """Topological orders of the calls: program order, by kind, by engine, longest chains first, and last calls first."""
        rest = [self._height(i) for i in range(len(self.before))]
        kinds = [call.engine.kind if call.engine is not None else "" for call in self.device_calls]
        names = [str(call.engine) for call in self.device_calls]
        for key in (
            lambda i: (i,),
            lambda i: (kinds[i], names[i], i),
            lambda i: (names[i], i),
            lambda i: (-rest[i], i),
            lambda i: (-i,),
        ):
            yield self._order(key)

    def _order(self, key: Callable[[int], tuple[int | str, ...]]) -> list[int]:
        done, left, found = 0, set(range(len(self.before))), list[int]()
        while left:
            first = min((i for i in left if self.before[i] & ~done == 0), key=key)
            found.append(first)
            left.remove(first)
            done |= 1 << first
        return found

    def _height(self, i: int) -> int:
        """The number of calls that come after a call."""
        return sum(1 for needs in self.before if needs >> i & 1)

    def shown(self, calls: int) -> int:
        """The index among some calls of the last one that feeds calls outside; of the last one if none does."""
        fed = functools.reduce(operator.or_, (needs for i, needs in enumerate(self.direct) if not calls >> i & 1), 0)
        return max((at for at, i in enumerate(_indices(calls)) if fed >> i & 1), default=-1)

    @property
    def not_tried(self) -> tuple[str, ...]:
        """What the cuts leave out; empty if all are tried."""
        if self._all_down_sets is not None:
            return ()
        return (f"most ways to part a step of {len(self.device_calls)} calls: the parts are runs of calls in a few orders of them",)

    @cached_property
    def convex_sets(self) -> tuple[int, ...]:
        """All sets that can lie between two cuts, smaller ones first; the last is the set of all calls."""
        found = _convex(self.down_sets)
        if _num_cuts(self.down_sets) > _MOST_CUTS:
            found = {calls for calls in found if calls.bit_count() <= _SHORT or calls in self.down_sets}
        return tuple(sorted(found, key=lambda calls: (calls.bit_count(), calls)))

    def cuts(self, calls: int) -> Iterator[Cut]:
        """All cuts of a convex set; if only some down-sets are tried, those into two sets that these enclose."""
        seen = set()
        for done in self.down_sets:
            first = calls & done
            if first and first != calls and first not in seen:
                seen.add(first)
                if self._all_down_sets is not None or (first in self._enclosed and calls & ~first in self._enclosed):
                    yield self._cut(first, calls & ~first)

    @cached_property
    def _enclosed(self) -> frozenset[int]:
        return frozenset(self.convex_sets)

    def _cut(self, first: int, second: int) -> Cut:
        entries = [i for i in _indices(second) if self.direct[i] & first and not self.direct[i] & second]
        return Cut(
            first=first,
            second=second,
            is_linked=any(self.direct[i] & first for i in _indices(second)),
            waits=any(self.device_calls[i].is_barrier for i in entries),
            functions=tuple(f.name for f in self.function_calls if self._parts(f.name, first, second)),
        )

    def _parts(self, name: str, first: int, second: int) -> bool:
        feeds, fed = self._through[name], self._fed[name]
        return bool(feeds & first and fed & second) and not feeds & second and not fed & first

    @cached_property
    def leading_functions(self) -> tuple[str, ...]:
        """Functions that depend on no call on devices, and feed some."""
        return tuple(f.name for f in self.function_calls if not self._through[f.name] and self._fed[f.name])

    @cached_property
    def trailing_functions(self) -> tuple[str, ...]:
        """Functions that feed no call on devices."""
        return tuple(f.name for f in self.function_calls if not self._fed[f.name])

    @staticmethod
    def _union(sets: Iterable[int]) -> int:
        found = 0
        for one in sets:
            found |= one
        return found


def _convex(down_sets: Collection[int]) -> set[int]:
    return {late & ~early for late in down_sets for early in down_sets if early & ~late == 0 and early != late}


def _num_cuts(down_sets: Collection[int]) -> int:
    """The number of cuts of all convex sets."""
    return sum(len({calls & done for done in down_sets}) - 2 for calls in _convex(down_sets))


def _indices(calls: int) -> Iterator[int]:
    while calls:
        low = calls & -calls
        yield low.bit_length() - 1
        calls ^= low


# ---- options of engines

_FREE_PIN = PinSpec()
_LITTLE_MORE = 1.5  # Time to onload a server over that of rebuilding what one that stays has given up, up to which it need not stay.


class Option(msgspec.Struct, frozen=True, cache_hash=True):
    """One way to place an engine, with the quantities that the search reads again and again (see `of`)."""

    pool: str
    layout: Layout
    footprint: Footprint
    num_devices: int
    kept_bytes: int
    """Bytes on each device while others work there."""
    device_bytes: int
    """Bytes on each device while the engine works."""
    host_bytes: int
    """Bytes in the host's memory for each device; room for offloaded tensors is reserved permanently."""
    is_swapped: bool = False
    """Whether it is onloaded before its calls and offloaded after, with all that it keeps; otherwise it is resident."""
    leave_s: float = 0.0
    come_s: float = 0.0
    max_running: int = 0
    """Samples that the KV cache of a rollout engine holds where it is smaller than there is room for; 0: as many as fit."""

    @classmethod
    def of(cls, pool: str, layout: Layout, footprint: Footprint, max_running: int = 0) -> Option:
        """Make the option that is resident on its devices."""
        kept, device, host = footprint.kept_bytes, footprint.device_bytes, footprint.host
        return cls(pool, layout, footprint, layout.num_devices, kept, device, host, max_running=max_running)

    def swapped(self, switch: Switch) -> Option:
        """The same option, offloaded between its calls."""
        host = self.host_bytes + self.kept_bytes
        pool, layout, footprint, num, device = self.pool, self.layout, self.footprint, self.num_devices, self.device_bytes
        away_s = switch.leave_s, switch.come_s
        return Option(pool, layout, footprint, num, switch.kept_bytes, device, host, True, *away_s, self.max_running)


@dataclass
class Options:
    """The options of each engine; `unfit` has those that do not fit the device alone."""

    of: dict[EngineId, list[Option]] = field(default_factory=dict)
    unfit: dict[EngineId, list[Option]] = field(default_factory=dict)
    facts: dict[EngineId, FloatArray] = field(default_factory=dict)
    """Cache of `Problem.facts`."""
    least: dict[object, FloatArray] = field(default_factory=dict)
    """Cache of `dynamic_program.Limits`."""


def options_of(engines: Sequence[EngineId], costs: Costs, spec: ClusterSpec, counts: dict[str, Sequence[int]] | None = None) -> Options:
    """List the options of every engine, at all device counts that are multiples of the engine's unit.

    With `counts`, by pool, only at those, and with an offloaded optimiser only where nothing else fits.
    """
    found = Options()
    for engine in engines:
        like, pin = costs.like(engine), pin_of(engine, spec)
        if like in found.of and pin is _FREE_PIN is pin_of(like, spec):
            found.of[engine], found.unfit[engine] = found.of[like], found.unfit[like]
            continue
        found.of[engine], found.unfit[engine] = [], []
        for pool, size in spec.planned_pools.items():
            if pin.pool not in (None, pool):
                continue
            unit = costs.unit(engine, pool)
            own = _own_count(pin)
            for num in _counts(unit, size.num_devices, counts[pool] if counts else None) if own is None else [own] * (unit > 0):
                layouts = [layout for layout in costs.layouts(engine, pool, num) if pin is _FREE_PIN or _layout_allowed(layout, pin)]
                on_device = [layout for layout in layouts if not layout.offload]
                before = len(found.of[engine])
                for some in (on_device, [layout for layout in layouts if layout.offload]):
                    if some is on_device or counts is None or len(found.of[engine]) == before:
                        for layout in some:
                            _add(found, engine, pool, layout, costs, may_swap=spec.may_offload and len(engines) > 1)
            if not unit and not found.unfit[engine]:
                _add_unfit(found, engine, pool, size.num_devices, costs)
    return found


def options_near(
    engines: Mapping[EngineId, tuple[str, Layout, Collection[int]]], costs: Costs, spec: ClusterSpec, *, num_engines: int = 0
) -> Options:
    """List options near a plan: for each engine those in one pool on these device counts, with the replicas of a layout.

    Args:
        num_engines: of the plan, if more than these; a single one is never swapped.
    """
    found = Options()
    for engine, (pool, like, counts) in engines.items():
        found.of[engine], found.unfit[engine] = [], []
        for num in _counts(costs.unit(engine, pool), max(counts), counts):
            for layout in costs.layouts_like(engine, pool, num, like):
                if is_allowed(engine, pool, layout, spec):
                    _add(found, engine, pool, layout, costs, may_swap=spec.may_offload and max(num_engines, len(engines)) > 1)
    return found


def _counts(unit: int, num_devices: int, wanted: Iterable[int] | None) -> list[int]:
    if not unit:
        return []
    return sorted({num // unit * unit for num in (range(unit, num_devices + 1, unit) if wanted is None else wanted)} - {0})


def _add(found: Options, engine: EngineId, pool: str, layout: Layout, costs: Costs, *, may_swap: bool) -> None:
    full = costs.footprint(engine, pool, layout)
    for footprint, max_running in ((full, 0), *costs.smaller_caches(engine, pool, layout)):
        _add_one(found, engine, Option.of(pool, layout, footprint, max_running), costs, may_swap=may_swap)


def _add_one(found: Options, engine: EngineId, stays: Option, costs: Costs, *, may_swap: bool) -> None:
    pool, footprint = stays.pool, stays.footprint
    if stays.device_bytes > costs.device_bytes(pool) or stays.host_bytes > costs.host_bytes(pool):
        found.unfit[engine].append(stays)
        return
    found.of[engine].append(stays)
    switch = costs.switch(engine, pool, footprint) if stays.kept_bytes else Switch(0.0, 0.0)
    if switch.rebuild_s:  # A server that gives nothing up leaves no room to others; one that does takes its time.
        found.of[engine][-1] = msgspec.structs.replace(stays, kept_bytes=costs.device_bytes(pool))
        kept = min(stays.kept_bytes + switch.kept_bytes, stays.device_bytes)
        if not may_swap or switch.come_s > _LITTLE_MORE * switch.rebuild_s:
            found.of[engine].append(msgspec.structs.replace(stays, kept_bytes=kept, come_s=switch.rebuild_s))
    if may_swap and stays.kept_bytes:
        away = stays.swapped(switch)
        if away.host_bytes <= costs.host_bytes(pool):
            found.of[engine].append(away)


def _add_unfit(found: Options, engine: EngineId, pool: str, num_devices: int, costs: Costs) -> None:
    found.unfit[engine] += [
        Option.of(pool, layout, costs.footprint(engine, pool, layout)) for layout in costs.layouts(engine, pool, num_devices)
    ]


def facts_of(options: Sequence[Option], pools: Sequence[str]) -> FloatArray:
    """Tabulate options: the index of the pool, devices, bytes kept, at work and on the host, whether it is swapped, [6, options]."""
    index = {pool: i for i, pool in enumerate(pools)}
    each = [(index[o.pool], o.num_devices, o.kept_bytes, o.device_bytes, o.host_bytes, o.is_swapped) for o in options]
    return np.array(each, np.float64).reshape(-1, 6).T.copy()


def pin_of(engine: EngineId, spec: ClusterSpec) -> PinSpec:
    """The spec's pin of an engine."""
    is_pinned = spec.pin and not spec.pin.keys().isdisjoint((engine.kind, engine.role, str(engine)))
    return spec.pin_of(engine.role, engine.kind) if is_pinned else _FREE_PIN


def is_allowed(engine: EngineId, pool: str, layout: Layout, spec: ClusterSpec) -> bool:
    """Whether the spec's pins allow an engine this pool and this layout."""
    pin = pin_of(engine, spec)
    return pin is _FREE_PIN or (pin.pool in (None, pool) and _own_count(pin) in (None, layout.num_devices) and _layout_allowed(layout, pin))


def _own_count(pin: PinSpec) -> int | None:
    """Devices that a pin says, whether or not they are a multiple of the fewest that do."""
    return pin.devices[1] - pin.devices[0] if pin.devices is not None else pin.num_devices


def _layout_allowed(layout: Layout, pin: PinSpec) -> bool:
    fixed = [(name, value) for name, value in pin.layout if value is not None and name not in StageOrder.__struct_fields__]
    return all(getattr(layout, name) == value for name, value in fixed) and (
        pin.offload in (None, layout.offload) and pin.recompute in (None, layout.recompute)
    )


# ---- times of leaves

T = TypeVar("T")

TIMES = 3
"""Columns l, T, e."""


@dataclass(frozen=True, eq=False)
class LeafTimes:
    """Times of calls that one engine runs in turns, [options, chunks, 3]."""

    chunks: tuple[int, ...]
    times: FloatArray
    grains: FloatArray
    """The share of the batch that a chunk is, [chunks]."""


def leaf_times(
    calls: Sequence[CallLoad], options: Sequence[Option], costs: Costs, batches: Mapping[str, BatchTimes], shown: int = -1
) -> LeafTimes:
    """Compute the times of calls in order, in chunks that are legal for all of them, with on- and offload if the engine is swapped.

    A trainer's calls alternate chunk by chunk, unless one waits for all of its input (`drains`); those of others come one after the other.

    Args:
        shown: the last call whose output others need: a policy's update begins on a critic's values before the critic's own ends.
    """
    engine = calls[0].engine
    assert engine is not None
    if not any(call.num_samples for call in calls):
        return LeafTimes((1,), np.zeros((len(options), 1, TIMES)), np.zeros(1))
    chunks, grains = chunks_and_grains(tuple(calls))
    each = [call_times(call, engine, options, chunks, costs, batches[call.name]) for call in calls]
    total = sum((t[..., 1] for t in each), np.zeros(each[0].shape[:2]))
    first = sum((t[..., 1] for t in each[: range(len(each))[shown]]), each[shown][..., 0])
    after = [t[..., 1 if drains(calls) else 2] for t in each[1:]]
    last = each[0][..., 2] + sum(after, np.zeros(each[0].shape[:2]))
    come, leave = np.array([(option.come_s, option.leave_s) for option in options]).reshape(-1, 2).T[..., None]
    return LeafTimes(chunks, np.stack([first + come, total + come + leave, last + leave], axis=-1), grains)


def call_times(
    call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: BatchTimes
) -> FloatArray:
    """Times of one call, [options, chunks, 3]."""
    if call.work == "generate":
        return _generate(call, engine, options, chunks, costs, batch)
    return _passes(call, engine, options, chunks, costs, batch)


def instances(engine: EngineId, options: Sequence[Option], costs: Costs) -> Instances:
    decodes = _of_layouts(options, lambda option: costs.decode(engine, option.pool, option.layout))
    return Instances(
        step_s=np.array([d.step_s for d in decodes]),
        sample_s=np.array([d.sample_s for d in decodes]),
        prefill_token_s=np.array([d.prefill_token_s for d in decodes]),
        max_running=np.array([max(1, o.max_running or d.max_running) for o, d in zip(options, decodes, strict=True)], np.float64),
        num=np.array([option.layout.dp for option in options], np.float64),
        enter_leave_s=np.array([d.enter_s + d.leave_s for d in decodes]),
        handover_s=np.array([d.handover_s for d in decodes]),
        gather_s=np.array([d.gather_s for d in decodes]),
    )


def _of_layouts(options: Sequence[Option], cost: Callable[[Option], T]) -> list[T]:
    """A cost for each option, computed once for an option and its swapped variant, which follows it."""
    found: list[T] = []
    before: Option | None = None
    for option in options:
        found.append(found[-1] if before is not None and _is_like(option, before) else cost(option))
        before = option
    return found


def _is_like(option: Option, other: Option) -> bool:
    """Whether two options have the same layout, resident or swapped."""
    return option.layout is other.layout and option.pool == other.pool and option.max_running == other.max_running


def _generate(
    call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: BatchTimes
) -> FloatArray:
    unlike = [i for i, option in enumerate(options) if not i or not _is_like(option, options[i - 1])]
    ways = instances(engine, [options[i] for i in unlike], costs)
    total = batch.rollout_s(ways)
    last = np.minimum(total, batch.last_sample_s(ways))
    found = np.empty((len(unlike), len(chunks), TIMES))
    found[..., 0] = batch.first_chunks_s(ways, [-(-chunk // call.num_per_prompt) for chunk in chunks])
    found[..., 1], found[..., 2] = total[:, None], last[:, None]
    return np.repeat(found, np.diff([*unlike, len(options)]), axis=0)


def _passes(
    call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: BatchTimes
) -> FloatArray:
    trains = _of_layouts(options, lambda option: costs.train(engine, option.pool, option.layout))
    passes = [train.update if call.work == "update" else train.forward for train in trains]
    terms = np.array([(p.fixed_s, p.sample_s, p.token_s, p.token2_s, p.waits, p.run_tokens) for p in passes]).reshape(-1, 6).T[..., None]
    fixed, sample_s, token_s, token2_s, waits, run_tokens = terms
    sample = sample_s + token_s * batch.mean_tokens + token2_s * batch.mean_square
    replicas = np.array([option.layout.dp for option in options], np.float64)[:, None]
    size = np.array(chunks, np.float64)[None, :]
    if call.work == "update":  # An optimiser step ends before the next one begins, so no pass goes over more than a mini-batch.
        size = np.minimum(size, max(1.0, call.num_samples / num_minibatches(call)))
    rows = np.ceil(size / replicas)
    microbatches = np.ceil(np.maximum(1.0, rows * batch.mean_tokens / call.token_budget)) if call.token_budget else np.ones_like(rows)
    longest = batch.longest_of(size[0])
    # Of the longest sample, which one replica works on while the others wait.
    most_s = sample_s + (token_s * longest + token2_s * longest**2)
    chunk_s = microbatches * replicas * fixed + np.maximum(rows * sample, most_s) * replicas  # `fixed` is a replica's, shared out to all.
    pass_s = call.num_samples / size * (chunk_s + waits * token_s * np.minimum(size * batch.mean_tokens, run_tokens))
    if call.work != "update":
        return np.stack([np.zeros_like(pass_s), pass_s, np.zeros_like(pass_s)], axis=-1)
    optimizer = np.array([train.optimizer_s for train in trains])[:, None] * call.num_optimizer_steps
    return np.stack([total := pass_s * call.num_epochs + optimizer, total, total - pass_s / num_minibatches(call)], axis=-1)


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_FEW = 160
"""Rows up to which all pairs are compared at once."""
_BLOCK = 128
"""Rows that are compared with each other at a time; those that stay are compared with all rows after them."""
_AT_ONCE = 60_000
"""Comparisons in one operation; more do not fit the CPU's cache."""
_ROUNDING = 1e-12
"""Relative difference up to which two sums are equal."""


@dataclass(frozen=True, eq=False)
class Front:
    """The undominated plans of one set of calls, in columns: a plan is one index of the last axis, called a row."""

    values: FloatArray
    """[values, rows], not negative."""
    ties: IntArray
    """[ties, rows]."""
    work: FloatArray
    """[rows], device-seconds; not compared."""
    origin: IntArray
    """[3, rows], the origin of a row: (NUM_HOWS x cut + way, row of the first, row of the second), or (-1, option, chunk) of a leaf."""

    def __len__(self) -> int:
        return len(self.work)

    def take(self, rows: IntArray) -> Front:
        """Keep rows by their indices."""
        return Front(self.values.take(rows, 1), self.ties.take(rows, 1), self.work.take(rows), self.origin.take(rows, 1))

    def where(self, keep: npt.NDArray[np.bool_]) -> Front:
        """Keep the rows of which `keep` is true."""
        return self if keep.all() else self.take(np.flatnonzero(keep))


def gathered(fronts: list[Front]) -> Front:
    """Concatenate fronts."""
    if len(fronts) == 1:
        return fronts[0]
    columns = zip(*((front.values, front.ties, front.work, front.origin) for front in fronts), strict=True)
    return Front(*(np.concatenate(column, axis=-1) for column in columns))


def pruned(front: Front, slack: FloatArray | float = 0.0, compared: list[int] | slice = slice(None)) -> Front:
    """Drop rows that another one dominates or equals, or misses by no more than `slack` (a number for each value).

    Args:
        compared: the ties that must be equal; if not all, a better plan may be lost.
    """
    if len(front) < 2:
        return front
    return front.take(undominated(front.values, codes(front.ties[compared]), slack))


def undominated(every: FloatArray, kinds: IntArray, slack: FloatArray | float = 0.0) -> IntArray:
    """Indices of rows that no other row of the same code dominates; `every` is [values, rows]."""
    most = every.max(axis=1)
    differ = np.flatnonzero(most > every.min(axis=1))  # A value in which all are equal decides nothing.
    values = every.take(differ, 0)
    order = np.argsort((1 / most[differ]) @ values, kind="stable")
    room = slack[differ] if isinstance(slack, np.ndarray) else np.full(len(differ), slack)
    return np.asarray(np.sort(order[_undominated_rows(values.take(order, 1), kinds[order], room)]))


def codes(ties: IntArray) -> IntArray:
    """Encode each row of ties, [ties, rows], as one number."""
    if not ties.size:
        return np.zeros(ties.shape[1], np.int64)
    sizes = ties.max(axis=1) + 2
    sizes[:-1], sizes[-1] = np.maximum(sizes[1:], 2), 1
    return np.asarray(np.cumprod(sizes[::-1])[::-1] @ (ties + 1))


def _undominated_rows(values: FloatArray, kinds: IntArray, room: FloatArray) -> IntArray:
    """Indices of undominated rows; `values` is [values, rows], sorted so that a row comes before those that it dominates."""
    if len(kinds) <= _FEW:
        return _not_dominated_by_kept(_dominates(values, kinds, room))
    left, slack = np.arange(len(kinds)), values * (1 + _ROUNDING) + room[:, None]
    kept: list[IntArray] = []
    while len(left):
        few = _not_dominated_by_kept(_dominates(values[:, :_BLOCK], kinds[:_BLOCK], room))
        kept.append(left[few])
        dominates = np.equal.outer(kinds[few], kinds[_BLOCK:])
        for column, limit in zip(values[:, few], slack[:, _BLOCK:], strict=True):
            dominates &= np.less_equal.outer(column, limit)
        stays = _BLOCK + np.flatnonzero(~dominates.any(axis=0))
        left, values, slack, kinds = left[stays], values[:, stays], slack[:, stays], kinds[stays]
    return np.concatenate(kept)


def _dominates(values: FloatArray, kinds: IntArray, room: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether a row is no worse than another of its kind in any value, up to the slack, [rows, rows]."""
    dominates = np.equal.outer(kinds, kinds)
    most = values * (1 + _ROUNDING) + room[:, None]
    if values.size * len(kinds) <= _AT_ONCE:
        dominates &= (values[:, :, None] <= most[:, None, :]).all(axis=0)
        return dominates
    for column, limit in zip(values, most, strict=True):
        dominates &= np.less_equal.outer(column, limit)
    return dominates


def _not_dominated_by_kept(dominates: npt.NDArray[np.bool_]) -> IntArray:
    """Rows that no kept row before them dominates. Rows of bits are ints, so each comparison is one operation."""
    rows = [int.from_bytes(row, "little") for row in np.packbits(dominates, axis=1, bitorder="little")]
    kept, dominated = [], 0
    for row, mask in enumerate(rows):
        if not dominated >> row & 1:
            kept.append(row)
            dominated |= mask
    return np.array(kept, np.int64)


@dataclass(frozen=True)
class Sync:
    """The weight syncs of a role, from its trainer to its rollout engine."""

    role: str
    times: int
    """Syncs in a step."""
    calls: int
    """The calls that generate with the weights or update them."""

    def meets(self, cut: Cut) -> bool:
        """Whether this cut brings its calls together."""
        return not self.calls & ~(cut.first | cut.second) and bool(self.calls & ~cut.first) and bool(self.calls & ~cut.second)

    @property
    def source(self) -> EngineId:
        return EngineId(self.role, "train")

    @property
    def target(self) -> EngineId:
        return EngineId(self.role, "rollout")


@dataclass
class Problem:
    """A workload, its options and costs: what `find_plan` searches."""

    workload: Workload
    lengths: Draws
    costs: Costs
    spec: ClusterSpec
    counts: dict[str, Sequence[int]] | None = None
    """Device counts to try, by pool; None: all."""
    most_chunks: int = 0
    """Chunk sizes to try for a leaf: the whole batch, and with `chunk_step` 2 a quarter of it and so on, with 1 a half; 0: all."""
    chunk_step: int = 2
    num_batches: int = 1
    """Batches of successive steps that are generated at once (`at_once`)."""
    lent: dict[tuple[object, ...], list[LentRollout]] = field(default_factory=dict)
    """Cache of `dynamic_program`: rollouts with lent devices."""
    _leaves: dict[int, LeafTimes] = field(default_factory=dict)
    _cuts: dict[int, tuple[Cut, ...]] = field(default_factory=dict)
    _known_times: dict[object, dict[Option, tuple[LeafTimes, FloatArray]]] = field(default_factory=dict)
    """Calls, or what they do -> option -> what it was computed with, and its own times, [chunks, 3]."""
    _syncs_s: dict[tuple[str, str, Layout, str, Layout, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Add placeholder calls without samples for engines that only other steps need, so that these get a place too."""
        calls = [CallLoad(outside_call(e), "forward", e, 0, 1, "batch", False, ()) for e in self.workload.outside]
        self.workload = msgspec.structs.replace(self.workload, calls=(*self.workload.calls, *calls), outside=())

    @cached_property
    def graph(self) -> CallGraph:
        return CallGraph(self.workload)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        return tuple(self.spec.planned_pools)

    @cached_property
    def calls(self) -> dict[str, CallLoad]:
        return {call.name: call for call in self.workload.calls}

    @cached_property
    def batches(self) -> dict[str, BatchTimes]:
        """Call -> the samples that it generates, or those of the last generation before it.

        Each call stops at its own limit.
        """
        made: dict[tuple[object, ...], BatchTimes] = {}
        found, limits = {}, dict[str, int]()
        for call in self.workload.calls:
            limits[call.name] = call.max_new_tokens or max((limits.get(name, 0) for name in call.after), default=0)
            shape = call.num_prompts, call.num_per_prompt, limits[call.name], call.away, call.num_kept
            if shape not in made:
                made[shape] = BatchTimes(call, self.lengths, limit=limits[call.name])
            found[call.name] = made[shape]
        return found

    @cached_property
    def functions(self) -> dict[str, FunctionTimes]:
        size = self.spec.functions
        costs = {call: self.costs.function(call.name) for call in self.graph.function_calls}
        return {call.name: function_times(call, cost, size.num_for(call.name), size.chunk) for call, cost in costs.items()}

    @cached_property
    def options(self) -> Options:
        return options_of(self.workload.engines, self.costs, self.spec, self.counts)

    def cuts(self, calls: int) -> tuple[Cut, ...]:
        if calls not in self._cuts:
            self._cuts[calls] = tuple(self.graph.cuts(calls))
        return self._cuts[calls]

    def may_split(self, cut: Cut) -> bool:
        """Whether both parts may be on devices of their own: calls of one engine are on the same ones."""
        return not self.graph.engines(cut.first) & self.graph.engines(cut.second)

    def may_take_turns(self, cut: Cut) -> bool:
        """Whether both parts may take turns with devices: not a rollout and one who speaks in its episodes."""
        return not any(cut.first & both and cut.second & both for both in self.graph.at_once)

    def facts(self, engine: EngineId) -> FloatArray:
        """`facts_of` an engine's options."""
        if engine not in self.options.facts:
            self.options.facts[engine] = facts_of(self.options.of[engine], self.pools)
        return self.options.facts[engine]

    def leaf(self, calls: int) -> LeafTimes:
        """Times of an engine's calls, for all of its options."""
        if calls not in self._leaves:
            (engine,) = self.graph.engines(calls)
            made = self.times_of(calls, self.options.of[engine])
            step = self.chunk_step if self.most_chunks else 1
            wanted = list(range(len(made.chunks) - 1, -1, -step))[: self.most_chunks or None][::-1]
            self._leaves[calls] = LeafTimes(tuple(made.chunks[i] for i in wanted), made.times[:, wanted], made.grains[wanted])
        return self._leaves[calls]

    def times_of(self, calls: int, options: Sequence[Option]) -> LeafTimes:
        """Times in all chunk sizes. Each option's are computed once, for all problems of one origin and all calls that cost the same."""
        members = self.graph.members(calls)
        engine = members[0].engine
        assert engine is not None
        if calls not in self._known_times:
            work = tuple((msgspec.structs.replace(call, name="", engine=None, after=()), id(self.batches[call.name])) for call in members)
            self._known_times[calls] = self._known_times.setdefault((self.costs.like(engine), work, self.graph.shown(calls)), {})
        known = self._known_times[calls]
        new = [option for option in options if option not in known]
        if new or not known:
            made = leaf_times(members, new, self.costs, self.batches, self.graph.shown(calls))
            known.update((option, (made, each)) for option, each in zip(new, made.times, strict=True))
            if len(new) == len(options):
                return made
        made = next((made for made, _ in known.values()), LeafTimes((1,), np.zeros((0, 1, TIMES)), np.ones(1)))
        return replace(made, times=np.array([known[option][1] for option in options]).reshape(len(options), -1, TIMES))

    def keep(self, rows: Mapping[EngineId, Sequence[int]]) -> None:
        """Keep only these options of each engine."""
        for calls, leaf in self._leaves.items():
            (engine,) = self.graph.engines(calls)
            self._leaves[calls] = LeafTimes(leaf.chunks, leaf.times[rows[engine]], leaf.grains)
        kept = {engine: [options[i] for i in rows[engine]] for engine, options in self.options.of.items()}
        self.options = Options(kept, self.options.unfit)

    def on_grid(self, counts: dict[str, Sequence[int]] | None, most_chunks: int, chunk_step: int = 2) -> Problem:
        """The same problem with few counts of devices and few chunk sizes."""
        found = copy.copy(self)
        found.counts, found.most_chunks, found.chunk_step, found._leaves = counts, most_chunks, chunk_step, {}
        found.__dict__.pop("options", None)
        return found

    def at_once(self, num_batches: int) -> Problem:
        """The same problem where the batches of so many steps are generated at once."""
        found = copy.copy(self)  # Keeps the caches that do not depend on times of leaves.
        found.num_batches, found.lent, found._leaves, found._known_times = num_batches, {}, {}, {}
        together = {batch: batch.at_once(num_batches) for batch in self.batches.values()}
        generates = {call.name for call in self.workload.calls if call.work == "generate"}
        found.batches = {name: together[batch] if name in generates else batch for name, batch in self.batches.items()}
        return found

    def held_share(self, calls: int) -> float:
        """The share of their time for which calls of an engine hold its devices in each step."""
        generates = self.num_batches > 1 and any(call.work == "generate" for call in self.graph.members(calls))
        return 1 / self.num_batches if generates else 1.0

    @property
    def steps_under_way(self) -> int:
        """Steps in whose time a sample must be generated, and trained on."""
        return self.num_batches if self.num_batches > 1 else self.workload.staleness + 1

    def with_options(self, options: Options) -> Problem:
        """The same problem with these options, in all chunk sizes."""
        found = copy.copy(self)  # Keeps the caches that do not depend on options.
        found.options, found.most_chunks, found._leaves = options, 0, {}
        return found

    def slowdowns(self, cut: Cut) -> tuple[float, float]:
        """Slowdown factors of the two sides while both work: on one host, engines of different kinds compete for resources."""
        kinds = [{engine.kind for engine in self.graph.engines(side)} for side in (cut.first, cut.second)]
        if sum(pool.nodes for pool in self.spec.planned_pools.values()) > 1:
            return 1.0, 1.0
        first, second = (
            max((self.costs.slowdown(kind, other) for kind in own for other in others if kind != other), default=1.0)
            for own, others in (kinds, kinds[::-1])
        )
        return first, second

    def check(self) -> None:
        """Raise PlanError if some engine does not fit even on the whole cluster."""
        if not all(self.options.of.values()):
            raise self.no_room()

    def no_room(self) -> PlanError:
        """The error that says what is short and what would fit."""
        spec = self.spec
        return no_room(
            self.workload.flow, self.workload.engines, self.costs, spec, lambda engine, pool, layout: is_allowed(engine, pool, layout, spec)
        )

    @cached_property
    def num_devices(self) -> tuple[int, ...]:
        return tuple(pool.num_devices for pool in self.spec.planned_pools.values())

    def calls_of(self, engine: EngineId) -> int:
        return self._calls_of.get(engine, 0)

    @cached_property
    def _calls_of(self) -> dict[EngineId, int]:
        found: dict[EngineId, int] = {}
        for i, call in enumerate(self.graph.device_calls):
            if call.engine is not None:
                found[call.engine] = found.get(call.engine, 0) | 1 << i
        return found

    @cached_property
    def room(self) -> FloatArray:
        """[2, pools]: bytes of a device, and of a device's part of its host."""
        return np.array([[of(pool) for pool in self.pools] for of in (self.costs.device_bytes, self.costs.host_bytes)], np.float64)

    @cached_property
    def placed(self) -> tuple[EngineId, ...]:
        """Engines with several calls, which must be in one place."""
        return tuple(engine for engine in self.workload.engines if self.calls_of(engine).bit_count() > 1)

    @cached_property
    def pairs(self) -> tuple[tuple[EngineId, EngineId], ...]:
        """Pairs of `placed` engines, which are either apart (on disjoint devices) or together throughout the plan."""
        return tuple(combinations(self.placed, 2))

    @cached_property
    def syncs(self) -> tuple[Sync, ...]:
        found = []
        for role in dict.fromkeys(engine.role for engine in self.workload.engines):
            mine = [call for call in self.graph.device_calls if call.engine is not None and call.engine.role == role]
            acts = [call.work for call in mine if call.work in ("generate", "update")]
            times = sum(a == "update" and b == "generate" for a, b in pairwise([*acts, *acts[:1]]))
            if times:
                concerned = sum(self.graph.bits[call.name] for call in mine if call.work in ("generate", "update"))
                found.append(Sync(role, times, concerned))
        return tuple(found)

    @cached_property
    def tied(self) -> tuple[EngineId, ...]:
        """Engines whose option is part of a row's ties: first `placed`, then those that only a sync ties."""
        synced = [engine for sync in self.syncs for engine in (sync.target, sync.source)]
        return tuple(dict.fromkeys([*self.placed, *synced]))

    def is_open(self, engine: EngineId, calls: int) -> bool:
        """Whether what `engine` has chosen in `calls` matters to calls outside."""
        return bool(self._scopes.get(engine, 0) & ~calls) and bool(self.calls_of(engine) & calls)

    @cached_property
    def _scopes(self) -> dict[EngineId, int]:
        """Engine -> the calls to which its chosen option matters."""
        found = {engine: self.calls_of(engine) for engine in self.placed}
        for sync in self.syncs:
            for engine in (sync.source, sync.target):
                found[engine] = found.get(engine, 0) | sync.calls
        return found

    def rest_s(self, sync: Sync) -> float:
        """The time of a step that is in none of its calls; it is counted with the first role's sync, which comes once a step."""
        return self.costs.rest_s() if sync == self.syncs[0] else 0.0

    def sync_s(self, sync: Sync, source: Option, target: Option, *, is_turns: bool) -> float:
        """Seconds a step. On the same devices if they take turns in one pool, be they equally many or not, as in the simulator."""
        is_same = is_turns and source.pool == target.pool
        key = (sync.role, source.pool, source.layout, target.pool, target.layout, is_same)
        if key not in self._syncs_s:
            one = self.costs.sync_s(sync.role, (source.pool, source.layout), (target.pool, target.layout), is_same_devices=is_same)
            self._syncs_s[key] = one * sync.times + self.rest_s(sync)
        return self._syncs_s[key]
