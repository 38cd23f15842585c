"""What a mismatch between rollout and trainer does to learning, and what a correction does about it: reward by step.

    python benchmarks/mismatch.py [--seeds 3] [--steps 60] [--bits 4] [--lr 1e-4] [--into FILE] [--draw SVG]

The task of `flows/grpo.py` from a warm start, float32 training. The rollout engine samples with weights that are rounded to `--bits` bits
(`benchmarks/sides/rounded.py`) and up to 4 updates old; each round takes two optimiser steps. The same without a mismatch, and with it:

    none            the loss clips around the trainer's own log-probabilities; who sampled counts nothing
    rollout as old  the loss clips around the rollout's log-probabilities: no pass of the trainer before an update
    truncated, masked        as none, and each token weighted by its ratio (`Correction(upper=2)`; mask outside 0.5 to 2)

Prints a line for each run, and one JSON object: rewards by step, the mean of the last ten, and its ratio to the run without mismatch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from algorithms import FLOW, run, warm_start
from sides.rounded import registered

from m2flow.observe.metrics import read_metrics

ARMS = ("no mismatch", "none", "rollout as old", "truncated", "masked")


def trained(arm: str, model: Path, seed: int, a: argparse.Namespace) -> dict[str, Any]:
    """Train, and return rewards by step and how far the two sides were apart."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "cluster.yaml"
        engine = "embedded" if arm == "no mismatch" else f"rounded, options: {{bits: {a.bits}}}"
        placed = f"name: mismatch\nplacement: split\nrollout: {{engine: {engine}}}\n"
        spec.write_text(f"{placed}weights: {{probe: never, warn_above: null}}\n")
        flow, correction = ("matched", "none") if arm == "no mismatch" else ("stale", arm)
        told = [f"model={model}", f"correction={correction}", f"num_steps={a.steps}", f"lr={a.lr}"]
        options = [part for one in told for part in ("--set", one)]
        command = ["run", f"{FLOW}:{flow}", *options, "--seed", str(seed), "--cluster", str(spec)]
        ran = run([*command, "--runs-dir", folder, "--json", "--quiet"], registered(Path(folder)))
        metrics = read_metrics(json.loads(ran.splitlines()[-1])["run_dir"])
    apart = [value for name in ("logprob_diff_abs",) for _, value in metrics[name]]
    return {"reward": [round(value, 4) for _, value in metrics["reward"]], "logprob_diff_abs": round(statistics.mean(apart), 4)}


def last(rewards: list[float]) -> float:
    return statistics.mean(rewards[-10:])


def draw(arms: Mapping[str, list[Mapping[str, Any]]], path: Path) -> None:
    """Draw the mean over seeds of each arm, and the range between them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "m2flow", "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for name, runs in arms.items():
            by_step = list(zip(*(smooth(one["reward"]) for one in runs), strict=True))
            (line,) = axes.plot([statistics.mean(step) for step in by_step], label=name, linewidth=1.6)
            axes.fill_between(range(len(by_step)), list(map(min, by_step)), list(map(max, by_step)), alpha=0.15, color=line.get_color())
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.03))
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})


def smooth(values: list[float], half: int = 2) -> list[float]:
    return [statistics.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--draw", type=Path)
    a = parser.parse_args()
    arms: dict[str, list[Mapping[str, Any]]] = {arm: [] for arm in a.only}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(a.seeds):
            model = warm_start(Path(folder), seed)
            for arm, runs in arms.items():
                runs.append(trained(arm, model, seed, a))
                apart = runs[-1]["logprob_diff_abs"]
                print(f"seed {seed} {arm}: {last(runs[-1]['reward']):.3f} at the end, {apart} nats apart", flush=True)
    means = {arm: statistics.mean(last(list(one["reward"])) for one in runs) for arm, runs in arms.items()}
    best = means.get("no mismatch")
    found = {
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {"bits": a.bits, "lr": a.lr, "steps": a.steps, "staleness": 4},
        "last_ten": {arm: round(mean, 3) for arm, mean in means.items()},
        "over_no_mismatch": {arm: round(mean / best, 3) for arm, mean in means.items()} if best else {},
        "runs": arms,
    }
    if a.into:
        a.into.write_text(json.dumps(found) + "\n")
    if a.draw:
        draw(arms, a.draw)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
