"""What a reward is made of: the named numbers that a reward's function gives beside the one that counts.

    {"reward": 0.7, "right": 1.0, "brevity": -0.3} --judged--> Judged(0.7, {"right": 1.0, "brevity": -0.3})
    a task's results --rewards_of--> rows with their parts --without_parts--> rows for others; parts for the record

Nothing computes with parts, so they go to the ledger and nowhere else: rows that are stored, sent or trained on are the same with and
without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from m2flow.samples import Batch, Column, Ragged

Parts = dict[str, float]
"""By name; a reward may have none."""

_REWARD = "reward"
_PARTS = "reward parts"
"""A column's name that no dataset's row and no function can take for its own: it is no identifier."""


class Judged(NamedTuple):
    """What a function said of one sample, before it is looked at."""

    reward: object
    parts: Mapping[object, object]


def judged(value: object) -> Judged:
    """A mapping or a dataclass with a `reward`, taken apart; anything else is the reward itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping) or _REWARD not in value:
        return Judged(value, {})
    return Judged(value[_REWARD], {name: part for name, part in value.items() if name != _REWARD})


def rewards_of(values: Sequence[object]) -> dict[str, Column]:
    """The columns of rewards, each a number or a `Judged` of numbers: the rewards, and their parts if any has some."""
    apart = [value if isinstance(value, Judged) else Judged(value, {}) for value in values]
    columns: dict[str, Column] = {_REWARD: np.array([one.reward for one in apart], np.float64)}
    return columns | {_PARTS: Ragged.json([one.parts for one in apart])} if any(one.parts for one in apart) else columns


def without_parts(rows: Batch) -> tuple[Batch, list[Parts]]:
    """Rows as others get them, and the parts of each row's reward; no list where none has any."""
    if _PARTS not in rows:
        return rows, []
    parts = rows.ragged(_PARTS)
    found = [dict(parts.item(row)) for row in range(len(rows))]  # type: ignore[call-overload]
    return rows.only([name for name in rows.columns if name != _PARTS]), found
