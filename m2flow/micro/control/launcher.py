"""Launchers: what starts a plan's workers, says which have ended, and cleans up after them. The local one has them as child processes.

    Plan, ClusterSpec --Launcher.settings_for--> WorkerSettings --> m2flow.micro.work.process, wherever that runs

A worker gets its settings on standard input and the run's secret in its environment; what it prints goes to the run's `logs/`. It
ends itself when its parent is gone, so nothing is left behind even if the controller is killed. Workers on other hosts are
`m2flow.micro.control.ray_launcher`'s.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec

from m2flow.channels.keys import Keys, read_keys, write_keys
from m2flow.channels.pairs import PAIRS
from m2flow.micro.control.claims import Claim, remove_leftovers
from m2flow.micro.control.processes import Processes, start
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.record.storage import shared_dir
from m2flow.micro.rollouts.policies import report_every
from m2flow.micro.work.gang import GangSettings
from m2flow.micro.work.settings import WorkerSettings
from m2flow.micro.work.weight_syncing import weight_settings
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, RunSettings

_LOG_LINES = 12
GATHER_S = 0.02
"""Decode steps of a small model take a few milliseconds, and a batch of finished samples about 2 ms on its way through all
processes. Of a large model every step is longer than this, so nothing waits."""


@dataclass(frozen=True)
class Job:
    """One attempt at a run, as far as whoever starts its workers needs to know."""

    plan: Plan
    spec: ClusterSpec
    settings: RunSettings
    models: Mapping[str, Model]
    run_dir: Path
    attempt: int = 0
    restore: Mapping[str, str] = field(default_factory=dict)
    """Role -> the checkpoint that its trainer begins with."""
    flow_file: str = ""
    """`flows/grpo.py`, or `flows/grpo.py:NAME`; empty: the flow is in no file that could be shipped."""


class Launcher(ABC):
    """Starts the plan's workers, and cleans up after them. All but `connect` and `stop` are called by the controller's thread alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plan = job.plan
        self._spec = job.spec
        self.run_dir = job.run_dir
        self.token = secrets.token_hex(16)
        self.keys = keys_of(job.spec)
        self._prefix = f"m2flow-{secrets.token_hex(4)}"
        self._controller = ""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the controller's inboxes listen."""

    @abstractmethod
    def start(self, controller: str) -> None:
        """Start every worker but spare ones; they connect to the controller's address by themselves."""

    @abstractmethod
    def restart(self, worker: str, incarnation: int) -> None:
        """Start another process for a worker whose last one has ended; it was started so often before."""

    @abstractmethod
    def kill(self, worker: str) -> None:
        """End a worker's process, whatever it is doing, and what that has started."""

    def give_back(self, worker: str) -> None:  # Who starts processes on its own host has reserved nothing.
        """A worker was killed that was told to leave: what is reserved for it alone may be others'."""

    @abstractmethod
    def ended(self) -> Mapping[str, str]:
        """How each worker ended that is not running any more. What it has started ends with it."""

    @abstractmethod
    def pid(self, worker: str) -> int:
        """On its host; 0: not known yet."""

    def stopped(self, worker: str) -> tuple[int, ...]:  # Who can't look at processes says that none is.
        """Ranks of a worker that stand still, because a signal has stopped them."""
        return ()

    @abstractmethod
    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        """Wait for these workers to end, then end all that do not, and remove what they may have left. May be called twice."""

    @property
    def _weights_directory(self) -> str:
        return self._spec.weights.directory or str(shared_dir(self.run_dir) / "weights")

    def settings_for(self, worker: WorkerPlan, controller: str, incarnation: int = 0) -> WorkerSettings:
        """All that a worker must know to start; on this host, if the launcher does not say otherwise."""
        settings, restore = self._job.settings, self._job.restore
        return WorkerSettings(
            name=worker.name,
            controller=controller,
            inbox=self.place,
            keys=self.keys,
            engines=worker.engines,
            models=dict(self._job.models),
            device=worker.device,
            threads=worker.threads,
            deterministic=settings.deterministic,
            run_seed=settings.seed,
            run_dir=str(shared_dir(self.run_dir)),
            shared_prefix=f"{self._prefix}-{worker.name}",
            rollout_options=self._spec.rollout.options,
            train_options=self._spec.train.options,
            function_concurrency=self._spec.functions.concurrency,
            function_patience_s=self._spec.functions.patience_s,
            max_running=self._spec.rollout.max_running,
            report_every=report_every(self._spec.rollout.policy, self._spec.rollout.predictor),
            gather_s=GATHER_S,
            flush_tokens=settings.flush_tokens,
            flush_s=settings.flush_s,
            heartbeat_s=settings.heartbeat_s,
            record_every=settings.record_every,
            parent=os.getpid(),
            incarnation=incarnation,
            takes_turns=bool(worker.lease),
            gang=GangSettings(num_ranks=worker.ranks, parts=self._spec.train.parts),
            transports={route.target: route.transport for route in self._plan.routes if route.source == worker.name != route.target},
            takes_pairs=any(route.target == worker.name and route.transport in PAIRS for route in self._plan.routes),
            shared_bytes=self._spec.channels.shared_bytes,
            attempt=self._job.attempt,
            restore={slot.role: restore[slot.role] for slot in worker.engines if slot.kind == "train" and slot.role in restore},
            weights=weight_settings(worker.name, self._plan.syncs, self._spec.weights, self._weights_directory),
        )

    def blame(self, worker: str, rank: int) -> None:  # Who has one log for all ranks has nothing to do.
        """It is this rank of a worker that hangs: what is said of its process and its log is about that."""

    def has_trainer(self, worker: str) -> bool:
        """Whether weights are trained there."""
        return any(slot.kind == "train" for planned in self._plan.workers if planned.name == worker for slot in planned.engines)

    def log_path(self, worker: str) -> Path:
        """Of the rank that is spoken of."""
        return self.log_of(worker, 0)

    def log_of(self, worker: str, rank: int) -> Path:
        return self.run_dir / "logs" / (f"{worker}.{rank}.log" if rank else f"{worker}.log")

    def log_tail(self, worker: str) -> str:
        """The last lines that a worker printed."""
        path = self.log_path(worker)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-_LOG_LINES:])


@final
class LocalLauncher(Launcher):
    """Starts the plan's workers on this machine."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._sockets = tempfile.TemporaryDirectory(prefix="m2flow-", ignore_cleanup_errors=True)
        self._claim = Claim(self._prefix, self._sockets.name, self._weights_directory)
        self._processes: dict[str, Processes] = {}
        if self.keys is None and self._spec.transport == "tcp":
            from m2flow.channels.zeromq import new_secret

            self.keys = new_secret()

    @property
    def socket_dir(self) -> str:
        """A directory for Unix sockets that only this user can enter."""
        return self._sockets.name

    @property
    def place(self) -> str:
        """Where inboxes listen."""
        return f"tcp:{self._spec.channels.host}" if self._spec.transport == "tcp" else f"ipc:{self.socket_dir}"

    def start(self, controller: str) -> None:
        # What dead runs have left is removed before.
        remove_leftovers()
        self._claim.open()
        for worker in self._plan.workers:
            if not worker.is_spare:
                self._processes[worker.name] = self._spawn(worker, controller, 0)
        self._controller = controller

    def restart(self, worker: str, incarnation: int) -> None:
        self._processes[worker] = self._spawn(self._plan.worker(worker), self._controller, incarnation)

    def kill(self, worker: str) -> None:
        self._processes[worker].kill()

    def settings_for(self, worker: WorkerPlan, controller: str, incarnation: int = 0) -> WorkerSettings:
        settings = super().settings_for(worker, controller, incarnation)
        return msgspec.structs.replace(settings, claim=self._claim.path)

    def _spawn(self, worker: WorkerPlan, controller: str, incarnation: int) -> Processes:
        settings = self.settings_for(worker, controller, incarnation)
        path = os.pathsep.join(path for path in sys.path if path)
        with contextlib.ExitStack() as logs:
            outputs = [logs.enter_context(self.log_of(worker.name, rank).open("ab")) for rank in range(worker.ranks)]
            return start(settings, self.token, outputs, self.socket_dir, path=path)

    def ended(self) -> dict[str, str]:
        return {name: how for name, processes in self._processes.items() if (how := processes.how_ended())}

    def pid(self, worker: str) -> int:
        return self._processes[worker].pid

    def stopped(self, worker: str) -> tuple[int, ...]:
        return self._processes[worker].stopped

    def blame(self, worker: str, rank: int) -> None:
        self._processes[worker].rank = rank

    def log_path(self, worker: str) -> Path:
        return self.log_of(worker, self._processes[worker].rank if worker in self._processes else 0)

    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        deadline = time.monotonic() + patience_s
        waits_for = set(leaving) & self._processes.keys()
        while waits_for - self.ended().keys() and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in self._processes:
            self.kill(worker)
        self._claim.close()
        self._sockets.cleanup()


def keys_of(spec: ClusterSpec) -> Keys | None:
    """The cluster's key, if the spec names a file with one.

    Raises:
        SpecError: there is none, or others can read it.
    """
    return read_keys(Path(spec.channels.keys).expanduser()) if spec.channels.keys else None


def make_keys(path: Path) -> None:
    """Write the key of a new cluster.

    Raises:
        SpecError: there is one already, or it can't be written.
    """
    from m2flow.channels.zeromq import new_keys

    write_keys(path, new_keys())
