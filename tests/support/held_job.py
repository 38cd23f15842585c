"""The job of `flows/grpo.py` with real engines (`failure_run`), held in its middle while something is done to it, and judged at its end.

Job(home).held() --the first step is in a checkpoint, the second is sampled--> what is done --> ended() --> check: as if nothing had been
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import programs

SCRIPT = Path(__file__).with_name("failure_run.py")
Said = Mapping[str, Any]
_LIMIT_S = 1500.0
"""Of a run, on a machine that forty others use: here three processes load PyTorch and then train."""


class Job:
    """A run in a process of its own, in a directory for it alone."""

    def __init__(self, home: Path, *arguments: str, environment: Mapping[str, str] | None = None, command: tuple[str, ...] = ()) -> None:
        self.home = home
        self.held_by = home / "held"
        self._arguments = arguments
        self._environment = {**os.environ, "HELD_BY": str(self.held_by), **(environment or {})}
        self._command = command

    def start(self, runs: str = "runs", *more: str) -> subprocess.Popen[str]:
        command = [*self._command, sys.executable, str(SCRIPT), str(self.home / runs), *self._arguments, *more]
        return programs.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=self._environment
        )

    def run(self, runs: str = "runs", *more: str) -> Said:
        return ended(self.start(runs, *more))

    @contextlib.contextmanager
    def held(self) -> Iterator[subprocess.Popen[str]]:
        """In the middle of the job, as long as this goes on."""
        self.held_by.touch()
        process = self.start()
        try:
            wait_until(lambda: self.is_in_the_middle, process)
            yield process
        except BaseException:
            end(process)
            raise
        finally:
            self.held_by.unlink()

    @property
    def is_in_the_middle(self) -> bool:
        """The first step is in a checkpoint, and samples of the second are written."""
        has_checkpoint = any(self.home.glob("runs/*/checkpoints/step-000001"))
        return has_checkpoint and self.num_asked >= 1

    @property
    def num_asked(self) -> int:
        """Rewards of the second step that have begun to wait."""
        return sum(log.read_text(errors="replace").count("waits") for log in self.home.glob("runs/*/logs/functions-0*.log"))


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def ended(process: subprocess.Popen[str]) -> Said:
    try:
        said, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    assert process.returncode == 0, errors
    return dict(json.loads(said.splitlines()[-1]))


@functools.cache
def undisturbed() -> Said:
    with tempfile.TemporaryDirectory() as home:
        said = Job(Path(home)).run()
    assert said.get("error") is None, said
    assert said["incidents"] == []
    return said


def check(said: Said) -> None:
    assert said.get("error") is None, said
    whole = undisturbed()
    assert {name: said[name] for name in ("samples", "weights", "count")} == {name: whole[name] for name in ("samples", "weights", "count")}
    assert said["is_sound"]
