"""`try` in a flow means what it means in Python: an error that was raised to the program, and caught, is handled; in both modes."""

from __future__ import annotations

import contextlib
import threading

import pytest

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, log, op, steps
from m2flow.errors import FlowError, RewardError, TraceError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.fakes import FAKE_CONTEXT
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(12)]
SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=2, chunk=1),
)


def bad(sample: Sample) -> float:
    raise KeyError("bad")


def good(sample: Sample) -> float:
    return float(sample.num_tokens % 3)


def same_in_both_modes(body: object, **options: object) -> Answer:
    eager = run_eager(flow(body), {}, SPEC, **options)  # type: ignore[arg-type]
    for order_seed in range(6):
        planned = run_planned(flow(body), {}, SPEC, order_seed=order_seed, **options)  # type: ignore[arg-type]
        assert (planned.error, planned.where) == (eager.error, eager.where)
        assert eager.error or planned == eager
    return eager


def test_an_error_that_the_flow_catches_is_handled_and_the_run_goes_on():
    seen = []

    def body() -> None:
        policy, broken, judge, prompts = Policy("fake"), Reward(bad), Reward(good), Dataset(ROWS)
        for step in steps(3):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            rewards = broken.score(responses)
            try:
                float(rewards.mean())
            except RewardError as error:
                seen.append((step, error.what))
            log(tokens=policy.update(responses, judge.score(responses))["num_tokens"])

    answer = same_in_both_modes(body)
    assert answer.error == ""
    assert [step for step, name, _ in answer.logs] == [0, 1, 2]
    assert [step for step, _ in seen] == [0, 1, 2] * 7
    assert all("raised KeyError on sample" in what for _, what in seen)


def test_what_was_made_before_and_failed_with_it_is_handled_too_and_fails_again_where_it_is_looked_at():
    def body() -> None:
        policy, broken, prompts = Policy("fake"), Reward(bad), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
        rewards = broken.score(responses)
        mean, least = rewards.mean(), rewards.min()
        for number in (mean, least, mean):
            with contextlib.suppress(RewardError):
                float(number)
        log(mean=mean)  # It has none: passed over, as a log of what failed is.

    answer = same_in_both_modes(body)
    assert (answer.error, answer.logs) == ("", [])


def test_a_call_that_needs_what_failed_and_is_made_afterwards_fails_anew():
    def body() -> None:
        policy, broken, prompts = Policy("fake"), Reward(bad), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            rewards = broken.score(responses)
            with contextlib.suppress(RewardError):
                len(rewards)
            rewards.mean()

    assert same_in_both_modes(body).error.startswith("RewardError")


def test_an_update_that_failed_can_not_be_handled_and_the_error_says_so():
    def body() -> None:
        policy, broken, prompts = Policy("fake"), Reward(bad), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            rewards = broken.score(responses)
            metrics = policy.update(responses, rewards)
            with contextlib.suppress(RewardError):
                metrics.items()

    assert same_in_both_modes(body).error.startswith("RewardError")
    said = []

    def around(backend):
        said.append(backend)
        return backend

    run_eager(flow(body), {}, SPEC, around=around)
    with pytest.raises(RewardError, match=r"caught this error: policy.update \(tests/macro/test_caught_errors.py:\d+\)"):
        said[0].finish()


def test_a_state_whose_call_failed_can_not_be_handled():
    class Keeper(Role):
        def __init__(self) -> None:
            self.num = 0

        @call(writes=["keeper.num"])
        def note(self, sample: Sample) -> float:
            raise KeyError("no")

    def body() -> None:
        policy, keeper, prompts = Policy("fake"), Keeper(), Dataset(ROWS)
        for _ in steps(2):
            noted = keeper.note(policy.generate(prompts.take(2), max_new_tokens=6))
            with contextlib.suppress(FlowError):
                len(noted)

    assert "KeyError" in same_in_both_modes(body).error


def test_an_error_that_nobody_looked_at_ends_the_run_also_with_a_try_around_the_loop_or_a_look_in_the_next_step():
    def around_the_loop() -> None:
        policy, broken, prompts = Policy("fake"), Reward(bad), Dataset(ROWS)
        try:
            for _ in steps(3):
                responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
                log(mean=broken.score(responses).mean())
        except RewardError:
            policy.generate(prompts.take(2), max_new_tokens=3)

    def in_the_next_step() -> None:
        policy, broken, prompts, before = Policy("fake"), Reward(bad), Dataset(ROWS), None
        for _ in steps(3):
            with contextlib.suppress(RewardError):
                before = before is not None and float(before)
            before = broken.score(policy.generate(prompts.take(2), n=2, max_new_tokens=6)).mean()

    for body in (around_the_loop, in_the_next_step):
        assert same_in_both_modes(body).error.startswith("RewardError")


def test_a_group_op_a_refill_and_a_log_probability_that_fail_can_be_caught():
    @op(granularity="group")
    def broken_op(samples: list[Sample]) -> list[int]:
        raise ValueError("no")

    def body() -> None:
        policy, judge, prompts = Policy("fake"), Reward(good), Dataset(ROWS)
        long = Dataset([{"prompt": "1" * FAKE_CONTEXT}], name="long")
        constant = Reward(lambda sample: 1.0, name="constant")
        for _ in steps(3):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            caught = 0
            try:
                len(broken_op(responses))
            except FlowError:
                caught += 1
            try:
                len(policy.generate(prompts, n=2, max_new_tokens=4, count=2, score=constant, max_draws=3))
            except FlowError:
                caught += 1
            try:
                len(policy.logprobs(policy.generate(long.take(1), max_new_tokens=4)))
            except FlowError:
                caught += 1
            log(caught=float(caught), tokens=policy.update(responses, judge.score(responses))["num_tokens"])

    answer = same_in_both_modes(body)
    assert answer.error == ""
    assert [value for _, name, value in answer.logs if name == "caught"] == [3.0] * 3


def test_the_logs_of_a_step_whose_error_was_caught_and_of_later_steps_are_written():
    def body() -> None:
        policy, broken, prompts = Policy("fake"), Reward(bad), Dataset(ROWS)
        for step in steps(3):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            scores = broken.score(responses)
            log(lengths=responses.length.mean(), of_bad=scores.mean())
            with contextlib.suppress(RewardError):
                len(scores)
            log(after=float(step))

    answer = same_in_both_modes(body)
    assert answer.error == ""
    assert [(step, name) for step, name, _ in answer.logs] == [(step, name) for step in range(3) for name in ("lengths", "after")]


def test_a_call_or_a_look_from_another_thread_is_refused_with_the_reason():
    @flow
    def threads(makes: bool) -> None:
        policy, judge, prompts = Policy("fake"), Reward(good), Dataset(ROWS)
        raised: list[BaseException] = []
        rewards = judge.score(policy.generate(prompts.take(2), max_new_tokens=3)).mean()

        def other() -> None:
            try:
                prompts.take(2) if makes else float(rewards)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=other, name="helper")
        thread.start()
        thread.join()
        raise raised[0]

    for makes, what in ((True, "the dataset 'dataset'"), (False, "a handle")):
        with pytest.raises(TraceError, match=f"{what} was used in the thread 'helper', and the flow {threads.name} runs in another"):
            trace(threads, {"makes": makes})


def test_an_error_that_the_flow_lets_pass_says_nothing_of_errors_that_a_flow_caught(monkeypatch):
    """Python runs ahead into the second step, where the dataset's cursor waits for the failed refill of the first."""

    def body() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(good), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts, n=2, max_new_tokens=6, count=2, score=verifier, keep=lambda group: False, max_draws=3)
            policy.update(responses, verifier.score(responses))

    run, said = Flow.run, []

    def noted(*args, **options):
        try:
            run(*args, **options)
        except FlowError as error:
            said.append(str(error))
            raise

    monkeypatch.setattr(Flow, "run", noted)
    assert "were kept among 3 prompts" in same_in_both_modes(body).error
    assert len(said) == 7
    assert not [one for one in said if "caught this error" in one]
