"""One queue, first come first served: a slot that is free takes the next sample, on the instance with the fewest first."""

from __future__ import annotations

from m2flow.micro.rollouts.cluster import Policy, Seen


class LeastLoaded(Policy):
    name = "least-loaded"

    def begin(self, seen: Seen) -> None:
        self._seen = seen

    def next_sample(self, instance: int) -> int | None:
        return next(iter(self._seen.waiting), None)
