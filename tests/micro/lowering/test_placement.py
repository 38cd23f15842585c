"""From the seats that a search found to the workers and leases of a plan."""

from __future__ import annotations

import pytest

from m2flow.errors import PlanError
from m2flow.micro.lowering.placement import seat_workers
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import Choice, Seat, WorkerPlan
from m2flow.spec import ClusterSpec, PoolSpec

ROLLOUT, TRAIN = EngineId("policy", "rollout"), EngineId("policy", "train")
REFERENCE = EngineId("reference", "train")
EIGHT = ClusterSpec(name="eight", pools={"h100": PoolSpec(device="h100")})


def seat(engine: EngineId, first: int, num: int, layout: Layout, lease: str = "", pool: str = "h100", chunk: int = 0) -> Seat:
    return Seat(engine, (f"{engine.role}.call",), pool, first, num, layout, chunk, Footprint(), lease)


def choice(*seats: Seat) -> Choice:
    return Choice("grpo", "eight", "split", seats, 1.0, (), (), True, 0.0, "", (), 0.0, {}, {})


def placed(*seats: Seat, spec: ClusterSpec = EIGHT, device: str = "cuda:0") -> list[WorkerPlan]:
    return [worker for worker in seat_workers(choice(*seats), spec, device) if not worker.name.startswith("functions")]


def test_each_replica_of_a_rollout_engine_is_a_worker_and_a_trainer_is_one() -> None:
    workers = placed(seat(ROLLOUT, 0, 4, Layout(tp=2, dp=2)), seat(TRAIN, 4, 4, Layout(dp=4, zero=3)))
    assert [(w.name, w.device) for w in workers] == [("rollout-0", "h100[0:2]"), ("rollout-1", "h100[2:4]"), ("train-0", "h100[4:8]")]
    assert all(not w.lease for w in workers)


def test_engines_that_take_turns_on_many_devices_are_processes_with_one_lease() -> None:
    workers = placed(seat(ROLLOUT, 0, 8, Layout(tp=4, dp=2), "L0"), seat(TRAIN, 0, 8, Layout(dp=8), "L0"))
    assert [(w.name, w.lease) for w in workers] == [("rollout-0", "L0"), ("rollout-1", "L0"), ("train-0", "L0")]


def test_engines_that_take_turns_on_one_device_share_a_process() -> None:
    here = ClusterSpec(name="here", device="cpu", cores=2)
    (worker,) = placed(seat(ROLLOUT, 0, 2, Layout(tp=2), "L0", ""), seat(TRAIN, 0, 2, Layout(tp=2), "L0", ""), spec=here, device="cpu")
    assert (worker.name, worker.device, worker.threads, worker.lease) == ("device-0", "cpu", 2, "L0")
    assert {slot.kind for slot in worker.engines} == {"rollout", "train"}


def test_trainers_on_the_same_devices_share_a_process() -> None:
    (worker,) = placed(seat(TRAIN, 0, 8, Layout(dp=8)), seat(REFERENCE, 0, 8, Layout(dp=8)))
    assert [slot.role for slot in worker.engines] == ["policy", "reference"]


def test_seats_that_overlap_without_a_lease_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"policy.rollout and policy.train .*devices 2 to 3 of h100"):
        placed(seat(ROLLOUT, 0, 4, Layout(dp=4)), seat(TRAIN, 2, 4, Layout(dp=4)))
