"""Reading a run's trace and metrics as they grow: what has been appended since the last time, in bites.

    trace/spans.msgpack --BlockFollower--> blocks, each with where it ends
    metrics.jsonl       --LineFollower --> lines, each with where it ends

A follower moves on only when it is told that what it gave has arrived (`took`): until then it gives the same again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from m2flow.observe.metrics import Line, metrics_path
from m2flow.observe.spans import SpanBlock
from m2flow.observe.store import records_in, spans_path

_BITE = 1 << 20
"""Bytes that are read at once; a longer record is read whole."""


class Block(NamedTuple):
    """A record of the trace."""

    end: int
    """Where it ends in the file."""
    block: SpanBlock


class Step(NamedTuple):
    """A line of the metrics."""

    end: int
    step: int
    at_ns: int
    values: Mapping[str, float]
    """Those that are finite."""


@final
class BlockFollower:
    """Of one run's trace."""

    def __init__(self, run_dir: Path, position: int = 0) -> None:
        self.position = position
        self._path = spans_path(run_dir)
        self._decoder = msgspec.msgpack.Decoder(SpanBlock)

    def more(self) -> list[Block]:
        """What comes next; empty if nothing whole is there yet."""
        content, rest = _read(self._path, self.position)
        found = list(records_in(content)) or list(records_in(content + rest()))
        return [Block(self.position + end, self._decoder.decode(payload)) for end, payload in found]

    def took(self, end: int) -> None:
        self.position = end

    @property
    def num_left_bytes(self) -> int:
        return max(_size(self._path) - self.position, 0)


@final
class LineFollower:
    """Of one run's metrics. A run that is taken up again cuts its file; what comes then is given again."""

    def __init__(self, run_dir: Path, position: int = 0) -> None:
        self.position = position
        self._path = metrics_path(run_dir)

    def more(self) -> list[Step]:
        self.position = min(self.position, _size(self._path))
        content, _ = _read(self._path, self.position)
        found, at = [], self.position
        for text in content.splitlines(keepends=True):
            if not text.endswith(b"\n"):
                break
            at += len(text)
            with contextlib.suppress(msgspec.MsgspecError):  # A torn line is passed over.
                line = msgspec.json.decode(text, type=Line)
                values = {name: value for name, value in line.values.items() if value is not None}
                found.append(Step(at, line.step, round(line.time_s * 1e9), values))
        return found

    def took(self, end: int) -> None:
        self.position = end

    @property
    def num_left_bytes(self) -> int:
        return max(_size(self._path) - self.position, 0)


def _read(path: Path, position: int) -> tuple[bytes, Callable[[], bytes]]:
    """A bite from there on, and a function for all that comes after it."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            content = file.read(_BITE)
    except OSError:
        return b"", lambda: b""

    def rest() -> bytes:
        if len(content) < _BITE:
            return b""
        with path.open("rb") as file:
            file.seek(position + len(content))
            return file.read()

    return content, rest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
