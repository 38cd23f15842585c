"""The program's side of a simulated run: calls come in segments, Python waits where it would, and runs ahead as far as it may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, final

from m2flow.macro.graph import Call, MacroGraph
from m2flow.micro.control.run_ahead import RunAhead
from m2flow.micro.lowering.lower import Lowering
from m2flow.micro.plan import Stage
from m2flow.micro.scheduling.events import CallAdded, Event, Released, Sourced, Wanted
from m2flow.micro.simulation.program import Left, Made, Program, StepEnd, Waits
from m2flow.micro.work import performing
from m2flow.samples import Batch

Blocked = Literal["", "value", "steps", "memory"]
"""What Python waits for: nothing, a value that it looks at, steps that it is too far ahead of, or memory for those under way."""


@final
class Driver:
    """Hands the program to the scheduler, as `m2flow.micro.control.planned` does."""

    def __init__(
        self, program: Program, lowering: Lowering, ahead: RunAhead, tell: Callable[[Event], None], made: Callable[[Call, Stage], None]
    ) -> None:
        self._program = program
        self._lowering = lowering
        self._ahead = ahead
        self._tell = tell
        self._made = made
        self._position = 0
        self._segment: list[Call] = []
        self._later: list[Event] = []
        self._open: dict[int, int] = {}
        """Step -> calls that are under way."""
        self._done: set[int] = set()
        self._wait: Callable[[], bool] | None = None
        self._step_of = {item.call.ordinal: item.call.step for item in program.items if isinstance(item, Made)}
        self.blocked: Blocked = ""

    @property
    def is_finished(self) -> bool:
        return self._position == len(self._program.items) and not self._open

    def resolved(self, ordinal: int) -> None:
        """A call is done."""
        self._done.add(ordinal)
        step = self._step_of[ordinal]
        self._open[step] -= 1
        if not self._open[step]:
            del self._open[step]

    def advance(self) -> None:
        """Go on until Python waits."""
        items = self._program.items
        while self._position < len(items):
            if self._wait is not None:
                if not self._wait():
                    return
                self._wait, self.blocked = None, ""
            item = items[self._position]
            self._position += 1
            match item:
                case Made(call):
                    self._segment.append(call)
                    self._ahead.add(call)
                    self._open[call.step] = self._open.get(call.step, 0) + 1
                case Left(ordinal):
                    self._later.append(Released(ordinal))
                case Waits(ordinal, is_shown):
                    self._flush()
                    if is_shown:
                        self._tell(Wanted(ordinal))
                    self._wait, self.blocked = (lambda ordinal=ordinal: ordinal in self._done), "value"
                case StepEnd(step):
                    self._flush()
                    self._wait_for_steps(step)
        if self._wait is not None and self._wait():
            self._wait, self.blocked = None, ""
        self._flush()

    def _wait_for_steps(self, step: int) -> None:
        due = self._ahead.due(step)
        self._wait = lambda: not any(open_step <= due for open_step in self._open)
        self.blocked = "steps" if due <= step - 1 - self._program.staleness else "memory"

    def _flush(self) -> None:
        calls, self._segment = self._segment, []
        stages: Sequence[Stage] = self._lowering.stages(MacroGraph(self._program.flow, tuple(calls))) if calls else ()
        for call, stage in zip(calls, stages, strict=True):
            self._made(call, stage)
            self._tell(CallAdded(call, stage))
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                self._tell(Sourced(call.ordinal, rows.ids.tolist(), performing.num_tokens_of(rows)))
        later, self._later = self._later, []
        for event in later:
            self._tell(event)
