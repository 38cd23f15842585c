"""The alarms of a run: an update whose tokens trainer and rollout engine judge too differently, though they hold the same weights; and
one after which most weights in half precision are what they were.

metrics of an update --Alarm.hear--> the tally, for the summary; and the first time a warning
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from m2flow.engines.agreement import K3, MAX, MEAN
from m2flow.engines.contract import MOVED
from m2flow.macro.graph import Call
from m2flow.micro.record.tally import Apart, Tally

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
