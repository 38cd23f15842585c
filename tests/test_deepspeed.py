"""DeepSpeed as a trainer: the embedded trainer's numbers in every stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from test_train_engines import CONFIGS, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import LINEAR, PPO, copied, distance, metric_weights, samples, started

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


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "no ZeRO stage 4"),
        ({"zerro": 1}, "no option 'zerro'"),
        ({"zero": 0, "compute_dtype": "bfloat16"}, "out of reach in bfloat16"),
        ({"zero": 2, "offload_parameters": True}, "can't keep its weights in the host's memory"),
        ({"compute_dtype": "fp8"}, "no passes in 'fp8'"),
    ],
    ids=str,
)
def test_what_can_t_be_is_refused_when_the_engine_is_made(options: dict[str, int | str | bool], words: str, model: Model) -> None:
    with pytest.raises(EngineError, match=words):
        DeepSpeedTrain(model, EngineSettings(options=options))


def deepspeed(model: Model, num_ranks: int, followers: Followers, **options: int | bool) -> TrainEngine:
    settings = EngineSettings(options=options)
    return DeepSpeedTrain(model, settings) if num_ranks == 1 else Mirrored(DeepSpeedTrain, model, settings, followers)
