"""AdamW for a library that owns the step: told beforehand what the next step is, and otherwise still.

    apply:  due(recipe, denominator)   then the library's own step --> RecipeAdamW.step on the parts that this rank holds

DeepSpeed steps an optimiser with flat parts of all weights in place of the parameters, once when it starts (with zeros, to make room for
its state) and once for each step. What it can't be told is a denominator, a rate and clipping that differ from step to step, and moments
for each of several recipes; they are here. The equations are those of `m2flow.engines.adamw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from m2flow.errors import InternalError
from m2flow.recipe import AdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


class RecipeAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """Steps on what it is given, under any number of recipes, each with moments of its own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.norm_over: Callable[[Tensor], Tensor] = lambda square: square
        """The squared norm of this rank's part -> that of all ranks' parts."""
        self.square: Callable[[Tensor, Tensor], Tensor] = squared_norm
        """A part and its gradient -> what they add to this rank's squared norm, float64."""
        self.kept: Callable[[Tensor], Tensor] = lambda moment: moment
        """A moment -> the same where it is to be kept."""
        self.moments: dict[AdamW, dict[Tensor, tuple[Tensor, Tensor]]] = {}
        """By recipe, then by part: float32, of the part's shape."""
        self.num_steps: dict[AdamW, int] = {}
        self._parts: list[Tensor] = []
        self._due: tuple[AdamW, float] | None = None
        self._norm: float | None = None

    @property
    def parts(self) -> list[Tensor]:
        """What it steps on. Between steps a library may have taken them out of the groups."""
        return [part for group in self.param_groups for part in group["params"]] or self._parts

    def due(self, recipe: AdamW, denominator: float) -> None:
        """The next step is of this recipe, its gradient divided by this."""
        self._due, self._norm = (recipe, denominator), None

    def taken(self) -> float | None:
        """The gradient's norm in the step that was due, after the division and before the clipping. None: the library did not step.

        Not finite: the library stepped, and nothing was changed."""
        self._due = None
        return self._norm

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self._parts = self.parts
        if self._due is None:
            return
        if self._norm is not None:
            raise InternalError("the library steps twice on what should be one group of parameters")
        recipe, denominator = self._due
        parts = [part for part in self._parts if part.grad is not None]
        gradients = [part.grad for part in parts]
        square = torch.stack([self.square(part, gradient) for part, gradient in zip(parts, gradients, strict=True)]).sum()
        self._norm = math.sqrt(float(self.norm_over(square))) / denominator
        if not math.isfinite(self._norm):
            return
        shrink = recipe.max_grad_norm / self._norm if 0 < recipe.max_grad_norm < self._norm else 1.0
        torch._foreach_mul_(gradients, shrink / denominator)
        num_steps = self.num_steps.get(recipe, 0)
        moments = self.moments.setdefault(recipe, {})
        for part in parts:
            if part not in moments:
                moments[part] = (self.kept(torch.zeros_like(part)), self.kept(torch.zeros_like(part)))
        adamw(
            parts,
            gradients,
            [moments[part][0] for part in parts],
            [moments[part][1] for part in parts],
            [],
            [torch.tensor(float(num_steps), device=part.device) for part in parts],
            fused=True,
            amsgrad=False,
            beta1=recipe.betas[0],
            beta2=recipe.betas[1],
            lr=recipe.rate(num_steps),
            weight_decay=recipe.weight_decay,
            eps=recipe.eps,
            maximize=False,
        )
        self.num_steps[recipe] = num_steps + 1

    def to(self, device: torch.device | str, *, with_parts: bool) -> None:
        """Move the moments, and with them the parts themselves, to leave a device or to come back to it."""
        for of_parts in self.moments.values():
            for part, (first, second) in of_parts.items():
                of_parts[part] = (first.to(device), second.to(device))
        if with_parts:
            for part in self.parts:
                part.data = part.data.to(device)


def squared_norm(part: Tensor, gradient: Tensor) -> Tensor:
    """The gradient's own."""
    found: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    return found


def packed_state(recipe: AdamW, num_steps: int, moments: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Whole moments, by parameter, as `m2flow.engines.adamw.Optimizers.state` has them for a recipe."""
    places = [torch.nn.Parameter(torch.empty(0)) for _ in moments]
    template = torch.optim.AdamW(
        places, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay, fused=True
    ).state_dict()
    step = torch.tensor(float(num_steps))
    of_parameters = {i: {"step": step.clone(), **dict(zip(MOMENTS, both, strict=True))} for i, both in enumerate(moments)}
    return {"recipe": asdict(recipe), "num_steps": num_steps, "state": {**template, "state": of_parameters}}


def unpacked_state(saved: dict[str, Any], num_parameters: int) -> tuple[AdamW, int, list[tuple[Tensor, Tensor] | None]]:
    """What `packed_state` made, or the same of another trainer; None for a parameter that was never stepped."""
    recipe = AdamW(**{**saved["recipe"], "betas": tuple(saved["recipe"]["betas"])})
    states = saved["state"]["state"]
    found = [states.get(i) for i in range(num_parameters)]
    return recipe, int(saved["num_steps"]), [None if one is None else (one[MOMENTS[0]], one[MOMENTS[1]]) for one in found]
