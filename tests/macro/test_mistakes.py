"""What users get wrong in a flow is named at their line as their fault, in both modes; what Python allows elsewhere works here too."""

from __future__ import annotations

import copy
import math
import re

import numpy
import pytest
import torch
from fake_clusters import FAKES
from message_parts import lacks

import m2flow
from m2flow import AdamW, Dataset, Flow, Policy, Reward, Rows, Sample, evaluate, flow, log, ppo_clip
from m2flow.errors import FlowError, OptionError
from m2flow.macro.session import OF_FLOWS
from m2flow.macro.tracing import trace
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}=", "level": i % 2} for i in range(6)]
RUNS = [pytest.param(run_eager, id="eager"), pytest.param(run_planned, id="planned")]


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


def program(line: str) -> Flow:
    """A flow with this line, which looks at what workers gave, so that no trace comes there before."""

    @flow
    def wrong() -> None:
        policy, prompts, judge = Policy("fake"), Dataset(ROWS), Reward(length)
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=4)
        rewards = judge.score(responses)
        len(rewards)
        names = {"policy": policy, "prompts": prompts, "judge": judge, "responses": responses, "rewards": rewards}
        exec(compile(line, "/tmp/their/flow.py", "exec"), {**globals(), **names})

    return wrong


def at_once(line: str) -> Flow:
    """A flow with this line, which a trace comes to."""

    @flow
    def wrong() -> None:
        names = {"policy": Policy("fake"), "prompts": Dataset(ROWS), "AdamW": AdamW, "evaluate": evaluate, "ppo_clip": ppo_clip}
        exec(compile(line, "/tmp/their/flow.py", "exec"), {**globals(), **names})

    return wrong


MISTAKES = {
    "rewards[6]": "RowError: the rows of length.score (tests/macro/test_mistakes.py:{line}) have 6 rows, and none at position 6",
    "rewards[-7]": "have 6 rows, and none at position -7",
    "responses[0].nope": "the flow raised AttributeError: the sample has no 'nope'; it has level, prompt",
    "[sample.nope for sample in responses]": "the flow raised AttributeError: the sample has no 'nope'",
    "responses[0]['nope']": "the flow raised KeyError: 'nope'",
    "responses.batch()['nope']": "the flow raised KeyError: 'nope'",
    "dict(responses)": "the flow raised KeyError: 0",
    "copy.deepcopy(rewards)": "TraceError: what belongs to a running flow can't be copied, and can't leave it",
    "policy.generate(prompts, count=1, score=3, max_new_tokens=3)": "TraceError: score got a int; it takes a Reward",
    "policy.update(responses, rewards, columns=3)": "TraceError: update got columns=a int",
    "Dataset(3)": "DatasetError: Dataset got a int",
    "Dataset('text')": "DatasetError: Dataset got a str",
    "rewards.back_to(3)": "TraceError: back_to got a int; it takes the rows",
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_theirs_and_has_their_line(run, line):
    answer = run(program(line), {}, FAKES)
    assert MISTAKES[line].partition("{line}")[0].partition("(tests")[0] in answer.error
    assert "/tmp/their/flow.py:1" in answer.where


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("policy.generate(prompts.take(1), max_new_tokens=3, num_beams=4)", "There is no beam search"),
        ('Dataset.jsonl("rows.jsonl", max_prompt_tokens=8)', "dataset.within(policy, max_prompt_tokens="),
        ('Dataset.jsonl("rows.jsonl", max_prompt_length=8)', "dataset.within(policy, max_prompt_tokens="),
        ("policy.generate(prompts.take(1), max_new_tokens=3, best_of=4)", "responses.select"),
        ("policy.generate(prompts.take(1), max_tokens=3)", "It is max_new_tokens=."),
        ("policy.generate(prompts.take(1), max_new_tokens=3, length=4)", "m2flow help Policy.generate explains them"),
        ("Policy('fake', sytem='Be short.')", "Did you mean 'system'?"),
        ("Dataset(ROWS, stream=True)", "Files are read as they are drawn"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_what_to_write(line: str, now: str) -> None:
    with pytest.raises(FlowError, match="got an unexpected keyword argument") as found:
        trace(at_once(line), {})
    assert now in found.value.now
    assert "/tmp/their/flow.py:1" in found.value.where


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("metrics.loss", "A metric is metrics['loss']."),
        ("metrics.lag(1)", "Did you mean 'lagged'?"),
        ("policy.save('here')", "m2flow export RUN"),
        ("policy.save_pretrained('here')", "m2flow export RUN"),
        ("policy.model.train()", "Workers hold the model."),
        ("policy.train(responses, rewards)", "It is policy.update(responses, rewards)."),
        ("policy.generat(prompts.take(1))", "Did you mean 'generate'?"),
        ("policy.anything_else", "m2flow help Policy lists what it has."),
        ("policy(prompts.take(1))", "It is policy.generate("),
        ("judge(responses)", "It is verifier.score(responses)."),
        ("rewards.mean().item()", "It is float(number)"),
        ("rewards.tolist()", "list(rewards)"),
        ("responses.shape", "list(rewards)"),
        ("prompts[0]", "dataset.take(32)"),
        ("for row in prompts: pass", "dataset.take(32)"),
        ("f'{rewards:.3f}'", "rewards.mean()"),
        ("f'{metrics:.3f}'", 'metrics["loss"]'),
        ("numpy.mean(rewards)", 'rewards.mean(over="group")'),
        ("rewards.mean(dim=0)", 'rewards.mean(over="group")'),
        ("torch.mean(rewards)", "It is a handle and no tensor"),
        ("log({'reward': rewards.mean()})", "log(accuracy=rewards.mean())"),
        ("log(note='hello')", "print() shows the rest"),
        ("Policy('fake')", "Make a role once, before the loop."),
    ],
)
def test_a_use_that_an_object_of_another_library_would_have_is_answered_with_what_to_write(line: str, now: str) -> None:
    @flow
    def wrong() -> None:
        policy, prompts, judge = Policy("fake"), Dataset(ROWS), Reward(length)
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=4)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards)
        exec(compile(line, "/tmp/their/flow.py", "exec"), {**globals(), **locals(), "numpy": numpy, "torch": torch})

    with pytest.raises(FlowError) as found:
        trace(wrong, {}, steps=1)
    assert now in found.value.now
    assert "/tmp/their/flow.py:1" in found.value.where


def test_a_member_that_an_object_of_the_program_lacks_is_theirs_to_mend() -> None:
    with pytest.raises(FlowError, match="has no attribute 'save'") as found:
        trace(at_once("length.save('here')"), {})
    assert found.value.now == ""


@pytest.mark.parametrize("run", RUNS)
def test_a_reward_that_changes_its_sample_is_told_what_a_sample_is(run):
    def shortens(sample: Sample) -> float:
        sample.text = sample.text.strip()
        return 1.0

    @flow
    def changing() -> None:
        Reward(shortens).score(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=3)).mean()

    assert "a sample can't be changed: 'text' was set" in run(changing, {}, FAKES).error


def test_an_option_that_a_function_of_the_program_lacks_is_theirs_to_mend() -> None:
    with pytest.raises(FlowError, match="unexpected keyword argument 'beams'") as found:
        trace(at_once("length(prompts, beams=3)"), {})
    assert found.value.now == ""


@pytest.mark.parametrize("run", RUNS)
def test_a_row_that_is_not_there_is_an_index_error_to_whoever_catches_it(run):
    @flow
    def careful() -> None:
        rewards = Reward(length).score(Policy("fake").generate(Dataset(ROWS).take(1), n=2, max_new_tokens=4))
        try:
            rewards[2]
        except IndexError as error:
            log(num_rows=float(len(rewards)), last=float(str(rewards[-1])), is_ours=isinstance(error, FlowError))

    answer: Answer = run(careful, {}, FAKES)
    assert answer.error == ""
    assert [name for _, name, _ in answer.logs] == ["num_rows", "last", "is_ours"]


@pytest.mark.parametrize("run", RUNS)
def test_numbers_do_what_pythons_numbers_do(run):
    @flow
    def numbers() -> None:
        rewards: Rows = Reward(length).score(Policy("fake").generate(Dataset(ROWS).take(3), n=2, max_new_tokens=9))
        mean = rewards.mean()
        assert round(mean, 2) == round(float(mean), 2)
        assert isinstance(round(mean), int)
        assert math.floor(mean) == int(mean)
        assert f"{mean:.3f}" == f"{float(mean):.3f}"
        log(most=max(rewards), total=sum(rewards), middle=sorted(rewards)[3])  # type: ignore[arg-type, type-var]
        log(same=sum(rewards) - rewards.sum())  # type: ignore[arg-type]

    answer: Answer = run(numbers, {}, FAKES)
    assert answer.error == ""
    assert answer.logs[-1][2] == 0.0
    assert copy.copy(answer.logs[0])[1] == "most"


@pytest.mark.parametrize("run", RUNS)
def test_a_handle_of_a_run_that_is_over_is_named_with_the_line_that_uses_it(run):
    kept: list[Rows] = []

    @flow
    def again() -> None:
        if kept:
            kept[0].mean()
        kept.append(Reward(length).score(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=3)))

    answer = run(again, {}, FAKES)  # The trace before it has run the flow too.
    assert not lacks(answer.error, "TraceError: ", "mean", "after its flow had ended")
    assert "kept[0].mean()" in answer.where


def takes_batches(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [0.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("policy.generate(prompts.take(1), num_generations=4)", "It is n=."),
        ("policy.generate(prompts.take(1), max_completion_length=4)", "It is max_new_tokens=."),
        ("ppo_clip(beta=0.04)", r"ppo_clip\(kl_coef=0.04\)"),
        ("ppo_clip(clip=0.2)", "'dual_clip'|eps_low"),
        ("AdamW(learning_rate=1e-4)", "It is lr=."),
        ("evaluate(policy, prompts, score=Reward(length), max_new_tokens=3, max_tokens=3)", "It is max_new_tokens=."),
        ("evaluate(policy, prompts, score=Reward(length), max_new_tokens=3)['accuracy']", "There are pass@1, pass@1 low"),
        ("Reward(takes_batches)", "a function of one sample, and takes_batches takes prompts, completions"),
        ("Reward(lambda: 1.0)", "takes nothing"),
    ],
)
def test_what_another_library_calls_otherwise_is_said_as_it_is_here_and_before_anything_runs(line: str, says: str) -> None:
    with pytest.raises((FlowError, OptionError)) as found:
        trace(at_once(line), {}, steps=1)
    assert re.search(says, str(found.value)), str(found.value)
    assert "flow.py:1" in str(found.value)


def test_classes_of_which_members_are_suggested_are_public() -> None:
    assert set(OF_FLOWS) <= set(m2flow.__all__)
