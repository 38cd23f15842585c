"""Append encoded rows to segment files, and read them back by their place in a file.

    SegmentWriter.append -> Place (file, offset, size, CRC-32) -> the ledger -> read_segment -> rows

A record is an encoded batch (`m2flow.channels.codec`) after a header that describes it. So a file can be read without the ledger: what a
worker wrote just before it was killed, and could not report, is found in its file (`scan_segments`). Each process has a file of its own,
also when it is restarted under the same name. Limit: readers must see the directory that workers write to.

Scratch files hold prefixes of samples in flight, of which only the newest counts:

    Scratch.append(batch, keys) -> Place;    release(keys) -> files without live keys, except the newest two, are deleted

The newest two files stay whatever is in them, so that a reader still finds a place that was the newest a moment ago. Scratch files of
earlier attempts at the run are deleted when the ledger has no place in them (`clear_scratch`).
"""

from __future__ import annotations

import contextlib
import enum
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.errors import EngineError, M2FlowError, naming_host_errors
from m2flow.samples import Batch

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


def read_segment(directory: str | Path, place: Place) -> Batch:
    """Read the rows of one record and check its CRC-32."""
    name, offset, size, checksum = place
    path = Path(directory) / name
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record = file.read(size)
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        raise EngineError(f"the segment {path} {what}", now="The run's other samples can still be read.") from None
    if len(record) != size or zlib.crc32(record) != checksum:
        raise EngineError(f"the segment {path} is damaged at byte {offset}", now="The run's other samples can still be read.")
    return decode_batch(record)


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
                    read_segment(directory, place)
                except M2FlowError:
                    break
                yield Found(Kind(kind), call, place)
                position += _HEADER.size + size


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

    def append(self, batch: Batch, keys: Iterable[int], kind: Kind, call: int) -> Place:
        """Write rows, which replace earlier ones of their keys. Raises HostError as a segment does."""
        if not self._files or self._files[-1][0].num_bytes >= self._rotates_at:
            if self._files:
                self._files[-1][0].close()
            self._files.append((SegmentWriter(self._directory, self._name), set()))
        place = self._files[-1][0].append(batch, kind, call)
        keys = list(keys)
        for _, held in self._files[:-1]:
            held.difference_update(keys)
        self._files[-1][1].update(keys)
        self._drop()
        return place

    def release(self, keys: Iterable[int]) -> None:
        """Declare that the records of these keys are not needed any more."""
        keys = list(keys)
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
