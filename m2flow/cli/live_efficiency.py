"""How near to its bound a run is while it goes on: `m2flow analyze`, now and then, in a thread of its own.

An analysis takes a hundredth of the time at most: after one that took long, the next is long in coming. Of a trace that has become too
large for that, nothing more is said; `m2flow analyze` says it then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import final

_FIRST_S = 5.0
"""Between two analyses at least."""
_SHARE = 100
"""An analysis that took t seconds is made again after so many times t."""
_MOST_BYTES = 64 << 20
"""Of a trace."""


@final
class LiveEfficiency:
    """Of one run."""

    def __init__(self) -> None:
        self.value: float | None = None
        """Its bound over what it took, of all steps that are over; None: not known."""
        self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def look(self, run_dir: Path, now_s: float) -> float | None:
        """What is known by now; begins an analysis if it is time."""
        if self._thread is None and now_s >= self._due_s and _size(run_dir) in range(1, _MOST_BYTES):
            self._thread = threading.Thread(target=self._analyse, args=(run_dir,), name="m2flow-efficiency", daemon=True)
            self._thread.start()
        return self.value

    def _analyse(self, run_dir: Path) -> None:
        began_s = time.monotonic()
        with contextlib.suppress(Exception):  # The files are being written; a display must not fail for that.
            self.value = efficiency_of(run_dir)
        took_s = time.monotonic() - began_s
        self._due_s = time.monotonic() + max(_FIRST_S, _SHARE * took_s)
        self._thread = None


def efficiency_of(run_dir: Path) -> float | None:
    """The bound of a run's steps over what they took, 0 to 1; None: not known."""
    from m2flow.micro.analysis.idle import idle_of
    from m2flow.micro.analysis.report import analysis_of
    from m2flow.micro.analysis.run_trace import RunTrace

    trace = RunTrace(run_dir)
    trace.refresh()
    return analysis_of(trace, idle_of(trace)).efficiency


def final_efficiency(run_dir: Path) -> float | None:
    """Of a run that is over; None where its trace is too large to be asked in passing, or can't be read."""
    if _size(run_dir) not in range(1, _MOST_BYTES):
        return None
    with contextlib.suppress(Exception):
        return efficiency_of(run_dir)
    return None


def _size(run_dir: Path) -> int:
    try:
        return (run_dir / "trace" / "spans.msgpack").stat().st_size
    except OSError:
        return 0
