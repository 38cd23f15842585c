"""Hold results and errors of calls until the flow waits for them: filled by the controller's thread, read by the flow's.

Calls end in any order, but errors are raised in program order (`FirstError`). The error of a failed call is certain once every call
before it in the program has ended: a call that depends on several failed calls takes the error of the earliest, and of all errors that
are due the earliest is raised. So a later failure that arrives first hides nothing. Which errors are due, because the program was not
raised them yet, is `m2flow.macro.eager`'. `FirstError` is pure; calls are added in program order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from m2flow.errors import InternalError, M2FlowError, WorkerError
from m2flow.macro.eager import Failures, number_of
from m2flow.macro.graph import Call
from m2flow.macro.session import CallValues
from m2flow.samples import Batch


class FirstError:
    """Track calls under way and errors of failed ones, to find the earliest error in program order that is due and certain."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        """Calls that have not ended, in program order."""
        self._failures = Failures()
        self._open_effects: dict[int, None] = {}
        """Those of them that have an effect, such as updates."""
        self._num_added = 0
        self._num_ended_steps = 0

    def added(self, call: Call) -> None:
        self._open[call.ordinal] = None
        if call.writes:
            self._open_effects[call.ordinal] = None
        self._num_added = call.ordinal + 1

    def done(self, ordinal: int) -> None:
        self._open.pop(ordinal, None)
        self._open_effects.pop(ordinal, None)

    def has_ended(self, ordinal: int) -> bool:
        return ordinal not in self._open

    def failed(self, call: Call, root: int, error: M2FlowError) -> None:
        """Note that a call failed because of the call `root`. May be called again with an earlier root."""
        self.done(call.ordinal)
        self._failures.failed(call, root, error)

    def raised(self, ordinal: int) -> None:
        """Note that the program is raised the error of this call: if it goes on, it has handled it."""
        self._failures.raised(ordinal, self._num_ended_steps, self._num_added)

    def step_ended(self) -> None:
        """Make the errors of all calls so far due: they are raised before anything that the program does next."""
        self._num_ended_steps = self._num_added

    @property
    def num_added(self) -> int:
        """Calls of the program so far."""
        return self._num_added

    @property
    def num_ended(self) -> int:
        """Calls of the program up to the last step that has ended."""
        return self._num_ended_steps

    @property
    def open_effects(self) -> tuple[int, ...]:
        """Calls under way that have an effect."""
        return tuple(self._open_effects)

    def are_effects_over(self, num_calls: int) -> bool:
        """Whether those of the first so many calls that have an effect are over."""
        return next(iter(self._open_effects), num_calls) >= num_calls

    def has_lost_effect(self, num_calls: int) -> bool:
        """Whether one of the first so many calls has failed that has an effect."""
        return self._failures.has_lost_effect(num_calls)

    def has_failed_at(self, ordinal: int) -> bool:
        return ordinal in self._failures

    def has_failed_before(self, num_calls: int) -> bool:
        """Whether one of the first `num_calls` calls has failed without its error having been raised to the program."""
        return self._failures.is_due_before(num_calls)

    def are_well(self, num_calls: int) -> bool:
        """Whether the first so many calls of the program are over, and none of their errors is due."""
        return self._are_over(num_calls) and not self.has_failed_before(num_calls)

    @property
    def num_well(self) -> int:
        """How many calls, from the program's first, are over, and none of their errors is due."""
        due = self._failures.first_due
        return min([next(iter(self._open), self._num_added), *([] if due is None else [due])])

    @property
    def has_failed(self) -> bool:
        """Whether an error is due."""
        return self._failures.first_due is not None

    @property
    def first(self) -> M2FlowError | None:
        """The earliest error that is due, if it is certain by now which that is."""
        due = self._failures.first_due
        return self._failures.error_due(due) if due is not None and self._are_over(due) else None

    def of(self, ordinal: int) -> M2FlowError | None:
        """Return the error that reading a failed call's result raises, if it is certain by now."""
        if ordinal not in self._failures:
            return None
        root, error = self._failures.of(ordinal)
        return error if self._are_over(root) else None

    @property
    def is_due_known(self) -> bool:
        """Whether every call of the steps that have ended is over, or the error that is due is certain."""
        return self.first is not None or self._are_over(self._num_ended_steps)

    @property
    def due(self) -> M2FlowError | None:
        """The earliest error of the steps that have ended."""
        return self.first if self._failures.is_due_before(self._num_ended_steps) else None

    def _are_over(self, num_calls: int) -> bool:
        return next(iter(self._open), num_calls) >= num_calls


class CallFutures:
    """Values and errors of calls, and the progress of steps. Every method may be called from both threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._awaited: list[Callable[[], bool]] = []
        """Conditions that threads wait for. They are woken when one is met, not at each change, since each wake takes the interpreter's
        lock."""
        self._values: CallValues[object] = CallValues()
        self._rows: dict[int, Batch] = {}
        self._first_error = FirstError()
        self._num_open: dict[int, int] = {}
        self._end: M2FlowError | None = None
        self._is_ready = False
        self._is_wound_down = False
        self._saved: Mapping[str, str] | None = None

    # Filled by the controller's thread, except `submitted`.

    def submitted(self, call: Call) -> None:
        """Note that a call is under way; its step is not over before it is."""
        with self._changed:
            self._first_error.added(call)
            self._num_open[call.step] = self._num_open.get(call.step, 0) + 1

    def resolve(self, call: Call, value: object) -> None:
        with self._changed:
            self._values[call.ordinal] = value
            self._first_error.done(call.ordinal)
            self._close(call)
            self._tell()

    def reject(self, call: Call, error: M2FlowError, root: int) -> None:
        """Note that a call failed because of the call `root`. May be called again with an earlier root."""
        with self._changed:
            if not self._first_error.has_ended(call.ordinal):
                self._close(call)
            self._first_error.failed(call, root, error)
            self._tell()

    def deliver(self, ordinal: int, rows: Batch) -> None:
        """Give the rows of a call that the program waits for."""
        with self._changed:
            self._rows[ordinal] = rows
            self._tell()

    def forget(self, call: Call) -> None:
        """Drop what the program can't ask for any more. Single values are kept for some steps, since `lagged` may ask for them."""
        with self._changed:
            self._rows.pop(call.ordinal, None)
            if call.is_aligned:
                self._values.forget(call.ordinal)
            else:
                self._values.let_go(call.ordinal, call.step)

    def end(self, error: M2FlowError) -> None:
        """End all waits with this error: the run can't go on."""
        with self._changed:
            self._end = self._end or error
            self._tell()

    def wound_down(self) -> None:
        """Note that no call is under way any more, and none will come."""
        with self._changed:
            self._is_wound_down = True
            self._tell()

    def ready(self) -> None:
        with self._changed:
            self._is_ready = True
            self._tell()

    def saved(self, digests: Mapping[str, str]) -> None:
        with self._changed:
            self._saved = dict(digests)
            self._tell()

    # Read.

    def is_resolved(self, ordinal: int) -> bool:
        with self._changed:
            return ordinal in self._values

    def has_failed(self, ordinal: int) -> bool:
        with self._changed:
            return self._first_error.has_failed_at(ordinal)

    def has_ended(self, ordinal: int) -> bool:
        with self._changed:
            return self._first_error.has_ended(ordinal)

    def are_well(self, num_calls: int) -> bool:
        """Whether the first so many calls of the program are over, and none of their errors is due."""
        with self._changed:
            return self._first_error.are_well(num_calls)

    @property
    def num_well(self) -> int:
        """How many calls, from the program's first, are over, and none of their errors is due."""
        with self._changed:
            return self._first_error.num_well

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until a condition holds that the controller's thread brings about."""
        self._wait(is_met)

    def are_effects_over(self, num_calls: int) -> bool:
        """Whether those of the first so many calls that have an effect are over."""
        with self._changed:
            return self._first_error.are_effects_over(num_calls)

    def has_lost_effect(self, num_calls: int) -> bool:
        """Whether one of the first so many calls has failed that has an effect."""
        with self._changed:
            return self._first_error.has_lost_effect(num_calls)

    @property
    def open_effects(self) -> tuple[int, ...]:
        """Calls under way that have an effect."""
        with self._changed:
            return self._first_error.open_effects

    @property
    def num_added(self) -> int:
        """Calls of the program so far."""
        with self._changed:
            return self._first_error.num_added

    @property
    def num_ended(self) -> int:
        """Calls of the program up to the last step that has ended."""
        with self._changed:
            return self._first_error.num_ended

    def number(self, ordinal: int, name: str | None) -> float:
        with self._changed:
            return number_of(self._values[ordinal], name)

    def wait_ready(self, timeout_s: float) -> None:
        if not self._wait(lambda: self._is_ready, timeout_s):
            raise WorkerError(f"the workers did not come up in {timeout_s:.0f} s", now="See the logs in the run directory.")

    def wait_wound_down(self) -> None:
        """Wait until the run has finished the updates under way."""
        self._wait(lambda: self._is_wound_down)

    def wait_value(self, ordinal: int) -> object:
        """Wait for the value of a call; None for one with rows. Raises its error once that is certain, which then is not due any more."""
        self._wait(lambda: ordinal in self._values or self._first_error.of(ordinal) is not None)
        with self._changed:
            error = self._first_error.of(ordinal)
            if error is not None:
                self._first_error.raised(ordinal)
                raise error
            return self._values[ordinal]

    def wait_rows(self, ordinal: int) -> Batch:
        self._wait(lambda: ordinal in self._rows)
        with self._changed:
            return self._rows[ordinal]

    def wait_step(self, step: int) -> None:
        """Wait until every call up to this step is over. Raises the earliest error that is due, once no earlier call can still fail."""

        def is_met() -> bool:
            return self._first_error.first is not None if self._first_error.has_failed else not any(s <= step for s in self._num_open)

        self._wait(is_met)
        self.raise_first()

    def step_ended(self) -> None:
        """Make the errors of all calls so far due."""
        with self._changed:
            self._first_error.step_ended()

    def wait_due(self) -> None:
        """Wait, when the program itself has raised, for an error that sequential execution would have raised before it; raise that."""
        self._wait(lambda: self._first_error.is_due_known or self._end is not None)
        with self._changed:
            if self._first_error.due is not None:
                raise self._first_error.due

    def wait_ended(self, calls: Iterable[tuple[int, int]]) -> None:
        """Wait until these calls are over, each given with the number of calls of the steps that had ended before it. A call is not
        waited for if one of those has failed."""
        waiting = list(calls)

        def is_met() -> bool:
            waiting[:] = [
                (ordinal, before)
                for ordinal, before in waiting
                if not self._first_error.has_ended(ordinal) and not self._first_error.has_failed_before(before)
            ]
            return not waiting or self._end is not None

        self._wait(is_met)

    def wait_all(self) -> None:
        """Wait until every call is over. Raises the earliest error that is due."""
        self._wait(lambda: not self._num_open)
        self.raise_first()

    def wait_saved(self) -> Mapping[str, str]:
        self._wait(lambda: self._saved is not None)
        if self._saved is None:
            raise InternalError("nothing was saved")
        return self._saved

    def raise_first(self) -> None:
        """Raise the earliest error in program order that was not raised to the program yet, if there is one."""
        with self._changed:
            if self._first_error.first is not None:
                raise self._first_error.first

    def _close(self, call: Call) -> None:
        self._num_open[call.step] -= 1
        if not self._num_open[call.step]:
            del self._num_open[call.step]

    def _wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds, in slices so that Ctrl-C reaches the flow's thread. False: timed out. Raises if the run has
        ended."""
        with self._changed:
            left_s = timeout_s
            self._awaited.append(is_met)
            try:
                while not is_met():
                    if self._end is not None:
                        raise self._end
                    if left_s is not None and left_s <= 0:
                        return False
                    self._changed.wait(0.2)
                    left_s = None if left_s is None else left_s - 0.2
                return True
            finally:
                self._awaited.remove(is_met)

    def _tell(self) -> None:
        """Wake waiting threads if one of their conditions is met."""
        if self._end is not None or any(is_met() for is_met in self._awaited):
            self._changed.notify_all()
