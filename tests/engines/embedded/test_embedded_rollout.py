"""The embedded rollout engine computes what transformers' own code computes, and refuses what it would compute wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_config

from m2flow import AdamW, nll
from m2flow.engines.contract import EngineSettings, Generated, Objective, Request
from m2flow.engines.embedded import rollout_engine
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout, embeddings_of
from m2flow.engines.embedded.slot_model import SlotModel
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.models.model_probe import NUM_JUDGED, ModelProbe
from m2flow.errors import EngineError, ModelError, OutOfMemory, PromptTooLong
from m2flow.recipe import Model, Sampling
from m2flow.rollout_scheduling.lengths import StepLengths
from m2flow.rollout_scheduling.predictors import Learned
from m2flow.rollout_scheduling.study import StudyStep, skill_of
from m2flow.samples import Batch, Finish, Ragged, SampleId, make_ids
from m2flow.testing.rollout_suite import continued

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 16}},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Phi3": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "Gemma2": {"initializer_range": 0.1, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 8, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma3Text": {"initializer_range": 0.1, "sliding_window": 64, "head_dim": 8, "query_pre_attn_scalar": 8},
}  # fmt: skip

PROMPTS = ("4=", "90210=", "31415926535=", "77=")


def started(path: str, **settings: Any) -> EmbeddedRollout:
    engine = EmbeddedRollout(Model(path, init="random"), EngineSettings(**settings))
    engine.start()
    return engine


def requests_of(sampling: Sampling, prompts: tuple[str, ...] = PROMPTS, num_per_prompt: int = 1) -> list[Request]:
    ids = make_ids(0, len(prompts), num_per_prompt)
    return [Request(int(i), prompts[k // num_per_prompt], 1000 + k, sampling) for k, i in enumerate(ids)]


def generate(engine: EmbeddedRollout, requests: list[Request]) -> list[Generated]:
    engine.add(requests)
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda sample: sample.id)


def own_logprobs(path: str, sample: Generated, temperature: float = 1.0) -> np.ndarray:
    """Of each generated token, by one plain forward pass over the whole sample: float32 [T]."""
    model = load_model(Model(path, init="random"), device="cpu", attention="eager")
    tokens = torch.tensor(np.concatenate([sample.prompt_tokens, sample.tokens])[None].astype(np.int64))
    with torch.no_grad():
        logits = model(tokens).logits[0, len(sample.prompt_tokens) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[0, len(sample.prompt_tokens) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers_generate(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path, **ARCHITECTURES[kind])
    done = generate(started(path), requests_of(Sampling(20, temperature=0.0)))
    model = load_model(Model(path, init="random"), device="cpu", attention="eager")
    for sample in done:
        prompt = torch.tensor(sample.prompt_tokens[None].astype(np.int64))
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert theirs[0, prompt.shape[1] :].tolist() == sample.tokens.tolist()
        np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample), atol=1e-4)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logprobs_are_those_of_the_tempered_model_before_truncation(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path, **ARCHITECTURES[kind])
    sampling = Sampling(20, temperature=0.7, top_k=6, top_p=0.8, min_new_tokens=10)
    done = generate(started(path), requests_of(sampling, num_per_prompt=3))
    for sample in done:
        np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample, temperature=0.7), atol=1e-4)
    assert len({sample.tokens.tobytes() for sample in done}) > 6


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_embedding_of_a_prompt_is_the_direction_of_its_last_hidden_state(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_config(kind, tmp_path, **ARCHITECTURES[kind])
    model = load_model(Model(path, init="random"), device="cpu", attention="eager")
    requests = requests_of(Sampling(4))
    engine = started(path)
    together = engine.embeddings(requests)
    with torch.no_grad():
        prompts = [torch.tensor([load_tokenizer(Model(path)).encode_prompt(prompt)]) for prompt in PROMPTS]
        own = np.stack([model.base_model(prompt).last_hidden_state[0, -1].numpy() for prompt in prompts])
    np.testing.assert_allclose(together, own / np.linalg.norm(own, axis=1, keepdims=True), atol=1e-5)
    monkeypatch.setattr(rollout_engine, "_MOST_TOGETHER", 12)  # The first two, 6 tokens each with padding; then each by itself.
    np.testing.assert_allclose(engine.embeddings(requests), together, atol=1e-5)


@pytest.mark.slow
def test_lengths_that_follow_what_prompts_say_are_predicted_from_embeddings_and_not_from_prompt_lengths(tmp_path: Path) -> None:
    """The model has learned to repeat the last digit, the larger ones more often; all prompts are equally long."""
    model, dice = Model(save_config("Qwen2", tmp_path), init="random"), np.random.default_rng(0)
    trainer, engine = EmbeddedTrain(model, EngineSettings()), EmbeddedRollout(model, EngineSettings())
    trainer.start()
    engine.start()

    def prompts() -> list[str]:
        return [f"{number:05d}=" for number in dice.integers(0, 100_000, 64)]

    for _ in range(120):
        texts = prompts()
        targets = [text[-2] * (2 + 3 * int(text[-2])) for text in texts]
        sums = trainer.accumulate(
            Batch(make_ids(0, 64), {"prompt": Ragged.texts(texts), "target": Ragged.texts(targets)}), Objective(nll())
        )
        trainer.apply(AdamW(5e-3), sums.num_tokens)
    engine.load_weights(trainer.weights(), 1)
    steps = []
    for _ in range(3):
        requests = requests_of(Sampling(50), tuple(prompts()), num_per_prompt=2)
        told = [json.dumps(row.tolist()) for row in engine.embeddings(requests[::2])]
        lengths = np.array([len(sample.tokens) for sample in generate(engine, requests)])
        steps.append(StudyStep(StepLengths.of([6] * 64, lengths.reshape(64, 2)), difficulties=told))
    blind, predictor = Learned(), Learned()
    assert abs(skill_of(blind, [StudyStep(step.samples) for step in steps], cap=50).gain) < 0.05
    assert skill_of(predictor, steps, cap=50).gain > 0.3
    assert (blind.gain, predictor.gain > 0.6) == (0.0, True)


def test_wide_hidden_states_are_reduced_to_a_few_numbers_that_keep_their_angles() -> None:
    dice = np.random.default_rng(3)
    hidden = dice.standard_normal((50, 1000)).astype(np.float32) + 2 * dice.standard_normal((50, 1)).astype(np.float32)
    few = embeddings_of(hidden)
    assert few.shape == (50, 32)
    np.testing.assert_allclose(embeddings_of(hidden[:3] * 7), few[:3], atol=1e-5)
    own = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    errors = np.abs(few @ few.T / 32 - own @ own.T)
    assert errors.mean() < 0.25


def test_an_engine_that_runs_out_of_memory_over_prompts_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = started(save_config("Qwen2", tmp_path)), requests_of(Sampling(6))
    expected = [sample.tokens.tolist() for sample in generate(engine, requests)]

    def full(self: SlotModel, sequences: object) -> object:
        raise MemoryError

    monkeypatch.setattr(SlotModel, "last_hidden", full)
    with pytest.raises(OutOfMemory, match="while prompts were embedded"):
        engine.embeddings(requests)
    assert [sample.tokens.tolist() for sample in generate(engine, requests)] == expected


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral", "Gemma2"])
def test_deterministic_decoding_computes_the_same_model(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path, **ARCHITECTURES[kind])
    sampling = Sampling(20, temperature=0.7, top_k=6)
    for sample in generate(started(path, deterministic=True), requests_of(sampling, num_per_prompt=3)):
        np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample, temperature=0.7), atol=1e-4)


def test_the_cache_grows_past_its_first_size(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path, max_position_embeddings=512)
    sampling = Sampling(200, min_new_tokens=200)
    (sample,) = generate(started(path), requests_of(sampling, prompts=PROMPTS[1:2]))
    np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample), atol=1e-4)


def test_rows_of_different_sampling_do_not_mix(tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path))
    kinds = [
        Sampling(12, temperature=0.0),
        Sampling(7, top_k=2),
        Sampling(3, temperature=1.5),
        Sampling(12, top_p=0.3, stop_token_ids=(5,)),
    ]
    requests = [Request(SampleId(0, k, 0).pack(), "12=", 5, sampling) for k, sampling in enumerate(kinds)]
    together = generate(engine, requests)
    for request, sample in zip(requests, together, strict=True):
        (alone,) = generate(engine, [request])
        assert alone.tokens.tolist() == sample.tokens.tolist()
        assert alone.finish is sample.finish


def test_a_later_request_with_more_stop_tokens_stops_nobody_else(tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path))
    requests = requests_of(Sampling(30), num_per_prompt=8)
    alone = generate(engine, requests)
    assert any(0 in sample.tokens[:-1] for sample in alone)  # the id that a careless padding of stop tokens would take
    engine.add(requests)
    done = engine.step()
    engine.add([Request(SampleId(1, 0, 0).pack(), "12=", 5, Sampling(2, stop_token_ids=(5, 6, 7)))])
    done += generate(engine, [])
    together = sorted(done, key=lambda sample: sample.id)[: len(alone)]
    assert [sample.tokens.tolist() for sample in together] == [sample.tokens.tolist() for sample in alone]


def test_a_shared_prompt_goes_through_the_model_once(tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path))
    num_tokens: list[int] = []
    assert engine._model is not None
    engine._model._module.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: num_tokens.append(inputs[0].numel()))
    engine.add(requests_of(Sampling(4, min_new_tokens=4), prompts=("4711=", "12="), num_per_prompt=8))
    engine.step()
    engine.step()
    assert num_tokens == [5 + 3, 16]


def test_admission_keeps_to_the_memory_for_keys_and_values(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path)
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    engine = started(path, options={"kv_budget_bytes": 3 * 16 * per_token})
    engine.add(requests_of(Sampling(4, min_new_tokens=4), num_per_prompt=2))
    engine.step()
    assert engine._decoder is not None
    assert engine._decoder.num_running == 3
    assert len(generate(engine, [])) == 8


def test_requests_that_make_no_sense_are_named(tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path))
    with pytest.raises(PromptTooLong, match=r"p3/1: .* 64 tokens .*context of 64"):
        engine.add([Request(SampleId(0, 3, 1).pack(), "1" * 64, 0, Sampling(1))])
    with pytest.raises(EngineError, match="the prompt has no tokens"):
        engine.add([Request(0, "", 0, Sampling(2))])
    with pytest.raises(EngineError, match=r"token ids outside of 0\.\.13"):
        engine.add([Request(0, (3, 14), 0, Sampling(2))])
    with pytest.raises(EngineError, match="a prefix of 1 tokens with 0 log-probabilities"):
        engine.add([Request(0, "1=", 0, Sampling(2), prefix=(4,))])
    assert engine.num_unfinished == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_response_ends_with_the_context(tmp_path: Path, deterministic: bool) -> None:
    engine = started(save_config("Qwen2", tmp_path), deterministic=deterministic)
    sampling = Sampling(100, ignore_eos=True, min_new_tokens=80)
    (whole,) = generate(engine, [Request(0, "1" * 50, 1, sampling)])
    assert (len(whole.tokens), whole.finish) == (14, Finish.LENGTH)
    engine.add([Request(0, "1" * 50, 1, sampling)])
    for _ in range(5):
        engine.step()
    (part,) = engine.abort([0])
    (resumed,) = generate(engine, [continued(Request(0, "1" * 50, 1, sampling), part, len(part.tokens))])
    assert (resumed.tokens.tolist(), resumed.finish) == (whole.tokens.tolist(), Finish.LENGTH)


def test_half_loaded_weights_are_not_used(tmp_path: Path) -> None:
    engine = started(save_config("Qwen2", tmp_path, tie_word_embeddings=True))
    held = list(engine.weights())
    assert "lm_head.weight" not in dict(held)
    with pytest.raises(EngineError, match=r"missing model\.norm\.weight, unknown nothing"):
        engine.load_weights([(name, tensor) for name, tensor in held if name != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match="mixture of weights"):
        generate(engine, requests_of(Sampling(2)))
    engine.load_weights([*held, ("lm_head.weight", held[0][1].numpy())], 1)
    assert engine.version == 1


def test_an_engine_says_when_it_is_not_ready(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path)
    engine = EmbeddedRollout(Model(path, init="random"), EngineSettings())
    with pytest.raises(EngineError, match="not started"):
        engine.step()
    with pytest.raises(EngineError, match=r"no option rows\n.*It has max_context"):
        started(path, options={"rows": 2})
    with pytest.raises(EngineError, match="deterministic_rows of the embedded rollout engine is 0"):
        started(path, deterministic=True, options={"deterministic_rows": 0})
    engine = started(path)
    engine.offload()
    with pytest.raises(EngineError, match="offloaded"):
        engine.step()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rotary embeddings"),
    ("Mamba", {"state_size": 4}, "can't run MambaForCausalLM"),
    ("Bloom", {"n_head": 4, "n_layer": 2}, "can't run BloomForCausalLM"),
    ("DiffLlama", {}, "calls an attention twice in a pass"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(kind: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises((EngineError, ModelError), match=reason):
        started(save_config(kind, tmp_path, **changes))


def test_a_window_as_long_as_the_context_is_served(tmp_path: Path) -> None:
    path = save_config("Mistral", tmp_path, sliding_window=24)
    (sample,) = generate(started(path, options={"max_context": 24}), requests_of(Sampling(16, min_new_tokens=16), prompts=("4711=",)))
    np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample), atol=1e-4)


def test_windows_longer_than_the_probe_are_the_models_own(tmp_path: Path) -> None:
    path = save_config("Mistral", tmp_path, sliding_window=150, max_position_embeddings=512)
    sampling = Sampling(200, min_new_tokens=200)
    for sample in generate(started(path), requests_of(sampling, prompts=PROMPTS[:2])):
        np.testing.assert_allclose(sample.logprobs, own_logprobs(path, sample), atol=1e-4)


def test_a_window_that_the_config_names_and_no_layer_shows_is_refused(tmp_path: Path) -> None:
    path = save_config("Llama", tmp_path, max_position_embeddings=512, sliding_window=256)
    with pytest.raises(EngineError, match=r"sliding_window=256.*mask.*\n.*max_context"):
        started(path)
    started(path, options={"max_context": 256})


def test_a_wrong_window_shows_in_half_precision_too(tmp_path: Path) -> None:
    path = save_config("Mistral", tmp_path, sliding_window=8)
    model = load_model(Model(path, init="random", dtype="bfloat16"), device="cpu", attention="eager")
    probe = ModelProbe(model, "the engine", 64, lambda tokens: model(input_ids=tokens, use_cache=False).logits)
    probe.judge(probe.wanted)
    model.config.sliding_window = 64
    with torch.no_grad():
        all_seen = [model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0, -NUM_JUDGED:] for row in probe.sequences]
    with pytest.raises(EngineError, match="its logits differ by"):
        probe.judge(all_seen)


def test_a_mixture_of_experts_does_not_claim_to_be_deterministic(tmp_path: Path) -> None:
    path = save_config("Qwen3Moe", tmp_path, **ARCHITECTURES["Qwen3Moe"])
    with pytest.raises(EngineError, match="mixture of experts"):
        started(path, deterministic=True)


def test_the_end_token_stops_a_sample_and_stays_in_it(tmp_path: Path) -> None:
    done = generate(started(save_config("Qwen2", tmp_path)), requests_of(Sampling(40), num_per_prompt=16))
    stopped = [sample for sample in done if sample.finish is Finish.STOP]
    assert stopped
    for sample in stopped:
        assert sample.tokens[-1] == 1
        assert "<eos>" not in sample.text
    assert all(1 not in sample.tokens for sample in done if sample.finish is Finish.LENGTH)
