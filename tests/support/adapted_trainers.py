"""Adapters of a policy whose trainer has several ranks: it trains, sends and saves what the embedded trainer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tiny_models import CONFIGS, VOCABULARY, write_model

from m2flow import Lora
from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.recipe import Model
from m2flow.samples import Batch
from m2flow.testing.train_suite import LINEAR, PPO, copied, distance, samples, started


def adapted_model(path: Path) -> Model:
    return replace(write_model(path, CONFIGS["qwen2"]()), lora=Lora(rank=4, alpha=8))


def check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(
    model: Model, spread: Callable[[], TrainEngine], tmp_path: Path
) -> None:
    batch = samples(VOCABULARY)
    made = {"alone": lambda: EmbeddedTrain(model, EngineSettings()), "spread": spread}
    found = {}
    for name, make in made.items():
        with started(make()) as engine:
            first = copied(engine)
            step(engine, batch)
            step(engine, batch)
            engine.save(str(tmp_path / name))
            step(engine, batch)
            found[name] = first, copied(engine), kept(engine.adapters()), kept(engine.base())
    assert distance(found["spread"][2], found["alone"][2]) < 1e-5
    assert distance(found["spread"][3], found["alone"][3]) == distance(found["spread"][3], first) == 0
    assert distance(found["spread"][0], found["alone"][0]) == 0
    assert distance(found["spread"][1], found["alone"][1]) < 1e-5
    assert distance(found["alone"][1], found["alone"][0]) > 1e-3
    for name, other in (("alone", "spread"), ("spread", "alone")):  # Each goes on from the other's checkpoint.
        with started(made[name]()) as engine:
            engine.load(str(tmp_path / other))
            step(engine, batch)
            assert distance(copied(engine), found["alone"][1]) < 1e-5


def check_references_compute_from_the_policys_weights(model: Model, policy: TrainEngine, tmp_path: Path) -> None:
    """A reference on the policy's path, and one that was made of the policy: those of the embedded trainer with weights of their own."""
    batch = samples(VOCABULARY)
    frozen = replace(model, lora=None, is_policy=False, is_frozen=True)
    with started(EmbeddedTrain(model, EngineSettings())) as alone, started(EmbeddedTrain(frozen, EngineSettings())) as plain:
        with started(policy) as engine:
            by_path, by_policy = (
                engine.adapter_reference("base", frozen),
                engine.adapter_reference("reference", replace(model, is_policy=False)),
            )
            assert by_path is not None
            assert by_policy is not None
            with started(by_path), started(by_policy):
                base = plain.logprobs(batch)
                assert said(by_policy.logprobs(batch), base) < 1e-5  # Nothing was copied yet: adapters add nothing.
                for one in (alone, engine):
                    step(one, batch)
                by_policy.copy_from(engine)
                then, sent = alone.logprobs(batch), copied(alone)
                # Between two micro-batches of an update as between updates.
                for one in (alone, engine):
                    one.accumulate(batch, PPO)
                assert said(by_path.logprobs(batch), base) < 1e-5
                assert said(by_policy.logprobs(batch), then) < 1e-5
                for one in (alone, engine):
                    one.apply(LINEAR, 3.0)
                assert said(engine.logprobs(batch), alone.logprobs(batch)) < 1e-5
                assert said(by_policy.logprobs(batch), then) < 1e-5
                assert said(alone.logprobs(batch), then) > 1e-4
                assert distance(copied(by_path), copied(plain)) == 0
                assert distance(copied(by_policy), sent) < 1e-5
                assert distance(copied(engine), copied(alone)) < 1e-5
                assert engine.memory().weights <= alone.memory().weights  # Of the model once, at most.
                assert by_path.memory().total == 0
                assert by_policy.memory().total == sum(tensor.nbytes for tensor in kept(engine.adapters()).values())
                by_policy.save(str(tmp_path / "reference"))
                by_policy.copy_from(engine)
                by_policy.load(str(tmp_path / "reference"))
                assert said(by_policy.logprobs(batch), then) < 1e-5
        with started(EmbeddedTrain(model, EngineSettings())) as other:
            other.load(str(tmp_path / "reference"))
            assert said(other.logprobs(batch), then) < 1e-5


def check_what_was_copied_of_a_policy_is_in_a_checkpoint(
    model: Model, make: Callable[[], TrainEngine], tmp_path: Path, policy: TrainEngine | None = None
) -> None:
    """Args: policy: an engine that is not started; None: the embedded trainer."""
    batch = samples(VOCABULARY)
    with started(policy or EmbeddedTrain(model, EngineSettings())) as policy:
        step(policy, batch)
        with started(make()) as reference:
            before = reference.logprobs(batch)
            reference.copy_from(policy)
            then = policy.logprobs(batch)
            assert said(reference.logprobs(batch), then) < 1e-5
            reference.save(str(tmp_path / "reference"))
    with started(make()) as resumed:
        assert said(resumed.logprobs(batch), before) < 1e-5
        resumed.load(str(tmp_path / "reference"))
        assert said(resumed.logprobs(batch), then) < 1e-5
    assert said(before, then) > 1e-4


def said(one: Batch, other: Batch) -> float:
    """How far the log-probabilities are apart, norm-relative."""
    return distance(*({"": np.asarray(rows.ragged("reference_logprobs").values)} for rows in (one, other)))


def kept(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, npt.NDArray[np.float32]]:
    """What each is only until the next is asked for."""
    return {name: tensor.float().numpy().copy() for name, tensor in tensors}


def step(engine: TrainEngine, batch) -> None:  # type: ignore[no-untyped-def]
    engine.accumulate(batch, PPO)
    engine.apply(LINEAR, 3.0)
