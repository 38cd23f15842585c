"""What is asked of a running controller by others: to have rollout workers join or leave. By files in the run's directory.

    m2flow cluster scale --ask--> RUN/control/<number>.ask --requests--> Controller --answered_by--> <number>.answer

Whoever may write to the run's directory may ask. The controller looks about once a second.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import SpecError
from m2flow.micro.scheduling.events import Event

_DIRECTORY, _ASK, _ANSWER = "control", ".ask", ".answer"
_LOOKS_S = 0.1


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rollout: int
    """So many more, or fewer."""


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    now: str = ""
    is_done: bool = True


@final
class Request:
    """One that is not answered yet."""

    def __init__(self, path: Path, change: int) -> None:
        self._path = path
        self._change = change

    def answered_by(self, scale: Callable[[int], tuple[list[Event], str]]) -> list[Event]:
        """Have it done, and say so to who has asked."""
        try:
            events, what = scale(self._change)
            answer = _Answer(what)
        except SpecError as error:
            events, answer = [], _Answer(error.what, error.now, is_done=False)
        _write(self._path.with_suffix(_ANSWER), msgspec.json.encode(answer))
        return events


def requests(run_dir: Path) -> Iterator[Request]:
    """Those that have come; each is given once. What can't be read is passed over."""
    for path in sorted((run_dir / _DIRECTORY).glob(f"*{_ASK}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            change = msgspec.json.decode(path.read_bytes(), type=_Ask).rollout
            path.unlink()
            yield Request(path, change)


def ask(run_dir: Path, change: int, *, patience_s: float) -> str:
    """Ask for so many rollout workers more, or fewer; what was answered.

    Raises:
        SpecError: it can't be done, or nobody has answered: the run is over, or was killed.
    """
    directory = run_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"{time.time_ns()}-{secrets.token_hex(4)}{_ASK}"
    answer = path.with_suffix(_ANSWER)
    _write(path, msgspec.json.encode(_Ask(change)))
    deadline = time.monotonic() + patience_s
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(_LOOKS_S)
    if not answer.exists():
        path.unlink(missing_ok=True)
        raise SpecError(
            f"{run_dir} has not answered in {patience_s:.0f} s", now="Is it still running? `m2flow doctor RUN` says how it stands."
        )
    said = msgspec.json.decode(answer.read_bytes(), type=_Answer)
    answer.unlink()
    if not said.is_done:
        raise SpecError(said.what, now=said.now)
    return said.what


def _write(path: Path, body: bytes) -> None:
    """Whole, or not there."""
    made = path.with_name(f".{path.name}")
    made.write_bytes(body)
    os.replace(made, path)
