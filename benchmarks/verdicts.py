"""What the first suggestion of `m2flow analyze` is worth, on flows with one planted bottleneck each.

    python benchmarks/verdicts.py [--rounds 3] [--case "slow reward"]

A flow whose reward waits or computes, whose rollout engine or function workers are too few, whose longest samples hold up the step, or
whose program reads its rows slowly (`tests/support/planted.py`) runs as it is; the first suggestion for it is applied, and it runs again.
A step's time is the median of those after the first, and of the rounds. Prints one JSON object: for each case the verdict, the suggestion,
seconds a step before and after, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import planted
from planted import CASES, Planted

from m2flow.viewer.analysis import Analysis


def step_s(analysis: Analysis) -> float:
    """The median of the steps after the first, which warms up."""
    return statistics.median(step.makespan_s for step in analysis.steps[1:])


def measured(case: Planted, num_rounds: int) -> dict[str, object]:
    """Rounds of one case, as it is and with the first suggestion for it."""
    before_s, after_s, says, suggested = [], [], "", ""
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory() as runs:
            run_dir, before = planted.ran(dict(case.options), case.cluster, Path(runs))
            first = planted.first_suggestion(case, run_dir, before)
            before_s.append(step_s(before))
            after_s.append(step_s(planted.applied(case, first, Path(runs))))
            says, suggested = before.verdict.sentence, first.what
    numbers = {"before_s": statistics.median(before_s), "after_s": statistics.median(after_s)}
    ratio = statistics.median(one / other for one, other in zip(before_s, after_s, strict=True))
    return {
        "verdict": says,
        "suggestion": suggested,
        **{name: round(value, 4) for name, value in numbers.items()},
        "ratio": round(ratio, 2),
    }


def main() -> None:
    """Measure, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    args = parser.parse_args()
    found = {case.name: measured(case, args.rounds) for case in CASES if args.case in (None, case.name)}
    hardware = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"hardware": hardware, "rounds": args.rounds, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
