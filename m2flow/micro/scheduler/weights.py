"""Weight versions and their sync: which version each trainer and engine has, who may use which, and when one is published or loaded.

    Apply, CopyWeights --> Versions (trained) --> PublishWeights --> EngineWeights (published) --> LoadWeights --> EngineWeights (held)

`Versions` knows the program's side: which call writes and reads which version, and what the trainers hold. `EngineWeights` knows the
engines' side. An engine has one version of the weights, and a generation runs only where a version of its window is held
(`m2flow.micro.protocol.staleness`), exactly one version unless the flow allows older ones. When a trainer publishes weights and an engine
loads them is decided in `m2flow.micro.scheduler.dispatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, final

from m2flow.channels.weights import Manifest
from m2flow.macro.graph import Call, Effect
from m2flow.macro.oversampling import keeps_cache
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.staleness import ANY_VERSION, window
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.ready_queues import ReadyWorkers


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
        """Whether this worker's engines hold versions that a generation may use, of all who speak."""
        return all(
            may_use(call_state, worker.held.get(role, 0), role) and not self.is_loading(worker, role) for role in call_state.call.speakers
        )

    def manifest(self, worker: WorkerState, role: str) -> Manifest | None:
        """Return the manifest of the published weights; None for a worker that has the trainer itself."""
        return None if role in worker.roles["train"] else self._published[role].manifest

    def may_publish(self, role: str, version: int) -> bool:
        """Whether a version is not published yet, and nobody loads the one before."""
        is_current = role in self._published and self._published[role].version == version
        return not (is_current or role in self._publishing or self._num_loads.get(role))

    def can_have(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether this worker's engines hold or are loading versions that a generation may use, or will be able to load them."""
        return all(self._can_have(worker, call_state, role) for role in call_state.call.speakers)

    def _can_have(self, worker: WorkerState, call_state: CallState, role: str) -> bool:
        oldest, newest = window(call_state.call, role)
        held = 0 if worker.is_lost else self._loading.get((worker.name, role), worker.held.get(role, 0))
        if held >= oldest:
            return held <= newest
        trained = self._versions.trained(role)
        next_trained = self._versions.newest(role) + 1 if trained is None else trained
        return next_trained <= newest or (role in self._published and may_use(call_state, self._published[role].version, role))

    def has_version_for(self, call_state: CallState) -> bool:
        """Whether some engine holds, or will be able to load, a version that a generation may use."""
        hosts = self._ready_workers.hosts("rollout", call_state.call.role)
        return any(self.can_have(worker, call_state) for worker in hosts if worker.returns or not worker.is_lost)

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
        """Record that an engine holds what it was told to load."""
        self._holds(worker, task.role, task.version)
        self._loading.pop((worker.name, task.role), None)
        self.unloaded(task)

    def unloaded(self, task: m.LoadWeights) -> None:
        """Record that a load has ended, or will not happen."""
        if task.manifest is not None:
            self._num_loads[task.role] -= 1

    def lost(self, worker: WorkerState) -> None:
        """Remove a lost worker: nobody waits for it to load weights."""
        for role in worker.roles["rollout"]:
            self._holds(worker, role, ANY_VERSION)
            self._loading.pop((worker.name, role), None)

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
