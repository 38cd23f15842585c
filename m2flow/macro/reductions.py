"""Many values to one: over all samples, over each group, over the tokens of each sample, over the samples of one key.

Pure functions that the workers run, as those of `m2flow.macro.columns`. Sums are rounded once, from the exact sum (`math.fsum`), so that
no order of samples and no cut into chunks shows in a result. A per-token column counts where a loss may look: the generated tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from m2flow.macro.columns import Array, numbers, objects, truths
from m2flow.samples import Batch, Column, Ragged

How = Literal["mean", "sum", "min", "max", "std", "any", "all", "count"]


@dataclass(frozen=True)
class Reduce:
    """All rows to one number; of no rows, nan where there is none (`mean`, `std`, `min`, `max`)."""

    how: How
    column: str | None
    """None: nothing but the rows to count."""
    mask: str | None = None
    """The column that says which tokens count."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> float:
        return float(reduced(self.how, np.concatenate(_parts(self, rows)) if len(rows) else np.zeros(0)))


@dataclass(frozen=True)
class ReduceEach:
    """The same over each sample's own numbers, or over those of its group: a column with one value a sample."""

    how: How
    column: str | None
    over: Literal["sample", "group"]
    mask: str | None = None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        parts = _parts(self, rows)
        if self.over == "sample":
            return _column(self.how, [reduced(self.how, part) for part in parts])
        each: list[float | int | bool] = []
        for start, end in rows.group_bounds():
            each += [reduced(self.how, np.concatenate(parts[start:end]))] * (end - start)
        return _column(self.how, each)


@dataclass(frozen=True)
class ReduceByKey:
    """All rows of one key to one number: a value by key."""

    how: How
    column: str | None
    """None: nothing but the rows to count."""
    key: str
    mask: str | None = None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        return {key: float(reduced(self.how, part)) for key, part in _by_key(self, rows)[1].items()}


@dataclass(frozen=True)
class TransformByKey:
    """The same for each row: the number of its key."""

    how: How
    column: str | None
    key: str
    mask: str | None = None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        keys, parts = _by_key(self, rows)
        found = {key: reduced(self.how, part) for key, part in parts.items()}
        return _column(self.how, [found[key] for key in keys])


@dataclass(frozen=True)
class Positions:
    """Whether a row's position in the order of identity is in a slice."""

    start: int | None
    stop: int | None
    step: int | None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        is_kept = np.zeros(len(rows), bool)
        is_kept[slice(self.start, self.stop, self.step)] = True
        return is_kept


@dataclass(frozen=True)
class Mask:
    """Rows whose value is true stay."""

    column: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        return truths(rows[self.column], "a filter", rows)


@dataclass(frozen=True)
class Lengths:
    """How many numbers of each sample count: tokens that it generated, by the mask alone."""

    mask: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        mask = rows.ragged(self.mask)
        return np.array([np.count_nonzero(mask.row(i)) for i in range(len(mask))], np.int64)


def reduced(how: How, values: Array) -> float | int | bool:
    """Numbers to one; whole numbers stay whole where the result is one of them, or their sum.

    std is the population's (divided by the count), as that of group advantages.
    """
    if how == "count":
        return len(values)
    if how in ("any", "all"):
        return bool(np.any(values) if how == "any" else np.all(values))
    is_whole = values.dtype.kind in "bi"
    if how == "sum":
        return int(np.sum(values, dtype=np.int64)) if is_whole else _sum(values)
    if not len(values):
        return math.nan
    if how in ("min", "max"):
        extreme = np.min(values) if how == "min" else np.max(values)
        return int(extreme) if is_whole else float(extreme)
    values = values.astype(np.float64)
    mean = _sum(values) / len(values)
    if how == "mean":
        return mean
    with np.errstate(all="ignore"):
        return math.sqrt(_sum((values - mean) ** 2) / len(values))  # type: ignore[operator]


def key_text(value: object) -> str:
    """A key as the text that it has in the result: `easy`, `3`, `True`."""
    return value if isinstance(value, str) else str(value) if isinstance(value, bool | int | float | None) else json.dumps(value)


def _sum(values: Array) -> float:
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):  # It has inf of both signs, or is beyond the range.
        with np.errstate(all="ignore"):
            return float(np.sum(values))


def _parts(of: Reduce | ReduceEach | ReduceByKey | TransformByKey, rows: Batch) -> list[Array]:
    """The numbers of each sample that count."""
    if of.column is None:
        return [np.ones(1, np.int64)] * len(rows)
    column = numbers(rows[of.column], of.how, rows)
    if not isinstance(column, Ragged):
        return list(column.reshape(-1, 1))
    if of.mask is None:
        return [column.row(i) for i in range(len(column))]
    mask = rows.ragged(of.mask)
    return [column.row(i)[mask.row(i).astype(bool)] for i in range(len(column))]


def _by_key(of: ReduceByKey | TransformByKey, rows: Batch) -> tuple[list[str], dict[str, Array]]:
    """Each row's key; and the numbers of each key, in the order of the keys' first samples."""
    if not len(rows):
        return [], {}
    keys = [key_text(value) for value in objects(rows[of.key], len(rows))]
    parts: dict[str, list[Array]] = {}
    for key, part in zip(keys, _parts(of, rows), strict=True):
        parts.setdefault(key, []).append(part)
    return keys, {key: np.concatenate(found) for key, found in parts.items()}


def _column(how: How, values: Sequence[float | int | bool]) -> Column:
    kinds: dict[str, type] = {"any": np.bool_, "all": np.bool_, "count": np.int64, "mean": np.float64, "std": np.float64}
    kind: Callable[..., object] | None = kinds.get(how)
    return np.array(values, kind) if values else np.zeros(0, kind or np.float64)  # type: ignore[arg-type]
