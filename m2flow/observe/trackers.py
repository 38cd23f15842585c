"""Send a run's metrics to experiment trackers: Weights & Biases and MLflow; and what TensorBoard shows besides numbers.

    metrics.jsonl --WandbSink, MlflowSink-----> a run in the tracker, of the same name
    samples, trace of every tenth step -------> a table of samples, a picture of the schedule
                    --TensorBoardSink---------> tensorboard/media/ (the run's own process writes the numbers: `m2flow.observe.metrics`)

A step is shown once a later one has begun to be reported, or the run has ended. What can't be shown is said in the forwarding process's
log, and is not tried again: metrics never wait for it.

Each sink takes the settings that its library reads from the environment (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, ...). A resumed run continues in the tracker too. The libraries are imported in the forwarding process alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

from m2flow.errors import MissingExtra, described
from m2flow.observe.metrics import name_of_run, parameters_of
from m2flow.observe.record_sinks import BlockFollower, LineFollower, Sink, Undelivered
from m2flow.observe.spans import Span, spans_of

Tracker = Literal["wandb", "mlflow"]
_MOST_TEXT = 500
"""Characters of a parameter's value: MLflow's limit was that for long."""
_MOST_PARAMS = 100
"""Parameters in one request: MLflow's limit."""


EVERY = 10
"""Steps from one that is shown to the next."""
_MOST_SAMPLES = 16
"""Samples in a table."""
ReadSamples = Callable[[Path, int, int], tuple[Sequence[str], list[list[object]]]]
"""Reads up to so many samples of a step of a run, as columns and rows."""


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # A package that it would be in is not there.
        return False


def check_tracker(name: str) -> None:
    """Raises MissingExtra."""
    if name != "tensorboard" and not is_installed(name):  # What writes TensorBoard's files is part of m2flow.
        raise MissingExtra(f"metrics are to go to {name}, which is not installed", now=f"pip install 'm2flow[{name}]'")


def trackers_configured(environment: Mapping[str, str] = os.environ) -> list[Tracker]:
    """The trackers that are installed and configured in the environment: a run is never reported unasked."""
    found: list[Tracker] = []
    says = any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"))
    is_off = environment.get("WANDB_MODE") == "disabled" or environment.get("WANDB_DISABLED", "").lower() in ("true", "1")
    if says and not is_off and is_installed("wandb"):
        found.append("wandb")
    if environment.get("MLFLOW_TRACKING_URI") and is_installed("mlflow"):
        found.append("mlflow")
    return found


class _TrackerSink(Sink):
    """Base of the two trackers: deliver whole lines of `metrics.jsonl`, in order."""

    def __init__(self, run_dir: Path, flow: str, samples: str = "") -> None:
        """`samples`: `module:function` of a `ReadSamples`; empty: no samples are sent."""
        super().__init__(run_dir)
        self._flow = flow
        self._samples = samples
        self._lines = LineFollower(run_dir)
        self._schedule = SchedulePictures(run_dir)
        self._is_begun = False
        self._due = -1
        """The step that is shown next; -1: none."""

    def open(self) -> None:
        self._lines.acknowledge(self.sent.metrics_end)

    def pump(self) -> bool:
        lines = self._lines.more()
        if not lines:
            return False
        try:
            if not self._is_begun:
                self._begin()
                self._is_begun = True
            for line in lines:
                if 0 <= self._due < line.step:
                    self._show_due()
                self._due = line.step if line.step % EVERY == 0 else self._due
                self.sent.num_points += self._log(line.step, line.at_ns, line.values)
                self._lines.acknowledge(line.end)
                self.sent.metrics_end = line.end
        except Undelivered:
            raise
        except Exception as error:  # Whatever a vendor's library raises is no reason to end anything.
            raise Undelivered(described(error)) from error
        self._keep()
        return True

    def finish(self) -> None:
        if self._is_begun and self._due >= 0:
            self._show_due()

    def _show_due(self) -> None:
        step, self._due = self._due, -1
        for show in (self._show_samples, self._show_schedule):
            try:
                show(step)
            except Exception as error:  # Neither a vendor's library nor a run without samples may keep metrics back.
                print(f"{self.name}: step {step} is not shown: {described(error)}", file=sys.stderr, flush=True)

    def _show_samples(self, step: int) -> None:
        if not self._samples:
            return
        module, _, function = self._samples.partition(":")
        read: ReadSamples = getattr(importlib.import_module(module), function)
        columns, rows = read(self.run_dir, step, _MOST_SAMPLES)
        if rows:
            self._table(step, columns, rows)

    def _show_schedule(self, step: int) -> None:
        with tempfile.TemporaryDirectory() as place:
            picture = Path(place) / f"step-{step:06}.png"
            if self._schedule.draw(step, picture):
                self._picture(step, picture)

    @property
    def num_left_bytes(self) -> int:
        return self._lines.num_left_bytes

    @abstractmethod
    def _begin(self) -> None:
        """Start a run in the tracker, or continue the one that is there."""

    @abstractmethod
    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> int:
        """Log the values of one line. Returns how many were sent."""

    @abstractmethod
    def _table(self, step: int, columns: Sequence[str], rows: list[list[object]]) -> None:
        """Send a table of samples of a step."""

    @abstractmethod
    def _picture(self, step: int, picture: Path) -> None:
        """Send a picture of the schedule of a step."""


@final
class WandbSink(_TrackerSink):
    """Sink for Weights & Biases."""

    name = "wandb"
    where = "Weights & Biases"

    def _begin(self) -> None:
        import wandb

        name = name_of_run(self.run_dir)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "m2flow"),
            name=os.environ.get("WANDB_NAME", name),
            id=os.environ.get("WANDB_RUN_ID", name),
            resume="allow",
            group=os.environ.get("WANDB_RUN_GROUP", self._flow),
            dir=str(self.run_dir),
            config=parameters_of(self.run_dir),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            self.where = str(self._run.url)

    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> int:
        # The step is a value of its own: theirs must never go back, and a resumed run does.
        self._run.log({**values, "step": step, "time_s": at_ns / 1e9})
        return len(values)

    def _table(self, step: int, columns: Sequence[str], rows: list[list[object]]) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True), "step": step})

    def _picture(self, step: int, picture: Path) -> None:
        import wandb

        self._run.log({"schedule": wandb.Image(str(picture), caption=f"step {step}"), "step": step})

    def close(self) -> None:
        if self._is_begun:
            import wandb

            self._run.finish()
            wandb.teardown()  # Until then its own process may still be writing.
            self._is_begun = False


@final
class TensorBoardSink(_TrackerSink):
    """Sink for what TensorBoard shows besides numbers, in a directory of its own: of several files in one it reads the newest alone."""

    name = "tensorboard"
    where = "TensorBoard"

    def reset(self) -> None:
        super().reset()
        shutil.rmtree(self.run_dir / "tensorboard" / "media", ignore_errors=True)

    def _begin(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        directory = self.run_dir / "tensorboard" / "media"
        directory.mkdir(parents=True, exist_ok=True)
        self.where = str(directory)
        self._writer: Any = EventsWriter(str(directory / "events"))

    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> int:
        return 0  # The run's own process has written them.

    def _table(self, step: int, columns: Sequence[str], rows: list[list[object]]) -> None:
        from tensorboardX.summary import text

        lines = [columns, ["---"] * len(columns), *rows]
        self._write(step, text("samples", "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)))

    def _picture(self, step: int, picture: Path) -> None:
        from PIL import Image
        from tensorboardX.proto.summary_pb2 import Summary

        with Image.open(picture) as opened:
            size = {"width": opened.width, "height": opened.height, "colorspace": len(opened.getbands())}
        image = Summary.Image(encoded_image_string=picture.read_bytes(), **size)
        self._write(step, Summary(value=[Summary.Value(tag="schedule", image=image)]))

    def _write(self, step: int, summary: object) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._is_begun:
            self._writer.close()
            self._is_begun = False


def _cell(value: object) -> str:
    """A value in a table of Markdown, as it stands.

    >>> _cell("a | b\\n<think>*"), _cell(0.123456), _cell(None)
    ('a &#124; b<br>&lt;think&gt;&#42;', '0.1235', '')
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(_AS_IT_STANDS.get(letter, letter) for letter in str("" if value is None else value))


_AS_IT_STANDS = {letter: f"&#{ord(letter)};" for letter in "\\`*_[]|~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": "<br>"}


@final
class MlflowSink(_TrackerSink):
    """Sink for MLflow."""

    name = "mlflow"
    where = "MLflow"

    def _begin(self) -> None:
        from mlflow.tracking import MlflowClient

        try:
            self._client: Any = MlflowClient()
        except Exception as error:
            if os.environ.get("MLFLOW_TRACKING_URI"):
                raise
            raise Undelivered(
                "MLFLOW_TRACKING_URI is not set, and this MLflow can't write where it would then: set it to the address of a server"
            ) from error
        self.where = f"MLflow at {self._client.tracking_uri}"
        name = name_of_run(self.run_dir)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._flow)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        mine = self._client.search_runs([number], f"tags.`m2flow.run` = '{name}'", max_results=1)
        if mine:
            self._id = mine[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=name, tags={"m2flow.run": name}).info.run_id
        from mlflow.entities import Param

        found = [Param(_mlflow_name(key), str(value)[:_MOST_TEXT]) for key, value in parameters_of(self.run_dir).items()]
        for first in range(0, len(found), _MOST_PARAMS):
            self._client.log_batch(self._id, params=found[first : first + _MOST_PARAMS])

    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> int:
        from mlflow.entities import Metric

        points = [Metric(_mlflow_name(name), value, at_ns // 1_000_000, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._id, metrics=points)
        return len(points)

    def _table(self, step: int, columns: Sequence[str], rows: list[list[object]]) -> None:
        # In the form of `mlflow.log_table`, which needs pandas.
        self._client.log_dict(self._id, {"columns": list(columns), "data": rows}, f"samples/step-{step:06}.json")

    def _picture(self, step: int, picture: Path) -> None:
        self._client.log_artifact(self._id, str(picture), "schedule")

    def close(self) -> None:
        if self._is_begun:
            self._client.set_terminated(self._id)
            self._is_begun = False


def _mlflow_name(name: str) -> str:
    """
    >>> _mlflow_name("tokens/s (mean)")
    'tokens/s _mean_'
    """
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)


SINKS: Mapping[str, type[_TrackerSink]] = {"wandb": WandbSink, "mlflow": MlflowSink, "tensorboard": TensorBoardSink}
"""By the names of `metrics_to`."""

# ---- pictures of the schedule

_COLOURS = {"rollout": "#0072b2", "train": "#d55e00", "function": "#009e73", "": "#8c959f"}
"""By kind of engine; grey: what is no engine's work (weight syncs, switches)."""
_LEAST_SHARE = 1 / 2000
"""Share of the picture's width: pieces of work that are closer to each other are drawn as one."""


@final
class SchedulePictures:
    """Draw who worked when in a step, from a run's trace as it grows."""

    def __init__(self, run_dir: Path) -> None:
        self._blocks = BlockFollower(run_dir)
        self._work: list[Span] = []
        """What was read beyond the last step that was drawn."""

    def draw(self, step: int, path: Path) -> bool:
        """Draw a step to a file; steps before it are forgotten. Returns False if the trace has no work of it."""
        work, newest = self._work, -1
        while newest <= step + 1 and (blocks := self._blocks.more()):  # Blocks of several workers overlap by less than a step.
            read = [span for block in blocks for span in spans_of(block.block) if span.is_work]
            newest = max((at for span in read if isinstance(at := span.attributes.get("step"), int)), default=newest)
            self._blocks.acknowledge(blocks[-1].end)
            work += read
        mine = [span for span in work if span.attributes.get("step") == step]
        if not mine:
            return False
        # From the end of the step before: decode steps do not say which step of the flow they are for.
        earlier = [span.end_ns for span in work if isinstance(at := span.attributes.get("step"), int) and at < step]
        start = min(max(earlier, default=min(span.start_ns for span in work)), *(span.start_ns for span in mine))
        end = max(span.end_ns for span in mine)
        self._work = [span for span in work if span.end_ns > end]
        lanes: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for span in sorted((span for span in work if span.start_ns < end and span.end_ns > start), key=lambda span: span.start_ns):
            worker, engine = span.lane
            pieces = lanes.setdefault(worker, {}).setdefault(engine if engine in _COLOURS else "", [])
            begin, stop = max(span.start_ns, start), min(span.end_ns, end)
            if pieces and begin - pieces[-1][1] <= (end - start) * _LEAST_SHARE:
                pieces[-1] = pieces[-1][0], max(stop, pieces[-1][1])
            else:
                pieces.append((begin, stop))
        _draw(lanes, start, end, f"step {step}", path)
        return True


def _draw(lanes: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]], start: int, end: int, title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(9.6, 1.1 + 0.32 * len(lanes)), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    names = sorted(lanes)
    for row, worker in enumerate(names):
        for engine, pieces in lanes[worker].items():
            bars = [((begin - start) / 1e9, (stop - begin) / 1e9) for begin, stop in pieces]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[engine], linewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max((end - start) / 1e9, 1e-9))
    axes.set_xlabel("seconds")
    used = [engine for engine in _COLOURS if any(engine in of for of in lanes.values())]
    for engine in used:
        axes.bar(0, 0, color=_COLOURS[engine], label=engine or "other")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
