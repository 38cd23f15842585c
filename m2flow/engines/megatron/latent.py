"""Multi-head latent attention of DeepSeek V2 and V3 in the place of Megatron's attention.

    hidden states --down--> latent of queries --norm, up--> heads' queries      (or hidden states --> queries, without a latent)
                  --down--> latent of keys and values --norm, up--> heads' keys and values
                        \\--> one rotary key, which all heads have beside their own

Projections down are whole on every tensor rank, each of which computes its own rows; projections up are split by heads. The rotary key is
gathered over the ranks, and its gradient is the sum of what their heads have of it. Megatron's own module splits the projections down
where it does without Transformer Engine, and its gradient of the rotary key is then that of one rank's heads.

Shapes: R rows of the packed micro-batch, H width, h heads of this rank, n size of a head's key without positions, r of the rotary key,
v of a value, c width of the latent.

Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.engines.megatron.rows import PackedCoreAttention, RowNorm


@dataclass(frozen=True)
class Latent:
    """What the attention of such a model has besides a `TransformerConfig`."""

    query_rank: int | None
    """Width of the latent of queries. None: they have none."""
    rank: int
    """c"""
    plain: int
    """n"""
    rotary: int
    """r"""
    value: int
    """v"""
    scale: float
    """What scores are multiplied by."""
    rotary_scale: float
    """What rotated numbers are multiplied by: YaRN's."""
    is_interleaved: bool
    """Pairs that are rotated lie next to each other, and not in the two halves."""
    eps: float
    """Of the norms of latents."""

    @classmethod
    def of(cls, model: Any) -> Latent:
        """Of a model of transformers, as it computes it."""
        config, attention = model.config, model.base_model.layers[0].self_attn
        return cls(
            config.q_lora_rank,
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            float(attention.scaling),
            float(model.base_model.rotary_emb.attention_scaling),
            bool(getattr(config, "rope_interleave", True)),
            float(attention.kv_a_layernorm.variance_epsilon),
        )

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate queries or keys [R, 1, h, r] by angles [R, 1, 1, r], whose halves are alike. The order of the result is that of halves:
        scores are the same in any."""
        half = angles[..., : self.rotary // 2]
        cos, sin = ((number * self.rotary_scale).to(x.dtype) for number in (half.cos(), half.sin()))
        first, second = (x[..., 0::2], x[..., 1::2]) if self.is_interleaved else x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Down(torch.nn.Module):  # type: ignore[misc]
    """A matrix that every tensor rank has whole, for its own rows."""

    def __init__(self, config: Any, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_out, num_in, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # Its gradient is then a part of a sum.

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class LatentAttention(torch.nn.Module):  # type: ignore[misc]
    """In the place of Megatron's self-attention: [R / tp, 1, H] to the same.

    Args:
        parallel: Megatron's `tensor_parallel`.
    """

    def __init__(self, config: Any, latent: Latent, parallel: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._latent, self._parallel = latent, parallel
        self._splits_rows = config.sequence_parallel
        self._is_recomputed = config.recompute_granularity == "selective"
        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True, "tp_group": pg_collection.tp}

        def up(num_in: int, of_head: int) -> Any:
            return parallel.ColumnParallelLinear(num_in, config.num_attention_heads * of_head, gather_output=False, **how)

        width = config.hidden_size
        if latent.query_rank is None:
            self.linear_q_proj = up(width, latent.plain + latent.rotary)
        else:
            self.linear_q_down_proj = Down(config, width, latent.query_rank)
            self.q_layernorm = RowNorm(config, latent.query_rank, latent.eps)
            self.linear_q_up_proj = up(latent.query_rank, latent.plain + latent.rotary)
        self.linear_kv_down_proj = Down(config, width, latent.rank + latent.rotary)
        self.kv_layernorm = RowNorm(config, latent.rank, latent.eps)
        self.linear_kv_up_proj = up(latent.rank, latent.plain + latent.value)
        self.core_attention = PackedCoreAttention(config, softmax_scale=latent.scale, pg_collection=pg_collection)
        self.linear_proj = parallel.RowParallelLinear(config.num_attention_heads * latent.value, width, input_is_parallel=True, **how)

    def forward(
        self, hidden: Tensor, attention_mask: Any = None, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = self._heads(hidden, rotary_pos_emb)

        def attend(*heads: Tensor) -> Tensor:
            found: Tensor = self.core_attention(*heads, packed_seq_params=packed_seq_params)
            return found

        is_recomputed = self._is_recomputed and torch.is_grad_enabled()
        found: tuple[Tensor, None] = self.linear_proj(
            self._parallel.checkpoint(attend, False, q, k, v) if is_recomputed else attend(q, k, v)
        )
        return found

    def _heads(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [R, 1, h, n + r], and values [R, 1, h, v]."""
        latent = self._latent
        if latent.query_rank is None:
            q, _ = self.linear_q_proj(hidden)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        q, q_turning = q.unflatten(-1, (-1, latent.plain + latent.rotary)).split((latent.plain, latent.rotary), -1)
        down, turning = self.linear_kv_down_proj(hidden).split((latent.rank, latent.rotary), -1)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(down))
        k, v = kv.unflatten(-1, (-1, latent.plain + latent.value)).split((latent.plain, latent.value), -1)
        if self._splits_rows:
            turning = self._parallel.gather_from_sequence_parallel_region(turning, tensor_parallel_output_grad=True)
        turned = latent.rotated(turning.unsqueeze(2), angles).expand(-1, -1, k.shape[2], -1)
        return torch.cat((q, latent.rotated(q_turning, angles)), -1), torch.cat((k, turned), -1), v
