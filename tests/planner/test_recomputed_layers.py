"""Plans in which a trainer computes its layers again in the backward pass: where memory demands it, priced, printed, and done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpo_step import LENGTHS, STEP, TRAIN
from tiny_models import CONFIGS, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.registry import train_options
from m2flow.errors import EngineError, PlanError
from m2flow.micro.controller.online_replanning import pinned_to
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol.cost_terms import Layout
from m2flow.micro.protocol.plan import Choice, EngineSlot
from m2flow.micro.worker.rank_group import make_own_train
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.explaining import as_document, explain
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Extent
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec
from m2flow.testing.train_suite import PPO, samples, started

FITS, TOO_MUCH = 4096, 24_576
"""Tokens of a micro-batch, whose activations fit a device beside a seventh of a 7B, and do not."""


def cluster(budget: int, engine: str = "fsdp", options: Mapping[str, Any] | None = None, **spec: Any) -> ClusterSpec:
    train = TrainSpec(engine=engine, token_budget=budget, options=dict(options or {}))
    return ClusterSpec(pools={"main": PoolSpec(device="h100")}, rollout=RolloutSpec(engine="sglang"), train=train, **spec)


def costs(spec: ClusterSpec) -> ModelledCosts:
    extent = Extent(prompt=200, response=1000, position=700, longest=min(spec.train.token_budget, 8192))
    return ModelledCosts(spec, STEP, {"policy": shape_named("Qwen2.5-7B")}, {"": extent})


def planned(spec: ClusterSpec) -> Choice:
    return find_plan(STEP, LENGTHS, costs(spec), spec)


def layout_of(choice: Choice) -> Layout:
    return next(placement.layout for placement in choice.placements if placement.engine == TRAIN)


def only_data_parallel(spec: ClusterSpec, recompute: bool | None = None) -> ClusterSpec:
    pin = PinSpec(num_devices=8, layout={"tp": 1, "pp": 1, "sp": 1, "dp": 8}, recompute=recompute)  # type: ignore[arg-type]
    return spec.model_copy(update={"pin": {"policy.train": pin}})


def test_layers_are_recomputed_where_activations_do_not_fit_and_the_plan_says_so() -> None:
    choice = planned(only_data_parallel(cluster(TOO_MUCH)))
    assert layout_of(choice) == Layout(dp=8, zero=3, recompute=True)
    assert "dp8xzero3xrecompute" in explain(choice)
    placed: Any = as_document(choice)["placement"]
    assert placed["policy.update"]["layout"]["recompute"] is True
    assert layout_of(planned(only_data_parallel(cluster(FITS)))) == Layout(dp=8, zero=3)


def test_a_recomputed_pass_has_its_price_and_takes_less_memory() -> None:
    asked = costs(cluster(TOO_MUCH))
    plain, again = Layout(dp=8, zero=3), Layout(dp=8, zero=3, recompute=True)
    assert {plain, again} <= set(asked.layouts(TRAIN, "main", 8))
    assert asked.footprint(TRAIN, "main", plain).device_bytes > asked.device_bytes("main")
    assert asked.footprint(TRAIN, "main", again).device_bytes < asked.device_bytes("main")
    ratio = asked.train(TRAIN, "main", again).update.token_s / asked.train(TRAIN, "main", plain).update.token_s
    assert 1.2 < ratio < 1.4
    assert asked.train(TRAIN, "main", again).forward == asked.train(TRAIN, "main", plain).forward
    assert not any(layout.recompute for layout in costs(cluster(FITS)).layouts(TRAIN, "main", 8))


def test_another_layout_is_taken_where_that_is_faster_than_to_recompute() -> None:
    """Priced, not by rule: as fast as the best plan without recomputation, if there is one."""
    free = planned(cluster(TOO_MUCH))
    without = planned(cluster(TOO_MUCH, options={"recompute": False}))
    assert not layout_of(without).recompute
    assert free.predicted_step_s <= without.predicted_step_s


@pytest.mark.parametrize(("options", "recomputes"), [({"recompute": True}, True), ({"recompute": False}, False)], ids=str)
def test_what_a_spec_says_of_recomputation_is_not_chosen(options: dict[str, Any], recomputes: bool) -> None:
    asked = costs(cluster(TOO_MUCH, options=options))
    assert not any(layout.recompute for layout in asked.layouts(TRAIN, "main", 8))
    plain = costs(cluster(TOO_MUCH)).footprint(TRAIN, "main", Layout(dp=8, zero=3, recompute=recomputes))
    assert asked.footprint(TRAIN, "main", Layout(dp=8, zero=3)) == plain


def test_a_pin_without_recomputation_is_told_that_it_would_fit_with_it() -> None:
    with pytest.raises(PlanError, match=r"policy.train does not fit(.|\n)*its layers computed again on the way back \(recompute: true\)"):
        planned(only_data_parallel(cluster(TOO_MUCH), recompute=False))
    assert layout_of(planned(only_data_parallel(cluster(FITS), recompute=True))).recompute


def test_a_run_goes_by_the_plan() -> None:
    for budget, engine, recomputes in ((TOO_MUCH, "fsdp", True), (FITS, "fsdp", False), (FITS, "deepspeed", True)):
        spec = only_data_parallel(cluster(budget, engine))
        choice = planned(spec)
        slots = [slot for worker in workers_of_choice(choice, spec, "cuda:0") for slot in worker.engines if slot.kind == "train"]
        assert [slot.recompute for slot in slots] == [recomputes]
        assert msgspec.json.decode(msgspec.json.encode(slots[0]), type=EngineSlot) == slots[0]
    choice = planned(only_data_parallel(cluster(TOO_MUCH)))
    pinned = pinned_to(choice, cluster(TOO_MUCH))
    assert layout_of(planned(pinned)) == layout_of(choice)


@pytest.mark.parametrize(
    ("engine", "found"),
    [("fsdp", {"recompute": True}), ("deepspeed", {"activation_checkpointing": True}), ("megatron", {"recompute": "full"})],
)
def test_an_engine_is_told_by_its_own_option_unless_the_spec_says_otherwise(engine: str, found: dict[str, Any]) -> None:
    assert train_options(engine, {"tp": 2}, {"recompute": True}) == {"tp": 2, **found}
    assert train_options(engine, {"tp": 2}, {}) == {"tp": 2}
    own = dict.fromkeys(found, "selective")
    assert train_options(engine, own, {"recompute": True}) == own


def test_a_trainer_of_a_plan_with_recomputation_keeps_fewer_activations(tmp_path: Path) -> None:
    model, num_computed = write_model(tmp_path, CONFIGS["llama"]()), []
    for recompute in (False, True):
        engine = make_own_train(EngineSlot("policy", "train", "fsdp", recompute=recompute), model, EngineSettings())
        with started(engine):
            layer = engine._model.model.layers[0]  # type: ignore[attr-defined]
            layer.mlp.register_forward_hook(lambda *_, found=(calls := []): found.append(1))
            engine.accumulate(samples(VOCABULARY), PPO)
            num_computed.append(len(calls))
    assert num_computed[1] == 2 * num_computed[0]


@pytest.mark.parametrize(
    ("engine", "layout", "told"),
    [
        ("fsdp", {"tp": 2, "pp": 2, "sp": 1, "vpp": 1, "schedule": "1f1b"}, {"tp": 2, "pp": 2, "micro_batches": 2}),
        (
            "fsdp",
            {"tp": 2, "pp": 2, "sp": 1, "vpp": 2, "schedule": "zero-bubble"},
            {"tp": 2, "pp": 2, "micro_batches": 2, "vpp": 2, "schedule": "zero-bubble"},
        ),
        ("fsdp", {"tp": 1, "pp": 1, "sp": 2}, {"cp": 2}),
        ("deepspeed", {"tp": 1, "sp": 2, "zero": 2}, {"sp": 2, "zero": 2, "activation_checkpointing": True}),
        (
            "megatron",
            {"tp": 2, "pp": 2, "sp": 2, "zero": 0, "vpp": 1},
            {"tp": 2, "pp": 2, "cp": 2, "zero": 0, "micro_batches": 2, "recompute": "full"},
        ),
    ],
    ids=str,
)
def test_a_trainer_is_laid_out_as_the_plan_says(engine: str, layout: dict[str, Any], told: dict[str, Any]) -> None:
    pin = PinSpec(num_devices=8, layout=LayoutSpec(**layout), offload=False)
    spec = cluster(FITS, engine).model_copy(update={"pin": {"policy.train": pin}})
    choice = planned(spec)
    (worker,) = [worker for worker in workers_of_choice(choice, spec, "cuda:0") if any(slot.kind == "train" for slot in worker.engines)]
    (slot,) = [slot for slot in worker.engines if slot.kind == "train"]
    assert worker.ranks == 8
    assert train_options(engine, {}, slot.planned) == told
    assert train_options(engine, {"tp": 8}, slot.planned)["tp"] == 8
    assert msgspec.json.decode(msgspec.json.encode(slot), type=EngineSlot) == slot


def test_a_degree_that_an_engine_has_not_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="'deepspeed' out with ep 4") as refused:
        train_options("deepspeed", {}, {"sp": 2, "ep": 4})
    assert "layout: {ep: 1}" in refused.value.now


@pytest.mark.parametrize(
    ("engine", "options", "expected"),
    [("fsdp", {"tp": 4, "cp": 2}, {"tp": 4, "sp": 2}), ("deepspeed", {"zero": 2, "offload_optimizer": True}, {"zero": 2, "offload": True})],
    ids=str,
)
def test_a_plan_goes_by_the_degrees_that_the_spec_gives_its_trainer(engine: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    layout = layout_of(planned(cluster(FITS, engine, options=options)))
    assert {name: getattr(layout, name) for name in expected} == expected
