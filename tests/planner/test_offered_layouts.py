"""What the search offers is what a run accepts: every layout of every trainer, on models of the families that it has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import transformers
from megatron_models import CONFIGS as STAGED_CONFIGS
from tiny_models import CONFIGS, mixture_config

from m2flow.engines.registry import check_trainer, engine_named, engines, train_options
from m2flow.errors import M2FlowError
from m2flow.micro.lowering.placement import degrees_as_placed
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout, StageOrder
from m2flow.micro.protocol.plan import EngineSlot, Placement
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.workload import CallLoad, Extent, Workload
from m2flow.recipe import Lora, Model
from m2flow.spec import ClusterSpec, PoolSpec, TrainSpec

TRAIN = EngineId("policy", "train")
STEP = Workload("grpo", (CallLoad("policy.update", "update", TRAIN, 64, 8, "group", False, (), num_optimizer_steps=1),))
TRAINERS = [info.name for info in engines() if info.kind == "train" and not info.factory.startswith("m2flow.testing.")]
MIXTURES = ("mixtral", "glm4_moe")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "embedded": [{}],
    "fsdp": [{}, {"vpp": 2}, {"vpp": 2, "micro_batches": 6}, {"schedule": "zero-bubble"}, {"compute_dtype": "bfloat16"}],
    "deepspeed": [{}, {"zero": 0}, {"offload_optimizer": True}, {"compute_dtype": "bfloat16"}, {"activation_checkpointing": False}],
    "megatron": [{}, {"vpp": 2}, {"vpp": 2, "micro_batches": 6}, {"etp": 2}, {"sequence_parallel": False}, {"zero": 0}],
}
"""What a spec may say itself, of each trainer."""
_EVEN = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "pad_token_id": None,
}
"""Sizes that forbid no degree: what is refused is the kind of the model."""
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
KINDS: dict[str, Callable[..., Any]] = {
    "qwen2 with windows": partial(transformers.Qwen2Config, **_WINDOWS, max_window_layers=2),
    "qwen3 with windows": partial(transformers.Qwen3Config, **_WINDOWS, max_window_layers=0),
    "mixtral with windows": partial(transformers.MixtralConfig, sliding_window=5, num_local_experts=4),
    "qwen3_moe with windows": partial(transformers.Qwen3MoeConfig, **_WINDOWS, num_experts=4, num_experts_per_tok=2),
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "olmoe": partial(transformers.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
    "stablelm": transformers.StableLmConfig,
}
DIMENSIONS = ("tp", "pp", "sp", "dp", "ep", "zero", "offload")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Model]:
    """Models of each family: a config alone, which is all that is looked at before a run."""
    configs = {name: CONFIGS[name]() for name in ("qwen2", "softcap")}
    configs |= {f"{name}, 4 layers": STAGED_CONFIGS[name]() for name in ("llama", "qwen3_moe", "deepseek_v3")}
    configs |= {name: mixture_config(name) for name in MIXTURES}
    configs |= {name: CONFIGS[name]() for name in ("window", "sinks")}
    configs |= {name: make(**_EVEN) for name, make in KINDS.items()}
    configs["heads of keys"] = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2
    )
    found = {}
    for name, config in configs.items():
        directory = tmp_path_factory.mktemp(name)
        config.save_pretrained(directory)
        found[name] = Model(str(directory), "random", 3)
    return found


def variants(models: Mapping[str, Model]) -> Iterator[tuple[str, Model]]:
    for name, model in models.items():
        yield name, model
        if name == "qwen2":
            yield f"{name} in bfloat16", replace(model, dtype="bfloat16")
            yield f"{name} with adapters", replace(model, lora=Lora(rank=2, targets=["q_proj"]))


def offered_layouts(engine: str, model: Model, options: Mapping[str, Any]) -> list[Layout]:
    return [layout for layout, _ in offered_orders(engine, model, options)]


def offered_orders(engine: str, model: Model, options: Mapping[str, Any]) -> list[tuple[Layout, list[StageOrder]]]:
    """Each layout, with the orders of its stages that the search chooses among, in the fewest parts and in the most."""
    spec = cluster(engine, options)
    extent = Extent(prompt=8, response=8, position=8, longest=16)
    costs = ModelledCosts(spec, STEP, shapes_of({"policy": model}, spec), {"": extent})
    layouts = [layout for count in (1, 2, 6, 8, 16) for layout in costs.layouts(TRAIN, "main", count)]
    groups = {pp: costs._orders(TRAIN, pp, False) for pp in {layout.pp for layout in layouts}}
    return [
        (one, [order for group in groups[one.pp] for order, _ in (group[0], group[-1])] if one.pp > 1 else [StageOrder()])
        for one in layouts
    ]


def cluster(engine: str, options: Mapping[str, Any]) -> ClusterSpec:
    return ClusterSpec(pools={"main": PoolSpec(device="h100", nodes=2)}, train=TrainSpec(engine=engine, options=dict(options)))


def told(engine: str, layout: Layout, options: Mapping[str, Any], order: StageOrder | None = None) -> dict[str, object]:
    """The options with which a run starts the trainer of a plan."""
    how = msgspec.structs.asdict(order or StageOrder())
    placement = Placement(TRAIN, ("policy.update",), "main", 0, layout.num_devices, layout, 8, Footprint(gradients=1), **how)
    slot = degrees_as_placed(EngineSlot("policy", "train", engine), placement, cluster(engine, options))
    return train_options(engine, options, slot.planned)


@pytest.mark.parametrize(("engine", "options"), [(name, options) for name in TRAINERS for options in OPTIONS[name]], ids=str)
def test_a_run_accepts_every_layout_that_the_search_offers(engine: str, options: dict[str, Any], models: Mapping[str, Model]) -> None:
    num_checked = 0
    for name, model in variants(models):
        if options and name in KINDS:
            continue  # What these are refused for has no options.
        try:
            check_trainer(engine, model, {name: value for name, value in options.items() if name == "compute_dtype"}, 1)
        except M2FlowError:
            assert not offered_layouts(engine, model, options), f"{engine} has no place for {name}, which the search offers layouts for"
            continue
        for layout, orders in offered_orders(engine, model, options):
            for order in orders:
                try:
                    check_trainer(engine, model, told(engine, layout, options, order), layout.num_devices)
                except M2FlowError as error:
                    raise AssertionError(f"{engine} refuses {layout} of {name}, {order}, which the search offers: {error}") from error
                num_checked += 1
    assert num_checked > 5


@pytest.mark.parametrize("engine", TRAINERS)
def test_the_search_offers_each_dimension_that_an_engine_has_and_no_other(engine: str, models: Mapping[str, Model]) -> None:
    has = engine_named(engine, "train").capabilities.parallel_layouts
    layouts = list(itertools.chain.from_iterable(offered_layouts(engine, model, {}) for _, model in variants(models)))
    found = {name for layout in layouts for name in DIMENSIONS if getattr(layout, name) != getattr(Layout(), name)}
    assert found == {word.partition(" ")[0] for word in has.names()}
    assert {layout.zero for layout in layouts} - {0} == set(has.zero) - {0}


def test_options_of_stages_are_left_out_where_a_plan_has_one_stage_and_a_spec_without_a_search_keeps_them() -> None:
    options = {"vpp": 2, "schedule": "zero-bubble"}
    assert told("fsdp", Layout(dp=2, zero=3), options) == {}
    assert told("fsdp", Layout(pp=2, zero=3), options) == {"pp": 2, **options}
    assert told("fsdp", Layout(dp=2, zero=3), {"pp": 1, **options}) == {"pp": 1}
    assert train_options("fsdp", options, {}) == options


def test_a_stage_of_zero_that_replicas_share_is_told_and_one_replica_takes_its_engines_own() -> None:
    assert told("megatron", Layout(dp=2, zero=0), {})["zero"] == 0
    assert told("deepspeed", Layout(dp=2, zero=2), {})["zero"] == 2
    assert "zero" not in told("megatron", Layout(tp=2, zero=0), {})
    assert "zero" not in told("fsdp", Layout(dp=2, zero=3), {})
