"""Calls whose result nothing ever uses: they run like any other, which may well be a line that was forgotten.

A result is used by a call that takes it, by a look at it, by `log`, or by whoever still holds its handle when the flow ends. A call
that writes a resource is there for that. Python says when a handle is gone, so a warning comes at the end of the step, once a line, and
none for a line whose result was ever used: a branch, a `break` or an error that the flow caught may pass over the use in one step.
"""

from __future__ import annotations

import warnings

from m2flow.errors import UnusedResult
from m2flow.macro.graph import Call

_Line = tuple[str, str, int]


class Uses:
    """What of one session's calls was used."""

    def __init__(self) -> None:
        self._unused: dict[int, Call] = {}
        self._gone: dict[int, Call] = {}
        self._settled: set[_Line] = set()
        """Lines that were named, or whose result was used."""

    def added(self, call: Call) -> None:
        for _, ref in call.inputs:
            self.used(ref.call)
        if not call.writes:
            self._unused[call.ordinal] = call

    def used(self, ordinal: int) -> None:
        """Also when its own handle is gone: `lagged` finds the call by its place."""
        call = self._unused.pop(ordinal, None) or self._gone.pop(ordinal, None)
        if call is not None:
            self._settled.add(_line(call))

    def interrupted(self) -> None:
        """The program is raised an error: what it has by now it may have been about to use."""
        self._settled.update(map(_line, [*self._unused.values(), *self._gone.values()]))
        self._unused, self._gone = {}, {}

    def dropped(self, ordinal: int) -> None:
        """The program can't reach this call's result any more. May be said at any moment: a collection of garbage says it."""
        call = self._unused.pop(ordinal, None)
        if call is not None:
            self._gone[ordinal] = call

    def warn(self) -> None:
        """Name the lines whose result was dropped, those that were not named before."""
        gone, self._gone = self._gone, {}
        for _, call in sorted(gone.items()):
            if _line(call) not in self._settled:
                self._settled.add(_line(call))
                said = f"nothing uses what {call.name} gives; it runs all the same. Use it, log() it, or take it out."
                warnings.warn_explicit(said, UnusedResult, call.site.file, call.site.line)


def _line(call: Call) -> _Line:
    return call.name, call.site.file, call.site.line
