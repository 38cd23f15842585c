"""Store a run's trace in a crash-safe file, read it as spans or as columns of numbers, and export it to OpenTelemetry.

    SpanBlock --TraceStore.append--> trace/spans.msgpack --read_trace--> Trace
                                                         --TraceColumns.refresh--> columns [S] ... --span(i)--> the whole span
                                                         --to_otel--> trace/otel.jsonl

The file is a sequence of records [length uint32 LE][crc32 uint32 LE][msgpack of a SpanBlock], each written at once. A run that is killed
loses at most its last record: readers stop at the first record that is cut or damaged and say how many bytes that left unread, and a
writer that opens the file again truncates such a tail.

A span is an object with a dictionary; a million of them are a gigabyte. `TraceColumns` keeps a row of numbers for each span instead, and
reads its other attributes from the file when someone asks for them; `refresh` reads what has been appended since the last call.

The export is made by the OpenTelemetry SDK, one line of JSON for each span. It costs tens of microseconds a span
(`benchmarks/recording.py` measures it), so it is made once, at the end, and bounded: of more spans, an evenly spaced part is kept.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError
from m2flow.observe.otel import OtelSpans
from m2flow.observe.spans import OF_EPISODES, Count, Span, SpanBlock, SpanName, counts_of, sample_of, samples_of, spans_of

_span_block_decoder = msgspec.msgpack.Decoder(SpanBlock)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_HEADER = struct.Struct("<II")
_THINNED_FIRST = (SpanName.ROLLOUT_STEP, SpanName.SAMPLE, *OF_EPISODES)


@dataclass(frozen=True)
class Trace:
    """The spans and counter values of a run, in order of start."""

    spans: list[Span] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    num_lost_bytes: int = 0
    """Bytes at the end of the file that are not whole records: what a killed writer left."""


@dataclass(frozen=True)
class OtelExport:
    """How many spans `to_otel` wrote and left out."""

    num_spans: int
    """Spans written, without the root span that stands for the run."""
    left_out: Mapping[str, int]
    """Spans left out, by name."""


@final
class TraceStore:
    """Append the blocks of all workers to a run's trace file. A context manager; one writer for each run."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = spans_path(run_dir)
        self.num_cut_bytes = 0
        """Bytes of a torn tail that `open` cut off."""
        self._file: BinaryIO | None = None
        self._encoder = msgspec.msgpack.Encoder()

    def open(self) -> TraceStore:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            good = sum(_HEADER.size + len(payload) for payload in _payloads(self.path.read_bytes()))
            self.num_cut_bytes = self.path.stat().st_size - good
            if self.num_cut_bytes:
                with self.path.open("r+b") as file:
                    file.truncate(good)
        self._file = self.path.open("ab", buffering=0)
        return self

    def append(self, block: SpanBlock) -> None:
        """Write a block unless it is empty. Not synced to the disk: a killed process loses nothing, a power cut may."""
        if self._file is None:
            raise InternalError("the trace store is not open")
        if block:
            payload = self._encoder.encode(block)
            self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> TraceStore:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(run_dir: str | Path, *, last_bytes: int | None = None) -> Trace:
    """Read the spans and counter values of a run, which may still be running. A run without a trace has an empty one.

    Args:
        last_bytes: read only about so many bytes from the end of the file.
    """
    path = spans_path(run_dir)
    if not path.exists():
        return Trace()
    with path.open("rb") as file:
        if last_bytes is not None:
            _skip(file, path.stat().st_size - last_bytes)
        content = file.read()
    decoder = _span_block_decoder
    spans: list[Span] = []
    counts: list[Count] = []
    num_read = 0
    for payload in _payloads(content):
        block = decoder.decode(payload)
        spans += spans_of(block)
        counts += counts_of(block)
        num_read += _HEADER.size + len(payload)
    spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    counts.sort(key=lambda count: count.at_ns)
    return Trace(spans, counts, len(content) - num_read)


def read_spans(run_dir: str | Path, *, last_bytes: int | None = None) -> list[Span]:
    """Read the spans of a run, in order of start; see `read_trace`."""
    return read_trace(run_dir, last_bytes=last_bytes).spans


def read_stays(run_dir: str | Path, ids: Collection[int]) -> dict[int, list[Span]]:
    """Read the `sample`, `turn` and `tool` spans of these samples, in order of start; samples without any are left out."""
    path, found = spans_path(run_dir), dict[int, list[Span]]()
    for payload in _payloads(path.read_bytes()) if path.exists() and ids else ():
        block = _span_block_decoder.decode(payload)
        mine = [one for one in block.spans if one[0] in _STAYS and one[3].get("sample") in ids]
        for span in spans_of(msgspec.structs.replace(block, spans=mine)):
            found.setdefault(int(str(span.attributes["sample"])), []).append(span)
    return {packed: sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)) for packed, spans in found.items()}


_STAYS = frozenset({SpanName.SAMPLE}) | OF_EPISODES


def _skip(file: BinaryIO, num_bytes: int) -> None:
    """Seek past whole records of about so many bytes."""
    at = 0
    while at < num_bytes and len(header := file.read(_HEADER.size)) == _HEADER.size:
        at += _HEADER.size + int(_HEADER.unpack(header)[0])
        file.seek(at)


def to_otel(run_dir: str | Path, *, max_spans: int = 50_000) -> OtelExport:
    """Write `trace/otel.jsonl`: OpenTelemetry spans under one root span, the run.

    Attributes and the resource are named as `m2flow.observe.otel` says, and all is one trace. Of more than
    `max_spans` spans, decode steps and `sample` spans are thinned first and evenly, then the rest; the root span's attributes
    `m2flow.left_out.<name>` and the result say how many.
    """
    run_dir = Path(run_dir)
    spans, left_out = _thin(read_spans(run_dir), max_spans)
    path = run_dir / "trace" / "otel.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for otel_span in _otel_spans(run_dir.resolve().name, spans, left_out):
            file.write(otel_span.to_json(indent=None) + "\n")
    partial.replace(path)
    return OtelExport(len(spans), left_out)


def _otel_spans(run: str, spans: Sequence[Span], left_out: Mapping[str, int]) -> Iterator[ReadableSpan]:
    if not spans:
        return
    otel = OtelSpans(run, has_samples=False)
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    yield otel.run_span(start_ns, end_ns, {f"m2flow.left_out.{name}": number for name, number in left_out.items()})
    for position, span in enumerate(spans):
        yield from otel.of(span, str(position))


def _thin(spans: Sequence[Span], max_spans: int) -> tuple[list[Span], dict[str, int]]:
    """At most `max_spans` of the spans, in their order, and how many of each name were left out."""
    positions: defaultdict[bool, list[int]] = defaultdict(list)
    for position, span in enumerate(spans):
        positions[span.name in _THINNED_FIRST].append(position)
    kept = _evenly(positions[False], max_spans)
    kept += _evenly(positions[True], max_spans - len(kept))
    result = [spans[position] for position in sorted(kept)]
    left_out = Counter(span.name for span in spans)
    left_out.subtract(Counter(span.name for span in result))
    return result, {name: number for name, number in sorted(left_out.items()) if number}


def _evenly(positions: list[int], number: int) -> list[int]:
    if len(positions) <= number:
        return positions
    return [positions[i * len(positions) // number] for i in range(number)]


def _payloads(content: bytes) -> Iterator[bytes]:
    return (payload for _, payload in records_in(content))


def records_in(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the end and the payload of each whole record, up to the first that is cut or damaged."""
    at = 0
    while at + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, at)
        payload = content[at + _HEADER.size : at + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        at += _HEADER.size + length
        yield at, payload


def spans_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / "trace" / "spans.msgpack"


IntArray = npt.NDArray[np.int64]

_NUMBERS = ("call", "step", "version", "num_samples", "num_tokens")
FIELDS = ("start", "end", "worker", "engine", "name", "label", "site", *_NUMBERS, "sample", "end_of_block", "position")
"""Times in Unix ns; `worker`, `engine`, `name`, `label` and `site` are positions in lists of texts; -1 where there is none."""
_MOST = (1 << 63) - 1


@final
class Names:
    """Number texts in the order in which they come."""

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
class CounterColumn(msgspec.Struct):
    """A counter's values, in the order in which they were recorded."""

    track: str
    name: str
    at_ns: list[int]
    values: list[float]


@final
class TraceColumns:
    """Follow a run's trace file as columns; for one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = spans_path(run_dir)
        self._decoder = _span_block_decoder
        self.generation = 0
        """Increases when what was read is no longer valid, because the file was truncated or replaced."""
        self._forget()

    def _forget(self) -> None:
        self.num_read_bytes = 0
        self.num_bytes = 0
        """Size of the file at the last `refresh`."""
        self.num_spans = 0
        self.workers, self.engines, self.names, self.labels, self.sites = Names(), Names(), Names(), Names(), Names()
        self.counters: dict[tuple[str, str], CounterColumn] = {}
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
        """Read new whole records, up to about so many bytes. Returns whether there were any."""
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
        """Read one span with all its attributes from the file."""
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
            counter = self.counters.setdefault((count.track, count.name), CounterColumn(count.track, count.name, [], []))
            counter.at_ns.append(count.at_ns)
            counter.values.append(count.value)
