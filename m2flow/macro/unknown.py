"""A number that nobody has computed: it calculates, and asks where its truth matters.

    reward = Unknown(...)         reward - 0.1 is one too
    if reward > 0.9: ...          `Facts` answers, from what it answered before, or as its `Decider` chooses

So a flow can be run through both outcomes of a condition. `float(handle)` must be a plain float, says Python: while a path runs, the
user's modules have a `float` of their own, which finds the unknown number again.

Limits: what Python can't do with a float's subclass it does with the nominal value: `int(x)`, `math.log(x)`, formatting, NumPy. An
interval is kept for each number and each expression by itself, so `x > 1` and `2 * x < 1` may both come true.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

from m2flow.macro.sites import owner


class Decider(ABC):
    """Decides what can't be known."""

    @abstractmethod
    def decide(self, question: str) -> bool:
        """The outcome of a condition, on the path that is being explored."""


@final
class Facts:
    """What has been decided so far about numbers, on one path: for each an interval, and what it does not equal.

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

    def is_so(self, question: str) -> bool:
        """A condition that is about two unknown numbers."""
        if question not in self._said:
            self._said[question] = self._decider.decide(question)
        return self._said[question]


class Unknown(float):
    """See above. `text` is what the plan calls it."""

    text: str
    facts: Facts

    def __new__(cls, nominal: float, text: str, facts: Facts) -> Unknown:
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
            return self.text == other.text or self.facts.is_so(question)
        return self.facts.is_equal(self.text, float(other), question)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__

    def _is_below(self, other: object, sign: str, side: int, *, is_negated: bool) -> bool:
        if not isinstance(other, int | float):
            raise TypeError(f"{sign!r} is not supported between a number and a {type(other).__name__}")
        question = f"{self.text} {sign} {_text(other)}"
        if isinstance(other, Unknown):
            return side == 1 if self.text == other.text else self.facts.is_so(question) != is_negated
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
    """What `float` is to the user's modules while a path runs. A class that can be imported, since functions capture it."""

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
    """A number as Python wants it of `__float__`. Of an unknown one it is the nominal value, and `ExploredFloat` finds the number."""
    if not isinstance(value, Unknown):
        return float(value)
    ExploredFloat.handed = value
    return _nominal(value)


def calculate(operation: str, operands: Sequence[object]) -> Any:
    """An operation of `m2flow.macro.columns` on numbers of which some are unknown."""
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
def floats_found(names_of_flow: dict[str, Any]) -> Iterator[None]:
    """Give the user's modules their own `float`, if they have not one already."""
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
