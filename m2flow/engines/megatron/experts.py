"""Which experts the rows of a pass go to, on a rank: replayed from a record, recorded, counted, and balanced.

    a pass's rows --packed_seq_params--> each layer --its `RouterReplay`--> the top k of the current logits, or the given experts
                                                                            gates are of the current logits

A layer tells its router before it runs which pass it runs, also when it is computed again in the backward pass, so neither the order of
interleaved stages nor recomputation mixes passes up. (Megatron's own replay is a queue for each router, filled in the schedule's order.)
What replay is for, and whose idea it is, says `m2flow.engines.models.routing`.

Shapes: R rows of a packed micro-batch, T predicted tokens, L layers, k experts of a token, E experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.megatron.rows import Share
from m2flow.engines.models.packing import Packed
from m2flow.engines.models.routing import Balanced, Loads, Mixture, are_others, check_layers

Limit = Callable[[Tensor], Tensor]
"""A router's scores of all experts, [rows, E], to those that its top k is chosen from."""


@dataclass(eq=False)
class Routing:
    """The experts of a rank's rows of one pass. Of the rows of its context-parallel rank these are a part where tensor ranks split them."""

    start: int
    """Of all rows, the first."""
    num_tokens: Tensor
    """float32 [rows]: how many predicted tokens each predicts."""
    given: Tensor | None
    """int64 [rows, L, k]: those that are replayed, -1 where unknown. None: the model's own."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By layer, where this rank has it: int64 [rows, k]."""
    num_rerouted: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the tokens for which the router would have chosen others."""
    balanced: Balanced | None = None
    """The losses of this rank's routers, over these rows."""

    @classmethod
    def of(cls, packed: Packed, share: Share, mixture: Mixture, part: tuple[int, int], groups: Sequence[Any] = ()) -> Routing:
        """Of a share's rows.

        Args:
            part: which of how many parts tensor ranks split them into. groups: those over which all rows are split.
        Raises:
            EngineError: the given experts are of another model.
        """
        number, count = part
        size = len(share.positions) // count
        start = share.start + number * size
        num_tokens = torch.bincount(share.predictors, minlength=len(share.positions)).float()
        given = None
        if packed.experts is not None:
            check_layers(packed.experts, mixture)
            given = packed.experts.new_full((size, *packed.experts.shape[1:]), -1)  # Rows that fill up are the model's own.
            known = packed.experts[start : start + size]
            given[: len(known)] = known
        balanced = None if packed.balanced is None else packed.balanced.part(start, size, groups)
        return cls(start, num_tokens[number * size : (number + 1) * size], given, balanced=balanced)

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts of a layer's rows, [rows, k], where the router itself would choose `own`."""
        chosen = own
        if self.given is not None:
            given = self.given[:, layer]
            chosen = given.where((given >= 0).all(-1, keepdim=True), own)
            self.num_rerouted[layer] = (are_others(own, chosen) * self.num_tokens).sum()
        self.chosen[layer] = chosen
        if self.balanced is not None:
            self.balanced.choose(layer, chosen)
        return chosen

    def count(self, loads: Loads, mixture: Mixture) -> None:
        """Add this rank's predicted tokens to the loads of the experts."""
        for layer, chosen in self.chosen.items():
            loads.add(layer, chosen, self.num_tokens, mixture)

    def share_rerouted(self, mixture: Mixture) -> float:
        """The sum over this rank's predicted tokens and layers of whether others were chosen, divided by L."""
        counts = list(self.num_rerouted.values())
        return float(torch.stack(counts).sum()) / mixture.num if counts else 0.0

    def everywhere(self, num_rows: int, mixture: Mixture, groups: Sequence[Any]) -> Tensor:
        """The experts of all rows in all layers, int32 [R, L, k]. Collective in each of the groups, whose ranks have some of them."""
        found = torch.zeros(num_rows, mixture.num, mixture.num_of_token, dtype=torch.int32, device=self.num_tokens.device)
        for layer, chosen in self.chosen.items():
            own = chosen[: max(num_rows - self.start, 0)]
            found[self.start : self.start + len(own), layer] = own.int()
        for group in groups:
            dist.all_reduce(found, group=group)
        return found


class Replay:
    """In the place of Megatron's `RouterReplay` at one router."""

    def __init__(self, router: int, limit: Limit | None) -> None:
        self._router, self._limit = router, limit
        self.routing: Routing | None = None
        """Of the pass that is being computed."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """What the router gets of its top k, [rows, k]: scores and experts."""
        scores = scores if self._limit is None else self._limit(scores)
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routing is None:
            return values, own
        chosen = self.routing.choose(self._router, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)


def limit_of(config: Any) -> Limit | None:
    """How a model of transformers limits the choice of experts. None: not at all.

    DeepSeek's experts are in groups, of which the best are kept: by their best expert, where those of the others score 0 (V2), or by the
    sum of their best two, where the others can't be chosen (V3). Megatron's own sums k / groups kept.
    """
    is_v3 = config.model_type == "deepseek_v3"
    if not is_v3 and getattr(config, "topk_method", "") != "group_limited_greedy":
        return None

    def limited(scores: Tensor) -> Tensor:
        groups = scores.unflatten(1, (config.n_group, -1))
        best = groups.topk(2 if is_v3 else 1, -1).values.sum(-1).topk(config.topk_group, -1, sorted=False).indices
        is_kept = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
        return groups.masked_fill(~is_kept[:, :, None], -math.inf if is_v3 else 0.0).flatten(1)

    return limited


def with_bias(router: Any) -> None:
    """Give a router of Megatron's a bias that its library does not move: `m2flow.engines.models.routing` says when it moves."""
    del router.expert_bias
    router.register_buffer("expert_bias", torch.zeros(router.config.num_moe_experts, dtype=torch.float32))


def route(layer: Any, number: int, limit: Limit | None) -> None:
    """Have one of Megatron's layers tell its router whose rows it computes, each time that it runs.

    Args:
        number: of the router, of all of the model's.
    """
    router = layer.mlp.router
    replay, gating = Replay(number, limit), router.gating
    router.router_replay = replay

    def taught(hidden: Tensor) -> Tensor:
        logits: Tensor = gating(hidden)
        if replay.routing is None or replay.routing.balanced is None:
            return logits
        return replay.routing.balanced.taught(number, logits.flatten(0, -2)).view_as(logits)

    router.gating = taught

    def tell(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        replay.routing = given["packed_seq_params"].routing

    layer.register_forward_pre_hook(tell, with_kwargs=True)
