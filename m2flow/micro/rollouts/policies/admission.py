"""Groups of a later step begin only as far as the trainer has come: less is generated with old weights than the flow allows.

    groups begun and not refused < (target + 1 - behind) B

B is the number of groups that the call is to give, `behind` how many versions the trainer is behind the one that sequential execution
would generate with. With the target at the flow's staleness that is what the flow allows anyhow; below, the share of tokens by older
weights goes down, and devices wait more. By Little's law the mean age at consumption is about (groups under way) / B versions. What a
filter refuses gives its place back at once, or a refill would starve. Members of a group that has begun are always let in.

Source: AReaL (arXiv 2505.24298), capacity = (staleness + version + 1) B - (accepted + running), here in groups and with a target below
the bound.
"""

from __future__ import annotations

from m2flow.micro.rollouts.policy import Policy, Seen


class Admission(Policy):
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
