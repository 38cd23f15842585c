"""A reward says what it is made of: its parts are recorded, the same in both modes, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_clusters import SPLIT

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, steps
from m2flow.errors import RewardError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.micro.protocol import call_semantics
from m2flow.samples import SampleId
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i} + {i}"} for i in range(8)]


@dataclass(frozen=True)
class Terms:
    reward: float
    right: bool


def of_some(sample: Sample) -> float | dict[str, float] | Terms:
    """A number, a mapping, or a dataclass: 0.5 and 3 tokens are worth the same either way."""
    value = sample.num_tokens / 8
    kinds = (value, {"reward": value, "tokens": sample.num_tokens}, Terms(value, right=True))
    return kinds[sample.num_tokens % 3]


def plain(sample: Sample) -> float:
    return sample.num_tokens / 8


class Judge(Role):
    @call(granularity="group", returns="reward")
    async def score(self, group: list[Sample]) -> list[dict[str, float]]:
        longest = max(sample.num_tokens for sample in group)
        return [{"reward": sample.num_tokens / longest, "longest": longest} for sample in group]


def _flow(function: Callable[[Sample], object]) -> Flow:
    @flow
    def judged() -> None:
        policy, reward, judge = Policy("fake"), Reward(function, name="reward"), Judge()
        prompts = Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(3), n=3, max_new_tokens=9)
            judge.score(responses)
            policy.update(responses, reward.score(responses))
        kept = policy.generate(prompts, n=2, count=2, score=reward, max_new_tokens=9)
        policy.update(kept, reward.score(kept))

    return judged


@pytest.mark.parametrize("order_seed", range(2))
def test_parts_are_the_same_in_both_modes_and_in_any_order(order_seed: int) -> None:
    eager = run_eager(_flow(of_some), {}, SPLIT)
    assert eager.error == ""
    assert run_planned(_flow(of_some), {}, SPLIT, order_seed=order_seed) == eager
    told = {tuple(of) for of in eager.parts.values()}
    assert told == {("tokens",), ("right",), ("longest",)}
    assert 0 < len(eager.parts) < len(eager.rewards)


def test_what_is_trained_on_does_not_know_of_parts() -> None:
    said, silent = (run_planned(_flow(function), {}, SPLIT) for function in (of_some, plain))
    assert said.parts != silent.parts
    assert (said.rewards, said.samples, said.consumed, said.weights) == (silent.rewards, silent.samples, silent.consumed, silent.weights)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"right": 1.0}, "returned dict: {'right': 1.0} on sample"),
        ({"reward": float("nan"), "right": 1.0}, "returned nan on sample"),
        ({"reward": 1.0, "why": "well said"}, "returned 'well said' for its part 'why' on sample"),
        ({"reward": 1.0, 3: 1.0}, "returned a part named 3 on sample"),
        ({"reward": 1.0, "a\nb": 1.0}, r"returned a part named 'a\nb' on sample"),
        ([1.0], "returned list: [1.0] on sample"),
    ],
)
def test_what_is_no_reward_with_parts_is_named_with_its_sample(given: Any, message: str) -> None:
    def wrong(sample: Sample) -> object:
        return given

    for answer in (run_eager(_flow(wrong), {}, SPLIT), run_planned(_flow(wrong), {}, SPLIT)):
        assert message in answer.error


@pytest.mark.parametrize(
    ("given", "now"),
    [
        (None, "see that the function returns one at every end"),
        (np.array([0.5]), "of an array or a tensor with one value, return float(...)"),
        (np.float32("nan"), "Return 0.0 for what can't be judged"),
    ],
)
def test_what_is_no_reward_says_what_to_return_instead(given: object, now: str) -> None:
    scored = next(call for call in trace(_flow(lambda sample: 1.0), {})[0].calls if call.name.endswith("score"))
    with pytest.raises(RewardError) as error:
        call_semantics._checked_value(scored, SampleId(0, 0, 0), given)
    assert now in error.value.now


def test_a_plan_gives_the_name_of_a_variable_to_the_sum_and_not_to_what_is_logged_of_its_parts() -> None:
    @flow
    def summed() -> None:
        policy, reward = Policy("fake"), Reward.sum({plain: 1.0, of_some: 0.5})
        for _ in steps(1):
            responses = policy.generate(Dataset(ROWS).take(3), n=3, max_new_tokens=9)
            rewards = reward.score(responses)
            policy.update(responses, rewards)

    graph, *_ = trace(summed, {})
    names = graph.names()
    assert [call.name for call in graph.calls if names[call.ordinal] == "rewards"] == ["reward.sum"]
