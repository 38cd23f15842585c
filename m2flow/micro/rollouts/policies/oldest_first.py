"""What has tokens of the oldest version first: it is the first that would become too old to be trained on.

A sample without tokens is the newest there is. Of two calls of a line the earlier one goes first anyhow; this orders one call's samples.

Source: AReaL and slime resume interrupted answers before they begin new ones.
"""

from __future__ import annotations

import math

from m2flow.micro.rollouts.policy import Policy


class OldestFirst(Policy):
    name = "oldest-first"

    def rank(self, sample: int) -> float:
        return self.seen.oldest.get(sample, math.inf)
