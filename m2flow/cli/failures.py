"""What a failure looks like in a terminal: `Kind: where`, what, what now; and whose fault it is.

An `M2FlowError` says all that itself. Any other exception is the flow's if the flow's code is nearer to it than ours is, and ours
otherwise; then the traceback goes into the run's logs, and its last lines to the terminal.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from typing import IO

import click

from m2flow.errors import FlowError, FlowLoadError, InternalError, M2FlowError, OptionError, RunInterrupted, SpecError, host_error

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
"""Of any environment: one may stand on another."""
_LAST_LINES = 8


class Failure(click.ClickException):
    """An error as the command line ends with it; `notes` are lines about what is left of the run."""

    def __init__(self, error: M2FlowError, notes: str = "") -> None:
        super().__init__(error.what)
        self.error = error
        self.notes = notes
        self.exit_code = status_of(error)  # type: ignore[misc]  # click reads it from the instance

    def format_message(self) -> str:
        text = f"{type(self.error).__name__}: {self.error}"
        if isinstance(self.error, InternalError):
            text += "\n  This is a fault of m2flow's own, not of your flow: please report it, with the run directory if there is one."
        return f"{text}\n{self.notes}".rstrip()

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(self.format_message(), file=file or sys.stderr)


def status_of(error: M2FlowError) -> int:
    """130 for Ctrl-C, 2 for what must be changed in the command line, the file or the spec, 1 for a run that failed."""
    if isinstance(error, RunInterrupted):
        return 130
    return 2 if isinstance(error, FlowLoadError | OptionError | SpecError) else 1


def failure_of(error: Exception, run_dir: Path | None = None, notes: str = "") -> Failure:
    """The failure for any exception."""
    if isinstance(error, M2FlowError):
        return Failure(error, notes)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _owner(frame.filename) != "library"]
    theirs = [frame for frame in frames if _owner(frame.filename) == "user"]
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if theirs and frames[-1] is theirs[-1]:
        *outer, inner = theirs
        lines = [f"{_shown(inner.filename)}:{inner.lineno}  {inner.line}"]
        lines += [f"  called from {_shown(f.filename)}:{f.lineno} in {f.name}" for f in reversed(outer)]
        return Failure(FlowError(f"the flow raised {said}", where="\n".join(lines)), notes)
    refused = host_error("the machine refused something that m2flow needs", error)
    if refused is not None:
        return Failure(refused, notes)
    text = "".join(traceback.format_exception(error))
    now = "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])
    if run_dir is not None:
        log = run_dir / "logs" / "m2flow.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        now += f"\nThe whole traceback is in {log}."
    return Failure(InternalError(said, now=now), notes)


def _owner(filename: str) -> str:
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    if path.startswith(_PACKAGE):
        return "m2flow"
    is_librarys = path.startswith((*_LIBRARIES, "<frozen")) or not _LIBRARY_FOLDERS.isdisjoint(Path(path).parts)
    return "library" if is_librarys else "user"


def _shown(filename: str) -> str:
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except ValueError:
        return filename
