"""How far apart two engines are that hold the same weights: the log-probabilities that each gives to the same tokens.

    rollout's log-probabilities, trainer's --agreement_of--> Agreement --plus those of other micro-batches--> metrics of an update

Both compute the same function, so what is between them is rounding, another kernel, or a fault: a weight that went to the wrong place, a
mask, another temperature. A policy gradient takes the difference for a change of the policy.

Source: the estimator k3 of the divergence is Schulman's, http://joschu.net/blog/kl-approx.html; that rollout and training engines
differ, and what that does: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PREFIX = "rollout_diff/"
"""Of the metrics' names."""
MEAN = f"{PREFIX}mean"
MAX = f"{PREFIX}max"
K3 = f"{PREFIX}k3"


@dataclass(frozen=True)
class Agreement:
    """Sums over tokens, so that no number depends on how they were cut."""

    num_tokens: int = 0
    total: float = 0.0
    """Of the absolute differences, in nats."""
    largest: float = 0.0
    total_k3: float = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[Agreement]) -> Agreement:
        """Of the tokens of all parts, in whatever order they come."""
        return cls(
            sum(part.num_tokens for part in parts),
            math.fsum(part.total for part in parts),
            max((part.largest for part in parts), default=0.0),
            math.fsum(part.total_k3 for part in parts),
        )

    @property
    def mean(self) -> float:
        """Absolute difference of a token, in nats."""
        return self.total / max(self.num_tokens, 1)

    def metrics(self) -> dict[str, float]:
        """By their names; none if no token was compared.

        >>> agreement_of([-1.0, -2.0], [-1.0, -2.5]).metrics()["rollout_diff/mean"]
        0.25
        """
        if not self.num_tokens:
            return {}
        return {MEAN: self.mean, MAX: self.largest, K3: self.total_k3 / self.num_tokens, f"{PREFIX}tokens": float(self.num_tokens)}


NO_AGREEMENT = Agreement()
"""Nothing was compared."""


def agreement_of(trained: npt.ArrayLike, sampled: npt.ArrayLike) -> Agreement:
    """Of tokens that the rollout engine sampled.

        k3 = exp(d) - 1 - d,   d = log p_trainer - log p_rollout:   an estimate of KL(rollout || trainer), never negative

    Args:
        trained: log-probabilities by the trainer, [T]. sampled: by the rollout engine, [T].
    """
    difference = np.asarray(trained, np.float64) - np.asarray(sampled, np.float64)
    if not len(difference):
        return NO_AGREEMENT
    # Beyond 700 exp would be infinite, and so far apart are only engines that have nothing in common.
    k3 = np.expm1(np.minimum(difference, 700.0)) - difference
    absolute = np.abs(difference)
    return Agreement(len(difference), float(absolute.sum()), float(absolute.max()), float(k3.sum()))
