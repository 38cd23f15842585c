"""A run of processes and embedded engines in which a trainer's devices are lent to rollout and given back: the bits are those of one without."""

from __future__ import annotations

from pathlib import Path

from test_lending import lent

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, ppo_clip, steps
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.lower import lower
from m2flow.micro.run import Run, Summary
from m2flow.observe.spans import SpanName
from m2flow.observe.store import read_spans
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

DIGITS = Path(__file__).parents[1] / "flows" / "models" / "digits"
SPEC = ClusterSpec(
    placement="split",
    device="cpu",
    cores=4,
    rollout=RolloutSpec(workers=2, threads=1, max_running=3),
    train=TrainSpec(threads=1, token_budget=60),
    functions=FunctionSpec(workers=1, chunk=2),
)


def digits_seen(sample: Sample) -> float:
    return len(set(str(sample.text))) / 8


@flow
def sorts() -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(6)], shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=24)
        policy.update(responses, verifier.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3), minibatch_size=3)


def run_of(tmp_path: Path, *, until: float = 0.0) -> tuple[Run, Summary]:
    graph, models, num_steps = trace(sorts, {})
    plan = lower(graph, models, SPEC, num_steps=num_steps, deterministic=True)
    pinned = lent(until, "rollout-0")(plan) if until else None
    run = Run(sorts, {}, SPEC, RunSettings(runs_dir=str(tmp_path), deterministic=True), pinned=pinned)
    return run, run.execute()


def test_a_run_whose_trainer_lends_its_devices_has_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    run, summary = run_of(tmp_path / "lent", until=0.2)
    _, plain = run_of(tmp_path / "plain")
    assert (summary.samples_sha256, summary.weights_sha256) == (plain.samples_sha256, plain.weights_sha256)
    assert "lent until 20% have ended" in (run.run_dir / "plan.txt").read_text()
    spans = read_spans(run.run_dir)
    turns = [span.attributes["label"] for span in spans if span.name == SpanName.SWITCH and span.track == "train-0"]
    assert turns[:3] == ["to train", "to rollout", "to train"]
    lives = [(span.track, span.attributes["sample"]) for span in spans if span.name == SpanName.SAMPLE]
    lent_out = {sample for track, sample in lives if track.startswith("rollout-0")}
    moved = lent_out & {sample for track, sample in lives if track.startswith("rollout-1")}
    assert moved, "what was on lent devices when training was due went on elsewhere"
