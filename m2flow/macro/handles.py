"""Handles: the lazy results of calls.

A handle stands for what a call will give. Passing it to another call draws an edge; looking at it (`float`, `len`, a loop, an
index) makes Python wait for it, and for nothing else. `log`, `lagged` and `mean` do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, Granularity, Ref
from m2flow.macro.session import Session, current_session
from m2flow.samples import Batch, Ragged


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
            session.remember(call)
            weakref.finalize(self, _release, session, call.ordinal).atexit = False

    @property
    def ref(self) -> Ref:
        return Ref(self._call.ordinal)

    @property
    def call(self) -> Call:
        return self._call

    @property
    def maker(self) -> Call:
        """The call that made the samples that this has rows of."""
        return self._session.maker(self._call)

    def check(self, session: Session, what: str) -> Ref:
        """This handle as an input of a call in that session."""
        if self._session is not session:
            raise TraceError(f"{what} got a handle of another flow: {self!r}")
        return self.ref

    def __repr__(self) -> str:
        call = self._call
        rows = "one row a sample" if call.is_aligned else "one value"
        return f"<{call.name}: {rows}, from {call.site}; not computed by looking at it like this>"

    def __bool__(self) -> bool:
        return bool(self._observe("bool()"))

    def _observe(self, why: str) -> object:
        return self._session.observe(self._call.ordinal, why)


class Metrics(Handle):
    """What an update reports: numbers by name."""

    def __getitem__(self, name: str) -> Number:
        return Number(self, name)

    def lagged(self, steps: int) -> dict[str, float] | None:
        """The numbers of `steps` steps ago, at the same place of the program; `None` in the first ones."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise TraceError(f"lagged({steps!r}): the number of steps is a whole number, 0 or more")
        ordinal = self._session.recall(self._call, steps)
        if ordinal is None:
            return None
        value = self._session.observe(ordinal, f"lagged({steps})", lag=steps)
        assert isinstance(value, dict)
        return _own(value)

    def items(self) -> dict[str, float]:
        value = self._observe("items()")
        assert isinstance(value, dict)
        return _own(value)


class Number:
    """One number of a call's result, not looked at yet."""

    def __init__(self, handle: Handle, name: str | None = None) -> None:
        self._handle = handle
        self._name = name

    def source(self, session: Session, what: str) -> tuple[int, str | None]:
        """The call in that session, and the field of its value."""
        return self._handle.check(session, what).call, self._name

    def __float__(self) -> float:
        value = self._handle._observe("float()")
        if self._name is not None:
            assert isinstance(value, dict)
            if self._name not in value:
                raise TraceError(f"there is no metric {self._name!r}; there are {', '.join(sorted(value))}")
            value = value[self._name]
        if not isinstance(value, int | float):
            raise TraceError(f"{self!r} is {value!r:.60}, which is not a number")
        return float(value)

    def __repr__(self) -> str:
        return f"<{self._name or 'number'} of {self._handle!r}>"

    def __bool__(self) -> bool:
        raise TraceError("a number that is not computed yet can't decide a branch by itself", now="Wait for it: float(number) > 0.9.")

    def _compare(self, other: object) -> bool:
        raise TraceError("a number that is not computed yet can't be compared", now="Wait for it: float(number) > 0.9.")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


class Rows(Handle):
    """A result with a row for each sample."""

    scored_by: object = None
    """The role whose rewards these samples have already, from a refill."""
    column: str | None = None
    """The column that the rows stand for when looked at; None: whole samples."""

    def __init__(self, session: Session, call: Call, column: str | None = None, *, owner: Handle | None = None) -> None:
        super().__init__(session, call, owner=owner)
        if column is not None:
            self.column = column

    def batch(self) -> Batch:
        """The rows, as a batch in the order of identity. Python waits for it."""
        return self._wait("batch()")

    def __len__(self) -> int:
        return len(self._wait("len()"))

    def __iter__(self) -> Iterator[object]:
        return iter(self._items("a loop"))

    def __getitem__(self, index: int) -> object:
        return self._items("an index")[index]

    def _wait(self, why: str) -> Batch:
        value = self._observe(why)
        assert isinstance(value, Batch)
        return value.in_order().frozen()

    def _items(self, why: str) -> list[object]:
        batch = self._wait(why)
        if self.column is None or not len(batch):
            return list(batch.rows())
        column = batch[self.column]
        return [column.item(i) for i in range(len(column))] if isinstance(column, Ragged) else column.tolist()

    def __bool__(self) -> bool:
        raise TraceError(f"{self!r} has many rows; its truth is not defined", now="Reduce it first: float(rewards.mean()) > 0.9.")


class Scores(Rows):
    """One number a sample."""

    column = "reward"

    def mean(self) -> Number:
        """The mean over all samples, as a call of its own. Does not wait."""
        session = current_session("mean()")
        call = session.record(
            role="mean",
            method="",
            engine="function",
            granularity=Granularity.BATCH,
            inputs={"samples": self.check(session, "mean")},
            options={"function": _Mean(self.column), "timeout_s": None, "column": "value"},
            shown={},
            is_aligned=False,
        )
        return Number(Handle(session, call))


class _Mean:
    """The mean of a column, as an op on a whole batch."""

    __name__ = "mean"

    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, samples: list[dict[str, float]]) -> float:
        return sum(float(sample[self.column]) for sample in samples) / max(len(samples), 1)


def _own(numbers: dict[str, float]) -> dict[str, float]:
    """The user's own copy. What a trace assumes is no plain dict, and nobody else's."""
    return dict(numbers) if type(numbers) is dict else numbers


def describe(value: object) -> str:
    """What a call was given, for an error: whose result, or of what type."""
    if isinstance(value, Handle):
        return f"the {'rows' if value.call.is_aligned else 'value'} of {value.call.name} ({value.call.site})"
    return "a number that is not computed yet" if isinstance(value, Number) else f"a {type(value).__name__}"


def _release(session: Session, ordinal: int) -> None:
    if session.is_open:
        session.backend.release(ordinal)
