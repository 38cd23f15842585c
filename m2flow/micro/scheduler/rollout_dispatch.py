"""Dispatch samples to rollout engines, where a version of the weights is held or loaded first that their call may use.

Samples go where the call's scheduling policy says (`m2flow.micro.scheduler.scheduling_policy_dispatch`). Without one they are shared out
evenly over the call's workers, whole groups together where there is room, so that a prompt is prefilled once. Of branches of episodes a
worker takes first those whose parents it has played, since its engine may have their tokens in its cache.

Where several roles speak in the episodes of a call, these go where the engines of all of them hold versions that the call may use.

An engine loads the newest version that the trainer has when nothing runs on it and the earliest call with samples left may use that
version; and under running samples if all of their calls may use it and allow that (`kv="keep"`), and the engine can.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from m2flow.macro.oversampling import keeps_cache
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler import weights
from m2flow.micro.scheduler.call_state import CallState, SampleBatch, task_batches
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.task_queues import Offer
from m2flow.samples import group_key

_MOST_SEEN = 512
"""Ready branches among which a worker finds those whose parents it has played."""


class Policies(Protocol):
    """Says which samples of a generation under a scheduling policy a worker gets now."""

    def has_samples_for(self, call_state: CallState, worker: WorkerState) -> bool: ...

    def take(self, call_state: CallState, worker: WorkerState, most: int) -> list[int]: ...


class RolloutDispatch:
    """Dispatches samples and weight loads to rollout engines."""

    def __init__(self, state: SchedulerState, policies: Policies) -> None:
        self._state = state
        self._policies = policies

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
        first = self._state.first_generation(role)
        under = self._load_under_offer(worker, role, first)
        if under is not None or first is None:
            return under
        if self._state.has_given_back(worker, first):
            return None
        held = worker.held.get(role, 0)
        newest = self._state.engine_weights.loadable(worker, role, first)
        if not weights.may_use(first, held, role) or (newest > held and not worker.num_tasks["rollout"]):
            is_sure = first.is_prepared and not first.waits_for
            return self._load_offer(worker, role, newest) if newest > held and is_sure else None
        if not self._state.engine_weights.holds_for(worker, first):
            return None  # Another role that speaks in it is to load first, when nothing runs here.
        for call_state in self._state.open.started("rollout", role):
            if not call_state.ready or not self._state.engine_weights.holds_for(worker, call_state):
                continue
            if self._state.has_given_back(worker, call_state):
                continue
            if call_state.is_under_policy:
                room = min(call_state.stage.chunk - worker.num_running, call_state.num_may_begin)
                if room > 0 and self._policies.has_samples_for(call_state, worker):
                    return lambda call_state=call_state, room=room: self._give_by_policy(worker, call_state, room)  # type: ignore[misc]
            else:
                quota = self._quota(worker, call_state)
                if quota > 0:
                    return lambda call_state=call_state, quota=quota: self._give_in_order(worker, call_state, quota)  # type: ignore[misc]
        return None

    def _load_under_offer(self, worker: WorkerState, role: str, first: CallState | None) -> Offer | None:
        """Find new weights to load under an engine's running samples: all of their calls may use them and allow that (`kv="keep"`)."""
        state = self._state
        may_keep = state.may_keep and role in worker.keeps_caches and worker.num_running
        version = state.engine_weights.offered(worker, role) if may_keep else None
        if version is None or version <= worker.held.get(role, 0):
            return None
        running = state.running(role, worker.name)
        if not running or not all(weights.takes_under(call_state, version, role) for call_state in running):
            return None
        if first and not weights.may_use(first, version, role):
            return None
        return lambda: self._load(worker, role, version, under_requests=True)

    def _load_offer(self, worker: WorkerState, role: str, version: int) -> Offer | None:
        """Offer to load a version into an engine on which nothing runs."""
        return None if worker.num_tasks["rollout"] else lambda: self._load(worker, role, version)

    def _load(self, worker: WorkerState, role: str, version: int, *, under_requests: bool = False) -> None:
        state = self._state
        manifest = state.engine_weights.manifest(worker, role)
        state.engine_weights.loading(worker, role, version, manifest)
        state.engines_changed()
        state.start(worker, "rollout", m.LoadWeights(state.next_task(), -1, role, version, manifest, under_requests))

    def _quota(self, worker: WorkerState, call_state: CallState) -> int:
        """Count the samples of a call that this worker may take now: its even share of what is left, if there is room."""
        room = call_state.stage.chunk - worker.num_running
        quota = min(room, call_state.num_may_begin, call_state.share - call_state.out_at.get(worker.name, 0))
        return self._state.credits.num_may_begin(call_state, worker.name, quota)

    def _give_by_policy(self, worker: WorkerState, call_state: CallState, room: int) -> None:
        rows = self._policies.take(call_state, worker, room)
        call_state.num_begun += len(rows)
        self._state.handed_out(call_state)
        self._begin(worker, call_state, rows)

    def _give_in_order(self, worker: WorkerState, call_state: CallState, quota: int) -> None:
        if call_state.call.options.get("branches") and (near := self._near(worker, call_state, quota)):
            rows = call_state.take_these(near)
            self._state.handed_out(call_state)
            self._begin(worker, call_state, rows)
            return
        ready = itertools.islice(call_state.ready, quota - 1, None)
        group = group_key(next(ready))
        more = sum(1 for _ in itertools.takewhile(lambda row: group_key(row) == group, ready))
        self._begin(worker, call_state, self._state.hand_out(call_state, min(quota + more, max(quota, call_state.stage.chunk))))

    def _near(self, worker: WorkerState, call_state: CallState, quota: int) -> list[int]:
        """Find branches, of whole groups, whose parents were played on this worker; none: it takes others' rather than wait."""
        rows: list[int] = []
        for row in itertools.islice(call_state.ready, _MOST_SEEN):
            if len(rows) >= quota and group_key(row) != group_key(rows[-1]):
                break
            if self._state.played_at.of(call_state.prompt_of(row)) == worker.name:
                rows.append(row)
        return rows[: max(quota, call_state.stage.chunk)]

    def _begin(self, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        self._state.credits.reserve(call_state, rows, worker.name)
        if call_state.carry is not None:
            call_state.carry.begun(rows, worker.held.get(call_state.call.role, 0))
        for batch in task_batches(call_state.call.ordinal, call_state.prefixes, rows, carries=call_state.carry is not None):
            self._start(worker, call_state, batch)

    def _start(self, worker: WorkerState, call_state: CallState, batch: SampleBatch) -> None:
        drawn, stopped_by, rows, had = batch
        state, prompts = self._state, []
        if stopped_by >= 0:
            state.bring(stopped_at(stopped_by), rows, worker.name)
        else:
            drawing = state.calls[drawn]
            prompts = drawing.prompts_of(rows)
            state.bring(drawing.aligned_inputs[0], dict.fromkeys(prompts), worker.name)
            self._state.credits.taken(drawn, prompts)
        state.rows.introduce(drawn, worker.name)
        forward_to, spills = list(call_state.stage.forward_to), call_state.stage.spills
        task = m.Generate(state.next_task(), call_state.call.ordinal, rows, prompts, forward_to, drawn, stopped_by, had, spills)
        state.start(worker, "rollout", task, rows=len(rows))
        if keeps_cache(call_state.call.options):
            state.ready_workers.wake_trainers(call_state.call.role)  # Its samples may take newer weights while they run.
