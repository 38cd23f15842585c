"""Group after group to instance after instance, so that the members share their prompt's KV cache."""

from __future__ import annotations

from m2flow.micro.rollouts.policies.round_robin import RoundRobin


class GroupRoundRobin(RoundRobin):
    name = "group-round-robin"

    def _turn(self, sample: int) -> int:
        return self.seen.groups[sample]
