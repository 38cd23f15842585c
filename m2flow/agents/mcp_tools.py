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
from m2flow.errors import MissingExtra, OptionError, did_you_mean
from m2flow.recipe import check_choice, check_count, check_seconds, check_text

_START_S = 30.0
"""Longest that a server takes to answer what it has."""
_MOST_PAGES = 1_000
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
    wanted = list(names) or list(offered)
    unknown = [name for name in wanted if name not in offered]
    if unknown:
        said = f"the MCP server {where.name} has no tool {unknown[0]!r}; it has {', '.join(offered) or 'none'}"
        raise OptionError(said, now=did_you_mean(str(unknown[0]), offered) or "Ask for one of these.")
    session = _session_class(where) if per == "episode" else None
    found = []
    for name in wanted:
        hints, required = _parameters(offered[name].input_schema or {})
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
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Fits:
    """Checks a value by a JSON Schema."""

    schema: str
    """As JSON."""

    def __call__(self, value: object) -> object:
        import jsonschema

        try:
            jsonschema.validate(value, json.loads(self.schema))
        except jsonschema.ValidationError as error:
            raise ValueError(error.message) from None
        return value


def _parameters(schema: Mapping[str, Any]) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """The parameters of a tool with types that check by the server's own schema, and which of them are required."""
    hints = []
    for name, own in schema.get("properties", {}).items():
        whole = _inlined(own, schema, ())
        hints.append((name, Annotated[Any, pydantic.AfterValidator(_Fits(json.dumps(whole))), pydantic.WithJsonSchema(whole)]))
    return tuple(hints), tuple(schema.get("required", ()))


def _inlined(part: Any, schema: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """Put what a schema's references name in their place; inside itself that is anything."""
    if isinstance(part, list):
        return [_inlined(one, schema, inside) for one in part]
    if not isinstance(part, dict):
        return part
    reference = part.get("$ref")
    if not isinstance(reference, str):
        return {name: _inlined(one, schema, inside) for name, one in part.items()}
    found: Any = schema
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    if found is schema or reference in inside:
        return {}
    return {**_inlined(found, schema, (*inside, reference)), **{name: one for name, one in part.items() if name != "$ref"}}


# ---- sessions


@final
class McpSession:
    """A session with a server, which any task of its event loop may use."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._is_over = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_usable(self) -> bool:
        return not self._task.done() and not self._is_over.is_set()

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(_START_S):
                    client = await stack.enter_async_context(_client(self._server))
                self._client.set_result(client)
                await self._is_over.wait()
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
            if self._task.done() or "closed" in str(error).lower():
                self._is_over.set()
                raise EpisodeFailed("tool_failed", f"the MCP server {self._server.name} went away: {error}") from error
            raise McpToolError(str(error)) from error
        except (asyncio.CancelledError, TimeoutError):
            raise
        except Exception as error:
            self._is_over.set()
            raise EpisodeFailed("tool_failed", f"the MCP server {self._server.name} went away: {_said(error)}") from error
        text = _text(result)
        if result.is_error:
            raise McpToolError(text)
        return text

    async def close(self) -> None:
        self._is_over.set()
        await asyncio.wait([self._task])


def _text(result: Any) -> str:
    parts = []
    for one in result.content:
        if one.type == "text":
            parts.append(one.text)
        elif one.type in ("image", "audio"):
            parts.append(f"[{one.mime_type}, {len(one.data) * 3 // 4} bytes]")
        else:
            text = getattr(getattr(one, "resource", None), "text", None)
            parts.append(text if text is not None else f"[{getattr(one, 'uri', one.type)}]")
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
            await self._held.ready()
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
