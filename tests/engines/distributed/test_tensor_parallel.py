"""The trainer `fsdp` with split layers: mixtures' experts spread by number beside them, stages without a bubble, and parts that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import transformers
from faulty import Fault, check_a_gradient_that_lacks_a_pass_is_not_applied, check_each_fault_is_an_error_on_all_and_all_go_on
from followed import followed
from mixture_routing import BALANCE, balance_history
from tiny_models import VOCABULARY, dense_config, mixture_config, write_model
from trainer_layouts import (
    STEP,
    LayoutHeadSuite,
    LayoutSuite,
    check_each_goes_on_from_the_one_before,
    check_experts_that_no_row_goes_to,
    check_it_goes_on_alone,
    check_numbers,
    check_pieces,
    train,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from m2flow.engines import registry
from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import COLWISE, ROWWISE, SUMMED, check_fsdp, plan_of
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.registry import STACKED
from m2flow.errors import EngineError
from m2flow.recipe import SGD, Model, Optimizer
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import copied, distance, samples, started

SPLIT = sorted(set(STACKED) - {"olmoe"})
"""Mixtures whose attention is split by heads."""


def made(name: str) -> Any:
    """A config: of a mixture by its `model_type`, of another by it and the number of layers."""
    kind, _, num_layers = name.partition("-")
    if kind == "gpt2":
        return transformers.GPT2Config()
    return mixture_config(kind) if kind in STACKED else dense_config(kind, int(num_layers or 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), mixture_config())


def split(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"tp": 2, **options}), followers)


@pytest.mark.slow
class TestSplitMixture(LayoutSuite):
    options: ClassVar = {"tp": 2}


@pytest.mark.slow
class TestHeadsOfSplitMixtures(LayoutHeadSuite):
    options: ClassVar = {"tp": 2}


@pytest.mark.slow
class TestSplitLayersAndExperts(LayoutSuite):
    """Four ranks have a layer's experts; two of them each of its other parts."""

    others = "three"
    options: ClassVar = {"tp": 2, "ep": 2}


@pytest.mark.slow
class TestSplitStagesWithoutBubble(TestSplitLayersAndExperts):
    options: ClassVar = {"tp": 2, "pp": 2, "schedule": "zero-bubble"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        pytest.param("deepseek_v3", {"head_logits": 96, "reshard_after_forward": False}, marks=pytest.mark.core),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in SPLIT if name not in ("qwen3_moe", "deepseek_v3")),
    ],
)
def test_numbers_of_split_mixtures_are_those_of_the_embedded_trainer(
    name: str, options: dict[str, Any], followers: Followers, tmp_path: Path
) -> None:
    check_numbers(write_model(tmp_path, mixture_config(name)), {"tp": 2, **options}, followers)


def test_biases_of_what_is_summed_over_ranks_are_added_once(followers: Followers, tmp_path: Path) -> None:
    config = dense_config("llama")
    config.attention_bias = config.mlp_bias = True
    check_numbers(write_model(tmp_path, config), {"tp": 2}, followers)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep": ("qwen3_moe", {"ep": 2}),
    "latent": ("deepseek_v3", {"ep": 2}),
    "replicas": ("qwen3_moe", {}),
    "stages": ("qwen3_moe", {"pp": 2}),
    "without bubble": ("qwen3_moe", {"pp": 2, "schedule": "zero-bubble"}),
    "dense": ("qwen3", {"pp": 2, "schedule": "zero-bubble", "micro_batches": 3}),
    "chunks": ("qwen2-4", {"pp": 2, "vpp": 2, "schedule": "zero-bubble"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in ("ep", "dense") else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS])
def test_split_layers_beside_experts_and_stages_have_the_numbers_of_the_embedded_trainer(
    name: str, three: Followers, tmp_path: Path
) -> None:
    kind, options = LAYOUTS[name]
    model, options = write_model(tmp_path / "model", made(kind)), {"tp": 2, **options}
    check_numbers(model, options, three)
    for is_spread in (False, True):
        check_it_goes_on_alone(model, {**options, "spread_checkpoints": is_spread}, three, tmp_path / f"{is_spread}")


@pytest.mark.slow
@pytest.mark.long
def test_split_layers_beside_experts_on_stages_have_the_numbers_of_the_embedded_trainer(model: Model, tmp_path: Path) -> None:
    with followed(7) as seven:
        for options in ({"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "pp": 2, "schedule": "zero-bubble"}, {"tp": 2, "ep": 2}):
            check_numbers(model, options, seven)


@pytest.mark.slow
def test_experts_of_a_split_mixture_that_no_row_goes_to(model: Model, three: Followers) -> None:
    check_experts_that_no_row_goes_to(model, split(replace(model, routing="rollout"), three, ep=2))


@pytest.mark.parametrize("routing", [None, "trainer"])
def test_routers_of_a_split_mixture_are_balanced_as_on_one_rank(routing: Any, model: Model, followers: Followers) -> None:
    balanced = replace(model, balance=BALANCE, routing=routing)
    batch = samples(VOCABULARY)
    expected, found = (balance_history(one, batch) for one in (EmbeddedTrain(balanced, EngineSettings()), split(balanced, followers)))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("recipe", [STEP, SGD(0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_checkpoint_goes_on_at_any_layout(recipe: Optimizer, model: Model, followers: Followers, tmp_path: Path) -> None:
    others = [
        split(model, followers),
        split(model, followers, tp=1, ep=2),
        split(model, followers, spread_checkpoints=True),
        EmbeddedTrain(model, EngineSettings()),
        split(model, followers),
        split(model, followers, tp=1, pp=2),
    ]
    check_each_goes_on_from_the_one_before(recipe, model, others, tmp_path)


def check_bits(model: Model, followers: Followers, **options: Any) -> None:
    for deterministic in (False, True):
        found = []
        for _ in range(2):
            settings = EngineSettings(deterministic=deterministic, options={"tp": 2, **options})
            with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
                train(engine, samples(VOCABULARY))
                found.append(copied(engine))
        assert distance(*found) == 0


def test_one_layout_gives_the_same_bits_each_time(model: Model, followers: Followers) -> None:
    check_bits(model, followers)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ep": 2}, {"pp": 2, "schedule": "zero-bubble"}], ids=str)
def test_one_layout_of_four_ranks_gives_the_same_bits_each_time(options: dict[str, Any], model: Model, three: Followers) -> None:
    check_bits(model, three, **options)


def test_ranks_send_what_they_hold_of_split_layers_and_experts(model: Model, followers: Followers) -> None:
    check_pieces(model, split(model, followers))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ep": 2}, {}, {"pp": 2}], ids=str)
def test_four_ranks_send_what_they_hold_of_split_layers_and_experts(options: dict[str, Any], model: Model, three: Followers) -> None:
    check_pieces(model, split(model, three, **options))


# ---- parts that fail

_DENSE = [
    Fault(1, "model.layers.0.self_attn.o_proj", said="model.layers.0.self_attn"),
    Fault(0, "model.layers.1.mlp.act_fn", "backward", said="model.layers.1.mlp"),
    Fault(1, "model.layers.1.mlp.down_proj", error=MemoryError, said="model.layers.1.mlp"),
    Fault(0, "model.layers.0.self_attn.q_proj", "backward", said="model.layers.0.self_attn"),
    Fault(1, "model.layers.1.post_attention_layernorm", said="model.layers.1"),
    Fault(1, "model.layers.1.self_attn.o_proj", "shape", said="model.layers.1.self_attn"),
    Fault(0, "lm_head", said="the head"),
]
_MIXTURE = [
    Fault(1, "model.layers.0.mlp.gate", said="model.layers.0"),
    Fault(0, "model.layers.1.mlp", said="model.layers.1"),
    Fault(0, "model.layers.1.mlp.experts.act_fn", said="model.layers.1.mlp.experts"),
    Fault(1, "model.layers.1.mlp.experts.act_fn", "backward", said="model.layers.1.mlp.experts"),
    Fault(0, "model.layers.0.self_attn.q_norm", said="model.layers.0.self_attn"),
]
_SHARED = [
    Fault(1, "model.layers.1.mlp.gate", said="model.layers.1"),
    Fault(0, "model.layers.1.mlp.shared_experts.down_proj", said="model.layers.1.mlp.shared_experts"),
    Fault(1, "model.layers.1.mlp.shared_experts.act_fn", "backward", said="model.layers.1.mlp.shared_experts"),
    Fault(0, "model.layers.1.mlp.experts.act_fn", "backward", said="model.layers.1.mlp.experts"),
    Fault(1, "model.layers.0.mlp.act_fn", "backward", said="model.layers.0.mlp"),
    Fault(0, "model.layers.1.self_attn.kv_b_proj", said="model.layers.1.self_attn"),
]


@pytest.mark.parametrize(
    ("name", "faults"),
    [("qwen2", _DENSE), ("qwen3_moe", _MIXTURE), ("deepseek_v3", _SHARED)],
    ids=["qwen2", "qwen3_moe", "deepseek_v3"],
)
def test_a_part_of_a_split_layer_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(
    name: str, faults: list[Fault], followers: Followers, tmp_path: Path
) -> None:
    """Tensor ranks wait for each other in every layer, to add up what each makes of it."""
    check_each_fault_is_an_error_on_all_and_all_go_on(write_model(tmp_path, made(name)), {"tp": 2}, followers, faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "faults"),
    [
        ("qwen3_moe", {"ep": 2}, [*_MIXTURE, Fault(3, "model.layers.1.mlp.gate", said="model.layers.1")]),
        (
            "qwen2",
            {"pp": 2, "schedule": "zero-bubble"},
            [
                Fault(3, "model.layers.2.self_attn.o_proj", "backward", said="model.layers.2.self_attn"),
                Fault(1, "model.layers.0.mlp.down_proj", said="model.layers.0.mlp"),
                Fault(2, "lm_head", said="the head"),
            ],
        ),
    ],
    ids=["ep", "without bubble"],
)
def test_a_part_of_four_ranks_that_fails_is_an_error_on_all_and_all_go_on(
    name: str, options: dict[str, Any], faults: list[Fault], three: Followers, tmp_path: Path
) -> None:
    check_each_fault_is_an_error_on_all_and_all_go_on(write_model(tmp_path, made(name)), {"tp": 2, **options}, three, faults)


def test_a_gradient_that_lacks_a_pass_is_not_applied(model: Model, followers: Followers) -> None:
    fault = Fault(1, "model.layers.1.self_attn.v_proj", "backward", said="model.layers.1.self_attn")
    check_a_gradient_that_lacks_a_pass_is_not_applied(model, {"tp": 2}, followers, fault)


# ---- what is refused


def test_the_families_that_plans_split_are_those_that_transformers_has_a_plan_for_in_our_styles() -> None:
    found = set[str]()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        styles = styles_of(name)
        if styles and styles <= {COLWISE, ROWWISE, SUMMED}:
            found.add(CONFIG_MAPPING[name]().get_text_config().model_type)
    assert found == set(registry.SPLIT)
    unlisted = type("Unlisted", (transformers.LlamaConfig,), {"model_type": "unlisted"})()
    with pytest.raises(EngineError, match="a 'unlisted' model can't be split over ranks here: its tensor-parallel plan is not known"):
        plan_of(unlisted, 2)


def styles_of(name: str) -> set[str]:
    """The styles of a family's plan; of attention over latent vectors, and of experts that go by number, we have our own."""
    try:
        config = CONFIG_MAPPING[name]().get_text_config()
    except Exception:
        return set()  # Several models in one, or defaults that make no model.
    heads = config.to_dict().get("num_key_value_heads")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    own = [".experts"] * (name in STACKED) + [".self_attn."] * bool(name in STACKED and getattr(config, "kv_lora_rank", None))
    return {style for pattern, style in plan.items() if heads and not any(part in pattern for part in own)}


@pytest.mark.parametrize(
    ("name", "options", "num_ranks", "said"),
    [
        ("qwen3_moe", {"tp": 2, "ep": 2}, 6, r"tp \* ep is 4, which does not divide 6 ranks"),
        ("qwen3_moe", {"tp": 2, "ep": 8}, 16, r"tp \* ep is 16, which does not divide the model's 8 experts"),
        ("qwen3_moe", {"tp": 2, "ep": 2}, 20, "5 ranks that hold the same experts can't share out experts of 32 times 24"),
        ("qwen3_moe", {"tp": 4}, 4, "tp is 4, which does not divide the model's num_key_value_heads, 2"),
        ("qwen3_moe", {"tp": 0}, 4, "the option tp of the train engine 'fsdp' is 0"),
        ("qwen3_moe", {"tp": 2}, 3, "tp is 2, which does not divide 3 ranks"),
        ("olmoe", {"tp": 2}, 4, "a 'olmoe' model can't be split .* plan wants colwise_gather_output, rowwise_split_input"),
        ("gpt2", {"tp": 2}, 2, "a 'gpt2' model can't be split over ranks here: its tensor-parallel plan has none"),
    ],
)
def test_what_can_t_be_split_is_refused_by_name_before_a_run(
    name: str, options: dict[str, Any], num_ranks: int, said: str, tmp_path: Path
) -> None:
    made(name).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=said):
        check_fsdp(Model(str(tmp_path), init="random"), options, num_ranks)
    check_fsdp(Model("nowhere"), {}, num_ranks)
