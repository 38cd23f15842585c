"""A reference that is made of its policy again, or first made in the middle of a run, has the weights of that line, in every mode."""

from __future__ import annotations

import pytest

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, log, ppo_clip, steps
from m2flow.errors import TraceError
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(4)]
SHARED = ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake", token_budget=40))
SPLIT = SHARED.model_copy(update={"placement": "split", "functions": FunctionSpec(workers=2, chunk=1)})


def digits(sample: Sample) -> float:
    return sum(map(str.isdigit, str(sample.text))) / 8


@flow
def resetting(num_steps: int = 6, every: int = 2) -> None:
    """Every so many steps the reference is the policy of then; others, made beside it, keep what it was."""
    policy, reward, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference, kept, made = None, {}, [Reference(policy, name=f"at_{step}") for step in range(0, num_steps, every)]
    for step in steps(num_steps):
        if step % every == 0:
            reference = Reference(policy)
            kept[step] = Reference(policy, name=f"at_{step}")
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=12)
        same = kept[step // every * every].logprobs(responses)
        log(new=reference.logprobs(responses).mean(), same=same.mean(), own=policy.logprobs(responses).mean())
        for _ in range(2):
            policy.update(responses, reward.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference)
    del made


def test_a_reference_that_is_made_again_has_the_weights_of_that_line():
    eager = run_eager(resetting, {}, SHARED)
    assert eager.error == ""
    by_name = {name: [value for _, found, value in eager.logs if found == name] for name in ("new", "same", "own")}
    assert by_name["new"] == by_name["same"]
    assert [a == b for a, b in zip(by_name["new"], by_name["own"], strict=True)] == [True, False] * 3
    for spec in (SHARED, SPLIT):
        for order_seed in range(3):
            assert run_planned(resetting, {}, spec, order_seed=order_seed) == eager


def test_log_probabilities_by_the_older_weights_that_were_asked_for_before_are_those():
    @flow
    def late(num_steps: int = 4) -> None:
        policy, reward, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
        before = None
        for _ in steps(num_steps):
            reference = Reference(policy)
            rows = prompts.take(3)
            responses = policy.generate(rows, n=2, max_new_tokens=5)
            slow = policy.generate(rows, n=2, max_new_tokens=40, min_new_tokens=30)
            said = reference.logprobs(slow)  # It waits for long samples while the policy is trained, and the reference made anew.
            policy.update(responses, reward.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference)
            reference = Reference(policy)
            log(old=said.mean(), new=reference.logprobs(responses).mean(), before=0.0 if before is None else before.mean())
            before = said
            policy.update(responses, reward.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference)

    eager = run_eager(late, {}, SHARED)
    assert eager.error == ""
    for spec in (SHARED, SPLIT):
        for order_seed in range(4):
            assert run_planned(late, {}, spec, order_seed=order_seed) == eager


def test_the_object_whose_weights_were_replaced_is_refused_with_both_lines():
    @flow
    def two() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        first = Reference(policy)
        Reference(policy)
        first.logprobs(policy.generate(prompts.take(2), max_new_tokens=4))

    with pytest.raises(TraceError, match=r"the .reference. that is used here was made anew at tests/test_new_references.py:\d"):
        trace(two, {})


def test_references_of_one_name_and_two_policies_are_refused():
    @flow
    def two() -> None:
        Reference(Policy("fake", name="left"))
        Reference(Policy("fake", name="right"))

    with pytest.raises(TraceError, match="two roles named 'reference'"):
        trace(two, {})
