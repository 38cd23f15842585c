"""A trainer's devices lent to rollout until training is due: when that is, and what the step takes then.

    rollout on R instances, r of them on the trainer's devices, which it has up to x:
    T(x) = x + t0 (steps that are left) + t1 (tokens that are left) / (R - r) + moving       end = min_x max(x + T_B, l' + T_B, T(x) + d_B)

With the letters of composing.py: A is the rollout, B the training on the devices of r instances. The steps that are left are those of the
longest sample, or of the rounds that fewer slots need; what is moved has its prefix computed again. Some x are tried: not times, which no
scheduler knows, but shares of samples that have ended by then; that is taken which suits several steps of the lengths best.

Limits: for steps that do not overlap (staleness 0), one generation and one trainer, linked without a barrier between them. A row of the
search with fewer devices may beat one with more and leave less to lend: of lent plans the best is not sure to be found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from m2flow.micro.search.batches import Draw, FloatArray, Instances
from m2flow.micro.search.calls import Cut
from m2flow.micro.search.composing import Times
from m2flow.micro.search.leaves import instances
from m2flow.micro.search.options import Option
from m2flow.micro.search.problem import Problem

WORTH = 0.02
"""A plan that lends must be so much shorter, of the step: what moving samples disturbs is not priced to the hair."""
_SHARES = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 1.0])
"""Of a step's samples, that have ended."""
_STEPS = 4
"""Steps whose lengths a share must suit, on average."""
_MOST_SAMPLES = 1024
"""Of a step, that are looked at."""


@dataclass(frozen=True, eq=False)
class Lent:
    """Rollouts whose trainer's devices are given back after each share of their samples: [steps, shares]."""

    given_back_s: FloatArray
    """From the start of the rollout."""
    total_s: FloatArray
    """Its end."""
    num_own: int
    """The first of these steps are those that the rest of the search goes by."""

    def best(self, a: float, fed: tuple[float, float], b: tuple[float, float], slower: tuple[float, float]) -> tuple[float, float]:
        """Seconds until training is done, and the share of samples, chosen for all of the steps.

        Args:
            a: seconds of the rollout where nothing is given back. fed: l' and T' of what training gets. b: T and d of training.
            slower: how many times as long rollout, and training, take while both work.
        """
        both = np.clip(self.total_s - self.given_back_s, 0.0, b[0])
        trained = np.maximum(self.given_back_s, fed[0] * self.total_s / max(a, 1e-12)) + b[0] + (slower[1] - 1) * both
        ends = np.maximum(trained, self.total_s + (slower[0] - 1) * both + fed[1] - a + b[1])
        best = int(np.argmin(ends.mean(axis=0)))
        return float(ends[: self.num_own, best].mean()), float(_SHARES[best])


def may_lend(problem: Problem, cut: Cut, first: Option, second: Option) -> bool:
    """Whether the devices of the second part can be some of those of the first one's instances, and leave others to it."""
    size = first.num_devices // first.layout.dp
    is_inside = first.pool == second.pool and second.num_devices < first.num_devices and second.num_devices % size == 0
    return is_inside and may_be_lent(problem, cut)


def may_be_lent(problem: Problem, cut: Cut) -> bool:
    """Whether the first part is a generation and the second one's trainer works on what comes of it, as it comes."""
    graph = problem.graph
    if problem.workload.staleness or cut.waits or not cut.is_linked:
        return False
    first, second = graph.members(cut.first), graph.members(cut.second)
    kinds = {call.engine.kind for call in second if call.engine is not None}
    engines = graph.engines(cut.second)
    return len(first) == 1 and first[0].work == "generate" and kinds == {"train"} and len(engines) == 1


def lent_times(problem: Problem, cut: Cut, first: Option, second: Option, a: Times, fed: Times, b: Times) -> tuple[Times, float]:
    """Of one pair of leaves; and the share of samples after which the devices are given back."""
    lent = _lent(problem, cut, first, second)
    total, ended = lent.best(float(a.total), (float(fed.first), float(fed.total)), (float(b.total), float(b.last)), problem.slowdowns(cut))
    end = np.asarray(total)
    return Times(end, end, end, end), ended


def _lent(problem: Problem, cut: Cut, first: Option, second: Option) -> Lent:
    (call,) = problem.graph.members(cut.first)
    assert call.engine is not None
    batch = problem.batches[call.name]
    key = (cut.first, first.pool, first.layout, first.is_swapped, second.num_devices)
    known = problem.lent
    if key not in known:
        ways = instances(call.engine, [first], problem.costs)
        num_lent = second.num_devices // (first.num_devices // first.layout.dp)
        each = [_of_draw(draw, ways, num_lent) for draw in batch.several(_STEPS)]
        given_back, total = (np.stack([one[i] for one in each]) + first.come_s + first.leave_s for i in range(2))
        known[key] = Lent(given_back, total, len(batch.draws))
    return known[key]


def _of_draw(draw: Draw, ways: Instances, num_lent: int) -> tuple[FloatArray, FloatArray]:
    """(given back, end) of one step, where so many of its samples have ended."""
    num, slots = float(ways.num[0]), float(ways.slots[0])
    own, step_s, sample_s = num - num_lent, float(ways.step_s[0]), float(ways.sample_s[0])
    lengths = draw.responses.ravel().astype(np.float64)
    tokens, count = float(lengths.sum()), len(lengths)
    begins = np.maximum(0.0, np.arange(count) / count - slots / count) * tokens / slots  # As in `Draw.releases_s`.
    ends = begins + lengths
    at = np.concatenate([[0.0], np.sort(ends)])[np.ceil(_SHARES * count).astype(np.int64)]
    every = max(1, count // _MOST_SAMPLES)
    lengths, begins, ends = lengths[::every], begins[::every], ends[::every]
    made = np.clip(at[:, None] - begins, 0.0, lengths)
    done = made.sum(axis=1) * tokens / max(float(lengths.sum()), 1.0)
    given_back = step_s * at + sample_s * done / num
    left = np.maximum(at[-1] - at, (tokens - done) / (slots * own / num))
    moves = ((begins < at[:, None]) & (ends > at[:, None])).sum(axis=1) * every * num_lent / num
    prefix = float(draw.prompts.mean()) + np.where(ends > at[:, None], made, 0.0).sum(axis=1) * every * num_lent / num / np.maximum(
        moves, 1.0
    )
    moving = moves / own * (prefix * float(ways.prefill_token_s[0]) + float(ways.enter_leave_s[0]))
    whole, alone = float(draw.seconds(ways)[0]), float(given_back[-1])
    scale = whole / alone if alone else 1.0
    total = scale * (given_back + step_s * left + sample_s * (tokens - done) / own) + moving
    return given_back * scale, np.maximum(whole, total)
