"""The order in which the rows of a dataset are drawn: shuffled in epochs, by a column, in proportions, or by what was seen of each row.

    rows drawn before, seed, key of the dataset --Epochs, Mix, Observed--> position of the next row

An order depends on nothing else, so that a resumed run goes on at the very row. `Observed` also depends on what the flow has told it,
which it does in program order, with values that a resumed or replayed run reads from its record.
"""

from __future__ import annotations

import inspect
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import DatasetError, OptionError, did_you_mean
from m2flow.recipe import is_number

Row = Mapping[str, object]
_OfSeen = Callable[[Row, tuple[float, ...]], float | None]
Curriculum = str | Callable[[Row], float] | _OfSeen
"""A column of numbers; a function of a row; or one of a row and of what was seen of it."""

ROW = "row"
"""The column with each row's position, which tells what was seen of which."""


class RowSource(Protocol):
    """Rows by position, in memory or on disk."""

    def __len__(self) -> int: ...

    def rows(self) -> Iterator[Row]:
        """All rows in order."""

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        """Read rows."""

    def part(self, index: Sequence[int]) -> RowSource:
        """Only these rows."""


@final
class ListedRows(RowSource):
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Iterator[Row]:
        return iter(self._rows)

    def rows_at(self, positions: Sequence[int]) -> list[Row]:
        return [self._rows[position] for position in positions]

    def part(self, index: Sequence[int]) -> ListedRows:
        return ListedRows(self.rows_at(index))


class Order(ABC):
    """Which row comes next."""

    @abstractmethod
    def at(self, drawn: int, seed: int, key: str) -> int:
        """The position of the row that is drawn after so many others. `key` names the dataset in its flow."""

    @abstractmethod
    def fresh(self) -> Order:
        """The same order at its beginning, for another flow."""

    @abstractmethod
    def part(self, index: Sequence[int]) -> Order:
        """The order of these rows alone."""


def order_of(rows: RowSource, curriculum: Curriculum | None, name: str, *, shuffle: bool) -> Order:
    """Make the order that a dataset's options ask for.

    Raises:
        OptionError, DatasetError: the curriculum is none, or a row has no number in it.
    """
    if callable(curriculum) and _takes_seen(curriculum):
        if ROW in rows.rows_at([0])[0]:
            now = "Rename the column, to row_of_file for example."
            raise DatasetError(f"the dataset {name!r} has a column {ROW!r}, which a curriculum of what was seen adds itself", now=now)
        return Observed(rows, cast(_OfSeen, curriculum), name, shuffle=shuffle)
    return Epochs(len(rows), _levels(rows.rows(), curriculum, name), shuffle=shuffle)


def _takes_seen(function: Callable[..., object]) -> bool:
    """Whether a function takes a row and what was seen of it."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return True
    return False  # The second parameter has a default, and is the function's own.


def _levels(rows: Iterable[Row], curriculum: Any, name: str) -> list[float] | None:
    """The number of each row that a curriculum goes by; None without one.

    Raises:
        OptionError, DatasetError: the curriculum is none, or a row has no number.
    """
    if curriculum is None:
        return None
    if not isinstance(curriculum, str) and not callable(curriculum):
        raise OptionError(f"curriculum={curriculum!r:.60} is neither a column's name nor a function of a row")
    found: list[float] = []
    for i, row in enumerate(rows):
        if isinstance(curriculum, str) and curriculum not in row:
            now = did_you_mean(curriculum, list(row), f"It has {', '.join(sorted(row))}.")
            raise DatasetError(f"the dataset {name!r} has no column {curriculum!r} for curriculum=", now=now)
        found.append(_level(row[curriculum] if isinstance(curriculum, str) else curriculum(row), i, name))
    return found


def _level(level: object, row: int, name: str) -> float:
    if not is_number(level):
        raise DatasetError(
            f"the curriculum of the dataset {name!r} goes by numbers, and row {row} has {level!r:.60}",
            now="Give each row a number in that column, or a function of a row that returns one.",
        )
    assert isinstance(level, int | float)
    return level


def _shuffled(num_rows: int, seed: int, key: str, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{key}/{epoch}").shuffle(order)
    return order


@final
class Epochs(Order):
    """Each row once an epoch: as they are, shuffled anew in each, or by their levels, with rows of one level shuffled."""

    def __init__(self, num_rows: int, by: list[float] | None, *, shuffle: bool) -> None:
        self._num_rows = num_rows
        self._levels = by
        self._shuffle = shuffle
        self._epoch: tuple[int, list[int]] | None = None

    def at(self, drawn: int, seed: int, key: str) -> int:
        epoch, place = divmod(drawn, self._num_rows)
        if not self._shuffle and self._levels is None:
            return place
        if self._epoch is None or self._epoch[0] != epoch:
            order = _shuffled(self._num_rows, seed, key, epoch) if self._shuffle else list(range(self._num_rows))
            if self._levels is not None:
                order.sort(key=self._levels.__getitem__)
            self._epoch = (epoch, order)
        return self._epoch[1][place]

    def fresh(self) -> Epochs:
        return Epochs(self._num_rows, self._levels, shuffle=self._shuffle)

    def part(self, index: Sequence[int]) -> Epochs:
        return Epochs(len(index), None if self._levels is None else [self._levels[i] for i in index], shuffle=self._shuffle)


@final
class Mix(Order):
    """Several orders, each having a share of the draws: the next row is of the one furthest behind its share."""

    def __init__(self, sources: Sequence[Order], sizes: Sequence[int], shares: Sequence[float]) -> None:
        self._sources = [one.fresh() for one in sources]
        self._sizes = tuple(sizes)
        self._shares = tuple(shares)
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._drawn: list[tuple[int, int]] = []
        """For each draw the source, and how many rows were drawn of it before."""
        self._counts = [0] * len(self._shares)

    def at(self, drawn: int, seed: int, key: str) -> int:
        """A position among the rows of all sources, one after the other."""
        while len(self._drawn) <= drawn:
            behind = [share * (len(self._drawn) + 1) - count for share, count in zip(self._shares, self._counts, strict=True)]
            source = behind.index(max(behind))
            self._drawn.append((source, self._counts[source]))
            self._counts[source] += 1
        source, before = self._drawn[drawn]
        return self._starts[source] + self._sources[source].at(before, seed, f"{key}/{source}")

    def fresh(self) -> Mix:
        return Mix(self._sources, self._sizes, self._shares)

    def part(self, index: Sequence[int]) -> Mix:
        raise DatasetError("a mix has no parts", now="Divide the datasets before mixing them.")


@final
class Observed(Order):
    """The row whose level is lowest now, each at most once an epoch; of one level as they are, or shuffled anew in each epoch.

    A level is a function of the row and of the list of what was seen of it, oldest first; None passes the row over for now. An epoch ends
    when no row is left that it may give. Of rows on disk their levels are in memory (8 bytes each), and a row is read again when something
    was seen of it.
    """

    def __init__(self, rows: RowSource, level: _OfSeen, name: str, *, shuffle: bool, unseen: npt.NDArray[np.float64] | None = None) -> None:
        self._rows = rows
        self._level = level
        self._name = name
        self._shuffle = shuffle
        self._seen: dict[int, list[float]] = {}
        """Row -> what was seen of it."""
        if unseen is None:
            unseen = np.array([self._level_of(i, row) for i, row in enumerate(rows.rows())], np.float64)
        self._unseen = unseen
        """Levels of rows of which nothing was seen."""
        self._levels = unseen.copy()
        """nan: passed over."""
        self._drawn: list[tuple[int, int]] = []
        """Epoch and row of each draw."""
        self._next: list[int] | None = None
        """What the epoch may still give, the next one last; None: to be found anew."""
        self._epoch: tuple[int, npt.NDArray[np.int64]] | None = None
        """The order of rows of one level in an epoch."""

    def at(self, drawn: int, seed: int, key: str) -> int:
        while len(self._drawn) <= drawn:
            self._draw(seed, key)
        return self._drawn[drawn][1]

    def _draw(self, seed: int, key: str) -> None:
        epoch = self._drawn[-1][0] if self._drawn else 0
        if self._next is None:
            self._next = self._left(epoch, seed, key)
        if not self._next and self._drawn:
            epoch += 1
            self._next = self._left(epoch, seed, key)
        if not self._next:
            raise DatasetError(
                f"the curriculum of the dataset {self._name!r} passes over all of its {len(self._rows)} rows",
                now="Return a number for one row at least: the lowest comes first.",
            )
        self._drawn.append((epoch, self._next.pop()))

    def _left(self, epoch: int, seed: int, key: str) -> list[int]:
        """The rows that an epoch may still give, the next one last."""
        if self._epoch is None or self._epoch[0] != epoch:
            size = len(self._rows)
            self._epoch = epoch, np.array(_shuffled(size, seed, key, epoch) if self._shuffle else range(size), np.int64)
        order, may_come = self._epoch[1], ~np.isnan(self._levels)
        may_come[[row for _, row in itertools.takewhile(lambda draw: draw[0] == epoch, reversed(self._drawn))]] = False
        left = order[may_come[order]]
        found: list[int] = left[np.argsort(self._levels[left], kind="stable")][::-1].tolist()
        return found

    def saw(self, seen: Mapping[str, float]) -> None:
        """Take note of a number for each of these rows, by position."""
        positions = [int(text) for text in seen]
        for position, value, row in zip(positions, seen.values(), self._rows.rows_at(positions), strict=True):
            self._seen.setdefault(position, []).append(value)
            self._levels[position] = self._level_of(position, row)
        self._next = None

    def go_back(self, drawn: int) -> None:
        """Take back all draws after so many."""
        if len(self._drawn) > drawn:
            del self._drawn[drawn:]
            self._next = None

    def _level_of(self, position: int, row: Row) -> float:
        level = self._level(row, tuple(self._seen.get(position, ())))
        return float("nan") if level is None else _level(level, position, self._name)

    def fresh(self) -> Observed:
        return Observed(self._rows, self._level, self._name, shuffle=self._shuffle, unseen=self._unseen)

    def part(self, index: Sequence[int]) -> Observed:
        rows, unseen = self._rows.part(index), self._unseen[np.array(index, np.int64)]
        return Observed(rows, self._level, self._name, shuffle=self._shuffle, unseen=unseen)
