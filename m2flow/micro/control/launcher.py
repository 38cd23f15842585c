"""The local launcher: workers as child processes of the controller.

A worker gets its settings on standard input and the run's secret in its environment; what it prints goes to the run's `logs/`. It
ends itself when its parent is gone, so nothing is left behind even if the controller is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from m2flow.channels.keys import read_keys, write_keys
from m2flow.channels.pairs import PAIRS
from m2flow.errors import InternalError
from m2flow.micro.control.claims import Claim, remove_leftovers
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.rollouts.policies import report_every
from m2flow.micro.work.process import TOKEN_VARIABLE
from m2flow.micro.work.weight_syncing import weight_settings
from m2flow.micro.work.worker import WorkerSettings
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, RunSettings

_LOG_LINES = 12
GATHER_S = 0.02
"""Decode steps of a small model take a few milliseconds, and a batch of finished samples about 2 ms on its way through all
processes. Of a large model every step is longer than this, so nothing waits."""


class LocalLauncher:
    """Starts the plan's workers on this machine, and cleans up after them."""

    def __init__(
        self,
        plan: Plan,
        spec: ClusterSpec,
        settings: RunSettings,
        models: Mapping[str, Model],
        run_dir: Path,
        *,
        attempt: int = 0,
        restore: Mapping[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._spec = spec
        self._settings = settings
        self._models = models
        self._run_dir = run_dir
        self._attempt = attempt
        self._restore = dict(restore or {})
        self.token = secrets.token_hex(16)
        self.keys = read_keys(Path(spec.channels.keys).expanduser()) if spec.channels.keys else None
        self._prefix = f"m2flow-{secrets.token_hex(4)}"
        self._sockets = tempfile.TemporaryDirectory(prefix="m2flow-", ignore_cleanup_errors=True)
        self._claim = Claim(self._prefix, self._sockets.name, self._weights_directory)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._controller = ""

    @property
    def socket_dir(self) -> str:
        """A directory for Unix sockets that only this user can enter."""
        return self._sockets.name

    @property
    def place(self) -> str:
        """Where inboxes listen."""
        channels = self._spec.channels
        return f"tcp:{channels.host}" if channels.transport == "tcp" else f"ipc:{self.socket_dir}"

    @property
    def _weights_directory(self) -> str:
        return self._spec.weights.directory or str(self._run_dir.resolve() / "weights")

    def start(self, controller: str) -> None:
        """Start every worker; they connect to the controller's address by themselves. What dead runs have left is removed before."""
        remove_leftovers()
        self._claim.open()
        for worker in self._plan.workers:
            self._processes[worker.name] = self._spawn(worker, controller, 0)
        self._controller = controller

    def restart(self, worker: str, incarnation: int) -> None:
        """Start another process for a worker whose last one has ended; it was started so often before."""
        self._processes[worker] = self._spawn(self._plan.worker(worker), self._controller, incarnation)

    def kill(self, worker: str) -> None:
        """End a worker's process, whatever it is doing, and what that has started."""
        process = self._processes[worker]
        if process.poll() is None:
            _kill_group(process.pid)
            process.wait()

    def settings_for(self, worker: WorkerPlan, controller: str, incarnation: int = 0) -> WorkerSettings:
        """All that a worker must know to start."""
        return WorkerSettings(
            name=worker.name,
            controller=controller,
            inbox=self.place,
            keys=self.keys,
            engines=worker.engines,
            models=dict(self._models),
            device=worker.device,
            threads=worker.threads,
            deterministic=self._settings.deterministic,
            run_seed=self._settings.seed,
            run_dir=str(self._run_dir.resolve()),
            shared_prefix=f"{self._prefix}-{worker.name}",
            rollout_options=self._spec.rollout.options,
            train_options=self._spec.train.options,
            function_concurrency=self._spec.functions.concurrency,
            function_patience_s=self._spec.functions.patience_s,
            max_running=self._spec.rollout.max_running,
            report_every=report_every(self._spec.rollout.policy, self._spec.rollout.predictor),
            gather_s=GATHER_S,
            flush_tokens=self._settings.flush_tokens,
            flush_s=self._settings.flush_s,
            heartbeat_s=self._settings.heartbeat_s,
            parent=os.getpid(),
            incarnation=incarnation,
            claim=self._claim.path,
            transports={route.target: route.transport for route in self._plan.routes if route.source == worker.name != route.target},
            takes_pairs=any(route.target == worker.name and route.transport in PAIRS for route in self._plan.routes),
            shared_bytes=self._spec.channels.shared_bytes,
            attempt=self._attempt,
            restore={slot.role: self._restore[slot.role] for slot in worker.engines if slot.kind == "train" and slot.role in self._restore},
            weights=weight_settings(worker.name, self._plan.syncs, self._spec.weights, self._weights_directory),
        )

    def _spawn(self, worker: WorkerPlan, controller: str, incarnation: int) -> subprocess.Popen[bytes]:
        settings = self.settings_for(worker, controller, incarnation)
        environment = {
            **engine_environment(worker.threads, deterministic=self._settings.deterministic),
            **os.environ,
            TOKEN_VARIABLE: self.token,
            "OMP_NUM_THREADS": str(worker.threads),
            "MKL_NUM_THREADS": str(worker.threads),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log_path(worker.name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "m2flow.micro.work.process", settings.tag],  # The name is for people who look at `ps`.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        if process.stdin is None:
            raise InternalError("a worker has no standard input")
        try:
            process.stdin.write(msgspec.json.encode(settings))
            process.stdin.close()
        except BrokenPipeError:
            pass  # It died at once; `ended` will say so.
        return process

    def ended(self) -> dict[str, int]:
        """Exit status of each worker that is not running any more. What it has started ends with it."""
        found: dict[str, int] = {}
        for name, process in self._processes.items():
            if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(process.pid)  # As long as nobody has waited for it, the group's number can't be another's.
                process.wait()
            if process.returncode is not None:
                found[name] = process.returncode
        return found

    def has_trainer(self, worker: str) -> bool:
        """Whether weights are trained there."""
        return any(slot.kind == "train" for planned in self._plan.workers if planned.name == worker for slot in planned.engines)

    def pid(self, worker: str) -> int:
        return self._processes[worker].pid

    def log_path(self, worker: str) -> Path:
        return self._run_dir / "logs" / f"{worker}.log"

    def log_tail(self, worker: str) -> str:
        """The last lines that a worker printed."""
        lines = self.log_path(worker).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        """Wait for these workers to end, then end all that do not, and remove what they may have left."""
        deadline = time.monotonic() + patience_s
        waits_for = set(leaving)
        while waits_for - self.ended().keys() and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in self._processes:
            self.kill(worker)
        self._claim.close()
        self._sockets.cleanup()


def _kill_group(pid: int) -> None:
    """A worker leads a group of its own, which has the processes that users' functions started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def make_keys(path: Path) -> None:
    """Write the key of a new cluster.

    Raises:
        SpecError: there is one already, or it can't be written.
    """
    from m2flow.channels.zeromq import new_keys

    write_keys(path, new_keys())


def engine_environment(threads: int, *, deterministic: bool) -> dict[str, str]:
    """Environment variables of a process with engines. They must be set before torch is loaded."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that wait spin for some microseconds, then sleep. A step was up to 1.2 times slower without, where cores are free; with
        # more, where they are shared with other work, 3 times slower and worse.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # The matrix libraries' results must not depend on memory alignment or on what ran before.
    return environment | ({"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})
