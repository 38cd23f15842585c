"""Attribute the idle time of each device of a run to causes, by the rule that the simulator uses.

    RunTrace --idle_of--> for each device its idle stretches, each with one cause

Devices that the same workers have count as one; so do engines that take turns under a lease. At any moment one cause holds for all idle
devices of a kind (`m2flow.simulator.simulation`). Three causes are not those of a simulation: `host`, when an engine has samples and does
not decode, because Python works between two of its steps; `setup`, before the first step of the loop (loading, a warm start); and
`evaluation`, while nothing but an evaluation is worked on. The last two are no part of what a step waits for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.simulator.simulation import CAUSES as SIMULATED
from m2flow.simulator.simulation import Doing, causes_of
from m2flow.viewer.run_trace import FUNCTION, OTHER, ROLLOUT, SAMPLE, SWITCH, SYNC, TRAIN, WAIT, RunTrace

IntArray = npt.NDArray[np.int64]

CAUSES = (*SIMULATED, "host", "setup", "evaluation")
APART = ("setup", "evaluation")
"""The causes that steps are not charged with."""
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
        # A gap is cut wherever its cause may change.
        cuts = np.unique(np.concatenate([moments, *own, *switches, *syncs, *trace.stops, owner[0], *evaluations, [first]]))
        at = np.searchsorted(gaps[1], cuts, side="right")
        inside = cuts[(at < len(gaps[0])) & (cuts > gaps[0][np.minimum(at, len(gaps[0]) - 1)])]
        begins = np.sort(np.concatenate([gaps[0][gaps[1] > gaps[0]], inside]))
        stops = np.minimum(gaps[1][np.searchsorted(gaps[1], begins, side="right")], np.append(begins[1:], trace.end))
        begins, stops = begins[begins < until], np.minimum(stops[begins < until], until)
        kind = owner[1][np.searchsorted(owner[0], begins, side="right") - 1]
        cause = causes[kind, np.maximum(np.searchsorted(moments, begins, side="right") - 1, 0)]
        cause = np.where(_covered(begins, own) & (kind == 0), _HOST, cause)
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
