"""`late="defer"`: late prompts wait for a long round of their own, and eager, given the run's record, does the same."""

from __future__ import annotations

import pytest
from cost_tables import NOTHING, PlainCosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Given, Ran, ran
from simulated import cluster as simulated_cluster

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.errors import OptionError
from m2flow.macro.loss_declarations import asynchrony
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.cost_terms import DecodeCost, PassCost, TrainCost
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 1000}=", "at": i} for i in range(200)]
COSTS = PlainCosts(DecodeCost(1.0, 0.25, 0.0, 1000), TrainCost(NOTHING, PassCost(0.0, 0.01, 0.0), 1.0))


def share(sample: Sample) -> float:
    return sample.num_tokens / 16


def defers(lag: int = 0, num_steps: int = 8, count: int = 4, over: float = 1.5, kv: str = "recompute") -> None:
    policy, reward, prompts = Policy("fake"), Reward(share), Dataset(ROWS, shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=2, max_new_tokens=12, count=count, oversample=over, late="defer", kv=kv)
        rewards = reward.score(responses)
        policy.update(responses, rewards, minibatch_size=2)
        log(reward=rewards.mean())


DEFERS = flow(staleness="lag")(defers)

SPEC = ClusterSpec(
    device="cpu",
    cores=2,
    rollout=RolloutSpec(engine="fake", workers=2, max_running=3),
    train=TrainSpec(engine="fake", token_budget=60),
    functions=FunctionSpec(workers=1, chunk=3),
)
sizes = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 2),
        "num_steps": st.integers(1, 7),
        "count": st.integers(1, 4),
        "over": st.sampled_from([2.0, 2.5, 3.0]),
        "kv": st.just("recompute"),
    }
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30))
def test_every_turn_gives_as_many_groups_and_eager_given_the_record_is_the_same(spec, options, order_seed):
    planned = run_planned(DEFERS, options, spec, order_seed=order_seed)
    assert planned.error == ""
    assert len(planned.consumed) == len(set(planned.consumed)) == options["num_steps"] * options["count"] * 2
    eager = run_eager(DEFERS, options, spec, decisions=planned.decisions)
    assert eager.samples == {packed: planned.samples[packed] for packed in eager.samples}
    assert (repr(eager.logs), eager.weights, eager.consumed) == (repr(planned.logs), planned.weights, planned.consumed)


def test_late_prompts_are_answered_in_a_long_round_whoever_they_are_and_none_is_left_out():
    """4 of 6 a turn: after two short rounds 4 prompts wait, so every third turn is a long one."""
    graph, _, _ = trace(DEFERS, {}, steps=6)
    rounds = [call for call in graph.calls if call.method == "generate"]
    assert [call.shown.get("round", "short") for call in rounds] == ["short", "short", "long"] * 2
    assert [call.most_rows for call in rounds] == [8] * 6
    ats = [set(map(int, call.options["rows"]["at"])) for call in graph.calls if call.method == "take"]
    assert ats == [set(range(6 * i, 6 * i + 6)) for i in range(4)]
    for order_seed in range(4):
        answer = run_planned(DEFERS, {"num_steps": 6}, SPEC, order_seed=order_seed)
        assert answer.error == ""
        assert {decision.call for decision in answer.decisions.values()} == {rounds[at].ordinal for at in (0, 1, 3, 4)}
        trained = {SampleId.unpack(row[2]).call for row in answer.consumed}
        assert trained == {call.ordinal for call in rounds}


def test_what_is_over_after_a_long_round_waits_for_the_next():
    """3 more a turn and 2 needed: 3 wait, 2 of them are answered, 1 and then 4 wait."""
    graph, _, _ = trace(DEFERS, {"count": 2, "over": 2.5}, steps=6)
    rounds = [call.shown.get("round", "short") for call in graph.calls if call.method == "generate"]
    assert rounds == ["short", "long", "short", "long", "long", "short"]
    answer = run_planned(DEFERS, {"count": 2, "over": 2.5, "num_steps": 6}, SPEC)
    eager = run_eager(DEFERS, {"count": 2, "over": 2.5, "num_steps": 6}, SPEC, decisions=answer.decisions)
    assert (answer.error, eager.consumed, eager.weights) == ("", answer.consumed, answer.weights)


def test_the_plan_says_that_prompts_are_deferred():
    graph, _, _ = trace(DEFERS, {}, steps=1)
    assert "late='defer', count=4" in str(graph)
    (note,) = asynchrony(graph, {})
    assert "and defers the prompts of those that are late" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 4}, "oversample=1.0 with late='defer'"),
        ({"oversample": 1.5}, "late='defer' got count=None"),
        ({"count": 3, "oversample": 1.25}, "draws no prompt more than it needs"),
        ({"count": 4, "oversample": 1.5, "timeout_s": 3.0}, "who is late by the clock can only be dropped"),
        ({"count": 4, "oversample": 1.5, "score": Reward}, "score=, keep= and max_draws= are for late='wait'"),
    ],
)
def test_what_can_not_be_deferred_is_refused(options, message):
    @flow
    def wrong() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        options.update({"score": Reward(share)} if "score" in options else {})
        policy.generate(prompts, n=2, max_new_tokens=4, late="defer", **options)

    with pytest.raises(OptionError, match=message):
        trace(wrong, {}, steps=1)


def test_rows_that_were_drawn_already_can_not_be_deferred():
    @flow
    def wrong() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        policy.generate(prompts.take(4), n=2, max_new_tokens=4, oversample=2, late="defer")

    with pytest.raises(OptionError, match="a long round draws none"):
        trace(wrong, {}, steps=1)


LENGTHS = Given([[10, 10], [10, 10], [10, 10], [500, 20], [10, 10], [400, 10]])
"""Of six prompts of a short round two are long."""


def simulated(count: int = 4, over: float = 1.5, num_steps: int = 3) -> Ran:
    options = {"count": count, "over": over, "num_steps": num_steps}
    return ran(DEFERS, COSTS, LENGTHS, simulated_cluster(), num_steps=num_steps, options=options)


def test_in_the_simulator_short_rounds_are_short_and_long_prompts_meet_in_the_long_one():
    steps_of = simulated().report.steps
    assert [step.trained_tokens for step in steps_of] == [80, 80, 2 * (500 + 20 + 400 + 10)]
    assert steps_of[0].makespan_s < 100 < steps_of[2].makespan_s
    # Twelve samples run for ten turns; then two that were done and two that were not are given up.
    assert [step.wasted_tokens for step in steps_of] == [40, 40, 0]


def test_the_simulator_answers_no_more_prompts_in_a_long_round_than_the_run_does():
    assert [sum(step.staleness.values()) for step in simulated(2, 2.5, 6).report.steps] == [2 * 2] * 6
