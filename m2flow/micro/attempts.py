"""Who may write a run's directory, and how often a run that broke is taken up again.

One process at a time writes a run: it holds a lock on `run.lock`, which the operating system frees when the process ends, however that
comes. A run whose trainer died is taken up again in the same process, as `m2flow run --resume` would, unless attempt after attempt
gets no further. One whose trainer's ranks had no room for a micro-batch is, too, with smaller ones; that ends with single samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import final

from m2flow.errors import SpecError, StateLost
from m2flow.spec import ClusterSpec, RunSettings

_LOCK = "run.lock"


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Be the one process that writes a run.

    Raises:
        SpecError: another one does.
    """
    with (run_dir / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip()
            by = f" by process {holder}" if holder else ""
            raise SpecError(f"the run in {run_dir} goes on{by}", now="Wait for it, or stop that process first.") from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def in_smaller_parts(spec: ClusterSpec) -> ClusterSpec:
    """The same, but micro-batches go through the trainer in twice as many parts."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"parts": 2 * spec.train.parts})})


@final
class Attempts:
    """How often the run has come to the same place."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._num_vain = 0
        self._furthest = -1

    def broke(self, error: StateLost, num_done: int) -> float:
        """The run broke after so many calls were over; how many seconds to wait before it is taken up again.

        Raises:
            StateLost: it has come no further too often.
        """
        self._num_vain = 1 if num_done > self._furthest else self._num_vain + 1
        self._furthest = max(self._furthest, num_done)
        if self._num_vain >= self._settings.attempts:
            times = f"{self._num_vain} times" if self._num_vain > 1 else "once"
            what = f"{error.what}; the run has come this far {times}, and no further"
            raise StateLost(what, where=error.where, now=error.now, remote=error.remote) from error
        return float(self._settings.retry_wait_s * 2 ** (self._num_vain - 1))
