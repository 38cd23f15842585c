"""A line whose result nothing uses runs, and is named once, at the end of its step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
from fake_clusters import FAKES

from m2flow import Dataset, Policy, Reward, Sample, flow, log, op, steps
from m2flow.errors import RewardError, UnusedResult
from m2flow.macro.tracing import trace
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}="} for i in range(6)]


def one(sample: Sample) -> float:
    return 1.0


def warned(body: Callable[..., object]) -> list[str]:
    """The calls that are named, in a planned run as in an eager one."""
    named = []
    for run in (run_eager, run_planned):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(flow(body), {}, FAKES).error == ""
        found = [warning for warning in caught if warning.category is UnusedResult]
        assert all(warning.filename == "tests/macro/test_unused_results.py" and warning.lineno for warning in found)
        named.append([str(warning.message).removeprefix("nothing uses what ").partition(" gives")[0] for warning in found])
    assert named[0] == named[1]
    return named[0]


def test_dropped_scores_responses_and_means_are_named_once_a_line():
    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(one), Dataset(ROWS)
        for _ in steps(3):
            rows = prompts.take(2)
            policy.generate(rows, max_new_tokens=3)
            judge.score(policy.generate(rows, max_new_tokens=3))
            judge.score(rows).mean()

    assert warned(body) == ["policy.generate", "one.score", "mean"]


def test_what_is_passed_on_looked_at_logged_or_returned_is_used():
    def body() -> object:
        policy, judge, prompts = Policy("fake"), Reward(one), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            policy.update(responses, judge.score(responses))
            float(judge.score(responses).mean())
            log(mean=judge.score(responses).mean())
        return judge.score(responses)

    assert warned(body) == []


def test_what_writes_a_resource_is_there_for_that():
    @op(writes=["notes"])
    def write(sample: Sample) -> None:
        pass

    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        prompts.take(1)
        write(policy.generate(prompts.take(2), max_new_tokens=3))

    assert warned(body) == []


def test_the_line_is_named_with_what_to_do():
    @flow
    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        policy.generate(prompts.take(2), max_new_tokens=3)

    with pytest.warns(UnusedResult, match=r"nothing uses what policy\.generate gives; .*log\(\) it"):
        run_eager(body, {}, FAKES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(body, {})  # A rehearsal names nothing: the run will.


def test_a_line_whose_result_is_used_in_some_step_or_passed_over_by_an_error_is_not_named():
    @op(granularity="batch")
    def count(samples: list[Sample]) -> int:
        return len(samples)

    def broken(sample: Sample) -> float:
        raise KeyError("no")

    def body() -> None:
        policy, judge, bad, prompts = Policy("fake"), Reward(one), Reward(broken), Dataset(ROWS)
        for step in steps(4):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            number = count(responses)
            number.lagged(1)  # Looks at the result of the step before, whose own handle is gone.
            if step < 2:
                rewards = judge.score(responses)
                with contextlib.suppress(RewardError):
                    float(bad.score(responses).mean())
                    log(mean=rewards.mean())
            used = judge.score(responses)
            if step == 3:
                break
            policy.update(responses, used)

    assert warned(body) == []
