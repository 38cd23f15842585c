"""Write all records of a run as it goes on: ledger, metrics, spans, and counts for people. Planned and eager runs use the same journal.

    (call, identities) --read_back--> ledger: places, rewards -> segment files -> rows, as the worker had them

Samples are read back by identity, whichever call gives them. Those that have not finished are read back by the call that they were made for
(`m2flow.micro.protocol.worker_state.stopped_at`), in their newest prefix. Rewards are numbers in the ledger itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from m2flow.engines.contract import Failure
from m2flow.errors import InternalError, M2FlowError
from m2flow.macro.graph import Call
from m2flow.macro.oversampling import is_cut
from m2flow.micro.protocol.events import Restored
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.staleness import Decisions, VersionSpan, given_by
from m2flow.micro.records.accounting import Alarm, MetricNames, Tally, as_metrics
from m2flow.micro.records.flow_record import LedgerWriter
from m2flow.micro.records.ledger import Ledger
from m2flow.micro.records.resume import DONE, ResumeState, Resumption
from m2flow.micro.records.rundir import StorageCopier
from m2flow.micro.records.segments import Place, clear_scratch, read_segment
from m2flow.observe.metrics import MetricsWriter
from m2flow.observe.spans import IDLE, SpanBlock
from m2flow.observe.store import TraceStore
from m2flow.samples import Batch, Finish, SampleId

_PLACE = "SELECT segment, offset, size, checksum FROM"


def read_back(ledger: Ledger, run_dir: Path, key: int, ids: Sequence[int], *, is_reward: bool) -> Batch:
    """Read rows that the ledger knows, in this order.

    Args:
        key: what the rows go by in a worker's store.
        is_reward: the call's result is the rewards that it gave.
    Raises:
        EngineError: a segment file is damaged. InternalError: the ledger does not have a row.
    """
    if is_reward:
        values = dict(ledger.select("SELECT sample, value FROM rewards WHERE call=?", (key,)))
        return Batch(np.array(ids, np.int64), {"reward": np.array([values[packed] for packed in ids], np.float64)})
    wanted: dict[Place, set[int]] = {place: set(ids) for place in ledger.select(f"{_PLACE} made WHERE call=?", (key,))}
    if not wanted:
        table = "prefixes WHERE sample=?" if key < 0 else "samples WHERE id=?"
        for packed in ids:
            found = ledger.select(f"{_PLACE} {table}", (packed,))
            if not found:
                raise InternalError(f"the ledger has no row of sample {SampleId.unpack(packed)} for call {key}")
            wanted.setdefault(found[0], set()).add(packed)  # An older row of the sample may be in the record of another one.
    parts = []
    for place, mine in wanted.items():
        rows = read_segment(run_dir / "segments", place, mine)
        parts += [rows] if len(rows) else []
    return Batch.concat(parts).select(np.array(ids, np.int64))


def _uncompared(update: Call) -> str:
    """The mark of an update that has ended, whose length bias is not written yet."""
    return f"lengths of {update.ordinal}"


class Journal:
    """The writer of all records of one run."""

    def __init__(
        self,
        run_dir: Path,
        resumed: ResumeState | None = None,
        *,
        keeps: bool = False,
        tensorboard: bool = True,
        alarm: Alarm | None = None,
    ) -> None:
        """With `keeps`, what an earlier attempt at the run left unfinished goes on (`restored`); else it begins anew."""
        self._alarm = alarm
        self.tally = Tally() if resumed is None else resumed.tally
        self._resumed = resumed
        self._attempt = 0 if resumed is None else resumed.attempt
        self._ledger = Ledger(run_dir / "ledger.db")
        self.record = LedgerWriter(self._ledger)
        """Written by the flow's thread: its calls, and what it saw."""
        self._metrics = MetricsWriter(run_dir, tensorboard=tensorboard)
        self._trace = TraceStore(run_dir)
        self._copying = StorageCopier.of(run_dir)
        self._run_dir, self._keeps = run_dir, keeps
        self._num_well = 0
        self._resumption: Resumption | None = None
        self.num_failed: Counter[tuple[str, str]] = Counter()
        """(reward, how it failed) -> samples whose reward is what `on_error` says."""
        self._idle_s: dict[tuple[str, str], float] = {}
        """(worker, cause) -> seconds that its process was idle so far."""
        self._idle_now_s: dict[str, float] = {}
        """By cause, those that are in no line of the metrics yet."""
        self._moved_now: Counter[str] = Counter()
        """By cause, the samples that went on elsewhere than where their context is, and are in no line of the metrics yet."""
        self._known: dict[str, int] = {}
        """Files of workers -> offset up to which they are in the ledger, not yet written there."""
        self._to_compare: deque[Call] = deque()
        """Updates that have ended, whose length bias is not written yet. The ledger marks them, for an attempt that goes on from here."""
        self._names = MetricNames()

    def open(self) -> None:
        self._ledger.open()
        if self._resumed is None:
            self._ledger.attempt_began(0, "", 0)
        else:
            self._resumption = self._resumed.begin_resumption(self._ledger, self._run_dir, keeps=self._keeps)
        self._metrics.open(None if self._resumed is None else self._resumed.metrics_size)
        self._trace.open()
        self._ledger.before_commit.append(lambda: self._ledger.mark("metrics", self._metrics.size))
        self._ledger.before_commit.append(self._write_known)
        self._ledger.commit(durably=self._resumed is not None)
        if self._copying is not None:
            self._copying.open()
        if self._resumed is not None and self._keeps:
            self._clear_scratch(is_last=False)

    def restored(self, call: Call, stage: Stage) -> Restored | None:
        """What an earlier attempt left of a call that goes on now; None: nothing."""
        found = None if self._resumption is None else self._resumption.of(call, stage)
        for message in found.finished if found is not None else ():
            if message.version_spans:
                self.decided(call, given_by(call.ordinal, message.ids, message.version_spans))
            if call.engine == "rollout" and not self._is_known(call):
                self.tally.num_samples += len(message.ids)
                self.tally.num_tokens += sum(message.num_generated)
        return found

    def taken_in(self, file: str, size: int = 1) -> None:
        """Note that a worker's segment file is in the ledger up to this byte, or that a meter is."""
        self._known[file] = size

    def _write_known(self) -> None:
        known, self._known = self._known, {}
        self._ledger.knows(known)

    @property
    def directory(self) -> Path | None:
        """Where the run's directory is by now, if somebody has moved it. None: it was removed."""
        return self._ledger.directory

    def ended(self, reason: str) -> None:
        """Record the end of the attempt: `done`, or the reason of its failure."""
        self._compare_lengths()
        self._ledger.attempt_ended(self._attempt, reason)
        self._ledger.commit(durably=True)
        if reason == DONE:
            self._clear_scratch(is_last=True)

    def _clear_scratch(self, *, is_last: bool) -> None:
        places = " UNION ".join(f"SELECT segment FROM {table}" for table in ("samples", "prefixes", "made", "expired"))
        clear_scratch(self._run_dir / "segments", [name for (name,) in self._ledger.select(places)], is_last=is_last)

    def num_well(self) -> int:
        """The number of first calls of an eager run that are over; it goes on after an error only if the flow caught it."""
        over = "SELECT ordinal FROM calls WHERE state IN ('done', 'failed') AND ordinal >= ? ORDER BY ordinal"
        ended = self._ledger.select(over, (self._num_well,))
        for (ordinal,) in ended:
            if ordinal != self._num_well:
                break
            self._num_well += 1
        return self._num_well

    def make_durable(self) -> None:
        """Make everything recorded so far durable; with shared storage, on that."""
        self._compare_lengths()
        self._ledger.commit(durably=True)
        if self._copying is not None:
            self._copying.copy()

    def gave(self, call: Call, ids: Sequence[int]) -> None:
        """Record which samples are in a call's result, if these are not all that it drew."""
        self._ledger.gave(call.ordinal, ids)

    def close(self) -> None:
        """Close all records, even if the disk is full for one of them."""
        with contextlib.ExitStack() as closing:
            if self._copying is not None:
                closing.callback(self._copying.close)
            for record in (self._trace, self._metrics, self._ledger):
                closing.callback(record.close)
            closing.callback(self.record.flush)

    def call_added(self, call: Call) -> None:
        """Record that the program made a call. One with agents is committed, with all before it, as their tools may have effects: a resume
        goes on only with samples of calls that the ledger has.
        """
        self._ledger.commit_if_due()
        if not self._is_known(call):
            self._ledger.call_added(call)
            if "agent" in call.options:
                self._ledger.commit()

    def samples_done(
        self,
        call: Call,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        finish: Sequence[int],
        place: Place,
        example: Sequence[str],
    ) -> None:
        self._ledger.samples_done(call.step, ids, num_tokens, num_generated, finish, place)
        self.tally.num_samples += len(ids)
        self.tally.num_tokens += sum(num_generated)
        if len(example) == 2:
            self.tally.example = (example[0], example[1])

    def rewarded(self, call: Call, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]] = ()) -> None:
        self._ledger.rewarded(call, ids, values, parts)
        self.tally.num_judged += len(ids)
        if call.options.get("on_error") is not None:
            self.num_failed.update((call.role, how) for of in parts for how in of if how in get_args(Failure) and len(of) == 1)

    def discarded(self, call: Call, last: int) -> None:
        """Record that samples of prompts beyond this position were not needed and do not count."""
        self._ledger.discarded(call.ordinal, last)

    def dropped(self, call: Call, ids: Sequence[int]) -> None:
        """Record samples that were late; finished or not, they do not count."""
        self._ledger.dropped(call, ids, "late")

    def filtered(self, call: Call, ids: Sequence[int]) -> None:
        """Record samples that a call filtered out."""
        self._ledger.filtered(call, ids)

    def sample_failed(self, call: Call, sample: int, error: str) -> None:
        self._ledger.sample_failed(call, sample, error)

    def decided(self, call: Call, decisions: Decisions) -> None:
        self._ledger.decided(decisions)

    def samples_stopped(
        self,
        call: Call,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        version_spans: Sequence[Sequence[VersionSpan]],
        place: Place,
    ) -> None:
        """Record the prefixes of samples that a call left unfinished."""
        self._ledger.samples_done(call.step, ids, num_tokens, num_generated, [Finish.ABORT] * len(ids), place)
        self._ledger.flushed(call.ordinal, ids, num_tokens, num_generated, version_spans, place)

    def samples_flushed(
        self,
        call: int,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        version_spans: Sequence[Sequence[VersionSpan]],
        place: Place,
    ) -> None:
        """Record the prefixes of samples in flight, which are gone on from if their worker is lost."""
        self._ledger.flushed(call, ids, num_tokens, num_generated, version_spans, place)

    def samples_went_on(self, call: int, ids: Sequence[int], had: Sequence[int], worker: str) -> None:
        """Record that samples go on from so many tokens each, on this worker."""
        self._ledger.went_on(call, ids, had, worker)

    def moved(self, call: Call, ids: Sequence[int], worker: str, cause: str) -> None:
        """Record that samples go on elsewhere than where their context is, for this cause."""
        self._ledger.moved(call.ordinal, ids, worker, cause)
        self._moved_now[cause] += len(ids)

    def samples_given_up(self, call: int, ids: Sequence[int], num_generated: Sequence[int]) -> None:
        """Record that samples with so many tokens were given up."""
        self._ledger.given_up(call, ids, num_generated)

    def tokens_lost(self, running: Mapping[int, int], worker: str, reason: str) -> int:
        """Record the in-flight samples of a lost worker, and return how many of their tokens were not written down."""
        return self._ledger.lost(running, worker, reason)

    def result(self, call: Call, place: Place) -> None:
        """Rows of a function's result are in a segment file."""
        self._ledger.result(call.ordinal, place)

    def forgotten(self, call: int) -> None:
        """Record that a call's rows are not needed any more."""
        self._ledger.forget_results(call)

    def read_back(self, run_dir: Path, key: int, ids: Sequence[int], *, is_reward: bool) -> Batch:
        """Rows of a call that the ledger knows (`read_back`)."""
        return read_back(self._ledger, run_dir, key, ids, is_reward=is_reward)

    def late(self, call: Call, ids: Sequence[int]) -> None:
        """Record samples that a call left to the next one of its line; they do not count unless that one gives them."""
        self._ledger.dropped(call, ids, "unused")

    def given(self, call: Call, ids: Sequence[int]) -> None:
        """Record that samples which earlier calls had left are in this call's result."""
        self._ledger.given(call, ids)

    def expired(self, call: Call, ids: Sequence[int]) -> None:
        """Record that prefixes of samples were too old for this call, which generates them anew."""
        self._ledger.expired(call, ids)

    def incident(self, kind: str, worker: str, what: str) -> None:
        """Record that a worker was lost or restarted."""
        self._ledger.incident(kind, worker, what)

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None:
        self._ledger.consumed(call.ordinal, epoch, ids)

    def call_done(self, call: Call, value: object) -> None:
        """Record that a call ended well. An update's numbers become metrics (`MetricNames`).

        One that made new weights, or changed a state, is committed with all before it. What is generated by them is in the segments at
        once: a resume that goes on with it must train on the same samples and rewards again, whatever time had decided about them.
        """
        if self._is_known(call):
            if call.method == "update":
                had = ["lengths"] if self._ledger.has_length_bias(call) else []
                self._names.of(call, {**(value if isinstance(value, dict) else {}), **dict.fromkeys(had, 0.0)})
                self._ledger.reapplied(self._attempt)
                if self._ledger.is_marked(_uncompared(call)):
                    self._to_compare.append(call)
            return
        self._ledger.call_ended(call.ordinal, "done")
        if isinstance(value, Batch) and ((call.drops and call.is_gated) or is_cut(call.options)):
            self.gave(call, value.ids.tolist())
        if not call.is_aligned:
            self.record.came_to(call, value)
        if call.method == "update" and isinstance(value, dict):
            self.tally.updated(call.step, value)
            if self._alarm is not None:
                self._alarm.hear(call, value, self.tally)
            idle_s, self._idle_now_s = self._idle_now_s, {}
            moved, self._moved_now = self._moved_now, Counter()
            named = self._names.of(call, value)
            self._metrics.write(max(call.step, 0), named, idle_s, moved)
            if call.step >= 0:
                self._to_compare.append(call)
                self._ledger.mark(_uncompared(call), 1)
            self.tally.rewarded(call.role, named)
        if call.writes:
            self.make_certain()

    def _is_known(self, call: Call) -> bool:
        """Whether an earlier attempt at the run finished the call, which is then repeated or only stands for its rows."""
        return self._resumed is not None and call.ordinal in self._resumed.done

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        for ordinal in (*call.under_refill, call.ordinal):
            self._ledger.call_ended(ordinal, "failed", str(error))
        if error.row >= 0:
            self.sample_failed(call, error.row, error.what)

    def logged(self, step: int, name: str, value: float) -> None:
        self._ledger.logged(step, name, value)
        self._metrics.write(max(step, 0), {name: value})
        self.tally.logs[name] = value

    def step_done(self, step: int) -> None:
        self.tally.steps_done(step + 1)
        self._compare_lengths()
        self._ledger.commit()

    def make_certain(self) -> None:
        """Commit everything recorded so far, so that it outlives this process."""
        self._ledger.commit()

    def commit_if_due(self) -> None:
        """Commit what was written a while ago; to be called now and then."""
        for kind, what in self._copying.news() if self._copying is not None else ():
            self._ledger.incident(kind, "controller", what)
        self._compare_lengths()
        self._ledger.commit_if_due()

    def _compare_lengths(self) -> None:
        """Write the length bias of updates that have ended. It takes milliseconds, for which the next step need not wait."""
        while self._to_compare:
            try:
                call = self._to_compare.popleft()
            except IndexError:  # A thread that ends the run took it.
                return
            self._metrics.write(call.step, self._names.of(call, as_metrics(self._ledger.length_bias(call))))
            self._ledger.unmark(_uncompared(call))

    def spans(self, block: SpanBlock) -> None:
        self._trace.append(block)
        for name, seconds, _ in block.counts:
            kind, _, cause = name.partition(", ")
            if kind == IDLE:
                before, self._idle_s[block.track, cause] = self._idle_s.get((block.track, cause), 0.0), seconds
                more_s = seconds - before if seconds >= before else seconds  # Less is what a new process of the worker counts.
                self._idle_now_s[cause] = self._idle_now_s.get(cause, 0.0) + more_s
