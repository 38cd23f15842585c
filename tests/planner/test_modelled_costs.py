"""The cost model without a profile: closed forms by hand, what must not get worse, and bytes that add up."""

import itertools
import math
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.engines.contract import ParallelLayouts
from m2flow.errors import EngineError, ModelError, SpecError
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout, PassCost, StageOrder
from m2flow.planner.cost_model import ModelledCosts, decode_cost, kv_token_bytes, shapes_of, train_cost, weights_read
from m2flow.planner.model_shapes import ModelShape, adapted, shape_named, zoo
from m2flow.planner.pools import GIB, Passes, bubble_share, legal_layouts, offered
from m2flow.planner.workload import CallLoad, Extent, Workload
from m2flow.recipe import Lora, Model
from m2flow.spec import ClusterSpec, FunctionSpec, PoolSpec, RolloutSpec, TrainSpec, WeightsSpec

ROLLOUT, TRAIN, REFERENCE = EngineId("policy", "rollout"), EngineId("policy", "train"), EngineId("reference", "train")
LONG = Extent(prompt=200, response=4000, position=3000, longest=16_384)


def step(num_prompts: int = 128, n: int = 8) -> Workload:
    return Workload(
        "grpo",
        (
            CallLoad("policy.generate", "generate", ROLLOUT, num_prompts, n, "sample", False, ()),
            CallLoad("rule.score", "function", None, num_prompts, n, "sample", False, ("policy.generate",)),
            CallLoad("reference.logprobs", "forward", REFERENCE, num_prompts, n, "sample", False, ("policy.generate",)),
            CallLoad("policy.update", "update", TRAIN, num_prompts, n, "batch", False, ("rule.score",), num_optimizer_steps=1),
        ),
    )


def costs(
    model: str = "Qwen2.5-7B", device: str = "h200", nodes: int = 1, extent: Extent = LONG, workload: Workload | None = None, **spec: object
) -> ModelledCosts:
    known: Mapping[str, object] = {
        "rollout": RolloutSpec(engine="sglang"),
        "train": TrainSpec(engine="deepspeed", token_budget=16_384),
        **spec,
    }
    cluster = ClusterSpec(pools={"main": PoolSpec(device=device, nodes=nodes)}, **known)  # type: ignore[arg-type]
    shape = shape_named(model)
    return ModelledCosts(cluster, workload or step(), {"policy": shape, "reference": shape}, {"": extent})


def test_a_decode_step_of_a_7b_on_one_h200_is_what_its_weights_take() -> None:
    cost = costs().decode(ROLLOUT, "main", Layout())
    read = 2 * (7_615_616_512 - 152_064 * 3584)  # bfloat16, all but the embedding table
    assert cost.step_s == pytest.approx(read / (0.7 * 4.8e12) + 0.0008 + 0.0015 + 28 * 5e-6)
    assert cost.step_s > 15.2e9 / 4.8e12  # No schedule beats the bandwidth of the data sheet.
    cache = 57_344 * 3200 / (0.7 * 4.8e12)
    longer = read / (0.4 * 989.4e12) - read / (0.7 * 4.8e12) / 256  # The largest batch computes longer than it reads the weights.
    assert longer > 0
    assert cache > 2 * 28 * 28 * 256 * 3200 / (0.4 * 989.4e12)  # Attention computes while it reads the cache.
    assert cost.sample_s == pytest.approx(cache + longer + 25e-6)
    assert cost.prefill_token_s == pytest.approx((read + 28 * 28 * 256 * 200) / (0.5 * 989.4e12))
    assert cost.max_running == 256


def test_a_training_pass_of_a_7b_on_eight_h100_is_its_operations_over_their_peak() -> None:
    cost = costs(device="h100").train(TRAIN, "main", Layout(dp=8, zero=1))
    peak = 8 * 0.8 * 0.45 * 989.4e12
    multiplied = 7_615_616_512 - 152_064 * 3584
    moved = 30 * 28 * 3584 * 2 / (8 * 0.7 * 3.35e12)  # Vectors that norms and residuals read and write.
    # forward, again for the backward pass, and that twice
    assert cost.update.token_s == pytest.approx(4 * (2 * multiplied / peak + moved))
    assert cost.update.token2_s == pytest.approx(4 * 28 * 28 * 256 / peak)
    assert cost.forward.token_s == pytest.approx(2 * multiplied / (8 * 0.85 * 0.5 * 989.4e12) + moved)
    gathered = 7 / 8 * 2 * 7_615_616_512 / (0.8 * 450e9) + 1e-5
    assert cost.optimizer_s == pytest.approx(2 * gathered + 28 * 7_615_616_512 / 8 / (0.7 * 3.35e12))


def test_linear_and_quadratic_parts_meet_where_published_estimates_have_them() -> None:
    cost = costs("Llama-3.1-8B").train(TRAIN, "main", Layout(dp=8, zero=1))
    # 24576 s + s^2 of a 7B with hidden size 4096 counts both halves of the square; a causal mask leaves one: 2 x 24576.
    assert 2 * 24_576 < cost.update.token_s / cost.update.token2_s < 3 * 24_576


def test_memory_of_a_trainer_is_sixteen_bytes_a_parameter_and_what_its_stage_shards() -> None:
    model = costs()
    count = 7_615_616_512

    def need(layout: Layout) -> Footprint:
        return model.footprint(TRAIN, "main", layout)

    whole = need(Layout(dp=8))
    assert (whole.weights, whole.gradients, whole.optimizer) == (2 * count, 2 * count, 12 * count)
    assert need(Layout(dp=8, zero=1)).optimizer == 12 * count / 8
    assert need(Layout(dp=8, zero=2)).gradients == 2 * count / 8
    assert need(Layout(dp=8, zero=3)).weights == 2 * count / 8
    away = need(Layout(dp=8, zero=2, offload=True))
    assert (away.optimizer, away.host) == (0, 12 * count / 8 + 2 * count / 8)
    asked = model.footprint(REFERENCE, "main", Layout(dp=8))
    assert (asked.weights, asked.gradients, asked.optimizer) == (2 * count, 0, 0)


def test_adapters_have_as_many_parameters_as_is_published() -> None:
    """41.9 M beside Llama 3 8B, 40.4 M beside Qwen2.5 7B, at rank 16 on all linear layers."""
    assert adapted(shape_named("Llama-3.1-8B"), Lora(rank=16)).adapter_parameters == 41_943_040
    assert adapted(shape_named("Qwen2.5-7B"), Lora(rank=16)).adapter_parameters == 40_370_176
    queries_and_values = Lora(rank=8, targets=("q_proj", "v_proj"))
    assert adapted(shape_named("Llama-3.1-8B"), queries_and_values).adapter_parameters == 3_407_872
    assert adapted(shape_named("Qwen2.5-7B"), None).adapter_parameters == 0


def test_experts_and_their_routers_have_adapters_as_peft_makes_them() -> None:
    """Counted on models that peft 0.21.2 had put adapters of rank 4 on."""
    small = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    small |= {"vocab_size": 100, "num_experts_per_tok": 2}
    qwen = ModelShape.from_config(small | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8})
    assert adapted(qwen, Lora(rank=4)).adapter_parameters == 40_032
    # Three layers of eight experts, from 64 to twice 32 of gate and up with twice the rank, and from 32 back to 64.
    assert adapted(qwen, Lora(rank=4)).expert_adapter_parameters == 3 * 8 * (2 * 4 * (64 + 64) + 4 * (32 + 64))
    assert adapted(qwen, Lora(rank=4, targets=("q_proj", "gate"))).expert_adapter_parameters == 0
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1}
    assert adapted(ModelShape.from_config(small | latent | experts), Lora(rank=4)).adapter_parameters == 29_920


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_trainer_of_adapters_keeps_gradients_and_optimiser_of_these_alone(zero: int) -> None:
    whole, layout = costs(), Layout(dp=4, zero=zero)
    shapes = {"policy": adapted(shape_named("Qwen2.5-7B"), Lora(rank=16)), "reference": shape_named("Qwen2.5-7B")}
    adapters = ModelledCosts(whole.spec, step(), shapes, {"": LONG})
    need, full = adapters.footprint(TRAIN, "main", layout), whole.footprint(TRAIN, "main", layout)
    assert need.weights == pytest.approx(2 * (7_615_616_512 + 40_370_176) / (4 if zero == 3 else 1), abs=1)
    assert need.gradients == pytest.approx(2 * 40_370_176 / (4 if zero >= 2 else 1), abs=1)
    assert need.optimizer == pytest.approx(12 * 40_370_176 / (4 if zero >= 1 else 1), abs=1)
    assert need.activations == full.activations
    cost, dear = adapters.train(TRAIN, "main", layout), whole.train(TRAIN, "main", layout)
    assert cost.optimizer_s < dear.optimizer_s / 50
    multiplied = 7_615_616_512 - 152_064 * 3584
    moved = 4 * 30 * 28 * 3584 * 2 / (4 * 0.7 * 4.8e12)
    ratio = (cost.update.token_s - moved) / (dear.update.token_s - moved)
    assert ratio == pytest.approx((3 * multiplied + 4 * 40_370_176) / (4 * multiplied), rel=1e-3)
    assert cost.update.token2_s == dear.update.token2_s
    assert (cost.forward.token2_s, cost.forward.fixed_s) == (dear.forward.token2_s, dear.forward.fixed_s)


def test_adapters_of_experts_are_shared_out_with_their_experts_and_a_token_meets_those_of_its_own() -> None:
    shape = adapted(shape_named("Qwen3-30B-A3B"), Lora(rank=16))
    experts, others = shape.expert_adapter_parameters, shape.adapter_parameters - shape.expert_adapter_parameters
    assert experts > others > 0
    model = ModelledCosts(costs().spec, step(), {"policy": shape, "reference": shape_named("Qwen3-30B-A3B")}, {"": LONG})
    need = model.footprint(TRAIN, "main", Layout(dp=8, ep=4, zero=1))
    assert need.gradients == pytest.approx(2 * (others + experts / 4), abs=1)
    assert need.optimizer == pytest.approx(12 * (others / 8 + experts / 4 / 2), abs=1)
    base = shape_named("Qwen3-30B-A3B")
    shared, routed = base.num_parameters - base.expert_parameters, base.expert_parameters
    assert need.weights == pytest.approx(2 * (shared + others + (routed + experts) / 4), abs=1)
    assert shape.active_adapter_parameters == pytest.approx(others + experts * 8 / 128)


def test_a_flow_that_trains_adapters_is_planned_as_such() -> None:
    spec = ClusterSpec(pools={"main": PoolSpec(device="h200")}, shapes={"policy": "Qwen2.5-7B"})
    (shape,) = shapes_of({"policy": Model("there", lora=Lora(rank=16))}, spec).values()
    assert shape.adapter_parameters == 40_370_176


def test_a_cache_has_room_for_what_decodes_together_and_for_the_longest_sample() -> None:
    need = costs().footprint(ROLLOUT, "main", Layout(dp=8))
    assert need.kv == 128 * 4200 * 57_344  # 1,024 samples on eight instances
    few = costs(workload=step(1, 1)).footprint(ROLLOUT, "main", Layout(dp=8))
    assert few.kv == 16_384 * 57_344
    assert costs("Qwen2.5-32B", "h100").decode(ROLLOUT, "main", Layout(dp=8)).max_running < 16  # 61 of 74 GiB are weights.


ENGINES = st.sampled_from([ROLLOUT, TRAIN, REFERENCE])
MODELS = st.sampled_from(zoo())


@given(MODELS, ENGINES, st.sampled_from([1, 2, 4, 8, 16, 64]), st.data())
def test_bytes_are_never_negative_and_add_up(model: str, engine: EngineId, count: int, data: st.DataObject) -> None:
    asked = costs(model, nodes=8)
    layouts = asked.layouts(engine, "main", count)
    if not layouts:
        return
    layout = data.draw(st.sampled_from(layouts))
    assert layout.num_devices == count
    need = asked.footprint(engine, "main", layout)
    parts = [getattr(need, name) for name in need.__struct_fields__]
    assert min(parts) >= 0
    assert need.weights > 0
    assert need.device_bytes == sum(parts) - need.host >= need.kept_bytes
    # All shards together hold each parameter at least once.
    assert need.weights * count >= asked.shape(engine).weight_bytes
    if engine == TRAIN:
        assert (need.optimizer + need.host) * count >= 12 * asked.shape(engine).num_parameters
    times = _times(asked, engine, layout)
    assert min(times) >= 0


def _times(asked: ModelledCosts, engine: EngineId, layout: Layout) -> list[float]:
    if engine.kind == "rollout":
        cost = asked.decode(engine, "main", layout)
        return [cost.step_s, cost.sample_s, cost.prefill_token_s]
    train = asked.train(engine, "main", layout)
    passes = [train.forward, train.update]
    return [part for one in passes for part in (one.fixed_s, one.token_s, one.token2_s)] + [train.optimizer_s]


@given(
    MODELS,
    ENGINES,
    st.sampled_from([1, 8, 32]),
    st.sampled_from(["memory_gb_s", "bf16_tflops", "link_gb_s", "network_gb_s", "host_link_gb_s"]),
)
def test_a_faster_device_is_never_slower(model: str, engine: EngineId, count: int, what: str) -> None:
    import dataclasses

    slow, fast = costs(model, nodes=4), costs(model, nodes=4)
    pool = fast._pools["main"]
    faster = dataclasses.replace(pool.device, **{what: 2 * getattr(pool.device, what)})
    fast._pools["main"] = dataclasses.replace(
        pool,
        device=faster,
        link_bytes_s=pool.link_bytes_s * (2 if what == "link_gb_s" else 1),
        network_bytes_s=pool.network_bytes_s * (2 if what == "network_gb_s" else 1),
        pinned_bytes_s=pool.pinned_bytes_s * (2 if what == "host_link_gb_s" else 1),
    )
    for layout in slow.layouts(engine, "main", count)[:12]:
        before, after = _times(slow, engine, layout), _times(fast, engine, layout)
        assert all(new <= old for new, old in zip(after, before, strict=True))
        need = slow.footprint(engine, "main", layout)
        assert fast.switch(engine, "main", need).leave_s <= slow.switch(engine, "main", need).leave_s


@pytest.mark.parametrize("model", ["Qwen2.5-32B", "Qwen3-235B-A22B", "DeepSeek-V3"])
def test_more_tensor_parallelism_needs_less_memory_and_a_shorter_step(model: str) -> None:
    asked = costs(model, nodes=4, workload=step(1, 1))  # A larger batch would meet more experts, and read more.
    for few, many in itertools.pairwise([1, 2, 4, 8]):
        a, b = Layout(tp=few, dp=32 // few), Layout(tp=many, dp=32 // many)
        assert asked.footprint(ROLLOUT, "main", b).weights < asked.footprint(ROLLOUT, "main", a).weights
        for zero in (0, 1, 2):  # Stage 3 shards the weights over all devices either way.
            of = [asked.footprint(TRAIN, "main", Layout(tp=one.tp, dp=one.dp, zero=zero)).device_bytes for one in (a, b)]  # type: ignore[arg-type]
            assert of[1] < of[0]
        assert asked.decode(ROLLOUT, "main", b).step_s < asked.decode(ROLLOUT, "main", a).step_s


def test_a_mixture_of_experts_reads_the_experts_that_its_batch_meets() -> None:
    from m2flow.planner.cost_model import weights_read

    shape = shape_named("Qwen3-30B-A3B")
    one, all_met = weights_read(shape, 1), weights_read(shape, 10_000)
    assert one == pytest.approx(2 * shape.num_multiplied, rel=1e-6)
    assert all_met == pytest.approx(2 * (shape.num_parameters - shape.vocab * shape.hidden), rel=1e-6)


def test_a_decode_step_reads_more_experts_as_its_batch_grows() -> None:
    """So the tail of a rollout, with few samples, is not charged for experts that these do not meet."""
    from m2flow.planner.cost_model import weights_read

    asked = costs("Qwen3-235B-A22B", "h100", nodes=16, workload=step(32, 16))
    layout, shape, pool = Layout(tp=8, dp=16), asked.shape(ROLLOUT), asked.pool("main")
    cost = asked.decode(ROLLOUT, "main", layout)
    assert cost.max_running == 32
    read_s = {num: weights_read(shape, num) / (8 * pool.decode_bytes_s) for num in (8, 32)}
    assert cost.seconds(32) - cost.seconds(8) > read_s[32] - read_s[8] > 0
    # What is left beside the reading of a quarter of the batch is layers, launches, the host and the caches: no fraction of the reading.
    beside = asked.pool("main").attained.rollout
    layers_s = shape.num_layers * (pool.device.layer_s + 2 * pool.latency_s(8) + beside.expert_layer_s.value)
    assert cost.step_s < read_s[8] + layers_s + pool.device.launch_s + beside.host_step_s.value
    dense = costs("Qwen3-32B", "h100", nodes=4)
    assert dense.decode(ROLLOUT, "main", Layout(tp=8, dp=4)).step_s > weights_read(dense.shape(ROLLOUT), 1) / (8 * pool.decode_bytes_s)


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-235B-A22B"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_stage_reads_and_computes_for_the_samples_of_its_own_batch(model: str, pp: int) -> None:
    """With pp stages a pp-th of the samples is in each: reading their experts or computing takes the longer of both, and not more.
    Where stages do not divide the layers, all wait for the fullest."""
    asked = costs(model, "h200", nodes=16, workload=step(1024, 16))
    layout, shape, pool, extent = Layout(tp=8, pp=pp), asked.shape(ROLLOUT), asked.pool("main"), asked.extent("policy")
    found, host = decode_cost(shape, pool, layout, extent, 256), pool.attained.rollout
    each, fullest = 256 // pp, math.ceil(shape.num_layers / pp) / (shape.num_layers / pp)
    rate = pool.device.decode_mfu * pool.device.flops(2)
    attention_s = fullest * 2 * shape.attention_flops * extent.context / (8 * rate)
    cache_s = max(kv_token_bytes(shape, layout) * pp * extent.context / pool.decode_bytes_s, attention_s)
    weights_s = max(weights_read(shape, each) / (8 * pool.decode_bytes_s), each * shape.token_flops / (8 * rate))
    layers_s = shape.num_layers * (pool.device.layer_s + 2 * pool.latency_s(8))
    layers_s += (shape.num_layers - shape.num_dense_layers) * host.expert_layer_s.value * (shape.num_experts > 0)
    beside_s = pool.device.launch_s + host.host_step_s.value + (pp - 1) * pool.latency_s(8 * pp)
    reduced_s = 4 * 7 / 8 * shape.num_layers * shape.hidden * 2 / pool.between_bytes_s(8)
    expected = fullest * (weights_s + layers_s + each * reduced_s) + each * cache_s + 256 * host.host_sample_s.value + beside_s
    assert found.seconds(256) == pytest.approx(expected, rel=1e-6)


def test_layouts_use_all_devices_and_keep_tensor_groups_inside_a_node() -> None:
    shape = shape_named("Llama-3.1-70B")
    for kind, name in (("rollout", "sglang"), ("train", "deepspeed")):
        for count in (1, 3, 8, 12, 64):
            found = legal_layouts(shape, offered(name, kind), kind, count, 8)  # type: ignore[arg-type]
            assert len(set(found)) == len(found) > 0
            assert all(one.num_devices == count and one.tp * one.sp <= 8 for one in found)
    assert {one.tp for one in legal_layouts(shape_named("Qwen2.5-7B"), offered("sglang", "rollout"), "rollout", 8, 8)} == {1, 2, 4}
    zero = {one.zero for one in legal_layouts(shape, offered("deepspeed", "train"), "train", 8, 8)}
    assert zero == {0, 1, 2, 3}


@pytest.mark.parametrize(("model", "train"), [("Qwen2.5-7B", "deepspeed"), ("Qwen3-30B-A3B", "megatron"), ("Qwen2.5-0.5B", "fsdp")])
def test_layouts_like_one_are_those_of_all_layouts_that_have_its_replicas(model: str, train: str) -> None:
    known = costs(model, nodes=4, train=TrainSpec(engine=train, token_budget=16_384))
    for engine, count, other in itertools.product((ROLLOUT, TRAIN, REFERENCE), (1, 5, 8, 12, 32, 40), (1, 8, 32)):
        every = known.layouts(engine, "main", count)
        for like in known.layouts(engine, "main", other):
            assert list(known.layouts_like(engine, "main", count, like)) == [one for one in every if one.has_replicas_of(like)]


def test_an_embedded_engine_has_a_whole_model_on_each_device_in_training_as_in_rollout() -> None:
    shape = shape_named("Qwen2.5-0.5B")
    assert legal_layouts(shape, offered("embedded", "train"), "train", 1, 8) == (Layout(),)
    assert legal_layouts(shape, offered("embedded", "train"), "train", 2, 8) == (Layout(dp=2),)
    assert legal_layouts(shape, offered("embedded", "rollout"), "rollout", 8, 8) == (Layout(dp=8),)
    assert ParallelLayouts().names() == []
    with pytest.raises(EngineError, match=r"no rollout engine 'tgi' .*\n.*embedded, fake, sglang, vllm"):
        offered("tgi", "rollout")


def test_on_a_cpu_cores_are_threads_of_an_engine() -> None:
    shape = shape_named("Qwen2.5-0.5B")  # with 14 heads, which 3 threads share all the same
    asked = ModelledCosts(ClusterSpec(device="cpu", cores=6), step(), {"policy": shape}, {"": LONG})
    assert asked.layouts(TRAIN, "", 3) == (Layout(tp=3), Layout(tp=1, dp=3))  # One process, or replicas in three.
    assert asked.layouts(ROLLOUT, "", 6) == (Layout(tp=1, dp=6), Layout(tp=2, dp=3), Layout(tp=3, dp=2), Layout(tp=6, dp=1))
    assert asked.decode(ROLLOUT, "", Layout(tp=2)).step_s < asked.decode(ROLLOUT, "", Layout()).step_s
    for train, layouts in (
        (TrainSpec(ranks=2), (Layout(tp=2, dp=2),)),
        (TrainSpec(engine="fsdp"), (Layout(tp=4),)),
        (TrainSpec(engine="fsdp", ranks=4), (Layout(tp=1, dp=4),)),
    ):
        shapes = {"policy": shape, "reference": shape}
        asked = ModelledCosts(ClusterSpec(device="cpu", cores=4, train=train), step(), shapes, {"": LONG})
        assert asked.layouts(TRAIN, "", 4) == layouts
    replicas = asked.footprint(TRAIN, "", Layout(dp=4))
    assert replicas.weights == asked.footprint(TRAIN, "", Layout(tp=1)).weights  # Each has all of them.


def test_the_unit_is_the_least_that_fits() -> None:
    assert [costs(m, "h100", 8).unit(ROLLOUT, "main") for m in ("Qwen2.5-7B", "Qwen2.5-72B", "DeepSeek-V3")] == [1, 2, 32]
    trainer = costs("Qwen3-235B-A22B", "h100", 8)
    unit = trainer.unit(TRAIN, "main")
    assert unit > 8
    assert trainer.fits(TRAIN, "main", unit)
    assert not trainer.fits(TRAIN, "main", unit - 8)
    assert costs("DeepSeek-V3", "h100").unit(TRAIN, "main") == 0


def test_a_switch_keeps_what_a_trainer_needs_and_drops_what_a_sync_brings() -> None:
    asked = costs()
    need = Footprint(weights=20, optimizer=int(10e9) - 20, kv=10**12)
    leave = asked.switch(TRAIN, "main", need)
    assert leave.leave_s == pytest.approx(10e9 / (0.3 * 0.8 * 64e9))
    assert leave.come_s == pytest.approx(leave.leave_s + 0.3)
    assert asked.switch(ROLLOUT, "main", need) == asked.switch(ROLLOUT, "main", Footprint())
    assert asked.switch(REFERENCE, "main", need).leave_s == 0 < asked.switch(REFERENCE, "main", need).come_s - 0.3
    much = Footprint(optimizer=int(150e9))  # more than half of the host's share: not pinned
    assert asked.switch(TRAIN, "main", much).leave_s == pytest.approx(150e9 / (0.3 * 0.35 * 0.8 * 64e9))
    assert costs(device="cpu").switch(TRAIN, "main", need).is_resident


def test_a_sync_in_place_is_faster_than_one_in_a_node_and_that_than_one_over_the_network() -> None:
    asked = costs(nodes=4, train=TrainSpec(engine="embedded"))  # Nothing is packed: what links carry is compared.
    trainer = ("main", Layout(dp=4, zero=1))
    here = asked.sync_s("policy", trainer, ("main", Layout(tp=2, dp=2)), is_same_devices=True)
    beside = asked.sync_s("policy", trainer, ("main", Layout(tp=2, dp=2)), is_same_devices=False)
    far = asked.sync_s("policy", trainer, ("main", Layout(tp=2, dp=14)), is_same_devices=False)
    assert here < beside < far


def test_packing_overlaps_with_a_broadcast_and_takes_turns_with_unpacking_on_the_same_devices() -> None:
    asked, plain = costs("Qwen2.5-72B", nodes=4), costs("Qwen2.5-72B", nodes=4, train=TrainSpec(engine="embedded"))
    ends = ("main", Layout(dp=16, zero=1)), ("main", Layout(tp=4, dp=4))
    packing_s = asked.shape(TRAIN).weight_bytes / (asked.pool("main").attained.train.sync_gb_s.value * 1e9)
    here, far = (asked.sync_s("policy", *ends, is_same_devices=same) for same in (True, False))
    assert here > 2 * packing_s
    assert packing_s < far < plain.sync_s("policy", *ends, is_same_devices=False) + packing_s / 2


def test_each_matrix_takes_its_time_in_a_sync_so_experts_take_longer_than_their_bytes() -> None:
    dense, sparse = shape_named("Qwen3-32B"), shape_named("Qwen3-30B-A3B")
    assert dense.num_matrices == 64 * 7 + 2
    assert sparse.num_matrices == 48 * (4 + 1 + 3 * 128) + 2
    ends = ("main", Layout(dp=16, zero=1)), ("main", Layout(tp=4, dp=4))
    of_dense, of_sparse = (costs(m.name, "h100", nodes=4).sync_s("policy", *ends, is_same_devices=False) for m in (dense, sparse))
    assert sparse.weight_bytes < dense.weight_bytes
    assert of_sparse > 1.5 * of_dense


def test_adapters_that_go_to_other_nodes_alone_take_less_than_the_weights_beside_them() -> None:
    whole = costs("Qwen2.5-7B", "h100", nodes=4)
    shapes = {"policy": adapted(shape_named("Qwen2.5-7B"), Lora(rank=16))}
    ends = ("main", Layout(dp=4, zero=1)), ("main", Layout(tp=2, dp=14))

    def sync_s(adapters: str, *, is_same_devices: bool) -> float:
        weights, rollout = WeightsSpec.model_validate({"adapters": adapters}), RolloutSpec(engine="embedded")
        spec = whole.spec.model_copy(update={"weights": weights, "rollout": rollout})
        return ModelledCosts(spec, step(), shapes, {"": LONG}).sync_s("policy", *ends, is_same_devices=is_same_devices)

    assert sync_s("alone", is_same_devices=False) < sync_s("added", is_same_devices=False)
    assert sync_s("added", is_same_devices=False) == whole.sync_s("policy", *ends, is_same_devices=False)
    assert sync_s("alone", is_same_devices=True) == whole.sync_s("policy", *ends, is_same_devices=True)


@pytest.mark.parametrize(
    ("model", "trainer", "rollout", "published_s"),
    [
        ("Qwen3-30B-A3B", Layout(dp=16, zero=3), Layout(tp=4, dp=4), 7),  # verl's checkpoint engine; 4.4 in its asynchronous recipe
        ("Qwen3-235B-A22B", Layout(tp=4, pp=8, dp=4, ep=4, zero=1), Layout(tp=8, dp=16), 13),  # NeMo-RL's pull request 1379; 5.5 after it
        ("DeepSeek-V3", Layout(pp=16, dp=16, ep=16, zero=1), Layout(tp=32, dp=8), 34),  # the same; 14 after it
    ],
)
def test_a_broadcast_takes_what_was_published_for_small_and_large_models(
    model: str, trainer: Layout, rollout: Layout, published_s: float
) -> None:
    asked = costs(model, "h100", nodes=64)
    seconds = asked.sync_s("policy", ("main", trainer), ("main", rollout), is_same_devices=False)
    assert published_s / 1.6 < seconds < published_s * 1.6


def test_samples_take_a_latency_and_their_bytes() -> None:
    asked = costs()
    assert asked.hop_s(0, "main", "") == 0.0005
    assert asked.hop_s(3e9, "main", "main") == pytest.approx(2.0005)


def test_functions_take_what_the_spec_says_and_else_an_estimate() -> None:
    said = costs(functions=FunctionSpec(latency_s={"rule.score": (0.1, 0.3, 60.0)}, concurrency=4))
    assert said.function("rule.score@31").quantiles_s == (0.1, 0.3, 60.0)
    assert said.function("rule.score").concurrency == 4
    assert costs(functions=FunctionSpec(latency_s={"rule.score": 2.0})).function("rule.score").mean_s == 2.0
    assert 0 < costs().function("rule.score").mean_s < 0.01
    with pytest.raises(SpecError, match="the shortest first"):
        costs(functions=FunctionSpec(latency_s={"rule.score": (2.0, 1.0)}))


def test_every_constant_has_a_unit_and_a_source() -> None:
    found = costs().constants()
    assert found["policy.rollout.main.step_s"].source.startswith("modelled: 14.1 GB of weights / (1 x 0.7 x 4800 GB/s)")
    assert found["main.memory_gb_s"].source == "NVIDIA H200 data sheet"
    assert found["rule.score.latency_s"].source.startswith("modelled: estimate: a rule")
    for name, constant in found.items():
        assert constant.source, name
        assert constant.unit, name


def test_shapes_come_from_the_spec_and_else_from_the_flow_s_models() -> None:
    models = {
        "policy": Model("flows/models/digits"),
        "reference": Model("flows/models/digits"),
        "judge": Model("m2flow/planner/models/Qwen3-4B.json"),
    }
    spec = ClusterSpec(shapes={"policy": "Qwen2.5-7B"})
    shapes = shapes_of(models, spec)
    assert {role: shape.name for role, shape in shapes.items()} == {"policy": "Qwen2.5-7B", "reference": "Qwen2.5-7B", "judge": "Qwen3-4B"}
    assert (shapes["policy"].dtype, shapes["judge"].dtype) == ("bfloat16", "float32")
    with pytest.raises(SpecError, match=r"shapes.polcy: .*no model.*\n.*'policy'"):
        shapes_of(models, ClusterSpec(shapes={"polcy": "Qwen2.5-7B"}))
    with pytest.raises(ModelError, match=r"fake can't be read(.|\n)*which model to plan for"):
        shapes_of({"policy": Model("fake")}, ClusterSpec())
    with pytest.raises(ModelError, match=r"no shape for policy\n  Say which model"):
        ModelledCosts(ClusterSpec(), step(), {}, {"": LONG}).shape(ROLLOUT)


def test_the_memory_that_engines_may_have_is_less_than_the_device_s() -> None:
    assert costs().device_bytes("main") == int(140 * GIB * 0.92)
    assert costs().host_bytes("main") == int(2048 * GIB * 0.8 / 8)


def test_key_value_heads_that_do_not_divide_are_copied_and_so_is_a_latent() -> None:
    from m2flow.planner.cost_model import kv_token_bytes

    grouped, latent = shape_named("Qwen3-30B-A3B"), shape_named("DeepSeek-V3")  # four key/value heads; none
    assert kv_token_bytes(grouped, Layout(tp=4)) == kv_token_bytes(grouped, Layout(tp=8)) == grouped.kv_bytes / 4
    assert kv_token_bytes(latent, Layout(tp=8)) == latent.kv_bytes
    assert kv_token_bytes(latent, Layout(tp=8, pp=4)) == pytest.approx(latent.kv_bytes * 16 / 61), "of 61 layers a stage has 16"


def test_stage_two_has_all_weights_on_each_device_and_stage_three_gathers_them_for_each_micro_batch() -> None:
    asked = costs(device="h100")
    whole, sharded = (asked.footprint(TRAIN, "main", Layout(dp=8, zero=zero)) for zero in (2, 3))
    assert whole.weights == 8 * sharded.weights
    gather_s = 7 / 8 * 2 * 7_615_616_512 / (0.8 * 450e9) + 1e-5
    none, grads, both = (asked.train(TRAIN, "main", Layout(dp=8, zero=zero)).update.fixed_s for zero in (1, 2, 3))
    assert none == pytest.approx(0.005 / 8)
    assert grads - none == pytest.approx(0.5 * gather_s / 8)  # half of it is hidden, and a micro-batch is one replica's
    assert both - none == pytest.approx(3 * 0.5 * gather_s / 8)
    steps = [asked.train(TRAIN, "main", Layout(dp=8, zero=zero)).optimizer_s for zero in (0, 1, 2, 3)]
    each = 28 * 7_615_616_512 / (0.7 * 3.35e12)
    assert steps == pytest.approx([2 * gather_s + each, 2 * gather_s + each / 8, gather_s + each / 8, each / 8])


def test_an_offloaded_step_streams_through_the_host_and_its_link() -> None:
    asked = costs(device="h100")
    kept, away = (asked.train(TRAIN, "main", Layout(dp=8, zero=3, offload=offload)).optimizer_s for offload in (False, True))
    count = 7_615_616_512 / 8
    assert kept == pytest.approx(28 * count / (0.7 * 3.35e12))
    assert away == pytest.approx(2 * 2 * count / (0.8 * 64e9) + 28 * count / (0.7 * 400e9 / 8))


def test_a_pipeline_waits_for_its_first_micro_batch_and_sequence_parallelism_exchanges_heads() -> None:
    from m2flow.planner.pools import pools_of, through_stages

    shape = shape_named("Qwen2.5-7B")
    pool = pools_of(ClusterSpec(pools={"main": PoolSpec(device="h100")}))["main"]

    def made(layout: Layout, split: Passes | None = None) -> tuple[float, float, float]:
        cost = through_stages(*train_cost(shape, pool, layout, microbatch_tokens=10_000, is_trained=True, recomputes=True), layout, split)
        return cost.update.token_s, cost.optimizer_s, cost.update.fixed_s

    (alone, _, _), (piped, piped_step, _) = made(Layout(dp=8)), made(Layout(pp=4, dp=2))
    assert piped == pytest.approx(alone)
    reduced = 2 * pool.gather_s(2 * shape.num_parameters / 4, 2, 4) + 28 * shape.num_parameters / 4 / pool.step_bytes_s
    assert piped_step - reduced == pytest.approx(3 * 10_000 * piped * 2)  # (stages - 1) micro-batches of one of two replicas
    _, step_s, fixed_s = made(Layout(pp=4, dp=2), Passes(4, 4.0))
    assert step_s == pytest.approx(reduced)
    part_s = 10_000 * piped * 2 / 4  # A micro-batch of one of two replicas in four parts, each with its launches; three stages wait.
    assert fixed_s * 2 == pytest.approx(3 * part_s + 7 * pool.device.microbatch_s)
    heads = (28 + 4) * 256 * 2
    exchanged_s = 4 * 0.5 * 28 * heads / 2 / pool.link_bytes_s / 8  # four passes, half of it hidden; to one of two, by eight devices
    assert made(Layout(sp=2, dp=4))[0] - alone == pytest.approx(exchanged_s)


def test_a_micro_batch_is_as_long_as_its_longest_sample_at_the_least() -> None:
    few, long = (costs(extent=Extent(200, 4000, 3000, longest)) for longest in (16_384, 65_536))
    assert long.footprint(TRAIN, "main", Layout(dp=8)).activations == pytest.approx(
        4 * few.footprint(TRAIN, "main", Layout(dp=8)).activations, rel=1e-6
    )


PLAIN = {"vpp": 1, "schedule": "1f1b"}


def fastest(options: Mapping[str, object], budget: int = 16_384, tokens: float = 4e6) -> tuple[str, float]:
    """The layout of a trainer `fsdp` on two nodes in which a mini-batch of so many tokens takes least, and its seconds."""
    asked = costs(device="h100", nodes=2, train=TrainSpec(engine="fsdp", token_budget=budget, options={**PLAIN, **options}))
    asked = asked.for_spec(asked.spec.model_copy(update={"pools": {"main": PoolSpec(device="h100", nodes=2, network_gb_s=15)}}))

    def seconds(layout: Layout) -> float:
        cost = asked.train(TRAIN, "main", layout)
        return tokens * cost.update.token_s + tokens / budget * cost.update.fixed_s + cost.optimizer_s

    best = min(asked.layouts(TRAIN, "main", 16), key=seconds)
    return str(best), seconds(best)


ZERO_BUBBLE = {"schedule": "zero-bubble"}


def test_an_order_of_stages_with_a_shorter_wait_moves_the_choice_to_stages() -> None:
    """Sharded over all devices, weights are gathered over the network; in stages they are not, and stages wait."""
    plain, interleaved, without = fastest({}), fastest({"vpp": 2}), fastest(ZERO_BUBBLE)
    assert plain[0] == "dp16xzero3"
    assert interleaved[0] == without[0] == "pp2xdp8xzero3"
    # With little left to wait for, a second chunk's sends over the network take longer than it saves.
    assert plain[1] > interleaved[1] > fastest({"vpp": 2, **ZERO_BUBBLE})[1] > without[1]
    # A third of the wait moves a choice that half of it does not.
    found = [fastest(options, 32_768)[0] for options in ({}, {"vpp": 2}, ZERO_BUBBLE)]
    assert found == ["dp16xzero3", "dp16xzero3", "pp2xdp8xzero3"]


def test_a_pipelines_wait_is_priced_by_the_order_of_its_stages() -> None:
    def update(options: Mapping[str, object], pp: int) -> PassCost:
        asked = costs(device="h100", train=TrainSpec(engine="fsdp", token_budget=8192, options={"micro_batches": 4, **PLAIN, **options}))
        return asked.train(TRAIN, "main", Layout(pp=pp, dp=8 // pp, zero=3)).update

    # Four parts, and what three stages wait for: replica seconds of a part are those of its tokens on a stage, and its own.
    plain, replicas = update({}, 4), 2
    of_tokens_s = 8192 * plain.token_s * replicas / 4
    own_s = (plain.fixed_s * replicas - 3 * of_tokens_s) / 7
    assert 0 < own_s < of_tokens_s
    layout, pool = Layout(pp=4, dp=replicas, zero=3), costs(device="h100").pool("main")
    _, work = train_cost(shape_named("Qwen2.5-7B"), pool, layout, microbatch_tokens=8192, is_trained=True, recomputes=False)
    assert work.sent_s == pytest.approx(8192 * 3584 * 2 / pool.link_bytes_s)
    first_layer_s = pool.device.hidden * pool.gather_s(2 * shape_named("Qwen2.5-7B").num_parameters / 4, 2, 1) / 7
    assert work.chunk_s == pytest.approx(pool.device.collective_s + 0.05 * pool.device.microbatch_s + first_layer_s)
    sent_s, sums_s = 2 * (work.sent_s + 4 * work.chunk_s), work.sums_s  # A second chunk; sums of gradients that nothing hides.
    assert 0 < sums_s == pytest.approx(7 * first_layer_s)
    for options, share, more_s in (
        ({"vpp": 2}, 4 / 7, sent_s),  # Of a stage's seven layers the larger chunk has four.
        ({"vpp": 7}, 1 / 7, 6 * sent_s),
        (ZERO_BUBBLE, 1 / 3, (4 + 3 / 3) * sums_s),
        ({"vpp": 2, **ZERO_BUBBLE}, 4 / 21, sent_s + (4 + 3 * 4 / 21) * sums_s),
    ):
        saved_s = (1 - share) * 3 * (of_tokens_s + own_s) - more_s
        assert plain.fixed_s - update(options, 4).fixed_s == pytest.approx(saved_s / replicas)
        assert update({}, 1) == update(options, 1)
    without = StageOrder(4, schedule="zero-bubble")
    assert bubble_share(without, recomputes=True) == 1 / 2
    assert [bubble_share(without, weights=share) for share in (0.5, 0.0)] == pytest.approx([2 / 3, 1])


def test_a_reference_to_which_a_policy_lends_its_weights_has_as_many_chunks_where_groups_are_those_of_the_process() -> None:
    plain = shape_named("Qwen2.5-7B")

    def chunks(engine: str, policy: ModelShape, options: Mapping[str, object]) -> list[int]:
        spec = costs(device="h200", train=TrainSpec(engine=engine, token_budget=65_536, options=dict(options))).spec
        asked = ModelledCosts(spec, step(), {"policy": policy, "reference": plain}, {"": LONG})
        return [asked.stage_order(one, "main", Layout(pp=4, dp=2, zero=1)).vpp for one in (TRAIN, REFERENCE)]

    assert chunks("megatron", adapted(plain, Lora(rank=8)), {}) == [1, 1]
    assert chunks("megatron", plain, {}) == [7, 1], "one has nothing to gain; they get workers of their own"
    assert chunks("megatron", plain, {"vpp": 7}) == [7, 7]
    assert chunks("fsdp", adapted(plain, Lora(rank=8)), {"schedule": "1f1b"})[0] > 1, "each of its trainers has groups of its own"


def forwards(options: Mapping[str, object], tokens: int, *, is_free: bool = False) -> dict[str, float]:
    """Seconds in which a trainer `fsdp` on two nodes computes log-probabilities of so many tokens at once, by layout."""
    asked = costs(device="h100", nodes=2, train=TrainSpec(engine="fsdp", token_budget=16_384, options=dict(options)))
    asked = asked.for_spec(asked.spec.model_copy(update={"pools": {"main": PoolSpec(device="h100", nodes=2, network_gb_s=20)}}))
    found = {}
    for layout in asked.layouts(TRAIN, "main", 16):
        cost = asked.train(TRAIN, "main", layout).forward
        cost = msgspec.structs.replace(cost, waits=0.0) if is_free else cost
        found[str(layout)] = cost.seconds([1024] * (tokens // 1024), math.ceil(tokens / 16_384))
    return found


def test_forward_passes_through_stages_wait_for_them_once_a_call_and_the_wait_moves_a_choice() -> None:
    few, many = 2**17, 2**22
    chosen = [min(found := forwards(PLAIN, tokens), key=found.__getitem__) for tokens in (few, many)]
    assert chosen == ["dp16xzero3", "pp2xdp8xzero3"], "a few runs are mostly waited for; of many, the gathering of weights weighs more"
    free = [min(found := forwards(PLAIN, tokens, is_free=True), key=found.__getitem__) for tokens in (few, many)]
    assert free == ["pp2xdp8xzero3"] * 2


@pytest.mark.parametrize(("options", "share"), [({}, 1.0), ({"vpp": 2}, 4 / 7), ({"vpp": 7}, 1 / 7), (ZERO_BUBBLE, 1.0)], ids=str)
def test_m_runs_through_p_stages_take_m_and_p_minus_1_of_them(options: Mapping[str, object], share: float) -> None:
    asked = costs(device="h100", train=TrainSpec(engine="fsdp", options={"logprob_tokens": 8192, **PLAIN, **options}))
    cost = asked.train(TRAIN, "main", Layout(pp=4, dp=2, zero=3)).forward
    for m in (1, 2, 8):
        tokens = m * 8192 * 2  # On each of two replicas m runs.
        work = msgspec.structs.replace(cost, fixed_s=0.0, token2_s=0.0)
        assert work.seconds([tokens]) == pytest.approx((m + 3 * share) / m * tokens * cost.token_s)
    alone = asked.train(TRAIN, "main", Layout(dp=8, zero=3)).forward
    assert alone.wait_s(1e9) == 0
    assert ("forward_stages_s" in asked.terms(TRAIN, "main", Layout(pp=4, dp=2, zero=3))) is True
    assert "forward_stages_s" not in asked.terms(TRAIN, "main", Layout(dp=8, zero=3))


def test_layers_that_are_computed_again_keep_fewer_activations_and_take_a_pass_more() -> None:
    plain, again = (
        costs(device="h100", train=TrainSpec(engine="fsdp", token_budget=8192, options=options)) for options in ({}, {"recompute": True})
    )
    layout = Layout(dp=8, zero=3)
    kept, fewer = (one.footprint(TRAIN, "main", layout).activations for one in (plain, again))
    assert 0 < fewer < 0.3 * kept
    assert 1.2 < again.train(TRAIN, "main", layout).update.token_s / plain.train(TRAIN, "main", layout).update.token_s < 1.4


def test_stages_that_can_t_compute_in_the_order_asked_for_are_not_planned() -> None:
    def found(options: Mapping[str, object]) -> set[tuple[int, int]]:
        asked = costs(device="h100", train=TrainSpec(engine="fsdp", options=dict(options)))
        return {(layout.tp, layout.pp) for layout in asked.layouts(TRAIN, "main", 8)}

    every = found({})
    assert {(2, 4), (1, 8)} < every
    assert found(ZERO_BUBBLE) == every
    assert found({"vpp": 8}) == {(tp, pp) for tp, pp in every if pp * 8 <= 28 or pp == 1}
