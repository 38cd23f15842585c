"""Could everybody wait for everybody? A check of a plan's channels and leases, before anything runs.

    Plan.routes, stages, workers --check_room--> the ring of waits is named, or nothing

A call that takes rows waits for those who make them. A channel holds up who fills it, until its taker takes; a taker that needs more
at once than the channel can hold never does. And a lease stays with generation until that has nothing left to run, which it has as
long as its samples wait for room: what trains on the same devices must find room for all of them. Everything else that a call waits for
is an earlier call, so a ring can be closed by a channel alone: the check looks at each that is too small, and names the ring.

It goes by the longest samples that there may be. What is spilled waits nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m2flow.errors import PlanError
from m2flow.micro.lowering.room import is_too_small
from m2flow.micro.plan import Route, Stage, WorkerPlan

Step = tuple[str, str]
"""Who waits, and for what."""


def check_room(routes: Iterable[Route], stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> None:
    """
    Raises:
        PlanError: the run could come to a halt; the ring of waits is named.
    """
    for route in routes:
        ring = ring_of(route, stages, workers)
        if ring:
            raise PlanError(
                f"this plan can come to a halt: {'; '.join(f'{who} waits for {what}' for who, what in ring)}",
                now=f"Give the channel room for {route.needs} samples and {route.needs_bytes:,} bytes, or let it spill (`spills`: true).",
            )


def ring_of(route: Route, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> list[Step]:
    """The ring of waits that a channel closes if it is too small for what must be in it at once; empty if there is none.

    A group may overdraw, so a channel into a call that takes groups as they come holds nobody up for ever.
    """
    if not is_too_small(route):
        return []
    place = f"{route.source} -> {route.target}"
    room = f"{route.capacity} samples" + (f" or {route.capacity_bytes:,} bytes" if route.capacity_bytes else "")
    ring = [(f"{route.consumer} on {route.target}", f"all {route.needs} samples of {route.producer} ({route.needs_bytes:,} bytes)")]
    ring.append((route.producer, f"room in the channel {place}, which holds {room}"))
    lease = shared_lease(route, stages, workers)
    if lease:
        ring.append((f"the channel {place}", f"{route.consumer}, which waits for the lease {lease}"))
        ring.append((f"the lease {lease}", f"{route.producer} to have nothing left to run"))
    else:
        ring.append((f"the channel {place}", f"{route.consumer} to take them"))
    return ring


def shared_lease(route: Route, stages: Sequence[Stage], workers: Sequence[WorkerPlan]) -> str:
    """The lease that the taker needs and the maker has, if there is one."""
    leases = {worker.name: worker.lease for worker in workers}
    kinds = {stage.call: stage for stage in stages}
    taker, maker = kinds.get(route.consumer), kinds.get(route.producer)
    if taker is None or maker is None or taker.engine != "train" or maker.engine != "rollout":
        return ""
    lease = leases.get(route.target, "")
    return lease if lease and any(leases.get(worker) == lease for worker in maker.workers) else ""
