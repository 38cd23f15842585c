"""Where a run's records also go, beside its directory: what such a place has to be.

    trace, metrics on the disk --Sink.pump--> a collector, a tracking server

A sink reads what the run has written, so the run never waits for it. What could not be delivered is read again later; how far
each has come is in `trace/sent-NAME.json`, where a run that is taken up again, or `m2flow send`, goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import msgspec


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
