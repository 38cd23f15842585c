"""The user's functions on parts of a sample: on a column's value, on the values of a group.

A worker gives a function a `Sample`, or a list of those of a group. These stand between, for handles of one column.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m2flow.errors import OpError
from m2flow.recipe import check_flag
from m2flow.samples import Sample


@dataclass(frozen=True)
class OnValue:
    """The function on one column's value of a sample."""

    function: Callable[..., object]
    column: str

    def __post_init__(self) -> None:
        _take_name(self, self.function)

    def __call__(self, sample: Sample) -> object:
        return self.function(sample[self.column])


@dataclass(frozen=True)
class OnGroup:
    """The function on a whole group, whose answer is that of each of its samples."""

    function: Callable[..., object]
    column: str | None

    def __post_init__(self) -> None:
        _take_name(self, self.function)

    def __call__(self, samples: Sequence[Sample]) -> list[bool]:
        answer = self.function(list(samples) if self.column is None else [sample[self.column] for sample in samples])
        if not isinstance(answer, bool):
            raise OpError(f"the function returned {answer!r:.60}, which is neither True nor False")
        return [answer] * len(samples)


def name_of(function: Callable[..., object], default: str) -> str:
    """What a call on it is called in plans and errors."""
    inner = function.function if isinstance(function, OnValue | OnGroup) else function
    name = str(getattr(inner, "__name__", default))
    return name if name.isidentifier() else default


def _take_name(unit: object, function: Callable[..., object]) -> None:
    """What errors name is the user's."""
    object.__setattr__(unit, "__qualname__", str(getattr(function, "__qualname__", type(function).__name__)))


def is_isolated(function: Callable[..., object], isolated: bool | None, timeout_s: float | None) -> bool:
    """Whether a function's units run in processes that can be killed alone: as asked for, else plain functions with a time limit.

    An async function with a time limit is cancelled where it waits, and stays where its clients are.
    """
    if isolated is not None:
        check_flag("isolated", isolated)
        return isolated
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isroutine(function) or inspect.isclass(function)
    called = function if is_plain else getattr(type(function), "__call__", function)  # noqa: B004  # its code is looked at
    return timeout_s is not None and not inspect.iscoroutinefunction(called)
