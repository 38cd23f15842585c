"""Declare tools that a model may call: their schema, what becomes of their errors, and the calls as models write them.

    @tool(timeout_s=5) on a function --Tool.description--> JSON that the chat template presents
    ToolCall (a name, arguments that the model wrote) --Tool.run--> Outcome: a text for the model, or the episode's failure

A parameter is the model's to give, unless its type is an async context manager: that is a resource of the episode (a sandbox), opened when
it is first needed, closed at the episode's end, and never shown to the model.

What goes wrong, and whose business it is:

    the model's arguments do not fit     a text for the model, which may try again
    it raises, is late, or gives no text a text for the model, or with `on_error="fail"` the end of the episode, which then has no reward
    it raises an error of m2flow         the end of the episode: a dead sandbox is no fault of the model's

A plain function runs on a thread (`Threads`), where a time limit, which begins when it does, only abandons it: it takes no place from
others. What computes for long, or may hang, belongs into a sandbox.

Calls are read in the form of the model's family; the raw text stays with the turn.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>                        Qwen2.5, Qwen3, Hermes
    qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></...>     Qwen3-Coder, Qwen3.5, Nemotron 3
    glm45        <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>   GLM-4.5 and later
    llama3       {"name": ..., "parameters": {...}}, after <|python_tag|> or alone; [NAME(KEY=VALUE)]   Llama 3, Llama 4
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}], or NAME[CALL_ID]ID[ARGS]{...}   Mistral
    deepseek_v3  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, or with a fence         DeepSeek-V3, -R1, -V3.1
    kimi_k2      <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>     Kimi K2
    harmony      <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>                 gpt-oss
    phi4_mini    <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>, or functools[...]   Phi-4-mini, Granite 3
    gemma        <start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>     FunctionGemma, Gemma 4

Of `harmony`, the channel `final`, and `commentary` to nobody, is what a model says; its `analysis` is in the turn's raw text alone. A call
that is not well formed, or names no tool, is a call with a fault, which the model is told; nothing is guessed. Of a turn that was cut off
no call is read at all: half of one may be valid by accident.

Source:
    The forms are those of the models' chat templates; the names follow vLLM's `--tool-call-parser`. Harmony: OpenAI's response format.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import functools
import inspect
import json
import re
import sys
import sysconfig
import threading
import time
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, final, get_args, overload

import pydantic

from m2flow.engines import lines_of
from m2flow.errors import DatasetError, M2FlowError, OpError, OptionError, described, lone_surrogate
from m2flow.recipe import EpisodeFailure, check_choice, check_count, check_seconds, check_text

# ---- tools


class EpisodeFailed(Exception):
    """The episode ends here, without a reward. An agent does not catch it unless it goes on without what failed."""

    def __init__(self, how: EpisodeFailure, what: str) -> None:
        super().__init__(what)
        self.how = how


class MessagesRefused(EpisodeFailed):
    """What was said can't be written as the model reads it. Nothing of it was said: the conversation is as it was, and may go on."""

    def __init__(self, why: DatasetError) -> None:
        super().__init__("invalid", ". ".join(filter(None, (why.what, why.now))))


@dataclass(frozen=True)
class ToolCall:
    """What a model asked for."""

    name: str
    arguments: Mapping[str, object]
    id: str = ""
    """By which the message with its result names the call."""
    fault: str = ""
    """Why it can't be done, for the model; empty if it can."""

    def message(self) -> dict[str, object]:
        """The call as chat templates take it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


class Outcome(NamedTuple):
    """What came of a call."""

    text: str
    is_error: bool = False


@final
@dataclass(frozen=True)
class Tool:
    """A function under `@tool`. Called directly, it is the function."""

    function: Callable[..., object]
    name: str
    text: str
    """What the model reads about it."""
    hints: tuple[tuple[str, Any], ...]
    """Parameters that the model gives, with their types."""
    required: tuple[str, ...]
    resources: tuple[tuple[str, type], ...]
    """Parameters that the episode gives, with the classes to open."""
    timeout_s: float | None = None
    replay: Literal["pure", "recorded"] = "recorded"
    on_error: Literal["text", "fail"] = "text"
    max_chars: int = 8192
    __name__: str = field(default="tool", compare=False)
    own_slots: int | None = None
    """Calls of it that run at once in a process; None: no limit of its own."""
    schema: Mapping[str, object] | None = None
    """JSON Schema of the parameters, where these are not the function's: of a tool that a client of the episode runs."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    @property
    def description(self) -> dict[str, object]:
        """The JSON description, in the form that chat templates present (OpenAI's)."""
        properties = {} if self.schema else {name: copy.deepcopy(_schema_of(hint)) for name, hint in self.hints}
        parameters = self.schema or {"type": "object", "properties": properties, "required": list(self.required)}
        return {"type": "function", "function": {"name": self.name, "description": self.text, "parameters": parameters}}

    @property
    def overdue(self) -> Outcome:
        """What comes of a call that takes too long."""
        return self._failed(self._said_late)

    @property
    def _said_late(self) -> str:
        return f"timed out after {self.timeout_s or 0:g} s"

    def _failed(self, said: str) -> Outcome:
        return Outcome(shortened(f"Error: {_PLACE.sub('>', said)}", self.max_chars), is_error=True)

    def checked(self, call: ToolCall) -> tuple[dict[str, object], str]:
        """The arguments of a call by the types of the parameters, and what is wrong with them; empty if nothing is."""
        known = dict(self.hints)
        unknown = sorted(set(call.arguments) - set(known))
        missing = [name for name in self.required if name not in call.arguments]
        if unknown or missing:
            parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
            return {}, f"wrong arguments for {self.name} ({'; '.join(parts)}); it takes {', '.join(known) or 'none'}"
        found = {}
        for name, value in call.arguments.items():
            try:
                found[name] = _adapter(known[name]).validate_python(value)
            except pydantic.ValidationError as error:
                return {}, f"wrong argument {name} of {self.name}: {error.errors()[0]['msg']}"
        return found, ""

    def slots(self, threads: Executor) -> int:
        """How many calls run at once in a process: of it, or of all plain functions; 0: as many as are asked for."""
        if self.own_slots or inspect.iscoroutinefunction(self.function) or not isinstance(threads, Threads):
            return self.own_slots or 0
        return threads.most

    async def run(
        self,
        arguments: Mapping[str, object],
        resources: Mapping[str, object],
        threads: Executor,
        begins: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Call the function, with these resources of the episode.

        Args:
            begins: is called once it has a slot, on its thread.
        Raises:
            EpisodeFailed: it failed, and that is the end of the episode.
        """
        call: Callable[[], Any] = functools.partial(self.function, **arguments, **resources)
        if self.own_slots and isinstance(threads, Threads):
            async with threads.slots_of(self.name, self.own_slots):
                return await self._run(call, threads, begins)
        return await self._run(call, threads, begins)

    async def _run(self, call: Callable[[], Any], threads: Executor, begins: Callable[[], object]) -> Outcome:
        is_async, own = inspect.iscoroutinefunction(self.function), asyncio.current_task()
        limit = asyncio.timeout(self.timeout_s if is_async else None)  # Of a plain function it begins when a thread does.
        try:
            async with limit:
                if is_async:
                    begins()
                result = await (call() if is_async else self._on_thread(call, limit, threads, begins))
                if inspect.isawaitable(result):
                    result = await result
            text = shortened(_written(result), self.max_chars)
            if (at := lone_surrogate(text)) >= 0:
                raise ValueError(f"the result has half of a surrogate pair at character {at}")
        except M2FlowError as error:
            raise EpisodeFailed("tool_failed", f"the tool {self.name} failed: {described(error)}") from error
        except BaseException as error:
            if isinstance(error, EpisodeFailed) or is_stopped(error, own):
                raise
            said = self._said_late if isinstance(error, TimeoutError) and limit.expired() else described(error)
            if self.on_error == "fail":
                raise EpisodeFailed("tool_failed", f"the tool {self.name}: {said}") from error
            return self._failed(said)
        return Outcome(text)

    async def _on_thread(self, call: Callable[[], Any], limit: asyncio.Timeout, threads: Executor, begins: Callable[[], object]) -> Any:
        loop = asyncio.get_running_loop()

        def begin_limit() -> None:
            with contextlib.suppress(RuntimeError):  # The call has ended already.
                limit.reschedule(None if self.timeout_s is None else loop.time() + self.timeout_s)

        def begun() -> Any:
            begins()
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any longer.
                loop.call_soon_threadsafe(begin_limit)
            return call()

        return await loop.run_in_executor(threads, begun)


def is_stopped(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Whether a coroutine raises because it is to end, and not of itself: its task is cancelled, or nobody has it any more.

    What awaits a task that something else has cancelled raises `CancelledError`, too, and code that a model wrote may exit. One that is
    closed (`GeneratorExit`) is not run by its own task then.
    """
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # No loop runs: the coroutine is closed where it waits.
        return True
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return task is not own


_P = ParamSpec("_P")
_T = TypeVar("_T")


@final
class Threads(ThreadPoolExecutor):
    """Threads for functions of which some may never end. One that nobody waits for any longer takes no place from the others.

    Args:
        most: functions at once, without those that were given up.
        most_given_up: with so many that still run, nothing more is begun: what calls fails, in place of waiting in vain.

    An event loop takes no other executor than a `ThreadPoolExecutor`; of that nothing is used here.
    """

    def __init__(self, most: int, most_given_up: int) -> None:
        super().__init__(most)
        self.most, self._most_given_up = most, most_given_up
        self._change = threading.Condition()
        self._waiting: deque[tuple[_Awaited, Callable[[], Any]]] = deque()
        self._num_idle = self._num_threads = self._num_given_up = 0
        self._is_shut = False
        self._slots: dict[str, asyncio.Semaphore] = {}

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have a thread call the function. Raises `OpError`: too many that were given up run still."""
        with self._change:
            if self._is_shut:
                raise RuntimeError("the threads have been shut down")
            if self._num_given_up >= self._most_given_up:
                raise OpError(
                    f"{self._num_given_up} calls of plain functions that took too long still run",
                    now="Write the tool as an async function, give what it waits for a time-out, or run it in a sandbox.",
                )
            future = _Awaited(self._given_up)
            self._waiting.append((future, functools.partial(fn, *args, **kwargs)))
            self._have_taken()
        return future

    def slots_of(self, tool: str, num: int) -> asyncio.Semaphore:
        """The slots of a tool that has a limit of its own; for the event loop's thread."""
        return self._slots.setdefault(tool, asyncio.Semaphore(num))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Begin nothing more. What runs is not waited for: it may never end."""
        with self._change:
            self._is_shut = True
            left = [future for future, _ in self._waiting] if cancel_futures else []
            self._change.notify_all()
        for future in left:
            future.cancel()

    def _have_taken(self) -> None:
        if self._num_idle >= len(self._waiting):
            self._change.notify()
        elif self._num_threads < self.most:
            self._num_threads += 1
            threading.Thread(target=self._work, name="tool", daemon=True).start()

    def _given_up(self) -> None:
        with self._change:
            self._num_given_up += 1
            self._num_threads -= 1
            if self._waiting:
                self._have_taken()

    def _work(self) -> None:
        while True:
            with self._change:
                self._num_idle += 1
                while not self._waiting and not self._is_shut:
                    self._change.wait()
                self._num_idle -= 1
                if not self._waiting:
                    self._num_threads -= 1
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except (StopIteration, GeneratorExit) as error:  # A future refuses the one; the other closes the coroutines that await it.
                future.set_exception(RuntimeError(f"a plain function raised {type(error).__name__}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            if future.was_given_up:
                with self._change:
                    self._num_given_up -= 1
                return
            del future, call


@final
class _Awaited(Future[Any]):
    """What comes of a call; says so when it is cancelled while it runs."""

    def __init__(self, given_up: Callable[[], None]) -> None:
        super().__init__()
        self._given_up = given_up
        self.was_given_up = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        with self._condition:
            is_first = not self.done() and not self.was_given_up
            self.was_given_up |= is_first
        if is_first:
            self._given_up()
        return False


@functools.lru_cache(maxsize=256)
def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    """What checks values of a type; making it takes a millisecond."""
    return pydantic.TypeAdapter(hint)


@functools.lru_cache(maxsize=256)
def _schema_of(hint: Any) -> dict[str, Any]:
    """The JSON Schema of a type, not to be changed. Kept, since an agent and its tools are made anew for each episode."""
    return _adapter(hint).json_schema()


_PLACE = re.compile(" at 0x[0-9a-fA-F]+>")  # Where an object is in memory, which is another place in each process.


def _written(result: object) -> str:
    def plain(one: object) -> object:  # The order of a set is its process's. What comes back as it was is none, and JSON refuses it.
        return sorted(one, key=repr) if isinstance(one, set | frozenset) else one

    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return result if isinstance(result, str) else json.dumps(result, default=plain)
    if _PLACE.search(text := str(result)):
        raise TypeError(f"the result is {_PLACE.sub('>', text):.80}, which is told by its place in memory; return a text, or JSON's values")
    return text


def shortened(text: str, max_chars: int) -> str:
    """Cut the middle out of a text that is too long, and say so there; the first and the last half of what may stay are kept.

    >>> shortened("0123456789" * 3, 20)
    '0123456789\\n[10 characters left out]\\n0123456789'
    """
    if len(text) <= max_chars:
        return text
    head, tail = (max_chars + 1) // 2, max_chars // 2
    return f"{text[:head]}\n[{len(text) - max_chars} characters left out]\n{text[len(text) - tail :]}"


def is_resource(hint: object) -> bool:
    """Whether a parameter of this type is a resource of the episode."""
    return isinstance(hint, type) and hasattr(hint, "__aenter__") and hasattr(hint, "__aexit__")


@overload
def tool(function: Callable[..., object], /) -> Tool: ...
@overload
def tool(
    *,
    timeout_s: float | None = 60.0,
    replay: Literal["pure", "recorded"] = "recorded",
    on_error: Literal["text", "fail"] = "text",
    max_chars: int = 8192,
    slots: int | None = None,
    name: str = "",
) -> Callable[[Callable[..., object]], Tool]: ...
def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    timeout_s: float | None = 60.0,
    replay: Literal["pure", "recorded"] = "recorded",
    on_error: Literal["text", "fail"] = "text",
    max_chars: int = 8192,
    slots: int | None = None,
    name: str = "",
) -> Tool | Callable[[Callable[..., object]], Tool]:
    """Decorator: make a function, plain or async, a tool that agents offer to a model. Its docstring is what the model reads.

    Parameters have types, which the model's arguments are checked against; one whose type is an async context manager is a resource of the
    episode, opened once and not shown to the model.

    Args:
        timeout_s: seconds that a call may take.
        replay: `pure`: the result depends on the arguments alone, so an episode that is repeated may run it again. `recorded`: a repeated
            episode takes the result from its record; where the call had begun and has no result, the episode is lost, never run twice.
        on_error: what an exception or a time-out becomes: a `text` for the model, or the episode's failure (`fail`). An error of m2flow's,
            as of a sandbox that is gone, is always the latter.
        max_chars: of a result; the middle of a longer one is left out.
        slots: calls of it that run at once in a process; more wait, and their time limit has not begun. By default an async function has no
            limit, and the plain ones share 64 threads.
        name: what the model calls it; by default the function's name.

    >>> @tool
    ... async def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> add.description["function"]["parameters"]["required"]
    ['a', 'b']
    """
    check_seconds("timeout_s", timeout_s)
    check_choice("replay", replay, ("pure", "recorded"), of="@tool")
    check_choice("on_error", on_error, ("text", "fail"), of="@tool")
    check_count("max_chars", max_chars)
    if slots is not None:
        check_count("slots", slots)
    if name != "":
        check_text("name", name)

    def decorate(function: Callable[..., object]) -> Tool:
        hints, required, resources = parameters(function, "@tool")
        own = name or str(getattr(function, "__name__", "tool"))
        text = inspect.cleandoc(function.__doc__ or "")
        return Tool(function, own, text, hints, required, resources, timeout_s, replay, on_error, max_chars, own, slots)

    return decorate if function is None else decorate(function)


def client_tool(name: str, text: str, schema: Mapping[str, object]) -> Tool:
    """A tool that a client of the episode runs: the model sees it, and nobody calls it here."""

    def refuse(**arguments: object) -> object:
        raise EpisodeFailed("tool_failed", f"the tool {name} is run by the client that declared it")

    return Tool(refuse, name, text, (), (), (), schema=schema)


_Hints = tuple[tuple[str, Any], ...]


def parameters(
    function: Callable[..., object], what: str, given: Sequence[str] = ()
) -> tuple[_Hints, tuple[str, ...], tuple[tuple[str, type], ...]]:
    """Read a function's parameters, without those that are `given`: with their types, those that are required, and resources.

    Raises:
        OptionError: one has no type, or takes any number of arguments.
    """
    name = str(getattr(function, "__name__", function))
    try:
        types = typing.get_type_hints(function, localns=_locals_of(function))
    except Exception as error:
        raise OptionError(f"{what} {name}: its annotations can't be read: {error}", now="Name types that are defined above it.") from None
    hints, required, resources = [], [], []
    for one in inspect.signature(function).parameters.values():
        if one.name in given:
            continue
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise OptionError(f"{what} {name}: the parameter {one} can't be given by name", now="Write plain parameters.")
        if one.name not in types:
            raise OptionError(f"{what} {name}: the parameter {one.name!r} has no type", now=f"Write it: {one.name}: str.")
        if is_resource(types[one.name]):
            resources.append((one.name, types[one.name]))
            continue
        hints.append((one.name, types[one.name]))
        if one.default is one.empty:
            required.append(one.name)
    return tuple(hints), tuple(required), tuple(resources)


def _locals_of(function: Callable[..., object]) -> dict[str, object]:
    """The names that are visible where a function is being defined, for annotations that are texts."""
    found: dict[str, object] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals is getattr(function, "__globals__", None):
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return found


# ---- the event loop

_MOST_THREADS, _MOST_GIVEN_UP = 64, 512
"""Plain functions of agents that run at once; and those that were given up and have not ended, above which the next ones fail."""
_GRACE_S = 6.0
"""What an agent that runs, or a resource of one, may take to end with its worker: a server that must be killed takes four seconds."""
_MOST_BLOCKED_S = 60.0
"""How long code of an agent may keep the event loop while nothing else can go on: it waits for an answer that only the loop can give."""


@final
class EventLoop:
    """The event loop of a process's episodes, on a thread of its own."""

    def __init__(self) -> None:
        self.threads = Threads(_MOST_THREADS, _MOST_GIVEN_UP)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self.threads)  # asyncio's own has a few threads more than there are cores.
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._asked_at: float | None = None
        """Since when the loop has not answered `check`; None: it has."""
        self._thread.start()

    def _run(self) -> None:
        """Run the loop until it is stopped; a task that exits ends it for asyncio, beside raising in what awaits the task."""
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
                return

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call a function. What is asked for before the loop gets to it wakes it once."""
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._is_woken = False  # Before the first is taken: one that comes from now on is taken below, or wakes the loop again.
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"{function!r} raised", "exception": error})

    def check(self) -> None:
        """Check that the loop goes round. To be called now and then while nothing but agents can go on.

        Raises:
            OpError: code of an agent has kept it for `_MOST_BLOCKED_S`.
        """
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.call(self._answers)
        elif time.monotonic() - self._asked_at > _MOST_BLOCKED_S:
            raise OpError(
                f"an agent has blocked the event loop of all episodes for {_MOST_BLOCKED_S:g} s: {self._place()}",
                now="Await the client's asynchronous form (AsyncOpenAI, httpx.AsyncClient), or what blocks in `asyncio.to_thread(...)`.",
            )

    def _answers(self) -> None:
        self._asked_at = None

    def _place(self) -> str:
        """The line of a user's file that the loop's thread is in."""
        lines = lines_of(self._thread.ident or 0)
        libraries = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
        own = [line for line in lines if "-packages" not in line.file and not line.file.startswith(libraries)]
        return "{}:{}".format(*(own or lines)[0]) if lines else "where it is, is not known"

    def close(self) -> None:
        """End the loop, and what runs on it."""

        def stop() -> None:
            tasks = asyncio.all_tasks(self._loop)
            for task in [one for one in tasks if not one.cancelling()]:  # The others are about to end, and close what they have.
                task.cancel()
            ended = asyncio.gather(*tasks, return_exceptions=True)
            ended.add_done_callback(lambda _: self._loop.stop())

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(stop)
        self._thread.join(_GRACE_S)
        self.threads.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()


# ---- calls as models write them


Family = Literal["hermes", "qwen3_coder", "glm45", "llama3", "mistral", "deepseek_v3", "kimi_k2", "harmony", "phi4_mini", "gemma"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""A model's raw text -> the text without calls, and the calls."""
Schemas = Mapping[str, Mapping[str, object]]
"""Tool -> the JSON Schema of its parameters."""

_SIGNS: tuple[tuple[Family | None, re.Pattern[str]], ...] = (
    ("harmony", re.compile(r"<\|channel\|>")),
    ("kimi_k2", re.compile(r"<\|tool_call_begin\|>|<\|im_middle\|>")),
    ("deepseek_v3", re.compile("<｜tool▁calls▁begin｜>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("glm45", re.compile("<arg_key>")),
    ("qwen3_coder", re.compile("<parameter=")),
    (None, re.compile("<function=|<invoke |<tool_calls>")),  # Functionary's, MiniMax's, Apriel's.
    ("gemma", re.compile(r"<start_function_call>|<\|tool_call>")),
    ("phi4_mini", re.compile(r"<\|tool_call\|>|<\|tool\|>|functools\[")),
    ("hermes", re.compile("<tool_call>")),
    ("llama3", re.compile(r"<\|python_tag\|>|(?:<\|start_header_id\|>|<\|header_start\|>)(?:.*\bipython\b)", re.DOTALL)),
)
"""What the chat templates of a family have, and those of the families behind it in this list may have too. None: not known."""


@functools.lru_cache(maxsize=64)
def family_of(template: str) -> Family | None:
    """The form of tool calls that a chat template asks for. None: it presents tools, in a form that is not known.

    A template that presents no tools asks for none; what the agent itself tells the model about them is taken to be Hermes'.

    >>> family_of("{{ '[TOOL_CALLS]' }}"), family_of("{{ tools }}<tool_call>"), family_of("{{ tools }}<action>")
    ('mistral', 'hermes', None)
    """
    for family, sign in _SIGNS:
        if sign.search(template):
            return family
    return None if presents_tools(template) else "hermes"


def presents_tools(template: str) -> bool:
    """Whether a chat template tells the model of its tools.

    >>> presents_tools("{% for one in tools %}"), presents_tools("{{ messages[0].tool_calls }}")
    (True, False)
    """
    return re.search(r"\btools\b", template) is not None


NO_TOOLS = (
    "the chat template presents no tools: the model does not see those that its agent gives it; Policy(chat_template=FILE) gives a "
    "template that does, or the prompt tells of them"
)


@functools.lru_cache(maxsize=64)
def warn_of_no_tools(template: str) -> None:
    """Say once that a model does not see the tools that an agent gives it."""
    if not presents_tools(template):
        print(f"warning: {NO_TOOLS}", file=sys.stderr, flush=True)


def check_family(template: str) -> None:
    """Raise `DatasetError` if a chat template presents tools, and the form of its model's calls is not known."""
    if family_of(template) is None:
        raise DatasetError(
            "the chat template presents tools, and in which form its model writes calls is not known",
            now=f"Write @agent(tool_calls=...): one of {', '.join(FAMILIES)}, or a function of the model's text.",
        )


def parsed(text: str, family: Family, schemas: Schemas | None = None) -> tuple[str, list[ToolCall]]:
    """Split a model's text, special tokens included, into what is said and the calls.

    Args:
        schemas: by which values without quotation marks are read; of a tool that has none they are JSON, or else a text.

    >>> parsed('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1}, id='', fault='')])
    """
    if family in ("qwen3_coder", "glm45"):
        return (_qwen3_coder if family == "qwen3_coder" else _glm45)(text, schemas or {})
    return _PARSERS[family](text)


_OPENERS: Mapping[Family, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm45": ("<tool_call>",),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁call",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "phi4_mini": ("<|tool_call|>", "functools["),
    "gemma": ("<start_function_call>", "<|tool_call>"),
}
"""What calls begin with. That harmony's text is one of several parts is known only when it has ended."""


def before_calls(raw: str, text: str, family: Family) -> str:
    """The beginning of a text, with special tokens and without, that `parsed` takes for what is said whatever follows.

    >>> before_calls("Let me see. <tool", "Let me see. <tool", "hermes"), before_calls("<|python_tag|>f", "f", "llama3")
    ('Let me see.', '')
    """
    openers = _OPENERS.get(family, ("",))
    if raw[:1].isspace() or (family == "llama3" and raw[:1] in ("{", "[")):
        return ""
    ends = [raw.find(opener) for opener in openers if opener in raw]
    ends += [len(raw) - num for opener in openers for num in range(1, len(opener)) if raw.endswith(opener[:num])]
    sure = raw[: min(ends, default=len(raw))].rstrip()
    return text[: next((at for at, pair in enumerate(zip(sure, text, strict=False)) if pair[0] != pair[1]), min(len(sure), len(text)))]


def harmony_parts(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Split what a model of the family `harmony` wrote into what it thought, what it said, and its calls: to whom, and what.

    >>> harmony_parts("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>4")
    ('Hm', '4', [])
    """
    thought, said = list[str](), list[str]()
    calls: list[tuple[str, str]] = []
    for header, body in _HARMONY.findall(text):
        to = _RECIPIENT.search(header)
        if to and to[1] != "assistant":
            calls.append((to[1].removeprefix("functions."), body))
        else:
            (thought if "<|channel|>analysis" in header else said).append(body)
    return "\n".join(thought), "\n".join(said) if "<|message|>" in text else text, calls


_HARMONY = re.compile(
    r"(?:\A|<\|start\|>)((?:(?!<\|(?:start|message)\|>).)*)<\|message\|>(.*?)(?=<\|(?:end|call|return|start)\|>|\Z)", re.DOTALL
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_QWEN3_CODER = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>(.*?)(?:</function>|\Z)(?:\s*</tool_call>)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?", re.DOTALL)
_ARG = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w*))?\s*(?:\[ARGS\])?(.*)", re.DOTALL)
_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")
_PYTHON_TAG = "<|python_tag|>"
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>)|\\Z)", re.DOTALL)
_KIMI = re.compile(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|(?=<\|tool_calls_section_end\|>)|\Z)", re.DOTALL)
_KIMI_NAME = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")
_PHI = re.compile(r"<\|tool_call\|>|functools(?=\[)")
_GEMMA = re.compile(r"(?:<start_function_call>|<\|tool_call>)(.*?)(?:<end_function_call>|<tool_call\|>|\Z)", re.DOTALL)
_GEMMA_TEXT = re.compile(r'<escape>|<\|"\|>')


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    if "<tool_call>" not in text:
        return text, []
    return _HERMES.sub("", text).strip(), [_call(part) for part in _HERMES.findall(text)]


def _qwen3_coder(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    calls = [_tagged(name, body, _PARAMETER, "</parameter>", schemas) for name, body in _QWEN3_CODER.findall(text)]
    rest = _QWEN3_CODER.sub("", text)
    calls += [ToolCall("", {}, fault=f"the tool call names no function: {body.strip():.80}") for body in _HERMES.findall(rest)]
    return (_HERMES.sub("", rest).strip(), calls) if calls else (text, [])


def _glm45(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    if "<tool_call>" not in text:
        return text, []
    calls = []
    for part in _HERMES.findall(text):
        name, tag, rest = part.partition("<arg_key>")
        calls.append(_tagged(name, tag + rest, _ARG, "</arg_value>", schemas))
    return _HERMES.sub("", text).strip(), calls


def _tagged(name: str, body: str, pattern: re.Pattern[str], end: str, schemas: Schemas) -> ToolCall:
    """A call whose arguments stand in tags, each up to this end."""
    name = name.strip()
    if not name or "<" in name:
        return ToolCall("", {}, fault=f"the tool call has no name: {(name + body).strip():.80}")
    *parts, left = body.split(end)
    known: Any = schemas.get(name, {}).get("properties", {})
    arguments = {}
    for part in parts:
        found = pattern.fullmatch(part)
        if found is None:
            left = part
            break
        key = found[1].strip()
        arguments[key] = _valued(found[2], known.get(key, {}))
    return ToolCall(name, {}, fault=f"the arguments are not well formed: {left.strip():.80}") if left.strip() else ToolCall(name, arguments)


def _valued(text: str, schema: Mapping[str, object]) -> object:
    """Read a value that a model wrote without quotation marks."""
    kinds = _kinds(schema, schema)
    if kinds == {"string"}:
        return text
    try:
        found = json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    own = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}, list: {"array"}, dict: {"object"}}
    is_other = "string" in kinds and kinds.isdisjoint(own.get(type(found), set()))
    return text if isinstance(found, str) or is_other else found


def _kinds(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows; empty: any."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str):
        return _kinds(root.get("$defs", {}).get(ref.rpartition("/")[2]), root, depth + 1)
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    every = [_kinds(one, root, depth + 1) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if not found and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found.union(*every) if all(every) else set()


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, rest = text.partition(_PYTHON_TAG)
    body = (rest if tag else text).strip()
    if _PYTHONIC.match(body):
        return (said.strip() if tag else ""), _pythonic(body)
    if not tag and not (body.startswith("{") and '"name"' in body):
        return text, []
    # Several calls are separated by semicolons; a JSON text may have these too, so what is whole is read one after the other.
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            found, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            calls.append(_call(body[at:]))
            break
        calls.append(_made(found, body))
        while at < len(body) and body[at] in "; \n":
            at += 1
    return (said.strip() if tag else ""), calls


def _pythonic(body: str) -> list[ToolCall]:
    """Calls that are written as a list of Python's. Nothing is evaluated but literals that JSON has, too."""
    try:
        written = ast.parse(body, mode="eval").body
        calls = []
        for one in written.elts if isinstance(written, ast.List) else [written]:
            if not isinstance(one, ast.Call) or one.args or any(key.arg is None for key in one.keywords):
                raise ValueError("an argument has no name")
            arguments = {str(key.arg): ast.literal_eval(key.value) for key in one.keywords}
            json.dumps(arguments)
            calls.append(ToolCall(ast.unparse(one.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # Their texts differ from run to run.
        return [ToolCall("", {}, fault="the tool call is no list of Python calls whose arguments have names and are literals")]
    return calls


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    said, *parts = text.split(_MISTRAL)
    if not parts:
        return text, []
    calls: list[ToolCall] = []
    for body in parts:
        named = None if body.lstrip().startswith(("[", "{")) else _MISTRAL_NAMED.fullmatch(body)
        if named:
            calls.append(_named(named[1], named[3], named[2] or ""))
            continue
        try:
            found, _ = json.JSONDecoder().raw_decode(body.strip())
        except (ValueError, RecursionError):
            calls.append(_call(body))
        else:
            calls += [_made(one, body) for one in (found if isinstance(found, list) else [found])]
    # Its templates refuse other ids.
    return said.strip(), [call if _MISTRAL_ID.fullmatch(call.id) else replace(call, id="") for call in calls]


def _deepseek_v3(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, rest = text.partition("<｜tool▁calls▁begin｜>")
    if not tag and "<｜tool▁call▁begin｜>" not in text:
        return text, []
    if not tag:
        said, _, _ = text.partition("<｜tool▁call▁begin｜>")
    calls = []
    for part in _DEEPSEEK.findall(rest or text):
        name, _, arguments = part.partition("<｜tool▁sep｜>")
        own, fence, fenced = arguments.partition("```")
        if fence:  # Before V3.1 the name stands here, and before it the kind, `function`.
            name, arguments = own, fenced.removeprefix("json").rstrip().removesuffix("```")
        calls.append(_named(name, arguments))
    return said.strip(), calls or [ToolCall("", {}, fault="the tool call is not well formed")]


def _kimi_k2(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, rest = text.partition("<|tool_calls_section_begin|>")
    if not tag:
        return text, []
    calls = []
    for part in _KIMI.findall(rest):
        id, _, arguments = part.partition("<|tool_call_argument_begin|>")
        name = _KIMI_NAME.fullmatch(id.strip())
        calls.append(_named(name[1] if name else "", arguments, id.strip()))
    return said.strip(), calls or [ToolCall("", {}, fault="the tool call is not well formed")]


def _harmony(text: str) -> tuple[str, list[ToolCall]]:
    _, said, calls = harmony_parts(text)
    return said, [_named(name, arguments) for name, arguments in calls]


def _phi4_mini(text: str) -> tuple[str, list[ToolCall]]:
    said, *parts = _PHI.split(text)
    if not parts:
        return text, []
    calls: list[ToolCall] = []
    for part in parts:
        body = part.partition("<|/tool_call|>")[0]
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            calls.append(_call(body))
        else:
            calls += [_made(one, body) for one in (found if isinstance(found, list) else [found])]
    return said.strip(), calls


def _gemma(text: str) -> tuple[str, list[ToolCall]]:
    parts = _GEMMA.findall(text)
    if not parts:
        return text, []
    calls = []
    for part in parts:
        name, brace, body = part.strip().removeprefix("call:").partition("{")
        # Texts stand between marks, so what is between two texts has no other quotation.
        pieces = _GEMMA_TEXT.split(brace + body)
        written = [json.dumps(one) if at % 2 else re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', one) for at, one in enumerate(pieces)]
        calls.append(_named(name, "".join(written)))
    return _GEMMA.sub("", text).strip(), calls


_PARSERS: Mapping[str, Parser] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
    "phi4_mini": _phi4_mini,
    "gemma": _gemma,
}


def _call(body: str) -> ToolCall:
    try:
        return _made(json.loads(body), body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, fault=f"the tool call is no valid JSON: {error}")


def _named(name: str, arguments: str, id: str = "") -> ToolCall:
    """A call whose arguments alone are JSON."""
    name = name.strip()
    try:
        return _made({"name": name or None, "arguments": json.loads(arguments) if arguments.strip() else {}, "id": id}, name + arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, id, f"the arguments are no valid JSON: {error}")


def _made(found: object, body: str) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, fault=f"the tool call has no name: {body.strip():.80}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # Some write the arguments as a text, as OpenAI's API has them.
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(str(found["name"]), {}, fault=f"the arguments are no valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(str(found["name"]), {}, fault="the arguments are no JSON object")
    return ToolCall(str(found["name"]), {str(name): value for name, value in arguments.items()}, str(found.get("id") or ""))
