"""The scheduler's counts, held against counting: it keeps each so that no decision has to look at all calls, tasks or rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from m2flow.macro.late import is_cut
from m2flow.micro import messages as m
from m2flow.micro.scheduling.board import Board
from m2flow.micro.scheduling.events import CONTROLLER
from m2flow.micro.scheduling.queue import MAX_QUEUED
from m2flow.micro.scheduling.roster import TaskState
from m2flow.micro.scheduling.scheduler import Scheduler
from m2flow.micro.scheduling.tracking import CallState
from m2flow.samples import by_group
from m2flow.testing.hands import Hand, Row


def recount(scheduler: Scheduler, hands: Mapping[str, Hand], at_controller: Iterable[Row]) -> None:
    """Count everything anew.

    Raises:
        AssertionError: a count is not what it should be; it says which.
    """
    board = scheduler._board
    tasks = board.tasks._tasks
    _recount_tasks(board, tasks)
    for state in board.calls.values():
        _recount_call(board, state, tasks)
    _recount_weights(scheduler, hands)
    assert not board.waking.has_any, "somebody is awake after an event"
    assert list(board.active) == [ordinal for ordinal, state in board.calls.items() if not state.is_over], "active calls"
    idle = {w.name for w in board.workers.values() if w.roles["function"] and w.num_tasks["function"] < MAX_QUEUED and not w.is_lost}
    for state in board.active.values():
        if state.call.engine == "function" and state.has_function_work:
            assert not idle.intersection(state.stage.workers), f"{state.call.name} has work, and {idle} are free for it"
    if not any(hand.has_something or hand.said or hand.is_dead for hand in hands.values()):
        _recount_rows(board, hands, set(at_controller))


def _recount_tasks(board: Board, tasks: Mapping[int, TaskState]) -> None:
    of: Counter[tuple[str, str]] = Counter((task.worker, task.engine) for task in tasks.values())
    running: Counter[str] = Counter()
    of_lease: Counter[str] = Counter()
    for task in tasks.values():
        running[task.worker] += task.rows_left
        lease = board.workers[task.worker].lease
        of_lease[lease.name if lease is not None else ""] += 1
    for worker in board.workers.values():
        for engine, count in worker.num_tasks.items():
            assert count == of[worker.name, engine], f"{worker.name} has {of[worker.name, engine]} {engine} tasks, not {count}"
        assert worker.num_running == running[worker.name], f"{running[worker.name]} samples run on {worker.name}, not {worker.num_running}"
        assert sum(worker.doing.values()) == sum(worker.num_tasks.values()), f"what {worker.name} does"
    for lease in board.leases.values():
        assert lease.num_tasks == of_lease[lease.name], f"the lease {lease.name} has {of_lease[lease.name]} tasks, not {lease.num_tasks}"


def _recount_call(board: Board, state: CallState, tasks: Mapping[int, TaskState]) -> None:
    name = f"call {state.call.ordinal}, {state.call.name}"
    own = [task for task in tasks.values() if task.message.call == state.call.ordinal]
    assert state.tasks_at == Counter(task.worker for task in own), f"{name}: the workers that have tasks of it"
    users = {
        other.call.ordinal
        for other in board.active.values()
        if any(ref.call == state.call.ordinal for _, ref in other.call.inputs) and not other.is_over
    }
    assert state.users.keys() == users, f"{name}: its users are {sorted(users)}, not {sorted(state.users)}"
    ready, ids = list(state.ready), set(state.ids)
    assert len(ready) == len(set(ready)), f"{name}: a row is ready twice"
    assert ids.issuperset(ready), f"{name}: rows are ready that are not its own"
    assert not state.done.intersection(ready), f"{name}: rows are ready that are done"
    assert state.is_over == (state.is_done or state.is_failed), f"{name}: over or not"
    if state.is_over:
        return
    with_tasks = [row for task in own if isinstance(task.message, m.Generate | m.Perform) for row in task.rows]
    assert not set(with_tasks).intersection(ready), f"{name}: rows are ready that a task has"
    assert len(with_tasks) == len(set(with_tasks)), f"{name}: a row is in two tasks"
    if state.is_generation:
        _recount_generation(state, own)


def _recount_generation(state: CallState, own: Iterable[TaskState]) -> None:
    name = f"call {state.call.ordinal}, {state.call.name}"
    out: Counter[str] = Counter()
    for task in own:
        out[task.worker] += task.rows_left
        left = [row for row in task.rows if row not in state.done]
        is_right = state.failure is not None or len(left) == task.rows_left
        assert is_right, f"{name}: {len(left)} rows are with {task.worker}, not {task.rows_left}"
    assert {w: n for w, n in state.out_at.items() if n} == {w: n for w, n in out.items() if n}, f"{name}: the samples that workers have"
    if is_cut(state.call.options) and state.is_prepared:
        groups = by_group(state.ids)
        left_of = {key: len(rows) - len(state.done.intersection(rows)) for key, rows in groups.items()}
        assert state._left_of_group == left_of, f"{name}: what each group lacks"
        assert state.num_whole == sum(not left for left in left_of.values()), f"{name}: whole groups"


def _recount_weights(scheduler: Scheduler, hands: Mapping[str, Hand]) -> None:
    board, desk = scheduler._board, scheduler._rollout
    for role, counted in desk._num_holding.items():
        held = Counter(worker.held.get(role, 0) for worker in board.waking.hosts("rollout", role))
        assert +counted == held, f"the weights of {role}: {dict(held)}, not {dict(counted)}"
    for worker in board.workers.values():
        hand = hands[worker.name]
        unheard = [said for said in hand.said if isinstance(said, m.TaskDone)]
        for role, version in hand.held.items() if not worker.is_lost and not hand.is_dead and not unheard else ():
            assert worker.held.get(role, 0) == version, f"{worker.name} holds version {version} of {role}, not {worker.held.get(role, 0)}"


def _recount_rows(board: Board, hands: Mapping[str, Hand], at_controller: set[Row]) -> None:
    """When nothing is on its way, rows are where the scheduler takes them to be, and nowhere else."""
    for name in (*hands, CONTROLLER):
        here = at_controller if name == CONTROLLER else set(hands[name].held_rows())
        thought = {(call, row) for call, places in board.rows._places.items() for row in places.get(name, ())}
        missing = thought - here
        assert not missing, f"{name} has not the rows {sorted(missing)[:3]}, which it is taken to have"
        unknown = {(call, row) for call, row in here - thought if call in board.calls and not board.calls[call].is_over}
        assert not unknown, f"{name} has the rows {sorted(unknown)[:3]}, which nobody knows of"
        # What comes when its call is over is in no result, and goes when the call is forgotten: if the place is told.
        untold = {call for call, _ in here - thought if call in board.calls and name not in board.rows._places.get(call, ())}
        assert not untold, f"{name} has rows of the calls {sorted(untold)}, and will never be told to forget them"
