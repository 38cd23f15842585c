"""Schedules of the learning rate: by the optimiser's steps or by the flow's, to the end of the run, and as the plan tells them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from message_parts import lacks

from m2flow import AdamW, Dataset, Flow, Policy, Reward, flow, log, steps
from m2flow.errors import FlowError, OptionError
from m2flow.macro.graph import MacroGraph
from m2flow.macro.tracing import anticipate, explore, trace
from m2flow.micro.lowering.arithmetic import arithmetic
from m2flow.micro.protocol.update_semantics import optimizer
from m2flow.spec import ClusterSpec
from m2flow.testing.world import run_eager, run_planned

DIGITS = Path(__file__).resolve().parents[2] / "flows" / "models" / "digits"


def program(recipe: AdamW, *, num_steps: int = 4, minibatch_size: int | None = 2) -> Flow:
    """Four prompts a step, so two optimiser steps."""

    @flow
    def scheduled() -> None:
        policy, judge = Policy("fake"), Reward(lambda sample: float(sample.num_tokens), name="judge")
        prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
            policy.update(responses, judge.score(responses), optimizer=recipe, minibatch_size=minibatch_size)

    return scheduled


def rates_by_step(recipe: AdamW, **options: int) -> list[list[float]]:
    """The rate of each optimiser step of each update."""
    graph, _, _ = trace(program(recipe, **options), {}, steps=100)
    updates = [call for call in graph.calls if call.method == "update"]
    return [[optimizer(call).rate(2 * i + j) for j in range(2)] for i, call in enumerate(updates)]


def told(recipe: AdamW, *, num_steps: int = 4, traced: int = 100) -> str:
    graph: MacroGraph = trace(program(recipe, num_steps=num_steps), {}, steps=traced)[0]
    (line,) = (line for line in arithmetic(graph, num_steps=num_steps, token_budget=100) if line.name.startswith("learning rate"))
    return f"{line.value} | {line.formula}"


def test_a_schedule_without_total_steps_ends_with_the_run_and_counts_the_flows_steps():
    assert rates_by_step(AdamW(1.0, schedule="linear")) == [[1.0, 1.0], [0.75, 0.75], [0.5, 0.5], [0.25, 0.25]]


def test_a_schedule_can_be_told_in_steps_of_the_flow():
    recipe = AdamW(1.0, schedule="linear", warmup_steps=1, total_steps=3, steps_of="flow")
    assert rates_by_step(recipe) == [[1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]


def test_a_warm_up_can_be_told_in_steps_of_the_flow():
    assert rates_by_step(AdamW(1.0, warmup_steps=4, steps_of="flow")) == [[0.25, 0.25], [0.5, 0.5], [0.75, 0.75], [1.0, 1.0]]


def test_total_steps_alone_count_the_optimisers_steps():
    assert rates_by_step(AdamW(1.0, schedule="linear", total_steps=4)) == [[1.0, 0.75], [0.5, 0.25], [0.0, 0.0], [0.0, 0.0]]


def test_the_updates_of_a_loop_share_their_moments_whatever_step_they_are_in():
    graph, _, _ = trace(program(AdamW(1.0, schedule="cosine")), {}, steps=100)
    assert len({optimizer(call) for call in graph.calls if call.method == "update"}) == 1


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_the_rate_that_is_trained_with_is_that_of_the_flows_step(run):
    @flow
    def scheduled() -> None:
        policy, judge = Policy(DIGITS, init="random"), Reward(lambda sample: float(sample.num_tokens), name="judge")
        prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
        for _ in steps(4):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
            metrics = policy.update(responses, judge.score(responses), optimizer=AdamW(1.0, schedule="linear"), minibatch_size=2)
            log(lr=metrics["lr"])

    answer = run(scheduled, {}, ClusterSpec(device="cpu", cores=2))
    assert answer.error == ""
    assert [value for _, _, value in answer.logs] == [1.0, 0.75, 0.5, 0.25]


def test_the_plan_tells_the_course_of_the_rate_and_where_it_is_0_too_early():
    early = told(AdamW(1.0, schedule="linear", total_steps=4))
    assert not lacks(early, "at most 1 |", "linear to 0 at 4 optimiser steps", "; 1 -> 0.75 -> 0.25 -> 0 -> 0 at", "end of 8")
    assert not lacks(early, "the last 4 of them train nothing", "total_steps", "steps_of='flow'")
    warm = told(AdamW(1.0, schedule="linear", warmup_steps=2))
    assert not lacks(warm, "at most 1 |", "2 steps of the flow of warm-up", "linear to 0 at 4 steps of the flow")
    assert not lacks(warm, "; 0.5 -> 0.5 -> 1 -> 1 -> 0.5 at", "end of 4")
    assert "train nothing" not in warm
    constant = told(AdamW(1.0, warmup_steps=4), num_steps=100, traced=2)
    assert not lacks(constant, "at most 1 |", "4 optimiser steps of warm-up", "constant")
    assert "->" not in constant


def test_a_schedule_by_the_flows_steps_needs_a_loop_longer_than_its_warm_up():
    with pytest.raises(OptionError, match=r"warmup_steps is 4, .* has 4 steps"):
        rates_by_step(AdamW(schedule="cosine", warmup_steps=4))

    @flow
    def outside() -> None:
        policy = Policy("fake")
        policy.update(Dataset([{"prompt": "x", "target": "y"}]).all(), optimizer=AdamW(schedule="cosine"))

    with pytest.raises(FlowError, match="the update is in no loop"):
        trace(outside, {})


def test_an_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(OptionError, match="Did you mean 'cosine'") as caught:
        AdamW(schedule="cosin", total_steps=10)  # type: ignore[arg-type]
    assert "known are constant, linear, cosine" in str(caught.value)


def test_a_step_in_which_the_flow_waits_is_left_out_of_what_the_run_will_take():
    @flow
    def watched() -> None:
        policy, judge = Policy("fake"), Reward(lambda sample: float(sample.num_tokens), name="judge")
        prompts, last = Dataset([{"prompt": f"{i}="} for i in range(8)]), None
        for _ in steps(10):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
            if last is not None and float(last) > 3:
                break
            rewards = judge.score(responses)
            policy.update(responses, rewards, optimizer=AdamW(1.0), minibatch_size=2)
            last = rewards.mean()

    graph, _, num_steps = trace(watched, {}, steps=100)
    lines = {line.name: line for line in arithmetic(graph, num_steps=num_steps, token_budget=100)}
    assert {call.step for call in graph.calls} == {0, 1}
    assert lines["samples in the run"].value == "about 80"
    assert lines["optimiser steps in the run"].value == "about 20"
    assert "first 1 of 10 steps" in lines["optimiser steps in the run"].formula


def test_where_the_flow_needs_a_value_in_its_first_step_the_plan_tells_the_least_that_the_run_takes():
    def watched(at_once: bool) -> Flow:
        def body() -> None:
            policy, judge = Policy("fake"), Reward(lambda sample: float(sample.num_tokens), name="judge")
            prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
            first = policy.generate(prompts.take(2), n=1, max_new_tokens=4)
            if at_once and float(judge.score(first).mean()) > 3:
                return
            for _ in steps(10):
                responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
                if float(judge.score(responses).mean()) > 3:
                    break
                policy.update(responses, judge.score(responses))

        return Flow(body)

    for at_once, samples, iterator in ((False, 10, "outermost iterator"), (True, 2, "as far as the flow comes")):
        graph, _, num_steps = trace(watched(at_once), {}, steps=100)
        lines = {line.name: line for line in arithmetic(graph, num_steps=num_steps, token_budget=100)}
        assert graph.is_cut
        assert lines["samples in the run"].value == f"at least {samples}"
        assert lines["optimiser steps in the run"].value == "at least 0"
        assert "m2flow plan" in lines["samples in the run"].formula
        assert re.search(iterator, lines["steps"].formula)
        explored = explore(watched(at_once), {})
        whole = anticipate(watched(at_once), {}, explored, steps=100)
        assert not whole.is_cut
        told = {line.name: line for line in arithmetic(whole, num_steps=explored.num_steps, token_budget=100)}
        assert told["samples in the run"].value == "82"


def test_what_a_refill_draws_is_told_as_the_most_and_of_a_flow_that_waits_the_least():
    def refilling(waits: bool) -> Flow:
        def body() -> None:
            policy, judge = Policy("fake"), Reward(lambda sample: float(sample.num_tokens), name="judge")
            prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
            for _ in steps(10):
                responses = policy.generate(prompts, n=2, max_new_tokens=4, count=3, score=judge, max_draws=20)
                if waits and float(judge.score(responses).mean()) > 3:
                    break
                policy.update(responses, judge.score(responses))

        return Flow(body)

    for waits, run in ((False, "at most 400"), (True, "at least 6")):
        graph, _, num_steps = trace(refilling(waits), {}, steps=100)
        lines = {line.name: line for line in arithmetic(graph, num_steps=num_steps, token_budget=100)}
        (step,) = [line for line in lines.values() if line.name.startswith("samples of")]
        assert step.value == "at most 40"
        assert step.formula == "20 prompts x n=2, each up to 4 new tokens; it draws until 3 groups are kept"
        assert lines["samples in the run"].value == run
