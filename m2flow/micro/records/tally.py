"""Count steps, samples, tokens and rewards of a run for its displays, and warn if trainer and rollout engine disagree on log-probabilities.

metrics of an update --Alarm.hear--> the tally, for the summary; and a warning the first time
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

from m2flow.engines.contract import K3, MAX, MEAN, MOVED
from m2flow.macro.graph import Call

_PACE_STEPS = 6
"""Steps over which the duration of a step is averaged."""


@dataclass(frozen=True)
class Divergence:
    """Updates in which log-probabilities of trainer and rollout engine differed too much."""

    num_updates: int
    step: int
    """Step of the worst one."""
    mean: float
    """Mean absolute difference of log-probabilities in the worst one, in nats."""


@dataclass
class Tally:
    """Counts of the run so far. Written by one thread, read by others."""

    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    """Generated tokens."""
    steps_before: int = 0
    """Steps done when the run was resumed, which `num_steps` includes; likewise `samples_before` and `tokens_before`."""
    samples_before: int = 0
    tokens_before: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each update, in order."""
    logs: dict[str, float] = field(default_factory=dict)
    """Last value of each logged name."""
    example: tuple[str, str] = ("", "")
    """A recent prompt and its response."""
    apart: Divergence | None = None
    """None if no update was above the limit."""
    step_ends: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    """(`time.monotonic`, steps done) at the end of the last steps since the run began or was resumed."""

    def steps_done(self, num_steps: int) -> None:
        """Note that so many steps are done; a smaller number than before is ignored."""
        if num_steps > self.num_steps:
            self.step_ends.append((time.monotonic(), num_steps))
            self.num_steps = num_steps

    def step_s(self, now_s: float) -> float | None:
        """Duration of a step, averaged over the last ones; None before two steps have ended."""
        ends = tuple(self.step_ends)
        if len(ends) < 2:
            return None
        (first_s, first), (last_s, last) = ends[0], ends[-1]
        # A step that already takes longer than the ones before it counts too.
        return max((last_s - first_s) / (last - first), (now_s - last_s) / 2 if now_s - last_s > last_s - first_s else 0.0)


_FEW = 0.01
"""Share of weights that move, below which there is a warning."""


@final
class Alarm:
    """Warns once if trainer and rollout engine disagree on log-probabilities, and once for each role whose weights hardly move, and for
    each metric that leaves its bounds.

    Args:
        warn_above: limit of the mean absolute difference, in nats; None: never warn.
        warn: tells the user something.
        bounds: metric of an update -> its bound, as `WeightsSpec.alarms` has them.
    """

    def __init__(self, warn_above: float | None, warn: Callable[[str], None], bounds: Mapping[str, str] = MappingProxyType({})) -> None:
        self._warn_above = warn_above
        self._bounds = {name: (bound[0], float(bound[1:])) for name, bound in bounds.items()}
        self._told_metrics: set[str] = set()
        self._warn = warn
        self._has_warned = False
        self._told_of: set[str] = set()
        """Roles that have been warned about because few of their weights moved."""

    def hear(self, call: Call, metrics: Mapping[str, float], tally: Tally) -> None:
        """Check the metrics of an update that is over."""
        self._hear_moved(call, metrics)
        self._hear_bounds(call, metrics)
        mean = metrics.get(MEAN, 0.0)
        if self._warn_above is None or mean <= self._warn_above:
            return
        worst = max(tally.apart or Divergence(0, call.step, mean), Divergence(0, call.step, mean), key=lambda apart: apart.mean)
        tally.apart = Divergence((tally.apart.num_updates if tally.apart else 0) + 1, worst.step, worst.mean)
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"step {call.step}: the log-probabilities of trainer and rollout differ by {mean:.3g} on average, {metrics[MAX]:.3g} at "
                f"most (k3 {metrics[K3]:.3g}), with the same weights of {call.role}; up to {self._warn_above:g} is taken for sound "
                f"(`weights: {{warn_above}}`). It is said once; the metrics have every step, docs/internals/weights.md says what to look at"
            )

    def _hear_bounds(self, call: Call, metrics: Mapping[str, float]) -> None:
        for name, (sign, bound) in self._bounds.items():
            value = metrics.get(name)
            if value is not None and name not in self._told_metrics and (value > bound if sign == ">" else value < bound):
                self._told_metrics.add(name)
                self._warn(
                    f"step {call.step}: {name} of {call.name} is {value:.3g}, {'above' if sign == '>' else 'below'} {bound:g} (`weights: "
                    f"{{alarms}}`). It is said once; the metrics have every step, docs/internals/weights.md says what to look at"
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
