"""What must be there for a library that compiles parts of itself when it is first used.

    check_compiler("deepspeed") --> ninja is on this process's path; or an error that says what to install
    watching_locks()            --> a lock that a killed compilation left keeps nobody waiting

A virtual environment need not be activated for its interpreter to be used, and then its `ninja` is not on the path: it is put there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from m2flow.errors import MissingExtra

_LONGEST_S = 3600.0
_LOOKS_S = 5.0
_CLOSES_S = 0.5
_GUARD = ".m2flow-guard"
_NETWORKED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs", "fuse", "wekafs")
_SAID: dict[Path, str] = {}
"""Lock -> what was printed of it last."""


def missing_tools() -> dict[str, str]:
    """What is missing for compiling a C++ extension of torch, and how to get it."""
    missing = {}
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        missing[f"a C++ compiler ({compiler})"] = "apt-get install g++"
    if _ninja() is None:
        missing["ninja"] = "pip install ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing["Python's headers"] = "apt-get install python3-dev"
    return missing


def check_compiler(engine: str) -> None:
    """
    Raises:
        MissingExtra: there is nothing to compile with.
    """
    missing = missing_tools()
    if missing:
        raise MissingExtra(
            f"the train engine {engine!r} compiles a part of itself, and {' and '.join(missing)} can't be found",
            now="; ".join(missing.values()),
        )
    ninja = _ninja()
    if ninja is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(ninja.parent), os.environ.get("PATH", os.defpath)])


@contextlib.contextmanager
def watching_locks() -> Iterator[None]:
    """While a library may compile: torch waits for whoever has a lock, and can't tell that he was killed. Such locks are removed, now and
    as time passes; who is waited for is said in the log."""
    clear_abandoned_locks()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOKS_S):
            clear_abandoned_locks()

    thread = threading.Thread(target=watch, name="m2flow-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def clear_abandoned_locks() -> list[Path]:
    """Remove the locks of compilations that were killed; which they were.

    Who compiles has his lock open until he removes it, so one that no process of this host has open is nobody's; where the directory is on
    a network, another host may have it, and only a lock of more than an hour is. Limit: containers that share a directory, but not
    their processes, do not see each other.
    """
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = [lock for lock in cache.glob("**/lock") if lock.is_file()]
    if not locks:
        return []
    removed = []
    with (cache / _GUARD).open("a") as guard, contextlib.suppress(OSError):
        fcntl.flock(guard, fcntl.LOCK_EX)  # So that nobody removes what was made after another had removed it.
        for lock in locks:
            what = _whose(lock)
            if not what:
                lock.unlink(missing_ok=True)
                removed.append(lock)
                what = "is abandoned: a compilation was killed. It is removed"
            if _SAID.get(lock) != what:
                _SAID[lock] = what
                print(f"the lock {lock} {what}", flush=True)
    return removed


def _whose(lock: Path) -> str:
    """Who has it, in words; empty: nobody."""
    for look in range(2):  # Who is done closes it, and removes it a moment later.
        if look:
            time.sleep(_CLOSES_S)
        try:
            status = lock.stat()
        except FileNotFoundError:
            return "was given back"
        holders = _holders(status)
        if holders:
            return f"is held by process {', '.join(map(str, holders))}, which compiles; this one waits for it"
        if status.st_uid != os.getuid():
            return "is another user's; if nobody compiles there, delete it"
        if _is_on_a_network(lock) and time.time() - status.st_mtime < _LONGEST_S:
            return "may be held on another host; if nobody compiles there, delete it"
    return ""


def _holders(status: os.stat_result) -> list[int]:
    """Processes of this host that have the file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            for descriptor in process.iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(descriptor.stat(), status):
                        found.append(int(process.parent.name))
                        break
    return found


def _is_on_a_network(path: Path) -> bool:
    """Whether other hosts may have the file too."""
    place = path.resolve()
    mounted = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    kind = max(mounted, key=lambda part: len(part.mountpoint)).fstype if mounted else ""
    return kind.startswith(_NETWORKED)


def _ninja() -> Path | None:
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return Path(found) if found else None
