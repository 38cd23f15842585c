"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

    run directory --write_trace--> FILE.pftrace       Perfetto's own packets (`m2flow.observe.perfetto_packets`)
                               --> FILE.json, .json.gz    the Trace Event Format (`m2flow.observe.perfetto_json`), for both viewers

Both say the same (`m2flow.observe.perfetto_tracks`): a group of tracks for each worker, named with the devices that it has, and in it a
track for each engine with a slice for each span; the samples' lives as asynchronous slices; counters; an instant for each version of the
weights; and for each sample arrows from its life to the reward, on to the micro-batch that trained on it, and on to the update that this
went into.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

from m2flow.observe import perfetto_json, perfetto_packets
from m2flow.observe.perfetto_tracks import Drawn
from m2flow.observe.store import read_trace

PACKETS = (".pftrace", ".perfetto-trace")


def write_trace(run_dir: str | Path, path: str | Path, *, devices: Mapping[str, str] | None = None) -> None:
    """Write the run's trace to `path`, in the format that its name asks for; one that ends in `.gz` is compressed.

    Args:
        devices: of workers, by name; they stand beside the workers' names.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = Drawn(read_trace(run_dir), devices or {})
    write = perfetto_packets.write if Path(path.name.removesuffix(".gz")).suffix in PACKETS else perfetto_json.write
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
                write(drawn, cast(IO[bytes], file))
        else:
            write(drawn, raw)
    partial.replace(path)
