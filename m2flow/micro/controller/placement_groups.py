"""Group a plan's workers into bundles that must be on one host, with the resources that a launcher asks the cluster for.

    Plan, ClusterSpec --bundles--> Bundles (a Ray placement group has one for each)

A bundle is never split over hosts. Co-located workers that take turns on a device share one; so do all workers that the plan has put on one
node of a pool, such as a tensor-parallel group. A worker that spans nodes is refused: it is one process.
"""

from __future__ import annotations

import re

import msgspec

from m2flow.errors import PlanError
from m2flow.micro.protocol.plan import Plan, WorkerPlan
from m2flow.spec import ClusterSpec

_PLACE = re.compile(r"(.*)\[(\d+)(?::(\d+))?\]")


class Bundle(msgspec.Struct, frozen=True):
    """Workers that must be on one host, and the resources they need there."""

    workers: tuple[str, ...]
    cpus: int
    gpus: int
    resource: str = ""
    """Custom resource that only hosts of the wanted kind have; empty: any host."""


def bundles(plan: Plan, spec: ClusterSpec) -> tuple[Bundle, ...]:
    """Return one bundle for each group of workers that must be on one host, in the order of the plan.

    Raises:
        PlanError: a worker would span several nodes.
    """
    groups: dict[tuple[str, object], list[WorkerPlan]] = {}
    for worker in plan.workers:
        groups.setdefault(_group(worker, spec), []).append(worker)
    return tuple(
        Bundle(
            tuple(worker.name for worker in workers),
            sum(worker.threads * worker.ranks for worker in workers),
            num_gpus(workers, spec),
            _resource(workers[0], spec),
        )
        for workers in groups.values()
    )


def num_gpus(workers: list[WorkerPlan], spec: ClusterSpec) -> int:
    """Count the GPUs that these workers use together; one that several take turns on counts once."""
    devices: set[object] = set()
    for worker in workers:
        pool, first, stop = place_of(worker.device)
        if pool in spec.pools and spec.pools[pool].device != "cpu":
            devices.update((pool, device) for device in range(first, stop))
        elif worker.device.startswith("cuda"):
            devices.update((worker.lease or worker.name, rank) for rank in range(worker.ranks))
    return len(devices)


def holders(plan: Plan, spec: ClusterSpec) -> dict[str, str]:
    """Map each worker to the worker that reserves its GPUs: itself, or one on the same node that takes turns with it and has all of
    them."""
    found = {}
    for bundle in bundles(plan, spec):
        members = [plan.worker(name) for name in bundle.workers]
        for worker in members:
            around = [other for other in members if _has_all(other, worker)]
            found[worker.name] = max(around, key=_size).name if around else worker.name
    return found


def part_of(gpus: str, holder: WorkerPlan, worker: WorkerPlan) -> str:
    """Select the GPUs that a worker uses from those that its holder was given.

    >>> slots = ()
    >>> part_of("4,5,6,7", WorkerPlan("train-0", "main[4:8]", 1, slots), WorkerPlan("rollout-1", "main[6:8]", 1, slots))
    '6,7'
    """
    (_, start, _), (_, first, stop) = place_of(holder.device), place_of(worker.device)
    return ",".join(gpus.split(",")[first - start : stop - start]) if stop else gpus


def _has_all(holder: WorkerPlan, worker: WorkerPlan) -> bool:
    (pool, start, end), (own, first, stop) = place_of(holder.device), place_of(worker.device)
    return pool == own and start <= first and stop <= end and (stop > 0 or (pool.startswith("cuda") and holder.lease == worker.lease != ""))


def _size(worker: WorkerPlan) -> int:
    _, first, stop = place_of(worker.device)
    return stop - first


def place_of(device: str) -> tuple[str, int, int]:
    """Parse a worker's device into its pool, the first device and the one after the last.

    >>> place_of("main[0:4]"), place_of("main[7]"), place_of("cpu")
    (('main', 0, 4), ('main', 7, 8), ('cpu', 0, 0))
    """
    found = _PLACE.fullmatch(device)
    if found is None:
        return device, 0, 0
    first = int(found[2])
    return found[1], first, int(found[3]) if found[3] else first + 1


def _group(worker: WorkerPlan, spec: ClusterSpec) -> tuple[str, object]:
    pool, first, stop = place_of(worker.device)
    if pool in spec.pools and stop:
        size = spec.pools[pool].devices_per_node
        if first // size != (stop - 1) // size:
            num_nodes = (stop - 1) // size - first // size + 1
            raise PlanError(
                f"{worker.name} has the devices {first} to {stop - 1} of {pool}, which are on {num_nodes} nodes",
                now=f"A worker is on one node, with its ranks. Pin it to at most {size} devices: pin: {{NAME: {{num_devices: {size}}}}}",
            )
        return pool, first // size
    return ("lease", worker.lease) if worker.lease else ("worker", worker.name)


def _resource(worker: WorkerPlan, spec: ClusterSpec) -> str:
    pool, _, stop = place_of(worker.device)
    if pool in spec.pools and stop:
        return spec.ray.resources.get(pool, "")
    kinds = {slot.kind for slot in worker.engines}
    for kind in ("train", "rollout", "function"):
        if kind in kinds:
            return spec.ray.resources.get("functions" if kind == "function" else kind, "")
    return ""
