"""Mixtures of experts in the layouts of the trainer `fsdp`: replayed routing, losses and biases of routers, as by the embedded trainer."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from adapted_trainers import check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer
from followed import followed
from mixture_routing import biases_of, check_routing_against_embedded
from tiny_models import NUM_EXPERTS, SMALL, VOCABULARY, mixture_config, write_model
from trainer_layouts import check_numbers

from m2flow.engines.contract import EngineSettings, Objective
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import SGD, Balance, Lora, Loss, Model
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, compact_experts
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, samples, started

LOSSES = Balance(loss=0.5, z_loss=0.3)


def deep(name: str, num_layers: int) -> Any:
    found = mixture_config(name)
    found.num_hidden_layers = num_layers
    return found


def recorded(batch: Batch, num_routers: int) -> Batch:
    """The batch with experts of most tokens, whatever a router would have chosen; every fourth sample has no record."""
    tokens = batch.ragged("tokens")
    places = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
    first = (tokens.values[:, None] * 5 + places[:, None] * 3 + np.arange(num_routers)) % NUM_EXPERTS
    experts = np.stack((first, (first + 1 + places[:, None] % (NUM_EXPERTS - 1)) % NUM_EXPERTS), 2).astype(np.int16)
    experts[np.repeat(np.arange(len(batch)) % 4 == 3, tokens.lengths)] = -1
    return batch.with_columns(**{ROUTED_EXPERTS: Ragged(compact_experts(experts, NUM_EXPERTS), tokens.offsets)})


def check_routing(path: Path, name: str, num_layers: int, options: dict[str, Any], followers: Followers) -> None:
    """Replay, of which most tokens would go elsewhere, and losses and biases, at once."""
    num_routers = num_layers - (1 if name == "deepseek_v3" else 0)
    balance = replace(LOSSES, bias_step=0.01) if name == "deepseek_v3" else LOSSES
    model = replace(write_model(path, deep(name, num_layers)), routing="rollout", balance=balance)
    batch = recorded(samples(VOCABULARY, num_prompts=5), num_routers)
    expected = check_numbers(model, options, followers, batch)
    sums, num_tokens = expected["sums"], int(batch.ragged("loss_mask").values.sum())
    assert sums["0/rerouted"] + sums["1/rerouted"] > 0.5 * num_tokens
    assert sums["0/balance_loss"] > 0
    assert {"0/expert_load/max", "expert_load/idle"} <= set(expected["metrics"])


@pytest.mark.parametrize(
    ("name", "num_layers", "options"),
    [
        ("qwen3_moe", 3, {"pp": 2, "micro_batches": 3}),
        pytest.param("deepseek_v3", 3, {"pp": 2, "micro_batches": 3, "recompute": True}, marks=pytest.mark.core),
        ("deepseek_v3", 5, {"pp": 2, "vpp": 2}),
        ("qwen3_moe", 4, {"pp": 2, "vpp": 2, "schedule": "zero-bubble", "recompute": True}),
        pytest.param("qwen3_moe", 2, {"ep": 2, "recompute": True}, marks=pytest.mark.core),
        ("qwen3_moe", 2, {"tp": 2, "recompute": True}),
        ("qwen3_moe", 2, {"cp": 2}),
        ("deepseek_v3", 3, {"cp": 2, "recompute": True}),
        ("deepseek_v3", 2, {"cp": 2, "ep": 2}),
        pytest.param("qwen3_moe", 2, {"cp": 2, "ep": 2, "recompute": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_of_layouts_that_replay_and_balance_are_those_of_the_embedded_trainer(
    name: str, num_layers: int, options: dict[str, Any], followers: Followers, tmp_path: Path
) -> None:
    check_routing(tmp_path, name, num_layers, options, followers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "ep": 2},
        {"pp": 2, "tp": 2},
        pytest.param({"pp": 2, "vpp": 2, "ep": 2, "schedule": "zero-bubble", "recompute": True}, marks=pytest.mark.long),
        {"cp": 2, "pp": 2, "ep": 2, "recompute": True},
        {"cp": 2},
        pytest.param({"cp": 2, "pp": 2, "vpp": 2, "schedule": "zero-bubble"}, marks=pytest.mark.long),
        pytest.param({"cp": 4, "ep": 4}, marks=pytest.mark.long),
        pytest.param({"cp": 2, "tp": 2, "recompute": True}, marks=pytest.mark.long),
        pytest.param({"pp": 4, "micro_batches": 2}, marks=pytest.mark.long),
        pytest.param({"pp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_numbers_of_layouts_of_four_ranks_that_replay_and_balance_are_those_of_the_embedded_trainer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with followed(3) as three:
        check_routing(tmp_path, "deepseek_v3" if "ep" in options else "qwen3_moe", 4, options, three)


@pytest.mark.slow
@pytest.mark.long
def test_numbers_of_stages_with_layers_and_experts_split_that_replay_and_balance_are_those_of_the_embedded_trainer(tmp_path: Path) -> None:
    with followed(7) as seven:
        check_routing(tmp_path, "qwen3_moe", 4, {"pp": 2, "tp": 2, "ep": 2, "vpp": 2}, seven)


@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}], ids=str)
def test_stages_and_parts_of_sequences_record_what_each_has_chosen_and_replay_it_as_one(
    options: dict[str, Any], followers: Followers, tmp_path: Path
) -> None:
    model = replace(write_model(tmp_path, deep("deepseek_v3", 4)), routing="trainer")
    batch = recorded(samples(VOCABULARY, num_prompts=2, n=2), 3)
    check_routing_against_embedded(Mirrored(FsdpTrain, model, EngineSettings(options=options), followers), model, batch, least=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"cp": 2, "pp": 2}, {"cp": 2}], ids=str)
def test_four_ranks_with_parts_of_sequences_record_as_one(options: dict[str, Any], tmp_path: Path) -> None:
    model = replace(write_model(tmp_path, deep("deepseek_v3", 4)), routing="trainer")
    batch = recorded(samples(VOCABULARY, num_prompts=2, n=2), 3)
    with followed(3) as three:
        check_routing_against_embedded(Mirrored(FsdpTrain, model, EngineSettings(options=options), three), model, batch, least=0.5)


@pytest.mark.parametrize("options", [{"pp": 2}, {"cp": 2}], ids=str)
def test_biases_follow_the_loads_of_the_layers_of_a_stage_and_of_all_rows(
    options: dict[str, Any], followers: Followers, tmp_path: Path
) -> None:
    model = replace(write_model(tmp_path, deep("deepseek_v3", 3)), balance=Balance(bias_step=0.01))
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), Mirrored(FsdpTrain, model, EngineSettings(options=options), followers)):
        with started(engine):
            engine.accumulate(samples(VOCABULARY), PPO)
            engine.apply(SGD(lr=1e-9), 1.0)
            found.append(biases_of(engine))
    assert len(found[0]) == 2
    assert found[0].keys() == found[1].keys()
    for name, own in found[0].items():
        assert set(np.abs(own)) <= {np.float32(0), np.float32(0.01)}
        assert own.any()
        np.testing.assert_array_equal(found[1][name], own, err_msg=name)


def test_losses_of_routers_do_not_depend_on_the_number_of_passes(followers: Followers, tmp_path: Path) -> None:
    """Whether a pass has tokens or only keeps the ranks together."""
    model, found = replace(write_model(tmp_path, mixture_config()), balance=LOSSES), []
    batch = samples(VOCABULARY, num_prompts=1, n=2)
    for passes in (1, 5):
        with started(Mirrored(FsdpTrain, model, EngineSettings(options={"pp": 2, "micro_batches": passes}), followers)) as engine:
            found.append(dict(engine.accumulate(batch, PPO).metrics))
    assert found[1].pop("num_shared", 0) is not None
    found[0].pop("num_shared", None)
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_experts_of_another_model_are_refused_by_every_rank_before_a_pass(followers: Followers, tmp_path: Path) -> None:
    model = replace(write_model(tmp_path, mixture_config()), routing="rollout")
    batch = samples(VOCABULARY)
    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"pp": 2}), followers)) as engine:
        with pytest.raises(EngineError, match="2 experts in 5 layers came for a model with 2 at 2 routers"):
            engine.accumulate(recorded(batch, 5), PPO)
        engine.accumulate(recorded(batch, 2), Objective(Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",))))
        engine.discard()


def test_routing_in_layouts_is_allowed_before_a_run_and_refused_of_a_model_without_experts(tmp_path: Path) -> None:
    mixture = write_model(tmp_path, mixture_config())
    for told in (replace(mixture, routing="rollout"), replace(mixture, routing="trainer"), replace(mixture, balance=LOSSES)):
        check_fsdp(told, {"ep": 2, "pp": 2}, 4)
        check_fsdp(told, {"ep": 2, "cp": 2}, 4)
    write_model(tmp_path, transformers.Qwen2Config(**SMALL))
    for told in (Model(str(tmp_path), routing="rollout"), Model(str(tmp_path), balance=LOSSES)):
        with pytest.raises(EngineError, match="'qwen2' model is no mixture"):
            check_fsdp(told, {"pp": 2}, 2)


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
ADAPTERS = Lora(rank=4, alpha=8, targets=("q_proj", "v_proj", "gate"))


@needs_peft
@pytest.mark.slow
def test_adapters_of_a_mixture_on_stages_are_those_of_the_embedded_trainer(followers: Followers, tmp_path: Path) -> None:
    adapted = replace(write_model(tmp_path / "model", deep("qwen3_moe", 3)), lora=ADAPTERS)
    made = functools.partial(Mirrored, FsdpTrain, adapted, EngineSettings(options={"pp": 2}), followers)
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, made, tmp_path)


@needs_peft
def test_adapters_of_a_mixture_on_stages_are_trained_with_replayed_and_balanced_routing(followers: Followers, tmp_path: Path) -> None:
    model = replace(write_model(tmp_path, deep("qwen3_moe", 4)), lora=ADAPTERS, routing="rollout", balance=LOSSES)
    check_numbers(model, {"pp": 2, "vpp": 2, "schedule": "zero-bubble"}, followers, recorded(samples(VOCABULARY), 4))


@needs_peft
@pytest.mark.slow
def test_adapters_of_a_mixture_whose_experts_are_split_within_stages_are_those_of_the_embedded_trainer(tmp_path: Path) -> None:
    adapted = replace(write_model(tmp_path / "model", deep("qwen3_moe", 3)), lora=ADAPTERS)
    with followed(3) as three:
        made = functools.partial(Mirrored, FsdpTrain, adapted, EngineSettings(options={"pp": 2, "ep": 2}), three)
        check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, made, tmp_path)


@needs_peft
@pytest.mark.parametrize(
    ("targets", "said"),
    [((), "peft puts adapters on stacks of experts here"), (("experts",), "adapters can't be put on experts")],
    ids=["all", "experts"],
)
def test_adapters_of_experts_are_refused_by_name(targets: tuple[str, ...], said: str, followers: Followers, tmp_path: Path) -> None:
    adapted = replace(write_model(tmp_path, mixture_config()), lora=Lora(targets=targets))
    engine = Mirrored(FsdpTrain, adapted, EngineSettings(options={"pp": 2}), followers)
    with pytest.warns(RuntimeWarning) if not targets else contextlib.nullcontext(), pytest.raises(ModelError, match=said):
        engine.start()
    engine.stop()  # Its ranks have met.
