"""The scheduler: events in, commands out. A pure state machine, without I/O, clock or threads.

An update that has begun has consumed samples and changed the trainer's gradient; what has not begun is found by a resume as it was, and
samples that run are stopped and written down, so that they go on from there.
Pure, on the board.

CallAdded, Sourced, Finished, TaskDone, ... --Scheduler.handle--> Send, Resolve, Reject

The controller feeds it what happened; a simulator or a test feeds it what might have. It decides order, place and time and
nothing else, within what each call's stage allows (`m2flow.micro.protocol.plan`). Each kind of work has a desk that says what could be done
next; this file turns events into state, and lets the desks speak, lease by lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from m2flow.errors import RunInterrupted, error_from_record
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    LEDGER,
    BorrowThresholds,
    CallAdded,
    CheckpointBegun,
    CheckpointDue,
    CheckpointSaved,
    Command,
    Event,
    Forgotten,
    FromWorker,
    Recalled,
    Reject,
    Released,
    Resolve,
    Restored,
    Send,
    Sourced,
    Stopping,
    TimedOut,
    Wanted,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.worker_state import ROLLOUT, Lease, TaskState, WorkerState, kind_of
from m2flow.micro.scheduler.backpressure import Channel, Credits
from m2flow.micro.scheduler.deadlines import time_out
from m2flow.micro.scheduler.function_dispatch import FunctionDispatch
from m2flow.micro.scheduler.rollout_dispatch import Offer, RolloutDispatch
from m2flow.micro.scheduler.state import NOTHING, Ablation, SchedulerState
from m2flow.micro.scheduler.train_dispatch import TrainDispatch
from m2flow.micro.scheduler.waiting import Wait, waits_of
from m2flow.micro.scheduler.worker_failure import join, lose, written_down

if TYPE_CHECKING:
    from m2flow.micro.scheduler.call_state import CallState


def wind_down(board: SchedulerState) -> None:
    """Give up what no update that has begun needs."""
    needed: set[int] = set()
    todo = [state for state in board.active.values() if state.update is not None and state.update.has_begun]
    while todo:
        state = todo.pop()
        if state.call.ordinal not in needed:
            needed.add(state.call.ordinal)
            todo += _needs(board, state)
    for state in list(board.active.values()):
        if state.call.ordinal not in needed and not state.is_over:
            board.fail(state, RunInterrupted("the run was asked to stop", where=state.call.site.describe()))


def _needs(board: SchedulerState, state: CallState) -> list[CallState]:
    """The calls, not over, that a call waits for."""
    inputs = {ref.call for _, ref in state.call.inputs}
    return [board.active[ordinal] for ordinal in inputs | state.waits_for | set(state.aligned_inputs) if ordinal in board.active]


class Dispatch(Protocol):
    """Says what a worker could do next, of one kind of work, for roles whose engines may work."""

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None: ...


class Scheduler:
    """Decides what each worker does next."""

    def __init__(
        self,
        plan: Plan,
        *,
        deterministic: bool = False,
        restored: Mapping[str, int] | None = None,
        max_attempts: int = 3,
        relaxed: Ablation = NOTHING,
    ) -> None:
        """`restored` are the versions that the trainers begin with, by role; 0 where none is given."""
        self._board = SchedulerState(plan, deterministic=deterministic, restored=restored or {}, max_attempts=max_attempts, relaxed=relaxed)
        self._credits = Credits(self._board.calls)
        self._num_noted = 0
        """Commands of the event in hand that the credits know of."""
        self._rollout = RolloutDispatch(self._board, self._credits)
        self._train = TrainDispatch(self._board, self._rollout)
        self._functions = FunctionDispatch(self._board)
        self._desks: dict[str, Dispatch] = {"rollout": self._rollout, "train": self._train, "function": self._functions}
        self._desks_of = [[(kind, desk) for kind, desk in self._desks.items() if w.roles[kind]] for w in self._board.workers.values()]

    def handle(self, *events: Event) -> list[Command]:
        """Take an event, or several that came together; answer what to do now.

        Raises:
            M2FlowError: a worker failed at what belongs to no call (weights, a lease, a save), so the run can't go on; or one is lost
                that nobody can stand in for (`m2flow.micro.scheduler.worker_failure`).
        """
        board = self._board
        board.commands, self._num_noted = [], 0
        for event in events:
            self._take(event)
        if not all(isinstance(event, Released) for event in events):
            self._give_work()
        board.forget_unreachable()
        return board.commands

    def _take(self, event: Event) -> None:
        board = self._board
        if isinstance(event, FromWorker):
            if not board.workers[event.worker].is_lost:
                self._from_worker(event.worker, event.message)
        elif isinstance(event, CallAdded):
            self._added(event)
        elif isinstance(event, Recalled):
            board.lines.recall(event)
            self._added(event)
        elif isinstance(event, Released):
            board.release(event.call)
        elif isinstance(event, Sourced):
            board.sourced(board.calls[event.call], event.ids, event.num_tokens)
        elif isinstance(event, Wanted):
            board.want(board.calls[event.call])
        elif isinstance(event, TimedOut):
            time_out(board, event)
        elif isinstance(event, CheckpointDue):
            self._save(event)
        elif isinstance(event, Stopping):
            wind_down(board)
        elif isinstance(event, Restored):
            board.restoring.restore(event)
        elif isinstance(event, BorrowThresholds):
            board.lending.set_until(event.shares)
        elif isinstance(event, WorkerLost):
            self._lost(event)
        else:
            self._joined(board.workers[event.worker], event.incarnation)

    @property
    def has_calls(self) -> bool:
        """Whether some call is not over."""
        return bool(self._board.active)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._board.active and not self._board.tasks

    def num_rows(self, ordinal: int) -> int:
        """Rows of the result of a call that is done."""
        return len(self._board.calls[ordinal].result or ())

    def sent_by(self, worker: str) -> dict[str, dict[int, list[int]]]:
        """The rows that a worker made which others have, as far as is known: by place and call."""
        return self._board.missed.sent_by(worker)

    def is_vital(self, worker: str) -> bool:
        """Whether a worker has what no other has: weights that it trains, a role's state."""
        state = self._board.workers[worker]
        return bool(state.roles["train"] or state.states)

    def holds(self, versions: Mapping[str, int]) -> bool:
        """Whether the trainers have just these weights, of all that were trained or copied to."""
        trained = self._board.versions
        return all(trained.trained(role) == versions.get(role, 0) for role in {*trained.known(), *versions})

    def running(self) -> dict[str, str]:
        """What each worker does now, in words."""
        return {worker.name: ", ".join(worker.doing) for worker in self._board.workers.values() if worker.doing}

    def waiting(self) -> list[str]:
        """What each unfinished call waits for, in words."""
        lines = []
        for state in self._board.active.values():
            names = [self._board.calls[c].call.name for c in sorted(state.waits_for) if c in self._board.calls]
            after = f", after {', '.join(names)}" if names else ""
            lines.append(f"{state.call.name} ({state.call.site}): {len(state.done)} of {len(state.ids)} rows done{after}")
        return lines

    def waits(self) -> list[Wait]:
        """Who waits for whom, of all that is not over."""
        return waits_of(self._board, self._credits)

    def channels(self) -> list[Channel]:
        """The channels whose room is limited, as they are now."""
        return list(self._credits.channels.values())

    def _added(self, event: CallAdded | Recalled) -> None:
        state = self._board.add_call(event.call, event.stage)
        self._credits.added(state, [ref.call for _, ref in event.call.inputs])
        if self._board.lending.is_used and event.call.engine == "train":
            self._board.lending.trains()
        if self._board.ahead.is_used and event.call.engine == "train":
            self._board.ahead.look(self._tell_to_condense)

    def _from_worker(self, name: str, message: m.Heard) -> None:
        """What comes twice or late changes nothing."""
        board = self._board
        if isinstance(message, m.Load):
            board.placings.reported(name, message)
            board.waking.wake(board.workers[name])
            return
        if isinstance(message, m.Preempted):
            board.placings.yielded(message)
            return
        state = board.calls.get(message.call) if not isinstance(message, m.TaskDone) else None
        if isinstance(message, m.Finished):
            if state is not None:
                if state.carry is not None:
                    board.lines.finished(state, message)
                if state.placing is not None:
                    for row, length in zip(message.ids, message.num_generated, strict=True):
                        state.placing.ended(row, length)
                board.generated(
                    message.task,
                    board.rows_done(state, name, message.ids, message.num_tokens, message.dropped, board.missed.sent_to(message.task)),
                )
                if self._credits.is_used:
                    self._credits.settle(state, dict(zip(message.ids, message.num_tokens, strict=True)))
                    self._credits.taken(message.call, (*message.ids, *message.dropped))
                board.placings.deal(state)
                if board.lending.is_used:
                    board.lending.ended(state)
                if board.ahead.is_used:
                    board.ahead.look(self._tell_to_condense)
            if message.ends:
                self._end_task(message.task)
            return
        if isinstance(message, m.Aborted | m.Flushed):
            if state is not None:
                written_down(board, state, name if isinstance(message, m.Aborted) else LEDGER, message)
            return
        ended = self._end_task(message.task)
        if ended is None:
            return
        if isinstance(message, m.TaskFailed):
            if message.call < 0:
                raise error_from_record(message.error)
            if state is not None:
                error = error_from_record(message.error).located(state.call.site.describe())
                if state.refill is not None and isinstance(ended.message, m.RunFunction):
                    if not state.is_over:
                        board.refills.judge(state, ended.message.ids, error)
                elif state.refill is not None and isinstance(ended.message, m.Generate):
                    board.refills.not_generated(state, ended.message, message.row, error)
                else:
                    board.task_failed(state, ended.message, message.row, error)
            return
        self._task_done(board.workers[name], ended.message, message)

    def _end_task(self, number: int) -> TaskState | None:
        """Take a task off its worker; None if it has ended before."""
        ended = self._board.end_task(number)
        if ended is not None and isinstance(ended.message, m.Generate):
            self._board.lines.task_ended(ended.message.call)
        return ended

    def _task_done(self, worker: WorkerState, task: m.Task, done: m.TaskDone) -> None:
        board = self._board
        state = board.calls.get(task.call)
        if isinstance(task, m.Accumulate):
            self._credits.taken(task.call, task.ids)
        match task:
            case m.Accumulate() | m.Apply() if state is not None and state.failure is not None:
                board.accumulated(state)
            case m.Apply(is_last=True) | m.CopyWeights():
                if state is not None and not state.is_over:
                    board.complete(state, done.result)
            case m.RunFunction():
                if state is not None and not state.is_over and not state.call.is_aligned:
                    board.complete(state, done.result)
            case m.PublishWeights(role=role, version=version):
                assert done.manifest is not None
                self._rollout.published(role, version, done.manifest)
            case m.LoadWeights():
                self._rollout.loaded(worker, task)
            case m.Switch(to=owner):
                assert worker.lease is not None
                if worker.lease.is_asked(worker.name):
                    self._tell_to_switch(worker.lease.answered(worker.name), owner)
                if not worker.lease.is_moving:
                    board.waking.wake_all(board.workers[name] for name in worker.lease.workers)
            case m.ShrinkKVCache():
                assert worker.lease is not None
                self._tell_to_switch(worker.lease.made_room(worker.name), worker.lease.ahead)
            case m.Save():
                saved = self._train.saves.done(task.number)
                if saved is not None:
                    board.commands.append(CheckpointSaved(saved[1].step, saved[0], str(done.result)))
            case _:
                pass

    def _save(self, event: CheckpointDue) -> None:
        versions = self._board.versions.known() if event.versions is None else event.versions
        changed = {role: version for role, version in versions.items() if event.known.get(role) != version}
        self._train.saves.add(event.step, event.directory, changed)
        self._board.commands.append(CheckpointBegun(event.step, versions))
        self._board.waking.wake_trainers()

    def _lost(self, event: WorkerLost) -> None:
        """A worker is gone; a lease that it was about to hand over does not wait for it."""
        lose(self._board, self._rollout, event)
        commands = self._board.commands
        self._board.commands = [one for one in commands if not (isinstance(one, Send) and one.worker == event.worker)]
        worker = self._board.workers[event.worker]
        self._credits.lost(worker.name)
        lease = worker.lease
        if lease is not None:
            to = lease.moving_to
            self._tell_to_switch(lease.left(worker.name), to)
            if to and not lease.is_moving:
                self._board.waking.wake_all(self._board.workers[name] for name in lease.workers)

    def _joined(self, worker: WorkerState, incarnation: int) -> None:
        """A worker is here again, its devices as rollout left them at the beginning; if training has them now, it makes room."""
        join(self._board, self._rollout, worker.name, incarnation)
        self._credits.joined(worker.name)
        lease = worker.lease
        if lease is not None and worker.name not in lease.workers:
            lease.join(worker.name, worker.turns)
            to = lease.moving_to or lease.owner
            if to != ROLLOUT:
                self._tell_to_switch((worker.name,), to)

    def _free_room(self) -> None:
        """Tell the channels what has ended, and have generations asked again that were refused for want of room."""
        board = self._board
        if self._credits.is_used:
            for command in board.commands[self._num_noted :]:
                if isinstance(command, Resolve | Reject) and command.call in board.calls:
                    self._credits.over(board.calls[command.call])
                elif isinstance(command, Forgotten):
                    self._credits.forget(command.call)
            self._num_noted = len(board.commands)
            for state in self._credits.room_came():
                board.waking.feed_all(state)
                board.waking.rows_came(state)

    def _give_work(self) -> None:
        """Hand out what can be done now. If nothing is under way, and a policy or a full channel holds samples back, it is overruled."""
        self._ask()
        if not self._board.tasks and self._credits.blocked:
            self._overdraw()
        if not self._board.tasks and self._board.active and self._board.placings.force():
            self._ask()

    def _overdraw(self) -> None:
        """Let the earliest generation that was refused room, and can run, begin with one unit."""
        board, credits = self._board, self._credits
        for _, state in sorted(credits.blocked.items()):
            if state.has_rows_to_begin:
                credits.let(state)
                board.waking.feed_all(state)
                board.waking.wake_role(state.call.role)
                self._ask()
                credits.let(None)
            if board.tasks:
                return

    def _ask(self) -> None:
        """Ask those who may have something new to do; then the leases of which one was asked."""
        waking = self._board.waking
        self._free_room()
        while waking.has_any:  # Again if, while a lease was looked at, a policy has dealt something to others.
            leases: dict[str, Lease] = {}
            while (worker := waking.next()) is not None:
                self._dispatch(worker)
                if worker.lease is not None:
                    leases[worker.lease.name] = worker.lease
            for lease in leases.values():
                self._hand_over(lease)
        self._functions.hand_out()
        if self._credits.is_used and len(self._board.commands) > self._num_noted:  # Calls without rows end here.
            self._free_room()
            if self._board.waking.has_any:
                self._give_work()

    def _dispatch(self, worker: WorkerState) -> None:
        """Give a worker all that it can take now."""
        while (offer := self._offer(worker)) is not None:
            offer()

    def _offer(self, worker: WorkerState) -> Offer | None:
        """The next thing that a worker could do: of all that it hosts, or of what has its lease."""
        if worker.is_lost:
            return None
        turn = worker.lease.turn if worker.lease is not None else None
        for kind, desk in self._desks_of[worker.place]:
            roles = worker.roles_at(turn, kind)
            if roles:
                offer = desk.offer(worker, roles)
                if offer is not None:
                    return offer
        return None

    def _hand_over(self, lease: Lease) -> None:
        """When the owner has no task in hand and none to begin, the lease goes to the next turn that has."""
        to = self._next_turn(lease)
        if to:
            self._tell_to_switch(lease.move(to), to)
            if not lease.is_moving:  # Whoever had to leave is lost, and those who come are there.
                self._board.waking.wake_all(self._board.workers[name] for name in lease.workers)
        elif lease.is_idle and not lease.is_moving:
            for name in lease.workers:
                self._board.waking.passed_over(self._board.workers[name])

    def _next_turn(self, lease: Lease) -> str:
        """Empty: it stays where it is."""
        if not lease.is_idle or lease.is_moving:
            return ""
        workers = [self._board.workers[name] for name in lease.workers]
        return next((turn for turn in lease.others if any(self._has_work(worker, turn) for worker in workers)), "")

    def _has_work(self, worker: WorkerState, turn: str) -> bool:
        kind = kind_of(turn)
        roles = worker.roles_at(turn, kind)
        return bool(roles) and self._desks[kind].offer(worker, roles) is not None

    def _tell_to_condense(self, workers: Iterable[str]) -> None:
        for name in workers:
            self._board.start(self._board.workers[name], "rollout", m.ShrinkKVCache(self._board.next_task(), -1))

    def _tell_to_switch(self, workers: Iterable[str], to: str) -> None:
        for name in workers:
            self._board.start(self._board.workers[name], "train", m.Switch(self._board.next_task(), -1, to))
