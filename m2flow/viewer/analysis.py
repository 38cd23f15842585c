"""Analyse a run step by step: against its lower bounds, along its critical path, by idle time of devices and by peak memory.

    RunTrace, idle time, ledger --analysis_of--> Analysis, with a Verdict: what the steps wait for, most of all first
    RunTrace --measured_decode--> t0 + t1 b of its decode steps;  step_bounds --> seconds by the bound's name
    RunTrace --CriticalPath.of(step)--> Link ... from the step's beginning to its end
    counters "peak ... bytes" (m2flow.micro.worker.engine_host), Plan.choice --memory_of--> WorkerMemory, ...

Bounds. They are those of the simulator (`m2flow.rollout_scheduling.decode_model`), with constants fitted to the run's own spans instead of
a cost model, and with the work that was really done; a simulated run has the bounds of its own report. Measured times scatter, so a bound
is as good as the fit, and a step may come out a little faster. Only tokens of samples that ran within the step count. Prefill, switches and
weight syncs are left out.

    longest_sample   (t0 + t1) L of the longest sample
    work             device seconds of all tokens at the best rate and of all training, by all devices
    k_longest, no_migration     of the rollout
    functions        seconds of rewards and ops, by the processes that compute them
    longest_chain    of episodes: the turns of one, each alone on its engine at t0 + t1 a token, and its tool calls between them
    tool_slots       seconds of tools whose calls at once are limited, by their slots

Evaluations (`m2flow.viewer.run_trace.evaluation_calls`) and what comes before the first step are accounted apart: bounds, efficiency and
the verdict are those of the steps without them.

Verdict. What a step waits for is taken from its critical path; of a generation, the time in which at most a tenth of the step's samples
still ran is its tail. A function waits, rather than computes, where its processes used less than 15% of a core while it was being called.

Critical path. It is followed backwards from the last work of a step: a task can't begin before its worker is free, its samples are there
and the weights that it needs are there. Of these, the one that ended last is the link before it. Time between two links is nobody's work:
a message in flight, Python, or a program that waited. Of an episode the time outside its turns is that of tools and its agent; so is the
time in which a rollout engine has no turn to decode.

Memory. A peak is that of the process since its start, so a step's peak is that of all steps up to it, and rises where a step needs more
than those before. Limits: a trainer of several ranks shows its first rank; the host's memory includes Python and libraries, which the plan
does not count; where an engine's model is in processes of its own (SGLang), only the worker beside them is measured and nothing is
predicted.
"""

from __future__ import annotations

import contextlib
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError
from m2flow.micro.lowering.capabilities import rollout_capabilities
from m2flow.micro.protocol.plan import Choice, EngineSlot, Placement, WorkerPlan
from m2flow.micro.records.accounting import bias_of_run, moves
from m2flow.micro.records.audit import read_token_account
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.worker.engine_host import PEAKS, SHARED_TOKENS
from m2flow.observe.spans import SpanName
from m2flow.planner.planning import read_forecast
from m2flow.planner.profiles import fit
from m2flow.rollout_scheduling.decode_model import DecodeModel, rollout_bounds
from m2flow.viewer.run_trace import (
    FUNCTION,
    ROLLOUT,
    SAMPLE,
    SWITCH,
    SYNC,
    TRAIN,
    TURN,
    WAIT,
    Device,
    IdleTime,
    RunTrace,
    Step,
    evaluations_of,
    union,
)

IntArray = npt.NDArray[np.int64]
# ---- lower bounds from measured decode steps

_LEAST_STEPS = 8
"""The least number of decode steps for a fit."""


@dataclass(frozen=True)
class MeasuredDecode:
    """The cost of decode steps, fitted to those that a run recorded."""

    model: DecodeModel
    num_steps: int
    r2: float
    error: float
    """Median of |fitted - measured| / measured."""


def measured_decode(trace: RunTrace) -> MeasuredDecode | None:
    """Fit the decode cost over all instances; None where too few steps were recorded one by one."""
    columns = trace.columns
    if SpanName.ROLLOUT_STEP not in columns.names.texts:
        return None
    mine = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.ROLLOUT_STEP)) & (columns["num_samples"] > 0))
    seconds = (columns["end"][mine] - columns["start"][mine]) / 1e9
    batch = columns["num_samples"][mine]
    known = seconds > 0
    seconds, batch = seconds[known], batch[known]
    if len(seconds) < _LEAST_STEPS:
        return None
    constants, quality = fit(np.stack([np.ones(len(batch)), batch], axis=1), seconds)
    t0, t1 = float(constants[0]), float(constants[1])
    model = DecodeModel(max(t0, 1e-9), max(t1, 0.0), max_batch=int(batch.max()))
    return MeasuredDecode(model, len(seconds), quality.r2, quality.error)


def step_bounds(trace: RunTrace, step: Step, devices: list[Device], decode: MeasuredDecode | None) -> dict[str, float]:
    """Compute the lower bounds of a step in seconds, by name; empty where the trace does not allow any."""
    columns = trace.columns
    found: dict[str, float] = {}
    inside = np.minimum(columns["end"], step.end) - np.maximum(columns["start"], step.start)
    names = columns.workers.texts
    size = np.array([next((device.num_devices for device in devices if name in device.workers), 1) for name in names] + [1], np.int64)
    weighed = np.maximum(inside, 0) * size[columns["worker"]]
    train_s = float(weighed[trace.group == TRAIN].sum() / 1e9)
    functions_s = _function_seconds(trace, step)
    if functions_s:
        found["functions"] = functions_s
    inside_step = (columns["start"] >= step.start) & (columns["end"] <= step.end)
    sample_spans = np.flatnonzero((trace.group == SAMPLE) & ~trace.evaluates & inside_step)
    lengths = columns["num_tokens"][sample_spans]
    lengths = lengths[lengths > 0]
    decode_s = 0.0
    if decode is not None and len(lengths):
        num_instances = max(len(np.unique(columns["worker"][trace.group == SAMPLE])), 1)
        bounds = rollout_bounds(lengths, decode.model, num_instances)
        whole = sample_spans[columns["num_tokens"][sample_spans] > 0]
        decode_s = decode.model.best_token_s * int((lengths * size[columns["worker"][whole]]).sum())
        found |= {"longest_sample": bounds.longest_s, "k_longest": bounds.k_longest_s, "no_migration": bounds.no_migration_s}
    if (trace.group == TURN).any():
        turns, token_s = Turns(trace), decode.model.alone_token_s if decode is not None else 0.0
        chains_s = [turns.chain_s(packed, token_s) for packed in np.unique(columns["sample"][sample_spans]).tolist()]
        told = {"longest_chain": max(chains_s, default=0.0), "tool_slots": _slots_s(tools_of(trace, step.start, step.end))}
        found |= {name: seconds for name, seconds in told.items() if seconds > 0}
    if devices and (train_s or decode_s):
        found["work"] = (train_s + decode_s) / sum(device.num_devices for device in devices)
    return found


def _function_seconds(trace: RunTrace, step: Step) -> float:
    """Return the seconds in which rewards and ops of a step were computed, by the number of processes for them."""
    start, end, worker = (trace.columns[name] for name in ("start", "end", "worker"))
    mine = (trace.group == FUNCTION) & ~trace.evaluates & (trace.step == step.step) & (start < step.end) & (end > step.start)
    seconds = 0.0
    for at in np.unique(worker[mine]).tolist():
        own = mine & (worker == at)
        begins, stops = union(np.maximum(start[own], step.start), np.minimum(end[own], step.end))
        seconds += float((stops - begins).sum() / 1e9)
    hosts = [one for one in trace.plan.workers if any(slot.kind == "function" for slot in one.engines)] if trace.plan else []
    return seconds / max(len(hosts), len(np.unique(worker[trace.group == FUNCTION])), 1)


@final
class Turns:
    """The turns of episodes, and what their tools took."""

    def __init__(self, trace: RunTrace) -> None:
        columns, names = trace.columns, trace.columns.names.texts
        self._columns = columns

        def by_sample(name: SpanName) -> tuple[IntArray, IntArray]:
            mine = np.flatnonzero(columns["name"] == names.index(name)) if name in names else np.zeros(0, np.int64)
            mine = mine[np.argsort(columns["sample"][mine], kind="stable")]
            return mine, columns["sample"][mine]

        self._turns, self._tools = by_sample(SpanName.TURN), by_sample(SpanName.TOOL)

    def of(self, packed: int) -> tuple[IntArray, IntArray] | None:
        """The disjoint intervals of an episode's turns; None where it has none."""
        mine = _of_sample(self._turns, packed)
        return union(self._columns["start"][mine], self._columns["end"][mine]) if len(mine) else None

    def chain_s(self, packed: int, token_s: float) -> float:
        """The least seconds of an episode: its turns at so many seconds a token, and its tool calls, but for those beside its turns."""
        start, end = self._columns["start"], self._columns["end"]
        turns, tools = _of_sample(self._turns, packed), _of_sample(self._tools, packed)
        tokens = int(np.maximum(self._columns["num_tokens"][turns], 0).sum())
        called, spoken = union(start[tools], end[tools]), union(start[turns], end[turns])
        beside_s = sum(_overlap(spoken, a, b) for a, b in zip(*(one.tolist() for one in called), strict=True))
        return tokens * token_s + float((called[1] - called[0]).sum() / 1e9) - beside_s


def _of_sample(held: tuple[IntArray, IntArray], packed: int) -> IntArray:
    first, last = np.searchsorted(held[1], (packed, packed + 1))
    return held[0][first:last]


@final
class ToolUse(msgspec.Struct):
    """The calls of one tool."""

    name: str
    num: int
    seconds: float
    """Seconds of all calls, without what they waited for a slot."""
    mean_s: float
    longest_s: float
    slots: int
    """Calls at once in all processes; 0: as many as are asked for."""
    shares_slots: bool
    """Whether it shares them with other plain functions."""


def tools_of(trace: RunTrace, start: int, end: int) -> list[ToolUse]:
    """The tools that episodes called between two moments, the one that took most first."""
    columns = trace.columns
    if SpanName.TOOL not in columns.names.texts:
        return []
    calls = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.TOOL)) & ~trace.evaluates)
    calls = calls[(columns["start"][calls] < end) & (columns["end"][calls] > start)]
    num_processes = max(len(np.unique(columns["worker"][trace.group == SAMPLE])), 1)
    found = []
    for label in np.unique(columns["label"][calls]).tolist():
        mine = calls[columns["label"][calls] == label]
        seconds = (np.minimum(columns["end"][mine], end) - np.maximum(columns["start"][mine], start)) / 1e9
        told = columns.span(int(mine[0])).attributes
        slots = told.get("slots", 0)
        found.append(
            ToolUse(
                columns.labels.texts[label] if label >= 0 else "",
                len(mine),
                float(seconds.sum()),
                float(seconds.mean()),
                float(seconds.max()),
                slots * num_processes if isinstance(slots, int) else 0,
                not told.get("own_slots", False),
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def _slots_s(tools: Sequence[ToolUse]) -> float:
    """The least seconds of tools whose slots are limited."""
    shared = [one for one in tools if one.slots and one.shares_slots]
    own_s = [one.seconds / one.slots for one in tools if one.slots and not one.shares_slots]
    return max([sum(one.seconds for one in shared) / shared[0].slots if shared else 0.0, *own_s])


# ---- critical path

_MOST_LINKS = 20_000


@dataclass(frozen=True)
class Link:
    """One piece of work on the critical path; times in ns, cut at the step's ends."""

    span: int
    kind: int
    """Position among the trace's kinds."""
    start: int
    end: int


@final
class CriticalPath:
    """Find critical paths in a trace, as far as it has been read."""

    def __init__(self, trace: RunTrace, devices: Sequence[Device]) -> None:
        columns = trace.columns
        self._trace = trace
        self._start, self._end = columns["start"], columns["end"]
        worker = columns["worker"]
        is_work = ~np.isin(trace.group, (SAMPLE, WAIT, TURN)) | trace.waits_for_agents
        self._by_worker: dict[int, IntArray] = {}
        for at in np.unique(worker).tolist():
            name = columns.workers.texts[at]
            shared = next((device.workers for device in devices if name in device.workers), (name,))
            members = [columns.workers.texts.index(one) for one in shared if one in columns.workers.texts]
            mine = np.flatnonzero(is_work & np.isin(worker, members))
            self._by_worker[at] = mine[np.argsort(self._end[mine], kind="stable")]
        self._work = np.flatnonzero(is_work & ~trace.waits_for_agents)
        self._turns = Turns(trace)
        sample_spans = np.flatnonzero((trace.group == SAMPLE) & (columns["sample"] >= 0))
        self._sample_spans = sample_spans[np.argsort(columns["sample"][sample_spans], kind="stable")]
        touches = columns.touches
        self._touches = touches[np.argsort(touches[:, 1], kind="stable")]
        judged = touches[trace.group[touches[:, 1]] == FUNCTION] if len(touches) else touches
        self._judged = judged[np.argsort(judged[:, 0], kind="stable")]
        self._syncs = np.flatnonzero(trace.group == SYNC)

    def of(self, step: Step) -> list[Link]:
        """Return the critical path of a step, in order of time."""
        mine = self._work[(self._trace.step[self._work] == step.step) & (self._end[self._work] <= step.end)]
        if not len(mine):
            return []
        span = int(mine[np.argmax(self._end[mine])])
        links: list[Link] = []
        until = step.end
        while span >= 0 and len(links) < _MOST_LINKS:
            start, end = max(int(self._start[span]), step.start), min(int(self._end[span]), until)
            if end > start:
                links += self._links(span, start, end)
                until = start
            if self._start[span] <= step.start:
                break
            span = self._before(span)
        return links[::-1]

    def _links(self, span: int, start: int, end: int) -> list[Link]:
        """A span as links, the last first: an episode is cut into its turns, and what it waits for between them."""
        kind, packed = int(self._trace.kind[span]), int(self._trace.columns["sample"][span])
        turns = self._turns.of(packed) if self._trace.group[span] == SAMPLE else None
        if turns is None:
            return [Link(span, kind, start, end)]
        edges = [start, *(edge for pair in zip(*(np.clip(one, start, end).tolist() for one in turns), strict=True) for edge in pair), end]
        kinds = [self._trace.tool_kind, kind] * len(edges)
        found = [Link(span, of, a, b) for of, a, b in zip(kinds, edges[:-1], edges[1:], strict=False) if b > a]
        return found[::-1]

    def _before(self, span: int) -> int:
        """Return the span that delayed this one, or -1 if none is known."""
        columns, group, start = self._trace.columns, int(self._trace.group[span]), int(self._start[span])
        found = [self._last_on(int(columns["worker"][span]), start, span)]
        if group in (TRAIN, FUNCTION):
            first, last = np.searchsorted(self._touches[:, 1], (span, span + 1))
            samples = self._touches[first:last, 0]
            if group == TRAIN:
                found += self._latest(self._judged[:, 0], self._judged[:, 1], samples, start)
            found += self._latest(columns["sample"][self._sample_spans], self._sample_spans, samples, start)
        elif group == SYNC and columns["version"][span] >= 0:
            same = self._syncs[columns["version"][self._syncs] == columns["version"][span]]
            found += same.tolist()
        elif group == SAMPLE:
            same = self._syncs[(columns["worker"][self._syncs] == columns["worker"][span]) & (self._end[self._syncs] <= start)]
            found += same[-1:].tolist()
        # A span that began no earlier can't have delayed this one, whatever the clocks say; this ensures that the search ends.
        found = [other for other in found if other >= 0 and self._start[other] < start and self._end[other] <= start + _SLACK_NS]
        return max(found, key=lambda other: int(self._end[other]), default=-1)

    def _last_on(self, worker: int, before: int, span: int) -> int:
        """Return the last work on the worker's device that had ended."""
        mine = self._by_worker[worker]
        at = int(np.searchsorted(self._end[mine], before, side="right")) - 1
        while at >= 0 and mine[at] == span:
            at -= 1
        return int(mine[at]) if at >= 0 else -1

    def _latest(self, keys: IntArray, values: IntArray, samples: IntArray, before: int) -> list[int]:
        """Return the last span of these samples that had ended."""
        if not len(keys) or not len(samples):
            return []
        first, last = np.searchsorted(keys, samples, side="left"), np.searchsorted(keys, samples, side="right")
        spans = np.concatenate([values[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        spans = spans[self._end[spans] <= before + _SLACK_NS]
        return [int(spans[np.argmax(self._end[spans])])] if len(spans) else []


_SLACK_NS = 500_000
"""Tolerance between the clocks of two processes of a busy host: each is compared once with the time of day."""


# ---- peak memory


@final
class WorkerMemory(msgspec.Struct):
    """The memory of one process, planned and measured, in bytes."""

    worker: str
    of: str
    """`host` or `GPU`."""
    predicted: int | None
    """What its engines need at once by the plan; None where the plan was made by rule or does not predict it."""
    peak: int
    steps: list[int | None]
    """The peak at the end of each step; None before the first one was recorded."""


def memory_of(trace: RunTrace) -> list[WorkerMemory]:
    """Return the memory of each worker that recorded its peak."""
    planned = {worker.name: worker for worker in trace.plan.workers} if trace.plan else {}
    choice = trace.plan.choice if trace.plan else None
    found = []
    for of, name in PEAKS.items():
        for (track, counter_name), counter in trace.columns.counters.items():
            if counter_name != name or not counter.values:
                continue
            values = [int(value) for value in counter.values]
            before = [bisect_right(counter.at_ns, step.end) for step in trace.steps]
            worker = planned.get(track)
            predicted = predicted_bytes(worker, choice) if worker is not None and choice is not None else None
            found.append(WorkerMemory(track, of, predicted, max(values), [max(values[:at], default=None) for at in before]))
    return sorted(found, key=lambda one: (one.worker, one.of))


def predicted_bytes(worker: WorkerPlan, choice: Choice) -> int | None:
    """Predict what the engines of a process need at once: those that work in a turn, and what the others keep on the device meanwhile."""
    placements: list[tuple[EngineSlot, Placement]] = []
    for slot in worker.engines:
        if slot.kind == "function":
            continue
        placement = next(
            (placement for placement in choice.placements if (placement.engine.role, placement.engine.kind) == (slot.role, slot.kind)), None
        )
        can = rollout_capabilities(slot.engine) if slot.kind == "rollout" else None
        if placement is None or (can is not None and can.self_paced):
            return None
        placements.append((slot, placement))
    turns = {slot.takes_turn: None for slot, _ in placements}
    return max((sum(_bytes(slot, placement, turn, worker.device) for slot, placement in placements) for turn in turns), default=None)


def _bytes(slot: EngineSlot, placement: Placement, turn: str, device: str) -> int:
    """Return the memory of an engine in one process during a turn: on one GPU, or on all cores of a CPU."""
    need = placement.footprint
    if device.startswith("cpu"):
        works = need.device_bytes + need.host
        return (works if slot.takes_turn == turn else need.kept_bytes) * placement.layout.tp * placement.layout.pp
    if slot.takes_turn == turn:
        return need.device_bytes
    return 0 if placement.is_swapped else need.kept_bytes


# ---- the analysis of a run

OVERHEAD = "nobody's work"


@final
class PathShare(msgspec.Struct):
    """The share of a call in the critical path."""

    label: str
    line: str
    seconds: float
    share: float
    """Share of the step."""


@final
class StepAnalysis(msgspec.Struct):
    """The analysis of one step. Device seconds are summed over all devices."""

    step: int
    start: int
    """Microseconds since the run's first span."""
    makespan_s: float
    bounds_s: dict[str, float]
    efficiency: float | None
    """The highest bound by the makespan without evaluations, at most 1; None where there is no bound."""
    idle_s: dict[str, float]
    busy_s: float
    evaluation_s: float
    """Seconds of the step in which an evaluation was worked on, and nothing else."""
    path: list[PathShare]
    tokens: int
    """Generated by samples that stopped running in the step."""
    staleness: dict[str, int]
    """Versions behind -> number of samples that a first update of the step trained on."""


@final
class DeviceAnalysis(msgspec.Struct):
    """The use of one device from the first step on, without the time that only writes the final checkpoint."""

    name: str
    kinds: str
    num_devices: int
    """The devices of a pool; the seconds are those of each of them."""
    busy_s: float
    idle_s: dict[str, float]


@final
class StageAnalysis(msgspec.Struct):
    """Measured and predicted time of a stage of a step: a call, several calls that the plan predicts together, or machinery."""

    label: str
    line: str
    """`flows/grpo.py:23`; the lines of several calls, separated by commas."""
    seconds: float
    """Seconds on the critical path, mean over the steps in which the stage is on it."""
    predicted_s: float | None
    """None where the plan predicts nothing for it."""


@final
class ClassShown(msgspec.Struct):
    """Mean length and reward of one class of samples (`m2flow.micro.records.accounting`)."""

    name: str
    num: int
    length: float | None
    reward: float | None


@final
class Analysis(msgspec.Struct):
    """The analysis of a run."""

    steps: list[StepAnalysis]
    devices: list[DeviceAnalysis]
    stages: list[StageAnalysis]
    path: list[PathShare]
    """The shares of the critical path over all steps."""
    makespan_s: float
    setup_s: float
    """Seconds before the first step: loading, and what the flow does before its loop."""
    setup: list[PathShare]
    """What was worked on then."""
    evaluation_s: float
    """Seconds of all steps in which an evaluation was worked on, and nothing else."""
    step_s: float | None
    """Mean seconds of a step without evaluations, of all but the first, in which memory is allocated and code loaded; None: no step."""
    verdict: Verdict
    efficiency: float | None
    decode: str
    """The fit that the decode bounds come from, in words."""
    length_bias: list[ClassShown]
    trained_tokens: int
    """Generated tokens of samples that some update trained on; each sample counts once."""
    other_tokens: dict[str, int]
    """Generated tokens of all other samples, by how they ended; `unused` includes evaluations."""
    shared_in_training: float | None
    """Share of the tokens in training, prompts included, that were not computed again, since samples begin alike; None: not known."""
    moved: dict[str, int]
    """How often samples went on elsewhere than where an engine's prefix cache has their context, by cause."""
    predicted_step_s: float | None
    """By the plan's search, or by the forecast of a plan made by rule."""
    prediction_note: str
    """Why there is no prediction, or what it leaves out."""
    memory: list[WorkerMemory]
    """The peak memory of each worker."""


class _SimulatedStep(msgspec.Struct):
    lower_bounds_s: dict[str, float]


class _Simulated(msgspec.Struct):
    steps: list[_SimulatedStep]


_read_simulated = msgspec.json.Decoder(_Simulated).decode


def analysis_of(trace: RunTrace, devices: Sequence[IdleTime]) -> Analysis:
    """Analyse a run as far as it has come."""
    decode = measured_decode(trace)
    simulated = _simulated_bounds(trace)
    paths = CriticalPath(trace, [one.device for one in devices]) if trace.columns.num_spans else None
    evaluations = evaluations_of(trace)
    first = trace.steps[0].start if trace.steps else trace.start
    behind = _staleness(trace)
    steps = []
    for at, step in enumerate(trace.steps):
        known = [one.device for one in devices]
        bounds = simulated[at] if at < len(simulated) else step_bounds(trace, step, known, None if simulated else decode)
        steps.append(_step(trace, step, devices, bounds, paths, behind.get(step.step, {}), _overlap(evaluations, step.start, step.end)))
    evaluation_s = sum(step.evaluation_s for step in steps)
    own_s = [step.makespan_s - step.evaluation_s for step in steps]
    whole_s = sum(step.makespan_s for step in steps)
    bound_s = sum(max(step.bounds_s.values(), default=0.0) for step in steps)
    path = _summed_by_call([share for step in steps for share in step.path], whole_s)
    trained, others = _tokens(trace)
    choice = trace.predicted
    return Analysis(
        steps=steps,
        devices=[
            DeviceAnalysis(
                one.device.name,
                " and ".join(one.device.kinds),
                one.device.num_devices,
                one.busy_seconds(first, trace.worked_until),
                one.seconds(first, trace.worked_until),
            )
            for one in devices
        ],
        stages=_stages(choice, steps, path),
        path=path,
        makespan_s=whole_s,
        setup_s=trace.seconds(trace.start, first),
        setup=_setup(trace, first),
        evaluation_s=evaluation_s,
        step_s=statistics.fmean(own_s[1:] or own_s) if own_s else None,
        verdict=verdict_of(trace, steps, paths, decode),
        efficiency=min(bound_s / (whole_s - evaluation_s), 1.0) if whole_s > evaluation_s and bound_s else None,
        decode=_decode_text(decode) if not simulated else "the costs of the simulation",
        length_bias=_length_bias(trace),
        trained_tokens=trained,
        other_tokens=others,
        shared_in_training=_shared_in_training(trace),
        moved=_moved(trace),
        predicted_step_s=choice.predicted_step_s if choice else None,
        prediction_note=_note(trace),
        memory=memory_of(trace),
    )


def _step(
    trace: RunTrace,
    step: Step,
    devices: Sequence[IdleTime],
    bounds: dict[str, float],
    paths: CriticalPath | None,
    staleness: dict[int, int],
    evaluation_s: float,
) -> StepAnalysis:
    makespan_s = trace.seconds(step.start, step.end)
    idle: dict[str, float] = {}
    for one in devices:
        for cause, seconds in one.seconds(step.start, step.end).items():
            idle[cause] = idle.get(cause, 0.0) + seconds * one.device.num_devices
    links = paths.of(step) if paths else []
    by_kind: dict[int, float] = {}
    for link in links:
        by_kind[link.kind] = by_kind.get(link.kind, 0.0) + (link.end - link.start) / 1e9
    shares = [
        PathShare(trace.kinds[kind].label, trace.kinds[kind].line, seconds, seconds / makespan_s) for kind, seconds in by_kind.items()
    ]
    rest_s = makespan_s - sum(by_kind.values())
    if links and rest_s > 0:
        shares.append(PathShare(OVERHEAD, "", rest_s, rest_s / makespan_s))
    ended = (trace.group == SAMPLE) & (trace.columns["end"] > step.start) & (trace.columns["end"] <= step.end)
    best, own_s = max(bounds.values(), default=0.0), makespan_s - evaluation_s
    return StepAnalysis(
        step=step.step,
        start=(step.start - trace.start) // 1000,
        makespan_s=makespan_s,
        bounds_s=bounds,
        efficiency=min(best / own_s, 1.0) if own_s > 0 and best else None,
        idle_s=dict(sorted(idle.items(), key=lambda item: -item[1])),
        busy_s=sum(one.busy_seconds(step.start, step.end) * one.device.num_devices for one in devices),
        evaluation_s=evaluation_s,
        path=sorted(shares, key=lambda share: -share.seconds),
        tokens=int(np.maximum(trace.columns["num_tokens"][ended], 0).sum()),
        staleness={str(versions): count for versions, count in sorted(staleness.items())},
    )


def _summed_by_call(shares: Sequence[PathShare], whole_s: float) -> list[PathShare]:
    found: dict[tuple[str, str], float] = {}
    for share in shares:
        found[share.label, share.line] = found.get((share.label, share.line), 0.0) + share.seconds
    whole = [PathShare(label, line, seconds, seconds / whole_s if whole_s else 0.0) for (label, line), seconds in found.items()]
    return sorted(whole, key=lambda share: -share.seconds)


def _stages(choice: Choice | None, steps: Sequence[StepAnalysis], path: Sequence[PathShare]) -> list[StageAnalysis]:
    """List the parts of the plan with their measured times, then the stages that the plan does not have."""
    left = [(share.label, share.line) for share in path]
    found: dict[str, tuple[float, list[tuple[str, str]]]] = {}
    for part in choice.parts if choice else ():
        if part.on_critical_path:
            name = "switch" if part.what.startswith("switch ") else part.what
            seconds, keys = found.get(name, (0.0, []))
            calls = part.what.partition(" / ")[0].split(", ")
            keys = keys + [key for key in left if any(_is_of(call, *key, path) for call in calls)]
            left = [key for key in left if key not in keys]
            found[name] = seconds + part.seconds, keys
    stages = []
    for name, (seconds, keys) in found.items():
        lines = [key for key in keys if key[1]]
        label = ", ".join(dict.fromkeys(label for label, _ in lines)) or name
        stages.append(StageAnalysis(label, ", ".join(line for _, line in lines), _mean_s(steps, keys), seconds))
    return [*stages, *(StageAnalysis(label, line, _mean_s(steps, [(label, line)]), None) for label, line in left)]


def _note(trace: RunTrace) -> str:
    if trace.plan and trace.plan.choice:
        return ""
    foreseen = read_forecast(trace.run_dir)
    if foreseen is not None:
        return foreseen.note
    return "nobody asked for a prediction" if trace.plan else "it had no plan"


def _is_of(what: str, label: str, line: str, path: Sequence[PathShare]) -> bool:
    """Test whether a part of a plan describes a stage.

    Parts are `policy.generate@47`, `policy.update` where that is called in one place, `weight sync of policy`, `switch to train`."""
    if not line:
        machinery = {"weight": "weights.", "switch": "switch"}.get(what.partition(" ")[0])
        return machinery is not None and label.startswith(machinery)
    call, _, number = what.partition("#")[0].partition("@")
    if call != label:
        return False
    often = max((share for share in path if share.label == label), key=lambda share: share.seconds)
    return line.rpartition(":")[2] == number if number else line == often.line


def _mean_s(steps: Sequence[StepAnalysis], keys: Sequence[tuple[str, str]]) -> float:
    mine = [sum(share.seconds for share in step.path if (share.label, share.line) in keys) for step in steps]
    there = [seconds for seconds in mine if seconds > 0]
    return sum(there) / len(there) if there else 0.0


def _staleness(trace: RunTrace) -> dict[int, dict[int, int]]:
    """Count trained samples by step and by versions behind; each sample counts once a step."""
    columns = trace.columns
    if SpanName.TRAIN_APPLY not in columns.names.texts or not len(columns.touches):
        return {}
    applies = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.TRAIN_APPLY)) & (columns["version"] >= 0))
    written = dict(zip(columns["call"][applies].tolist(), columns["version"][applies].tolist(), strict=True))
    sample_spans = np.flatnonzero((trace.group == SAMPLE) & (columns["sample"] >= 0))
    drawn_at = dict(zip(columns["sample"][sample_spans].tolist(), columns["version"][sample_spans].tolist(), strict=True))
    trained = columns.touches[trace.group[columns.touches[:, 1]] == TRAIN]
    seen: set[tuple[int, int]] = set()
    found: dict[int, dict[int, int]] = {}
    for sample, span in trained.tolist():
        call, step = int(trace.call[span]), int(trace.step[span])
        if (call, sample) in seen or call not in written or drawn_at.get(sample, -1) < 0:
            continue
        seen.add((call, sample))
        behind = max(written[call] - 1 - drawn_at[sample], 0)
        of_step = found.setdefault(step, {})
        of_step[behind] = of_step.get(behind, 0) + 1
    return found


def _tokens(trace: RunTrace) -> tuple[int, dict[str, int]]:
    if trace.calls.has_ledger:
        with contextlib.suppress(SpecError):
            account = read_token_account(trace.run_dir)
            return account.trained, {**account.wasted, **({"lost": sum(account.lost.values())} if account.lost else {})}
    return 0, {}


def _shared_in_training(trace: RunTrace) -> float | None:
    columns = trace.columns
    if not columns.num_spans or SpanName.TRAIN_ACCUMULATE not in columns.names.texts:
        return None
    passes = columns["name"] == columns.names.texts.index(SpanName.TRAIN_ACCUMULATE)
    num_tokens = int(np.maximum(columns["num_tokens"][passes], 0).sum())
    shared = sum(max(counter.values) for (_, name), counter in columns.counters.items() if name == SHARED_TOKENS and counter.values)
    return shared / num_tokens if num_tokens else None


def _moved(trace: RunTrace) -> dict[str, int]:
    if trace.calls.has_ledger:
        with contextlib.suppress(SpecError), reading_ledger(trace.run_dir, "samples") as db:
            return dict(Counter(cause for _, cause in moves(db)).most_common())
    return {}


def _length_bias(trace: RunTrace) -> list[ClassShown]:
    if not trace.calls.has_ledger:
        return []
    with contextlib.suppress(SpecError):
        return [ClassShown(name, of.num, of.length, of.reward) for name, of in bias_of_run(trace.run_dir).items()]
    return []


def _simulated_bounds(trace: RunTrace) -> list[dict[str, float]]:
    try:
        found = _read_simulated((trace.run_dir / "report.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    return [step.lower_bounds_s for step in found.steps]


def _decode_text(decode: MeasuredDecode | None) -> str:
    if decode is None:
        return "no decode steps were recorded one by one"
    model = decode.model
    return (
        f"{model.t0_s * 1e3:.3g} ms + {model.t1_s * 1e6:.3g} us a sample, at most {model.max_batch} at once: "
        f"fitted to {decode.num_steps:,} decode steps, median error {decode.error:.0%}"
    )


# ---- the verdict

TAIL = 0.1
"""The share of a step's samples that is its tail: those that end last."""
WAITS_BELOW = 0.15
"""Cores that a process uses while it calls a function, below which the function waits: on a busy host one that computes has far less
than a whole core."""
_WORTH_SAYING = 0.1
"""The least share of a step that is named as a cause."""
_PROBES = (SpanName.TRAIN_PROBE, SpanName.ROLLOUT_PROBE)
"""Work of engines that verifies a weight sync."""
_RECENT_STEPS = 50
"""The most steps that the verdict looks at: the newest."""

CAUSES_OF_STEPS = (
    "tail",
    "generation",
    "tool",
    "waiting reward",
    "slow reward",
    "reward",
    "training",
    "sync",
    "switch",
    "program",
    "machinery",
)


@final
class Cause(msgspec.Struct):
    """Something that steps wait for."""

    name: str
    """One of `CAUSES_OF_STEPS`."""
    seconds: float
    """Seconds a step."""
    share: float
    """Share of the steps, without evaluations."""
    says: str
    """What it is, as the end of a sentence that begins with its share of a step."""
    label: str = ""
    line: str = ""


@final
class Verdict(msgspec.Struct):
    """Why steps take what they take."""

    sentence: str
    causes: list[Cause]
    """The largest first; `machinery`, against which there is little to do, counts half."""
    step_s: float
    """Mean seconds of a step without evaluations."""
    num_steps: int


def verdict_of(trace: RunTrace, steps: Sequence[StepAnalysis], paths: CriticalPath | None, decode: MeasuredDecode | None) -> Verdict:
    """Say what the newest steps of a run wait for, without evaluations, and without the first step where there are others: it warms up."""
    recent = trace.steps[1 if len(trace.steps) > 2 else 0 :][-_RECENT_STEPS:] if paths else []
    own_s = sum(step.makespan_s - step.evaluation_s for step in steps[-len(recent) :]) if recent else 0.0
    if paths is None or own_s <= 0:
        return Verdict("No step has been recorded yet.", [], 0.0, 0)
    found: dict[tuple[str, int], float] = {}
    program_s = _program_seconds(trace, recent)
    for step, told in zip(recent, steps[-len(recent) :], strict=True):
        links = paths.of(step)
        tail = _tail_of(trace, step)
        for link in links:
            if not trace.evaluates[link.span]:
                for name, seconds in _named(trace, link, tail):
                    kind = link.kind if name in ("tail", "generation", "reward", "training") else -1
                    found[name, kind] = found.get((name, kind), 0.0) + seconds
        rest_s = trace.seconds(step.start, step.end) - sum(link.end - link.start for link in links) / 1e9
        rest_s -= told.evaluation_s - sum(link.end - link.start for link in links if trace.evaluates[link.span]) / 1e9
        found["machinery", -1] = found.get(("machinery", -1), 0.0) + max(rest_s, 0.0)
    nobodys = found.pop(("machinery", -1), 0.0)
    own = min(sum(program_s.values()), nobodys)
    found |= {("program", -1): own, ("machinery", -1): nobodys - own}
    causes = [_cause(trace, name, kind, seconds, own_s, len(recent), decode, program_s) for (name, kind), seconds in found.items()]
    causes = sorted((one for one in causes if one.share >= _WORTH_SAYING), key=_rank)
    return Verdict(_sentence(causes, own_s / len(recent), steps), causes, own_s / len(recent), len(recent))


def _rank(cause: Cause) -> float:
    return -cause.seconds * (0.5 if cause.name == "machinery" else 1.0)


def _sentence(causes: Sequence[Cause], step_s: float, steps: Sequence[StepAnalysis]) -> str:
    head = f"A step{' without its evaluations' if any(step.evaluation_s > 0 for step in steps) else ''} takes {step_s:,.3g} s"
    bounds = [max(step.bounds_s.values(), default=0.0) for step in steps]
    share = sum(bounds) / max(sum(step.makespan_s - step.evaluation_s for step in steps), 1e-9)
    if not causes:
        return f"{head}, and nothing holds more than {_WORTH_SAYING:.0%} of it."
    if share >= 0.9 and causes[0].name in ("generation", "training"):
        return f"{head}, {min(share, 1.0):.0%} of what it must take on these devices; {causes[0].says} ({causes[0].share:.0%} of it)."
    return f"{head}, and {causes[0].share:.0%} of it is {causes[0].says}."


def _tail_of(trace: RunTrace, step: Step) -> tuple[int, int]:
    """Return when a tenth of the step's samples still ran, and when the last ended, in ns; zeros where there are few."""
    mine = (trace.group == SAMPLE) & ~trace.evaluates & (trace.step == step.step)
    ends = np.sort(trace.columns["end"][mine])
    if len(ends) < 1 / TAIL:
        return 0, 0
    return int(ends[int(np.ceil(len(ends) * (1 - TAIL))) - 1]), int(ends[-1])


def _named(trace: RunTrace, link: Link, tail: tuple[int, int]) -> list[tuple[str, float]]:
    """Return the parts of a link of the critical path by the cause that they count for."""
    group, seconds = int(trace.group[link.span]), (link.end - link.start) / 1e9
    if link.kind == trace.tool_kind:
        return [("tool", seconds)]
    if trace.columns.names.texts[int(trace.columns["name"][link.span])] in _PROBES:
        return [("sync", seconds)]
    if group in (ROLLOUT, SAMPLE):
        late_s = max(min(link.end, tail[1]) - max(link.start, tail[0]), 0) / 1e9
        return [("tail", late_s), ("generation", seconds - late_s)]
    return [({FUNCTION: "reward", TRAIN: "training", SYNC: "sync", SWITCH: "switch"}.get(group, "machinery"), seconds)]


def _cause(
    trace: RunTrace,
    name: str,
    kind: int,
    seconds: float,
    own_s: float,
    num_steps: int,
    decode: MeasuredDecode | None,
    program_s: dict[str, float],
) -> Cause:
    about = trace.kinds[kind] if kind >= 0 else None
    label, line = (about.label, about.line) if about else ("", "")
    where = f"{label} ({line})" if line else label
    if name == "reward":
        cores, hosts = function_cores(trace), _function_hosts(trace)
        what = f"{hosts} process{'es' if hosts > 1 else ''}"
        name = "reward" if cores is None else "waiting reward" if cores < WAITS_BELOW else "slow reward"
        if cores is None:
            said = f"{where}, called in {what}"
        elif name == "waiting reward":
            said = f"{where}, which waits rather than computes: its {what} used {cores:.0%} of a core each while it was called"
        else:
            said = f"{where}, which computes in {what}"
    elif name == "tail":
        said = f"a long tail: the last {TAIL:.0%} of the samples of {where} run alone"
    elif name == "generation":
        most = f", at most {decode.model.max_batch} samples at once in a process" if decode else ""
        said = f"generation by {where}{most}, for which training waits"
    elif name == "tool":
        said = f"waiting for tools and agents{_dominant(tools_of(trace, trace.steps[0].start, trace.end))}"
    elif name == "training":
        said = f"training by {where}"
    elif name == "sync":
        said = "weight sync: new weights are on their way to the rollout engines, and verified there"
    elif name == "switch":
        said = "context switches between rollout and training on the same device"
    elif name == "program":
        before = max(program_s, key=lambda one: program_s[one], default="")
        said = f"the flow's own Python (a dataset, the code between calls), most of it before {before}"
        _, _, line = before.rpartition(" ")
    else:
        said = "nobody's work: messages, Python between two tasks"
    return Cause(name, seconds / num_steps, seconds / own_s, said, label, line)


def _dominant(tools: Sequence[ToolUse]) -> str:
    if not tools:
        return ""
    share = tools[0].seconds / max(sum(one.seconds for one in tools), 1e-9)
    return f": the tool {tools[0].name}, {tools[0].mean_s:.3g} s a call, takes {share:.0%} of the tools' time"


def function_cores(trace: RunTrace) -> float | None:
    """Return the cores that processes of functions used while they called functions; None where that was not recorded.

    The processor time of a process counts up to its last count, and so do its calls.
    """
    used_s = called_s = 0.0
    names = trace.columns.workers.texts
    for at in np.unique(trace.columns["worker"][trace.group == FUNCTION]).tolist():
        counter = trace.columns.counters.get((names[at], "cpu seconds"))
        if counter is None or len(counter.values) < 2:
            continue
        mine = (trace.group == FUNCTION) & (trace.columns["worker"] == at)
        calls = union(trace.columns["start"][mine], trace.columns["end"][mine])
        seconds = _overlap(calls, counter.at_ns[0], counter.at_ns[-1])
        used_s += counter.values[-1] - counter.values[0]
        called_s += seconds
    return used_s / called_s if called_s > 0.2 else None


def _function_hosts(trace: RunTrace) -> int:
    return max(len(np.unique(trace.columns["worker"][trace.group == FUNCTION])), 1)


def _program_seconds(trace: RunTrace, steps: Sequence[Step]) -> dict[str, float]:
    """Return the seconds of the flow's own Python in these steps, by the call that came after them."""
    found = {}
    for (_, name), counter in trace.columns.counters.items():
        what = name.removeprefix("program seconds, ")
        if what != name and counter.values:
            first, last = (max(bisect_right(counter.at_ns, at) - 1, 0) for at in (steps[0].start, steps[-1].end))
            before = counter.values[first] if counter.at_ns[first] <= steps[0].start else 0.0
            found[what] = counter.values[last] - before
    return {what: seconds for what, seconds in found.items() if seconds > 0}


def _overlap(intervals: tuple[IntArray, IntArray], start: int, end: int) -> float:
    """Return the seconds of disjoint intervals between two moments."""
    return float(np.maximum(np.minimum(intervals[1], end) - np.maximum(intervals[0], start), 0).sum() / 1e9)


def _setup(trace: RunTrace, until: int) -> list[PathShare]:
    """Return the seconds in which each kind of work was done before a moment."""
    start, end = trace.columns["start"], trace.columns["end"]
    early = (start < until) & ~np.isin(trace.group, (SAMPLE, WAIT, TURN))
    whole_s, found = (until - trace.start) / 1e9, []
    for at in np.unique(trace.kind[early]).tolist():
        mine = early & (trace.kind == at)
        seconds = _overlap(union(start[mine], end[mine]), trace.start, until)
        found.append(PathShare(trace.kinds[at].label, trace.kinds[at].line, seconds, seconds / whole_s if whole_s else 0.0))
    return sorted(found, key=lambda one: -one.seconds)
