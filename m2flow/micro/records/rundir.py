"""Make, describe and move the directory of a run.

runs/<flow>-<time>/
    config.json  plan.txt  plan.json      what was asked for, and what was decided
    ledger.db  segments/                  every sample
    metrics.jsonl  tensorboard/           numbers by step
    trace/  trace.json.gz                 the schedule, for OpenTelemetry and Perfetto
    checkpoints/step-000020/              what a run goes on from, with the state of optimisers
    checkpoints/final/<role>/             the trained models, in Hugging Face format
    logs/<worker>.log                     what each worker printed
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import errno
import json
import re
import shutil
import sqlite3
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from m2flow.errors import OptionError, SpecError, host_error
from m2flow.micro.protocol.plan import Plan
from m2flow.recipe import Model, in_cache, is_of_hub
from m2flow.spec import ClusterSpec, RunSettings

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def open_ledger(run_dir: Path) -> sqlite3.Connection:
    """Open the ledger of a run for reading. Raises `sqlite3.Error`: there is none."""
    return sqlite3.connect(f"{(run_dir / 'ledger.db').absolute().as_uri()}?mode=ro", uri=True)


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
    raise SpecError(f"can't find a free name for a run of {flow} in {runs_dir}")


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
        SpecError: it has another engine for training, which can't read the checkpoints and the state of optimisers.
    """
    before = read_config(run_dir).cluster
    if before == spec:
        return False
    if before.train.engine != spec.train.engine:
        raise SpecError(
            f"the run in {run_dir} was trained by the engine {before.train.engine}, and {spec.name} has {spec.train.engine}",
            now=f"Checkpoints are the engine's own. Say engine: {before.train.engine} under train, or begin a new run.",
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
