"""Stop samples before they are finished: those that exceed a deadline, and those that the next call goes on with (partial rollouts).

Samples that exceed their generation's `timeout_s` are stopped at a deadline by the host's clock.

    Generate --began--> Deadlines --due--> TimedOut --time_out--> the sample is stopped, its group is in no result

The scheduler has no clock: the controller and the simulator each ask `Deadlines` what is due by their own. A sample that continues
elsewhere, or begins anew after its worker was lost, keeps its first deadline. Limit: a resumed run begins to count anew.
`m2flow.macro.oversampling` defines what a timeout means for the program.

Unfinished samples of one generate call may be carried over to the next call of its line (partial rollouts).

    call ends -> its workers stop what runs, and report it -> the next call takes it all over -> hands it out again, first of all

`m2flow.macro.oversampling` defines what the program means by it. When it is taken over, a late sample is finished (its row is handed on),
stopped (its tokens so far are a row, which is sent to the worker that continues it) or never begun. A sample that is too old for the
call that takes it over begins anew, and is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from m2flow.macro.graph import Call
from m2flow.macro.oversampling import num_late, timeout_of
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, LEDGER, Expired, Late, Recalled, TakenOver, TimedOut
from m2flow.micro.protocol.staleness import window
from m2flow.micro.protocol.worker_state import worker_of
from m2flow.micro.scheduler.call_state import Carry
from m2flow.samples import SampleId, by_group, group_key

if TYPE_CHECKING:
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


# ---- deadlines


@final
class Deadlines:
    """Deadlines of the samples in flight."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        """(call, sample)."""
        self._heap: list[tuple[float, int, int]] = []
        """(when, call, sample)."""

    def began(self, task: m.Generate, call: Call, now_s: float) -> float | None:
        """Set the deadlines of samples that an engine gets for the first time; return when these are due, None without a timeout."""
        timeout_s = timeout_of(call.options)
        if timeout_s is None:
            return None
        for row in task.ids:
            if (task.call, row) not in self._known:
                self._known.add((task.call, row))
                heapq.heappush(self._heap, (now_s + timeout_s, task.call, row))
        return now_s + timeout_s

    def due(self, now_s: float) -> list[TimedOut]:
        """Pop the samples whose time is up, done or not: each sample once."""
        found: dict[int, list[int]] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, call, row = heapq.heappop(self._heap)
            self._known.discard((call, row))
            found.setdefault(call, []).append(row)
        return [TimedOut(call, rows) for call, rows in found.items()]


def time_out(state: SchedulerState, event: TimedOut) -> CallState | None:
    """Drop the groups of timed-out samples that are not done, and stop what still runs of them; return the call if there were any."""
    call_state = state.calls.get(event.call)
    if call_state is None or call_state.is_over:
        return None
    late = {group_key(row) for row in call_state.unfinished(event.ids)}
    rows = [row for row in call_state.ids if group_key(row) in late and row not in call_state.done]
    if not rows:
        return None
    call_state.gave_up(rows)
    gone = set(rows)
    for worker in list(call_state.tasks_at):
        there = [row for _, task in state.tasks.of(worker) if task.message.call == event.call for row in task.rows if row in gone]
        if there:
            state.send(worker, m.Preempt(event.call, there))
    state.handed_out(call_state)
    return call_state


# ---- partial rollouts


def chosen(
    groups: Mapping[int, Sequence[int]], done: set[int], oldest: Mapping[int, int], *, most_late: int, next_oldest: int
) -> list[int] | None:
    """Choose the groups that a call ends with; None if it can't end yet.

    Args:
        oldest: of each sample that has tokens, or is about to, the oldest version among them.
        most_late: groups that may be left to the next call.
        next_oldest: the oldest version that the next call may give: a group with older tokens can't be left.
    """
    whole = [key for key, rows in groups.items() if done.issuperset(rows)]
    due = {key for key, rows in groups.items() if any(oldest.get(row, next_oldest) < next_oldest for row in rows)}
    num_wanted = len(groups) - most_late
    if len(whole) < num_wanted or not due.issubset(whole):
        return None
    others = [key for key in whole if key not in due][: max(num_wanted - len(due), 0)]
    return [row for key in sorted(due.union(others)) for row in groups[key]]


@final
class PartialRollouts:
    """Hands late samples from call to call, and says which call may end then (`m2flow.micro.scheduler.call_lifecycle`)."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def added(self, call_state: CallState) -> CallState | None:
        """Add a call with partial rollouts; return the call that it takes over from: how old that one may leave samples is known now."""
        if call_state.call.ordinal in self._state.recalled:
            call_state.carry = Carry(None)
            self._state.partial_rollouts.append(call_state)
            return None
        previous = call_state.call.carries_from
        call_state.carry = Carry(previous if previous in self._state.calls else None)
        self._state.partial_rollouts.append(call_state)
        if previous is None or call_state.carry.previous is None:
            return None
        self._state.taken_over_by[previous] = call_state
        return self._state.calls[previous]

    def prepared(self, call_state: CallState, num_prompts: int) -> bool:
        """Set up a call whose own samples are known now: it takes over from the call before.

        Returns:
            Whether it was over before the run was resumed, and so is done, as it was then.
        """
        assert call_state.carry is not None
        recalled = self._state.recalled.pop(call_state.call.ordinal, None)
        if recalled is not None:
            self._replay_end(call_state, recalled)
            return True
        call_state.carry.num_late = num_late(call_state.call.options, num_prompts)
        self._take_over(call_state)
        return False

    def _replay_end(self, call_state: CallState, recalled: Recalled) -> None:
        """Restore the result of a call that was over before the run was resumed."""
        assert call_state.carry is not None
        call_state.ready.clear()
        call_state.done.update(recalled.ids)
        call_state.num_tokens.update(zip(recalled.ids, recalled.num_tokens, strict=True))
        call_state.result, call_state.carry.late = list(recalled.ids), tuple(recalled.left)
        self._state.rows.made(call_state.call.ordinal, recalled.ids, CONTROLLER, ())

    def finished_late(
        self, call_state: CallState, worker: str, ids: Iterable[int], num_tokens: Iterable[int], sent_to: Iterable[str]
    ) -> int:
        """Record samples that finished after the call ended without them; return how many are new."""
        assert call_state.carry is not None
        late = set(call_state.carry.late)
        fresh = {row: tokens for row, tokens in zip(ids, num_tokens, strict=True) if row in late and row not in call_state.done}
        call_state.done.update(fresh)
        call_state.num_tokens.update(fresh)
        self._state.rows.made(call_state.call.ordinal, fresh, worker, sent_to)
        return len(fresh)

    def task_ended(self, ordinal: int) -> CallState | None:
        """Let the next call take over, if this was the last task that it waited for, and return it."""
        following = self._state.taken_over_by.get(ordinal)
        if following is not None:
            self._take_over(following)
        return following

    def cut(self, call_state: CallState) -> list[int] | None:
        """Choose the result of a call, if it can end now, and mark the rest as late; None if it can't."""
        carry = call_state.carry
        assert carry is not None
        if carry.previous is not None or not call_state.is_prepared or call_state.waits_for or call_state.failure is not None:
            return None
        if call_state.num_whole < call_state.num_groups - carry.num_late:
            return None
        groups = by_group(call_state.ids)
        result = chosen(groups, call_state.done, carry.oldest, most_late=carry.num_late, next_oldest=self._next_oldest(call_state.call))
        if result is None:
            return None
        assert all(carry.oldest[row] >= window(call_state.call)[0] for row in result)
        carry.late = tuple(sorted(set(call_state.ids).difference(result)))
        own = call_state.call.ordinal
        self._state.commands += [
            Late(own, carry.late),
            TakenOver(own, tuple(row for row in result if SampleId.unpack(row).call != own)),
        ]
        return result

    def ended(self, call_state: CallState) -> CallState | None:
        """Note that a call is done or failed; return the call that takes over from it, if that is known."""
        assert call_state.carry is not None
        if not call_state.carry.late:
            self._close(call_state)
        else:
            # The calls that drew samples of its result are needed no more.
            self._state.perhaps_unreachable.update(self._involved(call_state, call_state.ids))
        return self.task_ended(call_state.call.ordinal)

    def needed(self) -> set[int]:
        """Find the calls that must not be forgotten: samples in flight were drawn or stopped by them, or answer their rows."""
        found: set[int] = set()
        for call_state in self._state.partial_rollouts:
            assert call_state.carry is not None
            found |= self._involved(call_state, call_state.carry.late if call_state.is_over else call_state.ids)
        return found

    def _next_oldest(self, call: Call) -> int:
        """Find the oldest version that the next call of the line may give.

        If the program has not made that call yet, it is assumed to be as many updates away as this call is from the last; at least one.
        """
        following = self._state.taken_over_by.get(call.ordinal)
        if following is not None:
            return window(following.call)[0]
        staleness, distance = call.options["staleness"], call.options.get("updates_since", 1)
        assert isinstance(staleness, int)
        assert isinstance(distance, int)
        return window(call)[1] + max(distance, 1) - staleness

    def _take_over(self, call_state: CallState) -> None:
        """Have a call take over what the call before it left, once all of that was reported."""
        carry = call_state.carry
        assert carry is not None
        if carry.previous is None or not call_state.is_prepared or call_state.is_over:
            return
        before = self._state.calls.get(carry.previous)
        if before is None or before.carry is None:
            carry.previous = None  # It left nothing, and is forgotten.
            return
        left = before.carry
        if not before.is_done or (left.late and before.tasks_at):
            return
        late, left.late, carry.previous = left.late, (), None
        self._state.taken_over_by.pop(before.call.ordinal)
        oldest, expired, waiting, finished = window(call_state.call)[0], [], [], []
        for row in late:
            stopped = before.prefixes.get(row)
            age = left.oldest[row] if row in before.done else stopped.oldest if stopped is not None else oldest
            if age < oldest:
                expired.append(row)
                waiting.append(row)
            elif row in before.done:
                finished.append(row)
                carry.oldest[row] = age
            else:
                waiting.append(row)
                if stopped is not None:
                    call_state.prefixes[row], carry.oldest[row] = stopped, age
        taken = set(waiting)
        call_state.at.update((who, place) for who, place in before.at.items() if who[0] in taken)
        call_state.take_over(late, waiting, finished)
        if expired:
            self._state.commands.append(Expired(call_state.call.ordinal, tuple(expired)))
        self._close(before)
        self._reassign(call_state, before, finished)

    def _reassign(self, call_state: CallState, before: CallState, finished: list[int]) -> None:
        """Make finished samples of an earlier call rows of this one, and offer the others to workers."""
        state, ordinal = self._state, call_state.call.ordinal
        state.handed_out(call_state)
        state.ready_workers.feed_all(call_state)
        state.ready_workers.rows_came(call_state)
        call_state.num_tokens.update((row, before.num_tokens[row]) for row in finished)
        for owner, rows in state.rows.owners(before.call.ordinal, finished).items():
            if owner == LEDGER:
                state.rows.made(ordinal, rows, LEDGER, ())  # They are sent from there when a task needs them.
                continue
            state.send(owner, m.Reassign(ordinal, before.call.ordinal, rows, list(call_state.stage.forward_to)))
            state.rows.made(ordinal, rows, owner, map(worker_of, call_state.stage.forward_to))

    def _close(self, call_state: CallState) -> None:
        if call_state in self._state.partial_rollouts:
            self._state.partial_rollouts.remove(call_state)
            self._state.perhaps_unreachable.update(self._involved(call_state, call_state.ids))

    def _involved(self, call_state: CallState, rows: Iterable[int]) -> set[int]:
        """Find the calls that drew these samples of a call, or that their prefixes and prompts are from."""
        assert call_state.carry is not None
        found = {call_state.call.ordinal, *(prefix.by for prefix in call_state.prefixes.values())}
        for drawn in {SampleId.unpack(row).call for row in rows} & self._state.calls.keys():
            found.update((drawn, *self._state.calls[drawn].aligned_inputs))
        return found
