"""Compare two runs: how much longer one's steps took, where that time went, and their metrics over steps.

    RunTrace, Analysis of each --comparison_of--> Comparison
    metrics.jsonl --read_series--> name -> (steps, values)
    Analysis.steps --series_of_steps--> the same for efficiency, tokens a second and staleness

Only steps that both runs have are compared, so that the warm-up or a longer training of one does not count. The difference of a step is
decomposed in two ways, each of which adds up to it. Along the critical path: seconds a step by line of the flow; lines are matched by the
call and by how often it was called above them, so that a flow that was edited in between still matches. Over all devices: device seconds a
step at work, and idle by cause. A metric's value that was not finite is a gap, and is counted by name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.observe.metrics import metrics_path
from m2flow.planner.explaining import differences
from m2flow.viewer.analysis import Analysis, PathShare, StepAnalysis
from m2flow.viewer.run_trace import SAMPLE, RunTrace

# ---- metrics over steps


@final
class Series(msgspec.Struct):
    """The values of one metric over steps; a later value of a step replaces an earlier one."""

    steps: list[int]
    values: list[float | None]


@final
class Training(msgspec.Struct):
    """The metrics of one run over steps."""

    series: dict[str, Series]
    time_s: Series
    """When each step's last line was written, in seconds since the first."""
    non_finite: dict[str, int]


class _Line(msgspec.Struct):
    step: int
    time_s: float
    values: dict[str, float | None]


def read_series(run_dir: Path) -> Training:
    """Read the metrics written so far; a line that is being written is left for the next time."""
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
    """Make series of each step's efficiency, generated tokens a second, and mean staleness of its samples."""
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


# ---- comparison

BUSY = "at work"
IntArray = npt.NDArray[np.int64]

_QUANTILES = (("median", 0.5), ("90%", 0.9), ("longest", 1.0))


@final
class Pair(msgspec.Struct):
    """A number of both runs; None where a run does not have it."""

    what: str
    one: float | None
    other: float | None
    line: str = ""
    """`flows/grpo.py:23` in the run that has it; in the second run if both have it."""

    @property
    def more(self) -> float:
        """The second run's value minus the first's."""
        return (self.other or 0.0) - (self.one or 0.0)


@final
class MetricPair(msgspec.Struct):
    """A metric of both runs, over the steps in which both recorded it."""

    name: str
    num_steps: int
    one: float
    """Mean over the steps."""
    other: float
    one_last: float
    other_last: float


@final
class Side(msgspec.Struct):
    """One of the two runs, in the steps that are compared."""

    name: str
    flow: str
    mode: str
    cluster: str
    num_devices: int
    step_s: float
    efficiency: float | None
    tokens_per_s: float
    num_samples: int


@final
class Comparison(msgspec.Struct):
    """The comparison of two runs. Seconds are means over the steps that both have."""

    one: Side
    other: Side
    steps: list[int]
    settings: list[str]
    """Differences of the configurations: `batch: 32 -> 64`."""
    plans: list[str]
    """Differences of the plans, as `m2flow diff` prints them."""
    path: list[Pair]
    """Seconds a step on the critical path, by call, the largest difference first. They sum up to the difference of the steps."""
    idle: list[Pair]
    """Device seconds a step at work, and idle by cause, the largest difference first."""
    lengths: list[Pair]
    """Tokens of a response."""
    staleness: list[Pair]
    """Share of the samples of first updates, by versions behind."""
    tokens: list[Pair]
    """Generated tokens over the whole runs: trained on, and by how else their samples ended."""
    metrics: list[MetricPair]

    explained: list[str]
    """The difference in words, its largest parts first."""


_ALIKE = 0.03
"""Two runs whose steps differ by a smaller share are called alike."""
_PART = 0.1
"""Parts below this share of the difference are not put in words."""
_MOST_PARTS = 4
_LENGTH = 0.05
"""Mean lengths that differ by a smaller share are not put in words."""


def comparison_of(one: tuple[RunTrace, Analysis], other: tuple[RunTrace, Analysis], names: tuple[str, str]) -> Comparison:
    """Compare two runs as far as both have come.

    Args:
        names: what the runs are called.
    """
    both = one, other
    steps = sorted({step.step for step in one[1].steps} & {step.step for step in other[1].steps})
    sides = [_side(trace, analysis, name, steps) for (trace, analysis), name in zip(both, names, strict=True)]
    paths = [_path(analysis, steps) for _, analysis in both]
    idle = [_idle(analysis, steps) for _, analysis in both]
    lengths = [_lengths(trace, steps) for trace, _ in both]
    staleness = [_staleness(analysis, steps) for _, analysis in both]
    tokens = [{"trained on": analysis.trained_tokens, **analysis.other_tokens} for _, analysis in both]
    plans = [trace.plan for trace, _ in both]
    found = Comparison(
        one=sides[0],
        other=sides[1],
        steps=steps,
        settings=_settings(one[0].run_dir, other[0].run_dir),
        plans=differences(plans[0], plans[1]) if plans[0] and plans[1] else [],
        path=_paths(paths[0], paths[1]),
        idle=_by_difference(_pairs(idle[0], idle[1], 0.0)),
        lengths=_pairs(lengths[0], lengths[1]),
        staleness=_pairs(staleness[0], staleness[1], 0.0),
        tokens=_pairs(tokens[0], tokens[1], 0) if any(any(found.values()) for found in tokens) else [],
        metrics=_metrics(one[0].run_dir, other[0].run_dir),
        explained=[],
    )
    found.explained = _explained(found)
    return found


def _explained(found: Comparison) -> list[str]:
    one, other = found.one, found.other
    if not found.steps:
        return ["the runs have no step in common"]
    more_s = other.step_s - one.step_s
    if abs(more_s) < _ALIKE * one.step_s:
        said = [f"the steps take alike: {one.step_s:,.3f} s and {other.step_s:,.3f} s"]
    else:
        how = "faster" if more_s < 0 else "slower"
        said = [f"{other.name} is {how}: {other.step_s:,.3f} s a step instead of {one.step_s:,.3f} s, {more_s / one.step_s:+.0%}"]
    least_s = _PART * max(abs(more_s), _ALIKE * one.step_s)
    path = [pair for pair in found.path if abs(pair.more) > least_s]
    said += [f"{pair.more:+,.3f} s a step on the critical path: {_named(pair)}" for pair in path[:_MOST_PARTS]]
    causes = [pair for pair in found.idle if pair.what != BUSY and abs(pair.more) > least_s]
    said += [f"{pair.more:+,.3f} device seconds a step idle for {pair.what}" for pair in causes[:_MOST_PARTS]]
    length = next((pair for pair in found.lengths if pair.what == "mean"), None)
    if length and length.one and abs(length.more) > _LENGTH * length.one:
        said.append(f"samples have {length.more / length.one:+.0%} tokens, so a step is not the same work")
    if one.tokens_per_s and other.tokens_per_s:
        said.append(f"{other.tokens_per_s / one.tokens_per_s - 1:+.0%} tokens a second")
    return said


def _side(trace: RunTrace, analysis: Analysis, name: str, steps: Sequence[int]) -> Side:
    mine = [step for step in analysis.steps if step.step in set(steps)]
    whole_s = sum(step.makespan_s for step in mine)
    bound_s = sum(max(step.bounds_s.values(), default=0.0) for step in mine)
    config = _config(trace.run_dir)
    return Side(
        name=name,
        flow=str(config.get("flow", "")),
        mode=trace.plan.mode if trace.plan else "",
        cluster=trace.plan.cluster if trace.plan else "",
        num_devices=sum(device.num_devices for device in analysis.devices),
        step_s=whole_s / len(mine) if mine else 0.0,
        efficiency=min(bound_s / whole_s, 1.0) if whole_s and bound_s else None,
        tokens_per_s=sum(step.tokens for step in mine) / whole_s if whole_s else 0.0,
        num_samples=len(_sample_spans(trace, steps)),
    )


def _sample_spans(trace: RunTrace, steps: Sequence[int]) -> IntArray:
    if not trace.columns.num_spans:
        return np.zeros(0, np.int64)
    return np.flatnonzero((trace.group == SAMPLE) & np.isin(trace.step, steps) & (trace.columns["num_tokens"] > 0))


def _lengths(trace: RunTrace, steps: Sequence[int]) -> dict[str, float]:
    """Compute mean and quantiles of the lengths of samples.

    A sample that ran in several places has a span in each: the last of them has all of its tokens.
    """
    sample_spans = _sample_spans(trace, steps)
    if not len(sample_spans):
        return {}
    most: dict[int, int] = {}
    for sample, tokens in zip(
        trace.columns["sample"][sample_spans].tolist(), trace.columns["num_tokens"][sample_spans].tolist(), strict=True
    ):
        most[sample] = max(tokens, most.get(sample, 0))
    values = np.array(list(most.values()))
    return {"mean": float(values.mean()), **{name: float(np.quantile(values, at)) for name, at in _QUANTILES}}


def _path(analysis: Analysis, steps: Sequence[int]) -> list[PathShare]:
    """Return the seconds a step on the critical path, by call."""
    found: dict[tuple[str, str], float] = {}
    mine = [step for step in analysis.steps if step.step in set(steps)]
    for step in mine:
        for share in step.path:
            found[share.label, share.line] = found.get((share.label, share.line), 0.0) + share.seconds
    return [PathShare(label, line, seconds / len(mine), 0.0) for (label, line), seconds in found.items()]


def _paths(one: Sequence[PathShare], other: Sequence[PathShare]) -> list[Pair]:
    sides = [dict(_numbered(shares)) for shares in (one, other)]
    pairs = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        mine, theirs = sides[0].get(key), sides[1].get(key)
        line = theirs.line if theirs else mine.line if mine else ""
        pairs.append(Pair(key[0], mine.seconds if mine else 0.0, theirs.seconds if theirs else 0.0, line))
    return _by_difference(pairs)


def _numbered(shares: Iterable[PathShare]) -> Iterable[tuple[tuple[str, int], PathShare]]:
    """Key the shares by their call and by its number among the calls of that name, from the top of the flow's file."""
    seen: Counter[str] = Counter()
    for share in sorted(shares, key=lambda share: (share.line.rpartition(":")[0], _line_number(share.line))):
        yield (share.label, seen[share.label]), share
        seen[share.label] += 1


def _line_number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _idle(analysis: Analysis, steps: Sequence[int]) -> dict[str, float]:
    """Return the device seconds a step at work, and idle by cause."""
    mine = [step for step in analysis.steps if step.step in set(steps)]
    found = {BUSY: sum(step.busy_s for step in mine) / len(mine)} if mine else {}
    for step in mine:
        for cause, seconds in step.idle_s.items():
            found[cause] = found.get(cause, 0.0) + seconds / len(mine)
    return found


def _staleness(analysis: Analysis, steps: Sequence[int]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for step in analysis.steps:
        if step.step in set(steps):
            found.update(step.staleness)
    return {behind: number / found.total() for behind, number in sorted(found.items(), key=lambda item: int(item[0]))}


def _pairs(one: Mapping[str, float], other: Mapping[str, float], missing: float | None = None) -> list[Pair]:
    return [Pair(name, one.get(name, missing), other.get(name, missing)) for name in dict.fromkeys([*one, *other])]


def _by_difference(pairs: Iterable[Pair]) -> list[Pair]:
    return sorted(pairs, key=lambda pair: -abs(pair.more))


def _metrics(one: Path, other: Path) -> list[MetricPair]:
    sides = [read_series(one).series, read_series(other).series]
    found = []
    for name in sorted(set(sides[0]) & set(sides[1])):
        values = [
            {step: value for step, value in zip(side[name].steps, side[name].values, strict=True) if value is not None} for side in sides
        ]
        steps = sorted(set(values[0]) & set(values[1]))
        if steps:
            means = [sum(of[step] for step in steps) / len(steps) for of in values]
            found.append(MetricPair(name, len(steps), means[0], means[1], values[0][steps[-1]], values[1][steps[-1]]))
    return found


def _settings(one: Path, other: Path) -> list[str]:
    """List the differences of the two configurations, each with its path."""
    flat = [dict(_flat("", {key: value for key, value in _config(path).items() if key in _ASKED})) for path in (one, other)]
    names = dict.fromkeys([*flat[0], *flat[1]])
    return [
        f"{name}: {_shown_value(flat[0].get(name))} -> {_shown_value(flat[1].get(name))}"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]


_ASKED = ("flow", "options", "settings", "cluster", "simulated")


def _flat(place: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{place}.{key}" if place else str(key), inner)
    else:
        yield place, value


def _shown_value(value: object) -> str:
    return "not said" if value is None else value if isinstance(value, str) else json.dumps(value)


def _config(run_dir: Path) -> dict[str, object]:
    try:
        found = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(pair: Pair) -> str:
    return f"{pair.what} ({pair.line})" if pair.line else pair.what
