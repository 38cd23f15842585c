"""On a GPU the embedded engines and sharded trainers keep their contracts, give a CPU's numbers, and leave the device when told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_rollouts import KINDS, embedded, generated
from tiny_models import CONFIGS, VOCABULARY, save_config, write_model
from torch.utils._python_dispatch import TorchDispatchMode

from m2flow.engines.contract import EngineSettings, RolloutEngine, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import ReplicatedTrain
from m2flow.engines.embedded.decoding import SamplingColumns, draw, uniforms
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.slot_model import DevicePass, SlotCache, SlotModel
from m2flow.engines.embedded.trainer import EmbeddedTrain, token_logprobs
from m2flow.recipe import Model
from m2flow.testing.rollout_suite import ROLLOUT_CHECKS, Factory
from m2flow.testing.train_suite import PPO, RECIPE, TrainEngineSuite, copied, distance, samples, started

pytestmark = pytest.mark.gpu
GPU = EngineSettings(device="cuda:0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]())


@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_rollout_engine_keeps_the_contract(check: Callable[[Factory], None]) -> None:
    def factory(settings: EngineSettings) -> RolloutEngine:
        return embedded(replace(settings, device="cuda:0"))

    check(factory)


class TestEmbeddedOnGpu(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take_model(self, model: Model) -> None:
        self.model = model

    def make(self) -> TrainEngine:
        return EmbeddedTrain(self.model, GPU)


class TestEmbeddedDeterministicOnGpu(TestEmbeddedOnGpu):
    def make(self) -> TrainEngine:
        return EmbeddedTrain(self.model, replace(GPU, deterministic=True))

    def test_the_same_twice_gives_the_same_bits(self) -> None:
        batch, results = samples(VOCABULARY), []
        for _ in range(2):
            with started(self.make()) as engine:
                engine.accumulate(batch, PPO)
                engine.apply(RECIPE, 1.0)
                results.append(copied(engine))
        assert distance(*results) == 0


class TestFsdpOnGpu(TestEmbeddedOnGpu):
    """One rank, over NCCL."""

    def make(self) -> TrainEngine:
        return FsdpTrain(self.model, GPU)


@pytest.mark.parametrize("of", [EmbeddedTrain, FsdpTrain, ReplicatedTrain])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_gives_the_cpus_numbers(name: str, of: Any, tmp_path: Path) -> None:
    source, batch, found = write_model(tmp_path, CONFIGS[name]()), samples(VOCABULARY), []
    for settings in (EngineSettings(), GPU):
        with started(of(source, settings) if settings is GPU else EmbeddedTrain(source, settings)) as engine:
            logprobs = engine.logprobs(batch).ragged("reference_logprobs").values
            engine.accumulate(batch, PPO)
            norm = engine.apply(RECIPE, 3.0)["grad_norm"]
            found.append((logprobs, norm, copied(engine)))
    (logprobs, norm, weights), (theirs, their_norm, their_weights) = found
    np.testing.assert_allclose(theirs, logprobs, atol=1e-4)
    assert their_norm == pytest.approx(norm, rel=1e-4)
    assert distance(their_weights, weights) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_passes_give_the_models_own_numbers_with_a_graph_and_without(kind: str, dtype: Any, tmp_path: Path) -> None:
    source = Model(save_config(kind, tmp_path, **KINDS[kind]), init="random", dtype=dtype)
    model = SlotModel.load(source, "cuda:0", 64, graphs=True)  # The probe has compared prefill and first decode passes.
    rng, caches = np.random.default_rng(0), [SlotCache(), SlotCache()]
    prompts = [rng.integers(2, 14, length).astype(np.int32) for length in (3, 11, 7, 20, 2)]
    for cache in caches:
        cache.reserve(8, 40)
        model.prefill(cache, prompts, 0, range(5))
    positions = np.array([len(prompt) for prompt in prompts])
    for _ in range(12):
        tokens = rng.integers(2, 14, 5)
        found = model.decode(caches[0], tokens, positions.copy()).clone()
        into = DevicePass(caches[1], torch.from_numpy(positions).cuda(), int(positions.max()) + 1)
        expected = model._run_on_device(torch.from_numpy(tokens).cuda(), into)
        gap = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert gap < (1e-5 if dtype == "float32" else 3e-2)
        positions += 1
    assert model.has_graphs is not model.is_mixture
    assert model._graphs is None or model._graphs.sizes == [8]


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral", "Gemma2"])
def test_samples_are_the_cpus_whether_by_graphs_or_not(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path, **KINDS[kind])
    on_cpu = EngineSettings(max_running=9)
    found = []
    for settings in (on_cpu, replace(on_cpu, device="cuda:0"), replace(on_cpu, device="cuda:0", options={"cuda_graphs": False})):
        engine = EmbeddedRollout(Model(path, init="random"), settings)
        engine.start()
        found.append(generated(engine))
        engine.stop()
    for other in found[1:]:
        for i, sample in found[0].items():
            np.testing.assert_array_equal(sample.tokens, other[i].tokens)
            np.testing.assert_allclose(sample.logprobs, other[i].logprobs, atol=1e-4)


def test_tokens_are_drawn_as_on_a_cpu() -> None:
    num_rows, vocabulary = 500, 3000
    logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    uniform = uniforms(np.arange(num_rows).astype(np.uint64), np.zeros(num_rows, np.int64))
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05)):
        columns = SamplingColumns(
            np.full(num_rows, 0.8, np.float32), np.full(num_rows, top_k), np.full(num_rows, top_p), np.full(num_rows, min_p)
        )
        tokens, logprobs = draw(logits, columns, uniform, None)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                on_gpu, logprobs_there = draw(logits.cuda(), columns, uniform, None)
            finally:
                torch.use_deterministic_algorithms(False)
            assert (on_gpu.cpu() == tokens).float().mean() > 0.99  # A number may fall on the edge between two tokens.
            same = on_gpu.cpu() == tokens
            torch.testing.assert_close(logprobs_there.cpu()[same], logprobs[same], atol=1e-5, rtol=1e-5)


def test_log_probabilities_take_few_kernels() -> None:
    """Chunks that fit a CPU's cache made 24,000 kernels of a pass over 6,144 tokens: 0.4 s, nearly all of it."""

    class Count(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num += 1
            return function(*args, **(kwargs or {}))

    logits = torch.randn(2048, 151_936, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 151_936, (2048,), device="cuda")
    with Count() as count:
        logprobs, entropy = token_logprobs(logits, targets)
        (logprobs.sum() + entropy.sum()).backward()
    assert count.num < 1000
    expected = logits[:64].float().log_softmax(-1).gather(1, targets[:64, None]).squeeze(1)
    torch.testing.assert_close(logprobs[:64], expected, atol=1e-4, rtol=1e-4)


def test_engines_leave_the_device_and_go_on_where_they_were(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, hidden_size=512, intermediate_size=4096, num_hidden_layers=6)
    generated(warm := _started(path))  # Workspaces of libraries stay.
    warm.stop()
    del warm
    gc.collect()
    there = torch.cuda.memory_allocated()
    trainer = EmbeddedTrain(Model(path, init="random"), GPU)
    trainer.start()
    trainer.accumulate(samples(14), PPO)
    trainer.apply(RECIPE, 1.0)
    before, held = copied(trainer), torch.cuda.memory_allocated() - there
    trainer.offload()
    assert torch.cuda.memory_allocated() - there < 0.05 * held
    trainer.onload()
    assert distance(copied(trainer), before) == 0
    trainer.accumulate(samples(14), PPO)
    trainer.apply(RECIPE, 1.0)
    trainer.stop()
    del trainer
    engine = _started(path)
    model = engine._model
    assert model is not None
    assert model._graphs is not None
    results = []
    for _ in range(3):
        results.append(generated(engine))
        assert model._graphs is not None, "graphs are captured anew after they were forgotten"
        assert model._graphs.sizes
        engine.offload()
        assert torch.cuda.memory_allocated() - there < 0.05 * held
        engine.onload()
    for other in results[1:]:
        for i, sample in results[0].items():
            np.testing.assert_array_equal(sample.tokens, other[i].tokens)
    engine.stop()


def _started(path: str) -> EmbeddedRollout:
    engine = EmbeddedRollout(Model(path, init="random"), replace(GPU, max_running=9))
    engine.start()
    return engine
