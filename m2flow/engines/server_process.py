"""An inference server as a child of this process: started, watched, and ended with it.

    Launch (which module, with which arguments) --> python -m ... on a free port of the loopback interface --> url

The packages of inference servers contradict m2flow's, so a server has an interpreter of its own (option `python`), and only HTTP between.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from m2flow.engines.loopback import keep_gloo_here
from m2flow.engines.ports import free_ports
from m2flow.engines.server_installed import Product, check_version
from m2flow.errors import EngineError

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
    """What is started: all that differs between one kind of server and another."""

    product: Product
    arguments: tuple[str, ...]
    """Of its interpreter, but for address and port."""
    env: Mapping[str, str] = field(default_factory=dict)


class ServerProcess:
    """One server. `start`, then `url`; `check` now and then; `stop` at the end."""

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
        """Raises `EngineError` if it is not running any more."""
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
        """Kill it, since it answers nothing any more; `check` says so from then on."""
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
        """The end of its log."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        except OSError:
            return ""
