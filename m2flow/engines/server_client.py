"""HTTP with an inference server: requests whose tokens stream in, and calls that change the server.

    generate(rid, body) --a connection each, in a thread of its own--> Heard: some tokens of a request, and at last how it ended

What paths and answers look like is a `Dialect`: one a kind of server.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar, final

import httpx2
import msgspec

from m2flow.engines.sglang_client import Heard
from m2flow.errors import EngineError

_T = TypeVar("_T")
_MAX_CONNECTIONS = 4096


class Dialect(ABC):
    """How a kind of server is spoken to."""

    product: str
    """What users call it."""
    generate_path: str
    abort_path: str

    @abstractmethod
    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        """The body of a request under this name, whose tokens stream in."""

    @abstractmethod
    def heard(self, rid: str, text: bytes) -> Heard:
        """One piece of what streams in. Raises `msgspec.DecodeError` for what it does not know."""

    @abstractmethod
    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        """What the endpoint is told, once or more, to end these."""


@final
class ServerClient:
    """A server's other end. `open`, then anything, from one thread; `close`."""

    def __init__(self, url: str, dialect: Dialect) -> None:
        self.url = url
        self._dialect = dialect
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-client", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._thread.start()
        limits = httpx2.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS)
        self._http = self._wait(self._made(limits))

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._wait(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, rid: str, body: Mapping[str, object]) -> None:
        """Send a request; what comes of it is in `heard`."""
        self._loop.call_soon_threadsafe(self._begin, rid, dict(body))

    def heard(self, timeout_s: float) -> list[Heard]:
        """All news so far; waits up to `timeout_s` for the first."""
        found: list[Heard] = []
        try:
            found.append(self._heard.get(timeout=timeout_s))
            while True:
                found.append(self._heard.get_nowait())
        except queue.Empty:
            return found

    def call(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 60.0) -> Any:
        """POST, or GET without a body; the answer.

        Raises:
            EngineError: the server refused, or did not answer.
        """
        return self._wait(self._called(path, body, timeout_s))

    def abort(self, rids: list[str]) -> None:
        """Ask for the end of these; they end in `heard`, with `abort` or as they just did."""
        self._wait(self._aborted(rids))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # In the loop's thread

    async def _made(self, limits: httpx2.Limits) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=httpx2.Timeout(30.0, read=None), trust_env=False)

    async def _ended(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _begin(self, rid: str, body: dict[str, object]) -> None:
        task = self._loop.create_task(self._stream(rid, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, rid: str, body: dict[str, object]) -> None:
        is_over, dialect = False, self._dialect
        try:
            async with self._http.stream("POST", dialect.generate_path, json=dialect.named(rid, body)) as answer:
                if answer.status_code != httpx2.codes.OK:
                    raise EngineError(words_of(await answer.aread()))
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        heard = dialect.heard(rid, line[6:].encode())
                        is_over = heard.finish is not None or bool(heard.error)
                        self._heard.put(heard)
            if not is_over:
                raise EngineError("the server closed the connection")
        except (httpx2.HTTPError, EngineError, msgspec.DecodeError) as error:
            if not is_over:
                self._heard.put(Heard(rid, [], [], error=f"{error}" or type(error).__name__))

    async def _called(self, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Any:
        try:
            sent = self._http.get(path, timeout=timeout_s) if body is None else self._http.post(path, json=dict(body), timeout=timeout_s)
            answer = await sent
        except httpx2.HTTPError as error:
            raise EngineError(f"the {self._dialect.product} server did not answer {path}: {error or type(error).__name__}") from None
        if answer.status_code != httpx2.codes.OK:
            raise EngineError(f"the {self._dialect.product} server refused {path}: {words_of(answer.content)}")
        try:
            return msgspec.json.decode(answer.content) if answer.content else None
        except msgspec.DecodeError:
            return answer.text

    async def _aborted(self, rids: list[str]) -> None:
        bodies = self._dialect.abort_bodies(rids)
        await asyncio.gather(*(self._called(self._dialect.abort_path, body, 30.0) for body in bodies))


def words_of(body: bytes) -> str:
    """What a server says of a failure, in one line."""
    try:
        found = msgspec.json.decode(body)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or str(found)
        return str(found)
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
