"""Which versions of the weights made which tokens of a sample, which versions a generation may use, and the checks of it.

tokens of versions 3 3 3 3 4 4    ->    (4, 3), (2, 4)

A sample has a stretch for each change of weights under it, and for each change between a cache as old as its tokens and an older one.
Eager, given that record, makes each sample from the same stretches (`m2flow.micro.worker.eager_executor`). A sample that was stopped
and went on
with the same weights has one stretch: an engine that keeps its contract gives the same tokens as if it had never stopped.

A generate call reads a window of versions (`m2flow.macro.graph.Effect`): the one of sequential execution, and as many older ones as
the flow's staleness allows. The window is held three times: by the rollout desk when it hands a sample out, by the engine's process
when it admits one, and by the trainer when it consumes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.macro.oversampling import CARRIED, is_cut
from m2flow.samples import Batch, SampleId


class VersionSpan(NamedTuple):
    """Tokens of a sample that were made one after the other in the same way."""

    num_tokens: int
    version: int
    is_stale: bool = False
    """They attended to keys and values of older weights."""


class Decision(NamedTuple):
    """What time decided about one sample."""

    call: int
    """The one whose result it is in: not always the one that drew it."""
    stretches: tuple[VersionSpan, ...]

    @property
    def oldest(self) -> int:
        """The oldest version among its tokens."""
        return min(stretch.version for stretch in self.stretches)


Decisions = Mapping[int, Decision]
"""By sample."""


def version_spans_of(samples: Batch) -> list[tuple[VersionSpan, ...]]:
    """The stretches of each sample's generated tokens."""
    versions, stale = samples.ragged("versions"), samples.ragged("kv_stale")
    found = []
    for row in range(len(samples)):
        version = np.asarray(versions.row(row), np.int32)
        made = np.stack([version, np.asarray(stale.row(row), np.int32)], axis=1)[version >= 0]
        edges = [0, *(np.flatnonzero(np.any(np.diff(made, axis=0), axis=1)) + 1).tolist(), len(made)]
        found.append(tuple(VersionSpan(b - a, int(made[a, 0]), bool(made[a, 1])) for a, b in itertools.pairwise(edges) if a < b))
    return found


def given_by(call: int, ids: Sequence[int], stretches: Sequence[Sequence[VersionSpan]]) -> dict[int, Decision]:
    """The decisions about samples of one call's result."""
    return {packed: Decision(call, tuple(of)) for packed, of in zip(ids, stretches, strict=True)}


ANY_VERSION = 2**31 - 1


def window(call: Call) -> tuple[int, int]:
    """The oldest and the newest version that a generate call may use: any, if it reads no weights that anything writes."""
    return (call.reads[0].first, call.reads[0].version) if call.reads else (0, ANY_VERSION)


def is_time_dependent(call: Call) -> bool:
    """Whether a call generates, and which version it uses or which groups it gives depends on time, so that the run must record it."""
    return call.engine == "rollout" and (is_cut(call.options) or any(effect.first < effect.version for effect in call.reads))


def check_admission(call: Call, version: int) -> None:
    """A sample is about to be generated, or to go on, by weights of this version."""
    oldest, newest = window(call)
    if not oldest <= version <= newest:
        raise InternalError(
            f"{call.name} at {call.site} may use versions {oldest} to {newest} of the weights, and the engine holds {version}"
        )


def check_given(call: Call, sample: int, stretches: Sequence[VersionSpan]) -> None:
    """A sample is about to be in a call's result, whoever drew it; or to go on there from these stretches."""
    oldest, newest = window(call)
    used = [stretch.version for stretch in stretches]
    if used and not oldest <= min(used) <= max(used) <= newest:
        raise InternalError(
            f"{call.name} at {call.site} may use versions {oldest} to {newest} of the weights, and sample {SampleId.unpack(sample)} "
            f"has tokens of {min(used)} to {max(used)}"
        )


def check_consumption(call: Call, samples: Batch) -> None:
    """Samples are about to be trained on: every token that was generated is of the window of the call that gives it."""
    windows = call.options.get("windows")
    if not isinstance(windows, Mapping) or not windows or "versions" not in samples:
        return
    versions = samples.ragged("versions")
    for row, packed in enumerate(samples.ids.tolist()):
        who = SampleId.unpack(packed)
        allowed = windows.get(who.call, windows.get(CARRIED))
        if allowed is None:
            continue
        oldest, newest = allowed
        used = {int(version) for version in np.unique(versions.row(row))} - {-1}
        if used and not (oldest <= min(used) and max(used) <= newest):
            raise InternalError(
                f"sample {who} has tokens of versions {min(used)} to {max(used)}; {call.name} at {call.site} may train on "
                f"{oldest} to {newest} only"
            )
