"""DeepSpeed's tensor parallelism (AutoTP): what it is told to split, and how a rank's part of a weight becomes a whole one again.

    the architecture's plan --told--> the library splits its layers --> a rank's part --whole--> the weight under its Hugging Face name
                                                                        a whole one --part--> what a rank holds of it

The plan is the one that FSDP2's `tp` goes by (`m2flow.engines.tensor_parallel`). A layer is split into parts of equal size, in the order of
ranks, by output or by input, so parts are put together here; what the library has for that gathers a whole model, or saves one rank's part.

A gradient's norm counts each number once: what is not split is on every rank of a tensor group. In the flat parts that ZeRO makes of all
weights, `Split.mark` finds it.

Source: DeepSpeed 0.19, `tensor_parallel.partition_config`; Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.recipe_adamw import squared_norm
from m2flow.engines.tensor_parallel import COLWISE, ROWWISE, SUMMED, modules_of, plan_of
from m2flow.errors import EngineError

_KINDS = {COLWISE: "column", ROWWISE: "row"}


class Split:
    """Which of a model's weights are split over the ranks of a tensor group, and along what. Made before the library splits them.

    Raises:
        EngineError: the architecture has no plan for it, or a width does not divide.
    """

    def __init__(self, model: Any, tp: int) -> None:
        self.tp = tp
        self._plan = plan_of(model, tp)
        self._dims: dict[Tensor, int] = {}
        self._repeated: dict[Tensor, list[tuple[int, int]]] = {}
        """By flat part: where it holds what the other ranks of the tensor group hold too."""
        self._group: Any = None
        for style, dim in ((COLWISE, 0), (ROWWISE, 1)):
            for module in modules_of(model, self._plan, style):
                for name, tensor in module.named_parameters(recurse=False):
                    if style == ROWWISE and name != "weight":
                        continue  # A bias is added to the sum.
                    if tensor.shape[dim] % tp:
                        raise EngineError(
                            f"tp is {tp}, which does not divide a layer of width {tensor.shape[dim]}", now="Take a tp that does."
                        )
                    self._dims[tensor] = dim
        self._shapes = {tensor: tensor.shape for tensor in self._dims}

    def told(self) -> dict[str, Any]:
        """What `deepspeed.initialize` is told as `tensor_parallel`. Embeddings and the head stay whole."""
        specs: list[dict[str, Any]] = [
            {"patterns": [_regex(pattern)], "partition_type": _KINDS[style]} for pattern, style in self._plan.items() if style in _KINDS
        ]
        specs += [
            {"patterns": [_regex(pattern)], "partition_type": "skip", "grad_allreduce": True}
            for pattern, style in self._plan.items()
            if style == SUMMED
        ]
        return {
            "autotp_size": self.tp,
            "vocab_parallel_lm_head": False,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }

    def done(self, group: Any) -> None:
        """The library has split, over this group of ranks.

        Raises:
            EngineError: otherwise than it was told.
        """
        self._group = group
        for tensor, dim in self._dims.items():
            expected = [size // self.tp if i == dim else size for i, size in enumerate(self._shapes[tensor])]
            if list(getattr(tensor, "ds_shape", tensor.shape)) != expected:
                raise EngineError(
                    f"DeepSpeed has split a weight of shape {list(self._shapes[tensor])} into {list(tensor.shape)}, not {expected}",
                    now="Leave tp out: this release is not the one that m2flow knows.",
                )

    def is_split(self, tensor: Tensor) -> bool:
        return tensor in self._dims

    def whole(self, tensor: Tensor, part: Tensor) -> Tensor:
        """What this rank's part is a part of. Collective."""
        if tensor not in self._dims:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.tp)]
        dist.all_gather(parts, part, group=self._group)
        return torch.cat(parts, self._dims[tensor])

    def part(self, tensor: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a whole one; a view."""
        return whole.chunk(self.tp, self._dims[tensor])[dist.get_rank(self._group)] if tensor in self._dims else whole

    def mark(self, parts: Iterable[Tensor]) -> None:
        """Learn where flat parts hold what is repeated: they have a 1 there, and zeros elsewhere."""
        for part in parts:
            edges = torch.diff(part.detach().flatten().cpu() != 0, prepend=torch.tensor([False]), append=torch.tensor([False]))
            self._repeated[part] = [(int(start), int(end)) for start, end in edges.nonzero().flatten().view(-1, 2).tolist()]

    def square(self, part: Tensor, gradient: Tensor) -> Tensor:
        """A rank's share of the squared norm, float64: what the whole tensor group holds counts once in the group's sum."""
        total = squared_norm(part, gradient)
        if part in self._repeated:
            repeated = [gradient.view(-1)[start:end] for start, end in self._repeated[part]]
        else:
            repeated = [] if part in self._dims else [gradient]
        for piece in repeated:
            total = total - squared_norm(part, piece) * (1 - 1 / self.tp)
        return total

    def total(self, square: Tensor) -> Tensor:
        """The sum over the ranks of the tensor group."""
        dist.all_reduce(square, group=self._group)
        return square


def _regex(pattern: str) -> str:
    """The library matches names of weights from their start, with whatever is around the model in front."""
    return rf"(.*\.)?{re.escape(pattern).replace(re.escape('*'), '[^.]+')}\.weight$"
