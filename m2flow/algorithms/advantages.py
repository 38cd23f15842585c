"""Compute advantages of whole responses: how much better each sample did than the others of its group, or of the batch.

    rewards [N] + group sizes --> advantages [N], or of each turn (`gigpo`)

Pure functions on tensors. Groups may differ in size; samples of a group are adjacent. The functions of `OF_GROUPS` look at nothing beyond a
group, so a trainer computes them for each group as it arrives. Those of `OF_BATCHES` divide by numbers of the whole batch, and run as a
call of their own that waits for all of it. So advantages depend neither on chunks nor on placement. Both count samples, never tokens, and
no padding.

An advantage of a flow's own is no function of this module: it is a function under `@op(granularity="group")`, or one under
`@op(granularity="batch", per_sample=True)`, whose result is passed as `advantages=`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.errors import OpError, OptionError, RewardError, ShapeError
from m2flow.samples import MAIN, Batch, IdArray, Ragged, SampleId, Segment, check_one_reward, records_of, sequences_of

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

    Args, Returns, Raises: as `grpo`; the unit is the reward's. The only sample that a filter or failures left of a group has 0, as there
        is nothing to compare it with.
    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, eq. 6; computed as (r - mean) * G / (G - 1), which is the same.

    >>> rloo(torch.tensor([1.0, 0.0, 0.5]), [3]).tolist()
    [0.75, -0.75, 0.0]
    """
    centred, sizes = _centre(rewards, group_sizes)
    return (centred * _spread(sizes / (sizes - 1).clamp(min=1), sizes)).to(rewards.dtype).view_as(rewards)


def maxrl(rewards: Tensor, group_sizes: Sequence[int] | None = None) -> Tensor:
    """Centre rewards and divide them by their group's mean: the gradient of a truncated log-likelihood of success.

        A[p, g] = (r[p, g] - mean_g r[p]) / mean_g r[p]        0 where the mean is 0

    Args, Returns: as `grpo`, without `eps`.
    Raises:
        RewardError: a reward is negative, or not finite. ShapeError: the sizes do not fit the rewards.
    Source:
        Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710, whose rewards are 0 or 1; any that are not
        negative are taken here.

    >>> maxrl(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist()
    [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    centred, sizes = _centre(rewards, group_sizes)
    flat = rewards.detach().flatten().double()
    if bool((flat < 0).any()):
        raise RewardError(
            f"maxrl: a reward is {float(flat.min()):g}; it divides by the mean of a group, so none may be negative",
            now="Add a constant to the rewards, or take advantages='grpo'.",
        )
    mean = _group_sums(flat / _spread(sizes, sizes), sizes)
    return (centred / _spread(torch.where(mean > 0, mean, 1.0), sizes)).to(rewards.dtype).view_as(rewards)


def opo(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, lengths: Tensor) -> Tensor:
    """Subtract from each reward the mean of its group weighted by length: the baseline of the least variance.

        A[p, g] = r[p, g] - sum_h l[p, h] r[p, h] / sum_h l[p, h]

    Args:
        rewards, group_sizes: as `grpo`. lengths: like `rewards`, generated tokens of each sample, 0 or more.
    Returns:
        Like `rewards`, in their unit. Of a group without a token it is the reward less the plain mean.
    Raises:
        ShapeError, RewardError: as `grpo`.
    Source:
        Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585. The optimum weighs
        rewards by the squared norm of their gradients; its authors take a response's length for that.

    >>> opo(torch.tensor([[1.0, 0.0]]), lengths=torch.tensor([[30.0, 10.0]])).tolist()
    [[0.25, -0.75]]
    """
    centred, sizes = _centre(rewards, group_sizes)
    if lengths.shape != rewards.shape:
        raise ShapeError(f"rewards are {list(rewards.shape)}, lengths {list(lengths.shape)}")
    weights = lengths.detach().flatten().double()
    total = _group_sums(weights, sizes)
    shift = _group_sums(centred * (weights / _spread(torch.where(total > 0, total, 1.0), sizes)), sizes)
    return (centred - _spread(shift, sizes)).to(rewards.dtype).view_as(rewards)


def pass_at_k(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, k: int) -> Tensor:
    """Advantages for the reward of the best of k samples, averaged over every choice of k from the group.

        m        = (number of rewards that are 0),  N = (size of the group)
        mean     = 1 - C(m, k) / C(N, k)                               the reward of k samples on average
        A[right] = (1 - mean) / sqrt(mean (1 - mean))
        A[wrong] = (1 - mean - C(m - 1, k - 1) / C(N - 1, k - 1)) / sqrt(mean (1 - mean))        all 0 where the mean is 0 or 1

    A group that has lost samples, and has fewer than k left, has no choice of k to average over: its advantages are 0.

    Args:
        rewards: 0 or 1, shapes as `grpo`. k: samples of which one must be right, 1 or more.
    Returns:
        Like `rewards`, dimensionless; adds up to 0 in each group. With k = 1 it is `grpo_population` without `eps`.
    Raises:
        RewardError: a reward is neither 0 nor 1. OptionError: k is below 1.
    Source:
        Chen et al. 2025, "Pass@k Training", arXiv:2508.10751, the analytical derivation.

    >>> pass_at_k(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), k=2).round(decimals=3).tolist()
    [[1.0, -0.333, -0.333, -0.333]]
    """
    if k < 1:
        raise OptionError(f"k is {k}; it must be 1 or more")
    centred, sizes = _centre(rewards, group_sizes)
    flat = rewards.detach().flatten().double()
    if bool(((flat != 0) & (flat != 1)).any()):
        raise RewardError("pass_at_k: a reward is neither 0 nor 1", now="Pass rewards > 0.5, say.")
    num_wrong = (sizes - _group_sums(flat, sizes).long()).tolist()
    found = [_best_of(k, wrong, size) for wrong, size in zip(num_wrong, sizes.tolist(), strict=True)]
    right, wrong = centred.new_tensor(found).reshape(-1, 2).T
    return torch.where(flat == 1, _spread(right, sizes), _spread(wrong, sizes)).to(rewards.dtype).view_as(rewards)


def _best_of(k: int, num_wrong: int, size: int) -> tuple[float, float]:
    """The advantage of a right sample, and of a wrong one, of a group with so many wrong ones."""
    if size < k:
        return 0.0, 0.0
    failing = math.comb(num_wrong, k) / math.comb(size, k)
    if not 0 < failing < 1:
        return 0.0, 0.0
    deviation = math.sqrt(failing * (1 - failing))
    return failing / deviation, (failing - math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / deviation


def gigpo(
    rewards: Tensor,
    group_sizes: Sequence[int],
    *,
    states: Sequence[Sequence[Hashable]],
    discount: float = 0.95,
    weight: float = 1.0,
    eps: float = 1e-6,
) -> list[Tensor]:
    """Advantages of turns: of the sample in its group, and of the turn among all turns of the group that began in the same state.

        R[s, t] = discount^(T[s] - 1 - t) * r[s]
        A[s, t] = grpo(r)[s] + weight * grpo(R over the turns of the group with the state of t)[s, t]

    Args:
        rewards, group_sizes: as `grpo`, [N]. states: of each sample, what the state before each of its T turns goes by; equal ones are one.
        discount: of the reward for each turn that comes after, from 0 to 1. weight: of the turns' own advantages, 0 or more.
        eps: as of `grpo`.
    Returns:
        Of each sample, [T] in the dtype of the rewards. A state that one turn alone began in adds nothing to it.
    Raises:
        ShapeError, RewardError: as `grpo`.
    Source:
        Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978, eq. 3, 6 and 8, of one reward at
        the end of an episode.

    >>> found = gigpo(torch.tensor([1.0, 1.0]), [2], states=[["a", "b"], ["a"]], discount=0.5)
    >>> [[round(advantage, 3) for advantage in turns.tolist()] for turns in found]
    [[-0.707, 0.0], [0.707]]
    """
    whole = grpo(rewards, group_sizes, eps=eps)
    if len(states) != len(rewards):
        raise ShapeError(f"there are {len(rewards)} rewards, and states of {len(states)} samples")
    counts = [len(of) for of in states]
    turn_sample = [sample for sample, count in enumerate(counts) for _ in range(count)]
    if not turn_sample:
        return [whole.new_zeros(0) for _ in counts]
    group = [number for number, size in enumerate(group_sizes) for _ in range(size)]
    later = torch.tensor([count - 1 - turn for count in counts for turn in range(count)], dtype=torch.float64)
    returns = rewards.double()[turn_sample] * torch.full_like(later, discount) ** later
    clusters: dict[tuple[int, Hashable], list[int]] = {}
    for turn, (sample, state) in enumerate(zip(turn_sample, (state for of in states for state in of), strict=True)):
        clusters.setdefault((group[sample], state), []).append(turn)
    order = [turn for of in clusters.values() for turn in of]
    own = torch.empty_like(returns)
    own[order] = grpo(returns[order], [len(of) for of in clusters.values()], eps=eps)
    return list((whole[turn_sample] + weight * own).to(rewards.dtype).split(counts))


def remax(rewards: Tensor, baselines: Tensor) -> Tensor:
    """Subtract from each reward that of the greedy answer to the same prompt.

        A = r - r_greedy

    Args:
        rewards, baselines: of one shape, finite.
    Returns:
        Like `rewards`, in their unit. Nothing makes the advantages of a prompt add up to 0.
    Raises:
        ShapeError: the shapes differ. RewardError: a reward is not finite.
    Source:
        Li et al. 2023, "ReMax", arXiv:2310.10505. In a flow it is arithmetic on handles, since the greedy answers are samples of
        their own: docs/guide/recipes.md.

    >>> remax(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])).tolist()
    [0.5, -0.5]
    """
    if rewards.shape != baselines.shape:
        raise ShapeError(f"rewards are {list(rewards.shape)}, baselines {list(baselines.shape)}")
    _check_finite(rewards.detach().flatten().double())
    _check_finite(baselines.detach().flatten().double())
    return rewards - baselines


# ---- advantages that need the whole batch


def reinforce_pp(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, eps: float = 1e-6) -> Tensor:
    """Centre and scale rewards over the whole batch, whatever their groups.

        A[n] = (r[n] - mean r) / (std r + eps)        std^2 = sum_n (r[n] - mean r)^2 / (N - 1)

    Args, Returns, Raises: as `grpo`. A batch of one, or of equal rewards, gives exact zeros.
    Source:
        Hu 2025, "REINFORCE++", arXiv:2501.03262. The batch's moments are those of its samples. OpenRLHF and verl take them over the
        tokens of all samples, so that there a long response counts more than a short one, and the sum over samples is not 0.

    >>> reinforce_pp(torch.tensor([2.0, 1.0, 0.0]), [1, 2]).round(decimals=3).tolist()
    [1.0, 0.0, -1.0]
    """
    _centre(rewards, group_sizes)  # Checks the sizes, which don't count.
    return _scaled(rewards.flatten(), [rewards.numel()] if rewards.numel() else [], eps, lost_degrees=1).view_as(rewards)


def reinforce_pp_baseline(rewards: Tensor, group_sizes: Sequence[int] | None = None, *, eps: float = 1e-6) -> Tensor:
    """Centre rewards inside each group, then centre and scale them over the whole batch.

        B[p, g] = r[p, g] - mean_g r[p]
        A[p, g] = (B[p, g] - mean B) / (std B + eps)

    Args, Returns, Raises: as `reinforce_pp`.
    Source:
        Hu 2025, arXiv:2501.03262; moments over samples, as in `reinforce_pp`.

    >>> reinforce_pp_baseline(torch.tensor([[3.0, 1.0], [8.0, 8.0]], dtype=torch.float64)).round(decimals=3).tolist()
    [[1.225, -1.225], [0.0, 0.0]]
    """
    centred, _ = _centre(rewards, group_sizes)
    scaled = _scaled(centred, [centred.numel()] if centred.numel() else [], eps, lost_degrees=1)
    return scaled.to(rewards.dtype).view_as(rewards)


def gpg(rewards: Tensor, group_sizes: Sequence[int] | None = None) -> Tensor:
    """Centre rewards inside each group, and scale all by what groups of equal rewards take from the mean over samples.

        A[p, g] = alpha (r[p, g] - mean_g r[p])        alpha = N / (samples of groups whose rewards differ)

    Args, Returns, Raises: as `dr_grpo`.
    Source:
        Chu et al. 2025, "GPG", arXiv:2504.02546, with F_norm = 1; alpha is 1 / (1 - share of samples without gradient). verl's
        `compute_gpg_outcome_advantage` counts rewards that are not 0 instead of samples with a gradient.

    >>> gpg(torch.tensor([[3.0, 1.0], [8.0, 8.0]])).tolist()
    [[2.0, -2.0], [0.0, 0.0]]
    """
    centred, sizes = _centre(rewards, group_sizes)
    counting = int(sizes[_group_sums(centred.abs(), sizes) > 0].sum())
    return (centred * (len(centred) / max(counting, 1))).to(rewards.dtype).view_as(rewards)


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
    _check_finite(flat)
    # Subtracting a group's first reward before its mean makes equal rewards exact zeros, which a rounded mean does not.
    first = flat[sizes.cumsum(0) - sizes]
    shifted = flat - _spread(first, sizes)
    return shifted - _spread(_group_sums(shifted, sizes) / sizes, sizes), sizes


def _check_finite(rewards: Tensor) -> None:
    bad = torch.nonzero(~rewards.isfinite())
    if len(bad):
        raise RewardError(
            f"reward {int(bad[0])} of {len(rewards)} is {float(rewards[bad[0]])}; rewards must be finite",
            now="Have the reward return a finite number, or raise an error to leave the sample out.",
        )


def _group_sums(values: Tensor, sizes: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=sizes) if len(values) else values.new_zeros(len(sizes))


def _spread(per_group: Tensor, sizes: Tensor) -> Tensor:
    return per_group.repeat_interleave(sizes)


# ---- by name


OF_GROUPS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {function.__name__: function for function in (grpo, grpo_population, dr_grpo, rloo, maxrl, opo, pass_at_k)}
)
"""What looks at one group at a time; `m2flow.recipe.GroupAdvantage` lists the names for flows, which load no torch."""

OF_BATCHES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {function.__name__: function for function in (reinforce_pp, reinforce_pp_baseline, gpg)}
)
"""What needs the whole batch; `m2flow.recipe.BatchAdvantage` lists the names."""


def on_arrays(
    name: str,
    rewards: npt.NDArray[np.floating],
    bounds: Sequence[tuple[int, int]],
    *,
    lengths: npt.NDArray[np.int64] | None = None,
    **options: float,
) -> npt.NDArray[np.float32]:
    """Compute advantages by a function's name on the columns of a batch.

    Args:
        rewards: [N]. bounds: `Batch.group_bounds()`. lengths: generated tokens of each sample, for `opo`.
    Returns:
        float32 [N].
    Raises:
        RewardError: no float32 holds an advantage. What the function raises.
    """
    function = OF_GROUPS.get(name) or OF_BATCHES[name]
    given: dict[str, object] = dict(options)
    if name == opo.__name__:
        assert lengths is not None
        given["lengths"] = torch.from_numpy(np.ascontiguousarray(lengths))
    sizes = [end - start for start, end in bounds]
    return _in_float32(
        function(torch.from_numpy(np.ascontiguousarray(rewards, np.float64)), sizes, **given).numpy(), np.arange(len(rewards))
    )


def of_turns(rewards: npt.NDArray[np.floating], samples: Batch, **options: float) -> Ragged:
    """Compute `gigpo` of samples in turns: what the model generated is a turn, and the state before it what came since the last one.

    Args:
        rewards: [N]. samples: with `tokens`, `segment_kinds` and `segment_lengths`.
    Returns:
        float32, ragged over all tokens: those of a turn have its advantage, all others 0.
    Raises:
        As `on_arrays`.
    """
    tokens, kinds, lengths = (samples.ragged(name) for name in ("tokens", "segment_kinds", "segment_lengths"))
    states: list[list[bytes]] = []
    spans: list[tuple[int, int, int]] = []
    for row, base in enumerate(tokens.offsets[:-1].tolist()):
        ends = base + np.cumsum(lengths.row(row))
        begins, states_of = base, list[bytes]()
        for kind, start, end in zip(kinds.row(row).tolist(), (ends - lengths.row(row)).tolist(), ends.tolist(), strict=True):
            if kind == Segment.GENERATED and end > start:
                states_of.append(tokens.values[begins:start].tobytes())
                spans.append((row, start, end))
                begins = end
        states.append(states_of)
    sizes = [end - start for start, end in samples.group_bounds()]
    found = gigpo(torch.from_numpy(np.ascontiguousarray(rewards, np.float64)), sizes, states=states, **options)
    wide, values = torch.cat(found).numpy(), np.zeros(len(tokens.values), np.float32)
    for (_, start, end), advantage in zip(spans, _in_float32(wide, np.array([row for row, _, _ in spans])), strict=True):
        values[start:end] = advantage
    return Ragged(values, tokens.offsets)


def of_conversations(name: str, rewards: npt.NDArray[np.floating], samples: Batch, **options: float) -> Ragged:
    """Compute advantages of the conversations of episodes: those of one group that go by the same name are compared by `name`.

    Args:
        name: of a function of `OF_GROUPS`. rewards: [N], for episodes whose agent returned one number. samples: with `episode`.
    Returns:
        float32, ragged over all tokens: those that the model said have their conversation's advantage, all others 0.
    Raises:
        OpError: the rewards are not those that the agents returned. As `on_arrays`.
    """
    tokens, mask = samples.ragged("tokens"), samples.ragged("loss_mask").values.astype(bool)
    found = sequences_of(samples)
    offsets, row_of = found if found is not None else (tokens.offsets, np.arange(len(samples)))
    goes_by, reward_of = _named(rewards, samples, row_of)
    trained = np.diff(np.concatenate(([0], np.cumsum(mask)))[offsets])
    compared: list[tuple[int, str]] = []
    bounds: list[tuple[int, int]] = []
    for start, end in samples.group_bounds():
        of_group = [(row, key) for row in range(start, end) for key in reward_of[row]]
        for key in sorted({key for _, key in of_group}):
            bounds.append((len(compared), len(compared) + sum(other == key for _, other in of_group)))
            compared += [one for one in of_group if one[1] == key]
    place = {one: at for at, one in enumerate(compared)}
    place_of = np.array([place[row, key] for row, key in zip(row_of.tolist(), goes_by, strict=True)], np.int64)
    lengths = np.bincount(place_of, trained, len(compared)).astype(np.int64)
    given = np.array([reward_of[row][key] for row, key in compared], np.float64)
    advantages = on_arrays(name, given, bounds, lengths=lengths, **options)[place_of]
    return Ragged(np.where(mask, np.repeat(advantages, np.diff(offsets)), np.float32(0)), tokens.offsets)


def _named(rewards: npt.NDArray[np.floating], samples: Batch, row_of: IdArray) -> tuple[list[str], list[dict[str, float]]]:
    """What each sequence goes by, and of each row the reward of what its sequences go by."""
    goes_by: list[str] = []
    of_rows: list[dict[str, float]] = []
    counts = np.bincount(row_of, minlength=len(samples)).tolist()
    for row, record in enumerate(records_of(samples)):
        of_row = record.get("conversations") or [{"name": MAIN, "parent": ""}] * counts[row]
        parents = {one["name"]: one["parent"] for one in of_row if one["parent"]}
        own: dict[str, float] = {}
        for one in of_row:
            name = one["name"]
            if name in record.get("rewarded", {}):
                key = record["rewarded"][name]
                own[key] = float(record["rewards"][key])
            else:
                key = _root(name, parents)
                own[key] = float(rewards[row])
            goes_by.append(key)
        used = [float(record["rewards"][key]) for key in sorted(set(record.get("rewarded", {}).values()))]
        if used and float(rewards[row]) != sum(used) / len(used):
            raise OpError(
                f"sample {SampleId.unpack(int(samples.ids[row]))} got the reward {rewards[row]}, and its conversations have others",
                now="by_conversation() goes by what the agent returned: pass episodes.reward as it is.",
            ).about(int(samples.ids[row]))
        of_rows.append(own)
    return goes_by, of_rows


def _root(name: str, parents: Mapping[str, str]) -> str:
    while name in parents:
        name = parents[name]
    return name


def _in_float32(wide: npt.NDArray[np.float64], sample: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    beyond = np.flatnonzero(~(np.abs(wide) <= np.finfo(np.float32).max))
    if len(beyond):
        at = beyond[0]
        raise RewardError(
            f"the advantage of sample {sample[at]} of {sample[-1] + 1} is {wide[at]:.3g}, which no float32 holds",
            now="Scale the rewards down.",
        )
    return np.asarray(wide, np.float32)


def of_batch(rows: Batch, whole: Mapping[str, object], *, name: str) -> npt.NDArray[np.float32]:
    """Compute a column of advantages from the column `rewards` of a whole batch, in the order of identity."""
    check_one_reward(rows, name)
    return on_arrays(name, np.asarray(rows["rewards"], np.float64), rows.group_bounds())
