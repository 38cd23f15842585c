"""Devices that a trainer lends to rollout, and has back when training is due: the same answer, in every order, and sooner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cost_tables import NOTHING, PlainCosts
from fake_flows import duet, everything, failing, plain
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from leased_plans import lent, split
from modelled_problems import simple
from simulated import Given, cluster, decodes, leased, ran
from simulated import plain as simulated_flow

from m2flow.errors import PlanError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import workers_of_choice
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import PassCost, Switch, TrainCost
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.scheduler.leases import GpuBorrowing
from m2flow.planner.dynamic_program import WORTH
from m2flow.planner.explaining import explain
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec
from m2flow.testing.program_calls import as_flow
from m2flow.testing.random_programs import difference_of, programs
from m2flow.testing.world import run_eager, run_planned

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Workers whose samples were moved."""
    found: list[str] = []
    before = GpuBorrowing._give_back

    def noted(self: GpuBorrowing, state: object, name: str) -> None:
        had = self._state.num_given_back
        before(self, state, name)  # type: ignore[arg-type]
        found.extend([name] * (self._state.num_given_back - had))

    monkeypatch.setattr(GpuBorrowing, "_give_back", noted)
    return found


@pytest.mark.parametrize("until", [0.01, 0.4, 0.9])
@pytest.mark.parametrize("of", [plain, everything, duet, failing], ids=lambda of: of.name)
def test_what_is_lent_and_given_back_gives_the_eager_answer(of: Flow, until: float, given_back: list[str]) -> None:
    eager = run_eager(of, {"batch": 4}, split())
    for order_seed in range(2):
        planned = run_planned(of, {"batch": 4}, split(), order_seed=order_seed, placed=lent(until, "rollout-0"))
        assert difference_of(planned, eager) is None
    assert set(given_back) == {"rollout-0"} or until == 0.9 or of is failing


@pytest.mark.parametrize("policy", ["lpt", "gather", "repack"])
def test_so_it_does_under_a_policy(policy: str, given_back: list[str]) -> None:
    spec = split(3, policy=(policy,))
    eager = run_eager(plain, {"batch": 4}, spec)
    for order_seed in range(2):
        assert run_planned(plain, {"batch": 4}, spec, order_seed=order_seed, placed=lent(0.3, "rollout-1", "rollout-2")) == eager
    assert given_back


@few
@given(programs(), st.integers(2, 3), st.sampled_from([0.01, 0.3, 0.7, 1.0]), st.integers(0, 2**30), st.booleans())
def test_a_random_program_gives_the_same_on_lent_devices(program, num_rollout, until, order_seed, by_identity):
    spec, names = split(num_rollout), ["rollout-0", "rollout-2"][: num_rollout - 1]
    placed = lent(until, *names)
    planned = run_planned(as_flow(program), {}, spec, order_seed=order_seed, deterministic=by_identity, placed=placed)
    assert difference_of(planned, run_eager(as_flow(program), {}, spec)) is None


@pytest.mark.parametrize("order_seed", range(6))
def test_workers_that_are_lost_meanwhile_change_nothing(order_seed: int) -> None:
    spec = split(3)
    eager = run_eager(plain, {"batch": 4}, spec)
    answer = run_planned(plain, {"batch": 4}, spec, order_seed=order_seed, placed=lent(0.3, "rollout-0"), num_losses=2)
    assert answer.weights == eager.weights


def simulated(placed: Callable[[Plan], Plan], instances: int = 2) -> tuple[float, list[str], int]:
    """Seconds of the second of two steps, the turns that the trainer's devices have had by then, and samples that had two workers."""
    costs = PlainCosts(decodes(), TrainCost(NOTHING, PassCost(0.0, 0.1, 0.0), 2.0), switching=Switch(1.0, 1.0))
    lengths = Given([[10, 12], [8, 14], [9, 11], [10, 60]], prompt=2)
    options = {"batch": 4, "n": 2, "num_steps": 2}
    found = ran(simulated_flow, costs, lengths, cluster(instances=instances, token_budget=30), options=options, num_steps=2, placed=placed)
    turns = [done.task.to for done in found.history.done_tasks if isinstance(done.task, m.Switch) and done.worker == "train-0"]
    homes = [run.id for runs in found.history.sample_runs.values() for run in runs]
    return found.makespans[1], turns, len(homes) - len(set(homes))


def test_the_simulator_lends_as_a_run_does_and_the_step_is_shorter() -> None:
    """On two instances with one device each, of which one is the trainer's: against one for each, and against turns on both."""
    lent_s, turns, num_moved = simulated(lent(0.8, "rollout-1"))
    kept_s, _, num_kept = simulated(lent(1.0, "rollout-1"))
    (split_s, _, _), (turns_s, _, _) = simulated(lambda plan: plan, instances=1), simulated(leased)
    assert lent_s < min(split_s, turns_s, kept_s)
    assert (turns, num_moved, num_kept) == (["train", "rollout", "train"], 2, 0)


def test_samples_that_wait_for_weights_on_lent_devices_are_given_back_too() -> None:
    """The others' first sample has ended before the lent instance has switched and loaded: it begins none of its own."""
    costs = PlainCosts(decodes(), TrainCost(NOTHING, PassCost(0.0, 0.1, 0.0), 2.0), switching=Switch(10.0, 10.0), syncing_s=20.0)
    lengths, options = Given([[10, 12], [8, 14], [9, 11], [10, 60]], prompt=2), {"batch": 4, "n": 2, "num_steps": 2}
    found = ran(
        simulated_flow,
        costs,
        lengths,
        cluster(instances=2, token_budget=30),
        options=options,
        num_steps=2,
        placed=lent(0.1, "rollout-1"),
    )
    turns = [done.end_s for done in found.history.done_tasks if isinstance(done.task, m.Switch) and done.worker == "train-0"]
    lent_s = turns[-1] - turns[-2] - 20.0  # Without the switch itself.
    assert lent_s < 40, "to switch and to load"


def test_a_plan_says_what_is_lent_and_refuses_what_nobody_could_take_over() -> None:
    graph, models, _ = trace(plain, {}, steps=1)
    plan = lower(graph, models, split())
    assert "lent until 80% have ended" in str(lent(0.8, "rollout-0")(plan))
    with pytest.raises(PlanError, match=r"can't be lent .*rollout engine of policy"):
        lent(0.8, "rollout-0", "rollout-1")(plan)
    with pytest.raises(PlanError, match="another worker must have the role's too"):
        lent(1.2, "rollout-0")(plan)


def test_the_search_lends_where_that_is_predicted_to_be_shorter_and_says_what_by() -> None:
    choice, without = simple(), simple("never")
    rollout, train = choice.placements
    assert choice.mode == "hybrid"
    assert 0 < rollout.lent_until < 1
    assert set(train.devices) < set(rollout.devices)
    assert choice.predicted_step_s <= without.predicted_step_s * (1 - WORTH)
    assert choice.predicted_step_s >= choice.lower_bound_s
    assert sum(part.seconds for part in choice.parts if part.on_critical_path) == pytest.approx(choice.predicted_step_s)
    assert "some devices lent (lease-0), until" in explain(choice)
    assert without.constraints_cost_s["lend: never"] == pytest.approx(without.predicted_step_s - choice.predicted_step_s)
    assert {loser.what for loser in choice.losers} == {"time-shared", "split"}


def test_nothing_is_lent_where_steps_overlap() -> None:
    assert not any(placement.lent_until for placement in simple(staleness=1).placements)


def test_of_a_rollout_with_lent_devices_only_those_instances_take_turns() -> None:
    choice = simple()
    workers = workers_of_choice(
        choice, ClusterSpec(pools={"main": PoolSpec(device="h100")}, rollout=RolloutSpec(engine="sglang")), "cuda:0"
    )
    rollouts = {w.name: (bool(w.lease), w.engines[0].lent_until > 0) for w in workers if w.engines[0].kind == "rollout"}
    assert set(rollouts.values()) == {(True, True), (False, False)}
    (trainer,) = (w for w in workers if w.engines[0].kind == "train")
    assert trainer.lease
