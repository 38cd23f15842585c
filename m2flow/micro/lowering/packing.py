"""Fourth pass: how are micro-batches filled?

    Stages --packing--> Stages with `token_budget`

A micro-batch is filled with whole units (a group, or a sample where siblings do not matter) up to a budget of tokens; a unit that
is larger than the budget has one of its own. `cut` is that rule in identity order, used where the cut must not depend on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2flow.micro.plan import Stage
from m2flow.spec import ClusterSpec


def pack(stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[Stage, ...]:
    """Each train stage with its budget."""
    budget = spec.train.token_budget
    return tuple(msgspec.structs.replace(s, token_budget=budget) if s.engine == "train" else s for s in stages)


def cut(num_tokens: Sequence[int], budget: int) -> list[int]:
    """How many units each micro-batch takes, one after the other.

    >>> cut([3, 3, 3, 9, 1], budget=8)
    [2, 1, 1, 1]
    """
    sizes: list[int] = []
    filled = 0
    for tokens in num_tokens:
        if sizes and filled + tokens <= budget:
            sizes[-1] += 1
            filled += tokens
        else:
            sizes.append(1)
            filled = tokens
    return sizes
