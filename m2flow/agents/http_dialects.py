"""Read requests for a turn of the model, and write the turn as an answer, in three APIs: OpenAI's two and Anthropic's.

    body of POST chat/completions, responses, messages --Dialect.asked--> TurnRequest
    Turn --Dialect.whole--> the answer at once, Speech --Dialect.pieces--> the answer as events

What would change the answer and can't be done is refused by name. The conversations that requests belong to are the business of
`m2flow.agents.http_sessions`; `m2flow.agents.endpoint` serves trained models.

Source:
    OpenAI API reference (chat completions, responses), Anthropic API reference (messages).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, final

import pydantic

from m2flow.agents.chat import Turn
from m2flow.agents.tools import Tool, ToolCall, client_tool
from m2flow.errors import OptionError
from m2flow.recipe import MOST_COUNTED, Sampling
from m2flow.samples import Message

MODEL = "policy"
"""What `/v1/models` names in training. A request may name any: there is one."""


@final
class BadRequest(Exception):
    """A request that gets an error object in place of an answer."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def first_fault(error: pydantic.ValidationError) -> str:
    """What is wrong with a body, in a line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


def tool_calls(calls: Sequence[ToolCall], *, are_numbered: bool = False) -> dict[str, object]:
    """The field `tool_calls` of a message; none without calls."""
    found = [
        {
            **({"index": at} if are_numbered else {}),
            "id": call.id or f"call_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for at, call in enumerate(calls)
    ]
    return {"tool_calls": found} if found else {}


Spelled = Sequence[tuple[str, float]]
"""The text of each sampled token, and its log-probability."""


def token_logprobs(spelled: Spelled) -> list[dict[str, object]]:
    """Log-probabilities as OpenAI's two APIs have them."""
    return [{"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in spelled]


@dataclass(frozen=True)
class Speech:
    """A turn while it is taken."""

    num_context: int
    """Tokens before it."""
    texts: AsyncIterator[str]
    """Pieces of its text; after the last one the turn is there."""
    turn: Callable[[], Turn]
    spelled: Callable[[], Spelled] = tuple
    """Its tokens, if their log-probabilities are asked for."""


@dataclass(frozen=True)
class TurnRequest:
    """A request, whatever its dialect."""

    messages: tuple[Message, ...]
    """As chat templates get them: texts, and arguments of calls as objects."""
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    is_streamed: bool = False
    may_call: bool = True
    """False: the tools are shown, and a call of one is a text."""
    may_call_several: bool = True
    """False: a turn with several calls is a text."""
    wants_logprobs: bool = False
    temperature: float | None = None
    """These are of those who serve a model; in training the rollout's hold."""
    top_p: float | None = None
    json_schema: Mapping[str, Any] | None = None
    """What the answer is to be an instance of."""

    @cached_property
    def shown(self) -> str:
        """The tools as the model sees them."""
        return json.dumps([tool.description for tool in self.tools], sort_keys=True)

    def fingerprint(self, messages: Sequence[object]) -> str:
        """What is asked, with its messages in this form."""
        parts = [messages, self.shown, self.max_tokens, self.stop, self.may_call, *([] if self.may_call_several else ["one call"])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def is_json(value: object) -> bool:
    """Whether this can be written as JSON: without NaN, and without halves of surrogate pairs."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


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
    if not isinstance(found, dict) or not is_json(found):
        raise BadRequest(f"the arguments of a call of {name!r:.60} are {arguments!r:.60}; they must be a JSON object")
    return {"id": str(number or ""), "type": "function", "function": {"name": name, "arguments": found}}


class _Body(pydantic.BaseModel):
    """What all dialects have."""

    model: Any = None
    stream: bool | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None

    refused: ClassVar[tuple[str, ...]] = ()
    """Fields that would change the answer, and can't be had."""

    @property
    def named(self) -> str:
        """The model, as the answer names it: as the request does."""
        return self.model if isinstance(self.model, str) and self.model else MODEL

    @property
    def choice(self) -> object:
        """Whether the model may call a tool: `auto`, `none` or None; any other kind is refused."""
        return self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice

    @property
    def may_call_several(self) -> bool:
        """Whether a turn may have more than one call; Anthropic's API says it with the choice of tools."""
        says_one = isinstance(self.tool_choice, dict) and self.tool_choice.get("disable_parallel_tool_use") is True
        return self.parallel_tool_calls is not False and not says_one

    @pydantic.model_validator(mode="after")
    def _check(self) -> _Body:
        given = [name for name in self.refused if getattr(self, name)]
        if given:
            raise ValueError(f"{given[0]} is not supported")
        if self.choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice {json.dumps(self.tool_choice)} is not supported: auto or none")
        return self


class Dialect(Protocol):
    """One API: how a request is read, and how an answer is written."""

    @property
    def named(self) -> str: ...

    def asked(self) -> TurnRequest: ...

    def whole(self, turn: Turn, number: str, spelled: Spelled = ()) -> dict[str, object]: ...

    def pieces(self, speech: Speech, number: str) -> AsyncIterator[tuple[str, dict[str, object]]]:
        """The answer as a stream: (event, data). An empty event has no line of its own."""
        ...


def _tools_of(given: Sequence[Any] | None, kinds: Sequence[str] = ("function",)) -> tuple[Tool, ...]:
    """Tools that a client runs. Raises `BadRequest`: one is no function."""
    found: dict[str, Tool] = {}
    for one in given or ():
        function = one.get("function", one)
        name = function.get("name") if isinstance(function, dict) else None
        if one.get("type", kinds[0]) not in kinds or not isinstance(name, str) or not name:
            raise BadRequest(f"tools: one of the type {one.get('type')!r:.60} with the name {name!r:.60} is not supported: functions alone")
        schema = function.get("parameters") or function.get("input_schema") or {}
        if not isinstance(schema, dict) or not is_json(schema):
            raise BadRequest(f"tools: the parameters of {name!r:.60} are {schema!r:.60}; they must be a JSON schema")
        if name in found:
            raise BadRequest(f"tools: two have the name {name!r:.60}")
        found[name] = client_tool(name, str(function.get("description") or ""), schema)
    return tuple(found.values())


def _turn_request(
    messages: Sequence[Message], tools: tuple[Tool, ...], limit: int | None, stop: Sequence[str] | None, of: _Body, **more: Any
) -> TurnRequest:
    """A request. Raises `BadRequest`: a stop text can't be."""
    try:
        Sampling(1, stop=tuple(stop or ()))
    except OptionError as error:
        raise BadRequest(str(error)) from None
    texts = None if stop is None else tuple(stop)
    more |= {"temperature": of.temperature, "top_p": of.top_p}
    return TurnRequest(tuple(messages), tools, limit, texts, bool(of.stream), of.choice != "none", of.may_call_several, **more)


def _schema(given: Mapping[str, Any] | None, schema: object, where: str) -> Mapping[str, Any] | None:
    """The JSON Schema of an answer's format; None: it is text. Raises `BadRequest`: it is neither."""
    kind = (given or {}).get("type", "text")
    if kind not in ("text", "json_schema") or (kind == "json_schema" and not isinstance(schema, dict)):
        raise BadRequest(f"{where} {kind!r:.60} is not supported: text, or json_schema with a schema")
    return schema if kind == "json_schema" and isinstance(schema, dict) else None


class _ChatCall(pydantic.BaseModel):
    """A call of a tool in a message of OpenAI's chat completions."""

    id: str | None = None
    function: dict[str, Any]


_CALLS = pydantic.TypeAdapter(list[_ChatCall])


class ChatCompletion(_Body):
    """OpenAI's chat completions."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(None, ge=1, le=MOST_COUNTED)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1, le=MOST_COUNTED)
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = pydantic.Field(None, ge=1, le=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    refused = (
        *("top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"),
        *("functions", "function_call", "chat_template_kwargs"),
    )

    def asked(self) -> TurnRequest:
        described = (self.response_format or {}).get("json_schema")
        schema = _schema(self.response_format, described.get("schema") if isinstance(described, dict) else None, "response_format")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        limit = self.max_completion_tokens or self.max_tokens
        more = {"wants_logprobs": bool(self.logprobs), "json_schema": schema}
        return _turn_request([self._message(given) for given in self.messages], _tools_of(self.tools), limit, stop, self, **more)

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

    def whole(self, turn: Turn, number: str, spelled: Spelled = ()) -> dict[str, object]:
        said = turn.text if turn.text or not turn.calls else None
        message: dict[str, object] = {"role": "assistant", "content": said, "refusal": None}
        choice = {
            "index": 0,
            "message": message | tool_calls(turn.calls),
            "finish_reason": _finish(turn, "stop", "tool_calls", "length"),
            "logprobs": self._logprobs(spelled),
        }
        return self._head(number) | {"object": "chat.completion", "choices": [choice], "usage": self._usage(turn)}

    def _logprobs(self, spelled: Spelled) -> dict[str, object] | None:
        return {"content": token_logprobs(spelled), "refusal": None} if self.logprobs else None

    async def pieces(self, speech: Speech, number: str) -> AsyncIterator[tuple[str, dict[str, object]]]:
        head = self._head(number) | {"object": "chat.completion.chunk"}

        def chunk(delta: Mapping[str, object], finish: str | None = None, logprobs: object = None) -> tuple[str, dict[str, object]]:
            return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}

        yield chunk({"role": "assistant", "content": ""})
        async for text in speech.texts:
            yield chunk({"content": text})
        turn = speech.turn()
        if turn.calls:
            yield chunk(tool_calls(turn.calls, are_numbered=True))
        yield chunk({}, _finish(turn, "stop", "tool_calls", "length"), self._logprobs(speech.spelled()))
        if (self.stream_options or {}).get("include_usage"):
            yield "", {**head, "choices": [], "usage": self._usage(turn)}

    def _head(self, number: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": self.named}

    def _usage(self, turn: Turn) -> dict[str, int]:
        made, given = turn.num_tokens, turn.num_context
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _finish(turn: Turn, whole: str, called: str, cut: str) -> str:
    return called if turn.calls else cut if turn.is_cut else whole


class _TextOptions(pydantic.BaseModel):
    """How the text of OpenAI's responses is to be."""

    format: dict[str, Any] | None = None


class ModelResponse(_Body):
    """OpenAI's responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1, le=MOST_COUNTED)
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    text: _TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    refused = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs")

    def asked(self) -> TurnRequest:
        given = self.text.format if self.text else None
        schema = _schema(given, (given or {}).get("schema"), "text.format")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        found: list[dict[str, object]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            self._take(item, found)
        if len(found) == bool(self.instructions):
            raise BadRequest("input: there is no message in it")
        more = {"wants_logprobs": "message.output_text.logprobs" in (self.include or ()), "json_schema": schema}
        return _turn_request(found, _tools_of(self.tools), self.max_output_tokens, None, self, **more)

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

    @staticmethod
    def _message(text: str, number: str, spelled: Spelled = ()) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(spelled)}]
        return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content}

    def _output(self, turn: Turn, number: str, spelled: Spelled) -> list[dict[str, Any]]:
        output = [self._message(turn.text, number, spelled)] if turn.text or not turn.calls else []
        for at, call in enumerate(turn.calls):
            arguments = json.dumps(dict(call.arguments))
            one = {"type": "function_call", "id": f"fc_{number}{at}", "call_id": call.id, "name": call.name, "arguments": arguments}
            output.append(one | {"status": "completed"})
        return output

    def whole(self, turn: Turn, number: str, spelled: Spelled = ()) -> dict[str, object]:
        made, given = turn.num_tokens, turn.num_context
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.named,
            "status": "incomplete" if turn.is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
            "error": None,
            "instructions": self.instructions,
            "metadata": {},
            "output": self._output(turn, number, spelled),
            "parallel_tool_calls": self.may_call_several,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": {"input_tokens": given, "output_tokens": made, "total_tokens": given + made, **details},
        }

    async def pieces(self, speech: Speech, number: str) -> AsyncIterator[tuple[str, dict[str, object]]]:
        at = -1

        def numbered(name: str, more: Mapping[str, object]) -> tuple[str, dict[str, object]]:
            nonlocal at
            at += 1
            return name, {"type": name, "sequence_number": at, **more}

        empty = Turn("", (), is_cut=False, num_tokens=0, num_context=speech.num_context)
        begun = self.whole(empty, number) | {"status": "in_progress", "output": [], "usage": None}
        yield numbered("response.created", {"response": begun})
        is_open = False
        async for text in speech.texts:
            for name, more in () if is_open else _opening(self._message("", number)):
                yield numbered(name, more)
            is_open = True
            where = {"item_id": f"msg_{number}", "content_index": 0, "output_index": 0}
            yield numbered("response.output_text.delta", {**where, "delta": text, "logprobs": []})
        turn, spelled = speech.turn(), speech.spelled()
        for index, item in enumerate(self._output(turn, number, spelled)):
            for name, more in (*(() if is_open and not index else _opening(item)), *_closing(item)):
                yield numbered(name, {"output_index": index, **more})
        kind = "response.incomplete" if turn.is_cut else "response.completed"
        yield numbered(kind, {"response": self.whole(turn, number, spelled)})


def _opening(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    """Events before the first piece of an item of OpenAI's responses."""
    is_text = item["type"] == "message"
    empty: dict[str, object] = {"content": []} if is_text else {"arguments": ""}
    yield "response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress", **empty}}
    if is_text:
        part = {**item["content"][0], "text": "", "logprobs": []}
        yield "response.content_part.added", {"output_index": 0, "item_id": item["id"], "content_index": 0, "part": part}


def _closing(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    """Events after the last piece of an item's text, and all that its arguments have."""
    number = {"item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        where = {**number, "content_index": 0}
        yield "response.output_text.done", {**where, "text": part["text"], "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**where, "part": part}
    else:
        yield "response.function_call_arguments.delta", {**number, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**number, "name": item["name"], "arguments": item["arguments"]}
    yield "response.output_item.done", {"item": item}


class AnthropicMessage(_Body):
    """Anthropic's messages."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_tokens: int = pydantic.Field(ge=1, le=MOST_COUNTED)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None

    def asked(self) -> TurnRequest:
        found: list[dict[str, object]] = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for given in self.messages:
            if given.get("role") not in ("user", "assistant"):
                raise BadRequest(f"a message of the role {given.get('role')!r} is not supported")
            found += self._read(given)
        return _turn_request(found, _tools_of(self.tools, ("custom", "function")), self.max_tokens, self.stop_sequences, self)

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

    @staticmethod
    def _content(turn: Turn) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text or not turn.calls else []
        return content + [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn.calls]

    def whole(self, turn: Turn, number: str, spelled: Spelled = ()) -> dict[str, object]:
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": self.named,
            "content": self._content(turn),
            "stop_reason": _finish(turn, "end_turn", "tool_use", "max_tokens"),
            "stop_sequence": None,
            "usage": {"input_tokens": turn.num_context, "output_tokens": turn.num_tokens},
        }

    async def pieces(self, speech: Speech, number: str) -> AsyncIterator[tuple[str, dict[str, object]]]:
        def block(kind: str, at: int, **more: object) -> tuple[str, dict[str, object]]:
            return f"content_block_{kind}", {"type": f"content_block_{kind}", "index": at, **more}

        begun = self.whole(Turn("", (), is_cut=False, num_tokens=0, num_context=speech.num_context), number)
        yield "message_start", {"type": "message_start", "message": {**begun, "content": [], "stop_reason": None}}
        is_open, opening = False, block("start", 0, content_block={"type": "text", "text": ""})
        async for text in speech.texts:
            if not is_open:
                yield opening
            is_open = True
            yield block("delta", 0, delta={"type": "text_delta", "text": text})
        turn = speech.turn()
        for at, part in enumerate(self._content(turn)):
            if part["type"] == "tool_use":
                yield block("start", at, content_block={**part, "input": {}})
                yield block("delta", at, delta={"type": "input_json_delta", "partial_json": json.dumps(part["input"])})
            elif not is_open:
                yield opening
            yield block("stop", at)
        last = {"stop_reason": self.whole(turn, number)["stop_reason"], "stop_sequence": None}
        yield "message_delta", {"type": "message_delta", "delta": last, "usage": {"output_tokens": turn.num_tokens}}
        yield "message_stop", {"type": "message_stop"}


class AnthropicCount(AnthropicMessage):
    """Anthropic's count of the tokens that a request's prompt would have."""

    max_tokens: int = 1


DIALECTS: dict[str, type[Any]] = {"chat/completions": ChatCompletion, "responses": ModelResponse, "messages": AnthropicMessage}
