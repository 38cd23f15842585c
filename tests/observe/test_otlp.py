"""Spans and metrics reach an OpenTelemetry collector; one that is away, silent or refuses costs nothing but its part."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from observed_run import record_run, store_run

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")

from otlp_receiver import Receiver, attributes, receiving

from m2flow import __version__
from m2flow.observe.forwarding import Destinations, Forwarding, deliver
from m2flow.observe.metrics import MetricsWriter
from m2flow.observe.otlp import OtlpSink
from m2flow.observe.spans import Recorder, spans_of
from m2flow.samples import SampleId

DRAIN_S = 240.0


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "240")  # What is not answered by then is sent again, and comes twice.


def _ended() -> threading.Event:
    ends = threading.Event()
    ends.set()
    return ends


def _send(run_dir: Path, receiver: Receiver) -> None:
    (report,) = deliver([OtlpSink(run_dir, receiver.url)], _ended(), DRAIN_S)
    assert (report.error, report.num_left_bytes) == ("", 0)


def test_every_span_and_counter_arrives_once_with_its_worker_as_the_resource(tmp_path: Path) -> None:
    blocks = record_run()
    store_run(tmp_path / "run", blocks)
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        metrics.write(0, {"reward": 0.25, "kl": float("nan")})
        metrics.write(1, {"reward": 0.5})
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    spans = [span for block in blocks for span in spans_of(block)]
    run_root = [span for _, span in receiver.spans if span.name == "run"]
    of_run = [(resource, span) for resource, span in receiver.spans if span.trace_id == run_root[0].trace_id and span.name != "run"]
    lives = [span for _, span in receiver.spans if span.name == "sample"]
    assert len(run_root) == 1
    assert len(of_run) + len(lives) == len(spans)
    assert sorted((span.start_time_unix_nano, span.end_time_unix_nano) for span in [*(s for _, s in of_run), *lives]) == sorted(
        (span.start_ns, span.end_ns) for span in spans
    )
    assert {resource["service.instance.id"] for resource, _ in receiver.spans} == {
        "controller",
        "rollout-0",
        "rollout-1",
        "reward-0",
        "trainer-0",
    }
    assert {resource["service.name"] for resource, _ in receiver.spans} == {"m2flow"}
    assert {span.parent_span_id for _, span in of_run} == {run_root[0].span_id}
    assert len({(span.trace_id, span.span_id) for _, span in receiver.spans}) == len(receiver.spans)
    names = [name for _, name, _ in receiver.points]
    assert names.count("m2flow.running") == sum(len(block.counts) for block in blocks)
    rewards = [point.as_double for _, name, point in receiver.points if name == "m2flow.train.reward"]
    assert rewards == [0.25, 0.5]
    assert "m2flow.train.kl" not in names


def test_metrics_have_units_kinds_and_a_scope_and_durations_are_histograms(tmp_path: Path) -> None:
    recorder = Recorder("rollout-0")
    recorder.add("sample", 0, 90_000_000, call=0, sample=SampleId(0, 0, 0), num_tokens=4, first_us=20_000, waited_us=10_000)
    recorder.add("rollout.step", 0, 30_000_000, call=0)
    for name, value in (
        ("memory bytes", 5.0),
        ("cpu seconds", 1.5),
        ("channel to train-0: bytes", 7.0),
        ("channel to train-0: seconds blocked", 0.5),
    ):
        recorder.count(name, value, 1000)
    store_run(tmp_path / "run", [recorder.drain()])
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    kinds = {metric.name: (metric.unit, metric.WhichOneof("data")) for _, metric in receiver.metrics}
    assert kinds["process.memory.usage"] == ("By", "gauge")
    assert kinds["process.cpu.time"] == ("s", "sum")
    assert kinds["m2flow.channel.sent_bytes"] == ("By", "sum")
    assert kinds["m2flow.channel.sent_seconds_blocked"] == ("s", "sum")
    assert kinds["m2flow.span.duration"] == ("s", "histogram")
    assert kinds["gen_ai.server.request.duration"] == ("s", "histogram")
    metrics = {metric.name: metric for _, metric in receiver.metrics}
    assert metrics["process.cpu.time"].sum.is_monotonic
    (first,) = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (first.count, first.sum) == (1, pytest.approx(0.03))
    (whole,) = metrics["gen_ai.server.request.duration"].histogram.data_points
    assert (whole.count, whole.sum) == (1, pytest.approx(0.1))
    for scope, resource in receiver.scopes:
        assert (scope.scope.name, scope.scope.version) == ("m2flow", __version__)
        assert scope.schema_url.startswith("https://opentelemetry.io/schemas/")
        assert resource["service.version"] == __version__
        assert resource["host.name"]
    assert {headers.get("Content-Encoding") for headers in receiver.headers} == {"gzip"}


_UNITS = re.compile(r"(1|s|By|\{[a-z_ ]+\}|[a-zA-Z]+(/[a-zA-Z]+)?|%)?")
"""Of UCUM, what the conventions use: https://opentelemetry.io/docs/specs/semconv/general/metrics/#instrument-units."""


def test_what_is_sent_is_what_a_collector_takes_without_repair(tmp_path: Path) -> None:
    """The rules of opentelemetry-proto's comments, which its messages can't express, and which collectors drop data for."""
    blocks, counted = record_run(), Recorder("rollout-0")
    counted.anchor_ns = blocks[0].anchor_ns
    for name in ("memory bytes", "gpu memory bytes", "cpu seconds", "channel to train-0: bytes", "channel to train-0: parcels"):
        counted.count(name, 5.0, 10**12 + 1000)
    store_run(tmp_path / "run", [*blocks, counted.drain()])
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        metrics.write(0, {"reward": 0.25})
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    ids: dict[bytes, set[bytes]] = {span.trace_id: set() for _, span in receiver.spans}
    for _, span in receiver.spans:
        assert (len(span.trace_id), len(span.span_id), len(span.parent_span_id)) in ((16, 8, 8), (16, 8, 0))
        assert any(span.trace_id)
        assert any(span.span_id)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.name
        assert span.kind
        keys = [pair.key for pair in span.attributes]
        assert all(keys)
        assert len(keys) == len(set(keys))
        ids[span.trace_id].add(span.span_id)
    assert all(not span.parent_span_id or span.parent_span_id in ids[span.trace_id] for _, span in receiver.spans)
    names = [metric.name for _, metric in receiver.metrics]
    assert names
    for _, metric in receiver.metrics:
        kind = metric.WhichOneof("data")
        assert re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_./-]{0,254}", metric.name)
        assert _UNITS.fullmatch(metric.unit), (metric.name, metric.unit)
        for point in getattr(metric, kind).data_points:
            assert point.time_unix_nano > 0
            assert point.start_time_unix_nano <= point.time_unix_nano
            if kind == "histogram":
                assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
                assert sum(point.bucket_counts) == point.count
                assert list(point.explicit_bounds) == sorted(set(point.explicit_bounds))
        if kind in ("sum", "histogram"):
            assert getattr(metric, kind).aggregation_temporality


def test_a_sample_gets_its_reward_and_what_generated_it(tmp_path: Path) -> None:
    samples = [SampleId(0, 0, 0).pack(), SampleId(0, 0, 1).pack()]
    rollout, judge = Recorder("rollout-0"), Recorder("functions-0")
    for sample in samples:
        rollout.add("sample", 0, 9_000_000, call=0, sample=sample, num_tokens=4, finish="stop")
    judge.add("function.call", 9_000_000, 10_000_000, call=1, label="verifier.score", samples=samples, rewards=[0.25, 1.0])
    store_run(tmp_path / "run", [rollout.drain(), judge.drain()])
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    roots = {span.trace_id: attributes(span) for _, span in receiver.spans if span.name == "sample"}
    assert {one["gen_ai.provider.name"] for one in roots.values()} == {"m2flow"}
    given = [attributes(span) for _, span in receiver.spans if span.name == "function.call" and span.trace_id in roots]
    assert sorted(one["m2flow.reward"] for one in given) == [0.25, 1.0]  # type: ignore[type-var]
    assert {(one["gen_ai.evaluation.name"], one["gen_ai.evaluation.score.value"]) for one in given} == {
        ("verifier", 0.25),
        ("verifier", 1.0),
    }


def test_what_a_long_run_records_goes_in_few_requests(tmp_path: Path) -> None:
    run_dir = store_run(tmp_path / "run", record_run(num_steps=40, num_prompts=8))
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in range(40):
            metrics.write(step, {"reward": 0.25})
    with receiving() as receiver:
        _send(run_dir, receiver)
    assert len(receiver.spans) > 4000
    assert receiver.num_requests < 12


def test_the_trace_of_a_sample_goes_through_every_process_that_had_it(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    by_trace: dict[bytes, list[tuple[str, str, bytes]]] = {}
    for resource, span in receiver.spans:
        by_trace.setdefault(span.trace_id, []).append((str(resource["service.instance.id"]), span.name, span.parent_span_id))
    roots = {span.trace_id: span.span_id for _, span in receiver.spans if span.name == "sample"}
    assert len(roots) == 16
    for trace, root in roots.items():
        mine = by_trace[trace]
        assert sorted(name for _, name, _ in mine) == ["function.call", "sample", "train.accumulate"]
        assert {worker.partition("-")[0] for worker, _, _ in mine} == {"rollout", "reward", "trainer"}
        assert {parent for _, name, parent in mine if name != "sample"} == {root}
    scored = next(span for _, span in receiver.spans if span.name == "function.call" and span.links and span.trace_id not in roots)
    assert len(scored.links) == 4
    assert {link.trace_id for link in scored.links} <= set(roots)


def test_a_sample_that_went_on_elsewhere_stays_in_its_trace_and_its_wait_is_a_span(tmp_path: Path) -> None:
    sample = SampleId(0, 3, 1)
    first, second = Recorder("rollout-0"), Recorder("rollout-1")
    first.add("sample", 5_000_000, 9_000_000, call=0, sample=sample, num_tokens=4, finish="abort", waited_us=2000, first_us=1000)
    second.add("sample", 12_000_000, 20_000_000, call=0, sample=sample, num_tokens=9, finish="stop", had=4)
    store_run(tmp_path / "run", [first.drain(), second.drain()])
    with receiving() as receiver:
        _send(tmp_path / "run", receiver)
    lives = sorted((span for _, span in receiver.spans if span.name == "sample"), key=lambda span: span.start_time_unix_nano)
    assert [life.parent_span_id for life in lives] == [b"", lives[0].span_id]
    assert lives[0].trace_id == lives[1].trace_id
    said = [attributes(life) for life in lives]
    assert [one["gen_ai.response.finish_reasons"] for one in said] == [["abort"], ["stop"]]
    assert [one["gen_ai.usage.output_tokens"] for one in said] == [4, 9]
    (queued,) = [span for _, span in receiver.spans if span.name == "sample.queued"]
    assert queued.end_time_unix_nano - queued.start_time_unix_nano == 3_000_000
    assert lives[0].start_time_unix_nano - queued.start_time_unix_nano == 2_000_000


def test_what_a_collector_refused_arrives_when_it_is_well_again_and_nothing_twice(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    with receiving() as receiver:
        receiver.status = 400
        (report,) = deliver([OtlpSink(tmp_path / "run", receiver.url)], _ended(), DRAIN_S)
        assert "400" in report.error
        assert report.num_left_bytes > 0
        assert report.num_spans == 0
        receiver.status = 200
        _send(tmp_path / "run", receiver)
        sent = len(receiver.spans)
        assert len({(span.trace_id, span.span_id) for _, span in receiver.spans}) == sent
        _send(tmp_path / "run", receiver)
        assert len(receiver.spans) == sent


def test_a_redirect_is_no_delivery_and_says_where_to_send(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    with receiving() as receiver:
        receiver.status = 302
        (report,) = deliver([OtlpSink(tmp_path / "run", receiver.url)], _ended(), DRAIN_S)
        assert "it redirects (302) to https://elsewhere.test/v1" in report.error
        assert (report.num_spans, report.num_points) == (0, 0)
        assert report.num_left_bytes > 0
        receiver.status = 200
        _send(tmp_path / "run", receiver)


def test_spans_are_sent_while_the_run_goes_on(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    with receiving() as receiver:
        ends = threading.Event()
        reports: list[object] = []
        thread = threading.Thread(target=lambda: reports.extend(deliver([OtlpSink(tmp_path / "run", receiver.url)], ends, DRAIN_S)))
        thread.start()
        assert receiver.came.wait(240)
        store_run(tmp_path / "run", record_run(num_steps=1, start_ns=10**13))
        ends.set()
        thread.join()
        assert max(span.start_time_unix_nano for _, span in receiver.spans) > 10**13


def test_headers_and_a_share_of_the_samples_are_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_run(tmp_path / "run", record_run(num_steps=8, num_prompts=8))
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
        (report,) = deliver([OtlpSink(tmp_path / "run")], _ended(), DRAIN_S)
        assert report.where == receiver.url
        assert {headers["api-key"] for headers in receiver.headers} == {"secret"}
        assert {resource["service.name"] for resource, _ in receiver.spans} == {"nightly"}
        lives = sum(span.name == "sample" for _, span in receiver.spans)
        assert 0 < lives < 8 * 8 * 4 // 2
        assert sum(span.name == "train.apply" for _, span in receiver.spans) == 8


def test_the_process_beside_a_run_delivers_and_reports(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    said: list[str] = []
    with receiving() as receiver:
        forwarding = Forwarding(Destinations(str(tmp_path / "run"), "grpo", True, receiver.url, drain_s=DRAIN_S), said.append)
        forwarding.open()
        forwarding.close()
        assert said == []
        assert [(report.num_spans, report.num_left_bytes) for report in forwarding.reports] == [(len(receiver.spans), 0)]
        (line,) = (tmp_path / "run" / "logs" / "forwarding.log").read_text().splitlines()
        assert line.startswith(f"{receiver.url}: {len(receiver.spans):,} spans, ")


def test_the_log_of_the_process_beside_a_run_says_what_was_not_taken_and_why(tmp_path: Path) -> None:
    store_run(tmp_path / "run", record_run(num_steps=1))
    with receiving() as receiver:
        receiver.status = 400
        forwarding = Forwarding(Destinations(str(tmp_path / "run"), "grpo", True, receiver.url, drain_s=DRAIN_S), [].append)
        forwarding.open()
        forwarding.close()
        (line,) = (tmp_path / "run" / "logs" / "forwarding.log").read_text().splitlines()
        assert line.startswith(f"{receiver.url}: 0 spans, 0 numbers; ")
        assert " bytes are left: " in line
        assert "400" in line


def test_a_collector_that_never_answers_holds_nothing_up_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    store_run(tmp_path / "run", record_run(num_steps=1))
    said: list[str] = []
    with receiving() as receiver:
        receiver.holds.set()
        forwarding = Forwarding(Destinations(str(tmp_path / "run"), "grpo", True, receiver.url, drain_s=0.5), said.append)
        forwarding.open()
        assert receiver.came.wait(240)
        forwarding.close()
        assert receiver.spans == []
    (warning,) = said
    assert f"not delivered to {receiver.url}" in warning
    assert "m2flow send" in warning


def test_the_semantic_conventions_have_the_names_that_are_taken_from_them() -> None:
    from opentelemetry.semconv._incubating.attributes import code_attributes, gen_ai_attributes, messaging_attributes
    from opentelemetry.semconv._incubating.metrics import hw_metrics, process_metrics
    from opentelemetry.semconv.attributes import error_attributes

    from m2flow.observe import otel
    from m2flow.observe.spans import Span

    known = {
        value
        for module in (code_attributes, gen_ai_attributes, messaging_attributes, error_attributes, hw_metrics, process_metrics)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    life = Span(
        "r", "sample", 0, 1, {"num_tokens": 1, "num_prompt_tokens": 2, "finish": "stop", "flow_line": "a.py:1", "error": "ValueError"}
    )
    sent = Span("r", "send", 0, 1, {"num_samples": 1, "num_bytes": 2, "label": "train-0"})
    taken = [name for span in (life, sent) for name in otel.attributes_of(span)] + [name for name, _, _ in otel._METRICS.values()]
    assert {name for name in taken if not name.startswith("m2flow.")} <= known
