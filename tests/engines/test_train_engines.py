"""Both train engines pass the suite; the embedded one computes what a plain padded Hugging Face forward pass does."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, SMALL, VOCABULARY, write_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import m2flow
from m2flow import Correction, Dataset, PerSequence, Policy, flow, nll
from m2flow.algorithms.losses import correction_weights, sequence_sum
from m2flow.engines.contract import RATIO_COUNT, EngineSettings, Objective, TrainEngine, ratio_quantiles
from m2flow.engines.embedded.trainer import EmbeddedTrain, logprobs_at, most_likely, token_logprobs
from m2flow.engines.models import model_probe, packing
from m2flow.engines.models.optimizers import Optimizers, orthogonal, unpacked_state
from m2flow.engines.registry import check_eight_bit
from m2flow.errors import EngineError, MissingExtra, ModelError, OpError, OptionError, OutOfMemory
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.update_semantics import UpdateTally, objective, training_rows
from m2flow.micro.worker.out_of_memory import MiniBatch
from m2flow.recipe import SGD, AdamW, AdamW8bit, Loss, Model, Muon, Optimizer, WeightGroup, check_optimizer
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.testing import train_suite
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.train_suite import DISTILL, LINEAR, PPO, RECIPE, TrainEngineSuite, copied, cut, distance, samples, started

NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]())


class TestFake(TrainEngineSuite):
    is_exact = True
    has_distributions = False

    def make(self) -> TrainEngine:
        return FakeTrain(Model("", seed=1), EngineSettings())

    def test_samples_that_change_places_change_the_weights(self) -> None:
        batch = samples(self.vocabulary)
        renamed = Batch(batch.ids[::-1].copy(), batch.columns)
        assert distance(self._trained([renamed])[1], self._trained([batch])[1]) > 0


class TestEmbedded(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take_model(self, model: Model) -> None:
        self.model = model

    def make(self) -> TrainEngine:
        return EmbeddedTrain(self.model, EngineSettings())


class TestEmbeddedDeterministic(TestEmbedded):
    def make(self) -> TrainEngine:
        return EmbeddedTrain(self.model, EngineSettings(deterministic=True))

    def test_sums_say_how_many_tokens_were_computed_with_others(self) -> None:
        batch, found = samples(VOCABULARY), {}
        for shares in (True, False):
            with started(EmbeddedTrain(self.model, EngineSettings(options={"share_prompts": shares}))) as engine:
                found[shares] = engine.accumulate(batch, PPO)
        packed = packing.pack_rows(batch, device="cpu", share_prompts=True)
        assert found[True].num_shared_tokens == packed.num_shared > 0
        assert found[False].num_shared_tokens == 0
        assert found[True].metrics == pytest.approx(found[False].metrics, rel=1e-5)
        assert set(found[True].metrics) == set(found[False].metrics)

    def test_the_order_of_rows_inside_a_micro_batch_does_not_change_a_bit(self) -> None:
        batch = samples(VOCABULARY)
        results = []
        for rows in (np.arange(len(batch)), np.random.default_rng(1).permutation(len(batch))):
            with started(self.make()) as engine:
                engine.accumulate(batch.take(rows), PPO)
                engine.apply(RECIPE, 1.0)
                results.append(copied(engine))
        assert distance(*results) == 0


def plain_logits(model: Any, row: np.ndarray[Any, Any]) -> Tensor:
    """Hugging Face's own forward pass over one sample: logits [L, V]."""
    output: Tensor = model(input_ids=torch.from_numpy(row.astype(np.int64))[None], use_cache=False).logits[0]
    return output


def plain_padded_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities [T] from one right-padded forward pass with an attention mask."""
    tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
    length = int(tokens.lengths.max())
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    attended, chosen = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i in range(len(batch)):
        row = torch.from_numpy(tokens.row(i).astype(np.int64))
        ids[i, : len(row)], attended[i, : len(row)] = row, 1
        chosen[i, : len(row)] = torch.from_numpy(mask.row(i).astype(bool))
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][chosen[:, 1:]]


def two_models(name: str) -> tuple[Any, Any]:
    """The same weights, once as Hugging Face runs them and once packed."""
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
        built.append(model)
    packing.check_model(built[1])
    return built[0], built[1]


def test_a_process_judges_models_of_the_same_code_and_config_once_and_none_that_it_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[object] = []
    judge = model_probe.ModelProbe.judge

    def refused(probe: model_probe.ModelProbe, computed: object) -> None:
        raise EngineError("its logits differ")

    def noted(probe: model_probe.ModelProbe, computed: Any) -> None:
        judged.append(probe)
        judge(probe, computed)

    def built(**changed: int) -> Any:
        config = CONFIGS["qwen2"]()
        config.update(changed)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()

    monkeypatch.setattr(model_probe, "_KNOWN", set())
    monkeypatch.setattr(model_probe.ModelProbe, "judge", refused)
    with pytest.raises(EngineError, match="differ"):
        packing.check_model(built())
    monkeypatch.setattr(model_probe.ModelProbe, "judge", noted)
    models = [built(), built(), built(intermediate_size=40), built().bfloat16()]
    for model in models:
        packing.check_model(model)
    assert len(judged) == 3
    assert {model.config._attn_implementation for model in models} == {packing.ATTENTION}


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_loss_and_gradient_are_those_of_a_padded_forward_pass(name: str, sizes: list[int], share_prompts: bool) -> None:
    plain, packed_model = two_models(name)
    batch = samples(VOCABULARY)
    expected = plain_padded_logprobs(plain, batch)
    weights = torch.linspace(-1, 2, len(expected))
    (expected * weights).sum().backward()
    found: list[Tensor] = []
    for part in train_suite.cut(batch, sizes):
        packed = packing.pack(part.ids, part.ragged("tokens"), part.ragged("loss_mask"), share_prompts=share_prompts)
        logprobs, _ = token_logprobs(packing.forward_logits(packed_model, packed), packed.targets)
        start = sum(len(values) for values in found)
        (logprobs * weights[start : start + len(logprobs)]).sum().backward()
        found.append(logprobs.detach())
    result = torch.cat(found)
    assert (result - expected).norm() <= 1e-5 * expected.norm()
    assert (gradient(packed_model) - gradient(plain)).norm() <= 1e-5 * gradient(plain).norm()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4))
def test_packing_is_exact_for_any_batch(seed: int, num_prompts: int, n: int) -> None:
    plain, packed_model = two_models("qwen2")
    batch = samples(VOCABULARY, num_prompts=num_prompts, n=n, seed=seed)
    packed = packing.pack(batch.ids, batch.ragged("tokens"), batch.ragged("loss_mask"))
    with torch.no_grad():
        logprobs, _ = token_logprobs(packing.forward_logits(packed_model, packed), packed.targets)
        expected = plain_padded_logprobs(plain, batch)
    assert (logprobs - expected).norm() <= 1e-5 * expected.norm()


def test_a_shared_prompt_goes_through_the_linear_layers_once() -> None:
    tokens = Ragged.of([[5, 6, 7, 8, 9], [5, 6, 7, 4, 3, 2], [5, 6, 7, 9]], np.int32)
    mask = Ragged.of([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1]], bool)
    # Three of the prompt, then all but the last token of each response.
    assert packing.pack(make_ids(0, 1, 3), tokens, mask).num_rows == 3 + 1 + 2 + 0
    assert packing.pack(make_ids(0, 1, 3), tokens, mask).num_shared == 3 + 3
    assert packing.pack(make_ids(0, 3, 1), tokens, mask).num_rows == 3 + 1 + 2 + 0, "of three groups, as a system message"
    assert packing.pack(make_ids(0, 1, 3), tokens, mask, share_prompts=False).num_rows == 4 + 5 + 3


def test_samples_with_different_prompts_share_what_these_begin_with() -> None:
    tokens, mask = Ragged.of([[5, 6, 8], [5, 7, 8]], np.int32), Ragged.of([[0, 0, 1], [0, 0, 1]], bool)
    assert packing.pack(make_ids(0, 1, 2), tokens, mask).num_rows == 3
    assert packing.pack(make_ids(0, 1, 2), Ragged.of([[5, 6, 8], [4, 6, 8]], np.int32), mask).num_rows == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_each_beginning_that_sequences_have_in_common_has_one_row_for_each_of_its_tokens(seed: int, has_experts: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(0, 3, rng.integers(2, 9)) for _ in range(rng.integers(1, 9))], np.int32)
    experts = Ragged(rng.integers(0, 2, (len(tokens.values), 1, 1)).astype(np.int16), tokens.offsets) if has_experts else None
    mask = Ragged(rng.random(len(tokens.values)) < 0.4, tokens.offsets)
    mask.values[tokens.offsets[:-1]] = False
    packed = packing.pack(make_ids(0, len(tokens), 1), tokens, mask, experts=experts)
    seen: dict[tuple[bytes, ...], int] = {}
    for start, end in itertools.pairwise(tokens.offsets.tolist()):
        begun: tuple[bytes, ...] = ()
        for at in range(start, end):
            begun += (tokens.values[at].tobytes() + (b"" if experts is None else experts.values[at].tobytes()),)
            if packed.row_of_token[at] >= 0:
                assert packed.row_of_token[at] == seen.setdefault(begun, len(seen))
    assert packed.num_rows == len(seen)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_branches_and_forks_train_with_what_they_share_once_as_they_would_without(name: str) -> None:
    """A tree: the stem is trained in the parent, and stands unmasked before what each branch said; one of them was branched itself."""
    rng = np.random.default_rng(3)
    stem, limb = rng.integers(2, VOCABULARY, 40), rng.integers(20, VOCABULARY, 17)
    ends = [np.append(2 + i, rng.integers(2, VOCABULARY, size)) for i, size in enumerate((9, 12, 5, 21, 8))]
    paths = [[stem, ends[0]], [stem, ends[1]], [stem, limb, ends[2]], [stem, limb, ends[3]], [stem, limb[:9], ends[4]]]
    tokens = Ragged.of([np.concatenate(path) for path in paths], np.int32)
    starts = [10, len(stem), len(stem), len(stem) + len(limb), len(stem) + 9]
    mask = Ragged.of([np.arange(len(row)) >= start for row, start in zip(map(np.concatenate, paths), starts, strict=True)], bool)
    ids = np.concatenate([make_ids(0, 1, 1), make_ids(1, 1, 4)])
    _, model = two_models(name)
    results = []
    for shares in (True, False):
        model.zero_grad()
        packed = packing.pack(ids, tokens, mask, share_prompts=shares)
        logprobs, _ = token_logprobs(packing.forward_logits(model, packed), packed.targets)
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
        results.append((packed.num_rows, logprobs.detach(), gradient(model)))
    (few, ours, of_ours), (many, theirs, of_theirs) = results
    assert few == len(stem) + len(limb) + sum(len(end) - 1 for end in ends)
    assert few < 0.6 * many
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert (of_ours - of_theirs).norm() <= 1e-6 * of_theirs.norm()


def test_a_mask_on_the_first_token_is_refused() -> None:
    with pytest.raises(EngineError, match="p0/1 selects its first token"):
        packing.pack(make_ids(0, 1, 2), Ragged.of([[5, 6], [5, 6]], np.int32), Ragged.of([[0, 1], [1, 1]], bool))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_buckets_hold_every_sequence_and_are_never_worse_than_one(lengths: list[int]) -> None:
    ordered = np.sort(np.array(lengths))
    buckets = packing.choose_buckets(ordered)
    start = 0
    for num_sequences, padded in buckets:
        assert ordered[start : start + num_sequences].max() == padded
        start += num_sequences
    assert start == len(lengths)
    assert sum(n * padded for n, padded in buckets) <= len(lengths) * ordered.max()


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: transformers.MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64), "AttentionInterface"),
        (lambda: transformers.RobertaConfig(**SMALL, is_decoder=True), "its logits differ by"),
        (lambda: transformers.Lfm2Config(**SMALL, num_key_value_heads=4, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (
            lambda: transformers.LlamaConfig(
                **SMALL, num_key_value_heads=4, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "dynamic rotary embeddings",
        ),
    ],
)
def test_attention_that_would_be_computed_wrongly_is_refused_by_name(config: Callable[[], Any], feature: str, tmp_path: Path) -> None:
    engine = EmbeddedTrain(write_model(tmp_path, config()), EngineSettings())
    with pytest.raises(EngineError, match=feature):
        engine.start()


def test_a_sample_is_refused_where_rotary_embeddings_would_change_with_the_batch(tmp_path: Path) -> None:
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(
        **SMALL, num_key_value_heads=4, original_max_position_embeddings=16, rope_parameters={**factors, "factor": 16.0}
    )
    short, long = (
        Batch(make_ids(0, 1), {"tokens": Ragged.of([[5] * n], np.int32), "loss_mask": Ragged.of([[0] + [1] * (n - 1)], bool)})
        for n in (16, 17)
    )
    with started(EmbeddedTrain(write_model(tmp_path, config), EngineSettings())) as engine:
        assert np.isfinite(engine.logprobs(short).ragged("reference_logprobs").values).all()
        for call in (engine.logprobs, lambda batch: engine.accumulate(batch, PPO)):
            with pytest.raises(EngineError, match=r"p0/0 has 17 tokens, and beyond 16 .*longrope"):
                call(long)


@pytest.mark.parametrize("with_temperature", [False, True])
def test_token_logprobs_and_entropies_have_the_gradients_of_plain_autograd(with_temperature: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    temperature = torch.tensor([0.5, 1, 2, 1, 0.7, 1]) if with_temperature else None
    logp = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    found = token_logprobs(logits, targets, temperature)
    weights = torch.randn(2, 6, generator=generator)
    for outputs in ([0], [1], [0, 1]):
        torch.testing.assert_close([found[i] for i in outputs], [expected[i] for i in outputs])
        grads = [
            torch.autograd.grad(sum((pair[i] * weights[i]).sum() for i in outputs), logits, retain_graph=True) for pair in (found, expected)
        ]
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("with_temperature", [False, True])
def test_log_probabilities_of_further_tokens_and_their_rest_have_the_gradients_of_plain_autograd(
    with_temperature: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2flow.engines.embedded.trainer._CHUNK_ELEMENTS", 14)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, 7, generator=generator)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    temperature = torch.tensor([0.5, 1, 2, 1, 0.7, 1]) if with_temperature else None
    logp = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    ids, top = most_likely(logits.detach(), temperature, 3)
    assert torch.equal(ids, logp.topk(3).indices)
    rest = logp.exp().scatter(1, ids, 0.0).sum(1, keepdim=True).log()
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1), torch.cat((logp.gather(1, ids), rest), 1)
    torch.testing.assert_close(top, expected[2].detach())
    found = logprobs_at(logits, targets, temperature, ids)
    weights = [torch.randn(one.shape, generator=generator) for one in expected]
    for outputs in ([2], [0, 2], [1, 2], [0, 1, 2]):
        torch.testing.assert_close([found[i] for i in outputs], [expected[i] for i in outputs])
        grads = [
            torch.autograd.grad(sum((pair[i] * weights[i]).sum() for i in outputs), logits, retain_graph=True) for pair in (found, expected)
        ]
        torch.testing.assert_close(grads[0], grads[1])


def test_likeliest_tokens_that_a_model_does_not_have_are_refused(model: Model) -> None:
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        with pytest.raises(EngineError, match=r"top_k is 4096, and the model has \d+ tokens"):
            engine.top_logprobs(batch, 4096)
        found = engine.top_logprobs(batch, 2)
        strange = found.ragged("reference_top_ids")
        batch = batch.join(found).with_columns(reference_top_ids=Ragged(strange.values + 4096, strange.offsets))
        with pytest.raises(EngineError, match="same tokenizer"):
            engine.accumulate(batch, DISTILL)


WIDE = {**SMALL, "hidden_size": 40}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen2Config(**WIDE, num_key_value_heads=2, tie_word_embeddings=True),
        transformers.LlamaConfig(**WIDE, num_key_value_heads=4),
        transformers.Gemma2Config(**WIDE, num_key_value_heads=2, head_dim=10, sliding_window=5),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_head_in_chunks_changes_no_number_and_never_has_all_logits(config: Any, is_masked: bool, tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, config), samples(VOCABULARY).with_columns(temperature=np.repeat([0.5, 1.0, 2.0], 4))
    if is_masked:
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            batch = batch.with_columns(sampling_mask=train_suite.drawn_from(batch, engine.top_logprobs(batch, 5))[0])
    loss = Loss("mine", entropy_and_likelihood, ("logprobs", "entropy"))
    results, largest = [], []
    for few in (1 << 20, 3 * VOCABULARY):
        with started(EmbeddedTrain(model, EngineSettings(options={"head_logits": few}))) as engine:
            logprobs = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
            with LargestOfVocabulary() as watched:
                sums = engine.accumulate(batch, Objective(loss))
            engine.apply(LINEAR, 3.0)
            results.append({"logprobs": logprobs, "loss": np.array([sums.metrics["loss"]]), **copied(engine)})
            largest.append(watched.largest)
    assert distance(results[1], results[0]) < 1e-5
    assert largest[0] == sums.num_tokens
    assert largest[1] == (
        sums.num_tokens if config.model_type == "gemma2" else 3
    )  # Gemma's soft cap comes after the head: it needs all logits.


def entropy_and_likelihood(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -logprobs * 0.5 - 0.1 * entropy


class LargestOfVocabulary(TorchDispatchMode):  # type: ignore[misc]
    """Notes the most rows of a tensor [..., rows, V] that an operation gives, the weights' own shape apart."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == VOCABULARY and one.shape[-2] != WIDE["hidden_size"]:
                self.largest = max(self.largest, one.numel() // VOCABULARY)
        return result


@pytest.mark.parametrize("few", [1 << 20, 3 * VOCABULARY])
def test_a_head_in_float32_computes_logits_of_half_precision_as_exactly_as_its_hidden_states(few: int, tmp_path: Path) -> None:
    model, batch = replace(write_model(tmp_path, CONFIGS["qwen2"]()), dtype="bfloat16"), samples(VOCABULARY)
    seen, errors = [], []
    for is_exact in (False, True):
        with started(EmbeddedTrain(model, EngineSettings(options={"head_logits": few, "fp32_head": is_exact}))) as engine:
            assert isinstance(engine, EmbeddedTrain)
            watching = engine._model.lm_head.register_forward_pre_hook(lambda layer, given: seen.append(given[0][0]))
            found = engine.logprobs(batch).ragged("reference_logprobs")
            watching.remove()
            exact = (seen.pop().double() @ engine._model.lm_head.weight.detach().double().T).log_softmax(-1)
            mask = batch.ragged("loss_mask").values.astype(bool)
            chosen = exact.gather(1, torch.from_numpy(batch.ragged("tokens").values[mask].astype(np.int64))[:, None])[:, 0]
            errors.append(float((torch.from_numpy(found.values[mask]).double() - chosen).abs().max()))
            engine.accumulate(batch, PPO)
            assert engine.apply(RECIPE, 3.0)["grad_norm"] > 0
    assert errors[1] < 1e-5 < 1e-4 < errors[0]


def test_norms_by_group_of_weights_are_reported_on_request(model: Model) -> None:
    batch, found = samples(VOCABULARY), {}
    for log_layers in (False, True):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            before = copied(engine)
            engine.accumulate(batch, PPO)
            metrics = engine.apply(replace(RECIPE, log_layers=log_layers), 3.0)
            found[log_layers] = copied(engine)
            assert any("/" in name for name in metrics) == log_layers
    assert distance(found[True], found[False]) == 0
    groups = {name: [] for name in ("embeddings", "layers.0", "layers.1", "rest")}  # The head is tied.
    for name in before:
        groups[next((group for group in groups if f".{group}." in name), "embeddings" if "embed" in name else "rest")].append(name)
    for group, names in groups.items():
        moved, size = (
            math.hypot(*(float(np.linalg.norm(of(name))) for name in names)) for of in (lambda n: found[True][n] - before[n], before.get)
        )
        assert metrics[f"update_ratio/{group}"] == pytest.approx(moved / size, rel=1e-4)
    assert math.hypot(*(metrics[f"grad_norm/{group}"] for group in groups)) == pytest.approx(metrics["grad_norm"], rel=1e-5)
    assert set(metrics) == {"grad_norm", "lr", *(f"{name}/{group}" for name in ("grad_norm", "update_ratio") for group in groups)}


def test_logprobs_follow_the_temperature_that_sampled_the_tokens(model: Model) -> None:
    batch = samples(VOCABULARY).with_columns(temperature=np.repeat([0.5, 0.0, 1.0], 4))
    with started(EmbeddedTrain(model, EngineSettings(options={"logprob_tokens": 20}))) as engine:
        assert isinstance(engine, EmbeddedTrain)
        found = engine.logprobs(batch).ragged("reference_logprobs")
        source = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen2"]())
        source.load_state_dict(dict(engine.weights()), strict=False)
        source.tie_weights()
    for i in range(len(batch)):
        row, mask = batch.ragged("tokens").row(i), batch.ragged("loss_mask").row(i).astype(bool)
        with torch.no_grad():
            scale = [0.5, 1.0, 1.0][i // 4]
            logp = (plain_logits(source.eval(), row) / scale).log_softmax(-1).numpy()
        expected = np.concatenate(([0.0], logp[np.arange(len(row) - 1), row[1:]])) * mask
        np.testing.assert_allclose(found.row(i), expected, atol=2e-5)


def test_metrics_are_sums_over_masked_tokens(model: Model) -> None:
    batch = samples(VOCABULARY)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        own = engine.logprobs(batch).ragged("reference_logprobs")
        on_policy = batch.with_columns(logprobs=own, reference_logprobs=own)
        options = (("kl_coef", 0.1), ("kl", "k3"))
        loss = Loss("ppo_clip", PPO.loss.function, (*PPO.loss.needs, "reference_logprobs"), options=options)
        sums = engine.accumulate(on_policy, Objective(loss))
    mask = batch.ragged("loss_mask").values.astype(bool)
    counts = np.add.reduceat(mask.astype(int), batch.ragged("tokens").offsets[:-1])
    expected = -(np.asarray(batch.dense("advantages"), np.float64) * counts).sum()
    assert sums.metrics["loss"] == pytest.approx(expected, abs=1e-4)
    assert sums.metrics["ratio"] == pytest.approx(sums.num_tokens, rel=1e-5)
    assert sums.metrics["logprob_diff_abs"] == pytest.approx(0, abs=1e-3)
    assert sums.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < sums.metrics["entropy"] <= sums.num_tokens * np.log(VOCABULARY)


def test_a_loss_of_the_users_own_gets_what_it_asked_for(model: Model) -> None:
    seen: dict[str, Tensor] = {}

    def mine(entropy: Tensor, sequence_lengths: Tensor, weight: Tensor, per_token: Tensor, bonus: float) -> Tensor:
        seen.update(sequence_lengths=sequence_lengths, weight=weight, per_token=per_token)
        return -bonus * entropy * weight / sequence_lengths

    batch = samples(VOCABULARY)
    mask = batch.ragged("loss_mask")
    batch = batch.with_columns(weight=np.arange(12), per_token=Ragged(np.arange(len(mask.values)), mask.offsets))
    loss = Loss("mine", mine, ("entropy", "sequence_lengths", "weight", "per_token"), options=(("bonus", 0.5),))
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.accumulate(batch, Objective(loss))
        assert engine.apply(RECIPE, 1.0)["grad_norm"] > 0
    counts = [int(np.count_nonzero(mask.row(i))) for i in range(12)]
    assert seen["sequence_lengths"].tolist() == np.repeat(counts, counts).tolist()
    assert seen["weight"].tolist() == np.repeat(np.arange(12), counts).tolist()
    assert seen["per_token"].tolist() == np.flatnonzero(mask.values).tolist()


def update_with(loss: Loss) -> Call:
    """An update of samples that have their advantages."""

    @flow
    def one_update() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset([{"prompt": "1="}] * 3).take(3), n=4, max_new_tokens=4)
        policy.update(responses, advantages=responses.length, loss=loss)

    return trace(one_update, {})[0].calls[-1]


@pytest.mark.parametrize("denominator", ["sequences", "groups", PerSequence(8)])
@pytest.mark.parametrize("name", ["ppo_clip", "topr", "opmd"])
def test_gradients_over_samples_and_groups_do_not_depend_on_the_cut(model: Model, name: str, denominator: object) -> None:
    call = update_with(getattr(m2flow, name)(denominator=denominator))
    batch, answers = samples(VOCABULARY), []
    for sizes in ([12], [8, 4], [4, 4, 4]):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            tally = UpdateTally()
            for part in cut(batch, sizes):
                rows = training_rows(call, {"samples": part})
                tally.add(engine.accumulate(rows, objective(call)), rows, epoch=0)
            engine.apply(LINEAR, tally.denominator(objective(call).loss))
            answers.append(copied(engine))
    assert max(distance(answer, answers[0]) for answer in answers[1:]) < 1e-5


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "kto"])
def test_losses_on_preferences_do_not_depend_on_the_cut(model: Model, name: str) -> None:
    batch = samples(VOCABULARY, n=2)
    given = {"chosen": np.tile(np.array([1.0, 0.0]), 3), "baseline": np.full(6, 0.5), "reference_logprobs": batch.ragged("logprobs")}
    loss, answers, metrics = getattr(m2flow, name)(), [], []
    for sizes in ([6], [2, 4], [2, 2, 2]):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            tally = UpdateTally()
            for rows in cut(batch.with_columns(**given), sizes):
                tally.add(engine.accumulate(rows, Objective(loss)), rows, epoch=0)
            engine.apply(LINEAR, tally.denominator(loss))
            answers.append(copied(engine))
            tally.stepped({}, tally.denominator(loss))
            metrics.append(tally.metrics())
    assert max(distance(answer, answers[0]) for answer in answers[1:]) < 1e-5
    assert metrics[1] == metrics[2] == pytest.approx(metrics[0], rel=1e-4)
    if name != "kto":  # Pairs of different length count alike.
        assert any(metrics[0]["accuracy"] == pytest.approx(right / 3) for right in range(4))


@pytest.mark.parametrize("needs", [("logprobs", "sequence_ids"), ("logprobs", "sequence_ids", "group_ids")])
def test_what_does_not_fit_is_cut_between_groups_where_the_loss_looks_at_those(model: Model, needs: tuple[str, ...]) -> None:
    room = [100]

    def bounded(logprobs: Tensor, sequence_ids: Tensor, group_ids: Tensor | None = None) -> Tensor:
        if len(sequence_ids.unique()) > room[0]:
            raise MemoryError
        return -logprobs if group_ids is None else sequence_sum(logprobs, group_ids).square()

    objective, answers = Objective(Loss("bounded", bounded, needs, "groups")), []
    for room[0] in (100, 4):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            minibatch = MiniBatch(engine, may_halve=True)
            minibatch.accumulate(samples(VOCABULARY), objective)
            engine.apply(LINEAR, 3.0)
            answers.append(copied(engine))
            assert minibatch.num_halved == (0 if room[0] == 100 else 2)
    assert distance(*answers) < 1e-5
    room[0] = 3
    with started(EmbeddedTrain(model, EngineSettings())) as engine, pytest.raises(OutOfMemory, match="one group of it does not fit"):
        MiniBatch(engine, may_halve=True).accumulate(samples(VOCABULARY), objective)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_weighs_tokens_and_clips_around_the_weights_before(model: Model, level: str) -> None:
    batch, correction = samples(VOCABULARY), Correction(level=level)  # type: ignore[arg-type]
    plain, answers = m2flow.ppo_clip(), []
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        proximal = engine.logprobs(batch).ragged("reference_logprobs")
    batch = batch.with_columns(proximal_logprobs=proximal)
    mask = batch.ragged("loss_mask")
    counts = torch.tensor([int(np.count_nonzero(mask.row(i))) for i in range(12)])
    held = [torch.from_numpy(column.values[mask.values.astype(bool)]) for column in (proximal, batch.ragged("logprobs"))]
    weights, _ = correction_weights(*held, torch.arange(12).repeat_interleave(counts), correction)
    spread = np.zeros(len(mask.values), np.float32)
    spread[mask.values.astype(bool)] = weights.numpy() * np.repeat(np.asarray(batch.dense("advantages")), counts)
    by_hand = batch.with_columns(advantages=Ragged(spread, mask.offsets), logprobs=proximal)
    for rows, loss in ((batch, replace(plain, correction=correction)), (by_hand, plain)):
        for sizes in ([12], [5, 7]):
            with started(EmbeddedTrain(model, EngineSettings())) as engine:
                sums = [engine.accumulate(part, Objective(loss)) for part in cut(rows, sizes)]
                engine.apply(LINEAR, 3.0)
                answers.append(copied(engine))
            assert ("correction_weight" in sums[0].metrics) == (loss.correction is not None)
            counted = {name: sum(part.metrics[name] for part in sums) for name in sums[0].metrics if name.startswith(RATIO_COUNT)}
            found = ratio_quantiles(counted)
            if loss.correction is not None:
                ratios = np.sort((held[0] - held[1]).double().exp().numpy())
                exact = [ratios[math.ceil(share * len(ratios)) - 1] for share in (0.01, 0.5, 0.99)]
                assert np.log([*found.values()]) == pytest.approx(np.log(exact), rel=0.08, abs=1e-4)
    assert max(distance(answer, answers[0]) for answer in answers[1:]) < 1e-5


def test_metrics_of_a_correction_are_told_apart_by_version_age_and_by_place_in_the_response(model: Model) -> None:
    batch, correction = samples(VOCABULARY), Correction(veto=0.02)
    mask = batch.ragged("loss_mask")
    counts = np.add.reduceat(mask.values.astype(int), mask.offsets[:-1])
    ages = np.arange(len(mask.values)) % 6
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        batch = batch.with_columns(proximal_logprobs=engine.logprobs(batch).ragged("reference_logprobs"))
    loss, found = replace(m2flow.ppo_clip(), correction=correction), []
    for sizes in ([12], [5, 7]):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            tally = UpdateTally()
            for rows in cut(batch.with_columns(version_ages=Ragged(ages, mask.offsets)), sizes):
                tally.add(engine.accumulate(rows, Objective(loss)), rows, epoch=0)
            tally.stepped({}, 1.0)
            found.append(tally.metrics())
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    held = [torch.from_numpy(batch.ragged(name).values[mask.values.astype(bool)]) for name in ("proximal_logprobs", "logprobs")]
    weights, of_token = correction_weights(*held, torch.arange(12).repeat_interleave(torch.from_numpy(counts)), correction)
    is_old = torch.from_numpy(ages[mask.values.astype(bool)] >= 4)
    for name in ("rollout_kl", "proximal_kl", "chi_square", "correction_clipped", "correction_vetoed"):
        assert found[0][f"{name}/age_4_up"] == pytest.approx(float(of_token[name][is_old].mean()), rel=1e-4)
        assert found[0][f"{name}/token_0_up"] == pytest.approx(found[0][name], rel=1e-4)  # No response has 16 tokens.
    share = float(weights[is_old].mean() ** 2 / weights[is_old].square().mean())
    assert found[0]["effective_sample_share/age_4_up"] == pytest.approx(share, rel=1e-4)
    assert not any(name.endswith("token_16_up") for name in found[0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bounds_by_version_age_reach_the_update_and_do_not_depend_on_micro_batches(model: Model, level: str) -> None:
    correction = Correction(level=level, upper=(1.2, 0.9, 0.3), lower=(0.5, 0.2))  # type: ignore[arg-type]
    batch, loss = samples(VOCABULARY), replace(m2flow.ppo_clip(), correction=correction)
    mask = batch.ragged("loss_mask")
    selected, ages = mask.values.astype(bool), np.arange(len(mask.values)) % 4
    counts = torch.from_numpy(np.add.reduceat(selected.astype(int), mask.offsets[:-1]))
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        batch = batch.with_columns(proximal_logprobs=engine.logprobs(batch).ragged("reference_logprobs"))
        with pytest.raises(EngineError, match="version_ages"):
            engine.accumulate(batch, Objective(loss))
    batch, means = batch.with_columns(version_ages=Ragged(ages, mask.offsets)), []
    for sizes in ([12], [5, 7]):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            sums = [engine.accumulate(rows, Objective(loss)) for rows in cut(batch, sizes)]
            means.append(sum(one.metrics["correction_weight"] for one in sums) / int(counts.sum()))
    held = [torch.from_numpy(batch.ragged(name).values[selected]) for name in ("proximal_logprobs", "logprobs")]
    d, of_age = (held[0] - held[1]).double(), torch.from_numpy(ages[selected])
    expected = []
    for ratios, old in zip(d.split(counts.tolist()), of_age.split(counts.tolist()), strict=True):
        for ratio, age in zip(ratios, old, strict=True) if level == "token" else [(ratios.sum(), old.max())] * len(ratios):
            lower, upper = [(0.5, 1.2), (0.2, 0.9), (0.2, 0.3), (0.2, 0.3)][int(age)]
            expected.append(min(max(float(ratio.exp()), lower), upper))
    assert means == pytest.approx([np.mean(expected)] * 2, rel=1e-4)


def test_a_tokens_random_number_is_the_same_in_every_micro_batch(model: Model) -> None:
    seen: list[Tensor] = []

    def noisy(logprobs: Tensor, random_numbers: Tensor) -> Tensor:
        seen.append(random_numbers)
        return -logprobs * random_numbers

    batch, loss = samples(VOCABULARY), Objective(Loss("noisy", noisy, ("logprobs", "random_numbers")))
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        for sizes in ([12], [5, 7], [1] * 12):
            found, start = [engine.accumulate(part, loss).metrics["loss"] for part in cut(batch, sizes)], len(seen) - len(sizes)
            assert sum(found) == pytest.approx(engine.accumulate(batch, loss).metrics["loss"], rel=1e-5)
            assert torch.equal(torch.cat(seen[start:-1]) if len(sizes) > 1 else seen[start], seen[-1])
    assert 0 <= seen[-1].min() < seen[-1].max() < 1
    assert len(seen[-1].unique()) == len(seen[-1])


@pytest.mark.parametrize("loss", [m2flow.clip_cov(share=0.5, cov_low=0.0), m2flow.kl_cov(share=0.3)])
def test_losses_of_covariance_choose_the_same_tokens_in_every_micro_batch(model: Model, loss: Loss) -> None:
    batch, answers = training_rows(update_with(loss), {"samples": samples(VOCABULARY)}), []
    for sizes in ([12], [4, 8], [4, 4, 4]):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            sums = [engine.accumulate(part, Objective(loss)) for part in cut(batch, sizes)]
            engine.apply(LINEAR, 3.0)
            answers.append((copied(engine), {name: sum(one.metrics[name] for one in sums) for name in sums[0].metrics}))
    for weights, metrics in answers[1:]:
        assert distance(weights, answers[0][0]) < 1e-5
        assert metrics == pytest.approx(answers[0][1], rel=1e-4)
    assert any(answers[0][1].get(f"group:{name}", 0) > 0 for name in ("stopped", "held"))


def test_a_mean_over_groups_weighs_each_groups_tokens_alike(model: Model) -> None:
    batch = samples(VOCABULARY)
    loss = nll(denominator="groups")
    call = update_with(loss)
    rows = training_rows(call, {"samples": batch})
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        logprobs = engine.logprobs(batch).ragged("reference_logprobs")
        found = engine.accumulate(rows, Objective(loss)).metrics["loss"] / 3
    mask = batch.ragged("loss_mask")
    by_group = [[-logprobs.row(i)[mask.row(i).astype(bool)] for i in range(start, end)] for start, end in batch.group_bounds()]
    assert found == pytest.approx(np.mean([np.concatenate(group).mean() for group in by_group]), rel=1e-5)


def test_a_loss_may_leave_out_tokens_that_an_older_cache_was_read_for_and_those_of_older_weights(model: Model) -> None:
    def fresh(logprobs: Tensor, kv_stale: Tensor, versions: Tensor) -> Tensor:
        return -logprobs * (~kv_stale & (versions > 1))

    batch = samples(VOCABULARY)
    mask, dice = batch.ragged("loss_mask"), np.random.default_rng(0)
    stale, versions = dice.random(len(mask.values)) < 0.3, dice.integers(1, 4, len(mask.values))
    told = batch.with_columns(kv_stale=Ragged(stale, mask.offsets), versions=Ragged(versions, mask.offsets))
    without = batch.with_columns(loss_mask=Ragged(mask.values.astype(bool) & ~stale & (versions > 1), mask.offsets))
    trained = []
    for rows, loss in (
        (told, Loss("fresh", fresh, ("logprobs", "kv_stale", "versions"))),
        (without, Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",))),
        (told, Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",))),
    ):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            engine.accumulate(rows, Objective(loss))
            engine.apply(RECIPE, 100.0)
            trained.append(copied(engine))
    left_out, masked, whole = trained
    assert distance(left_out, masked) < 1e-4 < distance(left_out, whole)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda logprobs: logprobs.sum(), OpError, r"one number a token.* its terms is \[\]"),
        (lambda logprobs: logprobs.detach(), OpError, "no gradient"),
        (lambda logprobs: logprobs / 0, EngineError, "not finite"),
        (lambda logprobs: 1 // 0, OpError, r"ZeroDivisionError.*(?s:.)*test_train_engines.py\", line"),
        (lambda logprobs: (logprobs, {"m": 1.0}), OpError, "m is float"),
        ("m2flow.algorithms.losses:nothing", EngineError, "can't be imported"),
    ],
)
def test_a_loss_that_returns_what_it_may_not_is_refused(model: Model, function: Any, error: type[Exception], message: str) -> None:
    with started(EmbeddedTrain(model, EngineSettings())) as engine, pytest.raises(error, match=message):
        engine.accumulate(samples(VOCABULARY), Objective(Loss("mine", function, ("logprobs",))))


def test_a_gradient_that_is_not_finite_leaves_the_weights_and_is_forgotten() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizers = Optimizers([parameter])
    parameter.grad = torch.tensor([1.0, float("inf")])
    with pytest.raises(EngineError, match="not finite"):
        optimizers.step(RECIPE, 1.0)
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.grad is None


def test_clipping_scales_the_divided_gradient_to_its_bound() -> None:
    # Adam's first step is lr * g / (|g| + eps): with eps above g it shows the size of what it was given.
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([30.0, 40.0])
    recipe = AdamW(lr=1.0, eps=1e6, max_grad_norm=0.5)
    assert Optimizers([parameter]).step(recipe, 10.0) == {"grad_norm": pytest.approx(5.0), "lr": 1.0}
    np.testing.assert_allclose(parameter.detach(), [-0.3e-6, -0.4e-6], rtol=1e-4)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_optimisers_that_differ_in_the_rate_share_moments_as_torch_has_it(kind: type[AdamW] | type[SGD]) -> None:
    given = {"momentum": 0.9} if kind is SGD else {}
    own, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizers = Optimizers([own])
    peer = (torch.optim.SGD if kind is SGD else torch.optim.AdamW)([theirs], lr=1.0, weight_decay=0.0, **given)
    for step in range(1, 6):
        own.grad, theirs.grad = torch.tensor([1.0, -2.0, 0.5]) / step, torch.tensor([1.0, -2.0, 0.5]) / step
        peer.param_groups[0]["lr"] = 0.1 / step
        peer.step()
        assert optimizers.step(kind(lr=0.1 / step, max_grad_norm=100.0 * step, **given), 1.0)["lr"] == 0.1 / step
    torch.testing.assert_close(own, theirs)
    assert [entry["num_steps"] for entry in optimizers.state()] == [5]


def test_optimisers_whose_rate_counts_their_steps_count_their_own() -> None:
    """A warm-up or schedule of a second phase begins anew, and with it the moments."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizers = Optimizers([parameter])

    def rate(recipe: AdamW) -> float:
        parameter.grad = torch.ones(1)
        return optimizers.step(recipe, 1.0)["lr"]

    assert [rate(AdamW(1.0, warmup_steps=2)) for _ in range(3)] == [0.5, 1.0, 1.0]
    assert [rate(AdamW(0.5, warmup_steps=2)) for _ in range(2)] == [0.25, 0.5]
    assert rate(AdamW(1.0, betas=(0.5, 0.9))) == 1.0
    assert [entry["num_steps"] for entry in optimizers.state()] == [3, 2, 1]


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_groups_of_weights_have_a_rate_and_a_decay_of_their_own(kind: type[AdamW] | type[SGD], tmp_path: Path) -> None:
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("layers.0.norm", "layers.0.q", "head", "frozen")}
    groups = [WeightGroup("*norm*", weight_decay=0.0), WeightGroup("head", lr_scale=0.1), WeightGroup("frozen", lr_scale=0.0)]
    recipe = kind(lr=0.1, weight_decay=0.5, max_grad_norm=0.0, warmup_steps=2, groups=groups)
    optimizers = Optimizers(weights.values(), names={id(held): name for name, held in weights.items()})
    alone = {name: (torch.nn.Parameter(torch.ones(2)), replace(recipe, groups=())) for name in weights}
    rates = {"layers.0.norm": (0.1, 0.0), "layers.0.q": (0.1, 0.5), "head": (0.01, 0.5), "frozen": (0.0, 0.5)}
    others = {}
    for name, (held, plain) in alone.items():
        lr, decay = rates[name]
        others[name] = held, Optimizers([held]), replace(plain, lr=lr, weight_decay=decay)
    for step in range(4):
        for name, held in weights.items():
            held.grad, others[name][0].grad = torch.full((2,), step - 0.5), torch.full((2,), step - 0.5)
            others[name][1].step(others[name][2], 1.0)
        assert optimizers.step(recipe, 1.0)["lr"] == pytest.approx(0.05 if not step else 0.1)
        if step == 1:
            saved = optimizers.state()
            optimizers = Optimizers(weights.values(), names={id(held): name for name, held in weights.items()})
            optimizers.load_state(saved)
    for name, held in weights.items():
        torch.testing.assert_close(held, others[name][0])


def test_a_group_without_weights_and_what_is_no_group_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(EngineError, match="no trained weight belongs to the group 'nrom'"):
        Optimizers([weight], names={id(weight): "norm"}).step(AdamW(groups=[WeightGroup("nrom")]), 1.0)
    with pytest.raises(OptionError, match="it is a list of WeightGroup"):
        AdamW(groups={"norm": 0.1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'adamw_8bit' is no optimizer") as caught:
        check_optimizer("adamw_8bit")
    assert "AdamW8bit(lr=...)" in caught.value.now


def step(engine: TrainEngine, batch: Batch, recipe: Optimizer) -> None:
    engine.accumulate(batch, PPO)
    engine.apply(recipe, 3.0)


@NEEDS_TORCHAO
def test_moments_of_8_bits_are_nearly_adamw_and_go_on_from_a_checkpoint(model: Model, tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = [torch.randn(64, 96), torch.randn(100, 100), torch.randn(7)]
    groups = [WeightGroup("1", lr_scale=0.5)]
    given = {kind: kind(1e-2, weight_decay=0.1, groups=groups) for kind in (AdamW, AdamW8bit)}
    found: dict[object, list[torch.nn.Parameter]] = {}
    for kind, recipe in given.items():
        weights = found[kind] = [torch.nn.Parameter(one.clone()) for one in start]
        names = {id(held): str(i) for i, held in enumerate(weights)}
        optimizers, generator = Optimizers(weights, names=names), torch.Generator().manual_seed(1)
        for step in range(6):
            for held in weights:
                held.grad = torch.randn(held.shape, generator=generator)
            optimizers.step(recipe, 2.0)
            if step == 2:
                saved = optimizers.state()
                torch.save(saved, tmp_path / "state")
                optimizers = Optimizers(weights, names=names)
                optimizers.load_state(torch.load(tmp_path / "state", weights_only=True))
                assert str(optimizers.state()) == str(saved)
        bytes_each = sum(tensor.untyped_storage().nbytes() for tensor in optimizers.tensors() if tensor.numel() > 1) / sum(
            one.numel() for one in start
        )
        assert bytes_each == (8 if kind is AdamW else pytest.approx(2 * (6144 * (1 + 1 / 64) + 4 * 10007) / 16151, rel=1e-3))
    for one, eight, plain in zip(start, found[AdamW8bit], found[AdamW], strict=True):
        assert (eight - plain).norm() < 0.05 * (plain - one).norm()
    assert (found[AdamW8bit][0] - found[AdamW][0]).norm() > 0
    torch.testing.assert_close(found[AdamW8bit][1], found[AdamW][1])  # 10,000 is no multiple of 256.


@NEEDS_TORCHAO
def test_a_step_with_moments_of_8_bits_is_no_longer_than_adamw_can_make_it() -> None:
    """Most second moments of the block are rounded to 0: without a bound these weights would go a thousand times as far."""
    weight, few, plain = (torch.nn.Parameter(torch.zeros(16, 256)) for _ in range(3))
    optimizers = [Optimizers([weight]), Optimizers([few], groups={id(few): "embeddings"}), Optimizers([plain])]
    for step in range(40):
        gradient = torch.full((16, 256), 1e-5 if step % 5 == 0 else 0.0)
        gradient[:, 0] = 1.0
        before = weight.detach().clone()
        for held, own, kind in zip((weight, few, plain), optimizers, (AdamW8bit, AdamW8bit, AdamW), strict=True):
            held.grad = gradient.clone()
            own.step(kind(1e-3, max_grad_norm=0.0), 1.0)
        assert (weight - before).abs().max() <= 1e-3 * 0.1 / math.sqrt(1e-3 * (1 - 0.81 / 0.999)) * 1.001
    torch.testing.assert_close(few, plain)


@NEEDS_TORCHAO
def test_a_run_with_moments_of_8_bits_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    large = transformers.Qwen2Config(**{**SMALL, "hidden_size": 64, "intermediate_size": 128}, num_key_value_heads=2)
    model, batch, recipe = write_model(tmp_path, large), samples(VOCABULARY), AdamW8bit(1e-2)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        step(engine, batch, recipe)
        engine.save(str(tmp_path / "saved"))
        held = engine.memory().optimizer
        step(engine, batch, recipe)
        expected = copied(engine)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.load(str(tmp_path / "saved"))
        assert engine.memory().optimizer == held
        step(engine, batch, recipe)
        assert distance(copied(engine), expected) == 0
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        step(engine, batch, AdamW(1e-2))
        assert held < 0.5 * engine.memory().optimizer


def test_moments_of_8_bits_without_their_package_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="torchao") as caught:
        check_eight_bit()
    assert "m2flow[8bit]" in caught.value.now


def test_sgd_is_its_equation() -> None:
    parameter, recipe = torch.nn.Parameter(torch.tensor([1.0, -2.0])), SGD(0.5, momentum=0.5, weight_decay=0.1, max_grad_norm=0.0)
    optimizers, weight, velocity = Optimizers([parameter]), np.array([1.0, -2.0]), np.zeros(2)
    for gradient in (np.array([0.5, 1.0]), np.array([-3.0, 2.0]), np.zeros(2)):
        parameter.grad = torch.tensor(gradient * 4, dtype=torch.float32)
        optimizers.step(recipe, 4.0)
        velocity = 0.5 * velocity + gradient + 0.1 * weight
        weight = weight - 0.5 * velocity
        np.testing.assert_allclose(parameter.detach(), weight, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 4, 5)])
def test_muon_makes_orthogonal_steps_on_matrices_and_those_of_adamw_elsewhere(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(one, generator=generator)) for one in ((5,), shape, (4, 4))]
    matrix, twin = parameters[1], torch.nn.Parameter(parameters[2].detach().clone())
    common = {"weight_decay": 0.5, "max_grad_norm": 0.0}
    optimizers, weight, momentum = Optimizers(parameters, matrices=[matrix]), matrix.detach().clone(), torch.zeros(shape)
    others = Optimizers([twin])
    for _ in range(3):
        gradients = [torch.randn(one.shape, generator=generator) * 1e-25 for one in parameters]
        for parameter, gradient in zip((*parameters, twin), (*gradients, gradients[2]), strict=True):
            parameter.grad = gradient.clone()
        optimizers.step(Muon(0.1, momentum=0.9, eps=1e-30, **common), 1.0)
        others.step(AdamW(0.1, eps=1e-30, **common), 1.0)
        momentum = 0.9 * momentum + gradients[1]
        expected = orthogonal(gradients[1] + 0.9 * momentum)
        assert 0.6 < torch.linalg.svdvals(expected).min() <= torch.linalg.svdvals(expected).max() < 1.3
        left, _, right = torch.linalg.svd((gradients[1] + 0.9 * momentum).double(), full_matrices=False)
        assert (expected * (left @ right)).sum((-2, -1)).min() > 0.9 * expected.square().sum((-2, -1)).max().sqrt()
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(max(shape[-2:])) * expected
        torch.testing.assert_close(matrix.detach(), weight)
        assert torch.equal(parameters[2], twin)


@pytest.mark.parametrize("recipe", [Muon(0.1), SGD(1.0, momentum=0.9), SGD(1.0)], ids=["muon", "momentum", "sgd"])
def test_other_optimisers_go_on_from_a_checkpoint_in_any_micro_batches(model: Model, recipe: Optimizer, tmp_path: Path) -> None:
    batch, weights = samples(VOCABULARY), []
    for sizes, is_loaded in (([12], False), ([5, 7], False), ([12], True)):
        with started(EmbeddedTrain(model, EngineSettings())) as engine:
            for i in range(3):
                for part in cut(batch, sizes):
                    engine.accumulate(part, PPO)
                engine.apply(recipe, 3.0)
                if is_loaded and i == 1:
                    engine.save(str(tmp_path / "checkpoint"))
                    engine.accumulate(batch, PPO)
                    engine.apply(recipe, 1.0)
                    engine.load(str(tmp_path / "checkpoint"))
            weights.append(copied(engine))
    assert distance(weights[1], weights[0]) < 1e-3  # Muon's iterations raise the rounding of small singular values.
    assert distance(weights[2], weights[0]) == 0


def test_a_state_of_another_optimiser_is_refused_where_there_is_adamw_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad, optimizers = torch.ones(2), Optimizers([parameter])
    optimizers.step(SGD(), 1.0)
    with pytest.raises(EngineError, match="has the state of SGD"):
        unpacked_state(optimizers.state()[0], 1)
    parameter.grad = torch.ones(2)
    with pytest.raises(EngineError, match="does not say what its layers are"):
        optimizers.step(Muon(), 1.0)


def test_demonstrations_are_prompt_target_and_end_of_sequence(model: Model) -> None:
    batch = Batch(make_ids(0, 2), {"prompt": Ragged.texts(["1+1=", "2="]), "target": Ragged.texts(["2", "abc"])})
    seen: list[Tensor] = []

    def spy(logprobs: Tensor) -> Tensor:
        seen.append(logprobs)
        return -logprobs

    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        assert engine.num_training_tokens(batch).tolist() == [6, 6]
        sums = engine.accumulate(batch, Objective(Loss("spy", spy, ("logprobs",))))
        # Characters "0".."9" are ids 3..12, "+-*/=" 13..17, "a".. 23...
        tokens = Ragged.of([[4, 13, 4, 17, 5, 1], [5, 17, 23, 24, 25, 1]], np.int32)
        known = Batch(batch.ids, {"tokens": tokens, "loss_mask": Ragged.of([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]], bool)})
        engine.accumulate(known, Objective(Loss("spy", spy, ("logprobs",))))
    assert train_suite.counts(sums) == (2, 6, 12)
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("damage", ["model.safetensors", "m2flow_state.pt", "m2flow_checkpoint.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_refused(model: Model, tmp_path: Path, damage: str, how: str) -> None:
    path = tmp_path / "checkpoint"
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.save(str(path))
        file = path / damage
        content = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2] if how == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        before = copied(engine)
        with pytest.raises(ModelError):
            engine.load(str(path))
        assert distance(copied(engine), before) == 0


def test_a_checkpoint_is_a_hugging_face_model(model: Model, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.accumulate(samples(VOCABULARY), PPO)
        engine.apply(RECIPE, 1.0)
        engine.save(path)
        saved = copied(engine)
    read = transformers.AutoModelForCausalLM.from_pretrained(path)
    for name, array in saved.items():
        assert np.array_equal(read.state_dict()[name].numpy(), array)
    assert transformers.AutoTokenizer.from_pretrained(path)("12").input_ids == [4, 5]
    assert json.loads((Path(path) / "config.json").read_text())["model_type"] == "qwen2"


def test_weights_are_the_models_own_and_a_tied_one_comes_once(model: Model) -> None:
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        names = [name for name, _ in engine.weights()]
        first = dict(engine.weights())["model.embed_tokens.weight"]
        assert "lm_head.weight" not in names
        engine.accumulate(samples(VOCABULARY), PPO)
        before = first.clone()
        engine.apply(RECIPE, 1.0)
        assert not torch.equal(first, before)


def test_preferences_that_were_not_drawn_as_pairs_are_told_how(model: Model) -> None:
    rows = samples(VOCABULARY)
    rows = Batch(rows.ids, {**rows.columns, "chosen": Ragged.texts(["yes"] * len(rows))})
    declared = Loss("mine", lambda logprobs, chosen: logprobs, ("logprobs", "chosen"))
    with (
        started(EmbeddedTrain(model, EngineSettings())) as engine,
        pytest.raises(EngineError, match="'chosen' has not one number") as error,
    ):
        engine.accumulate(rows, Objective(declared))
    assert error.value.now == "Draw dataset.pairs()."
