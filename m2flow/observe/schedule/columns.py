"""A run's spans as columns of numbers, and where each lies in the trace's file.

    trace/spans.msgpack --TraceColumns.refresh--> columns [S] ... --span(i)--> all that span i says

A span is an object with a dictionary; a million of them are a gigabyte. Here a span is a row of numbers, and its other attributes are
read from the file again when someone asks for them. `refresh` reads what has been appended since the last time.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError
from m2flow.observe.spans import Span, SpanBlock, counts_of, sample_of, samples_of, spans_of
from m2flow.observe.store import records_in, spans_path

IntArray = npt.NDArray[np.int64]

_NUMBERS = ("call", "step", "version", "num_samples", "num_tokens")
FIELDS = ("start", "end", "worker", "engine", "name", "label", "site", *_NUMBERS, "sample", "end_of_block", "position")
"""Times in Unix ns; `worker`, `engine`, `name`, `label` and `site` are positions in lists of texts; -1 where there is none."""
_MOST = (1 << 63) - 1


@final
class Names:
    """Texts by number, in the order in which they came."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._positions: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        found = self._positions.get(text)
        if found is None:
            found = self._positions[text] = len(self.texts)
            self.texts.append(text)
        return found


@final
class Counter(msgspec.Struct):
    """A counter's values in the order in which they came."""

    track: str
    name: str
    at_ns: list[int]
    values: list[float]


@final
class TraceColumns:
    """Follows the trace of one run; one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = spans_path(run_dir)
        self._decoder = msgspec.msgpack.Decoder(SpanBlock)
        self.generation = 0
        """Changes when what was read holds no more, because the file was cut or written anew."""
        self._forget()

    def _forget(self) -> None:
        self.num_read_bytes = 0
        self.num_bytes = 0
        """Of the file, when it was last looked at."""
        self.num_spans = 0
        self.workers, self.engines, self.names, self.labels, self.sites = Names(), Names(), Names(), Names(), Names()
        self.counters: dict[tuple[str, str], Counter] = {}
        self._gathered = array("q")
        self._columns: dict[str, IntArray] = {field: np.zeros(0, np.int64) for field in FIELDS}
        self._gathered_touches = array("q")
        self._touches: IntArray = np.zeros((0, 2), np.int64)

    def __getitem__(self, field: str) -> IntArray:
        """One of `FIELDS`, [S] in the order in which spans were written."""
        if self._gathered:
            rows = np.frombuffer(self._gathered, np.int64).reshape(-1, len(FIELDS))
            self._columns = {name: np.concatenate([self._columns[name], rows[:, at]]) for at, name in enumerate(FIELDS)}
            self._gathered = array("q")
        return self._columns[field]

    @property
    def touches(self) -> IntArray:
        """[K, 2]: a sample's packed identity, and the span of a task that was done on it."""
        if self._gathered_touches:
            self._touches = np.concatenate([self._touches, np.frombuffer(self._gathered_touches, np.int64).reshape(-1, 2)])
            self._gathered_touches = array("q")
        return self._touches

    @property
    def num_unread_bytes(self) -> int:
        return self.num_bytes - self.num_read_bytes

    def refresh(self, most_bytes: int = 1 << 62) -> bool:
        """Read what is new: whole records, up to about so many bytes. Answers whether there was any."""
        try:
            self.num_bytes = self._path.stat().st_size
        except OSError:
            self.num_bytes = 0
        if self.num_bytes < self.num_read_bytes:
            size = self.num_bytes
            self._forget()
            self.generation, self.num_bytes = self.generation + 1, size
        if not self.num_unread_bytes:
            return False
        with self._path.open("rb") as file:
            file.seek(self.num_read_bytes)
            content = file.read(min(most_bytes, self.num_unread_bytes))
            found = list(records_in(content))
            if not found and len(content) < self.num_unread_bytes:  # One record is longer than that.
                found = list(records_in(content + file.read()))
        for end, payload in found:
            self._add(self._decoder.decode(payload), self.num_read_bytes + end)
        self.num_read_bytes += found[-1][0] if found else 0
        return bool(found)

    def span(self, index: int) -> Span:
        """All that a span says, read from the file."""
        wanted = int(self["end_of_block"][index])
        before = self["end_of_block"]
        begin = int(before[before < wanted].max(initial=0))
        with self._path.open("rb") as file:
            file.seek(begin)
            for end, payload in records_in(file.read(wanted - begin)):
                if begin + end == wanted:
                    return spans_of(self._decoder.decode(payload))[int(self["position"][index])]
        raise InternalError(f"span {index} is not in {self._path} any more")

    def _add(self, block: SpanBlock, end_of_block: int) -> None:
        places: dict[str, tuple[int, int, int]] = {}
        anchor, take = block.anchor_ns, self._gathered.extend
        for position, (name, start, end, attributes) in enumerate(block.spans):
            if name not in places:
                worker, engine = Span(block.track, name, 0, 0).lane
                places[name] = self.workers[worker], self.engines[engine], self.names[name]
            get = attributes.get
            label, site = get("label"), get("flow_line")
            sample = get("sample")
            if sample is not None and type(sample) is not int:
                sample = sample_of(Span(block.track, name, start, end, attributes))
            take((start + anchor, max(start, end) + anchor, *places[name]))
            take((self.labels[str(label)] if label else -1, self.sites[str(site)] if site else -1))
            take([value if type(value := get(key)) is int and -_MOST <= value <= _MOST else -1 for key in _NUMBERS])
            take((-1 if sample is None else sample, end_of_block, position))
            if "samples" in attributes:
                index = self.num_spans + position
                for touched in samples_of(Span(block.track, name, start, end, attributes)):
                    self._gathered_touches.extend((touched, index))
        self.num_spans += len(block.spans)
        for count in counts_of(block):
            counter = self.counters.setdefault((count.track, count.name), Counter(count.track, count.name, [], []))
            counter.at_ns.append(count.at_ns)
            counter.values.append(count.value)
