"""Lay out a run's schedule for drawing: lanes, rows without overlap, and the bars of a window at the resolution of its pixels.

    RunTrace, idle time --Schedule.refresh--> lanes; Schedule.window(from, to, width, lanes) --> bars
    starts, ends of new intervals --Rows.add--> rows, each with its intervals in order and disjoint
    starts, ends, kinds [N] in order and disjoint --bars_in(window, width)--> Bars, at most about two for each pixel

A lane is a worker: its work, the causes of its device's idle time beneath, what it sends, and how many samples run there. Rows of single
samples are sent when the page asks for them. Times in answers are microseconds since the run's first span.

Rows: intervals that are added together are packed as tightly as can be; a later one that began earlier takes a row that is free since then.
Bars: an interval wider than a pixel is shown as it is. Narrower ones are gathered by the pixel in which they begin: the bar has the kind
that took most of that time, the number of its intervals, and the share of its extent that they fill.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.samples import group_indices, prompt_positions
from m2flow.viewer.run_trace import FUNCTION, ROLLOUT, SAMPLE, TRAIN, TURN, WAIT, IdleTime, RunTrace, idle_of

IntArray = npt.NDArray[np.int64]


# ---- rows


@final
class IntervalRows:
    """Rows of disjoint intervals, given by their positions."""

    def __init__(self) -> None:
        self._rows: list[list[IntArray]] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> IntArray:
        """Return the positions of a row's intervals, in order of time."""
        parts = self._rows[number]
        if len(parts) > 1:
            self._rows[number] = parts = [np.concatenate(parts)]
        return parts[0]

    def add(self, positions: IntArray, starts: IntArray, ends: IntArray) -> None:
        """Place new intervals in rows.

        Args:
            positions, starts, ends: int64 [N] of the new intervals, in any order.
        """
        if not len(positions):
            return
        # Of intervals that begin together points come first, then the longest.
        order = np.lexsort((-ends, ends > starts, starts))
        positions, starts, ends = positions[order], starts[order], ends[order]
        if bool((starts[1:] >= ends[:-1]).all()) and (not self._ends or starts[0] >= self._ends[0]):
            self._append(0, positions, int(ends[-1]))
            return
        found: dict[int, list[int]] = {}
        running = sorted((end, row) for row, end in enumerate(self._ends))
        free: list[int] = []
        for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            while running and running[0][0] <= start:
                heapq.heappush(free, heapq.heappop(running)[1])
            row = heapq.heappop(free) if free else len(self._rows)
            if row == len(self._rows):
                self._rows.append([])
                self._ends.append(end)
            self._ends[row] = end
            found.setdefault(row, []).append(at)
            heapq.heappush(running, (end, row))
        for row, members in found.items():
            self._rows[row].append(positions[members])

    def _append(self, row: int, positions: IntArray, end: int) -> None:
        if row == len(self._rows):
            self._rows.append([])
            self._ends.append(end)
        self._rows[row].append(positions)
        self._ends[row] = end


# ---- bars

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A stretch of time in ns, and its width in pixels; 0: every interval as a bar of its own."""

    start: int
    end: int
    width: int = 0


@dataclass(frozen=True, eq=False)
class Bars:
    """The bars of a row: arrays [B], in order of time."""

    start: IntArray
    end: IntArray
    kind: IntArray
    count: IntArray
    """Number of intervals that a bar stands for."""
    filled: FloatArray
    """The share of its extent that they fill."""
    index: IntArray
    """Position of the interval that a bar stands for; of several, that of the longest of its kind."""

    def __len__(self) -> int:
        return len(self.start)


def bars_in(starts: IntArray, ends: IntArray, kinds: IntArray, window: Window) -> Bars:
    """Make the bars of one row.

    Args:
        starts, ends: int64 [N], ns; each interval ends before the next begins.
        kinds: int64 [N], small numbers from 0 on.
    """
    first, last = int(np.searchsorted(ends, window.start, side="right")), int(np.searchsorted(starts, window.end, side="left"))
    if first and ends[first - 1] == starts[first - 1] == window.start:
        first -= 1  # A point at the window's very beginning.
    last = max(first, last)
    s, e, k = starts[first:last], ends[first:last], kinds[first:last]
    index = np.arange(first, last)
    pixel = max((window.end - window.start) / window.width, 1.0) if window.width else 0.0
    is_wide = e - s >= pixel
    if not window.width or len(s) <= window.width or is_wide.all():
        return Bars(s, e, k, np.ones(len(s), np.int64), np.ones(len(s)), index)
    wide = np.flatnonzero(is_wide)
    narrow = np.flatnonzero(~is_wide)
    bucket = np.clip((s[narrow] - window.start) / pixel, 0, window.width).astype(np.int64)
    heads = np.flatnonzero(np.diff(bucket, prepend=-1))
    group = np.cumsum(np.diff(bucket, prepend=-1) != 0) - 1
    took = (e[narrow] - s[narrow]).astype(np.float64)
    num_kinds = int(k.max(initial=0)) + 1
    weight = np.bincount(group * num_kinds + k[narrow], weights=took + 1e-3, minlength=len(heads) * num_kinds)
    kind = weight.reshape(len(heads), num_kinds).argmax(axis=1)
    tails = np.append(heads[1:], len(narrow)) - 1
    start, end = s[narrow[heads]], e[narrow[tails]]
    order_in_group = np.lexsort((took * (k[narrow] == kind[group]), group))
    longest = narrow[order_in_group[tails]]
    filled = np.bincount(group, weights=took, minlength=len(heads)) / np.maximum(end - start, 1)
    all_start, all_end = np.concatenate([s[wide], start]), np.concatenate([e[wide], end])
    order = np.lexsort((all_end, all_start))  # A point before what begins there.
    return Bars(
        all_start[order],
        all_end[order],
        np.concatenate([k[wide], kind])[order],
        np.concatenate([np.ones(len(wide), np.int64), tails - heads + 1])[order],
        np.concatenate([np.ones(len(wide)), np.minimum(filled, 1.0)])[order],
        np.concatenate([wide, longest])[order] + first,
    )


def running_at(starts: IntArray, ends: IntArray, times: IntArray) -> IntArray:
    """Count the intervals that run at each time. `starts` and `ends` [N] are each sorted; intervals may overlap."""
    return np.searchsorted(starts, times, side="right") - np.searchsorted(ends, times, side="right")


# ---- lanes

PARTS = ("work", "wait", "life")
_SENT_WHOLE = 128
"""The most rows of samples that a page gets for one lane; of more, the newest are left out."""
_TOLD = ("call", "step", "version", "num_samples", "num_tokens")


class Lane(msgspec.Struct):
    """A worker's lane."""

    name: str
    engines: list[str]
    num_rows: dict[str, int]
    """By part: `work`, `wait`, `life`."""
    device: str
    """The device of a rollout or training worker; empty for others."""
    busy_share: float
    """Share of the run's time so far."""


class Marks(msgspec.Struct):
    """Marks that are drawn over all lanes; microseconds."""

    steps: list[tuple[int, int, int]]
    versions: list[tuple[int, str, int]]


Row = dict[str, list[int] | list[float]]
"""The bars of a row, one entry each: `s` start and `d` duration in microseconds, `k` kind, and further columns of spans.

Where bars stand for several spans: `n` their number and `f` the share of the bar that they fill.
"""


class LaneWindow(msgspec.Struct):
    """One lane in a window."""

    lane: int
    work: list[Row]
    wait: list[Row]
    life: list[Row]
    idle: Row | None
    """Idle time; `k` are positions among the causes."""
    running: list[int]
    """Number of samples that run at every second pixel; empty where none ever runs."""


@final
class Schedule:
    """The schedule of one run, followed as its trace grows; for one thread at a time."""

    def __init__(self, trace: RunTrace) -> None:
        self.trace = trace
        self.idle: dict[str, IdleTime] = {}
        """By worker."""
        self.devices: list[IdleTime] = []
        self._generation = 0
        self._forget()

    def _forget(self) -> None:
        self._laid = 0
        self._rows: dict[tuple[int, int], IntervalRows] = {}
        self._sample_spans: dict[int, tuple[IntArray, IntArray]] = {}
        self._order: list[int] = []

    def refresh(self) -> None:
        """Lay out the spans that are new in the trace."""
        trace, columns = self.trace, self.trace.columns
        if columns.generation != self._generation:
            self._generation = columns.generation
            self._forget()
        new = np.arange(self._laid, columns.num_spans)
        part = np.select(
            [trace.group == SAMPLE, trace.group == WAIT, trace.group == TURN], [2, 1, len(PARTS)], 0
        )  # Turns are parts of samples.
        worker = columns["worker"]
        start, end = columns["start"], columns["end"]
        for lane in np.unique(worker[new]).tolist():
            for kind in range(len(PARTS)):
                mine = new[(worker[new] == lane) & (part[new] == kind)]
                self._rows.setdefault((lane, kind), IntervalRows()).add(mine, start[mine], end[mine])
            sample_spans = (worker == lane) & (part == 2)
            self._sample_spans[lane] = np.sort(start[sample_spans]), np.sort(end[sample_spans])
        self._laid = columns.num_spans
        self.devices = idle_of(trace)
        self.idle = {name: device for device in self.devices for name in device.device.workers}
        self._order = sorted(range(len(columns.workers.texts)), key=self._rank)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes in the order in which they are shown."""
        found = []
        names = self.trace.columns.workers.texts
        begin, until = self.trace.start, self.trace.worked_until
        whole_s = self.trace.seconds(begin, until)
        for lane in self._order:
            idle = self.idle.get(names[lane])
            busy_s = idle.busy_seconds(begin, until) if idle else self._busy_s(lane)
            num_rows = {part: len(self._rows[lane, at]) if (lane, at) in self._rows else 0 for at, part in enumerate(PARTS)}
            share = busy_s / whole_s if whole_s else 0.0
            found.append(Lane(names[lane], self._engines(lane), num_rows, idle.device.name if idle else "", share))
        return found

    @property
    def marks(self) -> Marks:
        return Marks(
            [(step.step, self._us(step.start), self._us(step.end)) for step in self.trace.steps],
            [(one.version, one.role, self._us(one.at)) for one in self.trace.versions],
        )

    def window(self, start_us: int, end_us: int, width: int, lanes: Collection[int], expanded: Collection[int]) -> list[LaneWindow]:
        """Return the lanes of a window.

        Args:
            width: pixels; 0: everything as it is.
            lanes: positions in `lanes` whose bars are wanted.
            expanded: those of them whose rows of samples are wanted too.
        """
        origin = self.trace.start
        window = Window(origin + start_us * 1000, origin + end_us * 1000, width)
        found: list[LaneWindow] = []
        for at in sorted(set(lanes)):
            if not 0 <= at < len(self._order):
                continue
            lane = self._order[at]
            idle = self.idle.get(self.trace.columns.workers.texts[lane])
            sample_spans = self._bars(lane, 2, replace(window, width=-(-window.width // 2))) if at in expanded else []
            found.append(
                LaneWindow(
                    at,
                    self._bars(lane, 0, window),
                    self._bars(lane, 1, window),
                    sample_spans,
                    None if idle is None else self._times(bars_in(idle.start, idle.end, idle.cause, window)),
                    self._running(lane, window),
                )
            )
        return found

    def span_of(self, index: int) -> dict[str, object]:
        """Return all fields of one span. Raises IndexError: there is no such span."""
        if not 0 <= index < self.trace.columns.num_spans:
            raise IndexError(f"there is no span {index}")
        span = self.trace.columns.span(index)
        kind = self.trace.kinds[int(self.trace.kind[index])]
        about = {key: value for key, value in span.attributes.items() if key not in ("samples", "unit_us")}
        return {
            "name": span.name,
            "worker": span.lane[0],
            "engine": span.lane[1],
            "start": self._us(span.start_ns),
            "duration": (span.end_ns - span.start_ns) / 1000,
            "label": kind.label,
            "line": kind.line,
            "text": kind.text,
            "attributes": about,
        }

    def _bars(self, lane: int, part: int, window: Window) -> list[Row]:
        rows = self._rows.get((lane, part))
        return [self._row(rows.row(number), window) for number in range(min(len(rows), _SENT_WHOLE))] if rows else []

    def _row(self, members: IntArray, window: Window) -> Row:
        columns, trace = self.trace.columns, self.trace
        bars = bars_in(columns["start"][members], columns["end"][members], trace.kind[members], window)
        spans = members[bars.index]
        sent = {**self._times(bars), "i": spans.tolist(), "name": columns["name"][spans].tolist()}
        for field, values in (("call", trace.call), ("step", trace.step), *((name, columns[name]) for name in _TOLD[2:])):
            told = values[spans]
            if (told >= 0).any():
                sent[field] = told.tolist()
        sample = columns["sample"][spans]
        if (sample >= 0).any():
            sent["prompt"], sent["member"] = prompt_positions(sample).tolist(), group_indices(sample).tolist()
        return sent

    def _times(self, bars: Bars) -> Row:
        origin = self.trace.start
        sent: Row = {
            "s": ((bars.start - origin) // 1000).tolist(),
            "d": ((bars.end - bars.start) // 1000).tolist(),
            "k": bars.kind.tolist(),
        }
        if (bars.count > 1).any():
            sent["n"], sent["f"] = bars.count.tolist(), np.round(bars.filled, 2).tolist()
        return sent

    def _running(self, lane: int, window: Window) -> list[int]:
        starts, ends = self._sample_spans.get(lane, (np.zeros(0, np.int64),) * 2)
        if not len(starts):
            return []
        times = np.linspace(window.start, window.end, max((window.width or 2000) // 2, 2)).astype(np.int64)
        return running_at(starts, ends, times).tolist()  # type: ignore[no-any-return]

    def _us(self, at_ns: int) -> int:
        return (at_ns - self.trace.start) // 1000

    def _busy_s(self, lane: int) -> float:
        rows = self._rows.get((lane, 0))
        if not rows or not len(rows):
            return 0.0
        members = rows.row(0)
        return float((self.trace.columns["end"][members] - self.trace.columns["start"][members]).sum() / 1e9)

    def _engines(self, lane: int) -> list[str]:
        planned = (
            next((w for w in self.trace.plan.workers if w.name == self.trace.columns.workers.texts[lane]), None)
            if self.trace.plan
            else None
        )
        return [f"{slot.kind} {slot.role}" if slot.role != "*" else "functions" for slot in planned.engines] if planned else []

    def _rank(self, lane: int) -> tuple[int, str, int, str]:
        """Sort key of lanes: devices that generate, then functions, then training; `rollout-10` after `rollout-9`."""
        columns, name = self.trace.columns, self.trace.columns.workers.texts[lane]
        groups = set(np.unique(self.trace.group[columns["worker"] == lane]).tolist())
        first = next((at for at, group in enumerate((ROLLOUT, SAMPLE, FUNCTION, TRAIN)) if group in groups), 9)
        stem = name.rstrip("0123456789")
        return first, stem, int(name[len(stem) :] or -1), name
