"""Export a trained model or its adapters from a trainer's checkpoint, for other tools.

    checkpoint --export_model--> DIR/  config.json, *.safetensors, tokenizer.*  --transformers--> the same weights

    checkpoint/adapter/ --export_adapters--> DIR/  adapter_config.json, adapter_model.safetensors, tokenizer.*
                                                  |
        base model --transformers--> + DIR --peft--> merged --compared--> the whole model of the checkpoint

The directory is written beside its place, loaded from there by transformers (and peft), and compared with the weights that the trainer
saved; only then is it renamed into place. So an exported directory is one that loads.

Limit: adapters need a base with files of its own. One that was drawn at random, or came from a .gguf file, can't be loaded by peft.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from m2flow.engines.models.trainer_checkpoint import named_weights, parts_of
from m2flow.engines.registry import check_adapters
from m2flow.errors import EngineError, ModelError, naming_host_errors

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
        weights = _loaded_as_saved(fresh)
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


def _written_whole(directory: Path, weights: dict[str, Tensor], shard_size: str) -> None:
    """Write weights as transformers does, in files of at most this size. Raises ModelError: they do not fit the configuration."""
    config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    model.to(next(iter(weights.values())).dtype)  # Of which transformers takes what it writes as the type of the weights.
    if set(weights) - set(model.state_dict()):
        raise ModelError(f"{directory} has weights that a {config.model_type!r} model has not")
    model.save_pretrained(str(directory), state_dict=weights, max_shard_size=shard_size)


def _loaded_as_saved(directory: Path) -> dict[str, Tensor]:
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
