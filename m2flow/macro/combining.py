"""Functions of several handles: `where`, `join`, `concat`. None of them waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from m2flow.errors import TraceError
from m2flow.macro.algebra import Inputs
from m2flow.macro.handles import Rows, describe
from m2flow.macro.joining import joined
from m2flow.macro.number import Number
from m2flow.macro.results import OpValue


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
    call = inputs.record("concat", None, gives="concat", fields=shared)
    of = [handle.tokens_of for handle in handles]
    if all(samples is None for samples in of):
        return handles[0].like(call)
    if any(samples is None for samples in of):
        raise TraceError("concat got values of tokens, and values that are none", now="Reduce the tokens first: .sum(over='sample').")
    return handles[0].like(call, tokens_of=concat([samples for samples in of if samples is not None]))
