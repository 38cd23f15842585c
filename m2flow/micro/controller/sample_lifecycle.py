"""What becomes of samples, written to the journal; and what a worker that is gone has left of them.

known ends of its files, its files, its meter -> messages as it would have said them, and tokens that are written down nowhere

So a sample whose end was written down is finished, though nobody was told. What is neither in a record nor known otherwise is lost,
and the meter says how many tokens that are, sample by sample.

messages of workers, commands of the scheduler --Custody--> journal
    a worker is lost --settle--> what it wrote down and could not say, for the scheduler; what it had otherwise is counted as lost
    rows that nobody else has --read_back--> from the segment files

So every token that was generated is in the ledger: as a sample's, with its ending, or as lost (`m2flow.micro.records.audit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro.protocol import execute
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import Discarded, Dropped, Expired, Given, Late
from m2flow.micro.protocol.execute import gives_reward
from m2flow.micro.protocol.staleness import given_by, is_time_dependent, version_spans_of
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.segments import Found, Kind, Place, read_segment, scan_segments, scratch_name, segment_files, start_of
from m2flow.micro.records.token_accounting import read_meter
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
class CrashRecovery:
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
        total, made = execute.num_tokens_of(rows), execute.num_generated_of(rows)
        if found.kind is Kind.FINISHED:
            stretches = version_spans_of(rows) if call is not None and is_time_dependent(call) else []
            return m.Finished(-1, found.call, ids, total, made, [], execute.finish_of(rows), [], found.place, [], stretches)
        kind = m.Flushed if found.kind is Kind.RUNNING else m.Aborted
        return kind(found.call, ids, total, made, version_spans_of(rows), found.place)


OfSamples = Discarded | Dropped | Late | Given | Expired
"""Commands that only say what becomes of samples."""


@final
class SampleLifecycle:
    """Of one run. It looks calls up where its owner keeps them."""

    def __init__(self, journal: Journal, run_dir: Path, calls: Mapping[int, Call]) -> None:
        self._journal = journal
        self._run_dir = run_dir
        self._calls = calls
        self._left = CrashRecovery(run_dir / "segments")

    def told(self, message: Unsaid) -> None:
        """A worker says how far samples are, or that rows are done."""
        call = self._calls.get(message.call)
        match message:
            case m.GivenUp():
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case m.Finished() if call is not None:
                self._finished(call, message)
            case m.Aborted() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.stretches, message.segment)
                self._journal.samples_stopped(call, message.ids, *numbers)
            case m.Flushed() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.stretches, message.segment)
                self._journal.samples_flushed(message.call, message.ids, *numbers)
            case _ if any(message.num_generated):  # Its call was given up and forgotten before this came.
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case _:
                pass
        if not isinstance(message, m.GivenUp) and message.segment is not None:
            self._left.reported(message.segment, message.ids)
            if call is None or call.engine == "rollout":
                self._journal.taken_in(message.segment[0], start_of(message.segment))

    def begins(self, worker: str, task: m.Generate) -> None:
        """A worker is given samples."""
        if task.had:
            self._journal.samples_went_on(task.call, task.ids, task.had, worker)

    def decided(self, command: OfSamples) -> None:
        """The scheduler says what becomes of samples."""
        call = self._calls[command.call]
        match command:
            case Discarded(_, last):
                self._journal.discarded(call, last)
            case Dropped(_, ids):
                self._journal.dropped(call, ids)
            case Late(_, ids):
                self._journal.late(call, ids)
            case Given(_, ids):
                self._journal.given(call, ids)
            case Expired(_, ids):
                self._journal.expired(call, ids)
                self._journal.make_certain()

    def settle(self, worker: str, reason: str) -> tuple[m.Finished | m.Aborted | m.Flushed, ...]:
        """A worker has ended by itself, or was killed: write down what it could not say any more, and count what is lost with it.

        To be called before the scheduler hears of the loss. Told again of the same processes, it does nothing.

        Returns:
            What the scheduler should be told with that.
        """
        left = self._left.of(worker, self._calls)
        for message in left.messages:
            self.told(message)
        self._journal.tokens_lost(left.running, worker, reason)
        for meter in left.meters:
            self._journal.taken_in(meter)
        self._journal.make_certain()  # What of it is made anew now must not be taken for what was there, by who finds both.
        return tuple(message for message in left.messages if not isinstance(message, m.GivenUp))

    def read_back(self, push: m.Push) -> Batch:
        """The rows that are to be sent, which nobody else has."""
        call = self._calls.get(push.call)
        return self._journal.read_back(self._run_dir, push.call, push.ids, is_reward=call is not None and gives_reward(call))

    def _finished(self, call: Call, message: m.Finished) -> None:
        if message.segment is not None and call.engine == "rollout":
            numbers = (message.num_tokens, message.num_generated, message.finish, message.segment, message.texts)
            self._journal.samples_done(call, message.ids, *numbers)
        elif message.segment is not None:
            self._journal.result(call, message.segment)
        if message.values:
            self._journal.rewarded(call, message.ids, message.values, message.parts)
        if message.dropped:
            self._journal.filtered(call, message.dropped)
        if message.stretches:
            self._journal.decided(call, given_by(call.ordinal, message.ids, message.stretches))
