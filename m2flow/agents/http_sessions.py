"""Give an episode's policy to an agent that speaks HTTP: what it asks by OpenAI's or Anthropic's API are turns of the episode.

    @agent
    async def solver(chat: Chat, row: Sample) -> float:
        async with endpoint(chat) as server:
            client = AsyncOpenAI(base_url=server.base_url, api_key=server.api_key)
            answer = await their_agent(client, row.prompt)
        return float(answer == row.answer)

    POST /KEY/v1/chat/completions, /KEY/v1/responses, and Anthropic's /KEY/v1/messages
        --Dialect.asked--> TurnRequest --Session.answer--> a turn of one of the episode's conversations
        --Dialect.whole, pieces--> the answer
    POST /KEY/v1/messages/count_tokens   how many tokens a conversation has that begins so; no turn
    POST /v1/...                         the same, with the key as `Authorization: Bearer KEY` or `x-api-key: KEY`

A request holds a whole conversation. The conversation of the episode that it extends goes on with what is new: ids that were sampled stay
as they are, and only the new messages are tokenised. White space around the model's texts may be missing in it, or be another, where that
leaves no doubt which conversation it is. A request that extends none, or shows other tools, begins another conversation of the episode
(`rollout(..., max_conversations=...)`). Its name, and with that its random numbers, follow from what is asked and how often that came, and
it goes by the reward of the chat. The first one is the chat itself.

So of requests at the same time it does not count which arrives first, unless they are an episode's first ones, or extend the same
conversation: the one that arrives first goes on with it. So an agent waits for its first answer before it asks for several at once, or
says `at_once=True`: then no conversation is the chat itself, and all are named by what they ask.

A request that equals one whose client went away before it had the whole answer (it timed out, or broke off the stream) is that one
again: it gets the turn that is under way, or was taken. So does a retry that says so (`x-stainless-retry-count`, which the SDKs of
OpenAI and Anthropic send). An equal request after a whole answer is a new one. A client that goes away leaves its turn to end.

The rollout's sampling holds: temperature, top_p and seed of a request are not looked at. What would change the answer otherwise and can't
be done is refused by name with status 400, and so are messages that the chat template refuses: the conversation is then as it was. A stream
has the text as it is generated, a tool call when the turn has ended. What goes wrong before the first piece has a status, and later an
event of its own.

A client that never comes, or has died, is no error of anybody: where nobody asks, or reads, for `idle_s`, and no turn or tool call is under
way, the episode has timed out. Waiting for an engine does not count.

A failure of the episode (a time-out, too many turns) is an error to the client, and is raised again where the endpoint closes, whatever the
agent made of it. Tools of such an agent are its own: they run again where an episode is repeated. Those that may not are under `@tool`.

Security: the server is on loopback, an episode has a key that nobody can guess, in the path or in a header, and the server takes no request
without a Host that names loopback. It runs in the event loop of the worker's agents and ends with the last open endpoint.

Source:
    A session by path for an unchanged agent is an idea of Agent Lightning (Luo et al. 2025, arXiv:2508.03680) and of slime's and verl's
    agent gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from m2flow.agents.chat import Chat, Turn, idle_s_of
from m2flow.agents.endpoint import COUNT, LOOPBACK_HOST, dialect_of, error_of, refuse, refuse_path, written
from m2flow.agents.http_dialects import DIALECTS, MODEL, BadRequest, ChatCompletion, Speech, TurnRequest, is_json
from m2flow.agents.tools import EpisodeFailed, MessagesRefused
from m2flow.errors import described
from m2flow.recipe import check_seconds
from m2flow.samples import Message

IDLE_S = 600.0
"""Seconds after which a client that asks for nothing counts as gone."""

# ---- what an agent gets


@final
@dataclass(frozen=True)
class Endpoint:
    """An address at which the episode's policy answers."""

    base_url: str
    """For clients of OpenAI's API: `http://127.0.0.1:PORT/KEY/v1`."""
    api_key: str

    @property
    def common_url(self) -> str:
        """The address of all endpoints that are open in this process, `http://127.0.0.1:PORT/v1`. There the API key says which is meant."""
        return self.base_url.replace(f"/{self.api_key}/", "/")

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
async def endpoint(chat: Chat, *, at_once: bool = False, idle_s: float | None = IDLE_S) -> AsyncIterator[Endpoint]:
    """Serve the policy of an episode to clients of OpenAI's or Anthropic's API, while the context is open.

    Args:
        chat: the agent's, with which nothing has been said yet, or after which a client is to go on by itself.
        at_once: whether clients may begin several conversations at the same time before the first answer. Then none of them is the chat
            itself, which would be the one that arrives first; each is named by what it asks.
        idle_s: seconds without a request after which the client counts as gone, and the episode has timed out (`timed_out`). They are
            counted while no turn or tool call of the episode is under way or waits for an engine. None: no limit.
    Raises:
        EpisodeFailed: when it closes, if a turn that a client asked for was the episode's failure, or after `idle_s`.

    Of a request, `max_tokens` and `stop` hold. With `tool_choice` `none`, a call of a tool is a text; with `parallel_tool_calls: false`
    (Anthropic's `disable_parallel_tool_use`), so are several calls in one turn. A client that goes away leaves its turn to end, which the
    endpoint waits for; when it asks the same again, it gets that turn. What can't be had in training is refused by name, and so are
    messages that the chat template refuses; the episode goes on. Of requests at the same time, the order of arrival counts for two that
    extend the same conversation, and for an episode's first ones (see `at_once`).
    """
    check_seconds("idle_s", idle_s)
    server, key = _Server.here(), secrets.token_hex(16)
    async with server.episode(idle_s) as serve:
        serve(key, chat, at_once)
        yield Endpoint(server.url(key), key)


@final
class SharedEndpoint:
    """One address for the episodes of a worker, told apart by the header `x-session-id` of each request.

    For programs whose client is made once, for all of their episodes.
    """

    def __init__(self, server: _Server, key: str) -> None:
        self._server = server
        self._key = key
        self.base_url = server.url(key)

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Callable[[str, Chat], None]]:
        """Serve conversations of an episode while the context is open: `serve(name, chat)` begins with one, whose name the header says.

        It has no limit of its own for clients that are gone: the environment behind it has one, and long phases without any request.

        Raises:
            EpisodeFailed: as `endpoint`.
        """
        async with self._server.episode(None) as serve:
            yield lambda name, chat: serve(f"{self._key}/{name}", chat, False)


@contextlib.asynccontextmanager
async def shared_endpoint() -> AsyncIterator[SharedEndpoint]:
    """Hold an address at which conversations of any episode of this event loop can be served, while the context is open."""
    server, key = _Server.here(), secrets.token_hex(16)
    server.hold(key)
    try:
        yield SharedEndpoint(server, key)
    finally:
        await server.release(key)


# ---- a session: requests become turns


@dataclass(eq=False)
class _Line:
    """One conversation, as its client knows it."""

    chat: Chat
    tools: str
    """As the template presented them at its begin."""
    said: list[_Said] = field(default_factory=list)
    """Its messages."""
    is_busy: bool = False
    num_turns: int = 0
    """Turns of the chat, after the last of its client's."""
    is_full: bool = False
    """What was said last did not fit into it."""
    answer: Answer | None = None
    """Its last turn."""

    @property
    def is_free(self) -> bool:
        """Whether a client may go on with it: no turn of it is under way, and the agent has said nothing in it since."""
        return not self.is_busy and self.num_turns == self.chat.num_turns


@dataclass(eq=False)
class Client:
    """Who asked for a turn, once."""

    has_left: bool = False
    """It went away before it had the whole answer."""


@final
class Answer:
    """A turn that clients wait for."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.is_known = False
        """What came after it shows it: somebody has it, even where its stream was broken off."""
        self.task: asyncio.Task[Turn] | None = None
        self.num_context = 0
        """Tokens before it, where there is a text."""
        self.text = ""
        """So far."""
        self._grown = asyncio.Event()

    def begin(self, turn: Coroutine[Any, Any, Turn]) -> None:
        self.task = asyncio.ensure_future(turn)
        self.task.add_done_callback(lambda _: self._wake())

    @property
    def is_missed(self) -> bool:
        """Whether nobody has the whole of it, or waits for it."""
        return not self.is_known and all(client.has_left for client in self.clients)

    def hear(self, num_context: int, text: str) -> None:
        """Take in how far the turn is."""
        self.num_context, self.text = num_context, text
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def turn(self) -> Turn:
        """Wait for its end. Raises `BadRequest`: the episode is over before that; and what ended it in place of the model."""
        assert self.task is not None
        try:
            return await asyncio.shield(self.task)  # A client that goes away leaves the turn to end: its tokens are the episode's.
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise BadRequest("the episode is over", status=404) from None
            raise

    async def begun(self) -> None:
        """Wait for the first piece of its text, or its end. Raises as `turn`."""
        assert self.task is not None
        while not self.text and not self.task.done():
            await self._grown.wait()
        if self.task.done():
            self.num_context = (await self.turn()).num_context

    async def pieces(self) -> AsyncIterator[str]:
        """The text, piece by piece, to the turn's end. Raises as `turn`."""
        assert self.task is not None
        sent, is_over = "", False
        while not is_over:
            grown, is_over = self._grown, self.task.done()
            text = (await self.turn()).text if is_over else self.text
            if len(text) > len(sent) and text.startswith(sent):
                yield text[len(sent) :]
                sent = text
            elif not is_over:
                await grown.wait()


@final
class Session:
    """The conversations of one episode's clients. Everything runs on the agents' event loop."""

    def __init__(self, chat: Chat, *, at_once: bool = False) -> None:
        self._chat = chat
        self._at_once = at_once
        self._lines: list[_Line] = []
        self._answers: dict[str, list[Answer]] = {}
        """The answers to equal requests, given or under way."""
        self._turns: set[asyncio.Task[Turn]] = set()
        """Those under way."""
        self._failure: BaseException | None = None
        self._is_over = False
        self._heard_s = time.monotonic()
        """When a client was last there."""

    def answer(self, asked: TurnRequest, client: Client, *, is_retry: bool) -> Answer:
        """The model's turn after these messages, which begins, or that which such a request has begun and nobody got.

        Args:
            is_retry: the client says that it has asked before. Then it gets what was asked for last, whoever has that.
        Raises:
            BadRequest: the episode is over. EpisodeFailed: it has failed. The turn's end raises these too, and `BadRequest` where the chat
                template refuses the messages.
        """
        if self._is_over:
            raise BadRequest("the episode is over", status=404)
        equal = self._answers.setdefault(asked.fingerprint(asked.messages), [])
        answer = next((one for one in equal if one.is_missed), equal[-1] if is_retry and equal else None)
        if answer is None:
            self.raise_failure()
            answer, line = Answer(), self._line_of(asked)
            equal.append(answer)
            if line.answer is not None:
                line.answer.is_known = True
            line.answer = answer
            answer.begin(self._turn(asked, line, answer if asked.is_streamed else None))
            assert answer.task is not None
            self._turns.add(answer.task)
            answer.task.add_done_callback(self._turns.discard)
        answer.clients.append(client)
        return answer

    def _line_of(self, asked: TurnRequest) -> _Line:
        """The conversation that a request extends, or a new one."""
        wanted = [_compared(message) for message in asked.messages]
        found = self._extended(asked, wanted)
        if found is None:
            is_first = not self._at_once and not self._lines and not self._chat.messages
            name = "http-" + asked.fingerprint([one.exact for one in wanted])[:12]
            found = _Line(self._chat if is_first else self._chat.beside(name), asked.shown)
            self._lines.append(found)
        found.is_busy = True
        return found

    def _extended(self, asked: TurnRequest, wanted: Sequence[_Said]) -> _Line | None:
        """The conversation that a request extends, if there is one."""
        count = max((at for at, message in enumerate(asked.messages, 1) if message["role"] == "assistant"), default=0)
        if not count:
            return None
        exact, stripped = zip(*wanted[:count], strict=True)
        lines = [line for line in self._lines if line.tools == asked.shown and len(line.said) >= count]
        # One that is busy or has gone on counts too: it may be the one that was meant.
        alike = [line for line in lines if tuple(one.stripped for one in line.said[:count]) == stripped]
        found = [line for line in alike if tuple(one.exact for one in line.said[:count]) == exact] or alike[: len(alike) == 1]
        return next((line for line in found if len(line.said) == count and line.is_free), None)

    async def _turn(self, asked: TurnRequest, line: _Line, listener: Answer | None) -> Turn:
        line.chat.on_text = None if listener is None else listener.hear
        new = [_named(message, asked.messages) for message in asked.messages[len(line.said) :]]
        limit = 0 if line.is_full else asked.max_tokens
        try:
            turn = await line.chat.say(new, tools=asked.tools, max_tokens=limit, stop=asked.stop)
        except MessagesRefused as error:
            if not line.said:
                self._lines.remove(line)  # It has not begun: the next request may begin with it.
            raise BadRequest(str(error)) from None
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._failure = self._failure or error
            raise
        finally:
            line.is_busy, line.chat.on_text = False, None
        may_call = asked.may_call and (asked.may_call_several or len(turn.calls) == 1)
        if turn.calls and not (may_call and all(not call.fault and is_json(call.arguments) for call in turn.calls)):
            turn = replace(turn, text=turn.raw, calls=())  # The client gets what the model wrote, and no half of it.
        line.is_full = turn.is_cut and not turn.num_tokens
        line.num_turns = line.chat.num_turns
        line.said = [_compared(message) for message in (*asked.messages, _assistant(turn))]
        return turn

    def spelled(self, turn: Turn) -> list[tuple[str, float]]:
        """The text of each token of a turn, and its log-probability."""
        return list(zip(self._chat.texts_of(turn.tokens), turn.logprobs, strict=True))

    def num_tokens(self, asked: TurnRequest) -> int:
        """Count the tokens of a conversation that begins with these messages. Raises `BadRequest`: the chat template refuses them."""
        try:
            return self._chat.num_prompt_tokens(asked.messages, asked.tools)
        except MessagesRefused as error:
            raise BadRequest(str(error)) from None

    @property
    def idle_s(self) -> float:
        """Seconds in which no client has asked for anything or been sent anything, and the episode had nothing under way."""
        return min(time.monotonic() - self._heard_s, idle_s_of(self._chat))

    def hear(self) -> None:
        """Note that a client is there."""
        self._heard_s = time.monotonic()

    def fail(self, failure: EpisodeFailed) -> None:
        """Take no turn any more."""
        self._failure = self._failure or failure

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


class _Said(NamedTuple):
    """What makes two messages the same: the role, the text, and names and arguments of calls. Clients add fields, and drop some."""

    exact: str
    stripped: str
    """The same without white space around the model's text, which some clients take off: the tokens stay as they were sampled."""


def _compared(message: Message) -> _Said:
    calls: Any = message.get("tool_calls") or ()
    called = [[one["function"]["name"], one["function"]["arguments"]] for one in calls]
    role, text = message["role"], str(message.get("content") or "")
    exact, stripped = (json.dumps([role, one, called], sort_keys=True) for one in (text, text.strip() if role == "assistant" else text))
    return _Said(exact, stripped)


def _named(message: Message, among: Sequence[Message]) -> Message:
    """A tool's message with the name of what was called, which some templates write and clients leave out."""
    if message["role"] != "tool" or message.get("name"):
        return message
    calls: Any = [call for one in among for call in one.get("tool_calls") or ()]  # type: ignore[attr-defined]
    names = [call["function"]["name"] for call in calls if call.get("id") == message.get("tool_call_id")]
    return {**message, **({"name": names[-1]} if names else {})}


@final
class _Patience:
    """Fails the sessions of an episode, and cancels who has opened them, when no client has been there for long."""

    def __init__(self, idle_s: float | None, sessions: Mapping[str, Session]) -> None:
        self._idle_s = math.inf if idle_s is None else idle_s
        self._sessions = sessions
        self.limit = asyncio.timeout(None)
        """Of what may take so long as clients are there."""
        self._next: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look again when the time is over, counted from what is known now."""
        idle_s = min((session.idle_s for session in self._sessions.values()), default=0.0)
        if idle_s >= self._idle_s:
            what = f"no client has asked the endpoint for anything for {self._idle_s:g} s: it never came, or is gone"
            now = "one that takes longer between two requests needs endpoint(chat, idle_s=...)"
            for session in self._sessions.values():
                session.fail(EpisodeFailed("timed_out", f"{what}; {now}"))
            self.limit.reschedule(0.0)
        elif self._idle_s < math.inf:
            self._next = asyncio.get_running_loop().call_later(self._idle_s - idle_s, self.watch)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()


# ---- the server


def _client_of(scope: MutableMapping[str, Any]) -> Client:
    """Who sent a request."""
    client: Client = scope.setdefault("m2flow.client", Client())
    return client


@final
class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Takes note of clients that go away before they have the whole answer; the loop hears of that before their next request."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            _client_of(self.cycle.scope).has_left = True
        super().connection_lost(exc)


@final
class _Server:
    """The one server of an event loop. It ends with its last session, or with the last shared address."""

    _running: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Server]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._held: set[str] = set()
        """Keys of shared addresses."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        routes = []
        for at in ("/{key}/v1", "/v1"):
            routes += [Route(f"{at}/{path}", self._answer, methods=["POST"]) for path in DIALECTS]
            routes += [Route(f"{at}/models", self._models, methods=["GET"]), Route(f"{at}/{COUNT}", self._count, methods=["POST"])]
        app = Starlette(routes=routes, exception_handlers={BadRequest: refuse, HTTPException: refuse_path})
        how: dict[str, Any] = {"http": _Connection, "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(app, log_level="critical", access_log=False, **how)
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        self._task.add_done_callback(self._release)

    @classmethod
    def here(cls) -> _Server:
        """The server of the loop that runs."""
        loop = asyncio.get_running_loop()
        return cls._running.get(loop) or cls._running.setdefault(loop, cls())

    def url(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{key}/v1"

    @contextlib.asynccontextmanager
    async def episode(self, idle_s: float | None) -> AsyncIterator[Callable[[str, Chat, bool], None]]:
        """Serve conversations of one episode, each under a key, until the context closes. Raises what failed in a turn of theirs.

        Args:
            idle_s: for how long no client may be there; None: for any time.
        """
        opened: dict[str, Session] = {}

        def serve(key: str, chat: Chat, at_once: bool) -> None:
            self._sessions[key] = opened[key] = Session(chat, at_once=at_once)

        is_failed, patience = True, _Patience(idle_s, opened)
        try:
            async with patience.limit:
                patience.watch()
                yield serve
            is_failed = False
        except Exception:
            for session in opened.values():
                session.raise_failure()
            raise
        finally:
            patience.stop()
            await self._close(opened, is_failed=is_failed)
        for session in opened.values():
            session.raise_failure()

    def hold(self, key: str) -> None:
        """Have the server go on, whether there are sessions or not."""
        self._held.add(key)

    async def release(self, key: str) -> None:
        self._held.discard(key)
        await self._close({}, is_failed=False)

    async def _close(self, opened: Mapping[str, Session], *, is_failed: bool) -> None:
        """End sessions. Nothing gets in any more from the first moment on, even where this is cancelled."""
        for key in opened:
            del self._sessions[key]
        is_last = not self._sessions and not self._held
        if is_last:
            self._running.pop(asyncio.get_running_loop(), None)
            self._server.should_exit = True
        await asyncio.gather(*(session.close(is_failed=is_failed) for session in opened.values()))
        if is_last:
            await asyncio.shield(self._task)

    def _release(self, task: asyncio.Task[None]) -> None:
        """Close what is open still: of a server that was cancelled with its loop, or that clients hold who read nothing."""
        for server in getattr(self._server, "servers", ()):
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._listener.close()

    def _check_caller(self, request: HttpRequest) -> str:
        """The key of the path, or else of the headers. Raises `BadRequest`: the request names another host, or its headers have no key."""
        if not LOOPBACK_HOST.fullmatch(request.headers.get("host", "")):
            raise BadRequest("this server answers on loopback only", status=403)
        if "key" in request.path_params:
            return str(request.path_params["key"])
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Keys are 128 random bits: how long a look-up takes tells nothing of them.
        for key in given:
            if key in self._sessions or key in self._held:
                return key
        raise BadRequest("the API key is missing or wrong", "invalid_api_key", 401)

    def _session_of(self, request: HttpRequest) -> Session:
        key = self._check_caller(request)
        if key in self._held:
            key = f"{key}/{request.headers.get('x-session-id', '')}"
        if key not in self._sessions:
            raise BadRequest("there is no such episode, or it is over", status=404)
        self._sessions[key].hear()
        return self._sessions[key]

    async def _models(self, request: HttpRequest) -> Response:
        if self._check_caller(request) not in self._held:
            self._session_of(request)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "m2flow"}]})

    async def _count(self, request: HttpRequest) -> Response:
        session = self._session_of(request)
        _, asked = await dialect_of(request)
        return JSONResponse({"input_tokens": session.num_tokens(asked)})

    async def _answer(self, request: HttpRequest) -> Response:
        session = self._session_of(request)
        dialect, asked = await dialect_of(request)
        number = secrets.token_hex(12)
        if asked.json_schema is not None:
            raise BadRequest("a response_format or text.format of the type json_schema is not supported in training")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        with _refusing():
            answer = session.answer(asked, _client_of(request.scope), is_retry=is_retry)
            if not asked.is_streamed:
                turn = await answer.turn()
                return JSONResponse(dialect.whole(turn, number, session.spelled(turn) if asked.wants_logprobs else []))
            await answer.begun()
        is_chat = isinstance(dialect, ChatCompletion)
        task = answer.task
        assert task is not None
        spelled = (lambda: session.spelled(task.result())) if asked.wants_logprobs else tuple[tuple[str, float]]
        speech = Speech(answer.num_context, answer.pieces(), task.result, spelled)

        async def events() -> AsyncIterator[str]:
            try:
                with _refusing():
                    async for event, data in dialect.pieces(speech, number):
                        session.hear()
                        yield written(event, data)
            except BadRequest as error:  # The status has been sent.
                yield written("", error_of(error)) if is_chat else written("error", {"type": "error", **error_of(error)})
                return
            if is_chat:
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise what goes wrong in a turn as `BadRequest`."""
    try:
        yield
    except BadRequest:
        raise
    except EpisodeFailed as error:
        raise BadRequest(f"the episode has failed: {error}", error.how) from None
    except Exception as error:
        raise BadRequest(f"the episode has failed: {described(error)}", "raised") from None
