"""Classes of samples on instances of their own (`splitting`), the longest expected first in each. Without information: one class.

Source: StreamRL (arXiv 2504.15930); see `splitting` for what is ours.
"""

from __future__ import annotations

import numpy as np

from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.policies.queues import Queued
from m2flow.micro.rollouts.policy import Seen
from m2flow.micro.rollouts.splitting import Class, split

_NUM_SCENARIOS = 16


class Split(Predicted, Queued):
    name = "split"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self.classes = [Class(0, len(seen.groups), seen.num_instances)]
        order = np.arange(len(seen.groups))
        if self._predictor.is_informed:
            order = np.lexsort((np.array(self._turn), -self._expected.round(6)))
            self.classes = split(self._predictor.scenarios(_NUM_SCENARIOS)[:, order], seen.model, seen.num_instances)
        # What does not wait yet is not left out of a class: it is passed over until it does (`added`).
        self._queues = [[s for s in order[part.first : part.end].tolist()[::-1] if s in seen.waiting] for part in self.classes]
        self._class_of = [k for k, part in enumerate(self.classes) for _ in range(part.num_instances)]
        self._class_of_sample = {s: k for k, part in enumerate(self.classes) for s in order[part.first : part.end].tolist()}

    def _queue_of(self, instance: int) -> int:
        return self._class_of[instance]

    def added(self, samples: list[int]) -> None:  # type: ignore[override]
        alive = {k for j, k in enumerate(self._class_of) if j not in self.seen.lost} or {0}
        for sample in samples:
            mine = self._class_of_sample[sample]
            self._queues[mine if mine in alive else min(alive)].insert(0, sample)
