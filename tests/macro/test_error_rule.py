"""Errors stay with their handles, and the earliest counts: in the program's order, then by sample; in both modes, whatever comes first.

Random flows with failures put into rewards, ops, prompts and losses, under random plans and orders of events.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_parts import lacks

from m2flow import Dataset, Policy, Reward, Rows, Sample, Scores, flow, log, op, steps
from m2flow.errors import FlowError
from m2flow.recipe import Counts, Loss
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.fakes import FAKE_CONTEXT, fake_hash
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned


def never(counts: Counts) -> float:
    raise ValueError("no denominator")


BROKEN_LOSS = Loss("broken", "m2flow.algorithms.losses:nll", ("logprobs", "behaviour_logprobs", "advantages"), never)
"""An update with it fails at the end of its mini-batch."""


@dataclass(frozen=True)
class Line:
    """One line of a random program, on what earlier lines gave."""

    what: str
    which: int
    """Which of the earlier results it takes, counted from the last."""
    fails: int
    """One sample in how many fails; 0: none. Of an update or the program itself: whether it does."""


def judge(fails: int, salt: int) -> Reward:
    def judged(sample: Sample) -> float:
        bits = fake_hash(sample.id.pack(), salt)
        if fails and bits % fails == 0:
            if bits % 3 == 0:
                raise KeyError(f"{sample.id}")
            return float("nan") if bits % 3 == 1 else None  # type: ignore[return-value]
        return float(bits % 7)

    return Reward(judged, name=f"judge{salt}")


def ranked(responses: Rows, fails: int, salt: int) -> object:
    def ranks(samples: list[Sample]) -> list[object]:
        bits = fake_hash(samples[0].id.pack(), salt)
        if fails and bits % fails == 0:
            if bits % 2:
                raise ValueError(f"{samples[0].id}")
            return [0] * (len(samples) - 1 + bits % 4) + [{1}]
        return list(range(len(samples)))

    return op(granularity="group")(ranks)(responses)


@flow
def random_program(program: list[list[Line]], bad_prompts: int = 0) -> None:
    policies = (Policy("fake", name="left"), Policy("fake", name="right"))
    rows = [{"prompt": "x" * FAKE_CONTEXT if i < bad_prompts else f"{i * 7919}="} for i in range(9)]
    prompts = Dataset(rows)
    responses: list[Rows] = []
    scores: list[tuple[Rows, Scores]] = []
    for step in steps(len(program)):
        for line, (what, which, fails) in enumerate((entry.what, entry.which, entry.fails) for entry in program[step]):
            salt = step * 100 + line
            if what == "generate" or not responses:
                responses.append(policies[which % 2].generate(prompts.take(3), n=2, max_new_tokens=9))
            elif what == "score":
                taken = responses[-1 - which % len(responses)]
                scores.append((taken, judge(fails, salt).score(taken)))
            elif what == "rank":
                ranked(responses[-1 - which % len(responses)], fails, salt)
            elif what == "raise" and fails == 1 and step > 0:  # The trace runs the first step too.
                raise LookupError(f"the program itself in step {step}")
            elif not scores:
                continue
            elif what == "update":
                taken, rewards = scores[-1 - which % len(scores)]
                loss = {"loss": BROKEN_LOSS} if fails == 1 else {}
                metrics = policies[which % 2].update(taken, rewards, **loss)
                log(**{f"loss{salt}": float(metrics["loss"]) if which == 3 else metrics["loss"]})
            elif what == "look":
                taken, rewards = scores[-1 - which % len(scores)]
                log(**{f"mean{salt}": float(rewards.mean())})
            elif what == "catch":
                try:
                    len(scores[-1 - which % len(scores)][1])
                except FlowError:
                    continue


lines = st.builds(
    Line,
    st.sampled_from(["generate", "score", "score", "rank", "update", "update", "look", "catch", "raise"]),
    st.integers(0, 3),
    st.sampled_from([0, 0, 1, 5, 9]),
)
programs = st.lists(st.lists(lines, min_size=1, max_size=7), min_size=1, max_size=3)
many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(clusters(), programs, st.sampled_from([0, 0, 1, 3]), st.integers(0, 2**30))
def test_planned_and_eager_raise_the_same_error(spec, program, bad_prompts, order_seed):
    options = {"program": program, "bad_prompts": bad_prompts}
    eager = run_eager(random_program, options, spec)
    planned = run_planned(random_program, options, spec, order_seed=order_seed)
    assert (planned.error, planned.where) == (eager.error, eager.where)
    if not eager.error:
        assert planned == eager


SPEC = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=2, chunk=1),
)


def test_what_depends_on_two_failures_has_the_error_of_the_earlier_one_that_comes_later():
    def broken(sample: Sample) -> float:
        raise KeyError("at once")

    @flow
    def two_failures() -> None:
        policy, prompts = Policy("fake"), Dataset([{"prompt": f"{i}="} for i in range(9)])
        first = policy.generate(prompts.take(6), n=2, max_new_tokens=60, min_new_tokens=50)
        second = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
        policy.update(first, Reward(lambda sample: 1.0, name="good").score(first), loss=BROKEN_LOSS)
        float(policy.update(second, Reward(broken).score(second))["loss"])

    eager = run_eager(two_failures, {}, SPEC)
    assert "the denominator of the loss broken raised ValueError" in eager.error
    assert "float(" not in eager.where
    for order_seed in range(10):
        planned = run_planned(two_failures, {}, SPEC, order_seed=order_seed)
        assert (planned.error, planned.where) == (eager.error, eager.where)


def test_of_a_calls_failing_samples_the_earliest_is_named_whichever_came_first():
    def judged(sample: Sample) -> float:
        if sample.id.prompt == 1:
            return float("nan")
        if sample.id.prompt > 3:
            raise KeyError("late")
        return 1.0

    @flow
    def fails() -> None:
        policy, prompts = Policy("fake"), Dataset([{"prompt": f"{i}="} for i in range(9)], shuffle=False)
        Reward(judged).score(policy.generate(prompts.take(9), n=2, max_new_tokens=30))

    eager = run_eager(fails, {}, SPEC)
    assert not lacks(eager.error, "RewardError: ", "judged", "nan", "sample p1/0")
    for chunk in (1, 3, 64):
        spec = SPEC.model_copy(update={"functions": FunctionSpec(workers=3, chunk=chunk)})
        for order_seed in range(8):
            assert run_planned(fails, {}, spec, order_seed=order_seed).error == eager.error


def test_an_error_has_the_line_the_helpers_on_the_way_the_sample_and_the_users_frames():
    def judged(sample: Sample) -> float:
        return 1 / len(str(sample.text)[:0])

    def evaluate(policy: Policy, prompts: Dataset) -> float:
        return float(Reward(judged).score(policy.generate(prompts.take(2), max_new_tokens=3)).mean())

    @flow
    def helped() -> None:
        evaluate(Policy("fake"), Dataset([{"prompt": "1="}]))

    for run in (run_eager, run_planned):
        answer = run(helped, {}, SPEC)
        assert answer.error.startswith("RewardError: the reward function ")
        assert answer.error.endswith("judged raised ZeroDivisionError on sample p0/0: division by zero")
        line, *path = answer.where.splitlines()
        assert line.startswith("tests/macro/test_error_rule.py:")
        assert line.endswith(".mean())")
        assert path[0].startswith("  called from tests/macro/test_error_rule.py:")
        assert path[0].endswith(" in helped")


def test_an_engine_that_is_first_needed_in_a_later_step_is_refused_where_the_call_is_made_in_both_modes():
    @flow
    def later() -> None:
        left, right, prompts = Policy("fake", name="left"), Policy("fake", name="right"), Dataset([{"prompt": "1="}])
        for step in steps(2):
            rows = prompts.take(1)
            left.generate(rows, max_new_tokens=3)
            if step == 1:
                right.generate(rows, max_new_tokens=3)

    eager, planned = run_eager(later, {}, SPEC), run_planned(later, {}, SPEC)
    assert not lacks(eager.error, "PlanError: ", "no worker", "rollout engine for right", "right.generate")
    assert "right.generate(rows" in eager.where
    assert (planned.error, planned.where) == (eager.error, eager.where)


def test_of_the_samples_that_an_update_can_not_take_the_earliest_is_named():
    def numbers(sample: Sample) -> float:
        return float("nan") if sample.id.prompt in (2, 5, 8) else 1.0

    @flow
    def fails() -> None:
        policy, prompts = Policy("fake"), Dataset([{"prompt": f"{i}="} for i in range(9)])
        responses = policy.generate(prompts.take(9), n=2, max_new_tokens=40)
        policy.update(responses, op()(numbers)(responses), minibatch_size=6)

    eager = run_eager(fails, {}, SPEC)
    assert not lacks(eager.error, "RewardError: ", "policy.update", "nan", "sample p2/0", "finite")
    spec = SPEC.model_copy(update={"train": TrainSpec(engine="fake", token_budget=20)})
    for order_seed in range(8):
        planned = run_planned(fails, {}, spec, order_seed=order_seed)
        assert (planned.error, planned.where) == (eager.error, eager.where)
