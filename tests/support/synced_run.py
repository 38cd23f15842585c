"""A split run, two rollout workers, each in a process of its own: synced_run.py RUNS_DIR ENGINE TRANSPORT CHANGES."""

import os
import sys
import time
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.observe.store import read_spans
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec, WeightsSpec

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
CALLS_A_STEP = 4
PATIENCE_S = 200.0


def digits_seen(sample: Sample) -> float:
    """With HELD_IN, a directory of one run, a step waits until both rollout workers have its weights: one alone could make its answers."""
    version, deadline = sample.id.call // CALLS_A_STEP, time.monotonic() + PATIENCE_S
    both = {("rollout-0", version), ("rollout-1", version)}
    while (runs := os.environ.get("HELD_IN")) and version and not both <= loaded(Path(runs)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return len(set(str(sample.text))) / 8


def loaded(runs: Path) -> set[tuple[str, object]]:
    """Workers, and versions of the weights that they have loaded."""
    (run_dir,) = runs.iterdir()
    return {(span.track.partition("/")[0], span.attributes["version"]) for span in read_spans(run_dir) if span.name == "weights.load"}


@flow
def synced(model: str = "fake") -> None:
    policy, verifier = Policy(model, init="random"), Reward(digits_seen, timeout_s=PATIENCE_S)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(8)], shuffle=False)
    for _ in steps(3):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=6)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


def main(runs_dir: str, engine: str, transport: str, changes: str) -> None:
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine=engine, workers=2),
        train=TrainSpec(engine=engine, token_budget=64),
        weights=WeightsSpec.model_validate({"transport": transport, "changes": changes}),
    )
    os.environ["HELD_IN"] = runs_dir
    run = Run(synced, {"model": "fake" if engine == "fake" else str(DIGITS)}, spec, RunSettings(runs_dir=runs_dir, deterministic=True))
    print(f"weights {run.execute().weights_sha256}")
    print(run.run_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
