"""Rows of a call, read back from where workers wrote them down: when nobody else has them any more.

    (call, identities) -> ledger: places, rewards -> segment files -> rows, as the worker had them

Samples go by their identity, whichever call gives them; those that have not finished go by the call that they were made for
(`m2flow.micro.work.store.stopped_at`), and of them it is their newest prefix. Rewards are numbers in the ledger itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from m2flow.errors import InternalError
from m2flow.micro.record.ledger import Ledger
from m2flow.micro.record.segments import Place, read_segment
from m2flow.samples import Batch, SampleId

_PLACE = "SELECT segment, offset, size, checksum FROM"


def read_back(ledger: Ledger, run_dir: Path, key: int, ids: Sequence[int], *, is_reward: bool) -> Batch:
    """Rows that are in the ledger, in this order.

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
            wanted.setdefault(found[0], set()).add(packed)  # An older row of it may be in the record of another.
    parts = []
    for place, mine in wanted.items():
        rows = read_segment(run_dir / "segments", place)
        here = [row for row, packed in enumerate(rows.ids.tolist()) if packed in mine]
        parts += [rows.take(here)] if here else []
    return Batch.concat(parts).select(np.array(ids, np.int64))
