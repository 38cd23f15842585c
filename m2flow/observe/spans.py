"""The span: a named stretch of time on a track, and the names that m2flow gives.

A track is `worker` or `worker/engine`. Its lane is where a viewer draws the span: the engine comes from the track, or, where one
worker hosts several engines and records them on one track, from the name. Names outside `SpanName` are allowed (a user's role
records its own); viewers draw them, and count them as work.

Attributes that viewers understand:

    call         ordinal of the call in program order; its samples' identities carry the same number
    flow_line    the line that made the call, "flows/grpo.py:23"
    label        what was called there, "policy.generate"
    step, version, num_samples, num_tokens, length
    sample       whose life it is: a packed `SampleId`, or its text "p17/3" beside `call`
    num_steps    decode steps that the span stands for, if it is not one
    finish       how the sample's stay ended: `stop`, `length`, `abort` (it may go on elsewhere), `given_up`
    had          tokens with which it came, to go on from
    waited_us, first_us
                 from its call to its admission, and from there to the first token that it got
    versions, version_tokens
                 of the weights, where there were several, and how many tokens each made
    num_prompt_tokens
                 of its prompt
    samples      whom the work was done on: packed identities, or a `range` of them
    unit_us      microseconds of each unit that a function was called on, in the order of their ends
    num_bytes    what was moved
    gb_per_s, transport, how, share_changed
                 of a weight sync: 10^9 bytes a second, over what, what was decided about sending changes alone and why, and the share of
                 values that changed
    error        the exception's name, if the work raised
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence

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
    """A sample's life in one engine, from its admission to its last token. A life, not work: it never makes a lane busy."""
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
    """What weights that go to rollout engines make of a few sequences."""
    ROLLOUT_PROBE = "rollout.probe"
    """The same by a rollout engine that has taken them in; `mean` and `largest` are the differences."""
    WEIGHTS_PUBLISH = "weights.publish"
    """A trainer makes version `version` available to others."""
    WEIGHTS_LOAD = "weights.load"
    """A rollout engine takes version `version` in."""
    SWITCH = "switch"
    """A context switch: one engine leaves a device, another takes it."""
    DRAIN = "switch.drain"
    """Before one: a rollout engine runs out of samples, from the first that left with none waiting until the switch. Not work."""
    OFFLOAD = "switch.offload"
    """Of one, an engine leaving, with the bytes that it gave back of the device."""
    ONLOAD = "switch.onload"
    """Of one, an engine coming, with the bytes that it took."""
    SEND = "send"
    """A parcel on its way out, with the time blocked on a full peer. Not work."""
    WAIT = "wait"
    """Nothing to do, or blocked on a peer. Not work."""


IDLE_NAMES = frozenset({SpanName.SAMPLE, SpanName.DRAIN, SpanName.SEND, SpanName.WAIT})
"""Names whose spans do not make a lane busy."""

_ENGINES = {"rollout": "rollout", "sample": "rollout", "function": "function", "train": "train"}
_ENGINES_BY_NAME = {SpanName.WEIGHTS_PUBLISH: "train", SpanName.WEIGHTS_LOAD: "rollout"}


class SpanBlock(msgspec.Struct, frozen=True):
    """What one recorder gathered between two drains, for the wire. Times are monotonic ns; `anchor_ns` makes them wall-clock."""

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
    """The block's spans in wall-clock time. One that ends before it starts becomes a point, and says so in `clamped`."""
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


def plain_attributes(attributes: Mapping[str, object]) -> dict[str, Attribute]:
    """Attributes as the wire takes them: NumPy scalars and arrays, enums, ranges and identities become plain values.

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
