"""Write a run's metrics by step to `metrics.jsonl` and TensorBoard, read them back, and draw the learning curve.

    MetricsWriter --+--> metrics.jsonl
                    +--TensorBoardWriter.add--> a thread --tensorboardX--> tensorboard/

A line is {"step": 3, "time_s": <Unix seconds>, "values": {"reward": 0.5, "kl": null}, "non_finite": {"kl": "nan"}}. JSON has no NaN, so
a value that is not finite is null, and `non_finite` says what it was; TensorBoard does not get it, and the writer counts it.

Times are no values: two runs have the same values, and never the same times. A line of an update also has "idle_s": {"tool": 1.5}: by cause
(`m2flow.observe.spans`), the seconds that workers were idle in all since the line before that has it. Likewise "moved": {"load": 2}: how
often samples went on elsewhere than where an engine's prefix cache has their context, by cause.

tensorboardX imports torch if it is there, for the annotations of its own writer, which takes seconds and 200 MB. So torch is hidden from it
where nobody else has loaded it, and tensorboardX is imported in the writing thread, for which nobody waits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, final

import msgspec

from m2flow.errors import InternalError, host_error


def parameters_of(run_dir: str | Path) -> dict[str, object]:
    """The parameters of a run for trackers, flat: the flow's options by their names, `seed` and `cluster`, then what the calls, models,
    settings, cluster, versions and commit of its `config.json` are, as `calls.policy.update.optimizer.lr`. Empty without that file.
    """
    try:
        config = json.loads((Path(run_dir) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    resolved, cluster = config.get("resolved") or {}, config.get("cluster", {})
    found = {**config.get("options", {}), **resolved.get("options", {})}
    found |= {"seed": config.get("settings", {}).get("seed"), "cluster": cluster.get("name")}
    if not resolved:
        return found
    sections = {name: resolved.get(name) or {} for name in ("calls", "versions", "machine", "git")}
    return found | dict(_flat("", {**sections, "models": config.get("models", {}), "settings": config["settings"], "cluster": cluster}))


def _flat(place: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{place}.{key}" if place else str(key), inner)
    else:
        yield place, value


def name_of_run(run_dir: Path) -> str:
    """The name that a run was made with, whatever its directory is called now; of runs made before, the directory's."""
    try:
        return str(json.loads((run_dir / "config.json").read_text())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return run_dir.resolve().name


_Number = tuple[str, float, int, float]
_NOTHING: _Number = ("", 0.0, 0, 0.0)
_FLUSH_S = 10.0
_HPARAM_METRICS = ("reward", "accuracy", "entropy")
"""Metrics beside the parameters in TensorBoard's table."""


@final
class TensorBoardWriter:
    """Queue numbers for TensorBoard and write them from a thread; `close` waits until all are written."""

    def __init__(self, directory: Path, parameters: Mapping[str, object] | None = None) -> None:
        """`parameters`: of the run, for the table of TensorBoard's plugin hparams."""
        self._directory = directory
        self._parameters = parameters or {}
        self._numbers: queue.SimpleQueue[_Number | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, name: str, value: float, step: int, time_s: float) -> None:
        self._numbers.put((name, value, step, time_s))

    def close(self) -> None:
        """Wait until all numbers are written. Raises what writing raised."""
        self._numbers.put(None)
        self._thread.join()
        if self._error is not None:
            raise host_error(f"TensorBoard's files in {self._directory} can't be written", self._error) or self._error

    def _write(self) -> None:
        # The library's own writer has another queue and thread: when its disk is full the thread ends, and whoever fills the queue blocks.
        try:
            with contextlib.suppress(ImportError), _hidden_torch():
                importlib.import_module("tensorboardX.summary")
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import hparams, scalar

            self._directory.mkdir(parents=True, exist_ok=True)
            writer, flushed_s = EventsWriter(str(self._directory / "events")), time.monotonic()
            plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in self._parameters.items()}
            for summary in hparams(plain, dict.fromkeys(_HPARAM_METRICS, 0.0)) if plain else ():
                writer.write_event(Event(wall_time=time.time(), step=0, summary=summary))
            while (number := self._next(flushed_s + _FLUSH_S)) is not None:
                if number is not _NOTHING:
                    name, value, step, time_s = number
                    writer.write_event(Event(wall_time=time_s, step=step, summary=scalar(name, value)))
                if time.monotonic() >= flushed_s + _FLUSH_S:
                    writer.flush()
                    flushed_s = time.monotonic()
            writer.close()
        except BaseException as error:
            self._error = error

    def _next(self, until_s: float) -> _Number | None:
        """The next number to write; `_NOTHING` once the time is over."""
        try:
            return self._numbers.get(timeout=max(until_s - time.monotonic(), 0.0))
        except queue.Empty:
            return _NOTHING


class _Hiding:
    """A finder of modules, asked before all others, for which there is no torch in one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not loaded for TensorBoard's files", name=name)


@contextlib.contextmanager
def _hidden_torch() -> Iterator[None]:
    finder: Any = _Hiding()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of `metrics.jsonl`."""

    step: int
    time_s: float
    values: dict[str, float | None]
    non_finite: dict[str, str] = {}
    idle_s: dict[str, float] = {}
    moved: dict[str, int] = {}


_read_line = msgspec.json.Decoder(Line).decode


@final
class MetricsWriter:
    """Append to a run's metrics. A context manager; one writer for each run. A resumed run appends."""

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self._run_dir = Path(run_dir)
        self._has_tensorboard = tensorboard
        self._file: TextIO | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self.non_finite: Counter[str] = Counter()
        """How often each metric was not finite."""

    def open(self, truncate_at: int | None = None) -> MetricsWriter:
        """Open the file for appending.

        Args:
            truncate_at: cut the file to this size (bytes) first: its size at the checkpoint that a resumed run starts from. The steps
                after it are run, and written, again.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = metrics_path(self._run_dir)
        if truncate_at is not None and path.exists() and path.stat().st_size > truncate_at:
            os.truncate(path, truncate_at)
            self._rewrite_tensorboard()
        is_torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")
        return self

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        idle_s: Mapping[str, float] = MappingProxyType({}),
        moved: Mapping[str, int] = MappingProxyType({}),
    ) -> list[str]:
        """Record the values of a step; it may be called several times a step. Returns the names of those that are not finite.

        Args:
            idle_s: by cause, the seconds that workers were idle since the last call with it.
            moved: by cause, how often since then samples went on elsewhere than where their context is.
        """
        if self._file is None:
            raise InternalError("the metrics writer is not open")
        numbers = {name: float(value) for name, value in values.items()}
        bad = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        self.non_finite.update(bad.keys())
        idle_s = {cause: round(seconds, 6) for cause, seconds in idle_s.items()}
        line = Line(step, time.time(), {name: None if name in bad else value for name, value in numbers.items()}, bad, idle_s, dict(moved))
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()
        if self._has_tensorboard:
            self._to_tensorboard(line)
        return list(bad)

    @property
    def size(self) -> int:
        """Size of `metrics.jsonl` in bytes."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def _rewrite_tensorboard(self) -> None:
        """Rebuild TensorBoard's files, which can't be truncated, from the lines that are left."""
        if not self._has_tensorboard:
            return
        for file in (self._run_dir / "tensorboard").glob("events*"):
            file.unlink()
        for line in _lines(self._run_dir):
            self._to_tensorboard(line)

    def _to_tensorboard(self, line: Line) -> None:
        tensorboard = self._open_tensorboard()
        idle_s = {f"idle_s/{cause}": seconds for cause, seconds in line.idle_s.items()}
        moved = {f"moved/{cause}": number for cause, number in line.moved.items()}
        for name, value in {**line.values, **idle_s, **moved}.items():
            if value is not None:
                tensorboard.add(name, value, line.step, line.time_s)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        tensorboard, self._tensorboard = self._tensorboard, None
        if tensorboard is not None:
            tensorboard.close()

    def _open_tensorboard(self) -> TensorBoardWriter:
        if self._tensorboard is None:
            self._tensorboard = TensorBoardWriter(self._run_dir / "tensorboard", parameters_of(self._run_dir))
        return self._tensorboard

    def __enter__(self) -> MetricsWriter:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Read each metric's (step, value) pairs, in order of step. Values that were not finite come back as NaN or an infinity.

    Where a step was written twice (a resumed run repeats steps), the later value counts. A torn line is passed over.
    """
    found: dict[str, dict[int, float]] = {}
    for line in _lines(run_dir):
        for name, value in line.values.items():
            found.setdefault(name, {})[line.step] = float(line.non_finite.get(name, "nan")) if value is None else value
    return {name: sorted(points.items()) for name, points in found.items()}


def _lines(run_dir: str | Path) -> Iterator[Line]:
    path = metrics_path(run_dir)
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            yield _read_line(text)


def split_line(name: str) -> tuple[str, str]:
    """Split off what tells the numbers of another line of a flow that trains the same role apart from those of the first.

    >>> split_line("critic/update_2/loss"), split_line("critic/loss")
    (('update_2/', 'critic/loss'), ('', 'critic/loss'))
    """
    line = re.search(r"(?<![^/])update_\d+/", name)
    return ("", name) if line is None else (line[0], name.replace(line[0], "", 1))


def reward_names(names: Iterable[str]) -> list[str]:
    """The rewards of the roles that a flow trains, the policy's first.

    >>> reward_names(["loss", "solver/reward", "eval/reward", "critic/update_2/reward", "reward"])
    ['reward', 'solver/reward']
    """
    return sorted((name for name in names if _REWARD_NAME.fullmatch(name)), key=lambda name: (name != "reward", name))


_REWARD_NAME = re.compile(r"(?!setup/|eval/|update_)([^/]+/)?reward")


def metrics_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / "metrics.jsonl"


Points = Sequence[tuple[int, float]]

_INK, _QUIET, _GRID = "#1f2328", "#656d76", "#e4e7eb"
_REWARDS = ("#0072b2", "#56b4e9", "#5b4b8a")
_EVALUATIONS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's colours: they stay apart for colour-blind readers."""


def write_curve(run_dir: str | Path, path: str | Path, *, title: str | None = None) -> None:
    """Draw the rewards of what a run trains and every `eval/*` (and `accuracy`) to `path`, as its suffix says (.svg or .png).

    Rewards and evaluations share an axis if all lie in [0, 1]; else evaluations get a panel of their own. The title is the flow's
    name, from the name of the run directory, unless given. A run without these metrics gets a picture that says so.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    metrics = read_metrics(run_dir)
    rewards = {name: points for name in reward_names(metrics) if (points := _finite(metrics[name]))}
    evaluations = {name: _finite(points) for name, points in sorted(metrics.items()) if name.startswith("eval/") or name == "accuracy"}
    evaluations = {name: points for name, points in evaluations.items() if points}
    values = [value for points in (*rewards.values(), *evaluations.values()) for _, value in points]
    is_shared = all(0 <= value <= 1 for value in values) or not (rewards and evaluations)
    style = {"font.family": "sans-serif", "font.size": 9.5, "svg.hashsalt": "m2flow", "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(style):
        height = 3.6 if is_shared else 5.2
        figure = Figure(figsize=(7.2, height), dpi=160, facecolor="white")
        # A layout that matplotlib computes takes twice as long as all else, at the end of each run.
        figure.subplots_adjust(left=0.1, right=0.96, bottom=0.45 / height, top=1 - 0.4 / height, hspace=0.15)
        axes = figure.subplots(1 if is_shared else 2, 1, sharex=True, squeeze=False)[:, 0]
        for (name, points), colour in zip(rewards.items(), _REWARDS * len(rewards), strict=False):
            _draw_reward(axes[0], name, points, colour)
        for (name, points), colour in zip(evaluations.items(), _EVALUATIONS * len(evaluations), strict=False):
            _draw_evaluation(axes[-1], name, points, colour)
        for panel in axes:
            _dress(panel, has_data=bool(values), unit_interval=is_shared and bool(values))
        axes[-1].set_xlabel("step", color=_QUIET)
        axes[0].set_title(title or _flow_name(Path(run_dir)), loc="left", color=_INK, fontsize=12, fontweight="bold", pad=10)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=metadata)


def _draw_reward(axes: Any, name: str, points: Points, colour: str) -> None:
    steps, values = zip(*points, strict=True)
    is_long = len(points) > 20
    axes.plot(steps, values, color=colour, alpha=0.3 if is_long else 1, linewidth=1, label=None if is_long else f"{name} of samples")
    if is_long:
        axes.plot(steps, _smooth(values), color=colour, linewidth=1.8, label=f"{name} of samples (mean of nearby steps)")
    if len(points) == 1:
        axes.plot(steps, values, "o", color=colour, markersize=4)


def _draw_evaluation(axes: Any, name: str, points: Points, colour: str) -> None:
    steps, values = zip(*points, strict=True)
    label = "held-out accuracy" if name == "eval/accuracy" else name
    axes.plot(steps, values, "o-", color=colour, linewidth=1, markersize=5, markeredgecolor="white", markeredgewidth=0.8, label=label)
    axes.annotate(
        f"{values[-1]:.3g}", (steps[-1], values[-1]), xytext=(6, 4), textcoords="offset points", color=colour, annotation_clip=False
    )


def _dress(axes: Any, *, has_data: bool, unit_interval: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=_QUIET, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not has_data:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no reward and no evaluation was recorded", transform=axes.transAxes, ha="center", color=_QUIET)
        return
    lowest, highest = axes.dataLim.y0, axes.dataLim.y1
    if unit_interval and lowest >= 0 and highest <= 1 and highest > 0.2:
        axes.set_ylim(0, 1.04)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, labelcolor=_INK)


def _smooth(values: Sequence[float]) -> list[float]:
    """A centred mean over about a tenth of the run; shorter at the ends, so that it invents no delay."""
    half = max(1, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _flow_name(run_dir: Path) -> str:
    """`grpo` of `runs/grpo-20260102-030405`."""
    name = run_dir.resolve().name
    return re.sub(r"[-_.]\d{4}.*$", "", name) or name
