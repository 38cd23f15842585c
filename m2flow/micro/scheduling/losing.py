"""A worker is gone: what it had goes to others, and what only it had is made again.

    WorkerLost --lose--> its tasks' rows are ready again; rows that have a copy elsewhere come from there; the others are undone

Rows of calls that are not over yet can be undone, with what they had made complete. What ends the run: a lost trainer, whose weights no
one else has; a call that nobody is left to run; and rows of a call that is over, of which no copy is left and which are still needed.
Pure, on the board.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from m2flow.errors import WorkerError
from m2flow.micro import messages as m
from m2flow.micro.plan import Stage

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.rollout_desk import RolloutDesk
    from m2flow.micro.scheduling.roster import TaskState
    from m2flow.micro.scheduling.tracking import CallState


def lose(board: Board, rollout: RolloutDesk, name: str) -> None:
    """Take a worker out.

    Raises:
        WorkerError: the run can't go on without it.
    """
    worker = board.workers[name]
    if worker.is_lost:
        return
    worker.is_lost = board.has_lost = True
    if worker.roles["train"]:
        raise WorkerError(
            f"the worker {name} is lost, and with it the weights that {', '.join(worker.roles['train'])} trained",
            now="Samples and rewards up to here are in the run's directory; training can't go on from them yet.",
        )
    for state in board.calls.values():
        _strike(state, name)
    for number, task in board.tasks.of(name):
        _take_back(board, rollout, number, task)
    rollout.lost(worker)
    alone = board.rows_lost(name)
    for ordinal in sorted(alone, reverse=True):  # What a row was made of may be gone too: that comes later in this loop.
        if ordinal < 0:
            board.lines.lost(alone[ordinal])
        else:
            _undo(board, ordinal, alone[ordinal])
    board.waking.wake_all(other for other in board.workers.values() if not other.is_lost)


def _strike(state: CallState, name: str) -> None:
    """A call has a worker less, and forwards nothing to it."""
    stage = state.stage
    if name in stage.workers or name in stage.forward_to:
        state.stage = without(stage, {name})
        if not state.stage.workers and stage.workers and not state.is_over:
            raise WorkerError(f"the worker {name} is lost, and no other can run {state.call.name}", where=state.call.site.describe())


def without(stage: Stage, names: set[str]) -> Stage:
    """A stage without these workers."""
    return msgspec.structs.replace(
        stage,
        workers=tuple(worker for worker in stage.workers if worker not in names),
        forward_to=tuple(worker for worker in stage.forward_to if worker not in names),
    )


def _take_back(board: Board, rollout: RolloutDesk, number: int, task: TaskState) -> None:
    """A task will not be done: its rows that are not done can be handed out again."""
    board.end_task(number)
    state = board.calls.get(task.message.call)
    if isinstance(task.message, m.LoadWeights):
        rollout.unloaded(task.message)
    if isinstance(task.message, m.Generate):
        board.lines.task_ended(task.message.call)
    if state is None or state.is_over or not isinstance(task.message, m.Generate | m.Perform):
        return
    left = [row for row in task.message.ids if row not in state.done and row not in state.dropped]
    board.give_back(state, left)


def _undo(board: Board, ordinal: int, rows: list[int]) -> None:
    """Rows of which no copy is left are made again, if somebody still needs them."""
    state = board.calls.get(ordinal)
    if state is None:
        return
    needed = set(rows) if not state.is_over and not state.is_released else _needed(board, ordinal, rows)
    if not needed:
        return
    if state.is_over:
        raise WorkerError(
            f"{len(needed)} samples of {state.call.name} were on the lost worker alone, and the call is over",
            where=state.call.site.describe(),
            now="They can't be made again yet. Start the run anew.",
        )
    undone = [row for row in rows if row in needed]
    for consumer in board.consumers(ordinal):
        consumer.departed(undone)
    state.undone(undone)
    board.give_back(state, undone)


def _needed(board: Board, ordinal: int, rows: Iterable[int]) -> set[int]:
    """Rows that a call which is not over has yet to work on. Who has begun on a row has a copy of it."""
    found: set[int] = set()
    for consumer in board.consumers(ordinal):
        found.update(row for row in rows if consumer.may_need(row))
    return found
