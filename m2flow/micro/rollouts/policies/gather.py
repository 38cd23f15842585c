"""Once nothing waits, the tail is gathered on few instances, so that the others are free for what comes next.

    ends of instances, latest + slack --> the emptiest instance gives all of its samples away, or keeps them all; then the next one

An instance ends by t0 max r + t1 sum r (`relieving`), prefixes computed again included; one is emptied if the latest end comes no later
by it. All delays of a call together may be a twentieth of what is left (`slack`). They buy free instances, which take new weights, or give
their devices to whoever shares them, while the tail still runs. Without staleness and without shared devices nothing can begin there, and
this only costs; `repack` moves for an earlier end instead. Hands out nothing by itself.

Source: RLHFuse (arXiv 2409.13221) moves the long tail onto few instances and begins the next stage on those that this frees; Laminar
(EuroSys 2026) repacks by how full KV caches are. The limit by expected ends is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from m2flow.micro.rollouts.decode import FloatArray
from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.policy import Move, Seen
from m2flow.micro.rollouts.predictors import Predictor

_FULL = 0.9
"""Of a cache: no more is moved to an engine that would be fuller than that."""


class Gather(Predicted):
    name = "gather"
    needs_reports = True

    def __init__(self, predictor: Predictor, slack: float = 0.05) -> None:
        super().__init__(predictor)
        self._slack = slack

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._under_way: dict[int, int] = {}
        """Sample -> where it was told to go, until it is there."""
        self._spent = 0.0
        """Of the slack."""

    def moves(self) -> Sequence[Move]:
        seen = self.seen
        self._under_way = {
            sample: to for sample, to in self._under_way.items() if sample not in seen.finished and seen.place.get(sample) != to
        }
        if seen.waiting or self._under_way:  # One after the other: what is on its way has no place yet.
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * seen.tokens_so_far(i) if i in seen.place else 0.0 for i in range(len(expected))])
        moves, later = _gathered(seen, expected, self._slack - self._spent)
        self._spent += later
        self._under_way = {move.sample: move.to for move in moves}
        return moves


@final
class _Instance:
    """What an instance has, and will have."""

    def __init__(self, seen: Seen, number: int, rest: dict[int, float]) -> None:
        self.number = number
        self.rest = rest
        """Sample -> tokens that it is expected to get yet."""
        self.stalled_s = 0.0
        report = seen.reports.get(number)
        has_limit = report is not None and report.kv_capacity > 0
        self.kv_left = _FULL * report.kv_capacity - report.kv_used - sum(rest.values()) if has_limit and report is not None else np.inf

    def end_s(self, seen: Seen, more: float = 0.0) -> float:
        """When all of its samples have ended, and one that needs `more` tokens."""
        longest = max(more, max(self.rest.values(), default=0.0))
        return seen.model.t0_s * longest + seen.model.t1_s * (sum(self.rest.values()) + more) + self.stalled_s


def _gathered(seen: Seen, expected: FloatArray, slack: float) -> tuple[list[Move], float]:
    """The moves that empty as many instances as can be, and by how much later the end is expected, as a share of the time left.

    Args:
        expected: [N], E[length | known so far].
    """
    samples: list[dict[int, float]] = [{} for _ in range(seen.num_instances)]
    for sample, number in seen.place.items():
        samples[number][sample] = max(1.0, float(expected[sample]) - seen.tokens_so_far(sample))
    busy = [_Instance(seen, number, rest) for number, rest in enumerate(samples) if rest and number not in seen.lost]
    if len(busy) < 2:
        return [], 0.0
    before_s = max(instance.end_s(seen) for instance in busy)
    found: list[Move] = []
    for giver in sorted(busy, key=lambda instance: instance.end_s(seen)):
        others = [instance for instance in busy if instance is not giver]
        moves = _given_away(seen, giver, others, (1.0 + slack) * before_s)
        if not moves:
            break
        found += moves
        busy = others
    return found, max(0.0, max(instance.end_s(seen) for instance in busy) / before_s - 1.0)


def _given_away(seen: Seen, giver: _Instance, others: list[_Instance], latest_s: float) -> list[Move]:
    """Moves that take all of its samples to others, and are noted there; none if they do not all fit."""
    before = [(dict(other.rest), other.stalled_s, other.kv_left) for other in others]
    moves = []
    for sample in sorted(giver.rest, key=giver.rest.__getitem__, reverse=True):
        left = giver.rest[sample]
        prefix = seen.tokens_so_far(sample) + seen.prompts[seen.groups[sample]]
        stall_s, cost_s = seen.move_cost.token_s * prefix, seen.move_cost.fixed_s
        ends = [
            (other.end_s(seen, left) + stall_s, other.number, other)
            for other in others
            if len(other.rest) < seen.model.max_batch
            and other.kv_left >= prefix + left
            and other.end_s(seen, left) + stall_s + cost_s <= latest_s
        ]
        if not ends:
            for other, (rest, stalled_s, kv_left) in zip(others, before, strict=True):
                other.rest, other.stalled_s, other.kv_left = rest, stalled_s, kv_left
            return []
        _, _, to = max(ends, key=lambda end: end[:2])  # The fullest that has room: the others may be emptied next.
        to.rest[sample] = left
        to.stalled_s += stall_s
        to.kv_left -= prefix + left
        moves.append(Move(sample, to.number))
    return moves
