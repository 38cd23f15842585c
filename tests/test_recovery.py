"""Real workers that are killed or stopped in the middle of a run: it goes on, to the same samples and weights."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).with_name("recovery_run.py")
Said = Mapping[str, Any]


def start(runs_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(runs_dir), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def ended(process: subprocess.Popen[str]) -> Said:
    try:
        said, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return dict(json.loads(said.splitlines()[-1]))


@functools.cache
def undisturbed(*arguments: str) -> Said:
    with tempfile.TemporaryDirectory() as runs_dir:
        return ended(start(Path(runs_dir), *arguments))


def worker(process: subprocess.Popen[str], name: str) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        try:
            if child.cmdline()[-1:] == [name]:
                return child
        except psutil.Error:
            pass
    return None


def disturbed(runs_dir: Path, arguments: tuple[str, ...], name: str, num_bytes: int, what: Callable[[psutil.Process], None]) -> Said:
    """A run in which something is done to a worker when so much has been generated."""
    process = start(runs_dir, *arguments)
    try:
        while sum(path.stat().st_size for path in runs_dir.glob("*/segments/*.seg")) < num_bytes or worker(process, name) is None:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        found = worker(process, name)
        assert found is not None
        what(found)
        return ended(process)
    finally:
        process.kill()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("rollout-0", 1),
        *[
            pytest.param(name, num_bytes, marks=SLOW)
            for name in ("rollout-1", "functions-0", "functions-1")
            for num_bytes in (1, 9_000, 20_000)
        ],
    ],
)
def test_a_run_whose_worker_is_killed_gives_what_one_gives_that_was_left_alone(tmp_path, name, num_bytes):
    said = disturbed(tmp_path, ("fake",), name, num_bytes, lambda process: process.kill())
    assert said.get("error") is None
    lost, *again = said["incidents"]
    assert lost[1:3] == ["lost", name]
    assert lost[3].startswith("was killed by signal 9 (pid ")
    assert [incident[1:3] for incident in again] == [["started again", name]] * len(again)  # Unless the run is over before.
    assert again or num_bytes > 1
    whole = undisturbed("fake")
    assert {key: said[key] for key in ("samples", "weights")} == {key: whole[key] for key in ("samples", "weights")}


@SLOW
@pytest.mark.parametrize("transport", ["broadcast", "file", "tcp"])
def test_a_rollout_worker_that_is_started_again_gets_the_current_weights_over_any_transport(tmp_path, transport):
    said = disturbed(tmp_path, ("fake", f'transport="{transport}"'), "rollout-0", 20_000, lambda process: process.kill())
    assert said.get("error") is None
    assert said["incidents"][0][1:3] == ["lost", "rollout-0"]
    whole = undisturbed("fake")
    assert {key: said[key] for key in ("samples", "weights")} == {key: whole[key] for key in ("samples", "weights")}


@pytest.mark.parametrize("name", ["rollout-0", pytest.param("functions-0", marks=SLOW)])
def test_a_worker_that_is_stopped_is_missed_killed_and_replaced(tmp_path, name):
    said = disturbed(tmp_path, ("fake", "hung_after_s=5.0"), name, 20_000, lambda process: process.suspend())
    assert said["incidents"][0][1:3] == ["lost", name], said
    assert "gave no sign of life for 5 s" in said["incidents"][0][3]
    assert said["samples"] == undisturbed("fake")["samples"]
