"""Which parallel layouts an engine can have on so many devices.

    ParallelLayouts of the engine, ModelShape, Pool --legal_layouts--> Layouts

All that are legal, good or not: memory is not asked, and what is pinned is the search's to keep. Degrees of tensor and sequence
parallelism are divisors of a node's devices, so that their groups lie inside one.
"""

from __future__ import annotations

from collections.abc import Iterator

from m2flow.engines.contract import ParallelLayouts
from m2flow.engines.registry import engines
from m2flow.errors import EngineError
from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.costs.terms import EngineKind, Layout

PLANNED: dict[tuple[str, EngineKind], ParallelLayouts] = {
    ("deepspeed", "train"): ParallelLayouts(tp=None, sp=None, dp=None, ep=None, zero=(0, 1, 2, 3), offload=True, recomputes=True),
}
"""Layouts that can be planned for, beyond what the engine of that name can do here: to see what they would bring.

DeepSpeed's pipelines need a model that is written as one, and go with ZeRO 0 and 1 only: not offered."""


def offered(name: str, kind: EngineKind) -> ParallelLayouts:
    """What an engine offers, whether or not what it needs is installed here.

    Raises:
        EngineError: there is no such engine.
    """
    known = {(info.name, info.kind): info.capabilities.parallel_layouts for info in engines() if info.kind == kind}
    found = PLANNED.get((name, kind)) or known.get((name, kind))
    if found is None:
        names = sorted({one for one, of in [*known, *PLANNED] if of == kind})
        raise EngineError(f"there is no {kind} engine {name!r} to plan for", now=f"There are {', '.join(names)}; see `m2flow engines`.")
    return found


def adds_adapters(engine: str) -> bool:
    """Whether a rollout engine takes adapters alone."""
    return any(info.kind == "rollout" and info.name == engine and info.capabilities.lora for info in engines())


def legal_layouts(shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, num_devices: int, per_node: int) -> tuple[Layout, ...]:
    """Every legal layout on exactly this many devices; empty if there is none."""
    return tuple(_layouts(shape, offers, kind, num_devices, per_node))


def thread_layouts(kind: EngineKind, num_devices: int, per_node: int, num_ranks: int = 1) -> tuple[Layout, ...]:
    """On cores of a CPU. `tp` counts the threads of a process: a trainer has as many processes as the spec gives it ranks, and rollout
    instances share the cores out evenly."""
    if kind == "train":
        is_legal = num_devices <= per_node and num_devices % num_ranks == 0
        return (Layout(tp=num_devices // num_ranks, dp=num_ranks),) if is_legal else ()
    return tuple(Layout(tp=k, dp=num_devices // k) for k in range(1, min(per_node, num_devices) + 1) if num_devices % k == 0)


def _layouts(shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, num_devices: int, per_node: int) -> Iterator[Layout]:
    for tp in _degrees(offers.tp, per_node, num_devices):
        if not shape.is_tp_legal(tp):
            continue
        for sp in _degrees(offers.sp, per_node // tp, num_devices // tp):
            if per_node % (tp * sp) or not shape.is_sp_legal(tp * sp):
                continue
            for pp in _powers(offers.pp, min(shape.num_layers, num_devices // (tp * sp))):
                replica = tp * sp * pp
                if num_devices % replica:
                    continue
                dp = num_devices // replica
                if kind == "train" and offers.dp is not None and dp > offers.dp:
                    continue
                for ep in _experts(shape, offers, kind, tp, dp * sp):
                    yield from _stages(Layout(tp=tp, pp=pp, sp=sp, dp=dp, ep=ep), offers)


def _stages(layout: Layout, offers: ParallelLayouts) -> Iterator[Layout]:
    """The layout at each ZeRO stage, with and without offloading. A trainer of one replica has nothing to shard."""
    stages = [stage for stage in offers.zero if stage == 0 or layout.dp * layout.sp > 1] or [0]
    for stage in stages:
        for offload in (False, True) if offers.offload else (False,):
            yield Layout(layout.tp, layout.pp, layout.sp, layout.dp, layout.ep, stage, offload)


def _experts(shape: ModelShape, offers: ParallelLayouts, kind: EngineKind, tp: int, num_replicas: int) -> list[int]:
    """Degrees of expert parallelism: none, or as far as it goes."""
    most = tp if kind == "rollout" else num_replicas
    most = most if offers.ep is None else min(most, offers.ep)
    best = next(
        (
            ep
            for ep in range(min(most, shape.num_experts), 1, -1)
            if (tp if kind == "rollout" else num_replicas) % ep == 0 and shape.is_ep_legal(ep)
        ),
        1,
    )
    return [1, best] if best > 1 else [1]


def _degrees(most: int | None, within: int, num_devices: int) -> list[int]:
    limit = within if most is None else min(most, within)
    return [degree for degree in range(1, limit + 1) if within % degree == 0 and num_devices % degree == 0]


def _powers(most: int | None, limit: int) -> list[int]:
    limit = limit if most is None else min(most, limit)
    return [1 << i for i in range(max(limit, 1).bit_length()) if 1 << i <= max(limit, 1)]
