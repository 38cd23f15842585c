"""When a worker had nothing to do between two pieces of work, and what it waited for, as spans.

Many turns without work are one span. What comes before a worker's first work and after its last is no wait of a schedule, and is left out.
"""

from __future__ import annotations

from typing import final

from m2flow.macro.graph import Call
from m2flow.observe.recorder import Recorder, now_ns
from m2flow.observe.spans import SpanName

_SHORTEST_NS = 500_000
"""A shorter one is a message on its way."""


@final
class Idling:
    """Of one worker."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_worked = False
        self._since_ns = 0
        self._call: Call | None = None

    def waits(self, call: Call | None) -> None:
        """It has nothing to do: its next task, of this call, needs rows that are not here. None: it has no task."""
        if not self._has_worked:
            return
        if not self._since_ns:
            self._since_ns = now_ns()
        if call is not None:
            self._call = call

    def works(self) -> None:
        """It has something to do."""
        self._has_worked = True
        if not self._since_ns:
            return
        since_ns, at_ns, self._since_ns = self._since_ns, now_ns(), 0
        call, self._call = self._call, None
        if at_ns - since_ns < _SHORTEST_NS:
            return
        if call is None:
            self._recorder.add(SpanName.WAIT, since_ns, at_ns, label="for a task")
        else:
            self._recorder.add(SpanName.WAIT, since_ns, at_ns, call=call.ordinal, label=call.name)
