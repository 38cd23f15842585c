"""How far Python may be ahead of the work: as many steps as staleness lets run at the same time, and one more, within a budget of memory.

With staleness k the next k steps can generate while a step trains, and the calls of the one after them should be known when it can
start. Samples count at their longest, since nobody knows how long they will be.
"""

from __future__ import annotations

from m2flow.macro.graph import Call
from m2flow.micro.work.performing import num_tokens_of
from m2flow.recipe import Sampling
from m2flow.samples import Batch

_BYTES_PER_TOKEN = 16
"""Of a sample's columns: id, log-probability and version 4 each, two masks, and about 2 of text."""


class RunAhead:
    """Knows the samples of each step, and which step must be over before Python goes on."""

    def __init__(self, staleness: int, budget_bytes: int) -> None:
        self._num_ahead = staleness + 1
        self._budget = budget_bytes if staleness else None
        self._bytes: dict[int, int] = {}
        self._longest: dict[int, dict[int, int]] = {}
        """Step -> call -> tokens of its longest row."""

    def add(self, call: Call) -> None:
        """A call of the program."""
        rows, sampling = call.options.get("rows"), call.options.get("sampling")
        known = self._longest.setdefault(call.step, {})
        if isinstance(rows, Batch):
            known[call.ordinal] = max(num_tokens_of(rows), default=0)
            return
        known[call.ordinal] = max((step.get(ref.call, 0) for _, ref in call.inputs for step in self._longest.values()), default=0)
        if isinstance(sampling, Sampling):
            known[call.ordinal] += sampling.max_new_tokens
            size = call.most_rows * known[call.ordinal] * _BYTES_PER_TOKEN
            self._bytes[call.step] = self._bytes.get(call.step, 0) + size

    def due(self, step: int) -> int:
        """The step that must be over, with all before it, now that `step` is submitted; below 0: none."""
        due = step - self._num_ahead
        while self._budget is not None and due < step and sum(self._bytes.get(s, 0) for s in range(due + 1, step + 1)) > self._budget:
            due += 1
        self._bytes = {s: size for s, size in self._bytes.items() if s > due}
        self._longest = {s: known for s, known in self._longest.items() if s > due or s < 0}
        return due
