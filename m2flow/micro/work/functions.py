"""Users' functions, a task's units one after the other: from the rows of a call's inputs to the rows that it gives.

What each unit is given and how it runs is the function engine's; what a call's kind makes of arguments and results is told in
`m2flow.micro.work.performing` and `m2flow.micro.work.arguments`. Roles with state have their objects here (`instances`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import final

from m2flow.engines.contract import FunctionEngine
from m2flow.errors import OpError
from m2flow.macro.graph import Call, Granularity
from m2flow.micro.work import performing
from m2flow.micro.work.arguments import Arguments
from m2flow.micro.work.instances import Instances
from m2flow.micro.work.leaving import Leave, Leaving
from m2flow.observe.propagation import Trace
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanName
from m2flow.samples import Batch, Sample


@final
class Functions:
    """Of one process."""

    def __init__(self, engine: FunctionEngine, *, run: str, run_seed: int, recorder: Recorder) -> None:
        self.engine = engine
        self._trace = Trace(run)
        self._run_seed = run_seed
        self._recorder = recorder
        self._instances = Instances()

    def perform(
        self,
        call: Call,
        inputs: Mapping[str, Batch],
        values: Mapping[str, object],
        leave: Leave | None = None,
        meanwhile: Callable[[], None] | None = None,
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
            result = self._by_unit(call, rows, inputs, values, took_ns, leave, meanwhile)
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
    ) -> Batch | object:
        """The user's function on one sample, group, mini-batch or batch after the other; appends how long each took."""
        timeout_s, size = call.options["timeout_s"], call.options.get("minibatch_size")
        assert timeout_s is None or isinstance(timeout_s, int | float)
        assert size is None or isinstance(size, int)
        function = self._instances.method(call) if "instance" in call.options else performing.function_of(call)
        if "arguments" in call.options:
            function = arguments = Arguments(call, function, inputs, values, self._run_seed)
            rows = arguments.rows
        leaving = None
        if leave is not None and call.is_aligned and call.granularity is Granularity.SAMPLE:
            rows = rows.in_order()
            leaving = Leaving(lambda part, results: performing.function_rows(call, part, results), rows, leave)
        try:
            results = self.engine.call(
                performing.checked(call, self._in_trace(function), took_ns),
                rows,
                granularity=call.granularity.value,
                size=size,
                timeout_s=timeout_s,
                in_turn=bool(call.writes),
                on_done=leaving.done if leaving is not None else None,
                meanwhile=meanwhile,
            )
        except OpError as error:
            raise performing.function_error(call, error) from error
        if not call.is_aligned:
            return results[0]
        if leaving is not None and leaving.has_left:
            return leaving.rest(results)
        return performing.function_rows(call, rows, results)

    def _in_trace(self, function: Callable[..., object]) -> Callable[..., object]:
        """The function, called within the trace of what it is called on. The engine gives each unit a context of its own."""

        @functools.wraps(function)
        def run(unit: Sample | list[Sample]) -> object:
            samples = unit if isinstance(unit, list) else [unit]
            self._trace.enter(samples[0].id.pack() if len(samples) == 1 else None)
            return function(unit)

        return run
