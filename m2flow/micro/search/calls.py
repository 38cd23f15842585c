"""The calls of a step as the search cuts them: those on devices as bits of a set, functions on the way between them.

    Workload --CallGraph--> convex sets, their cuts (A before B), and what lies on each cut

A cut of a set S splits it into A and B such that no call of B comes before one of A: every down-set of S is tried, not only the
prefixes of one order. Sets are ints, a bit for each call on devices in program order. Functions have no devices; they are counted on
the one cut that parts what feeds them from what they feed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.workload import CallLoad, Workload


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
    def down_sets(self) -> tuple[int, ...]:
        found = {0}
        for i, needs in enumerate(self.before):
            found |= {done | 1 << i for done in found if needs & ~done == 0}
        return tuple(sorted(found))

    @cached_property
    def convex_sets(self) -> tuple[int, ...]:
        """What can lie between two cuts, the smaller first; the last is everything."""
        found = {late & ~early for late in self.down_sets for early in self.down_sets if early & ~late == 0 and early != late}
        return tuple(sorted(found, key=lambda calls: (calls.bit_count(), calls)))

    def cuts(self, calls: int) -> Iterator[Cut]:
        """All ways to split a convex set."""
        seen = set()
        for done in self.down_sets:
            first = calls & done
            if first and first != calls and first not in seen:
                seen.add(first)
                yield self._cut(first, calls & ~first)

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


def _indices(calls: int) -> Iterator[int]:
    while calls:
        low = calls & -calls
        yield low.bit_length() - 1
        calls ^= low
