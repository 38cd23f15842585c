"""Calls whose result nothing ever uses: they run like any other, which may well be a line that was forgotten.

A result is used by a call that takes it, by a look at it, by `log`, or by whoever still holds its handle when the flow ends. A call
that writes a resource is there for that. Python says when a handle is gone, so a warning comes at the end of the step, once a line.
"""

from __future__ import annotations

import warnings

from m2flow.errors import UnusedResult
from m2flow.macro.graph import Call


class Uses:
    """What of one session's calls was used."""

    def __init__(self) -> None:
        self._unused: dict[int, Call] = {}
        self._gone: list[Call] = []
        self._told: set[tuple[str, str, int]] = set()

    def added(self, call: Call) -> None:
        for _, ref in call.inputs:
            self.used(ref.call)
        if not call.writes:
            self._unused[call.ordinal] = call

    def used(self, ordinal: int) -> None:
        self._unused.pop(ordinal, None)

    def dropped(self, ordinal: int) -> None:
        """The program can't reach this call's result any more. May be said at any moment: a collection of garbage says it."""
        call = self._unused.pop(ordinal, None)
        if call is not None:
            self._gone.append(call)

    def warn(self) -> None:
        """Name the lines whose result was dropped, those that were not named before."""
        gone, self._gone = self._gone, []
        for call in sorted(gone, key=lambda call: call.ordinal):
            line = call.name, call.site.file, call.site.line
            if line not in self._told:
                self._told.add(line)
                said = f"nothing uses what {call.name} gives; it runs all the same. Use it, log() it, or take it out."
                warnings.warn_explicit(said, UnusedResult, call.site.file, call.site.line)
