"""Whether a run can start at all with the engines of its plan, said before a process is started or a file written.

    Plan, ClusterSpec --check_engines--> nothing; or an error that says what is missing and how to get it

An engine with an interpreter of its own is looked for in there, if that is on this host; workers of a Ray cluster look themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from m2flow.engines.registry import check_engine
from m2flow.micro.plan import Plan
from m2flow.spec import ClusterSpec


def check_engines(plan: Plan, spec: ClusterSpec) -> None:
    """
    Raises:
        EngineError: the plan names an engine that nobody knows. MissingExtra: what one needs is not installed.
    """
    options: dict[str, Mapping[str, object]] = {"rollout": spec.rollout.options, "train": spec.train.options}
    for worker in plan.workers:
        for slot in worker.engines:
            check_engine(slot.engine, slot.kind, worker.device, options.get(slot.kind) if spec.launcher == "local" else None)
