"""Calculations with what is not computed yet: recorded as calls on rows, kept as expressions of single numbers, explored by a trace.

    gap = metrics["reward"] - metrics["kl"]     # a `Number`: nothing waits, and nothing is recorded
    if gap > 0.9: ...                           # the truth of a comparison is an observation: Python waits here

`Operators` gives a class Python's operators; the class itself says what one operation on some operands is (`operate`): a recorded call
for rows (`m2flow.macro.handles`), an expression for single numbers (`Number`). The operations are in `m2flow.macro.columns`. `Inputs` are
those of a call that is about to be recorded: the first decides which rows it works on, so the one with the fewest rows comes first; of
each further one with rows, the option `columns` names the column that counts, and the function finds it under the input's name. Looking at
an expression observes the calls that it is made of; handed to `log`, or to an operation on rows, it becomes a call, or a part of that
one. So `if` works with a comparison, and nothing else waits.

While a flow is traced no number is known, so an observation gives an `Unknown`:

    reward = Unknown(...)         # reward - 0.1 is one too
    if reward > 0.9: ...          # `PathFacts` answers from earlier answers, or as its `Decider` chooses

So a flow can be run through both outcomes of a condition. Python demands that `float(handle)` returns a plain float: while a path runs,
the user's modules have a `float` of their own (`ExploredFloat`), which finds the unknown number again.

Limits: what Python can't do with a float's subclass it does with the nominal value: `int(x)`, `math.log(x)`, formatting, NumPy. An
interval is kept for each number and each expression by itself, so `x > 1` and `2 * x < 1` may both come true.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from m2flow.errors import OpError, TraceError
from m2flow.macro.columns import TRUTHS, Elementwise, Given, Operand, Rowwise, Scalar, Whole, metric, scalar, whole
from m2flow.macro.graph import Call, Granularity, Ref, owner
from m2flow.macro.session import Session

T = TypeVar("T")


# ---- operands, and the calls that calculate with them

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


class Operators(ABC, Generic[T]):
    """Arithmetic, comparison, and `&`, `|`, `^`, `~` in place of `and`, `or`, `!=`, `not`."""

    __array_ufunc__ = None
    """NumPy leaves an operation with its numbers to us; else it would look at every row."""

    @abstractmethod
    def operate(self, operation: str, *operands: object) -> T:
        """Apply one of `m2flow.macro.columns.OPERATIONS`; `NotImplemented` if nothing can be calculated with an operand."""

    def __add__(self, other: object) -> T:
        return self.operate("add", self, other)

    def __radd__(self, other: object) -> T:
        return self.operate("add", other, self)

    def __sub__(self, other: object) -> T:
        return self.operate("subtract", self, other)

    def __rsub__(self, other: object) -> T:
        return self.operate("subtract", other, self)

    def __mul__(self, other: object) -> T:
        return self.operate("multiply", self, other)

    def __rmul__(self, other: object) -> T:
        return self.operate("multiply", other, self)

    def __truediv__(self, other: object) -> T:
        return self.operate("divide", self, other)

    def __rtruediv__(self, other: object) -> T:
        return self.operate("divide", other, self)

    def __floordiv__(self, other: object) -> T:
        return self.operate("floor_divide", self, other)

    def __rfloordiv__(self, other: object) -> T:
        return self.operate("floor_divide", other, self)

    def __mod__(self, other: object) -> T:
        return self.operate("remainder", self, other)

    def __rmod__(self, other: object) -> T:
        return self.operate("remainder", other, self)

    def __pow__(self, other: object) -> T:
        return self.operate("power", self, other)

    def __rpow__(self, other: object) -> T:
        return self.operate("power", other, self)

    def __neg__(self) -> T:
        return self.operate("negative", self)

    def __pos__(self) -> T:
        return self.operate("positive", self)

    def __abs__(self) -> T:
        return self.operate("absolute", self)

    def __and__(self, other: object) -> T:
        return self.operate("both", self, other)

    def __rand__(self, other: object) -> T:
        return self.operate("both", other, self)

    def __or__(self, other: object) -> T:
        return self.operate("either", self, other)

    def __ror__(self, other: object) -> T:
        return self.operate("either", other, self)

    def __xor__(self, other: object) -> T:
        return self.operate("differ", self, other)

    def __rxor__(self, other: object) -> T:
        return self.operate("differ", other, self)

    def __invert__(self) -> T:
        return self.operate("invert", self)

    def __lt__(self, other: object) -> T:
        return self.operate("less", self, other)

    def __le__(self, other: object) -> T:
        return self.operate("less_equal", self, other)

    def __gt__(self, other: object) -> T:
        return self.operate("greater", self, other)

    def __ge__(self, other: object) -> T:
        return self.operate("greater_equal", self, other)

    def __eq__(self, other: object) -> T:  # type: ignore[override]
        return self.operate("equal", self, other)

    def __ne__(self, other: object) -> T:  # type: ignore[override]
        return self.operate("not_equal", self, other)

    __hash__ = object.__hash__


# ---- unknown numbers, while a flow is traced


class Decider(ABC):
    """Choose the outcomes of conditions that nothing known decides."""

    @abstractmethod
    def decide(self, question: str) -> bool:
        """The outcome of a condition, on the path that is being explored."""


@final
class PathFacts:
    """What one path has decided about unknown numbers so far: for each an interval, and what it does not equal.

    A cut (c, 0) lies just below c, (c, 1) just above: `x < c` says that x is below the cut (c, 0), `x <= c` below (c, 1).
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._lower: dict[str, tuple[float, int]] = {}
        self._upper: dict[str, tuple[float, int]] = {}
        self._unequal: set[tuple[str, float]] = set()
        self._said: dict[str, bool] = {}

    def is_below(self, text: str, cut: tuple[float, int], question: str, *, is_negated: bool) -> bool:
        lower, upper = self._lower.get(text, (float("-inf"), -1)), self._upper.get(text, (float("inf"), 2))
        if cut >= upper or cut <= lower:
            return cut >= upper
        answer = self._decider.decide(question) != is_negated
        (self._upper if answer else self._lower)[text] = cut
        return answer

    def is_equal(self, text: str, value: float, question: str) -> bool:
        lower, upper = self._lower.get(text, (float("-inf"), -1)), self._upper.get(text, (float("inf"), 2))
        if (lower, upper) == ((value, 0), (value, 1)):
            return True
        if upper <= (value, 0) or lower >= (value, 1) or (text, value) in self._unequal:
            return False
        answer = self._decider.decide(question)
        if answer:
            self._lower[text], self._upper[text] = (value, 0), (value, 1)
        else:
            self._unequal.add((text, value))
        return answer

    def holds(self, question: str) -> bool:
        """Decide a condition on two unknown numbers."""
        if question not in self._said:
            self._said[question] = self._decider.decide(question)
        return self._said[question]


class Unknown(float):
    """A number that is not known while a flow is traced. `text` is its name in the plan."""

    text: str
    facts: PathFacts

    def __new__(cls, nominal: float, text: str, facts: PathFacts) -> Unknown:
        number = super().__new__(cls, nominal)
        number.text = text
        number.facts = facts
        return number

    def __bool__(self) -> bool:
        return not self.facts.is_equal(self.text, 0.0, f"{self.text} == 0")

    def __lt__(self, other: object) -> bool:
        return self._is_below(other, "<", 0, is_negated=False)

    def __le__(self, other: object) -> bool:
        return self._is_below(other, "<=", 1, is_negated=False)

    def __gt__(self, other: object) -> bool:
        return not self._is_below(other, ">", 1, is_negated=True)

    def __ge__(self, other: object) -> bool:
        return not self._is_below(other, ">=", 0, is_negated=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return False
        question = f"{self.text} == {_text(other)}"
        if isinstance(other, Unknown):
            return self.text == other.text or self.facts.holds(question)
        return self.facts.is_equal(self.text, float(other), question)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__

    def _is_below(self, other: object, sign: str, side: int, *, is_negated: bool) -> bool:
        if not isinstance(other, int | float):
            raise TypeError(f"{sign!r} is not supported between a number and a {type(other).__name__}")
        question = f"{self.text} {sign} {_text(other)}"
        if isinstance(other, Unknown):
            return side == 1 if self.text == other.text else self.facts.holds(question) != is_negated
        return self.facts.is_below(self.text, (float(other), side), question, is_negated=is_negated)

    def __neg__(self) -> Unknown:
        return Unknown(-_nominal(self), f"-{self.text}", self.facts)

    def __abs__(self) -> Unknown:
        return Unknown(abs(_nominal(self)), f"abs({self.text})", self.facts)


def _text(value: float) -> str:
    return value.text if isinstance(value, Unknown) else format(value, "g")


def _nominal(value: float) -> float:
    return float.__add__(value, 0.0) if isinstance(value, Unknown) else float(value)


def _arithmetic(sign: str, calculate: Callable[[float, float], float], *, is_swapped: bool) -> Callable[[Unknown, object], Unknown]:
    def method(self: Unknown, other: object) -> Unknown:
        if not isinstance(other, int | float):
            return NotImplemented  # type: ignore[no-any-return]
        left, right = (other, self) if is_swapped else (self, other)
        try:
            nominal = float(calculate(_nominal(left), _nominal(right)))
        except (ArithmeticError, TypeError):  # by zero; a power that is complex
            nominal = _nominal(self)
        return Unknown(nominal, f"({_text(left)} {sign} {_text(right)})", self.facts)

    return method


for _sign, _name, _function in (
    ("+", "add", operator.add),
    ("-", "sub", operator.sub),
    ("*", "mul", operator.mul),
    ("/", "truediv", operator.truediv),
    ("//", "floordiv", operator.floordiv),
    ("%", "mod", operator.mod),
    ("**", "pow", operator.pow),
):
    setattr(Unknown, f"__{_name}__", _arithmetic(_sign, _function, is_swapped=False))
    setattr(Unknown, f"__r{_name}__", _arithmetic(_sign, _function, is_swapped=True))


class _FloatType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, float)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, float)


class ExploredFloat(float, metaclass=_FloatType):
    """Replacement of `float` in the user's modules while a path runs. An importable class, since functions capture it."""

    handed: ClassVar[Unknown | None] = None
    """The unknown number that `plain_float` was asked for last."""

    def __new__(cls, value: object = 0.0) -> float:  # type: ignore[misc]
        if isinstance(value, Unknown):
            return value
        ExploredFloat.handed = None
        number = float(value)  # type: ignore[arg-type]
        found, ExploredFloat.handed = ExploredFloat.handed, None
        return number if found is None else found


def plain_float(value: float) -> float:
    """Return a plain float, as `__float__` must: of an unknown number the nominal value, from which `ExploredFloat` finds it again."""
    if not isinstance(value, Unknown):
        return float(value)
    ExploredFloat.handed = value
    return _nominal(value)


def calculate(operation: str, operands: Sequence[object]) -> Any:
    """Apply an operation of `m2flow.macro.columns` to numbers of which some are unknown."""
    if operation == "where":
        condition, first, second = operands
        return first if condition else second
    return _OPERATIONS[operation](*operands)


_OPERATIONS: Mapping[str, Callable[..., object]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "power": operator.pow,
    "negative": operator.neg,
    "positive": lambda value: value,
    "absolute": abs,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "both": lambda first, second: bool(first) and bool(second),
    "either": lambda first, second: bool(first) or bool(second),
    "differ": lambda first, second: bool(first) is not bool(second),
    "invert": operator.not_,
}


@contextlib.contextmanager
def exploring_floats(names_of_flow: dict[str, Any]) -> Iterator[None]:
    """Replace `float` in the user's modules by `ExploredFloat` for the duration; modules that define `float` keep theirs."""
    files = ((module, getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    of_users = [vars(module) for module, path in files if isinstance(path, str) and owner(path) == "user"]
    places = {id(names): names for names in [names_of_flow, *of_users] if "float" not in names}
    try:
        for names in places.values():
            names["float"] = ExploredFloat
        yield
    finally:
        for names in places.values():
            names.pop("float", None)
        ExploredFloat.handed = None


# ---- lazy numbers of a call's result


class Holder(Protocol):
    """The interface of a handle, which holds a call's result."""

    @property
    def session(self) -> Session: ...

    @property
    def ref(self) -> Ref: ...

    def check(self, session: Session, what: str) -> Ref: ...

    def observe(self, why: str) -> object: ...

    def result_of(self, call: Call) -> Holder:
        """Make a handle of another call of the same session."""
        ...


@dataclass(frozen=True, eq=False)
class Expression:
    """An operation on numbers that is not computed yet."""

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
                raise TraceError(
                    f"there is no {self._name!r} in {self._of!r}: its value is {value!r:.60}",
                    now="Ask for a metric of a call that returns several.",
                )
            try:
                value = metric(value, self._name)
            except LookupError as error:
                raise TraceError(str(error.args[0])) from None
        if not isinstance(value, int | float | str | None):
            raise TraceError(f"{self!r} is {value!r:.60}, which is not a number")
        return value
