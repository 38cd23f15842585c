"""Small tokenizers in the manner of known models, trained on a few lines, so that their merges cross words, newlines and spaces."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Literal

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Manner = Literal["qwen", "llama3", "deepseek", "o200k", "llama2", "phi3", "gemma", "unigram"]

_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, Sequence[str]] = {
    "qwen": [_QWEN],
    "llama3": [_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
    "deepseek": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "o200k": [_O200K],
}
"""What the models' own tokenizers cut a text by, before bytes are merged."""

_LINES = [
    "user\nWhat is 2 + 2?", "assistant\nIt is 4.\n\n", "system\n\nYou are a tool.\n\n\n", "  Let me see.\n\n  So:\n", "\n\n\n\n", "\t\t",
    '{"name": "add", "arguments": {"a": 1, "t": "2"}}\n', '"parameters": {"a": 12, "t": "x y"}}\n', "tool_response\nresult 123\n",
    "developer", "functions.add to=assistant", "analysis final commentary", "It's the model's turn, isn't it?", " I\n I\n", "model\n",
    "</think>\n\n<think>\n",
]  # fmt: skip


@functools.cache
def _merged(manner: Manner) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges that a manner's training gives."""
    tokenizer = Tokenizer(models.BPE())
    if manner in _SPLITS:
        tokenizer.pre_tokenizer = _cut(manner)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer, alphabet = normalizers.Replace(" ", "▁"), []
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|\n+|[^▁\n]+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_LINES * 2, trainer)
    made: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return made["vocab"], [tuple(merge) for merge in made["merges"]]


def _cut(manner: Manner) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[manner]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level(manner: Manner, special: Sequence[str]) -> Tokenizer:
    known, merges = _merged(manner)
    vocab = {token: at for at, token in enumerate([*special, *(token for token in known if token not in special)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = _cut(manner), decoders.ByteLevel()
    return made


def _of_spaces(manner: Manner, special: Sequence[str]) -> Tokenizer:
    """A tokenizer in SentencePiece's manner: spaces are characters, and what is not known is bytes."""
    known, merges = _merged(manner)
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    vocab = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    if manner == "unigram":
        made = Tokenizer(models.Unigram([(token, -0.1 * len(token) ** 0.5 - 5) for token in vocab], unk_id=0, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    if manner == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif manner != "unigram":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps if manner == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    return made


def trained_tokenizer(manner: Manner, special: Sequence[str], chat_template: str | None) -> Any:
    """A tokenizer of transformers with these special tokens, of which the first ends a text."""
    made = (_byte_level if manner in _SPLITS else _of_spaces)(manner, special)
    # Phi-3's take the white space that follows for theirs; those of the others are what they are.
    made.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=manner == "phi3") for token in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=special[0], additional_special_tokens=list(special[1:]), chat_template=chat_template
    )
