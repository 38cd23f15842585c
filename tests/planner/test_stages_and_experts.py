"""Plans say which ranks hold which layers and experts, by the rules of the trainers, and how many parts a pipeline's micro-batch has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from grpo_step import LENGTHS, STEP, TRAIN

from m2flow.engines.distributed import layers_of_stages
from m2flow.engines.registry import train_options
from m2flow.micro.controller.online_replanning import pinned_to
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol.cost_terms import Layout, StageOrder
from m2flow.micro.protocol.plan import Choice, EngineSlot
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.explaining import as_document, explain
from m2flow.planner.model_shapes import ModelShape, adapted, shape_named
from m2flow.planner.pools import Passes, fastest_order, offered, orders_of
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Extent
from m2flow.recipe import Lora
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec

PLAIN = {"vpp": 1, "schedule": "1f1b"}
EXTENT = Extent(prompt=200, response=1000, position=700, longest=8192)


def cluster(engine: str, layout: dict[str, Any], options: dict[str, Any] | None = None, devices: int = 8) -> ClusterSpec:
    pin = PinSpec(num_devices=devices, layout=LayoutSpec(**layout))
    return ClusterSpec(
        pools={"main": PoolSpec(device="h200", nodes=max(1, devices // 8))},
        rollout=RolloutSpec(engine="sglang"),
        train=TrainSpec(engine=engine, options=options or {}),
        pin={"policy.train": pin},
    )


def costs(spec: ClusterSpec, model: str) -> ModelledCosts:
    return ModelledCosts(spec, STEP, {"policy": shape_named(model)}, {"": EXTENT})


def planned(spec: ClusterSpec, model: str) -> Choice:
    return find_plan(STEP, LENGTHS, costs(spec, model), spec)


def test_a_plan_with_stages_says_their_ranks_and_layers() -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 2, "sp": 1, "dp": 4, **PLAIN}), "Qwen2.5-7B")
    lines = explain(choice).splitlines()
    first = lines.index("stages of policy.train, each micro-batch in 4 parts:")
    assert lines[first + 1 : first + 3] == ["  stage 0:  ranks 0-3  layers 0-13   embedding", "  stage 1:  ranks 4-7  layers 14-27  head"]
    assert msgspec.json.decode(msgspec.json.encode(choice), type=Choice) == choice
    document: Any = as_document(choice)
    assert [part["layers"] for part in document["held"]] in ([[[0, 14]], [[14, 28]]], [((0, 14),), ((14, 28),)])


def test_layers_that_stages_do_not_divide_and_chunks_are_those_of_the_trainer() -> None:
    spec = cluster("fsdp", {"tp": 1, "pp": 4, "sp": 1, "dp": 2}, {"vpp": 2})
    parts = costs(spec, "Qwen2.5-7B").held_parts(TRAIN, "main", Layout(pp=4, dp=2, zero=3))
    spans = layers_of_stages(28, 8)
    assert [part.layers for part in parts] == [tuple((spans[i].start, spans[i].stop) for i in (stage, stage + 4)) for stage in range(4)]
    assert parts[0].layers == ((0, 4), (16, 19))
    assert [part.ranks for part in parts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    megatron = cluster("megatron", {"tp": 1, "pp": 2, "sp": 1, "dp": 4}, {"vpp": 2})
    even = costs(megatron, "Qwen2.5-7B").held_parts(TRAIN, "main", Layout(pp=2, dp=4, zero=1))
    assert [part.layers for part in even] == [((0, 7), (14, 21)), ((7, 14), (21, 28))]


@pytest.mark.parametrize(
    ("engine", "options", "layout", "held"),
    [
        ("fsdp", {}, Layout(tp=2, dp=4, ep=2, zero=3), {(0, 4): (0, 32), (1, 5): (32, 64), (2, 6): (64, 96), (3, 7): (96, 128)}),
        ("fsdp", {}, Layout(tp=2, dp=2, ep=1, zero=3), {(0, 2): (0, 64), (1, 3): (64, 128)}),
        ("megatron", {}, Layout(tp=2, dp=2, ep=1, zero=1), {}),
        ("megatron", {}, Layout(tp=2, dp=4, ep=2, zero=1), {(0, 1, 4, 5): (0, 64), (2, 3, 6, 7): (64, 128)}),
        ("megatron", {"etp": 1}, Layout(tp=2, dp=4, ep=2, zero=1), {(0, 2, 4, 6): (0, 64), (1, 3, 5, 7): (64, 128)}),
    ],
    ids=str,
)
def test_experts_are_on_the_ranks_where_the_trainer_puts_them(
    engine: str, options: dict[str, Any], layout: Layout, held: dict[tuple[int, ...], tuple[int, int]]
) -> None:
    parts = costs(cluster(engine, {}, options), "Qwen3-30B-A3B").held_parts(TRAIN, "main", layout)
    assert {part.ranks: part.experts for part in parts} == held


def test_a_plan_with_spread_experts_says_who_has_which_in_short_and_in_full() -> None:
    choice = planned(cluster("megatron", {"tp": 2, "pp": 2, "sp": 1, "dp": 4, "ep": 4}, devices=16), "Qwen3-30B-A3B")
    short, full = explain(choice), explain(choice, details="full")
    assert "experts of policy.train: 0-31 on ranks 0-1; 32-63 on ranks 2-3; and 2 parts more (--full)" in short
    assert "  stage 1  experts 96-127  ranks 14-15" in full
    assert all(len(line) <= 100 for line in short.splitlines() if "ranks" in line)


def test_many_stages_are_listed_in_full_and_in_short() -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 16, "sp": 1, "dp": 1}, devices=16), "Qwen2.5-7B")
    short, full = explain(choice), explain(choice, details="full")
    assert "and 8 stages more (--full)" in short
    assert [f"stage {stage}:" in short for stage in (6, 7, 14, 15)] == [True, False, False, True]
    assert all(f"stage {stage}:" in full for stage in range(16))
    layers = [part.layers for part in choice.held]
    assert [layer for spans in layers for first, end in spans for layer in range(first, end)] == list(range(28))


def test_a_layout_whose_ranks_hold_the_same_says_nothing() -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 1, "sp": 1, "dp": 8}), "Qwen2.5-7B")
    assert choice.held == ()
    assert "stages of" not in explain(choice)


# ---- parts of a micro-batch


def trained(
    options: dict[str, Any] | None = None, pin: dict[str, Any] | None = None, budget: int = 65_536, engine: str = "fsdp"
) -> ModelledCosts:
    spec = cluster(engine, pin or {}, options)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"token_budget": budget})})
    return costs(spec, "Qwen2.5-7B")


PIPELINE = Layout(pp=4, dp=2, zero=3)


def test_the_number_of_parts_takes_least_of_those_that_fit() -> None:
    asked = trained(PLAIN)
    chosen = asked.stage_order(TRAIN, "main", PIPELINE).micro_batches
    told = {count: trained({"micro_batches": count, **PLAIN}) for count in (4, 8, 16, 32)}
    seconds = {count: one.train(TRAIN, "main", PIPELINE).update.fixed_s for count, one in told.items()}
    kept = {count: one.footprint(TRAIN, "main", PIPELINE).activations for count, one in told.items()}
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    assert kept[8] < 0.55 * kept[4]
    fitting = [count for count in seconds if told[count].footprint(TRAIN, "main", PIPELINE).device_bytes <= asked.device_bytes("main")]
    assert chosen == min(fitting, key=seconds.__getitem__)
    assert asked.train(TRAIN, "main", PIPELINE).update.fixed_s == seconds[chosen]


def test_more_parts_wait_less_until_their_matrices_are_too_small() -> None:
    """Of a micro-batch of 1,024 tokens, parts that read weights longer than they compute are not smaller still."""
    small, large = (trained(budget=budget, engine="megatron") for budget in (8192, 262_144))
    layout = Layout(pp=4, dp=2, zero=1)
    assert small.stage_order(TRAIN, "main", layout).micro_batches == 4
    assert large.stage_order(TRAIN, "main", layout).micro_batches > 8
    assert small.stage_order(TRAIN, "main", Layout(dp=8, zero=1)).micro_batches == 1


def test_memory_demands_more_parts_than_time_does() -> None:
    asked = trained(budget=131_072)
    chosen = asked.stage_order(TRAIN, "main", PIPELINE).micro_batches
    fewer = trained({"micro_batches": 4}, budget=131_072)
    assert fewer.footprint(TRAIN, "main", PIPELINE).device_bytes > asked.device_bytes("main")
    assert asked.footprint(TRAIN, "main", PIPELINE).device_bytes <= asked.device_bytes("main")
    assert chosen > 4


def test_a_sample_is_not_cut_so_parts_hold_the_longest_one_at_the_least() -> None:
    many, more = (trained({"micro_batches": count, **PLAIN}).footprint(TRAIN, "main", PIPELINE).activations for count in (32, 256))
    few = trained({"micro_batches": 16, **PLAIN}).footprint(TRAIN, "main", PIPELINE).activations
    assert few > many == more  # A sample of 8,192 tokens is an eighth of a micro-batch.


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_trainer_is_told_the_parts_and_chunks_that_the_plan_prints(engine: str) -> None:
    spec = cluster(engine, {"tp": 1, "pp": 4, "sp": 1, "dp": 2})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"token_budget": 65_536})})
    choice = planned(spec, "Qwen2.5-7B")
    (placement,) = [placement for placement in choice.placements if placement.engine == TRAIN]
    count = placement.micro_batches
    assert count > 4
    assert placement.vpp == 7
    assert f"stages of policy.train, each micro-batch in {count} parts, 7 chunks of layers each, in turns (vpp):" in explain(choice)
    assert next(part for part in choice.held if part.stage == 1).layers == tuple((i, i + 1) for i in range(1, 28, 4))
    document: Any = as_document(choice)
    assert [document["placement"]["policy.update"][name] for name in ("micro_batches", "vpp", "schedule")] == [count, 7, "1f1b"]
    assert as_document(msgspec.json.decode(msgspec.json.encode(choice), type=Choice))["placement"] == document["placement"]
    (slot,) = [slot for worker in workers_of_choice(choice, spec, "cuda:0") for slot in worker.engines if slot.kind == "train"]
    assert msgspec.json.decode(msgspec.json.encode(slot), type=EngineSlot) == slot
    assert {**train_options(engine, {}, slot.planned), "micro_batches": count, "vpp": 7} == train_options(engine, {}, slot.planned)
    assert train_options(engine, {"vpp": 1}, slot.planned)["vpp"] == 1
    assert train_options(engine, {"micro_batches": 12}, slot.planned)["micro_batches"] == 12
    pinned = pinned_to(choice, spec.model_copy(update={"pin": {}}))
    pin = pinned.pin_of("policy", "train").layout
    assert (pin.micro_batches, pin.vpp, pin.schedule) == (count, 7, "1f1b")
    assert ModelledCosts(pinned, STEP, {"policy": shape_named("Qwen2.5-7B")}, {"": EXTENT}).stage_order(
        TRAIN, "main", placement.layout
    ) == StageOrder(count, 7)


@pytest.mark.parametrize(("options", "pin"), [({"micro_batches": 12}, {}), ({}, {"micro_batches": 12})], ids=["options", "pin"])
def test_what_a_spec_says_of_parts_binds_the_plan(options: dict[str, Any], pin: dict[str, int]) -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 4, "sp": 1, "dp": 2, **pin}, options), "Qwen2.5-7B")
    assert [placement.micro_batches for placement in choice.placements if placement.engine == TRAIN] == [12]
    assert trained(options, pin).stage_order(TRAIN, "main", PIPELINE).micro_batches == 12


@pytest.mark.parametrize("said", [{"vpp": 2}, {"schedule": "zero-bubble"}, {"vpp": 1}, {"schedule": "1f1b"}], ids=str)
@pytest.mark.parametrize("where", ["options", "pin"])
def test_what_a_spec_says_of_the_order_of_stages_binds_the_plan(said: dict[str, Any], where: str) -> None:
    layout, options = {"tp": 1, "pp": 2, "sp": 1, "dp": 4, **(said if where == "pin" else {})}, said if where == "options" else {}
    choice = planned(cluster("fsdp", layout, options), "Qwen2.5-7B")
    (placement,) = [placement for placement in choice.placements if placement.engine == TRAIN]
    assert said.items() <= {name: getattr(placement, name) for name in ("vpp", "schedule")}.items()


def test_parts_that_chunks_of_stages_can_t_have_are_not_planned() -> None:
    def stages(options: dict[str, Any], pin: dict[str, int]) -> set[int]:
        return {layout.pp for layout in trained(options, pin).layouts(TRAIN, "main", 8)}

    assert stages({"vpp": 2}, {"micro_batches": 6}) == {1, 2}
    assert stages({}, {"micro_batches": 6}) == {1, 2, 4, 8}


# ---- the order of stages


def seconds(asked: ModelledCosts, layout: Layout = PIPELINE, budget: int = 65_536) -> float:
    """Of a micro-batch on all devices."""
    update = asked.train(TRAIN, "main", layout).update
    return budget * update.token_s + update.fixed_s


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_an_order_is_chosen_that_is_predicted_to_be_faster(engine: str) -> None:
    """Of all orders that take no more than a little more memory, none is 2 % faster, and the plain one is slower."""
    layout = Layout(pp=4, dp=2, zero=3 if engine == "fsdp" else 1)
    asked, plain = trained(engine=engine), trained({"vpp": 1} if engine == "megatron" else PLAIN, engine=engine)
    chosen, chosen_s = asked.stage_order(TRAIN, "main", layout), seconds(asked, layout)
    assert chosen != plain.stage_order(TRAIN, "main", layout)
    assert chosen_s < 0.97 * seconds(plain, layout)
    room = plain.footprint(TRAIN, "main", layout).device_bytes + 0.05 * asked.device_bytes("main")
    assert asked.footprint(TRAIN, "main", layout).device_bytes <= min(room, asked.device_bytes("main"))
    for count in (4, 8, 16, 32):
        for vpp in (1, 7):
            for schedule in ("1f1b", "zero-bubble") if engine == "fsdp" else ("1f1b",):
                told = {"micro_batches": count, "vpp": vpp} | ({"schedule": schedule} if engine == "fsdp" else {})
                other = trained(told, engine=engine)
                if other.footprint(TRAIN, "main", layout).device_bytes <= room:
                    assert seconds(other, layout) > 0.98 * chosen_s, told


def test_stages_wait_in_the_plain_order_where_no_other_saves_anything() -> None:
    """Sends over a slow network take longer than the wait that they shorten; nothing is computed late where sums cost more."""
    spec = cluster("fsdp", {}, devices=16)
    slow = {"main": PoolSpec(device="h200", nodes=2, network_gb_s=1)}
    spec = spec.model_copy(update={"pools": slow, "train": spec.train.model_copy(update={"token_budget": 8192})})
    assert costs(spec, "Qwen2.5-7B").stage_order(TRAIN, "main", Layout(pp=4, dp=4, zero=3)).vpp == 1
    assert trained().stage_order(TRAIN, "main", Layout(dp=8, zero=3)) == StageOrder()


def test_orders_that_a_trainer_can_t_have_are_not_chosen() -> None:
    orders = partial(orders_of, shape_named("Qwen2.5-7B"), most=64)
    fsdp, megatron = (offered(engine, "train") for engine in ("fsdp", "megatron"))

    def found(groups: list[list[StageOrder]]) -> set[tuple[int, str]]:
        return {(order.vpp, order.schedule) for group in groups for order in group}

    assert found(orders(4, fsdp, {})) == {(vpp, schedule) for vpp in (1, 2, 4, 7) for schedule in ("1f1b", "zero-bubble")}
    assert found(orders(4, megatron, {})) == {(vpp, "1f1b") for vpp in (1, 2, 4, 7)}, "it has no schedule without bubble"
    assert found(orders(8, megatron, {})) == {(1, "1f1b"), (2, "1f1b")}, "of 28 layers a stage has up to four; there are none for 32 chunks"
    assert found(orders(4, megatron, {"micro_batches": 6})) == {(1, "1f1b")}, "chunks take turns of four parts"
    assert found(orders(2, megatron, {"micro_batches": 6})) == {(vpp, "1f1b") for vpp in (1, 2, 4, 7, 8, 14)}
    without = replace(fsdp, options=(("pp", "pp"),))
    assert orders(4, without, {}) == [[StageOrder(4)]], "what an engine has no option for nobody tells it"


def test_gradients_that_are_put_off_are_those_of_weights_that_are_trained_and_not_stacked() -> None:
    layout, told = Layout(pp=4, dp=2, zero=3), {"schedule": "zero-bubble", "vpp": 1, "micro_batches": 4}

    def saved(model: str, shape: ModelShape) -> float:
        """The share of the wait that is saved, as if sums over ranks were hidden."""
        spec = cluster("fsdp", {}, told)
        asked = ModelledCosts(spec, STEP, {"policy": shape}, {"": EXTENT})
        _, passes = asked._order(TRAIN, "main", layout)
        return 1 - passes.bubble

    dense, mixed = shape_named("Qwen2.5-7B"), shape_named("Qwen3-30B-A3B")
    assert saved("dense", dense) == pytest.approx(2 / 3)
    assert saved("mixed", mixed) == pytest.approx(2 / 3 * (1 - mixed.routed_share))
    assert saved("adapters", adapted(dense, Lora(rank=8))) == 0


def test_put_off_gradients_keep_what_recomputing_would_drop_and_chunks_keep_more_passes() -> None:
    def kept(options: dict[str, Any]) -> int:
        return trained({"micro_batches": 8, **PLAIN, **options}).footprint(TRAIN, "main", PIPELINE).activations

    late = {"schedule": "zero-bubble"}
    # The last stage puts off what the first has in flight. Gradients of a chunk are whole until they are sent, in bfloat16 and in float32.
    shape = shape_named("Qwen2.5-7B")
    linear = (shape.num_parameters - 2 * shape.vocab * shape.hidden) / PIPELINE.pp
    assert kept(late) == pytest.approx(kept({}) + 6 * linear, rel=1e-6)
    assert kept({**late, "vpp": 7}) - kept({"vpp": 7}) == pytest.approx(6 * linear / 7, rel=1e-6)
    assert kept({"recompute": True}) < 0.5 * kept({})
    assert kept({"recompute": True, **late}) == pytest.approx(kept({}) + 6 * linear, rel=1e-6)
    assert kept({}) < kept({"vpp": 7}) < kept({"vpp": 2})


def test_an_order_that_takes_much_more_memory_is_not_chosen() -> None:
    groups = [[(StageOrder(4), Passes(4, 4.0))], [(StageOrder(4, 2), Passes(4, 5.0, 0.5))], [(StageOrder(4, 7), Passes(4, 4.4, 0.4))]]

    def chosen(bytes_of: dict[float, float], room: float = 100.0) -> int:
        return fastest_order(groups, lambda passes: passes.bubble, lambda passes: bytes_of[passes.held], room)[0].vpp

    assert chosen({4.0: 50, 5.0: 50, 4.4: 50}) == 7
    assert chosen({4.0: 50, 5.0: 55, 4.4: 56}) == 2
    assert chosen({4.0: 50, 5.0: 56, 4.4: 56}) == 1
    assert chosen({4.0: 99, 5.0: 101, 4.4: 101}) == 1
    assert chosen({4.0: 101, 5.0: 90, 4.4: 90}) == 1, "nothing fits, so nothing is faster"
