"""Handle an engine that runs out of memory: retry micro-batches in halves, and report what each engine holds when that does not help.

    MiniBatch.accumulate --engine.accumulate--> out of memory --engine.discard, earlier micro-batches again--> its halves
    MemoryError, an allocator's error --accounted--> OutOfMemory: weights, gradients, optimiser, cache of each engine; the rest; settings

The gradient of a mini-batch is a sum over its samples, or over its groups where the loss looks at those, so how it is cut changes only the
last bits. An engine that runs out of memory in the middle of a backward pass has added up some of it; so the mini-batch's gradient is
discarded and its earlier micro-batches are accumulated again. Their rows are kept for that until the step is made. Only for engines that
allow it (`Capabilities.retries_smaller`) and that have one rank.

The ranks of a rank group are in the middle of a pass that gathers weights from all of them, and each would wait for the one that can't go
on. So they end, and the run resumes from its last checkpoint with every micro-batch cut into twice as many parts from the start, on all
ranks alike (`MicroBatchTooLarge`, `m2flow.runner.run`).

Source of the words that say how much was asked for: PyTorch's allocators (c10/core/CPUAllocator.cpp, c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import functools
import re
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar, final

import numpy as np

from m2flow.engines.contract import Agreement, EngineSettings, Memory, Objective, Sums, TrainEngine, size_of
from m2flow.errors import M2FlowError, MicroBatchTooLarge, OutOfMemory, is_out_of_memory
from m2flow.macro.flow import loaded_torch
from m2flow.samples import Batch

P = ParamSpec("P")
R = TypeVar("R")

_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+ ?(?:[KMGT]i?B|bytes))")
_NOW = {
    "train": "Lower `train: {token_budget}` in the cluster spec (activations grow with the tokens of a micro-batch), or keep fewer of them "
    "with `recompute` of the engine fsdp or `activation_checkpointing` of deepspeed; for the rest more ranks (fsdp, ZeRO), or "
    "`offload_optimizer`.",
    "rollout": "Lower `rollout: {max_running}` in the cluster spec, or the cache: option `kv_budget_bytes` of the engine embedded, "
    "`--mem-fraction-static` in the args of sglang.",
    "switch": "The engines do not fit side by side: `placement: split`, more ranks for the trainer, or a smaller cache.",
}


class Holder(Protocol):
    """A host of engines, which knows what memory each of them holds."""

    def held(self) -> Mapping[str, Memory]:
        """Return what each engine of this process holds of its device, by role and kind."""
        ...


H = TypeVar("H", bound=Holder)


def accounted(kind: str) -> Callable[[Callable[Concatenate[H, P], R]], Callable[Concatenate[H, P], R]]:
    """Decorate a method so that running out of memory raises `OutOfMemory` with an account of what is held.

    Args:
        kind: what the method does: `train`, `rollout`, or `switch` for onload and offload.
    """

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
    """Return this process's peak memory in bytes, of its GPU if torch has used one, else of the host."""
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


@final
class MiniBatch:
    """Accumulate the gradient of one mini-batch, with retries in halves, until its optimiser step.

    Args:
        may_halve: whether to retry in halves; else running out of memory is an error at once.
        parts: parts into which every micro-batch is cut before it is tried.
    """

    def __init__(self, engine: TrainEngine, *, may_halve: bool, parts: int = 1) -> None:
        self._engine = engine
        self._may_halve = may_halve
        self._num_parts = parts
        self._parts: list[Batch] = []
        self.num_halved = 0

    def accumulate(self, rows: Batch, objective: Objective) -> Sums:
        """Accumulate one micro-batch.

        Raises:
            MicroBatchTooLarge: it does not fit on several ranks. OutOfMemory: one sample alone does not fit, or the engine can't retry.
        """
        parts = _cut(rows, self._num_parts, objective)
        self.num_halved += len(parts) - 1
        return added(*[self._accumulate(part, objective) for part in parts]) if len(parts) > 1 else self._accumulate(rows, objective)

    def _accumulate(self, rows: Batch, objective: Objective) -> Sums:
        sums = self._tried(rows, objective)
        if sums is not None:
            return sums
        halves = _cut(rows, 2, objective)
        if not self._may_halve or len(halves) < 2:
            raise too_large(rows, objective, may_cut=self._may_halve)
        self.num_halved += 1
        print(f"out of memory in a micro-batch of {len(rows)} samples: it is trained on in halves", flush=True)
        self._engine.discard()
        for part in self._parts:
            self._engine.accumulate(part, objective)
        return added(*[self._accumulate(half, objective) for half in halves])

    def stepped(self) -> None:
        """Forget the micro-batches: the step is made, or was given up."""
        self._parts = []

    def _tried(self, rows: Batch, objective: Objective) -> Sums | None:
        """Try once; None: out of memory. The error's traceback, which keeps tensors alive, is gone on return."""
        try:
            sums = self._engine.accumulate(rows, objective)
        except MicroBatchTooLarge:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        if self._may_halve:
            self._parts.append(rows)
        return sums


@final
class MiniBatches:
    """The mini-batches of a process's updates, one under way in each."""

    def __init__(self) -> None:
        self._of: dict[int, MiniBatch] = {}

    def of(self, update: int, engine: TrainEngine, settings: EngineSettings) -> MiniBatch:
        """Return the mini-batch of an update call, by the call's ordinal."""
        parts = settings.parts if settings.num_ranks > 1 else 1
        return self._of.setdefault(update, MiniBatch(engine, may_halve=engine.capabilities.retries_smaller, parts=parts))

    def stepped(self, update: int, *, is_last: bool) -> dict[str, float]:
        """Note that a step is made, or was given up; return metrics of the whole call."""
        found = self._of.get(update)
        if found is None:
            return {}
        found.stepped()
        if is_last:
            del self._of[update]
        return {"micro_batches_halved": float(found.num_halved)} if found.num_halved else {}


def added(*parts: Sums) -> Sums:
    """Add up the sums of several micro-batches."""
    metrics: Counter[str] = Counter()
    for part in parts:
        for name, value in part.metrics.items():
            metrics[name] += value  # type: ignore[assignment]
    return Sums(
        sum(part.num_sequences for part in parts),
        sum(part.num_tokens for part in parts),
        sum(part.num_context_tokens for part in parts),
        dict(metrics),
        Agreement.of_all([part.agreement for part in parts]),
        sum(part.num_shared_tokens for part in parts),
    )


def too_large(rows: Batch, objective: Objective, *, may_cut: bool) -> OutOfMemory:
    """Make the error of a micro-batch that did not fit.

    Args:
        may_cut: whether it could be tried in smaller parts, if it has more than one sample, or group of a loss on groups.
    """
    is_one = len(_units(rows.in_order(), objective)) < 2
    one = f"one {'group' if objective.loss.is_of_groups else 'sample'} of it" if may_cut and is_one else "it"
    what = f"out of memory in a micro-batch of {len(rows)} samples; {one} does not fit"
    now = "Lower train.token_budget in the cluster spec, or shorten the samples (max_new_tokens)."
    return (OutOfMemory if is_one or not may_cut else MicroBatchTooLarge)(what, now=now)


def _cut(rows: Batch, parts: int, objective: Objective) -> list[Batch]:
    """Cut rows, in order of identity, into parts of equal numbers of samples or, for a loss on groups, groups; each has at least one."""
    if parts == 1:
        return [rows]
    ordered = rows.in_order()
    units = _units(ordered, objective)
    return [
        ordered.take(np.concatenate([np.arange(*units[unit]) for unit in part]))
        for part in np.array_split(np.arange(len(units)), parts)
        if len(part)
    ]


def _units(rows: Batch, objective: Objective) -> list[tuple[int, int]]:
    """The first row of each sample, or group of a loss on groups, and the row after its last one; rows are in order."""
    return rows.group_bounds() if objective.loss.is_of_groups else [(row, row + 1) for row in range(len(rows))]
