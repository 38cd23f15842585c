"""A run's metrics as series over steps.

    metrics.jsonl --read_series--> name -> (steps, values)
    Analysis.steps --series_of_steps--> the same of what the schedule made of each step

A value that was not finite is a gap, and is counted by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import msgspec

from m2flow.micro.analysis.report import StepAnalysis
from m2flow.observe.metrics import metrics_path


@final
class Series(msgspec.Struct):
    """Of one metric; a later value of a step replaces an earlier one."""

    steps: list[int]
    values: list[float | None]


@final
class Training(msgspec.Struct):
    """Of one run."""

    series: dict[str, Series]
    time_s: Series
    """When each step's last line was written, in seconds since the first."""
    non_finite: dict[str, int]


class _Line(msgspec.Struct):
    step: int
    time_s: float
    values: dict[str, float | None]


def read_series(run_dir: Path) -> Training:
    """What is there so far; a line that is being written is left for the next time."""
    found: dict[str, dict[int, float | None]] = {}
    times: dict[int, float] = {}
    non_finite: dict[str, int] = {}
    decoder = msgspec.json.Decoder(_Line)
    path = metrics_path(run_dir)
    for text in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError:
            continue
        times[line.step] = line.time_s
        for name, value in line.values.items():
            found.setdefault(name, {})[line.step] = value
            if value is None:
                non_finite[name] = non_finite.get(name, 0) + 1
    began = min(times.values(), default=0.0)
    return Training(
        {name: _series(values) for name, values in found.items()},
        _series({step: at - began for step, at in times.items()}),
        non_finite,
    )


def series_of_steps(steps: Sequence[StepAnalysis]) -> dict[str, Series]:
    """How near each step came to its bound, generated tokens a second, and how many versions behind its samples were, on average."""
    found: dict[str, dict[int, float | None]] = {"schedule/efficiency": {}, "schedule/tokens_per_s": {}, "schedule/staleness": {}}
    for one in steps:
        if one.efficiency is not None:
            found["schedule/efficiency"][one.step] = one.efficiency
        if one.makespan_s > 0:
            found["schedule/tokens_per_s"][one.step] = one.tokens / one.makespan_s
        number = sum(one.staleness.values())
        if number:
            found["schedule/staleness"][one.step] = sum(int(behind) * count for behind, count in one.staleness.items()) / number
    return {name: _series(values) for name, values in found.items() if values}


def _series(values: dict[int, float | None]) -> Series:
    steps = sorted(values)
    return Series(steps, [values[step] for step in steps])
