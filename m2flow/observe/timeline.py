"""The schedule of a run as one HTML file: what each engine did when, and every sample's life below.

The page holds its data, its script and its style, asks no network, and needs no server. Bars have the colour of the line of the flow
that caused them, so the same call has the same colour in every step. The script (`timeline_script.html.j2`) draws on a canvas and
skips what is narrower than a pixel, so that a hundred thousand spans stay fluid; beyond `max_spans`, neighbouring decode steps of
one call are merged here, then samples are thinned, and the page says so.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from m2flow.observe.spans import Span, SpanName, sample_of
from m2flow.observe.store import Trace, read_trace
from m2flow.observe.summary import busy_seconds_by_lane, concurrent_seconds, wall_seconds
from m2flow.samples import SampleId

_ENGINE_ORDER = ("rollout", "function", "train")
_SHOWN_APART = frozenset({"call", "step", "version", "num_samples", "num_tokens", "flow_line", "label", "sample", "samples"})
_MACHINERY = (SpanName.WEIGHTS_PUBLISH, SpanName.WEIGHTS_LOAD, SpanName.SWITCH, SpanName.SEND, SpanName.WAIT)
"""What is drawn in grey, whatever call it serves."""


class _Site(msgspec.Struct):
    """A line of the flow; or, for spans that name none, the kind of work."""

    label: str
    line: str
    kind: str
    """`call`, `machinery` or `idle`."""


class _Lane(msgspec.Struct):
    """A horizontal band of the page: an engine's work, or its samples' lives."""

    worker: str
    engine: str
    kind: str
    """`work` or `samples`."""
    busy: float
    """Share of the wall time; 0 for samples."""
    rows: list[tuple[int, int]]
    """[first, last) positions in the columns; within a row, spans are in order and disjoint."""


@dataclass
class _Columns:
    """One entry a span; times in microseconds since the first span, -1 where there is no number."""

    start: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    site: list[int] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    num_samples: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sample: list[int | str] = field(default_factory=list)
    """The identity as `p17/3`, or 0."""
    more: list[dict[str, object] | int] = field(default_factory=list)
    """Other attributes, or 0."""


def write_timeline(run_dir: str | Path, path: str | Path, *, max_spans: int = 400_000) -> None:
    """Write the timeline of a run, live or ended, to `path`. A run without spans has a page that says so."""
    import jinja2

    run_dir, path = Path(run_dir), Path(path)
    trace = read_trace(run_dir)
    trace = Trace(_settled(trace.spans), trace.counts, trace.num_lost_bytes)
    spans, notices = _bounded(trace.spans, max_spans)
    if trace.num_lost_bytes:
        notices.append(f"The trace ends in {trace.num_lost_bytes:,} bytes that could not be read.")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("timeline.html.j2").render(
        run=run_dir.resolve().name,
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(trace.spans[0].start_ns // 10**9)) if trace.spans else "",
        figures=_figures(trace),
        busy=_busy_shares(trace.spans),
        notices=notices,
        num_spans=len(spans),
        # Inside a script element only "<" can end it or open a comment; in JSON it occurs in strings alone.
        data=msgspec.json.encode(_page_data(spans)).decode().replace("<", "\\u003c"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _page_data(spans: Sequence[Span]) -> dict[str, object]:
    origin_ns = min((span.start_ns for span in spans), default=0)
    sites, site_of = _sites(spans)
    names = sorted({span.name for span in spans})
    name_of = {name: position for position, name in enumerate(names)}
    columns = _Columns()
    lanes = []
    busy = _busy_shares(spans)
    for (worker, engine, kind), members in _by_lane(spans):
        rows = []
        for row in _disjoint_rows(members):
            first = len(columns.start)
            for span in row:
                _append(columns, span, origin_ns, name_of[span.name], site_of[_site_key(span)])
            rows.append((first, len(columns.start)))
        lanes.append(_Lane(worker, engine, kind, busy.get((worker, engine), 0.0) if kind == "work" else 0.0, rows))
    end_ns = max((span.end_ns for span in spans), default=0)
    return {
        "total": (end_ns - origin_ns) // 1000,
        "lanes": lanes,
        "sites": sites,
        "names": names,
        "columns": columns,
        "steps": [(step, (start - origin_ns) // 1000) for step, start in _step_starts(spans)],
        "versions": [(version, (at_ns - origin_ns) // 1000) for version, at_ns in _version_times(spans)],
    }


def _append(columns: _Columns, span: Span, origin_ns: int, name: int, site: int) -> None:
    def number(key: str) -> int:
        value = span.attributes.get(key)
        return value if type(value) is int else -1

    columns.start.append((span.start_ns - origin_ns) // 1000)
    columns.duration.append((span.end_ns - span.start_ns) // 1000)
    columns.name.append(name)
    columns.site.append(site)
    columns.call.append(number("call"))
    columns.step.append(number("step"))
    columns.version.append(number("version"))
    columns.num_samples.append(number("num_samples"))
    columns.num_tokens.append(number("num_tokens"))
    sample = sample_of(span)
    columns.sample.append(0 if sample is None else str(SampleId.unpack(sample)))
    hidden = _SHOWN_APART - {"flow_line"} if span.name in _MACHINERY else _SHOWN_APART
    more: dict[str, object] = {key: value for key, value in span.attributes.items() if key not in hidden and value is not None}
    columns.more.append(more or 0)


def _site_key(span: Span) -> tuple[str, str]:
    if span.name in _MACHINERY:
        return "", span.name
    line, label = span.attributes.get("flow_line"), span.attributes.get("label")
    return (str(line), "") if line else ("", str(label or span.lane[1]))


def _sites(spans: Iterable[Span]) -> tuple[list[_Site], dict[tuple[str, str], int]]:
    """The sites in order of their first call, lines of the flow first."""
    first: dict[tuple[str, str], tuple[int, int]] = {}
    found: dict[tuple[str, str], _Site] = {}
    for order, span in enumerate(spans):
        key = _site_key(span)
        call = span.attributes.get("call")
        rank = (call if type(call) is int else 1 << 60, order)
        first[key] = min(rank, first.get(key, rank))
        if key not in found or not found[key].label:
            found[key] = _site(span, key)
    kinds = ("call", "machinery", "idle")
    keys = sorted(found, key=lambda key: (kinds.index(found[key].kind), first[key]))
    return [found[key] for key in keys], {key: position for position, key in enumerate(keys)}


def _site(span: Span, key: tuple[str, str]) -> _Site:
    if span.name in _MACHINERY:
        return _Site(span.name, "", "machinery" if span.is_work else "idle")
    return _Site(str(span.attributes.get("label") or key[1]), key[0], "call")


def _by_lane(spans: Iterable[Span]) -> list[tuple[tuple[str, str, str], list[Span]]]:
    """Work by worker and engine, then the samples' lives by worker."""
    lanes: defaultdict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[*span.lane, "samples" if span.name == SpanName.SAMPLE else "work"].append(span)

    def rank(lane: tuple[str, str, str]) -> tuple[object, ...]:
        worker, engine, kind = lane
        engines = sorted(_engine_rank(other) for owner, other, _ in lanes if owner == worker)
        return kind == "samples", engines[0], _natural(worker), _engine_rank(engine)

    return sorted(lanes.items(), key=lambda item: rank(item[0]))


def _disjoint_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """As few rows as can hold the spans without overlap; of spans that start together, points come first, then the longest."""
    rows: list[list[Span]] = []
    running: list[tuple[int, int]] = []
    free: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns > span.start_ns, -span.end_ns)):
        while running and running[0][0] <= span.start_ns:
            heapq.heappush(free, heapq.heappop(running)[1])
        row = heapq.heappop(free) if free else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        heapq.heappush(running, (span.end_ns, row))
    return rows


def _step_starts(spans: Iterable[Span]) -> list[tuple[int, int]]:
    starts: dict[int, int] = {}
    for span in spans:
        step = span.attributes.get("step")
        if type(step) is int and step >= 0 and (span.is_work or span.name == SpanName.SAMPLE):
            starts[step] = min(span.start_ns, starts.get(step, span.start_ns))
    return sorted(starts.items())


def _version_times(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """When each version of the weights was first published; where none was published, first loaded."""
    times: dict[str, dict[int, int]] = {SpanName.WEIGHTS_PUBLISH: {}, SpanName.WEIGHTS_LOAD: {}}
    for span in spans:
        version = span.attributes.get("version")
        if span.name in times and type(version) is int:
            known = times[span.name]
            known[version] = min(span.end_ns, known.get(version, span.end_ns))
    return sorted((times[SpanName.WEIGHTS_LOAD] | times[SpanName.WEIGHTS_PUBLISH]).items())


def _busy_shares(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    wall_s = wall_seconds(spans)
    return {lane: seconds / wall_s if wall_s else 0.0 for lane, seconds in busy_seconds_by_lane(spans).items()}


def _figures(trace: Trace) -> list[tuple[str, str, str]]:
    """The header: name, value, what it means."""
    spans = trace.spans
    if not spans:
        return []
    wall_s = wall_seconds(spans)
    lives = [span for span in spans if span.name == SpanName.SAMPLE]
    lengths = [length for span in lives if type(length := span.attributes.get("length")) is int]
    figures = [("Steps", f"{len(_step_starts(spans)):,}", ""), ("Wall time", _duration(wall_s), "from the first span to the last")]
    if lives:
        figures.append(("Samples", f"{len(lives):,}", "lives in rollout engines"))
    if lengths:
        figures.append(("Tokens", f"{sum(lengths):,}", "the sum of the samples' lengths"))
    overlap = concurrent_seconds(spans) / wall_s if wall_s else 0.0
    figures.append(("Overlap", f"{overlap:.0%}", "share of the wall time in which at least two lanes worked"))
    return figures


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _settled(spans: list[Span]) -> list[Span]:
    """Where a worker has one engine, what names none (waiting, sending, switching) is drawn on that engine's lane."""
    engines: defaultdict[str, set[str]] = defaultdict(set)
    for span in spans:
        engines[span.lane[0]].add(span.lane[1])
    only = {worker: min(found - {"worker"}) for worker, found in engines.items() if len(found) == 2 and "worker" in found}
    return [
        msgspec.structs.replace(span, track=f"{span.lane[0]}/{only[span.lane[0]]}")
        if span.lane[1] == "worker" and span.lane[0] in only
        else span
        for span in spans
    ]


def _bounded(spans: list[Span], max_spans: int) -> tuple[list[Span], list[str]]:
    """At most about `max_spans` spans: decode steps of one call that no screen could tell apart merge; then samples are thinned."""
    if len(spans) <= max_spans:
        return spans, []
    gap_ns = round(wall_seconds(spans) * 1e9) // 20_000
    merged: list[Span] = []
    last: dict[tuple[str, object], int] = {}
    for span in spans:
        key = (span.track, span.attributes.get("call"))
        previous = last.get(key, -1)
        if span.name == SpanName.ROLLOUT_STEP:
            if previous >= 0 and span.start_ns - merged[previous].end_ns <= gap_ns:
                merged[previous] = _joined(merged[previous], span)
                continue
            last[key] = len(merged)
        merged.append(span)
    notices = [f"{len(spans) - len(merged):,} decode steps were merged with their neighbours."]
    if len(merged) > max_spans:
        num_lives = sum(span.name == SpanName.SAMPLE for span in merged)
        every = max(2, -(-num_lives // max(1, max_spans - (len(merged) - num_lives))))
        kept, seen = [], 0
        for span in merged:
            seen += span.name == SpanName.SAMPLE
            if span.name != SpanName.SAMPLE or seen % every == 0:
                kept.append(span)
        notices.append(f"{len(merged) - len(kept):,} of {num_lives:,} samples are not drawn.")
        merged = kept
    return merged, notices


def _joined(a: Span, b: Span) -> Span:
    attributes = dict(a.attributes)
    mine, other = attributes.get("num_tokens"), b.attributes.get("num_tokens")
    if isinstance(mine, int) and isinstance(other, int):
        attributes["num_tokens"] = mine + other
    return Span(a.track, a.name, a.start_ns, max(a.end_ns, b.end_ns), attributes)


def _engine_rank(engine: str) -> tuple[int, str]:
    return (_ENGINE_ORDER.index(engine) if engine in _ENGINE_ORDER else len(_ENGINE_ORDER)), engine


def _natural(name: str) -> tuple[str, int, str]:
    """`rollout-10` after `rollout-9`."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name
