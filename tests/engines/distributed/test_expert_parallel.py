"""The trainer `fsdp` with split experts: the suites of train engines on two ranks, and the embedded trainer's numbers on up to four."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import transformers
from adapted_trainers import check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer
from faulty import Fault, check_a_gradient_that_lacks_a_pass_is_not_applied, check_each_fault_is_an_error_on_all_and_all_go_on
from followed import followed
from mixture_routing import BALANCE, balance_history
from safetensors.numpy import load_file
from tiny_models import NUM_EXPERTS, VOCABULARY, mixture_config, write_model
from trainer_layouts import (
    STEP,
    LayoutHeadSuite,
    LayoutSuite,
    apart,
    check_each_goes_on_from_the_one_before,
    check_experts_that_no_row_goes_to,
    check_it_goes_on_alone,
    check_numbers,
    train,
)

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import EXPERTS, load_model
from m2flow.engines.registry import STACKED
from m2flow.errors import EngineError
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import legal_layouts, offered, thread_layouts
from m2flow.recipe import SGD, Lora, Model, Muon, Optimizer
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import copied, distance, samples, started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), mixture_config())


def split(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"ep": 2, **options}), followers)


@pytest.mark.slow
class TestExperts(LayoutSuite):
    options: ClassVar = {"ep": 2}


@pytest.mark.slow
class TestShardedExperts(TestExperts):
    """Two ranks share the same experts."""

    others = "three"


@pytest.mark.slow
class TestHeadsOfMixtures(LayoutHeadSuite):
    options: ClassVar = {"ep": 2}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ep": 2}, marks=pytest.mark.core),
        {"pp": 2},
        {"ep": 2, "cpu_offload": True, "reshard_after_forward": False, "head_logits": 96},
    ],
    ids=str,
)
def test_numbers_on_two_ranks_are_those_of_the_embedded_trainer(options: dict[str, Any], model: Model, followers: Followers) -> None:
    check_numbers(model, options, followers)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STACKED) - {"qwen3_moe"}))
def test_numbers_of_other_mixtures_are_those_of_the_embedded_trainer(name: str, followers: Followers, tmp_path: Path) -> None:
    check_numbers(write_model(tmp_path, mixture_config(name)), {"ep": 2}, followers)


def test_what_is_split_has_names_in_checkpoints() -> None:
    assert set(STACKED) == set(EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STACKED) - {"qwen3_moe"}))
def test_numbers_of_mixtures_on_stages_are_those_of_the_embedded_trainer(name: str, followers: Followers, tmp_path: Path) -> None:
    check_numbers(write_model(tmp_path, mixture_config(name)), {"pp": 2}, followers)


@pytest.mark.core
def test_numbers_of_experts_split_within_stages_are_those_of_the_embedded_trainer(model: Model, three: Followers) -> None:
    check_numbers(model, {"pp": 2, "ep": 2}, three)


@pytest.mark.slow
@pytest.mark.parametrize("is_spread", [False, True])
def test_a_checkpoint_of_experts_split_within_stages_goes_on_alone(is_spread: bool, model: Model, three: Followers, tmp_path: Path) -> None:
    check_it_goes_on_alone(model, {"pp": 2, "ep": 2, "spread_checkpoints": is_spread}, three, tmp_path / "there")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_part_of_a_stage_with_split_experts_that_fails_is_an_error_on_all_and_all_go_on(
    schedule: str, model: Model, three: Followers
) -> None:
    faults = [
        Fault(1, "model.layers.0.mlp.gate", said="model.layers.0"),
        Fault(3, "model.layers.1.self_attn.o_proj", "backward", said="model.layers.1.self_attn"),
        Fault(2, "model.layers.1.mlp.experts.act_fn", said="model.layers.1.mlp.experts"),
        Fault(0, "model.layers.0.mlp.experts.act_fn", "backward", said="model.layers.0.mlp.experts"),
    ]
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"pp": 2, "ep": 2, "schedule": schedule}, three, faults)


@pytest.mark.slow
@pytest.mark.long
def test_experts_split_within_stages_in_every_order_have_the_numbers_of_the_embedded_trainer(tmp_path: Path) -> None:
    """Two ranks of each of two stages share out each expert's weights; stages with two chunks."""
    deep = mixture_config()
    deep.num_hidden_layers = 4
    model = write_model(tmp_path, deep)
    with followed(7) as seven:
        check_numbers(model, {"pp": 2, "ep": 2, "vpp": 2}, seven)
        check_numbers(model, {"pp": 2, "ep": 2, "schedule": "zero-bubble"}, seven)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.long)])
def test_numbers_on_four_ranks_are_those_of_the_embedded_trainer(ep: int, model: Model, tmp_path: Path) -> None:
    """With `ep: 2` two ranks share out each expert's weights."""
    with followed(3) as followers:
        check_numbers(model, {"ep": ep}, followers)
        check_it_goes_on_alone(model, {"ep": ep, "spread_checkpoints": True}, followers, tmp_path)
        check_experts_that_no_row_goes_to(model, split(replace(model, routing="rollout"), followers, ep=ep))


@pytest.mark.parametrize("options", [{"ep": 2}, {"ep": 1, "pp": 2}], ids=str)
def test_weights_are_those_of_the_checkpoint_that_was_loaded(options: dict[str, Any], followers: Followers, tmp_path: Path) -> None:
    drawn = write_model(tmp_path, mixture_config())
    load_model(drawn, device="cpu", attention="eager").save_pretrained(tmp_path)
    with started(split(replace(drawn, init="pretrained"), followers, **options)) as engine:
        found = copied(engine)
    expected = load_file(tmp_path / "model.safetensors")
    assert f"model.layers.1.mlp.experts.{NUM_EXPERTS - 1}.up_proj.weight" in found
    assert apart(found, expected) == 0


@pytest.mark.parametrize("recipe", [STEP, SGD(0.1, momentum=0.9), Muon(0.1)], ids=["adamw", "sgd", "muon"])
def test_a_checkpoint_goes_on_at_any_layout(recipe: Optimizer, model: Model, followers: Followers, tmp_path: Path) -> None:
    whole = Mirrored(FsdpTrain, model, EngineSettings(), followers)
    stages = split(model, followers, ep=1, pp=2)
    others = [
        split(model, followers),
        EmbeddedTrain(model, EngineSettings()),
        split(model, followers, spread_checkpoints=True),
        stages,
        whole,
    ]
    check_each_goes_on_from_the_one_before(recipe, model, others, tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_layout_gives_the_same_bits_each_time(deterministic: bool, model: Model, followers: Followers) -> None:
    found = []
    for _ in range(2):
        settings = EngineSettings(deterministic=deterministic, options={"ep": 2})
        with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
            train(engine, samples(VOCABULARY))
            found.append(copied(engine))
    assert distance(*found) == 0


def test_passes_in_half_precision_keep_weights_in_float32(model: Model, followers: Followers) -> None:
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), split(model, followers, compute_dtype="bfloat16")):
        with started(engine):
            first = copied(engine)
            train(engine, samples(VOCABULARY), SGD(1.0))
            found.append({name: array - first[name] for name, array in copied(engine).items()})
    assert all(array.dtype == np.float32 for array in found[1].values())
    assert 0 < distance(found[1], found[0]) < 0.3


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_that_no_row_goes_to_have_a_gradient_of_zeros(experts: str, followers: Followers, tmp_path: Path) -> None:
    """Also by code of the model that computes nothing without rows: ranks with the same experts wait for each other's gradients."""
    model = replace(write_model(tmp_path, mixture_config()), routing="rollout")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "experts_implementation": experts}))
    assert load_model(model, device="cpu", attention="eager").config._experts_implementation == experts
    check_experts_that_no_row_goes_to(model, split(model, followers))


@pytest.mark.parametrize("routing", [None, "trainer"])
def test_routers_are_balanced_as_on_one_rank(routing: Any, model: Model, followers: Followers) -> None:
    balanced = replace(model, balance=BALANCE, routing=routing)
    batch = samples(VOCABULARY)
    expected, found = (balance_history(one, batch) for one in (EmbeddedTrain(balanced, EngineSettings()), split(balanced, followers)))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("options", [{}, pytest.param({"recompute": True}, marks=pytest.mark.slow)], ids=str)
def test_a_part_of_a_layer_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(
    options: dict[str, Any], model: Model, followers: Followers
) -> None:
    """Before the rows are exchanged and after that, on the way back too."""
    faults = [
        Fault(0, "model.layers.0.self_attn.q_proj", said="model.layers.0.self_attn"),
        Fault(1, "model.layers.0.mlp.gate", said="model.layers.0"),
        Fault(0, "model.layers.1.self_attn.o_proj", "backward", said="model.layers.1.self_attn"),
        Fault(1, "model.layers.1.mlp.gate", error=MemoryError, said="model.layers.1"),
        Fault(1, "model.layers.0.mlp.experts.act_fn", said="model.layers.0.mlp.experts"),
        Fault(0, "model.layers.1.mlp.experts.act_fn", "backward", said="model.layers.1.mlp.experts"),
        Fault(0, "lm_head", said="the head"),
    ]
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"ep": 2, **options}, followers, faults)


def test_a_gradient_that_lacks_a_pass_is_not_applied(model: Model, followers: Followers) -> None:
    fault = Fault(1, "model.layers.1.self_attn.v_proj", "backward", said="model.layers.1.self_attn")
    check_a_gradient_that_lacks_a_pass_is_not_applied(model, {"ep": 2}, followers, fault)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_adapters_of_a_mixture_are_those_of_the_embedded_trainer(model: Model, followers: Followers, tmp_path: Path) -> None:
    adapted = replace(model, lora=Lora(rank=4, alpha=8, targets=("q_proj", "v_proj")))
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, lambda: split(adapted, followers), tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "num_ranks", "said"),
    [
        ("qwen3_moe", {"ep": 2, "pp": 2}, 6, r"ep \* pp is 4, which does not divide 6 ranks"),
        ("qwen3_moe", {"ep": 2, "pp": 2}, 20, "5 ranks that hold the same experts can't share out experts of 32 times 24"),
        ("qwen3_moe", {"ep": "2"}, 4, "the option ep of the train engine 'fsdp' is '2'"),
        ("qwen3_moe", {"ep": 3}, 4, "ep is 3, which does not divide 4 ranks"),
        ("qwen3_moe", {"ep": 3}, 6, "ep is 3, which does not divide the model's 8 experts"),
        ("qwen3_moe", {"ep": 2}, 10, "5 ranks that hold the same experts can't share out experts of 32 times 24"),
        ("mixtral", {"ep": 8}, 8, "ep is 8, which does not divide the model's 4 experts"),
        ("gpt2", {"ep": 2}, 4, "experts of a 'gpt2' model can't be split over ranks here; those of deepseek_v2, .* can"),
    ],
)
def test_what_can_t_be_split_is_refused_by_name_before_a_run(
    name: str, options: dict[str, Any], num_ranks: int, said: str, tmp_path: Path
) -> None:
    (transformers.GPT2Config() if name == "gpt2" else mixture_config(name)).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=said):
        check_fsdp(Model(str(tmp_path), init="random"), options, num_ranks)


def test_an_engine_refuses_it_too(model: Model, followers: Followers) -> None:
    with pytest.raises(EngineError, match="ep is 3, which does not divide 2 ranks"):
        split(model, followers, ep=3).start()


def test_the_planner_knows_split_experts_on_gpus_alone(model: Model) -> None:
    offers, shape = offered("fsdp", "train"), ModelShape.from_config(model.path)
    layouts = [layout for layout in legal_layouts(shape, offers, "train", 8, 8) if layout.ep > 1]
    # By powers of two. With tensor ranks as many whole experts each.
    assert {(layout.ep, layout.dp, layout.tp, layout.pp) for layout in layouts if layout.sp == 1} == {
        (8, 8, 1, 1),
        (4, 8, 1, 1),
        (2, 8, 1, 1),
        (2, 4, 1, 2),
        (2, 4, 2, 1),
        (4, 4, 1, 2),
        (4, 4, 2, 1),
        (2, 2, 2, 2),
    }
    # Ranks that share out sequences have experts of their own too.
    assert {layout.dp * layout.sp * layout.tp * layout.pp for layout in layouts} == {8}
    assert all(layout.dp * layout.sp % layout.ep == 0 for layout in layouts)
    assert all(shape.num_experts % (layout.tp * layout.ep) == 0 for layout in legal_layouts(shape, offers, "train", 8, 8))
    # Two heads of keys and values can't be shared out over four ranks.
    assert {layout.tp for layout in legal_layouts(shape, offers, "train", 8, 8)} == {1, 2}
    uneven = replace(shape, num_experts=2)
    assert {layout.ep for layout in legal_layouts(uneven, offers, "train", 8, 8)} == {1, 2}
    # Five ranks with the same experts can't share out the rows of their matrices.
    assert {layout.ep for layout in legal_layouts(uneven, offers, "train", 10, 10)} == {1}
    for num_ranks in (None, 2):
        assert {layout.ep for layout in thread_layouts("train", 4, 4, offers, num_ranks)} == {1}
