"""Declare tools that a model may call: their schema, what becomes of their errors, and the calls as models write them.

    @tool(timeout_s=5) on a function --Tool.description--> JSON that the chat template presents
    ToolCall (a name, arguments that the model wrote) --Tool.run--> Outcome: a text for the model, or the episode's failure

A parameter is the model's to give, unless its type is an async context manager: that is a resource of the episode (a sandbox), opened when
it is first needed, closed at the episode's end, and never shown to the model.

What goes wrong, and whose business it is:

    the model's arguments do not fit     a text for the model, which may try again
    the function raises, takes too long  a text for the model, or with `on_error="fail"` the end of the episode, which then has no reward
    it raises an error of m2flow         the end of the episode: a dead sandbox is no fault of the model's

A plain function runs on a thread (`Threads`), where a time limit, which begins when it does, only abandons it: it takes no place from
others. What computes for long, or may hang, belongs into a sandbox.

Calls are read in the form of the model's family; the raw text stays with the turn.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>            Qwen2.5, Qwen3, Hermes
    llama3   {"name": ..., "parameters": {...}}, after <|python_tag|> or alone   Llama 3
    mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]         Mistral

A call that is not valid JSON, or names no tool, is a call with a fault, which the model is told; nothing is guessed. Of a turn that was
cut off no call is read at all: half of one may be valid by accident.

Source:
    The forms are those of the models' chat templates; the names, those of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
import threading
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, final, get_args, overload

import pydantic

from m2flow.errors import M2FlowError, OpError, OptionError
from m2flow.recipe import EpisodeFailure, check_choice, check_count, check_seconds, check_text

# ---- tools


class EpisodeFailed(Exception):
    """The episode ends here, without a reward. An agent does not catch it unless it goes on without what failed."""

    def __init__(self, how: EpisodeFailure, what: str) -> None:
        super().__init__(what)
        self.how = how


class MessagesRefused(EpisodeFailed):
    """What was said can't be written as the model reads it. Nothing of it was said: the conversation is as it was, and may go on."""

    def __init__(self, what: str) -> None:
        super().__init__("invalid", what)


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
    schema: Mapping[str, object] | None = None
    """JSON Schema of the parameters, where these are not the function's: of a tool that a client of the episode runs."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    @property
    def description(self) -> dict[str, object]:
        """The JSON description, in the form that chat templates present (OpenAI's)."""
        properties = {name: _adapter(hint).json_schema() for name, hint in self.hints}
        parameters = self.schema or {"type": "object", "properties": properties, "required": list(self.required)}
        return {"type": "function", "function": {"name": self.name, "description": self.text, "parameters": parameters}}

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

    async def run(self, arguments: Mapping[str, object], resources: Mapping[str, object], threads: Executor) -> Outcome:
        """Call the function, with these resources of the episode.

        Raises:
            EpisodeFailed: it failed, and that is the end of the episode.
        """
        call: Callable[[], Any] = functools.partial(self.function, **arguments, **resources)
        is_async = inspect.iscoroutinefunction(self.function)
        limit = asyncio.timeout(self.timeout_s if is_async else None)  # Of a plain function it begins when a thread does.
        try:
            async with limit:
                result = await (call() if is_async else self._on_thread(call, limit, threads))
                if inspect.isawaitable(result):
                    result = await result
        except M2FlowError as error:
            raise EpisodeFailed("tool_failed", f"the tool {self.name} failed: {type(error).__name__}: {error}") from error
        except EpisodeFailed:
            raise
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and limit.expired()
            said = f"timed out after {self.timeout_s:g} s" if timed_out else f"{type(error).__name__}: {error}"
            if self.on_error == "fail":
                raise EpisodeFailed("tool_failed", f"the tool {self.name}: {said}") from error
            return Outcome(shortened(f"Error: {said}", self.max_chars), is_error=True)
        return Outcome(shortened(result if isinstance(result, str) else _written(result), self.max_chars))

    async def _on_thread(self, call: Callable[[], Any], limit: asyncio.Timeout, threads: Executor) -> Any:
        loop = asyncio.get_running_loop()

        def begin_limit() -> None:
            with contextlib.suppress(RuntimeError):  # The call has ended already.
                limit.reschedule(None if self.timeout_s is None else loop.time() + self.timeout_s)

        def begun() -> Any:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any longer.
                loop.call_soon_threadsafe(begin_limit)
            return call()

        return await loop.run_in_executor(threads, begun)


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
        self._most, self._most_given_up = most, most_given_up
        self._change = threading.Condition()
        self._waiting: deque[tuple[_Awaited, Callable[[], Any]]] = deque()
        self._num_idle = self._num_threads = self._num_given_up = 0
        self._is_shut = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have a thread call the function.

        Raises:
            OpError: too many that were given up run still.
        """
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
        elif self._num_threads < self._most:
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


def _written(result: object) -> str:
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


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
    if name != "":
        check_text("name", name)

    def decorate(function: Callable[..., object]) -> Tool:
        hints, required, resources = parameters(function, "@tool")
        own = name or str(getattr(function, "__name__", "tool"))
        text = inspect.cleandoc(function.__doc__ or "")
        return Tool(function, own, text, hints, required, resources, timeout_s, replay, on_error, max_chars, own)

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


# ---- calls as models write them


Family = Literal["hermes", "llama3", "mistral"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""A model's raw text -> the text without calls, and the calls."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


def family_of(template: str) -> Family:
    """The form of tool calls that a chat template asks for; Hermes' where it asks for none.

    >>> family_of("{{ '[TOOL_CALLS]' }}"), family_of("<tool_call>")
    ('mistral', 'hermes')
    """
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if _PYTHON_TAG in template or ('"parameters"' in template and "<tool_call>" not in template) else "hermes"


def parsed(text: str, family: Family) -> tuple[str, list[ToolCall]]:
    """Split a model's text into what is said and the calls.

    >>> parsed('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1}, id='', fault='')])
    """
    return {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}[family](text)


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    if "<tool_call>" not in text:
        return text, []
    return _HERMES.sub("", text).strip(), [_call(part) for part in _HERMES.findall(text)]


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, rest = text.partition(_PYTHON_TAG)
    body = (rest if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return text, []
    # Several calls are separated by semicolons; a JSON text may have these too, so what is whole is read one after the other.
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            found, at = decoder.raw_decode(body, at)
        except ValueError:
            calls.append(_call(body[at:]))
            break
        calls.append(_made(found, body))
        while at < len(body) and body[at] in "; \n":
            at += 1
    return (said.strip() if tag else ""), calls


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    said, tag, body = text.partition(_MISTRAL)
    if not tag:
        return text, []
    try:
        found, _ = json.JSONDecoder().raw_decode(body.strip())
    except ValueError:
        return said.strip(), [_call(body)]
    return said.strip(), [_made(one, body) for one in (found if isinstance(found, list) else [found])]


def _call(body: str) -> ToolCall:
    try:
        return _made(json.loads(body), body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, fault=f"the tool call is no valid JSON: {error}")


def _made(found: object, body: str) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, fault=f"the tool call has no name: {body.strip():.80}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # Some write the arguments as a text, as OpenAI's API has them.
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(str(found["name"]), {}, fault=f"the arguments are no valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(str(found["name"]), {}, fault="the arguments are no JSON object")
    return ToolCall(str(found["name"]), {str(name): value for name, value in arguments.items()}, str(found.get("id") or ""))
