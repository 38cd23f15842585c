"""Runs of `recovery_run` to which something is done: each is held until what must happen has happened, then goes on to its end.

    started(..., held_at=3) --until_generated--> what is done --until_happened: the ledger says so--> ended(): it goes on to its end

Nothing that is asserted of such a run depends on how fast it is: it does not begin the step at which it is held before it is let go.
Every wait ends with what it waits for, or with the run's own end, which fails the test; the limit in seconds is for one that hangs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import programs
import psutil

from m2flow.micro.records.ledger import Incident, read_incidents

SCRIPT = Path(__file__).with_name("recovery_run.py")
PATIENCE_S = 400.0
"""More than any of these runs takes on a machine that is ten times slower than two idle cores."""
Said = Mapping[str, Any]
"""What a run says at its end: the digests of its samples and weights, or its error; and its incidents."""


@final
class Running:
    """A run in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], runs_dir: Path, held_by: Path | None) -> None:
        self.process = process
        self.runs_dir = runs_dir
        self._held_by = held_by

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Wait until something is so while the run goes on."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None, f"the run has ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"not in {PATIENCE_S:.0f} s: {what}"
            time.sleep(0.005)

    def until_generated(self, num_bytes: int = 1) -> None:
        """Until the run has recorded so much of its samples; from the first on, all workers are up."""
        self.until(lambda: num_recorded(self.runs_dir) >= num_bytes, f"it recorded {num_bytes} bytes")

    def run_dir(self) -> Path:
        (run_dir,) = self.runs_dir.iterdir()
        return run_dir

    def incidents(self, kind: str) -> list[Incident]:
        """Those that are in the ledger by now."""
        return [one for one in read_incidents(self.run_dir()) if one.kind == kind]

    def until_happened(self, kind: str, worker: str) -> Incident:
        """Until the ledger has an incident of this kind; the first."""

        def found() -> list[Incident]:
            return [one for one in self.incidents(kind) if one.worker == worker]

        self.until(found, f"{worker} was {kind}")
        return found()[0]

    def worker(self, name: str) -> psutil.Process | None:
        """The process that is this worker, or this rank of it, now."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline()[-1:] == [name]:
                    return child
        return None

    def let_go(self) -> None:
        if self._held_by is not None:
            self._held_by.unlink(missing_ok=True)

    def ended(self) -> Said:
        """Let it go, and wait for its end."""
        self.let_go()
        said, errors = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, errors
        return dict(json.loads(said.splitlines()[-1]))


def num_recorded(runs_dir: Path) -> int:
    """Bytes of samples."""
    return sum(path.stat().st_size for path in runs_dir.glob("*/segments/*.seg"))


@contextlib.contextmanager
def started(
    runs_dir: Path, *arguments: str, held_at: int | None = None, environment: Mapping[str, str] = os.environ, before: Sequence[str] = ()
) -> Iterator[Running]:
    """A run, of which nothing is left afterwards.

    Args:
        held_at: the step that it does not begin until it is let go. None: it is not held.
        before: words before the command.
    """
    held_by = None if held_at is None else runs_dir.with_name(f"{runs_dir.name}.held")
    if held_by is not None:
        runs_dir.mkdir(exist_ok=True)
        held_by.write_text(str(held_at))
        environment = {**environment, "HELD_BY": str(held_by)}
    command = [*before, sys.executable, str(SCRIPT), str(runs_dir), *arguments]
    process = programs.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(environment), start_new_session=True
    )
    try:
        yield Running(process, runs_dir, held_by)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(runs_dir: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> Said:
    """What a run says to which nothing is done."""
    with started(runs_dir, *arguments, environment=environment) as running:
        return running.ended()


@functools.cache
def undisturbed(*arguments: str) -> Said:
    with tempfile.TemporaryDirectory() as runs_dir:
        return run(Path(runs_dir), *arguments)


def disturbed(
    runs_dir: Path,
    arguments: Sequence[str],
    name: str,
    num_bytes: int,
    what: Callable[[psutil.Process], None],
    *,
    held_at: int = 3,
    returns: bool = True,
) -> tuple[Said, Incident]:
    """A run in which something is done to a worker before its last step: what it says at its end, and how the worker was lost.

    Args:
        name: of the worker, or of one of its ranks.
        num_bytes: how much has been generated by then, at least.
        held_at: its last step.
        returns: it is started again alone. A trainer is not: the whole run is taken up again.
    """
    with started(runs_dir, *arguments, held_at=held_at) as running:
        running.until_generated(num_bytes)
        found = running.worker(name)
        assert found is not None
        what(found)
        worker = name.partition("#")[0]
        lost = running.until_happened("lost", worker)
        if returns:
            running.until_happened("started again", worker)
        return running.ended(), lost


def same(one: Said, other: Said) -> bool:
    """Whether two runs came to the same samples and weights."""
    return [one.get(name) for name in ("samples", "weights", "count")] == [other[name] for name in ("samples", "weights", "count")]
