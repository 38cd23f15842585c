"""A trainer's checkpoint on disk: a Hugging Face model directory, with the optimisers' state and a manifest beside it.

    path/  config.json, *.safetensors, tokenizer.*     what any tool reads
           m2flow_parts/                               instead of *.safetensors: what each rank had of weights and state (FSDP2's option)
           adapter/                                    of a model with adapters; the weights are then base and adapters together
           m2flow_state.pt                             optimisers' state: tensors and numbers, read without unpickling code
           m2flow_checkpoint.json                      size and SHA-256 of every file

Written to a neighbouring directory and renamed into place: `path` is either the old checkpoint or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m2flow.engines import lora
from m2flow.engines.hf_model import load_model
from m2flow.engines.hf_names import checkpoint_tensors
from m2flow.engines.spread import spread_like
from m2flow.errors import ModelError, naming_host_errors
from m2flow.recipe import Model

if TYPE_CHECKING:
    from m2flow.engines.hf_model import TextCodec

_MANIFEST, _STATE, _ADAPTER, _PARTS = "m2flow_checkpoint.json", "m2flow_state.pt", "adapter", "m2flow_parts"
_WEIGHT = "weights."
"""What names of weights begin with in the parts; other tensors there are the state's."""


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights by checkpoints' names, without a copy and without gradient; a tied one comes once, under its first name."""
    for name, tensor in lora.whole_state(model):
        yield from checkpoint_tensors(model, name, tensor.detach())


def save(
    path: str,
    model: Any,
    codec: TextCodec,
    state: Mapping[str, object],
    weights: Mapping[str, Tensor] | None = None,
    adapter: Mapping[str, Tensor] | None = None,
    parts: Path | None = None,
) -> None:
    """Write a checkpoint, with the model's weights and adapters or those that are given, by the module's names.

    Args:
        parts: a directory that ranks have written weights and the marked tensors of the state into (`m2flow.engines.spread_files`); it is
            moved into the checkpoint.

    Raises `HostError` if the disk refuses; what was at `path` is then still there."""
    with _put_in_place_of(Path(path)) as fresh:
        if lora.is_adapted(model):
            weights = dict(lora.whole_state(model)) if weights is None else weights
            lora.write_adapter(model, fresh / _ADAPTER, dict(lora.adapter_state(model)) if adapter is None else adapter)
        if parts is None:
            model.save_pretrained(str(fresh), state_dict=weights)
        else:
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]  # As transformers does where it writes the weights too.
            config.save_pretrained(str(fresh))
            parts.rename(fresh / _PARTS)
        codec.save(str(fresh))
        torch.save(dict(state), fresh / _STATE)
        files = [file for file in sorted(fresh.rglob("*")) if file.is_file()]
        manifest = {str(file.relative_to(fresh)): [file.stat().st_size, _digest(file)] for file in files}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextlib.contextmanager
def _put_in_place_of(target: Path) -> Iterator[Path]:
    """A new directory to be filled, which then takes the place of what was there; if anything is raised, that stays.

    Raises:
        HostError: the disk refuses.
    """
    fresh, old = target.with_name(f".{target.name}.{os.getpid()}.new"), target.with_name(f".{target.name}.{os.getpid()}.old")
    with naming_host_errors(f"the checkpoint {target} can't be written"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            yield fresh
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def load(path: str, model: Any, source: Model) -> dict[str, Any]:
    """Copy a checkpoint's weights into the model and return its state. Raises `ModelError` if it is incomplete or altered."""
    device = str(next(model.parameters()).device)
    current = model.state_dict()
    loaded = read_weights(path, source, {name: tensor.shape for name, tensor in current.items()})
    with torch.no_grad():
        for name, tensor in loaded.items():
            current[name].copy_(spread_like(tensor, current[name]))
    return read_state(path, device)


def read_weights(path: str, source: Model, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A checkpoint's weights by the module's names, in the host's memory; of a model with adapters, theirs alone.

    Raises `ModelError` if it is incomplete, altered, or of another model.

    Args:
        shapes: what the model has, by the same names.
    """
    verify(Path(path))
    if source.lora is not None:
        return lora.read_adapter(Path(path) / _ADAPTER, shapes)
    if (Path(path) / _PARTS).is_dir():
        loaded = parts_of(Path(path))
        if json.loads((Path(path) / "config.json").read_text()).get("tie_word_embeddings"):
            shapes = {name: shape for name, shape in shapes.items() if name in loaded}  # A tied one is there under its first name.
    else:
        loaded = load_model(replace(source, path=path, init="pretrained"), device="cpu", attention="eager").state_dict()
    if {name: tensor.shape for name, tensor in loaded.items()} != dict(shapes):
        raise ModelError(f"the checkpoint {path} is of a model of other shapes than {source.path}")
    return loaded


def read_state(path: str, device: str) -> dict[str, Any]:
    """A checkpoint's state beside the weights, on a device. Raises `ModelError` if it can't be read."""
    file = Path(path) / _STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    if (file.parent / _PARTS).is_dir():
        from m2flow.engines import spread_files

        state = spread_files.put_back(state, spread_files.read_parts(file.parent / _PARTS), device)
    return state


def parts_of(directory: Path) -> dict[str, Tensor]:
    """The weights that ranks wrote into a checkpoint, whole, by the module's names; empty if it has them in one piece."""
    from m2flow.engines import spread_files

    if not (directory / _PARTS).is_dir():
        return {}
    found = spread_files.read_parts(directory / _PARTS)
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in found.items() if name.startswith(_WEIGHT)}


def marked(weights: Mapping[str, Tensor], state: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What goes into parts, by name there, and the state with marks in the place of what does."""
    from m2flow.engines import spread_files

    tensors = {_WEIGHT + name: tensor.detach() for name, tensor in weights.items()}
    return tensors, spread_files.take_out(dict(state), tensors, "state")


def verify(directory: Path) -> None:
    """Raises `ModelError` if a checkpoint is incomplete or altered."""
    manifest = directory / _MANIFEST
    try:
        expected: dict[str, tuple[int, str]] = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory} is not a complete checkpoint: {manifest.name} can't be read ({error})", now="Use an earlier checkpoint."
        ) from error
    for name, (size, digest) in expected.items():
        file = directory / name
        if not file.is_file():
            raise ModelError(f"the checkpoint {directory} lacks {name}", now="Use an earlier checkpoint.")
        if file.stat().st_size != size or _digest(file) != digest:
            raise ModelError(f"{file} is not what was saved: its size or checksum differs", now="Use an earlier checkpoint.")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
