"""Resume a run: find what it had done when it stopped, and take over what its processes left unfinished.

    run directory --read_resume_state--> ResumeState --> ReplayBackend (which calls are made again, which answer from the record)
                                      --> trainers (parts of the checkpoint), scheduler (their versions), Journal (what is known)
    ResumeState --begin_resumption--> Resumption --begin--> the ledger as of the run's end, without what is made again
    a call that was not over --Resumption.of--> its finished rows, and the prefixes that its samples go on from (`Restored`)

Every call before the checkpoint's point is over and never made again, except those that make the state of a user's role. After the point,
what a trainer did is made again from recorded samples, and calls that were not over go on with what there is of them: of a generation its
samples; of a call on functions the rows that it gave, where each was made by itself. All other calls answer from the record.

At the begin, segments and meters are scanned for what a killed process had written but not reported. Samples that a line carries belong to
the call that left them, which decides again what is too old. What can't be used any more is counted as lost, so that the tokens balance
over all attempts (`m2flow.micro.records.audit`). Limits: eager runs write a generation down when it is over, so theirs begin anew; a record
that can't be read is made again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from m2flow.errors import M2FlowError, SpecError
from m2flow.macro.graph import Call
from m2flow.macro.replay import CallRecord
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import Restored
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.staleness import is_time_dependent, version_spans_of
from m2flow.micro.records.accounting import MetricNames, Tally, read_meter
from m2flow.micro.records.checkpoints import Checkpoint, newest_good
from m2flow.micro.records.flow_record import RunRecord, read_record
from m2flow.micro.records.ledger import IS_CURRENT, Ledger
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.segments import Found, Kind, Place, SegmentReader, read_segment, scan_segments, scratch_name, worker_of
from m2flow.samples import Batch, Finish, SampleId

EAGER = "eager"
"""Name of an eager run's segments."""
_KILLED = "the run was killed"
_GIVEN_UP = "its call was given up, and was made again"
_OTHERWISE = "the program made other calls when it went on"
_ANEW = "the record does not have the update that made its weights, which was made again"
_UNREADABLE = "its record could not be read"


class _Written(NamedTuple):
    """The best record of a sample in the files."""

    is_finished: bool
    num_generated: int
    num_noted: int
    """Beginnings and ends of tool calls, which add to an episode's record and not to what it generated."""
    found: Found


@final
class Resumption:
    """Takes over what the attempts before this one left unfinished.

    Args:
        calls: that the program made, and makes again.
        done: calls that were over, well.
        left: generation that is done -> samples that it left to the next of its line.
        first_redone: calls from this one on consume again.
        failed: calls that failed, and whose error the program caught; they are among those that are `done`.
    """

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        calls: Sequence[CallRecord],
        done: frozenset[int],
        left: Mapping[int, Sequence[int]],
        first_redone: int,
        failed: Collection[int] = (),
    ) -> None:
        self._failed = failed
        self._ledger = ledger
        self._directory = directory
        self._calls = calls
        self._done = done
        self._left = left
        self._first_redone = first_redone
        self._waiting = {call for call in range(len(calls)) if call not in done} | {call for call, samples in left.items() if samples}
        self._prefixes: dict[int, list[tuple[int, Place]]] = {}
        """Call that drew them -> samples that can go on, and where their prefixes are."""
        self._restarted: set[int] = set()
        """Samples of which nothing is left."""

    def begin(self, *, keeps: bool) -> None:
        """Bring the ledger to where the run stopped, and take out what is made again: with `keeps`, all but what `of` gives."""
        if keeps:
            self._add_records(self._unreported())
            self._count_unrecorded_tokens()
            self._ledger.knows({path.name: path.stat().st_size for path in self._directory.glob("*.seg")})
        self._undo_after_checkpoint()
        if not keeps:
            self._waiting.clear()
            for table in ("rewards", "filtered", "expired", "made"):
                self._ledger.change(f"DELETE FROM {table} WHERE call NOT IN (SELECT ordinal FROM calls)")
        for sample, *place in self._ledger.select("SELECT sample, segment, offset, size, checksum FROM prefixes"):
            self._prefixes.setdefault(SampleId.unpack(sample).call, []).append((sample, _place(place)))
        stopped = f"SELECT id, segment, offset, size, checksum FROM samples s WHERE finish = {int(Finish.ABORT)} AND {IS_CURRENT}"
        for sample, *place in self._ledger.select(f"{stopped} AND id NOT IN (SELECT sample FROM prefixes)"):
            self._prefixes.setdefault(SampleId.unpack(sample).call, []).append((sample, _place(place)))

    def of(self, call: Call, stage: Stage) -> Restored | None:
        """What is left of a call that is made again now, or that left samples to one that is. The second time, nothing."""
        if call.ordinal not in self._waiting or call.engine not in ("rollout", "function"):
            return None
        self._waiting.discard(call.ordinal)
        if call.engine == "rollout":
            finished, flushed = self._samples(call)
            return Restored(tuple(finished), tuple(flushed)) if finished or flushed else None
        is_by_row = call.is_aligned and stage.unit == "sample" and not stage.is_barrier
        if is_by_row and not (call.reads or call.writes or call.is_gated):
            rows = self._rows(call)
            return Restored((rows,)) if rows is not None else None
        for table in ("rewards", "filtered", "made"):
            self._ledger.change(f"DELETE FROM {table} WHERE call=?", (call.ordinal,))
        return None

    # ---- records that were not reported

    def _unreported(self) -> list[Found]:
        """Records in the files of all processes that the ledger does not know."""
        known = dict(self._ledger.select("SELECT file, size FROM known"))
        names = sorted({worker_of(path.name) for path in self._directory.glob("*.seg")} - {EAGER, scratch_name(EAGER, "running")})
        return [one for name in names for one in scan_segments(self._directory, name, known) if one.kind is not Kind.RESULT]

    def _add_records(self, records: Sequence[Found]) -> None:
        """Add records to the ledger. The best record of a sample counts: it is unknown which process wrote last, and tokens only become
        more.
        """
        best: dict[int, _Written] = {}
        given_up = [found for found in records if found.kind is Kind.GIVEN_UP]
        records = [found for found in records if found.kind is not Kind.GIVEN_UP]
        reader = SegmentReader(self._directory)
        for found in records:
            rows = reader.read(found.place)
            counts = call_semantics.num_generated_of(rows), call_semantics.num_noted_of(rows)
            anew = self._of_what_is_made_again(found, rows)
            for packed, count, num_noted in zip(rows.ids.tolist(), *counts, strict=True):
                if packed in anew:
                    self._ledger.lost({packed: count} if found.kind is not Kind.RUNNING else {}, worker_of(found.place[0]), _ANEW)
                    continue
                written = _Written(found.kind is Kind.FINISHED, count, num_noted, found)
                if packed not in best or written[:3] > best[packed][:3]:
                    best[packed] = written
        mine_of: dict[Place, list[int]] = {}
        for packed, written in best.items():
            mine_of.setdefault(written.found.place, []).append(packed)
        for found in records:
            mine = [packed for packed in mine_of.get(found.place, ()) if not self._is_known(packed, found.place)]
            if found.kind is not Kind.FINISHED:
                mine = [packed for packed in mine if self._adds(packed, best[packed])]
            if mine:
                self._told(found, read_segment(self._directory, found.place, mine).select(np.array(mine, np.int64)))
        for found in given_up:
            rows = reader.read(found.place)
            self._given_up(found.call, dict(zip(rows.ids.tolist(), map(int, rows.dense("num_generated")), strict=True)))

    def _of_what_is_made_again(self, found: Found, rows: Batch) -> set[int]:
        """The samples of a record with tokens of weights whose update is not over in the ledger: it is made again, perhaps from others.

        A process commits what its weights were made from before it samples from them (`m2flow.micro.records.journal`); but a copy of the
        ledger may be older than the segments beside it.
        """
        if not 0 <= found.call < len(self._calls) or "versions" not in rows:
            return set()
        role = self._calls[found.call].name.rpartition(".")[0]
        spans_of = zip(rows.ids.tolist(), version_spans_of(rows), strict=True)
        return {
            packed for packed, of in spans_of if any(f"{role}.weights@{one.version}" in self._open_versions for one in of if not one.by)
        }

    @functools.cached_property
    def _open_versions(self) -> frozenset[str]:
        """What is written by calls that are not over."""
        still = [call for call in self._calls if call.ordinal not in self._done]
        return frozenset(effect.removeprefix("writes ") for call in still for effect in call.effects if effect.startswith("writes "))

    def _adds(self, sample: int, written: _Written) -> bool:
        """Whether a record of an unfinished sample has more than the ledger's."""
        known = self._ledger.tokens_of(sample)
        if written.num_generated != known or not written.num_noted:
            return written.num_generated > known
        noted = 0
        for table in ("prefixes WHERE sample=?", f"samples s WHERE id=? AND {IS_CURRENT}"):
            for place in self._ledger.select(f"SELECT {_PLACE} FROM {table}", (sample,)):
                with contextlib.suppress(M2FlowError):  # What can't be read has nothing to go on from.
                    rows = read_segment(self._directory, _place(place), [sample])
                    noted = max([noted, *call_semantics.num_noted_of(rows)])
        return written.num_noted > noted

    def _is_known(self, sample: int, place: Place) -> bool:
        """Whether the ledger knows this record of a sample, be it one that was too old for a call."""
        where, values = "segment=? AND offset=?", place[:2]
        found = self._ledger.select(f"SELECT 1 FROM samples WHERE id=? AND {where}", (sample, *values))
        return bool(found or self._ledger.select(f"SELECT 1 FROM expired WHERE sample=? AND {where}", (sample, *values)))

    def _told(self, found: Found, rows: Batch) -> None:
        ids, total, made = rows.ids.tolist(), call_semantics.num_tokens_of(rows), call_semantics.num_generated_of(rows)
        step = self._calls[found.call].step if 0 <= found.call < len(self._calls) else -1
        if found.kind is not Kind.RUNNING:
            finish = call_semantics.finish_of(rows) if found.kind is Kind.FINISHED else [int(Finish.ABORT)] * len(ids)
            self._ledger.samples_done(step, ids, total, made, finish, found.place)
        if found.kind is not Kind.FINISHED:
            self._ledger.flushed(found.call, ids, total, made, version_spans_of(rows), found.place)

    def _given_up(self, call: int, counts: Mapping[int, int]) -> None:
        if call in self._done:
            self._ledger.given_up(call, list(counts), list(counts.values()))
        else:
            self._ledger.lost(counts, "", _GIVEN_UP)

    def _count_unrecorded_tokens(self) -> None:
        """Count the tokens that are in no record as lost."""
        known = {file for (file,) in self._ledger.select("SELECT file FROM known")}
        for path in sorted(self._directory.glob("*.meter")):
            if path.name not in known:
                self._ledger.lost(read_meter(path).running, worker_of(path.with_suffix(".seg").name), _KILLED)
                self._ledger.knows({path.name: 1})

    # ---- what is made again

    def _undo_after_checkpoint(self) -> None:
        """Undo in the ledger what was consumed after the checkpoint, what `of` does not need of calls that were not over, and all of
        calls that the program may not make again.
        """
        ledger, num_calls = self._ledger, len(self._calls)
        self._count_lost_of_redone(beyond=num_calls)
        ledger.change("DELETE FROM consumption WHERE update_call >= ?", (self._first_redone,))
        failed = ", ".join(map(str, sorted(self._failed)))
        ledger.change(f"DELETE FROM calls WHERE (state <> 'done' AND ordinal NOT IN ({failed})) OR ordinal >= ?", (num_calls,))
        for table in ("discarded", "decisions", "dropped", "failed", "results", "cursors"):
            ledger.change(f"DELETE FROM {table} WHERE call NOT IN (SELECT ordinal FROM calls)")
        for table in ("rewards", "filtered", "made"):
            ledger.change(f"DELETE FROM {table} WHERE call >= ?", (num_calls,))
        ledger.change("DELETE FROM made WHERE call IN (SELECT ordinal FROM calls)")  # What they need is made again.
        for table in ("samples", "seen"):
            ledger.change(f"DELETE FROM {table} WHERE call >= ?", (num_calls,))
        ledger.change(f"DELETE FROM seen WHERE kind='error' AND call NOT IN ({failed})")
        ledger.change("DELETE FROM record WHERE kind='call' AND position >= ?", (num_calls,))

    def _count_lost_of_redone(self, beyond: int) -> None:
        """Count the tokens of samples that are made again from their beginning, or perhaps not at all, and of given up ones."""
        ledger = self._ledger
        given_up = ledger.select("SELECT sample, call, num_generated FROM given_up")
        drop = [sample for sample, call, _ in given_up if call not in self._done or SampleId.unpack(sample).call >= beyond]
        counts = {sample: count for sample, _, count in given_up}
        for sample in drop:
            ledger.change("DELETE FROM given_up WHERE sample=?", (sample,))
        ledger.lost({sample: counts[sample] for sample in drop}, "", _GIVEN_UP)
        had = dict(ledger.select(f"SELECT id, num_generated FROM samples s WHERE call >= ? AND {IS_CURRENT}", (beyond,)))
        for sample, count in ledger.select("SELECT sample, num_generated FROM prefixes"):
            if SampleId.unpack(sample).call >= beyond:
                had[sample] = max(count, had.get(sample, 0))
        self._count_lost(had, _OTHERWISE)

    def _count_lost(self, had: Mapping[int, int], reason: str) -> None:
        """Count these samples and their tokens as lost."""
        for sample in had:
            self._ledger.change("DELETE FROM samples WHERE id=?", (sample,))
            self._ledger.change("DELETE FROM prefixes WHERE sample=?", (sample,))
        self._ledger.lost(had, "", reason)

    # ---- what is kept

    def _samples(self, call: Call) -> tuple[list[m.Finished], list[m.Flushed]]:
        where = f"FROM samples s WHERE finish <> {int(Finish.ABORT)} AND {IS_CURRENT} AND"
        if call.ordinal in self._done:
            left = self._left.get(call.ordinal, ())
            done = [row for packed in left for row in self._ledger.select(f"SELECT id, {_PLACE} {where} id=?", (packed,))]
            drawn_by = {SampleId.unpack(packed).call for packed in left}
            known, mine = [entry for drawn in drawn_by for entry in self._prefixes.get(drawn, ())], set(left)
        else:
            done = self._ledger.select(f"SELECT id, {_PLACE} {where} call=?", (call.ordinal,))
            known = self._prefixes.get(call.ordinal, [])
            mine = {packed for packed, _ in known}
        finished, flushed = [], []
        for place, rows in self._read((packed, _place(place)) for packed, *place in done):
            finished.append(_finished(call, rows, place))
        for place, rows in self._read((packed, place) for packed, place in known if packed in mine):
            numbers = call_semantics.num_tokens_of(rows), call_semantics.num_generated_of(rows)
            flushed.append(m.Flushed(call.ordinal, rows.ids.tolist(), *numbers, version_spans_of(rows), place))
        for message in flushed:  # Some were stopped, and are known by that alone.
            self._ledger.flushed(
                call.ordinal, message.ids, message.num_tokens, message.num_generated, message.version_spans, message.segment
            )
        return finished, flushed

    def _read(self, samples: Iterable[tuple[int, Place]]) -> list[tuple[Place, Batch]]:
        """Read the rows of these samples, by record."""
        by_place: dict[Place, list[int]] = {}
        for packed, place in samples:
            by_place.setdefault(place, []).append(packed)
        found = []
        for place, ids in by_place.items():
            try:
                found.append((place, read_segment(self._directory, place, set(ids)).select(np.array(ids, np.int64))))
            except M2FlowError:
                self._restarted.update(ids)
                self._count_lost({packed: self._ledger.tokens_of(packed) for packed in ids}, _UNREADABLE)
        return found

    def _rows(self, call: Call) -> m.Finished | None:
        """Rows that a call on functions gave one by one, of samples that have not changed since."""
        ordinal, dropped = (
            call.ordinal,
            [row for (row,) in self._ledger.select("SELECT sample FROM filtered WHERE call=?", (call.ordinal,))],
        )
        for sample in self._restarted:
            for table in ("rewards", "filtered"):
                self._ledger.change(f"DELETE FROM {table} WHERE call=? AND sample=?", (ordinal, sample))
        if call_semantics.gives_reward(call):
            rewards = self._ledger.select("SELECT sample, value FROM rewards WHERE call=? ORDER BY sample", (ordinal,))
            rows = Batch(np.array([i for i, _ in rewards], np.int64), {"reward": np.array([value for _, value in rewards], np.float64)})
        else:
            rows = self._result(ordinal)
        ids = [packed for packed in rows.ids.tolist() if packed not in self._restarted]
        dropped = [packed for packed in dropped if packed not in self._restarted]
        if not ids and not dropped:
            return None
        rows = rows.select(np.array(ids, np.int64))
        finish = [int(Finish.STOP)] * len(ids)
        return m.Finished(-1, ordinal, ids, call_semantics.num_tokens_of(rows), [0] * len(ids), [], finish, [], None, dropped)

    def _result(self, call: int) -> Batch:
        """The rows that a function gave; empty if one of its records can't be read."""
        places = [_place(place) for place in self._ledger.select(f"SELECT {_PLACE} FROM made WHERE call=?", (call,))]
        try:
            return Batch.concat([read_segment(self._directory, place) for place in places])
        except M2FlowError:
            for table in ("filtered", "made"):
                self._ledger.change(f"DELETE FROM {table} WHERE call=?", (call,))
            return Batch.concat([])


_PLACE = "segment, offset, size, checksum"


def _place(columns: Sequence[object]) -> Place:
    name, offset, size, checksum = columns
    assert isinstance(name, str)
    assert isinstance(offset, int)
    assert isinstance(size, int)
    assert isinstance(checksum, int)
    return name, offset, size, checksum


def _finished(call: Call, rows: Batch, place: Place) -> m.Finished:
    total, made, finish = call_semantics.num_tokens_of(rows), call_semantics.num_generated_of(rows), call_semantics.finish_of(rows)
    version_spans = version_spans_of(rows) if is_time_dependent(call) else []
    return m.Finished(-1, call.ordinal, rows.ids.tolist(), total, made, [], finish, [], place, [], version_spans)


# ---- how far the run had come

DONE = "done"
"""How an attempt ends that has come to the program's end."""


@dataclass(frozen=True, eq=False)
class ResumeState:
    """A stopped run: its checkpoint, and which of its calls are over."""

    record: RunRecord
    checkpoint: Checkpoint | None
    """The checkpoint to resume from. None: weights and optimisers begin as the run did, and all updates are made again."""
    done: frozenset[int]
    """Calls that ended well."""
    failed: Mapping[int, tuple[int, M2FlowError]]
    """Calls that failed, and whose error the program caught -> the call that failed by itself, and its error. They stay as they are."""
    logged: Mapping[tuple[int, str], int]
    """(step, name) -> how many such logs of the program were written. Not the first of all logs: one whose call failed was passed over,
    and later ones of its step were written.
    """
    attempt: int
    """Number of the attempt that begins now; the first of a run was 0."""
    metrics_size: int
    left: Mapping[int, tuple[int, ...]]
    """Generation -> samples that it left to the next of its line, and which no call has given since."""
    first_look_again: int
    """The first look of the program that had an error; later ones are made again."""
    may_change: frozenset[str] = frozenset()
    """Names of calls of a function of the user's that failed and ended the program, so that it may be mended before the run goes on."""
    tally: Tally = field(default_factory=Tally)

    @property
    def num_included(self) -> int:
        """Calls that the restored weights include."""
        return 0 if self.checkpoint is None else self.checkpoint.point.num_calls

    @property
    def versions(self) -> Mapping[str, int]:
        """Weight versions of the trainers, by role."""
        return {} if self.checkpoint is None else self.checkpoint.point.versions

    @property
    def where(self) -> str:
        """Where the run resumes, in words."""
        return "its beginning" if self.checkpoint is None else f"the checkpoint {self.checkpoint.path.name}"

    @property
    def parts(self) -> dict[str, str]:
        """Role -> the checkpoint part that its trainer begins with."""
        return {} if self.checkpoint is None else self.checkpoint.parts

    def redo(self, call: Call) -> bool:
        """Whether a recorded call is made again."""
        if call.ordinal not in self.done:
            return call.ordinal not in self.failed
        if call.engine == "train":
            return call.ordinal >= self.num_included and (bool(call.writes) or not self.record.has(call.ordinal))
        if call.engine == "function":  # The state of a user's role is only in its object.
            return bool(call.writes) or (bool(call.reads) and not self.record.has(call.ordinal))
        return False

    def begin_resumption(self, ledger: Ledger, run_dir: Path, *, keeps: bool) -> Resumption:
        """Start a resumption on the ledger; with `keeps`, unfinished samples go on too."""
        over = self.done | self.failed.keys()
        found = Resumption(ledger, run_dir / "segments", self.record.calls, over, self.left, self.num_included, self.failed)
        found.begin(keeps=keeps)
        ledger.forget_looks(self.first_look_again)
        ledger.attempt_began(self.attempt, "" if self.checkpoint is None else self.checkpoint.path.name, self.num_included)
        return found


def read_resume_state(run_dir: Path, warn: Callable[[str], None]) -> ResumeState:
    """Read how far a stopped run has come.

    Args:
        warn: is told of checkpoints that are not whole.
    Raises:
        SpecError: there is no run, one that can't be resumed, or one that has come to its end.
    """
    record = read_record(run_dir)
    try:
        with reading_ledger(run_dir) as db:
            attempts = db.execute("SELECT number, reason FROM attempts ORDER BY number").fetchall()
            if attempts and attempts[-1][1] == DONE:
                raise SpecError(
                    f"the run in {run_dir} has come to its end: there is nothing to resume",
                    now="`m2flow view` shows it; `m2flow run` begins another one.",
                )
            _check_segments(db, run_dir)
            roots = _roots(db, record)
            num_calls, num_looks = _well(db, record, roots)
            failed = _caught(db, record, roots, num_calls, num_looks)
            done = {call for (call,) in db.execute("SELECT ordinal FROM calls WHERE state='done' AND ordinal < ?", (num_calls,))}
            logged = {(step, name): count for step, name, count in db.execute("SELECT step, name, COUNT(*) FROM logs GROUP BY step, name")}
            marks = dict(db.execute("SELECT name, value FROM marks"))
            left: dict[int, list[int]] = {}
            for sample, call in db.execute("SELECT sample, call FROM dropped WHERE reason='unused' ORDER BY sample"):
                left.setdefault(call, []).append(sample)
            tally = _tally(db, record, done, done | failed.keys())
    except sqlite3.Error as error:
        raise SpecError(f"the ledger of {run_dir} can't be read: {error}", now="Begin a new run.") from None
    kept = RunRecord(run_dir, record.calls[:num_calls], record.looks[:num_looks], record.logs, record.seed)
    over = done | failed.keys()
    is_of_it = lambda point: point.num_calls <= num_calls and over.issuperset(range(point.num_calls))  # noqa: E731
    return ResumeState(
        kept,
        newest_good(run_dir, warn, is_of_it),
        frozenset(done),
        failed,
        logged,
        (attempts[-1][0] if attempts else 0) + 1,
        marks.get("metrics", 0),
        {call: tuple(samples) for call, samples in left.items()},
        num_looks,
        _mendable(record, set(roots.values()) - failed.keys()),
        tally,
    )


def read_mendable(run_dir: Path, record: RunRecord) -> frozenset[str]:
    """The names of calls whose function may be another when the run goes on (`ResumeState.may_change`)."""
    with reading_ledger(run_dir) as db:
        return _mendable(record, {call for (call,) in db.execute("SELECT ordinal FROM calls WHERE state='failed'")})


def _check_segments(db: sqlite3.Connection, run_dir: Path) -> None:
    """Check that no segment file with rows of the run is missing. A process would create it anew, and places would point into that.

    Raises:
        SpecError: a file is gone that has rows of the run. A process would begin it anew, and what lay there be read from that.
    """
    tables = " UNION ".join(f"SELECT DISTINCT segment FROM {table}" for table in ("samples", "prefixes", "made", "expired"))
    missing = sorted(name for (name,) in db.execute(tables) if name and not (run_dir / "segments" / name).exists())
    if missing:
        raise SpecError(
            f"the run in {run_dir} can't go on: {len(missing)} of its segment files, which have its samples, are missing: "
            + ", ".join(missing[:5]),
            now="Put them back from a copy, or begin a new run.",
        )


def _roots(db: sqlite3.Connection, record: RunRecord) -> dict[int, int]:
    """Failed call -> the call that caused it by failing itself: of the failed calls that it needs, the first."""
    failed = {call for (call,) in db.execute("SELECT ordinal FROM calls WHERE state='failed'")}
    roots: dict[int, int] = {}
    writers: dict[str, int] = {}
    for call in record.calls if failed else ():
        told = [effect.partition(" ") for effect in call.effects]
        read = [effect.rpartition("@")[0] for how, _, effect in told if how == "reads"]
        needs = [*(ordinal for _, ordinal in call.inputs), *(writers[resource] for resource in read if resource in writers)]
        needs += [int(value) for name, value in call.hidden if name == "carries_from"]
        found = [roots[ordinal] for ordinal in needs if ordinal in roots]
        if found or call.ordinal in failed:
            roots[call.ordinal] = min([*found, call.ordinal])
        writers |= {effect.rpartition("@")[0]: call.ordinal for how, _, effect in told if how == "writes"}
    return roots


def _well(db: sqlite3.Connection, record: RunRecord, roots: Mapping[int, int]) -> tuple[int, int]:
    """Calls and looks that the program made before it met the error that ended it: these it repeats for certain. Errors that it went on
    from were caught.
    """
    failed = {call for (call,) in db.execute("SELECT call FROM seen WHERE kind='error'")}
    for number, look in enumerate(record.looks):
        is_last = number == len(record.looks) - 1 and look.num_calls == len(record.calls)
        if look.call in failed and (is_last or look.call not in roots):
            return look.num_calls, number
    return len(record.calls), len(record.looks)


def _caught(
    db: sqlite3.Connection, record: RunRecord, roots: Mapping[int, int], num_calls: int, num_looks: int
) -> dict[int, tuple[int, M2FlowError]]:
    seen = {call for (call,) in db.execute("SELECT call FROM seen WHERE kind='error'")} if roots else set()
    errors: dict[int, M2FlowError] = {}
    for look in record.looks[:num_looks]:
        if look.call in seen and look.call in roots and roots[look.call] not in errors:
            value = record.value(look.call)
            assert isinstance(value, M2FlowError)
            errors[roots[look.call]] = value
    return {call: (root, errors[root]) for call, root in roots.items() if root in errors and call < num_calls}


def _mendable(record: RunRecord, failed: Collection[int]) -> frozenset[str]:
    """Names of failed calls of functions without state. What one with a state has come to is in its object alone."""
    calls = [record.calls[ordinal] for ordinal in failed]
    return frozenset(call.name for call in calls if not call.effects and "function" in dict(call.hidden))


def _tally(db: sqlite3.Connection, record: RunRecord, done: set[int], over: set[int]) -> Tally:
    """Counts of the run up to where it stopped, without calls that are made again."""
    tally = Tally()
    for call, num_samples, num_tokens in db.execute(
        f"SELECT call, COUNT(*), SUM(num_generated) FROM samples WHERE finish <> {int(Finish.ABORT)} GROUP BY call"
    ):
        if call in done:
            tally.num_samples += num_samples
            tally.num_tokens += num_tokens
    names = MetricNames()
    for recorded in record.calls:
        if recorded.ordinal in done and recorded.name.endswith(".update"):
            value, role = record.value(recorded.ordinal), recorded.name.removesuffix(".update")
            if isinstance(value, dict):
                tally.updated(recorded.step, value)
                tally.rewarded(role, names.at(role, recorded.step, (recorded.site,), value))
    open_steps = [recorded.step for recorded in record.calls if recorded.ordinal not in over and recorded.step >= 0]
    last = max((recorded.step for recorded in record.calls), default=-1)
    tally.num_steps = min(open_steps, default=last + 1)
    logs = db.execute("SELECT name, value FROM logs ORDER BY rowid")
    tally.logs = {name: math.nan if value is None else value for name, value in logs}  # SQLite has no NaN.
    tally.steps_before, tally.samples_before, tally.tokens_before = tally.num_steps, tally.num_samples, tally.num_tokens
    return tally
