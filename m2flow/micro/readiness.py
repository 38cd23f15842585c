"""Whether a run can start at all with the engines of its plan, said before a process is started or a file written.

    Plan --check_engines--> nothing; or an error that says what is missing and how to get it

A worker that runs in an interpreter of its own is looked at by its engine, when that starts.
"""

from __future__ import annotations

from m2flow.engines.registry import check_engine
from m2flow.micro.plan import Plan


def check_engines(plan: Plan) -> None:
    """
    Raises:
        EngineError: the plan names an engine that nobody knows. MissingExtra: what one needs is not installed.
    """
    for worker in plan.workers:
        for slot in worker.engines:
            check_engine(slot.engine, slot.kind, worker.device)
