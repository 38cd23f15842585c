"""The tasks that workers have, and what they come to: by worker, by call, by lease. Each count is kept, and none is made by looking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from m2flow.micro import messages as m
from m2flow.micro.scheduling.roster import TaskState, WorkerState
from m2flow.micro.scheduling.tracking import CallState


@final
class Tasks:
    """By number, from their start to their end."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = workers
        self._tasks: dict[int, TaskState] = {}
        self._calls: dict[int, CallState] = {}
        """Of each task on a call."""
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def start(self, worker: WorkerState, engine: str, task: m.Task, rows: int, state: CallState | None) -> None:
        """A worker gets a task, on a call or on none."""
        self._tasks[task.number] = TaskState(worker.name, engine, task, rows)
        worker.num_tasks[engine] += 1
        worker.num_running += rows
        if worker.lease is not None:
            worker.lease.num_tasks += 1
        words = type(task).__name__ if state is None else state.call.name
        worker.doing[words] = worker.doing.get(words, 0) + 1
        if state is not None:
            self._calls[task.number] = state
            state.tasks_at[worker.name] = state.tasks_at.get(worker.name, 0) + 1
            if rows:
                state.out_at[worker.name] = state.out_at.get(worker.name, 0) + rows

    def message(self, number: int) -> m.Task | None:
        """What a worker was told; None if the task has ended."""
        task = self._tasks.get(number)
        return task.message if task is not None else None

    def of(self, worker: str) -> list[tuple[int, TaskState]]:
        """What a worker has, the oldest first."""
        return [(number, task) for number, task in self._tasks.items() if task.worker == worker]

    def generated(self, number: int, num_rows: int) -> WorkerState | None:
        """Samples of a generation do not run any more; where."""
        task = self._tasks.get(number)
        if task is None or not task.rows_left:
            return None
        return self._less(task, number, num_rows)

    def yielded(self, number: int, row: int) -> bool:
        """A worker has given a sample back; False if the task has ended, or it was told before."""
        task = self._tasks.get(number)
        if task is None or row in task.yielded:
            return False
        task.yielded.add(row)
        return True

    def end(self, number: int) -> TaskState | None:
        """Take a task off its worker, with what an aborted generation had left; None if it has ended before."""
        task = self._tasks.get(number)
        if task is None:
            return None
        worker = self._less(task, number, task.rows_left)
        del self._tasks[number]
        worker.num_tasks[task.engine] -= 1
        if worker.lease is not None:
            worker.lease.num_tasks -= 1
        state = self._calls.pop(number, None)
        _take(worker.doing, type(task.message).__name__ if state is None else state.call.name)
        if state is not None:
            _take(state.tasks_at, worker.name)
            if state.is_generation and worker.name not in state.tasks_at:
                state.out_at.pop(worker.name, None)
        return task

    def _less(self, task: TaskState, number: int, num_rows: int) -> WorkerState:
        worker = self._workers[task.worker]
        if num_rows:
            task.rows_left -= num_rows
            worker.num_running -= num_rows
            self._calls[number].out_at[worker.name] -= num_rows
        return worker


def _take(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
