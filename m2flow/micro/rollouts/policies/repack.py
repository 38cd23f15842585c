"""Once nothing waits, running samples move where that makes the end come earlier. Hands out nothing by itself.

Without earlier steps a sample is expected to grow as far again as it has.

Source: Laminar's repack and RLHFuse's migration of the tail, with another aim: the makespan, not the release of instances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.policy import Move
from m2flow.micro.rollouts.relieving import relieving_moves


class Repack(Predicted):
    name = "repack"
    needs_reports = True

    def moves(self) -> Sequence[Move]:
        if self.seen.waiting:
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * self.seen.tokens_so_far(i) if i in self.seen.place else 0.0 for i in range(len(expected))])
        return relieving_moves(self.seen, expected)
