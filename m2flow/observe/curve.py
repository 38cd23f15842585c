"""The learning curve of a run, as a picture: sampled reward by step, and held-out evaluations as points."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.observe.metrics import read_metrics

Points = Sequence[tuple[int, float]]

_INK, _QUIET, _GRID = "#1f2328", "#656d76", "#e4e7eb"
_REWARD = "#0072b2"
_EVALUATIONS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's colours: they stay apart for colour-blind readers."""


def write_curve(run_dir: str | Path, path: str | Path, *, title: str | None = None) -> None:
    """Draw `reward` and every `eval/*` (and `accuracy`) of a run's metrics to `path`, as its suffix says (.svg or .png).

    Rewards and evaluations share an axis if all lie in [0, 1]; else evaluations get a panel of their own. The title is the flow's
    name, from the name of the run directory, unless given. A run without these metrics gets a picture that says so.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    metrics = read_metrics(run_dir)
    reward = _finite(metrics.get("reward", []))
    evaluations = {name: _finite(points) for name, points in sorted(metrics.items()) if name.startswith("eval/") or name == "accuracy"}
    evaluations = {name: points for name, points in evaluations.items() if points}
    values = [value for points in (reward, *evaluations.values()) for _, value in points]
    is_shared = all(0 <= value <= 1 for value in values) or not (reward and evaluations)
    style = {"font.family": "sans-serif", "font.size": 9.5, "svg.hashsalt": "m2flow", "text.parse_math": False}
    with rc_context(style):
        figure = Figure(figsize=(7.2, 3.6 if is_shared else 5.2), dpi=160, layout="constrained", facecolor="white")
        axes = figure.subplots(1 if is_shared else 2, 1, sharex=True, squeeze=False)[:, 0]
        if reward:
            _draw_reward(axes[0], reward)
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


def _draw_reward(axes: Any, points: Points) -> None:
    steps, values = zip(*points, strict=True)
    is_long = len(points) > 20
    axes.plot(steps, values, color=_REWARD, alpha=0.3 if is_long else 1, linewidth=1, label=None if is_long else "reward of samples")
    if is_long:
        axes.plot(steps, _smooth(values), color=_REWARD, linewidth=1.8, label="reward of samples (mean of nearby steps)")
    if len(points) == 1:
        axes.plot(steps, values, "o", color=_REWARD, markersize=4)


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
