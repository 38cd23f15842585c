"""Model costs from data sheets: times, engine switches, weight syncs and memory, from model shapes and devices, without measurements.

    ClusterSpec, Workload, ModelShape and Extent of each role --ModelledCosts--> Costs, which search and simulator read

Everything is a closed form, computed once for each (engine, pool, layout); `constants` lists the numbers in use with their sources. A
profile replaces them term by term (`profiles`).

Memory (`rollout_footprint`, `train_footprint`) counts weights, gradients, fp32 master weights and moments, the KV cache, and the
activations that a decoder layer keeps for its backward pass. What allocators waste is in the device list's `usable_memory`.

Decoding (`decode_cost`): step(b) = step_s + b sample_s for a batch of b samples,

    step_s   = weights read / (tp * MBU * bandwidth) + launch + host + layers * (gap + 2 all-reduces, routing to experts)
    sample_s = max(cache read at the mean context / (its shards * MBU * bandwidth), attention / (tp * MFU * peak)) + weights it adds
               + what the largest batch computes longer than it reads weights, over that batch + host + bytes of the all-reduces

since computing overlaps with reading; the line meets max(reading, computing) of the weights at the smallest and at the largest batch.

With pp stages, as many batches are in flight, one in each stage. Limit: the weights that a mixture of experts reads grow with the batch
until all experts are hit. The line takes those hit by the largest batch and by a quarter of it: a single sample's step is too slow in it.

Training (`train_cost`):

    a sample of s tokens   token_s * s + token2_s * s**2        operations / (devices * MFU * peak), activations through memory, and the
                                                                exposed communication;
                                                                with adapters one pass less over the frozen weights, all over theirs
    a micro-batch          fixed_s                              launches, routing to experts layer by layer;
                                                                ZeRO 2 reduces gradients, ZeRO 3 gathers weights too
                                                                a pipeline's bubble, since stages are empty between micro-batches, and its
                                                                passes (`passes_excess_s`)
    a call of forward passes   waits * token_s * run_tokens     stages fill and empty once: m runs through p stages take (m + p - 1) / m
    an optimiser step      optimizer_s                          the gradients' reduction, the optimiser's bytes

Micro-batches are distributed over the replicas, so one costs the whole trainer a dp-th of what it costs a replica. Samples are assumed to
be evenly distributed, but for the longest of a mini-batch (`problem`); other imbalance within a step is left to the simulator.

Switches (`switch`) go by class of tensor, and a context stays behind: caches and activations are dropped and rebuilt; a rollout engine of a
trained model drops its weights too, since the next sync brings new ones, and other weights are loaded from the host's copy; a trainer
offloads all that it keeps. Host memory is pinned as long as half of it suffices, since copies to pinned memory are several times as fast.
A server takes a fixed time to wake up, even where its weights stay: its cache and its graphs are made anew.

What engines attain of all this is data (`efficiencies.yaml`), each number with an interval and its source; `spread` makes intervals of
predicted times of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar, final

import msgspec

from m2flow.engines.contract import ParallelLayouts
from m2flow.engines.registry import LOGPROB_TOKENS, ONE_LAYOUT, held_by_ranks, train_options
from m2flow.errors import ModelError, SpecError, did_you_mean
from m2flow.micro.protocol.cost_terms import (
    Arithmetic,
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    Footprint,
    FunctionCost,
    HeldPart,
    Layout,
    PassCost,
    StageOrder,
    Switch,
    TrainCost,
)
from m2flow.planner.model_shapes import ModelShape, adapted, shape_named
from m2flow.planner.pools import (
    CHUNK_START,
    GIB,
    Activations,
    Attained,
    Estimate,
    Passes,
    Pool,
    StageWork,
    accepted,
    adds_adapters,
    fastest_order,
    legal_layouts,
    offered,
    orders_of,
    passes_excess_s,
    passes_of,
    pools_of,
    thread_layouts,
    through_stages,
)
from m2flow.planner.workload import Extent, Workload
from m2flow.recipe import Model, hub_directory, is_count, is_of_hub
from m2flow.spec import ClusterSpec, PinSpec

# ---- memory

_PREFILL_TOKENS = 8192
"""Tokens that a rollout engine prefills at once."""
_MASTER_BYTES = 12
"""Optimiser bytes of a parameter in half precision: a float32 copy and two moments. A float32 one has the moments alone, 8."""


def shards(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Parameters on a trainer's device, before ZeRO shards them: those that all tokens share, and those of the experts."""
    ways = layout.tp * layout.pp / shape.fullest_stage(layout.pp)
    return (shape.num_parameters - shape.expert_parameters) / ways, shape.expert_parameters / (ways * layout.ep)


def trained_shards(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Trained parameters on a trainer's device (all of them, or the adapters), as in `shards`."""
    if not shape.adapter_parameters:
        return shards(shape, layout)
    ways, experts = layout.tp * layout.pp / shape.fullest_stage(layout.pp), shape.expert_adapter_parameters
    return (shape.adapter_parameters - experts) / ways, experts / (ways * layout.ep)


def kv_token_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes of the KV cache on a device for one token. Key/value heads that do not divide are replicated, and so is a latent vector."""
    return shape.kv_bytes * shape.fullest_stage(layout.pp) / (min(layout.tp, shape.max_kv_shards) * layout.pp)


def rollout_weights(shape: ModelShape, layout: Layout) -> float:
    """Bytes of the weights on a device of a rollout engine."""
    return shape.weight_bytes * shape.fullest_stage(layout.pp) / (layout.tp * layout.pp)


def rollout_activations(shape: ModelShape, layout: Layout, max_running: int) -> float:
    """Bytes of activations on a device: one layer of a prefill, and the float32 logits of all running samples."""
    layer = _PREFILL_TOKENS * (4 * shape.hidden + shape.kept_width / layout.tp) * shape.bytes_each
    return layer + max_running * shape.vocab * 4 / layout.tp


def rollout_footprint(shape: ModelShape, layout: Layout, extent: Extent, num_running: int) -> Footprint:
    """Memory of a rollout engine, with a KV cache for so many samples of mean length and at least one of the longest."""
    tokens = max(num_running * extent.sample, float(extent.longest))
    return Footprint(
        weights=math.ceil(rollout_weights(shape, layout)),
        kv=math.ceil(tokens * kv_token_bytes(shape, layout)),
        activations=math.ceil(rollout_activations(shape, layout, num_running)),
    )


def most_running(shape: ModelShape, layout: Layout, extent: Extent, memory_bytes: int, limit: int) -> int:
    """Samples of mean length whose KV caches fit the memory with the weights, up to a limit; at least 1, whether it fits or not."""
    free = memory_bytes - rollout_weights(shape, layout) - rollout_activations(shape, layout, limit)
    return max(1, min(limit, int(free / (extent.sample * kv_token_bytes(shape, layout))))) if free > 0 else 1


def train_footprint(
    shape: ModelShape,
    layout: Layout,
    tokens: float,
    *,
    is_trained: bool,
    recomputes: bool,
    gathers_keys: bool = False,
    split: Passes | None = None,
) -> Footprint:
    """Memory of a trainer, for micro-batches of so many tokens.

    A model that is not trained (a reference) needs its weights and one layer. One that trains adapters has gradients and optimiser state
    for these alone; activations for the backward pass are as many, except for the adapters' own.

    Args:
        gathers_keys: as of `ParallelLayouts.gathers_keys`: a device then has the keys and values of all rows.
        split: how micro-batches pass through stages: activations are those of the passes in flight; by default of all of it.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054: stage 1 shards the optimiser's state, 2 the gradients too, 3 the weights too.
        Ren et al. 2021, arXiv:2101.06840: offloaded, the optimiser's state and a copy of the gradients are the host's.
    """
    each = shape.bytes_each
    ranks = layout.dp * layout.sp
    weights = gradients = optimizer = 0.0
    adapters = trained_shards(shape, layout) if shape.adapter_parameters else (0.0, 0.0)
    groups = ranks, max(1, ranks // layout.ep)
    for count, more, trained, group in zip(shards(shape, layout), adapters, trained_shards(shape, layout), groups, strict=True):
        weights += each * (count + more) / (group if layout.zero >= 3 else 1)
        gradients += each * trained / (group if layout.zero >= 2 else 1)
        optimizer += (_MASTER_BYTES if each < 4 else 8) * trained / (group if layout.zero >= 1 else 1)
    held = activations_of(shape, layout, tokens, is_trained=is_trained, recomputes=recomputes, gathers_keys=gathers_keys)
    activations = held.num_bytes(split or Passes())
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


def activations_of(
    shape: ModelShape, layout: Layout, tokens: float, *, is_trained: bool, recomputes: bool, gathers_keys: bool = False
) -> Activations:
    """Bytes of a trainer's activations on a device, for micro-batches of so many tokens. Arguments are those of `train_footprint`."""
    each, layers, tokens = shape.bytes_each, math.ceil(shape.num_layers / layout.pp), tokens / layout.sp
    more = (layout.sp - 1) * shape.key_width if gathers_keys else 0
    layer = tokens * (4 * shape.hidden + (shape.kept_width + more) / layout.tp) * each
    head = tokens * shape.vocab / layout.tp * (each + 4 * is_trained)
    whole = layers * layer if is_trained else 0.0
    kept = layers * tokens * shape.hidden * each if is_trained and recomputes else whole
    gathered = 2 * shape.largest_block(layout.ep) / layout.tp * each if layout.zero >= 3 else 0.0
    # What is put off of a chunk is added up whole, once as computed and once in float32 to be sent.
    linear = shape.num_parameters - shape.expert_parameters - shape.vocab * shape.hidden * (1 if shape.is_tied else 2)
    sums = (each + 4) * linear * layers / shape.num_layers / layout.tp if is_trained else 0.0
    return Activations(kept, whole if recomputes else 0.0, max(layer, head), gathered, sums)


# ---- decoding


def decode_cost(shape: ModelShape, pool: Pool, layout: Layout, extent: Extent, max_running: int) -> DecodeCost:
    """The decode cost of one instance that runs up to `max_running` samples at once."""
    device, tp, host = pool.device, layout.tp, pool.attained.rollout
    flops = device.decode_mfu * device.flops(shape.bytes_each)
    each = -(-max_running // layout.pp)
    fullest = shape.fullest_stage(layout.pp)  # The others wait for it.
    fixed_s, more_s = (fullest * num / (tp * pool.decode_bytes_s) for num in _weights_line(shape, each))
    layers, routed = fullest * shape.num_layers, fullest * (shape.num_layers - shape.num_dense_layers)
    step_s = (
        fixed_s
        + routed * host.expert_layer_s.value
        + device.launch_s
        + host.host_step_s.value
        + layers * (device.layer_s + 2 * pool.latency_s(tp))
        + (layout.pp - 1) * pool.latency_s(layout.num_replica_devices)
    )
    imbalance = fullest * pool.device.imbalance(shape.routed_share if layout.ep > 1 else 0.0)
    attention_s = fullest * 2 * shape.attention_flops * extent.context / (tp * flops)
    reduced_s = fullest * _reduced_s(shape, pool, layout)
    sample_s = (
        max(kv_token_bytes(shape, layout) * layout.pp * extent.context / pool.decode_bytes_s, attention_s)
        + max(more_s, shape.token_flops * imbalance / (tp * flops) - fixed_s / each)
        + reduced_s
    ) / layout.pp + host.host_sample_s.value
    prefill = shape.token_flops * imbalance + fullest * shape.attention_flops * extent.prompt
    prefill_s = prefill / (tp * layout.pp * device.prefill_mfu * device.flops(shape.bytes_each)) + reduced_s / layout.pp
    return DecodeCost(step_s, sample_s, prefill_s, max_running)


def _weights_line(shape: ModelShape, max_running: int) -> tuple[float, float]:
    """Bytes of weights that a decode step reads, and what each sample adds by its experts: exact for the largest batch and a quarter."""
    few, most = -(-max_running // 4), weights_read(shape, max_running)
    more = (most - weights_read(shape, few)) / max(max_running - few, 1)
    return most - more * max_running, more


def _met_by_a_token(shape: ModelShape) -> int:
    """Parameters of the experts that one token is routed to."""
    return shape.expert_parameters * shape.num_experts_per_token // max(shape.num_experts, 1)


def weights_read(shape: ModelShape, num_running: int) -> float:
    """Bytes of weights that a decode step reads: all but the embedding table, and of the experts those that the batch is routed to.

    Source:
        Of E experts, of which a token takes k evenly at random, b tokens miss one with probability (1 - k/E)^b.
    """
    shared = shape.num_multiplied - _met_by_a_token(shape)
    met = 1 - (1 - shape.num_experts_per_token / shape.num_experts) ** max(num_running, 1) if shape.num_experts else 0.0
    return shape.bytes_each * (shared + shape.expert_parameters * met)


def decode_constants(shape: ModelShape, pool: Pool, layout: Layout, cost: DecodeCost, extent: Extent) -> dict[str, Constant]:
    """The constants of an instance, each with its formula."""
    tp, device = layout.tp, pool.device
    read, more = (num / 1e9 for num in _weights_line(shape, -(-cost.max_running // layout.pp)))
    step = f"{read:.3g} GB of weights / ({tp} x {device.decode_mbu:g} x {device.memory_gb_s:g} GB/s) + launch and {shape.num_layers} layers"
    cache = kv_token_bytes(shape, layout) * extent.context / 1e9
    peak = device.flops(shape.bytes_each) / 1e12
    sample = (
        f"{cache:.3g} GB of cache / ({device.decode_mbu:g} x {device.memory_gb_s:g} GB/s) + {shape.token_flops / 1e9:.3g} GFLOP / ({tp} x "
    )
    sample += f"{device.decode_mfu:g} x {peak:g} TFLOP/s)" + f" + {more:.3g} GB of experts" * (more > 0)
    prefill = f"{shape.token_flops / 1e9:.3g} GFLOP / ({tp} x {device.prefill_mfu:g} x {peak:g} TFLOP/s)"
    return {
        "step_s": Constant(cost.step_s, "s", f"modelled: {step}"),
        "sample_s": Constant(cost.sample_s, "s", f"modelled: {sample}"),
        "prefill_token_s": Constant(cost.prefill_token_s, "s", f"modelled: {prefill}, and attention"),
        "max_running": Constant(
            cost.max_running, "samples", "modelled: the engine's limit, the step's samples, or what the cache has room for"
        ),
    }


def _reduced_s(shape: ModelShape, pool: Pool, layout: Layout) -> float:
    """Seconds that a token's bytes take in the two all-reduces of each layer (tensor parallelism)."""
    tp = layout.tp
    return 4 * (tp - 1) / tp * shape.num_layers * shape.hidden * shape.bytes_each / pool.between_bytes_s(tp)


# ---- training

_STEP_BYTES = 28
"""Bytes read and written for a parameter in an optimiser step: the gradient, float32 weights and two moments twice each, the weights."""


def train_cost(
    shape: ModelShape,
    pool: Pool,
    layout: Layout,
    *,
    microbatch_tokens: float,
    is_trained: bool,
    recomputes: bool,
    has_whole_experts: bool = False,
    gathers_keys: bool = False,
    run_tokens: float = 0.0,
) -> tuple[TrainCost, StageWork]:
    """The cost of a trainer: forward passes, updates and optimiser steps, without what stages wait for; `through_stages` adds it.

    Args:
        has_whole_experts: as of `ParallelLayouts.keeps_experts_whole`. gathers_keys: as of `ParallelLayouts.gathers_keys`.
        run_tokens: those that go through the stages together in a forward pass, on a replica: (pp - 1) runs are waited for.
    """
    device = pool.device
    devices = layout.num_devices
    peak = devices * device.flops(shape.bytes_each)
    exposed = 1 - device.hidden
    fullest = shape.fullest_stage(layout.pp)  # The others wait for it.
    token_comm_s = exposed * _token_communication_s(shape, pool, layout, has_whole_experts=has_whole_experts, gathers_keys=gathers_keys)
    vectors = fullest * shape.num_layers * shape.hidden * shape.bytes_each * pool.attained.train.traffic.value
    moved_s = vectors / (devices * pool.step_bytes_s)
    imbalance = fullest * device.imbalance(shape.routed_share if layout.ep > 1 else 0.0)
    flops, flops2 = shape.token_flops * imbalance, fullest * shape.attention_flops
    gather_s, reduce_s = _gathers(shape, pool, layout)
    gathered = exposed * gather_s if layout.zero >= 3 else 0.0
    forward_rate, update_rate = pass_rates(pool, layout)
    routed_s = fullest * (shape.num_layers - shape.num_dense_layers) / layout.pp * pool.attained.train.expert_layer_s.value
    forward = PassCost(
        fixed_s=(device.microbatch_s + gathered + routed_s) / layout.dp,
        token_s=flops / (forward_rate * peak) + token_comm_s + moved_s,
        token2_s=flops2 / (forward_rate * peak),
        run_tokens=run_tokens * layout.dp,
    )
    sent_s = chunk_s = 0.0
    if layout.pp > 1:
        sent_s = microbatch_tokens / layout.sp * shape.hidden * shape.bytes_each / pool.between_bytes_s(devices)
        first_s = device.hidden * gather_s / math.ceil(shape.num_layers / layout.pp) if layout.zero >= 3 else 0.0
        chunk_s = pool.latency_s(devices) + CHUNK_START * device.microbatch_s + first_s
    if not is_trained:
        return TrainCost(forward, forward, 0.0), StageWork(sent_s=sent_s, chunk_s=chunk_s)
    passes = 4 if recomputes else 3
    # Frozen weights have no gradient, so one pass less. The adapters take part in all passes.
    adapters = fullest * 2 * shape.active_adapter_parameters
    trained_flops = (passes - 1) * flops + passes * adapters if adapters else passes * flops
    token_s = trained_flops / (update_rate * peak) + passes * (token_comm_s + moved_s)
    pass_s = device.microbatch_s + 2 * gathered + (exposed * reduce_s if layout.zero >= 2 else 0.0) + passes * routed_s
    sums_s = device.hidden * reduce_s if layout.zero >= 2 else 0.0
    read_s = passes * sum(shards(shape, layout)) * shape.bytes_each / pool.step_bytes_s
    update = PassCost(pass_s / layout.dp, token_s, token2_s=passes * flops2 / (update_rate * peak))
    # For each trained parameter, stages 0 and 1 move the gradients once and something back (sums or new weights); 2 the weights alone.
    reduced_s = {0: 2 * reduce_s, 1: 2 * reduce_s, 2: reduce_s, 3: 0.0}[layout.zero]
    work = StageWork(microbatch_tokens * token_s * layout.dp, read_s, pass_s, sums_s, sent_s, chunk_s)
    return TrainCost(forward, update, reduced_s + _step_s(shape, pool, layout)), work


def pass_rates(pool: Pool, layout: Layout) -> tuple[float, float]:
    """MFU of a forward pass, and of forward and backward, in a layout."""
    attained = pool.attained.train
    tensor = attained.tensor.value if layout.tp > 1 else 1.0
    return pool.device.prefill_mfu * attained.forward.value * tensor, pool.device.train_mfu * attained.update.value * tensor


def train_constants(shape: ModelShape, pool: Pool, layout: Layout, cost: TrainCost) -> dict[str, Constant]:
    """The constants of a trainer, each with its formula."""
    devices = layout.num_devices
    peak = pool.device.flops(shape.bytes_each) / 1e12
    forward_rate, update_rate = pass_rates(pool, layout)
    rate = f"({devices} x {update_rate:g} x {peak:g} TFLOP/s)"
    forward = f"({devices} x {forward_rate:g} x {peak:g} TFLOP/s)"
    more = f" x {fullest:.3g} in the fullest stage" if (fullest := shape.fullest_stage(layout.pp)) > 1 else ""
    linear, square = f"{shape.token_flops / 1e9:.3g} GFLOP{more}", f"{shape.attention_flops:.3g} FLOP{more}"
    trained = f"each of {shape.adapter_parameters / 1e6:.3g} M parameters of adapters" if shape.adapter_parameters else "a parameter"
    step = f"{_STEP_BYTES} B {trained} and the gradients' reduction, {layout}"
    whole = f"{linear}, frozen but for adapters" if shape.adapter_parameters else linear
    waited = f"modelled: {cost.forward.waits:g} runs of {cost.forward.run_tokens:,.0f} tokens, in which the stages of a forward pass fill"
    waits = {"forward_stages_s": Constant(cost.forward.wait_s(math.inf), "s", waited)} if cost.forward.waits else {}
    return {
        "forward_token_s": Constant(cost.forward.token_s, "s", f"modelled: {linear} / {forward}"),
        "forward_token2_s": Constant(cost.forward.token2_s, "s", f"modelled: {square} / {forward}"),
        "update_token_s": Constant(cost.update.token_s, "s", f"modelled: forward and backward of {whole} / {rate}"),
        "update_token2_s": Constant(cost.update.token2_s, "s", f"modelled: forward and backward of {square} / {rate}"),
        "microbatch_s": Constant(cost.update.fixed_s, "s", "modelled: launches, and what ZeRO moves for each micro-batch"),
        "optimizer_s": Constant(cost.optimizer_s, "s", f"modelled: {step}"),
        **waits,
    }


def _token_communication_s(shape: ModelShape, pool: Pool, layout: Layout, *, has_whole_experts: bool, gathers_keys: bool) -> float:
    """Seconds of communication of a token's forward pass, for the whole trainer: replicas, stages and sequence shards work in parallel.

    Of a mixture with whole experts, tensor ranks share out the rows that they all have, and gather what comes back.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053: two all-reduces a layer. Jacobs et al. 2023, arXiv:2309.14509 (Ulysses): all-to-alls of
        queries, keys, values and the attention output. Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2: an all-gather of keys and
        values, and a reduce-scatter of their gradients. Experts: to them and back; stages are the outermost groups of devices
        (Megatron-LM's `initialize_model_parallel`, order "tp-cp-ep-dp-pp"), so the experts of a stage are neighbours.
    """
    each, tp, sp, ep = shape.bytes_each, layout.tp, layout.sp, layout.ep
    heads = (shape.num_heads + shape.num_kv_heads) * (shape.head_dim + shape.value_dim)
    reduced = 4 * (tp - 1) / tp * shape.hidden * each / pool.between_bytes_s(tp)
    moved = (sp - 1) * shape.key_width if gathers_keys else (sp - 1) / sp * heads
    exchanged = moved / tp * each / pool.between_bytes_s(tp * sp)
    routed, sparse = 0.0, (shape.num_layers - shape.num_dense_layers) / shape.num_layers
    if has_whole_experts and shape.num_experts and tp * ep > 1:
        sent = 2 * (tp * ep - 1) / (tp * ep) * shape.num_experts_per_token * shape.hidden * each / tp
        routed = sparse * (sent / pool.between_bytes_s(tp * ep) + (tp - 1) / tp * shape.hidden * each / pool.between_bytes_s(tp))
        reduced *= 1.0 if shape.shared_width else 1 - sparse / 2  # There is no sum of an MLP then.
    elif ep > 1:
        sent = 2 * (ep - 1) / ep * shape.num_experts_per_token * shape.hidden * each
        routed = sparse * sent / pool.between_bytes_s(ep * tp)
    return shape.fullest_stage(layout.pp) * shape.num_layers * (reduced + exchanged + routed) / (layout.dp * sp * layout.pp)


def _gathers(shape: ModelShape, pool: Pool, layout: Layout) -> tuple[float, float]:
    """Seconds to gather all weights on every replica, and to reduce-scatter all gradients."""
    ranks, stride = layout.dp * layout.sp, layout.tp
    gather_s = reduce_s = 0.0
    groups = ranks, max(1, ranks // layout.ep)
    for count, trained, group in zip(shards(shape, layout), trained_shards(shape, layout), groups, strict=True):
        if count:
            gather_s += pool.gather_s(count * shape.bytes_each, group, stride * (ranks // group))
        if trained:
            reduce_s += pool.gather_s(trained * shape.bytes_each, group, stride * (ranks // group))
    return gather_s, reduce_s


def _step_s(shape: ModelShape, pool: Pool, layout: Layout) -> float:
    """Seconds of an optimiser step, without communication between devices."""
    ranks = layout.dp * layout.sp
    shared, experts = trained_shards(shape, layout)
    if layout.zero >= 1:
        shared, experts = shared / ranks, experts / max(1, ranks // layout.ep)
    count = shared + experts
    if not layout.offload:
        return count * _STEP_BYTES / pool.step_bytes_s
    moved = 2 * count * shape.bytes_each / pool.host_link_bytes_s(is_pinned=True)
    return moved + count * _STEP_BYTES / pool.host_step_bytes_s


# ---- switches, weight syncs and hops

_MAY_PIN = 0.5
"""Share of the host's memory that may be pinned: pinned memory can't be swapped out, and the rest of the machine needs some."""


def switch(engine: EngineId, pool: Pool, footprint: Footprint, *, is_trained: bool) -> Switch:
    """The cost of offloading and onloading an engine, by what it has on each device."""
    if pool.device.shares_host_memory:
        return Switch(0.0, pool.device.switch_s, is_resident=True)
    kept = footprint.kept_bytes
    rate = pool.host_link_bytes_s(is_pinned=kept + footprint.host <= _MAY_PIN * pool.host_bytes)
    if engine.kind == "rollout":
        attained = pool.attained.rollout
        come_s = pool.device.switch_s + attained.wake_s.value + (0.0 if is_trained else kept / rate)
        return Switch(0.0, come_s, kept_bytes=int(attained.kept_gib.value * GIB), rebuild_s=attained.wake_s.value)
    rate *= pool.attained.train.swap.value
    context = int(pool.attained.train.context_gib.value * GIB)
    return Switch(kept / rate if is_trained else 0.0, pool.device.switch_s + kept / rate, kept_bytes=context)


def sync_s(
    num_bytes: float, num_matrices: int, source: tuple[Pool, Layout], target: tuple[Pool, Layout], *, is_same_devices: bool
) -> float:
    """Seconds to send new weights from a trainer to all rollout instances, with their checksums.

    On the same devices each gets the missing part of its shard from its neighbours (CUDA IPC inside a node); a single device copies.
    Otherwise weights are broadcast in buckets to every device: inside a node over its links, else over the network.

    The trainer gathers, converts and packs them, whatever the links carry (`sync_gb_s`). On the same devices packing and unpacking a bucket
    take turns; on others the next one is packed while one is sent. Each matrix takes a time of its own, and those of experts are many.
    """
    (giver, given), (taker, taken) = source, target
    part = num_bytes / (taken.tp * taken.pp)
    attained = giver.attained.train
    packing_s = num_bytes / (attained.sync_gb_s.value * 1e9) if attained.sync_gb_s.value else 0.0
    fixed = max(giver.device.sync_s, taker.device.sync_s) + part / taker.step_bytes_s + num_matrices * attained.matrix_s.value
    if is_same_devices:
        fixed += 2 * packing_s
        held = given.num_replica_devices * (given.dp if given.zero >= 3 else 1)
        if taken.num_replica_devices == held == 1:
            return fixed + 2 * part / taker.step_bytes_s
        return fixed + part / taker.between_bytes_s(max(held, taken.num_replica_devices))
    is_one_node = giver.name == taker.name and giver.is_in_node(given.num_devices + taken.num_devices)
    rate = min(giver.link_bytes_s, taker.link_bytes_s)
    if not is_one_node:
        rate = min(rate, giver.network_bytes_s, taker.network_bytes_s)
    share = min(giver.device.attained_sync / giver.device.attained_link, taker.device.attained_sync / taker.device.attained_link, 1.0)
    return fixed + max(packing_s, num_bytes / (share * rate))


def adapter_merge_s(num_bytes: float, target: tuple[Pool, Layout]) -> float:
    """Seconds in which rollout instances merge adapters into weights of so many bytes, which are loaded from pinned host memory."""
    taker, taken = target
    rate = taker.step_bytes_s if taker.device.shares_host_memory else taker.host_link_bytes_s(is_pinned=True)
    return num_bytes / (taken.tp * taken.pp) / rate


def hop_s(num_bytes: float, pools: Sequence[Pool], *, is_same_pool: bool) -> float:
    """Seconds to send samples from one process to another: on one host, or over the network between pools and between nodes."""
    latency = max((pool.device.hop_s for pool in pools), default=0.0)
    rate = min((pool.device.channel_gb_s * 1e9 for pool in pools), default=float("inf"))
    if not is_same_pool or any(pool.num_nodes > 1 for pool in pools):
        rate = min([rate, *(pool.network_bytes_s * pool.per_node for pool in pools)])
    return latency + num_bytes / rate


# ---- the costs of one flow

DEFAULT_LATENCY_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.002)
"""Latency quantiles of a reward or an op that the spec does not name: a rule that checks a text, now and then slowly. An estimate."""

_MUCH_CACHE = 0.25
"""Share of a device's memory above which a KV cache is tried at half its size, too."""
_OF_STAGES, _WHOLE = StageOrder.__struct_fields__, Passes()
_MUCH_ACTIVATIONS = 0.5
"""Share of a device's memory above which a trainer's activations are tried recomputed, too."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _memoised(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Memoise a method in its object's `_answers`."""
    name = getattr(method, "__name__", "")

    @functools.wraps(method)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = args[0]._answers  # type: ignore[attr-defined]  # `args[0]` is the costs
        key = (name, *args[1:])
        try:
            found: _T = known[key]
        except KeyError:
            found = known[key] = method(*args, **kwargs)
        return found

    return answer


def _is_as_told(layout: Layout, offers: ParallelLayouts, options: Mapping[str, object]) -> bool:
    """Whether a trainer's layout has the degrees that its options in the spec say."""
    told = {degree: options[name] for degree, name in offers.options if name in options and degree not in _OF_STAGES}
    return all(getattr(layout, degree) == (bool(value) if degree == "offload" else value) for degree, value in told.items())


@final
class ModelledCosts(Costs):
    """The modelled costs of one flow on one cluster.

    Args:
        shapes: the shape of each role with a model; see `shapes_of`.
        extents: lengths of the samples by role; `""` for all other roles.
    Raises:
        SpecError: a device does not exist, or the latencies of a function are invalid.
    """

    def __init__(self, spec: ClusterSpec, workload: Workload, shapes: Mapping[str, ModelShape], extents: Mapping[str, Extent]) -> None:
        self._spec = spec
        self._workload = workload
        self._shapes = dict(shapes)
        self._extents = dict(extents)
        self._pools = pools_of(spec)
        self._attained = next(iter(self._pools.values())).attained if self._pools else Attained()
        self._answers: dict[object, object] = {}
        self._offers = {"rollout": offered(spec.rollout.engine, "rollout"), "train": offered(spec.train.engine, "train")}
        option, value = self._offers["train"].recompute_option
        how = self._offers["train"].recomputes
        self._may_recompute = how == "where needed" and option not in spec.train.options
        self._recomputes = spec.train.options[option] == value if option in spec.train.options else how == "always"
        self._sends_adapters = spec.weights.adapters == "alone" and adds_adapters(spec.rollout.engine)
        self._trained = {call.engine.role for call in workload.calls if call.work == "update" and call.engine is not None}
        given = spec.train.options.get("logprob_tokens", LOGPROB_TOKENS)
        self._run_tokens = float(int(str(given))) if is_count(given) else 0.0
        self._samples: dict[str, int] = {}
        for call in workload.calls:
            if call.work == "generate" and call.engine is not None:
                self._samples[call.engine.role] = max(self._samples.get(call.engine.role, 1), call.num_samples)
        _check_latencies(spec)

    @property
    def spec(self) -> ClusterSpec:
        return self._spec

    def for_spec(self, spec: ClusterSpec) -> ModelledCosts:
        """Costs of the same flow on another cluster, or under other settings."""
        return ModelledCosts(spec, self._workload, self._shapes, self._extents)

    def pool(self, name: str) -> Pool:
        return self._pools[name]

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def shape(self, engine: EngineId) -> ModelShape:
        """The shape of an engine's model. Raises `ModelError` if it is unknown."""
        if engine.role not in self._shapes:
            now = f"Say which model to plan for: `shapes: {{{engine.role}: Qwen2.5-7B}}` in the cluster spec."
            raise ModelError(f"there is no shape for {engine.role}", now=now)
        return self._shapes[engine.role]

    def extent(self, role: str) -> Extent:
        return self._extents.get(role) or self._extents.get("") or next(iter(self._extents.values()))

    def is_trained(self, engine: EngineId) -> bool:
        return engine.role in self._trained

    @_memoised
    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self._layouts(engine, pool, num_devices, None)

    def layouts_like(self, engine: EngineId, pool: str, num_devices: int, like: Layout) -> Sequence[Layout]:
        # Of the other layouts nothing is computed: there are many times as many. Threads, experts and TP over nodes have rules by dp.
        size, found = like.num_replica_devices, self._pools[pool]
        most = self._offers[engine.kind].dp if engine.kind == "train" else None
        goes_by_dp = found.device.shares_host_memory or self.shape(engine).num_experts or like.ep > 1 or like.tp > found.per_node
        if goes_by_dp or num_devices % size or not size <= num_devices <= found.num_devices or (most and num_devices > most * size):
            listed = self._layouts(engine, pool, num_devices, like)
            return [layout for layout in listed if layout.has_replicas_of(like)]
        dp = num_devices // size
        alike = self._accepted_like(engine, found.within(size * min(dp, 2)), Layout(like.tp, like.pp, like.sp, min(dp, 2)))
        layouts = [Layout(one.tp, one.pp, one.sp, dp, one.ep, one.zero, one.offload) for one in alike]
        return layouts if engine.kind == "rollout" else self._with_recomputed(engine, pool, layouts)

    @_memoised
    def _accepted_like(self, engine: EngineId, per_node: int, like: Layout) -> Sequence[Layout]:
        """The layouts of a dense model on the devices of another, with its replicas: with more replicas they are the same."""
        legal = legal_layouts(self.shape(engine), self._offers[engine.kind], engine.kind, like.num_devices, per_node, like)
        return [layout for layout in self._accepted(engine, legal) if layout.has_replicas_of(like)]

    def _layouts(self, engine: EngineId, pool: str, num_devices: int, like: Layout | None) -> Sequence[Layout]:
        """`layouts`; of those that have not the replicas of `like`, if it is given, as many as it takes no time to list."""
        found = self._pools[pool]
        if not 1 <= num_devices <= found.num_devices:
            return ()
        if found.device.shares_host_memory:
            return thread_layouts(engine.kind, num_devices, found.per_node, self._offers[engine.kind], self._spec.train.ranks)
        offers, within, shape = self._offers[engine.kind], found.within(num_devices), self.shape(engine)
        legal = self._accepted(engine, legal_layouts(shape, offers, engine.kind, num_devices, within, like))
        if engine.kind == "rollout":
            return (*legal, *self._over_nodes(engine, num_devices, found.per_node))
        return tuple(self._with_recomputed(engine, pool, legal))

    def _accepted(self, engine: EngineId, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Those of some legal layouts that a trainer and its options accept; all of a rollout engine's."""
        if engine.kind == "rollout":
            return layouts
        offers, shape = self._offers["train"], self.shape(engine)
        options: Mapping[str, object] = {**self._spec.train.options, **self._told_order(engine)}
        return accepted(shape, (layout for layout in layouts if _is_as_told(layout, offers, options)), offers, options)

    @_memoised
    def _pin(self, engine: EngineId) -> PinSpec:
        return self._spec.pin_of(engine.role, engine.kind)

    def _with_recomputed(self, engine: EngineId, pool: str, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """These layouts, and each with recomputed layers too where activations are much of a device, or a pin asks for it."""
        if not self._may_recompute or not self.is_trained(engine):
            return layouts
        there, is_asked = self.device_bytes(pool), bool(self._pin(engine).recompute)
        found = list[Layout]()
        for layout in layouts:
            need = self.footprint(engine, pool, layout)
            is_much = need.device_bytes > there or need.activations > _MUCH_ACTIVATIONS * there
            found += [layout, *([msgspec.structs.replace(layout, recompute=True)] if is_much or is_asked else [])]
        return found

    def _over_nodes(self, engine: EngineId, num_devices: int, per_node: int) -> tuple[Layout, ...]:
        """Layouts whose tensor parallelism goes over whole nodes, of a rollout engine whose pin asks for it."""
        tp = self._pin(engine).layout.tp or 0
        is_legal = tp > per_node and tp % per_node == num_devices % tp == 0 and self.shape(engine).is_tp_legal(tp)
        return (Layout(tp=tp, dp=num_devices // tp),) if is_legal else ()

    @_memoised
    def unit(self, engine: EngineId, pool: str) -> int:
        found = self._pools[pool]
        inside = sorted(range(1, found.per_node + 1), key=lambda num: found.per_node % num > 0)  # Divisors first; others of one node alone.
        inside = [num for num in inside if found.num_nodes == 1 or found.per_node % num == 0]
        first = next((num for num in inside if self.fits(engine, pool, num)), 0)
        if first or found.num_nodes == 1:
            return first
        if engine.kind == "rollout":  # Instances have the sizes of replicas, which double.
            doubled = [found.per_node << i for i in range(1, 12) if 1 << i <= found.num_nodes]
            return next((count for count in doubled if self.fits(engine, pool, count)), 0)
        # What a trainer needs of a device does not grow with the number of nodes, so bisection finds the smallest number.
        few, many = 1, found.num_nodes
        if not self.fits(engine, pool, many * found.per_node):
            return 0
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if self.fits(engine, pool, middle * found.per_node) else (middle, many)
        return many * found.per_node

    def fits(self, engine: EngineId, pool: str, num_devices: int) -> bool:
        """Whether some layout on so many devices fits the memory alone."""
        layouts = self.layouts(engine, pool, num_devices)
        most = max((layout.zero for layout in layouts), default=0)
        needs = (self.footprint(engine, pool, layout) for layout in layouts if layout.zero == most)
        return any(need.device_bytes <= self.device_bytes(pool) and need.host <= self.host_bytes(pool) for need in needs)

    def like(self, engine: EngineId) -> EngineId:
        return self._first_like(engine) if engine.kind == "train" else engine

    @_memoised
    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        shape, extent = self.shape(engine), self.extent(engine.role)
        return decode_cost(shape, self._pools[pool], layout, extent, self._num_running(engine, pool, layout))

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return self._train(self._first_like(engine), pool, layout)

    def stage_order(self, engine: EngineId, pool: str, layout: Layout) -> StageOrder:
        return self._order(self._first_like(engine), pool, layout)[0] if engine.kind == "train" else StageOrder()

    @_memoised
    def _order(self, engine: EngineId, pool: str, layout: Layout) -> tuple[StageOrder, Passes]:
        """The order of stages that is fastest, of those whose activations fit; what the spec says of it stays."""
        if layout.pp == 1:
            return StageOrder(), _WHOLE
        groups = self._orders(engine, layout.pp, self._recomputes or layout.recompute)
        if len(groups) == len(groups[0]) == 1:
            return groups[0][0]
        work, held = self._alone(engine, pool, layout)[1], self._activations(engine, layout)
        plain = self._footprint_in(engine, layout, groups[0][0][1])
        others = plain.device_bytes - plain.activations
        return fastest_order(
            groups,
            lambda passes: work.work_s + passes_excess_s(layout.pp, passes, work),
            lambda passes: others + held.num_bytes(passes),
            self.device_bytes(pool),
        )

    @_memoised
    def _orders(self, engine: EngineId, pp: int, recomputes: bool) -> Sequence[Sequence[tuple[StageOrder, Passes]]]:
        """The orders of so many stages, as `fastest_order` takes them."""
        shape, extent = self.shape(engine), self.extent(engine.role)
        most, longest = self._usual_tokens(engine.role) / max(extent.sample, 1.0), extent.longest / self._microbatch_tokens(engine.role)
        weights = 0.0 if shape.adapter_parameters else 1 - shape.routed_share
        groups = orders_of(shape, pp, self._offers["train"], self._told_order(engine), most)
        passes = functools.partial(passes_of, pp, recomputes=recomputes, longest=longest, weights=weights)
        return [[(order, passes(order, shape.chunk_share(pp, order.vpp))) for order in group] for group in groups]

    @_memoised
    def _told_order(self, engine: EngineId) -> Mapping[str, object]:
        """What the spec's options or pin say of the order of stages."""
        options, pin = self._spec.train.options, self._pin(engine).layout
        found = {name: options.get(name) or getattr(pin, name) for name in _OF_STAGES}
        if self._spec.train.engine in ONE_LAYOUT and any(shape.adapter_parameters for shape in self._shapes.values()):
            found["vpp"] = found["vpp"] or 1  # A policy lends its weights to references in its worker, which have its layout.
        return {name: value for name, value in found.items() if value is not None}

    @_memoised
    def _train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        alone = self._alone(engine, pool, layout)
        return alone[0] if layout.pp == 1 else through_stages(*alone, layout, self._order(engine, pool, layout)[1])

    @_memoised
    def _alone(self, engine: EngineId, pool: str, layout: Layout) -> tuple[TrainCost, StageWork]:
        return train_cost(
            self.shape(engine),
            self._pools[pool],
            layout,
            microbatch_tokens=self._usual_tokens(engine.role),
            is_trained=self.is_trained(engine),
            recomputes=self._recomputes or layout.recompute,
            has_whole_experts=self._offers["train"].keeps_experts_whole,
            gathers_keys=self._offers["train"].gathers_keys,
            run_tokens=max(self._run_tokens, self.extent(engine.role).sample),
        )

    @_memoised
    def function(self, call: str) -> FunctionCost:
        given = self._spec.functions.latency_s.get(call.partition("@")[0], DEFAULT_LATENCY_S)
        quantiles = given if isinstance(given, tuple) else (given,)
        return FunctionCost(quantiles, self._spec.functions.concurrency)

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        if engine.kind == "rollout":
            return self._rollout_footprint(engine, pool, layout)
        first = self._first_like(engine)
        return self._footprint_in(first, layout, self._order(first, pool, layout)[1] if layout.pp > 1 else _WHOLE)

    @_memoised
    def _rollout_footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        running = self._num_running(engine, pool, layout)
        return rollout_footprint(self.shape(engine), layout, self.extent(engine.role), running)

    @_memoised
    def _footprint_in(self, engine: EngineId, layout: Layout, passes: Passes) -> Footprint:
        return train_footprint(
            self.shape(engine),
            layout,
            self._microbatch_tokens(engine.role),
            is_trained=self.is_trained(engine),
            recomputes=self._recomputes or layout.recompute,
            gathers_keys=self._offers["train"].gathers_keys,
            split=passes,
        )

    def _activations(self, engine: EngineId, layout: Layout) -> Activations:
        is_trained, recomputes = self.is_trained(engine), self._recomputes or layout.recompute
        tokens, gathers_keys = self._microbatch_tokens(engine.role), self._offers["train"].gathers_keys
        return activations_of(self.shape(engine), layout, tokens, is_trained=is_trained, recomputes=recomputes, gathers_keys=gathers_keys)

    @_memoised
    def _first_like(self, engine: EngineId) -> EngineId:
        """The first trainer with the same costs (a policy's critic has the policy's shape)."""

        def what(one: EngineId) -> tuple[ModelShape, float, Extent, bool, Mapping[str, object]]:
            lengths = self._microbatch_tokens(one.role), self.extent(one.role)
            return self.shape(one), *lengths, self.is_trained(one), self._told_order(one)

        mine = what(engine)
        return next((one for one in self._workload.engines if one.kind == "train" and what(one) == mine), engine)

    def device_bytes(self, pool: str) -> int:
        return self._pools[pool].memory_bytes

    def host_bytes(self, pool: str) -> int:
        return self._pools[pool].host_bytes

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return switch(engine, self._pools[pool], footprint, is_trained=self.is_trained(engine))

    @_memoised
    def _sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], is_same_devices: bool) -> float:
        shape = self._shapes[role]
        ends = (self._pools[source[0]], source[1]), (self._pools[target[0]], target[1])
        if shape.adapter_parameters and self._sends_adapters and not is_same_devices:
            sent_s = sync_s(shape.adapter_parameters * shape.bytes_each, shape.num_matrices, *ends, is_same_devices=False)
            return sent_s + adapter_merge_s(shape.weight_bytes, ends[1])
        return sync_s(shape.weight_bytes, shape.num_matrices, *ends, is_same_devices=is_same_devices)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return self._sync_s(role, source, target, is_same_devices)

    def smaller_caches(self, engine: EngineId, pool: str, layout: Layout) -> Sequence[tuple[Footprint, int]]:
        """Half of the full cache, where that is much of the device: what others keep there must have room beside it."""
        if engine.kind != "rollout" or self._pools[pool].device.shares_host_memory:
            return ()
        full, running = self.footprint(engine, pool, layout), self._num_running(engine, pool, layout)
        if running < 2 or full.kv < _MUCH_CACHE * self.device_bytes(pool):
            return ()
        return ((rollout_footprint(self.shape(engine), layout, self.extent(engine.role), running // 2), running // 2),)

    def arithmetic(self, engine: EngineId, pool: str, layout: Layout) -> Arithmetic | None:
        shape, device = self.shape(engine), self._pools[pool].device
        ways = layout.tp * layout.pp
        return Arithmetic(
            token_flops=shape.token_flops,
            attention_flops=shape.attention_flops,
            weights_bytes=weights_read(shape, self._num_running(engine, pool, layout) if engine.kind == "rollout" else 1),
            token_bytes=kv_token_bytes(shape, layout) * ways,
            peak_flops=device.flops(shape.bytes_each),
            bytes_s=device.memory_gb_s * 1e9,
        )

    def held_parts(self, engine: EngineId, pool: str, layout: Layout) -> tuple[HeldPart, ...]:
        if engine.kind != "train" or any(pool.device.shares_host_memory for pool in self._pools.values()):
            return ()
        shape, name = self.shape(engine), self._spec.train.engine
        degrees = {degree: found for degree in ("tp", "pp", "ep") if (found := getattr(layout, degree)) > 1}
        if (order := self.stage_order(engine, pool, layout)).vpp > 1:
            degrees |= {"vpp": order.vpp, "micro_batches": order.micro_batches}
        options = train_options(name, self._spec.train.options, degrees)
        ranks: dict[tuple[int, tuple[tuple[int, int], ...], tuple[int, int] | None], list[int]] = {}
        held = held_by_ranks(name, options, layout.num_devices, shape.num_layers, shape.num_experts)
        for rank, (spans, experts) in enumerate(held):
            layers = tuple((span.start, span.stop) for span in spans)
            some = (experts.start, experts.stop) if len(experts) < shape.num_experts else None
            ranks.setdefault((rank // (layout.num_devices // layout.pp), layers, some), []).append(rank)
        return tuple(
            HeldPart(engine, tuple(those), stage, layers, ("embedding",) * (stage == 0) + ("head",) * (stage == layout.pp - 1), experts_of)
            for (stage, layers, experts_of), those in ranks.items()
        )

    def rest_s(self) -> float:
        return self._attained.train.rest_s.value

    def spread(self, work: str) -> tuple[float, float]:
        """Return the spread of `Costs` by the intervals of the numbers in use; neutral ones, though exact, are as wide as an estimate."""
        rollout, train = self._attained.rollout, self._attained.train
        has_experts = any(shape.num_experts for shape in self._shapes.values())
        of: dict[str, list[Estimate]] = {
            "generate": [rollout.error],
            "forward": [train.forward],
            "update": [train.error, *([train.expert_layer_s] if has_experts else [])],
            "sync": [train.sync_gb_s],
            "switch": [rollout.wake_s, train.swap],
            "rest": [train.rest_s],
        }
        return _factors(of.get(work, []), is_rate=work in ("forward", "sync"))

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return hop_s(
            num_bytes, [self._pools[name] for name in (source, target) if name], is_same_pool=source == target or not (source and target)
        )

    def constants(self) -> dict[str, Constant]:
        """Constants of the devices, and of each engine at its smallest layout; `terms` gives those of another layout."""
        found: dict[str, Constant] = {}
        for name, pool in self._pools.items():
            found |= {f"{name}.{field}": constant for field, constant in pool.device.constants().items()}
            if not pool.device.shares_host_memory:
                found |= {f"{name}.{field}": constant for field, constant in pool.attained.constants().items()}
            for engine in self._workload.engines:
                unit = self.unit(engine, name)
                layouts = self.layouts(engine, name, unit) if unit else ()
                layout = next((one for one in layouts if self._is_small(engine, name, one)), None)
                if layout is not None:
                    found |= {f"{engine}.{name}.{term}": constant for term, constant in self.terms(engine, name, layout).items()}
        for call in self._workload.calls:
            if call.work == "function":
                base = call.name.partition("@")[0]
                source = "the cluster spec" if base in self._spec.functions.latency_s else "estimate: a rule that checks a text"
                found[f"{base}.latency_s"] = Constant(self.function(call.name).mean_s, "s", f"modelled: {source}")
        return found

    def terms(self, engine: EngineId, pool: str, layout: Layout) -> dict[str, Constant]:
        """The constants of one engine in one layout, each with its formula."""
        shape, found = self.shape(engine), self._pools[pool]
        if engine.kind == "rollout":
            return decode_constants(shape, found, layout, self.decode(engine, pool, layout), self.extent(engine.role))
        return train_constants(shape, found, layout, self.train(engine, pool, layout))

    def _is_small(self, engine: EngineId, pool: str, layout: Layout) -> bool:
        need = self.footprint(engine, pool, layout)
        return need.device_bytes <= self.device_bytes(pool) and need.host <= self.host_bytes(pool)

    def _num_running(self, engine: EngineId, pool: str, layout: Layout) -> int:
        """Samples that an instance decodes together: as many as the engine allows, the step has for it, and the KV cache holds."""
        limit = min(self._spec.rollout.max_running, max(1, -(-self._samples.get(engine.role, 1) // layout.dp)))
        return most_running(self.shape(engine), layout, self.extent(engine.role), self._pools[pool].memory_bytes, limit)

    def _usual_tokens(self, role: str) -> float:
        """Tokens of most micro-batches: their budget, or a sample of mean length."""
        return max(self._spec.train.token_budget, self.extent(role).sample)

    @_memoised
    def _microbatch_tokens(self, role: str) -> float:
        """Tokens of the largest micro-batch: its budget, or the longest sample, which then has one of its own."""
        return max(self._spec.train.token_budget, self.extent(role).longest)


def _factors(estimates: Sequence[Estimate], *, is_rate: bool) -> tuple[float, float]:
    """Factors of a time that estimates leave open, independent of each other: their logarithms add up as squares."""
    low = high = 0.0
    for one in estimates:
        if 0 < one.low < one.high:
            below, above = math.log(one.value / one.low), math.log(one.high / one.value)
            below, above = (above, below) if is_rate else (below, above)
            low, high = low + below**2, high + above**2
    return math.exp(-math.sqrt(low)), math.exp(math.sqrt(high))


def shapes_of(models: Mapping[str, Model], spec: ClusterSpec) -> dict[str, ModelShape]:
    """Find the shape of each role's model, with its adapters.

    The spec's `shapes` come first, then the config.json of the model's directory, in the flow's dtype. A shape given for a role is also
    that of the roles whose model has the same path: a policy's reference and critic.

    Raises:
        SpecError: `shapes` names a role that the flow does not have. ModelError: an unknown model name or directory.
    """
    for role in spec.shapes:
        if role not in models:
            now = did_you_mean(role, models, f"It has {', '.join(models) or 'none'}.")
            raise SpecError(f"shapes.{role}: the flow has no model of that role", where=spec.where("shapes", role), now=now)
    by_path = {models[role].path: name for role, name in reversed(spec.shapes.items())}
    shapes = {}
    for role, model in models.items():
        named = spec.shapes.get(role) or by_path.get(model.path)
        shapes[role] = adapted(shape_named(named) if named else _own_shape(role, model), model.lora)
    return shapes


def _own_shape(role: str, model: Model) -> ModelShape:
    try:
        return ModelShape.from_config(hub_directory(model, with_weights=False) if is_of_hub(model.path) else model.path).with_dtype(
            model.dtype
        )
    except ModelError as error:
        now = f"Or say which model to plan for: `shapes: {{{role}: Qwen2.5-7B}}` in the cluster spec."
        raise ModelError(f"how large the model of {role} is can't be seen: {error.what}", now=f"{error.now}\n{now}") from None


def _check_latencies(spec: ClusterSpec) -> None:
    for name, given in spec.functions.latency_s.items():
        quantiles = given if isinstance(given, tuple) else (given,)
        if not quantiles or min(quantiles) < 0 or list(quantiles) != sorted(quantiles):
            raise SpecError(f"functions.latency_s.{name}: {given}; seconds, none of them negative, the shortest first")
