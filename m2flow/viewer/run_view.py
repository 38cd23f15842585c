"""Follow one run for the viewer: read its trace in the background, then answer what the page asks, with its calls as a graph.

    run directory --RunView--> the answers that the page asks for
    KnownCalls, plan.json, RunTrace --graph_of--> Graph

The calls of all steps at one line of the flow are one node of the graph, so that its size is that of the program and not of the run.

All methods of `RunView` may be called from several threads; a lock lets one in at a time. Expensive answers are computed anew only when the
trace has grown, and at intervals of a few times their own duration.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, final

import msgspec
import numpy as np

from m2flow.errors import M2FlowError
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.rundir import read_config
from m2flow.micro.records.sample_query import SampleQuery, TextIndex, export, text_of
from m2flow.micro.records.segments import Place
from m2flow.samples import SampleId
from m2flow.viewer.analysis import Analysis, analysis_of
from m2flow.viewer.comparison import (
    Bands,
    Comparison,
    Series,
    Training,
    about_metric,
    bands_of,
    comparison_of,
    read_series,
    series_of_steps,
    setup_curve,
)
from m2flow.viewer.health import Alert, Health, State, alerts_of, health_of, log_text, state_of
from m2flow.viewer.run_trace import CAUSES, FUNCTION, SAMPLE, TRAIN, KnownCall, RunTrace, evaluation_calls
from m2flow.viewer.sample_pages import (
    Columns,
    GroupPage,
    SamplePage,
    Wanted,
    group_page,
    packed_ids,
    sample_page,
    samples_table,
    selected,
    with_stays,
)
from m2flow.viewer.schedule import Lane, LaneWindow, Marks, Schedule
from m2flow.viewer.suggestions import Suggestions

# ---- graph of the calls

_RECENT_NS = 10_000_000_000
_EFFECT = re.compile(r"(reads|writes) ((\S+\.weights)@\d+)")


@final
class Node(msgspec.Struct):
    """A call site: all calls of one line of the flow."""

    name: str
    line: str
    text: str
    engine: str
    """`source`, `rollout`, `function`, `train`; empty: the plan does not have the call."""
    unit: str
    is_barrier: bool
    workers: list[str]
    steps: list[int]
    """The first and the last step in which it was called."""
    num_calls: int
    num_samples: int
    """The samples that it has finished."""
    busy_s: float
    per_s: float
    """Samples a second, in the last ten seconds of its work."""
    kind: int
    """Position among the schedule's kinds; -1: it has no span yet."""


@final
class Edge(msgspec.Struct):
    """Data or weights that one call gives to another."""

    source: int
    target: int
    what: str
    """The parameter's name; for weights, the resource."""
    is_effect: bool
    transport: str = ""
    capacity: int = 0
    per_s: float = 0.0
    """Samples a second that the producer has finished recently."""
    waiting: int = 0
    """Samples that the producer has finished and the consumer has not begun."""


@final
class Graph(msgspec.Struct):
    """The graph of a run's calls."""

    nodes: list[Node]
    edges: list[Edge]
    mode: str
    cluster: str


def graph_of(trace: RunTrace) -> Graph:
    """Make the graph of the calls as far as the run has come."""
    sites: dict[tuple[str, str], int] = {}
    nodes: list[Node] = []
    members: list[list[KnownCall]] = []
    stages = _stages(trace)
    kinds = {(kind.label, kind.line): at for at, kind in enumerate(trace.kinds)}
    for ordinal, call in sorted(trace.calls.by_ordinal.items()):
        key = (call.name, call.site)
        if key not in sites:
            sites[key] = len(nodes)
            members.append([])
            engine, unit, is_barrier, workers = stages.get(ordinal, ("", "", False, []))
            nodes.append(
                Node(call.name, call.site, call.text.strip(), engine, unit, is_barrier, workers, [], 0, 0, 0.0, 0.0, kinds.get(key, -1))
            )
        members[sites[key]].append(call)
    for node, calls in zip(nodes, members, strict=True):
        node.num_calls = len(calls)
        node.steps = [min(call.step for call in calls), max(call.step for call in calls)]
        _count(trace, node, [call.ordinal for call in calls])
    plan = trace.plan
    edges = _edges(trace, sites, members)
    for edge in edges:
        edge.per_s = 0.0 if edge.is_effect else nodes[edge.source].per_s
    return Graph(nodes, edges, plan.mode if plan else "", plan.cluster if plan else "")


def _stages(trace: RunTrace) -> dict[int, tuple[str, str, bool, list[str]]]:
    """Map ordinals of calls to their stages; a plan lists the calls of the steps that it was made from in program order."""
    found: dict[int, tuple[str, str, bool, list[str]]] = {}
    by_name: dict[str, tuple[str, str, bool, list[str]]] = {}
    stages = trace.plan.stages if trace.plan else ()
    for at, (_, call) in enumerate(sorted(trace.calls.by_ordinal.items())):
        if at < len(stages) and stages[at].call == call.name:
            by_name[call.name] = (stages[at].engine, stages[at].unit, stages[at].is_barrier, list(stages[at].workers))
        if call.name not in by_name:
            stage = next((stage for stage in stages if stage.call == call.name), None)
            if stage is not None:
                by_name[call.name] = (stage.engine, stage.unit, stage.is_barrier, list(stage.workers))
        if call.name in by_name:
            found[call.ordinal] = by_name[call.name]
    return found


def _count(trace: RunTrace, node: Node, ordinals: list[int]) -> None:
    columns = trace.columns
    if not columns.num_spans:
        return
    mine = np.isin(trace.call, ordinals)
    work = mine & ~np.isin(trace.group, (SAMPLE,))
    node.busy_s = float((columns["end"][work] - columns["start"][work]).sum() / 1e9)
    done = mine & (trace.group == SAMPLE) if node.engine == "rollout" else work & np.isin(trace.group, (FUNCTION, TRAIN))
    amount = np.ones(int(done.sum()), np.int64) if node.engine == "rollout" else np.maximum(columns["num_samples"][done], 0)
    node.num_samples = int(amount.sum())
    recent = columns["end"][done] > trace.worked_until - _RECENT_NS
    node.per_s = float(amount[recent].sum()) / max(min(trace.worked_until - trace.start, _RECENT_NS) / 1e9, 1e-9)


def _edges(trace: RunTrace, sites: dict[tuple[str, str], int], members: list[list[KnownCall]]) -> list[Edge]:
    found: dict[tuple[int, int, str], Edge] = {}
    writers: dict[str, set[int]] = {}
    readers: dict[str, set[int]] = {}
    """The call sites that read each version of some role's weights."""
    done, begun = _progress(trace)
    routes = {(route.producer, route.consumer): route for route in reversed(trace.plan.routes)} if trace.plan else {}
    for at, calls in enumerate(members):
        for call in calls:
            for name, ordinal in call.inputs:
                source = trace.calls.by_ordinal.get(ordinal)
                if source is None:
                    continue
                key = (sites[source.name, source.site], at, name)
                route = routes.get((source.name, call.name))
                edge = found.setdefault(
                    key, Edge(key[0], at, name, False, route.transport if route else "", route.capacity if route else 0)
                )
                if call.ordinal in begun or done.get(ordinal):
                    edge.waiting += max(done.get(ordinal, 0) - begun.get(call.ordinal, 0), 0) if ordinal in done else 0
            for effect in call.effects:
                told = _EFFECT.match(effect)
                if told and (told[1] == "writes" or not any(other.startswith(f"writes {told[3]}@") for other in call.effects)):
                    (readers if told[1] == "reads" else writers).setdefault(told[2], set()).add(at)
    for version, sources in writers.items():
        for writer in sorted(sources):
            for reader in sorted(readers.get(version, set()) - {writer}):
                found.setdefault((writer, reader, _resource_of(version)), Edge(writer, reader, _resource_of(version), True))
    return list(found.values())


def _resource_of(version: str) -> str:
    """Strip the version: `policy.weights` of `policy.weights@3`."""
    return version.partition("@")[0]


def _progress(trace: RunTrace) -> tuple[dict[int, int], dict[int, int]]:
    """Count by call the samples that it has finished, and those that it has begun."""
    columns = trace.columns
    if not columns.num_spans:
        return {}, {}
    sample_spans = np.unique(trace.call[trace.group == SAMPLE], return_counts=True)
    tasks = np.isin(trace.group, (FUNCTION, TRAIN)) & (columns["num_samples"] > 0)
    calls, at = np.unique(trace.call[tasks], return_inverse=True)
    counts = np.bincount(at.reshape(-1), weights=columns["num_samples"][tasks], minlength=len(calls)).astype(np.int64)
    begun = dict(zip(calls.tolist(), counts.tolist(), strict=True))
    return {**begun, **dict(zip(sample_spans[0].tolist(), sample_spans[1].tolist(), strict=True))}, begun


# ---- one run, followed

_Answer = TypeVar("_Answer")
_PART_BYTES = 4 << 20
"""Bytes of the trace read between two updates of the progress of loading."""
_EVERY_S = 0.8
_REST = 3.0
"""Pause before reading again, as a multiple of the time that the last reading took."""


@final
class KindShown(msgspec.Struct):
    """A kind of work, as the legend shows it."""

    label: str
    line: str
    group: str
    text: str


@final
class Predicted(msgspec.Struct):
    """What the plan predicted for a step."""

    step_s: float
    bound_s: float
    parts: list[tuple[str, float, bool, list[str]]]
    """Name, seconds, whether it is on the critical path, and its workers."""


@final
class Summary(msgspec.Struct):
    """The part of a run that every view needs. Times in microseconds since the run's first span."""

    name: str
    flow: str
    state: State
    revision: int
    """Increases when the trace grows."""
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
    """List the workers of a predicted part: `policy.generate, judge.score / 2 steps under way`, `weight sync of policy`."""
    calls = set(what.partition(" / ")[0].split(", "))
    role = what.removeprefix("weight sync of ").partition(" / ")[0] if what.startswith("weight sync of ") else ""
    stages = [stage for stage in plan.stages if stage.call in calls] or [
        s for s in plan.stages if _call_name(s.call) in set(map(_call_name, calls))
    ]
    found = [worker for stage in stages for worker in stage.workers]
    found += [worker for sync in plan.syncs if sync.role == role for worker in (sync.source, sync.target)]
    return list(dict.fromkeys(found))


def _call_name(call: str) -> str:
    """Strip the line: `policy.generate` of `policy.generate@47#2`. A prediction may have lines that the plan does not have."""
    return call.partition("#")[0].partition("@")[0]


@final
class Advice(msgspec.Struct):
    """What would be faster, as far as it is known."""

    state: str
    """`none`: nobody has asked while the run goes on; `running`; `done`."""
    suggestions: Suggestions | None
    why_not: str
    """Why there are none."""


class _Told(msgspec.Struct):
    """What `m2flow analyze --json` says of it."""

    suggestions: Suggestions | None
    why_not: str = ""


_read_told = msgspec.json.Decoder(_Told).decode


_LONGEST_S = 600.0
_MOST_SHOWN = 400
"""Characters of a text in the list of samples."""
_AT_ONCE = 500


def _among(ids: Sequence[int]) -> str:
    return f"id IN ({', '.join(map(str, ids))})" if ids else "0"


@final
class RunView:
    """A run directory, followed while the run goes on."""

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
        self._index = TextIndex(run_dir)
        self._advice = Advice("none", None, "")
        self._adviser: threading.Thread | None = None

    def loading(self, patience_s: float = 0.0) -> float | None:
        """Return the share of the trace that has been read, or None when all of it has; the first call starts the reading.

        Raises:
            the exception with which reading failed.
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
        """Return `m2flow.viewer.schedule.Schedule.window` for the trace as it was at the last summary."""
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
        page = sample_page(self.run_dir, call, prompt, member)
        with self._fresh():
            return with_stays(page, self._trace)

    def group(self, call: int, prompt: int) -> GroupPage:
        """Raises SpecError: there is no such group."""
        return group_page(self.run_dir, call, prompt, evaluates=call in evaluation_calls(self._trace.calls.by_ordinal))

    def texts(self, ids: Sequence[SampleId]) -> dict[str, tuple[str, str]]:
        """Return the beginnings of the prompts and responses of these samples, by `call/prompt/member`."""
        with SampleQuery(self.run_dir) as query:
            wanted = {who.pack(): who for who in ids}
            places: dict[Place, list[int]] = {}
            for packed, place in query.places_of(list(wanted)):
                places.setdefault(place, []).append(packed)
            found = {}
            for place, members in places.items():
                batch = query.record(place)
                for packed in members:
                    told, who = text_of(batch.select(np.array([packed], np.int64))), wanted[packed]
                    found[f"{who.call}/{who.prompt}/{who.index}"] = told.prompt[-_MOST_SHOWN:], told.response[:_MOST_SHOWN]
        return found

    def search(self, words: str) -> list[tuple[int, int, int]]:
        """Return the samples that match, the best first: call, prompt, member.

        Raises:
            OptionError: the words are no query. SpecError: there is no ledger.
        """
        return [(who.call, who.prompt, who.index) for who in map(SampleId.unpack, self._matches(words))]

    def selected(self, wanted: Wanted) -> list[int]:
        """Return the packed identities of the samples that meet all limits.

        Raises:
            OptionError: its words are no query. SpecError: the ledger can't be read.
        """
        columns = self.samples()
        matches = self._matches(wanted.words) if wanted.words else None
        ids = packed_ids(columns)
        return [ids[at] for at in selected(columns, wanted, matches)]

    def export(self, wanted: Wanted, path: Path) -> int:
        """Write the samples that meet all limits to a .jsonl or .parquet file; return how many."""
        ids = self.selected(wanted)
        with SampleQuery(self.run_dir) as query:
            return export((entry for at in range(0, len(ids), _AT_ONCE) for entry in query.entries(_among(ids[at : at + _AT_ONCE]))), path)

    def _matches(self, words: str) -> list[int]:
        self._index.refresh()
        return self._index.search(words)

    def suggestions(self, *, is_asked: bool = False) -> Advice:
        """Return what would be faster, or begin to simulate it in a process of its own: once a run has ended, or when it is asked for."""
        with self._lock:
            if self._advice.state == "none" and self._adviser is None:
                why = self._why_no_advice()
                is_live = state_of(self.run_dir).name == "running"
                if why:
                    self._advice = Advice("done", None, why)
                elif is_asked or not is_live:
                    self._advice = Advice("running", None, "")
                    self._adviser = threading.Thread(target=self._advise, name=f"analyze {self.name}", daemon=True)
                    self._adviser.start()
            elif is_asked and self._advice.state == "done":
                self._adviser, self._advice = None, Advice("none", None, "")
                return self.suggestions(is_asked=True)
            return self._advice

    def advised(self) -> Advice:
        """Return what would be faster, waiting for it. Of a run that goes on nothing is simulated."""
        self.suggestions()
        if self._adviser is not None:
            self._adviser.join()
        return self._advice if self._advice.state == "done" else Advice("done", None, "it was going on when this file was written")

    def _why_no_advice(self) -> str:
        """Say why nothing can be simulated; empty if it can. A flow from inside the folder of runs is not run: it may be a stranger's."""
        if (self.run_dir / "report.json").is_file():
            return "it is a simulation, which measured nothing"
        if self._trace.plan is None or not self._trace.steps:
            return "it has no plan, or no step yet"
        try:
            config = read_config(self.run_dir)
            flow = (Path(config.directory) / config.flow_path).resolve()
        except M2FlowError as error:
            return str(error).partition("\n")[0]
        if not flow.is_file():
            return config.why_no_flow()
        if flow.is_relative_to(self.run_dir.resolve().parent):
            return "its flow lies in the folder of runs; m2flow analyze runs it"
        return ""

    def _advise(self) -> None:
        command = [sys.executable, "-m", "m2flow", "analyze", str(self.run_dir.resolve()), "--json"]
        try:
            place = read_config(self.run_dir).directory
            done = subprocess.run(
                command, cwd=place, capture_output=True, text=True, timeout=_LONGEST_S, stdin=subprocess.DEVNULL, check=False
            )
            told = _read_told(done.stdout) if done.returncode == 0 else _Told(None, done.stderr.strip()[:300])
            self._advice = Advice("done", told.suggestions, told.why_not)
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError, M2FlowError) as error:
            self._advice = Advice("done", None, str(error)[:300])

    def graph(self) -> Graph:
        return self._asked(lambda: graph_of(self._trace))

    def analysis(self) -> Analysis:
        return self._asked(lambda: analysis_of(self._trace, self._schedule.devices))

    def training(self) -> Training:
        """Return the run's metrics and, once its trace has been read, series of efficiency, speed and staleness."""
        found = read_series(self.run_dir)
        if self._failure is not None or self.loading() is not None:
            return found
        with self._fresh():
            if self._steps is None or self._steps[0] != self._revision:
                self._steps = self._revision, series_of_steps(self.analysis().steps)
            series = found.series | self._steps[1]
            about = {name: about_metric(name) for name in series}
            return msgspec.structs.replace(found, series=series, about=about, bands=self._bands(), setup=setup_curve(self._trace))

    def _bands(self) -> dict[str, Bands]:
        columns = self.samples()
        trains = [not evaluates for evaluates in columns.evaluates]
        named: dict[str, Sequence[float | None]] = {
            "response tokens": columns.tokens,
            "reward": columns.reward,
            "advantage": columns.advantage,
        }
        found = {name: bands_of(columns.step, values, trains) for name, values in named.items()}
        return {name: bands for name, bands in found.items() if bands.steps}

    def alerts(self) -> list[Alert]:
        return self._asked(lambda: alerts_of(self.run_dir, self._trace))

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
    """Compare two runs, holding the locks of both."""
    with contextlib.ExitStack() as held:
        for view in sorted({one, other}, key=lambda view: view.name):  # Always in the same order, to avoid a deadlock.
            held.enter_context(view._fresh())
        return comparison_of((one.trace, one.analysis()), (other.trace, other.analysis()), (one.name, other.name))
