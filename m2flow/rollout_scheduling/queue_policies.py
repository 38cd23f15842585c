"""Scheduling policies that need no lengths: first come, round robin, groups, oldest weights, limits of concurrency.

Source: Orca (OSDI 2022) and vLLM (arXiv 2309.06180, 4.5) serve requests in this order.

Source: Graham 1966, list scheduling; OpenRLHF keeps engines in a heap by their number of requests.

Source: common practice, with no paper; here to be compared with.

Source: the prefix caches of vLLM (arXiv 2309.06180) and SGLang (arXiv 2312.07104), which serve a prompt once where it was computed.

A sample without tokens is the newest there is. Of two calls of a line the earlier one goes first anyhow; this orders one call's samples.

Source: AReaL and slime resume interrupted answers before they begin new ones.

A sample that waits ranks by how many of its group are not done: those of a carried group, or of one whose other members ran elsewhere,
come before those of groups that have not begun.

Source: ROLL Flash and Seer take groups apart and have to put them together again; the rank is ours.

The limit of an instance grows by a tenth of what runs (one at least) with each report below `low`, stays between, falls to nine tenths
of what runs above `high`, and to half above `most`. What runs is let run: a limit keeps new samples out. Where an engine does not say how
full its cache is, there is no limit.

Source: prime-rl's controller of concurrency: grow below 0.6, trim above 0.8, hard above 0.9. It cancels the youngest groups when trimming;
here nothing is cancelled, since the engine itself queues what does not fit.

groups begun and not refused < (target + 1 - behind) B

B is the number of groups that the call is to give, `behind` how many versions the trainer is behind the one that sequential execution
would generate with. With the target at the flow's staleness that is what the flow allows anyhow; below, the share of tokens by older
weights goes down, and devices wait more. By Little's law the mean age at consumption is about (groups under way) / B versions. What a
filter refuses gives its place back at once, or a refill would starve. Members of a group that has begun are always let in.

Source: AReaL (arXiv 2505.24298), capacity = (staleness + version + 1) B - (accepted + running), here in groups and with a target below
the bound.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from m2flow.rollout_scheduling.policy import SchedulingPolicy, Seen


class Queued(SchedulingPolicy):
    """`self._queues[self._queue_of(instance)]` is taken from its end."""

    _queues: list[list[int]]

    def _queue_of(self, instance: int) -> int:
        return instance

    def next_sample(self, instance: int) -> int | None:
        return last_waiting(self._queues[self._queue_of(instance)], self.seen.waiting)

    def added(self, samples: Sequence[int]) -> None:
        """They go to the shortest queue: one that had them may be of an instance that is gone."""
        for sample in samples:
            alive = [k for k in range(len(self._queues)) if k not in self.seen.lost] or [0]
            self._queues[min(alive, key=lambda k: len(self._queues[k]))].insert(0, sample)


def last_waiting(queue: list[int], waiting: OrderedDict[int, None]) -> int | None:
    """The last of a queue that still waits; what does not, and is behind it, is dropped."""
    while queue and queue[-1] not in waiting:
        queue.pop()
    return queue[-1] if queue else None


class FirstCome(SchedulingPolicy):
    """Has no opinion, and so leaves everything to the order in which samples were asked for."""

    name = "first-come-first-served"


class LeastLoaded(SchedulingPolicy):
    name = "least-loaded"

    def next_sample(self, instance: int) -> int | None:
        return next(iter(self.seen.waiting), None)


class RoundRobin(Queued):
    name = "round-robin"

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._queues = [[] for _ in range(seen.num_instances)]
        for sample in reversed(seen.waiting):
            self._queues[self._turn(sample) % seen.num_instances].append(sample)

    def _turn(self, sample: int) -> int:
        return sample


class GroupRoundRobin(RoundRobin):
    name = "group-round-robin"

    def _turn(self, sample: int) -> int:
        return self.seen.groups[sample]


class OldestFirst(SchedulingPolicy):
    name = "oldest-first"

    def rank(self, sample: int) -> float:
        return self.seen.oldest.get(sample, math.inf)


class GroupCompleting(SchedulingPolicy):
    name = "group-completing"

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._left = [sum(sample not in seen.finished for sample in members) for members in seen.members]
        self._reranked: set[int] = set()

    def rank(self, sample: int) -> tuple[float, ...]:
        group = self.seen.groups[sample]
        return self._left[group], group

    def reranked(self) -> Iterable[int]:
        found, self._reranked = self._reranked, set()
        return found

    def ended(self, sample: int, length: int) -> None:
        group = self.seen.groups[sample]
        self._left[group] -= 1
        self._reranked.update(other for other in self.seen.members[group] if other in self.seen.waiting)


_GROWTH = 0.1
_TRIM = 0.9
_CUT = 0.5


class AdaptiveConcurrency(SchedulingPolicy):
    name = "adaptive-concurrency"
    needs_reports = True

    def __init__(self, low: float = 0.6, high: float = 0.8, most: float = 0.9, start: float = 16) -> None:
        self._low, self._high, self._most, self._start = low, high, most, start
        self._limits: dict[int, float] = {}

    def begin(self, seen: Seen) -> None:
        """Limits are kept from one call to the next: the engines are the same."""
        self.seen = seen

    def limit(self, instance: int) -> float:
        """Samples that the instance may have."""
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
            self._limits[instance] = max(1.0, _CUT * running)
        elif share > self._high:
            self._limits[instance] = max(1.0, _TRIM * running)
        elif share < self._low and self.seen.loads[instance] >= self.limit(instance) - 1:
            self._limits[instance] = self.limit(instance) + max(1.0, _GROWTH * running)


class Admission(SchedulingPolicy):
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
