"""Leases: whose turn it is with devices that several engines share, and how they change hands.

Workers whose engines lie on the same devices share a lease: one process with all of them, or at scale many (each rollout instance, and
the trainers). There is a turn for rollout, one for training, and one more for each engine that the devices can't hold beside the others of
its kind; engines whose turn it is may work, on all workers of the lease. It moves as a whole, when nothing runs on any of them, and in two
steps, since the devices can't hold both: workers that only leave go first, and when they have answered, those to which something
comes. Pure: told what was answered, it says whom to tell next.

Where the plan says that there is room for it (`m2flow.micro.scheduling.ahead`), those to which something comes may come while the owner's
last samples still run. From then on nothing more begins, until all has ended and the lease moves: to them, or back.
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
        self.ahead = ""
        """The turn whose engines come while the owner still works."""
        self._making_room: set[str] = set()
        self._there: set[str] = set()
        """Workers that have been told to come ahead."""

    def join(self, worker: str, turns: Iterable[str]) -> None:
        """A worker has engines on these devices."""
        self._of_worker[worker] = tuple(turns)
        self._turns.update(dict.fromkeys(self._of_worker[worker]))

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._of_worker)

    @property
    def others(self) -> Sequence[str]:
        """The turns that may come next, those after the owner's first: none is passed over for ever. If others came ahead, its own too."""
        turns = list(self._turns)
        at = turns.index(self.owner)
        return turns[at + 1 :] + turns[: at + bool(self.ahead)]

    @property
    def is_idle(self) -> bool:
        return not self.num_tasks

    @property
    def is_moving(self) -> bool:
        return bool(self._moving_to)

    @property
    def turn(self) -> str:
        """Whose engines may begin something now; empty while the devices change hands."""
        return "" if self._moving_to or self.ahead else self.owner

    def move(self, to: str) -> Sequence[str]:
        """Begin to hand the devices to another turn; the workers to tell now."""
        assert not self.is_moving
        assert self.is_idle
        assert to != self.owner or self.ahead
        self._moving_to = to
        of = self._of_worker
        there, is_ahead = self._there, self.ahead == to
        self.ahead, self._there, self._making_room = "", set(), set()
        if to == self.owner:
            coming, leaving = [], [worker for worker in of if worker in there]
        else:
            coming = [worker for worker in of if to in of[worker] and not (is_ahead and worker in there)]
            leaves = {worker for worker in of if self.owner in of[worker] and to not in of[worker]}
            leaving = [worker for worker in of if worker in leaves or (worker in there and not is_ahead and worker not in coming)]
        return self._ask(tuple(leaving), tuple(coming))

    def _ask(self, first: tuple[str, ...], then: tuple[str, ...]) -> Sequence[str]:
        first, self._asked_next = (first, then) if first else (then, ())
        self._asked = set(first)
        if not first:
            self.owner, self._moving_to = self._moving_to, ""
        return first

    def come_ahead(self, to: str) -> Sequence[str]:
        """Begin to have the engines of another turn come while the owner works; the workers to tell first, that they make room."""
        assert not self.is_moving
        assert not self.ahead
        self.ahead = to
        self._making_room = {worker for worker, turns in self._of_worker.items() if self.owner in turns}
        return tuple(worker for worker in self._of_worker if worker in self._making_room)

    def made_room(self, worker: str) -> Sequence[str]:
        """A worker of the owner has; the workers to tell to come."""
        if worker not in self._making_room:
            return ()
        self._making_room.discard(worker)
        if self._making_room:
            return ()
        coming = tuple(name for name, turns in self._of_worker.items() if self.ahead in turns and self.owner not in turns)
        self._there = set(coming)
        return coming

    @property
    def moving_to(self) -> str:
        """The turn that is about to begin; empty if none is."""
        return self._moving_to

    def is_asked(self, worker: str) -> bool:
        """Whether it has yet to answer that it has switched."""
        return worker in self._asked

    def left(self, worker: str) -> Sequence[str]:
        """A worker is gone; the workers to tell now. Nobody comes ahead for whom room was being made."""
        self._making_room.clear()
        self._there.discard(worker)
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
