"""Report the health of a run: its processes, channels, counters and logs, and alerts by rules with a threshold each.

    RunTrace, ledger.db, logs/ --health_of--> Health
    metrics.jsonl, RunTrace --alerts_of--> Alert ..., the worst first
    ledger.db, the run's lock --state_of--> State

A rule looks at the newest steps and, where it is about a change, at the first ones. `RULES` has each with its threshold and its page of
documentation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sqlite3
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final, get_args

import msgspec
import numpy as np

from m2flow.errors import EngineError, SpecError
from m2flow.micro.records.ledger import read_incidents
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.sample_query import SampleQuery, text_of
from m2flow.observe.metrics import read_metrics, split_line
from m2flow.observe.store import CounterColumn
from m2flow.recipe import EpisodeFailure
from m2flow.samples import Finish
from m2flow.viewer.run_trace import RunTrace

_CHANNEL = re.compile(r"channel to (?P<target>.+): (?P<what>[a-z ]+)")
_ROOM = re.compile(r"channel (?P<what>samples|bytes), (?P<producer>.+) to (?P<target>.+)")
_MOST_POINTS = 120
_MOST_COUNTERS = 400
_MOST_LOG_BYTES = 256 * 1024


@final
class WorkerHealth(msgspec.Struct):
    """The health of one worker process."""

    name: str
    device: str
    threads: int
    engines: list[str]
    num_spans: int
    last_us: int | None
    """When its last span ended, since the run's first; None: it has recorded none."""
    num_losses: int
    has_log: bool
    cpu_cores: float | None
    """CPU cores used on average; None here and below: not recorded."""
    memory_bytes: float | None
    """Peak."""
    gpu_use: float | None
    """Utilisation, 0 to 1, on average, by all processes on it."""
    gpu_memory_bytes: float | None
    """Peak, by all processes on it."""


@final
class ChannelHealth(msgspec.Struct):
    """Traffic from one worker to another."""

    source: str
    target: str
    parcels: float
    samples: float
    num_bytes: float
    blocked_s: float


@final
class ChannelCredits(msgspec.Struct):
    """The credits of a channel from one call to one worker: the limit on what is in flight, and what is."""

    producer: str
    target: str
    samples: float
    most_samples: float
    """The most samples in flight at once."""
    room_samples: int
    """The limit; 0: the plan has none."""
    num_bytes: float
    most_bytes: float
    room_bytes: int


@final
class CounterShown(msgspec.Struct):
    """A counter, thinned to the points that a small plot needs."""

    worker: str
    name: str
    at: list[int]
    """Microseconds since the run's first span."""
    values: list[float]
    least: float
    most: float
    last: float


@final
class Happened(msgspec.Struct):
    """An event of a worker (lost, restarted), or the beginning or end of an attempt. Unix seconds."""

    at_s: float
    kind: str
    who: str
    what: str


@final
class Rule(msgspec.Struct, frozen=True):
    """A rule of `alerts_of`."""

    title: str
    level: str
    """`bad` or `warn`."""
    threshold: str
    """When it holds."""
    page: str
    """The page of documentation, from the repository's root."""


RULES = {
    "not finite": Rule(
        "a metric is not finite", "bad", "any infinity, or NaN where an update made a step", "docs/guide/schedule.md#alerts"
    ),
    "nothing trained": Rule("an update trained nothing", "warn", "any step without rows or tokens to train on", "docs/guide/agents.md"),
    "gradient": Rule(
        "the gradient explodes", "bad", "grad_norm of a recent step above 10 times the median before", "docs/guide/schedule.md#alerts"
    ),
    "entropy": Rule("entropy has collapsed", "warn", "entropy below a tenth of that of the first steps", "docs/guide/flows-algorithms.md"),
    "no advantage": Rule(
        "groups without advantage", "warn", "in above 70% of recent groups all advantages are 0", "docs/guide/flows-algorithms.md"
    ),
    "truncated": Rule(
        "responses are cut off",
        "warn",
        "above 25% of recent samples end at the token limit",
        "docs/guide/rollout-scheduling.md#length-bias",
    ),
    "failed": Rule("episodes fail", "warn", "above 10% of recent episodes", "docs/guide/agents.md"),
    "silent": Rule(
        "episodes wait for nothing that is known",
        "warn",
        "no turn and no tool call of one under way for ten minutes",
        "docs/guide/agents.md#limits-and-what-happens-at-each",
    ),
    "mismatch": Rule(
        "trainer and rollout differ",
        "bad",
        "rollout_diff/mean above 0.1 nats, or an effective sample share below 0.3",
        "docs/internals/weights.md#trainer-and-rollout-mismatch",
    ),
    "length drift": Rule(
        "lengths drift while the reward rises",
        "warn",
        "mean response length more than doubled or halved since the first steps",
        "docs/guide/rollout-scheduling.md#length-bias",
    ),
    "memory": Rule("workers are near the host's memory", "bad", "their peaks together above 90% of it", "docs/guide/schedule.md#memory"),
    "clock": Rule("a worker's clock jumped", "warn", "its offset changed by more than 50 ms beyond its error", "docs/guide/reliability.md"),
    "full channel": Rule("a channel is full", "warn", "its credits are used up in above half of the counts", "docs/internals/channels.md"),
    "lost": Rule("a worker was lost", "warn", "any", "docs/guide/reliability.md"),
}


@final
class Alert(msgspec.Struct):
    """A rule that holds for a run."""

    rule: str
    """A key of `RULES`."""
    level: str
    title: str
    says: str
    """What was seen."""
    threshold: str
    page: str
    view: str
    """The view that shows it: `training`, `samples`, `health`."""


@final
class Health(msgspec.Struct):
    """The health of one run."""

    workers: list[WorkerHealth]
    channels: list[ChannelHealth]
    rooms: list[ChannelCredits]
    counters: list[CounterShown]
    happened: list[Happened]
    failed_calls: list[tuple[int, str, str, str]]
    """Ordinal, name, line, error."""
    num_lost_tokens: int
    logs: list[str]
    alerts: list[Alert]


@final
class State(msgspec.Struct):
    """The state of one run, and why it ended."""

    name: str
    """`running`, `done`, `stopped`, `simulated`, `unknown`."""
    reason: str
    began_s: float
    ended_s: float | None
    num_attempts: int


def state_of(run_dir: Path) -> State:
    """Tell whether a run goes on, from the ledger's attempts and from the process that holds its lock."""
    if not (run_dir / "ledger.db").is_file():
        name = "simulated" if (run_dir / "report.json").is_file() else "unknown"
        return State(name, "", (run_dir / "config.json").stat().st_mtime, None, 0)
    try:
        with reading_ledger(run_dir) as db:
            found = db.execute("SELECT began, ended, reason FROM attempts ORDER BY number").fetchall()
    except sqlite3.Error as error:
        return State("unknown", str(error), 0.0, None, 0)
    if not found:
        return State("running" if is_held(run_dir) else "unknown", "", (run_dir / "config.json").stat().st_mtime, None, 0)
    _, ended, reason = found[-1]
    if ended is None:
        held = is_held(run_dir)
        return State("running" if held else "stopped", "" if held else "its process is gone", found[0][0], None, len(found))
    return State("done" if reason == "done" else "stopped", reason or "", found[0][0], ended, len(found))


def health_of(run_dir: Path, trace: RunTrace) -> Health:
    """Collect the health of a run as far as it is known."""
    incidents = []
    failed: list[tuple[int, str, str, str]] = []
    attempts: list[Happened] = []
    lost = 0
    with contextlib.suppress(sqlite3.Error):
        incidents = [Happened(one.at_s, one.kind, one.worker, one.what) for one in read_incidents(run_dir)]
        with reading_ledger(run_dir) as db:
            failed = db.execute(
                "SELECT ordinal, name, site, error FROM calls WHERE error IS NOT NULL ORDER BY ordinal LIMIT 100"
            ).fetchall()
            lost = db.execute("SELECT coalesce(sum(num_tokens), 0) FROM lost").fetchone()[0]
            for number, began, ended, reason in db.execute("SELECT number, began, ended, reason FROM attempts ORDER BY number"):
                attempts.append(Happened(began, "began", f"attempt {number + 1}", ""))
                if ended is not None:
                    attempts.append(Happened(ended, "ended", f"attempt {number + 1}", reason or ""))
    logs = log_names(run_dir)
    losses = {name: sum(one.who == name and one.kind == "lost" for one in incidents) for name in {one.who for one in incidents}}
    return Health(
        _workers(trace, losses, set(logs)),
        _channels(trace),
        _rooms(trace),
        _counters(trace),
        sorted([*incidents, *attempts], key=lambda one: one.at_s),
        failed,
        lost,
        logs,
        alerts_of(run_dir, trace),
    )


def log_names(run_dir: Path) -> list[str]:
    """List the workers that have a log. A link that leads out of the run's directory is not one."""
    inside = run_dir.resolve()
    return sorted(path.stem for path in (run_dir / "logs").glob("*.log") if path.is_file() and path.resolve().is_relative_to(inside))


def log_text(run_dir: Path, worker: str) -> str:
    """Return the end of a worker's log. Raises KeyError: it has none."""
    if worker not in log_names(run_dir):
        raise KeyError(f"there is no log of {worker!r:.80}")
    with (run_dir / "logs" / f"{worker}.log").open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _MOST_LOG_BYTES, 0))
        return file.read().decode("utf-8", errors="replace")


def _workers(trace: RunTrace, losses: dict[str, int], logs: set[str]) -> list[WorkerHealth]:
    columns = trace.columns
    seen = columns.workers.texts
    planned = {worker.name: worker for worker in trace.plan.workers} if trace.plan else {}
    found = []
    for name in {**dict.fromkeys(planned), **dict.fromkeys(seen)}:
        plan = planned.get(name)
        mine = columns["worker"] == seen.index(name) if name in seen else np.zeros(0, bool)
        last = int(columns["end"][mine].max() - trace.start) // 1000 if mine.any() else None
        engines = [f"{slot.kind} {slot.role}" if slot.role != "*" else "functions" for slot in plan.engines] if plan else []
        found.append(
            WorkerHealth(
                name,
                plan.device if plan else "",
                plan.threads if plan else 0,
                engines,
                int(mine.sum()),
                last,
                losses.get(name, 0),
                name in logs,
                _counter_value(trace, name, "cpu cores", statistics.fmean),
                _counter_value(trace, name, "memory bytes", max),
                _counter_value(trace, name, "gpu use", statistics.fmean),
                _counter_value(trace, name, "gpu memory bytes", max),
            )
        )
    return found


def _counter_value(trace: RunTrace, worker: str, name: str, summed_up: Callable[[list[float]], float]) -> float | None:
    counter = trace.columns.counters.get((worker, name))
    return summed_up(counter.values) if counter is not None else None


def _channels(trace: RunTrace) -> list[ChannelHealth]:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (track, name), counter in trace.columns.counters.items():
        told = _CHANNEL.fullmatch(name)
        if told:
            found.setdefault((track.partition("/")[0], told["target"]), {})[told["what"]] = counter.values[-1]
    return [
        ChannelHealth(source, target, of.get("parcels", 0.0), of.get("samples", 0.0), of.get("bytes", 0.0), of.get("seconds blocked", 0.0))
        for (source, target), of in sorted(found.items())
    ]


def _rooms(trace: RunTrace) -> list[ChannelCredits]:
    found: dict[tuple[str, str], dict[str, CounterColumn]] = {}
    for (_, name), counter in trace.columns.counters.items():
        told = _ROOM.fullmatch(name)
        if told:
            found.setdefault((told["producer"], told["target"]), {})[told["what"]] = counter
    none = CounterColumn("", "", [], [0.0])
    routes = {(route.producer, route.target): route for route in trace.plan.routes} if trace.plan else {}
    rooms = []
    for (producer, target), of in sorted(found.items()):
        samples, num_bytes, route = of.get("samples", none), of.get("bytes", none), routes.get((producer, target))
        limits = (route.capacity, route.capacity_bytes) if route else (0, 0)
        rooms.append(
            ChannelCredits(
                producer, target, samples.values[-1], max(samples.values), limits[0], num_bytes.values[-1], max(num_bytes.values), limits[1]
            )
        )
    return rooms


def _counters(trace: RunTrace) -> list[CounterShown]:
    """List the counters without those that have a table of their own; values that are not finite are left out."""
    found = []
    for (track, name), counter in sorted(trace.columns.counters.items()):
        known = [(at, value) for at, value in zip(counter.at_ns, counter.values, strict=True) if math.isfinite(value)]
        if not known or _CHANNEL.fullmatch(name) or _ROOM.fullmatch(name):
            continue
        values = [value for _, value in known]
        every = -(-len(known) // _MOST_POINTS)
        shown = known[::-1][::every][::-1]  # The last point stays.
        at = [(moment - trace.start) // 1000 for moment, _ in shown]
        found.append(CounterShown(track.partition("/")[0], name, at, [value for _, value in shown], min(values), max(values), values[-1]))
    return found[:_MOST_COUNTERS]


def is_held(run_dir: Path) -> bool:
    """Test whether the process whose number is in the run's lock is alive, without taking the lock, which a run may want now."""
    try:
        os.kill(int((run_dir / "run.lock").read_text().strip()), 0)
    except (OSError, ValueError) as error:
        return isinstance(error, PermissionError)
    return True


# ---- alerts

_RECENT = 3
"""The steps that count as the newest, and as the first."""
_EXPLODES, _COLLAPSES, _EQUAL, _CUT_OFF = 10.0, 0.1, 0.7, 0.25
_FAIL, _LOOKED_AT = 0.1, 32
_DIFFERS, _LEAST_SHARE, _DRIFTS, _NEAR, _JUMP_S, _FULL = 0.1, 0.3, 2.0, 0.9, 0.05, 0.5


def alerts_of(run_dir: Path, trace: RunTrace | None) -> list[Alert]:
    """Apply the rules to a run as far as it has come; the worst first.

    Args:
        trace: None: only rules about metrics and samples.
    """
    series = read_metrics(run_dir)
    found = [*_of_metrics(series), *_of_samples(run_dir), *_of_episodes(run_dir, series)]
    if trace is not None:
        found += [*_of_clocks(trace), *_of_memory(trace), *_of_channels(trace), *_of_silence(trace)]
    with contextlib.suppress(sqlite3.Error, SpecError):
        lost = [one.worker for one in read_incidents(run_dir) if one.kind == "lost"]
        if lost:
            found.append(_alert("lost", f"{', '.join(sorted(set(lost)))}: {len(lost)} times", "health"))
    return sorted(found, key=lambda one: one.level != "bad")


def _alert(rule: str, says: str, view: str) -> Alert:
    of = RULES[rule]
    return Alert(rule, of.level, of.title, says, of.threshold, of.page, view)


def _of_metrics(series: Mapping[str, Sequence[tuple[int, float]]]) -> Iterator[Alert]:
    untrained = {name: [step for step, value in points if not value] for name, points in series.items() if name.endswith("num_steps")}
    empty = {step for steps in untrained.values() for step in steps}  # Means over nothing are NaN there.
    bad = {
        name: [step for step, value in points if math.isinf(value) or (math.isnan(value) and step not in empty)]
        for name, points in series.items()
    }
    for name, steps in bad.items():
        if steps:
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            yield _alert("not finite", f"{name} in step {steps[0]}{more}", "training")
    for name, steps in untrained.items():
        if steps:
            line, plain = split_line(name)
            whose = plain.removesuffix("num_steps").removesuffix("/") or "policy"
            whose += f" ({line.removesuffix('/')})" if line else ""
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            yield _alert("nothing trained", f"an update of {whose} in step {steps[0]}{more}", "training")
    of_updates = {name.removesuffix("num_steps") for name in untrained if not name.startswith("setup/")}
    for line in sorted(of_updates | {split_line(name)[0] for name in series}):
        yield from _of_line(series, line)


def _of_line(series: Mapping[str, Sequence[tuple[int, float]]], line: str) -> Iterator[Alert]:
    """Look at what a line of the flow that trains a role reports.

    Args:
        line: what its metrics begin with: its role if that is not `policy`, and `update_2` of another line than the first.
    """

    def values(name: str) -> list[float]:
        return [value for _, value in series.get(line + name, []) if math.isfinite(value)]

    norms = values("grad_norm")
    if len(norms) >= 2 * _RECENT:
        usual, newest = statistics.median(norms[:-_RECENT]), max(norms[-_RECENT:])
        if usual > 0 and newest > _EXPLODES * usual:
            yield _alert("gradient", f"{line}grad_norm {newest:.3g}, {newest / usual:.0f} times its median of {usual:.3g}", "training")
    entropy, first = values("entropy"), 0.0
    if len(entropy) >= 2 * _RECENT:
        first, last = statistics.fmean(entropy[:_RECENT]), statistics.fmean(entropy[-_RECENT:])
        if first > 0 and last < _COLLAPSES * first:
            yield _alert("entropy", f"{line}entropy fell from {first:.3g} to {last:.3g} nats", "training")
    apart, share = values("rollout_diff/mean"), values("effective_sample_share")
    if apart and max(apart[-_RECENT:]) > _DIFFERS:
        yield _alert("mismatch", f"{line}rollout_diff/mean {max(apart[-_RECENT:]):.3g} nats", "training")
    elif share and min(share[-_RECENT:]) < _LEAST_SHARE:
        yield _alert("mismatch", f"{line}effective_sample_share {min(share[-_RECENT:]):.3g}", "training")
    flat = values("groups_without_advantage")[-_RECENT:]
    if flat and statistics.fmean(flat) > _EQUAL:
        yield _alert("no advantage", f"{line}groups_without_advantage {statistics.fmean(flat):.3g}", "training")
    lengths, rewards = values("response_length"), values("reward")
    if len(lengths) >= 2 * _RECENT and len(rewards) >= 2 * _RECENT:
        begun, now = statistics.fmean(lengths[:_RECENT]), statistics.fmean(lengths[-_RECENT:])
        risen = statistics.fmean(rewards[-_RECENT:]) - statistics.fmean(rewards[:_RECENT])
        if begun > 0 and risen > 0 and not begun / _DRIFTS <= now <= begun * _DRIFTS:
            yield _alert("length drift", f"mean {line}response length went from {begun:,.4g} to {now:,.4g} tokens", "training")


def _of_samples(run_dir: Path) -> Iterator[Alert]:
    """Look at the samples of the newest steps that an update trained on."""
    if not (run_dir / "ledger.db").is_file():
        return
    with contextlib.suppress(sqlite3.Error, SpecError), reading_ledger(run_dir) as db:
        rows = db.execute(
            "SELECT finish FROM samples WHERE step > (SELECT coalesce(max(step), 0) FROM samples) - ? "
            "AND id IN (SELECT sample FROM consumption) LIMIT 50000",
            (_RECENT,),
        ).fetchall()
        cut = sum(finish == Finish.LENGTH.value for (finish,) in rows)
        if len(rows) >= 8 and cut > _CUT_OFF * len(rows):
            yield _alert("truncated", f"{cut} of the last {len(rows)} responses ({cut / len(rows):.0%})", "samples")


def _of_episodes(run_dir: Path, series: Mapping[str, Sequence[tuple[int, float]]]) -> Iterator[Alert]:
    """Look at the newest episodes, where some of the newest steps failed: how the last of them did."""
    causes = tuple(f"episodes/{cause}" for cause in get_args(EpisodeFailure))
    recent = [points[-_RECENT:] for name, points in series.items() if name.endswith(causes)]
    if not any(value > 0 for points in recent for _, value in points):
        return
    with contextlib.suppress(sqlite3.Error, SpecError, EngineError), SampleQuery(run_dir) as query:
        newest = [row for row in map(query.rows_of, query.newest(_LOOKED_AT)) if "failure" in row]
        failed = [row for row in newest if row.ragged("failure").item(0)]
        if len(failed) > _FAIL * len(newest):
            how = text_of(failed[0]).columns["failure"]
            yield _alert("failed", f"{len(failed)} of the last {len(newest)}; {how}", "samples")


def _of_clocks(trace: RunTrace) -> Iterator[Alert]:
    """Compare each worker's clock offsets with those before, beyond what both may be wrong by."""
    for (worker, name), counter in trace.columns.counters.items():
        errors = trace.columns.counters.get((worker, "clock error s"))
        if name != "clock offset s" or errors is None or len(errors.values) != len(counter.values):
            continue
        known = list(zip(counter.values, errors.values, strict=True))
        jumps = [abs(after - before) - wrong - unsure for (before, wrong), (after, unsure) in itertools.pairwise(known)]
        if max(jumps, default=0.0) > _JUMP_S:
            yield _alert("clock", f"{worker}: by {max(jumps):.3g} s or more", "health")


def _of_memory(trace: RunTrace) -> Iterator[Alert]:
    """Compare the memory of all workers with this host's, while the run goes on here."""
    held = {worker: max(of.values) for (worker, name), of in trace.columns.counters.items() if name == "memory bytes" and of.values}
    if not held or not is_held(trace.run_dir):
        return
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(held.values()) > _NEAR * room:
        most = max(held, key=lambda worker: held[worker])
        yield _alert("memory", f"{sum(held.values()) / 2**30:.1f} of {room / 2**30:.1f} GiB, most of all {most}", "health")


def _of_silence(trace: RunTrace) -> Iterator[Alert]:
    silent = {
        key: int(of.values[-1]) for key, of in trace.columns.counters.items() if key[1].startswith("silent episodes, ") and of.values[-1:]
    }
    for (worker, name), num in silent.items():
        if num:
            whose = name.partition(", ")[2]
            yield _alert("silent", f"{num} of {whose} on {worker}; rollout(..., timeout_s=...) ends such", "health")


def _of_channels(trace: RunTrace) -> Iterator[Alert]:
    for room in _rooms(trace):
        counter = trace.columns.counters.get(("controller", f"channel samples, {room.producer} to {room.target}"))
        if room.room_samples and counter is not None and len(counter.values) >= _RECENT:
            full = sum(value >= room.room_samples for value in counter.values) / len(counter.values)
            if full > _FULL:
                yield _alert("full channel", f"{room.producer} to {room.target}: {full:.0%} of the time", "health")
