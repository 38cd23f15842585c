"""What every flow of `flows/` that learns reaches, and what it costs: learning curves and CPU seconds for several seeds.

    python benchmarks/flows.py [--seeds 0 1 2] [--only gspo ppo] [--into benchmarks/results/flows.json]
    python benchmarks/flows.py --show        writes the table and the figure of the docs from that file, and runs nothing

Runs `m2flow run flows/NAME.py --seed S` one after the other, on one core each, so that other work on the machine changes wall time
alone: the seconds are those of CPU, of all processes from start to summary. Each run is added to the file when it is over; one that
is there already is not repeated. The last line is the file's JSON. `chat` and `grpo_smollm`, about loading pretrained models, are not here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from m2flow.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "images" / "flows.svg"
CLUSTER = "name: one-core\ncores: 1\n"


class Measure(NamedTuple):
    """What is read of a flow's metrics."""

    curve: str = "accuracy"
    """Its learning curve."""
    what: str = "held-out accuracy"
    states: float = 0.9
    """What the last value is at least, for every seed: what the flow is said to reach."""


_SAMPLED = "right answers among those sampled"
FLOWS: dict[str, Measure] = {
    "grpo": Measure(states=0.95),
    "dapo": Measure(),
    "gspo": Measure(),
    "reinforce_pp": Measure(),
    "async_grpo": Measure(),
    "decoupled_ppo": Measure(),
    "best_of_n": Measure(),
    "curriculum": Measure(),
    "moe_routing_replay": Measure(),
    "sft_then_dpo": Measure("sorted", states=0.8),
    "reward_model_then_ppo": Measure(),
    "ppo": Measure("reward", _SAMPLED, states=0.7),
    "distill": Measure("student", states=0.7),
    "judge": Measure("sorted", _SAMPLED, states=0.8),
    "selfplay": Measure("first_digit", "mean digit of the first player", states=8),
}


def run(name: str, seed: int) -> dict[str, Any]:
    """Run a flow, and return its curve and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "one-core.yaml"
        spec.write_text(CLUSTER)
        command = [sys.executable, "-m", "m2flow", "run", f"flows/{name}.py", "--seed", str(seed), "--cluster", str(spec)]
        start, cpu_s = time.monotonic(), _children_s()
        done = subprocess.run([*command, "--runs-dir", folder, "--json", "--quiet"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        curve = read_metrics(summary["run_dir"])[FLOWS[name].curve]
        return {
            "curve": [[step, round(value, 4)] for step, value in curve],
            "steps": summary["steps"],
            "samples": summary["samples"],
            "cpu_s": round(_children_s() - cpu_s, 1),
            "wall_s": round(time.monotonic() - start, 1),
            "load": round(os.getloadavg()[0], 1),
        }


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(found, indent=None, separators=(",", ":")).replace('"flows":{', '"flows":{\n').replace("}},", "}},\n") + "\n"
    )


def table(flows: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the docs."""
    lines = ["| flow | steps | samples | CPU s | measure | at the start | at the end | stated | seeds |", "|" + "---|" * 9]
    for name, measure in FLOWS.items():
        runs = [flows.get(name, {})[seed] for seed in sorted(flows.get(name, {}))]
        if runs:
            ends = [_span([one["curve"][at][1] for one in runs]) for at in (0, -1)]
            cells = [
                f"`{name}`",
                runs[0]["steps"],
                runs[0]["samples"],
                _span([one["cpu_s"] for one in runs], 0),
                measure.what,
                *ends,
                f"{measure.states:g}" + ("" if all(one["curve"][-1][1] >= measure.states for one in runs) else ", **not reached**"),
                len(runs),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _span(values: Sequence[float], digits: int = 3) -> str:
    low, high = (f"{bound:.{digits}f}" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def draw(flows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a panel for each flow, a line for each seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [name for name in FLOWS if flows.get(name)]
    with rc_context({"font.family": "sans-serif", "font.size": 7.5, "svg.hashsalt": "m2flow", "text.parse_math": False}):
        rows = -(-len(names) // 5)
        figure = Figure(figsize=(9, 1.7 * rows), layout="constrained", facecolor="white")
        panels = figure.subplots(rows, 5, squeeze=False).flatten()
        for panel, name in zip(panels, names, strict=False):
            for one in flows[name].values():
                panel.plot(*zip(*one["curve"], strict=True), "-" if len(one["curve"]) > 12 else ".-", linewidth=0.9, markersize=3)
            panel.set_title(name, fontsize=8, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_ylim(*((0, 9.3) if name == "selfplay" else (0, 1.03)))
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        figure.savefig(FIGURE, metadata={"Date": None})


def show(found: Mapping[str, Any]) -> None:
    """Write the figure, and put the table between the marks of the page."""
    draw(found["flows"])
    page = RESULTS / "flows.md"
    before, mark, rest = page.read_text().partition("<!-- table -->\n")
    page.write_text(f"{before}{mark}{table(found['flows'])}\n{rest[rest.index('<!-- end -->') :]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(FLOWS), default=list(FLOWS), metavar="NAME")
    parser.add_argument("--into", type=Path, default=RESULTS / "flows.json")
    parser.add_argument("--show", action="store_true")
    a = parser.parse_args()
    found: dict[str, Any] = json.loads(a.into.read_text()) if a.into.exists() else {}
    found.setdefault("hardware", {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(), "cores": 1})
    found.setdefault("versions", {"python": platform.python_version(), "torch": torch.__version__})
    flows = found.setdefault("flows", {})
    for seed in [] if a.show else a.seeds:
        for name in a.only:
            if str(seed) not in flows.setdefault(name, {}):
                flows[name][str(seed)] = one = run(name, seed)
                print(f"{name} {seed}: {one['curve'][0][1]:.3f} to {one['curve'][-1][1]:.3f}, {one['cpu_s']:.0f} s", flush=True)
                write(a.into, found)
    if a.show:
        show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
