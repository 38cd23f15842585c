"""A segment of shared memory that holds a model's weights and is overwritten by each new version.

    SharedWeights.write(tensors) -> Manifest --control link--> SharedWeightsReader.read(manifest)
    SharedWeights.write_spread: laid out here, written by PieceWriter in each process that holds pieces of the tensors

The segment is a file in /dev/shm (elsewhere, where there is none, in the temporary directory) and stays from one `write` to the next: fresh
pages cost several times what the copy costs. So a writer must not write while a reader still reads; the controller ensures that, and the
checksum of every tensor would show it. It is a plain mapped file and not `multiprocessing.shared_memory`, whose resource tracker (before
Python 3.13) takes every process that attaches for an owner and unlinks the segment while others use it.

The owner removes the file in `close`. An owner that is killed can't: its launcher calls `remove_segments` with the prefix that it gave.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import operator
import os
import re
import stat
import tempfile
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.payload import (
    BUCKET_BYTES,
    Changes,
    Manifest,
    PieceSums,
    TensorEntry,
    Written,
    laid_out,
    listed,
    named,
    padded,
    part_of,
)
from m2flow.channels.weights.tensors import (
    FLOATS,
    ROW_BYTES,
    Tied,
    Weight,
    add_row_hashes,
    bytes_of,
    checksum,
    copy_with_checksum,
    finish,
    storage,
    to_wire,
)
from m2flow.channels.weights.transport import Held, Receiver, Spread, Stage, Transport, WeightOptions
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, SpecError

_SUFFIX = ".weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{5,180}")


@final
class SharedWeights(Stage):
    """Owns and writes one segment. The name starts with the prefix that `remove_segments` is given. One thread."""

    takes_pieces = True

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

    def write_spread(self, spread: Spread, *, version: int = -1, dtype: str | None = None) -> Manifest:
        """Have processes write their pieces. Their row hashes, 16 bytes for each 8 KiB of weights, are held here until all are done."""
        if self._is_closed:
            raise ChannelClosed(f"the shared weights {self._name} are closed")
        self._held = {}
        entries = laid_out((name, dtype if dtype and kind in FLOATS else kind, shape) for name, kind, shape in spread.forms)
        num_bytes = entries[-1].offset + padded(entries[-1].num_bytes) if entries else 0
        if num_bytes:
            self._at_least(num_bytes)
        written = spread.write(Manifest(self._name, num_bytes, entries, version))
        entries = tuple(_summed(entries, written, self.body(num_bytes)))
        self._held = {entry.name: entry for entry in entries}
        return Manifest(self._name, num_bytes, entries, version)

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
class SharedMemory(Transport):
    """Receivers on the same host map the segment that a version is staged in."""

    stage_class = SharedWeights
    is_in_place = True

    def stage(self, name: str) -> SharedWeights:
        return SharedWeights(name)

    def sender(self, name: str, options: WeightOptions) -> None:
        return None

    def receiver(self, worker: str, options: WeightOptions) -> SharedWeightsReader:
        return SharedWeightsReader()


def _summed(entries: Sequence[TensorEntry], written: Sequence[Written], body: npt.NDArray[np.uint8]) -> Iterator[TensorEntry]:
    """Add the checksums: those of the pieces, which add up, and the few bytes after the last whole row as they lie in the segment."""
    of_tensors: list[list[PieceSums]] = [[] for _ in entries]
    for one in written:
        for piece in one.pieces:
            of_tensors[piece.tensor].append(piece)
    for entry, pieces in zip(entries, of_tensors, strict=True):
        if (num_bytes := sum(piece.num_bytes for piece in pieces)) != entry.num_bytes:
            raise ChannelError(
                f"the ranks of a trainer have written {num_bytes:,} bytes of {entry.name!r}, which has {entry.num_bytes:,}",
                now="Each rank's `weight_pieces` must be what no other has, and together all.",
            )
        rows = np.zeros((2, entry.num_bytes // ROW_BYTES), np.uint64)
        for piece in pieces:
            own = np.frombuffer(piece.rows, np.uint64).reshape(2, -1)
            rows[:, piece.first_row : piece.first_row + own.shape[1]] += own
        total = finish(rows, part_of(body, entry)[rows.shape[1] * ROW_BYTES :])
        yield msgspec.structs.replace(entry, checksum=total)


@final
class PieceWriter:
    """Writes pieces of tensors to the segment of another process of this host; keeps its mapping from one version to the next. One thread.

    Memory: pieces that lie in this host's memory as they are sent are copied from there. Others (of a GPU, of another type, columns of a
    matrix) go through one buffer of `bucket_bytes`. Beside it there are the row hashes, 16 bytes for each 8 KiB that the pieces span.
    """

    def __init__(self) -> None:
        self._mapped: tuple[int, mmap.mmap] | None = None

    def write(self, pieces: Iterable[tuple[str, Sequence[int], Any]], manifest: Manifest, bucket_bytes: int = BUCKET_BYTES) -> Written:
        """Write this process's pieces.

        Args:
            pieces: the tensor's name, where the piece begins in each dimension, and its values, a torch tensor. A generator that is not
                read to its end is closed, so that it can say so to others.
            manifest: says where each tensor lies and what type it is sent as; its checksums are not known yet.
        Raises:
            ChannelError: a piece is of no tensor, or does not fit it; or the segment is gone.
        """
        with contextlib.ExitStack() as stack:
            if isinstance(pieces, Generator):
                stack.enter_context(contextlib.closing(pieces))
            return self._written(pieces, manifest, bucket_bytes)

    def _written(self, pieces: Iterable[tuple[str, Sequence[int], Any]], manifest: Manifest, bucket_bytes: int) -> Written:
        body = np.frombuffer(self._attach(manifest), np.uint8, manifest.num_bytes)
        numbers = {entry.name: number for number, entry in enumerate(manifest.tensors)}
        bucket = _Bucket(bucket_bytes)
        found = []
        for name, start, values in pieces:
            if (number := numbers.get(name, -1)) < 0:
                raise ChannelError(f"a piece of {name!r} came, which is no tensor of this version")
            entry = manifest.tensors[number]
            kind = str(values.dtype).removeprefix("torch.")
            if kind != entry.dtype and not {kind, entry.dtype} <= set(FLOATS):
                raise ChannelError(f"a piece of {name!r} is {kind}, and the tensor is sent as {entry.dtype}")
            ends = list(map(operator.add, start, values.shape))
            if not len(start) == values.ndim == len(entry.shape) or min(start, default=0) < 0 or any(map(operator.gt, ends, entry.shape)):
                raise ChannelError(f"a piece of {name!r} from {list(start)} to {ends} is not within {list(entry.shape)}")
            if values.numel():
                found.append(_Piece(entry, part_of(body, entry), bucket, start, values.detach()).written(number))
        return Written(found)

    def close(self) -> None:
        """Drop the mapping. May be called twice."""
        self._mapped = None

    def _attach(self, manifest: Manifest) -> mmap.mmap | bytes:
        if manifest.num_bytes == 0:
            return b""
        with _opened(manifest, os.O_RDWR) as (file, status):
            inode, mapped = self._mapped or (-1, None)
            if mapped is None or inode != status.st_ino or len(mapped) < manifest.num_bytes:
                mapped = mmap.mmap(file, status.st_size)
                self._mapped = (status.st_ino, mapped)
            return mapped


class _Bucket:
    """A buffer that is made when it is first needed."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes: npt.NDArray[np.uint8] | None = None

    def first(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            self._bytes = np.empty(self.num_bytes, np.uint8)
        return self._bytes[:num_bytes]


class _Piece:
    """Copies one piece of a tensor to its place, and hashes it as it lies there."""

    def __init__(self, entry: TensorEntry, target: npt.NDArray[np.uint8], bucket: _Bucket, start: Sequence[int], values: Any) -> None:
        self._target, self._bucket, self._dtype = target, bucket, entry.dtype
        self._values = values if values.ndim else values.reshape(1)
        self._shape, self._start = (entry.shape or (1,)), (tuple(start) or (0,))
        self._item_bytes = storage(entry.dtype).itemsize
        self._hashed = len(target) // ROW_BYTES * ROW_BYTES
        stride = self._item_bytes * math.prod(self._shape[1:])
        self._first_row = min(self._start[0] * stride, self._hashed) // ROW_BYTES
        last = min((self._start[0] + len(self._values)) * stride, self._hashed)
        self._rows = np.zeros((2, -(-last // ROW_BYTES) - self._first_row), np.uint64)

    def written(self, number: int) -> PieceSums:
        self._write(self._values, self._shape, self._start, 0)
        return PieceSums(number, self._values.numel() * self._item_bytes, self._first_row, self._rows.tobytes())

    def _write(self, values: Any, shape: Sequence[int], start: Sequence[int], offset: int) -> None:
        """Write values into a part of the tensor of that shape, which begins at the offset."""
        stride = self._item_bytes * math.prod(shape[1:])
        is_run = tuple(values.shape[1:]) == tuple(shape[1:])
        if is_run and values.device.type == "cpu" and str(values.dtype) == f"torch.{self._dtype}" and values.is_contiguous():
            raw = bytes_of("", next(weight for _, weight in to_wire([("", values)]) if not isinstance(weight, Tied)))[2]
            self._put(raw, offset + start[0] * stride)
        elif stride > self._bucket.num_bytes and len(shape) > 1:
            for index, of_one in enumerate(values.unbind(0), start[0]):
                self._write(of_one, shape[1:], start[1:], offset + index * stride)
        else:
            count = max(self._bucket.num_bytes // stride, 1)
            for index in range(0, len(values), count):
                self._through_bucket(values[index : index + count], shape, start, offset + (start[0] + index) * stride)

    def _through_bucket(self, values: Any, shape: Sequence[int], start: Sequence[int], offset: int) -> None:
        """Convert some rows in the bucket, with zeros where other pieces are, and write them from there."""
        import torch

        size = len(values) * self._item_bytes * math.prod(shape[1:])
        raw, place = self._bucket.first(size), self._target[offset : offset + size]
        box = (slice(None), *(slice(first, first + count) for first, count in zip(start[1:], values.shape[1:], strict=True)))
        into, target = (
            torch.from_numpy(part).view(getattr(torch, self._dtype)).view(len(values), *shape[1:])[box] for part in (raw, place)
        )
        if into.numel() * self._item_bytes == size:
            into.copy_(values)
            self._put(raw, offset)
            return
        raw[:] = 0
        into.copy_(values)
        self._hash(raw, offset, None)
        target.copy_(into)

    def _put(self, raw: npt.NDArray[np.uint8], offset: int) -> None:
        place = self._target[offset : offset + len(raw)]
        num_hashed = self._hash(raw, offset, place)
        place[num_hashed:] = raw[num_hashed:]

    def _hash(self, raw: npt.NDArray[np.uint8], offset: int, target: npt.NDArray[np.uint8] | None) -> int:
        """Hash, and copy if there is a target, what is not after the last whole row; return how many bytes that is."""
        num_hashed = max(min(len(raw), self._hashed - offset), 0)
        add_row_hashes(raw[:num_hashed], offset, self._rows, self._first_row, target)
        return num_hashed


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
        with _opened(manifest, os.O_RDONLY) as (file, status):
            inode, mapped = self._maps.get(manifest.segment, (-1, None))
            if mapped is None or inode != status.st_ino or len(mapped) < manifest.num_bytes:
                # Private and writable, since torch has no read-only tensors and takes it without a copy; nothing is written.
                mapped = mmap.mmap(file, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                self._maps[manifest.segment] = (status.st_ino, mapped)
            return mapped


@contextlib.contextmanager
def _opened(manifest: Manifest, how: int) -> Iterator[tuple[int, os.stat_result]]:
    """Open the segment of a manifest that somebody sent."""
    _check_name(manifest.segment)
    try:
        file = os.open(_path(manifest.segment), how | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ChannelError(f"the shared weights {manifest.segment} are gone", now="The process that published them has ended.") from None
    except OSError as error:
        raise ChannelError(f"the shared weights {manifest.segment} can't be read: {error}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ChannelError(f"the shared weights {manifest.segment} belong to somebody else")
        if not 0 < manifest.num_bytes <= status.st_size:
            raise DecodeError(f"a manifest of {manifest.num_bytes:,} bytes for a segment of {status.st_size:,}")
        yield file, status
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
