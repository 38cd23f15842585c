"""A run as one file: the page with everything that it would ask a server for.

    run directory --write_page--> FILE.html

Bounded, so that it can be mailed: of a long run the schedule is sent at as much detail as some hundred thousand bars have, and texts of
samples up to some megabytes, evenly over the run. The page says what was left out.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec

from m2flow.micro.viewing.page import exported_page
from m2flow.micro.viewing.run_view import RunView
from m2flow.micro.viewing.sample_page import sample_pages
from m2flow.micro.viewing.samples_table import Columns
from m2flow.micro.viewing.schedule import LaneWindow
from m2flow.samples import SampleId

_MOST_BARS = 150_000
_MOST_TEXT_BYTES = 4 << 20
_MOST_TEXTS = 600
_WIDTHS = (0, 65536, 32768, 16384, 8192, 4096, 2048)
"""0: every bar as it is."""


def write_page(run_dir: Path, path: Path) -> None:
    """Write the file."""
    view = RunView(run_dir, run_dir.resolve().name)
    while view.loading(60.0) is not None:
        pass
    summary = view.summary()
    samples = view.samples()
    lanes = list(range(len(summary.lanes)))
    expanded = [at for at, lane in enumerate(summary.lanes) if lane.num_rows["life"]]
    for width in _WIDTHS:
        window = view.window(0, summary.total + 1, width, lanes, expanded)
        if _num_bars(window) <= _MOST_BARS:
            break
    data = {
        "summary": summary,
        "schedule": {"lanes": window, "width": width},
        "samples": samples,
        "texts": dict(_texts(view, samples)),
        "graph": view.graph(),
        "training": view.training(),
        "health": view.health(),
        "analysis": view.analysis(),
        "logs": {worker: view.log(worker)[-20_000:] for worker in view.health().logs},
    }
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), 6, mtime=0)).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(exported_page(packed), encoding="utf-8")


def _num_bars(window: list[LaneWindow]) -> int:
    rows = [row for lane in window for part in (lane.work, lane.wait, lane.life) for row in part]
    return sum(len(row["s"]) for row in rows)


def _texts(view: RunView, samples: Columns) -> Iterator[tuple[str, object]]:
    """Samples with their texts, evenly over the run, until there is no room for more."""
    if not view.trace.calls.has_ledger:
        return
    room, every = _MOST_TEXT_BYTES, max(1, -(-len(samples.call) // _MOST_TEXTS))
    chosen = zip(samples.call[::every], samples.prompt[::every], samples.member[::every], strict=True)
    for page in sample_pages(view.run_dir, [SampleId(*who).pack() for who in chosen]):
        room -= len(msgspec.json.encode(page))
        if room < 0:
            return
        yield f"{page.call}/{page.prompt}/{page.member}", page
