"""A worker is gone: what it had goes to others, and what only it had is made again. It may come back.

    WorkerLost --lose--> its tasks' rows are ready again; rows that have a copy elsewhere come from there; the others are undone
    WorkerJoined --join--> it is asked again, and rows are sent there again

Rows of calls that are not over yet can be undone, with what they had made complete. What can't be made good so (`StateLost`): a trainer's
weights, or a role's state; weights that a generation still needs; and rows of a call that is over, of which no copy is left and which
are still needed. What ends the run besides: a call that nobody is left to run, or comes back to; and rows that were with one worker after
the other when it was lost. Pure, on the board.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from m2flow.errors import StateLost, WorkerError
from m2flow.micro import messages as m
from m2flow.micro.plan import Stage
from m2flow.micro.scheduling.events import CONTROLLER, Undone, WorkerLost
from m2flow.samples import SampleId

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.rollout_desk import RolloutDesk
    from m2flow.micro.scheduling.roster import TaskState, WorkerState
    from m2flow.micro.scheduling.tracking import CallState


_GO_ON = "What no other has can't be made again from where the run is. `m2flow run --resume` goes on from its last checkpoint."


def lose(board: Board, rollout: RolloutDesk, event: WorkerLost) -> None:
    """Take a worker out.

    Raises:
        StateLost: it had what no other has. WorkerError: nobody else can do what it did; or it is not the first that these rows end.
    """
    name = event.worker
    worker = board.workers[name]
    was_lost, worker.returns = worker.is_lost, event.returns
    worker.is_lost = board.missed.has_any = True
    _name_what_is_gone(worker, event)
    for state in board.calls.values():
        if name in state.planned.workers or name in state.planned.forward_to:
            strike(board, state)
    if was_lost:
        return
    board.placings.lost(name)
    for place, rows in event.missing.items():
        _withdraw(board, rollout, place, rows)
    for task in _blamed(board, name):
        _suspect(board, task, event)
    for number, task in board.tasks.of(name):
        _take_back(board, rollout, number, task)
    rollout.lost(worker)
    alone = board.missed.rows_lost(name)
    for ordinal in sorted(alone, reverse=True):  # What a row was made of may be gone too: that comes later in this loop.
        if ordinal < 0:
            board.lines.lost(alone[ordinal])
        else:
            _undo(board, ordinal, alone[ordinal])
    for place, rows in event.missing.items():
        board.missed.send_again(place, rows)
    for state in board.active.values():
        if state.is_generation and state.ready and not rollout.has_version_for(state):
            raise StateLost(
                f"{worker.name} is lost, and no other has the weights that {state.call.name} began with{_how(event)}",
                where=state.call.site.describe(),
                now=_GO_ON,
            )
    board.waking.wake_all(other for other in board.workers.values() if not other.is_lost)


def join(board: Board, rollout: RolloutDesk, name: str, incarnation: int) -> None:
    """Take a worker in again."""
    worker = board.workers[name]
    if not worker.is_lost:
        return
    worker.is_lost = worker.returns = False
    worker.incarnation = incarnation
    rollout.joined(worker)
    board.placings.joined(name)
    for state in board.calls.values():
        if name in state.planned.workers or name in state.planned.forward_to:
            state.stage = _live(board, state.planned)
            if state.is_generation and not state.is_over:
                board.waking.feed_all(state)
                board.waking.rows_came(state)
    board.functions.note(worker)
    board.waking.wake_all(other for other in board.workers.values() if not other.is_lost)


def _name_what_is_gone(worker: WorkerState, event: WorkerLost) -> None:
    """Raises if it had what no other has."""
    trained = ", ".join(worker.roles["train"])
    if not trained and not worker.states:
        return  # `Scheduler.is_vital` says the same.
    gone = f"the weights that {trained} trained" if trained else f"the state of {', '.join(sorted(worker.states))}"
    raise StateLost(f"the worker {worker.name} is lost, and with it {gone}{_how(event)}", now=_GO_ON, remote=event.last_words)


def _how(event: WorkerLost) -> str:
    return f": {event.how}" if event.how else ""


def strike(board: Board, state: CallState) -> None:
    """A call has only the workers that are there, and forwards to nobody else.

    Raises:
        WorkerError: nobody can run it, now or when those that are started again are up.
    """
    state.stage = _live(board, state.planned)
    planned = state.planned.workers
    if state.is_over or not planned or state.stage.workers or any(board.workers[name].returns for name in planned):
        return
    lost = ", ".join(planned)
    raise WorkerError(f"the worker {lost} is lost, and no other can run {state.call.name}", where=state.call.site.describe())


def _live(board: Board, stage: Stage) -> Stage:
    """A stage without the workers that are lost; rows are forwarded to the processes that the others are now."""
    there = [board.workers[name] for name in stage.forward_to if not board.workers[name].is_lost]
    return msgspec.structs.replace(
        stage,
        workers=tuple(name for name in stage.workers if not board.workers[name].is_lost),
        forward_to=tuple(worker.tag for worker in there),
    )


def _blamed(board: Board, name: str) -> list[TaskState]:
    """The tasks that may have ended the worker: all generations, which run at the same time, and of others the one in hand."""
    tasks = [(number, task) for number, task in board.tasks.of(name) if isinstance(task.message, m.Generate | m.Perform)]
    first = next((number for number, task in tasks if isinstance(task.message, m.Perform)), None)
    return [task for number, task in tasks if isinstance(task.message, m.Generate) or number == first]


def _suspect(board: Board, task: TaskState, event: WorkerLost) -> None:
    """Count the workers that these rows were with when they were lost.

    Raises:
        WorkerError: there were too many.
    """
    state = board.calls.get(task.message.call)
    if state is None or state.is_over:
        return
    assert isinstance(task.message, m.Generate | m.Perform)
    rows = [row for row in task.message.ids if row not in state.done and row not in state.dropped]
    state.suspects.update(rows)
    worst = [row for row in rows if board.missed.suspected(state.call.ordinal, row) >= board.max_attempts]
    if worst:
        named = ", ".join(str(SampleId.unpack(row)) for row in worst[:5]) + (f" and {len(worst) - 5} more" if len(worst) > 5 else "")
        raise WorkerError(
            f"{board.max_attempts} workers in turn were lost with {named} of {state.call.name}, the last one {event.worker}{_how(event)}",
            where=state.call.site.describe(),
            now="What they do to a process is in its last words and its log. How often to try is `max_attempts` of the run settings.",
            remote=event.last_words,
        )


def _withdraw(board: Board, rollout: RolloutDesk, place: str, missing: Mapping[int, Sequence[int]]) -> None:
    """Rows are not at a place: its tasks that wait for them are given up. An update's stay: their order counts, and the rows will come."""
    board.missed.never_came(missing, place)
    if place == CONTROLLER:
        return
    gone = {(ordinal, row) for ordinal, rows in missing.items() for row in rows}
    for number, task in board.tasks.of(place):
        if isinstance(task.message, m.Generate | m.Perform) and any(need in gone for need in board.missed.needs(task.message)):
            board.send(place, m.Withdraw(number))
            _take_back(board, rollout, number, task)


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
    if state.carry is not None and state.is_over:
        state.done.difference_update(set(rows).intersection(state.carry.late))  # They begin anew in the call that takes them over.
    needed = set(rows) if not state.is_over and not state.is_released else _needed(board, ordinal, rows)
    if not needed:
        return
    if state.is_over:
        raise StateLost(
            f"{len(needed)} samples of {state.call.name} were on the lost worker alone, and the call is over",
            where=state.call.site.describe(),
            now=_GO_ON,
        )
    undone = [row for row in rows if row in needed]
    for consumer in list(board.calls[ordinal].users.values()):
        consumer.departed(undone)
    state.undone(undone)
    if state.refill is not None and state.call.drops:
        for position in {SampleId.unpack(row).prompt for row in undone}:
            state.refill.retract(position)
    board.commands.append(Undone(ordinal, tuple(undone)))
    board.give_back(state, undone)


def _needed(board: Board, ordinal: int, rows: Iterable[int]) -> set[int]:
    """Rows that a call which is not over has yet to work on. Who has begun on a row has a copy of it."""
    found: set[int] = set()
    for consumer in list(board.calls[ordinal].users.values()):
        found.update(row for row in rows if consumer.may_need(row))
    return found
