"""From the placements that a search found to the workers and leases of a plan."""

from __future__ import annotations

import msgspec
import pytest
from leased_plans import choice, placement

from m2flow.errors import PlanError
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol.cost_terms import EngineId, Layout
from m2flow.micro.protocol.plan import Choice, Placement, WorkerPlan
from m2flow.spec import ClusterSpec, PoolSpec, TrainSpec

ROLLOUT, TRAIN = EngineId("policy", "rollout"), EngineId("policy", "train")
REFERENCE = EngineId("reference", "train")
EIGHT = ClusterSpec(name="eight", pools={"h100": PoolSpec(device="h100")})


def placed(*placements: Placement, spec: ClusterSpec = EIGHT, device: str = "cuda:0") -> list[WorkerPlan]:
    return [worker for worker in workers_of_choice(choice(*placements), spec, device) if not worker.name.startswith("functions")]


def test_each_replica_of_a_rollout_engine_is_a_worker_and_a_trainer_is_one() -> None:
    workers = placed(placement(ROLLOUT, 0, 4, Layout(tp=2, dp=2)), placement(TRAIN, 4, 4, Layout(dp=4, zero=3)))
    assert [(w.name, w.device) for w in workers] == [("rollout-0", "h100[0:2]"), ("rollout-1", "h100[2:4]"), ("train-0", "h100[4:8]")]
    assert all(not w.lease for w in workers)


def test_trainers_of_one_place_share_a_worker_unless_groups_of_a_process_are_those_of_one_layout() -> None:
    layouts = {"policy": Layout(tp=4, pp=2), "reference": Layout(tp=8), "critic": Layout(tp=4, pp=2)}
    placements = [placement(EngineId(role, "train"), 0, 8, layout, "L0") for role, layout in layouts.items()]
    found = {}
    for engine in ("megatron", "fsdp"):
        workers = placed(*placements, spec=EIGHT.model_copy(update={"train": TrainSpec(engine=engine)}))
        found[engine] = [(w.lease, [slot.role for slot in w.engines]) for w in workers]
    assert found["megatron"] == [("L0", ["policy", "critic"]), ("L0", ["reference"])]
    assert found["fsdp"] == [("L0", ["policy", "reference", "critic"])]


def test_engines_that_take_turns_on_many_devices_are_processes_with_one_lease() -> None:
    workers = placed(placement(ROLLOUT, 0, 8, Layout(tp=4, dp=2), "L0"), placement(TRAIN, 0, 8, Layout(dp=8), "L0"))
    assert [(w.name, w.lease) for w in workers] == [("rollout-0", "L0"), ("rollout-1", "L0"), ("train-0", "L0")]


def test_engines_that_take_turns_on_one_device_share_a_process() -> None:
    here = ClusterSpec(name="here", device="cpu", cores=2)
    (worker,) = placed(
        placement(ROLLOUT, 0, 2, Layout(tp=2), "L0", ""), placement(TRAIN, 0, 2, Layout(tp=2), "L0", ""), spec=here, device="cpu"
    )
    assert (worker.name, worker.device, worker.threads, worker.lease) == ("device-0", "cpu", 2, "L0")
    assert {slot.kind for slot in worker.engines} == {"rollout", "train"}


def test_trainers_on_the_same_devices_share_a_process() -> None:
    (worker,) = placed(placement(TRAIN, 0, 8, Layout(dp=8)), placement(REFERENCE, 0, 8, Layout(dp=8)))
    assert [slot.role for slot in worker.engines] == ["policy", "reference"]


def test_placements_that_overlap_without_a_lease_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"policy.rollout and policy.train .*devices 2 to 3 of h100"):
        placed(placement(ROLLOUT, 0, 4, Layout(dp=4)), placement(TRAIN, 2, 4, Layout(dp=4)))


def test_placements_keep_the_key_that_plans_of_earlier_runs_have() -> None:
    found = choice(placement(TRAIN, 0, 8, Layout(dp=8)))
    wire = msgspec.json.decode(msgspec.json.encode(found))
    assert [one["first_device"] for one in wire["seats"]] == [0]
    assert "placements" not in wire
    assert msgspec.convert(wire, Choice) == found
