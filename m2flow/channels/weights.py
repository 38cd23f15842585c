"""Model weights from one process to another of the same host, through a file in shared memory that is kept.

    trainer   SharedWeights.write(tensors) -> Manifest --control link--> SharedWeightsReader.read(manifest)   rollout

The file lies in /dev/shm (elsewhere, where there is none, in the temporary directory) and is written over by the next `write`:
fresh pages cost several times what the copy costs. So a writer must not write while a reader still reads; the controller sees
to that, and a CRC-32 of every tensor would show it. It is a plain file, mapped, and not `multiprocessing.shared_memory`,
whose resource tracker (before Python 3.13) takes every process that attaches for an owner and unlinks under the others.

Who owns a file removes it in `close`. An owner that is killed can't: its launcher calls `remove_segments` with the prefix that it gave.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import DTYPES
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, SpecError

RAW_DTYPES: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
"""Types that NumPy lacks, and what their bits travel as."""

_ALIGNMENT = 64
_BLOCK_BYTES = 1 << 20
"""Checksum and copy go block by block, so that the second finds the block in the processor's cache."""
_SUFFIX = ".weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{5,180}")


@dataclass(frozen=True, eq=False)
class RawBits:
    """A tensor of a type that NumPy lacks: its bits, and the type's name in `RAW_DTYPES`.

    With torch: `RawBits(tensor.view(torch.uint16).numpy(), "bfloat16")`, and back by `torch.from_numpy(raw.bits).view(torch.bfloat16)`.
    """

    bits: npt.NDArray[np.generic]
    dtype: str


Weight = npt.NDArray[np.generic] | RawBits


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    checksum: int
    """CRC-32 of its bytes."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one `write` left in a segment. Travels on the control link."""

    segment: str
    num_bytes: int
    tensors: tuple[TensorEntry, ...]


class SharedWeights:
    """The owner's side of one segment. The name starts with the prefix that `remove_segments` is given. One thread."""

    def __init__(self, name: str) -> None:
        _check_name(name)
        self._name = name
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._is_closed = False

    def write(self, tensors: Iterable[tuple[str, Weight]]) -> Manifest:
        """Copy these tensors in, over the last ones. Takes them one by one, so they need not all be in memory at once.

        Raises:
            ChannelError: a type that does not travel, a name that comes twice, or no room in shared memory.
        """
        if self._is_closed:
            raise ChannelClosed(f"the shared weights {self._name} are closed")
        entries: dict[str, TensorEntry] = {}
        offset = 0
        for name, weight in tensors:
            if name in entries:
                raise ChannelError(f"tensor {name!r} comes twice")
            dtype, shape, source = _bytes_of(name, weight)
            target = np.frombuffer(self._at_least(offset + len(source)), np.uint8, len(source), offset) if len(source) else source
            entries[name] = TensorEntry(name, dtype, shape, offset, _copy(source, target))
            offset += len(source) + -len(source) % _ALIGNMENT
        return Manifest(self._name, offset, tuple(entries.values()))

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


class SharedWeightsReader:
    """The reading side; keeps its mappings from one `read` to the next. Never removes a segment. One thread."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}

    def read(self, manifest: Manifest) -> Iterator[tuple[str, Weight]]:
        """The tensors, as read-only views that show the segment: valid until the owner's next `write`.

        All are verified before the first is given, so that nobody loads half of something broken.

        Raises:
            ChannelError: the segment is gone, or tensors differ from what was written; they are named.
            DecodeError: a manifest that does not fit its segment.
        """
        segment = self._attach(manifest)
        weights: list[tuple[str, Weight]] = []
        differing = []
        for entry in manifest.tensors:
            raw = _view(segment, entry, manifest.num_bytes)
            if zlib.crc32(raw.data) != entry.checksum:
                differing.append(entry.name)
            values = raw.view(_storage(entry.dtype)).reshape(entry.shape)
            weights.append((entry.name, RawBits(values, entry.dtype) if entry.dtype in RAW_DTYPES else values))
        if differing:
            shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise ChannelError(
                f"{len(differing)} of {len(manifest.tensors)} tensors in {manifest.segment} are not what was written: {shown}",
                now="Either they were written over while they were read, or memory is faulty. Please report this run.",
            )
        return iter(weights)

    def close(self) -> None:
        """Let go of the mappings. Views given out keep theirs alive. May be called twice."""
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
                mapped = mmap.mmap(file, status.st_size, prot=mmap.PROT_READ)
                self._maps[manifest.segment] = (status.st_ino, mapped)
            return mapped
        finally:
            os.close(file)


def remove_segments(prefix: str) -> int:
    """Remove every segment whose name starts so, for owners that were killed. Returns how many there were."""
    _check_name(prefix)
    found = [name for name in os.listdir(_directory()) if name.startswith(prefix) and name.endswith(_SUFFIX)]
    for name in found:
        _unlink(os.path.join(_directory(), name))
    return len(found)


def digest(tensors: Iterable[tuple[str, Weight]]) -> str:
    """SHA-256 over name, type, shape and bytes of each tensor, in the order of the names. In hexadecimal.

    >>> a, b = ("a", np.zeros(2)), ("b", np.ones(1))
    >>> digest([a, b]) == digest([b, a]), digest([a]) == digest([("a", np.zeros((2, 1)))])
    (True, False)
    """
    total = hashlib.sha256()
    for name, weight in sorted(tensors, key=lambda item: item[0]):
        dtype, shape, source = _bytes_of(name, weight)
        total.update(json.dumps([name, dtype, shape]).encode() + b"\n")
        total.update(source.data)
    return total.hexdigest()


def _bytes_of(name: str, weight: Weight) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    """Type, shape, and the bytes in C order, flat; a copy only of what is not contiguous."""
    values = weight.bits if isinstance(weight, RawBits) else np.asarray(weight)
    dtype = weight.dtype if isinstance(weight, RawBits) else values.dtype.name
    if values.dtype != (RAW_DTYPES if isinstance(weight, RawBits) else DTYPES).get(dtype):
        raise ChannelError(f"tensor {name!r} of type {dtype} (held as {values.dtype}) does not travel")
    return dtype, values.shape, np.asarray(values, order="C").reshape(-1).view(np.uint8)


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> int:
    checksum = 0
    for start in range(0, len(source), _BLOCK_BYTES):
        block = source[start : start + _BLOCK_BYTES]
        checksum = zlib.crc32(block.data, checksum)
        target[start : start + _BLOCK_BYTES] = block
    return checksum


def _view(segment: mmap.mmap | bytes, entry: TensorEntry, num_bytes: int) -> npt.NDArray[np.uint8]:
    if min(entry.shape, default=0) < 0 or len(entry.shape) > 32 or entry.offset < 0 or entry.offset % _ALIGNMENT:
        raise DecodeError(f"tensor {entry.name!r} of shape {entry.shape} at {entry.offset}")
    # Zeros are left out of this product: numpy refuses a shape whose other dimensions overflow, even if it is empty.
    if math.prod(size or 1 for size in entry.shape) * _storage(entry.dtype).itemsize > 1 << 62:
        raise DecodeError(f"tensor {entry.name!r} of shape {entry.shape} is too large")
    size = math.prod(entry.shape) * _storage(entry.dtype).itemsize
    if entry.offset + size > num_bytes:
        raise DecodeError(f"tensor {entry.name!r} ends at {entry.offset + size:,} of {num_bytes:,} bytes")
    return np.frombuffer(segment if size else b"", np.uint8, size, entry.offset if size else 0)


def _storage(dtype: str) -> np.dtype[np.generic]:
    found = DTYPES.get(dtype) or RAW_DTYPES.get(dtype)
    if found is None:
        raise DecodeError(f"a tensor of type {dtype!r}, which does not travel")
    return found


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
