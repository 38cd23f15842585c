"""Adapters of a policy whose trainer has several ranks: FSDP2 and DeepSpeed train, send and save what the embedded trainer does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_train_engines import CONFIGS, VOCABULARY, write_model

from m2flow import Lora
from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.engines.fsdp import FsdpTrain
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import LINEAR, PPO, copied, distance, samples, started

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
needs_deepspeed = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return replace(write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]()), lora=Lora(rank=4, alpha=8))


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    found = Followers(1)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FsdpTrain, {}),
        *(pytest.param(DeepSpeedTrain, {"zero": zero}, marks=needs_deepspeed) for zero in (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(
    kind: type[TrainEngine], options: dict[str, object], model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch = samples(VOCABULARY)

    def made(name: str) -> TrainEngine:
        if name == "alone":
            return EmbeddedTrain(model, EngineSettings())
        return Mirrored(kind, model, EngineSettings(options=options), followers)

    found = []
    for name in ("alone", "spread"):
        with started(made(name)) as engine:
            first = copied(engine)
            step(engine, batch)
            step(engine, batch)
            engine.save(str(tmp_path / name))
            step(engine, batch)
            found.append((first, copied(engine)))
    assert distance(found[1][0], found[0][0]) == 0
    assert distance(found[1][1], found[0][1]) < 1e-5
    assert distance(found[0][1], found[0][0]) > 1e-3
    # Each goes on from the other's checkpoint.
    for name, other in (("alone", "spread"), ("spread", "alone")):
        with started(made(name)) as engine:
            engine.load(str(tmp_path / other))
            step(engine, batch)
            assert distance(copied(engine), found[0][1]) < 1e-5


def test_deepspeed_refuses_to_round_the_weights_beside_adapters(model: Model) -> None:
    with pytest.raises(EngineError, match="round the weights beside the adapters") as raised:
        DeepSpeedTrain(model, EngineSettings(options={"compute_dtype": "bfloat16"}))
    assert "dtype='bfloat16'" in str(raised.value)


def step(engine: TrainEngine, batch) -> None:  # type: ignore[no-untyped-def]
    engine.accumulate(batch, PPO)
    engine.apply(LINEAR, 3.0)
