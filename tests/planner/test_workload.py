"""What a step of a flow asks of the machines: every flow of flows/, and what is contracted, named and counted."""

import heapq
from pathlib import Path

import numpy as np
import pytest

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, load_flow, steps
from m2flow.errors import SpecError, TraceError
from m2flow.macro.tracing import trace
from m2flow.planner.cost_model import shapes_of
from m2flow.planner.workload import CallLoad, Draw, Extent, Instances, Workload, extents_of, workload_of
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.spec import LAPTOP, ClusterSpec, FunctionSpec

ROOT = Path(__file__).parents[2]


def of(name: str, num_steps: int = 12) -> Workload:
    graph, _, _ = trace(load_flow(f"{ROOT}/flows/{name}.py"), {}, steps=num_steps, assume=0.5)
    return workload_of(graph, LAPTOP)


def brief(load: CallLoad) -> tuple[object, ...]:
    return load.name, load.work, str(load.engine or ""), f"{load.num_prompts}x{load.num_per_prompt}", load.unit, load.after


def test_grpo_without_its_evaluation_which_few_steps_have() -> None:
    work = of("grpo")
    assert [brief(load) for load in work.calls] == [
        ("policy.generate", "generate", "policy.rollout", "32x8", "sample", ()),
        ("is_sorted.score", "function", "", "32x8", "sample", ("policy.generate",)),
        ("policy.update", "update", "policy.train", "32x8", "group", ("policy.generate", "is_sorted.score")),
    ]
    assert (work.step, work.num_alike, work.num_traced, work.staleness) == (1, 10, 12, 0)
    assert work.call("policy.generate").max_new_tokens == 8
    assert 4 < work.call("policy.generate").prompt_bytes < 8
    assert not any(load.is_barrier for load in work.calls)


def test_ppo_with_its_arithmetic_contracted_and_its_epochs_counted() -> None:
    work = of("ppo")
    needs = ("policy.generate", "is_sorted.score", "critic.values", "reference.logprobs")
    assert [brief(load) for load in work.calls] == [
        ("policy.generate", "generate", "policy.rollout", "64x2", "sample", ()),
        ("is_sorted.score", "function", "", "64x2", "sample", ("policy.generate",)),
        ("critic.values", "forward", "critic.train", "64x2", "sample", ("policy.generate",)),
        ("reference.logprobs", "forward", "reference.train", "64x2", "sample", ("policy.generate",)),
        ("policy.update", "update", "policy.train", "64x2", "sample", needs),
        ("critic.update", "update", "critic.train", "64x2", "sample", needs),
    ]
    for name in ("policy.update", "critic.update"):
        assert (work.call(name).num_epochs, work.call(name).num_optimizer_steps) == (2, 4)
    assert (work.call("critic.values").token_budget, work.call("is_sorted.score").token_budget) == (LAPTOP.train.token_budget, 0)


def test_dapo_with_the_candidates_that_its_refill_is_expected_to_need() -> None:
    work = of("dapo")
    assert [brief(load) for load in work.calls] == [
        ("policy.generate", "generate", "policy.rollout", "32x8", "sample", ()),
        ("is_sorted.score", "function", "", "32x8", "group", ("policy.generate",)),
        ("keep", "function", "", "32x8", "group", ("policy.generate", "is_sorted.score")),
        ("policy.update", "update", "policy.train", "16x8", "group", ("policy.generate", "keep")),
    ]
    graph, _, _ = trace(load_flow(f"{ROOT}/flows/dapo.py"), {}, steps=12, assume=0.5)
    drawn = [workload_of(graph, LAPTOP, draws_per_group=draws).call("policy.generate").num_prompts for draws in (1.0, 3.0, 100.0)]
    assert drawn == [16, 48, 16 * 16]  # never more than the program lets it draw


def test_distillation_asks_a_teacher_that_generates_before_the_steps_only() -> None:
    work = of("distill")
    assert [brief(load) for load in work.calls] == [
        ("student.generate", "generate", "student.rollout", "64x2", "sample", ()),
        ("teacher.logprobs", "forward", "teacher.train", "64x2", "sample", ("student.generate",)),
        ("student.update", "update", "student.train", "64x2", "sample", ("student.generate", "teacher.logprobs")),
    ]
    assert [str(engine) for engine in work.outside] == ["teacher.rollout"]


def test_updates_on_a_datasets_pairs_are_of_groups_of_two() -> None:
    work = of("sft_then_dpo")
    assert [brief(load) for load in work.calls] == [
        ("reference.logprobs", "forward", "reference.train", "64x2", "sample", ()),
        ("policy.update", "update", "policy.train", "64x2", "group", ("reference.logprobs",)),
    ]


def test_selfplay_has_two_generations_of_different_size_and_calls_named_by_line() -> None:
    work = of("selfplay")
    assert [brief(load)[:5] for load in work.calls] == [
        ("first.generate", "generate", "first.rollout", "16x4", "sample"),
        ("second.generate", "generate", "second.rollout", "64x2", "sample"),
        ("second_wins.score", "function", "", "64x2", "sample"),
        ("second.update", "update", "second.train", "64x2", "group"),
        ("first.update", "update", "first.train", "16x4", "group"),
        ("digit@45", "function", "", "16x4", "sample"),
        ("digit@45#2", "function", "", "64x2", "sample"),
    ]
    # What the first has won is a mean over the replies to each of its moves: it waits for all of them.
    assert work.call("first.update").is_barrier
    assert not work.call("second.update").is_barrier


def test_the_judge_s_samples_are_those_of_the_policy_again() -> None:
    work = of("judge")
    assert [brief(load)[:4] for load in work.calls] == [
        ("policy.generate", "generate", "policy.rollout", "32x8"),
        ("as_case", "function", "", "32x8"),
        ("judge.generate", "generate", "judge.rollout", "256x1"),
        ("says_yes.score", "function", "", "256x1"),
        ("has_the_digits.score", "function", "", "32x8"),
        ("policy.update", "update", "policy.train", "32x8"),
        ("is_sorted.score", "function", "", "32x8"),
    ]
    assert work.call("policy.update").is_barrier
    assert work.call("policy.update").after == ("policy.generate", "says_yes.score", "has_the_digits.score")
    assert [str(engine) for engine in work.outside] == ["judge.train"]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "distill", "selfplay", "judge"])
def test_calls_come_after_what_they_need(name: str) -> None:
    work = of(name, 2)
    seen: set[str] = set()
    for load in work.calls:
        assert set(load.after) <= seen
        assert load.name not in seen
        assert load.num_samples > 0
        seen.add(load.name)


def zero(sample: Sample) -> float:
    return 0.0


@flow
def updates_twice() -> None:
    policy, rule = Policy("fake"), Reward(zero)
    reference = Reference(policy)
    prompts = Dataset([{"prompt": "a"}] * 40)
    for _ in steps(4):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=5)
        rewards = rule.score(responses)
        policy.update(responses, rewards, minibatch_size=3)
        now = policy.logprobs(responses)
        reference.logprobs(responses)
        now.map(zero)
        policy.update(responses, rewards, allow_unsound=True)


@flow
def no_steps() -> None:
    policy = Policy("fake")
    policy.update(policy.generate(Dataset([{"prompt": "a"}]).all(), n=2, max_new_tokens=3, oversample=1.0), allow_unsound=True)


@flow
def nothing() -> None:
    prompts = Dataset([{"prompt": "a"}] * 40)
    for _ in steps(4):
        prompts.take(2)


def test_effects_order_calls_that_share_no_data() -> None:
    graph, _, _ = trace(updates_twice, {}, steps=2)
    work = workload_of(graph, LAPTOP)
    first, second = (load for load in work.calls if load.work == "update")
    assert first.num_optimizer_steps == 2  # mini-batches of 3 and 1 prompts
    asked = work.call("policy.logprobs")
    assert first.name in asked.after
    assert asked.name in second.after
    assert first.name in second.after
    assert work.call("reference.logprobs").after == ("policy.generate",)


def test_a_flow_without_steps_is_one_step_with_all_of_its_calls() -> None:
    graph, _, _ = trace(no_steps, {})
    work = workload_of(graph, LAPTOP)
    assert [load.name for load in work.calls] == ["policy.generate", "policy.update"]
    assert (work.step, work.num_traced) == (0, 1)


def test_a_step_that_does_nothing_can_t_be_planned() -> None:
    graph, _, _ = trace(nothing, {})
    with pytest.raises(TraceError, match="has nothing to plan"):
        workload_of(graph, LAPTOP)


def test_latencies_of_calls_that_the_flow_does_not_make_are_refused() -> None:
    graph, _, _ = trace(load_flow(f"{ROOT}/flows/grpo.py"), {})
    spec = ClusterSpec(functions=FunctionSpec(latency_s={"is_sorted.scor": 1.0}))
    with pytest.raises(SpecError, match=r"is_sorted.scor: the flow has no such call(.|\n)*'is_sorted.score'"):
        workload_of(graph, spec)


def test_lengths_are_those_given_for_trained_models_and_the_limits_of_others() -> None:
    graph, models, _ = trace(load_flow(f"{ROOT}/flows/judge.py"), {}, steps=2)
    work = workload_of(graph, LAPTOP)
    shapes = shapes_of(models, LAPTOP)
    allowed = extents_of(work, shapes)
    assert allowed["policy"] == Extent.up_to(8, prompt=work.call("policy.generate").prompt_bytes)
    long, _, _ = trace(load_flow(f"{ROOT}/flows/judge.py"), {"max_new_tokens": 8000}, steps=2)
    given = extents_of(workload_of(long, LAPTOP), shapes, parse_lengths("lognormal:median=1000,sigma=0.8,cap=8000,prompt=100"))
    assert given["policy"].longest == 8100
    assert given["policy"].response == pytest.approx(1000 * 1.377, rel=0.05)
    assert given["policy"].position > given["policy"].response / 2
    assert given["judge"] == allowed["judge"]
    assert given[""] == given["policy"]


def test_a_critic_and_a_reference_have_the_samples_that_they_are_asked_about() -> None:
    graph, models, _ = trace(load_flow(f"{ROOT}/flows/ppo.py"), {}, steps=2)
    work = workload_of(graph, LAPTOP)
    extents = extents_of(work, shapes_of(models, LAPTOP))
    assert extents["critic"] == extents["reference"] == extents["policy"]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0, 2.0])
@pytest.mark.parametrize("text", ["lognormal:median=4096,sigma=0.8,cap=16384", "lognormal:median=2000,sigma=1,cap=16384,icc=0.7", "same"])
def test_more_samples_than_slots_take_as_long_as_in_the_order_of_their_prompts(text: str, share: float) -> None:
    """Each begins in the slot that is free first; of some thousand, the lengths of which are not known, some long one begins last."""
    lengths = np.full((64, 8), 1000) if text == "same" else parse_lengths(text).draw(256, 8, 0)
    slots = int(share * lengths.size)
    free = [0] * slots
    for length in lengths.ravel():
        heapq.heapreplace(free, free[0] + int(length))
    one, none = np.ones(1), np.zeros(1)
    ways = Instances(one, none, none, one * slots, one, none, none, none)
    found = Draw(lengths, np.zeros(len(lengths), np.int64)).seconds(ways)
    waves = 0.1 if text == "same" else 0.0  # Of samples that are all alike the last wave is seldom full.
    assert found[0] == pytest.approx(max(free), rel=0.08 + waves)
