"""Describe a publication of weights: every tensor's name, type, shape, offset and checksum, and where it can be fetched.

A manifest travels on the control link; the bytes never do. `compare_checksums` is the check that ends every sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
    to_wire,
    weight_of,
)
from m2flow.errors import DecodeError

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
    """Of its bytes (`m2flow.channels.weights.tensors`)."""

    @property
    def num_bytes(self) -> int:
        """Size by type and shape. Raises `DecodeError` for a shape that can't exist."""
        return num_bytes_of(self.name, self.dtype, self.shape)


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What changed in one tensor; tensors without a `Change` are as in the base version."""

    name: str
    kind: str
    """`offsets`, `mask` or `whole` (`m2flow.channels.weights.delta`)."""
    num: int
    """Values that changed."""
    offset: int
    """Of its part in the body."""


class Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A body of bytes that is a whole model, or what changed since another version."""

    version: int
    base: int
    """The version that it changes; -1: it is whole."""
    num_bytes: int
    """Of the body."""
    tensors: tuple[TensorEntry, ...]
    """Of the whole model, with the checksums that it then has."""
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
    """Of each tensor: the buffer, and its offset there."""


class Probe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A few sequences with the trainer's log-probabilities, to prove a weight sync by."""

    version: int
    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Of each token but the first."""
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
