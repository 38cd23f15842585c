"""What overlap is worth: a planned step in split mode against the same step call by call, on skewed lengths.

    python benchmarks/overlap.py [--rounds 3] [--steps 8] [--threads 2]

Generation and training have a process and half of the cores each, rewards a process of their own. Lengths are geometric with mean
24, cut at 128, so the last samples keep a few rows decoding while the rest could be scored and trained. Three ways, in turn:

    planned        rewards and micro-batches start as samples finish
    call_by_call   the same workers and plan, but the flow looks at each result before the next call, so nothing overlaps
    eager          all in one process, with all cores for each call

Once with a reward that costs nothing and once with one that takes 3 ms of Python a sample. Prints one JSON object: seconds of a
step, and from the trace the seconds in which rewards and micro-batches ran beside generation; ratios are call_by_call or eager over
planned, of the same round. `call_by_call` also brings the rows to the flow, which the planned run does not; on rows this small that
is a few milliseconds. `load` is the machine's mean number of running processes in the minute before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from sides.m2flow_runs import Steps, is_generation, is_micro_batch, is_reward, run_flow
from sides.workload import SKEWED, Workload

_WAYS: dict[str, tuple[str, ...]] = {"planned": (), "call_by_call": ("--call-by-call",), "eager": ("--eager",)}


def describe(runs: Sequence[Steps]) -> dict[str, float]:
    """Medians over the rounds, in seconds a step."""
    numbers = {
        "step_s": [run.median_s for run in runs],
        "generation_s": [run.seconds(is_generation) for run in runs],
        "reward_s": [run.seconds(is_reward) for run in runs],
        "micro_batch_s": [run.seconds(is_micro_batch) for run in runs],
        "reward_beside_generation_s": [run.seconds(is_reward, is_generation) for run in runs],
        "micro_batch_beside_generation_s": [run.seconds(is_micro_batch, is_generation) for run in runs],
    }
    return {name: round(statistics.median(values), 4) for name, values in numbers.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(values), 2), "median": round(statistics.median(values), 2), "max": round(max(values), 2)}


def compare(workload: Workload, folder: Path, a: argparse.Namespace, *, slow_reward: bool) -> dict[str, object]:
    cluster = f"device: cpu\ncores: {a.threads}\nplacement: split\ntrain: {{token_budget: {a.token_budget}}}\n"
    runs: dict[str, list[Steps]] = {way: [] for way in _WAYS}
    loads = []
    for _ in range(a.rounds):
        loads.append(round(os.getloadavg()[0], 2))
        for way, arguments in _WAYS.items():
            arguments = (*arguments, *(["--slow-reward"] if slow_reward else []))
            runs[way].append(run_flow(folder, workload, steps=a.steps, warmup=a.warmup, cluster=cluster, arguments=arguments))
            print("slow" if slow_reward else "free", way, round(runs[way][-1].median_s, 4), file=sys.stderr)
    ratios = {
        way: spread([other.median_s / one.median_s for other, one in zip(runs[way], runs["planned"], strict=True)])
        for way in _WAYS
        if way != "planned"
    }
    return {"load": loads, **{way: describe(found) for way, found in runs.items()}, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU cores: half for generation, half for training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a way in a round")
    parser.add_argument("--token-budget", type=int, default=2048, help="tokens in a micro-batch")
    a = parser.parse_args()
    a.warmup = 2
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.threads])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        SKEWED.write(folder, a.steps + a.warmup)
        rewards = {name: compare(SKEWED, folder, a, slow_reward=name == "reward_of_3_ms") for name in ("free_reward", "reward_of_3_ms")}
    hardware = {"cores": a.threads, "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"hardware": hardware, "versions": versions, "rounds": a.rounds, "steps": a.steps, **rewards}, indent=1))


if __name__ == "__main__":
    main()
