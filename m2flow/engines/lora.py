"""Adapters of low rank on a model whose own weights stay as they are, by the package `peft`.

    load_model --adapt--> the same module; only adapters take gradients
    whole_state: W + scale B A under the name of W, one tensor at a time: what goes to rollout engines and into checkpoints
    checkpoint/adapter/   what `peft.PeftModel.from_pretrained(base, path)` reads, and what training goes on from

B begins as zeros, so the first weights are those of the base, in every engine that loads it. What a trainer keeps for the backward pass of
the base's weights is not kept: gradients and optimiser are those of the adapters.

Limit: linear layers; one adapter a model. A tensor that is merged is made anew each time that it is asked for.

Source:
    Hu et al. 2021, LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.engines.registry import check_adapters
from m2flow.errors import ModelError
from m2flow.recipe import Lora

_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Of names in peft's files: there the model is inside a `PeftModel`."""


def adapt(model: Any, recipe: Lora, seed: int) -> None:
    """Put adapters on a model, in place; A is drawn from the seed, and nobody else's random state moves.

    Raises:
        ModelError: the model has no layers of the names that the recipe gives. MissingExtra: peft is not installed.
    """
    check_adapters()
    import peft

    config = peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(recipe.targets) or "all-linear")
    config.base_model_name_or_path = str(getattr(model.config, "_name_or_path", ""))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)})
        raise ModelError(
            f"adapters can't be put on {', '.join(recipe.targets)}: {str(error).splitlines()[0][:200]}",
            now=f"The model's linear layers are {', '.join(layers)}.",
        ) from error


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def whole_state(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What the state dictionary of the model without adapters would have, by its names. Of tied tensors, the first alone."""
    layers, seen = _layers(model) if is_adapted(model) else {}, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # By object: tensors without values share an address.
            continue
        seen.add(id(tensor))
        stem, _, last = name.rpartition(".base_layer.")
        if stem in layers and last == "weight":
            with torch.no_grad():  # Left before the tensor is handed out: who takes it would compute without gradient.
                tensor = tensor + layers[stem].get_delta_weight(_NAME)
            yield f"{stem}.{last}", tensor
        elif stem in layers:
            yield f"{stem}.{last}", tensor
        elif not any(f".{part}.{_NAME}." in name for part in ("lora_A", "lora_B")):
            yield name, tensor


def write_adapter(model: Any, directory: Path) -> None:
    """Write the adapter as peft does.

    Raises:
        OSError: the disk refuses.
    """
    import peft
    from safetensors.torch import save_file

    directory.mkdir()
    tensors = peft.get_peft_model_state_dict(model, adapter_name=_NAME)
    save_file({_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / _WEIGHTS)
    model.peft_config[_NAME].save_pretrained(str(directory))


def read_adapter(model: Any, directory: Path) -> None:
    """Copy what `write_adapter` wrote into a model with adapters of the same shapes.

    Raises:
        ModelError: it is not there, or of other layers.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / _WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in {directory} can't be read: {error}", now="Use an earlier checkpoint.") from error
    expected = peft.get_peft_model_state_dict(model, adapter_name=_NAME)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in expected.items()}:
        raise ModelError(f"the adapter in {directory} is of other layers or of another rank than the flow's `lora=`")
    peft.set_peft_model_state_dict(model, tensors, adapter_name=_NAME)


def _layers(model: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
