"""A plan is printed on a screen, however many workers it has."""

from fake_flows import everything

from m2flow import Chat, Dataset, Policy, Reference, Reward, Sample, agent, best_and_worst, concat, dpo, flow
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.arithmetic import arithmetic
from m2flow.micro.lowering.passes import lower
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec


def printed(num_workers: int) -> list[str]:
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=num_workers),
        train=TrainSpec(engine="fake"),
        functions=FunctionSpec(workers=num_workers),
    )
    graph, models, _ = trace(everything, {}, steps=1)
    return str(lower(graph, models, spec)).splitlines()


def test_workers_that_are_alike_are_one_line_and_so_are_the_routes_between_them() -> None:
    few, many = printed(3), printed(40)
    assert len(few) == len(many) < 60
    assert any(line.startswith("  rollout-0 to rollout-39  ") for line in many)
    assert any("rollout-0 to rollout-39 -> functions-0 to functions-39" in line for line in many)
    assert any("functions-0 to functions-39 -> each the same" in line for line in many)


def test_two_are_told_one_by_one() -> None:
    assert any(line.startswith("  rollout-1 ") for line in printed(2))


@agent
async def says_it(chat: Chat, row: Sample) -> float:
    return float((await chat.say(str(row.prompt))).text == "1")


@flow
def rows_of_all_kinds() -> None:
    policy, judge = Policy("fake"), Reward(lambda sample: float(sample.num_tokens), name="judge")
    reference, prompts = Reference(policy), Dataset([{"prompt": f"{i}="} for i in range(8)])
    responses = policy.generate(prompts.take(4), n=4, max_new_tokens=8)
    rewards = judge.score(responses)
    policy.update(responses.select(rewards > 3), rewards, minibatch_size=2)
    policy.update(best_and_worst(responses, rewards), loss=dpo(), reference=reference, minibatch_size=2)
    policy.update(responses.with_columns(told=rewards), rewards, minibatch_size=2)
    both = concat([responses, policy.generate(prompts.take(4), n=2, max_new_tokens=8)])
    policy.update(both, judge.score(both), minibatch_size=2)
    episodes = policy.rollout(says_it, prompts.take(4), n=4, max_tokens=8)
    policy.update(episodes, episodes.reward, minibatch_size=2)


def test_optimiser_steps_are_counted_in_prompts_whatever_was_done_with_the_rows_before_the_update() -> None:
    graph, _, num_steps = trace(rows_of_all_kinds, {}, steps=1)
    lines = arithmetic(graph, num_steps=num_steps, token_budget=1000)
    told = [(line.value, line.formula.partition(" x ")[2]) for line in lines if line.name.startswith("optimiser steps of")]
    fewer, whole = "; fewer where all rows of prompts are filtered out", "; none is dropped"
    four = "ceil(4 prompts / 2)"
    assert told == [
        ("2", four + fewer),
        ("2", four + fewer),
        ("2", four + whole),
        ("4", "ceil(8 prompts / 2)" + whole),
        ("2", four + fewer),
    ]
    assert not [line for line in lines if line.formula.startswith("ceil(0 bytes")]


@flow
def drawn_with_care() -> None:
    prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
    Policy("fake").generate(prompts.take(4), max_new_tokens=8, stop="</answer>", include_stop=True, top_p=0.9, min_new_tokens=1)


def test_each_option_of_a_generation_that_is_not_its_default_is_told() -> None:
    graph, _, _ = trace(drawn_with_care, {}, steps=1)
    assert "n=1, max_new_tokens=8, stop=['</answer>'], top_p=0.9, min_new_tokens=1, include_stop=True)" in str(graph)
