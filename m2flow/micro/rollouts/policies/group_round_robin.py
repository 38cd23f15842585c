"""Group after group to instance after instance, so that the members share their prompt's KV cache."""

from __future__ import annotations

from m2flow.micro.rollouts.cluster import Seen
from m2flow.micro.rollouts.policies.round_robin import RoundRobin


class GroupRoundRobin(RoundRobin):
    name = "group-round-robin"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        for queue in self._queues:
            queue.clear()
        for sample in seen.waiting:
            self._queues[seen.groups[sample] % seen.num_instances].append(sample)
