"""A policy's adapters for others, out of a trainer's checkpoint: what `peft.PeftModel.from_pretrained(base, DIR)` reads, and a tokenizer.

    checkpoint/adapter/ --export_adapters--> DIR/  adapter_config.json, adapter_model.safetensors, tokenizer.*
                                              |
    base model --transformers--> + DIR --peft--> merged --compared--> the whole model of the checkpoint

The directory is written beside its place, loaded from there onto the base that it names, merged, and held against the weights that the
trainer saved; only then is it renamed into place.

Limit: a base with files of its own. One that was drawn at random, or came out of a .gguf file, is nowhere for peft to load.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from m2flow.engines.checkpoint import named_weights
from m2flow.engines.exporting import put_in_place
from m2flow.engines.registry import check_adapters
from m2flow.errors import ModelError

_ADAPTER = "adapter"
_BESIDE = ("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")
"""What names of a tokenizer's files begin with."""
_TOLERANCE = 1e-5
"""Norm-relative, of a merged weight: peft and m2flow may multiply in another order. In half precision it is that type's rounding."""


def export_adapters(checkpoint: Path, out: Path) -> Path:
    """Write the adapters of a checkpoint; the base model that they belong to.

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
    """Raises ModelError: peft can't load the adapter onto the base, or their sum is not what was saved."""
    saved: dict[str, Tensor] = {name: t for file in sorted(checkpoint.glob("*.safetensors")) for name, t in load_file(file).items()}
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
