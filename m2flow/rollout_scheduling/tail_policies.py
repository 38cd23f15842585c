"""Migrate running samples in the tail of a rollout, where each move must gain more than the repeated prefill costs.

    expected remaining lengths, prefill cost --relieving_moves--> moves that let the last instance end earlier (repack, adaptive)
                                             --Gather--> moves that empty instances for others to use

An instance whose samples have expected remaining lengths r_i ends after about t0 max r_i + t1 sum r_i, and the prefills of samples that
migrate to it. Before the first step has ended, a sample is expected to grow as far again as it has.

Each class says in its docstring whether it is a published baseline, or on which real trace it wins. Migration gains at most 1% in
`benchmarks/results/rollout-policies.md`.
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
"""The gain that a move must have, as a multiple of its cost: expectations are uncertain, costs are not."""
_SHARE = 0.01
"""The gain that a move must have besides, as a share of the time left."""
_MOST_MOVES = 8
_TAIL = 0.15
"""Share of the slots in use above which nothing migrates: the repeated prefill would stall more than the move gains."""


def relieving_moves(seen: Seen, expected: FloatArray) -> list[Move]:
    """Move the longest sample of the instance that ends last to where it ends earliest, as long as that gains enough.

    Only in the tail: while samples wait, a free slot is better filled with one of those.

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
    """Migrate samples in the tail to where they end earlier, if the gain exceeds twice the cost of the move.

    Published baseline: Laminar's repack (EuroSys 2026) and RLHFuse's tail migration (arXiv 2409.13221), with another aim: the makespan,
    not the release of instances. It wins on no real trace (DAPO and video: within 0.1% of least-loaded).
    """

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
"""The share of a KV cache above which nothing migrates to the engine."""


class Gather(Predicted):
    """Migrate the tail to few instances, to free the others, if the end is at most `slack` later.

        instances by expected end, latest + slack --> the emptiest gives all of its samples away or keeps them all; then the next

    All delays of a call together may be a twentieth of the time left (`slack`). They buy free instances, which take new weights or lend
    their devices to co-located engines while the tail still runs. Without staleness and without shared devices nothing can begin there,
    and this only costs; use `repack` for an earlier end. It does not dispatch.

    Published baseline: RLHFuse (arXiv 2409.13221) moves the long tail to few instances and begins the next stage on the others; Laminar
    (EuroSys 2026) repacks by how full KV caches are. The limit by expected ends is ours. It lengthens the makespan by 5 to 6%.
    """

    name = "gather"
    needs_reports = True

    def __init__(self, predictor: Predictor, slack: float = 0.05) -> None:
        super().__init__(predictor)
        self._slack = slack

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._migrating: dict[int, int] = {}
        """Migrating sample -> its target, until it arrives."""
        self._spent = 0.0
        """The part of the slack already used."""

    def moves(self) -> Sequence[Move]:
        seen = self.seen
        self._migrating = {
            sample: to for sample, to in self._migrating.items() if sample not in seen.finished and seen.place.get(sample) != to
        }
        if seen.waiting or self._migrating:  # One round at a time: a migrating sample is on no instance yet.
            return ()
        expected, is_new = self.expected()
        if not is_new:
            return ()
        if self._predictor.is_blind:
            expected = np.array([2.0 * seen.tokens_so_far(i) if i in seen.place else 0.0 for i in range(len(expected))])
        moves, later = _gathered(seen, expected, self._slack - self._spent)
        self._spent += later
        self._migrating = {move.sample: move.to for move in moves}
        return moves


@final
class _Instance:
    """An instance with its samples, including planned moves."""

    def __init__(self, seen: Seen, number: int, rest: dict[int, float]) -> None:
        self.number = number
        self.rest = rest
        """Sample -> its expected remaining tokens."""
        self.stalled_s = 0.0
        report = seen.reports.get(number)
        has_limit = report is not None and report.kv_capacity > 0
        self.kv_left = _FULL * report.kv_capacity - report.kv_used - sum(rest.values()) if has_limit and report is not None else np.inf

    def end_s(self, seen: Seen, more: float = 0.0) -> float:
        """Seconds until all of its samples, and one more of `more` tokens, have ended."""
        longest = max(more, max(self.rest.values(), default=0.0))
        return seen.model.t0_s * longest + seen.model.t1_s * (sum(self.rest.values()) + more) + self.stalled_s


def _gathered(seen: Seen, expected: FloatArray, slack: float) -> tuple[list[Move], float]:
    """Plan the moves that empty as many instances as possible; also returns the expected delay as a share of the time left.

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
    """Plan moves of all of the giver's samples to others and record them there; none if not all fit."""
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
        _, _, to = max(ends, key=lambda end: end[:2])  # The fullest with room, so that the others may be emptied next.
        to.rest[sample] = left
        to.stalled_s += stall_s
        to.kv_left -= prefix + left
        moves.append(Move(sample, to.number))
    return moves


class Adaptive(Split):
    """Combine `split`, reordering as siblings end, and `repack`; without information it is `least-loaded`.

    With information the first samples of all prompts go first and queues are sorted again as siblings end. Once nothing waits, samples
    migrate where expectations say that it pays.

    A combination of published baselines (`split`, `longest-first`, `repack`); the gates are ours. It has the lowest regret of all policies
    without an oracle on the DAPO trace with four instances (1.147; least-loaded 1.157), a margin of 1% that is within noise; on the
    video trace it is within 0.2% of least-loaded. Where prompts repeat with similar responses it wins clearly (lognormal, sigma 0.8,
    icc 0.9, earlier epoch: 1.166 against 1.360), but no real trace in the repository repeats prompts.
    """

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
