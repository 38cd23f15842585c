"""In split mode rewards and micro-batches run while the rest of the same step still generates: seen in the trace of real processes. What
each of them was busy for does not depend on the host's clock."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from fake_clusters import FAKES
from tiny_models import save_config

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.observe.spans import Span, overlap_seconds
from m2flow.observe.store import read_spans
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow
def skewed(model: str, num_prompts: int = 24, call_by_call: bool = False) -> None:
    """The random model ends each response by itself, so lengths are geometric."""
    policy = Policy(model, init="random")
    reward = Reward(length)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(num_prompts)], name="prompts")
    for _ in steps(1):
        responses = policy.generate(prompts.take(num_prompts), n=4, max_new_tokens=48)
        if call_by_call:
            list(responses)
        rewards = reward.score(responses)
        if call_by_call:
            list(rewards)
        policy.update(responses, rewards, optimizer=AdamW(1e-5))


def trace_of(folder: Path, *, num_prompts: int = 24, call_by_call: bool) -> list[Span]:
    model = save_config("Qwen2", folder / "model")
    # A few samples at a time: the last ones begin when the first groups are complete.
    rollout = RolloutSpec(max_running=8, threads=1)
    spec = ClusterSpec(device="cpu", placement="split", rollout=rollout, train=TrainSpec(threads=1, token_budget=64))
    options = {"model": model, "num_prompts": num_prompts, "call_by_call": call_by_call}
    summary = Run(skewed, options, spec, RunSettings(runs_dir=str(folder / "runs"))).execute()
    assert summary.samples == num_prompts * 4
    return read_spans(Path(summary.run_dir))


def beside_generation(spans: list[Span], name: str) -> float:
    return overlap_seconds(spans, lambda span: span.name == name, lambda span: span.name == "rollout.step")


def test_rewards_and_micro_batches_run_while_the_same_step_generates(tmp_path: Path) -> None:
    # The same step, since the next one's generation can't begin before the update. It may be over before a worker that stands still has
    # begun with the first group; then a longer one is not.
    found = {}
    for num_prompts in (24, 96, 384):
        spans = trace_of(tmp_path / str(num_prompts), num_prompts=num_prompts, call_by_call=False)
        found = {name: beside_generation(spans, name) for name in ("train.accumulate", "function.call")}
        if all(found.values()):
            break
    assert all(found.values()), found


def test_a_flow_that_looks_at_each_result_overlaps_nothing(tmp_path: Path) -> None:
    spans = trace_of(tmp_path, call_by_call=True)

    assert beside_generation(spans, "train.accumulate") == 0
    assert beside_generation(spans, "function.call") == 0


@pytest.mark.parametrize("eager", [True, False])
def test_what_was_busy_is_known_whatever_is_done_to_the_clock_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    real, hours = time.time_ns, itertools.count()
    monkeypatch.setattr(time, "time_ns", lambda: real() + next(hours) * 3600 * 10**9)
    run = Run(skewed, {"model": "fake", "num_prompts": 4}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=eager))
    assert sum(run.execute().busy_s.values()) > 0
