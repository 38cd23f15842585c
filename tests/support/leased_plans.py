"""Plans and clusters whose engines share devices: lent to rollout, given back early, with turns of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import Choice, Placement, Plan, WorkerPlan
from m2flow.spec import ClusterSpec, FunctionSpec, PoolSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import beside_the_trainer


def lent(until: float, *names: str) -> Callable[[Plan], Plan]:
    return beside_the_trainer(*names, rollout={"lent_until": until})


def split(num_rollout: int = 2, max_running: int = 3, **rollout: object) -> ClusterSpec:
    return ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=num_rollout, max_running=max_running, **rollout),  # type: ignore[arg-type]
        train=TrainSpec(engine="fake", token_budget=30),
        functions=FunctionSpec(workers=1, chunk=4),
    )


def ahead(share: float, *names: str) -> Callable[[Plan], Plan]:
    """It comes at a share of their samples."""
    return beside_the_trainer(*names, train={"onload_at": share})


SHARED = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake", token_budget=30))
EIGHT = ClusterSpec(name="eight", pools={"h100": PoolSpec(device="h100")})


def own_turns(worker: WorkerPlan, kinds: Sequence[str] = ("train",)) -> WorkerPlan:
    slots = [msgspec.structs.replace(s, turn=f"{s.kind} {s.role}") if s.kind in kinds and worker.lease else s for s in worker.engines]
    return msgspec.structs.replace(worker, engines=tuple(slots))


def all_apart(plan: Plan) -> Plan:
    """Each engine has, those that generate too."""
    workers = (own_turns(worker, ("train", "rollout")) for worker in plan.workers)
    return msgspec.structs.replace(plan, workers=tuple(workers)).verify()


def placement(engine: EngineId, first: int, num: int, layout: Layout, lease: str = "", pool: str = "h100", chunk: int = 0) -> Placement:
    return Placement(engine, (f"{engine.role}.call",), pool, first, num, layout, chunk, Footprint(), lease)


def choice(*placements: Placement) -> Choice:
    return Choice("grpo", "eight", "split", placements, 1.0, (), (), True, 0.0, "", (), 0.0, {}, {})
