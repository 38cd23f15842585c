"""Claim and remove what a run has on a host outside its directory: shared-memory segments, sockets and weight files.

    /dev/shm/m2flow-<8 digits>.owner    a locked file that names the run's sockets and segments; the lock is free once its owner has ended

An owner that ends in order removes everything (`ResourceClaim.close`). If it is killed its workers do, each as it ends, since one may
have made more after another has cleaned up (`m2flow.micro.worker.worker_process`). If they are killed with it, the next run of the same
user does (`remove_leftovers`): only files of this user, only under m2flow's names, and only where the lock is free. The kernel keeps the
lock, so neither a reused process id nor a container that shares the directory misleads it.
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
    """What a run has on this host outside its directory; the content of a claim's file."""

    prefix: str
    """Prefix of the names of its shared-memory segments."""
    sockets: str
    weights: str
    """Directory of weights that are synced as files; empty: none."""

    def remove(self) -> None:
        """Remove all of it. May be called several times, by the owner or by whoever knows that the owner is gone."""
        remove_segments(self.prefix)
        remove_arenas(self.prefix)
        if self.weights:
            remove_files(self.weights, self.prefix)
        if _is_ours(self.sockets) and os.path.basename(self.sockets).startswith("m2flow-"):
            shutil.rmtree(self.sockets, ignore_errors=True)


_read_host_resources = msgspec.json.Decoder(HostResources).decode


@final
class ResourceClaim:
    """Claim one run's resources on this host from `open` to `close`."""

    def __init__(self, prefix: str, sockets: str, weights: str) -> None:
        self._resources = HostResources(prefix, sockets, weights)
        self.path = os.path.join(_directory(), prefix + _SUFFIX)
        self._file: int | None = None

    def open(self) -> None:
        # Locked before it is renamed: nobody may find it unlocked.
        number, made = tempfile.mkstemp(prefix=".m2flow-", dir=_directory())
        os.write(number, msgspec.json.encode(self._resources))
        fcntl.flock(number, fcntl.LOCK_EX)
        os.rename(made, self.path)
        self._file = number

    def close(self) -> None:
        """Remove all that the run has left. May be called twice."""
        remove(self.path)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def remove(path: str, resources: HostResources | None = None) -> None:
    """Remove the resources that a claim's file names, or `resources` if it was read before, then the file itself."""
    resources = resources or read(path)
    if resources is not None:
        resources.remove()
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_leftovers() -> list[str]:
    """Remove what dead runs of this user have left; return their prefixes."""
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
    """Read a claim's file. None: there is no such file, or it is not m2flow's."""
    try:
        said = _read_host_resources(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_named_so = os.path.basename(path) == said.prefix + _SUFFIX and _NAME.fullmatch(said.prefix) is not None
    return said if is_named_so else None


def _is_ours(path: str) -> bool:
    """Whether a path exists, belongs to this user and is no symbolic link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
