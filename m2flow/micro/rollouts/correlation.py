"""How alike the lengths of one group are, measured: decides whether siblings tell anything about a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from m2flow.micro.rollouts.lengths import Correlation

_Z95 = 1.959964


def log_length_icc(groups: Sequence[npt.ArrayLike]) -> Correlation:
    """The intraclass correlation of log length in groups of lengths, as `icc` has it.

    Lengths that were cut enter as they are, which hides differences beyond the cap.

    >>> log_length_icc([[10, 10, 10], [100, 100, 100], [1000, 1000, 1000]]).icc
    1.0
    """
    return icc([np.log(np.maximum(np.asarray(group, np.float64), 1.0)) for group in groups])


def icc(groups: Sequence[npt.ArrayLike]) -> Correlation:
    """The intraclass correlation, by one-way analysis of variance.

        icc = (MSB - MSW) / (MSB + (k - 1) MSW),   k = (N - sum n_i^2 / N) / (P - 1)

    MSB and MSW are the mean squares between and within groups. Groups of one say nothing of it and are left out. With fewer than
    three groups: 0, between -1 and 1.

    The interval is Fisher's: z = ln((1 + (k - 1) icc) / (1 - icc)) / 2 is about normal with variance k / (2 (k - 1)(P - 2)). It
    assumes normal log lengths; heavy tails make the truth wider.

    Source:
        Donner and Koval 1980 for unequal groups; Fisher 1925, section 39, for the interval.
    """
    rows = [np.asarray(group, np.float64) for group in groups if np.size(group) > 1]
    num_groups = len(rows)
    if num_groups < 3:
        return Correlation(0.0, -1.0, 1.0, num_groups)
    sizes = np.array([len(row) for row in rows], np.float64)
    means = np.array([row.mean() for row in rows])
    num = sizes.sum()
    between = float((sizes * (means - (sizes * means).sum() / num) ** 2).sum()) / (num_groups - 1)
    within = float(sum(((row - mean) ** 2).sum() for row, mean in zip(rows, means, strict=True))) / (num - num_groups)
    k = float((num - (sizes**2).sum() / num) / (num_groups - 1))
    whole = between + (k - 1) * within
    found = (between - within) / whole if whole > 0 else 0.0
    if found >= 1.0:
        return Correlation(1.0, 1.0, 1.0, num_groups)
    z = 0.5 * math.log(max(1.0 + (k - 1) * found, 1e-12) / (1.0 - found))
    spread = _Z95 * math.sqrt(k / (2.0 * (k - 1) * (num_groups - 2)))
    low, high = (_icc_of(z + sign * spread, k) for sign in (-1, 1))
    return Correlation(found, low, high, num_groups)


def _icc_of(z: float, k: float) -> float:
    grown = math.exp(2.0 * z)
    return (grown - 1.0) / (grown + k - 1.0)
