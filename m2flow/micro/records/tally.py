"""Counts of a run for people, and the alarm when trainer and rollout engine judge its tokens too differently.

metrics of an update --Alarm.hear--> the tally, for the summary; and the first time a warning
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from m2flow.engines.contract import K3, MAX, MEAN, MOVED
from m2flow.macro.graph import Call

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


_FEW = 0.01
"""Share of weights that move, below which it is said."""


@final
class Alarm:
    """Args: warn_above: of the mean difference, in nats; None: never. warn: says something to the user."""

    def __init__(self, warn_above: float | None, warn: Callable[[str], None]) -> None:
        self._warn_above = warn_above
        self._warn = warn
        self._has_warned = False
        self._told_of: set[str] = set()
        """Roles of whose weights few moved."""

    def hear(self, call: Call, metrics: Mapping[str, float], tally: Tally) -> None:
        """An update is over."""
        self._hear_moved(call, metrics)
        mean = metrics.get(MEAN, 0.0)
        if self._warn_above is None or mean <= self._warn_above:
            return
        worst = max(tally.apart or Apart(0, call.step, mean), Apart(0, call.step, mean), key=lambda apart: apart.mean)
        tally.apart = Apart((tally.apart.num_updates if tally.apart else 0) + 1, worst.step, worst.mean)
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"step {call.step}: the log-probabilities of trainer and rollout differ by {mean:.3g} on average, {metrics[MAX]:.3g} at "
                f"most (k3 {metrics[K3]:.3g}), with the same weights of {call.role}; up to {self._warn_above:g} is taken for sound "
                f"(`weights: {{warn_above}}`). It is said once; the metrics have every step, docs/internals/weights.md says what to look at"
            )

    def _hear_moved(self, call: Call, metrics: Mapping[str, float]) -> None:
        moved = metrics.get(MOVED, 1.0)
        if moved >= _FEW or not metrics.get("lr") or not metrics.get("grad_norm") or call.role in self._told_of:
            return
        self._told_of.add(call.role)
        self._warn(
            f"step {call.step}: an optimiser step of {call.name} changes {moved:.2%} of the weights, as half precision holds them and as "
            f"engines that sample get them (learning rate {metrics['lr']:.3g}). Smaller changes gather in float32 masters; without these "
            f"(`train: {{options: {{masters: false}}}}`) they are lost. It is said once; the metric {MOVED} has every step"
        )
