"""Counts of a run for people: what the display and the summary show."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

_PACE_STEPS = 6
"""The pace of a run goes by the ends of so many steps."""


@dataclass(frozen=True)
class Apart:
    """Updates in which trainer and rollout judged tokens too differently."""

    num_updates: int
    step: int
    """Of the worst one."""
    mean: float
    """Its mean absolute difference of log-probabilities, in nats."""


@dataclass
class Tally:
    """Counts of the run so far. Written by one thread, read by others."""

    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    """Generated tokens."""
    steps_before: int = 0
    """Of these, those that were there when the run was taken up again, as are `samples_before` and `tokens_before`."""
    samples_before: int = 0
    tokens_before: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each update, in order."""
    logs: dict[str, float] = field(default_factory=dict)
    """The last value of each logged name."""
    example: tuple[str, str] = ("", "")
    """A recent prompt and its response."""
    apart: Apart | None = None
    """None: there was no such update."""
    step_ends: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    """When so many steps were done, by `time.monotonic`: of the last ones since the run began or was taken up again."""

    def steps_done(self, num_steps: int) -> None:
        """So many steps are done by now; fewer than before say nothing."""
        if num_steps > self.num_steps:
            self.step_ends.append((time.monotonic(), num_steps))
            self.num_steps = num_steps

    def step_s(self, now_s: float) -> float | None:
        """Seconds a step, as fast as the last ones were; None: not two steps have ended yet."""
        ends = tuple(self.step_ends)
        if len(ends) < 2:
            return None
        (first_s, first), (last_s, last) = ends[0], ends[-1]
        # A step that takes longer than those before it does so already.
        return max((last_s - first_s) / (last - first), (now_s - last_s) / 2 if now_s - last_s > last_s - first_s else 0.0)
