"""The viewer's web server: a page, and small JSON answers about the runs of one folder.

    GET /                                  the page
    GET /page/NAME                         its script, style and drawing library
    GET /api/runs                          the runs
    GET /api/runs/RUN/summary              lanes, colours, steps, versions; {"loading": share} while the trace is read
    GET /api/runs/RUN/schedule             bars of a window: ?from=&to= in microseconds, &width= in pixels, &lanes=0,1 &expanded=0
    GET /api/runs/RUN/span/I               one span whole
    GET /api/runs/RUN/samples[/C/P/M]      all samples as columns; one sample with its texts and tokens
    GET /api/runs/RUN/against/OTHER        what differs between two runs: `m2flow compare RUN OTHER`
    GET /api/runs/RUN/graph | training | health | analysis | log/WORKER

On loopback it asks for nothing but a Host that names loopback, so that no other site's page can reach it by a name of its own. On any
other address it asks for a token, once by the link that is printed, then by a cookie. A run is found by its name among those listed:
no path is ever made from what a request says. Nothing is written.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from m2flow.errors import M2FlowError, SpecError
from m2flow.micro.viewing.page import ASSETS, asset, policy, served_page
from m2flow.micro.viewing.run_view import compared

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from m2flow.micro.viewing.folder import Folder
    from m2flow.micro.viewing.run_view import RunView

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
_COOKIE = "m2flow-viewer"
_PATIENCE_S = 0.3
"""How long an answer waits for the trace to be read, before it says how far that is."""
_MOST_WIDTH = 8192
_encode = msgspec.json.Encoder().encode

_NUMBER = re.compile(r"-?[0-9]{1,15}", re.ASCII)
"""Fifteen digits of microseconds are thirty years, and an array holds them."""


class _Count(Convertor[int]):
    """A number in a path. A longer one, which no run has and no database takes, is no such path."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("count", _Count())

Answer = Callable[["RunView", Request], object]


def application(folder: Folder, *, token: str = "") -> Starlette:
    """The server as an ASGI application.

    Args:
        token: what a request must know; empty: nothing, but its Host must be loopback.
    """

    def of_run(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(_answered, folder, answer, request)

        return endpoint

    async def page(_: Request) -> Response:
        return Response(served_page(), media_type="text/html", headers={"Content-Security-Policy": policy()})

    async def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return _said(404, f"there is no {name!r:.80} here")
        body, kind = asset(name)
        return Response(body, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def runs(_: Request) -> Response:
        return _json(await run_in_threadpool(folder.listed))

    def against(view: RunView, request: Request) -> object:
        other = folder.find(request.path_params["other"])
        if other is None:
            raise KeyError(f"there is no run {request.path_params['other']!r:.80} here")
        share = other.loading(_PATIENCE_S)
        return compared(view, other) if share is None else {"loading": share}

    answers = {**_ANSWERS, "against/{other}": against}
    routes = [
        Route("/", page),
        Route("/page/{name}", part),
        Route("/api/runs", runs),
        *(Route(f"/api/runs/{{run}}/{path}", of_run(answer)) for path, answer in answers.items()),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _not_found})
    app.router.redirect_slashes = False  # To where a request says.
    app.add_middleware(_Guard, token=token)
    app.add_middleware(GZipMiddleware, minimum_size=4096, compresslevel=3)
    return app


def _answered(folder: Folder, answer: Answer, request: Request) -> Response:
    view = folder.find(request.path_params["run"])
    if view is None:
        return _said(404, f"there is no run {request.path_params['run']!r:.80} here")
    try:
        if request.url.path.rpartition("/")[2] not in ("training",):
            share = view.loading(_PATIENCE_S)
            if share is not None:
                return _json({"loading": share})
        return _json(answer(view, request))
    except M2FlowError as error:
        return _said(404 if isinstance(error, SpecError) else 500, str(error))
    except (ValueError, OverflowError, LookupError) as error:
        return _said(404 if isinstance(error, LookupError) else 400, f"{request.url.path}: {error}")
    except OSError as error:
        return _said(500, f"the run can't be read: {error}")


def _window(view: RunView, request: Request) -> object:
    ask = request.query_params
    start, end, width = (_number(ask.get(name, ""), name) for name in ("from", "to", "width"))
    if not 1 <= width <= _MOST_WIDTH:
        raise ValueError(f"a window is 1 to {_MOST_WIDTH} pixels wide")
    return view.window(start, end, width, _numbers(ask.get("lanes", ""), "lanes"), _numbers(ask.get("expanded", ""), "expanded"))


def _numbers(text: str, name: str) -> list[int]:
    return [_number(part, name) for part in text.split(",") if part]


def _number(text: str, name: str) -> int:
    """Raises ValueError: it is none, or too long a one."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{name} is to be a number of at most 15 digits, and is {text!r:.40}")
    return int(text)


def _sample(view: RunView, request: Request) -> object:
    of = request.path_params
    return view.sample(of["call"], of["prompt"], of["member"])


_ANSWERS: dict[str, Answer] = {
    "summary": lambda view, _: view.summary(),
    "schedule": _window,
    "span/{index:count}": lambda view, request: view.span(request.path_params["index"]),
    "samples": lambda view, _: view.samples(),
    "samples/{call:count}/{prompt:count}/{member:count}": _sample,
    "graph": lambda view, _: view.graph(),
    "training": lambda view, _: view.training(),
    "health": lambda view, _: view.health(),
    "analysis": lambda view, _: view.analysis(),
    "log/{worker}": lambda view, request: {"text": view.log(request.path_params["worker"])},
}


async def _not_found(request: Request, _: Exception) -> Response:
    return _said(404, f"there is nothing at {request.url.path!r:.120}")


def _json(answer: object) -> Response:
    return Response(_encode(answer), media_type="application/json", headers={"Cache-Control": "no-store"})


def _said(status: int, text: str) -> Response:
    return Response(_encode({"error": text}), status, media_type="application/json")


@final
class _Guard:
    """Lets in who may come in, and has every answer say that it is to be taken for what it says it is."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(Request(scope))
        if answer is not None:
            await answer(scope, receive, send)
            return

        async def with_headers(message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cross-origin-resource-policy", b"same-origin"),
                    (b"x-frame-options", b"DENY"),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _said(405, "the viewer only reads")
        if not self._token:
            is_ours = _LOOPBACK_HOST.fullmatch(request.headers.get("host", ""))
            return None if is_ours else _said(403, "this viewer answers on loopback only; open the link that it printed")
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        kept = request.cookies.get(_COOKIE, "")
        if hmac.compare_digest(kept.encode(), self._token.encode()):
            return None
        return _said(401, "this viewer asks for a token: open the link that it printed")


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free.

    Raises:
        SpecError: it can't be had.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SpecError(
            f"can't listen on {host}, port {port}: {error.strerror or error}",
            now="Give another --port (0: any that is free), or another --host.",
        ) from None


def configured(app: Starlette) -> uvicorn.Config:
    """How uvicorn is to run it: HTTP alone, and no word on the terminal for each request."""
    return uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off", timeout_graceful_shutdown=1)


def serve(folder: Folder, listener: socket.socket, *, token: str = "") -> None:
    """Answer until Ctrl-C."""
    config = configured(application(folder, token=token))
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends; uvicorn raises it again when it has.
        uvicorn.Server(config).run(sockets=[listener])
