"""Run functions in child processes that can be killed without this process, for what may hang, crash or exhaust memory.

    pool = ProcessPool(preload=["the.functions.module"])
    answer = pool.run(Task(pickle.dumps(function)), argument, timeout_s=5.0)    # function(bytes) -> bytes
    pool.close()

    this process --control--> fork server --fork--> children, each with a socket of its own to this process

The fork server is a clean interpreter (no threads, no device, no socket of this process) that has imported `preload`; a child is a fork
of it, which takes milliseconds. A child runs one function at a time, on its main thread, where signals work, and serves the next one
when it is done. It leads a session of its own, so that it ends with whatever it has started. Children end with this process, however
that ends: the server finds its socket closed, and Linux kills the children when the server is gone.

Bytes from a child are never unpickled here: what runs there need not be trusted. Limits: a child has the rights of this process's user,
so this bounds accidents and not malice; a process that a child has put into a session of its own outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from m2flow.errors import EngineError, described

_FRAME = struct.Struct("<QQQ")
"""To a child: the number of the task, the bytes of its function (0: it has it), the bytes of the argument."""
_LENGTH = struct.Struct("<Q")
_ORDER = struct.Struct("<ci")
"""To the fork server: what to do, and with which child."""
_PID = struct.Struct("<i")
_BEAR, _KILL, _REAP = b"b", b"k", b"r"
_TAKEN, _LOADED, _UNLOADABLE, _ANSWER = b"t", b"l", b"u", b"a"
"""What a child says: it has read all; it has the function; it can't have it, and why; what the function returned."""
_MOST_BYTES = 1 << 31
_ENDS_S = 1.0
"""A child whose socket is closed ends by itself within this time, or is killed."""
_LOOKS_EVERY_S = 0.5
_CLOSE_S = 5.0
_BIRTHS = 3
"""Children that may turn out to be dead in a row before one takes the argument."""
_PR_SET_PDEATHSIG = 1
"""Linux, `prctl(2)`."""

Function = Callable[[bytes], bytes]


class ChildTimedOut(Exception):
    """The function exceeded its time limit; its child was killed."""


class ChildDied(Exception):
    """The child ended, or could not load the function. Its text says how, as in "its process" + text."""


_numbers = itertools.count(1)


@final
@dataclass(frozen=True)
class Task:
    """A pickled function from bytes to bytes; it is sent to a child again only after that ran another one."""

    body: bytes = field(repr=False)
    number: int = field(default_factory=_numbers.__next__)


@final
class ProcessPool:
    """Children of one fork server, which starts with the first function. Any thread may call; each call has a child to itself."""

    def __init__(self, *, preload: Sequence[str] = (), load_timeout_s: float = 120.0) -> None:
        """
        Args:
            preload: modules that the server imports, so that no child has to.
            load_timeout_s: what a child may take to unpickle a function, the user's imports included. It is not part of `timeout_s`.
        """
        self._preload = tuple(preload)
        self._load_timeout_s = load_timeout_s
        self._lock = threading.Lock()
        self._server: _ForkServer | None = None
        self._idle: list[_Child] = []
        self._is_closed = False

    def run(self, task: Task, argument: bytes, *, timeout_s: float | None = None) -> bytes:
        """Run a function in a child and return its result.

        Raises:
            ChildTimedOut, ChildDied: see there. EngineError: no child can be started.
        """
        for _ in range(_BIRTHS):
            child = self._take()
            try:
                child.give(task, argument, self._load_timeout_s)
            except _NotTaken:  # It had ended since its last function, which is not this one's fault.
                child.end(_REAP)
                continue
            except (EOFError, OSError) as error:
                how = "took too long to load the function" if isinstance(error, TimeoutError) else child.end(_REAP)
                child.end(_KILL)
                raise ChildDied(how) from None
            except _Unloadable as error:
                child.end(_KILL)
                raise ChildDied(f"can't load the function: {error}") from None
            try:
                answer = child.answer(timeout_s)
            except TimeoutError:
                child.end(_KILL)
                raise ChildTimedOut from None
            except (EOFError, OSError):
                raise ChildDied(child.end(_REAP)) from None
            except BaseException:
                child.end(_KILL)
                raise
            self._give_back(child)
            return answer
        raise EngineError("processes for functions end as soon as they are started", now="The worker's log has what they said.")

    def close(self) -> None:
        """Kill all children. Calls that wait raise `ChildDied`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            server, self._server = self._server, None
        for child in idle:
            child.socket.close()
        if server is not None:
            server.close()

    def _take(self) -> _Child:
        with self._lock:
            if self._is_closed:
                raise ChildDied("was not started: the engine has stopped")
            if self._idle:
                return self._idle.pop()
            if self._server is not None and not self._server.is_alive:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = _ForkServer(self._preload)
            server = self._server
        return server.spawn()

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                return
        child.socket.close()


class _NotTaken(Exception):
    """A child was dead before it took its task."""


class _Unloadable(Exception):
    """A child can't unpickle the function."""


@final
class _Child:
    """This process's side of a child."""

    def __init__(self, server: _ForkServer, pid: int, link: socket.socket) -> None:
        self.socket = link
        self._server = server
        self._pid = pid
        self._task = 0
        self._how = ""

    def give(self, task: Task, argument: bytes, load_timeout_s: float) -> None:
        """Send a function and its argument; returns when the function is about to run."""
        body = b"" if self._task == task.number else task.body
        self.socket.settimeout(load_timeout_s)
        try:
            self.socket.sendall(_FRAME.pack(task.number, len(body), len(argument)))
            self.socket.sendall(body)
            self.socket.sendall(argument)
            taken = _exactly(self.socket, 1)
        except (EOFError, OSError):
            raise _NotTaken from None
        if taken != _TAKEN:
            raise EOFError
        said = _exactly(self.socket, 1)
        if said == _UNLOADABLE:
            raise _Unloadable(self._frame().decode(errors="replace"))
        if said != _LOADED:
            raise EOFError
        self._task = task.number

    def answer(self, timeout_s: float | None) -> bytes:
        """Return the function's result. Raises TimeoutError, or EOFError where the child ends or violates the protocol."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        self.socket.settimeout(None)
        if _exactly(self.socket, 1, deadline) != _ANSWER:
            raise EOFError
        return self._frame(deadline)

    def _frame(self, deadline: float = float("inf")) -> bytes:
        (length,) = _LENGTH.unpack(_exactly(self.socket, _LENGTH.size, deadline))
        if length > _MOST_BYTES:
            raise EOFError
        return _exactly(self.socket, length, deadline)

    def end(self, order: bytes) -> str:
        """Kill the child and all that it has started; describes how it ended."""
        if not self._how:
            self.socket.close()
            self._how = _describe_status(self._server.end(order, self._pid))
        return self._how


def _exactly(link: socket.socket, count: int, deadline: float = float("inf")) -> bytes:
    found = bytearray()
    while len(found) < count:
        if deadline != float("inf"):
            link.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = link.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", perhaps since memory ran out" if -code == signal.SIGKILL else "")


@final
class _ForkServer:
    """This process's side of the fork server."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        path = os.pathsep.join(path for path in sys.path if path)
        try:
            # A session of its own: who kills this process's group must leave the server the time to end its children.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        finally:
            theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self) -> _Child:
        """Fork a new child."""
        with self._lock:
            try:
                self._control.sendall(_ORDER.pack(_BEAR, 0))
                pid, descriptors, _, _ = socket.recv_fds(self._control, _PID.size, 1)
            except OSError:
                pid, descriptors = b"", []
        if not pid or not descriptors:
            raise EngineError("no process for functions can be started", now="The worker's log has what its fork server said.")
        return _Child(self, _PID.unpack(pid)[0], socket.socket(fileno=descriptors[0]))

    def end(self, order: bytes, pid: int) -> int:
        """End a child and return its exit status; SIGKILL's where the server is gone, whose children are killed with it."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            self._control.sendall(_ORDER.pack(order, pid))
            return int(_PID.unpack(_exactly(self._control, _PID.size))[0])
        return int(signal.SIGKILL)

    def close(self) -> None:
        """End the server and all children."""
        # Not under the lock: whoever waits there for the server gets an error.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._control.close()


# The fork server's process, and its children's


def _serve(control: socket.socket, parent: int, preload: Sequence[str]) -> None:
    gc.disable()  # Modules stay: neither while they are loaded nor later is it worth looking for garbage among them.
    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    children: set[int] = set()
    try:
        while os.getppid() == parent:
            # Another process that inherited the socket may hold it open, so the parent is looked at, too.
            if not select.select([control], [], [], _LOOKS_EVERY_S)[0]:
                continue
            order = control.recv(_ORDER.size, socket.MSG_WAITALL)
            if len(order) < _ORDER.size:
                return
            what, pid = _ORDER.unpack(order)
            if what == _BEAR:
                children.add(_fork_child(control))
            else:
                children.discard(pid)
                control.sendall(_PID.pack(_end(pid, patience_s=_ENDS_S if what == _REAP else 0.0)))
    except OSError:
        return  # This process's parent is gone.
    finally:
        for pid in children:
            _kill(pid)


def _fork_child(control: socket.socket) -> int:
    parents, childs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            parents.close()
            _child_loop(childs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    childs.close()
    socket.send_fds(control, [_PID.pack(pid)], [parents.fileno()])
    parents.close()
    return pid


def _end(pid: int, *, patience_s: float) -> int:
    """Kill a child with its session; returns its exit status."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.005)
    _kill(pid)  # Also if it has ended: then what it has started. Its number is its own until it is waited for.
    return os.waitpid(pid, 0)[1]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # It may lead no group yet.
        os.kill(pid, signal.SIGKILL)


def _child_loop(link: socket.socket) -> None:
    """Main loop of a child: run one function after the other until the socket is closed."""
    server = os.getppid()
    os.setsid()
    _die_with(server)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # Where memory runs out, it is this process that goes.
    np.random.seed()  # Else all children draw the same.
    function: Function | None = None
    has = 0
    me = os.getpid()
    while True:
        try:
            number, length, num_argument = _FRAME.unpack(_exactly(link, _FRAME.size))
            body, argument = _exactly(link, length), _exactly(link, num_argument)
        except EOFError:
            os._exit(0)
        link.sendall(_TAKEN)
        if number != has:
            try:
                function, has = pickle.loads(body), number
            except BaseException as error:
                said = described(error).encode(errors="replace")
                link.sendall(_UNLOADABLE + _LENGTH.pack(len(said)) + said)
                continue
        assert function is not None
        link.sendall(_LOADED)
        answer = function(argument)
        if os.getpid() != me:
            os._exit(0)  # The function has forked, and this is its child.
        _reset_child()
        link.sendall(_ANSWER + _LENGTH.pack(len(answer)))
        link.sendall(answer)


def _reset_child() -> None:
    """Flush what a function has printed, and cancel its alarms."""
    for name in ("SIGALRM", "SIGVTALRM", "SIGPROF"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    for name in ("SIGALRM", "SIGVTALRM", "SIGPROF"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _die_with(server: int) -> None:
    """Have Linux kill this process when the fork server ends."""
    try:
        is_set = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    except (AttributeError, OSError):
        is_set = False
    if not is_set:

        def watch() -> None:
            while os.getppid() == server:
                time.sleep(_LOOKS_EVERY_S)
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="parent-watch").start()
    if os.getppid() != server:
        os._exit(1)


def main() -> None:
    """Entry point of the fork server; its arguments are the socket, the parent, and what to import."""
    descriptor, parent, *preload = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(descriptor)), int(parent), preload)


if __name__ == "__main__":
    main()
