"""Make, describe and move the directory of a run, and keep its record on shared storage.

runs/<flow>-<time>/
    config.json  plan.txt  plan.json      what was asked for, and what was decided
    ledger.db  segments/                  every sample
    metrics.jsonl  tensorboard/           numbers by step
    trace/  trace.json.gz                 the schedule, for OpenTelemetry and Perfetto
    checkpoints/step-000020/              what a run goes on from, with the state of optimisers
    checkpoints/final/<role>/             the trained models, in Hugging Face format
    logs/<worker>.log                     what each worker printed

On shared storage the record of a run survives its host, and the run can resume on another.

    RUN/segments, RUN/checkpoints  ->  STORAGE/<run>/ (links: workers and trainers write there themselves)
    RUN/ledger.db --snapshot, now and then and before each checkpoint--> STORAGE/<run>/ledger.db
    STORAGE/<run> --fetch_run_dir, on any host--> a directory of its own, which goes on

SQLite wants a local disk, so the ledger is never written over a network: a consistent snapshot is made here and renamed into place there,
after what it points to. If the host is lost, so is the time since the last snapshot, as a kill loses that since the last commit:
`m2flow run --resume` finds in the segments what the ledger does not have yet, and makes the rest again.

`owner.json` names the run directory that may write there. A host that takes the run over writes a new one; the former owner, when it finds
that, ends with `SpecError` before it can replace a snapshot or complete a checkpoint. Limit: there is a moment between check and rename.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sqlite3
import threading
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec

from m2flow.engines.registry import capabilities_of
from m2flow.errors import EngineError, M2FlowError, OptionError, SpecError, host_error, sqlite_code
from m2flow.micro.protocol.plan import Plan
from m2flow.recipe import Model, in_cache, is_of_hub
from m2flow.spec import ClusterSpec, RunSettings

# ---- the directory


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def open_ledger(run_dir: Path) -> sqlite3.Connection:
    """Open the ledger of a run for reading. Raises `sqlite3.Error`: there is none.

    SQLite makes files beside it. Where it may not (another user's run, a disk that is mounted read-only), a ledger without a log of newer
    writes (`ledger.db-wal`) is read as one that nobody changes.
    """
    ledger = run_dir / _LEDGER
    uri = f"{ledger.absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True)
    try:
        db.execute("SELECT 1 FROM sqlite_master LIMIT 1")
    except sqlite3.Error as error:
        log = ledger.with_name(f"{_LEDGER}-wal")
        may_not = sqlite_code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not may_not or (log.exists() and log.stat().st_size):
            return db  # What is asked of it next meets the same.
        db.close()
        return sqlite3.connect(f"{uri}&immutable=1", uri=True)
    return db


@contextlib.contextmanager
def reading_ledger(run_dir: Path, what: str = "") -> Iterator[sqlite3.Connection]:
    """Open the ledger of a run for reading, and close it, which the connection's own `with` does not do.

    Args:
        what: what is read, for the error; without it, SQLite's errors are raised as they are.
    Raises:
        SpecError: the directory has no ledger, or one that can't be read.
    """
    try:
        with contextlib.closing(open_ledger(run_dir)) as db:
            yield db
    except sqlite3.Error as error:
        if not what:
            raise
        now = "Give the directory of a run, as `m2flow run` names it."
        raise SpecError(f"can't read the {what} of {run_dir}: {error}", now=now) from None


@contextlib.contextmanager
def naming_disk_errors(directory: Path | str) -> Iterator[None]:
    """Turn an operating system's error of a full or broken disk, while records are written, into one that names the directory. Other
    errors pass: the flow runs in here too.

    Raises:
        HostError: the disk under `directory` took no more.
    """
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        found = host_error(f"can't write the records of the run in {directory}", error)
        if found is None or (isinstance(error, OSError) and error.errno not in _FULL):
            raise
        raise found from error


def create_run_dir(runs_dir: str, flow: str) -> Path:
    """A new directory for a run, named after its flow and the time.

    Raises:
        SpecError: it can't be made.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = Path(runs_dir) / (f"{flow}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise SpecError(f"can't make the run directory {path}: {error.strerror}", now="Give another place with --runs-dir.") from None
        for name in ("segments", "logs", "checkpoints", "trace"):
            (path / name).mkdir()
        return path
    raise SpecError(
        f"can't find a free name for a run of {flow} in {runs_dir}", now="Move old runs away, or give another place with --runs-dir."
    )


_MARK = "config.json"
"""The file that each run directory has from its beginning."""


def find_run(run: str | None, runs_dir: Path) -> Path:
    """Find the directory of a run: by its path, by its name in `runs_dir`, or the newest there.

    Raises:
        SpecError: there is none.
    """
    if run is None:
        found = sorted(runs_dir.glob(f"*/{_MARK}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise SpecError(
                f"there is no run in {runs_dir}", now="Make one with `m2flow run FLOW` or `m2flow demo`, or name another --runs-dir."
            )
        return found[-1].parent
    for path in (Path(run), runs_dir / run):
        if (path / _MARK).is_file():
            return path
    known = ", ".join(sorted(path.parent.name for path in runs_dir.glob(f"*/{_MARK}"))[-3:])
    now = f"The newest in {runs_dir}: {known}." if known else f"There is no run in {runs_dir} either."
    what = f"{run} is no run directory: it has no {_MARK}" if Path(run).is_dir() else f"there is no run {run}"
    raise SpecError(what, now=now)


@dataclass(frozen=True)
class Config:
    """The arguments of a run: flow, options, settings, cluster."""

    run_dir: Path
    flow: str
    """The flow's file as it was given."""
    directory: str
    """The working directory then, which relative paths start from."""
    options: dict[str, object]
    """Options of the flow as far as a file can hold them: numbers, texts, names of choices, paths."""
    settings: RunSettings
    cluster: ClusterSpec
    repeats_decisions: bool

    @property
    def flow_path(self) -> Path:
        """The flow's file, relative as it was given. Of a flow of a cell it is its name, such as `In[3]`: no file."""
        return Path(self.flow.partition(":")[0])

    @property
    def is_of_session(self) -> bool:
        """Whether the flow was defined in a notebook's cell or in a session of Python, where no other process finds it."""
        return self.flow_path.suffix != ".py"

    def why_no_flow(self) -> str:
        """Why the flow is not there for a process in any directory but its own."""
        if self.is_of_session:
            return f"its flow is {self.flow} of a notebook or a session of Python, which no command can read"
        return f"its flow is {self.flow} in {self.directory}, which is not here"


def read_config(run_dir: Path) -> Config:
    """Read the configuration of a run.

    Raises:
        SpecError: it is not the directory of a run, or of one that an earlier m2flow made.
    """
    file = run_dir / "config.json"
    try:
        found = json.loads(file.read_text())
        settings, cluster = RunSettings.model_validate(found["settings"]), ClusterSpec.model_validate(found["cluster"])
        return Config(run_dir, found["flow"], found["directory"], found["options"], settings, cluster, found["repeats_decisions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{file} does not say what the run was: {error}", now="Give a run's directory, as `m2flow run` prints it."
        ) from None


def write_config(
    run_dir: Path,
    *,
    flow_file: str,
    options: Mapping[str, object],
    settings: RunSettings,
    spec: ClusterSpec,
    models: Mapping[str, Model],
    repeats_decisions: bool = False,
    resolved: Mapping[str, object] | None = None,
) -> None:
    """Write the configuration of a run: what was asked for, where the models of its roles come from, and what it came to
    (`m2flow.micro.records.provenance.resolved_of`).
    """
    config = {
        "name": run_dir.resolve().name,
        "flow": flow_file,
        "directory": str(Path.cwd()),
        "options": {name: option_text(value) for name, value in options.items()},
        "repeats_decisions": repeats_decisions,
        "settings": settings.model_dump(),
        "cluster": spec.model_dump(),
        "models": {role: origin(model) for role, model in models.items()},
        **({"resolved": resolved} if resolved is not None else {}),
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def origin(model: Model) -> dict[str, str]:
    """What a run's record says of where a model comes from: `path` and `init`, and of a model of the hub `hub`, its name, and `revision`.

    The revision is a commit if the cache has the model. A directory of the hub's cache is the hub's model that it holds.
    """
    found = in_cache(model) if is_of_hub(model.path) else Path(model.path).expanduser().absolute()
    of_cache = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)$", str(found or ""))
    record = {"path": model.path, "init": str(model.init)}
    if of_cache:
        return record | {"hub": f"{of_cache[1]}/{of_cache[2]}", "revision": of_cache[3]}
    return record | ({"hub": model.path, "revision": model.revision or ""} if is_of_hub(model.path) else {})


def move(run_dir: Path, spec: ClusterSpec, plan: Plan, attempt: int) -> bool:
    """Move a resumed run to another cluster, if it is another; return whether it is. The old configuration and plan are kept as
    `config.before-3.json` and `plan.before-3.json`, where 3 is the number of the new attempt.

    Raises:
        SpecError: it has another engine for training, whose checkpoints and states of optimisers are others.
    """
    before = read_config(run_dir).cluster
    if before == spec:
        return False
    engines = before.train.engine, spec.train.engine
    if engines[0] != engines[1] and not _have_same_checkpoints(*engines):
        raise SpecError(
            f"the run in {run_dir} was trained by the engine {before.train.engine}, and {spec.name} has {spec.train.engine}",
            now=f"They read other checkpoints. Say engine: {before.train.engine} under train, or begin a new run.",
        )
    found = json.loads((run_dir / "config.json").read_text()) | {"cluster": spec.model_dump()}
    texts = {"plan.txt": f"{plan}\n", "plan.json": plan.to_json().decode(), "config.json": json.dumps(found, indent=2) + "\n"}
    for name, text in texts.items():
        file = run_dir / name
        (run_dir / f".{name}.new").write_text(text)
        shutil.copyfile(file, file.with_name(f"{file.stem}.before-{attempt}{file.suffix}"))
    for name in texts:
        (run_dir / f".{name}.new").replace(run_dir / name)
    return True


def _have_same_checkpoints(*engines: str) -> bool:
    formats = {can.checkpoint_format if (can := capabilities_of(name, "train", {})) is not None else "" for name in engines}
    return len(formats) == 1 and "" not in formats


def option_text(value: object) -> object:
    """An option's value as the configuration holds it: as on the command line, where that is possible."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def option_from_text(value: object, kind: object) -> object:
    """Convert an option of a configuration to the type of its parameter: a path, a choice, or what it is.

    Raises:
        OptionError: it is of a type that no file holds.
    """
    if not isinstance(value, str) or kind in (str, object):
        return value
    found: object = value
    for one in typing.get_args(kind) or (kind,):
        if isinstance(one, type) and issubclass(one, enum.Enum):
            found = next((choice for choice in one if option_text(choice) == value), found)
        elif isinstance(one, type) and issubclass(one, Path):
            found = Path(value)
        elif isinstance(one, type) and one not in (str, int, float, bool, type(None)):
            raise OptionError(f"the run has an option {value!r:.60}, a {one.__name__}, which no file holds", now="Begin a new run.")
    return found


def write_plan(run_dir: Path, plan: Plan) -> None:
    (run_dir / "plan.txt").write_text(f"{plan}\n")
    (run_dir / "plan.json").write_bytes(plan.to_json())


# ---- shared storage


_HERE, _OWNER, _BEAT = "storage.json", "owner.json", "beat"
_LEDGER = "ledger.db"
_SHARED = ("segments", "checkpoints")
_NOT_COPIED = {_HERE, _LEDGER, f"{_LEDGER}-wal", f"{_LEDGER}-shm", "run.lock", "control", *_SHARED}
_GROWING = ("logs", "trace", "tensorboard", "metrics.jsonl")
_BLOCK = 1 << 20


class _Here(msgspec.Struct, frozen=True):
    """The run's own file on where its storage is."""

    directory: str
    """The run's directory on the storage."""
    token: str
    every_s: float


_decode_here = msgspec.json.Decoder(_Here).decode


class _Owner(msgspec.Struct, frozen=True):
    """The owner's file on the storage."""

    token: str
    host: str
    directory: str
    """The run directory on the owner's host."""
    every_s: float
    has_ended: bool = False


_decode_owner = msgspec.json.Decoder(_Owner).decode


def shared_dir(run_dir: Path) -> Path:
    """The directory for files that workers on any host write: on the storage if there is one, else the run's own."""
    return (run_dir / "segments").resolve().parent


def is_on_storage(run_dir: Path) -> bool:
    """Whether this is a run's directory on the storage, and not its own."""
    return (run_dir / _OWNER).is_file()


def share(run_dir: Path, directory: str, every_s: float) -> None:
    """Give a new run a directory on the storage.

    Raises:
        SpecError: it can't be written.
    """
    there = (Path(directory).expanduser() / run_dir.name).absolute()
    try:
        there.mkdir(parents=True)
        for name in _SHARED:
            (there / name).mkdir()
            (run_dir / name).rmdir()
            (run_dir / name).symlink_to(there / name)
        _own(run_dir, there, every_s)
    except OSError as error:
        raise SpecError(f"the run can't be shared at {there}: {error.strerror or error}", now="See storage: {directory: ...}.") from None


def fetch_run_dir(run_dir: Path, runs_dir: str) -> Path:
    """The local directory in which a run resumes: the given one, or a copy of it if that is on the storage. Waits until it is certain
    that no other host writes there.

    Raises:
        SpecError: the run goes on elsewhere.
    """
    if not is_on_storage(run_dir):
        here = _here(run_dir)
        if here is not None:
            _require(here)
        return run_dir
    there = run_dir.absolute()
    owner = _read_owner(there)
    home = Path(runs_dir) / there.name
    here = _here(home)
    if here is not None and here.token == owner.token and Path(here.directory) == there:
        return home
    _wait_for_silence(there, owner)
    _set_aside(home)
    made = home.with_name(f".{home.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    try:
        shutil.copytree(there, made, ignore=lambda folder, names: _left_out(Path(folder) == there, names))
        for name in _SHARED:
            (made / name).symlink_to(there / name)
        for name in ("logs", "trace"):
            (made / name).mkdir(exist_ok=True)
        _own(made, there, owner.every_s, named=home)
        made.rename(home)
    except OSError as error:
        raise SpecError(f"the run in {there} can't be brought to {home}: {error}", now="Give another place with --runs-dir.") from None
    return home


def copy_pictures(run_dir: Path) -> None:
    """Copy the pictures that were drawn at the end of a run to the storage too.

    Raises:
        EngineError: the storage takes no more. SpecError: somebody else has taken the run over.
    """
    copying = StorageCopier.of(run_dir)
    if copying is not None:
        copying.copy()


@final
class StorageCopier:
    """Keeps the storage up to date, from a thread and whenever `copy` is called."""

    def __init__(self, run_dir: Path, here: _Here) -> None:
        self._run_dir = run_dir
        self._there = Path(here.directory)
        self._here = here
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="m2flow-storage", daemon=True)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._num_beats = 0
        self._news: list[tuple[str, str]] = []
        self._is_late = False
        self._failure: M2FlowError | None = None

    @classmethod
    def of(cls, run_dir: Path) -> StorageCopier | None:
        """The copier of a run; None if the run has no storage."""
        here = _here(run_dir)
        return None if here is None else cls(run_dir, here)

    def open(self) -> None:
        self.copy()
        self._thread.start()

    def copy(self) -> None:
        """Copy what is committed to the ledger by now, with all that it points to, to the storage.

        Raises:
            EngineError: the storage takes no more. SpecError: somebody else has taken the run over.
        """
        with self._lock:
            _require(self._here)
            try:
                self._copy()
            except (OSError, sqlite3.Error) as error:
                raise EngineError(
                    f"the run can't be copied to {self._there}: {error}", now="Is the storage there, and not full?"
                ) from error

    def news(self) -> list[tuple[str, str]]:
        """Incidents since the last call: (kind, what).

        Raises:
            SpecError: somebody else has taken the run over.
        """
        if self._failure is not None:
            raise self._failure
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Copy everything, and mark the run as ended. May be called twice."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.copy()
        _write(self._there / _OWNER, msgspec.structs.replace(_read_owner(self._there), has_ended=True))

    def _run(self) -> None:
        while not self._is_over.wait(self._here.every_s):
            try:
                self.copy()
            except EngineError as error:
                if not self._is_late:
                    self._news.append(("storage lost", error.what))
                self._is_late = True
            except M2FlowError as error:
                self._failure = error
                return
            else:
                if self._is_late:
                    self._news.append(("storage back", f"{self._there} is up to date again"))
                self._is_late = False

    def _copy(self) -> None:
        snapshot = self._snapshot()
        for path in _files(self._run_dir):
            status = path.stat()
            stamp = status.st_size, status.st_mtime_ns
            if self._seen.get(path) != stamp:
                self._bring(path, grows=path in self._seen and path.relative_to(self._run_dir).parts[0] in _GROWING)
                self._seen[path] = stamp
        if snapshot is not None:
            _place(snapshot, self._there / _LEDGER)
            snapshot.unlink()
        self._num_beats += 1
        _replace(self._there / _BEAT, f"{self._here.token} {self._num_beats}\n".encode())

    def _snapshot(self) -> Path | None:
        """A snapshot of the ledger as of its last commit; None if the storage has it."""
        ledger = self._run_dir / _LEDGER
        if not ledger.exists():
            return None
        stamps = [path.stat() for path in (ledger, ledger.with_name(f"{_LEDGER}-wal")) if path.exists()]
        stamp = sum(one.st_size for one in stamps), max(one.st_mtime_ns for one in stamps)
        if self._seen.get(ledger) == stamp:
            return None
        made = self._run_dir / f".{_LEDGER}.copy"
        made.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(ledger)) as source, contextlib.closing(sqlite3.connect(made)) as target:
            target.execute("PRAGMA synchronous=OFF")
            source.backup(target)
        self._seen[ledger] = stamp
        return made

    def _bring(self, path: Path, *, grows: bool) -> None:
        to = self._there / path.relative_to(self._run_dir)
        to.parent.mkdir(parents=True, exist_ok=True)
        if grows and to.exists() and to.stat().st_size <= path.stat().st_size:
            with path.open("rb") as source, to.open("ab") as target:
                source.seek(target.tell())
                shutil.copyfileobj(source, target, _BLOCK)
        else:
            _place(path, to)


def _files(run_dir: Path) -> Iterator[Path]:
    for path in sorted(run_dir.iterdir()):
        if path.name in _NOT_COPIED or path.name.startswith("."):
            continue
        yield from (inner for inner in sorted(path.rglob("*")) if inner.is_file()) if path.is_dir() else [path]


def _left_out(is_top: bool, names: list[str]) -> set[str]:
    return {name for name in names if name.startswith(".") or (is_top and name in {_OWNER, _BEAT, "weights", *_SHARED})}


def _own(run_dir: Path, there: Path, every_s: float, *, named: Path | None = None) -> None:
    """Become the owner of a run on the storage."""
    token = secrets.token_hex(16)
    _write(run_dir / _HERE, _Here(str(there), token, every_s))
    _write(there / _OWNER, _Owner(token, socket.gethostname(), str((named or run_dir).absolute()), every_s))


def _require(here: _Here) -> None:
    owner = _read_owner(Path(here.directory))
    if owner.token != here.token:
        raise SpecError(
            f"the run was taken over by {owner.directory} on {owner.host}",
            now=f"It goes on there; `m2flow run --resume {shlex.quote(str(here.directory))}` takes it up once that has ended.",
        )


def _wait_for_silence(there: Path, owner: _Owner) -> None:
    """Wait until the owner has not written its heartbeat for so long that it is gone. It writes one every `every_s`; only our own clock
    is used.
    """
    if owner.has_ended:
        return
    beat = _beat(there)
    deadline = time.monotonic() + 2 * owner.every_s + 1.0
    while time.monotonic() < deadline:
        if _beat(there) != beat:
            raise SpecError(f"the run goes on in {owner.directory} on {owner.host}", now="Wait for it, or stop that process first.")
        time.sleep(0.1)


def _beat(there: Path) -> bytes:
    try:
        return (there / _BEAT).read_bytes()
    except FileNotFoundError:
        return b""


def _set_aside(home: Path) -> None:
    """Rename a local directory of the run that is older than what is on the storage."""
    for number in range(1, 1000):
        if not home.exists():
            return
        with contextlib.suppress(OSError):
            home.rename(home.with_name(f"{home.name}.before-{number}"))


def _here(run_dir: Path) -> _Here | None:
    try:
        return _decode_here((run_dir / _HERE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise SpecError(
            f"{run_dir / _HERE} can't be read: {error}",
            now="Check the rights of the file and its disk; if no process of the run is left, remove the file.",
        ) from None


def _read_owner(there: Path) -> _Owner:
    try:
        return _decode_owner((there / _OWNER).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineError(f"{there / _OWNER} can't be read: {error}", now="Is the storage there?") from None


def _write(path: Path, what: msgspec.Struct) -> None:
    _replace(path, msgspec.json.encode(what))


def _replace(path: Path, body: bytes) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_bytes(body)
    os.replace(made, path)


def _place(path: Path, to: Path) -> None:
    """Copy a file there, whole or not at all."""
    made = to.with_name(f".{to.name}.part")
    with path.open("rb") as source, made.open("wb") as target:
        shutil.copyfileobj(source, target, _BLOCK)
        target.flush()
        os.fsync(target.fileno())
    os.replace(made, to)
