"""Sample after sample to instance after instance, first come first served in each: what most frameworks do.

Source: common practice, with no paper; here to be compared with.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policies.queues import Queued
from m2flow.micro.rollouts.policy import Seen


class RoundRobin(Queued):
    name = "round-robin"

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._queues = [[] for _ in range(seen.num_instances)]
        for sample in reversed(seen.waiting):
            self._queues[self._turn(sample) % seen.num_instances].append(sample)

    def _turn(self, sample: int) -> int:
        return sample
