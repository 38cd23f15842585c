"""Where a run's records also go, and how they are read as they grow.

trace, metrics on the disk --Sink.pump--> a collector, a tracking server

A sink reads what the run has written, so the run never waits for it. What could not be delivered is read again later; how far
each has come is in `trace/sent-NAME.json`, where a run that is taken up again, or `m2flow send`, goes on.

trace/spans.msgpack --BlockFollower--> blocks, each with where it ends
    metrics.jsonl       --LineFollower --> lines, each with where it ends

A follower moves on only when it is told that what it gave has arrived (`took`): until then it gives the same again.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from m2flow.observe.metrics import Line, metrics_path
from m2flow.observe.spans import SpanBlock
from m2flow.observe.store import records_in, spans_path


class Undelivered(Exception):
    """What was handed over was not taken; it may be later. It stays within the process: its text goes into the report."""


class Sent(msgspec.Struct):
    """How far a sink has come."""

    spans_end: int = 0
    """In `trace/spans.msgpack`, bytes."""
    metrics_end: int = 0
    """In `metrics.jsonl`, bytes."""
    num_spans: int = 0
    """As the receiver counts them."""
    num_points: int = 0


class Report(msgspec.Struct):
    """What became of one sink's part."""

    name: str
    where: str
    """For people: an address, a directory."""
    num_spans: int
    num_points: int
    num_left_bytes: int
    """Of the run's files, that were not delivered."""
    error: str
    """The last one; empty if the last attempt was well."""


class Sink(ABC):
    """One place. One thread uses it: `open`, `pump` again and again, `finish`, `close`."""

    name: str
    where: str

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._path = run_dir / "trace" / f"sent-{self.name}.json"
        self.sent = read_sent(self._path)

    @abstractmethod
    def open(self) -> None:
        """Reach the place, as far as that takes no network; else the first `pump` does."""

    @abstractmethod
    def pump(self) -> bool:
        """Hand over a bite of what is new; whether there was any. Raises Undelivered."""

    def begin_again(self) -> None:
        """Before `open`: forget what was delivered."""
        self.sent = Sent()

    def finish(self) -> None:
        """All has been handed over, and nothing more comes in this attempt at the run. Raises Undelivered."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the place. May be called after anything."""

    @property
    @abstractmethod
    def num_left_bytes(self) -> int:
        """Of the run's files, not delivered."""

    def report(self, error: str) -> Report:
        return Report(self.name, self.where, self.sent.num_spans, self.sent.num_points, self.num_left_bytes, error)

    def _keep(self) -> None:
        """Remember how far this has come."""
        part = self._path.with_suffix(".partial")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(self.sent))
        part.replace(self._path)


def read_sent(path: Path) -> Sent:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sent)
    except (OSError, msgspec.MsgspecError):
        return Sent()


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
