"""A directory in shared memory goes with its process, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import programs

from m2flow.engines.servers.inference_server import PrivateDirectory, remove_abandoned

HOLDS = """
import sys
from m2flow.engines.servers.inference_server import PrivateDirectory
place = PrivateDirectory("held-", sys.argv[1])
path = place.open()
(path / "weights").mkdir()
(path / "weights" / "file").write_text("x")
print(path, place._guard.pid, flush=True)
sys.stdin.read()
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path, int]:
    command = [sys.executable, "-c", HOLDS, str(parent)]
    process = programs.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    path, guard = process.stdout.readline().split()
    return process, Path(path), int(guard)


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_until_gone(path: Path) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if not path.exists():
            return
        pause.wait(0.01)
    raise AssertionError(f"{path} is still there")


def test_it_is_there_while_it_is_open_and_gone_afterwards(tmp_path: Path) -> None:
    place = PrivateDirectory("held-", str(tmp_path))
    path = place.open()
    (path / "file").write_text("x")
    assert remove_abandoned("held-", tmp_path) == []
    assert path.exists()
    place.close()
    place.close()
    assert list(tmp_path.iterdir()) == []


def test_it_goes_with_a_process_that_is_killed_with_its_group(tmp_path: Path) -> None:
    process, path, _ = holder(tmp_path)
    assert (path / "weights" / "file").exists()
    end(process)
    wait_until_gone(path)


def test_what_nobody_could_remove_is_removed_by_the_next_and_what_is_held_is_not(tmp_path: Path) -> None:
    process, path, guard = holder(tmp_path)
    os.kill(guard, signal.SIGKILL)
    other, held, _ = holder(tmp_path)
    assert path.exists()
    end(process)
    place = PrivateDirectory("held-", str(tmp_path))
    assert place.open() != path
    assert not path.exists()
    assert held.exists()
    place.close()
    end(other)
    wait_until_gone(held)
