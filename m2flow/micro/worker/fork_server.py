"""Fork workers from a process that has loaded what they need: both sides, and the environment of processes with engines.

    load_ahead(...) | fork_server(environment) --> ForkServer, a process that runs serve_forks
    ForkServer.fork --Fork--> serve_forks --fork, fork--> a worker: a child of the process that asked
    ForkServer.load_engines --Load--> serve_forks --fork--> another server, which loads torch and transformers

Loading torch and transformers takes longer than all else before a run's first token. So the command line starts the server before it loads
its own modules (`load_ahead`), and this module imports little.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.machinery
import inspect
import io
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Any, NoReturn, final

import msgspec

from m2flow.errors import InternalError

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import EngineSlot
    from m2flow.micro.worker.worker import WorkerSettings

_FILE = io.IOBase.__mro__[1]
"""The type of what Python opens, without the check of the class before it for what only behaves so."""
TOKEN_VARIABLE = "M2FLOW_TOKEN"
"""Environment variable with the run's secret."""


def worker_environment(threads: int, token: str, path: str, gpus: str = "", *, deterministic: bool) -> dict[str, str]:
    return {
        **engine_environment(threads, deterministic=deterministic),
        **os.environ,
        TOKEN_VARIABLE: token,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
    }


def engine_environment(threads: int, *, deterministic: bool) -> dict[str, str]:
    """Environment variables of a process with engines. They must be set before torch is loaded."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Waiting threads spin for some microseconds, then sleep. Without spinning a step took up to 1.2 times as long on free cores; with
        # more spinning, on cores shared with other work, 3 times as long and worse.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # The matrix libraries' results must not depend on memory alignment or on what ran before.
    return environment | ({"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})


@final
class Forked:
    """A child process that a fork server has forked and this process has adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


_READ_WHEN_LOADED = re.compile(
    r"(OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|NPY|NUMPY|TORCH\w*|PYTORCH|ATEN|CUDA|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SAFETENSORS|USE"
    r"|PYTHON\w*|LD|LC|MALLOC|GLIBC|XDG)_\w+|PYTHON\w+|HOME|LANG|MALLOC\w+"
)
"""Names of environment variables that Python, torch, transformers and what they load read at that time; others are read when needed."""
_OF_A_WORKER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
"""Those that are another in each worker, which sets itself up by them."""
_ENGINES = (
    "m2flow.engines.models.model_files",
    "m2flow.engines.models.hf_model",
    "m2flow.engines.embedded.rollout_engine",
    "m2flow.engines.embedded.trainer",
    "m2flow.algorithms.advantages",
    "transformers.models.auto.modeling_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.generation.utils",
)
"""What is loaded before a worker with a model is forked: torch and transformers with what engines use of them."""
WORKER = "m2flow.micro.worker.worker_process"
"""The module whose `main` is the process of a worker, and of a rank of one."""
_LOOKS_S = 0.01
_ANSWERS_WITHIN_S = 60.0
"""For a process of one thread, whose modules are loaded; after that it counts as stopped or hung."""
_LOADS_WITHIN_S = 300.0
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
"""`prctl(2)`: orphans among the descendants of a process that is a subreaper become its children."""


@final
class ForkServer:
    """Processes that have loaded what workers need, and from which workers are forked (`serve_forks`).

    One has what every worker needs. Another, which it forks when the first worker with a model is to come, has torch and transformers too.
    They stay for later runs of this process, and end with it. Their environment is that of the run that they were started for, and
    another server comes where what libraries read of it when they are loaded differs. Any thread may call all methods.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _read_when_loaded(environment)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        own, its = socket.socketpair()
        self._links: dict[tuple[str, ...], socket.socket] = {(): own}
        self._ready: set[socket.socket] = set()
        program = f"from m2flow.micro.worker.fork_server import serve_forks; serve_forks({its.fileno()}, {self._owner})  #{' ' * 200}"
        printed = os.memfd_create("m2flow-fork-server")
        with its, os.fdopen(printed, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", TOKEN_VARIABLE: ""},
                pass_fds=[its.fileno()],
                start_new_session=True,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it can fork workers with this environment, and nothing has ended it."""
        is_there = self._owner == os.getpid() and bool(self._links) and self._process.poll() is None
        return is_there and self._environment == _read_when_loaded(environment)

    def load_engines(self) -> None:
        """Begin to load what workers with models need, if that is not so yet. Returns at once."""
        with self._lock, contextlib.suppress(OSError):
            self._link(_ENGINES)

    def await_engines(self, slots: Sequence[EngineSlot], is_over: Callable[[], bool]) -> None:
        """Wait until a worker with these engines can be forked at once or not at all, or `is_over`, which any thread may bring about."""
        deadline = time.monotonic() + _LOADS_WITHIN_S
        while not is_over():
            with self._lock:
                try:
                    if self._is_ready(self._link(_loaded_for(slots)), 0.0):
                        return
                    if time.monotonic() > deadline:
                        raise OSError("no fork server is ready")
                except OSError:
                    self._end()
                    return
            time.sleep(_LOOKS_S)

    def fork(
        self, settings: WorkerSettings, module: str, name: str, output: IO[bytes] | int, environment: Mapping[str, str]
    ) -> Forked | None:
        """Fork a process; None, if this server can't any more.

        Args:
            module: its `main` is called.
            output: receives what it prints.
        """
        with self._lock:
            try:
                if not self.fits(environment):
                    if self._process.returncode is not None:
                        self._end()
                    return None
                link, printed = self._link(_loaded_for(settings.engines)), output if isinstance(output, int) else output.fileno()
                if not self._is_ready(link, _LOADS_WITHIN_S):
                    raise OSError("no fork server is ready")
                request = msgspec.msgpack.encode(_request_for(settings, module, name, environment))
                return Forked(ask_for(link, request, [printed], _ANSWERS_WITHIN_S))
            except OSError:
                self._end()
                return None

    def close(self) -> None:
        """End it. What it has forked goes on."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _link(self, modules: tuple[str, ...]) -> socket.socket:
        if not self._links:
            raise OSError("the fork server has ended")
        if modules not in self._links:
            own, its = socket.socketpair()
            with its:
                ask(self._links[()], Load(modules), [its.fileno()])
            self._links[modules] = own
        return self._links[modules]

    def _is_ready(self, link: socket.socket, timeout_s: float) -> bool:
        """Whether a server has loaded what it shall, after so many seconds at most. Raises `OSError` if it has ended."""
        if link not in self._ready and _is_heard(link.fileno(), timeout_s):
            if not link.recv(len(READY)):
                raise OSError("the fork server has ended")
            self._ready.add(link)
        return link in self._ready

    def _end(self) -> None:
        self.forget()
        self._ready.clear()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_SERVER: ForkServer | None = None
_SERVER_LOCK = threading.Lock()
_IS_AHEAD = False
"""Whether the server was started for a run that may not need it, and none has asked for it yet."""


def fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """Return this process's fork server for workers with such an environment, a new one if need be; None where there can be none."""
    global _SERVER, _IS_AHEAD
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    with _SERVER_LOCK:
        _IS_AHEAD = False
        if _SERVER is not None and not _SERVER.fits(environment):
            _SERVER.close()
            _SERVER = None
        if _SERVER is None:
            with contextlib.suppress(OSError):
                os.close(os.pidfd_open(os.getpid()))  # Old kernels, and some sandboxes, have none.
                _SERVER = ForkServer(environment)
        return _SERVER


def load_ahead(*, deterministic: bool) -> None:
    """Begin to load what the workers of a run will need before it is known whether they do. Returns at once."""
    global _IS_AHEAD
    server = fork_server(worker_environment(1, "", module_path(), deterministic=deterministic))
    if server is not None:
        server.load_engines()
        _IS_AHEAD = True


def end_unneeded() -> None:
    """End what `load_ahead` has started, unless a run uses it."""
    global _SERVER
    with _SERVER_LOCK:
        if _IS_AHEAD and _SERVER is not None:
            _SERVER.close()
            _SERVER = None


def module_path() -> str:
    """Where this process finds modules, as in `PYTHONPATH`."""
    return os.pathsep.join(path for path in sys.path if path)


def _forget_server() -> None:
    """In a fork of this process: the server is not its own, and threads that held a lock are gone."""
    global _SERVER, _SERVER_LOCK
    if _SERVER is not None:
        _SERVER.forget()
    _SERVER, _SERVER_LOCK = None, threading.Lock()


def _end_server() -> None:
    if _SERVER is not None:
        _SERVER.close()


os.register_at_fork(after_in_child=_forget_server)
atexit.register(_end_server)


def _read_when_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_WHEN_LOADED.fullmatch(name) and name not in _OF_A_WORKER}


def has_model(slots: Iterable[EngineSlot]) -> bool:
    """Whether one of these engines holds a model in torch."""
    from m2flow.engines.registry import engine_named

    return any(slot.kind != "function" and "torch" in engine_named(slot.engine, slot.kind).requires for slot in slots)


def _loaded_for(slots: Iterable[EngineSlot]) -> tuple[str, ...]:
    return _ENGINES if has_model(slots) else ()


def _request_for(settings: WorkerSettings, module: str, name: str, environment: Mapping[str, str]) -> Fork:
    kinds = {getattr(resource, kind) for kind in dir(resource) if kind.startswith("RLIMIT_")}
    return Fork(
        module,
        msgspec.json.encode(settings),
        name,
        os.getpid(),
        tuple((os.fsencode(variable), os.fsencode(value)) for variable, value in environment.items()),
        tuple(environment["PYTHONPATH"].split(os.pathsep)),
        os.getcwd(),
        tuple(os.sched_getaffinity(0)),
        {kind: resource.getrlimit(kind) for kind in kinds},
        os.getpriority(os.PRIO_PROCESS, 0),
        _umask(),
    )


def _umask() -> int:
    """This process's, which no system call tells without setting it for a moment, for all threads; -1: the system does not say."""
    found = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 8) if found else -1


def ask_for(link: socket.socket, request: bytes, descriptors: Sequence[int], within_s: float) -> int:
    """Return the id of a process that a server has forked. Raises `OSError` if there is none."""
    answer, its = os.pipe()
    with os.fdopen(answer, "rb", buffering=0), _adopting_orphans():
        try:
            send(link, request, [*descriptors, its])
        finally:
            os.close(its)
        if not (pid := _heard(answer, within_s)):
            raise OSError("the fork server does not answer")
        return int(pid)


def _heard(descriptor: int, timeout_s: float) -> bytes:
    """What comes within some time; empty: nothing did, or the other side is gone."""
    return os.read(descriptor, 64) if _is_heard(descriptor, timeout_s) else b""


def _is_heard(descriptor: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """For some milliseconds. Another descendant that loses its parent just then becomes a child of this process too."""
    library, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    if library.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0) or library.prctl(_SET_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process may not adopt another")
    try:
        yield
    finally:
        library.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


# ---- the server


class Fork(msgspec.Struct, frozen=True, tag=True):
    """A request to a fork server: be this process. Two descriptors come with it: what the process prints to, and where it says its pid."""

    module: str
    """The module whose `main` it calls."""
    settings: bytes
    """Its `WorkerSettings` in JSON, handed to `main`."""
    name: str
    """Shown by `ps`."""
    parent: int
    """The process that shall be its parent. It adopts orphans while it waits for the answer."""
    environment: tuple[tuple[bytes, bytes], ...]
    path: tuple[str, ...]
    """Where it finds modules, after its working directory and before what this interpreter adds."""
    cwd: str
    cores: tuple[int, ...]
    """Processor cores that it may use."""
    limits: dict[int, tuple[int, int]]
    """Resource limits (`resource.setrlimit`)."""
    priority: int
    """Its niceness."""
    umask: int
    """-1: the server's."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """A request to a fork server: fork another one, which loads these modules and serves the link that comes with it."""

    modules: tuple[str, ...]


_read_request: Callable[[bytes], Fork | Load] = msgspec.msgpack.Decoder(Fork | Load).decode

READY = b"\0"
"""What a fork server says when it has loaded what it shall."""
_ADOPTED_WITHIN_S = 10.0
_LENGTH = struct.Struct("<I")
_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")


def ask(link: socket.socket, request: Fork | Load, descriptors: Sequence[int]) -> None:
    """Send a request to a fork server. Raises `OSError` if it is gone."""
    send(link, msgspec.msgpack.encode(request), descriptors)


def send(link: socket.socket, body: bytes, descriptors: Sequence[int]) -> None:
    """Send what `receive` gives on the other side. Raises `OSError` if it is gone."""
    socket.send_fds(link, [_LENGTH.pack(len(body))], list(descriptors))
    link.sendall(body)


def serve_forks(descriptor: int, owner: int) -> None:
    """Be a fork server: fork the processes that the link asks for, until the link or the process that owns it is gone.

        server --fork--> an intermediate process, which ends --fork--> the worker, an orphan, which the owner adopts

    So a worker is its owner's child, as one that the owner has started itself: who waits for it, its exit status and what it does when its
    parent is gone are the same, and the end of the server changes nothing for it. The server has one thread and opens nothing: no device,
    no ZeroMQ context, no file. Users' modules are loaded in workers alone.
    """
    gc.disable()
    importlib.import_module(WORKER)
    gc.freeze()
    own_path = [place for place in sys.path if place and place not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    become = _forked(socket.socket(fileno=descriptor), owner, own_path)
    gc.enable()
    become()


def _forked(link: socket.socket, owner: int, own_path: Sequence[str]) -> Callable[[], None]:
    """The server's loop. Returns in each worker that it has forked: what that shall do."""
    awaited, poller = [os.pidfd_open(owner)], select.poll()
    poller.register(link, select.POLLIN)
    poller.register(awaited[0], select.POLLIN)
    link.sendall(READY)
    while True:
        if any(descriptor != link.fileno() for descriptor, _ in poller.poll()):
            os._exit(0)
        body, descriptors = receive(link, 2)
        request = _read_request(body)
        with contextlib.suppress(ChildProcessError):  # Servers that this one has forked.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        with contextlib.suppress(OSError):  # No process more is allowed: the descriptors are closed, which is the answer.
            server = os.getpid()
            if (child := os.fork()) == 0:
                if isinstance(request, Fork):
                    _leave_orphan()
                    for other in (link.detach(), *awaited):
                        os.close(other)
                    output, answer = descriptors
                    return partial(_become, request, output, answer, own_path)
                poller.unregister(link)
                link.close()
                link = socket.socket(fileno=descriptors.pop())
                awaited.append(os.pidfd_open(server))  # With it goes the way by which orphans reach their owner.
                poller.register(link, select.POLLIN)
                poller.register(awaited[-1], select.POLLIN)
                _load(request.modules)
                link.sendall(READY)
            elif isinstance(request, Fork):
                os.waitpid(child, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def receive(link: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """The next request, with so many descriptors at most; ends the process if there will be none."""
    try:
        head, descriptors, _, _ = socket.recv_fds(link, _LENGTH.size, most)
        while len(head) < _LENGTH.size:
            more = link.recv(_LENGTH.size - len(head))
            head += more or os._exit(0)
        (left,), body = _LENGTH.unpack(head), b""
        while left > len(body):
            more = link.recv(left - len(body))
            body += more or os._exit(0)
    except OSError:
        os._exit(0)
    return body, descriptors


def _leave_orphan() -> None:
    """Go on in a child whose parent has ended."""
    try:
        is_parent = os.fork() != 0
    except OSError:
        is_parent = True
    if is_parent:
        os._exit(0)


def _load(modules: Sequence[str]) -> None:
    """Load what workers need, in a process that will be forked; ends it if that can't be, and plain processes say why."""
    try:
        with _KeptNames(), _brief_frames():
            for module in modules:
                importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            raise InternalError("a module that is loaded for workers has started a thread, which a fork would lose")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    gc.freeze()  # What is garbage by now stays too: to look for it takes longer than a worker takes to start.


@contextlib.contextmanager
def _brief_frames() -> Iterator[None]:
    """Within it, `inspect` says of a frame where it is, by what the frame itself knows.

    For each of its operators torch asks for the file and line, for which `inspect` reads the source too, and for the module, for which it
    resolves the paths of all modules.
    """
    described, found = inspect.getframeinfo, inspect.getmodule

    def module_of(object: object, _filename: str | None = None) -> ModuleType | None:
        return sys.modules.get(object.f_globals.get("__name__", "")) if isinstance(object, FrameType) else found(object, _filename)

    inspect.getframeinfo, inspect.getmodule = (lambda frame, context=1: described(frame, 0)), module_of
    try:
        yield
    finally:
        inspect.getframeinfo, inspect.getmodule = described, found


_Names = dict[frozenset[str], dict[str, set[str]]]
"""Packages needed -> module of transformers -> names in it."""
_read_names = msgspec.json.Decoder(tuple[str, list[tuple[list[str], dict[str, set[str]]]]]).decode


@final
class _KeptNames:
    """Within it, `transformers` gets the names in its models' modules from `kept_names`: a finder, through which it loads its listing."""

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        is_listing = name == "transformers.utils.import_utils"
        found = importlib.machinery.PathFinder.find_spec(name, path) if is_listing else None
        if found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def with_kept_names(module: Any) -> None:
            execute(module)
            if (read := getattr(module, "define_import_structure", None)) is None:
                return  # Another release lists them in another way.

            @cache
            def define(module_path: str | Path, prefix: str | None = None) -> _Names:
                names: Callable[[], _Names] = partial(read, module_path, prefix)
                return kept_names(module_path, names) if prefix == "models" and isinstance(module_path, Path) else names()

            module.define_import_structure = define

        found.loader.exec_module = with_kept_names  # type: ignore[method-assign]
        return found


def kept_names(folder: Path, read: Callable[[], _Names]) -> _Names:
    """Return the names in the modules of a folder as an earlier process kept them; else `read` them, a quarter of a second, and keep them.

    ~/.cache/m2flow/transformers/<digest of the folder's path>.json    (or $XDG_CACHE_HOME)

    They hold while the paths, sizes and modification times are the same, as Python's bytecode does: of all modules in the folder, and of
    those in the folder `utils` beside it, which reads them.
    """
    kept = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "m2flow" / "transformers"
    kept /= hashlib.sha256(bytes(folder)).hexdigest()[:32] + ".json"
    modules = sorted([*_modules_in(str(folder)), *_modules_in(str(folder.parent / "utils"))])
    state = hashlib.sha256(repr(modules).encode()).hexdigest()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        of, names = _read_names(kept.read_bytes())
        if of == state:
            return {frozenset(packages): found for packages, found in names}
    names_now = read()
    with contextlib.suppress(OSError):  # There may be no place for it.
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_bytes(msgspec.json.encode((state, list(names_now.items()))))
        made.replace(kept)
    return names_now


def _modules_in(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _modules_in(entry.path)


def _become(request: Fork, output: int, answer: int, own_path: Sequence[str]) -> None:
    """Be the process that was asked for, with nothing of the server's but its modules."""
    before, deadline = os.getppid(), time.monotonic() + _ADOPTED_WITHIN_S
    os.setsid()
    while os.getppid() == before != request.parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    if os.getppid() != request.parent:
        os._exit(1)  # Without an answer, so that another is started.
    with contextlib.suppress(OSError):
        os.write(output, os.pread(1, 1 << 16, 0))  # What loading has printed.
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    _show_name(request.name, request.module)
    try:
        os.write(answer, b"%d" % os.getpid())
    except OSError:
        os._exit(1)  # Nobody waits for it any more.
    for descriptor in (nothing, output, answer):
        os.close(descriptor)
    os.environ.clear()
    os.environb.update(request.environment)
    os.chdir(request.cwd)
    os.sched_setaffinity(0, request.cores)
    for kind, limit in request.limits.items():
        if resource.getrlimit(kind) != limit:
            resource.setrlimit(kind, limit)
    with contextlib.suppress(PermissionError):  # Back up from the server's niceness; not everybody may.
        os.setpriority(os.PRIO_PROCESS, 0, request.priority)
    if request.umask >= 0:
        os.umask(request.umask)
    sys.path[:] = dict.fromkeys([request.cwd, *map(os.path.abspath, request.path), *own_path])
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Or all workers would draw the same; `random` sees to it itself.
    _use_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    importlib.import_module(request.module).main(request.settings)
    leave()


def leave(status: int = 0) -> NoReturn:
    """End this process as Python does, save that it takes no modules apart: for torch and transformers that takes a third of a second of a
    core, while a run waits for its workers.

    Threads are waited for, what was registered for the end is called, and files that are still open are written out. Objects that are still
    there are not finalised.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    opened = (one for one in gc.get_objects() if issubclass(type(one), _FILE))
    for file in (*opened, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.flush()
    os._exit(status)


def _use_threads(threads: int) -> None:
    """Let libraries that read the number of their threads when they are loaded use so many."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if threads > 1 and "OPENBLAS_NUM_THREADS" not in os.environ:
        for library in {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}:
            setters = (getattr(ctypes.CDLL(library), name, None) for name in _BLAS_THREADS)
            for setter in filter(None, setters):
                setter(threads)


def _show_name(name: str, module: str) -> None:
    """Show this process as what it is, where `ps` and `/proc` look: in the memory of the arguments that its server was started with."""
    start, end = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = [sys.executable, "-m", module, "forked", name]
    if start and (room := end - start - len("\0".join([*words, ""]).encode())) >= 0:
        words[3] += " " * room
        shown = "\0".join([*words, ""]).encode()
        ctypes.memmove(start, shown, len(shown))
