"""Which error of a run is the one to raise, and since when that is certain.

Calls end in any order. The error of a call that failed by itself is certain once every call before it in the program has ended: what
depends on several failed calls has the error of the earliest, and of the errors that are due the earliest counts. So a later failure
that comes first hides nothing. Which errors are due, since the program was not raised them, is `m2flow.macro.failures`. Pure; calls are
added in program order.
"""

from __future__ import annotations

from m2flow.errors import M2FlowError
from m2flow.macro.failures import Failures
from m2flow.macro.graph import Call


class Settling:
    """The calls under way, and the errors of those that failed."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        """Calls that have not ended, in program order."""
        self._failures = Failures()
        self._num_added = 0
        self._num_ended_steps = 0

    def added(self, ordinal: int) -> None:
        self._open[ordinal] = None
        self._num_added = ordinal + 1

    def done(self, ordinal: int) -> None:
        self._open.pop(ordinal, None)

    def has_ended(self, ordinal: int) -> bool:
        return ordinal not in self._open

    def failed(self, call: Call, root: int, error: M2FlowError) -> None:
        """A call failed because of `root`; later perhaps because of an earlier one."""
        self._open.pop(call.ordinal, None)
        self._failures.failed(call, root, error)

    def raised(self, ordinal: int) -> None:
        """The program is raised the error of this call: if it goes on, it has handled it."""
        self._failures.raised(ordinal, self._num_ended_steps, self._num_added)

    def step_ended(self) -> None:
        """Errors of the calls so far are due: they come before anything that the program does next."""
        self._num_ended_steps = self._num_added

    @property
    def num_ended(self) -> int:
        """Calls of the program up to the last step that has ended."""
        return self._num_ended_steps

    def has_failed_at(self, ordinal: int) -> bool:
        return ordinal in self._failures

    def has_failed_before(self, num_calls: int) -> bool:
        """Whether one of the first so many calls has failed, and the program was not raised its error."""
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
        """What looking at a failed call raises, if it is certain by now."""
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
