"""The ledger of a run, an SQLite database: each sample's identity, where its tokens are, its rewards, the updates that used it, its ending.

    consumed   some update trained on it
    dropped    it was late, and in no result
    filtered   a call that decides what stays left it out
    expired    its prefix was too old for the call that took it over, and it was not finished anew
    failed     a call failed on it
    unused     nothing trained on it: beyond the last prompt that was needed, carried and never given, or in no update's batch

The tables hold facts, which may overlap: a sample that one op filtered may be trained on all the same, and a judged one may turn out not to
be needed. A sample's ending is the first in this order that holds (view `endings`). It can be read while the run goes on: then `unused` may
still become another.

SQLite in WAL mode, on a local disk; tokens are in segment files (`m2flow.micro.records.segments`), which the ledger points to. Writes
gather in a transaction of about a second, so a crash loses at most that. Several threads may write, but only one commits, between two
events: the consequences of an event are in the ledger all together, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from m2flow.errors import HostError, InternalError, SpecError, naming_host_errors
from m2flow.macro.graph import Call
from m2flow.micro.protocol.staleness import Decision, Decisions, VersionSpan
from m2flow.micro.records.accounting import Class, bias_of
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.segments import Place, read_segment
from m2flow.rollout_scheduling.lengths import Measured
from m2flow.samples import Batch, Finish, SampleId, Segment

ENDINGS = ("consumed", "dropped", "filtered", "expired", "failed", "unused")

_VIEW = """
CREATE TEMP VIEW endings AS
SELECT samples.id AS id,
    CASE WHEN used.sample IS NOT NULL THEN 'consumed'
         WHEN is_beyond THEN 'unused'
         WHEN dropped.reason = 'unused' AND old.sample IS NULL THEN 'unused'
         WHEN dropped.reason = 'unused' THEN 'expired'
         WHEN dropped.sample IS NOT NULL THEN 'dropped'
         WHEN left_out.sample IS NOT NULL THEN 'filtered'
         WHEN failed.sample IS NOT NULL THEN 'failed'
         ELSE 'unused' END AS ending,
    CASE WHEN used.sample IS NOT NULL THEN 'trained on by ' || (SELECT name || ', ' || site FROM calls WHERE ordinal = used.call)
         WHEN is_beyond THEN 'its prompt lies beyond the last that was needed'
         WHEN dropped.reason = 'unused' AND old.sample IS NULL THEN 'it was late, and no later call gave it'
         WHEN dropped.reason = 'unused' THEN 'it was too old for ' || (SELECT name || ', ' || site FROM calls WHERE ordinal = old.call)
         WHEN dropped.sample IS NOT NULL THEN dropped.reason
         WHEN left_out.sample IS NOT NULL THEN 'left out by ' || (SELECT name || ', ' || site FROM calls WHERE ordinal = left_out.call)
         WHEN failed.sample IS NOT NULL THEN (SELECT name || ', ' || site FROM calls WHERE ordinal = failed.call) || ': ' || failed.error
         ELSE 'no update was given it' END AS reason
FROM (SELECT id, prompt > last_prompt AS is_beyond FROM samples LEFT JOIN discarded ON discarded.call = samples.call) AS samples
    LEFT JOIN (SELECT sample, min(update_call) AS call FROM consumption GROUP BY sample) AS used ON used.sample = samples.id
    LEFT JOIN (SELECT sample, min(call) AS call FROM filtered GROUP BY sample) AS left_out ON left_out.sample = samples.id
    LEFT JOIN (SELECT sample, max(call) AS call FROM expired GROUP BY sample) AS old ON old.sample = samples.id
    LEFT JOIN dropped ON dropped.sample = samples.id LEFT JOIN failed ON failed.sample = samples.id
"""


def add_endings(db: sqlite3.Connection) -> None:
    """Define the view `endings` on a connection to a ledger: a row (id, ending, reason) for each sample."""
    db.execute(_VIEW)


_SCHEMA = """
CREATE TABLE calls (ordinal INTEGER PRIMARY KEY, step INTEGER, name TEXT, site TEXT, state TEXT, error TEXT);
CREATE TABLE cursors (call INTEGER PRIMARY KEY, dataset TEXT, cursor INTEGER, num_rows INTEGER);
CREATE TABLE samples (id INTEGER PRIMARY KEY, call INTEGER, prompt INTEGER, member INTEGER, step INTEGER, num_tokens INTEGER,
    num_generated INTEGER, finish INTEGER, segment TEXT, offset INTEGER, size INTEGER, checksum INTEGER);
CREATE TABLE rewards (sample INTEGER, call INTEGER, name TEXT, value REAL, parts TEXT, PRIMARY KEY (call, sample)) WITHOUT ROWID;
CREATE TABLE consumption (update_call INTEGER, epoch INTEGER, sample INTEGER, PRIMARY KEY (update_call, epoch, sample)) WITHOUT ROWID;
CREATE TABLE graded (update_call INTEGER PRIMARY KEY, call INTEGER);
CREATE TABLE discarded (call INTEGER PRIMARY KEY, last_prompt INTEGER);
CREATE TABLE decisions (sample INTEGER PRIMARY KEY, call INTEGER, stretches BLOB);
CREATE TABLE dropped (sample INTEGER PRIMARY KEY, call INTEGER, reason TEXT);
CREATE TABLE filtered (sample INTEGER, call INTEGER, PRIMARY KEY (sample, call)) WITHOUT ROWID;
CREATE TABLE failed (sample INTEGER PRIMARY KEY, call INTEGER, error TEXT);
CREATE TABLE expired (sample INTEGER, call INTEGER, num_generated INTEGER, segment TEXT, offset INTEGER,
    PRIMARY KEY (sample, call)) WITHOUT ROWID;
CREATE TABLE prefixes (sample INTEGER PRIMARY KEY, call INTEGER, num_tokens INTEGER, num_generated INTEGER, stretches BLOB,
    segment TEXT, offset INTEGER, size INTEGER, checksum INTEGER);
CREATE TABLE went_on (sample INTEGER, call INTEGER, had INTEGER, worker TEXT);
CREATE TABLE moved (sample INTEGER, call INTEGER, worker TEXT, cause TEXT);
CREATE TABLE given_up (sample INTEGER PRIMARY KEY, call INTEGER, num_generated INTEGER);
CREATE TABLE lost (sample INTEGER, call INTEGER, worker TEXT, num_tokens INTEGER, reason TEXT);
CREATE TABLE made (call INTEGER, segment TEXT, offset INTEGER, size INTEGER, checksum INTEGER);
CREATE TABLE incidents (at_s REAL, kind TEXT, worker TEXT, what TEXT);
CREATE TABLE logs (step INTEGER, name TEXT, value REAL);
CREATE TABLE record (kind TEXT, position INTEGER, body BLOB, PRIMARY KEY (kind, position)) WITHOUT ROWID;
CREATE TABLE seen (call INTEGER PRIMARY KEY, kind TEXT, body BLOB);
CREATE TABLE results (call INTEGER PRIMARY KEY, ids BLOB);
CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER);
CREATE TABLE known (file TEXT PRIMARY KEY, size INTEGER);
CREATE TABLE attempts (number INTEGER PRIMARY KEY, began REAL, ended REAL, reason TEXT, checkpoint TEXT, num_calls INTEGER,
    reapplied INTEGER);
"""
_COUNTED = """
SELECT id, segment, offset, size, checksum FROM samples LEFT JOIN discarded ON samples.call = discarded.call
WHERE (last_prompt IS NULL OR prompt <= last_prompt) AND id NOT IN (SELECT sample FROM dropped) ORDER BY id
"""
IS_CURRENT = "NOT EXISTS (SELECT 1 FROM expired e WHERE e.sample = s.id AND e.segment = s.segment AND e.offset = s.offset)"
"""Condition on a row of `samples s`: the sample was not begun anew since."""
_EPISODES = """
SELECT (SELECT coalesce(sum(value), 0) FROM logs WHERE name LIKE '%episodes/failed'),
    (SELECT count(*) FROM samples JOIN calls ON calls.ordinal = samples.call
    WHERE calls.name LIKE '%.rollout' OR calls.name LIKE '%.branch')
"""
_FAILED = "SELECT ordinal FROM calls WHERE state = 'failed'"
_KNOWN = f"""
SELECT coalesce(max(known), 0) FROM (SELECT num_generated AS known FROM samples s WHERE id = :id AND {IS_CURRENT}
UNION ALL SELECT num_generated FROM prefixes WHERE sample = :id UNION ALL SELECT num_generated FROM given_up WHERE sample = :id)
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[VersionSpan, ...]).decode
_COMMIT_EVERY_S = 1.0


class Ledger:
    """The writer of one run's ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = not path.exists()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._place = path.parent.absolute()
        self._committed_s = time.monotonic()
        self._lock = threading.RLock()
        self._failure: sqlite3.Error | None = None
        """Why a write failed, after which the ledger takes no others: what they follow is not in it."""
        self.before_commit: list[Callable[[], None]] = []
        """Hooks called before each commit, to write into the same transaction."""

    def open(self) -> None:
        self._run("PRAGMA journal_mode=WAL")
        self._run("PRAGMA synchronous=NORMAL")
        if self._is_new:
            self._db.executescript(_SCHEMA)
        self._run("BEGIN")

    def close(self) -> None:
        try:
            self._gather()
            self._end_transaction()
        finally:
            self._db.close()
            os.close(self._directory)

    def commit(self, *, durably: bool = False) -> None:
        """End the transaction. It then survives a killed process; with `durably`, also a power failure.

        Raises:
            HostError: it is in the ledger, which is no longer where the run was begun (`directory`).
        """
        self._gather()
        with self._lock:
            self._end_transaction()
            if durably:
                self._run("PRAGMA wal_checkpoint(PASSIVE)")
            self._run("BEGIN")
            self._committed_s = time.monotonic()
        there = self.directory
        if there != self._path.parent:
            raise HostError(
                f"the run directory {self._path.parent} was {f'moved to {there}' if there else 'removed'} while the run was going on",
                now="A run must stay where it is until it has stopped, as its workers and checkpoints go by its path.",
            )

    @property
    def directory(self) -> Path | None:
        """Where the directory of the ledger is by now, as it may be moved with what is open in it. None: it is nowhere to be found."""
        places = {self._place: self._path.parent}
        with contextlib.suppress(OSError):  # Not every system has it.
            linked = Path(os.readlink(f"/proc/self/fd/{self._directory}"))
            places.setdefault(linked, linked)
        for place, called in places.items():
            with contextlib.suppress(OSError):
                if os.path.samestat(place.stat(), os.fstat(self._directory)):
                    return called
        return None

    def _end_transaction(self) -> None:
        if self._db.in_transaction:
            self._run("COMMIT")

    def _gather(self) -> None:
        for gather in self.before_commit:
            gather()

    def commit_if_due(self) -> None:
        """Commit if the last commit is a second ago."""
        if time.monotonic() - self._committed_s > _COMMIT_EVERY_S:
            self.commit()

    def call_added(self, call: Call) -> None:
        self._run("INSERT INTO calls VALUES (?,?,?,?,?,?)", (call.ordinal, call.step, call.name, str(call.site), "pending", None))
        rows, rewards = call.options.get("rows"), dict(call.inputs).get("rewards")
        if call.method == "update" and rewards is not None:
            self._run("INSERT OR REPLACE INTO graded VALUES (?,?)", (call.ordinal, rewards.call))
        if isinstance(rows, Batch):
            self._run("INSERT INTO cursors VALUES (?,?,?,?)", (call.ordinal, call.role, call.options["cursor"], len(rows)))

    def call_ended(self, ordinal: int, state: str, error: str | None = None) -> None:
        """Record how a call ended. A failed call stays failed; if it fails anew, with an earlier cause, that is its error from then on."""
        values = (state, error, ordinal, state)
        self._run("UPDATE calls SET state=?, error=? WHERE ordinal=? AND (state <> 'failed' OR ? = 'failed')", values)

    def samples_done(
        self, step: int, ids: Sequence[int], num_tokens: Sequence[int], num_generated: Sequence[int], finish: Sequence[int], place: Place
    ) -> None:
        """Add generated samples, whose rows are in a segment file. Idempotent; a sample that went on gets its newest rows."""
        records = []
        for packed, *numbers in zip(ids, num_tokens, num_generated, finish, strict=True):
            who = SampleId.unpack(packed)
            records.append((packed, who.call, who.prompt, who.index, step, *numbers, *place))
        self._many("INSERT OR REPLACE INTO samples VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", records)
        self._many("DELETE FROM prefixes WHERE sample=?", [(packed,) for packed in ids])

    def flushed(
        self,
        call: int,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        version_spans: Sequence[Sequence[VersionSpan]],
        place: Place,
    ) -> None:
        """Add prefixes of unfinished samples; the newest of each counts."""
        told = zip(ids, num_tokens, num_generated, version_spans, strict=True)
        records = [(packed, call, total, made, _encode(tuple(of)), *place) for packed, total, made, of in told]
        self._many("INSERT OR REPLACE INTO prefixes VALUES (?,?,?,?,?,?,?,?,?)", records)

    def went_on(self, call: int, ids: Sequence[int], had: Sequence[int], worker: str) -> None:
        """Record that samples go on from so many tokens each, on this worker."""
        self._many("INSERT INTO went_on VALUES (?,?,?,?)", [(i, call, count, worker) for i, count in zip(ids, had, strict=True)])

    def moved(self, call: int, ids: Sequence[int], worker: str, cause: str) -> None:
        """Record that samples go on elsewhere than where their context is: on this worker, for this cause."""
        self._many("INSERT INTO moved VALUES (?,?,?,?)", [(packed, call, worker, cause) for packed in ids])

    def given_up(self, call: int, ids: Sequence[int], num_generated: Sequence[int]) -> None:
        """Record that samples with so many tokens were given up."""
        self._many("INSERT OR REPLACE INTO given_up VALUES (?,?,?)", [(i, call, n) for i, n in zip(ids, num_generated, strict=True)])
        self._many("DELETE FROM prefixes WHERE sample=?", [(packed,) for packed in ids])

    def lost(self, running: Mapping[int, int], worker: str, reason: str) -> int:
        """Record the in-flight samples of a lost worker, and return how many of their tokens were lost, as they were not written down."""
        records = []
        with self._lock:
            for packed, count in running.items():
                known = self.tokens_of(packed)
                if count > known:
                    records.append((packed, SampleId.unpack(packed).call, worker, count - known, reason))
        self._many("INSERT INTO lost VALUES (?,?,?,?,?)", records)
        return sum(record[3] for record in records)

    def result(self, call: int, place: Place) -> None:
        """Record where rows of a function's result are."""
        self._run("INSERT INTO made VALUES (?,?,?,?,?)", (call, *place))

    def forget_results(self, call: int) -> None:
        """Forget the rows of a function's result."""
        self._run("DELETE FROM made WHERE call=?", (call,))

    def knows(self, files: Mapping[str, int]) -> None:
        """Record how far the workers' files are in the ledger: segments up to a byte, from where on they must be scanned; meters as a
        whole (1).
        """
        self._many("INSERT OR REPLACE INTO known VALUES (?,?)", list(files.items()))

    def tokens_of(self, sample: int) -> int:
        """Generated tokens of a sample that are written down."""
        with self._lock:
            return int(self._db.execute(_KNOWN, {"id": sample}).fetchone()[0])

    def select(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a query, which also sees what is not committed yet."""
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def rewarded(self, call: Call, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]] = ()) -> None:
        """Record rewards of samples. `parts` are the terms of each reward; empty if none has any."""
        made_of = [json.dumps(of) if of else None for of in parts] or [None] * len(ids)
        records = [(i, call.ordinal, call.role, v, of) for i, v, of in zip(ids, values, made_of, strict=True)]
        self._many("INSERT OR IGNORE INTO rewards VALUES (?,?,?,?,?)", records)

    def decided(self, decisions: Decisions) -> None:
        """Record which call gave each sample and which weights generated it, where that depended on time."""
        records = [(packed, one.call, _encode(one.version_spans)) for packed, one in decisions.items()]
        self._many("INSERT OR REPLACE INTO decisions VALUES (?,?,?)", records)

    def consumed(self, update_call: int, epoch: int, ids: Iterable[int]) -> None:
        """Record samples that went into an update's gradient. A repetition within one epoch is an internal error."""
        try:
            self._many("INSERT INTO consumption VALUES (?,?,?)", [(update_call, epoch, i) for i in ids])
        except sqlite3.IntegrityError:
            raise InternalError(f"a sample was trained on twice in epoch {epoch} of call {update_call}") from None

    def discarded(self, call: int, last_prompt: int) -> None:
        """Record that samples of this call's prompts beyond the last one do not count, whether they exist yet or not."""
        self._run("INSERT INTO discarded VALUES (?,?)", (call, last_prompt))

    def dropped(self, call: Call, ids: Sequence[int], reason: str) -> None:
        """Record samples that are in no result, whether they exist yet or not; the last call that left a sample counts."""
        self._many("INSERT OR REPLACE INTO dropped VALUES (?,?,?)", [(packed, call.ordinal, reason) for packed in ids])

    def filtered(self, call: Call, ids: Sequence[int]) -> None:
        """Record samples that a call filtered out of its result."""
        self._many("INSERT OR IGNORE INTO filtered VALUES (?,?)", [(packed, call.ordinal) for packed in ids])

    def sample_failed(self, call: Call, sample: int, error: str) -> None:
        """Record that a call failed on this sample."""
        self._run("INSERT OR IGNORE INTO failed VALUES (?,?,?)", (sample, call.ordinal, error))

    def given(self, call: Call, ids: Sequence[int]) -> None:
        """Record that samples which earlier calls had left are in a call's result."""
        self._many("DELETE FROM dropped WHERE sample=?", [(packed,) for packed in ids])
        self._many("UPDATE decisions SET call=? WHERE sample=?", [(call.ordinal, packed) for packed in ids])

    def expired(self, call: Call, ids: Sequence[int]) -> None:
        """Record that prefixes of samples were too old for a call, which generates them anew."""
        records = [(call.ordinal, packed) for packed in ids]
        self._many("INSERT OR IGNORE INTO expired SELECT sample, ?, num_generated, segment, offset FROM prefixes WHERE sample=?", records)
        self._many("INSERT OR IGNORE INTO expired SELECT id, ?, num_generated, segment, offset FROM samples WHERE id=?", records)
        self._many("DELETE FROM prefixes WHERE sample=?", [(packed,) for packed in ids])

    def incident(self, kind: str, worker: str, what: str) -> None:
        """Record that a worker was lost or restarted."""
        self._run("INSERT INTO incidents VALUES (?,?,?,?)", (time.time(), kind, worker, what))

    def logged(self, step: int, name: str, value: float) -> None:
        self._run("INSERT INTO logs VALUES (?,?,?)", (step, name, value))

    def gave(self, call: int, ids: Sequence[int]) -> None:
        """Record which samples are in a call's result, if these are not all that it drew."""
        self._run("INSERT OR REPLACE INTO results VALUES (?,?)", (call, np.asarray(ids, "<i8").tobytes()))

    def mark(self, name: str, value: int) -> None:
        """Store a number that an attempt which goes on from here needs."""
        self._run("INSERT OR REPLACE INTO marks VALUES (?,?)", (name, value))

    def unmark(self, name: str) -> None:
        """Remove a mark."""
        self._run("DELETE FROM marks WHERE name=?", (name,))

    def is_marked(self, name: str) -> bool:
        """Whether there is this mark."""
        return bool(self.select("SELECT 1 FROM marks WHERE name=?", (name,)))

    def attempt_began(self, number: int, checkpoint: str, num_calls: int) -> None:
        """Record the begin of an attempt at the run, from a checkpoint that includes the first `num_calls` calls."""
        self._run("INSERT OR REPLACE INTO attempts VALUES (?,?,NULL,NULL,?,?,0)", (number, time.time(), checkpoint, num_calls))

    def reapplied(self, number: int) -> None:
        """Record that this attempt repeated an update of an earlier one."""
        self._run("UPDATE attempts SET reapplied = reapplied + 1 WHERE number=?", (number,))

    def attempt_ended(self, number: int, reason: str) -> None:
        """Record the end of an attempt: `done`, or the reason of its failure. This needs nothing of a transaction that was lost."""
        with naming_host_errors(f"can't write the ledger {self._path}"), self._lock:
            self._db.execute("UPDATE attempts SET ended=?, reason=? WHERE number=?", (time.time(), reason, number))

    def change(self, statement: str, values: Sequence[object] = ()) -> None:
        """Run any other statement that changes the ledger."""
        self._run(statement, values)

    def forget_looks(self, first: int) -> None:
        """Forget the looks of the program from this number on, which it will make again."""
        self._run("DELETE FROM record WHERE kind='look' AND position >= ?", (first,))

    def remembered(self, kind: str, bodies: Sequence[tuple[int, bytes]]) -> None:
        """Store parts of the flow's record (`m2flow.micro.records.flow_record`), position and body, in place of an earlier attempt's."""
        self._many("INSERT OR REPLACE INTO record VALUES (?,?,?)", [(kind, *body) for body in bodies])

    def saw(self, call: int, kind: str, body: bytes) -> None:
        """Store the value of a call as the program sees it."""
        self._run("INSERT OR IGNORE INTO seen VALUES (?,?,?)", (call, kind, body))

    def length_bias(self, update: Call) -> dict[str, Class]:
        """The lengths and rewards of what an update trained on, compared with all that was sampled for it."""
        with self._lock:
            return bias_of(self._db, update)

    def has_length_bias(self, update: Call) -> bool:
        """Whether `length_bias` of an update has anything: whether it trained on samples."""
        with self._lock:
            found = "SELECT 1 FROM consumption JOIN samples ON samples.id = consumption.sample WHERE update_call=? LIMIT 1"
            return self._db.execute(found, (update.ordinal,)).fetchone() is not None

    def has_samples(self, ids: Sequence[int]) -> bool:
        """Whether the segments have the rows of all of these."""
        with self._lock:
            return all(self._db.execute("SELECT 1 FROM samples WHERE id=?", (packed,)).fetchone() for packed in ids)

    def _run(self, statement: str, values: Sequence[object] = ()) -> None:
        with self._writing():
            self._db.execute(statement, values)

    def _many(self, statement: str, records: Sequence[Sequence[object]]) -> None:
        with self._writing():
            self._db.executemany(statement, records)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Where a write fails, as on a full disk, the transaction is lost, often by SQLite's own doing. A later statement would then be
        committed alone, like `knows`, which says that samples are in the ledger.
        """
        with naming_host_errors(f"can't write the ledger {self._path}"), self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except sqlite3.Error as error:
                self._failure = error
                if self._db.in_transaction:
                    self._db.rollback()
                raise


def read_samples(run_dir: Path) -> Iterator[tuple[Batch, list[float]]]:
    """Each sample of a run that counts (a batch of one) with its rewards in the order of their calls; in the order of identity. A reward
    that failed gives none.
    """
    with reading_ledger(run_dir) as db:
        rewards: dict[int, list[float]] = {}
        for sample, value in db.execute(f"SELECT sample, value FROM rewards WHERE call NOT IN ({_FAILED}) ORDER BY call, sample"):
            rewards.setdefault(sample, []).append(value)
        records: dict[Place, tuple[Batch, dict[int, int]]] = {}
        for packed, *place in db.execute(_COUNTED):
            where: Place = (place[0], place[1], place[2], place[3])
            if where not in records:
                batch = read_segment(run_dir / "segments", where)
                records[where] = (batch, {one: row for row, one in enumerate(batch.ids.tolist())})
            batch, rows = records[where]
            yield batch.take([rows[packed]]), rewards.get(packed, [])


def read_decisions(run_dir: Path) -> dict[int, Decision]:
    """Read what depended on time in a run, by sample; for all other samples the program determines it.

    Of a generation that was over-sampled, only samples of its result are there.

    Raises:
        SpecError: the directory has no ledger with such a record.
    """
    with reading_ledger(run_dir, "decisions") as db:
        found = db.execute("SELECT sample, call, stretches FROM decisions WHERE sample NOT IN (SELECT sample FROM dropped)")
        return {sample: Decision(call, _decode(version_spans)) for sample, call, version_spans in found}


def read_lengths(run_dir: Path) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """For each sample written down, in the order of identity: call, position of its prompt, step, prompt tokens, generated tokens, and
    whether it was truncated (at its limit, or aborted).

    Raises:
        SpecError: the directory has no ledger.
    """
    with reading_ledger(run_dir, "samples") as db:
        rows = "SELECT call, prompt, step, num_tokens - num_generated, num_generated, finish FROM samples ORDER BY id"
        for *numbers, finish in db.execute(rows):
            call, prompt, step, num_prompt, num_generated = numbers
            yield call, prompt, step, num_prompt, num_generated, finish != Finish.STOP


def lengths_of_run(run_dir: Path) -> Measured:
    """Read the lengths that a run generated, filtered and over-sampled ones too; aborted and truncated ones are censored.

    Raises:
        SpecError: it has no ledger, or no samples.
    """
    rows: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
    for call, prompt, step, num_prompt, num_generated, is_cut in read_lengths(run_dir):
        rows.setdefault((call, prompt), []).append((step, num_prompt, max(num_generated, 1), is_cut))
    if not rows:
        raise SpecError(f"the run {run_dir} generated nothing", now="Give a run that has made at least one step.")
    groups = [np.array([row[2] for row in group], np.int64) for group in rows.values()]
    cut = [np.array([row[3] for row in group], bool) for group in rows.values()]
    caps = [int(group[flags].max()) for group, flags in zip(groups, cut, strict=True) if flags.any()]
    return Measured(
        run_dir.name,
        [group[0][0] for group in rows.values()],
        [group[0][1] for group in rows.values()],
        groups,
        cut=cut,
        cap=max(caps, default=None),
    )


@dataclass(frozen=True)
class Incident:
    """Something that happened to a worker."""

    at_s: float
    """Unix time."""
    kind: str
    """`lost` or `started again`."""
    worker: str
    what: str


def read_incidents(run_dir: Path) -> list[Incident]:
    """Incidents of a run's workers in the order of time."""
    with reading_ledger(run_dir) as db:
        return [Incident(*row) for row in db.execute("SELECT at_s, kind, worker, what FROM incidents ORDER BY at_s")]


def read_beginnings(run_dir: Path) -> list[float]:
    """The begin of each attempt at a run, Unix seconds; empty for a run without a ledger."""
    with contextlib.suppress(sqlite3.Error), reading_ledger(run_dir) as db:
        return [began for (began,) in db.execute("SELECT began FROM attempts ORDER BY number")]
    return []


def read_left_out(run_dir: Path) -> dict[str, int]:
    """Count the samples of a run that are in no result, by reason: `late` (dropped), `unused` (carried, and never used)."""
    with reading_ledger(run_dir) as db:
        return dict(db.execute("SELECT reason, COUNT(*) FROM dropped GROUP BY reason ORDER BY reason"))


def read_num_failed(run_dir: Path) -> int:
    """Number of failed calls of a run; if it ended well, these are the ones whose error the flow caught."""
    with reading_ledger(run_dir) as db:
        return len(db.execute(_FAILED).fetchall())


def read_failed_episodes(run_dir: Path) -> tuple[int, int]:
    """Episodes of a run that failed, and all of its rollouts."""
    with reading_ledger(run_dir) as db:
        ((failed, episodes),) = db.execute(_EPISODES)
        return int(failed), int(episodes)


def read_token_counts(run_dir: Path) -> dict[int, tuple[int, int, int]]:
    """For each sample written down: the step, prompt tokens, generated tokens.

    Raises:
        SpecError: the directory has no ledger.
    """
    with reading_ledger(run_dir, "samples") as db:
        rows = db.execute("SELECT id, step, num_tokens - num_generated, num_generated FROM samples")
        return {packed: (step, num_prompt, num_generated) for packed, step, num_prompt, num_generated in rows}


def read_roles(run_dir: Path) -> dict[int, str]:
    """The role of each call, by the call's ordinal.

    Raises:
        SpecError: the directory has no ledger.
    """
    with reading_ledger(run_dir, "calls") as db:
        return {ordinal: name.partition(".")[0] for ordinal, name in db.execute("SELECT ordinal, name FROM calls")}


def read_refills(run_dir: Path, before: float) -> tuple[int, int]:
    """How many groups the refills of a run's first steps judged, up to the last that each needed, and how many of these they kept.

    Args:
        before: the first step that does not count.
    Raises:
        SpecError: the directory has no ledger.
    """
    with reading_ledger(run_dir, "samples") as db:
        judged = db.execute(
            "SELECT last_prompt + 1, (SELECT COUNT(DISTINCT prompt) FROM filtered JOIN samples ON samples.id = filtered.sample"
            " WHERE samples.call = discarded.call AND prompt <= last_prompt AND filtered.call ="  # Not by a filter of what it gave.
            " (SELECT MIN(ordinal) FROM calls WHERE name = 'keep' AND ordinal > discarded.call))"
            " FROM discarded JOIN calls ON calls.ordinal = discarded.call WHERE step < ?",
            (before,),
        ).fetchall()
    return sum(num for num, _ in judged), sum(num - num_rejected for num, num_rejected in judged)


def samples_digest(run_dir: Path) -> str:
    """SHA-256 over every sample: identity, token ids, prompt and response masks, rewards; in the order of identity. Samples of a failed
    generation are left out, since how many it made depends on the plan.
    """
    total = hashlib.sha256()
    with reading_ledger(run_dir) as db:
        failed = {call for (call,) in db.execute(_FAILED)}
    for sample, rewards in read_samples(run_dir):
        if SampleId.unpack(int(sample.ids[0])).call in failed:
            continue
        total.update(sample.ids.astype("<i8").tobytes())
        total.update(np.asarray(sample.ragged("tokens").values, "<i4").tobytes())
        kinds = sample.ragged("segment_kinds").values == Segment.GENERATED
        total.update(np.asarray(kinds, np.uint8).tobytes() + np.asarray(sample.ragged("segment_lengths").values, "<i4").tobytes())
        total.update(np.asarray(rewards, "<f8").tobytes())
    return total.hexdigest()


def state_of(run_dir: Path) -> str:
    """Say how a run stands: `done`, `running`, `killed`, or why its last attempt ended.

    Raises:
        SpecError: the directory has no ledger, or one that can't be read.
    """
    with reading_ledger(run_dir, "attempts") as db:
        found = db.execute("SELECT reason FROM attempts ORDER BY number DESC LIMIT 1").fetchone()
    if found is not None and found[0]:
        return str(found[0])
    try:
        with (run_dir / "run.lock").open() as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:
        return "killed"
    return "killed"
