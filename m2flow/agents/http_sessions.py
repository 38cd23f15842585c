"""Give an episode's policy to an agent that speaks HTTP: what it asks by OpenAI's or Anthropic's API are turns of the episode.

    @agent
    async def solver(chat: Chat, row: Sample) -> float:
        async with endpoint(chat) as server:
            client = AsyncOpenAI(base_url=server.base_url, api_key=server.api_key)
            answer = await their_agent(client, row.prompt)
        return float(answer == row.answer)

    POST /KEY/v1/chat/completions, /KEY/v1/responses, and Anthropic's /KEY/v1/messages
        --_Dialect.asked--> Asked --Session.answer--> a turn of one of the episode's conversations --_Dialect.whole, pieces--> the answer

A request holds a whole conversation. The longest conversation of the episode that it extends goes on with what is new: ids that were
sampled stay as they are, and only the new messages are tokenised. A request that extends none, or shows other tools, begins another
conversation of the episode (`rollout(..., max_conversations=...)`). Its name, and with that its random numbers, follow from what is asked
and how often that came, and it goes by the reward of the chat. The first one is the chat itself.

So of requests at the same time it does not count which arrives first, unless they are an episode's first ones, or extend the same
conversation: the one that arrives first goes on with it. So an agent waits for its first answer before it asks for several at once.

A client's retry (`x-stainless-retry-count`, which the SDKs of OpenAI and Anthropic send) gets the answer that is under way, or was given; a
client that goes away leaves its turn to end. The rollout's sampling holds: temperature, top_p and seed of a request are not looked at. What
would change the answer otherwise and can't be done is refused by name with status 400.

A failure of the episode (a time-out, too many turns) is an error to the client, and is raised again where the endpoint closes, whatever the
agent made of it. Tools of such an agent are its own: they run again where an episode is repeated. Those that may not are under `@tool`.

Security: the server is on loopback, its paths begin with a key that nobody can guess, and it takes no request without a Host that names
loopback. It runs in the event loop of the worker's agents and ends with the last open endpoint.

Source:
    OpenAI API reference (chat completions, responses), Anthropic API reference (messages). A session by path for an unchanged agent is an
    idea of Agent Lightning (Luo et al. 2025, arXiv:2508.03680) and of slime's and verl's agent gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, final

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from m2flow.agents.chat import Chat, Turn
from m2flow.agents.endpoint import LOOPBACK_HOST, BadRequest, body_of, error_body, first_fault
from m2flow.agents.tools import EpisodeFailed, Tool, ToolCall, client_tool
from m2flow.errors import OptionError
from m2flow.recipe import Sampling
from m2flow.samples import Message

MODEL = "policy"
"""What `/v1/models` names. A request may name any: there is one."""


# ---- what an agent gets


@final
@dataclass(frozen=True)
class Endpoint:
    """An address at which the episode's policy answers."""

    base_url: str
    """For clients of OpenAI's API: `http://127.0.0.1:PORT/KEY/v1`."""
    api_key: str

    @property
    def anthropic_url(self) -> str:
        """For clients of Anthropic's API, which add `/v1/messages`."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the clients of both find it, for a program that an agent starts."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


@contextlib.asynccontextmanager
async def endpoint(chat: Chat) -> AsyncIterator[Endpoint]:
    """Serve the policy of an episode to clients of OpenAI's or Anthropic's API, while the context is open.

    Args:
        chat: the agent's, with which nothing has been said yet, or after which a client is to go on by itself.
    Raises:
        EpisodeFailed: when it closes, if a turn that a client asked for was the episode's failure.
    """
    session = Session(chat)
    server = _Server.here()
    key = server.open(session)
    is_failed = True
    try:
        yield Endpoint(f"http://127.0.0.1:{server.port}/{key}/v1", key)
        is_failed = False
    except Exception:
        session.raise_failure()
        raise
    finally:
        await server.close(key, is_failed=is_failed)
    session.raise_failure()


# ---- a session: requests become turns


@dataclass(frozen=True)
class Asked:
    """A request, whatever its dialect."""

    messages: tuple[Message, ...]
    """As chat templates get them: texts, and arguments of calls as objects."""
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    is_streamed: bool = False
    may_call: bool = True
    """False: the tools are shown, and a call of one is a text."""

    @property
    def shown(self) -> str:
        """The tools as the model sees them."""
        return json.dumps([tool.description for tool in self.tools], sort_keys=True)

    def fingerprint(self, messages: Sequence[object]) -> str:
        """What is asked, with its messages in this form."""
        parts = [messages, self.shown, self.max_tokens, self.stop, self.may_call]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(eq=False)
class _Line:
    """One conversation, as its client knows it."""

    chat: Chat
    tools: str
    """As the template presented them at its begin."""
    messages: list[Message] = field(default_factory=list)
    is_busy: bool = False
    num_turns: int = 0
    """Of the chat, after the last of its client's."""
    is_full: bool = False
    """What was said last did not fit into it."""


@final
class Session:
    """The conversations of one episode's clients. Everything runs on the agents' event loop."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._lines: list[_Line] = []
        self._answers: dict[str, asyncio.Task[Turn]] = {}
        """The last answer to each request, given or under way."""
        self._turns: set[asyncio.Task[Turn]] = set()
        """Those under way."""
        self._failure: BaseException | None = None
        self._is_over = False

    async def answer(self, asked: Asked, *, is_retry: bool) -> Turn:
        """The model's turn after these messages.

        Raises:
            BadRequest: the episode is over. EpisodeFailed: it has failed.
        """
        if self._is_over:
            raise BadRequest("the episode is over", status=404)
        key = asked.fingerprint(asked.messages)
        task = self._answers.get(key) if is_retry else None
        if task is None:
            self.raise_failure()
            task = self._answers[key] = asyncio.ensure_future(self._turn(asked, self._line_of(asked)))
            self._turns.add(task)
            task.add_done_callback(self._turns.discard)
        try:
            return await asyncio.shield(task)  # A client that goes away leaves the turn to end: its tokens are the episode's.
        except asyncio.CancelledError:
            if task.cancelled():
                raise BadRequest("the episode is over", status=404) from None
            raise

    def _line_of(self, asked: Asked) -> _Line:
        """The conversation that a request extends by the most, or a new one."""
        wanted = [_compared(message) for message in asked.messages]

        def is_extended(line: _Line) -> bool:
            if line.is_busy or line.tools != asked.shown or line.num_turns != line.chat.num_turns:
                return False
            known = [_compared(message) for message in line.messages]
            return 0 < len(known) < len(wanted) and wanted[: len(known)] == known

        found = max(filter(is_extended, self._lines), key=lambda line: len(line.messages), default=None)
        if found is not None and all(message["role"] != "assistant" for message in asked.messages[len(found.messages) :]):
            found.is_busy = True
            return found
        is_first = not self._lines and not self._chat.messages
        line = _Line(self._chat if is_first else self._chat.beside("http-" + asked.fingerprint(wanted)[:12]), asked.shown, is_busy=True)
        self._lines.append(line)
        return line

    async def _turn(self, asked: Asked, line: _Line) -> Turn:
        new = [_named(message, asked.messages) for message in asked.messages[len(line.messages) :]]
        limit = 0 if line.is_full else asked.max_tokens
        try:
            turn = await line.chat.say(new, tools=asked.tools, max_tokens=limit, stop=asked.stop)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._failure = self._failure or error
            raise
        finally:
            line.is_busy = False
        if turn.calls and not (asked.may_call and all(not call.fault and _is_json(call.arguments) for call in turn.calls)):
            turn = replace(turn, text=turn.raw, calls=())  # The client gets what the model wrote, and no half of it.
        line.is_full = turn.is_cut and not turn.num_tokens
        line.num_turns = line.chat.num_turns
        line.messages = [*asked.messages, _assistant(turn)]
        return turn

    def raise_failure(self) -> None:
        """Raise what ended a turn in place of the model, if something did."""
        if self._failure is not None:
            raise self._failure

    async def close(self, *, is_failed: bool) -> None:
        """Begin no more turns, and wait for those under way: what an episode has said does not depend on how long its clients waited.

        Args:
            is_failed: the episode is over; end them instead.
        """
        self._is_over = True
        turns = list(self._turns)
        for task in turns if is_failed or self._failure is not None else ():
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


def _assistant(turn: Turn) -> Message:
    calls = [call.message() for call in turn.calls]
    return {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}


def _compared(message: Message) -> str:
    """What makes two messages the same: the role, the text, and names and arguments of calls. Clients add fields, and drop some."""
    calls: Any = message.get("tool_calls") or ()
    called = [[one["function"]["name"], one["function"]["arguments"]] for one in calls]
    return json.dumps([message["role"], message.get("content") or "", called], sort_keys=True)


def _named(message: Message, among: Sequence[Message]) -> Message:
    """A tool's message with the name of what was called, which some templates write and clients leave out."""
    if message["role"] != "tool" or message.get("name"):
        return message
    calls: Any = [call for one in among for call in one.get("tool_calls") or ()]  # type: ignore[attr-defined]
    names = [call["function"]["name"] for call in calls if call.get("id") == message.get("tool_call_id")]
    return {**message, **({"name": names[-1]} if names else {})}


def _is_json(value: object) -> bool:
    """Whether this can be written as JSON: without NaN, and without halves of surrogate pairs."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# ---- dialects: three ways to say the same


class _Part(pydantic.BaseModel):
    """A part of a message's content."""

    type: str
    text: str = ""


_PARTS, _OBJECTS = pydantic.TypeAdapter(list[_Part]), pydantic.TypeAdapter(list[dict[str, Any]])


def _checked(kind: pydantic.TypeAdapter[Any], given: object, where: str) -> Any:
    """A value of this kind. Raises `BadRequest`: it is none."""
    try:
        return kind.validate_python(given)
    except pydantic.ValidationError as error:
        raise BadRequest(f"{where}: {first_fault(error)}") from None


def _text(content: object) -> str:
    """The text of a message's content. Raises `BadRequest`: it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[_Part] = _checked(_PARTS, content, "a message's content")
    other = [part.type for part in parts if part.type not in ("text", "input_text", "output_text", "refusal", "thinking")]
    if other:
        raise BadRequest(f"content of the type {other[0]!r} is not supported: text alone")
    return "".join(part.text for part in parts)


def _call(name: object, arguments: object, number: object) -> dict[str, object]:
    """A call as chat templates get it. Raises `BadRequest`: it has no name, or its arguments are no object."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"a tool call has the name {json.dumps(name):.60}; it must be a text")
    found = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(arguments or "{}")
    if not isinstance(found, dict) or not _is_json(found):
        raise BadRequest(f"the arguments of a call of {name!r:.60} are {arguments!r:.60}; they must be a JSON object")
    return {"id": str(number or ""), "type": "function", "function": {"name": name, "arguments": found}}


class _Body(pydantic.BaseModel):
    """What all dialects have."""

    stream: bool | None = None
    tool_choice: Any = None

    refused: ClassVar[tuple[str, ...]] = ()
    """Fields that would change the answer, and can't be had."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> _Body:
        given = [name for name in self.refused if getattr(self, name)]
        if given:
            raise ValueError(f"{given[0]} is not supported in training")
        kind = self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice
        if kind not in (None, "auto", "none"):
            raise ValueError(f"tool_choice {json.dumps(self.tool_choice)} is not supported: auto or none")
        return self


class _Dialect(Protocol):
    """One API: how a request is read, and how an answer is written."""

    def asked(self) -> Asked: ...

    def whole(self, turn: Turn, number: str) -> dict[str, object]: ...

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        """The answer as a stream: (event, data). An empty event has no line of its own."""


def _tools_of(given: Sequence[Any] | None, kinds: Sequence[str] = ("function",)) -> tuple[Tool, ...]:
    """Tools that a client runs. Raises `BadRequest`: one is no function."""
    found: dict[str, Tool] = {}
    for one in given or ():
        function = one.get("function", one)
        name = function.get("name") if isinstance(function, dict) else None
        if one.get("type", kinds[0]) not in kinds or not isinstance(name, str) or not name:
            raise BadRequest(f"tools: one of the type {one.get('type')!r:.60} with the name {name!r:.60} is not supported: functions alone")
        schema = function.get("parameters") or function.get("input_schema") or {}
        if not isinstance(schema, dict) or not _is_json(schema):
            raise BadRequest(f"tools: the parameters of {name!r:.60} are {schema!r:.60}; they must be a JSON schema")
        if name in found:
            raise BadRequest(f"tools: two have the name {name!r:.60}")
        found[name] = client_tool(name, str(function.get("description") or ""), schema)
    return tuple(found.values())


def _asked(messages: Sequence[Message], tools: tuple[Tool, ...], limit: int | None, stop: Sequence[str] | None, of: _Body) -> Asked:
    """A request. Raises `BadRequest`: a stop text can't be."""
    try:
        Sampling(1, stop=tuple(stop or ()))
    except OptionError as error:
        raise BadRequest(str(error)) from None
    kind = of.tool_choice.get("type") if isinstance(of.tool_choice, dict) else of.tool_choice
    return Asked(tuple(messages), tools, limit, None if stop is None else tuple(stop), bool(of.stream), kind != "none")


class _ChatCall(pydantic.BaseModel):
    """A call of a tool in a message of OpenAI's chat completions."""

    id: str | None = None
    function: dict[str, Any]


_CALLS = pydantic.TypeAdapter(list[_ChatCall])


class ChatCompletion(_Body):
    """OpenAI's chat completions."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = pydantic.Field(None, ge=1, le=1)
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None

    chat_template_kwargs: dict[str, Any] | None = None

    refused = ("logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "functions", "function_call", "chat_template_kwargs")

    def asked(self) -> Asked:
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise BadRequest(f"response_format {self.response_format.get('type')!r} is not supported in training")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        limit = self.max_completion_tokens or self.max_tokens
        return _asked([self._message(given) for given in self.messages], _tools_of(self.tools), limit, stop, self)

    def _message(self, given: Mapping[str, Any]) -> Message:
        role = "system" if given.get("role") == "developer" else given.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRequest(f"a message of the role {role!r} is not supported")
        message: dict[str, object] = {"role": role, "content": _text(given.get("content"))}
        if given.get("function_call"):
            raise BadRequest("a message's function_call is not supported: write it as tool_calls")
        if given.get("tool_calls"):
            calls: list[_ChatCall] = _checked(_CALLS, given["tool_calls"], "a message's tool_calls")
            message["tool_calls"] = [_call(call.function.get("name"), call.function.get("arguments"), call.id) for call in calls]
        for name in ("tool_call_id", "name"):
            if not isinstance(given.get(name, ""), str | None):
                raise BadRequest(f"a message's {name} is {given[name]!r:.60}; it must be a text")
        return message | {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}

    def whole(self, turn: Turn, number: str) -> dict[str, object]:
        said = turn.text if turn.text or not turn.calls else None
        message: dict[str, object] = {"role": "assistant", "content": said, "refusal": None}
        if turn.calls:
            message["tool_calls"] = [_as_text(call) for call in turn.calls]
        choice = {"index": 0, "message": message, "finish_reason": _finish(turn, "stop", "tool_calls", "length"), "logprobs": None}
        return self._head(number) | {"object": "chat.completion", "choices": [choice], "usage": self._usage(turn)}

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        head = self._head(number) | {"object": "chat.completion.chunk"}

        def chunk(delta: Mapping[str, object], finish: str | None = None) -> tuple[str, dict[str, object]]:
            return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

        yield chunk({"role": "assistant", "content": ""})
        if turn.text:
            yield chunk({"content": turn.text})
        for at, call in enumerate(turn.calls):
            yield chunk({"tool_calls": [{"index": at, **_as_text(call)}]})
        yield chunk({}, _finish(turn, "stop", "tool_calls", "length"))
        if (self.stream_options or {}).get("include_usage"):
            yield "", {**head, "choices": [], "usage": self._usage(turn)}

    def _head(self, number: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": MODEL}

    def _usage(self, turn: Turn) -> dict[str, int]:
        made, given = turn.num_tokens, turn.num_context
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _as_text(call: ToolCall) -> dict[str, object]:
    """A call with its arguments as a text, as OpenAI's API has them."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}


def _finish(turn: Turn, whole: str, called: str, cut: str) -> str:
    return called if turn.calls else cut if turn.is_cut else whole


class _TextOptions(pydantic.BaseModel):
    """How the text of OpenAI's responses is to be."""

    format: dict[str, Any] | None = None


class ModelResponse(_Body):
    """OpenAI's responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    text: _TextOptions | None = None

    refused = ("previous_response_id", "conversation", "background", "prompt")

    def asked(self) -> Asked:
        kind = ((self.text and self.text.format) or {}).get("type", "text")
        if kind != "text":
            raise BadRequest(f"text.format {kind!r} is not supported in training")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        found: list[dict[str, object]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            self._take(item, found)
        if len(found) == bool(self.instructions):
            raise BadRequest("input: there is no message in it")
        return _asked(found, _tools_of(self.tools), self.max_output_tokens, None, self)

    @staticmethod
    def _take(item: Mapping[str, Any], found: list[dict[str, object]]) -> None:
        kind = item.get("type", "message")
        last: dict[str, object] = found[-1] if found else {}
        if kind == "function_call":  # One turn has its text and all its calls.
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": ""}
                found.append(last)
            calls: Any = last.setdefault("tool_calls", [])
            calls.append(_call(item.get("name"), item.get("arguments"), item.get("call_id")))
        elif kind == "function_call_output":
            result: dict[str, object] = {"role": "tool", "content": _text(item.get("output"))}
            found.append(result | {"tool_call_id": str(item.get("call_id") or "")})
        elif kind == "message" and item.get("role") in ("system", "developer", "user", "assistant"):
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": _text(item.get("content"))})
        elif kind != "reasoning":
            raise BadRequest(f"input of the type {kind!r} is not supported")

    def whole(self, turn: Turn, number: str) -> dict[str, object]:
        output: list[dict[str, object]] = []
        if turn.text or not turn.calls:
            content = [{"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}]
            output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content})
        for at, call in enumerate(turn.calls):
            arguments = json.dumps(dict(call.arguments))
            one: dict[str, object] = {
                "type": "function_call",
                "id": f"fc_{number}{at}",
                "call_id": call.id,
                "name": call.name,
                "arguments": arguments,
            }
            output.append(one | {"status": "completed"})
        made, given = turn.num_tokens, turn.num_context
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "status": "incomplete" if turn.is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
            "error": None,
            "instructions": self.instructions,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": {"input_tokens": given, "output_tokens": made, "total_tokens": given + made, **details},
        }

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        whole = self.whole(turn, number)
        kind = "response.incomplete" if turn.is_cut else "response.completed"
        begun = whole | {"status": "in_progress", "output": []}
        yield "response.created", {"type": "response.created", "sequence_number": 0, "response": begun}
        at = 0
        for index, item in enumerate(typed(whole["output"])):
            for name, more in _item_events(item, index):
                at += 1
                yield name, {"type": name, "sequence_number": at, "output_index": index, **more}
        yield kind, {"type": kind, "sequence_number": at + 1, "response": whole}


def typed(items: object) -> list[dict[str, Any]]:
    """The items of an answer's output."""
    assert isinstance(items, list)
    return items


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, object]]]:
    number = {"item_id": item["id"]}
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", **({"content": []} if "content" in item else {})}}
    if item["type"] == "message":
        (part,) = item["content"]
        where = {**number, "content_index": 0}
        yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**where, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**where, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**where, "part": part}
    else:
        yield "response.function_call_arguments.delta", {**number, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**number, "name": item["name"], "arguments": item["arguments"]}
    yield "response.output_item.done", {"item": item}


class AnthropicMessage(_Body):
    """Anthropic's messages."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_tokens: int = pydantic.Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None

    def asked(self) -> Asked:
        found: list[dict[str, object]] = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for given in self.messages:
            if given.get("role") not in ("user", "assistant"):
                raise BadRequest(f"a message of the role {given.get('role')!r} is not supported")
            found += self._read(given)
        return _asked(found, _tools_of(self.tools, ("custom", "function")), self.max_tokens, self.stop_sequences, self)

    @staticmethod
    def _read(given: Mapping[str, Any]) -> list[dict[str, object]]:
        """A message, and the results of tools that stand in it as messages of their own."""
        content = given.get("content")
        if not isinstance(content, list):
            return [{"role": given["role"], "content": _text(content)}]
        _checked(_OBJECTS, content, "a message's content")
        results: list[dict[str, object]] = [
            {"role": "tool", "content": _text(part.get("content")), "tool_call_id": str(part.get("tool_use_id") or "")}
            for part in content
            if part.get("type") == "tool_result"
        ]
        calls = [_call(part.get("name"), part.get("input"), part.get("id")) for part in content if part.get("type") == "tool_use"]
        rest = [part for part in content if part.get("type") not in ("tool_result", "tool_use")]
        if results and not rest:
            return results
        return [*results, {"role": given["role"], "content": _text(rest), **({"tool_calls": calls} if calls else {})}]

    def whole(self, turn: Turn, number: str) -> dict[str, object]:
        content: list[dict[str, object]] = [{"type": "text", "text": turn.text}] if turn.text or not turn.calls else []
        content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn.calls]
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": content,
            "stop_reason": _finish(turn, "end_turn", "tool_use", "max_tokens"),
            "stop_sequence": None,
            "usage": {"input_tokens": turn.num_context, "output_tokens": turn.num_tokens},
        }

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        whole = self.whole(turn, number)
        opened = {**whole, "content": [], "stop_reason": None}
        yield "message_start", {"type": "message_start", "message": opened}
        for at, part in enumerate(typed(whole["content"])):
            if part["type"] == "text":
                empty, delta = {**part, "text": ""}, {"type": "text_delta", "text": part["text"]}
            else:
                empty, delta = {**part, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
            yield "content_block_start", {"type": "content_block_start", "index": at, "content_block": empty}
            yield "content_block_delta", {"type": "content_block_delta", "index": at, "delta": delta}
            yield "content_block_stop", {"type": "content_block_stop", "index": at}
        last = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield "message_delta", {"type": "message_delta", "delta": last, "usage": {"output_tokens": turn.num_tokens}}
        yield "message_stop", {"type": "message_stop"}


_DIALECTS: dict[str, type[Any]] = {"chat/completions": ChatCompletion, "responses": ModelResponse, "messages": AnthropicMessage}


# ---- the server


@final
class _Server:
    """The one server of an event loop. It ends with its last session."""

    _running: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Server]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        routes = [Route("/{key}/v1/models", self._models, methods=["GET"])]
        routes += [Route(f"/{{key}}/v1/{path}", self._answer, methods=["POST"], name=path) for path in _DIALECTS]
        app = Starlette(routes=routes, exception_handlers={BadRequest: _refuse})
        config = uvicorn.Config(app, log_level="critical", access_log=False, ws="none", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        self._task.add_done_callback(self._release)

    @classmethod
    def here(cls) -> _Server:
        """The server of the loop that runs."""
        loop = asyncio.get_running_loop()
        return cls._running.get(loop) or cls._running.setdefault(loop, cls())

    def open(self, session: Session) -> str:
        key = secrets.token_hex(16)
        self._sessions[key] = session
        return key

    async def close(self, key: str, *, is_failed: bool) -> None:
        """End a session. Nothing gets in any more from the first moment on, even where this is cancelled."""
        session, is_last = self._sessions.pop(key), not self._sessions
        if is_last:
            self._running.pop(asyncio.get_running_loop(), None)
            self._server.should_exit = True
        await session.close(is_failed=is_failed)
        if is_last:
            await asyncio.shield(self._task)

    def _release(self, task: asyncio.Task[None]) -> None:
        """Close what is open still: of a server that was cancelled with its loop, or that clients hold who read nothing."""
        for server in getattr(self._server, "servers", ()):
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._listener.close()

    def _session_of(self, request: HttpRequest) -> Session:
        if not LOOPBACK_HOST.fullmatch(request.headers.get("host", "")):
            raise BadRequest("this server answers on loopback only", status=403)
        session = self._sessions.get(request.path_params["key"])
        if session is None:
            raise BadRequest("there is no such episode, or it is over", status=404)
        return session

    async def _models(self, request: HttpRequest) -> Response:
        self._session_of(request)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "m2flow"}]})

    async def _answer(self, request: HttpRequest) -> Response:
        session = self._session_of(request)
        body = await body_of(request)
        try:
            dialect: _Dialect = _DIALECTS[request.url.path.partition("/v1/")[2]].model_validate_json(body)
        except pydantic.ValidationError as error:
            raise BadRequest(first_fault(error)) from None
        asked, number = dialect.asked(), secrets.token_hex(12)
        if asked.messages[-1]["role"] == "assistant":
            raise BadRequest("messages: the last one is the assistant's, and a turn that is begun for the model is not supported")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            turn = await session.answer(asked, is_retry=is_retry)
        except BadRequest:
            raise
        except EpisodeFailed as error:
            raise BadRequest(f"the episode has failed: {error}", error.how) from None
        except Exception as error:
            raise BadRequest(f"the episode has failed: {type(error).__name__}: {error}", "raised") from None
        if not asked.is_streamed:
            return JSONResponse(dialect.whole(turn, number))
        ends_with_done = isinstance(dialect, ChatCompletion)

        async def events() -> AsyncIterator[str]:
            for event, data in dialect.pieces(turn, number):
                yield (f"event: {event}\n" if event else "") + f"data: {json.dumps(data)}\n\n"
            if ends_with_done:
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse(error_body(error), error.status)
