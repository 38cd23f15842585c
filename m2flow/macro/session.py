"""The session: record a flow's calls while it runs as ordinary Python.

    flow function --record--> Session --submit--> Backend (eager | planned | tracing)

A session numbers the calls, tracks each resource's version, and asks its backend for a value when the program observes one. Backends
differ only in when they do the work: `m2flow.macro.eager` at once, `m2flow.macro.tracing` never, and
`m2flow.micro.controller.controller` on workers.

Unused results. A result is used by a call that takes it, by a look at it, by `log`, or by whoever still holds its handle when the flow
ends; a call that writes a resource needs no use. Python says when a handle is gone, so a warning comes at the end of the step, once for
each line, and none for a line whose result was ever used: a branch, a `break` or an error that the flow caught may skip the use in one
step.

Garbage collection. Python scans its young objects for every 700 net allocations, and each call of a flow keeps some dozens of objects
while it is in flight: with a thousand calls a step these scans were a fifth of a call's cost, without any gain, since a call's records
hold no cycles. So they are rare while a flow runs (`infrequent_gc`). Limit: cycles in the program's own objects are found later.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import re
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar, final

from m2flow.errors import FlowError, M2FlowError, OptionError, RunInterrupted, TraceError, UnusedResult, described, did_you_mean
from m2flow.macro.capture import Captures, Kinds
from m2flow.macro.graph import (
    Call,
    Effect,
    EngineKind,
    Granularity,
    Lineage,
    Observation,
    Ref,
    Site,
    forget_sites,
    is_of_user,
    owner,
    raised_at,
    site_of,
    user_site,
)
from m2flow.macro.oversampling import carries, is_cut, num_late, num_wanted
from m2flow.recipe import MOST_COUNTED, Model
from m2flow.samples import Batch

if TYPE_CHECKING:
    from m2flow.macro.tail_batching import DeferredPrompts

# ---- how a run of a flow ends, and the garbage collector meanwhile

_LONGEST = 50
"""Most lines of a cycle that is searched for."""


def interrupted(stop: KeyboardInterrupt) -> RunInterrupted:
    """Convert Ctrl-C to `RunInterrupted`, with where Python was. What was computed is in the run directory."""
    if isinstance(stop, RunInterrupted):
        return stop
    site = raised_at(stop)
    return RunInterrupted(f"stopped by {str(stop) or 'Ctrl-C'}", where=f"Python was at {site.describe()}" if site else "")


def infinite_recursion(error: RecursionError) -> FlowError | None:
    """Explain an infinite recursion in the user's code by its cycle of lines; None if the cycle is not the user's."""
    lines = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__) if owner(f.filename) == "user"]
    middle = lines[len(lines) // 4 : 3 * len(lines) // 4]  # The first lines lead there, the last ones are where it broke off.
    for size in range(1, min(_LONGEST, len(middle) // 3) + 1):
        if middle[size:] == middle[:-size]:
            first = next(i for i, line in enumerate(lines) if line in middle[:size])
            cycle = lines[first : first + size]
            named = [f"{site_of([line])} in {line[2]}" for line in cycle]
            return FlowError(
                f"the flow calls itself without end: {' -> '.join([*named, named[0]])}",
                where=site_of(cycle[:1]).describe(),
                now="A function that calls itself needs a case in which it does not.",
            )
    return None


_YOUNG = 50_000
"""Net allocations between two scans of the young generation: some megabytes."""


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """Freeze existing objects and scan new ones rarely. Larger thresholds, or a disabled collector, are left as they are: to ask whether
    what there is has been frozen already takes 30 ms for a million objects."""
    before = gc.get_threshold()
    changes = gc.isenabled() and 0 < before[0] < _YOUNG
    freezes = changes and gc.get_freeze_count() == 0
    if changes:
        gc.set_threshold(_YOUNG, *before[1:])
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if changes:
            gc.set_threshold(*before)


T = TypeVar("T")

MOST_LAG = 1_000
"""Steps back that a flow may look. A run of any length keeps no more than these."""


# ---- values by call, and their use


@final
class CallValues(Generic[T]):
    """A value for each call, by ordinal, kept as long as the program may ask for it."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._let_go: deque[tuple[int, int]] = deque()
        """(step, call) without a handle, in the order in which their handles went."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._kept

    def __getitem__(self, ordinal: int) -> T:
        return self._kept[ordinal]

    def __setitem__(self, ordinal: int, item: T) -> None:
        self._kept[ordinal] = item

    def forget(self, ordinal: int) -> None:
        """Drop a call's value: nothing can ask for it."""
        self._kept.pop(ordinal, None)

    def let_go(self, ordinal: int, step: int) -> None:
        """The program has no handle of the call any more: keep its value only as long as `lagged` can ask for it."""
        if ordinal in self._kept:
            self._let_go.append((step, ordinal))
        while self._let_go and self._let_go[0][0] < step - MOST_LAG:
            self._kept.pop(self._let_go.popleft()[1], None)


_Line = tuple[str, str, str, int]


class UnusedResults:
    """Track which of a session's results were used, to warn of those that were not."""

    def __init__(self) -> None:
        self._unused: dict[int, Call] = {}
        self._gone: dict[int, Call] = {}
        self._settled: set[_Line] = set()
        """Lines that were warned of, or whose result was used."""

    def added(self, call: Call) -> None:
        for _, ref in call.inputs:
            self.used(ref.call)
        if not call.writes:
            self._unused[call.ordinal] = call

    def used(self, ordinal: int) -> None:
        """Mark a result as used. Its handle may be gone: `lagged` finds a call by its place."""
        call = self._unused.pop(ordinal, None) or self._gone.pop(ordinal, None)
        if call is not None:
            self._settled.add(_line(call))

    def interrupted(self) -> None:
        """An error is raised to the program: count all results so far as used, since it may have been about to use them."""
        self._settled.update(map(_line, [*self._unused.values(), *self._gone.values()]))
        self._unused, self._gone = {}, {}

    def dropped(self, ordinal: int) -> None:
        """The program can't reach this call's result any more. May be called at any moment, by the garbage collector."""
        call = self._unused.pop(ordinal, None)
        if call is not None:
            self._gone[ordinal] = call

    def warn(self) -> None:
        """Warn of lines whose result was dropped unused, once for each line."""
        gone, self._gone = self._gone, {}
        for _, call in sorted(gone.items()):
            if _line(call) not in self._settled:
                self._settled.add(_line(call))
                said = f"nothing uses what {call.name} gives; it runs all the same. Use it, log() it, or take it out."
                warnings.warn_explicit(said, UnusedResult, call.site.file, call.site.line)


def _line(call: Call) -> _Line:
    return call.role, call.method, call.site.file, call.site.line


_FEW_CALLS = 1_000
"""Calls that a session may know before it looks for those of no use."""

# ---- the backend and the session

_current: ContextVar[Session | None] = ContextVar("m2flow_session", default=None)
_recording: list[Session] = []
"""The sessions of all threads of this process that record now: no context variable says so in a thread that a flow starts."""


class Backend(ABC):
    """Interface of what executes a session's calls."""

    is_rehearsal = False
    """The flow runs only to be looked at, and will run again: warnings can wait."""

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Take a call, in program order. Never raises for what the call does: that stays with its handle.

        Raises PlanError if no plan can do it.
        """

    def recall(self, call: Call, rows: Batch, left: Sequence[int]) -> None:
        """Restore a generation of a line (`late="carry"`) that was over before this backend began: its result, and the samples that it left
        to the next one. Of these nothing is there but who they are."""
        raise NotImplementedError(f"{type(self).__name__} takes up no line")

    def fail(self, call: Call, root: int, error: M2FlowError) -> None:
        """Take a call, in program order, that failed before this backend began, because of `root`; the program caught the error."""
        raise NotImplementedError(f"{type(self).__name__} takes up no failures")

    @abstractmethod
    def value(self, ordinal: int) -> object:
        """Wait for a call's result: a `Batch` if it is aligned, else one value. Raises what the call raised: if the program goes on after
        that, it has handled the error."""

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

    def raise_due(self) -> None:
        """The program has raised something itself. Raises an error of an earlier step first, if Python ran ahead of one."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every call is done; raise the earliest error that the program was not raised (`m2flow.macro.eager`)."""


class Session:
    """The recording of one run of a flow."""

    def __init__(self, backend: Backend, *, flow: str, seed: int = 0, max_steps: int | None = None, staleness: int = 0) -> None:
        self.backend = backend
        self.flow = flow
        self.seed = seed
        self.staleness = staleness
        """Versions that a generate call of a loop may be behind."""
        self.max_steps = max_steps
        self.step = -1
        self.num_steps = 0
        """Steps that the flow's outermost iterators ask for."""
        self.patience_end = (-1, "")
        """The last step in which `Best` said to stop, and why."""
        self.is_open = True
        self.models: dict[str, Model] = {}
        self.copies: dict[str, tuple[object, str, Site]] = {}
        """Role that took its weights from another -> its object in the program, the other role, and the line that made it."""
        self._num_calls = 0
        self._num_datasets: dict[str, int] = {}
        self._num_generations: dict[tuple[str, int], int] = {}
        """(role, call that made the prompts) -> generate calls so far."""
        self._versions: dict[str, int] = {}
        self._versions_before: dict[str, int] = {}
        """Version of each resource before the loop: no call of the loop may read older ones."""
        self.loop: tuple[int, int] | None = None
        """The step of the loop that the program is in, counted from the loop's first, and how many steps the loop asks for."""
        self._in_steps = False
        self._next_step = 0
        self._left_step: int | None = None
        """A step that has not ended yet: it is running, or `break` or `return` left it."""
        self._is_cut = False
        """The program has looked at a value: a trace ends there."""
        self._history: dict[tuple[object, ...], dict[int, list[int]]] = {}
        """Place in the program -> step -> calls there with numbers that `lagged` may ask for."""
        self._live: set[int] = set()
        """Calls whose handles the program has."""
        self._num_kept = 0
        """Size of the lineage after unreachable calls were last dropped."""
        self._captures = Captures()
        self._kinds = Kinds(self._captures)
        self.unused = UnusedResults()
        self._late_sources: dict[tuple[object, ...], Call] = {}
        """Place in the program -> the last call there that may leave late samples to the next; of this loop."""
        self.deferred: dict[tuple[object, ...], DeferredPrompts] = {}
        """Place in the program, source -> the prompts of this loop that wait there for a long round (`m2flow.macro.tail_batching`)."""
        self.lineage = Lineage()
        self.thread = threading.get_ident()
        self.raised: set[int] = set()
        """Calls whose error was raised to the program where it looked at them."""
        self._end: M2FlowError | None = None
        """The error that ends the run, since nobody had looked at it when its step ended. A `try` around the loop does not change that."""

    def __reduce__(self) -> str:
        now = "Several variables may stand for one handle: its rows never change. Elsewhere use what it came to: float(number), list(rows)."
        raise TraceError("what belongs to a running flow can't be copied, and can't leave it", now=now)

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
        staleness: int = 0,
    ) -> Call:
        """Number a call, stamp its effects with versions, and hand it to the backend. Its reads may be `staleness` versions behind."""
        if not self._goes_on:
            self._refuse(f"{role}.{method}" if method else role)
        self._end_left_step()
        needed = tuple([(name, ref) for name, ref in inputs.items() if ref is not None])
        if len(self.lineage) >= 2 * self._num_kept + _FEW_CALLS:
            self._forget([ref.call for _, ref in needed])
        names = tuple([name for name, _ in needed])
        kind, taken = self._kinds.of(user_site(), role, method, engine, granularity, names, options, reads, writes, is_aligned)
        call = Call.of(
            kind,
            self._num_calls,
            needed,
            taken,
            tuple([self._read(resource, staleness) for resource in reads]) if reads else (),  # Most calls read and write nothing.
            tuple([Effect(resource, self._versions.get(resource, 0) + 1) for resource in writes]) if writes else (),
            self.step,
            dict(shown),
            *self._count_rows(engine, needed, options),
        )
        self.lineage.add(call)
        if carries(taken):
            self._late_sources[_place(call)] = call
        for effect in call.writes:
            self._versions[effect.resource] = effect.version
        self._num_calls += 1
        self.unused.added(call)
        self.backend.submit(call)
        return call

    def staleness_of_generate(self, asked: int | None) -> int:
        """The staleness that a generate call made now may have: what it asks for, by default the flow's; none outside the loop."""
        if asked is None:
            return self.staleness if self._in_steps else 0
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked <= self.staleness:
            raise OptionError(
                f"generate(staleness={asked!r:.60}): a call may ask for 0 up to the flow's own staleness, which is {self.staleness}",
                where=user_site().describe(),
                now="The flow's bound is @flow(staleness=k).",
            )
        return asked if self._in_steps else 0

    def version(self, resource: str) -> int:
        """The version that a call made now would read."""
        return self._versions.get(resource, 0)

    def _read(self, resource: str, staleness: int) -> Effect:
        """Outside the loop, and up to its first update, a read is exact: what came before the loop is no older version of the policy."""
        version = self.version(resource)
        oldest = max(version - staleness, self._versions_before.get(resource, 0)) if self._in_steps else version
        return Effect(resource, version, oldest if oldest < version else None)

    def _count_rows(self, engine: EngineKind, inputs: Sequence[tuple[str, Ref]], options: Mapping[str, object]) -> tuple[int, int]:
        """Rows that a call gives, and that it begins; at most."""
        if engine == "source":
            rows = options["rows"]
            size = len(rows) if isinstance(rows, Batch) else 0
            return size, size
        sources = [self.lineage.known(ref.call).call for _, ref in inputs]
        if engine != "rollout":
            if isinstance(most := options.get("most_rows"), int):
                return most, most
            if options.get("gives") == "concat":
                size = sum([call.most_rows for call in sources])
                return size, size
            if not sources:
                return 0, 0
            return sources[0].most_rows, sources[0].most_candidates if "refill" in options else sources[0].most_rows
        n = options.get("n", 1)
        assert isinstance(n, int)
        num_prompts = sources[0].most_rows if sources else 0
        if isinstance(kept := options.get("refill"), int):
            return kept * n, num_prompts * n
        if is_cut(options):
            carried = options.get("num_carried", 0)
            assert isinstance(carried, int)
            return (num_wanted(options, num_prompts) + carried) * n, num_prompts * n
        return num_prompts * n, num_prompts * n

    def late_source(self, role: str, method: str) -> tuple[Call | None, int]:
        """The call whose late samples a call made now takes over (the previous one of this line), and at most how many groups."""
        site = user_site()
        found = self._late_sources.get((f"{role}.{method}", site.file, site.line, site.path))
        if found is None:
            return None, 0
        prompts = found.input("prompts")
        assert prompts is not None
        return found, num_late(found.options, self.lineage.known(prompts.call).call.most_rows)

    def snapshot(self, function: Callable[..., object], site: Site) -> object:
        """Snapshot a function for later calls."""
        return self._captures.take(function, site)

    @property
    def log_step(self) -> int:
        """The step that a log belongs to: outside the loop, the number of steps so far."""
        return self.step if self.step >= 0 else self._next_step

    @property
    def next_ordinal(self) -> int:
        return self._num_calls

    def add_model(self, role: str, model: Model, *, is_copy: bool = False) -> None:
        """Register a role. Two roles of one name would share weights by accident. One that is a copy of another's needs no file and no
        engine of another kind: the plan may know it without a trace that comes there (`m2flow.macro.tracing.copies_made`)."""
        if role in self.models:
            raise TraceError(f"this flow has two roles named {role!r}", where=user_site().describe(), now=once_each(role))
        if self._is_cut and not is_copy:
            raise TraceError(
                f"the role {role!r} is made after the flow has looked at a value, when the workers have their models already",
                where=user_site().describe(),
                now="Make every Policy and Reference at the flow's beginning.",
            )
        self.models[role] = model

    def key_dataset(self, name: str) -> str:
        """The key of a dataset's cursor, order and random numbers: its name; for the second one of a name, `name#2`."""
        number = self._num_datasets[name] = self._num_datasets.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    def count_generation(self, role: str, prompts: int) -> int:
        """Count how often this role had to answer these prompts, or others made of the same, before: its random numbers are keyed by it."""
        roots = {maker.ordinal for maker in self.lineage.makers(prompts)}
        repeat = max(self._num_generations.get((role, root), 0) for root in roots)
        self._num_generations.update({(role, root): repeat + 1 for root in roots})
        return repeat

    def observe(self, ordinal: int, why: str, *, lag: int = 0) -> object:
        if not self._goes_on:
            self._refuse("a handle")
        self.unused.used(ordinal)
        site = user_site()
        self._is_cut = self._is_cut or not self.lineage.has(ordinal) or self.lineage.known(ordinal).call.engine != "source"
        self.backend.observed(Observation(ordinal, site, why, self.step, lag))
        try:
            return self.backend.value(ordinal)
        except M2FlowError:
            self.unused.interrupted()
            self.raised.add(ordinal)
            raise

    @property
    def _goes_on(self) -> bool:
        """Whether the flow has not ended, this is its thread, and no error ends the run."""
        return self.is_open and self._end is None and threading.get_ident() == self.thread

    def _refuse(self, what: str) -> NoReturn:
        """Raise TraceError if the flow has ended or this is not its thread, else the error that ends the run."""
        if not self.is_open:
            now = "Return or log the value inside the flow."
            raise TraceError(f"{what} was used after its flow had ended", where=user_site().describe(), now=now)
        if threading.get_ident() != self.thread:
            raise _in_another_thread(what, self)
        assert self._end is not None
        raise self._end

    def held(self, call: Call, *, has_past: bool) -> None:
        """The program has a handle of a call. With `has_past`, note the call's place in the program, for `lagged`."""
        self._live.add(call.ordinal)
        if has_past and call.step >= 0:
            there = self._history.setdefault(_place(call), {})
            there.setdefault(call.step, []).append(call.ordinal)
            while (first := next(iter(there))) < call.step - MOST_LAG:
                del there[first]

    def released(self, ordinal: int) -> None:
        """The program has no handle of a call any more. May be called at any moment, by the garbage collector."""
        self._live.discard(ordinal)
        self.unused.dropped(ordinal)
        self.backend.release(ordinal)

    def recall(self, call: Call, steps_ago: int) -> int | None:
        """Find the call at the same place in an earlier step; of several that a loop made there, the one with the same index.

        Raises:
            TraceError: that step is too long ago.
        """
        step = call.step - steps_ago
        if call.step < 0 or step < 0:
            return None
        if step < self._next_step - 1 - MOST_LAG:
            raise TraceError(
                f"lagged({steps_ago}) of a result of step {call.step} asks for step {step}, and this is step {self._next_step - 1}",
                where=user_site().describe(),
                now=f"A run keeps the numbers of the last {MOST_LAG} steps. Keep older ones yourself: metrics.items().",
            )
        history = self._history[_place(call)]
        count, then = history[call.step].index(call.ordinal), history.get(step, [])
        return then[count] if count < len(then) else None

    def _forget(self, needed: Iterable[int]) -> None:
        """Drop calls that nothing can refer to any more."""
        inputs = [ref.call for source in self._late_sources.values() for _, ref in source.inputs]
        self.lineage.keep({*self._live, *needed, *inputs, *(source.ordinal for source in self._late_sources.values())})
        self._num_kept = len(self.lineage)
        self._num_generations = {key: count for key, count in self._num_generations.items() if self.lineage.makes(key[1])}

    def origins(self, ordinal: int) -> list[Call]:
        """The calls that made the samples of a call's rows: several for a union."""
        return self.lineage.makers(ordinal)

    def iterate(self, count: int) -> Iterator[int]:
        """Iterate over the steps of the flow's outermost iterator. An inner one is plain iteration: its calls belong to the outer step."""
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_COUNTED:
            what = f"steps({count!r:.60}): the number of steps is a whole number, from 0 to {MOST_COUNTED:,}"
            raise TraceError(what, where=user_site().describe())
        if self._in_steps:
            yield from range(count)
            return
        self._end_left_step()
        self._in_steps = True
        self._versions_before = dict(self._versions)
        self._late_sources, self.deferred = {}, {}
        self.num_steps += count
        try:
            for index in range(count if self.max_steps is None else min(count, self.max_steps)):
                self.step, self._next_step = self._next_step, self._next_step + 1
                self._left_step = self.step
                self.loop = index, count
                yield index
                self._end_step()
        finally:
            self._in_steps = False
            self.loop = None
            self.step = -1

    @property
    def why_early(self) -> str:
        """Why the flow took fewer steps than its loops ask for; empty if it took them all."""
        if self._next_step >= self.num_steps:
            return ""
        step, why = self.patience_end
        return why if why and step == self._next_step - 1 else "the flow left its loop"

    def finish(self) -> None:
        """End the program: wait for all calls."""
        self._end_left_step()
        self.backend.finish()
        self._warn()

    def _warn(self) -> None:
        if not self.backend.is_rehearsal:
            self.unused.warn()
            self._captures.warn()

    def _end_left_step(self) -> None:
        """End the step that `break` or `return` left, at what comes next: the loop itself could not raise then."""
        if not self._in_steps:
            self._end_step()

    def _end_step(self) -> None:
        if self._left_step is not None:
            step, self._left_step = self._left_step, None
            try:
                self.backend.end_step(step)
            except M2FlowError as error:
                self._end = error
                raise
            self._warn()


def current_session(what: str) -> Session:
    """Return the session that is recording; outside a flow raise an error that says so."""
    session = _current.get()
    if session is None and (elsewhere := [one for one in _recording if one.thread != threading.get_ident()]):
        raise _in_another_thread(what, elsewhere[-1])
    if session is None:
        raise TraceError(
            f"{what} was used outside a running flow",
            where=user_site().describe(),
            now="Put it into a function decorated with @flow and start that with `m2flow run FILE`, or m2flow.run(flow) in Python.",
        )
    return session


def _in_another_thread(what: str, session: Session) -> TraceError:
    return TraceError(
        f"{what} was used in the thread {threading.current_thread().name!r}, and the flow {session.flow} runs in another",
        where=user_site().describe(),
        now="The calls of a flow have one order: make them, and look at what they give, in the thread that runs the flow. "
        "What takes long belongs into a Reward or an op: workers run those beside it.",
    )


@contextlib.contextmanager
def recording(session: Session) -> Iterator[Session]:
    """Make a session the current one; close it at the end."""
    forget_sites()
    token = _current.set(session)
    _recording.append(session)
    try:
        with infrequent_gc():
            yield session
    except KeyboardInterrupt as stop:
        raise interrupted(stop) from stop
    except FlowError as error:
        # Do not blame a worker's or an engine's failure on the line that happened to wait.
        site = raised_at(error) if isinstance(error, FlowError) else None
        raise error if site is None else error.located(site.describe()) from error.__cause__
    except (Exception, SystemExit) as error:
        recursion = infinite_recursion(error) if isinstance(error, RecursionError) else None
        if recursion is not None:
            raise recursion from None
        site = raised_at(error)
        if site is None or not is_of_user(error):
            raise
        raise FlowError(f"the flow raised {described(error)}", where=site.describe(), now=_instead(error)) from error
    finally:
        session.is_open = False
        _recording.remove(session)
        _current.reset(token)


_MAX_NEW_TOKENS, _N, _LR = "It is max_new_tokens=.", "It is n=.", "It is lr=."
_MAX_PROMPT_TOKENS = "It is Dataset(rows, policy=, max_prompt_tokens=); of rows from files dataset.within(policy, max_prompt_tokens=512)."
_ELSEWHERE = {
    "best_of": 'Write n=8, and keep the best: responses.select(rewards == rewards.max(over="group")).',
    "beta": "A KL penalty is ppo_clip(kl_coef=0.04), with update(..., reference=Reference(...)).",
    "do_sample": "temperature=0 is greedy.",
    "enable_thinking": 'Write chat_template_kwargs={"enable_thinking": False}.',
    "epsilon": "It is eps_low= and eps_high=.",
    "frequency_penalty": "There are repetition_penalty= and logit_bias=.",
    "learning_rate": _LR,
    "max_completion_length": _MAX_NEW_TOKENS,
    "max_completion_tokens": _MAX_NEW_TOKENS,
    "max_prompt_length": _MAX_PROMPT_TOKENS,
    "max_prompt_tokens": _MAX_PROMPT_TOKENS,
    "max_tokens": _MAX_NEW_TOKENS,
    "num_beams": "There is no beam search: its responses are no samples of the policy. temperature=0 is greedy.",
    "num_generations": _N,
    "num_return_sequences": _N,
    "presence_penalty": "There are repetition_penalty= and logit_bias=.",
    "stream": "Files are read as they are drawn: Dataset.jsonl(path, stream=True); so with csv, parquet and hf.",
    "streaming": "Files are read as they are drawn: Dataset.jsonl(path, stream=True); so with csv, parquet and hf.",
    "too_long": _MAX_PROMPT_TOKENS,
}
"""Options of other libraries -> what to write here."""


def instead_of(option: str, function: Callable[..., object], topic: str) -> str:
    """What to write for an option that a function lacks, which `m2flow help TOPIC` explains."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return _ELSEWHERE.get(option) or did_you_mean(option, names, f"It has {', '.join(names)}; m2flow help {topic} explains them.")


_HANDLE = (
    "It is a handle and no tensor: arithmetic and rewards.mean() calculate with it, the function of an op() gets its values, "
    "and list(rewards) waits for them."
)
_REDUCED = "Reduce it first: rewards.mean(), rewards.max()."
_DRAWN = "Rows are drawn: dataset.take(32), dataset.all(), or for prompts in dataset.batches(8)."
_EXPORTED = "A run keeps its trained model: m2flow export RUN --out my-model, or run.policy() in Python."
_HELD = (
    "Workers hold the model. A loss under @loss() gets its log-probabilities; after the run m2flow export RUN, or run.policy() in "
    "Python, gives it."
)
_TENSORS = ("cpu", "cuda", "detach", "device", "dtype", "float", "item", "numpy", "shape", "size", "to", "tolist")
_MEMBERS = {
    "Number": dict.fromkeys(_TENSORS, "It is float(number), which waits; arithmetic and log() do not."),
    "Rows": dict.fromkeys(_TENSORS, _HANDLE),
    "Policy": {
        **dict.fromkeys(("push_to_hub", "save", "save_model", "save_pretrained"), _EXPORTED),
        **dict.fromkeys(("device", "eval", "forward", "model", "module", "parameters", "state_dict", "to", "tokenizer", "weights"), _HELD),
        **dict.fromkeys(("backward", "fit", "learn", "step", "train", "train_step"), "It is policy.update(responses, rewards)."),
    },
}
"""What other libraries' objects have, by the class of m2flow's -> what to write here."""
OF_FLOWS = (
    "Critic",
    "Dataset",
    "EpisodeRows",
    "Metrics",
    "Number",
    "Policy",
    "Reference",
    "Reward",
    "RewardModel",
    "Role",
    "Rows",
    "Sample",
    "Scores",
)
"""Public classes whose objects the code of a flow has."""
_USES = (
    (r"'Reward' object is not callable", "It is verifier.score(responses)."),
    (r"'Policy' object is not callable", "It is policy.generate(dataset.take(32), n=8, max_new_tokens=64)."),
    (r"'Dataset' object is not (iterable|subscriptable|an iterator)", _DRAWN),
    (
        r"Reducible\.\w+\(\) got an unexpected keyword argument '(axis|dim|keepdim)'",
        'It is over: rewards.mean(over="group"), or "sample" of tokens.',
    ),
    (r"unsupported format string passed to (Rows|Scores)\.__format__", _REDUCED),
    (r"unsupported format string passed to Metrics\.__format__", 'Say which: metrics["loss"].'),
    (r".*(must be Tensor, not |of object type '|from ')(Rows|Scores|Metrics|Number)\b", _HANDLE),
    (r"log\(\) takes 0 positional arguments", "Numbers are logged by name: log(accuracy=rewards.mean())."),
)
"""What Python says of a use that an object of m2flow's has not -> what to write here."""


def instead_of_member(kind: str, name: str) -> str:
    """What to write for what an object of another library has under a name; empty if nobody has looked for it."""
    return _MEMBERS.get(kind, {}).get(name, "")


def once_each(role: str) -> str:
    """What to do about two roles of one name."""
    return f"Make a role once, before the loop. Of two, name one: name='{role}_2'."


def _instead(error: BaseException) -> str:
    """What to write for an exit, or for an option or a member that m2flow's function or object lacks; empty if it is another error."""
    if isinstance(error, SystemExit):
        return "To end a run early, leave the loop or return: then its model is saved, and its summary shown."
    if isinstance(error, AttributeError):
        return _instead_of_member(error)
    if not isinstance(error, TypeError | ValueError):
        return ""
    known = next((now for said, now in _USES if re.match(said, str(error))), "")
    found = re.match(r"(?:(\w+)\.)?(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if known or found is None:
        return known
    of, name, option = found.groups()
    # They import this one.
    modules = map(importlib.import_module, ("m2flow.macro.roles", "m2flow.macro.datasets", "m2flow.macro.loss_declarations"))
    named = next((getattr(module, of or name) for module in modules if hasattr(module, of or name)), None)
    function = getattr(named, name, None) if of else named
    if function is None:
        return ""
    return instead_of(option, function, (of or name) if not of or name == "__init__" else f"{of}.{name}")


def _instead_of_member(error: AttributeError) -> str:
    own = (one for one in type(error.obj).__mro__ if one.__module__.startswith("m2flow."))
    kind = next((one for one in own if one.__name__ in OF_FLOWS), None)
    if kind is None or error.name is None:
        return ""
    otherwise = f"m2flow help {kind.__name__} lists what it has."
    if kind.__name__ == "Metrics":
        otherwise = f"A metric is metrics[{error.name!r}]."
    members = [name for name in dir(kind) if not name.startswith("_")]
    return instead_of_member(kind.__name__, error.name) or did_you_mean(error.name, members, otherwise)


def _place(call: Call) -> tuple[object, ...]:
    """The place of a call in the program: its line, and the lines that led there."""
    return call.name, call.site.file, call.site.line, call.site.path
