"""Compute group-relative advantages: how much better each sample did than the others of its group.

    rewards [N] + group sizes --> advantages [N]

Pure functions on tensors. Groups may differ in size; samples of a group are adjacent. Nothing here looks beyond a group, so a group's
advantages depend neither on chunks nor on placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.errors import RewardError, ShapeError

# Shapes: N samples, P groups (prompts), G samples of a group.


def grpo(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, eps: float = 1e-6) -> Tensor:
    """Centre and scale rewards inside each group.

        A[p, g] = (r[p, g] - mean_g r[p]) / (std_g r[p] + eps)        std^2 = sum_g (r[p, g] - mean_g r[p])^2 / (G - 1)

    Args:
        rewards: float [N] with `group_sizes`, or [P, G] without.
        group_sizes: P positive integers that add up to N.
        eps: added to the standard deviation; same unit as the reward.
    Returns:
        Like `rewards`, dimensionless. A group of equal rewards, and so a group of one, gives exact zeros.
    Raises:
        ShapeError: the sizes do not fit the rewards.
        RewardError: a reward is not finite.
    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2, which does not say by what the squares are divided. The standard deviation is
        the sample's (divided by G - 1), as `torch.std` has it in TRL (GRPOTrainer) and verl (compute_grpo_outcome_advantage);
        `grpo_population` divides by G.

    >>> grpo(torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 1.0]])).round(decimals=3).tolist()
    [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    >>> grpo(torch.tensor([2.0, 1.0, 0.0, 5.0]), [3, 1]).round(decimals=3).tolist()
    [1.0, 0.0, -1.0, 0.0]
    """
    return _scaled(rewards, group_sizes, eps, lost_degrees=1)


def grpo_population(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, eps: float = 1e-6) -> Tensor:
    """`grpo` with the population's standard deviation: larger advantages by sqrt(G / (G - 1)), 1.41 for G = 2 and 1.07 for G = 8.

        A[p, g] = (r[p, g] - mean_g r[p]) / (std_g r[p] + eps)        std^2 = sum_g (r[p, g] - mean_g r[p])^2 / G

    Args, Returns, Raises: as `grpo`.

    >>> grpo_population(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).round(decimals=3).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    return _scaled(rewards, group_sizes, eps, lost_degrees=0)


def _scaled(rewards: Tensor, group_sizes: Sequence[int] | None, eps: float, *, lost_degrees: int) -> Tensor:
    """Centred rewards over their group's standard deviation, whose sum of squares is divided by G - lost_degrees."""
    centred, sizes = _centre(rewards, group_sizes)
    largest = _group_sums(centred.abs(), sizes)
    scale = torch.where(largest > 1e100, largest, 1.0)  # The square of 1e155 is beyond float64.
    squares = _group_sums((centred / _spread(scale, sizes)).square(), sizes)
    deviation = scale * (squares / (sizes - lost_degrees).clamp(min=1)).sqrt()
    return (centred / (_spread(deviation, sizes) + eps)).to(rewards.dtype).view_as(rewards)


def dr_grpo(rewards: Tensor, group_sizes: Sequence[int] | None = None) -> Tensor:
    """Centre rewards inside each group, without scaling: easy and hard prompts weigh the same.

        A[p, g] = r[p, g] - mean_g r[p]

    Args, Returns, Raises: as `grpo`; the unit is the reward's.
    Source:
        Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2.

    >>> dr_grpo(torch.tensor([[3.0, 1.0]])).tolist()
    [[1.0, -1.0]]
    """
    return _centre(rewards, group_sizes)[0].to(rewards.dtype).view_as(rewards)


def rloo(rewards: Tensor, group_sizes: Sequence[int] | None = None) -> Tensor:
    """Subtract from each reward the mean of the others of its group (leave-one-out baseline).

        A[p, g] = r[p, g] - sum_{h != g} r[p, h] / (G - 1)

    Args, Returns: as `grpo`; the unit is the reward's.
    Raises:
        ShapeError: also if a group has a single sample, which has nothing to be compared with.
        RewardError: a reward is not finite.
    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, eq. 6; computed as (r - mean) * G / (G - 1), which is the same.

    >>> rloo(torch.tensor([1.0, 0.0, 0.5]), [3]).tolist()
    [0.75, -0.75, 0.0]
    """
    centred, sizes = _centre(rewards, group_sizes)
    if len(sizes) and int(sizes.min()) < 2:
        raise ShapeError(f"rloo: group {int(sizes.argmin())} has one sample; leave-one-out needs two", now="Generate with n=2 or more.")
    return (centred * _spread(sizes / (sizes - 1), sizes)).to(rewards.dtype).view_as(rewards)


def _centre(rewards: Tensor, group_sizes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Rewards minus their group's mean, float64 [N], and the sizes, int64 [P]. Equal rewards give exact zeros."""
    if group_sizes is None:
        if rewards.ndim != 2:
            raise ShapeError(f"rewards without group_sizes must be [P, G], got {list(rewards.shape)}")
        sizes = torch.full((rewards.shape[0],), rewards.shape[1], device=rewards.device)
    else:
        if rewards.ndim != 1:
            raise ShapeError(f"rewards with group_sizes must be [N], got {list(rewards.shape)}")
        sizes = torch.as_tensor(list(group_sizes), dtype=torch.int64, device=rewards.device)
    if int(sizes.sum()) != rewards.numel() or bool((sizes < 1).any()):
        raise ShapeError(
            f"group sizes {sizes.tolist()[:8]} must be positive and add up to {rewards.numel()} rewards, not {int(sizes.sum())}"
        )
    flat = rewards.detach().flatten().double()
    bad = torch.nonzero(~flat.isfinite())
    if len(bad):
        raise RewardError(f"reward {int(bad[0])} of {len(flat)} is {float(flat[bad[0]])}; rewards must be finite")
    # Subtracting a group's first reward before its mean makes equal rewards exact zeros, which a rounded mean does not.
    first = flat[sizes.cumsum(0) - sizes]
    shifted = flat - _spread(first, sizes)
    return shifted - _spread(_group_sums(shifted, sizes) / sizes, sizes), sizes


def _group_sums(values: Tensor, sizes: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=sizes) if len(values) else values.new_zeros(len(sizes))


def _spread(per_group: Tensor, sizes: Tensor) -> Tensor:
    return per_group.repeat_interleave(sizes)


Advantages = Callable[[Tensor, Sequence[int]], Tensor]
OnArrays = Callable[[npt.NDArray[np.floating], Sequence[tuple[int, int]]], npt.NDArray[np.float32]]


def _on_arrays(function: Advantages) -> OnArrays:
    def advantages(rewards: npt.NDArray[np.floating], bounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        sizes = [end - start for start, end in bounds]
        result = function(torch.from_numpy(np.ascontiguousarray(rewards, np.float64)), sizes)
        wide = result.numpy()
        beyond = np.flatnonzero(~(np.abs(wide) <= np.finfo(np.float32).max))
        if len(beyond):
            raise RewardError(f"the advantage of sample {beyond[0]} of {len(wide)} is {wide[beyond[0]]:.3g}, which no float32 holds")
        return np.asarray(wide, np.float32)

    return advantages


ADVANTAGES: Mapping[str, Advantages] = MappingProxyType(
    {function.__name__: function for function in (grpo, grpo_population, dr_grpo, rloo)}
)
"""Each function by its name; `m2flow.recipe.AdvantageName` lists the names."""

BY_NAME: Mapping[str, OnArrays] = MappingProxyType({name: _on_arrays(function) for name, function in ADVANTAGES.items()})
"""The same on a batch's columns: rewards [N] and `Batch.group_bounds()` to advantages float32 [N]."""
