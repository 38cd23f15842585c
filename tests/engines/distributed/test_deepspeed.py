"""DeepSpeed as a trainer: the conformance suite over two ranks, and the embedded trainer's numbers in every stage."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from adapted_trainers import (
    adapted_model,
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer,
    check_references_compute_from_the_policys_weights,
    check_what_was_copied_of_a_policy_is_in_a_checkpoint,
)
from tiny_models import CONFIGS, SMALL, VOCABULARY, random_model, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_heads, model_parallel
from m2flow.engines.distributed.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models import packing
from m2flow.engines.models.hf_model import load_model
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import (
    LINEAR,
    NEXT,
    PPO,
    RECIPE,
    ScalarHeadSuite,
    TrainEngineSuite,
    copied,
    distance,
    metric_weights,
    samples,
    started,
)

ABOVE_ROUNDING = replace(RECIPE, eps=1e-6)
"""The gradient of a key's bias is nearly 0, and with a smaller `eps` Adam divides what rounding leaves of it by itself."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]


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
        options = {"sp": 2} if head == "score" else {}
        return deepspeed(random_model(self.path, head), 2, self.followers, zero=2, **options)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
@pytest.mark.parametrize("options", [{"zero": 1, "sp": 2}, {"zero": 3}], ids=str)
def test_adapters_are_those_of_the_embedded_trainer(options: dict[str, int], followers: Followers, tmp_path: Path) -> None:
    model = adapted_model(tmp_path / "model")
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(model, lambda: deepspeed(model, 2, followers, **options), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
@pytest.mark.parametrize(
    ("num_ranks", "options"), [(1, {"zero": 0}), (1, {"zero": 2}), (2, {"zero": 3}), (2, {"zero": 1, "sp": 2})], ids=str
)
def test_references_compute_from_an_adapted_policys_weights(
    num_ranks: int, options: dict[str, int], followers: Followers, tmp_path: Path
) -> None:
    model = adapted_model(tmp_path / "model")
    check_references_compute_from_the_policys_weights(model, deepspeed(model, num_ranks, followers, **options), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_a_reference_that_has_weights_of_its_own_saves_what_it_took_of_an_adapted_policy(followers: Followers, tmp_path: Path) -> None:
    model = adapted_model(tmp_path / "model")
    check_what_was_copied_of_a_policy_is_in_a_checkpoint(model, lambda: deepspeed(model, 1, followers, zero=2), tmp_path)


def test_the_weights_beside_adapters_are_not_rounded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="round the weights beside the adapters") as raised:
        DeepSpeedTrain(adapted_model(tmp_path), EngineSettings(options={"compute_dtype": "bfloat16"}))
    assert "dtype='bfloat16'" in str(raised.value)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {"zero": 0}), (2, {"zero": 1}), (2, {"zero": 2}), (2, {"zero": 3}), (2, {"zero": 0, "tp": 2}), (2, {"zero": 1, "tp": 2})],
    ids=str,
)
def test_a_checkpoint_goes_on_with_any_trainer_any_stage_and_any_number_of_ranks(
    num_ranks: int, options: dict[str, int], model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch = samples(VOCABULARY)
    with started(deepspeed(model, num_ranks, followers, **options)) as engine:
        for recipe in (RECIPE, NEXT):
            step(engine, batch, recipe)
        engine.save(str(tmp_path / "there"))
        for recipe in (NEXT, RECIPE):
            step(engine, batch, recipe)
        whole = copied(engine)
    others = [EmbeddedTrain(model, EngineSettings()), deepspeed(model, 2, followers, zero=3)]
    others += [deepspeed(model, 2, followers, **options)] if "tp" in options else [deepspeed(model, 1, followers, zero=2)]
    for other in others:
        with started(other):
            other.load(str(tmp_path / "there"))
            for recipe in (NEXT, RECIPE):
                step(other, batch, recipe)
            assert distance(copied(other), whole) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "offload_optimizer": True},
        {"zero": 3, "offload_parameters": True},
        {"zero": 3, "offload_optimizer": True, "tp": 2},
        {"zero": 3, "activation_checkpointing": True},
        {"zero": 2, "activation_checkpointing": True, "sp": 2},
    ],
    ids=str,
)
def test_what_saves_memory_changes_no_number(options: dict[str, int | bool], model: Model, followers: Followers) -> None:
    batch = samples(VOCABULARY)
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), deepspeed(model, 2, followers, **options)):
        with started(engine):
            for recipe in (LINEAR, ABOVE_ROUNDING):
                for rows in (np.arange(7), np.arange(7, 12)):
                    engine.accumulate(batch.take(rows), PPO)
                engine.apply(recipe, 3.0)
            results.append(copied(engine))
    assert distance(results[1], results[0]) < 1e-4


def numbers_of(engine: TrainEngine) -> list[dict[str, npt.NDArray[Any]]]:
    """Of a trainer: log-probabilities; then sums, metrics and weights of three steps, each cut otherwise."""
    batch = samples(VOCABULARY, num_prompts=5)
    with started(engine):
        found = [{"logprobs": np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)}]
        for size, recipe in ((5, LINEAR), (4, replace(LINEAR, max_grad_norm=2.0, log_layers=True)), (20, LINEAR)):
            sums = [engine.accumulate(batch.take(np.arange(i, min(20, i + size))), PPO) for i in range(0, 20, size)]
            metrics = dict(engine.apply(recipe, 7.0))
            found.append({f"{i}/{key}": np.asarray(value) for i, one in enumerate(sums) for key, value in metric_weights(one).items()})
            found.append({key: np.array([value]) for key, value in metrics.items()})
            found.append(copied(engine))
    return found


@pytest.fixture(scope="module")
def numbers(model: Model) -> list[dict[str, npt.NDArray[Any]]]:
    return numbers_of(EmbeddedTrain(model, EngineSettings()))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"head_logits": 96}),
        (2, {"tp": 2}),
        (2, {"sp": 2, "head_logits": 96}),
        (1, {}),
    ],  # A process that was one of one does not become one of two in stage 3: it waits.
    ids=str,
)
def test_losses_gradients_and_logprobs_are_those_of_the_embedded_trainer(
    zero: int, num_ranks: int, options: dict[str, int], model: Model, followers: Followers, numbers: list[dict[str, npt.NDArray[Any]]]
) -> None:
    for found, expected in zip(numbers_of(deepspeed(model, num_ranks, followers, zero=zero, **options)), numbers, strict=True):
        assert distance(found, expected) < 1e-5


def test_norms_of_a_ranks_own_heads_have_the_gradient_of_all(followers: Followers, tmp_path: Path) -> None:
    model = write_model(tmp_path, transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16))
    expected = numbers_of(EmbeddedTrain(model, EngineSettings()))
    for one, other in zip(numbers_of(deepspeed(model, 2, followers, zero=2, tp=2)), expected, strict=True):
        assert distance(one, other) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("options", [{"zero": 3, "tp": 2}, {"zero": 1, "sp": 2}], ids=str)
def test_two_groups_of_two_ranks_compute_what_one_rank_does(
    options: dict[str, int], model: Model, numbers: list[dict[str, npt.NDArray[Any]]]
) -> None:
    followers = Followers(3)
    try:
        for found, expected in zip(numbers_of(deepspeed(model, 4, followers, **options)), numbers, strict=True):
            assert distance(found, expected) < 1e-5
    finally:
        followers.close()


@pytest.mark.parametrize("zero", [1, 3])
def test_an_optimiser_on_a_drive_computes_the_same_and_leaves_nothing_there(zero: int, model: Model, tmp_path: Path) -> None:
    batch, results = samples(VOCABULARY), []
    options = {"zero": zero, "offload_optimizer": "nvme", "nvme_path": str(tmp_path / "drive")}
    for engine in (EmbeddedTrain(model, EngineSettings()), DeepSpeedTrain(model, EngineSettings(options=options))):
        with started(engine):
            step(engine, batch)
            engine.save(str(tmp_path / engine.name))
            step(engine, batch)
            results.append(copied(engine))
            engine.load(str(tmp_path / "embedded"))
            step(engine, batch)
            results.append(copied(engine))
            if engine.name == "deepspeed":
                mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_path}/drive" in line]
                # Two moments, and in stage 3 the weights that they belong to; of the recipe before loading nothing is left.
                assert len(mapped) == (2 if zero == 1 else 3)
                assert engine.memory().optimizer == 0
    for other in results[1:]:
        assert distance(other, results[0]) < 1e-4
    assert not list((tmp_path / "drive").iterdir())


def test_a_drive_that_can_t_be_written_is_an_error_that_names_it(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = {"zero": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path / "file")}
    engine = DeepSpeedTrain(model, EngineSettings(options=options))
    with pytest.raises(EngineError, match=r"can't be put on the drive .*file"):
        engine.start()
    engine.stop()


def test_weights_on_a_drive_need_what_the_library_reads_it_with(model: Model, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    options = {"zero": 3, "offload_parameters": "nvme", "nvme_path": str(tmp_path)}
    engine = DeepSpeedTrain(model, EngineSettings(options=options))
    if not AsyncIOBuilder().is_compatible():
        with pytest.raises(EngineError, match=r"async_io(.|\n)*libaio-dev"):
            engine.start()
        return
    batch, results = samples(VOCABULARY), []
    for one in (EmbeddedTrain(model, EngineSettings()), engine):
        with started(one):
            step(one, batch, LINEAR)
            step(one, batch, LINEAR)
            results.append(copied(one))
    assert distance(results[1], results[0]) < 1e-5


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
                engine.offload_states()
                engine.onload_states()
            engine.save(str(tmp_path / str(leaves)))
            step(engine, batch)
            results.append(copied(engine))
    assert distance(results[1], results[0]) == 0
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.load(str(tmp_path / "True"))
        step(engine, batch)
        assert distance(copied(engine), results[0]) < 1e-4


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(2, {"zero": 2, "tp": 2}), (1, {"zero": 1}), (1, {"zero": 2}), (1, {"zero": 3})], ids=str
)
def test_passes_in_bfloat16_keep_weights_in_float32(num_ranks: int, options: dict[str, int], model: Model, followers: Followers) -> None:
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        first = copied(engine)
        step(engine, batch, LINEAR)
        exact = copied(engine)
    with started(deepspeed(model, num_ranks, followers, compute_dtype="bfloat16", **options)) as engine:
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
        ({"tp": 2}, r"tp is 2, which does not divide 1 ranks(.|\n)*multiple of train.options.tp"),
        ({"sp": 2}, "sp is 2, which does not divide 1 ranks"),
        ({"autotp_size": 2}, r"no option of that name(.|\n)*tp: 2"),
        ({"sequence_parallel_size": 2}, r"no option of that name(.|\n)*sp: 2"),
        ({"offload_optimizer": "nvme"}, r"no drive is named(.|\n)*nvme_path"),
        ({"nvme_path": "/mnt/nvme", "offload_optimizer": True}, r"nothing is kept there(.|\n)*offload_optimizer: nvme"),
        ({"offload_optimizer": "disk"}, "offload_optimizer of the train engine 'deepspeed' is 'disk', not a bool"),
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


def test_a_stage_3_before_it_in_one_of_the_processes_does_not_stop_stage_3_on_all(model: Model, followers: Followers) -> None:
    # The library compares numbers that modules and parameters get from counters of each process.
    batch = samples(VOCABULARY)
    for num_ranks in (1, 2):
        with started(deepspeed(model, num_ranks, followers, zero=3)) as engine:
            step(engine, batch)


@pytest.mark.parametrize("options", [{"zero": 2}, {"zero": 1, "sp": 2}, {"zero": 3, "activation_checkpointing": True}], ids=str)
def test_windows_are_those_of_the_embedded_trainer(options: dict[str, int], followers: Followers, tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, CONFIGS["window"]()), samples(VOCABULARY)
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), deepspeed(model, 2, followers, **options)):
        with started(engine):
            before, first = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values), copied(engine)
            step(engine, batch, LINEAR)
            results.append((before, {name: array - first[name] for name, array in copied(engine).items()}))
    np.testing.assert_allclose(results[1][0], results[0][0], atol=1e-5)
    assert distance(results[1][1], results[0][1]) < 1e-4


def test_a_model_that_would_be_computed_wrongly_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, transformers.RobertaConfig(**SMALL, is_decoder=True))
    engine = DeepSpeedTrain(model, EngineSettings())
    try:
        with pytest.raises(EngineError, match="the embedded trainer can't run RobertaForCausalLM"):
            engine.start()
    finally:
        engine.stop()


def test_layers_and_sequences_are_not_split_at_once_and_heads_must_divide(model: Model, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="sequences over others at once"):
        DeepSpeedTrain(model, EngineSettings(num_ranks=4, options={"tp": 2, "sp": 2}))
    with pytest.raises(EngineError, match="adapters are not split"):
        DeepSpeedTrain(adapted_model(tmp_path), EngineSettings(num_ranks=2, options={"tp": 2}))
    loaded = load_model(model, device="cpu", attention=packing.ATTENTION)
    with pytest.raises(EngineError, match=r"tp is 3.* num_attention_heads"):
        model_parallel.AutoTP(loaded, 3)
    with pytest.raises(EngineError, match=r"sp is 3.* num_attention_heads"):
        check_heads(loaded.config, 3)


def deepspeed(model: Model, num_ranks: int, followers: Followers, **options: int | bool | str) -> TrainEngine:
    settings = EngineSettings(options=options)
    return DeepSpeedTrain(model, settings) if num_ranks == 1 else Mirrored(DeepSpeedTrain, model, settings, followers)


def step(engine: TrainEngine, batch, recipe: AdamW = RECIPE) -> None:  # type: ignore[no-untyped-def]
    engine.accumulate(batch, PPO)
    engine.apply(recipe, 3.0)
