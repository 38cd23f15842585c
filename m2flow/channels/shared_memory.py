"""A pool of shared-memory buffers that processes lend to each other.

    sender   Arena.lend -> Loan --(over a socket)--> Borrower.borrow -> read-only views    receiver
                 ^                                       |
                 +-------- a number in shared memory ----+   when the last view is gone

Buffers are kept and reused, since fresh pages cost several times what a copy costs. Each is a file of its own in /dev/shm (elsewhere, where
there is none, in the temporary directory) that the owner alone resizes or removes; a table beside them says of each buffer whether it is
free, in transit, or which process holds it. A buffer returns when its holder has dropped the last view, when its holder has died, or when
its owner learns that the peer it was sent to is gone (`Arena.forget`).

Both sides are processes of one user, who trust each other: a borrower maps buffers read-only, but could map them otherwise. If the process
id of a dead holder is given to another process, its buffer stays away until the arena closes.

The owner of an arena removes its files in `close`. An owner that is killed can't: its launcher calls `remove_arenas` with the prefix that
it gave.

`keep_freed_memory` stops glibc from returning freed memory to the system, which it does from 128 KiB on as long as nothing larger was ever
freed; the next parcel then waits while the system clears pages, which takes longer than the copy. Measured with parcels of 16 samples
(371 KB) in one process: 340 us of processor time with 43 page faults each, and 220 us with none.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import re
import stat
import tempfile
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import BrokenChannel, ChannelError, DecodeError, SpecError

MAX_BUFFERS = 4096
ALIGNMENT = 64
_SMALLEST_BYTES = 1 << 16
_TABLE, _BUFFER = ".loans", ".rows"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{5,180}")

_FREE, _ON_ITS_WAY = 0, -1
"""States of a buffer in the table; any other is the process id of its holder."""

States = npt.NDArray[np.int32]


class Loan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where some arrays lie in a buffer: one after the other, each at a multiple of `ALIGNMENT` bytes."""

    arena: str
    buffer: int
    sizes: tuple[int, ...]
    """Bytes of each array."""


class _Buffer:
    """One mapped file."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        _unlink(path)  # An earlier owner's who was killed; nobody else uses this run's prefix.
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _reserve(file, size)
            self.map = mmap.mmap(file, size)
        except BaseException:
            _unlink(path)
            raise
        finally:
            os.close(file)


class Arena:
    """Owns a pool of buffers and lends them. One thread."""

    def __init__(self, name: str, *, max_bytes: int = 1 << 30) -> None:
        if not _NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} can't name an arena", now="Use 6 to 180 letters, digits, `_`, `-` and `.`, none of the last three first."
            )
        self._name = name
        self._max_bytes = max_bytes
        self._table: _Buffer | None = None
        self._states: States = np.zeros(0, np.int32)
        self._buffers: dict[int, _Buffer] = {}
        self._free: dict[int, list[int]] = {}
        """Size -> free buffers, the one that returned last at the end: its pages are the warmest."""
        self._lent: dict[int, str] = {}
        """Buffer -> the peer that it is lent to."""
        self._unused: list[int] = []
        self.num_bytes = 0
        """Bytes of all buffers, lent or free."""

    def lend(self, arrays: Sequence[memoryview], to: str) -> Loan | None:
        """Copy arrays into a buffer for a peer to borrow. None: the pool, or shared memory, is full."""
        sizes = tuple(array.nbytes for array in arrays)
        buffer = self._take(sum(size + -size % ALIGNMENT for size in sizes))
        if buffer is None:
            return None
        start = 0
        for array, size in zip(arrays, sizes, strict=True):
            if size:
                target = np.frombuffer(self._buffers[buffer].map, np.uint8, size, start)
                np.copyto(target, np.frombuffer(array, np.uint8))
            start += size + -size % ALIGNMENT
        self._states[buffer] = _ON_ITS_WAY
        self._lent[buffer] = to
        return Loan(self._name, buffer, sizes)

    def take_back(self, loan: Loan) -> None:
        """Free a loan that could not be sent."""
        self._reclaim(loan.buffer)

    def forget(self, peer: str) -> int:
        """Free the buffers in transit to a peer that is gone, and those that it held if it is dead. Returns how many.

        A peer that is cut off but alive may still be reading.
        """
        gone = [buffer for buffer, to in self._lent.items() if to == peer]
        gone = [buffer for buffer in gone if self._states[buffer] <= 0 or not _is_alive(int(self._states[buffer]))]
        for buffer in gone:
            self._reclaim(buffer)
        return len(gone)

    def num_lent(self) -> int:
        """Count buffers that have not returned."""
        self._collect_returned()
        return len(self._lent)

    def num_on_their_way(self, to: str | None = None) -> int:
        """Count buffers that this peer, or any, has not received yet."""
        return sum(1 for buffer, peer in self._lent.items() if self._states[buffer] == _ON_ITS_WAY and to in (peer, None))

    def close(self) -> None:
        """Remove the files. Borrowers keep what they have mapped. May be called twice."""
        for buffer in (*self._buffers.values(), *([self._table] if self._table else [])):
            _unlink(buffer.path)
        self._buffers.clear()
        self._free.clear()
        self._lent.clear()
        self._table, self._states = None, np.zeros(0, np.int32)

    def _take(self, num_bytes: int) -> int | None:
        size = _size_for(num_bytes)
        if not self._fitting(size):
            self._collect_returned()
        fitting = self._fitting(size)
        if fitting:
            return fitting.pop()
        if not self._evict_for(size):
            return None
        try:
            return self._new(size)
        except ChannelError:
            return None

    def _fitting(self, size: int) -> list[int] | None:
        """The free buffers of the smallest sufficient size, up to twice as large as asked for."""
        sizes = sorted(known for known, free in self._free.items() if free)
        place = bisect.bisect_left(sizes, size)
        return self._free[sizes[place]] if place < len(sizes) and sizes[place] <= 2 * size else None

    def _evict_for(self, size: int) -> bool:
        """Evict free buffers, smallest first, until one of this size fits. False: it still does not."""
        free = sorted((known, buffer) for known, buffers in self._free.items() for buffer in buffers)
        while self.num_bytes + size > self._max_bytes and free:
            known, buffer = free.pop(0)
            self._free[known].remove(buffer)
            _unlink(self._buffers.pop(buffer).path)
            self._unused.append(buffer)
            self.num_bytes -= known
        return self.num_bytes + size <= self._max_bytes and len(self._buffers) < MAX_BUFFERS

    def _new(self, size: int) -> int:
        if self._table is None:
            self._table = _Buffer(_path(self._name + _TABLE), MAX_BUFFERS * 4)
            self._states = np.frombuffer(self._table.map, np.int32)
        buffer = self._unused.pop() if self._unused else len(self._buffers)
        self._buffers[buffer] = _Buffer(_path(f"{self._name}.{buffer}{_BUFFER}"), size)
        self.num_bytes += size
        return buffer

    def _collect_returned(self) -> None:
        """Reclaim buffers that have been returned, or whose holder has died."""
        if not self._lent:
            return
        lent = np.fromiter(self._lent, np.int64, len(self._lent))
        states = self._states[lent]
        dead = [pid for pid in np.unique(states[states > 0]).tolist() if not _is_alive(pid)]
        for buffer in lent[(states == _FREE) | np.isin(states, dead)].tolist():
            self._reclaim(buffer)

    def _reclaim(self, buffer: int) -> None:
        if self._lent.pop(buffer, None) is not None:
            self._states[buffer] = _FREE
            self._free.setdefault(self._buffers[buffer].size, []).append(buffer)


class Borrower:
    """Maps buffers that were lent, and keeps mappings from one loan to the next. One thread; views may be dropped in any."""

    def __init__(self) -> None:
        self._tables: dict[str, States] = {}
        self._maps: dict[tuple[str, int], tuple[int, mmap.mmap]] = {}

    def borrow(self, loan: Loan) -> list[memoryview]:
        """Return the arrays of a loan, read-only. The buffer returns to its owner when the last reference to any of them is gone.

        Raises:
            BrokenChannel: the owner is gone, and its files with it.
            DecodeError: the loan does not fit its buffer.
        """
        if not _NAME.fullmatch(loan.arena) or not 0 <= loan.buffer < MAX_BUFFERS or min(loan.sizes, default=0) < 0:
            raise DecodeError(f"a loan of buffer {loan.buffer} of {loan.arena[:200]!r}")
        states = self._table_of(loan.arena)
        mapped = self._map_of(loan.arena, loan.buffer)
        if sum(size + -size % ALIGNMENT for size in loan.sizes) > len(mapped):
            raise DecodeError(f"a loan of {sum(loan.sizes):,} bytes in a buffer of {len(mapped):,}")
        states[loan.buffer] = os.getpid()
        whole = np.frombuffer(mapped, np.uint8)
        weakref.finalize(whole, _release_buffer, states, loan.buffer).atexit = False
        views, start = [], 0
        for size in loan.sizes:
            views.append(memoryview(whole.data)[start : start + size])
            start += size + -size % ALIGNMENT
        return views

    def forget(self, arena: str) -> None:
        """Drop the mappings of an arena whose owner is gone or has ended, but for those with views."""
        self._tables.pop(arena, None)
        for key in [key for key in self._maps if key[0] == arena]:
            del self._maps[key]

    def close(self) -> None:
        """Drop all mappings. Views that were given out keep theirs, and return their buffers as before."""
        self._tables.clear()
        self._maps.clear()

    def _table_of(self, arena: str) -> States:
        states = self._tables.get(arena)
        if states is None:
            _, mapped = _mapped(_path(arena + _TABLE), mmap.PROT_READ | mmap.PROT_WRITE, MAX_BUFFERS * 4)
            states = self._tables[arena] = np.frombuffer(mapped, np.int32, MAX_BUFFERS)
        return states

    def _map_of(self, arena: str, buffer: int) -> mmap.mmap:
        path = _path(f"{arena}.{buffer}{_BUFFER}")
        known = self._maps.get((arena, buffer))
        try:
            if known is not None and os.stat(path, follow_symlinks=False).st_ino == known[0]:
                return known[1]
        except FileNotFoundError:
            raise _gone(arena) from None
        found = self._maps[arena, buffer] = _mapped(path, mmap.PROT_READ, 1)
        return found[1]


def remove_arenas(prefix: str) -> int:
    """Remove the files of every arena whose name starts with a prefix, for owners that were killed. Returns how many."""
    directory = _directory()
    found = [name for name in os.listdir(directory) if name.startswith(prefix) and name.endswith((_TABLE, _BUFFER))]
    for name in found:
        _unlink(os.path.join(directory, name))
    return len(found)


def _release_buffer(states: States, buffer: int) -> None:
    if states[buffer] == os.getpid():  # Its owner may have reclaimed it, and lent it to another process.
        states[buffer] = _FREE


def _mapped(path: str, protection: int, at_least: int) -> tuple[int, mmap.mmap]:
    """Map a file; returns its inode and the mapping."""
    try:
        file = os.open(path, (os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise _gone(os.path.basename(path)) from None
    except OSError as error:
        raise DecodeError(f"{path} can't be borrowed: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise DecodeError(f"{path} belongs to somebody else")
        if status.st_size < at_least:
            raise DecodeError(f"{path} has {status.st_size} bytes")
        try:
            return status.st_ino, mmap.mmap(file, status.st_size, prot=protection)
        except (OSError, ValueError, OverflowError) as error:
            raise DecodeError(f"{path} of {status.st_size:,} bytes can't be borrowed: {error}") from None
    finally:
        os.close(file)


def _gone(what: str) -> BrokenChannel:
    return BrokenChannel(f"the shared buffers {what} are gone", now="The process that lent them has ended.")


def _size_for(num_bytes: int) -> int:
    """Round a size up to a quarter of a power of two, so that at most a fifth of a buffer is unused.

    >>> _size_for(1), _size_for(100_000), _size_for(160_000)
    (65536, 114688, 163840)
    """
    size = max(num_bytes, _SMALLEST_BYTES)
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step


def _reserve(file: int, size: int) -> None:
    try:
        # Not ftruncate alone: it promises pages that tmpfs may not have, and writing to those ends the process with SIGBUS.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise
        raise ChannelError(f"{_directory()} has no room for {size:,} bytes") from None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _path(name: str) -> str:
    return os.path.join(_directory(), name)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# ---- the C library's heap

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's `malloc.h`."""
KEPT_BYTES = 256 << 20
_LARGEST_BYTES = 32 << 20
"""Bytes of one allocation; glibc accepts no larger threshold."""


def keep_freed_memory() -> bool:
    """Keep up to `KEPT_BYTES` of freed memory in this process. False where the allocator is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES))
