"""Scheduling policies that move running samples in the tail, each move only if it gains more than it costs.

An instance that runs samples of expected remaining lengths r_i ends after about t0 max r_i + t1 sum r_i. The one that ends last gives
its longest to where that ends earliest with it, the prefix computed again.

Without earlier steps a sample is expected to grow as far again as it has.

Source: Laminar's repack and RLHFuse's migration of the tail, with another aim: the makespan, not the release of instances.

ends of instances, latest + slack --> the emptiest instance gives all of its samples away, or keeps them all; then the next one

An instance ends by t0 max r + t1 sum r (`relieving`), prefixes computed again included; one is emptied if the latest end comes no later
by it. All delays of a call together may be a twentieth of what is left (`slack`). They buy free instances, which take new weights, or give
their devices to whoever shares them, while the tail still runs. Without staleness and without shared devices nothing can begin there, and
this only costs; `repack` moves for an earlier end instead. Hands out nothing by itself.

Source: RLHFuse (arXiv 2409.13221) moves the long tail onto few instances and begins the next stage on those that this frees; Laminar
(EuroSys 2026) repacks by how full KV caches are. The limit by expected ends is ours.

Without information it is least-loaded; with it, `split`, the first samples of all prompts first, and the queues are put in order anew
as siblings end. Once nothing waits, samples move where expectations say that it pays.

Source: `split`, `longest-first` and `repack` together, and theirs; the gates are ours, by the study in docs/guide/rollout-scheduling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from m2flow.rollout_scheduling.decode_model import FloatArray
from m2flow.rollout_scheduling.length_policies import Predicted, Split
from m2flow.rollout_scheduling.policy import Move, Seen
from m2flow.rollout_scheduling.predictors import Predictor

_TIMES_COST = 2.0
"""How many times its cost a move must gain: expectations are wrong, costs are not."""
_SHARE = 0.01
"""And this share of the time that is left."""
_MOST_MOVES = 8
_TAIL = 0.15
"""Of the slots: with more samples than this, a prefix that is computed again stalls more than the move gains."""


def relieving_moves(seen: Seen, expected: FloatArray) -> list[Move]:
    """Only in the tail. While samples wait, a free slot is better filled with one of those.

    Args:
        expected: [N], E[length | known so far].
    """
    if seen.waiting or len(seen.place) > _TAIL * seen.num_instances * seen.model.max_batch:
        return []
    model, cost = seen.model, seen.move_cost
    rest: list[dict[int, float]] = [{} for _ in range(seen.num_instances)]
    for sample, j in seen.place.items():
        rest[j][sample] = max(1.0, float(expected[sample]) - seen.tokens_so_far(sample))
    longest = [max(samples.values(), default=0.0) for samples in rest]
    work = [sum(samples.values()) for samples in rest]
    moves: list[Move] = []
    while len(moves) < _MOST_MOVES:
        ends_s = [model.t0_s * head + model.t1_s * tokens for head, tokens in zip(longest, work, strict=True)]
        here = max(range(len(ends_s)), key=ends_s.__getitem__)
        if len(rest[here]) < 2:
            break
        sample = max(rest[here], key=rest[here].__getitem__)
        left = rest[here][sample]
        price_s = cost.fixed_s + cost.token_s * (seen.tokens_so_far(sample) + seen.prompts[seen.groups[sample]])
        open_to = [j for j in range(seen.num_instances) if j != here and seen.loads[j] < model.max_batch]
        there = min(open_to, key=lambda j: model.t0_s * max(longest[j], left) + model.t1_s * (work[j] + left), default=None)
        if there is None:
            break
        then_s = model.t0_s * max(longest[there], left) + model.t1_s * (work[there] + left) + price_s
        if then_s + _TIMES_COST * price_s + _SHARE * ends_s[here] > ends_s[here]:
            break
        moves.append(Move(sample, there))
        del rest[here][sample]
        rest[there][sample] = left
        for j in (here, there):
            longest[j], work[j] = max(rest[j].values(), default=0.0), sum(rest[j].values())
    return moves


class Repack(Predicted):
    name = "repack"
    needs_reports = True

    def moves(self) -> Sequence[Move]:
        if self.seen.waiting:
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * self.seen.tokens_so_far(i) if i in self.seen.place else 0.0 for i in range(len(expected))])
        return relieving_moves(self.seen, expected)


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


class Adaptive(Split):
    name = "adaptive"
    needs_reports = True

    def next_sample(self, instance: int) -> int | None:
        if self._predictor.is_informed:
            expected, is_new = self.expected()
            if is_new:
                for queue in self._queues:
                    queue.sort(key=lambda sample: (round(float(expected[sample]), 6), -self._turn[sample]))
        return super().next_sample(instance)

    def moves(self) -> Sequence[Move]:
        if self.seen.waiting or self._predictor.is_blind:
            return ()
        expected, is_new = self.expected()
        return relieving_moves(self.seen, expected) if is_new else ()
