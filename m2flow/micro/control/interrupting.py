"""Ctrl-C and what is like it: the run stops in order at the first, with its records whole, and at once at the second.

    first signal   --KeyboardInterrupt in the flow's thread--> the updates that have begun are finished, all else is given up
    second signal  --end_now--> the ledger is written, the workers are killed, the process ends

A signal handler runs in the main thread between two of its instructions, so an eager run's update, which is that thread's own work,
only notes the first one. Limit: Python hears of a signal when code that is not Python's own returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import final

from m2flow.macro.graph import Call
from m2flow.macro.recording import Around
from m2flow.macro.session import Backend

_PATIENCE_S = 2.0


@final
class Shielding(Around):
    """An eager backend whose updates are not broken off: half of one would be made twice when the run is taken up again."""

    def __init__(self, live: Backend) -> None:
        super().__init__(live)
        self._is_updating = False
        self._reason = ""

    def interrupt(self, reason: str) -> bool:
        """Stop at the end of the update that is under way; False if none is. From a signal handler."""
        if self._is_updating:
            self._reason = reason
        return self._is_updating

    def submit(self, call: Call) -> None:
        self._is_updating = call.method == "update"
        try:
            super().submit(call)
        finally:
            self._is_updating = False
        if self._reason:
            raise KeyboardInterrupt(self._reason)


def end_now(steps: Iterable[Callable[[], None]]) -> None:
    """Do these one after the other, each as far as it comes in two seconds: a lock that it needs may be held by who was interrupted."""
    for step in steps:
        thread = threading.Thread(target=_quietly, args=(step,), daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


def _quietly(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:  # The process ends; what can't be done now is found by the next run.
        return
