"""What a user's function does elsewhere is in the trace of the sample that it was called on, also in the eyes of OpenTelemetry's API."""

from __future__ import annotations

import functools
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_clusters import FAKES
from opentelemetry import trace

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, op, steps, traceparent
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.observe.otel import Trace, run_span, sample_span, traceparent_of
from m2flow.runner.run import Run
from m2flow.samples import SampleId
from m2flow.spec import RunSettings

ROWS = [{"prompt": f"{i} + {i}"} for i in range(8)]


def _seen() -> str:
    """What both say of where this runs, which must be the same."""
    current = trace.get_current_span().get_span_context()
    assert current.is_remote
    assert traceparent() == f"00-{current.trace_id:032x}-{current.span_id:016x}-{current.trace_flags:02x}"
    return traceparent()


@op()
async def of_a_sample(sample: Sample) -> list[str]:
    return [str(sample.id), _seen()]


@op(granularity="group")
def of_a_group(samples: list[Sample]) -> list[str]:
    return [_seen()] * len(samples)


class Judge(Role):
    @call(granularity="sample")
    def look(self, sample: Sample) -> list[str]:
        return [str(sample.id), _seen()]


@pytest.mark.parametrize("mode", ["eager", "planned"])
def test_a_function_is_called_within_the_trace_of_what_it_is_called_on(tmp_path: Path, mode: str) -> None:
    seen: dict[str, list[Any]] = {}

    @flow
    def looked_at() -> None:
        policy, judge = Policy("fake"), Judge()
        responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        seen["op"], seen["role"], seen["group"] = list(of_a_sample(responses)), list(judge.look(responses)), list(of_a_group(responses))

    done = Run(looked_at, {}, FAKES, RunSettings(runs_dir=str(tmp_path), eager=mode == "eager")).execute()
    run = Path(done.run_dir).name
    with SampleQuery(Path(done.run_dir)) as book:
        ids = [SampleId(*map(int, entry.sample.split("/"))) for entry in book.entries()]
    expected = [[str(sample), traceparent_of(sample_span(run, sample.pack()), is_sampled=True)] for sample in ids]
    assert len(expected) == 4
    assert seen["op"] == seen["role"] == expected
    assert set(seen["group"]) == {traceparent_of(run_span(run), is_sampled=True)}
    assert traceparent() == ""


def test_of_samples_that_are_not_sent_the_context_says_so() -> None:
    import contextvars

    def flag_of(sample: int) -> str:
        Trace("run", {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}).enter(sample)
        return traceparent()[-2:]

    flags = [contextvars.Context().run(flag_of, sample) for sample in range(400)]
    assert 50 < flags.count("01") < 150
    assert flags.count("00") == 400 - flags.count("01")


@functools.cache
def _tracer(collector: str) -> trace.Tracer:
    """As a module of rewards would set it up for itself."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "judge"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{collector}/v1/traces")))
    return provider.get_tracer("judge")


def asked(collector: str, service: str, sample: Sample) -> float:
    with _tracer(collector).start_as_current_span("ask"):
        request = urllib.request.Request(service, data=b"a text to judge", headers={"traceparent": traceparent()})
        with urllib.request.urlopen(request) as answer:
            return float(answer.read())


@contextmanager
def _serving() -> Iterator[tuple[str, list[str]]]:
    """A service that judges; its address, and the header that came with each request."""
    came: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            came.append(self.headers["traceparent"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1.0")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_collector_shows_a_rewards_own_spans_and_requests_below_its_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")
    from otlp_receiver import receiving

    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "240")  # What is not answered by then is sent again, and comes twice.

    @flow
    def judged(collector: str = "", service: str = "") -> None:
        policy, reward = Policy("fake"), Reward(functools.partial(asked, collector, service), name="judge")
        prompts = Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
            policy.update(responses, reward.score(responses))

    with receiving() as receiver, _serving() as (service, came):
        settings = RunSettings(runs_dir=str(tmp_path), otlp=receiver.url, drain_s=240)
        Run(judged, {"collector": receiver.url, "service": service}, FAKES, settings).execute()
    roots = {span.trace_id: span.span_id for _, span in receiver.spans if span.name == "sample"}
    own = [(resource, span) for resource, span in receiver.spans if span.name == "ask"]
    assert len(roots) == len(own) == len(came) == 8
    for resource, span in own:
        assert resource["service.name"] == "judge"
        assert span.parent_span_id == roots[span.trace_id]
    assert {span.trace_id for _, span in own} == set(roots)
    assert sorted(came) == sorted(f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for _, span in own)
