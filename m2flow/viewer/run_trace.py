"""Join a run's trace with its ledger: the step, the call and the kind of work of each span.

    ledger.db, or spans that name their call --KnownCalls.refresh--> ordinal -> KnownCall
    TraceColumns, KnownCalls, plan.json --RunTrace.refresh--> step, kind, group [S]; steps, versions
    KnownCalls --evaluation_calls--> the calls that lead to no update

Both are read while the run goes on. A simulated run has no ledger; its spans have everything but the inputs of calls.

A kind is what the viewer gives a colour: a line of the flow, or a kind of machinery (switches, weight sync, sending). A decode step does
not name the samples that it decodes; it counts for the call of the sample that was admitted last before it ended.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.macro.replay import CallRecord
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.records.ledger import read_beginnings
from m2flow.micro.records.rundir import reading_ledger
from m2flow.observe.spans import SpanName
from m2flow.observe.store import TraceColumns
from m2flow.planner.planning import read_prediction

_read_call_record = msgspec.msgpack.Decoder(CallRecord).decode

_read_plan = msgspec.json.Decoder(Plan).decode

# ---- calls


@dataclass(frozen=True)
class KnownCall:
    """A call of the program, with its step, line and inputs."""

    ordinal: int
    step: int
    """-1: before the flow's loop."""
    name: str
    site: str
    """`flows/grpo.py:23`"""
    text: str = ""
    """The source line."""
    inputs: tuple[tuple[str, int], ...] = ()
    """Name of the parameter, and the call whose result it is."""
    effects: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()


@final
class KnownCalls:
    """The calls of one run, read from its ledger or its spans as they come."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.by_ordinal: dict[int, KnownCall] = {}
        self.has_ledger = False

    def refresh(self, columns: TraceColumns) -> None:
        """Read the new calls from the ledger or from spans."""
        if (self._run_dir / "ledger.db").is_file():
            with contextlib.suppress(sqlite3.Error):  # The ledger is being created.
                self._read()
                self.has_ledger = True
        if not self.has_ledger:
            self._take_from(columns)

    def _read(self) -> None:
        with reading_ledger(self._run_dir) as db:
            newest = max(self.by_ordinal, default=-1)
            for ordinal, step, name, site in db.execute("SELECT ordinal, step, name, site FROM calls WHERE ordinal > ?", (newest,)):
                self.by_ordinal[ordinal] = KnownCall(ordinal, step, name, site)
            short = [ordinal for ordinal, call in self.by_ordinal.items() if not call.text]
            if short:
                rows = db.execute("SELECT position, body FROM record WHERE kind='call' AND position >= ?", (min(short),))
                for ordinal, body in rows:
                    if ordinal in self.by_ordinal:
                        told = _read_call_record(body)
                        self.by_ordinal[ordinal] = KnownCall(
                            ordinal, told.step, told.name, told.site, told.text or " ", told.inputs, told.effects, told.shown
                        )

    def _take_from(self, columns: TraceColumns) -> None:
        if not columns.num_spans:
            return
        ordinals, first = np.unique(columns["call"], return_index=True)
        for ordinal, at in zip(ordinals.tolist(), first.tolist(), strict=True):
            site, label = int(columns["site"][at]), int(columns["label"][at])
            if ordinal >= 0 and ordinal not in self.by_ordinal and site >= 0 and label >= 0:
                step = int(columns["step"][at])
                self.by_ordinal[ordinal] = KnownCall(ordinal, step, columns.labels.texts[label], columns.sites.texts[site])


def evaluation_calls(calls: Mapping[int, KnownCall]) -> set[int]:
    """Return the ordinals of calls that only evaluate: what they generate, or judge, reaches no update.

    A call of the newest step, whose update may not be made yet, counts only if no call of its line has ever led to one. Of a run that
    trains nothing, or whose calls' inputs are not known (a simulated one), no call evaluates.
    """
    leads: set[int] = set()
    trains = {ordinal for ordinal, call in calls.items() if any(_WRITES_WEIGHTS.match(effect) for effect in call.effects)}
    if not trains:
        return set()
    for ordinal in sorted(calls, reverse=True):
        if ordinal in trains or ordinal in leads:
            leads.update(source for _, source in calls[ordinal].inputs)
    newest = max(call.step for call in calls.values())
    lines = {(calls[ordinal].name, calls[ordinal].site) for ordinal in leads if ordinal in calls}
    found: set[int] = set()
    for ordinal, call in sorted(calls.items()):
        is_open = call.step == newest and (call.name, call.site) in lines
        if ordinal in trains or ordinal in leads or is_open:
            continue
        if call.name.endswith(".generate") or any(source in found for _, source in call.inputs):
            found.add(ordinal)
    return found


_WRITES_WEIGHTS = re.compile(r"writes \S+\.weights@")

IntArray = npt.NDArray[np.int64]

GROUPS = ("rollout", "train", "function", "other", "sync", "switch", "wait", "life")
"""The groups of spans: kinds of engines that work, and what is no engine's work."""
ROLLOUT, TRAIN, FUNCTION, OTHER, SYNC, SWITCH, WAIT, SAMPLE = range(len(GROUPS))
_BY_NAME = {
    SpanName.WEIGHTS_PUBLISH: SYNC,
    SpanName.WEIGHTS_LOAD: SYNC,
    SpanName.SWITCH: SWITCH,
    SpanName.OFFLOAD: SWITCH,
    SpanName.ONLOAD: SWITCH,
    SpanName.DRAIN: WAIT,
    SpanName.SEND: WAIT,
    SpanName.WAIT: WAIT,
    SpanName.SAMPLE: SAMPLE,
}
_UPKEEP = (SpanName.TRAIN_SAVE, SpanName.TRAIN_PROBE, SpanName.ROLLOUT_PROBE)
"""Work that no line of the flow calls for."""
_BY_ENGINE = {"rollout": ROLLOUT, "train": TRAIN, "function": FUNCTION}


@dataclass(frozen=True)
class Kind:
    """A kind of work, which has one colour in the viewer."""

    label: str
    line: str
    """`flows/grpo.py:23`; empty for machinery."""
    group: str
    """`call`, `machinery` or `wait`."""
    text: str = ""
    """The source line."""


@dataclass(frozen=True)
class Step:
    """A step, from the end of the step before it to the end of its last work; times in ns."""

    step: int
    start: int
    end: int


@dataclass(frozen=True)
class Version:
    """A weight version, and when it was first published, or loaded where it is not published."""

    version: int
    role: str
    at: int


@final
class RunTrace:
    """The trace of one run with derived columns; for one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.columns = TraceColumns(run_dir)
        self.calls = KnownCalls(run_dir)
        self.plan: Plan | None = None
        self.predicted: Choice | None = None
        """The predicted times of the plan, where it was searched for or a forecast was made."""
        self.kinds: list[Kind] = []
        none = np.zeros(0, np.int64)
        self.kind: IntArray = none
        """[S], positions in `kinds`."""
        self.group: IntArray = none
        """[S], positions in `GROUPS`."""
        self.step: IntArray = none
        """[S]; -1: no step, or not known."""
        self.call: IntArray = none
        """[S]; -1: no call, or not known."""
        self.evaluates: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """[S]: whether its call only evaluates."""
        self.steps: list[Step] = []
        self.versions: list[Version] = []
        self.stops: tuple[IntArray, IntArray] = (none, none)
        """When the run stopped and when it was resumed, in order; the time between does not count."""
        self.worked_until = 0
        """ns: the end of the accounting of devices. While the final checkpoint is written, idle time has no cause."""

    def refresh(self, most_bytes: int = 1 << 62) -> bool:
        """Read what is new; returns whether there was anything."""
        if self.plan is None:
            self.plan = read_plan_of(self.run_dir)
            self.predicted = read_prediction(self.run_dir, self.plan)
        known = len(self.calls.by_ordinal)
        is_new = self.columns.refresh(most_bytes)
        self.calls.refresh(self.columns)
        if is_new or len(self.calls.by_ordinal) != known or len(self.group) != self.columns.num_spans:
            self._derive()
            return True
        return False

    @property
    def start(self) -> int:
        """ns; 0 if there is no span yet."""
        return int(self.columns["start"].min()) if self.columns.num_spans else 0

    @property
    def end(self) -> int:
        return int(self.columns["end"].max()) if self.columns.num_spans else 0

    def _derive(self) -> None:
        columns = self.columns
        name, engine = columns["name"], columns["engine"]
        by_name = np.array([_BY_NAME.get(SpanName(text), -1) if text in set(SpanName) else -1 for text in columns.names.texts], np.int64)
        by_engine = np.array([_BY_ENGINE.get(text, OTHER) for text in columns.engines.texts], np.int64)
        self.group = np.where(by_name[name] >= 0, by_name[name], by_engine[engine]) if len(name) else name
        self.call = self._calls()
        most = max([int(self.call.max(initial=-1)), *self.calls.by_ordinal]) + 1
        step_of_call = np.full(most + 1, -1, np.int64)
        for ordinal, call in self.calls.by_ordinal.items():
            step_of_call[ordinal] = call.step
        self.step = np.where(columns["step"] >= 0, columns["step"], step_of_call[self.call])
        self.evaluates = np.isin(self.call, sorted(evaluation_calls(self.calls.by_ordinal)))
        self._derive_kinds(most)
        self.steps = self._find_steps()
        self.versions = self._find_versions()
        self.stops = self._find_stops()
        self.worked_until = self._find_last_work()

    def _calls(self) -> IntArray:
        """Find the call of each span; for decode steps, from the spans of the samples that ran beside them."""
        columns = self.columns
        call = columns["call"].copy()
        unknown = (call < 0) & (self.group == ROLLOUT)
        for worker in np.unique(columns["worker"][unknown]).tolist():
            sample_spans = np.flatnonzero((self.group == SAMPLE) & (columns["worker"] == worker))
            if not len(sample_spans):
                continue
            sample_spans = sample_spans[np.argsort(columns["start"][sample_spans], kind="stable")]
            mine = np.flatnonzero(unknown & (columns["worker"] == worker))
            at = np.searchsorted(columns["start"][sample_spans], columns["end"][mine], side="left") - 1
            call[mine] = columns["call"][sample_spans[np.maximum(at, 0)]]
        return call

    def _derive_kinds(self, num_calls: int) -> None:
        """Number the kinds: calls by their line, in the order of the program; then machinery; then waiting."""
        columns, found = self.columns, dict[tuple[str, str], int]()
        self.kinds = []

        def kind_at(kind: Kind) -> int:
            key = (kind.label, kind.line)
            if key not in found:
                found[key] = len(self.kinds)
                self.kinds.append(kind)
            return found[key]

        of_call = np.full(num_calls + 1, -1, np.int64)
        seen = set(np.unique(self.call).tolist())
        for ordinal, call in sorted(self.calls.by_ordinal.items()):
            if ordinal in seen:
                of_call[ordinal] = kind_at(Kind(call.name, call.site, "call", call.text.strip()))
        self.kind = of_call[self.call]
        self.kind[np.isin(self.group, (SYNC, SWITCH, WAIT))] = -1
        rest = np.flatnonzero(self.kind < 0)
        # The other spans are classified by name, or by label and line: a few combinations, however many spans.
        width = len(columns.labels.texts) + 1
        high = len(columns.sites.texts) + 1
        keys = ((columns["name"][rest] * width + columns["label"][rest] + 1) * high + columns["site"][rest] + 1) * len(GROUPS)
        unique, first, inverse = np.unique(keys + self.group[rest], return_index=True, return_inverse=True)
        order = np.argsort(self.group[rest[first]] * len(rest) + first)
        kinds = np.zeros(len(unique), np.int64)
        for at in order.tolist():
            span = int(rest[first[at]])
            group = int(self.group[span])
            label, site = int(columns["label"][span]), int(columns["site"][span])
            if group in (SYNC, SWITCH, WAIT):
                kinds[at] = kind_at(Kind(columns.names.texts[int(columns["name"][span])], "", "wait" if group == WAIT else "machinery"))
            else:
                line = columns.sites.texts[site] if site >= 0 else ""
                text = columns.labels.texts[label] if label >= 0 and line else columns.names.texts[int(columns["name"][span])]
                kinds[at] = kind_at(Kind(text, line, "call" if line or text not in _UPKEEP else "machinery"))
        self.kind[rest] = kinds[inverse.reshape(-1)]

    def _find_steps(self) -> list[Step]:
        inside = np.flatnonzero((self.step >= 0) & (self.group != WAIT))
        if not len(inside):
            return []
        numbers, at = np.unique(self.step[inside], return_inverse=True)
        start = np.full(len(numbers), np.iinfo(np.int64).max)
        end = np.zeros(len(numbers), np.int64)
        np.minimum.at(start, at, self.columns["start"][inside])
        np.maximum.at(end, at, self.columns["end"][inside])
        ends = np.maximum.accumulate(end)
        begins = np.concatenate([start[:1], ends[:-1]])
        return [Step(*row) for row in zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True)]

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds between two moments without those in which the run was stopped."""
        stops, resumes = self.stops
        inside = np.maximum(np.minimum(resumes, end) - np.maximum(stops, start), 0)
        return float(end - start - inside.sum()) / 1e9

    def _find_stops(self) -> tuple[IntArray, IntArray]:
        resumes = (np.array(read_beginnings(self.run_dir)[1:], np.float64) * 1e9).astype(np.int64)
        if not len(resumes):  # Nearly every run was never resumed.
            return resumes, resumes
        ends = np.sort(self.columns["end"])
        before = np.searchsorted(ends, resumes) - 1
        is_between = (before >= 0) & (before < len(ends) - 1)
        return ends[before[is_between]], resumes[is_between]

    def _find_last_work(self) -> int:
        names, ends = self.columns.names.texts, self.columns["end"]
        saves = self.columns["name"] == (names.index(SpanName.TRAIN_SAVE) if SpanName.TRAIN_SAVE in names else -1)
        last = int(ends[~saves & (self.group != WAIT)].max(initial=0))
        return last if int(ends[saves].max(initial=0)) > last > 0 else self.end

    def _find_versions(self) -> list[Version]:
        columns, found = self.columns, dict[tuple[str, int], int]()
        names = columns.names.texts
        for name in (SpanName.WEIGHTS_PUBLISH, SpanName.WEIGHTS_LOAD):
            if name not in names:
                continue
            mine = np.flatnonzero((columns["name"] == names.index(name)) & (columns["version"] >= 0))
            published = {role for role, _ in found} if name == SpanName.WEIGHTS_LOAD else set()
            for span in mine[np.argsort(columns["end"][mine], kind="stable")].tolist():
                label = int(columns["label"][span])
                role = columns.labels.texts[label] if label >= 0 else ""
                if role not in published:
                    found.setdefault((role, int(columns["version"][span])), int(columns["end"][span]))
        return sorted((Version(version, role, at) for (role, version), at in found.items()), key=lambda one: one.at)


def read_plan_of(run_dir: Path) -> Plan | None:
    """Read the plan of a run; None if it has none that can be read."""
    try:
        return _read_plan((run_dir / "plan.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
