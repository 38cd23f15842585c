"""A trainer comes to devices on which the last samples still run, where the plan says so: the same answer in every order, and sooner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from cost_tables import NOTHING, PlainCosts
from fake_flows import duet, everything, failing, plain
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from leased_plans import ahead, split
from modelled_problems import grpo
from simulated import Given, cluster, decodes, leased, ran
from simulated import plain as simulated_flow

from m2flow.errors import PlanError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import Footprint, PassCost, Switch, TrainCost
from m2flow.micro.protocol.plan import Choice, Plan, check_early_onload
from m2flow.micro.protocol.worker_state import Lease
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.explaining import explain
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.search import find_plan
from m2flow.planner.workload import extents_of
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec
from m2flow.testing.program_calls import as_flow
from m2flow.testing.random_programs import difference_of, programs
from m2flow.testing.world import run_eager, run_planned

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Turns that came ahead."""
    found: list[str] = []
    before = Lease.onload_early
    monkeypatch.setattr(Lease, "onload_early", lambda self, to: (found.append(to), before(self, to))[1])
    return found


@pytest.mark.parametrize("share", [0.01, 0.4, 0.9])
@pytest.mark.parametrize("of", [plain, everything, duet, failing], ids=lambda of: of.name)
def test_what_comes_ahead_gives_the_eager_answer(of: Flow, share: float, came: list[str]) -> None:
    eager = run_eager(of, {"batch": 4}, split())
    for order_seed in range(2):
        planned = run_planned(of, {"batch": 4}, split(2, 64), order_seed=order_seed, placed=ahead(share, "rollout-0", "rollout-1"))
        assert difference_of(planned, eager) is None
    assert set(came) <= {"train"}
    assert came or share == 0.9 or of is failing


@few
@given(programs(), st.integers(1, 3), st.sampled_from([0.01, 0.3, 0.7, 1.0]), st.integers(0, 2**30), st.booleans())
def test_a_random_program_gives_the_same_with_what_comes_ahead(program, num_rollout, share, order_seed, by_identity):
    spec, names = split(num_rollout, 64), ["rollout-0", "rollout-2", "rollout-1"][:num_rollout]
    planned = run_planned(as_flow(program), {}, spec, order_seed=order_seed, deterministic=by_identity, placed=ahead(share, *names))
    assert difference_of(planned, run_eager(as_flow(program), {}, spec)) is None


@pytest.mark.parametrize("order_seed", range(8))
def test_workers_that_are_lost_meanwhile_change_nothing(order_seed: int, came: list[str]) -> None:
    spec = split(3, 64)
    eager = run_eager(plain, {"batch": 4}, spec)
    placed = ahead(0.2, "rollout-0", "rollout-1", "rollout-2")
    assert run_planned(plain, {"batch": 4}, spec, order_seed=order_seed, placed=placed, num_losses=2).weights == eager.weights


def a_lease() -> Lease:
    lease = Lease("a")
    for name, turns in (("rollout-0", ["rollout"]), ("rollout-1", ["rollout"]), ("train-0", ["train"])):
        lease.join(name, turns)
    return lease


def test_room_is_made_by_all_before_anybody_comes_and_the_rest_leaves_when_the_lease_moves() -> None:
    lease = a_lease()
    assert lease.onload_early("train") == ("rollout-0", "rollout-1")
    assert (lease.turn, lease.owner, lease.next_turns) == ("", "rollout", ["train", "rollout"])
    assert lease.shrunk_cache("rollout-1") == ()
    assert lease.shrunk_cache("rollout-0") == ("train-0",)
    assert lease.move("train") == ("rollout-0", "rollout-1")
    assert (lease.switched("rollout-0"), lease.is_moving) == ((), True)
    assert (lease.switched("rollout-1"), lease.owner, lease.turn) == ((), "train", "train")


def test_who_came_ahead_leaves_if_the_devices_are_the_owners_again() -> None:
    lease = a_lease()
    lease.onload_early("train")
    lease.shrunk_cache("rollout-0")
    lease.shrunk_cache("rollout-1")
    assert lease.move("rollout") == ("train-0",)
    assert (lease.switched("train-0"), lease.turn, lease.early_turn) == ((), "rollout", "")


def test_nobody_comes_when_one_that_made_room_is_lost() -> None:
    lease = a_lease()
    lease.onload_early("train")
    assert lease.worker_lost("rollout-1") == ()
    assert lease.shrunk_cache("rollout-0") == ()
    assert lease.move("train") == ("rollout-0",)
    assert lease.switched("rollout-0") == ("train-0",)


def test_if_all_who_had_to_leave_are_lost_the_lease_has_moved_at_once() -> None:
    lease = a_lease()
    lease.onload_early("train")
    lease.shrunk_cache("rollout-0")
    lease.shrunk_cache("rollout-1")
    for name in ("rollout-0", "rollout-1"):
        lease.worker_lost(name)
    assert (lease.move("train"), lease.turn) == ((), "train")


def simulated(placed: Callable[[Plan], Plan]) -> tuple[float, float]:
    """Seconds of a step of which one sample is long, and bytes on the device at most."""
    costs = PlainCosts(
        decodes(), TrainCost(NOTHING, PassCost(0.0, 0.1, 0.0), 2.0), switching=Switch(1.0, 5.0), bytes_of=Footprint(weights=10, kv=3)
    )
    lengths = Given([[10, 12], [8, 14], [9, 11], [10, 60]], prompt=2)
    options = {"batch": 4, "n": 2, "num_steps": 2}
    found = ran(simulated_flow, costs, lengths, cluster(token_budget=30), options=options, num_steps=2, placed=placed)
    switches = [done for done in found.history.done_tasks if isinstance(done.task, m.Switch) and done.worker == "train-0"]
    assert {done.task.to for done in switches} == {"train", "rollout"}
    return found.makespans[1], found.history.periods[1].peak_bytes


def test_the_simulator_has_it_come_as_a_run_does_and_the_step_is_shorter_by_its_way() -> None:
    def comes(plan: Plan) -> Plan:
        workers = []
        for worker in leased(plan).workers:
            slots = [msgspec.structs.replace(s, onload_at=0.7 if s.kind == "train" else 0.0) for s in worker.engines]
            workers.append(msgspec.structs.replace(worker, engines=tuple(slots)))
        return msgspec.structs.replace(plan, workers=tuple(workers)).verify()

    (comes_s, most), (waits_s, usual) = simulated(comes), simulated(leased)
    assert waits_s - comes_s == pytest.approx(5.0)
    assert most > usual


def test_a_plan_says_who_comes_when_and_refuses_others() -> None:
    graph, models, _ = trace(plain, {}, steps=1)
    plan = lower(graph, models, split())
    assert "comes when 80% have ended" in str(ahead(0.8, "rollout-0", "rollout-1")(plan))
    with pytest.raises(PlanError, match=r"train engine of policy .* 1\.2 of the samples"):
        ahead(1.2, "rollout-0")(plan)
    shared = lower(graph, models, split().model_copy(update={"placement": "time-shared"}))
    (first, *rest) = shared.workers
    slots = tuple(msgspec.structs.replace(s, onload_at=0.5 if s.kind == "train" else 0.0) for s in first.engines)
    with pytest.raises(PlanError, match="in a worker of its own"):
        msgspec.structs.replace(shared, workers=(msgspec.structs.replace(first, engines=slots), *rest)).verify()


def searched(
    model: str = "Qwen2.5-3B", devices: int = 2, *, max_running: int = 1024, engine: str = "embedded", pin: dict[str, PinSpec] | None = None
) -> Choice:
    """GPUs for one model that is trained and generates, its reference left out."""
    workload, lengths, shapes = (
        grpo(0, 256),
        lognormal(median=1500, sigma=0.9, cap=4096, prompt_tokens=300),
        dict.fromkeys(("policy", "reference"), shape_named(model)),
    )
    calls = tuple(
        msgspec.structs.replace(call, after=tuple(name for name in call.after if name != "reference.logprobs"))
        for call in workload.calls
        if call.name != "reference.logprobs"
    )
    workload = msgspec.structs.replace(workload, calls=calls)
    spec = ClusterSpec(
        name="two",
        pools={"main": PoolSpec(device="h100", nodes=1, devices_per_node=devices)},
        rollout=RolloutSpec(engine=engine, max_running=max_running),
        train=TrainSpec(engine="fsdp", token_budget=4096),
        pin=pin or {},
    )
    return find_plan(workload, lengths, ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, lengths)), spec)


def test_the_search_has_a_trainer_come_as_soon_as_there_is_room_where_it_has_to_leave() -> None:
    large = partial(searched, "Qwen3-8B", 4)
    choice = large()
    (train,) = (placement for placement in choice.placements if placement.engine.kind == "train")
    assert train.is_swapped
    assert 0.5 < train.onload_at < 1
    assert "comes when" in explain(choice)
    comes = {w.name: [s.onload_at for s in w.engines] for w in workers_of_choice(choice, ClusterSpec(), "cuda:0") if w.lease}
    assert comes.pop("train-0") == [train.onload_at]
    assert set(comes) == {f"rollout-{number}" for number in range(len(comes))}
    assert not any(early for shares in comes.values() for early in shares)
    assert not any(placement.onload_at for placement in large(engine="sglang").placements), "its cache has one size"
    assert not any(placement.onload_at or placement.is_swapped for placement in searched(max_running=256).placements), "both fit, and stay"


def test_a_trainer_in_the_process_of_one_of_several_instances_does_not_come_beside_it() -> None:
    pins = {"rollout": PinSpec(devices=(0, 2), layout=LayoutSpec(dp=2)), "train": PinSpec(devices=(0, 1))}
    choice = searched(pin=pins)
    assert [placement.is_swapped for placement in choice.placements if placement.engine.kind == "train"] == [True]
    check_early_onload(workers_of_choice(choice, ClusterSpec(pools={"main": PoolSpec(device="h100", devices_per_node=2)}), "cuda:0"))
