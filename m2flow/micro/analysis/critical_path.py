"""What a step waited for: the chain of work that ends with it, each link held up by the one before.

    RunTrace --CriticalPath.of(step)--> Link ... from the step's beginning to its end

From the last work of a step backwards: a task could not begin before its worker was free, nor before its samples were there, nor before
the weights that it needed. Of what held it up, what ended last is the link before it. Time between a link and the next is nobody's work:
a message on its way, Python, or a program that waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from m2flow.micro.analysis.idle import Device
from m2flow.micro.analysis.run_trace import FUNCTION, LIFE, SYNC, TRAIN, WAIT, RunTrace, Step

IntArray = npt.NDArray[np.int64]
_MOST_LINKS = 20_000


@dataclass(frozen=True)
class Link:
    """Work on the path; ns, cut at the step's ends."""

    span: int
    kind: int
    """Position among the trace's kinds."""
    start: int
    end: int


@final
class CriticalPath:
    """Of one trace, as it is now."""

    def __init__(self, trace: RunTrace, devices: Sequence[Device]) -> None:
        columns = trace.columns
        self._trace = trace
        self._start, self._end = columns["start"], columns["end"]
        worker = columns["worker"]
        is_work = ~np.isin(trace.group, (LIFE, WAIT))
        self._by_worker: dict[int, IntArray] = {}
        for at in np.unique(worker).tolist():
            name = columns.workers.texts[at]
            shared = next((device.workers for device in devices if name in device.workers), (name,))
            members = [columns.workers.texts.index(one) for one in shared if one in columns.workers.texts]
            mine = np.flatnonzero(is_work & np.isin(worker, members))
            self._by_worker[at] = mine[np.argsort(self._end[mine], kind="stable")]
        self._work = np.flatnonzero(is_work)
        lives = np.flatnonzero((trace.group == LIFE) & (columns["sample"] >= 0))
        self._lives = lives[np.argsort(columns["sample"][lives], kind="stable")]
        touches = columns.touches
        self._touches = touches[np.argsort(touches[:, 1], kind="stable")]
        judged = touches[trace.group[touches[:, 1]] == FUNCTION] if len(touches) else touches
        self._judged = judged[np.argsort(judged[:, 0], kind="stable")]
        self._syncs = np.flatnonzero(trace.group == SYNC)

    def of(self, step: Step) -> list[Link]:
        """In order of time."""
        mine = self._work[(self._trace.step[self._work] == step.step) & (self._end[self._work] <= step.end)]
        if not len(mine):
            return []
        span = int(mine[np.argmax(self._end[mine])])
        links: list[Link] = []
        until = step.end
        while span >= 0 and len(links) < _MOST_LINKS:
            start, end = max(int(self._start[span]), step.start), min(int(self._end[span]), until)
            if end > start:
                links.append(Link(span, int(self._trace.kind[span]), start, end))
                until = start
            if self._start[span] <= step.start:
                break
            span = self._before(span)
        return links[::-1]

    def _before(self, span: int) -> int:
        """What held a span up; -1: nothing that is known."""
        columns, group, start = self._trace.columns, int(self._trace.group[span]), int(self._start[span])
        found = [self._last_on(int(columns["worker"][span]), start, span)]
        if group in (TRAIN, FUNCTION):
            first, last = np.searchsorted(self._touches[:, 1], (span, span + 1))
            samples = self._touches[first:last, 0]
            if group == TRAIN:
                found += self._latest(self._judged[:, 0], self._judged[:, 1], samples, start)
            found += self._latest(columns["sample"][self._lives], self._lives, samples, start)
        elif group == SYNC and columns["version"][span] >= 0:
            same = self._syncs[columns["version"][self._syncs] == columns["version"][span]]
            found += same.tolist()
        elif group == LIFE:
            same = self._syncs[(columns["worker"][self._syncs] == columns["worker"][span]) & (self._end[self._syncs] <= start)]
            found += same[-1:].tolist()
        # What began no earlier can't have held it up, whatever the clocks say; so the way back ends.
        found = [other for other in found if other >= 0 and self._start[other] < start and self._end[other] <= start + _SLACK_NS]
        return max(found, key=lambda other: int(self._end[other]), default=-1)

    def _last_on(self, worker: int, before: int, span: int) -> int:
        """The last work on the worker's device that had ended."""
        mine = self._by_worker[worker]
        at = int(np.searchsorted(self._end[mine], before, side="right")) - 1
        while at >= 0 and mine[at] == span:
            at -= 1
        return int(mine[at]) if at >= 0 else -1

    def _latest(self, keys: IntArray, values: IntArray, samples: IntArray, before: int) -> list[int]:
        """Of the spans of these samples that had ended, the last."""
        if not len(keys) or not len(samples):
            return []
        first, last = np.searchsorted(keys, samples, side="left"), np.searchsorted(keys, samples, side="right")
        spans = np.concatenate([values[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        spans = spans[self._end[spans] <= before + _SLACK_NS]
        return [int(spans[np.argmax(self._end[spans])])] if len(spans) else []


_SLACK_NS = 500_000
"""By which the clocks of two processes of a busy host may seem to differ: each is read once against the time of day."""
