"""Tiny model directories for tests: random weights large enough that a wrong attention shows in the logits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import transformers

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


def save_config(kind: str, folder: Path, **changes: Any) -> str:
    """A directory with the config of a `<kind>Config` from transformers and the tokenizer of flows/models/digits."""
    folder.mkdir(parents=True, exist_ok=True)
    getattr(transformers, f"{kind}Config")(**{**_SIZES, "architectures": [f"{kind}ForCausalLM"], **changes}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DIGITS / name, folder / name)
    return str(folder)
