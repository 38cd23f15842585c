"""Shape rewards before they become advantages: penalties for length, moments that are kept from step to step, coefficients that adapt.

    rewards [N], lengths [N] --> rewards [N]

NumPy in float64; every function is elementwise or looks at one group. In a flow they are mapped over handles, or called by an op:

    penalty = responses.length.map(partial(overlong_penalty, longest=4096, buffer=512))
    rewards = verifier.score(responses) + penalty
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from m2flow.errors import OptionError, ShapeError

# Shapes: N samples.

Floats = npt.NDArray[np.float64]


@overload
def overlong_penalty(length: float, *, longest: int, buffer: int) -> float: ...
@overload
def overlong_penalty(length: npt.NDArray[np.int64], *, longest: int, buffer: int) -> Floats: ...


def overlong_penalty(length: float | npt.NDArray[np.int64], *, longest: int, buffer: int) -> float | Floats:
    """A penalty that falls from 0 to -1 over the last tokens that a response may have.

        P = 0                                    l <= longest - buffer
            (longest - buffer - l) / buffer      up to longest
            -1                                   beyond

    Args:
        length: generated tokens, one number or [N]. longest: most that are not punished in full. buffer: 1 to `longest` tokens.
    Returns:
        One number, or float64 [N], from -1 to 0; to be added to a reward.
    Raises:
        OptionError: a buffer outside 1..longest.
    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.

    >>> [overlong_penalty(length, longest=100, buffer=20) for length in (80, 90, 100, 130)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer <= longest:
        raise OptionError(f"buffer is {buffer} and longest {longest}; the buffer has 1 to longest tokens")
    penalty = np.clip((longest - buffer - np.asarray(length, np.float64)) / buffer, -1.0, 0.0) + 0.0
    return penalty if isinstance(length, np.ndarray) else float(penalty)


def length_reward(lengths: Sequence[int] | npt.NDArray[np.int64], is_right: Sequence[bool] | npt.NDArray[np.bool_]) -> Floats:
    """Reward short right answers and punish long ones, relative to the others of one group.

        x = 0.5 - (l - min l) / (max l - min l)        0 where all lengths are equal
        R = x if right, else min(0, x)

    Args:
        lengths: [N], of the responses to one prompt. is_right: [N].
    Returns:
        float64 [N], from -0.5 to 0.5; to be added to a reward.
    Raises:
        ShapeError: as many lengths as answers are needed.
    Source:
        Kimi k1.5 technical report 2025, arXiv:2501.12599, section 2.3.3.

    >>> length_reward([10, 20, 30], [True, True, False]).tolist()
    [0.5, 0.0, -0.5]
    """
    found, right = np.asarray(lengths, np.float64), np.asarray(is_right, bool)
    if found.shape != right.shape or found.ndim != 1:
        raise ShapeError(f"lengths are {list(found.shape)}, is_right {list(right.shape)}")
    if not len(found) or found.max() == found.min():
        return np.zeros(len(found))
    shares = 0.5 - (found - found.min()) / (found.max() - found.min())
    chosen: Floats = np.where(right, shares, np.minimum(shares, 0.0))
    return chosen


def adaptive_kl_coef(coef: float, kl: float, *, target: float, gain: float = 0.1, clip: float = 0.2) -> float:
    """The coefficient of a KL penalty for the next step: larger where the divergence is above its target, smaller where it is below.

        e  = (kl - target) / target, at least -clip and at most clip
        c' = c (1 + gain e)

    In a flow it is called by an op, so that no step waits for it; a penalty in the reward then takes the number:

        @op(granularity="batch")
        def next_coef(coef: float, kl: float) -> float:
            return adaptive_kl_coef(coef, kl, target=0.1)

        beta = next_coef(beta, kl.mean())

    Args:
        coef: the coefficient of this step, 0 or more. kl: the divergence that this step saw, in the unit of the target.
        target: above 0. gain: the most that the coefficient changes is `gain * clip`, 2 % of it by default.
    Raises:
        OptionError: a number out of range.
    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2, whose constants the defaults are. TRL's controller has the gain grow with the
        samples of a step (samples / horizon).

    >>> [round(adaptive_kl_coef(1.0, kl, target=6.0), 6) for kl in (6.0, 6.6, 60.0, 0.0)]
    [1.0, 1.01, 1.02, 0.98]
    """
    if not (target > 0 and coef >= 0 and gain >= 0 and 0 <= clip <= 1 and gain * clip < 1):
        raise OptionError(f"coef is {coef}, target {target}, gain {gain} and clip {clip}; the target is above 0, and the clip at most 1")
    return coef * (1 + gain * min(max((kl - target) / target, -clip), clip))


def adaptive_entropy_coef(coef: float, entropy: float, *, target: float, step: float = 0.005, most: float = 1.0) -> float:
    """The coefficient of an entropy bonus for the next step: a step larger where the entropy is below its target, and smaller above it.

        c' = clip(c + step, 0, most) where entropy < target, else clip(c - step, 0, most)

    In a flow it is called on the metrics of an earlier update, so that no step waits for it, and is an option of the loss:

        metrics = policy.update(responses, rewards, loss=ppo_clip(entropy_coef=coef))
        if (known := metrics.lagged(1)) is not None:
            coef = adaptive_entropy_coef(coef, known["entropy"], target=0.3)

    Args:
        coef: the coefficient of this step, 0 or more. entropy: mean of the tokens, nats. target: nats, above 0.
        step: by how much it changes. most: its bound.
    Raises:
        OptionError: a number out of range.
    Source:
        He et al. 2025 (Skywork-OR1), arXiv:2505.22312. There a step whose entropy is above the target has no bonus at all.

    >>> [adaptive_entropy_coef(0.01, entropy, target=0.3, step=0.005) for entropy in (0.2, 0.4)]
    [0.015, 0.005]
    """
    if not (target > 0 and coef >= 0 and step >= 0 and most >= 0 and math.isfinite(entropy)):
        raise OptionError(
            f"coef is {coef}, entropy {entropy}, target {target}, step {step} and most {most}; the target is above 0, none below"
        )
    return min(max(coef + (step if entropy < target else -step), 0.0), most)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all rewards so far: what running normalisation keeps from step to step.

    Source:
        Chan et al. 1983, "Algorithms for computing the sample variance", eq. 2.1, for adding a batch; PPO implementations that normalise
        rewards by running moments: Engstrom et al. 2020, arXiv:2005.12729, section 3.

    >>> moments = Moments().with_batch(np.array([1.0, 2.0])).with_batch(np.array([3.0]))
    >>> moments.mean, moments.deviation, moments.normalised(np.array([4.0]), eps=0.0).tolist()
    (2.0, 1.0, [2.0])
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_batch(self, rewards: Floats) -> Moments:
        """Add rewards. They are sorted first, so that a batch counts the same in every order."""
        if not len(rewards):
            return self
        ordered = np.sort(rewards.astype(np.float64))
        count, mean = self.count + len(ordered), float(ordered.mean())
        squares, step = float(np.square(ordered - mean).sum()), mean - self.mean
        return Moments(
            count, self.mean + step * len(ordered) / count, self.squares + squares + step * step * self.count * len(ordered) / count
        )

    @property
    def deviation(self) -> float:
        """The standard deviation of a sample; 0 for fewer than two."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0

    def normalised(self, rewards: Floats, *, eps: float = 1e-6, clip: float = 0.0) -> Floats:
        """Centre and scale rewards, and with `clip` bound them to -clip..clip."""
        scaled: Floats = (rewards - self.mean) / (self.deviation + eps)
        return np.clip(scaled, -clip, clip) if clip else scaled
