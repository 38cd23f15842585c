"""Dispatch samples to rollout engines, where a version of the weights is held or loaded first that their call may use.

Samples go where the call's policy says (`m2flow.micro.scheduler.policy_dispatch`). Without one they are shared out evenly over the call's
workers, whole groups together where there is room, so that a prompt is prefilled once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from m2flow.macro.oversampling import keeps_cache
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler import weights
from m2flow.micro.scheduler.backpressure import Credits
from m2flow.micro.scheduler.call_state import CallState, SampleBatch, task_batches
from m2flow.micro.scheduler.policy_dispatch import PolicyDispatch
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.task_queues import Offer
from m2flow.samples import group_key


class RolloutDispatch:
    """Dispatches samples and weight loads to rollout engines."""

    def __init__(self, scheduler: SchedulerState, credits: Credits) -> None:
        self._state = scheduler
        self._credits = credits

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker's rollout engines of these roles."""
        for role in roles:
            found = self._offer_role(worker, role)
            if found is not None:
                return found
        return None

    def _offer_role(self, worker: WorkerState, role: str) -> Offer | None:
        if self._state.engine_weights.is_loading(worker, role):
            return None
        first = weights.first_generation(self._state, role)
        under = weights.load_under_offer(self._state, worker, role, first)
        if under is not None or first is None:
            return under
        borrowing = self._state.borrowing
        if borrowing.is_used and borrowing.passes(worker, first):
            return None
        held = worker.held.get(role, 0)
        newest = weights.loadable(self._state, worker, role, first)
        if not weights.may_use(first, held) or (newest > held and not worker.num_tasks["rollout"]):
            is_sure = first.is_prepared and not first.waits_for
            return weights.load_offer(self._state, worker, role, newest) if newest > held and is_sure else None
        for state in self._state.open.started("rollout", role):
            if not state.ready or not weights.may_use(state, held) or (borrowing.is_used and borrowing.passes(worker, state)):
                continue
            if state.policy_dispatch is not None:
                room = min(state.stage.chunk - worker.num_running, state.num_may_begin)
                if room > 0 and self._has_samples_for(worker, state.policy_dispatch):
                    return lambda state=state, room=room: self._deal_out(worker, state, room)  # type: ignore[misc]
            else:
                quota = self._quota(worker, state)
                if quota > 0:
                    return lambda state=state, quota=quota: self._hand_out(worker, state, quota)  # type: ignore[misc]
        return None

    def _quota(self, worker: WorkerState, state: CallState) -> int:
        """Count the samples of a call that this worker may take now: its even share of what is left, if there is room."""
        room = state.stage.chunk - worker.num_running
        quota = min(room, state.num_may_begin, state.share - state.out_at.get(worker.name, 0))
        return self._credits.num_may_begin(state, worker.name, quota)

    def _has_samples_for(self, worker: WorkerState, dispatch: PolicyDispatch) -> bool:
        """Whether a call's policy has samples for this worker. Other workers that it assigned samples to are woken."""
        if dispatch.admits is None and self._credits.is_limited(dispatch.state):
            dispatch.admits = functools.partial(self._credits.admit, dispatch.state)
        found = dispatch.has_samples_for(worker)
        self._state.ready_workers.wake_all(other for other in dispatch.dealt_to() if other is not worker)
        return found

    def _deal_out(self, worker: WorkerState, state: CallState, room: int) -> None:
        assert state.policy_dispatch is not None
        rows = state.policy_dispatch.take(worker, room)
        state.num_begun += len(rows)
        self._state.handed_out(state)
        self._begin(worker, state, rows)

    def _hand_out(self, worker: WorkerState, state: CallState, quota: int) -> None:
        ready = itertools.islice(state.ready, quota - 1, None)
        group = group_key(next(ready))
        more = sum(1 for _ in itertools.takewhile(lambda row: group_key(row) == group, ready))
        self._begin(worker, state, self._state.hand_out(state, min(quota + more, max(quota, state.stage.chunk))))

    def _begin(self, worker: WorkerState, state: CallState, rows: list[int]) -> None:
        self._credits.reserve(state, rows, worker.name)
        self._state.partial_rollouts.handed_out(state, rows, worker.held.get(state.call.role, 0))
        for batch in task_batches(state.call.ordinal, state.prefixes, rows, carries=state.carry is not None):
            self._start(worker, state, batch)

    def _start(self, worker: WorkerState, state: CallState, batch: SampleBatch) -> None:
        drawn, stopped_by, rows, had = batch
        scheduler, prompts = self._state, []
        if stopped_by >= 0:
            scheduler.bring(stopped_at(stopped_by), rows, worker.name)
        else:
            drawing = scheduler.calls[drawn]
            prompts = drawing.prompts_of(rows)
            scheduler.bring(drawing.aligned_inputs[0], dict.fromkeys(prompts), worker.name)
            self._credits.taken(drawn, prompts)
        scheduler.introduce(drawn, worker.name)
        forward_to, spills = list(state.stage.forward_to), state.stage.spills
        task = m.Generate(scheduler.next_task(), state.call.ordinal, rows, prompts, forward_to, drawn, stopped_by, had, spills)
        scheduler.start(worker, "rollout", task, rows=len(rows))
        if keeps_cache(state.call.options):
            scheduler.ready_workers.wake_trainers(state.call.role)  # Its samples may take newer weights while they run.
