"""Low-rank adapters beside Megatron's matrices, whose own weights are frozen.

    rows --matrix, of which tensor ranks have columns--> numbers of this rank     + scale B A x: B's rows of this rank, all of A
    numbers of this rank --matrix, of which they have rows--> rows, summed        + scale B A x: all of B, A's columns of this rank

A matrix of Megatron's is several of a checkpoint's, each with an adapter of its own or without one; results go where those of the matrix
go. They are added to what the matrix computes: in half precision a small adapter is not lost in a sum with weights.

Where each tensor rank has a part of the sum that A's or B's gradient is, the ranks add them up before a step (`is_partial`).

Source: Hu et al. 2021, LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.engines.megatron.names import Place, key_of


@dataclass
class Switch:
    """Whether adapters count, of all of a model."""

    is_on: bool = True


class Adapters(torch.nn.Module):  # type: ignore[misc]
    """Of one matrix, as a submodule of it.

    Args:
        scales: by the checkpoint's names of the weights that have an adapter.
        weight: this rank's part of the matrix. mappings: Megatron's, of tensors between tensor ranks, of which there are `count`.
    """

    def __init__(
        self, config: Any, place: Place, rank: int, scales: Mapping[str, float], weight: Tensor, count: int, switch: Switch, mappings: Any
    ) -> None:
        super().__init__()
        self._place, self._scales, self._switch, self._mappings = place, scales, switch, mappings
        self._splits_rows, self._head = config.sequence_parallel, config.kv_channels
        num_out, num_in = weight.shape
        self._widths = [num_out // len(place.names)] * len(place.names)
        if place.kind == "qkv":
            num_queries = config.num_attention_heads // config.num_query_groups
            of_key = num_out // (num_queries + 2)
            self._widths = [of_key * num_queries, of_key, of_key]
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name, width in zip(place.names, self._widths, strict=True):
            if name in scales:
                self.a[key_of(name)] = torch.nn.Parameter(torch.zeros(rank, num_in, dtype=config.params_dtype))
                self.b[key_of(name)] = torch.nn.Parameter(torch.zeros(width, rank, dtype=config.params_dtype))
                self.a[key_of(name)].is_partial = place.dim == 0 and count > 1
                self.b[key_of(name)].is_partial = place.dim == 1 and self._splits_rows

    def added_to(self, found: Tensor, x: Tensor) -> Tensor:
        """What the matrix computed, with what adapters add to it.

        Args:
            x: what came in, [R or R / tp, 1, inputs here]. found: [R / tp or R, 1, outputs here].
        """
        if not self._switch.is_on:
            return found
        return found + (self._of_columns(x) if self._place.dim == 0 else self._of_rows(x))

    def _of_columns(self, x: Tensor) -> Tensor:
        if self._splits_rows:
            x = self._mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        else:
            x = self._mappings.copy_to_tensor_model_parallel_region(x)
        found = []
        for name, width in zip(self._place.names, self._widths, strict=True):
            if name in self._scales:
                found.append(x @ self.a[key_of(name)].T @ self.b[key_of(name)].T * self._scales[name])
            else:
                found.append(x.new_zeros(*x.shape[:-1], width))
        if self._place.kind == "qkv":  # For each group of keys and values, its queries, its key and its value.
            groups = self._widths[1] // self._head
            return torch.cat([one.unflatten(-1, (groups, -1)) for one in found], -1).flatten(-2)
        return torch.cat(found, -1)

    def _of_rows(self, x: Tensor) -> Tensor:
        (name,) = self._place.names
        inner = x @ self.a[key_of(name)].T
        if self._splits_rows:
            inner = self._mappings.reduce_scatter_to_sequence_parallel_region(inner)
        else:
            inner = self._mappings.reduce_from_tensor_model_parallel_region(inner)
        return inner @ self.b[key_of(name)].T * self._scales[name]


def put_on(matrix: Any, adapters: Adapters) -> None:
    """Have one of Megatron's matrices compute with adapters."""
    matrix.adapters = adapters
    matrix.register_forward_hook(lambda module, given, found: (module.adapters.added_to(found[0], given[0]), *found[1:]))
