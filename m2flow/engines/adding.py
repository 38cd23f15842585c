"""Adapters that come alone, added to the weights that a rollout engine began with.

    base, kept in the host's memory --+ scale B A--> the module's weights, layer by layer

Each version is added to the base itself, never to the sum before it, so nothing drifts: the weights are bit by bit those that the trainer
would have sent whole, if both multiply alike. It costs a second copy of the adapted layers in the host's memory; passes cost what they
cost without adapters. No peft is needed here.

Limit: adapters of linear layers, as `m2flow.engines.lora` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from m2flow.engines import lora
from m2flow.engines.hf_names import checkpoint_tensors
from m2flow.errors import EngineError
from m2flow.recipe import Lora


@final
class Added:
    """The base of one module, and the adapters that are added to it now.

    Args:
        module: as it was loaded: its weights are the base.
    """

    def __init__(self, module: Any, recipe: Lora) -> None:
        self._module = module
        self._scale = recipe.alpha / recipe.rank
        self._base: dict[str, Tensor] = {}
        """By the module's names: those of layers that adapters have come for."""
        self._held: dict[str, Tensor] = {}

    def add(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take adapters in, by the names of peft's files; each tensor may be valid until the next is taken.

        Raises:
            EngineError: they are of other layers than the module has, or not of those of the time before; nothing has changed then.
        """
        came = {name: torch.tensor(given) if not isinstance(given, Tensor) else given.detach().cpu().clone() for name, given in tensors}
        layers = self._layers(came)
        if self._held and came.keys() != self._held.keys():
            changed = sorted(came.keys() ^ self._held.keys())
            raise EngineError(f"adapters of other layers came than before: {', '.join(changed[:4])}")
        with torch.no_grad():
            for stem, (b, a) in layers.items():
                layer = self._module.get_submodule(stem)
                if f"{stem}.weight" not in self._base:
                    self._base[f"{stem}.weight"] = _put_away(layer.weight)
                base = self._base[f"{stem}.weight"]
                delta = lora.addend(b.to(layer.weight.device), a.to(layer.weight.device), self._scale, is_transposed=_is_transposed(layer))
                layer.weight.copy_(base.to(layer.weight.device) + delta)
        self._held = came

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are added now, by the names of peft's files."""
        return iter(self._held.items())

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that adapters are added to, and all others, by checkpoints' names; of tied ones the first."""
        for name, tensor in lora.whole_state(self._module):
            yield from checkpoint_tensors(self._module, name, self._base.get(name, tensor).detach())

    def _layers(self, came: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> its B and A."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, b in came.items():
            if (stem := lora.layer_of(name, "B")) and (other := lora.file_name_of(stem, "A")) in came:
                found[stem] = b, came[other]
        known = dict(self._module.named_modules())
        if 2 * len(found) != len(came) or not came:
            raise EngineError(f"these are no adapters, in pairs: {', '.join(sorted(came)[:4]) or 'nothing came'}")
        for stem, (b, a) in found.items():
            weight = getattr(known.get(stem), "weight", None)
            shape = (b.shape[0], a.shape[1])[:: -1 if _is_transposed(known.get(stem)) else 1]
            if weight is None or weight.shape != shape or b.shape[1] != a.shape[0]:
                held = "no such layer" if weight is None else f"{list(weight.shape)} there"
                raise EngineError(
                    f"an adapter {list(b.shape)} x {list(a.shape)} came for {stem}, and the model has {held}",
                    now="Do trainer and rollout engine load the same model?",
                )
        return found


def _put_away(weight: Tensor) -> Tensor:
    """A copy in the host's memory; of what is on a GPU in pinned memory, since it comes from there with every version."""
    return weight.detach().cpu().pin_memory() if weight.is_cuda else weight.detach().clone()


def _is_transposed(layer: Any) -> bool:
    """Whether it holds its weights as [inputs, outputs]: those of GPT-2."""
    return isinstance(layer, Conv1D)
