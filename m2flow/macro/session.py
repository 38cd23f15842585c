"""The session: what a flow's calls are recorded into while it runs as ordinary Python.

    flow function --record--> Session --submit--> Backend (eager | planned | tracing)

A session numbers the calls, knows each resource's version, and asks its backend for a value when the program observes one.
Backends differ only in when they do the work: `m2flow.macro.eager` at once, `m2flow.macro.tracing` never, and
`m2flow.micro.controller` on workers.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, Effect, EngineKind, Granularity, Observation, Ref, Site
from m2flow.recipe import Model

_current: ContextVar[Session | None] = ContextVar("m2flow_session", default=None)
_PACKAGE = str(Path(__file__).resolve().parents[1])


class Backend(ABC):
    """What does the work of a session's calls."""

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Take a call, in program order. Never raises for what the call does: that stays with its handle."""

    @abstractmethod
    def value(self, ordinal: int) -> object:
        """Wait for a call's result: a `Batch` if it is aligned, else one value. Raises what the call raised."""

    @abstractmethod
    def observed(self, observation: Observation) -> None:
        """The program is about to wait for a value."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        """Record these when they are known: (call, field of its value), or a number."""

    @abstractmethod
    def release(self, ordinal: int) -> None:
        """The program can't reach this call's result any more."""

    @abstractmethod
    def end_step(self, step: int) -> None:
        """A step's calls are all submitted. May wait, to bound how far Python runs ahead; raises errors that are due."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every call is done; raise the earliest error not yet raised."""


class Session:
    """One run of one flow."""

    def __init__(self, backend: Backend, *, flow: str, seed: int = 0, max_steps: int | None = None) -> None:
        self.backend = backend
        self.flow = flow
        self.seed = seed
        self.max_steps = max_steps
        self.step = -1
        self.num_steps = 0
        """Steps that the flow's outermost iterators ask for."""
        self.is_open = True
        self.models: dict[str, Model] = {}
        self._num_calls = 0
        self._num_datasets = 0
        self._num_streams = 0
        self._versions: dict[str, int] = {}
        self._in_steps = False
        self._next_step = 0
        self._history: dict[str, dict[int, int]] = {}

    def record(
        self,
        *,
        role: str,
        method: str,
        engine: EngineKind,
        granularity: Granularity,
        inputs: Mapping[str, Ref | None],
        options: Mapping[str, object],
        shown: Mapping[str, object],
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        is_aligned: bool = True,
    ) -> Call:
        """Number a call, stamp its effects with versions, and hand it to the backend."""
        if not self.is_open:
            raise TraceError(f"{role}.{method} was called after its flow had ended")
        read = tuple(Effect(r, self._versions.get(r, 0)) for r in reads)
        for resource in writes:
            self._versions[resource] = self._versions.get(resource, 0) + 1
        call = Call(
            ordinal=self._num_calls,
            role=role,
            method=method,
            engine=engine,
            granularity=granularity,
            inputs=tuple((name, ref) for name, ref in inputs.items() if ref is not None),
            options=dict(options),
            reads=read,
            writes=tuple(Effect(r, self._versions[r]) for r in writes),
            site=user_site(),
            step=self.step,
            is_aligned=is_aligned,
            shown=dict(shown),
        )
        self._num_calls += 1
        self.backend.submit(call)
        return call

    @property
    def log_step(self) -> int:
        """The step that a log belongs to: outside the loop, the number of steps so far."""
        return self.step if self.step >= 0 else self._next_step

    @property
    def next_ordinal(self) -> int:
        return self._num_calls

    def add_model(self, role: str, model: Model) -> None:
        """Make a role known. Two roles of one name would share weights by accident."""
        if role in self.models:
            raise TraceError(
                f"this flow has two roles named {role!r}", where=user_site().describe(), now=f"Name one of them: name='{role}_2'."
            )
        self.models[role] = model

    def number_dataset(self) -> int:
        self._num_datasets += 1
        return self._num_datasets - 1

    def next_stream(self) -> int:
        """The ordinal of a generate call among the generate calls: what its random numbers are keyed by."""
        self._num_streams += 1
        return self._num_streams - 1

    def observe(self, ordinal: int, why: str) -> object:
        if not self.is_open:
            raise TraceError("a handle was used after its flow had ended", now="Return or log the value inside the flow.")
        self.backend.observed(Observation(ordinal, user_site(), why))
        return self.backend.value(ordinal)

    def remember(self, call: Call) -> None:
        """Note which call stood at a line of the program in this step, for `lagged`. In a loop the last one counts."""
        self._history.setdefault(str(call.site), {})[call.step] = call.ordinal

    def recall(self, call: Call, steps_ago: int) -> int | None:
        return self._history[str(call.site)].get(call.step - steps_ago)

    def iterate(self, count: int) -> Iterator[int]:
        """The steps of the flow's outermost iterator. An inner one is plain iteration: its calls belong to the outer step."""
        if self._in_steps:
            yield from range(count)
            return
        self._in_steps = True
        self.num_steps += count
        try:
            for index in range(count if self.max_steps is None else min(count, self.max_steps)):
                self.step, self._next_step = self._next_step, self._next_step + 1
                yield index
                self.backend.end_step(self.step)
        finally:
            self._in_steps = False
            self.step = -1


def current_session(what: str) -> Session:
    """The session that records now; outside a flow an error that says so."""
    session = _current.get()
    if session is None:
        raise TraceError(
            f"{what} was used outside a running flow",
            where=user_site().describe(),
            now="Put it into a function decorated with @flow and start that with `m2flow run FILE`.",
        )
    return session


@contextlib.contextmanager
def recording(session: Session) -> Iterator[Session]:
    """Make a session the current one; close it at the end."""
    token = _current.set(session)
    try:
        yield session
    finally:
        session.is_open = False
        _current.reset(token)


def user_site() -> Site:
    """Where the user's code is now: the innermost frame outside m2flow, and the user's frames that led there."""
    frame = sys._getframe(1)
    frames = []
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_PACKAGE):
            frames.append((filename, frame.f_lineno, frame.f_code.co_name))
        elif frames:
            break
        frame = frame.f_back  # type: ignore[assignment]
    if not frames:
        return Site("<unknown>", 0, "")
    (filename, line, _), *outer = frames
    path = tuple(f"{_shorten(f)}:{n} in {name}" for f, n, name in reversed(outer) if name != "<module>")
    return Site(_shorten(filename), line, linecache.getline(filename, line).strip(), path)


def _shorten(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
