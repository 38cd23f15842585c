"""What a run records where time decides: which call gave each sample, and which version of the weights made how many of its tokens.

    tokens of versions 3 3 3 3 4 4    ->    (4, 3), (2, 4)

A sample has a stretch for each change of weights under it, and for each change between a cache as old as its tokens and an older one.
Eager, given that record, makes each sample from the same stretches (`m2flow.micro.work.regrowing`). A sample that was stopped and went on
with the same weights has one stretch: an engine that keeps its contract gives the same tokens as if it had never stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from m2flow.samples import Batch


class Stretch(NamedTuple):
    """Tokens of a sample that were made one after the other in the same way."""

    num_tokens: int
    version: int
    is_stale: bool = False
    """They attended to keys and values of older weights."""


class Decision(NamedTuple):
    """What time decided about one sample."""

    call: int
    """The one whose result it is in: not always the one that drew it."""
    stretches: tuple[Stretch, ...]

    @property
    def oldest(self) -> int:
        """The oldest version among its tokens."""
        return min(stretch.version for stretch in self.stretches)


Decisions = Mapping[int, Decision]
"""By sample."""


def stretches_of(samples: Batch) -> list[tuple[Stretch, ...]]:
    """The stretches of each sample's generated tokens."""
    versions, stale = samples.ragged("versions"), samples.ragged("kv_stale")
    found = []
    for row in range(len(samples)):
        version = np.asarray(versions.row(row), np.int32)
        made = np.stack([version, np.asarray(stale.row(row), np.int32)], axis=1)[version >= 0]
        edges = [0, *(np.flatnonzero(np.any(np.diff(made, axis=0), axis=1)) + 1).tolist(), len(made)]
        found.append(tuple(Stretch(b - a, int(made[a, 0]), bool(made[a, 1])) for a, b in itertools.pairwise(edges) if a < b))
    return found


def given_by(call: int, ids: Sequence[int], stretches: Sequence[Sequence[Stretch]]) -> dict[int, Decision]:
    """The decisions about samples of one call's result."""
    return {packed: Decision(call, tuple(of)) for packed, of in zip(ids, stretches, strict=True)}
