"""As many samples on an instance as its key/value cache bears: more while it is empty, fewer when it fills.

The limit of an instance grows by a tenth of what runs (one at least) with each report below `low`, stays between, falls to nine tenths
of what runs above `high`, and to half above `most`. What runs is let run: a limit keeps new samples out. Where an engine does not say how
full its cache is, there is no limit.

Source: prime-rl's controller of concurrency: grow below 0.6, trim above 0.8, hard above 0.9. It cancels the youngest groups when trimming;
here nothing is cancelled, since the engine itself queues what does not fit.
"""

from __future__ import annotations

import math

from m2flow.micro.rollouts.policy import Policy, Seen

_GROWTH = 0.1
_TRIM = 0.9
_CUT = 0.5


class AdaptiveConcurrency(Policy):
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
