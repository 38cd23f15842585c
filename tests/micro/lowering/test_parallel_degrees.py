"""What the plan says of a rollout engine's server: over how many devices it is laid, and by which way weights go into it."""

from __future__ import annotations

import math

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow
from m2flow.engines.contract import EngineSettings
from m2flow.errors import PlanError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import Choice, EngineSlot, Placement, Plan
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, WeightsSpec
from m2flow.testing.fakes import FakeRollout


def zero(sample: Sample) -> float:
    return 0.0


@flow
def plain() -> None:
    policy, verifier = Policy("fake"), Reward(zero)
    responses = policy.generate(Dataset([{"prompt": "a"}]).take(1), n=2, max_new_tokens=2)
    policy.update(responses, verifier.score(responses))


def planned(engine: str, weights: WeightsSpec | None = None, **pins: LayoutSpec) -> Plan:
    graph, models, num_steps = trace(plain, {}, seed=0)
    pin = {name.replace("_", "."): PinSpec(layout=layout) for name, layout in pins.items()}
    spec = ClusterSpec(
        device="cpu", placement="split", rollout=RolloutSpec(engine=engine, workers=2), pin=pin, weights=weights or WeightsSpec()
    )
    return lower(graph, models, spec, num_steps=num_steps)


def degrees(plan: Plan) -> set[tuple[int, int, int]]:
    return {(slot.tp, slot.pp, slot.ep) for worker in plan.workers for slot in worker.engines if slot.kind == "rollout"}


def test_what_the_spec_pins_is_in_the_plan_of_each_instance_and_shown() -> None:
    plan = planned("sglang", policy_rollout=LayoutSpec(tp=4, ep=2), policy=LayoutSpec(tp=2, pp=2))
    assert degrees(plan) == {(4, 2, 2)}
    assert "policy: rollout (sglang, tp 4, pp 2, ep 2)" in str(plan)
    assert degrees(planned("sglang")) == {(1, 1, 1)}


def test_an_engine_that_can_not_be_laid_out_so_is_refused_with_those_that_can() -> None:
    with pytest.raises(PlanError, match=r"'embedded' has tp up to 1, .* 2\n.*sglang"):
        planned("embedded", policy=LayoutSpec(tp=2))


def test_an_engine_without_a_server_is_not_given_a_way_into_it() -> None:
    with pytest.raises(PlanError, match=r"into_server: group.*'embedded' does not load weights that way"):
        planned("embedded", WeightsSpec(into_server="group"))
    assert degrees(planned("sglang", WeightsSpec(into_server="group"))) == {(1, 1, 1)}


def test_a_search_lays_out_engines_in_pools_and_counts_threads_on_cores() -> None:
    def of(spec: ClusterSpec, pool: str) -> list[int]:
        placement = Placement(EngineId("policy", "rollout"), ("policy.generate",), pool, 0, 4, Layout(tp=2, dp=2), 0, Footprint())
        choice = Choice("plain", "here", "split", (placement,), 1.0, (), (), True, 0.0, "", (), 0.0, {}, {})
        return [slot.tp for worker in workers_of_choice(choice, spec, "cpu") for slot in worker.engines if slot.kind == "rollout"]

    assert of(ClusterSpec(rollout=RolloutSpec(engine="sglang"), pools={"h100": PoolSpec(device="h100")}), "h100") == [2, 2]
    assert of(ClusterSpec(rollout=RolloutSpec(engine="sglang"), device="cpu", cores=4), "") == [1, 1]


def test_each_engine_is_started_as_its_slot_says() -> None:
    slots = [EngineSlot("policy", "rollout", "fake", tp=4, ep=2)]
    settings = {"rollout": EngineSettings(into_server="group")}
    models = {"policy": Model("fake")}
    engine_host = EngineHost(slots, models, settings, run_seed=0, recorder=Recorder("engine_host"), shared_prefix="", gather_s=math.inf)
    engine_host.open()
    try:
        engine = engine_host._rollout["policy"]
        assert isinstance(engine, FakeRollout)
        found = engine._settings
        assert (found.tp, found.pp, found.ep, found.into_server) == (4, 1, 2, "group")
    finally:
        engine_host.close()
