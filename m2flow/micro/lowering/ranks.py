"""How many processes hold a trainer's model together.

    spec's `train.ranks`, or the layout of a seat --ranks--> WorkerPlan.ranks

On this machine the spec says it, since cores can be threads of one rank as well as ranks; in a pool of devices each device of the trainer's
seat is a rank. All ranks are one worker to the plan and the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.engines.contract import ParallelLayouts
from m2flow.engines.registry import engines
from m2flow.errors import PlanError
from m2flow.micro.plan import WorkerPlan


def most_ranks(layouts: ParallelLayouts) -> int | None:
    """Of a train engine; None: any number."""
    degrees = (layouts.tp, layouts.pp, layouts.sp, layouts.dp)
    product = 1
    for degree in degrees:
        if degree is None:
            return None
        product *= degree
    return product


def check_ranks(workers: Iterable[WorkerPlan]) -> None:
    """
    Raises:
        PlanError: a worker has more ranks than one of its train engines offers, or has several and trains nothing.
    """
    known = {info.name: most_ranks(info.capabilities.parallel_layouts) for info in engines() if info.kind == "train"}
    for worker in workers:
        if worker.ranks < 1:
            raise PlanError(f"{worker.name} has {worker.ranks} ranks; it must be 1 or more")
        slots = [slot for slot in worker.engines if slot.kind == "train"]
        if worker.ranks > 1 and not slots:
            raise PlanError(f"{worker.name} has {worker.ranks} ranks and trains nothing", now="Only trainers have several.")
        for slot in slots:
            most = known.get(slot.engine)
            if slot.engine in known and most is not None and worker.ranks > most:
                others = ", ".join(name for name, can in known.items() if can is None or can >= worker.ranks)
                raise PlanError(
                    f"the train engine {slot.engine!r} has at most {most} rank{'s' if most > 1 else ''}, and {worker.name} is to have "
                    f"{worker.ranks}",
                    now=f"With so many there are {others}; or leave `ranks` out of the spec's `train`.",
                )
