"""Constants from timings: sums of terms, each a size times a constant, fitted so that an interrupted measurement does not count.

    sizes [N, K], seconds [N] --fit--> constants [K], and how well they say the seconds again

The variance of a time grows with the time, so squares are weighed by 1/seconds: short pieces of work count, and the sum over all is
right. Residuals beyond a few times the usual one are cut (Huber), and in the end what took more than twice as long as predicted: on a
machine that does other things too, some timings are far too long, and none is far too short. Terms of which nothing may be won back by
more work are held at zero or above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_ROUNDS = 12
_HUBER = 1.345
"""Residuals beyond this many standard deviations count linearly. Source: Huber 1981; 95% efficient where the errors are normal."""
_MAD_TO_SIGMA = 1.4826
_MOST_TIMES = 2.0
"""What took longer than so many times the prediction was interrupted, and counts as this long."""
_MOST_TERMS = 6
_LEAST_SQUARES = 1e-12
"""Share of the squares that rounding leaves."""


class Quality(msgspec.Struct, frozen=True):
    """How well constants say the seconds that they were fitted to."""

    num: int
    """Timings."""
    r2: float
    """Share of the seconds' variance that the terms explain; 1 is all of it, 0 where there is none to explain."""
    error: float
    """Median of |predicted - measured| / measured."""

    def __str__(self) -> str:
        return f"{self.num} timings, R2 {self.r2:.3f}, median error {self.error:.1%}"


def fit(
    sizes: npt.ArrayLike, seconds: npt.ArrayLike, *, free: Sequence[int] = (), doubted: Sequence[int] = (0,)
) -> tuple[FloatArray, Quality]:
    """The constants c >= 0 that make sizes @ c close to seconds.

    Args:
        sizes: [N, K], at most six terms. The first is the fixed cost, a column of ones.
        seconds: [N], positive.
        free: columns whose constant may be below zero.
        doubted: columns that must explain twice as much as others to count: by default the fixed cost.
    Returns:
        The constants [K], in seconds per unit of the size; 0 for terms that say nothing.

    >>> constants, quality = fit([[1, 1], [1, 2], [1, 10]], [0.3, 0.4, 1.2])
    >>> constants.round(6).tolist(), round(quality.r2, 6)
    ([0.2, 0.1], 1.0)
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    num, num_terms = x.shape
    assert num_terms <= _MOST_TERMS
    assert len(y) == num
    if not num:
        return np.zeros(num_terms), Quality(0, 0.0, 0.0)
    # Columns of about the same size, so that the smallest constant is solved for as exactly as the largest.
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    x = x / scale
    base = 1.0 / np.maximum(y, 1e-9)
    weights = base
    constants = np.zeros(num_terms)
    for _ in range(_ROUNDS):
        constants = _least_squares(x, y, weights, frozenset(free), frozenset(doubted))
        residuals = np.abs(y - x @ constants) * np.sqrt(base)
        sigma = _MAD_TO_SIGMA * float(np.median(residuals))
        if sigma <= 1e-12 * float(np.sqrt(y.max())):
            break
        weights = base * np.minimum(1.0, _HUBER * sigma / np.maximum(residuals, 1e-300))
    quality = _quality(y, x @ constants, weights)
    predicted = np.maximum(x @ constants, 0.0)
    if float(predicted.sum()) > 0:
        # Small delays are part of what work takes: the sum over all is kept, but for what was interrupted.
        constants = constants * (float(np.minimum(y, _MOST_TIMES * predicted).sum()) / float(predicted.sum()))
    return constants / scale, quality


def robust_mean(values: npt.ArrayLike) -> float:
    """The mean of values of which some are far too large; 0 of none.

    >>> round(robust_mean([1.0, 1.1, 0.9, 1.0, 50.0]), 1)
    1.0
    """
    numbers = np.asarray(values, np.float64)
    if not len(numbers):
        return 0.0
    middle = float(np.median(numbers))
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(numbers - middle)))
    return float(numbers[np.abs(numbers - middle) <= 3 * sigma + 1e-12].mean())


def _least_squares(x: FloatArray, y: FloatArray, weights: FloatArray, free: frozenset[int], doubted: frozenset[int]) -> FloatArray:
    """Of each set of terms the least squares, exactly; and of the sets the best by Schwarz's criterion, n ln(squares) + k ln(n).

    So a term must earn its place, and one that is doubted twice: of work that was always of one size, the time is taken to grow with the
    work, and in proportion to it.

    Source:
        Schwarz 1978, doi:10.1214/aos/1176344136.
    """
    root = np.sqrt(weights)
    a, b = x * root[:, None], y * root
    gram, right, whole = a.T @ a, a.T @ b, float(b @ b)
    num, num_terms = x.shape
    best, least = np.zeros(num_terms), np.inf
    for size in range(1, num_terms + 1):
        for chosen in itertools.combinations(range(num_terms), size):
            index = np.array(chosen)
            found = np.linalg.lstsq(gram[np.ix_(index, index)], right[index], rcond=1e-12)[0]
            if any(value < 0 and term not in free for value, term in zip(found, chosen, strict=True)):
                continue
            squares = whole + float(found @ gram[np.ix_(index, index)] @ found - 2 * found @ right[index])
            told = num * math.log(max(squares / whole, _LEAST_SQUARES)) + (size + len(doubted.intersection(chosen))) * math.log(num)
            if told < least:
                best, least = np.zeros(num_terms), told
                best[index] = found
    return best


def _quality(y: FloatArray, predicted: FloatArray, weights: FloatArray) -> Quality:
    mean = float((weights * y).sum() / weights.sum())
    whole = float((weights * (y - mean) ** 2).sum())
    left = float((weights * (y - predicted) ** 2).sum())
    is_flat = whole <= 1e-9 * float((weights * y**2).sum())
    return Quality(len(y), 0.0 if is_flat else max(0.0, 1.0 - left / whole), float(np.median(np.abs(predicted - y) / np.maximum(y, 1e-12))))
