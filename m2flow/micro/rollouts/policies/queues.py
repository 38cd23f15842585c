"""A queue for each instance, or for each class of them: what policies share that hand out by themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from m2flow.micro.rollouts.policy import Policy


class Queued(Policy):
    """`self._queues[self._queue_of(instance)]` is taken from its end."""

    _queues: list[list[int]]

    def _queue_of(self, instance: int) -> int:
        return instance

    def next_sample(self, instance: int) -> int | None:
        return last_waiting(self._queues[self._queue_of(instance)], self.seen.waiting)

    def added(self, samples: Sequence[int]) -> None:
        """They go to the shortest queue: one that had them may be of an instance that is gone."""
        for sample in samples:
            alive = [k for k in range(len(self._queues)) if k not in self.seen.lost] or [0]
            self._queues[min(alive, key=lambda k: len(self._queues[k]))].insert(0, sample)


def last_waiting(queue: list[int], waiting: OrderedDict[int, None]) -> int | None:
    """The last of a queue that still waits; what does not, and is behind it, is dropped."""
    while queue and queue[-1] not in waiting:
        queue.pop()
    return queue[-1] if queue else None
