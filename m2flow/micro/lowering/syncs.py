"""Sixth pass: how do weights reach the engines that sample from them, and which devices change hands?

    workers --syncs--> WeightSyncs, SwitchPlans

The cheapest transport by what moves how often, unless the spec names one: within a process one copy; between processes of a host a copy in
and one out for each receiver, at the speed of memory; to other hosts a broadcast, in which all receivers share what the trainer's link can
carry. Files cost both a write and a read of the storage, so they are taken only where the spec says so. Of a policy with adapters, these
alone go to other processes whose engines can add them; inside a process, and lent on its GPU, the sum is at hand.

The local launcher has one host, so between processes the rule finds shared memory. Workers of a Ray cluster, and of pools with several
nodes, are on hosts that nobody knows before the run, and a broadcast listens to a network without encryption: there it is m2flow's own
connections, which are encrypted, unless the spec says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

from m2flow.errors import PlanError
from m2flow.micro.plan import SwitchPlan, SyncTransport, WeightSync, WorkerPlan
from m2flow.spec import WeightsSpec

_OTHER_HOSTS = "other hosts: encrypted, a stream for each; a broadcast is faster, and neither encrypted nor authenticated"


def plan_syncs(
    workers: tuple[WorkerPlan, ...], spec: WeightsSpec, *, is_one_host: bool = True, alone: Collection[str] = ()
) -> tuple[WeightSync, ...]:
    """One sync for each pair of a role's trainer and one of its rollout engines.

    Args:
        alone: roles whose adapters go to other processes by themselves (`m2flow.micro.lowering.abilities.adapters_alone`).
    Raises:
        PlanError: the spec's transport can't join one of them.
    """
    pairs = [
        (slot.role, trainer.name, worker.name)
        for worker in workers
        for slot in worker.engines
        if slot.kind == "rollout"
        for trainer in workers
        if any(other.kind == "train" and other.role == slot.role for other in trainer.engines)
    ]
    devices = {worker.name: worker.device for worker in workers}
    for role, source, target in pairs:
        for name in (source, target):
            if spec.transport == "cuda ipc" and source != target and not devices[name].startswith("cuda"):
                raise PlanError(
                    f"the weights of {role} go from {source} to {target} by cuda ipc, and {name} has no GPU (it has {devices[name]})",
                    now="Take another transport in the cluster spec: weights: {transport: auto}.",
                )
    others = Counter((role, source) for role, source, target in pairs if source != target)
    syncs = []
    for role, source, target in pairs:
        is_same_process = source == target
        transport: SyncTransport
        if not is_one_host and spec.transport == "auto" and not is_same_process:
            transport, why = "tcp", _OTHER_HOSTS
        else:
            transport, why = choose_transport(spec, is_same_process=is_same_process, num_receivers=others[role, source])
        sends: Literal["weights", "adapters"] = "weights"
        if role in alone and not is_same_process and transport != "cuda ipc":
            sends = "adapters"
        syncs.append(WeightSync(role, source, target, transport, why, sends))
    return tuple(syncs)


def choose_transport(
    spec: WeightsSpec, *, is_same_process: bool, is_same_host: bool = True, num_receivers: int = 1
) -> tuple[SyncTransport, str]:
    """The transport of one sync, and why.

    >>> choose_transport(WeightsSpec(), is_same_process=False, is_same_host=False, num_receivers=2)
    ('broadcast', 'another host: one stream for 2 receivers')
    """
    if is_same_process:
        return "same process", "one copy"
    if spec.transport != "auto":
        return spec.transport, "as the cluster spec says"
    if is_same_host:
        return "shared memory", f"same host: one copy in, one out for {_receivers(num_receivers)}"
    return "broadcast", f"another host: one stream for {_receivers(num_receivers)}"


def plan_switches(workers: tuple[WorkerPlan, ...]) -> tuple[SwitchPlan, ...]:
    turns: dict[str, dict[str, None]] = {}
    for worker in workers:
        of_worker = {slot.takes_turn: None for slot in worker.engines if slot.kind != "function"}
        turns.setdefault(worker.lease, {"rollout": None}).update(of_worker)
    return tuple(SwitchPlan(worker.lease, worker.name, tuple(turns[worker.lease])) for worker in workers if worker.lease)


def _receivers(number: int) -> str:
    return "its receiver" if number == 1 else f"{number} receivers"
