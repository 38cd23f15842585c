"""How long an engine takes for its calls, as three times that add up along a plan, for every option and chunk.

    first  (l)   first sample in -> first chunk out
    total  (T)   all of the input there at 0 -> last chunk out
    last   (d)   last sample in -> last chunk out

A forward pass and an update work chunk by chunk: a chunk of m samples on R replicas costs what ceil(m/R) R samples cost, and a fixed
time for each micro-batch. An update makes nothing of use before its end (l = T); only its first mini-batch can be worked on before
the last sample is in. Legal chunks are the call's unit times powers of two, and the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from m2flow.micro.costs.terms import Costs, EngineId
from m2flow.micro.search.batches import Batch, FloatArray, Instances
from m2flow.micro.search.options import Option
from m2flow.micro.search.workload import CallLoad

T = TypeVar("T")

TIMES = 3
"""Columns l, T, d."""


def legal_chunks(call: CallLoad) -> tuple[int, ...]:
    """Samples that a call may hand on at a time."""
    unit = _unit(call)
    sizes = [unit]
    while sizes[-1] * 2 < call.num_samples:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([min(size, call.num_samples) for size in sizes] + [call.num_samples]))


def _unit(call: CallLoad) -> int:
    if call.unit == "batch":
        return call.num_samples
    if call.unit == "minibatch":
        return max(1, call.num_samples // num_minibatches(call))
    return 1 if call.unit == "sample" else call.num_per_prompt


def num_minibatches(call: CallLoad) -> int:
    return max(1, call.num_optimizer_steps // max(1, call.num_epochs))


@dataclass(frozen=True, eq=False)
class LeafTimes:
    """Of calls that one engine runs one after the other: [options, chunks, 3]."""

    chunks: tuple[int, ...]
    times: FloatArray


def leaf_times(
    calls: Sequence[CallLoad], options: Sequence[Option], costs: Costs, batches: Mapping[str, Batch], most_chunks: int = 0
) -> LeafTimes:
    """The calls in their order, in chunks that are legal for each of them; the engine comes before and leaves after, if it is swapped.

    Args:
        most_chunks: 0, or how many sizes to try: the whole batch, a quarter of it, and so on.
    """
    engine = calls[0].engine
    assert engine is not None
    if not any(call.num_samples for call in calls):
        return LeafTimes((1,), np.zeros((len(options), 1, TIMES)))
    chunks = tuple(sorted(set.intersection(*(set(legal_chunks(call)) for call in calls)))) or (max(c.num_samples for c in calls),)
    chunks = tuple(sorted(chunks[-1 - 2 * i] for i in range(most_chunks) if 2 * i < len(chunks))) if most_chunks else chunks
    each = [call_times(call, engine, options, chunks, costs, batches[call.name]) for call in calls]
    first = sum((t[..., 1] for t in each[:-1]), np.zeros(each[0].shape[:2])) + each[-1][..., 0]
    total = sum((t[..., 1] for t in each), np.zeros(each[0].shape[:2]))
    last = each[0][..., 2] + sum((t[..., 1] for t in each[1:]), np.zeros(each[0].shape[:2]))
    come = np.array([option.come_s for option in options])[:, None]
    leave = np.array([option.leave_s for option in options])[:, None]
    return LeafTimes(chunks, np.stack([first + come, total + come + leave, last + leave], axis=-1))


def call_times(
    call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: Batch
) -> FloatArray:
    """[options, chunks, 3] of one call."""
    if call.work == "generate":
        return _generate(call, engine, options, chunks, costs, batch)
    return _passes(call, engine, options, chunks, costs, batch)


def instances(engine: EngineId, options: Sequence[Option], costs: Costs) -> Instances:
    decodes = _of_layouts(options, lambda option: costs.decode(engine, option.pool, option.layout))
    return Instances(
        step_s=np.array([d.step_s for d in decodes]),
        sample_s=np.array([d.sample_s for d in decodes]),
        prefill_token_s=np.array([d.prefill_token_s for d in decodes]),
        max_running=np.array([max(1, d.max_running) for d in decodes], np.float64),
        num=np.array([option.layout.dp for option in options], np.float64),
        enter_leave_s=np.array([d.enter_s + d.leave_s for d in decodes]),
        handover_s=np.array([d.handover_s for d in decodes]),
        gather_s=np.array([d.gather_s for d in decodes]),
    )


def _of_layouts(options: Sequence[Option], cost: Callable[[Option], T]) -> list[T]:
    """A cost of each option; whether it is swapped does not matter, and its like comes next."""
    found: list[T] = []
    before: Option | None = None
    for option in options:
        found.append(found[-1] if before is not None and _is_like(option, before) else cost(option))
        before = option
    return found


def _is_like(option: Option, other: Option) -> bool:
    """Whether two options are one layout, at home or swapped."""
    return option.layout is other.layout and option.pool == other.pool


def _generate(call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: Batch) -> FloatArray:
    unlike = [i for i, option in enumerate(options) if not i or not _is_like(option, options[i - 1])]
    ways = instances(engine, [options[i] for i in unlike], costs)
    total = batch.rollout_s(ways)
    last = np.minimum(total, batch.last_sample_s(ways))
    found = np.empty((len(unlike), len(chunks), TIMES))
    found[..., 0] = batch.first_chunks_s(ways, [-(-chunk // call.num_per_prompt) for chunk in chunks])
    found[..., 1], found[..., 2] = total[:, None], last[:, None]
    return np.repeat(found, np.diff([*unlike, len(options)]), axis=0)


def _passes(call: CallLoad, engine: EngineId, options: Sequence[Option], chunks: Sequence[int], costs: Costs, batch: Batch) -> FloatArray:
    trains = _of_layouts(options, lambda option: costs.train(engine, option.pool, option.layout))
    passes = [train.update if call.work == "update" else train.forward for train in trains]
    fixed = np.array([p.fixed_s for p in passes])[:, None]
    sample = np.array([p.sample_s + p.token_s * batch.mean_tokens + p.token2_s * batch.mean_square for p in passes])[:, None]
    replicas = np.array([option.layout.dp for option in options], np.float64)[:, None]
    size = np.array(chunks, np.float64)[None, :]
    rows = np.ceil(size / replicas)
    microbatches = np.ceil(np.maximum(1.0, rows * batch.mean_tokens / call.token_budget)) if call.token_budget else np.ones_like(rows)
    chunk_s = microbatches * replicas * fixed + rows * replicas * sample  # `fixed` is a replica's, shared out to all.
    pass_s = call.num_samples / size * chunk_s
    if call.work != "update":
        return np.stack([chunk_s, pass_s, chunk_s], axis=-1)
    optimizer = np.array([train.optimizer_s for train in trains])[:, None] * call.num_optimizer_steps
    total = pass_s * call.num_epochs + optimizer
    last = total - pass_s / num_minibatches(call) + np.minimum(chunk_s, pass_s / num_minibatches(call))
    return np.stack([total, total, last], axis=-1)
