"""Sixth pass: how do weights reach the engines that sample from them, and which devices change hands?

    workers --syncs--> WeightSyncs, SwitchPlans

The cheapest transport by rule: within a process a copy, between processes of a host shared memory. NCCL, CUDA IPC and disk are
other engines' to offer.
"""

from __future__ import annotations

from m2flow.micro.plan import SwitchPlan, WeightSync, WorkerPlan


def plan_syncs(workers: tuple[WorkerPlan, ...]) -> tuple[WeightSync, ...]:
    """One sync for each pair of a role's trainer and one of its rollout engines."""
    return tuple(
        WeightSync(slot.role, trainer.name, worker.name, "same process" if trainer.name == worker.name else "shared memory")
        for worker in workers
        for slot in worker.engines
        if slot.kind == "rollout"
        for trainer in workers
        if any(other.kind == "train" and other.role == slot.role for other in trainer.engines)
    )


def plan_switches(workers: tuple[WorkerPlan, ...]) -> tuple[SwitchPlan, ...]:
    return tuple(SwitchPlan(worker.lease, worker.name) for worker in workers if worker.lease)
