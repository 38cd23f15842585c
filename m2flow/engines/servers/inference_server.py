"""Run an inference server as a child process (its options, ports and private directory), and speak to it by HTTP.

    Launch (which module, with which arguments) --> python -m ... on a free port of the loopback interface --> url

The packages of inference servers conflict with m2flow's, so a server has an interpreter of its own (option `python`), and is spoken to by
HTTP only.

    PrivateDirectory.open -> /dev/shm/m2flow-sglang-x8k2/ ... close, or the end of this process -> removed

Shared memory outlives the process that wrote it, and a model's weights are in it. So a shell waits at a pipe whose other end only this
process has; however this process ends, the pipe closes, and the shell removes the directory. If the shell is killed as well, the next
directory that is opened beside it removes those whose lock nobody holds.

The client has requests whose tokens stream in, their state, and calls that change the server.

    generate(rid, body) --a connection each, in a thread of its own--> Heard: some tokens of a request, and at last how it ended

A `Dialect` says what paths and answers of one kind of server look like. `Requests` keeps an engine's requests:

    waiting --sent--> running --heard--> ended
    tokens, log-probabilities, spans of versions --extended--> Job
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import os
import queue
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, final

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.engines.installed import Product, check_version, interpreter_of, keep_gloo_here
from m2flow.engines.models.requests import Job, split_finished
from m2flow.errors import EngineError
from m2flow.samples import Finish, SampleId

# ---- the process


_FIRST = 20_000
"""Lowest port that is used: Ray gives its workers those from 10,002 on."""
_LAST = 32_767
_FEWEST = 1_000
"""Ports needed below the ephemeral range; a host may make nearly all of its ports ephemeral."""
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(number: int) -> list[int]:
    """Find ports that are free at every address of this host, below the kernel's ephemeral range, so that no other process is assigned one.

    Raises:
        EngineError: there are not so many.
    """
    last = _last()
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(_FIRST, last + 1), last + 1 - _FIRST):
            if len(found) == number:
                return found
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    raise EngineError(
        f"of the ports {_FIRST} to {last} only {len(found)} are free, and a server needs {number}",
        now="Stop servers that nobody uses, or give each run a machine of its own.",
    )


def _last() -> int:
    try:
        first_given = int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST
    return first_given - 1 if first_given - _FIRST >= _FEWEST else _LAST


_LOCK = ".held"
_GUARD = 'while read -r _; do :; done; rm -rf "$1"'


@final
class PrivateDirectory:
    """A private directory that is removed when this process ends, in whatever way."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self._prefix = prefix
        self._parent = Path(parent or tempfile.gettempdir())
        self._lock: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.path = Path()

    def open(self) -> Path:
        remove_abandoned(self._prefix, self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # What ends this process's group must leave it.
        )
        fresh = self.path / f"{_LOCK}.new"  # Locked before it has its name: nobody may find it without.
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)
        return self.path

    def close(self) -> None:
        """Remove the directory. May be called twice."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove this user's directories with a prefix whose lock no process holds; returns them."""
    found = []
    for path in sorted(parent.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # Somebody else's, or removed meanwhile, or just being made, or held.
            status = path.lstat()
            if path.is_symlink() or status.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                found.append(path)
            finally:
                os.close(lock)
    return found


_LOG_LINES = 20
_PORTS_TRIED = 3
_END_S = 15.0

# Its parent's end ends the server (Linux: PR_SET_PDEATHSIG), which takes its own children with it.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class ServerOptions:
    """How the server is started."""

    python: str = ""
    """Its interpreter; empty: this one."""
    args: str = ""
    """Further arguments of the server, as in a shell."""
    env: str = ""
    """Further environment variables: `A=1 B=2`, as in a shell."""
    start_timeout_s: float = 300.0


@dataclass(frozen=True)
class Launch:
    """How to start one kind of server: everything that differs between kinds."""

    product: Product
    arguments: tuple[str, ...]
    """Arguments of its interpreter, without address and port."""
    env: Mapping[str, str] = field(default_factory=dict)


class ServerProcess:
    """A server process: `start`, then `url`; `check` now and then; `stop` at the end."""

    def __init__(self, launch: Launch, options: ServerOptions, log: Path) -> None:
        self._what = launch
        self._options = options
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            MissingExtra: its interpreter lacks the server, or has one that is too old. EngineError: it ended, or did not come up in time.
        """
        check_version(self._what.product, self._options.python)
        for attempt in range(1, _PORTS_TRIED + 1):
            (port,) = free_ports(1)
            self._launch(port)
            try:
                self._wait(f"http://127.0.0.1:{port}")
            except EngineError:
                self.stop()
                # Somebody else took the port in between.
                if attempt < _PORTS_TRIED and "address already in use" in self.last_words().lower():
                    continue
                raise
            self.url = f"http://127.0.0.1:{port}"
            return

    def check(self) -> None:
        """Check that the server is running. Raises `EngineError`."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise EngineError(
                f"the {self._what.product.name} server ended with status {status}", now=f"Its log is {self._log}.", remote=self.last_words()
            )

    def is_lost(self, wait_s: float) -> bool:
        """Whether it has ended, or does so in this time."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.poll() is not None

    def end_hung(self) -> None:
        """Kill a server that answers nothing any more; `check` says so from then on."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def stop(self) -> None:
        """End it and all its processes. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        for how, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # What it left in its group.

    def _launch(self, port: int) -> None:
        python = self._options.python or sys.executable
        command = [python, *self._what.arguments, "--host", "127.0.0.1", "--port", str(port), *shlex.split(self._options.args)]
        # What this process runs with is not for another interpreter.
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **self._what.env}
        keep_gloo_here(environment)
        for assignment in shlex.split(self._options.env):
            name, equals, value = assignment.partition("=")
            if not equals:
                raise EngineError(f"env is {self._options.env!r}; {assignment!r} is no NAME=VALUE", now="Mend rollout.options.env.")
            environment[name] = value
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TIED, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        with httpx2.Client(trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check()
                with contextlib.suppress(httpx2.HTTPError):
                    if client.get(f"{url}/health", timeout=5.0).status_code == httpx2.codes.OK:
                        return
                time.sleep(0.2)
        raise EngineError(
            f"the {self._what.product.name} server did not come up in {self._options.start_timeout_s:g} s",
            now=f"Its log is {self._log}; option start_timeout_s gives it longer.",
            remote=self.last_words(),
        )

    def last_words(self) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        except OSError:
            return ""


OPTIONS = {
    "python": "The server's interpreter; by default this one.",
    "args": "Further arguments of the server.",
    "env": "Environment variables of the server, `A=1 B=2`.",
    "start_timeout_s": "Seconds that the server may take to come up, by default 300.",
    "url": "A running server to use. It receives the flow's weights at the start, and continues if its previous user left it paused.",
    "stream_interval": "Tokens between two reports of a sample, by default 8.",
    "weights_dir": "Where weights are handed over as files, by default `/dev/shm`.",
    "restarts": "How often a lost server is restarted, by default 2.",
    "hung_after_s": "Seconds of silence after which a server counts as hung, by default 120.",
    "keep_kv": 'With `kv="keep"`, running samples keep their KV cache when weights change; by default the server recomputes it.',
}
"""The options of all served rollout engines, each with its meaning."""
_STREAM_INTERVAL = 8
_RESTARTS = 2
_HUNG_AFTER_S = 120.0


@final
class ServedRolloutOptions:
    """Options of one served rollout engine, from the cluster spec."""

    def __init__(self, engine: str, given: Mapping[str, object], own: Iterable[str]) -> None:
        self._engine = engine
        self._given = given
        self._names = (*OPTIONS, *own)

    def check(self) -> None:
        """Check names and values. Raises `EngineError`."""
        if unknown := sorted(set(self._given) - set(self._names)):
            raise EngineError(
                f"the rollout engine {self._engine} has no option {', '.join(unknown)}", now=f"It has {', '.join(self._names)}."
            )
        for name in ("start_timeout_s", "hung_after_s", "restarts", "stream_interval"):
            self._number(name, 1.0)

    def is_set(self, name: str) -> bool:
        return bool(self._given.get(name))

    @property
    def url(self) -> str:
        """Address of a server that runs already; empty: one is started."""
        return str(self._given.get("url", ""))

    @property
    def server(self) -> ServerOptions:
        timeout = self._number("start_timeout_s", ServerOptions.start_timeout_s)
        return ServerOptions(interpreter_of(self._given), str(self._given.get("args", "")), str(self._given.get("env", "")), timeout)

    @property
    def stream_interval(self) -> int:
        """Tokens between two stream messages of a sample."""
        return max(1, int(self._number("stream_interval", _STREAM_INTERVAL)))

    @property
    def restarts(self) -> int:
        return int(self._number("restarts", _RESTARTS))

    @property
    def hung_after_s(self) -> float:
        return self._number("hung_after_s", _HUNG_AFTER_S)

    @property
    def keeps_caches(self) -> bool:
        """Whether running requests keep their KV caches when weights change."""
        return self.is_set("keep_kv")

    @property
    def weights_place(self) -> str | None:
        """Directory for weights on their way to the server; None: that of temporary files."""
        if given := str(self._given.get("weights_dir", "")):
            return given
        return "/dev/shm" if Path("/dev/shm").is_dir() else None

    def _number(self, name: str, default: float) -> float:
        value = self._given.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise EngineError(f"the option {name} of the rollout engine {self._engine} is {value!r}; it must be a number from 0 on")
        return float(value)


# ---- the client


_T = TypeVar("_T")
_MAX_CONNECTIONS = 4096
_KEPT_S = 1.0
"""For an idle connection. Servers on uvicorn close one after 5 s: on one that was kept as long a request could meet its end."""


class TokenSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request were generated by weights of this version."""

    version: str
    start: int
    end: int


class FinishReason(msgspec.Struct, frozen=True):
    """How a request ended."""

    type: str
    message: str | None = None


@dataclass(frozen=True)
class Heard:
    """A message about one request: new tokens, its end, or an error."""

    rid: str
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    spans: tuple[TokenSpan, ...] = ()
    """With `finish`: which weights generated which of all its tokens."""
    routed_experts: str = ""
    """With `finish`, where asked for: the experts of all tokens but the last, prompt included, as `Dialect.experts` reads them."""
    error: str = ""
    """The connection broke, or the server refused the request."""
    is_broken: bool = False
    """With `error`: the connection broke, or its data was cut off."""
    num_cached: int = 0
    """With `finish`, where the server says it: tokens of the prompt that it found in its cache."""
    num_put_back: int = 0
    """Likewise: times that the request was preempted, keeping its tokens."""


class Dialect(ABC):
    """Requests and answers of one kind of server."""

    product: str
    """Its name in messages."""
    generate_path: str
    abort_path: str

    @abstractmethod
    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        """The body of a streaming request with this id."""

    @abstractmethod
    def heard(self, rid: str, text: bytes) -> Heard:
        """Decode one chunk of the stream. Raises `msgspec.DecodeError`."""

    @abstractmethod
    def experts(self, said: str) -> npt.NDArray[Any]:
        """Decode `Heard.routed_experts`: integers [T, layers, experts of a token] of the request's first tokens, of any shape."""

    @abstractmethod
    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        """Bodies of the calls that abort requests."""


@final
class ServerClient:
    """A client of one server, used from one thread: `open`, calls, `close`."""

    def __init__(self, url: str, dialect: Dialect) -> None:
        self.url = url
        self._dialect = dialect
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-client", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._thread.start()
        limits = httpx2.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS, keepalive_expiry=_KEPT_S)
        self._http = self._wait(self._made(limits))

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._wait(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, rid: str, body: Mapping[str, object]) -> None:
        """Send a request; its messages come from `heard`."""
        self._loop.call_soon_threadsafe(self._begin, rid, dict(body))

    def heard(self, timeout_s: float) -> list[Heard]:
        """Return all messages so far; waits up to `timeout_s` for the first."""
        found: list[Heard] = []
        try:
            found.append(self._heard.get(timeout=timeout_s))
            while True:
                found.append(self._heard.get_nowait())
        except queue.Empty:
            return found

    def call(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 60.0) -> Any:
        """POST, or GET without a body; returns the answer.

        Raises:
            EngineError: the server refused, or did not answer.
        """
        return self.begin(path, body, timeout_s).result()

    def begin(self, path: str, body: Mapping[str, object] | None, timeout_s: float) -> concurrent.futures.Future[Any]:
        """Start a `call` without waiting for the answer; errors are raised by its `result`."""
        return asyncio.run_coroutine_threadsafe(self._called(path, body, timeout_s), self._loop)

    def begin_abort(self, rids: list[str]) -> None:
        """Abort without waiting until the server has answered, and ignore it if it does not."""
        asyncio.run_coroutine_threadsafe(self._aborted(rids), self._loop)

    def abort(self, rids: list[str]) -> None:
        """Ask the server to abort requests; they end in `heard`, with `abort` or with the finish that came first."""
        self._wait(self._aborted(rids))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # In the loop's thread

    async def _made(self, limits: httpx2.Limits) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=httpx2.Timeout(30.0, read=None), trust_env=False)

    async def _ended(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _begin(self, rid: str, body: dict[str, object]) -> None:
        task = self._loop.create_task(self._stream(rid, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, rid: str, body: dict[str, object]) -> None:
        is_over, dialect = False, self._dialect
        try:
            async with self._http.stream("POST", dialect.generate_path, json=dialect.named(rid, body)) as answer:
                if answer.status_code != httpx2.codes.OK:
                    raise EngineError(error_summary(await answer.aread()))
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        heard = dialect.heard(rid, line[6:].encode())
                        is_over = heard.finish is not None or bool(heard.error)
                        self._heard.put(heard)
            if not is_over:
                raise httpx2.RemoteProtocolError("the server closed the connection")
        except (httpx2.HTTPError, EngineError, msgspec.DecodeError) as error:
            if not is_over:
                broken = isinstance(error, (httpx2.TransportError, msgspec.DecodeError))
                self._heard.put(Heard(rid, [], [], error=f"{error}" or type(error).__name__, is_broken=broken))

    async def _called(self, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Any:
        try:
            sent = self._http.get(path, timeout=timeout_s) if body is None else self._http.post(path, json=dict(body), timeout=timeout_s)
            answer = await sent
        except httpx2.HTTPError as error:
            raise EngineError(
                f"the {self._dialect.product} server did not answer {path}: {str(error) or type(error).__name__}",
                now="The server's log in the run's logs/ says why.",
            ) from None
        if answer.status_code != httpx2.codes.OK:
            raise EngineError(
                f"the {self._dialect.product} server refused {path}: {error_summary(answer.content)}",
                now="The server's log in the run's logs/ says why.",
            )
        try:
            return msgspec.json.decode(answer.content) if answer.content else None
        except msgspec.DecodeError:
            return answer.text

    async def _aborted(self, rids: list[str]) -> None:
        bodies = self._dialect.abort_bodies(rids)
        await asyncio.gather(*(self._called(self._dialect.abort_path, body, 30.0) for body in bodies))


def error_summary(body: bytes) -> str:
    """Extract a server's error message, in one line."""
    try:
        found = msgspec.json.decode(body)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or str(found)
        return str(found)
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")


@dataclass
class Running:
    """A request that the server has, with the tokens that have come."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_mixed: bool = False
    """Weights have changed under it: the server reports at its end which version made which token."""
    num_broken: int = 0
    """Connections that broke under it before this one."""
    is_stopped: bool = False
    """A token has completed a stop text; what the server makes beyond it is dropped."""
    num_dropped: int = 0
    """Tokens dropped so."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the sample has, without its prompt."""
        return len(self.job.tokens) + len(self.tokens)

    def take_in(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens that have come, up to the first that completes a stop text."""
        if self.job.stop_texts is None:
            self.tokens += tokens
            self.logprobs += logprobs
            return
        for at, token in enumerate(tokens):
            if self.is_stopped:
                self.num_dropped += len(tokens) - at
                return
            self.tokens.append(token)
            self.logprobs += logprobs[at : at + 1]
            self.is_stopped = self.job.is_stopped_by(np.concatenate([self.job.tokens, np.array(self.tokens, np.int32)]))

    def so_far(self, version: int) -> Job:
        """The job with the tokens that have come, all of them by the weights of this version."""
        return extended(self, [TokenSpan(str(version), 0, len(self.tokens))] if self.tokens else [])

    def kept(self, version: int) -> Job:
        """What stays of it if the server does not end it. It begins anew if weights have changed under it: which of them made which token
        was not said yet."""
        return self.job if self.is_mixed else self.so_far(version)


@final
class Requests:
    """All requests of an engine: waiting, running and ended."""

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.running: dict[str, Running] = {}
        """Running requests by their id at the server."""
        self.aborting: set[str] = set()
        """Those of them whose abort was requested."""
        self.ended: list[tuple[Job, Finish]] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.ended)

    def clear(self) -> None:
        for all_of_a_kind in (self.waiting, self.running, self.aborting, self.ended):
            all_of_a_kind.clear()

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; those that are whole samples have ended."""
        goes_on, whole = split_finished(jobs)
        self.waiting += goes_on
        self.ended += whole

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Queue jobs before all others. A whole sample has ended: its last token came before the message of its end."""
        goes_on, whole = split_finished(jobs)
        self.waiting.extendleft(reversed(goes_on))
        self.ended += whole

    def put_back_running(self, version: int) -> None:
        """Queue all running requests again after the server was lost, which had weights of this version."""
        kept = [one.kept(version) for one in self.running.values()]
        self.running.clear()
        self.aborting.clear()
        self.put_back(kept)

    def end(self, rid: str, job: Job, finish: Finish) -> None:
        """End a running request with this result."""
        del self.running[rid]
        self.aborting.discard(rid)
        self.ended.append((job, finish))

    @property
    def resting(self) -> list[Job]:
        """Requests that the server does not have."""
        return [*(job for job, _ in self.ended), *self.waiting]

    def take(self, ids: Collection[int]) -> list[Job]:
        """Remove and return those of these requests that the server does not have."""
        taken = [job for job in self.resting if job.id in ids]
        self.ended = [(job, finish) for job, finish in self.ended if job.id not in ids]
        self.waiting = deque(job for job in self.waiting if job.id not in ids)
        return taken

    def take_ended(self) -> list[tuple[Job, Finish]]:
        ended, self.ended = self.ended, []
        return ended

    def progress(self) -> dict[int, int]:
        """Number of tokens of each sample."""
        return {job.id: len(job.tokens) for job in self.resting} | {one.job.id: one.num_tokens for one in self.running.values()}


def extended(one: Running, spans: Sequence[TokenSpan], *, keeps: bool = False) -> Job:
    """Return a job with all its tokens, each with the version of the weights that made it.

    Args:
        keeps: caches stay when weights change, so what comes after the first weights is of an older cache.
    """
    job, count = one.job, len(one.tokens)
    if one.is_stopped:
        spans = [TokenSpan(span.version, span.start, min(span.end, count)) for span in spans if span.start < count]
    if len(one.logprobs) != count or (count and (not spans or spans[-1].end != count)):
        raise EngineError(
            f"the server said {len(one.logprobs)} log-probabilities and versions {spans} of {count} tokens "
            f"of sample {SampleId.unpack(job.id)}"
        )
    versions = np.zeros(count, np.int32)
    kv_stale = np.zeros(count, np.bool_)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
        kv_stale[span.start : span.end] = keeps and span.version != spans[0].version
    return replace(
        job,
        tokens=np.concatenate([job.tokens, np.array(one.tokens, np.int32)]),
        logprobs=np.concatenate([job.logprobs, np.array(one.logprobs, np.float32)]),
        versions=np.concatenate([job.versions, versions]),
        kv_stale=np.concatenate([job.kv_stale, kv_stale]),
    )
