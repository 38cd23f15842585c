"""Handles: lazy results of calls, and the calculations on them that do not make Python wait.

A handle stands for a call's result. Passing it to another call draws an edge; looking at it (`float`, `len`, a loop, an index) makes
Python wait for it, and for nothing else. Calculating with it does not wait, it records a call (`m2flow.macro.number`) whose function
is in `m2flow.macro.columns`:

    rewards - 0.1 * kl.sum(over="sample")                   rows: elementwise, a sum over each sample's tokens
    rewards.mean()                                          a `Number`: over all samples
    rewards.mean(over="group")                              rows: for each sample the mean over the responses to its prompt
    responses.filter(is_good), rewards.map(clip)            rows: by a user's function, run on a worker
    rewards.groupby(responses.level).mean()                 numbers by level, as metrics are
    rewards.groupby(responses.level).transform("mean")      rows: for each sample the mean of its level
    responses.groupby("level").mean(rewards)                the same as the first groupby

`groupby` groups by any column; the responses to one prompt are `over="group"` of a reduction. A key's number needs all rows, so both
forms of `groupby` are barriers.

A worker calls a user's function with a `Sample`, or a list of those of a group; for a handle of one column `OnValue` and `OnGroup` pass
that column's values instead. `Metrics` and `OpValue` are single values, `Rows` and `Scores` have a row for each sample.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast, final, overload

import numpy as np

from m2flow.errors import DatasetError, FieldError, OpError, OptionError, RowError, TraceError, did_you_mean
from m2flow.macro.columns import (
    Elementwise,
    Given,
    How,
    Lengths,
    Mask,
    Operand,
    Positions,
    Reduce,
    ReduceByKey,
    ReduceEach,
    Rowwise,
    TransformByKey,
    Whole,
    is_of_no_step,
    key_text,
    numbers,
    value_of,
)
from m2flow.macro.graph import Call, Granularity, Ref
from m2flow.macro.number import Inputs, Number, Operators, as_operand
from m2flow.macro.oversampling import carries
from m2flow.macro.session import Session, instead_of_member
from m2flow.recipe import MOST_COUNTED, check_choice, check_flag, check_seconds
from m2flow.samples import SAMPLING_MASK, Batch, Column, Ragged, Sample, SampleId, check_prompt, prompt_positions


class Handle:
    """The result of one call.

    Args:
        owner: the handle that this is a view of: of the same call, whose result lives as long as either.
    """

    def __init__(self, session: Session, call: Call, *, owner: Handle | None = None) -> None:
        self._session = session
        self._call = call
        self._owner = owner
        if owner is None:
            session.held(call, has_past=isinstance(self, Metrics))

    def __del__(self) -> None:
        """Release the call: nobody can ask for its result by this handle any more. May run at any moment (garbage collection)."""
        held = self.__dict__
        if "_owner" in held and held["_owner"] is None and self._session.is_open:
            self._session.released(self._call.ordinal)

    def __copy__(self) -> Handle:
        """A handle stands for a result: a copy would be the same one."""
        return self

    @property
    def ref(self) -> Ref:
        return Ref(self._call.ordinal)

    @property
    def call(self) -> Call:
        return self._call

    @property
    def session(self) -> Session:
        return self._session

    @property
    def maker(self) -> Call:
        """The call that made the samples that this has rows of."""
        return self._session.lineage.makers(self._call.ordinal)[0]

    def check(self, session: Session, what: str) -> Ref:
        """This handle as an input of a call in that session."""
        if self._session is not session:
            raise TraceError(
                f"{what} got a handle of another flow: {self!r}",
                now="Use handles of this flow's calls; values of other flows go in as options.",
            )
        return Ref(self._call.ordinal)

    def observe(self, why: str) -> object:
        """The result. Python waits for it."""
        return self._session.observe(self._call.ordinal, why)

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        """This value as an input of a call."""
        return inputs.whole(self.check(inputs.session, inputs.what), None, label)

    def result_of(self, call: Call) -> Handle:
        """Make a handle of another call of the same session."""
        return Handle(self._session, call)

    def __repr__(self) -> str:
        call = self._call
        unit = "" if call.engine == "source" else f" @{call.granularity}"
        return f"<{call.name}: {self._kind()}, from {call.site}{unit}; not computed by looking at it like this>"

    def _kind(self) -> str:
        return "one value"

    def __bool__(self) -> bool:
        return bool(self.observe("bool()"))


class Metrics(Handle):
    """Numbers by name: what an update reports, or what a `groupby` gives for each key."""

    def __init__(self, session: Session, call: Call, names: Collection[str] = (), *, owner: Handle | None = None) -> None:
        super().__init__(session, call, owner=owner)
        self._names = names
        """Empty: they are not known before."""

    def __getitem__(self, name: object) -> Number:
        if self._names and name not in self._names:
            raise OptionError(f"{self._call.name} gives no number {name!r:.60}", now=did_you_mean(str(name), self._names))
        return Number(self, key_text(name))

    def lagged(self, steps: int) -> dict[str, float] | None:
        """The numbers of `steps` steps ago, at the same place of the program; `None` in the first ones."""
        value = self._past(steps)
        assert isinstance(value, dict | None)
        return value

    def _past(self, steps: int) -> object:
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MOST_COUNTED:
            raise TraceError(f"lagged({steps!r:.60}): the number of steps is a whole number, from 0 to {MOST_COUNTED:,}")
        ordinal = self._session.recall(self._call, steps)
        if ordinal is None:
            return None
        value = self._session.observe(ordinal, f"lagged({steps})", lag=steps)
        return _own(value) if isinstance(value, dict) else value

    def items(self) -> dict[str, float]:
        """The numbers by name. Python waits for them."""
        value = self.observe("items()")
        assert isinstance(value, dict)
        return _own(value)

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        raise TraceError(f"{inputs.what} got {describe(self)}, which is more than one number", now="Say which: metrics['reward'].")

    def _kind(self) -> str:
        return "one value, numbers by name"


class OpValue(Metrics, Operators[Number]):
    """The result of an op on a batch: a number, to calculate with; or numbers by name, `value["name"]`; or a text."""

    def operate(self, operation: str, *operands: object) -> Number:
        return Number(self).operate(operation, *(Number(operand) if isinstance(operand, OpValue) else operand for operand in operands))

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        return Handle.operand(self, inputs, label)

    def __float__(self) -> float:
        return float(Number(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(Number(self), digits)

    def lagged(self, steps: int) -> object:  # type: ignore[override]  # its value may be anything
        """The value `steps` steps ago, at the same place of the program; `None` in the first ones."""
        return self._past(steps)

    def _kind(self) -> str:
        return "one value"


def _own(numbers: dict[str, float]) -> dict[str, float]:
    """Copy numbers for the user. What a trace assumes is no plain dict, and is returned as it is."""
    if type(numbers) is not dict:
        return numbers
    return _EmptyMetrics(numbers) if is_of_no_step(numbers) else dict(numbers)


class _EmptyMetrics(dict[str, float]):
    """Metrics of an update without an optimiser step: those that it does not report are nan."""

    def __missing__(self, name: str) -> float:
        return math.nan


def describe(value: object) -> str:
    """Describe a call's argument for an error: whose result it is, or its type."""
    if isinstance(value, Handle):
        return f"the {'rows' if value.call.is_aligned else 'value'} of {value.call.name} ({value.call.site})"
    return "a number that is not computed yet" if isinstance(value, Number) else f"a {type(value).__name__}"


# ---- users' functions on columns


@dataclass(frozen=True)
class OnValue:
    """Call a user's function on one column's value of a sample."""

    function: Callable[..., object]
    column: str

    def __post_init__(self) -> None:
        _take_name(self, self.function)

    def __call__(self, sample: Sample) -> object:
        return self.function(sample[self.column])


@dataclass(frozen=True)
class OnGroup:
    """Call a user's function on a whole group; its answer, or what that comes to if it is async, counts for each of the samples."""

    function: Callable[..., object]
    column: str | None = None

    def __post_init__(self) -> None:
        _take_name(self, self.function)

    def __call__(self, samples: Sequence[Sample]) -> list[object] | Awaitable[list[object]]:
        answer = self.function(list(samples) if self.column is None else [sample[self.column] for sample in samples])
        return self._later(answer, len(samples)) if inspect.isawaitable(answer) else [answer] * len(samples)

    async def _later(self, answer: Awaitable[object], num_samples: int) -> list[object]:
        return [await answer] * num_samples


def name_of(function: Callable[..., object], default: str) -> str:
    """The name of a call of this function in plans and errors."""
    inner = function.function if isinstance(function, OnValue | OnGroup) else function
    name = str(getattr(inner, "__name__", default))
    return name if name.isidentifier() else default


def _take_name(unit: object, function: Callable[..., object]) -> None:
    """Give a wrapper the name of the user's function, for errors."""
    object.__setattr__(unit, "__qualname__", str(getattr(function, "__qualname__", type(function).__name__)))


def is_isolated(function: Callable[..., object], isolated: bool | None, timeout_s: float | None) -> bool:
    """Whether a function's units run in processes that can be killed alone: as asked for, else plain functions with a time limit.

    An async function with a time limit is cancelled where it waits, and stays where its clients are.
    """
    if isolated is not None:
        check_flag("isolated", isolated)
        return isolated
    if timeout_s is None:
        return False
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isroutine(function) or inspect.isclass(function)
    called = function if is_plain else getattr(type(function), "__call__", function)  # noqa: B004  # its code is looked at
    return not inspect.iscoroutinefunction(called)


# ---- groupby


@final
class GroupBy:
    """Rows grouped by a key. Nothing is recorded before a reduction is asked for."""

    def __init__(self, key: Rows, values: Rows | None) -> None:
        self._key = key
        self._values = values

    def mean(self, values: Rows | None = None) -> Metrics:
        return self._by_key("mean", values)

    def sum(self, values: Rows | None = None) -> Metrics:
        return self._by_key("sum", values)

    def min(self, values: Rows | None = None) -> Metrics:
        return self._by_key("min", values)

    def max(self, values: Rows | None = None) -> Metrics:
        return self._by_key("max", values)

    def std(self, values: Rows | None = None) -> Metrics:
        return self._by_key("std", values)

    def count(self) -> Metrics:
        """The number of rows of each key."""
        inputs, key, _, _ = self._inputs("count", None, is_count=True)
        call = inputs.record(
            "groupby", ReduceByKey("count", None, key), granularity=Granularity.BATCH, is_aligned=False, gives="table", shown=_by("count")
        )
        return self._key.metrics_of(call)

    def transform(self, how: How, values: Rows | None = None) -> Rows:
        """Give each row the reduction over the rows of its key."""
        inputs, key, column, mask = self._inputs(how, values, is_count=how == "count")
        call = inputs.record("groupby", TransformByKey(how, column, key, mask), granularity=Granularity.BATCH, shown=_by(how))
        return self._key.result_of(call)

    def __repr__(self) -> str:
        return f"<rows by {self._key!r}>"

    def _by_key(self, how: How, values: Rows | None) -> Metrics:
        inputs, key, column, mask = self._inputs(how, values)
        call = inputs.record(
            "groupby", ReduceByKey(how, column, key, mask), granularity=Granularity.BATCH, is_aligned=False, gives="table", shown=_by(how)
        )
        return self._key.metrics_of(call)

    def _inputs(self, how: str, values: Rows | None, *, is_count: bool = False) -> tuple[Inputs, str, str | None, str | None]:
        inputs = Inputs(self._key.session, f"groupby(...).{how}")
        values = values if values is not None else self._values
        if is_count:
            return inputs, self._key.operand(inputs, "key").name, None, None
        if values is None:
            raise TraceError(f"groupby(...).{how}() of whole samples: of what?", now=f"Say of which numbers: .{how}(rewards).")
        column = values.operand(inputs, "values").name
        return inputs, self._key.operand(inputs, "key").name, column, values.mask(inputs)


def _by(how: str) -> dict[str, object]:
    return {"how": how}


# ---- joining rows


@dataclass(frozen=True)
class Placed:
    """Add operands as columns of these names, and drop the columns that were joined under an input's name."""

    columns: tuple[tuple[str, Operand | Elementwise], ...]
    joined: tuple[str, ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        found = {name: _column(name, operand, rows, values) for name, operand in self.columns}
        return rows.without(self.joined).with_columns(**found)


@dataclass(frozen=True)
class Without:
    """Drop columns."""

    names: tuple[str, ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        return rows.without(self.names)


@dataclass(frozen=True)
class MeanByPrompt:
    """Average over the samples of each prompt, by the prompt's position in the generate call."""

    column: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        if not len(rows):
            return {}
        column = numbers(rows[self.column], "back_to", rows)
        if isinstance(column, Ragged):
            raise OpError("back_to got several numbers a sample", now="Reduce them first: .mean(over='sample').")
        positions = prompt_positions(rows.ids)
        return {str(at): float(np.mean(column[positions == at].astype(np.float64))) for at in np.unique(positions).tolist()}


@dataclass(frozen=True)
class ByPosition:
    """Each row's number, by its position among all."""

    name: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        found = values[self.name]
        assert isinstance(found, Mapping)
        for at, packed in enumerate(rows.ids.tolist()):
            if str(at) not in found:
                now = "A filter dropped all that was generated from it; filter the prompts in the same way, or keep one of each."
                raise OpError(f"back_to found nothing that was generated from sample {SampleId.unpack(packed)}", now=now)
        return np.array([found[str(at)] for at in range(len(rows))], np.float64)


def joined(what: str, rows: Sequence[Rows], columns: Mapping[str, object]) -> Rows:
    """Join rows: the first ones with all columns of the further ones (a single column goes by its name), and with these columns by name.

    Of columns of one name the last wins.
    """
    first = rows[0]
    given = _labelled(rows, columns)
    filtered = Inputs(first.session, what)  # Only to find which of them has been filtered most.
    for label, handle in given:
        filtered.rows(handle.check(first.session, what), None, label)
    narrowest = next(handle for _, handle in given if handle.ref == filtered.base)
    first = first.within(narrowest)
    inputs = Inputs(first.session, what)
    inputs.rows(first.ref, None, "rows")
    fields: list[frozenset[str] | None] = [first.fields]
    placed: list[tuple[str, Operand | Elementwise]] = []
    for handle in rows[1:]:
        if handle.column is None:
            inputs.rows(handle.check(first.session, what), None, "rows")
            fields.append(handle.fields)
        elif handle.column in dict(placed) or handle.column in columns:
            now = f"Name them: {what}(responses, first=..., second=...)."
            raise TraceError(f"{what} got two columns named {handle.column!r}", now=now)
        else:
            placed.append((handle.column, handle.operand(inputs, f"{handle.column}=")))
    for name, value in columns.items():
        operand = as_operand(value, inputs, f"{name}=")
        if operand is None:
            raise TraceError(f"{what}({name}=...) got a {type(value).__name__}; it takes a handle, a number or a text")
        placed.append((name, operand))
    known = None if None in fields else frozenset().union(*(of for of in fields if of), (name for name, _ in placed))
    call = inputs.record(what, Placed(tuple(placed), inputs.single), gives="rows", fields=known, shown={"columns": [n for n, _ in placed]})
    return first.samples_of(call)


def restricted(rows: Rows, to: Rows) -> Rows:
    """Keep the rows that a more filtered handle of the same samples has."""
    inputs = Inputs(rows.session, "join")
    inputs.rows(to.ref, None, "filtered")
    inputs.rows(rows.ref, None, "rows")
    surplus = (to.fields or frozenset()) - rows.fields if rows.fields is not None else frozenset()
    call = inputs.record("join", Without(tuple(sorted(surplus))), gives="rows", fields=rows.fields, shown={"only": "rows"})
    return rows.like(call)


def averaged_by_prompt(grades: Rows, prompts: Rows) -> Rows:
    """Average grades of generated samples over each of the prompts that they were generated from."""
    if not isinstance(prompts, Handle):
        raise TraceError(
            f"back_to got {describe(prompts)}; it takes the rows that these were generated from",
            now="Pass the rows that policy.generate got.",
        )
    session = grades.session
    makers = session.lineage.makers(grades.ref.call)
    asked = makers[0].input("prompts") if len(makers) == 1 else None
    prompts.check(session, "back_to")
    if asked is None or session.lineage.known(asked.call).parts != session.lineage.known(prompts.ref.call).parts:
        raise TraceError(
            f"back_to got rows of {prompts.call.name} ({prompts.call.site}), and these samples were not generated from them",
            now="Pass the rows that the generate call was given, or rows of the same samples.",
        )
    if carries(makers[0].options):
        raise TraceError(
            "back_to got samples of which some were carried over, and those are of earlier prompts",
            now="Leave out late='carry' where samples are brought back to their prompts.",
        )
    inputs = Inputs(session, "back_to")
    column = grades.operand(inputs, "grades").name
    table = inputs.record("mean_by_prompt", MeanByPrompt(column), granularity=Granularity.BATCH, is_aligned=False)
    holder = grades.metrics_of(table)
    inputs = Inputs(session, "back_to")
    inputs.rows(prompts.ref, None, "rows")
    found = inputs.whole(holder.ref, None, "grades")
    return prompts.result_of(inputs.record("back_to", ByPosition(found.name), granularity=Granularity.BATCH))


def _labelled(rows: Sequence[Rows], columns: Mapping[str, object]) -> list[tuple[str, Rows]]:
    """All handles with rows among these, by the names that errors use."""
    named = [(f"{name}=", cast("Rows", value)) for name, value in columns.items() if isinstance(value, Reducible)]
    return [("rows", handle) for handle in rows] + named


def _column(name: str, operand: Operand | Elementwise, rows: Batch, values: Mapping[str, object]) -> Column:
    found = value_of(operand, rows, values)
    if isinstance(found, str):
        found = Ragged.texts([found] * len(rows))
    elif isinstance(found, bool | int | float):
        found = np.full(len(rows), found)
    if name != "prompt" or (isinstance(found, Ragged) and found.kind == "text"):
        return found
    texts = [found.item(i) for i in range(len(found))] if isinstance(found, Ragged) else list(found.tolist())
    for packed, text in zip(rows.ids.tolist(), texts, strict=True):
        try:
            check_prompt(text, f"the prompt of sample {SampleId.unpack(packed)}")
        except DatasetError as error:
            raise OpError(error.what, now=error.now) from None
    return Ragged.texts([str(text) for text in texts]) if all(isinstance(text, str) for text in texts) else Ragged.json(texts)


# ---- reductions

R = TypeVar("R")
Over = Literal["group", "sample"]


class Reducible(ABC, Generic[R]):
    """The reductions of a handle. Over no rows, `mean`, `std`, `min` and `max` are nan. Of per-token columns, generated tokens count."""

    @abstractmethod
    def reduce(self, how: How, over: Over | None) -> Number | R:
        """A `Number` without `over`, else rows."""

    @overload
    def mean(self) -> Number: ...
    @overload
    def mean(self, over: Over) -> R: ...
    def mean(self, over: Over | None = None) -> Number | R:
        """The mean: of all, or `over` the rows of each group, or the tokens of each sample."""
        return self.reduce("mean", over)

    @overload
    def sum(self) -> Number: ...
    @overload
    def sum(self, over: Over) -> R: ...
    def sum(self, over: Over | None = None) -> Number | R:
        """The sum, of all or `over` each; of booleans, how many are true."""
        return self.reduce("sum", over)

    @overload
    def min(self) -> Number: ...
    @overload
    def min(self, over: Over) -> R: ...
    def min(self, over: Over | None = None) -> Number | R:
        """The smallest value, of all or `over` each."""
        return self.reduce("min", over)

    @overload
    def max(self) -> Number: ...
    @overload
    def max(self, over: Over) -> R: ...
    def max(self, over: Over | None = None) -> Number | R:
        """The largest value, of all or `over` each."""
        return self.reduce("max", over)

    @overload
    def std(self) -> Number: ...
    @overload
    def std(self, over: Over) -> R: ...
    def std(self, over: Over | None = None) -> Number | R:
        """The population's standard deviation (divided by the count), of all or `over` each."""
        return self.reduce("std", over)

    @overload
    def any(self) -> Number: ...
    @overload
    def any(self, over: Over) -> R: ...
    def any(self, over: Over | None = None) -> Number | R:
        """Whether one is true, or not 0, of all or `over` each. Its truth may decide an `if`, which waits for it."""
        return self.reduce("any", over)

    @overload
    def all(self) -> Number: ...
    @overload
    def all(self, over: Over) -> R: ...
    def all(self, over: Over | None = None) -> Number | R:
        """Whether each is true, or not 0, of all or `over` each. Its truth may decide an `if`, which waits for it."""
        return self.reduce("all", over)

    @overload
    def count(self) -> Number: ...
    @overload
    def count(self, over: Over) -> R: ...
    def count(self, over: Over | None = None) -> Number | R:
        """The number of values, whatever they are (rows, or tokens), of all or `over` each."""
        return self.reduce("count", over)


# ---- rows

TOKENS = frozenset({"tokens", "loss_mask", "logprobs", "versions", "kv_stale"})
"""Columns of samples with a value for each of their tokens."""


class Rows(Handle, Operators["Rows"], Reducible["Rows"]):
    """A result with a row for each sample: whole samples, or one column of them.

    Whole samples have fields: `responses.text`, `responses.length`, and each column of the dataset's row, `responses.level`
    (`responses["level"]` where a method has the name). A column is calculated with, compared, reduced.
    """

    scored_by: object = None
    """The role whose rewards these samples have already, from a refill."""
    column: str | None = None
    """The column that the rows stand for; None: whole samples."""

    def __init__(
        self, session: Session, call: Call, column: str | None = None, *, owner: Handle | None = None, tokens_of: Rows | None = None
    ) -> None:
        super().__init__(session, call, owner=owner)
        if column is not None:
            self.column = column
        self.tokens_of = tokens_of
        """The samples whose tokens the column has values for, if it has."""

    # ---- observing (Python waits)

    def batch(self) -> Batch:
        """The rows as a batch, in the order of identity. Python waits for it."""
        return self._wait("batch()")

    def __len__(self) -> int:
        return len(self._wait("len()"))

    def __iter__(self) -> Iterator[object]:
        return iter(self._items("a loop"))

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice | str | Rows) -> Rows: ...
    def __getitem__(self, index: int | slice | str | Rows) -> object:
        """A row by its position in the order of identity, which waits; rows by a slice or by a condition; a column by its name."""
        if isinstance(index, str):
            return self._field(index)
        if isinstance(index, Rows):
            return self.filter(index)
        if isinstance(index, slice):
            return self._slice(index)
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TraceError(f"an index of {describe(self)} is a position, a slice, a condition or a name, not {index!r:.60}")
        items = self._items("an index")
        if not -len(items) <= index < len(items):
            raise RowError(
                f"{describe(self)} have {len(items)} rows, and none at position {index}", now="Ask len() first, or take a slice."
            )
        return items[index]

    def __bool__(self) -> bool:
        raise TraceError(
            f"{self!r} has many rows; its truth is not defined",
            now="Reduce it first: if float(rewards.mean()) > 0.9, if (rewards > 0.5).any(). Join conditions by & and |.",
        )

    def _wait(self, why: str) -> Batch:
        value = self.observe(why)
        assert isinstance(value, Batch)
        return value.in_order().frozen()

    def _items(self, why: str) -> list[object]:
        batch = self._wait(why)
        if self.column is None or not len(batch):
            return list(batch.rows())
        if self.column not in batch:
            raise self._unknown(self.column, frozenset(batch.columns))
        column = batch[self.column]
        return [column.item(i) for i in range(len(column))] if isinstance(column, Ragged) else column.tolist()

    # ---- columns

    @property
    def fields(self) -> frozenset[str] | None:
        """The names of the columns, as far as they are known before the call has run."""
        return self._session.lineage.known(self._call.ordinal).fields

    @property
    def length(self) -> Rows:
        """Generated tokens of each sample."""
        inputs = Inputs(self._session, "length")
        mask = self._field("loss_mask").operand(inputs, "mask")
        return self.result_of(inputs.record("length", Lengths(mask.name)))

    def __getattr__(self, name: str) -> Rows:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._field(name)

    def _field(self, name: str) -> Rows:
        if self.column is not None:
            what = f"has no field {name!r}: it is the column {self.column!r} alone"
            raise FieldError(f"{self!r} {what}", now=instead_of_member("Rows", name) or f"Take it from the samples: responses.{name}.")
        fields = self.fields
        if fields is not None and name not in fields:
            raise self._unknown(name, fields)
        return Rows(self._session, self._call, name, owner=self, tokens_of=self if name in TOKENS else None)

    def _unknown(self, name: str, fields: frozenset[str]) -> FieldError:
        known = ", ".join(sorted(fields))
        return FieldError(
            f"{describe(self)} have no {name!r}; they have {known}",
            now=instead_of_member("Rows", name) or did_you_mean(name, [*fields, "length"], ""),
        )

    # ---- calculating

    def operate(self, operation: str, *operands: object) -> Rows:
        inputs = Inputs(self._session, operation)
        labels = {1: ("value",), 2: ("left", "right"), 3: ("condition", "first", "second")}[len(operands)]
        is_text_fit = operation in ("equal", "not_equal", "where")
        found: list[Operand | Elementwise] = []
        for label, operand in zip(labels, operands, strict=True):
            part = as_operand(operand, inputs, label)
            if part is None or (isinstance(operand, str) and not is_text_fit):
                return NotImplemented  # type: ignore[no-any-return]
            found.append(part)
        shown = {label: part.value for label, part in zip(labels, found, strict=True) if isinstance(part, Given)}
        call = inputs.record(operation, Elementwise(operation, tuple(found)), shown=shown)
        tokens_of = next((o.tokens_of for o in operands if isinstance(o, Rows) and o.tokens_of is not None), None)
        return Rows(self._session, call, "value", tokens_of=tokens_of)

    def operand(self, inputs: Inputs, label: str) -> Rowwise:
        """This column as an input of a call."""
        if self.column is None:
            now = "Name a column: responses.length; or compute one: responses.map(function)."
            raise TraceError(f"{inputs.what} got {describe(self)}, which are whole samples", now=now)
        return inputs.rows(self.check(inputs.session, inputs.what), self.column, label)

    def mask(self, inputs: Inputs) -> str | None:
        """Add the input that says which values of a per-token column count."""
        return None if self.tokens_of is None else self.tokens_of._field("loss_mask").operand(inputs, "mask").name

    def reduce(self, how: How, over: Over | None) -> Number | Rows:
        if over is not None:
            check_choice("over", over, ("group", "sample"), "or nothing, for all samples", of=how)
        inputs = Inputs(self._session, how)
        if self.column is None and how == "count" and over != "sample":
            column, mask = None, None
            inputs.rows(self.ref, None, "samples")
        else:
            column, mask = self.operand(inputs, "values").name, self.mask(inputs)
        if over is None:
            call = inputs.record(how, Reduce(how, column, mask), granularity=Granularity.BATCH, is_aligned=False)
            return Number(Handle(self._session, call), is_truth=how in ("any", "all"))
        unit = Granularity.GROUP if over == "group" else Granularity.SAMPLE
        return self.result_of(inputs.record(how, ReduceEach(how, column, over, mask), granularity=unit, shown={"over": over}))

    def groupby(self, key: Rows | str) -> GroupBy:
        """The rows by the values of a column: of whole samples by its name, else as a handle."""
        if isinstance(key, str):
            if self.column is not None:
                raise FieldError(f"{self!r} is one column, and has no {key!r}", now=f"Pass the key as a handle: groupby(responses.{key}).")
            key = self._field(key)
        if not isinstance(key, Rows):
            raise TraceError(f"groupby got {describe(key)}; it takes a column's name, or a handle: groupby(responses.level)")
        return GroupBy(key, None if self.column is None else self)

    # ---- users' functions

    def map(self, function: Callable[..., object], *, timeout_s: float | None = None, isolated: bool | None = None) -> Rows:
        """Apply a function to each sample, or to each value of a column; run on a worker, plain or async. One value for each sample.

        `timeout_s` and `isolated` are as for `m2flow.op`.
        """
        check_seconds("timeout_s", timeout_s)
        return self.result_of(self._by_function("map", function, timeout_s, gives="column", isolated=isolated))

    def filter(self, keeps: Callable[..., object] | Rows) -> Rows:
        """Keep rows: a function that returns True or False for a sample (or of a column's value), or a condition."""
        if isinstance(keeps, Rows):
            return self._kept(keeps)
        return self.like(self._by_function("filter", keeps, None, gives="kept"))

    def select(self, condition: Rows) -> Rows:
        """Keep the rows for which a condition holds: `responses.select(rewards > 0.5)`."""
        return self._kept(condition)

    def filter_groups(self, keeps: Callable[..., object]) -> Rows:
        """Keep whole groups: a function that returns True or False for the list of a prompt's samples (or their values)."""
        return self.like(self._by_function("filter_groups", keeps, None, gives="kept", unit=Granularity.GROUP))

    def _by_function(
        self,
        what: str,
        function: Callable[..., object],
        timeout_s: float | None,
        *,
        gives: str,
        unit: Granularity = Granularity.SAMPLE,
        isolated: bool | None = None,
    ) -> Call:
        if not callable(function):
            raise TraceError(f"{what} got {describe(function)}; it takes a function")
        is_alone = is_isolated(function, isolated, timeout_s)
        if unit is Granularity.GROUP:
            function = OnGroup(function, self.column)
        elif self.column is not None:
            function = OnValue(function, self.column)
        return self._session.record(
            role=name_of(function, what),
            method="",
            engine="function",
            granularity=unit,
            inputs={"samples": self.ref},
            options={
                "function": function,
                "timeout_s": timeout_s,
                "column": "value",
                "gives": gives,
                **({"isolated": True} if is_alone else {}),
            },
            shown={} if what == "map" else {"what": what},
        )

    # ---- other rows and columns

    def _kept(self, condition: object) -> Rows:
        if not isinstance(condition, Rows):
            raise TraceError(
                f"the rows to keep of {describe(self)} were given as {describe(condition)}", now="Pass a condition on them: rewards > 0.5."
            )
        rows = self.within(condition)
        inputs = Inputs(self._session, "filter")
        inputs.rows(rows.ref, None, "rows")
        call = inputs.record("filter", Mask(condition.operand(inputs, "condition").name), gives="kept")
        return self.like(call)

    def _slice(self, rows: slice) -> Rows:
        for bound in (rows.start, rows.stop, rows.step):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise TraceError(f"a slice of {describe(self)} got {bound!r:.60}; its bounds are whole numbers")
        if rows.step is not None and rows.step < 1:
            raise TraceError(
                f"a slice of {describe(self)} goes by {rows.step}; rows stay in the order of identity, so it must be 1 or more"
            )
        inputs = Inputs(self._session, "slice")
        inputs.rows(self.ref, None, "rows")
        shown = {name: value for name, value in (("start", rows.start), ("stop", rows.stop), ("step", rows.step)) if value is not None}
        call = inputs.record("slice", Positions(rows.start, rows.stop, rows.step), granularity=Granularity.BATCH, gives="kept", shown=shown)
        return self.like(call)

    def with_columns(self, **columns: object) -> Rows:
        """The rows with these columns, new or in place of theirs: handles of the same samples, or one value for all.

        What a model is to answer is the column `prompt`: `judge.generate(responses.with_columns(prompt=responses.map(ask)), ...)`.
        """
        return joined("with_columns", [self], columns)

    def within(self, other: Rows) -> Rows:
        """Drop the rows that a filter of the other's has dropped; themselves, if none has."""
        lineage = self._session.lineage
        ours, theirs = lineage.known(self._call.ordinal), lineage.known(other.check(self._session, "a join").call)
        if not theirs.is_within(ours) or ours.is_within(theirs):
            return self
        return restricted(self, other)

    def back_to(self, prompts: Rows) -> Rows:
        """Average over the samples of each row of `prompts` that these samples were generated from.

        What a judge says of responses is rows of its own; this makes numbers of it that go with the responses:
        `grades.back_to(responses)`. All rows must be there before the first is known.
        """
        return averaged_by_prompt(self, prompts)

    def result_of(self, call: Call) -> Rows:
        """The column of a call that gives one value a sample."""
        return Rows(self._session, call, "value")

    def metrics_of(self, call: Call) -> Metrics:
        return Metrics(self._session, call)

    def samples_of(self, call: Call) -> Rows:
        """The whole rows of another call."""
        return Rows(self._session, call)

    def like(self, call: Call, *, tokens_of: Rows | None = None) -> Rows:
        """The rows of a call that gives such rows as these, or some of them."""
        return Rows(self._session, call, self.column, tokens_of=self.tokens_of if tokens_of is None else tokens_of)

    def _kind(self) -> str:
        if self.column is not None:
            return f"one value a {'sample' if self.tokens_of is None else 'token'}, {self.column!r}"
        return f"one row a sample ({', '.join(sorted(self.fields))})" if self.fields else "one row a sample"


class Scores(Rows):
    """A number for each sample: the result of a reward."""

    column = "reward"


# ---- functions of the flow language


@overload
def where(condition: Rows, first: object, second: object) -> Rows: ...
@overload
def where(condition: Number, first: Number | float, second: Number | float) -> Number: ...
@overload
def where(condition: object, first: object, second: object) -> Rows | Number: ...
def where(condition: object, first: object, second: object) -> Rows | Number:
    """For each sample the first where the condition holds, else the second.

    Each of the three is a column, a number that is not computed yet, or a plain value. Both choices are computed, whatever the condition.
    """
    operands = tuple(Number(operand) if isinstance(operand, OpValue) else operand for operand in (condition, first, second))
    rows = next((operand for operand in operands if isinstance(operand, Rows)), None)
    by = next((operand for operand in operands if isinstance(operand, Number)), None) if rows is None else rows
    result = NotImplemented if by is None else by.operate("where", *operands)
    if result is NotImplemented:
        given = ", ".join(map(describe, operands))
        raise TraceError(f"where got {given}", now="It takes columns and numbers: where(rewards > 0.5, rewards, 0.0).")
    return result


def join(first: Rows, *others: Rows, **columns: object) -> Rows:
    """Rows with the columns of all, sample by sample: `join(responses, rewards)`, `join(responses, kl=kl)`.

    Of handles that went through filters, the one that went through all of them decides which rows are left. Of columns of one name
    the last wins.

    Raises:
        TraceError: they are of different samples, or filtered in different ways; both are named.
    """
    for handle in (first, *others):
        if not isinstance(handle, Rows):
            raise TraceError(f"join got {describe(handle)}; it takes rows", now="One value for all goes by name: join(responses, level=3).")
    return joined("join", [first, *others], columns)


def concat(handles: Sequence[Rows]) -> Rows:
    """The rows of all, which must be different samples; with the columns that they share."""
    handles = list(handles) if isinstance(handles, Iterable) else [handles]
    for handle in handles:
        if not isinstance(handle, Rows):
            raise TraceError(f"concat got {describe(handle)}; it takes a list of rows: concat([first, second])")
    if not handles:
        raise TraceError("concat got no rows")
    columns = {handle.column for handle in handles}
    if len(columns) > 1:
        names = ", ".join(sorted(repr(name) if name else "whole samples" for name in columns))
        now = "Bring them to one name: first.with_columns(value=...), or first + 0."
        raise TraceError(f"concat got different things: {names}", now=now)
    session = handles[0].session
    inputs = Inputs(session, "concat")
    for handle in handles:
        inputs.rows(handle.check(session, "concat"), None, "rows")
    known = [handle.fields for handle in handles]
    shared = None if None in known else frozenset.intersection(*(fields for fields in known if fields is not None))
    if shared is not None and SAMPLING_MASK not in shared and any(fields is not None and SAMPLING_MASK in fields for fields in known):
        raise TraceError(
            "concat got responses with a sampling mask, and others without", now="Give sampling_mask= to all of them, or none."
        )
    call = inputs.record("concat", None, gives="concat", fields=shared)
    of = [handle.tokens_of for handle in handles]
    if all(samples is None for samples in of):
        return handles[0].like(call)
    if any(samples is None for samples in of):
        raise TraceError("concat got values of tokens, and values that are none", now="Reduce the tokens first: .sum(over='sample').")
    return handles[0].like(call, tokens_of=concat([samples for samples in of if samples is not None]))
