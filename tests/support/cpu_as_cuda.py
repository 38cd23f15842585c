"""Let an unpatched megatron-core run without a GPU: for tests, in processes of their own, since it changes torch for a process.

Megatron asks torch for the current CUDA device and puts its tensors there. `pretend` makes that device the CPU, where everything that was
asked for is done at once: streams and events have nothing to wait for. What Megatron itself is told is in `_teach_megatron`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device

_HERE = torch.device("cpu")
_MAKERS = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like", "ones_like", "full_like")
_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def _here(function: Any) -> Any:
    """Makes what is asked of CUDA on the CPU.

    The functions that can be asked are replaced. A mode would be asked of every function, half a million in a suite: a fifth of its time.
    """

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _HERE
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return made


def _type_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Tensors say that they are CUDA's, by which optimisers and clipping choose."""
    found = _TYPE(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


_TYPE = torch.Tensor.type


class _Done:
    """A stream, or an event, of which everything has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def pretend() -> None:
    """Do so in this process, from now on. With a GPU, do nothing."""
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _HERE
    cuda.synchronize = lambda *_: None
    cuda.Stream = cuda.Event = _Done
    cuda.current_stream = lambda *_: _Done()
    cuda.manual_seed = torch.default_generator.manual_seed  # torch.manual_seed keeps, for a CUDA that comes later, who asked.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    dist.all_gather, dist.reduce_scatter = _gathering(dist.all_gather), _reducing(dist.reduce_scatter)
    _device._device_constructors()  # What `with torch.device(...)` is about: it is kept, and is of the functions before they are replaced.
    for name in _MAKERS:
        setattr(torch, name, _here(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _here(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.type = _type_of
    _teach_megatron()


def _gathering(gather: Any) -> Any:
    """Parts of different sizes too, as NCCL takes them and Gloo does not."""

    def all_gather(parts: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, own, group=group, async_op=async_op)
        longest = max(part.numel() for part in parts)
        padded = [own.new_zeros(longest) for _ in parts]
        gather(padded, torch.cat([own.flatten(), own.new_zeros(longest - own.numel())]), group=group)
        for part, found in zip(parts, padded, strict=True):
            part.copy_(found[: part.numel()].view_as(part))
        return None

    return all_gather


def _reducing(reduce: Any) -> Any:
    """Likewise, for the gradient of that."""

    def reduce_scatter(own: Any, parts: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return reduce(own, parts, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(parts))
        dist.all_reduce(whole, op, group=group)
        own.copy_(whole.split([len(part) for part in parts])[dist.get_rank(group)])
        return None

    return reduce_scatter


def _teach_megatron() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    modules: tuple[Any, ...] = (random, moe_utils, token_dispatcher)
    modules[0]._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        modules[1].te_general_gemm = None  # 0.16 reads the name, and defines it with Transformer Engine alone.
    modules[2].maybe_move_tensor_to_cpu = as_numbers  # It copies from CUDA tensors alone, and Gloo wants numbers.
