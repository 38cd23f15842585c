"""Run a worker, or a trainer's rank above 0, as a process: its sockets and heartbeats, its end, and what it removes from its host.

    python -m m2flow.micro.worker.worker_process    settings on standard input, the run's secret in the environment

One thread runs `m2flow.micro.worker.worker`. A second sends heartbeats, and a third ends the process when the one that started it is gone,
whatever the first is doing.

    HeartbeatSource.heartbeat --> Heartbeat with turns, processor time, memory, GPU use, and the time here
    Echo --HeartbeatSource.hear--> the next heartbeat says how long the two messages were under way

A rank above 0 calls its engines as rank 0 commands (`m2flow.micro.worker.rank_group`). It has no tasks and sends no results. Its heartbeat
goes to the controller, and so does an error that rank 0 does not listen for, because it is in a collective that this rank never enters. It
exits when rank 0 says so, when rank 0 is gone, and when the process that started it is.

What a run has on a host outside its directory (shared-memory segments, sockets, weight files) is claimed by its owner.

    /dev/shm/m2flow-<8 digits>.owner    a locked file that names the run's sockets and segments; the lock is free once its owner has ended

An owner that ends in order removes everything (`ResourceClaim.close`). If it is killed its workers do, each as it ends, since one may have
made more after another has cleaned up. If they are killed with it, the next run of the same user does (`remove_leftovers`): only files of
this user, only under m2flow's names, and only where the lock is free. The kernel keeps the lock, so neither a reused process id nor a
container that shares the directory misleads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import TextIOWrapper
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TextIO, final

import msgspec
import psutil

from m2flow.channels.codec import decode_batch
from m2flow.channels.parcels import SHARED_MEMORY, ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PAIRS, PairReceiver, PairSender
from m2flow.channels.shared_memory import Arena, keep_freed_memory, remove_arenas
from m2flow.channels.weights import PieceWriter, Written, remove_segments
from m2flow.channels.weights.weight_files import remove_files
from m2flow.channels.zeromq import HeartbeatSender, LinkDialer, wait
from m2flow.engines import place
from m2flow.engines.contract import LOADING, EngineSettings, Objective, TrainEngine
from m2flow.engines.installed import GpuUse, find_gpu
from m2flow.errors import DecodeError, InternalError, M2FlowError, unexpected
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.protocol.worker_state import rank_tag
from m2flow.micro.worker.engine_host import lender_of
from m2flow.micro.worker.fork_server import TOKEN_VARIABLE, leave
from m2flow.micro.worker.rank_group import (
    GRACE_S,
    AccumulateCommand,
    Acknowledge,
    ApplyCommand,
    Compute,
    CopyFrom,
    Do,
    End,
    File,
    Here,
    RankAnswer,
    RankGroup,
    Said,
    WritePieces,
    accumulate_share,
    heard,
    make_own_train,
    say,
)
from m2flow.micro.worker.worker import Worker, WorkerSettings
from m2flow.observe.spans import now_ns
from m2flow.recipe import Loss, Model
from m2flow.samples import Batch

# ---- what a run has on a host


_SUFFIX = ".owner"
_NAME = re.compile(r"m2flow-[0-9a-f]{8}")


class HostResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has on this host outside its directory; the content of a claim's file."""

    prefix: str
    """Prefix of the names of its shared-memory segments."""
    sockets: str
    weights: str
    """Directory of weights that are synced as files; empty: none."""

    def remove(self) -> None:
        """Remove all of it. May be called several times, by the owner or by whoever knows that the owner is gone."""
        remove_segments(self.prefix)
        remove_arenas(self.prefix)
        if self.weights:
            remove_files(self.weights, self.prefix)
        if _is_ours(self.sockets) and os.path.basename(self.sockets).startswith("m2flow-"):
            shutil.rmtree(self.sockets, ignore_errors=True)


_read_host_resources = msgspec.json.Decoder(HostResources).decode


@final
class ResourceClaim:
    """Claim one run's resources on this host from `open` to `close`."""

    def __init__(self, prefix: str, sockets: str, weights: str) -> None:
        self._resources = HostResources(prefix, sockets, weights)
        self.path = os.path.join(_directory(), prefix + _SUFFIX)
        self._file: int | None = None

    def open(self) -> None:
        # Locked before it is renamed: nobody may find it unlocked.
        number, made = tempfile.mkstemp(prefix=".m2flow-", dir=_directory())
        os.write(number, msgspec.json.encode(self._resources))
        fcntl.flock(number, fcntl.LOCK_EX)
        os.rename(made, self.path)
        self._file = number

    def close(self) -> None:
        """Remove all that the run has left. May be called twice."""
        remove(self.path)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def remove(path: str, resources: HostResources | None = None) -> None:
    """Remove the resources that a claim's file names, or `resources` if it was read before, then the file itself."""
    resources = resources or read(path)
    if resources is not None:
        resources.remove()
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_leftovers() -> list[str]:
    """Remove what dead runs of this user have left; return their prefixes."""
    found = []
    for path in sorted(Path(_directory()).glob(f"m2flow-*{_SUFFIX}")):
        if not _NAME.fullmatch(path.name.removesuffix(_SUFFIX)) or not _is_ours(str(path)):
            continue
        with contextlib.suppress(OSError):  # It was removed meanwhile, or its owner lives.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(path))
                found.append(path.name.removesuffix(_SUFFIX))
            finally:
                os.close(number)
    return found


def read(path: str) -> HostResources | None:
    """Read a claim's file. None: there is no such file, or it is not m2flow's."""
    try:
        said = _read_host_resources(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_named_so = os.path.basename(path) == said.prefix + _SUFFIX and _NAME.fullmatch(said.prefix) is not None
    return said if is_named_so else None


def _is_ours(path: str) -> bool:
    """Whether a path exists, belongs to this user and is no symbolic link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)


def _directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


# ---- the process of a worker


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
        cpu_s, at = time.process_time(), place()
        return m.encode(
            m.Heartbeat(num_turns, cpu_s, is_in_users_code, self._now_ns(), exchange, memory, use, gpu_memory, LOADING.words(), at)
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
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # What a function prints must not end a run because the log can't hold it.
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


# ---- the process of a rank above 0


_POLL_S = 0.02


class Rank:
    """The engines of one rank."""

    def __init__(self, engines: Mapping[str, TrainEngine], link: Connection) -> None:
        self._engines = engines
        self._link = link
        self._losses: dict[str, Loss] = {}
        self._writers: dict[str, PieceWriter] = {}

    def serve(self, when_unheard: Callable[[M2FlowError], None]) -> None:
        """Carry out rank 0's commands until `End`.

        Args:
            when_unheard: takes an error that rank 0 does not listen for.
        Raises:
            EOFError: rank 0 is gone.
        """
        while not isinstance(word := heard(self._link), End):
            rows = decode_batch(self._link.recv_bytes()) if isinstance(word, AccumulateCommand | Compute) else None
            try:
                written = self._do(word, rows)
            except Exception as error:
                known = error if isinstance(error, M2FlowError) else unexpected(getattr(word, "method", type(word).__name__), error)
                say(self._link, RankAnswer(known.to_record()))
                if not self._link.poll(GRACE_S):
                    when_unheard(known)
                if not isinstance(heard(self._link), Acknowledge):
                    raise InternalError("rank 0 goes on after an error that it has not heard") from error
            else:
                say(self._link, RankAnswer(written=written))

    def _do(self, word: Said, rows: Batch | None) -> Written | None:
        assert not isinstance(word, Acknowledge | End)
        engine = self._engines[word.role]
        match word:
            case Do(method="weights" | "adapters" | "base" as method):
                for _ in getattr(engine, method)():
                    pass
            case Do(method=method):
                getattr(engine, method)()
            case AccumulateCommand(role=role, loss=loss):
                assert rows is not None
                if loss:
                    self._losses[role] = pickle.loads(loss)
                accumulate_share(engine, rows, Objective(self._losses[role]))
            case ApplyCommand(optimizer=optimizer, denominator=denominator):
                engine.apply(pickle.loads(optimizer), denominator)
            case Compute(method=computed, top_k=top_k):
                assert rows is not None
                getattr(engine, computed)(rows, *([top_k] if top_k else []))
            case CopyFrom(source=source, share=share):
                engine.copy_from(self._engines[source], share)
            case File(method=way, path=path):
                getattr(engine, way)(path)
            case WritePieces(role=role, manifest=manifest, bucket_bytes=bucket_bytes):
                return self._writers.setdefault(role, PieceWriter()).write(engine.weight_pieces(), manifest, bucket_bytes)
        return None


def _meet(settings: WorkerSettings, secret: str) -> Connection:
    """Connect to rank 0, which may not listen yet."""
    while True:
        try:
            link = Client(settings.rank_group.meeting, "AF_UNIX", authkey=secret.encode())
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(_POLL_S)
        else:
            say(link, Here(settings.rank_group.rank))
            return link


def _engines(slots: Sequence[EngineSlot], models: Mapping[str, Model], settings: EngineSettings) -> dict[str, TrainEngine]:
    """By role; none of them is started."""
    made: dict[str, TrainEngine] = {}
    for slot in sorted(slots, key=lambda slot: lender_of(slot, slots, models) is not None):
        lender = lender_of(slot, slots, models)
        reference = None if lender is None else made[lender].adapter_reference(slot.role, models[slot.role])
        made[slot.role] = reference or make_own_train(slot, models[slot.role], settings)
    return made


def _serve_rank(settings: WorkerSettings, secret: str) -> None:
    """Be a rank above 0 until rank 0 ends it, or is gone."""
    tag = rank_tag(settings.tag, settings.rank_group.rank)

    def report(error: M2FlowError) -> None:
        where = f" (worker {settings.name}, rank {settings.rank_group.rank}, pid {os.getpid()})"
        named = type(error)(error.what + where, where=error.where, now=error.now, remote=error.remote)
        dialer = LinkDialer(keys=settings.keys)
        dialer.open(settings.controller, tag, secret)
        dialer.send(m.encode(m.Fatal(named.to_record())))
        dialer.close(drain_s=LAST_WORDS_S)

    def heartbeat() -> bytes:
        return m.encode(m.Heartbeat(0, time.process_time(), True, place=place()))

    sender = HeartbeatSender(settings.controller, tag, secret, period_s=settings.heartbeat_s, payload=heartbeat, keys=settings.keys)
    sender.open()
    link = _meet(settings, secret)
    train, slots = settings.engine_settings()["train"], [slot for slot in settings.engines if slot.kind == "train"]
    try:
        Rank(_engines(slots, settings.models, train), link).serve(report)
    except EOFError:
        sys.exit("rank 0 is gone")
    finally:
        link.close()
        sender.close()


# ---- the entry point


def main(given: bytes = b"") -> None:
    """The entry point: settings on standard input, or given; the run's secret in the environment."""
    settings = _read_worker_settings(given or sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which tells its workers what to do.
    watch_parent(settings)
    secret = os.environ.pop(TOKEN_VARIABLE, "")
    if settings.rank_group.rank:
        _serve_rank(settings, secret)
        return
    keep_freed_memory()
    streams = BoundedPrint(sys.stdout), BoundedPrint(sys.stderr)
    sys.stdout, sys.stderr = streams  # Text streams by what they delegate.
    try:
        serve(settings, secret)
    finally:
        for stream in streams:
            stream.end()


if __name__ == "__main__":
    main()
    leave()
