"""Where the tokens of a run went: every one that was generated was trained on, was for nothing, was lost, or can still be gone on from.

    meters (what the processes generated) == trained + wasted, by reason + lost, by reason + unfinished

The left side is counted by the workers' engines as they decode and kept where a kill can't take it (`m2flow.micro.record.meter`); the
right side is added up from the ledger. So the two can be held against each other. Limit: of a run that goes on, what runs is on the
left side alone; of one that was killed, what nobody wrote down, until it is resumed; eager runs have no meters, and there the left side
is the right one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.micro.record.endings import add_endings
from m2flow.micro.record.ledger import IS_CURRENT
from m2flow.micro.record.meter import read_meter

_KEPT = f"""
SELECT ending, sum(coalesce(p.num_generated, max(s.num_generated, coalesce(g.num_generated, 0)))) FROM samples s
JOIN endings ON endings.id = s.id LEFT JOIN prefixes p ON p.sample = s.id LEFT JOIN given_up g ON g.sample = s.id
WHERE {IS_CURRENT} GROUP BY ending
"""
_GIVEN_UP = """
SELECT CASE WHEN d.reason = 'unused' THEN 'unused' WHEN d.sample IS NOT NULL THEN 'dropped'
    WHEN EXISTS (SELECT 1 FROM discarded WHERE discarded.call = g.call) THEN 'unused' ELSE 'failed' END, sum(g.num_generated)
FROM given_up g LEFT JOIN dropped d ON d.sample = g.sample WHERE g.sample NOT IN (SELECT id FROM samples) GROUP BY 1
"""
_UNFINISHED = "SELECT sum(num_generated) FROM prefixes WHERE sample NOT IN (SELECT id FROM samples)"


@dataclass(frozen=True)
class TokenAccount:
    """Of one run, in generated tokens."""

    generated: int
    """By the engines, as they counted."""
    trained: int
    """Of samples that some update consumed; each once, however often it did."""
    wasted: Mapping[str, int]
    """Of samples that ended otherwise, by ending (`m2flow.micro.record.endings`): dropped, filtered, expired, failed, unused."""
    lost: Mapping[str, int]
    """Of samples that were with a worker when it ended and had not been written down since, by what happened to it."""
    unfinished: int
    """Written down, of samples that have not finished: a resumed run can go on from them."""
    is_settled: bool = True
    """The run, or the last attempt at it, ended by itself: so all that its workers had is written down, or counted as lost."""

    @property
    def accounted(self) -> int:
        return self.trained + sum(self.wasted.values()) + sum(self.lost.values()) + self.unfinished

    @property
    def is_balanced(self) -> bool:
        """Whether every token that was generated is somewhere, and none twice; of a run that goes on or was killed, none twice."""
        return self.generated == self.accounted if self.is_settled else self.generated >= self.accounted

    def __str__(self) -> str:
        wasted = ", ".join(f"{count:,} {ending}" for ending, count in self.wasted.items())
        lost = sum(self.lost.values())
        parts = [f"{self.trained:,} trained", wasted, f"{lost:,} lost" if lost else "", f"{self.unfinished:,} unfinished"]
        return f"{self.generated:,} generated, of these {self.accounted:,} known: {', '.join(part for part in parts if part)}"


def read_token_account(run_dir: Path) -> TokenAccount:
    """Add up a run's tokens; whether it has ended well, has failed or was killed.

    Raises:
        SpecError: the directory has no ledger, or one of another version of m2flow.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.db'}?mode=ro", uri=True)) as db:
            add_endings(db)
            kept = dict(db.execute(_KEPT))
            wasted = {ending: count for ending, count in kept.items() if ending != "consumed"}
            for ending, count in db.execute(_GIVEN_UP):
                wasted[ending] = wasted.get(ending, 0) + count
            (expired,) = db.execute("SELECT coalesce(sum(num_generated), 0) FROM expired").fetchone()
            if expired:
                wasted["expired"] = wasted.get("expired", 0) + expired
            lost = dict(db.execute("SELECT reason, sum(num_tokens) FROM lost GROUP BY reason ORDER BY reason"))
            (unfinished,) = db.execute(_UNFINISHED).fetchone()
            going_on = db.execute("SELECT 1 FROM attempts WHERE ended IS NULL AND number = (SELECT max(number) FROM attempts)").fetchone()
    except sqlite3.Error as error:
        raise SpecError(
            f"can't read {run_dir / 'ledger.db'}: {error}", now="Give the directory of a run, as `m2flow run` names it."
        ) from None
    meters = sorted((run_dir / "segments").glob("*.meter"))
    account = TokenAccount(0, kept.get("consumed", 0), dict(sorted(wasted.items())), lost, unfinished or 0, going_on is None)
    generated = sum(read_meter(path).num_generated for path in meters) if meters else account.accounted
    return replace(account, generated=generated)
