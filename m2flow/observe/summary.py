"""Numbers from spans: who was busy, and what ran at the same time as what.

All are lengths of unions of intervals, so nested or doubled spans count once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from m2flow.observe.spans import Span

_Key = TypeVar("_Key", bound=Hashable)
Predicate = Callable[[Span], bool]
Interval = tuple[int, int]
"""[start, end) in ns."""


def busy_seconds(spans: Iterable[Span], during: Interval | None = None) -> dict[str, float]:
    """Seconds in which each track worked, of that interval if one is given. Waiting, sending and samples' lives are not work; a track
    without work has 0."""
    work = _work_by(spans, lambda span: span.track)
    return {track: _length(found if during is None else _intersection(found, [during])) / 1e9 for track, found in work.items()}


def overlap_seconds(spans: Iterable[Span], a: Predicate, b: Predicate) -> float:
    """Seconds in which a span that fits `a` and a span that fits `b` both ran.

    A span that fits both overlaps with itself: predicates are meant to be disjoint.
    """
    spans = list(spans)
    return _length(_intersection(_union(map(_interval, filter(a, spans))), _union(map(_interval, filter(b, spans))))) / 1e9


def _work_by(spans: Iterable[Span], key: Callable[[Span], _Key]) -> dict[_Key, list[Interval]]:
    found: defaultdict[_Key, list[Interval]] = defaultdict(list)
    for span in spans:
        work = found[key(span)]
        if span.is_work:
            work.append(_interval(span))
    return {name: _union(intervals) for name, intervals in found.items()}


def _interval(span: Span) -> Interval:
    return span.start_ns, span.end_ns


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order, covering the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
