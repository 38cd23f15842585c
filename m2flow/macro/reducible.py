"""The reductions that handles of rows have, and what each gives: one number for all rows, or one value a sample.

    rewards.mean()                 a Number: over all samples
    rewards.mean(over="group")     rows: for each sample the mean over the responses to its prompt
    kl.sum(over="sample")          rows: for each sample the sum over its tokens

None of them waits. The functions that compute them are in `m2flow.macro.reductions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Literal, TypeVar, overload

from m2flow.macro.number import Number
from m2flow.macro.reductions import How

R = TypeVar("R")
Over = Literal["group", "sample"]


class Reducible(ABC, Generic[R]):
    """Of no rows, `mean`, `std`, `min` and `max` are nan. A column of tokens counts with the generated ones."""

    @abstractmethod
    def reduce(self, how: How, over: Over | None) -> Number | R:
        """A `Number` without `over`, else rows."""

    @overload
    def mean(self) -> Number: ...
    @overload
    def mean(self, over: Over) -> R: ...
    def mean(self, over: Over | None = None) -> Number | R:
        return self.reduce("mean", over)

    @overload
    def sum(self) -> Number: ...
    @overload
    def sum(self, over: Over) -> R: ...
    def sum(self, over: Over | None = None) -> Number | R:
        """Of truths, how many hold."""
        return self.reduce("sum", over)

    @overload
    def min(self) -> Number: ...
    @overload
    def min(self, over: Over) -> R: ...
    def min(self, over: Over | None = None) -> Number | R:
        return self.reduce("min", over)

    @overload
    def max(self) -> Number: ...
    @overload
    def max(self, over: Over) -> R: ...
    def max(self, over: Over | None = None) -> Number | R:
        return self.reduce("max", over)

    @overload
    def std(self) -> Number: ...
    @overload
    def std(self, over: Over) -> R: ...
    def std(self, over: Over | None = None) -> Number | R:
        """The population's standard deviation: divided by the count."""
        return self.reduce("std", over)

    @overload
    def any(self) -> Number: ...
    @overload
    def any(self, over: Over) -> R: ...
    def any(self, over: Over | None = None) -> Number | R:
        """Whether one is true, or not 0. Its truth may decide an `if`, which waits for it."""
        return self.reduce("any", over)

    @overload
    def all(self) -> Number: ...
    @overload
    def all(self, over: Over) -> R: ...
    def all(self, over: Over | None = None) -> Number | R:
        """Whether each is true, or not 0. Its truth may decide an `if`, which waits for it."""
        return self.reduce("all", over)

    @overload
    def count(self) -> Number: ...
    @overload
    def count(self, over: Over) -> R: ...
    def count(self, over: Over | None = None) -> Number | R:
        """How many there are, whatever they are: rows, or tokens."""
        return self.reduce("count", over)
