"""What a simulation may take away from the scheduler, to see what it costs; a run takes nothing away.

    Scheduler(plan, relaxed=Relaxed(lengths=..., without_groups=True))     rungs of `m2flow.micro.simulation.ladder`

Both would need what no run has: the length of a sample before it ends, or an advantage that needs no siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Relaxed:
    """By default nothing."""

    lengths: Callable[[int], int] | None = None
    """Row -> tokens that it will generate, for the predictor `oracle`."""
    without_groups: bool = False
    """Groups are taken apart: a sample is trained on, and worked on by a function, without waiting for its siblings."""


NOTHING = Relaxed()
