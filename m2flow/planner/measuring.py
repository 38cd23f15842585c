"""Measure a profile from the traces of runs: sizes and times of decode steps, micro-batches, switches, syncs and function calls, fitted.

    spans, ledger of a run --Observed.of_run--> sizes and seconds, by engine and worker
        rollout.step and sample spans, lengths --batches_of--> samples, contexts and prompts of each decode step
    Measurement (Plan, ClusterSpec, Observed) of one or more runs --profile_of--> Profile

A span has the time and the ledger the lengths. What ran in a decode step follows from both: a sample of L tokens that ended with step e
was prefilled in step e - L + 1 and got a token in each step from there; so did each turn of an episode. So any run's trace can be measured,
at no extra cost for the run. Limits: aborted or migrated generations leave steps whose batch is unknown; these are left out, and so is the
first step of the loop, which allocates memory and loads code.

A run measures the layouts of its own plan; others come from further runs. The slowdown of an engine while others work on the same host is a
factor of its own, fitted alternately with the constants, from steps that overlap more and less.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from m2flow.micro.protocol.cost_terms import EpisodeCosts, EpisodeTurn, ToolCost
from m2flow.micro.protocol.plan import Plan, WorkerPlan
from m2flow.micro.records.ledger import read_refills, read_roles, read_token_counts
from m2flow.observe.spans import Span, SpanName, sample_of, samples_of
from m2flow.observe.store import read_spans
from m2flow.planner.profiles import (
    Machine,
    MeasuredDecode,
    MeasuredEngine,
    MeasuredFunction,
    MeasuredPass,
    MeasuredSync,
    OtherWork,
    Profile,
    Quality,
    fit,
    model_description,
    now_text,
    robust_mean,
    total_ratio,
)
from m2flow.recipe import Model
from m2flow.rollout_scheduling.lengths import log_length_icc
from m2flow.samples import group_key
from m2flow.spec import ClusterSpec

IntArray = npt.NDArray[np.int64]


def batches_of(
    steps: Sequence[Span], sample_spans: Sequence[Span], counts: Mapping[int, tuple[int, int, int]], settled: Container[int] | None = None
) -> tuple[tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray], IntArray]:
    """Reconstruct the batch of each step of one engine.

    Returns ((decoded samples, tokens in their KV caches, prefilled samples, tokens of their prompts with each prompt once, samples that
    left others in the step before, samples of steps of the flow outside `settled`), [K] each), and the positions of the steps for which
    this is known.

    Args:
        sample_spans: the spans of the samples of the engine's worker, and of the turns that it played in episodes.
        counts: sample -> (step of the flow, prompt tokens, generated tokens).
    """
    ends = np.array([span.end_ns for span in steps])
    starts = np.array([span.start_ns for span in steps])
    first, last, prompts, read = list[int](), list[int](), list[int](), list[int]()
    groups: list[int] = []
    unsettled: list[bool] = []
    in_turns = {sample_of(span) for span in sample_spans if span.name == SpanName.TURN}
    for span in sample_spans:
        packed = sample_of(span)
        if span.name == SpanName.TURN:
            position = int(np.searchsorted(ends, span.end_ns))
            if "worker" in span.attributes:  # It ends where its answer has come to the episode, so after its last step.
                position -= 1
                is_in = position >= 0
            else:
                is_in = position < len(ends) and starts[position] <= span.end_ns
            if packed is not None and number(span, "num_tokens") and is_in:
                first.append(position - number(span, "num_tokens") + 1)
                last.append(position)
                prompts.append(number(span, "num_prompt_tokens"))
                read.append(prompts[-1] - number(span, "num_cached"))
                groups.append(group_key(packed) if number(span, "turn") == 1 else -len(groups) - 1)  # First prompts are shared.
                unsettled.append(settled is not None and packed in counts and counts[packed][0] not in settled)
            continue
        if packed in in_turns:
            continue
        position = int(np.searchsorted(ends, span.end_ns))
        if packed is not None and packed in counts and position < len(ends) and ends[position] == span.end_ns:
            first.append(position - number(span, "num_tokens") + 1)
            last.append(position)
            prompts.append(counts[packed][1])
            read.append(counts[packed][1])
            groups.append(group_key(packed))
            unsettled.append(settled is not None and counts[packed][0] not in settled)
    rows = _Rows(*(np.array(column, np.int64) for column in (first, last, prompts, read, groups, unsettled)))
    running, entered, prefill, context, left, num_unsettled = rows.by_step(len(steps))
    asked = np.array([number(span, "num_samples") for span in steps], np.int64)
    # Above the engine's limit samples queue; below it, a batch that does not add up had samples that never ended.
    is_known = (running > 0) & ((running == asked) | ((running < asked) & (running == running.max(initial=0))))
    return (running - entered, context, entered, prefill, left, num_unsettled), np.flatnonzero(is_known)


def _is_played(span: Span, role: str, worker: str, roles: Mapping[int, str]) -> bool:
    """Whether a sample or a turn is one of this role's engine on this worker; `roles`: those whose samples calls draw."""
    if "role" in span.attributes:
        return span.attributes["role"] == role and span.attributes.get("worker", span.lane[0]) == worker
    return span.lane[0] == worker and (not role or roles.get(number(span, "call", -1), role) == role)


class Cover:
    """Answers how much of an interval is covered by spans."""

    def __init__(self, spans: Sequence[Span]) -> None:
        times, done = [0], [0]
        for span in sorted(spans, key=lambda s: s.start_ns):
            start = max(span.start_ns, times[-1])
            if span.end_ns > start:
                times += [start, span.end_ns]
                done += [done[-1], done[-1] + span.end_ns - start]
        self._origin = times[1] if len(times) > 1 else 0
        self._times = np.array(times[1:] or [0]) - self._origin
        self._done = np.array(done[1:] or [0])

    def covered_ns(self, start_ns: int, end_ns: int) -> float:
        at = np.interp([start_ns - self._origin, end_ns - self._origin], self._times, self._done)
        return float(at[1] - at[0])


def number(span: Span, name: str, default: int = 0) -> int:
    """A numeric attribute of a span."""
    value = span.attributes.get(name)
    return int(value) if isinstance(value, int | float) else default


@dataclass(frozen=True, eq=False)
class _Rows:
    """Samples of one engine, [N] each: the steps of their first and last token, prompt tokens, groups."""

    first: IntArray
    last: IntArray
    prompts: IntArray
    read: IntArray
    """Tokens of these that the engine had to read."""
    groups: IntArray
    unsettled: IntArray
    """1 for samples of steps of the flow that do not have the time of a run's."""

    def by_step(self, num_steps: int) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
        """For each step: running samples, entering ones, prompt tokens of these, tokens in the KV caches of the others, samples that left
        these in the step before, unsettled samples."""
        first = np.clip(self.first, 0, None)

        def total(weights: IntArray) -> IntArray:
            change = np.zeros(num_steps + 1, np.int64)
            np.add.at(change, first, weights)
            np.add.at(change, self.last + 1, -weights)
            return np.cumsum(change)[:num_steps]

        running = total(np.ones(len(first), np.int64))
        entered, prefill, unread = (np.zeros(num_steps, np.int64) for _ in range(3))
        np.add.at(entered, first, 1)
        np.add.at(unread, first, self.prompts)
        _, once = np.unique(np.stack([first, self.groups]), axis=1, return_index=True)
        np.add.at(prefill, first[once], self.read[once])
        # A sample that entered at step f has its prompt and k - f tokens in the cache at step k; at f itself it is read, not decoded.
        context = total(self.prompts) + np.arange(num_steps) * running - total(first) - unread
        left = np.zeros(num_steps + 1, np.int64)
        np.add.at(left, self.last + 1, 1)
        return running, entered, prefill, context, left[:num_steps] * (running > entered), total(self.unsettled)


FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

KINDS = ("rollout", "train", "function")


@dataclass(frozen=True, eq=False)
class DecodeSteps:
    """The decode steps of one engine on one worker, [K] each."""

    decoding: IntArray
    """Samples that were decoded from their KV cache."""
    context: IntArray
    """Tokens in their KV caches together."""
    entered: IntArray
    """Samples that were prefilled."""
    prefill: IntArray
    """Tokens of their prompts, each prompt once."""
    left: IntArray
    """Samples that have left the decoded ones in the step before."""
    seconds: FloatArray
    overlap: dict[str, FloatArray]
    """Kind of engine -> share of the step in which such an engine worked on another worker."""
    is_settled: BoolArray
    """Whether it had samples only of steps of the flow that have the time of a run's (`Observed.of_run`)."""


@dataclass(frozen=True, eq=False)
class Passes:
    """The micro-batches of one role on one worker, [K] each."""

    num_samples: IntArray
    tokens: IntArray
    shared: IntArray
    """Tokens of prompts that another sample of the micro-batch shares: an engine may process them once."""
    squares: FloatArray
    """Sum over the samples of their squared tokens."""
    seconds: FloatArray
    overlap: dict[str, FloatArray]
    is_settled: BoolArray


@dataclass(frozen=True, eq=False)
class Departures:
    """Samples that left a rollout engine together, [K] each."""

    num_samples: IntArray
    seconds: FloatArray
    """Seconds beyond the usual gap between two steps."""
    between_s: float
    """The usual gap between two steps, in seconds."""


@dataclass(frozen=True, eq=False)
class FunctionUnits:
    """The calls of one function."""

    seconds: FloatArray
    """Seconds of each unit, [U]."""
    num_units: IntArray
    """For each task, [K]."""
    task_s: FloatArray
    """For each task, [K]."""
    between_s: FloatArray
    """Seconds from the end of a task to the start of a task of this function that was there already: no wait was recorded between them,
    which is one of half a millisecond or more."""


@dataclass(frozen=True, eq=False)
class Observed:
    """All sizes and times of a run. The last part of a key is the worker."""

    decode: dict[tuple[str, str], DecodeSteps]
    departures: dict[str, Departures]
    entering: dict[str, tuple[IntArray, FloatArray]]
    """Samples submitted to an idle engine, and seconds from the end of their last dependency to its first step."""
    update: dict[tuple[str, str], Passes]
    forward: dict[tuple[str, str], Passes]
    preparing: dict[str, tuple[IntArray, FloatArray]]
    """Samples of a micro-batch that followed another directly, and seconds between the two."""
    starting: dict[str, tuple[IntArray, FloatArray]]
    """Samples of a micro-batch submitted to an idle trainer, and seconds from the end of their last dependency to its start."""
    optimizer: dict[tuple[str, str], FloatArray]
    tested: dict[tuple[str, str], FloatArray]
    """Seconds in which trainers say of some samples, after an update, how far rollout engines are from what it has."""
    switches: dict[tuple[str, str], FloatArray]
    """Seconds of switches, by the engine that takes the device."""
    publishes: dict[tuple[str, str], FloatArray]
    loads: dict[tuple[str, str], FloatArray]
    weight_bytes: dict[str, int]
    functions: dict[str, FunctionUnits]
    hops: FloatArray
    """Idle seconds between a task's end on one worker and the start of a task that waited for it."""
    turns: FloatArray
    """The same after the last task of a step, which includes the program's time to make the next calls."""
    sends: tuple[IntArray, FloatArray]
    """Bytes of parcels, and seconds to send them."""
    groups: list[tuple[int, list[int]]]
    """(prompt tokens, response tokens) of each group, of the steps with the flow's own lengths."""
    episodes: EpisodeCosts = EpisodeCosts()  # noqa: RUF009
    refills: tuple[int, int] = (0, 0)
    """Groups that refills judged and kept, in the steps before the first whose lengths were set."""

    @classmethod
    def of_run(cls, run_dir: Path, *, natural_steps: Iterable[int] | None = None, last_bytes: int | None = None) -> Observed:
        """Read a run's trace and ledger.

        Args:
            natural_steps: the steps with the flow's own lengths; by default all. The one that follows another has the time of a run's.
            last_bytes: read only so many bytes from the end of the trace.
        Raises:
            SpecError: the directory has no ledger.
        """
        spans = sorted(read_spans(run_dir, last_bytes=last_bytes), key=lambda span: (span.start_ns, span.end_ns))
        counts, roles = read_token_counts(run_dir), read_roles(run_dir)
        steps = [int(str(span.attributes["step"])) for span in spans if "step" in span.attributes]
        first = min((step for step in steps if step >= 0), default=-1)
        natural = None if natural_steps is None else set(natural_steps)
        settled = None if natural is None else {step for step in natural if step - 1 in natural}
        reader = _Reader(spans, counts, roles, settled, warm_up=first if len({step for step in steps if step >= 0}) > 1 else -2)
        own_steps = math.inf if natural is None else next(step for step in itertools.count() if step not in natural)
        found = reader.read([(packed, num) for packed, num in counts.items() if natural is None or num[0] in natural])
        return replace(found, refills=read_refills(run_dir, own_steps))


class _Reader:
    """Extracts sizes and times from the spans of a run."""

    def __init__(
        self,
        spans: Sequence[Span],
        counts: Mapping[int, tuple[int, int, int]],
        roles: Mapping[int, str],
        settled: Container[int] | None,
        *,
        warm_up: int,
    ) -> None:
        self._spans = spans
        self._counts = counts
        self._roles = roles
        self._settled = settled
        ends = [span.end_ns for span in spans if span.attributes.get("step") == warm_up]
        self._from_ns = max(ends, default=0)
        """The end of the warm-up; earlier spans are ignored."""
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
        idle = self._idle([span for span in counted if span.is_work or span.name == SpanName.SEND])
        turns = [(seconds, before.name in _STEP_ENDS) for span, seconds, before in idle if span.name in _PROMPT_STARTS]
        begun = [(span, seconds) for span, seconds, before in idle if before.name not in (SpanName.ROLLOUT_STEP, SpanName.SEND)]
        groups: dict[int, tuple[int, list[int]]] = {}
        for packed, (_, num_prompt, num_generated) in sorted(samples):
            groups.setdefault(group_key(packed), (num_prompt, []))[1].append(num_generated)
        return Observed(
            decode=self._decode(named[SpanName.ROLLOUT_STEP], [*named[SpanName.SAMPLE], *named[SpanName.TURN]]),
            departures=self._departures(named[SpanName.ROLLOUT_STEP], named[SpanName.SEND], named[SpanName.WAIT]),
            entering=_sized((s.lane[0], number(s, "num_samples"), t) for s, t in begun if s.name == SpanName.ROLLOUT_STEP),
            update=self._passes(named[SpanName.TRAIN_ACCUMULATE]),
            forward=self._passes(named[SpanName.TRAIN_LOGPROBS]),
            preparing=_sized(self._between(named[SpanName.TRAIN_ACCUMULATE])),
            starting=_sized(
                (span.lane[0], number(span, "num_samples"), seconds)
                for span, seconds, before in self._idle([span for span in counted if span.is_work])
                if span.name == SpanName.TRAIN_ACCUMULATE and before.name != SpanName.ROLLOUT_STEP
            ),
            optimizer=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.TRAIN_APPLY]),
            tested=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.TRAIN_PROBE]),
            switches=_seconds((str(s.attributes.get("label", "")).removeprefix("to "), s.lane[0], s) for s in named[SpanName.SWITCH]),
            publishes=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.WEIGHTS_PUBLISH]),
            loads=_seconds((_role(s), s.lane[0], s) for s in named[SpanName.WEIGHTS_LOAD]),
            weight_bytes={_role(s): number(s, "num_bytes") for s in named[SpanName.WEIGHTS_LOAD]},
            functions=_units(named[SpanName.FUNCTION_CALL], named[SpanName.WAIT]),
            hops=np.array([seconds for seconds, is_turn in turns if not is_turn]),
            turns=np.array([seconds for seconds, is_turn in turns if is_turn]),
            sends=(
                np.array([number(s, "num_bytes") for s in named[SpanName.SEND]], np.int64),
                np.array([s.duration_s for s in named[SpanName.SEND]]),
            ),
            groups=list(groups.values()),
            episodes=episodes_of(named[SpanName.SAMPLE], named[SpanName.TURN], named[SpanName.TOOL]),
        )

    def _decode(self, steps: Sequence[Span], sample_spans: Sequence[Span]) -> dict[tuple[str, str], DecodeSteps]:
        found = {}
        single = [span for span in steps if "num_steps" not in span.attributes]  # A span of several steps has no time for each.
        for (role, worker), own in _by(single).items():
            of_engine = [span for span in sample_spans if _is_played(span, role, worker, self._roles)]
            (decoding, context, entered, prefill, left, unsettled), kept = batches_of(own, of_engine, self._counts, self._settled)
            spans = [own[i] for i in kept.tolist()]
            if spans:
                seconds = np.array([span.duration_s for span in spans])
                found[role, worker] = DecodeSteps(
                    decoding[kept],
                    context[kept],
                    entered[kept],
                    prefill[kept],
                    left[kept],
                    seconds,
                    self._overlap(spans),
                    unsettled[kept] == 0,
                )
        return found

    def _departures(self, steps: Sequence[Span], sends: Sequence[Span], waits: Sequence[Span]) -> dict[str, Departures]:
        """Seconds between two decode steps to hand over finished samples, beyond the usual gap."""
        found: dict[str, Departures] = {}
        waiting = _by_worker(waits)
        for worker, own in _by_worker(steps).items():
            idle = Cover(waiting.get(worker, []))
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
                goes_on = (
                    position < len(gaps) and gaps[position] < _MOST_GAP_NS and not idle.covered_ns(ends[position], starts[position + 1])
                )
                rows.append((num, max((gaps[position] if goes_on else until - ends[position]) - usual, 0.0) / 1e9))
            found[worker] = Departures(np.array([n for n, _ in rows], np.int64), np.array([s for _, s in rows], np.float64), usual / 1e9)
        return found

    def _passes(self, spans: Sequence[Span]) -> dict[tuple[str, str], Passes]:
        found = {}
        for key, every in _by(spans).items():
            own = [span for span in every if number(span, "step", -1) >= 0] or every  # Work before the loop may be of another kind.
            sizes = [self._lengths(span) for span in own]
            found[key] = Passes(
                np.array([len(lengths) for lengths in sizes], np.int64),
                np.array([int(lengths.sum()) for lengths in sizes], np.int64),
                np.array([self._shared(span) for span in own], np.int64),
                np.array([float((lengths.astype(np.float64) ** 2).sum()) for lengths in sizes]),
                np.array([span.duration_s for span in own]),
                self._overlap(own),
                np.array([self._settled is None or number(span, "step", -1) in self._settled for span in own]),
            )
        return found

    def _lengths(self, span: Span) -> IntArray:
        """Lengths of a micro-batch's samples; the mean for samples that were not generated in the run."""
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
        """Seconds between consecutive micro-batches where the second did not wait for its input."""
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
        """Each of these spans that followed an idle interval, its seconds, and the span that ended before it."""
        found = []
        last: Span | None = None
        for span in spans:
            pause_ns = span.start_ns - last.end_ns if last is not None else 0
            if last is not None and 0 < pause_ns < _MOST_GAP_NS and span.name != SpanName.SEND:
                found.append((span, pause_ns / 1e9, last))
            if last is None or span.end_ns > last.end_ns:
                last = span
        return found

    def _overlap(self, spans: Sequence[Span]) -> dict[str, FloatArray]:
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


def episodes_of(stays: Sequence[Span], turns: Sequence[Span], tools: Sequence[Span]) -> EpisodeCosts:
    """Read the episodes that were played in one piece: their turns, and what passed after each."""
    by_sample: dict[int | None, tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for at, spans in enumerate((turns, tools)):
        for span in spans:
            by_sample[sample_of(span)][at].append(span)
    whole = [
        one
        for one in stays
        if not number(one, "had") and one.attributes.get("finish") in ("stop", "length") and by_sample.get(sample_of(one))
    ]
    kept = [whole[at * len(whole) // _MOST_EPISODES] for at in range(_MOST_EPISODES)] if len(whole) > _MOST_EPISODES else whole
    episodes = tuple(tuple(_played(one, *by_sample[sample_of(one)])) for one in kept if by_sample[sample_of(one)][0])
    by_tool: dict[str, list[Span]] = defaultdict(list)
    for span in tools:
        by_tool[str(span.attributes.get("label", ""))].append(span)
    return EpisodeCosts(
        episodes,
        tuple(
            ToolCost(
                name,
                tuple(np.quantile([span.duration_s for span in spans], np.linspace(0, 1, _NUM_QUANTILES)).tolist()),
                len(spans),
                number(spans[0], "slots"),
                not spans[0].attributes.get("own_slots", False),
            )
            for name, spans in sorted(by_tool.items())
        ),
    )


def _played(stay: Span, turns: Sequence[Span], tools: Sequence[Span]) -> Iterator[EpisodeTurn]:
    """The turns of an episode in order, of which an engine has one at a time, and what its agent waited for after each."""
    turns, tools = (sorted(spans, key=lambda span: span.start_ns) for spans in (turns, tools))
    begins = [stay.start_ns, *[span.end_ns for span in turns]]
    ends = [*[span.start_ns for span in turns], stay.end_ns]
    for at, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        calls: list[list[Span]] = []
        until = 0
        for span in tools:
            if (begin <= span.start_ns < end) or (at == len(turns) and span.start_ns >= begin):
                calls = [*calls, [span]] if span.start_ns >= until else [*calls[:-1], [*calls[-1], span]]
                until = max(until, span.end_ns)
        passed = sum(max(number(one, "waited_us") * 1000 + one.end_ns - one.start_ns for one in once) for once in calls)
        made = turns[at - 1] if at else None
        yield EpisodeTurn(
            number(made, "num_tokens") if made else 0,
            number(made, "num_prompt_tokens") - number(made, "num_cached") if made else 0,
            tuple(tuple((str(one.attributes.get("label", "")), one.duration_s) for one in once) for once in calls),
            max(end - begin - passed, 0) / 1e9,
            str(made.attributes.get("role", "")) if made else "",
        )


_MOST_EPISODES = 1000
_MOST_GAP_NS = 50_000_000
"""Gaps longer than this have another cause and are ignored."""
_PROMPT_STARTS = (SpanName.SWITCH, SpanName.WEIGHTS_PUBLISH, SpanName.WEIGHTS_LOAD, SpanName.FUNCTION_CALL)
"""Work that starts as soon as its message arrives."""
_STEP_ENDS = (SpanName.TRAIN_APPLY, SpanName.TRAIN_PROBE)


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


def _units(spans: Iterable[Span], waits: Sequence[Span]) -> dict[str, FunctionUnits]:
    found: dict[str, list[Span]] = defaultdict(list)
    between: dict[str, list[float]] = defaultdict(list)
    waiting = _by_worker(waits)
    for worker, own in _by_worker(spans).items():
        idle = Cover(waiting.get(worker, []))
        for before, span in itertools.pairwise(own):
            pause_ns = span.start_ns - before.end_ns
            if 0 < pause_ns < _MOST_GAP_NS and not idle.covered_ns(before.end_ns, span.start_ns):
                between[str(span.attributes.get("label", ""))].append(pause_ns / 1e9)
        for span in own:
            found[str(span.attributes.get("label", ""))].append(span)
    result = {}
    for name, own in found.items():
        units = [[float(us) / 1e6 for us in each] if isinstance(each := s.attributes.get("unit_us"), list) else [] for s in own]  # type: ignore[arg-type]
        seconds = [one for each in units for one in each] or [span.duration_s for span in own]
        result[name] = FunctionUnits(
            np.array(seconds),
            np.array([max(len(each), 1) for each in units], np.int64),
            np.array([span.duration_s for span in own]),
            np.array(between[name]),
        )
    return result


_NUM_QUANTILES = 21
_LEAST_OVERLAP_S = 0.05
"""Least seconds of overlap with other work from which a slowdown is fitted."""
_MOST_SLOWDOWN = 8.0
_MOST_GROUPS = 2000
_TURNS = 4
_LAST_BYTES = 4 << 20
"""Bytes read from the end of a trace: some ten thousand spans, which take about a second."""


@dataclass(frozen=True)
class Measurement:
    """A run to measure: its plan, its spec and what was observed."""

    plan: Plan
    spec: ClusterSpec
    observed: Observed
    startup_s: float = 0.0


def profile_of(flow: str, models: Mapping[str, Model], runs: Sequence[Measurement], *, gather_s: float, load: float) -> Profile:
    """Fit a profile to these runs. For an engine that several runs have on the same number of devices, the first counts.

    Args:
        gather_s: seconds that the plan's workers let finished samples wait for others.
        load: load average of the machine when the first run began.
    """
    engines: dict[tuple[object, ...], MeasuredEngine] = {}
    syncs: dict[tuple[str, str], MeasuredSync] = {}
    functions: dict[str, MeasuredFunction] = {}
    hop_s = _hop_s(runs)
    for run in runs:
        for worker in run.plan.workers:
            for found in _engines(run, worker, hop_s):
                engines.setdefault(found.place, found)
        for sync in _syncs(run):
            syncs.setdefault((sync.role, sync.transport), sync)
        for call, units in run.observed.functions.items():
            own = np.maximum((units.task_s - units.num_units * units.seconds.mean()), 0.0)
            (task_s, unit_s), _ = fit(np.stack([np.ones(len(own)), units.num_units], 1), np.maximum(own, 1e-7))
            quantiles = np.quantile(units.seconds, np.linspace(0, 1, _NUM_QUANTILES)) + unit_s
            shown = tuple(float(value) for value in quantiles)
            task_s += robust_mean(units.between_s)
            concurrency = run.spec.functions.concurrency
            functions.setdefault(call, MeasuredFunction(call, shown, concurrency, float(task_s), len(units.seconds)))
    num_bytes = np.concatenate([run.observed.sends[0] for run in runs])
    send_s = np.concatenate([run.observed.sends[1] for run in runs])
    (_, byte_s), _ = fit(np.stack([np.ones(len(num_bytes)), num_bytes], 1), send_s)
    # Of the first run that has any: in others, work before the loop may be cut short, and responses are another policy's.
    groups = next((run.observed.groups for run in runs if run.observed.groups), [])[:_MOST_GROUPS]
    num_judged, num_kept = next((run.observed.refills for run in runs if run.observed.refills[1]), (0, 0))
    return Profile(
        flow=flow,
        made=now_text(),
        machine=Machine.here(runs[0].plan.workers[0].device),
        models={role: model_description(model) for role, model in models.items()},
        engines=tuple(engines.values()),
        functions=tuple(functions.values()),
        syncs=tuple(syncs.values()),
        hop_s=hop_s,
        byte_s=float(byte_s),
        turn_s=max(robust_mean(np.concatenate([run.observed.turns for run in runs])) - hop_s, 0.0),
        gather_s=gather_s,
        startup_s=max((run.startup_s for run in runs), default=0.0),
        prompts=tuple(prompt for prompt, _ in groups),
        responses=tuple(tuple(answers) for _, answers in groups),
        icc=float(log_length_icc([answers for _, answers in groups]).icc),
        draws_per_group=num_judged / num_kept if num_kept else 0.0,
        load=round(load, 2),
        episodes=next((run.observed.episodes for run in runs if run.observed.episodes.episodes), EpisodeCosts()),
    )


def measured_so_far(
    flow: str, models: Mapping[str, Model], plan: Plan, spec: ClusterSpec, run_dir: Path, *, gather_s: float
) -> Profile | None:
    """Measure a run in progress from its latest records, in the pools of its engines; None if there is too little yet."""
    observed = Observed.of_run(run_dir, last_bytes=_LAST_BYTES)
    if not observed.decode or not observed.update:
        return None
    return profile_of(flow, models, [Measurement(plan, spec, observed)], gather_s=gather_s, load=0.0)


def _engines(run: Measurement, worker: WorkerPlan, hop_s: float) -> list[MeasuredEngine]:
    seen, found = run.observed, []
    pools = (
        {(placement.engine.role, placement.engine.kind): placement.pool for placement in run.plan.choice.placements}
        if run.plan.choice
        else {}
    )
    for slot in worker.engines:
        if slot.kind == "function":
            continue
        num_devices = worker.threads if worker.device == "cpu" else slot.tp * slot.pp
        key = (slot.role, worker.name)
        come_s = robust_mean(seen.switches.get((slot.takes_turn, worker.name), []))
        slowdown: dict[OtherWork, float] = {}
        decode = update = forward = None
        if slot.kind == "rollout":
            steps = seen.decode.get(key) or seen.decode.get(("", worker.name))
            if steps is None:
                continue
            decode, slowdown = _decode(steps, seen, worker.name, hop_s)
        else:
            if key not in seen.update and key not in seen.forward:
                continue
            if key in seen.update:
                update, slowdown = _pass(seen.update[key], seen, worker.name, hop_s)
            if key in seen.forward:
                forward, also = _pass(seen.forward[key], seen, worker.name, hop_s)
                slowdown = slowdown or also
        optimizer_s = 0.0
        if slot.kind == "train" and len(steps_s := seen.optimizer.get(key, np.zeros(0))):
            tested_s = seen.tested.get(key, np.zeros(0))
            optimizer_s = robust_mean(steps_s) + robust_mean(tested_s) * len(tested_s) / len(steps_s)
        ranks = worker.ranks if slot.kind == "train" else 1
        found.append(
            MeasuredEngine(
                slot.role,
                slot.kind,
                slot.engine,
                worker.device,
                num_devices * ranks,
                decode,
                update,
                forward,
                optimizer_s,
                come_s,
                slowdown,
                ranks,
                pools.get((slot.role, slot.kind), ""),
            )
        )
    return found


def _decode(steps: DecodeSteps, seen: Observed, worker: str, hop_s: float) -> tuple[MeasuredDecode, dict[OtherWork, float]]:
    running = steps.decoding + steps.entered
    # When some leave, an engine moves the caches of the others, and has the processor together with who takes in those that left.
    moved = steps.decoding * (steps.left > 0)
    sizes = np.stack([np.ones(len(running)), running, steps.context, steps.prefill, steps.entered, moved], 1).astype(np.float64)
    found = _fit_with_slowdown(sizes, steps.seconds, steps.overlap, "rollout", steps.is_settled)
    step_s, sample_s, context_s, prefill_s, enter_s, move_s = found.constants.tolist()
    counted = steps.is_settled if steps.is_settled.any() else np.ones(len(running), np.bool_)
    leave_s = move_s * float(moved[counted].sum()) / max(int(steps.left[counted].sum()), 1)
    handover_s = 0.0
    if worker in seen.departures and len(seen.departures[worker].seconds):
        left = seen.departures[worker]
        step_s += left.between_s
        (handover_s, hand_s), _ = fit(np.stack([np.ones(len(left.num_samples)), left.num_samples], 1), np.maximum(left.seconds, 1e-6))
        leave_s += float(hand_s)
    num, seconds = seen.entering.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    is_new = num > 0 if not seen.episodes.episodes else np.zeros(len(num), np.bool_)  # What comes before a first turn is its agent's.
    asking_s = float(np.maximum(seconds[is_new] - hop_s, 0.0).sum()) / max(int(num[is_new].sum()), 1)
    is_decode = steps.decoding > 0
    total = float(steps.decoding[is_decode].sum())
    return (
        MeasuredDecode(
            step_s=step_s,
            sample_s=sample_s,
            context_s=context_s,
            prefill_token_s=prefill_s,
            enter_s=enter_s + asking_s,
            leave_s=leave_s,
            handover_s=float(handover_s),
            most_running=int(running.max()),
            context=float(steps.context[is_decode].sum()) / total if total else 0.0,
            quality=found.quality,
        ),
        found.slowdown,
    )


def _pass(passes: Passes, seen: Observed, worker: str, hop_s: float) -> tuple[MeasuredPass, dict[OtherWork, float]]:
    # Whether an engine shares prompts within a group is inferred: the assumption that explains the times better is taken.
    tried = []
    for tokens in (passes.tokens - passes.shared, passes.tokens):
        sizes = np.stack([np.ones(len(passes.seconds)), tokens, passes.squares], 1).astype(np.float64)
        tried.append(_fit_with_slowdown(sizes, passes.seconds, passes.overlap, "train", passes.is_settled))
    is_shared = tried[0].quality.r2 >= tried[1].quality.r2
    found = tried[0 if is_shared else 1]
    fixed_s, token_s, token2_s = found.constants
    sample_s = -token_s * passes.shared.sum() / passes.num_samples.sum() if is_shared else 0.0
    queued, queued_s = seen.preparing.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    waited, waited_s = seen.starting.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    num, seconds = np.concatenate([queued, waited]), np.concatenate([queued_s, waited_s - hop_s])
    before_s = each_s = 0.0
    if len(num):
        before_s, each_s = fit(np.stack([np.ones(len(num)), num], 1), np.maximum(seconds, 1e-6))[0]
    longest = float(np.sqrt((passes.squares / passes.num_samples).max()))
    measured = MeasuredPass(
        float(fixed_s) + float(before_s), float(sample_s) + float(each_s), float(token_s), float(token2_s), longest, found.quality
    )
    return measured, found.slowdown


@dataclass(frozen=True)
class _Fit:
    constants: FloatArray
    quality: Quality
    slowdown: dict[OtherWork, float]


def _fit_with_slowdown(sizes: FloatArray, seconds: FloatArray, overlap: Mapping[str, FloatArray], kind: str, is_settled: BoolArray) -> _Fit:
    """Fit the constants of undisturbed work and the slowdown factors by each other kind of work, alternately.

    Work of set sizes tells what depends on what, but is slower than the flow's own: each size comes once, and what is of a size for the
    first time allocates its memory. So in the end all constants are scaled to give the seconds that settled work took.

    Args:
        sizes: the third column is doubted like the first: contexts, and squares of lengths, correlate with the second.
        is_settled: whether it was of the flow's own sizes, and after a step of such.
    """
    factors = np.ones(len(seconds))
    slowdown: dict[OtherWork, float] = {}
    shares = {other: overlap[other] for other in get_args(OtherWork) if other != kind}
    told = {other: share for other, share in shares.items() if float((share * seconds).sum()) >= _LEAST_OVERLAP_S}
    constants, quality = fit(sizes, seconds, doubted=(0, 2))
    for _ in range(_TURNS if told else 0):
        alone = np.maximum(sizes @ constants, 1e-9)
        # seconds = alone * (1 + sum of share * (slowdown - 1)), so the excess over `alone` is a linear sum too.
        extra, _ = fit(np.stack([alone, *(alone * share for share in told.values())], 1), seconds)
        added = extra[1:] / max(float(extra[0]), 1e-9)
        slowdown = {other: float(np.clip(1 + more, 1.0, _MOST_SLOWDOWN)) for other, more in zip(told, added, strict=True)}
        factors = np.ones(len(seconds))
        for other, share in told.items():
            factors = factors + (slowdown[other] - 1) * share
        constants, quality = fit(sizes, seconds / factors, doubted=(0, 2))
    if is_settled.any():
        alone, own = sizes[is_settled] @ constants, (seconds / factors)[is_settled]
        constants = constants * total_ratio(own, alone)
    return _Fit(constants, quality, slowdown)


def _syncs(run: Measurement) -> list[MeasuredSync]:
    seen, found = run.observed, []
    for sync in run.plan.syncs:
        loads = seen.loads.get((sync.role, sync.target), np.zeros(0))
        if len(loads):
            publish_s = robust_mean(seen.publishes.get((sync.role, sync.source), []))
            num_bytes = seen.weight_bytes.get(sync.role, 0)
            found.append(MeasuredSync(sync.role, sync.transport, num_bytes, publish_s, robust_mean(loads), len(loads)))
    return found


def _hop_s(runs: Sequence[Measurement]) -> float:
    hops = np.concatenate([run.observed.hops for run in runs]) if runs else np.zeros(0)
    return float(np.median(hops)) if len(hops) else 0.0
