"""Export a run's trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

    run directory --write_trace--> FILE.pftrace              Perfetto's own packets (`write_packets`)
                               --> FILE.json, .json.gz       the Trace Event Format (`write_json`), for both viewers

Both formats show the same (`TraceLayout`): a group of tracks for each worker, named with its devices; in it a track for each engine with
a slice for each span; samples as asynchronous slices; counters; an instant for each version of the weights; and for each sample arrows
from its generation to the reward, to the micro-batch that trained on it, and to the optimiser step that the micro-batch went into.

Slices of a thread must nest: spans of one engine that overlap without nesting (two threads recorded them) go to further threads. A
sample's arrows lead from its last `sample` span to each function call and micro-batch that names it in its `samples`, in order of their
starts. What began before that span was over, by more than the clocks' error, is not linked. Times are relative to the first span.

Trace Event Format, as the Catapult project describes it: a process for each worker, a thread for each engine. Arrows bind to slices of
threads only, so one starts at the decode step that was running at the sample's end; a sample without such a step has none, and
`otherData` counts it.

Perfetto's packets: a track for each worker, under it one for each engine, one for each counter, and as many called `samples` as samples
ran there at once; Perfetto lays tracks of one name under one parent out as one group. An arrow is a number that its slices share, so it
begins at the sample's own slice. The few messages needed are encoded here by the rules of protocol buffers, in 30 lines: every run writes
its trace, so Perfetto's package, which brings protobuf and 12 MB of memory, would be part of every installation. The tests decode the
output with it. Source: protos/perfetto/trace/track_event/ (track_descriptor.proto,
track_event.proto, debug_annotation.proto), field numbers as of version 50, which never change.
"""

from __future__ import annotations

import bisect
import gzip
import heapq
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast, final

import msgspec

from m2flow.observe.spans import Span, SpanName, sample_of, samples_of
from m2flow.observe.store import Trace, read_trace
from m2flow.samples import SampleId

STEPS = "flow"
"""The worker whose thread shows the steps."""
_CLOCK_ERROR_NS = 1_000_000
"""By how much an effect may seem to come before its cause."""
_ENGINE_ORDER = ("rollout", "function", "train")
_ENGINES_OF_ROLES = ("rollout", "train")


class Slice(NamedTuple):
    """A span on the thread it is drawn on."""

    span: Span
    pid: int
    tid: int


@dataclass(frozen=True)
class SampleArrows:
    """The arrows of one sample: from its generation to what was done with it."""

    sample: int
    sample_span: Span
    then: list[Slice]
    """The slices that worked on it, in order; at least one."""


@final
class TraceLayout:
    """The processes, threads, slices, counters and arrows of one run, for both formats."""

    def __init__(self, trace: Trace, devices: Mapping[str, str]) -> None:
        self.trace = trace
        self.workers = sorted({span.lane[0] for span in trace.spans} | {count.track.partition("/")[0] for count in trace.counts})
        steps = _step_spans(trace.spans)
        self.pids = {**({STEPS: 1} if steps else {}), **{worker: pid for pid, worker in enumerate(self.workers, start=2)}}
        self.titles = {worker: f"{worker} ({devices[worker]})" if devices.get(worker) else worker for worker in self.pids}
        self.sample_spans = [span for span in trace.spans if span.name == SpanName.SAMPLE]
        others = (span for span in trace.spans if span.name != SpanName.SAMPLE)
        self.threads: dict[tuple[int, int], str] = {}
        """The name of each thread, by pid and tid: its engine, with the role where a worker has several engines of that kind."""
        self.slices = [*self._threads(steps), *self._threads(others)]
        """In the order in which those of each thread begin, an outer one before those in it."""
        self.versions = list(_versions(self.slices))
        """The slices that made each version of a role's weights available: published, or loaded by an engine of the trainer's process."""
        self.origin_ns = min([*(span.start_ns for span in trace.spans), *(count.at_ns for count in trace.counts)], default=0)
        self.num_left_out = 0
        """Samples of function calls and micro-batches whose `sample` span is not known, or was not over."""
        self.arrows = list(self._arrows())

    @property
    def num_arrows(self) -> int:
        return sum(len(chain.then) for chain in self.arrows)

    def _threads(self, spans: Iterable[Span]) -> Iterator[Slice]:
        """Give every span a thread of its worker, so that the spans of a thread nest; `tid` is 10,000 x engine + overflow."""
        lanes: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in spans:
            lanes[span.lane].append(span)
        engines: defaultdict[str, dict[tuple[str, str], list[Span]]] = defaultdict(dict)
        for (worker, engine), lane in lanes.items():
            for role, mine in _by_role(engine, lane).items():
                engines[worker][engine, role] = mine
        for worker, parts in sorted(engines.items()):
            for number, (engine, role) in enumerate(sorted(parts, key=lambda part: (_engine_rank(part[0]), part[1])), start=1):
                stacks: list[list[int]] = []
                for span in sorted(parts[engine, role], key=lambda span: (span.start_ns, -span.end_ns)):
                    for thread, stack in enumerate(stacks):  # noqa: B007
                        while stack and stack[-1] <= span.start_ns:
                            stack.pop()
                        if not stack or span.end_ns <= stack[-1]:
                            break
                    else:
                        thread = len(stacks)
                        stacks.append([])
                        name = f"{engine} {role}".rstrip()
                        self.threads[self.pids[worker], 10_000 * number + thread] = f"{name} +{thread}" if thread else name
                    stacks[thread].append(span.end_ns)
                    yield Slice(span, self.pids[worker], 10_000 * number + thread)

    def _arrows(self) -> Iterator[SampleArrows]:
        ends = {sample: span for span in sorted(self.sample_spans, key=lambda span: span.end_ns) if (sample := sample_of(span)) is not None}
        updates: defaultdict[tuple[int, object], list[Slice]] = defaultdict(list)
        for piece in self.slices:
            if piece.span.name == SpanName.TRAIN_APPLY:
                updates[piece.pid, piece.span.attributes.get("call")].append(piece)
        starts = {key: [piece.span.start_ns for piece in pieces] for key, pieces in updates.items()}
        found: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in self.slices:
            update = None
            if piece.span.name == SpanName.TRAIN_ACCUMULATE:
                key = piece.pid, piece.span.attributes.get("call")
                at = bisect.bisect_left(starts.get(key, []), piece.span.end_ns)
                update = updates[key][at] if at < len(updates[key]) else None
            for sample in samples_of(piece.span):
                sample_span = ends.get(sample)
                if sample_span is None or piece.span.start_ns < sample_span.end_ns - _CLOCK_ERROR_NS:
                    self.num_left_out += 1
                    continue
                mine = found[sample]
                mine.append(piece)
                if update is not None and update not in mine:
                    mine.append(update)
        for sample, pieces in found.items():
            yield SampleArrows(sample, ends[sample], sorted(pieces, key=lambda piece: piece.span.start_ns))


def span_args(span: Span) -> dict[str, object]:
    """A span's attributes as a viewer shows them, with a sample's identity as text."""
    args: dict[str, object] = dict(span.attributes)
    sample = sample_of(span)
    if sample is not None:
        args["sample"] = str(SampleId.unpack(sample))
    return args


def _by_role(engine: str, lane: Sequence[Span]) -> dict[str, list[Span]]:
    """Split the spans of an engine by role; all together where there is one role, or where this kind of engine has none."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in lane:
        label = span.attributes.get("label") if engine in _ENGINES_OF_ROLES else ""
        found[label.partition(".")[0] if isinstance(label, str) else ""].append(span)
    return found if len(found.keys() - {""}) > 1 else {"": list(lane)}


def _versions(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice]]:
    """The slices that made each version available, as in `RunTrace.versions`: of a role that publishes nothing, the first loads."""
    found: dict[SpanName, dict[tuple[object, int], Slice]] = {SpanName.WEIGHTS_PUBLISH: {}, SpanName.WEIGHTS_LOAD: {}}
    for piece in slices:
        version, first = piece.span.attributes.get("version"), found.get(piece.span.name)  # type: ignore[call-overload]
        if first is None or not isinstance(version, int):
            continue
        key = piece.span.attributes.get("label"), version
        if key not in first or piece.span.end_ns < first[key].span.end_ns:
            first[key] = piece
    published = {role for role, _ in found[SpanName.WEIGHTS_PUBLISH]}
    for pieces in found.values():
        for (role, version), piece in pieces.items():
            if role not in published or piece.span.name == SpanName.WEIGHTS_PUBLISH:
                yield version, piece


def _step_spans(spans: Iterable[Span]) -> list[Span]:
    """Make a span for each step, from the first start to the last end of its spans. Work outside the flow's loop has no step."""
    found: dict[int, tuple[int, int]] = {}
    for span in spans:
        step = span.attributes.get("step")
        if isinstance(step, int) and step >= 0:
            start, end = found.get(step, (span.start_ns, span.end_ns))
            found[step] = (min(start, span.start_ns), max(end, span.end_ns))
    return [Span(f"{STEPS}/steps", f"step {step}", start, end, {"step": step}) for step, (start, end) in sorted(found.items())]


def _engine_rank(engine: str) -> tuple[int, str]:
    return (_ENGINE_ORDER.index(engine) if engine in _ENGINE_ORDER else len(_ENGINE_ORDER)), engine


Event = dict[str, Any]
"""One trace event; its keys are the format's."""


def write_json(layout: TraceLayout, file: IO[bytes]) -> None:
    """Write the layout in the Trace Event Format."""
    other: dict[str, object] = {"start_unix_ns": str(layout.origin_ns), "lost_bytes": layout.trace.num_lost_bytes}
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = b""
    for event in _events(layout, other):
        file.write(separator + msgspec.json.encode(event))
        separator = b",\n"
    file.write(b'\n],"otherData":' + msgspec.json.encode(other) + b"}\n")


def _events(layout: TraceLayout, other: dict[str, object]) -> Iterator[Event]:
    yield from _names(layout)

    def microseconds(at_ns: int) -> float:
        return (at_ns - layout.origin_ns) / 1000

    for span, pid, tid in layout.slices:
        args = span_args(span)
        times = {"ts": microseconds(span.start_ns), "dur": (span.end_ns - span.start_ns) / 1000}
        yield {"ph": "X", "name": span.name, "cat": span.name, "pid": pid, "tid": tid, **times, "args": args}
    for version, (span, pid, tid) in layout.versions:
        end = microseconds(span.end_ns)
        yield {"ph": "i", "name": f"weights v{version}", "cat": "version", "pid": pid, "tid": tid, "ts": end, "s": "g"}
    for number, span in enumerate(layout.sample_spans, start=1):
        # One name for all, so that viewers pack them; an id for each, so that a sample that ran twice is two slices.
        head = {"name": "sample", "cat": "sample", "id": hex(number), "pid": layout.pids[span.lane[0]], "tid": 0}
        yield {"ph": "b", **head, "ts": microseconds(span.start_ns), "args": span_args(span)}
        yield {"ph": "e", **head, "ts": microseconds(span.end_ns)}
    for count in layout.trace.counts:
        if math.isfinite(count.value):
            pid = layout.pids[count.track.partition("/")[0]]
            yield {"ph": "C", "name": count.name, "pid": pid, "ts": microseconds(count.at_ns), "args": {"value": count.value}}
    steps = _DecodeSteps(layout)
    num_arrows, num_left_out = 0, layout.num_left_out
    for number, chain in enumerate(layout.arrows, start=1):
        found = steps.last_of(chain)
        if found is None:
            num_left_out += len(chain.then)
            continue
        num_arrows += len(chain.then)
        source, at_ns = found
        head = {"name": "sample", "cat": "flow", "id": number}
        yield {"ph": "s", **head, "pid": source.pid, "tid": source.tid, "ts": microseconds(at_ns)}
        for at, target in enumerate(chain.then, start=1):
            kind = "f" if at == len(chain.then) else "t"
            # Inside the slice: chrome://tracing binds an arrow at its very start to a slice that ends there.
            at_ns = max(at_ns, min(target.span.start_ns + 1, target.span.end_ns))
            yield {"ph": kind, "bp": "e", **head, "pid": target.pid, "tid": target.tid, "ts": microseconds(at_ns)}
    other |= {"arrows": num_arrows, "arrows_left_out": num_left_out}


def _names(layout: TraceLayout) -> Iterator[Event]:
    for worker, pid in layout.pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": layout.titles[worker]}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    for (pid, tid), name in layout.threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}}


@final
class _DecodeSteps:
    """The decode step in which a sample ended, and a moment inside it."""

    def __init__(self, layout: TraceLayout) -> None:
        self._pids = layout.pids
        self._steps: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in layout.slices:
            if piece.span.lane[1] == "rollout" and piece.span.name.startswith("rollout."):
                self._steps[piece.pid].append(piece)
        for pieces in self._steps.values():
            pieces.sort(key=lambda piece: piece.span.start_ns)
        self._starts = {pid: [piece.span.start_ns for piece in pieces] for pid, pieces in self._steps.items()}

    def last_of(self, chain: SampleArrows) -> tuple[Slice, int] | None:
        pid, end_ns = self._pids[chain.sample_span.lane[0]], chain.sample_span.end_ns
        position = bisect.bisect_left(self._starts.get(pid, []), end_ns) - 1
        if position < 0:
            return None
        source = self._steps[pid][position]
        # Inside the slice: an arrow at its very end would bind to the next one.
        at_ns = min(end_ns, source.span.end_ns - 1, chain.then[0].span.start_ns)
        return source, max(source.span.start_ns, at_ns)


_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
_EXPLICIT = 3


def write_packets(layout: TraceLayout, file: IO[bytes]) -> None:
    """Write the layout as Perfetto's packets."""
    numbers = _Tracks()
    body = b"".join(_packet_events(layout, numbers))  # Numbers the tracks, which have to be described first.
    for parent, name, uuid, more in numbers.described:
        place = (_varint(5, parent) if parent else b"") + _varint(12, uuid)
        file.write(_packet(_message(60, _varint(1, uuid) + place + _text(2, name) + more)))
    file.write(body)


class _Tracks:
    """Number tracks by key, as they are asked for, and collect their descriptors."""

    def __init__(self) -> None:
        self.described: list[tuple[int, str, int, bytes]] = []
        """Parent, name, number, further fields."""
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, *key: object, name: str, parent: int = 0, more: bytes = b"") -> int:
        if key not in self._known:
            self._known[key] = len(self._known) + 1
            self.described.append((parent, name, self._known[key], more))
        return self._known[key]


def _packet_events(layout: TraceLayout, numbers: _Tracks) -> Iterator[bytes]:
    root = _varint(11, _EXPLICIT)
    workers = {pid: numbers.of("worker", pid, name=layout.titles[worker], more=root) for worker, pid in layout.pids.items()}
    flows, sample_flows = _flows(layout)
    tracks = {(pid, tid): numbers.of("thread", pid, tid, name=name, parent=workers[pid]) for (pid, tid), name in layout.threads.items()}
    stacks: defaultdict[int, list[int]] = defaultdict(list)
    for piece in layout.slices:
        track, stack = tracks[piece.pid, piece.tid], stacks[tracks[piece.pid, piece.tid]]
        while stack and stack[-1] <= piece.span.start_ns:
            yield _event(layout, stack.pop(), _END, track)
        yield _event(layout, piece.span.start_ns, _BEGIN, track, _named(piece.span) + flows.get(_key(piece), b""))
        stack.append(piece.span.end_ns)
    for track, stack in stacks.items():
        while stack:
            yield _event(layout, stack.pop(), _END, track)
    for version, piece in layout.versions:
        track = tracks[piece.pid, piece.tid]
        yield _event(layout, piece.span.end_ns, _INSTANT, track, _text(22, "version") + _text(23, f"weights v{version}"))
    busy: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for span in sorted(layout.sample_spans, key=lambda span: span.start_ns):
        pid = layout.pids[span.lane[0]]
        rows = busy[pid]  # A heap of when each row is free again.
        if rows and rows[0][0] <= span.start_ns:
            row = heapq.heapreplace(rows, (span.end_ns, rows[0][1]))[1]
        else:
            row = len(rows)
            heapq.heappush(rows, (span.end_ns, row))
        track = numbers.of("sample_span", pid, row, name="samples", parent=workers[pid])
        yield _event(layout, span.start_ns, _BEGIN, track, _named(span) + sample_flows.get(id(span), b""))
        yield _event(layout, span.end_ns, _END, track)
    for count in layout.trace.counts:
        if math.isfinite(count.value):
            pid = layout.pids[count.track.partition("/")[0]]
            track = numbers.of("counter", count.track, count.name, name=count.name, parent=workers[pid], more=_message(8, b""))
            yield _event(layout, count.at_ns, _COUNTER, track, _double(44, count.value))


def _flows(layout: TraceLayout) -> tuple[dict[tuple[int, int, int], bytes], dict[int, bytes]]:
    """Encode the numbers of the arrows that pass each slice, and of the one that begins at each `sample` span; the last slice ends it."""
    passing: defaultdict[tuple[int, int, int], bytes] = defaultdict(bytes)
    begun: dict[int, bytes] = {}
    for number, chain in enumerate(layout.arrows, start=1):
        begun[id(chain.sample_span)] = _fixed64(47, number)
        for piece in chain.then:
            passing[_key(piece)] += _fixed64(48 if piece is chain.then[-1] else 47, number)
    return passing, begun


def _key(piece: Slice) -> tuple[int, int, int]:
    """Its place and its span, which can't be hashed: it has a dictionary."""
    return piece.pid, piece.tid, id(piece.span)


def _event(layout: TraceLayout, at_ns: int, kind: int, track: int, more: bytes = b"") -> bytes:
    return _packet(_varint(8, at_ns - layout.origin_ns) + _message(11, _varint(9, kind) + _varint(11, track) + more))


def _named(span: Span) -> bytes:
    return _text(22, span.name) + _text(23, span.name) + b"".join(_annotations(span_args(span)))


def _annotations(args: Mapping[str, object]) -> Iterator[bytes]:
    """Encode attributes that are one number or one text; lists of samples are shown as arrows."""
    for key, value in args.items():
        if isinstance(value, bool):
            yield _message(4, _text(10, key) + _varint(2, int(value)))
        elif isinstance(value, int):
            yield _message(4, _text(10, key) + _varint(4, value))
        elif isinstance(value, float):
            yield _message(4, _text(10, key) + _double(5, value))
        elif isinstance(value, str):
            yield _message(4, _text(10, key) + _text(6, value))


def _packet(body: bytes) -> bytes:
    return _message(1, body + _varint(10, _SEQUENCE))


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1  # Negative numbers are written as their two's complement.
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _fixed64(field: int, value: int) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<Q", value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _message(field: int, body: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(body)) + body


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


PACKETS = (".pftrace", ".perfetto-trace")


def write_trace(run_dir: str | Path, path: str | Path, *, devices: Mapping[str, str] | None = None) -> None:
    """Write the run's trace to `path`, in the format that its name asks for; one that ends in `.gz` is compressed.

    Args:
        devices: worker -> its devices, which are shown with the worker's name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    layout = TraceLayout(read_trace(run_dir), devices or {})
    write = write_packets if Path(path.name.removesuffix(".gz")).suffix in PACKETS else write_json
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
                write(layout, cast(IO[bytes], file))
        else:
            write(layout, raw)
    partial.replace(path)
