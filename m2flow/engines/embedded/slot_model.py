"""Run a Hugging Face causal language model on a slot cache: prefill, decode (on a GPU by CUDA graphs), weights or adapters in and out.

A `SlotModel` is built only if it computes the same as the model's own code: it passes the probe of every engine at the start
(`m2flow.engines.models.model_probe`), and what slots can't do (recurrent layers, masks other than windows and chunks, rotary tables that
change with the batch) is refused by name.

    base, kept in the host's memory --+ scale B A--> the module's weights, layer by layer      (`MergedAdapters`)

Each version of adapters is added to the base itself, never to the last sum, so errors do not accumulate: the weights are bit by bit those
that the trainer would have sent merged, if both multiply alike. This costs a second copy of the adapted layers in the host's memory, and
nothing in a forward pass. peft is not needed here. Limit: adapters of linear layers, as `m2flow.engines.models.lora` makes them.

The cache, and the attention over it that is registered with transformers' models:

    model(..., attn="m2flow_slots", slot_pass=PrefillPass | DecodePass | DevicePass) --attend--> SlotCache

A sequence has one slot. Running sequences lie in slots 0..B-1 without a hole, so that decoding attends to a view of the cache
and gathers nothing. Tokens of all sequences are packed into one row for the model's linear layers; only prefill attention
pads, inside. transformers builds no mask: what a layer sees (all, a window or a chunk) is known from the engine's start
(`m2flow.engines.models.model_probe`), and its mask is computed here from positions. Keys outside of every window are not read, but stay in
the cache.

Legend: B sequences, P prompts, T packed tokens, H query heads, K key/value heads, R = H / K, L tokens in the cache, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.pytorch_utils import Conv1D

from m2flow.engines.contract import bytes_on
from m2flow.engines.models import lora
from m2flow.engines.models.hf_model import checkpoint_tensors, hold_in, load_model, num_experts
from m2flow.engines.models.model_probe import NUM_JUDGED, ModelProbe, Reach, Scoring, explicit_attention, longest_sequence, scoring_of
from m2flow.engines.models.packing import LEAVE_OUT, exact_linear
from m2flow.engines.models.routing import Routers
from m2flow.engines.models.trainer_checkpoint import named_weights
from m2flow.errors import EngineError, is_out_of_memory
from m2flow.recipe import Lora, Model
from m2flow.samples import compact_experts

ATTENTION_NAME = "m2flow_slots"

_LENGTH_STEP, _FINE_STEP = 64, 16

Prefix = Mapping[int, tuple[Tensor, Tensor]]
"""Layer -> keys and values of the first tokens of a sequence, each [K, L, D]."""


@final
class SlotCache:
    """Keys and values of all layers, each [slots, K, length, D]. Allocated at the first write, which knows heads and sizes. `is_fine`:
    short slots are a multiple of 16 long. On a CPU 256 of 14 tokens and four heads are read in two thirds of the time.
    """

    def __init__(self, *, is_fine: bool = False) -> None:
        self._is_fine = is_fine
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

    def rounded(self, length: int) -> int:
        """The length of slots that hold so many tokens."""
        step = _FINE_STEP if self._is_fine and length < _LENGTH_STEP else _LENGTH_STEP
        return -(-length // step) * step

    def reserve(self, num_slots: int, length: int) -> None:
        """Grow to at least this number of slots of at least this length; contents stay."""
        length = self.rounded(max(length, self.length))
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
        length = min(self.rounded(length), self.length)
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

    def prefix(self, slot: int, length: int) -> Prefix:
        """View the keys and values of a slot's first tokens."""
        return {layer: (key[slot, :, :length], value[slot, :, :length]) for layer, (key, value) in self._layers.items()}

    def write(self, slot: int, prefix: Prefix, length: int) -> None:
        """Make the first `length` tokens of a prefix those of a slot."""
        with torch.inference_mode():
            for index, of_layer in prefix.items():
                cached = self.layer(index, of_layer[0].transpose(0, 1), of_layer[1].transpose(0, 1))
                for held, new in zip(cached, of_layer, strict=True):
                    held[slot, :, :length] = new[:, :length]

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
    """Prefill P packed prompts, each into one or more slots from `first_slot` on, in the order given.

    Args:
        starts: tokens of each prompt that its slots hold already, and that those given follow. None: there are none, and prompts are
            attended to as they come; otherwise as they lie in the cache, with a mask.
    """

    def __init__(
        self,
        cache: SlotCache,
        lengths: Sequence[int],
        first_slot: int,
        prompt_of_slot: Sequence[int],
        device: str,
        starts: Sequence[int] | None = None,
    ) -> None:
        self._cache = cache
        self._num_prompts, self._longest = len(lengths), max(lengths)
        self._first, self._last = first_slot, first_slot + len(prompt_of_slot)
        self._device = device
        self._masks: dict[Reach | None, Tensor] = {}
        self._prompt_of_slot = torch.tensor(prompt_of_slot, device=device)
        ends = np.cumsum(lengths)
        column = np.arange(self._longest)
        is_token_PL = column < np.asarray(lengths)[:, None]
        packed_PL = np.where(is_token_PL, (ends - lengths)[:, None] + column, 0)
        is_ragged = not bool(is_token_PL.all())
        self._pad = torch.from_numpy(packed_PL.reshape(-1)).to(device) if is_ragged else None
        self._unpad = torch.from_numpy(np.flatnonzero(is_token_PL)).to(device) if is_ragged else None
        self._behind = None if starts is None else _Behind(cache, lengths, first_slot, prompt_of_slot, device, starts)

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scoring: Scoring) -> Tensor:
        cached = self._cache.layer(layer, key_TKD, value_TKD)
        query = self._padded(query_THD)
        if self._behind is None:
            key, value = self._padded(key_TKD), self._padded(value_TKD)
            for held, new in zip(cached, (key, value), strict=True):
                held[self._first : self._last, :, : self._longest] = new.index_select(0, self._prompt_of_slot)
        else:
            key, value = (self._behind.joined(held, new) for held, new in zip(cached, (key_TKD, value_TKD), strict=True))
        # Padding is on the right, where a causal query never looks.
        if scoring.is_plain:
            visible = self._visible(scoring.reach_within(key.shape[2]))
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
            seen = explicit_attention(query, key, value, self._visible(scoring.reach or Reach("window", key.shape[2])), scoring)
        packed = seen.transpose(1, 2).reshape(self._num_prompts * self._longest, seen.shape[1], seen.shape[3])
        return packed if self._unpad is None else packed.index_select(0, self._unpad)

    def _visible(self, reach: Reach | None) -> Tensor | None:
        """Which keys each query sees, bool [longest, longest], or [P, 1, longest, L] behind a cache; None: all up to its own."""
        if reach is None and self._behind is None:
            return None
        if reach not in self._masks:
            if self._behind is None:
                assert reach is not None
                self._masks[reach] = reach.visible(self._longest, self._device)
            else:
                self._masks[reach] = self._behind.visible(reach)
        return self._masks[reach]

    def _padded(self, packed_TXD: Tensor) -> Tensor:
        rows = packed_TXD if self._pad is None else packed_TXD.index_select(0, self._pad)
        return rows.view(self._num_prompts, self._longest, *rows.shape[1:]).transpose(1, 2)


@final
class _Behind:
    """What a `PrefillPass` reads and writes whose tokens follow ones that are in the cache."""

    def __init__(
        self,
        cache: SlotCache,
        lengths: Sequence[int],
        first_slot: int,
        prompt_of_slot: Sequence[int],
        device: str,
        starts: Sequence[int],
    ) -> None:
        self._cache = cache
        self._device = device
        self._seen = max(start + length for start, length in zip(starts, lengths, strict=True))
        self._positions_PL = np.asarray(starts)[:, None] + np.arange(max(lengths))
        ends = np.cumsum(lengths)
        of_slot = [(prompt, np.arange(lengths[prompt])) for prompt in prompt_of_slot]
        token = np.concatenate([ends[prompt] - lengths[prompt] + column for prompt, column in of_slot])
        self._token = torch.from_numpy(token).to(device)
        self._slots = np.repeat(np.arange(len(of_slot)) + first_slot, [len(column) for _, column in of_slot])
        self._positions = np.concatenate([starts[prompt] + column for prompt, column in of_slot])
        a_slot = {prompt: slot for slot, prompt in enumerate(prompt_of_slot, first_slot)}
        self._slot_of_prompt = torch.tensor([a_slot[prompt] for prompt in range(len(lengths))], device=device)
        self._index: dict[int, Tensor] = {}

    def joined(self, cached: Tensor, new_TKD: Tensor) -> Tensor:
        """Write keys or values behind those that slots hold, and return all of each prompt, [P, K, L, D]."""
        new = new_TKD.index_select(0, self._token)
        cached.view(-1, cached.shape[3]).index_copy_(0, self._flat_index(cached.shape[1]), new.reshape(-1, cached.shape[3]))
        return cached[:, :, : self._seen].index_select(0, self._slot_of_prompt)

    def visible(self, reach: Reach | None) -> Tensor:
        """Which keys each query sees, bool [P, 1, longest, L]."""
        positions, columns = self._positions_PL[:, :, None], np.arange(self._seen)
        is_seen = columns <= positions
        if reach is not None:
            is_seen &= columns >= reach.first_seen(positions)
        return torch.from_numpy(is_seen).to(self._device)[:, None]

    def _flat_index(self, num_heads: int) -> Tensor:
        if num_heads not in self._index:
            head = (self._slots * num_heads)[:, None] + np.arange(num_heads)
            self._index[num_heads] = torch.from_numpy((head * self._cache.length + self._positions[:, None]).reshape(-1)).to(self._device)
        return self._index[num_heads]


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
    """A `DecodePass` whose positions are on the device alone: no shape depends on them, so that a CUDA graph can hold the pass.

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


# ---- the model on them


@final
class MergedAdapters:
    """A module's base weights, and the adapters that are merged into them now.

    Args:
        module: as it was loaded: its weights are the base.
    """

    def __init__(self, module: Any, recipe: Lora) -> None:
        self._module = module
        self._scale = recipe.alpha / recipe.rank
        self._base: dict[str, Tensor] = {}
        """By the module's names: those of layers that adapters have come for."""
        self._held: dict[str, Tensor] = {}

    def add(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Merge adapters, given by the names of peft's files; each tensor need be valid only until the next is taken.

        Raises:
            EngineError: they are of other layers than the module has, or not of those of the time before; nothing has changed then.
        """
        came = {name: torch.tensor(given) if not isinstance(given, Tensor) else given.detach().cpu().clone() for name, given in tensors}
        layers = self._layers(came)
        if self._held and came.keys() != self._held.keys():
            changed = sorted(came.keys() ^ self._held.keys())
            raise EngineError(f"adapters of other layers came than before: {', '.join(changed[:4])}")
        with torch.no_grad():
            for stem, (b, a) in layers.items():
                layer = self._module.get_submodule(stem)
                if f"{stem}.weight" not in self._base:
                    self._base[f"{stem}.weight"] = _host_copy(layer.weight)
                base = self._base[f"{stem}.weight"]
                delta = lora.addend(b.to(layer.weight.device), a.to(layer.weight.device), self._scale, is_transposed=_is_transposed(layer))
                layer.weight.copy_(base.to(layer.weight.device) + delta)
        self._held = came

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters that are merged now, by the names of peft's files."""
        return iter(self._held.items())

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights without adapters, by checkpoints' names; of tied ones the first."""
        for name, tensor in lora.whole_state(self._module):
            yield from checkpoint_tensors(self._module, name, self._base.get(name, tensor).detach())

    def _layers(self, came: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> its B and A."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, b in came.items():
            if (stem := lora.layer_of(name, "B")) and (other := lora.file_name_of(stem, "A")) in came:
                found[stem] = b, came[other]
        known = dict(self._module.named_modules())
        if 2 * len(found) != len(came) or not came:
            raise EngineError(f"these are no adapters, in pairs: {', '.join(sorted(came)[:4]) or 'nothing came'}")
        for stem, (b, a) in found.items():
            weight = getattr(known.get(stem), "weight", None)
            shape = (b.shape[0], a.shape[1])[:: -1 if _is_transposed(known.get(stem)) else 1]
            if weight is None or weight.shape != shape or b.shape[1] != a.shape[0]:
                held = "no such layer" if weight is None else f"{list(weight.shape)} there"
                raise EngineError(
                    f"an adapter {list(b.shape)} x {list(a.shape)} came for {stem}, and the model has {held}",
                    now="Do trainer and rollout engine load the same model?",
                )
        return found


def _host_copy(weight: Tensor) -> Tensor:
    """Copy a weight to the host's memory; pinned for a GPU, since every version copies it back."""
    return weight.detach().cpu().pin_memory() if weight.is_cuda else weight.detach().clone()


def _is_transposed(layer: Any) -> bool:
    """Whether a layer stores its weights as [inputs, outputs], as GPT-2's do."""
    return isinstance(layer, Conv1D)


transformers.AttentionInterface.register(ATTENTION_NAME, slot_attention)

_WORTH_A_GRAPH = 4
"""Passes of a number of rows, without a larger graph, after which a graph of it saves more than capturing it costs."""
_WORTH_A_SMALLER = 32
"""The same where a larger graph, of twice as many rows at most, does."""


def rounded_rows(num_rows: int) -> int:
    """The rows of a graph for so many: a power of two up to 8, a multiple of 8 up to 64, of 32 beyond.

    >>> [rounded_rows(n) for n in (1, 3, 9, 64, 65, 130)]
    [1, 4, 16, 64, 96, 160]
    """
    if num_rows <= 8:
        return int(1 << (num_rows - 1).bit_length())
    step = 8 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


class Capture(Protocol):
    """A pass that was recorded: `replay` runs it on what its inputs hold then, and fills `logits` [rows, V]."""

    logits: Tensor

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], Tensor]], Capture]


@final
class DecodeGraphs:
    """Graphs of the decode passes over one cache, by their number of rows.

    A pass is hundreds of small kernels, which Python starts more slowly than a GPU runs them; a graph starts all of them at once. Rows are
    rounded up: further ones write to slots that nobody has, whose contents mean nothing. A graph is captured when a number of rows was
    asked for often enough, so that an engine that takes turns with others on its GPU pays for few.

    Args:
        run: computes the logits [rows, V] of tokens [rows], by a pass over the cache.
        captures: opens what records calls of functions on the device, whose records share memory; again when all records are forgotten.
    Source:
        CUDA graphs of decode steps, padded to fixed batch sizes, are vLLM's and SGLang's; capturing them as they are needed is ours.
    """

    def __init__(self, device: str, run: Callable[[Tensor, DevicePass], Tensor], captures: Callable[[], Recorder]) -> None:
        self._device = device
        self._run = run
        self._captures = captures
        self._capture: Recorder | None = None
        self._of: tuple[SlotCache, int] | None = None
        self._inputs = self._staged = torch.zeros(2, 0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        """After the last copy of the staged inputs to a GPU."""
        self._graphs: dict[int, Capture] = {}
        self._asked: dict[int, int] = {}

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that there are graphs for."""
        return sorted(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, and free the memory that they hold."""
        self._of = None
        self._capture = None
        self._graphs.clear()
        self._asked.clear()

    def decode(self, cache: SlotCache, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Return the logits [B, V], which the next call overwrites."""
        if self._of is None or self._of[0] is not cache or self._of[1] != cache.generation:
            self.clear()
            self._of = cache, cache.generation
        num_rows = len(tokens)
        self._take(tokens, positions, max(cache.num_slots, rounded_rows(num_rows)))
        size = self._size_for(num_rows, cache.num_slots)
        if size is None:
            return self._pass(cache, num_rows, int(positions.max()) + 1)
        if size not in self._graphs:
            if self._capture is None:
                self._capture = self._captures()
            self._graphs[size] = self._capture(lambda: self._pass(cache, size, cache.length))
        self._graphs[size].replay()
        return self._graphs[size].logits[:num_rows]

    def _size_for(self, num_rows: int, num_slots: int) -> int | None:
        """The rows of the graph to use, which may not be there yet; None: none is worth it now."""
        own = min(rounded_rows(num_rows), num_slots)
        if own in self._graphs:
            return own
        self._asked[own] = self._asked.get(own, 0) + 1
        larger = min((size for size in self._graphs if num_rows <= size <= 2 * own), default=None)
        if self._asked[own] > (_WORTH_A_GRAPH if larger is None else _WORTH_A_SMALLER):
            return own
        return larger

    def _pass(self, cache: SlotCache, num_rows: int, seen: int) -> Tensor:
        return self._run(self._inputs[0, :num_rows], DevicePass(cache, self._inputs[1, :num_rows], seen))

    def _take(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], capacity: int) -> None:
        """Put tokens and positions where graphs read them; further rows read token 0 at position 0."""
        with torch.inference_mode():
            if self._inputs.shape[1] < capacity:
                self._graphs.clear()  # They read the old ones.
                self._capture = None
                self._inputs = torch.zeros(2, capacity, dtype=torch.int64, device=self._device)
                self._staged = torch.zeros(2, capacity, dtype=torch.int64, pin_memory=self._inputs.is_cuda)
            if self._copied is not None:
                self._copied.synchronize()  # Of passes one after the other, whose tokens nobody has read between, the last may wait yet.
            self._staged.zero_()
            self._staged[0, : len(tokens)] = torch.from_numpy(tokens)
            self._staged[1, : len(tokens)] = torch.from_numpy(positions)
            self._inputs.copy_(self._staged, non_blocking=True)
            if self._inputs.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(self._inputs.device))


@final
class CudaCapture:
    """A CUDA graph of a function's kernels.

    Args:
        pool: memory that graphs which never run at once share. It is gone with the last of them.
        side: the stream to capture on, the same for all: cuBLAS keeps a workspace of tens of megabytes for each stream that it was used on.
    Raises:
        RuntimeError: the function needs the host, or it runs out of memory.
    """

    def __init__(self, run: Callable[[], Tensor], pool: tuple[int, int], side: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.inference_mode(), torch.cuda.stream(side):
            run()  # Libraries set themselves up at the first call, which a capture does not allow.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.logits = run()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(side.device).wait_stream(side)

    def replay(self) -> None:
        self._graph.replay()


def cuda_captures(device: str) -> Callable[[], Recorder]:
    """What opens recorders of CUDA graphs on a device."""

    def captures() -> Recorder:
        pool, side = torch.cuda.graph_pool_handle(), _capture_stream(torch.device(device).index or 0)
        return lambda run: CudaCapture(run, pool, side)

    return captures


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@final
class SlotModel:
    """A model with forward passes over a slot cache."""

    def __init__(self, module: Any, device: str, max_context: int | None, recipe: Lora | None = None) -> None:
        self._module = module
        self._recipe = recipe
        self._added = MergedAdapters(module, recipe) if recipe is not None else None
        """None: the weights are not those that adapters were trained beside."""
        self._device, self.is_on_cpu = device, device == "cpu"
        text_config = module.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        own_context = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        self.max_context: int = min(own_context, max_context or own_context)
        self.is_mixture = num_experts(text_config) > 0
        self.num_weights: int = sum(parameter.numel() for parameter in module.parameters())
        self.kv_bytes_per_token = 0
        self._routers: Routers | None = None
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, model: Model, device: str, max_context: int | None, *, graphs: bool = False) -> SlotModel:
        """Load a model. Raises `ModelError` for a broken directory, `EngineError` for a model that slots can't serve.

        Args:
            graphs: decode by CUDA graphs, if the device is a GPU and the model's passes do not depend on what is in them, as those of a
                mixture of experts do.
        """
        module = load_model(model, device=device, attention="eager")
        if model.rollout_dtype is not None:
            hold_in(module, model.rollout_dtype)
        loaded = cls(module, device, max_context, model.lora)
        if graphs and device != "cpu" and not loaded.is_mixture:
            loaded._graphs = DecodeGraphs(device, loaded._run_on_device, cuda_captures(device))
        loaded._check()
        if model.routing == "rollout":
            loaded._record_routing()
        return loaded

    @property
    def has_graphs(self) -> bool:
        """Whether decode passes are recorded as graphs, which are the quicker the less often the cache grows."""
        return self._graphs is not None

    def drop_graphs(self) -> None:
        """Free the memory of the graphs. They come again when passes do."""
        if self._graphs is not None:
            self._graphs.clear()

    def _record_routing(self) -> None:
        cache = SlotCache()
        cache.reserve(1, 8)
        self._routers = Routers(self._module)
        tokens = np.arange(8, dtype=np.int32) % self.vocab_size
        self._routers.check(lambda: self.prefill(cache, [tokens], 0, [0]).clone())

    @property
    def records_routing(self) -> bool:
        return self._routers is not None

    def routed(self) -> npt.NDArray[np.int16] | npt.NDArray[np.uint8]:
        """The experts of the tokens of the last pass, [tokens, layers, k], as `m2flow.samples.compact_experts` has them."""
        assert self._routers is not None
        return compact_experts(self._routers.chosen().cpu().numpy().astype(np.int16), self._routers.num_experts)

    def unknown_routing(self, num_tokens: int) -> npt.NDArray[np.int16] | npt.NDArray[np.uint8]:
        """The same for tokens of which nothing is known."""
        assert self._routers is not None
        shape = num_tokens, self._routers.num, self._routers.num_of_token
        return compact_experts(np.full(shape, -1, np.int16), self._routers.num_experts)

    def prefill(
        self,
        cache: SlotCache,
        sequences: Sequence[npt.NDArray[np.int32]],
        first_slot: int,
        sequence_of_slot: Sequence[int],
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """Prefill slots from `first_slot` on; returns the logits after each sequence, [P, V].

        Args:
            starts: tokens before each sequence, which its slots hold already; None: there are none.
        """
        lengths = [len(sequence) for sequence in sequences]
        positions = np.concatenate([start + np.arange(length) for start, length in zip(starts or [0] * len(lengths), lengths, strict=True)])
        last = np.cumsum(lengths) - 1
        into = PrefillPass(cache, lengths, first_slot, sequence_of_slot, self._device, starts)
        return self._forward(np.concatenate(sequences).astype(np.int64), positions, into, torch.from_numpy(last).to(self._device))

    def decode(self, cache: SlotCache, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Process one token for each of the slots 0..B-1; returns the logits after it, [B, V], until the next call."""
        if self.is_on_cpu:
            return self._forward(tokens, positions, DecodePass(cache, positions), 0)
        if self._graphs is not None:
            try:
                return self._graphs.decode(cache, tokens, positions)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                print(f"decoding goes on without CUDA graphs, which this model's pass can't be: {error}", flush=True)
                self._graphs = None
        into = DevicePass(cache, torch.from_numpy(positions).to(self._device), int(positions.max()) + 1)
        return self._run_on_device(torch.from_numpy(tokens).to(self._device), into)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute log-probabilities of each token but the first. Half of each sequence is prefilled, the rest decoded token by token, in a
        cache of its own, so that both ways through the model are exercised."""
        rows = [np.asarray(sequence, np.int32) for sequence in sequences]
        heads = [max(1, len(row) // 2) for row in rows]
        cache = SlotCache()
        cache.reserve(len(rows), max(map(len, rows)))
        found = [np.zeros(len(row) - 1, np.float32) for row in rows]

        def note(logits_BV: Tensor, read: Sequence[int]) -> None:
            logprobs = logits_BV.float().log_softmax(-1)
            for slot, (row, count) in enumerate(zip(rows, read, strict=True)):
                if count < len(row):
                    found[slot][count - 1] = float(logprobs[slot, int(row[count])])

        into = PrefillPass(cache, heads, 0, range(len(rows)), self._device)
        positions = np.concatenate([np.arange(head) for head in heads])
        tokens = np.concatenate([row[:head] for row, head in zip(rows, heads, strict=True)]).astype(np.int64)
        logits = self._forward(tokens, positions, into, torch.arange(len(tokens), device=self._device)).float().log_softmax(-1)
        start = 0
        for slot, (row, head) in enumerate(zip(rows, heads, strict=True)):
            of_next = torch.from_numpy(row[1:head].astype(np.int64)).to(self._device)[:, None]
            found[slot][: head - 1] = logits[start : start + head - 1].gather(1, of_next)[:, 0].cpu().numpy()
            start += head
        last = torch.tensor(np.cumsum(heads) - 1, device=self._device)
        note(logits[last], heads)
        for turn in range(max(len(row) - head for row, head in zip(rows, heads, strict=True)) - 1):
            # Who is at its end reads its last token again, for nothing.
            read = [min(head + turn, len(row) - 1) for row, head in zip(rows, heads, strict=True)]
            step = np.array([int(row[at]) for row, at in zip(rows, read, strict=True)], np.int64)
            note(self.decode(cache, step, np.array(read, np.int64)), [at + 1 for at in read])
        return found

    def last_hidden(self, sequences: Sequence[npt.NDArray[np.int32]]) -> Tensor:
        """Read sequences in a cache of their own; what the model's head is given at the last token of each: float32 [P, width].

        Raises:
            EngineError: the model has no head that is a layer, or it is given more than that.
        """
        cache, given, head = SlotCache(), list[Tensor](), self._module.get_output_embeddings()
        cache.reserve(len(sequences), max(map(len, sequences)))
        hook = None if head is None else head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0]))
        try:
            self.prefill(cache, sequences, 0, range(len(sequences)))
        finally:
            if hook is not None:
                hook.remove()
        if len(given) != 1 or len(given[0]) != len(sequences):
            raise EngineError(f"the head of {type(self._module).__name__} does not say what the last hidden states of prompts are")
        return given[0].float()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers by checkpoints' names; tied ones once."""
        return named_weights(self._module)

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy weights in. Raises `EngineError` that names what is missing, unknown or of another shape; the weights are a mixture then."""
        self._added = None
        held = {
            each: part
            for name, tensor in self._module.state_dict(keep_vars=True).items()
            for each, part in checkpoint_tensors(self._module, name, tensor.detach())
        }
        missing = {name for name, _ in self.weights()}
        unknown: list[str] = []
        with torch.no_grad():
            for name, given in tensors:
                if name not in held:
                    unknown.append(name)
                    continue
                tensor = given if isinstance(given, Tensor) else torch.tensor(given)
                if tensor.shape != held[name].shape:
                    raise EngineError(f"weight {name} is {list(tensor.shape)}; the model has {list(held[name].shape)}")
                held[name].copy_(tensor)
                missing.discard(name)
        if unknown or missing:
            raise EngineError(
                f"the weights are not this model's: missing {_some(sorted(missing))}, unknown {_some(unknown)}",
                now="Do trainer and rollout engine load the same model?",
            )

    def compute_exact_logits(self) -> None:
        """Compute logits in float32 from now on, from hidden states and weights of any type.

        Raises:
            EngineError: the model's head is no plain layer.
        """
        layer = self._module.get_output_embeddings()
        if type(layer) is not torch.nn.Linear:
            raise EngineError(f"the head of a {self._module.config.model_type!r} model is a {type(layer).__name__}", now=LEAVE_OUT)
        layer.forward = lambda hidden: exact_linear(hidden, layer.weight, layer.bias)

    @property
    def added(self) -> MergedAdapters:
        """The merged adapters. Raises `EngineError`: the model has none, or a whole set of weights was loaded since."""
        if self._added is None:
            why = "other weights were loaded since" if self._recipe is not None else "the model has none"
            raise EngineError(f"adapters can't be added to these weights: {why}")
        return self._added

    def bytes_on(self, device: str) -> int:
        """Bytes of its weights on a device."""
        return bytes_on(device, [*self._module.parameters(), *self._module.buffers()])

    def to(self, device: str) -> None:
        self.drop_graphs()  # They read the weights where these are.
        self._module.to(device)

    def _forward(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], into: SlotPass, keep: Tensor | int) -> Tensor:
        return self._run(torch.from_numpy(tokens).to(self._device), torch.from_numpy(positions).to(self._device), into, keep)

    def _run_on_device(self, tokens: Tensor, into: DevicePass) -> Tensor:
        return self._run(tokens, into.positions, into, 0)

    def _run(self, tokens: Tensor, positions: Tensor, into: SlotPass, keep: Tensor | int) -> Tensor:
        with torch.inference_mode():
            output = self._module(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                slot_pass=into,
            )
            logits: Tensor = output.logits[0]
        num_asked = len(keep) if isinstance(keep, Tensor) else len(tokens)
        if len(logits) != num_asked:
            raise EngineError(f"{type(self._module).__name__} gives {len(logits)} rows of logits where {num_asked} were asked for")
        return logits

    def _check(self) -> None:
        module, kind = self._module, type(self._module).__name__
        longest, rope = longest_sequence(module.config)
        if rope and self.max_context > longest:
            raise EngineError(
                f"{kind} has {rope} rotary embeddings, which change with the longest sequence of a batch",
                now=f"Set the engine's option `max_context` to {longest} or less." if longest else "",
            )
        probe = ModelProbe(module, "the embedded engine", self.max_context, lambda tokens: module(input_ids=tokens, use_cache=False).logits)
        cache = SlotCache()
        layers = [attention.layer_idx for attention in probe.attentions]
        with probe.explained():
            if len(set(layers)) < len(layers):
                raise EngineError("it calls an attention twice in a pass, and a slot has one place for its keys and values")
            module.set_attn_implementation(ATTENTION_NAME)
            probe.judge(self._read(cache, probe.sequences))
            probe.judge(self._read(cache, probe.sequences, in_parts=True))
            num_layers = module.config.get_text_config().num_hidden_layers
            if cache.num_layers != num_layers:
                raise EngineError(
                    f"{cache.num_layers} of its {num_layers} layers are attention",
                    now="Layers with a state of their own need another engine.",
                )
        self.kv_bytes_per_token = cache.bytes_per_token

    def _read(self, cache: SlotCache, sequences: Sequence[npt.NDArray[np.int32]], *, in_parts: bool = False) -> list[Tensor]:
        """Logits after the last tokens of each sequence, [NUM_JUDGED, V]: all but the last tokens are prefilled together, these decoded.

        Args:
            in_parts: prefill the second half of each behind the first one.
        """
        cache.reserve(len(sequences), max(map(len, sequences)))
        heads = np.array([len(sequence) - NUM_JUDGED + 1 for sequence in sequences], np.int64)
        prompts = [sequence[:head] for sequence, head in zip(sequences, heads.tolist(), strict=True)]
        starts = [len(prompt) // 2 for prompt in prompts] if in_parts else None
        if starts is not None and min(starts):
            self.prefill(cache, [prompt[:start] for prompt, start in zip(prompts, starts, strict=True)], 0, range(len(prompts)))
            prompts = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        else:
            starts = None
        found = [self.prefill(cache, prompts, 0, range(len(prompts)), starts)]
        for turn in range(NUM_JUDGED - 1):
            tokens = np.array([sequence[head + turn] for sequence, head in zip(sequences, heads.tolist(), strict=True)], np.int64)
            found.append(self.decode(cache, tokens, heads + turn))
        return list(torch.stack(found, 1))


def _some(names: Sequence[str]) -> str:
    return "nothing" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
