"""Lengths by formula, where nothing was measured yet: a lognormal, or a mixture of lognormals, cut at a cap.

Members of a group are alike through a Gaussian copula: log L is a rising function of z = sqrt(icc) z_group + sqrt(1 - icc) z_sample. For
one lognormal that makes `icc` the intraclass correlation of log length before the cut; for a mixture about that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError, did_you_mean
from m2flow.micro.rollouts.identity import normals
from m2flow.micro.rollouts.lengths import MOST_TOKENS, Correlation, IntArray, Lengths

KINDS = ("lognormal", "mixture")

_NORMAL = NormalDist()
_GROUP, _SAMPLE = 3, 5
_GRID = np.linspace(-8.0, 8.0, 4001)
"""Standard normal scores at which the mixture's inverse is tabulated."""
_HALVINGS = 80
_MOST_SIGMA = 20.0
"""Of a logarithm: lengths that differ by a factor of 10^8 are one sigma apart."""


class Mixture(Lengths):
    """log L is normal(mu_k, sigma_k) with probability w_k; rounded up to whole tokens, cut at `cap`."""

    def __init__(
        self,
        weights: Sequence[float],
        medians: Sequence[float],
        sigmas: Sequence[float],
        *,
        cap: int | None = None,
        icc: float = 0.0,
        prompt_tokens: int = 256,
    ) -> None:
        _check(weights, medians, sigmas, cap, icc, prompt_tokens)
        self.cap = cap
        self._weights = [weight / sum(weights) for weight in weights]
        self._mus = [math.log(median) for median in medians]
        self._sigmas = list(sigmas)
        self._icc = icc
        self._prompt_tokens = prompt_tokens
        parts = ", ".join(f"{w:.3g} of median {m:g} sigma {s:g}" for w, m, s in zip(self._weights, medians, sigmas, strict=True))
        self.name = f"lognormal mixture ({parts})" if len(weights) > 1 else f"lognormal (median {medians[0]:g}, sigma {sigmas[0]:g})"
        if cap is not None:
            self.name += f" cut at {cap}"
        self._logs = _GRID * sigmas[0] + self._mus[0] if len(weights) == 1 else np.array([self._log_at(z) for z in _GRID])

    def cut_at(self, tokens: int) -> Mixture:
        cap = tokens if self.cap is None else min(tokens, self.cap)
        medians = [math.exp(mu) for mu in self._mus]
        return Mixture(self._weights, medians, self._sigmas, cap=cap, icc=self._icc, prompt_tokens=self._prompt_tokens)

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        shared = normals(seed, _GROUP, step, num_groups, 1)
        scores = math.sqrt(self._icc) * shared + math.sqrt(1.0 - self._icc) * normals(seed, _SAMPLE, step, num_groups, n)
        tokens = np.ceil(np.exp(np.interp(scores, _GRID, self._logs)))
        return np.asarray(np.clip(tokens, 1, self.cap if self.cap is not None else 1 << 62), np.int64)

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        """All the same: the distribution says nothing of prompts."""
        return np.full(num_groups, self._prompt_tokens, np.int64)

    def mean(self) -> float:
        """Before rounding up.

        E[min(L, c)] = sum_k w_k (exp(mu + sigma^2/2) F((ln c - mu)/sigma - sigma) + c (1 - F((ln c - mu)/sigma)))
        """
        total = 0.0
        for weight, mu, sigma in zip(self._weights, self._mus, self._sigmas, strict=True):
            whole = math.exp(mu + sigma * sigma / 2)
            if self.cap is None:
                total += weight * whole
                continue
            z = (math.log(self.cap) - mu) / sigma
            total += weight * (whole * _NORMAL.cdf(z - sigma) + self.cap * _NORMAL.cdf(-z))
        return total

    def survival(self, tokens: float) -> float:
        return self._above(math.log(tokens)) if tokens > 0 else 1.0

    def beyond(self, tokens: float) -> float:
        """E[min(L, cap) | L > tokens]."""
        if tokens <= 0:
            return self.mean()
        left = self.survival(tokens)
        if left < 1e-300 or (self.cap is not None and tokens >= self.cap):
            return float(tokens)
        capped = math.inf if self.cap is None else float(self.cap)
        total = 0.0
        for weight, mu, sigma in zip(self._weights, self._mus, self._sigmas, strict=True):
            low = (math.log(tokens) - mu) / sigma
            high = (math.log(capped) - mu) / sigma if self.cap is not None else math.inf
            above = _NORMAL.cdf(-high) if self.cap is not None else 0.0
            total += weight * math.exp(mu + sigma * sigma / 2) * (_NORMAL.cdf(sigma - low) - _NORMAL.cdf(sigma - high))
            total += weight * capped * above if above else 0.0
        return max(float(tokens), total / left)

    def quantile(self, q: float) -> float:
        tokens = math.ceil(math.exp(self._log_at(_NORMAL.inv_cdf(min(max(q, 1e-12), 1 - 1e-12)))))
        return float(max(1, tokens if self.cap is None else min(tokens, self.cap)))

    def correlation(self) -> Correlation:
        return Correlation(self._icc, self._icc, self._icc, 0)

    def _above(self, log: float) -> float:
        parts = zip(self._weights, self._mus, self._sigmas, strict=True)
        return sum(weight * _NORMAL.cdf((mu - log) / sigma) for weight, mu, sigma in parts)

    def _log_at(self, z: float) -> float:
        """The log length whose probability of being exceeded is that of the score z."""
        wanted = _NORMAL.cdf(-z)
        low = min(mu + z * sigma for mu, sigma in zip(self._mus, self._sigmas, strict=True))
        high = max(mu + z * sigma for mu, sigma in zip(self._mus, self._sigmas, strict=True))
        if high - low < 1e-12:
            return low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._above(middle) > wanted else (low, middle)
        return (low + high) / 2


def lognormal(
    *,
    median: float | None = None,
    mean: float | None = None,
    sigma: float,
    cap: int | None = None,
    icc: float = 0.0,
    prompt_tokens: int = 256,
) -> Mixture:
    """A normal(ln median, sigma^2) log length, with mean = median exp(sigma^2 / 2) before the cut.

    >>> lognormal(median=4000, sigma=0.8).quantile(0.5)
    4000.0
    """
    if (median is None) == (mean is None):
        raise SpecError("a lognormal takes either median= or mean=", now="For example lognormal:median=4000,sigma=0.8,cap=32768.")
    centre = median if median is not None else float(mean or 0) * math.exp(-sigma * sigma / 2)
    return Mixture([1.0], [centre], [sigma], cap=cap, icc=icc, prompt_tokens=prompt_tokens)


def parse(kind: str, options: str) -> Mixture:
    """What follows the colon of `lognormal:...` or `mixture:...`.

    Raises:
        SpecError: an option that there is not, or a value that it can't take.
    """
    known = (
        ("median", "mean", "sigma", "cap", "icc", "prompt")
        if kind == "lognormal"
        else ("weights", "median", "sigma", "cap", "icc", "prompt")
    )
    values: dict[str, str] = {}
    for part in filter(None, options.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise SpecError(f"{kind} has no option {name!r}", now=did_you_mean(name, known))
        values[name] = value
    icc, prompt = _number(values, "icc", 0.0), int(_number(values, "prompt", 256))
    cap = int(_number(values, "cap", 0)) if "cap" in values else None
    if kind == "lognormal":
        median, mean = ((_number(values, name) if name in values else None) for name in ("median", "mean"))
        return lognormal(median=median, mean=mean, sigma=_number(values, "sigma"), cap=cap, icc=icc, prompt_tokens=prompt)
    weights, medians, sigmas = (_numbers(values, name) for name in ("weights", "median", "sigma"))
    return Mixture(weights, medians, sigmas, cap=cap, icc=icc, prompt_tokens=prompt)


def _number(values: Mapping[str, str], name: str, default: float | None = None) -> float:
    if name not in values and default is not None:
        return default
    (number,) = _numbers(values, name)[:1]
    return number


def _numbers(values: Mapping[str, str], name: str) -> list[float]:
    try:
        numbers = [float(part) for part in values[name].split("/")]
    except KeyError:
        raise SpecError(f"{name}= is missing", now="For example lognormal:median=4000,sigma=0.8,cap=32768.") from None
    except ValueError:
        raise SpecError(f"{name}={values[name]} is not a number", now="Several numbers are parted by a slash: sigma=0.5/0.6.") from None
    if not all(math.isfinite(number) for number in numbers):
        raise SpecError(f"{name}={values[name]} is not finite")
    return numbers


def _check(
    weights: npt.ArrayLike, medians: Sequence[float], sigmas: Sequence[float], cap: int | None, icc: float, prompt_tokens: int
) -> None:
    shares = np.asarray(weights, np.float64)
    if not len(shares) == len(medians) == len(sigmas) or not len(shares):
        raise SpecError(
            f"{len(shares)} weights, {len(medians)} medians and {len(sigmas)} sigmas do not fit together", now="Give as many of each."
        )
    if (shares < 0).any() or shares.sum() <= 0 or min(medians) <= 0 or min(sigmas) <= 0:
        raise SpecError("weights can't be negative, medians and sigmas are above 0")
    if max(medians) > MOST_TOKENS or max(sigmas) > _MOST_SIGMA:
        raise SpecError(f"medians above {MOST_TOKENS:,} tokens, or sigmas above {_MOST_SIGMA:g}, are no lengths of answers")
    if cap is not None and cap > MOST_TOKENS:
        raise SpecError(f"cap={cap} is more than {MOST_TOKENS:,} tokens", now="Leave it out, or give the limit of the answers.")
    if cap is not None and cap < 1:
        raise SpecError(f"cap={cap} leaves no answer", now="Give a cap of 1 token or more.")
    if not 0 <= icc <= 1:
        raise SpecError(f"icc={icc} is no correlation within groups", now="Give 0 (members differ as any two) to 1 (all the same).")
    if not 0 <= prompt_tokens <= MOST_TOKENS:
        raise SpecError(f"prompt={prompt_tokens} is no number of tokens")
