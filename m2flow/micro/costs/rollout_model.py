"""How long a rollout instance decodes and prefills, modelled from the model's shape and the device's data sheet.

    step(b) = step_s + b * sample_s

    step_s   = weights read / (tp * MBU * bandwidth) + launch + layers * (gap + 2 all-reduces)
    sample_s = cache read at the mean context / (its shards * MBU * bandwidth) + operations / (tp * MFU * peak) + bytes of the all-reduces

Limit: of a model with experts, the weights that a step reads grow with the batch until all experts are met. The line takes what a batch
of the mean size meets, so that a single sample's step is too slow in it. With pp stages, as many batches are under way, each a stage on.
"""

from __future__ import annotations

from m2flow.micro.costs.extents import Extent
from m2flow.micro.costs.footprints import kv_token_bytes
from m2flow.micro.costs.pools import Pool
from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.costs.terms import Constant, DecodeCost, Layout


def decode_cost(shape: ModelShape, pool: Pool, layout: Layout, extent: Extent, max_running: int) -> DecodeCost:
    """Of one instance, whose batches have up to so many samples."""
    device, tp, each = pool.device, layout.tp, shape.bytes_each
    flops = device.flops(each)
    step_s = (
        weights_read(shape, max_running) / (tp * pool.decode_bytes_s)
        + device.launch_s
        + shape.num_layers * (device.layer_s + 2 * pool.latency_s(tp))
        + (layout.pp - 1) * pool.latency_s(layout.num_replica_devices)
    )
    imbalance = pool.device.imbalance(shape.routed_share if layout.ep > 1 else 0.0)
    attention = 2 * shape.attention_flops * extent.context
    reduced_s = _reduced_s(shape, pool, layout)
    sample_s = (
        kv_token_bytes(shape, layout) * layout.pp * extent.context / pool.decode_bytes_s
        + (shape.token_flops * imbalance + attention) / (tp * device.decode_mfu * flops)
        + reduced_s
    ) / layout.pp
    prefill = shape.token_flops * imbalance + shape.attention_flops * extent.prompt
    prefill_s = prefill / (tp * layout.pp * device.prefill_mfu * flops) + reduced_s / layout.pp
    return DecodeCost(step_s, sample_s, prefill_s, max_running)


def weights_read(shape: ModelShape, num_running: int) -> float:
    """Bytes of the weights that a decode step reads: all but the embedding table, and of the experts those that the batch is routed to.

    Source:
        Of E experts, of which a token takes k evenly at random, b tokens miss one with probability (1 - k/E)^b.
    """
    shared = shape.num_multiplied - shape.expert_parameters * shape.num_experts_per_token // max(shape.num_experts, 1)
    met = 1 - (1 - shape.num_experts_per_token / shape.num_experts) ** max(num_running, 1) if shape.num_experts else 0.0
    return shape.bytes_each * (shared + shape.expert_parameters * met)


def decode_constants(shape: ModelShape, pool: Pool, layout: Layout, cost: DecodeCost, extent: Extent) -> dict[str, Constant]:
    """The numbers of an instance, each with how it comes about."""
    tp, device = layout.tp, pool.device
    read = weights_read(shape, cost.max_running) / 1e9
    step = f"{read:.3g} GB of weights / ({tp} x {device.decode_mbu:g} x {device.memory_gb_s:g} GB/s) + launch and {shape.num_layers} layers"
    cache = kv_token_bytes(shape, layout) * extent.context / 1e9
    peak = device.flops(shape.bytes_each) / 1e12
    sample = (
        f"{cache:.3g} GB of cache / ({device.decode_mbu:g} x {device.memory_gb_s:g} GB/s) + {shape.token_flops / 1e9:.3g} GFLOP / ({tp} x "
    )
    sample += f"{device.decode_mfu:g} x {peak:g} TFLOP/s)"
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
    """Of a token: what tensor parallelism sums up twice a layer, all-reduced."""
    tp = layout.tp
    return 4 * (tp - 1) / tp * shape.num_layers * shape.hidden * shape.bytes_each / pool.between_bytes_s(tp)
