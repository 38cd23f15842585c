"""Third pass: how many samples does a task have at most?

    Stages --chunking--> Stages with `chunk`

A rollout engine gets as many samples as decode together well; a function gets a few tens, so that its results can flow on
while the next ones run. These are upper bounds: the scheduler hands on what is ready and does not wait for a chunk to fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from m2flow.micro.plan import Stage
from m2flow.spec import ClusterSpec


def chunk(stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[Stage, ...]:
    """Each stage with its chunk size."""
    sizes = {"rollout": spec.rollout.max_running, "function": spec.functions.chunk, "train": spec.functions.chunk}
    return tuple(msgspec.structs.replace(stage, chunk=sizes.get(stage.engine, 0)) for stage in stages)


class Sizes(NamedTuple):
    """How much of a call a task takes."""

    chunk: int
    token_budget: int


def sizes_of(stages: tuple[Stage, ...]) -> dict[str, Sizes]:
    """By the call's name: a later call of the same name has them too."""
    return {stage.call: Sizes(stage.chunk, stage.token_budget) for stage in stages}


def resize(stages: tuple[Stage, ...], sizes: Mapping[str, Sizes]) -> tuple[Stage, ...]:
    """The stages with the sizes that a plan has for calls of their names."""
    found = ((stage, sizes.get(stage.call)) for stage in stages)
    return tuple(msgspec.structs.replace(s, chunk=z.chunk, token_budget=z.token_budget) if z else s for s, z in found)
