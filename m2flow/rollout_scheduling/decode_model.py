"""Model the time of one rollout instance: decode steps that are affine in the batch size, with continuous batching.

    t(b) = t0 + t1 b        seconds of a step in which b samples get a token each

An instance works its queue in order: a free slot takes the next sample. In steps that is list scheduling on `max_batch` machines, so n
samples cost O(n log n), however long they are. Limits: prefill, growing context and preemption for want of KV cache are not modelled.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DecodeModel:
    """The time of a decode step as a function of the batch size.

    The defaults are a 7B model in bf16 on one H200 at about 40% of its memory bandwidth.
    Source: weights 15.2 GB / 4.8 TB/s gives t0 >= 3.2 ms; vLLM and SGLang add launches and sampling.
    """

    t0_s: float = 0.008
    """Seconds of any step: the weights are read once."""
    t1_s: float = 0.00008
    """Seconds for each sample in the step: its KV cache is read, its token computed."""
    max_batch: int = 128
    """Most samples that run at once."""

    def __post_init__(self) -> None:
        if not (self.t0_s > 0 and self.t1_s >= 0 and np.isfinite(self.t0_s + self.t1_s)):
            raise SpecError(f"a decode step can't take t0={self.t0_s} s and t1={self.t1_s} s", now="Give t0 > 0 and t1 >= 0, in seconds.")
        if self.max_batch < 1:
            raise SpecError(f"an instance can't run {self.max_batch} samples at once", now="Give a max batch of 1 or more.")

    def step_s(self, batch: float) -> float:
        """Seconds of a step with this many samples.

        >>> DecodeModel(0.008, 0.00008, 128).step_s(100)
        0.016
        """
        return self.t0_s + self.t1_s * batch

    def tokens_per_s(self, batch: float) -> float:
        """Throughput of an instance that runs this many samples: b / t(b), increasing and concave in b."""
        return batch / self.step_s(batch)

    @property
    def best_token_s(self) -> float:
        """Seconds of an instance for a token at its best rate, with all slots taken: t0/B + t1."""
        return self.t0_s / self.max_batch + self.t1_s

    @property
    def alone_token_s(self) -> float:
        """Seconds for a token of a sample that runs alone: t0 + t1. No schedule is faster for one sample."""
        return self.t0_s + self.t1_s


@dataclass(frozen=True, eq=False)
class InstanceRun:
    """When each sample of an instance's queue runs. Arrays are [N], in the order of the queue."""

    start_s: FloatArray
    finish_s: FloatArray
    num_steps: int

    @property
    def end_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def run_queue(lengths: npt.ArrayLike, model: DecodeModel) -> InstanceRun:
    """Run a queue with continuous batching, exactly; the end is t0 Z + t1 W, Z the steps and W the tokens.

    Args:
        lengths: int [N], tokens to generate, at least 1 each, in the order of the queue.
    Returns:
        When each starts and ends, in seconds after the instance began.

    >>> run_queue([3, 1, 1], DecodeModel(1.0, 0.1, max_batch=2)).finish_s.round(6).tolist()
    [3.5, 1.2, 2.4]
    """
    tokens = np.asarray(lengths, np.int64)
    starts = start_steps(tokens, model.max_batch)
    ends = starts + tokens
    steps, changes = _batch_changes(starts, ends)
    batches = np.cumsum(changes)
    tokens_done = np.concatenate([[0], np.cumsum(batches[:-1] * np.diff(steps))]) if len(steps) else np.zeros(0, np.int64)
    seconds = model.t0_s * steps + model.t1_s * tokens_done
    return InstanceRun(seconds[np.searchsorted(steps, starts)], seconds[np.searchsorted(steps, ends)], num_steps=int(ends.max(initial=0)))


def queue_s(lengths: npt.ArrayLike, model: DecodeModel) -> float:
    """Seconds until a queue is empty; the end of `run_queue`."""
    tokens = np.asarray(lengths, np.int64)
    return model.t0_s * num_steps(tokens, model.max_batch) + model.t1_s * int(tokens.sum())


def num_steps(lengths: npt.ArrayLike, max_batch: int) -> int:
    """Decode steps until a queue is empty."""
    tokens = np.asarray(lengths, np.int64)
    return int((start_steps(tokens, max_batch) + tokens).max(initial=0))


def start_steps(tokens: IntArray, max_batch: int) -> IntArray:
    """The step at which each sample of a queue gets a slot, int64 [N]."""
    starts = np.zeros(len(tokens), np.int64)
    free = tokens[:max_batch].tolist()
    if len(tokens) > max_batch:
        heapq.heapify(free)
        for i, length in enumerate(tokens[max_batch:].tolist(), max_batch):
            starts[i] = free[0]
            heapq.heapreplace(free, free[0] + length)
    return starts


def _batch_changes(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The steps at which the batch changes, ascending and distinct, and by how much: int64 [K] each."""
    steps, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    signs = np.repeat(np.array([1, -1]), len(starts))
    return steps, np.bincount(where, weights=signs, minlength=len(steps)).astype(np.int64)
