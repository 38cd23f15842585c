"""What an update may be given besides rewards: advantages and further columns that other calls computed, and denominators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from fake_clusters import FAKES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import (
    Correction,
    Counts,
    Dataset,
    Loss,
    Policy,
    Reference,
    Reward,
    Sample,
    distill,
    distill_top_k,
    flow,
    gigpo,
    log,
    loss,
    op,
    pass_at_k,
    pass_rate_between,
    ppo_clip,
    steps,
)
from m2flow.engines.contract import Sums
from m2flow.errors import OpError, OptionError, TraceError
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.update_semantics import UpdateTally
from m2flow.recipe import BatchAdvantage, GroupAdvantage
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters, difference_of
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(8)]


def length_share(sample: Sample) -> float:
    return sample.num_tokens / 16


@op()
def by_length(sample: Sample) -> float:
    return sample.num_tokens - 5.5


@op()
def by_position(sample: Sample) -> list[float]:
    return [sample.num_tokens / 4 - i for i in range(sample.num_tokens)]


@op()
def by_token(sample: Sample) -> list[float]:
    tokens = sample["tokens"]
    assert isinstance(tokens, np.ndarray)
    return [i / 8 for i in range(len(tokens))]


def one_short(sample: Sample) -> list[float]:
    return [0.0] * (sample.num_tokens - 1)


def names(sample: Sample) -> str:
    return "p"


@loss(
    needs=["logprobs", "behaviour_logprobs", "advantages", "bonus", "teacher_logprobs"],
    denominator=lambda counts: 3.0 * counts.num_groups + counts.num_tokens,
)
def shaped(**tensors: object) -> object:
    raise AssertionError("the fake reads the declaration alone")


@flow
def columns(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1, kind: int = 0) -> None:
    policy, teacher, verifier = Policy("fake"), Reference("fake", name="teacher"), Reward(length_share)
    prompts = Dataset(ROWS)
    advantages = (by_length, by_position, by_token)[kind]
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards = verifier.score(responses) if kind != 1 else None
        metrics = policy.update(
            responses,
            rewards,
            advantages=advantages(responses),
            loss=shaped,
            columns={"bonus": by_token(responses), "teacher_logprobs": teacher.logprobs(responses)},
            minibatch_size=minibatch or None,
            epochs=epochs,
        )
        now = policy.logprobs(responses)
        policy.update(responses, advantages=by_length(responses), loss=ppo_clip(kl_coef=0.1), reference=now)
        policy.update(responses, loss=distill(), columns={"teacher_logprobs": teacher.logprobs(responses)})
        likeliest = teacher.logprobs(responses, top_k=2 + kind)
        policy.update(responses, loss=distill_top_k(), reference=likeliest)
        by_place = by_length(responses)
        policy.update(responses, advantages=by_place, loss=ppo_clip(kl_coef=0.1, kl="top_k"), reference=likeliest)
        log(tokens=metrics["num_tokens"], seen=float("reward" in metrics.items()))


@pytest.mark.parametrize("chosen", [distill_top_k(), ppo_clip(kl_coef=0.1, kl="top_k")])
def test_a_loss_over_likeliest_tokens_needs_a_reference_that_has_them(chosen: Loss) -> None:
    def program(top_k: int = 2) -> None:
        policy, reference = Policy("fake"), Reference("fake")
        responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        given = reference.logprobs(responses, top_k=top_k) if top_k else reference
        policy.update(responses, Reward(length_share).score(responses), loss=chosen, reference=given)

    assert "top_k=2" in str(trace(flow(program), {})[0])
    with pytest.raises(TraceError, match="needs the reference's likeliest tokens") as raised:
        trace(flow(program), {"top_k": 0})
    assert "reference.logprobs(responses, top_k=16)" in str(raised.value)


sizes = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 2),
        "batch": st.integers(1, 4),
        "n": st.integers(1, 3),
        "minibatch": st.integers(0, 2),
        "epochs": st.integers(1, 2),
        "kind": st.integers(0, 2),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), sizes, st.integers(0, 2**30))
def test_updates_on_columns_of_other_calls_are_the_same_planned_and_eager(spec, options, order_seed):
    eager = run_eager(columns, options, spec)
    assert eager.error == ""
    assert run_planned(columns, options, spec, order_seed=order_seed) == eager


def test_a_denominator_of_counts_gives_the_same_weights_under_every_token_budget():
    answers = [
        run_eager(columns, {"minibatch": 2}, ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=train))
        for train in (TrainSpec(engine="fake", token_budget=budget) for budget in (1, 30, 4096))
    ]
    assert answers[0].error == ""
    assert answers[0] == answers[1] == answers[2]


def test_each_form_of_advantages_counts_and_reward_is_reported_only_where_rewards_were_given():
    answers = [run_eager(columns, {"num_steps": 1, "kind": kind}, FAKES) for kind in (0, 1, 2)]
    assert [answer.error for answer in answers] == [""] * 3
    assert len({answer.weights["policy"] for answer in answers}) == 3
    assert [{name: value for _, name, value in answer.logs}["seen"] for answer in answers] == [1.0, 0.0, 1.0]


def test_one_number_a_generated_token_and_one_a_token_are_the_same_where_tokens_are_generated():
    def given_for(masked_only: bool) -> str:
        @op()
        def numbers(sample: Sample) -> list[float]:
            mask = np.asarray(sample["loss_mask"])
            values = np.cumsum(mask) * mask
            return [float(v) for v in (values[mask] if masked_only else values)]

        @flow
        def one_update() -> None:
            policy = Policy("fake")
            responses = policy.generate(Dataset(ROWS).take(4), max_new_tokens=9)
            policy.update(responses, advantages=numbers(responses))

        answer = run_eager(one_update, {}, FAKES)
        assert answer.error == ""
        return answer.weights["policy"]

    assert given_for(True) == given_for(False)


@pytest.mark.parametrize(
    ("function", "said"),
    [(one_short, "numbers for sample p0/0, which has"), (names, "got advantages with 'p' for sample p0/0")],
    ids=["too few numbers", "texts"],
)
def test_advantages_that_fit_no_token_are_refused_with_the_sample(function, said):
    @flow
    def misfit() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS, shuffle=False).take(2), max_new_tokens=9)
        policy.update(responses, advantages=op()(function)(responses))

    assert said in run_eager(misfit, {}, FAKES).error
    assert said in run_planned(misfit, {}, FAKES).error


def test_rewards_may_come_from_any_call_that_gives_a_number_a_sample():
    def weights(wrap: bool) -> str:
        @flow
        def rewarded() -> None:
            policy = Policy("fake")
            responses = policy.generate(Dataset(ROWS).take(3), n=2, max_new_tokens=9)
            policy.update(responses, op()(length_share)(responses) if wrap else Reward(length_share).score(responses))

        answer = run_eager(rewarded, {}, FAKES)
        assert answer.error == ""
        return answer.weights["policy"]

    assert weights(True) == weights(False)


def test_a_reward_that_is_no_finite_number_is_refused_by_the_update():
    @flow
    def infinite() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS).take(3), n=2, max_new_tokens=9)
        policy.update(responses, op()(lambda sample: float("inf"))(responses))

    assert "rewards must be finite" in run_eager(infinite, {}, FAKES).error


@op(granularity="batch", per_sample=True)
def above_the_mean(lengths: list[float]) -> list[float]:
    return [length - sum(lengths) / len(lengths) for length in lengths]


@op(granularity="group")
def above_the_groups(lengths: list[float]) -> list[float]:
    return [length - sum(lengths) / len(lengths) for length in lengths]


@flow
def whole_batches(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, kind: int = 0, is_filtered: bool = False) -> None:
    policy, verifier = Policy("fake"), Reward(length_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        if is_filtered:
            responses = responses.filter(lambda sample: sample.num_tokens > 4)
        rewards = verifier.score(responses)
        own = (above_the_mean(responses.length), above_the_groups(rewards), pass_at_k(1), gigpo())
        advantages = (*get_args(BatchAdvantage), *get_args(GroupAdvantage)[3:], *own)[kind]
        judged = rewards > 0.4 if advantages is own[2] else rewards
        policy.update(responses, judged, advantages=advantages, minibatch_size=minibatch or None)


KINDS = len(get_args(BatchAdvantage)) + len(get_args(GroupAdvantage)[3:]) + 4


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), st.integers(0, KINDS - 1), st.integers(0, 2), st.booleans(), st.integers(0, 2**30))
def test_every_advantage_by_name_or_of_an_op_on_the_batch_is_the_same_planned_and_eager(spec, kind, minibatch, is_filtered, order_seed):
    options = {"kind": kind, "minibatch": minibatch, "is_filtered": is_filtered}
    eager = run_eager(whole_batches, options, spec)
    assert eager.error == "" or is_filtered
    assert run_planned(whole_batches, options, spec, order_seed=order_seed) == eager


@flow
def best_of_three(num_steps: int = 2, n: int = 4) -> None:
    """Some groups have lost samples, down to fewer than three."""
    policy, verifier = Policy("fake"), Reward(length_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=n, max_new_tokens=12)
        responses = responses.filter(lambda sample: sample.num_tokens % 3 > 0)
        log(left=responses.length.count())
        policy.update(responses, verifier.score(responses) > 0.4, advantages=pass_at_k(3))


def test_groups_that_have_lost_samples_end_no_run_and_groups_that_never_had_enough_are_refused():
    eager = run_eager(best_of_three, {}, FAKES)
    assert eager.error == ""
    assert run_planned(best_of_three, {}, FAKES, order_seed=3) == eager
    with pytest.raises(TraceError, match=r"pass_at_k\(k=3\)' compares the responses to one prompt, and .* have 2 for each"):
        trace(best_of_three, {"n": 2})


def test_each_advantage_trains_other_weights():
    answers = [run_eager(whole_batches, {"kind": kind}, FAKES) for kind in range(KINDS)]
    assert [answer.error for answer in answers] == [""] * KINDS
    assert len({answer.weights["policy"] for answer in answers}) >= KINDS - 1  # `dr_grpo` by the user's op is another's sibling.


def test_advantages_of_the_whole_batch_are_a_call_that_waits_for_it():
    lines = str(trace(whole_batches, {"kind": 0}, steps=1)[0]).splitlines()
    assert [line for line in lines if "reinforce_pp(%responses, %rewards)" in line and "@batch" in line]
    assert [line for line in lines if "policy.update" in line and "advantages=%" in line]
    assert "advantages='pass_at_k(k=1)'" in str(trace(whole_batches, {"kind": KINDS - 2}, steps=1)[0])


def test_an_op_on_the_batch_that_gives_too_few_numbers_is_refused():
    @op(granularity="batch", per_sample=True)
    def short(samples: list[Sample]) -> list[float]:
        return [1.0]

    @flow
    def misfit() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS, shuffle=False).take(2), max_new_tokens=9)
        policy.update(responses, advantages=short(responses))

    for answer in (run_eager(misfit, {}, FAKES), run_planned(misfit, {}, FAKES)):
        assert "short returned [1.0] for the batch p0/0 to p1/0" in answer.error
    with pytest.raises(OptionError, match="per_sample"):
        op(granularity="group", per_sample=True)


@flow(staleness=1)
def corrected(num_steps: int = 2, n: int = 2, minibatch: int = 0, level: str = "token", old: float = 2.0) -> None:
    policy, verifier = Policy("fake"), Reward(length_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=n, max_new_tokens=12)
        correction = Correction(level=level, upper=2.0 if old == 2.0 else (2.0, old))  # type: ignore[arg-type]
        policy.update(
            responses,
            verifier.score(responses),
            minibatch_size=minibatch or None,
            correction=correction,
            loss=ppo_clip(denominator="groups"),
        )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_is_a_forward_pass_of_the_plan_and_the_same_planned_and_eager(level):
    lines = str(trace(corrected, {"level": level}, steps=1)[0]).splitlines()
    assert [line for line in lines if "policy.logprobs(%responses)" in line and "reads policy.weights@0" in line]
    assert [line for line in lines if "proximal_logprobs=%" in line and f"correction='{level}'" in line]
    for minibatch, old in itertools.product((0, 2), (2.0, 1.5)):
        options = {"level": level, "minibatch": minibatch, "old": old}
        planned = run_planned(corrected, options, FAKES)
        assert planned.error == ""
        assert difference_of(planned, run_eager(corrected, options, FAKES, decisions=planned.decisions or None)) is None


def test_a_greedy_baseline_is_arithmetic_on_rewards_of_the_prompts():
    @flow
    def remax() -> None:
        policy, verifier = Policy("fake"), Reward(length_share)
        prompts = Dataset(ROWS).take(3)
        greedy = verifier.score(policy.generate(prompts, max_new_tokens=9, temperature=0))
        responses = policy.generate(prompts.with_columns(baseline=greedy.back_to(prompts)), n=2, max_new_tokens=9)
        policy.update(responses, advantages=verifier.score(responses) - responses.baseline)

    answer = run_eager(remax, {}, FAKES)
    assert answer.error == ""
    assert run_planned(remax, {}, FAKES) == answer


def test_a_group_passes_by_its_share_of_right_answers():
    keep = pass_rate_between(0.5, 0.75)
    assert [keep([{"reward": 1.0}] * right + [{"reward": 0.0}] * (4 - right)) for right in range(5)] == [False, False, True, True, False]
    with pytest.raises(OptionError, match="no group passes"):
        pass_rate_between(0.9, 0.1)


def traced(body) -> str:  # type: ignore[no-untyped-def]
    return str(trace(flow(body), {})[0])


def test_the_current_logprobs_read_the_weights_as_they_are_at_that_line():
    def body() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS).take(1), max_new_tokens=3)
        first = policy.logprobs(responses)
        policy.update(responses, advantages=by_length(responses), reference=first)
        policy.logprobs(responses)

    lines = [line for line in traced(body).splitlines() if "policy.logprobs" in line]
    assert [line.rsplit("reads ")[-1] for line in lines] == ["policy.weights@0", "policy.weights@1"]


def test_columns_with_a_name_that_is_taken_and_advantages_that_are_none_are_refused():
    def taken() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS).take(1), max_new_tokens=3)
        policy.update(responses, columns={"logprobs": by_length(responses)})

    def none() -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset(ROWS).take(1), max_new_tokens=3)
        policy.update(responses, advantages=responses)

    with pytest.raises(OptionError, match="'logprobs'"):
        traced(taken)
    with pytest.raises(TraceError, match="needs numbers of each sample"):
        traced(none)


def test_a_loss_that_needs_what_nobody_has_is_refused_with_what_there_is():
    @loss(needs=["logprobs", "advantages", "bonus"])
    def needy(**tensors: object) -> None: ...

    @loss(needs=["logprobs", "advantages", "versions", "kv_stale"])
    def fresh(**tensors: object) -> None: ...

    @loss(needs=["values", "advantages"])
    def critical(**tensors: object) -> None: ...

    def body_of(declared: Loss, **more: str) -> None:
        policy = Policy("fake")
        responses = policy.generate(Dataset([row | more for row in ROWS]).take(1), max_new_tokens=3)
        policy.update(responses, advantages=by_length(responses), loss=declared)

    with pytest.raises(TraceError, match=r"needs 'bonus', .*; the samples have finish"):
        traced(lambda: body_of(needy))
    traced(lambda: body_of(needy, bonus="a column of the dataset's rows"))
    traced(lambda: body_of(fresh))
    with pytest.raises(TraceError, match="needs 'values', which are a critic's"):
        traced(lambda: body_of(critical))


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("rewards", r"columns=\{'own_rewards': \.\.\.\}.*'rewards' is taken"),
        ("reward", r"columns=\{'own_reward': \.\.\.\}.*'reward' is taken"),
        ("reference", "'reference_logprobs'"),
    ],
)
def test_a_loss_that_needs_rewards_is_told_of_a_name_that_an_update_can_give_them_by(need, said):
    @loss(needs=["logprobs", need])
    def by_reward(logprobs, **more):
        return -logprobs * more[need]

    @flow
    def updates() -> None:
        policy, reward = Policy("fake"), Reward(length_share)
        responses = policy.generate(Dataset(ROWS).take(4), n=2, max_new_tokens=8)
        policy.update(responses, reward.score(responses), loss=by_reward, reference=Reference(policy))

    with pytest.raises(TraceError, match=f"the loss by_reward needs '{need}', which neither .*(?s:.*){said}"):
        trace(updates, {})


def test_columns_of_other_samples_are_refused():
    def other() -> None:
        policy, prompts = Policy("fake"), Dataset(ROWS)
        one, two = (policy.generate(prompts.take(1), max_new_tokens=3) for _ in range(2))
        policy.update(one, advantages=by_length(two))

    with pytest.raises(TraceError, match="advantages of others"):
        traced(other)


def tally(sizes: Sequence[Sequence[int]]) -> UpdateTally:
    """Micro-batches of whole groups of 2; each number is the tokens of one group."""
    counted = UpdateTally()
    ids = make_ids(0, sum(map(len, sizes)), 2)
    first = 0
    for groups in sizes:
        rows = Batch(ids[2 * first : 2 * (first + len(groups))])
        counted.add(Sums(len(rows), sum(groups), 0, {"loss": 1.0}), rows, epoch=0)
        first += len(groups)
    return counted


def test_a_denominator_is_given_the_counts_of_the_whole_mini_batch_however_it_was_cut():
    seen: list[Counts] = []

    def denominator(counts: Counts) -> float:
        seen.append(counts)
        return 100.0 * counts.num_groups

    declared = Loss("mine", "", (), denominator)
    for sizes in ([[3, 4, 5]], [[3], [4], [5]], [[3, 4], [5]]):
        assert tally(sizes).denominator(declared) == 300.0
    assert set(seen) == {Counts(num_tokens=12, num_sequences=6, num_groups=3)}


def test_groups_without_advantage_are_counted_once_however_they_come():
    ids = make_ids(0, 4, 2)
    numbers = np.array([0.0, 1e-17, 1.0, -1.0, 0.0, 0.0, 0.0, 2.0])
    by_token = Ragged(np.repeat(numbers, 3), np.arange(0, 25, 3))
    for column in (numbers, by_token):
        whole = Batch(ids, {"advantages": column})
        for cuts in ([ids], [ids[:3], ids[3:]], [ids[4:], ids[:4]]):
            counted = UpdateTally()
            for epoch in range(2):
                for part in cuts:
                    counted.add(Sums(len(part), 3 * len(part), 0, {}), whole.select(part), epoch=epoch)
            assert counted.metrics()["groups_without_advantage"] == 0.5
    assert "groups_without_advantage" not in tally([[3, 4]]).metrics()


def test_counts_start_anew_with_each_mini_batch():
    counted = tally([[3, 4]])
    declared = Loss("mine", "", (), lambda counts: counts.num_groups * 100.0 + counts.num_tokens)
    assert counted.denominator(declared) == 207.0
    counted.stepped({}, 207.0)
    rows = Batch(make_ids(1, 1, 2))
    counted.add(Sums(2, 5, 0, {}), rows, epoch=0)
    assert counted.denominator(declared) == 105.0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_denominator_that_is_no_positive_number_is_refused(bad):
    with pytest.raises(OpError, match="the denominator of the loss mine is "):
        tally([[3]]).denominator(Loss("mine", "", (), lambda counts: bad))


def test_a_denominator_that_raises_is_named():
    with pytest.raises(OpError, match="denominator of the loss mine raised ZeroDivisionError"):
        tally([[3]]).denominator(Loss("mine", "", (), lambda counts: 1 / 0))


def test_a_declaration_of_a_loss_is_checked():
    with pytest.raises(OptionError, match=r"misnamed can't be called with what it needs: .*'advantage'") as refused:

        @loss(needs=["logprobs", "advantages"])
        def misnamed(logprobs: object, advantage: object) -> object:
            return advantage

    assert "def misnamed(logprobs, advantages)" in refused.value.now
    with pytest.raises(OptionError, match="denominator='words'"):
        loss(needs=["logprobs"], denominator="words")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a list of names"):
        loss(needs="logprobs")
