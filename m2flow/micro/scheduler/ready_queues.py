"""Queues between what has changed and what is dispatched: functions to start, tasks in flight, and workers to ask.

`StartQueue`: the calls on functions that may have work, by the set of workers that may run them. Whoever makes work possible says
`may_start`; whoever hands work out asks for the first call that really has some. Asking again costs nothing while that one has more, and
the cost does not grow with the number of calls or workers.

`Tasks`: the tasks in flight, by number, and what each makes its worker count.

`ReadyWorkers`: the workers to ask for something new to do, in the order of the plan. A worker is asked when something of its own has
changed (a row or a task ended, it loaded weights), when a role that it hosts has (a generation may begin or is all handed out, there is a
new version), or when rows came that it may take or that a policy dealt to it. Rows that come one by one are offered to workers that may
want some; a worker that took none, or all that it may have, is saturated with that call, and not asked again until something of its own
changes. So the cost of an event does not grow with the number of workers, calls or rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, final

from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import TaskState, WorkerState, worker_of
from m2flow.micro.scheduler.call_state import CallState


class Ended(NamedTuple):
    """A call that is done without a task, and its result."""

    call_state: CallState
    value: object


Offer = Callable[[], Ended | None]
"""A task that a worker could start now; calling it starts it, or says which call is done instead."""

MAX_QUEUED = 2
"""Tasks that a function process has at a time: one running, and one queued to begin at once."""

_QUICK_US = 1000
"""Time of rows that are not worth a second task, whose messages alone cost controller and worker about as much."""
_SHORT_US = 10_000
"""Time of a task which may as well be done twice: some messages' worth."""
_FADES = 0.9
"""What a task counts for, as the slowest one of its function, after one more."""


@final
class _Pool:
    """A set of workers, and the queue of calls that only they may run."""

    def __init__(self, workers: Iterable[WorkerState]) -> None:
        self.calls: list[tuple[int, CallState]] = []
        self._workers = {worker.place: worker for worker in workers}
        self._levels: list[list[int]] = [[] for _ in range(MAX_QUEUED)]
        """Number of tasks -> heap of the places of workers that have so many; entries may be out of date."""
        self._listed: list[set[int]] = [set() for _ in range(MAX_QUEUED)]
        self._num_judging = dict.fromkeys(self._workers, 0)
        self.num_judging = 0
        """Rows of all tasks on functions of these workers."""
        for worker in self._workers.values():
            self.note(worker)

    def note(self, worker: WorkerState) -> None:
        """Note that a worker's number of tasks has changed."""
        level = worker.num_tasks["function"]
        self.num_judging += worker.num_judging - self._num_judging[worker.place]
        self._num_judging[worker.place] = worker.num_judging
        if level < MAX_QUEUED and worker.place not in self._listed[level]:
            self._listed[level].add(worker.place)
            heapq.heappush(self._levels[level], worker.place)

    def least_busy(self) -> WorkerState | None:
        """Find the worker with the fewest tasks; None if all have as many as they may."""
        for level, heap in enumerate(self._levels):
            while heap:
                worker = self._workers[heap[0]]
                if worker.num_tasks["function"] == level and not worker.is_lost:
                    return worker
                self._listed[level].discard(heapq.heappop(heap))
        return None


@final
class StartQueue:
    """Calls on functions that may have work, by the workers that may run them."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = workers
        self._pools: dict[tuple[str, ...], _Pool] = {}
        self._pools_of: dict[str, list[_Pool]] = {}
        self._queued: set[int] = set()
        self._noted: dict[str, WorkerState] = {}
        self._row_us: dict[str, float] = {}
        """Name of a call -> time for a row in the slowest of its last tasks."""
        self.has_changed = False
        """Whether something was noted since `next` has last found nothing."""

    def may_start(self, call_state: CallState) -> None:
        """Note that a call may have work now."""
        ordinal = call_state.call.ordinal
        self.has_changed = True
        if ordinal not in self._queued:
            self._queued.add(ordinal)
            heapq.heappush(self._pool(call_state).calls, (ordinal, call_state))

    def note(self, worker: WorkerState) -> None:
        """Note that a worker's number of tasks has changed, or that a new call takes what it makes."""
        self.has_changed = True
        self._noted[worker.name] = worker
        for pool in self._pools_of.get(worker.name, ()):
            pool.note(worker)

    def noted(self) -> Iterator[WorkerState]:
        """Pop the workers of which something was noted, also while this goes on."""
        while self._noted:
            yield self._noted.pop(next(iter(self._noted)))

    def next(self) -> tuple[WorkerState, CallState] | None:
        """Find the earliest call with work for which a worker is free, and the least busy of these workers."""
        found: tuple[WorkerState, CallState] | None = None
        for pool in self._pools.values():
            first = self._first(pool)
            if first is not None and (found is None or first.call.ordinal < found[1].call.ordinal):
                worker = pool.least_busy()
                found = found if worker is None else (worker, first)
        self.has_changed = found is not None
        return found

    def share_of(self, worker: WorkerState, call_state: CallState) -> int:
        """Count the ready rows of a call with which a worker has as many to do as each of the others would; one at least.

        All of them, if that is known to be quick.
        """
        num_ready = len(call_state.ready)
        if num_ready * self._row_us.get(call_state.name, _QUICK_US) < _QUICK_US:
            return num_ready
        num_rows = num_ready + self._pool(call_state).num_judging
        return max(-(-num_rows // len(call_state.stage.workers)) - worker.num_judging, 1)

    def num_quick(self, call_state: CallState) -> int:
        """Count the rows of a call that one task is known to be quick with; one at least."""
        return max(int(_SHORT_US / max(self._row_us.get(call_state.name, _SHORT_US), 1e-3)), 1)

    def took(self, task: TaskState, took_us: int) -> None:
        """Note how long a task took."""
        row_us = took_us / max(task.num_judging, 1)
        self._row_us[task.words] = max(row_us, _FADES * self._row_us.get(task.words, 0.0))

    def first(self, worker: WorkerState) -> CallState | None:
        """Find the earliest call with work that this worker may take, unless another worker for it is less busy."""
        found: CallState | None = None
        for pool in self._pools_of.get(worker.name, ()):
            least = pool.least_busy()
            if least is None or worker.num_tasks["function"] > least.num_tasks["function"]:
                continue
            first = self._first(pool)
            if first is not None and (found is None or first.call.ordinal < found.call.ordinal):
                found = first
        return found

    def _first(self, pool: _Pool) -> CallState | None:
        while pool.calls and (pool.calls[0][1].is_over or not pool.calls[0][1].has_function_work):
            self._queued.discard(heapq.heappop(pool.calls)[0])
        return pool.calls[0][1] if pool.calls else None

    def _pool(self, call_state: CallState) -> _Pool:
        names = call_state.planned.workers
        pool = self._pools.get(names)
        if pool is None:
            workers = [self._workers[name] for name in names]
            pool = self._pools[names] = _Pool(workers)
            for name in names:
                self._pools_of.setdefault(name, []).append(pool)
        return pool


@final
class Tasks:
    """The tasks in flight, by number."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = workers
        self._tasks: dict[int, TaskState] = {}
        self._calls: dict[int, CallState] = {}
        """Task -> its call, where it has one."""
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def start(self, worker: WorkerState, engine: str, task: m.Task, rows: int, call_state: CallState | None) -> None:
        """Add a task to a worker, on a call or on none."""
        num_judging = len(task.ids) if type(task) is m.RunFunction and engine == "function" else 0
        words = type(task).__name__ if call_state is None else call_state.name
        self._tasks[task.number] = TaskState(worker.name, engine, task, words, rows, num_judging)
        worker.num_tasks[engine] += 1
        if rows and call_state is not None:
            chunk = self._tasks[task.number].chunk = max(call_state.stage.chunk, 1)
            worker.running_of[chunk] = worker.running_of.get(chunk, 0) + rows
        worker.num_running += rows
        worker.num_judging += num_judging
        if worker.lease is not None:
            worker.lease.num_tasks += 1
        worker.doing[words] = worker.doing.get(words, 0) + 1
        if type(task) is m.Generate and task.speakers:
            self._tasks[task.number].speakers = {worker_of(tag) for tags in task.speakers.values() for tag in tags}
            for name in self._tasks[task.number].speakers:
                self._has_guests(name, 1)
        if call_state is not None:
            self._calls[task.number] = call_state
            call_state.tasks_at[worker.name] = call_state.tasks_at.get(worker.name, 0) + 1
            if rows:
                call_state.out_at[worker.name] = call_state.out_at.get(worker.name, 0) + rows

    def get(self, number: int) -> TaskState | None:
        """Return a task; None if it has ended."""
        return self._tasks.get(number)

    def of(self, worker: str) -> list[tuple[int, TaskState]]:
        """Return a worker's tasks, the oldest first."""
        return [(number, task) for number, task in self._tasks.items() if task.worker == worker]

    def samples_ended(self, number: int, num_rows: int) -> WorkerState | None:
        """Note that samples of a task do not run any more, and return its worker; None if none of it ran."""
        task = self._tasks.get(number)
        if task is None or not task.rows_left:
            return None
        return self._less(task, number, num_rows)

    def preempted(self, number: int, row: int) -> bool:
        """Note that a sample of a task was preempted; False if the task has ended, or this was reported before."""
        task = self._tasks.get(number)
        if task is None or row in task.preempted:
            return False
        task.preempted.add(row)
        return True

    def end(self, number: int) -> TaskState | None:
        """Remove an ended task from its worker, with the samples that an aborted generation had left; None if it had ended before."""
        task = self._tasks.get(number)
        if task is None:
            return None
        worker = self._less(task, number, task.rows_left)
        del self._tasks[number]
        worker.num_tasks[task.engine] -= 1
        worker.num_judging -= task.num_judging
        if worker.lease is not None:
            worker.lease.num_tasks -= 1
        for name in task.speakers:
            self._has_guests(name, -1)
        call_state = self._calls.pop(number, None)
        _take(worker.doing, task.words)
        if call_state is not None:
            _take(call_state.tasks_at, worker.name)
            if call_state.is_generation and worker.name not in call_state.tasks_at:
                call_state.out_at.pop(worker.name, None)
        return task

    def spoken_by(self, worker: str) -> list[tuple[int, TaskState]]:
        """Return the tasks of other workers in whose episodes this one's engines speak, the oldest first."""
        return [(number, task) for number, task in self._tasks.items() if worker in task.speakers]

    def speaker_lost(self, number: int, worker: str) -> None:
        """Note that a worker does not speak in a task's episodes any more."""
        self._tasks[number].speakers.discard(worker)
        self._has_guests(worker, -1)

    def _has_guests(self, name: str, by: int) -> None:
        worker = self._workers[name]
        worker.num_guests += by
        if worker.lease is not None:
            worker.lease.num_tasks += by

    def _less(self, task: TaskState, number: int, num_rows: int) -> WorkerState:
        worker = self._workers[task.worker]
        if num_rows:
            task.rows_left -= num_rows
            worker.num_running -= num_rows
            worker.running_of[task.chunk] -= num_rows
            self._calls[number].out_at[worker.name] -= num_rows
        return worker


def _take(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


@final
class ReadyWorkers:
    """The workers that may have something new to do."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = list(workers.values())
        self._hosts: dict[tuple[str, str], list[WorkerState]] = {}
        """(kind, role) -> workers with such an engine."""
        for worker in self._workers:
            for kind, roles in worker.roles.items():
                for role in roles:
                    self._hosts.setdefault((kind, role), []).append(worker)
        self._trainers = [worker for worker in self._workers if worker.roles["train"]]
        self._awake: list[int] = []
        self._is_awake = [False] * len(self._workers)
        self._saturated_with: list[list[CallState]] = [[] for _ in self._workers]
        """Place of a worker -> generations of which it takes no more rows until something of its own changes."""
        self._came: dict[int, CallState] = {}
        """Generations with rows to offer to unsaturated workers."""
        self._offered: tuple[CallState, WorkerState] | None = None
        self._to_deal: dict[int, CallState] = {}

    def hosts(self, kind: str, role: str) -> list[WorkerState]:
        """Return the workers that host a role's engine of this kind."""
        return self._hosts.get((kind, role), [])

    def has_others(self, kind: str, role: str, than: WorkerState) -> bool:
        """Whether a worker other than `than` hosts such an engine."""
        hosts = self._hosts.get((kind, role), [])
        return len(hosts) > 1 or (len(hosts) == 1 and hosts[0] is not than)

    def wake(self, worker: WorkerState) -> None:
        """Ask this worker again: something of its own changed, so it is saturated with no call any more."""
        if not self._is_awake[worker.place]:
            self._is_awake[worker.place] = True
            heapq.heappush(self._awake, worker.place)
        if saturated_with := self._saturated_with[worker.place]:
            for call_state in saturated_with:
                if worker.place in call_state.saturated:
                    call_state.saturated.discard(worker.place)
                    heapq.heappush(call_state.unsaturated, worker.place)
            saturated_with.clear()

    def passed_over(self, worker: WorkerState) -> None:
        """Forget that a worker out of turn is saturated with calls that have no rows left: it is asked again when there are more."""
        left = [call_state for call_state in self._saturated_with[worker.place] if worker.place in call_state.saturated]
        self._saturated_with[worker.place] = [call_state for call_state in left if call_state.has_rows_to_begin]
        for call_state in left:
            if not call_state.has_rows_to_begin and worker.place in call_state.saturated:
                call_state.saturated.discard(worker.place)
                heapq.heappush(call_state.unsaturated, worker.place)

    def wake_all(self, workers: Iterable[WorkerState]) -> None:
        for worker in workers:
            self.wake(worker)

    def wake_role(self, *roles: str) -> None:
        """Ask the workers of these roles again: one has a new version of the weights, or another first generation."""
        for role in roles:
            self.wake_all(self.hosts("rollout", role))
            self.wake_all(self.hosts("train", role))

    def wake_trainers(self, role: str | None = None) -> None:
        """Ask the trainers of a role, or all trainers, again."""
        self.wake_all(self._trainers if role is None else self.hosts("train", role))

    def rows_came(self, call_state: CallState) -> None:
        """Offer rows of a generation to the workers that are not saturated with it, and have its policy, if any, deal them."""
        self._came[call_state.call.ordinal] = call_state
        if call_state.is_under_policy:
            self._to_deal[call_state.call.ordinal] = call_state

    def to_deal(self) -> list[CallState]:
        """Return the generations whose policies may deal rows that came, also to workers that are saturated, and forget them."""
        found = list(self._to_deal.values())
        self._to_deal.clear()
        return found

    def feed_all(self, call_state: CallState) -> None:
        """Mark every worker of the role as unsaturated with this generation."""
        call_state.unsaturated = [worker.place for worker in self.hosts("rollout", call_state.call.role)]
        call_state.saturated.clear()

    @property
    def has_any(self) -> bool:
        """Whether some worker may have to be asked."""
        return bool(self._awake or self._came or self._to_deal)

    def next(self) -> WorkerState | None:
        """Pop the next worker to ask. By the next call it must have taken what it wants: that decides whether it is saturated."""
        if self._offered is not None:
            call_state, worker = self._offered
            self._offered = None
            if call_state.has_rows_to_begin:
                call_state.saturated.add(worker.place)
                self._saturated_with[worker.place].append(call_state)
            else:
                heapq.heappush(call_state.unsaturated, worker.place)
        if self._awake:
            place = heapq.heappop(self._awake)
            self._is_awake[place] = False
            return self._workers[place]
        while self._came:
            ordinal, call_state = next(iter(self._came.items()))
            if call_state.unsaturated and call_state.has_rows_to_begin:
                self._offered = call_state, self._workers[heapq.heappop(call_state.unsaturated)]
                return self._offered[1]
            del self._came[ordinal]
        return None
