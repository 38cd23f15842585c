"""A trace as Perfetto's own packets, which ui.perfetto.dev and its trace processor read.

    Drawn --write--> TracePacket ... (descriptors of tracks, then their events)

A track for each worker, under it one for each engine, one for each counter, and as many called `samples` as samples ran there at once:
Perfetto lays tracks of one name under one parent out as one group. An arrow is a number that the slices on its way have in common, so it
begins at the sample's own life. Times are nanoseconds since the first span.

The few messages that are needed are encoded here, by the rules of protocol buffers: m2flow needs no package for it. The tests read what
comes out with Perfetto's.

Source: protos/perfetto/trace/track_event/ of the Perfetto project (track_descriptor.proto, track_event.proto, debug_annotation.proto),
field numbers as of version 50, which never change.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import IO

from m2flow.observe.perfetto_tracks import Drawn, Slice, told
from m2flow.observe.spans import Span

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
_EXPLICIT = 3


def write(drawn: Drawn, file: IO[bytes]) -> None:
    """Write all of it."""
    uuids = _Uuids()
    body = b"".join(_events(drawn, uuids))  # Names the tracks, which have to be described first.
    for parent, name, uuid, more in uuids.described:
        place = (_varint(5, parent) if parent else b"") + _varint(12, uuid)
        file.write(_packet(_message(60, _varint(1, uuid) + place + _text(2, name) + more)))
    file.write(body)


class _Uuids:
    """Tracks by what they are of, numbered as they are asked for."""

    def __init__(self) -> None:
        self.described: list[tuple[int, str, int, bytes]] = []
        """Parent, name, number, further fields."""
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, *key: object, name: str, parent: int = 0, more: bytes = b"") -> int:
        if key not in self._known:
            self._known[key] = len(self._known) + 1
            self.described.append((parent, name, self._known[key], more))
        return self._known[key]


def _events(drawn: Drawn, uuids: _Uuids) -> Iterator[bytes]:
    root = _varint(11, _EXPLICIT)
    workers = {pid: uuids.of("worker", pid, name=drawn.titles[worker], more=root) for worker, pid in drawn.pids.items()}
    flows, life_flows = _flows(drawn)
    tracks = {(pid, tid): uuids.of("thread", pid, tid, name=name, parent=workers[pid]) for (pid, tid), name in drawn.threads.items()}
    stacks: defaultdict[int, list[int]] = defaultdict(list)
    for piece in drawn.slices:
        track, stack = tracks[piece.pid, piece.tid], stacks[tracks[piece.pid, piece.tid]]
        while stack and stack[-1] <= piece.span.start_ns:
            yield _event(drawn, stack.pop(), _END, track)
        yield _event(drawn, piece.span.start_ns, _BEGIN, track, _named(piece.span) + flows.get(_key(piece), b""))
        stack.append(piece.span.end_ns)
    for track, stack in stacks.items():
        while stack:
            yield _event(drawn, stack.pop(), _END, track)
    for version, piece in drawn.versions:
        track = tracks[piece.pid, piece.tid]
        yield _event(drawn, piece.span.end_ns, _INSTANT, track, _text(22, "version") + _text(23, f"weights v{version}"))
    busy: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for span in sorted(drawn.lives, key=lambda span: span.start_ns):
        pid = drawn.pids[span.lane[0]]
        rows = busy[pid]  # A heap of when each row is free again.
        if rows and rows[0][0] <= span.start_ns:
            row = heapq.heapreplace(rows, (span.end_ns, rows[0][1]))[1]
        else:
            row = len(rows)
            heapq.heappush(rows, (span.end_ns, row))
        track = uuids.of("life", pid, row, name="samples", parent=workers[pid])
        yield _event(drawn, span.start_ns, _BEGIN, track, _named(span) + life_flows.get(id(span), b""))
        yield _event(drawn, span.end_ns, _END, track)
    for count in drawn.trace.counts:
        if math.isfinite(count.value):
            pid = drawn.pids[count.track.partition("/")[0]]
            track = uuids.of("counter", count.track, count.name, name=count.name, parent=workers[pid], more=_message(8, b""))
            yield _event(drawn, count.at_ns, _COUNTER, track, _double(44, count.value))


def _flows(drawn: Drawn) -> tuple[dict[tuple[int, int, int], bytes], dict[int, bytes]]:
    """The numbers of the arrows that pass a slice, and of the one that begins at a life; the last slice of a way ends it."""
    passing: defaultdict[tuple[int, int, int], bytes] = defaultdict(bytes)
    begun: dict[int, bytes] = {}
    for number, chain in enumerate(drawn.chains, start=1):
        begun[id(chain.life)] = _fixed64(47, number)
        for piece in chain.then:
            passing[_key(piece)] += _fixed64(48 if piece is chain.then[-1] else 47, number)
    return passing, begun


def _key(piece: Slice) -> tuple[int, int, int]:
    """Its place and its span, which can't be hashed: it has a dictionary."""
    return piece.pid, piece.tid, id(piece.span)


def _event(drawn: Drawn, at_ns: int, kind: int, track: int, more: bytes = b"") -> bytes:
    return _packet(_varint(8, at_ns - drawn.origin_ns) + _message(11, _varint(9, kind) + _varint(11, track) + more))


def _named(span: Span) -> bytes:
    return _text(22, span.name) + _text(23, span.name) + b"".join(_annotations(told(span)))


def _annotations(args: Mapping[str, object]) -> Iterator[bytes]:
    """What is one number or one text; lists of samples are what arrows show."""
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
