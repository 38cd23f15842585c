"""The other end of a `m2flow.sandbox.Sandbox`: a warm interpreter that forks a contained process for each program it is sent.

    python -s -P box.py '{"fd": 5, "contained": true, ...}'

    host ── requests for boxes, each with a socket ──▶ zygote: imports made, a root of read-only mounts
      └──── that box's socket ──▶ supervisor: outside of the box's process namespace; keeps time, cuts output, gives the verdict
                                     ├─▶ init: the first process in the box; ends what a call leaves behind
                                     └─▶ a program for each call; or states, of which each turn of a session forks the next

The zygote never sees a program, so no fork inherits another box's text, tests or answers. What a program is not to reach is not there:
namespaces of its own for users, processes, mounts, network and IPC, a root of read-only mounts with a writable `/tmp` in memory, a user who
is nobody on the host, no capabilities, system calls that only attack the kernel refused, resource limits, and a memory control group
where the host gives one. Uncontained, the same processes run with limits and a working directory alone.

The file runs alone in a bare interpreter, so it imports the standard library only. Numbers of flags and calls are those of the kernel's
headers (linux/sched.h, mount.h, prctl.h, seccomp.h, audit.h; asm/unistd_64.h, asm-generic/unistd.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import linecache
import os
import platform
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
import traceback
from typing import Any, BinaryIO, NoReturn

NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, process, network, IPC, UTS."""
NOBODY = 65534
UNUSED = 1_946_157_103
"""A user of the host that nothing else is: what the programs of a host's root run as."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 38, 22, 36
CAPABILITY_VERSION_3 = 0x20080522
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
ROOT = "/tmp"
"""Where the new root is built; only in a mount namespace of its own."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    """Return the result of a call of the C library. Raises `OSError` if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(result, f"mount {kind or source} on {target.removeprefix(ROOT) or '/'}")


# ---- frames on a box's socket: sizes, a head in JSON, two blobs


def send(connection: socket.socket, head: dict[str, Any], first: bytes = b"", second: bytes = b"") -> None:
    text = json.dumps(head).encode()
    connection.sendall(struct.pack(">III", len(text), len(first), len(second)) + text + first + second)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, bytes] | None:
    """The next frame; None at the end."""
    sizes = _exactly(connection, 12)
    if len(sizes) < 12:
        return None
    lengths = struct.unpack(">III", sizes)
    head, first, second = (_exactly(connection, length) for length in lengths)
    return json.loads(head), first, second


def _exactly(connection: socket.socket, length: int) -> bytes:
    got = bytearray()
    while len(got) < length and (part := connection.recv(min(length - len(got), 1 << 20))):
        got += part
    return bytes(got)


# ---- the zygote


def main(how: dict[str, Any]) -> NoReturn:
    """Prepare, say so, and make a box for each socket that comes, until the host ends."""
    host = socket.socket(fileno=how["fd"])
    sys.path[:] = map(os.path.realpath, sys.path)  # A link to packages may lie in what a box does not see.
    try:
        for module in how["preload"]:
            __import__(module)
        groups = _memory_groups() if how["contained"] else None
        if how["contained"]:
            _machine()
            _build_root(how["binds"])
        send(host, {"ready": True, "memory_group": groups.kind if groups else None})
    except (OSError, ImportError, ValueError) as error:
        send(host, {"ready": False, "missing": _told(error), "is_import": isinstance(error, ImportError)})
        os._exit(1)
    boxes: dict[int, str] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakes, wakeup = os.pipe()
    for end in (wakes, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup)
    while True:
        waited: list[Any] = [host, wakes]
        readable = select.select(waited, [], [])[0]
        if wakes in readable:
            os.read(wakes, 4096)
        _reap(boxes, groups)
        if host not in readable:
            continue
        size, descriptors, _, _ = socket.recv_fds(host, 4, 1)
        if len(size) < 4:
            break
        wanted = json.loads(_exactly(host, struct.unpack(">I", size)[0]))
        try:
            group = groups.make(wanted["memory"], wanted["processes"]) if groups else None
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=descriptors[0]) as box, contextlib.suppress(OSError):
                send(box, {"missing": _told(error)})
            continue
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (wakes, wakeup, host.fileno()):
                os.close(end)
            try:
                Supervisor(socket.socket(fileno=descriptors[0]), {**how, **wanted}, group).run()
            finally:
                os._exit(1)
        os.close(descriptors[0])
        boxes[pid] = group.name if group else ""
        if group is not None:
            group.close()
    for pid in boxes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while boxes and time.monotonic() < deadline:
        _reap(boxes, groups)
        time.sleep(0.01)
    os._exit(0)


def _reap(boxes: dict[int, str], groups: MemoryGroups | None) -> None:
    """Forget the boxes that have ended, and remove their control groups."""
    while boxes:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        name = boxes.pop(pid, "")
        if name and groups is not None:
            groups.remove(name)


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.errno:
        return f"{error.strerror}: {os.strerror(error.errno)}"
    return str(error)


def _machine() -> str:
    """The machine's architecture. Raises `OSError`: its system calls are not known here."""
    if platform.machine() not in CALLS:
        raise OSError(errno.ENOSYS, f"a filter of system calls for {platform.machine()}")
    return platform.machine()


def _build_root(binds: list[str]) -> None:
    """Move into a root that has nothing but read-only mounts of Python and the system's programs, and a few devices."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(0x00020000 if uid == 0 else 0x10020000), "a mount namespace")
    if uid != 0:
        _map_user(0, uid, gid)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    paths = [(path, os.path.realpath(path)) for path in (*SYSTEM, *binds) if os.path.exists(path)]
    under = [real for _, real in paths if real.startswith(f"{ROOT}/")]
    if under:
        raise OSError(errno.EINVAL, f"Python lies in {ROOT} ({under[0]}), and a box has one of its own")
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, real in paths:
        _bind(path, real)
    os.makedirs(f"{ROOT}/dev", exist_ok=True)
    for name in DEVICES:
        open(f"{ROOT}/dev/{name}", "w").close()
        _mount(f"/dev/{name}", f"{ROOT}/dev/{name}", None, MS_BIND)
    os.symlink("/proc/self/fd", f"{ROOT}/dev/fd")
    os.makedirs(f"{ROOT}/etc", exist_ok=True)
    for name, text in (("passwd", "nobody:x:65534:65534:nobody:/tmp:/bin/sh\n"), ("group", "nogroup:x:65534:\n")):
        with open(f"{ROOT}/etc/{name}", "w") as file:
            file.write(text)
    for name in ("proc", "tmp"):
        os.makedirs(f"{ROOT}/{name}", exist_ok=True)
    _mount("/proc", f"{ROOT}/proc", None, MS_BIND | MS_REC)
    os.chdir(ROOT)
    _check(_libc.syscall(_number("pivot_root"), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    _mount("tmpfs", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _bind(path: str, real: str) -> None:
    """Show a path of the host in the new root, read-only; a link stays a link."""
    target = f"{ROOT}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return
    if os.path.islink(path) and real.startswith("/usr/"):
        os.symlink(real, target)
        return
    if os.path.isdir(real):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    _mount(real, target, None, MS_BIND | MS_REC)
    _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _map_user(inside: int, uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


# ---- control groups


class Group:
    """One box's control groups: what a process writes `0` to in order to be in them, and where kills for want of memory are counted."""

    def __init__(self, name: str, doors: list[int], counted: int, counter: str) -> None:
        self.name, self.doors, self._counted, self._counter = name, doors, counted, counter

    def enter(self) -> None:
        for door in self.doors:
            os.write(door, b"0")

    def num_kills(self) -> int:
        """Processes that the kernel has ended because the box's memory was used up."""
        text = os.pread(self._counted, 4096, 0).decode()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.split()[0] == self._counter)

    def close(self) -> None:
        for descriptor in (*self.doors, self._counted):
            os.close(descriptor)


class MemoryGroups:
    """Where this process may make control groups with a bound on memory, of version 1 or 2."""

    def __init__(self, kind: str, folder: int, pids: int | None) -> None:
        self.kind, self._folder, self._pids, self._count, self._old = kind, folder, pids, 0, set[str]()

    def make(self, memory: int, processes: int) -> Group:
        self._count += 1
        name = f"m2flow-box-{os.getpid()}-{self._count}"
        os.mkdir(name, dir_fd=self._folder)
        limits = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] if self.kind == "v1" else ["memory.max"]
        for i, file in enumerate(limits):
            with contextlib.suppress(*([OSError] if i else [])):
                _write_at(self._folder, f"{name}/{file}", str(memory))
        if self.kind == "v2":
            with contextlib.suppress(OSError):
                _write_at(self._folder, f"{name}/memory.swap.max", "0")
        doors = [os.open(f"{name}/cgroup.procs", os.O_WRONLY, dir_fd=self._folder)]
        if self._pids is not None:
            os.mkdir(name, dir_fd=self._pids)
            _write_at(self._pids, f"{name}/pids.max", str(processes))
            doors.append(os.open(f"{name}/cgroup.procs", os.O_WRONLY, dir_fd=self._pids))
        elif self.kind == "v2":
            with contextlib.suppress(OSError):
                _write_at(self._folder, f"{name}/pids.max", str(processes))
        counted = os.open(f"{name}/{'memory.oom_control' if self.kind == 'v1' else 'memory.events'}", os.O_RDONLY, dir_fd=self._folder)
        return Group(name, doors, counted, "oom_kill")

    def sweep(self) -> None:
        """Remove the groups of interpreters that were killed."""
        for name in os.listdir(self._folder):
            owner = name.removeprefix("m2flow-box-").partition("-")[0] if name.startswith("m2flow-box-") else ""
            if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a box's groups, and those that were still busy before."""
        self._old.add(name)
        for each in list(self._old):
            try:
                os.rmdir(each, dir_fd=self._folder)
                if self._pids is not None:
                    os.rmdir(each, dir_fd=self._pids)
                self._old.discard(each)
            except FileNotFoundError:
                self._old.discard(each)
            except OSError:
                continue


def _memory_groups() -> MemoryGroups | None:
    """The groups that this process may make; None: the host gives none, and memory is bounded by process alone."""
    found: dict[str, int] = {}
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        inside, place = before.split(" ")[3:5]
        for own in _lines("/proc/self/cgroup"):
            _, names, path = own.split(":", 2)
            which = "v2" if kind == "cgroup2" and not names else names if kind == "cgroup" and names in options.split(",") else ""
            if which in ("v2", "memory", "pids"):
                folder = os.path.join(place, os.path.relpath(path, inside).lstrip("/")) if path.startswith(inside) else place
                with contextlib.suppress(OSError):
                    found[which] = os.open(os.path.normpath(folder), os.O_RDONLY | os.O_DIRECTORY)
    tries = [MemoryGroups("v1", found["memory"], found.get("pids"))] if "memory" in found else []
    tries += [MemoryGroups("v1", found["memory"], None)] if "memory" in found and "pids" in found else []
    tries += [MemoryGroups("v2", found["v2"], None)] if "v2" in found else []
    for groups in tries:
        try:
            group = groups.make(64 << 20, 64)
        except OSError:
            groups.remove(f"m2flow-box-{os.getpid()}-1")
            continue
        group.close()
        groups.remove(group.name)
        groups.sweep()
        return groups
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _write_at(folder: int, path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# ---- system calls that are refused


CALLS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its number for audits, and the column of `REFUSED`."""

REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97),
    "setns": (308, 268), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162), "chroot": (161, 51),
    "acct": (163, 89), "quotactl": (179, 60), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "personality": (135, 92),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "vhangup": (153, 58), "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "move_mount": (429, 429), "open_tree": (428, 428),
    "mount_setattr": (442, 442), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "fanotify_init": (300, 262),
    "memfd_secret": (447, 447), "memfd_create": (319, 279), "shmget": (29, 194), "kcmp": (312, 272),
    "lookup_dcookie": (212, 18), "clone3": (435, 435),
}  # fmt: skip
"""Calls that a program needs for nothing but an attack, or that escape its limits on memory -> their numbers. `clone3` is said not to
exist, so that `clone` is used, whose flags can be looked at."""
_CLONE = (56, 220)
_SECCOMP_ALLOW, _SECCOMP_ERRNO, _SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NEW_NAMESPACES = 0x7E020000
_MOST_PID = 1 << 22


def _number(name: str) -> int:
    return REFUSED[name][CALLS[platform.machine()][1]]


def _filter() -> bytes:
    """The filter as a program of the kernel's packet filter: struct seccomp_data has the call at 0, the machine at 4, arguments at 16."""
    machine, column = CALLS[_machine()]

    def one(code: int, when: int, otherwise: int, value: int) -> bytes:
        return struct.pack("HBBI", code, when, otherwise, value)

    load, equal, least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    parts = [one(load, 0, 0, 4), one(equal, 1, 0, machine), one(give, 0, 0, _SECCOMP_KILL), one(load, 0, 0, 0)]
    parts += [one(least, 0, 1, 0x40000000), one(give, 0, 0, _SECCOMP_KILL)]
    for name, numbers in REFUSED.items():
        answer = errno.ENOSYS if name == "clone3" else errno.EPERM
        parts += [one(equal, 0, 1, numbers[column]), one(give, 0, 0, _SECCOMP_ERRNO | answer)]
    parts += [one(equal, 0, 3, _CLONE[column]), one(load, 0, 0, 16), one(any_bit, 0, 1, _NEW_NAMESPACES)]
    parts += [one(give, 0, 0, _SECCOMP_ERRNO | errno.EPERM), one(give, 0, 0, _SECCOMP_ALLOW)]
    return b"".join(parts)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _give_up_rights() -> None:
    """Give up every capability, now and for whatever is run, and the refused calls."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    none = ctypes.create_string_buffer(24)
    _check(_libc.capset(ctypes.byref(ctypes.c_uint64(CAPABILITY_VERSION_3)), none), "capabilities")
    code = _filter()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "a filter of system calls (seccomp)")


# ---- the supervisor of one box


class State:
    """A process that holds the variables of a session: forked by the turn before it, waiting for the next."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid


class Supervisor:
    """Answer what the host asks of one box. It never runs what it was sent, and stands outside of the box's process namespace."""

    def __init__(self, host: socket.socket, how: dict[str, Any], group: Group | None) -> None:
        self.host, self.how, self.group = host, how, group
        self.contained: bool = how["contained"]
        self.init = self.commands = -1
        self.state: State | None = None
        self.held: dict[int, State] = {}
        self.num_turns = 0

    def run(self) -> NoReturn:
        """Make the box and serve it until the host closes its socket."""
        try:
            signal.signal(signal.SIGTERM, lambda *_: self._end())
            os.setsid()
            if self.contained:
                self._enclose()
            else:
                _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "a reaper of what is left behind")
                os.chdir(self.how["folder"])
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        except OSError as error:
            send(self.host, {"missing": _told(error)})
            self._end()
        send(self.host, {"ready": True})
        try:
            while (asked := receive(self.host)) is not None:
                head, first, second = asked
                send(self.host, *self._answer(head, first, second))
        except OSError:
            pass
        except BaseException:
            with contextlib.suppress(OSError):
                send(self.host, {"missing": f"the supervisor of a box failed: {traceback.format_exc()}"})
        self._end()

    def _enclose(self) -> None:
        """Enter new namespaces as nobody; start the first process in them."""
        if os.getuid() == 0 and _is_host_root():
            os.setgroups([])
            for user in (UNUSED, NOBODY):
                try:
                    os.setresgid(user, user, user)
                    os.setresuid(user, user, user)
                    break
                except OSError:
                    if user == NOBODY:
                        raise
            _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # Or its files in /proc, the map of users among them, stay root's.
        uid, gid = os.getuid(), os.getgid()
        _check(_libc.unshare(NAMESPACES), "namespaces for users, processes, mounts and the network")
        _map_user(NOBODY, uid, gid)
        _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={self.how['files']},nr_inodes=4k,mode=1777")
        read, write = os.pipe()
        commands, self.commands = (end.detach() for end in reversed(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
        self.init = os.fork()
        if self.init == 0:
            os.close(self.commands)
            os.close(read)
            self.host.close()
            _be_init(commands, write, self.how["proc"])
        os.close(commands)
        os.close(write)
        why = os.read(read, 4096)
        os.close(read)
        if why != b"ok":
            raise OSError(errno.EPERM, why.decode() or "the first process of a box")

    def _end(self) -> NoReturn:
        """End everything in the box, and this process."""
        if self.init > 0:
            with contextlib.suppress(OSError):
                os.kill(self.init, signal.SIGKILL)
        elif not self.contained:
            self._end_others(())
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0)

    def _end_others(self, keep: tuple[int, ...]) -> None:
        """End whatever runs in the box, but the processes of these identifiers."""
        if self.contained:
            os.write(self.commands, json.dumps(keep).encode())
            os.read(self.commands, 16)
        else:
            _end_all(lambda: _descendants(os.getpid()), set(keep))
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    # -- answers

    def _answer(self, head: dict[str, Any], first: bytes, second: bytes) -> tuple[dict[str, Any], bytes]:
        what = head["op"]
        if what == "turn":
            return self._turn(head, first, second)
        if what == "hold":
            if self.state is None:
                self.state = self._first_state()
            self.held[head["name"]] = self.state
            return {"held": True}, b""
        if what == "restore":
            self._drop_state()
            self.state = self.held[head["name"]]
            return {"held": True}, b""
        return self._program(head, first, second)

    def _program(self, head: dict[str, Any], first: bytes, second: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one program in a process of its own. Its verdict is what the kernel tells this process of its end."""
        given, (out, told) = _file_of(second), os.pipe()
        why, tells = os.pipe()
        kills = self.group.num_kills() if self.group else 0
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                self._become_program(head, given, told, (tells,))
                os.close(tells)
            except BaseException as error:
                os.write(tells, _told(error).encode())
                os._exit(1)
            try:
                _run(head, first)
            finally:
                os._exit(1)
        for end in (given, told, tells):
            os.close(end)
        refused = os.read(why, 4096)
        os.close(why)
        process = os.pidfd_open(child)
        text, over = self._watch(out, process, head, began)
        if over:
            self._end_group(child)
        _, status, usage = os.wait4(child, 0)
        wall_s = time.monotonic() - began
        if not head["is_last"]:
            self._end_others(self._states())
        os.close(process)
        os.close(out)
        if refused:
            return {"missing": refused.decode("utf-8", "replace")}, b""
        if self.group and self.group.num_kills() > kills:
            over = over or "memory"
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self.how["cpu"]):
            over = over or "cpu"
        told_of = {"status": code, "over": over, "wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "state": "kept"}
        return told_of, text

    def _watch(self, out: int, process: int, head: dict[str, Any], began: float) -> tuple[bytes, str]:
        """Read output until the process ends. Returns it, and what it went over: `wall`, `output`, or nothing."""
        text = bytearray()
        most, ends = head["output"], began + head["wall_s"]
        os.set_blocking(out, False)
        watched = select.poll()
        for each in (out, process, self.host.fileno()):
            watched.register(each, select.POLLIN if each != self.host.fileno() else select.POLLRDHUP)
        while True:
            left = ends - time.monotonic()
            events = dict(watched.poll(max(0, left * 1000)))
            if not events and left <= 0:
                return bytes(text[:most]), "wall"
            if out in events and not _drain(out, text, most + 1):
                watched.unregister(out)
            if len(text) > most:
                return bytes(text[:most]), "output"
            if process in events:
                _drain(out, text, most + 1)
                return bytes(text[:most]), "output" if len(text) > most else ""
            if self.host.fileno() in events:
                self._end()

    def _end_group(self, child: int) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(child, signal.SIGKILL)

    def _become_program(self, head: dict[str, Any], given: int, told: int, kept: tuple[int, ...]) -> None:
        """Turn this fork into what may run a program: streams, limits, no rights. Only `kept` and the streams stay open."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        if self.group:
            self.group.enter()
        quiet = os.open("/dev/null", os.O_RDWR)
        for source, target in ((given, 0), (told, 1), (told if head["merged"] else quiet, 2)):
            os.dup2(source, target)
        for below, above in itertools.pairwise((2, *sorted(kept), 1 << 16)):
            os.closerange(below + 1, above)
        _limit(self.how, self.contained)
        os.environ.clear()
        if self.contained:
            os.chdir("/tmp")
        os.environ.update({"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.getcwd(), "LC_ALL": "C.UTF-8"})
        if self.contained:
            _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            _give_up_rights()

    # -- sessions

    def _first_state(self) -> State:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = _file_of(b"")
        pid = os.fork()
        if pid == 0:
            fd = os.dup(there.fileno())
            tells = os.dup(there.fileno())
            try:
                self._become_program({"merged": False}, given, os.open("/dev/null", os.O_RDWR), (tells, fd))
                os.close(tells)
            except BaseException as error:
                os.write(fd, json.dumps({"missing": _told(error)}).encode())
                os._exit(1)
            try:
                os.write(fd, json.dumps({"pid": os.getpid()}).encode())
                be_state(socket.socket(fileno=fd), {"__name__": "__main__"})
            finally:
                os._exit(1)
        there.close()
        os.close(given)
        told = json.loads(here.recv(65536) or b'{"missing": "a session ended before it began"}')
        if "missing" in told:
            raise OSError(errno.EPERM, told["missing"])
        return State(here, told["pid"])

    def _states(self) -> tuple[int, ...]:
        return tuple(each.pid for each in (self.state, *self.held.values()) if each is not None)

    def _drop_state(self) -> None:
        if self.state is not None and self.state not in self.held.values():
            self.state.connection.close()
        self.state = None

    def _turn(self, head: dict[str, Any], first: bytes, second: bytes) -> tuple[dict[str, Any], bytes]:
        """Run a turn of the session: a fork of its state. If it fails to make the next state, the one before stays."""
        state = self.state = self.state or self._first_state()
        self.num_turns += 1
        out, told = os.pipe()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code, given = _file_of(first), _file_of(second)
        kills, began = self.group.num_kills() if self.group else 0, time.monotonic()
        asked = json.dumps({"turn": self.num_turns, "merged": head["merged"]}).encode()
        with contextlib.suppress(OSError):  # It has ended, which the end of its connection says below.
            socket.send_fds(state.connection, [asked], [code, given, told, there.fileno()])
        for end in (code, given, told):
            os.close(end)
        there.close()
        text, over = self._watch(out, state.connection.fileno(), head, began)
        if over:
            self._end_others(self._states())
        is_there = bool(select.select([state.connection], [], [], 2.0)[0])
        answer = _heard(state.connection, {"status": int, "cpu_s": float}) if is_there else {}
        here.setblocking(False)
        next_pid = _heard(here, {"pid": int}).get("pid", 0)
        went_on = 0 < next_pid <= _MOST_PID and not over and bool(answer)
        if not went_on:
            here.close()
        elif state in self.held.values():
            self.state = State(here, next_pid)
        else:
            state.connection.close()
            self.state = State(here, next_pid)
        if not answer:
            self.held = {name: each for name, each in self.held.items() if each is not state}
            self.state = None
        self._end_others(self._states())
        more = bytearray()
        _drain(out, more, head["output"] - len(text))
        os.close(out)
        if self.group and self.group.num_kills() > kills:
            over = over or "memory"
        if answer.get("status") == -signal.SIGXCPU:
            over = over or "cpu"
        told_of = {
            "status": answer.get("status", -signal.SIGKILL),
            "over": over,
            "wall_s": time.monotonic() - began,
            "cpu_s": answer.get("cpu_s", 0.0),
            "state": "kept" if went_on else "rolled back" if self.state else "lost",
        }
        return told_of, text + bytes(more)


def _heard(connection: socket.socket, kinds: dict[str, type]) -> dict[str, Any]:
    """What a session says of a turn; {}: nothing, or nothing of these kinds, for the turn's program may have written there, too."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(connection.recv(65536))
        if isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
            return found
    return {}


def _is_host_root() -> bool:
    """Whether this user 0 may become another one, as the host's root may, and root of a user namespace of one user may not."""
    return any(line.split()[2] != "1" for line in _lines("/proc/self/uid_map"))


def _file_of(data: bytes) -> int:
    """A descriptor from which these bytes can be read."""
    descriptor = os.memfd_create("given", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _drain(descriptor: int, text: bytearray, most: int) -> bool:
    """Read what is there, up to a length in all. Returns False at the end of the file."""
    with contextlib.suppress(BlockingIOError):
        while len(text) < most:
            part = os.read(descriptor, min(1 << 16, most - len(text)))
            if not part:
                return False
            text += part
    return True


def _limit(how: dict[str, Any], contained: bool) -> None:
    """Set the limits of this process, none above those that it has."""
    limits = {"AS": how["memory"], "CPU": how["cpu"], "FSIZE": how["file"], "NOFILE": 64, "CORE": 0}
    limits |= {"MEMLOCK": 0, "STACK": 8 << 20, "MSGQUEUE": 0}
    if contained:
        limits["NPROC"] = how["processes"]  # Outside a user namespace it would count all processes of the user.
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value + 1 if name == "CPU" and most == resource.RLIM_INFINITY else value))


# ---- the first process of a box


def _be_init(commands: int, tells: int, shows_proc: bool) -> NoReturn:
    """Reap, and end processes when the supervisor says so; end with the supervisor, and all of the box with this process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        _mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        procs = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if not shows_proc:
            _mount("tmpfs", "/proc", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=555")
        os.chdir("/tmp")
        _give_up_rights()
        _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        for end in (0, 1, 2):
            os.dup2(commands, end)
        os.write(tells, b"ok")
        os.close(tells)
        os.closerange(max(procs, commands) + 1, 4096)
    except OSError as error:
        os.write(tells, _told(error).encode())
        os._exit(1)
    while True:
        asked = os.read(commands, 65536)
        if not asked:
            os._exit(0)
        if not _end_all(lambda: _in_box(procs), {1, *json.loads(asked)}):
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        os.write(commands, b"ended")


def _end_all(alive: Any, keep: set[int]) -> bool:
    """Kill until nothing but the kept is alive. Returns whether that came about."""
    for _ in range(200):
        others = [pid for pid in alive() if pid not in keep]
        if not others:
            return True
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)
    return False


def _in_box(procs: int) -> list[int]:
    """Identifiers of processes that are not dead already."""
    found = []
    for name in os.listdir(procs):
        if name.isdigit():
            with contextlib.suppress(OSError):
                descriptor = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=procs)
                try:
                    state = os.read(descriptor, 1024).rpartition(b")")[2].split()[0]
                finally:
                    os.close(descriptor)
                found += [int(name)] if state not in (b"Z", b"X") else []
    return found


def _descendants(root: int) -> list[int]:
    """Living processes that come from this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read(1024).rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    parents[int(name)] = int(fields[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found[1:]


# ---- in the box


def _run(head: dict[str, Any], program: bytes) -> NoReturn:
    """Do what one call asks, in its process."""
    if head["op"] == "shell":
        try:
            os.execv("/bin/sh", ["sh", "-c", program.decode("utf-8", "replace")])
        except (OSError, ValueError) as error:
            os.write(2, f"sh: {error}\n".encode())
            os._exit(126)
    if head["op"] == "python":
        _open_streams()
        code = execute(program.decode("utf-8", "replace"), "program.py", {"__name__": "__main__"})
    else:
        code = _handle_files(head, program.decode("utf-8", "replace"))
    os._exit(code)


def _open_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["program.py"]


def execute(source: str, name: str, names: dict[str, Any]) -> int:
    """Run Python in these names. Returns its exit status; a traceback goes to standard error."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    code = 1
    try:
        exec(compile(source, name, "exec"), names)
        code = 0
    except SystemExit as end:
        code = end.code & 255 if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            after = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, after)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    return code


def _handle_files(head: dict[str, Any], path: str) -> int:
    """Read or write files of the box from within it, so that a path means what it means there."""
    try:
        with open(0, "rb", closefd=False) as given, open(1, "wb", closefd=False) as told:
            if head["op"] == "write":
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                with open(path, "wb") as file:
                    shutil.copyfileobj(given, file)
            elif head["op"] == "read":
                with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        raise OSError(errno.EINVAL, "no regular file", path)
                    shutil.copyfileobj(file, told)
            elif head["op"] == "pack":
                _pack(told)
            elif head["op"] == "unpack":
                for name in os.listdir("."):
                    shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
                with tarfile.open(fileobj=given, mode="r|") as archive:
                    archive.extractall(".", filter="tar")
    except (OSError, tarfile.TarError, ValueError) as error:
        os.write(1, str(error).encode())
        return 1
    return 0


def _pack(told: BinaryIO) -> None:
    with tarfile.open(fileobj=told, mode="w|") as archive:
        for name in sorted(os.listdir(".")):
            archive.add(name, filter=lambda info: info if info.isfile() or info.isdir() or info.issym() else None)


def be_state(connection: socket.socket, names: dict[str, Any]) -> NoReturn:
    """Hold variables and fork each turn that comes; leave when the turn has made the next state and the supervisor has let go of this."""
    fork, wait4, leave, getpid, dumps, close = os.fork, os.wait4, os._exit, os.getpid, json.dumps, os.close
    while True:
        asked, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
        if not asked:
            leave(0)
        turn = json.loads(asked)
        child = fork()
        if child == 0:
            connection.close()
            _be_turn(turn, descriptors, names)
        for descriptor in descriptors:
            close(descriptor)
        _, status, usage = wait4(child, 0)
        answer = {"status": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime, "pid": getpid()}
        connection.send(dumps(answer).encode())


def _be_turn(turn: dict[str, Any], descriptors: list[int], names: dict[str, Any]) -> NoReturn:
    """Run one turn's code, then fork the next state, which has this process's variables and none of its threads."""
    fork, leave = os.fork, os._exit
    code, given, told, door = descriptors
    os.dup2(given, 0)
    os.dup2(told, 1)
    os.dup2(told if turn["merged"] else os.open("/dev/null", os.O_WRONLY), 2)
    with open(code, encoding="utf-8", errors="replace") as file:
        source = file.read()
    for descriptor in (given, told):
        os.close(descriptor)
    _open_streams()
    status = execute(source, f"<turn {turn['turn']}>", names)
    hears, says = os.pipe()
    try:
        following = fork()
    except OSError as error:
        os.write(2, f"The variables of this turn are not kept: {error}\n".encode())
        leave(1)
    if following == 0:
        quiet = os.open("/dev/null", os.O_RDWR)
        for end in (0, 1, 2):
            os.dup2(quiet, end)
        os.close(quiet)
        os.close(hears)
        connection = socket.socket(fileno=door)
        connection.send(json.dumps({"pid": os.getpid()}).encode())
        os.close(says)
        be_state(connection, names)
    os.close(says)
    os.read(hears, 1)  # Its end: the next state has said that it is there.
    leave(status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
