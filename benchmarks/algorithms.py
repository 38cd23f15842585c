"""What the algorithms reach on one task with equal samples: held-out accuracy, mean and spread over seeds.

    python benchmarks/algorithms.py [--seeds 5] [--steps 24] [--only gspo cispo] [--into FILE]

Each seed has one warm start on careless demonstrations (350 steps), and each algorithm trains that model for `--steps` rounds of 32
prompts with 8 answers (`benchmarks/flows/sorting.py`). Either the advantage is GRPO's and the loss another, or the loss is PPO's and the
advantage another, all at the same rate and with the options that they have by default. A round is passed over in 4 mini-batches;
`reinforce_1_step` has no ratio and would be wrong for mini-batches after the first, so it takes one step a round, and `grpo_1_step` is
beside it. The rate is no algorithm's best: the table shows that each learns, and which differences are noise.

All algorithms of a seed run in one process, one after the other (`--eager`). Prints a line for each seed, and one JSON object: accuracies
by seed, their mean and sample standard deviation, and the mean difference to `grpo` of the same seed with its standard error. `--into`
adds seeds to what a file has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from m2flow.observe.metrics import read_metrics

FLOW = Path(__file__).parent / "flows" / "sorting.py"
sys.path.append(str(FLOW.parent))
from sorting import ALGORITHMS  # noqa: E402


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What an m2flow command prints."""
    done = subprocess.run([sys.executable, "-m", "m2flow", *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"m2flow {' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def warm_start(folder: Path, seed: int) -> Path:
    runs, model = folder / f"warm-{seed}", folder / f"model-{seed}"
    run(["run", f"{FLOW}:warm", "--seed", str(seed), "--runs-dir", str(runs), "--json", "--quiet", "--eager"])
    run(["export", "--runs-dir", str(runs), "--out", str(model)])
    return model


def accuracies(seed: int, names: Sequence[str], num_steps: int) -> dict[str, float]:
    """Held-out accuracy by algorithm, and `before`."""
    with tempfile.TemporaryDirectory() as folder:
        model = warm_start(Path(folder), seed)
        told = [f"names={','.join(names)}", f"num_steps={num_steps}", f"model={model}"]
        options = [part for one in told for part in ("--set", one)]
        ran = run(["run", f"{FLOW}:compared", *options, "--seed", str(seed), "--eager", "--runs-dir", folder, "--json", "--quiet"])
        metrics = read_metrics(json.loads(ran.splitlines()[-1])["run_dir"])
        return {name: round(metrics[name][-1][1], 4) for name in ("before", *names)}


def described(by_seed: Mapping[str, Mapping[str, float]], name: str) -> dict[str, Any]:
    of_name, of_grpo = ([one[wanted] for one in by_seed.values() if name in one] for wanted in (name, "grpo"))
    differences = [a - b for a, b in zip(of_name, of_grpo, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {
        "mean": round(statistics.mean(of_name), 3),
        "std": round(statistics.stdev(of_name), 3) if len(of_name) > 1 else None,
        "above_grpo": round(statistics.mean(differences), 3),
        "standard_error": error if error is None else round(error, 3),
    }


def table(found: Mapping[str, Any]) -> str:
    """The table of the docs, best first. A difference below two standard errors is noise."""
    lines = ["| algorithm | accuracy, mean | standard deviation | above `grpo` | noise? |", "|---|---|---|---|---|"]
    for name, one in sorted(found["algorithms"].items(), key=lambda pair: -pair[1]["mean"]):
        error = one["standard_error"]
        is_noise = error is None or abs(one["above_grpo"]) <= 2 * error
        said = "" if name == "grpo" else f"{one['above_grpo']:+.3f} +- {error}"
        lines.append(f"| `{name}` | {one['mean']:.3f} | {one['std']} | {said} | {'' if name == 'grpo' else 'yes' if is_noise else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--into", type=Path)
    a = parser.parse_args()
    names = list(dict.fromkeys(["grpo", *a.only]))
    known: dict[str, Any] = json.loads(a.into.read_text()) if a.into and a.into.exists() else {}
    by_seed: dict[str, dict[str, float]] = known.get("by_seed", {})
    for seed in range(a.seeds):
        wanted = [name for name in names if name not in by_seed.get(str(seed), {})]
        if wanted:
            start = time.monotonic()
            by_seed[str(seed)] = by_seed.get(str(seed), {}) | accuracies(seed, wanted, a.steps)
            print(f"seed {seed}: {by_seed[str(seed)]}, {time.monotonic() - start:.0f} s", flush=True)
        found = {
            "hardware": {"cores": os.cpu_count(), "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "steps": a.steps,
            "by_seed": by_seed,
            "algorithms": {name: described(by_seed, name) for name in names},
        }
        if a.into:
            a.into.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found), file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
