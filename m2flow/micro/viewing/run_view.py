"""One run as the viewer knows it: read once in the background, then followed while it is looked at.

    run directory --RunView--> the answers that the page asks for

Everything here may be called from several threads: one at a time is let in. What is expensive is done anew only when there is news, and
not more often than a few times the time that it takes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar, final

import msgspec

from m2flow.micro.analysis.comparing import Comparison, comparison_of
from m2flow.micro.analysis.idle import CAUSES
from m2flow.micro.analysis.report import Analysis, analysis_of
from m2flow.micro.analysis.run_trace import RunTrace
from m2flow.micro.analysis.series import Series, Training, read_series, series_of_steps
from m2flow.micro.plan import Plan
from m2flow.micro.viewing.graph import Graph, graph_of
from m2flow.micro.viewing.health import Health, State, health_of, log_text, state_of
from m2flow.micro.viewing.sample_page import SamplePage, sample_page
from m2flow.micro.viewing.samples_table import Columns, samples_table
from m2flow.micro.viewing.schedule import Lane, LaneWindow, Marks, Schedule

_Answer = TypeVar("_Answer")
_PART_BYTES = 4 << 20
"""Of the trace, between two looks at how far reading has come."""
_EVERY_S = 0.8
_REST = 3.0
"""Times as long as reading news took, before it is done again."""


@final
class KindShown(msgspec.Struct):
    """A colour's meaning."""

    label: str
    line: str
    group: str
    text: str


@final
class Predicted(msgspec.Struct):
    """What the plan said of a step."""

    step_s: float
    bound_s: float
    parts: list[tuple[str, float, bool, list[str]]]
    """What, seconds, whether it is on the critical path, and the workers that do it."""


@final
class Summary(msgspec.Struct):
    """What every view needs. Times in microseconds since the run's first span."""

    name: str
    flow: str
    state: State
    revision: int
    """Grows when the trace does."""
    origin_s: float
    """Unix time of the first span."""
    total: int
    num_spans: int
    num_lost_bytes: int
    kinds: list[KindShown]
    names: list[str]
    causes: list[str]
    lanes: list[Lane]
    marks: Marks
    idle: list[tuple[str, str, float, dict[str, float]]]
    """Device, kinds of its engines, busy seconds, idle seconds by cause."""
    predicted: Predicted | None
    mode: str
    cluster: str
    options: dict[str, object]
    has_ledger: bool


def _workers_of(what: str, plan: Plan) -> list[str]:
    """Who does a part of what a plan predicts: `policy.generate, judge.score / 2 steps under way`, `weight sync of policy`."""
    calls = set(what.partition(" / ")[0].split(", "))
    role = what.removeprefix("weight sync of ").partition(" / ")[0] if what.startswith("weight sync of ") else ""
    stages = [stage for stage in plan.stages if stage.call in calls] or [s for s in plan.stages if _bare(s.call) in set(map(_bare, calls))]
    found = [worker for stage in stages for worker in stage.workers]
    found += [worker for sync in plan.syncs if sync.role == role for worker in (sync.source, sync.target)]
    return list(dict.fromkeys(found))


def _bare(call: str) -> str:
    """`policy.generate` of `policy.generate@47#2`: a prediction may know of further lines than the plan does."""
    return call.partition("#")[0].partition("@")[0]


@final
class RunView:
    """Of one run directory."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir = run_dir
        self.name = name
        self._lock = threading.RLock()
        self._trace = RunTrace(run_dir)
        self._schedule = Schedule(self._trace)
        self._loader: threading.Thread | None = None
        self._is_loaded = False
        self._failure: BaseException | None = None
        self._revision = 0
        self._next_s = 0.0
        self._samples: tuple[int, Columns] | None = None
        self._steps: tuple[int, dict[str, Series]] | None = None

    def loading(self, patience_s: float = 0.0) -> float | None:
        """The share of the trace that has been read, or None when all of it has; the first call begins it.

        Raises:
            whatever reading it raised.
        """
        if not self._is_loaded and self._loader is None:
            self._loader = threading.Thread(target=self._load, name=f"read {self.name}", daemon=True)
            self._loader.start()
        if self._loader is not None and not self._is_loaded:
            self._loader.join(patience_s)
        if self._failure is not None:
            raise self._failure
        columns = self._trace.columns
        return None if self._is_loaded else columns.num_read_bytes / columns.num_bytes if columns.num_bytes else 0.0

    def summary(self) -> Summary:
        with self._fresh():
            trace = self._trace
            config = self._config()
            plan = trace.plan
            choice = trace.predicted
            return Summary(
                name=self.name,
                flow=str(config.get("flow", plan.flow if plan else "")),
                state=state_of(self.run_dir),
                revision=self._revision,
                origin_s=trace.start / 1e9,
                total=(trace.end - trace.start) // 1000,
                num_spans=trace.columns.num_spans,
                num_lost_bytes=trace.columns.num_unread_bytes,
                kinds=[KindShown(kind.label, kind.line, kind.group, kind.text) for kind in trace.kinds],
                names=list(trace.columns.names.texts),
                causes=list(CAUSES),
                lanes=self._schedule.lanes,
                marks=self._schedule.marks,
                idle=[
                    (
                        idle.device.name,
                        " and ".join(idle.device.kinds),
                        idle.busy_seconds(trace.start, trace.worked_until),
                        idle.seconds(trace.start, trace.worked_until),
                    )
                    for idle in self._schedule.devices
                ],
                predicted=Predicted(
                    choice.predicted_step_s,
                    choice.lower_bound_s,
                    [(part.what, part.seconds, part.on_critical_path, _workers_of(part.what, plan)) for part in choice.parts],
                )
                if plan and choice
                else None,
                mode=plan.mode if plan else "",
                cluster=plan.cluster if plan else "",
                options=dict(config.get("options", {})),  # type: ignore[call-overload]
                has_ledger=trace.calls.has_ledger,
            )

    def window(self, start: int, end: int, width: int, lanes: Collection[int], expanded: Collection[int]) -> list[LaneWindow]:
        """`m2flow.micro.viewing.schedule.Schedule.window`, as things are after the last summary."""
        with self._lock:
            return self._schedule.window(start, end, width, lanes, expanded)

    def span(self, index: int) -> dict[str, object]:
        """Raises IndexError: there is no such span."""
        with self._lock:
            return self._schedule.span_of(index)

    def samples(self) -> Columns:
        with self._fresh():
            if self._samples is None or self._samples[0] != self._revision:
                self._samples = self._revision, samples_table(self.run_dir, self._trace)
            return self._samples[1]

    def sample(self, call: int, prompt: int, member: int) -> SamplePage:
        """Raises SpecError: there is no such sample."""
        return sample_page(self.run_dir, call, prompt, member)

    def graph(self) -> Graph:
        return self._asked(lambda: graph_of(self._trace))

    def analysis(self) -> Analysis:
        return self._asked(lambda: analysis_of(self._trace, self._schedule.devices))

    def training(self) -> Training:
        """The run's metrics, and, once its trace has been read, what the schedule made of each step."""
        found = read_series(self.run_dir)
        if self._failure is not None or self.loading() is not None:
            return found
        with self._fresh():
            if self._steps is None or self._steps[0] != self._revision:
                self._steps = self._revision, series_of_steps(self.analysis().steps)
            return msgspec.structs.replace(found, series=found.series | self._steps[1])

    def health(self) -> Health:
        return self._asked(lambda: health_of(self.run_dir, self._trace))

    def log(self, worker: str) -> str:
        """Raises KeyError: it has no log."""
        return log_text(self.run_dir, worker)

    @property
    def trace(self) -> RunTrace:
        return self._trace

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    def _asked(self, answer: Callable[[], _Answer]) -> _Answer:
        with self._fresh():
            return answer()

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        with self._lock:
            if time.monotonic() >= self._next_s:
                self._follow()
            yield

    def _load(self) -> None:
        try:
            with self._lock:
                while self._trace.columns.refresh(_PART_BYTES) and not self._trace.columns.generation:
                    pass
                self._follow()
            self._is_loaded = True
        except BaseException as error:
            self._failure = error

    def _follow(self) -> None:
        began_s = time.monotonic()
        if self._trace.refresh() or not self._revision:
            self._schedule.refresh()
            self._revision += 1
        now_s = time.monotonic()
        self._next_s = now_s + max(_EVERY_S, _REST * (now_s - began_s))

    def _config(self) -> dict[str, object]:
        try:
            found = json.loads((self.run_dir / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def compared(one: RunView, other: RunView) -> Comparison:
    """Two runs beside each other, neither of which moves meanwhile."""
    with contextlib.ExitStack() as held:
        for view in sorted({one, other}, key=lambda view: view.name):  # In one order, whoever asks.
            held.enter_context(view._fresh())
        return comparison_of((one.trace, one.analysis()), (other.trace, other.analysis()), (one.name, other.name))
