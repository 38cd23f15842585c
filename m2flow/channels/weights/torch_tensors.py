"""Convert weights between engines' tensors and what is sent, and compute checksums on the device that they are on.

The only module of this package that knows torch tensors; it loads torch when it meets one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import m2flow.channels.weights.tensors as sums
from m2flow.channels.weights.manifest import TensorChecksum, array_checksums
from m2flow.channels.weights.tensors import RawBits, Tied, Weight

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ROWS_AT_ONCE = 8192
"""64 MB of a GPU's memory for the products."""
_SIGNED = {1: "uint8", 2: "int16"}


def to_wire(tensors: Iterable[tuple[str, Any]], dtype: str | None = None) -> Iterator[tuple[str, Weight | Tied]]:
    """Convert engines' tensors to NumPy arrays or raw bits, without a copy where they are on a CPU and keep their type.

    Args:
        dtype: type that floating-point tensors are converted to, one at a time (round to nearest, ties to even); None: keep theirs.
    """
    for name, tensor in tensors:
        if isinstance(tensor, Tied | RawBits):
            yield name, tensor
        elif isinstance(tensor, np.ndarray):
            yield name, _array(tensor, dtype)
        else:
            tensor = tensor.detach()
            kind = str(tensor.dtype).removeprefix("torch.")
            if dtype is not None and kind in _FLOATS and kind != dtype:
                import torch

                tensor = tensor.to(getattr(torch, dtype))
            yield name, _of_torch(tensor.cpu())


def on_device(tensors: Iterable[tuple[str, Any]], dtype: str | None = None) -> Iterator[tuple[str, Any]]:
    """Convert floating-point tensors to `dtype` on their own device, for lending them there (`to_wire` brings them to the host)."""
    import torch

    for name, tensor in tensors:
        if isinstance(tensor, Tied):
            yield name, tensor
            continue
        tensor = torch.as_tensor(tensor)
        is_float = str(tensor.dtype).removeprefix("torch.") in _FLOATS
        yield name, tensor.detach().to(getattr(torch, dtype)) if is_float and dtype is not None else tensor.detach()


def from_wire(weights: Iterable[tuple[str, Any]], like: object) -> Iterator[tuple[str, Any]]:
    """Convert what was received to the tensors that an engine loads.

    Args:
        weights: arrays or raw bits; torch tensors, which are on a device already, pass as they are.
        like: one of the engine's own tensors; engines on NumPy get arrays.
    """
    for name, weight in weights:
        if not isinstance(weight, np.ndarray | RawBits):
            yield name, weight
            continue
        if isinstance(like, np.ndarray) and not isinstance(weight, RawBits):
            yield name, weight
            continue
        import torch

        bits = weight.bits if isinstance(weight, RawBits) else weight
        if not bits.flags.writeable:
            bits = bits.view()
            try:
                # Works for memory that is private to this process: torch has no read-only tensors.
                bits.flags.writeable = True
            except ValueError:
                bits = bits.copy()
        tensor = torch.from_numpy(bits)
        yield name, tensor.view(getattr(torch, weight.dtype)) if isinstance(weight, RawBits) else tensor


def tensor_checksums(tensors: Iterable[tuple[str, Any]]) -> Iterator[TensorChecksum]:
    """Compute the checksums of engines' tensors. Of those on a GPU only row hashes leave it."""
    for name, tensor in tensors:
        if isinstance(tensor, np.ndarray | RawBits) or tensor.device.type == "cpu":
            yield from array_checksums((each, weight) for each, weight in to_wire([(name, tensor)]) if not isinstance(weight, Tied))
        else:
            yield TensorChecksum(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum_on_device(tensor))


def checksum_on_device(tensor: Any) -> int:
    """Compute `m2flow.channels.weights.tensors.checksum` of a torch tensor's bytes, on its device."""
    import torch

    if not tensor.numel():
        return sums.checksum(np.zeros(0, np.uint8))
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    num_rows = len(raw) // sums.ROW_BYTES
    first, second = (torch.from_numpy(keys.view(np.int64).copy()).to(raw.device) for keys in sums.row_keys())
    body = raw[: num_rows * sums.ROW_BYTES]
    words = body.view(torch.int64).view(num_rows, sums.ROW_WORDS) if num_rows else body.view(0, 1)
    rows = torch.empty(2, num_rows, dtype=torch.int64, device=raw.device)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        block = words[start : start + _ROWS_AT_ONCE]
        rows[0, start : start + len(block)] = (block * first).sum(1)
        rows[1, start : start + len(block)] = ((block >> 32 & 0xFFFFFFFF) * second).sum(1)
    return sums.finish(rows.cpu().numpy().view(np.uint64), raw[num_rows * sums.ROW_BYTES :].cpu().numpy())


def _array(array: Any, dtype: str | None) -> Weight:
    if dtype is None or array.dtype.name == dtype or array.dtype.name not in _FLOATS:
        return array  # type: ignore[no-any-return]
    if dtype != "bfloat16":
        return array.astype(dtype)  # type: ignore[no-any-return]
    import torch

    return _of_torch(torch.tensor(array).to(torch.bfloat16))


def _of_torch(tensor: Any) -> Weight:
    import torch

    kind = str(tensor.dtype).removeprefix("torch.")
    if kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = getattr(torch, _SIGNED[tensor.element_size()])
        return RawBits(tensor.view(bits).numpy().view(f"u{tensor.element_size()}"), kind)
    return tensor.numpy()  # type: ignore[no-any-return]
