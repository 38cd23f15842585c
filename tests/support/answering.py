"""An HTTP server's answers in tests: a short text, and no line about it on the terminal."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """A subclass says what."""

    def answer(self) -> str | None:
        """To a GET; None: the connection ends without one."""
        raise NotImplementedError

    def posted(self, body: dict[str, Any]) -> None:
        """To a POST of this."""
        raise NotImplementedError

    def do_POST(self) -> None:
        self.posted(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        text = self.answer()
        if text is None:
            return
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
