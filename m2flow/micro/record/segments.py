"""Segment files: the rows of generated samples, appended by the worker that made them, read back by their place.

A record is an encoded batch (`m2flow.channels.codec`); the ledger keeps (file, offset, size, CRC-32) for each sample.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.errors import EngineError
from m2flow.samples import Batch

Place = tuple[str, int, int, int]
"""File name, offset, size in bytes, CRC-32."""


def segment_name(worker: str, attempt: int) -> str:
    """The file, without its ending, that a worker writes in an attempt at a run."""
    return worker if not attempt else f"{worker}.{attempt}"


class SegmentWriter:
    """Appends records to one file."""

    def __init__(self, directory: str | Path, name: str) -> None:
        self.directory = Path(directory)
        self._path = self.directory / f"{name}.seg"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")

    def append(self, batch: Batch) -> Place:
        """Write the rows and hand them to the operating system.

        Raises:
            EngineError: the disk is full, or the file can't be written.
        """
        record = encode_batch(batch)
        try:
            offset = self._file.tell()
            self._file.write(record)
            self._file.flush()
        except OSError as error:
            raise EngineError(
                f"can't write samples to {self._path}: {error.strerror}", now="Free some space, or give another --runs-dir."
            ) from error
        return self._path.name, offset, len(record), zlib.crc32(record)

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
        raise EngineError(f"the segment {path} can't be read: {error.strerror}", now="The run's other samples can still be read.") from None
    if len(record) != size or zlib.crc32(record) != checksum:
        raise EngineError(f"the segment {path} is damaged at byte {offset}", now="The run's other samples can still be read.")
    return decode_batch(record)
