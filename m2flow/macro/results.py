"""Handles of one value: the result of a call as such, metrics, and what a function gave for all rows.

Those of rows are in `m2flow.macro.handles`.
"""

from __future__ import annotations

import math

from m2flow.errors import TraceError
from m2flow.macro.algebra import Inputs
from m2flow.macro.columns import Rowwise, Whole, is_of_no_rows
from m2flow.macro.graph import Call, Ref
from m2flow.macro.number import Number
from m2flow.macro.operators import Operators
from m2flow.macro.reductions import key_text
from m2flow.macro.session import Session


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
        """Nobody can ask for the result by this handle any more: its call may be forgotten. Python says so at any moment."""
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
            raise TraceError(f"{what} got a handle of another flow: {self!r}")
        return self.ref

    def observe(self, why: str) -> object:
        """The result. Python waits for it."""
        return self._session.observe(self._call.ordinal, why)

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        """This value as an input of a call."""
        return inputs.whole(self.check(inputs.session, inputs.what), None, label)

    def result_of(self, call: Call) -> Handle:
        """A handle of another call of the same session."""
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

    def __getitem__(self, name: object) -> Number:
        return Number(self, key_text(name))

    def lagged(self, steps: int) -> dict[str, float] | None:
        """The numbers of `steps` steps ago, at the same place of the program; `None` in the first ones."""
        value = self._past(steps)
        assert isinstance(value, dict | None)
        return value

    def _past(self, steps: int) -> object:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise TraceError(f"lagged({steps!r}): the number of steps is a whole number, 0 or more")
        ordinal = self._session.recall(self._call, steps)
        if ordinal is None:
            return None
        value = self._session.observe(ordinal, f"lagged({steps})", lag=steps)
        return _own(value) if isinstance(value, dict) else value

    def items(self) -> dict[str, float]:
        value = self.observe("items()")
        assert isinstance(value, dict)
        return _own(value)

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        raise TraceError(f"{inputs.what} got {describe(self)}, which is more than one number", now="Say which: metrics['reward'].")

    def _kind(self) -> str:
        return "one value, numbers by name"


class OpValue(Metrics, Operators[Number]):
    """What an op on a batch gives: a number, to calculate with; or numbers by name, `value["name"]`; or a text."""

    def operate(self, operation: str, *operands: object) -> Number:
        return Number(self).operate(operation, *(Number(operand) if isinstance(operand, OpValue) else operand for operand in operands))

    def operand(self, inputs: Inputs, label: str) -> Rowwise | Whole:
        return Handle.operand(self, inputs, label)

    def __float__(self) -> float:
        return float(Number(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(Number(self), digits)

    def lagged(self, steps: int) -> object:  # type: ignore[override]  # its value may be anything
        """What it was `steps` steps ago, at the same place of the program; `None` in the first ones."""
        return self._past(steps)

    def _kind(self) -> str:
        return "one value"


def _own(numbers: dict[str, float]) -> dict[str, float]:
    """The user's own copy. What a trace assumes is no plain dict, and nobody else's."""
    if type(numbers) is not dict:
        return numbers
    return _OfNoRows(numbers) if is_of_no_rows(numbers) else dict(numbers)


class _OfNoRows(dict[str, float]):
    """Metrics of an update over no rows: what it does not report is nan."""

    def __missing__(self, name: str) -> float:
        return math.nan


def describe(value: object) -> str:
    """What a call was given, for an error: whose result, or of what type."""
    if isinstance(value, Handle):
        return f"the {'rows' if value.call.is_aligned else 'value'} of {value.call.name} ({value.call.site})"
    return "a number that is not computed yet" if isinstance(value, Number) else f"a {type(value).__name__}"
