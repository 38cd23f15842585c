"""The optimiser step of the embedded trainer: divide, clip, schedule, AdamW; one state for each recipe that a flow uses.

The recipe's equations are torch.optim.AdamW's. Weight decay applies to every parameter. Gradients are divided by the
mini-batch's denominator here, once, so no number depends on how the mini-batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from m2flow.engines.spread import spread_like, whole
from m2flow.errors import EngineError
from m2flow.recipe import AdamW


class Optimizers:
    """Steps on one set of parameters, under any number of recipes."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_fused = len(_by_mesh(self._parameters)) < 2
        self._states: dict[AdamW, tuple[torch.optim.AdamW, int]] = {}

    def step(self, recipe: AdamW, denominator: float) -> dict[str, float]:
        """Divide the gradients, clip, step and clear them.

        Returns:
            `grad_norm`, the 2-norm after the division and before the clipping, and `lr`.
        Raises:
            EngineError: no gradient, a denominator that is not positive, or a gradient that is not finite. The weights are as
                they were, and the gradient is cleared.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        try:
            if not gradients:
                raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
            if not (math.isfinite(denominator) and denominator > 0):
                raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
            by_mesh = _by_mesh(gradients)
            norm = _norm(by_mesh) / denominator
            if not math.isfinite(norm):
                raise EngineError(
                    f"the gradient is not finite (its norm is {norm}); the weights were left as they were",
                    now="Look for infinite losses or advantages, and for a learning rate that is too high.",
                )
            shrink = recipe.max_grad_norm / norm if 0 < recipe.max_grad_norm < norm else 1.0
            for alike in by_mesh:
                torch._foreach_mul_(alike, shrink / denominator)
            optimizer, num_steps = self._states.get(recipe) or (self._fresh(recipe), 0)
            rate = recipe.rate(num_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            self._states[recipe] = (optimizer, num_steps + 1)
            return {"grad_norm": norm, "lr": rate}
        finally:
            self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> list[dict[str, Any]]:
        """Everything that the next steps depend on, in the order in which the recipes were first used."""
        return [
            {"recipe": asdict(recipe), "num_steps": num_steps, "state": optimizer.state_dict()}
            for recipe, (optimizer, num_steps) in self._states.items()
        ]

    def load_state(self, saved: list[dict[str, Any]]) -> None:
        """Continue from what `state` returned."""
        states: dict[AdamW, tuple[torch.optim.AdamW, int]] = {}
        for entry in saved:
            recipe = AdamW(**{**entry["recipe"], "betas": tuple(entry["recipe"]["betas"])})
            optimizer = self._fresh(recipe)
            optimizer.load_state_dict(entry["state"])
            for group in optimizer.param_groups:
                group["fused"] = self._is_fused
            for parameter, state in optimizer.state.items():
                state.update({name: spread_like(value, parameter) for name, value in state.items() if isinstance(value, Tensor)})
            states[recipe] = (optimizer, int(entry["num_steps"]))
        self._states = states
        self.clear_gradients()

    def tensors(self) -> Iterator[Tensor]:
        """All moments."""
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def to(self, device: torch.device | str) -> None:
        """Move the state, to leave a device or to come back to it."""
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(device)

    def _fresh(self, recipe: AdamW) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._parameters,
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            fused=self._is_fused,
        )


def _by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Those that are spread over the same ranks together: torch works on several at once only if they are."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def _norm(by_mesh: list[list[Tensor]]) -> float:
    norms = [float(whole(torch.nn.utils.get_total_norm(alike))) for alike in by_mesh]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)
