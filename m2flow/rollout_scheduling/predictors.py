"""Predict the lengths of samples that have not ended, from earlier steps, earlier epochs and siblings of the same prompt.

    Seen, samples that ended  --Predictor-->  E[length | known so far], and scenarios: whole rollouts that may happen

A predictor is judged by the regret of a policy that uses it (`study`), not by its error. Truncated lengths count as censored.

`Siblings` fits a hierarchical lognormal model:

    log L = m + d(difficulty) + g(prompt) + e(sample),   g ~ normal(0, icc s^2),   e ~ normal(0, (1 - icc) s^2)

m and s are fitted to earlier steps with censoring, icc is the most likely value of a grid. d is by how much responses to prompts of one
difficulty were longer in earlier steps, shrunk towards 0 where there were few, and 0 for prompts without a label. g has a posterior for
each prompt on the nodes of a quadrature: a response of length l counts with its density, one that still runs or was truncated with its
survival. So a prompt's own responses outweigh its difficulty as they arrive. With icc = 0 siblings carry no information and are not used.

`Learned` has the same model for the score of a length, with a regression in place of d:

    Phi^-1(F(L)) = beta x(prompt) + g(prompt) + e(sample),   F the Kaplan-Meier estimate of earlier steps

so that all samples together have exactly the hazard, position by position, that earlier steps had: a model that stops at 4,000 tokens or
runs away to the limit is no lognormal. x is what is free before a token is generated: the length of the prompt, and its label, number or
vector (an embedding, such as the last hidden state of the policy's own prefill). Cross-validation over prompts chooses how much of x is
believed, which may be nothing, and the icc is 0 unless the likelihood is clearly in favour: noise is not taken for prediction.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
_NUM_FOR_QUANTILES = 256


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

    def quantiles(self, shares: Sequence[float]) -> FloatArray:
        """Lengths that each sample exceeds with probability 1 - share, [shares, N]; by default as known when the step began."""
        return np.asarray(np.quantile(self.scenarios(_NUM_FOR_QUANTILES), shares, axis=0), np.float64)


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


# ---- learned from prompts

_RIDGES = tuple(10.0 ** (power / 2) for power in range(-2, 11))
"""Penalties of the regression that are tried, as pseudo-observations."""
_NUM_FOLDS = 5
_TIMES_ERROR = 2.0
"""Standard errors by which features must lower the held-out loss."""
_LEAST_SHARE = 0.01
"""The least share of the held-out loss that features must take away."""
_LEAST_LIKELIER = 3.0
"""The least gain in log likelihood by which prompts must differ: five in a hundred of those that do not gain 1.4."""
_ICC_BETWEEN = 0.3
"""The icc by which prompts with more responses count for more in the regression."""
_TABLE = np.linspace(-4.0, 4.5, 137)
"""Scores of the lengths of the table."""
_CENTRES = np.linspace(-6.0, 6.0, 241)
"""Means of the score for which the table has the distribution of the length."""
_BLOCK = 4096


class _Scores:
    """The score Phi^-1(F(L)) of a length, F the Kaplan-Meier estimate: that of the middle of its step, in a gap that of the gap.

    Beyond the first and the last length seen, log length grows by its standard deviation with each score.
    """

    def __init__(self, lengths: FloatArray, is_cut: npt.NDArray[np.bool_]) -> None:
        curve = kaplan_meier(lengths, is_cut)
        before = np.concatenate([[1.0], curve.values[:-1]])
        is_step = curve.values < before
        self._times = curve.times[is_step]
        self._middle = _score_of_tail(((before + curve.values) / 2)[is_step])
        self._after = _score_of_tail(curve.values[is_step])
        self._after[-1] = min(self._after[-1], self._middle[-1])
        self._slope = max(float(np.log(lengths).std()), 1e-2)

    def of(self, lengths: FloatArray) -> FloatArray:
        """Scores of lengths, [M]; of a sample that still runs, that of what it has exceeded."""
        times, last = self._times, len(self._times) - 1
        at = np.minimum(np.searchsorted(times, lengths, side="left"), last)
        inside = np.where(times[at] == lengths, self._middle[at], self._after[np.maximum(at - 1, 0)])
        logs = np.log(np.maximum(lengths, 0.5))
        below = self._middle[0] + (logs - math.log(times[0])) / self._slope
        above = self._after[-1] + (logs - math.log(times[-1])) / self._slope
        return np.where(lengths < times[0], below, np.where(lengths > times[-1], above, inside))

    def lengths(self, scores: FloatArray) -> FloatArray:
        """The lengths that have these scores, [M]: the quantiles of F."""
        inside = self._times[np.minimum(np.searchsorted(self._after, scores, side="right"), len(self._times) - 1)]
        beyond = np.minimum(np.maximum(scores - self._after[-1], 0.0) * self._slope, 60.0)
        return np.asarray(inside * np.exp(beyond), np.float64)


def _score_of_tail(tails: FloatArray) -> FloatArray:
    """Find z with Q(z) = tail: the inverse of `log_tail`."""
    return np.asarray(np.interp(-np.log(np.clip(tails, 1e-12, 1 - 1e-12)), -_LOG_TAILS, _SCORES), np.float64)


class _Known(NamedTuple):
    """Responses of a completed step or of earlier epochs, and what was known of their prompts."""

    lengths: FloatArray
    prompts: npt.NDArray[np.int64]
    cut: npt.NDArray[np.bool_]
    numbers: FloatArray
    """[P, F]; NaN where a prompt has none."""
    labels: Sequence[str]
    """[P]."""


def _said_of(seen: Seen) -> tuple[FloatArray, list[str]]:
    """What is known of each prompt before it is answered: numbers [P, F], NaN where it has none, and a label, "" where it has none."""
    vectors, labels = [], []
    for text in seen.difficulties or [""] * len(seen.prompts):
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        some = read if isinstance(read, list) else [read]
        are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in some)
        vectors.append([float(one) for one in some] if are_numbers else [])
        labels.append("" if are_numbers else text)
    width = max(map(len, vectors), default=0)
    numbers = np.full((len(vectors), 1 + width), np.nan)
    numbers[:, 0] = np.log1p(np.asarray(seen.prompts, np.float64))
    for row, vector in zip(numbers, vectors, strict=True):
        if len(vector) == width:
            row[1:] = vector
    return numbers, labels


class _Regression:
    """Ridge regression of prompts' mean scores on their numbers and labels; its penalty by cross-validation over prompts."""

    def __init__(self, known: Sequence[_Known], scores: Sequence[FloatArray]) -> None:
        """
        Args:
            scores: of the responses of each of `known`.
        """
        self._width = max(one.numbers.shape[1] for one in known)
        self._labels = {label: i for i, label in enumerate(sorted({label for one in known for label in one.labels if label}))}
        counts = [np.bincount(one.prompts, minlength=len(one.labels)) for one in known]
        sums = [np.bincount(one.prompts, mine, len(one.labels)) for one, mine in zip(known, scores, strict=True)]
        count, total = np.concatenate(counts), np.concatenate(sums)
        numbers = np.concatenate([self._padded(one.numbers) for one in known])[count > 0]
        labels = [label for one in known for label in one.labels]
        num_known = np.maximum((~np.isnan(numbers)).sum(axis=0), 1)  # None, where what was answered has no such number.
        self._centre = np.nansum(numbers, axis=0) / num_known
        self._scale = np.sqrt(np.nansum((numbers - self._centre) ** 2, axis=0) / num_known)
        mine, told = total[count > 0] / count[count > 0], self._told(numbers, [labels[i] for i in np.flatnonzero(count)])
        weights = np.sqrt(count[count > 0] / (1 + (count[count > 0] - 1) * _ICC_BETWEEN))
        self._mean = float(np.average(mine, weights=weights**2)) if len(mine) else 0.0
        self.gain = 0.0
        """The share of the held-out squared error that features take away; 0 if they are not used."""
        self._slopes = np.zeros(told.shape[1])
        self._fit(told * weights[:, None], (mine - self._mean) * weights)

    def of(self, numbers: FloatArray, labels: Sequence[str]) -> FloatArray:
        """The mean score of each prompt, [P]."""
        return np.asarray(self._mean + self._told(self._padded(numbers), labels) @ self._slopes, np.float64)

    def _padded(self, numbers: FloatArray) -> FloatArray:
        wider = np.full((len(numbers), max(self._width - numbers.shape[1], 0)), np.nan)
        return np.concatenate([numbers, wider], axis=1)[:, : self._width]

    def _told(self, numbers: FloatArray, labels: Sequence[str]) -> FloatArray:
        scaled = np.nan_to_num((numbers - self._centre) / np.where(self._scale > 1e-9, self._scale, np.inf))
        is_it = np.zeros((len(labels), len(self._labels)))
        for row, label in enumerate(labels):
            if label in self._labels:
                is_it[row, self._labels[label]] = 1.0
        return np.asarray(np.concatenate([scaled, is_it], axis=1), np.float64)

    def _fit(self, told: FloatArray, wanted: FloatArray) -> None:
        if len(wanted) < _LEAST_FITTED or not told.any():
            return
        losses = np.zeros((len(_RIDGES), len(wanted)))
        fold = np.arange(len(wanted)) % _NUM_FOLDS
        for one in range(_NUM_FOLDS):
            held = fold == one
            losses[:, held] = (wanted[held] - _ridge(told[~held], wanted[~held]) @ told[held].T) ** 2
        best = int(losses.mean(axis=1).argmin())
        less = wanted**2 - losses[best]
        error = float(less.std(ddof=1)) / math.sqrt(len(less))
        gain = float(less.sum() / max(float((wanted**2).sum()), 1e-12))
        if gain >= _LEAST_SHARE and float(less.mean()) > _TIMES_ERROR * error:
            self.gain, self._slopes = gain, _ridge(told, wanted)[best]


def _ridge(told: FloatArray, wanted: FloatArray) -> FloatArray:
    """The coefficients for each penalty, [penalties, F], by one singular value decomposition."""
    left, values, right = np.linalg.svd(told, full_matrices=False)
    shares = values / (values**2 + np.array(_RIDGES)[:, None])
    return np.asarray((shares * (left.T @ wanted)) @ right, np.float64)


class Learned(Predictor):
    """Predicts by the score model above: prompts' features, siblings, earlier epochs, and the hazard at the tokens so far."""

    name = "learned"

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Known] = []
        self._is_fitted = False
        self.icc = 0.0
        self.gain = 0.0
        """The share of the squared error between prompts that features take away, held out; 0 if they are not used."""

    @property
    def is_informed(self) -> bool:
        return self._is_fitted and (self.icc > 0.0 or self.gain > 0.0)

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._groups = np.asarray(seen.groups, np.int64)
        self._numbers, self._labels = _said_of(seen)
        lengths = np.array([length for answers in seen.earlier for length in answers], np.float64)
        owners = np.array([prompt for prompt, answers in enumerate(seen.earlier) for _ in answers], np.int64)
        self._earlier = _Known(lengths, owners, lengths >= self._limit, self._numbers, self._labels)
        self._fit([one for one in (*self._steps, self._earlier) if len(one.lengths)])

    def learn(self, past: Past) -> None:
        super().learn(past)
        known = _Known(past.lengths, past.groups, past.cut_at(self.cap), self._numbers, self._labels)
        self._steps = [*self._steps, known][-NUM_STEPS_KEPT:]

    def expected(self) -> FloatArray:
        if not self._is_fitted:
            return np.ones(len(self._groups))
        totals = self._so_far()
        left, posterior = self._left(), self._posterior(totals)
        for block in np.array_split(left, len(left) // _BLOCK + 1):
            means, at = self._means_of(block), self._first_beyond(totals[block])
            longer = self._tokens[means, at[:, None]] / np.maximum(self._survival[means, at[:, None]], 1e-300)
            some = (posterior[self._groups[block]] * longer).sum(axis=1)
            totals[block] = np.clip(some, totals[block] + 1.0, max(self._limit, float(totals.max(initial=0.0)) + 1.0))
        return totals

    def quantiles(self, shares: Sequence[float]) -> FloatArray:
        """Return the quantiles given all that is known now: a sample that has ended has its length in all of them."""
        totals = self._so_far() if self._is_fitted else np.ones(len(self._groups))
        found = np.repeat(totals[None], len(shares), axis=0)
        if not self._is_fitted:
            return found
        left, posterior = self._left(), self._posterior(totals)
        for block in np.array_split(left, len(left) // (_BLOCK // 16) + 1):
            means, at = self._means_of(block), self._first_beyond(totals[block])
            still = self._survival[means] / np.maximum(np.take_along_axis(self._survival[means], at[:, None, None], 2), 1e-300)
            beyond = (posterior[self._groups[block]][:, :, None] * np.minimum(still, 1.0)).sum(axis=1)
            for i, share in enumerate(shares):
                which = np.minimum((beyond > 1.0 - share).sum(axis=1), len(_TABLE)) - 1
                found[i, block] = np.maximum(self._lengths[np.maximum(which, at)], totals[block] + 1.0)
        return found

    def scenarios(self, num: int) -> FloatArray:
        if not self._is_fitted:
            return np.ones((num, len(self._groups)))
        dice = np.random.default_rng(0)
        ladder = self._posterior(np.zeros(len(self._groups))).cumsum(axis=1)
        own, nodes = self._deviation * math.sqrt(1.0 - self.icc), _means(0.0, self._deviation, self.icc)
        drawn = []
        for _ in range(num):
            node = (dice.random((len(ladder), 1)) > ladder).sum(axis=1).clip(0, len(_NODES) - 1)
            centres = (self._shifts + nodes[node])[self._groups]
            drawn.append(self._scores.lengths(centres + own * dice.standard_normal(len(self._groups))))
        return np.asarray(np.clip(np.stack(drawn), 1.0, self._limit), np.float64)

    @property
    def _limit(self) -> float:
        return float(self.cap) if self.cap is not None else 1e9

    def _so_far(self) -> FloatArray:
        """Tokens of each sample, [N], all of them if it has ended."""
        tokens = np.zeros(len(self._groups))
        for sample in self.seen.place:
            tokens[sample] = self.seen.tokens_so_far(sample)
        for sample, length in self.seen.finished.items():
            tokens[sample] = length
        return tokens

    def _left(self) -> npt.NDArray[np.int64]:
        """The samples that have not ended."""
        is_left = np.ones(len(self._groups), bool)
        is_left[list(self.seen.finished)] = False
        return np.flatnonzero(is_left)

    def _fit(self, known: Sequence[_Known]) -> None:
        every = [np.concatenate([one.lengths for one in known]), np.concatenate([one.cut for one in known])] if known else []
        self._is_fitted = bool(known) and (~every[1]).sum() >= _LEAST_FITTED and len(np.unique(every[0][~every[1]])) > 1
        if not self._is_fitted:
            return
        self._scores = _Scores(*every)
        scores = [self._scores.of(one.lengths) for one in known]
        filled = [np.where(one.cut, hazard(mine), mine) for one, mine in zip(known, scores, strict=True)]
        regression = _Regression(known, filled)
        self.gain = regression.gain
        shifts = [regression.of(one.numbers, one.labels) for one in known]
        rest = np.concatenate([mine - shift[one.prompts] for one, mine, shift in zip(known, scores, shifts, strict=True)])
        _, self._deviation = fit_cut_normal(rest[~every[1]], rest[every[1]])
        self._shifts = regression.of(self._numbers, self._labels)
        answers = [_Responses(mine, one.prompts, one.cut, np.arange(len(one.labels))) for one, mine in zip(known, scores, strict=True)]
        likely = [
            sum(
                float(_log_sums(one.log_likelihood(0.0, self._deviation, icc, shift)).sum())
                for one, shift in zip(answers, shifts, strict=True)
            )
            for icc in _ICCS
        ]
        best = int(np.argmax(likely))
        self.icc = _ICCS[best] if likely[best] > likely[0] + _LEAST_LIKELIER else 0.0
        self._tabulate()

    def _tabulate(self) -> None:
        """Tabulate P(L >= length) and E[L; L >= length] for each mean score, [means, lengths]."""
        own = self._deviation * math.sqrt(1.0 - self.icc)
        self._lengths = np.clip(self._scores.lengths(_TABLE), 1.0, self._limit)
        edges = np.concatenate([[-np.inf], (_TABLE[1:] + _TABLE[:-1]) / 2])
        self._survival = np.exp(log_tail((edges - _CENTRES[:, None]) / own))
        shares = self._survival - np.concatenate([self._survival[:, 1:], np.zeros((len(_CENTRES), 1))], axis=1)
        self._tokens = (shares * self._lengths)[:, ::-1].cumsum(axis=1)[:, ::-1]

    def _means_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the table, for each sample and node of its g, [M, K]."""
        means = self._shifts[self._groups[samples]][:, None] + _means(0.0, self._deviation, self.icc)
        rows = ((means - _CENTRES[0]) / (_CENTRES[1] - _CENTRES[0])).round()
        return np.asarray(np.clip(rows, 0, len(_CENTRES) - 1), np.int64)

    def _first_beyond(self, tokens: FloatArray) -> npt.NDArray[np.int64]:
        """The column of the first length above each number of tokens, [M]; the last if there is none."""
        return np.minimum(np.searchsorted(self._lengths, tokens, side="right"), len(_TABLE) - 1)

    def _posterior(self, tokens: FloatArray) -> FloatArray:
        """Posterior of each prompt's g over the nodes, [P, K], given tokens of its samples and earlier epochs."""
        known, earlier = np.flatnonzero(tokens > 0), self._earlier
        is_running = np.ones(len(tokens), bool)
        is_running[list(self.seen.finished)] = False
        cut = is_running | (tokens >= self._limit)
        every = np.concatenate([self._scores.of(tokens[known]), self._scores.of(earlier.lengths)])
        owners = np.concatenate([self._groups[known], earlier.prompts])
        found = _Responses(every, owners, np.concatenate([cut[known], earlier.cut]), np.arange(len(self._labels)))
        logs = found.log_likelihood(0.0, self._deviation, self.icc, self._shifts)
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)
