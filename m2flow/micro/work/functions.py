"""Users' functions, a task's units one after the other: from the rows of a call's inputs to the rows that it gives.

What each unit is given and how it runs is the function engine's; what a call's kind makes of arguments and results is told in
`m2flow.micro.work.performing` and `m2flow.micro.work.arguments`. Roles with state have their objects here (`instances`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import final

from m2flow.engines.contract import Failure, FunctionEngine, Isolation
from m2flow.errors import OpError
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call, Granularity
from m2flow.micro.bodies import call_body, call_of
from m2flow.micro.work import performing
from m2flow.micro.work.arguments import Arguments
from m2flow.micro.work.instances import Instances
from m2flow.micro.work.leaving import Leave, Leaving
from m2flow.micro.work.reward_parts import Judged
from m2flow.observe.propagation import Trace
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanName
from m2flow.samples import Batch, Sample, rows_of

_MOST_SHOWN = 3
"""Failures of one role that are printed with their tracebacks, where they do not end the run."""


@final
class Functions:
    """Of one process."""

    def __init__(self, engine: FunctionEngine, *, run: str, run_seed: int, recorder: Recorder) -> None:
        self.engine = engine
        self._run = run
        self._trace = Trace(run)
        self._run_seed = run_seed
        self._recorder = recorder
        self._instances = Instances()
        self._num_shown: Counter[str] = Counter()

    def perform(
        self,
        call: Call,
        inputs: Mapping[str, Batch],
        values: Mapping[str, object],
        leave: Leave | None = None,
        meanwhile: Callable[[], None] | None = None,
        *,
        is_suspect: bool = False,
    ) -> Batch | object:
        """As `m2flow.micro.work.workbench.Workbench.perform` says."""
        is_sorted = "arguments" in call.options
        rows = next(iter(inputs.values()), Batch.concat([])) if is_sorted else performing.function_input(call, inputs)
        with self._recorder.span(
            SpanName.FUNCTION_CALL, **performing.about(call), num_samples=len(rows), samples=rows.ids.tolist()
        ) as span:
            if performing.gives(call) == "concat":
                return rows
            if call.options.get("style") == "columns":
                if meanwhile is not None:
                    meanwhile()
                return performing.columns_result(call, inputs, rows, performing.function_of(call)(rows, values))
            took_ns: list[int] = []
            result = self._by_unit(call, rows, inputs, values, took_ns, leave, meanwhile, is_suspect)
            span.set(unit_us=[round(ns / 1e3, 1) for ns in took_ns])
            return result

    def _by_unit(
        self,
        call: Call,
        rows: Batch,
        inputs: Mapping[str, Batch],
        values: Mapping[str, object],
        took_ns: list[int],
        leave: Leave | None,
        meanwhile: Callable[[], None] | None,
        is_suspect: bool,
    ) -> Batch | object:
        """The user's function on one sample, group, mini-batch or batch after the other; appends how long each took."""
        timeout_s, size = call.options["timeout_s"], call.options.get("minibatch_size")
        assert timeout_s is None or isinstance(timeout_s, int | float)
        assert size is None or isinstance(size, int)
        function = self._instances.method(call) if "instance" in call.options else performing.function_of(call)
        arguments = None
        if "arguments" in call.options:
            function = arguments = Arguments(call, function, inputs, values, self._run_seed)
            rows = arguments.rows
        leaving = None
        if leave is not None and call.is_aligned and call.granularity is Granularity.SAMPLE:
            rows = rows.in_order()
            leaving = Leaving(lambda part, results: performing.function_rows(call, part, results), rows, leave)
        try:
            results = self.engine.call(
                performing.checked(call, _in_trace(self._trace, function), took_ns),
                rows,
                granularity=call.granularity.value,
                size=size,
                timeout_s=timeout_s,
                in_turn=bool(call.writes),
                on_done=leaving.done if leaving is not None else None,
                meanwhile=meanwhile,
                isolation=self._isolation(call, arguments, values, is_suspect=is_suspect),
                on_failure=functools.partial(self._counted, call) if call.options.get("on_error") is not None else None,
            )
        except OpError as error:
            raise performing.function_error(call, error) from error
        if not call.is_aligned:
            return results[0]
        if leaving is not None and leaving.has_left:
            return leaving.rest(results)
        return performing.function_rows(call, rows, results)

    def _isolation(self, call: Call, arguments: Arguments | None, values: Mapping[str, object], *, is_suspect: bool) -> Isolation | None:
        """How the call's units can run in processes of their own; None for one that has its role's state here."""
        if "state" in call.options:
            return None

        def argument(unit: Sample | list[Sample]) -> object:
            rows = rows_of(unit if isinstance(unit, list) else [unit])
            return (rows if arguments is None else arguments.of(rows)), values, isinstance(unit, list)

        return Isolation(
            is_wanted=bool(call.options.get("isolated")) or is_suspect,
            function=_Sent(call, self._run, self._run_seed),
            argument=argument,
            result=functools.partial(_crossed_back, call),
            preload=(__name__, "opentelemetry.context", "opentelemetry.trace"),
        )

    def _counted(self, call: Call, unit: Sample | list[Sample], how: Failure, error: OpError) -> object:
        """The reward of a sample on which its function failed, with how it did as a part of the reward."""
        self._num_shown[call.role] += 1
        if self._num_shown[call.role] <= _MOST_SHOWN:
            print(f"counted as {call.options['on_error']}: {performing.function_error(call, error)}", file=sys.stderr, flush=True)
        return Judged(call.options["on_error"], {how: 1.0})


def _in_trace(trace: Trace, function: Callable[..., object]) -> Callable[..., object]:
    """The function, called within the trace of what it is called on. The engine gives each unit a context of its own."""

    @functools.wraps(function)
    def run(unit: Sample | list[Sample]) -> object:
        samples = unit if isinstance(unit, list) else [unit]
        trace.enter(samples[0].id.pack() if len(samples) == 1 else None)
        return function(unit)

    return run


# What is done in a child process


@final
class _Sent:
    """A call that is sent to a child, where it becomes the function of `_received`."""

    def __init__(self, call: Call, run: str, run_seed: int) -> None:
        self._call = call
        self._run = run
        self._run_seed = run_seed

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (call_body(self._call), self._run, self._run_seed)


_Crossing = tuple[Batch | Mapping[str, Batch], Mapping[str, object], bool]
"""The rows of a unit, or of each input those; whole values; whether the unit is more than a sample."""


def _received(body: bytes, run: str, run_seed: int) -> Callable[[_Crossing], object]:
    """A call's function on a unit, with all that it imports and captures: from here on its time counts."""
    call, trace = call_of(body), Trace(run)
    function = performing.function_of(call)
    if isinstance(function, Snapshot):
        function.fresh()
    if "instance" in call.options:
        function = _childs_instances().method(call)
        _childs_instances().make(call)

    def perform(crossed: _Crossing) -> object:
        rows, values, is_list = crossed
        called = function
        if not isinstance(rows, Batch):
            called = arguments = Arguments(call, function, rows, values, run_seed)
            rows = arguments.rows
        samples = list(rows.frozen().rows())
        result = performing.checked(call, _in_trace(trace, called))(samples if is_list else samples[0])
        return _later(call, result) if inspect.isawaitable(result) else _plain(call, result)

    perform.__name__ = perform.__qualname__ = getattr(function, "__qualname__", call.name)
    return perform


@functools.cache
def _childs_instances() -> Instances:
    """The roles' objects of a child, which runs calls of one run alone."""
    return Instances()


async def _later(call: Call, result: Awaitable[object]) -> object:
    return _plain(call, await result)


def _plain(call: Call, result: object) -> object:
    return result if call.is_aligned else performing.plain_value(call, result)


def _crossed_back(call: Call, result: object) -> object:
    """A checked result, of which JSON has made lists of tuples."""
    if not (call.is_aligned and performing.gives_reward(call)):
        return result
    if call.granularity is Granularity.SAMPLE:
        return _as_judged(result)
    assert isinstance(result, Sequence)
    return [_as_judged(one) for one in result]


def _as_judged(result: object) -> object:
    return Judged(*result) if isinstance(result, list) else result
