"""Trainers of several ranks in any layout, held against the embedded trainer: numbers, checkpoints, losses that raise.

A layout is options of the trainer `fsdp`: stages (`pp`, `vpp`, `schedule`), split layers (`tp`), sequences (`cp`) and experts (`ep`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_models import NUM_EXPERTS, VOCABULARY, random_model

from m2flow.channels.weights import SharedWeights
from m2flow.channels.weights.tensors import to_wire
from m2flow.engines.contract import EngineSettings, Objective, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models import trainer_checkpoint
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Loss, Model, Muon, Optimizer
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, compact_experts
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import DISTILL, LINEAR, PPO, ScalarHeadSuite, TrainEngineSuite, copied, distance, samples, started

STEP = AdamW(lr=1e-3, eps=1e-3)
"""Its eps keeps a step from being as long for a gradient that is nothing but rounding."""


def apart(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference; a NaN is one."""
    assert set(found) == set(expected)
    differences = [np.abs(found[name].astype(np.float64) - expected[name]) for name in expected]
    assert all(np.isfinite(one).all() for one in differences)
    return max(float(one.max()) for one in differences)


def train(engine: TrainEngine, batch: Batch, recipe: Optimizer = STEP) -> Mapping[str, float]:
    """Take one step, in micro-batches of seven samples; returns its metrics."""
    for first in range(0, len(batch), 7):
        engine.accumulate(batch.take(np.arange(first, min(first + 7, len(batch)))), PPO)
    return engine.apply(recipe, float(len(batch)))


def history(engine: TrainEngine, batch: Batch) -> dict[str, Any]:
    """What an engine says of a batch, and what becomes of its weights."""
    with started(engine):
        first = copied(engine)
        logprobs = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
        top = engine.top_logprobs(batch, 3)
        likeliest = np.asarray(top.ragged("reference_top_logprobs").values)
        sums = [engine.accumulate(batch.take(rows), PPO) for rows in (np.arange(9), np.arange(9, len(batch)))]
        metrics = engine.apply(replace(LINEAR, log_layers=True), 7.0)
        moved = copied(engine)
        engine.accumulate(batch.join(top), DISTILL)
        engine.discard()
        clipped = [train(engine, batch, replace(STEP, max_grad_norm=0.01)) for _ in range(2)]
        last = copied(engine)
    return {
        "first": first,
        "logprobs": {"": logprobs},
        "top": {"": likeliest},
        "sums": {f"{i}/{name}": value for i, one in enumerate(sums) for name, value in one.metrics.items()},
        "metrics": {**metrics, **{f"{i}/{name}": value for i, one in enumerate(clipped) for name, value in one.items()}},
        "gradients": {name: first[name] - moved[name] for name in first},
        "steps": {name: last[name] - moved[name] for name in first},
    }


def check_numbers(model: Model, options: dict[str, Any], followers: Followers, batch: Batch | None = None) -> dict[str, Any]:
    """Compare what is said of a batch, and becomes of weights, with the embedded trainer; returns the latter's."""
    batch = samples(VOCABULARY, num_prompts=5) if batch is None else batch
    expected = history(EmbeddedTrain(model, EngineSettings()), batch)
    found = history(Mirrored(FsdpTrain, model, EngineSettings(options=options), followers), batch)
    assert apart(found["first"], expected["first"]) == 0
    assert apart(found["logprobs"], expected["logprobs"]) < 1e-5
    assert apart(found["top"], expected["top"]) < 1e-5
    # LINEAR's eps is far above the gradient: a step is nearly proportional to it.
    largest = max(float(np.abs(one).max()) for one in expected["gradients"].values())
    assert apart(found["gradients"], expected["gradients"]) < 1e-5 * largest
    assert apart(found["steps"], expected["steps"]) < 1e-6
    for kind in ("sums", "metrics"):
        assert set(found[kind]) == set(expected[kind])
        for key, value in expected[kind].items():
            assert found[kind][key] == pytest.approx(value, rel=1e-5, abs=1e-5 if kind == "sums" else 0), key
    return expected


def check_it_goes_on_alone(model: Model, options: dict[str, Any], followers: Followers, path: Path) -> None:
    """Train from a checkpoint of the layout, in the layout and in the embedded trainer, as if nothing had been saved."""
    weights = []
    with started(Mirrored(FsdpTrain, model, EngineSettings(options=options), followers)) as engine:
        train(engine, samples(VOCABULARY))
        engine.save(str(path))
        train(engine, samples(VOCABULARY))
        weights.append(copied(engine))
        engine.load(str(path))
        train(engine, samples(VOCABULARY))
        weights.append(copied(engine))
    with started(EmbeddedTrain(model, EngineSettings())) as alone:
        alone.load(str(path))
        train(alone, samples(VOCABULARY))
        weights.append(copied(alone))
    assert distance(weights[1], weights[0]) == 0
    assert apart(weights[2], weights[0]) < 1e-6


def check_each_goes_on_from_the_one_before(recipe: Optimizer, model: Model, engines: Sequence[TrainEngine], path: Path) -> None:
    """Take a step with each engine, from the checkpoint of the one before; the weights are those of the embedded trainer."""
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        weights = []
        for _ in engines:
            train(engine, batch, recipe)
            weights.append(copied(engine))
    for turn, other in enumerate(engines):
        with started(other):
            if turn:
                other.load(str(path / f"{turn - 1}"))
            train(other, batch, recipe)
            # Muon's iterations raise the rounding of small singular values.
            assert apart(copied(other), weights[turn]) < (1e-4 if isinstance(recipe, Muon) else 1e-6)
            other.save(str(path / f"{turn}"))


def lost(logprobs, weight):  # type: ignore[no-untyped-def]
    if (weight == 0).any():
        raise ZeroDivisionError("no weight")
    return logprobs * weight


def check_a_loss_that_raises(model: Model, options: dict[str, Any], followers: Followers, said: str) -> None:
    """A loss that raises on one rank is an error on all, no step is taken with what is left, and the trainer goes on.

    Args:
        said: a pattern for who raised it.
    """
    batch, weight = samples(VOCABULARY), np.ones(12, np.float32)
    weight[5] = 0  # One of several passes, on one of the ranks of a stage.
    objective = Objective(Loss("lost", lost, ("logprobs", "weight")))
    settings = EngineSettings(options=options)
    with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
        with pytest.raises(EngineError, match=f"{said}the loss lost raised ZeroDivisionError: no weight"):
            engine.accumulate(batch.with_columns(weight=weight), objective)
        before = copied(engine)
        with pytest.raises(EngineError, match="the gradient lacks a micro-batch that failed"):
            engine.apply(STEP, 1.0)
        assert distance(copied(engine), before) == 0
        engine.accumulate(batch, PPO)
        with pytest.raises(EngineError, match=f"{said}.*weight"):
            engine.accumulate(batch, objective)
        engine.discard()
        train(engine, batch)
        found = copied(engine)
    with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
        train(engine, batch)
        assert distance(copied(engine), found) == 0


def check_pieces(model: Model, engine: TrainEngine) -> None:
    """Send the weights of a mixture in the pieces that ranks hold: they are those that are gathered."""
    with started(engine):
        assert isinstance(engine, Mirrored)
        pieces = engine.spread(1 << 12)
        assert pieces is not None
        gathered = list(to_wire(engine.weights()))
        with closing(SharedWeights(f"m2flow-test-{secrets.token_hex(4)}")) as stage:
            found = stage.write_spread(pieces).tensors
            assert found == stage.write(gathered).tensors
        assert "model.layers.1.mlp.experts.7.up_proj.weight" in [entry.name for entry in found]


def check_experts_that_no_row_goes_to(model: Model, engine: TrainEngine) -> None:
    """All rows go to the first two experts, which are on the first rank."""
    batch = samples(VOCABULARY)
    tokens = batch.ragged("tokens")
    experts = np.broadcast_to(np.arange(2), (len(tokens.values), 2, 2))
    batch = batch.with_columns(**{ROUTED_EXPERTS: Ragged(compact_experts(experts, NUM_EXPERTS), tokens.offsets)})
    found = []
    for one in (EmbeddedTrain(replace(model, routing="rollout"), EngineSettings()), engine):
        with started(one):
            first = copied(one)
            metrics = train(one, batch)
            found.append((metrics, copied(one)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[0][0]["expert_load/idle"] == 1 - 2 / NUM_EXPERTS
    assert apart(found[1][1], found[0][1]) < 1e-6
    idle = [name for name in first if f".experts.{NUM_EXPERTS - 1}." in name]
    assert idle
    assert all(np.array_equal(found[1][1][name], first[name]) for name in idle)


class LayoutSuite(TrainEngineSuite):
    """The conformance suite on the ranks of a layout. The module has a fixture `model`."""

    options: ClassVar[Mapping[str, Any]]
    others = "followers"
    """The fixture with the other ranks: `followers` for two, `three` for four."""
    pytestmark = pytest.mark.slow

    @pytest.fixture(autouse=True)
    def _take(self, model: Model, request: pytest.FixtureRequest) -> None:
        self.model, self.followers = model, request.getfixturevalue(self.others)

    def make(self) -> TrainEngine:
        return Mirrored(FsdpTrain, self.model, EngineSettings(options=dict(self.options)), self.followers)


class LayoutHeadSuite(ScalarHeadSuite):
    """The suite of critics and reward models on two ranks of a layout, as `LayoutSuite`."""

    options: ClassVar[Mapping[str, Any]]
    pytestmark = pytest.mark.slow

    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.path, self.followers = Path(model.path), followers

    def make(self, head: str) -> TrainEngine:
        return Mirrored(FsdpTrain, random_model(self.path, head), EngineSettings(options=dict(self.options)), self.followers)


def check_parts_are_written_behind(engine: TrainEngine, batch: Batch, place: Path) -> None:
    """A checkpoint whose parts are written in other threads while training goes on is that of the moment when it was held."""
    engine.save(str(place / "written"))
    held, saved = engine.held_checkpoint(str(place / "held")), {name: tensor.clone() for name, tensor in engine.weights()}
    assert held is not None
    train(engine, batch)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(held.write).result()
    found = dict(held.weights())
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    directories = [place / name / "m2flow_parts" for name in ("written", "held")]
    expected, parts = map(trainer_checkpoint.read_parts, directories)
    assert expected.keys() == parts.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in expected.items())
    assert len(list(directories[1].glob("*.distcp"))) == len(list(directories[0].glob("*.distcp")))
    assert len({(place / name / "m2flow_state.pt").read_bytes() for name in ("written", "held")}) == 1
    trainer_checkpoint.verify(place / "held")
