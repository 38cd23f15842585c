"""What a launcher has on a host that is not its own: starts one worker there, keeps what it prints until that is fetched, and ends it.

    launcher --start, follow, kill--> Agent --spawn--> m2flow.micro.worker.worker_process

How it is called is the launcher's business (`m2flow.micro.controller.ray_launcher`: it is a Ray actor). The worker says where it listens
itself, over m2flow's own link; what goes between workers never comes here. It ends when the agent's process does, whatever ended that.
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
from m2flow.micro.worker.worker_process import kill_group
from m2flow.micro.worker.worker_settings import WorkerSettings
from m2flow.recipe import Model

_MOST_BYTES = 4 << 20
"""Of what a rank printed and was not fetched: the newest."""
_GATHER_S = 0.1
"""Lines come together."""
_TAIL_S = 30.0
"""For what a worker that has ended had printed, and for no more of what it has let go of."""
_HELD_S = 1.0
"""When nothing has come from a pipe of a worker that has ended, who holds it open is a process that the worker has let go of."""


class Errand(msgspec.Struct, frozen=True):
    """What an agent is sent to do."""

    settings: WorkerSettings
    """Of the worker, as on the launcher's host."""
    token: str
    keys_file: str
    """Where each host has the cluster's key, if it has one."""
    flow_directory: str
    """A copy of it may be where the agent runs: models under it are then found there, if they are not where the launcher has them."""
    cwd: str
    """Where the launcher runs. The worker runs there too if there is such a directory on its host."""
    device: str
    """The worker's, as its host calls it."""
    gpus: str = ""
    """That it shares with another worker there, as in `CUDA_VISIBLE_DEVICES`; by default those that the agent was given."""


class Started(msgspec.Struct, frozen=True):
    """A worker's process."""

    pid: int
    address: str
    """Of its host."""
    gpus: str
    """That the agent sees, as in `CUDA_VISIBLE_DEVICES`."""


class Told(msgspec.Struct, frozen=True):
    """News of a worker."""

    printed: dict[int, bytes] = {}
    """By rank, since the last time."""
    how: str = ""
    """It ended, and how."""
    rank: int = 0
    """That it ended for."""
    stopped: tuple[int, ...] = ()
    """Ranks that a signal has stopped."""


@final
class Agent:
    """Of one worker's process. Its methods are called from several threads."""

    def __init__(self, find_address: Callable[[], str]) -> None:
        """
        Args:
            find_address: gives where other hosts of the cluster reach this one, IPv4.
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

    def start(self, errand: bytes) -> Started:
        """Start the worker that an `Errand` in JSON says.

        Raises:
            SpecError: the cluster's key is not there.
        """
        sent = msgspec.json.decode(errand, type=Errand)
        with contextlib.suppress(OSError):  # Ray gives its workers the lowest priorities, for the sake of its own processes.
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        settings = self._here(sent)
        pipes = [os.pipe() for _ in range(settings.gang.num_ranks)]
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

    def follow(self, timeout_s: float) -> Told:
        """What the worker has printed since the last call, and how it has ended; without news, only after a time."""
        with self._news:
            self._news.wait_for(lambda: self._printed or self._how, timeout_s)
            if not self._how:
                self._news.wait_for(lambda: self._how, _GATHER_S)
            missing = {
                rank: b"[%d bytes are missing here: they came faster than they were fetched]\n" % n for rank, n in self._num_lost.items()
            }
            stopped = self._processes.stopped if self._processes is not None and not self._how else ()
            printed = {rank: missing.get(rank, b"") + bytes(block) for rank, block in self._printed.items()}
            told = Told(printed, self._how, self._rank, stopped)
            self._printed.clear()
            self._num_lost.clear()
            return told

    def kill(self, patience_s: float = 5.0) -> None:
        """End the worker and what it has started, and remove what it may have left on this host."""
        with self._news:
            if self._processes is not None and not self._how:
                for pid in self._processes.pids:
                    kill_group(pid)
                self._news.wait_for(lambda: self._how, patience_s)
        if self._claim is not None:
            self._claim.close()

    def _here(self, sent: Errand) -> WorkerSettings:
        """The worker's settings as they are on this host."""
        settings = sent.settings
        remove_leftovers()
        prefix = f"m2flow-{secrets.token_hex(4)}"
        self._directory = tempfile.mkdtemp(prefix="m2flow-") if settings.gang.num_ranks > 1 else ""
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
    """Whether what it holds, or its end, is to be read, or was just now; False: nothing came for a while."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(_HELD_S * 1000))


def _found(model: Model, flow_directory: str) -> Model:
    """The model as it is here: where the launcher has it, or in the copy of the flow's directory."""
    path = Path(model.path)
    if not flow_directory or path.exists() or not path.is_relative_to(flow_directory):
        return model
    here = Path.cwd() / path.relative_to(flow_directory)
    return dataclasses.replace(model, path=str(here)) if here.exists() else model
