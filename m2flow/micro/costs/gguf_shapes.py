"""The shape of a model in a .gguf file, from the file's header alone: a few kilobytes, and no package that knows the format.

    file.gguf --gguf_config--> the fields of a config.json --(m2flow.micro.costs.shapes)--> ModelShape

Source:
    The GGUF specification, version 3 (and 2, which has the same header); little-endian files only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from m2flow.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_MOST = 1 << 20
"""Entries of an array, or bytes of a name: more than any file has, so that a broken one ends with an error and not with the memory."""


def gguf_config(file: Path) -> dict[str, object]:
    """What a config.json of the model would say of its sizes; float32, as `m2flow` dequantises it.

    Raises:
        ModelError: the file can't be read, or is no GGUF file.
    """
    try:
        with file.open("rb") as stream:
            return _config(stream, file)
    except (OSError, struct.error, UnicodeDecodeError, _Broken) as error:
        raise ModelError(f"{file} can't be read as a .gguf file: {error}", now="Is it whole?") from None


class _Broken(ValueError):
    pass


def _config(stream: BinaryIO, file: Path) -> dict[str, object]:
    magic, version, num_tensors, num_values = struct.unpack("<4sIQQ", stream.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise _Broken(f"it begins with {magic!r}, version {version}")
    values: dict[str, object] = {}
    for _ in range(_checked(num_values)):
        name = _string(stream)
        (kind,) = struct.unpack("<I", stream.read(4))
        values[name] = _value(stream, kind)
    tensors = [_tensor_name(stream) for _ in range(_checked(num_tensors))]
    architecture = str(values.get("general.architecture", ""))
    config: dict[str, object] = {"model_type": architecture, "torch_dtype": "float32"}
    for theirs, ours in _FIELDS.items():
        if f"{architecture}.{theirs}" in values:
            config[ours] = values[f"{architecture}.{theirs}"]
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = any(name.endswith("attn_q.bias") for name in tensors)
    return config


def _value(stream: BinaryIO, kind: int) -> object:
    """A value; of an array only how long it is."""
    if kind in _SCALARS:
        return struct.unpack(_SCALARS[kind], stream.read(struct.calcsize(_SCALARS[kind])))[0]
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        raise _Broken(f"it has a value of the unknown type {kind}")
    inner, count = struct.unpack("<IQ", stream.read(12))
    if inner in _SCALARS:
        stream.seek(struct.calcsize(_SCALARS[inner]) * _checked(count), 1)
    else:
        skip: Callable[[BinaryIO], object] = _string if inner == _STRING else (lambda of: _value(of, inner))
        for _ in range(_checked(count)):
            skip(stream)
    return count


def _string(stream: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", stream.read(8))
    return stream.read(_checked(size)).decode("utf-8", "replace")


def _tensor_name(stream: BinaryIO) -> str:
    name = _string(stream)
    (num_dimensions,) = struct.unpack("<I", stream.read(4))
    stream.seek(8 * _checked(num_dimensions) + 12, 1)
    return name


def _checked(count: int) -> int:
    if count > _MOST:
        raise _Broken(f"it says that something has {count} parts")
    return count
