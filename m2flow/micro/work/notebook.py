"""What a worker writes down, so that a kill loses little and what it loses is known.

    finished samples, stopped ones   -> <worker>.seg              kept with the run
    running samples, now and then    -> <worker>-running.seg      the newest of each is kept, while it runs
    rows of functions                -> <worker>-rows.seg         kept until their call is forgotten
    counts, after every decode step  -> <worker>.meter            kept with the run

A running sample is written down when it has got so many tokens, or so many seconds have passed, since it was last. All of it is
written, not only what is new: so one record is enough to go on from, and earlier ones need not be kept. Whoever else must know is told
by the worker. What a killed process left here is read by `m2flow.micro.record.left_behind`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import numpy as np

from m2flow.macro.graph import Call
from m2flow.micro.record.meter import Meter
from m2flow.micro.record.scratch import Scratch, scratch_name
from m2flow.micro.record.segments import Kind, Place, SegmentWriter, read_segment
from m2flow.micro.work import performing
from m2flow.micro.work.workbench import Workbench
from m2flow.observe.recorder import now_ns
from m2flow.samples import Batch

_CHECKS = 8
"""How often it is looked for samples to write down, in the time in which one gets the tokens that make it due."""


@final
class Notebook:
    """Of one process."""

    def __init__(self, directory: str | Path, name: str, *, every_tokens: int, every_s: float) -> None:
        self._segments = SegmentWriter(directory, name)
        self._running = Scratch(directory, scratch_name(name, "running"))
        self._rows = Scratch(directory, scratch_name(name, "rows"))
        self._meter: Meter | None = None
        self._every_tokens = every_tokens
        self._every_ns = every_s * 1e9
        self._check_after = max(1, every_tokens // _CHECKS)
        self._num_steps = 0
        """Decode steps since it was last looked."""
        self._looked_ns = now_ns()
        self._counts: Mapping[int, int] = {}
        self._written: dict[int, int] = {}
        """Running sample -> its tokens that are written down."""

    def began(self, ids: Iterable[int], had: Iterable[int]) -> None:
        """Samples go on from so many tokens, which are written down elsewhere."""
        self._written.update(zip(ids, had, strict=True))

    def finished(self, call: int, rows: Batch) -> Place:
        return self._ended(self._segments.append(rows, Kind.FINISHED, call), rows.ids.tolist())

    def read(self, place: Place) -> Batch:
        """What was written down."""
        return read_segment(self._segments.directory, place)

    def stopped(self, call: int, rows: Batch) -> Place:
        return self._ended(self._segments.append(rows, Kind.STOPPED, call), rows.ids.tolist())

    def given_up(self, call: int, counts: Mapping[int, int]) -> None:
        """These samples had so many tokens, and nobody goes on with them."""
        ids = list(counts)
        columns = {"num_generated": np.array(list(counts.values()), np.int64)}
        self._ended(self._segments.append(Batch(np.array(ids, np.int64), columns), Kind.GIVEN_UP, call), ids)

    def result(self, call: int, rows: Batch) -> Place:
        """Rows of a function."""
        return self._rows.append(rows, [call], Kind.RESULT, call)

    def forget(self, call: int) -> None:
        """Nobody needs a call's rows any more."""
        self._rows.release([call])

    def measure(self, bench: Workbench, leaving: Iterable[Batch] = ()) -> None:
        """Note how far everything is, with what leaves and is not written down yet: after each decode step, and when samples have left."""
        if self._meter is None:
            self._meter = Meter(self._segments.path.with_suffix(".meter"))
        total, counts = bench.tokens()
        self._counts = dict(counts)
        for rows in leaving:
            counts.update(zip(rows.ids.tolist(), performing.num_generated_of(rows), strict=True))
        self._meter.write(total, counts)

    def due(self, bench: Workbench) -> list[tuple[Call, Batch, Place]]:
        """After a decode step: write down the running samples whose time it is. The rows of each call."""
        self._num_steps += 1
        is_time = now_ns() - self._looked_ns >= self._every_ns
        if not self._counts or not (is_time or self._num_steps >= self._check_after):
            return []
        most = 0 if is_time else max(self._every_tokens - self._check_after, 0)
        wanted = [packed for packed, count in self._counts.items() if count - self._written.get(packed, 0) > most]
        self._num_steps = 0
        if is_time:
            self._looked_ns = now_ns()
        done = []
        for call, rows in bench.snapshot(wanted) if wanted else ():
            ids = rows.ids.tolist()
            done.append((call, rows, self._running.append(rows, ids, Kind.RUNNING, call.ordinal)))
            self._written.update(zip(ids, performing.num_generated_of(rows), strict=True))
        return done

    def close(self) -> None:
        self._segments.close()
        self._running.close()
        self._rows.close()
        if self._meter is not None:
            self._meter.close()

    def _ended(self, place: Place, ids: list[int]) -> Place:
        """These samples do not run any more."""
        if self._written:
            for packed in ids:
                self._written.pop(packed, None)
        self._running.release(ids)
        return place
