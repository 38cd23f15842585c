"""Losses and KL estimates as per-token terms; the train engine sums them and divides by the mini-batch's denominator once, at its end.

    logprobs [T], advantages [T], ... --> terms [T], {metric: [T]}

Every loss follows `m2flow.recipe.Loss`: flat tensors over the tokens that the loss mask selects, passed by keyword. Terms are to be
minimised. No function here averages over samples: sums are divided by the recipe's `denominator`. Given `sequence_lengths` (float [T],
masked tokens of the sample that a token belongs to), each term is divided by its own, so that the terms of a sample add up to its mean
and samples weigh the same however long they are (denominator `sequences`).

KL estimates, with r = log p_ref(x) - log p(x) for a token x drawn from the policy p:

    k1 = -r              unbiased, high variance, may be negative
    k2 = r^2 / 2         biased, low variance, never negative
    k3 = exp(r) - 1 - r  unbiased, low variance, never negative; r is taken as 20 where it is above

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. The properties are those of the
*values*. As losses they differ: the expected gradient of k2 is that of KL, the expected gradient of k1 is zero, and k3's is the
gradient of the reverse divergence KL(reference || policy). Used on tokens that older weights drew, all three are biased further.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from m2flow.errors import OptionError, ShapeError, did_you_mean
from m2flow.recipe import KlEstimator

MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated, and have no gradient beyond: float32 has no exp(89), and the gradient of
what is not finite is NaN even where a clipped or zero factor should silence it.

Source: verl, `compute_policy_loss_vanilla` and `kl_penalty` in core_algos.py, which clamp to -20..20. TRL clamps none.
"""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Per-token KL estimates, differentiable in both arguments.

    Args:
        logprobs, reference_logprobs: float [T], natural logarithms, of the same tokens.
    Returns:
        float [T], in nats.
    Raises:
        OptionError: an estimator that is not k1, k2 or k3.
        ShapeError: the two differ in shape.

    >>> import torch
    >>> policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> [round(kl_estimate(policy, reference, k).item(), 4) for k in ("k1", "k2", "k3")]
    [0.6931, 0.2402, 0.1931]
    """
    if logprobs.shape != reference_logprobs.shape:
        raise ShapeError(f"logprobs are {list(logprobs.shape)}, reference_logprobs {list(reference_logprobs.shape)}")
    log_ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        # Downwards there is nothing to overflow, and the estimate stays exact.
        log_ratio = log_ratio.clamp(max=MOST_LOG_RATIO)
        # expm1 keeps small divergences, where exp(r) - 1 loses every digit.
        return log_ratio.expm1() - log_ratio
    raise OptionError(f"there is no KL estimator {estimator!r}", now=did_you_mean(str(estimator), get_args(KlEstimator)))


# Shapes: T tokens under the loss mask, samples one after the other.

Terms = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    reference_logprobs: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 0.0,
    kl_coef: float = 0.0,
    kl: KlEstimator = "k3",
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """The clipped surrogate of PPO, per token, with an optional penalty for leaving a reference.

        rho     = exp(clip(logprobs - behaviour_logprobs, -20, 20))
        term    = -min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)
        if A < 0 and dual_clip > 0:  term = min(term, -dual_clip * A)
        term    = term + kl_coef * KL(logprobs, reference_logprobs)

    Args:
        logprobs: float [T], with gradient. behaviour_logprobs: float [T], of the weights that sampled the tokens.
        advantages: float [T]. reference_logprobs: float [T], needed if `kl_coef` is not 0.
        eps_low, eps_high: how far the ratio may fall and rise before its gradient stops; dimensionless.
        dual_clip: bound on the ratio where the advantage is negative; 0 is off, else above 1.
        kl_coef: weight of the penalty, in units of advantage a nat.
    Returns:
        Terms [T], and `ratio`, `clipped` (1 where clipping stops the gradient), and `kl` if there is a reference.
    Raises:
        ShapeError: the tensors differ in shape. OptionError: an option out of range, or a penalty without a reference.
    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; eps_high apart from eps_low: Yu et al. 2025 (DAPO), arXiv:2503.14476,
        eq. 10; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; the penalty inside the loss: Shao et al. 2024, arXiv:2402.03300; the
        clamped log-ratio: `m2flow.algorithms.losses.MOST_LOG_RATIO`.

    >>> old = torch.zeros(2)
    >>> terms, metrics = ppo_clip(logprobs=torch.tensor([1.5, 1.0]).log(), behaviour_logprobs=old, advantages=torch.ones(2))
    >>> [round(term, 4) for term in terms.tolist()], metrics["clipped"].tolist()
    ([-1.2, -1.0], [1.0, 0.0])
    """
    _check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    if not (0 <= eps_low <= 1 and eps_high >= 0):
        raise OptionError(f"eps_low is {eps_low} and eps_high {eps_high}; they must lie in 0..1 and 0..")
    if dual_clip and not dual_clip > 1:
        raise OptionError(f"dual_clip is {dual_clip}; it must be 0 (off) or above 1")
    ratio = _ratio(logprobs, behaviour_logprobs)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
    if dual_clip:
        bounded = (advantages < 0) & (ratio > dual_clip)
        terms = torch.where(bounded, -dual_clip * advantages, terms)
        clipped = clipped | bounded
    metrics = {"ratio": ratio.detach(), "clipped": clipped.to(terms.dtype)}
    if reference_logprobs is not None:
        divergence = kl_estimate(logprobs, reference_logprobs, kl)
        metrics["kl"] = divergence.detach()
        if kl_coef:
            terms = terms + kl_coef * divergence
    elif kl_coef:
        raise OptionError(f"kl_coef is {kl_coef}, but there are no reference_logprobs", now="Pass reference=... to the update.")
    return _per_sequence(terms, sequence_lengths), metrics


def reinforce(*, logprobs: Tensor, advantages: Tensor, sequence_lengths: Tensor | None = None) -> Terms:
    """The policy gradient (REINFORCE) of tokens sampled by the current weights.

        term = -A * logprobs

    Args:
        logprobs: float [T], with gradient. advantages: float [T].
    Returns:
        Terms [T], no metrics.
    Raises:
        ShapeError: the tensors differ in shape.
    Source:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning". Off-policy
        (staleness above 0, or a second epoch) it is biased: use `ppo_clip`.

    >>> reinforce(logprobs=torch.tensor([-0.5]), advantages=torch.tensor([2.0]))[0].tolist()
    [1.0]
    """
    _check_shapes(logprobs=logprobs, advantages=advantages)
    return _per_sequence(-advantages * logprobs, sequence_lengths), {}


def distill(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    teacher_logprobs: Tensor,
    clip: float = 0.0,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """The reverse KL of the policy to a teacher, per token, on tokens that the policy sampled.

        rho  = exp(clip(logprobs - behaviour_logprobs, -20, 20))
        D    = logprobs - teacher_logprobs                     without gradient
        term = rho * D, and with clip > 0: max(rho * D, clip(rho, 1 - clip, 1 + clip) * D)

    Where the weights are those that sampled, the expected gradient is that of KL(policy || teacher) of the next token, state by
    state: -D is an advantage of the token itself, without credit for what follows.

    Args:
        logprobs: float [T], with gradient. behaviour_logprobs, teacher_logprobs: float [T], of the same tokens.
        clip: how far the ratio may go before its gradient stops; 0 is off.
    Returns:
        Terms [T], in nats, and `teacher_kl`, the D above, whose mean estimates the divergence.
    Raises:
        ShapeError: the tensors differ in shape. OptionError: a negative clip.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, with on-policy data alone and the reverse KL, here estimated on the sampled token
        and not summed over the vocabulary; Gu et al. 2024 (MiniLLM), arXiv:2306.08543, section 2.2, the single-step part of the gradient.

    >>> terms, metrics = distill(
    ...     logprobs=torch.tensor([-1.0]), behaviour_logprobs=torch.tensor([-1.0]), teacher_logprobs=torch.tensor([-3.0])
    ... )
    >>> terms.tolist(), metrics["teacher_kl"].tolist()
    ([2.0], [2.0])
    """
    _check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, teacher_logprobs=teacher_logprobs)
    if clip < 0:
        raise OptionError(f"clip is {clip}; it must be 0 (off) or more")
    ratio = _ratio(logprobs, behaviour_logprobs)
    divergence = (logprobs - teacher_logprobs).detach()
    terms = ratio * divergence
    if clip:
        terms = torch.maximum(terms, ratio.clamp(1 - clip, 1 + clip) * divergence)
    return _per_sequence(terms, sequence_lengths), {"teacher_kl": divergence}


def clipped_value(
    *, values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float = 0.0, sequence_lengths: Tensor | None = None
) -> Terms:
    """The squared error of a critic, per token, clipped around its value when the samples were made.

        near = old_values + clip(values - old_values, -clip, clip)
        term = max((values - returns)^2, (near - returns)^2) / 2        without clip: (values - returns)^2 / 2

    Args:
        values: float [T], with gradient. returns: float [T], what they should have been.
        old_values: float [T], needed if `clip` is not 0.
        clip: how far a value may move before its gradient stops; unit of the reward. 0 is off.
    Returns:
        Terms [T], in squared units of the reward, and `value` and `value_error` (the squared error, unclipped), and with a clip
        `value_clipped` (1 where it stops the gradient).
    Raises:
        ShapeError: the tensors differ in shape. OptionError: a negative clip, or a clip without old values.
    Source:
        Schulman et al. 2017 (PPO), arXiv:1707.06347, section 5, for the squared error; the clipping is that of its authors' code
        (OpenAI Baselines, ppo2), described by Engstrom et al. 2020, arXiv:2005.12729, section 3.

    >>> terms, metrics = clipped_value(
    ...     values=torch.tensor([1.0, 1.0]), returns=torch.tensor([1.0, 3.0]), old_values=torch.tensor([0.0, 0.9]), clip=0.2
    ... )
    >>> [round(term, 4) for term in terms.tolist()], metrics["value_clipped"].tolist()
    ([0.32, 2.0], [1.0, 0.0])
    """
    _check_shapes(values=values, returns=returns)
    error = (values - returns).square()
    metrics = {"value": values.detach(), "value_error": error.detach()}
    if clip < 0 or (clip and old_values is None):
        raise OptionError(f"clip is {clip}; it must be 0 (off), or positive with old_values")
    if clip and old_values is not None:
        _check_shapes(values=values, old_values=old_values)
        near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        metrics["value_clipped"] = (near > error).to(error.dtype)
        error = torch.maximum(error, near)
    return _per_sequence(0.5 * error, sequence_lengths), metrics


def nll(*, logprobs: Tensor, sequence_lengths: Tensor | None = None) -> Terms:
    """Negative log-likelihood: supervised learning on the masked tokens.

        term = -logprobs

    Args:
        logprobs: float [T], with gradient.
    Returns:
        Terms [T], in nats, and no metrics.

    >>> nll(logprobs=torch.tensor([-0.75]))[0].tolist()
    [0.75]
    """
    return _per_sequence(-logprobs, sequence_lengths), {}


def _ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """The importance ratio of the current to the sampling policy for each token, always finite."""
    return (logprobs - behaviour_logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _per_sequence(terms: Tensor, sequence_lengths: Tensor | None) -> Tensor:
    return terms if sequence_lengths is None else terms / sequence_lengths


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ShapeError("per-token tensors differ in shape: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
