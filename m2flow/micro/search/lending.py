"""A trainer's devices lent to rollout until training is due: when that is, and what the step takes then.

    rollout on R instances, r of them on the trainer's devices       T(f) = T_R + t1 W (1 - f) (1 / (R - r) - 1 / R) + moving
    given back when a share f of all tokens is there, at x(f)        end = min_f max(x(f) + T_B, l' + T_B, T(f) + d_B)

With the letters of composing.py: A is the rollout, B the training on r of its instances' devices. Up to x all instances decode, then
R - r have what is left, whose prefixes they compute again. The f is looked for among a few; what the plan says is not a time, which no
scheduler knows, but the share of samples that have ended by then. Where slots are fewer than samples, T(f) counts the rounds too.

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
_SHARES = np.linspace(0.0, 1.0, 41)


@dataclass(frozen=True, eq=False)
class Lent:
    """A rollout whose trainer's devices are given back after each share of its tokens; arrays of one length."""

    given_back_s: FloatArray
    """From the start of the rollout."""
    total_s: FloatArray
    """Its end."""
    ended: FloatArray
    """Share of its samples that have ended when they are given back."""

    def best(self, a: float, fed: tuple[float, float], b: tuple[float, float], slower: tuple[float, float]) -> tuple[float, float]:
        """Seconds until training is done, and the share of samples.

        Args:
            a: seconds of the rollout where nothing is given back. fed: l' and T' of what training gets. b: T and d of training.
            slower: how many times as long rollout, and training, take while both work.
        """
        both = np.minimum(b[0], self.total_s - self.given_back_s)
        trained = np.maximum(self.given_back_s, fed[0]) + b[0] + (slower[1] - 1) * both
        ends = np.maximum(trained, self.total_s + (slower[0] - 1) * both + fed[1] - a + b[1])
        best = int(np.argmin(ends))
        return float(ends[best]), float(self.ended[best])


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
        each = [_of_draw(draw, ways, num_lent) for draw in batch.draws]
        given_back, total, ended = (np.mean([one[i] for one in each], axis=0) for i in range(3))
        known[key] = Lent(given_back + first.come_s + first.leave_s, total + first.come_s + first.leave_s, ended)
    return known[key]


def _of_draw(draw: Draw, ways: Instances, num_lent: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(given back, end, share of samples ended) at each share of the tokens."""
    num, slots = float(ways.num[0]), float(ways.max_running[0])
    own = num - num_lent
    step_s, sample_s = float(ways.step_s[0]), float(ways.sample_s[0])
    lengths = np.sort(draw.responses.ravel()).astype(np.float64)
    tokens, count = float(lengths.sum()), len(lengths)
    done = np.concatenate([[0.0], np.cumsum(lengths)])[:-1] + lengths * np.arange(count, 0, -1)
    at = np.interp(_SHARES * tokens, [0.0, *done], [0.0, *lengths])  # Tokens that each running sample has.
    is_at_once = slots * num >= count
    rounds = np.zeros_like(_SHARES) if is_at_once else _SHARES * tokens / (slots * num)
    rounds_left = (1 - _SHARES) * tokens / (slots * own)
    longest = float(lengths[-1])
    given_back = step_s * (at if is_at_once else rounds) + sample_s * _SHARES * tokens / num
    even = step_s * max(longest, tokens / (slots * num)) + sample_s * tokens / num
    after = step_s * np.maximum(longest, rounds + rounds_left) + sample_s * tokens * (_SHARES / num + (1 - _SHARES) / own)
    ended = np.searchsorted(lengths, at, side="right") / count if is_at_once else _SHARES
    running = np.minimum((1 - ended) * count, slots * num) * num_lent / num
    moving = running / own * ((float(draw.prompts.mean()) + at) * float(ways.prefill_token_s[0]) + float(ways.enter_leave_s[0]))
    moving[-1] = 0.0
    whole = float(draw.seconds(ways)[0])
    scale = whole / even if even else 1.0
    return given_back * scale, np.maximum(whole, after * scale + moving), ended
