"""Python's operators on what is not computed yet: which method stands for which operation.

A class that has them says what one operation on some operands is (`operate`); a recorded call for rows (`m2flow.macro.handles`), an
expression for single numbers (`m2flow.macro.number`). The operations themselves are in `m2flow.macro.columns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")


class Operators(ABC, Generic[T]):
    """Arithmetic, comparison, and `&`, `|`, `^`, `~` in place of `and`, `or`, `!=`, `not`."""

    __array_ufunc__ = None
    """NumPy leaves an operation with its numbers to us; else it would look at every row."""

    @abstractmethod
    def operate(self, operation: str, *operands: object) -> T:
        """One operation of `m2flow.macro.columns.OPERATIONS`; `NotImplemented` if an operand is nothing to calculate with."""

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
