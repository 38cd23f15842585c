r"""What of ours stands in the layers of Megatron's model: packed and latent attention, norms, routers of experts, adapters of matrices.

Packed attention, norms and rotary positions stand in the place of Megatron's own in a layer's specification. They run on any device, with
the attention of all trainers (`m2flow.engines.models.packing`): rows have positions of their own, and a prompt that samples share goes
through the model once. Over context-parallel ranks each has some of the rows, and in the attention all rows of some of the heads
(`m2flow.engines.distributed.sequence_parallel`).

    Packed [1, R] --filled up, this rank's rows--> ids [1, R / cp], positions, layout --the model's layers--> hidden states [R / cp, 1, H]

Multi-head latent attention of DeepSeek V2 and V3 stands in the place of Megatron's attention.

    hidden states --down--> latent of queries --norm, up--> heads' queries      (or hidden states --> queries, without a latent)
                  --down--> latent of keys and values --norm, up--> heads' keys and values
                        \--> one rotary key, which all heads have beside their own

Projections down are whole on every tensor rank, each of which computes its own rows; projections up are split by heads. The rotary key is
gathered over the ranks, and its gradient is the sum of what their heads have of it. Megatron's own module splits the projections down
where it does without Transformer Engine, and its gradient of the rotary key is then that of one rank's heads.

Shapes: R rows of the packed micro-batch, H width, h heads of this rank, n size of a head's key without positions, r of the rotary key,
v of a value, c width of the latent.

Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

Routers: which experts the rows of a pass go to, on a rank, is replayed from a record, recorded, counted, and balanced.

    a pass's rows --packed_seq_params--> each layer --its `RouterReplay`--> the top k of the current logits, or the given experts
                                                                            gates are of the current logits

A layer tells its router before it runs which pass it runs, also when it is computed again in the backward pass, so neither the order of
interleaved stages nor recomputation mixes passes up. (Megatron's own replay is a queue for each router, filled in the schedule's order.)
What replay is for, and whose idea it is, says `m2flow.engines.models.routing`.

Shapes: R rows of a packed micro-batch, T predicted tokens, L layers, k experts of a token, E experts of a layer.
Low-rank adapters stand beside Megatron's matrices, whose own weights are frozen.

    rows --matrix, of which tensor ranks have columns--> numbers of this rank     + scale B A x: B's rows of this rank, all of A
    numbers of this rank --matrix, of which they have rows--> rows, summed        + scale B A x: all of B, A's columns of this rank

A matrix of Megatron's is several of a checkpoint's, each with an adapter of its own or without one; results go where those of the matrix
go. They are added to what the matrix computes: in half precision a small adapter is not lost in a sum with weights.

Where each tensor rank has a part of the sum that A's or B's gradient is, the ranks add them up before a step (`is_partial`).

Source: Hu et al. 2021, LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.distributed.sequence_parallel import RowShard, ToHeads, ToRows
from m2flow.engines.megatron.names import Place, key_of
from m2flow.engines.models.packing import Packed, packed_attention
from m2flow.engines.models.routing import Balanced, Loads, Mixture, are_others, check_layers

# ---- packed attention


class PositionedRotary(torch.nn.Module):  # type: ignore[misc]
    """In the place of `GPTModel.rotary_pos_emb`, which knows no positions but 0, 1, 2 ...: angles of the rows' positions."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, rows: Any = None, **_: Any) -> Any:
        return rows

    def forward(self, rows: Any, **_: Any) -> Tensor:
        angles = torch.outer(rows.shard.positions.to(self.frequencies), self.frequencies)
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


@dataclass(frozen=True)
class Modules:
    """What layers are made of: Transformer Engine's modules, or Megatron's own with our norms."""

    norm: Any
    """Made of a `TransformerConfig`, a width and an epsilon."""
    column: Any
    """A matrix whose columns tensor ranks split."""
    row: Any
    """A matrix whose rows they split."""
    has_grouped_experts: bool = False
    """A layer's experts of a rank are one module, which multiplies all of their matrices at once."""


class PackedCoreAttention(torch.nn.Module):  # type: ignore[misc]
    """The packed attention in the place of Megatron's core attention: [R / cp, 1, H, D] to [R / cp, 1, H D]."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Tensor:
        q, k, v = (heads.squeeze(1) for heads in (query, key, value))
        if self._group is not None:
            q, k, v = (ToHeads.apply(heads, self._group) for heads in (q, k, v))
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        out = packed_attention(self, q, k, v, None, scaling=self._scale, packed_layout=packed_seq_params.shard.layout)[0][0]
        if self._group is not None:
            out = ToRows.apply(out, self._group)
        return out.flatten(1).unsqueeze(1)


# ---- latent attention


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
    """Epsilon of the norms of latents."""

    @classmethod
    def of(cls, model: Any) -> Latent:
        """Read the latent attention of a transformers model from its configuration."""
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
        parallel: Megatron's `tensor_parallel`. modules: what norms and matrices up are.
    """

    def __init__(self, config: Any, latent: Latent, parallel: Any, modules: Modules, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._latent, self._parallel = latent, parallel
        self._splits_rows = config.sequence_parallel
        self._is_recomputed = config.recompute_granularity == "selective"
        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True, "tp_group": pg_collection.tp}
        how["is_expert"] = False

        def up(num_in: int, of_head: int) -> Any:
            return modules.column(num_in, config.num_attention_heads * of_head, gather_output=False, **how)

        width = config.hidden_size
        if latent.query_rank is None:
            self.linear_q_proj = up(width, latent.plain + latent.rotary)
        else:
            self.linear_q_down_proj = Down(config, width, latent.query_rank)
            self.q_layernorm = modules.norm(config, latent.query_rank, latent.eps)
            self.linear_q_up_proj = up(latent.query_rank, latent.plain + latent.rotary)
        self.linear_kv_down_proj = Down(config, width, latent.rank + latent.rotary)
        self.kv_layernorm = modules.norm(config, latent.rank, latent.eps)
        self.linear_kv_up_proj = up(latent.rank, latent.plain + latent.value)
        self.core_attention = PackedCoreAttention(config, softmax_scale=latent.scale, pg_collection=pg_collection)
        self.linear_proj = modules.row(config.num_attention_heads * latent.value, width, input_is_parallel=True, **how)

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


# ---- experts


Limit = Callable[[Tensor], Tensor]
"""A router's scores of all experts, [rows, E], to those that its top k is chosen from."""


@dataclass(eq=False)
class Routing:
    """The experts of a rank's rows of one pass. Of the rows of its context-parallel rank these are a part where tensor ranks split them."""

    start: int
    """First row, of all rows."""
    num_tokens: Tensor
    """float32 [rows]: how many predicted tokens each predicts."""
    given: Tensor | None
    """int64 [rows, L, k]: those that are replayed, -1 where unknown. None: the model's own."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By layer, where this rank has it: int64 [rows, k]."""
    num_rerouted: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the tokens for which the router would have chosen others."""
    balanced: Balanced | None = None
    """The losses of this rank's routers, over these rows."""

    @classmethod
    def of(cls, packed: Packed, shard: RowShard, mixture: Mixture, part: tuple[int, int], groups: Sequence[Any] = ()) -> Routing:
        """Route the rows of a rank to the experts that were recorded for them.

        Args:
            part: which of how many parts tensor ranks split them into. groups: those over which all rows are split.
        Raises:
            EngineError: the given experts are of another model.
        """
        number, count = part
        size = len(shard.positions) // count
        start = shard.start + number * size
        num_tokens = torch.bincount(shard.predictors, minlength=len(shard.positions)).float()
        given = None
        if packed.experts is not None:
            check_layers(packed.experts, mixture)
            given = packed.experts.new_full((size, *packed.experts.shape[1:]), -1)  # Rows that fill up are the model's own.
            known = packed.experts[start : start + size]
            given[: len(known)] = known
        balanced = None
        if packed.balanced is not None:
            place = torch.arange(packed.num_rows, device=num_tokens.device) - start
            balanced = packed.balanced.part(place.where(place < size, -1), groups)
        return cls(start, num_tokens[number * size : (number + 1) * size], given, balanced=balanced)

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts of a layer's rows, [rows, k], where the router itself would choose `own`."""
        chosen = own
        if self.given is not None:
            given = self.given[:, layer]
            chosen = given.where((given >= 0).all(-1, keepdim=True), own)
            self.num_rerouted[layer] = (are_others(own, chosen) * self.num_tokens).sum()
        self.chosen[layer] = chosen
        if self.balanced is not None:
            self.balanced.choose(layer, chosen)
        return chosen

    def count(self, loads: Loads, mixture: Mixture) -> None:
        """Add this rank's predicted tokens to the loads of the experts."""
        for layer, chosen in self.chosen.items():
            loads.add(layer, chosen, self.num_tokens, mixture)

    def share_rerouted(self, mixture: Mixture) -> float:
        """The sum over this rank's predicted tokens and layers of whether others were chosen, divided by L."""
        counts = list(self.num_rerouted.values())
        return float(torch.stack(counts).sum()) / mixture.num if counts else 0.0

    def everywhere(self, num_rows: int, mixture: Mixture, groups: Sequence[Any]) -> Tensor:
        """The experts of all rows in all layers, int32 [R, L, k]. Collective in each of the groups, whose ranks have some of them."""
        found = torch.zeros(num_rows, mixture.num, mixture.num_of_token, dtype=torch.int32, device=self.num_tokens.device)
        for layer, chosen in self.chosen.items():
            own = chosen[: max(num_rows - self.start, 0)]
            found[self.start : self.start + len(own), layer] = own.int()
        for group in groups:
            dist.all_reduce(found, group=group)
        return found


class Replay:
    """In the place of Megatron's `RouterReplay` at one router."""

    def __init__(self, router: int, limit: Limit | None) -> None:
        self._router, self._limit = router, limit
        self.routing: Routing | None = None
        """Routing of the pass that is being computed."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """What the router gets of its top k, [rows, k]: scores and experts."""
        scores = scores if self._limit is None else self._limit(scores)
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routing is None:
            return values, own
        chosen = self.routing.choose(self._router, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)


def limit_of(config: Any) -> Limit | None:
    """How a model of transformers limits the choice of experts. None: not at all.

    DeepSeek's experts are in groups, of which the best are kept: by their best expert, where those of the others score 0 (V2), or by the
    sum of their best two, where the others can't be chosen (V3). Megatron's own sums k / groups kept.
    """
    is_v3 = config.model_type == "deepseek_v3"
    if not is_v3 and getattr(config, "topk_method", "") != "group_limited_greedy":
        return None

    def limited(scores: Tensor) -> Tensor:
        groups = scores.unflatten(1, (config.n_group, -1))
        best = groups.topk(2 if is_v3 else 1, -1).values.sum(-1).topk(config.topk_group, -1, sorted=False).indices
        is_kept = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
        return groups.masked_fill(~is_kept[:, :, None], -math.inf if is_v3 else 0.0).flatten(1)

    return limited


def with_bias(router: Any) -> None:
    """Give a router of Megatron's a bias that its library does not move: `m2flow.engines.models.routing` says when it moves."""
    del router.expert_bias
    router.register_buffer("expert_bias", torch.zeros(router.config.num_moe_experts, dtype=torch.float32))


def route(layer: Any, number: int, limit: Limit | None) -> None:
    """Have one of Megatron's layers tell its router whose rows it computes, each time that it runs.

    Args:
        number: of the router, of all of the model's.
    """
    router = layer.mlp.router
    replay, gating = Replay(number, limit), router.gating
    router.router_replay = replay

    def taught(hidden: Tensor) -> Tensor:
        logits: Tensor = gating(hidden)
        if replay.routing is None or replay.routing.balanced is None:
            return logits
        return replay.routing.balanced.taught(number, logits.flatten(0, -2)).view_as(logits)

    router.gating = taught

    def tell(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        replay.routing = given["packed_seq_params"].routing

    layer.register_forward_pre_hook(tell, with_kwargs=True)


# ---- adapters


@dataclass
class Switch:
    """Whether adapters count, of all of a model."""

    is_on: bool = True


class Adapters(torch.nn.Module):  # type: ignore[misc]
    """The adapters of one matrix, as a submodule of it.

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
