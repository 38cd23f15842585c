"""Segment files: rows that workers made, appended by who made them, read back by their place.

    SegmentWriter.append -> Place (file, offset, size, CRC-32) -> the ledger -> read_segment -> rows

A record is an encoded batch (`m2flow.channels.codec`) after a header that says what it is. So a file can be read without the ledger:
what a worker wrote down just before it was killed, and could not report, is found in its file (`scan_segments`). Each process has a
file of its own, also when it is started again under the same name. Limit: who reads must see the directory that workers write to.
"""

from __future__ import annotations

import contextlib
import enum
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.errors import EngineError, M2FlowError, naming_host_errors
from m2flow.samples import Batch

Place = tuple[str, int, int, int]
"""File name, offset, size in bytes, CRC-32."""

_HEADER = struct.Struct("<4sB3xqQI4x")  # magic, kind, call, size of the record, its CRC-32
_MAGIC = b"m2s1"


class Kind(enum.IntEnum):
    """What a record is."""

    FINISHED = 0
    """Samples at their end."""
    STOPPED = 1
    """Samples that a call left unfinished, as they were then."""
    RUNNING = 2
    """Samples that went on, as they were then."""
    GIVEN_UP = 3
    """Samples that nobody goes on with; of them only how many tokens they had (`num_generated`)."""
    RESULT = 4
    """Rows of a function's result."""


@dataclass(frozen=True)
class Found:
    """A record of a file."""

    kind: Kind
    call: int
    place: Place


def segment_files(directory: str | Path, worker: str) -> list[Path]:
    """What the processes of this name have written, the oldest process first."""
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
        """Written so far."""
        return self._file.tell()

    def append(self, batch: Batch, kind: Kind = Kind.FINISHED, call: int = -1) -> Place:
        """Write the rows and hand them to the operating system.

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
        with contextlib.suppress(OSError):  # Every record was flushed by `append`, or its failure was told there.
            self._file.close()


def read_segment(directory: str | Path, place: Place) -> Batch:
    """The rows of one record, checked against its CRC-32."""
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
    """Where a record begins in its file, header included: `scan_segments` from there finds it."""
    return place[1] - _HEADER.size


def scan_segments(directory: str | Path, worker: str, known: Mapping[str, int]) -> Iterator[Found]:
    """The records of a worker's files that are not known, in the order in which they were written.

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
