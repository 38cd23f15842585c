"""How a flow's Python may end that is no exception of its own: Ctrl-C, and a recursion without end."""

from __future__ import annotations

import traceback

from m2flow.errors import FlowError, RunInterrupted
from m2flow.macro.sites import owner, raised_at, site_of

_LONGEST = 50
"""Lines in a cycle that is looked for."""


def interrupted(stop: KeyboardInterrupt) -> RunInterrupted:
    """Ctrl-C, with where Python was. What was computed is in the run directory."""
    if isinstance(stop, RunInterrupted):
        return stop
    site = raised_at(stop)
    return RunInterrupted(f"stopped by {str(stop) or 'Ctrl-C'}", where=f"Python was at {site.describe()}" if site else "")


def endless(error: RecursionError) -> FlowError | None:
    """A recursion of the user's, as the lines that go round; None if no user's lines do."""
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
