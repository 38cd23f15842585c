"""Serve a rollout engine over HTTP, for clients that know OpenAI's API or Anthropic's: `m2flow serve`.

    POST /v1/chat/completions --Asked.read--> ids, Sampling --Generator, its thread--> engine.add, step, snapshot --> answer or stream
    POST /v1/responses, and Anthropic's /v1/messages --Dialect.asked--> the same
    POST /v1/messages/count_tokens   how many tokens the prompt has
    GET  /v1/models                  the model's name

The engine belongs to one thread, which steps it while there is something to generate; requests of all clients decode together. A client
that goes away has its requests aborted. What would change the answer and can't be done is refused by name with status 400; fields that
change nothing here (`user`, `store`, `metadata` ...) are ignored.

Randomness: with `seed` the tokens are a function of the seed, the prompt's ids and the index among `n`; without it the seed is drawn.

Security: on loopback a request needs a Host that names loopback, so that no other site's page can reach the server under a name of its own.
With a key every request needs `Authorization: Bearer KEY`, or `x-api-key: KEY`, as Anthropic's clients send it; the command asks for one
on any other address.

Source:
    OpenAI API reference, chat completions: names, defaults and error objects. The other two are `m2flow.agents.http_dialects`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from m2flow.agents.chat import Turn
from m2flow.agents.conversation import Conversation
from m2flow.agents.http_dialects import (
    DIALECTS,
    AnthropicCount,
    BadRequest,
    Dialect,
    Speech,
    TurnRequest,
    first_fault,
    token_logprobs,
    tool_calls,
)
from m2flow.agents.tools import ToolCall
from m2flow.engines.contract import Generated, Request, RolloutEngine
from m2flow.errors import DatasetError, M2FlowError, OptionError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Finish, Message, keyed_bits

LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
_MOST_CHOICES = 128
_DEFAULT_TOKENS = 512
_PIECE_S = 0.05
"""Least time between two pieces of a stream."""
_MOST_BODY_BYTES = 16 << 20
COUNT = "messages/count_tokens"
"""The path of Anthropic's count of a prompt's tokens."""


# ---- what is asked


class _Function(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] = {}


class _Tool(pydantic.BaseModel):
    type: Literal["function"]
    function: _Function


class _Schema(pydantic.BaseModel):
    name: str = ""
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class _Format(pydantic.BaseModel):
    type: Literal["text", "json_schema"]
    json_schema: _Schema | None = None


class _StreamOptions(pydantic.BaseModel):
    include_usage: bool = False


class Asked(pydantic.BaseModel):
    """The body of a request. Fields of OpenAI's API that are not here change nothing, or are refused by `refused`."""

    model: str
    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = pydantic.Field(1, ge=1, le=_MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    logit_bias: dict[int, float] | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    tools: list[_Tool] | None = None
    response_format: _Format = _Format(type="text")
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = None
    """False: a turn with several calls is a text."""
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def refused(self) -> str:
        """What this server can't do of it; empty if it can do all."""
        if self.tool_choice not in ("auto", "none", None):
            return f"tool_choice {json.dumps(self.tool_choice)} is not supported: auto or none"
        for name in ("top_logprobs", "presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                return f"{name} is not supported"
        if self.response_format.type == "json_schema" and self.response_format.json_schema is None:
            return "response_format of the type json_schema has no json_schema"
        return ""

    def sampling(self) -> Sampling:
        """Raises `OptionError`: a number that can't be."""
        schema = self.response_format.json_schema
        return Sampling(
            self.max_completion_tokens or self.max_tokens or _DEFAULT_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            logit_bias=tuple((self.logit_bias or {}).items()),
            json_schema="" if schema is None else json.dumps(schema.schema_),
        )

    @property
    def conversation(self) -> list[Message]:
        """The messages as chat templates get them: arguments of tool calls are objects, where OpenAI's API has them as text."""
        found: list[Message] = []
        for message in self.messages:
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                message = {**message, "content": message.get("content") or "", "tool_calls": [_parsed(call) for call in calls]}
            found.append(message)
        return found

    @property
    def shown_tools(self) -> list[dict[str, object]]:
        """Return the tools in the form that chat templates take."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or ()]


def _parsed(call: Any) -> Any:
    """A tool call with its arguments as an object, if they are one."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


async def body_of(request: HttpRequest) -> bytes:
    """The body of a request. Raises `BadRequest`: it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY_BYTES:
            raise BadRequest("the request is too large", status=413)
    return bytes(body)


async def dialect_of(request: HttpRequest) -> tuple[Dialect, TurnRequest]:
    """A request of any API, and what it asks. Raises `BadRequest`: it can't be."""
    path = request.url.path.partition("/v1/")[2]
    kind = AnthropicCount if path == COUNT else DIALECTS[path]
    try:
        dialect: Dialect = kind.model_validate_json(await body_of(request))
    except pydantic.ValidationError as error:
        raise BadRequest(first_fault(error)) from None
    asked = dialect.asked()
    if asked.messages[-1]["role"] == "assistant" and path != COUNT:
        raise BadRequest("messages: the last one is the assistant's, and a turn that is begun for the model is not supported")
    return dialect, asked


# ---- generating


@dataclass(eq=False)
class _Running:
    """One response that is being generated."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event
    is_streamed: bool
    text: str = ""
    """So far; of a stream alone."""
    done: Generated | None = None
    error: BadRequest | None = None


@final
class Generator:
    """Steps an engine in a thread of its own for any number of event loops."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._new: list[tuple[Request, _Running]] = []
        self._unwanted: list[int] = []
        self._running: dict[int, _Running] = {}
        self._next_id = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="m2flow-serve", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; what still runs has an error. May be called twice."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, ids: Sequence[int], sampling: Sampling, seeds: Sequence[int], *, is_streamed: bool) -> dict[int, _Running]:
        """Begin one response for each seed. Call it on an event loop."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self._is_closing:
                raise BadRequest("the server is stopping", status=503)
            begun = {self._next_id + at: _Running(loop, changed, is_streamed) for at in range(len(seeds))}
            requests = [Request(number, tuple(ids), seed, sampling, keeps_kv=True) for number, seed in zip(begun, seeds, strict=True)]
            self._new += zip(requests, begun.values(), strict=True)
            self._next_id += len(seeds)
            self._lock.notify()
        return begun

    def drop(self, ids: Sequence[int]) -> None:
        """End responses that nobody waits for."""
        with self._lock:
            self._unwanted += ids
            self._lock.notify()

    def _run(self) -> None:
        told_s = 0.0
        while True:
            with self._lock:
                while not (self._new or self._unwanted or self._running or self._is_closing):
                    self._lock.wait()
                new, self._new = self._new, []
                unwanted, self._unwanted = self._unwanted, []
                is_closing = self._is_closing
            if is_closing:
                for one in (*self._running.values(), *(running for _, running in new)):
                    self._tell(one, error=BadRequest("the server is stopping", status=503))
                return
            for request, running in new:
                try:
                    self._engine.add([request])
                except M2FlowError as error:
                    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
                    self._tell(running, error=BadRequest(str(error), code))
                else:
                    self._running[request.id] = running
            try:
                self._engine.abort([number for number in unwanted if self._running.pop(number, None) is not None])
                for found in self._engine.step():
                    self._tell(self._running.pop(found.id), done=found)
            except M2FlowError as error:
                self._fail(BadRequest(str(error), status=500))
            if (now_s := time.monotonic()) - told_s >= _PIECE_S:
                told_s = now_s
                self._tell_pieces()

    def _fail(self, error: BadRequest) -> None:
        self._engine.abort(list(self._running))
        for running in self._running.values():
            self._tell(running, error=error)
        self._running.clear()

    def _tell_pieces(self) -> None:
        streamed = [number for number, running in self._running.items() if running.is_streamed]
        for found in self._engine.snapshot(streamed):
            if found.text != self._running[found.id].text:
                self._tell(self._running[found.id], text=found.text)

    def _tell(self, running: _Running, *, text: str | None = None, done: Generated | None = None, error: BadRequest | None = None) -> None:
        running.text, running.done, running.error = running.text if text is None else text, done, error
        with contextlib.suppress(RuntimeError):  # Its loop has ended.
            running.loop.call_soon_threadsafe(running.changed.set)


# ---- the server


@dataclass(frozen=True)
class _Choice:
    index: int
    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    generated: Generated


@final
@dataclass
class ChatServer:
    """The application. `name` is the model's in answers and in `/v1/models`."""

    generator: Generator
    engine: RolloutEngine
    name: str
    key: str = ""
    began_s: int = field(default_factory=lambda: int(time.time()))

    def application(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/responses", self._speak, methods=["POST"]),
            Route("/v1/messages", self._speak, methods=["POST"]),
            Route(f"/v1/{COUNT}", self._count, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={BadRequest: refuse, HTTPException: refuse_path})

    def _check_caller(self, request: HttpRequest) -> None:
        if self.key:
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                raise BadRequest("the API key is missing or wrong", "invalid_api_key", 401)
        elif not LOOPBACK_HOST.fullmatch(request.headers.get("host", "")):
            raise BadRequest("this server answers on loopback only", status=403)

    async def _models(self, request: HttpRequest) -> Response:
        self._check_caller(request)
        return JSONResponse({"object": "list", "data": [self._about_model()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_caller(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._about_model())

    def _about_model(self) -> dict[str, object]:
        return {"id": self.name, "object": "model", "created": self.began_s, "owned_by": "m2flow"}

    async def _completions(self, request: HttpRequest) -> Response:
        self._check_caller(request)
        asked = await self._read(request)
        ids = self._ids_of(asked)
        began = self._begin(asked, ids)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        if asked.stream:
            parts = self._stream(asked, began, len(ids), head)
            return StreamingResponse(parts, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        try:
            await self._wait(request, began)
        finally:
            self.generator.drop([number for number, one in began.items() if one.done is None])
        choices = [self._choice(asked, at, one) for at, one in enumerate(began.values())]
        return JSONResponse(
            head
            | {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": one.index,
                        "message": {"role": "assistant", "content": one.text or None if one.calls else one.text, **tool_calls(one.calls)},
                        "finish_reason": one.finish,
                        "logprobs": self._logprobs(one.generated) if asked.logprobs else None,
                    }
                    for one in choices
                ],
                "usage": _usage(len(ids), choices),
            }
        )

    async def _speak(self, request: HttpRequest) -> Response:
        """Answer by OpenAI's responses or Anthropic's messages: one turn."""
        self._check_caller(request)
        dialect, wanted = await dialect_of(request)
        asked, number = self._asked(dialect, wanted), secrets.token_hex(12)
        ids = self._ids_of(asked)
        began = self._begin(asked, ids)
        (one,) = began.values()

        def turn() -> Turn:
            made = self._choice(asked, 0, one)
            num_tokens = len(made.generated.tokens)
            return Turn(made.text, made.calls, made.finish == "length", num_tokens, made.generated.text, len(ids))

        def spelled() -> list[tuple[str, float]]:
            return self._spelled(one.done) if one.done is not None and wanted.wants_logprobs else []

        if wanted.is_streamed:
            speech = Speech(len(ids), self._texts(asked, began), turn, spelled)
            parts = self._events(dialect.pieces(speech, number), began)
            return StreamingResponse(parts, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        try:
            await self._wait(request, began)
        finally:
            self.generator.drop([number for number, one in began.items() if one.done is None])
        return JSONResponse(dialect.whole(turn(), number, spelled()))

    async def _count(self, request: HttpRequest) -> Response:
        self._check_caller(request)
        dialect, wanted = await dialect_of(request)
        return JSONResponse({"input_tokens": len(self._ids_of(self._asked(dialect, wanted)))})

    def _asked(self, dialect: Dialect, wanted: TurnRequest) -> Asked:
        """A request of another API as one of chat completions."""
        self._check_model(dialect.named)
        described = {} if wanted.json_schema is None else {"type": "json_schema", "json_schema": {"schema": wanted.json_schema}}
        return Asked.model_validate(
            {
                "model": self.name,
                "messages": list(wanted.messages),
                "max_tokens": wanted.max_tokens,
                "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
                "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
                "stop": None if wanted.stop is None else list(wanted.stop),
                "stream": wanted.is_streamed,
                "tools": [tool.description for tool in wanted.tools] or None,
                "tool_choice": "auto" if wanted.may_call else "none",
                "parallel_tool_calls": wanted.may_call_several,
                "response_format": described or {"type": "text"},
            }
        )

    def _ids_of(self, asked: Asked) -> list[int]:
        """The prompt's tokens. Raises `BadRequest`: the chat template refuses it."""
        try:
            return Conversation(self.engine.language()).begun(asked.conversation, asked.shown_tools)
        except (DatasetError, OptionError) as error:
            raise BadRequest(str(error)) from None

    def _begin(self, asked: Asked, ids: Sequence[int]) -> dict[int, _Running]:
        """Begin the answers. Raises `BadRequest`: a number of the request can't be."""
        try:
            sampling = asked.sampling()
        except OptionError as error:
            raise BadRequest(str(error)) from None
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        seeds = [keyed_bits("serve", seed, at, *ids) for at in range(asked.n)]
        return self.generator.add(ids, sampling, seeds, is_streamed=asked.stream and not asked.shown_tools)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            now = f"ask for that, or serve it by the other name: m2flow serve --name {name[:200]!r}"
            raise BadRequest(f"there is no model {name[:200]!r} here; there is {self.name!r}: {now}", "model_not_found", 404)

    async def _read(self, request: HttpRequest) -> Asked:
        try:
            asked = Asked.model_validate_json(await body_of(request))
        except pydantic.ValidationError as error:
            raise BadRequest(first_fault(error)) from None
        self._check_model(asked.model)
        if said := asked.refused():
            raise BadRequest(said)
        return asked

    async def _wait(self, request: HttpRequest, began: Mapping[int, _Running]) -> None:
        """Wait until all have ended. Raises `BadRequest`: one can't be, or the client has gone."""
        (changed,) = {one.changed for one in began.values()}
        while True:
            _raise_first(began)
            if all(one.done is not None for one in began.values()):
                return
            changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), 1.0)
            if await request.is_disconnected():
                raise BadRequest("the client has gone", status=499)

    def _choice(self, asked: Asked, index: int, one: _Running) -> _Choice:
        generated = one.done
        assert generated is not None
        is_whole = generated.finish is Finish.STOP
        text, calls = generated.text, tuple[ToolCall, ...]()
        if asked.shown_tools:
            talk = Conversation(self.engine.language())
            talk.begun(asked.conversation, asked.shown_tools)
            text, calls = talk.heard(generated.tokens.tolist(), generated.text, is_whole=is_whole, tools=lambda call: "")
            is_several = len(calls) > 1 and asked.parallel_tool_calls is False
            if is_several or any(call.fault for call in calls):  # The client gets what the model wrote, and no half of it.
                text, calls = generated.text, ()
        return _Choice(index, text, calls, "tool_calls" if calls else "stop" if is_whole else "length", generated)

    def _logprobs(self, generated: Generated) -> dict[str, object]:
        return {"content": token_logprobs(self._spelled(generated)), "refusal": None}

    def _spelled(self, generated: Generated) -> list[tuple[str, float]]:
        texts = Conversation(self.engine.language()).texts_of(generated.tokens.tolist())
        return list(zip(texts, generated.logprobs.tolist(), strict=True))

    async def _texts(self, asked: Asked, began: Mapping[int, _Running]) -> AsyncIterator[str]:
        """The pieces of the one answer's text."""
        async for piece in self._pieces(asked, began, 0):
            choices: Any = piece["choices"]
            for choice in choices:
                if text := choice["delta"].get("content"):
                    yield text

    async def _events(self, pieces: AsyncIterator[tuple[str, dict[str, object]]], began: Mapping[int, _Running]) -> AsyncIterator[str]:
        try:
            async for event, data in pieces:
                yield written(event, data)
        except BadRequest as error:  # The status has been sent.
            yield written("error", {"type": "error", **error_of(error)})
        finally:
            self.generator.drop([number for number, one in began.items() if one.done is None])

    async def _stream(self, asked: Asked, began: Mapping[int, _Running], num_prompt: int, head: Mapping[str, object]) -> AsyncIterator[str]:
        try:
            async for piece in self._pieces(asked, began, num_prompt):
                yield f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **piece})}\n\n"
            yield "data: [DONE]\n\n"
        except BadRequest as error:  # The status has been sent.
            yield f"data: {json.dumps(error_of(error))}\n\n"
        finally:
            self.generator.drop([number for number, one in began.items() if one.done is None])

    async def _pieces(self, asked: Asked, began: Mapping[int, _Running], num_prompt: int) -> AsyncIterator[dict[str, object]]:
        """Chunks: the role, pieces of text as they come, and the end of each choice; at last the usage, if it is asked for."""
        (changed,) = {one.changed for one in began.values()}
        sent, ended = [""] * asked.n, dict[int, _Choice]()
        # What may turn out to be the beginning of a stop text is held back, and so is half of a character.
        held = max((len(text) for text in asked.sampling().stop), default=1) - 1
        for at in range(asked.n):
            yield _chunk(at, {"role": "assistant", "content": ""})
        while len(ended) < asked.n:
            changed.clear()
            _raise_first(began)
            for at, one in enumerate(began.values()):
                if at in ended:
                    continue
                choice = None if one.done is None else self._choice(asked, at, one)
                text = choice.text if choice else one.text[: len(one.text) - held].rstrip("\ufffd")
                if text.startswith(sent[at]) and len(text) > len(sent[at]):
                    yield _chunk(at, {"content": text[len(sent[at]) :]})
                    sent[at] = text
                if choice is not None:
                    ended[at] = choice
                    if choice.calls:
                        yield _chunk(at, tool_calls(choice.calls, are_numbered=True))
                    logprobs = self._logprobs(choice.generated) if asked.logprobs else None
                    yield _chunk(at, {}, choice.finish, logprobs)
            if len(ended) < asked.n:
                await changed.wait()
        if asked.stream_options.include_usage:
            yield {"choices": [], "usage": _usage(num_prompt, list(ended.values()))}


def _raise_first(began: Mapping[int, _Running]) -> None:
    for one in began.values():
        if one.error is not None:
            raise one.error


def _chunk(
    index: int, delta: Mapping[str, object], finish: str | None = None, logprobs: Mapping[str, object] | None = None
) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}


def written(event: str, data: Mapping[str, object]) -> str:
    """An event of a stream; an empty name has no line."""
    return (f"event: {event}\n" if event else "") + f"data: {json.dumps(data)}\n\n"


def _usage(num_prompt: int, choices: Sequence[_Choice]) -> dict[str, int]:
    made = sum(len(one.generated.tokens) for one in choices)
    return {"prompt_tokens": num_prompt, "completion_tokens": made, "total_tokens": num_prompt + made}


def error_of(error: BadRequest) -> dict[str, object]:
    """An error as OpenAI's API writes it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


async def refuse(request: HttpRequest, error: Exception) -> Response:
    """The answer to a request that raised `BadRequest`."""
    assert isinstance(error, BadRequest)
    return JSONResponse(error_of(error), error.status)


async def refuse_path(request: HttpRequest, error: Exception) -> Response:
    """The answer to a request for a path that is not there, or by another method than it takes."""
    assert isinstance(error, HTTPException)
    there = sorted({route.path.removeprefix("/{key}") for route in request.app.routes if isinstance(route, Route)})
    path = re.sub(r"^/[^/]+(?=/v1/)", "", request.url.path)
    what = f"{request.method} {path:.120} is not supported: there are {', '.join(there)}"
    return JSONResponse(error_of(BadRequest(what, "not_found", error.status_code)), error.status_code, error.headers)


def serve_chat(engine: RolloutEngine, name: str, listener: socket.socket, *, key: str = "") -> None:
    """Serve an engine that has been started, until Ctrl-C."""
    generator = Generator(engine)
    generator.open()
    app = ChatServer(generator, engine, name, key).application()
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off", timeout_graceful_shutdown=1)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        generator.close()
