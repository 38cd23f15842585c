"""A run whose trainer is `megatron` in a layout, of a mixture where experts are split. `test_megatron_runs.py` starts it in an interpreter
with megatron-core; the run's workers know the engine as one that another package registers."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_on_cpu import registered
from safetensors.numpy import load_file
from tiny_models import save_config

from m2flow import AdamW, Critic, Dataset, Lora, Policy, Reference, Reward, Sample, flow, gae, log, steps
from m2flow.engines import registry
from m2flow.observe.store import read_spans
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec

DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"
LAYOUT: dict[str, Any] = json.loads(os.environ["M2FLOW_TEST_LAYOUT"])
RANKS = int(os.environ["M2FLOW_TEST_RANKS"])
IS_MIXTURE = "ep" in LAYOUT
"""Experts decode with other rounding in other company: from the second step on the samples of a run with them may be others."""
STEP = AdamW(1e-2, eps=1e-3)


def small_digits(sample: Sample) -> float:
    return sum(digit in "01234" for digit in str(sample.text)) / 8


@flow
def prefers_small_digits(path: str, num_steps: int = 5) -> None:
    policy, verifier = Policy(path, init="random"), Reward(small_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=8)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, optimizer=STEP)
        log(reward=rewards.mean())


@flow
def prefers_small_digits_with_a_critic(path: str, num_steps: int = 3) -> None:
    policy, verifier = Policy(path, init="random"), Reward(small_digits)
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


def run(wanted: Any, path: str, runs_dir: Path, train: TrainSpec, *, eager: bool) -> tuple[Summary, dict[str, list[float]]]:
    """Also what was logged, and what updates said: by name, in order."""
    weights = WeightsSpec(probe="always")
    spec = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(threads=1), train=train, weights=weights)
    settings = RunSettings(runs_dir=str(runs_dir), deterministic=not IS_MIXTURE, eager=eager)
    summary = Run(wanted, {"path": path}, spec, settings).execute()
    said: dict[str, list[float]] = {}
    for line in (Path(summary.run_dir) / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line)["values"].items():
            said.setdefault(name, []).append(value)
    return summary, said


def check_same(found: dict[str, list[float]], expected: dict[str, list[float]], names: Sequence[str]) -> None:
    """Of all steps; of a mixture, of the first, whose samples are of the same weights."""
    for name in names:
        assert len(found[name]) == len(expected[name]) >= 2
        count, bound = (1, 1e-3) if IS_MIXTURE else (len(found[name]), 1e-4)
        np.testing.assert_allclose(found[name][:count], expected[name][:count], rtol=bound, atol=1e-5, err_msg=name)


def final(summary: Summary, role: str) -> dict[str, Any]:
    """The weights that a run ended with."""
    return load_file(Path(summary.run_dir) / "checkpoints" / "final" / role / "model.safetensors")


def check_same_end(spread: Summary, alone: Summary, role: str) -> None:
    if IS_MIXTURE:
        return
    assert spread.samples_sha256 == alone.samples_sha256
    weights = [final(one, role) for one in (spread, alone)]
    assert max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[1]) < 1e-5


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSpec:
    (tmp_path / "site").mkdir()
    for name, value in registered(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    registry._registered.cache_clear()
    return TrainSpec(engine="megatron-cpu", ranks=RANKS, threads=1, options=LAYOUT, token_budget=400)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A model of digits; with experts, where the layout splits them."""
    if not IS_MIXTURE:
        return str(DIGITS)
    sizes = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32, "initializer_range": 0.02}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    return save_config("Qwen3Moe", tmp_path / "mixture", **sizes, **experts)


def test_a_policy_and_its_critic_are_trained_in_one_worker_as_with_the_embedded_trainer(
    tmp_path: Path, path: str, train: TrainSpec
) -> None:
    spread, found = run(prefers_small_digits_with_a_critic, path, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits_with_a_critic, path, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    check_same(found, expected, ("reward", "value_loss", "kl", "loss", "grad_norm"))
    assert found["value_loss"][-1] < found["value_loss"][0]
    check_same_end(spread, alone, "critic")
    assert np.abs(final(spread, "critic")["score.weight"]).max() > 1e-4


@flow
def prefers_small_digits_with_adapters(path: str, num_steps: int = 2) -> None:
    policy, verifier = Policy(path, init="random", lora=Lora(rank=8, alpha=16)), Reward(small_digits)
    reference = Reference(policy)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8 * num_steps)], shuffle=False)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), n=2, max_new_tokens=8)
        rewards = verifier.score(responses)
        log(reward=rewards.mean(), kl=(responses.logprobs - reference.logprobs(responses)).mean())
        policy.update(responses, rewards, optimizer=STEP)


@pytest.mark.skipif(IS_MIXTURE, reason="of models without experts")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_adapters_are_trained_and_sent_as_with_the_embedded_trainer(tmp_path: Path, path: str, train: TrainSpec) -> None:
    spread, found = run(prefers_small_digits_with_adapters, path, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits_with_adapters, path, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    check_same(found, expected, ("reward", "kl", "loss", "grad_norm", "rollout_diff/max"))
    assert spread.samples_sha256 == alone.samples_sha256
    assert abs(expected["kl"][-1]) > 1e-4
    adapters = [
        load_file(next((Path(one.run_dir) / "checkpoints" / "final").rglob("adapter_model.safetensors"))) for one in (spread, alone)
    ]
    assert max(float(np.abs(adapters[0][name] - adapters[1][name]).max()) for name in adapters[1]) < 1e-5


def test_a_policy_learns_and_as_with_the_embedded_trainer(tmp_path: Path, path: str, train: TrainSpec) -> None:
    spread, found = run(prefers_small_digits, path, tmp_path / "spread", train, eager=False)
    alone, expected = run(prefers_small_digits, path, tmp_path / "alone", TrainSpec(token_budget=400), eager=True)
    check_same(found, expected, ("reward", "loss", "grad_norm", "rollout_diff/max"))
    assert np.mean(found["reward"][-2:]) > np.mean(found["reward"][:2]) + 0.3
    check_same_end(spread, alone, "policy")
    spans = read_spans(Path(spread.run_dir))
    sent = [span.attributes["rank_bytes"] for span in spans if span.name == "weights.publish"]
    proved = [span.attributes["version"] for span in spans if span.name == "rollout.probe"]
    assert [len(of_ranks) for of_ranks in sent if isinstance(of_ranks, list)] == [RANKS] * len(sent)
    assert len(set(proved)) == len(sent) >= 4, "each rank sends what it holds, and each version is probed"
