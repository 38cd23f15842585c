"""Trainers whose model two GPUs share, over NCCL, against the embedded one on the first of them: the siblings of what runs on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from followed import followed
from tiny_models import CONFIGS, VOCABULARY, mixture_config, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.megatron.trainer import MegatronTrain
from m2flow.recipe import AdamW, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, copied, distance, samples, started

KIND = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="of two GPUs")]
STEP = AdamW(lr=1e-3, eps=1e-3)


class FsdpOnOwnGpu(FsdpTrain):
    """Each rank has the GPU of its number."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, replace(settings, device=f"{KIND}:{settings.rank}"))


class MegatronOnOwnGpu(MegatronTrain):
    """Each rank has the GPU of its number."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, replace(settings, device=f"{KIND}:{settings.rank}"))


LAYOUTS: list[tuple[Any, str, dict[str, Any]]] = [
    (FsdpOnOwnGpu, "qwen2", {}),
    (FsdpOnOwnGpu, "qwen2", {"tp": 2}),
    (FsdpOnOwnGpu, "qwen2", {"pp": 2}),
    (FsdpOnOwnGpu, "qwen2", {"pp": 2, "schedule": "zero-bubble"}),
    (FsdpOnOwnGpu, "qwen2", {"cp": 2}),
    (FsdpOnOwnGpu, "qwen3_moe", {"ep": 2}),
    (MegatronOnOwnGpu, "qwen2", {"tp": 2}),
    (MegatronOnOwnGpu, "qwen2", {"pp": 2}),
    (MegatronOnOwnGpu, "qwen2", {"cp": 2}),
    (MegatronOnOwnGpu, "qwen3_moe", {"ep": 2}),
]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with followed(1) as found:
        yield found


def numbers_of(engine: TrainEngine) -> tuple[Any, float, dict[str, Any]]:
    """Log-probabilities, the norm of a gradient and the weights after a step."""
    batch = samples(VOCABULARY)
    with started(engine):
        logprobs = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
        engine.accumulate(batch, PPO)
        return logprobs, engine.apply(STEP, 3.0)["grad_norm"], copied(engine)


@pytest.mark.parametrize(("kind", "name", "layout"), LAYOUTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_two_gpus_give_the_numbers_of_one(kind: Any, name: str, layout: dict[str, Any], followers: Followers, tmp_path: Path) -> None:
    if kind is MegatronOnOwnGpu and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron: needs pip install 'm2flow[megatron]'")
    model = write_model(tmp_path, CONFIGS[name]() if name in CONFIGS else mixture_config(name))
    logprobs, norm, weights = numbers_of(EmbeddedTrain(model, EngineSettings(device=f"{KIND}:0")))
    spread: Any = Mirrored(kind, model, EngineSettings(options=layout), followers)
    theirs, their_norm, their_weights = numbers_of(spread)
    np.testing.assert_allclose(theirs, logprobs, atol=1e-4)
    assert their_norm == pytest.approx(norm, rel=1e-4)
    assert distance(their_weights, weights) < 1e-4
