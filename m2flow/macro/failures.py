"""Track which calls of a run have failed, and which of their errors the program has not been raised yet.

    call fails --failed--> due --the program looks, and `value` raises--> raised: the program handles it from then on
                            |
                            +--end of the step, end of the run--> raised there, and the run ends

`try` around a look means what it means in Python: an error that was raised to the program, and that the program survived, is handled. It
covers every call made so far that failed for the same reason; a later call that needs what failed, fails anew. Two errors can't be
handled: one that nobody looked at before its step ended (by then Python may be steps ahead, so where it would be raised depends on the
plan), and one that left a resource without the version that later calls read, such as an update's.
"""

from __future__ import annotations

from typing import final

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call


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
