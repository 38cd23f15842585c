"""Prove a machine's GPU: tests that need one, then measurements, each beside what the planner predicts. One command, no network.

    make gpu                      all stages on the first GPU; one that was stopped goes on where it was
    make gpu DEVICE=cpu           the same at toy size without a GPU, so that the kit can't rot
    python benchmarks/gpu/kit.py [--device cuda] [--only STAGE ...] [--again] [--into build/gpu]

Each stage of `stages.py` runs in a process of its own, under a limit of time: a stage that crashes the driver's context or hangs costs that
stage alone, and what is measured is not what an earlier stage left in memory. The first of them draws the models' weights on the device and
writes them below `<into>`, which the others load. A result is written at once to `<into>/<stage>.json`; a stage whose result is there is
not run again. At the end everything is put into `gpu.json` and `gpu.md`. The exit status is 1 if a stage failed. What the kit needs beyond
torch, transformers, numpy and safetensors is in `requirements.txt` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STAGES = (
    "environment",
    "tests",
    "agreement",
    "decode",
    "training",
    "deepspeed",
    "switches",
    "weights",
    "main_job",
    "sized_job",
    "plan_7b",
)
"""In their order; each is a function of `stages.py`. That loads PyTorch, which this process does without."""
FOLDER = "M2FLOW_GPU_KIT_MODELS"
"""The environment variable that says where the kit's stages have their models."""
LIMIT_S = {"tests": 300.0, "main_job": 300.0, "deepspeed": 300.0}
"""Stages that may take longer than the others."""
_OTHERS_S = 200.0


def run_stage(stage: str, device: str, folder: Path) -> dict[str, Any]:
    """Run a stage in a child, and return its result, with `seconds` and, if it failed, `error`."""
    result, log = folder / f"{stage}.out.json", folder / f"{stage}.log"
    result.unlink(missing_ok=True)
    started = time.perf_counter()
    with log.open("w") as text:
        command = [sys.executable, str(Path(__file__).with_name("stages.py")), stage, "--device", device, "--into", str(result)]
        models = os.environ | {FOLDER: str(folder / "models")}
        process = subprocess.Popen(
            command, stdout=text, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=models
        )
        try:
            status: int | str = process.wait(LIMIT_S.get(stage, _OTHERS_S))
        except subprocess.TimeoutExpired:
            status = f"it was ended after {LIMIT_S.get(stage, _OTHERS_S):.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    found = json.loads(result.read_text()) if result.exists() else {}
    result.unlink(missing_ok=True)
    if status != 0:
        last = log.read_text().strip().splitlines()[-12:]
        found["error"] = f"{f'exit status {status}' if isinstance(status, int) else status}; {log} ends: " + " | ".join(last)
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the results as Markdown: a line for each number, with the planner's prediction and their ratio where there is one."""
    lines = ["# GPU kit", ""]
    for stage, found in results.items():
        lines += [f"## {stage.replace('_', ' ')} ({found['seconds']} s)", ""]
        if "error" in found:
            lines += [f"**failed**: {found['error']}", ""]
        facts = found.get("facts", {})
        lines += [f"- {name}: {value}" for name, value in facts.items()] + ([""] if facts else [])
        if rows := found.get("rows"):
            names = list(dict.fromkeys(name for row in rows for name in row))
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows] + [""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu at toy size")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--again", action="store_true", help="run stages that have a result, too")
    parser.add_argument("--into", type=Path, default=Path("build/gpu"))
    a = parser.parse_args()
    folder = (a.into / a.device).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for stage in a.only:
        kept = folder / f"{stage}.json"
        if kept.exists() and not a.again and "error" not in (found := json.loads(kept.read_text())):
            print(f"{stage:<12} has a result", flush=True)
        else:
            print(f"{stage:<12} ...", end="", flush=True)
            found = run_stage(stage, a.device, folder)
            kept.write_text(json.dumps(found, indent=1))
            print(f" {found['seconds']} s {'FAILED: ' + found['error'] if 'error' in found else ''}", flush=True)
        results[stage] = found
    (folder / "gpu.json").write_text(json.dumps(results, indent=1))
    (folder / "gpu.md").write_text(page(results))
    print(f"results are in {folder / 'gpu.json'} and {folder / 'gpu.md'}")
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
