"""Seconds of a step: predicted from a profile, and measured, time-shared and split.

    python benchmarks/prediction.py [--rounds 3] [--steps 8] [--workloads grpo full skewed]

`grpo`, `ppo` and `dapo` are the flows of these names as they are; `full` and `skewed` are those of `benchmarks/vs_trl.py`. Each round has a
seed of its own. In each `m2flow profile` measures the workload, the simulator runs its steps on the virtual clock with the profile's
constants, and `m2flow run` makes them: the flow's first steps, evaluations left out by the median. Lengths in the simulator are drawn from
the answers that the profile saw, for several runs of other draws; `replayed` has those that the run then made, which tells errors of costs
from errors of lengths.

Prints one JSON object; ratios are predicted over measured, of medians over the steps, the range over the rounds. `parts` are seconds a
step, on average. The profile and the runs must find the same machine, so nothing else should run: `load` is what did before each. A
shared machine may change its speed all the same: `machine_s` are the seconds of a fixed piece of work before the profile, before the run
and after it, and `at_equal_speed` is the ratio with the prediction scaled by what they changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from sides.workload import FULL, SKEWED, Workload

from m2flow.macro.flow import load_flow
from m2flow.micro.lowering.passes import lower
from m2flow.micro.records.ledger import lengths_of_run
from m2flow.observe.spans import Span, overlap_seconds
from m2flow.observe.store import read_spans
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.profiles import Profile, ProfiledCosts, read_profile
from m2flow.planner.workload import extents_of, workload_of
from m2flow.rollout_scheduling.lengths import Lengths
from m2flow.runs.cluster_file import load_cluster
from m2flow.simulator.simulation import follow_program
from m2flow.simulator.simulation_report import simulate

_ROOT = Path(__file__).parent.parent
_PLACEMENTS = {"time-shared": "placement: time-shared", "split": "placement: split\ntrain: {token_budget: 2048}"}
_FLOWS = ("grpo", "ppo", "dapo")
_WARMUP = 2
_PIECES = 9
Numbers = dict[str, float]


@dataclass(frozen=True)
class Job:
    """A flow and its options, as the command line has them."""

    name: str
    flow: Path
    options: dict[str, object]

    @property
    def arguments(self) -> list[str]:
        given = [(f"--{name.replace('_', '-')}", value) for name, value in self.options.items()]
        return [text for flag, value in given for text in ([flag] if value is True else [flag, str(value)])]


def job_of(name: str, folder: Path, num_steps: int) -> Job:
    if name in _FLOWS:
        return Job(name, _ROOT / "flows" / f"{name}.py", {"num_steps": num_steps})
    workload: Workload = {"full": FULL, "skewed": SKEWED}[name]
    workload.write(folder, num_steps)
    options: dict[str, object] = {"model": str(folder), "prompts": str(folder / "prompts.txt"), "num_steps": num_steps}
    options |= {"batch": workload.num_prompts, "n": workload.n, "max_new": workload.max_new} | ({"full": True} if workload.is_full else {})
    return Job(name, _ROOT / "benchmarks" / "flows" / "throughput.py", options)


def machine_s() -> float:
    """Seconds of a fixed piece of work, half of it in Python and half in products of matrices; the median of several."""
    left, right = torch.ones(512, 512), torch.ones(512, 512)

    def piece_s() -> float:
        start_s = time.perf_counter()
        total = 0
        for number in range(400_000):
            total += number
        for _ in range(30):
            left @ right
        return time.perf_counter() - start_s

    return statistics.median(piece_s() for _ in range(_PIECES))


def m2flow(*arguments: str) -> str:
    command = [sys.executable, "-m", "m2flow", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def measured(job: Job, cluster: Path, runs: Path, seed: int) -> tuple[list[float], Numbers, Path]:
    """Seconds of each counted step, from the end of an update to the end of the next, and of what was done in them."""
    said = m2flow(
        "run", str(job.flow), "--cluster", str(cluster), "--runs-dir", str(runs), "--json", "--quiet", "--seed", str(seed), *job.arguments
    )
    run_dir = Path(json.loads(said.splitlines()[-1])["run_dir"])
    spans = read_spans(run_dir)
    last: dict[int, int] = {}
    for span in spans:
        step = int(str(span.attributes.get("step", -1)))
        if span.name == "train.apply" and step >= 0:
            last[step] = max(last.get(step, 0), span.end_ns)
    ends = [last[step] for step in sorted(last)][_WARMUP - 1 :]
    step_s = [(b - a) / 1e9 for a, b in itertools.pairwise(ends)]
    cut = [Span(s.track, s.name, max(s.start_ns, ends[0]), min(s.end_ns, ends[-1]), s.attributes) for s in spans]
    cut = [span for span in cut if span.start_ns < span.end_ns]
    parts = {
        "decode": overlap_seconds(cut, lambda s: s.name == "rollout.step", lambda s: s.name == "rollout.step"),
        **{name: sum(s.duration_s for s in cut if s.name == full) for name, full in _SPANS.items()},
    }
    return step_s, {name: seconds / len(step_s) for name, seconds in parts.items()}, run_dir


_SPANS = {"train": "train.accumulate", "apply": "train.apply", "sync": "weights.load", "function": "function.call", "switch": "switch"}
_TASKS = {"Accumulate": "train", "Apply": "apply", "LoadWeights": "sync", "Switch": "switch", "RunFunction": "function"}


def predicted(job: Job, cluster: Path, profile: Profile, lengths: Lengths, *, num_draws: int = 1) -> tuple[list[float], Numbers]:
    """The same on the virtual clock, the steps of several draws of the lengths one after the other; the parts are of the last draw."""
    spec, flow = load_cluster(cluster), load_flow(str(job.flow))
    program = follow_program(flow, job.options, steps=int(str(job.options["num_steps"])))
    plan = lower(program.graph, program.models, spec, num_steps=program.num_steps)
    workload, shapes = workload_of(program.graph, spec), shapes_of(program.models, spec)
    profile.check(program.models, spec)
    modelled = ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, lengths))
    step_s: list[float] = []
    for seed in range(num_draws):
        history = simulate(program, plan, spec, ProfiledCosts(profile, modelled), lengths, seed=seed).history
        counted = [period for period in history.periods if period.step >= _WARMUP]
        step_s += [period.makespan_s for period in counted]
    start_s, end_s = counted[0].start_s, counted[-1].end_s
    parts: dict[str, float] = defaultdict(float)
    for done in history.done_tasks:
        if start_s <= done.start_s < end_s:
            parts[_TASKS.get(type(done.task).__name__, "other")] += done.end_s - done.start_s
    runs = [(max(run.begun_s, start_s), min(run.ended_s, end_s)) for runs in history.sample_runs.values() for run in runs]
    parts["decode"] = _union(pair for pair in runs if pair[0] < pair[1])
    return step_s, {name: seconds / len(counted) for name, seconds in parts.items()}


def _union(pairs) -> float:  # type: ignore[no-untyped-def]
    total = until = 0.0
    for start, end in sorted(pairs):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def spread(values: Sequence[float]) -> Numbers:
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def compare(name: str, a: argparse.Namespace, made: Path) -> dict[str, object]:
    job = job_of(name, made / name, a.steps + _WARMUP)
    profile_job = job_of(name, made / name, max(a.steps + _WARMUP, 9))
    clusters = {}
    for placement, text in _PLACEMENTS.items():
        clusters[placement] = made / f"{placement}.yaml"
        clusters[placement].write_text(f"device: cpu\ncores: {a.threads}\n{text}\n")
    rounds: dict[str, list[dict[str, object]]] = {placement: [] for placement in a.placements}
    for seed in range(a.rounds):
        for placement in a.placements:
            cluster, file = clusters[placement], made / "profile.json"
            loads, machine = [round(os.getloadavg()[0], 2)], [machine_s()]
            options = [
                "--runs-dir",
                str(made / "probes"),
                "--out",
                str(file),
                "--seconds",
                str(a.seconds),
                "--only-this-placement",
                "--seed",
                str(seed),
            ]
            m2flow("profile", str(job.flow), "--cluster", str(cluster), *options, *profile_job.arguments)
            profile = read_profile(file)
            loads.append(round(os.getloadavg()[0], 2))
            machine.append(machine_s())
            step_s, parts, run_dir = measured(job, cluster, made / "runs", seed)
            machine.append(machine_s())
            drawn_s, predicted_parts = predicted(job, cluster, profile, profile.lengths(), num_draws=8)
            replayed_s, _ = predicted(job, cluster, profile, lengths_of_run(run_dir))
            took, said, again = (statistics.median(values) for values in (step_s, drawn_s, replayed_s))
            before, between, after = machine
            equal = said / took * (between + after) / (before + between)
            found: dict[str, object] = {"load": loads, "machine_s": machine, "measured_s": took, "predicted_s": said, "replayed_s": again}
            found["at_equal_speed"] = equal
            found |= {"ratio": said / took, "replayed_ratio": again / took, "measured_parts": parts, "predicted_parts": predicted_parts}
            found["slowdown"] = {engine.name: engine.slowdown for engine in profile.engines}
            rounds[placement].append(_rounded(found))
            print(name, placement, json.dumps(rounds[placement][-1]), file=sys.stderr)
    return {
        placement: {
            "ratio": spread([float(str(one["ratio"])) for one in found]),
            "replayed_ratio": spread([float(str(one["replayed_ratio"])) for one in found]),
            "at_equal_speed": spread([float(str(one["at_equal_speed"])) for one in found]),
            "rounds": found,
        }
        for placement, found in rounds.items()
    }


def _rounded(value):  # type: ignore[no-untyped-def]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*_FLOWS, "full", "skewed"], default=["grpo", "full", "skewed"])
    parser.add_argument("--placements", nargs="+", choices=list(_PLACEMENTS), default=list(_PLACEMENTS))
    parser.add_argument("--threads", type=int, default=2, help="CPU cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run")
    parser.add_argument("--seconds", type=float, default=15, help="of `m2flow profile`, for a placement")
    a = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.threads])
    with tempfile.TemporaryDirectory() as made:
        workloads = {name: compare(name, a, Path(made)) for name in a.workloads}
    hardware = {"cores": a.threads, "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"hardware": hardware, "versions": versions, "steps": a.steps, "rounds": a.rounds, **workloads}, indent=1))


if __name__ == "__main__":
    main()
