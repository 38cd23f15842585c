"""Record which experts the routers of a mixture choose, and replay the choice of another pass, with gates computed from the current logits.

    router(hidden) --scores--> topk(scores, k) --> experts, gates of these
                               ^ read here, or replaced by given experts: their gates are then gathered from the same scores

A rollout engine and a trainer round differently, and so do the weights before and after an optimiser step. Where two experts are almost
equal for a token, that chooses another one, and the token's log-probability jumps. Replaying the rollout's choice (R3), or that of the
trainer's pass before the update (R2), leaves a function of the weights that is smooth, and whose gradient goes through the gates.

The router's own code stays: what it does around its `topk` (softmax or sigmoid, groups of experts, a bias that counts for the choice alone,
normalised or scaled gates) is computed as ever. `Routers` finds them by class, and `check` proves that each makes one choice a token that
can be replaced; what it can't prove is refused by name. A token whose experts are unknown is routed by the model.

    experts of the tokens of a batch --`pack`--> `Packed.experts`, of its rows --`Routers.use`--> a pass
    `Routers.chosen` of a pass --`Packed.row_of_token`--> experts of the tokens of a batch

Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers", arXiv:2510.11370 (R3); replay
of the trainer's own old pass: Zheng et al. 2025 (GSPO), arXiv:2507.18071, section 5.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from m2flow.engines.models.packing import Packed, batched_logits, pack
from m2flow.errors import EngineError
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, compact_experts, expanded_experts

# Shapes: R rows of a pass, T tokens of a batch, L routers of the model, k experts of a token, E experts of a layer.


@dataclass(frozen=True)
class Mixture:
    """How many experts a model chooses from, and where."""

    num: int
    """Routers of the model, L."""
    num_of_token: int
    """Experts of a token at each router, k."""
    num_experts: int
    """Experts of a layer, E."""


@final
class Routers:
    """The routers of one model, in the order of its layers. Their `forward` is wrapped; classes, names and hooks stay as they are."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._kind = config.model_type
        found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
        if not found:
            raise not_a_mixture(self._kind)
        self.num_experts = max(int(getattr(module, "num_experts", 0) or module.weight.shape[0]) for _, module in found)
        self._layers = [next((int(part) for part in name.split(".") if part.isdigit()), -1) for name, _ in found]
        self._num_layers = int(config.num_hidden_layers)
        self.num_of_token = 0
        """Experts of a token; known after `check`."""
        self._given: Tensor | None = None
        self._made: list[Tensor | None] = [None] * len(found)
        self._own: list[Tensor | None] = [None] * len(found)
        """What the routers would have chosen."""
        self.loads = Loads()
        """Of predicted tokens since the last step."""
        for i, (_, module) in enumerate(found):
            module.forward = functools.partial(self._route, i, module.forward)

    @property
    def num(self) -> int:
        return len(self._made)

    @property
    def mixture(self) -> Mixture:
        """After `check`."""
        return Mixture(self.num, self.num_of_token, self.num_experts)

    def use(self, experts: Tensor | None) -> None:
        """Set the experts of the rows of the next pass and its recomputations, int64 [R, L, k], -1 where unknown. None: the model's own.

        Raises:
            EngineError: they are of another number of layers.
        """
        if experts is not None and experts.shape[1] != self.num:
            if experts.shape[1] != self._num_layers:
                check_layers(experts, self.mixture)
            experts = experts[:, self._layers]  # A server reports layers without experts, too.
        self._given = experts
        self._made, self._own = [None] * self.num, [None] * self.num

    def chosen(self) -> Tensor:
        """The experts of the last pass, int64 [R, L, k].

        Raises:
            EngineError: a router made no choice.
        """
        made = [one for one in self._made if one is not None]
        if len(made) < self.num or len({one.shape for one in made}) > 1:
            raise EngineError(f"a router of a {self._kind!r} model makes no one choice of experts for each token", now=LEAVE_OUT)
        return torch.stack(made, 1)

    def counted(self, packed: Packed, *, counts: bool) -> dict[str, Tensor]:
        """For each predicted token of the last pass, the share of routers that would have chosen other experts than those given for the row
        that predicts it: float32 [T], as `REROUTED`. Nothing, if none were given.

        Args:
            counts: take the pass into `loads`.
        """
        if counts:
            num_tokens = torch.bincount(packed.predictors, minlength=packed.num_rows).float()
            for i, one in enumerate(self._made):
                if one is not None:
                    self.loads.add(i, one, num_tokens, self.mixture)
        if packed.experts is None:
            return {}
        made = [(one, own) for one, own in zip(self._made, self._own, strict=True) if one is not None and own is not None]
        others = torch.stack([are_others(own, chosen) for chosen, own in made], 1).float().mean(1)
        return {REROUTED: others[packed.predictors]}

    def check(self, run: Callable[[], Tensor]) -> None:
        """Prove on a pass, called `run`, that choices are recorded, and that others take effect.

        Raises:
            EngineError: they are not.
        """
        with torch.no_grad():
            self.use(None)
            plain = run()
            own = self.chosen()
            self.num_of_token = int(own.shape[-1])
            self.use((own + 1) % self.num_experts)
            other, replayed = run(), self.chosen()
            self.use(own)
            again = run()
            self.use(None)
        is_right = bool((replayed == (own + 1) % self.num_experts).all()) and torch.allclose(plain, again, atol=1e-4, rtol=1e-4)
        if not is_right or torch.equal(plain, other):
            raise EngineError(f"a {self._kind!r} model does not go by the experts that are chosen for its routers", now=LEAVE_OUT)

    def _route(self, i: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with _Choice(self, i):
            return forward(*arguments, **options)

    def choice(self, i: int, scores: Tensor, found: Any) -> Any:
        """What router i gets of its top k: recorded, and with given experts in their place."""
        experts = self._own[i] = found.indices
        if self._given is not None:
            given = self._given[:, i].to(experts.device)
            if given.shape != experts.shape:
                raise EngineError(f"experts of {list(given.shape)} rows came for a pass of {list(experts.shape)}", now=LEAVE_OUT)
            experts = given.where((given >= 0).all(-1, keepdim=True), experts)
            found = torch.return_types.topk((scores.gather(-1, experts), experts))
        self._made[i] = experts.detach()
        return found


class _Choice(TorchFunctionMode):  # type: ignore[misc]
    """Watches the functions that a router calls for its choice: the `topk` over all experts of each row."""

    def __init__(self, routers: Routers, i: int) -> None:
        super().__init__()
        self._routers, self._i = routers, i

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        # A choice of groups is over fewer, and over the experts of a group in three dimensions.
        return self._routers.choice(self._i, scores, found) if scores.ndim == 2 and scores.shape[1] == self._routers.num_experts else found


REROUTED = "rerouted"
"""Metric of an update that replays: the share of its tokens' layers in which the weights of now would have chosen other experts."""
LEAVE_OUT = "Leave replay_routing out."


def not_a_mixture(kind: str) -> EngineError:
    return EngineError(f"a {kind!r} model is no mixture of experts whose routing can be replayed", now=LEAVE_OUT)


def check_layers(experts: Tensor, mixture: Mixture) -> None:
    """Check that experts, int [R, layers, k], are of such a model. Raises `EngineError`."""
    if experts.shape[1:] != (mixture.num, mixture.num_of_token):
        what = (
            f"{experts.shape[2]} experts in {experts.shape[1]} layers came for a model with {mixture.num_of_token} at {mixture.num} routers"
        )
        raise EngineError(what, now="Do trainer and rollout engine load the same model?")


class Loads:
    """How many tokens each expert had, by router, since somebody asked."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, router: int, chosen: Tensor, num_tokens: Tensor, mixture: Mixture) -> None:
        """Add the experts of rows, int [R, k], each of which predicts so many tokens, float32 [R]."""
        if self._counts is None:
            self._counts = torch.zeros(mixture.num, mixture.num_experts, device=chosen.device)
        self._counts[router].index_add_(0, chosen.flatten(), num_tokens.repeat_interleave(chosen.shape[1]))

    def taken(self) -> Tensor:
        """float32 [L, E], and begin anew; [0, 0] if there was nothing."""
        counts, self._counts = self._counts, None
        return torch.zeros(0, 0) if counts is None else counts


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Say how evenly the tokens of a step were spread over experts, the mean over layers of: the tokens of the expert with the most, and of
    that with the fewest, over their mean (both 1: all have equally many); and the share of experts without any.

    Args:
        counts: tokens of each expert, [L, E].

    >>> load_metrics(torch.tensor([[3.0, 1.0, 0.0, 0.0]]))
    {'expert_load/max': 3.0, 'expert_load/min': 0.0, 'expert_load/idle': 0.5}
    """
    if not counts.any():
        return {}
    relative = counts.double() / counts.double().mean(1, keepdim=True)
    found = {"max": relative.amax(1), "min": relative.amin(1), "idle": (counts == 0).double()}
    return {f"expert_load/{name}": float(values.mean()) for name, values in found.items()}


def are_others(own: Tensor, chosen: Tensor) -> Tensor:
    """Whether rows go to other experts than their own, whatever the order: int [R, k] twice to bool [R]."""
    return (own.sort(-1).values != chosen.sort(-1).values).any(-1)


# ---- of a trainer: between the tokens of a batch and the rows of a pass


def checked_routers(model: Any, device: str) -> Routers:
    """Find and check the routers of a model that passed `m2flow.engines.models.packing.check_model`. Raises `EngineError`."""
    routers = Routers(model)
    tokens = Ragged.of([np.arange(9) % model.config.get_text_config().vocab_size], np.int32)
    packed = pack(np.zeros(1, np.int64), tokens, Ragged(np.arange(9) > 0, tokens.offsets), device=device)
    routers.check(lambda: batched_logits(model, packed))
    return routers


def experts_of(batch: Batch) -> Ragged | None:
    """The experts of a batch's tokens, int16 [T, L, k], -1 where unknown; None: nobody recorded them."""
    if ROUTED_EXPERTS not in batch:
        return None
    column = batch.ragged(ROUTED_EXPERTS)
    return Ragged(expanded_experts(column.values), column.offsets)


def beside_experts(
    numbers: npt.NDArray[np.float64], mask: Ragged, passed: tuple[Packed, Tensor] | None, mixture: Mixture
) -> npt.NDArray[np.float64]:
    """Put the numbers of masked tokens and the experts of a pass side by side: [tokens, 1 + L k], for each of a batch's tokens.

    Args:
        numbers: [T, 1], of the tokens under the mask.
        passed: what went through the model, and the experts of its rows, int [R, L, k]. None: nothing, so that no experts are known.
    """
    found = np.full((len(mask.values), 1 + mixture.num * mixture.num_of_token), -1.0)
    found[:, 0] = 0.0
    found[mask.values.astype(bool), 0] = numbers[:, 0]
    if passed is not None:
        packed, chosen = passed
        has_row = packed.row_of_token >= 0
        found[has_row, 1:] = chosen.flatten(1).cpu().numpy()[packed.row_of_token[has_row]]
    return found


def column_of(found: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64], mixture: Mixture) -> Ragged:
    """The column of experts that `beside_experts` found."""
    experts = found[:, 1:].astype(np.int16).reshape(len(found), mixture.num, mixture.num_of_token)
    return Ragged(compact_experts(experts, mixture.num_experts), offsets)
