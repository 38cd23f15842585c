"""Simulator, actor and learner as roles: what overlaps on the scheduler's virtual clock, and which processes a search gives to each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow import flow, simulate, steps
from m2flow.environments.actor_critic import Actor, ActorCritic, Simulator, lanes
from m2flow.environments.env import Env, Spaces, Step
from m2flow.errors import SpecError
from m2flow.macro.flow import load_flow
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Choice
from m2flow.runs.planning import Planned, Simulation, known_values, make_plan
from m2flow.spec import ClusterSpec, FunctionSpec, base_of

HORIZON = 8


class Still(Env):
    spaces = Spaces((2,), False, 2)

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> np.ndarray:
        return np.zeros(2, np.float32)

    def step(self, action: object) -> Step:
        return Step(np.zeros(2, np.float32), 0.0, False, False)


@flow
def acting(num_steps: int = 1, num_lanes: int = 4) -> None:
    simulator, actor, learner = Simulator(Still), Actor(Still), ActorCritic(Still)
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for _ in steps(num_steps):
        for _ in range(HORIZON):
            played = simulator.step(played, actor.act(played, learned))
        played = simulator.collect(played)
        learned = learner.learn(learned, played)


def cluster(act_s: float, step_s: float, workers: object = 1, cores: int = 8, learn_s: float = 0.0, **roles: object) -> ClusterSpec:
    latency_s = {"actor.act": act_s, "simulator.step": step_s, "simulator.start": 0.0, "simulator.collect": 0.0}
    latency_s |= {"actorcritic.start": 0.0, "actorcritic.learn": learn_s}
    functions = FunctionSpec.model_validate({"workers": workers, "roles": roles, "latency_s": latency_s})
    return ClusterSpec(placement="auto", device="cpu", cores=cores, functions=functions)


def planned(spec: ClusterSpec, **options: int) -> Planned:
    return make_plan(acting, "acting", options, spec, steps=1, seed=0, known=known_values((), None), tries=False)


def processes(found: Planned | Simulation) -> dict[str, int]:
    """Role -> its processes; `*`: those that all share."""
    roles = [slot.role for worker in found.plan.workers for slot in worker.engines]
    return {role: roles.count(role) for role in dict.fromkeys(roles)}


@pytest.mark.parametrize(("act_s", "step_s"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25)])
def test_some_lanes_are_stepped_while_others_are_acted_for(act_s: float, step_s: float) -> None:
    found = simulate(acting, cluster=cluster(act_s, step_s, actor=1, simulator=1))
    tasks = [done for done in found.outcome.simulated.history.done_tasks if isinstance(done.task, m.RunFunction) and done.call]
    of = {name: [done for done in tasks if done.call and done.call.name == name] for name in ("actor.act", "simulator.step")}
    assert {done.worker for done in of["actor.act"]}.isdisjoint({done.worker for done in of["simulator.step"]})
    both = [
        (acts, steps_)
        for acts in of["actor.act"]
        for steps_ in of["simulator.step"]
        if acts.start_s < steps_.end_s and steps_.start_s < acts.end_s
    ]
    assert len(both) >= 2 * HORIZON - 2
    assert all(set(acts.task.ids).isdisjoint(steps_.task.ids) for acts, steps_ in both)  # type: ignore[union-attr]
    longer_s, sum_s = 4 * HORIZON * max(act_s, step_s), 4 * HORIZON * (act_s + step_s)
    begins_and_ends_s = 2 * min(act_s, step_s)
    assert found.makespan_s == pytest.approx(longer_s + begins_and_ends_s)
    assert simulate(acting, cluster=cluster(act_s, step_s)).makespan_s == pytest.approx(sum_s), "one process does one thing at a time"


def test_processes_of_their_own_are_chosen_where_roles_would_wait_for_each_other() -> None:
    """In 3 processes that all share, 4 lanes are dealt 2, 1 and 1; an actor for 4 lanes takes as long as two simulators for 2 each."""
    found = planned(cluster(1.0, 2.0, "auto", cores=4, learn_s=0.1, actor="auto", simulator="auto"))
    assert processes(found) == {"*": 1, "actor": 1, "simulator": 2}
    assert "functions: 1 process, 1 of actor alone, 2 of simulator alone, as many as are fastest" in str(found)
    both = planned(cluster(1.0, 2.0, "auto", cores=8))
    assert processes(both) == {"*": 4}, "a process for each lane is faster"
    assert "beside" in str(both)
    assert "a role is idle while another is busy" in str(both)


def test_a_slow_simulator_gets_more_processes_of_its_own_and_a_slow_actor_does_too() -> None:
    assert processes(planned(cluster(0.25, 1.0, "auto", actor=1, simulator="auto"))) == {"*": 1, "actor": 1, "simulator": 4}
    assert processes(planned(cluster(1.0, 0.25, "auto", actor="auto", simulator=1))) == {"*": 1, "actor": 4, "simulator": 1}
    assert processes(planned(cluster(1.0, 1e-6, "auto", actor=1, simulator="auto"))) == {"*": 1, "actor": 1, "simulator": 1}


@settings(max_examples=20, deadline=None)
@given(
    act_s=st.floats(0.01, 2.0),
    step_s=st.floats(0.01, 2.0),
    learn_s=st.floats(0.0, 1.0),
    num_lanes=st.integers(1, 9),
    cores=st.integers(1, 8),
    roles=st.sampled_from([{"actor": 1, "simulator": 1}, {"actor": 1, "simulator": "auto"}, {"actor": "auto", "simulator": 1}]),
)
def test_the_predicted_step_is_that_of_the_scheduler_on_a_virtual_clock(
    act_s: float, step_s: float, learn_s: float, num_lanes: int, cores: int, roles: Mapping[str, object]
) -> None:
    spec = cluster(act_s, step_s, "auto", cores, learn_s, **roles)
    found = simulate(acting, cluster=spec, num_lanes=num_lanes, num_steps=2, steps=2)
    choice, later_s = found.plan.choice, found.outcome.report.steps[-1].makespan_s
    assert choice is not None
    assert choice.predicted_step_s == pytest.approx(later_s, rel=0.05, abs=0.01)
    assert sum(part.seconds for part in choice.parts if part.on_critical_path) == pytest.approx(choice.predicted_step_s)


@pytest.mark.parametrize("num_lanes", [2, 4, 7])
@pytest.mark.parametrize("cores", [2, 3, 6])
def test_processes_that_all_share_are_about_as_fast_as_predicted(num_lanes: int, cores: int) -> None:
    """Lanes drift: which process has how many differs from step to step."""
    found = simulate(acting, cluster=cluster(1.3, 0.7, "auto", cores), num_lanes=num_lanes, num_steps=3, steps=3)
    assert found.plan.choice is not None
    assert found.plan.choice.predicted_step_s == pytest.approx(found.makespan_s / 3, rel=0.25)


def test_a_reward_may_have_processes_of_its_own_too() -> None:
    functions = FunctionSpec(roles={"is_sorted": 2})
    found = make_plan(
        load_flow("flows/grpo.py"), "grpo", {}, ClusterSpec(functions=functions), steps=1, seed=0, known=known_values((), None), tries=False
    )
    assert {slot.hosted for worker in found.plan.workers for slot in worker.engines if slot.kind == "function"} == {
        "functions",
        "functions of is_sorted",
    }
    assert len(next(stage for stage in found.plan.stages if stage.call == "is_sorted.score").workers) == 2


def test_a_role_that_the_flow_does_not_have_is_refused_and_so_is_a_number_that_nothing_searches_for() -> None:
    with pytest.raises(SpecError, match=r"functions\.roles\.acter: the flow calls no such role") as refused:
        planned(cluster(1.0, 1.0, "auto", acter=1))
    assert "'actor'" in refused.value.now
    with pytest.raises(ValueError, match="say `placement: auto` too"):
        ClusterSpec(functions=FunctionSpec(roles={"actor": "auto"}))


@pytest.mark.parametrize("workers", [1, "auto"])
def test_beside_models_a_slow_reward_gets_as_many_processes_of_its_own_as_are_fastest(workers: int | str) -> None:
    def planned_at(latency_s: float, own: int | str) -> Choice:
        functions = FunctionSpec(workers=workers, roles={"is_sorted": own}, latency_s={"is_sorted.score": latency_s})
        spec = ClusterSpec(placement="auto", device="cpu", cores=4, functions=functions)
        made = make_plan(load_flow("flows/grpo.py"), "grpo", {}, spec, steps=1, seed=0, known=known_values((), None), tries=False)
        assert made.plan.choice is not None
        hosts = [slot.hosted for worker in made.plan.workers for slot in worker.engines if slot.kind == "function"]
        assert hosts.count("functions of is_sorted") == (made.plan.choice.num_own_workers or {"is_sorted": own})["is_sorted"]
        return made.plan.choice

    quick, slow = planned_at(1e-6, "auto"), planned_at(0.5, "auto")
    assert quick.num_own_workers == {"is_sorted": 1}
    assert slow.num_own_workers is not None
    assert 1 < slow.num_own_workers["is_sorted"] <= 3, "one of the four cores is of the functions that share"
    assert any("of is_sorted" in loser.what for loser in slow.losers)
    by_hand = min(planned_at(0.5, num).predicted_step_s for num in (2, 3))
    assert slow.predicted_step_s <= by_hand * 1.01 + 1e-9


def test_a_role_of_a_call_is_what_stands_before_its_method_and_line() -> None:
    assert [base_of(name) for name in ("actor.act@13#2", "episode_return", "episode_return@3")] == ["actor", *["episode_return"] * 2]
    # A call that is made at several lines has the line in its name, and the processes of its role all the same.
    given = FunctionSpec(workers=2, roles={"episode_return": 5})
    assert [given.num_for(name) for name in ("episode_return", "episode_return@3", "actor.act@13")] == [5, 5, 2]
