"""What a trace viewer draws of a run: which span on which thread, which lives, and the way of each sample.

    Trace --Drawn--> slices on threads, lives, counters, chains

Each engine has a thread; trainers of two roles in one worker are two engines. Slices of a thread must nest: spans of one engine that
overlap without nesting (two threads recorded them) go to further threads. The way of a sample leads from its last life to each function
call and micro-batch that names it in its `samples`, in the order of their starts, and from a micro-batch to the optimiser step that it
went into. What began before the life was over, by more than the clocks' error, is no part of it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_ENGINES_OF_ROLES = ("rollout", "train")


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
        self.threads: dict[tuple[int, int], str] = {}
        """The name of each thread, by pid and tid: its engine, with the role where a worker has several engines of that kind."""
        self.slices = [*self._threads(steps), *self._threads(others)]
        """In the order in which those of each thread begin, an outer one before those in it."""
        self.versions = list(_versions(self.slices))
        """When each version of a role's weights was there: as it was published, or as an engine of the trainer's own process took it."""
        self.origin_ns = min([*(span.start_ns for span in trace.spans), *(count.at_ns for count in trace.counts)], default=0)
        self.num_left_out = 0
        """Samples of function calls and micro-batches whose life is not known, or was not over."""
        self.chains = list(self._chains())

    @property
    def num_arrows(self) -> int:
        return sum(len(chain.then) for chain in self.chains)

    def _threads(self, spans: Iterable[Span]) -> Iterator[Slice]:
        """Give every span a thread of its worker, so that the spans of a thread nest; `tid` is 10,000 x engine + overflow."""
        lanes: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in spans:
            lanes[span.lane].append(span)
        engines: defaultdict[str, dict[tuple[str, str], list[Span]]] = defaultdict(dict)
        for (worker, engine), lane in lanes.items():
            for role, mine in _by_role(engine, lane).items():
                engines[worker][engine, role] = mine
        for worker, parts in sorted(engines.items()):
            for number, (engine, role) in enumerate(sorted(parts, key=lambda part: (_engine_rank(part[0]), part[1])), start=1):
                stacks: list[list[int]] = []
                for span in sorted(parts[engine, role], key=lambda span: (span.start_ns, -span.end_ns)):
                    for thread, stack in enumerate(stacks):  # noqa: B007
                        while stack and stack[-1] <= span.start_ns:
                            stack.pop()
                        if not stack or span.end_ns <= stack[-1]:
                            break
                    else:
                        thread = len(stacks)
                        stacks.append([])
                        name = f"{engine} {role}".rstrip()
                        self.threads[self.pids[worker], 10_000 * number + thread] = f"{name} +{thread}" if thread else name
                    stacks[thread].append(span.end_ns)
                    yield Slice(span, self.pids[worker], 10_000 * number + thread)

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


def _by_role(engine: str, lane: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans of one engine's kind by their role; all together where there is one role, or where the kind has none."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in lane:
        label = span.attributes.get("label") if engine in _ENGINES_OF_ROLES else ""
        found[label.partition(".")[0] if isinstance(label, str) else ""].append(span)
    return found if len(found.keys() - {""}) > 1 else {"": list(lane)}


def _versions(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice]]:
    """As `RunTrace.versions`: of a role that publishes nothing, the first load of each version."""
    found: dict[SpanName, dict[tuple[object, int], Slice]] = {SpanName.WEIGHTS_PUBLISH: {}, SpanName.WEIGHTS_LOAD: {}}
    for piece in slices:
        version, first = piece.span.attributes.get("version"), found.get(piece.span.name)  # type: ignore[call-overload]
        if first is None or not isinstance(version, int):
            continue
        key = piece.span.attributes.get("label"), version
        if key not in first or piece.span.end_ns < first[key].span.end_ns:
            first[key] = piece
    published = {role for role, _ in found[SpanName.WEIGHTS_PUBLISH]}
    for pieces in found.values():
        for (role, version), piece in pieces.items():
            if role not in published or piece.span.name == SpanName.WEIGHTS_PUBLISH:
                yield version, piece


def _step_spans(spans: Iterable[Span]) -> list[Span]:
    """A span for each step, from the first start to the last end of what names it; what is outside of the flow's loop has none."""
    found: dict[int, tuple[int, int]] = {}
    for span in spans:
        step = span.attributes.get("step")
        if isinstance(step, int) and step >= 0:
            start, end = found.get(step, (span.start_ns, span.end_ns))
            found[step] = (min(start, span.start_ns), max(end, span.end_ns))
    return [Span(f"{STEPS}/steps", f"step {step}", start, end, {"step": step}) for step, (start, end) in sorted(found.items())]


def _engine_rank(engine: str) -> tuple[int, str]:
    return (_ENGINE_ORDER.index(engine) if engine in _ENGINE_ORDER else len(_ENGINE_ORDER)), engine
