"""What a run has on this host outside its directory, who removes it when the run is killed, and how others know that it lives.

    /dev/shm/m2flow-<8 digits>.owner    a file with a lock that its owner's end frees; it says where the run's sockets and segments are

An owner that ends in order removes all of it (`Claim.close`). If it is killed its workers do, each as it ends: one may have made more after
another removed what there was (`m2flow.micro.worker.worker_process`). If they are killed with it, the next run of the same user does
(`remove_leftovers`): only files of this user's, only under names that m2flow gives, and only where the lock is free. The kernel keeps the
lock, so neither a process id that was given anew nor a container that shares the directory misleads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import final

import msgspec

from m2flow.channels.shared_memory import remove_arenas
from m2flow.channels.weights import remove_segments
from m2flow.channels.weights.weight_files import remove_files

_SUFFIX = ".owner"
_NAME = re.compile(r"m2flow-[0-9a-f]{8}")


class HostResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has on this host outside its directory: what a claim's file says."""

    prefix: str
    """Of segments in shared memory."""
    sockets: str
    weights: str
    """The directory of weights that travel as files, or empty."""

    def remove(self) -> None:
        """May be called again, and by several. Whoever calls this knows that the owner is gone, or is the owner."""
        remove_segments(self.prefix)
        remove_arenas(self.prefix)
        if self.weights:
            remove_files(self.weights, self.prefix)
        if _is_ours(self.sockets) and os.path.basename(self.sockets).startswith("m2flow-"):
            shutil.rmtree(self.sockets, ignore_errors=True)


@final
class ResourceClaim:
    """Of one run, from `open` to `close`."""

    def __init__(self, prefix: str, sockets: str, weights: str) -> None:
        self._belongings = HostResources(prefix, sockets, weights)
        self.path = os.path.join(_directory(), prefix + _SUFFIX)
        self._file: int | None = None

    def open(self) -> None:
        # Locked before it has its name: nobody may find it without.
        number, made = tempfile.mkstemp(prefix=".m2flow-", dir=_directory())
        os.write(number, msgspec.json.encode(self._belongings))
        fcntl.flock(number, fcntl.LOCK_EX)
        os.rename(made, self.path)
        self._file = number

    def close(self) -> None:
        """Remove all that the run has left. May be called twice."""
        remove(self.path)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def remove(path: str, belongings: HostResources | None = None) -> None:
    """What a claim's file names, or was read in it before, and then the file. Whoever calls this knows that its owner is gone, or is it."""
    belongings = belongings or read(path)
    if belongings is not None:
        belongings.remove()
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_leftovers() -> list[str]:
    """Remove what runs of this user have left that are dead; their prefixes."""
    found = []
    for path in sorted(Path(_directory()).glob(f"m2flow-*{_SUFFIX}")):
        if not _NAME.fullmatch(path.name.removesuffix(_SUFFIX)) or not _is_ours(str(path)):
            continue
        with contextlib.suppress(OSError):  # It was removed meanwhile, or its owner lives.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(path))
                found.append(path.name.removesuffix(_SUFFIX))
            finally:
                os.close(number)
    return found


def read(path: str) -> HostResources | None:
    """What a claim's file says. None: no such file, or one that is not ours."""
    try:
        said = msgspec.json.decode(Path(path).read_bytes(), type=HostResources)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_named_so = os.path.basename(path) == said.prefix + _SUFFIX and _NAME.fullmatch(said.prefix) is not None
    return said if is_named_so else None


def _is_ours(path: str) -> bool:
    """Whether it is there, is this user's, and is no link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
