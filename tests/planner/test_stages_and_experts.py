"""Plans say which ranks hold which layers and experts, by the rules of the trainers, and how many parts a pipeline's micro-batch has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from grpo_step import LENGTHS, STEP, TRAIN

from m2flow.engines.distributed import layers_of_stages
from m2flow.engines.registry import train_options
from m2flow.micro.controller.online_replanning import pinned_to
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol.cost_terms import Layout
from m2flow.micro.protocol.plan import Choice, EngineSlot
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.explaining import as_document, explain
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Extent
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec


def cluster(engine: str, layout: dict[str, int], options: dict[str, Any] | None = None, devices: int = 8) -> ClusterSpec:
    pin = PinSpec(num_devices=devices, layout=LayoutSpec(**layout))  # type: ignore[arg-type]
    return ClusterSpec(
        pools={"main": PoolSpec(device="h200", nodes=max(1, devices // 8))},
        rollout=RolloutSpec(engine="sglang"),
        train=TrainSpec(engine=engine, options=options or {}),
        pin={"policy.train": pin},
    )


def costs(spec: ClusterSpec, model: str) -> ModelledCosts:
    return ModelledCosts(spec, STEP, {"policy": shape_named(model)}, {"": Extent(prompt=200, response=1000, position=700, longest=8192)})


def planned(spec: ClusterSpec, model: str) -> Choice:
    return find_plan(STEP, LENGTHS, costs(spec, model), spec)


def test_a_plan_with_stages_says_their_ranks_and_layers() -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 2, "sp": 1, "dp": 4}), "Qwen2.5-7B")
    lines = explain(choice).splitlines()
    first = lines.index("stages of policy.train, each micro-batch in 4 parts:")
    assert lines[first + 1 : first + 3] == ["  stage 0:  ranks 0-3  layers 0-13   embedding", "  stage 1:  ranks 4-7  layers 14-27  head"]
    assert msgspec.json.decode(msgspec.json.encode(choice), type=Choice) == choice
    document: Any = as_document(choice)
    assert [part["layers"] for part in document["held"]] in ([[[0, 14]], [[14, 28]]], [((0, 14),), ((14, 28),)])


def test_layers_that_stages_do_not_divide_and_chunks_are_those_of_the_trainer() -> None:
    spec = cluster("fsdp", {"tp": 1, "pp": 4, "sp": 1, "dp": 2}, {"vpp": 2})
    parts = costs(spec, "Qwen2.5-7B").held_parts(TRAIN, Layout(pp=4, dp=2, zero=3))
    spans = layers_of_stages(28, 8)
    assert [part.layers for part in parts] == [tuple((spans[i].start, spans[i].stop) for i in (stage, stage + 4)) for stage in range(4)]
    assert parts[0].layers == ((0, 4), (16, 19))
    assert [part.ranks for part in parts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    megatron = cluster("megatron", {"tp": 1, "pp": 2, "sp": 1, "dp": 4}, {"vpp": 2})
    even = costs(megatron, "Qwen2.5-7B").held_parts(TRAIN, Layout(pp=2, dp=4, zero=1))
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
    parts = costs(cluster(engine, {}, options), "Qwen3-30B-A3B").held_parts(TRAIN, layout)
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
    options: dict[str, Any] | None = None, pin: dict[str, int] | None = None, budget: int = 65_536, engine: str = "fsdp"
) -> ModelledCosts:
    spec = cluster(engine, pin or {}, options)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"token_budget": budget})})
    return costs(spec, "Qwen2.5-7B")


PIPELINE = Layout(pp=4, dp=2, zero=3)


def test_the_number_of_parts_takes_least_of_those_that_fit() -> None:
    asked = trained()
    chosen = asked.micro_batches(TRAIN, "main", PIPELINE)
    seconds = {count: trained({"micro_batches": count}).train(TRAIN, "main", PIPELINE).update.fixed_s for count in (4, 8, 16, 32)}
    kept = {count: trained({"micro_batches": count}).footprint(TRAIN, "main", PIPELINE).activations for count in (4, 8, 16, 32)}
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    assert kept[8] < 0.55 * kept[4]
    fitting = [
        count
        for count in seconds
        if trained({"micro_batches": count}).footprint(TRAIN, "main", PIPELINE).device_bytes <= asked.device_bytes("main")
    ]
    assert chosen == min(fitting, key=seconds.__getitem__)
    assert asked.train(TRAIN, "main", PIPELINE).update.fixed_s == seconds[chosen]


def test_more_parts_wait_less_until_their_matrices_are_too_small() -> None:
    """Of a micro-batch of 1,024 tokens, parts that read weights longer than they compute are not smaller still."""
    small, large = (trained(budget=budget, engine="megatron") for budget in (8192, 262_144))
    layout = Layout(pp=4, dp=2, zero=1)
    assert small.micro_batches(TRAIN, "main", layout) == 4
    assert large.micro_batches(TRAIN, "main", layout) > 8
    assert small.micro_batches(TRAIN, "main", Layout(dp=8, zero=1)) == 1


def test_memory_demands_more_parts_than_time_does() -> None:
    asked = trained(budget=131_072)
    chosen = asked.micro_batches(TRAIN, "main", PIPELINE)
    fewer = trained({"micro_batches": 4}, budget=131_072)
    assert fewer.footprint(TRAIN, "main", PIPELINE).device_bytes > asked.device_bytes("main")
    assert asked.footprint(TRAIN, "main", PIPELINE).device_bytes <= asked.device_bytes("main")
    assert chosen > 4


def test_a_sample_is_not_cut_so_parts_hold_the_longest_one_at_the_least() -> None:
    many, more = (trained({"micro_batches": count}).footprint(TRAIN, "main", PIPELINE).activations for count in (32, 256))
    few = trained({"micro_batches": 16}).footprint(TRAIN, "main", PIPELINE).activations
    assert few > many == more  # A sample of 8,192 tokens is an eighth of a micro-batch.


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_trainer_is_told_the_number_of_parts_that_the_plan_prints(engine: str) -> None:
    spec = cluster(engine, {"tp": 1, "pp": 4, "sp": 1, "dp": 2})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"token_budget": 65_536})})
    choice = planned(spec, "Qwen2.5-7B")
    (placement,) = [placement for placement in choice.placements if placement.engine == TRAIN]
    count = placement.micro_batches
    assert count > 4
    assert f"stages of policy.train, each micro-batch in {count} parts:" in explain(choice)
    document: Any = as_document(choice)
    assert document["placement"]["policy.update"]["micro_batches"] == count
    (slot,) = [slot for worker in workers_of_choice(choice, spec, "cuda:0") for slot in worker.engines if slot.kind == "train"]
    assert msgspec.json.decode(msgspec.json.encode(slot), type=EngineSlot) == slot
    assert train_options(engine, {}, slot.planned)["micro_batches"] == count
    assert train_options(engine, {"micro_batches": 12}, slot.planned)["micro_batches"] == 12
    pinned = pinned_to(choice, spec.model_copy(update={"pin": {}}))
    assert pinned.pin_of("policy", "train").layout.micro_batches == count


@pytest.mark.parametrize(("options", "pin"), [({"micro_batches": 12}, {}), ({}, {"micro_batches": 12})], ids=["options", "pin"])
def test_what_a_spec_says_of_parts_binds_the_plan(options: dict[str, Any], pin: dict[str, int]) -> None:
    choice = planned(cluster("fsdp", {"tp": 1, "pp": 4, "sp": 1, "dp": 2, **pin}, options), "Qwen2.5-7B")
    assert [placement.micro_batches for placement in choice.placements if placement.engine == TRAIN] == [12]
    assert trained(options, pin).micro_batches(TRAIN, "main", PIPELINE) == 12


def test_parts_that_chunks_of_stages_can_t_have_are_not_planned() -> None:
    def stages(options: dict[str, Any], pin: dict[str, int]) -> set[int]:
        return {layout.pp for layout in trained(options, pin).layouts(TRAIN, "main", 8)}

    assert stages({"vpp": 2}, {"micro_batches": 6}) == {1, 2}
    assert stages({}, {"micro_batches": 6}) == {1, 2, 4, 8}
