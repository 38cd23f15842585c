"""Encode parcels and batches as bytes, without pickle, and decode them with every size checked.

    Parcel --encode--> [head frame, large column, ...] --decode--> Parcel

    head frame   magic "m2f", format version u8, header length u32 (little-endian), header (msgpack), small columns
    large column one array of more than `INLINE_BYTES`, as it lies in memory, cut into frames of `FRAME_BYTES`

Every array starts on a multiple of 8 bytes. Offsets are not transmitted: they follow from the shapes in the header, in their order
(identities first; of a ragged column the offsets, then the values), so there are no positions to forge. Small columns share one frame,
because many small frames cost more than one copy. Large ones are not copied by the sender, nor by the receiver if they came in one frame;
a frame has a bound, so that a peer can't make us allocate memory by announcing one.

Checked: every size before anything is viewed or allocated, ragged offsets, booleans. Not checked: what the numbers and texts mean.
Little-endian machines only.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.channel import Parcel
from m2flow.errors import ChannelError, DecodeError
from m2flow.samples import Batch, Column, Ragged

FORMAT = 1
"""Increased with every change of the layout; a peer of another format is refused with both numbers."""

INLINE_BYTES = 128 * 1024
"""Columns up to this size are copied into the head frame. A frame costs two processes some 30 microseconds, whatever its size; a copy of
so many bytes less, as long as it goes to memory that was used before (`m2flow.channels.shared_memory`)."""

FRAME_BYTES = 4 << 20
"""Large columns travel in pieces of this size."""
MAX_FRAMES = 1 << 16
"""Frames of a message: 256 GiB of large columns."""

MAX_HEADER_BYTES = 16 << 20
MAX_HEAD_BYTES = 64 << 20
"""Bytes of the head frame: the header and the small columns."""
MAX_DIMENSIONS = 8

Buffer = bytes | bytearray | memoryview
Dtype = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
DTYPES: dict[str, np.dtype[np.generic]] = {name: np.dtype(name) for name in get_args(Dtype)}
"""The closed list of what may travel."""
_NAMES: dict[np.dtype[np.generic], Dtype] = {dtype: cast("Dtype", name) for name, dtype in DTYPES.items()}
"""Keyed by the dtype, since `dtype.name` builds a new string at each access. Big-endian types are not in it."""

_PREFIX = struct.Struct("<3sBI")
_PAIR = struct.Struct("<2q")
_MAGIC = b"m2f"
_ALIGNMENT = 8
_PADDING = [bytes(-left % _ALIGNMENT) for left in range(_ALIGNMENT)]
_ONE_FRAME = (1 << 63) - 1
_INT64, _BOOL = DTYPES["int64"], DTYPES["bool"]
_SMALL_BYTES = 2048
"""Up to this size, a copy of an array's bytes costs less than a view of them."""
_FEW_BYTES = 16 * 1024
"""Up to this size, `bytes.translate` is faster than a numpy reduction."""
_FEW_ROWS = 8
"""Up to this many, Python comparisons are faster than numpy's."""

assert sys.byteorder == "little", "the wire format is little-endian, and arrays are viewed in place"


_Kind = Literal["dense", "numbers", "text", "json"]
_ColumnHeader = tuple[str, _Kind, Dtype, tuple[int, ...]]
"""Name, kind, type, and the shape of the values. A plain tuple, since each parcel has one for each of its columns."""


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    call: int
    sender: str
    num_rows: int
    inline_bytes: int
    columns: tuple[_ColumnHeader, ...]


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)


def encode(parcel: Parcel) -> list[bytes | memoryview]:
    """Encode a parcel as frames. Large columns are views of the batch, which must not change until they have been sent.

    Raises:
        ChannelError: a column of a type that does not travel, or more columns than fit; they are named.
    """
    frames = _encode(parcel, INLINE_BYTES)
    if len(frames[0]) > MAX_HEAD_BYTES:
        raise ChannelError(
            f"{len(parcel.batch.columns)} columns make a head of {len(frames[0]):,} bytes; at most {MAX_HEAD_BYTES:,} travel"
        )
    return frames


def cut(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Cut the frames of large columns into pieces of `FRAME_BYTES`, as they go on the wire."""
    pieces = list(frames[:1])
    for frame in frames[1:]:
        pieces += [frame] if len(frame) <= FRAME_BYTES else [frame[i : i + FRAME_BYTES] for i in range(0, len(frame), FRAME_BYTES)]
    if len(pieces) > MAX_FRAMES:
        raise ChannelError(
            f"columns of {num_frame_bytes(frames):,} bytes make {len(pieces):,} frames; at most {MAX_FRAMES:,} travel together"
        )
    return pieces


def decode(frames: Sequence[Buffer]) -> Parcel:
    """Decode the frames of a parcel; its arrays are read-only views of them. (A frame that starts off an 8-byte boundary is copied once.)

    Raises:
        DecodeError: these are not the frames of a parcel.

    >>> batch = Batch(np.array([4, 5]), {"text": Ragged.texts(["up", "down"])})
    >>> parcel = decode(encode(Parcel(7, batch, "rollout-0")))
    >>> parcel.call, parcel.sender, parcel.batch.ids.tolist(), parcel.batch.ragged("text").item(1)
    (7, 'rollout-0', [4, 5], 'down')
    """
    if not frames:
        raise DecodeError("a message without frames")
    head = _aligned(frames[0])
    header, start = _read_header(head)
    arrays = _ArrayReader(head, frames[1:], start, header.inline_bytes)
    num_rows, take, only_row = header.num_rows, arrays.take, arrays.only_row
    ids = take(_INT64, (num_rows,), "ids")
    columns: dict[str, Column] = {}
    for name, kind, dtype_name, shape in header.columns:
        dtype = DTYPES[dtype_name]
        if kind == "dense":
            if shape[:1] != (num_rows,):
                raise DecodeError(f"column {name!r}: shape {shape} in a batch of {num_rows} rows")
            columns[name] = values = take(dtype, shape, name)
        else:
            if kind != "numbers" and (dtype_name != "uint8" or len(shape) != 1):
                raise DecodeError(f"column {name!r}: {kind} of type {dtype_name} {shape}")
            found = only_row(dtype, shape) if num_rows == len(shape) == 1 else None
            if found is None:
                offsets = cast("npt.NDArray[np.int64]", take(_INT64, (num_rows + 1,), name))
                values = take(dtype, shape, name)
                if not _do_rise(offsets, shape[0]):
                    raise DecodeError(f"column {name!r}: offsets that do not rise from 0 to its {shape[0]} values")
            else:
                offsets, values = found
            columns[name] = Ragged(values, offsets, kind)
        if dtype is _BOOL:
            _check_booleans(values, name)
    arrays.finish()
    if len(columns) != len(header.columns):
        names = [column[0] for column in header.columns]
        raise DecodeError(f"column {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return Parcel(header.call, Batch(cast("npt.NDArray[np.int64]", ids), columns), header.sender)


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as one contiguous piece, for segment files and control messages. Raises `ChannelError` as `encode` does."""
    return bytes(_encode(Parcel(0, batch, ""), _ONE_FRAME)[0])


def decode_batch(data: Buffer) -> Batch:
    """Decode what `encode_batch` wrote; the arrays are read-only views of `data`. Raises `DecodeError`."""
    return decode([data]).batch


def _encode(parcel: Parcel, inline_bytes: int) -> list[bytes | memoryview]:
    batch = parcel.batch
    arrays = [_travelling(batch.ids, "ids")]
    columns: list[_ColumnHeader] = []
    for name, column in batch.columns.items():
        if type(column) is Ragged:
            offsets, values, kind = column.offsets, _travelling(column.values, name), column.kind
            if offsets.dtype != _INT64 or offsets.item(0) != 0 or offsets.item(-1) != len(values):
                raise ChannelError(f"column {name!r} has offsets that do not fit its values")
            arrays += (offsets if offsets.flags.c_contiguous else np.ascontiguousarray(offsets), values)
            columns.append((name, kind, _NAMES[values.dtype], values.shape))
        else:
            arrays.append(values := _travelling(cast("npt.NDArray[np.generic]", column), name))
            columns.append((name, "dense", _NAMES[values.dtype], values.shape))
    header = _header_encoder.encode(_Header(parcel.call, parcel.sender, len(batch), inline_bytes, tuple(columns)))
    if len(header) > MAX_HEADER_BYTES:
        raise ChannelError(f"{len(columns)} columns need a header of {len(header):,} bytes; at most {MAX_HEADER_BYTES:,} travel")
    head: list[Buffer] = [_PREFIX.pack(_MAGIC, FORMAT, len(header)), header, _PADDING[len(header) % _ALIGNMENT]]
    large: list[bytes | memoryview] = []
    for array in arrays:
        num_bytes = array.nbytes
        if num_bytes > inline_bytes:
            large.append(array.data.cast("B"))
        elif num_bytes:
            head.append(array.tobytes() if num_bytes <= _SMALL_BYTES else array.data)
            if num_bytes % _ALIGNMENT:
                head.append(_PADDING[num_bytes % _ALIGNMENT])
    return [b"".join(head), *large]


def _travelling(array: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
    if array.dtype not in _NAMES:
        raise ChannelError(f"column {name!r} is of type {array.dtype}, which does not travel; these do: {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMENSIONS:
        raise ChannelError(f"column {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} travel")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _read_header(frame: memoryview) -> tuple[_Header, int]:
    if len(frame) < _PREFIX.size:
        raise DecodeError(f"a message of {len(frame)} bytes is too short to be ours")
    magic, version, num_header_bytes = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise DecodeError(f"a message that starts with {bytes(frame[:4])!r} is not ours")
    if version != FORMAT:
        raise DecodeError(
            f"a message in wire format {version}; this process speaks {FORMAT}", now="Run the same version of m2flow on every worker."
        )
    if num_header_bytes > min(MAX_HEADER_BYTES, len(frame) - _PREFIX.size):
        raise DecodeError(f"a header of {num_header_bytes:,} bytes in a frame of {len(frame):,}")
    end = _PREFIX.size + num_header_bytes
    try:
        header = _header_decoder.decode(frame[_PREFIX.size : end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"the header of a message is broken: {error}") from None
    if header.num_rows < 0 or header.inline_bytes < 0:
        raise DecodeError(f"a header with {header.num_rows} rows, inlined up to {header.inline_bytes} bytes")
    return header, end + -end % _ALIGNMENT


class _ArrayReader:
    """Cut the arrays of a message out of its frames, in the header's order."""

    __slots__ = ("_head", "_inline_bytes", "_large", "_next", "_next_large", "_num_values", "_offsets", "_size")
    _offsets: npt.NDArray[np.int64]

    def __init__(self, head: memoryview, large: Sequence[Buffer], start: int, inline_bytes: int) -> None:
        self._head = head
        self._size = len(head)
        self._large = large
        self._next = start
        self._next_large = 0
        self._inline_bytes = inline_bytes
        self._num_values = -1

    def take(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str) -> npt.NDArray[np.generic]:
        num_bytes = shape[0] * dtype.itemsize if len(shape) == 1 and 0 < shape[0] < 1 << 56 else self._num_bytes(dtype, shape, name)
        start = self._next
        if 0 < num_bytes <= self._inline_bytes:
            if num_bytes > self._size - start:
                raise DecodeError(f"column {name!r}: {num_bytes:,} bytes by its shape, {max(self._size - start, 0):,} left in the frame")
            self._next = start + num_bytes + -num_bytes % _ALIGNMENT
            if len(shape) == 1:
                return np.frombuffer(self._head, dtype, shape[0], start)  # Half the time of `np.ndarray`.
            return np.ndarray(shape, dtype, self._head, start)
        if num_bytes == 0:
            empty = np.zeros(shape, dtype)
            empty.flags.writeable = False
            return empty
        if self._next_large == len(self._large):
            raise DecodeError(f"column {name!r}: its frame is missing")
        return np.ndarray(shape, dtype, self._next_frame(num_bytes, name))

    def only_row(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.generic]] | None:
        """Offsets and values of a ragged column with one row, if both are in the head and valid; else None, and `take` raises the error.
        Columns of as many values share their offsets."""
        (num_values,) = shape
        start, num_bytes = self._next, num_values * dtype.itemsize
        end = start + 16 + num_bytes
        if not 0 < num_bytes <= self._inline_bytes >= 16 or end > self._size or _PAIR.unpack_from(self._head, start) != (0, num_values):
            return None
        self._next = end + -end % _ALIGNMENT
        if self._num_values != num_values:
            self._num_values, self._offsets = num_values, np.frombuffer(self._head, _INT64, 2, start)
        return self._offsets, np.frombuffer(self._head, dtype, num_values, start + 16)

    def _next_frame(self, num_bytes: int, name: str) -> memoryview:
        """The next large column, joined from its pieces. They have arrived already, so a forged size allocates nothing."""
        pieces, found = [], 0
        while found < num_bytes and self._next_large < len(self._large):
            pieces.append(memoryview(self._large[self._next_large]))
            found += pieces[-1].nbytes
            self._next_large += 1
        if found != num_bytes:
            raise DecodeError(f"column {name!r}: {num_bytes:,} bytes by its shape, {found:,} in its frames")
        return _aligned(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    @staticmethod
    def _num_bytes(dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str) -> int:
        if len(shape) == 1 and 0 <= shape[0] < 1 << 56:
            return shape[0] * dtype.itemsize
        if not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0:
            raise DecodeError(f"column {name!r}: shape {shape}")
        num_bytes = math.prod(shape) * dtype.itemsize
        # An empty shape may hide dimensions that numpy refuses for their product.
        if (num_bytes or math.prod(size or 1 for size in shape) * dtype.itemsize) > 1 << 62:
            raise DecodeError(f"column {name!r}: shape {shape} is too large")
        return num_bytes

    def finish(self) -> None:
        if self._next != self._size or self._next_large != len(self._large):
            raise DecodeError("a message with bytes left over")


def _do_rise(offsets: npt.NDArray[np.int64], end: int) -> bool:
    """Whether offsets rise from 0 to `end` without ever falling."""
    if len(offsets) <= _FEW_ROWS:
        known = offsets.tolist()
        return bool(known[0] == 0 and known[-1] == end and known == sorted(known))
    return bool(offsets[0] == 0 and offsets[-1] == end and (offsets[1:] >= offsets[:-1]).all())


def _check_booleans(values: npt.NDArray[np.generic], name: str) -> None:
    """Refuse bytes above 1, with which numpy's boolean operations disagree with each other (`a & b`, `a == True`, indexing)."""
    if values.size and (values.tobytes().translate(None, b"\0\1") if values.size <= _FEW_BYTES else int(values.view(np.uint8).max()) > 1):
        raise DecodeError(f"column {name!r}: bytes that are not booleans")


def _aligned(frame: Buffer) -> memoryview:
    if type(frame) is bytes:
        return memoryview(frame)  # Python aligns what it allocates.
    view = memoryview(frame)
    if not view.c_contiguous:
        raise DecodeError("a frame that is not contiguous")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if view.nbytes and np.frombuffer(view, np.uint8).ctypes.data % _ALIGNMENT:
        view = memoryview(bytes(view))
    return view.toreadonly()


def num_frame_bytes(frames: Iterable[Buffer]) -> int:
    """Count the bytes that these frames put on the wire."""
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames)
