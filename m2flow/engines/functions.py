"""Users' Python functions as an engine: rewards and ops, plain or async, one call a unit, with a time limit.

    sample -> function(Sample)      group, mini-batch, batch -> function(list[Sample])

Units run on daemon threads, which take one after the other: a function that hangs is abandoned on its thread, and neither the next
unit nor the end of the process waits for it. (A ThreadPoolExecutor joins its threads at exit.) Limit: an abandoned thread lives on,
and keeps what it holds; threads share the interpreter lock, so `concurrency` helps functions that wait, not functions that compute.
A unit that takes longer than `patience_s` does not keep others from beginning beside it, unless they have to run in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from m2flow.engines.contract import Capabilities, EngineSettings, FunctionEngine, OnDone, unit_bounds
from m2flow.errors import EngineError, M2FlowError, OpError
from m2flow.samples import Batch, Sample, SampleId

PATIENCE_S = 1.0
"""Whoever takes longer waits for something, or hangs."""
_BEGINS_S = 0.01
"""What may be done meanwhile waits no longer for a thread to begin."""
_LOOKS_AFTER_S = 0.001
"""From what is done meanwhile to its second time; each time it takes twice as long to the next."""
_MOST_SLOW = 16
"""Slow units at once, each of which keeps a thread."""
_MOST_OF_A_RECURSION = 12
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class _Unit:
    position: int
    label: str
    row: int
    """Its first sample; -1 if it has none."""
    argument: Sample | list[Sample]


@dataclass(frozen=True)
class _Outcome:
    position: int
    result: object = None
    error: BaseException | None = None


@final
class PythonFunctions(FunctionEngine):
    """Runs up to `options["concurrency"]` units at once (default 1), and some that take longer than `options["patience_s"]` beside them."""

    name = "python"
    capabilities = Capabilities(kind="function")

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._idle: list[_Hand] = []

    def start(self) -> None:
        concurrency = self._settings.options.get("concurrency", 1)
        if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
            raise EngineError(f"concurrency is {concurrency!r}; it must be a positive integer")
        patience_s = self._settings.options.get("patience_s", PATIENCE_S)
        if not isinstance(patience_s, int | float) or not patience_s > 0:
            raise EngineError(f"patience_s is {patience_s!r}; it must be a positive number of seconds")

    def stop(self) -> None:
        for hand in self._idle:
            hand.dismiss()
        self._idle.clear()

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
    ) -> Sequence[object]:
        units = _units(batch.in_order().frozen(), granularity, size)
        concurrency = 1 if in_turn else int(str(self._settings.options.get("concurrency", 1)))
        patience_s = float("inf") if in_turn else float(str(self._settings.options.get("patience_s", PATIENCE_S)))
        outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        results: list[object] = [None] * len(units)
        deadlines: dict[int, float] = {}
        patience: dict[int, float] = {}
        """Unit that runs -> when it will have taken so long that the next may begin beside it."""
        hands: dict[int, _Hand] = {}
        num_started, num_done = 0, 0
        looks_at, look_s = (0.0, _LOOKS_AFTER_S) if meanwhile is not None else (float("inf"), 0.0)
        failures: dict[int, OpError] = {}
        while num_done < len(units):
            # After a failure only what already runs is waited for: the earliest sample's error is the one to report.
            while num_started < len(units) and _has_room(patience, concurrency) and not failures:
                unit, now = units[num_started], time.monotonic()
                deadlines[unit.position] = now + timeout_s if timeout_s is not None else float("inf")
                patience[unit.position] = now + patience_s
                hands[unit.position] = self._idle.pop() if self._idle else _Hand()
                hands[unit.position].run(function, unit, outcomes, begun)
                num_started += 1
            if not deadlines:
                break
            if meanwhile is not None and looks_at == 0.0:
                # Else this thread would go on holding the interpreter lock, and the unit begin when it is done.
                with contextlib.suppress(queue.Empty):
                    begun.get(timeout=_BEGINS_S)
            if meanwhile is not None and looks_at <= (now := time.monotonic()):
                meanwhile()
                looks_at, look_s = now + look_s, 2 * look_s
            deadline = min(deadlines.values())
            losing = _next_slow(patience) if num_started < len(units) and not failures else float("inf")
            outcome = _next_outcome(outcomes, min(deadline, losing, looks_at))
            if outcome is None and min(losing, looks_at) < deadline:
                continue
            if outcome is None:
                late = min(deadlines, key=lambda position: (deadlines[position], position))
                del deadlines[late], patience[late]
                hands.pop(late).dismiss()
                failures[late] = _too_slow(function, units[late], timeout_s)
            elif outcome.position in deadlines:
                del deadlines[outcome.position], patience[outcome.position]
                self._idle.append(hands.pop(outcome.position))
                if outcome.error is None:
                    results[outcome.position] = outcome.result
                    if on_done is not None and not failures:
                        on_done(outcome.position, outcome.result)
                else:
                    failures[outcome.position] = _failure(function, units[outcome.position], outcome.error)
            else:
                continue  # it was abandoned, and came after all
            num_done += 1
        if failures:
            first = min(failures)
            raise failures[first].about(units[first].row)
        return results


def _has_room(patience: Mapping[int, float], concurrency: int) -> bool:
    """Whether another unit may begin: slow ones do not count, up to a number."""
    now = time.monotonic()
    num_slow = sum(until <= now for until in patience.values())
    return len(patience) - min(num_slow, _MOST_SLOW) < concurrency


def _next_slow(patience: Mapping[int, float]) -> float:
    """When the next of those that run will count as slow."""
    now = time.monotonic()
    return min((until for until in patience.values() if until > now), default=float("inf"))


class _Hand:
    """A thread that runs units, until it is dismissed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="m2flow-function", daemon=True)
        self._thread.start()

    def run(
        self, function: Callable[..., object], unit: _Unit, outcomes: queue.SimpleQueue[_Outcome], begun: queue.SimpleQueue[None]
    ) -> None:
        self._thread.name = f"m2flow-{unit.label}"
        # A context of its own: what a function sets in one must not be there for the next unit, which may be run elsewhere.
        self._work.put(lambda: contextvars.Context().run(_run, function, unit, outcomes, begun))

    def dismiss(self) -> None:
        """End, when the unit in hand ends, if it does."""
        self._work.put(None)

    def _serve(self) -> None:
        process = os.getpid()
        while (work := self._work.get()) is not None:
            work()
            if os.getpid() != process:
                os._exit(0)  # The function has forked, and this is the child: nobody will give it work.


def _units(batch: Batch, granularity: str, size: int | None) -> list[_Unit]:
    samples, ids = list(batch.rows()), batch.ids.tolist()
    names = [str(SampleId.unpack(packed)) for packed in ids]
    if granularity == "sample":
        return [_Unit(i, f"sample {name}", ids[i], samples[i]) for i, name in enumerate(names)]
    bounds = unit_bounds(batch, granularity, size)
    return [
        _Unit(i, _span(granularity, names[start:end]), ids[start] if start < end else -1, samples[start:end])
        for i, (start, end) in enumerate(bounds)
    ]


def _span(granularity: str, names: list[str]) -> str:
    return f"{granularity} {names[0]} to {names[-1]}" if names else f"the empty {granularity}"


def _run(function: Callable[..., Any], unit: _Unit, outcomes: queue.SimpleQueue[_Outcome], begun: queue.SimpleQueue[None]) -> None:
    begun.put(None)
    try:
        result = function(unit.argument)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        outcomes.put(_Outcome(unit.position, result))
    except BaseException as error:
        # SystemExit too: sys.exit() in a reward would else look like a hang.
        outcomes.put(_Outcome(unit.position, error=error))


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


def _failure(function: Callable[..., Any], unit: _Unit, error: BaseException) -> OpError:
    if isinstance(error, OpError) and error.row >= 0:
        return error  # It is about what the function returned.
    # Lines of ours above the user's frames say nothing to the user.
    frames = _frames_after(error.__traceback__)
    # A recursion without end has a thousand frames, of which the last say what goes round.
    limit = -_MOST_OF_A_RECURSION if isinstance(error, RecursionError) else None
    remote = "".join(traceback.format_exception(type(error), error, frames, limit=limit))
    what = f"{_name(function)} raised {type(error).__name__} on {unit.label}"
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


def _too_slow(function: Callable[..., Any], unit: _Unit, timeout_s: float | None) -> OpError:
    return OpError(
        f"{_name(function)} took longer than {timeout_s:g} s on {unit.label}",
        now="Its thread was abandoned. Raise timeout_s if the work is worth it, or bound the work inside the function.",
    )


def _name(function: Callable[..., Any]) -> str:
    return f"the function {getattr(function, '__qualname__', None) or type(function).__name__}".replace("<locals>.", "")
