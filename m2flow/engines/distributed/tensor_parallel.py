"""Split layers or sequences over a few ranks: tensor parallelism through DTensor, DeepSpeed's AutoTP, and Ulysses.

ranks = data x tensor;  q, k, v, gate, up: by output (colwise) --heads, widths--> o, down: by input (rowwise) --summed--> hidden states

Which layer is split how is the architecture's own plan (`config.base_model_tp_plan`). Ranks of a tensor group see the same samples; what is
not split is the same on all of them. Norms inside an attention work on a rank's own heads, so their gradients are parts of a sum.

Limits: embeddings and the head are not split; nothing with adapters; architectures whose plan says something else are refused by name.
Source: Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM), with PyTorch's DTensor.

the architecture's plan --told--> the library splits its layers --> a rank's part --whole--> the weight under its Hugging Face name
                                                                        a whole one --part--> what a rank holds of it

The plan is the one that FSDP2's `tp` goes by (`m2flow.engines.distributed.tensor_parallel`). A layer is split into parts of equal
size, in the order of
ranks, by output or by input, so parts are put together here; what the library has for that gathers a whole model, or saves one rank's part.

A gradient's norm counts each number once: what is not split is on every rank of a tensor group. In the flat parts that ZeRO makes of all
weights, `Split.mark` finds it.

Source: DeepSpeed 0.19, `tensor_parallel.partition_config`; Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM).

packed rows --share--> this rank's rows --layers--> q, k, v of its rows, all heads --all-to-all--> of all rows, some heads
                 one number a token <--gather-- logits of its rows <--layers-- all heads of its rows <--all-to-all-- packed attention

Rows are dealt out in the order of ranks, whatever samples they are of: what a row attends to is the layout's, which every rank has. So
micro-batches stay packed, and a prompt that a group shares still goes through the model once. What the loss needs of each token is then on
every rank, as on one; a gradient goes back to the rank whose row said it, and gradients of weights are a sum over ranks, as with other
samples. To the library these are data-parallel ranks: told of a sequence group (`mpu`), it reports a norm too large by that group's size
in stages 1 and 2.

Limit: heads of one size, whose number the ranks divide.
Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses), with the library's `UlyssesSPAttentionHF`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from m2flow.engines.models.adamw import squared_norm
from m2flow.engines.models.packing import AttentionLayout, Packed, packed_attention
from m2flow.errors import EngineError

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""A layer's weights split by output, by input; and weights that are whole on every rank, whose gradients are parts of a sum."""
_STYLES = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}


def grid(device: str, num_ranks: int, tp: int) -> DeviceMesh:
    """All ranks as `data` times `tensor`, neighbours in a tensor group. Collective."""
    return init_device_mesh(torch.device(device).type, (num_ranks // tp, tp), mesh_dim_names=("data", "tensor"))


def check(num_ranks: int, tp: int, *, has_adapters: bool) -> None:
    """Raises `EngineError`: so many ranks are no grid, or adapters would have to be split too."""
    if tp < 1 or num_ranks % tp:
        raise EngineError(f"tp is {tp}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of train.options.tp.")
    if tp > 1 and has_adapters:
        raise EngineError(
            "adapters are not split over tensor-parallel ranks", now="Leave tp out: each rank holds a part of the base anyway."
        )


def split(model: Any, mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Split a model's layers over the tensor ranks of a grid, in place.

    Returns:
        The modules whose own parameters have gradients that are parts of a sum over those ranks.
    Raises:
        EngineError: the architecture has no plan for it, or its heads do not divide.
    """
    tensor = mesh["tensor"]
    plan = plan_of(model, tensor.size())
    parallelize_module(model.base_model, tensor, {pattern: _STYLES[style]() for pattern, style in plan.items() if style in _STYLES})
    return modules_of(model, plan, SUMMED)


def plan_of(model: Any, tp: int) -> dict[str, str]:
    """How the architecture's layers are split over so many ranks: COLWISE, ROWWISE or SUMMED, by pattern of names below `base_model`.

    Raises:
        EngineError: it has no plan for it, another one, or heads that do not divide.
    """
    config = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {*_STYLES, SUMMED})
    if not plan or unknown:
        what = f"wants {', '.join(unknown)}" if unknown else "has none"
        raise EngineError(
            f"a {config.model_type!r} model can't be split over ranks here: its tensor-parallel plan {what}", now="Leave tp out."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := int(getattr(config, name))) % tp:
            raise EngineError(f"tp is {tp}, which does not divide the model's {name}, {count}", now="Take a tp that does.")
    return plan


def modules_of(model: Any, plan: Mapping[str, str], style: str) -> list[torch.nn.Module]:
    """The modules that a plan gives this style."""
    patterns = [pattern for pattern, of_one in plan.items() if of_one == style]
    return [module for name, module in model.base_model.named_modules() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def add_up(modules: list[torch.nn.Module], mesh: DeviceMesh) -> None:
    """Make whole gradients of the parts that each tensor rank has. Collective."""
    # Asked anew each time: who spreads a module over ranks puts other parameters in the place of its own.
    for parameter in [parameter for module in modules for parameter in module.parameters(recurse=False)]:
        if (part := parameter.grad) is not None:
            dist.all_reduce(part.to_local() if hasattr(part, "to_local") else part, group=mesh["tensor"].get_group())


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

    def deepspeed_config(self) -> dict[str, Any]:
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

    def attach_group(self, group: Any) -> None:
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


# Shapes: R rows of the packed sequence, T predicted tokens, t those that this rank's rows predict.


class Sequence:
    """The ranks that share sequences, for one model.

    Args:
        group: of torch.distributed, the ranks that have parts of the same sequences.
        exchange: the library's class, `UlyssesSPAttentionHF`.
    Raises:
        EngineError: the model's heads can't be shared out.
    """

    def __init__(self, model: Any, group: Any, exchange: Callable[..., Any]) -> None:
        config = model.config.get_text_config()
        self._group, self._count, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        check_heads(config, self._count)
        self._config = config
        self._make_exchange = exchange
        self._exchange: Any = None

    def share(self, packed: Packed) -> tuple[Packed, Tensor]:
        """This rank's rows, and which of the T tokens they predict, bool [T]. Rows that fill up the last share attend to themselves."""
        num_more = -packed.num_rows % self._count
        num_rows = (packed.num_rows + num_more) // self._count
        start = self._rank * num_rows
        which = (packed.predictors >= start) & (packed.predictors < start + num_rows)

        def own(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows, (0, num_more))[:, start : start + num_rows]

        layout = replace(_with_rows(packed.layout, packed.num_rows, num_more), exchange=self._around)
        return Packed(
            own(packed.input_ids), own(packed.position_ids), layout, packed.predictors[which] - start, packed.targets[which]
        ), which

    def gather(self, values: Tensor, which: Tensor) -> Tensor:
        """One number for each of the T tokens, from the ranks whose rows said them, [t] to [T]. Collective."""
        found: Tensor = _Gathered.apply(values, which, self._group)
        return found

    def _around(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, None]:
        """The attention between two exchanges: query [1, H, R / ranks, D] to [1, R / ranks, H D]."""
        if self._exchange is None:
            self._exchange = self._make_exchange(
                packed_attention,
                batch_size=1,
                attn_head_count=self._config.num_attention_heads,
                attn_head_size=query.shape[-1],
                kv_head_count=self._config.num_key_value_heads,
                num_hidden_layers=self._config.num_hidden_layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        # It gathers positions for attentions that ask for them; the layout has them here.
        features["position_ids"] = torch.zeros((1, 1), dtype=torch.int64, device=query.device)
        output: Tensor = self._exchange(module, query, key, value, None, **features)[0]
        return output.unflatten(-1, (query.shape[1], -1)), None


def check_heads(config: Any, sp: int) -> None:
    """Raises `EngineError`: a model's heads can't be shared out among so many ranks."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := int(getattr(config, name))) % sp:
            raise EngineError(f"sp is {sp}, which does not divide the model's {name}, {heads}", now="Take an sp that does.")
    if getattr(config, "v_head_dim", None):
        raise EngineError(f"a {config.model_type!r} model has keys and values of two sizes, which Ulysses has not", now="Leave sp out.")


def _with_rows(layout: AttentionLayout, num_rows: int, num_more: int) -> AttentionLayout:
    """The layout with a few more rows after the last, a sequence of their own."""
    if not num_more:
        return layout
    slots, more = len(layout.row_of_slot), torch.arange(num_more, device=layout.row_of_slot.device)
    return replace(
        layout,
        buckets=(*layout.buckets, (1, num_more)),
        row_of_slot=torch.cat((layout.row_of_slot, more + num_rows)),
        slot_of_row=torch.cat((layout.slot_of_row, more + slots)),
    )


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Every rank computes the same from what is gathered, so each takes its own values' gradient as it is: a sum would count it again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, group: Any) -> Tensor:
        ctx.which = which
        whole = values.new_zeros(len(which))
        whole[which] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.which], None, None
