"""Handles: the lazy results of calls.

A handle stands for what a call will give. Passing it to another call draws an edge; looking at it (`float`, `len`, a loop, an
index) makes Python wait for it, and for nothing else. Calculating with it does not: `rewards - 0.1 * kl.sum(over="sample")`,
`responses.length`, `rewards.mean()`, `responses.filter(is_good)` are calls of their own (`m2flow.macro.algebra`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import overload

import numpy as np

from m2flow.errors import FieldError, RowError, TraceError, did_you_mean
from m2flow.macro.algebra import Inputs, as_operand
from m2flow.macro.columns import Elementwise, Given, Operand, Rowwise
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.grouping import GroupBy
from m2flow.macro.joining import brought_back, joined, narrowed
from m2flow.macro.number import Number as Number
from m2flow.macro.operators import Operators
from m2flow.macro.reducible import Over, Reducible
from m2flow.macro.reductions import How, Lengths, Mask, Positions, Reduce, ReduceEach
from m2flow.macro.results import Handle as Handle
from m2flow.macro.results import Metrics as Metrics
from m2flow.macro.results import describe as describe
from m2flow.macro.session import Session
from m2flow.macro.units import OnGroup, OnValue, is_isolated, name_of
from m2flow.recipe import check_choice, check_seconds
from m2flow.samples import Batch, Ragged

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

    # Looking at them

    def batch(self) -> Batch:
        """The rows, as a batch in the order of identity. Python waits for it."""
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

    # Fields

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
            raise FieldError(f"{self!r} {what}", now=f"Take it from the samples: responses.{name}.")
        fields = self.fields
        if fields is not None and name not in fields:
            raise self._unknown(name, fields)
        return Rows(self._session, self._call, name, owner=self, tokens_of=self if name in TOKENS else None)

    def _unknown(self, name: str, fields: frozenset[str]) -> FieldError:
        known = ", ".join(sorted(fields))
        return FieldError(f"{describe(self)} have no {name!r}; they have {known}", now=did_you_mean(name, [*fields, "length"], ""))

    # Calculating

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
        """Of a column of tokens: the input that says which of them count."""
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

    # The user's functions

    def map(self, function: Callable[..., object], *, timeout_s: float | None = None, isolated: bool | None = None) -> Rows:
        """A function on each sample, or on each value of a column; run on a worker, plain or async. One value a sample.

        `timeout_s` and `isolated` are as for `m2flow.op`.
        """
        check_seconds("timeout_s", timeout_s)
        return self.result_of(self._by_function("map", function, timeout_s, gives="column", isolated=isolated))

    def filter(self, keeps: Callable[..., object] | Rows) -> Rows:
        """The rows for which this holds: a function that says True or False of a sample (or of a column's value), or a condition."""
        if isinstance(keeps, Rows):
            return self._kept(keeps)
        return self.like(self._by_function("filter", keeps, None, gives="kept"))

    def select(self, condition: Rows) -> Rows:
        """The rows for which a condition holds: `responses.select(rewards > 0.5)`."""
        return self._kept(condition)

    def filter_groups(self, keeps: Callable[..., object]) -> Rows:
        """Whole groups for which this holds: a function that says True or False of the list of a prompt's samples (or their values)."""
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

    # Other rows

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
        """These rows, less those that a filter of the other's has dropped; themselves, if none has."""
        lineage = self._session.lineage
        ours, theirs = lineage.known(self._call.ordinal), lineage.known(other.check(self._session, "a join").call)
        if not theirs.is_within(ours) or ours.is_within(theirs):
            return self
        return narrowed(self, other)

    def back_to(self, prompts: Rows) -> Rows:
        """For each row that these samples were generated from, the mean over its samples.

        What a judge says of responses is rows of its own; this makes numbers of it that go with the responses:
        `grades.back_to(responses)`. All rows must be there before the first is known.
        """
        return brought_back(self, prompts)

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
    """One number a sample: what a reward gives."""

    column = "reward"
