"""Adapters of the trainer `fsdp` under tensor parallelism, split as the layers that they adapt: trained, sent and saved as on one rank."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapted_trainers import (
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer,
    check_references_compute_from_the_policys_weights,
    check_what_was_copied_of_a_policy_is_in_a_checkpoint,
)
from faulty import Fault, check_each_fault_is_an_error_on_all_and_all_go_on
from tiny_models import CONFIGS, VOCABULARY, dense_config, mixture_config, write_model
from trainer_layouts import STEP, check_each_goes_on_from_the_one_before, check_numbers, train

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.recipe import Lora, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import copied, distance, samples, started

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")

ALL = Lora(rank=4, alpha=8)
"""Every linear layer: split by output, split by input, and whole."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return replace(write_model(tmp_path_factory.mktemp("qwen2"), dense_config("qwen2", 4)), lora=ALL)


def split(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"tp": 2, **options}), followers)


KINDS: dict[str, tuple[str, Lora, dict[str, Any]]] = {
    "each layer": ("qwen2", ALL, {}),
    "attention": ("qwen3", Lora(rank=4, alpha=8, targets=("q_proj", "o_proj")), {"recompute": True}),
    "mixture": ("qwen3_moe", Lora(rank=4, alpha=8, targets=("q_proj", "v_proj", "o_proj", "gate")), {}),
    "latent": ("deepseek_v3", Lora(rank=4, alpha=8, targets=("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")), {}),
    "by PyTorch": ("mistral", ALL, {}),
}


def made(kind: str) -> Any:
    if kind == "mistral":
        return CONFIGS["mistral"]()
    return dense_config(kind) if kind in ("qwen2", "qwen3", "llama") else mixture_config(kind)


@pytest.mark.parametrize("name", [name if name != "latent" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS])
def test_adapters_of_split_layers_are_those_of_the_embedded_trainer(name: str, followers: Followers, tmp_path: Path) -> None:
    kind, recipe, options = KINDS[name]
    adapted = replace(write_model(tmp_path / "model", made(kind)), lora=recipe)
    check_numbers(adapted, {"tp": 2, **options}, followers)
    make = functools.partial(split, adapted, followers, **options)
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, make, tmp_path)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("qwen2", {}),
    "stages without bubble": ("qwen2", {"pp": 2, "schedule": "zero-bubble"}),
    "chunks": ("llama", {"pp": 2, "vpp": 2, "recompute": True}),
    "sequences": ("qwen3", {"cp": 2}),
    "experts": ("mixture", {"ep": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_of_split_layers_on_four_ranks_are_those_of_the_embedded_trainer(name: str, three: Followers, tmp_path: Path) -> None:
    kind, options = LAYOUTS[name]
    config, recipe = (mixture_config("qwen3_moe"), KINDS["mixture"][1]) if kind == "mixture" else (dense_config(kind, 4), ALL)
    adapted = replace(write_model(tmp_path / "model", config), lora=recipe)
    check_fsdp(adapted, {"tp": 2, **options}, 4)
    check_numbers(adapted, {"tp": 2, **options}, three)
    make = functools.partial(split, adapted, three, **options)
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, make, tmp_path)


def test_references_compute_from_the_weights_of_a_split_adapted_policy(model: Model, followers: Followers, tmp_path: Path) -> None:
    check_references_compute_from_the_policys_weights(model, split(model, followers), tmp_path)
    make = functools.partial(split, model, followers)
    check_what_was_copied_of_a_policy_is_in_a_checkpoint(model, make, tmp_path / "copied", make())


def test_a_checkpoint_of_split_adapters_goes_on_at_any_layout(model: Model, followers: Followers, tmp_path: Path) -> None:
    others = [
        split(model, followers),
        split(model, followers, tp=1),
        split(model, followers, spread_checkpoints=True),
        EmbeddedTrain(model, EngineSettings()),
        split(model, followers),
        split(model, followers, tp=1, pp=2),
        split(model, followers),
    ]
    check_each_goes_on_from_the_one_before(STEP, model, others, tmp_path)


def test_one_layout_of_split_adapters_gives_the_same_bits_each_time(model: Model, followers: Followers) -> None:
    found = []
    for _ in range(2):
        settings = EngineSettings(deterministic=True, options={"tp": 2})
        with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
            train(engine, samples(VOCABULARY))
            found.append(copied(engine))
    assert distance(*found) == 0


_FAULTS = [
    Fault(1, "model.layers.0.self_attn.q_proj.lora_A.default", said="model.layers.0.self_attn"),
    Fault(0, "model.layers.1.mlp.down_proj.lora_A.default", "backward", said="model.layers.1.mlp"),
    Fault(1, "model.layers.1.mlp.down_proj.lora_B.default", error=MemoryError, said="model.layers.1.mlp"),
    Fault(0, "model.layers.2.self_attn.v_proj.lora_B.default", "backward", said="model.layers.2.self_attn"),
]


def test_an_adapter_of_a_split_layer_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(model: Model, followers: Followers) -> None:
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"tp": 2}, followers, _FAULTS)
