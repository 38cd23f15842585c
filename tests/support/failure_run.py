"""The job of `flows/grpo.py`, made small, each part a process, for `test_job_failures`: failure_run.py RUNS_DIR [SETTING=VALUE ...].

Rewards of its second step wait while the file HELD_BY exists, so that something can happen in the middle; where SERVICE says an address, a
reward is what is answered there.
"""

import functools
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

from m2flow import Dataset, Number, Policy, Reward, Sample
from m2flow.errors import M2FlowError
from m2flow.macro.flow import load_flow
from m2flow.micro.records.audit import audit
from m2flow.micro.records.ledger import read_incidents
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, FunctionSpec, RaySpec, RolloutSpec, RunSettings, StorageSpec, TrainSpec

FLOW = Path(__file__).parents[2] / "flows" / "grpo.py"
OPTIONS = {"num_steps": 3, "warm_steps": 1, "batch": 4, "n": 4, "eval_every": 100}
WAITING = 11
"""The generation of the second step, by its place among the calls of the flow."""


def judged(sample: Sample) -> float:
    if sample.id.call == WAITING:
        print("waits", flush=True)
    while sample.id.call == WAITING and os.path.exists(os.environ.get("HELD_BY", "")):
        time.sleep(0.01)
    if service := os.environ.get("SERVICE"):
        with urllib.request.urlopen(service, timeout=60.0) as answer:
            answer.read()
    return float(sample.text == sample.answer)


def accuracy(policy: Policy, verifier: Reward, heldout: Dataset) -> Number:
    """The flow's own, on fewer prompts: it has hundreds, each a batch for itself where the bits are to be the same."""
    return verifier.score(policy.generate(heldout.take(8), max_new_tokens=8, temperature=0)).mean()


def main(runs_dir: str, *arguments: str) -> None:
    given = {name: json.loads(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    grpo = load_flow(str(FLOW))
    patient = functools.partial(Reward, timeout_s=1500.0)  # One that is held waits for what is done meanwhile.
    grpo.function.__globals__.update({"is_sorted": judged, "accuracy": accuracy, "Reward": patient})
    ray, resume = given.pop("ray", None), given.pop("resume", None)
    spec = ClusterSpec(
        launcher="ray" if ray else "local",
        ray=RaySpec.model_validate(ray or {}),
        placement="split",
        device="cpu",
        cores=4,
        rollout=RolloutSpec(engine=given.pop("engine", "embedded"), workers=2, threads=1),
        train=TrainSpec(engine=given.pop("trainer", "embedded"), threads=1, token_budget=200),
        functions=FunctionSpec(workers=1, chunk=64),
        storage=StorageSpec.model_validate(given.pop("storage", {})),
    )
    settings = RunSettings(
        runs_dir=runs_dir, heartbeat_s=0.1, restart_wait_s=0.05, retry_wait_s=0.0, checkpoint_steps=1, deterministic=True, **given
    )
    run = Run(grpo, OPTIONS, spec, settings, flow_file=str(FLOW), resume=Path(resume) if resume else None)
    said: dict[str, object] = {}
    try:
        summary = run.execute()
        said |= {"samples": summary.samples_sha256, "weights": summary.weights_sha256, "count": summary.samples}
        said["is_sound"] = audit(run.run_dir).is_sound
    except M2FlowError as error:
        said |= {"error": f"{type(error).__name__}: {error}"}
    said |= {"run_dir": str(run.run_dir), "incidents": [[one.kind, one.worker, one.what] for one in read_incidents(run.run_dir)]}
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
