"""Split a model's weights over a few ranks: layers by their widths (DTensor, or DeepSpeed's AutoTP), and experts whole.

How the rows of a pass are split over ranks is `m2flow.engines.distributed.sequence_parallel`'s.

Tensor parallelism: ranks = data x tensor

    q, k, v, gate, up: by output (colwise) --heads, widths--> o, down: by input (rowwise) --summed--> hidden states

Which layer is split how is the architecture's own plan (`config.base_model_tp_plan`). Ranks of a tensor group see the same samples; what is
not split is the same on all of them. An attention or MLP (`Block`) is then a sum over ranks, each of which computes its part from the same
hidden states: one collective forward and one backward, and what is whole inside it, as the norms of its heads or the projections to latent
vectors, has gradients that are parts of a sum. Limits: embeddings and the head are not split; architectures whose plan has other styles are
refused by name. Others than those of `STAGED` are split by PyTorch, with a collective for each layer.

Adapters (LoRA) are split as the layer that they adapt, and add no collective to a `Block`:

    by output:  (W_i + scale B_i A) x        A is whole, and its gradient a part of a sum
    by input:   (W_i + scale B A_i) x_i      B is whole, and its gradient a part of a sum

Expert parallelism (`split_experts`): ranks = replicas x expert ranks

    rows, k experts each --sorted by expert, all-to-all--> the ranks that have them: the model's own experts --back--> gated, summed

Ranks of an expert group see samples of their own, and each has some experts of every layer for all of them. A gradient of an expert is a
sum over its group when it arrives; what is left is to sum it over replicas. No row is dropped and none is added, so numbers are those of
one rank. All ranks of a group make equally many passes. With tensor parallelism the ranks of `tp * ep` neighbours have a layer's experts;
those of a tensor group have the same rows, so each sends a part of them, and all gather what comes back:

    the same rows on tp ranks --each its part--> exchange, experts, exchange --gathered--> the same hidden states on tp ranks

For DeepSpeed's AutoTP (`AutoTP`) the same plan is passed to the library:

    the architecture's plan --deepspeed_config--> the library splits its layers --> a rank's part --whole--> the weight under its HF name
                                                                                    a whole one --part--> what a rank holds of it

A layer is split into parts of equal size, in the order of ranks, by output or by input, so parts are joined here; the library's own
functions gather a whole model, or save one rank's part. A gradient's norm counts each number once: what is not split is on every rank of a
tensor group. In the flat parts that ZeRO makes of all weights, `AutoTP.mark` finds it.

Source: Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM), with PyTorch's DTensor; DeepSpeed 0.19, `tensor_parallel.partition_config`.
Experts: Lepikhin et al. 2020, arXiv:2006.16668 (GShard), without its capacity.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, _collective_utils, _redistribute, debug, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from m2flow.engines.distributed import COLWISE, ROWWISE, SUMMED, plan_of
from m2flow.engines.distributed.guard import Guard, GuardedPart, Midway
from m2flow.engines.models import lora
from m2flow.engines.models.optimizers import squared_norm
from m2flow.engines.registry import STACKED, STAGED
from m2flow.errors import EngineError

_STYLES = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}
"""By the dimension of a weight [outputs, inputs] that is split: 0, and 1."""


def grid(device: str, num_ranks: int, tp: int, pp: int = 1) -> DeviceMesh:
    """Make the device mesh of all ranks, `stage` times `data` times `tensor`, with neighbours in a tensor group. Collective."""
    forget_meshes()
    return init_device_mesh(torch.device(device).type, (pp, num_ranks // (tp * pp), tp), mesh_dim_names=("stage", "data", "tensor"))


def forget_meshes() -> None:
    """Make DTensor forget what it remembers by mesh.

    An equal mesh of a trainer that has ended has groups that are gone, or others now. And what is remembered keeps these groups, of which
    each has threads that wake a hundred times a second.
    """
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for module, name in (
        (_redistribute, "clear_redistribute_planner_cache"),
        (debug, "_clear_sharding_prop_cache"),
        (debug, "_clear_python_sharding_prop_cache"),
        (debug, "_clear_fast_path_sharding_prop_cache"),
    ):
        getattr(module, name, int)()  # By release of torch.


Summed = list[tuple[torch.nn.Module, str]]
"""Parameters, each by its module and its name there. Who spreads a module over ranks puts other parameters in the place of its own."""


def split(model: Any, mesh: DeviceMesh) -> tuple[Summed, dict[torch.nn.Module, Block]]:
    """Split a model's layers over the tensor ranks of a grid, in place.

    Returns:
        The parameters whose gradients are parts of a sum over those ranks, and what is computed in parts, by its module.
    Raises:
        EngineError: the architecture has no plan for it, or its heads or widths do not divide.
    """
    tensor = mesh["tensor"]
    config = model.config.get_text_config()
    plan = plan_of(config, tensor.size(), with_experts=True)
    if config.model_type not in (*STAGED, *STACKED):
        _split_by_pytorch(model, plan, tensor)
        summed = modules_of(model, plan, SUMMED)
        return [(module, name) for module in summed for name, _ in module.named_parameters(recurse=False)], {}
    ends = modules_of(model, plan, ROWWISE)
    blocks = {module: Block(module, tensor) for module in model.modules() if any(child in ends for child in module.children())}
    columns, rows = _linear_layers(model, plan)
    for layers, dim in ((columns, 0), (rows, 1)):
        for layer in layers:
            _split_layer(layer, tensor, dim)
    own = {(layer, name) for layer in columns for name in ("weight", "bias")} | {(layer, "weight") for layer in rows}
    inside = [(module, name) for block in blocks for module in block.modules() for name, _ in module.named_parameters(recurse=False)]
    return [one for one in inside if one not in own], blocks


def _linear_layers(model: Any, plan: Mapping[str, str]) -> tuple[list[torch.nn.Linear], list[torch.nn.Linear]]:
    """The layers that a plan splits by output, and by input; of an adapted one its own, and the adapter's factor that goes with it."""
    columns, rows = (
        [one for layer in modules_of(model, plan, style) for one in lora.split_with(layer, dim)] for dim, style in enumerate(_STYLES)
    )
    return columns, rows


def _split_by_pytorch(model: Any, plan: Mapping[str, str], tensor: DeviceMesh) -> None:
    names = {module: name for name, module in model.named_modules()}
    of_styles = zip(_STYLES.values(), _linear_layers(model, plan), strict=True)
    parallelize_module(model, tensor, {names[layer]: style() for style, layers in of_styles for layer in layers})


def _split_layer(layer: torch.nn.Linear, tensor: DeviceMesh, dim: int) -> None:
    """Leave of a linear layer this rank's part, along a dimension of its weight [outputs, inputs]."""
    if layer.weight.shape[dim] % tensor.size():
        what = f"tp is {tensor.size()}, which does not divide a layer of width {layer.weight.shape[dim]}"
        raise EngineError(what, now="Take a tp that does.")
    for name in ("weight", "bias") if dim == 0 and layer.bias is not None else ("weight",):
        held = getattr(layer, name)
        part = distribute_tensor(held.detach(), tensor, [Shard(dim)], src_data_rank=None)
        setattr(layer, name, torch.nn.Parameter(part, held.requires_grad))
    # A bias of what is summed is added once.
    layer.adds_bias = dim == 0 or tensor.get_local_rank() == 0
    layer.forward = functools.partial(_computed_part, layer)


def own_weights(layer: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    """What a linear layer computes with on this rank, whether it is split or not: a weight [outputs, inputs], and a bias [outputs]."""
    weight, bias = (one.to_local() if hasattr(one, "to_local") else one for one in (layer.weight, layer.bias))
    return weight, bias if bias is None or getattr(layer, "adds_bias", True) else bias * 0.0


def _computed_part(layer: torch.nn.Linear, given: Tensor) -> Tensor:
    return torch.nn.functional.linear(given, *own_weights(layer))


class Block:
    """An attention or MLP that ranks compute together, as each tensor rank a part of a sum. An `Exchange` of `guard.Guard`.

    Args:
        tensor: the mesh of those ranks; None: there are none, and ranks have rows of their own.
    """

    def __init__(self, module: torch.nn.Module, tensor: DeviceMesh | None) -> None:
        self._module, compute = module, module.forward
        self._group = None if tensor is None else tensor.get_group()
        self.midway: Midway | None = None
        """What context ranks do within it."""
        self.num_begun = self.num_ended = 0
        """Sums over the ranks, in forward passes."""
        self.output: Tensor | None = None
        self.compute: Callable[..., Any] = compute
        """What the module does; who guards it puts another in its place."""
        module.forward = functools.wraps(compute)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take hidden states [.., H] first, and give as many, or a tuple that begins with them. Collective, and on the way back too."""
        hidden, *more = args or (kwargs.pop("hidden_states"),)
        self.num_begun += 1
        found = self.compute(hidden if self._group is None else _Spread.apply(hidden, self._group), *more, **kwargs)
        own, *beside = found if isinstance(found, tuple) else (found,)
        self.output = own if self._group is None else _Total.apply(own, self._group)
        self.num_ended = self.num_begun
        return (self.output, *beside) if isinstance(found, tuple) else self.output

    def without_rows(self, hidden: Tensor) -> None:
        self(hidden)  # What has failed computes nothing more, and gives zeros.

    def guard(self, guard: Guard, name: str, weights: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        """Have a failure of this rank's part noted: the other ranks wait to add theirs. Arguments as of `Guard.over`."""
        self.compute = GuardedPart(guard, self.compute, weights, name, is_pair=name.endswith("attn"), midway=self.midway)


class _Spread(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states that ranks compute parts of a sum from; their gradient is the sum of those that come back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _total(grad, ctx.group), None


class _Total(torch.autograd.Function):  # type: ignore[misc]
    """A sum over ranks, which is the same on all of them, and so is its gradient: that of each part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        return _total(own, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _total(own: Tensor, group: Any) -> Tensor:
    found = own.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def modules_of(model: Any, plan: Mapping[str, str], style: str) -> list[torch.nn.Module]:
    """Find the modules to which a plan gives this style."""
    patterns = [pattern for pattern, of_one in plan.items() if of_one == style]
    return [module for name, module in model.base_model.named_modules() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def add_up(summed: Summed, mesh: DeviceMesh) -> None:
    """Sum the partial gradients of tensor ranks. Collective."""
    for module, name in summed:
        if (part := getattr(module, name).grad) is not None:
            dist.all_reduce(part.to_local() if hasattr(part, "to_local") else part, group=mesh["tensor"].get_group())


# ---- experts: E of a layer, e = E / ranks of them here, k of a row; R rows of a pass, S of all ranks that come here, H hidden


def expert_grid(device: str, num_ranks: int, count: int, pp: int = 1) -> DeviceMesh:
    """Make the device mesh of a stage's ranks, `replica` times `expert`, with `count` neighbours in an expert group. All ranks call it."""
    forget_meshes()
    sizes = (pp, num_ranks // (count * pp), count)
    mesh = init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=("stage", "replica", "expert"))["replica", "expert"]
    mesh._flatten("data")  # Sums over all of them, as of norms, are then one collective.
    return mesh


def split_experts(model: Any, mesh: DeviceMesh, alike: Any = None) -> dict[torch.nn.Module, OwnExperts]:
    """Leave of each layer's experts this rank's own, and send rows to those of the others.

    Args:
        alike: a group of ranks that have the same rows; None: no others have this rank's.
    Returns:
        The modules of experts, whose weights are DTensors over the expert ranks: [E, ...] by experts. With each what it computes here.
    """
    found: dict[torch.nn.Module, OwnExperts] = {}
    for module in [module for module in model.modules() if type(module).__name__.endswith("Experts")]:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            held = getattr(module, name)
            part = distribute_tensor(held.detach(), mesh["expert"], [Shard(0)], src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(part, held.requires_grad))
        found[module] = OwnExperts(module, names, mesh["expert"].size())
        module.forward = functools.partial(_shared_out, found[module], mesh["expert"].get_group(), alike)
    return found


class OwnExperts:
    """This rank's experts of a layer, computed by the model's own code: gated MLPs, e of them. An `Exchange` of `guard.Guard`."""

    def __init__(self, module: torch.nn.Module, names: list[str], count: int) -> None:
        self._module, self._names = module, names
        self._compute = type(module).forward  # Who shards a module gives it another class.
        self._stand_in: Any = copy.copy(module)
        self._stand_in._parameters = {}
        self._stand_in.num_experts = self.num = int(str(module.num_experts)) // count
        self.num_begun = self.num_ended = 0
        """Exchanges of rows with the other ranks, in forward passes."""
        self.output: Tensor | None = None
        self.compute: Callable[[Tensor, Tensor], Tensor] = self._computed
        """What `_computed` does; who guards it puts another in its place."""

    def without_rows(self, hidden: Tensor) -> None:
        # As many: ranks that have the same share them out. On the way back, their gradient is waited for.
        rows = hidden.flatten(0, -2) * 0.0
        experts = torch.arange(len(rows), device=rows.device) % int(str(self._module.num_experts))
        self._module(rows, experts[:, None], rows[:, :1] * 0.0)

    def guard(self, guard: Guard, name: str, weights: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        """Have a failure of this rank's experts noted: the other ranks wait for what they make of their rows."""
        self.compute = GuardedPart(guard, self._computed, weights, name)

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute rows [S, H] by the experts of these numbers, int64 [S], each by one."""
        num_rows = len(rows)
        if not num_rows:
            # What is computed must hang on the weights and on the exchange, also by code that computes nothing without rows: others wait to
            # sum their gradients with these, and to have gradients of their rows.
            rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
        for name in self._names:
            self._stand_in.__dict__[name] = getattr(self._module, name).to_local()
        try:
            found: Tensor = self._compute(self._stand_in, rows, experts[:, None], rows.new_ones(len(rows), 1))
        finally:
            for name in self._names:
                del self._stand_in.__dict__[name]
        return found[:num_rows]


def _shared_out(own: OwnExperts, group: Any, alike: Any, hidden: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
    """What a layer's experts make of rows [R, H]: the sum over their experts, int64 [R, k], by gates [R, k]. Collective.

    Args:
        alike: the ranks that have the same rows, each of which sends a part of them; None: this rank alone.
    """
    own.num_begun += 1
    if alike is None:
        own.output = _sent_around(own, group, hidden, experts, gates)
    else:
        held, num_rows = _part_of(experts, alike), len(experts)
        found = _sent_around(own, group, _Held.apply(hidden, alike), held, _Held.apply(gates, alike))
        own.output = _Joined.apply(found, num_rows, alike)
    own.num_ended = own.num_begun
    return own.output


def _sent_around(own: OwnExperts, group: Any, hidden: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
    """Compute `_shared_out` for rows that no other rank has."""
    count, num_each = dist.get_world_size(group), experts.shape[1]
    order = torch.argsort(experts.flatten(), stable=True)
    sizes = torch.bincount(experts.flatten(), minlength=count * own.num)
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)  # By sender and by expert here.
    leave, arrive = (of_experts.view(count, own.num).sum(1).tolist() for of_experts in (sizes, arriving))
    rows = _Exchanged.apply(hidden[order // num_each], leave, arrive, group)
    found = own.compute(rows, torch.arange(own.num, device=rows.device).repeat(count).repeat_interleave(arriving))
    back = _Exchanged.apply(found, arrive, leave, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    summed: Tensor = (back[place].view(*experts.shape, hidden.shape[1]) * gates[..., None]).sum(1).to(hidden.dtype)
    return summed


class _Held(torch.autograd.Function):  # type: ignore[misc]
    """This rank's part of rows [R, ..] that all ranks of a group have. Backward, all have the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.num_rows, ctx.group = len(rows), group
        return _part_of(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _joined(grad, ctx.num_rows, ctx.group), None


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """All R rows, from the parts of all ranks of a group. All compute the same from them, so a part's gradient is that of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: int, group: Any) -> Tensor:
        ctx.group = group
        return _joined(rows, num_rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _part_of(grad, ctx.group), None, None


def _bounds(num_rows: int, group: Any) -> list[int]:
    count = dist.get_world_size(group)
    return [num_rows * rank // count for rank in range(count + 1)]


def _part_of(rows: Tensor, group: Any) -> Tensor:
    bounds, rank = _bounds(len(rows), group), dist.get_rank(group)
    return rows[bounds[rank] : bounds[rank + 1]].clone()


def _joined(own: Tensor, num_rows: int, group: Any) -> Tensor:
    sizes = [end - start for start, end in itertools.pairwise(_bounds(num_rows, group))]
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all of rows: so many leave for each rank of a group, and so many arrive from each. Backward, gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leave: list[int], arrive: list[int], group: Any) -> Tensor:
        ctx.leave, ctx.arrive, ctx.group = leave, arrive, group
        return _exchanged(rows, leave, arrive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.arrive, ctx.leave, ctx.group), None, None, None


def _exchanged(rows: Tensor, leave: list[int], arrive: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(arrive), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arrive, leave, group=group)
    return found


# ---- DeepSpeed's AutoTP

_KINDS = {COLWISE: "column", ROWWISE: "row"}


class AutoTP:
    """Which of a model's weights are split over the ranks of a tensor group, and along what. Made before the library splits them.

    Raises:
        EngineError: the architecture has no plan for it, or a width does not divide.
    """

    def __init__(self, model: Any, tp: int) -> None:
        self.tp = tp
        self._plan = plan_of(model.config, tp)
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
        """Build `tensor_parallel` for `deepspeed.initialize`. Embeddings and the head stay whole."""
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
        """Note the group of ranks over which the library has split the layers.

        Raises:
            EngineError: otherwise than it was told.
        """
        self._group = group
        for tensor, dim in self._dims.items():
            expected = [size // self.tp if i == dim else size for i, size in enumerate(self._shapes[tensor])]
            if list(getattr(tensor, "ds_shape", tensor.shape)) != expected:
                raise EngineError(
                    f"DeepSpeed has split a weight of shape {list(self._shapes[tensor])} into {list(tensor.shape)}, not {expected}",
                    now="Leave tp out, or install a release of DeepSpeed that m2flow was tested with: 0.19.",
                )

    def is_split(self, tensor: Tensor) -> bool:
        return tensor in self._dims

    def whole(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Gather a whole tensor from the ranks' parts. Collective."""
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
        """Note where flat parts hold repeated values: the parts passed have a 1 there, and zeros elsewhere."""
        for part in parts:
            edges = torch.diff(part.detach().flatten().cpu() != 0, prepend=torch.tensor([False]), append=torch.tensor([False]))
            self._repeated[part] = [(int(start), int(end)) for start, end in edges.nonzero().flatten().view(-1, 2).tolist()]

    def square(self, part: Tensor, gradient: Tensor) -> Tensor:
        """A rank's share of the squared norm, float64: repeated values count once in the tensor group's sum."""
        total = squared_norm(part, gradient)
        if part in self._repeated:
            repeated = [gradient.view(-1)[start:end] for start, end in self._repeated[part]]
        else:
            repeated = [] if part in self._dims else [gradient]
        for piece in repeated:
            total = total - squared_norm(part, piece) * (1 - 1 / self.tp)
        return total

    def total(self, square: Tensor) -> Tensor:
        """Sum over the ranks of the tensor group."""
        dist.all_reduce(square, group=self._group)
        return square


def _regex(pattern: str) -> str:
    """Turn a pattern of names into the library's regular expression, which also has to match the prefix of wrappers."""
    return rf"(.*\.)?{re.escape(pattern).replace(re.escape('*'), '[^.]+')}\.weight$"
