"""Read requests for a turn of the model, and write the turn as an answer, in three APIs: OpenAI's two and Anthropic's.

    body of POST chat/completions, responses, messages --Dialect.asked--> TurnRequest
    Turn --Dialect.whole, pieces--> the answer, at once or as events

What would change the answer and can't be done in training is refused by name. The conversations that requests belong to are
`m2flow.agents.http_sessions`' business.

Source:
    OpenAI API reference (chat completions, responses), Anthropic API reference (messages).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import pydantic

from m2flow.agents.chat import Turn
from m2flow.agents.endpoint import BadRequest, first_fault, tool_calls
from m2flow.agents.tools import Tool, client_tool
from m2flow.errors import OptionError
from m2flow.recipe import Sampling
from m2flow.samples import Message

MODEL = "policy"
"""What `/v1/models` names. A request may name any: there is one."""


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

    stream: bool | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    refused: ClassVar[tuple[str, ...]] = ()
    """Fields that would change the answer, and can't be had."""

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
            raise ValueError(f"{given[0]} is not supported in training")
        if self.choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice {json.dumps(self.tool_choice)} is not supported: auto or none")
        return self


class Dialect(Protocol):
    """One API: how a request is read, and how an answer is written."""

    def asked(self) -> TurnRequest: ...

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
        if not isinstance(schema, dict) or not is_json(schema):
            raise BadRequest(f"tools: the parameters of {name!r:.60} are {schema!r:.60}; they must be a JSON schema")
        if name in found:
            raise BadRequest(f"tools: two have the name {name!r:.60}")
        found[name] = client_tool(name, str(function.get("description") or ""), schema)
    return tuple(found.values())


def _turn_request(
    messages: Sequence[Message], tools: tuple[Tool, ...], limit: int | None, stop: Sequence[str] | None, of: _Body
) -> TurnRequest:
    """A request. Raises `BadRequest`: a stop text can't be."""
    try:
        Sampling(1, stop=tuple(stop or ()))
    except OptionError as error:
        raise BadRequest(str(error)) from None
    texts = None if stop is None else tuple(stop)
    return TurnRequest(tuple(messages), tools, limit, texts, bool(of.stream), of.choice != "none", of.may_call_several)


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

    def asked(self) -> TurnRequest:
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise BadRequest(f"response_format {self.response_format.get('type')!r} is not supported in training")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        limit = self.max_completion_tokens or self.max_tokens
        return _turn_request([self._message(given) for given in self.messages], _tools_of(self.tools), limit, stop, self)

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
        choice = {
            "index": 0,
            "message": message | tool_calls(turn.calls),
            "finish_reason": _finish(turn, "stop", "tool_calls", "length"),
            "logprobs": None,
        }
        return self._head(number) | {"object": "chat.completion", "choices": [choice], "usage": self._usage(turn)}

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        head = self._head(number) | {"object": "chat.completion.chunk"}

        def chunk(delta: Mapping[str, object], finish: str | None = None) -> tuple[str, dict[str, object]]:
            return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

        yield chunk({"role": "assistant", "content": ""})
        if turn.text:
            yield chunk({"content": turn.text})
        if turn.calls:
            yield chunk(tool_calls(turn.calls, are_numbered=True))
        yield chunk({}, _finish(turn, "stop", "tool_calls", "length"))
        if (self.stream_options or {}).get("include_usage"):
            yield "", {**head, "choices": [], "usage": self._usage(turn)}

    def _head(self, number: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": MODEL}

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
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    text: _TextOptions | None = None

    refused = ("previous_response_id", "conversation", "background", "prompt")

    def asked(self) -> TurnRequest:
        kind = ((self.text and self.text.format) or {}).get("type", "text")
        if kind != "text":
            raise BadRequest(f"text.format {kind!r} is not supported in training")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        found: list[dict[str, object]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            self._take(item, found)
        if len(found) == bool(self.instructions):
            raise BadRequest("input: there is no message in it")
        return _turn_request(found, _tools_of(self.tools), self.max_output_tokens, None, self)

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

    def _output(self, turn: Turn, number: str) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = []
        if turn.text or not turn.calls:
            content = [{"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}]
            output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content})
        for at, call in enumerate(turn.calls):
            arguments = json.dumps(dict(call.arguments))
            one = {"type": "function_call", "id": f"fc_{number}{at}", "call_id": call.id, "name": call.name, "arguments": arguments}
            output.append(one | {"status": "completed"})
        return output

    def whole(self, turn: Turn, number: str) -> dict[str, object]:
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
            "output": self._output(turn, number),
            "parallel_tool_calls": self.may_call_several,
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
        for index, item in enumerate(self._output(turn, number)):
            for name, more in _item_events(item, index):
                at += 1
                yield name, {"type": name, "sequence_number": at, "output_index": index, **more}
        yield kind, {"type": kind, "sequence_number": at + 1, "response": whole}


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

    def whole(self, turn: Turn, number: str) -> dict[str, object]:
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": self._content(turn),
            "stop_reason": _finish(turn, "end_turn", "tool_use", "max_tokens"),
            "stop_sequence": None,
            "usage": {"input_tokens": turn.num_context, "output_tokens": turn.num_tokens},
        }

    def pieces(self, turn: Turn, number: str) -> Iterator[tuple[str, dict[str, object]]]:
        whole = self.whole(turn, number)
        opened = {**whole, "content": [], "stop_reason": None}
        yield "message_start", {"type": "message_start", "message": opened}
        for at, part in enumerate(self._content(turn)):
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


DIALECTS: dict[str, type[Any]] = {"chat/completions": ChatCompletion, "responses": ModelResponse, "messages": AnthropicMessage}
