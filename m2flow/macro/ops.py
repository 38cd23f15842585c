"""The user's own functions as calls of the graph: `@op`, and what a flow logs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, SupportsFloat

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Metrics, Number, Rows, describe
from m2flow.macro.session import current_session


class OpRows(Rows):
    """What an op on samples gives: one value a sample."""

    column = "value"


def op(
    *, granularity: Literal["sample", "group", "batch"] = "sample", timeout_s: float | None = None
) -> Callable[[Callable[..., object]], Callable[[Handle], Handle]]:
    """Make a function a call of the graph, run on a worker, on units of this size.

    A function on a `sample` gets a `Sample` and returns one value; on a `group`, a list of the samples of one prompt, and
    returns a list of as many values; on a `batch`, the list of all samples, and returns one value.
    """

    if granularity not in ("sample", "group", "batch"):
        raise OptionError(f"@op(granularity={granularity!r}); known are sample, group, batch")

    def decorate(function: Callable[..., object]) -> Callable[[Handle], Handle]:
        @functools.wraps(function)
        def call_it(samples: Handle) -> Handle:
            name = getattr(function, "__name__", "op")
            session = current_session(f"the op {name}")
            if not isinstance(samples, Rows):
                raise TraceError(f"the op {name} got {describe(samples)}; it needs rows: a dataset's, responses, rewards")
            unit = Granularity(granularity)
            call = session.record(
                role=name,
                method="",
                engine="function",
                granularity=unit,
                inputs={"samples": samples.check(session, name)},
                options={"function": function, "timeout_s": timeout_s, "column": "value"},
                shown={},
                is_aligned=unit is not Granularity.BATCH,
            )
            return OpRows(session, call) if call.is_aligned else Handle(session, call)

        return call_it

    return decorate


def log(**values: Number | Handle | float) -> None:
    """Record numbers under these names in the run's metrics, when they are known. Does not wait."""
    session = current_session("log()")
    sources: dict[str, tuple[int, str | None] | float] = {}
    for name, value in values.items():
        if isinstance(value, Number):
            sources[name] = value.source(session, "log()")
        elif isinstance(value, Rows | Metrics):
            now = f"log({name}=rewards.mean())" if isinstance(value, Rows) else f"log({name}=metrics['reward'])"
            raise TraceError(f"log({name}=...) got {describe(value)}, which is more than one number", now=f"Say which: {now}.")
        elif isinstance(value, Handle):
            sources[name] = (value.check(session, "log()").call, None)
        elif isinstance(value, SupportsFloat):
            sources[name] = float(value)
        else:
            raise TraceError(f"log({name}=...) got {value!r:.60}, which is not a number")
    session.backend.log(session.log_step, sources)


def steps(count: int) -> Iterator[int]:
    """Count the steps of a loop: `for step in steps(80)`. The outermost of them are the steps of the run."""
    return current_session("steps()").iterate(count)
