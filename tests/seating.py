"""Engines that move in with the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from m2flow.micro.plan import Plan


def beside_the_trainer(*names: str, **fields: Mapping[str, object]) -> Callable[[Plan], Plan]:
    """Of a split plan: these rollout workers are on the trainer's devices, the others have their own; `fields` of slots, by their kind."""

    def seated(plan: Plan) -> Plan:
        workers = []
        for worker in plan.workers:
            if worker.name in (*names, "train-0"):
                slots = [msgspec.structs.replace(slot, **fields.get(slot.kind, {})) for slot in worker.engines]
                worker = msgspec.structs.replace(worker, lease="shared", engines=tuple(slots))
            workers.append(worker)
        return msgspec.structs.replace(plan, workers=tuple(workers)).verify()

    return seated
