"""Schedule without predicted lengths: dispatch queues, orders by group or weight version, limits of concurrency and of staleness.

Each class says in its docstring whether it is a published baseline, or on which real trace it wins. In
`benchmarks/results/rollout-policies.md` round-robin and least-loaded are within 0.2% of each other on both real traces (DAPO, video); the
other policies here order or limit for other reasons than the makespan and are not in that table.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from m2flow.rollout_scheduling.policy import SchedulingPolicy, Seen


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

    Baseline by common practice, without a paper; kept for comparison. It wins on no real trace.
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
