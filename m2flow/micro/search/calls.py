"""The calls of a step as the search cuts them: those on devices as bits of a set, functions on the way between them.

    Workload --CallGraph--> convex sets, their cuts (A before B), and what lies on each cut

A cut of a set S splits it into A and B such that no call of B comes before one of A: every down-set of S is tried, not only the
prefixes of one order. Sets are ints, a bit for each call on devices in program order. Functions have no devices; they are counted on
the one cut that parts what feeds them from what they feed.

Calls that need nothing of each other have 2^n down-sets. Where these are too many, some are taken: the prefixes of a few orders of the
calls, and what two of them have in common; `not_tried` says so.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.workload import CallLoad, Workload

_MOST_DOWN_SETS = 64
_MOST_CUTS = 1500
"""Of all parts. Time grows with their number; five calls beside each other have some 1,000, and a chain of twenty."""
_SHORT = 6
"""Calls of a part that begins later than the step, where even the cuts of a few orders are too many."""


@dataclass(frozen=True)
class Cut:
    """S = first | second, and how the second gets what the first makes."""

    first: int
    second: int
    is_linked: bool
    """Something in `second` needs something in `first`; otherwise they may run side by side."""
    waits: bool
    """What starts `second` needs all of its input."""
    functions: tuple[str, ...]
    """Functions that are fed by `first` alone and feed `second`, in program order."""


@dataclass(frozen=True)
class CallGraph:
    """The calls on devices with their order."""

    workload: Workload
    device_calls: tuple[CallLoad, ...] = field(init=False)
    function_calls: tuple[CallLoad, ...] = field(init=False)

    def __post_init__(self) -> None:
        calls = self.workload.calls
        object.__setattr__(self, "device_calls", tuple(call for call in calls if call.engine is not None))
        object.__setattr__(self, "function_calls", tuple(call for call in calls if call.engine is None))

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
        """For each call on devices those that it needs, directly or through functions."""
        return tuple(self._union(self._through.get(name, self.bits.get(name, 0)) for name in call.after) for call in self.device_calls)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each call on devices all that come before it."""
        found: list[int] = []
        for needs in self.direct:
            found.append(needs | self._union(found[i] for i in _indices(needs)))
        return tuple(found)

    @cached_property
    def _all_down_sets(self) -> tuple[int, ...] | None:
        """None: there are too many, or too many cuts between them."""
        found = {0}
        for i, needs in enumerate(self.before):
            found |= {done | 1 << i for done in found if needs & ~done == 0}
            if len(found) > _MOST_DOWN_SETS:
                return None
        return tuple(sorted(found)) if _num_cuts(found) <= _MOST_CUTS else None

    @cached_property
    def down_sets(self) -> tuple[int, ...]:
        """All of them; where there are too many, those of a few orders of the calls. Ascending."""
        if self._all_down_sets is not None:
            return self._all_down_sets
        found = set[int]()
        for order in self._orders():
            more = found | set(itertools.accumulate((1 << i for i in order), operator.or_, initial=0))
            more |= {one & other for one, other in itertools.combinations(more, 2)}
            if not found or (len(more) <= _MOST_DOWN_SETS and _num_cuts(more) <= _MOST_CUTS):
                found = more
        return tuple(sorted(found))

    def _orders(self) -> Iterator[list[int]]:
        """Topological orders of the calls: of the program, kind by kind, engine by engine, the longest chains first, and from behind."""
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
        """Calls that come after it."""
        return sum(1 for needs in self.before if needs >> i & 1)

    @property
    def not_tried(self) -> tuple[str, ...]:
        """What the cuts leave out; nothing where all are tried."""
        if self._all_down_sets is not None:
            return ()
        return (f"most ways to part a step of {len(self.device_calls)} calls: the parts are runs of calls in a few orders of them",)

    @cached_property
    def convex_sets(self) -> tuple[int, ...]:
        """What can lie between two cuts, the smaller first; the last is everything."""
        found = _convex(self.down_sets)
        if _num_cuts(self.down_sets) > _MOST_CUTS:
            found = {calls for calls in found if calls.bit_count() <= _SHORT or calls in self.down_sets}
        return tuple(sorted(found, key=lambda calls: (calls.bit_count(), calls)))

    def cuts(self, calls: int) -> Iterator[Cut]:
        """All ways to split a convex set into two; of some down-sets alone, those into two that these enclose."""
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
        """Functions that need nothing from devices, and feed some."""
        return tuple(f.name for f in self.function_calls if not self._through[f.name] and self._fed[f.name])

    @cached_property
    def trailing_functions(self) -> tuple[str, ...]:
        """Functions that feed nothing on devices."""
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
    """Of all that can lie between two cuts."""
    return sum(len({calls & done for done in down_sets}) - 2 for calls in _convex(down_sets))


def _indices(calls: int) -> Iterator[int]:
    while calls:
        low = calls & -calls
        yield low.bit_length() - 1
        calls ^= low
