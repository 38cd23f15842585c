"""An OpenTelemetry collector of the tests: it listens on loopback, decodes what comes, and can be slow, refuse, or be away."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What has come. `status` is what the next requests are answered with; while `holds` is set, they wait for an answer."""

    def __init__(self) -> None:
        self.status = 200
        self.holds = threading.Event()
        self.free = threading.Event()
        self.came = threading.Event()
        self.num_requests = 0
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._spans: list[tuple[dict[str, object], Any]] = []
        self._points: list[tuple[dict[str, object], str, Any]] = []
        self.metrics: list[tuple[dict[str, object], Any]] = []
        """Each with its resource, as it came."""
        self.scopes: list[tuple[Any, dict[str, object]]] = []
        """What each scope sent, with its resource."""
        self.url = ""

    @property
    def spans(self) -> list[tuple[dict[str, object], Any]]:
        """Each with its resource."""
        with self._lock:
            return list(self._spans)

    @property
    def points(self) -> list[tuple[dict[str, object], str, Any]]:
        """Each with its resource and the metric's name."""
        with self._lock:
            return list(self._points)

    def take(self, path: str, body: bytes) -> None:
        # Here, since this file is looked through for doctests where the extra is missing, too.
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        with self._lock:
            if path == "/v1/traces":
                for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = attributes(of.resource)
                    self.scopes += [(scope, resource) for scope in of.scope_spans]
                    self._spans += [(resource, span) for scope in of.scope_spans for span in scope.spans]
            elif path == "/v1/metrics":
                for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    resource = attributes(of.resource)
                    self.scopes += [(scope, resource) for scope in of.scope_metrics]
                    for scope in of.scope_metrics:
                        for metric in scope.metrics:
                            self.metrics.append((resource, metric))
                            data = getattr(metric, metric.WhichOneof("data"))
                            self._points += [(resource, metric.name, point) for point in data.data_points]
            else:
                raise AssertionError(path)


def attributes(of: Any) -> dict[str, object]:
    """Of a resource, a span or a point."""
    found: dict[str, object] = {}
    for pair in of.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [getattr(one, one.WhichOneof("value")) for one in value.values] if kind == "array_value" else value
    return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.num_requests += 1
            receiver.headers.append(dict(self.headers))
            status = receiver.status
            receiver.came.set()
            if receiver.holds.is_set():
                receiver.free.wait()
            if status == 200:
                receiver.take(self.path, body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "https://elsewhere.test/v1")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.free.set()
        server.shutdown()
        server.server_close()
        thread.join()
