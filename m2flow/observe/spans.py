"""The span and its recorder: names, attributes, recording with little overhead, and busy and overlap times over spans.

A span is a named interval on a track, `worker` or `worker/engine`. Its lane is where a viewer draws it: the engine comes from the track,
or, where one worker hosts several engines and records them on one track, from the span's name. Names outside `SpanName` are allowed (a
user's role records its own); viewers draw them, and count them as work.

Attributes that viewers understand:

    call         ordinal of the call in program order; its samples' identities carry the same number
    flow_line    the line that made the call, "flows/grpo.py:23"
    label        what was called there, "policy.generate"
    step, version, num_samples, num_tokens, length
    sample       of a `sample` span: a packed `SampleId`, or its text "p17/3" together with `call`
    num_steps    decode steps that the span stands for, if it is not one
    finish       how the sample's stay ended: `stop`, `length`, `abort` (it may go on elsewhere), `given_up`
    had          tokens that it came with, to continue from
    waited_us, first_us
                 from its call to its admission, and from there to the first token that it got
    versions, version_tokens
                 of the weights, where there were several, and how many tokens each made
    num_prompt_tokens
                 of its prompt
    turn, conversation, speaker
                 of a `turn` span: its number in its conversation, from 1; and this, and who speaks, where an episode has several
    role, worker of a `turn` span: the role of who speaks, where it is another's; and the worker with its engine, where that is another
    num_new_tokens, num_cached
                 of a `turn` span: tokens of its prompt that the turn before it did not have, and those that the engine found in its
                 prefix cache, where it says so
    outcome      of a `tool` span, whose `label` is the tool's name: `ok`, `error` (the model was told), `failed` (the end of the episode),
                 `cancelled`
    slots, own_slots
                 of a `tool` span: how many such calls run at once in a process, where that is limited, and whether the tool has them for
                 itself; it `waited_us` for one
    samples      the samples that the work was done on: packed identities, or a `range` of them
    unit_us      microseconds of each unit that a function was called on, in the order of their ends
    rewards      of a `function.call` span of a reward: what each of the samples got
    num_bytes    what was moved
    gb_per_s, transport, how, share_changed
                 of a weight sync: 10^9 bytes a second, over what, what was decided about sending only changed values and why, and the
                 share of values that changed
    rank_bytes   of a `weights.publish` span: bytes that each rank of the trainer wrote; absent where one process wrote all
    error        the exception's name, if the work raised

Counters, by worker:

    running, waiting, kv tokens, kv capacity, version, ROLE
                 of a rollout engine: its samples, its cache, and the version of its weights
    silent episodes, ROLE
                 in which no turn and no tool call has been under way for ten minutes
    put back for want of memory, ROLE
                 times that a running sample was preempted
    tokens found in the cache, ROLE
                 so far, where the engine says so
    idle seconds, CAUSE
                 so far: `tool`, in which a rollout engine's episodes all waited for tools or agents; `speakers`, for speakers elsewhere;
                 `rows`, in which the worker's next task waited for its rows; `task`, in which it had none
    generated tokens, tokens/s
    loss, ROLE   of a trainer: of each optimiser step
    tokens shared in training
                 of a trainer: tokens so far that went through the model with another sample, which begins alike
    cpu seconds, cpu cores, memory bytes, gpu use, gpu memory bytes
                 once a second; cores in use, and the use of an NVIDIA GPU from 0 to 1
    clock offset s, clock error s
                 of the worker's clock to the controller's
    channel to NAME: bytes, samples, parcels, seconds blocked
    channel samples, channel bytes, A to B
                 of the controller: the backpressure credits in use
    program seconds, CALL
                 of the controller: seconds that the flow's own Python took before it made this call, at this line, since the run began;
                 `between calls` before it waited for a value or for a step

The hot path appends (name, start, end, attributes) to a list; naming, anchoring, checking and writing happen elsewhere and later
(`drain`, then `m2flow.observe.store`). Appending is safe from several threads; `drain` belongs to one. The list grows until it is
drained: a worker drains with every message to the controller, or at least every few seconds.

Times are `time.monotonic_ns()`, anchored once to the wall clock. On Linux the processes of a host share that clock, so their spans
compare to the microsecond whatever happens to the wall clock meanwhile; spans of other hosts are shifted into the controller's time
when they are stored (`m2flow.micro.controller.supervisor`).

Busy and overlap times are lengths of unions of intervals, so nested or doubled spans count once.
"""

from __future__ import annotations

import enum
import re
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, final

import msgspec

from m2flow.errors import InternalError
from m2flow.samples import SampleId

Attribute = str | int | float | bool | None | list[int | float | str | bool | None]
"""What an attribute is on the wire."""


class SpanName(enum.StrEnum):
    """The names that m2flow's own workers record."""

    ROLLOUT_STEP = "rollout.step"
    """A decode step for all that run, or several merged into one span."""
    ROLLOUT_PREFILL = "rollout.prefill"
    """Prompts (and prefixes) going through the model at admission."""
    SAMPLE = "sample"
    """A sample's stay in one engine, from its admission to its last token. Not work: it never makes a lane busy."""
    FUNCTION_CALL = "function.call"
    """A reward or an op on one chunk."""
    TRAIN_ACCUMULATE = "train.accumulate"
    """Forward and backward of one micro-batch."""
    TRAIN_LOGPROBS = "train.logprobs"
    """Log-probabilities of given tokens, forward only."""
    TRAIN_APPLY = "train.apply"
    """One optimiser step."""
    TRAIN_SAVE = "train.save"
    """A model and its optimisers' state being written to the disk."""
    TRAIN_PROBE = "train.probe"
    """A trainer computes the log-probabilities of a few sequences, to compare rollout engines with."""
    ROLLOUT_PROBE = "rollout.probe"
    """A rollout engine that has loaded the weights computes the same; `mean` and `largest` are the differences."""
    WEIGHTS_PUBLISH = "weights.publish"
    """A trainer makes version `version` available to others."""
    WEIGHTS_LOAD = "weights.load"
    """A rollout engine loads version `version`."""
    SWITCH = "switch"
    """A context switch: one engine leaves a device, another takes it."""
    DRAIN = "switch.drain"
    """Before a switch, a rollout engine drains: from the first sample that left with none waiting, until the switch. Not work."""
    OFFLOAD = "switch.offload"
    """Part of a switch: an engine leaves the device, with the bytes that it freed."""
    ONLOAD = "switch.onload"
    """Part of a switch: an engine comes to the device, with the bytes that it took."""
    SEND = "send"
    """Sending a parcel, including the time blocked by backpressure of the peer. Not work."""
    WAIT = "wait"
    """Nothing to do, or blocked on a peer. Not work."""
    TURN = "turn"
    """A turn of an episode, from when its agent asks for it to the answer. Not work: the decode steps are."""
    TOOL = "tool"
    """A call of a tool in an episode. Not work of a device."""


IDLE = "idle seconds"
"""Counter of the time in which a worker waited, by cause."""
FOR_AGENTS = "for agents and tools"
FOR_SPEAKERS = "for speakers elsewhere"
"""Labels of `wait` spans in which a rollout engine has nothing to decode, since its episodes wait for others."""
OF_EPISODES = frozenset({SpanName.TURN, SpanName.TOOL})
"""Names of the parts of a `sample` span, of a sample that is an episode."""
IDLE_NAMES = frozenset({SpanName.SAMPLE, SpanName.DRAIN, SpanName.SEND, SpanName.WAIT}) | OF_EPISODES
"""Names whose spans do not make a lane busy."""

_ENGINES = {"rollout": "rollout", "sample": "rollout", "turn": "rollout", "tool": "rollout", "function": "function", "train": "train"}
_ENGINES_BY_NAME = {SpanName.WEIGHTS_PUBLISH: "train", SpanName.WEIGHTS_LOAD: "rollout"}


class SpanBlock(msgspec.Struct, frozen=True):
    """What one recorder gathered between two drains, to be sent. Times are monotonic ns; `anchor_ns` makes them wall-clock."""

    track: str
    anchor_ns: int
    """Unix time minus monotonic time, in ns."""
    spans: list[tuple[str, int, int, dict[str, Attribute]]]
    """Name, start, end, attributes."""
    counts: list[tuple[str, float, int]]
    """Name, value, time."""

    def __bool__(self) -> bool:
        return bool(self.spans or self.counts)


class Span(msgspec.Struct, frozen=True):
    """A span as readers see it; times in Unix ns."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute] = {}

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def lane(self) -> tuple[str, str]:
        """Worker and engine."""
        worker, _, engine = self.track.partition("/")
        engine = engine or _ENGINES_BY_NAME.get(self.name, "") or _ENGINES.get(self.name.partition(".")[0], "")  # type: ignore[call-overload]
        return worker, engine or "worker"

    @property
    def is_work(self) -> bool:
        return self.name not in IDLE_NAMES


class Count(msgspec.Struct, frozen=True):
    """The value of a counter from `at_ns` (Unix ns) on."""

    track: str
    name: str
    value: float
    at_ns: int


def spans_of(block: SpanBlock) -> list[Span]:
    """Convert a block's spans to wall-clock time. One that ends before it starts becomes a point, and says so in `clamped`."""
    anchor = block.anchor_ns
    return [
        Span(block.track, name, start + anchor, max(start, end) + anchor, attributes if end >= start else {**attributes, "clamped": True})
        for name, start, end, attributes in block.spans
    ]


def counts_of(block: SpanBlock) -> list[Count]:
    return [Count(block.track, name, value, at_ns + block.anchor_ns) for name, value, at_ns in block.counts]


def sample_of(span: Span) -> int | None:
    """The packed identity in the attribute `sample`, or None where the attributes do not tell it."""
    sample, call = span.attributes.get("sample"), span.attributes.get("call")
    if isinstance(sample, int):
        return sample
    if isinstance(sample, str) and isinstance(call, int) and (found := re.fullmatch(r"p(\d+)/(\d+)", sample)):
        try:
            return SampleId(call, int(found[1]), int(found[2])).pack()
        except InternalError:
            return None
    return None


def samples_of(span: Span) -> Sequence[int]:
    """The packed identities in the attribute `samples`."""
    samples = span.attributes.get("samples")
    if isinstance(samples, list):
        return [sample for sample in samples if isinstance(sample, int)]
    if isinstance(samples, str) and (found := re.fullmatch(r"(\d+):(\d+):(\d+)", samples)) and int(found[3]):
        return range(int(found[1]), int(found[2]), int(found[3]))
    return ()


def shown_name(span: Span) -> str:
    """A span's name as it is shown.

    >>> shown_name(Span("rollout-0", "tool", 0, 9, {"label": "search"})), shown_name(Span("rollout-0", "turn", 0, 9, {"turn": 2}))
    ('tool search', 'turn 2')
    """
    attributes = span.attributes
    if span.name == SpanName.TOOL:
        return f"tool {attributes.get('label', '')}".rstrip()
    if span.name == SpanName.TURN:
        parts = [attributes[key] for key in ("conversation", "speaker") if key in attributes]
        return f"turn {attributes.get('turn', '')}" + (f" of {', by '.join(map(str, parts))}" if parts else "")
    return span.name


def turns_told(stays: Sequence[Span]) -> list[str]:
    """A line for each turn and each tool call of an episode.

    Args:
        stays: its `sample`, `turn` and `tool` spans, in order of start.
    """
    return [
        f"{shown_name(span)}: {_what(span)}, {span.duration_s:.3g} s from {(span.start_ns - stays[0].start_ns) / 1e9:.3g} s on"
        for span in stays
        if span.name in OF_EPISODES
    ]


def with_turns(life: Sequence[str], stays: Sequence[Span]) -> list[str]:
    """A sample's events with those of its turns, which come before the end of its generation. Arguments as of `turns_told`."""
    at = next((at for at, event in enumerate(life) if event.startswith("generated: ")), len(life))
    return [*life[:at], *turns_told(stays), *life[at:]]


def _what(span: Span) -> str:
    if span.name == SpanName.TOOL:
        waited = span.attributes.get("waited_us")
        late = f" after {waited / 1e6:.3g} s for a slot" if isinstance(waited, int) and waited > _WORTH_TELLING_US else ""
        return f"{span.attributes.get('outcome', 'ok')}{late}"
    of = {key: span.attributes.get(key, 0) for key in ("num_tokens", "num_prompt_tokens", "num_cached")}
    cached = f", {of['num_cached']} of them cached" if of["num_cached"] else ""
    return f"{of['num_tokens']} tokens after {of['num_prompt_tokens']}{cached}, ended by {span.attributes.get('finish', '')}"


_WORTH_TELLING_US = 50_000


def plain_attributes(attributes: Mapping[str, object]) -> dict[str, Attribute]:
    """Convert attributes to types that msgpack encodes: NumPy scalars and arrays, enums, ranges and identities become plain values.

    >>> plain_attributes({"samples": range(4096, 4100), "sample": SampleId(0, 1, 3)})
    {'samples': '4096:4100:1', 'sample': 4099}
    """
    return {key: value if type(value) in _PLAIN else _plain(value) for key, value in attributes.items()}  # type: ignore[misc]


_PLAIN = frozenset({str, int, float, bool, type(None)})


def _plain(value: object) -> Attribute:
    if isinstance(value, SampleId):
        return value.pack()
    if isinstance(value, range):
        return f"{value.start}:{value.stop}:{value.step}"
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else str(value.value)
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        value = value.tolist()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return [item if not isinstance(item, list) else str(item) for item in items]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


now_ns = time.monotonic_ns
"""The recorder's clock."""


@final
class Recorder:
    """Record the spans and counters of one track.

    >>> recorder = Recorder("trainer-0/train")
    >>> with recorder.span("train.accumulate", call=4, num_tokens=512) as span:
    ...     span.set(num_samples=3)
    >>> [(name, attributes) for name, _, _, attributes in recorder.drain().spans]
    [('train.accumulate', {'call': 4, 'num_tokens': 512, 'num_samples': 3})]
    """

    def __init__(self, track: str) -> None:
        self.track = track
        self.anchor_ns = unix_anchor_ns()
        self._spans: list[tuple[str, int, int, dict[str, Any]]] = []
        self._counts: list[tuple[str, float, int]] = []
        self._idle_s: dict[str, float] = {}
        """By cause."""

    def __len__(self) -> int:
        """Spans and counts not yet drained."""
        return len(self._spans) + len(self._counts)

    def add(self, name: str, start_ns: int, end_ns: int, **attributes: object) -> None:
        """Record a span whose times (by `now_ns`) are known."""
        self._spans.append((name, start_ns, end_ns, attributes))

    def span(self, name: str, **attributes: object) -> OpenSpan:
        """Record the body of a `with`. If the body raises, the span has `error`, the exception's name, and the exception goes on."""
        return OpenSpan(self, name, attributes)

    def waited(self, cause: str, start_ns: int, end_ns: int, **attributes: object) -> None:
        """Record a `wait` span, and the seconds of this cause so far."""
        self.add(SpanName.WAIT, start_ns, end_ns, **attributes)
        self._idle_s[cause] = self._idle_s.get(cause, 0.0) + (end_ns - start_ns) / 1e9
        self.count(f"{IDLE}, {cause}", round(self._idle_s[cause], 6), end_ns)

    def count(self, name: str, value: float, at_ns: int | None = None) -> None:
        """Record a counter's new value."""
        self._counts.append((name, value, now_ns() if at_ns is None else at_ns))

    def drain(self) -> SpanBlock:
        """Return all that was recorded since the last drain, ready to be sent."""
        # Copy, then delete that many: a thread that appends in between keeps its span for the next drain.
        spans, counts = self._spans[:], self._counts[:]
        del self._spans[: len(spans)], self._counts[: len(counts)]
        return SpanBlock(
            self.track,
            self.anchor_ns,
            [(str(name), int(start), int(end), plain_attributes(attributes)) for name, start, end, attributes in spans],
            [(str(name), float(value), int(at_ns)) for name, value, at_ns in counts],
        )


@final
class OpenSpan:
    """A span that is being recorded; it accepts further attributes until it closes."""

    __slots__ = ("_attributes", "_name", "_recorder", "_start_ns")

    def __init__(self, recorder: Recorder, name: str, attributes: dict[str, object]) -> None:
        self._recorder = recorder
        self._name = name
        self._attributes = attributes
        self._start_ns = 0

    def set(self, **attributes: object) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> OpenSpan:
        self._start_ns = now_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self._attributes["error"] = kind.__name__
        self._recorder._spans.append((self._name, self._start_ns, now_ns(), self._attributes))


def unix_anchor_ns() -> int:
    """Unix time minus monotonic time: of a few readings, the one that was interrupted least."""
    readings = []
    for _ in range(5):
        before, wall, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


_Key = TypeVar("_Key", bound=Hashable)
Predicate = Callable[[Span], bool]
Interval = tuple[int, int]
"""[start, end) in ns."""


def busy_seconds(spans: Iterable[Span], during: Interval | None = None) -> dict[str, float]:
    """Seconds in which each track worked, of that interval if one is given. Waiting, sending and `sample` spans are not work; a track
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
