"""What the scheduler knows of a worker and of a task that it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from m2flow.micro import messages as m
from m2flow.micro.scheduling.leases import Lease, kind_of

if TYPE_CHECKING:
    from m2flow.micro.scheduling.tracking import CallState


@dataclass
class TaskState:
    """A task that a worker has."""

    worker: str
    engine: str
    message: m.Task
    rows_left: int = 0
    """Of a generation: samples that run or wait there."""
    yielded: set[int] = field(default_factory=set)
    """Samples that it has given back, to go on elsewhere."""

    @property
    def rows(self) -> list[int]:
        """Samples that it is about, without those that it has given back."""
        return [row for row in getattr(self.message, "ids", ()) if row not in self.yielded]


@dataclass
class WorkerState:
    """A worker, as far as the scheduler cares."""

    name: str
    lease: Lease | None
    """What it shares its device by, if it does."""
    roles: dict[str, tuple[str, ...]]
    """Kind of engine -> roles whose engine is here."""
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Turn of the lease -> roles whose engine works in it here."""
    keeps_caches: frozenset[str] = frozenset()
    """Roles whose rollout engine here can take new weights under running requests."""
    place: int = 0
    """In the plan: of several that could do something, the first does."""
    num_tasks: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "train": 0, "function": 0})
    num_running: int = 0
    """Samples that generate here, of all roles."""
    held: dict[str, int] = field(default_factory=dict)
    """Role -> version of the weights in its rollout engine here."""
    doing: dict[str, int] = field(default_factory=dict)
    """What its tasks are, in words, and how many of them."""
    sated_of: list[CallState] = field(default_factory=list)
    """Generations of which it wants no more rows, as it is now (`m2flow.micro.scheduling.waking`)."""
    is_lost: bool = False
    returns: bool = False
    """It is lost, and will be started again."""
    incarnation: int = 0
    """How often it was started again."""
    states: set[str] = field(default_factory=set)
    """Roles of the user's whose state calls have made here."""

    def roles_at(self, turn: str | None, kind: str) -> tuple[str, ...]:
        """Roles whose engine of a kind may work here in a turn of the lease; without one, all."""
        if turn is None or kind == "function":
            return self.roles[kind]
        return self.turns.get(turn, ()) if turn and kind_of(turn) == kind else ()

    @property
    def tag(self) -> str:
        """The name of its process, as other workers know it."""
        return tag_of(self.name, self.incarnation)


def tag_of(worker: str, incarnation: int) -> str:
    """The name of one of the processes that a worker is in its turn, so that what was meant for or comes from an earlier one is told apart.

    >>> tag_of("rollout-0", 0), tag_of("rollout-0", 2)
    ('rollout-0', 'rollout-0~2')
    """
    return f"{worker}~{incarnation}" if incarnation else worker


def worker_of(tag: str) -> str:
    """Whose process it is.

    >>> worker_of("rollout-0~2")
    'rollout-0'
    """
    return tag.partition("~")[0]


def rank_tag(tag: str, rank: int) -> str:
    """The name of one of the processes that a worker has at the same time; that of rank 0 is the worker's own.

    >>> rank_tag("train-0~2", 1)
    'train-0~2#1'
    """
    return f"{tag}#{rank}" if rank else tag


def split_rank(name: str) -> tuple[str, int]:
    """
    >>> split_rank("train-0~2#1"), split_rank("train-0")
    (('train-0~2', 1), ('train-0', 0))
    """
    tag, _, rank = name.partition("#")
    return tag, int(rank or 0)
