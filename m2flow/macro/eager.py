"""The reference interpreter: execute each call when the program makes it, whole, one after the other.

It is the oracle that every plan is compared with, so it shares nothing with the lowering and is small enough to be read in one sitting.
What a call *means* on given inputs comes from an `Executor`; when to do it is the program's order.

`Failures`, which planned runs use too, tracks which calls have failed, and which of their errors the program has not been raised yet.

    call fails --failed--> due --the program looks, and `value` raises--> raised: the program handles it from then on
                            |
                            +--end of the step, end of the run--> raised there, and the run ends

`try` around a look means what it means in Python: an error that was raised to the program, and that the program survived, is handled. It
covers every call made so far that failed for the same reason; a later call that needs what failed, fails anew. Two errors can't be
handled: one that nobody looked at before its step ended (by then Python may be steps ahead, so where it would be raised depends on the
plan), and one that left a resource without the version that later calls read, such as an update's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from m2flow.errors import M2FlowError, TraceError, unexpected
from m2flow.macro.columns import metric
from m2flow.macro.graph import Call, Observation
from m2flow.macro.session import Backend, CallValues
from m2flow.samples import Batch

# ---- failed calls


@final
class Failures:
    """Failed calls of one run. Pure: the same in eager, where calls end in program order, and under a plan, where they end in any order."""

    def __init__(self) -> None:
        self._failed: dict[int, tuple[int, M2FlowError]] = {}
        """Failed call -> the call that failed by itself, and its error."""
        self._due: dict[int, Call] = {}
        """Failed calls whose error was not raised to the program."""
        self._raised: dict[int, list[range]] = {}
        """Call that failed by itself -> the calls whose error was raised with its own."""
        self._first_lost: int | None = None
        """The earliest failed call with an effect."""

    @property
    def is_empty(self) -> bool:
        """Whether no call has failed so far."""
        return not self._failed

    def __contains__(self, ordinal: object) -> bool:
        return ordinal in self._failed

    def of(self, ordinal: int) -> tuple[int, M2FlowError]:
        """The root cause of a failed call: the call that failed by itself, and its error."""
        return self._failed[ordinal]

    def failed(self, call: Call, root: int, error: M2FlowError) -> None:
        """Record that a call failed because of `root`. An earlier root cause that is found later replaces it."""
        ordinal = call.ordinal
        if ordinal in self._failed and self._failed[ordinal][0] <= root:
            return
        self._failed[ordinal] = root, error
        if call.writes and (self._first_lost is None or ordinal < self._first_lost):
            self._first_lost = ordinal
        if not call.writes and any(ordinal in calls for calls in self._raised.get(root, ())):
            self._due.pop(ordinal, None)
        else:
            self._due[ordinal] = call

    def raised(self, ordinal: int, num_ended: int, num_calls: int) -> None:
        """Record that the error of this call is raised to the program.

        Args:
            num_ended: calls up to the last step that has ended. The errors of those are due for good.
            num_calls: calls that the program has made.
        """
        root, covered = self._failed[ordinal][0], range(num_ended, num_calls)
        self._raised.setdefault(root, []).append(covered)
        handled = [due for due, call in self._due.items() if due in covered and self._failed[due][0] == root and not call.writes]
        for due in handled:
            del self._due[due]

    @property
    def first_due(self) -> int | None:
        """The earliest call whose error the program was not raised."""
        return min(self._due, default=None)

    def is_due_before(self, num_calls: int) -> bool:
        """Whether an error of one of the first so many calls is due."""
        return any(ordinal < num_calls for ordinal in self._due)

    def has_lost_effect(self, num_calls: int) -> bool:
        """Whether one of the first so many calls has failed that has an effect, an update's for instance: nothing is logged after it,
        since calls that follow may depend on it or not, as their staleness has it."""
        return self._first_lost is not None and self._first_lost < num_calls

    def error_due(self, ordinal: int) -> M2FlowError:
        """The due error of a call, as the run ends with it. If the program caught it, it says why that was not enough."""
        (root, error), call = self._failed[ordinal], self._due[ordinal]
        if root not in self._raised:
            return error
        if call.writes:
            what = f"{call.name} ({call.site}) failed with it, and made no {call.writes[0]}, which later calls read"
        else:
            what = f"{call.name} ({call.site}), which was made after it was raised or in another step, needs what failed"
        now = f"If the flow caught this error: {what}. Look at what may fail before such a call is made, and leave the call out then."
        said = type(error)(error.what, where=error.where, now=f"{error.now}\n{now}" if error.now else now, remote=error.remote)
        return said.about(error.row)


# ---- the interpreter


@dataclass(frozen=True)
class Deferred:
    """A call under a refill, which the call that keeps groups executes group by group."""

    call: Call
    inputs: Mapping[str, object]


class Executor(Protocol):
    """Execute one whole call on whole inputs."""

    def check(self, call: Call) -> None:
        """Raises PlanError when the program makes a call of a kind that cannot be executed here."""

    def execute(self, call: Call, inputs: Mapping[str, object]) -> object: ...

    def recall(self, call: Call, inputs: Mapping[str, object], left: Sequence[int]) -> None:
        """Restore a finished generation, which left these samples to the next call of its line."""


class Journal(Protocol):
    """Receive what was executed, to record it."""

    def call_added(self, call: Call) -> None:
        """A call is not executed, since what it needs has failed. The executor reports the others."""

    def call_done(self, call: Call, value: object) -> None: ...

    def call_failed(self, call: Call, error: M2FlowError) -> None: ...

    def logged(self, step: int, name: str, value: float) -> None: ...

    def step_done(self, step: int) -> None: ...


class EagerBackend(Backend):
    """Execute each call as it is made."""

    def __init__(self, executor: Executor, journal: Journal) -> None:
        self._executor = executor
        self._journal = journal
        self._values: CallValues[object] = CallValues()
        self._step = -1
        self._failures = Failures()
        self._num_calls = 0
        self._num_ended = 0
        """Calls up to the last step that has ended."""
        self._writers: dict[str, int] = {}
        """Resource -> the call that wrote it last."""

    def submit(self, call: Call) -> None:
        self._executor.check(call)
        self._step, self._num_calls = call.step, call.ordinal + 1
        failed = self._inherited(call)
        if failed is None:
            try:
                inputs = {name: self._values[ref.call] for name, ref in call.inputs}
                if call.is_gated and not call.drops:
                    self._values[call.ordinal] = Deferred(call, inputs)
                    return
                value = self._executor.execute(call, inputs)
                for deferred in [value for value in inputs.values() if isinstance(value, Deferred)]:
                    self._journal.call_done(deferred.call, None)
            except M2FlowError as raised:
                failed = call.ordinal, raised.located(call.site.describe())
            except Exception as raised:
                failed = call.ordinal, unexpected(call.name, raised).located(call.site.describe())
            else:
                self._values[call.ordinal] = value
                self._journal.call_done(call, value)
        if failed is not None:
            self._failures.failed(call, *failed)
            if failed[0] != call.ordinal:
                self._journal.call_added(call)
            self._journal.call_failed(call, failed[1])
        self._writers.update({effect.resource: call.ordinal for effect in call.writes})

    def _inherited(self, call: Call) -> tuple[int, M2FlowError] | None:
        """The error of what this call depends on, by data or by effect; of several, that of the earliest root cause."""
        if self._failures.is_empty:
            return None
        needed = {ref.call for _, ref in call.inputs} | {self._writers[e.resource] for e in call.reads if e.resource in self._writers}
        needed |= {call.carries_from} if call.carries_from is not None else set()
        failed = [self._failures.of(ordinal) for ordinal in needed if ordinal in self._failures]
        return min(failed, key=lambda found: found[0], default=None)

    def recall(self, call: Call, rows: Batch, left: Sequence[int]) -> None:
        self._executor.recall(call, {name: self._values[ref.call] for name, ref in call.inputs}, left)
        self._values[call.ordinal] = rows

    def fail(self, call: Call, root: int, error: M2FlowError) -> None:
        self._num_calls = call.ordinal + 1
        self._failures.failed(call, root, error)
        self._writers.update({effect.resource: call.ordinal for effect in call.writes})

    def value(self, ordinal: int) -> object:
        if ordinal in self._failures:
            self._failures.raised(ordinal, self._num_ended, self._num_calls)
            raise self._failures.of(ordinal)[1]
        return self._values[ordinal]

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        if self._failures.has_lost_effect(self._num_calls):
            return
        for name, source in values.items():
            if isinstance(source, float):
                self._journal.logged(step, name, source)
            elif source[0] not in self._failures:
                self._journal.logged(step, name, number_of(self._values[source[0]], source[1]))

    def release(self, ordinal: int) -> None:
        if ordinal not in self._values:
            return
        if isinstance(self._values[ordinal], Batch | Deferred):
            self._values.forget(ordinal)
        else:
            self._values.let_go(ordinal, self._step)

    def end_step(self, step: int) -> None:
        self._num_ended = self._num_calls
        self._raise_first()
        self._journal.step_done(step)

    def raise_due(self) -> None:
        if self._failures.is_due_before(self._num_ended):
            self._raise_first()

    def finish(self) -> None:
        self._raise_first()

    def _raise_first(self) -> None:
        due = self._failures.first_due
        if due is not None:
            raise self._failures.error_due(due)


def number_of(value: object, name: str | None) -> float:
    """Read the number that a log entry names from a call's value.

    Raises:
        TraceError: the value has no number of that name, or is none.
    """
    if name is not None and isinstance(value, dict):
        try:
            value = metric(value, name)
        except LookupError as error:
            raise TraceError(f"log: {error.args[0]}") from None
    if not isinstance(value, int | float):
        raise TraceError(f"log: a {type(value).__name__} is no number")
    return float(value)
