"""The reference interpreter: errors stay with their handles, and with what depends on them, until somebody looks or the step ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.errors import FlowError, InternalError, M2FlowError, RewardError
from m2flow.macro.eager import EagerBackend
from m2flow.macro.graph import Call

ROWS = [{"prompt": f"{i}="} for i in range(4)]


class Breaking:
    """Performs by name: what is in `failures` fails, everything else gives its rows or a number."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = failures
        self.executed: list[str] = []

    def check(self, call: Call) -> None:
        pass

    def execute(self, call: Call, inputs: Mapping[str, object]) -> object:
        self.executed.append(call.name)
        if call.name in self.failures:
            raise self.failures[call.name]
        return call.options.get("rows") or next(iter(inputs.values())) if call.is_aligned else {"loss": 1.0}


class Noting:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.steps: list[int] = []
        self.logs: list[tuple[str, float]] = []

    def call_done(self, call: Call, value: object) -> None:
        self.done.append(call.name)

    def call_added(self, call: Call) -> None:
        pass

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        self.failed.append((call.name, error.what))

    def logged(self, step: int, name: str, value: float) -> None:
        self.logs.append((name, value))

    def step_done(self, step: int) -> None:
        self.steps.append(step)


def first(sample: Sample) -> float:
    return 1.0


def second(sample: Sample) -> float:
    return 1.0


def run(body: Callable[[], object], **failures: Exception) -> tuple[Breaking, Noting, M2FlowError | None]:
    executor, notes = Breaking({name.replace("__", "."): error for name, error in failures.items()}), Noting()
    try:
        flow(body).run(EagerBackend(executor, notes), {})
    except M2FlowError as error:
        return executor, notes, error
    return executor, notes, None


def test_calls_are_done_whole_in_the_order_of_the_program():
    def body() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(first), Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
            log(loss=policy.update(responses, verifier.score(responses))["loss"])

    executor, notes, error = run(body)
    assert error is None
    assert executor.executed == ["dataset.take", "policy.generate", "first.score", "policy.update"] * 2 == notes.done
    assert notes.steps == [0, 1]
    assert notes.logs == [("loss", 1.0)] * 2


def test_an_error_waits_for_the_first_look_and_has_the_line_of_its_call():
    reached = []

    def body() -> None:
        rewards = Reward(first).score(Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4))
        reached.append("after the call")
        float(rewards.mean())
        reached.append("after the look")

    executor, notes, error = run(body, first__score=RewardError("it broke"))
    assert reached == ["after the call"]
    assert isinstance(error, RewardError)
    assert "rewards = Reward(first).score(" in error.where
    assert "mean" not in executor.executed
    assert "first.score" not in notes.done


def test_an_unseen_error_is_raised_at_the_end_of_the_step():
    counted = []

    def body() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(first), Dataset(ROWS)
        for step in steps(3):
            verifier.score(policy.generate(prompts.take(2), max_new_tokens=4))
            counted.append(step)

    _, notes, error = run(body, first__score=RewardError("it broke"))
    assert isinstance(error, RewardError)
    assert counted == [0]
    assert notes.steps == []


def test_an_error_spreads_by_data_and_by_effect_and_no_further():
    def body() -> None:
        policy, other = Policy("fake"), Policy("fake", name="other")
        verifier, prompts = Reward(first), Dataset(ROWS)
        rows = prompts.take(2)
        responses = policy.generate(rows, n=2, max_new_tokens=4)
        policy.update(responses, verifier.score(responses))
        Reward(second).score(policy.generate(rows, max_new_tokens=4))
        other.generate(rows, max_new_tokens=4)

    executor, _, error = run(body, first__score=RewardError("it broke"))
    assert error is not None
    assert error.what == "it broke"
    assert executor.executed == ["dataset.take", "policy.generate", "first.score", "other.generate"]


def test_of_several_errors_the_earliest_in_program_order_is_raised():
    def body() -> None:
        rows = Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        Reward(first).score(rows)
        Reward(second).score(rows)

    assert run(body, second__score=RewardError("two"), first__score=RewardError("one"))[2].what == "one"  # type: ignore[union-attr]


def test_a_look_at_a_later_error_raises_that_one():
    def body() -> None:
        rows = Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        Reward(first).score(rows)
        list(Reward(second).score(rows))

    assert run(body, second__score=RewardError("two"), first__score=RewardError("one"))[2].what == "two"  # type: ignore[union-attr]


def test_what_depends_on_several_failed_calls_has_the_error_of_the_earliest():
    def body() -> None:
        policy = Policy("fake")
        rows = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        policy.update(rows, Reward(first).score(rows))
        metrics = policy.update(rows, Reward(second).score(rows))
        float(metrics["loss"])

    assert run(body, second__score=RewardError("two"), first__score=RewardError("one"))[2].what == "one"  # type: ignore[union-attr]


def test_an_error_that_the_flow_catches_does_not_end_the_run():
    def body() -> None:
        rewards = Reward(first).score(Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=4))
        with pytest.raises(RewardError):
            list(rewards)

    _, noting, error = run(body, first__score=RewardError("it broke"))
    assert (error, noting.failed) == (None, [("first.score", "it broke")])


def test_a_fault_of_ours_stays_with_its_call_too():
    def body() -> None:
        Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=4)

    error = run(body, policy__generate=KeyError("prompt"))[2]
    assert isinstance(error, InternalError)
    assert error.what == "policy.generate: KeyError('prompt')"
    assert "test_eager.py:" in error.where
    assert "Traceback" in error.remote


def test_the_flows_own_exception_has_its_line_and_the_helpers_on_the_way():
    def helper() -> None:
        raise ZeroDivisionError("mine")

    def body() -> None:
        Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=4)
        helper()

    error = run(body)[2]
    assert type(error) is FlowError
    assert error.what == "the flow raised ZeroDivisionError: mine"
    first_line, caller = error.where.splitlines()[:2]
    assert first_line.endswith('raise ZeroDivisionError("mine")')
    assert caller.startswith("  called from ")
    assert caller.endswith("in body")


@pytest.mark.parametrize("status", [0, "enough"])
def test_an_exit_in_a_flow_is_an_error_of_the_flow_that_says_how_to_end_early(status):
    error = run(lambda: sys.exit(status))[2]
    assert type(error) is FlowError
    assert error.what == f"the flow raised SystemExit: {status}"
    assert "sys.exit(status)" in error.where
    assert error.now.startswith("To end a run early, leave the loop or return")


@pytest.mark.parametrize("leave", ["break", "return"])
def test_a_step_that_is_left_ends_like_any_other(leave):
    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for step in steps(5):
            policy.generate(prompts.take(2), max_new_tokens=4)
            if step == 1 and leave == "break":
                break
            if step == 1:
                return
        policy.generate(prompts.take(2), max_new_tokens=4)

    executor, notes, error = run(body)
    assert error is None
    assert notes.steps == [0, 1]
    assert executor.executed.count("policy.generate") == (3 if leave == "break" else 2)
