"""The algebra on handles: what is calculated from them is what NumPy gives of the observed rows, planned and eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from algebra_flows import ROWS, SPEC, Rollout, digit_share, eager, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import (
    Dataset,
    Number,
    Policy,
    Reward,
    Rows,
    Sample,
    concat,
    flow,
    join,
    log,
    op,
    steps,
    where,
)
from m2flow.errors import FieldError, OptionError, TraceError
from m2flow.testing.world import run_eager, run_planned

ARITHMETIC: dict[str, Callable[[object, object], object]] = {
    "+": lambda a, b: a + b,  # type: ignore[operator]
    "-": lambda a, b: a - b,  # type: ignore[operator]
    "*": lambda a, b: a * b,  # type: ignore[operator]
    "/": lambda a, b: a / b,  # type: ignore[operator]
    "//": lambda a, b: a // b,  # type: ignore[operator]
    "%": lambda a, b: a % b,  # type: ignore[operator]
    "**": lambda a, b: abs(a) ** b,  # type: ignore[operator,arg-type]
    ">": lambda a, b: a > b,  # type: ignore[operator]
    "<=": lambda a, b: a <= b,  # type: ignore[operator]
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
ONE: dict[str, Callable[[object], object]] = {"-": lambda a: -a, "abs": abs, "+": lambda a: +a}  # type: ignore[operator,dict-item]

leaves = st.sampled_from(["rewards", "ranks", "length", "level", "mean", "kl", "logprobs"]) | st.integers(-3, 3) | st.floats(-2, 2)
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(sorted(ARITHMETIC)), inner, inner) | st.tuples(st.sampled_from(sorted(ONE)), inner),
    max_leaves=6,
)


def of_handles(tree: object, rollout: Rollout) -> object:
    match tree:
        case (sign, left, right):
            return ARITHMETIC[sign](of_handles(left, rollout), of_handles(right, rollout))
        case (sign, inner):
            return ONE[sign](of_handles(inner, rollout))
        case str():
            return rollout.leaf(tree)
    return tree


def of_one_sample(tree: object, known: dict[str, object]) -> object:
    """The same of one sample, with NumPy, on what was observed."""
    match tree:
        case (sign, left, right):
            found = ARITHMETIC[sign](of_one_sample(left, known), of_one_sample(right, known))
        case (sign, inner):
            found = ONE[sign](of_one_sample(inner, known))
        case str():
            found = known[tree]
        case _:
            found = tree
    return np.asarray(found, np.float64)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees, st.integers(0, 2**30))
def test_any_expression_of_columns_is_what_numpy_makes_of_the_observed_rows_in_both_modes(tree, order_seed):
    names = ["rewards", "ranks", "length", "level", "mean", "kl", "logprobs"]

    def calculates() -> None:
        try:
            rollout = Rollout()
            with np.errstate(all="ignore"):
                result = of_handles(tree, rollout)
        except (ZeroDivisionError, OverflowError):
            return  # of two plain numbers, by Python itself
        if not isinstance(result, Rows):
            return
        known = {name: list(found) for name in names if isinstance(found := rollout.leaf(name), Rows)}
        known["mean"] = [np.float64(float(rollout.rewards.mean()))] * len(result)
        for i, value in enumerate(result):
            with np.errstate(all="ignore"):
                expected = of_one_sample(tree, {name: np.asarray(column[i], np.float64) for name, column in known.items()})
            np.testing.assert_allclose(np.asarray(value, np.float64), expected, rtol=1e-9, atol=1e-12)

    calculating = flow(calculates)
    assert run_eager(calculating, {}, SPEC).error == ""
    assert run_planned(calculating, {}, SPEC, order_seed=order_seed).error == ""


REDUCTIONS: dict[str, Callable[[np.ndarray], object]] = {
    "mean": np.mean,
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "std": np.std,
    "any": np.any,
    "all": np.all,
    "count": np.size,
}


@pytest.mark.parametrize("how", REDUCTIONS)
def test_reductions_over_all_samples_groups_and_tokens_are_numpys(how):
    @flow
    def reduces() -> None:
        rollout = Rollout(n=3)
        rewards, kl, length = rollout.rewards, rollout.leaf("kl"), rollout.responses.length
        mask = list(rollout.responses.loss_mask)
        assert isinstance(kl, Rows)
        tokens = [np.asarray(row)[np.asarray(m, bool)] for row, m in zip(kl, mask, strict=True)]
        cases = [(getattr(column, how)(), np.array(list(column))) for column in (rewards, length)]
        cases += [
            (getattr(rewards, how)(over="group"), np.array(list(rewards)).reshape(-1, 3)),
            (getattr(kl, how)(), np.concatenate(tokens)),
        ]
        for got, values in cases[:2] + cases[3:]:
            assert float(got) == pytest.approx(float(REDUCTIONS[how](values)))
            log(value=got)
        groups, values = cases[2]
        assert list(groups) == pytest.approx([REDUCTIONS[how](group) for group in values for _ in range(3)])
        assert list(getattr(kl, how)(over="sample")) == pytest.approx([REDUCTIONS[how](row) for row in tokens])

    same(reduces)


def test_a_group_keeps_its_value_whatever_lies_beside_it():
    @flow
    def normalises(num_steps: int = 2) -> None:
        policy, verifier, prompts = Policy("fake"), Reward(digit_share), Dataset(ROWS)
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(4), n=3, max_new_tokens=9)
            rewards = verifier.score(responses)
            advantages = (rewards - rewards.mean(over="group")) / (rewards.std(over="group") + 1e-6)
            metrics = policy.update(responses, rewards - 0.01 * responses.length, advantages=advantages)
            log(spread=advantages.std(), gap=metrics["reward"] - rewards.mean(), top=(rewards == rewards.max(over="group")).sum())

    same(normalises)


def test_conditions_are_joined_and_turned_round_by_signs_and_decide_nothing_by_themselves():
    @flow
    def judges() -> None:
        rollout = Rollout()
        rewards, length = rollout.rewards, rollout.responses.length
        observed = list(zip(rewards, length, strict=True))
        good, long = rewards > 0.1, length >= 5
        for condition, expected in [
            (good & long, [r > 0.1 and n >= 5 for r, n in observed]),
            (good | long, [r > 0.1 or n >= 5 for r, n in observed]),
            (good ^ long, [(r > 0.1) != (n >= 5) for r, n in observed]),
            (~good, [r <= 0.1 for r, _ in observed]),
            (good & True, [r > 0.1 for r, _ in observed]),
        ]:
            assert list(condition) == expected
        for decide in (lambda: bool(good), lambda: good and long, lambda: 0 < rewards < 1, lambda: rewards in [length]):
            with pytest.raises(TraceError, match=r"many rows; its truth is not defined(.|\n)*any\(\)"):
                decide()
        assert bool(good.any()) == any(r > 0.1 for r, _ in observed)
        assert not (rewards < 0).any()

    same(judges)


def test_texts_are_compared_and_chosen():
    @flow
    def compares() -> None:
        responses = Rollout().responses
        kinds = list(responses.kind)
        assert list(responses.kind == "hard") == [kind == "hard" for kind in kinds]
        assert list(responses.kind != responses.text) == [True] * len(kinds)
        assert list(where(responses.kind == "hard", responses.kind, "no")) == [kind if kind == "hard" else "no" for kind in kinds]
        first = responses.text.map(lambda text: text[:1])
        assert list(first) == [sample.text[:1] for sample in responses]

    same(compares)


def test_where_takes_rows_numbers_and_plain_values_on_each_side():
    @flow
    def chooses() -> None:
        rollout = Rollout()
        rewards, kl = rollout.rewards, rollout.leaf("kl")
        mean = rewards.mean()
        observed, at = list(rewards), float(mean)
        assert list(where(rewards > mean, rewards, 0)) == [r if r > at else 0.0 for r in observed]
        assert list(where(rewards > mean, 1, mean)) == [1.0 if r > at else at for r in observed]
        assert list(where(mean > 10, rewards, -rewards)) == [-r for r in observed]
        clipped = where(kl > 0, kl, 0.0)
        for got, row in zip(clipped, kl, strict=True):
            assert np.array_equal(got, np.maximum(row, 0))
        assert float(where(mean > 10, 1.0, mean)) == at
        assert isinstance(where(mean > 10, 1.0, mean), Number)
        with pytest.raises(TraceError, match="where got a bool, a float, a float"):
            where(True, 1.0, 2.0)

    same(chooses)


def test_numbers_are_calculated_with_and_compared_and_only_a_branch_waits():
    @flow
    def calculates(num_steps: int = 3) -> None:
        policy, verifier, prompts = Policy("fake"), Reward(digit_share), Dataset(ROWS)
        for step in steps(num_steps):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
            metrics = policy.update(responses, verifier.score(responses))
            per_token = metrics["reward"] / (metrics["num_tokens"] + 1)
            gap = 1 - metrics["reward"] * 2
            assert float(per_token) == float(metrics["reward"]) / (float(metrics["num_tokens"]) + 1)
            log(gap=gap, per_token=per_token, positive=gap > 0)
            if gap > 10 or metrics["num_tokens"] < 0:
                break
            assert step == 0 or metrics["reward"] != -1
            with pytest.raises(TraceError, match="can't decide a branch by itself"):
                bool(gap)

    assert [name for _, name, _ in same(calculates).logs].count("gap") == 3


def test_what_samples_do_not_have_is_named_with_what_they_have_and_the_nearest():
    @flow
    def asks() -> None:
        responses = Rollout().responses
        with pytest.raises(FieldError, match=r"no 'levle'.*kind, .*level.*\n.*'level'\?"):
            _ = responses.levle
        assert not hasattr(responses, "lenght")
        with pytest.raises(FieldError, match="it is the column 'text' alone"):
            _ = responses.text.level
        for ask, message in [
            (lambda: responses + 1, "which are whole samples(.|\n)*Name a column"),
            (lambda: responses.mean(), "which are whole samples"),
            (lambda: responses[True], "is a position, a slice, a condition or a name, not True"),
            (lambda: responses[::-1], "rows stay in the order of identity"),
            (lambda: responses.select(3), "were given as a int"),
            (lambda: responses.map(3), "map got a int; it takes a function"),
            (lambda: concat([responses, responses.text]), "concat got different things: 'text', whole samples"),
            (lambda: join(responses, 3), "join got a int"),
            (lambda: responses.with_columns(x=[1, 2]), r"with_columns\(x=...\) got a list"),
        ]:
            with pytest.raises(TraceError, match=message):
                ask()
        with pytest.raises(OptionError, match=r"mean\(over='batch'\); known are group, sample"):
            responses.length.mean(over="batch")
        with pytest.raises(TypeError, match="unsupported operand"):
            responses.length + "a"
        assert (responses.length == None) is False  # noqa: E711

    eager(asks.function)


def test_a_division_by_zero_is_inf_or_nan_as_in_numpy():
    @flow
    def divides() -> None:
        responses = Rollout().responses
        level = list(responses.level)
        assert [math.isnan(value) for value in responses.level % 0] == [True] * len(level)
        assert list(responses.level // 0 == np.inf) == [value > 0 for value in level]
        assert list(where(responses.level != 0, 6 / responses.level, 0.0)) == [6 / value if value else 0.0 for value in level]
        assert list(responses.level // 2) == [value // 2 for value in level]

    same(divides)


def test_numpys_numbers_leave_the_calculation_to_the_handle():
    @flow
    def calculates() -> None:
        rewards = Rollout().rewards
        assert isinstance(np.float64(2) * rewards, Rows)
        assert isinstance(np.float32(0.5) - rewards.mean(), Number)
        assert list(np.float64(2) * rewards) == [2 * reward for reward in rewards]

    eager(calculates.function)


def test_wrong_values_are_an_error_in_both_modes():
    @flow
    def adds_texts(which: str = "") -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        wrong = {
            "text": lambda: responses.text + 1,
            "truth": lambda: ~rewards,
            "filter": lambda: rewards[rewards + 1],
            "missing": lambda: responses.map(lambda sample: "x" if sample.level else 1) * 2,
        }
        log(x=wrong[which]().count())

    for which, message in [
        ("text", "add got texts; it takes numbers"),
        ("truth", "~ got numbers; it takes True or False"),
        ("filter", "a filter got numbers; it takes True or False"),
        ("missing", "multiply got 'x' on sample p"),
    ]:
        for answer in (run_eager(adds_texts, {"which": which}, SPEC), run_planned(adds_texts, {"which": which}, SPEC, order_seed=5)):
            assert message in answer.error


def test_the_mean_of_nothing_is_nan_and_its_sum_is_zero():
    @flow
    def empties() -> None:
        rewards = Rollout().rewards
        none = rewards[rewards > 2]
        assert list(none) == []
        assert math.isnan(float(none.mean()))
        assert float(none.sum()) == float(none.count()) == 0
        assert not none.any()
        assert none.all()
        assert list(none + 1) == list(none.mean(over="group")) == []
        assert none.groupby(none > 1).mean().items() == {}

    assert same(empties).error == ""


def test_a_value_that_an_op_gave_for_all_rows_is_a_number_to_calculate_with():
    @op(granularity="batch")
    def extremes(samples: list[Sample]) -> dict[str, float]:
        return {"first": digit_share(samples[0]), "last": digit_share(samples[-1])}

    @op(granularity="batch")
    def count(samples: list[Sample]) -> float:
        return float(len(samples))

    @flow
    def calculates() -> None:
        rollout = Rollout()
        rewards, number, ends = rollout.rewards, count(rollout.responses), extremes(rollout.responses)
        observed = list(rewards)
        assert list(rewards / number) == [reward / len(observed) for reward in observed]
        assert float(ends["last"] - ends["first"]) == pytest.approx(observed[-1] - observed[0])
        assert float(number) == number * 1 == len(observed)
        assert float(where(number > 3, number, rewards.mean())) == float(where(rewards.mean() > 3, 1, number)) == len(observed)
        log(share=rewards.sum() / number, first=ends["first"], all=number)

    same(calculates)
