"""A planted bottleneck is named by the verdict, and what is suggested first, applied, makes the measured step faster."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planted
import pytest

from m2flow.macro.flow import Flow
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.viewer.analysis import Analysis, analysis_of
from m2flow.viewer.idle import idle_of
from m2flow.viewer.run_trace import RunTrace
from m2flow.viewer.suggestions import Suggestion, suggestions_of

SPLIT: dict[str, dict[str, Any]] = {"rollout": {}, "train": {"token_budget": 512}, "functions": {}, "weights": {}}


@dataclass(frozen=True)
class Planted:
    name: str
    causes: tuple[str, ...]
    """What the verdict may call it."""
    suggested: str
    """A pattern of what is suggested first."""
    options: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, dict[str, Any]] = field(default_factory=dict)


CASES = [
    Planted("waiting reward", ("waiting reward",), r"functions: \{concurrency: \d+\}", {"judge": "waiting"}),
    Planted("slow reward", ("slow reward",), r"functions: \{workers: \d\}", {"judge": "computing"}),
    Planted(
        "too few function workers",
        ("slow reward",),
        r"functions: \{workers: \d\}",
        {"judge": "computing", "n": 3},
        {"functions": {"concurrency": 4}},
    ),
    Planted("starved trainer", ("generation",), r"rollout: \{max_running: 4\}", {"tokens": 24}, {"rollout": {"max_running": 1}}),
    Planted("long tail", ("tail",), r"staleness|oversample|policy: \[|placement", {"longest": 56, "tokens": 4}),
    Planted("slow dataset", ("program",), "rows before the run", {"fetch_s": 1.5}),
]


def ran(flow: Flow, options: dict[str, Any], cluster: dict[str, Any], runs: Path) -> tuple[Path, Analysis]:
    merged = {part: {**values, **cluster.get(part, {})} for part, values in SPLIT.items()}
    spec = ClusterSpec.model_validate({"placement": cluster.get("placement", "split"), "device": "cpu", "cores": 2, **merged})
    run_dir = Path(Run(flow, options, spec, RunSettings(runs_dir=str(runs))).execute().run_dir)
    trace = RunTrace(run_dir)
    assert trace.refresh()
    return run_dir, analysis_of(trace, idle_of(trace))


def applied(case: Planted, options: dict[str, Any], first: Suggestion, runs: Path) -> Analysis:
    cluster: dict[str, Any] = dict(case.cluster)
    for part, values in first.cluster.items():
        cluster[part] = values if isinstance(values, str) else {**cluster.get(part, {}), **values}
    options = dict(options)
    flow = planted.planted
    if "fetch_s" in options:
        options["fetch_s"] = 0.0
    if "staleness" in first.flow:
        flow = planted.loosened
    return ran(flow, options, cluster, runs)[1]


def step_s(analysis: Analysis) -> float:
    """The median of the steps after the first, which warms up."""
    times = sorted(step.makespan_s for step in analysis.steps[1:])
    return times[len(times) // 2]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planted_bottleneck_is_named_and_what_is_suggested_first_makes_the_step_faster(case: Planted, tmp_path: Path) -> None:
    options = dict(case.options)
    run_dir, before = ran(planted.planted, options, case.cluster, tmp_path)
    assert before.verdict.causes[0].name in case.causes, before.verdict
    assert before.verdict.causes[0].says in before.verdict.sentence
    makespans_s = [step.makespan_s for step in before.steps]
    found = suggestions_of(run_dir, planted.planted, options, makespans_s, before.verdict).found
    assert re.search(case.suggested, found[0].what), found
    after = applied(case, options, found[0], tmp_path)
    assert step_s(after) < step_s(before), (found[0], before.verdict.sentence, after.verdict.sentence)
