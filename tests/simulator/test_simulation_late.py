"""Samples that are late, given up, carried or not kept: nothing is lost, and what was for nothing is counted."""

from __future__ import annotations

import pytest
from cost_tables import NOTHING, PlainCosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_parts import lacks
from simulated import Given, Ran, cluster, leased, ran, zero

from m2flow import Dataset, Policy, Reward, flow, steps
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import DecodeCost, PassCost, TrainCost
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.viewer.suggestions import price_of

COSTS = PlainCosts(DecodeCost(1.0, 0.25, 0.0, 1000), TrainCost(NOTHING, PassCost(0.0, 0.01, 0.0), 1.0))
some = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@flow
def dropping(num_steps: int = 2, batch: int = 5) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=5, oversample=1.25, late="drop")
        policy.update(responses, reward.score(responses))


@flow(staleness=2)
def takes_over(num_steps: int = 4, batch: int = 5) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=5, oversample=1.25, late="carry")
        policy.update(responses, reward.score(responses))


@flow
def refilling(num_steps: int = 2, count: int = 4) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * 200)
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=2, max_new_tokens=5, count=count, score=reward)
        policy.update(responses, reward.score(responses))


def generated(result: Ran) -> float:
    return sum(run.tokens_until(run.ended) for runs in result.history.sample_runs.values() for run in runs)


def test_the_longest_group_is_dropped_and_its_tokens_are_wasted():
    lengths = Given([[10, 10], [10, 10], [500, 20], [10, 10], [10, 10]])
    result = ran(dropping, COSTS, lengths, cluster(), num_steps=2)
    first = result.report.steps[0]
    assert first.trained_tokens == 80
    # All ten run for ten turns, and then the short member of the dropped group and the long one are given up.
    assert first.wasted_tokens == 20
    assert first.makespan_s == pytest.approx(10 * (1.0 + 10 * 0.25) + 0.8 + 1.0)


@flow
def whole(num_steps: int = 2, batch: int = 5) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * batch)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=5)
        policy.update(responses, reward.score(responses))


def test_ending_steps_early_is_offered_with_what_is_thrown_away_and_what_is_trained_instead():
    lengths = Given([[10, 10], [10, 10], [500, 20], [10, 10], [10, 10]])
    early, as_it_was = (ran(of, COSTS, lengths, cluster(), num_steps=2).report.steps for of in (dropping, whole))
    said = price_of(early, as_it_was)
    assert not lacks(said, "20% of the generated tokens", "thrown away", "83% shorter")
    nothing = price_of(as_it_was, as_it_was)
    assert not lacks(nothing, "nothing in the simulated steps")
    assert "%" not in nothing
    carried = ran(takes_over, COSTS, lengths, cluster(max_running=12), num_steps=4, options={"num_steps": 4}).report.steps
    assert "of the trained samples are of older weights" in price_of(carried, as_it_was)


def test_what_is_carried_goes_on_from_its_tokens_and_is_generated_once():
    lengths = Given([[10, 10], [10, 10], [500, 20], [10, 10], [10, 10]])
    result = ran(takes_over, COSTS, lengths, cluster(max_running=12), num_steps=4, options={"num_steps": 4})
    assert any(isinstance(done.task, m.Accumulate) for done in result.history.done_tasks)
    again = [run for runs in result.history.sample_runs.values() for run in runs if run.before]
    assert again, "nobody went on from earlier tokens"
    trained = sum(step.trained_tokens for step in result.report.steps)
    wasted = sum(step.wasted_tokens for step in result.report.steps)
    assert generated(result) == pytest.approx(trained + wasted, abs=len(result.history.versions))
    assert all(int(behind) <= 2 for step in result.report.steps for behind in step.staleness)


@some
@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans())
def test_carried_runs_end_and_keep_to_the_bounds_on_every_draw(seed, instances, is_leased):
    lengths = parse_lengths("lognormal:median=60,sigma=1.0,prompt=8")
    result = ran(
        takes_over,
        COSTS,
        lengths,
        cluster(instances=instances, max_running=8),
        num_steps=4,
        options={"num_steps": 4, "batch": 6},
        seed=seed,
        placed=leased if is_leased else lambda plan: plan,
    )
    given = [sum(step.staleness.values()) for step in result.report.steps]
    assert all(count >= 10 and count % 2 == 0 for count in given)
    assert 46 <= sum(given) <= 48, "all but what is late at the end"
    assert all(int(behind) <= 2 for step in result.report.steps for behind in step.staleness)


def test_a_refill_draws_more_where_less_is_kept():
    lengths = parse_lengths("lognormal:median=30,sigma=0.5")
    all_kept = ran(refilling, COSTS, lengths, cluster(), num_steps=2, kept={"keep": 1.0})
    half_kept = ran(refilling, COSTS, lengths, cluster(), num_steps=2, kept={"keep": 0.5})
    by_default = ran(refilling, COSTS, lengths, cluster(), num_steps=2)
    assert by_default.makespans == half_kept.makespans  # What the planner expects, too.
    for result in (all_kept, half_kept):
        assert [sum(step.staleness.values()) for step in result.report.steps] == [8, 8]
    assert sum(step.wasted_tokens for step in all_kept.report.steps) == 0
    assert generated(half_kept) > generated(all_kept)
