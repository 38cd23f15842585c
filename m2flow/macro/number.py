"""One number that is not looked at yet: a metric, the value of a call, or what is calculated from some.

    gap = metrics["reward"] - metrics["kl"]     # nothing waits, and nothing is recorded
    if gap > 0.9: ...                           # the truth of a comparison is an observation: Python waits here

Calculating makes an expression. Looking at it observes the calls that it is made of; handed to `log`, or to an operation on rows, it
becomes a call, or a part of that one. So `if` works with a comparison, and nothing else waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from m2flow.errors import OpError, TraceError
from m2flow.macro.algebra import Inputs, as_scalar
from m2flow.macro.columns import TRUTHS, Elementwise, Given, Operand, Scalar, metric, scalar, whole
from m2flow.macro.graph import Call, Granularity, Ref
from m2flow.macro.operators import Operators
from m2flow.macro.session import Session
from m2flow.macro.unknown import Unknown, calculate, plain_float


class Holder(Protocol):
    """What holds a call's result: a handle."""

    @property
    def session(self) -> Session: ...

    @property
    def ref(self) -> Ref: ...

    def check(self, session: Session, what: str) -> Ref: ...

    def observe(self, why: str) -> object: ...

    def result_of(self, call: Call) -> Holder:
        """A handle of another call of the same session."""
        ...


@dataclass(frozen=True, eq=False)
class Expression:
    """An operation on numbers, not done yet."""

    operation: str
    operands: tuple[Number | Scalar, ...]

    @property
    def holder(self) -> Holder:
        """The handle of one of its numbers."""
        return next(operand for operand in self.operands if isinstance(operand, Number)).holder


@final
class Number(Operators["Number"]):
    """One number of a call's result, or an expression of such. `float(number)` waits for it."""

    def __init__(self, of: Holder | Expression, name: str | None = None, *, is_truth: bool = False) -> None:
        self._of = of
        self._name = name
        self._is_truth = is_truth
        self._recorded: Holder | None = None

    @property
    def holder(self) -> Holder:
        return self._of.holder if isinstance(self._of, Expression) else self._of

    def operate(self, operation: str, *operands: object) -> Number:
        plain = tuple(operand if isinstance(operand, Number) else as_scalar(operand) for operand in operands)
        if any(operand is None or (isinstance(operand, str) and operation not in ("equal", "not_equal")) for operand in plain):
            return NotImplemented  # type: ignore[no-any-return]
        return Number(Expression(operation, plain), is_truth=operation in TRUTHS)  # type: ignore[arg-type]

    def source(self, session: Session, what: str) -> tuple[int, str | None]:
        """The call in that session that has this number, and the field of its value. An expression becomes a call."""
        if not isinstance(self._of, Expression):
            return self._of.check(session, what).call, self._name
        if self._recorded is None:
            inputs = Inputs(session, what)
            function = self.operand(inputs)
            assert isinstance(function, Elementwise)
            call = inputs.record(self._of.operation, function, granularity=Granularity.BATCH, is_aligned=False)
            self._recorded = self.holder.result_of(call)
        return self._recorded.check(session, what).call, None

    def operand(self, inputs: Inputs, label: str = "value") -> Operand | Elementwise:
        """This number as an operand of a call with these inputs."""
        if not isinstance(self._of, Expression):
            return inputs.whole(self._of.check(inputs.session, inputs.what), self._name, label)
        operands = tuple(part.operand(inputs, label) if isinstance(part, Number) else Given(part) for part in self._of.operands)
        return Elementwise(self._of.operation, operands)

    def __float__(self) -> float:
        return self._number("float()")

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __round__(self, digits: int | None = None) -> float:
        return round(self._number("round()"), digits)

    def __bool__(self) -> bool:
        if not self._is_truth:
            raise TraceError(
                "a number that is not computed yet can't decide a branch by itself", now="Compare it: if number > 0.9, which waits for it."
            )
        return bool(self._look("bool()"))

    def __format__(self, spec: str) -> str:
        return format(self._number("formatting"), spec)

    def __repr__(self) -> str:
        if isinstance(self._of, Expression):
            return f"<{self._of.operation}({', '.join(map(repr, self._of.operands))})>"
        return f"<{self._name or 'number'} of {self._of!r}>"

    def _number(self, why: str) -> float:
        value = self._look(why)
        if isinstance(value, str) or value is None:
            raise TraceError(f"{self!r} is {value!r:.60}, which is not a number")
        return plain_float(value)

    def _look(self, why: str) -> Scalar | None:
        """The value. Python waits for every call that it needs."""
        if isinstance(self._of, Expression):
            found = [part._look(why) if isinstance(part, Number) else part for part in self._of.operands]
            if any(isinstance(value, Unknown) for value in found):
                explored: Scalar = calculate(self._of.operation, found)
                return explored
            try:
                return scalar(self._of.operation, *(whole(value, None) for value in found))
            except OpError as error:
                raise TraceError(f"{self!r}: {error.what}") from None
        value = self._of.observe(why)
        if self._name is not None:
            if not isinstance(value, dict):
                raise TraceError(f"there is no {self._name!r} in {self._of!r}: its value is {value!r:.60}")
            try:
                value = metric(value, self._name)
            except LookupError as error:
                raise TraceError(str(error.args[0])) from None
        if not isinstance(value, int | float | str | None):
            raise TraceError(f"{self!r} is {value!r:.60}, which is not a number")
        return value
