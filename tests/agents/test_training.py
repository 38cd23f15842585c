"""An episode of several segments is trained on as what it is: each masked token by all that stood before it, tools' tokens included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_models import DIGITS

from m2flow import nll
from m2flow.engines.contract import EngineSettings, Generated, Objective
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.micro.protocol import call_semantics
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Finish, Ragged, SampleId, Segment

MODEL = Model(str(DIGITS), "random")
SEGMENTS = ((Segment.GENERATED, 3), (Segment.TOOL, 4), (Segment.GENERATED, 2), (Segment.TOOL, 1), (Segment.GENERATED, 2))


def rows_of(segments: tuple[tuple[Segment, int], ...]) -> Batch:
    """Two episodes of one group, with the same prompt, of which one is shorter."""
    dice = np.random.default_rng(1)
    call = type("Call", (), {"options": {"sampling": Sampling(64)}})()
    made = []
    for index in range(2):
        own = segments[: len(segments) - 2 * index]
        count = sum(length for _, length in own)
        kinds = np.concatenate([np.full(length, kind) for kind, length in own])
        made.append(
            Generated(
                SampleId(0, 0, index).pack(),
                np.array([3, 4, 5], np.int32),
                dice.integers(3, 13, count).astype(np.int32),
                np.where(kinds == Segment.GENERATED, -1.0, 0.0).astype(np.float32),
                np.where(kinds == Segment.GENERATED, 0, -1).astype(np.int32),
                np.zeros(count, np.bool_),
                Finish.STOP,
                "",
                segments=own,
            )
        )
    prompts = Batch(np.array([g.id for g in made], np.int64), {"prompt": Ragged.texts(["012", "012"])})
    return call_semantics.responses([call, call], made, prompts, {g.id: 0 for g in made})


def test_the_trainers_log_probabilities_of_an_episode_are_those_of_its_whole_context(tmp_path: Path):
    rollout, trainer = EmbeddedRollout(MODEL, EngineSettings()), EmbeddedTrain(MODEL, EngineSettings())
    rollout.start()
    trainer.start()
    rows = rows_of(SEGMENTS)
    found = trainer.logprobs(rows).ragged("reference_logprobs")
    expected = rollout.logprobs([rows.ragged("tokens").row(row).tolist() for row in range(2)])
    for row in range(2):
        mask = rows.ragged("loss_mask").row(row).astype(bool)
        assert mask.sum() == call_semantics.num_generated_of(rows)[row] < mask.size - 3
        assert np.allclose(found.row(row)[mask], np.concatenate([[0.0], expected[row]])[mask], atol=1e-5)
        assert (found.row(row)[~mask] == 0).all()
    sums = trainer.accumulate(rows, Objective(nll()))
    assert (sums.num_sequences, sums.num_tokens) == (2, 7 + 5), "an episode is one sequence; a tool's tokens count in no denominator"
    total = sum(-np.concatenate([[0.0], expected[row]])[rows.ragged("loss_mask").row(row).astype(bool)].sum() for row in range(2))
    assert abs(sums.metrics["loss"] - total) < 1e-3
    rollout.stop()
    trainer.stop()
