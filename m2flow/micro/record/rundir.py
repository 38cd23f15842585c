"""What a run leaves on disk.

runs/<flow>-<time>/
    config.json  plan.txt  plan.json      what was asked for, and what was decided
    ledger.db  segments/                  every sample
    metrics.jsonl  tensorboard/           numbers by step
    trace/  trace.json.gz  timeline.html  the schedule, for OpenTelemetry, Perfetto and a browser
    checkpoints/final/<role>/             the trained models, in Hugging Face format
    logs/<worker>.log                     what each worker printed
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from m2flow.errors import EngineError, SpecError
from m2flow.micro.plan import Plan
from m2flow.spec import ClusterSpec, RunSettings

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


@contextlib.contextmanager
def naming_a_full_disk(directory: Path | str) -> Iterator[None]:
    """Where a run writes its records: what the operating system says of a full or broken disk becomes an error that names the place.

    Raises:
        EngineError: the disk under `directory` took no more.
    """
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, OSError) and error.errno not in _FULL:
            raise
        now = "Free some space, or give another place with --runs-dir."
        raise EngineError(f"can't write the records of the run in {directory}: {error}", now=now) from error


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


def write_config(run_dir: Path, *, flow_file: str, options: Mapping[str, object], settings: RunSettings, spec: ClusterSpec) -> None:
    """What was asked for, resolved."""
    config = {
        "flow": flow_file,
        "options": {name: value if isinstance(value, int | float | str | bool | None) else repr(value) for name, value in options.items()},
        "settings": settings.model_dump(),
        "cluster": spec.model_dump(),
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_plan(run_dir: Path, plan: Plan) -> None:
    (run_dir / "plan.txt").write_text(f"{plan}\n")
    (run_dir / "plan.json").write_bytes(plan.to_json())
