"""What a run's trace says of its work: each decode step, micro-batch and function call with its size and its time.

    spans, ledger --Observed.of_run--> sizes and seconds, by engine --(m2flow.micro.costs.measuring)--> constants

A span says when; the ledger says how long samples are. What ran in a decode step follows from both: a sample of L tokens that ended with
step e was read in at step e - L + 1 and got a token in each step from there. So a trace of any run will do, and recording it costs
the run nothing more. Limits: a generation that was aborted, or moved between engines, leaves steps whose batch is not known; they are
left out, and so is the first step of the flow's loop, in which memory is touched and code is loaded for the first time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2flow.micro.costs.batches import Cover, batches_of, number
from m2flow.micro.record.ledger import read_token_counts
from m2flow.observe.spans import Span, SpanName, samples_of
from m2flow.observe.store import read_spans
from m2flow.samples import group_key

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

KINDS = ("rollout", "train", "function")


@dataclass(frozen=True, eq=False)
class DecodeSteps:
    """The steps of one engine on one worker, [K] each."""

    decoding: IntArray
    """Samples that got a token from their cache."""
    context: IntArray
    """Tokens in their caches, of all together."""
    entered: IntArray
    """Samples that were read in."""
    prefill: IntArray
    """Tokens of their prompts, each prompt once."""
    seconds: FloatArray
    beside: dict[str, FloatArray]
    """Kind of engine -> share of the step in which one worked on another worker."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Micro-batches of one role on one worker, [K] each."""

    num_samples: IntArray
    tokens: IntArray
    shared: IntArray
    """Of these tokens, those of a prompt that a sample of the same group has too: an engine may put them through the model once."""
    squares: FloatArray
    """Sum over the samples of the square of their tokens."""
    seconds: FloatArray
    beside: dict[str, FloatArray]


@dataclass(frozen=True, eq=False)
class Leavings:
    """Samples that left a rollout engine together, [K] each."""

    num_samples: IntArray
    seconds: FloatArray
    """Beyond what lies between two steps anyway."""
    between_s: float
    """What lies between two steps anyway."""


@dataclass(frozen=True, eq=False)
class Units:
    """Calls of one function."""

    seconds: FloatArray
    """Of each unit by itself, [U]."""
    num_units: IntArray
    """Of each task, [K]."""
    task_s: FloatArray
    """Of each task, [K]."""


@dataclass(frozen=True, eq=False)
class Observed:
    """All of a run. A key's last part is the worker."""

    decode: dict[tuple[str, str], DecodeSteps]
    leaving: dict[str, Leavings]
    entering: dict[str, tuple[IntArray, FloatArray]]
    """Samples that an idle engine was given, and seconds from the end of what they waited for to its first step."""
    update: dict[tuple[str, str], Passes]
    forward: dict[tuple[str, str], Passes]
    preparing: dict[str, tuple[IntArray, FloatArray]]
    """Samples of a micro-batch that waited for the one before it, and seconds between the two."""
    starting: dict[str, tuple[IntArray, FloatArray]]
    """Samples of a micro-batch that an idle trainer was given, and seconds from the end of what they waited for to its beginning."""
    optimizer: dict[tuple[str, str], FloatArray]
    switches: dict[tuple[str, str], FloatArray]
    """By whom the device goes to."""
    publishes: dict[tuple[str, str], FloatArray]
    loads: dict[tuple[str, str], FloatArray]
    weight_bytes: dict[str, int]
    functions: dict[str, Units]
    hops: FloatArray
    """Seconds in which nobody worked, between a task's end on one worker and the start of what waited for it."""
    turns: FloatArray
    """The same after the last task of a step: with what the program takes to make the next step's calls."""
    sends: tuple[IntArray, FloatArray]
    """Bytes of parcels, and seconds to hand them to the network."""
    groups: list[tuple[int, list[int]]]
    """Tokens of a prompt, and of the answers to it, of the steps whose lengths the flow decided."""

    @classmethod
    def of_run(cls, run_dir: Path, *, natural_steps: Iterable[int] | None = None, last_bytes: int | None = None) -> Observed:
        """Read a run's trace and ledger.

        Args:
            natural_steps: the steps whose lengths are the flow's own; by default all.
            last_bytes: of the trace, only what was recorded last.
        Raises:
            SpecError: the directory has no ledger.
        """
        spans = sorted(read_spans(run_dir, last_bytes=last_bytes), key=lambda span: (span.start_ns, span.end_ns))
        counts = read_token_counts(run_dir)
        steps = [int(str(span.attributes["step"])) for span in spans if "step" in span.attributes]
        first = min((step for step in steps if step >= 0), default=-1)
        reader = _Reader(spans, counts, warm_up=first if len({step for step in steps if step >= 0}) > 1 else -2)
        natural = None if natural_steps is None else set(natural_steps)
        return reader.read([(packed, num) for packed, num in counts.items() if natural is None or num[0] in natural])


class _Reader:
    def __init__(self, spans: Sequence[Span], counts: Mapping[int, tuple[int, int, int]], *, warm_up: int) -> None:
        self._spans = spans
        self._counts = counts
        ends = [span.end_ns for span in spans if span.attributes.get("step") == warm_up]
        self._from_ns = max(ends, default=0)
        """The end of the warm-up, and of all before it."""
        self._work = [span for span in spans if span.is_work]
        by_kind: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self._work:
            by_kind[span.lane[0], span.lane[1]].append(span)
        self._covers = {key: Cover(found) for key, found in by_kind.items()}

    def read(self, samples: Sequence[tuple[int, tuple[int, int, int]]]) -> Observed:
        counted = [span for span in self._spans if span.start_ns >= self._from_ns]
        named: dict[str, list[Span]] = defaultdict(list)
        for span in counted:
            named[span.name].append(span)
        idle = self._idle(counted)
        turns = [(seconds, before.name == SpanName.TRAIN_APPLY) for span, seconds, before in idle if span.name in _PROMPT_STARTS]
        begun = [(span, seconds) for span, seconds, before in idle if before.name not in (SpanName.ROLLOUT_STEP, SpanName.SEND)]
        groups: dict[int, tuple[int, list[int]]] = {}
        for packed, (_, num_prompt, num_generated) in sorted(samples):
            groups.setdefault(group_key(packed), (num_prompt, []))[1].append(num_generated)
        return Observed(
            decode=self._decode(named[SpanName.ROLLOUT_STEP], named[SpanName.SAMPLE]),
            leaving=self._leaving(named[SpanName.ROLLOUT_STEP], named[SpanName.SEND]),
            entering=_sized((s.lane[0], number(s, "num_samples"), t) for s, t in begun if s.name == SpanName.ROLLOUT_STEP),
            update=self._passes(named[SpanName.TRAIN_ACCUMULATE]),
            forward=self._passes(named[SpanName.TRAIN_LOGPROBS]),
            preparing=_sized(self._between(named[SpanName.TRAIN_ACCUMULATE])),
            starting=_sized((s.lane[0], number(s, "num_samples"), t) for s, t in begun if s.name == SpanName.TRAIN_ACCUMULATE),
            optimizer=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.TRAIN_APPLY]),
            switches=_seconds((str(s.attributes.get("label", "")).removeprefix("to "), s.lane[0], s) for s in named[SpanName.SWITCH]),
            publishes=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.WEIGHTS_PUBLISH]),
            loads=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.WEIGHTS_LOAD]),
            weight_bytes={_role(s): number(s, "num_bytes") for s in named[SpanName.WEIGHTS_LOAD]},
            functions=_units(named[SpanName.FUNCTION_CALL]),
            hops=np.array([seconds for seconds, is_turn in turns if not is_turn]),
            turns=np.array([seconds for seconds, is_turn in turns if is_turn]),
            sends=(
                np.array([number(s, "num_bytes") for s in named[SpanName.SEND]], np.int64),
                np.array([s.duration_s for s in named[SpanName.SEND]]),
            ),
            groups=list(groups.values()),
        )

    def _decode(self, steps: Sequence[Span], lives: Sequence[Span]) -> dict[tuple[str, str], DecodeSteps]:
        found = {}
        single = [span for span in steps if "num_steps" not in span.attributes]  # Several as one span do not say what each took.
        for (role, worker), own in _by(single).items():
            (decoding, context, entered, prefill), kept = batches_of(own, [life for life in lives if life.lane[0] == worker], self._counts)
            spans = [own[i] for i in kept.tolist()]
            if spans:
                seconds = np.array([span.duration_s for span in spans])
                found[role, worker] = DecodeSteps(decoding[kept], context[kept], entered[kept], prefill[kept], seconds, self._beside(spans))
        return found

    def _leaving(self, steps: Sequence[Span], sends: Sequence[Span]) -> dict[str, Leavings]:
        """Between two decode steps: what it takes to hand over samples that have finished, beyond what lies between steps anyway."""
        found: dict[str, Leavings] = {}
        for worker, own in _by_worker(steps).items():
            starts, ends = np.array([s.start_ns for s in own]), np.array([s.end_ns for s in own])
            handed: dict[int, tuple[int, int]] = {}
            for send in sends:
                position = int(np.searchsorted(ends, send.start_ns, side="right")) - 1
                if send.lane[0] == worker and position >= 0:
                    num, until = handed.get(position, (0, 0))
                    handed[position] = max(num, number(send, "num_samples")), max(until, send.end_ns)
            gaps = starts[1:] - ends[:-1]
            quiet = [gap for position, gap in enumerate(gaps.tolist()) if position not in handed and gap < _MOST_GAP_NS]
            usual = float(np.median(quiet)) if quiet else 0.0
            rows = []
            for position, (num, until) in handed.items():
                gap = int(gaps[position]) if position < len(gaps) else _MOST_GAP_NS
                rows.append((num, max((gap if gap < _MOST_GAP_NS else until - ends[position]) - usual, 0.0) / 1e9))
            found[worker] = Leavings(np.array([n for n, _ in rows], np.int64), np.array([s for _, s in rows], np.float64), usual / 1e9)
        return found

    def _passes(self, spans: Sequence[Span]) -> dict[tuple[str, str], Passes]:
        found = {}
        for key, every in _by(spans).items():
            own = [span for span in every if number(span, "step", -1) >= 0] or every  # What is done before the loop may be other work.
            sizes = [self._lengths(span) for span in own]
            found[key] = Passes(
                np.array([len(lengths) for lengths in sizes], np.int64),
                np.array([int(lengths.sum()) for lengths in sizes], np.int64),
                np.array([self._shared(span) for span in own], np.int64),
                np.array([float((lengths.astype(np.float64) ** 2).sum()) for lengths in sizes]),
                np.array([span.duration_s for span in own]),
                self._beside(own),
            )
        return found

    def _lengths(self, span: Span) -> IntArray:
        """Of the samples of a micro-batch; where they were not generated but given, all as long as the mean."""
        ids = samples_of(span)
        known = [self._counts[packed] for packed in ids if packed in self._counts]
        if known and len(known) == len(ids):
            return np.array([num_prompt + num_generated for _, num_prompt, num_generated in known], np.int64)
        num = max(number(span, "num_samples"), 1)
        return np.full(num, number(span, "num_tokens") // num, np.int64)

    def _shared(self, span: Span) -> int:
        prompts: dict[int, list[int]] = defaultdict(list)
        for packed in samples_of(span):
            if packed in self._counts:
                prompts[group_key(packed)].append(self._counts[packed][1])
        return sum(sum(tokens) - max(tokens) for tokens in prompts.values())

    def _between(self, spans: Sequence[Span]) -> list[tuple[str, int, float]]:
        """What it takes to begin a micro-batch after the one before it, which it did not have to wait for."""
        found = []
        for worker, own in _by_worker(spans).items():
            pairs = [(a, b) for a, b in itertools.pairwise(own) if a.attributes.get("call") == b.attributes.get("call")]
            found += [
                (worker, number(b, "num_samples"), max(b.start_ns - a.end_ns, 0) / 1e9)
                for a, b in pairs
                if b.start_ns - a.end_ns < min(_MOST_GAP_NS, a.end_ns - a.start_ns)
            ]
        return found

    def _idle(self, spans: Sequence[Span]) -> list[tuple[Span, float, Span]]:
        """Each span before which nobody worked or sent, for how long, and what ended then."""
        found = []
        last: Span | None = None
        for span in spans:
            if not (span.is_work or span.name == SpanName.SEND):
                continue
            pause_ns = span.start_ns - last.end_ns if last is not None else 0
            if last is not None and 0 < pause_ns < _MOST_GAP_NS and span.name != SpanName.SEND:
                found.append((span, pause_ns / 1e9, last))
            if last is None or span.end_ns > last.end_ns:
                last = span
        return found

    def _beside(self, spans: Sequence[Span]) -> dict[str, FloatArray]:
        shares = {}
        for kind in KINDS:
            others = [(worker, cover) for (worker, engine), cover in self._covers.items() if engine == kind]
            shares[kind] = np.array(
                [
                    min(1.0, sum(cover.covered_ns(s.start_ns, s.end_ns) for worker, cover in others if worker != s.lane[0])
                        / max(s.end_ns - s.start_ns, 1))
                    for s in spans
                ]
            )  # fmt: skip
        return shares


_MOST_GAP_NS = 50_000_000
"""A longer pause has another cause."""
_PROMPT_STARTS = (SpanName.SWITCH, SpanName.WEIGHTS_PUBLISH, SpanName.WEIGHTS_LOAD, SpanName.FUNCTION_CALL)
"""Work that begins as soon as its message is there."""


def _role(span: Span) -> str:
    return str(span.attributes.get("label", "")).partition(".")[0]


def _by(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    found: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        found[_role(span), span.lane[0]].append(span)
    return found


def _by_worker(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.lane[0]].append(span)
    return found


def _seconds(spans: Iterable[tuple[str, str, Span]]) -> dict[tuple[str, str], FloatArray]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, worker, span in spans:
        found[name, worker].append(span.duration_s)
    return {key: np.array(values) for key, values in found.items()}


def _sized(rows: Iterable[tuple[str, int, float]]) -> dict[str, tuple[IntArray, FloatArray]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for worker, num, seconds in rows:
        found[worker].append((num, seconds))
    return {w: (np.array([n for n, _ in rows], np.int64), np.array([s for _, s in rows])) for w, rows in found.items()}


def _units(spans: Iterable[Span]) -> dict[str, Units]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[str(span.attributes.get("label", ""))].append(span)
    result = {}
    for name, own in found.items():
        units = [[float(us) / 1e6 for us in each] if isinstance(each := s.attributes.get("unit_us"), list) else [] for s in own]  # type: ignore[arg-type]
        seconds = [one for each in units for one in each] or [span.duration_s for span in own]
        result[name] = Units(
            np.array(seconds), np.array([max(len(each), 1) for each in units], np.int64), np.array([span.duration_s for span in own])
        )
    return result
