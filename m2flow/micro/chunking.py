"""Third pass: how many samples does a task have at most?

    Stages --chunking--> Stages with `chunk`

A rollout engine gets as many samples as decode together well; a function gets a few tens, so that its results can flow on
while the next ones run. These are upper bounds: the scheduler hands on what is ready and does not wait for a chunk to fill.
"""

from __future__ import annotations

import msgspec

from m2flow.micro.plan import Stage
from m2flow.spec import ClusterSpec


def chunk(stages: tuple[Stage, ...], spec: ClusterSpec) -> tuple[Stage, ...]:
    """Each stage with its chunk size."""
    sizes = {"rollout": spec.rollout.max_running, "function": spec.functions.chunk, "train": spec.functions.chunk}
    return tuple(msgspec.structs.replace(stage, chunk=sizes.get(stage.engine, 0)) for stage in stages)
