"""Join a run's trace with its ledger: the step, the call and the kind of work of each span, and the cause of each gap between them.

    ledger.db, or spans that name their call --KnownCalls.refresh--> ordinal -> KnownCall
    TraceColumns, KnownCalls, plan.json --RunTrace.refresh--> step, kind, group [S]; steps, versions
    KnownCalls --evaluation_calls--> the calls that lead to no update

Both are read while the run goes on. A simulated run has no ledger; its spans have everything but the inputs of calls.

A kind is what the viewer gives a colour: a line of the flow, or a kind of machinery (switches, weight sync, sending). A decode step does
not name the samples that it decodes; it counts for the call of the sample that was admitted last before it ended.

The idle time of each device is attributed to causes by the rule that the simulator uses.

    RunTrace --idle_of--> for each device its idle stretches, each with one cause

Devices that the same workers have count as one; so do engines that take turns under a lease. At any moment one cause holds for all idle
devices of a kind (`m2flow.simulator.simulation`); that its episodes all wait for tools or agents (`tool`), a worker says itself. Three
causes are not those of a simulation: `host`, when an engine has samples and does not decode, because Python works between two of its steps;
`setup`, before the first step of the loop (loading, a warm start); and `evaluation`, while nothing but an evaluation is worked on. The last
two are no part of what a step waits for.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Mapping, Sequence
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
from m2flow.observe.spans import FOR_AGENTS, FOR_SPEAKERS, SpanName
from m2flow.observe.store import TraceColumns
from m2flow.planner.planning import read_prediction
from m2flow.simulator.simulation import CAUSES as SIMULATED
from m2flow.simulator.simulation import Doing, causes_of

# ---- spans


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

GROUPS = ("rollout", "train", "function", "other", "sync", "switch", "wait", "life", "turn")
"""The groups of spans: kinds of engines that work, and what is no engine's work."""
ROLLOUT, TRAIN, FUNCTION, OTHER, SYNC, SWITCH, WAIT, SAMPLE, TURN = range(len(GROUPS))
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
    SpanName.TURN: TURN,
    SpanName.TOOL: TURN,
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
        self.tool_kind = -1
        """The kind `TOOLS`; -1: the run has none."""
        self.waits_for_agents: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """[S]: time in which a rollout engine has nothing to decode, since its episodes wait."""
        self.steps: list[Step] = []
        self.versions: list[Version] = []
        self.stops: tuple[IntArray, IntArray] = (none, none)
        """When the run stopped and when its workers were up again, in order; the time between does not count."""
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
            if group == WAIT and label >= 0 and columns.labels.texts[label] in (FOR_AGENTS, FOR_SPEAKERS):
                kinds[at] = kind_at(Kind(TOOLS, "", "wait"))
            elif group in (SYNC, SWITCH, WAIT):
                kinds[at] = kind_at(Kind(columns.names.texts[int(columns["name"][span])], "", "wait" if group == WAIT else "machinery"))
            else:
                line = columns.sites.texts[site] if site >= 0 else ""
                text = columns.labels.texts[label] if label >= 0 and line else columns.names.texts[int(columns["name"][span])]
                kinds[at] = kind_at(Kind(text, line, "call" if line or text not in _UPKEEP else "machinery"))
        self.kind[rest] = kinds[inverse.reshape(-1)]
        if (self.group == TURN).any():
            kind_at(Kind(TOOLS, "", "wait"))
        self.tool_kind = found.get((TOOLS, ""), -1)
        self.waits_for_agents = (self.group == WAIT) & (self.kind == self.tool_kind)

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
        # Of attempts that ended before their workers were up, the time belongs to the same stop.
        before, first = np.unique(before[is_between], return_index=True)
        resumes, starts = resumes[is_between][first], np.sort(self.columns["start"])
        again = starts[np.minimum(np.searchsorted(starts, resumes), len(starts) - 1)]
        return ends[before], np.maximum(resumes, again)

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


# ---- gaps


CAUSES = (*SIMULATED, "host", "setup", "evaluation")
APART = ("setup", "evaluation")
"""The causes that steps are not charged with."""
TOOLS = "tools and agents"
"""The kind of time in which episodes wait for tools or agents."""
_HOST, _SETUP, _EVALUATION = (CAUSES.index(cause) for cause in ("host", *APART))
_INSTANCES = 3
"""Levels of generating: no instance, some, all."""


@dataclass(frozen=True)
class Device:
    """A device, or several that the same workers have."""

    name: str
    workers: tuple[str, ...]
    kinds: tuple[str, ...]
    """The kinds of its engines: `rollout`, `train`."""
    num_devices: int = 1
    """The devices of a pool; those that a plan made by rule gives a worker count as one."""


@dataclass(frozen=True, eq=False)
class IdleTime:
    """The idle stretches of one device in ns, ordered and disjoint."""

    device: Device
    start: IntArray
    end: IntArray
    cause: IntArray
    """Positions in `CAUSES`."""
    busy_start: IntArray
    busy_end: IntArray

    def seconds(self, start: int, end: int) -> dict[str, float]:
        """Return the idle seconds by cause between two moments, for one of its devices; causes with zero are left out."""
        inside = np.maximum(np.minimum(self.end, end) - np.maximum(self.start, start), 0)
        sums = np.bincount(self.cause, weights=inside, minlength=len(CAUSES)) / 1e9
        return {cause: float(sums[at]) for at, cause in enumerate(CAUSES) if sums[at] > 0}

    def busy_seconds(self, start: int, end: int) -> float:
        return float(np.maximum(np.minimum(self.busy_end, end) - np.maximum(self.busy_start, start), 0).sum() / 1e9)


def devices_of(trace: RunTrace) -> list[Device]:
    """List the devices of rollout and training, from the plan, or from the trace where there is none."""
    workers = trace.columns.workers.texts
    found: dict[str, list[str]] = {}
    kinds: dict[str, dict[str, None]] = {}
    planned = {worker.name: worker for worker in trace.plan.workers} if trace.plan else {}
    seen = np.unique(np.stack([trace.columns["worker"], trace.group]), axis=1).T.tolist() if trace.columns.num_spans else []
    did = {workers[worker]: {group for other, group in seen if other == worker} for worker, _ in seen}
    for name in workers:
        plan = planned.get(name)
        hosts = {slot.kind for slot in plan.engines} if plan else set()
        groups = did.get(name, set())
        mine = [kind for kind, group in (("rollout", ROLLOUT), ("train", TRAIN)) if kind in hosts or group in groups]
        if mine:
            device = plan.lease if plan and plan.lease else name
            found.setdefault(device, []).append(name)
            kinds.setdefault(device, {}).update(dict.fromkeys(mine))
    return [
        Device(name, tuple(members), tuple(kinds[name]), max(_num_devices(planned[one].device) if one in planned else 1 for one in members))
        for name, members in found.items()
    ]


def _num_devices(place: str) -> int:
    """Count the devices in a name: `gpus[0:4]` are four.

    >>> _num_devices("gpus[0:4]"), _num_devices("gpus[3]"), _num_devices("cpu")
    (4, 1, 1)
    """
    found = re.fullmatch(r".+\[(\d+):(\d+)\]", place)
    return int(found[2]) - int(found[1]) if found else 1


def idle_of(trace: RunTrace) -> list[IdleTime]:
    """Compute the idle time of the devices of rollout and training, from the run's first span until `worked_until`.

    Time in which the run was stopped does not count.
    """
    if not trace.columns.num_spans:
        return []
    start, end, worker, until = trace.columns["start"], trace.columns["end"], trace.columns["worker"], trace.worked_until
    names = trace.columns.workers.texts
    works = np.isin(trace.group, (ROLLOUT, TRAIN, FUNCTION, OTHER))
    generates = np.isin(trace.group, (SAMPLE, ROLLOUT))
    instances = {at: union(start[mine], end[mine]) for at in range(len(names)) if (mine := generates & (worker == at)).any()}
    moments, causes = _causes(trace, list(instances.values()))
    evaluations, first = evaluations_of(trace), trace.steps[0].start if trace.steps else trace.start
    found = []
    for device in devices_of(trace):
        members = [at for at, name in enumerate(names) if name in device.workers]
        mine = np.isin(worker, members)
        busy = union(start[mine & works], end[mine & works])
        own = union(
            np.concatenate([instances[at][0] for at in members if at in instances] or [start[:0]]),
            np.concatenate([instances[at][1] for at in members if at in instances] or [end[:0]]),
        )
        gaps = np.append(trace.start, busy[1]), np.append(busy[0], trace.end)
        owner = _owner(trace, mine, device)
        switches, syncs = (union(start[mine & (trace.group == group)], end[mine & (trace.group == group)]) for group in (SWITCH, SYNC))
        tools = union(start[mine & trace.waits_for_agents], end[mine & trace.waits_for_agents])
        # A gap is cut wherever its cause may change.
        cuts = np.unique(np.concatenate([moments, *own, *switches, *syncs, *tools, *trace.stops, owner[0], *evaluations, [first]]))
        at = np.searchsorted(gaps[1], cuts, side="right")
        inside = cuts[(at < len(gaps[0])) & (cuts > gaps[0][np.minimum(at, len(gaps[0]) - 1)])]
        begins = np.sort(np.concatenate([gaps[0][gaps[1] > gaps[0]], inside]))
        stops = np.minimum(gaps[1][np.searchsorted(gaps[1], begins, side="right")], np.append(begins[1:], trace.end))
        begins, stops = begins[begins < until], np.minimum(stops[begins < until], until)
        kind = owner[1][np.searchsorted(owner[0], begins, side="right") - 1]
        cause = causes[kind, np.maximum(np.searchsorted(moments, begins, side="right") - 1, 0)]
        cause = np.where(_covered(begins, own) & (kind == 0), _HOST, cause)
        cause = np.where(_covered(begins, tools), CAUSES.index("tool"), cause)
        cause = np.where(_covered(begins, syncs), CAUSES.index("sync"), cause)
        cause = np.where(_covered(begins, switches), CAUSES.index("switch"), cause)
        cause = np.where(_covered(begins, evaluations), _EVALUATION, cause)
        cause = np.where(begins < first, _SETUP, cause)
        there = ~_covered(begins, trace.stops)
        found.append(IdleTime(device, *_joined(begins[there], stops[there], cause[there]), *busy))
    return found


def evaluations_of(trace: RunTrace) -> tuple[IntArray, IntArray]:
    """Return the ordered, disjoint intervals in which an evaluation is worked on, and nothing else."""
    start, end = trace.columns["start"], trace.columns["end"]
    mine, others = trace.evaluates & (trace.group != WAIT), ~trace.evaluates & ~np.isin(trace.group, (WAIT, SWITCH))
    return _without(union(start[mine], end[mine]), union(start[others], end[others]))


def _without(one: tuple[IntArray, IntArray], other: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
    """Cut disjoint intervals out of others.

    >>> [edge.tolist() for edge in _without((np.array([0, 20]), np.array([10, 30])), (np.array([2, 25]), np.array([4, 40])))]
    [[0, 4, 20], [2, 10, 25]]
    """
    edges = np.unique(np.concatenate([*one, *other]))
    begins, stops = edges[:-1], edges[1:]
    keep = _covered(begins, one) & ~_covered(begins, other)
    return union(begins[keep], stops[keep])


def union(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Merge intervals into ordered, disjoint ones that cover the same time."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    heads = np.flatnonzero(np.append(True, start[1:] > reach[:-1])) if len(start) else np.zeros(0, np.int64)
    tails = np.append(heads[1:], len(start)) - 1
    if not len(start):
        return start, end
    return start[heads], reach[tails]


def _covered(times: IntArray, intervals: tuple[IntArray, IntArray]) -> npt.NDArray[np.bool_]:
    """Test for each time whether it is in one of the disjoint intervals."""
    at = np.searchsorted(intervals[0], times, side="right") - 1
    return (at >= 0) & (times < np.append(intervals[1], 0)[at])


def _causes(trace: RunTrace, instances: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """Return the moments [M] of changes, and the cause that holds from each on for idle devices of both kinds, [2, M]."""
    start, end = trace.columns["start"], trace.columns["end"]
    states = [union(start[trace.group == group], end[trace.group == group]) for group in (SYNC, TRAIN, FUNCTION, SWITCH)]
    moments = np.unique(np.concatenate([[trace.start], *(edge for pair in (*states, *instances) for edge in pair)]))

    def number(intervals: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
        change = np.zeros(len(moments), np.int64)
        for begins, stops in intervals:
            change += np.bincount(np.searchsorted(moments, begins), minlength=len(moments))
            change -= np.bincount(np.searchsorted(moments, stops), minlength=len(moments))
        return np.cumsum(change)

    generating = number(instances)
    level = (generating > 0).astype(np.int64) + ((generating == len(instances)) & (generating > 0))
    code = level
    for state in states:
        code = code * 2 + (number([state]) > 0)
    table = np.zeros((2, _INSTANCES * 16), np.int64)
    for at in range(_INSTANCES * 16):
        rest, switches = divmod(at, 2)
        rest, judges = divmod(rest, 2)
        rest, trains = divmod(rest, 2)
        num_generating, syncs = divmod(rest, 2)
        found = causes_of(Doing(num_generating, _INSTANCES - 1, bool(syncs), bool(trains), bool(judges), bool(switches)))
        table[:, at] = CAUSES.index(found["rollout"]), CAUSES.index(found["train"])
    return moments, table[:, code]


def _owner(trace: RunTrace, mine: npt.NDArray[np.bool_], device: Device) -> tuple[IntArray, IntArray]:
    """Return the moments at which a device changes its owner, and the owner from each on: 0 rollout, 1 train."""
    first = np.array([np.iinfo(np.int64).min])
    if len(device.kinds) == 1:
        return first, np.array([int(device.kinds[0] == "train")])
    switches = np.flatnonzero(mine & (trace.group == SWITCH))
    switches = switches[np.argsort(trace.columns["end"][switches], kind="stable")]
    if not len(switches):
        return first, np.array([0])
    to_train = np.array([text.startswith("to train") for text in trace.columns.labels.texts] + [False], bool)
    owners = to_train[trace.columns["label"][switches]].astype(np.int64)
    return np.concatenate([first, trace.columns["end"][switches]]), np.concatenate([1 - owners[:1], owners])


def _joined(start: IntArray, end: IntArray, cause: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Merge neighbouring stretches of one cause."""
    keep = end > start
    start, end, cause = start[keep], end[keep], cause[keep]
    if not len(start):
        return start, end, cause
    heads = np.flatnonzero(np.append(True, (start[1:] > end[:-1]) | (cause[1:] != cause[:-1])))
    return start[heads], end[np.append(heads[1:], len(start)) - 1], cause[heads]
