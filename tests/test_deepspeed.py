"""DeepSpeed as a trainer: the conformance suites, and the embedded trainer's numbers in every stage, on one rank and on two."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from test_train_engines import CONFIGS, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded_train import EmbeddedTrain
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
    settings = EngineSettings(options={"zero": zero})
    spread = DeepSpeedTrain(model, settings) if num_ranks == 1 else Mirrored(DeepSpeedTrain, model, settings, followers)
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread):
        with started(engine):
            before = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
            found = [{"logprobs": before}]
            for sizes in (5, 4):
                sums = [engine.accumulate(batch.take(np.arange(i, min(20, i + sizes))), PPO) for i in range(0, 20, sizes)]
                metrics = dict(engine.apply(LINEAR, 7.0))
                found.append({f"{i}/{key}": value for i, one in enumerate(sums) for key, value in metric_weights(one).items()})
                found.append({key: np.array([value]) for key, value in metrics.items()})
                found.append(copied(engine))
            results.append(found)
    for found, expected in zip(results[1], results[0], strict=True):
        assert distance(found, expected) < 1e-5
