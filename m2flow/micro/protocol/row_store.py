"""The rows that a worker has of each call: its own results, and what others sent.

Rows that the plan spills (`m2flow.micro.lowering.routing`) are not in memory but in the worker's segment file, and read when they are
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from m2flow.samples import Batch

_MOST_FORGOTTEN = 10_000
"""Most forgotten calls that are remembered: many times more than can have rows in transfer."""


def stopped_at(call: int) -> int:
    """Return the key of the rows of samples that a generation left unfinished; its result goes by its ordinal."""
    return -1 - call


class RowStore:
    """Rows by call and identity."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Batch | Callable[[], Batch]]] = {}
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        self._senders: dict[int, list[str]] = {}
        """Call -> sender of each part."""
        self._forgotten: dict[int, None] = {}
        """The latest forgotten calls, in order."""

    def put(self, call: int, batch: Batch, sender: str = "") -> None:
        """Store rows that a peer has sent or that were made here. A row that is here already is replaced.

        Rows of a forgotten call, which a peer may still send, are ignored: nobody would forget them again.
        """
        if call in self._forgotten:
            return
        parts = self._parts.setdefault(call, [])
        places = self._places.setdefault(call, {})
        places.update((packed, (len(parts), row)) for row, packed in enumerate(batch.ids.tolist()))
        parts.append(batch)
        self._senders.setdefault(call, []).append(sender)

    def spill(self, call: int, ids: Sequence[int], read: Callable[[], Batch]) -> None:
        """Store rows that `read` reads from a file, in this order."""
        if call in self._forgotten:
            return
        parts = self._parts.setdefault(call, [])
        self._places.setdefault(call, {}).update((packed, (len(parts), row)) for row, packed in enumerate(ids))
        parts.append(read)
        self._senders.setdefault(call, []).append("")

    def has(self, call: int, ids: Iterable[int]) -> bool:
        places = self._places.get(call, {})
        return all(packed in places for packed in ids)

    def ids(self, call: int) -> list[int]:
        """List the rows of a call that are here, in the order of identity."""
        return sorted(self._places.get(call, {}))

    def has_prefixes(self, call: int, ids: Sequence[int], num_generated: Sequence[int]) -> bool:
        """Whether the rows of stopped samples are here, each with this number of generated tokens."""
        return self.has(call, ids) and all(
            _num_generated(*self._where(call, packed)) == count for packed, count in zip(ids, num_generated, strict=True)
        )

    def _where(self, call: int, packed: int) -> tuple[Batch, int]:
        part, row = self._places[call][packed]
        return _read(self._parts[call][part]), row

    def get(self, call: int, ids: Sequence[int]) -> Batch:
        """Return rows in this order. All must be here."""
        if not len(ids):
            return Batch(np.zeros(0, np.int64))
        parts = self._parts[call]
        where = [self._places[call][packed] for packed in ids]
        used = sorted({part for part, _ in where})
        if len(used) == 1:
            return _read(parts[used[0]]).take([row for _, row in where])
        taken = [[row for p, row in where if p == part] for part in used]
        joined = Batch.concat([_read(parts[part]).take(rows) for part, rows in zip(used, taken, strict=True)])
        order = np.argsort(np.argsort([part for part, _ in where], kind="stable"), kind="stable")
        return joined.take(order)

    def drop_sent_by(self, sender: str, but: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
        """Drop all that a peer has sent except these rows, by call; return those of them that are not here."""
        for call, senders in self._senders.items():
            if sender in senders:
                kept, places = set(but.get(call, ())), self._places[call]
                for packed in [p for p, (part, _) in places.items() if senders[part] == sender and p not in kept]:
                    del places[packed]
        missing = {call: [packed for packed in ids if packed not in self._places.get(call, {})] for call, ids in but.items()}
        return {call: ids for call, ids in missing.items() if ids}

    def forget(self, call: int) -> None:
        self._parts.pop(call, None)
        self._senders.pop(call, None)
        self._places.pop(call, None)
        self._forgotten[call] = None
        if len(self._forgotten) > _MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]


def _read(part: Batch | Callable[[], Batch]) -> Batch:
    return part if isinstance(part, Batch) else part()


def _num_generated(batch: Batch, row: int) -> int:
    return int(batch.ragged("loss_mask").row(row).sum())
