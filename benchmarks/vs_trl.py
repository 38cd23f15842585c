"""Seconds of a GRPO step: m2flow against TRL's GRPOTrainer, in turn in one run.

    python benchmarks/vs_trl.py --trl-python PATH [--rounds 3] [--steps 8] [--workloads full skewed]

TRL needs an interpreter of its own. One that borrows everything else from the environment of m2flow:

    python -m venv .venv-trl
    .venv/bin/python -c "import site; print(site.getsitepackages()[0])" > $(echo .venv-trl/lib/python3*/site-packages)/core.pth
    .venv-trl/bin/pip install --no-deps trl==1.16.0 datasets accelerate multiprocess dill pyarrow pandas xxhash

Same model, weights, prompts, number of samples, length limit, optimiser and reward; float32 on a CPU, the same cores for both. TRL
runs with the best settings that were found for it: a static cache, and the micro-batch size of each workload. `full`: 32 prompts,
8 samples each, every response 64 tokens. `skewed`: 16 prompts, 8 samples each, lengths geometric with mean 24, cut at 128.

In each round every side makes some steps in a fresh process; the first two do not count, the median of the others does. Prints one
JSON object: ratios are of samples a second, each m2flow over TRL's of the same round. `load` is what else the machine
had to do before the round, as its mean number of running processes in the last minute. `m2flow_planned` has the layout of the cores
that `placement: auto` chooses by a profile, which is measured first.

`gemm_gflops` is what the machine attains in products of square float32 matrices, by number of threads, measured before each round.
`step_gflop` is the arithmetic of a step, with each prompt once: a forward pass for every token, and in training a backward pass too.
`gemm_share` is the part of a step that this arithmetic would take at the rate of all threads: what no layout can avoid.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from sides.m2flow_runs import Steps, is_generation, is_training, profile_flow, run_flow
from sides.workload import FULL, SKEWED, Workload

from m2flow.planner.model_shapes import ModelShape

_TRL = Path(__file__).parent / "sides" / "trl_grpo.py"
_DEFAULT = Path(__file__).parent.parent / ".venv-trl" / "bin" / "python"

_SIDES = ["trl", "m2flow", "m2flow_split", "m2flow_planned", "m2flow_eager"]
Measured = dict[str, float]
"""step_s, samples_per_s, tokens_per_s, generation_share, training_share."""


def of_trl(python: str, folder: Path, workload: Workload, a: argparse.Namespace) -> tuple[Measured, dict[str, str]]:
    settings = {**asdict(workload), "model": str(folder), "prompts": str(folder / "prompts.txt")}
    settings |= {"threads": a.threads, "steps": a.steps, "warmup": a.warmup}
    done = subprocess.run([python, str(_TRL), json.dumps(settings)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"TRL ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    step_s, generation_s = statistics.median(said["step_s"]), statistics.median(said["generation_s"])
    share = generation_s / step_s
    return measured(workload, step_s, statistics.mean(said["num_tokens"]), share, 1 - share), said["versions"]


def of_m2flow(workload: Workload, steps: Steps) -> Measured:
    mean_s = statistics.mean(steps.step_s)
    generation, training = (steps.seconds(kind) / mean_s for kind in (is_generation, is_training))
    return measured(workload, steps.median_s, steps.num_tokens, generation, training)


def measured(workload: Workload, step_s: float, num_tokens: float, generation: float, training: float) -> Measured:
    return {
        "step_s": round(step_s, 4),
        "samples_per_s": round(workload.num_samples / step_s, 1),
        "tokens_per_s": round(num_tokens / step_s),
        "mean_tokens": round(num_tokens / workload.num_samples, 1),
        "generation_share": round(generation, 3),
        "training_share": round(training, 3),
    }


def middle(rounds: Sequence[Measured]) -> Measured:
    """The median of each number."""
    return {name: round(statistics.median(r[name] for r in rounds), 4) for name in rounds[0]}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(values), 2), "median": round(statistics.median(values), 2), "max": round(max(values), 2)}


def gemm_gflops(threads: int) -> float:
    """The best rate of a product of two float32 matrices of 1,024 x 1,024."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b, seconds = torch.rand(1024, 1024), torch.rand(1024, 1024), []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * 1024**3 / min(seconds) / 1e9


def step_gflop(folder: Path, workload: Workload, mean_tokens: float) -> dict[str, float]:
    """The arithmetic of a step's generation and training, in 10^9 operations."""
    shape = ModelShape.from_config(folder)
    length = workload.prompt_tokens + mean_tokens
    tokens = workload.num_prompts * workload.prompt_tokens + workload.num_samples * mean_tokens
    attention = shape.attention_flops * workload.num_samples * length**2
    forward = (tokens * shape.token_flops + attention) / 1e9
    return {"generation": round(forward, 1), "training": round(3 * forward, 1)}


def compare(workload: Workload, a: argparse.Namespace, versions: dict[str, str]) -> dict[str, object]:
    clusters = {"m2flow": "placement: time-shared", "m2flow_split": "placement: split\ntrain: {token_budget: 2048}"}
    found: dict[str, list[Measured]] = {}
    loads, rates = [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        workload.write(folder, a.steps + a.warmup)

        def run(cluster: str, *arguments: str) -> Measured:
            text = f"device: cpu\ncores: {a.threads}\n{cluster}\n"
            return of_m2flow(workload, run_flow(folder, workload, steps=a.steps, warmup=a.warmup, cluster=text, arguments=arguments))

        def trl() -> Measured:
            result, told = of_trl(a.trl_python, folder, workload, a)
            versions.update(told)
            return result

        sides: dict[str, Callable[[], Measured]] = {"trl": trl} if a.trl_python else {}
        sides |= {name: lambda cluster=cluster: run(cluster) for name, cluster in clusters.items()}  # type: ignore[misc]
        profile = str(folder / "profile.json")
        sides["m2flow_planned"] = lambda: run("placement: auto", "--profile", profile)
        sides["m2flow_eager"] = lambda: run(clusters["m2flow"], "--eager")
        if "m2flow_planned" in (a.sides or sides):
            profile_flow(folder, workload, Path(profile), cluster=f"device: cpu\ncores: {a.threads}\n")
        for _ in range(a.rounds):
            loads.append(round(os.getloadavg()[0], 2))
            rates.append({threads: round(gemm_gflops(threads)) for threads in range(1, a.threads + 1)})
            for name in a.sides or sides:
                found.setdefault(name, []).append(sides[name]())
                print(workload.name, name, found[name][-1], file=sys.stderr)
        middles = {name: middle(rounds) for name, rounds in found.items()}
        arithmetic = step_gflop(folder, workload, next(iter(middles.values()))["mean_tokens"])
    at_best_s = sum(arithmetic.values()) / max(rate[a.threads] for rate in rates)
    result: dict[str, object] = {**asdict(workload), "load": loads, "gemm_gflops": rates, "step_gflop": arithmetic, **middles}
    result["gemm_share"] = {name: round(at_best_s / found["step_s"], 2) for name, found in middles.items()}
    if "trl" in found:
        result["ratio"] = {
            name: spread([one["samples_per_s"] / other["samples_per_s"] for one, other in zip(rounds, found["trl"], strict=True)])
            for name, rounds in found.items()
            if name != "trl"
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = str(_DEFAULT) if _DEFAULT.exists() else ""
    parser.add_argument("--trl-python", default=default, help="an interpreter that has TRL; .venv-trl/bin/python if there")
    parser.add_argument("--workloads", nargs="+", choices=["full", "skewed"], default=["full", "skewed"])
    parser.add_argument("--sides", nargs="+", choices=_SIDES, help="by default all")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of each side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a side in a round")
    a = parser.parse_args()
    a.warmup = 2
    if not a.trl_python:
        print("without --trl-python, m2flow is timed alone; --help says how to install TRL", file=sys.stderr)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.threads])
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    started = time.time()
    workloads = {w.name: compare(w, a, versions) for w in (FULL, SKEWED) if w.name in a.workloads}
    hardware = {"cores": a.threads, "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    print(
        json.dumps(
            {
                "hardware": hardware,
                "versions": versions,
                "rounds": a.rounds,
                "steps": a.steps,
                "wall_s": round(time.time() - started),
                **workloads,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
