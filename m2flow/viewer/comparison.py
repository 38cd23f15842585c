"""Compare runs: what was asked for, how much longer one's steps took and where that time went, and their metrics over steps.

    RunTrace, Analysis of each --comparison_of--> Comparison
    metrics.jsonl --read_series--> name -> (steps, values);  name --about_metric--> MetricAbout: section, definition, healthy values
    Analysis.steps --series_of_steps--> the same for efficiency, tokens a second and staleness

Only steps that both runs have are compared, so that the warm-up or a longer training of one does not count. The difference of a step is
decomposed in two ways, each of which adds up to it. Along the critical path: seconds a step by line of the flow; lines are matched by the
call and by how often it was called above them, so that a flow that was edited in between still matches. Over all devices: device seconds a
step at work, and idle by cause. A metric's value that was not finite is a gap, and is counted by name.

`compare` takes one run or several seeds a side, and says what was asked for, then the time, then the learning.

    config.json of each side --differences--> what was asked for        analysis --comparison_of--> the time
    metrics.jsonl of each side --learned--> reward, accuracy, entropy, with confidence over seeds

With several runs a side, only what differs between all of one side and all of the other counts as asked for: the seeds do not. The time
is that of the first run of each side.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import M2FlowError, OptionError, SpecError
from m2flow.micro.records.provenance import Difference, read_configuration
from m2flow.micro.records.provenance import differences as configuration_differences
from m2flow.micro.records.rundir import reading_ledger
from m2flow.observe.metrics import metrics_path, read_metrics, split_line
from m2flow.observe.spans import SpanName
from m2flow.planner.explaining import differences
from m2flow.viewer.analysis import Analysis, PathShare, StepAnalysis, analysis_of
from m2flow.viewer.run_trace import SAMPLE, TRAIN, RunTrace, idle_of

# ---- two runs


# ---- metrics over steps


@final
class Series(msgspec.Struct):
    """The values of one metric over steps; a later value of a step replaces an earlier one."""

    steps: list[int]
    values: list[float | None]


@final
class MetricAbout(msgspec.Struct):
    """What a metric is."""

    section: str
    """One of `SECTIONS`."""
    means: str = ""
    healthy: str = ""
    low: float | None = None
    """The least healthy value, where there is one for all runs."""
    high: float | None = None


@final
class Bands(msgspec.Struct):
    """Quantiles of a number over the samples of each step, evaluations not included."""

    steps: list[int]
    quantiles: dict[str, list[float]]
    """`least`, `p10`, `p25`, `median`, `p75`, `p90`, `most` -> one value a step."""


@final
class SetupCurve(msgspec.Struct):
    """The optimiser steps of an update before the loop."""

    label: str
    line: str
    at_s: list[float]
    """When each ended, in seconds since the first began."""
    loss: list[float | None]
    num_steps: int
    """How many there have been."""
    most_steps: int | None
    """How many there will be; None where that is not known."""
    left_s: float | None
    """Seconds until the last one, at the pace so far; 0 once the loop has begun."""


SECTIONS = ("learning", "stability", "mismatch", "lengths", "speed", "other")
_ABOUT: tuple[tuple[str, MetricAbout], ...] = (
    (r"(setup/)?reward", MetricAbout("learning", "mean reward of the samples that the update trained on", "rises, then levels off")),
    (r"reward_std", MetricAbout("learning", "standard deviation of these rewards")),
    (
        r"groups_without_advantage",
        MetricAbout(
            "learning", "share of groups all of whose advantages are 0", "below 0.7: only the others say what is better", None, 0.7
        ),
    ),
    (
        r"(eval/)?(accuracy|pass@\d+|maj@\d+|avg).*",
        MetricAbout("learning", "evaluation: the share or mean over a dataset kept apart", "rises"),
    ),
    (
        r"(.*/)?entropy",
        MetricAbout(
            "stability", "mean entropy of the policy's next-token distribution, nats", "falls slowly; near 0 it explores no more", 0.02
        ),
    ),
    (r"(.*/)?grad_norm", MetricAbout("stability", "norm of the gradient before clipping", "steady; ten times its median is an explosion")),
    (r"(.*/)?loss", MetricAbout("stability", "the loss of the update", "finite; of a policy gradient its level says little")),
    (r"(.*/)?lr", MetricAbout("stability", "learning rate of the last optimiser step", "as scheduled")),
    (
        r"(.*/)?(kl|kl_to_reference)",
        MetricAbout("stability", "divergence from the reference policy, nats a token", "small and slowly rising"),
    ),
    (r"clipped(_.*)?", MetricAbout("stability", "share of tokens whose ratio the loss clipped", "below 0.3", None, 0.3)),
    (r"ratio", MetricAbout("stability", "mean ratio of the new policy's probability of a token to the old one's", "near 1", 0.8, 1.25)),
    (
        r"logprob_diff_abs",
        MetricAbout(
            "stability", "mean |difference| of log-probabilities: weights of the update to those that sampled", "below 0.1", None, 0.1
        ),
    ),
    (
        r"rollout_diff/mean",
        MetricAbout(
            "mismatch",
            "mean |difference| of log-probabilities, trainer to rollout engine, same weights, nats",
            "1e-7 to 1e-5 in float32, up to 0.02 in bfloat16",
            None,
            0.02,
        ),
    ),
    (r"rollout_diff/max", MetricAbout("mismatch", "the largest of these differences", "below 1; more with experts", None, 1.0)),
    (
        r"rollout_diff/k3",
        MetricAbout("mismatch", "estimate of KL(rollout || trainer) with the same weights, nats a token", "below 0.001", None, 1e-3),
    ),
    (r"rollout_diff/tokens", MetricAbout("mismatch", "tokens that were compared", "")),
    (
        r"rollout_kl(/.*)?",
        MetricAbout("mismatch", "estimate of KL(rollout || trainer before the update), nats a token", "below 0.01", None, 0.01),
    ),
    (
        r"proximal_kl(/.*)?",
        MetricAbout("mismatch", "estimate of KL(trainer before the update || rollout), nats a token", "below 0.01", None, 0.01),
    ),
    (r"chi_square(/.*)?", MetricAbout("mismatch", "chi-square divergence of trainer and rollout", "below 0.1", None, 0.1)),
    (
        r"effective_sample_share(/.*)?",
        MetricAbout("mismatch", "effective sample size as a share: (mean w)^2 / mean w^2 of the correction's weights", "above 0.5", 0.5),
    ),
    (
        r"rollout_ratio_p\d+(/.*)?",
        MetricAbout("mismatch", "quantile over tokens of p_trainer / p_rollout", "p50 near 1; p01 and p99 within 0.5 to 2", 0.5, 2.0),
    ),
    (
        r"correction_(clipped|vetoed)(/.*)?",
        MetricAbout("mismatch", "share of tokens whose weight a bound, or the veto, changed", "below 0.1", None, 0.1),
    ),
    (r"correction_weight(/.*)?", MetricAbout("mismatch", "mean importance weight of the correction", "near 1", 0.8, 1.25)),
    (r"(.*/)?response_length", MetricAbout("lengths", "mean tokens of a response", "a quick rise without reward is padding")),
    (r"lengths/.*_ratio", MetricAbout("lengths", "mean length of this class by that of all samples of the step", "near 1", 0.5, 2.0)),
    (r"lengths/.*_num", MetricAbout("lengths", "samples of this class")),
    (r"lengths/.*_mean", MetricAbout("lengths", "mean tokens of a response of this class")),
    (r"lengths/.*_reward", MetricAbout("lengths", "mean first reward of this class")),
    (r"schedule/efficiency", MetricAbout("speed", "the step's lower bound by its time, without evaluations", "above 0.5", 0.3)),
    (r"schedule/tokens_per_s", MetricAbout("speed", "tokens generated in the step by its seconds")),
    (r"schedule/staleness", MetricAbout("speed", "mean versions that trained samples are behind", "within the flow's bound")),
    (r"(.*/)?num_(tokens|sequences|steps)", MetricAbout("speed", "tokens, samples or optimiser steps of the update")),
)


def about_metric(name: str) -> MetricAbout:
    """Return the section of a metric, its definition and its healthy values.

    >>> about_metric("rollout_diff/mean").section, about_metric("my_metric").section
    ('mismatch', 'other')
    >>> about_metric("critic/update_2/loss").means
    "of the flow's line 2 that trains it: the loss of the update"
    """
    line, plain = split_line(name)
    found = next((about for pattern, about in _ABOUT if re.fullmatch(pattern, plain)), MetricAbout("other"))
    if line and found.means:
        number = line.removeprefix("update_").removesuffix("/")
        found = msgspec.structs.replace(found, means=f"of the flow's line {number} that trains it: {found.means}")
    if name.startswith("setup/"):
        return msgspec.structs.replace(found, means=f"before the loop: {found.means}" if found.means else "before the loop")
    return found


@final
class Training(msgspec.Struct):
    """The metrics of one run over steps."""

    series: dict[str, Series]
    time_s: Series
    """When each step's last line was written, in seconds since the first."""
    non_finite: dict[str, int]
    tokens: Series
    """Tokens trained on up to and with each step."""
    about: dict[str, MetricAbout]
    bands: dict[str, Bands]
    """Distributions over the samples of each step."""
    setup: SetupCurve | None
    """What an update before the loop (a warm start) reported so far."""


class _Line(msgspec.Struct):
    step: int
    time_s: float
    values: dict[str, float | None]


_line_decoder = msgspec.json.Decoder(_Line)


def read_series(run_dir: Path) -> Training:
    """Read the metrics written so far; a line that is being written is left for the next time."""
    found: dict[str, dict[int, float | None]] = {}
    times: dict[int, float] = {}
    non_finite: dict[str, int] = {}
    decoder = _line_decoder
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
    tokens: dict[int, float | None] = {}
    sum_ = 0.0
    for step, number in sorted(found.get("num_tokens", {}).items()):
        sum_ += number or 0.0
        tokens[step] = sum_
    return Training(
        series={name: _series(values) for name, values in found.items()},
        time_s=_series({step: at - began for step, at in times.items()}),
        non_finite=non_finite,
        tokens=_series(tokens),
        about={name: about_metric(name) for name in found},
        bands={},
        setup=None,
    )


_QUANTILES_OF_BANDS = {"least": 0.0, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "most": 1.0}


def bands_of(steps: Sequence[int], values: Sequence[float | None], wanted: Sequence[bool]) -> Bands:
    """Return quantiles of the values of each step; of the samples that are wanted and have a value."""
    known = np.array([value is not None and keep for value, keep in zip(values, wanted, strict=True)], np.bool_)
    of_step = np.array(steps, np.int64)[known]
    held = np.array([value if value is not None else np.nan for value in values], np.float64)[known]
    numbers = np.unique(of_step)
    found: dict[str, list[float]] = {name: [] for name in _QUANTILES_OF_BANDS}
    for number in numbers:
        at = np.quantile(held[of_step == number], list(_QUANTILES_OF_BANDS.values()))
        for name, value in zip(_QUANTILES_OF_BANDS, at.tolist(), strict=True):
            found[name].append(round(value, 6))
    return Bands(numbers.tolist(), found)


def setup_curve(trace: RunTrace) -> SetupCurve | None:
    """Return the optimiser steps that were made before the loop; None: there was none."""
    columns = trace.columns
    if SpanName.TRAIN_APPLY not in columns.names.texts:
        return None
    applies = columns["name"] == columns.names.texts.index(SpanName.TRAIN_APPLY)
    early = np.flatnonzero(applies & (trace.step < 0) & (trace.call >= 0))
    if not len(early):
        return None
    early = early[np.argsort(columns["end"][early], kind="stable")]
    mine = early[trace.call[early] == trace.call[early[-1]]]
    call = trace.calls.by_ordinal.get(int(trace.call[mine[0]]))
    works = np.flatnonzero((trace.call == trace.call[mine[0]]) & (trace.group == TRAIN))
    began = int(columns["start"][works].min())
    at_s = ((columns["end"][mine] - began) / 1e9).round(3).tolist()
    most = _steps_asked(trace, call.ordinal) if call else None
    is_over = bool(trace.steps) or (most is not None and len(mine) >= most)
    left_s = 0.0 if is_over else None if most is None else at_s[-1] / len(mine) * (most - len(mine))
    role = call.name.partition(".")[0] if call else ""
    losses = trace.columns.counters.get((columns.workers.texts[int(columns["worker"][mine[0]])], f"loss, {role}"))
    told = losses.values[: len(mine)] if losses is not None else []
    loss = [round(value, 6) if math.isfinite(value) else None for value in told]
    return SetupCurve(call.name if call else "", call.site if call else "", at_s, loss, len(mine), most, left_s)


def _steps_asked(trace: RunTrace, ordinal: int) -> int | None:
    """Return how many optimiser steps a call asks for: its samples by its mini-batch size, in each epoch."""
    call = trace.calls.by_ordinal[ordinal]
    said = dict(call.arguments)
    size, epochs = said.get("minibatch_size", ""), said.get("epochs", "1")
    if not size.isdigit() or not epochs.isdigit():
        return None
    with contextlib.suppress(SpecError, sqlite3.Error), reading_ledger(trace.run_dir) as db:
        source = next((source for name, source in call.inputs if name in ("samples", "responses", "rows")), None)
        row = db.execute("SELECT num_rows FROM cursors WHERE call = ?", (source,)).fetchone()
        return -(-int(row[0]) // int(size)) * int(epochs) if row and row[0] else None
    return None


_OF_STEPS = ("schedule/efficiency", "schedule/tokens_per_s", "schedule/staleness")


def series_of_steps(steps: Sequence[StepAnalysis]) -> dict[str, Series]:
    """Make series of each step's efficiency, generated tokens a second, and mean staleness of its samples."""
    found: dict[str, dict[int, float | None]] = {name: {} for name in _OF_STEPS}
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


# ---- runs, one or several seeds a side


_LAST = 0.1
"""The last share of the steps, whose mean is what a run came to."""
_LEARNED = re.compile(r"eval/.*|(?!setup/)(.*/)?(reward|accuracy|entropy)[^/]*")
"""Names of metrics that say how a run learned, of whichever role."""


class Learned(msgspec.Struct):
    """One metric at the end of the runs of both sides: the mean over the last tenth of the steps that all have."""

    name: str
    num_steps: int
    """Steps that all runs have."""
    one: float
    one_half: float | None
    """Half-width of the 95% confidence interval over the runs of a side; None of a single run."""
    other: float
    other_half: float | None
    difference_half: float | None
    """Half-width of the 95% confidence interval of the difference; None unless both sides have several runs."""

    @property
    def is_apart(self) -> bool | None:
        """Whether the interval of the difference leaves out 0; None where there is no interval."""
        return None if self.difference_half is None else abs(self.other - self.one) > self.difference_half


@final
@dataclass(frozen=True)
class RunComparison:
    """What differs between runs. Its text is what `m2flow compare` prints first."""

    ones: Sequence[Path]
    others: Sequence[Path]
    asked: list[Difference]
    """What was asked for differently."""
    learned: list[Learned]

    def time(self) -> Comparison | None:
        """Where the time of the first run of each side went; None if a run has no records of it."""
        traces = [RunTrace(side[0]) for side in (self.ones, self.others)]
        try:
            for trace in traces:
                trace.refresh()
            first, second = ((trace, analysis_of(trace, idle_of(trace))) for trace in traces)
            return comparison_of(first, second, (self.ones[0].resolve().name, self.others[0].resolve().name))
        except M2FlowError:
            return None

    def __str__(self) -> str:
        time = self.time()
        return "\n".join([*self.asked_lines(), *(["", *time.explained] if time else []), "", *self.learned_lines()])

    def asked_lines(self) -> list[str]:
        """What was asked for differently, with the diffs of code."""
        if not self.asked:
            return ["asked for the same: options, calls, models, settings, cluster, versions and code are alike"]
        lines = ["asked for differently"]
        for kind in dict.fromkeys(one.kind for one in self.asked):
            lines.append(f"  {kind}")
            for one in (one for one in self.asked if one.kind == kind):
                lines += [f"    {one}", *(f"      {line}" for line in one.lines)]
        return lines

    def learned_lines(self) -> list[str]:
        """What the runs came to: a line for each metric."""
        if not self.learned:
            return ["learned: the runs have no reward, accuracy or entropy of the same steps"]
        counts = f"{len(self.ones)} and {len(self.others)} runs"
        lines = [f"learned (mean of the last tenth of the steps; {counts})"]
        for one in self.learned:
            lines.append(f"  {one.name}: {_measured(one.one, one.one_half)} -> {_measured(one.other, one.other_half)}{_judged(one)}")
        if any(one.difference_half is None for one in self.learned):
            lines.append("  How far seeds differ is not known: give several runs a side, A1,A2,A3 B1,B2,B3.")
        return lines

    def _repr_html_(self) -> str:
        return f"<pre style='font-size:12px'>{html.escape(str(self))}</pre>"


def compare(ones: Sequence[Path], others: Sequence[Path]) -> RunComparison:
    """Compare the runs of two sides.

    Raises:
        OptionError: a side has no run. SpecError: one is no run's directory.
    """
    if not ones or not others:
        raise OptionError("a comparison needs a run on each side", now="Give each side the directory of a run.")
    return RunComparison(ones, others, asked_differently(ones, others), learned(ones, others))


def asked_differently(ones: Sequence[Path], others: Sequence[Path]) -> list[Difference]:
    """What differs between every run of one side and every run of the other."""
    sides = [[read_configuration(path) for path in side] for side in (ones, others)]
    found = configuration_differences(sides[0][0], sides[1][0])
    varied = {(one.kind, one.name) for side in sides for config in side[1:] for one in configuration_differences(side[0], config)}
    return [one for one in found if (one.kind, one.name) not in varied]


def learned(ones: Sequence[Path], others: Sequence[Path]) -> list[Learned]:
    """What the runs of both sides came to, in the metrics that say how they learned."""
    sides = [[read_metrics(path) for path in side] for side in (ones, others)]
    runs = [metrics for side in sides for metrics in side]
    names = [name for name in runs[0] if _LEARNED.fullmatch(name) and all(name in metrics for metrics in runs)]
    found = []
    for name in names:
        values = [{step: value for step, value in metrics[name] if math.isfinite(value)} for metrics in runs]
        steps = sorted(set.intersection(*(set(of) for of in values)))
        if not steps:
            continue
        last = steps[-max(1, round(_LAST * len(steps))) :]
        ends = [sum(of[step] for step in last) / len(last) for of in values]
        one, other = ends[: len(ones)], ends[len(ones) :]
        (mean, half), (other_mean, other_half) = mean_and_interval(one), mean_and_interval(other)
        found.append(Learned(name, len(steps), mean, half, other_mean, other_half, interval_of_difference(one, other)))
    return found


def _measured(mean: float, half: float | None) -> str:
    return f"{mean:.4g}" + (f" \u00b1 {half:.2g}" if half is not None else "")


def _judged(one: Learned) -> str:
    more = one.other - one.one
    if one.difference_half is None:
        return f"  ({more:+.4g})"
    return f"  ({more:+.4g} \u00b1 {one.difference_half:.2g}{'' if one.is_apart else ': within what seeds differ by'})"


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over seeds, and the half-width of its 95% interval; None for a single value.

        m ± t(0.975, n - 1) s / sqrt(n)

    Args:
        values: one for each run, of any unit.
    Source:
        Student 1908, The probable error of a mean, Biometrika 6(1); quantiles from tables.

    >>> mean, half = mean_and_interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    mean = sum(values) / len(values)
    return mean, None if len(values) < 2 else _student(len(values) - 1) * math.sqrt(_variance(values) / len(values))


def interval_of_difference(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """The half-width of the 95% interval of the difference of two means; None unless both sides have several values.

        t(0.975, v) sqrt(a + b),  a = s1^2 / n1,  b = s2^2 / n2,  v = (a + b)^2 / (a^2 / (n1 - 1) + b^2 / (n2 - 1))

    Args:
        ones, others: one value for each run of a side, of the same unit.
    Source:
        Welch 1947, The generalization of Student's problem, Biometrika 34(1-2); v is rounded down.

    >>> round(interval_of_difference([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]), 3)
    2.267
    """
    if len(ones) < 2 or len(others) < 2:
        return None
    a, b = _variance(ones) / len(ones), _variance(others) / len(others)
    if a + b == 0:
        return 0.0
    degrees = (a + b) ** 2 / (a**2 / (len(ones) - 1) + b**2 / (len(others) - 1))
    return _student(int(degrees + 1e-9)) * math.sqrt(a + b)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _student(degrees: int) -> float:
    return _STUDENT[min(max(degrees, 1), len(_STUDENT)) - 1]


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 1.960)
"""97.5% quantiles of Student's t for 1, 2, ... degrees of freedom; the last is the normal distribution's, for more than 15."""
