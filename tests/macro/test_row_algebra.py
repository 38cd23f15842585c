"""Filters, joins, unions and keys: which rows are left, what goes with what, and what does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from algebra_flows import ROWS, SPEC, Rollout, digit_share, eager, logged, same

from m2flow import (
    Dataset,
    Metrics,
    Policy,
    Reward,
    concat,
    flow,
    join,
    log,
    ppo_clip,
    steps,
)
from m2flow.errors import FieldError, TraceError
from m2flow.macro.tracing import trace
from m2flow.testing.world import run_eager, run_planned


def test_filters_keep_the_rows_of_the_source_with_all_their_columns():
    @flow
    def filters() -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        expected = [sample.text for sample, reward in zip(responses, rewards, strict=True) if reward > 0.08]
        assert 0 < len(expected) < len(responses)
        for kept in (
            responses[rewards > 0.08],
            responses.select(rewards > 0.08),
            responses.filter(rewards > 0.08),
            responses.filter(lambda sample: digit_share(sample) > 0.08),
        ):
            assert [sample.text for sample in kept] == expected
            assert list(kept.text) == expected
            assert set(kept.batch().columns) == kept.fields == responses.fields
        assert list(rewards[rewards > 0.08]) == [reward for reward in rewards if reward > 0.08]
        assert list(rewards.filter(lambda reward: reward > 0.08)) == [reward for reward in rewards if reward > 0.08]
        assert [s.text for s in responses[2:7:2]] == [s.text for s in list(responses)[2:7:2]]
        assert [s.text for s in responses[-3:]] == [s.text for s in list(responses)[-3:]]
        groups = responses.filter_groups(lambda group: len({sample.text for sample in group}) > 1)
        assert len(groups) % 3 == 0

        async def has_several(texts: list[str]) -> np.bool_:
            await asyncio.sleep(0)
            return np.bool_(len(set(texts)) > 1)

        assert list(responses.text.filter_groups(has_several)) == list(groups.text)
        log(kept=responses[rewards > 2].count(), groups=groups.count(), mean=rewards[rewards > 0.08].mean())

    assert logged(same(filters))["kept"] == 0


def test_what_was_filtered_goes_with_its_source_in_either_order_and_the_filtered_one_decides():
    @flow
    def joins() -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        good = responses[rewards > 0.08]
        chosen = [(sample.text, reward) for sample, reward in zip(responses, rewards, strict=True) if reward > 0.08]
        assert list(good.length * rewards) == list(rewards * good.length)
        assert len(good.length * rewards) == len(chosen)
        for both in (join(good, rewards), join(responses, good), join(responses, rewards, size=good.length)):
            assert [sample.text for sample in both] == [text for text, _ in chosen]
        assert [sample.reward for sample in join(responses, rewards, size=good.length)] == [reward for _, reward in chosen]
        assert [sample.size for sample in join(responses, size=good.length)] == list(good.length)
        again = rollout.verifier.score(good)
        assert [sample.text for sample in responses[again > 0.1]] == [text for text, reward in chosen if reward > 0.1]
        renamed = responses.with_columns(kind="new")
        assert set(join(good, renamed).kind) == {"new"}
        assert list(join(renamed, good).kind) == list(good.kind)
        rollout.policy.update(good, rewards)
        rollout.policy.update(responses, again, reference=rollout.reference, loss=ppo_clip(kl_coef=0.1))

    same(joins)


def test_rows_of_different_samples_or_of_different_filters_do_not_go_together_and_both_are_named():
    @flow
    def mixes() -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        others = rollout.verifier.score(rollout.policy.generate(Dataset(ROWS, name="other").take(2), max_new_tokens=4))
        high = rewards[rewards > 0.5]
        low = rewards[rewards < 0.1]
        place = r"tests/[\w/]*algebra\w*.py:\d+"
        for mix in (lambda: rewards - others, lambda: join(responses, others), lambda: responses.with_columns(other=others)):
            with pytest.raises(
                TraceError, match=rf"that policy.generate made at {place}, and .* of others, which policy.generate made at {place}"
            ):
                mix()
        with pytest.raises(TraceError, match=rf"filtered at {place} and right filtered at {place}, which are different rows of the same"):
            high - low
        for parts in ([rewards, high], [high, rewards]):
            with pytest.raises(TraceError, match=r"concat got samples twice that policy.generate made"):
                concat(parts)

    eager(mixes.function)


def test_parts_of_the_same_samples_are_put_together_and_go_with_them_again():
    @flow
    def parts() -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        high = rewards > 0.08
        both = concat([responses[high], responses[~high]])
        assert [sample.text for sample in both] == [sample.text for sample in responses]
        assert list(both.length + rewards) == list(responses.length + rewards)
        more = rollout.policy.generate(Dataset([{"prompt": "9=", "kind": "new"}], name="more").all(), n=3, max_new_tokens=5)
        everything = concat([responses, more])
        assert everything.fields == more.fields == responses.fields - {"level"} == set(everything.batch().columns)
        scored = concat([rewards, rollout.verifier.score(more)])
        assert list(scored) == [digit_share(sample) for sample in everything]
        kl = concat([rollout.leaf("kl"), more.logprobs - rollout.reference.logprobs(more)])
        rollout.policy.update(everything, scored - 0.01 * kl.sum(over="sample"))
        log(kl=kl.mean())

    same(parts)


def test_a_plan_counts_the_rows_of_all_parts_of_a_concatenation():
    @flow
    def both() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        short, long = (policy.generate(prompts.take(count), n=2, max_new_tokens=4) for count in (2, 3))
        policy.generate(concat([short, long]), n=3, max_new_tokens=4)

    *_, joined, further = trace(both, {})[0].calls
    assert (joined.name, joined.most_rows) == ("concat", (2 + 3) * 2)
    assert further.most_rows == (2 + 3) * 2 * 3


def test_concat_of_overlapping_filters_is_an_error_that_names_a_sample():
    @flow
    def overlaps() -> None:
        rewards = Rollout().rewards
        log(count=concat([rewards[rewards >= 0], rewards[rewards > 0.08]]).count())

    for answer in (run_eager(overlaps, {}, SPEC), run_planned(overlaps, {}, SPEC)):
        assert "got sample p" in answer.error
        assert "twice" in answer.error


def test_groupby_gives_a_number_for_each_key_or_each_row_that_of_its_key():
    @flow
    def groups() -> None:
        rollout = Rollout()
        responses, rewards = rollout.responses, rollout.rewards
        by_level: dict[str, list[float]] = {}
        for sample, reward in zip(responses, rewards, strict=True):
            by_level.setdefault(str(sample.level), []).append(reward)
        means = rewards.groupby(responses.level).mean()
        assert isinstance(means, Metrics)
        assert means.items() == pytest.approx({key: np.mean(values) for key, values in by_level.items()})
        level = next(iter(by_level))
        assert float(means[int(level)]) == float(means[level])
        assert responses.groupby("level").count().items() == {key: len(values) for key, values in by_level.items()}
        assert responses.groupby("level").max(rewards).items() == {key: max(values) for key, values in by_level.items()}
        centred = rewards - rewards.groupby(responses.level).transform("mean")
        expected = [r - np.mean(by_level[str(s.level)]) for s, r in zip(responses, rewards, strict=True)]
        assert list(centred) == pytest.approx(expected)
        log(level=means[level], lengths=responses.length.groupby(responses.kind).transform("count").sum())
        with pytest.raises(TraceError, match="of whole samples: of what"):
            responses.groupby("level").mean()
        with pytest.raises(FieldError, match="have no 'lvel'"):
            responses.groupby("lvel")

    same(groups)


def test_grades_go_back_to_rows_of_the_prompts_long_after_the_program_has_dropped_those_that_it_generated_from():
    @flow
    def late() -> None:
        policy, verifier, prompts = Policy("fake"), Reward(digit_share), Dataset(ROWS)
        asked = prompts.take(2).with_columns(kind="new")
        others = asked.with_columns(level=1.0)
        grades = verifier.score(policy.generate(asked, n=2, max_new_tokens=4))
        del asked
        for _ in range(2000):
            prompts.take(1)
        log(mean=grades.back_to(others).mean())

    trace(late, {})


def test_a_judge_answers_prompts_made_of_responses_and_its_grades_go_back_to_them():
    @flow
    def judged(num_steps: int = 2) -> None:
        policy, judge, grader = Policy("fake"), Policy("fake", name="judge"), Reward(digit_share)
        prompts = Dataset(ROWS)
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(3), n=3, max_new_tokens=8)
            asked = responses.with_columns(prompt=responses.map(lambda sample: f"Is {sample.text!r} right?"), origin="judge", weight=2)
            assert asked.fields == responses.fields | {"origin", "weight"}
            verdicts = judge.generate(asked, n=2, max_new_tokens=4)
            rewards = grader.score(verdicts).back_to(responses)
            policy.update(responses, rewards)
            log(mean=rewards.mean(), same=grader.score(verdicts).mean(), weight=verdicts.weight.sum())
            with pytest.raises(TraceError, match="were not generated from them"):
                grader.score(verdicts).back_to(verdicts)

    for step, name, value in same(judged).logs:
        if name == "mean":
            assert value == pytest.approx(next(v for s, n, v in same(judged).logs if (s, n) == (step, "same")))


def test_a_prompt_that_is_no_text_is_an_error_that_names_the_sample():
    @flow
    def asks() -> None:
        rollout = Rollout()
        log(n=rollout.policy.generate(rollout.responses.with_columns(prompt=rollout.rewards), max_new_tokens=2).count())

    for answer in (run_eager(asks, {}, SPEC), run_planned(asks, {}, SPEC)):
        assert "the prompt of sample p" in answer.error
        assert "it must be a text" in answer.error
