"""Adapters of low rank on a model whose own weights stay as they are, by the package `peft`.

    load_model --adapt--> the same module; only adapters take gradients
    whole_state: W + scale B A under the name of W, one tensor at a time: for checkpoints, and rollout engines that know no adapters
    adapter_state, base_state: B and A alone, and W alone: what others send and compare (`m2flow.engines.embedded.slot_model` adds them)
    checkpoint/adapter/   what `peft.PeftModel.from_pretrained(base, path)` reads, and what training goes on from

B begins as zeros, so the first weights are those of the base, in every engine that loads it. What a trainer keeps for the backward pass of
the base's weights is not kept: gradients and optimiser are those of the adapters.

A critic of an adapted policy in the same process has that policy's base, not one of its own (`share_base`); a reference has no model
of its own at all (`m2flow.engines.embedded.trainer`).

Limit: linear layers, no stacks of experts; one adapter a model. A tensor that is merged is made anew each time that it is asked for.

Source:
    Hu et al. 2021, LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
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

Whole = Callable[[Tensor], AbstractContextManager[Tensor]]
"""One of the model's tensors -> all of it, for as long as it is entered."""


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
    if stacks := sorted(name for name, layer in _layers(model).items() if getattr(layer, "num_experts", 1) > 1):
        raise ModelError(
            f"peft puts adapters on stacks of experts here ({stacks[0]}), whose sum with the weights m2flow can't send or save",
            now="Name other layers: lora=Lora(targets=('q_proj', 'k_proj', 'v_proj', 'o_proj')).",
        )


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def whole_state(model: Any, whole: Whole = contextlib.nullcontext, *, adds: bool = True) -> Iterator[tuple[str, Tensor]]:
    """What the state dictionary of the model without adapters would have, by its names. Of tied tensors, the first alone.

    Args:
        whole: gives a tensor of the model as a whole, where ranks hold parts of it; then this is collective, and each tensor is valid
            until the next is asked for.
        adds: the adapters; False: what is beside them, which training never changes.
    """
    layers = _layers(model) if is_adapted(model) else {}
    for name, tensor in _once(model):
        stem, _, last = name.rpartition(".base_layer.")
        if adds and stem in layers and last == "weight":
            yield f"{stem}.{last}", _merged(layers[stem], tensor, whole)
        elif _adapter_name(name) not in layers:
            with whole(tensor) as full:
                yield (f"{stem}.{last}" if stem in layers else name), full


def adapter_state(model: Any, whole: Whole = contextlib.nullcontext) -> Iterator[tuple[str, Tensor]]:
    """The adapters' own tensors by the module's names, each whole, as `whole_state` gives the others. Collective where that is."""
    layers = _layers(model) if is_adapted(model) else {}
    for name, tensor in _once(model):
        if _adapter_name(name) in layers:
            with whole(tensor) as full:
                yield name, full


def file_name(name: str) -> str:
    """What peft's files, and what is sent, call an adapter's tensor of the module."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def file_name_of(layer: str, which: str) -> str:
    """The same of a layer's A or B."""
    return f"{_PREFIX}{layer}.lora_{which}.weight"


def layer_of(name: str, which: str) -> str:
    """The layer that this name, as `file_name_of` gives it, is of; empty if it is none of A or B."""
    start, end = _PREFIX, f".lora_{which}.weight"
    return name[len(start) : -len(end)] if name.startswith(start) and name.endswith(end) else ""


def plain_name(name: str) -> str:
    """The name that one of the module's tensors has without adapters; empty for an adapter's own."""
    return "" if _adapter_name(name) else name.replace(".base_layer.", ".")


def share_base(model: Any, source: Any) -> None:
    """Compute what another model with the same adapters computes now, from the same base in memory: neither ever changes it. Of one that
    is on another device (it has left this one) the base is copied.

    What only one of them has (a head) stays as it is.
    """
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in source.state_dict(keep_vars=True).items():
            if name in own and _adapter_name(name):
                own[name].copy_(tensor)
            elif name in own and not (tensor.requires_grad or own[name].requires_grad):
                if own[name].device == tensor.device:
                    own[name].data = tensor.data
                else:
                    own[name].copy_(tensor)


@contextlib.contextmanager
def left_out(model: Any) -> Iterator[None]:
    """Have the adapters add nothing meanwhile."""
    layers = list(_layers(model).values())
    scales = [layer.scaling[_NAME] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[_NAME] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_NAME] = scale


def write_adapter(model: Any, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapter as peft does.

    Args:
        tensors: what `adapter_state` gave.
    Raises:
        OSError: the disk refuses.
    """
    from safetensors.torch import save_file

    directory.mkdir()
    save_file({file_name(name): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / _WEIGHTS)
    model.peft_config[_NAME].save_pretrained(str(directory))


def read_adapter(directory: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """What `write_adapter` wrote, by the module's names, in the host's memory.

    Args:
        shapes: of all that the module's state dictionary has.
    Raises:
        ModelError: it is not there, or of other layers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(directory / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in {directory} can't be read: {error}", now="Use an earlier checkpoint.") from error
    expected = {file_name(name): name for name in shapes if _adapter_name(name)}
    if {name: t.shape for name, t in tensors.items()} != {file: shapes[name] for file, name in expected.items()}:
        raise ModelError(f"the adapter in {directory} is of other layers or of another rank than the flow's `lora=`")
    return {expected[name]: tensor for name, tensor in tensors.items()}


def _merged(layer: Any, weight: Tensor, whole: Whole) -> Tensor:
    """W + scale B A. The gradient's mode is left before it is handed out: who takes it would compute without."""
    with torch.no_grad():
        with whole(layer.lora_B[_NAME].weight) as full_b, whole(layer.lora_A[_NAME].weight) as full_a:
            delta = addend(full_b, full_a, layer.scaling[_NAME], is_transposed=layer.fan_in_fan_out)
        with whole(weight) as full:
            found: Tensor = full + delta
    return found


def addend(b: Tensor, a: Tensor, scale: float, *, is_transposed: bool) -> Tensor:
    """What an adapter adds to its layer's weights: scale B A, [outputs, inputs]; transposed where the layer holds [inputs, outputs]."""
    delta = b @ a * scale
    return delta.T if is_transposed else delta


def _once(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The module's tensors, a tied one once. By object: tensors without values share an address."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _adapter_name(name: str) -> str:
    """The layer whose adapter a tensor belongs to; empty for any other tensor."""
    for part in (f".lora_A.{_NAME}.", f".lora_B.{_NAME}."):
        stem, found, _ = name.rpartition(part)
        if found:
            return stem
    return ""


def _layers(model: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
