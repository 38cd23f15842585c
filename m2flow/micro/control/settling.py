"""Which error of a run is the one to raise, and since when that is certain.

Calls end in any order. The error of a call that failed by itself is certain once every call before it in the program has ended: what
depends on several failed calls has the error of the earliest, and of the calls that failed by themselves the earliest counts. So a
later failure that comes first hides nothing. Pure; calls are added in program order.
"""

from __future__ import annotations

from m2flow.errors import M2FlowError


class Settling:
    """The calls under way, and the errors of those that failed."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        """Calls that have not ended, in program order."""
        self._errors: dict[int, tuple[int, M2FlowError]] = {}
        """Failed call -> the call that failed by itself, and its error."""
        self._num_added = 0
        self._num_ended_steps = 0

    def added(self, ordinal: int) -> None:
        self._open[ordinal] = None
        self._num_added = ordinal + 1

    def done(self, ordinal: int) -> None:
        self._open.pop(ordinal, None)

    def has_ended(self, ordinal: int) -> bool:
        return ordinal not in self._open

    def failed(self, ordinal: int, root: int, error: M2FlowError) -> None:
        """A call failed because of `root`; later perhaps because of an earlier one."""
        self._open.pop(ordinal, None)
        self._errors[ordinal] = min((root, error), self._errors.get(ordinal, (root, error)), key=lambda found: found[0])

    def step_ended(self) -> None:
        """Errors of the calls so far are due: they come before anything that the program does next."""
        self._num_ended_steps = self._num_added

    @property
    def num_ended(self) -> int:
        """Calls of the program up to the last step that has ended."""
        return self._num_ended_steps

    def has_failed_at(self, ordinal: int) -> bool:
        return ordinal in self._errors

    def has_failed_before(self, num_calls: int) -> bool:
        """Whether one of the first so many calls has failed."""
        return any(ordinal < num_calls for ordinal in self._errors)

    def are_well(self, num_calls: int) -> bool:
        """Whether the first so many calls of the program are over, and none of them failed."""
        return next(iter(self._open), num_calls) >= num_calls and not self.has_failed_before(num_calls)

    @property
    def num_well(self) -> int:
        """How many calls, from the program's first, are over, and none of them failed."""
        return min([next(iter(self._open), self._num_added), *self._errors])

    @property
    def has_failed(self) -> bool:
        return bool(self._errors)

    @property
    def first(self) -> M2FlowError | None:
        """The earliest error, if it is certain by now which that is."""
        return self.of(min(self._errors)) if self._errors else None

    def of(self, ordinal: int) -> M2FlowError | None:
        """What looking at a failed call raises, if it is certain by now."""
        if ordinal not in self._errors:
            return None
        root, error = self._errors[ordinal]
        return error if next(iter(self._open), root) >= root else None

    @property
    def is_due_known(self) -> bool:
        """Whether every call of the steps that have ended is over, or the error that is due is certain."""
        return self.first is not None or next(iter(self._open), self._num_ended_steps) >= self._num_ended_steps

    @property
    def due(self) -> M2FlowError | None:
        """The earliest error of the steps that have ended."""
        return self.first if self._errors and min(self._errors) < self._num_ended_steps else None
