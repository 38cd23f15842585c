"""LoRA adapters on a model whose own weights are frozen, by the package `peft`.

    load_model --adapt--> the same module; only adapters have gradients
    whole_state: W + scale B A under the name of W, one tensor at a time: for checkpoints, and rollout engines without adapters
    adapter_state: B and A alone (W alone: `whole_state` with `adds=False`): for weight sync and comparison
    checkpoint/adapter/   what `peft.PeftModel.from_pretrained(base, path)` reads, and what training goes on from

B starts at zero, so the first weights are those of the base, in every engine that loads it. No gradients or optimiser states of the base's
weights exist.

A critic of an adapted policy in the same process shares that policy's base (`share_base`); a reference has no model of its own at all
(`m2flow.engines.embedded.trainer`).

Limit: linear layers, no stacks of experts; one adapter a model. A merged tensor is computed anew at each request.

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
"""Prefix of names in peft's files, where the model is inside a `PeftModel`."""

Whole = Callable[[Tensor], AbstractContextManager[Tensor]]
"""One of the model's tensors -> all of it, for as long as it is entered."""


def adapt(model: Any, recipe: Lora, seed: int) -> None:
    """Add adapters to a model, in place; A is drawn from the seed, and no other random state changes.

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
    """Yield what the state dictionary of the model without adapters would have, by its names. Of tied tensors, the first alone.

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
    """Yield the adapters' tensors by the module's names, each whole, as `whole_state` yields the others. Collective where that is."""
    layers = _layers(model) if is_adapted(model) else {}
    for name, tensor in _once(model):
        if _adapter_name(name) in layers:
            with whole(tensor) as full:
                yield name, full


def scales(model: Any) -> dict[str, float]:
    """What B A is multiplied by, by the names of the layers' weights without adapters; empty of a model without."""
    layers = _layers(model) if is_adapted(model) else {}
    return {f"{name}.weight": float(layer.scaling[_NAME]) for name, layer in layers.items()}


def split_with(layer: Any, dim: int) -> list[torch.nn.Linear]:
    """The linear layers whose weights [outputs, inputs] are split along a dimension where this one is: itself; of an adapted one what is
    below the adapter, and B along 0 or A along 1."""
    if not hasattr(layer, "base_layer"):
        return [layer]
    return [layer.base_layer, (layer.lora_B, layer.lora_A)[dim][_NAME]]


def tensor_name(weight: str, which: str) -> str:
    """The module's name of a layer's A or B, from that of its weights without adapters."""
    return f"{weight.removesuffix('.weight')}.lora_{which}.{_NAME}.weight"


def file_name(name: str) -> str:
    """Name of an adapter's tensor in peft's files and in a weight sync, from its name in the module."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def file_name_of(layer: str, which: str) -> str:
    """Name of a layer's A or B in peft's files and in a weight sync."""
    return f"{_PREFIX}{layer}.lora_{which}.weight"


def layer_of(name: str, which: str) -> str:
    """The layer whose `file_name_of` this is; empty if it is none of its A or B."""
    start, end = _PREFIX, f".lora_{which}.weight"
    return name[len(start) : -len(end)] if name.startswith(start) and name.endswith(end) else ""


def plain_name(name: str) -> str:
    """Name of a module's tensor without adapters; empty for an adapter's own."""
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
    """Disable the adapters inside the context."""
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
    """Read what `write_adapter` wrote, by the module's names, into the host's memory.

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
        raise ModelError(
            f"the adapter in {directory} is of other layers or of another rank than the flow's `lora=`",
            now="Give the flow the `lora=` that the adapter was trained with, or a checkpoint of this one.",
        )
    return {expected[name]: tensor for name, tensor in tensors.items()}


def _merged(layer: Any, weight: Tensor, whole: Whole) -> Tensor:
    """Compute W + scale B A. Gradient mode is restored before the yield, or the caller would compute without gradients."""
    with torch.no_grad():
        with whole(layer.lora_B[_NAME].weight) as full_b, whole(layer.lora_A[_NAME].weight) as full_a:
            delta = addend(full_b, full_a, layer.scaling[_NAME], is_transposed=layer.fan_in_fan_out)
        with whole(weight) as full:
            found: Tensor = full + delta
    return found


def addend(b: Tensor, a: Tensor, scale: float, *, is_transposed: bool) -> Tensor:
    """Compute what an adapter adds to its layer's weights: scale B A, [outputs, inputs]; transposed for a layer of [inputs, outputs]."""
    delta = b @ a * scale
    return delta.T if is_transposed else delta


def _once(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The module's tensors, tied ones once. Compared by object, since empty tensors share an address."""
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
