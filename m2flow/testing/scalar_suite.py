"""The conformance suite of train engines that hold critics and reward models.

    class TestMine(ScalarHeadSuite):
        def make(self, head: str) -> TrainEngine: ...          # a fresh engine, not started; always the same initial weights
        is_exact = False                                       # True: values, scores and weights agree bit by bit

Beside `m2flow.testing.train_suite`, whose engines model language; an engine declares the heads that it has in its capabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from m2flow.engines.contract import Objective, TrainEngine
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Loss
from m2flow.samples import Batch, Ragged
from m2flow.testing.train_suite import LINEAR, PPO, Weights, copied, cut, distance, samples, started

VALUE = Objective(
    Loss("clipped_value", "m2flow.algorithms.losses:clipped_value", ("values", "returns", "old_values"), options=(("clip", 0.2),))
)
_RECIPE = AdamW(lr=1e-2)


class ScalarHeadSuite:
    """Inherit, define `make`, and let pytest collect the class."""

    is_exact = False
    vocabulary = 32
    tolerance = 1e-4
    """Norm-relative, between two cuttings, where the engine is not exact."""

    def make(self, head: str) -> TrainEngine:
        raise NotImplementedError

    def test_the_heads_are_declared(self) -> None:
        assert {"value", "score"} <= set(self.make("value").capabilities.heads)

    def test_values_are_aligned_with_tokens_and_do_not_depend_on_the_cut(self) -> None:
        batch = self.batch()
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        with started(self.make("value")) as engine:
            self.warm_up(engine)
            whole = engine.values(batch)
            parts = [engine.values(part) for part in cut(shuffled, [5, 7])]
        column, mask = whole.ragged("values"), batch.ragged("loss_mask")
        assert np.array_equal(whole.ids, batch.ids)
        assert np.array_equal(parts[0].ids, shuffled.ids[:5])
        assert column.values.dtype == np.float32
        assert np.array_equal(column.offsets, mask.offsets)
        assert not column.values[~mask.values.astype(bool)].any()
        assert column.values.any()
        self.assert_close({"": column.values}, {"": Batch.concat(parts).select(batch.ids).ragged("values").values})

    def test_a_critics_sums_and_weights_do_not_depend_on_how_a_mini_batch_is_cut(self) -> None:
        batch = self.batch()
        first, *others = [self.after(cut(batch, sizes)) for sizes in ([12], [6, 6], [1] * 12, [5, 7])]
        for weights in others:
            self.assert_close(weights, first)

    @pytest.mark.parametrize("column", ["returns", "old_values"])
    def test_what_the_value_loss_needs_counts(self, column: str) -> None:
        batch = self.batch()
        held = batch.ragged(column)
        changed = batch.with_columns(**{column: Ragged(np.where(held.values == 0, held.values, held.values + 3), held.offsets)})
        assert distance(self.after([changed]), self.after([batch])) > self.tolerance

    def test_a_column_that_the_value_loss_needs_and_the_batch_lacks_is_named(self) -> None:
        with started(self.make("value")) as engine, pytest.raises(EngineError, match="returns"):
            engine.accumulate(self.batch().without(["returns"]), VALUE)

    def test_a_loss_that_needs_what_the_head_does_not_give_is_refused(self) -> None:
        for head, objective, missing in (("value", PPO, "logprobs"), ("lm", VALUE, "values")):
            with started(self.make(head)) as engine, pytest.raises(EngineError, match=f"needs {missing}"):
                engine.accumulate(self.batch(), objective)

    def test_a_head_answers_only_for_itself(self) -> None:
        batch = self.batch()
        with started(self.make("value")) as engine:
            for method in (engine.logprobs, engine.scores):
                with pytest.raises(EngineError, match="head"):
                    method(batch)
        with started(self.make("score")) as engine, pytest.raises(EngineError, match="head"):
            engine.values(batch)

    def test_a_critics_checkpoint_has_its_head(self, tmp_path: Path) -> None:
        path, batch = str(tmp_path / "critic"), self.batch()
        with started(self.make("value")) as engine:
            self.warm_up(engine)
            engine.save(path)
            expected = engine.values(batch).ragged("values").values
        with started(self.make("value")) as engine:
            assert not np.array_equal(engine.values(batch).ragged("values").values, expected)
            engine.load(path)
            assert np.array_equal(engine.values(batch).ragged("values").values, expected)

    def test_scores_are_one_finite_number_a_sample_and_do_not_depend_on_the_cut(self) -> None:
        texts = ["1", "22", "3+4", "", "5", "66", "123456", "8", "9", "1", "a", "b"]
        batch = Batch(self.batch().ids, {"prompt": Ragged.texts(["1+1="] * 6 + ["2+2="] * 6), "text": Ragged.texts(texts)})
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        with started(self.make("score")) as engine:
            whole = engine.scores(batch)
            parts = Batch.concat([engine.scores(part) for part in cut(shuffled, [5, 7])])
        scores = np.asarray(whole.dense("reward"), np.float64)
        assert np.array_equal(parts.ids, shuffled.ids)
        assert scores.shape == (12,)
        assert np.isfinite(scores).all()
        assert len(set(scores.tolist())) > 6
        self.assert_close({"": scores}, {"": np.asarray(parts.select(batch.ids).dense("reward"))})

    def batch(self) -> Batch:
        batch = samples(self.vocabulary)
        mask = batch.ragged("loss_mask")
        rng = np.random.default_rng(3)

        def per_token() -> Ragged:
            return Ragged(np.where(mask.values, rng.normal(size=len(mask.values)), 0).astype(np.float32), mask.offsets)

        return batch.with_columns(returns=per_token(), old_values=per_token())

    def warm_up(self, engine: TrainEngine) -> None:
        """Two steps: after the first, a head that started at zero lets the gradient through."""
        for _ in range(2):
            engine.accumulate(self.batch(), VALUE)
            engine.apply(_RECIPE, 1.0)

    def after(self, micro_batches: Sequence[Batch]) -> Weights:
        """The weights after a step on these, from a critic whose head is not zero."""
        with started(self.make("value")) as engine:
            self.warm_up(engine)
            for batch in micro_batches:
                engine.accumulate(batch, VALUE)
            engine.apply(LINEAR, 3.0)
            return copied(engine)

    def assert_close(self, found: Weights, expected: Weights) -> None:
        difference = distance(found, expected)
        assert difference == 0 if self.is_exact else difference <= self.tolerance
