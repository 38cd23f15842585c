"""Each architecture in a real SGLang server: weights that come by a sync make it compute what transformers does with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang_here import NEEDS_SGLANG, OPTIONS
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, RolloutEngine
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.models.trainer_checkpoint import named_weights
from m2flow.engines.servers.sglang import SglangRollout
from m2flow.recipe import Model, Sampling
from m2flow.testing.rollout_suite import generate, make_request, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), NEEDS_SGLANG]

SIZES: dict[str, Any] = {"hidden_size": 64, "max_position_embeddings": 256, "initializer_range": 0.1}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK: dict[str, Any] = {  # Without YaRN a server on a CPU refuses it.
    "rope_parameters": YARN,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": MIXTURE,
    "Llama": {},
    "Mistral": {},
    "Gemma": {"head_dim": 16, "hidden_act": "gelu_python"},  # Exact, as the server has it; published ones have its tanh approximation.
    "DeepseekV2": {**DEEPSEEK, "topk_method": "greedy", "scoring_func": "softmax"},
    "DeepseekV3": {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
GIVEN = [list(range(2, 13)), [12, 5, 5, 5, 9, 2, 7], [3, 4]]
REQUESTS = [make_request(prompt, 0, Sampling(24, temperature=0.0, min_new_tokens=24)) for prompt in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_sync_the_server_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """Given tokens and greedy samples, by weights that came as files, then by others that came as tensors."""
    path = save_config(kind, tmp_path / "model", **SIZES, **KINDS[kind])
    options = {**OPTIONS, "start_timeout_s": 600, "routed_experts": "num_experts_per_tok" in KINDS[kind]}
    with started(lambda _: SglangRollout(Model(path, "random", seed=0), EngineSettings(options=options))) as first:
        check_weights(first, path, seed=1)
        assert isinstance(first, SglangRollout)
        options |= {"url": first.url}
        with started(
            lambda _: SglangRollout(Model(path, "random", seed=0), EngineSettings(options=options, into_server="tensors"))
        ) as other:
            check_weights(other, path, seed=2)


def check_weights(engine: RolloutEngine, path: str, *, seed: int) -> None:
    """The engine is given random weights, and compared with transformers."""
    reference = load_model(Model(path, "random", seed=seed), device="cpu", attention="eager").eval()
    engine.load_weights(named_weights(reference), seed)
    for tokens, found in zip(GIVEN, engine.logprobs(GIVEN), strict=True):
        np.testing.assert_allclose(found, judged(reference, tokens)[0], atol=1e-4)
    stops = load_tokenizer(Model(path, "random")).eos_ids
    for sample in generate(engine, REQUESTS).values():
        tokens = [*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]
        logprobs, routed = judged(reference, tokens, without=stops)
        np.testing.assert_allclose(sample.logprobs, logprobs[len(sample.prompt_tokens) - 1 :], atol=1e-4)
        if sample.routed_experts is not None:
            of_mixtures = sample.routed_experts[:-1, -routed.shape[1] :]  # A layer before them has no experts.
            np.testing.assert_array_equal(np.sort(of_mixtures), np.sort(routed[:-1]))


def judged(model: Any, tokens: list[int], *, without: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """By transformers: the log-probabilities of all tokens but the first, and of a mixture the experts [T, layers, experts of a token].

    Args:
        without: tokens that could not come, as the server has it with `min_new_tokens`.
    """
    mixture = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    with torch.no_grad():
        said = model(input_ids=torch.tensor([tokens]), **mixture)
    said.logits[..., list(without)] = -torch.inf
    logprobs = said.logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    routed = (
        [layer.topk(model.config.num_experts_per_tok).indices for layer in said.router_logits] if mixture else [torch.zeros(len(tokens), 1)]
    )
    return logprobs.numpy(), torch.stack(routed, 1).numpy()
