"""Interpret the controller's messages for one worker: which task starts when, what is aborted, and what is answered.

    controller --message--> TaskQueue.read --calls--> Executor: engines and rows
    controller <--answer--- Executor.say <----------- TaskQueue
    TaskQueue.first, rows_needed --> pop: the next task may start

It is a state machine without sockets, threads or clock. The same one drives each kind of worker; they differ in the `Executor`:

    m2flow.micro.worker.worker           engines in a process, or in one thread for `m2flow.testing.world`
    m2flow.simulator.virtual_worker      durations on a virtual clock
    m2flow.testing.scheduler_model       a model that checks what it is told

Order. Tasks start in the order in which they arrived, each when its rows are here, and never overtake each other: the order is the
scheduler's decision, so a publication, the load of its weights and the generation that may use them need no numbers here. A generation
only begins in its turn; its samples then run beside the tasks after it.

End. A task is ended once: by its last samples (`Finished.ends`), by `TaskDone` or by `TaskFailed`. Samples that finish, are preempted or
aborted leave their task one by one, and the task ends when none is left.

Abort. First samples that have finished by now are reported, then, if the call keeps its samples, those with tokens (`Aborted`), and all
others are given up. The call's generations end in the order in which they began, then its waiting tasks in their order, as `TaskDone`.

Preemption. Samples that are not here, of another call or finished are left out: they end, or have ended, as usual. If it waits, so is each
that waits to begin or can't be stopped now, until it can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import stopped_at

Answer = m.Aborted | m.Preempted | m.TaskDone | m.Missing
"""The messages by which a queue answers."""


class Executor(Protocol):
    """The engines and rows of one worker, or a model of them, which a task queue controls."""

    def call(self, ordinal: int) -> Call:
        """Return a call that the worker was told of."""

    def say(self, message: Answer) -> None:
        """Send a message to the controller."""

    def define(self, message: m.Define) -> None:
        """Remember what a call is."""

    def forget(self, call: int) -> None:
        """Drop a call with its rows and the rows of its stopped samples."""

    def connect(self, peers: m.Peers) -> None:
        """Replace the addresses of the other processes."""

    def disconnect(self, lost: m.PeerLost) -> Mapping[int, list[int]]:
        """Drop a lost process's rows except those listed, accept none of it any more, and return those of the listed that are not here."""

    def push(self, call: int, ids: list[int], to: Sequence[str]) -> None:
        """Send rows that are here to other processes."""

    def reassign(self, call: int, drawn: int, ids: list[int]) -> None:
        """Keep rows of the call `drawn` as rows of `call` too."""

    def is_running(self, packed: int, call: int, *, queued: bool = False) -> bool:
        """Whether a sample is generated here for a call and has not finished; with `queued`, an episode that waits for the engine."""

    def preempt(self, call: int, ids: list[int]) -> m.Aborted | None:
        """Stop running samples of a call; keep and return those with tokens, None if there are none."""

    def stop(self, call: int) -> m.Aborted | None:
        """Report the samples of a call that have finished by now and stop the others; keep and return those with tokens."""

    def give_up(self, call: int) -> None:
        """Abort the samples of a call that are left, and drop what it has accumulated."""

    def end(self) -> None:
        """Begin to exit."""


class RowsNeeded(NamedTuple):
    """Rows that must be here before a task starts."""

    call: int
    """Their call, or the key of its stopped samples (`m2flow.micro.protocol.worker_state.stopped_at`)."""
    ids: Sequence[int]
    num_generated: Sequence[int] | None = None
    """Generated tokens that each stopped sample must have, since an older row of it may be here."""


def rows_needed(task: m.Task, call_of: Callable[[int], Call]) -> list[RowsNeeded]:
    """List the rows that must be here before a task starts.

    Args:
        call_of: returns the call of an ordinal.
    """
    if isinstance(task, m.Generate):
        if task.aborted_by >= 0:
            return [RowsNeeded(stopped_at(task.aborted_by), task.ids, task.had)]
        return [RowsNeeded(prompts_of(call_of(task.drawn_by)), task.prompts)]
    if isinstance(task, m.EmbedPrompts):
        return [RowsNeeded(prompts_of(call_of(task.call)), task.prompts)]
    if not isinstance(task, m.RunFunction | m.Accumulate):
        return []
    call, values = call_of(task.call), task.values if isinstance(task, m.RunFunction) else ()
    if isinstance(task, m.RunFunction) and call_semantics.gives(call) == "concat":
        return [RowsNeeded(source, ids) for source, ids in task.parts.items()]
    return [RowsNeeded(ref.call, task.ids) for name, ref in call.inputs if name not in values]


def prompts_of(drawn: Call) -> int:
    """Return the call whose rows are the prompts of a generation."""
    ref = drawn.input("prompts")
    if ref is None:
        raise InternalError(f"{drawn.name} has no input 'prompts'")
    return ref.call


@dataclass
class _Generation:
    """A generate task that has begun."""

    task: m.Generate
    num_left: int
    """Samples that have not finished and were not preempted."""


class FinishedPart(NamedTuple):
    """The finished samples of one task."""

    task: m.Generate
    positions: list[int]
    """Their positions among all samples that finished together."""
    ends: bool
    """Whether they are the task's last."""


@final
class TaskQueue:
    """The messages and tasks of one worker's process."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._heard: deque[m.ToWorker] = deque()
        """Messages that have arrived and are not processed yet."""
        self._waiting: deque[m.Task] = deque()
        self._generations: dict[int, _Generation] = {}
        self._task_of: dict[int, int] = {}
        """Sample that a generate task has here -> the task."""
        self._leaving: dict[int, int] = {}
        """Sample that is to be preempted as soon as it can be -> its call."""

    # ---- messages

    def hear(self, messages: Iterable[m.ToWorker]) -> None:
        """Queue messages that have arrived, in their order."""
        self._heard.extend(messages)

    @property
    def has_heard(self) -> bool:
        """Whether messages wait to be read."""
        return bool(self._heard)

    def read(self) -> None:
        """Process all queued messages in order."""
        while self._heard:
            self._take(self._heard.popleft())
        if self._leaving:
            self._preempt_leaving()

    def read_during_function(self) -> None:
        """Process queued messages while a user's function runs: up to the first that could concern what runs."""
        while self._heard and isinstance(self._heard[0], m.Define | m.Task | m.Forget):
            self._take(self._heard.popleft())

    def read_of_peers(self) -> None:
        """Process what was heard of other processes, before all else, in its order: one of them accepts no rows, perhaps since it is dead.
        A process that is up by now must not be dropped again for an older message."""
        of_peers = [message for message in self._heard if isinstance(message, m.Peers | m.PeerLost)]
        self._heard = deque(message for message in self._heard if not isinstance(message, m.Peers | m.PeerLost))
        for message in of_peers:
            self._take(message)

    def _take(self, message: m.ToWorker) -> None:
        executor = self._executor
        match message:
            case m.Task():
                self._waiting.append(message)
            case m.Define():
                executor.define(message)
            case m.Forget(call=call):
                executor.forget(call)
            case m.Peers():
                executor.connect(message)
            case m.PeerLost(peer=peer):
                executor.say(m.Missing(peer, dict(executor.disconnect(message))))
            case m.Push(call=call, ids=ids, to=to):
                executor.push(call, ids, [to])
            case m.Reassign(call=call, drawn=drawn, ids=ids, forward_to=forward_to):
                executor.reassign(call, drawn, ids)
                executor.push(call, ids, forward_to)
            case m.Preempt(call=call, ids=ids, waits=waits, queued=queued):
                self._leaving.update(dict.fromkeys(ids, call) if waits else {})
                self._preempt(call, ids, queued=queued)
            case m.Abort(call=call, keeps=keeps):
                self._abort(call, keeps=keeps)
            case m.Stop():
                executor.end()

    def _preempt(self, call: int, ids: Sequence[int], *, queued: bool = False) -> None:
        executor = self._executor
        here = [packed for packed in ids if packed in self._task_of and executor.is_running(packed, call, queued=queued)]
        if not (here or queued):
            return
        kept = executor.preempt(call, here) if here else None
        if kept is not None:
            executor.say(kept)
        tasks = [self._task_of.pop(packed) for packed in here]
        executor.say(m.Preempted(call, here, tasks))
        for number in tasks:
            if self._leaves(number, 1):
                executor.say(m.TaskDone(number))

    def _preempt_leaving(self) -> None:
        """Preempt what can be by now of the samples for which that waits. Those that have ended are forgotten."""
        for call in dict.fromkeys(self._leaving.values()):
            self._preempt(call, [packed for packed, of in self._leaving.items() if of == call])
        waiting = {packed for task in self._waiting if isinstance(task, m.Generate) for packed in task.ids}
        self._leaving = {packed: call for packed, call in self._leaving.items() if packed in self._task_of or packed in waiting}

    def _abort(self, call: int, *, keeps: bool) -> None:
        executor = self._executor
        kept = executor.stop(call) if keeps else None
        if kept is not None:
            executor.say(kept)
        executor.give_up(call)
        for number in [number for number, generation in self._generations.items() if generation.task.call == call]:
            for packed in self._generations.pop(number).task.ids:
                self._task_of.pop(packed, None)
            executor.say(m.TaskDone(number))
        aborted = [task for task in self._waiting if task.call == call]
        self._waiting = deque(task for task in self._waiting if task.call != call)
        for task in aborted:
            executor.say(m.TaskDone(task.number))

    def _leaves(self, number: int, count: int) -> bool:
        """Remove samples from their generate task; return whether it ends with them."""
        generation = self._generations[number]
        generation.num_left -= count
        if not generation.num_left:
            del self._generations[number]
        return not generation.num_left

    # ---- tasks

    @property
    def first(self) -> m.Task | None:
        """The next task; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def rows_needed(self) -> list[RowsNeeded]:
        """List the rows without which the next task may not start."""
        return rows_needed(self._waiting[0], self._executor.call) if self._waiting else []

    def pop(self) -> m.Task:
        """Remove and return the next task, which starts now."""
        return self._waiting.popleft()

    def began(self, task: m.Generate) -> None:
        """Record that the samples of a generate task run."""
        self._generations[task.number] = _Generation(task, len(task.ids))
        self._task_of.update(dict.fromkeys(task.ids, task.number))

    def finished(self, ids: Iterable[int]) -> list[FinishedPart]:
        """Remove samples that have finished from their tasks; return them by task, in the order of each task's first."""
        by_task: dict[int, list[int]] = {}
        for position, packed in enumerate(ids):
            by_task.setdefault(self._task_of.pop(packed), []).append(position)
        tasks = {number: self._generations[number].task for number in by_task}
        return [FinishedPart(tasks[number], positions, self._leaves(number, len(positions))) for number, positions in by_task.items()]
