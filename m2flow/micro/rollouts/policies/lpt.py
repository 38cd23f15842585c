"""Longest processing time: the longest expected first, each to the instance with the least expected work; fixed from the start.

Source: Graham 1969. Decode speed depends on the batch, so this is no good aim even with known lengths: every instance gets long ones.
"""

from __future__ import annotations

import heapq

import numpy as np

from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.policies.queues import Queued
from m2flow.micro.rollouts.policy import Seen


class LongestProcessingTime(Predicted, Queued):
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
