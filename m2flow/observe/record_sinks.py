"""The sink interface for a run's records, and followers that read those records as they grow.

    trace/spans.msgpack --BlockFollower--> blocks --+--Sink.pump--> a collector, a tracking server
    metrics.jsonl       --LineFollower --> lines  --+

A sink reads what the run has already written, so the run never waits for it. A follower advances only when what it returned is
acknowledged (`acknowledge`); until then it returns the same again. How far each sink has come is kept in `trace/sent-NAME.json`, where a
resumed run, or `m2flow send`, continues.
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

_read_line = msgspec.json.Decoder(Line).decode

_span_block_decoder = msgspec.msgpack.Decoder(SpanBlock)


class Undelivered(Exception):
    """A receiver did not accept what it was sent; retrying may help. Never leaves the process: its text goes into the report."""


class Sent(msgspec.Struct):
    """How far a sink has come."""

    spans_end: int = 0
    """In `trace/spans.msgpack`, bytes."""
    metrics_end: int = 0
    """In `metrics.jsonl`, bytes."""
    num_spans: int = 0
    """Spans delivered, as the receiver counts them."""
    num_points: int = 0


_read_sent = msgspec.json.Decoder(Sent).decode


class Report(msgspec.Struct):
    """What one sink has delivered, and what it has not."""

    name: str
    where: str
    """The destination, to show to people: an address, a directory."""
    num_spans: int
    num_points: int
    num_left_bytes: int
    """Bytes of the run's files that were not delivered."""
    error: str
    """The last error; empty if the last attempt succeeded."""

    def describe(self) -> str:
        """One line: what arrived where, and what did not."""
        left = f"; {self.num_left_bytes:,} bytes are left: {self.error or 'there was no time'}" if self.is_short else ""
        return f"{self.where}: {self.num_spans:,} spans, {self.num_points:,} numbers{left}"

    @property
    def is_short(self) -> bool:
        """Whether something was not delivered."""
        return bool(self.error or self.num_left_bytes)


class Sink(ABC):
    """A receiver of records. One thread uses it: `open`, `pump` repeatedly, `finish`, `close`."""

    name: str
    where: str
    period_s: float = 1.0
    """Between two looks at the run's files while the run goes on, so that what comes meanwhile goes in one request."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._path = run_dir / "trace" / f"sent-{self.name}.json"
        self.sent = read_sent(self._path)

    @abstractmethod
    def open(self) -> None:
        """Prepare to send, without using the network; the first `pump` connects."""

    @abstractmethod
    def pump(self) -> bool:
        """Send a portion of what is new. Returns whether there was any. Raises Undelivered."""

    def reset(self) -> None:
        """Forget what was delivered, so that everything is sent again. Call it before `open`."""
        self.sent = Sent()

    def finish(self) -> None:
        """Everything has been sent, and nothing more comes in this attempt at the run. Raises Undelivered."""

    @abstractmethod
    def close(self) -> None:
        """Release the connection. May be called in any state."""

    @property
    @abstractmethod
    def num_left_bytes(self) -> int:
        """Bytes of the run's files that are not delivered."""

    def report(self, error: str) -> Report:
        return Report(self.name, self.where, self.sent.num_spans, self.sent.num_points, self.num_left_bytes, error)

    def _keep(self) -> None:
        """Save how far this sink has come."""
        part = self._path.with_suffix(".partial")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(self.sent))
        part.replace(self._path)


def read_sent(path: Path) -> Sent:
    try:
        return _read_sent(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return Sent()


_READ_BYTES = 1 << 20
"""Bytes that are read at once; a longer record is read whole."""


class Block(NamedTuple):
    """A record of the trace, with its end in the file."""

    end: int
    """Where it ends in the file."""
    block: SpanBlock


class Step(NamedTuple):
    """A line of the metrics, with its end in the file."""

    end: int
    step: int
    at_ns: int
    values: Mapping[str, float]
    """The finite values."""


@final
class BlockFollower:
    """Follow a run's trace file."""

    def __init__(self, run_dir: Path, position: int = 0) -> None:
        self.position = position
        self._path = spans_path(run_dir)
        self._decoder = _span_block_decoder

    def more(self) -> list[Block]:
        """The next whole records; empty if there is none yet."""
        content, rest = _read(self._path, self.position)
        found = list(records_in(content)) or list(records_in(content + rest()))
        return [Block(self.position + end, self._decoder.decode(payload)) for end, payload in found]

    def acknowledge(self, end: int) -> None:
        """Advance to `end`: what came before it has been delivered."""
        self.position = end

    @property
    def num_left_bytes(self) -> int:
        return max(_size(self._path) - self.position, 0)


@final
class LineFollower:
    """Follow a run's metrics file. A resumed run truncates the file, and the lines that it then writes are returned again."""

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
                line = _read_line(text)
                values = {name: value for name, value in line.values.items() if value is not None}
                found.append(Step(at, line.step, round(line.time_s * 1e9), values))
        return found

    def acknowledge(self, end: int) -> None:
        """Advance to `end`: what came before it has been delivered."""
        self.position = end

    @property
    def num_left_bytes(self) -> int:
        return max(_size(self._path) - self.position, 0)


def _read(path: Path, position: int) -> tuple[bytes, Callable[[], bytes]]:
    """Read a portion from `position` on. Returns it, and a function that reads the rest."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            content = file.read(_READ_BYTES)
    except OSError:
        return b"", lambda: b""

    def rest() -> bytes:
        if len(content) < _READ_BYTES:
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
