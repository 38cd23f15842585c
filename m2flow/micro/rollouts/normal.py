"""The upper tail of the normal distribution, for arrays and far out: log Q(z) and the hazard phi(z) / Q(z)."""

from __future__ import annotations

import math

import numpy as np

from m2flow.micro.rollouts.decode import FloatArray

_LOW, _HIGH, _SPACING = -12.0, 40.0, 0.005
_FAR = 30.0
"""From here on the tail is the first term of its asymptotic series; erfc is still exact."""

_SCORES = np.arange(_LOW, _HIGH + _SPACING, _SPACING)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_TAILS = np.array(
    [math.log(0.5 * math.erfc(z / math.sqrt(2.0))) if z < _FAR else -0.5 * z * z - _HALF_LOG_2PI - math.log(z) for z in _SCORES.tolist()]
)


def log_density(z: FloatArray) -> FloatArray:
    """Ln phi(z)."""
    return np.asarray(-0.5 * z * z - _HALF_LOG_2PI, np.float64)


def log_tail(z: FloatArray) -> FloatArray:
    """Ln Q(z), by interpolation; the same beyond 40 as at 40.

    >>> float(np.exp(log_tail(np.array(0.0))).round(6))
    0.5
    """
    return np.asarray(np.interp(z, _SCORES, _LOG_TAILS), np.float64)


def hazard(z: FloatArray) -> FloatArray:
    """phi(z) / Q(z)."""
    inside = np.minimum(z, _HIGH)
    return np.asarray(np.exp(log_density(inside) - log_tail(inside)), np.float64)


def fit_cut_normal(seen: FloatArray, cut: FloatArray, *, num_rounds: int = 40) -> tuple[float, float]:
    """Mean and standard deviation of a normal distribution of which some values are known only to be larger than `cut`.

    Expectation and maximisation: a cut value stands for E[y | y > c] = m + s h, E[y^2 | y > c] = m^2 + s^2 + s (c + m) h, h the hazard
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
