"""Tracing: the calls of a flow's first steps, without doing any; a look at a value ends it, unless the value is assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from message_parts import lacks

from m2flow import Dataset, Flow, Policy, Reward, Sample, flow, steps
from m2flow.errors import FlowError, TraceError
from m2flow.macro.tracing import explore, trace
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec

ROWS = [{"prompt": f"{i}="} for i in range(6)]


def never(sample: Sample) -> float:
    raise AssertionError("a trace runs nothing")


@flow
def looking(num_steps: int = 4) -> None:
    policy, verifier, prompts = Policy("no/such/model"), Reward(never), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        metrics = policy.update(responses, verifier.score(responses))
        if float(metrics["reward"]) > 0.9:
            break


def test_a_look_at_a_value_ends_the_trace_and_is_listed_with_its_line():
    graph, models, num_steps = trace(looking, {}, steps=2)
    (seen,) = graph.observations
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "if float(metrics" in text)
    assert (graph.calls[seen.call].name, seen.why, seen.site.line) == ("policy.update", "float()", line)
    assert len(graph.calls) == 4
    assert num_steps == 4
    assert list(models) == ["policy"]
    assert str(graph).splitlines()[-1].startswith("-- Python waits for %metrics: float()  ")
    assert str(graph).endswith(f"test_tracing.py:{line}")


@pytest.mark.parametrize("find", [trace, explore])
def test_a_library_that_makes_an_error_of_the_traces_end_is_no_mistake_of_the_flow(find):
    @flow
    def tensors() -> None:
        responses = Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=4)
        torch.tensor(Reward(never).score(responses))

    found = find(tensors, {})
    graph = found[0] if isinstance(found, tuple) else found.paths[0].graph
    assert [call.name for call in graph.calls] == ["dataset.take", "policy.generate", "never.score"]
    assert graph.observations[-1].site.text == "torch.tensor(Reward(never).score(responses))"


def test_an_assumed_value_lets_the_trace_go_on_along_its_branch():
    graph, _, _ = trace(looking, {}, steps=3, assume=0.5)
    assert [call.step for call in graph.calls] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(graph.observations) == 3
    assert len(trace(looking, {}, steps=3, assume=1.0)[0].calls) == 4


def test_rows_can_not_be_assumed_but_a_datasets_are_known():
    @flow
    def body() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS, shuffle=False)
        rows = prompts.take(2)
        assert [sample.prompt for sample in rows] == ["0=", "1="]
        responses = policy.generate(rows, max_new_tokens=4)
        len(responses)
        policy.generate(rows, max_new_tokens=5)

    graph, _, _ = trace(body, {}, assume=0.0)
    assert [call.name for call in graph.calls] == ["dataset.take", "policy.generate"]
    assert [seen.why for seen in graph.observations] == ["a loop", "len()"]


def test_the_number_of_steps_is_that_of_all_outer_loops_however_many_are_traced():
    @flow
    def two_loops() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        for _ in steps(5):
            for _ in steps(3):
                policy.generate(prompts.take(1), max_new_tokens=4)
        for _ in prompts.batches(2):
            policy.generate(prompts.take(1), max_new_tokens=4)

    graph, _, num_steps = trace(two_loops, {}, steps=1)
    assert num_steps == 5 + 3
    assert {call.step for call in graph.calls} == {0, 1}


def test_a_flow_without_a_call_is_refused():
    with pytest.raises(TraceError, match="the flow empty makes no call"):
        trace(Flow(_named_empty), {})


def _named_empty() -> None:
    pass


_named_empty.__name__ = "empty"


def test_what_the_flow_itself_does_wrong_is_raised_with_its_line():
    @flow
    def broken() -> None:
        Policy("fake").generate(["a", "b"], max_new_tokens=4)  # type: ignore[arg-type]

    with pytest.raises(TraceError) as caught:
        trace(broken, {})
    assert not lacks(caught.value.what, "policy.generate", "prompts", "got a list")
    assert caught.value.where.splitlines()[0].endswith('Policy("fake").generate(["a", "b"], max_new_tokens=4)  # type: ignore[arg-type]')

    @flow
    def raising() -> None:
        raise KeyError("mine")

    with pytest.raises(FlowError, match="the flow raised KeyError: 'mine'"):
        trace(raising, {})


def test_a_role_made_after_a_look_is_refused_since_no_plan_could_know_it():
    @flow
    def late() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        if float(policy.update(responses, Reward(never).score(responses))["reward"]) == 0:
            Policy("fake", name="judge")

    with pytest.raises(TraceError, match=r"'judge' is made after .* looked at a value"):
        trace(late, {}, assume=0.0)


def test_what_a_flow_prints_is_not_printed_before_its_run(capsys):
    @flow
    def talks() -> None:
        print("here I am")
        Policy("fake").generate(Dataset([{"prompt": "a"}]).take(1), max_new_tokens=4)

    Run(talks, {}, ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")), RunSettings()).prepare()
    assert capsys.readouterr().out == ""


def test_a_loop_that_an_assumed_value_never_ends_is_not_followed_for_ever():
    @flow
    def waits_for_luck() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(never), Dataset(ROWS)
        score = 0.0
        while score < 0.5:
            score = float(verifier.score(policy.generate(prompts.take(1), max_new_tokens=4)).mean())

    graph, _, _ = trace(waits_for_luck, {}, assume=0.0)
    assert len(graph.calls) < 10_000
