"""Metrics reach Weights & Biases and MLflow by their own libraries, offline, and TensorBoard's files; a resumed run goes on there."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from observed_run import record_run, store_run

from m2flow.errors import MissingExtra, SpecError
from m2flow.observe.forwarding import deliver, destinations
from m2flow.observe.metrics import MetricsWriter, read_metrics
from m2flow.observe.record_sinks import Sink, Undelivered
from m2flow.observe.spans import SpanBlock
from m2flow.observe.trackers import MlflowSink, SchedulePictures, TensorBoardSink, WandbSink, is_installed
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


def few_samples(run_dir: Path, step: int, most: int) -> tuple[list[str], list[list[object]]]:
    """What the forwarding process is told to read samples by."""
    if step:
        raise SpecError(f"{run_dir.name} has none")
    return ["step", "prompt", "reward"], [[step, f"{at}+{at}=", at / 2] for at in range(min(most, 3))]


SAMPLES = f"{__name__}:few_samples"


def _long_run(run_dir: Path) -> Path:
    """Its decode steps do not say which step of the flow they are for, as those of a real engine."""

    def as_engines_say(block: SpanBlock) -> SpanBlock:
        spans = [(name, *at, {k: v for k, v in of.items() if k != "step" or name != "rollout.step"}) for name, *at, of in block.spans]
        return msgspec.structs.replace(block, spans=spans)

    store_run(run_dir, [as_engines_say(block) for block in record_run(num_steps=12)])
    (run_dir / "config.json").write_text(json.dumps({"name": run_dir.name, "options": {}, "settings": {}, "cluster": {}}))
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in range(12):
            metrics.write(step, {"reward": step / 12})
    return run_dir


def test_a_picture_of_a_step_has_a_lane_for_each_worker_in_the_colours_of_its_work(tmp_path: Path) -> None:
    from PIL import Image

    pictures = SchedulePictures(_long_run(tmp_path / "grpo-1"))
    assert pictures.draw(10, tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as picture:
        seen = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
        height = picture.height
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= seen
    assert height == pytest.approx((1.1 + 0.32 * 4) * 110, abs=1)  # Two that sample, one that judges, one that trains.
    assert not pictures.draw(10, tmp_path / "two.png")  # What was drawn is forgotten.
    assert not (tmp_path / "two.png").exists()


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
@pytest.mark.skipif(not is_installed("wandb"), reason="needs the extra wandb")
def test_weights_and_biases_gets_samples_and_schedules_now_and_then_and_what_can_t_be_shown_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = _long_run(tmp_path / "grpo-1")
    assert _send(WandbSink(run_dir, "grpo", SAMPLES)) == 12
    (table,) = run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == few_samples(run_dir, 0, 3)[1]
    pictures = list(run_dir.glob("wandb/offline-run-*/files/media/images/schedule_*.png"))
    assert len(pictures) == 2
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "wandb: step 10 is not shown: SpecError: grpo-1 has none" in capsys.readouterr().err


def _events(directory: Path) -> Iterator[Any]:
    """Of TensorBoard's files: records of length u64, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(directory.glob("events*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length


def _shown(run_dir: Path) -> tuple[list[tuple[int, str, str]], list[tuple[int, str, bytes]]]:
    """Texts and images that TensorBoard has: step, tag, content."""
    found = [(event.step, value) for event in _events(run_dir / "tensorboard" / "media") for value in event.summary.value]
    texts = [(step, value.tag, value.tensor.string_val[0].decode()) for step, value in found if value.HasField("tensor")]
    images = [(step, value.tag, value.image.encoded_image_string) for step, value in found if value.HasField("image")]
    assert len(texts) + len(images) == len(found)
    return texts, images


def test_tensorboard_gets_samples_and_schedules_now_and_then_beside_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = _long_run(tmp_path / "grpo-1")
    assert _send(TensorBoardSink(run_dir, "grpo", SAMPLES)) == 0
    texts, images = _shown(run_dir)
    table = "| step | prompt | reward |\n| --- | --- | --- |\n| 0 | 0+0= | 0 |\n| 0 | 1+1= | 0.5 |\n| 0 | 2+2= | 1 |"
    assert texts == [(0, "samples/text_summary", table)]
    assert [(step, tag) for step, tag, _ in images] == [(0, "schedule"), (10, "schedule")]
    assert all(content.startswith(b"\x89PNG") for _, _, content in images)
    assert "tensorboard: step 10 is not shown: SpecError: grpo-1 has none" in capsys.readouterr().err
    assert _send(TensorBoardSink(run_dir, "grpo", SAMPLES)) == 0  # Nothing is new.
    assert _shown(run_dir) == (texts, images)


def test_tensorboard_keeps_what_it_was_shown_when_a_run_is_taken_up_again(tmp_path: Path) -> None:
    run_dir = _long_run(tmp_path / "grpo-1")
    _send(TensorBoardSink(run_dir, "grpo", SAMPLES))
    shown = _shown(run_dir)
    metrics = MetricsWriter(run_dir).open(truncate_at=1)
    metrics.write(1, {"reward": 0.5})
    metrics.close()
    assert _shown(run_dir) == shown
    again = TensorBoardSink(run_dir, "grpo", SAMPLES)
    again.reset()
    assert _shown(run_dir) == ([], [])


@pytest.mark.parametrize(("said", "gets"), [(None, ()), ((), ()), (("tensorboard",), ("tensorboard",))])
def test_tensorboard_is_shown_samples_only_where_it_is_named(
    tmp_path: Path, said: tuple[Literal["tensorboard"], ...] | None, gets: tuple[str, ...]
) -> None:
    assert destinations(RunSettings(metrics_to=said), tmp_path, "grpo", pytest.fail).trackers == gets


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("mlflow"), reason="needs the extra mlflow")
def test_mlflow_gets_samples_and_schedules_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run_dir = _long_run(tmp_path / "grpo-1")
    assert _send(MlflowSink(run_dir, "grpo", SAMPLES)) == 12
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    paths = [one.path for place in ("samples", "schedule") for one in client.list_artifacts(run.info.run_id, place)]
    assert paths == ["samples/step-000000.json", "schedule/step-000000.png", "schedule/step-000010.png"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, paths[0], str(tmp_path))).read_text())
    assert (table["columns"], table["data"]) == few_samples(run_dir, 0, 3)


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
