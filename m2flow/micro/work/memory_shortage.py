"""An engine that runs out of memory: said with what everybody holds there, and what to change.

    MemoryError, an allocator's error --accounted--> OutOfMemory: weights, gradients, optimiser, cache of each engine; the rest; settings

Source of the words that say how much was asked for: PyTorch's allocators (c10/core/CPUAllocator.cpp, c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import functools
import re
import resource
from collections.abc import Callable, Mapping
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

from m2flow.engines.accounting import Memory, size_of
from m2flow.errors import M2FlowError, OutOfMemory, is_out_of_memory
from m2flow.macro.randomness import loaded_torch

P = ParamSpec("P")
R = TypeVar("R")

_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+ ?(?:[KMGT]i?B|bytes))")
_NOW = {
    "train": "Lower `train: {token_budget}` in the cluster spec (activations grow with the tokens of a micro-batch), or keep fewer of them "
    "with `activation_checkpointing` of the engine deepspeed; for the rest more ranks (fsdp, ZeRO), or `offload_optimizer`.",
    "rollout": "Lower `rollout: {max_running}` in the cluster spec, or the cache: option `kv_budget_bytes` of the engine embedded, "
    "`--mem-fraction-static` in the args of sglang.",
    "switch": "The engines do not fit side by side: `placement: split`, more ranks for the trainer, or a smaller cache.",
}


class Holder(Protocol):
    """Has engines."""

    def held(self) -> Mapping[str, Memory]:
        """What each engine of this process holds of its device, by role and kind."""
        ...


H = TypeVar("H", bound=Holder)


def accounted(kind: str) -> Callable[[Callable[Concatenate[H, P], R]], Callable[Concatenate[H, P], R]]:
    """For a method that makes engines of this kind work (`train`, `rollout`), or change places (`switch`)."""

    def around(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
        @functools.wraps(method)
        def work(self: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except OutOfMemory as error:
                raise _said(kind, error, self.held()) from error
            except M2FlowError:
                raise
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise _said(kind, error, self.held()) from error

        return work

    return around


def peak_bytes() -> tuple[int, Literal["GPU", "host"]]:
    """The most that this process has taken so far, and of what: of its GPU if torch has used one, else of the host."""
    torch = loaded_torch()
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated()), "GPU"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "host"


def _said(kind: str, error: BaseException, held: Mapping[str, Memory]) -> OutOfMemory:
    asked = _ASKED.search(str(error))
    peak, where = peak_bytes()
    parts = "; ".join(f"{name}: {memory.words()}" for name, memory in held.items())
    rest = max(0, peak - sum(memory.total for memory in held.values()))
    what = {"train": "training", "rollout": "generating", "switch": "changing places"}[kind]
    begin = error.what if isinstance(error, OutOfMemory) else f"out of memory while {what}{f', asked for {asked[1]} more' if asked else ''}"
    return (type(error) if isinstance(error, OutOfMemory) else OutOfMemory)(
        f"{begin}. Its process holds {parts}; the other {size_of(rest)} of {size_of(peak)} that it had at most of the {where}'s are "
        "activations, libraries and what allocators keep",
        now=_NOW[kind],
    )
