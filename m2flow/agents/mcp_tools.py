"""Make the tools of an MCP server available to agents: each becomes a `Tool`, as if it were declared with `@tool`.

    mcp_tools(["python", "server.py"]) or mcp_tools("http://host:8000/mcp") --asks what there is--> [Tool, ...]
    Tool.run --session of the worker, or of the episode--> the server's answer: a text, or an error that the model reads

The package `mcp` speaks the protocol. A session has to be closed by the task that opened it, and tools run in any task: so each session
has a task of its own, which waits for its end.

A server that can't be reached, or goes away, is no fault of the model's: the episode then fails, and the next one gets a new session.

Source: Model Context Protocol, https://modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, final

import pydantic

from m2flow.agents.tools import EpisodeFailed, Tool
from m2flow.errors import MissingExtra, OptionError, described, did_you_mean
from m2flow.recipe import check_choice, check_count, check_seconds, check_text

_START_S = 30.0
"""Longest that a server takes to answer what it has."""
_MOST_PAGES = 1_000
_MOST_PARTS = 5_000
"""Most parts of a tool's schema, once what its references name is in their place."""
_SESSION = "mcp_session_"
"""Parameter of a tool that gets its episode's session; no server's own has this name."""


class McpToolError(Exception):
    """What a server's tool says went wrong."""


class McpServer(NamedTuple):
    """Where a server is: a command that speaks on its standard streams, or an address."""

    command: tuple[str, ...]
    url: str
    environment: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)


def mcp_tools(
    server: str | Sequence[str],
    *,
    names: Sequence[str] = (),
    per: Literal["worker", "episode"] = "worker",
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = 60.0,
    replay: Literal["pure", "recorded"] = "recorded",
    on_error: Literal["text", "fail"] = "text",
    max_chars: int = 8192,
) -> list[Tool]:
    """The tools of an MCP server, for `chat.say(tools=...)`. The server is asked what it has at once. Needs `m2flow[mcp]`.

    Args:
        server: an address of streamable HTTP, `"http://host:8000/mcp"`; or a command with its arguments, started wherever an episode runs.
        names: of the tools that are wanted, by default all.
        per: one session with the server for all episodes of a worker; or one for each episode, which starts a command anew and leaves
            nothing behind for others.
        env: variables of a command's environment besides the usual ones (PATH, HOME and so on).
        timeout_s, replay, on_error, max_chars: as of `tool`. The first call of a worker also waits for its session. An image, or another
            result that is no text, is replaced by its kind and size.

    Raises:
        OptionError: the server can't be reached, or has no tool of such a name. MissingExtra: the package `mcp` is not installed.
    """
    where = _server_of(server, env)
    check_choice("per", per, ("worker", "episode"), of="mcp_tools")
    check_seconds("timeout_s", timeout_s)
    check_choice("replay", replay, ("pure", "recorded"), of="mcp_tools")
    check_choice("on_error", on_error, ("text", "fail"), of="mcp_tools")
    check_count("max_chars", max_chars)
    if importlib.util.find_spec("mcp") is None:
        raise MissingExtra("mcp_tools() needs the package mcp, which is not installed", now="Run: pip install 'm2flow[mcp]'.")
    offered = {one.name: one for one in _asked(where)}
    if not offered:
        raise OptionError(
            f"the MCP server {where.name} has no tools", now="Some servers need an option, or a folder, before they have any."
        )
    wanted = list(names) or list(offered)
    unknown = [name for name in wanted if name not in offered]
    if unknown:
        said = f"the MCP server {where.name} has no tool {unknown[0]!r}; it has {', '.join(offered) or 'none'}"
        raise OptionError(said, now=did_you_mean(str(unknown[0]), offered) or "Ask for one of these.")
    session = _session_class(where) if per == "episode" else None
    found = []
    for name in wanted:
        hints, required = _parameters(offered[name].input_schema)
        function, resources = _function(where, name, session)
        text = offered[name].description or ""
        found.append(Tool(function, name, text, hints, required, resources, timeout_s, replay, on_error, max_chars, name))
    return found


def _server_of(server: object, env: Mapping[str, str] | None) -> McpServer:
    environment = tuple(sorted((str(name), str(value)) for name, value in (env or {}).items()))
    if isinstance(server, str) and server.startswith(("http://", "https://")):
        return McpServer((), server, environment)
    if isinstance(server, Sequence) and not isinstance(server, str | bytes) and server:
        for part in server:
            check_text("each part of a server's command", part)
        return McpServer(tuple(server), "", environment)
    now = 'Write mcp_tools(["python", "server.py"]) or mcp_tools("http://127.0.0.1:8000/mcp").'
    raise OptionError(f"server is {server!r:.60}; it is an address, or a list with a command and its arguments", now=now)


# ---- what a server has


def _asked(server: McpServer) -> list[Any]:
    """Ask a server for its tools, on a thread of its own: the caller's may have an event loop that runs."""
    found: list[Any] = []
    failures: list[BaseException] = []

    async def ask() -> None:
        async with asyncio.timeout(_START_S), _client(server) as client:
            cursor = None
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                found.extend(page.tools)
                cursor = page.next_cursor
                if not cursor:
                    return

    def work() -> None:
        try:
            asyncio.run(ask())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="mcp tools")
    thread.start()
    thread.join()
    if failures:
        now = "Does the command run in a terminal?"
        if server.url:
            now = "Is it running, and is the address whole (http://127.0.0.1:8000/mcp)?"
        raise OptionError(f"the MCP server {server.name} can't be reached: {_said(failures[0])}", now=now) from failures[0]
    return found


def _client(server: McpServer) -> Any:
    from mcp import Client, StdioServerParameters

    if server.url:
        return Client(server.url)
    return Client(StdioServerParameters(command=server.command[0], args=list(server.command[1:]), env=dict(server.environment) or None))


def _said(error: BaseException) -> str:
    """What an error says, and of a group its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {_START_S:g} s"
    return described(error)


@dataclass(frozen=True)
class _Fits:
    """Checks a value by a JSON Schema, of whatever draft it is; one that is none itself checks nothing: the server will."""

    schema: str
    """As JSON."""

    def __call__(self, value: object) -> object:
        from jsonschema.validators import validator_for

        schema = json.loads(self.schema)
        try:
            kind = validator_for(schema)
            kind.check_schema(schema)
            wrong = next(kind(schema).iter_errors(value), None)
        except Exception:
            return value
        if wrong is not None:
            raise ValueError(wrong.message)
        return value


def _parameters(schema: object) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """The parameters of a tool with types that check by the server's own schema, and which of them are required.

    Where a schema has alternatives at its top, those of all can be given, and those of none are required.
    """
    whole = _Inlining(schema).of(schema) if isinstance(schema, dict) else {}
    found: dict[str, Any] = {}
    for part in [whole, *(one for word in ("allOf", "anyOf", "oneOf") for one in whole.get(word) or () if isinstance(one, dict))]:
        for name, own in (part.get("properties") or {}).items():
            found.setdefault(name, own if isinstance(own, dict) else {})
    hints = [
        (name, Annotated[Any, pydantic.AfterValidator(_Fits(json.dumps(own))), pydantic.WithJsonSchema(own)]) for name, own in found.items()
    ]
    needed = [one for part in [whole, *(whole.get("allOf") or ())] if isinstance(part, dict) for one in part.get("required") or ()]
    return tuple(hints), tuple(dict.fromkeys(name for name in needed if name in found))


class _Inlining:
    """Puts what a schema's references name in their place: a parameter is described by itself. Inside itself, and where the whole would
    be large, that is anything."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._left = _MOST_PARTS

    def of(self, part: Any, inside: tuple[str, ...] = ()) -> Any:
        self._left -= 1
        if self._left < 0:
            return {} if isinstance(part, dict) else part if not isinstance(part, list) else []
        if isinstance(part, list):
            return [self.of(one, inside) for one in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref")
        rest = {
            name: one if name in ("enum", "const", "default", "examples") else self.of(one, inside)
            for name, one in part.items()
            if name not in ("$ref", "$defs", "definitions")
        }
        if not isinstance(reference, str):
            return rest
        found = None if reference in inside else self._named(reference)
        return {**self.of(found, (*inside, reference)), **rest} if isinstance(found, dict) else rest

    def _named(self, reference: str) -> Any:
        found: Any = self._schema if reference.startswith("#/") else None
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


# ---- sessions


@final
class McpSession:
    """A session with a server, which any task of its event loop may use."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._is_over = False
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_usable(self) -> bool:
        return not self._task.done() and not self._is_over

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(_START_S):
                    client = await stack.enter_async_context(_client(self._server))
                self._client.set_result(client)
                await asyncio.Event().wait()  # It ends by being cancelled.
        except BaseException as error:
            if not self._client.done():
                said = f"the MCP server {self._server.name} can't be reached: {_said(error)}"
                self._client.set_exception(EpisodeFailed("tool_failed", said))
                self._client.exception()  # Nobody may be waiting any more.
            if isinstance(error, asyncio.CancelledError):
                raise

    async def ready(self) -> Any:
        """Wait for the server. Raises `EpisodeFailed` if it can't be reached."""
        return await asyncio.shield(self._client)

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool. Raises `EpisodeFailed` where the server is gone, and `McpToolError` where the tool says that it failed."""
        from mcp import MCPError

        client = await self.ready()
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if self._task.done() or _is_of_session(error.error.code, error.error.message):
                raise self._gone(error) from error
            raise McpToolError(str(error)) from error
        except (OSError, EOFError) as error:
            raise self._gone(error) from error
        except Exception as error:  # An answer that is none: the tool's fault, and others of the server may be well.
            if self._task.done():
                raise self._gone(error) from error
            raise McpToolError(f"the server's answer can't be read: {_said(error)}") from error
        text = _text(result)
        if result.is_error:
            raise McpToolError(text)
        return text

    def _gone(self, error: BaseException) -> EpisodeFailed:
        """The failure of an episode whose server is no longer there; others get a new session."""
        self._end()
        return EpisodeFailed("tool_failed", f"the MCP server {self._server.name} went away: {_said(error)}")

    async def close(self) -> None:
        self._end()
        await asyncio.wait([self._task])

    def _end(self) -> None:
        """Have the session end, once: a cancellation while it closes would leave the server's process."""
        if self.is_usable:
            self._is_over = True
            self._task.cancel()


def _is_of_session(code: int, message: str) -> bool:
    """Whether an error is about the session itself: its connection is closed, or the server does not know it any more."""
    return message == "Connection closed" or (code in (-32600, -32001, 404) and "session" in message.lower())


def _text(result: Any) -> str:
    parts = []
    for one in result.content:
        if one.type == "text":
            parts.append(one.text)
        elif one.type in ("image", "audio"):
            parts.append(f"[{one.mime_type}, {len(one.data) * 3 // 4} bytes]")
        else:
            held = getattr(one, "resource", one)
            size = len(getattr(held, "blob", "")) * 3 // 4
            parts.append(getattr(held, "text", None) or f"[{held.uri}{f', {size} bytes' if size else ''}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[McpServer, McpSession]] = weakref.WeakKeyDictionary()
"""The sessions of this worker, by event loop. They end with their loop, or with this process, whose end a server notices."""


def _session(server: McpServer) -> McpSession:
    of_loop = _sessions.setdefault(asyncio.get_running_loop(), {})
    if server not in of_loop or not of_loop[server].is_usable:
        of_loop[server] = McpSession(server)
    return of_loop[server]


def _session_class(server: McpServer) -> type:
    """A resource of an episode: a session with this server."""

    class EpisodeSession:
        async def __aenter__(self) -> McpSession:
            self._held = McpSession(server)
            try:
                await self._held.ready()
            except BaseException:
                await self._held.close()
                raise
            return self._held

        async def __aexit__(self, *error: object) -> None:
            await self._held.close()

    EpisodeSession.__name__ = f"a session with the MCP server {server.name}"
    return EpisodeSession


def _function(server: McpServer, name: str, session: type | None) -> tuple[Callable[..., object], tuple[tuple[str, type], ...]]:
    """What a tool calls, and the resources that it gets."""

    async def of_worker(**arguments: object) -> str:
        return await _session(server).call(name, arguments)

    async def of_episode(**arguments: Any) -> str:
        held: McpSession = arguments.pop(_SESSION)
        return await held.call(name, arguments)

    return (of_worker, ()) if session is None else (of_episode, ((_SESSION, session),))
