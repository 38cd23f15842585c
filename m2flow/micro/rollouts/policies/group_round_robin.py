"""Group after group to instance after instance, so that the members share their prompt's KV cache.

Source: the prefix caches of vLLM (arXiv 2309.06180) and SGLang (arXiv 2312.07104), which serve a prompt once where it was computed.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policies.round_robin import RoundRobin


class GroupRoundRobin(RoundRobin):
    name = "group-round-robin"

    def _turn(self, sample: int) -> int:
        return self.seen.groups[sample]
