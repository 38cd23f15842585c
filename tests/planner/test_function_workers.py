"""The number of processes for functions, simulators among them, as the search of `placement: auto` chooses it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow import flow, log, simulate, steps
from m2flow.environments.actor_critic import ActorCritic, Simulator, episode_return, lanes
from m2flow.macro.flow import Flow, load_flow
from m2flow.runs.planning import Planned, known_values, make_plan
from m2flow.spec import ClusterSpec, FunctionSpec

LEARNS_S = 0.1


@flow
def playing(num_steps: int = 4, num_lanes: int = 8) -> None:
    simulator, learner = Simulator("CartPole-v1"), ActorCritic("CartPole-v1")
    learned, played = learner.start(), simulator.start(lanes(num_lanes))
    for _ in steps(num_steps):
        played = simulator.play(played, learned, horizon=64)
        learned = learner.learn(learned, played)
        log(episode_return=episode_return(played))


def cluster(play_s: float, *, workers: object = "auto", cores: int = 8, learn_s: float = LEARNS_S) -> ClusterSpec:
    latency_s = {"simulator.play": play_s, "actorcritic.learn": learn_s, "episode_return": 0.0}
    functions = FunctionSpec.model_validate({"workers": workers, "latency_s": latency_s})
    return ClusterSpec(placement="auto", device="cpu", cores=cores, functions=functions)


def planned(what: Flow, spec: ClusterSpec, **options: int) -> Planned:
    return make_plan(what, what.name, options, spec, steps=1, seed=0, known=known_values((), None), tries=False)


def chosen(spec: ClusterSpec, **options: int) -> tuple[int, float]:
    """The number of processes of the plan, and the predicted step."""
    found = planned(playing, spec, **options).plan
    assert found.choice is not None
    num = sum(worker.name.startswith("functions") for worker in found.workers)
    assert num == found.choice.num_function_workers
    return num, found.choice.predicted_step_s


def test_a_slow_simulator_gets_more_workers_and_the_step_becomes_shorter() -> None:
    num, step_s = chosen(cluster(1.0))
    assert num == 8
    assert step_s == pytest.approx(1.0 + LEARNS_S)
    found = planned(playing, cluster(1.0))
    assert "functions: 8 processes, as many as are fastest" in str(found)
    assert "instead: 1 process for functions, 8.1 s (+636%): they are too few" in str(found)


def test_a_simulator_that_takes_next_to_no_time_gets_one_worker() -> None:
    assert chosen(cluster(1e-6))[0] == 1


def test_workers_that_would_have_no_lane_more_than_others_are_left_out() -> None:
    """Of 8 lanes, the busiest of 4 workers has 2, and so has that of 5, 6 or 7."""
    assert chosen(cluster(1.0, cores=7))[0] == 4
    assert chosen(cluster(1.0), num_lanes=3)[0] == 3


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.integers(1, 9), st.integers(1, 6))
def test_the_predicted_step_is_that_of_the_scheduler_on_a_virtual_clock(play_s: float, learn_s: float, num_lanes: int, num: int) -> None:
    """With rows that take long enough to be shared out; messages take next to nothing."""
    simulated = simulate(playing, cluster=cluster(play_s, learn_s=learn_s, workers=num), num_lanes=num_lanes).makespan_s
    best, predicted = chosen(cluster(play_s, learn_s=learn_s, cores=num), num_lanes=num_lanes)
    assert best <= num
    assert predicted == pytest.approx(simulated, rel=0.02, abs=0.01)


def test_rewards_of_a_flow_with_models_get_as_many_processes_as_help() -> None:
    grpo = load_flow("flows/grpo.py")

    def processes(latency_s: float) -> int:
        functions = FunctionSpec.model_validate({"workers": "auto", "latency_s": {"is_sorted.score": latency_s}})
        spec = ClusterSpec(placement="auto", device="cpu", cores=4, functions=functions)
        found = planned(grpo, spec).plan
        assert found.choice is not None
        return sum(worker.name.startswith("functions") for worker in found.workers)

    assert processes(1e-6) == 1
    assert processes(0.5) == 4


def test_a_number_that_nothing_searches_for_is_refused() -> None:
    with pytest.raises(ValueError, match="say `placement: auto` too"):
        ClusterSpec(functions=FunctionSpec(workers="auto"))
