"""Record calculations on handles as calls whose function runs on columns.

    Inputs --rows, whole--> operands --record--> Call(engine="function", style="columns")

Each operand gets a name among the call's inputs. The first input decides which rows the call works on, so the one with the fewest rows
comes first. For each further input with rows, the option `columns` names the column that counts, and the function finds it under the
input's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from m2flow.macro.columns import Elementwise, Given, Operand, Rowwise, Scalar, Whole
from m2flow.macro.graph import Call, Granularity, Ref
from m2flow.macro.session import Session

Gives = Literal["column", "rows", "kept", "concat", "table"]


@runtime_checkable
class Lazy(Protocol):
    """A value that is not computed yet and can be an input of a call."""

    def operand(self, inputs: Inputs, label: str) -> Operand | Elementwise: ...


class Inputs:
    """The inputs of a call that is about to be recorded."""

    def __init__(self, session: Session, what: str) -> None:
        self.session = session
        self.what = what
        self._refs: dict[str, Ref] = {}
        self._columns: dict[str, str] = {}
        self._aligned: list[str] = []

    def rows(self, ref: Ref, column: str | None, label: str) -> Rowwise:
        """Add an input with rows, of which one column counts; None: all columns."""
        name = self._name(label)
        self._refs[name] = ref
        self._aligned.append(name)
        if column is not None:
            self._columns[name] = column
        return Rowwise(name)

    def whole(self, ref: Ref, field: str | None, label: str) -> Whole:
        """Add an input that is one value, or a field of one. The same call needs only one input."""
        known = next((name for name, of in self._refs.items() if of == ref and name not in self._aligned), None)
        name = known or self._name(label)
        self._refs[name] = ref
        return Whole(name, field)

    @property
    def single(self) -> tuple[str, ...]:
        """Input -> its column's name in the function's rows, for inputs of which one column counts."""
        return tuple(self._columns)

    @property
    def base(self) -> Ref | None:
        """The input with rows whose rows all others have.

        Raises:
            TraceError: there is none: they are of different samples, or filtered in different ways.
        """
        rows = [(name, self._refs[name]) for name in self._aligned]
        found = self.session.lineage.narrowest(ref for _, ref in rows)
        if rows and found is None:
            raise self.session.lineage.mismatch(self.what, rows)
        return found

    def record(
        self,
        role: str,
        function: Callable[..., object] | None,
        *,
        granularity: Granularity = Granularity.SAMPLE,
        gives: Gives = "column",
        column: str = "value",
        is_aligned: bool = True,
        shown: Mapping[str, object] | None = None,
        fields: frozenset[str] | None = None,
    ) -> Call:
        """Record the call; its input with the fewest rows comes first."""
        names = list(self._refs)
        if gives != "concat":
            base = self.base
            names.sort(key=lambda name: not (name in self._aligned and self._refs[name] == base))
        options: dict[str, object] = {"function": function, "timeout_s": None, "column": column, "style": "columns", "gives": gives}
        options |= {"columns": dict(self._columns)} if self._columns else {}
        options |= {"fields": tuple(sorted(fields))} if fields is not None else {}
        return self.session.record(
            role=role,
            method="",
            engine="function",
            granularity=granularity,
            inputs={name: self._refs[name] for name in names},
            options=options,
            shown=shown or {},
            is_aligned=is_aligned,
        )

    def _name(self, label: str) -> str:
        count = sum(name == label or name.rstrip("0123456789") == label for name in self._refs)
        return f"{label}{count + 1}" if count else label


def as_operand(value: object, inputs: Inputs, label: str) -> Operand | Elementwise | None:
    """Convert any value to an operand of a call with these inputs; None if nothing can be calculated with it."""
    if isinstance(value, Lazy):
        return value.operand(inputs, label)
    plain = as_scalar(value)
    return None if plain is None else Given(plain)


def as_scalar(value: object) -> Scalar | None:
    """Convert a plain Python value to an operand; None if nothing can be calculated with it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return float(value) if abs(value) <= sys.float_info.max else None
    return value if isinstance(value, bool | int | float | str) else None
