"""Which versions of the weights a generation may use, and the checks that it used no other.

A generate call reads a window of versions (`m2flow.macro.graph.Effect`): the one of sequential execution, and as many older ones as
the flow's staleness allows. The window is held three times: by the rollout desk when it hands a sample out, by the engine's process
when it admits one, and by the trainer when it consumes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.macro.late import CARRIED, is_cut
from m2flow.micro.record.decisions import Stretch
from m2flow.samples import Batch, SampleId

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


def check_given(call: Call, sample: int, stretches: Sequence[Stretch]) -> None:
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
