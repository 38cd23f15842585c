"""Tensors that may be spread over the ranks of a trainer (DTensor), and whole ones.

Looked at by their methods: a process that spreads nothing does not load torch's distributed tensors, which takes half a second.
"""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """As a whole, on every rank. Collective if the tensor is spread."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it. What is written there is written to the tensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, spread over the ranks as another of its shape is. Each rank has the whole, so nothing is sent."""
    if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
