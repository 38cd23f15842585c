"""Evaluation: its metrics, that training does not notice it, early stops, and the best weights in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_clusters import SPLIT

from m2flow import Best, Dataset, Policy, Reward, Sample, evaluate, flow, log, steps
from m2flow.errors import M2FlowError
from m2flow.macro.evaluation import Measures, majority_at, pass_at
from m2flow.macro.tracing import anticipate, explore, trace
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i} + {i}"} for i in range(6)]


def even(sample: Sample) -> float:
    return float(sample.num_tokens % 2 == 0)


def parity(sample: Sample) -> int:
    return sample.num_tokens % 2


def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one() -> None:
    from itertools import combinations

    for n, num_right, k in ((5, 2, 3), (4, 0, 1), (4, 4, 4), (6, 1, 2)):
        draws = list(combinations([True] * num_right + [False] * (n - num_right), k))
        assert pass_at(k, n, num_right) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert math.isnan(pass_at(3, 2, 1))


@pytest.mark.parametrize(
    ("k", "rewards", "answers", "value"),
    [(2, [1, 0, 0, 1], "abcd", 0.5), (4, [1, 0, 0, 1], "abbd", 0.0), (3, [0, 1, 1, 0], "abbb", 1.0), (1, [0, 1], "ab", 0.5)],
)
def test_a_majority_is_the_commonest_answer_of_each_lot_and_the_first_of_equals(
    k: int, rewards: Sequence[float], answers: str, value: float
) -> None:
    assert majority_at(k, rewards, list(answers)) == value


def test_the_interval_is_over_prompts_not_over_responses() -> None:
    ids = make_ids(1, 3, 4)
    rows = Batch(ids, {"rewards": np.repeat([1.0, 0.0, 1.0], 4), "answers": Ragged.texts(["x"] * 12)})
    found = Measures(("avg", "pass@4", "maj@2"), 1.0)(rows, {})
    half = 1.959964 * np.std([1, 0, 1], ddof=1) / math.sqrt(3)
    for metric in ("avg", "pass@4", "maj@2"):
        low, high = 2 / 3 - half, 1.0 if metric == "pass@4" else 2 / 3 + half  # A chance is no more than 1.
        assert [found[metric], found[f"{metric} low"], found[f"{metric} high"]] == pytest.approx([2 / 3, low, high])
    alone = Measures(("avg",), 1.0)(rows.take([0, 1]), {})
    assert alone["avg"] == 1.0
    assert math.isnan(alone["avg low"])


@flow
def evaluated(num_steps: int = 3, evaluates: bool = True, trains: bool = True) -> None:
    policy, reward = Policy("fake"), Reward(even)
    prompts, heldout = Dataset(ROWS), Dataset(ROWS, name="heldout")
    for _ in steps(num_steps):
        if evaluates:
            found = evaluate(
                policy, heldout, score=reward, n=4, max_new_tokens=6, metrics=["pass@1", "pass@4", "maj@4", "avg"], answer=parity
            )
            log(again=found["avg"])
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=9)
        rewards = reward.score(responses)
        if trains:
            policy.update(responses, rewards)
        log(length=responses.length.mean(), reward=rewards.mean())


def test_an_evaluation_is_the_same_in_both_modes() -> None:
    alone = run_eager(evaluated, {}, SPLIT)
    assert alone.error == "", alone.error
    assert run_planned(evaluated, {}, SPLIT, order_seed=1) == alone
    logged = {(step, name): value for step, name, value in alone.logs}
    for step in range(3):
        values = [logged[step, f"eval/{metric}"] for metric in ("pass@1", "avg", "pass@4")]
        assert values[0] == pytest.approx(values[1])
        assert values[1] <= values[2]
        assert logged[step, "eval/avg low"] <= logged[step, "again"] <= logged[step, "eval/avg high"]


def test_what_is_drawn_for_training_does_not_depend_on_evaluations() -> None:
    """Without updates: the fake trainer makes weights of the numbers of calls, too."""
    drawn = []
    for evaluates in (False, True):
        answer = run_eager(evaluated, {"evaluates": evaluates, "trains": False}, SPLIT)
        assert answer.error == "", answer.error
        drawn.append([entry for entry in answer.logs if entry[1] in ("length", "reward")])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ["pass@8"]}, "pass@8 needs n=8 responses to a prompt, and n is 2"),
        ({"metrics": ["best@2"]}, "'best@2' is none; known are avg, pass@K"),
        ({"metrics": "avg"}, "list of names"),
        ({"score": even}, "needs a Reward"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_an_evaluation_that_can_not_be_is_refused(options: dict[str, Any], said: str) -> None:
    @flow
    def wrong() -> None:
        evaluate(Policy("fake"), Dataset(ROWS), **{"score": Reward(even), "n": 2, "max_new_tokens": 4, **options})

    with pytest.raises(M2FlowError, match=said):
        trace(wrong, {})


@flow
def stopping(num_steps: int = 8) -> None:
    policy, reward = Policy("fake"), Reward(even)
    prompts, best = Dataset(ROWS), Best(policy, patience=2)
    values = (0.1, 0.4, 0.3, 0.4, 0.9, 0.9, 0.9, 0.9)
    for step in steps(num_steps):
        if best.stop(values[step]):
            break
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
        policy.update(responses, reward.score(responses))


def test_a_run_stops_when_patience_ends_and_keeps_a_copy_of_the_best_weights() -> None:
    alone = run_eager(stopping, {}, SPLIT)
    assert alone.error == "", alone.error
    assert run_planned(stopping, {}, SPLIT, order_seed=4) == alone
    assert [value for _, name, value in alone.logs if name == "policy_best"] == [0.1, 0.4, 0.4, 0.4]
    graph, models, _ = trace(stopping, {}, steps=8)
    copies = [call for call in graph.calls if call.method == "copy_of"]
    assert [call.step for call in copies] == [-1, 0, 1]
    assert set(models) == {"policy", "policy_best"}


@flow
def stopping_by_measures(num_steps: int = 4) -> None:
    policy, reward = Policy("fake"), Reward(even)
    prompts, best = Dataset(ROWS), Best(policy, patience=1)
    for _ in steps(num_steps):
        measured = evaluate(policy, Dataset(ROWS, name="heldout"), score=reward, n=2, max_new_tokens=4)
        if best.stop(measured["pass@1"]):
            break
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
        policy.update(responses, reward.score(responses))


def test_a_stop_by_what_was_measured_is_planned_and_the_same_planned_and_eager() -> None:
    explored = explore(stopping_by_measures, {})
    whole = anticipate(stopping_by_measures, {}, explored, steps=4)
    assert [call.step for call in whole.calls if call.method == "update"] == [0, 1, 2, 3]  # No value that is not known ends the run.
    alone = run_eager(stopping_by_measures, {}, SPLIT)
    assert alone.error == "", alone.error
    assert run_planned(stopping_by_measures, {}, SPLIT, order_seed=4) == alone
