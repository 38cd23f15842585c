"""Critics, reward models and GAE in flows: planned as eager, and the numbers those of the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_clusters import FAKES
from fake_flows import NUMBERS, length_share, ppo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import (
    AdamW,
    Critic,
    Dataset,
    Policy,
    Reward,
    RewardModel,
    Sample,
    bradley_terry,
    flow,
    gae,
    log,
    op,
    process_reward,
    steps,
)
from m2flow.algorithms.gae import gae as gae_of_arrays
from m2flow.algorithms.gae import gae_rows
from m2flow.errors import OptionError, TraceError
from m2flow.macro.critics import _last_values
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned


@op()
def penalty(sample: Sample) -> list[float]:
    return [i / 64 for i in range(sample.num_tokens)]


sizes = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 3),
        "batch": st.integers(1, 4),
        "n": st.integers(1, 3),
        "minibatch": st.integers(0, 2),
        "epochs": st.integers(1, 2),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), sizes, st.integers(0, 2**30))
def test_ppo_with_a_critic_and_a_reward_model_is_the_same_planned_and_eager(spec, options, order_seed):
    eager = run_eager(ppo, options, spec)
    assert eager.error == ""
    assert set(eager.weights) == {"policy", "reference", "critic", "judge"}
    assert run_planned(ppo, options, spec, order_seed=order_seed) == eager


def test_the_rows_of_a_reward_model_are_rewards_of_the_run():
    answer = run_eager(ppo, {"num_steps": 1}, FAKES)
    assert len({call for call, _ in answer.rewards}) == 2


def test_a_critic_learns_and_the_policy_learns_of_it():
    def weights(**changes: float) -> dict[str, str]:
        @flow
        def variant() -> None:
            policy, rule = Policy("fake"), Reward(length_share)
            critic = Critic("fake")
            for _ in steps(2):
                responses = policy.generate(Dataset(NUMBERS).take(3), max_new_tokens=9)
                values = critic.values(responses)
                estimate = gae(responses, rule.score(responses), values, lam=changes.get("lam", 0.95))
                policy.update(responses, advantages=estimate.advantages)
                critic.update(responses, returns=estimate.returns, old_values=values, clip=changes.get("clip", 0.2))

        return run_eager(variant, {}, FAKES).weights

    plain = weights()
    assert weights() == plain
    changed = weights(clip=0.5)
    assert changed["critic"] != plain["critic"]
    assert changed["policy"] != plain["policy"]
    assert weights(lam=0.5)["policy"] != plain["policy"]


def test_gae_on_handles_is_the_equation_on_generated_tokens_alone():
    found: list[tuple[float, list[float], list[float], list[float], list[bool]]] = []

    @flow
    def looks() -> None:
        policy, critic, rule = Policy("fake"), Critic("fake"), Reward(length_share)
        responses = policy.generate(Dataset(NUMBERS).take(3), max_new_tokens=9)
        rewards, values = rule.score(responses), critic.values(responses)
        estimate = gae(responses, rewards, values, kl=penalty(responses), gamma=0.9, lam=0.8)
        columns = (rewards, values, estimate.advantages, estimate.returns)
        for row, (reward, value, advantage, returned) in enumerate(zip(*columns, strict=True)):
            found.append((reward, value, advantage, returned, responses.batch().ragged("loss_mask").row(row).tolist()))

    assert run_eager(looks, {}, FAKES).error == ""
    assert len(found) == 3
    for reward, values, advantages, returns, mask in found:
        value = np.asarray(values, np.float64)[mask]
        rewards = np.array([-i / 64 for i in range(len(value))])
        rewards[-1] += reward
        after, expected = 0.0, []
        for t in reversed(range(len(value))):
            delta = rewards[t] + 0.9 * (value[t + 1] if t + 1 < len(value) else 0.0) - value[t]
            after = delta + 0.9 * 0.8 * after
            expected.append(after)
        expected.reverse()
        assert np.allclose(np.asarray(advantages)[mask], expected, atol=1e-12)
        assert np.allclose(np.asarray(returns)[mask], np.array(expected) + value, atol=1e-12)
        assert not np.asarray(advantages)[~np.array(mask)].any()


def test_text_of_a_tool_between_generated_tokens_is_no_step_of_the_episode():
    tokens, mask = Ragged.of([[5, 6, 7, 8, 9]], np.int32), Ragged.of([[False, True, False, False, True]], bool)
    values, rewards = Ragged.of([[9.0, 0.5, 9.0, 9.0, 0.25]], np.float64), np.array([1.0])
    rows = Batch(make_ids(0, 1), {"tokens": tokens, "loss_mask": mask, "values": values, "rewards": rewards})
    found = gae_rows(rows, {}, gamma=1.0, lam=0.5)
    assert found.ragged("advantages").values.tolist() == [0.0, 0.125, 0.0, 0.0, 0.75]
    assert found.ragged("returns").values.tolist() == [0.0, 0.625, 0.0, 0.0, 1.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_samples_advantages_have_the_same_bits_whatever_is_beside_it(lengths, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    counts = np.array(lengths, np.int64)
    rewards, values = rng.normal(size=(2, counts.sum()))
    whole = gae_of_arrays(rewards, values, counts, gamma=gamma, lam=lam)
    ends = np.cumsum(counts)
    for start, end in zip(ends - counts, ends, strict=True):
        alone = gae_of_arrays(rewards[start:end], values[start:end], np.array([end - start]), gamma=gamma, lam=lam)
        assert all(np.array_equal(mine, of[start:end]) for mine, of in zip(alone, whole, strict=True))


def test_the_limits_of_lambda_are_one_step_errors_and_rewards_to_go():
    rewards, values, lengths = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.25, 0.125]), np.array([3])
    advantages, returns = gae_of_arrays(rewards, values, lengths, gamma=1.0, lam=0.0)
    assert np.allclose(advantages, rewards + np.array([0.25, 0.125, 0.0]) - values)
    advantages, returns = gae_of_arrays(rewards, values, lengths, gamma=1.0, lam=1.0)
    assert np.allclose(returns, [6.0, 5.0, 3.0])


def test_numbers_that_do_not_fit_the_tokens_are_refused_with_the_sample():
    @op()
    def short(sample: Sample) -> list[float]:
        return [0.0] * (sample.num_tokens - 1)

    @flow
    def misfit() -> None:
        policy, rule = Policy("fake"), Reward(length_share)
        responses = policy.generate(Dataset(NUMBERS, shuffle=False).take(2), max_new_tokens=9)
        policy.update(responses, advantages=gae(responses, rule.score(responses), short(responses)).advantages)

    for run in (run_eager, run_planned):
        assert "gae got values with" in run(misfit, {}, FAKES).error


def traced(body) -> str:  # type: ignore[no-untyped-def]
    return str(trace(flow(body), {})[0])


def test_critics_and_reward_models_get_no_rollout_engine_where_the_trace_ends_early():
    def looks() -> None:
        policy, critic = Policy("fake"), Critic("fake")
        judge = RewardModel("fake", name="judge")
        responses = policy.generate(Dataset(NUMBERS).take(1), max_new_tokens=3)
        if float(judge.score(responses).mean()) > 0:
            policy.update(responses, advantages=critic.values(responses))

    graph, models, _ = trace(flow(looks), {})
    slots = {(slot.role, slot.kind) for worker in lower(graph, models, FAKES).workers for slot in worker.engines}
    assert {("policy", "rollout"), ("critic", "train"), ("judge", "train")} <= slots
    assert not slots & {("critic", "rollout"), ("judge", "rollout")}


def test_the_printed_graph_says_what_each_column_of_an_update_is():
    lines = str(trace(ppo, {"num_steps": 1})[0]).splitlines()
    updates = [line.split(" = ")[-1].split("  ")[0] for line in lines if ".update(" in line]
    assert updates[0].endswith("advantages=%estimate, loss='ppo_clip')")
    assert updates[1].startswith("critic.update(%responses, returns=%estimate, old_values=%")


def test_a_critic_is_neither_sampled_nor_a_reference_and_what_it_gets_is_checked():
    def wrong() -> None:
        policy, critic = Policy("fake"), Critic("fake")
        responses = policy.generate(Dataset(NUMBERS).take(1), max_new_tokens=3)
        critic.update(responses, returns=responses)

    def no_gamma() -> None:
        policy, critic = Policy("fake"), Critic("fake")
        responses = policy.generate(Dataset(NUMBERS).take(1), max_new_tokens=3)
        gae(responses, Reward(length_share).score(responses), critic.values(responses), gamma=1.5)

    with pytest.raises(TraceError, match="numbers of each sample"):
        traced(wrong)
    with pytest.raises(OptionError, match=r"gamma is 1\.5"):
        traced(no_gamma)


def test_views_of_one_result_keep_it_alive_and_lose_it_together():
    @flow
    def views() -> None:
        policy, rule, critic = Policy("fake"), Reward(length_share), Critic("fake")
        responses = policy.generate(Dataset(NUMBERS).take(2), max_new_tokens=5)
        advantages = gae(responses, rule.score(responses), critic.values(responses)).advantages
        assert isinstance(advantages.batch()["advantages"], Ragged)

    assert run_eager(views, {}, FAKES).error == ""


# ---- critics as reward models


@op()
def step_labels(sample: Sample) -> list[float]:
    """A label on each third token."""
    return [i / 16 if i % 3 == 0 else -1.0 for i in range(sample.num_tokens)]


def real(token_budget: int) -> ClusterSpec:
    train, functions = TrainSpec(token_budget=token_budget), FunctionSpec(chunk=2)
    return ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(), train=train, functions=functions)


PAIRS = [{"prompt": f"{i}{i + 3}=", "chosen": f"{i}1", "rejected": f"{i}{i}2"} for i in range(6)]


@flow
def judged(model: str = "fake", num_steps: int = 2, batch: int = 3, minibatch: int = 0) -> None:
    """A critic learns of pairs and of labelled steps, and its scores are the rewards of the policy."""
    policy = Policy(model, init="random")
    judge, pairs, prompts = Critic(policy, name="judge"), Dataset(PAIRS, name="pairs").pairs(), Dataset(NUMBERS)
    for _ in steps(num_steps):
        rows = pairs.take(batch)
        metrics = judge.update(rows, loss=bradley_terry(center=0.01), minibatch_size=minibatch or None, optimizer=AdamW(1e-3))
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=6)
        judge.update(responses, loss=process_reward(), columns={"labels": step_labels(responses)})
        rewards = judge.score(responses)
        policy.update(responses, rewards)
        log(loss=metrics["loss"], reward=rewards.mean(), pairs=judge.score(rows).mean())


sizes_of_pairs = st.fixed_dictionaries({"batch": st.integers(1, 4), "minibatch": st.integers(0, 2)})


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), sizes_of_pairs, st.integers(0, 2**30))
def test_a_reward_model_of_preferences_is_the_same_planned_and_eager(spec, options, order_seed):
    eager = run_eager(judged, options, spec)
    assert (eager.error, set(eager.weights)) == ("", {"policy", "judge"})
    assert run_planned(judged, options, spec, order_seed=order_seed) == eager


def test_the_score_of_a_response_is_the_value_of_its_last_token_under_the_mask():
    mask = Ragged.of([[False, True, True, False], [False, False], [True]], bool)
    values = Ragged.of([[9.0, 0.5, 0.25, 9.0], [9.0, 9.0], [0.125]], np.float64)
    rows = Batch(make_ids(0, 3), {"loss_mask": mask, "values": values})
    assert _last_values(rows, {}).tolist() == [0.25, 0.0, 0.125]
    assert _last_values(Batch(rows.ids, {"values": values}), {}).tolist() == [9.0, 9.0, 0.125]


def test_a_critic_of_a_real_model_learns_which_answers_are_preferred_in_any_micro_batches():
    @flow
    def preferring() -> None:
        judge, pairs = Critic("flows/models/digits", name="judge", init="random"), Dataset(PAIRS).pairs()
        for _ in steps(12):
            metrics = judge.update(pairs.take(6), loss=bradley_terry(), optimizer=AdamW(3e-3))
            log(loss=metrics["loss"], accuracy=metrics["accuracy"])
        rows = pairs.take(6)
        margin = judge.score(rows) * (2 * rows.chosen - 1)
        log(margin=margin.mean())

    runs = [run_eager(preferring, {}, real(budget), deterministic=True) for budget in (4096, 1)]
    assert [run.error for run in runs] == ["", ""]
    whole, cut = ([value for *_, value in run.logs] for run in runs)
    assert whole[0] == pytest.approx(math.log(2))  # The head starts at zero.
    assert whole[-3] < 0.3
    assert whole[-2] == pytest.approx(1.0)
    assert whole[-1] > 0.5
    assert whole == pytest.approx(cut, rel=1e-3)


def test_a_critics_update_refuses_a_loss_whose_returns_or_columns_are_missing():
    def flow_of(**options: object):
        @flow
        def missing() -> None:
            policy, critic = Policy("fake"), Critic("fake")
            responses = policy.generate(Dataset(NUMBERS).take(3), n=2, max_new_tokens=9)
            critic.update(responses, **options)

        return missing

    with pytest.raises(TraceError, match="clipped_value needs returns"):
        trace(flow_of(), {})
    with pytest.raises(TraceError, match="bradley_terry needs 'chosen'"):
        trace(flow_of(loss=bradley_terry()), {})
    with pytest.raises(TraceError, match="columns="):
        trace(flow_of(loss=process_reward(), columns=3), {})


def test_a_critics_update_takes_returns_and_old_values_from_their_own_arguments_only():
    for name in ("returns", "old_values", "values"):

        @flow
        def twice(name: str) -> None:
            policy, critic = Policy("fake"), Critic("fake")
            responses = policy.generate(Dataset(NUMBERS).take(3), n=2, max_new_tokens=9)
            rewards = Reward(length_share).score(responses)
            critic.update(responses, returns=rewards, columns={name: rewards * 2})

        with pytest.raises(OptionError, match="that name is taken"):
            trace(twice, {"name": name})
