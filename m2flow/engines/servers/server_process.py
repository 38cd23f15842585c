"""Run an inference server as a child process: its options, ports and private directory; start, watch and stop it.

    Launch (which module, with which arguments) --> python -m ... on a free port of the loopback interface --> url

The packages of inference servers conflict with m2flow's, so a server has an interpreter of its own (option `python`), and is spoken to by
HTTP only.

    PrivateDirectory.open -> /dev/shm/m2flow-sglang-x8k2/ ... close, or the end of this process -> removed

Shared memory outlives the process that wrote it, and a model's weights are in it. So a shell waits at a pipe whose other end only this
process has; however this process ends, the pipe closes, and the shell removes the directory. If the shell is killed as well, the next
directory that is opened beside it removes those whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import httpx2

from m2flow.engines.installed import Product, check_version, interpreter_of, keep_gloo_here
from m2flow.errors import EngineError

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
    raise EngineError(f"of the ports {_FIRST} to {last} only {len(found)} are free, and a server needs {number}")


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
