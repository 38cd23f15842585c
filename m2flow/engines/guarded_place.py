"""A directory of this process's own, which is gone when the process is: also when it is killed.

    open -> /dev/shm/m2flow-sglang-x8k2/ ... close, or the end of this process -> removed

Shared memory outlives who wrote it, and a model's weights lie there. A shell waits at a pipe whose other end only this process has; its end
closes it, whatever ended it, and the shell removes the directory. Should the shell be killed as well, the next place that is opened beside
it removes what nobody holds the lock of.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import final

_LOCK = ".held"
_GUARD = 'while read -r _; do :; done; rm -rf "$1"'


@final
class GuardedPlace:
    """One directory, from `open` to `close`."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self._prefix = prefix
        self._parent = Path(parent or tempfile.gettempdir())
        self._lock: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.path = Path()

    def open(self) -> Path:
        remove_abandoned(self._prefix, self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # What ends this process's group must leave it.
        )
        fresh = self.path / f"{_LOCK}.new"  # Locked before it has its name: nobody may find it without.
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)
        return self.path

    def close(self) -> None:
        """May be called twice."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove this user's directories of that name that no process holds; which they were."""
    found = []
    for path in sorted(parent.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # Somebody else's, or removed meanwhile, or just being made, or held.
            status = path.lstat()
            if path.is_symlink() or status.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                found.append(path)
            finally:
                os.close(lock)
    return found
