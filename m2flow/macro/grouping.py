"""`rows.groupby(key)`: one number for each value of a key, or each row with the number of its key.

    rewards.groupby(responses.level).mean()                 numbers by level, as metrics are
    rewards.groupby(responses.level).transform("mean")      rows: for each sample the mean of its level
    responses.groupby("level").mean(rewards)                the same as the first

The groups here are of any column; the responses to one prompt are `over="group"` of a reduction. All rows must be there before a key's
number is known, so both are barriers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from m2flow.errors import TraceError
from m2flow.macro.algebra import Inputs
from m2flow.macro.graph import Granularity
from m2flow.macro.reductions import How, ReduceByKey, TransformByKey

if TYPE_CHECKING:
    from m2flow.macro.handles import Metrics, Rows


@final
class GroupBy:
    """Rows by a key. Nothing is recorded before a reduction is asked for."""

    def __init__(self, key: Rows, values: Rows | None) -> None:
        self._key = key
        self._values = values

    def mean(self, values: Rows | None = None) -> Metrics:
        return self._by_key("mean", values)

    def sum(self, values: Rows | None = None) -> Metrics:
        return self._by_key("sum", values)

    def min(self, values: Rows | None = None) -> Metrics:
        return self._by_key("min", values)

    def max(self, values: Rows | None = None) -> Metrics:
        return self._by_key("max", values)

    def std(self, values: Rows | None = None) -> Metrics:
        return self._by_key("std", values)

    def count(self) -> Metrics:
        """Rows of each key."""
        inputs, key, _, _ = self._inputs("count", None, is_count=True)
        call = inputs.record(
            "groupby", ReduceByKey("count", None, key), granularity=Granularity.BATCH, is_aligned=False, gives="table", shown=_by("count")
        )
        return self._key.metrics_of(call)

    def transform(self, how: How, values: Rows | None = None) -> Rows:
        """For each row the number of its key."""
        inputs, key, column, mask = self._inputs(how, values, is_count=how == "count")
        call = inputs.record("groupby", TransformByKey(how, column, key, mask), granularity=Granularity.BATCH, shown=_by(how))
        return self._key.result_of(call)

    def __repr__(self) -> str:
        return f"<rows by {self._key!r}>"

    def _by_key(self, how: How, values: Rows | None) -> Metrics:
        inputs, key, column, mask = self._inputs(how, values)
        call = inputs.record(
            "groupby", ReduceByKey(how, column, key, mask), granularity=Granularity.BATCH, is_aligned=False, gives="table", shown=_by(how)
        )
        return self._key.metrics_of(call)

    def _inputs(self, how: str, values: Rows | None, *, is_count: bool = False) -> tuple[Inputs, str, str | None, str | None]:
        inputs = Inputs(self._key.session, f"groupby(...).{how}")
        values = values if values is not None else self._values
        if is_count:
            return inputs, self._key.operand(inputs, "key").name, None, None
        if values is None:
            raise TraceError(f"groupby(...).{how}() of whole samples: of what?", now=f"Say of which numbers: .{how}(rewards).")
        column = values.operand(inputs, "values").name
        return inputs, self._key.operand(inputs, "key").name, column, values.mask(inputs)


def _by(how: str) -> dict[str, object]:
    return {"how": how}
