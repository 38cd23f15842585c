"""How each sample of a run ended: once, in one of six ways, with the reason.

    consumed   some update trained on it
    dropped    it was late, and in no result
    filtered   a call that decides what stays left it out
    expired    what it had was too old for the call that took it over, and it was not finished anew
    failed     a call failed on it
    unused     nothing trained on it: beyond the last prompt that was needed, carried and never given, or in no update's batch

What a run writes down are facts, and they may overlap: a sample that one op filtered may be trained on all the same, and one that was
judged may turn out not to be needed. The first in this order that holds is its ending. Read from the ledger, also while the run goes on:
then `unused` may still become another.
"""

from __future__ import annotations

import sqlite3

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
    """Have a connection to a ledger know the view `endings`: a row (id, ending, reason) for each sample."""
    db.execute(_VIEW)
