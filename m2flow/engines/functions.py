"""Run users' Python functions (rewards and ops, plain or async), one call a unit, with a time limit.

    sample -> function(Sample)      group, mini-batch, batch -> function(list[Sample])

A unit runs in one of three ways, which give the same results:

- A plain function runs on one of some daemon threads, each of which takes one unit after the other. One that hangs is abandoned on its
  thread, and neither the next unit nor the end of the process waits for it. (A ThreadPoolExecutor joins its threads at exit.) Limits: an
  abandoned thread lives on and keeps its memory; threads share the interpreter lock, so `concurrency` helps functions that wait, not
  functions that compute; and a function that holds the lock stops this process, time limits included.
- The result of an async function is awaited on one event loop, which lives as long as the engine, so that clients bound to a loop serve
  call after call. One that takes too long is cancelled. Limit: one that blocks the loop blocks all others.
- An isolated function runs on the main thread of a child process, which is killed if it takes too long (`m2flow.engines.process_pool`).
  A function that turns out to need a main thread, as signal handlers do, runs in this way from then on, if it may be isolated.

A thread that has run a unit takes the next one by itself: handing over takes longer than many a reward. Who called the engine reads
the results meanwhile, and keeps the time. In the same way it goes on from the only unit of a call to that of the next one (`Ahead`), of
which the caller hears when it finishes that call.

A unit that takes longer than `patience_s` does not count against `concurrency`, unless units have to run in turn.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import json
import os
import pickle
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

from m2flow.engines.contract import Ahead, EngineSettings, Failure, FunctionEngine, Isolation, OnDone, OnFailure
from m2flow.engines.process_pool import ChildDied, ChildTimedOut, ProcessPool, Task
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, ErrorRecord, M2FlowError, OpError, error_from_record
from m2flow.samples import Batch, Sample, SampleId

PATIENCE_S = 1.0
"""A unit that takes longer waits for something, or hangs."""
_BEGINS_S = 0.01
"""Longest wait for a thread to begin before `meanwhile` is called."""
_LOOKS_AFTER_S = 0.001
"""Time between the first two calls of `meanwhile`; doubled after each."""
_MOST_SLOW = 16
"""Slow units that don't count against the concurrency; each keeps a thread."""
_MOST_OF_A_RECURSION = 12
_CLOSE_S = 5.0
"""Time for cancelled tasks to end; a loop that is blocked longer is abandoned."""
_TURNS_S = 1.0
"""An event loop that takes longer for one iteration is blocked, and is abandoned."""
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class Unit:
    position: int
    label: str
    row: int
    """Its first sample; -1 if it has none."""
    argument: Sample | list[Sample]


class _Outcome(NamedTuple):
    position: int
    result: object = None
    error: BaseException | None = None
    is_last: bool = True
    """Its thread has nothing to do now."""


class _Failed(Exception):
    """How a unit failed in its child."""

    def __init__(self, how: Failure, error: OpError) -> None:
        super().__init__(how)
        self.how = how
        self.error = error


class _NoChild(Exception):
    """No child process could be started for a unit."""

    def __init__(self, why: EngineError) -> None:
        super().__init__(why)
        self.why = why


@final
class PythonFunctions(FunctionEngine):
    """Runs up to `options["concurrency"]` units at once (default 1), and some that take longer than `options["patience_s"]` beside them."""

    name = "python"
    capabilities = built_in("python", "function")

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._idle: list[_WorkerThread] = []
        self._loop = _EventLoop()
        self._pool: ProcessPool | None = None
        self._on_main_thread: set[str] = set()
        """Functions that work on a main thread alone."""

    def start(self) -> None:
        concurrency = self._settings.options.get("concurrency", 1)
        if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
            raise EngineError(f"concurrency is {concurrency!r}; it must be a positive integer")
        patience_s = self._settings.options.get("patience_s", PATIENCE_S)
        if not isinstance(patience_s, int | float) or isinstance(patience_s, bool) or not patience_s > 0:
            raise EngineError(f"patience_s is {patience_s!r}; it must be a positive number of seconds")

    def stop(self) -> None:
        for worker in self._idle:
            worker.dismiss()
        self._idle.clear()
        self._loop.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def call(
        self,
        function: Callable[..., object],
        batch: Batch,
        *,
        granularity: str,
        timeout_s: float | None,
        size: int | None = None,
        in_turn: bool = False,
        on_done: OnDone | None = None,
        meanwhile: Callable[[], None] | None = None,
        isolation: Isolation | None = None,
        on_failure: OnFailure | None = None,
        ahead: Ahead | None = None,
    ) -> Sequence[object]:
        call = self._call_run(
            function, batch, granularity=granularity, timeout_s=timeout_s, size=size, in_turn=in_turn, isolation=isolation
        )
        return call.finish(on_done, meanwhile, on_failure, ahead)

    def _call_run(
        self,
        function: Callable[..., object],
        batch: Batch,
        *,
        granularity: str,
        timeout_s: float | None,
        size: int | None = None,
        in_turn: bool = False,
        isolation: Isolation | None = None,
    ) -> _CallRun:
        concurrency = 1 if in_turn else int(str(self._settings.options.get("concurrency", 1)))
        patience_s = float("inf") if in_turn else float(str(self._settings.options.get("patience_s", PATIENCE_S)))
        here = _InProcess(function, timeout_s, self._loop)
        there = None
        if isolation is not None:
            self._pool = self._pool or ProcessPool(preload=(__name__, *isolation.preload))
            there = _InChildProcess(function, timeout_s, isolation, self._pool)
        round_ = _CallRun(
            units_of(batch.in_order().frozen(), granularity, size),
            here,
            there,
            self._on_main_thread,
            concurrency,
            patience_s,
            self._idle,
            self._call_run,
        )
        round_.is_isolated = isolation is not None and (isolation.is_wanted or _name(function) in self._on_main_thread)
        return round_


@final
class _InProcess:
    """Runs units in this process."""

    def __init__(self, function: Callable[..., object], timeout_s: float | None, loop: _EventLoop) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self._loop = loop

    def give_up(self, worker: _WorkerThread) -> str:
        """Abandon a unit that takes too long; says what became of it."""
        if not worker.abandon():
            return "Its thread was abandoned."
        self._loop.is_doubtful = True
        return "It was cancelled."

    def run(self, unit: Unit, worker: _WorkerThread) -> object:
        result = self.function(unit.argument)
        return self._loop.wait(result, worker) if inspect.isawaitable(result) else result


@final
class _InChildProcess:
    """Runs units in child processes."""

    def __init__(self, function: Callable[..., object], timeout_s: float | None, isolation: Isolation, pool: ProcessPool) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._isolation = isolation
        self._pool = pool

    @functools.cached_property
    def _task(self) -> Task:
        return Task(pickle.dumps(functools.partial(_in_child, self._isolation.function), pickle.HIGHEST_PROTOCOL))

    def run(self, unit: Unit, worker: _WorkerThread) -> object:
        argument = pickle.dumps((unit.label, self._isolation.argument(unit.argument)), pickle.HIGHEST_PROTOCOL)
        try:
            answer = json.loads(self._pool.run(self._task, argument, timeout_s=self._timeout_s))
            if "result" in answer:
                return self._isolation.result(answer["result"])
            error = error_from_record(ErrorRecord(*map(str, answer["error"])))
            assert isinstance(error, OpError)
            raise _Failed("invalid" if answer["row"] >= 0 else "raised", error)
        except ChildTimedOut:
            raise _Failed("timed_out", _too_slow(self._function, unit, self._timeout_s, "Its process was killed.")) from None
        except ChildDied as how:
            raise _Failed("died", _ended_process(self._function, unit, str(how))) from None
        except EngineError as why:
            raise _NoChild(why) from None
        except (ValueError, KeyError, TypeError, AssertionError):  # Somebody else wrote on its socket.
            raise _Failed("died", _ended_process(self._function, unit, "gave an answer that is none")) from None


def _in_child(function: Any, argument: bytes) -> bytes:
    """Run a unit in a child process."""
    label, crossed = pickle.loads(argument)
    try:
        result = function(crossed)
        if inspect.isawaitable(result):
            result = _child_event_loop().run(_awaited(result))
        return json.dumps({"result": result}).encode()
    except BaseException as error:
        failure = error_of(function, label, error)
        record = failure.to_record()
        said = [record.kind, record.what, record.where, record.now, record.remote]
        return json.dumps({"error": said, "row": failure.row}).encode()


@functools.cache
def _child_event_loop() -> asyncio.Runner:
    """The event loop of a child process, for all functions that it runs."""
    return asyncio.Runner()


@final
class _CallRun:
    """One call of the engine: waiting units, running units, and results."""

    def __init__(
        self,
        units: Sequence[Unit],
        here: _InProcess,
        there: _InChildProcess | None,
        on_main_thread: set[str],
        concurrency: int,
        patience_s: float,
        idle: list[_WorkerThread],
        engine_call: Callable[..., _CallRun],
    ) -> None:
        self._units = units
        self._waiting = deque(units)
        self._here = here
        self._there = there
        self._on_main_thread = on_main_thread
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._idle = idle
        self._engine_call = engine_call
        """Makes a call of the same engine."""
        self.is_isolated = False
        """Units that begin from now on run in a child process."""
        self._lock = threading.Lock()
        """Held where units begin and end: worker threads do that, too."""
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._results: list[object] = [None] * len(units)
        self._deadlines: dict[int, float] = {}
        """Unit that has begun, and whose outcome was not read yet -> when it has taken too long. A child keeps its own time."""
        self._patience: dict[int, float] = {}
        """Unit that runs -> when it will have taken so long that the next may begin beside it."""
        self._workers: dict[int, _WorkerThread] = {}
        self._errors: dict[int, OpError] = {}
        self._has_failed = False
        """A unit has failed, and nobody has said that this is no failure of the call."""
        self._ahead: Ahead | None = None

    def finish(
        self, on_done: OnDone | None, meanwhile: Callable[[], None] | None, on_failure: OnFailure | None, ahead: Ahead | None
    ) -> list[object]:
        self._ahead = ahead if len(self._units) == 1 else None
        try:
            return self._run(on_done, meanwhile, on_failure)
        except BaseException:
            self.drop()
            raise

    @property
    def may_begin_ahead(self) -> bool:
        """Whether it has one unit, for a thread of this process."""
        return len(self._units) == 1 and not self.is_isolated

    def begin_on(self, worker: _WorkerThread) -> _Work:
        """Begin the only unit on a thread that has just run another call's."""
        with self._lock:
            unit = self._waiting.popleft()
            self._has_begun(unit, worker, is_timed=True)
        return functools.partial(self._work, self._here, unit, worker)

    def drop(self) -> None:
        """Begin no more units: who called has left. Those that run come to their end, and so do their threads then."""
        with self._lock:
            self._waiting.clear()
            for worker in self._workers.values():
                worker.dismiss()

    def _run(self, on_done: OnDone | None, meanwhile: Callable[[], None] | None, on_failure: OnFailure | None) -> list[object]:
        looks_at, look_s = (0.0, _LOOKS_AFTER_S) if meanwhile is not None else (float("inf"), 0.0)
        while self._waiting or self._deadlines:
            self._begin_units()
            if not self._deadlines:
                break
            if meanwhile is not None and looks_at == 0.0:
                # Else this thread would go on holding the interpreter lock, and the unit begin when it is done.
                with contextlib.suppress(queue.Empty):
                    self._begun.get(timeout=_BEGINS_S)
            if meanwhile is not None and looks_at <= (now := time.monotonic()):
                meanwhile()
                looks_at, look_s = now + look_s, 2 * look_s
            if self._outcomes.empty():
                with self._lock:
                    deadline = min(self._deadlines.values())
                    losing = _next_slow(self._patience) if self._waiting and not self._errors else float("inf")
                outcome = _next_outcome(self._outcomes, min(deadline, losing, looks_at))
                if outcome is None and min(losing, looks_at) < deadline:
                    continue
            else:
                outcome = None if self._is_time_up() else self._outcomes.get()
            failed: _Failed | None
            if outcome is None:
                late = self._abandon()
                if late is None:
                    continue
                unit, failed = late
            elif outcome.position in self._deadlines:
                unit = self._units[outcome.position]
                with self._lock:
                    worker = self._ended(unit)
                if outcome.is_last:
                    self._idle.append(worker)
                if self._is_to_run_again(unit, outcome.error):
                    continue
                failed = None if outcome.error is None else _failure_kind(self._here.function, unit, outcome.error)
            else:
                continue  # It was abandoned, and came after all.
            if failed is not None and on_failure is None:
                self._errors[unit.position] = failed.error
                continue
            result = None if outcome is None else outcome.result
            if failed is not None and on_failure is not None:
                self._has_failed = False
                result = on_failure(unit.argument, failed.how, failed.error)
            self._results[unit.position] = result
            if on_done is not None and not self._errors:
                on_done(unit.position, result)
        if self._errors:
            first = min(self._errors)
            raise self._errors[first].about(self._units[first].row)
        return self._results

    def _begin_units(self) -> None:
        """Begin as many units as may run at once. After a failure none: the earliest sample's error is the one to report."""
        while self._waiting and not self._errors:
            with self._lock:
                if not self._waiting or not _has_room(self._patience, self._concurrency):
                    return
                unit = self._waiting.popleft()
                worker = self._idle.pop() if self._idle else _WorkerThread()
                where = self._there if self.is_isolated and self._there is not None else self._here
                self._has_begun(unit, worker, is_timed=where is self._here)
            worker.run(functools.partial(self._work, where, unit, worker))

    def _has_begun(self, unit: Unit, worker: _WorkerThread, *, is_timed: bool) -> None:
        """Note that a worker runs a unit from now on, within the time limit or one that a child keeps; the lock is held."""
        now, limit_s = time.monotonic(), self._here.timeout_s
        self._deadlines[unit.position] = now + limit_s if is_timed and limit_s is not None else float("inf")
        self._patience[unit.position] = now + self._patience_s
        self._workers[unit.position] = worker

    def _work(self, where: _InProcess | _InChildProcess, unit: Unit, worker: _WorkerThread) -> _Work | None:
        """Run a unit, and then one after the other of those that wait; return the work of the next call, if one follows at once. On the
        worker's thread."""
        process, following = os.getpid(), unit
        self._begun.put(None)
        while True:
            unit = following
            worker.take_name(unit)
            # A context of its own: what a function sets in one must not be there for the next unit, which may be run elsewhere.
            outcome = contextvars.Context().run(_outcome_of, where, unit, worker)
            if os.getpid() != process:
                os._exit(0)  # The function has forked, and this is the child: nobody will give it work.
            with self._lock:
                if not worker.is_abandoned:
                    self._patience.pop(unit.position, None)
                    self._has_failed |= outcome.error is not None
                may_go_on = where is self._here and not (worker.is_abandoned or self._has_failed or self.is_isolated)
                if not may_go_on or not self._waiting or not _has_room(self._patience, self._concurrency):
                    break
                following = self._waiting.popleft()
                self._has_begun(following, worker, is_timed=True)
            self._outcomes.put(outcome._replace(is_last=False))
        following_call = self._begin_ahead(outcome, worker) if may_go_on else None
        self._outcomes.put(outcome._replace(is_last=following_call is None))
        return following_call

    def _begin_ahead(self, outcome: _Outcome, worker: _WorkerThread) -> _Work | None:
        """Begin the call that follows; what the worker's thread is to do for it."""
        ahead = self._ahead
        prepare = ahead.prepare if ahead is not None else None
        if ahead is None or prepare is None:
            return None
        try:
            arguments = prepare(outcome.result)
            following_call = self._engine_call(**arguments) if arguments is not None else None
        except Exception:
            return None  # The caller will prepare it, too, and meet the error where it belongs.
        if following_call is None or not following_call.may_begin_ahead:
            return None
        ahead.finish, ahead.drop = following_call.finish, following_call.drop
        return following_call.begin_on(worker)

    def _ended(self, unit: Unit) -> _WorkerThread:
        """A unit runs no more; its worker thread. The lock is held."""
        del self._deadlines[unit.position]
        self._patience.pop(unit.position, None)
        return self._workers.pop(unit.position)

    def _is_time_up(self) -> bool:
        """Whether the unit that has run longest has taken too long: all have the same time."""
        with self._lock:
            longest = next(iter(self._patience), None)
            return longest is not None and self._deadlines[longest] <= time.monotonic()

    def _abandon(self) -> tuple[Unit, _Failed] | None:
        """Abandon the unit whose time is up; None if it has ended just now."""
        now = time.monotonic()
        with self._lock:
            slow = [position for position in self._patience if self._deadlines[position] <= now]
            if not slow:
                return None
            late = self._units[min(slow, key=lambda position: (self._deadlines[position], position))]
            worker = self._ended(late)
            worker.is_abandoned = self._has_failed = True
        how = self._here.give_up(worker)
        return late, _Failed("timed_out", _too_slow(self._here.function, late, self._here.timeout_s, how))

    def _is_to_run_again(self, unit: Unit, error: BaseException | None) -> bool:
        """Whether a unit failed for want of a main thread; it and all later units then run in a child process."""
        if self._there is None or not _needs_main_thread(error):
            return False
        self._on_main_thread.add(_name(self._here.function))
        self.is_isolated = True
        self._waiting.appendleft(unit)
        return True


def _needs_main_thread(error: BaseException | None) -> bool:
    """Whether an error is Python's refusal to set a signal handler outside the main thread."""
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_room(patience: Mapping[int, float], concurrency: int) -> bool:
    """Whether another unit may begin: slow ones do not count, up to a number."""
    if len(patience) < concurrency:
        return True
    now = time.monotonic()
    num_slow = sum(until <= now for until in patience.values())
    return len(patience) - min(num_slow, _MOST_SLOW) < concurrency


def _next_slow(patience: Mapping[int, float]) -> float:
    """When the next of the running units will count as slow."""
    now = time.monotonic()
    return min((until for until in patience.values() if until > now), default=float("inf"))


_Work = Callable[[], Any]
"""What a thread does; gives what it does next without being told, if there is something."""


class _WorkerThread:
    """A thread that runs units until it is dismissed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.awaited: concurrent.futures.Future[_Outcome] | None = None
        """What it waits for on the event loop."""
        self.is_abandoned = False
        self.lock = threading.Lock()
        """Held where it begins to wait, and where it is abandoned."""
        self._thread = threading.Thread(target=self._serve, name="m2flow-function", daemon=True)
        self._thread.start()

    def run(self, work: _Work) -> None:
        self._work.put(work)

    def take_name(self, unit: Unit) -> None:
        """Be named after what it runs, for whoever looks at the process."""
        self._thread.name = f"m2flow-{unit.label}"

    def dismiss(self) -> None:
        """End, when the running unit ends, if it does."""
        self._work.put(None)

    def abandon(self) -> bool:
        """Dismiss the thread, and cancel what it awaits. Returns whether it awaited something."""
        self.dismiss()
        with self.lock:
            self.is_abandoned, awaited = True, self.awaited
        return awaited is not None and awaited.cancel()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            while work is not None:
                work = work()  # So it holds no samples and no results while it waits for the next.


@final
class _EventLoop:
    """An event loop on a thread of its own, from the first awaitable to `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.is_doubtful = False
        """Something on it took too long, and may block it."""

    def wait(self, awaitable: Awaitable[object], worker: _WorkerThread) -> object:
        """Await in a copy of the caller's context, and return the result. Any thread but the loop's may call it."""
        loop = self._running()
        with worker.lock:
            if worker.is_abandoned:  # Nobody waits for it, or knows that it may block the loop.
                if inspect.iscoroutine(awaitable):
                    awaitable.close()
                raise asyncio.CancelledError
            worker.awaited = asyncio.run_coroutine_threadsafe(_settled(awaitable), loop)
        try:
            outcome = worker.awaited.result()
        finally:
            worker.awaited = None
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def _running(self) -> asyncio.AbstractEventLoop:
        """The running loop. A loop that is blocked is abandoned, and replaced."""
        with self._lock:
            if self._loop is not None and self.is_doubtful and not _is_responsive(self._loop):
                self._loop = self._thread = None
            self.is_doubtful = False
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="m2flow-event-loop", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Cancel what is left on the loop, and close it."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)
        if not thread.is_alive():
            loop.close()


def _is_responsive(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop completes an iteration in time."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    return turned.wait(_TURNS_S)


async def _settled(awaitable: Awaitable[object]) -> _Outcome:
    """Await, and return result or error. An exit raised inside a task would end the loop."""
    try:
        return _Outcome(-1, await awaitable)
    except BaseException as error:
        return _Outcome(-1, error=error)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def units_of(batch: Batch, granularity: str, size: int | None) -> list[Unit]:
    """Return what a function is called on, one after the other; the batch is in order of identity."""
    samples, ids = list(batch.rows()), batch.ids.tolist()
    names = [str(SampleId.unpack(packed)) for packed in ids]
    if granularity == "sample":
        return [Unit(i, f"sample {name}", ids[i], samples[i]) for i, name in enumerate(names)]
    bounds = _unit_bounds(batch, granularity, size)
    return [
        Unit(i, _span(granularity, names[start:end]), ids[start] if start < end else -1, samples[start:end])
        for i, (start, end) in enumerate(bounds)
    ]


def _unit_bounds(batch: Batch, granularity: str, size: int | None = None) -> list[tuple[int, int]]:
    """Row ranges [start, end) of units larger than a sample. The batch must be in order of identity, its mini-batches whole."""
    if granularity == "batch":
        return [(0, len(batch))]
    bounds = batch.group_bounds()
    if granularity == "group":
        return bounds
    if granularity == "minibatch" and size is not None:
        parts = [bounds[i : i + size] for i in range(0, len(bounds), size)]
        return [(part[0][0], part[-1][1]) for part in parts]
    raise EngineError(f"a function's granularity is sample, group, minibatch or batch, not {granularity!r}")


def _span(granularity: str, names: list[str]) -> str:
    return f"{granularity} {names[0]} to {names[-1]}" if names else f"the empty {granularity}"


def _outcome_of(where: _InProcess | _InChildProcess, unit: Unit, worker: _WorkerThread) -> _Outcome:
    try:
        return _Outcome(unit.position, where.run(unit, worker))
    except BaseException as error:
        # SystemExit too: sys.exit() in a reward would else look like a hang.
        return _Outcome(unit.position, error=error)


async def _awaited(awaitable: Any) -> object:
    return await awaitable


def _next_outcome(outcomes: queue.SimpleQueue[_Outcome], deadline: float) -> _Outcome | None:
    """The next outcome, or None if the deadline passes first."""
    if deadline == float("inf"):
        return outcomes.get()
    try:
        return outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return None


def _failure_kind(function: Callable[..., Any], unit: Unit, error: BaseException) -> _Failed:
    """Classify the error that a unit raised."""
    if isinstance(error, _NoChild):
        raise error.why  # Not the function's fault.
    if isinstance(error, _Failed):
        return error
    found = error_of(function, unit.label, error)
    return _Failed("invalid" if found is error else "raised", found)


def error_of(function: Callable[..., Any], label: str, error: BaseException) -> OpError:
    """Return the error that a function's exception on a unit is reported as, with the frames of the user's code."""
    if isinstance(error, OpError) and error.row >= 0:
        return error  # It is about what the function returned.
    # Lines of ours above the user's frames say nothing to the user.
    frames = _frames_after(error.__traceback__)
    # A recursion without end has a thousand frames, of which the last say what goes round.
    limit = -_MOST_OF_A_RECURSION if isinstance(error, RecursionError) else None
    remote = "".join(traceback.format_exception(type(error), error, frames, limit=limit))
    what = f"{_name(function)} raised {type(error).__name__} on {label}"
    if isinstance(error, M2FlowError):
        return OpError(f"{what}: {error.what}", now=error.now, remote=remote)
    try:
        said = str(error)
    except Exception:  # The user's class may fail at this too.
        said = ""
    return OpError(f"{what}: {said}" if said else what, remote=remote)


def _frames_after(frames: TracebackType | None) -> TracebackType | None:
    """From the first frame that is neither of this package nor of the event loop; all of them if there is none."""
    found = frames
    while found is not None and found.tb_frame.f_code.co_filename.startswith((_PACKAGE, *asyncio.__path__)):
        found = found.tb_next
    return found or frames


def _too_slow(function: Callable[..., Any], unit: Unit, timeout_s: float | None, how: str) -> OpError:
    return OpError(
        f"{_name(function)} took longer than {timeout_s:g} s on {unit.label}",
        now=f"{how} Raise timeout_s if the work is worth it, or bound the work inside the function.",
    )


def _ended_process(function: Callable[..., Any], unit: Unit, how: str) -> OpError:
    return OpError(
        f"{_name(function)} did not come back on {unit.label}: its process {how}",
        now="What it printed is in the worker's log. It ran in a process of its own, so nothing else was lost.",
    )


def _name(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__qualname__', None) or type(function).__name__}".replace("<locals>.", "")
