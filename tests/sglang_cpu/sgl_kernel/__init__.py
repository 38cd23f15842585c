"""In place of SGLang's compiled kernels, on a CPU: the few that a plain decoder calls, in PyTorch. Others raise when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.0+torch"
__path__: list[str] = []
_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int) -> None:
    """table[row, start:end] = the next slots, for each request."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=False):
        table[row, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} has no stand-in on a CPU")

    return missing


def _murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of a seed of 64 bits, a position and a column: uint32 [rows, columns]. Source: Austin Appleby, smhasher."""

    def mix(state: Tensor, word: Tensor) -> Tensor:
        word = (word * 0xCC9E2D51) & _MASK
        word = ((word << 15) | (word >> 17)) & _MASK
        state = state ^ ((word * 0x1B873593) & _MASK)
        state = ((state << 13) | (state >> 19)) & _MASK
        return (state * 5 + 0xE6546B64) & _MASK

    seed = seed.to(torch.int64)
    state = mix(mix(torch.zeros_like(seed), seed & _MASK), (seed >> 32) & _MASK)
    state = mix(state, positions.to(torch.int64) & _MASK)
    state = mix(state[:, None], columns.to(torch.int64)[None] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
