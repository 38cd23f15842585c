"""A run of any length keeps no more than what the program can still ask for: handles that it has, and the numbers of some steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from fake_clusters import FAKES
from message_parts import lacks

from m2flow import Dataset, Policy, Reward, Sample, flow, informative, log, op, steps
from m2flow.macro import session
from m2flow.macro.graph import Call, ResultInfo
from m2flow.runner.run import Run
from m2flow.spec import RunSettings
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 1000}="} for i in range(9)]
MOST_LAG = 5


@pytest.fixture(autouse=True)
def _short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session, session):
        monkeypatch.setattr(module, "MOST_LAG", MOST_LAG)
    monkeypatch.setattr(session, "_FEW_CALLS", 20)


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@op(granularity="batch")
def total(samples: list[Sample]) -> float:
    return float(sum(sample.num_tokens for sample in samples))


def count(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


@flow
def long(num_steps: int, found: list[tuple[int, int]]) -> None:
    """Notes how many calls are in memory, and how many of them the session knows the samples of."""
    policy, prompts, judge = Policy("fake"), Dataset(ROWS), Reward(length)
    first = policy.generate(prompts.take(1), n=2, max_new_tokens=3)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=3)
        again = policy.generate(responses, max_new_tokens=2)
        rewards = judge.score(responses)
        kept = responses[rewards > 0]
        metrics = policy.update(responses, rewards - rewards.mean() / (1 + step))
        log(kept=kept.count(), again=judge.score(again).back_to(responses).mean(), first=judge.score(first).sum())
        drawn = policy.generate(prompts, n=2, count=1, score=judge, keep=informative if step < 0 else bool, max_new_tokens=2)
        before, summed = metrics.lagged(2), total(drawn)
        earlier = summed.lagged(MOST_LAG)
        assert (before is None) == (step < 2)
        assert (earlier is None) == (step < MOST_LAG)
        if step in (num_steps // 2, num_steps - 1):
            found.append((count(Call), count(ResultInfo)))


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "planned"])
def test_a_run_of_twice_the_steps_holds_no_more_calls(tmp_path: Path, is_eager: bool):
    found: list[tuple[int, int]] = []
    run = Run(long, {"num_steps": 60, "found": found}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=is_eager))
    run.prepare()
    found.clear()
    run.execute()
    (calls, known), (calls_later, known_later) = found
    assert calls_later <= calls + 40, "calls of about two steps more, by chance of what is under way"
    assert known_later <= known + 40


@flow
def looks_far_back(ago: int, num_steps: int = 12) -> None:
    policy, prompts = Policy("fake"), Dataset(ROWS)
    old = None
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=3)
        metrics = policy.update(responses, Reward(length, name=f"length{step}").score(responses))
        old = old or metrics
        if step == num_steps - 1:
            (old if ago < 0 else metrics).lagged(abs(ago))


@pytest.mark.parametrize("run", [run_eager, run_planned])
def test_a_look_too_far_back_says_how_far_a_run_remembers(run):
    assert run(looks_far_back, {"ago": MOST_LAG}, FAKES).error == ""
    answer = run(looks_far_back, {"ago": MOST_LAG + 1}, FAKES)
    assert not lacks(answer.error, "TraceError: ", "lagged(6)", "of step 11", "step 5", "this is step 11")
    assert "lagged(abs(ago))" in answer.where
    assert run(looks_far_back, {"ago": -1}, FAKES).error == ""
    assert run(looks_far_back, {"ago": 0}, FAKES).error == ""
