"""Channels in a real run: its processes lend each other large columns, wait for room, spill, and give the eager answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.runner.run import Run
from m2flow.spec import ChannelSpec, ClusterSpec, RolloutSpec, RunSettings, TrainSpec


def share_of_sevens(sample: Sample) -> float:
    return str(sample.text).count("7") / 7


@flow
def long_answers() -> None:
    """All answers end in one step of the engine, so that parcels fill their room; columns of sixteen are lent, those of eight are not."""
    policy, verifier = Policy("fake"), Reward(share_of_sevens)
    prompts = Dataset([{"prompt": f"{i * 7919 % 100000}="} for i in range(8)])
    for _ in steps(1):
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=4000, min_new_tokens=4000)
        log(reward=policy.update(responses, verifier.score(responses))["reward"])


def run(tmp_path: Path, channels: ChannelSpec, *, eager: bool = False):
    spec = ClusterSpec(placement="split", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), channels=channels)
    return Run(long_answers, {}, spec, RunSettings(runs_dir=str(tmp_path), eager=eager)).execute()


@pytest.mark.parametrize(
    "channels",
    [pytest.param(ChannelSpec(), marks=pytest.mark.slow, id="with room"), pytest.param(ChannelSpec(max_samples=16), id="tight")],
)
def test_large_columns_are_lent_in_a_real_run_which_gives_the_eager_answer(tmp_path, channels):
    planned = run(tmp_path, channels)
    eager = run(tmp_path, channels, eager=True)
    assert (planned.samples_sha256, planned.weights_sha256) == (eager.samples_sha256, eager.weights_sha256)
    ways = planned.channels
    assert ways["rollout-0 -> functions-0"]["samples"] == ways["rollout-0 -> train-0"]["samples"] == 32
    assert max(counts.get("shared bytes", 0) for counts in ways.values()) > 100_000


@pytest.mark.slow
def test_large_columns_go_over_torch_distributed_in_a_real_run_which_gives_the_eager_answer(tmp_path):
    channels = ChannelSpec(transport="distributed")
    planned, eager = run(tmp_path, channels), run(tmp_path, channels, eager=True)
    assert (planned.samples_sha256, planned.weights_sha256) == (eager.samples_sha256, eager.weights_sha256)
    ways = planned.channels
    assert ways["rollout-0 -> functions-0"]["samples"] == ways["rollout-0 -> train-0"]["samples"] == 32
    assert ways["rollout-0 -> train-0"]["bytes over torch.distributed"] > 100_000
    assert not any("shared bytes" in counts for counts in ways.values())
