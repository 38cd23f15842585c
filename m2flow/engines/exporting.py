"""A model for others, out of a trainer's checkpoint: what any tool reads, and nothing of m2flow's; loaded once to see that it can be.

    checkpoint --export_model--> DIR/  config.json, *.safetensors, tokenizer.*  --transformers--> the same weights

Written to a neighbouring directory, loaded from there by transformers alone, compared, and renamed into place: a directory that is there
is one that loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from m2flow.engines.checkpoint import named_weights, parts_of
from m2flow.errors import EngineError, ModelError, naming_host_errors

_OURS = "m2flow_"
"""Files of a checkpoint that begin so are for m2flow alone."""


def export_model(checkpoint: Path, out: Path) -> dict[str, Tensor]:
    """Write the model of a checkpoint, and give its weights as transformers has loaded them, by their names in the files.

    Args:
        checkpoint: a directory that a trainer wrote, known to be whole.
        out: a directory that is not there yet.
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
        if parts := parts_of(checkpoint):
            _written_whole(fresh, parts)
        weights = _loaded_as_saved(fresh)
    return weights


@contextlib.contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """A directory beside `out`, to be made and filled, that becomes `out` if nothing is raised, and is gone otherwise.

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


def _written_whole(directory: Path, weights: dict[str, Tensor]) -> None:
    """Write what ranks had parts of as transformers does. Raises ModelError: it is of another model than the configuration says."""
    config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    if set(weights) - set(model.state_dict()):
        raise ModelError(f"{directory} has weights that a {config.model_type!r} model has not")
    model.save_pretrained(str(directory), state_dict=weights)


def _loaded_as_saved(directory: Path) -> dict[str, Tensor]:
    """Raises ModelError: transformers can't load it, or holds something else than the files."""
    try:
        kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
        model, report = kind.from_pretrained(str(directory), output_loading_info=True, local_files_only=True)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"transformers {transformers.__version__} can't load what was exported: {error}") from error
    wrong = {name: sorted(report[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if report.get(name)}
    if wrong:
        raise ModelError(f"transformers loads something else than was saved: {wrong}")
    saved = {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    held = dict(named_weights(model))
    differing = [
        name for name in saved.keys() | held.keys() if name not in saved or name not in held or not _are_same(saved[name], held[name])
    ]
    if differing:
        raise ModelError(f"transformers holds other weights than were saved: {', '.join(sorted(differing)[:5])}")
    return held


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, but for NaNs, which are the same if both are."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
