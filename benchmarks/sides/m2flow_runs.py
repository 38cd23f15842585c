"""A run of `flows/throughput.py` by the command line, as a user would, and what its trace says about each step."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sides.workload import Workload

from m2flow.observe.spans import Span, overlap_seconds
from m2flow.observe.store import read_spans

_FLOW = Path(__file__).parent.parent / "flows" / "throughput.py"

Predicate = Callable[[Span], bool]


@dataclass(frozen=True)
class Steps:
    """The counted steps of a run, and the spans in them."""

    step_s: list[float]
    """From the end of one update to the end of the next."""
    num_tokens: float
    """Generated, in a step on average."""
    spans: list[Span]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    def seconds(self, a: Predicate, b: Predicate | None = None) -> float:
        """Seconds of a step, on average, in which a span that fits `a` ran; with `b`, in which one of each ran."""
        return overlap_seconds(self.spans, a, b or a) / len(self.step_s)


def is_generation(span: Span) -> bool:
    return span.name in ("rollout.step", "rollout.prefill")


def is_reward(span: Span) -> bool:
    return span.name == "function.call"


def is_training(span: Span) -> bool:
    return span.name in ("train.accumulate", "train.apply")


def is_micro_batch(span: Span) -> bool:
    return span.name == "train.accumulate"


def run_flow(folder: Path, workload: Workload, *, steps: int, warmup: int, cluster: str, arguments: Sequence[str] = ()) -> Steps:
    """Run the flow on the model and the prompts in `folder`, with the cluster spec given as YAML."""
    with tempfile.TemporaryDirectory() as runs:
        spec = Path(runs) / "cluster.yaml"
        spec.write_text(cluster)
        command = [sys.executable, "-m", "m2flow", "run", str(_FLOW), "--cluster", str(spec), "--runs-dir", runs, "--json", "--quiet"]
        command += ["--num-steps", str(steps + warmup), *_options(folder, workload), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        return _counted(read_spans(Path(summary["run_dir"])), warmup)


def profile_flow(folder: Path, workload: Workload, out: Path, *, cluster: str) -> None:
    """Measure the flow on the model and the prompts in `folder` for the planner, with the cluster spec given as YAML."""
    with tempfile.TemporaryDirectory() as runs:
        spec = Path(runs) / "cluster.yaml"
        spec.write_text(cluster)
        command = [sys.executable, "-m", "m2flow", "profile", str(_FLOW), "--cluster", str(spec), "--runs-dir", runs, "--out", str(out)]
        subprocess.run([*command, *_options(folder, workload)], check=True, stdout=subprocess.DEVNULL)


def _options(folder: Path, workload: Workload) -> list[str]:
    """Options of the flow."""
    sizes = ["--batch", str(workload.num_prompts), "--n", str(workload.n), "--max-new", str(workload.max_new)]
    return ["--model", str(folder), "--prompts", str(folder / "prompts.txt"), *sizes, *(["--full"] if workload.is_full else [])]


def _counted(spans: Sequence[Span], warmup: int) -> Steps:
    ends = sorted(span.end_ns for span in spans if span.name == "train.apply")
    start, end = ends[warmup - 1], ends[-1]
    cut = [
        Span(s.track, s.name, max(s.start_ns, start), min(s.end_ns, end), s.attributes)
        for s in spans
        if s.start_ns < end and s.end_ns > start
    ]
    step_s = [(b - a) / 1e9 for a, b in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
    # A sample counts where it ended.
    tokens = sum(int(str(s.attributes["num_tokens"])) for s in spans if s.name == "sample" and start < s.end_ns <= end)
    return Steps(step_s, tokens / len(step_s), cut)
