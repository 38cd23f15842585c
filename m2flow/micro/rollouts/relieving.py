"""Moves in the tail that make the end come earlier, each only if what it gains is more than what it costs.

An instance that runs samples of expected remaining lengths r_i ends after about t0 max r_i + t1 sum r_i. The one that ends last gives
its longest to where that ends earliest with it, the prefix computed again.
"""

from __future__ import annotations

from m2flow.micro.rollouts.decode import FloatArray
from m2flow.micro.rollouts.policy import Move, Seen

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
