"""Packed micro-batches in Megatron's model: rows with positions of their own, prompts shared, sequences over context-parallel ranks.

    Packed [1, R] --filled up, this rank's rows--> ids [1, R / cp], positions, layout --the model's layers--> hidden states [R / cp, 1, H]

The modules here take the place of Megatron's own in a layer's specification. They use the packed attention of all trainers
(`m2flow.engines.models.packing`), so a prompt that samples share goes through the model once, and run on any device.

Over context-parallel ranks each has some of the rows, and in the attention all rows of some of the heads (Ulysses).

Shapes: R rows of the packed micro-batch, T predicted tokens, H heads, D size of a head.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.distributed.model_parallel import Gathered, with_rows
from m2flow.engines.models.packing import AttentionLayout, Packed, packed_attention


@dataclass(frozen=True, eq=False)
class Share:
    """A context-parallel rank's part of a packed micro-batch."""

    start: int
    """First row, of all rows."""
    input_ids: Tensor
    """int64 [1, R / cp]"""
    positions: Tensor
    """int64 [R / cp]"""
    layout: AttentionLayout
    """Layout of all rows."""
    which: Tensor
    """bool [T]: the tokens that its rows predict."""
    predictors: Tensor
    """int64: by which of its rows each of them is predicted."""

    @classmethod
    def of(cls, packed: Packed, group: Any, tp: int) -> Share:
        """The part of this rank of the group. Rows are filled up so that context and tensor parallel ranks divide them."""
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        num_more = -packed.num_rows % (count * tp)
        num_rows = (packed.num_rows + num_more) // count
        start = rank * num_rows

        def own(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows, (0, num_more))[:, start : start + num_rows]

        which = (packed.predictors >= start) & (packed.predictors < start + num_rows)
        layout = with_rows(packed.layout, packed.num_rows, num_more)
        return cls(start, own(packed.input_ids), own(packed.position_ids)[0], layout, which, packed.predictors[which] - start)


def gathered(values: Tensor, share: Share, group: Any) -> Tensor:
    """Gather what each of the T tokens has from the rank that computed it. Collective; the gradient is this rank's part."""
    if dist.get_world_size(group) == 1:
        return values
    found: Tensor = Gathered.apply(values, share.which, group)
    return found


class PositionedRotary(torch.nn.Module):  # type: ignore[misc]
    """In the place of `GPTModel.rotary_pos_emb`, which knows no positions but 0, 1, 2 ...: angles of the rows' positions."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, rows: Any = None, **_: Any) -> Any:
        return rows

    def forward(self, rows: Any, **_: Any) -> Tensor:
        angles = torch.outer(rows.share.positions.to(self.frequencies), self.frequencies)
        return torch.cat((angles, angles), -1)[:, None, None, :]


class RowNorm(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm in the place of Megatron's, which needs Apex or Transformer Engine for split rows."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # Its gradient is then a part of a sum.
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedCoreAttention(torch.nn.Module):  # type: ignore[misc]
    """The packed attention in the place of Megatron's core attention: [R / cp, 1, H, D] to [R / cp, 1, H D]."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Tensor:
        q, k, v = (heads.squeeze(1) for heads in (query, key, value))
        if self._group is not None:
            q, k, v = (_ToHeads.apply(heads, self._group) for heads in (q, k, v))
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        out = packed_attention(self, q, k, v, None, scaling=self._scale, packed_layout=packed_seq_params.share.layout)[0][0]
        if self._group is not None:
            out = _ToRows.apply(out, self._group)
        return out.flatten(1).unsqueeze(1)


def _to_heads(rows: Tensor, group: Any) -> Tensor:
    """[R / n, H, D] to [R, H / n, D]."""
    parts = rows.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.flatten(0, 1)


def _to_rows(heads: Tensor, group: Any) -> Tensor:
    """[R, H / n, D] to [R / n, H, D]."""
    parts = heads.unflatten(0, (dist.get_world_size(group), -1)).contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_heads(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_rows(grad, ctx.group), None


class _ToRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_rows(heads, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.group), None
