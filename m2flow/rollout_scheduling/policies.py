"""The scheduling policies: which sample goes first, to which instance, and what migrates; found by name and combined.

    by predicted gain   first-come, unless the predictor expects another order to gain, and it did (`Auto`)
    without lengths     queues, orders by weight version, limits of concurrency and of staleness
    by expected length  Predictor --E[length], scenarios--> order of the samples, or instances for each class of lengths (`Split`)
    in the tail         expected remaining lengths, prefill cost --relieving_moves--> moves that let the last instance end earlier
                                                                 --`Gather`--> moves that empty instances for others to use

    rollout: {policy: [oldest-first, longest-first, "adaptive-concurrency:high=0.85"]}       in a cluster spec

A user's policy is a subclass of `m2flow.rollout_scheduling.policy.SchedulingPolicy`; FILE.py:CLASS names it wherever a name is expected.

Each class says in its docstring whether it is a published baseline, or on which real trace it wins; the numbers are in
`benchmarks/results/rollout-policies.md`. Two are kept that are neither: `RoundRobin`, which the routers of inference servers have and
others are compared with; and `Auto`, which schedules nothing itself but chooses among the others, so that a user need not.

Round-robin and least-loaded are within 0.2% of each other on both real traces (DAPO, video). With known lengths `split`
has a regret of at most 0.5% there; with what predictors know of them (icc 0.05 and 0.1), longest-first and probe are within 1% of
least-loaded.
"""

from __future__ import annotations

import heapq
import importlib.util
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError, described, did_you_mean
from m2flow.macro.flow import AsItStands
from m2flow.rollout_scheduling.decode_model import DecodeModel, FloatArray, num_steps
from m2flow.rollout_scheduling.lengths import log_length_icc
from m2flow.rollout_scheduling.policy import Move, SchedulingPolicy, Seen, composed
from m2flow.rollout_scheduling.predictors import NUM_STEPS_KEPT, EarlierSteps, Learned, Oracle, Predictor, PromptBuckets, Siblings

# ---- without expected lengths


class Queued(SchedulingPolicy):
    """Base of policies that keep queues of their own: an instance takes the end of `self._queues[self._queue_of(instance)]`."""

    _queues: list[list[int]]

    def _queue_of(self, instance: int) -> int:
        return instance

    def next_sample(self, instance: int) -> int | None:
        return last_waiting(self._queues[self._queue_of(instance)], self.seen.waiting)

    def added(self, samples: Sequence[int]) -> None:
        """Append to the shortest queue of a living instance, since the instance that had the samples may have failed."""
        for sample in samples:
            alive = [k for k in range(len(self._queues)) if k not in self.seen.lost] or [0]
            self._queues[min(alive, key=lambda k: len(self._queues[k]))].insert(0, sample)


def last_waiting(queue: list[int], waiting: OrderedDict[int, None]) -> int | None:
    """The last sample of a queue that still waits; drops samples behind it that do not."""
    while queue and queue[-1] not in waiting:
        queue.pop()
    return queue[-1] if queue else None


class FirstCome(SchedulingPolicy):
    """Start samples in the order of arrival (the default).

    Published baseline: Orca (OSDI 2022) and vLLM (arXiv 2309.06180, section 4.5) serve requests in this order.
    """

    name = "first-come-first-served"


class LeastLoaded(SchedulingPolicy):
    """Dispatch from one queue, first come first served, to the instance with the fewest samples.

    Published baseline: Graham 1966, list scheduling; OpenRLHF keeps engines in a heap by their number of requests.
    """

    name = "least-loaded"

    def next_sample(self, instance: int) -> int | None:
        return next(iter(self.seen.waiting), None)


class RoundRobin(Queued):
    """Distribute samples over the instances in turn, each to a queue of its instance, fixed from the start.

    No published baseline, and it wins on no real trace. Kept because routers of inference servers have it (`round_robin` of SGLang's
    gateway, of vLLM's router and of its production stack): it is what the gain of another policy is measured from by their users.
    """

    name = "round-robin"

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._queues = [[] for _ in range(seen.num_instances)]
        for sample in reversed(seen.waiting):
            self._queues[self._turn(sample) % seen.num_instances].append(sample)

    def _turn(self, sample: int) -> int:
        return sample


class GroupRoundRobin(RoundRobin):
    """Distribute whole groups over the instances in turn, so that an instance prefills each prompt once.

    Baseline after the prefix caches of vLLM (arXiv 2309.06180) and SGLang (arXiv 2312.07104), which reuse a prompt where it was computed.
    """

    name = "group-round-robin"

    def _turn(self, sample: int) -> int:
        return self.seen.groups[sample]


class OldestFirst(SchedulingPolicy):
    """Rank partial rollouts by the oldest weight version among their tokens; samples without tokens come last.

    The earlier of two calls on the same engine goes first anyway; this orders the samples of one call.

    Published baseline: AReaL (arXiv 2505.24298) and slime resume interrupted responses before they begin new ones.
    """

    name = "oldest-first"

    def rank(self, sample: int) -> float:
        return self.seen.oldest.get(sample, math.inf)


_GROWTH = 0.1
_TRIM = 0.9
_HALVE = 0.5


class AdaptiveConcurrency(SchedulingPolicy):
    """Limit the samples on each instance by how full its KV cache is reported to be.

    With each report the limit grows by a tenth of the running samples (one at least) below `low`, stays between, falls to nine tenths of
    them above `high` and to half above `most`. Running samples are never preempted: a limit only keeps new ones out. An engine that does
    not report its cache has no limit.

    Published baseline: prime-rl's concurrency controller (grow below 0.6, trim above 0.8, hard above 0.9). It cancels the youngest groups
    when trimming; here nothing is cancelled, since the engine itself queues what does not fit.
    """

    name = "adaptive-concurrency"
    needs_reports = True

    def __init__(self, low: float = 0.6, high: float = 0.8, most: float = 0.9, start: float = 16) -> None:
        self._low, self._high, self._most, self._start = low, high, most, start
        self._limits: dict[int, float] = {}

    def begin(self, seen: Seen) -> None:
        """Limits carry over from call to call, since the engines are the same."""
        self.seen = seen

    def limit(self, instance: int) -> float:
        """The most samples that the instance may have."""
        return self._limits.get(instance, self._start)

    def allows(self, sample: int, instance: int) -> bool:
        return not self.seen.has_reports or self.seen.loads[instance] < self.limit(instance)

    def reported(self, instance: int) -> None:
        report = self.seen.reports[instance]
        running = report.num_running + report.num_queued
        share = report.kv_share
        if not report.kv_capacity:
            self._limits[instance] = math.inf
        elif share > self._most:
            self._limits[instance] = max(1.0, _HALVE * running)
        elif share > self._high:
            self._limits[instance] = max(1.0, _TRIM * running)
        elif share < self._low and self.seen.loads[instance] >= self.limit(instance) - 1:
            self._limits[instance] = self.limit(instance) + max(1.0, _GROWTH * running)


class Admission(SchedulingPolicy):
    """Limit the groups that begin before the trainer has caught up, by a target of staleness.

        groups begun and not rejected < (target + 1 - behind) B

    B is the number of groups that the call returns, `behind` how many weight versions the trainer lags behind sequential execution. A
    target equal to the flow's staleness allows what the flow allows anyway; a lower one reduces the share of tokens by older weights, and
    devices idle more. By Little's law the mean age at consumption is about (groups in flight) / B versions. A group that a filter rejects
    frees its place at once, or a refill would starve. Members of a group that has begun are always admitted.

    Published baseline: AReaL (arXiv 2505.24298), capacity = (staleness + version + 1) B - (accepted + running), here in groups and with a
    target below the bound.
    """

    name = "admission"

    def __init__(self, target: float = 0.0) -> None:
        self._target = target

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._begun = {seen.groups[sample] for sample in [*seen.place, *seen.finished, *seen.oldest]}

    def allows(self, sample: int, instance: int) -> bool:
        seen, group = self.seen, self.seen.groups[sample]
        if group in self._begun:
            return True
        return len(self._begun) - seen.num_rejected < (self._target + 1 - seen.behind) * max(seen.num_wanted, 1)

    def started(self, sample: int, instance: int) -> None:
        self._begun.add(self.seen.groups[sample])


# ---- by expected length

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


GATE = 0.3
"""The least intraclass correlation of log length that justifies probing, by the lower end of its 95% interval."""


class ProbeFirst(SchedulingPolicy):
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

    Published baseline: StreamRL (arXiv 2504.15930), with our scenarios and recursion. Without information there is one class, which is
    `least-loaded`. It wins on a real trace: on DAPO with four instances a regret of 1.141 against 1.157 of least-loaded, and 1.002 with
    known lengths (`--predictor oracle`); with 16 instances and on the video trace without them it is within 0.2%. Where prompts repeat
    with similar responses it wins clearly (lognormal, sigma 0.8, icc 0.9, earlier epoch, four instances: 1.166 against 1.360); with
    nothing but siblings of the same step it loses (1.410).
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


# ---- chosen by what is predicted

_NUM_HELD_OUT = 8
"""Scenarios on which plans are compared; those that a plan was made from are not among them."""


class _Way(NamedTuple):
    """A policy that `auto` may choose, as a plan for the samples of a step: the order of the samples, and classes with instances."""

    order: npt.NDArray[np.int64]
    classes: list[Class]

    def seconds(self, lengths: FloatArray, model: DecodeModel) -> FloatArray:
        """Its time with these lengths, [S, N], in each scenario, [S]."""
        return np.asarray(np.max([_queued_s(lengths[:, self.order], part, model) for part in self.classes], axis=0), np.float64)


class Auto(SchedulingPolicy):
    """Choose between first-come, longest-first and split, before each step, by the gain that the predictor expects and that it had.

        gain = 1 - seconds / seconds first come     mean over scenarios that the plan was not made from
                                                    mean over the steps before, with the lengths that they had turned out to have

    Another policy than first-come is taken if both means are at least `MIN_GAIN` and the first exceeds its standard error. In the first
    step nothing is known; where lengths can't be told apart no order gains, and it stays with first-come for good.

    No published baseline: StreamRL (arXiv 2504.15930) and Seer (arXiv 2511.14617) have one policy for every workload. It wins on no real
    trace, since nothing tells the lengths there, and loses on none: it is first-come there (DAPO with four instances: a regret of 1.157;
    nobody who can't tell samples apart can be expected below 1.036). Kept because it has no schedule of its own: it chooses one of three
    that have a source, for users who can't know which fits, and is the default where prompts have a column of difficulty. Where labels or
    earlier epochs tell lengths it takes up to half of the loss away; in three of 29 settings of the study, with an icc of 0.5, it is up to
    2 points behind first-come.
    """

    name = "auto"

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._ways: dict[str, _Way] = {}
        self._gains: dict[str, list[float]] = {}
        """Policy -> its gains in the last steps, by the plan that it had made before each."""
        self._now = composed([FirstCome()])
        self.chosen = FirstCome.name
        """The policy of this step."""
        self.expected_gain = 0.0
        """The share of the time that it is expected to save."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._predictor.begin(seen)
        self.chosen, self.expected_gain, self._ways = FirstCome.name, 0.0, {}
        if self._predictor.is_informed and not seen.finished and not seen.place:
            self._choose(seen)
        made = {LongestFirst.name: LongestFirst, Split.name: Split}
        self._now = composed([made[self.chosen](self._predictor) if self.chosen in made else FirstCome()])
        self._now.begin(seen)

    def _choose(self, seen: Seen) -> None:
        every, num = self._predictor.scenarios(_NUM_SCENARIOS + _NUM_HELD_OUT), len(seen.groups)
        held_out = every[-_NUM_HELD_OUT:]
        order = np.lexsort((np.array(_turns(seen)), -self._predictor.expected().round(6)))
        one, made_from = [Class(0, num, seen.num_instances)], every[:_NUM_SCENARIOS][:, order]
        self._ways = {
            FirstCome.name: _Way(np.arange(num), one),
            LongestFirst.name: _Way(order, one),
            Split.name: _Way(order, split(made_from, seen.model, seen.num_instances)),
        }
        seconds = {name: way.seconds(held_out, seen.model) for name, way in self._ways.items()}
        for name, mine in seconds.items():
            gains, had = 1 - mine / seconds[FirstCome.name], self._gains.get(name, [])
            least = min(float(gains.mean()), float(np.mean(had)) if had else np.inf)
            is_clear = float(gains.mean()) > float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else True
            if least >= MIN_GAIN and is_clear and least > self.expected_gain:
                self.chosen, self.expected_gain = name, least

    def added(self, samples: Sequence[int]) -> None:
        self._now.added(samples)

    def next_sample(self, instance: int) -> int | None:
        return self._now.next_sample(instance)

    def started(self, sample: int, instance: int) -> None:
        self._now.started(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        self._now.ended(sample, length)

    def end(self) -> None:
        seen = self.seen
        if self._ways and len(seen.finished) == len(seen.groups):
            lengths = np.array([[seen.finished[sample] for sample in range(len(seen.groups))]], np.float64)
            first_s = float(self._ways[FirstCome.name].seconds(lengths, seen.model)[0])
            for name, way in self._ways.items():
                gain = 1 - float(way.seconds(lengths, seen.model)[0]) / first_s
                self._gains[name] = [*self._gains.get(name, []), gain][-NUM_STEPS_KEPT:]
        self._ways = {}
        self._now.end()
        self._predictor.end()


# ---- migration in the tail
#
# An instance whose samples have expected remaining lengths r_i ends after about t0 max r_i + t1 sum r_i, and the prefills of samples that
# migrate to it. Each move must gain more than the repeated prefill costs. Before the first step has ended, a sample is expected to grow as
# far again as it has.

_TIMES_COST = 2.0
"""The gain that a move must have, as a multiple of its cost: expectations are uncertain, costs are not."""
_MIN_SHARE = 0.01
"""The gain that a move must have besides, as a share of the time left."""
_MOST_MOVES = 8
_TAIL = 0.15
"""Share of the slots in use above which nothing migrates: the repeated prefill would stall more than the move gains."""


def relieving_moves(seen: Seen, expected: FloatArray) -> list[Move]:
    """Move the longest sample of the instance that ends last to where it ends earliest, as long as that gains enough.

    Only in the tail: while samples wait, a free slot is better filled with one of those.

    Args:
        expected: [N], E[length | known so far].
    """
    if seen.waiting or len(seen.place) > _TAIL * seen.num_instances * seen.model.max_batch:
        return []
    model, cost = seen.model, seen.move_cost
    rest: list[dict[int, float]] = [{} for _ in range(seen.num_instances)]
    for sample, j in seen.place.items():
        rest[j][sample] = max(1.0, float(expected[sample]) - seen.tokens_so_far(sample))
    longest = [max(samples.values(), default=0.0) for samples in rest]
    work = [sum(samples.values()) for samples in rest]
    moves: list[Move] = []
    while len(moves) < _MOST_MOVES:
        ends_s = [model.t0_s * head + model.t1_s * tokens for head, tokens in zip(longest, work, strict=True)]
        here = max(range(len(ends_s)), key=ends_s.__getitem__)
        if len(rest[here]) < 2:
            break
        sample = max(rest[here], key=rest[here].__getitem__)
        left = rest[here][sample]
        price_s = cost.fixed_s + cost.token_s * (seen.tokens_so_far(sample) + seen.prompts[seen.groups[sample]])
        open_to = [j for j in range(seen.num_instances) if j != here and seen.loads[j] < model.max_batch]
        there = min(open_to, key=lambda j: model.t0_s * max(longest[j], left) + model.t1_s * (work[j] + left), default=None)
        if there is None:
            break
        then_s = model.t0_s * max(longest[there], left) + model.t1_s * (work[there] + left) + price_s
        if then_s + _TIMES_COST * price_s + _MIN_SHARE * ends_s[here] > ends_s[here]:
            break
        moves.append(Move(sample, there))
        del rest[here][sample]
        rest[there][sample] = left
        for j in (here, there):
            longest[j], work[j] = max(rest[j].values(), default=0.0), sum(rest[j].values())
    return moves


class Repack(Predicted):
    """Migrate samples in the tail to where they end earlier, if the gain exceeds twice the cost of the move.

    Published baseline: Laminar's repack (EuroSys 2026) and RLHFuse's tail migration (arXiv 2409.13221), with another aim: the makespan,
    not the release of instances. It wins on no real trace (DAPO and video: within 0.1% of least-loaded).
    """

    name = "repack"
    needs_reports = True

    def moves(self) -> Sequence[Move]:
        if self.seen.waiting:
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * self.seen.tokens_so_far(i) if i in self.seen.place else 0.0 for i in range(len(expected))])
        return relieving_moves(self.seen, expected)


_FULL = 0.9
"""The share of a KV cache above which nothing migrates to the engine."""


class Gather(Predicted):
    """Migrate the tail to few instances, to free the others, if the end is at most `slack` later.

        instances by expected end, latest + slack --> the emptiest gives all of its samples away or keeps them all; then the next

    All delays of a call together may be a twentieth of the time left (`slack`). They buy free instances, which take new weights or lend
    their devices to co-located engines while the tail still runs. Without staleness and without shared devices nothing can begin there,
    and this only costs; use `repack` for an earlier end. It does not dispatch.

    Published baseline: RLHFuse (arXiv 2409.13221) moves the long tail to few instances and begins the next stage on the others; Laminar
    (EuroSys 2026) repacks by how full KV caches are. The limit by expected ends is ours. It lengthens the makespan by 5 to 6%.
    """

    name = "gather"
    needs_reports = True

    def __init__(self, predictor: Predictor, slack: float = 0.05) -> None:
        super().__init__(predictor)
        self._slack = slack

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._migrating: dict[int, int] = {}
        """Migrating sample -> its target, until it arrives."""
        self._spent = 0.0
        """The part of the slack already used."""

    def moves(self) -> Sequence[Move]:
        seen = self.seen
        self._migrating = {
            sample: to for sample, to in self._migrating.items() if sample not in seen.finished and seen.place.get(sample) != to
        }
        if seen.waiting or self._migrating:  # One round at a time: a migrating sample is on no instance yet.
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * seen.tokens_so_far(i) if i in seen.place else 0.0 for i in range(len(expected))])
        moves, later = _gathered(seen, expected, self._slack - self._spent)
        self._spent += later
        self._migrating = {move.sample: move.to for move in moves}
        return moves


@final
class _Instance:
    """An instance with its samples, including planned moves."""

    def __init__(self, seen: Seen, number: int, rest: dict[int, float]) -> None:
        self.number = number
        self.rest = rest
        """Sample -> its expected remaining tokens."""
        self.stalled_s = 0.0
        report = seen.reports.get(number)
        has_limit = report is not None and report.kv_capacity > 0
        self.kv_left = _FULL * report.kv_capacity - report.kv_used - sum(rest.values()) if has_limit and report is not None else np.inf

    def end_s(self, seen: Seen, more: float = 0.0) -> float:
        """Seconds until all of its samples, and one more of `more` tokens, have ended."""
        longest = max(more, max(self.rest.values(), default=0.0))
        return seen.model.t0_s * longest + seen.model.t1_s * (sum(self.rest.values()) + more) + self.stalled_s


def _gathered(seen: Seen, expected: FloatArray, slack: float) -> tuple[list[Move], float]:
    """Plan the moves that empty as many instances as possible; also returns the expected delay as a share of the time left.

    Args:
        expected: [N], E[length | known so far].
    """
    samples: list[dict[int, float]] = [{} for _ in range(seen.num_instances)]
    for sample, number in seen.place.items():
        samples[number][sample] = max(1.0, float(expected[sample]) - seen.tokens_so_far(sample))
    busy = [_Instance(seen, number, rest) for number, rest in enumerate(samples) if rest and number not in seen.lost]
    if len(busy) < 2:
        return [], 0.0
    before_s = max(instance.end_s(seen) for instance in busy)
    found: list[Move] = []
    for giver in sorted(busy, key=lambda instance: instance.end_s(seen)):
        others = [instance for instance in busy if instance is not giver]
        moves = _given_away(seen, giver, others, (1.0 + slack) * before_s)
        if not moves:
            break
        found += moves
        busy = others
    return found, max(0.0, max(instance.end_s(seen) for instance in busy) / before_s - 1.0)


def _given_away(seen: Seen, giver: _Instance, others: list[_Instance], latest_s: float) -> list[Move]:
    """Plan moves of all of the giver's samples to others and record them there; none if not all fit."""
    before = [(dict(other.rest), other.stalled_s, other.kv_left) for other in others]
    moves = []
    for sample in sorted(giver.rest, key=giver.rest.__getitem__, reverse=True):
        left = giver.rest[sample]
        prefix = seen.tokens_so_far(sample) + seen.prompts[seen.groups[sample]]
        stall_s, cost_s = seen.move_cost.token_s * prefix, seen.move_cost.fixed_s
        ends = [
            (other.end_s(seen, left) + stall_s, other.number, other)
            for other in others
            if len(other.rest) < seen.model.max_batch
            and other.kv_left >= prefix + left
            and other.end_s(seen, left) + stall_s + cost_s <= latest_s
        ]
        if not ends:
            for other, (rest, stalled_s, kv_left) in zip(others, before, strict=True):
                other.rest, other.stalled_s, other.kv_left = rest, stalled_s, kv_left
            return []
        _, _, to = max(ends, key=lambda end: end[:2])  # The fullest with room, so that the others may be emptied next.
        to.rest[sample] = left
        to.stalled_s += stall_s
        to.kv_left -= prefix + left
        moves.append(Move(sample, to.number))
    return moves


# ---- by name

FIRST_COME = FirstCome.name
"""The default policy."""

POLICIES: Mapping[str, type[SchedulingPolicy]] = {
    of.name: of
    for of in (
        FirstCome,
        RoundRobin,
        GroupRoundRobin,
        LeastLoaded,
        LongestProcessingTime,
        LongestFirst,
        ShortestFirst,
        OldestFirst,
        ProbeFirst,
        AdaptiveConcurrency,
        Admission,
        Repack,
        Gather,
        Split,
        Auto,
    )
}
"""Name -> class."""

_REMOVED = {"adaptive": "split+repack", "balanced": "least-loaded", "group-completing": FIRST_COME}
"""Policies of earlier versions, and what has the same makespans: none of them won on a trace beyond noise, nor was published."""

PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "siblings": Siblings,
    "learned": Learned,
    "earlier-steps": EarlierSteps,
    "prompt-buckets": PromptBuckets,
    "oracle": Oracle,
}
"""Name -> factory."""


def make_predictor(name: str) -> Predictor:
    """Make the predictor of this name.

    Raises:
        SpecError: there is none.
    """
    if name not in PREDICTORS:
        raise SpecError(f"there is no predictor {name!r}", now=did_you_mean(name, PREDICTORS))
    return PREDICTORS[name]()


def make_policy(text: str, predictor: Predictor) -> SchedulingPolicy:
    """Make a policy from its name, with options after a colon (`admission:target=0.5`), or from a user's class, FILE.py:CLASS.

    Raises:
        SpecError: there is none, it has no such option, or the file can't be used.
    """
    name, numbers = _parsed(text)
    made = POLICIES[name] if name in POLICIES else _own(name)
    takes = inspect.signature(made).parameters
    for number in numbers:
        if number not in takes or number == "predictor":
            known = [known for known in takes if known != "predictor"]
            raise SpecError(f"the policy {name} has no {number!r}", now=f"It has {', '.join(known)}." if known else "It takes no numbers.")
    return made(predictor, **numbers) if "predictor" in takes else made(**numbers)  # type: ignore[call-arg]


def make_policies(names: Sequence[str], predictor: str) -> SchedulingPolicy:
    """Make several policies, which share a predictor, and combine them into one.

    Raises:
        SpecError: there is no such policy or predictor, or two of the policies dispatch samples themselves.
    """
    learned = make_predictor(predictor)
    made = [make_policy(name, learned) for name in names]
    own = [policy.name for policy in made if type(policy).next_sample is not SchedulingPolicy.next_sample]
    if len(own) > 1:
        raise SpecError(
            f"the policies {' and '.join(own)} each hand out samples by themselves, so they can't go together",
            now="Take one of them, with policies that rank, hold back or move.",
        )
    return composed(made)


REPORT_EVERY = 32
"""Decode turns between two reports of an engine: a fraction of a second with most models."""


def report_every(names: Sequence[str], predictor: str, num_instances: int, *, turns: int = REPORT_EVERY) -> int:
    """Decode turns between two reports of an engine, of its load or of the episodes that wait for it; 0 if they are not read."""
    if reports_of(names) == "queues":
        return turns if num_instances > 1 else 0
    return turns if make_policies(names, predictor).needs_reports else 0


def reports_of(names: Sequence[str]) -> Literal["loads", "queues"]:
    """What engines report: their load to policies; by default, which episodes wait, so that those may go on where there is room."""
    return "loads" if of_scheduling(names) else "queues"


def of_scheduling(names: Sequence[str]) -> tuple[str, ...]:
    """The policies by these names; none where samples are taken as they come, which the dispatch does without one."""
    return () if tuple(names) in ((), (FIRST_COME,)) else tuple(names)


def _parsed(text: str) -> tuple[str, dict[str, float]]:
    """Split a policy's text into its name and its options."""
    name, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        return text, {}
    numbers = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        try:
            numbers[key.strip()] = float(value)
        except ValueError:
            raise SpecError(f"{text!r}: {part.strip()!r} is no number with a name", now="Example: admission:target=0.5") from None
    return name, numbers


def _own(name: str) -> type[SchedulingPolicy]:
    """Load a user's policy class from FILE.py:CLASS."""
    if name in _REMOVED:
        raise SpecError(f"the policy {name!r} was removed", now=f"Take {_REMOVED[name]}, which is as fast in every study.")
    file, colon, wanted = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        hint = did_you_mean(name, POLICIES, f"There are {', '.join(POLICIES)}; a class of your own is FILE.py:CLASS.")
        raise SpecError(f"there is no policy {name!r}", now=hint)
    spec = importlib.util.spec_from_file_location(f"m2flow_policy_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SpecError(f"can't read {file}", now="Give the file that defines the policy.")
    spec.loader = loader = AsItStands(spec.name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Where dataclasses look up their annotations.
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise SpecError(f"{file} can't be imported: {described(error)}", now="Give the file that defines the policy.") from error
    found = getattr(module, wanted, None)
    if not (isinstance(found, type) and issubclass(found, SchedulingPolicy)):
        raise SpecError(
            f"{wanted} in {file} is not a SchedulingPolicy", now="Give a subclass of m2flow.rollout_scheduling.policy.SchedulingPolicy."
        )
    if not hasattr(found, "name"):
        found.name = wanted
    return found
