"""An HTTP server's answers in tests: a short text, and no line about it on the terminal."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler


class Answering(BaseHTTPRequestHandler):
    """A subclass says what."""

    def answer(self) -> str | None:
        """To a GET; None: the connection ends without one."""
        raise NotImplementedError

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
