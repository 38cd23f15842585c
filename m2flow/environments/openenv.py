"""Act in an environment that an OpenEnv server runs: a session for each episode, over a WebSocket.

    async with OpenEnv("http://host:8000", show=lambda seen: seen["board"], act=lambda text: {"move": text}) as env:
        reward = await play(chat, env, seed=row.number)

    {"type": "reset", "data": {"seed": ...}} --> {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}
    {"type": "step", "data": action}         --> the same

A server that has as many sessions as it takes is asked again, with growing pauses, so episodes wait for each other instead of failing. A
session ends with the block: what an episode held is free for the next one, however it ended. A server that goes away, or answers with an
error, fails the episode and is never a reward of 0. A step may have no reward; an episode in which none has one fails (`no_reward`).

Source:
    The messages of OpenEnv 0.10 (github.com/meta-pytorch/OpenEnv, `core/env_server/types.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Self, final
from urllib.parse import urlsplit, urlunsplit

from m2flow.environments.env import Step
from m2flow.errors import EngineError, MissingExtra, OptionError, described
from m2flow.recipe import check_seconds

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_MOST_BYTES = 64 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""To which no proxy leads."""


class _Full(Exception):
    """The server has as many sessions as it takes."""


@final
class OpenEnv:
    """A session of an OpenEnv server, as `play` takes it.

    Args:
        url: of the server, http or ws.
        act: the action, by the environment's schema, that a text says.
        show: the text of an observation, by the environment's schema; by default the observation as JSON.
        timeout_s: for one answer.
        patience_s: for a session, while the server has as many as it takes.
    """

    def __init__(
        self,
        url: str,
        *,
        act: Callable[[str], Mapping[str, object]],
        show: Callable[[dict[str, Any]], str] = json.dumps,
        timeout_s: float = 60.0,
        patience_s: float = 600.0,
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        check_seconds("patience_s", patience_s)
        parts = urlsplit(url)
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if parts.scheme not in schemes or not parts.netloc:
            raise OptionError(f"{url!r:.100} is no address of an OpenEnv server", now="Give one such as http://127.0.0.1:8000.")
        path = parts.path.rstrip("/")
        self._url = urlunsplit((schemes[parts.scheme], parts.netloc, path if path.endswith("/ws") else f"{path}/ws", "", ""))
        self._options: dict[str, Any] = {"proxy": None} if parts.hostname in _LOOPBACK else {}
        self._act, self._show, self._timeout_s, self._patience_s = act, show, timeout_s, patience_s
        self._socket: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def reset(self, seed: int, row: Mapping[str, object] | None = None) -> str:
        """Begin an episode. Returns what it shows first.

        Raises:
            EngineError: the server can't be reached, or answers with an error, or has no session free for `patience_s`.
        """
        message = {"type": "reset", "data": {"seed": seed, **(row or {})}}
        pause = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                while True:
                    try:
                        return self._show(dict((await self._asked(message)).get("observation") or {}))
                    except _Full:
                        await self.close()
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE_S)
        except TimeoutError:
            if limit.expired():
                raise EngineError(
                    f"{self._url} had no session free for {self._patience_s:g} s",
                    now="Have the server take more sessions, play fewer episodes at once, or set patience_s.",
                ) from None
            raise

    async def step(self, action: str) -> Step:
        """Act. Raises `EngineError` as `reset` does."""
        if self._socket is None:
            raise EngineError(f"no episode was begun at {self._url}", now="Call `reset` first.")
        data = await self._asked({"type": "step", "data": dict(self._act(action))})
        reward = data.get("reward")
        return Step(
            self._show(dict(data.get("observation") or {})), None if reward is None else float(reward), bool(data.get("done")), False
        )

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _asked(self, message: Mapping[str, object]) -> dict[str, Any]:
        try:
            import websockets
            from websockets.asyncio.client import connect
        except ImportError:
            raise MissingExtra("OpenEnv's servers need the package websockets", now="Run: pip install 'm2flow[openenv]'.") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._socket is None:
                    self._socket = await connect(self._url, max_size=_MOST_BYTES, open_timeout=None, **self._options)
                with contextlib.suppress(websockets.ConnectionClosed):  # Why it was closed is read below.
                    await self._socket.send(json.dumps(message))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            await self.close()  # Whose answer came next would be open.
            raise EngineError(f"{self._url} took longer than {self._timeout_s:g} s", now="Set timeout_s, or look at the server.") from None
        except (OSError, websockets.WebSocketException) as error:
            how = "can't be reached" if self._socket is None else "went away"
            await self.close()  # The next `reset` connects anew.
            raise EngineError(f"{self._url} {how}: {described(error)}", now="Look whether the server is up.") from error
        except ValueError as error:
            raise EngineError(
                f"{self._url} answered what is no JSON: {error}", now="Check that the address is that of an OpenEnv server of this release."
            ) from error
        kind, data = answer.get("type"), answer.get("data") or {}
        if kind == "error" and data.get("code") == "CAPACITY_REACHED":
            raise _Full
        if kind != "observation":
            said = f"{data.get('code', kind)}: {data.get('message', answer)!s:.200} {data.get('errors', '')!s:.300}".rstrip()
            raise EngineError(f"{self._url} answered to {message['type']} with an error, {said}", now="The environment's own log says why.")
        return dict(data)
