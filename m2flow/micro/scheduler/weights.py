"""Weight versions and their sync: which version each trainer and engine has, who may use which, and when one is published or loaded.

    Apply, CopyWeights --> Versions (trained) --> PublishWeights --> EngineWeights (published) --> LoadWeights --> EngineWeights (held)

`Versions` knows the program's side: which call writes and reads which version, and what the trainers hold. `EngineWeights` knows the
engines' side. An engine has one version of the weights, and a generation runs only where a version of its window is held
(`m2flow.micro.protocol.staleness`), exactly one version unless the flow allows older ones.

`WeightSyncDispatch` decides when a version moves; `TrainDispatch` and `RolloutDispatch` (`m2flow.micro.scheduler.dispatch`) ask it for an
offer before they look for other work. A trainer publishes its version when engines of other workers hold older ones, the earliest
generation with samples left may use it, and nobody loads what was published before. An engine loads the newest version that it can get when
nothing runs on it and that generation may use it; and under running samples if all of their calls may use it and allow that (`kv="keep"`),
and the engine can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, final

from m2flow.channels.weights import Manifest
from m2flow.macro.graph import Call, Effect
from m2flow.macro.oversampling import keeps_cache, timeout_of
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.staleness import ANY_VERSION, window
from m2flow.micro.protocol.worker_state import ROLLOUT, WorkerState
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.ready_queues import Offer, ReadyWorkers


def may_use(call_state: CallState, version: int, role: str = "") -> bool:
    """Whether a version is in the window of a generation: of the weights of one of its speakers, by default its own role's."""
    oldest, newest = window(call_state.call, role)
    return oldest <= version <= newest


def takes_under(call_state: CallState, version: int, role: str = "") -> bool:
    """Whether running samples of a call may continue with this version."""
    return keeps_cache(call_state.call.options) and may_use(call_state, version, role)


@final
class Versions:
    """Tracks who writes and reads each resource, and which version of the weights each trainer holds. Calls are added in program order."""

    def __init__(self, restored: Mapping[str, int]) -> None:
        self._writers: dict[str, dict[int, int]] = {}
        """Resource -> version, in order -> the call that writes it, unless that is done and a newer one is known."""
        self._readers: dict[str, dict[int, CallState]] = {}
        """Resource -> unfinished calls that read it, in program order."""
        self._trained = dict(restored)
        """Role -> newest version that exists; at first the one that its trainer was restored to."""
        self._known = dict(restored)
        """Role -> version once all calls added so far are done."""
        self._replacing: set[str] = set()

    def written_for(self, call: Call) -> tuple[list[int], list[int]]:
        """Find the calls that write what a call reads: the oldest versions that suffice, and newer ones that it need not wait for.

        A writer of a version has read the one before, so it can't end before the writers of older ones, and fails with them.
        """
        needed: list[int] = []
        newer: list[int] = []
        for effect in call.reads:
            writers = self._writers.get(effect.resource)
            if writers:
                first = effect.first
                if first in writers:
                    needed.append(writers[first])
                newer += [writers[version] for version in range(first + 1, effect.version + 1) if version in writers]
        return needed, newer

    def add(self, call_state: CallState, is_done: Callable[[int], bool]) -> None:
        """Add what a call reads and writes."""
        for effect in call_state.call.reads:
            self._readers.setdefault(effect.resource, {})[call_state.call.ordinal] = call_state
        for effect in call_state.call.writes:
            if call_state.call.engine == "train":
                self._known[call_state.call.role] = effect.version
            known = self._writers.setdefault(effect.resource, {})
            while known and is_done(known[oldest := next(iter(known))]):
                del known[oldest]
            known[effect.version] = call_state.call.ordinal

    def over(self, call_state: CallState) -> None:
        """Remove the reads of a call that is done or failed."""
        for effect in call_state.call.reads:
            self._readers[effect.resource].pop(call_state.call.ordinal, None)

    def done(self, call: Call) -> None:
        """Record that a call is done: what it trained is the newest version."""
        if call.engine == "train":
            for effect in call.writes:
                self._trained[call.role] = effect.version
            self._replacing.discard(call.role)

    def known(self) -> dict[str, int]:
        """Return role -> version once all calls added so far are done, for roles that are trained or copied to."""
        return dict(self._known)

    def newest(self, role: str) -> int:
        """Return the role's newest version that exists."""
        return self._trained.get(role, 0)

    def has_oldest_for(self, call_state: CallState) -> bool:
        """Whether the oldest versions that a generation may use exist."""
        call = call_state.call
        return all(window(call, role)[0] <= self.newest(role) for role in call.speakers)

    def behind(self, call: Call) -> int:
        """Count the versions that the trainer is behind the newest that a generation may use; the most of those who speak."""
        return max(0, *(window(call, role)[1] - self.newest(role) for role in call.speakers)) if call.reads else 0

    def trained(self, role: str) -> int | None:
        """Return the version that the role's trainer holds; None between the first optimiser step of an update and its last."""
        return None if role in self._replacing else self.newest(role)

    def step_dispatched(self, role: str) -> None:
        """Note that an optimiser step was dispatched: the trainer's weights are no version until the update is done."""
        self._replacing.add(role)

    def reads_before(self, call: Call) -> Iterator[CallState]:
        """Yield earlier unfinished calls that read a version which this call replaces."""
        for effect in call.writes:
            for call_state in self._readers.get(effect.resource, {}).values():
                if call_state.call.ordinal >= call.ordinal:
                    break
                if Effect(effect.resource, effect.version - 1) in call_state.call.reads:
                    yield call_state


class _Published(NamedTuple):
    """The weights of a role that engines of other workers can load now."""

    version: int
    manifest: Manifest


@final
class EngineWeights:
    """The versions that rollout engines hold and load, and those that trainers have published."""

    def __init__(self, versions: Versions, ready_workers: ReadyWorkers) -> None:
        self._versions = versions
        self._ready_workers = ready_workers
        self._published: dict[str, _Published] = {}
        self._publishing: set[str] = set()
        """Roles whose trainer is publishing."""
        self._num_loads: dict[str, int] = {}
        """Role -> number of engines that are loading what is published."""
        self._num_holding: dict[str, Counter[int]] = {}
        """Role -> version -> number of rollout engines that hold it."""
        self._loading: dict[tuple[str, str], int] = {}
        """(worker, role) of an engine that is loading weights -> version."""

    def is_loading(self, worker: WorkerState, role: str) -> bool:
        return (worker.name, role) in self._loading

    def next_held(self, worker: WorkerState, role: str) -> int:
        """The version that what a worker is sent now will run with: it does its tasks in order, so the one that it loads."""
        return self._loading.get((worker.name, role), worker.held.get(role, 0))

    def oldest(self, role: str, but: WorkerState | None = None) -> int:
        """Find the oldest version that a rollout engine of the role holds, on workers other than `but`."""
        held = self._held(role)
        mine = but.held.get(role, 0) if but is not None and role in but.roles["rollout"] else None
        return min((version for version, count in held.items() if count > (version == mine)), default=ANY_VERSION)

    def offered(self, worker: WorkerState, role: str) -> int | None:
        """Find the version that this worker could load now: its own trainer's, or the published one."""
        if role in worker.roles["train"]:
            return self._versions.trained(role)
        return self._published[role].version if role in self._published else None

    def loadable(self, worker: WorkerState, role: str, first: CallState) -> int:
        """Find the newest version that this worker could load now and the call may use; otherwise the one that it holds."""
        held, found = worker.held.get(role, 0), self.offered(worker, role)
        return found if found is not None and found > held and may_use(first, found, role) else held

    def holds_for(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether this worker can be sent samples of a generation: its engines hold or load versions that this may use, and those of other
        workers that speak in its episodes hold such. Samples whose time is counted from when they are sent wait for no switch or load."""
        here = worker.roles[ROLLOUT]
        if timeout_of(call_state.call.options) is not None and self._comes_later(worker, call_state):
            return False
        return call_state.call.role in here and all(
            may_use(call_state, self.next_held(worker, role), role) if role in here else bool(self.speakers(call_state, role))
            for role in call_state.call.speakers
        )

    def _comes_later(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether samples of a generation would wait on a worker for its devices or for weights."""
        is_switching = worker.lease is not None and worker.lease.is_switching(worker.name)
        return is_switching or any(self.is_loading(worker, role) for role in call_state.call.speakers)

    def _holds_for(self, worker: WorkerState, call_state: CallState, role: str) -> bool:
        return may_use(call_state, worker.held.get(role, 0), role) and not self.is_loading(worker, role)

    def speakers(self, call_state: CallState, role: str) -> list[WorkerState]:
        """Find the workers whose engine of a role may speak now in episodes of a generation that others run."""
        hosts = self._ready_workers.hosts(ROLLOUT, role)
        return [worker for worker in hosts if not worker.is_lost and worker.has_turn(role) and self._holds_for(worker, call_state, role)]

    def manifest(self, worker: WorkerState, role: str) -> Manifest | None:
        """Return the manifest of the published weights; None for a worker that has the trainer itself."""
        return None if role in worker.roles["train"] else self._published[role].manifest

    def may_publish(self, role: str, version: int) -> bool:
        """Whether a version is not published yet, and nobody loads the one before."""
        is_current = role in self._published and self._published[role].version == version
        return not (is_current or role in self._publishing or self._num_loads.get(role))

    def can_have(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether this worker's engines hold or are loading versions that a generation may use, or will be able to load them; and so do
        those of some other worker, of each role that speaks in its episodes and is not here."""
        return all(
            self._can_have(worker, call_state, role)
            if role in worker.roles[ROLLOUT]
            else any(self._can_have(other, call_state, role) for other in self._hosts_to_come(role))
            for role in call_state.call.speakers
        )

    def _hosts_to_come(self, role: str) -> list[WorkerState]:
        """The workers with a role's rollout engine that are there, or will be again."""
        return [worker for worker in self._ready_workers.hosts(ROLLOUT, role) if worker.returns or not worker.is_lost]

    def _can_have(self, worker: WorkerState, call_state: CallState, role: str) -> bool:
        oldest, newest = window(call_state.call, role)
        held = 0 if worker.is_lost else self.next_held(worker, role)
        if held >= oldest:
            return held <= newest
        trained = self._versions.trained(role)
        next_trained = self._versions.newest(role) + 1 if trained is None else trained
        return next_trained <= newest or (role in self._published and may_use(call_state, self._published[role].version, role))

    def has_version_for(self, call_state: CallState) -> bool:
        """Whether some engine holds, or will be able to load, a version that a generation may use."""
        return any(self.can_have(worker, call_state) for worker in self._hosts_to_come(call_state.call.role))

    def needs_loading(self, reader: CallState, role: str) -> bool:
        """Whether some rollout engine of a role still has to load weights before it can run this call."""
        if all(worker.is_lost for worker in self._ready_workers.hosts("rollout", role)):
            return True  # A restarted worker has to load them first.
        return self.oldest(role) < window(reader.call, role)[0]

    def publishing(self, role: str) -> None:
        """Record that a trainer publishes: the new weights overwrite the old ones in shared memory."""
        self._publishing.add(role)
        self._published.pop(role, None)

    def published(self, role: str, version: int, manifest: Manifest) -> None:
        """Record that engines of other workers can load a version."""
        self._publishing.discard(role)
        self._published[role] = _Published(version, manifest)

    def loading(self, worker: WorkerState, role: str, version: int, manifest: Manifest | None) -> None:
        """Record that an engine loads a version, from what is published if there is a manifest."""
        if manifest is not None:
            self._num_loads[role] = self._num_loads.get(role, 0) + 1
        self._loading[worker.name, role] = version

    def loaded(self, worker: WorkerState, task: m.LoadWeights) -> None:
        """Record that an engine holds what it was told to load. Its trainer may have waited for that."""
        self._holds(worker, task.role, task.version)
        self._loading.pop((worker.name, task.role), None)
        self.unloaded(task)
        self._ready_workers.wake_trainers(task.role)

    def unloaded(self, task: m.LoadWeights) -> None:
        """Record that a load has ended, or will not happen."""
        if task.manifest is not None:
            self._num_loads[task.role] -= 1

    def lost(self, worker: WorkerState) -> None:
        """Remove a lost worker: no trainer waits for its engines to load weights."""
        for role in worker.roles["rollout"]:
            self._holds(worker, role, ANY_VERSION)
            self._loading.pop((worker.name, role), None)
            self._ready_workers.wake_trainers(role)

    def joined(self, worker: WorkerState) -> None:
        """Take in a restarted worker, which holds the weights that the run began with."""
        for role in worker.roles["rollout"]:
            self._holds(worker, role, 0)

    def _held(self, role: str) -> Counter[int]:
        if role not in self._num_holding:
            self._num_holding[role] = Counter(worker.held.get(role, 0) for worker in self._ready_workers.hosts("rollout", role))
        return self._num_holding[role]

    def _holds(self, worker: WorkerState, role: str, version: int) -> None:
        held, before = self._held(role), worker.held.get(role, 0)
        held[before] -= 1
        if not held[before]:
            del held[before]
        held[version] += 1
        worker.held[role] = version


class SyncState(Protocol):
    """What `WeightSyncDispatch` needs of `SchedulerState`, which has a `Versions` and an `EngineWeights` and so is not imported here."""

    versions: Versions
    engine_weights: EngineWeights
    ready_workers: ReadyWorkers
    may_keep: bool

    def first_generation(self, role: str) -> CallState | None: ...

    def running(self, role: str, worker: str | None = None) -> list[CallState]: ...

    def engines_changed(self) -> None: ...

    def next_task(self) -> int: ...

    def start(self, worker: WorkerState, engine: str, task: m.Task, rows: int = 0) -> None: ...


@final
class WeightSyncDispatch:
    """Decides when a trainer publishes weights, and when a rollout engine loads them."""

    def __init__(self, state: SyncState) -> None:
        self._state = state

    # ---- publishing

    def publish_offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
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
        if first is not None and not first.waits_for and first.is_prepared and may_use(first, trained, role):
            return trained
        may_keep = state.may_keep and any(role in worker.keeps_caches for worker in state.ready_workers.hosts("rollout", role))
        return trained if may_keep and any(takes_under(call_state, trained, role) for call_state in state.running(role)) else None

    def _publish(self, worker: WorkerState, role: str, version: int) -> None:
        self._state.engine_weights.publishing(role)
        self._state.engines_changed()
        self._state.start(worker, "train", m.PublishWeights(self._state.next_task(), -1, role, version))

    def published(self, role: str, version: int, manifest: Manifest) -> None:
        """Take in that a trainer has published weights: engines may load them."""
        self._state.engine_weights.published(role, version, manifest)
        self._state.engines_changed()
        self._state.ready_workers.wake_role(role)

    # ---- loading

    def load_under_offer(self, worker: WorkerState, role: str, first: CallState | None) -> Offer | None:
        """Find new weights to load under an engine's running samples: all of their calls may use them and allow that (`kv="keep"`)."""
        state = self._state
        is_free = not state.engine_weights.is_loading(worker, role)
        may_keep = state.may_keep and is_free and role in worker.keeps_caches and (worker.num_running or worker.num_guests)
        version = state.engine_weights.offered(worker, role) if may_keep else None
        if version is None or version <= worker.held.get(role, 0):
            return None
        running = state.running(role, worker.name)
        if not running or not all(takes_under(call_state, version, role) for call_state in running):
            return None
        if first and not may_use(first, version, role):
            return None
        return lambda: self._load(worker, role, version, under_requests=True)

    def is_to_load(self, worker: WorkerState, role: str, first: CallState) -> bool:
        """Whether an engine is to load before it gets samples: it has no version for the earliest call, or idles and can get a newer."""
        held = self._state.engine_weights.next_held(worker, role)
        if not may_use(first, held, role):
            return True
        return not worker.is_generating and self._state.engine_weights.loadable(worker, role, first) > held

    def load_offer(self, worker: WorkerState, role: str, first: CallState) -> Offer | None:
        """Find the newest version for the earliest call to load into an idle engine, once the call's rows are known and it can start."""
        version = self._state.engine_weights.loadable(worker, role, first)
        is_newer, is_sure = version > worker.held.get(role, 0), first.is_prepared and not first.waits_for
        if not (is_newer and is_sure) or worker.is_generating:  # To load is a task of the engine, too.
            return None
        return lambda: self._load(worker, role, version)

    def _load(self, worker: WorkerState, role: str, version: int, *, under_requests: bool = False) -> None:
        state = self._state
        manifest = state.engine_weights.manifest(worker, role)
        state.engine_weights.loading(worker, role, version, manifest)
        state.engines_changed()
        state.start(worker, "rollout", m.LoadWeights(state.next_task(), -1, role, version, manifest, under_requests))
