"""Which workers must be on one host, and what they are given there."""

from __future__ import annotations

import socket

import pytest

from m2flow.errors import PlanError, SpecError
from m2flow.micro.controller.ray_cluster import Bundle, Node, bundles, check_answer, holders, lacking, too_much
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.spec import ClusterSpec, PoolSpec, RaySpec

ROLLOUT = EngineSlot("policy", "rollout", "fake")
TRAIN = EngineSlot("policy", "train", "fake")
FUNCTIONS = EngineSlot("*", "function", "python")
TWO_NODES = {"main": PoolSpec(device="h100", nodes=2, devices_per_node=8)}


def plan(*workers: WorkerPlan) -> Plan:
    return Plan("f", "c", "split", "", workers, (), (), (), (), ())


def test_workers_of_one_machine_s_spec_each_have_a_bundle_with_their_threads() -> None:
    workers = WorkerPlan("rollout-0", "cpu", 3, (ROLLOUT,)), WorkerPlan("functions-0", "cpu", 1, (FUNCTIONS,))
    assert bundles(plan(*workers), ClusterSpec()) == (Bundle(("rollout-0",), 3, 0), Bundle(("functions-0",), 1, 0))


def test_workers_that_take_turns_are_together_and_their_gpu_counts_once() -> None:
    workers = (
        WorkerPlan("rollout-0", "cuda:0", 1, (ROLLOUT,), "device-0"),
        WorkerPlan("train-0", "cuda:0", 1, (TRAIN,), "device-0"),
        WorkerPlan("rollout-1", "cuda:0", 1, (ROLLOUT,)),
    )
    found = bundles(plan(*workers), ClusterSpec())
    assert found == (Bundle(("rollout-0", "train-0"), 2, 1), Bundle(("rollout-1",), 1, 1))
    assert holders(plan(*workers), ClusterSpec()) == {"rollout-0": "rollout-0", "train-0": "rollout-0", "rollout-1": "rollout-1"}


def test_what_the_plan_has_put_on_one_node_stays_together() -> None:
    workers = (
        WorkerPlan("rollout-0", "main[0:4]", 1, (ROLLOUT,)),
        WorkerPlan("rollout-1", "main[8:12]", 1, (ROLLOUT,)),
        WorkerPlan("rollout-2", "main[4:8]", 1, (ROLLOUT,)),
        WorkerPlan("train-0", "main[12:16]", 1, (TRAIN,)),
    )
    found = bundles(plan(*workers), ClusterSpec(pools=TWO_NODES))
    assert found == (Bundle(("rollout-0", "rollout-2"), 2, 8), Bundle(("rollout-1", "train-0"), 2, 8))


def test_who_takes_turns_with_a_larger_worker_uses_that_one_s_gpus() -> None:
    workers = (
        WorkerPlan("rollout-0", "main[0:2]", 1, (ROLLOUT,), "a"),
        WorkerPlan("rollout-1", "main[2:4]", 1, (ROLLOUT,), "a"),
        WorkerPlan("train-0", "main[0:4]", 1, (TRAIN,), "a"),
    )
    spec = ClusterSpec(pools=TWO_NODES)
    assert bundles(plan(*workers), spec) == (Bundle(("rollout-0", "rollout-1", "train-0"), 3, 4),)
    assert set(holders(plan(*workers), spec).values()) == {"train-0"}


def test_a_worker_of_two_nodes_is_refused_with_how_to_pin_it() -> None:
    with pytest.raises(PlanError, match="devices 4 to 11 of main, which are on 2 nodes") as caught:
        bundles(plan(WorkerPlan("train-0", "main[4:12]", 1, (TRAIN,))), ClusterSpec(pools=TWO_NODES))
    assert "num_devices: 8" in caught.value.now


def test_kinds_and_pools_ask_for_the_resource_that_their_nodes_have() -> None:
    ray = RaySpec(resources={"main": "accelerator_type:H100", "functions": "cheap"})
    spec = ClusterSpec(launcher="ray", ray=ray, pools=TWO_NODES)
    workers = WorkerPlan("train-0", "main[0]", 1, (TRAIN,)), WorkerPlan("functions-0", "cpu", 1, (FUNCTIONS,))
    assert [bundle.resource for bundle in bundles(plan(*workers), spec)] == ["accelerator_type:H100", "cheap"]


def test_bundles_that_each_fit_a_node_and_together_do_not_fit_the_cluster_are_told_from_those_that_somebody_is_in_the_way_of() -> None:
    nodes = [Node(name, "10.0.0.1", {"CPU": 2.0}) for name in "ab"]
    wanted = [Bundle(("train-0",), 2, 0), Bundle(("rollout-0",), 2, 0)]
    assert (lacking(wanted, nodes), too_much(wanted, nodes)) == ("", "")
    wanted.append(Bundle(("functions-0",), 1, 0))
    assert (lacking(wanted, nodes), too_much(wanted, nodes)) == ("", "5 CPU of its 4")


def test_the_address_of_a_head_is_tried_before_ray_tries_it_for_minutes() -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.2", 0))  # Ray takes 127.0.0.1 for the node's address, and this as it is.
        address = f"127.0.0.2:{head.getsockname()[1]}"
        with pytest.raises(SpecError, match=f"there is no Ray cluster at '{address}'") as caught:
            check_answer(address, 0.0)
        assert "`ray start --head` starts one" in caught.value.now
        head.listen()
        check_answer(address)


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.2:1", "127.0.0.1:1", "[::1]:1"])
def test_what_ray_makes_an_address_of_its_own_of_is_left_to_ray(address: str) -> None:
    check_answer(address, 0.0)
