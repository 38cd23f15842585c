"""A trace as JSON, for Perfetto and chrome://tracing.

    Drawn --write--> {"traceEvents": [...]}

A process for each worker, a thread for each engine in it. Lives are asynchronous slices, which viewers pack into few rows.

Source: the Trace Event Format, as the Catapult project describes it. Arrows bind to slices of threads only, so one starts at the
decode step that was running at the sample's end; a sample without such a step has none, and `otherData` counts it.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import IO, Any, final

import msgspec

from m2flow.observe.perfetto_tracks import Chain, Drawn, Slice, told

Event = dict[str, Any]
"""One trace event; its keys are the format's."""


def write(drawn: Drawn, file: IO[bytes]) -> None:
    """Write all of it."""
    other: dict[str, object] = {"start_unix_ns": str(drawn.origin_ns), "lost_bytes": drawn.trace.num_lost_bytes}
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = b""
    for event in _events(drawn, other):
        file.write(separator + msgspec.json.encode(event))
        separator = b",\n"
    file.write(b'\n],"otherData":' + msgspec.json.encode(other) + b"}\n")


def _events(drawn: Drawn, other: dict[str, object]) -> Iterator[Event]:
    yield from _names(drawn)

    def microseconds(at_ns: int) -> float:
        return (at_ns - drawn.origin_ns) / 1000

    for span, pid, tid in drawn.slices:
        args = told(span)
        times = {"ts": microseconds(span.start_ns), "dur": (span.end_ns - span.start_ns) / 1000}
        yield {"ph": "X", "name": span.name, "cat": span.name, "pid": pid, "tid": tid, **times, "args": args}
    for version, (span, pid, tid) in drawn.versions:
        end = microseconds(span.end_ns)
        yield {"ph": "i", "name": f"weights v{version}", "cat": "version", "pid": pid, "tid": tid, "ts": end, "s": "g"}
    for number, span in enumerate(drawn.lives, start=1):
        # One name for all, so that viewers pack them; an id for each, so that a sample that ran twice is two slices.
        head = {"name": "sample", "cat": "sample", "id": hex(number), "pid": drawn.pids[span.lane[0]], "tid": 0}
        yield {"ph": "b", **head, "ts": microseconds(span.start_ns), "args": told(span)}
        yield {"ph": "e", **head, "ts": microseconds(span.end_ns)}
    for count in drawn.trace.counts:
        if math.isfinite(count.value):
            pid = drawn.pids[count.track.partition("/")[0]]
            yield {"ph": "C", "name": count.name, "pid": pid, "ts": microseconds(count.at_ns), "args": {"value": count.value}}
    steps = _DecodeSteps(drawn)
    num_arrows, num_left_out = 0, drawn.num_left_out
    for number, chain in enumerate(drawn.chains, start=1):
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


def _names(drawn: Drawn) -> Iterator[Event]:
    for worker, pid in drawn.pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": drawn.titles[worker]}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    for (pid, tid), name in drawn.threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}}


@final
class _DecodeSteps:
    """The decode step in which a sample ended, and a moment inside it."""

    def __init__(self, drawn: Drawn) -> None:
        self._pids = drawn.pids
        self._steps: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in drawn.slices:
            if piece.span.lane[1] == "rollout" and piece.span.name.startswith("rollout."):
                self._steps[piece.pid].append(piece)
        for pieces in self._steps.values():
            pieces.sort(key=lambda piece: piece.span.start_ns)
        self._starts = {pid: [piece.span.start_ns for piece in pieces] for pid, pieces in self._steps.items()}

    def last_of(self, chain: Chain) -> tuple[Slice, int] | None:
        pid, end_ns = self._pids[chain.life.lane[0]], chain.life.end_ns
        position = bisect.bisect_left(self._starts.get(pid, []), end_ns) - 1
        if position < 0:
            return None
        source = self._steps[pid][position]
        # Inside the slice: an arrow at its very end would bind to the next one.
        at_ns = min(end_ns, source.span.end_ns - 1, chain.then[0].span.start_ns)
        return source, max(source.span.start_ns, at_ns)
