"""Run programs that nobody has read: `Sandbox`, in three tiers, each probed when it starts and never replaced by a weaker one.

    async with Sandbox() as box:
        await box.write("rows.csv", b"1,2")
        result = await box.run("rows = open('rows.csv').read()")     # variables and files stay from turn to turn
        result = await box.run("print(rows)")                        # result.text, .status, .over, .wall_s, .cpu_s
        result = await box.shell("ls -l")

    box      Linux namespaces, a root of read-only mounts, no rights, no network: for what a model wrote
    fork     a process with limits that can be killed: for programs that are trusted and may hang or crash
    monty    an interpreter of a subset of Python without system calls (the package pydantic-monty): for calculators

The first two fork a warm interpreter, the process `m2flow/environments/box.py`, which says how it contains them. A verdict comes from
outside of the program's process. `BlockingSandbox` is the same without `await`; `run_program` runs one program in a box of its own.

Limits. A fault of the kernel is not contained, though calls that only attack it are refused. Without a control group for memory
(`Sandbox.probe` says whether there is one) memory is bounded by process, not in sum. What a program computes from the clock or from random
numbers differs from run to run. A turn's threads and child processes end with it; its variables and files stay.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import datetime
import errno
import itertools
import json
import math
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final, get_args

from m2flow.errors import EngineError, MissingExtra, MissingTier, OptionError

Tier = Literal["box", "fork", "monty"]
Over = Literal["", "wall", "cpu", "memory", "output"]
PROGRAM = str(Path(__file__).parent / "environments" / "box.py")
"""What the interpreter of the tiers `box` and `fork` runs."""
_GRACE_S = 10.0
"""Seconds beyond a call's time limit after which its supervisor counts as hung."""
_START_S = 120.0
"""Seconds that an interpreter may take until it has imported what it is to have at hand."""


@final
@dataclass(frozen=True)
class Result:
    """What became of a program."""

    text: str
    """Standard output, and standard error in its order; cut at the limit."""
    status: int
    """The exit status; minus the signal that ended it. Of a turn, 1 if it raised."""
    over: Over
    """The limit that it went over and was ended for; empty: none."""
    wall_s: float
    cpu_s: float
    """Processor seconds of the process, and of those that it waited for."""
    state: Literal["kept", "rolled back", "lost"] = "kept"
    """A session's variables after the turn: its own; those before it, since it was ended; or none, since it ended the session too."""

    @property
    def is_ok(self) -> bool:
        return self.status == 0 and not self.over


@final
@dataclass(frozen=True)
class Snapshot:
    """A moment of a box: its files, and its variables. Of the tier `monty` it is bytes that any box of that tier restores."""

    tier: Tier
    box: int
    name: int
    data: bytes


@final
@dataclass(frozen=True)
class TierSupport:
    """What a machine can do for a tier."""

    works: bool
    missing: str = ""
    """Why it does not work."""
    memory_group: str = ""
    """The version of the control groups that bound a box's memory in sum, `v1` or `v2`; empty: there are none."""


@dataclass(frozen=True)
class Limits:
    """What a box may use."""

    wall_s: float = 10.0
    """Seconds of one call."""
    cpu_s: float | None = None
    """Processor seconds of one process; by default the wall seconds and one more."""
    memory_mb: int = 512
    """Address space of one process, and memory of all with the files where there are control groups, MiB."""
    files_mb: int = 32
    """All files of the box, MiB. The tier `fork` bounds each file alone."""
    processes: int = 64
    """Processes and threads at a time. The tier `fork` does not bound them."""
    output_bytes: int = 1 << 20
    """Output of one call."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "files_mb", "processes", "output_bytes"):
            value = getattr(self, name)
            if name == "cpu_s" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise OptionError(f"a sandbox's {name}={value!r} is no number above 0")


# ---- warm interpreters


@dataclass(frozen=True)
class _Kind:
    """What a warm interpreter is."""

    tier: Tier
    packages: bool
    preload: tuple[str, ...]
    program: str
    python: str


class _Zygote:
    """A warm interpreter, and the socket by which it is asked for boxes."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        how = {"fd": there.fileno(), "contained": kind.tier == "box", "preload": kind.preload, "binds": _binds(kind.packages)}
        command = [kind.python, "-s", "-P", *([] if kind.packages else ["-S"]), kind.program, json.dumps(how)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        self.connection.settimeout(_START_S)
        try:
            told = _receive(self.connection)[0]
        except (OSError, EngineError) as error:
            self.close()
            raise EngineError(f"the interpreter of a sandbox did not start: {error}") from None
        self.missing = str(told.get("missing", ""))
        self.lacks_module = bool(told.get("is_import"))
        self.memory_group = str(told.get("memory_group") or "")
        self.connection.settimeout(_GRACE_S)

    def ask(self, how: dict[str, object]) -> socket.socket:
        """Ask for a box. Returns its socket."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            try:
                text = json.dumps(how).encode()
                socket.send_fds(self.connection, [struct.pack(">I", len(text)) + text], [there.fileno()])
            except OSError as error:
                here.close()
                raise EngineError(f"the interpreter of a sandbox has ended: {error}") from None
        return here

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _binds(packages: bool) -> list[str]:
    """What of the host Python needs to read, besides the system's own."""
    paths = [sys.base_prefix, sysconfig.get_path("stdlib")]
    paths += [path for path in sys.path if packages and os.path.basename(path) in ("site-packages", "dist-packages")]
    there = [path for path in paths if path and os.path.exists(path)]
    return sorted({place for path in there for place in (os.path.abspath(path), os.path.realpath(path))}, key=len)


_zygotes: dict[_Kind, _Zygote] = {}
_refusals: dict[_Kind, str] = {}
_PASSING = tuple(map(os.strerror, (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)))
"""Why an interpreter may fail to start once, and start later."""
_starting = threading.Lock()


def _zygote(kind: _Kind) -> _Zygote:
    """The warm interpreter of a kind, started and probed if there is none that lives.

    Raises:
        MissingTier: this machine can't contain a program so. MissingExtra: a package is missing. EngineError: none starts just now.
    """
    with _starting:
        found = _zygotes.get(kind)
        if found is not None and found.process.poll() is None:
            return found
        if found is not None:
            _zygotes.pop(kind).close()
        if kind not in _refusals:
            made = _Zygote(kind)
            why = made.missing or (_disproved(made) if kind.tier == "box" else "")
            if not why:
                _zygotes[kind] = made
                return made
            made.close()
            if made.lacks_module:
                raise MissingExtra(f"a sandbox can't import what it is to have at hand: {why}", now="Install it, or change preload=.")
            if why.endswith(_PASSING):
                raise EngineError(f"the interpreter of a sandbox did not start: {why}")
            _refusals[kind] = why
    raise MissingTier(
        f"this machine can't box the code that a model wrote: {_refusals[kind]}",
        now="Allow user namespaces with mounts and seccomp filters (in a container: its profile), or accept less containment: "
        'UnitTests(box="limits"), Sandbox("fork").',
    )


_PROOF = """
import os, sys
lines = [line.split(":", 1) for line in open("/proc/self/status")]
said = {name: value.strip() for name, value in lines}
wanted = {"CapEff": "0" * 16, "CapPrm": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
wrong = [f"{name} is {said.get(name)}" for name, value in wanted.items() if said.get(name) != value]
if os.path.exists(sys.stdin.read()):
    wrong.append("files of the host are seen")
if [line for line in open("/proc/net/dev") if ":" in line and not line.strip().startswith("lo:")]:
    wrong.append("the network is seen")
if len([name for name in os.listdir("/proc") if name.isdigit()]) != 2:
    wrong.append("other processes are seen")
for path in ("/x", "/usr/x", "/proc/sys/kernel/core_pattern"):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        wrong.append(f"{path} can be written")
    except OSError:
        pass
print("; ".join(wrong) or "contained")
"""


def _disproved(zygote: _Zygote) -> str:
    """Ask a program in a box what it can reach. Returns what it should not; empty: nothing."""
    limits = Limits(wall_s=30.0)
    with tempfile.NamedTemporaryFile() as witness:
        path = witness.name
        connection = zygote.ask(_settings(limits, "", shows_proc=True))
        with connection:
            connection.settimeout(limits.wall_s + _GRACE_S)
            told = _receive(connection)[0]
            if "missing" in told:
                return str(told["missing"])
            head = {"op": "python", "wall_s": limits.wall_s, "output": 4096, "merged": True, "is_last": True}
            connection.sendall(_frame(head, _PROOF.encode(), path.encode()))
            told, text = _receive(connection)
    said = text.decode("utf-8", "replace").strip()
    return str(told["missing"]) if "missing" in told else "" if said == "contained" else said or "a first program was ended"


def _settings(limits: Limits, folder: str, *, shows_proc: bool) -> dict[str, object]:
    return {
        "memory": limits.memory_mb << 20,
        "processes": limits.processes,
        "files": limits.files_mb << 20,
        "file": min(limits.files_mb << 20, 16 << 20),
        "cpu": math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s) + (limits.cpu_s is None),
        "proc": shows_proc,
        "folder": folder,
    }


def _bytes(name: str, value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    if not isinstance(value, bytes | bytearray):
        raise OptionError(f"{name}={value!r:.60} is neither text nor bytes", now="Text becomes UTF-8; encode what is to be something else.")
    return bytes(value)


def _frame(head: dict[str, object], first: bytes, second: bytes) -> bytes:
    text = json.dumps(head).encode()
    return struct.pack(">III", len(text), len(first), len(second)) + text + first + second


def _receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read a reply. Raises `EngineError` at the end of the connection."""
    reading = _reading()
    wanted = next(reading)
    while True:
        data = connection.recv(min(wanted, 1 << 20))
        if not data:
            raise EngineError("the supervisor of a sandbox has ended")
        try:
            wanted = reading.send(data)
        except StopIteration as end:
            return _reply(end.value)


def _reading() -> Generator[int, bytes, tuple[dict[str, Any], bytes]]:
    """Yield how many bytes are wanted at most, and be sent some, until a frame is whole."""
    got = bytearray()
    wanted = 12
    while len(got) < wanted:
        got += yield wanted - len(got)
        if wanted == 12 and len(got) >= 12:
            wanted += sum(struct.unpack(">III", got[:12]))
    head, first, _ = struct.unpack(">III", got[:12])
    return json.loads(got[12 : 12 + head]), bytes(got[12 + head : 12 + head + first])


def _reply(value: Any) -> tuple[dict[str, Any], bytes]:
    head, data = value
    return head, data


@atexit.register
def _close_all() -> None:
    for zygote in _zygotes.values():
        zygote.close()
    _zygotes.clear()


def _forget_all() -> None:
    """In a fork: the interpreters are the parent's."""
    global _starting
    for zygote in _zygotes.values():
        zygote.connection.close()
    _zygotes.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


# ---- how many run at a time


class _Slots:
    """Bounds how many programs run at a time, so that their time limits are about themselves and not about each other."""

    def __init__(self, count: int) -> None:
        self._free, self._waiting, self._lock = count, collections.deque[concurrent.futures.Future[None]](), threading.Lock()

    def take(self) -> concurrent.futures.Future[None]:
        """A future that is done when a slot is this caller's."""
        slot: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                slot.set_result(None)
            else:
                self._waiting.append(slot)
        return slot

    def give_back(self, slot: concurrent.futures.Future[None]) -> None:
        """Return a slot, or stop waiting for one."""
        if slot.cancel():
            return
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    following.set_result(None)
                    return
            self._free += 1


_slots = _Slots(max(4, 4 * (os.cpu_count() or 1)))
_Request = tuple[dict[str, object], bytes, bytes]
_Steps = Generator[_Request, tuple[dict[str, Any], bytes], Any]
_boxes = itertools.count(1)


# ---- a box, as requests and answers


class _Box:
    """What a box is asked, without the way in which the answers are waited for."""

    def __init__(
        self,
        tier: Tier = "box",
        *,
        wall_s: float = 10.0,
        cpu_s: float | None = None,
        memory_mb: int = 512,
        files_mb: int = 32,
        processes: int = 64,
        output_bytes: int = 1 << 20,
        packages: bool = False,
        preload: tuple[str, ...] = (),
        shows_proc: bool = True,
    ) -> None:
        if tier not in get_args(Tier):
            raise OptionError(f"Sandbox(tier={tier!r}): known are {', '.join(get_args(Tier))}")
        self.tier: Tier = tier
        self.limits = Limits(wall_s, cpu_s, memory_mb, files_mb, processes, output_bytes)
        self._kind = _Kind(tier, packages or bool(preload), tuple(preload), PROGRAM, sys.executable)
        self._shows_proc = shows_proc
        self._box = next(_boxes)
        self._connection: socket.socket | None = None
        self._monty: _Monty | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._names = itertools.count(1)

    @classmethod
    def probe(cls, tier: Tier = "box") -> TierSupport:
        """Try a tier on this machine: an interpreter is started and a program in it asked what it can reach."""
        try:
            if tier == "monty":
                _monty_pool()
                return TierSupport(True)
            zygote = _zygote(_Kind(tier, False, (), PROGRAM, sys.executable))
        except EngineError as error:
            return TierSupport(False, error.what)
        return TierSupport(True, memory_group=zygote.memory_group)

    def _open(self) -> None:
        if self._connection is not None or self._monty is not None:
            raise OptionError("this sandbox is open already", now="Close it first, or make another one.")
        if self.tier == "monty":
            self._monty = _Monty(self.limits)
            return
        zygote = _zygote(self._kind)
        if self.tier == "fork":
            self._folder = tempfile.TemporaryDirectory(prefix="m2flow-box-", ignore_cleanup_errors=True)
        try:
            self._connection = zygote.ask(_settings(self.limits, self._folder.name if self._folder else "", shows_proc=self._shows_proc))
            self._connection.settimeout(_START_S)
            told = _receive(self._connection)[0]
            if "missing" in told:
                raise EngineError(f"a sandbox can't be made: {told['missing']}", now="Install what is missing, or take another tier.")
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise EngineError(
                    f"a sandbox did not come up in {_START_S:.0f} s: {error}",
                    now="The machine may be overloaded: run fewer sandboxes at once.",
                ) from None
            raise

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        monty, self._monty = self._monty, None
        if monty is not None:
            monty.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _opened(self) -> socket.socket:
        if self._connection is None:
            raise OptionError("this sandbox is closed", now="Use it inside `with Sandbox(...) as box:`.")
        return self._connection

    # -- steps: each yields requests, is sent the replies, and returns what its call returns

    def _run_steps(self, op: str, program: str, stdin: str | bytes, *, merged: bool = True, is_last: bool = False) -> _Steps:
        given = _bytes("stdin", stdin)
        head = {"op": op, "merged": merged, "is_last": is_last, "output": self.limits.output_bytes, "wall_s": self.limits.wall_s}
        told, data = yield head, program.encode("utf-8", "replace"), given
        text = data.decode("utf-8", "replace")
        return Result(text, told["status"], told["over"], told["wall_s"], told["cpu_s"], told["state"])

    def _file_steps(self, op: str, path: str, data: bytes) -> _Steps:
        most = (self.limits.files_mb << 21) + (1 << 20)
        head = {"op": op, "merged": False, "is_last": False, "output": most, "wall_s": max(60.0, self.limits.wall_s)}
        told, text = yield head, path.encode("utf-8", "surrogateescape"), data
        if told["status"] != 0 or told["over"]:
            why = text.decode("utf-8", "replace")[-500:] if told["status"] == 1 else told["over"] or f"status {told['status']}"
            raise OSError(f"{op} {path!r} in a sandbox: {why}")
        return text

    def _snapshot_steps(self) -> _Steps:
        files = yield from self._file_steps("pack", "", b"")
        name = next(self._names)
        yield {"op": "hold", "name": name}, b"", b""
        return Snapshot(self.tier, self._box, name, files)

    def _restore_steps(self, snapshot: Snapshot) -> _Steps:
        if snapshot.tier != self.tier or snapshot.box != self._box:
            raise OptionError(
                f"a snapshot of another box can't be restored in this one: {self.tier!r} keeps variables in its processes",
                now="Restore it in the box that it was taken of.",
            )
        yield from self._file_steps("unpack", "", snapshot.data)
        yield {"op": "restore", "name": snapshot.name}, b"", b""

    def _told(self, told: tuple[dict[str, Any], bytes]) -> tuple[dict[str, Any], bytes]:
        if "missing" in told[0]:
            self._close()
            raise EngineError(f"a sandbox failed: {told[0]['missing']}")
        return told


@final
class BlockingSandbox(_Box):
    """A `Sandbox` whose calls wait: for rewards and scripts. One thread uses it at a time.

    >>> with BlockingSandbox("fork") as box:
    ...     box.run("x = 20 + 1").status, box.run("print(2 * x)").text
    (0, '42\\n')
    """

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, code: str, stdin: str | bytes = "", *, fresh: bool = False) -> Result:
        """Run code in the box, as `Sandbox.run` does."""
        if self._monty is not None:
            return self._monty.run(code)
        return self._drive(self._run_steps("python" if fresh else "turn", code, stdin))  # type: ignore[no-any-return]

    def shell(self, command: str, stdin: str | bytes = "") -> Result:
        """Run a shell command in the box, as `Sandbox.shell` does."""
        return self._drive(self._run_steps("shell", command, stdin))  # type: ignore[no-any-return]

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file in the box, as `Sandbox.write` does."""
        self._drive(self._file_steps("write", path, _bytes("data", data)))

    def read(self, path: str) -> bytes:
        """Read a file of the box, as `Sandbox.read` does."""
        return self._drive(self._file_steps("read", path, b""))  # type: ignore[no-any-return]

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the box, as `Sandbox.snapshot` does."""
        return self._monty.snapshot() if self._monty is not None else self._drive(self._snapshot_steps())

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, as `Sandbox.restore` does."""
        if self._monty is not None:
            self._monty.restore(snapshot)
        else:
            self._drive(self._restore_steps(snapshot))

    def _last(self, program: str, stdin: str, merged: bool) -> Result:
        """Run one program, the box's only one."""
        return self._drive(self._run_steps("python", program, stdin, merged=merged, is_last=True))  # type: ignore[no-any-return]

    def _drive(self, steps: _Steps) -> Any:
        if self.tier == "monty":
            raise OptionError(
                "the tier 'monty' has no shell, files or processes; it runs Python alone",
                now="Take tier='box' for a shell, files and processes.",
            )
        connection = self._opened()
        try:
            head, first, second = next(steps)
            while True:
                slot = _slots.take()
                try:
                    slot.result()
                    connection.settimeout(float(str(head.get("wall_s", 0.0))) + _GRACE_S)
                    connection.sendall(_frame(head, first, second))
                    told = _receive(connection)
                except BaseException as error:
                    self._close()
                    if isinstance(error, OSError):
                        raise EngineError(f"the supervisor of a sandbox does not answer: {error}") from None
                    raise
                finally:
                    _slots.give_back(slot)
                head, first, second = steps.send(self._told(told))
        except StopIteration as end:
            return end.value


@final
class Sandbox(_Box):
    """A box for programs that nobody has read, in which turns share variables and files.

    Args:
        tier: `box`, contained by Linux; `fork`, with limits alone; `monty`, a subset of Python (`pip install 'm2flow[monty]'`).
        wall_s: seconds that one call may take. cpu_s: processor seconds of one process; by default `wall_s` and one more.
        memory_mb: address space of one process, and memory of the whole box where there are control groups, MiB.
        files_mb: all files of the box, in memory, MiB. processes: at a time. output_bytes: of one call.
        packages: let programs import this interpreter's installed packages; by default the standard library alone.
        preload: packages that every box has imported already (implies `packages`).
        shows_proc: whether `/proc` shows the box's processes; else it is empty.
    Raises:
        MissingTier: on entering, if this machine can't give the tier; it says what is missing.
        MissingExtra: the tier or `preload` needs a package that is not installed. In an episode, both end the run.
        EngineError: the box itself fails; that is never a program's result.

    Calls of one box take turns; any number of boxes may be open, of which a few at a time run a program. Variables and files stay from one
    turn to the next. A turn that is ended leaves the variables of the turn before (`result.state == "rolled back"`); its threads and child
    processes end with it. Snapshots have variables and files and belong to their box; those of `monty` are bytes, for any box. A tier is
    probed from inside when it is first used, and no other takes its place.
    """

    def __init__(self, tier: Tier = "box", **limits: Any) -> None:
        super().__init__(tier, **limits)
        self._turns = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def run(self, code: str, stdin: str | bytes = "", *, fresh: bool = False) -> Result:
        """Run Python. Its variables stay for the next turn; those of a turn that was ended do not, and the ones before it come back.

        Args:
            stdin: what the program reads as its standard input.
            fresh: in a process of its own without the session's variables. Its status is the kernel's word then; a turn's is that of the
                session's own interpreter, which the turn may have changed.
        """
        if self._monty is not None:
            return await asyncio.to_thread(self._monty.run, code)
        return await self._drive(self._run_steps("python" if fresh else "turn", code, stdin))  # type: ignore[no-any-return]

    async def shell(self, command: str, stdin: str | bytes = "") -> Result:
        """Run a command by `sh`, which reads `stdin`. Raises `OptionError`: the tier has none."""
        return await self._drive(self._run_steps("shell", command, stdin))  # type: ignore[no-any-return]

    async def write(self, path: str, data: str | bytes) -> None:
        """Write a file, relative to the box's working directory; text as UTF-8. Raises `OSError`: the box does not allow it."""
        await self._drive(self._file_steps("write", path, _bytes("data", data)))

    async def read(self, path: str) -> bytes:
        """Read a file of the box. Raises `OSError`: there is none."""
        return await self._drive(self._file_steps("read", path, b""))  # type: ignore[no-any-return]

    async def snapshot(self) -> Snapshot:
        """Keep this moment's variables and files; `restore` returns to it any number of times."""
        if self._monty is not None:
            return await asyncio.to_thread(self._monty.snapshot)
        return await self._drive(self._snapshot_steps())  # type: ignore[no-any-return]

    async def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this box. Raises `OptionError`: it is another's, and the tier is not `monty`."""
        if self._monty is not None:
            await asyncio.to_thread(self._monty.restore, snapshot)
        else:
            await self._drive(self._restore_steps(snapshot))

    async def _drive(self, steps: _Steps) -> Any:
        if self.tier == "monty":
            raise OptionError(
                "the tier 'monty' has no shell, files or processes; it runs Python alone",
                now="Take tier='box' for a shell, files and processes.",
            )
        async with self._turns:
            try:
                request = next(steps)
                while True:
                    slot = _slots.take()
                    try:
                        await asyncio.wrap_future(slot)
                        told = await self._ask(*request)
                    except BaseException:
                        self._close()  # Also when it is cancelled: the answer of this call would be taken for the next one's.
                        raise
                    finally:
                        _slots.give_back(slot)
                    request = steps.send(self._told(told))
            except StopIteration as end:
                return end.value

    async def _ask(self, head: dict[str, object], first: bytes, second: bytes) -> tuple[dict[str, Any], bytes]:
        connection, loop = self._opened(), asyncio.get_running_loop()
        connection.setblocking(False)
        try:
            async with asyncio.timeout(float(str(head.get("wall_s", 0.0))) + _GRACE_S):
                await loop.sock_sendall(connection, _frame(head, first, second))
                reading = _reading()
                wanted = next(reading)
                while data := await loop.sock_recv(connection, min(wanted, 1 << 20)):
                    try:
                        wanted = reading.send(data)
                    except StopIteration as end:
                        return _reply(end.value)
        except OSError as error:
            raise EngineError(f"the supervisor of a sandbox does not answer: {error}") from None
        raise EngineError("the supervisor of a sandbox has ended")


def run_program(program: str, given: str = "", *, merged: bool = False, **how: Any) -> Result:
    """Run one Python program in a box of its own. Its status is the kernel's word.

    Args:
        given: standard input.
        merged: whether the text has standard error too.
        how: as for `Sandbox`.
    Raises:
        EngineError, MissingExtra: as `Sandbox`.
    """
    with BlockingSandbox(**how) as box:
        return box._last(program, given, merged)


# ---- Monty


_pool: contextlib.ExitStack | None = None
_monty_made: Any = None


def _monty_pool() -> Any:
    """The pool of interpreters that all boxes of the tier `monty` share."""
    global _pool, _monty_made
    with _starting:
        if _monty_made is None:
            try:
                import pydantic_monty
            except ImportError:
                raise MissingExtra("the tier 'monty' needs the package pydantic-monty", now="Run: pip install 'm2flow[monty]'.") from None
            _pool = contextlib.ExitStack()
            most = max(4, 4 * (os.cpu_count() or 1))
            _monty_made = _pool.enter_context(pydantic_monty.Monty(max_processes=1024, min_processes=min(2, most)))
            atexit.register(_pool.close)
        return _monty_made


@final
class _Monty:
    """A session of Monty. Its clock stands still and its random numbers are the same each time."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._stack = limits, contextlib.ExitStack()
        self._session: Any = None
        self._start(None)

    def _start(self, data: bytes | None) -> None:
        self._stack.close()
        self._stack = contextlib.ExitStack()
        limits = {"max_feed_duration_secs": self._limits.wall_s, "max_memory": self._limits.memory_mb << 20}
        policy = {"datetime": datetime.datetime(2026, 1, 1), "sleep": "zero", "random_start": {"seed": 0}}
        session: Any = _monty_pool().checkout(limits=limits, os_policy=policy)
        self._session = self._stack.enter_context(session)
        if data is not None:
            self._session.load_session(data)

    def run(self, code: str) -> Result:
        import pydantic_monty as monty

        before, said, began = self._session.dump(), monty.CollectString(), time.monotonic()
        status, value = 0, None
        over: Over = ""
        try:
            value = self._session.feed_run(code, print_callback=said)
        except monty.MontyCrashedError as error:
            status, over, value = 1, "wall" if getattr(error, "timed_out", False) else "memory", error
        except monty.MontyError as error:
            status, value = 1, error
            kind = type(error.exception()).__name__ if not isinstance(error, monty.MontySyntaxError) else ""
            over = "wall" if kind == "TimeoutError" else "memory" if kind == "MemoryError" else ""
        wall_s = time.monotonic() - began
        text = str(said.output)
        text += str(value) if status else f"{value!r}\n" if value is not None else ""
        cut = text.encode()[: self._limits.output_bytes].decode("utf-8", "ignore")
        over = over or ("output" if len(cut) < len(text) else "")
        if over in ("wall", "memory"):
            self._start(before)
        return Result(cut, status, over, wall_s, wall_s, "rolled back" if over in ("wall", "memory") else "kept")

    def snapshot(self) -> Snapshot:
        return Snapshot("monty", 0, 0, self._session.dump())

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.tier != "monty":
            raise OptionError(
                f"a snapshot of the tier {snapshot.tier!r} can't be restored in the tier 'monty'",
                now="Restore it in a box of the tier that it was taken in.",
            )
        self._start(snapshot.data)

    def close(self) -> None:
        self._stack.close()
