"""What megatron-core uses of Transformer Engine, in plain torch: the package itself needs a GPU.

Signatures, names and marks of parameters, and what tensor ranks send, are those of release 2.6; kernels, FP8 and overlap are not here.
The folder above is on the path of the tests that need it, and of no others: Megatron takes other ways where it finds the package.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__version__ = "2.6.0"


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Rows of all tensor ranks; on the way back, each rank's of the sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.group).chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class _Scattered(torch.autograd.Function):  # type: ignore[misc]
    """This rank's rows of the sum over tensor ranks; on the way back, all rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(own, group).chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class _Copied(torch.autograd.Function):  # type: ignore[misc]
    """The same; on the way back, the sum over tensor ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.group), None


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    """The sum over tensor ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        return _summed(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _summed(tensor: Tensor, group: Any) -> Tensor:
    found = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


class _Module(torch.nn.Module):  # type: ignore[misc]
    """What all modules have: a state for FP8, which is empty."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        *,
        hidden_size: int = 0,
        **how: Any,
    ) -> None:
        super().__init__()
        assert not how["zero_centered_gamma"]
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape or hidden_size, dtype=how["params_dtype"], device=how["device"]))
        self.weight.sequence_parallel = sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(_Module):
    pass


class _Parallel(_Module):
    """A matrix, or several, whose columns or rows are split over tensor ranks; or that is whole."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], None] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        assert parallel_mode in (None, "column", "row")
        assert not return_bias
        self.tp_group, self.tp_size, self.parallel_mode, self.use_bias = tp_group, tp_size, parallel_mode, bias
        self.tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self._init_method, self._of = init_method or torch.nn.init.xavier_uniform_, {"dtype": params_dtype, "device": device}

    def _made(self, name: str) -> None:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **self._of))
        self._init_method(weight.data)
        if self.tp_size > 1:
            weight.tensor_model_parallel, weight.partition_dim = True, 1 if self.parallel_mode == "row" else 0
        self.register_parameter(name, weight)

    def _before(self, x: Tensor) -> Tensor:
        if self.tp_size == 1 or self.parallel_mode != "column":
            return x
        return (_Gathered if self.sequence_parallel else _Copied).apply(x, self.tp_group)

    def _after(self, found: Tensor) -> Tensor:
        if self.tp_size == 1 or self.parallel_mode != "row":
            return found
        return (_Scattered if self.sequence_parallel else _Summed).apply(found, self.tp_group)


class Linear(_Parallel):
    def __init__(self, in_features: int, out_features: int, **how: Any) -> None:
        super().__init__(in_features, out_features, **how)
        self._made("weight")
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._of)) if self.use_bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        found = self._after(torch.nn.functional.linear(self._before(x), self.weight))
        return found if self.bias is None else found + self.bias


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(in_features, out_features, **how)
        assert normalization == "RMSNorm"
        assert not zero_centered_gamma
        assert not return_layernorm_output
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=self.weight.dtype, device=self.weight.device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(torch.nn.functional.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class GroupedLinear(_Parallel):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, ub_name: str | None = None, **how: Any) -> None:
        super().__init__(in_features, out_features, **how)
        assert not self.use_bias
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self._made(f"weight{number}")

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        parts = x.split(m_splits)
        return torch.cat([torch.nn.functional.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class DotProductAttention(_Module):
    pass


class LayerNormMLP(_Module):
    """What PEFT looks for."""


class _DelayedScaling:
    pass


class _CudaRNGStatesTracker:
    pass


class _QuantizedTensor:
    pass


class _FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _module(name: str, **content: Any) -> None:
    """Make a module of the package that is no file."""
    made = types.ModuleType(f"{__name__}.{name}")
    vars(made).update(content)
    sys.modules[made.__name__] = made
    parent, _, own = made.__name__.rpartition(".")
    setattr(sys.modules[parent], own, made)


_module("common")
_module("common.recipe", DelayedScaling=_DelayedScaling)
_module(
    "pytorch",
    **{one.__name__: one for one in (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention, LayerNormMLP)},
)
_module("pytorch.distributed", CudaRNGStatesTracker=_CudaRNGStatesTracker, activation_recompute_forward=contextlib.nullcontext)
_module("pytorch.fp8", FP8GlobalStateManager=_FP8GlobalStateManager, fp8_autocast=contextlib.nullcontext)
_module("pytorch.tensor", QuantizedTensor=_QuantizedTensor)
_module("pytorch.ops", Sequential=torch.nn.Sequential, FusibleOperation=torch.nn.Module)
