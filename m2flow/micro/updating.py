"""Which micro-batch an update does next, and when a mini-batch is complete.

Membership of a mini-batch goes by identity and is fixed before the first sample is there. Within it, micro-batches are filled with
whole groups: those that have come in, or, where the order of summation must not depend on arrival, the next ones in identity
order, cut by the same rule as `m2flow.micro.packing.cut`. Pure: it is told what is ready and answers what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The samples that an update must have together."""

    key: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Groups to add up next."""

    epoch: int
    minibatch: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MinibatchEnd:
    """Every group of the mini-batch was handed out: step the optimiser."""

    is_last: bool


class UpdateProgress:
    """One update call from its first micro-batch to its last optimiser step."""

    def __init__(self, groups: Sequence[Group], *, minibatch_size: int | None, epochs: int, token_budget: int, by_identity: bool) -> None:
        size = minibatch_size or max(len(groups), 1)
        self._minibatches = [list(groups[i : i + size]) for i in range(0, len(groups), size)]
        self._epochs = epochs
        self._budget = token_budget
        self._by_identity = by_identity
        self._tokens: dict[int, int] = {}
        self._epoch = 0
        self._minibatch = 0
        self._todo = list(self._minibatches[0]) if groups else []
        self._is_failing = False

    @property
    def is_finished(self) -> bool:
        return self._epoch >= self._epochs or not self._minibatches

    def add(self, key: int, num_tokens: int) -> None:
        """A group is complete, with its inputs; it has this many tokens."""
        self._tokens[key] = num_tokens

    def next(self, *, is_idle: bool) -> MicroBatch | MinibatchEnd | None:
        """What to do now; None: wait for more groups. `is_idle` says that the trainer has nothing else to do."""
        if self.is_finished:
            return None
        if self.has_tried_all:
            return None
        if not self._todo:
            is_last = self._epoch == self._epochs - 1 and self._minibatch == len(self._minibatches) - 1
            return MinibatchEnd(is_last)
        chosen = self._choose(is_idle)
        return MicroBatch(self._epoch, self._minibatch, tuple(i for group in chosen for i in group.ids)) if chosen else None

    def fail_at(self, row: int) -> None:
        """A sample of the mini-batch fails: of the groups that were not handed out only those before it are still tried."""
        self._todo = [group for group in self._todo if group.ids[0] < row]
        self._is_failing = True

    @property
    def has_tried_all(self) -> bool:
        """It fails, and no group is left that might do so earlier."""
        return self._is_failing and not self._todo

    def take(self, step: MicroBatch | MinibatchEnd) -> None:
        """What `next` answered is being done."""
        if isinstance(step, MicroBatch):
            taken = set(step.ids)
            self._todo = [group for group in self._todo if group.ids[0] not in taken]
            return
        self._minibatch += 1
        if self._minibatch == len(self._minibatches):
            self._minibatch, self._epoch = 0, self._epoch + 1
        self._todo = [] if self.is_finished else list(self._minibatches[self._minibatch])

    def _choose(self, is_idle: bool) -> list[Group]:
        chosen: list[Group] = []
        filled = 0
        for group in self._todo:
            tokens = self._tokens.get(group.key)
            if tokens is None:
                if self._by_identity:
                    return []
                continue
            if chosen and filled + tokens > self._budget:
                return chosen
            chosen.append(group)
            filled += tokens
        is_rest = len(chosen) == len(self._todo)
        is_worthwhile = is_idle and not self._by_identity and filled * 4 >= self._budget
        return chosen if is_rest or is_worthwhile else []
