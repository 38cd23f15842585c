"""`--pin-plan`: stop a run at the first line where a step's structure differs from the pinned one.

    flow --Session--> PinnedBackend --> the backend that does the work

A structure is the calls of a step: what they are, at which line, on which results, with which options as written. Versions and
numbers of calls are left out; so are calls outside the flow's loop, which come once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from m2flow.errors import DivergenceError, SpecError
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.replay import BackendWrapper, CallRecord
from m2flow.macro.session import Backend

_NOW = "Without --pin-plan such a step is lowered anew, which costs time and changes no answer."


@dataclass(frozen=True)
class PinnedCall:
    """A call of a step, reduced to what must be the same in all steps."""

    call: str
    """Name and options: `policy.generate(n=8)`."""
    site: str
    inputs: tuple[str, ...]
    """`samples=2 back`: made two calls before; `samples=earlier`: before the step."""

    def __str__(self) -> str:
        return f"{self.call} on {', '.join(self.inputs) or 'nothing'}  {self.site}"

    @classmethod
    def of(cls, call: Call, first: int) -> PinnedCall:
        """`first` is the number of the step's first call."""
        record = CallRecord.of(call)
        shown = ", ".join(f"{name}={value}" for name, value in record.shown)
        inputs = (f"{name}={call.ordinal - i} back" if i >= first else f"{name}=earlier" for name, i in record.inputs)
        return cls(f"{record.name}({shown})", record.where, tuple(inputs))


def structure_of(graph: MacroGraph, step: int = 0) -> tuple[PinnedCall, ...]:
    """The structure of one step of a graph."""
    calls = [call for call in graph.calls if call.step == step]
    return tuple(PinnedCall.of(call, calls[0].ordinal) for call in calls)


def read_structure(path: Path) -> tuple[PinnedCall, ...]:
    """Read the structure from the output of `m2flow plan --json`.

    Raises:
        SpecError: the file can't be read, or has none.
    """
    try:
        return tuple(msgspec.json.decode(path.read_bytes(), type=_Plan).structure)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is no plan to pin a run to: {error}", now=f"Make one: m2flow plan FLOW --json > {path}") from None


class _Plan(msgspec.Struct):
    structure: list[PinnedCall]


class PinnedBackend(BackendWrapper):
    """Wrap a backend and require one structure of all steps: the one given, or that of the first step."""

    def __init__(self, live: Backend, structure: Sequence[PinnedCall] | None = None, *, source: str = "the first step") -> None:
        super().__init__(live)
        self._pinned = None if structure is None else tuple(structure)
        self._source = source
        self._step: list[PinnedCall] = []
        self._first = 0

    def submit(self, call: Call) -> None:
        if call.step >= 0:
            self._first = call.ordinal if not self._step else self._first
            now = PinnedCall.of(call, self._first)
            if self._pinned is not None:
                self._check(call, now, self._pinned)
            self._step.append(now)
        super().submit(call)

    def _check(self, call: Call, now: PinnedCall, pinned: Sequence[PinnedCall]) -> None:
        position = len(self._step)
        should = pinned[position] if position < len(pinned) else None
        if now != should:
            raise DivergenceError(
                f"call {position} of step {call.step} is not that of {self._source}, to which the run is pinned",
                where=call.site.describe(),
                now=f"pinned: {should or 'no more calls'}\nnow:    {now}\n{_NOW}",
            )

    def end_step(self, step: int) -> None:
        if self._pinned is not None and len(self._step) < len(self._pinned):
            missing = self._pinned[len(self._step)]
            raise DivergenceError(
                f"step {step} ends before a call that {self._source} has, to which the run is pinned",
                where=missing.site,
                now=f"pinned: {missing}\nnow:    the step ends after {len(self._step)} calls\n{_NOW}",
            )
        self._pinned = tuple(self._step) if self._pinned is None else self._pinned
        self._step = []
        super().end_step(step)
