"""Start a plan's workers, report which have ended, and clean up after them: on this machine, or by an agent on another.

    Plan, ClusterSpec --Launcher.settings_for--> WorkerSettings
    WorkerSettings, secret --start--> m2flow.micro.worker.worker_process, for each rank
    the same, ForkServer --fork--> the same processes, forked from one that has loaded what they need
    a rank is killed or fails --how_ended--> the other ranks are killed too; the words name the rank

A worker gets its settings on standard input and the run's secret in its environment; what it prints goes to the run's `logs/`. Each
process leads a process group, with the processes that users' functions start in it. A worker ends itself when its parent is gone, so
nothing is left behind even if the controller is killed. Forked or an interpreter of its own, it is a child of the launcher's process, and
no other code can tell. Workers on other hosts are started by `m2flow.micro.controller.ray_cluster`.

A host agent starts one worker on a host that is not the launcher's, buffers what it prints, and ends it.

    launcher --start, follow, kill--> Agent --spawn--> m2flow.micro.worker.worker_process

The launcher decides how the agent's methods are called (`m2flow.micro.controller.ray_cluster` makes it a Ray actor). The worker reports
its own address over m2flow's control link, and traffic between workers does not pass the agent. A worker ends when its agent's process
does, for whatever reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, final

import msgspec
import psutil

from m2flow.channels.process_groups import PAIRS
from m2flow.channels.zeromq import Keys, is_private, new_keys, new_secret, read_keys, write_keys
from m2flow.engines.installed import gpus_from
from m2flow.errors import InternalError
from m2flow.micro.protocol.plan import Plan, WorkerPlan
from m2flow.micro.protocol.worker_state import rank_tag
from m2flow.micro.records.rundir import shared_dir
from m2flow.micro.worker.fork_server import WORKER, ForkServer, end_unneeded, fork_server, has_model, module_path, worker_environment
from m2flow.micro.worker.rank_group import RankGroupSettings
from m2flow.micro.worker.weight_sync import weight_settings
from m2flow.micro.worker.worker import WorkerSettings
from m2flow.micro.worker.worker_process import ResourceClaim, kill_group, remove_leftovers
from m2flow.recipe import Model
from m2flow.rollout_scheduling.policies import report_every, reports_of
from m2flow.spec import ClusterSpec, RunSettings

# ---- workers on this machine


class Child(Protocol):
    """A child process; `subprocess.Popen` is one."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int: ...


def spawn(
    settings: WorkerSettings,
    token: str,
    output: IO[bytes] | int,
    *,
    path: str,
    cwd: str | None = None,
    gpus: str = "",
    server: ForkServer | None = None,
) -> Child:
    """Start one process: a worker, or a rank of one.

    Args:
        output: receives what it prints.
        path: where it finds modules, as in `PYTHONPATH`.
        gpus: GPUs that it sees, as in `CUDA_VISIBLE_DEVICES`; empty: those that this process sees.
        server: forks it, if it can; without a server, or where that has ended, it is an interpreter of its own.
    """
    environment = worker_environment(settings.threads, token, path, gpus, deterministic=settings.deterministic)
    name = rank_tag(settings.tag, settings.rank_group.rank)
    if server is not None:
        if (forked := server.fork(settings, WORKER, name, output, environment)) is not None:
            return forked
        os.write(output if isinstance(output, int) else output.fileno(), b"[a process of its own: there is no fork server any more]\n")
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, name],  # The name is shown by `ps`.
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    if process.stdin is None:
        raise InternalError("a worker has no standard input")
    with contextlib.suppress(BrokenPipeError):  # It died at once, which `how_ended` reports.
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
    return process


def how_ended(code: int) -> str:
    """Describe a process's exit status in words.

    >>> how_ended(-9), how_ended(1)
    ('was killed by signal 9', 'ended with status 1')
    """
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


_LOOKS_S = 0.05


def start(
    settings: WorkerSettings,
    token: str,
    outputs: Sequence[IO[bytes] | int],
    directory: str,
    *,
    path: str,
    cwd: str | None = None,
    gpus: str = "",
    server: ForkServer | None = None,
) -> Processes:
    """Start a worker with all its ranks.

    Args:
        outputs: receive what each rank prints.
        directory: private to this user; ranks rendezvous there, at another path each time that the worker is started.
        gpus: GPUs that it sees, as in `CUDA_VISIBLE_DEVICES`; empty: those that this process sees.
        server: forks them (`spawn`).
    Raises:
        EngineError: there are fewer GPUs than ranks.
    """
    count = settings.rank_group.num_ranks
    if count == 1:
        return Processes([spawn(settings, token, outputs[0], path=path, cwd=cwd, gpus=gpus, server=server)])
    place = Path(directory) / settings.tag
    device, seen = gpus_of_ranks(settings.name, settings.device, count, gpus or os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    rank_group = msgspec.structs.replace(settings.rank_group, meeting=f"{place}.ranks", rendezvous=f"file://{place}.meeting")
    ranks = [
        msgspec.structs.replace(settings, device=device, rank_group=msgspec.structs.replace(rank_group, rank=rank)) for rank in range(count)
    ]
    pairs = zip(ranks, outputs, seen, strict=True)
    return Processes([spawn(its, token, output, path=path, cwd=cwd, gpus=own, server=server) for its, output, own in pairs])


def gpus_of_ranks(worker: str, device: str, count: int, seen: str) -> tuple[str, list[str]]:
    """Assign consecutive GPUs to the ranks of a worker, from the worker's own device on.

    Args:
        seen: GPUs of this host, as in `CUDA_VISIBLE_DEVICES`; empty: all of the machine.
    Returns:
        What each rank calls its device, and the GPU that each rank is shown.
    Raises:
        EngineError: there are fewer GPUs than ranks.

    >>> gpus_of_ranks("train-0", "cuda:1", 2, "4,5,7")
    ('cuda:0', ['5', '7'])
    """
    if not device.startswith("cuda"):
        return device, [""] * count
    return "cuda:0", gpus_from(device, count, seen, whose=f"{worker} has {count} ranks")


def warm_up(settings: RunSettings, *, has_models: bool) -> ForkServer | None:
    """Begin to load what the workers of a run need, and return at once; None: its workers are not to be forked, or can't be.

    Args:
        has_models: some workers hold models.
    """
    if not (settings.fork_workers and has_models):
        end_unneeded()
    if not settings.fork_workers:
        return None
    server = fork_server(worker_environment(1, "", module_path(), deterministic=settings.deterministic))
    if server is not None and has_models:
        server.load_engines()
    return server


@final
class Processes:
    """The processes of one worker, by rank."""

    def __init__(self, ranks: Sequence[Child]) -> None:
        self._ranks = tuple(ranks)
        self._how = ""
        self.rank = 0
        """The rank to blame for the worker's end or silence; `pid` and logs are this rank's."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    @property
    def pid(self) -> int:
        """Process id of the rank to blame."""
        return self._ranks[self.rank].pid

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks that a signal such as SIGSTOP has stopped. Neither those under a debugger nor those that wait for a processor."""
        return tuple(rank for rank, pid in enumerate(self.pids) if _is_stopped(pid))

    def how_ended(self) -> str:
        """Describe how the worker ended; empty while it runs. Ranks above 0 may end with status 0 when rank 0 dismisses them."""
        if self._how:
            return self._how
        codes = {rank: process.wait() for rank, process in enumerate(self._ranks) if _has_ended(process)}
        faults = {rank: code for rank, code in codes.items() if code}
        if 0 not in codes and not faults:
            return ""
        self.rank = (
            min(faults, key=lambda rank: (faults[rank] >= 0, rank)) if faults else 0
        )  # Killed ranks first: another exits with an error because its peer is gone.
        how = how_ended(codes[self.rank])
        how = f"lost its rank {self.rank}, which {how}" if self.rank else how
        self.kill()
        self._how = how
        return how

    def kill(self) -> None:
        """Kill all ranks, whatever they are doing."""
        for process in self._ranks:
            if not _has_ended(process):
                kill_group(process.pid)
                process.wait()
        self._how = self._how or "was ended"

    def wait(self) -> str:
        """Wait until the worker has ended; return how."""
        if len(self._ranks) == 1:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        while not (how := self.how_ended()):
            time.sleep(_LOOKS_S)
        return how


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # It has ended.
        return False


def _has_ended(process: Child) -> bool:
    """Whether a process has ended; if so, kill the rest of its process group."""
    if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        kill_group(process.pid)  # Until it is reaped, its group id can't be reused by another.
        process.wait()
    return process.returncode is not None


_LOG_LINES = 12
GATHER_S = 0.02
"""Time over which a worker gathers finished samples. A decode step of a small model takes a few milliseconds, and a batch of samples spends
about 2 ms on its way through all processes. Every step of a large model is longer than this, so nothing waits."""


@dataclass(frozen=True)
class Job:
    """What a launcher needs to know of one attempt at a run."""

    plan: Plan
    spec: ClusterSpec
    settings: RunSettings
    models: Mapping[str, Model]
    run_dir: Path
    attempt: int = 0
    restore: Mapping[str, str] = field(default_factory=dict)
    """Role -> checkpoint that its trainer starts from."""
    flow_file: str = ""
    """`flows/grpo.py`, or `flows/grpo.py:NAME`; empty: the flow is in no file that could be shipped."""


class Launcher(ABC):
    """Start a plan's workers and clean up after them. The controller's thread alone calls all methods but `give_up` and `stop`."""

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
        """Address at which the controller's inboxes listen."""

    @abstractmethod
    def start(self, controller: str) -> None:
        """Start every worker that is not spare. They connect to the controller's address themselves."""

    def give_up(self) -> None:  # Waits for nothing by default.
        """Have `start` return soon, whatever it has started: the run is over. Any thread may call this."""

    @abstractmethod
    def restart(self, worker: str, incarnation: int) -> None:
        """Start another process for a worker whose last one has ended, after `incarnation` earlier starts."""

    @abstractmethod
    def kill(self, worker: str) -> None:
        """Kill a worker's process, whatever it is doing, and the processes it has started."""

    def give_back(self, worker: str) -> None:  # Reserves nothing by default.
        """Release what is reserved for this worker alone. It was told to leave, and has been killed."""

    @abstractmethod
    def ended(self) -> Mapping[str, str]:
        """Return how each worker that is not running any more ended. Processes that it started end with it."""

    @abstractmethod
    def pid(self, worker: str) -> int:
        """Return a worker's process id on its host; 0 if not known yet."""

    def stopped(self, worker: str) -> tuple[int, ...]:  # Reports none by default.
        """Return the ranks of a worker that a signal has stopped."""
        return ()

    @abstractmethod
    def stop(self, exiting: Iterable[str], *, patience_s: float = 5.0) -> None:
        """Wait for the `exiting` workers to end, kill all that do not, and remove what they may have left. May be called twice."""

    @property
    def _weights_directory(self) -> str:
        return self._spec.weights.directory or str(shared_dir(self.run_dir) / "weights")

    def settings_for(self, worker: WorkerPlan, controller: str, incarnation: int = 0) -> WorkerSettings:
        """Return all that a worker needs to start; on this host, unless a subclass says otherwise."""
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
            report_every=report_every(self._plan.policies, self._plan.predictor, self._plan.num_instances),
            reports=reports_of(self._plan.policies),
            gather_s=GATHER_S,
            flush_tokens=settings.flush_tokens,
            flush_s=settings.flush_s,
            heartbeat_s=settings.heartbeat_s,
            record_every=settings.record_every,
            parent=os.getpid(),
            incarnation=incarnation,
            takes_turns=bool(worker.lease),
            rank_group=RankGroupSettings(num_ranks=worker.ranks, parts=self._spec.train.parts),
            transports={route.target: route.transport for route in self._plan.routes if route.source == worker.name != route.target},
            takes_pairs=any(route.target == worker.name and route.transport in PAIRS for route in self._plan.routes),
            shared_bytes=self._spec.channels.shared_bytes,
            attempt=self._job.attempt,
            restore={slot.role: restore[slot.role] for slot in worker.engines if slot.kind == "train" and slot.role in restore},
            weights=weight_settings(worker.name, self._plan.syncs, self._spec.weights, self._weights_directory),
        )

    def blame(self, worker: str, rank: int) -> None:  # Has nothing to do by default.
        """Note which rank of a worker hangs, for messages about its process and its log."""

    def has_trainer(self, worker: str) -> bool:
        """Whether this worker trains weights."""
        return any(slot.kind == "train" for planned in self._plan.workers if planned.name == worker for slot in planned.engines)

    def log_path(self, worker: str) -> Path:
        """Return the path of the log of the rank to blame."""
        return self.log_of(worker, 0)

    def log_of(self, worker: str, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.run_dir / "logs" / (f"{worker}.{rank}.log" if rank else f"{worker}.log")

    def log_tail(self, worker: str) -> str:
        """Return the last lines that a worker printed."""
        path = self.log_path(worker)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-_LOG_LINES:])


@final
class LocalLauncher(Launcher):
    """Start a plan's workers as child processes on this machine."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._sockets = tempfile.TemporaryDirectory(prefix="m2flow-", ignore_cleanup_errors=True)
        self._claim = ResourceClaim(self._prefix, self._sockets.name, self._weights_directory)
        self._processes: dict[str, Processes] = {}
        # Loading a library may touch a GPU's driver, which no fork survives; and beside a model for a GPU the time is nothing.
        self._forks = job.settings.fork_workers and not any(worker.device.startswith("cuda") for worker in job.plan.workers)
        self._server: ForkServer | None = None
        self._is_over = threading.Event()
        if self.keys is None and self._spec.transport == "tcp":
            self.keys = new_secret()

    @property
    def socket_dir(self) -> str:
        """Directory for Unix sockets, private to this user."""
        return self._sockets.name

    @property
    def place(self) -> str:
        """Address at which inboxes listen."""
        return f"tcp:{self._spec.channels.host}" if self._spec.transport == "tcp" else f"ipc:{self.socket_dir}"

    def start(self, controller: str) -> None:
        # Shared segments and sockets of dead runs.
        remove_leftovers()
        self._claim.open()
        if self._forks:
            self._server = warm_up(self._job.settings, has_models=any(has_model(worker.engines) for worker in self._plan.workers))
        # Those that wait for no library first.
        self._controller = controller
        for worker in sorted(self._plan.workers, key=lambda worker: has_model(worker.engines)):
            if worker.is_spare:
                continue
            if self._server is not None:
                self._server.await_engines(worker.engines, self._is_over.is_set)
            if self._is_over.is_set():
                return
            self._processes[worker.name] = self._spawn(worker, controller, 0)

    def give_up(self) -> None:
        self._is_over.set()

    def restart(self, worker: str, incarnation: int) -> None:
        self._processes[worker] = self._spawn(self._plan.worker(worker), self._controller, incarnation)

    def kill(self, worker: str) -> None:
        self._processes[worker].kill()

    def settings_for(self, worker: WorkerPlan, controller: str, incarnation: int = 0) -> WorkerSettings:
        settings = super().settings_for(worker, controller, incarnation)
        return msgspec.structs.replace(settings, claim=self._claim.path)

    def _spawn(self, worker: WorkerPlan, controller: str, incarnation: int) -> Processes:
        settings = self.settings_for(worker, controller, incarnation)
        server = self._server if self._forks else None
        with contextlib.ExitStack() as logs:
            outputs = [logs.enter_context(self.log_of(worker.name, rank).open("ab")) for rank in range(worker.ranks)]
            return start(settings, self.token, outputs, self.socket_dir, path=module_path(), server=server)

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

    def stop(self, exiting: Iterable[str], *, patience_s: float = 5.0) -> None:
        deadline = time.monotonic() + patience_s
        waits_for = set(exiting) & self._processes.keys()
        while waits_for - self.ended().keys() and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in self._processes:
            self.kill(worker)
        self._claim.close()
        self._sockets.cleanup()


def keys_of(spec: ClusterSpec) -> Keys | None:
    """Read the cluster's key, if the spec names a file with one.

    Raises:
        SpecError: the file does not exist, or other users can read it.
    """
    return read_keys(Path(spec.channels.keys).expanduser()) if spec.channels.keys else None


def make_keys(path: Path) -> None:
    """Write the key of a new cluster to a file.

    Raises:
        SpecError: the file exists already, or can't be written.
    """
    write_keys(path, new_keys())


# ---- workers on another host


_MOST_BYTES = 4 << 20
"""Bytes of output kept for each rank until they are fetched; the oldest are dropped."""
_GATHER_S = 0.1
"""Output of so long is answered together."""
_TAIL_S = 30.0
"""Limit for reading what a worker had printed before it ended; processes that it has detached may print on for ever."""
_HELD_S = 1.0
"""When nothing has come for so long from a pipe of a worker that has ended, a process that the worker has detached holds it open."""


class StartWorker(msgspec.Struct, frozen=True):
    """A request to an agent: start this worker."""

    settings: WorkerSettings
    """The worker's settings, as they are on the launcher's host."""
    token: str
    keys_file: str
    """Path of the cluster's key on each host; empty: there is none."""
    flow_directory: str
    """Directory of the flow on the launcher's host. The agent may run in a copy of it, where models under it are then found."""
    cwd: str
    """Working directory of the launcher, and of the worker too if its host has such a directory."""
    device: str
    """The worker's device, as its host calls it."""
    gpus: str = ""
    """GPUs that it shares with another worker there, as in `CUDA_VISIBLE_DEVICES`; empty: those that the agent was given."""


_read_start_worker = msgspec.json.Decoder(StartWorker).decode


class Started(msgspec.Struct, frozen=True):
    """Answer to `StartWorker`: the worker's process."""

    pid: int
    address: str
    """Address of its host."""
    gpus: str
    """GPUs that the agent sees, as in `CUDA_VISIBLE_DEVICES`."""


class AgentReport(msgspec.Struct, frozen=True):
    """News of a worker since the last report."""

    printed: dict[int, bytes] = {}
    """Rank -> its output."""
    how: str = ""
    """How the worker ended; empty while it runs."""
    rank: int = 0
    """The rank whose end ended the worker."""
    stopped: tuple[int, ...] = ()
    """Ranks that a signal has stopped."""


@final
class Agent:
    """Run one worker on this host. Its methods are called from several threads."""

    def __init__(self, find_address: Callable[[], str]) -> None:
        """
        Args:
            find_address: returns the IPv4 address at which other hosts of the cluster reach this one.
        """
        self._address = find_address()
        self._claim: ResourceClaim | None = None
        self._processes: Processes | None = None
        self._directory = ""
        self._how = ""
        self._rank = 0
        self._printed: dict[int, bytearray] = {}
        self._num_lost: Counter[int] = Counter()
        self._news = threading.Condition()

    def start(self, request: bytes) -> Started:
        """Start the worker of a `StartWorker` request in JSON.

        Raises:
            SpecError: the cluster's key is not on this host.
        """
        sent = _read_start_worker(request)
        with contextlib.suppress(OSError):  # Ray gives its workers the lowest priorities, for the sake of its own processes.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        settings = self._here(sent)
        pipes = [os.pipe() for _ in range(settings.rank_group.num_ranks)]
        try:
            cwd = sent.cwd if os.path.isdir(sent.cwd) else None
            outputs, path = [writing for _, writing in pipes], os.environ.get("PYTHONPATH", "")
            processes = start(settings, sent.token, outputs, self._directory, path=path, cwd=cwd, gpus=sent.gpus)
        finally:
            for _, writing in pipes:
                os.close(writing)
        self._processes = processes
        readers = [threading.Thread(target=self._read, args=(rank, reading), daemon=True) for rank, (reading, _) in enumerate(pipes)]
        for reader in readers:
            reader.start()

        def wait() -> None:
            how = processes.wait()
            deadline = time.monotonic() + _TAIL_S
            for reader, (pipe, _) in zip(readers, pipes, strict=True):
                while reader.is_alive() and _has_more(pipe) and time.monotonic() < deadline:
                    reader.join(_HELD_S)
            with self._news:
                self._how, self._rank = how, processes.rank
                self._news.notify_all()

        threading.Thread(target=wait, daemon=True).start()
        return Started(processes.pid, self._address, os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def follow(self, timeout_s: float) -> AgentReport:
        """Return what the worker has printed since the last call, and how it has ended; without news, after `timeout_s`."""
        with self._news:
            self._news.wait_for(lambda: self._printed or self._how, timeout_s)
            if not self._how:
                self._news.wait_for(lambda: self._how, _GATHER_S)
            missing = {
                rank: b"[%d bytes are missing here: they came faster than they were fetched]\n" % n for rank, n in self._num_lost.items()
            }
            stopped = self._processes.stopped if self._processes is not None and not self._how else ()
            printed = {rank: missing.get(rank, b"") + bytes(block) for rank, block in self._printed.items()}
            report = AgentReport(printed, self._how, self._rank, stopped)
            self._printed.clear()
            self._num_lost.clear()
            return report

    def kill(self, patience_s: float = 5.0) -> None:
        """End the worker and what it has started, and remove what it may have left on this host."""
        with self._news:
            if self._processes is not None and not self._how:
                for pid in self._processes.pids:
                    kill_group(pid)
                self._news.wait_for(lambda: self._how, patience_s)
        if self._claim is not None:
            self._claim.close()

    def _here(self, sent: StartWorker) -> WorkerSettings:
        """Translate the worker's settings to this host."""
        settings = sent.settings
        remove_leftovers()
        prefix = f"m2flow-{secrets.token_hex(4)}"
        self._directory = tempfile.mkdtemp(prefix="m2flow-") if settings.rank_group.num_ranks > 1 else ""
        self._claim = ResourceClaim(prefix, self._directory, settings.weights.directory)
        self._claim.open()
        models = {role: _found(model, sent.flow_directory) for role, model in settings.models.items()}
        weights = settings.weights
        if is_private(f"tcp://{weights.host}:0"):
            weights = msgspec.structs.replace(weights, host=self._address)
        return msgspec.structs.replace(
            settings,
            inbox=f"tcp:{self._address}",
            keys=read_keys(Path(sent.keys_file).expanduser()) if sent.keys_file else settings.keys,
            device=sent.device,
            models=models,
            shared_prefix=f"{prefix}-{settings.name}",
            parent=os.getpid(),
            claim=self._claim.path,
            weights=weights,
        )

    def _read(self, rank: int, pipe: int) -> None:
        with os.fdopen(pipe, "rb", buffering=0) as file:
            while block := file.read(1 << 16):
                with self._news:
                    printed = self._printed.setdefault(rank, bytearray())
                    printed += block
                    too_many = len(printed) - _MOST_BYTES
                    if too_many > 0:
                        del printed[:too_many]
                        self._num_lost[rank] += too_many
                    self._news.notify_all()


def _has_more(pipe: int) -> bool:
    """Wait up to `_HELD_S` for output or the end of file on a pipe; False if neither came."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(_HELD_S * 1000))


def _found(model: Model, flow_directory: str) -> Model:
    """Find the model on this host: at the launcher's path, or in the copy of the flow's directory."""
    path = Path(model.path)
    if not flow_directory or path.exists() or not path.is_relative_to(flow_directory):
        return model
    here = Path.cwd() / path.relative_to(flow_directory)
    return dataclasses.replace(model, path=str(here)) if here.exists() else model
