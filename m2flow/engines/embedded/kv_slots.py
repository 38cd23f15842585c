"""A KV cache of slots, and the attention over it that is registered with transformers' models.

    model(..., attn="m2flow_slots", slot_pass=PrefillPass | DecodePass | DevicePass) --attend--> SlotCache

A sequence has one slot. Running sequences lie in slots 0..B-1 without a hole, so that decoding attends to a view of the cache
and gathers nothing. Tokens of all sequences are packed into one row for the model's linear layers; only prefill attention
pads, inside. transformers builds no mask: what a layer sees (all, a window or a chunk) is known from the engine's start
(`m2flow.engines.models.model_probe`), and its mask is computed here from positions. Keys outside of every window are not read, but stay in
the cache.

Legend: B sequences, P prompts, T packed tokens, H query heads, K key/value heads, R = H / K, L tokens in the cache, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from m2flow.engines.models.model_probe import Reach, Scoring, explicit_attention, scoring_of
from m2flow.errors import EngineError

ATTENTION_NAME = "m2flow_slots"

_LENGTH_STEP = 64


@final
class SlotCache:
    """Keys and values of all layers, each [slots, K, length, D]. Allocated at the first write, which knows heads and sizes."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_slots = 0
        self.length = 0
        self.generation = 0
        """Changes when keys and values lie elsewhere than before."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers; 0 before the first write."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self._layers.values() for t in pair)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(cached.numel() * cached.element_size() for pair in self._layers.values() for cached in pair)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def reserve(self, num_slots: int, length: int) -> None:
        """Grow to at least this number of slots of at least this length; contents stay."""
        length = -(-max(length, self.length) // _LENGTH_STEP) * _LENGTH_STEP
        num_slots = max(num_slots, self.num_slots)
        if (num_slots, length) == (self.num_slots, self.length):
            return
        with torch.inference_mode():
            for layer, pair in self._layers.items():
                self._layers[layer] = (_extended(pair[0], num_slots, length), _extended(pair[1], num_slots, length))
        self.num_slots, self.length = num_slots, length
        self.generation += 1

    def shrink_kv_cache(self, num_slots: int, length: int) -> None:
        """Shrink to the first so many slots, of this length or a little more."""
        length = min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, self.length)
        num_slots = min(num_slots, self.num_slots)
        if (num_slots, length) == (self.num_slots, self.length):
            return
        with torch.inference_mode():
            for layer in self._layers:  # One after the other: what there is of it twice is a layer.
                key, value = self._layers[layer]
                self._layers[layer] = key[:num_slots, :, :length].clone(), value[:num_slots, :, :length].clone()
        self.num_slots, self.length = num_slots, length
        self.generation += 1

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self.num_slots = self.length = 0
        self.generation += 1

    def layer(self, index: int, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, K, length, D] each."""
        pair = self._layers.get(index)
        if pair is None:
            pair = (self._empty(key_TKD), self._empty(value_TKD))
            self._layers[index] = pair
        return pair

    def move(self, targets: Sequence[int], sources: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of some slots over others; the two sets are disjoint."""
        with torch.inference_mode():
            for pair in self._layers.values():
                for cached in pair:
                    used = cached[:, :, :length]
                    index = torch.tensor([targets, sources], device=cached.device)
                    used.index_copy_(0, index[0], used.index_select(0, index[1]))

    def _empty(self, like_TKD: Tensor) -> Tensor:
        # Zeros, because masked values are multiplied by 0, and what memory happens to hold may be NaN.
        return like_TKD.new_zeros(self.num_slots, like_TKD.shape[1], self.length, like_TKD.shape[2])


class SlotPass(Protocol):
    """A forward pass: where its keys and values are written, and what its queries see."""

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scoring: Scoring) -> Tensor:
        """The attention's output, [T, H, D]."""
        ...


@final
class PrefillPass:
    """Prefill P packed prompts, each into one or more slots from `first_slot` on, in the order given."""

    def __init__(self, cache: SlotCache, lengths: Sequence[int], first_slot: int, prompt_of_slot: Sequence[int], device: str):
        self._cache = cache
        self._num_prompts, self._longest = len(lengths), max(lengths)
        self._first, self._last = first_slot, first_slot + len(prompt_of_slot)
        self._device = device
        self._masks: dict[Reach, Tensor] = {}
        self._prompt_of_slot = torch.tensor(prompt_of_slot, device=device)
        ends = np.cumsum(lengths)
        column = np.arange(self._longest)
        is_token_PL = column < np.asarray(lengths)[:, None]
        packed_PL = np.where(is_token_PL, (ends - lengths)[:, None] + column, 0)
        is_ragged = not bool(is_token_PL.all())
        self._pad = torch.from_numpy(packed_PL.reshape(-1)).to(device) if is_ragged else None
        self._unpad = torch.from_numpy(np.flatnonzero(is_token_PL)).to(device) if is_ragged else None

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scoring: Scoring) -> Tensor:
        cached_key, cached_value = self._cache.layer(layer, key_TKD, value_TKD)
        query, key, value = self._padded(query_THD), self._padded(key_TKD), self._padded(value_TKD)
        for cached, new in ((cached_key, key), (cached_value, value)):
            cached[self._first : self._last, :, : self._longest] = new.index_select(0, self._prompt_of_slot)
        # Padding is on the right, where a causal query never looks.
        if scoring.is_plain:
            visible = self._visible(scoring.reach_within(self._longest))
            seen = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                is_causal=visible is None,
                scale=scoring.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            seen = explicit_attention(query, key, value, self._visible(scoring.reach or Reach("window", self._longest)), scoring)
        packed = seen.transpose(1, 2).reshape(self._num_prompts * self._longest, seen.shape[1], seen.shape[3])
        return packed if self._unpad is None else packed.index_select(0, self._unpad)

    def _visible(self, reach: Reach | None) -> Tensor | None:
        """Which keys each query sees, bool [longest, longest]; None: all up to its own."""
        if reach is None:
            return None
        if reach not in self._masks:
            self._masks[reach] = reach.visible(self._longest, self._device)
        return self._masks[reach]

    def _padded(self, packed_TXD: Tensor) -> Tensor:
        rows = packed_TXD if self._pad is None else packed_TXD.index_select(0, self._pad)
        return rows.view(self._num_prompts, self._longest, *rows.shape[1:]).transpose(1, 2)


@final
class DecodePass:
    """Decode one new token for each of the slots 0..B-1 on a CPU; `positions` [B] is the number of tokens that a slot already holds."""

    def __init__(self, cache: SlotCache, positions: np.ndarray) -> None:
        self._cache = cache
        self._positions = positions
        self._num_slots = len(positions)
        self._seen = int(positions.max()) + 1
        self._index: dict[int, Tensor] = {}
        self._seen_by: dict[Reach | None, tuple[int, Tensor | None]] = {}

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scoring: Scoring) -> Tensor:
        B, K = self._num_slots, key_TKD.shape[1]
        cached_key, cached_value = self._cache.layer(layer, key_TKD, value_TKD)
        index = self._flat_index(K)
        for cached, new in ((cached_key, key_TKD), (cached_value, value_TKD)):
            cached.view(-1, cached.shape[3]).index_copy_(0, index, new.reshape(B * K, -1))
        first, visible = self._visible(scoring.reach_within(self._seen))
        seen = slice(first, self._seen)
        # On a CPU two batched products beat the fused kernel several times over, which is tiled for long queries.
        query = (query_THD * scoring.scaling).reshape(B * K, -1, query_THD.shape[2])
        scores = torch.bmm(query, cached_key.view(-1, self._cache.length, cached_key.shape[3])[: B * K, seen].transpose(1, 2))
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if visible is not None:
            scores.view(B, -1, scores.shape[-1]).add_(visible[:, None])
        if scoring.sinks is None:
            weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        else:
            sinks = scoring.sinks.to(scores.dtype).view(1, K, -1, 1).expand(B, -1, -1, -1).reshape(B * K, -1, 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)[..., :-1].to(scores.dtype)
        return torch.bmm(weights, cached_value.view(-1, self._cache.length, cached_value.shape[3])[: B * K, seen]).view(
            B, query_THD.shape[1], -1
        )

    def _visible(self, reach: Reach | None) -> tuple[int, Tensor | None]:
        """The first position that any slot sees, and from there on what each sees, [B, n]: 0, or -inf. None: all."""
        if reach not in self._seen_by:
            firsts = np.zeros_like(self._positions) if reach is None else reach.first_seen(self._positions)
            first = int(firsts.min())
            visible: Tensor | None = None
            if (self._positions != self._positions[0]).any():
                columns = np.arange(first, self._seen)
                is_seen = columns <= self._positions[:, None]
                if reach is not None:
                    is_seen &= columns >= firsts[:, None]
                visible = torch.zeros(is_seen.shape).masked_fill_(torch.from_numpy(~is_seen), float("-inf"))
            self._seen_by[reach] = first, visible
        return self._seen_by[reach]

    def _flat_index(self, num_heads: int) -> Tensor:
        if num_heads not in self._index:
            head = np.arange(self._num_slots * num_heads) * self._cache.length
            self._index[num_heads] = torch.from_numpy(head + np.repeat(self._positions, num_heads))
        return self._index[num_heads]


@final
class DevicePass:
    """As `DecodePass`, with positions that the device alone knows: no shape depends on them, so that a CUDA graph can hold the pass.

    Plain attention in half precision is FlashAttention's (Dao 2023, arXiv:2307.08691) as torch has it, which reads of each slot what it
    holds; any other reads `seen` tokens of each.

    Args:
        positions: int64 [B], the number of tokens that a slot already holds.
        seen: more than any position.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, seen: int) -> None:
        self._cache = cache
        self.positions = positions
        self._num_slots = len(positions)
        self._seen = seen
        self._index: dict[int, Tensor] = {}
        self._visible_by: dict[Reach | None, Tensor] = {}
        self._spans: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scoring: Scoring) -> Tensor:
        B, K = self._num_slots, key_TKD.shape[1]
        cached = self._cache.layer(layer, key_TKD, value_TKD)
        index = self._flat_index(K)
        for held, new in zip(cached, (key_TKD, value_TKD), strict=True):
            held.view(-1, held.shape[3]).index_copy_(0, index, new.reshape(B * K, -1))
        reach = scoring.reach_within(self._seen)
        if scoring.is_plain and (reach is None or reach.kind == "window") and is_flash_shape(query_THD, *cached):
            return self._flash(query_THD, *cached, scoring.scaling, reach)
        key, value = (held[:B, :, : self._seen] for held in cached)
        visible = self._visible(reach)[:, None, None]
        if scoring.sinks is not None:
            return explicit_attention(query_THD[:, :, None], key, value, visible, scoring).squeeze(2)
        # The query heads of a key head as queries of one: then nothing of the cache is repeated.
        grouped = query_THD.view(B, K, -1, query_THD.shape[2])
        return explicit_attention(grouped, key, value, visible, scoring).flatten(1, 2)

    def _flash(self, query_BHD: Tensor, cached_key: Tensor, cached_value: Tensor, scaling: float, reach: Reach | None) -> Tensor:
        num_heads = cached_key.shape[1]
        starts, firsts, lengths = self._flash_spans(num_heads)
        found: Tensor = torch.ops.aten._flash_attention_forward(
            query_BHD.contiguous(),
            as_rows(cached_key),
            as_rows(cached_value),
            starts,
            firsts,
            1,
            self._seen,
            0.0,
            False,
            False,
            scale=scaling,
            window_size_left=None if reach is None else reach.size - 1,
            window_size_right=None if reach is None else 0,
            seqused_k=lengths,
        )[0]
        return found

    def _flash_spans(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where each query and each slot starts, int32 [B + 1], and the tokens to read of each slot, int32 [B]."""
        if num_heads not in self._spans:
            starts = torch.arange(self._num_slots + 1, dtype=torch.int32, device=self.positions.device)
            self._spans[num_heads] = starts, starts * (num_heads * self._cache.length), (self.positions + 1).to(torch.int32)
        return self._spans[num_heads]

    def _visible(self, reach: Reach | None) -> Tensor:
        """What each slot sees of the first `seen` positions, bool [B, seen]."""
        if reach not in self._visible_by:
            columns, ends = torch.arange(self._seen, device=self.positions.device), self.positions[:, None]
            visible = columns <= ends
            if reach is not None:
                firsts = ends // reach.size * reach.size if reach.kind == "chunk" else ends - reach.size + 1
                visible &= columns >= firsts
            self._visible_by[reach] = visible
        return self._visible_by[reach]

    def _flat_index(self, num_heads: int) -> Tensor:
        if num_heads not in self._index:
            head = torch.arange(self._num_slots * num_heads, device=self.positions.device) * self._cache.length
            self._index[num_heads] = head + self.positions.repeat_interleave(num_heads, output_size=len(head))
        return self._index[num_heads]


def is_flash_shape(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention computes these: half precision on a GPU of compute capability 8 or more, and its head sizes."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    is_new: bool = torch.cuda.get_device_capability(query.device)[0] >= 8
    return is_new and size == value.shape[-1] and size % 8 == 0 and size <= 256


def as_rows(cached: Tensor) -> Tensor:
    """View a layer's keys or values [slots, K, length, D] as rows [R, K, D] in which token t of slot s is row s * K * length + t.

    Rows overlap: head k of a row lies `k * length` rows further on. FlashAttention takes sequences of such rows, with any stride of heads.
    """
    num_slots, num_heads, length, size = cached.shape
    return cached.as_strided((num_slots * num_heads * length - (num_heads - 1) * length, num_heads, size), (size, length * size, 1))


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slot_pass: SlotPass | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    """Attention function that the model calls: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises `EngineError` for anything that this attention would compute wrongly.
    """
    if slot_pass is None:
        raise EngineError(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    scoring = scoring_of(module, query, attention_mask, scaling, arguments)
    seen = slot_pass.attend(module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scoring)
    return seen.unsqueeze(0), None


def _extended(cached: Tensor, num_slots: int, length: int) -> Tensor:
    grown = cached.new_zeros(num_slots, cached.shape[1], length, cached.shape[3])
    grown[: cached.shape[0], :, : cached.shape[2]] = cached
    return grown
