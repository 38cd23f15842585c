"""Results of a task that takes long leave before its end: a slow sample does not keep those that came with it.

    unit done --done--> rows, twice a second --leave--> the worker, which reports them; the rest with the task's end

A task that is quick is reported once, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from m2flow.observe.recorder import now_ns
from m2flow.samples import Batch

Leave = Callable[[list[int], Batch], None]
"""Given samples of the task, and the rows that they became: fewer, if the call drops some."""

_EVERY_NS = 500_000_000


@final
class Leaving:
    """Of one task, whose units are samples."""

    def __init__(self, rows_of: Callable[[Batch, Sequence[object]], Batch], samples: Batch, leave: Leave) -> None:
        """
        Args:
            rows_of: the rows of some samples and their results.
            samples: of the task, in the order of identity.
        """
        self._rows_of = rows_of
        self._samples = samples
        self._leave = leave
        self._since_ns = now_ns()
        self._waiting: dict[int, object] = {}
        self._left: set[int] = set()

    @property
    def has_left(self) -> bool:
        """Whether some did."""
        return bool(self._left)

    def done(self, position: int, result: object) -> None:
        """A sample has its result."""
        self._waiting[position] = result
        if now_ns() - self._since_ns >= _EVERY_NS and len(self._waiting) < len(self._samples):
            self._since_ns = now_ns()
            positions = sorted(self._waiting)
            part = self._samples.take(positions)
            self._left.update(positions)
            self._leave(part.ids.tolist(), self._rows_of(part, [self._waiting[p] for p in positions]))
            self._waiting = {}

    def rest(self, results: Sequence[object]) -> Batch:
        """The rows of those that have not left."""
        positions = [position for position in range(len(self._samples)) if position not in self._left]
        return self._rows_of(self._samples.take(positions), [results[p] for p in positions])
