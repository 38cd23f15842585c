"""The payload of a publication of weights: the manifest that describes it, and its bytes, in buckets or as what changed.

The manifest has every tensor's name, type, shape, offset and checksum, and where it can be fetched. It travels on the control link; the
bytes never do. `compare_checksums` is the check that ends every sync.

Bytes go in buckets of one size, double-buffered: one bucket is filled while the other is in flight.

    sender     blocks --copied in the caller's thread--> two buffers --send, in a thread of its own-->
    receiver   --receive, in a thread of its own--> two buffers --unpack_buckets--> (entry, bytes) in the caller's thread

Gathering, converting and loading stay in the caller's thread, because engines do them with collectives or on a device whose context
belongs to a thread. Neither side holds more than two buckets, and one tensor where it spans several.

A delta has what changed since another version as positions and values, for when few values change, and is applied to that version.

    Changes.add(name, dtype, old, new), ...  ->  (Change, ...) and a body        applied(entry, change, body, held) -> the new tensor

Values are compared as bits. Each changed tensor takes the smallest of three forms: `offsets`: for blocks of 65,536 values how many of each
changed (uint32) and where in it (uint16), then the values; `mask`: one bit a value, then the values; `whole`. A bfloat16 tensor takes the
first with up to 1/16 of its values changed, the second with up to 15/16, and else the third. The result is checked against the checksum of
the whole tensor.

Source: most bfloat16 weights do not move in a step of RL, since at its learning rates a change is below half a unit in the last place:
SparseRL-Sync, arXiv:2605.07330, which sends positions and values. Theirs are 32-bit indices; blocks and masks are ours.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.tensors import (
    RawBits,
    Tied,
    Weight,
    bytes_of,
    checksum,
    checksum_on_device,
    num_bytes_of,
    storage,
    to_wire,
    weight_of,
)
from m2flow.errors import DecodeError

# ---- the manifest


ALIGNMENT = 64
"""Every tensor starts at a multiple of it."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a publication."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start."""
    checksum: int
    """Checksum of its bytes (`m2flow.channels.weights.tensors`)."""

    @property
    def num_bytes(self) -> int:
        """Size by type and shape. Raises `DecodeError` for a shape that can't exist."""
        return num_bytes_of(self.name, self.dtype, self.shape)


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What changed in one tensor; tensors without a `Change` are as in the base version."""

    name: str
    kind: str
    """`offsets`, `mask` or `whole` (`m2flow.channels.weights.payload`)."""
    num: int
    """Values that changed."""
    offset: int
    """Offset of its part in the body."""


class Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A body of bytes that is a whole model, or what changed since another version."""

    version: int
    base: int
    """The version that it changes; -1: it is whole."""
    num_bytes: int
    """Bytes of the body."""
    tensors: tuple[TensorEntry, ...]
    """Tensors of the whole model, with the checksums that it then has."""
    tied: tuple[tuple[str, str], ...] = ()
    """Further names: the name, and which tensor it names."""
    changes: tuple[Change, ...] = ()


class DeviceBuffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Device memory that other processes can map."""

    handle: bytes
    num_bytes: int


class DeviceLoan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the tensors of a manifest lie on a device."""

    device: str
    buffers: tuple[DeviceBuffer, ...]
    places: tuple[tuple[int, int], ...]
    """Buffer of each tensor, and its offset there."""


class Probe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A few sequences with the trainer's log-probabilities, to prove a weight sync by."""

    version: int
    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Log-probability of each token but the first."""
    tolerance: float
    """Mean absolute difference that the receiver may have, in nats."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A published version of a role's weights."""

    segment: str
    """The shared memory that it is staged in."""
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    version: int = -1
    tied: tuple[tuple[str, str], ...] = ()
    files: tuple[str, ...] = ()
    """A whole model and the changes since, oldest first; a receiver with an earlier version needs only the last ones."""
    address: str = ""
    """Address of the `BroadcastServer`."""
    lent: DeviceLoan | None = None
    """Where they lie on a device of this host (`m2flow.channels.weights.device`)."""
    probe: Probe | None = None
    """What an engine with these weights must compute."""
    stream: str = ""
    """Address of the `StreamServer`, and its token."""
    base: tuple[TensorEntry, ...] = ()
    """Where only adapters are published: the weights that they are added to, which the receiver has; offsets are unused."""

    def whole(self) -> Content:
        return Content(self.version, -1, self.num_bytes, self.tensors, self.tied)


class PieceSums(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The row hashes of a piece of a tensor, which one of several processes wrote (`m2flow.channels.weights.tensors`)."""

    tensor: int
    """Its number in the manifest."""
    num_bytes: int
    first_row: int
    rows: bytes
    """uint64 [2, R] of the rows from the first on; other pieces' bytes count as zeros."""


class Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one of several processes has written of a version."""

    pieces: list[PieceSums]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Lay tensors out one after the other, by name, type and shape; checksums are 0."""
    entries, offset = [], 0
    for name, dtype, shape in tensors:
        entries.append(TensorEntry(name, dtype, shape, offset, 0))
        offset += padded(entries[-1].num_bytes)
    return tuple(entries)


def padded(num_bytes: int) -> int:
    """Round a size up to the alignment.

    >>> padded(0), padded(1), padded(64)
    (0, 64, 64)
    """
    return num_bytes + -num_bytes % ALIGNMENT


def part_of(body: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """A tensor's bytes in a body. Raises `DecodeError`: it lies outside, or is not aligned."""
    if entry.offset < 0 or entry.offset % ALIGNMENT or entry.offset + entry.num_bytes > len(body):
        raise DecodeError(f"tensor {entry.name!r} of shape {entry.shape} at {entry.offset:,} does not fit {len(body):,} bytes")
    return body[entry.offset : entry.offset + entry.num_bytes]


def named(content: Content, parts: Iterable[tuple[TensorEntry, npt.NDArray[np.uint8]]]) -> Iterator[tuple[str, Weight]]:
    """Yield the tensors of a content under all of their names, from their bytes."""
    others: dict[str, list[str]] = {}
    for name, to in content.tied:
        others.setdefault(to, []).append(name)
    for entry, raw in parts:
        weight = weight_of(entry.dtype, entry.shape, raw)
        for name in (entry.name, *others.get(entry.name, ())):
            yield name, weight


class TensorChecksum(NamedTuple):
    """Name, type, shape and checksum of a tensor that one side holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


def array_checksums(tensors: Iterable[tuple[str, Weight]]) -> Iterator[TensorChecksum]:
    """Compute the checksums of tensors in this host's memory. For those on a GPU: `tensor_checksums`."""
    for name, weight in tensors:
        dtype, shape, raw = bytes_of(name, weight)
        yield TensorChecksum(name, dtype, shape, checksum(raw))


def tensor_checksums(tensors: Iterable[tuple[str, Any]]) -> Iterator[TensorChecksum]:
    """Compute the checksums of engines' tensors. Of those on a GPU only row hashes leave it."""
    for name, tensor in tensors:
        if isinstance(tensor, np.ndarray | RawBits) or tensor.device.type == "cpu":
            yield from array_checksums((each, weight) for each, weight in to_wire([(name, tensor)]) if not isinstance(weight, Tied))
        else:
            yield TensorChecksum(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum_on_device(tensor))


def compare_checksums(entries: Sequence[TensorEntry], held: Iterable[TensorChecksum]) -> tuple[list[str], set[str]]:
    """Compare held tensors with a manifest. Returns the names of those that differ, and of those that are not held in the same form."""
    wanted = {entry.name: entry for entry in entries}
    wrong, missing = [], set(wanted)
    for name, dtype, shape, total in held:
        entry = wanted.get(name)
        if entry is not None and (dtype, shape) == (entry.dtype, entry.shape):
            missing.discard(name)
            if total != entry.checksum:
                wrong.append(name)
    return wrong, missing


def listed(names: Sequence[str]) -> str:
    """Join the first few names for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---- buckets


Bytes = npt.NDArray[np.uint8]

BUCKET_BYTES = 16 << 20
"""Large enough to make a message's fixed cost negligible, small enough for two to stay in a server CPU's cache."""


def send_buckets(blocks: Iterable[Bytes], send: Callable[[Bytes], None], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Send blocks of any size as buckets of one size; the last may be shorter. Raises what `send` or the blocks raise."""
    free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[Bytes, int] | None] = queue.SimpleQueue()
    failed: list[BaseException] = []
    for _ in range(2):
        free.put(np.empty(bucket_bytes, np.uint8))

    def drain() -> None:
        while (item := full.get()) is not None:
            buffer, size = item
            if not failed:
                try:
                    send(buffer[:size])
                except BaseException as error:
                    failed.append(error)
            free.put(buffer)

    thread = threading.Thread(target=drain, name="m2flow-bucket-sender", daemon=True)
    thread.start()
    try:
        buffer, size = free.get(), 0
        for block in blocks:
            start = 0
            while start < len(block):
                if size == bucket_bytes:
                    full.put((buffer, size))
                    buffer, size = free.get(), 0
                    if failed:
                        raise failed[0]
                taken = min(len(block) - start, bucket_bytes - size)
                buffer[size : size + taken] = block[start : start + taken]
                start, size = start + taken, size + taken
        if size:
            full.put((buffer, size))
    finally:
        full.put(None)
        thread.join()
    if failed:
        raise failed[0]


def receive_buckets(receive: Callable[[Bytes], None], num_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bytes]:
    """Yield the buckets of a stream, each valid until the next is taken. `receive` fills the buffer it is given; its errors pass on."""
    free: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[Bytes, int] | BaseException] = queue.SimpleQueue()
    for _ in range(2):
        free.put(np.empty(min(bucket_bytes, num_bytes), np.uint8))

    def fill() -> None:
        try:
            for start in range(0, num_bytes, bucket_bytes):
                buffer, size = free.get(), min(bucket_bytes, num_bytes - start)
                if buffer is None:
                    return
                receive(buffer[:size])
                full.put((buffer, size))
        except BaseException as error:
            full.put(error)

    thread = threading.Thread(target=fill, name="m2flow-bucket-receiver", daemon=True)
    thread.start()
    try:
        for _ in range(0, num_bytes, bucket_bytes):
            item = full.get()
            if isinstance(item, BaseException):
                raise item
            yield item[0][: item[1]]
            free.put(item[0])
    finally:
        free.put(None)  # If the caller stops in the middle, the thread ends at the next bucket.


def unpack_buckets(buckets: Iterable[Bytes], entries: Sequence[TensorEntry], num_bytes: int) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield the tensors of a body that comes in buckets, in the order of their offsets; each is valid until the next is taken.

    Raises:
        DecodeError: tensors overlap or lie outside, or the stream is short.
    """
    source = iter(buckets)
    bucket, start = np.zeros(0, np.uint8), 0
    for entry in entries:
        size = entry.num_bytes
        if entry.offset < start or entry.offset % 64 or entry.offset + size > num_bytes:
            raise DecodeError(f"tensor {entry.name!r} at {entry.offset:,} does not follow what came before it")
        while size and entry.offset >= start + len(bucket):
            start += len(bucket)
            bucket = _next(source, entry)
        first = bucket[entry.offset - start :][:size] if size else bucket[:0]
        if len(first) == size and (first.ctypes.data % 8 == 0):
            yield entry, first
            continue
        whole, done = np.empty(size, np.uint8), len(first)
        whole[:done] = first
        while done < size:
            start += len(bucket)
            bucket = _next(source, entry)
            taken = bucket[: size - done]
            whole[done : done + len(taken)] = taken
            done += len(taken)
        yield entry, whole
    for _ in source:  # The rest is padding, which the sender has to get rid of.
        pass


def join_buckets(buckets: Iterable[Bytes], num_bytes: int) -> Bytes:
    """Join the buckets of a small body."""
    body, done = np.empty(num_bytes, np.uint8), 0
    for bucket in buckets:
        body[done : done + len(bucket)] = bucket
        done += len(bucket)
    return body


def blocks_of(body: Bytes, entries: Sequence[TensorEntry]) -> Iterator[Bytes]:
    """Yield a body as one block, after checking that it holds the entries."""
    for entry in entries:
        part_of(body, entry)
    yield body


def _next(source: Iterator[Bytes], entry: TensorEntry) -> Bytes:
    bucket = next(source, None)
    if bucket is None or not len(bucket):
        raise DecodeError(f"the stream ends before tensor {entry.name!r}")
    return bucket


# ---- what changed since another version


_BLOCK = 1 << 16
_SAMPLED_STRIDE = 64
_SAMPLED_BYTES = 4096


@final
class Changes:
    """Collect the differences while a version is written over another.

    Args:
        most_bytes: gives up where the differences take more than this.
        hopeless: gives up where more than this share of values changed, in a sample of one page in 64.
    """

    def __init__(self, most_bytes: float, *, hopeless: float = 0.5) -> None:
        self._most_bytes = most_bytes
        self._hopeless = hopeless
        self._changes: list[Change] = []
        self._parts: list[Bytes] = []
        self.num_bytes = 0
        self.num_values = 0
        self.num_changed = 0
        self.is_given_up = False

    def add(self, name: str, dtype: str, old: Bytes, new: Bytes) -> None:
        """Compare the bytes of a tensor, before and now."""
        if self.is_given_up or not len(new):
            return
        words = np.dtype(f"u{storage(dtype).itemsize}")
        before, now = old.view(words), new.view(words)
        if self._is_hopeless(before, now):
            self.give_up()
            return
        differs = before != now
        num = int(np.count_nonzero(differs))
        self.num_values += len(now)
        self.num_changed += num
        if not num:
            return
        kind, pieces = _encoded(now, differs, num)
        self._changes.append(Change(name, kind, num, self.num_bytes))
        for piece in pieces:
            self._parts.append(piece)
            self.num_bytes += padded(len(piece))
        if self.num_bytes > self._most_bytes:
            self.give_up()

    def give_up(self) -> None:
        """Stop collecting: there is nothing to compare with, or too much changed."""
        self.is_given_up = True
        self._changes, self._parts = [], []

    def result(self) -> tuple[tuple[Change, ...], Bytes] | None:
        """The changes and the body that they refer to; None after `give_up`."""
        if self.is_given_up:
            return None
        body, offset = np.zeros(self.num_bytes, np.uint8), 0
        for piece in self._parts:
            body[offset : offset + len(piece)] = piece
            offset += padded(len(piece))
        return tuple(self._changes), body

    def _is_hopeless(self, before: npt.NDArray[np.generic], now: npt.NDArray[np.generic]) -> bool:
        size = _SAMPLED_BYTES // now.itemsize
        whole = len(now) // (size * _SAMPLED_STRIDE) * size * _SAMPLED_STRIDE
        if not whole:
            return False
        first, second = (words[:whole].reshape(-1, size)[::_SAMPLED_STRIDE] for words in (before, now))
        return bool((first != second).mean() > self._hopeless)


def applied(entry: TensorEntry, change: Change, body: Bytes, held: Bytes) -> Bytes:
    """Apply a change to a tensor's bytes in the base version; returns the new bytes. Raises `DecodeError`: the change does not fit."""
    words = np.dtype(f"u{storage(entry.dtype).itemsize}")
    num_values = entry.num_bytes // words.itemsize
    if len(held) != entry.num_bytes or not 0 < change.num <= num_values or not 0 <= change.offset <= len(body):
        raise DecodeError(f"a change of {change.num:,} values of {change.name!r}, which has {num_values:,}")
    parts = _Parts(change.name, body, change.offset)
    if change.kind == "whole":
        return parts.take(entry.num_bytes).copy()
    new = held.copy()
    values = new.view(words)
    if change.kind == "mask":
        is_new = np.unpackbits(parts.take((num_values + 7) // 8), count=num_values).view(np.bool_)
        if int(np.count_nonzero(is_new)) != change.num:
            raise DecodeError(f"a mask of {change.name!r} that does not mark {change.num:,} values")
        values[is_new] = parts.take(change.num * words.itemsize).view(words)
        return new
    if change.kind != "offsets":
        raise DecodeError(f"a change of kind {change.kind!r} of {change.name!r}")
    num_blocks = -(-num_values // _BLOCK)
    counts = parts.take(4 * num_blocks).view(np.uint32).astype(np.int64)
    if int(counts.sum()) != change.num:
        raise DecodeError(f"blocks of {change.name!r} that do not have {change.num:,} values")
    positions = np.repeat(np.arange(num_blocks, dtype=np.int64) * _BLOCK, counts)
    positions += parts.take(2 * change.num).view(np.uint16)
    if int(positions.max()) >= num_values:
        raise DecodeError(f"a change of {change.name!r} at {int(positions.max()):,} of {num_values:,}")
    values[positions] = parts.take(change.num * words.itemsize).view(words)
    return new


def changes_by_name(content: Content) -> dict[str, Change]:
    return {change.name: change for change in content.changes}


def updated(
    parts: Iterable[tuple[TensorEntry, Bytes]], updates: Sequence[tuple[dict[str, Change], Bytes]]
) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Apply deltas to tensors as they pass: each is its changes by name, and its body; the oldest first."""
    for entry, raw in parts:
        for changes, body in updates:
            change = changes.get(entry.name)
            if change is not None:
                raw = applied(entry, change, body, raw)
        yield entry, raw


def _encoded(now: npt.NDArray[np.generic], differs: npt.NDArray[np.bool_], num: int) -> tuple[str, Sequence[Bytes]]:
    """Encode the changed values in the smallest form; returns its kind and its parts."""
    size, num_blocks = now.itemsize, -(-len(now) // _BLOCK)
    costs = {"offsets": 4 * num_blocks + num * (2 + size), "mask": (len(now) + 7) // 8 + num * size, "whole": len(now) * size}
    kind = min(costs, key=lambda name: costs[name])
    if kind == "whole":
        return kind, [now.view(np.uint8).copy()]
    if kind == "mask":
        return kind, [np.packbits(differs), now[differs].view(np.uint8)]
    positions = np.flatnonzero(differs)
    counts = np.bincount(positions // _BLOCK, minlength=num_blocks).astype(np.uint32)
    return kind, [counts.view(np.uint8), (positions % _BLOCK).astype(np.uint16).view(np.uint8), now[positions].view(np.uint8)]


class _Parts:
    """Read the parts of a change from a body, one after the other."""

    def __init__(self, name: str, body: Bytes, offset: int) -> None:
        self._name = name
        self._body = body
        self._offset = offset

    def take(self, num_bytes: int) -> Bytes:
        end = self._offset + num_bytes
        if self._offset % 64 or end > len(self._body):
            raise DecodeError(f"a change of {self._name!r} ends at {end:,} of {len(self._body):,} bytes")
        part = self._body[self._offset : end]
        self._offset += padded(num_bytes)
        return part
