"""One queue, first come first served, whatever other policies rank: the instance with the fewest samples is asked first.

Source: Graham 1966, list scheduling; OpenRLHF keeps engines in a heap by their number of requests.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policy import Policy


class LeastLoaded(Policy):
    name = "least-loaded"

    def next_sample(self, instance: int) -> int | None:
        return next(iter(self.seen.waiting), None)
