"""Bytes on each device: what an engine needs while it works, by class of tensor.

    ModelShape, Layout, lengths --rollout_footprint, train_footprint--> Footprint

Counted, not measured: weights, gradients, fp32 masters and moments, the cache, and what a decoder layer keeps for its backward pass.
What allocators waste is in the device list's `usable_memory`.
"""

from __future__ import annotations

import math

from m2flow.micro.costs.extents import Extent
from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.costs.terms import Footprint, Layout

_PREFILL_TOKENS = 8192
"""That a rollout engine reads at once."""
_MASTER_BYTES = 12
"""Of a parameter in half precision: a float32 copy, and two moments. Of a float32 one: the moments, 8."""


def shards(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Parameters on a trainer's device of those that all tokens share, and of the experts', before ZeRO shards them."""
    ways = layout.tp * layout.pp
    return (shape.num_parameters - shape.expert_parameters) / ways, shape.expert_parameters / (ways * layout.ep)


def trained_shards(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """The same of those that are trained: all, or the adapters."""
    if not shape.adapter_parameters:
        return shards(shape, layout)
    ways, experts = layout.tp * layout.pp, shape.expert_adapter_parameters
    return (shape.adapter_parameters - experts) / ways, experts / (ways * layout.ep)


def kv_token_bytes(shape: ModelShape, layout: Layout) -> float:
    """Of the cache, on a device, for one token. Key/value heads that do not divide are copied; so is a latent."""
    return shape.kv_bytes / (min(layout.tp, shape.max_kv_shards) * layout.pp)


def rollout_weights(shape: ModelShape, layout: Layout) -> float:
    return shape.weight_bytes / (layout.tp * layout.pp)


def rollout_activations(shape: ModelShape, layout: Layout, max_running: int) -> float:
    """A prefill's layer at a time, and the float32 logits of all that run."""
    layer = _PREFILL_TOKENS * (4 * shape.hidden + _kept_width(shape) / layout.tp) * shape.bytes_each
    return layer + max_running * shape.vocab * 4 / layout.tp


def rollout_footprint(shape: ModelShape, layout: Layout, extent: Extent, num_running: int) -> Footprint:
    """With a cache for so many samples of mean length, and for one of the longest at the least."""
    tokens = max(num_running * extent.sample, float(extent.longest))
    return Footprint(
        weights=math.ceil(rollout_weights(shape, layout)),
        kv=math.ceil(tokens * kv_token_bytes(shape, layout)),
        activations=math.ceil(rollout_activations(shape, layout, num_running)),
    )


def most_running(shape: ModelShape, layout: Layout, extent: Extent, memory_bytes: int, limit: int) -> int:
    """Samples of mean length whose caches fit the memory beside the weights, up to a limit; 1 at the least, whether it fits or not."""
    free = memory_bytes - rollout_weights(shape, layout) - rollout_activations(shape, layout, limit)
    return max(1, min(limit, int(free / (extent.sample * kv_token_bytes(shape, layout))))) if free > 0 else 1


def train_footprint(shape: ModelShape, layout: Layout, tokens: float, *, is_trained: bool, recomputes: bool) -> Footprint:
    """A trainer's, for micro-batches of so many tokens; of a model that is only asked (a reference), its weights and a layer. Of one that
    trains adapters, gradients and optimiser are theirs; what layers keep for the backward pass is as much, but for the adapters' own.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054: stage 1 shards the optimiser's state, 2 the gradients too, 3 the weights too.
        Ren et al. 2021, arXiv:2101.06840: offloaded, the optimiser's state and a copy of the gradients are the host's.
    """
    each = shape.bytes_each
    ranks = layout.dp * layout.sp
    weights = gradients = optimizer = 0.0
    beside = trained_shards(shape, layout) if shape.adapter_parameters else (0.0, 0.0)
    groups = ranks, max(1, ranks // layout.ep)
    for count, more, trained, group in zip(shards(shape, layout), beside, trained_shards(shape, layout), groups, strict=True):
        weights += each * (count + more) / (group if layout.zero >= 3 else 1)
        gradients += each * trained / (group if layout.zero >= 2 else 1)
        optimizer += (_MASTER_BYTES if each < 4 else 8) * trained / (group if layout.zero >= 1 else 1)
    activations = _activations(shape, layout, tokens / layout.sp, is_trained=is_trained, recomputes=recomputes)
    if not is_trained:
        return Footprint(weights=math.ceil(weights), activations=math.ceil(activations))
    host = optimizer + gradients if layout.offload else 0.0
    return Footprint(
        weights=math.ceil(weights),
        gradients=math.ceil(gradients),
        optimizer=0 if layout.offload else math.ceil(optimizer),
        activations=math.ceil(activations),
        host=math.ceil(host),
    )


def _activations(shape: ModelShape, layout: Layout, tokens: float, *, is_trained: bool, recomputes: bool) -> float:
    each, layers = shape.bytes_each, math.ceil(shape.num_layers / layout.pp)
    layer = tokens * (4 * shape.hidden + _kept_width(shape) / layout.tp) * each
    head = tokens * shape.vocab / layout.tp * (each + 4 * is_trained)
    kept = 0.0
    if is_trained:
        kept = layers * (tokens * shape.hidden * each if recomputes else layer)
    gathered = 2 * _largest_block(shape, layout.ep) / layout.tp * each if layout.zero >= 3 else 0.0
    return kept + max(layer, head) + gathered


def _kept_width(shape: ModelShape) -> float:
    """Numbers that a token's pass through a layer makes and its backward pass needs, and that tensor parallelism shares out.

    Queries, keys, values and what attention gives; gate, up, their activation and product. Inputs of the blocks and their norms, which
    each device has whole, are four times the hidden size.
    """
    active = shape.num_experts_per_token * shape.expert_width + shape.shared_width
    width = max(shape.dense_width if shape.num_dense_layers else 0, active)
    return shape.num_heads * (shape.head_dim + shape.value_dim) + shape.num_kv_heads * (shape.head_dim + shape.value_dim) + 4 * width


def _largest_block(shape: ModelShape, ep: int) -> int:
    """Parameters that ZeRO 3 gathers at once: a layer, or the embedding table."""
    sparse = shape.num_layers - shape.num_dense_layers
    experts = shape.expert_parameters // sparse // ep if sparse else 0
    return max(shape.attention_parameters + max(3 * shape.hidden * shape.dense_width, experts), shape.vocab * shape.hidden)
