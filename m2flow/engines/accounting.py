"""What an engine holds of its device, in bytes, by what it is; and whose bytes a tensor of any library are.

    Engine.memory() -> Memory: weights, gradients, optimiser, cache    (the rest of what a process takes are activations)

Counted from the tensors that are there, so an engine that has put something away shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes on the engine's device; of a trainer of several ranks, on the first one's."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Moments, and float32 copies of weights."""
    kv: int = 0
    """Keys and values."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.kv

    def words(self) -> str:
        """What there is, the largest first.

        >>> Memory(weights=3 << 20, kv=5 << 30).words()
        'kv 5.00 GiB, weights 3.00 MiB'
        """
        parts = sorted(((getattr(self, each.name), each.name) for each in fields(self)), reverse=True)
        return ", ".join(f"{name} {size_of(count)}" for count, name in parts if count) or "nothing"


def size_of(num_bytes: float) -> str:
    """
    >>> size_of(512), size_of(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def bytes_on(device: str, tensors: Iterable[Any]) -> int:
    """Of torch tensors that lie on a device of this kind; each piece of memory counts once."""
    kind = device.partition(":")[0]
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = _local(tensor)
        if local.device.type == kind and local.numel():
            found[local.data_ptr()] = max(found.get(local.data_ptr(), 0), local.numel() * local.element_size())
    return sum(found.values())


def _local(tensor: Any) -> Any:
    """This rank's part: of a DTensor, or of a parameter that DeepSpeed's stage 3 has spread."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    part = getattr(tensor, "ds_tensor", None)
    return tensor if part is None or tensor.numel() else part
