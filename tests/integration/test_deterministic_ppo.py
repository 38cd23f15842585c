"""PPO on the embedded engines with `deterministic=True`: critic, reward model, reference and GAE give the same bits under every plan."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from deterministic_runs import PROMPTS, ppo
from safetensors.numpy import load_file
from tiny_models import DIGITS

from m2flow import AdamW, Critic, Dataset, Policy, Sample, flow, op
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned


def spec(placement: str, workers: int = 1, *, max_running: int = 64, chunk: int = 64) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,
        device="cpu",
        cores=2,
        rollout=RolloutSpec(workers=workers, max_running=max_running),
        train=TrainSpec(token_budget=30),
        functions=FunctionSpec(chunk=chunk),
    )


@functools.cache
def eager() -> Answer:
    return run_eager(ppo, {}, spec("split"), deterministic=True)


@pytest.mark.parametrize(
    "cluster", [spec("time-shared"), spec("split", 2, max_running=1, chunk=1)], ids=lambda c: f"{c.placement}-{c.rollout.workers}"
)
def test_deterministic_ppo_is_the_eager_one_bit_by_bit(cluster):
    expected = eager()
    assert expected.error == ""
    assert len(set(expected.rewards.values())) > 2
    assert len(set(expected.weights.values())) == 4
    assert run_planned(ppo, {}, cluster, order_seed=3, deterministic=True) == expected


def test_a_critic_of_a_policy_starts_with_its_body_and_expects_nothing(tmp_path):
    @flow
    def copied() -> None:
        policy = Policy(DIGITS, init="random", optimizer=AdamW(1e-2))
        responses = policy.generate(Dataset(PROMPTS).take(2), n=2, max_new_tokens=4)
        policy.update(responses, advantages=responses_length(responses))
        critic = Critic(policy)
        assert not any(any(row) for row in critic.values(responses))

    assert run_eager(copied, {}, spec("split"), save_to=tmp_path).error == ""
    policy, critic = (load_file(tmp_path / role / "model.safetensors") for role in ("policy", "critic"))
    body = [name for name in policy if name.startswith("model.")]
    assert len(body) > 10
    assert all(np.array_equal(policy[name], critic[name]) for name in body)


@op()
def responses_length(sample: Sample) -> float:
    return sample.num_tokens - 2.5
