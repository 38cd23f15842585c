"""Host agent: starts one worker on a host that is not the launcher's, buffers what it prints, and ends it.

    launcher --start, follow, kill--> Agent --spawn--> m2flow.micro.worker.worker_process

The launcher decides how its methods are called (`m2flow.micro.controller.ray_launcher` makes it a Ray actor). The worker reports its own
address over m2flow's control link, and traffic between workers does not pass the agent. A worker ends when its agent's process does, for
whatever reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import final

import msgspec

from m2flow.channels.endpoints import is_private, read_keys
from m2flow.micro.controller.launcher import Processes, start
from m2flow.micro.worker.host_resources import ResourceClaim, remove_leftovers
from m2flow.micro.worker.worker import WorkerSettings
from m2flow.micro.worker.worker_process import kill_group
from m2flow.recipe import Model

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
