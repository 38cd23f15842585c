"""Record what a run's flow did, and run the flow again from its start with the record as the answer.

    flow --Session--> Recorder --> the backend that does the work
                         |
                         +--> RecordWriter (`MemoryRecord`; on disk `m2flow.micro.records.flow_record`)

    flow --Session--> ReplayBackend --before the point--> Record
                                    --from it on-------> the backend that does the work

Recording. A call is stored as the program wrote it (`CallRecord`), with the cursor and a checksum of the rows that a dataset gave; a
look (`Look`) with where and why; a value once, however often it was looked at.

Replay. The flow's own Python runs again in full, under the same seeds, so its variables are what they were. Up to the point nothing is
executed, logs and prints are muted, and each call and look must be what the record has: the first that is not ends the replay.

Engine state is not in the record. Either the caller has restored it (a checkpoint), or `redoes` says which calls before the point are
executed again, with recorded rows: by default none, `trains` for those of the trainers, which recreates every weight and optimiser. A
resumed run has the end of its record as its point, and executes again what came after its checkpoint and what was not over. Calls that
are executed take an earlier result from the record; the result of a function without effects that the record lacks is computed again,
as are log-probabilities and values by weights that nothing has replaced since; a finished generation is never made again. What a line
carries (`late="carry"`) continues from the samples that the record names (`left`).

    flow --Session--> PinnedBackend --> the backend that does the work

Pinning (`--pin-plan`). A run stops at the first line where a step's structure differs from the pinned one: the calls of a step, what they
are, at which line, on which results, with which options as written. Versions and numbers of calls are left out; so are calls outside the
flow's loop, which come once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TextIO

import msgspec

from m2flow.errors import DivergenceError, FlowError, M2FlowError, SpecError
from m2flow.macro.capture import stable_text
from m2flow.macro.eager import number_of
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, CallKind, Granularity, MacroGraph, Observation, stable_site
from m2flow.macro.oversampling import carries
from m2flow.macro.session import Backend, CallValues
from m2flow.samples import Batch, SampleId

LogSource = tuple[int, str | None] | float
"""What a log names: a field of a call's value, or a number."""


@dataclass(frozen=True)
class CallRecord:
    """A call as the program made it; equal calls have equal records."""

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
        shown, hidden = _options_text(call)
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

    def without_function(self) -> CallRecord:
        """The record but for the function's code."""
        return replace(self, hidden=tuple(one for one in self.hidden if one[0] != "function"))

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
    """A `log` of the program. Recorded, but never compared: it may hold the time of day."""

    num_calls: int
    step: int
    name: str
    source: LogSource


class RecordWriter(Protocol):
    """Write what a replay needs, in program order. Called by the flow's thread."""

    def called(self, call: Call) -> None: ...

    def looked(self, look: Look, call: Call, value: object) -> None:
        """Record what the program saw: a value, rows, or an error."""

    def logged(self, entry: LogEntry) -> None: ...

    def step_ended(self, step: int) -> None: ...


class Record(Protocol):
    """The record of a run, as a replay reads it."""

    @property
    def calls(self) -> Sequence[CallRecord]: ...

    @property
    def looks(self) -> Sequence[Look]: ...

    @property
    def logs(self) -> Sequence[LogEntry]: ...

    def value(self, ordinal: int) -> object:
        """The result of a call: rows, one value, or an error as a value. KeyError if the record does not have it."""


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
        """Store a value that the program has not looked at."""
        self.values.setdefault(call.ordinal, value)

    def logged(self, entry: LogEntry) -> None:
        self.logs.append(entry)

    def step_ended(self, step: int) -> None:
        pass

    def value(self, ordinal: int) -> object:
        return self.values[ordinal]


# ---- backends that record and replay


class BackendWrapper(Backend):
    """A backend that delegates everything to another one; subclasses override what they need."""

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


class Recorder(BackendWrapper):
    """Wrap a backend and record what the program does."""

    def __init__(self, live: Backend, writer: RecordWriter) -> None:
        super().__init__(live)
        self._writer = writer
        self._calls: CallValues[Call] = CallValues()
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


def difference(recorded: CallRecord, now: CallRecord, *, what: str = "recorded", may_change: Collection[str] = ()) -> str | None:
    """Describe how two calls at one place of the program differ; None if they are the same.

    The line's number may differ, so that a comment above it changes nothing; its text may not. Nor may the function's code, but of calls
    whose names are in `may_change`.
    """
    if recorded.name in may_change:
        recorded, now = recorded.without_function(), now.without_function()
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
    if recorded.text != now.text or stable_site(recorded.site).rpartition(":")[0] != stable_site(now.site).rpartition(":")[0]:
        return f"the line has another text; {what} was: {recorded.text}"
    return None


_Texts = tuple[tuple[str, str], ...]


def _options_text(call: Call) -> tuple[_Texts, _Texts]:
    common = _texts_of_kind(call.kind) if call.kind is not None else {}
    as_written = tuple([(name, stable_text(value)) for name, value in call.shown.items()])
    hidden = [
        (name, common[name] if name in common else stable_text(value)) for name, value in call.options.items() if name not in call.shown
    ]
    return as_written, tuple(hidden)


@functools.lru_cache(maxsize=256)
def _texts_of_kind(kind: CallKind) -> Mapping[str, str]:
    """Fingerprints of a kind's options; cached, since calls of a place mostly have the same options."""
    return {name: stable_text(value) for name, value in kind.options.items()}


def _step(call: CallRecord) -> str:
    return f"step {call.step}" if call.step >= 0 else "no step"


def _inputs(call: CallRecord) -> str:
    return ", ".join(f"{name}=%{ordinal}" for name, ordinal in call.inputs) or "no input"


_NOW = """A run goes on only with the flow that it began with. Put back what was changed, and resume; or begin a new run."""


def trains(call: Call) -> bool:
    """The calls that make a trainer's state, and what they need of it: updates, frozen copies, log-probabilities."""
    return call.engine == "train"


def nothing(call: Call) -> bool:
    return False


class ReplayBackend(Backend):
    """Answer from a record up to a point, then from a live backend.

    Args:
        until_call: the first call that is live again. until_step: the first step that is. Neither: the end of the record.
        redoes: which calls before the point are done again by the live backend.
        logged: step and name -> how many such logs were written; others are written now. By default all those before the point were.
        left: generation -> the samples that it left to the next one of its line.
        failed: calls that failed, and whose error the program caught -> the call that failed by itself, and its error.
        may_change: names of calls whose function may be another than was recorded: one failed, and ended the program.
        changed: is told the name of each call whose function is another.
    """

    def __init__(
        self,
        record: Record,
        live: Backend,
        *,
        until_call: int | None = None,
        until_step: int | None = None,
        redoes: Callable[[Call], bool] = nothing,
        logged: Mapping[tuple[int, str], int] | None = None,
        left: Mapping[int, Sequence[int]] | None = None,
        failed: Mapping[int, tuple[int, M2FlowError]] | None = None,
        may_change: Collection[str] = (),
        changed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._record = record
        self._may_change, self._changed = set(may_change), changed
        self._live = live
        self._until_call = len(record.calls) if until_call is None else min(until_call, len(record.calls))
        self._until_step = until_step
        self._redoes = redoes
        self._logged = None if logged is None else Counter(logged)
        self._left = left
        self._failed = failed or {}
        self._written: set[str] = set()
        """Resources that the live backend has written."""
        self._calls: list[Call] = []
        """The replayed ones. Kept whole: a live call may need their rows."""
        self._takers: dict[int, list[int]] = {}
        """Call -> the replayed calls that take its result."""
        self._released: set[int] = set()
        """Calls that the program has released and the live backend has not."""
        self._num_looks = 0
        self._is_live = False
        self._known_live: set[int] = set()
        """Calls that the live backend has, as they are or as given rows."""

    @property
    def is_live(self) -> bool:
        """Whether the point is reached."""
        return self._is_live

    def submit(self, call: Call) -> None:
        self._is_live = self._is_live or self._is_due(call.step)
        if self._is_live:
            self._provide_inputs(call)
            self._to_live(call)
            return
        if (look := self._next_look) is not None:
            raise _diverged(
                call.site.describe(), f"Python waited here for %{look.call}, {look.why}, at {look.where}", f"{CallRecord.of(call)}"
            )
        recorded, now = self._record.calls[call.ordinal], CallRecord.of(call)
        how = difference(recorded, now, may_change=self._may_change)
        if how is not None:
            raise _diverged(call.site.describe(), f"{recorded}  {recorded.where}", f"{now}  {now.where}", f"call {call.ordinal}: {how}")
        if recorded.hidden != now.hidden:
            self._changed(now.name)
        self._calls.append(call)
        for _, ref in call.inputs:
            self._takers.setdefault(ref.call, []).append(call.ordinal)
        if call.ordinal in self._failed:
            self._known_live.add(call.ordinal)
            self._live.fail(call, *self._failed[call.ordinal])
        elif self._redoes(call):
            self._provide_inputs(call)
            self._to_live(call)

    def observed(self, observation: Observation) -> None:
        if self._is_live or self._is_source(observation.call):
            if self._is_live and observation.call in self._known_live:
                self._live.observed(observation)
            return
        look, now = self._next_look, look_of(observation, len(self._calls))
        if look is None and self._is_due(None):
            self._is_live = True
        elif look is None:
            recorded = self._record.calls[len(self._calls)]
            raise _diverged(observation.site.describe(), f"{recorded}  {recorded.where}", f"Python waits for %{now.call}, {now.why}")
        elif (look.call, look.why, look.text) != (now.call, now.why, now.text):
            raise _diverged(
                observation.site.describe(),
                f"Python waited for %{look.call}, {look.why}, at {look.where}",
                f"for %{now.call}, {now.why}, at {now.where}",
            )
        else:
            self._num_looks += 1

    def value(self, ordinal: int) -> object:
        if ordinal >= len(self._calls) or ordinal in self._failed:
            return self._live.value(ordinal)
        try:
            value = self._known(ordinal)
        except KeyError:
            self._provide(ordinal, len(self._calls))
            return self._live.value(ordinal)
        if isinstance(value, M2FlowError):
            raise value
        return value

    def log(self, step: int, values: Mapping[str, LogSource]) -> None:
        if self._logged is None:
            due = list(values) if self._is_live else []
        else:
            due = [name for name in values if not self._logged[step, name]]
            self._logged.subtract((step, name) for name in values if name not in due)
        if due:
            self._live.log(step, {name: self._log_source(values[name]) for name in due})

    def release(self, ordinal: int) -> None:
        self._released.add(ordinal)
        self._let_go(ordinal)

    def _let_go(self, ordinal: int) -> None:
        """Release in the live backend what neither the program nor a later call to it can ask for."""
        if ordinal in self._released and not any(self._may_be_given(taker) for taker in self._takers.get(ordinal, ())):
            if ordinal in self._known_live:
                self._released.discard(ordinal)
                self._live.release(ordinal)
            elif ordinal < len(self._calls):
                for _, ref in self._calls[ordinal].inputs:
                    self._let_go(ref.call)

    def _may_be_given(self, ordinal: int) -> bool:
        """Whether the live backend may yet be given this replayed call: another may need its result, or the late samples that it left."""
        if ordinal in self._known_live:
            return False
        is_held = ordinal not in self._released or carries(self._calls[ordinal].options)
        return is_held or any(self._may_be_given(taker) for taker in self._takers.get(ordinal, ()))

    def end_step(self, step: int) -> None:
        calls = itertools.takewhile(lambda call: call.step in (step, -1), reversed(self._calls))
        if self._is_live or any(call.ordinal in self._known_live for call in calls):
            self._live.end_step(step)
        self._is_live = self._is_live or self._is_due(step + 1)

    def raise_due(self) -> None:
        self._live.raise_due()

    def finish(self) -> None:
        if not self._is_live and not self._is_due(None):
            look = self._next_look
            recorded = f"Python waited for %{look.call}, {look.why}" if look else f"{self._record.calls[len(self._calls)]}"
            where = look.where if look else self._record.calls[len(self._calls)].where
            raise _diverged(where, recorded, "the flow ends before it")
        if self._known_live:
            self._live.finish()

    def _is_due(self, step: int | None) -> bool:
        """Whether the next call is the first live one; `step` is its step, if that is known."""
        if self._next_look is not None:
            return False
        is_step = step is not None and self._until_step is not None and step >= self._until_step
        return is_step or len(self._calls) >= self._until_call

    @property
    def _next_look(self) -> Look | None:
        """The next look in the record, between two calls."""
        looks = self._record.looks
        is_here = self._num_looks < len(looks) and looks[self._num_looks].num_calls == len(self._calls)
        return looks[self._num_looks] if is_here else None

    def _is_source(self, ordinal: int) -> bool:
        return ordinal < len(self._calls) and self._calls[ordinal].engine == "source"

    def _known(self, ordinal: int) -> object:
        """The recorded result of a call. KeyError if only the live backend can know it."""
        return self._calls[ordinal].options["rows"] if self._is_source(ordinal) else self._record.value(ordinal)

    # ---- passing calls before the point to the live backend

    def _provide_inputs(self, call: Call) -> None:
        for _, ref in call.inputs:
            self._provide(ref.call, call.ordinal)

    def _provide(self, ordinal: int, before: int) -> None:
        """Make an earlier call's result known to the live backend, which has not been given the call `before` yet: as given rows, or by
        doing what has no effect."""
        if ordinal in self._known_live:
            return
        call = self._calls[ordinal]
        try:
            value = self._known(ordinal)
        except KeyError:
            value = None
        is_function = call.engine == "function" and not call.writes and not call.is_gated
        if call.engine == "source":
            self._to_live(call)
        elif isinstance(value, Batch) and carries(call.options) and self._left is not None:
            self._recall(call, self._left, value)
        elif isinstance(value, Batch):
            self._to_live(_given(call, value))
        elif is_function or (call.engine == "train" and self._reads_what_is_there(call, before)):
            self._provide_inputs(call)
            self._to_live(call)
        else:
            raise FlowError(
                f"the record has no rows of {call.name}, which a call after the point of the replay needs",
                where=call.site.describe(),
                now="Replay to the end of a step in which it was used up.",
            )

    def _reads_what_is_there(self, call: Call, before: int) -> bool:
        """Whether the trainers still hold the weights that an earlier call read, as far as this replay has changed them."""
        later = {effect.resource for other in self._calls[call.ordinal + 1 : before] for effect in other.writes}
        return not call.writes and not later.intersection(effect.resource for effect in call.reads) and not self._is_replaced(call)

    def _is_replaced(self, call: Call) -> bool:
        return any(effect.resource in self._written for effect in call.reads)

    def _to_live(self, call: Call) -> None:
        if call.carries_from is not None and call.carries_from not in self._known_live:
            if self._left is None:
                raise FlowError(
                    f"{call.name} takes over samples that an earlier turn of its line left unfinished, and the record does not have them",
                    where=call.site.describe(),
                    now="Replay all of this loop, or resume the run.",
                )
            self._provide(call.carries_from, call.ordinal)
        self._known_live.add(call.ordinal)
        self._written.update(effect.resource for effect in call.writes if call.ordinal >= len(self._calls))
        self._live.submit(call)
        for _, ref in call.inputs:
            self._let_go(ref.call)

    def _recall(self, call: Call, left: Mapping[int, Sequence[int]], rows: Batch) -> None:
        """Make a generation that is over known to the live backend as one that leaves samples; and those that drew them too."""
        late = left.get(call.ordinal, ())
        for drawn in sorted({SampleId.unpack(packed).call for packed in late} - {call.ordinal}):
            self._provide(drawn, call.ordinal)
        self._provide_inputs(call)
        self._known_live.add(call.ordinal)
        self._live.recall(call, rows, late)

    def _log_source(self, source: LogSource) -> LogSource:
        """Convert a log's source for the live backend: a recorded value becomes a number."""
        if isinstance(source, float) or source[0] in self._known_live:
            return source
        try:
            return number_of(self._known(source[0]), source[1])
        except KeyError:
            self._provide(source[0], len(self._calls))
            return source


def replay(
    flow: Flow,
    options: Mapping[str, object],
    record: Record,
    live: Backend,
    *,
    seed: int = 0,
    until_call: int | None = None,
    until_step: int | None = None,
    redoes: Callable[[Call], bool] = nothing,
) -> object:
    """Run a recorded flow again and return its result. `options` and `seed` must be those of the recorded run.

    Raises:
        DivergenceError: the flow makes other calls than it did; nothing after that line is done.
    """
    backend = ReplayBackend(record, live, until_call=until_call, until_step=until_step, redoes=redoes)
    with prints_muted(lambda: not backend.is_live):
        return flow.run(backend, options, seed=seed)


@contextlib.contextmanager
def prints_muted(is_muted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Drop what this thread writes to stdout while the condition holds."""
    with contextlib.redirect_stdout(_Muted(sys.stdout, threading.get_ident(), is_muted)):
        yield


class _Muted(io.TextIOBase):
    """A stream that drops what one thread writes while a condition holds."""

    def __init__(self, stream: TextIO, thread: int, is_muted: Callable[[], bool]) -> None:
        self._stream = stream
        self._thread = thread
        self._is_muted = is_muted

    def write(self, text: str) -> int:
        if not (threading.get_ident() == self._thread and self._is_muted()):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _given(call: Call, rows: Batch) -> Call:
    """Replace a call whose result is known by a source of these rows, which every backend can execute."""
    options = {"rows": rows, "cursor": 0}
    return replace(call, engine="source", granularity=Granularity.SAMPLE, inputs=(), reads=(), writes=(), options=options, is_aligned=True)


def check_same(record: Record, graph: MacroGraph, may_change: Collection[str] = ()) -> None:
    """Compare a flow's trace with the record of the run to resume, before anything is started: up to the trace's first look.

    Args:
        may_change: as of `difference`.
    Raises:
        DivergenceError: it makes another call; the first one is named.
    """
    num_sure = min([seen.call + 1 for seen in graph.observations], default=len(graph.calls))
    for recorded, call in zip(record.calls, graph.calls[:num_sure], strict=False):
        now = CallRecord.of(call)
        how = difference(recorded, now, may_change=may_change)
        if how is not None:
            raise _diverged(call.site.describe(), f"{recorded}  {recorded.where}", f"{now}  {now.where}", f"call {call.ordinal}: {how}")


def _diverged(where: str, recorded: str, now: str, what: str = "the flow does something else than it did") -> DivergenceError:
    return DivergenceError(what, where=where, now=f"recorded: {recorded}\nnow:      {now}\n{_NOW}")


# ---- pinning

_UNPINNED = "Without --pin-plan such a step is lowered anew, which costs time and changes no answer."


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
        return tuple(_read_plan(path.read_bytes()).structure)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no plan to pin a run to: {error}", now=f"Make one: m2flow plan FLOW --json > {shlex.quote(str(path))}"
        ) from None


class _Plan(msgspec.Struct):
    structure: list[PinnedCall]


_read_plan = msgspec.json.Decoder(_Plan).decode


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
                now=f"pinned: {should or 'no more calls'}\nnow:    {now}\n{_UNPINNED}",
            )

    def end_step(self, step: int) -> None:
        if self._pinned is not None and len(self._step) < len(self._pinned):
            missing = self._pinned[len(self._step)]
            raise DivergenceError(
                f"step {step} ends before a call that {self._source} has, to which the run is pinned",
                where=missing.site,
                now=f"pinned: {missing}\nnow:    the step ends after {len(self._step)} calls\n{_UNPINNED}",
            )
        self._pinned = tuple(self._step) if self._pinned is None else self._pinned
        self._step = []
        super().end_step(step)
