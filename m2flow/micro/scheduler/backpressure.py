"""Credits: what may be under way to each worker, in samples and bytes, so that nobody is sent more than it can hold.

    a group is begun --reserve (predicted bytes)--> finished --settle (its bytes)--> every taker has taken it --> free

A channel is all that the calls of one name send to one worker. Its room is the plan's (`m2flow.micro.lowering.routing`). Credits are taken
where samples come from, when a generation begins with them: what is derived of them is small, and there is no more of it than of them. A
group reserves whole, since its members are no use without each other; of a call whose taker needs all of it, all of it does.

What would not fit waits, but for one unit in each channel: the first one, in the order of identity, that the earliest call which takes from
it still lacks. It may overdraw. Calls depend on earlier calls alone, so as far as rows go the earliest taker can go on. But engines take
weights in the order of the generations: one whose taker is early may have to wait for one before it, whose taker is late. So when nothing
is under way at all, the earliest generation that was refused and can run begins with one unit more (`let`). Nothing waits for room for
ever, as long as a unit that is more than a group fits into an empty channel. Plans in which one does not are refused
(`m2flow.micro.lowering.routing`), and here it is never begun. A sample may turn out larger than predicted; that is settled
whatever the room, and others wait the longer. Pure: told what happened, it says what may begin.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro.lowering.routing import BYTES_PER_TOKEN
from m2flow.micro.protocol.plan import Room
from m2flow.micro.scheduler.call_state import CallState
from m2flow.recipe import Sampling
from m2flow.samples import by_group, group_key

_WHOLE = -1
"""The unit of a call that reserves all at once."""


@dataclass(eq=False)
class Channel:
    """What the calls of one name have under way to one worker."""

    producer: str
    target: str
    samples: int
    num_bytes: int
    used_samples: int = 0
    used_bytes: int = 0
    num_overdrawn: int = 0
    """How often a unit was begun beyond the room, so that somebody could go on."""
    claims: dict[int, _Claim] = field(default_factory=dict)
    """Call -> what of it is under way."""
    overdraft: tuple[int, int] | None = None
    """The call and the unit that is beyond the room now."""

    def has_room(self, samples: int, num_bytes: int) -> bool:
        return self.used_samples + samples <= self.samples and self.used_bytes + num_bytes <= self.num_bytes


@dataclass(eq=False)
class _Claim:
    """Of one call's rows on one channel."""

    state: CallState
    room: Room
    channel: Channel
    held: dict[int, int] = field(default_factory=dict)
    """Row -> bytes."""
    units: set[int] = field(default_factory=set)
    """That have reserved."""
    gone: set[int] = field(default_factory=set)
    """Rows that count no more: taken, or not sent at all."""
    takers: dict[int, set[int]] = field(default_factory=dict)
    """Call that takes -> the rows that it has taken."""
    num_over: int = 0
    """Takers that are over."""
    _groups: dict[int, list[int]] = field(default_factory=dict)
    _keys: list[int] = field(default_factory=list)
    """Of the groups, in order."""
    _next: int = 0

    @property
    def is_free(self) -> bool:
        """Nobody takes any more."""
        return self.num_over >= self.room.takers

    def unit_of(self, row: int) -> int:
        return _WHOLE if self.room.is_whole else group_key(row)

    def rows_of(self, unit: int) -> list[int]:
        return self.state.ids if unit == _WHOLE else self._by_group().get(unit, [])

    @property
    def next_unit(self) -> int | None:
        """The first unit that has not reserved."""
        if self.room.is_whole:
            return None if _WHOLE in self.units else _WHOLE
        self._by_group()
        while self._next < len(self._keys) and self._is_behind(self._keys[self._next]):
            self._next += 1
        return self._keys[self._next] if self._next < len(self._keys) else None

    def _is_behind(self, unit: int) -> bool:
        """It has reserved, or was there before anything was handed out."""
        return unit in self.units or (self.state.has_restored and self.state.done.issuperset(self._groups[unit]))

    def _by_group(self) -> dict[int, list[int]]:
        if sum(map(len, self._groups.values())) != len(self.state.ids):
            self._groups = by_group(self.state.ids)
            self._keys, self._next = sorted(self._groups), 0
        return self._groups


@final
class Credits:
    """All channels."""

    def __init__(self, calls: Mapping[int, CallState]) -> None:
        self.channels: dict[tuple[str, str], Channel] = {}
        self._calls = calls
        self._claims: dict[int, list[_Claim]] = {}
        self._taking: dict[int, list[_Claim]] = {}
        """By the call that takes."""
        self._blocked: dict[int, CallState] = {}
        self._lost: set[str] = set()
        self._may_be_room = False
        """Something is free, or another taker is the earliest, since that was last asked."""
        self._may_overdraw_for: CallState | None = None
        """The generation that may begin with one unit whatever the room."""

    @property
    def blocked(self) -> Mapping[int, CallState]:
        """Calls of which a worker was refused samples, for want of room, since room last came."""
        return self._blocked

    @property
    def is_used(self) -> bool:
        """Whether anything is limited."""
        return bool(self.channels)

    def added(self, state: CallState, inputs: Iterable[int]) -> None:
        """A call is there: its channels, if it is a generation, and what it takes."""
        for room in state.stage.rooms:
            if room.target in self._lost:
                continue
            channel = self.channels.get((state.call.name, room.target))
            if channel is None:
                channel = self.channels[state.call.name, room.target] = Channel(state.call.name, room.target, room.samples, room.num_bytes)
            claim = channel.claims[state.call.ordinal] = _Claim(state, room, channel)
            self._claims.setdefault(state.call.ordinal, []).append(claim)
        workers = state.stage.workers
        if len(workers) == 1 and self._claims:
            for claim in (claim for ordinal in dict.fromkeys(inputs) for claim in self._claims.get(ordinal, ())):
                if claim.room.target == workers[0]:
                    claim.takers[state.call.ordinal] = set()
                    self._taking.setdefault(state.call.ordinal, []).append(claim)
                    self._may_be_room = True

    def num_may_begin(self, state: CallState, worker: str, quota: int) -> int:
        """How many of the rows that are ready, up to a quota, this worker may begin with. The unit that may overdraw is put first."""
        claims = self._claims.get(state.call.ordinal)
        if not claims or quota <= 0:
            return quota
        quota = min(quota, len(state.ready))
        claims = [claim for claim in claims if claim.room.target != worker and not claim.is_free]
        count = self._num_in_front(state.ready, claims, quota)
        if not count and self._bring_forward(state, claims):
            count = self._num_in_front(state.ready, claims, quota, may_overdraw=True)
        if count < quota:
            self._blocked[state.call.ordinal] = state
        return count

    def admit(self, state: CallState, rows: Iterable[int]) -> list[int]:
        """Of rows that a policy may be shown, those that there is room for: they count from now on, whoever begins with them."""
        claims = [claim for claim in self._claims.get(state.call.ordinal, ()) if not claim.is_free]
        admitted: list[int] = []
        for row in sorted(rows):
            if self._num_in_front((row,), claims, 1, may_overdraw=True):
                self.reserve(state, (row,), "")
                admitted.append(row)
            else:
                self._blocked[state.call.ordinal] = state
        return admitted

    def is_limited(self, state: CallState) -> bool:
        """Whether a generation has channels with limits."""
        return state.call.ordinal in self._claims

    def reserve(self, state: CallState, rows: Iterable[int], worker: str) -> None:
        """These rows are begun with: they, and what belongs to them, count from now on."""
        if self._may_overdraw_for is state:
            self._may_overdraw_for = None
        for claim in self._claims.get(state.call.ordinal, ()):
            for unit in dict.fromkeys(map(claim.unit_of, rows)):
                if unit not in claim.units:
                    claim.units.add(unit)
                    self._may_be_room = True  # Who was refused others of the unit may have them now.
                    if claim.room.target == worker or claim.is_free:
                        continue  # What is made there does not travel.
                    members = [row for row in claim.rows_of(unit) if row not in claim.gone]
                    needed = {row: self._predicted(state, row) for row in members}
                    channel = claim.channel
                    if not channel.has_room(len(needed), sum(needed.values())):
                        channel.overdraft = (state.call.ordinal, unit)
                        channel.num_overdrawn += 1
                    channel.used_samples += len(needed)
                    channel.used_bytes += sum(needed.values())
                    claim.held.update(needed)

    def settle(self, state: CallState, num_tokens: Mapping[int, int]) -> None:
        """These rows are done, and have so many tokens."""
        for claim in self._claims.get(state.call.ordinal, ()):
            for row, tokens in num_tokens.items():
                before = claim.held.get(row)
                if before is not None:
                    claim.held[row] = tokens * BYTES_PER_TOKEN
                    claim.channel.used_bytes += claim.held[row] - before

    def taken(self, taker: int, rows: Iterable[int]) -> None:
        """A call has taken these rows of what it works on."""
        for claim in self._taking.get(taker, ()):
            taken = claim.takers[taker]
            for row in rows:
                if row not in taken:
                    taken.add(row)
                    self._perhaps_free(claim, row)

    def over(self, state: CallState) -> None:
        """A call is done or failed: it takes nothing more, and of what it made only its result is sent."""
        ordinal = state.call.ordinal
        for claim in self._taking.pop(ordinal, ()):
            claim.num_over += 1
            del claim.takers[ordinal]
            self._may_be_room = True
            for row in list(claim.held):
                self._perhaps_free(claim, row)
        kept = set() if state.is_failed else state.done if state.result is None else set(state.result)
        for claim in self._claims.get(ordinal, ()):
            for row in [row for row in claim.held if row not in kept]:
                self._free(claim, row)

    def forget(self, ordinal: int) -> None:
        """Nobody asks for a call any more."""
        for claim in self._claims.pop(ordinal, ()):
            for row in list(claim.held):
                self._free(claim, row)
            claim.channel.claims.pop(ordinal, None)
        self._blocked.pop(ordinal, None)

    def channels_of(self, state: CallState) -> list[Channel]:
        """Those that a generation sends on."""
        return [claim.channel for claim in self._claims.get(state.call.ordinal, ())]

    def takers_of(self, channel: Channel) -> list[tuple[CallState, int]]:
        """The calls that have yet to take what is in a channel, or can take nothing until all of it is there; and how many samples."""
        found: dict[int, int] = {}
        for claim in channel.claims.values():
            for taker, taken in claim.takers.items():
                is_awaited = claim.room.is_whole and not claim.units and not channel.used_samples
                num_left = len(claim.state.ids) if is_awaited else len(claim.held.keys() - taken)
                found[taker] = found.get(taker, 0) + num_left
        return [(self._calls[taker], count) for taker, count in found.items() if count and taker in self._calls]

    def lost(self, worker: str) -> None:
        """A worker is gone: nothing is on its way to it."""
        self._lost.add(worker)
        self._may_be_room = True
        for ordinal, claims in self._claims.items():
            for claim in claims:
                if claim.room.target == worker:
                    claim.channel.claims.pop(ordinal, None)
            claims[:] = [claim for claim in claims if claim.room.target != worker]

    def joined(self, worker: str) -> None:
        """A worker is here again: what is begun from now on is sent to it."""
        self._lost.discard(worker)

    def allow_overdraft(self, state: CallState | None) -> None:
        """Nothing is under way: this generation may begin with one unit for which there is no room; or none may any more."""
        self._may_overdraw_for = state

    def unblocked(self) -> list[CallState]:
        """The calls that were refused, and may be asked again because something is free now, or they may overdraw."""
        if not self._may_be_room:
            return []
        self._may_be_room = False
        blocked, self._blocked = self._blocked, {}
        return [state for state in blocked.values() if not state.is_over]

    def _num_in_front(self, ready: Iterable[int], claims: list[_Claim], quota: int, *, may_overdraw: bool = False) -> int:
        """How many rows can be begun with, from the first on, before one does not fit."""
        samples = dict.fromkeys(claims, 0)
        num_bytes = dict.fromkeys(claims, 0)
        asked: dict[_Claim, set[int]] = {claim: set() for claim in claims}
        for count, row in enumerate(itertools.islice(ready, quota)):
            for claim in claims:
                unit = claim.unit_of(row)
                if unit in claim.units or unit in asked[claim]:
                    continue
                members = claim.rows_of(unit)
                samples[claim] += len(members)
                num_bytes[claim] += sum(self._predicted(claim.state, member) for member in members)
                is_first = may_overdraw and not count
                if not claim.channel.has_room(samples[claim], num_bytes[claim]) and not (is_first and self._may_overdraw(claim, unit)):
                    return count
                asked[claim].add(unit)
        return quota

    def _bring_forward(self, state: CallState, claims: list[_Claim]) -> bool:
        """Put the unit that may overdraw first, if its rows are ready."""
        if self._may_overdraw_for is state:
            return True
        for claim in claims:
            unit = claim.next_unit
            if unit is None or not self._may_overdraw(claim, unit):
                continue
            if unit == _WHOLE:
                return True
            rows = [row for row in state.ready if group_key(row) == unit]
            if rows:
                wanted = set(rows)
                state.ready = deque([*rows, *(row for row in state.ready if row not in wanted)])
                return True
        return False

    def _may_overdraw(self, claim: _Claim, unit: int) -> bool:
        """Whether a unit that does not fit is the one that the channel's earliest taker waits for, or nothing else is under way."""
        channel = claim.channel
        if unit == _WHOLE and not claim.room.fits:
            return False
        if self._may_overdraw_for is claim.state:
            return True
        if channel.overdraft is not None:
            return False
        earliest = min((taker for other in channel.claims.values() for taker in other.takers), default=None)
        return (earliest is None or earliest in claim.takers) and claim.next_unit == unit

    def _predicted(self, state: CallState, row: int) -> int:
        """Bytes of a sample that is not done: as if it became as long as it may."""
        base = self._calls.get(state.aligned_inputs[0]) if state.aligned_inputs else None
        prompt = base.num_tokens.get(state.prompt_of(row), 0) if base is not None else 0
        return (prompt + _most_new(state.call)) * BYTES_PER_TOKEN

    def _perhaps_free(self, claim: _Claim, row: int) -> None:
        num_taken = claim.num_over + sum(row in taken for taken in claim.takers.values())
        if num_taken >= claim.room.takers:
            self._free(claim, row)

    def _free(self, claim: _Claim, row: int) -> None:
        claim.gone.add(row)
        num_bytes = claim.held.pop(row, None)
        if num_bytes is None:
            return
        channel = claim.channel
        channel.used_samples -= 1
        channel.used_bytes -= num_bytes
        ordinal = claim.state.call.ordinal
        if channel.overdraft == (ordinal, claim.unit_of(row)) and not any(claim.unit_of(r) == claim.unit_of(row) for r in claim.held):
            channel.overdraft = None
        self._may_be_room = True


def _most_new(call: Call) -> int:
    sampling = call.options.get("sampling")
    return sampling.max_new_tokens if isinstance(sampling, Sampling) else 0
