"""How long a trainer's passes and steps take, modelled from the model's shape and the device's data sheet.

    a sample of s tokens   token_s * s + token2_s * s**2        operations / (devices * MFU * peak), and the exposed communication
                           of adapters: a pass less over the frozen weights, all passes over theirs
    a micro-batch          fixed_s                              launches; ZeRO 2 reduces gradients, ZeRO 3 gathers weights too
    an optimiser step      optimizer_s                          gradients' reduction, the optimiser's bytes, a pipeline's bubble

Micro-batches are shared out to the replicas, so a micro-batch costs the whole trainer a dp-th of what it costs a replica. Samples are
taken to be many and evenly shared; imbalance within a step is the simulator's.
"""

from __future__ import annotations

from m2flow.micro.costs.footprints import shards, trained_shards
from m2flow.micro.costs.pools import Pool
from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.costs.terms import Constant, Layout, PassCost, TrainCost

_STEP_BYTES = 28
"""Read and written for a parameter in an optimiser step: the gradient, float32 weights and two moments twice each, the weights."""


def train_cost(shape: ModelShape, pool: Pool, layout: Layout, *, microbatch_tokens: float, is_trained: bool, recomputes: bool) -> TrainCost:
    device = pool.device
    devices = layout.num_devices
    peak = devices * device.flops(shape.bytes_each)
    exposed = 1 - device.hidden
    token_comm_s = exposed * _token_communication_s(shape, pool, layout)
    imbalance = device.imbalance(shape.routed_share if layout.ep > 1 else 0.0)
    work, work2 = shape.token_flops * imbalance, float(shape.attention_flops)
    gather_s, reduce_s = _gathers(shape, pool, layout)
    gathered = exposed * gather_s if layout.zero >= 3 else 0.0

    forward = PassCost(
        fixed_s=(device.microbatch_s + gathered) / layout.dp,
        token_s=work / (device.prefill_mfu * peak) + token_comm_s,
        token2_s=work2 / (device.prefill_mfu * peak),
    )
    if not is_trained:
        return TrainCost(forward, forward, 0.0)
    passes = 4 if recomputes else 3
    # Frozen weights take no gradient of their own: a pass less. The adapters beside them are multiplied in all passes.
    adapters = 2 * shape.active_adapter_parameters
    trained_work = (passes - 1) * work + passes * adapters if adapters else passes * work
    update = PassCost(
        fixed_s=(device.microbatch_s + 2 * gathered + (exposed * reduce_s if layout.zero >= 2 else 0.0)) / layout.dp,
        token_s=trained_work / (device.train_mfu * peak) + passes * token_comm_s,
        token2_s=passes * work2 / (device.train_mfu * peak),
    )
    # Of each trained parameter, stages 0 and 1 move the gradients once and something back (the sums, or new weights); 2 the weights alone.
    moved_s = {0: 2 * reduce_s, 1: 2 * reduce_s, 2: reduce_s, 3: 0.0}[layout.zero]
    bubble_s = (layout.pp - 1) * microbatch_tokens * update.token_s * layout.dp
    return TrainCost(forward, update, moved_s + _step_s(shape, pool, layout) + bubble_s)


def train_constants(shape: ModelShape, pool: Pool, layout: Layout, cost: TrainCost) -> dict[str, Constant]:
    """The numbers of a trainer, each with how it comes about."""
    device, devices = pool.device, layout.num_devices
    peak = device.flops(shape.bytes_each) / 1e12
    rate = f"({devices} x {device.train_mfu:g} x {peak:g} TFLOP/s)"
    forward = f"({devices} x {device.prefill_mfu:g} x {peak:g} TFLOP/s)"
    linear, square = f"{shape.token_flops / 1e9:.3g} GFLOP", f"{shape.attention_flops:.3g} FLOP"
    trained = f"each of {shape.adapter_parameters / 1e6:.3g} M parameters of adapters" if shape.adapter_parameters else "a parameter"
    step = f"{_STEP_BYTES} B {trained} and the gradients' reduction, {layout}"
    whole = f"{linear}, frozen but for adapters" if shape.adapter_parameters else linear
    return {
        "forward_token_s": Constant(cost.forward.token_s, "s", f"modelled: {linear} / {forward}"),
        "forward_token2_s": Constant(cost.forward.token2_s, "s", f"modelled: {square} / {forward}"),
        "update_token_s": Constant(cost.update.token_s, "s", f"modelled: forward and backward of {whole} / {rate}"),
        "update_token2_s": Constant(cost.update.token2_s, "s", f"modelled: forward and backward of {square} / {rate}"),
        "microbatch_s": Constant(cost.update.fixed_s, "s", "modelled: launches, and what ZeRO moves for each micro-batch"),
        "optimizer_s": Constant(cost.optimizer_s, "s", f"modelled: {step}"),
    }


def _token_communication_s(shape: ModelShape, pool: Pool, layout: Layout) -> float:
    """Of a token on its way forward, for the whole trainer: replicas, stages and sequence shards move theirs at the same time.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053: two all-reduces a layer. Jacobs et al. 2023, arXiv:2309.14509 (Ulysses): all-to-alls of
        queries, keys, values and what attention gives. Experts: to them and back.
    """
    each, tp, sp, ep = shape.bytes_each, layout.tp, layout.sp, layout.ep
    heads = (shape.num_heads + shape.num_kv_heads) * (shape.head_dim + shape.value_dim)
    reduced = 4 * (tp - 1) / tp * shape.hidden * each / pool.between_bytes_s(tp)
    exchanged = (sp - 1) / sp * heads / tp * each / pool.between_bytes_s(tp * sp)
    routed = 0.0
    if ep > 1:
        sparse = (shape.num_layers - shape.num_dense_layers) / shape.num_layers
        sent = 2 * (ep - 1) / ep * shape.num_experts_per_token * shape.hidden * each
        routed = sparse * sent / pool.between_bytes_s(ep * tp * layout.pp)
    return shape.num_layers * (reduced + exchanged + routed) / (layout.dp * sp * layout.pp)


def _gathers(shape: ModelShape, pool: Pool, layout: Layout) -> tuple[float, float]:
    """Seconds to gather all weights on every replica, and to reduce all gradients that there are to their shards."""
    ranks, stride = layout.dp * layout.sp, layout.tp * layout.pp
    gather_s = reduce_s = 0.0
    groups = ranks, max(1, ranks // layout.ep)
    for count, trained, group in zip(shards(shape, layout), trained_shards(shape, layout), groups, strict=True):
        if count:
            gather_s += pool.gather_s(count * shape.bytes_each, group, stride * (ranks // group))
        if trained:
            reduce_s += pool.gather_s(trained * shape.bytes_each, group, stride * (ranks // group))
    return gather_s, reduce_s


def _step_s(shape: ModelShape, pool: Pool, layout: Layout) -> float:
    ranks = layout.dp * layout.sp
    shared, experts = trained_shards(shape, layout)
    if layout.zero >= 1:
        shared, experts = shared / ranks, experts / max(1, ranks // layout.ep)
    count = shared + experts
    if not layout.offload:
        return count * _STEP_BYTES / pool.step_bytes_s
    moved = 2 * count * shape.bytes_each / pool.host_link_bytes_s(is_pinned=True)
    return moved + count * _STEP_BYTES / pool.host_step_bytes_s
