"""Export a trained model for other tools: in Hugging Face format, as adapters, or as one GGUF file.

    checkpoint --export_model--> DIR/  config.json, *.safetensors, tokenizer.*  --transformers--> the same weights

    checkpoint/adapter/ --export_adapters--> DIR/  adapter_config.json, adapter_model.safetensors, tokenizer.*
                                                  |
        base model --transformers--> + DIR --peft--> merged --compared--> the whole model of the checkpoint

The directory is written beside its place, loaded from there by transformers (and peft), and compared with the weights that the trainer
saved; only then is it renamed into place. So an exported directory is one that loads.

Limit: adapters need a base with files of its own. One that was drawn at random, or came from a .gguf file, can't be loaded by peft.

A GGUF file, which llama.cpp and what is built on it read, has weights, sizes, tokenizer and chat template.

    directory of a Hugging Face model --write_gguf--> FILE.gguf, read back and compared

Names of tensors and keys, and the order of a tensor's sizes, are those of the format's specification (docs/gguf.md of ggml). Two things
differ from Hugging Face's layout. Vectors are float32, whatever the matrices are. And llama.cpp's `llama` turns neighbouring dimensions of
a head by one angle, where transformers turns dimension i and i + D/2: `_interleaved` puts the rows of queries and keys into that order.

Limits: the families in `_ARCHITECTURES`, full attention, byte-level BPE with a split that llama.cpp has a name for (`_SPLITS`), no
quantisation. llama.cpp does not normalise text to NFC, which Qwen's tokenizer does. Anything else is refused.

Shapes: V vocabulary, H hidden, D dimensions of a head.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.models.trainer_checkpoint import named_weights, parts_of
from m2flow.engines.registry import check_adapters
from m2flow.errors import EngineError, MissingExtra, ModelError, naming_host_errors
from m2flow.recipe import Model

# ---- Hugging Face


_OURS = "m2flow_"
"""Prefix of a checkpoint's files that are for m2flow alone."""


def export_model(checkpoint: Path, out: Path, shard_size: str | None = None) -> dict[str, Tensor]:
    """Export the model of a checkpoint; returns its weights as transformers has loaded them, by their names in the files.

    Args:
        checkpoint: a directory that a trainer wrote, known to be whole.
        out: a directory that is not there yet.
        shard_size: most that a file of weights may have, such as `5GB`; None: as the trainer wrote them.
    Raises:
        ModelError: the checkpoint has no Hugging Face model, or not one that transformers loads as it was saved. EngineError: `out` is
            there already, or can't be written.
    """
    if not (checkpoint / "config.json").is_file():
        kept = ", ".join(sorted(file.name for file in checkpoint.iterdir()))
        raise ModelError(f"{checkpoint} has no Hugging Face model", now=f"Its train engine keeps something else there: {kept}.")
    with put_in_place(out) as fresh:
        fresh.mkdir()
        for file in sorted(checkpoint.iterdir()):
            if file.is_file() and not file.name.startswith(_OURS):
                shutil.copyfile(file, fresh / file.name)
        parts = parts_of(checkpoint)
        if shard_size is not None and not parts:
            parts = saved_weights(fresh)
        if parts:
            for file in fresh.glob("*.safetensors*"):
                file.unlink()
            _written_whole(fresh, parts, shard_size or "50GB")
        weights = loaded_as_saved(fresh)
    return weights


@contextlib.contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """Yield a path beside `out`; the directory made there becomes `out` if nothing is raised, and is removed otherwise.

    Raises:
        EngineError: `out` is there already, or can't be written.
    """
    if out.exists():
        raise EngineError(f"{out} exists already", now="Name another directory, or remove it.")
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    with naming_host_errors(f"{out} can't be written"):
        try:
            fresh.parent.mkdir(parents=True, exist_ok=True)
            yield fresh
            fresh.rename(out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def copy_description(source: Path, into: Path, dtype: torch.dtype) -> None:
    """Make a directory with what a model's has beside its weights; its configuration says this type, and which class loads it."""
    into.mkdir()
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".md")):
            shutil.copyfile(file, into / file.name)
    described = json.loads((source / "config.json").read_text())
    described.pop("torch_dtype", None)  # Its name before `dtype`.
    described["dtype"] = str(dtype).removeprefix("torch.")
    described.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[described["model_type"]]])
    (into / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _written_whole(directory: Path, weights: dict[str, Tensor], shard_size: str) -> None:
    """Write weights as transformers does, in files of at most this size. Raises ModelError: they do not fit the configuration."""
    config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    model.to(next(iter(weights.values())).dtype)  # Of which transformers takes what it writes as the type of the weights.
    if set(weights) - set(model.state_dict()):
        raise ModelError(
            f"{directory} has weights that a {config.model_type!r} model has not",
            now="Export with the release of m2flow and transformers that trained it.",
        )
    model.save_pretrained(str(directory), state_dict=weights, max_shard_size=shard_size)


def loaded_as_saved(directory: Path) -> dict[str, Tensor]:
    """Load a directory by transformers and compare it with its files. Raises ModelError: it does not load, or differs."""
    transformers.logging.disable_progress_bar()
    try:
        kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
        model, report = kind.from_pretrained(str(directory), output_loading_info=True, local_files_only=True)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"transformers {transformers.__version__} can't load what was exported: {error}") from error
    wrong = {name: sorted(report[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if report.get(name)}
    if wrong:
        raise ModelError(f"transformers loads something else than was saved: {wrong}")
    saved = saved_weights(directory)
    held = dict(named_weights(model))
    differing = [
        name for name in saved.keys() | held.keys() if name not in saved or name not in held or not _are_same(saved[name], held[name])
    ]
    if differing:
        raise ModelError(f"transformers holds other weights than were saved: {', '.join(sorted(differing)[:5])}")
    return held


def saved_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory's *.safetensors, by their names there."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit; NaNs count as equal."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


_ADAPTER = "adapter"
_BESIDE = ("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")
"""Prefixes of a tokenizer's files."""
_TOLERANCE = 1e-5
"""Norm-relative, of a merged weight: peft and m2flow may multiply in another order. In half precision it is that type's rounding."""


def export_adapters(checkpoint: Path, out: Path) -> Path:
    """Export the adapters of a checkpoint; returns the base model that they belong to.

    Args:
        checkpoint: a directory that a trainer wrote, known to be whole.
        out: a directory that is not there yet.
    Raises:
        ModelError: the checkpoint has no adapters, their base is nowhere, or peft makes something else of them than was trained.
        EngineError: `out` is there already, or can't be written. MissingExtra: peft is not installed.
    """
    check_adapters()
    if not (checkpoint / _ADAPTER).is_dir():
        raise ModelError(f"{checkpoint} has no adapters", now="Only a policy with lora=... has some; leave --adapters out.")
    base = Path(json.loads((checkpoint / _ADAPTER / "adapter_config.json").read_text()).get("base_model_name_or_path") or "")
    if base == Path() or not list(base.glob("*.safetensors")):
        where = f"{base} has no *.safetensors" if base != Path() else "it was drawn at random, and no directory has it"
        raise ModelError(
            f"the adapters in {checkpoint} are of no use without the model that they were trained beside: {where}",
            now="Export the whole model: leave --adapters out.",
        )
    with put_in_place(out) as fresh:
        shutil.copytree(checkpoint / _ADAPTER, fresh)
        for file in sorted(checkpoint.iterdir()):
            if file.is_file() and file.name.startswith(_BESIDE):
                shutil.copyfile(file, fresh / file.name)
        _compare(base, fresh, checkpoint)
    return base


def _compare(base: Path, adapter: Path, checkpoint: Path) -> None:
    """Merge an adapter into its base by peft and compare. Raises ModelError: it does not load, or differs from what was saved."""
    saved = saved_weights(checkpoint)
    dtype = next(iter(saved.values())).dtype
    allowed = max(_TOLERANCE, torch.finfo(dtype).eps)
    try:
        held = dict(named_weights(_merged(base, adapter, dtype)))
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"peft can't load what was exported onto {base}: {str(error)[:300]}") from error
    differing = [name for name, tensor in saved.items() if name not in held or _distance(held[name], tensor) > allowed]
    if differing:
        raise ModelError(
            f"{base} with the exported adapters is not the model that was trained: {', '.join(sorted(differing)[:5])}",
            now="Was the policy made with init='random', or have the model's files changed since the run began?",
        )


def _merged(base: Path, adapter: Path, dtype: Any) -> Any:
    """The base with the adapters added, by transformers and peft alone."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(str(base), dtype=dtype, local_files_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)  # Of peft's own calls.
        return peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True).merge_and_unload()


def _distance(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm; infinite between other shapes or types."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-12))


# ---- GGUF


_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`model_type` -> llama.cpp's name of an architecture that computes the same."""
_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BIASED = ("attn_q", "attn_k", "attn_v")
"""Layers that may have a bias, and in Qwen2 do."""

_CONTRACTIONS, _PUNCTUATION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS, _SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _PUNCTUATION, _SPACES)): "qwen2",
    "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _PUNCTUATION, _SPACES)): "llama-bpe",
    "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _SPACES,
        )
    ): "tekken",
}
"""Pattern of a tokenizer's split -> llama.cpp's name of it."""
_TAKES_WORDS_WHOLE = ("llama-bpe", "tekken")
"""Splits for which llama.cpp looks a whole word up before it merges: `ignore_merges` of a tokenizer.json."""


def write_gguf(directory: Path, weights: Mapping[str, Tensor], file: Path, *, name: str, dtype: str | None = None) -> None:
    """Write a model as a GGUF file, read it back and compare.

    Args:
        directory: has the configuration and the tokenizer.
        weights: by the names of a checkpoint; without `lm_head` the embedding is the head.
        name: what the file calls the model.
        dtype: of the matrices: `float32`, `float16` or `bfloat16`; None: that of the weights.
    Raises:
        MissingExtra: the package `gguf` is not installed.
        ModelError: the architecture, the tokenizer or a weight is one that the file can't hold.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("writing a GGUF file needs the package `gguf`", now="pip install 'm2flow[gguf]'")
    import gguf

    config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    _check_config(config)
    tensors = dict(_tensors(config, weights, dtype))
    writer = gguf.GGUFWriter(file, _ARCHITECTURES[config.model_type])
    writer.add_type("model")
    writer.add_name(name)
    _write_sizes(writer, config)
    _write_vocabulary(writer, load_tokenizer(Model(str(directory))), config.vocab_size)
    types = {torch.float32: ("F32", "ALL_F32"), torch.float16: ("F16", "MOSTLY_F16"), torch.bfloat16: ("BF16", "MOSTLY_BF16")}
    writer.add_file_type(gguf.LlamaFileType[types[tensors["token_embd.weight"].dtype][1]])
    for tensor_name, tensor in tensors.items():
        writer.add_tensor(tensor_name, _bytes_of(tensor), raw_dtype=gguf.GGMLQuantizationType[types[tensor.dtype][0]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _compare_gguf(gguf.GGUFReader(file), tensors)


def _refuse(what: str) -> NoReturn:
    now = "Export without --format, and give the directory to llama.cpp's convert_hf_to_gguf.py, which knows more models."
    raise ModelError(f"no GGUF file is written: {what}", now=now)


def _check_config(config: Any) -> None:
    if config.model_type not in _ARCHITECTURES:
        _refuse(f"the architecture is {config.model_type!r}, and only {', '.join(_ARCHITECTURES)} are known here")
    if config.hidden_act != "silu":
        _refuse(f"the activation is {config.hidden_act!r}, not silu")
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if (window is not None and window < config.max_position_embeddings) or kinds - {"full_attention"}:
        _refuse(f"the attention has a sliding window of {window} tokens")


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _write_sizes(writer: Any, config: Any) -> None:
    rope, size = config.rope_parameters, _head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type("linear")
        writer.add_rope_scaling_factor(rope["factor"])


# ---- weights


def _tensors(config: Any, weights: Mapping[str, Tensor], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the file: matrices in the wanted type, vectors in float32."""
    is_turned = _ARCHITECTURES[config.model_type] == "llama"
    turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if is_turned else {}
    for name, weight in weights.items():
        target = _tensor_name(name)
        wanted = torch.float32 if weight.ndim == 1 else getattr(torch, dtype) if dtype else weight.dtype
        tensor = weight.to(wanted)
        if not torch.isfinite(tensor).all() and torch.isfinite(weight).all():
            _refuse(f"{name} has values that {dtype} can't hold")
        num_heads = turned.get(target.split(".")[-2])
        yield target, tensor if num_heads is None else _interleaved(tensor, num_heads)
    factors = _frequency_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """A tensor as bytes: numpy has no bfloat16."""
    found: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return found


def _tensor_name(name: str) -> str:
    layer, dot, kind = name.rpartition(".")
    if layer in _TENSORS and kind == "weight":
        return _TENSORS[layer] + dot + kind
    _, _, inner = layer.partition("model.layers.")
    number, _, part = inner.partition(".")
    if not number.isdigit() or part not in _OF_LAYER or (kind == "bias" and _OF_LAYER[part] not in _BIASED):
        _refuse(f"it has no place for the tensor {name}")
    return f"blk.{number}.{_OF_LAYER[part]}.{kind}"


def _interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows [heads x D, ...] of queries or keys with i and i + D/2 of each head side by side."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _frequency_factors(config: Any) -> Tensor | None:
    """What each rotary frequency is divided by, [D / 2], where that is not one number; None where it is.

    Raises:
        ModelError: the frequencies are scaled in another way.
    """
    rope, size = config.rope_parameters, _head_size(config)
    if rope["rope_type"] in ("default", "linear"):
        return None
    if rope["rope_type"] != "llama3":
        _refuse(f"its rotary frequencies are scaled by {rope['rope_type']!r}")
    scaled: Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / scaled


def _compare_gguf(reader: Any, tensors: Mapping[str, Tensor]) -> None:
    """Compare the file with what was to be written. Raises `ModelError`: they differ."""
    found = {str(tensor.name): tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        there = found.pop(name, None)
        sizes = [] if there is None else [int(size) for size in there.shape][::-1]
        if there is None or sizes != list(tensor.shape) or there.data.tobytes() != _bytes_of(tensor).tobytes():
            raise ModelError(f"the GGUF file has not the tensor {name} that was written", now="Is the disk whole?")
    if found:
        raise ModelError(f"the GGUF file has further tensors: {', '.join(found)}", now="Please report it.")


# ---- tokenizer


class _Vocabulary(NamedTuple):
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]


def _write_vocabulary(writer: Any, codec: Any, num_rows: int) -> None:
    """Write the tokenizer with its chat template. `num_rows`: V of the embedding, which may have more rows than there are tokens."""
    tokenizer = codec.fast
    vocabulary = _vocabulary(json.loads(tokenizer.backend_tokenizer.to_str()), num_rows)
    plain, whole = (tokenizer("a", add_special_tokens=adds).input_ids for adds in (False, True))
    begins, ends = whole[:1] == [tokenizer.bos_token_id], whole[-1:] == [tokenizer.eos_token_id]
    if whole != [tokenizer.bos_token_id] * begins + plain + [tokenizer.eos_token_id] * ends:
        _refuse(f"the tokenizer adds other tokens to a text than those of its beginning and end: {whole}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    further = sorted(codec.eos_ids - {tokenizer.eos_token_id})
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    for kind, number in {**ids, "eot": further[0] if further else None}.items():
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template:
        writer.add_chat_template(template)


def _vocabulary(described: Mapping[str, Any], num_rows: int) -> _Vocabulary:
    """The vocabulary of a tokenizer.json. Raises `ModelError`: it is not one that llama.cpp reads as it is."""
    from gguf import TokenType

    model, split = described["model"], _split(described["pre_tokenizer"])
    is_plain = not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
    if model["type"] != "BPE" or not split or not is_plain:
        _refuse(f"the tokenizer is {model['type']} with a split of text that has no name there, or not byte-level")
    if (described["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        _refuse(f"the tokenizer normalises text by {described['normalizer']['type']}")
    if bool(model.get("ignore_merges")) != (split in _TAKES_WORDS_WHOLE):
        _refuse(f"the tokenizer splits text as {split} and {'takes' if model.get('ignore_merges') else 'does not take'} words whole")
    tokens, types = [f"[PAD{i}]" for i in range(num_rows)], [int(TokenType.UNUSED)] * num_rows
    found = {number: (token, TokenType.NORMAL) for token, number in model["vocab"].items()}
    for added in described["added_tokens"]:
        found[added["id"]] = (added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    if max(found) >= num_rows:
        _refuse(f"the tokenizer has the token {max(found)}, and the model {num_rows} tokens")
    for number, (token, kind) in found.items():
        tokens[number], types[number] = token, int(kind)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _Vocabulary(split, tokens, types, merges)


def _split(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """llama.cpp's name of the way in which a tokenizer splits text into words; empty if it has none."""
    described: Mapping[str, Any] = pre_tokenizer or {}
    parts: list[Mapping[str, Any]] = described.get("pretokenizers", [described])
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or len(parts) > 2:
        return ""
    first: Mapping[str, Any] = parts[0] if len(parts) == 2 else {"type": ""}
    if last.get("use_regex", True):
        is_digits = first["type"] == "Digits" and first["individual_digits"]
        return "gpt-2" if len(parts) == 1 else "smollm" if is_digits else ""
    is_split = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    return _SPLITS.get(first["pattern"].get("Regex", ""), "") if is_split else ""
