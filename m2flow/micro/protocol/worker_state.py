"""Workers, their tasks and rows, and the leases by which engines take turns on shared devices: what scheduler and workers both know.

Workers whose engines are co-located on the same devices share a lease: one process with all of them, or at scale many (each rollout
instance, and the trainers). There is a turn for rollout, one for training, and one more for each engine that the devices can't hold
beside the others of its kind. Engines whose turn it is may work, on all workers of the lease.

A lease moves as a whole, when no task is in flight on any of its workers, and in two steps, since the devices can't hold both turns:
workers that only offload switch first, and when they have answered, those that onload something. `Lease` is pure: told what was answered,
it says which workers to tell next.

Early onload (`m2flow.micro.scheduler.leases`): where the plan says that there is room, engines of the next turn may onload while the
owner's last samples still run. From then on nothing more begins, until all has ended and the lease moves: to them, or back.

`RowStore` has the rows of each call on a worker: its own results, and what others sent. Rows that the plan spills
(`m2flow.micro.lowering.routing`) are not in memory but in the worker's segment file, and read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from m2flow.micro.protocol import messages as m
from m2flow.samples import Batch, keyed_bits

# ---- workers, tasks, leases


ROLLOUT = "rollout"


def kind_of(turn: str) -> Literal["rollout", "train"]:
    """Return the kind of engines that work in a turn.

    >>> kind_of("rollout"), kind_of("rollout judge"), kind_of("train"), kind_of("train critic")
    ('rollout', 'rollout', 'train', 'train')
    """
    return "rollout" if turn.partition(" ")[0] == ROLLOUT else "train"


@final
class Lease:
    """The turns of one set of shared devices. Rollout has the first.

    The lease of several workers moves when those that must have answered that they have switched. A worker does its tasks in order, so the
    lease of one alone has moved once it was told to, and what is next on it is sent behind.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner = ROLLOUT
        self.num_tasks = 0
        """Tasks in flight on all its workers."""
        self._turns = {ROLLOUT: None}
        """In the order in which they take turns."""
        self._of_worker: dict[str, tuple[str, ...]] = {}
        """Worker -> turns of its engines."""
        self._known: set[str] = set()
        """Workers that it ever had."""
        self._moving_to = ""
        self._switching: set[str] = set()
        self._switching_next: tuple[str, ...] = ()
        self.early_turn = ""
        """The turn whose engines onload while the owner still works; empty if none does."""
        self._shrinking: set[str] = set()
        self._onloaded_early: set[str] = set()
        """Workers that were told to onload early."""

    def join(self, worker: str, turns: Iterable[str]) -> None:
        """Add a worker with engines on these devices."""
        self._of_worker[worker] = tuple(turns)
        self._known.add(worker)
        self._turns.update(dict.fromkeys(self._of_worker[worker]))

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._of_worker)

    @property
    def next_turns(self) -> Sequence[str]:
        """List the turns that may be next, from the one after the owner's on: none starves. With an early onload the owner's is in too."""
        turns = list(self._turns)
        at = turns.index(self.owner)
        return turns[at + 1 :] + turns[: at + bool(self.early_turn)]

    @property
    def is_idle(self) -> bool:
        return not self.num_tasks

    @property
    def is_moving(self) -> bool:
        return bool(self._moving_to)

    @property
    def turn(self) -> str:
        """The turn whose engines may begin tasks now; empty while the lease moves or engines onload early."""
        return "" if self._moving_to or self.early_turn else self.owner

    def move(self, to: str) -> Sequence[str]:
        """Begin to move to another turn, and return the workers to tell now."""
        assert not self.is_moving
        assert self.is_idle
        assert to != self.owner or self.early_turn
        self._moving_to = to
        of = self._of_worker
        there, is_ahead = self._onloaded_early, self.early_turn == to
        self.early_turn, self._onloaded_early, self._shrinking = "", set(), set()
        if to == self.owner:
            onloading, offloading = [], [worker for worker in of if worker in there]
        else:
            onloading = [worker for worker in of if to in of[worker] and not (is_ahead and worker in there)]
            leaves = {worker for worker in of if self.owner in of[worker] and to not in of[worker]}
            offloading = [worker for worker in of if worker in leaves or (worker in there and not is_ahead and worker not in onloading)]
        return self._switch(tuple(offloading), tuple(onloading))

    def _switch(self, first: tuple[str, ...], then: tuple[str, ...]) -> Sequence[str]:
        first, self._switching_next = (first, then) if first else (then, ())
        self._switching = set(first)
        if not first or len(self._known) == 1:  # A worker alone begins nothing before it has switched.
            self.owner, self._moving_to = self._moving_to, ""
        return first

    def onload_early(self, to: str) -> Sequence[str]:
        """Begin an early onload of another turn, and return the workers that must shrink their KV caches first."""
        assert not self.is_moving
        assert not self.early_turn
        self.early_turn = to
        self._shrinking = {worker for worker, turns in self._of_worker.items() if self.owner in turns}
        return tuple(worker for worker in self._of_worker if worker in self._shrinking)

    def shrunk_cache(self, worker: str) -> Sequence[str]:
        """Record that a worker has shrunk its KV cache, and return the workers to tell to onload."""
        if worker not in self._shrinking:
            return ()
        self._shrinking.discard(worker)
        if self._shrinking:
            return ()
        onloading = tuple(name for name, turns in self._of_worker.items() if self.early_turn in turns and self.owner not in turns)
        self._onloaded_early = set(onloading)
        return onloading

    @property
    def moving_to(self) -> str:
        """The turn to which the lease is moving; empty if it is not."""
        return self._moving_to

    def is_switching(self, worker: str) -> bool:
        """Whether a worker has yet to answer that it has switched."""
        return worker in self._switching

    def worker_lost(self, worker: str) -> Sequence[str]:
        """Remove a lost worker, and return the workers to tell now. An early onload that still waits for room is dropped."""
        self._shrinking.clear()
        self._onloaded_early.discard(worker)
        self._of_worker.pop(worker, None)
        self._switching_next = tuple(name for name in self._switching_next if name != worker)
        return self.switched(worker) if worker in self._switching else ()

    def switched(self, worker: str) -> Sequence[str]:
        """Record that a worker has switched, and return the workers to tell now."""
        self._switching.discard(worker)
        if self._switching:
            return ()
        now, self._switching_next = self._switching_next, ()
        self._switching = set(now)
        if not now and self._moving_to:
            self.owner, self._moving_to = self._moving_to, ""
        return now


@dataclass(slots=True)
class TaskState:
    """A task in flight on a worker."""

    worker: str
    engine: str
    message: m.Task
    words: str
    """What the worker does, for the display: the name of a call, or the kind of the task."""
    rows_left: int = 0
    """Samples of a generation that run or wait there."""
    num_judging: int = 0
    """Rows that a function works on."""
    chunk: int = 1
    """Of a generation: how many of its samples an instance holds at once."""
    speakers: set[str] = field(default_factory=set)
    """Other workers whose engines speak in its episodes."""
    preempted: set[int] = field(default_factory=set)
    """Samples that it was preempted of, which continue elsewhere."""

    @property
    def rows(self) -> list[int]:
        """The task's rows without preempted samples."""
        return [row for row in getattr(self.message, "ids", ()) if row not in self.preempted]


@dataclass
class WorkerState:
    """What the scheduler knows of a worker."""

    name: str
    lease: Lease | None
    """The lease of its devices, if they are shared."""
    roles: dict[str, tuple[str, ...]]
    """Kind of engine -> roles whose engine is here."""
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Turn of the lease -> roles whose engine works in it here."""
    keeps_caches: frozenset[str] = frozenset()
    """Roles whose rollout engine here can take new weights under running requests."""
    place: int = 0
    """Its index in the plan: of several workers that could do something, the first does."""
    num_tasks: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "train": 0, "function": 0})
    num_running: int = 0
    """Samples that generate here, of all roles."""
    running_of: dict[int, int] = field(default_factory=dict)
    """How many of a call an instance holds at once -> how many of such calls these are."""
    num_judging: int = 0
    """Rows of its tasks on functions."""
    num_guests: int = 0
    """Tasks of other workers in whose episodes its engines speak."""
    held: dict[str, int] = field(default_factory=dict)
    """Role -> version of the weights in its rollout engine here."""
    doing: dict[str, int] = field(default_factory=dict)
    """Description of a task -> number of such tasks in flight."""
    is_lost: bool = False
    returns: bool = False
    """Whether it is lost and will be restarted."""
    incarnation: int = 0
    """How often it was restarted."""
    states: set[str] = field(default_factory=set)
    """User roles whose state is here."""

    def room_for(self, chunk: int) -> int:
        """Count the samples that may begin here of a call of which an instance holds so many at once. Each that is here takes the share
        that its own call gives it: a plain sample as much as several episodes."""
        return chunk - sum(-(-num * chunk // of) for of, num in self.running_of.items())

    @property
    def is_generating(self) -> bool:
        """Whether its rollout engines have tasks, or speak in episodes of others'."""
        return bool(self.num_tasks["rollout"] or self.num_guests)

    def has_turn(self, role: str) -> bool:
        """Whether a role's rollout engine here may work now, also for other workers' episodes."""
        return self.lease is None or (not self.lease.is_switching(self.name) and role in self.roles_at(self.lease.turn, ROLLOUT))

    def roles_at(self, turn: str | None, kind: str) -> tuple[str, ...]:
        """Return the roles whose engine of a kind may work here in a turn of the lease; all if there is no lease."""
        if turn is None or kind == "function":
            return self.roles[kind]
        return self.turns.get(turn, ()) if turn and kind_of(turn) == kind else ()

    @property
    def tag(self) -> str:
        """The name of its current process, as other workers know it."""
        return tag_of(self.name, self.incarnation)


def tag_of(worker: str, incarnation: int) -> str:
    """Name the process of a worker after so many restarts, so that messages to and from earlier ones are told apart.

    >>> tag_of("rollout-0", 0), tag_of("rollout-0", 2)
    ('rollout-0', 'rollout-0~2')
    """
    return f"{worker}~{incarnation}" if incarnation else worker


def instance_of(packed: int, tags: Sequence[str]) -> str:
    """Choose of the processes with a speaker's engine the one that takes all turns of an episode, so that its context is there."""
    return tags[keyed_bits(packed, "speaker") % len(tags)]


CAUSES_OF_MOVES = ("load", "gone", "devices", "weights")
"""Why samples go on elsewhere than where their context is: others had room, or a scheduling policy says so; its process is gone; it has
given its devices back; it holds weights that the call may not use."""


def worker_of(tag: str) -> str:
    """Return the worker of a process.

    >>> worker_of("rollout-0~2")
    'rollout-0'
    """
    return tag.partition("~")[0]


def rank_tag(tag: str, rank: int) -> str:
    """Name the process of a rank of a worker; that of rank 0 is the worker's own.

    >>> rank_tag("train-0~2", 1)
    'train-0~2#1'
    """
    return f"{tag}#{rank}" if rank else tag


def split_rank(name: str) -> tuple[str, int]:
    """Split the name of a rank's process into tag and rank.

    >>> split_rank("train-0~2#1"), split_rank("train-0")
    (('train-0~2', 1), ('train-0', 0))
    """
    tag, _, rank = name.partition("#")
    return tag, int(rank or 0)


# ---- rows


_MOST_FORGOTTEN = 10_000
"""Most forgotten calls that are remembered: many times more than can have rows in transfer."""


def stopped_at(call: int) -> int:
    """Return the key of the rows of samples that a generation left unfinished; its result goes by its ordinal."""
    return -1 - call


TURNS_ASKED, TURNS_ANSWERED = -(2**62), -(2**62) + 1
"""In place of a call, in parcels that bring no rows of one: turns of episodes that a speaker's worker is asked for, and what came of them
(`m2flow.agents.turn_requests`)."""


class RowStore:
    """Rows by call and identity."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Batch | Callable[[], Batch]]] = {}
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        self._senders: dict[int, list[str]] = {}
        """Call -> sender of each part."""
        self._forgotten: dict[int, None] = {}
        """The latest forgotten calls, in order."""

    def put(self, call: int, batch: Batch, sender: str = "") -> None:
        """Store rows that a peer has sent or that were made here. A row that is here already is replaced.

        Rows of a forgotten call, which a peer may still send, are ignored: nobody would forget them again.
        """
        if call in self._forgotten:
            return
        parts = self._parts.setdefault(call, [])
        places = self._places.setdefault(call, {})
        places.update((packed, (len(parts), row)) for row, packed in enumerate(batch.ids.tolist()))
        parts.append(batch)
        self._senders.setdefault(call, []).append(sender)

    def spill(self, call: int, ids: Sequence[int], read: Callable[[], Batch]) -> None:
        """Store rows that `read` reads from a file, in this order."""
        if call in self._forgotten:
            return
        parts = self._parts.setdefault(call, [])
        self._places.setdefault(call, {}).update((packed, (len(parts), row)) for row, packed in enumerate(ids))
        parts.append(read)
        self._senders.setdefault(call, []).append("")

    def has(self, call: int, ids: Iterable[int]) -> bool:
        places = self._places.get(call, {})
        return all(packed in places for packed in ids)

    def ids(self, call: int) -> list[int]:
        """List the rows of a call that are here, in the order of identity."""
        return sorted(self._places.get(call, {}))

    def has_prefixes(self, call: int, ids: Sequence[int], num_generated: Sequence[int]) -> bool:
        """Whether the rows of stopped samples are here, each with this number of generated tokens."""
        return self.has(call, ids) and all(
            _num_generated(*self._where(call, packed)) == count for packed, count in zip(ids, num_generated, strict=True)
        )

    def _where(self, call: int, packed: int) -> tuple[Batch, int]:
        part, row = self._places[call][packed]
        return _read(self._parts[call][part]), row

    def get(self, call: int, ids: Sequence[int]) -> Batch:
        """Return rows in this order. All must be here."""
        if not len(ids):
            return Batch(np.zeros(0, np.int64))
        parts = self._parts[call]
        where = [self._places[call][packed] for packed in ids]
        used = sorted({part for part, _ in where})
        if len(used) == 1:
            return _read(parts[used[0]]).take([row for _, row in where])
        taken = [[row for p, row in where if p == part] for part in used]
        joined = Batch.concat([_read(parts[part]).take(rows) for part, rows in zip(used, taken, strict=True)])
        order = np.argsort(np.argsort([part for part, _ in where], kind="stable"), kind="stable")
        return joined.take(order)

    def drop_sent_by(self, sender: str, but: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
        """Drop all that a peer has sent except these rows, by call; return those of them that are not here."""
        for call, senders in self._senders.items():
            if sender in senders:
                kept, places = set(but.get(call, ())), self._places[call]
                for packed in [p for p, (part, _) in places.items() if senders[part] == sender and p not in kept]:
                    del places[packed]
        missing = {call: [packed for packed in ids if packed not in self._places.get(call, {})] for call, ids in but.items()}
        return {call: ids for call, ids in missing.items() if ids}

    def forget(self, call: int) -> None:
        self._parts.pop(call, None)
        self._senders.pop(call, None)
        self._places.pop(call, None)
        self._forgotten[call] = None
        if len(self._forgotten) > _MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]


def _read(part: Batch | Callable[[], Batch]) -> Batch:
    return part if isinstance(part, Batch) else part()


def _num_generated(batch: Batch, row: int) -> int:
    return int(batch.ragged("loss_mask").row(row).sum())
