"""Find deadlocks: build the wait graph of unfinished calls and search it for rings. Pure, and without time.

    SchedulerState --waits_of--> [Wait] --find_deadlock--> a ring that nobody in it can leave, or nothing

A call with a task in flight waits for nobody here: its worker continues, or the supervisor finds that it hangs. A call needs all that it
waits for; of those that could free room in a channel, or give up a lease, one is enough. So a ring counts only among those of which none
can continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from m2flow.micro.protocol.worker_state import kind_of
from m2flow.micro.scheduler.backpressure import Credits

if TYPE_CHECKING:
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


class Wait(NamedTuple):
    """One edge of the wait graph."""

    who: str
    on: str
    what: str
    """What it needs from there, for the message."""
    is_one_of: bool = False
    """Whether any one of the waits of `who` suffices."""


def waits_of(state: SchedulerState) -> list[Wait]:
    """List the waits of every unfinished call, and of the channels and leases that they wait for."""
    waits: list[Wait] = []
    for call_state in state.active.values():
        if call_state.tasks_at:
            continue
        who = name_of(call_state)
        for ordinal in sorted(call_state.waits_for):
            if ordinal in state.calls:
                waits.append(Wait(who, name_of(state.calls[ordinal]), "its result"))
        for ordinal in call_state.aligned_inputs:
            source = state.calls[ordinal]
            if not source.is_over:
                waits.append(Wait(who, name_of(source), f"rows, of which {len(source.done)} of {len(source.ids)} are done"))
        waits += _of_room(who, call_state, state.credits)
        waits += _of_leases(who, call_state, state)
    return waits


def find_deadlock(waits: Iterable[Wait]) -> list[Wait]:
    """Find the first ring that nobody outside it can break, starting at its first member; empty if there is none."""
    on: dict[str, list[Wait]] = {}
    for wait in waits:
        on.setdefault(wait.who, []).append(wait)
    free = _not_blocked(on)
    on = {who: [wait for wait in found if wait.on not in free] for who, found in on.items() if who not in free}
    done: set[str] = set()
    for start in on:
        ring = _walk(start, on, done)
        if ring:
            return ring
    return []


def describe_waits(ring: Iterable[Wait]) -> str:
    """Describe a ring of waits in one line."""
    return "; ".join(f"{wait.who} waits for {wait.on} ({wait.what})" for wait in ring)


def name_of(call_state: CallState) -> str:
    """Name a call uniquely: one line of a loop within a step makes many calls."""
    step = f" in step {call_state.call.step}" if call_state.call.step >= 0 else ""
    return f"{call_state.call.name} of {call_state.call.site}{step} (call {call_state.call.ordinal})"


def _of_room(who: str, call_state: CallState, credits: Credits) -> list[Wait]:
    if call_state.call.ordinal not in credits.blocked:
        return []
    waits = []
    for channel in credits.channels_of(call_state):
        place = f"the channel from {channel.producer} to {channel.target}"
        held = f"{channel.used_samples} of {channel.samples} samples and {channel.used_bytes:,} of {channel.num_bytes:,} bytes are taken"
        waits.append(Wait(who, place, f"room: {held}"))
        waits += [Wait(place, name_of(taker), f"to take {count} samples", True) for taker, count in credits.takers_of(channel)]
    return waits


def _of_leases(who: str, call_state: CallState, state: SchedulerState) -> list[Wait]:
    if call_state.call.engine not in ("rollout", "train"):
        return []
    waits = []
    for name in call_state.stage.workers:
        worker = state.workers[name]
        lease = worker.lease
        if lease is not None and call_state.call.role not in worker.roles_at(lease.turn, call_state.call.engine):
            place = f"the lease {lease.name}"
            waits.append(Wait(who, place, f"which {lease.owner} has"))
            owners = [
                other
                for other in state.active.values()
                if other.call.engine == kind_of(lease.owner) and set(other.tasks_at) & set(lease.workers)
            ]
            waits += [Wait(place, name_of(owner), "to end its tasks there", True) for owner in owners]
    return waits


def _not_blocked(on: Mapping[str, list[Wait]]) -> set[str]:
    """Find everything that waits for nothing, or only for what can continue."""
    waiting_for: dict[str, list[str]] = {}
    for who, waits in on.items():
        for wait in waits:
            waiting_for.setdefault(wait.on, []).append(who)
    num_needed = {who: 1 if waits[0].is_one_of else len({wait.on for wait in waits}) for who, waits in on.items()}
    free: set[str] = set()
    found = [place for place in waiting_for if place not in on]
    while found:
        place = found.pop()
        if place not in free:
            free.add(place)
            for who in set(waiting_for.get(place, ())):
                num_needed[who] -= 1
                if num_needed[who] == 0:
                    found.append(who)
    return free


def _walk(start: str, on: Mapping[str, list[Wait]], done: set[str]) -> list[Wait]:
    """Search for a ring depth first, without recursion: a program may have thousands of calls."""
    path: list[Wait] = []
    places = {start: 0}
    stack = [iter(on.get(start, ()))]
    while stack:
        wait = next(stack[-1], None)
        if wait is None:
            stack.pop()
            if path:
                done.add(path[-1].on)
                places.pop(path.pop().on)
            continue
        if wait.on in places:
            return [*path[places[wait.on] :], wait]
        if wait.on not in done:
            path.append(wait)
            places[wait.on] = len(path)
            stack.append(iter(on.get(wait.on, ())))
    done.add(start)
    return []
