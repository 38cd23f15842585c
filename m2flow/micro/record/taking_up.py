"""What an earlier process of the run left unfinished, for the one that goes on: nothing that was written down is made again.

    segments and meters that it could not report any more --begin--> the ledger, as of its end; what is made again is taken out
    a call that was not over --of--> its finished rows, and the prefixes that its samples go on from (`Restored`)

Of a generation these are its samples; of a call on functions the rows that it gave, where each was made by itself. Samples that a line
carries go by the call that left them, which decides again what is too old. What can't be used any more is counted as lost, so that the
account of tokens holds over all attempts (`m2flow.micro.record.account`). Limit: eager runs write a generation down when it is over, so
theirs begin anew; and a record that can't be read is made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.macro.recording import CallRecord
from m2flow.micro import messages as m
from m2flow.micro.plan import Stage
from m2flow.micro.record.decisions import stretches_of
from m2flow.micro.record.ledger import IS_CURRENT, Ledger
from m2flow.micro.record.meter import read_meter
from m2flow.micro.record.segments import Found, Kind, Place, read_segment, scan_segments, worker_of
from m2flow.micro.scheduling.events import Restored
from m2flow.micro.scheduling.staleness import is_time_dependent
from m2flow.micro.work import performing
from m2flow.samples import Batch, Finish, SampleId

EAGER = "eager"
"""The name of an eager run's segments."""
_KILLED = "the run was killed"
_GIVEN_UP = "its call was given up, and was made again"
_OTHERWISE = "the program made other calls when it went on"
_UNREADABLE = "its record could not be read"


class _Written(NamedTuple):
    """The best that files say of a sample."""

    is_finished: bool
    num_generated: int
    found: Found


@final
class TakingUp:
    """Of one resumption.

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
        """Call that drew them -> samples that can go on, and where they are."""
        self._made_anew: set[int] = set()
        """Samples of which nothing is left."""

    def begin(self, *, keeps: bool) -> None:
        """Bring the ledger to where the run stopped, and take out what is made again: with `keeps`, all but what `of` gives."""
        if keeps:
            self._take_in(self._unreported())
            self._settle_meters()
            self._ledger.knows({path.name: path.stat().st_size for path in self._directory.glob("*.seg")})
        self._go_back()
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
        """What there is of a call that is made again now, or left samples to one that is. Asked again, nothing."""
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

    # What had not been said

    def _unreported(self) -> list[tuple[Found, Batch]]:
        """Records that the ledger does not know, in files of all processes."""
        known = dict(self._ledger.select("SELECT file, size FROM known"))
        names = sorted({worker_of(path.name) for path in self._directory.glob("*.seg")} - {EAGER})
        found = [one for name in names for one in scan_segments(self._directory, name, known) if one.kind is not Kind.RESULT]
        return [(one, read_segment(self._directory, one.place)) for one in found]

    def _take_in(self, records: Sequence[tuple[Found, Batch]]) -> None:
        """A sample is what the best record says: which process wrote last is not known, and tokens only become more."""
        best: dict[int, _Written] = {}
        for found, rows in records:
            if found.kind is Kind.GIVEN_UP:
                continue
            for packed, count in zip(rows.ids.tolist(), performing.num_generated_of(rows), strict=True):
                written = _Written(found.kind is Kind.FINISHED, count, found)
                if packed not in best or written[:2] > best[packed][:2]:
                    best[packed] = written
        for found, rows in records:
            if found.kind is Kind.GIVEN_UP:
                continue
            mine = [packed for packed in rows.ids.tolist() if best[packed].found is found and not self._is_known(packed, found.place)]
            if found.kind is not Kind.FINISHED:
                mine = [packed for packed in mine if best[packed].num_generated > self._ledger.tokens_of(packed)]
            if mine:
                self._told(found, rows.select(np.array(mine, np.int64)))
        for found, rows in records:
            if found.kind is Kind.GIVEN_UP:
                self._given_up(found.call, dict(zip(rows.ids.tolist(), map(int, rows.dense("num_generated")), strict=True)))

    def _is_known(self, sample: int, place: Place) -> bool:
        """Whether the ledger knows this record of a sample: also one that was too old for a call."""
        where, values = "segment=? AND offset=?", place[:2]
        found = self._ledger.select(f"SELECT 1 FROM samples WHERE id=? AND {where}", (sample, *values))
        return bool(found or self._ledger.select(f"SELECT 1 FROM expired WHERE sample=? AND {where}", (sample, *values)))

    def _told(self, found: Found, rows: Batch) -> None:
        ids, total, made = rows.ids.tolist(), performing.num_tokens_of(rows), performing.num_generated_of(rows)
        step = self._calls[found.call].step if 0 <= found.call < len(self._calls) else -1
        if found.kind is not Kind.RUNNING:
            finish = performing.finish_of(rows) if found.kind is Kind.FINISHED else [int(Finish.ABORT)] * len(ids)
            self._ledger.samples_done(step, ids, total, made, finish, found.place)
        if found.kind is not Kind.FINISHED:
            self._ledger.flushed(found.call, ids, total, made, stretches_of(rows), found.place)

    def _given_up(self, call: int, counts: Mapping[int, int]) -> None:
        if call in self._done:
            self._ledger.given_up(call, list(counts), list(counts.values()))
        else:
            self._ledger.lost(counts, "", _GIVEN_UP)

    def _settle_meters(self) -> None:
        """Tokens that are in no record."""
        known = {file for (file,) in self._ledger.select("SELECT file FROM known")}
        for path in sorted(self._directory.glob("*.meter")):
            if path.name not in known:
                self._ledger.lost(read_meter(path).running, worker_of(path.with_suffix(".seg").name), _KILLED)
                self._ledger.knows({path.name: 1})

    # What is made again

    def _go_back(self) -> None:
        """What was consumed after the checkpoint will be consumed again; of calls that were not over only what `of` needs stays; and of
        calls that the program will perhaps not make, nothing."""
        ledger, num_calls = self._ledger, len(self._calls)
        self._lose(beyond=num_calls)
        ledger.change("DELETE FROM consumption WHERE update_call >= ?", (self._first_redone,))
        failed = ", ".join(map(str, sorted(self._failed)))
        ledger.change(f"DELETE FROM calls WHERE (state <> 'done' AND ordinal NOT IN ({failed})) OR ordinal >= ?", (num_calls,))
        for table in ("discarded", "decisions", "dropped", "failed", "results", "cursors"):
            ledger.change(f"DELETE FROM {table} WHERE call NOT IN (SELECT ordinal FROM calls)")
        for table in ("rewards", "filtered", "made"):
            ledger.change(f"DELETE FROM {table} WHERE call >= ?", (num_calls,))
        ledger.change("DELETE FROM made WHERE call IN (SELECT ordinal FROM calls)")  # What is needed of them is made again.
        for table in ("samples", "seen"):
            ledger.change(f"DELETE FROM {table} WHERE call >= ?", (num_calls,))
        ledger.change(f"DELETE FROM seen WHERE kind='error' AND call NOT IN ({failed})")
        ledger.change("DELETE FROM record WHERE kind='call' AND position >= ?", (num_calls,))

    def _lose(self, beyond: int) -> None:
        """Count what samples had that are made again from their beginning, or perhaps not at all; and what was given up of others."""
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
        self._forget(had, _OTHERWISE)

    def _forget(self, had: Mapping[int, int], reason: str) -> None:
        """Nothing is left of these samples, which had so many tokens."""
        for sample in had:
            self._ledger.change("DELETE FROM samples WHERE id=?", (sample,))
            self._ledger.change("DELETE FROM prefixes WHERE sample=?", (sample,))
        self._ledger.lost(had, "", reason)

    # What is kept

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
            numbers = performing.num_tokens_of(rows), performing.num_generated_of(rows)
            flushed.append(m.Flushed(call.ordinal, rows.ids.tolist(), *numbers, stretches_of(rows), place))
        for message in flushed:  # Some were stopped, and known by that alone.
            self._ledger.flushed(call.ordinal, message.ids, message.num_tokens, message.num_generated, message.stretches, message.segment)
        return finished, flushed

    def _read(self, samples: Iterable[tuple[int, Place]]) -> list[tuple[Place, Batch]]:
        """The rows of these samples, by record."""
        by_place: dict[Place, list[int]] = {}
        for packed, place in samples:
            by_place.setdefault(place, []).append(packed)
        found = []
        for place, ids in by_place.items():
            try:
                found.append((place, read_segment(self._directory, place).select(np.array(ids, np.int64))))
            except M2FlowError:
                self._made_anew.update(ids)
                self._forget({packed: self._ledger.tokens_of(packed) for packed in ids}, _UNREADABLE)
        return found

    def _rows(self, call: Call) -> m.Finished | None:
        """What a call on functions gave, one by one, of samples that are as they were."""
        ordinal, dropped = (
            call.ordinal,
            [row for (row,) in self._ledger.select("SELECT sample FROM filtered WHERE call=?", (call.ordinal,))],
        )
        for sample in self._made_anew:
            for table in ("rewards", "filtered"):
                self._ledger.change(f"DELETE FROM {table} WHERE call=? AND sample=?", (ordinal, sample))
        if performing.gives_reward(call):
            rewards = self._ledger.select("SELECT sample, value FROM rewards WHERE call=? ORDER BY sample", (ordinal,))
            rows = Batch(np.array([i for i, _ in rewards], np.int64), {"reward": np.array([value for _, value in rewards], np.float64)})
        else:
            rows = self._result(ordinal)
        ids = [packed for packed in rows.ids.tolist() if packed not in self._made_anew]
        dropped = [packed for packed in dropped if packed not in self._made_anew]
        if not ids and not dropped:
            return None
        rows = rows.select(np.array(ids, np.int64))
        finish = [int(Finish.STOP)] * len(ids)
        return m.Finished(-1, ordinal, ids, performing.num_tokens_of(rows), [0] * len(ids), [], finish, [], None, dropped)

    def _result(self, call: int) -> Batch:
        """The rows that a function gave. If one of its records can't be read, none."""
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
    total, made, finish = performing.num_tokens_of(rows), performing.num_generated_of(rows), performing.finish_of(rows)
    stretches = stretches_of(rows) if is_time_dependent(call) else []
    return m.Finished(-1, call.ordinal, rows.ids.tolist(), total, made, [], finish, [], place, [], stretches)
