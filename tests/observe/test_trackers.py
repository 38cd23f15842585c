"""Metrics reach Weights & Biases and MLflow by their own libraries, offline; a run that is taken up again goes on there."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.errors import MissingExtra, SpecError
from m2flow.observe.forwarding import deliver, destinations
from m2flow.observe.metrics import MetricsWriter, read_metrics
from m2flow.observe.record_sinks import Sink, Undelivered
from m2flow.observe.trackers import MlflowSink, WandbSink, is_installed
from m2flow.spec import RunSettings

_NAMED = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "OTEL_EXPORTER_OTLP_ENDPOINT")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMED:
        monkeypatch.delenv(name, raising=False)


def _run(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"options": {"lr": 0.1}, "settings": {"seed": 3}, "cluster": {"name": "laptop"}}))
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        metrics.write(0, {"reward": 0.25, "kl": float("nan")})
        metrics.write(1, {"reward": 0.5})
    return run_dir


def _go_on(run_dir: Path) -> None:
    """As after a resume: the file is cut, and a step comes a second time."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0])
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        metrics.write(1, {"reward": 0.5, "length": 12.0})
        metrics.write(2, {"reward": 0.75})


def _send(sink: Sink) -> int:
    ends = threading.Event()
    ends.set()
    (report,) = deliver([sink], ends, 240.0)
    assert (report.error, report.num_left_bytes) == ("", 0)
    return report.num_points


def _wandb_records(file: Path) -> Iterator[object]:
    """Of the file that an offline run leaves: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("wandb"), reason="needs the extra wandb")
def test_weights_and_biases_gets_every_value_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    run_dir = _run(tmp_path / "grpo-1")
    assert _send(WandbSink(run_dir, "grpo")) == 2
    seen: list[dict[str, object]] = []
    for file in run_dir.glob("wandb/offline-run-*/*.wandb"):
        for record in _wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.project, record.run.run_id, record.run.run_group) == ("digits", "grpo-1", "grpo")
            if record.WhichOneof("record_type") == "history":
                seen.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    assert [(one["step"], one["reward"]) for one in seen] == [(0, 0.25), (1, 0.5)]
    assert all("kl" not in one for one in seen)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("mlflow"), reason="needs the extra mlflow")
def test_mlflow_gets_every_value_and_goes_on_with_the_run_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run_dir = _run(tmp_path / "grpo-1")
    assert _send(MlflowSink(run_dir, "grpo")) == 2
    _go_on(run_dir)
    _send(MlflowSink(run_dir, "grpo"))
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    assert run.info.run_name == "grpo-1"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "seed": "3", "cluster": "laptop"}
    latest = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "reward")}
    assert latest == {0: 0.25, 1: 0.5, 2: 0.75}
    assert run.data.metrics["reward"] == read_metrics(run_dir)["reward"][-1][1]


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("mlflow") or is_installed("sqlalchemy"), reason="needs the extra mlflow, and nothing but that")
def test_mlflow_without_a_place_says_what_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = MlflowSink(_run(tmp_path / "grpo-1"), "grpo")
    sink.open()
    with pytest.raises(Undelivered, match=r"^MLFLOW_TRACKING_URI is not set"):
        sink.pump()


@pytest.mark.skipif(is_installed("wandb"), reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"wandb.*not installed\n.*pip install 'm2flow\[wandb\]'"):
        destinations(RunSettings(metrics_to=("wandb",)), tmp_path, "grpo", pytest.fail)


@pytest.mark.skipif(is_installed("opentelemetry.exporter.otlp.proto.http"), reason="the extra otlp is installed")
def test_an_endpoint_without_the_exporter_is_refused_if_asked_for_and_else_only_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'm2flow\[otlp\]'"):
        destinations(RunSettings(otlp="http://localhost:4318"), tmp_path, "grpo", pytest.fail)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    said: list[str] = []
    assert not destinations(RunSettings(), tmp_path, "grpo", said.append)
    assert "http://collector:4318" in said[0]


def test_what_is_no_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'localhost:4318' is no OTLP endpoint"):
        destinations(RunSettings(otlp="localhost:4318"), tmp_path, "grpo", pytest.fail)


def test_nobody_is_told_of_a_run_unasked(tmp_path: Path) -> None:
    assert not destinations(RunSettings(), tmp_path, "grpo", pytest.fail)
