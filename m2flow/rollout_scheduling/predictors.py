"""Predict the lengths of samples that have not ended, from earlier steps, earlier epochs and siblings of the same prompt.

    Seen, samples that ended  --Predictor-->  E[length | known so far], and scenarios: whole rollouts that may happen

A predictor is judged by the regret of a policy that uses it (`study`), not by its error. Truncated lengths count as censored.

`Siblings` fits a hierarchical lognormal model:

    log L = m + d(difficulty) + g(prompt) + e(sample),   g ~ normal(0, icc s^2),   e ~ normal(0, (1 - icc) s^2)

m and s are fitted to earlier steps with censoring, icc is the most likely value of a grid. d is by how much responses to prompts of one
difficulty were longer in earlier steps, shrunk towards 0 where there were few, and 0 for prompts without a label. g has a posterior for
each prompt on the nodes of a quadrature: a response of length l counts with its density, one that still runs or was truncated with its
survival. So a prompt's own responses outweigh its difficulty as they arrive. With icc = 0 siblings carry no information and are not used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.rollout_scheduling.decode_model import FloatArray
from m2flow.rollout_scheduling.lengths import SurvivalCurve, kaplan_meier
from m2flow.rollout_scheduling.policy import Seen

_LOW, _HIGH, _SPACING = -12.0, 40.0, 0.005
_FAR = 30.0
"""The score from which the tail is the first term of its asymptotic series; erfc is still exact there."""

_SCORES = np.arange(_LOW, _HIGH + _SPACING, _SPACING)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_TAILS = np.array(
    [math.log(0.5 * math.erfc(z / math.sqrt(2.0))) if z < _FAR else -0.5 * z * z - _HALF_LOG_2PI - math.log(z) for z in _SCORES.tolist()]
)


def log_density(z: FloatArray) -> FloatArray:
    """Log density of the standard normal distribution, ln phi(z)."""
    return np.asarray(-0.5 * z * z - _HALF_LOG_2PI, np.float64)


def log_tail(z: FloatArray) -> FloatArray:
    """Log upper tail of the standard normal distribution, ln Q(z), by interpolation; constant beyond 40.

    >>> float(np.exp(log_tail(np.array(0.0))).round(6))
    0.5
    """
    return np.asarray(np.interp(z, _SCORES, _LOG_TAILS), np.float64)


def hazard(z: FloatArray) -> FloatArray:
    """Hazard of the standard normal distribution, phi(z) / Q(z)."""
    inside = np.minimum(z, _HIGH)
    return np.asarray(np.exp(log_density(inside) - log_tail(inside)), np.float64)


def fit_cut_normal(seen: FloatArray, cut: FloatArray, *, num_rounds: int = 40) -> tuple[float, float]:
    """Fit the mean and standard deviation of a normal distribution to values of which those in `cut` are right-censored.

    Expectation-maximisation: a censored value stands for E[y | y > c] = m + s h, E[y^2 | y > c] = m^2 + s^2 + s (c + m) h, h the hazard
    at (c - m)/s.

    Source:
        Dempster, Laird, Rubin 1977, section 4.2.
    """
    both = np.concatenate([seen, cut])
    mean, deviation = float(both.mean()), max(float(both.std()), 1e-2)
    for _ in range(num_rounds if len(cut) else 1):
        beyond = hazard((cut - mean) / deviation)
        first = seen.sum() + (mean + deviation * beyond).sum()
        second = (seen**2).sum() + (mean**2 + deviation**2 + deviation * (cut + mean) * beyond).sum()
        mean = float(first / len(both))
        deviation = math.sqrt(max(float(second / len(both)) - mean * mean, 1e-4))
    return mean, deviation


NUM_STEPS_KEPT = 4
"""Earlier steps to learn from; few, because the lengths of a policy's responses change as it trains."""

_NUM_BUCKETS = 8


class Past(NamedTuple):
    """The samples of a completed step, with the lengths that they reached."""

    lengths: FloatArray
    """[M]."""
    prompts: FloatArray
    """[M], tokens of their prompts."""
    groups: npt.NDArray[np.int64]
    """[M]."""
    is_cut: npt.NDArray[np.bool_]
    """[M], whether the length is censored: the sample was aborted while it ran."""

    def cut_at(self, cap: int | None) -> npt.NDArray[np.bool_]:
        """Whether each length is censored, [M], including those at the cap."""
        return np.asarray(self.is_cut | (self.lengths >= (cap if cap is not None else np.inf)), np.bool_)


def past_of(seen: Seen) -> Past:
    """Collect the lengths that a step's samples have reached now."""
    lengths, is_cut = np.zeros(len(seen.groups)), np.zeros(len(seen.groups), bool)
    for sample in seen.place:
        lengths[sample], is_cut[sample] = seen.tokens_so_far(sample), True
    for sample, length in seen.finished.items():
        lengths[sample], is_cut[sample] = length, False
    known = np.flatnonzero(lengths > 0)
    groups = np.asarray(seen.groups, np.int64)[known]
    return Past(lengths[known], np.asarray(seen.prompts, np.float64)[groups], groups, is_cut[known])


class Predictor(ABC):
    """Predicts lengths from completed steps, and within a step from finished samples and the progress of running ones."""

    name: str

    def __init__(self) -> None:
        self.earlier_steps: list[Past] = []
        """Oldest first."""
        self.cap: int | None = None

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self.cap = seen.cap
        self._is_over = False

    def end(self) -> None:
        """Learn from the step at its end; aborted samples with tokens count as censored. Idempotent."""
        if not self._is_over:
            self._is_over = True
            past = past_of(self.seen)
            if len(past.lengths):
                self.learn(past)

    def learn(self, past: Past) -> None:
        """Learn from a completed step."""
        self.earlier_steps = [*self.earlier_steps, past][-NUM_STEPS_KEPT:]

    @property
    def is_blind(self) -> bool:
        """Whether it has seen no lengths yet."""
        return not self.earlier_steps

    @property
    @abstractmethod
    def is_informed(self) -> bool:
        """Whether its predictions differ between samples."""

    @abstractmethod
    def expected(self) -> FloatArray:
        """Expected length of each sample, [N], given what is known so far; at least what it has generated."""

    @abstractmethod
    def scenarios(self, num: int) -> FloatArray:
        """Draw lengths, [num, N], given what was known when the step began; deterministic."""


class EarlierSteps(Predictor):
    """Predicts all samples alike, by the survival curve of earlier steps given the tokens so far."""

    name = "earlier-steps"

    @property
    def is_informed(self) -> bool:
        return False

    def expected(self) -> FloatArray:
        curve = self._curve()
        fresh = curve.beyond(0.0) if curve else 1.0
        found = np.full(len(self.seen.groups), fresh)
        for sample in self.seen.place:
            tokens = self.seen.tokens_so_far(sample)
            found[sample] = max(tokens + 1.0, curve.beyond(tokens) if curve else 1.0)
        return found

    def scenarios(self, num: int) -> FloatArray:
        if not self.earlier_steps:
            return np.ones((num, len(self.seen.groups)))
        pool = np.concatenate([past.lengths for past in self.earlier_steps])
        return np.asarray(np.random.default_rng(0).choice(pool, (num, len(self.seen.groups))), np.float64)

    def _curve(self) -> SurvivalCurve | None:
        if not self.earlier_steps:
            return None
        pool = np.concatenate([past.lengths for past in self.earlier_steps])
        return kaplan_meier(pool, np.concatenate([past.cut_at(self.cap) for past in self.earlier_steps]))


class PromptBuckets(EarlierSteps):
    """Predicts by prompt length, which stands in for difficulty where nothing else is known."""

    name = "prompt-buckets"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._pools: list[FloatArray] = []
        """Lengths of the responses to the prompts of each bucket, shortest prompts first."""
        if self.earlier_steps:
            lengths = np.concatenate([past.lengths for past in self.earlier_steps])
            prompts = np.concatenate([past.prompts for past in self.earlier_steps])
            edges = np.unique(np.quantile(prompts, np.linspace(0, 1, _NUM_BUCKETS + 1)[1:-1]))
            of = np.searchsorted(edges, prompts)
            self._pools = [lengths[of == bucket] if (of == bucket).any() else lengths for bucket in range(len(edges) + 1)]
            self._buckets = np.searchsorted(edges, np.asarray(seen.prompts))[np.asarray(seen.groups, np.int64)].tolist()

    @property
    def is_informed(self) -> bool:
        return bool(self._pools)

    def expected(self) -> FloatArray:
        found = super().expected()
        means = [pool.mean() for pool in self._pools]
        for sample in self.seen.waiting if means else ():
            found[sample] = means[self._buckets[sample]]
        return found

    def scenarios(self, num: int) -> FloatArray:
        if not self._pools:
            return super().scenarios(num)
        dice = np.random.default_rng(0)
        return np.asarray(np.stack([dice.choice(self._pools[bucket], num) for bucket in self._buckets], axis=1), np.float64)


class Oracle(Predictor):
    """Knows the lengths; the result of a policy with it bounds what better prediction could give."""

    name = "oracle"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        if seen.known is not None:
            self.know(seen.known)

    @property
    def is_blind(self) -> bool:
        return False

    def know(self, lengths: npt.ArrayLike) -> None:
        """Set the lengths of the samples of the next step."""
        self._lengths = np.asarray(lengths, np.float64)

    @property
    def is_informed(self) -> bool:
        return True

    def expected(self) -> FloatArray:
        return self._lengths

    def scenarios(self, num: int) -> FloatArray:
        return self._lengths[None, :]


_ICCS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(25)
_LOG_WEIGHTS = np.log(_WEIGHTS / _WEIGHTS.sum())
_LEAST_FITTED = 20
"""The least number of lengths to fit."""
_PSEUDO_COUNT = 8
"""Pseudo-observations of average length added to each difficulty (shrinkage)."""
_FAR_AHEAD = 8.0
"""Standard deviations beyond which the remaining length is approximated."""


class _Responses:
    """Responses to P prompts, flattened: log length, prompt and whether it is censored; and the difficulty of each prompt."""

    def __init__(
        self, logs: FloatArray, prompts: npt.NDArray[np.int64], cut: npt.NDArray[np.bool_], difficulties: npt.NDArray[np.int64]
    ) -> None:
        self.logs, self.prompts, self.cut, self.difficulties = logs, prompts, cut, difficulties

    def without_shifts(self, shifts: FloatArray) -> FloatArray:
        """Log lengths minus the shift of their difficulty."""
        return np.asarray(self.logs - shifts[self.difficulties[self.prompts]], np.float64)

    def log_likelihood(self, mean: float, deviation: float, icc: float, shifts: FloatArray) -> FloatArray:
        """Log likelihood of each prompt's responses for each node of its g, weighted by the node, [P, K]."""
        own = deviation * math.sqrt(1.0 - icc)
        z = (self.without_shifts(shifts)[:, None] - _means(mean, deviation, icc)) / own
        terms = np.where(self.cut[:, None], log_tail(z), log_density(z) - math.log(own))
        summed = np.zeros((len(self.difficulties), len(_NODES)))
        np.add.at(summed, self.prompts, terms)
        return np.asarray(summed + _LOG_WEIGHTS, np.float64)


class Siblings(Predictor):
    """Predicts by the hierarchical model above; uninformed without earlier steps and earlier epochs."""

    name = "siblings"

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Responses] = []
        self._mean, self._deviation = 0.0, 1.0
        self.icc = 0.0
        self._is_fitted = False
        self._codes: dict[str, int] = {"": 0}
        """Difficulty -> its index in `_shifts`."""
        self._shifts = np.zeros(1)
        """The shift d of each difficulty."""

    @property
    def is_informed(self) -> bool:
        return self._is_fitted and (self.icc > 0.0 or bool(np.ptp(self._shifts[self._difficulties]) > 0.0))

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._groups = np.asarray(seen.groups, np.int64)
        said = seen.difficulties or [""] * len(seen.prompts)
        self._difficulties = np.array([self._codes.setdefault(one, len(self._codes)) for one in said], np.int64)
        lengths = [length for answers in seen.earlier for length in answers]
        owners = [prompt for prompt, answers in enumerate(seen.earlier) for _ in answers]
        self._earlier = self._answers(np.array(lengths, np.float64), np.array(owners, np.int64), np.zeros(len(lengths), bool))
        self._fit([*self._steps, self._earlier])

    def learn(self, past: Past) -> None:
        super().learn(past)
        self._steps = [*self._steps, self._answers(past.lengths, past.groups, past.is_cut)][-NUM_STEPS_KEPT:]

    def expected(self) -> FloatArray:
        if not self._is_fitted:
            return np.ones(len(self._groups))
        seen = self.seen
        tokens = np.zeros(len(self._groups))
        for sample in seen.place:
            tokens[sample] = seen.tokens_so_far(sample)
        for sample, length in seen.finished.items():
            tokens[sample] = length
        is_running = np.ones(len(self._groups), bool)
        is_running[list(seen.finished)] = False
        known = np.flatnonzero(tokens > 0)
        found = self._answers(tokens[known], self._groups[known], is_running[known])
        posterior = self._posterior(found)
        totals = tokens.copy()
        left = np.flatnonzero(is_running)
        totals[left] = (posterior[self._groups[left]] * self._totals(tokens[left], self._shift_of(left))).sum(axis=1)
        return np.asarray(totals, np.float64)

    def scenarios(self, num: int) -> FloatArray:
        dice = np.random.default_rng(0)
        if not self._is_fitted:
            return np.ones((num, len(self._groups)))
        ladder = self._posterior(self._answers(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, bool))).cumsum(axis=1)
        drawn = []
        for _ in range(num):
            node = (dice.random((len(ladder), 1)) > ladder).sum(axis=1).clip(0, len(_NODES) - 1)
            own = self._deviation * math.sqrt(1.0 - self.icc) * dice.standard_normal(len(self._groups))
            drawn.append(np.exp(_means(self._mean, self._deviation, self.icc)[node[self._groups]] + self._shift_of(...) + own))
        return np.asarray(np.clip(np.stack(drawn), 1.0, self._limit), np.float64)

    @property
    def _limit(self) -> float:
        return float(self.cap) if self.cap is not None else 1e9

    def _answers(self, lengths: FloatArray, prompts: npt.NDArray[np.int64], is_running: npt.NDArray[np.bool_]) -> _Responses:
        return _Responses(np.log(np.maximum(lengths, 1.0)), prompts, is_running | (lengths >= self._limit), self._difficulties)

    def _fit(self, steps: list[_Responses]) -> None:
        cut = np.concatenate([step.cut for step in steps])
        self._shifts = np.zeros(len(self._codes))
        if (~cut).sum() < _LEAST_FITTED:
            return
        self._is_fitted = True
        self._fit_all(steps, cut)
        if len(self._codes) > 1:
            self._fit_shifts(steps, cut)
            self._fit_all(steps, cut)
        likely = [
            sum(float(_log_sums(step.log_likelihood(self._mean, self._deviation, icc, self._shifts)).sum()) for step in steps)
            for icc in _ICCS
        ]
        self.icc = _ICCS[int(np.argmax(likely))]

    def _fit_all(self, steps: list[_Responses], cut: npt.NDArray[np.bool_]) -> None:
        """Fit the mean and deviation of all log lengths minus the shifts of their difficulty."""
        logs = np.concatenate([step.without_shifts(self._shifts) for step in steps])
        self._mean, self._deviation = fit_cut_normal(logs[~cut], logs[cut])

    def _fit_shifts(self, steps: list[_Responses], cut: npt.NDArray[np.bool_]) -> None:
        """Fit the shift of each difficulty; a censored length counts as its conditional expectation."""
        logs = np.concatenate([step.logs for step in steps])
        difficulties = np.concatenate([step.difficulties[step.prompts] for step in steps])
        beyond = self._mean + self._deviation * hazard((logs - self._mean) / self._deviation)
        longer = np.where(cut, beyond, logs) - self._mean
        sums, counts = (np.bincount(difficulties, weights, len(self._codes)) for weights in (longer, None))
        self._shifts = np.asarray(sums / (counts + _PSEUDO_COUNT), np.float64)
        self._shifts[0] = 0.0  # Prompts without a label.

    def _shift_of(self, samples: npt.NDArray[np.int64] | EllipsisType) -> FloatArray:
        """The shift d of these samples' prompts, [M]."""
        return np.asarray(self._shifts[self._difficulties[self._groups[samples]]], np.float64)

    def _posterior(self, found: _Responses) -> FloatArray:
        """Posterior of each prompt's g over the nodes, [P, K]."""
        logs = found.log_likelihood(self._mean, self._deviation, self.icc, self._shifts)
        logs += self._earlier.log_likelihood(self._mean, self._deviation, self.icc, self._shifts) - _LOG_WEIGHTS
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)

    def _totals(self, tokens: FloatArray, shifts: FloatArray) -> FloatArray:
        """E[min(L, cap) | L > tokens] for each node, [M, K]."""
        own = self._deviation * math.sqrt(1.0 - self.icc)
        means = _means(self._mean, self._deviation, self.icc) + shifts[:, None]
        so_far = np.maximum(tokens, 0.5)[:, None]
        low, high = (np.log(so_far) - means) / own, (math.log(self._limit) - means) / own
        whole = np.exp(means + own * own / 2) * (np.exp(log_tail(low - own)) - np.exp(log_tail(high - own)))
        near = (whole + self._limit * np.exp(log_tail(high))) / np.exp(log_tail(np.minimum(low, _FAR_AHEAD)))
        far = so_far * (1.0 + own / np.maximum(low, 1.0))
        return np.asarray(
            np.clip(np.where(low > _FAR_AHEAD, far, near), so_far + 1.0, max(self._limit, float(so_far.max(initial=1.0)) + 1.0))
        )


def _means(mean: float, deviation: float, icc: float) -> FloatArray:
    return np.asarray(mean + deviation * math.sqrt(icc) * _NODES, np.float64)


def _log_sums(logs: FloatArray) -> FloatArray:
    most = logs.max(axis=1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).sum(axis=1)), np.float64)
