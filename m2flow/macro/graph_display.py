"""Show the macro graph: as a text listing that includes undecided conditions, and as a picture.

    Exploration --> nodes (calls, conditions, ends) --> lines                         calls_listing
    MacroGraph --> Graphviz's language --dot, where it is installed--> .svg or .png   as_dot, write_with_graphviz
    MacroGraph --place--> Drawing (lanes, rows, frames, links) --> .svg or .png       write_picture, elsewhere

Listing. Paths that agree are merged: a condition whose outcomes make the same calls is not shown, and what follows both outcomes alike
is shown once, below them. A call's place in the listing depends on what it is and works on, not on its number.

Picture without Graphviz. A row for each call, in program order, and a lane for each role, so boxes never overlap, and a horizontal line
meets no box but its ends. Vertical lines run in the gutters left of the lanes, each on a track of its own; those of one call and one kind
share theirs. Effects that follow from others are left out. Made for graphs of up to some sixty calls; larger ones become long.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from m2flow.macro.graph import Call, MacroGraph, Observation, aligned
from m2flow.macro.tracing import Exploration, ExploredPath, Look

# ---- text listing

_Row = tuple[str, str, str, str, str]
_INDENT = 4


@dataclass(frozen=True)
class _Line:
    """A call in the listing. Equal if it is the same call in the same place, whatever its number."""

    key: tuple[object, ...]
    row: _Row = field(compare=False)


@dataclass(frozen=True)
class _If:
    key: str
    question: str = field(compare=False)
    site: str
    yes: tuple[_Node, ...]
    no: tuple[_Node, ...]


@dataclass(frozen=True)
class _End:
    text: str


_Node = _Line | _If | _End


def calls_listing(exploration: Exploration) -> list[str]:
    """List the calls of all paths, as lines."""
    return _lines(_branch(exploration.paths, 0, 0))


def barriers_listing(exploration: Exploration) -> list[str]:
    """List where Python waits: the line, for what, its cost, and where the value came from in this trace. Empty if it never waits."""
    lines: list[str] = []
    for (site, why, text), looks in _barriers(exploration).items():
        path, look = looks[0]
        call = path.graph.calls[look.observation.call]
        steps = sorted({path.graph.calls[look.observation.call].step for path, look in looks} - {-1})
        lines.append(f"  {site}  {text}")
        lines.append(f"    waits for %{path.graph.names()[call.ordinal]}, of {call.name} ({call.site}){_in_steps(steps)}: {why}")
        lines.append(f"    cost: {_cost(call, look, path.graph.staleness)}")
        sources = list(dict.fromkeys(_plain(source) for _, look in looks for source in look.sources))
        asked = any(fork.num_calls >= look.num_calls for path, look in looks for fork in path.forks)
        lines += [f"    value: {source}{_consequence(source, asked)}" for source in sources]
    return lines


def bounds_listing(exploration: Exploration) -> list[str]:
    """List what was not explored, and why."""
    lines = []
    if any(path.end == "bound" for path in exploration.paths):
        lines.append("Some paths go on: a loop that asks until a value is right is followed for a few turns only.")
    if exploration.num_left:
        lines.append(f"{len(exploration.paths)} paths were followed; {exploration.num_left} more outcomes were not.")
    return lines


def _barriers(exploration: Exploration) -> dict[tuple[str, str, str], list[tuple[ExploredPath, Look]]]:
    """Group the points where Python waits by line and reason. A dataset's rows are no barrier: they are there at once."""
    found: dict[tuple[str, str, str], list[tuple[ExploredPath, Look]]] = {}
    for path in exploration.paths:
        for look in path.looks:
            site = look.observation.site
            found.setdefault((str(site), look.observation.why, site.text), []).append((path, look))
    return found


def _in_steps(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f", in step {steps[0]}" if len(steps) == 1 else f", in steps {steps[0]} to {steps[-1]}"


def _cost(call: Call, look: Look, staleness: int) -> str:
    if look.observation.lag:
        return f"what {call.name} made {look.observation.lag} steps ago is most likely there"
    cost = f"nothing after this line is known before {call.name} ends"
    if call.step >= 0 and call.engine == "train":
        return f"{cost}, so the next step can't begin beside it; .lagged({max(staleness, 1)}) looks at an earlier step instead"
    return cost


def _plain(text: str) -> str:
    """Drop the numbers that tell results of one name apart: `metrics['reward']`, not `metrics.9['reward']`."""
    return re.sub(r"(%?[A-Za-z_]\w*)\.\d+", r"\1", text)


def _consequence(source: str, asked: bool) -> str:
    if not source.endswith("is not known"):
        return ""
    return "; both outcomes of what is asked about it are followed above" if asked else "; 0.5 is taken for it, and no condition asks"


def _branch(paths: Sequence[ExploredPath], depth: int, start: int) -> tuple[_Node, ...]:
    """The nodes of paths that have agreed in their first `depth` outcomes, from a call on."""
    path = paths[0]
    if len(path.forks) == depth:
        return (*_calls(path, start, len(path.graph.calls)), *_end(path))
    fork = path.forks[depth]
    nodes = _calls(path, start, fork.num_calls)
    yes, no = (
        _branch(there, depth + 1, fork.num_calls) if there else (_End("not followed"),)
        for there in ([p for p in paths if p.forks[depth].outcome is outcome] for outcome in (True, False))
    )
    if yes == no:
        return (*nodes, *no)
    common = 0
    while common < min(len(yes), len(no)) and yes[-1 - common] == no[-1 - common]:
        common += 1
    cut = len(no) - common
    condition = _If(_plain(fork.question), fork.question, f"{fork.site}  {fork.site.text}", yes[: len(yes) - common], no[:cut])
    return (*nodes, condition, *no[cut:])


def _calls(path: ExploredPath, start: int, end: int) -> tuple[_Line, ...]:
    names = path.graph.names()
    return tuple(_Line(_key(path, call), path.graph.row(call, names)) for call in path.graph.calls[start:end])


def _key(path: ExploredPath, call: Call) -> tuple[object, ...]:
    """Key of a call by what it is and what made its inputs, without numbers."""
    makers = (path.graph.calls[ref.call] for _, ref in call.inputs)
    inputs = tuple((maker.name, str(maker.site), maker.step) for maker in makers)
    return call.name, str(call.site), call.step, repr(sorted(call.shown.items())), inputs


def _end(path: ExploredPath) -> tuple[_End, ...]:
    match path.end:
        case "unknown rows":
            return (_End("the trace ends here: what comes next depends on rows that nobody has made"),)
        case "bound":
            return (_End("goes on; it is followed no further"),)
        case "error":
            return (_End(f"ends with {path.error}"),)
    return ()


def _lines(nodes: Sequence[_Node]) -> list[str]:
    flat = list(_flat(nodes, 0))
    rows = [(row, indent) for row, indent in flat if isinstance(row, tuple)]
    printed = iter(aligned([row for row, _ in rows], [indent for _, indent in rows]))
    return [next(printed) if isinstance(row, tuple) else f"{' ' * indent}{row}".replace("\n", f"\n{' ' * indent}") for row, indent in flat]


def _flat(nodes: Sequence[_Node], indent: int) -> Iterator[tuple[_Row | str, int]]:
    for node in nodes:
        match node:
            case _Line(row=row):
                yield row, indent
            case _End(text=text):
                yield f"... {text}", indent
            case _If(question=question, site=site, yes=yes, no=no):
                yield f"if {question}:    {site}", indent
                yield from _flat(yes, indent + _INDENT) if yes else ((("no call here"), indent + _INDENT),)
                if no:
                    yield "else:", indent
                    yield from _flat(no, indent + _INDENT)


# ---- layout of the picture


@dataclass(frozen=True)
class Box:
    """The box of a call."""

    call: Call
    name: str
    """The name of its result."""
    lane: int
    row: int


@dataclass(frozen=True)
class Link:
    """A line from one call's row to another's, along a track of a gutter. Gutter i is left of lane i."""

    start: int
    end: int
    kind: Literal["data", "effect"]
    label: str
    gutter: int
    track: int


@dataclass(frozen=True)
class Frame:
    """The frame around the rows of one step."""

    step: int
    first: int
    last: int


@dataclass(frozen=True)
class Wait:
    """The mark after a row where Python waits."""

    row: int
    text: str


@dataclass(frozen=True)
class Drawing:
    """The layout of a picture. Rows and lanes are counted from 0."""

    title: str
    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    frames: tuple[Frame, ...]
    waits: tuple[Wait, ...]

    def num_tracks(self, gutter: int) -> int:
        return max((link.track + 1 for link in self.links if link.gutter == gutter), default=0)


def place(graph: MacroGraph, looks: Sequence[tuple[int, Observation]] = ()) -> Drawing:
    """Lay a graph out. `looks` are the points where Python waits, each with the number of calls made before it."""
    names = graph.names()
    keys = [_lane(call) for call in graph.calls]
    lanes = tuple(sorted(dict.fromkeys(keys), key=lambda key: (_PLACES.get(key, 1), keys.index(key))))
    boxes = tuple(Box(call, names[call.ordinal], lanes.index(_lane(call)), row) for row, call in enumerate(graph.calls))
    frames = []
    for step in dict.fromkeys(call.step for call in graph.calls if call.step >= 0):
        rows = [box.row for box in boxes if box.call.step == step]
        frames.append(Frame(step, rows[0], rows[-1]))
    waits = {(num_calls, seen.call): Wait(num_calls - 1, _waiting(seen, names)) for num_calls, seen in looks if num_calls}
    return Drawing(graph.flow, lanes, boxes, _links(graph, boxes), tuple(frames), tuple(waits.values()))


_DATASETS, _OPS = "datasets", "ops"
_PLACES = {_DATASETS: 0, _OPS: 2}
"""The first lane and the last; roles stand between, in the order of their first calls."""


def _waiting(seen: Observation, names: Mapping[int, str]) -> str:
    site = seen.site
    return f"Python waits for %{names[seen.call]}: {seen.why}    {PurePath(site.file).name}:{site.line}  {site.text}"


def _lane(call: Call) -> str:
    if call.engine == "source":
        return _DATASETS
    return _OPS if call.engine == "function" and not call.method else call.role


def _links(graph: MacroGraph, boxes: Sequence[Box]) -> tuple[Link, ...]:
    of = {box.call.ordinal: box for box in boxes}
    links = graph.links()
    needed = _not_implied(links)
    edges = [
        (of[start], of[end], kind, label)
        for start, ends in links.items()
        for end, (kind, label) in ends.items()
        if start in of and end in of and (kind == "data" or (start, end) in needed)
    ]
    bundles: dict[tuple[int, int, str], list[int]] = {}
    for start, end, kind, _ in edges:
        bundles.setdefault((_gutter(start, end), start.row, kind), [start.row]).append(end.row)
    tracks: dict[tuple[int, int, str], int] = {}
    taken: dict[int, list[int]] = {}
    for bundle, rows in sorted(bundles.items(), key=lambda item: (item[0][0], min(item[1]), max(item[1]))):
        ends = taken.setdefault(bundle[0], [])
        free = next((track for track, end in enumerate(ends) if end < min(rows)), len(ends))
        ends[free : free + 1] = [max(rows)]
        tracks[bundle] = free
    return tuple(
        Link(start.row, end.row, kind, label, gutter := _gutter(start, end), tracks[gutter, start.row, kind])
        for start, end, kind, label in edges
    )


def _not_implied(links: Mapping[int, Iterable[int]]) -> set[tuple[int, int]]:
    """The transitive reduction: edges whose end can't be reached from their start by others. Each goes to a larger number."""
    needed: set[tuple[int, int]] = set()
    reached: dict[int, int] = {}  # By node: a bit for each that it leads to.
    for start in sorted(links, reverse=True):
        found = 0
        for end in sorted(links[start]):
            if not found >> end & 1:
                needed.add((start, end))
                found |= 1 << end | reached.get(end, 0)
        reached[start] = found
    return needed


def _gutter(start: Box, end: Box) -> int:
    """Left of the end's lane, or right of it if the line comes from there."""
    return end.lane + 1 if start.lane > end.lane else end.lane


# ---- Graphviz


def as_dot(graph: MacroGraph) -> str:
    """The graph in Graphviz's language: steps as clusters, effects dashed."""
    names = graph.names()
    lines = [f"digraph {_quoted(graph.flow)} {{", "  rankdir=TB;", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for step in dict.fromkeys(call.step for call in graph.calls):
        inside = "  " if step >= 0 else ""
        lines += [f"  subgraph cluster_{step} {{", f'    label="step {step}";'] if step >= 0 else []
        for call in graph.calls:
            if call.step == step:
                label = f"{call.name}\\n%{names[call.ordinal]}  @{call.granularity}\\n{call.site}"
                lines.append(f'{inside}  c{call.ordinal} [label={_quoted(label)}, fillcolor="{COLOURS[call.engine][0]}"];')
        lines += ["  }"] if step >= 0 else []
    for start, ends in graph.links().items():
        for end, (kind, label) in ends.items():
            style = ", style=dashed" if kind == "effect" else ""
            lines.append(f"  c{start} -> c{end} [label={_quoted(label)}{style}];")
    for seen in {seen.call: seen for seen in graph.observations}.values():
        lines.append(f'  c{seen.call} [color="#cf222e", penwidth=2, xlabel={_quoted(f"Python waits: {seen.why} {seen.site}")}];')
    return "\n".join([*lines, "}"])


def write_with_graphviz(graph: MacroGraph, path: str | Path) -> bool:
    """Lay a graph out with Graphviz's `dot` and draw to `path`, as its suffix says (.svg or .png); False: it is not installed.

    Raises:
        OSError: it can't write there, or can't draw such a file.
    """
    dot, path = shutil.which("dot"), Path(path)
    if dot is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [dot, f"-T{path.suffix[1:]}", "-o", str(path)]
    done = subprocess.run(command, input=as_dot(graph), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"Graphviz says: {(done.stderr.strip() or 'nothing').splitlines()[0]}")
    return True


COLOURS = {
    "source": ("#f6f8fa", "#8c959f"),
    "rollout": ("#ddf4ff", "#0072b2"),
    "function": ("#e6f6ef", "#009e73"),
    "train": ("#fdeee0", "#d55e00"),
}
"""By kind of engine: fill and edge, after Okabe and Ito's colours, which colour-blind readers tell apart."""


def _quoted(text: str) -> str:
    return '"' + text.replace('"', r"\"") + '"'


_INK, _QUIET, _FRAME, _WAIT, _PAPER = "#1f2328", "#656d76", "#f1f4f7", "#cf222e", "#ffffff"
_LINES = {"data": "#57606a", "effect": "#bc6c00"}
_KINDS = {"source": "dataset", "rollout": "generation", "function": "function", "train": "training"}

# Sizes in inches.
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.5, 0.9, 0.95, 0.75
_WIDTH, _HEIGHT, _ROW = 2.5, 0.4, 0.54
_GUTTER, _TRACK = 0.28, 0.11
_STEP_GAP, _WAIT_GAP = 0.3, 0.26
_CHARACTERS = 42
"""Characters of the small print that fit a box."""
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


# ---- drawing


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
        # Links that enter from above get ports above those that leave below.
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
