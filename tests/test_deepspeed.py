"""DeepSpeed as a trainer: the conformance suite over two ranks, and the embedded trainer's numbers in every stage."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted_trainers import adapted_model, check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer
from test_scalar_heads import random_model
from test_train_engines import CONFIGS, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.scalar_suite import ScalarHeadSuite
from m2flow.testing.train_suite import LINEAR, NEXT, PPO, RECIPE, TrainEngineSuite, copied, distance, metric_weights, samples, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]())


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    found = Followers(1)
    yield found
    found.close()


class TestDeepSpeed(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.model, self.followers = model, followers

    def make(self) -> TrainEngine:
        return deepspeed(self.model, 2, self.followers, zero=3)


class TestDeepSpeedHeads(ScalarHeadSuite):
    """Critics and reward models."""

    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.path, self.followers = Path(model.path), followers

    def make(self, head: str) -> TrainEngine:
        return deepspeed(random_model(self.path, head), 2, self.followers, zero=2)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
@pytest.mark.parametrize("zero", [1, 3])
def test_adapters_are_those_of_the_embedded_trainer(zero: int, followers: Followers, tmp_path: Path) -> None:
    model = adapted_model(tmp_path / "model")
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(model, lambda: deepspeed(model, 2, followers, zero=zero), tmp_path)


def test_the_weights_beside_adapters_are_not_rounded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="round the weights beside the adapters") as raised:
        DeepSpeedTrain(adapted_model(tmp_path), EngineSettings(options={"compute_dtype": "bfloat16"}))
    assert "dtype='bfloat16'" in str(raised.value)


@pytest.mark.parametrize(("zero", "num_ranks"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_a_checkpoint_goes_on_with_any_trainer_any_stage_and_any_number_of_ranks(
    zero: int, num_ranks: int, model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch = samples(VOCABULARY)
    with started(deepspeed(model, num_ranks, followers, zero=zero)) as engine:
        for recipe in (RECIPE, NEXT):
            step(engine, batch, recipe)
        engine.save(str(tmp_path / "there"))
        for recipe in (NEXT, RECIPE):
            step(engine, batch, recipe)
        whole = copied(engine)
    others = (EmbeddedTrain(model, EngineSettings()), deepspeed(model, 1, followers, zero=2), deepspeed(model, 2, followers, zero=3))
    for other in others:
        with started(other):
            other.load(str(tmp_path / "there"))
            for recipe in (NEXT, RECIPE):
                step(other, batch, recipe)
            assert distance(copied(other), whole) < 1e-4


@pytest.mark.parametrize(
    "options",
    [{"zero": 2, "offload_optimizer": True}, {"zero": 3, "offload_parameters": True}, {"zero": 3, "activation_checkpointing": True}],
    ids=str,
)
def test_what_saves_memory_changes_no_number(options: dict[str, int | bool], model: Model, followers: Followers) -> None:
    batch = samples(VOCABULARY)
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), deepspeed(model, 2, followers, **options)):
        with started(engine):
            for recipe in (LINEAR, RECIPE):
                for rows in (np.arange(7), np.arange(7, 12)):
                    engine.accumulate(batch.take(rows), PPO)
                engine.apply(recipe, 3.0)
            results.append(copied(engine))
    assert distance(results[1], results[0]) < 1e-4


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 1])  # A process that was one of one does not become one of two in stage 3: the library waits.
def test_losses_gradients_and_logprobs_are_those_of_the_embedded_trainer(
    zero: int, num_ranks: int, model: Model, followers: Followers
) -> None:
    batch = samples(VOCABULARY, num_prompts=5)
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), deepspeed(model, num_ranks, followers, zero=zero)):
        with started(engine):
            found = [{"logprobs": np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)}]
            for size, recipe in ((5, LINEAR), (4, replace(LINEAR, max_grad_norm=2.0)), (20, LINEAR)):
                sums = [engine.accumulate(batch.take(np.arange(i, min(20, i + size))), PPO) for i in range(0, 20, size)]
                metrics = dict(engine.apply(recipe, 7.0))
                found.append({f"{i}/{key}": value for i, one in enumerate(sums) for key, value in metric_weights(one).items()})
                found.append({key: np.array([value]) for key, value in metrics.items()})
                found.append(copied(engine))
            results.append(found)
    for found, expected in zip(results[1], results[0], strict=True):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("zero", [2, 3])
def test_layers_that_are_computed_again_change_no_number(zero: int, model: Model) -> None:
    batch = samples(VOCABULARY)
    results = []
    options = {"zero": zero, "activation_checkpointing": True}
    for engine in (EmbeddedTrain(model, EngineSettings()), DeepSpeedTrain(model, EngineSettings(options=options))):
        with started(engine):
            step(engine, batch, LINEAR)
            results.append(copied(engine))
    assert distance(results[1], results[0]) < 1e-5


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_leave_the_device_and_come_back_and_can_still_be_saved(zero: int, model: Model, tmp_path: Path) -> None:
    batch = samples(VOCABULARY)
    results = []
    for leaves in (False, True):
        with started(DeepSpeedTrain(model, EngineSettings(options={"zero": zero}))) as engine:
            step(engine, batch)
            if leaves:
                engine.put_away()
                engine.bring_back()
            engine.save(str(tmp_path / str(leaves)))
            step(engine, batch)
            results.append(copied(engine))
    assert distance(results[1], results[0]) == 0
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.load(str(tmp_path / "True"))
        step(engine, batch)
        assert distance(copied(engine), results[0]) < 1e-4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_passes_in_bfloat16_keep_weights_in_float32(zero: int, model: Model) -> None:
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        first = copied(engine)
        step(engine, batch, LINEAR)
        exact = copied(engine)
    with started(DeepSpeedTrain(model, EngineSettings(options={"zero": zero, "compute_dtype": "bfloat16"}))) as engine:
        assert distance(copied(engine), first) == 0
        step(engine, batch, LINEAR)
        found = copied(engine)
    moved = {name: array - first[name] for name, array in exact.items()}
    assert 0 < distance({name: array - first[name] for name, array in found.items()}, moved) < 0.3


def test_a_first_step_is_as_long_in_bfloat16_as_it_should_be(model: Model) -> None:
    # The library's wrapper makes a step with zeros when it starts; counted, it would shrink this one to three quarters.
    batch = samples(VOCABULARY)
    with started(DeepSpeedTrain(model, EngineSettings(options={"zero": 1, "compute_dtype": "bfloat16"}))) as engine:
        first = copied(engine)
        step(engine, batch, AdamW(lr=1e-2, weight_decay=0.0))
        moved = {name: np.abs(array - first[name]).max() for name, array in copied(engine).items()}
    assert max(moved.values()) == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "no ZeRO stage 4"),
        ({"zerro": 1}, "no option 'zerro'"),
        ({"zero": 0, "compute_dtype": "bfloat16"}, "out of reach in bfloat16"),
        ({"zero": 2, "offload_parameters": True}, "can't keep its weights in the host's memory"),
        ({"compute_dtype": "fp8"}, "no passes in 'fp8'"),
        ({"tp": 2}, r"AutoTP(.|\n)*engine: fsdp, ranks: 2, options: {tp: 2}"),
        ({"sp": 2}, r"Ulysses(.|\n)*activation_checkpointing: true"),
        ({"offload_optimizer": "nvme"}, r"NVMe(.|\n)*offload_optimizer: true"),
        ({"nvme_path": "/mnt/nvme"}, r"NVMe(.|\n)*offload_parameters: true"),
    ],
    ids=str,
)
def test_what_can_t_be_is_refused_when_the_engine_is_made(options: dict[str, int | str | bool], words: str, model: Model) -> None:
    with pytest.raises(EngineError, match=words):
        DeepSpeedTrain(model, EngineSettings(options=options))


@pytest.mark.parametrize("zero", [2, 3])
def test_losses_in_float16_are_scaled_and_a_gradient_beyond_it_lowers_the_scale(zero: int, model: Model, float16: None) -> None:
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        first = copied(engine)
        step(engine, batch, LINEAR)
        exact = copied(engine)
    # 2^30 times any gradient is beyond float16, whose largest number is 65504.
    options = {"zero": zero, "compute_dtype": "float16", "initial_loss_scale": 2.0**30}
    with started(DeepSpeedTrain(model, EngineSettings(options=options))) as engine:
        said, scales = {"skipped": 1.0}, [2.0**30]
        while said["skipped"]:
            before = copied(engine)
            engine.accumulate(batch, PPO)
            said = dict(engine.apply(LINEAR, 3.0))
            scales.append(said["loss_scale"])
            if said["skipped"]:
                assert distance(copied(engine), before) == 0
                assert said["lr"] == 0
        found = copied(engine)
    assert len(scales) > 5
    assert scales[-1] < 2.0**28
    assert all(later <= earlier for earlier, later in itertools.pairwise(scales))
    moved = {name: array - first[name] for name, array in exact.items()}
    assert 0 < distance({name: array - first[name] for name, array in found.items()}, moved) < 0.05


@pytest.fixture
def float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a CPU for one that has float16: torch computes it there, slowly."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)


def test_a_stage_3_before_it_in_one_of_the_processes_changes_no_gradient_of_stage_2(model: Model, followers: Followers) -> None:
    # Where the library replaces torch's linear in one process, its gradients come in another order than on the other ranks.
    linear, batch = torch.nn.functional.linear, samples(VOCABULARY, num_prompts=5)
    with started(deepspeed(model, 1, followers, zero=3)) as engine:
        step(engine, batch)
    assert torch.nn.functional.linear is linear
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), deepspeed(model, 2, followers, zero=2)):
        with started(engine):
            first = copied(engine)
            step(engine, batch, LINEAR)
            results.append({name: array - first[name] for name, array in copied(engine).items()})
    assert distance(results[1], results[0]) < 1e-4  # Of differences of weights, which are themselves rounded.


def deepspeed(model: Model, num_ranks: int, followers: Followers, **options: int | bool) -> TrainEngine:
    settings = EngineSettings(options=options)
    return DeepSpeedTrain(model, settings) if num_ranks == 1 else Mirrored(DeepSpeedTrain, model, settings, followers)


def step(engine: TrainEngine, batch, recipe: AdamW = RECIPE) -> None:  # type: ignore[no-untyped-def]
    engine.accumulate(batch, PPO)
    engine.apply(recipe, 3.0)
