"""Dispatch training: micro-batches as groups come in, optimiser steps, log-probabilities, weights to publish, checkpoints.

One worker trains a role. Its updates go in program order, each from the weights that the one before it left. A step that would replace
weights waits until every earlier reader of them has had them: the rollout engines have loaded them, or hold older ones that suffice, and
log-probabilities and copies are done.

A checkpoint has each role at one point in program order, though trainers reach it at different times:

    CheckpointDue -> Save to the trainer of each role, when it holds the role's version at that point of the program -> CheckpointSaved

A role's trainer saves after the last write before the point and before the next one; nothing else waits. A part that is written while
training goes on is reported by the worker itself (`PartWritten`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.update_semantics import UpdateTally
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler import weights
from m2flow.micro.scheduler.call_state import CallState, MicroBatch, MinibatchEnd
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.task_queues import Ended, Offer


@dataclass(frozen=True)
class PendingSave:
    """One role's part of a checkpoint that is yet to be saved."""

    step: int
    version: int
    """The version of the weights to save."""
    path: str
    behind: bool
    """Whether it may be written while training goes on."""


@final
class Saves:
    """The checkpoint parts that are yet to be saved, by role, the oldest first."""

    def __init__(self) -> None:
        self._due: dict[str, deque[PendingSave]] = {}
        self._running: dict[int, tuple[str, PendingSave]] = {}
        """Task -> role and the part that it saves."""

    def add(self, step: int, directory: str, versions: Mapping[str, int], *, behind: bool) -> None:
        """Add a checkpoint: these roles are to save these versions."""
        for role, version in versions.items():
            self._due.setdefault(role, deque()).append(PendingSave(step, version, f"{directory}/{role}", behind))

    def drop(self) -> None:
        """Drop what has not begun: the versions that it waits for will never come."""
        self._due.clear()

    def first(self, role: str) -> PendingSave | None:
        """Return what a role has to save next."""
        due = self._due.get(role)
        return due[0] if due else None

    def holds(self, call: Call) -> bool:
        """Whether a write of weights would replace what has yet to be saved."""
        due = self.first(call.role)
        return due is not None and any(effect.version > due.version for effect in call.writes)

    def begin(self, role: str, number: int) -> m.Save:
        """Create the task that saves the role's next part."""
        due = self._due[role].popleft()
        self._running[number] = role, due
        return m.Save(number, -1, role, due.path, seals=True, step=due.step if due.behind else -1)

    def done(self, number: int) -> tuple[str, PendingSave] | None:
        """Return the role and the part that a task has saved; None for any other task."""
        return self._running.pop(number, None)


_MAX_QUEUED = 2
"""Tasks that a trainer has at a time: one running, and one queued to begin at once."""


class TrainDispatch:
    """Dispatches training tasks to the trainers."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.saves = Saves()

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker's train engines of these roles."""
        if worker.num_tasks["train"] >= _MAX_QUEUED:
            return None
        publish = self._publish_offer(worker, roles)
        if publish is not None:
            return publish
        save = self._save_offer(worker, roles)
        if save is not None:
            return save
        for call_state in self._started(roles):
            found = self._offer_call(worker, call_state)
            if found is not None:
                return found
        return None

    def _publish_offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find weights of these roles that this worker's trainers should publish, since rollout engines of other workers wait for them.

        Nobody may still load what was published before: the new weights overwrite the old ones in shared memory.
        """
        state = self._state
        for role in roles:
            if not state.ready_workers.has_others("rollout", role, worker):
                continue
            version = self._awaited(role)
            if version is None or not state.engine_weights.may_publish(role, version):
                continue
            if state.engine_weights.oldest(role, but=worker) >= version:
                continue
            return lambda role=role, version=version: self._publish(worker, role, version)  # type: ignore[misc]
        return None

    def _awaited(self, role: str) -> int | None:
        """Find the trainer's version, if the earliest generate call with samples left may use it, or running samples may take it."""
        state = self._state
        first, trained = state.first_generation(role), state.versions.trained(role)
        if not trained:  # None: an update is under way; 0: every engine begins with these.
            return None
        if first is not None and not first.waits_for and first.is_prepared and weights.may_use(first, trained, role):
            return trained
        may_keep = state.may_keep and any(role in worker.keeps_caches for worker in state.ready_workers.hosts("rollout", role))
        return trained if may_keep and any(weights.takes_under(call_state, trained, role) for call_state in state.running(role)) else None

    def _publish(self, worker: WorkerState, role: str, version: int) -> None:
        self._state.engine_weights.publishing(role)
        self._state.engines_changed()
        self._state.start(worker, "train", m.PublishWeights(self._state.next_task(), -1, role, version))

    def _save_offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find a checkpoint part of a version that this worker holds now."""
        for role in roles:
            due = self.saves.first(role)
            if due is not None and self._state.versions.trained(role) == due.version:
                return lambda role=role: self._save(worker, role)  # type: ignore[misc]
        return None

    def _save(self, worker: WorkerState, role: str) -> None:
        self._state.start(worker, "train", self.saves.begin(role, self._state.next_task()))

    def _started(self, roles: Sequence[str]) -> Iterable[CallState]:
        """Iterate over the calls of these roles that wait for nothing, in program order."""
        lists = [self._state.open.started("train", role) for role in roles]
        return lists[0] if len(lists) == 1 else heapq.merge(*lists, key=lambda call_state: call_state.call.ordinal)

    def _offer_call(self, worker: WorkerState, call_state: CallState) -> Offer | None:
        if call_state.update is not None:
            return self._update_offer(worker, call_state)
        if call_state.call.method == "copy_of":
            return None if call_state.tasks_at or not self._may_copy_into(call_state) else lambda: self._copy(worker, call_state)
        return (lambda: self._logprobs(worker, call_state)) if call_state.ready else None

    def _update_offer(self, worker: WorkerState, call_state: CallState) -> Offer | None:
        assert call_state.update is not None
        if not call_state.ids:
            # No rows to train on: the weights of the new version equal the old.
            return (lambda: Ended(call_state, UpdateTally().metrics())) if self._may_step(call_state) else None
        step = call_state.update.next(is_idle=worker.num_tasks["train"] == 0)
        if step is None or (isinstance(step, MinibatchEnd) and not self._may_step(call_state)):
            return None
        return lambda: self._update(worker, call_state, step)

    def _may_step(self, call_state: CallState) -> bool:
        """Whether every earlier reader of the weights that the update replaces has had them, and so has a due checkpoint."""
        if self.saves.holds(call_state.call):
            return False
        for reader in self._state.versions.reads_before(call_state.call):
            if reader.call.engine != "rollout" or self._state.engine_weights.needs_loading(reader, call_state.call.role):
                return False
        return True

    def _may_copy_into(self, call_state: CallState) -> bool:
        """Whether nothing needs the weights that a copy replaces any more: log-probabilities by an older reference, a checkpoint."""
        return not self.saves.holds(call_state.call) and next(self._state.versions.reads_before(call_state.call), None) is None

    def _update(self, worker: WorkerState, call_state: CallState, step: MicroBatch | MinibatchEnd) -> None:
        assert call_state.update is not None
        call_state.update.take(step)
        number, call = self._state.next_task(), call_state.call
        if isinstance(step, MicroBatch):
            self._state.bring_inputs(call_state, step.ids, worker.name)
            self._state.start(worker, "train", m.Accumulate(number, call.ordinal, list(step.ids), step.epoch, step.minibatch))
        else:
            self._state.versions.step_dispatched(call.role)
            self._state.engines_changed()
            self._state.start(worker, "train", m.Apply(number, call.ordinal, step.is_last, call.writes[0].version))

    def _copy(self, worker: WorkerState, call_state: CallState) -> None:
        self._state.start(worker, "train", m.CopyWeights(self._state.next_task(), call_state.call.ordinal))

    def _logprobs(self, worker: WorkerState, call_state: CallState) -> None:
        count, filled = 0, 0
        for row in call_state.ready:
            filled += call_state.num_tokens[row]
            if count and filled > call_state.stage.token_budget:
                break
            count += 1
        rows = self._state.hand_out(call_state, count)
        self._state.bring_inputs(call_state, rows, worker.name)
        task = m.RunFunction(self._state.next_task(), call_state.call.ordinal, rows, list(call_state.stage.forward_to))
        self._state.start(worker, "train", task)
