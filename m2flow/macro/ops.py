"""The user's own functions as calls of the graph: `@op`, and what a flow logs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsFloat

from m2flow.errors import TraceError, lone_surrogate
from m2flow.macro.arguments import UnitName, check_unit, gather, resources, signature_of
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Metrics, Number, Rows, describe
from m2flow.macro.results import OpValue as OpValue
from m2flow.macro.session import current_session
from m2flow.macro.units import is_isolated
from m2flow.recipe import check_flag, check_seconds


class OpRows(Rows):
    """What an op on samples gives: one value a sample."""

    column = "value"


def op(
    *,
    granularity: UnitName = "sample",
    size: int | None = None,
    timeout_s: float | None = None,
    isolated: bool | None = None,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> Callable[[Callable[..., object]], Callable[..., Handle]]:
    """Make a function, plain or async, a call of the graph, run on a worker, on units of this size.

    A function on a `sample` returns one value; on a `group` (the samples of one prompt) or a `minibatch` (those of `size` prompts, in
    the order of identity) a list of as many values, or an array; on a `batch` one value for all.

    What it is called with may be handles and constants: see `m2flow.macro.arguments`. A parameter `rng` that the call leaves out gets a
    `random.Random`, or a `numpy.random.Generator` if it is annotated so, which depends on the run's seed, the op and the unit alone.

    Args:
        size: prompts in a mini-batch.
        timeout_s: seconds that one unit may take.
        isolated: whether each unit runs in a process that can be killed alone, as for `m2flow.Reward`.
        reads, writes: resources outside, such as a file or a service, by names that you choose. Calls that touch the same one, at least
            one of them writing, run in the order of the program; others may run at the same time.
    """

    what = "@op"
    unit = check_unit(what, granularity, size)
    check_seconds("timeout_s", timeout_s)
    if isolated is not None:
        check_flag("isolated", isolated)
    read, written = resources(what, reads, "reads"), resources(what, writes, "writes")

    def decorate(function: Callable[..., object]) -> Callable[..., Handle]:
        name = str(getattr(function, "__name__", "op"))

        @functools.wraps(function)
        def call_it(*args: object, **kwargs: object) -> Handle:
            session = current_session(f"the op {name}")
            given = gather(session, name, signature_of(function), unit, args, kwargs)
            call = session.record(
                role=name,
                method="",
                engine="function",
                granularity=unit,
                inputs=given.inputs,
                options={
                    "function": function,
                    "timeout_s": timeout_s,
                    "column": "value",
                    **({"isolated": True} if is_isolated(function, isolated, timeout_s) else {}),
                    **given.options(session, name),
                    **({"minibatch_size": size} if size is not None else {}),
                },
                shown=given.constants,
                reads=tuple(dict.fromkeys((*read, *written))),
                writes=written,
                is_aligned=unit is not Granularity.BATCH,
            )
            return OpRows(session, call) if call.is_aligned else OpValue(session, call)

        return call_it

    return decorate


def log(**values: Number | Handle | float) -> None:
    """Record numbers under these names in the run's metrics, when they are known. Does not wait."""
    session = current_session("log()")
    sources: dict[str, tuple[int, str | None] | float] = {}
    for name, value in values.items():
        if lone_surrogate(name) >= 0:
            raise TraceError(f"log: the name {name!r:.60} has half of a surrogate pair; no file takes it", now="Give it another name.")
        if isinstance(value, Number):
            sources[name] = value.source(session, "log()")
        elif isinstance(value, Rows | Metrics) and not isinstance(value, OpValue):
            now = f"log({name}=rewards.mean())" if isinstance(value, Rows) else f"log({name}=metrics['reward'])"
            raise TraceError(f"log({name}=...) got {describe(value)}, which is more than one number", now=f"Say which: {now}.")
        elif isinstance(value, Handle):
            sources[name] = (value.check(session, "log()").call, None)
        elif isinstance(value, SupportsFloat):
            sources[name] = float(value)
        else:
            raise TraceError(f"log({name}=...) got {value!r:.60}, which is not a number")
    for source in sources.values():
        if not isinstance(source, float):
            session.uses.used(source[0])
    session.backend.log(session.log_step, sources)


def steps(count: int) -> Iterator[int]:
    """Count the steps of a loop: `for step in steps(80)`. The outermost of them are the steps of the run."""
    return current_session("steps()").iterate(count)
