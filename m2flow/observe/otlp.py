"""Send a run's spans and metrics to an OpenTelemetry collector by OTLP over HTTP, through the SDK's own exporters.

    trace/spans.msgpack, metrics.jsonl --OtlpSink.pump--> POST /v1/traces, /v1/metrics

The endpoint is the one given, or the one that the standard environment variables name (OTEL_EXPORTER_OTLP_ENDPOINT and its variants for
traces and metrics), which also set headers, certificates, compression and timeout. A batch that is not accepted is kept and sent again
with the same identifiers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from m2flow.errors import MissingExtra, SpecError
from m2flow.observe.metrics import name_of_run
from m2flow.observe.otel import Durations, OtelSpans, Point, data_of, point_of, points_of_step
from m2flow.observe.record_sinks import BlockFollower, LineFollower, Sink, Undelivered
from m2flow.observe.spans import counts_of, spans_of

_BATCH = 4096
"""Spans or points in one request, compressed: well below the 20 MiB that a collector takes."""
_TIMEOUT_S = 5.0
"""Time-out of one request with its repetitions, if OTEL_EXPORTER_OTLP_TIMEOUT says nothing."""
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_MOST_TEXT = 300
"""Characters of what an exporter says."""
_SIGNALS = ("TRACES", "METRICS")


def endpoint_named(environment: Mapping[str, str] = os.environ) -> str:
    """The endpoint that the standard variables name, to show to people; empty if they name none or turn the SDK off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    names = [_ENDPOINT, *(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT" for signal in _SIGNALS)]
    return next((environment[name] for name in names if environment.get(name, "").strip()), "")


def _names_compression(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables say how requests are compressed."""
    names = ["OTEL_EXPORTER_OTLP_COMPRESSION", *(f"OTEL_EXPORTER_OTLP_{signal}_COMPRESSION" for signal in _SIGNALS)]
    return any(environment.get(name, "").strip() for name in names)


def _session() -> Any:
    """An HTTP session for which a redirect is a failure: an exporter does not follow it, and takes it for a delivery.

    None, for the exporter's own, where a variable names a provider of sessions.
    """
    if any("CREDENTIAL_PROVIDER" in name for name, value in os.environ.items() if name.startswith("OTEL_PYTHON_EXPORTER_OTLP") and value):
        return None
    import requests

    session = requests.Session()
    session.hooks["response"].append(_refuse_redirect)
    return session


def _refuse_redirect(response: Any, **_: object) -> None:
    if 300 <= response.status_code < 400:
        response.close()
        to = response.headers.get("Location", "nowhere")
        raise Undelivered(f"it redirects ({response.status_code}) to {to}; name the address that takes the records itself")


def check_otlp(endpoint: str) -> None:
    """
    Raises:
        SpecError: that is no URL. MissingExtra: the exporter is not installed.
    """
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise SpecError(f"{endpoint!r} is no OTLP endpoint", now="Give its URL without a path, like http://localhost:4318.")
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"sending spans and metrics over OTLP needs the package `{error.name}`", now="pip install 'm2flow[otlp]'"
        ) from None


@final
class OtlpSink(Sink):
    """Sink of one run for an OTLP collector."""

    name = "otlp"
    period_s = 5.0

    def __init__(self, run_dir: Path, endpoint: str = "") -> None:
        """`endpoint`: a URL without the signal's path; empty: what the environment says."""
        super().__init__(run_dir)
        self._endpoint = endpoint.rstrip("/")
        self.where = endpoint or endpoint_named()
        self._otel = OtelSpans(name_of_run(run_dir))
        self._blocks, self._lines = BlockFollower(run_dir), LineFollower(run_dir)
        self._log = _ExporterLog()
        self._spans: Any = None
        self._metrics: Any = None
        self._waiting_spans: list[Any] = []
        """Made from the block that ends at `_end`, and not accepted yet."""
        self._waiting_points: list[Point] = []
        self._end = 0
        self._began_ns = self._ended_ns = 0
        self._durations = Durations()
        self._has_durations = False
        """Whether spans came whose durations are not sent."""

    def open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._blocks.acknowledge(self.sent.spans_end)
        self._lines.acknowledge(self.sent.metrics_end)
        logging.getLogger("opentelemetry").addHandler(self._log)
        how = None if _names_compression() else Compression.Gzip
        timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else _TIMEOUT_S
        if self._reaches("TRACES"):
            self._spans = OTLPSpanExporter(endpoint=self._url("traces"), timeout=timeout_s, compression=how, session=_session())
        if self._reaches("METRICS"):
            self._metrics = OTLPMetricExporter(endpoint=self._url("metrics"), timeout=timeout_s, compression=how, session=_session())

    def pump(self) -> bool:
        did = False
        if not (self._waiting_spans or self._waiting_points):
            for found in self._blocks.more():
                self._convert(found.block, found.end)
                did = True
        if self._waiting_spans or self._waiting_points:
            self._deliver()
            did = True
        lines = self._lines.more()
        if lines:
            points = [point for line in lines for point in points_of_step(line.step, line.at_ns, line.values)]
            for first in range(0, len(points), _BATCH):
                self._send_points(points[first : first + _BATCH])
            self._lines.acknowledge(lines[-1].end)
            self.sent.metrics_end = lines[-1].end
            did = True
        if did:
            self._keep()
        return did

    def finish(self) -> None:
        """Send the run's root span, which ends now."""
        if self._ended_ns and self._spans is not None:
            self._send_spans([self._otel.run_span(self._began_ns, self._ended_ns, {})])
            self._keep()

    def close(self) -> None:
        for exporter in (self._spans, self._metrics):
            if exporter is not None:
                exporter.shutdown()
        self._spans = self._metrics = None
        logging.getLogger("opentelemetry").removeHandler(self._log)

    @property
    def num_left_bytes(self) -> int:
        return self._blocks.num_left_bytes + self._lines.num_left_bytes

    def _convert(self, block: Any, end: int) -> None:
        spans = spans_of(block)
        self._waiting_spans += [made for at, span in enumerate(spans) for made in self._otel.of(span, f"{end}.{at}")]
        self._waiting_points += [point_of(count) for count in counts_of(block)]
        self._has_durations = self._has_durations or bool(spans)
        for span in spans:
            self._durations.add(span)
        self._end = end
        if spans:
            first, last = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
            self._began_ns = min(self._began_ns or first, first)
            self._ended_ns = max(self._ended_ns, last)

    def _deliver(self) -> None:
        while self._waiting_spans:
            self._send_spans(self._waiting_spans[:_BATCH])
            del self._waiting_spans[:_BATCH]
        while self._waiting_points or self._has_durations:
            more = self._durations.metrics() if self._has_durations else None
            self._send_points(self._waiting_points[:_BATCH], more)
            del self._waiting_points[:_BATCH]
            self._has_durations = False
        self._blocks.acknowledge(self._end)
        self.sent.spans_end = self._end

    def _send_spans(self, spans: list[Any]) -> None:
        if self._spans is None:
            return
        if self._spans.export(spans).name != "SUCCESS":
            raise Undelivered(self._log.text or "spans were not taken")
        self.sent.num_spans += len(spans)

    def _send_points(self, points: list[Point], more: Mapping[str, Any] | None = None) -> None:
        if self._metrics is None:
            return
        if self._metrics.export(data_of(self._otel.run, points, began_ns=self._began_ns, more=more)).name != "SUCCESS":
            raise Undelivered(self._log.text or "metrics were not taken")
        self.sent.num_points += len(points)

    def _reaches(self, signal: str) -> bool:
        """Whether a signal has an endpoint: a variable may name one for a single signal, or turn one off."""
        if os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() == "none":
            return False
        named = (os.environ.get(name, "").strip() for name in (_ENDPOINT, f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))
        return bool(self._endpoint) or any(named)

    def _url(self, signal: str) -> str | None:
        return f"{self._endpoint}/v1/{signal}" if self._endpoint else None


@final
class _ExporterLog(logging.Handler):
    """Keep the exporters' last log message: their return value says only that something failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if "max retries" not in said or not self.text:  # That follows on why it was tried again, which says more.
            cause, _, _ = said.removeprefix("Transient error ").partition(" encountered while")
            self.text = cause[:_MOST_TEXT].rstrip(".")
