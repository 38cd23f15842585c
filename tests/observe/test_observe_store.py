from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed_run import record_run, store_run

from m2flow.errors import InternalError
from m2flow.observe.metrics import MetricsWriter, read_metrics
from m2flow.observe.spans import Recorder, SpanBlock, spans_of
from m2flow.observe.store import TraceStore, read_spans, read_trace, spans_path, to_otel


def _path(run_dir: Path) -> Path:
    return run_dir / "trace" / "spans.msgpack"


def _otel(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "trace" / "otel.jsonl").read_text().splitlines()]


def _block(*starts: int) -> SpanBlock:
    recorder = Recorder("w")
    recorder.anchor_ns = 10**18
    for start in starts:
        recorder.add("function.call", start * 1_000_000, start * 1_000_000 + 1, call=start)
    return recorder.drain()


def test_what_is_stored_is_read_back_in_order_of_start(tmp_path: Path) -> None:
    blocks = record_run()
    store_run(tmp_path, blocks)
    spans = [span for block in blocks for span in spans_of(block)]
    assert read_spans(tmp_path) == sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    assert len(read_trace(tmp_path).counts) == sum(len(block.counts) for block in blocks)
    assert read_trace(tmp_path).num_lost_bytes == 0


def test_of_a_long_trace_the_last_records_can_be_read_alone(tmp_path: Path) -> None:
    blocks = [_block(number) for number in range(9)]
    store_run(tmp_path, blocks)
    size = spans_path(tmp_path).stat().st_size
    calls = [[span.attributes["call"] for span in read_spans(tmp_path, last_bytes=last)] for last in (0, size * 2 // 5, size - 1, size)]
    assert calls == [[], [6, 7, 8], list(range(1, 9)), list(range(9))]


def test_a_run_without_a_trace_has_no_spans(tmp_path: Path) -> None:
    assert read_spans(tmp_path) == []


def test_a_closed_store_refuses_and_an_empty_block_costs_nothing(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    with pytest.raises(InternalError):
        store.append(_block(1))
    with store:
        store.append(Recorder("w").drain())
    assert _path(tmp_path).stat().st_size == 0


@settings(max_examples=40)
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_gives_the_whole_records_before_the_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    store_run(run_dir, [_block(1)])
    first = _path(run_dir).stat().st_size
    store_run(run_dir, [_block(2, 3)])
    content = _path(run_dir).read_bytes()
    cut %= len(content) + 1
    _path(run_dir).write_bytes(content[:cut])
    expected = [] if cut < first else [1] if cut < len(content) else [1, 2, 3]
    trace = read_trace(run_dir)
    assert [span.attributes["call"] for span in trace.spans] == expected
    with TraceStore(run_dir) as store:
        store.append(_block(9))
    assert store.num_cut_bytes == trace.num_lost_bytes
    assert [span.attributes["call"] for span in read_spans(run_dir)] == [*expected, 9]


def test_a_damaged_record_ends_the_reading_and_is_counted(tmp_path: Path) -> None:
    store_run(tmp_path, [_block(1), _block(2)])
    content = bytearray(_path(tmp_path).read_bytes())
    content[-1] ^= 0xFF
    _path(tmp_path).write_bytes(content)
    trace = read_trace(tmp_path)
    assert [span.attributes["call"] for span in trace.spans] == [1]
    assert trace.num_lost_bytes == len(content) // 2


def test_the_opentelemetry_export_has_every_span_under_one_root(tmp_path: Path) -> None:
    blocks = record_run()
    store_run(tmp_path, blocks)
    export = to_otel(tmp_path)
    root, *spans = _otel(tmp_path)
    assert export.num_spans == len(spans) == sum(len(block.spans) for block in blocks)
    assert export.left_out == {}
    assert root["name"] == "run"
    assert root["parent_id"] is None
    assert {span["parent_id"] for span in spans} == {root["context"]["span_id"]}
    assert {span["context"]["trace_id"] for span in spans} == {root["context"]["trace_id"]}
    assert len({span["context"]["span_id"] for span in [root, *spans]}) == len(spans) + 1
    assert {span["resource"]["attributes"]["service.name"] for span in spans} == {"m2flow"}
    assert {span["resource"]["attributes"]["service.instance.id"] for span in spans} >= {"trainer-0", "rollout-1"}
    names = {name.partition(".")[0] for span in spans for name in span["attributes"]}
    assert names <= {"m2flow", "gen_ai", "code", "messaging"}
    assert sum("code.line.number" in span["attributes"] for span in spans) > len(spans) // 2


def test_the_opentelemetry_export_marks_errors(tmp_path: Path) -> None:
    recorder = Recorder("w")
    recorder.add("function.call", 1, 2, error="ValueError", version=None)
    store_run(tmp_path, [recorder.drain()])
    to_otel(tmp_path)
    span = _otel(tmp_path)[1]
    assert span["status"] == {"status_code": "ERROR", "description": "ValueError"}
    assert "m2flow.version" not in span["attributes"]


def test_a_long_trace_is_thinned_where_it_repeats_itself_and_says_so(tmp_path: Path) -> None:
    blocks = record_run(num_steps=10)
    store_run(tmp_path, blocks)
    names = [name for block in blocks for name, *_ in block.spans]
    others = sum(name not in ("sample", "rollout.step") for name in names)
    export = to_otel(tmp_path, max_spans=others + 20)
    root, *spans = _otel(tmp_path)
    assert len(spans) == export.num_spans == others + 20
    assert sum(export.left_out.values()) == len(names) - others - 20
    assert set(export.left_out) == {"rollout.step", "sample"}
    assert root["attributes"] == {f"m2flow.left_out.{name}": number for name, number in export.left_out.items()}
    assert to_otel(tmp_path, max_spans=10).num_spans == 10


def test_an_empty_run_exports_nothing(tmp_path: Path) -> None:
    assert to_otel(tmp_path).num_spans == 0
    assert _otel(tmp_path) == []


def test_metrics_come_back_by_name_and_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        assert writer.write(0, {"reward": 0.25, "kl": 0.0}) == []
        writer.write(1, {"reward": 0.5})
        writer.write(1, {"eval/accuracy": 0.75})
    assert read_metrics(tmp_path) == {"reward": [(0, 0.25), (1, 0.5)], "kl": [(0, 0.0)], "eval/accuracy": [(1, 0.75)]}
    assert list((tmp_path / "tensorboard").iterdir())


def test_metrics_that_are_not_finite_are_null_in_the_file_and_reported(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        assert writer.write(4, {"loss": math.nan, "grad_norm": -math.inf, "reward": 1.0}) == ["loss", "grad_norm"]
        writer.write(5, {"loss": math.nan})
        assert writer.non_finite == {"loss": 2, "grad_norm": 1}
    (board,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward" in board.read_bytes()
    assert b"grad_norm" not in board.read_bytes()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0], parse_constant=lambda name: pytest.fail(name))
    assert line["values"] == {"loss": None, "grad_norm": None, "reward": 1.0}
    read = read_metrics(tmp_path)
    assert math.isnan(read["loss"][0][1])
    assert read["grad_norm"] == [(4, -math.inf)]


def test_a_resumed_run_continues_after_a_torn_line_and_its_values_count(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"reward": 0.1})
        writer.write(1, {"reward": 0.2})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"reward": 0.3})
    assert read_metrics(tmp_path) == {"reward": [(0, 0.1), (1, 0.3)]}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(2, {"reward": 0.5})
        writer.write(1, {"reward": 0.4})
        writer.write(0, {"loss": 1})
        writer.write(-1, {"reward": 0.0})
    assert read_metrics(tmp_path)["reward"] == [(-1, 0.0), (0, 0.1), (1, 0.4), (2, 0.5)]
    assert read_metrics(tmp_path / "none") == {}


def test_a_closed_metrics_writer_refuses(tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        MetricsWriter(tmp_path).write(0, {"reward": 1.0})
