"""What a run remembers of its flow, so that the flow can be replayed: calls, looks at values, logs, in the order of the program.

    flow --Session--> Recorder --> the backend that does the work
                         |
                         +--> RecordWriter (`MemoryRecord`; on disk `m2flow.micro.record.flow_record`)

A call is remembered as the program wrote it (`CallRecord`), with the cursor and a checksum of the rows that a dataset gave; a look
(`Look`) with where and why; a value once, however often it was looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from m2flow.errors import M2FlowError
from m2flow.macro.fingerprint import told
from m2flow.macro.graph import Call, CallKind, Observation
from m2flow.macro.remembering import Remembered
from m2flow.macro.session import Backend
from m2flow.samples import Batch

LogSource = tuple[int, str | None] | float
"""What a log names: a field of a call's value, or a number."""


@dataclass(frozen=True)
class CallRecord:
    """A call as the program made it: equal records are equal calls."""

    ordinal: int
    step: int
    name: str
    site: str
    """`flows/grpo.py:31`"""
    text: str
    inputs: tuple[tuple[str, int], ...]
    shown: tuple[tuple[str, str], ...]
    """Options as the user wrote them."""
    hidden: tuple[tuple[str, str], ...]
    """All other options: sampling, loss, optimiser, functions by bytecode, a dataset's cursor and rows."""
    effects: tuple[str, ...]

    @classmethod
    def of(cls, call: Call) -> CallRecord:
        shown, hidden = _told_options(call)
        return cls(
            call.ordinal,
            call.step,
            call.name,
            str(call.site),
            call.site.text,
            tuple((name, ref.call) for name, ref in call.inputs),
            shown,
            hidden,
            (*(f"reads {effect}" for effect in call.reads), *(f"writes {effect}" for effect in call.writes)),
        )

    @property
    def where(self) -> str:
        return f"{self.site}  {self.text}"

    def __str__(self) -> str:
        arguments = [f"{name}=%{ordinal}" for name, ordinal in self.inputs] + [f"{name}={value}" for name, value in self.shown]
        return f"{self.name}({', '.join(arguments)})"


@dataclass(frozen=True)
class Look:
    """A point where the program waited for a value."""

    num_calls: int
    """Calls made before it."""
    call: int
    why: str
    site: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.site}  {self.text}"


@dataclass(frozen=True)
class LogEntry:
    """A `log` of the program. Remembered, but never compared: it may hold the time of day."""

    num_calls: int
    step: int
    name: str
    source: LogSource


class RecordWriter(Protocol):
    """Takes what a run must remember, in the order of the program. Called by the flow's thread."""

    def called(self, call: Call) -> None: ...

    def looked(self, look: Look, call: Call, value: object) -> None:
        """The program saw this: a value, rows, or an error."""

    def logged(self, entry: LogEntry) -> None: ...

    def step_ended(self, step: int) -> None: ...


class Record(Protocol):
    """What a run remembered."""

    @property
    def calls(self) -> Sequence[CallRecord]: ...

    @property
    def looks(self) -> Sequence[Look]: ...

    @property
    def logs(self) -> Sequence[LogEntry]: ...

    def value(self, ordinal: int) -> object:
        """What a call came to: rows, one value, or an error as a value. KeyError if the record does not have it."""


class MemoryRecord:
    """A record in this process: for tests, and for programs that replay a flow at once."""

    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.looks: list[Look] = []
        self.logs: list[LogEntry] = []
        self.values: dict[int, object] = {}

    def called(self, call: Call) -> None:
        self.calls.append(CallRecord.of(call))

    def looked(self, look: Look, call: Call, value: object) -> None:
        self.looks.append(look)
        self.values[call.ordinal] = value

    def keep(self, call: Call, value: object) -> None:
        """A value that the program has not looked at."""
        self.values.setdefault(call.ordinal, value)

    def logged(self, entry: LogEntry) -> None:
        self.logs.append(entry)

    def step_ended(self, step: int) -> None:
        pass

    def value(self, ordinal: int) -> object:
        return self.values[ordinal]


class Around(Backend):
    """Another backend, which does all the work; a subclass watches."""

    def __init__(self, live: Backend) -> None:
        self._live = live

    def submit(self, call: Call) -> None:
        self._live.submit(call)

    def recall(self, call: Call, rows: Batch, left: Sequence[int]) -> None:
        self._live.recall(call, rows, left)

    def fail(self, call: Call, root: int, error: M2FlowError) -> None:
        self._live.fail(call, root, error)

    def value(self, ordinal: int) -> object:
        return self._live.value(ordinal)

    def observed(self, observation: Observation) -> None:
        self._live.observed(observation)

    def log(self, step: int, values: Mapping[str, LogSource]) -> None:
        self._live.log(step, values)

    def release(self, ordinal: int) -> None:
        self._live.release(ordinal)

    def end_step(self, step: int) -> None:
        self._live.end_step(step)

    def raise_due(self) -> None:
        self._live.raise_due()

    def finish(self) -> None:
        self._live.finish()


class Recorder(Around):
    """Another backend, with what the program does written down."""

    def __init__(self, live: Backend, writer: RecordWriter) -> None:
        super().__init__(live)
        self._writer = writer
        self._calls: Remembered[Call] = Remembered()
        self._num_calls = 0
        self._step = -1
        self._look: Look | None = None

    def submit(self, call: Call) -> None:
        assert call.ordinal == self._num_calls
        self._calls[call.ordinal] = call
        self._num_calls, self._step = call.ordinal + 1, call.step
        self._writer.called(call)
        super().submit(call)

    def observed(self, observation: Observation) -> None:
        self._look = look_of(observation, self._num_calls)
        super().observed(observation)

    def value(self, ordinal: int) -> object:
        value: object
        try:
            value = super().value(ordinal)
        except M2FlowError as error:
            self._saw(ordinal, error)
            raise
        self._saw(ordinal, value)
        return value

    def _saw(self, ordinal: int, value: object) -> None:
        look, self._look = self._look, None
        if look is not None and self._calls[ordinal].engine != "source":  # A dataset's rows are the program's own.
            self._writer.looked(look, self._calls[ordinal], value)

    def log(self, step: int, values: Mapping[str, LogSource]) -> None:
        for name, source in values.items():
            self._writer.logged(LogEntry(self._num_calls, step, name, source))
        super().log(step, values)

    def release(self, ordinal: int) -> None:
        if self._calls[ordinal].is_aligned:
            self._calls.forget(ordinal)
        else:
            self._calls.let_go(ordinal, self._step)
        super().release(ordinal)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        self._writer.step_ended(step)


def look_of(observation: Observation, num_calls: int) -> Look:
    return Look(num_calls, observation.call, observation.why, str(observation.site), observation.site.text)


def difference(recorded: CallRecord, now: CallRecord, *, what: str = "recorded") -> str | None:
    """How two calls at one place of the program differ, in words; None if they are the same.

    The line's number may differ, so that a comment above it changes nothing; its text may not.
    """
    if (recorded.name, recorded.step) != (now.name, now.step):
        return f"it is {now.name} in {_step(now)}; {what} was {recorded.name} in {_step(recorded)}"
    if recorded.inputs != now.inputs:
        return f"it works on {_inputs(now)}; {what} were {_inputs(recorded)}"
    for part in ("shown", "hidden"):
        before, after = dict(getattr(recorded, part)), dict(getattr(now, part))
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                return f"{name} is {after.get(name, 'not given')}; {what} was {before.get(name, 'not given')}"
    if recorded.effects != now.effects:
        return f"it {', '.join(now.effects) or 'has no effect'}; {what} was: {', '.join(recorded.effects) or 'no effect'}"
    if recorded.text != now.text or recorded.site.rpartition(":")[0] != now.site.rpartition(":")[0]:
        return f"the line has another text; {what} was: {recorded.text}"
    return None


_Told = tuple[tuple[str, str], ...]


def _told_options(call: Call) -> tuple[_Told, _Told]:
    common = _told_of_kind(call.kind) if call.kind is not None else {}
    as_written = tuple([(name, told(value)) for name, value in call.shown.items()])
    hidden = [(name, common[name] if name in common else told(value)) for name, value in call.options.items() if name not in call.shown]
    return as_written, tuple(hidden)


@functools.lru_cache(maxsize=256)
def _told_of_kind(kind: CallKind) -> Mapping[str, str]:
    """Calls of a place mostly have the options that they had before."""
    return {name: told(value) for name, value in kind.options.items()}


def _step(call: CallRecord) -> str:
    return f"step {call.step}" if call.step >= 0 else "no step"


def _inputs(call: CallRecord) -> str:
    return ", ".join(f"{name}=%{ordinal}" for name, ordinal in call.inputs) or "no input"
