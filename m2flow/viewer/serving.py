"""Serve the viewer: a web server for a run or a folder of runs, the page that it sends, and the export of a run as one HTML file.

    folder --Folder.listed--> names and states; Folder.find(name) --> RunView
    run directory --write_page--> FILE.html

    GET /                                  the page
    GET /page/NAME                         its script, style and drawing library
    GET /api/runs                          the runs
    GET /api/runs/RUN/summary              lanes, colours, steps, versions; {"loading": share} while the trace is read
    GET /api/runs/RUN/schedule             bars of a window: ?from=&to= in microseconds, &width= in pixels, &lanes=0,1 &expanded=0
    GET /api/runs/RUN/span/I               all fields of one span
    GET /api/runs/RUN/samples[/C/P/M]      all samples as columns; one sample with its texts and tokens
    GET /api/runs/RUN/groups/C/P           all responses to one prompt
    GET /api/runs/RUN/texts?of=C-P-M,...   the beginnings of the prompts and responses of at most 200 samples
    GET /api/runs/RUN/search?q=WORDS       the samples whose texts match, the best first
    GET /api/runs/RUN/export?as=jsonl&step=3..5&q=WORDS ...     the samples that meet all of it, as a file; `as=parquet` too
    GET /api/runs/RUN/suggestions[?ask=1]  what would be faster: simulated by `m2flow analyze` in a process of its own
    GET /api/runs/RUN/against/OTHER        what differs between two runs: `m2flow compare RUN OTHER`
    GET /api/runs/RUN/graph | training | health | alerts | analysis | log/WORKER

Security: nothing is written. A run is found by its name among those listed, so that no path is made from a request, and a link in the
folder that leads out of it is not shown. On loopback a request needs only a Host that names loopback, so that no other site's page can
reach the server by a name of its own. On any other address it needs a token, first from the link that is printed, then from a cookie.

The page: its parts are ES modules that import each other by names (`m2flow/schedule.js`). An import map says where those are: under
`/page/` when a server sends them, inside the file itself when they are exported. So there is no build step, and the same text runs in both.
The content policy names the map's checksum; no other inline script is run.

An exported file is bounded, so that it can be mailed: the schedule of a long run has as much detail as some hundred thousand bars, and
texts of samples up to some megabytes, evenly over the run. The page says what was left out.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import hmac
import json
import re
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from m2flow.errors import InternalError, M2FlowError, OptionError, SpecError
from m2flow.observe.metrics import metrics_path, reward_names
from m2flow.samples import SampleId
from m2flow.viewer.comparison import read_series
from m2flow.viewer.health import State, state_of
from m2flow.viewer.run_view import RunView, compared
from m2flow.viewer.sample_pages import Columns, Wanted, sample_pages
from m2flow.viewer.schedule import LaneWindow

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# ---- a folder of runs

_MARK = "config.json"
_MOST_KEPT = 8
"""The most runs whose traces are kept in memory."""


@final
class Listed(msgspec.Struct):
    """A run in the list."""

    name: str
    flow: str
    state: State
    num_bytes: int
    """Bytes of its trace."""
    seed: int | None
    options: dict[str, object]
    cluster: str
    num_steps: int
    """Steps that have metrics."""
    reward: float | None
    """Mean over the last five steps."""
    accuracy: float | None
    """The last evaluation: `accuracy`, or the first of `eval/*`."""
    step_s: float | None
    """Mean seconds from one step's metrics to the next."""
    tokens_per_s: float | None
    """Tokens trained on by these seconds."""


@final
class Folder:
    """A run, or a directory of runs, by name. Several threads may use it."""

    def __init__(self, path: Path, *, is_awaited: bool = False) -> None:
        """Open a folder.

        Args:
            path: a run's directory, or one with several in it.
            is_awaited: it may come later, with the first run.
        Raises:
            SpecError: there is no such directory.
        """
        if not path.is_dir() and not is_awaited:
            raise SpecError(f"there is no directory {path}", now="Give a run's directory, or the one with all runs: m2flow view runs")
        self._path = path.resolve()
        self.is_one_run = (self._path / _MARK).is_file()
        self._views: dict[str, RunView] = {}
        self._outcomes: dict[Path, tuple[int, dict[str, Any]]] = {}
        """What each run has come to, and the size of its metrics then."""
        self._lock = threading.Lock()

    def listed(self) -> list[Listed]:
        """List the runs, the newest first."""
        found = []
        for name, path in self._runs().items():
            with contextlib.suppress(OSError):
                trace = path / "trace" / "spans.msgpack"
                config = _config_of(path)
                found.append(
                    Listed(
                        name=name,
                        flow=str(config.get("flow", "")),
                        state=state_of(path),
                        num_bytes=trace.stat().st_size if trace.is_file() else 0,
                        seed=_number_in(config, "settings", "seed"),
                        options=_mapping(config.get("options")),
                        cluster=str(_mapping(config.get("cluster")).get("name", "")),
                        **self._outcome(path),
                    )
                )
        return sorted(found, key=lambda run: (run.state.began_s, run.name), reverse=True)

    def find(self, name: str) -> RunView | None:
        """Return a run by the name that `listed` gives."""
        path = self._runs().get(name)
        if path is None:
            return None
        with self._lock:
            view = self._views.pop(name, None) or RunView(path, name)
            self._views[name] = view
            while len(self._views) > _MOST_KEPT:
                self._views.pop(next(iter(self._views)))
        return view

    def _outcome(self, path: Path) -> dict[str, Any]:
        metrics = metrics_path(path)
        size = metrics.stat().st_size if metrics.is_file() else 0
        held = self._outcomes.get(path)
        if held is None or held[0] != size:
            held = self._outcomes[path] = size, _outcome_of(path)
        return held[1]

    def _runs(self) -> dict[str, Path]:
        if self.is_one_run:
            return {self._path.name: self._path}
        found = {}
        for mark in self._path.glob(f"*/{_MARK}"):
            path = mark.parent.resolve()
            if path.is_relative_to(self._path):
                found[mark.parent.name] = path
        return found


def _config_of(path: Path) -> dict[str, object]:
    try:
        return _mapping(msgspec.json.decode((path / _MARK).read_bytes()))
    except (OSError, msgspec.DecodeError):
        return {}


def _mapping(value: object) -> dict[str, object]:
    return {str(name): of for name, of in value.items()} if isinstance(value, dict) else {}


def _number_in(config: dict[str, object], part: str, name: str) -> int | None:
    value = _mapping(config.get(part)).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _outcome_of(path: Path) -> dict[str, Any]:
    """Read what a run has come to from its metrics."""
    told = read_series(path)
    rewards = [value for name in reward_names(told.series)[:1] for value in told.series[name].values if value is not None]
    evaluated = next((name for name in ("accuracy", *sorted(told.series)) if name in told.series and _EVALUATED.fullmatch(name)), None)
    accuracy = [value for value in told.series[evaluated].values if value is not None] if evaluated else []
    times = [value for value in told.time_s.values if value is not None]
    passed_s, tokens = (times[-1] - times[0] if len(times) > 1 else 0.0), [value or 0.0 for value in told.tokens.values]
    return {
        "num_steps": sum(step >= 0 for step in told.time_s.steps),
        "reward": sum(rewards[-5:]) / len(rewards[-5:]) if rewards else None,
        "accuracy": accuracy[-1] if accuracy else None,
        "step_s": passed_s / (len(times) - 1) if passed_s else None,
        "tokens_per_s": (tokens[-1] - tokens[0]) / passed_s if passed_s and len(tokens) > 1 else None,
    }


_EVALUATED = re.compile(r"accuracy|(eval/)?(accuracy|pass@\d+|maj@\d+|avg)")


# ---- the page

_HERE = Path(__file__).parent / "page"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ASSETS = {path.name: path for folder in (_HERE, _HERE / "vendor") for path in sorted(folder.iterdir()) if path.suffix in _KINDS}
"""The files of the page that may be requested, by name."""
_STYLES = ("uPlot.min.css", "style.css")


def asset(name: str) -> tuple[bytes, str]:
    """Return the content of a part of the page and its media type."""
    path = ASSETS[name]
    return path.read_bytes(), _KINDS[path.suffix]


@functools.cache
def served_page() -> str:
    """Make the page that the server sends."""
    styles = "\n".join(f'<link rel="stylesheet" href="/page/{name}">' for name in _STYLES)
    return _filled(styles, _served_map(), "")


def policy() -> str:
    """Make the content security policy of the page that the server sends."""
    return (
        f"default-src 'none'; script-src 'self' {_checksum(_served_map())}; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def exported_page(data: str) -> str:
    """Make one file of the page, its parts and its data.

    Args:
        data: base64 of gzipped JSON.
    """
    styles = "\n".join(f"<style>\n{asset(name)[0].decode()}\n</style>" for name in _STYLES)
    imports = {name: f"data:text/javascript;base64,{base64.b64encode(asset(name)[0]).decode()}" for name in ASSETS if name.endswith(".js")}
    found = _map(imports)
    content = (
        f"default-src 'none'; script-src data: {_checksum(found)} {_checksum(_START)}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    inlined = f'<script type="application/octet-stream" id="data">{data}</script>'
    return _filled(styles, found, inlined, f'<meta http-equiv="Content-Security-Policy" content="{content}">\n')


_START = 'import "m2flow/main.js";'


def _served_map() -> str:
    return _map({name: f"/page/{name}" for name in ASSETS if name.endswith(".js")})


def _map(places: dict[str, str]) -> str:
    return json.dumps({"imports": {f"m2flow/{name}": place for name, place in places.items()}})


def _checksum(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _filled(styles: str, import_map: str, data: str, head: str = "") -> str:
    start = '<script type="module" src="/page/main.js"></script>' if not data else f'<script type="module">{_START}</script>'
    text = (_HERE / "index.html").read_text(encoding="utf-8")
    for mark, value in (("HEAD", head), ("STYLES", styles), ("IMPORTS", import_map), ("DATA", data), ("START", start)):
        text = text.replace(f"<!-- {mark} -->", f'<script type="importmap">{value}</script>' if mark == "IMPORTS" else value)
    return text


# ---- a run as one file

_MOST_BARS = 150_000
_MOST_TEXT_BYTES = 4 << 20
_MOST_TEXTS = 600
_WIDTHS = (0, 65536, 32768, 16384, 8192, 4096, 2048)
"""Widths in pixels that are tried for the schedule; 0: every bar as it is."""


def write_page(run_dir: Path, path: Path) -> None:
    """Write a run as one HTML file."""
    view = RunView(run_dir, run_dir.resolve().name)
    while view.loading(60.0) is not None:
        pass
    summary = view.summary()
    samples = view.samples()
    lanes = list(range(len(summary.lanes)))
    expanded = [at for at, lane in enumerate(summary.lanes) if lane.num_rows["life"]]
    for width in _WIDTHS:
        window = view.window(0, summary.total + 1, width, lanes, expanded)
        if _num_bars(window) <= _MOST_BARS:
            break
    data = {
        "summary": summary,
        "schedule": {"lanes": window, "width": width},
        "samples": samples,
        "texts": dict(_texts(view, samples)),
        "graph": view.graph(),
        "training": view.training(),
        "health": view.health(),
        "alerts": view.alerts(),
        "suggestions": view.advised(),
        "analysis": view.analysis(),
        "logs": {worker: view.log(worker)[-20_000:] for worker in view.health().logs},
    }
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), 6, mtime=0)).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(exported_page(packed), encoding="utf-8")


def _num_bars(window: list[LaneWindow]) -> int:
    rows = [row for lane in window for part in (lane.work, lane.wait, lane.life) for row in part]
    return sum(len(row["s"]) for row in rows)


def _texts(view: RunView, samples: Columns) -> Iterator[tuple[str, object]]:
    """Yield samples with their texts, evenly over the run, up to the limits of an exported file."""
    if not view.trace.calls.has_ledger:
        return
    room, every = _MOST_TEXT_BYTES, max(1, -(-len(samples.call) // _MOST_TEXTS))
    chosen = zip(samples.call[::every], samples.prompt[::every], samples.member[::every], strict=True)
    for page in sample_pages(view.run_dir, [SampleId(*who).pack() for who in chosen]):
        room -= len(msgspec.json.encode(page))
        if room < 0:
            return
        yield f"{page.call}/{page.prompt}/{page.member}", page


# ---- the server

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
_COOKIE = "m2flow-viewer"
_PATIENCE_S = 0.3
"""How long an answer waits for the trace to be read before it reports the progress of loading."""
_MOST_WIDTH = 8192
_encode = msgspec.json.Encoder().encode

_NUMBER = re.compile(r"-?[0-9]{1,15}", re.ASCII)
"""Fifteen digits of microseconds are thirty years, and fit into an int64 array."""


class _Count(Convertor[int]):
    """A number in a path. Longer numbers, which no run has and no database takes, do not match."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("count", _Count())

Answer = Callable[["RunView", Request], object]


def application(folder: Folder, *, token: str = "") -> Starlette:
    """Make the server as an ASGI application.

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
            return _text_response(404, f"there is no {name!r:.80} here")
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
    app.router.redirect_slashes = False  # A redirect would go to the Host that the request names.
    app.add_middleware(_Guard, token=token)
    app.add_middleware(GZipMiddleware, minimum_size=4096, compresslevel=3)
    return app


def _answered(folder: Folder, answer: Answer, request: Request) -> Response:
    view = folder.find(request.path_params["run"])
    if view is None:
        return _text_response(404, f"there is no run {request.path_params['run']!r:.80} here")
    try:
        if request.url.path.rpartition("/")[2] not in ("training",):
            share = view.loading(_PATIENCE_S)
            if share is not None:
                return _json({"loading": share})
        found = answer(view, request)
        return found if isinstance(found, Response) else _json(found)
    except OptionError as error:
        return _text_response(400, str(error))
    except M2FlowError as error:
        return _text_response(404 if isinstance(error, SpecError) else 500, str(error))
    except (ValueError, OverflowError, LookupError) as error:
        said = " ".join(map(str, error.args))  # A KeyError's own text has its words in quotes.
        return _text_response(404 if isinstance(error, LookupError) else 400, f"{request.url.path}: {said}")
    except OSError as error:
        return _text_response(500, f"the run can't be read: {error}")


def _window(view: RunView, request: Request) -> object:
    ask = request.query_params
    start, end, width = (_number(ask.get(name, ""), name) for name in ("from", "to", "width"))
    if not 1 <= width <= _MOST_WIDTH:
        raise ValueError(f"a window is 1 to {_MOST_WIDTH} pixels wide")
    return view.window(start, end, width, _numbers(ask.get("lanes", ""), "lanes"), _numbers(ask.get("expanded", ""), "expanded"))


def _numbers(text: str, name: str) -> list[int]:
    return [_number(part, name) for part in text.split(",") if part]


def _number(text: str, name: str) -> int:
    """Parse a number of a request. Raises ValueError: it is none, or has too many digits."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{name} is to be a number of at most 15 digits, and is {text!r:.40}")
    return int(text)


def _sample(view: RunView, request: Request) -> object:
    of = request.path_params
    return view.sample(of["call"], of["prompt"], of["member"])


def _group(view: RunView, request: Request) -> object:
    return view.group(request.path_params["call"], request.path_params["prompt"])


_MOST_TEXTS_ASKED = 200
_ID = re.compile(r"([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,18})", re.ASCII)


def _beginnings(view: RunView, request: Request) -> object:
    ids = []
    for text in request.query_params.get("of", "").split(",")[:_MOST_TEXTS_ASKED]:
        found = _ID.fullmatch(text)
        if found is None:
            raise ValueError(f"a sample is named like 3-17-2, not {text!r:.40}")
        try:
            ids.append(SampleId(*map(int, found.groups())))
            ids[-1].pack()
        except InternalError:
            raise ValueError(f"no sample can be {text!r:.60}") from None
    return view.texts(ids)


def _search(view: RunView, request: Request) -> object:
    return view.search(_words(request.query_params.get("q", "")))


def _words(text: str) -> str:
    """Check the words of a search. Raises ValueError: they are no text that a database takes."""
    if not text.isprintable() or len(text) > _MOST_WORDS:
        raise ValueError(f"a search is printable text of at most {_MOST_WORDS} characters")
    return text


_MOST_WORDS = 400


def _export(view: RunView, request: Request) -> object:
    kind = request.query_params.get("as", "jsonl")
    if kind not in ("jsonl", "parquet"):
        raise ValueError(f"samples are exported as jsonl or parquet, not as {kind!r:.40}")
    wanted = Wanted.of(request.query_params)
    _words(wanted.words)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"samples.{kind}"
        view.export(wanted, path)
        name = re.sub(r"[^\w.-]", "_", view.name, flags=re.ASCII)
        about = {"Content-Disposition": f'attachment; filename="{name}.{kind}"', "Cache-Control": "no-store"}
        return Response(path.read_bytes(), media_type="application/octet-stream", headers=about)


_ANSWERS: dict[str, Answer] = {
    "summary": lambda view, _: view.summary(),
    "schedule": _window,
    "span/{index:count}": lambda view, request: view.span(request.path_params["index"]),
    "samples": lambda view, _: view.samples(),
    "samples/{call:count}/{prompt:count}/{member:count}": _sample,
    "groups/{call:count}/{prompt:count}": _group,
    "texts": _beginnings,
    "search": _search,
    "export": _export,
    "suggestions": lambda view, request: view.suggestions(is_asked=request.query_params.get("ask") == "1"),
    "alerts": lambda view, _: view.alerts(),
    "graph": lambda view, _: view.graph(),
    "training": lambda view, _: view.training(),
    "health": lambda view, _: view.health(),
    "analysis": lambda view, _: view.analysis(),
    "log/{worker}": lambda view, request: {"text": view.log(request.path_params["worker"])},
}


async def _not_found(request: Request, _: Exception) -> Response:
    return _text_response(404, f"there is nothing at {request.url.path!r:.120}")


def _json(answer: object) -> Response:
    return Response(_encode(answer), media_type="application/json", headers={"Cache-Control": "no-store"})


def _text_response(status: int, text: str) -> Response:
    return Response(_encode({"error": text}), status, media_type="application/json")


@final
class _Guard:
    """ASGI middleware that checks the Host or the token of requests and adds security headers to every answer."""

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
            return _text_response(405, "the viewer only reads")
        if not self._token:
            is_ours = _LOOPBACK_HOST.fullmatch(request.headers.get("host", ""))
            return None if is_ours else _text_response(403, "this viewer answers on loopback only; open the link that it printed")
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        kept = request.cookies.get(_COOKIE, "")
        if hmac.compare_digest(kept.encode(), self._token.encode()):
            return None
        return _text_response(401, "this viewer asks for a token: open the link that it printed")


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes any that is free.

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
    """Make uvicorn's configuration: HTTP only, without a log line for each request."""
    return uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off", timeout_graceful_shutdown=1)


def serve(folder: Folder, listener: socket.socket, *, token: str = "") -> None:
    """Serve until Ctrl-C."""
    config = configured(application(folder, token=token))
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server; uvicorn raises it again after shutting down.
        uvicorn.Server(config).run(sockets=[listener])
