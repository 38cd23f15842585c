"""What an engine that compiles needs is looked for before a run starts, and said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch.utils.file_baton import FileBaton

from m2flow.engines import installed
from m2flow.errors import MissingExtra
from m2flow.micro.worker.worker_process import kill_group


def test_a_compiler_that_is_not_there_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingExtra, match=r"a C\+\+ compiler \(no-such-compiler\)") as caught:
        installed.check_compiler("mine")
    assert "g++" in caught.value.now


_COMPILES = """
import os, sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("compiles", flush=True)
time.sleep(1000)
"""


def test_a_lock_keeps_who_starts_waiting_while_its_owner_lives_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", _COMPILES, str(lock)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "compiles\n"
    assert installed.clear_abandoned_locks() == []
    assert f"{lock} is held by process {owner.pid}, which compiles" in capsys.readouterr().out
    monkeypatch.setattr(installed, "_POLL_S", 0.05)
    with installed.watching_locks():
        waiting = threading.Thread(target=FileBaton(str(lock)).wait)
        waiting.start()
        owner.kill()
        owner.communicate()
        waiting.join(60.0)
        assert not waiting.is_alive()
    assert not lock.exists()
    assert f"{lock} is abandoned: a compilation was killed" in capsys.readouterr().out


def test_a_lock_on_a_network_is_another_hosts_for_an_hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(installed, "_NETWORKED", "")
    lock = tmp_path / "lock"
    lock.touch()
    assert installed.clear_abandoned_locks() == []
    long_ago = time.time() - 7200
    os.utime(lock, (long_ago, long_ago))
    assert installed.clear_abandoned_locks() == [lock]


_STARTS = """
import os, subprocess, sys, time
compiler = subprocess.Popen(["sleep", "1000"], process_group=0)  # As ninja starts one.
print(compiler.pid, flush=True)
compiler.wait()
"""


def test_what_a_worker_has_started_ends_with_it_in_whatever_group_it_is() -> None:
    worker = subprocess.Popen([sys.executable, "-c", _STARTS], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    compiler = psutil.Process(int(worker.stdout.readline()))
    assert os.getpgid(compiler.pid) != worker.pid
    kill_group(worker.pid)
    worker.communicate()
    _, alive = psutil.wait_procs([compiler], timeout=60)
    assert alive == []
