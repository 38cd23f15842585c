"""Sample after sample to instance after instance, first come first served in each: what most frameworks do."""

from __future__ import annotations

from collections import deque

from m2flow.micro.rollouts.cluster import Policy, Seen


class RoundRobin(Policy):
    name = "round-robin"

    def begin(self, seen: Seen) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(seen.num_instances)]
        for sample in seen.waiting:
            self._queues[sample % seen.num_instances].append(sample)

    def next_sample(self, instance: int) -> int | None:
        return self._queues[instance].popleft() if self._queues[instance] else None
