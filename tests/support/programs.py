"""Start Python programs in processes that are forked from one that has loaded what they import: `Popen`, as `subprocess.Popen`.

    a test --Popen--> the server of its process --fork, fork--> the program, a child of the process that asked
                                                                  └─fork--> a server of its own, for what it starts

Most of what `python -m m2flow run` takes with a model of a few kilobytes is to load the command line, then torch and transformers for its
workers. Here both are loaded once for each process that runs tests. The rest is as ever: a process of its own with its own environment,
standard streams, directory, group and end. What a run starts for its workers (`m2flow.micro.worker.fork_server`) comes the same way.

Where a process is started otherwise (another interpreter, options of Python, `preexec_fn`) or its environment has other variables that are
read when modules are loaded, it is a plain one. Tests of how long modules take to load, of what they load, and of how workers are started
use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from m2flow.micro.worker import fork_server

_ANSWERS_WITHIN_S = 120.0
_ABOVE = 500
"""Descriptors of a program are kept at numbers from here on until each is where it belongs."""
_MAX_DESCRIPTORS = 64
_LOADED = (
    *(fork_server.WORKER, *fork_server._ENGINES),
    *(f"m2flow.{name}" for name in ("runner.run", "macro.critics", "macro.evaluation", "agents.http_sessions", "agents.mcp_tools")),
    *(f"m2flow.{name}" for name in ("engines.functions", "engines.process_pool", "micro.records.audit", "simulator.simulation")),
    *("m2flow.viewer.analysis", "transformers.models.qwen2.modeling_qwen2", "tensorboardX", "opentelemetry.sdk.trace"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"),
)
"""What a run of a model that tests use loads, its curve and its records included."""
_READ_LATER = ("PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of workers that nothing reads when it is loaded on a machine without GPUs. None of the tests' processes asks the hub."""


class _Program(NamedTuple):
    words: list[str]
    """What follows the interpreter."""
    cwd: str
    environment: dict[bytes, bytes]
    kept: list[int]
    """Numbers of the descriptors that come after the standard streams."""
    parent: int
    has_session: bool
    umask: int


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As `subprocess.Popen`, for a command that begins with `sys.executable`."""

    def _execute_child(self, *given: Any) -> None:
        words, _, preexec, _, kept, cwd, env = given[:7]
        shell, (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite), has_session = given[9], given[10:16], given[21]
        environment = os.environ if env is None else env
        server = None if shell or preexec or not _can_fork(words) else _server_for(environment)
        if server is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        program = _Program(
            list(map(os.fspath, words[1:])),
            os.path.abspath(cwd or os.getcwd()),
            {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            list(kept),
            os.getpid(),
            has_session,
            fork_server._umask(),
        )
        os.stat(program.cwd)
        streams = [given if given != -1 else standard for standard, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = server.start(program, [*streams, *kept])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(words: Sequence[str], *, timeout: float = 240, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(..., capture_output=True, text=True)`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": None, "text": True}
    with Popen(words, **streams | options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _can_fork(words: object) -> bool:
    if not isinstance(words, list | tuple) or len(words) < 2 or words[0] != sys.executable or sys.platform != "linux":
        return False
    return words[1] in ("-c", "-u") or (words[1] == "-m" and words[2] == "m2flow") or not str(words[1]).startswith("-")


class _Server:
    """The side of who asks."""

    def __init__(self, link: socket.socket, environment: Mapping[str, str], process: subprocess.Popen[bytes] | None = None) -> None:
        self._link, self._process, self._lock, self.owner = link, process, threading.Lock(), os.getpid()
        self.loaded_with = _read_when_loaded(environment)

    def start(self, program: _Program, descriptors: Sequence[int]) -> int:
        with self._lock:
            return fork_server.ask_for(self._link, pickle.dumps(program), descriptors, _ANSWERS_WITHIN_S)

    def close(self) -> None:
        """End the server, but for what it has started."""
        self._link.close()
        if self._process is not None:
            self._process.wait()


_server: _Server | None = None


def _server_for(environment: Mapping[str, str]) -> _Server | None:
    """This process's server; None for an environment with which modules would be loaded otherwise."""
    global _server
    if _server is None or _server.owner != os.getpid():
        own, its = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        loaded_with = {**os.environ, **fork_server.engine_environment(1, deterministic=True)}
        with its:
            process = subprocess.Popen(
                [sys.executable, "-c", f"import programs; programs.serve({its.fileno()})  #{' ' * 200}"],
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=loaded_with | {"PYTHONPATH": path},
            )
        _server = _Server(own, loaded_with, process)
    return _server if _read_when_loaded(environment) == _server.loaded_with else None


def _read_when_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    read = fork_server._read_when_loaded(environment)
    return {"HF_HUB_OFFLINE": "1"} | {name: value for name, value in read.items() if name not in _READ_LATER}


# ---- the server's process, and programs


def serve(descriptor: int) -> None:
    """Fork the programs that the link asks for, until it is closed. Returns in each of them, when it is through."""
    gc.disable()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own_path = [place for place in sys.path if place and place not in given]
    for command in sorted(Path(importlib.import_module("m2flow.cli").__path__[0]).glob("*.py")):
        importlib.import_module("m2flow.cli" + f".{command.stem}" * (command.stem != "__init__"))
    for module in _LOADED:
        importlib.import_module(module)
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("qwen2")  # A thousand expressions, compiled when a process saves its first model.
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a module that is loaded for programs of tests has started a thread")
    gc.freeze()
    _serve(socket.socket(fileno=descriptor), own_path)()


def _serve(link: socket.socket, own_path: Sequence[str]) -> Callable[[], None]:
    for end in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(end, signal.SIG_IGN)  # Meant for a group that it is in; it goes with its link.
    while True:
        body, descriptors = fork_server.receive(link, _MAX_DESCRIPTORS)
        if (child := os.fork()) == 0:
            fork_server._leave_orphan()
            link.close()
            return partial(_become, pickle.loads(body), descriptors, own_path)
        os.waitpid(child, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(program: _Program, descriptors: Sequence[int], own_path: Sequence[str]) -> None:
    """Be the program."""
    deadline = time.monotonic() + _ANSWERS_WITHIN_S
    while os.getppid() != program.parent:
        time.sleep(0.0005)
        if time.monotonic() > deadline:
            os._exit(1)
    if program.has_session:
        os.setsid()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(aside, [0, 1, 2, *program.kept], strict=False):
        os.dup2(descriptor, target)
    for end in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(end, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environb.update(program.environment)
    os.environ["M2FLOW_RESTARTED"] = "1"  # Matrix libraries were loaded with what an eager run would start itself again for.
    os.chdir(program.cwd)
    os.umask(program.umask)
    answer = aside.pop()
    for descriptor in aside:
        os.close(descriptor)
    server, its = socket.socketpair()
    if os.fork() == 0:
        server.close()
        os.close(answer)
        for standard in (0, 1, 2):  # Who reads what the program prints must see its end.
            os.dup2(os.open(os.devnull, os.O_RDWR), standard)
        for kept in program.kept:
            os.close(kept)
        _serve(its, own_path)()
        return
    its.close()
    _use(_Server(server, os.environ))
    os.write(answer, b"%d" % os.getpid())
    os.close(answer)
    _set_up_python(program, own_path)
    _end(_status_of(program.words))


def _use(server: _Server) -> None:
    """What this program starts for workers comes from its server."""
    global _server
    _server = server
    fork_server.subprocess = _Subprocess  # type: ignore[attr-defined]


class _Subprocess:
    Popen, DEVNULL = Popen, subprocess.DEVNULL


def _set_up_python(program: _Program, own_path: Sequence[str]) -> None:
    """What an interpreter does when it starts."""
    words, variables = program.words, os.environ
    is_unbuffered = words[0] == "-u" or bool(variables.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", buffering=0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        errors = getattr(sys, name).errors
        is_lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(
            raw, encoding=getattr(sys, name).encoding, errors=errors, line_buffering=is_lines, write_through=is_unbuffered and bool(number)
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.orig_argv = [sys.executable, *words]
    what = _without_unbuffered(words)[0]
    first = program.cwd if what in ("-c", "-m") else os.path.dirname(os.path.abspath(what))
    given = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *map(os.path.abspath, given), *own_path])
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    fork_server._use_threads(int(variables.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    gc.enable()


def _without_unbuffered(words: list[str]) -> list[str]:
    return words[1:] if words[0] == "-u" else words


def _execute(words: list[str]) -> None:
    words = _without_unbuffered(words)
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(words[1], sys.modules["__main__"].__dict__)
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _status_of(words: list[str]) -> int:
    try:
        try:
            _execute(words)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> None:
    """End as an interpreter does, save that it takes no modules apart: for what was loaded here that takes longer than many programs."""
    if status < 0:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    fork_server.leave(status)


@atexit.register
def _close() -> None:
    if _server is not None and _server.owner == os.getpid():
        _server.close()
