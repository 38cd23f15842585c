"""Report the health of a run's processes: last spans, losses and restarts, channels and their credits, counters and logs.

RunTrace, ledger.db, logs/ --health_of--> Health
ledger.db, the run's lock --state_of--> State
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import final

import msgspec
import numpy as np

from m2flow.micro.records.ledger import read_incidents
from m2flow.micro.records.rundir import reading_ledger
from m2flow.observe.store import CounterColumn
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
    )


def log_names(run_dir: Path) -> list[str]:
    """List the workers that have a log. A link that leads out of the run's directory is not one."""
    inside = run_dir.resolve()
    return sorted(path.stem for path in (run_dir / "logs").glob("*.log") if path.is_file() and path.resolve().is_relative_to(inside))


def log_text(run_dir: Path, worker: str) -> str:
    """Return the end of a worker's log. Raises KeyError: it has none."""
    if worker not in log_names(run_dir):
        raise KeyError(worker)
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
