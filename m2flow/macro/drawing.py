"""Where each call of a macro graph stands in a picture, and which way the lines run.

    MacroGraph --place--> Drawing (lanes, rows, frames, links) --m2flow.macro.picture--> .svg or .png

A row for each call, in the order of the program, and a lane for each role: so boxes never overlap, and a line that runs level meets
no box but its ends. Lines run down in the gutters left of the lanes, each on a track of its own; those of one call and one kind
share theirs. Effects that follow from others are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from m2flow.macro.graph import Call, MacroGraph, Observation


@dataclass(frozen=True)
class Box:
    """A call."""

    call: Call
    name: str
    """Of its result."""
    lane: int
    row: int


@dataclass(frozen=True)
class Link:
    """From one call's row to another's, down a track of a gutter. Gutter i is left of lane i."""

    start: int
    end: int
    kind: Literal["data", "effect"]
    label: str
    gutter: int
    track: int


@dataclass(frozen=True)
class Frame:
    """The rows of one step."""

    step: int
    first: int
    last: int


@dataclass(frozen=True)
class Wait:
    """Python waits after a row."""

    row: int
    text: str


@dataclass(frozen=True)
class Drawing:
    """All of it. Rows and lanes are counted from 0."""

    title: str
    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    frames: tuple[Frame, ...]
    waits: tuple[Wait, ...]

    def num_tracks(self, gutter: int) -> int:
        return max((link.track + 1 for link in self.links if link.gutter == gutter), default=0)


def place(graph: MacroGraph, looks: Sequence[tuple[int, Observation]] = ()) -> Drawing:
    """The drawing of a graph. `looks` are the points where Python waits, each with the number of calls made before it."""
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
    import networkx as nx

    of = {box.call.ordinal: box for box in boxes}
    whole = graph.digraph()
    needed = set(nx.transitive_reduction(whole).edges)
    edges = [
        (of[start], of[end], data["kind"], data["label"])
        for start, end, data in whole.edges(data=True)
        if start in of and end in of and (data["kind"] == "data" or (start, end) in needed)
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


def _gutter(start: Box, end: Box) -> int:
    """Left of the end's lane, or right of it if the line comes from there."""
    return end.lane + 1 if start.lane > end.lane else end.lane


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
    for start, end, data in graph.digraph().edges(data=True):
        style = ", style=dashed" if data["kind"] == "effect" else ""
        lines.append(f"  c{start} -> c{end} [label={_quoted(data['label'])}{style}];")
    for seen in {seen.call: seen for seen in graph.observations}.values():
        lines.append(f'  c{seen.call} [color="#cf222e", penwidth=2, xlabel={_quoted(f"Python waits: {seen.why} {seen.site}")}];')
    return "\n".join([*lines, "}"])


COLOURS = {
    "source": ("#f6f8fa", "#8c959f"),
    "rollout": ("#ddf4ff", "#0072b2"),
    "function": ("#e6f6ef", "#009e73"),
    "train": ("#fdeee0", "#d55e00"),
}
"""By kind of engine: fill and edge, after Okabe and Ito's colours, which colour-blind readers tell apart."""


def _quoted(text: str) -> str:
    return '"' + text.replace('"', r"\"") + '"'
