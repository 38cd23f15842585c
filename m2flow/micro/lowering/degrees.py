"""Over how many devices each instance of a rollout engine is laid, and by which way weights go into it: what a server of its own is told.

    pin of the spec, or the layout of a seat --degrees--> EngineSlot.tp, .pp, .ep --EngineSettings--> the server's arguments

Where workers are placed by rule, the spec pins it (`pin: {policy.rollout: {layout: {tp: 2}}}`); a search chooses it. Found by a search
among the cores of this machine, degrees are threads of a process, and no server is laid out by them
(`m2flow.spec.ClusterSpec.planned_pools`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from m2flow.engines.registry import engines
from m2flow.errors import PlanError
from m2flow.micro.plan import EngineSlot, WorkerPlan
from m2flow.micro.search.choice import Seat
from m2flow.spec import ClusterSpec, WeightsSpec

_NAMES = ("tp", "pp", "ep")


def pinned_degrees(slot: EngineSlot, spec: ClusterSpec) -> EngineSlot:
    """A rollout engine, laid out as the spec says."""
    layout = spec.pin_of(slot.role, "rollout").layout
    found = {name: getattr(layout, name) for name in _NAMES}
    return msgspec.structs.replace(slot, **{name: degree for name, degree in found.items() if degree})


def seated_degrees(slot: EngineSlot, seat: Seat, spec: ClusterSpec) -> EngineSlot:
    """A rollout engine, laid out as the search found."""
    if not spec.pools:
        return slot
    return msgspec.structs.replace(slot, **{name: getattr(seat.layout, name) for name in _NAMES})


def check_degrees(workers: Iterable[WorkerPlan], weights: WeightsSpec) -> None:
    """
    Raises:
        PlanError: a rollout engine is laid over more devices than it can be, or has no server that takes weights as the spec says.
    """
    known = {info.name: info.capabilities for info in engines() if info.kind == "rollout"}
    for slot in (slot for worker in workers for slot in worker.engines if slot.kind == "rollout" and slot.engine in known):
        can = known[slot.engine]
        if weights.into_server not in ("auto", *can.into_server):
            others = ", ".join(name for name, other in known.items() if weights.into_server in other.into_server)
            raise PlanError(
                f"the spec has weights: {{into_server: {weights.into_server}}}, and the rollout engine {slot.engine!r} has no server "
                "that takes them so",
                now=f"Leave it out, or take one of {others}.",
            )
        for name in _NAMES:
            degree, most = getattr(slot, name), getattr(can.parallel_layouts, name)
            if most is not None and degree > most:
                limits = {other: getattr(one.parallel_layouts, name) for other, one in known.items()}
                others = ", ".join(other for other, limit in limits.items() if limit is None or limit >= degree)
                raise PlanError(
                    f"the rollout engine {slot.engine!r} has {name} up to {most}, and {slot.role} is to have {degree}",
                    now=f"With so many there are {others or 'none'}; or mend `pin` in the cluster spec.",
                )
