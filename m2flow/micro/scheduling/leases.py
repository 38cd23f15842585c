"""Leases: whose turn it is with devices that several engines share, and how they change hands.

Workers whose engines lie on the same devices share a lease: one process with all of them, or at scale many (each rollout instance, and
the trainers). There is a turn for rollout, one for training, and one more for each engine that the devices can't hold beside the others of
its kind; engines whose turn it is may work, on all workers of the lease. It moves as a whole, when nothing runs on any of them, and in two
steps, since the devices can't hold both: workers that only leave go first, and when they have answered, those to which something
comes. Pure: told what was answered, it says whom to tell next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, final

ROLLOUT = "rollout"


def kind_of(turn: str) -> Literal["rollout", "train"]:
    """Which engines work in a turn.

    >>> kind_of("rollout"), kind_of("rollout judge"), kind_of("train"), kind_of("train critic")
    ('rollout', 'rollout', 'train', 'train')
    """
    return "rollout" if turn.partition(" ")[0] == ROLLOUT else "train"


@final
class Lease:
    """The turns of one set of devices. The first is that of all rollout."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner = ROLLOUT
        self.num_tasks = 0
        """Of all its workers."""
        self._turns = {ROLLOUT: None}
        """In the order in which they come round."""
        self._of_worker: dict[str, tuple[str, ...]] = {}
        """Worker -> the turns of its engines."""
        self._moving_to = ""
        self._asked: set[str] = set()
        self._asked_next: tuple[str, ...] = ()

    def join(self, worker: str, turns: Iterable[str]) -> None:
        """A worker has engines on these devices."""
        self._of_worker[worker] = tuple(turns)
        self._turns.update(dict.fromkeys(self._of_worker[worker]))

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._of_worker)

    @property
    def others(self) -> Sequence[str]:
        """The turns that may come next, those after the owner's first: none is passed over for ever."""
        turns = list(self._turns)
        at = turns.index(self.owner)
        return turns[at + 1 :] + turns[:at]

    @property
    def is_idle(self) -> bool:
        return not self.num_tasks

    @property
    def is_moving(self) -> bool:
        return bool(self._moving_to)

    @property
    def turn(self) -> str:
        """Whose engines may work now; empty while the devices change hands."""
        return "" if self._moving_to else self.owner

    def move(self, to: str) -> Sequence[str]:
        """Begin to hand the devices to another turn; the workers to tell now."""
        assert not self.is_moving
        assert self.is_idle
        assert to != self.owner
        self._moving_to = to
        coming = tuple(worker for worker, turns in self._of_worker.items() if to in turns)
        leaving = tuple(worker for worker, turns in self._of_worker.items() if self.owner in turns and worker not in coming)
        first, self._asked_next = (leaving, coming) if leaving else (coming, ())
        self._asked = set(first)
        return first

    @property
    def moving_to(self) -> str:
        """The turn that is about to begin; empty if none is."""
        return self._moving_to

    def is_asked(self, worker: str) -> bool:
        """Whether it has yet to answer that it has switched."""
        return worker in self._asked

    def left(self, worker: str) -> Sequence[str]:
        """A worker is gone; the workers to tell now."""
        self._of_worker.pop(worker, None)
        self._asked_next = tuple(name for name in self._asked_next if name != worker)
        return self.answered(worker) if worker in self._asked else ()

    def answered(self, worker: str) -> Sequence[str]:
        """A worker has switched; the workers to tell now."""
        self._asked.discard(worker)
        if self._asked:
            return ()
        now, self._asked_next = self._asked_next, ()
        self._asked = set(now)
        if not now:
            self.owner, self._moving_to = self._moving_to, ""
        return now
