"""Records that are needed for a while: running samples as they were last, rows of functions until their call is forgotten.

    append(batch, keys) -> Place;    release(keys) -> files without keys, but for the newest two, are deleted

What a run keeps are finished samples (`m2flow.micro.record.segments`); of what is written here only the newest counts, and that not for
ever. The newest two files stay whatever is in them: whoever reads a place that was newest a moment ago still finds it. What processes of
an earlier attempt at the run wrote goes by what the ledger points to (`clear_scratch`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import final

from m2flow.micro.record.segments import Kind, Place, SegmentWriter, segment_files, worker_of
from m2flow.samples import Batch

_ROTATES_AT_BYTES = 32 << 20


@final
class Scratch:
    """Files of one process, under a name of its own."""

    def __init__(self, directory: str | Path, name: str, *, rotates_at_bytes: int = _ROTATES_AT_BYTES) -> None:
        self._directory = directory
        self._name = name
        self._rotates_at = rotates_at_bytes
        self._files: list[tuple[SegmentWriter, set[int]]] = []
        """The oldest first, each with the keys whose newest record is there."""

    def append(self, batch: Batch, keys: Iterable[int], kind: Kind, call: int) -> Place:
        """Write rows; what their keys had before is not needed any more. Raises EngineError, as a segment does."""
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
        """Nobody needs what these keys have."""
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
    """Delete the scratch files that nobody writes any more and nobody points into.

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
