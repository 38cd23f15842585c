"""Small random models of the families that the trainer `megatron` has a place for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import SMALL, write_model

from m2flow.engines.models.hf_model import HEADS, load_model
from m2flow.recipe import Head, Model

_SIZES: dict[str, Any] = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 8}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    # 33 tokens, which two ranks do not divide, and a head that is the embeddings.
    "qwen2": lambda: transformers.Qwen2Config(**{**_SIZES, "vocab_size": 33}, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama3": lambda: transformers.LlamaConfig(
        **_SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True),
    "unnormalised": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=False
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_LATENT, q_lora_rank=None, n_routed_experts=4, n_shared_experts=2, n_group=None, topk_group=None, topk_method="greedy"
    ),
    # Groups of experts, a latent of queries, and scores and rotated numbers that YaRN scales.
    "deepseek_v2_groups": lambda: transformers.DeepseekV2Config(
        **_LATENT,
        q_lora_rank=8,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.0,
        rope_parameters=_YARN,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_LATENT, q_lora_rank=8, n_routed_experts=8, n_group=4, topk_group=2, num_mtp_layers=0, rope_parameters=_YARN
    ),
    "deepseek_v3_halves": lambda: transformers.DeepseekV3Config(
        **{**_LATENT, "first_k_dense_replace": 2},
        q_lora_rank=None,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        rope_interleave=False,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=4, sliding_window=None),
}


def small(name: str, folder: Path, num_layers: int | None = None) -> Model:
    """A model with random weights, and a tokenizer of one token a character. Biases of routers, which start as zeros, are drawn too.

    Args:
        name: of `CONFIGS`; `+1` after it is one layer more, which two stages do not divide.
        num_layers: the first so many alone.
    """
    name, _, more = name.partition("+")
    config = CONFIGS[name]()
    if more:
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": config.num_hidden_layers + int(more), "layer_types": None})
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:num_layers]
    drawn = write_model(folder, config)
    if not name.startswith("deepseek_v3"):
        return drawn
    model = load_model(drawn, device="cpu", attention="eager")
    generator = torch.Generator().manual_seed(3)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return replace(drawn, init="pretrained")


def with_head(name: str, folder: Path, head: Head) -> Model:
    """A critic or a reward model with random weights, none of which is zero."""
    config = CONFIGS[name]()
    config.num_labels = 1
    drawn = write_model(folder, config)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, HEADS[head]).from_config(config)
        for parameter in model.score.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return replace(drawn, init="pretrained", head=head)
