"""The schedule as a page draws it: lanes, and of a window what its pixels can show.

    RunTrace, idle time --Schedule.refresh--> lanes; Schedule.window(from, to, width, lanes) --> bars

A lane is a worker: its work, the causes of its device's idle time beneath, what it sends, and how many samples run there. The lives of
single samples are rows that are sent when the page asks for them. Times that leave here are microseconds since the run's first span.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.micro.analysis.idle import IdleTime, idle_of
from m2flow.micro.analysis.run_trace import FUNCTION, LIFE, ROLLOUT, TRAIN, WAIT, RunTrace
from m2flow.observe.schedule.rows import Rows
from m2flow.observe.schedule.windows import Bars, Window, bars_in, running_at
from m2flow.samples import group_indices, prompt_positions

IntArray = npt.NDArray[np.int64]

PARTS = ("work", "wait", "life")
_SENT_WHOLE = 128
"""Rows of lives that a page gets at most for one lane, whatever it asks; the newest of more are left out."""
_TOLD = ("call", "step", "version", "num_samples", "num_tokens")


class Lane(msgspec.Struct):
    """A worker's lane."""

    name: str
    engines: list[str]
    num_rows: dict[str, int]
    """By part: `work`, `wait`, `life`."""
    device: str
    """Of rollout and training; empty for others."""
    busy_share: float
    """Of the run's time so far."""


class Marks(msgspec.Struct):
    """What is drawn over all lanes; microseconds."""

    steps: list[tuple[int, int, int]]
    versions: list[tuple[int, str, int]]


Row = dict[str, list[int] | list[float]]
"""One entry a bar: `s` start and `d` duration in microseconds, `k` kind, and what is known besides; `n` how many spans a bar stands for and
`f` the share of it that they fill, where one stands for several."""


class LaneWindow(msgspec.Struct):
    """What one lane shows of a window."""

    lane: int
    work: list[Row]
    wait: list[Row]
    life: list[Row]
    idle: Row | None
    """`k` are positions among the causes."""
    running: list[int]
    """Samples that run at each second pixel; empty where none ever does."""


@final
class Schedule:
    """Follows the schedule of one run; one thread at a time."""

    def __init__(self, trace: RunTrace) -> None:
        self.trace = trace
        self.idle: dict[str, IdleTime] = {}
        """By worker."""
        self.devices: list[IdleTime] = []
        self._generation = 0
        self._forget()

    def _forget(self) -> None:
        self._laid = 0
        self._rows: dict[tuple[int, int], Rows] = {}
        self._lives: dict[int, tuple[IntArray, IntArray]] = {}
        self._order: list[int] = []

    def refresh(self) -> None:
        """Lay out what the trace has beyond the last time."""
        trace, columns = self.trace, self.trace.columns
        if columns.generation != self._generation:
            self._generation = columns.generation
            self._forget()
        new = np.arange(self._laid, columns.num_spans)
        part = np.where(trace.group == LIFE, 2, np.where(trace.group == WAIT, 1, 0))
        worker = columns["worker"]
        start, end = columns["start"], columns["end"]
        for lane in np.unique(worker[new]).tolist():
            for kind in range(len(PARTS)):
                mine = new[(worker[new] == lane) & (part[new] == kind)]
                self._rows.setdefault((lane, kind), Rows()).add(mine, start[mine], end[mine])
            lives = (worker == lane) & (part == 2)
            self._lives[lane] = np.sort(start[lives]), np.sort(end[lives])
        self._laid = columns.num_spans
        self.devices = idle_of(trace)
        self.idle = {name: device for device in self.devices for name in device.device.workers}
        self._order = sorted(range(len(columns.workers.texts)), key=self._rank)

    @property
    def lanes(self) -> list[Lane]:
        """In the order in which they are shown."""
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
        """What a window shows.

        Args:
            width: pixels; 0: everything as it is.
            lanes: positions in `lanes` whose bars are wanted.
            expanded: those of them whose samples' lives are wanted too.
        """
        origin = self.trace.start
        window = Window(origin + start_us * 1000, origin + end_us * 1000, width)
        found: list[LaneWindow] = []
        for at in sorted(set(lanes)):
            if not 0 <= at < len(self._order):
                continue
            lane = self._order[at]
            idle = self.idle.get(self.trace.columns.workers.texts[lane])
            lives = self._bars(lane, 2, replace(window, width=-(-window.width // 2))) if at in expanded else []
            found.append(
                LaneWindow(
                    at,
                    self._bars(lane, 0, window),
                    self._bars(lane, 1, window),
                    lives,
                    None if idle is None else self._times(bars_in(idle.start, idle.end, idle.cause, window)),
                    self._running(lane, window),
                )
            )
        return found

    def span_of(self, index: int) -> dict[str, object]:
        """All that one span says. Raises IndexError: there is no such span."""
        if not 0 <= index < self.trace.columns.num_spans:
            raise IndexError(index)
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
        starts, ends = self._lives.get(lane, (np.zeros(0, np.int64),) * 2)
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
        """Devices that generate, then functions, then training; `rollout-10` after `rollout-9`."""
        columns, name = self.trace.columns, self.trace.columns.workers.texts[lane]
        groups = set(np.unique(self.trace.group[columns["worker"] == lane]).tolist())
        first = next((at for at, group in enumerate((ROLLOUT, LIFE, FUNCTION, TRAIN)) if group in groups), 9)
        stem = name.rstrip("0123456789")
        return first, stem, int(name[len(stem) :] or -1), name
