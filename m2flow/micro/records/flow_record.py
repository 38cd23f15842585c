"""Write down what the flow did: its record, from which a run is replayed and resumed, and its logs in the order of sequential execution.

The record of a flow (`m2flow.macro.replay`) is stored in the run's ledger and segments.

    Recorder --> LedgerWriter --> ledger.db (record, seen) --read_record--> RunRecord --> ReplayBackend

Calls, looks, logs and values are msgpack. Rows that the program saw are a reference to samples in the segment files if they are there,
else an encoded batch. Values that the program never looked at are rebuilt from the ledger's own tables: samples, rewards. Nothing is
pickled.

Logs are written in the order of sequential execution, and none after a step that failed.

    log(loss=metrics["loss"]) --add--> FlowLog --write_due--> the journal

The program may run steps ahead of the work. A log is written when its number is known, all logs before it are written or will never have a
number, every call of the steps that had ended before it has ended well, and so has every call before it that has an effect. So a failed
run leaves the logs that sequential execution leaves.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import msgspec
import numpy as np

from m2flow.channels.codec import decode_batch, encode_batch
from m2flow.errors import ErrorRecord, InternalError, M2FlowError, SpecError, error_from_record
from m2flow.macro.graph import Call
from m2flow.macro.replay import CallRecord, LogEntry, Look
from m2flow.micro.records.ledger import Ledger
from m2flow.micro.records.provenance import read_configuration
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.segments import Place, read_segment
from m2flow.samples import Batch

# ---- the record


_read_error_record = msgspec.msgpack.Decoder(ErrorRecord).decode

_read_log_entry = msgspec.msgpack.Decoder(LogEntry).decode

_read_look = msgspec.msgpack.Decoder(Look).decode

_read_call_record = msgspec.msgpack.Decoder(CallRecord).decode

_encode = msgspec.msgpack.Encoder().encode
_MANY = 256
"""Calls that gather before they are written, if nothing else flushes them earlier."""


class _Samples(msgspec.Struct, frozen=True):
    """A reference to rows that the segment files have."""

    ids: list[int]
    columns: list[str]


_read_samples = msgspec.msgpack.Decoder(_Samples).decode


class LedgerWriter:
    """A `m2flow.macro.replay.RecordWriter` on the ledger. The flow's thread uses it; `came_to` may be called by another."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.before_commit.append(self.flush)
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._num_looks = 0
        self._num_logs = 0

    def called(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)
        if len(self._calls) >= _MANY:
            self.flush()

    def looked(self, look: Look, call: Call, value: object) -> None:
        self.flush()
        self.came_to(call, value)
        self._ledger.remembered("look", [(self._num_looks, _encode(look))])
        self._num_looks += 1

    def logged(self, entry: LogEntry) -> None:
        self._ledger.remembered("log", [(self._num_logs, _encode(entry))])
        self._num_logs += 1

    def step_ended(self, step: int) -> None:
        self.flush()

    def came_to(self, call: Call, value: object) -> None:
        """Write a call's value."""
        self._ledger.saw(call.ordinal, *self._packed(call, value))

    def flush(self) -> None:
        """Write the gathered calls. The thread that commits calls this too."""
        with self._lock:
            calls, self._calls = self._calls, []
            self._ledger.remembered("call", [(call.ordinal, _encode(CallRecord.of(call))) for call in calls])

    def _packed(self, call: Call, value: object) -> tuple[str, bytes]:
        if isinstance(value, M2FlowError):
            return "error", _encode(value.to_record())
        if isinstance(value, Batch):
            ids = value.ids.tolist()
            if call.engine == "rollout" and self._ledger.has_samples(ids):
                return "samples", _encode(_Samples(ids, list(value.columns)))
            return "rows", encode_batch(value)
        try:
            return "value", _encode(value)
        except TypeError as error:
            raise InternalError(f"the value of {call.name} can't be recorded: {error}", where=call.site.describe()) from None


class RunRecord:
    """A `m2flow.macro.replay.Record` of a run directory, which reads values on demand."""

    def __init__(self, run_dir: Path, calls: Sequence[CallRecord], looks: Sequence[Look], logs: Sequence[LogEntry], seed: int) -> None:
        self.calls = calls
        self.looks = looks
        self.logs = logs
        self.seed = seed
        """The seed of the run; a replay needs the same."""
        self._run_dir = run_dir

    def value(self, ordinal: int) -> object:
        with reading_ledger(self._run_dir) as db:
            found = db.execute("SELECT kind, body FROM seen WHERE call=?", (ordinal,)).fetchone()
            if found is None:
                return self._unseen(db, ordinal)
            kind, body = found
            if kind == "samples":
                samples = _read_samples(body)
                return self._samples(db, samples.ids).only(samples.columns)
        if kind == "rows":
            return decode_batch(body)
        if kind == "error":
            return error_from_record(_read_error_record(body))
        return msgspec.msgpack.decode(body)

    def has(self, ordinal: int) -> bool:
        """Whether `value` would find something; reads nothing."""
        with reading_ledger(self._run_dir) as db:
            tables = "results WHERE call", "seen WHERE call", "rewards WHERE call", "samples WHERE call"
            return any(db.execute(f"SELECT 1 FROM {table}=? LIMIT 1", (ordinal,)).fetchone() for table in tables)

    def _unseen(self, db: sqlite3.Connection, ordinal: int) -> Batch:
        """Rows of a call that the program did not look at, if the call ended well and has any."""
        if db.execute("SELECT 1 FROM calls WHERE ordinal=? AND state='done'", (ordinal,)).fetchone() is None:
            raise KeyError(ordinal)
        found = db.execute("SELECT ids FROM results WHERE call=?", (ordinal,)).fetchone()
        given = None if found is None else np.frombuffer(found[0], "<i8").astype(np.int64)
        rewards = _rewards(db, ordinal)
        if len(rewards):
            return rewards if given is None else rewards.select(given)
        if given is None:
            given = np.array([i for (i,) in db.execute("SELECT id FROM samples WHERE call=? ORDER BY id", (ordinal,))], np.int64)
            if not len(given):
                raise KeyError(ordinal)
        samples = self._samples(db, given.tolist())
        scored_by = dict(self.calls[ordinal].inputs).get("reward")
        if scored_by is None or not len(samples):
            return samples
        return samples.with_columns(reward=_rewards(db, scored_by).select(given)["reward"])

    def _samples(self, db: sqlite3.Connection, ids: Sequence[int]) -> Batch:
        if not ids:
            return Batch(np.zeros(0, np.int64))
        places: dict[Place, None] = {}
        for packed in ids:
            places[db.execute("SELECT segment, offset, size, checksum FROM samples WHERE id=?", (packed,)).fetchone()] = None
        batches = [read_segment(self._run_dir / "segments", place) for place in places]
        return Batch.concat(batches).select(np.array(ids, np.int64))


def _rewards(db: sqlite3.Connection, call: int) -> Batch:
    rewards = db.execute("SELECT sample, value FROM rewards WHERE call=? ORDER BY sample", (call,)).fetchall()
    return Batch(np.array([i for i, _ in rewards], np.int64), {"reward": np.array([v for _, v in rewards], np.float64)})


def read_record(run_dir: Path) -> RunRecord:
    """Read the record of a run's flow; also while the run goes on or after it failed.

    Raises:
        SpecError: there is no run, it was made before runs had a record, or its files are damaged.
    """
    if not (run_dir / "ledger.db").is_file():
        raise SpecError(f"there is no run in {run_dir}", now="Give a run's directory, as `m2flow run` prints it.")
    seed = read_configuration(run_dir)["settings"]["seed"] if (run_dir / "config.json").is_file() else 0
    try:
        with reading_ledger(run_dir) as db:
            bodies = {
                kind: [body for (body,) in db.execute("SELECT body FROM record WHERE kind=? ORDER BY position", (kind,))]
                for kind in ("call", "look", "log")
            }
    except sqlite3.Error as error:
        raise SpecError(
            f"the run in {run_dir} has no record of its flow: {error}",
            now="It ended before its first call, or its directory is not whole: begin it anew.",
        ) from None
    return RunRecord(
        run_dir,
        [_read_call_record(body) for body in bodies["call"]],
        [_read_look(body) for body in bodies["look"]],
        [_read_log_entry(body) for body in bodies["log"]],
        int(seed),
    )


# ---- logs


@dataclass(frozen=True)
class Logged:
    """A `log` of the flow: a field of a call's result, or a number."""

    step: int
    name: str
    source: tuple[int, str | None] | float
    num_before: int
    """Calls of the steps that had ended before it."""
    num_calls: int = 0
    """Calls before it."""
    where: str = ""
    """The line of the flow."""


class Results(Protocol):
    """The states and results of calls."""

    def is_resolved(self, ordinal: int) -> bool:
        """Whether the call has its value."""

    def has_failed(self, ordinal: int) -> bool: ...

    def are_well(self, num_calls: int) -> bool:
        """Whether the first `num_calls` calls of the program have all ended well."""

    def are_effects_over(self, num_calls: int) -> bool:
        """Whether those of the first `num_calls` calls that have an effect are over."""

    def has_lost_effect(self, num_calls: int) -> bool:
        """Whether one of the first `num_calls` calls has failed that has an effect."""

    def number(self, ordinal: int, name: str | None) -> float:
        """Raises TraceError: there is no such number."""


@dataclass(eq=False)
class _Entry:
    log: Logged
    number: float | None = None
    error: M2FlowError | None = None
    has_none: bool = False
    """Its call failed, so it will never have a number."""

    @property
    def is_settled(self) -> bool:
        return self.has_none or self.number is not None or self.error is not None


@final
class FlowLog:
    """Logs of one run in program order, written as soon as they are due."""

    def __init__(self, results: Results, write: Callable[[int, str, float], None]) -> None:
        self._results = results
        self._write = write
        self._entries: deque[_Entry] = deque()
        self._waiting: dict[int, list[_Entry]] = {}
        """Call -> the logs that wait for its result."""

    def add(self, log: Logged) -> None:
        entry = _Entry(log)
        self._entries.append(entry)
        if isinstance(log.source, float):
            entry.number = log.source
        else:
            self._waiting.setdefault(log.source[0], []).append(entry)
            self.call_ended(log.source[0])
        self.write_due()

    def call_ended(self, ordinal: int) -> None:
        """Settle the logs of a call that may have ended, well or not; its value must still be readable."""
        if ordinal not in self._waiting or not (self._results.is_resolved(ordinal) or self._results.has_failed(ordinal)):
            return
        for entry in self._waiting.pop(ordinal):
            if self._results.has_failed(ordinal):
                entry.has_none = True
                continue
            assert not isinstance(entry.log.source, float)
            try:
                entry.number = self._results.number(*entry.log.source)
            except M2FlowError as error:
                entry.error = error.located(entry.log.where)

    def write_due(self) -> None:
        """Write the logs that are due.

        Raises:
            TraceError: a log names a number that its call does not have.
        """
        while self._entries and self._is_due(self._entries[0]):
            entry = self._entries.popleft()
            if self._results.has_lost_effect(entry.log.num_calls):
                continue
            if entry.error is not None:
                raise entry.error
            if entry.number is not None:
                self._write(entry.log.step, entry.log.name, entry.number)

    def _is_due(self, entry: _Entry) -> bool:
        results, log = self._results, entry.log
        return entry.is_settled and results.are_well(log.num_before) and results.are_effects_over(log.num_calls)
