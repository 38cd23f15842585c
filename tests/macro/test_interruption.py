"""How a flow's Python may end that is no exception of its own: Ctrl-C, and a recursion without end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_clusters import FAKES

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import FlowError, RunInterrupted
from m2flow.macro.flow import Flow
from m2flow.macro.handles import Handle
from m2flow.macro.session import Backend
from m2flow.macro.tracing import trace
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i}="} for i in range(6)]


def test_a_recursion_without_end_is_named_by_the_lines_that_go_round():
    def generate(policy: Policy, prompts: Dataset, depth: int) -> Handle:
        policy.generate(prompts.take(1), max_new_tokens=2)
        return again(policy, prompts, depth)

    def again(policy: Policy, prompts: Dataset, depth: int) -> Handle:
        return generate(policy, prompts, depth + 1)

    @flow
    def endless() -> None:
        again(Policy("fake"), Dataset(ROWS), 0)

    with pytest.raises(FlowError, match="the flow calls itself without end: ") as caught:
        trace(endless, {})
    lines = caught.value.what.partition(": ")[2].split(" -> ")
    assert len(lines) == 3
    assert lines[0] == lines[-1]
    assert {line.rpartition(" in ")[2] for line in lines} == {"generate", "again"}
    assert len(str(caught.value)) < 1000


def test_a_recursion_of_one_function_is_a_cycle_of_one_line():
    def deeper(n: int) -> int:
        return deeper(n + 1)

    @flow
    def endless() -> None:
        deeper(0)

    with pytest.raises(
        FlowError, match=r"without end: tests/macro/test_interruption\.py:(\d+) in deeper -> tests/macro/test_interruption\.py:\1 in"
    ):
        trace(endless, {})


def test_a_recursion_in_a_reward_shows_only_its_last_frames():
    def judged(sample: Sample) -> float:
        return judged(sample) + other(sample)

    def other(sample: Sample) -> float:
        return judged(sample)

    @flow
    def endless() -> None:
        list(Reward(judged).score(Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=2)))

    for run in (run_eager, run_planned):
        assert "judged raised RecursionError on sample p0/0" in run(endless, {}, FAKES).error


def interrupted(at: int) -> tuple[Flow, Callable[[Backend], Backend]]:
    """A flow, and what presses Ctrl-C while it waits for the value of a call for the `at`-th time."""

    @flow
    def waits() -> None:
        policy, judge, prompts = Policy("fake"), Reward(lambda sample: 1.0, name="judge"), Dataset(ROWS)
        for _ in steps(3):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            float(judge.score(responses).mean())

    def around(backend: Backend) -> Backend:
        value, looks = backend.value, []

        def pressed(ordinal: int) -> object:
            looks.append(ordinal)
            if len(looks) == at:
                raise KeyboardInterrupt("Ctrl-C")
            return value(ordinal)

        backend.value = pressed  # type: ignore[method-assign]
        return backend

    return waits, around


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_ctrl_c_says_where_python_was_and_keeps_what_was_computed(run):
    waits, around = interrupted(at=2)
    answer = run(waits, {}, FAKES, around=around)
    assert answer.error == "RunInterrupted: stopped by Ctrl-C"
    assert answer.where.startswith("Python was at tests/macro/test_interruption.py:")
    assert answer.where.endswith(" in waits")
    assert len(answer.rewards) >= 4


def test_an_interruption_is_still_a_keyboard_interrupt():
    @flow
    def pressed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        trace(pressed, {})
    assert isinstance(caught.value, RunInterrupted)
    assert "raise KeyboardInterrupt" in caught.value.where
