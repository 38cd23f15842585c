"""What a trace viewer draws of a run: which span on which thread, which lives, and the way of each sample.

    Trace --Drawn--> slices on threads, lives, counters, chains

Slices of a thread must nest. Spans of one engine that overlap without nesting (two threads recorded them) go to further threads. The
way of a sample leads from its last life to each function call and micro-batch that names it in its `samples`, in the order of their starts,
and from a micro-batch to the optimiser step that it went into. What began before the life was over, by more than the clocks' error, is no
part of it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from m2flow.observe.spans import Span, SpanName, sample_of, samples_of
from m2flow.observe.store import Trace
from m2flow.samples import SampleId

STEPS = "flow"
"""The worker whose thread shows the steps."""
_CLOCK_ERROR_NS = 1_000_000
"""By how much an effect may seem to come before its cause."""
_ENGINE_ORDER = ("rollout", "function", "train")


class Slice(NamedTuple):
    """A span on the thread it is drawn on."""

    span: Span
    pid: int
    tid: int


@dataclass(frozen=True)
class Chain:
    """The way of one sample."""

    sample: int
    life: Span
    then: list[Slice]
    """What was done with it, in order; at least one."""


@final
class Drawn:
    """All that is drawn of one run."""

    def __init__(self, trace: Trace, devices: Mapping[str, str]) -> None:
        self.trace = trace
        self.workers = sorted({span.lane[0] for span in trace.spans} | {count.track.partition("/")[0] for count in trace.counts})
        steps = _step_spans(trace.spans)
        self.pids = {**({STEPS: 1} if steps else {}), **{worker: pid for pid, worker in enumerate(self.workers, start=2)}}
        self.titles = {worker: f"{worker} ({devices[worker]})" if devices.get(worker) else worker for worker in self.pids}
        self.lives = [span for span in trace.spans if span.name == SpanName.SAMPLE]
        others = (span for span in trace.spans if span.name != SpanName.SAMPLE)
        self.slices = [*_threads(steps, self.pids), *_threads(others, self.pids)]
        """In the order in which those of each thread begin, an outer one before those in it."""
        self.origin_ns = min([*(span.start_ns for span in trace.spans), *(count.at_ns for count in trace.counts)], default=0)
        self.num_left_out = 0
        """Samples of function calls and micro-batches whose life is not known, or was not over."""
        self.chains = list(self._chains())

    @property
    def threads(self) -> dict[tuple[int, int], str]:
        """The name of each thread, by pid and tid."""
        found = {(pid, tid): span.lane[1] for span, pid, tid in self.slices}
        return {(pid, tid): name if tid % 10_000 == 0 else f"{name} +{tid % 10_000}" for (pid, tid), name in sorted(found.items())}

    @property
    def num_arrows(self) -> int:
        return sum(len(chain.then) for chain in self.chains)

    def _chains(self) -> Iterator[Chain]:
        ends = {sample: span for span in sorted(self.lives, key=lambda span: span.end_ns) if (sample := sample_of(span)) is not None}
        updates: defaultdict[tuple[int, object], list[Slice]] = defaultdict(list)
        for piece in self.slices:
            if piece.span.name == SpanName.TRAIN_APPLY:
                updates[piece.pid, piece.span.attributes.get("call")].append(piece)
        starts = {key: [piece.span.start_ns for piece in pieces] for key, pieces in updates.items()}
        found: defaultdict[int, list[Slice]] = defaultdict(list)
        for piece in self.slices:
            update = None
            if piece.span.name == SpanName.TRAIN_ACCUMULATE:
                key = piece.pid, piece.span.attributes.get("call")
                at = bisect.bisect_left(starts.get(key, []), piece.span.end_ns)
                update = updates[key][at] if at < len(updates[key]) else None
            for sample in samples_of(piece.span):
                life = ends.get(sample)
                if life is None or piece.span.start_ns < life.end_ns - _CLOCK_ERROR_NS:
                    self.num_left_out += 1
                    continue
                mine = found[sample]
                mine.append(piece)
                if update is not None and update not in mine:
                    mine.append(update)
        for sample, pieces in found.items():
            yield Chain(sample, ends[sample], sorted(pieces, key=lambda piece: piece.span.start_ns))


def told(span: Span) -> dict[str, object]:
    """What a viewer says of a span, with a sample as people write it."""
    args: dict[str, object] = dict(span.attributes)
    sample = sample_of(span)
    if sample is not None:
        args["sample"] = str(SampleId.unpack(sample))
    return args


def _threads(spans: Iterable[Span], pids: Mapping[str, int]) -> list[Slice]:
    """Give every span a thread of its worker, so that the spans of a thread nest; `tid` is 10,000 x engine + overflow."""
    lanes: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    slices = []
    for (worker, engine), lane in sorted(lanes.items()):
        engines = sorted({name for owner, name in lanes if owner == worker}, key=_engine_rank)
        first_tid = 10_000 * (engines.index(engine) + 1)
        stacks: list[list[int]] = []
        for span in sorted(lane, key=lambda span: (span.start_ns, -span.end_ns)):
            for thread, stack in enumerate(stacks):  # noqa: B007
                while stack and stack[-1] <= span.start_ns:
                    stack.pop()
                if not stack or span.end_ns <= stack[-1]:
                    break
            else:
                thread = len(stacks)
                stacks.append([])
            stacks[thread].append(span.end_ns)
            slices.append(Slice(span, pids[worker], first_tid + thread))
    return slices


def _step_spans(spans: Iterable[Span]) -> list[Span]:
    """A span for each step, from the first start to the last end of what names it."""
    found: dict[int, tuple[int, int]] = {}
    for span in spans:
        step = span.attributes.get("step")
        if isinstance(step, int):
            start, end = found.get(step, (span.start_ns, span.end_ns))
            found[step] = (min(start, span.start_ns), max(end, span.end_ns))
    return [Span(f"{STEPS}/steps", f"step {step}", start, end, {"step": step}) for step, (start, end) in sorted(found.items())]


def _engine_rank(engine: str) -> tuple[int, str]:
    return (_ENGINE_ORDER.index(engine) if engine in _ENGINE_ORDER else len(_ENGINE_ORDER)), engine
