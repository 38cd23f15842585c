"""Compute the algebra on handles: pure functions on columns, which workers run and import by path.

    rewards - beta * kl      two calls; each is an `Elementwise` on the rows of a chunk
    rewards.mean()           a `Reduce` of all rows

A column is dense (a value for each sample) or ragged (a row of numbers for each sample: one for each token). In an operation on a dense
and a ragged column, each sample's value goes with all its numbers. Numbers become int64, float64 or bool first. An elementwise operation
looks at one sample at a time, and a sum is rounded once, from the exact sum (`math.fsum`), so no result depends on the order of samples
or on how rows were cut into chunks. As in NumPy, a division by zero gives inf or nan. A reduction of a per-token column counts what a
loss may look at: the generated tokens.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import OpError
from m2flow.samples import BRANCH_TURN, MAIN, Batch, Column, Finish, Ragged, SampleId, Segment, column_of, keyed_bits, records_of

# ---- operands and elementwise operations

Array = npt.NDArray[np.generic]
Scalar = bool | int | float | str

_ARITHMETIC: Mapping[str, Callable[..., Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.true_divide,
    "floor_divide": np.floor_divide,
    "remainder": np.remainder,
    "power": np.power,
    "negative": np.negative,
    "positive": np.positive,
    "absolute": np.absolute,
}
_ORDER: Mapping[str, Callable[..., Array]] = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
_EQUALITY: Mapping[str, Callable[..., Array]] = {"equal": np.equal, "not_equal": np.not_equal}
_LOGIC: Mapping[str, Callable[..., Array]] = {
    "both": np.logical_and,
    "either": np.logical_or,
    "differ": np.logical_xor,
    "invert": np.logical_not,
}
OPERATIONS = frozenset({*_ARITHMETIC, *_ORDER, *_EQUALITY, *_LOGIC, "where"})
TRUTHS = frozenset({*_ORDER, *_EQUALITY, *_LOGIC})
"""Operations that give True or False."""


@dataclass(frozen=True)
class Rowwise:
    """An operand: the column of this name."""

    name: str


@dataclass(frozen=True)
class Whole:
    """An operand: the whole value of this input, or a field of it. The same for every sample."""

    name: str
    field: str | None = None


@dataclass(frozen=True)
class Given:
    """An operand: a plain Python value."""

    value: Scalar


Operand = Rowwise | Whole | Given


@dataclass(frozen=True)
class Elementwise:
    """Apply one operation to the operands, sample by sample; once, if all are whole values."""

    operation: str
    operands: tuple[Operand | Elementwise, ...]
    """An operand that is an operation is one on whole values alone."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column | float:
        found = [value_of(operand, rows, values) for operand in self.operands]
        if not any(isinstance(operand, Rowwise) for operand in self.operands):
            return float(scalar(self.operation, *found))  # type: ignore[arg-type]
        return elementwise(self.operation, found, rows)


def value_of(operand: Operand | Elementwise, rows: Batch, values: Mapping[str, object]) -> Column | Scalar:
    """An operand's column, or its one value."""
    match operand:
        case Elementwise():
            result = operand(rows, values)
            assert isinstance(result, float)
            return result
        case Rowwise(name):
            return rows[name]
        case Given(value):
            return value
        case Whole(name, field):
            return whole(values[name], field)


def metric(value: object, name: str) -> object:
    """Look a metric up by name. Of an update without an optimiser step, every one that it does not report is a mean over nothing: nan.

    Raises:
        LookupError: there is none; the message says so.
    """
    if not isinstance(value, Mapping):
        raise LookupError(f"there is no metric {name!r}")
    if name in value:
        return value[name]
    if is_of_no_step(value):
        return math.nan
    raise LookupError(f"there is no metric {name!r}; there are {', '.join(sorted(map(str, value)))}")


def is_of_no_step(metrics: Mapping[str, object]) -> bool:
    """Whether these are the metrics of an update that had nothing to train on: no row, or episodes in which the model had no turn."""
    return metrics.get("num_steps") == 0


def whole(value: object, field: str | None) -> Scalar:
    """Read a number or text out of a call's value. A worker gets numbers as floats; so this gives them everywhere.

    Raises:
        OpError: there is no such field, or it is neither a number nor a text.
    """
    if field is not None:
        try:
            value = metric(value, field)
        except LookupError as error:
            raise OpError(str(error.args[0])) from None
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value)
    raise OpError(f"a {type(value).__name__} is no number to calculate with", now="Take a number of it before you calculate.")


def scalar(operation: str, *operands: Scalar) -> Scalar:
    """Apply an operation to whole values alone."""
    if operation == "where":
        condition, first, second = operands
        return first if condition else second
    if operation in _EQUALITY and any(isinstance(operand, str) for operand in operands):
        return (operands[0] == operands[1]) is (operation == "equal")
    for operand in operands:
        if isinstance(operand, str):
            raise OpError(f"{operation} got the text {operand!r:.60}; it takes numbers", now="Turn the values into numbers before.")
    if operation in _LOGIC:
        return bool(_LOGIC[operation](*operands))
    result = _apply(operation, [np.float64(operand) for operand in operands])
    return bool(result) if operation in TRUTHS else float(result)


def elementwise(operation: str, operands: Sequence[Column | Scalar], rows: Batch) -> Column:
    """Apply an operation to columns and single values. Returns a column.

    Raises:
        OpError: two ragged columns of which a sample has more numbers in one; texts or lists where numbers must be.
    """
    if operation == "where":
        return _where(operands, rows)
    if operation in _EQUALITY and any(_is_text(operand) for operand in operands):
        left, right = (objects(operand, len(rows)) for operand in operands)
        return np.array([(a == b) is (operation == "equal") for a, b in zip(left, right, strict=True)], bool)
    columns = [operand if isinstance(operand, bool | int | float) else numbers(operand, operation, rows) for operand in operands]
    if operation in _LOGIC:
        _check_truths(operation, columns)
    flat, offsets = _level(operation, columns, rows)
    result = _apply(operation, flat)
    return result if offsets is None else Ragged(result, offsets)


def numbers(column: Column | Scalar, wanted_by: str, rows: Batch) -> Column:
    """Convert a column to int64, float64 or bool. Values of a user's function are stored as JSON, and are decoded here.

    Raises:
        OpError: it has something else; the first sample of which that is so is named.
    """
    if isinstance(column, str) or (isinstance(column, Ragged) and column.kind == "text"):
        raise OpError(f"{wanted_by} got texts; it takes numbers", now="Compare texts with == and !=, or .map(...) them to numbers first.")
    if isinstance(column, Ragged) and column.kind == "json":
        column = _from_json(column, wanted_by, rows)
    if isinstance(column, Ragged):
        return Ragged(_plain(column.values), column.offsets)
    return _plain(np.asarray(column))


def objects(operand: Column | Scalar, count: int) -> list[object]:
    """The values one by one, as Python objects."""
    if isinstance(operand, Ragged):
        return [operand.item(i) for i in range(len(operand))]
    if isinstance(operand, np.ndarray):
        return list(operand.tolist())
    return [operand] * count


def truths(column: Column | Scalar, wanted_by: str, rows: Batch) -> npt.NDArray[np.bool_]:
    """Convert a column to booleans, one for each sample."""
    found = numbers(column, wanted_by, rows)
    if isinstance(found, Ragged) or found.dtype != np.bool_:
        what = "several values a sample" if isinstance(found, Ragged) else "numbers"
        raise OpError(f"{wanted_by} got {what}; it takes True or False of each sample", now="Compare first: rewards > 0.5.")
    return found.astype(np.bool_)


def _from_json(column: Ragged, wanted_by: str, rows: Batch) -> Column:
    found = [column.item(i) for i in range(len(column))]
    for i, value in enumerate(found):
        of = value if isinstance(value, list) else [value]
        if isinstance(value, list) != isinstance(found[0], list) or not all(isinstance(part, bool | int | float) for part in of):
            shown = f"{value!r:.60} on sample {SampleId.unpack(int(rows.ids[i]))}"
            raise OpError(f"{wanted_by} got {shown}; it takes numbers", now="Turn the values into numbers before.")
    if not any(isinstance(value, list) for value in found):
        return column_of(found)
    rows_of = [value for value in found if isinstance(value, list)]
    flat = column_of([part for value in rows_of for part in value])
    dtype = flat.dtype if isinstance(flat, np.ndarray) else np.float64
    return Ragged.of(rows_of, dtype)


def _plain(values: Array) -> Array:
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    return values if values.dtype == np.bool_ else values.astype(np.float64)


def _is_text(operand: Column | Scalar) -> bool:
    return isinstance(operand, str) or (isinstance(operand, Ragged) and operand.kind == "text")


def _check_truths(operation: str, columns: Sequence[Column | Scalar]) -> None:
    sign = {"both": "&", "either": "|", "differ": "^", "invert": "~"}[operation]
    for column in columns:
        kind = column.values.dtype if isinstance(column, Ragged) else np.asarray(column).dtype
        if kind != np.bool_ and (isinstance(column, Ragged) or np.asarray(column).size):
            now = f"Compare first: (rewards > 0.5) {sign} (length < 100)." if sign != "~" else "Compare first: ~(rewards > 0.5)."
            raise OpError(f"{sign} got numbers; it takes True or False", now=now)


def _level(operation: str, columns: Sequence[Column | Scalar], rows: Batch) -> tuple[list[Array | Scalar], npt.NDArray[np.int64] | None]:
    """Broadcast the columns to a common length. Returns their numbers, and the offsets if one is ragged."""
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if not ragged:
        return list(columns), None  # type: ignore[arg-type]
    lengths = ragged[0].lengths
    for other in ragged[1:]:
        if not np.array_equal(lengths, other.lengths):
            i = int(np.flatnonzero(lengths != other.lengths)[0])
            sample = SampleId.unpack(int(rows.ids[i]))
            raise OpError(
                f"{operation} got {lengths[i]} numbers and {other.lengths[i]} numbers of sample {sample}",
                now="Per-token columns go together if they are of the same samples' tokens. Reduce one: kl.sum(over='sample').",
            )
    flat = [
        column.values if isinstance(column, Ragged) else np.repeat(column, lengths) if isinstance(column, np.ndarray) else column
        for column in columns
    ]
    return flat, ragged[0].offsets


def _apply(operation: str, operands: Sequence[Array | Scalar]) -> Array:
    """NumPy's operation, on truths as on 0 and 1. A power is a float; so is what is left of a division of whole numbers by zero."""
    with np.errstate(all="ignore"):
        if operation in _ARITHMETIC:
            operands = [np.asarray(o, np.int64) if np.asarray(o).dtype == np.bool_ else o for o in operands]
            if operation == "power" or (operation in ("floor_divide", "remainder") and not np.all(operands[1])):
                operands = [np.asarray(operand, np.float64) for operand in operands]
            return _plain(np.asarray(_ARITHMETIC[operation](*operands)))
        return np.asarray({**_ORDER, **_EQUALITY, **_LOGIC}[operation](*operands))


def _where(operands: Sequence[Column | Scalar], rows: Batch) -> Column:
    """The first choice where the condition holds, else the second; texts and lists too, where a sample has one condition."""
    condition, *choices = operands
    if not isinstance(condition, np.ndarray | Ragged):
        condition = np.full(len(rows), bool(condition))
    condition = numbers(condition, "where", rows)
    _check_truths("both", [condition])
    if isinstance(condition, np.ndarray) and any(
        _is_text(choice) or (isinstance(choice, Ragged) and choice.kind == "json") for choice in choices
    ):
        first, second = (objects(choice, len(rows)) for choice in choices)
        chosen = [a if is_first else b for is_first, a, b in zip(condition.tolist(), first, second, strict=True)]
        return Ragged.texts([str(value) for value in chosen]) if all(map(_is_text, choices)) else Ragged.json(chosen)
    columns = [choice if isinstance(choice, bool | int | float) else numbers(choice, "where", rows) for choice in choices]
    flat, offsets = _level("where", [condition, *columns], rows)
    result = _plain(np.where(*flat))
    return result if offsets is None else Ragged(result, offsets)


# ---- reductions

How = Literal["mean", "sum", "min", "max", "std", "any", "all", "count"]


@dataclass(frozen=True)
class Reduce:
    """Reduce all rows to one number; of no rows, nan where there is none (`mean`, `std`, `min`, `max`)."""

    how: How
    column: str | None
    """None: nothing but the rows to count."""
    mask: str | None = None
    """The column that says which tokens count."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> float:
        return float(reduced(self.how, np.concatenate(_parts(self, rows)) if len(rows) else np.zeros(0)))


@dataclass(frozen=True)
class ReduceEach:
    """Reduce each sample's own numbers, or those of its group: a column with one value for each sample."""

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
    """Reduce the rows of each key to one number: a value by key."""

    how: How
    column: str | None
    """None: nothing but the rows to count."""
    key: str
    mask: str | None = None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        return {key: float(reduced(self.how, part)) for key, part in _by_key(self, rows)[1].items()}


@dataclass(frozen=True)
class TransformByKey:
    """Reduce the rows of each key, and give each row the number of its key."""

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
    """Keep the rows whose value is true."""

    column: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        return truths(rows[self.column], "a filter", rows)


@dataclass(frozen=True)
class Lengths:
    """Count the numbers of each sample that the mask selects: its generated tokens."""

    mask: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        mask = rows.ragged(self.mask)
        return np.array([np.count_nonzero(mask.row(i)) for i in range(len(mask))], np.int64)


def reduced(how: How, values: Array) -> float | int | bool:
    """Reduce numbers to one; integers stay integers where the result is one of them, or their sum.

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


@dataclass(frozen=True)
class ColumnFunction:
    """A function on columns, by name: the worker that runs it imports what it needs."""

    module: str
    name: str
    options: tuple[tuple[str, float | str], ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> object:
        return getattr(importlib.import_module(self.module), self.name)(rows, values, **dict(self.options))


# ---- what one of several speakers said in episodes


@dataclass(frozen=True)
class Spoke:
    """Mark the episodes in which a speaker has sampled a token, or has a turn that a branch shares."""

    speaker: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        masks, kinds, found = rows.ragged("loss_mask"), rows.ragged("segment_kinds"), np.zeros(len(rows), np.bool_)
        for row, record in enumerate(records_of(rows)):
            spans = _spans_of(rows, row, record, self.speaker)
            is_shared = kinds.row(row) == Segment.SHARED
            found[row] = any(masks.row(row)[span.start : span.stop].any() or is_shared[span.first : span.last].any() for span in spans)
        return found


_OF_TOKENS = ("tokens", "loss_mask", "logprobs", "versions", "kv_stale")
_OF_SEGMENTS = ("segment_kinds", "segment_lengths")
OF_SPEAKERS = frozenset((*_OF_TOKENS, *_OF_SEGMENTS, "episode", "reward", "num_turns", "finish", "text", "prompt_text", "temperature"))
"""Columns in which what one speaker said is other than what all did."""


@dataclass(frozen=True)
class Only:
    """Keep these columns alone."""

    names: frozenset[str]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        return rows.only([name for name in rows.columns if name in self.names])


@dataclass(frozen=True)
class Said:
    """Take out of episodes what one speaker said: its conversations, with their turns and rewards."""

    speaker: str
    temperature: float | None = None
    """At which its tokens were drawn; None: at the rollout's, which the rows have."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        if not len(rows):
            return rows
        of_tokens = [name for name in _OF_TOKENS if name in rows]
        tokens: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in of_tokens}
        segments: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _OF_SEGMENTS}
        records, last, rewards, prompts = list[dict[str, Any]](), list[Mapping[str, Any]](), list[float](), list[str]()
        texts = rows.ragged("prompt_text")
        for row, record in enumerate(records_of(rows)):
            spans = _spans_of(rows, row, record, self.speaker)
            for name, parts in tokens.items():
                parts.append(np.concatenate([rows.ragged(name).row(row)[span.start : span.stop] for span in spans]))
            for name, parts in segments.items():
                parts.append(np.concatenate([rows.ragged(name).row(row)[span.first : span.last] for span in spans]))
            own, reward = _record_of(record, self.speaker, float(rows.dense("reward")[row]))
            records.append(own)
            last.append(own["turns"][-1] if own["turns"] else {"finish": Finish.STOP, "text": ""})
            rewards.append(reward)
            prompts.append(str(next((one["prompt"] for one in own.get("conversations", ()) if one["prompt"]), texts.item(row))))
        columns = {name: Ragged.of(parts, rows.ragged(name).values.dtype) for name, parts in (tokens | segments).items()}
        return rows.with_columns(
            **columns,
            episode=Ragged.json(records),
            reward=np.array(rewards, np.float64),
            num_turns=np.array([len(own["turns"]) for own in records], rows.dense("num_turns").dtype),
            finish=np.array([turn["finish"] for turn in last], rows.dense("finish").dtype),
            text=Ragged.texts([str(turn["text"]) for turn in last]),
            prompt_text=Ragged.texts(prompts),
            **({} if self.temperature is None else {"temperature": np.full(len(rows), self.temperature or 1.0, np.float64)}),
        )


class _Span(NamedTuple):
    """A sequence of a row: its tokens, from `start` to `stop`, and its segments, from `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


_ALONE: Sequence[Mapping[str, Any]] = ({"name": MAIN, "num_turns": None, "by": ""},)
"""What a record that names no conversations has."""


def _spans_of(rows: Batch, row: int, record: Mapping[str, Any], speaker: str) -> list[_Span]:
    """The sequences of a row that are a speaker's."""
    kinds, ends = rows.ragged("segment_kinds").row(row), np.cumsum(rows.ragged("segment_lengths").row(row))
    first = [0, *(np.flatnonzero(kinds[1:] == Segment.PROMPT) + 1).tolist(), len(kinds)]
    edges = [0, *(int(ends[at - 1]) for at in first[1:])]
    spans = [_Span(*of) for of in zip(edges, edges[1:], first, first[1:], strict=False)]
    named = record.get("conversations") or _ALONE
    return [span for span, one in zip(spans, named, strict=True) if one.get("by", "") == speaker]


def _record_of(record: Mapping[str, Any], speaker: str, reward: float) -> tuple[dict[str, Any], float]:
    """A speaker's part of an episode's record, and its reward; nan: the agent gave it none."""
    named, turns, at = record.get("conversations") or _ALONE, list[Any](), 0
    for one in named:
        num_turns = len(record["turns"]) if one["num_turns"] is None else one["num_turns"]
        turns += record["turns"][at : at + num_turns] if one.get("by", "") == speaker else []
        at += num_turns
    own = [one for one in named if one.get("by", "") == speaker]
    found = {**record, "turns": turns} | ({"conversations": own} if "conversations" in record else {})
    if record.get("order"):
        found["order"] = [name for name in record["order"] if name in {one["name"] for one in own}]
    if record.get("rewards"):
        names = {one["name"] for one in own}
        goes_by = {name: of for name, of in record["rewarded"].items() if name in names}
        found |= {"rewarded": goes_by, "rewards": {name: record["rewards"][name] for name in sorted(set(goes_by.values()))}}
        used = list(found["rewards"].values())
        reward = sum(used) / len(used) if used else math.nan
    return found, reward


# ---- where episodes are branched


@dataclass(frozen=True)
class EpisodeReward:
    """Each episode's reward; 0 of one that failed and counts."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        reward = rows.dense("reward").astype(np.float64)
        for row in np.flatnonzero(np.isnan(reward)).tolist():
            if not rows.ragged("failure").item(row):
                who = SampleId.unpack(int(rows.ids[row]))
                raise OpError(f"the agent returned no reward on sample {who}", now="Return one, or judge the episodes by a Reward.").about(
                    int(rows.ids[row])
                )
            reward[row] = 0.0
        return reward


@final
class FieldOf:
    """One field of each row's mapping, as a function on columns."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.name = name

    def __call__(self, rows: Batch, values: dict[str, object]) -> Column:
        column = rows.columns["value"]
        assert isinstance(column, Ragged)
        return Ragged.json([dict(column.item(row))[self.name] for row in range(len(rows))])  # type: ignore[call-overload]


@dataclass(frozen=True)
class BranchTurn:
    """Add to episodes the turn that their branches begin with, as `branch_turn`."""

    at: int | None
    """From 1, or from the end if below 0. None: the column's, or any."""
    column: str | None
    repeat: int
    """How often the program had these episodes played before: what `any` depends on, besides the episode."""

    @property
    def is_given(self) -> bool:
        """Whether the turn is said; otherwise any will do, and of a silent episode its beginning."""
        return self.at is not None or self.column is not None

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        if not len(rows):
            return rows
        counts, seeds = rows.dense("num_turns").tolist(), rows.dense("seed").tolist()
        given = None if self.column is None else _whole_numbers(rows, self.column)
        turns, records = [], records_of(rows)
        for row, packed in enumerate(rows.ids.tolist()):
            if records[row].get("order", ()) is None:
                what = f"branch: turns of episode {SampleId.unpack(packed)} were taken at the same time, so that they have no order"
                raise OpError(what, now="Branch agents that have one turn at a time.").about(packed)
            count = counts[row]
            turn = self.at if given is None else given[row]
            if turn is None:
                turn = 1 + keyed_bits(seeds[row], BRANCH_TURN, self.repeat) % max(count, 1)
            first = turn if turn > 0 else count + 1 + turn
            if not 1 <= first <= count and (count or self.is_given):
                has = f"has turns 1 to {count}" if count else "has no whole turn"
                now = "Filter first: episodes[episodes.num_turns >= 2].branch(at=2, ...)."
                raise OpError(f"branch: episode {SampleId.unpack(packed)} has no turn {turn}: it {has}", now=now).about(packed)
            turns.append(first)
        return rows.without(() if self.column is None else (self.column,)).with_columns(**{BRANCH_TURN: np.array(turns, np.int64)})


def _whole_numbers(rows: Batch, column: str) -> list[int]:
    found = numbers(rows[column], "branch(at=...)", rows)
    values: Sequence[object] = found.tolist() if isinstance(found, np.ndarray) else [found.item(row) for row in range(len(rows))]
    turns = []
    for packed, value in zip(rows.ids.tolist(), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
            who = SampleId.unpack(packed)
            raise OpError(f"branch(at=...) got {value!r:.60} for episode {who}", now="A turn is a whole number.").about(packed)
        turns.append(int(value))
    return turns
