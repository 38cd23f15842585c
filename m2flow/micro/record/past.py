"""What a run had done when it stopped: what its resumption begins with.

    run directory --read_past--> Past --> ReplayBackend (which calls are made again, which answer from the record)
                                      --> trainers (parts of the checkpoint), scheduler (their versions), Journal (what is known)

Every call before the checkpoint's point is over, and is never made again, except those that make the state of a user's role. After the
point, what a trainer did is made again from recorded samples, and calls that were not over go on with what there is of them
(`m2flow.micro.record.taking_up`). All other calls answer from the record.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from m2flow.errors import M2FlowError, SpecError
from m2flow.macro.graph import Call
from m2flow.micro.record.checkpoints import Checkpoint, newest_good
from m2flow.micro.record.flow_record import RunRecord, read_record
from m2flow.micro.record.ledger import Ledger
from m2flow.micro.record.taking_up import TakingUp
from m2flow.micro.record.tally import Tally
from m2flow.samples import Finish

DONE = "done"
"""How an attempt at a run ends that has come to the program's end."""


@dataclass(frozen=True, eq=False)
class Past:
    """A run that stopped."""

    record: RunRecord
    checkpoint: Checkpoint | None
    """None: weights and optimisers begin as the run did, and all updates are made again."""
    done: frozenset[int]
    """Calls that were over, well."""
    failed: Mapping[int, tuple[int, M2FlowError]]
    """Calls that failed, and whose error the program caught -> the call that failed by itself, and its error. They stay as they are."""
    logged: Mapping[tuple[int, str], int]
    """Step and name -> how many such logs of the program were written. Not the first so many of all: a log whose call failed was passed
    over, and later ones of its step were written."""
    attempt: int
    """Of the attempt that begins now; the first of a run was 0."""
    metrics_size: int
    left: Mapping[int, tuple[int, ...]]
    """Generation -> samples that it left to the next of its line, and which nobody has given since."""
    first_look_again: int
    """Looks of the program from this one on had an error."""
    tally: Tally = field(default_factory=Tally)

    @property
    def num_included(self) -> int:
        """Calls that the restored weights include."""
        return 0 if self.checkpoint is None else self.checkpoint.point.num_calls

    @property
    def versions(self) -> Mapping[str, int]:
        """Of the trainers' weights, by role."""
        return {} if self.checkpoint is None else self.checkpoint.point.versions

    @property
    def where(self) -> str:
        """Where it goes on from, in words."""
        return "its beginning" if self.checkpoint is None else f"the checkpoint {self.checkpoint.path.name}"

    @property
    def parts(self) -> dict[str, str]:
        """Role -> what its trainer begins with."""
        return {} if self.checkpoint is None else self.checkpoint.parts

    def redo(self, call: Call) -> bool:
        """Whether a recorded call is made again."""
        if call.ordinal not in self.done:
            return call.ordinal not in self.failed
        if call.engine == "train":
            return call.ordinal >= self.num_included and (bool(call.writes) or not self.record.has(call.ordinal))
        if call.engine == "function":  # The state of a user's role is nowhere but in its object.
            return bool(call.writes) or (bool(call.reads) and not self.record.has(call.ordinal))
        return False

    def take_up(self, ledger: Ledger, run_dir: Path, *, keeps: bool) -> TakingUp:
        """Have the ledger go on from here; with `keeps`, what was left unfinished goes on too."""
        over = self.done | self.failed.keys()
        found = TakingUp(ledger, run_dir / "segments", self.record.calls, over, self.left, self.num_included, self.failed)
        found.begin(keeps=keeps)
        ledger.forget_looks(self.first_look_again)
        ledger.attempt_began(self.attempt, "" if self.checkpoint is None else self.checkpoint.path.name, self.num_included)
        return found


def read_past(run_dir: Path, warn: Callable[[str], None]) -> Past:
    """
    Args:
        warn: is told of checkpoints that are not whole.
    Raises:
        SpecError: there is no run, one that can't be resumed, or one that has come to its end.
    """
    record = read_record(run_dir)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.db'}?mode=ro", uri=True)) as db:
            attempts = db.execute("SELECT number, reason FROM attempts ORDER BY number").fetchall()
            if attempts and attempts[-1][1] == DONE:
                raise SpecError(f"the run in {run_dir} has come to its end: there is nothing to resume")
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
    return Past(
        kept,
        newest_good(run_dir, warn, is_of_it),
        frozenset(done),
        failed,
        logged,
        (attempts[-1][0] if attempts else 0) + 1,
        marks.get("metrics", 0),
        {call: tuple(samples) for call, samples in left.items()},
        num_looks,
        tally,
    )


def _check_segments(db: sqlite3.Connection, run_dir: Path) -> None:
    """
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
    """Each call that failed -> the one that failed by itself: of the calls that it needs and that failed, the first."""
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
    """How many calls and looks the program made before it looked at the error that it ended with: those it would make otherwise, if that
    goes well now. An error that it went on from it had caught."""
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


def _tally(db: sqlite3.Connection, record: RunRecord, done: set[int], over: set[int]) -> Tally:
    """The counts of the run up to where it stopped, of calls that are not made again."""
    tally = Tally()
    for call, num_samples, num_tokens in db.execute(
        f"SELECT call, COUNT(*), SUM(num_generated) FROM samples WHERE finish <> {int(Finish.ABORT)} GROUP BY call"
    ):
        if call in done:
            tally.num_samples += num_samples
            tally.num_tokens += num_tokens
    for recorded in record.calls:
        if recorded.ordinal in done and recorded.name.endswith(".update") and recorded.step >= 0:
            value = record.value(recorded.ordinal)
            if isinstance(value, dict) and "reward" in value:
                tally.rewards.append(value["reward"])
    open_steps = [recorded.step for recorded in record.calls if recorded.ordinal not in over and recorded.step >= 0]
    last = max((recorded.step for recorded in record.calls), default=-1)
    tally.num_steps = min(open_steps, default=last + 1)
    logs = db.execute("SELECT name, value FROM logs ORDER BY rowid")
    tally.logs = {name: math.nan if value is None else value for name, value in logs}  # SQLite has no NaN.
    tally.steps_before, tally.samples_before, tally.tokens_before = tally.num_steps, tally.num_samples, tally.num_tokens
    return tally
