"""What a plan lets stay on devices that are shared stays there in a run, and so does the simulator count; what is off gives its weights."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from cost_tables import NOTHING, PlainCosts
from fake_flows import duet, everything
from leased_plans import EIGHT, SHARED, all_apart, choice, placement
from simulated import Given, cluster, decodes, ran

from m2flow.engines import registry
from m2flow.errors import PlanError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout, PassCost, Switch, TrainCost
from m2flow.micro.protocol.plan import Plan
from m2flow.simulator.machines import machines_of
from m2flow.spec import RolloutSpec
from m2flow.testing.fakes import FakeRollout, FakeTrain
from m2flow.testing.world import run_eager, run_planned

GIB = 2**30


def staying(plan: Plan) -> Plan:
    """Rollout engines that share their devices stay there."""
    workers = []
    for worker in plan.workers:
        slots = [msgspec.structs.replace(s, stays=bool(worker.lease) and s.kind == "rollout") for s in worker.engines]
        workers.append(msgspec.structs.replace(worker, engines=tuple(slots)))
    return msgspec.structs.replace(plan, workers=tuple(workers)).verify()


@pytest.mark.parametrize("order_seed", [0, 5])
def test_a_rollout_engine_that_stays_rests_and_is_never_put_away(monkeypatch: pytest.MonkeyPatch, order_seed: int) -> None:
    eager = run_eager(duet, {}, SHARED)
    done: list[str] = []
    for name in ("offload", "rest"):
        before = getattr(FakeRollout, name)
        monkeypatch.setattr(FakeRollout, name, lambda self, name=name, before=before: (done.append(name), before(self)))
    assert run_planned(duet, {}, SHARED, order_seed=order_seed, placed=staying) == eager
    assert set(done) == {"rest"}
    done.clear()
    assert run_planned(duet, {}, SHARED, order_seed=order_seed) == eager
    assert set(done) == {"offload"}


def test_a_plan_says_that_a_rollout_engine_stays_only_if_its_engine_can() -> None:
    placements = choice(
        placement(EngineId("policy", "rollout"), 0, 8, Layout(tp=4, dp=2), "L"),
        placement(EngineId("policy", "train"), 0, 8, Layout(dp=8), "L"),
    )
    for engine, can in (("sglang", True), ("nobody knows it", False)):
        spec = EIGHT.model_copy(update={"rollout": RolloutSpec(engine=engine)})
        workers = workers_of_choice(placements, spec, "cuda:0")
        assert {slot.stays for worker in workers for slot in worker.engines if slot.kind == "rollout"} == {can}
        assert {slot.stays for worker in workers for slot in worker.engines if slot.kind == "train"} == {True}


def test_only_what_shares_its_devices_can_be_said_to_stay() -> None:
    graph, models, _ = trace(duet, {}, steps=1)
    plan = lower(graph, models, SHARED)
    assert "stays" in str(staying(plan))
    (worker, *others) = staying(plan).workers
    alone = msgspec.structs.replace(worker, lease="")
    with pytest.raises(PlanError, match=r"said to stay.* shares .*nobody"):
        msgspec.structs.replace(plan, workers=(alone, *others)).verify()


def test_the_simulator_goes_by_what_the_plan_says_of_each_engine() -> None:
    costs = PlainCosts(decodes(), switching=Switch(2.0, 5.0), bytes_of=Footprint(weights=10, kv=3))
    graph, models, _ = trace(duet, {}, steps=1)
    plan, spec = lower(graph, models, cluster("time-shared")), cluster("time-shared")
    (leaves, *_), (stays, *_) = (list(machines_of(p, spec, costs).values()) for p in (plan, staying(plan)))
    assert (leaves.switch_s("rollout", "train"), stays.switch_s("rollout", "train")) == (2 * (2.0 + 5.0), 2 * 5.0)
    assert (leaves.resident_bytes("train"), stays.resident_bytes("train")) == (2 * 13, 2 * 13 + 2 * 10)


# Weights of one that is off its device.


def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each copy that is made from now on, whether the giver is off its device then."""
    found: list[bool] = []
    before = FakeTrain.copy_from

    def copy_from(self: FakeTrain, source: FakeTrain) -> None:
        found.append(source._is_away)
        before(self, source)

    monkeypatch.setattr(FakeTrain, "copy_from", copy_from)
    return found


def test_weights_of_a_trainer_that_is_off_its_device_are_copied_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, found = run_eager(everything, {}, SHARED), copies(monkeypatch)
    assert run_planned(everything, {}, SHARED, order_seed=3, placed=all_apart) == eager
    assert found == [True]


def test_a_trainer_that_can_not_give_them_from_there_comes_back_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, found = run_eager(everything, {}, SHARED), copies(monkeypatch)
    cannot = dataclasses.replace(FakeTrain.capabilities, readable_offloaded=False)
    infos = [
        dataclasses.replace(info, capabilities=cannot) if (info.name, info.kind) == ("fake", "train") else info
        for info in registry.engines()
    ]
    monkeypatch.setattr(FakeTrain, "capabilities", cannot)
    monkeypatch.setattr(registry, "engines", lambda: infos)
    moves: list[str] = []
    for name in ("onload", "offload", "copy_from"):
        before = getattr(FakeTrain, name)
        monkeypatch.setattr(FakeTrain, name, lambda *who, name=name, before=before: (moves.append(name), before(*who)))
    assert run_planned(everything, {}, SHARED, order_seed=3, placed=all_apart) == eager
    assert found == [False]
    at = moves.index("copy_from")
    assert moves[at - 1 : at + 2] == ["onload", "copy_from", "offload"]


@pytest.mark.parametrize(("engine", "seconds", "peak_gib"), [("fake", 5.0, 10), ("fake-ranks", 7.0, 20)])
def test_the_simulator_counts_the_way_of_the_weights_or_of_all_that_comes_back(engine: str, seconds: float, peak_gib: int) -> None:
    costs = PlainCosts(
        decodes(), TrainCost(NOTHING, PassCost(0.0, 0.5, 0.0), 3.0), switching=Switch(2.0, 5.0), bytes_of=Footprint(weights=10 * GIB)
    )
    spec = cluster("time-shared")
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"engine": engine})})
    result = ran(everything, costs, Given([[10]], prompt=2), spec, options={"num_steps": 1}, placed=all_apart)
    (copy,) = (done for done in result.history.done_tasks if isinstance(done.task, m.CopyWeights))
    assert copy.end_s - copy.start_s == pytest.approx(seconds)
    assert result.history.periods[0].peak_bytes == peak_gib * GIB  # What comes before the first step.
