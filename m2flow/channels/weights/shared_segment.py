"""A segment of shared memory that holds a model's weights and is overwritten by each new version.

    SharedWeights.write(tensors) -> Manifest --control link--> SharedWeightsReader.read(manifest)

The segment is a file in /dev/shm (elsewhere, where there is none, in the temporary directory) and stays from one `write` to the next: fresh
pages cost several times what the copy costs. So a writer must not write while a reader still reads; the controller ensures that, and the
checksum of every tensor would show it. It is a plain mapped file and not `multiprocessing.shared_memory`, whose resource tracker (before
Python 3.13) takes every process that attaches for an owner and unlinks the segment while others use it.

The owner removes the file in `close`. An owner that is killed can't: its launcher calls `remove_segments` with the prefix that it gave.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.delta import Changes
from m2flow.channels.weights.manifest import Manifest, TensorEntry, listed, named, padded, part_of
from m2flow.channels.weights.tensors import Tied, Weight, bytes_of, checksum, copy_with_checksum, to_wire
from m2flow.channels.weights.transport import Held, Receiver, Stage, Transport, WeightOptions
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, SpecError

_SUFFIX = ".weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{5,180}")


@final
class SharedMemory(Transport):
    """Receivers on the same host map the segment that a version is staged in."""

    is_in_place = True

    def stage(self, name: str) -> SharedWeights:
        return SharedWeights(name)

    def sender(self, name: str, options: WeightOptions) -> None:
        return None

    def receiver(self, worker: str, options: WeightOptions) -> SharedWeightsReader:
        return SharedWeightsReader()


@final
class SharedWeights(Stage):
    """Owns and writes one segment. The name starts with the prefix that `remove_segments` is given. One thread."""

    def __init__(self, name: str) -> None:
        _check_name(name)
        self._name = name
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._is_closed = False
        self._held: dict[str, TensorEntry] = {}
        """Tensors in the segment: all of the last write, or none after a write that failed."""

    def write(
        self, tensors: Iterable[tuple[str, Any]], *, version: int = -1, dtype: str | None = None, changes: Changes | None = None
    ) -> Manifest:
        """Copy tensors in, over the last version; changes are found as long as all keep their offsets."""
        if self._is_closed:
            raise ChannelClosed(f"the shared weights {self._name} are closed")
        before, self._held = self._held, {}
        entries: dict[str, TensorEntry] = {}
        tied: dict[str, str] = {}
        offset = 0
        for name, weight in to_wire(tensors, dtype):
            if name in entries or name in tied:
                raise ChannelError(f"tensor {name!r} comes twice")
            if isinstance(weight, Tied):
                tied[name] = weight.to
                continue
            kind, shape, source = bytes_of(name, weight)
            target = np.frombuffer(self._at_least(offset + len(source)), np.uint8, len(source), offset) if len(source) else source
            if changes is not None:
                old = before.get(name)
                if old is not None and (old.dtype, old.shape, old.offset) == (kind, shape, offset):
                    changes.add(name, kind, target, source)
                else:
                    changes.give_up()
            entries[name] = TensorEntry(name, kind, shape, offset, copy_with_checksum(source, target))
            offset += padded(len(source))
        if changes is not None and len(entries) != len(before):
            changes.give_up()
        self._held = entries
        return Manifest(self._name, offset, tuple(entries.values()), version, tuple(tied.items()))

    def body(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if not num_bytes:
            return np.zeros(0, np.uint8)
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8, num_bytes)  # Not marked read-only: torch has no such tensors.

    def close(self) -> None:
        """Remove the segment. Readers keep what they have mapped. May be called twice."""
        self._is_closed = True
        self._map = None
        if self._file is not None:
            os.close(self._file)
            self._file = None
            _unlink(_path(self._name))

    def _at_least(self, num_bytes: int) -> mmap.mmap:
        if self._map is None or len(self._map) < num_bytes:
            if self._file is None:
                # A file of that name is an earlier owner's who was killed; nobody else uses this run's prefix.
                _unlink(_path(self._name))
                self._file = os.open(_path(self._name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            old = len(self._map) if self._map is not None else 0
            # The rest is memory that nobody uses, so not by half or more.
            size = max(num_bytes, old + old // 4)
            size += -size % mmap.PAGESIZE
            self._reserve(old, size)
            self._map = mmap.mmap(self._file, size)
        return self._map

    def _reserve(self, old: int, size: int) -> None:
        assert self._file is not None
        try:
            # Not ftruncate alone: it promises pages that tmpfs may not have, and writing to those ends the process with SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, old, size - old)
            else:
                os.ftruncate(self._file, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            room = os.statvfs(_directory())
            raise ChannelError(
                f"{_directory()} has no room for weights of {size / 1e6:,.0f} MB ({room.f_bavail * room.f_frsize / 1e6:,.0f} MB are free)",
                now="Free some, or make it larger (in Docker: --shm-size).",
            ) from None


@final
class SharedWeightsReader(Receiver):
    """Maps and reads segments; keeps its mappings from one `read` to the next, and never removes a segment. One thread."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}

    def receive(self, manifest: Manifest, held: Held | None, verify: Collection[str] | None) -> Iterator[tuple[str, Weight]]:
        self.num_bytes = manifest.num_bytes
        return self.read(manifest, verify=verify is None or len(verify) > 0)

    def read(self, manifest: Manifest, *, verify: bool = True) -> Iterator[tuple[str, Weight]]:
        """Yield the tensors as read-only views of the segment, valid until the owner's next `write`.

        Args:
            verify: all are verified before the first is yielded, so that nobody loads half of a damaged model. Without it the caller
                compares what it has loaded with the manifest.
        Raises:
            ChannelError: the segment is gone, or tensors differ from what was written; they are named.
            DecodeError: a manifest that does not fit its segment.
        """
        segment = self._attach(manifest)
        body = np.frombuffer(segment, np.uint8, manifest.num_bytes)
        body = body.view()
        body.flags.writeable = False
        parts = [(entry, part_of(body, entry)) for entry in manifest.tensors]
        wrong = [entry.name for entry, raw in parts if checksum(raw) != entry.checksum] if verify else []
        if wrong:
            raise ChannelError(
                f"{len(wrong)} of {len(parts)} tensors in {manifest.segment} are not what was written: {listed(wrong)}",
                now="Either they were written over while they were read, or memory is faulty. Please report this run.",
            )
        return named(manifest.whole(), parts)

    def close(self) -> None:
        """Drop the mappings. Views that were given out keep theirs. May be called twice."""
        self._maps.clear()

    def _attach(self, manifest: Manifest) -> mmap.mmap | bytes:
        _check_name(manifest.segment)
        if manifest.num_bytes == 0:
            return b""
        try:
            file = os.open(_path(manifest.segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ChannelError(
                f"the shared weights {manifest.segment} are gone", now="The process that published them has ended."
            ) from None
        except OSError as error:
            raise ChannelError(f"the shared weights {manifest.segment} can't be read: {error}") from None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise ChannelError(f"the shared weights {manifest.segment} belong to somebody else")
            if not 0 < manifest.num_bytes <= status.st_size:
                raise DecodeError(f"a manifest of {manifest.num_bytes:,} bytes for a segment of {status.st_size:,}")
            inode, mapped = self._maps.get(manifest.segment, (-1, None))
            if mapped is None or inode != status.st_ino or len(mapped) < manifest.num_bytes:
                # Private and writable, since torch has no read-only tensors and takes it without a copy; nothing is written.
                mapped = mmap.mmap(file, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                self._maps[manifest.segment] = (status.st_ino, mapped)
            return mapped
        finally:
            os.close(file)


def remove_segments(prefix: str) -> int:
    """Remove every segment whose name starts with a prefix, for owners that were killed. Returns how many."""
    _check_name(prefix)
    found = [name for name in os.listdir(_directory()) if name.startswith(prefix) and name.endswith(_SUFFIX)]
    for name in found:
        _unlink(os.path.join(_directory(), name))
    return len(found)


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _path(name: str) -> str:
    return os.path.join(_directory(), name + _SUFFIX)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} can't name shared weights", now="Use 6 to 180 letters, digits, `_`, `-` and `.`, none of the last three first."
        )


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
