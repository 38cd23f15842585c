"""Every kind of causal language model that transformers has, at tiny size, and how far an engine's numbers are from its own."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import DIGITS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from m2flow.engines.contract import EngineSettings, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Ragged, SampleId

VOCABULARY = 64
TOLERANCE = 1e-4
_LENGTHS = ((5, 20), (5, 1), (9, 33), (1, 12), (30, 60))
"""Tokens of a prompt and of its responses; two samples of each."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "n_embd": 32, "d_model": 32, "hidden_dim": 32, "embedding_size": 32,
    "dim_model": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "dff": 64, "d_inner": 64, "ffn_hidden_size": 64,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4, "encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_ff": 64, "rotary_dim": 4,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_target_positions": 128, "max_source_positions": 32,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "moe_topk": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "state_size": 8,
    "time_step_rank": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "lru_width": 32, "attention_window_size": 32, "is_decoder": True, "query_pre_attn_scalar": 8, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "image_size": 16, "patch_size": 4, "num_channels": 3, "use_cache": True,
}  # fmt: skip
_LONG = {"sliding_window": 4096, "attention_chunk_size": 8192, "window_size": 256}
"""Sizes that a family's plain variant gets: beyond its context."""
_CHANGES: dict[str, dict[str, Any]] = {
    "llama4_text": {"attn_temperature_tuning": False},
    "llama4": {"attn_temperature_tuning": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""What a family needs beside, to be built at this size."""
_OWN = ("attention_types",)
"""Arguments of a config that are no attributes of it."""


@dataclass(frozen=True)
class Case:
    """A family, and what its config says beside its sizes."""

    family: str
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.family + "".join(f" {name}={value}" for name, value in self.changes)


def config_of(case: Case) -> Any:
    """Raises whatever transformers raises where the family can't be built at this size."""
    return _tiny(CONFIG_MAPPING[case.family], {**_LONG, **_CHANGES.get(case.family, {}), **dict(case.changes)})


def cases() -> Iterator[Case]:
    """Every family, and of each that has a window or a chunk, some that are shorter than its context."""
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield Case(family)
        if family == "llama4_text":
            yield Case(family, (("attn_temperature_tuning", True),))
        try:
            names = vars(CONFIG_MAPPING[family]().get_text_config())
        except Exception:
            continue
        for name in ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"):
            if name in names:
                extra = (("use_sliding_window", True), ("max_window_layers", 1)) if "use_sliding_window" in names else ()
                yield from (Case(family, ((name, size), *extra)) for size in (6, 32))


def _tiny(kind: Any, changes: dict[str, Any]) -> Any:
    default = kind()
    known = {**_SIZES, **changes}
    held = vars(default)
    if "qk_rope_head_dim" in held or "dots3" in str(getattr(kind, "model_type", "")):
        known["num_key_value_heads"] = 4
    chosen = {name: known[name] for name, value in held.items() if name in known and not isinstance(value, dict | list)}
    chosen |= {
        name: value for name, value in changes.items() if name not in _LONG and name in {*held, *getattr(kind, "attribute_map", {}), *_OWN}
    }
    chosen.setdefault("vocab_size", VOCABULARY)
    for name in getattr(kind, "attribute_map", {}):
        if name in known and name not in chosen and kind.attribute_map[name] not in chosen:
            chosen[name] = known[name]
    for name in kind.sub_configs:
        sub = getattr(default, name, None)
        if sub is not None and name not in chosen:
            chosen[name] = _tiny(type(sub), changes).to_dict()
    return kind(**chosen)


def saved(case: Case, folder: Path) -> Any:
    """The model by transformers' own code, with weights all over the place, that also lies in `folder` with a tokenizer."""
    torch.manual_seed(1)
    config = config_of(case)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > 2e7:
        raise ValueError(f"{size / 1e6:.0f}M weights")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DIGITS / name, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts and responses; neighbours have the same prompt."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCABULARY, length) for length, _ in _LENGTHS for _ in range(2)]
    return [
        (prompts[i // 2 * 2], generator.integers(3, VOCABULARY, length)) for i, length in enumerate(np.repeat([n for _, n in _LENGTHS], 2))
    ]


def own_logprobs(model: Any, tokens: np.ndarray, start: int, temperature: float = 1.0) -> np.ndarray:
    """Of the tokens from `start` on, by one plain pass over this sequence alone."""
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = (model(input_ids=row, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[:-1].gather(1, row[0, 1:, None])[start - 1 :, 0].numpy()


def _ids() -> list[int]:
    return [SampleId(0, i // 2, i % 2).pack() for i in range(2 * len(_LENGTHS))]


def train_gap(model: Any, folder: Path) -> float:
    """The largest difference of a log-probability by the embedded trainer. Raises what its start raises."""
    rows = samples()
    engine = EmbeddedTrain(Model(str(folder)), EngineSettings())
    engine.start()
    tokens = Ragged.of([np.concatenate(row).tolist() for row in rows], np.int32)
    mask = Ragged.of([[False] * len(prompt) + [True] * len(response) for prompt, response in rows], np.bool_)
    found = engine.logprobs(Batch(np.array(_ids(), np.int64), {"tokens": tokens, "loss_mask": mask})).ragged("reference_logprobs")
    engine.stop()
    return max(
        float(np.abs(found.row(i)[len(prompt) :] - own_logprobs(model, np.concatenate((prompt, response)), len(prompt))).max())
        for i, (prompt, response) in enumerate(rows)
    )


def rollout_gap(model: Any, folder: Path) -> float:
    """The same by the embedded rollout engine: of given tokens, and of those that it samples itself."""
    rows = samples()
    engine = EmbeddedRollout(Model(str(folder)), EngineSettings())
    engine.start()
    given = [np.concatenate(row) for row in rows]
    judged = engine.logprobs([row.tolist() for row in given])
    gap = max(float(np.abs(judged[i] - own_logprobs(model, row, 1)).max()) for i, row in enumerate(given))
    sampling = Sampling(40, temperature=0.9)
    prompts = [tuple(prompt.tolist()) for prompt, _ in rows]
    engine.add([Request(i, prompt, 1234 + i, sampling) for i, prompt in zip(_ids(), prompts, strict=True)])
    while engine.num_unfinished:
        for sample in engine.step():
            tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
            own = own_logprobs(model, tokens, len(sample.prompt_tokens), 0.9)
            gap = max(gap, float(np.abs(own - sample.logprobs).max()))
    engine.stop()
    return gap


def outcome(gap: Callable[[Any, Path], float], model: Any, folder: Path) -> str:
    """`equal`, `refused: why`, `wrong: by how much` or `crash: how`."""
    try:
        found = gap(model, folder)
    except (EngineError, ModelError) as error:
        return f"refused: {error.what.split(': ', 1)[-1]}" if error.what and error.now else f"crash: says nothing: {error!r}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    return "equal" if found <= TOLERANCE else f"wrong: {found:.1e}"


def summary(outcomes: Iterable[str]) -> list[str]:
    """How many there are of each, with numbers and names of classes left out."""
    counts = Counter(re.sub(r"\b\w+(Attention|ForCausalLM|Model)\b", "a model", re.sub(r"[\d.]+(e-\d+)?", "N", said)) for said in outcomes)
    return [f"{count:4d}  {said}" for said, count in counts.most_common()]
