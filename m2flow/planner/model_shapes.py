"""Describe a model's size: parameters, adapters, KV cache and arithmetic for each token, from its config or .gguf header alone.

    config.json of a directory, or of the zoo (models/*.json) --> ModelShape --(cost_model)--> seconds and bytes
    file.gguf --gguf_config--> the fields of a config.json --> ModelShape
    ModelShape, Lora --adapted--> the same shape with `adapter_parameters`, and how many of them are the experts'

Decoder-only language models with gated MLPs, dense or with experts, whose attention has key/value heads (multi-head, grouped) or one
latent vector (MLA). Multi-token-prediction layers and vision towers are not counted. No weights are read, and torch is not loaded.

An adapted layer of i inputs and o outputs has rank x (i + o) adapter parameters. Layers go by their Hugging Face names. Where there are
experts, peft (0.21) adapts them and their routers, and no other MLP; gate and up of an expert are one matrix there, of twice the rank.
Names in a recipe that no layer of this shape has are ignored here; the engine refuses them.

Sources:
    The GGUF specification, version 3 (and 2, which has the same header); little-endian files only.
    Hu et al. 2021, LoRA, arXiv:2106.09685. Counts were compared with peft's.
"""

from __future__ import annotations

import difflib
import functools
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

from m2flow.errors import ModelError
from m2flow.recipe import Lora

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
"""Most entries of an array, or bytes of a name: more than any valid file has, so that a corrupt one raises instead of exhausting memory."""


def gguf_config(file: Path) -> dict[str, object]:
    """Read a .gguf header into the fields of a config.json; float32, since `m2flow` dequantises it.

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
    """Read a value; of an array only its length."""
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


_OF_EXPERTS = ("gate_up_proj", "down_proj")
"""Names of the experts' layers; where there are experts, no other layer has them."""


def adapted(shape: ModelShape, recipe: Lora | None) -> ModelShape:
    """The shape of a model that trains adapters alone."""
    if recipe is None:
        return shape
    widths = {
        name: num * (inputs + outputs)
        for name, (num, inputs, outputs) in _layers(shape).items()
        if not recipe.targets or name in recipe.targets
    }
    of_experts = sum(widths.get(name, 0) for name in _OF_EXPERTS) if shape.num_experts else 0
    return replace(shape, adapter_parameters=recipe.rank * sum(widths.values()), expert_adapter_parameters=recipe.rank * of_experts)


def _layers(shape: ModelShape) -> Mapping[str, tuple[int, int, int]]:
    """Name of a layer -> (number of them in the model, inputs, outputs)."""
    h, num = shape.hidden, shape.num_layers
    found = _latent_attention(shape) if shape.latent else _attention(shape)
    found["o_proj"] = (num, shape.num_heads * shape.value_dim, h)
    if not shape.num_experts:
        width = shape.dense_width
        return found | {"gate_proj": (num, h, width), "up_proj": (num, h, width), "down_proj": (num, width, h)}
    sparse = num - shape.num_dense_layers
    each, width = sparse * shape.num_experts, shape.expert_width
    return found | {"gate": (sparse, h, shape.num_experts), "gate_up_proj": (2 * each, h, 2 * width), "down_proj": (each, width, h)}


def _attention(shape: ModelShape) -> dict[str, tuple[int, int, int]]:
    h, num = shape.hidden, shape.num_layers
    return {
        "q_proj": (num, h, shape.num_heads * shape.head_dim),
        "k_proj": (num, h, shape.num_kv_heads * shape.head_dim),
        "v_proj": (num, h, shape.num_kv_heads * shape.value_dim),
    }


def _latent_attention(shape: ModelShape) -> dict[str, tuple[int, int, int]]:
    """The layers of MLA, by the names of DeepSeek's models."""
    h, num, heads = shape.hidden, shape.num_layers, shape.num_heads
    rank, nope = shape.latent - shape.rope_dim, shape.head_dim - shape.rope_dim
    found = {
        "kv_a_proj_with_mqa": (num, h, shape.latent),
        "kv_b_proj": (num, rank, heads * (nope + shape.value_dim)),
    }
    if shape.query_latent:
        return found | {"q_a_proj": (num, h, shape.query_latent), "q_b_proj": (num, shape.query_latent, heads * shape.head_dim)}
    return found | {"q_proj": (num, h, heads * shape.head_dim)}


Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_ZOO = Path(__file__).with_name("models")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. Counts are of parameters, unless the name says otherwise."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The size of a head's queries and keys."""
    value_dim: int
    """The size of a head's values."""
    vocab: int
    is_tied: bool
    """Whether the output head is the embedding table."""
    dtype: Dtype
    dense_width: int
    """Width of the MLP in layers without experts."""
    num_dense_layers: int
    """The number of layers without experts."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Total width of the shared experts, which process every token."""
    latent: int = 0
    """MLA: size of the latent vector that is cached for a token and a layer, instead of keys and values; 0 otherwise."""
    query_latent: int = 0
    """MLA: the rank of the queries' projection; 0 if it is not factored."""
    rope_dim: int = 0
    """MLA: the part of the latent vector that is used as a key directly."""
    num_biases: int = 0
    """Parameters of a layer's attention."""
    has_query_norms: bool = False
    max_context: int = 0
    adapter_parameters: int = 0
    """Parameters of adapters, the only ones that are trained; 0: all parameters are trained."""
    expert_adapter_parameters: int = 0
    """The experts' share of the adapter parameters."""
    family: str = ""
    """`model_type` of its config; empty: not known."""
    has_windows: bool = False
    """Whether the attention of some layers does not see all earlier tokens."""

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one layer's MLP."""
        h, heads = self.hidden, self.num_heads
        if not self.latent:
            norms = self.head_dim * 2 if self.has_query_norms else 0
            return h * self.head_dim * (2 * heads + 2 * self.num_kv_heads) + self.num_biases + norms
        nope, rank = self.head_dim - self.rope_dim, self.latent - self.rope_dim
        queries = (
            h * self.query_latent + self.query_latent * (1 + heads * self.head_dim) if self.query_latent else h * heads * self.head_dim
        )
        return queries + h * self.latent + rank + rank * heads * (nope + self.value_dim) + heads * self.value_dim * h

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return (self.num_layers - self.num_dense_layers) * self.num_experts * 3 * self.hidden * self.expert_width

    @cached_property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        h, sparse = self.hidden, self.num_layers - self.num_dense_layers
        layers = self.num_layers * (self.attention_parameters + 2 * h) + 3 * h * (
            self.num_dense_layers * self.dense_width + sparse * self.shared_width
        )
        return layers + self.expert_parameters + sparse * h * self.num_experts + h + self.vocab * h * (1 if self.is_tied else 2)

    @cached_property
    def num_active(self) -> int:
        """Parameters that one token uses: all but the experts that it is not routed to."""
        if not self.num_experts:
            return self.num_parameters
        return self.num_parameters - self.expert_parameters * (self.num_experts - self.num_experts_per_token) // self.num_experts

    @cached_property
    def num_multiplied(self) -> int:
        """Parameters that one token is multiplied with: the active ones, with the head once and without the embedding table."""
        return self.num_active - (0 if self.is_tied else self.vocab * self.hidden)

    @cached_property
    def routed_share(self) -> float:
        """The share of a token's multiplications in the experts that it is routed to."""
        return self.expert_parameters * self.num_experts_per_token / self.num_experts / self.num_multiplied if self.num_experts else 0.0

    @property
    def active_adapter_parameters(self) -> float:
        """Adapter parameters that one token uses."""
        idle = 1 - self.num_experts_per_token / self.num_experts if self.num_experts else 0.0
        return self.adapter_parameters - idle * self.expert_adapter_parameters

    @cached_property
    def num_matrices(self) -> int:
        """Weight matrices, of which each expert has three of its own."""
        attention = (5 if self.query_latent else 4) if self.latent else 4
        sparse = self.num_layers - self.num_dense_layers
        experts = sparse * (3 * self.num_experts + 1 + 3 * (self.shared_width > 0))
        return self.num_layers * attention + 3 * self.num_dense_layers + experts + (1 if self.is_tied else 2)

    @property
    def bytes_each(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.bytes_each

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of KV cache for one token in the weights' dtype: keys and values of each layer, or its latent vector."""
        width = self.latent or self.num_kv_heads * (self.head_dim + self.value_dim)
        return self.num_layers * width * self.bytes_each

    @property
    def token_flops(self) -> int:
        """Operations of a forward pass over a token, without attention to earlier tokens: one multiply-add for each parameter."""
        return 2 * self.num_multiplied

    @cached_property
    def kept_width(self) -> int:
        """Activations of one token in a layer that the backward pass needs and that tensor parallelism shards.

        Queries, keys, values and the attention output; gate, up, their activation and product. Inputs of the blocks and their norms, which
        every device has whole, are four times the hidden size.
        """
        active = self.num_experts_per_token * self.expert_width + self.shared_width
        width = max(self.dense_width if self.num_dense_layers else 0, active)
        return self.num_heads * (self.head_dim + self.value_dim) + self.key_width + 4 * width

    @cached_property
    def key_width(self) -> int:
        """Keys and values of one token in a layer, all heads."""
        return self.num_split_heads * (self.head_dim + self.value_dim)

    def fullest_stage(self, pp: int) -> float:
        """How many times its even share of the layers the fullest of `pp` stages has, for which the others wait; 1 where they divide.

        >>> round(shape_named("DeepSeek-V3").fullest_stage(16), 3)  # 4 of 61 layers
        1.049
        """
        return -(-self.num_layers // pp) * pp / self.num_layers

    def chunk_share(self, pp: int, vpp: int) -> float:
        """The share of the fullest stage's layers that its largest chunk has, of `vpp`.

        >>> round(shape_named("Qwen2.5-7B").chunk_share(4, 2), 3)  # 28 layers in 8 chunks: 4 of a stage's 7
        0.571
        """
        return -(-self.num_layers // (pp * vpp)) / -(-self.num_layers // pp)

    def largest_block(self, ep: int) -> int:
        """The most parameters that ZeRO 3 gathers at once: a layer, or the embedding table."""
        sparse = self.num_layers - self.num_dense_layers
        experts = self.expert_parameters // sparse // ep if sparse else 0
        return max(self.attention_parameters + max(3 * self.hidden * self.dense_width, experts), self.vocab * self.hidden)

    @cached_property
    def attention_flops(self) -> int:
        """Operations of causal attention in a forward pass over s tokens: this times s**2.

        Source:
            Two products of s x s x width, each of 2 operations a term, of which a causal mask leaves half.
        """
        return self.num_layers * self.num_heads * (self.head_dim + self.value_dim)

    @cached_property
    def max_kv_shards(self) -> int:
        """The most shards of the KV cache without replication: the key/value heads; a latent vector can't be sharded."""
        return 1 if self.latent else self.num_kv_heads

    def is_tp_legal(self, tp: int) -> bool:
        """Whether tensor parallelism of this degree is possible: heads are sharded evenly; key/value heads too, or they are replicated."""
        kv_ok = self.max_kv_shards % tp == 0 or tp % self.max_kv_shards == 0
        widths = (self.dense_width * bool(self.num_dense_layers), self.expert_width * bool(self.num_experts), self.shared_width)
        return self.num_heads % tp == 0 and kv_ok and all(width % tp == 0 for width in widths)

    def is_sp_legal(self, sp: int) -> bool:
        """Whether Ulysses of this degree is possible: query heads are sharded evenly, key/value heads evenly or replicated."""
        kv_heads = self.num_split_heads
        return self.num_heads % sp == 0 and (kv_heads % sp == 0 or sp % kv_heads == 0)

    @property
    def num_split_heads(self) -> int:
        """Heads of keys and values that a trainer's ranks share out; a latent vector is whole on each, and its heads are made there."""
        return self.num_heads if self.latent else self.num_kv_heads

    def is_ep_legal(self, ep: int) -> bool:
        return ep == 1 or (self.num_experts > 0 and self.num_experts % ep == 0)

    def can_spread_experts(self, ways: int, replicas: int) -> bool:
        """Whether so many devices can each have as many whole experts of a layer, and so many replicas an equal part of the rows of their
        matrices; always without experts."""
        if ways == 1 or not self.num_experts:
            return True
        return self.is_ep_legal(ways) and 2 * self.expert_width % replicas == 0 and self.hidden % replicas == 0

    def with_dtype(self, dtype: Dtype) -> ModelShape:
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, object], *, name: str = "") -> ModelShape:
        """Make a shape from a Hugging Face config.json (its directory, the file, or its content) or from a .gguf file's header.

        Raises:
            ModelError: no such file, no JSON, no GGUF, or a field is missing or no positive whole number.
        """
        if not isinstance(config, Mapping):
            path = Path(config).expanduser()
            if path.suffix == ".gguf":
                return cls.from_config(gguf_config(path), name=name or path.stem)
            file = path / "config.json" if path.is_dir() else path
            return cls.from_config(_read(file), name=name or (path.stem if path.suffix == ".json" else path.name))
        return _from_fields(_Fields(config, name), name)


def shape_named(name: str) -> ModelShape:
    """Find the shape of a built-in model by its name (`Qwen2.5-7B`), or of a directory or config.json by its path.

    Raises:
        ModelError: there is neither; with the nearest names.
    """
    known = {shape.lower(): shape for shape in zoo()}
    found = known.get(name.rsplit("/", 1)[-1].lower()) if not Path(name).expanduser().exists() else None
    if found:
        return _from_zoo(found)
    if Path(name).expanduser().exists():
        return ModelShape.from_config(name)
    close = [known[one] for one in difflib.get_close_matches(name.lower(), known, 3, 0.5)]
    now = f"Did you mean {' or '.join(close)}?" if close else f"There are {', '.join(zoo())}."
    raise ModelError(f"there is no model shape named {name!r}, nor a directory with a config.json", now=now)


@functools.cache
def zoo() -> tuple[str, ...]:
    """The names of the built-in models."""
    return tuple(sorted(file.stem for file in _ZOO.glob("*.json")))


@functools.cache
def _from_zoo(name: str) -> ModelShape:
    return ModelShape.from_config(_ZOO / f"{name}.json")


def _read(file: Path) -> Mapping[str, object]:
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}", now="Give the directory that config.json is in.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}", now="Restore the file.") from None
    if not isinstance(config, dict):
        raise ModelError(
            f"{file} is no config.json of a model: it is no mapping", now="Give the directory of a model that transformers can load."
        )
    return config


class _Fields:
    """A config whose fields are found under any of their names."""

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        inner = config.get("text_config")
        self._config = {**config, **inner} if isinstance(inner, Mapping) else config
        self._name = name or "the config"

    def count(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default is None):
                raise ModelError(
                    f"{self._name}: {name} is {value!r:.40}; it must be a positive whole number", now="Mend it in the model's config.json."
                )
            return value
        if default is None:
            close = difflib.get_close_matches(names[0], self._config, 1)
            now = f"Is {close[0]!r} it?" if close else "Is it the config.json of a decoder-only language model?"
            raise ModelError(f"{self._name} has no {names[0]}", now=now)
        return default

    def get(self, name: str) -> object:
        return self._config.get(name)


def _from_fields(fields: _Fields, name: str) -> ModelShape:
    kind = str(fields.get("model_type") or "")
    layers, hidden, heads = fields.count("num_hidden_layers"), fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    head_dim = fields.count("head_dim", default=hidden // heads)
    value_dim, latent, rope_dim, query_latent = head_dim, 0, 0, 0
    if rank := fields.count("kv_lora_rank", default=0):
        rope_dim = fields.count("qk_rope_head_dim")
        head_dim, value_dim = fields.count("qk_nope_head_dim") + rope_dim, fields.count("v_head_dim")
        latent, query_latent = rank + rope_dim, fields.count("q_lora_rank", default=0)
    experts = fields.count("num_experts", "n_routed_experts", "num_local_experts", default=0)
    width = fields.count("intermediate_size", default=0 if experts else None)
    expert_width = fields.count("moe_intermediate_size", default=width) if experts else 0
    shared = fields.count("shared_expert_intermediate_size", default=fields.count("n_shared_experts", default=0) * expert_width)
    has_biases = bool(fields.get("attention_bias")) or (kind.startswith("qwen2") and fields.get("attention_bias") is None)
    tied = fields.get("tie_word_embeddings")
    return ModelShape(
        name=name or kind or "model",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        vocab=fields.count("vocab_size"),
        is_tied=bool(tied),
        dtype=_dtype(fields),
        dense_width=width,
        num_dense_layers=_num_dense(fields, layers) if experts else layers,
        num_experts=experts,
        num_experts_per_token=fields.count("num_experts_per_tok", "num_experts_per_token") if experts else 0,
        expert_width=expert_width,
        shared_width=shared if experts else 0,
        latent=latent,
        query_latent=query_latent,
        rope_dim=rope_dim,
        num_biases=(heads + 2 * kv_heads) * head_dim if has_biases and not latent else 0,
        has_query_norms=kind.startswith("qwen3"),
        max_context=fields.count("max_position_embeddings", default=0),
        family=kind,
        has_windows=_has_windows(fields, kind, layers),
    )


def _has_windows(fields: _Fields, kind: str, num_layers: int) -> bool:
    """Whether some layers have windows or chunks: a config lists the kinds of its layers, or has fields that say where windows begin."""
    if isinstance(kinds := fields.get("layer_types"), list):
        return any(one != "full_attention" for one in kinds)
    is_on = fields.get("use_sliding_window")
    if is_on is False or (is_on is None and kind.startswith("qwen")) or fields.count("max_window_layers", default=0) >= num_layers:
        return False
    return bool(fields.get("sliding_window") or fields.get("attention_chunk_size"))


def _num_dense(fields: _Fields, layers: int) -> int:
    """Count the layers without experts in a model that has experts: the first ones, those listed, and those between the sparse ones."""
    listed = fields.get("mlp_only_layers")
    dense = {layer for layer in listed if isinstance(layer, int)} if isinstance(listed, list) else set()
    dense |= set(range(fields.count("first_k_dense_replace", default=0)))
    every = fields.count("decoder_sparse_step", default=1) or 1
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    return len([layer for layer in dense if layer < layers])


def _dtype(fields: _Fields) -> Dtype:
    name = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16").removeprefix("torch.")
    return name if name in DTYPE_BYTES else "bfloat16"
