"""Schedule by expected length: longest or shortest first, LPT, balanced tokens, probes, and classes of lengths (`Split`).

    Predictor --E[length], scenarios--> order of the samples, share of each instance, or instances for each class of lengths

Each class says in its docstring whether it is a published baseline, or on which real trace it wins. With known lengths `split`
has a regret of at most 0.5% on both real traces (DAPO, video); with what predictors know of them (icc 0.05 and 0.1), the policies
measured in `benchmarks/results/rollout-policies.md` (longest-first, probe) are within 1% of least-loaded there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from m2flow.rollout_scheduling.decode_model import DecodeModel, FloatArray, num_steps
from m2flow.rollout_scheduling.lengths import log_length_icc
from m2flow.rollout_scheduling.policy import SchedulingPolicy, Seen
from m2flow.rollout_scheduling.predictors import Predictor
from m2flow.rollout_scheduling.queue_policies import Queued

_SHARE = 0.05
"""Share of the samples that end between two predictions."""


class Predicted(SchedulingPolicy):
    """Base of policies that use a predictor's expected lengths."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._predictor.begin(seen)
        self._asked_at = 0
        self._expected = self._predictor.expected()
        self._turn = _turns(seen)

    def end(self) -> None:
        self._predictor.end()

    def expected(self) -> tuple[FloatArray, bool]:
        """E[length] of each sample, and whether it was updated: after each twentieth of the samples, and of those left."""
        seen = self.seen
        passed, left = len(seen.finished) - self._asked_at, len(seen.groups) - len(seen.finished)
        if passed <= _SHARE * min(len(seen.groups), 2 * left):
            return self._expected, False
        self._asked_at = len(seen.finished)
        self._expected = self._predictor.expected()
        return self._expected, True

    def waiting_if_new(self) -> Iterable[int]:
        """All waiting samples if expectations were updated; for `reranked`."""
        return self.seen.waiting if self.expected()[1] else ()


def _turns(seen: Seen) -> list[int]:
    """[N], the order among samples of equal expectation: the first member of each group, then the second of each, and so on.

    So each prompt has a finished sample early. Each round begins one group later, or all members of a group would share an instance.
    """
    turns = [0] * len(seen.groups)
    num_groups = len(seen.members)
    for group, members in enumerate(seen.members):
        for index, sample in enumerate(members):
            turns[sample] = index * num_groups + (group + index) % num_groups
    return turns


class LongestFirst(Predicted):
    """Rank by expected length, the longest first; updated as samples end.

    Published baseline: Graham 1969, for machines whose speed does not depend on their load; RhymeRL and Seer (arXiv 2511.14617) for
    rollouts.
    """

    name = "longest-first"

    def rank(self, sample: int) -> tuple[float, ...]:
        return -round(float(self._expected[sample]), 6), self._turn[sample]

    def reranked(self) -> Iterable[int]:
        return self.waiting_if_new()


class ShortestFirst(LongestFirst):
    """Rank by expected length, the shortest first.

    Published baseline: SortedRL trains on short responses first.
    """

    name = "shortest-first"

    def rank(self, sample: int) -> tuple[float, ...]:
        longest, turn = super().rank(sample)
        return -longest, turn


class LongestProcessingTime(Predicted, Queued):
    """Give each sample, longest expected first, to the instance with the least work (LPT); fixed from the start.

    Published baseline: Graham 1969. Decode speed depends on the batch, so this is no good aim even with known lengths: every instance gets
    long samples.
    """

    name = "lpt"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._queues = [[] for _ in range(seen.num_instances)]
        work = [(0.0, j) for j in range(seen.num_instances)]
        for sample in np.argsort(-self._expected, kind="stable").tolist():
            if sample in seen.waiting:
                taken, j = heapq.heappop(work)
                self._queues[j].append(sample)
                heapq.heappush(work, (taken + float(self._expected[sample]), j))
        for queue in self._queues:
            queue.reverse()


class Balanced(Predicted):
    """Limit each instance to its share of the expected tokens, and to what its KV cache holds.

        work + E[length] / 2 <= (expected tokens running and waiting) / instances,   prompt + E[length] + cache used <= (1 - headroom) cache

    Instances end up with equal work instead of equal numbers of samples. Where lengths can't be told apart it is an even share by number.
    The instance with the least work is never held back by its share.

    Neither a published baseline nor measured to win on a real trace. Llumnix and Seer (arXiv 2511.14617) place by the load that an engine
    reports; the share in expected tokens is ours.
    """

    name = "balanced"
    needs_reports = True

    def __init__(self, predictor: Predictor, headroom: float = 0.1) -> None:
        super().__init__(predictor)
        self._headroom = headroom

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._work = [0.0] * seen.num_instances
        self._at: dict[int, tuple[int, float]] = {}
        self._all = 0.0
        """Expected tokens of all running and waiting samples."""
        for sample, instance in seen.place.items():
            self._take(sample, instance)
        self.added(list(seen.waiting))

    def added(self, samples: Sequence[int]) -> None:
        for sample in samples:
            self._leave(sample)
            self._all += float(self._expected[sample])

    def allows(self, sample: int, instance: int) -> bool:
        seen, length = self.seen, float(self._expected[sample])
        share = self._all / max(seen.num_alive, 1)
        mine = self._work[instance]
        if mine + length / 2 > share and any(work < mine for j, work in enumerate(self._work) if j not in seen.lost):
            return False
        report = seen.reports.get(instance)
        if report is not None and report.kv_capacity and seen.loads[instance]:
            needs = seen.prompts[seen.groups[sample]] + length
            if report.kv_used + needs > (1 - self._headroom) * report.kv_capacity:
                return False
        return True

    def started(self, sample: int, instance: int) -> None:
        self._all -= float(self._expected[sample])
        self._take(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        self._leave(sample)

    def _take(self, sample: int, instance: int) -> None:
        length = float(self._expected[sample])
        self._at[sample] = (instance, length)
        self._work[instance] += length
        self._all += length

    def _leave(self, sample: int) -> None:
        instance, length = self._at.pop(sample, (0, 0.0))
        self._work[instance] -= length
        self._all -= length


GATE = 0.3
"""The least intraclass correlation of log length that justifies probing, by the lower end of its 95% interval."""


class Probe(SchedulingPolicy):
    """Start one sample of each group first, then groups by the longest sample that has ended.

    A group of which no sample has ended counts as the longest. That pays only if the members of a group are alike, so it starts with the
    second step and only if the correlation measured so far justifies it (`GATE`); otherwise first come, first served.

    Published baseline: Seer (arXiv 2511.14617), context-aware scheduling; the gate is ours. It stays closed on both real traces.
    """

    name = "probe"

    def __init__(self) -> None:
        self._correlation_low = -1.0

    @property
    def is_open(self) -> bool:
        """Whether the measured correlation justifies probing."""
        return self._correlation_low >= GATE

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._probes = {members[0] for members in seen.members if members}
        self._longest = [0] * len(seen.members)
        for sample, length in seen.finished.items():
            self._longest[seen.groups[sample]] = max(self._longest[seen.groups[sample]], length)
        self._reranked: set[int] = set()

    def rank(self, sample: int) -> tuple[float, ...]:
        if not self.is_open:
            return (0.0,)
        return (0.0,) if sample in self._probes else (1.0, -(self._longest[self.seen.groups[sample]] or math.inf))

    def reranked(self) -> Iterable[int]:
        found, self._reranked = self._reranked, set()
        return found

    def ended(self, sample: int, length: int) -> None:
        group = self.seen.groups[sample]
        if length > self._longest[group]:
            self._longest[group] = length
            if self.is_open:
                self._reranked.update(other for other in self.seen.members[group] if other in self.seen.waiting)

    def end(self) -> None:
        finished = self.seen.finished
        groups = [[finished[sample] for sample in members if sample in finished] for members in self.seen.members]
        self._correlation_low = log_length_icc(groups).low


# ---- splitting into classes of lengths

MIN_GAIN = 0.01
"""Relative; a split that gains less is not made."""

_MAX_CLASSES = 8
_NUM_CUTS, _NUM_SHARES = 40, 16
_NUM_TRIED = 4
"""The number of splits, the best by the estimate of Z, whose queues are simulated."""


class Class(NamedTuple):
    """A contiguous range of the samples in the order of falling expectation, and how many instances run it."""

    first: int
    end: int
    num_instances: int


class _Cut(NamedTuple):
    """One class cut in two, and the expected mean makespan."""

    mean_s: float
    which: int
    parts: tuple[Class, Class]


def split(scenarios: FloatArray, model: DecodeModel, num_instances: int) -> list[Class]:
    """Cut the samples into classes with instances of their own, greedily, as long as the mean makespan over the scenarios falls.

    A class of W tokens on m instances, which share its queue, takes about t0 Z + t1 max(W/m, longest); Z are the steps of its queue on
    B m slots. Where lengths can't be told apart there is one class, and the error of single expectations is part of the estimate.

    Args:
        scenarios: [S, N], lengths that may turn out, samples in the order of falling expectation.
    Source:
        StreamRL (arXiv 2504.15930) separates long from short by predicted rank and percentiles; scenarios and recursion are ours.
    """
    classes = [Class(0, scenarios.shape[1], num_instances)]
    times = [_queued_s(scenarios, classes[0], model)]
    while len(classes) < _MAX_CLASSES:
        promising = sorted(_cuts(scenarios, classes, times, model))[:_NUM_TRIED]
        best: tuple[float, _Cut, list[FloatArray]] | None = None
        for option in promising:
            both = [_queued_s(scenarios, part, model) for part in option.parts]
            mean_s = float(np.max([*_without(times, option.which), *both], axis=0).mean())
            if best is None or mean_s < best[0]:
                best = (mean_s, option, both)
        if best is None or best[0] > float(np.max(times, axis=0).mean()) * (1 - MIN_GAIN):
            break
        _, (_, k, parts), both = best
        classes[k : k + 1], times[k : k + 1] = parts, both
    return classes


def _cuts(scenarios: FloatArray, classes: list[Class], times: list[FloatArray], model: DecodeModel) -> list[_Cut]:
    found = []
    for k, parted in enumerate(classes):
        others_s = np.max([*_without(times, k), np.zeros(len(scenarios))], axis=0)
        for cut in _spread(parted.first + 1, parted.end - 1, _NUM_CUTS):
            for share in _spread(1, parted.num_instances - 1, _NUM_SHARES):
                parts = Class(parted.first, cut, share), Class(cut, parted.end, parted.num_instances - share)
                both_s = np.maximum(*(_estimated_s(scenarios, part, model) for part in parts))
                found.append(_Cut(float(np.maximum(others_s, both_s).mean()), k, parts))
    return found


def _estimated_s(scenarios: FloatArray, part: Class, model: DecodeModel) -> FloatArray:
    """Estimate a class's time in each scenario, [S], with Z = max(longest, work before the last B m samples / (B m) + longest of those)."""
    slots = model.max_batch * part.num_instances
    mine = scenarios[:, part.first : part.end]
    before = mine[:, : max(0, mine.shape[1] - slots)]
    last = mine[:, before.shape[1] :].max(axis=1, initial=0.0)
    longest, work = mine.max(axis=1, initial=0.0), mine.sum(axis=1)
    steps = np.maximum(np.maximum(longest, before.sum(axis=1) / slots + last), work / slots)
    return np.asarray(model.t0_s * steps + model.t1_s * np.maximum(work / part.num_instances, longest), np.float64)


def _queued_s(scenarios: FloatArray, part: Class, model: DecodeModel) -> FloatArray:
    """The time of a class in each scenario, [S], with Z from simulating its queue."""
    mine = np.ceil(scenarios[:, part.first : part.end]).astype(np.int64)
    slots = model.max_batch * part.num_instances
    steps = np.array([num_steps(row, slots) for row in mine], np.float64)
    tokens = np.maximum(mine.sum(axis=1) / part.num_instances, mine.max(axis=1, initial=0))
    return np.asarray(model.t0_s * steps + model.t1_s * tokens, np.float64)


def _without(times: list[FloatArray], which: int) -> list[FloatArray]:
    return [time for k, time in enumerate(times) if k != which]


def _spread(low: int, high: int, num: int) -> list[int]:
    """Integers from `low` to `high`, spaced geometrically."""
    if high < low:
        return []
    return sorted({low - 1 + round(float(value)) for value in np.geomspace(1, high - low + 1, num)})


_NUM_SCENARIOS = 16


class Split(Predicted, Queued):
    """Give classes of lengths instances of their own, if that shortens the mean makespan over scenarios (`split`).

    Published baseline: StreamRL (arXiv 2504.15930), with our scenarios and recursion. Wins on real traces only with known lengths
    (`--predictor oracle`): DAPO on four instances 1.002 against 1.157 of least-loaded.
    """

    name = "split"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self.classes = [Class(0, len(seen.groups), seen.num_instances)]
        order = np.arange(len(seen.groups))
        if self._predictor.is_informed:
            order = np.lexsort((np.array(self._turn), -self._expected.round(6)))
            self.classes = split(self._predictor.scenarios(_NUM_SCENARIOS)[:, order], seen.model, seen.num_instances)
        # Samples that do not wait yet belong to a class too; they join its queue when they do (`added`).
        self._queues = [[s for s in order[part.first : part.end].tolist()[::-1] if s in seen.waiting] for part in self.classes]
        self._class_of = [k for k, part in enumerate(self.classes) for _ in range(part.num_instances)]
        self._class_of_sample = {s: k for k, part in enumerate(self.classes) for s in order[part.first : part.end].tolist()}

    def _queue_of(self, instance: int) -> int:
        return self._class_of[instance]

    def added(self, samples: list[int]) -> None:  # type: ignore[override]
        alive = {k for j, k in enumerate(self._class_of) if j not in self.seen.lost} or {0}
        for sample in samples:
            mine = self._class_of_sample[sample]
            self._queues[mine if mine in alive else min(alive)].insert(0, sample)
