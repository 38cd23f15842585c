"""Which micro-batch an update does next, and when a mini-batch is complete.

Membership of a mini-batch goes by identity and is fixed before the first sample is there. Within it, micro-batches are filled with
whole groups: those that have come in, or, where the order of summation must not depend on arrival, the next ones in identity
order, cut by the same rule as `m2flow.micro.lowering.packing.cut`. Pure: it is told what is ready and answers what to do.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from m2flow.macro.graph import Call
from m2flow.micro.plan import Stage
from m2flow.samples import by_group


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
        self._epochs = epochs
        self._budget = token_budget
        self._by_identity = by_identity
        self._tokens: dict[int, int] = {}
        self._epoch = 0
        self._minibatch = 0
        self._is_failing = False
        self.has_begun = False
        """Something of it was handed out."""
        self._lay_out([list(groups[i : i + size]) for i in range(0, len(groups), size)])

    def _lay_out(self, minibatches: list[list[Group]]) -> None:
        """These are the mini-batches, and the first is to be done."""
        self._minibatches = minibatches
        self._place = {group.key: (number, place) for number, part in enumerate(minibatches) for place, group in enumerate(part)}
        self._begin()

    def _begin(self) -> None:
        """Nothing of the mini-batch is handed out."""
        self._todo = [] if self.is_finished else list(self._minibatches[self._minibatch])
        self._come = [group for group in self._todo if group.key in self._tokens]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)

    @property
    def is_finished(self) -> bool:
        return self._epoch >= self._epochs or not self._minibatches

    def add(self, key: int, num_tokens: int) -> None:
        """A group is complete, with its inputs; it has this many tokens."""
        self._tokens[key] = num_tokens
        minibatch, place = self._place.get(key, (-1, 0))
        if minibatch != self._minibatch or self.is_finished:
            return
        group = self._minibatches[minibatch][place]
        if _find(self._todo, group, self._place) is not None:
            bisect.insort(self._come, group, key=lambda group: self._place[group.key])
            self._num_tokens += num_tokens

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
        self._come = [group for group in self._come if group.ids[0] < row]
        self._num_tokens = sum(self._tokens[group.key] for group in self._come)
        self._is_failing = True

    @property
    def has_tried_all(self) -> bool:
        """It fails, and no group is left that might do so earlier."""
        return self._is_failing and not self._todo

    def take(self, step: MicroBatch | MinibatchEnd) -> None:
        """What `next` answered is being done."""
        self.has_begun = True
        if isinstance(step, MicroBatch):
            self._take(step)
            return
        self._minibatch += 1
        if self._minibatch == len(self._minibatches):
            self._minibatch, self._epoch = 0, self._epoch + 1
        self._begin()

    def _take(self, step: MicroBatch) -> None:
        """What is handed out are the first that have come; by identity, the first at all."""
        taken = set(step.ids)
        count = 0
        while count < len(self._come) and self._come[count].ids[0] in taken:
            group = self._come[count]
            place = _find(self._todo, group, self._place)
            assert place is not None
            del self._todo[place]
            self._num_tokens -= self._tokens[group.key]
            count += 1
        del self._come[:count]

    def _choose(self, is_idle: bool) -> list[Group]:
        """Groups up to the budget, the first that have come; fewer only if they are the rest, or the trainer is idle."""
        is_worthwhile = is_idle and not self._by_identity and self._num_tokens * 4 >= self._budget
        if self._num_tokens <= self._budget and len(self._come) < len(self._todo) and not is_worthwhile:
            return []
        chosen: list[Group] = []
        filled = 0
        for group, first in zip(self._come, self._todo, strict=False):
            if self._by_identity and group is not first:
                return []
            tokens = self._tokens[group.key]
            if chosen and filled + tokens > self._budget:
                return chosen
            chosen.append(group)
            filled += tokens
        return chosen if len(chosen) == len(self._todo) or is_worthwhile else []


def _find(groups: Sequence[Group], group: Group, place: Mapping[int, tuple[int, int]]) -> int | None:
    """Where a group is in a list that is in order of place."""
    found = bisect.bisect_left(groups, place[group.key], key=lambda group: place[group.key])
    return found if found < len(groups) and groups[found] is group else None


def progress_of(call: Call, stage: Stage, ids: Iterable[int], *, by_identity: bool, is_ungrouped: bool = False) -> UpdateProgress:
    """That of an update on these samples; ungrouped, each of them is a group."""
    size, epochs = call.options["minibatch_size"], call.options["epochs"]
    assert size is None or isinstance(size, int)
    assert isinstance(epochs, int)
    groups = [Group(key, tuple(rows)) for key, rows in by_group(ids).items()]
    if is_ungrouped:
        most = max((len(group.ids) for group in groups), default=1)
        size = None if size is None else size * most
        groups = [Group(row, (row,)) for group in groups for row in group.ids]
    return UpdateProgress(groups, minibatch_size=size, epochs=epochs, token_budget=stage.token_budget, by_identity=by_identity)
