"""Check that a train engine conforms: test classes to inherit, for engines of language models, critics and reward models.

    class TestMine(TrainEngineSuite):
        def make(self) -> TrainEngine: ...          # a fresh engine, not started; always the same initial weights
        is_exact = False                            # True: sums and weights agree bit by bit

    class TestMyHeads(ScalarHeadSuite):             # for the heads that the engine declares in its capabilities
        def make(self, head: str) -> TrainEngine: ...
        is_exact = False                            # True: values, scores and weights agree bit by bit

Every check takes tokens from `vocabulary`, builds its own batches, and compares the engine with itself: there are no reference values.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from m2flow.channels.weights import Manifest, SharedWeights, TensorEntry
from m2flow.channels.weights.tensors import to_wire
from m2flow.engines.contract import Objective, Sums, TrainEngine
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS, TOP_LOGPROBS, AdamW, Loss
from m2flow.samples import Batch, Masks, Ragged, Segment, make_ids, packed_masks
from m2flow.testing.mirrored import Mirrored

PPO = Objective(Loss("ppo_clip", "m2flow.algorithms.losses:ppo_clip", ("logprobs", "behaviour_logprobs", "advantages")))
NLL = Objective(Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",)))
DPO = Objective(
    Loss("dpo", "m2flow.algorithms.preferences:dpo", ("logprobs", "reference_logprobs", "chosen", "sequence_ids", "group_ids"), "groups")
)
DISTILL = Objective(
    Loss("distill_top_k", "m2flow.algorithms.losses:distill_top_k", (TOP_LOGPROBS, REFERENCE_TOP_LOGPROBS), options=(("direction", "js"),))
)
RECIPE = AdamW(lr=1e-2)
WARMED = AdamW(lr=1e-2, warmup_steps=4)

Weights = dict[str, npt.NDArray[Any]]


def drawn_from(batch: Batch, whole: Batch) -> tuple[Ragged, npt.NDArray[np.float64]]:
    """Sampling masks of different sizes for a batch, every fourth token without one; and each token's log-probability among its own.

    Args:
        whole: what `top_logprobs` says of the batch.
    """
    mask = batch.ragged("loss_mask").values.astype(bool)
    own = whole.ragged("reference_logprobs").values[mask].astype(np.float64)
    top = np.asarray(whole.ragged(REFERENCE_TOP_LOGPROBS).values, np.float64)
    masks: Masks = []
    top_ids = whole.ragged(REFERENCE_TOP_IDS).values
    for i, (token, ids) in enumerate(zip(batch.ragged("tokens").values[mask].tolist(), top_ids, strict=True)):
        likely = {**dict(zip(ids.tolist(), top[i], strict=False)), token: own[i]}
        left = sorted({token, *ids[: i % 5].tolist()}) if i % 4 else []
        masks.append(np.array(left, np.int32))
        own[i] -= np.logaddexp.reduce([likely[one] for one in left]) if left else 0.0
    counts = np.add.reduceat(mask, batch.ragged("loss_mask").offsets[:-1], dtype=np.int64).tolist()
    ends = np.cumsum(counts).tolist()
    return Ragged.of([packed_masks(masks[end - count : end]) for count, end in zip(counts, ends, strict=True)], np.int32), own


def files_of(directory: Path) -> dict[str, str]:
    """SHA-256 of a directory's files by their names."""
    found = {file for file in directory.rglob("*") if file.is_file()}
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(found)}


class TrainEngineSuite:
    """Inherit, define `make`, and let pytest collect the class."""

    is_exact = False
    has_distributions = True
    """Whether its log-probabilities are those of distributions over a vocabulary."""
    vocabulary = 32
    tolerance = 1e-4
    """Norm-relative tolerance between two cuttings into micro-batches, where the engine is not exact."""

    def make(self) -> TrainEngine:
        raise NotImplementedError

    def test_sums_and_weights_do_not_depend_on_how_a_mini_batch_is_cut(self) -> None:
        batch = samples(self.vocabulary)
        results = [self._trained(cut(batch, sizes)) for sizes in ([12], [6, 6], [1] * 12, [5, 7])]
        results.append(self._trained(list(reversed(cut(batch, [4, 4, 4])))))
        (first_sums, first_weights), *others = results
        for sums, weights in others:
            assert (sums.num_sequences, sums.num_tokens, sums.num_context_tokens) == counts(first_sums)
            self.assert_close(metric_weights(sums), metric_weights(first_sums))
            self.assert_close(weights, first_weights)

    def test_a_loss_on_pairs_gets_whole_groups_however_a_mini_batch_is_cut(self) -> None:
        batch = samples(self.vocabulary, n=2)
        reference = batch.ragged("logprobs")  # Of a micro-batch of one pair no rank may have a half.
        batch = batch.with_columns(chosen=np.tile(np.array([1.0, 0.0]), 3), reference_logprobs=reference)
        results = [self._trained(cut(batch, sizes), objective=DPO) for sizes in ([6], [2, 4], [2, 2, 2])]
        (first_sums, first_weights), *others = results
        for sums, weights in others:
            self.assert_close(metric_weights(sums), metric_weights(first_sums))
            self.assert_close(weights, first_weights)

    def test_counts_are_those_of_the_batch(self) -> None:
        batch = samples(self.vocabulary)
        mask = batch.ragged("loss_mask")
        with started(self.make()) as engine:
            sums = engine.accumulate(batch, PPO)
        assert counts(sums) == (len(batch), int(np.count_nonzero(mask.values)), len(mask.values))
        assert "loss" in sums.metrics

    def test_the_order_of_rows_inside_a_micro_batch_does_not_matter(self) -> None:
        batch = samples(self.vocabulary)
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        self.assert_close(self._trained([shuffled])[1], self._trained([batch])[1])

    def test_every_sample_counts_once(self) -> None:
        batch = samples(self.vocabulary)
        whole = self._trained([batch])[1]
        for other in ([batch.take(np.arange(11))], [batch, batch.take([11])]):
            assert distance(self._trained(other)[1], whole) > self.tolerance

    def test_advantages_count(self) -> None:
        batch = samples(self.vocabulary)
        changed = batch.with_columns(advantages=np.asarray(batch.dense("advantages"), np.float32) + np.float32(1))
        assert distance(self._trained([changed])[1], self._trained([batch])[1]) > self.tolerance

    def test_apply_divides_by_the_denominator(self) -> None:
        batch = samples(self.vocabulary)
        norms = []
        for denominator in (1.0, 4.0):
            with started(self.make()) as engine:
                engine.accumulate(batch, PPO)
                norms.append(engine.apply(RECIPE, denominator)["grad_norm"])
        assert norms[0] == pytest.approx(4 * norms[1], rel=1e-5)

    def test_apply_clears_the_gradient(self) -> None:
        with started(self.make()) as engine:
            engine.accumulate(samples(self.vocabulary), PPO)
            engine.apply(RECIPE, 1.0)
            before = copied(engine)
            with pytest.raises(EngineError, match="no gradient"):
                engine.apply(RECIPE, 1.0)
            assert distance(copied(engine), before) == 0

    def test_discard_forgets_what_was_accumulated(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            engine.accumulate(batch.take(np.arange(5)), PPO)
            engine.discard()
            engine.accumulate(batch, PPO)
            engine.apply(LINEAR, 7.0)
            self.assert_close(copied(engine), self._trained([batch], denominator=7.0)[1])

    @pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan")])
    def test_a_denominator_that_is_not_positive_is_refused_and_changes_nothing(self, denominator: float) -> None:
        with started(self.make()) as engine:
            before = copied(engine)
            engine.accumulate(samples(self.vocabulary), PPO)
            with pytest.raises(EngineError, match="denominator"):
                engine.apply(RECIPE, denominator)
            assert distance(copied(engine), before) == 0

    def test_weights_change_with_apply_alone(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            before = copied(engine)
            engine.accumulate(batch, PPO)
            engine.logprobs(batch)
            assert distance(copied(engine), before) == 0
            engine.apply(RECIPE, 1.0)
            assert distance(copied(engine), before) > 0

    def test_two_engines_start_from_the_same_weights(self) -> None:
        with started(self.make()) as one, started(self.make()) as other:
            assert distance(copied(one), copied(other)) == 0

    def test_what_its_ranks_hold_of_the_weights_is_what_is_gathered(self) -> None:
        """A trainer of several ranks that says which pieces each rank has gives all of them, in the types that receivers want."""
        with started(self.make()) as engine:
            spread = engine.spread(1 << 14) if isinstance(engine, Mirrored) else None
            if isinstance(engine, Mirrored):
                assert (spread is not None) is engine.capabilities.weight_pieces
            if spread is None:
                pytest.skip("one process has the weights, or they are gathered")
            engine.accumulate(samples(self.vocabulary), PPO)
            engine.apply(LINEAR, 3.0)
            gathered = list(to_wire(engine.weights()))
            for dtype in (None, "bfloat16"):
                found = _staged(functools.partial(SharedWeights.write_spread, spread=spread, dtype=dtype))
                assert found == _staged(functools.partial(SharedWeights.write, tensors=gathered, dtype=dtype))

    def test_it_takes_the_weights_of_another(self) -> None:
        with started(self.make()) as source, started(self.make()) as target:
            source.accumulate(samples(self.vocabulary), PPO)
            source.apply(LINEAR, 1.0)
            changed = copied(source)
            assert distance(copied(target), changed) > 0
            target.copy_from(source)
            assert distance(copied(target), changed) == 0
            assert distance(copied(source), changed) == 0

    def test_it_takes_a_share_of_the_weights_of_another(self) -> None:
        with started(self.make()) as source, started(self.make()) as target:
            before = copied(target)
            source.accumulate(samples(self.vocabulary), PPO)
            source.apply(LINEAR, 1.0)
            changed = copied(source)
            target.copy_from(source, 0.25)
            blended = copied(target)
            assert distance(copied(source), changed) == 0
            assert distance(blended, before) > 0 < distance(blended, changed)
            for name, values in blended.items():
                if values.dtype.kind == "f":  # Of whole numbers there are no shares.
                    expected = 0.75 * before[name].astype(np.float64) + 0.25 * changed[name]
                    assert np.abs(values - expected).max() <= 1e-6 * np.abs(expected).max(), name

    def test_one_that_gives_while_it_is_off_its_device_gives_the_same(self) -> None:
        with started(self.make()) as source, started(self.make()) as target:
            if not source.capabilities.readable_offloaded:
                pytest.skip("it comes back to its device before its weights are copied")
            source.accumulate(samples(self.vocabulary), PPO)
            source.apply(LINEAR, 1.0)
            changed = copied(source)
            source.offload()
            target.copy_from(source)
            assert distance(copied(target), changed) == 0
            source.onload()
            assert distance(copied(source), changed) == 0

    def test_each_recipe_has_state_of_its_own(self) -> None:
        batch = samples(self.vocabulary)
        other = AdamW(lr=1e-3, weight_decay=0.1)

        def after(recipes: Sequence[AdamW]) -> Weights:
            with started(self.make()) as engine:
                for recipe in recipes:
                    engine.accumulate(batch, PPO)
                    engine.apply(recipe, 1.0)
                return copied(engine)

        changed = after([RECIPE, other])
        assert distance(changed, after([RECIPE, RECIPE])) > 0
        assert distance(changed, after([other, RECIPE])) > 0

    def test_another_learning_rate_goes_on_with_the_moments(self, tmp_path: Path) -> None:
        """Also after a checkpoint; and the state of the trainer does not grow by it."""
        batch, rates = samples(self.vocabulary), (1e-2, 4e-3, 1e-3)

        def step(engine: TrainEngine, lr: float) -> None:
            engine.accumulate(batch, PPO)
            assert engine.apply(AdamW(lr=lr), 1.0)["lr"] == lr

        with started(self.make()) as engine:
            step(engine, rates[0])
            held = engine.memory().optimizer
            engine.save(str(tmp_path / "first"))
            for lr in rates[1:]:
                step(engine, lr)
            assert engine.memory().optimizer == held
            on = copied(engine)
            engine.load(str(tmp_path / "first"))
            for lr in rates[1:]:
                step(engine, lr)
            assert distance(copied(engine), on) == 0

    def test_a_checkpoint_continues_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        """Also one that was held in memory, and written in another thread when training had gone on: its files are the same."""
        batch = samples(self.vocabulary)
        path = str(tmp_path / "checkpoint")

        def train(engine: TrainEngine, recipe: AdamW) -> None:
            engine.accumulate(batch, PPO)
            engine.apply(recipe, 3.0)

        with started(self.make()) as engine:
            train(engine, RECIPE)
            train(engine, NEXT)
            engine.save(path)
            held, saved = engine.held_checkpoint(str(tmp_path / "held")), copied(engine)
            train(engine, NEXT)
            train(engine, RECIPE)
            expected = copied(engine)
            if held is not None:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(held.write).result()
                assert files_of(tmp_path / "held") == files_of(Path(path))
                assert distance(in_memory(held.weights()), saved) == 0
        with started(self.make()) as engine:
            engine.accumulate(batch, PPO)
            engine.load(path)
            assert distance(copied(engine), saved) == 0
            train(engine, NEXT)
            train(engine, RECIPE)
            self.assert_close(copied(engine), expected)

    def test_a_checkpoint_can_be_written_over_an_older_one(self, tmp_path: Path) -> None:
        path = str(tmp_path / "checkpoint")
        with started(self.make()) as engine:
            engine.save(path)
            engine.accumulate(samples(self.vocabulary), PPO)
            engine.apply(RECIPE, 1.0)
            engine.save(path)
            expected = copied(engine)
        with started(self.make()) as engine:
            engine.load(path)
            assert distance(copied(engine), expected) == 0
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]

    def test_a_checkpoint_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with started(self.make()) as engine, pytest.raises(ModelError, match="nowhere"):
            engine.load(str(tmp_path / "nowhere"))

    def test_logprobs_are_aligned_with_tokens(self) -> None:
        batch = samples(self.vocabulary)
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        with started(self.make()) as engine:
            whole = engine.logprobs(batch)
            parts = Batch.concat([engine.logprobs(part) for part in cut(shuffled, [5, 7])])
            assert np.array_equal(parts.ids, shuffled.ids)
            parts = parts.select(batch.ids)
        column, mask = whole.ragged("reference_logprobs"), batch.ragged("loss_mask")
        assert np.array_equal(whole.ids, batch.ids)
        assert column.values.dtype == np.float32
        assert np.array_equal(column.offsets, mask.offsets)
        assert not column.values[~mask.values.astype(bool)].any()
        assert np.all(column.values[mask.values.astype(bool)] <= 0)
        self.assert_close({"": column.values}, {"": parts.ragged("reference_logprobs").values})

    def test_each_sequence_of_a_row_is_read_by_itself_and_the_row_counts_once(self) -> None:
        apart = samples(self.vocabulary)
        advantages = np.repeat(np.asarray(apart.dense("advantages")), apart.ragged("tokens").lengths)
        apart = apart.with_columns(advantages=Ragged(advantages, apart.ragged("tokens").offsets))
        joined = in_pairs(apart)
        with started(self.make()) as engine:
            if not engine.capabilities.sequences:
                pytest.skip(f"the train engine {engine.name!r} does not declare that it reads rows of several sequences")
            found, expected = engine.logprobs(joined).ragged("reference_logprobs"), engine.logprobs(apart).ragged("reference_logprobs")
            self.assert_close({"": found.values}, {"": expected.values})
        sums, weights = self._trained(cut(joined, [4, 2]))
        other_sums, other_weights = self._trained([apart])
        assert counts(sums) == (6, *counts(other_sums)[1:])
        if self.has_distributions:  # What a fake makes of a row is a digest of all of it.
            self.assert_close(metric_weights(sums), metric_weights(other_sums))
            self.assert_close(weights, other_weights)

    def test_likeliest_tokens_are_aligned_with_masked_tokens(self) -> None:
        batch = samples(self.vocabulary)
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        with started(self.make()) as engine:
            _skip_without_likeliest(engine)
            whole, plain = engine.top_logprobs(batch, 3), engine.logprobs(batch)
            parts = Batch.concat([engine.top_logprobs(part, 3) for part in cut(shuffled, [5, 7])]).select(batch.ids)
        num_masked = np.add.reduceat(batch.ragged("loss_mask").values.astype(np.int64), batch.ragged("tokens").offsets[:-1])
        ids, top = whole.ragged(REFERENCE_TOP_IDS), whole.ragged(REFERENCE_TOP_LOGPROBS)
        assert ids.values.dtype == np.int32
        assert ids.values.shape == (num_masked.sum(), 3)
        assert top.values.dtype == np.float32
        assert top.values.shape == (num_masked.sum(), 4)
        assert np.array_equal(ids.lengths, num_masked)
        assert np.array_equal(top.lengths, num_masked)
        assert np.array_equal(ids.values, parts.ragged(REFERENCE_TOP_IDS).values)
        self.assert_close({"": top.values}, {"": parts.ragged(REFERENCE_TOP_LOGPROBS).values})
        self.assert_close({"": whole.ragged("reference_logprobs").values}, {"": plain.ragged("reference_logprobs").values})
        if not self.is_exact:
            np.testing.assert_allclose(np.exp(top.values).sum(1), 1, atol=1e-5)

    def test_a_divergence_over_likeliest_tokens_does_not_depend_on_how_a_mini_batch_is_cut(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            _skip_without_likeliest(engine)
            found = engine.top_logprobs(batch, 3)
        top = found.ragged(REFERENCE_TOP_LOGPROBS)  # Of other weights: its own would leave no gradient.
        batch = batch.join(found).with_columns(**{REFERENCE_TOP_LOGPROBS: Ragged(top.values[::-1].copy(), top.offsets)})
        results = [self._trained(cut(batch, sizes), objective=DISTILL) for sizes in ([12], [5, 7], [1] * 12)]
        (first_sums, first_weights), *others = results
        for sums, weights in others:
            self.assert_close(metric_weights(sums), metric_weights(first_sums))
            self.assert_close(weights, first_weights)

    def test_with_a_sampling_mask_everything_is_among_the_tokens_that_were_left(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            masks, expected = drawn_from(batch, engine.top_logprobs(batch, 5))
            masked = batch.with_columns(sampling_mask=masks)
            found = engine.logprobs(masked)
            with pytest.raises(EngineError, match="sampling mask"):
                engine.top_logprobs(masked, 2)
        if not self.has_distributions:
            assert distance(self._trained([masked])[1], self._trained([batch])[1]) > 0
            return
        at = found.ragged("reference_logprobs").values[batch.ragged("loss_mask").values.astype(bool)]
        np.testing.assert_allclose(at, expected, atol=1e-4)
        said = found.ragged("reference_logprobs")
        sampled = masked.with_columns(logprobs=Ragged(said.values.astype(np.float32) - np.float32(0.1), said.offsets))
        results = [self._trained(cut(sampled, sizes)) for sizes in ([12], [5, 7], [1] * 12)]
        assert abs(results[0][0].metrics["ratio"] / results[0][0].num_tokens - math.exp(0.1)) < 1e-4
        (first_sums, first_weights), *others = results
        for sums, weights in others:
            self.assert_close(metric_weights(sums), metric_weights(first_sums))
            self.assert_close(weights, first_weights)
        assert distance(self._trained([sampled.without(["sampling_mask"])])[1], first_weights) > self.tolerance

    def test_demonstrations_are_tokenised_with_the_mask_on_the_target(self) -> None:
        ids = make_ids(0, 3)
        batch = Batch(ids, {"prompt": Ragged.texts(["1+1=", "2+2=", "10+7="]), "target": Ragged.texts(["2", "4", "17"])})
        with started(self.make()) as engine:
            lengths = engine.num_training_tokens(batch)
            sums = engine.accumulate(batch, NLL)
        assert len(lengths) == 3
        assert sums.num_context_tokens == lengths.sum()
        # At least one token for each target, and the end of the sequence.
        assert 6 <= sums.num_tokens < sums.num_context_tokens

    def test_lengths_of_samples_are_those_of_their_tokens(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            assert np.array_equal(engine.num_training_tokens(batch), batch.ragged("tokens").lengths)

    def test_a_column_that_the_loss_needs_and_the_batch_lacks_is_named(self) -> None:
        with started(self.make()) as engine, pytest.raises(EngineError, match="advantages"):
            engine.accumulate(samples(self.vocabulary).without(["advantages"]), PPO)

    def test_a_batch_without_masked_tokens_adds_nothing(self) -> None:
        batch = samples(self.vocabulary)
        mask = batch.ragged("loss_mask")
        empty = batch.with_columns(loss_mask=Ragged(np.zeros_like(mask.values), mask.offsets))
        with started(self.make()) as engine:
            assert engine.accumulate(empty, PPO).num_tokens == 0
            with pytest.raises(EngineError, match="no gradient"):
                engine.apply(RECIPE, 1.0)

    def test_a_skipped_step_leaves_weights_and_optimiser_as_they_were(self) -> None:
        batch = samples(self.vocabulary)
        mask = batch.ragged("loss_mask")
        empty = batch.with_columns(loss_mask=Ragged(np.zeros_like(mask.values), mask.offsets))
        found = []
        for skips in (False, True):
            with started(self.make()) as engine:
                for _ in range(2):
                    engine.accumulate(batch, PPO)
                    rate = engine.apply(WARMED, 3.0)["lr"]
                    before = copied(engine)
                    if skips:
                        engine.accumulate(empty, PPO)
                        engine.discard()
                        assert distance(copied(engine), before) == 0
                found.append((rate, copied(engine)))
        assert found[0][0] == found[1][0], "no rate is used up"
        self.assert_close(found[1][1], found[0][1])

    def test_an_engine_leaves_the_device_and_comes_back(self) -> None:
        batch = samples(self.vocabulary)
        with started(self.make()) as engine:
            engine.accumulate(batch, PPO)
            engine.apply(RECIPE, 1.0)
            engine.offload()
            engine.onload()
            engine.accumulate(batch, PPO)
            engine.apply(RECIPE, 1.0)
            moved = copied(engine)
        with started(self.make()) as engine:
            for _ in range(2):
                engine.accumulate(batch, PPO)
                engine.apply(RECIPE, 1.0)
            self.assert_close(copied(engine), moved)

    def test_stopping_twice_is_harmless(self) -> None:
        engine = self.make()
        engine.start()
        engine.stop()
        engine.stop()

    def assert_close(self, found: Weights, expected: Weights) -> None:
        difference = distance(found, expected)
        assert difference == 0 if self.is_exact else difference <= self.tolerance

    def _trained(self, micro_batches: Sequence[Batch], denominator: float = 3.0, objective: Objective = PPO) -> tuple[Sums, Weights]:
        # The rate is a thousand times eps's share: Adam's first step would hide the size of a gradient behind its sign.
        with started(self.make()) as engine:
            sums = [engine.accumulate(batch, objective) for batch in micro_batches]
            engine.apply(LINEAR, denominator)
            return added(sums), copied(engine)


def _skip_without_likeliest(engine: TrainEngine) -> None:
    if type(engine).top_logprobs is TrainEngine.top_logprobs:
        pytest.skip(f"the train engine {engine.name!r} gives no log-probabilities of likeliest tokens")


NEXT = AdamW(lr=3e-3, warmup_steps=2, schedule="cosine", total_steps=9)
LINEAR = AdamW(lr=1.0, eps=10.0, max_grad_norm=0.0)
"""With an `eps` far above the gradient, a step is nearly proportional to it."""


def samples(vocabulary: int, *, num_prompts: int = 3, n: int = 4, seed: int = 0) -> Batch:
    """Make groups with shared prompts, ragged responses, and a tool's text inside some of them."""
    rng = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(num_prompts):
        prompt = rng.integers(2, vocabulary, rng.integers(1, 9))
        for index in range(n):
            response = rng.integers(2, vocabulary, rng.integers(1, 14))
            mask = np.ones(len(response), bool)
            if index == 1:
                mask[len(mask) // 3 : len(mask) // 2] = False
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.concatenate([np.zeros(len(prompt), bool), mask]))
    ids = make_ids(5, num_prompts, n)
    mask_column = Ragged.of(masks, bool)
    behaviour = np.where(mask_column.values, -rng.random(len(mask_column.values)) * 4, 0).astype(np.float32)
    return Batch(
        ids,
        {
            "tokens": Ragged.of(tokens, np.int32),
            "loss_mask": mask_column,
            "logprobs": Ragged(behaviour, mask_column.offsets),
            "advantages": rng.normal(size=len(ids)).astype(np.float32),
        },
    )


def in_pairs(batch: Batch) -> Batch:
    """The same tokens, two samples of a group to a row, as an episode's two conversations are."""
    masks, pairs = batch.ragged("loss_mask"), np.arange(0, len(batch) + 1, 2)
    columns = {name: Ragged(column.values, column.offsets[pairs]) for name, column in batch.columns.items() if isinstance(column, Ragged)}
    prompts = [int(np.argmax(masks.row(row))) for row in range(len(batch))]
    segments = [[prompt, length - prompt] for prompt, length in zip(prompts, masks.lengths.tolist(), strict=True)]
    kinds = [[Segment.PROMPT, Segment.GENERATED] * 2 for _ in pairs[1:]]
    lengths = [segments[row] + segments[row + 1] for row in pairs[:-1]]
    return Batch(batch.ids[::2], {**columns, "segment_kinds": Ragged.of(kinds, np.uint8), "segment_lengths": Ragged.of(lengths, np.int32)})


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    edges = np.concatenate(([0], np.cumsum(sizes)))
    return [batch.take(np.arange(start, end)) for start, end in itertools.pairwise(edges)]


def added(sums: Sequence[Sums]) -> Sums:
    names = dict.fromkeys(name for s in sums for name in s.metrics)
    metrics = {name: float(np.sum([s.metrics.get(name, 0.0) for s in sums])) for name in names}
    sequences, tokens, context = (sum(part) for part in zip(*map(counts, sums), strict=True))
    return Sums(sequences, tokens, context, metrics)


def counts(sums: Sums) -> tuple[int, int, int]:
    return sums.num_sequences, sums.num_tokens, sums.num_context_tokens


def metric_weights(sums: Sums) -> Weights:
    return {name: np.array([value]) for name, value in sums.metrics.items()}


def _staged(write: Callable[[SharedWeights], Manifest]) -> tuple[tuple[TensorEntry, ...], dict[str, bytes]]:
    """What a stage says that it holds, and what it holds."""
    with closing(SharedWeights(f"m2flow-suite-{secrets.token_hex(8)}")) as stage:
        tensors = write(stage).tensors
        body = stage.body(max((entry.offset + entry.num_bytes for entry in tensors), default=0))
        return tensors, {entry.name: bytes(body[entry.offset : entry.offset + entry.num_bytes]) for entry in tensors}


def copied(engine: TrainEngine) -> Weights:
    return in_memory(engine.weights())


def in_memory(weights: Iterable[tuple[str, Any]]) -> Weights:
    return {name: np.asarray(tensor.detach().cpu() if hasattr(tensor, "cpu") else tensor).copy() for name, tensor in weights}


def distance(found: Mapping[str, npt.NDArray[Any]], expected: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the largest norm of a difference, relative to the norm of the expected tensor; 0 means equal bits."""
    assert set(found) == set(expected)
    worst = 0.0
    for name, array in expected.items():
        assert found[name].shape == array.shape
        if not np.array_equal(found[name], array):
            difference = float(np.linalg.norm(found[name].astype(np.float64) - array.astype(np.float64)))
            worst = max(worst, difference / max(float(np.linalg.norm(array.astype(np.float64))), 1e-12), 5e-324)
    return worst


@contextmanager
def started(engine: TrainEngine) -> Iterator[TrainEngine]:
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


VALUE = Objective(
    Loss("clipped_value", "m2flow.algorithms.losses:clipped_value", ("values", "returns", "old_values"), options=(("clip", 0.2),))
)
_RECIPE = AdamW(lr=1e-2)


class ScalarHeadSuite:
    """Inherit, define `make`, and let pytest collect the class."""

    is_exact = False
    vocabulary = 32
    tolerance = 1e-4
    """Norm-relative tolerance between two cuttings into micro-batches, where the engine is not exact."""

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
        """Take two steps: after the first, a head that started at zero lets the gradient through."""
        for _ in range(2):
            engine.accumulate(self.batch(), VALUE)
            engine.apply(_RECIPE, 1.0)

    def after(self, micro_batches: Sequence[Batch]) -> Weights:
        """Return the weights after a step on a batch, from a critic whose head is not zero."""
        with started(self.make("value")) as engine:
            self.warm_up(engine)
            for batch in micro_batches:
                engine.accumulate(batch, VALUE)
            engine.apply(LINEAR, 3.0)
            return copied(engine)

    def assert_close(self, found: Weights, expected: Weights) -> None:
        difference = distance(found, expected)
        assert difference == 0 if self.is_exact else difference <= self.tolerance
