"""The embedded engines with `deterministic=True`: eager and every plan give the same bits; without it, nearly the same numbers.

Bits are equal for equal token budgets: the budget is part of the arithmetic, since it says which samples are summed together. A run
has the same for all specs of 2,048 tokens or more (`ClusterSpec.with_equal_micro_batches`).
"""

import functools
from pathlib import Path

import numpy as np
import pytest
from deterministic_runs import PROMPTS, digits_seen, embedded_cluster, sorts
from safetensors.numpy import load_file
from tiny_models import DIGITS

from m2flow import AdamW, Dataset, Policy, Reference, Reward, flow, steps
from m2flow.runner.run import Run
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, RunSettings, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned


@flow(staleness=2)
def sorts_behind() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset(PROMPTS, shuffle=False)
    for _ in steps(4):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3), minibatch_size=2)


@flow(staleness=2)
def sorts_on() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset(PROMPTS, shuffle=False)
    for step in steps(3):
        # Later turns are longer, so that what the first one leaves is not done at once.
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=24 + step, oversample=1.5, late="carry")
        metrics = policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3), minibatch_size=2)
        float(metrics["loss"])


@flow(staleness=2)
def sorts_on_among_few() -> None:
    """As `sorts_on`, with tokens drawn from the likeliest, which the trainer then goes by."""
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset(PROMPTS, shuffle=False)
    for step in steps(3):
        longest = 24 + step
        responses = policy.generate(
            prompts.take(3), n=3, max_new_tokens=longest, oversample=1.5, late="carry", top_p=0.9, sampling_mask=True
        )
        metrics = policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3), minibatch_size=2)
        float(metrics["loss"])


@flow
def untrained() -> None:
    """The same model before its first step: a copy is what makes a trainer hold it."""
    policy = Policy(DIGITS, init="random")
    Reference(policy)
    policy.generate(Dataset(PROMPTS).take(1), max_new_tokens=1)


@functools.cache
def eager(token_budget: int) -> Answer:
    return run_eager(sorts, {}, embedded_cluster("split", token_budget=token_budget), deterministic=True)


@pytest.mark.parametrize(
    "cluster",
    [
        embedded_cluster("time-shared"),
        embedded_cluster("time-shared", 3, max_running=2),
        embedded_cluster("split", max_running=3, chunk=1),
        embedded_cluster("split", 3, max_running=1),
        embedded_cluster("split", token_budget=4096),
    ],
    ids=lambda c: f"{c.placement}-{c.rollout.workers}-{c.rollout.max_running}-{c.train.token_budget}",
)
@pytest.mark.parametrize("order_seed", [0, 1])
def test_a_deterministic_planned_run_is_the_eager_one_bit_by_bit(cluster, order_seed):
    expected = eager(cluster.train.token_budget)
    assert expected.error == ""
    assert len(expected.samples) == 12
    assert len(set(expected.rewards.values())) > 2
    assert run_planned(sorts, {}, cluster, order_seed=order_seed, deterministic=True) == expected


def test_another_budget_is_another_arithmetic_and_another_seed_another_run():
    assert eager(30).samples.keys() == eager(4096).samples.keys()
    other = run_eager(sorts, {}, embedded_cluster("split"), seed=1, deterministic=True)
    assert other.samples != eager(30).samples


TOLERANCE = 1e-4
"""Norm of the difference over the norm of the change that training made, after four optimiser steps on equal samples."""


@pytest.mark.parametrize(
    "cluster",
    [embedded_cluster("time-shared", 3, token_budget=4096), embedded_cluster("split", max_running=3, chunk=1)],
    ids=["time-shared", "split"],
)
def test_without_the_flag_weights_agree_within_the_stated_tolerance(cluster, tmp_path):
    expected = run_eager(sorts, {}, embedded_cluster("split", token_budget=4096), save_to=tmp_path / "eager")
    planned = run_planned(sorts, {}, cluster, order_seed=5, save_to=tmp_path / "planned")
    assert planned.samples == expected.samples
    assert planned.rewards == expected.rewards
    run_eager(untrained, {}, embedded_cluster("split"), save_to=tmp_path / "start")
    start, theirs, ours = (weights(tmp_path / name / "policy") for name in ("start", "eager", "planned"))
    changed = np.linalg.norm(theirs - start)
    assert changed > 0
    assert np.linalg.norm(ours - theirs) <= TOLERANCE * changed


def weights(directory: Path) -> np.ndarray:
    """All of a model's weights, one after the other."""
    tensors = load_file(directory / "model.safetensors")
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in sorted(tensors)])


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_a_run_with_staleness_equals_the_eager_one_that_is_given_its_record(placement):
    cluster = embedded_cluster(placement, 2, max_running=2)
    planned = run_planned(sorts_behind, {}, cluster, deterministic=True)
    assert len({decision.oldest for decision in planned.decisions.values()}) > 1
    assert run_eager(sorts_behind, {}, cluster, deterministic=True, decisions=planned.decisions) == planned


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize("flow", [sorts_on, sorts_on_among_few], ids=lambda one: one.name)
def test_a_run_that_carries_equals_the_eager_one_that_is_given_its_record(flow, placement):
    """Samples that go on with new weights read their tokens again, through the same shapes."""
    cluster = embedded_cluster(placement, 2, max_running=64)
    planned = run_planned(flow, {}, cluster, deterministic=True, order_seed=1)
    assert any(decision.call != SampleId.unpack(packed).call for packed, decision in planned.decisions.items())
    # Where rollout has workers of its own, they go on with what they hold while the new weights are published.
    assert placement == "split" or any(len(decision.version_spans) > 1 for decision in planned.decisions.values())
    assert planned.error == ""
    assert run_eager(flow, {}, cluster, deterministic=True, decisions=planned.decisions) == planned


@pytest.mark.parametrize(("given", "used"), [(8192, 2048), (2048, 2048), (512, 512)])
def test_a_deterministic_run_sums_up_the_same_samples_whatever_the_spec(given: int, used: int, tmp_path: Path) -> None:
    """The laptop's specs have 8,192 and 2,048 tokens a micro-batch."""
    spec = ClusterSpec(train=TrainSpec(token_budget=given))
    run = Run(sorts, {}, spec, RunSettings(runs_dir=str(tmp_path), deterministic=True))
    assert run.spec.train.token_budget == used
    assert {stage.token_budget for stage in run.prepare().stages if stage.engine == "train"} == {used}
    free = Run(sorts, {}, spec, RunSettings(runs_dir=str(tmp_path)))
    assert free.spec.train.token_budget == given
    pinned = Run(sorts, {}, spec, RunSettings(runs_dir=str(tmp_path), deterministic=True), pinned=free.prepare()).prepare()
    assert {stage.token_budget for stage in pinned.stages if stage.engine == "train"} == {used}
