"""Losses and KL estimates as per-token terms; the train engine sums them and divides by the mini-batch's denominator once, at its end.

    logprobs [T], advantages [T], ... --> terms [T], {metric: [T]}

Every loss follows `m2flow.recipe.Loss`: flat tensors over the tokens that the loss mask selects, passed by keyword. Terms are to be
minimised. No function here averages over samples: sums are divided by the recipe's `denominator`. Given `sequence_lengths` (float [T],
masked tokens of the sample that a token belongs to), each term is divided by its own, so that the terms of a sample add up to its mean
and samples weigh the same however long they are (denominator `sequences`). A loss looks at nothing beyond a sample, or beyond a group if
it takes `group_ids` (groups are kept whole then), so its sums and its gradient depend neither on micro-batches, ranks and padding nor on
the order of samples.

To add a loss, write its function here or in `m2flow.algorithms.preferences`: `m2flow.macro.loss_declarations` finds it, and makes the
word of the flow from its signature. A parameter that is a `Tensor` is an input, one that is a `Tensor | None` is an input where an option
or the aggregation asks for it, and any other is an option, with its bounds in its annotation. A loss that requires `sequence_lengths` is
a mean over sequences unless told otherwise; one that requires `group_ids` is a mean over groups: its terms are divided by the tokens of
their group. A flow's own loss is the same function under `@m2flow.loss(needs=[...])`. The module loads no torch.

KL estimates, with r = log p_ref(x) - log p(x) for a token x drawn from the policy p:

    k1 = -r              unbiased, high variance, may be negative
    k2 = r^2 / 2         biased, low variance, never negative
    k3 = exp(r) - 1 - r  unbiased, low variance, never negative; r is taken as 20 where it is above

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. The properties are those of the
*values*. As losses they differ: the expected gradient of k2 is that of KL, the expected gradient of k1 is zero, and k3's is the
gradient of the reverse divergence KL(reference || policy) (Liu et al. 2025, arXiv:2510.01555). Used on tokens that older weights drew, all
three are biased further. `top_k` is no estimate of one token but a sum over tokens (`top_k_divergence`): its gradient is that of its
value, state by state, whoever drew the tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from m2flow.errors import OptionError, ShapeError, did_you_mean
from m2flow.recipe import Correction, KlEstimator, KlPenalty

if TYPE_CHECKING:
    from torch import Tensor

Share = float
"""An option from 0 to 1."""
Half = float
"""An option from 0 to 0.5."""
NotNegative = float
"""An option of 0 or more."""
Positive = float
"""An option above 0."""
Divergence = Literal["tv", "kl"]
Proximal = Literal["computed", "interpolated"]
Direction = Literal["reverse", "forward", "js"]
"""Divergence of a policy p from a teacher q: KL(p || q), KL(q || p), or Jensen-Shannon, the mean of both to (p + q) / 2."""

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
        OptionError: an estimator that is not k1, k2 or k3. ShapeError: the two differ in shape.

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


def top_k_divergence(top_logprobs: Tensor, reference_top_logprobs: Tensor, direction: Direction = "reverse") -> Tensor:
    """The divergence of two next-token distributions over K tokens and one bucket of all others, differentiable in both arguments.

        reverse  sum over the K + 1 of p (log p - log q)        p = exp(top_logprobs), q = exp(reference_top_logprobs)
        forward  sum of q (log q - log p)
        js       half the sum of p (log p - log m) + q (log q - log m), m = (p + q) / 2

    Merging tokens into one can only lower a divergence (data processing), so it is at most that of the whole distributions, and that itself
    with K one less than the vocabulary. Scaling the K to a sum of 1 instead would leave the others without gradient, however likely.

    Args:
        top_logprobs, reference_top_logprobs: float [T, K + 1], natural logarithms, of K tokens, the same in both, and of all others.
    Returns:
        float [T], in nats.
    Raises:
        ShapeError: the two differ in shape. OptionError: a direction that is none.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, for the directions. Why the others count: Anshumann et al. 2025, arXiv:2503.16870.

    >>> import torch
    >>> policy, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    >>> [round(top_k_divergence(policy, teacher, direction).item(), 4) for direction in ("reverse", "forward", "js")]
    [0.1438, 0.1308, 0.0338]
    """
    check_shapes(top_logprobs=top_logprobs, reference_top_logprobs=reference_top_logprobs)
    p, q = top_logprobs, reference_top_logprobs
    if direction == "reverse":
        return _kl(p, q)
    if direction == "forward":
        return _kl(q, p)
    if direction != "js":
        raise OptionError(f"there is no direction {direction!r}", now=did_you_mean(str(direction), get_args(Direction)))
    middle = p.logaddexp(q) - math.log(2)
    return 0.5 * (_kl(p, middle) + _kl(q, middle))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


# Shapes: T tokens under the loss mask, samples one after the other.

Terms = tuple["Tensor", dict[str, "Tensor"]]


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
    kl: KlPenalty = "k3",
    top_logprobs: Tensor | None = None,
    reference_top_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """The clipped surrogate of PPO, per token, with an optional penalty for leaving a reference and a bonus for entropy.

        rho     = exp(clip(logprobs - behaviour_logprobs, -20, 20))
        term    = -min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)
        if A < 0 and dual_clip > 0:  term = min(term, -dual_clip * A)
        term    = term + kl_coef * KL(logprobs, reference_logprobs) - entropy_coef * entropy

    Args:
        logprobs: float [T], with gradient. behaviour_logprobs: float [T], of the weights that sampled the tokens.
        advantages: float [T]. reference_logprobs: float [T], needed if `kl_coef` is not 0.
        eps_low, eps_high: how far the ratio may fall and rise before its gradient stops; dimensionless.
        dual_clip: bound on the ratio where the advantage is negative; 0 is off, else above 1.
        kl_coef: weight of the penalty, in units of advantage a nat.
        top_logprobs, reference_top_logprobs: float [T, K + 1], for `kl="top_k"`, as of `top_k_divergence`.
        entropy: float [T], of the next token's distribution, with gradient; needed if `entropy_coef` is not 0.
        entropy_coef: weight of the bonus, in units of advantage a nat.
    Returns:
        Terms [T], and `ratio`, `clipped` (1 where clipping stops the gradient), and `kl` if there is a reference.
    Raises:
        ShapeError: the tensors differ in shape. OptionError: an option out of range, or a penalty without a reference.
    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; eps_high apart from eps_low: Yu et al. 2025 (DAPO), arXiv:2503.14476,
        eq. 10; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; the penalty inside the loss: Shao et al. 2024, arXiv:2402.03300; the
        clamped log-ratio: `m2flow.algorithms.losses.MOST_LOG_RATIO`.

    >>> import torch
    >>> old = torch.zeros(2)
    >>> terms, metrics = ppo_clip(logprobs=torch.tensor([1.5, 1.0]).log(), behaviour_logprobs=old, advantages=torch.ones(2))
    >>> [round(term, 4) for term in terms.tolist()], metrics["clipped"].tolist()
    ([-1.2, -1.0], [1.0, 0.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    if not (0 <= eps_low <= 1 and eps_high >= 0):
        raise OptionError(f"eps_low is {eps_low} and eps_high {eps_high}; they must lie in 0..1 and 0..")
    if dual_clip and not dual_clip > 1:
        raise OptionError(f"dual_clip is {dual_clip}; it must be 0 (off) or above 1")
    ratio = _ratio(logprobs, behaviour_logprobs)
    terms, clipped = _clipped_surrogate(ratio, advantages, eps_low, eps_high)
    if dual_clip:
        bounded = (advantages < 0) & (ratio > dual_clip)
        terms = terms.where(~bounded, -dual_clip * advantages)
        clipped = clipped | bounded
    metrics = {"ratio": ratio.detach(), "clipped": clipped.to(terms.dtype)}
    divergence = None
    if kl == "top_k" and top_logprobs is not None and reference_top_logprobs is not None:
        divergence = top_k_divergence(top_logprobs, reference_top_logprobs)
    elif kl != "top_k" and reference_logprobs is not None:
        divergence = kl_estimate(logprobs, reference_logprobs, kl)
    if divergence is not None:
        metrics["kl"] = divergence.detach()
        terms = terms + kl_coef * divergence if kl_coef else terms
    elif kl_coef:
        raise OptionError(f"kl_coef is {kl_coef}, but there are no reference_logprobs", now="Pass reference=... to the update.")
    if entropy_coef:
        if entropy is None:
            raise OptionError(f"entropy_coef is {entropy_coef}, but there is no entropy", now="Pass entropy=, or leave entropy_coef at 0.")
        terms = terms - entropy_coef * entropy
    return per_sequence(terms, sequence_lengths), metrics


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

    >>> import torch
    >>> reinforce(logprobs=torch.tensor([-0.5]), advantages=torch.tensor([2.0]))[0].tolist()
    [1.0]
    """
    check_shapes(logprobs=logprobs, advantages=advantages)
    return per_sequence(-advantages * logprobs, sequence_lengths), {}


def distill(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    teacher_logprobs: Tensor,
    direction: Direction = "reverse",
    clip: float = 0.0,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """The divergence of the policy from a teacher, estimated on the tokens that the policy sampled.

        rho  = exp(clip(logprobs - behaviour_logprobs, -20, 20))
        r    = exp(clip(teacher_logprobs - logprobs, -20, 20))
        D    = logprobs - teacher_logprobs                     reverse; all without gradient
               -r                                              forward
               -log((1 + r) / 2) / 2                           js
        term = rho * D, and with clip > 0: max(rho * D, clip(rho, 1 - clip, 1 + clip) * D)

    Where the weights are those that sampled, the expected gradient is that of the divergence of the next token, state by state: -D is
    an advantage of the token itself, without credit for what follows. (Of a divergence E[f(r)], D is f(r) - r f'(r), less a constant.) The
    variance of `forward` has no bound where the teacher likes what the policy rarely says: `distill_top_k` sums over tokens instead.

    Args:
        logprobs: float [T], with gradient. behaviour_logprobs, teacher_logprobs: float [T], of the same tokens.
        clip: how far the ratio may go before its gradient stops; 0 is off.
    Returns:
        Terms [T], in nats, and `teacher_kl`, the D of `reverse`, whose mean estimates KL(policy || teacher).
    Raises:
        ShapeError: the tensors differ in shape. OptionError: a negative clip.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, with on-policy data alone, here estimated on the sampled token; Gu et al. 2024
        (MiniLLM), arXiv:2306.08543, section 2.2, the single-step part of the gradient.

    >>> import torch
    >>> terms, metrics = distill(
    ...     logprobs=torch.tensor([-1.0]), behaviour_logprobs=torch.tensor([-1.0]), teacher_logprobs=torch.tensor([-3.0])
    ... )
    >>> terms.tolist(), metrics["teacher_kl"].tolist()
    ([2.0], [2.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, teacher_logprobs=teacher_logprobs)
    if clip < 0:
        raise OptionError(f"clip is {clip}; it must be 0 (off) or more")
    ratio = _ratio(logprobs, behaviour_logprobs)
    reverse = (logprobs - teacher_logprobs).detach()
    preferred = _exp(-reverse)
    divergence = {"reverse": reverse, "forward": -preferred, "js": -0.5 * ((1 + preferred) / 2).log()}[direction]
    terms = ratio * divergence
    if clip:
        terms = terms.maximum(ratio.clamp(1 - clip, 1 + clip) * divergence)
    return per_sequence(terms, sequence_lengths), {"teacher_kl": reverse}


def distill_top_k(
    *, top_logprobs: Tensor, reference_top_logprobs: Tensor, direction: Direction = "reverse", sequence_lengths: Tensor | None = None
) -> Terms:
    """The divergence of the policy from a teacher over the teacher's K likeliest next tokens and the rest: `top_k_divergence`.

    Its gradient is exact in each state, and nothing is said of the states: the tokens may be the policy's, the teacher's or a dataset's.

    Args:
        top_logprobs, reference_top_logprobs: float [T, K + 1], the policy's, with gradient, and the teacher's.
        direction: of the divergence.
    Returns:
        Terms [T], in nats, and `teacher_kl`, the same without gradient.
    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 2 and 3, over K tokens and their rest.

    >>> import torch
    >>> policy, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    >>> round(distill_top_k(top_logprobs=policy, reference_top_logprobs=teacher)[0].item(), 4)
    0.1438
    """
    terms = top_k_divergence(top_logprobs, reference_top_logprobs, direction)
    return per_sequence(terms, sequence_lengths), {"teacher_kl": terms.detach()}


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

    >>> import torch
    >>> terms, metrics = clipped_value(
    ...     values=torch.tensor([1.0, 1.0]), returns=torch.tensor([1.0, 3.0]), old_values=torch.tensor([0.0, 0.9]), clip=0.2
    ... )
    >>> [round(term, 4) for term in terms.tolist()], metrics["value_clipped"].tolist()
    ([0.32, 2.0], [1.0, 0.0])
    """
    check_shapes(values=values, returns=returns)
    error = (values - returns).square()
    metrics = {"value": values.detach(), "value_error": error.detach()}
    if clip < 0 or (clip and old_values is None):
        raise OptionError(f"clip is {clip}; it must be 0 (off), or positive with old_values")
    if clip and old_values is not None:
        check_shapes(values=values, old_values=old_values)
        near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        metrics["value_clipped"] = (near > error).to(error.dtype)
        error = error.maximum(near)
    return per_sequence(0.5 * error, sequence_lengths), metrics


def nll(*, logprobs: Tensor, sequence_lengths: Tensor | None = None) -> Terms:
    """Negative log-likelihood: supervised learning on the masked tokens.

        term = -logprobs

    Args:
        logprobs: float [T], with gradient.
    Returns:
        Terms [T], in nats, and no metrics.

    >>> import torch
    >>> nll(logprobs=torch.tensor([-0.75]))[0].tolist()
    [0.75]
    """
    return per_sequence(-logprobs, sequence_lengths), {}


# ---- helpers for losses that look at whole samples


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """For each token, the sum over all tokens of its sample; differentiable.

    Args:
        values: float [T]. sequence_ids: int64 [T], a number for each sample, from 0; `@loss(needs=[..., "sequence_ids"])` has them.
    Returns:
        float [T].

    >>> import torch
    >>> sequence_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 3.0, 5.0]
    """
    if values.shape != sequence_ids.shape:
        raise ShapeError(f"values are {list(values.shape)}, sequence_ids {list(sequence_ids.shape)}")
    num = int(sequence_ids.max()) + 1 if len(sequence_ids) else 0
    return values.new_zeros(num).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """For each token, the mean over all tokens of its sample under the loss mask; as `sequence_sum`.

    >>> import torch
    >>> sequence_mean(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
    [1.5, 1.5, 5.0]
    """
    return sequence_sum(values, sequence_ids) / sequence_sum(values.detach().new_ones(values.shape), sequence_ids)


# ---- weights for samples that another policy drew
#
# A rollout engine computes other probabilities than the trainer does for the same weights: other kernels, other dtypes, other experts. With
# the trainer's own log-probabilities of the samples before the update (the proximal policy), the ratio to those of the rollout is the
# importance weight of a sample's tokens; bounded, it is multiplied on the terms of any loss.


def correction_weights(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, sequence_ids: Tensor, correction: Correction, version_ages: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights of tokens, without gradient, and how far the two policies are apart.

        d = proximal_logprobs - rollout_logprobs
        r = exp(d)                                    level token
            exp(sum of d over the sample)             level sequence
            exp(mean of d over the sample)            level geometric
        w = clip(r, lower, upper)                     mode truncate
            r within the bounds, else 0               mode mask
            0 for a sample with a token whose exp(d) is below veto

    Log-ratios are taken as -20 or 20 beyond those, and ages below 0 as 0. A sample has the bounds of its oldest token.

    Args:
        proximal_logprobs, rollout_logprobs: float [T]. sequence_ids: int64 [T], a sample's number, from 0. version_ages: [T], or None.
    Returns:
        float [T], and as float [T] `correction_weight` and its square, `correction_clipped` (1 where a bound or the veto changed it),
        with a veto `correction_vetoed` (1 where that is why), and of tokens, whatever the level: `rollout_kl` (an estimate of
        KL(rollout || proximal), k3), `proximal_kl` (of the other direction) and `chi_square`: their means over tokens estimate these.
    Raises:
        ShapeError: the tensors differ in shape, or bounds by age have no `version_ages`.
    Source:
        Truncated: Ionides 2008, "Truncated importance sampling"; on the tokens of language models: Yao et al. 2025,
        https://fengyao.notion.site/off-policy-rl. Masked: Ling team 2025 (IcePop), arXiv:2510.18855. The veto: verl.

    >>> import torch
    >>> new, old, ids = torch.tensor([0.8, 0.1]).log(), torch.tensor([0.2, 0.2]).log(), torch.tensor([0, 0])
    >>> [round(w, 4) for w in correction_weights(new, old, ids, Correction(upper=2.0))[0].tolist()]
    [2.0, 0.5]
    >>> [round(w, 4) for w in correction_weights(new, old, ids, Correction(level="geometric", upper=2.0))[0].tolist()]
    [1.4142, 1.4142]
    """
    if not proximal_logprobs.shape == rollout_logprobs.shape == sequence_ids.shape:
        shapes = [list(one.shape) for one in (proximal_logprobs, rollout_logprobs, sequence_ids)]
        raise ShapeError(f"proximal_logprobs, rollout_logprobs and sequence_ids are {shapes}")
    difference = (proximal_logprobs - rollout_logprobs).detach()
    of_level = {"token": lambda: difference, "sequence": lambda: sequence_sum(difference, sequence_ids)}
    log_ratio = of_level.get(correction.level, lambda: sequence_mean(difference, sequence_ids))()
    ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    lower, upper = _bounds_of_tokens(ratio, sequence_ids, correction, version_ages)
    is_outside = (ratio < lower) | (ratio > upper)
    weights = ratio.masked_fill(is_outside, 0.0) if correction.mode == "mask" else ratio.clamp(lower, upper)
    limited = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    of_token = limited.exp()
    vetoed = sequence_sum((of_token < correction.veto).to(ratio.dtype), sequence_ids) > 0 if correction.veto else None
    if vetoed is not None:
        weights, is_outside = weights.masked_fill(vetoed, 0.0), is_outside | vetoed
    return weights, {
        "correction_weight": weights,
        "correction_weight_square": weights.square(),
        "correction_clipped": is_outside.to(ratio.dtype),
        **({} if vetoed is None else {"correction_vetoed": vetoed.to(ratio.dtype)}),
        "rollout_kl": limited.expm1() - limited,
        "proximal_kl": of_token * limited - limited.expm1(),
        "chi_square": limited.expm1().square(),
    }


def _bounds_of_tokens(like: Tensor, sequence_ids: Tensor, correction: Correction, ages: Tensor | None) -> tuple[Any, Any]:
    """A correction's lower and upper bound: numbers for all tokens, or of each token, [T] in the dtype of `like`."""
    if len(correction.bounds) == 1:
        return correction.bounds[0]
    if ages is None or ages.shape != like.shape:
        raise ShapeError(f"bounds by version age need version_ages {list(like.shape)}, got {ages if ages is None else list(ages.shape)}")
    lower, upper = like.new_tensor(correction.bounds).T
    rows = ages.long().clamp(0, len(lower) - 1)
    if correction.level != "token" and len(rows):
        rows = rows.new_zeros(int(sequence_ids.max()) + 1).scatter_reduce(0, sequence_ids, rows, "amax")[sequence_ids]
    return lower[rows], upper[rows]


# ---- further losses of a policy


def gspo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    eps_low: Share = 3e-4,
    eps_high: NotNegative = 4e-4,
) -> Terms:
    """GSPO: PPO's clipped surrogate with one ratio for a sample, the geometric mean of its tokens' ratios.

        s    = exp(mean over the sample of (logprobs - behaviour_logprobs))
        term = -min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)

    Args:
        As `ppo_clip`; advantages are one number a sample. sequence_ids: int64 [T]; sequence_lengths: float [T].
    Returns:
        Terms [T], and `ratio` (the s above) and `clipped`.
    Source:
        Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, eq. 5 to 7, whose experiments have these bounds.

    >>> import torch
    >>> terms, metrics = gspo(
    ...     logprobs=torch.tensor([2.0, 0.5]).log(), behaviour_logprobs=torch.zeros(2), advantages=torch.ones(2),
    ...     sequence_ids=torch.tensor([0, 0]), sequence_lengths=torch.tensor([2.0, 2.0]),
    ... )
    >>> terms.tolist(), metrics["ratio"].tolist()
    ([-0.5, -0.5], [1.0, 1.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _exp(sequence_mean(logprobs - behaviour_logprobs, sequence_ids))
    terms, clipped = _clipped_surrogate(ratio, advantages, eps_low, eps_high)
    return per_sequence(terms, sequence_lengths), {"ratio": ratio.detach(), "clipped": clipped.to(terms.dtype)}


def gspo_token(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    eps_low: Share = 3e-4,
    eps_high: NotNegative = 4e-4,
) -> Terms:
    """GSPO-token: the value of a sample's ratio as in `gspo`, and the gradient of each token by itself, for advantages of tokens.

        s[t] = s without gradient * exp(logprobs[t] - logprobs[t] without gradient)
        term = -min(s[t] * A[t], clip(s[t], 1 - eps_low, 1 + eps_high) * A[t])

    With one advantage for all tokens of a sample, terms and gradient are those of `gspo`.

    Args, Returns: as `gspo`; advantages may differ between a sample's tokens.
    Source:
        Zheng et al. 2025, arXiv:2507.18071, eq. 13 and 14.

    >>> import torch
    >>> logprobs = torch.zeros(2, requires_grad=True)
    >>> ids, lengths, advantages = torch.tensor([0, 0]), torch.full((2,), 2.0), torch.tensor([1.0, 3.0])
    >>> terms, _ = gspo_token(
    ...     logprobs=logprobs, behaviour_logprobs=torch.zeros(2), advantages=advantages, sequence_ids=ids, sequence_lengths=lengths
    ... )
    >>> torch.autograd.grad(terms.sum(), logprobs)[0].tolist()
    [-0.5, -1.5]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    of_sample = _exp(sequence_mean(logprobs - behaviour_logprobs, sequence_ids)).detach()
    ratio = of_sample * (logprobs - logprobs.detach()).exp()
    terms, clipped = _clipped_surrogate(ratio, advantages, eps_low, eps_high)
    return per_sequence(terms, sequence_lengths), {"ratio": of_sample, "clipped": clipped.to(terms.dtype)}


def gmpo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    log_eps_low: NotNegative = 0.4,
    log_eps_high: NotNegative = 0.4,
) -> Terms:
    """GMPO: the geometric mean over a sample of ratios that are clipped token by token.

        d[t] = logprobs - behaviour_logprobs, at most log_eps_high where A > 0 and at least -log_eps_low where A < 0
        term = -A exp(mean over the sample of d)

    Args:
        As `gspo`. log_eps_low, log_eps_high: how far a token's log-ratio may go before its gradient stops; nats.
    Returns:
        Terms [T], and `ratio` and `clipped` (1 for a token whose log-ratio was cut off).
    Source:
        Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673, which clips at exp(-0.4) and exp(0.4).

    >>> import torch
    >>> terms, metrics = gmpo(
    ...     logprobs=torch.tensor([1.0, 0.0]), behaviour_logprobs=torch.zeros(2), advantages=torch.ones(2),
    ...     sequence_ids=torch.tensor([0, 0]), sequence_lengths=torch.tensor([2.0, 2.0]),
    ... )
    >>> [round(ratio, 4) for ratio in metrics["ratio"].tolist()], metrics["clipped"].tolist()
    ([1.2214, 1.2214], [1.0, 0.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    log_ratio = logprobs - behaviour_logprobs
    clipped = ((advantages > 0) & (log_ratio > log_eps_high)) | ((advantages < 0) & (log_ratio < -log_eps_low))
    kept = log_ratio.where(~clipped, log_ratio.detach().clamp(-log_eps_low, log_eps_high))
    ratio = _exp(sequence_mean(kept, sequence_ids))
    return per_sequence(-advantages * ratio, sequence_lengths), {"ratio": ratio.detach(), "clipped": clipped.to(ratio.dtype)}


def cispo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    eps_low: Share = 1.0,
    eps_high: NotNegative = 0.28,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """CISPO: REINFORCE weighted by a clipped ratio, which itself has no gradient; so no token's gradient stops.

        term = -clip(rho, 1 - eps_low, 1 + eps_high) without gradient * A * logprobs

    Args:
        As `ppo_clip`. eps_low: 1 is no lower bound.
    Returns:
        Terms [T], and `ratio` (unclipped) and `clipped` (1 where the ratio is outside its bounds).
    Source:
        MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5, without a lower bound there; it does not state eps_high.

    >>> import torch
    >>> old, now = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -1.0])
    >>> terms, metrics = cispo(logprobs=now, behaviour_logprobs=old, advantages=torch.ones(2))
    >>> [round(term, 4) for term in terms.tolist()], metrics["clipped"].tolist()
    ([0.64, 1.0], [1.0, 0.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, behaviour_logprobs).detach()
    clipped = (ratio > 1 + eps_high) | (ratio < 1 - eps_low)
    terms = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages * logprobs
    return per_sequence(terms, sequence_lengths), {"ratio": ratio, "clipped": clipped.to(terms.dtype)}


def importance_reinforce(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    max_ratio: Positive = 2.0,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """REINFORCE weighted by the truncated ratio of the current weights to those that sampled the tokens.

        term = -min(rho, max_ratio) without gradient * A * logprobs

    Args:
        As `reinforce`. behaviour_logprobs: float [T]. max_ratio: bound on a token's weight; without truncation the policy gradient of
            the next token alone is unbiased, and its variance has no bound.
    Returns:
        Terms [T], and `ratio` (not truncated) and `clipped` (1 where it was).
    Source:
        Ionides 2008, "Truncated importance sampling", for the truncation; on tokens: Yao et al. 2025, "Your efficient RL framework
        secretly brings you off-policy RL training", https://fengyao.notion.site/off-policy-rl.

    >>> import torch
    >>> terms, _ = importance_reinforce(
    ...     logprobs=torch.tensor([-1.0]), behaviour_logprobs=torch.tensor([-3.0]), advantages=torch.tensor([1.0])
    ... )
    >>> terms.tolist()
    [2.0]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, behaviour_logprobs).detach()
    terms = -ratio.clamp(max=max_ratio) * advantages * logprobs
    return per_sequence(terms, sequence_lengths), {"ratio": ratio, "clipped": (ratio > max_ratio).to(terms.dtype)}


def sapo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    tau_positive: Positive = 1.0,
    tau_negative: Positive = 1.05,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """SAPO: a smooth gate on the ratio instead of a clip.

        gate = (4 / tau) sigmoid(tau (rho - 1))        tau: tau_positive where A > 0, else tau_negative
        term = -gate * A

    At rho = 1 the gate's slope is 1, so on policy the gradient is that of REINFORCE; it falls to 0 on both sides.

    Args:
        As `ppo_clip`. tau_positive, tau_negative: the larger, the narrower the gate.
    Returns:
        Terms [T], and `ratio`.
    Source:
        Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347.

    >>> import torch
    >>> sapo(logprobs=torch.zeros(1), behaviour_logprobs=torch.zeros(1), advantages=torch.ones(1))[0].tolist()
    [-2.0]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, behaviour_logprobs)
    tau = advantages.new_full(advantages.shape, tau_negative).masked_fill(advantages > 0, tau_positive)
    terms = -(tau * (ratio - 1)).sigmoid() * (4 / tau) * advantages
    return per_sequence(terms, sequence_lengths), {"ratio": ratio.detach()}


def topr(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """TOPR: likelihood for samples of positive advantage, REINFORCE tapered by the sample's ratio for the others.

        w    = 1 where A >= 0, else min(1, exp(sum over the sample of (logprobs - behaviour_logprobs)))        without gradient
        term = -w * A * logprobs

    Args:
        As `reinforce`. sequence_ids: int64 [T].
    Returns:
        Terms [T], and `weight` (the w above).
    Source:
        Le Roux et al. 2025, "Tapered off-policy REINFORCE", arXiv:2503.14286, with its canonical bounds: 1 and 1 for positive samples, 0
        and 1 for negative ones.

    >>> import torch
    >>> old, now = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5])
    >>> terms, metrics = topr(logprobs=now, behaviour_logprobs=old, advantages=-torch.ones(2), sequence_ids=torch.tensor([0, 0]))
    >>> [round(weight, 4) for weight in metrics["weight"].tolist()]
    [0.3679, 0.3679]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _exp(sequence_sum((logprobs - behaviour_logprobs).detach(), sequence_ids))
    weight = ratio.clamp(max=1.0).masked_fill(advantages >= 0, 1.0)
    return per_sequence(-weight * advantages * logprobs, sequence_lengths), {"weight": weight}


def dppo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    divergence: Divergence = "tv",
    most: NotNegative = 0.15,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """DPPO: the surrogate of PPO, whose gradient stops where the distributions have moved apart, not where the ratio has.

        p, q = exp(logprobs), exp(behaviour_logprobs)
        D    = |p - q|                                              tv, of the token against all others
               q log(q / p) + (1 - q) log((1 - q) / (1 - p))        kl, likewise
        term = -rho * A,  without gradient where D > most and the gradient would move p further from q

    A rare token may so change by a large factor, and a likely one may not by a small one.

    Args:
        As `ppo_clip`. most: bound on D; a probability for `tv`, nats for `kl`.
    Returns:
        Terms [T], and `ratio`, `divergence` (the D above) and `clipped`.
    Source:
        Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", arXiv:2602.04879, the binary approximations.

    >>> import torch
    >>> new, old = torch.tensor([0.9, 0.002]).log(), torch.tensor([0.6, 0.001]).log()
    >>> dppo(logprobs=new, behaviour_logprobs=old, advantages=torch.ones(2))[1]["clipped"].tolist()
    [1.0, 0.0]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, behaviour_logprobs)
    p, q = (of.detach().clamp(max=0.0).exp() for of in (logprobs, behaviour_logprobs))
    if divergence == "tv":
        apart = (p - q).abs()
    else:
        smallest = 1e-7  # Keeps the logarithm of a probability that is 0 or 1 finite.
        p, q = p.clamp(smallest, 1 - smallest), q.clamp(smallest, 1 - smallest)
        apart = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    is_leaving = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    clipped = is_leaving & (apart > most)
    terms = -ratio.where(~clipped, ratio.detach()) * advantages
    return per_sequence(terms, sequence_lengths), {"ratio": ratio.detach(), "divergence": apart, "clipped": clipped.to(terms.dtype)}


def decoupled_ppo(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor | None = None,
    version_ages: Tensor | None = None,
    advantages: Tensor,
    eps_low: Share = 0.2,
    eps_high: NotNegative = 0.2,
    max_weight: Positive = 5.0,
    proximal: Proximal = "computed",
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """Decoupled PPO: clip around a proximal policy, and weigh by how much likelier it was than the one that sampled.

        rho    = exp(logprobs - proximal_logprobs)
        weight = min(exp(proximal_logprobs - behaviour_logprobs), max_weight)        without gradient
        term   = -weight * min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)

    `interpolated` spares the pass: proximal_logprobs is behaviour_logprobs + d / (d + 1) * (logprobs - behaviour_logprobs), where the token
    was sampled by weights d versions older than those before the update; on fresh samples that is PPO.

    Args:
        As `ppo_clip`. proximal_logprobs: float [T], of the weights before the update, for `computed`:
            `columns={"proximal_logprobs": policy.logprobs(responses)}`. version_ages: [T], the d above, for `interpolated`.
        max_weight: bound on the weight.
    Returns:
        Terms [T], and `ratio` (the rho above), `weight` and `clipped`.
    Source:
        Hilton et al. 2022, arXiv:2110.00641, eq. 2; for language models: Fu et al. 2025 (AReaL), arXiv:2505.24298. The bound on the weight
        is AReaL's `behav_imp_weight_cap`, which masks tokens above it where this truncates; `interpolated` is its `loglinear`.

    >>> import torch
    >>> zero = torch.zeros(1)
    >>> terms, metrics = decoupled_ppo(
    ...     logprobs=zero, proximal_logprobs=zero, behaviour_logprobs=torch.tensor([0.5]).log(), advantages=torch.ones(1)
    ... )
    >>> terms.tolist(), metrics["weight"].tolist()
    ([-2.0], [2.0])
    """
    if proximal == "interpolated" and version_ages is not None:
        share = version_ages / (version_ages + 1)
        proximal_logprobs = (behaviour_logprobs + share * (logprobs - behaviour_logprobs)).detach()
    if proximal_logprobs is None:
        raise OptionError(f"proximal is {proximal!r}, and what it needs is not given", now="The loss's docstring names that.")
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, proximal_logprobs)
    weight = _ratio(proximal_logprobs, behaviour_logprobs).detach().clamp(max=max_weight)
    terms, clipped = _clipped_surrogate(ratio, advantages, eps_low, eps_high)
    metrics = {"ratio": ratio.detach(), "weight": weight, "clipped": clipped.to(terms.dtype)}
    return per_sequence(weight * terms, sequence_lengths), metrics


def opmd(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    tau: NotNegative = 1.0,
    sequence_lengths: Tensor | None = None,
) -> Terms:
    """Online policy mirror descent: REINFORCE, and the squared log-ratio of a sample as a penalty.

        d    = sum over the sample of (logprobs - behaviour_logprobs), taken as -20 or 20 beyond those
        term = -A * logprobs + tau / 2 * d^2 / (tokens of the sample)

    Args:
        As `reinforce`; advantages are rewards less their group's mean (`dr_grpo`). tau: weight of the penalty, units of advantage a nat^2.
    Returns:
        Terms [T], and `log_ratio` (the d above). A sample's terms add up to -A log p + tau / 2 d^2.
    Source:
        Kimi k1.5 technical report 2025, arXiv:2501.12599, eq. 3 and the gradient below it; the clamp is ours.

    >>> import torch
    >>> terms, _ = opmd(
    ...     logprobs=torch.tensor([-1.0, -2.0]), behaviour_logprobs=torch.tensor([-2.0, -3.0]), advantages=torch.ones(2),
    ...     sequence_ids=torch.tensor([0, 0]),
    ... )
    >>> terms.tolist()
    [2.0, 3.0]
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    drift = sequence_sum(logprobs - behaviour_logprobs, sequence_ids).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    counts = sequence_sum(logprobs.detach().new_ones(logprobs.shape), sequence_ids)
    terms = -advantages * logprobs + 0.5 * tau * drift.square() / counts
    return per_sequence(terms, sequence_lengths), {"log_ratio": drift.detach()}


# ---- losses that hold back the tokens which cost the policy most of its entropy


def clip_cov(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    random_numbers: Tensor,
    group_ids: Tensor,
    share: Share = 2e-4,
    cov_low: NotNegative = 1.0,
    cov_high: NotNegative = 5.0,
    eps_low: Share = 0.2,
    eps_high: NotNegative = 0.2,
) -> Terms:
    """Clip-Cov: PPO without the gradient of a few random tokens whose likelihood and advantage go together, to keep entropy.

        cov  = (logprobs - their mean over the group) (A - its mean over the group)
        term = -min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)
        term without gradient where cov_low < cov < cov_high, the clip does not act, and u < share * (tokens of the group) / (such tokens)

    The paper takes means over a mini-batch, and draws exactly `share` of its tokens. Here means are over the responses to one prompt, and
    each token has its own random number u: the number of tokens without gradient is `share` on average, and no cut, order or rank
    changes which they are. The loss is a mean over groups.

    Args:
        As `ppo_clip`. random_numbers: float [T], u. group_ids: int64 [T].
        share: of all tokens. cov_low, cov_high: in units of advantage times nats.
    Returns:
        Terms [T], and `clipped`, `stopped` (1 where the gradient is left out for its covariance) and `covariance`.
    Source:
        Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617, section 4.2.
        Tokens that PPO clips are not drawn, as in verl.

    >>> import torch
    >>> old, groups = torch.tensor([-0.5, -4.5]), torch.tensor([0, 0])
    >>> terms, metrics = clip_cov(
    ...     logprobs=old, behaviour_logprobs=old, advantages=torch.tensor([1.0, -1.0]), random_numbers=torch.tensor([0.4, 0.6]),
    ...     group_ids=groups, share=0.5,
    ... )
    >>> metrics["covariance"].tolist(), metrics["stopped"].tolist()
    ([2.0, 2.0], [1.0, 0.0])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, random_numbers=random_numbers)
    if cov_low > cov_high:
        raise OptionError(f"cov_low is {cov_low}, above cov_high ({cov_high}): no token lies between them", now="Lower cov_low.")
    covariance = _covariance(logprobs, advantages, group_ids)
    terms, clipped = _clipped_surrogate(_ratio(logprobs, behaviour_logprobs), advantages, eps_low, eps_high)
    may_stop = (covariance > cov_low) & (covariance < cov_high) & ~clipped
    num_such = sequence_sum(may_stop.to(terms.dtype), group_ids).clamp(min=1)
    num_tokens = sequence_sum(terms.detach().new_ones(terms.shape), group_ids)
    stopped = may_stop & (random_numbers < share * num_tokens / num_such)
    metrics = {"clipped": clipped.to(terms.dtype), "stopped": stopped.to(terms.dtype), "covariance": covariance}
    return terms.where(~stopped, terms.detach()), metrics


def kl_cov(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    share: Share = 2e-3,
    kl_coef: NotNegative = 1.0,
) -> Terms:
    """KL-Cov: the policy gradient, and a penalty for moving the tokens whose likelihood and advantage go together most, to keep entropy.

        cov  = (logprobs - their mean over the group) (A - its mean over the group)
        term = -rho * A,  + kl_coef |logprobs - behaviour_logprobs| for the tokens of the `share` of largest cov, where cov > 0

    The paper takes means over a mini-batch, and the largest of all its tokens. Here both are over the responses to one prompt, which no
    micro-batch divides, so no cut, order or rank changes which tokens they are: in each group `share` of its tokens rounded down, at
    least one, and all that are equal to the last of them. The loss is a mean over groups.

    Args:
        As `ppo_clip`. group_ids: int64 [T]. share: of the tokens of a group. kl_coef: in units of advantage a nat.
    Returns:
        Terms [T], and `held` (1 for a token with the penalty) and `covariance`.
    Source:
        Cui et al. 2025, arXiv:2505.22617, section 4.2, and its listing 1 for the penalty.

    >>> import torch
    >>> old, new = torch.tensor([-0.5, -1.0, -4.5]), torch.tensor([-0.5, -1.0, -4.5]) + 0.1
    >>> terms, metrics = kl_cov(
    ...     logprobs=new, behaviour_logprobs=old, advantages=torch.tensor([2.0, -1.0, -1.0]), group_ids=torch.tensor([0, 0, 0])
    ... )
    >>> metrics["held"].tolist(), [round(term, 4) for term in terms.tolist()]
    ([1.0, 0.0, 0.0], [-2.1103, 1.1052, 1.1052])
    """
    check_shapes(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, group_ids=group_ids)
    covariance = _covariance(logprobs, advantages, group_ids)
    counts = group_ids.bincount()
    falling = covariance.argsort(descending=True)
    falling = falling[group_ids[falling].argsort(stable=True)]
    last_held = (share * counts.double() + 1e-9).floor().long().clamp(min=1) - 1  # 1e-9: 0.29 * 100 is 28.999999999999996.
    bounds = covariance[falling][counts.cumsum(0) - counts + last_held]
    held = ((covariance >= bounds[group_ids]) & (covariance > 0)).to(logprobs.dtype)
    moved = (logprobs - behaviour_logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).abs()
    terms = -_ratio(logprobs, behaviour_logprobs) * advantages + kl_coef * held * moved
    return terms, {"held": held, "covariance": covariance}


def _covariance(logprobs: Tensor, advantages: Tensor, group_ids: Tensor) -> Tensor:
    """What each token adds to the covariance of log-probability and advantage over its group, without gradient."""
    logprobs = logprobs.detach()
    return (logprobs - sequence_mean(logprobs, group_ids)) * (advantages - sequence_mean(advantages, group_ids))


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """PPO's terms [T], and whether clipping stops the gradient of each."""
    terms = -(ratio * advantages).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return terms, ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """The importance ratio of the current to the sampling policy for each token, always finite."""
    return _exp(logprobs - behaviour_logprobs)


def per_sequence(terms: Tensor, sequence_lengths: Tensor | None) -> Tensor:
    """Divide each term by the length of its sample, if lengths are given."""
    return terms if sequence_lengths is None else terms / sequence_lengths


def check_shapes(**tensors: Tensor) -> None:
    """Check that per-token tensors have one shape. Raises `ShapeError`."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ShapeError("per-token tensors differ in shape: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
