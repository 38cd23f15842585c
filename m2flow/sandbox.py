"""Run a Python program that nobody has read, contained by Linux: the process that `m2flow.rewards.run_boxed` starts.

    python -I sandbox.py '{"folder": ..., "wall_s": 5, "memory": 536870912, "box": true, "packages": false}'

It runs `program.py` of the working directory in a child and ends with the child's status; 97 means that this machine can't contain it, and
standard output says why. Every limit comes from the kernel: user, process, network and IPC namespaces, Landlock for files, resource limits.
What is contained and what is not is said at `m2flow.rewards.UnitTests`.

The interpreter is an isolated one, so this file imports the standard library alone. Numbers of system calls and flags are those of the
kernel's headers, the same on every architecture (Landlock: linux/landlock.h; namespaces: linux/sched.h; prctl: linux/prctl.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import sysconfig
from typing import Any, NoReturn

REFUSED = 97
"""Exit status if this machine can't contain the program."""

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000
"""User, process, network, IPC."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYSTEM_PATHS = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom"]

_libc = ctypes.CDLL(None, use_errno=True)


def main(how: dict[str, Any]) -> NoReturn:
    """Contain this process, start the program in a child, kill that when its time is up, and exit with its status."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        if how["box"]:
            _enter_namespaces()
    except OSError as error:
        _refuse(_told(error))
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        _run_child(how, tells)
    os.close(tells)
    why = os.read(told, 4096)
    if why:
        os.waitpid(child, 0)
        _refuse(why.decode())
    has_ended = select.select([os.pidfd_open(child)], [], [], how["wall_s"])[0]
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if has_ended and 0 <= status < REFUSED else 1)


def _refuse(why: str) -> NoReturn:
    print(why, flush=True)
    os._exit(REFUSED)


def _told(error: OSError) -> str:
    return f"{error.strerror}: {os.strerror(error.errno or 0)}"


def _check(result: int, what: str) -> int:
    """Return the result of a call of the C library. Raises `OSError` if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def _enter_namespaces() -> None:
    """Enter new namespaces, of whose users this process is nobody; its children are alone in theirs."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NAMESPACES), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _run_child(how: dict[str, Any], tells: int) -> NoReturn:
    """Limit this process and run the program in it. Writes to `tells` why a limit could not be set."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        if how["box"]:
            _restrict_files(how)
            _drop_capabilities()
        _limit_resources(how)
    except OSError as error:
        os.write(tells, _told(error).encode())
        os._exit(REFUSED)
    os.close(tells)
    code = 1
    try:
        with open("program.py", encoding="utf-8") as file:
            source = file.read()
        os.unlink("program.py")
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
    except BaseException:
        code = 1
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)


def _restrict_files(how: dict[str, Any]) -> None:
    """Allow to read and run what Python needs, and to write in the working directory, by Landlock."""
    abi = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi < 4:
        raise OSError(errno.ENOSYS, "Landlock")
    every = (1 << (15 if abi == 4 else 16)) - 1
    rules = struct.pack("QQQ", every, 3, 3)[: 16 if abi < 6 else 24]
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0), "Landlock")
    python = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *(sys.path if how["packages"] else [])]
    reads = [(path, _EXECUTE | _READ_FILE | _READ_DIR) for path in [*_SYSTEM_PATHS, *python]]
    for path, access in [*reads, (how["folder"], every)]:
        if path and os.path.exists(path):
            place = os.open(path, os.O_PATH)
            of_file = access & (_EXECUTE | _WRITE_FILE | _READ_FILE)
            given = struct.pack("=Qi", access if os.path.isdir(path) else of_file, place)
            _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, given, 0), f"Landlock for {path}")
            os.close(place)
    _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")


def _drop_capabilities() -> None:
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    none = ctypes.create_string_buffer(24)
    _check(_libc.capset(ctypes.byref(ctypes.c_uint64(_CAPABILITY_VERSION_3)), none), "capabilities")


def _limit_resources(how: dict[str, Any]) -> None:
    """Set the limits of this process, none above those that it has."""
    large, cpu_s = 16 << 20, int(how["wall_s"]) + 1
    limits = {"AS": how["memory"], "CPU": cpu_s, "FSIZE": large, "NOFILE": 64, "CORE": 0, "MEMLOCK": 0, "STACK": 8 << 20}
    if how["box"]:
        limits["NPROC"] = 64  # Outside a user namespace it would count all processes of the user.
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
