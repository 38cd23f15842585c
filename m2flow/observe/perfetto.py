"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing, as JSON.

A process for each worker, a thread for each engine in it, a slice for each span; the samples' lives as asynchronous slices, which
viewers pack into few rows; counters; an instant for each version of the weights; and arrows from the decode step in which a sample
ended to the function call that scored it and the micro-batch that trained on it, where those name their `samples`.

Slices of a thread must nest. Spans of one engine that overlap without nesting (two threads recorded them) go to further threads.

Source: the Trace Event Format, as the Catapult project describes it. Arrows bind to slices of threads only, so one starts at the
decode step that was running at the sample's end; a sample without such a step has none, and `otherData` counts it.
"""

from __future__ import annotations

import bisect
import gzip
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from m2flow.observe.spans import Span, SpanName, sample_of, samples_of
from m2flow.observe.store import Trace, read_trace
from m2flow.samples import SampleId

Event = dict[str, Any]
"""One trace event; its keys are the format's."""

_CLOCK_ERROR_NS = 1_000_000
"""By how much an effect may seem to come before its cause."""
_ENGINE_ORDER = ("rollout", "function", "train")


class Slice(NamedTuple):
    """A span on the thread it is drawn on."""

    span: Span
    pid: int
    tid: int


def write_trace(run_dir: str | Path, path: str | Path) -> None:
    """Write the run's trace to `path`; a name that ends in `.gz` is compressed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
                _write(read_trace(run_dir), cast(IO[bytes], file))
        else:
            _write(read_trace(run_dir), raw)
    partial.replace(path)


def _write(trace: Trace, file: IO[bytes]) -> None:
    origin_ns = min([*(span.start_ns for span in trace.spans), *(count.at_ns for count in trace.counts)], default=0)
    other: dict[str, object] = {"start_unix_ns": str(origin_ns), "lost_bytes": trace.num_lost_bytes}
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = b""
    for event in _events(trace, origin_ns, other):
        file.write(separator + msgspec.json.encode(event))
        separator = b",\n"
    file.write(b'\n],"otherData":' + msgspec.json.encode(other) + b"}\n")


def _events(trace: Trace, origin_ns: int, other: dict[str, object]) -> Iterator[Event]:
    workers = sorted({span.lane[0] for span in trace.spans} | {count.track.partition("/")[0] for count in trace.counts})
    pids = {worker: pid for pid, worker in enumerate(workers, start=2)}
    steps = _step_spans(trace.spans)
    slices = [*_threads(steps, {"flow": 1}), *_threads((span for span in trace.spans if span.name != SpanName.SAMPLE), pids)]
    yield from _names({"flow": 1, **pids} if steps else pids, slices)

    def microseconds(at_ns: int) -> float:
        return (at_ns - origin_ns) / 1000

    for span, pid, tid in slices:
        args = _args(span)
        start, end = microseconds(span.start_ns), microseconds(span.end_ns)
        yield {"ph": "X", "name": span.name, "cat": span.name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}
        if span.name == SpanName.WEIGHTS_PUBLISH and "version" in args:
            yield {"ph": "i", "name": f"weights v{args['version']}", "cat": "version", "pid": pid, "tid": tid, "ts": end, "s": "g"}
    lives = [span for span in trace.spans if span.name == SpanName.SAMPLE]
    for number, span in enumerate(lives, start=1):
        # One name for all, so that viewers pack them; an id for each, so that a sample that ran twice is two slices.
        head = {"name": "sample", "cat": "sample", "id": hex(number), "pid": pids[span.lane[0]], "tid": 0}
        yield {"ph": "b", **head, "ts": microseconds(span.start_ns), "args": _args(span)}
        yield {"ph": "e", **head, "ts": microseconds(span.end_ns)}
    for count in trace.counts:
        if math.isfinite(count.value):
            pid = pids[count.track.partition("/")[0]]
            yield {"ph": "C", "name": count.name, "pid": pid, "ts": microseconds(count.at_ns), "args": {"value": count.value}}
    num_arrows = num_missing = 0
    for arrow in _arrows(lives, slices):
        if arrow is None:
            num_missing += 1
            continue
        num_arrows += 1
        (source, at_ns), target = arrow
        head = {"name": "sample", "cat": "flow", "id": num_arrows}
        yield {"ph": "s", **head, "pid": source.pid, "tid": source.tid, "ts": microseconds(at_ns)}
        yield {"ph": "f", "bp": "e", **head, "pid": target.pid, "tid": target.tid, "ts": microseconds(target.span.start_ns)}
    other |= {"arrows": num_arrows, "arrows_left_out": num_missing}


def _threads(spans: Iterable[Span], pids: dict[str, int]) -> list[Slice]:
    """Give every span a thread of its worker, so that the spans of a thread nest; `tid` is 10,000 x engine + overflow."""
    lanes: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    slices = []
    for (worker, engine), lane in sorted(lanes.items()):
        engines = sorted({name for owner, name in lanes if owner == worker}, key=_engine_rank)
        first_tid = 10_000 * (engines.index(engine) + 1)
        stacks: list[list[int]] = []
        for span in sorted(lane, key=lambda span: (span.start_ns, -span.end_ns)):
            for thread, stack in enumerate(stacks):  # noqa: B007
                while stack and stack[-1] <= span.start_ns:
                    stack.pop()
                if not stack or span.end_ns <= stack[-1]:
                    break
            else:
                thread = len(stacks)
                stacks.append([])
            stacks[thread].append(span.end_ns)
            slices.append(Slice(span, pids[worker], first_tid + thread))
    return slices


def _names(pids: dict[str, int], slices: Iterable[Slice]) -> Iterator[Event]:
    for worker, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": worker}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    threads = {(pid, tid): span.lane[1] for span, pid, tid in slices}
    for (pid, tid), engine in sorted(threads.items()):
        name = engine if tid % 10_000 == 0 else f"{engine} +{tid % 10_000}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}}


def _arrows(lives: list[Span], slices: list[Slice]) -> Iterator[tuple[tuple[Slice, int], Slice] | None]:
    """For each sample of each consumer: (decode step, when the sample ended) and the consumer, or None if there is no such step."""
    steps: defaultdict[int, list[Slice]] = defaultdict(list)
    pids: dict[str, int] = {}
    for piece in slices:
        pids[piece.span.lane[0]] = piece.pid
        if piece.span.lane[1] == "rollout" and piece.span.name.startswith("rollout."):
            steps[piece.pid].append(piece)
    starts: dict[int, list[int]] = {}
    for pid, pieces in steps.items():
        pieces.sort(key=lambda piece: piece.span.start_ns)
        starts[pid] = [piece.span.start_ns for piece in pieces]
    ends = {sample: span for span in sorted(lives, key=lambda span: span.end_ns) if (sample := sample_of(span)) is not None}
    for target in slices:
        for sample in samples_of(target.span):
            life = ends.get(sample)
            pid = pids.get(life.lane[0], 0) if life else 0
            position = bisect.bisect_left(starts.get(pid, []), life.end_ns) - 1 if life else -1
            if life is None or position < 0 or target.span.start_ns < life.end_ns - _CLOCK_ERROR_NS:
                yield None
                continue
            source = steps[pid][position]
            # Inside the slice: an arrow at its very end would bind to the next one.
            at_ns = min(life.end_ns, source.span.end_ns - 1, target.span.start_ns)
            yield (source, max(source.span.start_ns, at_ns)), target


def _step_spans(spans: Iterable[Span]) -> list[Span]:
    """A span for each step, from the first start to the last end of what names it."""
    found: dict[int, tuple[int, int]] = {}
    for span in spans:
        step = span.attributes.get("step")
        if isinstance(step, int):
            start, end = found.get(step, (span.start_ns, span.end_ns))
            found[step] = (min(start, span.start_ns), max(end, span.end_ns))
    return [Span("flow/steps", f"step {step}", start, end, {"step": step}) for step, (start, end) in sorted(found.items())]


def _args(span: Span) -> dict[str, object]:
    args: dict[str, object] = dict(span.attributes)
    sample = sample_of(span)
    if sample is not None:
        args["sample"] = str(SampleId.unpack(sample))
    return args


def _engine_rank(engine: str) -> tuple[int, str]:
    return (_ENGINE_ORDER.index(engine) if engine in _ENGINE_ORDER else len(_ENGINE_ORDER)), engine
