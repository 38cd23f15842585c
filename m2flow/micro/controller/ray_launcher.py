"""Launch a plan's workers on a Ray cluster: each is a process that an agent, a Ray actor, starts on its node.

    Plan --bundles--> a placement group --> agents --spawn--> m2flow.micro.worker.worker_process
    workers --ZeroMQ--> controller, other workers        agents --Ray--> what workers print, how they ended

Ray finds the nodes and starts the actors; samples, weights and heartbeats do not pass through it. A thread here polls each agent without
pause, so a node that is gone or cut off is noticed as soon as its agents do not answer, which is sooner than Ray reports it. A worker is
restarted with another actor in the same placement group, whose bundle Ray reschedules on another node if its node is lost.

Limits: all nodes must see the run's directory (`m2flow cluster check` says whether they do). What passes through Ray itself (a fresh key,
if the spec names no file with one) is as safe as the cluster's own connections.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import msgspec

from m2flow.channels.endpoints import is_private
from m2flow.errors import M2FlowError, PlanError, WorkerError
from m2flow.micro.controller.host_agent import Started, StartWorker
from m2flow.micro.controller.launcher import Job, Launcher
from m2flow.micro.controller.ray_cluster import Bundle, RayCluster, bundles, holders, lacking, num_gpus, part_of, place_of, too_much
from m2flow.micro.protocol.plan import WorkerPlan

_ANSWERS_S = 1.0
"""An agent answers a poll after so long even without news."""
_LOOKS_S = 0.25
_ENDS_S = 5.0
"""How long agents get to end their workers."""


@dataclass
class _Hosted:
    """A worker's process and its agent."""

    worker: str
    agent: Any
    asked_s: float
    """When the agent was sent the call that it has not answered yet."""
    started: Started | None = None
    how: str = ""
    """How it ended; empty while it runs."""
    rank: int = 0
    """Rank that ended it, or that hangs."""
    stopped: tuple[int, ...] = ()
    """Ranks that a signal had stopped when its agent last answered."""
    pending: Any = None
    closing: list[Any] = field(default_factory=list)


@final
class RayLauncher(Launcher):
    """Start a plan's workers on a Ray cluster. `connect` must be called first."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        file = Path(job.flow_file.partition(":")[0])
        self._flow_directory = str(file.resolve().parent) if job.flow_file and file.is_file() else ""
        self._cluster = RayCluster(job.spec.ray, flow_directory=self._flow_directory)
        self._bundles: tuple[Bundle, ...] = ()
        self._holders: dict[str, str] = {}
        self._begins = tuple(worker for worker in job.plan.workers if not worker.is_spare)
        self._room: dict[str, tuple[Any, int]] = {}
        """Worker -> its placement group, and the index of its bundle."""
        self._given_back: set[str] = set()
        """Workers whose own placement group is released as soon as their agents have cleaned up."""
        self._host = ""
        self._lock = threading.Lock()
        self._hosted: dict[str, _Hosted] = {}
        self._failure: M2FlowError | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="m2flow-ray", daemon=True)
        self._began_s = 0.0

    def connect(self) -> None:
        """Connect to the cluster and check that it could hold the plan.

        Raises:
            SpecError: Ray is not installed, or there is no such cluster. PlanError: the plan does not fit its nodes.
        """
        self._cluster.open()
        try:
            from_start = msgspec.structs.replace(self._plan, workers=self._begins)
            self._bundles, self._holders = bundles(from_start, self._spec), holders(self._plan, self._spec)
            short = lacking(self._bundles, self._cluster.nodes())
            if short and not self._spec.ray.autoscales:
                raise PlanError(
                    f"the plan does not fit the Ray cluster at {self._spec.ray.address!r}: {short}",
                    now="`m2flow cluster check` shows what its nodes have. If nodes may be added, say so: ray: {autoscales: true}",
                )
            host = self._spec.channels.host
            self._host = self._cluster.own_address if is_private(f"tcp://{host}:0") else host
            if self.keys is None:  # Needed even on one host: workers listen at their nodes' addresses.
                from m2flow.channels.zeromq import new_keys

                self.keys = new_keys()
        except BaseException:
            self._cluster.close()
            raise

    @property
    def place(self) -> str:
        return f"tcp:{self._host}"

    def start(self, controller: str) -> None:
        self._controller = controller
        self._began_s = time.monotonic()
        group = self._cluster.reserve(self._bundles)
        self._room = {name: (group, index) for index, bundle in enumerate(self._bundles) for name in bundle.workers}
        for worker in self._begins:
            if self._holders[worker.name] == worker.name:
                self._begin(worker, 0)
        self._thread.start()

    def restart(self, worker: str, incarnation: int) -> None:
        with self._lock:
            self._given_back.discard(worker)
        if worker not in self._room:
            joining = msgspec.structs.replace(self._plan.worker(worker), is_spare=False)
            group = self._cluster.reserve(bundles(msgspec.structs.replace(self._plan, workers=(joining,)), self._spec))
            self._room[worker] = group, 0
        self._begin(self._plan.worker(worker), incarnation)

    def give_back(self, worker: str) -> None:
        # Workers that were there from the start share one placement group, which Ray does not release in parts.
        if self._plan.worker(worker).is_spare:
            with self._lock:
                self._given_back.add(worker)

    def kill(self, worker: str) -> None:
        hosted = self._hosted.get(worker)
        if hosted is not None:
            self._note_end(hosted, "was killed")
            hosted.closing.append(self._cluster.call(hosted.agent, "kill"))

    def ended(self) -> Mapping[str, str]:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return {name: hosted.how for name, hosted in self._hosted.items() if hosted.how}

    def pid(self, worker: str) -> int:
        hosted = self._hosted.get(worker)
        return hosted.started.pid if hosted is not None and hosted.started is not None else 0

    def stopped(self, worker: str) -> tuple[int, ...]:
        return self._hosted[worker].stopped

    def blame(self, worker: str, rank: int) -> None:
        self._hosted[worker].rank = rank

    def log_path(self, worker: str) -> Path:
        hosted = self._hosted.get(worker)
        return self.log_of(worker, hosted.rank if hosted is not None else 0)

    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        deadline = time.monotonic() + patience_s
        waits_for = set(leaving)
        with contextlib.suppress(M2FlowError):
            while waits_for - self.ended().keys() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            everybody = list(self._hosted.values())
        for hosted in everybody:
            hosted.closing.append(self._cluster.call(hosted.agent, "kill"))
        waited = [reference for hosted in everybody for reference in hosted.closing]
        deadline = time.monotonic() + _ENDS_S
        while waited and time.monotonic() < deadline:
            done = self._cluster.wait(waited, _LOOKS_S)
            waited = [reference for reference in waited if reference not in done]
        for hosted in everybody:
            self._cluster.end(hosted.agent)
        with self._lock:
            self._hosted = {}
        self._cluster.close()

    # Actors

    def _begin(self, worker: WorkerPlan, incarnation: int) -> None:
        """Create an actor and have it start the worker, without waiting for either."""
        holder = self._holders[worker.name]
        with self._lock:
            before, holding = self._hosted.get(worker.name), self._hosted.get(holder)
        if before is not None:
            self._cluster.end(before.agent)
        gpus = ""
        if holder != worker.name and holding is not None and holding.started is not None:
            gpus = part_of(holding.started.gpus, self._plan.worker(holder), worker)
        settings = self.settings_for(worker, self._controller, incarnation)
        keys_file = self._spec.channels.keys
        if keys_file:
            settings = msgspec.structs.replace(settings, keys=None)
        request = StartWorker(settings, self.token, keys_file, self._flow_directory, os.getcwd(), self._device_of(worker), gpus)
        for rank in range(worker.ranks):
            self.log_of(worker.name, rank).touch()
        group, index = self._room[worker.name]
        own_gpus = num_gpus([worker], self._spec) if holder == worker.name else 0
        agent = self._cluster.agent(group, index, f"{self.run_dir.name} {settings.tag} {self._prefix}", gpus=own_gpus)
        hosted = _Hosted(worker.name, agent, time.monotonic())
        hosted.pending = self._cluster.call(agent, "start", msgspec.json.encode(request))
        with self._lock:
            self._hosted[worker.name] = hosted

    def _device_of(self, worker: WorkerPlan) -> str:
        pool, _, stop = place_of(worker.device)
        if pool in self._spec.pools and stop:
            return "cpu" if self._spec.pools[pool].device == "cpu" else "cuda:0"
        return worker.device

    # The thread that follows the agents

    def _watch(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._is_stopping.is_set():
                with self._lock:
                    pending = {hosted.pending: hosted for hosted in self._hosted.values() if hosted.pending is not None}
                if not pending:
                    self._is_stopping.wait(_LOOKS_S)
                    continue
                for reference in self._cluster.wait(list(pending), _LOOKS_S):
                    self._answered(pending[reference])
                self._release()
                now_s = time.monotonic()
                self._look_for_silence(now_s, late_s=max(0.0, now_s - last_s - 2 * _LOOKS_S))
                last_s = now_s
                self._look_for_room(now_s)
        except M2FlowError as error:
            self._failure = error
        except Exception as error:  # The cluster itself is gone; Ray has many errors for that.
            self._failure = WorkerError(f"the connection to the Ray cluster broke: {error!r}")

    def _answered(self, hosted: _Hosted) -> None:
        reference, hosted.pending = hosted.pending, None
        try:
            answer = self._cluster.result(reference)
        except M2FlowError as error:
            self._log(hosted.worker, 0, f"{error.what}\n{error.remote}\n".encode())
            self._note_end(hosted, error.what)
            return
        if isinstance(answer, Started):
            hosted.started = answer
            for worker in self._begins:
                if self._holders[worker.name] == hosted.worker != worker.name and worker.name not in self._hosted:
                    self._begin(worker, 0)
        else:
            for rank, printed in answer.printed.items():
                self._log(hosted.worker, rank, printed)
            hosted.stopped = answer.stopped
            if answer.how:
                hosted.rank = hosted.rank or answer.rank
                self._note_end(hosted, answer.how)
                return
        hosted.asked_s = time.monotonic()
        hosted.pending = self._cluster.call(hosted.agent, "follow", _ANSWERS_S)

    def _release(self) -> None:
        """Release the placement groups of workers that have left."""
        with self._lock:
            for worker in list(self._given_back):
                closing = self._hosted[worker].closing
                if len(self._cluster.wait(closing, 0.0)) == len(closing):
                    self._given_back.discard(worker)
                    self._cluster.end(self._hosted[worker].agent)
                    self._cluster.release(self._room.pop(worker)[0])

    def _look_for_silence(self, now_s: float, *, late_s: float) -> None:
        """Give up agents that have not answered for too long. `late_s`, the delay of this thread itself, is not counted."""
        limit_s = self._spec.ray.silent_after_s + _ANSWERS_S
        with self._lock:
            everybody = list(self._hosted.values())
        for hosted in everybody:
            hosted.asked_s += late_s
            if hosted.pending is None or hosted.started is None or hosted.how or now_s - hosted.asked_s <= limit_s:
                continue
            hosted.pending = None
            self._note_end(hosted, f"is on a node ({hosted.started.address}) that gave no answer for {now_s - hosted.asked_s:.0f} s")
            self._cluster.end(hosted.agent)

    def _look_for_room(self, now_s: float) -> None:
        patience_s = self._spec.ray.patience_s
        has_begun = any(hosted.started is not None for hosted in self._hosted.values())
        if not has_begun and now_s - self._began_s > patience_s and not self._cluster.has_room():
            over = too_much(self._bundles, self._cluster.nodes())
            now = (
                "Others use it, or each node has too little: `ray status` shows who has what. Wait for longer with ray: {patience_s: ...}."
            )
            raise PlanError(
                f"the Ray cluster has had no room for the plan's workers for {patience_s:.0f} s" + (f": they need {over}" if over else ""),
                now="Start more nodes, or let the spec ask for less: fewer `cores`, fewer workers." if over else now,
            )

    def _note_end(self, hosted: _Hosted, how: str) -> None:
        with self._lock:
            hosted.how = hosted.how or how

    def _log(self, worker: str, rank: int, printed: bytes) -> None:
        with self.log_of(worker, rank).open("ab") as log:
            log.write(printed)
