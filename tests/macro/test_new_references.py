"""A reference that is made of its policy again, or first made in the middle of a run, has the weights of that line, in every mode."""

from __future__ import annotations

import pytest

from m2flow import Dataset, Lora, Policy, Reference, Reward, Sample, flow, log, ppo_clip, steps
from m2flow.errors import TraceError
from m2flow.macro.tracing import makes_copies_inside, trace
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec
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

    with pytest.raises(TraceError, match=r"the .reference. .* made anew at tests/macro/test_new_references.py:\d"):
        trace(two, {})


def test_references_of_one_name_and_two_policies_are_refused():
    @flow
    def two() -> None:
        Reference(Policy("fake", name="left"))
        Reference(Policy("fake", name="right"))

    with pytest.raises(TraceError, match="two roles named 'reference'"):
        trace(two, {})


@flow
def first_made_late(num_steps: int = 4, at: int = 2) -> None:
    """Made after looks, in a step that no trace of the first steps comes to, and in a branch."""
    policy, reward, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference = None
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
        if step == at:
            reference = Reference(policy)
        more = {"loss": ppo_clip(kl_coef=0.1), "reference": reference} if reference is not None else {}
        metrics = policy.update(responses, reward.score(responses), **more)
        if reference is not None:
            log(kl=reference.logprobs(responses).mean())
        if float(metrics["num_tokens"]) < 0:
            Reference(policy, name="never")


def test_a_reference_that_is_first_made_in_a_later_step_after_looks_is_in_the_plan_and_works():
    eager = run_eager(first_made_late, {}, SHARED)
    assert eager.error == ""
    assert [step for step, name, _ in eager.logs if name == "kl"] == [2, 3]
    for spec in (SHARED, SPLIT):
        for order_seed in range(3):
            assert run_planned(first_made_late, {}, spec, order_seed=order_seed) == eager
    plan = Run(first_made_late, {"num_steps": 300, "at": 250}, SHARED, RunSettings()).prepare()
    assert ("reference", "train") in {(slot.role, slot.kind) for worker in plan.workers for slot in worker.engines}


def test_only_flows_that_make_copies_inside_a_loop_a_branch_or_a_helper_are_followed_for_them():
    def beginning() -> None:
        policy = Policy("fake")
        Reference(policy)
        for _ in steps(3):
            policy.generate(Dataset(ROWS).take(1), max_new_tokens=3)

    def none() -> None:
        Policy("fake")

    def helped() -> None:
        made(Policy("fake"))

    assert [makes_copies_inside(one) for one in (beginning, none, helped, first_made_late.function)] == [False, False, True, True]


def made(policy: Policy) -> Reference:
    return Reference(policy)


def test_a_reference_that_only_rows_decide_on_in_a_later_step_is_refused_at_its_line_with_what_to_do():
    @flow
    def decided() -> None:
        policy, prompts, reference = Policy("fake"), Dataset(ROWS), None
        for step in steps(3):
            responses = policy.generate(prompts.take(2), max_new_tokens=4)
            if step == 1 and list(responses):
                reference = Reference(policy)
        log(made=float(reference is not None))

    for run in (run_eager, run_planned):
        answer = run(decided, {}, SHARED)
        assert answer.error == "" or "no worker has a train engine for reference" in answer.error
        assert not answer.error or answer.where.endswith("reference = Reference(policy)")


@flow
def following(num_steps: int = 5, late: int = 2) -> None:
    """A moving average of the policy from the step `late` on."""
    policy, reward, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference, start = Reference(policy), Reference(policy, name="start")
    for step in steps(num_steps):
        if step >= late:
            reference.follow(0.25)
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=12)
        log(average=reference.logprobs(responses).mean(), start=start.logprobs(responses).mean(), own=policy.logprobs(responses).mean())
        policy.update(responses, reward.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference)


def test_a_reference_that_follows_its_policy_has_the_average_of_that_line():
    eager = run_eager(following, {}, SHARED)
    assert eager.error == ""
    by_name = {name: [value for _, found, value in eager.logs if found == name] for name in ("average", "start", "own")}
    assert [a == b for a, b in zip(by_name["average"], by_name["start"], strict=True)] == [True, True, False, False, False]
    assert [a == b for a, b in zip(by_name["average"], by_name["own"], strict=True)] == [True, False, False, False, False]
    for spec in (SHARED, SPLIT):
        for order_seed in range(3):
            assert run_planned(following, {}, spec, order_seed=order_seed) == eager


def test_a_reference_of_a_path_and_one_of_an_adapted_policy_have_nothing_to_follow():
    @flow
    def of_a_path() -> None:
        Reference("fake").follow(0.5)

    @flow
    def of_adapters() -> None:
        Reference(Policy("fake", lora=Lora(rank=2))).follow(0.5)

    with pytest.raises(TraceError, match="of a path"):
        trace(of_a_path, {})
    with pytest.raises(TraceError, match="policy trains adapters"):
        trace(of_adapters, {})
