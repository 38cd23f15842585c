"""Measure length bias: lengths and rewards of the samples that an update trains on, compared with all that were sampled.

    ledger.db, an update that is done --bias_of--> for each class of samples: how many, mean length, mean reward

Short samples finish first. Dropping late samples, or training on them later, changes which lengths and rewards the loss sees; this measures
by how much, for each update. The classes of samples overlap:

    sampled     drawn in this step by the calls that the update trains on, as far as they have come
    trained     what it trained on, samples that earlier steps have left included
    carried     of the sampled: left to the next turn of their line
    dropped     of the sampled: late and given up, left out by a filter, or of prompts that were not needed
    truncated   of the sampled: cut at the token limit
    stale       of the trained: with tokens of older weights than sequential execution has

A length counts generated tokens; of an unfinished sample, those so far. A reward is that of the first call that gave one: for rewards of
0 and 1 the mean is the pass rate. Pure SQL on the ledger; a few milliseconds for a thousand samples.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from m2flow.macro.graph import Call
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.micro.records.rundir import reading_ledger
from m2flow.samples import Finish, SampleId

CLASSES = ("sampled", "trained", "carried", "dropped", "truncated", "stale")

_stretches = msgspec.msgpack.Decoder(tuple[VersionSpan, ...]).decode
_MOST_NAMED = 500
"""Parameters of one SQL statement."""


class Class(NamedTuple):
    """Count, mean length and mean reward of one class of samples."""

    num: int
    length: float | None
    """Mean length in tokens; None if none of the samples has been written down."""
    reward: float | None
    """Mean reward over the samples that have one."""


def bias_of(db: sqlite3.Connection, update: Call) -> dict[str, Class]:
    """The classes of a finished update; empty if it trained on no samples.

    Args:
        db: of the ledger; what was told by now is there.
    """
    return _bias(db, [(update.ordinal, update.step)])


def bias_of_run(run_dir: Path) -> dict[str, Class]:
    """The classes over all updates in a run's steps; a sample counts once in each class.

    Raises:
        SpecError: the directory has no ledger.
    """
    with reading_ledger(run_dir, "samples") as db:
        updates = db.execute(
            "SELECT DISTINCT ordinal, step FROM consumption JOIN calls ON ordinal = update_call WHERE step >= 0"
        ).fetchall()
        return _bias(db, updates)


def as_metrics(bias: Mapping[str, Class]) -> dict[str, float]:
    """The metrics `lengths/trained_num`, `lengths/trained_mean`, `lengths/trained_reward`, and `lengths/trained_ratio` (the mean length
    relative to that of all sampled), likewise for other classes. Missing values give no metric.
    """
    found: dict[str, float] = {}
    whole = bias["sampled"].length if "sampled" in bias else None
    for name, of in bias.items():
        found[f"lengths/{name}_num"] = of.num
        if of.length is not None:
            found[f"lengths/{name}_mean"] = of.length
            if whole:
                found[f"lengths/{name}_ratio"] = of.length / whole
        if of.reward is not None:
            found[f"lengths/{name}_reward"] = of.reward
    return found


def _bias(db: sqlite3.Connection, updates: Iterable[tuple[int, int]]) -> dict[str, Class]:
    """The classes over several updates, given as (ordinal, step)."""
    graded = _graded(db)
    judges = {graded[ordinal] for ordinal, _ in updates if ordinal in graded}
    ids: dict[str, set[int]] = {name: set() for name in CLASSES}
    for ordinal, step in updates:
        trained = {row for (row,) in db.execute("SELECT DISTINCT sample FROM consumption WHERE update_call = ?", (ordinal,))}
        trained = set(_known(db, "SELECT id FROM samples WHERE id IN ({})", trained))
        if not trained:
            continue
        drawn_by = {SampleId.unpack(row).call for row in trained}
        now = {call for call in drawn_by if db.execute("SELECT step FROM calls WHERE ordinal = ?", (call,)).fetchone() == (step,)}
        ids["trained"] |= trained
        version = _version_of(db, ordinal)
        for row, body in _pairs(db, "SELECT sample, stretches FROM decisions WHERE sample IN ({})", trained):
            if min((stretch.version for stretch in _stretches(body)), default=version) < version:
                ids["stale"].add(row)
        for call in now or drawn_by:
            _add_call(db, call, ids)
    return {name: _class(db, rows, judges) for name, rows in ids.items() if rows}


def _graded(db: sqlite3.Connection) -> dict[int, int]:
    """By update, the call whose values were its rewards. Ledgers of the first runs do not say."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'graded'").fetchone():
        return {}
    return dict(db.execute("SELECT update_call, call FROM graded").fetchall())


def _add_call(db: sqlite3.Connection, call: int, ids: Mapping[str, set[int]]) -> None:
    """Sort the samples that a call drew into the classes."""
    first, last = SampleId(call, 0, 0).pack(), SampleId(call + 1, 0, 0).pack() - 1
    own = (first, last)
    for row, finish in db.execute("SELECT id, finish FROM samples WHERE id BETWEEN ? AND ?", own):
        ids["sampled"].add(row)
        if finish == Finish.LENGTH:
            ids["truncated"].add(row)
    for row, reason in db.execute("SELECT sample, reason FROM dropped WHERE sample BETWEEN ? AND ?", own):
        ids["carried" if reason == "unused" else "dropped"].add(row)
    ids["carried"].update(
        row for (row,) in db.execute("SELECT sample FROM decisions WHERE sample BETWEEN ? AND ? AND call <> ?", (*own, call))
    )
    ids["dropped"].update(row for (row,) in db.execute("SELECT sample FROM filtered WHERE sample BETWEEN ? AND ?", own))
    for (beyond,) in db.execute("SELECT last_prompt FROM discarded WHERE call = ?", (call,)):
        ids["dropped"].update(row for row in ids["sampled"] if first <= row <= last and SampleId.unpack(row).prompt > beyond)


def _version_of(db: sqlite3.Connection, update: int) -> int:
    """The weight version that an update trains from: the number of earlier updates of its role."""
    same = "SELECT count(*) FROM calls WHERE ordinal < ? AND name = (SELECT name FROM calls WHERE ordinal = ?)"
    return int(db.execute(same, (update, update)).fetchone()[0])


def _class(db: sqlite3.Connection, rows: set[int], judges: set[int]) -> Class:
    """Args:
    judges: calls whose rewards count. A sample that has none of them counts with its first one.
    """
    lengths = [tokens for _, tokens in _pairs(db, "SELECT id, num_generated FROM samples WHERE id IN ({})", rows)]
    rewards: dict[int, float] = {}
    drawn = min(SampleId.unpack(row).call for row in rows)  # Calls that judge these come later: the table's key begins with the call.
    statement = f"SELECT sample, call, value FROM rewards WHERE call > {drawn} AND sample IN ({{}}) ORDER BY call"
    given = _pairs(db, statement, rows)
    for row, _, value in [*(one for one in given if one[1] in judges), *given]:
        rewards.setdefault(row, value)
    return Class(len(rows), sum(lengths) / len(lengths) if lengths else None, sum(rewards.values()) / len(rewards) if rewards else None)


def _known(db: sqlite3.Connection, statement: str, rows: Iterable[int]) -> list[int]:
    return [found[0] for found in _pairs(db, statement, rows)]


def _pairs(db: sqlite3.Connection, statement: str, rows: Iterable[int]) -> list[tuple]:  # type: ignore[type-arg]
    """What a statement about some samples gives, a few hundred of them at a time."""
    found = []
    wanted = sorted(rows)
    for start in range(0, len(wanted), _MOST_NAMED):
        part = wanted[start : start + _MOST_NAMED]
        found += db.execute(statement.format(",".join("?" * len(part))), part).fetchall()
    return found
