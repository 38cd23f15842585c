"""Convert a checkpoint that Megatron-core wrote (`torch_dist`) to a Hugging Face directory.

    iter_0001000/ --pieces that ranks wrote--> one of Megatron's parameters --`names.split`--> the checkpoint's tensors --> safetensors

Such a checkpoint has the parameters whole, those of all layers or experts in one tensor or each in its own; in Transformer Engine's names
the norm before a matrix is the matrix's. It is read without Megatron. Biases of routers are among its parameters.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from m2flow.engines.megatron.layout import is_latent
from m2flow.engines.megatron.names import EXPERT, LAYER, key_of, places, split
from m2flow.engines.models.model_export import copy_description, loaded_as_saved, put_in_place
from m2flow.engines.models.model_files import config_in, model_directory
from m2flow.errors import ModelError
from m2flow.recipe import Model

_SHARD_SIZE = "5GB"
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Transformer Engine's names of norms that it computes with the matrix after them."""
_ROTARY = ("linear_q_proj", "linear_q_up_proj", "linear_kv_down_proj")
"""Matrices of latent attention with rows that are rotated."""
_NOT_WEIGHTS = re.compile(r"(optimizer|rng_state|rerun_state|opt_param_scheduler)\b.*|.*\._extra_state.*")


def convert(checkpoint: Path, like: Model, out: Path, shard_size: str = _SHARD_SIZE) -> Path:
    """Write the model of a checkpoint that Megatron-core wrote (`torch_dist`), under whatever layout, as a Hugging Face directory.

    Tensors are read one after the other, at most a file of weights at a time; then transformers loads what was written, and it is compared.

    Args:
        checkpoint: its directory (`iter_0001000`), or the one with `latest_checkpointed_iteration.txt`. Its index is read by pickle, as
            PyTorch wrote it.
        like: a model of the same sizes; its configuration and tokenizer are taken.
        out: a directory that is not there yet.
        shard_size: most that a file of weights has.
    Raises:
        ModelError: it is no such checkpoint, or of another model than `like`. EngineError: `out` is there already, or can't be written.
    """
    source = model_directory(like)
    config = config_in(source)
    stored = _Stored(_iteration(checkpoint))
    found = {one: (name, place, i) for name, place in places(config).items() for i, one in enumerate(place.names)}
    forms = {one: split(config, place, stored.form(name))[i] for one, (name, place, i) in found.items()}
    if unread := sorted(stored.unread()):
        raise ModelError(
            f"{stored.directory} has {len(unread)} tensors that a {config.model_type!r} model has no place for: {', '.join(unread[:4])}",
            now="Give the model that it was trained from as --like.",
        )
    cut = split_state_dict_into_shards_factory(
        forms,
        get_storage_size=lambda form: form.numel() * form.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    with put_in_place(out) as fresh:
        copy_description(source, fresh, next(iter(forms.values())).dtype)
        for file_name, names in cut.filename_to_tensors.items():
            tensors = {}
            for key, wanted in itertools.groupby(names, lambda one: found[one][0]):  # Queries, keys and values are read together.
                merged = stored.read(key)
                for one in wanted:
                    _, place, i = found[one]
                    part = _in_order(config, key, split(config, place, merged)[i])
                    tensors[one] = part.clone(memory_format=torch.contiguous_format)
            save_file(tensors, fresh / file_name, {"format": "pt"})
        if cut.is_sharded:
            index = {"metadata": cut.metadata, "weight_map": cut.tensor_to_filename}
            (fresh / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        loaded_as_saved(fresh)
    return out


def _in_order(config: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter whose rotary rows are in the order of the model of transformers.

    In latent attention Megatron's rotated pairs are always neighbours; the config's `rope_interleave: false` means two halves.

    Source: `_apply_rotary_pos_emb_bshd` of Megatron-core 0.16.1, `multi_latent_attention`.
    """
    key = key_of(name)
    if not is_latent(config) or getattr(config, "rope_interleave", True) or key not in _ROTARY:
        return tensor
    rotary = config.qk_rope_head_dim
    plain = config.kv_lora_rank if key == "linear_kv_down_proj" else config.qk_nope_head_dim
    of_heads = tensor.unflatten(0, (-1, plain + rotary))
    return torch.cat((of_heads[:, :plain], of_heads[:, plain::2], of_heads[:, plain + 1 :: 2]), 1).flatten(0, 1)


def _iteration(directory: Path) -> Path:
    """The directory of one checkpoint: the given one, or the newest in it. Raises `ModelError`."""
    latest = directory / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        number = latest.read_text().strip()
        directory = directory / (f"iter_{int(number):07}" if number.isdigit() else number)
    if any(directory.glob("mp_rank_*")):
        raise ModelError(
            f"{directory} is in Megatron's older format, one pickle a rank",
            now="Let Megatron-LM write it anew: --ckpt-convert-format torch_dist --ckpt-convert-save DIR.",
        )
    if not (directory / ".metadata").is_file():
        raise ModelError(
            f"{directory} is no checkpoint of Megatron's in the format torch_dist: it has no .metadata",
            now="Give the directory iter_NNNNNNN that --ckpt-format torch_dist wrote.",
        )
    return directory


class _Stored:
    """The tensors of a checkpoint that Megatron wrote, by Megatron's names with the numbers of layers and experts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._tensors = {
            key: form
            for key, form in self._metadata.state_dict_metadata.items()
            if isinstance(form, TensorStorageMetadata) and not _NOT_WEIGHTS.fullmatch(key)
        }
        self._taken: set[str] = set()

    def unread(self) -> set[str]:
        """Tensors that nobody has asked `form` for."""
        return self._tensors.keys() - self._taken

    def form(self, name: str) -> Tensor:
        """A parameter without its values, on the device `meta`. Raises ModelError: it is not there."""
        keys, index = self._found(name)
        self._taken.update(keys)
        forms = [self._tensors[key] for key in keys]
        return torch.cat([torch.empty(form.size[len(index) :], dtype=form.properties.dtype, device="meta") for form in forms])

    def read(self, name: str) -> Tensor:
        """A parameter."""
        keys, index = self._found(name)
        return torch.cat([self._box(key, index) for key in keys])

    def _found(self, name: str) -> tuple[list[str], tuple[int, ...]]:
        """The keys that have a parameter (gate and up may have one each), and where it is in them."""
        for key, index in _keys(name):
            for keys in ([key], [f"{key}_w", f"{key}_v"]):
                if all(one in self._tensors for one in keys):
                    return keys, index
        raise ModelError(
            f"{self.directory} has no {name}, nor the same under another of Megatron's names",
            now="Give the model that it was trained from as --like.",
        )

    def _box(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What a tensor has at this index of its first dimensions, from the pieces that ranks have written."""
        form = self._tensors[key]
        start = [*index, *[0] * (len(form.size) - len(index))]
        end = [*[i + 1 for i in index], *form.size[len(index) :]]
        into = torch.empty([b - a for a, b in zip(start, end, strict=True)], dtype=form.properties.dtype)
        items = []
        for chunk in form.chunks:
            first = [max(a, o) for a, o in zip(start, chunk.offsets, strict=True)]
            last = [min(b, o + size) for b, o, size in zip(end, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                item = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(key),
                    dest_offsets=torch.Size(a - o for a, o in zip(first, start, strict=True)),
                    storage_index=MetadataIndex(key, chunk.offsets),
                    storage_offsets=torch.Size(a - o for a, o in zip(first, chunk.offsets, strict=True)),
                    lengths=torch.Size(b - a for a, b in zip(first, last, strict=True)),
                )
                items.append(item)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({key: into}, self._metadata, is_coordinator=True)
        self._reader.read_data(LoadPlan(items), planner).wait()
        return into.reshape(into.shape[len(index) :])


def _keys(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The keys under which a checkpoint of Megatron's may have a parameter, and the index there.

    >>> list(_keys("decoder.layers.3.mlp.linear_fc2.weight"))
    [('decoder.layers.mlp.linear_fc2.weight', (3,)), ('decoder.layers.3.mlp.linear_fc2.weight', ())]
    """
    found = LAYER.fullmatch(name)
    if found is None:
        yield name, ()
        return
    layer, rest = int(found[1]), found[2]
    forms: list[tuple[str, tuple[int, ...]]] = [(one, ()) for one in (rest, _FUSED.get(rest)) if one]
    if expert := EXPERT.fullmatch(rest):
        forms = [(f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)), (f"mlp.experts.experts.{expert[1]}.{expert[2]}", ())]
    for form, index in forms:
        yield f"decoder.layers.{form}", (layer, *index)
        yield f"decoder.layers.{layer}.{form}", index
