"""Two trainers, or two rollout engines, that share devices take turns with them too: in plan, scheduler, workers and simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import msgspec
import pytest
from cost_tables import NOTHING, PlainCosts
from fake_flows import duet, everything, ppo
from leased_plans import EIGHT, SHARED, all_apart, choice, own_turns, placement
from simulated import Given, cluster, decodes, ran

from m2flow.errors import PlanError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import EngineId, Layout, PassCost, Switch, TrainCost
from m2flow.micro.protocol.plan import EngineSlot, Placement, Plan
from m2flow.micro.protocol.worker_state import Lease
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.world import run_eager, run_planned


def in_one_process(plan: Plan) -> Plan:
    """Each trainer has a turn of its own."""
    return msgspec.structs.replace(plan, workers=tuple(map(own_turns, plan.workers))).verify()


def in_processes_of_their_own(of: Flow) -> Callable[[Plan], Plan]:
    """Each engine is alone in its process, all under one lease."""

    def placed(plan: Plan) -> Plan:
        workers = []
        for worker in map(own_turns, plan.workers):
            if not worker.lease:
                workers.append(worker)
                continue
            workers += [
                msgspec.structs.replace(worker, name=f"{slot.kind}-{slot.role}".replace("*", "all"), engines=(slot,))
                for slot in worker.engines
            ]
        graph, models, _ = trace(of, {}, steps=1)
        return lower(graph, models, SHARED, pinned=msgspec.structs.replace(plan, workers=tuple(workers)))

    return placed


@pytest.mark.parametrize("order_seed", [0, 3, 8])
@pytest.mark.parametrize("placed", [in_one_process, all_apart])
@pytest.mark.parametrize("of", [ppo, duet, everything], ids=lambda of: of.name)
def test_engines_that_take_turns_give_the_eager_answer(of: Flow, placed: Callable[[Plan], Plan], order_seed: int) -> None:
    assert run_planned(of, {}, SHARED, order_seed=order_seed, placed=placed) == run_eager(of, {}, SHARED)


@pytest.mark.parametrize("order_seed", [1, 2])
def test_so_do_trainers_in_processes_of_their_own(order_seed: int) -> None:
    assert run_planned(duet, {}, SHARED, order_seed=order_seed, placed=in_processes_of_their_own(duet)) == run_eager(duet, {}, SHARED)


def test_no_two_trainers_are_on_the_devices_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[FakeTrain] = []
    most: list[int] = []

    def counted(name: str, change: Callable[[FakeTrain], None]) -> None:
        before = getattr(FakeTrain, name)

        def method(self: FakeTrain) -> None:
            change(self)
            before(self)
            most.append(len(there))

        monkeypatch.setattr(FakeTrain, name, method)

    counted("start", there.append)
    counted("onload", there.append)
    counted("offload", lambda engine: there.remove(engine) if engine in there else None)
    assert run_planned(duet, {}, SHARED, order_seed=4, placed=in_one_process).error == ""
    assert max(most) == 1
    assert sum(a < b for a, b in itertools.pairwise(most)) > 2, "they came and went"


def test_a_turn_that_waits_comes_before_one_that_was_there_last() -> None:
    lease = Lease("a")
    lease.join("device-0", ("rollout", "train policy", "train critic"))
    assert list(lease.next_turns) == ["train policy", "train critic"]
    assert lease.move("train critic") == ("device-0",)
    lease.switched("device-0")
    assert list(lease.next_turns) == ["rollout", "train policy"]


TRAINING = TrainCost(NOTHING, PassCost(0.0, 0.5, 0.0), 3.0)


def test_the_simulator_takes_turns_as_the_run_does() -> None:
    """Together both trainers come to the devices at once; apart the first leaves before the second comes."""
    costs = PlainCosts(decodes(), TRAINING, switching=Switch(2.0, 5.0))
    options = {"batch": 2, "n": 2, "num_steps": 1}

    def made(placed: Callable[[Plan], Plan]) -> tuple[list[str], float]:
        result = ran(duet, costs, Given([[10]], prompt=2), cluster("time-shared"), options=options, placed=placed)
        return [done.task.to for done in result.history.done_tasks if isinstance(done.task, m.Switch)], result.makespans[0]

    (together, together_s), (apart, apart_s) = made(lambda plan: plan), made(in_one_process)
    assert (together, apart) == (["train"], ["train left", "train right"])
    assert apart_s == pytest.approx(together_s + 2.0)


def _trainers(plan: Plan) -> list[EngineSlot]:
    return [slot for worker in plan.workers for slot in worker.engines if slot.kind == "train"]


POLICY, CRITIC, SAMPLES = EngineId("policy", "train"), EngineId("critic", "train"), EngineId("policy", "rollout")


def turns_of(*placements: Placement, kind: str = "train") -> Mapping[str, tuple[str, bool]]:
    workers = workers_of_choice(choice(*placements), EIGHT, "cuda:0")
    return {s.role: (s.takes_turn, s.stays) for worker in workers for s in worker.engines if s.kind == kind}


def swapped(*arguments: object) -> Placement:
    return msgspec.structs.replace(placement(*arguments), is_swapped=True)  # type: ignore[arg-type]


def test_trainers_share_a_turn_only_where_the_devices_hold_them_both() -> None:
    whole, half = Layout(dp=8), Layout(dp=4)
    generates = placement(SAMPLES, 0, 8, Layout(tp=4, dp=2), "L")
    both_stay = turns_of(generates, placement(POLICY, 0, 8, whole, "L"), placement(CRITIC, 0, 8, whole, "L"))
    assert both_stay == {"policy": ("train", True), "critic": ("train", True)}
    one_leaves = turns_of(generates, placement(POLICY, 0, 8, whole, "L"), swapped(CRITIC, 0, 8, whole, "L"))
    assert one_leaves == {"policy": ("train policy", True), "critic": ("train critic", False)}
    side_by_side = turns_of(generates, swapped(POLICY, 0, 4, half, "L"), swapped(CRITIC, 4, 4, half, "L"))
    assert side_by_side == {"policy": ("train", False), "critic": ("train", False)}
    over_each_other = turns_of(generates, placement(POLICY, 0, 8, whole, "L"), placement(CRITIC, 4, 4, half, "L"))
    assert over_each_other == {"policy": ("train policy", True), "critic": ("train critic", True)}


def test_so_do_engines_that_generate() -> None:
    judge, layout = EngineId("judge", "rollout"), Layout(tp=4, dp=2)
    alike = turns_of(placement(SAMPLES, 0, 8, layout, "L"), placement(judge, 0, 8, layout, "L"), kind="rollout")
    assert alike == {"policy": ("rollout", True), "judge": ("rollout", True)}
    in_other_layouts = turns_of(placement(SAMPLES, 0, 8, layout, "L"), placement(judge, 0, 8, Layout(dp=8), "L"), kind="rollout")
    assert in_other_layouts == {"policy": ("rollout policy", True), "judge": ("rollout judge", True)}
    leaves = turns_of(swapped(SAMPLES, 0, 8, layout, "L"), placement(POLICY, 0, 8, Layout(dp=8), "L"), kind="rollout")
    assert leaves == {"policy": ("rollout", False)}


def test_a_plan_says_the_turns_and_refuses_those_that_nobody_takes() -> None:
    graph, models, _ = trace(duet, {}, steps=1)
    plan = in_one_process(lower(graph, models, SHARED))
    names = [slot.role for slot in _trainers(plan)]
    assert f"in turn 'train {names[0]}'" in str(plan)
    worker = msgspec.structs.replace(plan.workers[0], lease="")
    with pytest.raises(PlanError, match="has the turn 'train"):
        msgspec.structs.replace(plan, workers=(worker, *plan.workers[1:])).verify()


# Seeded bugs.


def test_a_trainer_that_is_not_put_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_trainers(self: EngineHost, to: str) -> None:
        for slot in self._slots:
            if slot.kind == "train":
                self._train[slot.role].offload()

    monkeypatch.setattr(EngineHost, "switch", all_trainers)
    assert "off its device" in run_planned(duet, {}, SHARED, order_seed=4, placed=in_one_process).error
