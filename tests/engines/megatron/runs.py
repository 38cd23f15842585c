"""A run whose trainer is `megatron` over tensor ranks and stages. `test_megatron.py` starts it in an interpreter with
megatron-core; the run's workers know the engine as one that another package registers."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_on_cpu import registered
from safetensors.numpy import load_file

from m2flow import AdamW, Critic, Dataset, Lora, Policy, Reference, Reward, Sample, flow, gae, log, steps
from m2flow.engines import registry
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec

DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"
STEP = AdamW(1e-2, eps=1e-3)


def small_digits(sample: Sample) -> float:
    return sum(digit in "01234" for digit in str(sample.text)) / 8


@flow
def prefers_small_digits(num_steps: int = 5) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(small_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=8)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, optimizer=STEP)
        log(reward=rewards.mean())


@flow
def prefers_small_digits_with_a_critic(num_steps: int = 3) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(small_digits)
    reference, critic = Reference(policy), Critic(policy)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=2, max_new_tokens=8)
        rewards, values = verifier.score(responses), critic.values(responses)
        kl = responses.logprobs - reference.logprobs(responses)
        estimate = gae(responses, rewards, values, kl=0.1 * kl, lam=0.95)
        policy.update(responses, rewards, advantages=estimate.advantages, optimizer=STEP)
        metrics = critic.update(responses, returns=estimate.returns, old_values=values, optimizer=STEP, epochs=2, minibatch_size=4)
        log(reward=rewards.mean(), value_loss=metrics["loss"], kl=kl.mean())


def run(wanted: Any, runs_dir: Path, train: TrainSpec, *, eager: bool) -> tuple[Summary, dict[str, list[float]]]:
    """Also what was logged, and what updates said: by name, in order."""
    spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(threads=1), train=train)
    settings = RunSettings(runs_dir=str(runs_dir), deterministic=True, eager=eager)
    summary = Run(wanted, {}, spec, settings).execute()
    said: dict[str, list[float]] = {}
    for line in (Path(summary.run_dir) / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line)["values"].items():
            said.setdefault(name, []).append(value)
    return summary, said


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSpec:
    (tmp_path / "site").mkdir()
    for name, value in registered(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    registry._registered.cache_clear()
    layout = json.loads(os.environ["M2FLOW_TEST_LAYOUT"])
    return TrainSpec(engine="megatron-cpu", ranks=int(os.environ["M2FLOW_TEST_RANKS"]), threads=1, options=layout, token_budget=400)


def test_a_policy_and_its_critic_are_trained_in_one_worker_as_with_the_embedded_trainer(tmp_path: Path, train: TrainSpec) -> None:
    spread, found = run(prefers_small_digits_with_a_critic, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits_with_a_critic, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    for name in ("reward", "value_loss", "kl", "loss", "grad_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert found["value_loss"][-1] < found["value_loss"][0]
    assert spread.samples_sha256 == alone.samples_sha256
    weights = [load_file(Path(one.run_dir) / "checkpoints" / "final" / "critic" / "model.safetensors") for one in (spread, alone)]
    assert max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[1]) < 1e-5
    assert np.abs(weights[0]["score.weight"]).max() > 1e-4


@flow
def prefers_small_digits_with_adapters(num_steps: int = 2) -> None:
    policy, verifier = Policy(DIGITS, init="random", lora=Lora(rank=8, alpha=16)), Reward(small_digits)
    reference = Reference(policy)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=2, max_new_tokens=8)
        rewards = verifier.score(responses)
        log(reward=rewards.mean(), kl=(responses.logprobs - reference.logprobs(responses)).mean())
        policy.update(responses, rewards, optimizer=STEP)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_adapters_are_trained_and_sent_as_with_the_embedded_trainer(tmp_path: Path, train: TrainSpec) -> None:
    spread, found = run(prefers_small_digits_with_adapters, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits_with_adapters, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    for name in ("reward", "kl", "loss", "grad_norm", "rollout_diff/max"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert spread.samples_sha256 == alone.samples_sha256
    assert abs(expected["kl"][-1]) > 1e-4
    adapters = [
        load_file(next((Path(one.run_dir) / "checkpoints" / "final").rglob("adapter_model.safetensors"))) for one in (spread, alone)
    ]
    assert max(float(np.abs(adapters[0][name] - adapters[1][name]).max()) for name in adapters[1]) < 1e-5


def test_a_policy_learns_and_as_with_the_embedded_trainer(tmp_path: Path, train: TrainSpec) -> None:
    spread, found = run(prefers_small_digits, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    for name in ("reward", "loss", "grad_norm", "rollout_diff/max"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.mean(found["reward"][-2:]) > np.mean(found["reward"][:2]) + 0.3
    assert spread.samples_sha256 == alone.samples_sha256
    weights = [load_file(Path(one.run_dir) / "checkpoints" / "final" / "policy" / "model.safetensors") for one in (spread, alone)]
    assert max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[1]) < 1e-5
