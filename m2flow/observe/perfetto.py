"""Export a run's trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

    run directory --write_trace--> FILE.pftrace              Perfetto's own packets (`write_packets`)
                               --> FILE.json, .json.gz       the Trace Event Format (`write_json`), for both viewers

Both formats show the same (`TraceLayout`): a group of tracks for each worker, named with its devices; in it a track for each engine with
a slice for each span; samples as asynchronous slices, with the turns and tool calls of episodes in them; counters; an instant for each
version of the weights; and for each sample arrows from its generation to the reward, to the micro-batch that trained on it, and to the
optimiser step that the micro-batch went into.

Slices of a thread must nest: spans of one engine that overlap without nesting (two threads recorded them) go to further threads. A
sample's arrows lead from its last `sample` span to each function call and micro-batch that names it in its `samples`, in order of their
starts. What began before that span was over, by more than the clocks' error, is not linked. Times are relative to the first span.

Trace Event Format, as the Catapult project describes it: a process for each worker, a thread for each engine. Arrows bind to slices of
threads only, so one starts at the decode step that was running at the sample's end; a sample without such a step has none, and
`otherData` counts it.

Perfetto's packets: a track for each worker, under it one for each engine, one for each counter, and as many called `samples` as samples
ran there at once; Perfetto lays tracks of one name under one parent out as one group. An arrow is a number that its slices share, so it
begins at the sample's own slice. Texts that repeat are written once and then named by a number, and packets are compressed some thousand
at a time: a million spans take some 20 MB. Messages are those of Perfetto's own package, which is loaded when this format is asked for.
Source: protos/perfetto/trace/track_event/ (track_descriptor.proto, track_event.proto, debug_annotation.proto), interned_data.proto,
trace_packet.proto (compressed_packets).
"""

from __future__ import annotations

import bisect
import gzip
import heapq
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast, final

import msgspec

from m2flow.observe.spans import OF_EPISODES, Span, SpanName, sample_of, samples_of, shown_name
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
        self._parts: defaultdict[tuple[str, int | None], list[Span]] = defaultdict(list)
        for span in trace.spans:
            if span.name in OF_EPISODES:
                self._parts[span.lane[0], sample_of(span)].append(span)
        others = (span for span in trace.spans if span.name != SpanName.SAMPLE and span.name not in OF_EPISODES)
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

    def parts_of(self, stay: Span) -> Iterator[tuple[int, Span]]:
        """The turns and tool calls in a `sample` span, cut at its ends, with the row of each: those of a row follow each other."""
        ends: list[int] = []
        for span in self._parts.get((stay.lane[0], sample_of(stay)), ()):
            start, end = max(span.start_ns, stay.start_ns), min(span.end_ns, stay.end_ns)
            if start < end:
                row = next((at for at, last in enumerate(ends) if last <= start), len(ends))
                ends[row:] = [end, *ends[row + 1 :]]
                yield row, Span(span.track, span.name, start, end, span.attributes)

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
        for row, part in layout.parts_of(span):  # Of one id they nest, so calls side by side have another.
            named = {**head, "name": shown_name(part), "id": f"{hex(number)}.{row}" if row else hex(number)}
            yield {"ph": "b", **named, "ts": microseconds(part.start_ns), "args": span_args(part)}
            yield {"ph": "e", **named, "ts": microseconds(part.end_ns)}
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


Interned = Literal["event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values"]
"""The kinds of texts that are written once and then named by a number: fields of Perfetto's `InternedData`."""


@final
class _Packets:
    """Build Perfetto's packets and serialise them, some thousand at a time: as messages they take twenty times the memory of their bytes.

    Tracks are numbered by key as they are asked for, and described before all events.
    """

    def __init__(self) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # 12 MB and a tenth of a second, for this format alone.

        self._proto: Any = perfetto_trace_pb2
        self._building = self._proto.Trace()
        self._described = self._proto.Trace()
        self._serialised: list[bytes] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._interned: dict[tuple[str, str], int] = {}
        """Kind and text -> its number."""
        self._packet: Any = None
        """The packet of the last event."""

    def track(self, *key: object, name: str, parent: int = 0, is_counter: bool = False) -> int:
        """Return the number of the track of this key, which is described when it is new."""
        if key in self._known:
            return self._known[key]
        number = self._known[key] = len(self._known) + 1
        packet = self._described.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        told = packet.track_descriptor
        told.uuid, told.name, told.sibling_order_rank = number, name, number
        if parent:
            told.parent_uuid = parent
        else:
            told.child_ordering = self._proto.TrackDescriptor.EXPLICIT
        if is_counter:
            told.counter.SetInParent()
        return number

    def event(self, kind: Literal["SLICE_BEGIN", "SLICE_END", "INSTANT", "COUNTER"], at_ns: int, track: int) -> Any:
        """Add an event, and return it, to be completed before the next one is added."""
        if len(self._building.packet) >= _PACKETS_AT_ONCE:
            self._serialise()
        flags = _NEEDS_NUMBERS if self._packet is not None else _NEEDS_NUMBERS | _BEGINS_NUMBERS
        self._packet = self._building.packet.add(timestamp=at_ns, trusted_packet_sequence_id=_SEQUENCE, sequence_flags=flags)
        event = self._packet.track_event
        event.type, event.track_uuid = getattr(self._proto.TrackEvent, f"TYPE_{kind}"), track
        return event

    def number_of(self, kind: Interned, text: str) -> int:
        """The number of a text that repeats; the packet of the last event tells it when it is new."""
        number = self._interned.get((kind, text))
        if number is None:
            number = self._interned[kind, text] = len(self._interned) + 1
            told = getattr(self._packet.interned_data, kind).add(iid=number)
            if kind == "debug_annotation_string_values":
                told.str = text.encode("utf-8", "replace")
            else:
                told.name = text
        return number

    def name(self, event: Any, text: str, category: str) -> None:
        """Name an event, and its category."""
        event.name_iid = self.number_of("event_names", text)
        event.category_iids.append(self.number_of("event_categories", category))

    def write(self, file: IO[bytes]) -> None:
        self._serialise()
        file.write(self._described.SerializeToString())
        file.writelines(self._serialised)

    def _serialise(self) -> None:
        packed = zlib.compress(self._building.SerializeToString(), _LEVEL)
        self._serialised.append(self._proto.Trace(packet=[self._proto.TracePacket(compressed_packets=packed)]).SerializeToString())
        self._building.Clear()


_SEQUENCE = 1
_PACKETS_AT_ONCE = 4096
_BEGINS_NUMBERS, _NEEDS_NUMBERS = 1, 2
"""Flags of a sequence's packets: numbers of texts begin anew, or are needed to read the packet."""
_LEVEL = 5
"""Level of zlib: one higher saves 2% and takes twice the time."""


def write_packets(layout: TraceLayout, file: IO[bytes]) -> None:
    """Write the layout as Perfetto's packets."""
    packets = _Packets()
    workers = {pid: packets.track("worker", pid, name=layout.titles[worker]) for worker, pid in layout.pids.items()}
    tracks = {(pid, tid): packets.track("thread", pid, tid, name=name, parent=workers[pid]) for (pid, tid), name in layout.threads.items()}
    passing, begun = _flows(layout)
    _add_slices(packets, layout, tracks, passing)
    for version, piece in layout.versions:
        event = packets.event("INSTANT", piece.span.end_ns - layout.origin_ns, tracks[piece.pid, piece.tid])
        packets.name(event, f"weights v{version}", "version")
    _add_samples(packets, layout, workers, begun)
    for count in layout.trace.counts:
        if math.isfinite(count.value):
            pid = layout.pids[count.track.partition("/")[0]]
            track = packets.track("counter", count.track, count.name, name=count.name, parent=workers[pid], is_counter=True)
            packets.event("COUNTER", count.at_ns - layout.origin_ns, track).double_counter_value = count.value
    packets.write(file)


def _add_slices(
    packets: _Packets, layout: TraceLayout, tracks: Mapping[tuple[int, int], int], passing: Mapping[_Key, Sequence[tuple[int, bool]]]
) -> None:
    """Add the slices of threads: on each track, begins and ends in the order in which they nest."""
    stacks: defaultdict[int, list[int]] = defaultdict(list)
    for piece in layout.slices:
        track, stack = tracks[piece.pid, piece.tid], stacks[tracks[piece.pid, piece.tid]]
        while stack and stack[-1] <= piece.span.start_ns:
            packets.event("SLICE_END", stack.pop() - layout.origin_ns, track)
        event = _begin(packets, layout, piece.span, track)
        for number, is_last in passing.get(_key(piece), ()):
            (event.terminating_flow_ids if is_last else event.flow_ids).append(number)
        stack.append(piece.span.end_ns)
    for track, stack in stacks.items():
        while stack:
            packets.event("SLICE_END", stack.pop() - layout.origin_ns, track)


def _add_samples(packets: _Packets, layout: TraceLayout, workers: Mapping[int, int], begun: Mapping[int, int]) -> None:
    """Add the samples of each worker on as few tracks as hold them side by side."""
    busy: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for span in sorted(layout.sample_spans, key=lambda span: span.start_ns):
        pid = layout.pids[span.lane[0]]
        rows = busy[pid]  # A heap of when each row is free again.
        if rows and rows[0][0] <= span.start_ns:
            row = heapq.heapreplace(rows, (span.end_ns, rows[0][1]))[1]
        else:
            row = len(rows)
            heapq.heappush(rows, (span.end_ns, row))
        track = packets.track("sample_span", pid, row, name="samples", parent=workers[pid])
        event = _begin(packets, layout, span, track)
        if id(span) in begun:
            event.flow_ids.append(begun[id(span)])
        for beside, part in layout.parts_of(span):
            key = ("sample_span", pid, row) if not beside else ("beside", pid, row, beside)
            of_part = packets.track(*key, name="samples", parent=workers[pid])
            _begin(packets, layout, part, of_part)
            packets.event("SLICE_END", part.end_ns - layout.origin_ns, of_part)
        packets.event("SLICE_END", span.end_ns - layout.origin_ns, track)


_Key = tuple[int, int, int]


def _flows(layout: TraceLayout) -> tuple[dict[_Key, list[tuple[int, bool]]], dict[int, int]]:
    """Number the arrows: those that pass each slice, and whether they end there; and the one that begins at each `sample` span."""
    passing: defaultdict[_Key, list[tuple[int, bool]]] = defaultdict(list)
    begun: dict[int, int] = {}
    for number, chain in enumerate(layout.arrows, start=1):
        begun[id(chain.sample_span)] = number
        for piece in chain.then:
            passing[_key(piece)].append((number, piece is chain.then[-1]))
    return passing, begun


def _key(piece: Slice) -> _Key:
    """Its place and its span, which can't be hashed: it has a dictionary."""
    return piece.pid, piece.tid, id(piece.span)


def _begin(packets: _Packets, layout: TraceLayout, span: Span, track: int) -> Any:
    """Add the beginning of a span, with its attributes that are one number or one text; lists of samples are shown as arrows."""
    event = packets.event("SLICE_BEGIN", span.start_ns - layout.origin_ns, track)
    packets.name(event, shown_name(span), span.name)
    for key, value in span_args(span).items():
        if not isinstance(value, bool | int | float | str):
            continue
        one = event.debug_annotations.add(name_iid=packets.number_of("debug_annotation_names", key))
        if isinstance(value, bool):
            one.bool_value = value
        elif isinstance(value, int):
            setattr(one, "int_value" if value < 1 << 63 else "uint_value", value)
        elif isinstance(value, float):
            one.double_value = value
        elif key == "sample":
            one.string_value = value  # Each is there once or twice.
        else:
            one.string_value_iid = packets.number_of("debug_annotation_string_values", value)
    return event


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
