"""Speakers in processes of their own: their turns are asked for over channels, and nothing that is said depends on where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from test_speakers import SPEC, contest

from m2flow.errors import PlanError, StateLost
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.spec import ClusterSpec, PinSpec
from m2flow.testing.random_programs import Dice, difference_of, make_cluster, make_policies, scheduled
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")

JUDGE_APART = {"judge.rollout": PinSpec(num_devices=1)}
BOTH_APART = {**JUDGE_APART, "rival.rollout": PinSpec(num_devices=2)}


def apart(spec: ClusterSpec = SPEC, *, placement: str = "split", pins: dict[str, PinSpec] = BOTH_APART) -> ClusterSpec:
    return spec.model_copy(update={"placement": placement, "pin": pins})


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize("pins", [JUDGE_APART, BOTH_APART])
def test_a_planned_run_with_speakers_in_processes_of_their_own_equals_the_eager_one(placement, pins):
    spec = apart(placement=placement, pins=pins)
    graph, models, _ = trace(contest, {})
    hosts = [{slot.role for slot in worker.engines if slot.kind == "rollout"} for worker in lower(graph, models, spec).workers]
    assert {"judge"} in hosts
    assert not any({"policy", "judge"} <= roles for roles in hosts)
    planned, eager = run_planned(contest, {}, spec), run_eager(contest, {}, spec)
    assert not planned.error, planned.error
    assert not eager.error, eager.error
    assert difference_of(planned, eager) is None


@pytest.mark.timeout(0)
@pytest.mark.parametrize("loses", [0, 2])
def test_planned_equals_eager_under_random_plans_orders_and_losses(request, loses):
    for number in range(80 if request.config.getoption("--long") else 6):
        dice = Dice(f"remote speakers, {loses}, {number}")
        spec = apart(make_cluster(dice), placement=dice.choice(("split", "time-shared")), pins=dice.choice((JUDGE_APART, BOTH_APART)))
        if number % 3 == 2:
            spec = scheduled(spec, make_policies(dice))
        options = {"alone": dice.choice((0, 1)), "how": dice.choice(("grpo", "rloo", "opo")), "num_steps": 3, "staleness": number % 3}
        planned = run_planned(contest, options, spec, seed=number, order_seed=dice.integer(0, 2**30), num_losses=dice.integer(0, loses))
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(contest, options, spec, seed=number, decisions=planned.decisions or None)
        assert not eager.error
        assert difference_of(planned, eager) is None, f"case {number}: {options} {spec}"


def slot(role: str, kind: Literal["rollout", "train"], turn: str = "") -> EngineSlot:
    return EngineSlot(role, kind, "fake", turn)


FUNCTIONS = WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))
TWO_LEASES = (
    WorkerPlan("device-0", "cpu", 1, (slot("policy", "rollout"), slot("policy", "train")), "one"),
    WorkerPlan("device-1", "cpu", 1, (slot("rival", "rollout"), slot("rival", "train")), "two"),
    WorkerPlan("rollout-2", "cpu", 1, (slot("judge", "rollout"),)),
    FUNCTIONS,
)
"""Self-play of two policies on two devices, each of which its engines share in turns, and a judge on a third."""
ONE_LEASE = (
    WorkerPlan("rollout-0", "cpu", 1, (slot("policy", "rollout"),), "one"),
    WorkerPlan("rollout-1", "cpu", 1, (slot("rival", "rollout"), slot("judge", "rollout")), "one"),
    WorkerPlan("rollout-2", "cpu", 1, (slot("rival", "rollout"),), "one"),
    WorkerPlan("train-0", "cpu", 1, (slot("policy", "train"), slot("rival", "train")), "one"),
    FUNCTIONS,
)
"""All devices are generation's or training's together."""


def pinned_to(workers: tuple[WorkerPlan, ...], options: dict[str, object]) -> Callable[[Plan], Plan]:
    graph, models, _ = trace(contest, options)
    return lambda plan: lower(graph, models, SPEC, pinned=msgspec.structs.replace(plan, workers=workers))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", [TWO_LEASES, ONE_LEASE], ids=["two leases", "one lease"])
def test_speakers_on_devices_that_engines_take_turns_with_have_their_turn_while_episodes_run(request, workers):
    for number in range(40 if request.config.getoption("--long") else 3):
        options = {"alone": number % 2, "num_steps": 3, "staleness": number % 3}
        planned = run_planned(contest, options, SPEC, seed=number, order_seed=number, placed=pinned_to(workers, options))
        eager = run_eager(contest, options, SPEC, seed=number, decisions=planned.decisions or None)
        assert not planned.error, planned.error
        assert not eager.error, eager.error
        assert difference_of(planned, eager) is None, f"case {number}"


def test_a_plan_in_which_speakers_would_never_have_a_turn_together_is_refused():
    graph, models, _ = trace(contest, {})
    plan = lower(graph, models, SPEC)
    for lease in ("one", "two"):
        own_turn = WorkerPlan("device-1", "cpu", 1, (slot("rival", "rollout", "rollout rival"), slot("rival", "train")), lease)
        workers = (TWO_LEASES[0], own_turn, *TWO_LEASES[2:])
        with pytest.raises(PlanError, match="has none of rival that works in the same turn, nor is there one elsewhere that can"):
            lower(graph, models, SPEC, pinned=msgspec.structs.replace(plan, workers=workers))
