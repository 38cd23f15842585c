"""What travels of a model: tensors by Hugging Face name, as NumPy arrays or as the raw bits of a type that NumPy lacks.

A stream of weights is an iterable of (name, `Weight`), so that tensors may come one by one and need not all be in memory. One that lies
on the memory of an earlier one (tied embeddings) comes as `Tied`: it is sent once and named twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import DTYPES
from m2flow.errors import ChannelError, DecodeError

RAW_DTYPES: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
"""Types that NumPy lacks, and what their bits travel as."""

MAX_DIMENSIONS = 32
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RawBits:
    """A tensor of a type that NumPy lacks: its bits, and the type's name in `RAW_DTYPES`.

    With torch: `RawBits(tensor.view(torch.uint16).numpy(), "bfloat16")`, and back by `torch.from_numpy(raw.bits).view(torch.bfloat16)`.
    """

    bits: npt.NDArray[np.generic]
    dtype: str


@dataclass(frozen=True)
class Tied:
    """A name for a tensor that came before."""

    to: str
    """Its name."""


Weight = npt.NDArray[np.generic] | RawBits


def bytes_of(name: str, weight: Weight) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    """Type, shape, and the bytes in C order, flat; a copy only of what is not contiguous. Raises `ChannelError`: it does not travel."""
    values = weight.bits if isinstance(weight, RawBits) else np.asarray(weight)
    dtype = weight.dtype if isinstance(weight, RawBits) else values.dtype.name
    if values.dtype != (RAW_DTYPES if isinstance(weight, RawBits) else DTYPES).get(dtype):
        raise ChannelError(f"tensor {name!r} of type {dtype} (held as {values.dtype}) does not travel")
    return dtype, values.shape, np.asarray(values, order="C").reshape(-1).view(np.uint8)


def weight_of(dtype: str, shape: tuple[int, ...], raw: npt.NDArray[np.uint8]) -> Weight:
    """The tensor that these bytes are; a view."""
    values = raw.view(storage(dtype)).reshape(shape)
    return RawBits(values, dtype) if dtype in RAW_DTYPES else values


def storage(dtype: str) -> np.dtype[np.generic]:
    """What NumPy holds a type as. Raises `DecodeError` for a type that does not travel."""
    found = DTYPES.get(dtype) or RAW_DTYPES.get(dtype)
    if found is None:
        raise DecodeError(f"a tensor of type {dtype!r}, which does not travel")
    return found


def num_bytes_of(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor, checked. Raises `DecodeError`: there is no such tensor."""
    if min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"tensor {name!r} of shape {shape}")
    # Zeros are left out of this product: numpy refuses a shape whose other dimensions overflow, even if it is empty.
    if math.prod(size or 1 for size in shape) * storage(dtype).itemsize > 1 << 62:
        raise DecodeError(f"tensor {name!r} of shape {shape} is too large")
    return math.prod(shape) * storage(dtype).itemsize


def once(tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T | Tied]]:
    """The stream with what lies on the same memory as an earlier tensor named only.

    Two tensors share memory only while both exist: a name for memory that was freed and taken again would be wrong. So a stream of
    temporaries has no ties.
    """
    seen: dict[object, tuple[str, weakref.ref[object]]] = {}
    for name, tensor in tensors:
        held: Any = tensor.bits if isinstance(tensor, RawBits) else tensor
        where = _memory_of(held)
        first = seen.get(where) if where is not None else None
        if first is not None and first[1]() is not None:
            yield name, Tied(first[0])
            continue
        if where is not None:
            seen[where] = (name, weakref.ref(held))
        yield name, tensor


def _memory_of(tensor: Any) -> object:
    """Where a NumPy array or a torch tensor lies and how, if it takes any room."""
    if isinstance(tensor, np.ndarray):
        return (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype.str) if tensor.size else None
    if not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), str(tensor.device)


def digest(tensors: Iterable[tuple[str, Weight]]) -> str:
    """SHA-256 over name, type, shape and bytes of each tensor, in the order of the names. In hexadecimal.

    >>> a, b = ("a", np.zeros(2)), ("b", np.ones(1))
    >>> digest([a, b]) == digest([b, a]), digest([a]) == digest([("a", np.zeros((2, 1)))])
    (True, False)
    """
    total = hashlib.sha256()
    for name, weight in sorted(tensors, key=lambda item: item[0]):
        dtype, shape, source = bytes_of(name, weight)
        total.update(json.dumps([name, dtype, shape]).encode() + b"\n")
        total.update(source.data)
    return total.hexdigest()
