"""A hundred thousand samples through a real run with fake engines: does anything grow that should not?

    python benchmarks/soak.py [--samples 100000] [--carry] [--json]

The controller and the worker processes are the real ones, over real sockets; only engines are fakes, so that the runtime is all there is.
Memory, open files and threads of each process are looked at twice a second. What they are at the end is compared with what they were
after the first quarter. Ends with status 1 if memory of a process has grown by more than `--most-mb`, if a process has more files or
threads, or if the record of the run is not sound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from sides.periodic import Periodically

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.micro.records.audit import audit
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

_PROMPTS, _N = 64, 8
_EVERY_S = 0.5


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow(staleness=1)
def soak(num_steps: int = 4, carry: bool = False) -> None:
    policy, judge = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(1000)])
    for _ in steps(num_steps):
        if carry:
            responses = policy.generate(prompts.take(_PROMPTS), n=_N, max_new_tokens=16, oversample=1.25, late="carry")
        else:
            responses = policy.generate(prompts.take(_PROMPTS), n=_N, max_new_tokens=16)
        policy.update(responses, judge.score(responses))


class Watch:
    """What this process and its workers have, from look to look."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen: dict[str, list[tuple[int, float, int, int]]] = {}
        """Process -> samples so far, MB, open files, threads."""

    def look(self) -> None:
        me, done = psutil.Process(), self._run.tally.num_samples
        for process in [me, *me.children()]:
            try:
                name = "controller" if process == me else f"worker {process.pid}"
                numbers = (done, process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue
            self.seen.setdefault(name, []).append(numbers)


def growth(seen: list[tuple[int, float, int, int]], samples: int) -> dict[str, float]:
    """What has changed between the second quarter's beginning and the end: medians over a tenth of the run each."""
    early = [look for look in seen if 0.25 * samples <= look[0] < 0.35 * samples]
    late = [look for look in seen if 0.9 * samples <= look[0] < samples]  # Not when the workers are on their way out.
    if not early or not late:
        return {}
    before, after = ([statistics.median(look[i] for look in part) for i in (1, 2, 3)] for part in (early, late))
    return {
        "mb_at_a_quarter": round(before[0], 1),
        "mb_at_the_end": round(after[0], 1),
        "mb_grown": round(after[0] - before[0], 1),
        "files_grown": after[1] - before[1],
        "threads_grown": after[2] - before[2],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--carry", action="store_true", help="over-sample, and carry what is late")
    parser.add_argument("--most-mb", type=float, default=32.0, help="growth of a process that is let pass")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    num_steps = max(asked.samples // (_PROMPTS * _N), 4)
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=2, max_running=256),
        train=TrainSpec(engine="fake", token_budget=8192),
        functions=FunctionSpec(workers=1),
    )
    with tempfile.TemporaryDirectory() as runs:
        run = Run(soak, {"num_steps": num_steps, "carry": asked.carry}, spec, RunSettings(runs_dir=runs))
        watch = Watch(run)
        with Periodically(watch.look, every_s=_EVERY_S):
            summary = run.execute()
        total = summary.samples
        start = time.monotonic()
        found = audit(Path(summary.run_dir))
        audited_s = time.monotonic() - start
        ledger_bytes = (Path(summary.run_dir) / "ledger.db").stat().st_size
    processes = {name: growth(seen, total) for name, seen in watch.seen.items()}
    grown = {name: numbers for name, numbers in processes.items() if numbers}
    is_constant = bool(grown) and all(
        numbers["mb_grown"] <= asked.most_mb and numbers["files_grown"] <= 0 and numbers["threads_grown"] <= 0 for numbers in grown.values()
    )
    result = {
        "samples": total,
        "tokens": summary.tokens,
        "steps": summary.steps,
        "wall_s": summary.wall_s,
        "samples_per_s": summary.samples_per_s,
        "ledger_bytes_per_sample": round(ledger_bytes / total, 1),
        "audit_s": round(audited_s, 1),
        "is_sound": found.is_sound,
        "is_constant": is_constant,
        "processes": grown,
    }
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{total:,} samples in {summary.wall_s:.0f} s, {summary.samples_per_s:,.0f} a second; the audit took {audited_s:.0f} s")
        for name, numbers in grown.items():
            print(f"  {name:16} {numbers['mb_at_a_quarter']:7.1f} MB at a quarter, {numbers['mb_at_the_end']:7.1f} MB at the end")
        print("sound" if found.is_sound else str(found))
    return 0 if found.is_sound and is_constant else 1


if __name__ == "__main__":
    sys.exit(main())
