"""Finding a run's directory: the one that is named, or the newest."""

from __future__ import annotations

from pathlib import Path

from m2flow.errors import SpecError

_MARK = "config.json"
"""Each run directory has this from its beginning."""


def find_run(run: str | None, runs_dir: Path) -> Path:
    """The directory of a run: by its path, by its name in `runs_dir`, or the newest there.

    Raises:
        SpecError: there is none.
    """
    if run is None:
        found = sorted(runs_dir.glob(f"*/{_MARK}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise SpecError(f"there is no run in {runs_dir}", now="Make one with `m2flow run flows/grpo.py`, or name another --runs-dir.")
        return found[-1].parent
    for path in (Path(run), runs_dir / run):
        if (path / _MARK).is_file():
            return path
    known = ", ".join(sorted(path.parent.name for path in runs_dir.glob(f"*/{_MARK}"))[-3:])
    now = f"The newest in {runs_dir}: {known}." if known else f"There is no run in {runs_dir} either."
    what = f"{run} is no run directory: it has no {_MARK}" if Path(run).is_dir() else f"there is no run {run}"
    raise SpecError(what, now=now)
