"""What a process left behind that was killed: records that it could not report any more, and how far its samples were.

    known ends of its files, its files, its meter -> messages as it would have said them, and tokens that are written down nowhere

So a sample whose end was written down is finished, though nobody was told. What is neither in a record nor known otherwise is lost,
and the meter says how many tokens that are, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.record.decisions import stretches_of
from m2flow.micro.record.meter import read_meter
from m2flow.micro.record.scratch import scratch_name
from m2flow.micro.record.segments import Found, Kind, Place, read_segment, scan_segments, segment_files, start_of
from m2flow.micro.scheduling.staleness import is_time_dependent
from m2flow.micro.work import performing
from m2flow.samples import Batch

Unsaid = m.Finished | m.Aborted | m.Flushed | m.GivenUp


@dataclass(frozen=True)
class Left:
    """Of the processes of one name."""

    messages: list[Unsaid]
    """In the order in which things happened; their tasks count for nothing."""
    running: dict[int, int] = field(default_factory=dict)
    """Sample -> tokens that it had there."""
    meters: list[str] = field(default_factory=list)
    """Names of the files that said so."""


@final
class LeftBehind:
    """Knows which records were reported: all before the last one of a file, and of that one perhaps only some rows, since rows of one
    record may be reported one after the other. What is there when it is made is of earlier attempts at the run, and does not count."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = {path.name: path.stat().st_size for path in directory.glob("*.seg")}
        self._told: dict[str, set[int]] = {}
        """Of the last record of a file that was reported: the samples."""
        self._read = set(directory.glob("*.meter"))
        """Meters of processes that are settled."""

    def reported(self, place: Place, ids: Iterable[int]) -> None:
        """These rows of a record are known, and all before it in its file."""
        name, start = place[0], start_of(place)
        if self._known.get(name) != start or name not in self._told:
            self._known[name], self._told[name] = start, set()
        self._told[name].update(ids)

    def of(self, worker: str, calls: Mapping[int, Call]) -> Left:
        """What a worker left, that has ended; asked again, nothing."""
        messages: list[Unsaid] = []
        # What runs was written down before it ended: read in this order, the end counts.
        for name in (scratch_name(worker, "running"), worker):
            for found in scan_segments(self._directory, name, self._known):
                rows, name_of_file = read_segment(self._directory, found.place), found.place[0]
                told = self._told.get(name_of_file, set()) if self._known.get(name_of_file) == start_of(found.place) else set()
                fresh = [row for row, packed in enumerate(rows.ids.tolist()) if packed not in told]
                if fresh:
                    messages.append(self._message(found, rows.take(fresh), calls))
                self.reported(found.place, rows.ids.tolist())
        running: dict[int, int] = {}
        meters: list[str] = []
        for path in segment_files(self._directory, worker):
            meter = path.with_suffix(".meter")
            if meter not in self._read:
                self._read.add(meter)
                meters.append(meter.name)
                running.update(read_meter(meter).running)
        return Left(messages, running, meters)

    def _message(self, found: Found, rows: Batch, calls: Mapping[int, Call]) -> Unsaid:
        ids, call = rows.ids.tolist(), calls.get(found.call)
        if found.kind is Kind.GIVEN_UP:
            return m.GivenUp(found.call, ids, [int(count) for count in rows.dense("num_generated")])
        total, made = performing.num_tokens_of(rows), performing.num_generated_of(rows)
        if found.kind is Kind.FINISHED:
            stretches = stretches_of(rows) if call is not None and is_time_dependent(call) else []
            return m.Finished(-1, found.call, ids, total, made, [], performing.finish_of(rows), [], found.place, [], stretches)
        kind = m.Flushed if found.kind is Kind.RUNNING else m.Aborted
        return kind(found.call, ids, total, made, stretches_of(rows), found.place)
