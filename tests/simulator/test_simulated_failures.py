"""Workers that are lost in the middle of a step: everything is done all the same, or the error says why it can't be."""

from __future__ import annotations

import pytest
from cost_tables import NOTHING, PlainCosts
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulated import Given, cluster, plain, ran, stale, zero

from m2flow import Dataset, Policy, Reward, Sample, flow, op, steps
from m2flow.errors import OptionError, StateLost, WorkerError
from m2flow.micro.protocol.cost_terms import DecodeCost, FunctionCost, PassCost, TrainCost
from m2flow.micro.scheduler import worker_failure
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.simulator.machines import Machine, Place
from m2flow.simulator.scenario import failure_of
from m2flow.simulator.simulation import Failure
from m2flow.spec import ClusterSpec, PoolSpec

some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SLOW = {name: FunctionCost((3.0, 5.0, 30.0)) for name in ("zero.score", "ranks", "twice")}
COSTS = PlainCosts(DecodeCost(1.0, 0.25, 0.0, 1000), TrainCost(NOTHING, PassCost(0.0, 0.01, 0.0), 1.0), SLOW, hopping_s=0.25)


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@op(granularity="sample")
def twice(sample: Sample) -> float:
    return 2.0


@flow
def chained(num_steps: int = 2, batch: int = 4, n: int = 2) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=5)
        ranks(responses)
        more = twice(responses)
        policy.update(responses, advantages=reward.score(responses) + more)


@some
@given(
    st.integers(0, 1000),
    st.lists(
        st.tuples(
            st.floats(0, 400), st.sampled_from(["rollout-0", "rollout-1", "functions-0", "functions-1"]), st.none() | st.floats(0, 100)
        ),
        max_size=2,
    ),
    st.sampled_from([1, 3, 64]),
)
def test_all_is_trained_on_whoever_is_lost_and_whenever(seed, lost, chunk):
    failures = [Failure(at_s, (name,), None if away_s is None else at_s + away_s) for at_s, name, away_s in lost]
    spec = cluster(instances=3, functions=3, chunk=chunk, max_running=4)
    lengths = parse_lengths("lognormal:median=40,sigma=0.8,prompt=4")
    result = ran(chained, COSTS, lengths, spec, num_steps=2, seed=seed, failures=failures)
    assert [sum(step.staleness.values()) for step in result.report.steps] == [8, 8]
    whole = ran(chained, COSTS, lengths, spec, num_steps=2, seed=seed)
    assert [s.trained_tokens for s in result.report.steps] == [s.trained_tokens for s in whole.report.steps]
    for period in result.history.periods:
        assert sum(period.seconds.values()) == pytest.approx(period.makespan_s * result.history.num_devices)


@some
@given(st.floats(0, 300), st.integers(0, 2))
def test_with_staleness_too(at_s, lag):
    options = {"batch": 4, "n": 2, "lag": lag, "num_steps": 3}
    lengths = parse_lengths("lognormal:median=40,sigma=0.8,prompt=4")
    failures = [Failure(at_s, ("rollout-1",))]
    result = ran(stale, COSTS, lengths, cluster(instances=2, max_running=4), options=options, num_steps=3, failures=failures)
    assert [sum(step.staleness.values()) for step in result.report.steps] == [8, 8, 8]


def test_what_the_lost_worker_had_begun_is_generated_again_and_the_first_part_is_wasted():
    lengths = Given([[100, 100]])
    result = ran(plain, COSTS, lengths, cluster(instances=2), options={"batch": 2, "n": 2}, failures=[Failure(50.0, ("rollout-1",))])
    (step,) = result.report.steps
    assert step.trained_tokens == 400
    assert step.wasted_tokens == pytest.approx(2 * (50.0 - 0.25) / 1.5, abs=2)
    assert step.idle_s["failed"] == pytest.approx(step.makespan_s - 50.0)


def test_a_long_sample_goes_on_from_where_it_was_written_down():
    lengths = Given([[2000, 2000]])
    result = ran(plain, COSTS, lengths, cluster(instances=2), options={"batch": 2, "n": 2}, failures=[Failure(1700.0, ("rollout-1",))])
    (step,) = result.report.steps
    assert step.trained_tokens == 8000
    begun = (1700.0 - 0.25) / 1.5
    assert begun > 2 * 512
    assert step.wasted_tokens == pytest.approx(2 * (begun - 2 * 512), abs=2)


def test_a_lost_trainer_ends_the_run_and_the_error_says_what_is_gone():
    with pytest.raises(WorkerError, match=r"train-0 is lost.* weights that policy trained"):
        ran(plain, COSTS, Given([[10]]), cluster(), failures=[Failure(3.0, ("train-0",))])


@some
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0, 300), st.sampled_from(["rollout-0", "functions-0"]), st.floats(0, 100)), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_what_only_a_lost_worker_can_do_waits_until_it_is_back(seed, lost, lag):
    failures = [Failure(at_s, (name,), at_s + away_s) for at_s, name, away_s in lost]
    lengths = parse_lengths("lognormal:median=40,sigma=0.8,prompt=4")
    options = {"batch": 4, "n": 2, "lag": lag, "num_steps": 3}
    cluster_of_one = cluster(max_running=4)
    try:
        result = ran(stale, COSTS, lengths, cluster_of_one, options=options, num_steps=3, seed=seed, failures=failures)
    except WorkerError as error:
        assume(not isinstance(error, StateLost) and "3 workers in turn" not in error.what)
        raise
    assert [sum(step.staleness.values()) for step in result.report.steps] == [8, 8, 8]


def test_a_worker_that_is_back_works_on_and_its_devices_count_again():
    lengths = Given([[100, 100]])
    options = {"batch": 2, "n": 2}
    failures = [Failure(50.0, ("rollout-1",), 60.0)]
    result = ran(plain, COSTS, lengths, cluster(instances=2, max_running=2), options=options, failures=failures)
    (step,) = result.report.steps
    assert step.idle_s["failed"] == pytest.approx(10.0)
    assert {run.id for run in result.history.sample_runs["rollout-1"] if not run.is_wasted}


def test_the_last_instance_can_not_be_replaced():
    with pytest.raises(WorkerError, match=r"no other can run policy\.generate"):
        ran(plain, COSTS, Given([[10]]), cluster(), failures=[Failure(3.0, ("rollout-0",))])


MACHINES = {
    "rollout-0": Machine("rollout-0", Place("main", 0, 8)),
    "rollout-1": Machine("rollout-1", Place("main", 8, 16)),
    "train-0": Machine("train-0", Place("main", 8, 24)),
    "functions-0": Machine("functions-0", None),
}
THREE = ClusterSpec(pools={"main": PoolSpec(device="h100", nodes=3)})


def test_a_node_takes_all_workers_with_it_that_have_a_device_there():
    assert failure_of("1@20", MACHINES, THREE) == Failure(20.0, ("rollout-1", "train-0"))
    assert failure_of("main:2@20", MACHINES, THREE) == Failure(20.0, ("train-0",))
    assert failure_of("functions-0@1.5", MACHINES, THREE) == Failure(1.5, ("functions-0",))
    assert failure_of("functions-0@1.5-4", MACHINES, THREE) == Failure(1.5, ("functions-0",), 4.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [("3@20", "no node or worker"), ("1", "when"), ("1@soon", "when"), ("1@9-3", "when"), ("1@9-", "when"), ("other:0@1", "no node")],
)
def test_what_can_not_fail_is_refused(text, said):
    with pytest.raises(OptionError, match=said):
        failure_of(text, MACHINES, THREE)


# Seeded bugs: each must be seen.


def test_what_is_not_given_back_is_missed(monkeypatch):
    monkeypatch.setattr(worker_failure, "_requeue_task", lambda *args: None)

    def run_some() -> None:
        for at_s in range(1, 120, 3):
            for lost in ("rollout-1", "functions-1"):
                failures = [Failure(float(at_s), (lost,))]
                ran(chained, COSTS, Given([[40, 8]]), cluster(instances=2, functions=3, chunk=1), failures=failures)

    with pytest.raises(Exception, match=r"nothing moves|needs row|does not have|was on a worker that is lost"):
        run_some()
