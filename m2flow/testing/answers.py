"""What a run came to, as far as it must not depend on the plan: what eager and planned runs are compared by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.micro.record.decisions import Decision, Decisions
from m2flow.micro.record.segments import Place, read_segment
from m2flow.observe.spans import SpanBlock
from m2flow.samples import Batch, SampleId


@dataclass
class Answer:
    """What a run came to: everything that must not depend on the plan."""

    samples: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Identity -> token ids, versions."""
    rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    """(call, sample) -> reward."""
    parts: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    """(call, sample) -> what its reward is made of, where the function said so."""
    consumed: list[tuple[int, int, int]] = field(default_factory=list)
    """(update call, epoch, sample), sorted."""
    logs: list[tuple[int, str, float]] = field(default_factory=list)
    decisions: dict[int, Decision] = field(default_factory=dict)
    """Sample -> which call gave it and which versions made its tokens, where that depended on time."""
    weights: dict[str, str] = field(default_factory=dict)
    """Role -> digest of its trained weights."""
    error: str = ""
    """The error that the flow ended with."""
    where: str = ""
    """The line that it names, and how the program got there."""

    def forget(self, failed: Collection[int]) -> None:
        """Drop what calls made that failed, of which the plan decides how much there is, and not what time decided, which eager needs."""
        self.samples = {packed: one for packed, one in self.samples.items() if SampleId.unpack(packed).call not in failed}
        self.rewards = {key: one for key, one in self.rewards.items() if key[0] not in failed}
        self.parts = {key: one for key, one in self.parts.items() if key[0] not in failed}

    def rewarded(self, call: int, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]]) -> None:
        """A call judged these samples; `parts` is empty where none of its rewards has any."""
        self.rewards.update(((call, packed), value) for packed, value in zip(ids, values, strict=True))
        self.parts.update(((call, packed), of) for packed, of in zip(ids, parts, strict=False) if of)


def samples_of(rows: Batch) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Identity -> token ids, versions."""
    tokens, versions = rows.ragged("tokens"), rows.ragged("versions")
    return {packed: (tuple(tokens.row(i).tolist()), tuple(versions.row(i).tolist())) for i, packed in enumerate(rows.ids.tolist())}


class Notes:
    """Keeps what an eager run writes down (`m2flow.micro.work.inprocess.Notes`, `m2flow.macro.eager.Journal`)."""

    def __init__(self, run_dir: Path) -> None:
        self.answer = Answer()
        self.failed: set[int] = set()
        """Calls, and those under a refill that is one of them."""
        self._run_dir = run_dir

    def call_added(self, call: Call) -> None:
        pass

    def samples_done(
        self,
        call: Call,
        ids: Sequence[int],
        num_tokens: Sequence[int],
        num_generated: Sequence[int],
        finish: Sequence[int],
        place: Place,
        example: Sequence[str],
    ) -> None:
        self.answer.samples.update(samples_of(read_segment(self._run_dir / "segments", place)))

    def rewarded(self, call: Call, ids: Sequence[int], values: Sequence[float], parts: Sequence[Mapping[str, float]] = ()) -> None:
        self.answer.rewarded(call.ordinal, ids, values, parts)

    def decided(self, call: Call, decisions: Decisions) -> None:
        self.answer.decisions.update(decisions)

    def late(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def given(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None:
        self.answer.consumed += [(call.ordinal, epoch, packed) for packed in ids]

    def filtered(self, call: Call, ids: Sequence[int]) -> None:
        pass

    def call_done(self, call: Call, value: object) -> None:
        pass

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        self.failed.update((*call.under_refill, call.ordinal))

    def logged(self, step: int, name: str, value: float) -> None:
        self.answer.logs.append((step, name, value))

    def step_done(self, step: int) -> None:
        pass

    def spans(self, block: SpanBlock) -> None:
        pass
