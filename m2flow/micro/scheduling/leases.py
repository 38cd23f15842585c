"""Leases: which kind of engine has the devices that rollout and training take turns with, and how they change hands.

Workers whose engines lie on the same devices share a lease: one process with both kinds, or at scale many (each rollout instance, and
the trainer). A lease has one owner kind; engines of that kind may work, on all of its workers. It moves as a whole, when nothing runs
on any of them, and in two turns, since the devices can't hold both: workers that only leave go first, and when they have answered,
those to which something comes. Pure: told what was answered, it says whom to tell next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class Lease:
    """The turns of one set of devices. Rollout has the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner = "rollout"
        self.num_tasks = 0
        """Of all its workers."""
        self._kinds: dict[str, frozenset[str]] = {}
        """Worker -> the kinds of engines that it has."""
        self._moving_to = ""
        self._asked: set[str] = set()
        self._asked_next: tuple[str, ...] = ()

    def join(self, worker: str, kinds: frozenset[str]) -> None:
        """A worker has engines on these devices."""
        self._kinds[worker] = kinds

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._kinds)

    @property
    def other(self) -> str:
        """The kind that does not have the devices."""
        return "train" if self.owner == "rollout" else "rollout"

    @property
    def is_idle(self) -> bool:
        return not self.num_tasks

    @property
    def is_moving(self) -> bool:
        return bool(self._moving_to)

    def is_of(self, kind: str) -> bool:
        """Whether engines of this kind may work now."""
        return self.owner == kind and not self._moving_to

    def move(self) -> Sequence[str]:
        """Begin to hand the devices to the other kind; the workers to tell now."""
        assert not self.is_moving
        assert self.is_idle
        self._moving_to = self.other
        coming = tuple(worker for worker, kinds in self._kinds.items() if self._moving_to in kinds)
        leaving = tuple(worker for worker, kinds in self._kinds.items() if self.owner in kinds and worker not in coming)
        first, self._asked_next = (leaving, coming) if leaving else (coming, ())
        self._asked = set(first)
        return first

    @property
    def moving_to(self) -> str:
        """The kind that is about to have the devices; empty if they stay."""
        return self._moving_to

    def is_asked(self, worker: str) -> bool:
        """Whether it has yet to answer that it has switched."""
        return worker in self._asked

    def left(self, worker: str) -> Sequence[str]:
        """A worker is gone; the workers to tell now."""
        self._kinds.pop(worker, None)
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
