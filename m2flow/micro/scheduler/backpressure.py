"""Bound the samples and bytes in flight to each worker by credits, so that nobody is sent more than it can hold.

    a group is begun --reserve (predicted bytes)--> finished --settle (its bytes)--> taken by every consumer --> free

A channel is all that the calls of one name send to one worker; its room is the plan's (`m2flow.micro.lowering.routing`). Credits are
taken at the source, when a generation begins samples: what is derived from samples is small and no more numerous. A group reserves as a
whole, since its members are of no use without each other; a call whose consumer needs all of it reserves all of it.

A unit (a group, or the whole call) that does not fit waits, except one in each channel: the first, in the order of identity, that the
earliest consumer still lacks. It may overdraw the channel. Calls depend on earlier calls only, so as far as rows go the earliest consumer
can always continue. But engines take weights in the order of the generations, so one whose consumer is early may wait for a generation
whose consumer is late. Therefore, when no task is in flight at all, the earliest blocked generation that can run begins one more unit
(`allow_overdraft`). So nothing waits for room for ever, provided that a unit of more than a group fits into an empty channel: plans in
which one does not are refused (`m2flow.micro.lowering.routing`), and here it is never begun.

A sample may turn out larger than predicted; that is settled whatever the room, and others wait the longer.
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
from m2flow.recipe import longest_response
from m2flow.samples import by_group, group_key

_WHOLE = -1
"""The only unit of a call that reserves all of its rows at once."""


@dataclass(eq=False)
class Channel:
    """The samples in flight from the calls of one name to one worker, and their limits."""

    producer: str
    target: str
    samples: int
    num_bytes: int
    used_samples: int = 0
    used_bytes: int = 0
    num_overdrawn: int = 0
    """How often a unit was begun beyond the room to avoid a deadlock."""
    reservations: dict[int, _Reservation] = field(default_factory=dict)
    """Call -> its rows in flight."""
    overdraft: tuple[int, int] | None = None
    """The (call, unit) that exceeds the room now, if there is one."""

    def has_room(self, samples: int, num_bytes: int) -> bool:
        return self.used_samples + samples <= self.samples and self.used_bytes + num_bytes <= self.num_bytes


@dataclass(eq=False)
class _Reservation:
    """The credits that one call's rows hold on one channel."""

    call_state: CallState
    room: Room
    channel: Channel
    held: dict[int, int] = field(default_factory=dict)
    """Row -> bytes."""
    units: set[int] = field(default_factory=set)
    """Units that have reserved."""
    gone: set[int] = field(default_factory=set)
    """Rows that hold no credits any more: taken, or not sent at all."""
    takers: dict[int, set[int]] = field(default_factory=dict)
    """Consuming call -> rows that it has taken."""
    num_over: int = 0
    """Consumers that are over."""
    _groups: dict[int, list[int]] = field(default_factory=dict)
    _keys: list[int] = field(default_factory=list)
    """Keys of the groups, in order."""
    _next: int = 0

    @property
    def is_free(self) -> bool:
        """Whether no consumer takes rows any more."""
        return self.num_over >= self.room.takers

    def unit_of(self, row: int) -> int:
        return _WHOLE if self.room.is_whole else group_key(row)

    def rows_of(self, unit: int) -> list[int]:
        return self.call_state.ids if unit == _WHOLE else self._by_group().get(unit, [])

    @property
    def next_unit(self) -> int | None:
        """The first unit, in the order of identity, that has not reserved."""
        if self.room.is_whole:
            return None if _WHOLE in self.units else _WHOLE
        self._by_group()
        while self._next < len(self._keys) and self._is_behind(self._keys[self._next]):
            self._next += 1
        return self._keys[self._next] if self._next < len(self._keys) else None

    def _is_behind(self, unit: int) -> bool:
        """Whether a unit has reserved, or was restored from the ledger."""
        return unit in self.units or (self.call_state.has_restored and self.call_state.done.issuperset(self._groups[unit]))

    def _by_group(self) -> dict[int, list[int]]:
        if sum(map(len, self._groups.values())) != len(self.call_state.ids):
            self._groups = by_group(self.call_state.ids)
            self._keys, self._next = sorted(self._groups), 0
        return self._groups


@final
class Credits:
    """Grants, settles and frees the credits of all channels."""

    def __init__(self, calls: Mapping[int, CallState]) -> None:
        self.channels: dict[tuple[str, str], Channel] = {}
        self._calls = calls
        self._reservations: dict[int, list[_Reservation]] = {}
        self._taking: dict[int, list[_Reservation]] = {}
        """Consuming call -> reservations that it takes from."""
        self._blocked: dict[int, CallState] = {}
        self._lost: set[str] = set()
        self._may_be_room = False
        """Whether something was freed, or the earliest consumer changed, since this was last asked."""
        self._may_overdraw_for: CallState | None = None
        """The generation that may begin one unit whatever the room."""

    @property
    def blocked(self) -> Mapping[int, CallState]:
        """Calls that were refused samples for lack of room, since room last came."""
        return self._blocked

    @property
    def is_used(self) -> bool:
        """Whether any channel is limited."""
        return bool(self.channels)

    def added(self, call_state: CallState, inputs: Iterable[int]) -> None:
        """Add a call: the channels that it sends on, and the reservations that it takes from."""
        for room in call_state.stage.rooms:
            if room.target in self._lost:
                continue
            channel = self.channels.get((call_state.call.name, room.target))
            if channel is None:
                channel = self.channels[call_state.call.name, room.target] = Channel(
                    call_state.call.name, room.target, room.samples, room.num_bytes
                )
            reservation = channel.reservations[call_state.call.ordinal] = _Reservation(call_state, room, channel)
            self._reservations.setdefault(call_state.call.ordinal, []).append(reservation)
        workers = call_state.stage.workers
        if len(workers) == 1 and self._reservations:
            for reservation in (reservation for ordinal in dict.fromkeys(inputs) for reservation in self._reservations.get(ordinal, ())):
                if reservation.room.target == workers[0]:
                    reservation.takers[call_state.call.ordinal] = set()
                    self._taking.setdefault(call_state.call.ordinal, []).append(reservation)
                    self._may_be_room = True

    def num_may_begin(self, call_state: CallState, worker: str, quota: int) -> int:
        """Count the ready rows, up to a quota, that this worker may begin. The unit that may overdraw is put first."""
        reservations = self._reservations.get(call_state.call.ordinal)
        if not reservations or quota <= 0:
            return quota
        quota = min(quota, len(call_state.ready))
        reservations = [reservation for reservation in reservations if reservation.room.target != worker and not reservation.is_free]
        count = self._num_in_front(call_state.ready, reservations, quota)
        if not count and self._bring_forward(call_state, reservations):
            count = self._num_in_front(call_state.ready, reservations, quota, may_overdraw=True)
        if count < quota:
            self._blocked[call_state.call.ordinal] = call_state
        return count

    def admit(self, call_state: CallState, rows: Iterable[int]) -> list[int]:
        """Reserve room for rows that a policy may be shown, and return those that fit.

        They hold credits from now on, wherever they begin.
        """
        reservations = [reservation for reservation in self._reservations.get(call_state.call.ordinal, ()) if not reservation.is_free]
        admitted: list[int] = []
        for row in sorted(rows):
            if self._num_in_front((row,), reservations, 1, may_overdraw=True):
                self.reserve(call_state, (row,), "")
                admitted.append(row)
            else:
                self._blocked[call_state.call.ordinal] = call_state
        return admitted

    def is_limited(self, call_state: CallState) -> bool:
        """Whether a generation sends on limited channels."""
        return call_state.call.ordinal in self._reservations

    def reserve(self, call_state: CallState, rows: Iterable[int], worker: str) -> None:
        """Take credits for the units of rows that a worker begins."""
        if self._may_overdraw_for is call_state:
            self._may_overdraw_for = None
        for reservation in self._reservations.get(call_state.call.ordinal, ()):
            for unit in dict.fromkeys(map(reservation.unit_of, rows)):
                if unit not in reservation.units:
                    reservation.units.add(unit)
                    self._may_be_room = True  # Others of the unit that were refused may begin now.
                    if reservation.room.target == worker or reservation.is_free:
                        continue  # Rows that are made where they are needed are not sent.
                    members = [row for row in reservation.rows_of(unit) if row not in reservation.gone]
                    needed = {row: self._predicted(call_state, row) for row in members}
                    channel = reservation.channel
                    if not channel.has_room(len(needed), sum(needed.values())):
                        channel.overdraft = (call_state.call.ordinal, unit)
                        channel.num_overdrawn += 1
                    channel.used_samples += len(needed)
                    channel.used_bytes += sum(needed.values())
                    reservation.held.update(needed)

    def settle(self, call_state: CallState, num_tokens: Mapping[int, int]) -> None:
        """Replace the predicted size of finished rows by their real one."""
        for reservation in self._reservations.get(call_state.call.ordinal, ()):
            for row, tokens in num_tokens.items():
                before = reservation.held.get(row)
                if before is not None:
                    reservation.held[row] = tokens * BYTES_PER_TOKEN
                    reservation.channel.used_bytes += reservation.held[row] - before

    def taken(self, taker: int, rows: Iterable[int]) -> None:
        """Record the input rows that a call has taken."""
        for reservation in self._taking.get(taker, ()):
            taken = reservation.takers[taker]
            for row in rows:
                if row not in taken:
                    taken.add(row)
                    self._perhaps_free(reservation, row)

    def over(self, call_state: CallState) -> None:
        """End a call: it takes nothing more, and of what it made only its result is sent."""
        ordinal = call_state.call.ordinal
        for reservation in self._taking.pop(ordinal, ()):
            reservation.num_over += 1
            del reservation.takers[ordinal]
            self._may_be_room = True
            for row in list(reservation.held):
                self._perhaps_free(reservation, row)
        kept = set() if call_state.is_failed else call_state.done if call_state.result is None else set(call_state.result)
        for reservation in self._reservations.get(ordinal, ()):
            for row in [row for row in reservation.held if row not in kept]:
                self._free(reservation, row)

    def forget(self, ordinal: int) -> None:
        """Free everything of a call that is forgotten."""
        for reservation in self._reservations.pop(ordinal, ()):
            for row in list(reservation.held):
                self._free(reservation, row)
            reservation.channel.reservations.pop(ordinal, None)
        self._blocked.pop(ordinal, None)

    def channels_of(self, call_state: CallState) -> list[Channel]:
        """Return the limited channels that a generation sends on."""
        return [reservation.channel for reservation in self._reservations.get(call_state.call.ordinal, ())]

    def takers_of(self, channel: Channel) -> list[tuple[CallState, int]]:
        """Find the calls that still have samples to take from a channel, or can take none until all are there, with how many."""
        found: dict[int, int] = {}
        for reservation in channel.reservations.values():
            for taker, taken in reservation.takers.items():
                is_awaited = reservation.room.is_whole and not reservation.units and not channel.used_samples
                num_left = len(reservation.call_state.ids) if is_awaited else len(reservation.held.keys() - taken)
                found[taker] = found.get(taker, 0) + num_left
        return [(self._calls[taker], count) for taker, count in found.items() if count and taker in self._calls]

    def lost(self, worker: str) -> None:
        """Drop the channels to a lost worker."""
        self._lost.add(worker)
        self._may_be_room = True
        for ordinal, reservations in self._reservations.items():
            for reservation in reservations:
                if reservation.room.target == worker:
                    reservation.channel.reservations.pop(ordinal, None)
            reservations[:] = [reservation for reservation in reservations if reservation.room.target != worker]

    def joined(self, worker: str) -> None:
        """Take in a restarted worker: what is begun from now on is sent to it."""
        self._lost.discard(worker)

    def allow_overdraft(self, call_state: CallState | None) -> None:
        """Let this generation begin one unit without room, since no task is in flight; None: no longer."""
        self._may_overdraw_for = call_state

    def unblocked(self) -> list[CallState]:
        """Return and reset the blocked calls, if something was freed or one of them may overdraw now."""
        if not self._may_be_room:
            return []
        self._may_be_room = False
        blocked, self._blocked = self._blocked, {}
        return [call_state for call_state in blocked.values() if not call_state.is_over]

    def _num_in_front(self, ready: Iterable[int], reservations: list[_Reservation], quota: int, *, may_overdraw: bool = False) -> int:
        """Count the rows that fit, from the first on."""
        samples = dict.fromkeys(reservations, 0)
        num_bytes = dict.fromkeys(reservations, 0)
        asked: dict[_Reservation, set[int]] = {reservation: set() for reservation in reservations}
        for count, row in enumerate(itertools.islice(ready, quota)):
            for reservation in reservations:
                unit = reservation.unit_of(row)
                if unit in reservation.units or unit in asked[reservation]:
                    continue
                members = reservation.rows_of(unit)
                samples[reservation] += len(members)
                num_bytes[reservation] += sum(self._predicted(reservation.call_state, member) for member in members)
                is_first = may_overdraw and not count
                if not reservation.channel.has_room(samples[reservation], num_bytes[reservation]) and not (
                    is_first and self._may_overdraw(reservation, unit)
                ):
                    return count
                asked[reservation].add(unit)
        return quota

    def _bring_forward(self, call_state: CallState, reservations: list[_Reservation]) -> bool:
        """Move the unit that may overdraw to the front, if its rows are ready."""
        if self._may_overdraw_for is call_state:
            return True
        for reservation in reservations:
            unit = reservation.next_unit
            if unit is None or not self._may_overdraw(reservation, unit):
                continue
            if unit == _WHOLE:
                return True
            rows = [row for row in call_state.ready if group_key(row) == unit]
            if rows:
                wanted = set(rows)
                call_state.ready = deque([*rows, *(row for row in call_state.ready if row not in wanted)])
                return True
        return False

    def _may_overdraw(self, reservation: _Reservation, unit: int) -> bool:
        """Whether a unit may exceed the room: the earliest consumer waits for it, or no task is in flight."""
        channel = reservation.channel
        if unit == _WHOLE and not reservation.room.fits:
            return False
        if self._may_overdraw_for is reservation.call_state:
            return True
        if channel.overdraft is not None:
            return False
        earliest = min((taker for other in channel.reservations.values() for taker in other.takers), default=None)
        return (earliest is None or earliest in reservation.takers) and reservation.next_unit == unit

    def _predicted(self, call_state: CallState, row: int) -> int:
        """Predict the bytes of an unfinished sample: as if it became as long as it may."""
        base = self._calls.get(call_state.aligned_inputs[0]) if call_state.aligned_inputs else None
        prompt = base.num_tokens.get(call_state.prompt_of(row), 0) if base is not None else 0
        return (prompt + _most_new(call_state.call)) * BYTES_PER_TOKEN

    def _perhaps_free(self, reservation: _Reservation, row: int) -> None:
        num_taken = reservation.num_over + sum(row in taken for taken in reservation.takers.values())
        if num_taken >= reservation.room.takers:
            self._free(reservation, row)

    def _free(self, reservation: _Reservation, row: int) -> None:
        reservation.gone.add(row)
        num_bytes = reservation.held.pop(row, None)
        if num_bytes is None:
            return
        channel = reservation.channel
        channel.used_samples -= 1
        channel.used_bytes -= num_bytes
        ordinal = reservation.call_state.call.ordinal
        if channel.overdraft == (ordinal, reservation.unit_of(row)) and not any(
            reservation.unit_of(r) == reservation.unit_of(row) for r in reservation.held
        ):
            channel.overdraft = None
        self._may_be_room = True


def _most_new(call: Call) -> int:
    return longest_response(call.options)
