"""The survival curve of lengths of which some were cut: longer than seen, by an unknown amount.

Treating a cut length as an end would bias every estimate short, and dropping it even more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.micro.rollouts.decode import FloatArray


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """S(x) = P(L > x), a falling step function. Beyond the last length seen it stays where it is: nothing is known of it."""

    times: FloatArray
    """[K], ascending: the lengths at which answers ended, and the longest seen."""
    values: FloatArray
    """[K], S at and after each."""

    def survival(self, tokens: float) -> float:
        at = int(np.searchsorted(self.times, tokens, side="right")) - 1
        return 1.0 if at < 0 else float(self.values[at])

    def beyond(self, tokens: float) -> float:
        """E[min(L, longest seen) | L > tokens] = tokens + (integral of S from tokens on) / S(tokens).

        What was cut counts as the longest seen, so this is the least that the data allow. `tokens` where S is 0 there.
        """
        left = self.survival(tokens)
        if left <= 0 or tokens >= self.times[-1]:
            return float(tokens)
        at = int(np.searchsorted(self.times, tokens, side="right"))
        edges = np.concatenate([[tokens], self.times[at:]])
        heights = np.concatenate([[left], self.values[at:-1]])
        return float(tokens + (np.diff(edges) * heights).sum() / left)


def kaplan_meier(lengths: npt.ArrayLike, is_cut: npt.ArrayLike) -> SurvivalCurve:
    """The product-limit estimate.

        S(x) = product over t <= x of (1 - ended at t / still there at t)

    Args:
        lengths: [N], at which each answer ended or was cut.
        is_cut: bool [N].
    Source:
        Kaplan and Meier 1958; a cut at t counts as after the ends at t.

    >>> kaplan_meier([1, 2, 2, 3], [False, False, True, False]).values.round(3).tolist()
    [0.75, 0.5, 0.0]
    """
    tokens = np.asarray(lengths, np.float64)
    cut = np.asarray(is_cut, bool)
    times, where = np.unique(tokens, return_inverse=True)
    ended = np.bincount(where, weights=~cut, minlength=len(times))
    all_at = np.bincount(where, minlength=len(times))
    there = all_at[::-1].cumsum()[::-1]
    return SurvivalCurve(times, np.cumprod(1.0 - ended / there))
