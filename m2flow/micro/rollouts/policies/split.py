"""Classes of samples on instances of their own (`splitting`), the longest expected first in each. Without information: one class."""

from __future__ import annotations

import numpy as np

from m2flow.micro.rollouts.cluster import Seen
from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.splitting import Class, split

_NUM_SCENARIOS = 16


class Split(Predicted):
    name = "split"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self.classes = [Class(0, len(seen.groups), seen.num_instances)]
        order = np.arange(len(seen.groups))
        if self._predictor.is_informed:
            order = np.lexsort((np.array(self._turn), -self._expected.round(6)))
            self.classes = split(self._predictor.scenarios(_NUM_SCENARIOS)[:, order], seen.model, seen.num_instances)
        self._queues = [order[part.first : part.end].tolist()[::-1] for part in self.classes]
        self._class_of = [k for k, part in enumerate(self.classes) for _ in range(part.num_instances)]

    def next_sample(self, instance: int) -> int | None:
        queue = self._queues[self._class_of[instance]]
        return queue.pop() if queue else None
