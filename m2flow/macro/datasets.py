"""Datasets: the source of prompts, with a cursor that the run records.

A dataset is a resource of the flow: each `take` reads it at the cursor and advances the cursor, in program order. Its result is a call
like any other (`data()` in the printed graph), so that a replay can answer it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from m2flow.errors import DatasetError
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Rows
from m2flow.macro.session import Session, current_session
from m2flow.recipe import check_count, check_flag, check_text, check_whole, is_count
from m2flow.samples import Batch, Column, column_of, keyed_bits, make_ids, prompt_positions, taken

Row = Mapping[str, object]

_ON_SAMPLES = {"id", "num_tokens", "finish", "seed", "temperature", "text", "reward", "value", "advantages", "reference_logprobs"}
_ON_TOKENS = {"tokens", "loss_mask", "logprobs", "versions", "kv_stale", "routed_experts", "segment_kinds", "segment_lengths"}
_TAKEN = frozenset(_ON_SAMPLES | _ON_TOKENS)
"""Names that samples have already: a column of such a name would be lost, or taken for what it is not."""


class Dataset:
    """Rows with a `prompt`, any other columns being metadata (a `target` makes a row a demonstration).

    Args:
        rows: mappings of the same keys, each with a text under `prompt`.
        shuffle: draw in an order of its own in each epoch, decided by the run's seed.
        name: for plans and errors.
    """

    def __init__(self, rows: Sequence[Row], *, name: str = "dataset", shuffle: bool = True) -> None:
        if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
            raise DatasetError(f"Dataset got a {type(rows).__name__}", now="Give a list of rows: mappings that have a `prompt`.")
        rows = list(rows)
        if not rows:
            raise DatasetError(f"the dataset {name!r} has no rows", now="A flow needs at least one prompt; check its path or its filter.")
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise DatasetError(f"row {i} of the dataset {name!r} is no mapping of names to values: {row!r:.60}")
        keys = set(rows[0])
        if keys & _TAKEN:
            column = min(keys & _TAKEN)
            now = f"Rename the column, to {column}_of_row for example."
            raise DatasetError(f"the dataset {name!r} has a column {column!r}, a name that samples have already", now=now)
        for i, row in enumerate(rows):
            if set(row) != keys:
                raise DatasetError(f"row {i} of the dataset {name!r} has the columns {sorted(row)}, row 0 has {sorted(keys)}")
            if not isinstance(row.get("prompt"), str):
                raise DatasetError(f"row {i} of the dataset {name!r} has no text under 'prompt': {row.get('prompt')!r:.60}")
        check_text("name", name)
        check_flag("shuffle", shuffle)
        self.name = name
        self._columns: dict[str, Column] = {key: column_of([row[key] for row in rows], key) for key in sorted(keys)}
        self._num_rows = len(rows)
        self._shuffle = shuffle
        self._cursor = 0
        self._num_alls = 0
        self._first_unsure = 0
        self._refilled: Rows | None = None
        """Rows that a refill kept from `_first_unsure` on: the last sample tells how many were used, and so where the cursor is."""
        self._session: Session | None = None
        self._key = ""
        self._order: tuple[int, list[int]] | None = None

    @classmethod
    def generate(
        cls, make: Callable[[random.Random], Row], size: int, *, seed: int = 0, name: str = "dataset", shuffle: bool = False
    ) -> Dataset:
        """Make `size` rows by a function of a random generator; row i depends on (seed, i) alone."""
        if not callable(make):
            raise DatasetError(f"Dataset.generate got make={make!r:.60}; it takes a function of a random generator that gives a row")
        check_count("size", size)
        check_whole("seed", seed)
        return cls([make(random.Random(f"{seed}/{i}")) for i in range(size)], name=name, shuffle=shuffle)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def cursor(self) -> int:
        """Rows drawn so far, over all epochs."""
        self._settle()
        return self._cursor

    def take(self, count: int) -> Rows:
        """Draw the next `count` rows; past the end it starts over."""
        if not is_count(count):
            raise DatasetError(f"take({count!r}) of the dataset {self.name!r}: it takes a whole number of rows, 1 or more")
        session = self._join()
        self._settle()
        positions = [self._position(self._cursor + i) for i in range(count)]
        # The seed depends on the dataset and the draw, however many rows are drawn at a time.
        seeds = [keyed_bits(self._key, "take", self._cursor + i) for i in range(count)]
        return self._record(session, "take", positions, seeds, {"count": count}, moves_by=count)

    def upto(self, count: int) -> Rows:
        """Draw the next `count` rows, of which some may be returned (`return_rest`): a refill does not know yet how many it needs."""
        self._join()
        self._settle()
        self._first_unsure = self._cursor
        return self.take(count)

    def return_rest(self, kept: Rows) -> None:
        """Return the rows of the last `upto` that come after the last prompt of these samples."""
        self._refilled = kept

    def all(self) -> Rows:
        """Every row, in the dataset's order; the cursor stays."""
        session = self._join()
        self._num_alls += 1
        seeds = [keyed_bits(self._key, f"all {self._num_alls}", i) for i in range(self._num_rows)]
        return self._record(session, "all", list(range(self._num_rows)), seeds, {}, moves_by=0)

    def batches(self, size: int, *, epochs: int = 1) -> Iterator[Rows]:
        """Batches of `size` rows, a step each; a last smaller one is left out, as `m2flow plan` says."""
        if not is_count(size) or not is_count(epochs):
            raise DatasetError(f"batches({size!r}, epochs={epochs!r}) of the dataset {self.name!r}: both are whole numbers, 1 or more")
        if size > self._num_rows:
            raise DatasetError(f"a batch of {size} rows from the dataset {self.name!r}, which has {self._num_rows}")
        session = self._join()
        for _ in session.iterate(epochs * self._num_rows // size):
            yield self.take(size)

    def _join(self) -> Session:
        session = current_session(f"the dataset {self.name!r}")
        if self._session is not session:
            self._session, self._key, self._cursor, self._order = session, session.key_dataset(self.name), 0, None
            self._num_alls, self._refilled = 0, None
        return session

    def _settle(self) -> None:
        """Wait until it is known how many rows the last refill used."""
        kept, self._refilled = self._refilled, None
        if kept is None or self._session is None or kept.call.ordinal in self._session.raised:
            return  # Of a refill that failed, and whose error the flow has caught, all rows are used.
        call = self._session.record(
            role=self.name,
            method="num_used",
            engine="function",
            granularity=Granularity.BATCH,
            inputs={"samples": kept.ref},
            options={
                "function": _num_used,
                "timeout_s": None,
                "column": "value",
                "style": "columns",
                "expected": kept.call.options["refill"],
            },
            shown={},
            is_aligned=False,
        )
        used = Handle(self._session, call).observe(f"the cursor of {self.name}, which a refill moves")
        assert isinstance(used, int | float)
        self._cursor = self._first_unsure + int(used)

    def _position(self, drawn: int) -> int:
        assert self._session is not None
        epoch, place = divmod(drawn, self._num_rows)
        if not self._shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            order = list(range(self._num_rows))
            random.Random(f"{self._session.seed}/{self._key}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]

    def _record(
        self, session: Session, method: str, positions: list[int], seeds: list[int], shown: dict[str, object], *, moves_by: int
    ) -> Rows:
        ids = make_ids(session.next_ordinal, len(positions))
        rows = Batch(ids, {**taken(self._columns, np.array(positions, np.int64)), "seed": np.array(seeds, np.uint64)})
        resource = f"{self._key}.cursor"
        call = session.record(
            role=self.name,
            method=method,
            engine="source",
            granularity=Granularity.SAMPLE,
            inputs={},
            options={"rows": rows, "cursor": self._cursor},
            shown=shown,
            reads=(resource,),
            writes=(resource,) if moves_by else (),
        )
        self._cursor += moves_by
        return Rows(session, call)


def _num_used(rows: Batch, values: Mapping[str, object]) -> int:
    """Rows of the source up to the last one whose group was kept."""
    return int(prompt_positions(rows.ids).max()) + 1
