"""Append encoded rows to segment files, and read them back by their place in a file.

    SegmentWriter.append -> Place (file, offset, size, CRC-32) -> the ledger -> read_segment -> rows

A record is an encoded batch (`m2flow.channels.codec`) after a header that describes it. So a file can be read without the ledger: what a
worker wrote just before it was killed, and could not report, is found in its file (`scan_segments`). Each process has a file of its own,
also when it is restarted under the same name. Limit: readers must see the directory that workers write to.

Scratch files hold prefixes of samples in flight, of which only the newest counts:

    Scratch.append(batch, keys) -> Place;    release(keys) -> files without live keys, except the newest two, are deleted

The newest two files stay whatever is in them, so that a reader still finds a place that was the newest a moment ago. Scratch files of
earlier attempts at the run are deleted when the ledger has no place in them (`clear_scratch`).

An episode is written down several times for each of its turns, so a record has only what is new in it since its record before, which lies
in the same file (`Scratch.append_rows`, `Kind.GROWN`); its first one in a file is whole. To a reader all are alike: a row is read with what
it follows. Rows are compared as bytes, whatever they mean, so what is read is always what was to be written. An episode puts something into
its columns here and there, which costs few bytes. A file is not left before as many bytes are new in it as were written again when it
began, so an episode of T turns takes O(T) bytes, however many run.
"""

from __future__ import annotations

import contextlib
import enum
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.errors import EngineError, M2FlowError, RecordLost, naming_host_errors
from m2flow.samples import Batch, Column, Ragged, offsets_of

Place = tuple[str, int, int, int]
"""File name, offset, size in bytes, CRC-32."""

_HEADER = struct.Struct("<4sB3xqQI4x")  # magic, kind, call, size of the record, its CRC-32
_MAGIC = b"m2s1"


class Kind(enum.IntEnum):
    """The kind of a record."""

    FINISHED = 0
    """Finished samples."""
    STOPPED = 1
    """Prefixes of samples that a call left unfinished."""
    RUNNING = 2
    """Prefixes of samples in flight."""
    GIVEN_UP = 3
    """Samples that were given up, only with their number of tokens (`num_generated`)."""
    RESULT = 4
    """Rows of a function's result."""
    GROWN = 5
    """What is new in prefixes of samples in flight. In the file alone: `scan_segments` calls it `RUNNING`."""


@dataclass(frozen=True)
class Found:
    """A record found in a file."""

    kind: Kind
    call: int
    place: Place


def segment_files(directory: str | Path, worker: str) -> list[Path]:
    """Segment files of all processes of this worker name, the oldest process first."""
    numbered = re.compile(rf"{re.escape(worker)}(?:\.(\d+))?\.seg")
    found = [(int(match[1] or 0), path) for path in Path(directory).glob("*.seg") if (match := numbered.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def worker_of(segment: str) -> str:
    """The worker that wrote a file of this name.

    >>> worker_of("rollout-1.2.seg")
    'rollout-1'
    """
    return re.sub(r"(\.\d+)?\.seg$", "", segment)


class SegmentWriter:
    """Appends records to a file that no other process writes."""

    def __init__(self, directory: str | Path, name: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        before = segment_files(directory, name)
        number = 1 + int(before[-1].name.removesuffix(".seg").removeprefix(name).lstrip(".") or 0) if before else 0
        self._path = self.directory / (f"{name}.{number}.seg" if number else f"{name}.seg")
        self._file = self._path.open("xb")

    @property
    def path(self) -> Path:
        return self._path

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def append(self, batch: Batch, kind: Kind = Kind.FINISHED, call: int = -1) -> Place:
        """Write the rows and flush them to the operating system.

        Raises:
            HostError: the disk is full, or the file can't be written.
        """
        record = encode_batch(batch)
        checksum = zlib.crc32(record)
        with naming_host_errors(f"can't write samples to {self._path}"):
            offset = self._file.tell() + _HEADER.size
            self._file.write(_HEADER.pack(_MAGIC, kind, call, len(record), checksum) + record)
            self._file.flush()
        return self._path.name, offset, len(record), checksum

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `append` flushed every record, or raised the error.
            self._file.close()


def read_segment(directory: str | Path, place: Place, only: Collection[int] | None = None) -> Batch:
    """Read the rows of one record, or those of these samples, and check its CRC-32."""
    return SegmentReader(directory).read(place, only)


@final
class SegmentReader:
    """Reads records. Of those of samples in flight it keeps the rows, so that the next ones in their order are quickly read."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._known: dict[tuple[str, int], tuple[int, _Row]] = {}
        """File and sample -> the record that was read last, by where it begins, and its row."""

    def read(self, place: Place, only: Collection[int] | None = None) -> Batch:
        """Read the rows of one record, or those of these samples, and check its CRC-32."""
        path = self._directory / place[0]
        try:
            with path.open("rb") as file:
                kind, batch = _record_at(file, path, place)
                if only is not None:
                    batch = batch.take([row for row, packed in enumerate(batch.ids.tolist()) if packed in only])
                return self._grown(file, path, place, batch) if kind is Kind.GROWN and len(batch) else batch
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise RecordLost(f"the segment {path} is missing", now=_LOST) from None
            raise EngineError(
                f"the segment {path} can't be read: {error.strerror}", now="The run's other samples can still be read."
            ) from None

    def _grown(self, file: BinaryIO, path: Path, place: Place, batch: Batch) -> Batch:
        """The rows of a record that has only what is new in them."""
        records = {start_of(place): (Kind.GROWN, batch, {packed: row for row, packed in enumerate(batch.ids.tolist())})}
        rows = []
        for packed in batch.ids.tolist():
            start = start_of(place)
            news: list[_News] = []
            known = self._known.get((path.name, packed))
            while known is None or known[0] != start:
                if start not in records:
                    kind, before = _record_at(file, path, _place_at(file, path, start))
                    records[start] = kind, before, {one: row for row, one in enumerate(before.ids.tolist())}
                kind, before, at = records[start]
                if packed not in at:
                    raise _damaged(path, start)
                if kind is not Kind.GROWN:
                    known = start, _row_of(before, at[packed])
                    break
                news.append(_News.of(before, at[packed]))
                if news[-1].since >= start:
                    raise _damaged(path, start)
                start = news[-1].since
            row = known[1]
            for one in reversed(news):
                row = one.added_to(row)
            self._known[path.name, packed] = start_of(place), row
            rows.append(row)
        return _batch_of(batch.ids, rows)


def _record_at(file: BinaryIO, path: Path, place: Place) -> tuple[Kind, Batch]:
    """A record as it is in the file."""
    _, offset, size, checksum = place
    file.seek(start_of(place))
    header, record = file.read(_HEADER.size), file.read(size)
    if len(record) != size or zlib.crc32(record) != checksum:
        raise _damaged(path, offset)
    return Kind(_HEADER.unpack(header)[1]), decode_batch(record)


def _place_at(file: BinaryIO, path: Path, start: int) -> Place:
    """The place of the record that begins here, header included."""
    file.seek(start)
    header = file.read(_HEADER.size)
    if len(header) != _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
        raise _damaged(path, start)
    _, _, _, size, checksum = _HEADER.unpack(header)
    return path.name, start + _HEADER.size, size, checksum


_LOST = (
    "Put the file back from a copy, if there is one: a resume that needs these samples can't go on without. The run's other samples can "
    "still be read, and a new run can begin with the model of one of its checkpoints."
)


def _damaged(path: Path, at: int) -> RecordLost:
    return RecordLost(f"the segment {path} is damaged at byte {at}", now=_LOST)


def start_of(place: Place) -> int:
    """The offset at which a record begins, header included; `scan_segments` finds it from there."""
    return place[1] - _HEADER.size


def scan_segments(directory: str | Path, worker: str, known: Mapping[str, int]) -> Iterator[Found]:
    """The records of a worker's files beyond what is known, in the order in which they were written.

    A record that was being written when its process ended is passed over, with whatever is after it.

    Args:
        known: file -> where to begin, which is where a record begins or ends; by default at the file's beginning.
    """
    for path in segment_files(directory, worker):
        position, length = known.get(path.name, 0), path.stat().st_size
        with path.open("rb") as file:
            while position + _HEADER.size <= length:
                file.seek(position)
                magic, kind, call, size, checksum = _HEADER.unpack(file.read(_HEADER.size))
                place: Place = (path.name, position + _HEADER.size, size, checksum)
                if magic != _MAGIC or position + _HEADER.size + size > length:
                    break
                try:
                    _record_at(file, path, place)
                except M2FlowError:
                    break
                yield Found(Kind.RUNNING if kind == Kind.GROWN else Kind(kind), call, place)
                position += _HEADER.size + size


# ---- what is new in a row


class _Column(NamedTuple):
    """A column of one sample."""

    data: bytes
    kind: str
    """Empty: it is not ragged."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one value."""


_Row = Mapping[str, _Column]
_Piece = tuple[int, int, int]
"""Bytes that are kept, from and to, and how many follow that are new."""


def _row_of(batch: Batch, row: int) -> _Row:
    found = {}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            found[name] = _Column(column.row(row).tobytes(), column.kind, column.values.dtype, column.values.shape[1:])
        else:
            found[name] = _Column(column[row : row + 1].tobytes(), "", column.dtype, column.shape[1:])
    return found


def _batch_of(ids: npt.NDArray[np.int64], rows: Sequence[_Row]) -> Batch:
    columns: dict[str, Column] = {}
    for name, (_, kind, dtype, shape) in rows[0].items():
        values = [np.frombuffer(row[name].data, dtype).reshape(-1, *shape) for row in rows]
        offsets = offsets_of([len(of) for of in values])
        whole = np.concatenate(values)
        columns[name] = Ragged(whole, offsets, kind) if kind else whole  # type: ignore[arg-type]
    return Batch(ids, columns)


class _News(NamedTuple):
    """What a row has beyond the same sample's row before."""

    since: int
    """Where the record of that row begins."""
    pieces: Mapping[str, Sequence[_Piece]]
    """By column; the others are as they were."""
    data: bytes
    """What is new, of one column after the other."""

    @classmethod
    def between(cls, since: int, before: _Row, after: _Row) -> _News | None:
        """What is new. None: these are rows of other columns."""
        if before.keys() != after.keys() or any(before[name][1:] != column[1:] for name, column in after.items()):
            return None
        changed = [(name, before[name].data, column.data) for name, column in after.items() if before[name].data != column.data]
        pieces = {name: _pieces(was, now) for name, was, now in changed}
        new: list[bytes] = []
        for name, _, now in changed:
            at = 0
            for start, end, count in pieces[name]:
                at += end - start + count
                new.append(now[at - count : at])
        return cls(since, pieces, b"".join(new))

    @classmethod
    def of(cls, batch: Batch, row: int) -> _News:
        told: Any = batch.ragged("pieces").item(row)
        return cls(int(batch.dense("since")[row]), told, batch.ragged("new").row(row).tobytes())

    def added_to(self, row: _Row) -> _Row:
        """The row, given the one before."""
        found, at = dict(row), 0
        for name, pieces in self.pieces.items():
            parts = []
            for start, end, count in pieces:
                parts += [row[name].data[start:end], self.data[at : at + count]]
                at += count
            found[name] = row[name]._replace(data=b"".join(parts))
        return found


_KEY_BYTES, _MOST_PIECES = 32, 16


def _pieces(was: bytes, now: bytes) -> list[_Piece]:
    """How bytes become others, of which most were there before in the same order.

    Where they begin to differ, something was put in: what was there goes on where the next `_KEY_BYTES` of it are found.
    """
    if now.startswith(was):
        return [(0, len(was), len(now) - len(was))]
    pieces: list[_Piece] = []
    old, new = np.frombuffer(was, np.uint8), np.frombuffer(now, np.uint8)
    start = at = 0
    while True:
        num = min(len(was) - start, len(now) - at)
        differ = old[start : start + num] != new[at : at + num]
        kept = int(differ.argmax()) if differ.any() else num
        end, at = start + kept, at + kept
        goes_on = now.find(was[end : end + _KEY_BYTES], at) if end < len(was) and len(pieces) < _MOST_PIECES else -1
        if goes_on <= at:
            break
        pieces.append((start, end, goes_on - at))
        start, at = end, goes_on
    num = min(len(was) - end, len(now) - at)
    alike = old[len(was) - num :][::-1] == new[len(now) - num :][::-1]
    last = num if alike.all() else int(alike.argmin())
    pieces.append((start, end, len(now) - at - last))
    return [*pieces, (len(was) - last, len(was), 0)] if last else pieces


def _record_of(ids: Sequence[int], news: Sequence[_News]) -> Batch:
    columns: dict[str, Column] = {
        "since": np.array([one.since for one in news], np.int64),
        "pieces": Ragged.json([one.pieces for one in news]),
        "new": Ragged(np.frombuffer(b"".join(one.data for one in news), np.uint8), offsets_of([len(one.data) for one in news])),
    }
    return Batch(np.array(ids, np.int64), columns)


# ---- scratch files

_ROTATES_AT_BYTES = 32 << 20


@final
class Scratch:
    """Rotating files of one process for records that are needed for a while."""

    def __init__(self, directory: str | Path, name: str, *, rotates_at_bytes: int = _ROTATES_AT_BYTES) -> None:
        self._directory = directory
        self._name = name
        self._rotates_at = rotates_at_bytes
        self._files: list[tuple[SegmentWriter, set[int]]] = []
        """Files from the oldest to the newest, each with the keys whose newest record is in it."""
        self._last: dict[int, tuple[str, int, _Row]] = {}
        """Episode -> the file of its newest record, where that begins in it, and what it says."""
        self._num_again = 0
        """Bytes of the newest file by which its episodes were in older ones, too."""

    def append(self, batch: Batch, keys: Iterable[int], kind: Kind, call: int) -> Place:
        """Write rows, which replace earlier ones of their keys. Raises HostError as a segment does."""
        place = self._newest().append(batch, kind, call)
        keys = list(keys)
        for _, held in self._files[:-1]:
            held.difference_update(keys)
        self._files[-1][1].update(keys)
        self._drop()
        return place

    def append_rows(self, rows: Batch, call: int) -> list[tuple[Batch, Place]]:
        """Write rows of samples in flight, of episodes only what is new in them. Returns which rows each record has."""
        if "episode" not in rows:
            return [(rows, self.append(rows, rows.ids.tolist(), Kind.RUNNING, call))]
        file, ids = self._newest().path.name, rows.ids.tolist()
        made = [_row_of(rows, row) for row in range(len(ids))]
        news: list[_News | None] = []
        for packed, row in zip(ids, made, strict=True):
            lies_in, since, before = self._last.get(packed, ("", 0, row))
            news.append(_News.between(since, before, row) if lies_in == file else None)
        done = []
        for kind in (Kind.GROWN, Kind.RUNNING):
            some = [at for at, one in enumerate(news) if (one is None) == (kind is Kind.RUNNING)]
            if not some:
                continue
            of, told = [ids[at] for at in some], rows.take(some)
            place = self.append(told if kind is Kind.RUNNING else _record_of(of, [one for one in news if one is not None]), of, kind, call)
            if kind is Kind.RUNNING and any(packed in self._last for packed in of):
                self._num_again += place[2]
            self._last |= {ids[at]: (place[0], start_of(place), made[at]) for at in some}
            done.append((told, place))
        return done

    def _newest(self) -> SegmentWriter:
        """The file for the next record."""
        if not self._files or self._files[-1][0].num_bytes >= max(self._rotates_at, 2 * self._num_again):
            if self._files:
                self._files[-1][0].close()
            self._files.append((SegmentWriter(self._directory, self._name), set()))
            self._num_again = 0
        return self._files[-1][0]

    def release(self, keys: Iterable[int]) -> None:
        """Declare that the records of these keys are not needed any more."""
        keys = list(keys)
        for key in keys:
            self._last.pop(key, None)
        for _, held in self._files:
            held.difference_update(keys)
        self._drop()

    def close(self) -> None:
        for writer, _ in self._files:
            writer.close()

    def _drop(self) -> None:
        for writer, held in self._files[:-2]:
            if not held:
                writer.path.unlink(missing_ok=True)
        self._files = [(writer, held) for place, (writer, held) in enumerate(self._files) if held or place >= len(self._files) - 2]


_WHATS = ("running", "rows")


def clear_scratch(directory: Path, pointed: Iterable[str], *, is_last: bool) -> None:
    """Delete the scratch files that no process writes and the ledger does not point into.

    The last of a name keeps its place, empty: a file of an old name would be taken for one that is known in part.

    Args:
        pointed: names of files that the ledger has places in.
        is_last: no process will write again; then nothing keeps its place.
    """
    needed = set(pointed)
    names = {worker_of(path.name) for path in directory.glob("*.seg")}
    for name in sorted(name for name in names if name.endswith(tuple(f"-{what}" for what in _WHATS))):
        files = segment_files(directory, name)
        for path in files:
            if path.name in needed:
                continue
            if path == files[-1] and not is_last:
                path.write_bytes(b"")
            else:
                path.unlink(missing_ok=True)


def scratch_name(worker: str, what: str) -> str:
    """The name of a worker's scratch files.

    >>> scratch_name("rollout-0", "running")
    'rollout-0-running'
    """
    return f"{worker}-{what}"
