"""The page and its parts: as the server sends them, and as one file that needs none.

The parts are ES modules that import each other by names of their own (`m2flow/schedule.js`). An import map says where those are: under
`/page/` when a server sends them, inside the file itself when they are exported. So there is no build step, and the same text runs in
both. The content policy names the map's checksum; no other script that stands in the page is run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path

_HERE = Path(__file__).parent / "page"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ASSETS = {path.name: path for folder in (_HERE, _HERE / "vendor") for path in sorted(folder.iterdir()) if path.suffix in _KINDS}
"""What may be asked for, by name."""
_STYLES = ("uPlot.min.css", "style.css")


def asset(name: str) -> tuple[bytes, str]:
    """A part's text and its media type."""
    path = ASSETS[name]
    return path.read_bytes(), _KINDS[path.suffix]


@functools.cache
def served_page() -> str:
    """The page that a server sends."""
    styles = "\n".join(f'<link rel="stylesheet" href="/page/{name}">' for name in _STYLES)
    return _filled(styles, _served_map(), "")


def policy() -> str:
    """The content policy of the page that a server sends."""
    return (
        f"default-src 'none'; script-src 'self' {_checksum(_served_map())}; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def exported_page(data: str) -> str:
    """One file: the page with its parts and its data.

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
