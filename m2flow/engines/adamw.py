"""The optimiser step of the embedded trainer: divide, clip, schedule, AdamW; one state for each recipe that a flow uses.

The recipe's equations are torch.optim.AdamW's. Weight decay applies to every parameter. Gradients are divided by the
mini-batch's denominator here, once, so no number depends on how the mini-batch was cut.

    weights in half precision:  gradient --float32--> AdamW on float32 masters --rounded--> weights

bfloat16 has 8 bits of a number: a step below 1/256 of a weight would be lost, each time. So the steps go to a float32 copy of each such
weight (its master), of which the weight is the rounded value.

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from m2flow.engines.contract import MOVED
from m2flow.engines.spread import local, spread_like, whole
from m2flow.errors import EngineError
from m2flow.recipe import AdamW


class Optimizers:
    """Steps on one set of parameters, under any number of recipes.

    Args:
        has_masters: keep a float32 copy of each parameter below float32, from the first step on.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, has_masters: bool = True) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._has_masters = has_masters
        self._masters: dict[int, torch.nn.Parameter] = {}
        """By the place of the parameter."""
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
            gradients = self._give_to_masters() or gradients
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
            before = {i: local(held).detach().clone() for i, held in enumerate(self._parameters) if held.dtype != torch.float32}
            optimizer.step()
            self._states[recipe] = (optimizer, num_steps + 1)
            self._take_from_masters()
            return {"grad_norm": norm, "lr": rate, **self._moved(before)}
        finally:
            self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in (*self._parameters, *self._masters.values()):
            parameter.grad = None

    # Masters

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _give_to_masters(self) -> list[Tensor]:
        """All gradients, those in half precision as their masters', which are made if there are none; nothing where all is float32."""
        if not self._has_masters:
            return []
        for i, held in enumerate(self._parameters):
            if held.dtype == torch.float32:
                continue
            if i not in self._masters:
                self._masters[i] = torch.nn.Parameter(held.detach().float())
            master = self._masters[i]
            exact, rounded = local(master), local(held)
            # A weight that is not its master rounded was set by somebody else since: a checkpoint, a copy of another role's.
            exact.copy_(torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.float()))
            master.grad = None if held.grad is None else held.grad.float()
        return [parameter.grad for parameter in self._stepped if parameter.grad is not None] if self._masters else []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take_from_masters(self) -> None:
        for i, master in self._masters.items():
            local(self._parameters[i]).copy_(local(master))

    def _moved(self, before: Mapping[int, Tensor]) -> dict[str, float]:
        total = sum(tensor.numel() for tensor in before.values())
        moved = [(local(self._parameters[i]).detach() != tensor).sum() for i, tensor in before.items()]
        return {MOVED: float(torch.stack(moved).sum()) / total} if total else {}

    @property
    def _stepped(self) -> list[torch.nn.Parameter]:
        """What the steps change: parameters, or their masters."""
        return [self._masters.get(i, parameter) for i, parameter in enumerate(self._parameters)]

    def masters(self) -> list[Tensor | None]:
        """By parameter; None: it has none."""
        return [self._masters[i].detach() if i in self._masters else None for i in range(len(self._parameters))]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_masters(self, saved: Sequence[Tensor | None]) -> None:
        """Continue from what `masters` returned. Call it before `load_state`, after the weights are there."""
        self._masters = {}
        for i, value in enumerate(saved):
            held = self._parameters[i]
            if value is not None and self._has_masters and held.dtype != torch.float32:
                self._masters[i] = torch.nn.Parameter(spread_like(value.to(held.device, torch.float32), held))

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
        """All masters and moments."""
        yield from self._masters.values()
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def to(self, device: torch.device | str) -> None:
        """Move the state, to leave a device or to come back to it."""
        for master in self._masters.values():
            master.data = master.data.to(device)
        for optimizer, _ in self._states.values():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(device)

    def _fresh(self, recipe: AdamW) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._stepped,
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
