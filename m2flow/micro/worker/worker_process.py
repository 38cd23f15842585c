"""Run a worker as a process: open its sockets, send heartbeats, and end it when it is stopped, fails, or loses its parent.

    python -m m2flow.micro.worker.worker_process    settings on standard input, the run's secret in the environment

One thread runs `m2flow.micro.worker.worker`. A second sends heartbeats, and a third ends the process when the one that started it is gone,
whatever the first is doing.

    HeartbeatSource.heartbeat --> Heartbeat with turns, processor time, memory, GPU use, and the time here
    Echo --HeartbeatSource.hear--> the next heartbeat says how long the two messages were under way
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO, final

import msgspec
import psutil

from m2flow.channels.parcels import SHARED_MEMORY, ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PAIRS, PairReceiver, PairSender
from m2flow.channels.shared_memory import Arena, keep_freed_memory
from m2flow.channels.zeromq import HeartbeatSender, LinkDialer, wait
from m2flow.engines.contract import LOADING
from m2flow.engines.installed import GpuUse, find_gpu
from m2flow.errors import DecodeError, M2FlowError, unexpected
from m2flow.micro.protocol import messages as m
from m2flow.micro.worker.fork_server import TOKEN_VARIABLE
from m2flow.micro.worker.host_resources import HostResources, read, remove
from m2flow.micro.worker.rank_group import RankGroup
from m2flow.micro.worker.worker import Worker, WorkerSettings
from m2flow.observe.spans import now_ns

_read_worker_settings = msgspec.json.Decoder(WorkerSettings).decode


@final
class HeartbeatSource:
    """Make this process's heartbeats. After construction the heartbeat thread alone uses it."""

    def __init__(self, progress: Callable[[], tuple[int, bool]], gpu: GpuUse | None, anchor_ns: int) -> None:
        """
        Args:
            progress: turns of the main loop so far, and whether it is in a user's function.
            gpu: the GPU that this process uses, if it can be asked.
            anchor_ns: nanoseconds to add to the recorder's times to get Unix times.
        """
        self._progress = progress
        self._anchor_ns = anchor_ns
        self._process = psutil.Process(os.getpid())
        self._gpu = gpu
        self._exchange: tuple[int, int, int, int] | None = None

    def heartbeat(self) -> bytes:
        """Return the next heartbeat, encoded."""
        num_turns, is_in_users_code = self._progress()
        exchange, self._exchange = self._exchange, None
        memory: int | None = None
        with contextlib.suppress(psutil.Error, OSError):
            memory = self._process.memory_info().rss
        use, gpu_memory = self._gpu.read() if self._gpu is not None else (None, None)
        return m.encode(
            m.Heartbeat(
                num_turns, time.process_time(), is_in_users_code, self._now_ns(), exchange, memory, use, gpu_memory, LOADING.words()
            )
        )  # The time is read last, so that it is close to the time of sending.

    def hear(self, body: bytes) -> None:
        """An answer to a heartbeat. What is none goes: the next one says the same."""
        back_ns = self._now_ns()
        try:
            echo = m.decode_echo(body)
        except DecodeError:
            return
        self._exchange = (echo.asked_ns, echo.heard_ns, echo.answered_ns, back_ns)

    def _now_ns(self) -> int:
        return now_ns() + self._anchor_ns


_DRAIN_S = 3.0
LAST_WORDS_S = 60.0
"""For what is said last, such as why this process ends: a controller on a busy machine may be slow to take it."""
_MOST_PRINTED = 32 << 20
"""Characters of each standard stream that a process's log takes at once."""
_PRINTED_PER_S, _MOST_PRINTED_LATER = 100, 64 << 10
"""After these, so that the log still says what happens: as many more each second, gathered up to so many."""
_IDLE_S = 0.25
"""Between two turns of a worker that has nothing to do: in the next one it sends what it recorded."""
_ASKS_AFTER_S = 0.5
"""While a peer takes nothing for so long, the worker listens whether it is dead."""


class BoundedPrint:
    """A standard stream that takes so many characters, and then a few each second; others are left out, and how many is printed.

    What functions print must not fill the disk of a run that goes on for days. Limit: what is written past Python, by a library in C or by
    a process that a function starts, is not seen here.
    """

    def __init__(self, stream: TextIO, most: int = _MOST_PRINTED) -> None:
        self._stream = stream
        self._left = float(most)
        self._seen_s = time.monotonic()
        self._num_unsaid = 0
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # Another thread may have had it.

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            now_s = time.monotonic()
            if self._left < _MOST_PRINTED_LATER:
                self._left = min(self._left + _PRINTED_PER_S * (now_s - self._seen_s), _MOST_PRINTED_LATER)
            self._seen_s = now_s
            taken = text if len(text) <= self._left else text[: int(self._left)] if self._left > _MOST_PRINTED_LATER else ""
            if taken:
                self._say()
                self._stream.write(taken)
            self._left -= len(taken)
            self._num_unsaid += len(text) - len(taken)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def end(self) -> None:
        """Say how many were left out, if some were."""
        with self._lock:
            self._say()
            self._stream.flush()

    def _say(self) -> None:
        if self._num_unsaid:
            self._stream.write(f"\n[{self._num_unsaid:,} characters that were printed here are left out: a log would grow without bound]\n")
            self._num_unsaid = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def watch_parent(settings: WorkerSettings) -> None:
    """End this process when the one that started it is gone, whatever the main thread is doing."""

    # Read here, since another worker may have removed the claim's file before this one made more. On Ray there is none.
    resources = read(settings.claim) or HostResources(settings.shared_prefix, sockets="", weights="")

    def watch() -> None:
        while os.getppid() == settings.parent:
            time.sleep(0.5)
        remove(settings.claim, resources)
        if os.getpgrp() == os.getpid():
            kill_group(os.getpid())  # With what a user's function has started: the launcher gives each worker a group of its own.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def kill_group(pid: int) -> None:
    """End what a worker is and has started. It leads a group and a session of its own: users' functions start processes in the group, and
    ninja gives each compiler another group of the session."""
    if pid != os.getpid():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    killed: set[int] = set()
    while new := {other for other in psutil.pids() if _session_of(other) == pid} - killed - {os.getpid()}:  # They may start others.
        for other in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        killed |= new
    if pid == os.getpid():
        os.killpg(pid, signal.SIGKILL)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def serve(settings: WorkerSettings, token: str) -> None:
    """Run a worker over ZeroMQ until it is told to stop."""
    # The plan's routes hold all that a step makes, so nobody waits for room while a slow function keeps this worker from reading.
    keys = settings.keys
    ways = set(settings.transports.values())
    receiver = PairReceiver(device=settings.device) if settings.takes_pairs else None
    link, inbox = LinkDialer(keys=keys), ZmqInbox(settings.inbox, max_parcels=0, keys=keys, pairs=receiver)
    # A name of its own: another process may have had this worker's name before, and some of its buffers may still be read.
    arena = Arena(f"{settings.shared_prefix}-{os.getpid()}", max_bytes=settings.shared_bytes) if SHARED_MEMORY in ways else None
    pairs = PairSender(device=settings.device) if ways & PAIRS.keys() else None
    outbox = ZmqOutbox(settings.tag, timeout_s=_ASKS_AFTER_S, keys=keys, arena=arena, pairs=pairs)
    link.open(settings.controller, settings.tag, token)
    rank_group = RankGroup(settings.rank_group, token)
    worker = Worker(settings, link, inbox, outbox, rank_group.make_train)

    heartbeats = HeartbeatSource(lambda: (worker.num_turns, worker.is_in_users_code), find_gpu(settings.device), worker.recorder.anchor_ns)
    period_s = settings.heartbeat_s
    sender = HeartbeatSender(
        settings.controller, settings.tag, token, period_s=period_s, payload=heartbeats.heartbeat, hear=heartbeats.hear, keys=keys
    )
    sender.open()
    try:
        rank_group.open()
        worker.open()
        while not worker.is_stopping:
            if not worker.has_work:
                worker.rest()
                wait([link, inbox], _IDLE_S)
            worker.turn()
    except M2FlowError as error:
        worker.fail(error)
    except Exception as error:
        worker.fail(unexpected(f"worker {settings.name}", error))
    finally:
        worker.close()
        rank_group.close()
        _drain(link, inbox)
        sender.close()
        outbox.close(drain_s=1.0)
        inbox.close()
        link.close(drain_s=LAST_WORDS_S)


def _drain(link: LinkDialer, inbox: ZmqInbox) -> None:
    """Take what others still send until a second Stop says that all have finished: a full inbox that is gone would hold them up."""
    deadline = time.monotonic() + _DRAIN_S
    while time.monotonic() < deadline:
        wait([link, inbox] if inbox.is_open else [link], 0.1)
        with contextlib.suppress(M2FlowError):
            if inbox.is_open:  # It may be why this worker can't go on.
                inbox.take()
            if any(isinstance(m.decode_to_worker(message), m.Stop) for message in link.receive(0.0)):
                return


def main(given: bytes = b"") -> None:
    """The entry point: settings on standard input, or given; the run's secret in the environment."""
    settings = _read_worker_settings(given or sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which tells its workers what to do.
    watch_parent(settings)
    keep_freed_memory()
    streams = BoundedPrint(sys.stdout), BoundedPrint(sys.stderr)
    sys.stdout, sys.stderr = streams  # Text streams by what they delegate.
    try:
        serve(settings, os.environ.pop(TOKEN_VARIABLE, ""))
    finally:
        for stream in streams:
            stream.end()


if __name__ == "__main__":
    main()
