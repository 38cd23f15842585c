"""What is structure in a call: all that a plan may depend on, and nothing that changes from step to step.

Sizes that rows come in (`n`) and what kind of result a function gives are structure. Functions, their captured values,
temperatures, token limits and versions are values: a flow that changes them is planned once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m2flow.macro.graph import Call

STRUCTURAL = frozenset({"advantages", "column", "epochs", "gives", "minibatch_size", "n", "refill", "source", "state", "style"})
"""The options that a lowering pass may read. The passes get calls without the others, so that none can be forgotten here."""

_IN_ORDER = tuple(sorted(STRUCTURAL))

Shape = tuple[object, ...]


def shape_of(call: Call) -> Shape:
    """A call by itself: equal shapes with equal consumers are lowered to equal stages."""
    options = call.options
    return (
        call.role,
        call.method,
        call.engine,
        call.granularity,
        call.is_aligned,
        tuple([name for name, _ in call.inputs]),
        tuple([effect.resource for effect in call.reads]),
        tuple([effect.resource for effect in call.writes]),
        tuple([(name, options[name]) for name in _IN_ORDER if name in options]),
    )


def wiring_of(call: Call, first: int) -> tuple[int, ...]:
    """Where a call's inputs are from, counted from the segment's first call; -1 for earlier segments."""
    return tuple([max(ref.call - first, -1) for _, ref in call.inputs])


def structure_hash(calls: Sequence[Call]) -> str:
    """The same in every process for calls of the same shapes, wiring and lines."""
    first = calls[0].ordinal if calls else 0
    text = "\n".join(f"{shape_of(call)!r} {wiring_of(call, first)} {call.site}" for call in calls)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
