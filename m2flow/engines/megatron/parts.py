"""The optimiser step of a rank on its parts of the weights: whole ones, or in ZeRO stage 1 the ranges that fall to it.

    buffer of weights   | a a a a b b | b b b c c c |         ranks that share parameters have one range each
    buffer of gradients | a a a a b b | b b b c c c |  --summed, each its range--> `RecipeAdamW` on views of it --> weights, sent to all

A part is a view of one parameter's weights; its gradient is a view of the library's buffer. Below float32 a part is a float32 copy, of
which the weight is the rounded value.

On the host a part is a float32 copy in its memory in any case, where its moments are too, and the step is computed:

    gradient --copied--> `RecipeAdamW` on the host --copied--> weights, rounded

The norm of the gradient is a sum over all ranks: each part counts at one of the ranks that hold it (`Held.counts`). A weight that tensor
ranks do not split, and the last stage's copy of tied embeddings, would count several times.

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO stage 1); Ren et al. 2021, arXiv:2101.06840 (steps on the host).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.contract import MOVED
from m2flow.engines.models.optimizers import RecipeAdamW, squared_norm
from m2flow.recipe import AdamW


@dataclass(frozen=True)
class Held:
    """A parameter of this rank."""

    parameter: Tensor
    group: Any
    """The ranks that have the same values of it."""
    counts: bool
    """Whether its values count here, among the ranks that have them besides those of `group`."""
    weights: str
    """The group of weights that it is reported with."""


@dataclass(frozen=True, eq=False)
class SteppedPart:
    """What this rank steps of a parameter."""

    held: Held
    start: int
    end: int
    """Its range in the flat parameter."""
    view: Tensor
    """View of the weights, flat."""
    gradient: Tensor
    """View of the library's gradient buffer, flat float32."""
    stepped: Tensor
    """The view, or its float32 copy, on the device or the host."""

    @property
    def is_rounded(self) -> bool:
        return bool(self.view.dtype != torch.float32)


class Parts:
    """Parts of this rank's parameters, and the optimiser that steps them.

    Args:
        buffers: the library's. is_spread: ZeRO stage 1. on_host: moments and float32 copies are in the host's memory.
        groups: all groups of weights, in the same order on every rank.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
        buffers: Sequence[Any],
        all_ranks: Any,
        groups: Sequence[str],
        *,
        is_spread: bool,
        on_host: bool = False,
    ) -> None:
        self._all_ranks, self._is_spread, self._buffers, self._on_host = all_ranks, is_spread, buffers, on_host
        self._staged: dict[SteppedPart, Tensor] = {}
        """On the host, where gradients come to; from the first step on."""
        self._names = {id(one.parameter): name for name, one in held.items()}
        self._held = held
        self._numbers = {name: number for number, name in enumerate(held)}
        self.parts = [self._made(*found) for found in self._ranges()]
        tensors = [part.stepped for part in self.parts] or [torch.empty(0)]
        self.client = RecipeAdamW(tensors)
        self._counts = {part.stepped: self._is_counted(part) for part in self.parts}
        self.client.square = self._square
        self.client.norm_over = self._total
        self.client.groups = groups
        self.client.places = {part.stepped: [(part.held.weights, 0, part.stepped.numel())] for part in self.parts}

    def _ranges(self) -> Iterator[tuple[Held, int, int, Tensor]]:
        """This rank's parts of all parameters: each with its range, and its gradient."""
        for buffer in self._buffers:
            for parameter, (start, end, number) in buffer.param_index_map.items():
                held = self._held[self._names[id(parameter)]]
                low, high = start, end
                if self._is_spread:
                    bucket = buffer.buckets[number]
                    size = bucket.grad_data.numel() // dist.get_world_size(held.group)
                    first = bucket.offset + dist.get_rank(held.group) * size
                    low, high = max(start, first), min(end, first + size)
                if low < high:
                    yield held, low - start, high - start, buffer.grad_data[low:high]

    def _made(self, held: Held, start: int, end: int, gradient: Tensor) -> SteppedPart:
        view = held.parameter.detach().view(-1)[start:end]
        if self._on_host:
            return SteppedPart(held, start, end, view, gradient, _in_host_memory(view).copy_(view))
        return SteppedPart(held, start, end, view, gradient, view if view.dtype == torch.float32 else view.float())

    def _is_counted(self, part: SteppedPart) -> bool:
        """Whether the norm counts it here. In stage 1 ranks of the group have other ranges each."""
        return part.held.counts and (self._is_spread or dist.get_rank(part.held.group) == 0)

    def _square(self, part: Tensor, gradient: Tensor) -> Tensor:
        found = squared_norm(part, gradient)
        return found if self._counts[part] else torch.zeros_like(found)

    def _total(self, square: Tensor) -> Tensor:
        device = self.parts[0].view.device if self.parts else square.device
        square = square.to(device)
        dist.all_reduce(square, group=self._all_ranks)
        return square

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, recipe: AdamW, denominator: float) -> tuple[float, dict[str, float]]:
        """Step on summed gradients. Collective.

        Returns:
            the norm of the gradient after the division and before the clipping; if it is not finite, nothing was changed. Further metrics.
        """
        rounded = [(part, part.view.clone()) for part in self.parts if part.is_rounded]
        copied = [part for part in self.parts if part.stepped is not part.view]
        for part in self.parts:
            part.stepped.grad = self._brought(part)
        for part in copied:
            # A weight that is not its copy rounded was set by somebody else since: a checkpoint, a copy of another role's.
            weights = part.view.to(part.stepped.device)
            part.stepped.copy_(torch.where(part.stepped.to(weights.dtype) == weights, part.stepped, weights.float()))
        self.client.due(recipe, denominator)
        self.client.step()
        norm = self.client.taken()
        for part in self.parts:
            part.stepped.grad = None
        assert norm is not None
        for part in copied:
            part.view.copy_(part.stepped)
        self._send()
        moved = self._total(torch.tensor([float((part.view != before).sum()) for part, before in rounded]).sum()) if rounded else None
        if moved is None:
            return norm, dict(self.client.by_group)
        num_rounded = self._total(torch.tensor(float(sum(before.numel() for _, before in rounded))))
        return norm, {**self.client.by_group, MOVED: float(moved / num_rounded)}

    def _brought(self, part: SteppedPart) -> Tensor:
        """The gradient of a part where it is stepped."""
        if not self._on_host:
            return part.gradient
        if part not in self._staged:
            self._staged[part] = _in_host_memory(part.view)
        return self._staged[part].copy_(part.gradient)

    def _send(self) -> None:
        """Give each rank's range of the weights to the others of its group."""
        if not self._is_spread:
            return
        for buffer in self._buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                ranges = list(bucket.param_data.chunk(dist.get_world_size(group)))
                dist.all_gather(ranges, ranges[dist.get_rank(group)].clone(), group=group)

    # What a checkpoint has

    def gathered(self, of: Callable[[SteppedPart], Tensor]) -> Callable[[str, Tensor], Tensor]:
        """A function of a parameter's name that gives what `of` gives for its parts, together and in its shape. Collective."""
        by_name: dict[str, list[SteppedPart]] = {}
        for part in self.parts:
            by_name.setdefault(self._names[id(part.held.parameter)], []).append(part)

        def whole(name: str, parameter: Tensor) -> Tensor:
            found = torch.zeros(parameter.numel(), device=parameter.device)
            for part in by_name.get(name, ()):
                found[part.start : part.end] = of(part).view(-1)
            if self._is_spread:
                dist.all_reduce(found, group=self._held[name].group)
            return found.view(parameter.shape)

        return whole

    def writes(self, name: str) -> bool:
        """Whether this rank is the one, of all that have its part of a parameter, that writes it. They take turns."""
        held = self._held[name]
        return held.counts and self._numbers[name] % dist.get_world_size(held.group) == dist.get_rank(held.group)

    def moments(self, recipe: AdamW, which: int) -> Callable[[str, Tensor], Tensor]:
        """A recipe's moments, as `gathered` gives them."""
        of_recipe = self.client.moments.get(recipe, {})
        return self.gathered(lambda part: of_recipe[part.stepped][which] if part.stepped in of_recipe else torch.zeros_like(part.stepped))

    def set_moments(self, recipe: AdamW, num_steps: int, both: Sequence[Mapping[str, Tensor]]) -> None:
        """Set a recipe's moments from whole parameters' parts by name."""
        self.client.num_steps[recipe] = num_steps
        self.client.moments[recipe] = {
            part.stepped: (self._cut(part, both[0]), self._cut(part, both[1])) for part in self.parts if self._name(part) in both[0]
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_masters(self, values: Mapping[str, Tensor]) -> None:
        """Set the float32 copies of weights below float32; others follow their weights."""
        for part in self.parts:
            if part.is_rounded and self._name(part) in values:
                part.stepped.copy_(self._cut(part, values))

    def _name(self, part: SteppedPart) -> str:
        return self._names[id(part.held.parameter)]

    def _cut(self, part: SteppedPart, values: Mapping[str, Tensor]) -> Tensor:
        found = values[self._name(part)].reshape(-1)[part.start : part.end]
        return found.to(part.stepped.device, torch.float32, copy=True)

    def tensors(self) -> Iterator[Tensor]:
        """All moments and float32 copies."""
        yield from (part.stepped for part in self.parts if part.stepped is not part.view)
        yield from (moment for of_parts in self.client.moments.values() for both in of_parts.values() for moment in both)


def _in_host_memory(like: Tensor) -> Tensor:
    """An empty float32 tensor of that shape, pinned where the other is on a GPU: copies are several times as fast."""
    return torch.empty(like.shape, dtype=torch.float32, device="cpu", pin_memory=like.device.type == "cuda")
