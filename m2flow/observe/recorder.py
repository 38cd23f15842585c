"""Record spans in a worker at the price of a tuple.

The hot path appends (name, start, end, attributes) to a list; naming, anchoring, checking and writing happen elsewhere and later
(`drain`, then `m2flow.observe.store`). Appending is safe from several threads; `drain` belongs to one. The list grows until it is
drained: a worker drains with every message to the controller, or at least every few seconds.

Times are `time.monotonic_ns()`, anchored once to the wall clock. On Linux the processes of a host share that clock, so their spans
can be compared to the microsecond, whatever happens to the wall clock meanwhile; those of other hosts are moved into the controller's
time when they are stored (`m2flow.observe.clocks`).
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, final

from m2flow.observe.spans import SpanBlock, plain_attributes

now_ns = time.monotonic_ns
"""The recorder's clock."""


@final
class Recorder:
    """Gathers the spans and counts of one track.

    >>> recorder = Recorder("trainer-0/train")
    >>> with recorder.span("train.accumulate", call=4, num_tokens=512) as span:
    ...     span.set(num_samples=3)
    >>> [(name, attributes) for name, _, _, attributes in recorder.drain().spans]
    [('train.accumulate', {'call': 4, 'num_tokens': 512, 'num_samples': 3})]
    """

    def __init__(self, track: str) -> None:
        self.track = track
        self.anchor_ns = unix_anchor_ns()
        self._spans: list[tuple[str, int, int, dict[str, Any]]] = []
        self._counts: list[tuple[str, float, int]] = []

    def __len__(self) -> int:
        """Spans and counts not yet drained."""
        return len(self._spans) + len(self._counts)

    def add(self, name: str, start_ns: int, end_ns: int, **attributes: object) -> None:
        """Record a span whose times (by `now_ns`) are known."""
        self._spans.append((name, start_ns, end_ns, attributes))

    def span(self, name: str, **attributes: object) -> OpenSpan:
        """Record the body of a `with`. If the body raises, the span has `error`, the exception's name, and the exception goes on."""
        return OpenSpan(self, name, attributes)

    def count(self, name: str, value: float, at_ns: int | None = None) -> None:
        """Record a counter's new value."""
        self._counts.append((name, value, now_ns() if at_ns is None else at_ns))

    def drain(self) -> SpanBlock:
        """Hand over all that was recorded since the last drain, ready for the wire."""
        # Copy, then delete that many: a thread that appends in between keeps its span for the next drain.
        spans, counts = self._spans[:], self._counts[:]
        del self._spans[: len(spans)], self._counts[: len(counts)]
        return SpanBlock(
            self.track,
            self.anchor_ns,
            [(str(name), int(start), int(end), plain_attributes(attributes)) for name, start, end, attributes in spans],
            [(str(name), float(value), int(at_ns)) for name, value, at_ns in counts],
        )


@final
class OpenSpan:
    """A span that is being recorded; it takes further attributes until it closes."""

    __slots__ = ("_attributes", "_name", "_recorder", "_start_ns")

    def __init__(self, recorder: Recorder, name: str, attributes: dict[str, object]) -> None:
        self._recorder = recorder
        self._name = name
        self._attributes = attributes
        self._start_ns = 0

    def set(self, **attributes: object) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> OpenSpan:
        self._start_ns = now_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self._attributes["error"] = kind.__name__
        self._recorder._spans.append((self._name, self._start_ns, now_ns(), self._attributes))


def unix_anchor_ns() -> int:
    """Unix time minus monotonic time: of a few readings, the one that was interrupted least."""
    readings = []
    for _ in range(5):
        before, wall, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]
