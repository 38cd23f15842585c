"""Decide what each worker does next: events in, commands out; a pure state machine without I/O, clock or threads.

    CallAdded, Sourced, Finished, TaskDone, ... --Scheduler.handle--> Send, Resolve, Reject, ...

The controller feeds it what has happened; the simulator and tests feed it what might happen. It decides order, place and time and nothing
else, within what the plan allows for each call (`m2flow.micro.protocol.plan`).

The state is one data structure (`m2flow.micro.scheduler.state`), and everything that changes is in it. Deciders read and change it, and
append their commands there, in one order over all of them. They do not know each other, save that the lifecycle of calls asks those that
have a say in it, and that rollout and training ask for weights to load and publish. This module alone composes them and passes each event
through them, in this order:

    take the event
        what it says of calls and rows       CallLifecycle, Recovery, PolicyDispatches, Credits, time_out
        what it says of weights, saves       EngineWeights, WeightSyncDispatch, Saves
        whether devices are due              GpuBorrowing, EarlyOnload, LeaseTurns
    give work
        generations that have room now       Credits
        each worker that may want some       RolloutDispatch, TrainDispatch, FunctionDispatch, in the turn of its lease;
                                             the first two ask WeightSyncDispatch first
        each lease that is idle              LeaseTurns
        function processes                   FunctionDispatch
    forget calls                             CallLifecycle

A change of the state notes the workers that may have something new to do. These are offered work until none takes any, and a lease whose
owner has nothing to do goes to the next turn that has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from m2flow.errors import error_from_record
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
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.update_semantics import UpdateSteps
from m2flow.micro.protocol.worker_state import ROLLOUT, Lease, TaskState, WorkerState, kind_of
from m2flow.micro.scheduler.backpressure import Channel
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle, Wait, waits_of
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.dispatch import FunctionDispatch, RolloutDispatch, TrainDispatch
from m2flow.micro.scheduler.leases import EarlyOnload, GpuBorrowing, LeaseTurns
from m2flow.micro.scheduler.partial_rollouts import time_out
from m2flow.micro.scheduler.ready_queues import Offer
from m2flow.micro.scheduler.scheduling_policy_dispatch import EpisodeMoves, PolicyDispatches
from m2flow.micro.scheduler.state import NOTHING, Ablation, SchedulerState
from m2flow.micro.scheduler.weights import WeightSyncDispatch
from m2flow.micro.scheduler.worker_failure import Recovery, record_prefixes


class Dispatch(Protocol):
    """Offers a worker its next task of one kind of work (rollout, training, functions), for the roles whose engines may run now."""

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None: ...


class Scheduler:
    """Takes events and answers the commands that follow from them."""

    def __init__(
        self,
        plan: Plan,
        *,
        deterministic: bool = False,
        restored: Mapping[str, int] | None = None,
        max_attempts: int = 3,
        ablation: Ablation = NOTHING,
    ) -> None:
        """
        Args:
            deterministic: micro-batches are filled in the order of identity, not of arrival.
            restored: role -> version of the weights that its trainer begins with; 0 where none is given.
            max_attempts: workers that may be lost with a row before the run fails.
            ablation: knowledge and freedom that no real run has, for the simulator.
        """
        self._state = SchedulerState(
            plan, deterministic=deterministic, restored=restored or {}, max_attempts=max_attempts, ablation=ablation
        )
        self._policies = PolicyDispatches(self._state)
        self._moves = EpisodeMoves(self._state)
        self._recovery = Recovery(self._state)
        self._calls = CallLifecycle(self._state)
        self._borrowing = GpuBorrowing(self._state)
        self._early_onload = EarlyOnload(self._state)
        self._turns = LeaseTurns(self._state, self._has_work)
        self._weights = WeightSyncDispatch(self._state)
        self._rollout = RolloutDispatch(self._state)
        self._train = TrainDispatch(self._state)
        self._functions = FunctionDispatch(self._state)
        self._dispatches: dict[str, Dispatch] = {"rollout": self._rollout, "train": self._train, "function": self._functions}
        self._dispatches_of = [
            [(kind, dispatch) for kind, dispatch in self._dispatches.items() if w.roles[kind]] for w in self._state.workers.values()
        ]

    def handle(self, *events: Event) -> list[Command]:
        """Process one event, or several that arrived together, and return the commands that follow.

        Raises:
            M2FlowError: a task that belongs to no call failed (weights, a lease, a save), so the run can't continue; or a worker was lost
                that no other can replace (`m2flow.micro.scheduler.worker_failure`).
        """
        state = self._state
        state.commands, state.num_commands_credited = [], 0
        may_give_work = False
        for event in events:
            self._take(event)
            may_give_work = may_give_work or type(event) is not Released
        if may_give_work:
            self._give_work()
        self._calls.forget_unreachable()
        return state.commands

    def _take(self, event: Event) -> None:
        # By exact type: to be told that an object is no message of a kind takes `isinstance` ten times as long.
        state = self._state
        if type(event) is FromWorker:
            if not state.workers[event.worker].is_lost:
                self._from_worker(event.worker, event.message)
        elif type(event) is CallAdded:
            self._added(event)
        elif type(event) is Released:
            self._calls.release(event.call)
        elif isinstance(event, Recalled):
            state.recalled[event.call.ordinal] = event
            self._added(event)
        elif isinstance(event, Sourced):
            self._calls.sourced(state.calls[event.call], event.ids, event.num_tokens)
        elif isinstance(event, Wanted):
            self._calls.want(state.calls[event.call])
        elif isinstance(event, TimedOut):
            late = time_out(state, event)
            if late is not None:
                self._policies.gave_up(late)
                self._calls.gave_up(late)
        elif isinstance(event, CheckpointDue):
            self._save(event)
        elif isinstance(event, Stopping):
            self._calls.wind_down()
        elif isinstance(event, Restored):
            for report in self._recovery.restore(event):
                self._calls.restored(report)
        elif isinstance(event, BorrowThresholds):
            self._borrowing.set_until(event.shares)
        elif isinstance(event, WorkerLost):
            self._lost(event)
        else:
            assert isinstance(event, WorkerJoined)
            self._joined(state.workers[event.worker], event.incarnation)

    @property
    def has_calls(self) -> bool:
        """Whether some call is unfinished."""
        return bool(self._state.active)

    @property
    def is_idle(self) -> bool:
        """Whether no call is unfinished and no task is in flight."""
        return not self._state.active and not self._state.tasks

    def num_rows(self, ordinal: int) -> int:
        """Count the rows in the result of a finished call."""
        return len(self._state.calls[ordinal].result or ())

    def sent_by(self, worker: str) -> dict[str, dict[int, list[int]]]:
        """Find the rows made by a worker that were sent elsewhere, as far as is known: destination -> call -> rows."""
        return self._state.rows.sent_by(worker)

    def is_vital(self, worker: str) -> bool:
        """Whether losing a worker ends the run, since it alone has trained weights or a role's state."""
        known = self._state.workers[worker]
        return bool(known.roles["train"] or known.states)

    def holds(self, versions: Mapping[str, int]) -> bool:
        """Whether the trainers hold exactly these versions, counting every role that was trained or copied to."""
        trained = self._state.versions
        return all(trained.trained(role) == versions.get(role, 0) for role in {*trained.known(), *versions})

    def running(self) -> dict[str, str]:
        """Describe what each busy worker does now."""
        return {worker.name: ", ".join(worker.doing) for worker in self._state.workers.values() if worker.doing}

    def updating(self) -> UpdateSteps | None:
        """Return how far the first update is that has begun and takes several optimiser steps."""
        for call_state in self._state.active.values():
            update = call_state.update
            if update is not None and update.has_begun and update.num_steps > 1:
                return UpdateSteps(call_state.call.name, update.num_stepped, update.num_steps, update.loss)
        return None

    def waiting(self) -> list[str]:
        """Describe what each unfinished call waits for, one line a call."""
        lines = []
        for call_state in self._state.active.values():
            names = [self._state.calls[c].call.name for c in sorted(call_state.waits_for) if c in self._state.calls]
            after = f", after {', '.join(names)}" if names else ""
            lines.append(
                f"{call_state.call.name} ({call_state.call.site}): {len(call_state.done)} of {len(call_state.ids)} rows done{after}"
            )
        return lines

    def waits(self) -> list[Wait]:
        """Build the wait graph of all unfinished calls (`m2flow.micro.scheduler.call_lifecycle`)."""
        return waits_of(self._state)

    def channels(self) -> list[Channel]:
        """Return the channels with a limit, with their current use."""
        return list(self._state.credits.channels.values())

    # ---- events

    def _added(self, event: CallAdded | Recalled) -> None:
        call_state = self._calls.add_call(event.call, event.stage)
        self._state.credits.added(call_state, [ref.call for _, ref in event.call.inputs])
        if event.call.engine == "train":
            self._borrowing.trains()
            self._early_onload.look()

    def _from_worker(self, name: str, message: m.WorkerReport) -> None:
        """Process a worker's report. Duplicate and late reports change nothing."""
        state = self._state
        if type(message) is m.Finished:
            call_state = state.calls.get(message.call)
            if call_state is not None:
                self._finished(call_state, name, message)
            if message.ends:
                self._end_task(message.task)
        elif type(message) is m.TaskDone:
            if (ended := self._end_task(message.task)) is not None:
                self._task_done(state.workers[name], ended.message, message)
        elif isinstance(message, m.TaskFailed):
            if (ended := self._end_task(message.task)) is not None:
                self._task_failed(ended.message, message)
        elif isinstance(message, m.Load):
            self._policies.reported(name, message)
            state.ready_workers.wake(state.workers[name])
        elif isinstance(message, m.Queued):
            self._moves.queued(name, message)
        elif isinstance(message, m.Preempted):
            self._policies.preempted(message)
            for call_state, worker, rows in self._moves.preempted(name, message):
                self._rollout.begin_at(worker, call_state, rows)
        elif isinstance(message, m.Aborted | m.Flushed):
            call_state = state.calls.get(message.call)
            if call_state is not None:
                record_prefixes(state, call_state, name if isinstance(message, m.Aborted) else LEDGER, message)

    def _finished(self, call_state: CallState, worker: str, message: m.Finished) -> None:
        """Take in finished rows of a call."""
        state = self._state
        if call_state.carry is not None:
            call_state.carry.finished(message)
        is_under_policy = call_state.is_under_policy
        if is_under_policy:
            self._policies.ended(call_state, message.ids, message.num_generated)
        task = state.tasks.get(message.task)
        sent_to = self._recovery.sent_to(task.message) if task is not None else ()
        num_new = self._calls.rows_done(call_state, worker, message.ids, message.num_tokens, message.dropped, sent_to)
        if task is not None and task.rows_left:
            state.samples_ended(message.task, num_new)
        elif task is not None and message.took_us:
            state.functions.took(task, message.took_us)
        if state.credits.is_used:
            state.credits.settle(call_state, dict(zip(message.ids, message.num_tokens, strict=True)))
            state.credits.taken(message.call, (*message.ids, *message.dropped))
        if is_under_policy:
            self._policies.deal(call_state)
        self._borrowing.ended(call_state)
        self._early_onload.look()

    def _end_task(self, number: int) -> TaskState | None:
        """Remove an ended task from its worker; None if it had ended before."""
        ended = self._state.end_task(number)
        if ended is not None and type(ended.message) in (m.Generate, m.EmbedPrompts):
            self._calls.task_ended(ended.message.call)
        return ended

    def _task_failed(self, task: m.Task, failed: m.TaskFailed) -> None:
        call_state = self._state.calls.get(failed.call)
        if failed.call < 0:
            raise error_from_record(failed.error)
        if call_state is not None:
            error = error_from_record(failed.error).located(call_state.call.site.describe())
            self._calls.task_failed(call_state, task, failed.row, error)

    def _task_done(self, worker: WorkerState, task: m.Task, done: m.TaskDone) -> None:
        state = self._state
        call_state = state.calls.get(task.call)
        if isinstance(task, m.Accumulate):
            state.credits.taken(task.call, task.ids)
        match task:
            case m.Accumulate() | m.Apply() if call_state is not None and call_state.failure is not None:
                self._calls.accumulated(call_state)
            case m.Apply(is_last=True) | m.CopyWeights():
                if call_state is not None and not call_state.is_over:
                    self._calls.complete(call_state, done.result)
            case m.Apply() if call_state is not None and call_state.update is not None:
                call_state.update.num_stepped += 1
                call_state.update.loss = float(done.result.get("loss", math.nan)) if isinstance(done.result, dict) else math.nan
            case m.RunFunction():
                if call_state is not None and not call_state.is_over and not call_state.call.is_aligned:
                    self._calls.complete(call_state, done.result)
            case m.PublishWeights(role=role, version=version):
                assert done.manifest is not None
                self._weights.published(role, version, done.manifest)
            case m.LoadWeights():
                state.engine_weights.loaded(worker, task)
                state.speaks_again(worker)
            case m.Switch(to=to):
                self._turns.switched(worker, to)
            case m.EmbedPrompts():
                self._policies.embedded(worker.name, task, done.embeddings)
            case m.ShrinkKVCache():
                self._turns.shrunk_cache(worker)
            case m.Save():
                saved = self._state.saves.done(task.number)
                if saved is not None and done.result is not None:
                    state.commands.append(CheckpointSaved(saved[1].step, saved[0], str(done.result)))
            case _:
                pass

    def _save(self, event: CheckpointDue) -> None:
        versions = self._state.versions.known() if event.versions is None else event.versions
        changed = {role: version for role, version in versions.items() if event.known.get(role) != version}
        if event.versions is not None:  # The run has stopped, and this is its last checkpoint.
            self._state.saves.drop()
        self._state.saves.add(event.step, event.directory, changed, behind=event.behind)
        self._state.commands.append(CheckpointBegun(event.step, versions))
        self._state.ready_workers.wake_trainers()

    def _lost(self, event: WorkerLost) -> None:
        """Remove a lost worker."""
        if self._recovery.lost(event):
            self._policies.lost(event.worker)
            self._moves.lost(event.worker)
            for message in event.unreported:
                for report in self._recovery.unreported(message):
                    self._calls.restored(report)
            for task in self._recovery.requeue_tasks(event):
                if isinstance(task, m.Generate | m.EmbedPrompts):
                    self._calls.task_ended(task.call)
            self._recovery.replace(event)
        commands = self._state.commands
        self._state.commands = [one for one in commands if not (isinstance(one, Send) and one.worker == event.worker)]
        worker = self._state.workers[event.worker]
        self._state.credits.lost(worker.name)
        self._turns.worker_lost(worker)

    def _joined(self, worker: WorkerState, incarnation: int) -> None:
        """Take in a restarted worker."""
        self._recovery.join(worker.name, incarnation)
        self._state.credits.joined(worker.name)
        self._turns.worker_joined(worker)

    # ---- work

    def _free_room(self) -> None:
        """Release the credits of calls that have ended, and ask workers again for generations that backpressure had blocked."""
        state, credits = self._state, self._state.credits
        for command in state.commands[state.num_commands_credited :]:
            if isinstance(command, Resolve | Reject) and command.call in state.calls:
                credits.over(state.calls[command.call])
            elif isinstance(command, Forgotten):
                credits.forget(command.call)
        state.num_commands_credited = len(state.commands)
        for call_state in credits.unblocked():
            state.ready_workers.feed_all(call_state)
            state.ready_workers.rows_came(call_state)

    def _give_work(self) -> None:
        """Dispatch all that can run now. If no task is in flight and only a full channel or a policy holds samples back, overrule it."""
        self._ask()
        if self._state.tasks:
            return
        if self._state.credits.blocked:
            self._overdraw()
        if not self._state.tasks and self._state.active and self._policies.force():
            self._ask()

    def _overdraw(self) -> None:
        """Let the earliest blocked generation that can run begin one unit beyond its channel's room."""
        state, credits = self._state, self._state.credits
        for _, call_state in sorted(credits.blocked.items()):
            if call_state.has_rows_to_begin:
                credits.allow_overdraft(call_state)
                state.ready_workers.feed_all(call_state)
                state.ready_workers.wake_role(call_state.call.role)
                self._ask()
                credits.allow_overdraft(None)
            if state.tasks:
                return

    def _ask(self) -> None:
        """Offer work to every worker that may have something new to do; then see whether their leases should move."""
        ready_workers, credits = self._state.ready_workers, self._state.credits
        if credits.is_used:
            self._free_room()
        while ready_workers.has_any:  # Looking at a lease may have a policy deal samples to other workers.
            leases: dict[str, Lease] = {}
            for call_state in ready_workers.to_deal():
                self._policies.deal(call_state)
            while (worker := ready_workers.next()) is not None:
                self._dispatch(worker)
                if worker.lease is not None:
                    leases[worker.lease.name] = worker.lease
            for lease in leases.values():
                self._turns.hand_over(lease)
        self._functions.hand_out()
        if credits.is_used and len(self._state.commands) > self._state.num_commands_credited:  # Calls without rows have ended meanwhile.
            self._free_room()
            if self._state.ready_workers.has_any:
                self._give_work()

    def _dispatch(self, worker: WorkerState) -> None:
        """Give a worker tasks until it takes no more."""
        while (offer := self._offer(worker)) is not None:
            ended = offer()
            if ended is not None:
                self._calls.complete(*ended)

    def _offer(self, worker: WorkerState) -> Offer | None:
        """Find the next task for a worker: from all engines that it hosts or, under a lease, from those whose turn it is."""
        if worker.is_lost:
            return None
        turn = worker.lease.turn if worker.lease is not None else None
        for kind, dispatch in self._dispatches_of[worker.place]:
            roles = worker.roles_at(turn, kind)
            if roles:
                offer = dispatch.offer(worker, roles)
                if offer is not None:
                    return offer
        return None

    def _has_work(self, worker: WorkerState, turn: str) -> bool:
        """Whether a worker would have a task in a turn of its lease."""
        kind = kind_of(turn)
        roles = worker.roles_at(turn, kind)
        if roles and turn == ROLLOUT and self._rollout.is_awaited(worker, roles):
            return True
        return bool(roles) and self._dispatches[kind].offer(worker, roles) is not None
