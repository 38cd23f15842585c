"""Dispatch samples to rollout engines, and decide when an engine loads new weights (weight sync).

An engine has one version of the weights. A generate call runs only where a version of its window is held
(`m2flow.micro.protocol.staleness`): exactly one version, unless the flow allows older ones. An engine loads the newest version that the
trainer has when nothing runs on it and the earliest call with samples left may use that version; and under running samples if all of
their calls may use it and allow that (`kv="keep"`), and the engine can.

Samples go where the call's policy says (`m2flow.micro.scheduler.policy_dispatch`). Without one they are shared out evenly over the call's
workers, whole groups together where there is room, so that a prompt is prefilled once.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from m2flow.channels.weights import Manifest
from m2flow.macro.oversampling import keeps_cache
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.staleness import ANY_VERSION, window
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler.backpressure import Credits
from m2flow.micro.scheduler.call_state import CallState, SampleBatch, task_batches
from m2flow.micro.scheduler.policy_dispatch import PolicyDispatch
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.samples import group_key

Offer = Callable[[], None]
"""A task that a worker could start now; calling it starts it."""


class RolloutDispatch:
    """Dispatches samples and weight loads to rollout engines, and publications of weights to trainers."""

    def __init__(self, scheduler: SchedulerState, credits: Credits) -> None:
        self._state = scheduler
        self._credits = credits
        self._published: dict[str, tuple[int, Manifest]] = {}
        self._publishing: set[str] = set()
        self._num_loads: dict[str, int] = {}
        self._num_holding: dict[str, Counter[int]] = {}
        """Role -> version -> number of rollout engines that hold it."""
        self._loading: dict[tuple[str, str], int] = {}
        """(worker, role) of an engine that is loading weights -> version."""
        scheduler.can_have_weights = self.can_have_weights

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker's rollout engines of these roles."""
        for role in roles:
            found = self._offer_role(worker, role)
            if found is not None:
                return found
        return None

    def needs_loading(self, reader: CallState) -> bool:
        """Whether some rollout engine of the role still has to load weights before it can run this call."""
        if all(worker.is_lost for worker in self._state.ready_workers.hosts("rollout", reader.call.role)):
            return True  # A restarted worker has to load them first.
        return self._oldest(reader.call.role) < window(reader.call)[0]

    def publish_offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find weights of these roles that this worker's trainers should publish, since rollout engines of other workers wait for them."""
        for role in roles:
            if not self._state.ready_workers.has_others("rollout", role, worker):
                continue
            version = self._awaited(role)
            is_current = role in self._published and self._published[role][0] == version
            if version is None or is_current or role in self._publishing or self._num_loads.get(role):
                continue
            if self._oldest(role, but=worker) >= version:
                continue
            return lambda role=role, version=version: self._publish(worker, role, version)  # type: ignore[misc]
        return None

    def published(self, role: str, version: int, manifest: Manifest) -> None:
        self._publishing.discard(role)
        self._published[role] = (version, manifest)
        self._state.changed()
        self._state.ready_workers.wake_role(role)

    def loaded(self, worker: WorkerState, message: m.LoadWeights) -> None:
        held = self._held(message.role)
        before = worker.held.get(message.role, 0)
        held[before] -= 1
        if not held[before]:
            del held[before]
        held[message.version] += 1
        worker.held[message.role] = message.version
        self._state.ready_workers.wake_trainers(message.role)
        self._loading.pop((worker.name, message.role), None)
        if message.manifest is not None:
            self._num_loads[message.role] -= 1

    def lost(self, worker: WorkerState) -> None:
        """Remove a lost worker: nobody waits for it to load weights."""
        for role in worker.roles["rollout"]:
            held = self._held(role)
            held[worker.held.get(role, 0)] -= 1
            held[ANY_VERSION] += 1
            worker.held[role] = ANY_VERSION
            self._loading.pop((worker.name, role), None)
            self._state.ready_workers.wake_trainers(role)

    def joined(self, worker: WorkerState) -> None:
        """Take in a restarted worker, which holds the weights that the run began with."""
        for role in worker.roles["rollout"]:
            held = self._held(role)
            held[ANY_VERSION] -= 1
            held[0] += 1
            worker.held[role] = 0

    def has_version_for(self, state: CallState) -> bool:
        """Whether some engine holds, or will be able to load, a version that a generation may use."""
        hosts = self._state.ready_workers.hosts("rollout", state.call.role)
        return any(self.can_have_weights(worker, state) for worker in hosts if worker.returns or not worker.is_lost)

    def can_have_weights(self, worker: WorkerState, state: CallState) -> bool:
        """Whether this worker's engine holds or is loading a version that a generation may use, or will be able to load one."""
        role, (oldest, newest) = state.call.role, window(state.call)
        held = 0 if worker.is_lost else self._loading.get((worker.name, role), worker.held.get(role, 0))
        if held >= oldest:
            return held <= newest
        trained = self._state.versions.trained(role)
        next_trained = self._state.versions.newest(role) + 1 if trained is None else trained
        return next_trained <= newest or (role in self._published and _may_use(state, self._published[role][0]))

    def unloaded(self, message: m.LoadWeights) -> None:
        """Forget a load that will not happen."""
        if message.manifest is not None:
            self._num_loads[message.role] -= 1

    def _offer_role(self, worker: WorkerState, role: str) -> Offer | None:
        first = self._first(role)
        if (worker.name, role) in self._loading:
            return None
        under = self._load_under(worker, role, first)
        if under is not None or first is None:
            return under
        borrowing = self._state.borrowing
        if borrowing.is_used and borrowing.passes(worker, first):
            return None
        held = worker.held.get(role, 0)
        newest = self._loadable(worker, role, first)
        if not _may_use(first, held) or (newest > held and not worker.num_tasks["rollout"]):
            is_sure = first.is_prepared and not first.waits_for
            return self._load_offer(worker, role, newest) if newest > held and is_sure else None
        for state in self._state.open.started("rollout", role):
            if not state.ready or not _may_use(state, held) or (borrowing.is_used and borrowing.passes(worker, state)):
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

    def _first(self, role: str) -> CallState | None:
        """Find the earliest call with samples left whose oldest version exists.

        One without is passed over: the version that it waits for may depend on later calls.
        """
        known, first = self._state.open.first(role)
        if not known:
            newest = self._state.versions.newest(role)
            first = self._state.open.set_first(role, lambda state: window(state.call)[0] <= newest)
        return first

    def _held(self, role: str) -> Counter[int]:
        if role not in self._num_holding:
            self._num_holding[role] = Counter(worker.held.get(role, 0) for worker in self._state.ready_workers.hosts("rollout", role))
        return self._num_holding[role]

    def _oldest(self, role: str, but: WorkerState | None = None) -> int:
        """Find the oldest version that a rollout engine of the role holds, on workers other than `but`."""
        held = self._held(role)
        mine = but.held.get(role, 0) if but is not None and role in but.roles["rollout"] else None
        return min((version for version, count in held.items() if count > (version == mine)), default=ANY_VERSION)

    def _loadable(self, worker: WorkerState, role: str, first: CallState) -> int:
        """Find the newest version that this worker could load now and the call may use; otherwise the one that it holds."""
        held, found = worker.held.get(role, 0), self._offered_version(worker, role)
        return found if found is not None and found > held and _may_use(first, found) else held

    def _offered_version(self, worker: WorkerState, role: str) -> int | None:
        """Find the version that this worker could load now: its own trainer's, or the published one."""
        if role in worker.roles["train"]:
            return self._state.versions.trained(role)
        return self._published[role][0] if role in self._published else None

    def _load_under(self, worker: WorkerState, role: str, first: CallState | None) -> Offer | None:
        """Find new weights to load under an engine's running samples."""
        may_keep = self._state.may_keep and role in worker.keeps_caches and worker.num_running
        version = self._offered_version(worker, role) if may_keep else None
        if version is None or version <= worker.held.get(role, 0):
            return None
        running = self._running(role, worker.name)
        if not running or not all(_takes_under(state, version) for state in running) or (first and not _may_use(first, version)):
            return None
        return lambda: self._load(worker, role, version, self._manifest(worker, role), under_requests=True)

    def _running(self, role: str, worker: str | None = None) -> list[CallState]:
        """List the role's generations with tasks in flight, on any worker or on this one."""
        calls = [state for state in self._state.active.values() if state.call.engine == "rollout" and state.call.role == role]
        return [state for state in calls if (state.tasks_at if worker is None else worker in state.tasks_at)]

    def _manifest(self, worker: WorkerState, role: str) -> Manifest | None:
        return None if role in worker.roles["train"] else self._published[role][1]

    def _load_offer(self, worker: WorkerState, role: str, version: int) -> Offer | None:
        if worker.num_tasks["rollout"]:
            return None
        return lambda: self._load(worker, role, version, self._manifest(worker, role))

    def _load(self, worker: WorkerState, role: str, version: int, manifest: Manifest | None, *, under_requests: bool = False) -> None:
        if manifest is not None:
            self._num_loads[role] = self._num_loads.get(role, 0) + 1
        self._loading[worker.name, role] = version
        self._state.changed()
        self._state.start(worker, "rollout", m.LoadWeights(self._state.next_task(), -1, role, version, manifest, under_requests))

    def _publish(self, worker: WorkerState, role: str, version: int) -> None:
        self._publishing.add(role)
        self._published.pop(role, None)  # The new weights overwrite the old ones in shared memory.
        self._state.changed()
        self._state.start(worker, "train", m.PublishWeights(self._state.next_task(), -1, role, version))

    def _awaited(self, role: str) -> int | None:
        """Find the trainer's version, if the earliest generate call with samples left may use it, or running samples may take it."""
        first, trained = self._first(role), self._state.versions.trained(role)
        if not trained:
            return None
        if first is not None and not first.waits_for and first.is_prepared and _may_use(first, trained):
            return trained
        may_keep = self._state.may_keep and any(role in worker.keeps_caches for worker in self._state.ready_workers.hosts("rollout", role))
        return trained if may_keep and any(_takes_under(state, trained) for state in self._running(role)) else None

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


def _takes_under(state: CallState, version: int) -> bool:
    """Whether running samples of a call may continue with this version."""
    return keeps_cache(state.call.options) and _may_use(state, version)


def _may_use(state: CallState, version: int) -> bool:
    """Whether a version is in the window of a generation."""
    oldest, newest = window(state.call)
    return oldest <= version <= newest
