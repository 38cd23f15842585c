"""Runs of processes and embedded engines whose devices are lent, or whose plan is looked at again: the bits stay the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from leased_plans import ahead, lent

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, ppo_clip, steps
from m2flow.macro.tracing import trace
from m2flow.micro.controller import online_replanning
from m2flow.micro.controller.online_replanning import BETTER
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.ledger import read_incidents
from m2flow.observe.spans import Span, SpanName
from m2flow.observe.store import read_spans
from m2flow.planner.planning import Question, question_of
from m2flow.planner.profiles import Profile
from m2flow.runner import run as runs
from m2flow.runner.run import Run, Summary
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
SPEC = ClusterSpec(
    placement="split",
    device="cpu",
    cores=4,
    rollout=RolloutSpec(workers=2, threads=1, max_running=3),
    train=TrainSpec(threads=1, token_budget=60),
    functions=FunctionSpec(workers=1, chunk=2),
)

PATIENCE_S = 300.0
NUM_RUNS = 6


def digits_seen(sample: Sample) -> float:
    """With HELD_UNTIL, answers of later steps wait until there is such a file."""
    deadline = time.monotonic() + PATIENCE_S
    while (path := os.environ.get("HELD_UNTIL")) and sample.id.call > 1 and not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return len(set(str(sample.text))) / 8


@flow
def sorts() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(6)], shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=24)
        policy.update(responses, verifier.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3), minibatch_size=3)


def run_of(tmp_path: Path, placed: Callable[[Plan], Plan] | None = None) -> tuple[Run, Summary]:
    graph, models, num_steps = trace(sorts, {})
    plan = lower(graph, models, SPEC, num_steps=num_steps, deterministic=True)
    pinned = placed(plan) if placed is not None else None
    run = Run(sorts, {}, SPEC, RunSettings(runs_dir=str(tmp_path), deterministic=True), pinned=pinned)
    return run, run.execute()


def run_in_which(sees: Callable[[Sequence[Span]], object], tmp_path: Path, placed: Callable[[Plan], Plan], bits: tuple[str, str]) -> Run:
    """Runs until something is seen in one: what is under way when devices change hands is a matter of moments. All have the bits."""
    for number in range(NUM_RUNS):
        run, summary = run_of(tmp_path / str(number), placed)
        assert (summary.samples_sha256, summary.weights_sha256) == bits
        if sees(read_spans(run.run_dir)):
            return run
    raise AssertionError(f"it was not seen in {NUM_RUNS} runs")


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a run in which each has devices of its own."""
    _, plain = run_of(tmp_path_factory.mktemp("plain"))
    return plain.samples_sha256, plain.weights_sha256


def test_a_run_whose_trainer_lends_its_devices_has_the_bits_of_one_that_does_not(tmp_path: Path, bits: tuple[str, str]) -> None:
    def moved(spans: Sequence[Span]) -> object:
        """What was on lent devices when training was due, and went on elsewhere."""
        lives = [(span.track, span.attributes["sample"]) for span in spans if span.name == SpanName.SAMPLE]
        lent_out = {sample for track, sample in lives if track.startswith("rollout-0")}
        return lent_out & {sample for track, sample in lives if track.startswith("rollout-1")}

    run = run_in_which(moved, tmp_path, lent(0.2, "rollout-0"), bits)
    assert "lent until 20% have ended" in (run.run_dir / "plan.txt").read_text()
    spans = read_spans(run.run_dir)
    turns = [span.attributes["label"] for span in spans if span.name == SpanName.SWITCH and span.track == "train-0"]
    assert turns[:3] == ["to train", "to rollout", "to train"]


def test_a_run_looks_at_its_plan_again_and_the_cluster_that_it_writes_is_one_to_run_on(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Answers and times come from its ledger and spans while it goes on; that any plan is called better is what the test makes so."""
    profiles: list[Profile | None] = []
    enough = tmp_path / "enough"

    def asked(*arguments: Any, **more: Any) -> Question:
        profiles.append(more["profile"])
        if more["profile"] is not None and list(tmp_path.glob(f"*/{BETTER}")):
            enough.touch()
        return question_of(*arguments, **more)

    monkeypatch.setattr(runs, "question_of", asked)
    spec = ClusterSpec(placement="auto", device="cpu", cores=2, rollout=RolloutSpec(replan_s=0.02), train=TrainSpec(token_budget=60))
    settings = RunSettings(runs_dir=str(tmp_path), deterministic=True)
    monkeypatch.setattr(online_replanning, "_PAYS", -1.0)
    monkeypatch.setenv("HELD_UNTIL", str(enough))
    run = Run(sorts, {}, spec, settings)
    summary = run.execute()
    assert profiles[0] is None
    measured = [profile for profile in profiles if profile is not None]  # The first step warms up, as soon as there is another.
    assert {engine.name for engine in measured[-1].engines} == {"policy.rollout", "policy.train"}
    (better,) = (one for one in read_incidents(run.run_dir) if one.kind == "better plan")
    assert f"m2flow run --resume {run.run_dir} --cluster {run.run_dir / BETTER}" in better.what
    monkeypatch.delenv("HELD_UNTIL")
    other = Run(sorts, {}, load_cluster(run.run_dir / BETTER), settings)
    again = other.execute()
    assert (summary.samples_sha256, summary.weights_sha256) == (again.samples_sha256, again.weights_sha256)


def test_a_run_whose_trainer_comes_back_while_samples_run_has_the_bits_of_one_without_turns(tmp_path: Path, bits: tuple[str, str]) -> None:
    def came_meanwhile(spans: Sequence[Span]) -> bool:
        switches = [span for span in spans if span.name == SpanName.SWITCH and span.track == "train-0"]
        comes = [span for span in switches if span.attributes["label"] == "to train"]
        lives = [span for span in spans if span.name == SpanName.SAMPLE]
        return any(life.start_ns < span.start_ns and span.end_ns < life.end_ns for span in comes for life in lives)

    spans = read_spans(run_in_which(came_meanwhile, tmp_path, ahead(0.01, "rollout-0", "rollout-1"), bits).run_dir)
    labels = {span.attributes["label"] for span in spans if span.name in (SpanName.OFFLOAD, SpanName.ONLOAD)}
    assert labels == {"policy rollout", "policy rollout unused cache", "policy train"}
