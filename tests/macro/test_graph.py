"""The macro graph: its printed form, its checker, its edges, and the hash of its structure."""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from m2flow import Dataset, Flow, Policy, Reference, Reward, Sample, flow, load_flow, ppo_clip, steps
from m2flow.errors import TraceError
from m2flow.macro.graph import Effect, MacroGraph, Ref
from m2flow.macro.tracing import trace

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"{i}=", "target": str(i)} for i in range(6)]


def one(sample: Sample) -> float:
    return 1.0


def graph_of(flow: Flow, **options: object) -> MacroGraph:
    return trace(flow, options, steps=2)[0]


@flow
def loop(n: int = 2, is_odd: bool = False) -> None:
    policy, verifier = Policy("fake"), Reward(one)
    prompts = Dataset(ROWS)
    for step in steps(2):
        responses = policy.generate(
            prompts.take(2),
            n=n,
            max_new_tokens=4,
        )
        rewards = verifier.score(responses)
        policy.update(responses, rewards)
        if is_odd and step == 1:
            verifier.score(responses)


def test_the_first_step_of_the_main_flow_prints_as_this(monkeypatch):
    monkeypatch.chdir(ROOT)
    graph, _, num_steps = trace(load_flow("flows/grpo.py"), {"num_steps": 3}, steps=1)
    body = MacroGraph(graph.flow, tuple(call for call in graph.calls if call.step == 0 and call.ordinal >= 6))
    line = body.calls[0].site.line
    assert "responses = policy.generate" in body.calls[0].site.text
    shown = f"""\
%6         = prompts.take(count=32)                                                            flows/grpo.py:{line}  reads prompts.cursor@0  writes prompts.cursor@1
%responses = policy.generate(%6, n=8, max_new_tokens=8)                               @sample  flows/grpo.py:{line}  reads policy.weights@1
%rewards   = is_sorted.score(%responses)                                              @sample  flows/grpo.py:{line + 1}
%9         = policy.update(%responses, %rewards, loss='ppo_clip', advantages='grpo')  @batch   flows/grpo.py:{line + 2}  reads policy.weights@1  writes policy.weights@2"""
    assert str(body) == shown
    assert num_steps == 3


def test_a_graph_prints_as_aligned_columns():
    first = MacroGraph(
        "loop", tuple(replace(c, site=replace(c.site, file="loop.py", line=10 + c.ordinal)) for c in graph_of(loop).calls[:4])
    )
    assert (
        str(first)
        == """\
%0         = dataset.take(count=2)                                                             loop.py:10  reads dataset.cursor@0  writes dataset.cursor@1
%responses = policy.generate(%0, n=2, max_new_tokens=4)                               @sample  loop.py:11  reads policy.weights@0
%rewards   = one.score(%responses)                                                    @sample  loop.py:12
%3         = policy.update(%responses, %rewards, loss='ppo_clip', advantages='grpo')  @batch   loop.py:13  reads policy.weights@0  writes policy.weights@1"""
    )


def test_a_call_has_the_name_of_its_variable_and_a_second_one_is_told_apart():
    names = graph_of(loop).names()
    assert [names[i] for i in (1, 2, 5, 6)] == ["responses", "rewards", "responses.5", "rewards.6"]
    assert [names[i] for i in (0, 3, 4, 7)] == ["0", "3", "4", "7"]
    assert len(set(names.values())) == len(names)


def test_an_input_that_is_not_there_is_told_with_its_call_and_line():
    graph = graph_of(loop)
    broken = MacroGraph("loop", (*graph.calls[:1], replace(graph.calls[1], inputs=(("prompts", Ref(9)),))))
    with pytest.raises(TraceError, match=r"policy\.generate uses call 9 as 'prompts'") as caught:
        broken.verify()
    assert f"{Path(__file__).name}:" in caught.value.where


def test_a_version_that_is_left_out_is_told_with_its_call_and_line():
    calls = list(graph_of(loop).calls)
    calls[7] = replace(calls[7], writes=(Effect("policy.weights", 3),))
    with pytest.raises(TraceError, match=r"policy\.update writes policy\.weights@3 after 1") as caught:
        MacroGraph("loop", tuple(calls)).verify()
    assert caught.value.where == calls[7].site.describe()


def test_edges_are_data_and_effects_a_write_after_a_read_among_them():
    edges = graph_of(loop).digraph().edges
    assert edges[1, 2]["kind"] == edges[1, 3]["kind"] == edges[2, 3]["kind"] == "data"
    assert (edges[1, 2]["label"], edges[2, 3]["label"]) == ("samples", "rewards")
    # The next generate reads what the update wrote, and the next update replaces what that generate reads.
    assert edges[3, 5] == {"kind": "effect", "label": "policy.weights@1"}
    assert edges[3, 7] == {"kind": "effect", "label": "policy.weights@1"}
    assert edges[0, 4] == {"kind": "effect", "label": "dataset.cursor@1"}
    assert not graph_of(loop).digraph().has_edge(2, 4)


def test_a_write_waits_for_readers_that_share_no_data_with_it():
    @flow
    def evaluates() -> None:
        policy, verifier = Policy("fake"), Reward(one)
        reference = Reference(policy)
        prompts = Dataset(ROWS)
        verifier.score(policy.generate(prompts.all(), max_new_tokens=4))
        policy.update(prompts.take(2))
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        policy.update(responses, verifier.score(responses), loss=ppo_clip(kl_coef=0.1), reference=reference)

    graph = trace(evaluates, {})[0]
    by_name = {call.name: call.ordinal for call in reversed(graph.calls)}
    edges = graph.digraph().edges
    assert edges[by_name["policy.generate"], by_name["policy.update"]] == {"kind": "effect", "label": "policy.weights@0"}
    assert edges[by_name["reference.copy_of"], by_name["policy.update"]] == {"kind": "effect", "label": "policy.weights@0"}
    assert edges[by_name["reference.copy_of"], by_name["reference.logprobs"]] == {"kind": "effect", "label": "reference.weights@1"}


def segments(graph: MacroGraph) -> list[MacroGraph]:
    by_step = [tuple(call for call in graph.calls if call.step == step) for step in (0, 1)]
    return [MacroGraph(graph.flow, calls) for calls in by_step]


def test_steps_of_one_structure_have_one_hash_and_others_have_others():
    first, second = segments(graph_of(loop))
    assert first.structure_hash() == second.structure_hash()
    other_first, longer = segments(graph_of(loop, is_odd=True))
    assert other_first.structure_hash() == first.structure_hash()
    assert longer.structure_hash() != first.structure_hash()
    assert segments(graph_of(loop, n=3))[0].structure_hash() != first.structure_hash()
    rewired = replace(first.calls[3], inputs=(first.calls[3].inputs[0], ("rewards", Ref(1))))
    assert MacroGraph("loop", (*first.calls[:3], rewired)).structure_hash() != first.structure_hash()


def test_the_first_steps_of_a_graph_are_whole():
    graph = graph_of(loop)
    assert [call.ordinal for call in graph.first_steps(1).verify().calls] == [0, 1, 2, 3]
    assert graph.first_steps(2).calls == graph.calls
