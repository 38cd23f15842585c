"""The macro graph as a picture file. Data runs along full lines, effects along dashed ones; a red line across: Python waits there.

Made for graphs of up to some sixty calls; larger ones become long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m2flow.macro.drawing import COLOURS, Box, Drawing, Link

_INK, _QUIET, _FRAME, _WAIT, _PAPER = "#1f2328", "#656d76", "#f1f4f7", "#cf222e", "#ffffff"
_LINES = {"data": "#57606a", "effect": "#bc6c00"}
_KINDS = {"source": "dataset", "rollout": "generation", "function": "function", "train": "training"}

# Inches.
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.5, 0.9, 0.95, 0.75
_WIDTH, _HEIGHT, _ROW = 2.5, 0.4, 0.54
_GUTTER, _TRACK = 0.28, 0.11
_STEP_GAP, _WAIT_GAP = 0.3, 0.26
_CHARACTERS = 42
"""Of the small print that fit a box."""
_ROUND = "round,pad=0,rounding_size=0.08"


class _Layout:
    """Lanes and rows in inches; y grows downward."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.lefts: list[float] = []
        self.gutters: list[float] = []
        x = _LEFT
        for lane in range(len(drawing.lanes) + 1):
            self.gutters.append(x)
            x += _GUTTER + _TRACK * drawing.num_tracks(lane)
            self.lefts.append(x)
            x += _WIDTH if lane < len(drawing.lanes) else 0.0
        self.width = x + _RIGHT
        self.middles: list[float] = []
        self.waits_at: list[float] = []
        firsts, lasts = {frame.first for frame in drawing.frames}, {frame.last for frame in drawing.frames}
        y = _TOP
        for row in range(len(drawing.boxes)):
            y += _STEP_GAP if row in firsts else 0.0
            self.middles.append(y + _ROW / 2)
            y += _ROW
            for wait in drawing.waits:
                if wait.row == row:
                    self.waits_at.append(y + _WAIT_GAP / 2)
                    y += _WAIT_GAP
            y += _STEP_GAP / 2 if row in lasts else 0.0
        self.height = y + _BOTTOM

    def track(self, link: Link) -> float:
        return self.gutters[link.gutter] + _GUTTER / 2 + _TRACK * (link.track + 0.5)


def write_picture(drawing: Drawing, path: str | Path) -> None:
    """Draw to `path`, as its suffix says (.svg or .png)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    layout = _Layout(drawing)
    path = Path(path)
    with rc_context({"svg.hashsalt": "m2flow", "font.family": "sans-serif", "svg.fonttype": "none"}):
        figure = Figure(figsize=(layout.width, layout.height), facecolor=_PAPER)
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, layout.width)
        axes.set_ylim(layout.height, 0)
        axes.axis("off")
        axes.text(0.2, 0.32, drawing.title, fontsize=13, fontweight="bold", color=_INK, va="center")
        for lane, name in enumerate(drawing.lanes):
            axes.text(layout.lefts[lane] + _WIDTH / 2, _TOP - 0.22, name, fontsize=9, color=_QUIET, ha="center", va="center")
        _draw_frames(axes, layout)
        _draw_links(axes, layout)
        for box in drawing.boxes:
            _draw_box(axes, layout, box)
        _draw_waits(axes, layout)
        _draw_legend(axes, layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=metadata, dpi=130)


def _draw_frames(axes: Any, layout: _Layout) -> None:
    from matplotlib.patches import FancyBboxPatch

    for frame in layout.drawing.frames:
        top, bottom = layout.middles[frame.first] - _ROW / 2 - 0.14, layout.middles[frame.last] + _ROW / 2 + 0.05
        bottom += _WAIT_GAP * sum(wait.row == frame.last for wait in layout.drawing.waits)
        size = (layout.width - 0.3, bottom - top)
        axes.add_patch(FancyBboxPatch((0.15, top), *size, boxstyle=_ROUND, facecolor=_FRAME, edgecolor="none", zorder=0))
        axes.text(layout.width - 0.25, top + 0.15, f"step {frame.step}", fontsize=9, color=_QUIET, ha="right", va="center", zorder=4)


def _draw_box(axes: Any, layout: _Layout, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, edge = COLOURS[box.call.engine]
    x, y = layout.lefts[box.lane], layout.middles[box.row]
    corner = (x, y - _HEIGHT / 2)
    axes.add_patch(FancyBboxPatch(corner, _WIDTH, _HEIGHT, boxstyle=_ROUND, facecolor=fill, edgecolor=edge, linewidth=1, zorder=3))
    call = box.call
    shown = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in call.shown.items())
    small = "  ".join([f"%{box.name}", *([f"@{call.granularity}"] if call.engine != "source" else []), *([shown] if shown else [])])
    axes.text(x + 0.1, y - 0.08, call.name, fontsize=8.5, color=_INK, va="center", zorder=4)
    axes.text(x + 0.1, y + 0.1, _cut(small), fontsize=6.5, color=_QUIET, va="center", zorder=4)
    file = f"{Path(call.site.file).name}:{call.site.line}"
    axes.text(_LEFT - 0.05, y, file, fontsize=7.5, color=_QUIET, ha="right", va="center", family="monospace", zorder=4)


def _draw_links(axes: Any, layout: _Layout) -> None:
    boxes = layout.drawing.boxes
    for link, (from_y, to_y) in zip(layout.drawing.links, _ports(layout), strict=True):
        start, end = boxes[link.start], boxes[link.end]
        colour, style = _LINES[link.kind], (0, (4, 2)) if link.kind == "effect" else "-"
        x = layout.track(link)
        from_x = layout.lefts[start.lane] + (_WIDTH if start.lane < link.gutter else 0.0)
        to_x = layout.lefts[end.lane] + (_WIDTH if end.lane < link.gutter else 0.0)
        axes.plot(
            [from_x, x, x, to_x],
            [from_y, from_y, to_y, to_y],
            color=colour,
            linestyle=style,
            linewidth=1,
            zorder=2,
            solid_joinstyle="round",
        )
        sign = 1 if to_x > x else -1
        axes.fill([to_x, to_x - sign * 0.09, to_x - sign * 0.09], [to_y, to_y - 0.04, to_y + 0.04], color=colour, linewidth=0, zorder=3.5)


def _ports(layout: _Layout) -> list[tuple[float, float]]:
    """The heights at which each link leaves and enters: those of one side of a box are spread over it; a bundle leaves together."""
    sides: dict[tuple[int, bool], dict[tuple[str, str, int], float]] = {}
    keys = []
    for link in layout.drawing.links:
        start, end = layout.drawing.boxes[link.start], layout.drawing.boxes[link.end]
        leaving = ((start.row, start.lane < link.gutter), ("out", link.kind, link.gutter))
        entering = ((end.row, end.lane < link.gutter), ("in", link.kind, link.start))
        for side, port in (leaving, entering):
            sides.setdefault(side, {})[port] = 0.0
        keys.append((leaving, entering))
    for (row, _), ports in sides.items():
        # What comes in from above stands above what goes out below.
        order = sorted(ports, key=lambda port: (port[0] == "out", *port[1:]))
        for i, key in enumerate(order):
            ports[key] = layout.middles[row] + (i - (len(order) - 1) / 2) * min(0.1, 0.3 / len(order))
    return [(sides[leaving[0]][leaving[1]], sides[entering[0]][entering[1]]) for leaving, entering in keys]


def _draw_waits(axes: Any, layout: _Layout) -> None:
    for wait, y in zip(sorted(layout.drawing.waits, key=lambda wait: wait.row), layout.waits_at, strict=True):
        axes.plot([0.25, layout.width - 0.25], [y, y], color=_WAIT, linewidth=1.2, linestyle=(0, (2, 2)), zorder=5)
        axes.text(
            0.3, y, wait.text, fontsize=7.5, color=_WAIT, va="center", zorder=6,
            bbox={"facecolor": _PAPER, "edgecolor": _WAIT, "linewidth": 0.8, "boxstyle": "round,pad=0.25"},
        )  # fmt: skip


def _draw_legend(axes: Any, layout: _Layout) -> None:
    from matplotlib.patches import Rectangle

    y, x = layout.height - 0.3, 0.25
    used = dict.fromkeys(box.call.engine for box in layout.drawing.boxes)
    for engine in used:
        fill, edge = COLOURS[engine]
        axes.add_patch(Rectangle((x, y - 0.07), 0.2, 0.14, facecolor=fill, edgecolor=edge, linewidth=1))
        axes.text(x + 0.27, y, _KINDS[engine], fontsize=7.5, color=_QUIET, va="center")
        x += 1.05
    for kind, style in (("data", "-"), ("effect", (0, (4, 2)))):
        axes.plot([x, x + 0.3], [y, y], color=_LINES[kind], linestyle=style, linewidth=1)
        axes.text(x + 0.37, y, kind, fontsize=7.5, color=_QUIET, va="center")
        x += 0.85


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
