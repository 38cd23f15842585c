"""Run users' functions and roles in a worker: build the arguments of each unit, keep role objects, and report results while a task runs.

    rows of each input, whole values, constants --Arguments--> function(Sample, value, constant, rng)
    unit done --done--> rows, twice a second --leave--> the worker, which reports them; the rest with the task's end

What belongs to a unit is found by identity, and its random generator is keyed by it, so neither chunking nor order of arrival shows. A
unit's changes to its arguments are not seen by the next unit. A task that is quick is reported once, as a whole.

A role has up to two objects here: one with its state, for calls that declare what they read or write, and one for all others, which may run
anywhere and must not see that state. So what a call sees does not depend on where it runs.

How units are run (threads, processes, time limits) is the function engine's business; what a call's kind makes of arguments and results
is in `m2flow.micro.protocol.call_semantics`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from m2flow.engines.contract import Ahead, Failure, FunctionEngine, Isolation
from m2flow.errors import InternalError, OpError, described
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.ops import Argument, may_write
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol.call_semantics import Judged, call_body, call_of
from m2flow.observe.otel import Trace
from m2flow.observe.spans import Recorder, SpanName, now_ns
from m2flow.samples import Batch, Column, Ragged, Sample, keyed_bits, rows_of

Leave = Callable[[list[int], Batch], None]
"""Takes samples of the task and the rows that they became: fewer, if the call drops some."""

_EVERY_NS = 500_000_000


@final
class StreamedResults:
    """Hand on the rows of one task's finished samples while it runs. Its units are samples."""

    def __init__(self, rows_of: Callable[[Batch, Sequence[object]], Batch], samples: Batch, leave: Leave) -> None:
        """
        Args:
            rows_of: makes rows from some samples and their results.
            samples: samples of the task, in the order of identity.
        """
        self._rows_of = rows_of
        self._samples = samples
        self._leave = leave
        self._since_ns = now_ns()
        self._waiting: dict[int, object] = {}
        self._left: set[int] = set()

    @property
    def has_left(self) -> bool:
        """Whether some did."""
        return bool(self._left)

    def done(self, position: int, result: object) -> None:
        """Note the result of a sample."""
        self._waiting[position] = result
        if now_ns() - self._since_ns >= _EVERY_NS and len(self._waiting) < len(self._samples):
            self._since_ns = now_ns()
            positions = sorted(self._waiting)
            part = self._samples.take(positions)
            self._left.update(positions)
            self._leave(part.ids.tolist(), self._rows_of(part, [self._waiting[p] for p in positions]))
            self._waiting = {}

    def rest(self, results: Sequence[object]) -> Batch:
        """Return the rows of samples that have not been handed on."""
        positions = [position for position in range(len(self._samples)) if position not in self._left]
        return self._rows_of(self._samples.take(positions), [results[p] for p in positions])


_ATOMS = (str, int, float, bool, bytes, type(None), Snapshot)


@final
class Arguments:
    """Called as an engine calls a function: with a `Sample`, or a list of them."""

    def __init__(self, call: Call, function: Callable[..., object], values: Mapping[str, object], run_seed: int) -> None:
        self.__name__ = getattr(function, "__name__", call.name)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self._call = call
        self._function = function
        self._values = values
        self._run_seed = run_seed
        found = call.options["arguments"]
        assert isinstance(found, tuple)
        self._arguments: tuple[Argument, ...] = found

    def with_rows(self, inputs: Mapping[str, Batch]) -> Arguments:
        """Take the rows of each input, before the first call; returns itself."""
        first = next(iter(inputs.values()), Batch(np.zeros(0, np.int64)))
        base = first.in_order().frozen()
        self.rows = base
        """Rows of the input that says which samples the call works on, in the order of identity."""
        self._inputs = {
            name: other.select(base.ids).frozen() if len(base) and other is not first else base for name, other in inputs.items()
        }
        self._place = {packed: row for row, packed in enumerate(base.ids.tolist())}
        return self

    def __call__(self, unit: Sample | list[Sample]) -> object:
        args = [self._argument(argument, unit) for argument in self._arguments if not argument.is_keyword]
        kwargs = {argument.parameter: self._argument(argument, unit) for argument in self._arguments if argument.is_keyword}
        return self._function(*args, **kwargs)

    def of(self, rows: Batch) -> dict[str, Batch]:
        """Return the part of each input that belongs to these rows, of which the same arguments can be made elsewhere."""
        places = [self._place[packed] for packed in rows.ids.tolist()]
        return {name: batch.take(places) for name, batch in self._inputs.items()}

    def _argument(self, argument: Argument, unit: Sample | list[Sample]) -> object:
        match argument.kind:
            case "rows":
                batch = self._inputs[argument.parameter]
                return self._of(unit, lambda row: Sample(batch, row))
            case "column":
                name = self._named("columns")[argument.parameter]
                if isinstance(unit, list) and not unit:
                    return []
                column = self._inputs[argument.parameter].columns[str(name)]
                return self._of(unit, lambda row: _item(column, row))
            case "value":
                value = self._values[argument.parameter]
                if argument.field is not None:
                    if not isinstance(value, Mapping) or argument.field not in value:
                        has = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else repr(value)
                        raise OpError(
                            f"there is no {argument.field!r} for {argument.parameter}; there is {has}",
                            now="Ask for a column that the rows have.",
                        )
                    value = value[argument.field]
                return dict(value) if isinstance(value, dict) else value
            case "constant":
                return _own(self._named("constants")[argument.parameter])
            case "random":
                return random.Random(self._seed(unit))
            case "numpy":
                return np.random.default_rng(self._seed(unit))

    def _of(self, unit: Sample | list[Sample], get: Callable[[int], object]) -> object:
        if isinstance(unit, list):
            return [get(self._place[sample.id.pack()]) for sample in unit]
        return get(self._place[unit.id.pack()])

    def _named(self, option: str) -> Mapping[str, object]:
        found = self._call.options[option]
        if not isinstance(found, Mapping):
            raise InternalError(f"{self._call.name} has no {option}")
        return found

    def _seed(self, unit: Sample | list[Sample]) -> int:
        """Derive the seed from the run, the op, how often it had these samples before, and the draws that the unit's samples came from."""
        samples = unit if isinstance(unit, list) else [unit]
        who = [str(s["seed"] if "seed" in self.rows else s.id.pack()) + f".{s.id.index}" for s in samples]
        return keyed_bits(self._run_seed, self._call.name, self._call.options["repeat"], ",".join(who))


def _item(column: Column, row: int) -> object:
    if isinstance(column, Ragged):
        return column.item(row)
    value = column[row]
    return value.item() if isinstance(value, np.generic) else value


def _own(constant: object) -> object:
    """A unit's own copy; arrays are large, and can't be written instead."""
    if isinstance(constant, _ATOMS):
        return constant
    if isinstance(constant, np.ndarray):
        view = constant.view()
        view.flags.writeable = False
        return view
    return copy.deepcopy(constant)


@final
class Instances:
    """Objects of roles, by role. Any thread that runs a unit may ask for one."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], object] = {}
        self._making = threading.Lock()

    def method(self, call: Call) -> Callable[..., object]:
        """Return a role's method as a plain function of the call's arguments."""

        def run(*args: object, **kwargs: object) -> object:
            instance = self._instance(call)
            may_write(instance, bool(call.writes))
            bound = getattr(instance, str(call.options["method"]))
            return bound(*args, **kwargs)

        run.__name__ = str(call.options["method"])
        run.__qualname__ = call.name
        return run

    def make(self, call: Call) -> None:
        """Make the object that a call works on, if it is not there yet."""
        self._instance(call)

    def _instance(self, call: Call) -> object:
        key = str(call.options["instance"]), "state" in call.options
        with self._making:  # Two units at once must not make two.
            if key not in self._made:
                try:
                    self._made[key] = call_semantics.function_of(call)()
                except Exception as error:
                    raise OpError(
                        f"the role {key[0]} can't be made: {described(error)}",
                        now="Mend the role's __init__, which runs on a worker.",
                    ) from error
            return self._made[key]


@dataclass(eq=False)
class _PreparedCall:
    """A call's task, ready for the engine."""

    call: Call
    arguments: Arguments | None
    how: dict[str, Any]
    """Arguments of `FunctionEngine.call`."""
    took_ns: list[int]
    """How long each unit took, in the order of their ends."""
    rows: Batch = field(default_factory=lambda: Batch(np.zeros(0, np.int64)))
    ahead: Ahead = field(default_factory=Ahead)
    following: _PreparedCall | None = None
    """The call that `ahead` has made, on the unit's thread."""

    def with_rows(self, rows: Batch, inputs: Mapping[str, Batch]) -> _PreparedCall:
        """Take the rows that say which samples the call works on, and those of each input; returns itself."""
        if self.arguments is not None:
            rows = self.arguments.with_rows(inputs).rows
        elif self.call.is_aligned and self.call.granularity is Granularity.SAMPLE:
            rows = rows.in_order()
        self.rows = self.how["batch"] = rows
        return self

    @property
    def is_of_one_sample(self) -> bool:
        """Whether it gives a row for the only sample that it has."""
        call = self.call
        return len(self.rows) == 1 and call.is_aligned and call.granularity is Granularity.SAMPLE and call_semantics.gives(call) == "column"


@dataclass(frozen=True)
class BegunCall:
    """A call whose only unit has begun (`Functions.begun_ahead`)."""

    call: _PreparedCall
    finish: Callable[..., Sequence[object]]
    drop: Callable[[], None]
    """To be called if nobody will run it to its end."""


_MOST_SHOWN = 3
"""Failures of one role that are printed with traceback, where they do not end the run."""


@final
class Functions:
    """Run the function calls of one process."""

    def __init__(self, engine: FunctionEngine, *, run: str, run_seed: int, recorder: Recorder) -> None:
        self.engine = engine
        self._run = run
        self._trace = Trace(run)
        self._run_seed = run_seed
        self._recorder = recorder
        self._instances = Instances()
        self._num_shown: Counter[str] = Counter()
        self._runs: _PreparedCall | None = None
        """The call that runs, if another one may follow at once."""

    def run_call(
        self,
        call: Call,
        inputs: Mapping[str, Batch],
        values: Mapping[str, object],
        leave: Leave | None = None,
        meanwhile: Callable[[], None] | None = None,
        *,
        is_suspect: bool = False,
        begun: BegunCall | None = None,
        may_follow: bool = False,
    ) -> Batch | object:
        """Run a call's task; see `m2flow.micro.worker.engine_host.EngineHost.run_call`."""
        rows = self._input_rows(call, inputs)
        with self._recorder.span(
            SpanName.FUNCTION_CALL, **call_semantics.span_attributes(call), num_samples=len(rows), samples=rows.ids.tolist()
        ) as span:
            if call_semantics.gives(call) == "concat":
                return rows
            if call.options.get("style") == "columns":
                if meanwhile is not None:
                    meanwhile()
                return call_semantics.columns_result(call, inputs, rows, call_semantics.function_of(call)(rows, values))
            prepared = begun.call if begun is not None else self._prepared(call, values, is_suspect=is_suspect).with_rows(rows, inputs)
            self._runs = prepared if may_follow and prepared.is_of_one_sample else None
            result = self._by_unit(prepared, leave, meanwhile, begun)
            span.set(unit_us=[round(ns / 1e3, 1) for ns in prepared.took_ns])
            if call.method == "score" and isinstance(result, Batch) and "reward" in result and result.ids.tolist() == rows.ids.tolist():
                span.set(rewards=[round(float(value), 6) for value in np.asarray(result["reward"])])
            return result

    def look_ahead(self, call: Call, inputs: Mapping[str, Batch | None], values: Mapping[str, object]) -> None:
        """Let the thread that runs the present call's only sample go on with this call, which is next, without a word to its caller.

        Args:
            inputs: rows by the input's name, as in `run_call`; None: those that the present call gives.
        """
        runs = self._runs
        is_for_threads = call_semantics.gives(call) != "concat" and call.options.get("style") != "columns"
        if runs is None or not is_for_threads or call.granularity is not Granularity.SAMPLE:
            return
        if any(one.reads or one.writes for one in (runs.call, call)):
            return  # A role's state is this worker's to look at between two calls.
        following = self._prepared(call, values)

        def prepare(result: object) -> Mapping[str, object]:
            given = call_semantics.without_parts(call_semantics.function_rows(runs.call, runs.rows, [result]))[0]
            rows = {name: given if batch is None else batch for name, batch in inputs.items()}
            runs.following = following.with_rows(self._input_rows(call, rows), rows)
            return following.how

        runs.ahead.prepare = prepare

    def look_away(self) -> None:
        """Withdraw what `look_ahead` has said: the next call may be another one."""
        if self._runs is not None:
            self._runs.ahead.prepare = None

    def begun_ahead(self) -> BegunCall | None:
        """The call that has begun while the last one ended, if any; to be finished by `run_call`, or dropped. Each is returned once."""
        runs, self._runs = self._runs, None
        if runs is None or runs.following is None or runs.ahead.finish is None or runs.ahead.drop is None:
            return None
        return BegunCall(runs.following, runs.ahead.finish, runs.ahead.drop)

    @staticmethod
    def _input_rows(call: Call, inputs: Mapping[str, Batch]) -> Batch:
        """The rows that say which samples a call works on."""
        if "arguments" in call.options:
            return next(iter(inputs.values()), Batch.concat([]))
        return call_semantics.function_input(call, inputs)

    def _prepared(self, call: Call, values: Mapping[str, object], *, is_suspect: bool = False) -> _PreparedCall:
        """A call as the engine gets it, but for its rows."""
        timeout_s, size = call.options["timeout_s"], call.options.get("minibatch_size")
        assert timeout_s is None or isinstance(timeout_s, int | float)
        assert size is None or isinstance(size, int)
        function = self._instances.method(call) if "instance" in call.options else call_semantics.function_of(call)
        arguments = None
        if "arguments" in call.options:
            function = arguments = Arguments(call, function, values, self._run_seed)
        took_ns: list[int] = []
        how = {
            "function": call_semantics.checked(call, _in_trace(self._trace, function), took_ns),
            "granularity": call.granularity.value,
            "size": size,
            "timeout_s": timeout_s,
            "in_turn": bool(call.writes),
            "isolation": self._isolation(call, arguments, values, is_suspect=is_suspect),
        }
        return _PreparedCall(call, arguments, how, took_ns)

    def _by_unit(
        self, prepared: _PreparedCall, leave: Leave | None, meanwhile: Callable[[], None] | None, begun: BegunCall | None
    ) -> Batch | object:
        """The user's function on one sample, group, mini-batch or batch after the other."""
        call, rows, stream = prepared.call, prepared.rows, None
        if leave is not None and call.is_aligned and call.granularity is Granularity.SAMPLE:
            stream = StreamedResults(lambda part, results: call_semantics.function_rows(call, part, results), rows, leave)
        on_done = stream.done if stream is not None else None
        on_failure = functools.partial(self._counted, call) if call.options.get("on_error") is not None else None
        try:
            if begun is not None:
                results = begun.finish(on_done, meanwhile, on_failure, prepared.ahead)
            else:
                results = self.engine.call(
                    **prepared.how,
                    on_done=on_done,
                    meanwhile=meanwhile,
                    on_failure=on_failure,
                    ahead=prepared.ahead if self._runs else None,
                )
        except OpError as error:
            raise call_semantics.function_error(call, error) from error
        if not call.is_aligned:
            return results[0]
        if stream is not None and stream.has_left:
            return stream.rest(results)
        return call_semantics.function_rows(call, rows, results)

    def _isolation(self, call: Call, arguments: Arguments | None, values: Mapping[str, object], *, is_suspect: bool) -> Isolation | None:
        """How the call's units can run in processes of their own; None for one that has its role's state here."""
        if "state" in call.options:
            return None

        def argument(unit: Sample | list[Sample]) -> object:
            rows = rows_of(unit if isinstance(unit, list) else [unit])
            return (rows if arguments is None else arguments.of(rows)), values, isinstance(unit, list)

        return Isolation(
            # What a call declares to read or write may be in this process's memory, and not in another's.
            is_wanted=bool(call.options.get("isolated")) or (is_suspect and not (call.reads or call.writes)),
            function=_Sent(call, self._run, self._run_seed),
            argument=argument,
            result=functools.partial(_crossed_back, call),
            preload=(__name__, "opentelemetry.context", "opentelemetry.trace"),
        )

    def _counted(self, call: Call, unit: Sample | list[Sample], how: Failure, error: OpError) -> object:
        """The reward of a sample on which its function failed, with how it did as a part of the reward."""
        self._num_shown[call.role] += 1
        if self._num_shown[call.role] <= _MOST_SHOWN:
            print(f"counted as {call.options['on_error']}: {call_semantics.function_error(call, error)}", file=sys.stderr, flush=True)
        return Judged(call.options["on_error"], {how: 1.0})


def _in_trace(trace: Trace, function: Callable[..., object]) -> Callable[..., object]:
    """The function, called within the trace of what it is called on. The engine gives each unit a context of its own."""

    @functools.wraps(function, assigned=("__name__", "__qualname__"), updated=())
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
    function = call_semantics.function_of(call)
    if isinstance(function, Snapshot):
        function.fresh()
    if "instance" in call.options:
        function = _childs_instances().method(call)
        _childs_instances().make(call)

    def on_unit(crossed: _Crossing) -> object:
        rows, values, is_list = crossed
        called = function
        if not isinstance(rows, Batch):
            called = arguments = Arguments(call, function, values, run_seed).with_rows(rows)
            rows = arguments.rows
        samples = list(rows.frozen().rows())
        result = call_semantics.checked(call, _in_trace(trace, called))(samples if is_list else samples[0])
        return _later(call, result) if inspect.isawaitable(result) else _plain(call, result)

    on_unit.__name__ = on_unit.__qualname__ = getattr(function, "__qualname__", call.name)
    return on_unit


@functools.cache
def _childs_instances() -> Instances:
    """The roles' objects of a child, which runs calls of one run alone."""
    return Instances()


async def _later(call: Call, result: Awaitable[object]) -> object:
    return _plain(call, await result)


def _plain(call: Call, result: object) -> object:
    return result if call.is_aligned else call_semantics.plain_value(call, result)


def _crossed_back(call: Call, result: object) -> object:
    """A checked result, of which JSON has made lists of tuples."""
    if not (call.is_aligned and call_semantics.gives_reward(call)):
        return result
    if call.granularity is Granularity.SAMPLE:
        return _as_judged(result)
    assert isinstance(result, Sequence)
    return [_as_judged(one) for one in result]


def _as_judged(result: object) -> object:
    return Judged(*result) if isinstance(result, list) else result
