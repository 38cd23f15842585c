"""The checkpoints that are due: which trainers have yet to save, and which writes wait for that.

    CheckpointDue -> Save to the trainer of each role, when it holds the role's version at that point of the program -> CheckpointSaved

A checkpoint has each role at one point in program order, though trainers reach it at different times. A role's trainer saves after
the last write before the point and before the next one; nothing else waits. Pure bookkeeping for `train_desk`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro import messages as m


@dataclass(frozen=True)
class Due:
    """A role's part of a checkpoint."""

    step: int
    version: int
    """That it must have."""
    path: str


@final
class Saves:
    """By role, the oldest checkpoint first."""

    def __init__(self) -> None:
        self._due: dict[str, deque[Due]] = {}
        self._running: dict[int, tuple[str, Due]] = {}
        """By task."""

    def add(self, step: int, directory: str, versions: Mapping[str, int]) -> None:
        """These roles are to save these versions."""
        for role, version in versions.items():
            self._due.setdefault(role, deque()).append(Due(step, version, f"{directory}/{role}"))

    def first(self, role: str) -> Due | None:
        """What a role has to save next."""
        due = self._due.get(role)
        return due[0] if due else None

    def holds(self, call: Call) -> bool:
        """Whether a write of weights would replace what has yet to be saved."""
        due = self.first(call.role)
        return due is not None and any(effect.version > due.version for effect in call.writes)

    def begin(self, role: str, number: int) -> m.Save:
        """The task that saves what is next."""
        due = self._due[role].popleft()
        self._running[number] = role, due
        return m.Save(number, -1, role, due.path, seals=True)

    def done(self, number: int) -> tuple[str, Due] | None:
        """The role and the part that a task has saved; None if it was none of these."""
        return self._running.pop(number, None)
