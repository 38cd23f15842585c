"""Tiny model directories for tests: random weights large enough that a wrong attention shows in the logits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.recipe import Model

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"

_SIZES: dict[str, Any] = {
    "vocab_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def byte_tokenizer(
    folder: Path, *, merges: Sequence[str] = (), special: Sequence[str] = ("<eos>", "<turn>"), adds: str = "", **options: Any
) -> Any:
    """A byte-level BPE tokenizer, saved in the directory: special tokens first, then bytes, then what these merges make of them.

    Args:
        adds: a special token that it puts before every text.
        options: of its tokenizer_config.json: `bos_token`, `chat_template`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate([*special, *alphabet, *("".join(pair) for pair in pairs)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    if adds:
        made.post_processor = processors.TemplateProcessing(single=f"{adds} $A", special_tokens=[(adds, vocab[adds])])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=special[0], additional_special_tokens=list(special[1:]), **options
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_config(kind: str, folder: Path, *, tokenizer: bool = True, **changes: Any) -> str:
    """A directory with the config of a `<kind>Config` from transformers and, if asked, the tokenizer of flows/models/digits."""
    folder.mkdir(parents=True, exist_ok=True)
    getattr(transformers, f"{kind}Config")(**{**_SIZES, "architectures": [f"{kind}ForCausalLM"], **changes}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(DIGITS / name, folder / name)
    return str(folder)


@contextlib.contextmanager
def started_engines(path: str) -> Iterator[dict[bool, EmbeddedRollout]]:
    """Started rollout engines of a directory's model with random weights: one, and at True one with deterministic rows."""
    made = {is_fixed: EmbeddedRollout(Model(path, "random"), EngineSettings(deterministic=is_fixed)) for is_fixed in (False, True)}
    with contextlib.ExitStack() as stack:
        for engine in made.values():
            engine.start()
            stack.callback(engine.stop)
        yield made


VOCABULARY = 32
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=4),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None),
    "window": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=5),
    "softcap": lambda: transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=5, attn_logit_softcapping=0.5),
    "sinks": lambda: transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
}


def write_model(path: Path, config: Any) -> Model:
    """A random model with a tokenizer of one token a character."""
    config.save_pretrained(path)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+-*/=()., abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(path)
    return Model(str(path), init="random", seed=3)


def random_model(directory: Path, head: str) -> Model:
    """The model of a directory with random weights and a head: `value` or `score`."""
    return Model(str(directory), "random", 3, head=head)  # type: ignore[arg-type]


DENSE: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}


def dense_config(name: str, num_layers: int = 3) -> Any:
    """The config of a model without experts: `llama`, `qwen3`, or a Qwen2."""
    sizes = {**DENSE, "num_hidden_layers": num_layers}
    if name == "llama":
        return transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    if name == "qwen3":
        return transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)
    return transformers.Qwen2Config(**sizes, tie_word_embeddings=True)


NUM_EXPERTS = 8
_MIXTURE: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}
_ROUTED: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    **_MIXTURE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


def mixture_config(name: str = "qwen3_moe") -> Any:
    """The config of a mixture of experts, by its `model_type`."""
    kinds: dict[str, Any] = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_MIXTURE, **_ROUTED, head_dim=16, norm_topk_prob=True),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_MIXTURE, **_ROUTED, shared_expert_intermediate_size=16),
        "mixtral": lambda: transformers.MixtralConfig(**_MIXTURE, num_local_experts=4, sliding_window=None),
        "olmoe": lambda: transformers.OlmoeConfig(**_MIXTURE, num_experts=NUM_EXPERTS, num_experts_per_tok=2),
        "deepseek_v2": lambda: transformers.DeepseekV2Config(**_LATENT, n_group=None, topk_group=None, topk_method="greedy"),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**_LATENT, n_group=4, topk_group=2),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **_MIXTURE, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1
        ),
    }
    return kinds[name]()
