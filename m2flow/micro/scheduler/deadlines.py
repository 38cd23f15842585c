"""Stop samples that exceed their generation's `timeout_s`: deadlines by the host's clock, and what the scheduler does at a deadline.

    Generate --began--> Deadlines --due--> TimedOut --time_out--> the sample is stopped, its group is in no result

The scheduler has no clock: the controller and the simulator each ask `Deadlines` what is due by their own. A sample that continues
elsewhere, or begins anew after its worker was lost, keeps its first deadline. Limit: a resumed run begins to count anew.
`m2flow.macro.oversampling` defines what a timeout means for the program.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, final

from m2flow.macro.graph import Call
from m2flow.macro.oversampling import timeout_of
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import TimedOut
from m2flow.samples import group_key

if TYPE_CHECKING:
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


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
    late = {group_key(row) for row in event.ids if row not in call_state.done and row not in call_state.dropped}
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
