"""Tiny model directories for tests: random weights large enough that a wrong attention shows in the logits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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
