"""A flow with one bottleneck at a time, planted by its options or by the cluster, and what `m2flow analyze` is to say of each."""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m2flow import SGD, Dataset, Lora, Policy, Reward, Sample, concat, flow, ppo_clip, steps
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.viewer.analysis import Analysis, analysis_of
from m2flow.viewer.run_trace import RunTrace, idle_of
from m2flow.viewer.suggestions import Suggestion, suggestions_of

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"


SHAPES: dict[str, dict[str, int]] = {
    "digits": {},
    "wide": {"hidden_size": 1024, "intermediate_size": 4096},  # Many weights to send; with adapters, few to train.
    "deep": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24},  # A token takes as long as many messages.
}


def model(shape: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"m2flow-planted-{shape}"
    config = {**json.loads((DIGITS / "config.json").read_text()), **SHAPES[shape]}
    if not (folder / "config.json").is_file() or json.loads((folder / "config.json").read_text()) != config:
        shutil.copytree(DIGITS, folder, dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def question(rng: random.Random) -> dict[str, str]:
    return {"prompt": "".join(rng.choices("0123456789", k=6)) + "="}


def quick(sample: Sample) -> float:
    return 1.0 - len(sample.tokens) / 64


def waiting(sample: Sample) -> float:
    """A judge that waits for a service."""
    time.sleep(0.05)
    return quick(sample)


def computing(sample: Sample) -> float:
    """A judge that computes for about as long."""
    until = time.thread_time() + 0.04
    while time.thread_time() < until:
        pass
    return quick(sample)


JUDGES = {"quick": quick, "waiting": waiting, "computing": computing}


@flow(staleness="staleness")
def planted(
    judge: str = "quick",
    num_steps: int = 4,
    batch: int = 8,
    n: int = 4,
    tokens: int = 6,
    fetch_s: float = 0.0,
    longest: int = 0,
    shape: str = "digits",
    staleness: int = 0,
    rank: int = 0,
) -> None:
    policy, reward = Policy(model(shape), init="random", lora=Lora(rank) if rank else None), Reward(JUDGES[judge])
    prompts = Dataset.generate(question, num_steps * (batch + 1), seed=1)
    for _ in steps(num_steps):
        if fetch_s:  # On a busy machine a sleep of no time is one, too.
            time.sleep(fetch_s)  # What a program does that reads its rows from far away.
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=tokens)
        if longest:
            last = policy.generate(prompts.take(1), n=2, min_new_tokens=longest, max_new_tokens=longest)
            responses = concat([responses, last])
        policy.update(responses, reward.score(responses), loss=ppo_clip(), optimizer=SGD(1e-6))


# ---- what is planted

SPLIT: dict[str, dict[str, Any]] = {"rollout": {}, "train": {"token_budget": 512}, "functions": {}, "weights": {}}


@dataclass(frozen=True)
class Planted:
    name: str
    causes: tuple[str, ...]
    """What the verdict may call it."""
    suggested: str
    """A pattern of what is suggested first."""
    options: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: str = ""
    """A package that it needs, of an extra."""


CASES = [
    Planted("waiting reward", ("waiting reward",), r"functions: \{concurrency: \d+\}", {"judge": "waiting"}),
    Planted("slow reward", ("slow reward",), r"functions: \{workers: \d\}", {"judge": "computing"}),
    Planted(
        "too few function workers",
        ("slow reward",),
        r"functions: \{workers: \d\}",
        {"judge": "computing", "n": 3},
        {"functions": {"concurrency": 4}},
    ),
    Planted("starved trainer", ("generation",), r"rollout: \{max_running: 4\}", {"tokens": 24}, {"rollout": {"max_running": 1}}),
    Planted("long tail", ("tail",), r"staleness|oversample|policy: \[|placement", {"shape": "deep", "longest": 56, "tokens": 4}),
    Planted(
        "slow weight sync",
        ("sync",),
        r"weights: \{probe: first\}",
        {"shape": "wide", "rank": 2, "batch": 1, "n": 2, "tokens": 1},
        {"weights": {"probe": "always", "adapters": "added"}},
        extra="peft",
    ),
    Planted("slow dataset", ("program",), "rows before the run", {"fetch_s": 1.5}),
]


def ran(options: dict[str, Any], cluster: dict[str, Any], runs: Path) -> tuple[Path, Analysis]:
    merged = {part: {**values, **cluster.get(part, {})} for part, values in SPLIT.items()}
    spec = ClusterSpec.model_validate({"placement": cluster.get("placement", "split"), "device": "cpu", "cores": 2, **merged})
    settings = RunSettings(runs_dir=str(runs), metrics_to=())  # TensorBoard would be imported beside the second step.
    run_dir = Path(Run(planted, options, spec, settings).execute().run_dir)
    trace = RunTrace(run_dir)
    assert trace.refresh()
    return run_dir, analysis_of(trace, idle_of(trace))


def applied(case: Planted, first: Suggestion, runs: Path) -> Analysis:
    """A run of this case with what was suggested first."""
    cluster: dict[str, Any] = dict(case.cluster)
    for part, values in first.cluster.items():
        cluster[part] = values if isinstance(values, str) else {**cluster.get(part, {}), **values}
    options = dict(case.options)
    if "fetch_s" in options:
        options["fetch_s"] = 0.0
    if found := re.fullmatch(r"@flow\(staleness=(\d+)\)", first.flow):
        options["staleness"] = int(found[1])
    return ran(options, cluster, runs)[1]


def first_suggestion(case: Planted, run_dir: Path, analysis: Analysis) -> Suggestion:
    """What is suggested first for a run of this case."""
    return suggestions_of(run_dir, planted, dict(case.options), analysis).found[0]
