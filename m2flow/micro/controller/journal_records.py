"""Record what becomes of each sample in the journal, and recover what a dead worker had written of its samples.

    messages of workers, commands of the scheduler --ControllerCore--> JournalRecords --> journal
    a worker is lost --settle--> unreported results from its files, for the scheduler; its other tokens are counted as lost
    rows that nobody else has --read_back--> from the segment files

So every token that was generated is in the ledger: as a sample's, with its ending, or as lost (`m2flow.micro.records.audit`).

A dead worker's segment files are read from the last record that it reported on (`CrashRecovery`), and what they say beyond is turned into
the messages that it could not send any more: a sample whose end was written is finished although nobody was told. What is in no record is
lost, and the worker's token meter says how many tokens that are, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from m2flow.errors import ErrorRecord, M2FlowError
from m2flow.macro.graph import Call
from m2flow.micro.controller.controller_core import Records, SampleDecision, Unreported
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import gives_reward
from m2flow.micro.protocol.events import Discarded, Dropped, Expired, Late, Moved, Restored, TakenOver
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.staleness import given_by, is_time_dependent, version_spans_of
from m2flow.micro.records.accounting import read_meter
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.segments import Found, Kind, Place, SegmentReader, scan_segments, scratch_name, segment_files, start_of
from m2flow.samples import Batch

# ---- files of dead workers

UnreportedMessage = m.Finished | m.Aborted | m.Flushed | m.GivenUp


@dataclass(frozen=True)
class Leftovers:
    """What the dead processes of one worker have left in files."""

    messages: list[UnreportedMessage]
    """Messages that were not sent, in the order of the events. Their task numbers have no meaning."""
    running: dict[int, int] = field(default_factory=dict)
    """Sample -> tokens that it had in the engine."""
    meters: list[str] = field(default_factory=list)
    """Names of the meter files that `running` is from."""


@final
class CrashRecovery:
    """Reconstruct messages that dead workers did not send from their segment and meter files.

    Of each segment file it knows the last record that was reported; all before it were reported too, and of the record itself perhaps
    only some rows, since rows of one record may be reported one after the other. Files that exist when it is made are of earlier attempts
    at the run, and do not count.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = {path.name: path.stat().st_size for path in directory.glob("*.seg")}
        self._told: dict[str, set[int]] = {}
        """File -> samples of its last reported record that were reported."""
        self._read = set(directory.glob("*.meter"))
        """Meter files that have been read."""

    def reported(self, place: Place, ids: Iterable[int]) -> None:
        """Note that these rows of a record were reported, and so all records before it in its file."""
        name, start = place[0], start_of(place)
        if self._known.get(name) != start or name not in self._told:
            self._known[name], self._told[name] = start, set()
        self._told[name].update(ids)

    def of(self, worker: str, calls: Mapping[int, Call]) -> Leftovers:
        """Read what a worker that has ended left in its files. A second call for the same processes returns nothing."""
        messages: list[UnreportedMessage] = []
        # A sample's state while running was written before its end: read in this order, the end counts.
        reader = SegmentReader(self._directory)
        for name in (scratch_name(worker, "running"), worker):
            for found in scan_segments(self._directory, name, self._known):
                rows, name_of_file = reader.read(found.place), found.place[0]
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
        return Leftovers(messages, running, meters)

    def _message(self, found: Found, rows: Batch, calls: Mapping[int, Call]) -> UnreportedMessage:
        ids, call = rows.ids.tolist(), calls.get(found.call)
        if found.kind is Kind.GIVEN_UP:
            return m.GivenUp(found.call, ids, [int(count) for count in rows.dense("num_generated")])
        total, made = call_semantics.num_tokens_of(rows), call_semantics.num_generated_of(rows)
        if found.kind is Kind.FINISHED:
            version_spans = version_spans_of(rows) if call is not None and is_time_dependent(call) else []
            return m.Finished(-1, found.call, ids, total, made, [], call_semantics.finish_of(rows), [], found.place, [], version_spans)
        kind = m.Flushed if found.kind is Kind.RUNNING else m.Aborted
        return kind(found.call, ids, total, made, version_spans_of(rows), found.place)


# ---- lifecycle


class JournalRecords(Records):
    """Write all that becomes of one run's calls and samples to its journal."""

    def __init__(self, journal: Journal, run_dir: Path) -> None:
        super().__init__()
        self._journal = journal
        self._run_dir = run_dir
        self._crashes = CrashRecovery(run_dir / "segments")

    def call_added(self, call: Call) -> None:
        self._journal.call_added(call)

    def restored(self, call: Call, stage: Stage) -> Restored | None:
        return self._journal.restored(call, stage)

    def call_done(self, call: Call, value: object, chosen: tuple[int, ...] | None) -> None:
        if chosen is not None:
            self._journal.gave(call, chosen)
        self._journal.call_done(call, value)

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        self._journal.call_failed(call, error)

    def forgotten(self, ordinal: int) -> None:
        self._journal.forgotten(ordinal)

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None:
        self._journal.consumed(call, epoch, ids)

    def sample_failed(self, call: Call, row: int, error: ErrorRecord) -> None:
        self._journal.sample_failed(call, row, error.what)

    def reported(self, message: UnreportedMessage) -> None:
        """Record a worker's message about samples or rows: finished, aborted, flushed or given up."""
        call = self.calls.get(message.call)
        match message:
            case m.GivenUp():
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case m.Finished() if call is not None:
                self._finished(call, message)
            case m.Aborted() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.version_spans, message.segment)
                self._journal.samples_stopped(call, message.ids, *numbers)
            case m.Flushed() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.version_spans, message.segment)
                self._journal.samples_flushed(message.call, message.ids, *numbers)
            case _ if any(message.num_generated):  # Its call was given up and forgotten before this came.
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case _:
                pass
        if not isinstance(message, m.GivenUp) and message.segment is not None:
            self._crashes.reported(message.segment, message.ids)
            if call is None or call.engine == "rollout":
                self._journal.taken_in(message.segment[0], start_of(message.segment))

    def dispatched(self, worker: str, task: m.Generate) -> None:
        """Record that a worker is given samples; only resumed ones are new to the ledger. Where their prompts were made in the run, these
        are committed first, as a resume goes on with the samples.
        """
        if task.had:
            self._journal.samples_went_on(task.call, task.ids, task.had, worker)
        if any(ref.call not in self.calls or self.calls[ref.call].engine != "source" for _, ref in self.calls[task.call].inputs):
            self._journal.make_certain()

    def decided(self, decision: SampleDecision) -> None:
        """Record the scheduler's decision about samples."""
        call = self.calls[decision.call]
        match decision:
            case Discarded(_, last):
                self._journal.discarded(call, last)
            case Dropped(_, ids):
                self._journal.dropped(call, ids)
            case Late(_, ids):
                self._journal.late(call, ids)
            case TakenOver(_, ids):
                self._journal.given(call, ids)
            case Expired(_, ids):
                self._journal.expired(call, ids)
                self._journal.make_certain()
            case Moved(_, ids, worker, cause):
                self._journal.moved(call, ids, worker, cause)

    def settle(self, worker: str, reason: str = "") -> Unreported:
        """Record what a dead worker could not report any more, and count the tokens that are lost with it.

        Must be called before the scheduler hears of the loss. A second call for the same processes does nothing.

        Args:
            reason: why its tokens are lost; the worker was lost, unless given.
        Returns:
            Messages that the scheduler should be given together with the loss.
        """
        left = self._crashes.of(worker, self.calls)
        for message in left.messages:
            self.reported(message)
        self._journal.tokens_lost(left.running, worker, reason or f"{worker} was lost")
        for meter in left.meters:
            self._journal.taken_in(meter)
        self._journal.make_certain()  # Before any of it is generated again, so that a resume which finds both can tell them apart.
        return tuple(message for message in left.messages if not isinstance(message, m.GivenUp))

    def read_back(self, push: m.Push) -> Batch:
        """Read rows that no worker has any more from the segment files."""
        call = self.calls.get(push.call)
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
        if message.version_spans:
            self._journal.decided(call, given_by(call.ordinal, message.ids, message.version_spans))
