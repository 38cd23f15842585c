"""Tensor parallelism for a model of transformers: layers split over a few ranks, beside whatever spreads them over others. Through DTensor
here; DeepSpeed, which splits by itself (`m2flow.engines.autotp`), is told by the same plan.

    ranks = data x tensor;  q, k, v, gate, up: by output (colwise) --heads, widths--> o, down: by input (rowwise) --summed--> hidden states

Which layer is split how is the architecture's own plan (`config.base_model_tp_plan`). Ranks of a tensor group see the same samples; what is
not split is the same on all of them. Norms inside an attention work on a rank's own heads, so their gradients are parts of a sum.

Limits: embeddings and the head are not split; nothing with adapters; architectures whose plan says something else are refused by name.
Source: Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM), with PyTorch's DTensor.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
