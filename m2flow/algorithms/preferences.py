"""Losses on preferences: pairs of a chosen and a rejected answer to one prompt, answers that are judged alone, and rewards learned of them.

    logprobs or values [T], chosen [T], group_ids [T], ... --> terms [T], {metric: [T]}

What holds for all losses is at `m2flow.algorithms.losses`. A pair is a group of two samples and is never divided, so a loss on pairs
is a mean over groups: each token of a pair has the pair's term, and the terms are divided by the pair's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from m2flow.algorithms.losses import Half, NotNegative, Positive, Terms, check_shapes, per_sequence, sequence_sum
from m2flow.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

# Shapes: T tokens under the loss mask, samples one after the other.


def dpo(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    chosen: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor,
    beta: Positive = 0.1,
    label_smoothing: Half = 0.0,
) -> Terms:
    """DPO: the likelihood that the chosen answer of a pair is preferred, under the reward that the policy itself implies.

        h    = beta (sum over the chosen answer of d - sum over the rejected one of d),  d = logprobs - reference_logprobs
        term = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)        the same for each token of the pair

    Args:
        logprobs: float [T], with gradient. reference_logprobs: float [T], of the policy before it was trained: `update(reference=...)`.
        chosen: [T], 1 for the tokens of a chosen answer, 0 for those of a rejected one: a column of `Dataset.pairs()` and of
            `best_and_worst(responses, rewards)`. sequence_ids, group_ids: int64 [T].
        beta: how much a nat of log-ratio is worth in reward; the smaller, the further the policy may leave the reference.
        label_smoothing: the share of pairs whose labels are taken to be swapped (conservative DPO).
    Returns:
        Terms [T]; and `margin` (the h above) and `accuracy` (1 where it is above 0). The loss and its metrics are means over pairs.
    Raises:
        ShapeError: the tensors differ in shape, or a group is no pair of a chosen and a rejected answer.
    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing: Mitchell 2023, "A note on DPO with noisy preferences",
        https://ericmitchell.ai/cdpo.pdf.

    >>> import torch
    >>> terms, metrics = dpo(
    ...     logprobs=torch.tensor([-1.0, -4.0]), reference_logprobs=torch.tensor([-2.0, -3.0]), chosen=torch.tensor([1.0, 0.0]),
    ...     sequence_ids=torch.tensor([0, 1]), group_ids=torch.tensor([0, 0]), beta=0.5,
    ... )
    >>> [round(term, 4) for term in terms.tolist()], metrics["margin"].tolist()
    ([0.3133, 0.3133], [1.0, 1.0])
    """
    check_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs)
    margin = beta * _contrast(logprobs - reference_logprobs, chosen, sequence_ids, group_ids)
    terms = (1 - label_smoothing) * _softplus(-margin) + label_smoothing * _softplus(margin)
    return terms, _preference_metrics(margin)


def ipo(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    chosen: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor,
    beta: Positive = 0.1,
    average: bool = True,
) -> Terms:
    """IPO: the squared distance of a pair's log-ratios from 1 / (2 beta), which pairs that always agree do not drive to infinity.

        h    = mean over the chosen answer of d - mean over the rejected one of d,  d = logprobs - reference_logprobs
        term = (h - 1 / (2 beta))^2

    Args:
        As `dpo`. beta: the paper's tau. average: means over tokens as above, which TRL takes; else the sums that the paper writes.
    Returns:
        Terms [T], and `margin` (the h above) and `accuracy`, as `dpo`.
    Source:
        Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences", arXiv:2310.12036, eq. 17.

    >>> import torch
    >>> terms, _ = ipo(
    ...     logprobs=torch.tensor([-1.0, -4.0]), reference_logprobs=torch.tensor([-2.0, -3.0]), chosen=torch.tensor([1.0, 0.0]),
    ...     sequence_ids=torch.tensor([0, 1]), group_ids=torch.tensor([0, 0]), beta=0.5,
    ... )
    >>> terms.tolist()
    [1.0, 1.0]
    """
    check_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs)
    log_ratio = logprobs - reference_logprobs
    margin = _contrast(_per_token_of(log_ratio, sequence_ids) if average else log_ratio, chosen, sequence_ids, group_ids)
    return (margin - 1 / (2 * beta)).square(), _preference_metrics(margin)


def simpo(
    *,
    logprobs: Tensor,
    chosen: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor,
    beta: Positive = 2.0,
    gamma: NotNegative = 1.0,
) -> Terms:
    """SimPO: the likelihood of a preference by mean log-probabilities, which have to differ by a margin; there is no reference.

        h    = beta (mean over the chosen answer of logprobs - mean over the rejected one of logprobs)
        term = -log sigmoid(h - gamma)

    Args:
        As `dpo`. beta: reward of a nat a token. gamma: the margin, in units of reward.
    Returns:
        Terms [T], and `margin` (the h above) and `accuracy`, as `dpo`.
    Source:
        Meng et al. 2024, arXiv:2405.14734, eq. 6; it takes beta from 2 to 10 and gamma from 0.3 to 1.6 or so.

    >>> import torch
    >>> terms, metrics = simpo(
    ...     logprobs=torch.tensor([-1.0, -1.0, -2.0]), chosen=torch.tensor([1.0, 1.0, 0.0]),
    ...     sequence_ids=torch.tensor([0, 0, 1]), group_ids=torch.tensor([0, 0, 0]),
    ... )
    >>> [round(term, 4) for term in terms.tolist()], metrics["margin"].tolist()
    ([0.3133, 0.3133, 0.3133], [2.0, 2.0, 2.0])
    """
    margin = beta * _contrast(_per_token_of(logprobs, sequence_ids), chosen, sequence_ids, group_ids)
    return _softplus(gamma - margin), _preference_metrics(margin)


def kto(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    chosen: Tensor,
    baseline: Tensor,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    beta: Positive = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Terms:
    """KTO: raise answers that are desirable and lower the others, each judged alone against how far the policy is from the reference.

        r    = sum over the sample of (logprobs - reference_logprobs);  z = max(baseline, 0)
        term = desirable_weight (1 - sigmoid(beta (r - z)))      where chosen
               undesirable_weight (1 - sigmoid(beta (z - r)))    elsewhere

    Args:
        logprobs, reference_logprobs: as `dpo`. chosen: [T], 1 for a desirable answer, 0 for another; answers need not come in pairs.
        baseline: float [T], an estimate of KL(policy || reference) in nats, without gradient: one number for all samples, which the flow
            computes before the update, so that no micro-batch has one of its own (TRL estimates it anew in each, from answers to other
            prompts). Of responses that the policy has just generated it is the mean of r itself.
        desirable_weight, undesirable_weight: the paper's lambdas, which balance the two kinds.
    Returns:
        Terms [T], and `implied_reward` (beta r).
    Source:
        Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.

    >>> import torch
    >>> terms, _ = kto(
    ...     logprobs=torch.tensor([-1.0, -1.0]), reference_logprobs=torch.tensor([-1.0, -1.0]), chosen=torch.tensor([1.0, 0.0]),
    ...     baseline=torch.zeros(2), sequence_ids=torch.tensor([0, 1]), sequence_lengths=torch.ones(2),
    ... )
    >>> terms.tolist()
    [0.5, 0.5]
    """
    check_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs, chosen=chosen, baseline=baseline)
    log_ratio = sequence_sum(logprobs - reference_logprobs, sequence_ids)
    above = beta * (log_ratio - baseline.detach().clamp(min=0))
    is_chosen = chosen > 0.5
    terms = (desirable_weight * (-above).sigmoid()).where(is_chosen, undesirable_weight * above.sigmoid())
    return per_sequence(terms, sequence_lengths), {"implied_reward": (beta * log_ratio).detach()}


# ---- rewards learned of preferences and of labelled steps, by a critic


def bradley_terry(*, values: Tensor, chosen: Tensor, sequence_ids: Tensor, group_ids: Tensor, center: NotNegative = 0.0) -> Terms:
    """Bradley-Terry: the likelihood that the chosen answer of a pair has the higher score; what trains a reward model.

        s    = value of the last token of an answer
        h    = s(chosen) - s(rejected)
        term = -log sigmoid(h) + center (s(chosen) + s(rejected))^2        the same for each token of the pair

    A critic gives the value of a token before it sees that token. The last token of an answer that ended is its end-of-sequence token,
    so the score is of the whole text.

    Args:
        values: float [T], with gradient. chosen, sequence_ids, group_ids: as `dpo`.
        center: weight of the penalty that keeps scores around 0, where the likelihood itself leaves their level open.
    Returns:
        Terms [T]; and `margin` (the h above), `accuracy` (1 where it is above 0) and `score` (the mean of the two).
    Raises:
        ShapeError: the tensors differ in shape, or a group is no pair of a chosen and a rejected answer.
    Source:
        Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 1, for pairs; centring: Eisenstein et al. 2023, arXiv:2312.09244, section 2.

    >>> import torch
    >>> terms, metrics = bradley_terry(
    ...     values=torch.tensor([9.0, 1.0, 0.0]), chosen=torch.tensor([1.0, 1.0, 0.0]), sequence_ids=torch.tensor([0, 0, 1]),
    ...     group_ids=torch.tensor([0, 0, 0]), center=0.01,
    ... )
    >>> [round(term, 4) for term in terms.tolist()], metrics["margin"].tolist()
    ([0.3233, 0.3233, 0.3233], [1.0, 1.0, 1.0])
    """
    scores = values.masked_fill(~_is_last(sequence_ids), 0.0)
    margin, total = _contrast(scores, chosen, sequence_ids, group_ids), sequence_sum(scores, group_ids)
    terms = _softplus(-margin) + center * total.square()
    return terms, {**_preference_metrics(margin), "score": 0.5 * total.detach()}


def process_reward(*, values: Tensor, labels: Tensor, sequence_ids: Tensor, sequence_lengths: Tensor) -> Terms:
    """Process reward: the likelihood of the labels of an answer's steps, each under sigmoid(value) at one token of its step.

        term = (log(1 + exp(v)) - label v) / (labelled tokens of the sample)        0 for a token without a label

    Args:
        values: float [T], with gradient. sequence_ids: int64 [T]. sequence_lengths: float [T].
        labels: float [T], from 0 (wrong) to 1 (right), on one token for each step, and negative on all others. A critic gives the value
            of a token before it sees that token, so the label belongs on the token after the step, such as its separator.
    Returns:
        Terms [T], whose sum over a sample is the mean over its steps; and `step_accuracy`, the share of the sample's steps where
        sigmoid(value) and the label lie on one side of 0.5, 0 for a sample without steps.
    Raises:
        ShapeError: the tensors differ in shape.
    Source:
        Lightman et al. 2023, "Let's verify step by step", arXiv:2305.20050, section 2.6; labels between 0 and 1: Wang et al. 2024
        (Math-Shepherd), arXiv:2312.08935, eq. 4.

    >>> import torch
    >>> terms, _ = process_reward(
    ...     values=torch.tensor([9.0, 0.0, 0.0]), labels=torch.tensor([-1.0, 1.0, 0.0]), sequence_ids=torch.tensor([0, 0, 0]),
    ...     sequence_lengths=torch.full((3,), 3.0),
    ... )
    >>> [round(term, 4) for term in terms.tolist()]
    [0.0, 0.3466, 0.3466]
    """
    check_shapes(values=values, labels=labels, sequence_ids=sequence_ids, sequence_lengths=sequence_lengths)
    is_step = (labels >= 0).to(values.dtype)
    num_steps = sequence_sum(is_step, sequence_ids).clamp(min=1)
    is_right = is_step * ((values.detach() > 0) == (labels > 0.5)).to(values.dtype)
    terms = is_step * (_softplus(values) - labels * values) / num_steps
    return terms, {"step_accuracy": sequence_sum(is_right, sequence_ids) / num_steps}


def _contrast(values: Tensor, chosen: Tensor, sequence_ids: Tensor, group_ids: Tensor) -> Tensor:
    """For each token of a pair, the sum of these values over the chosen answer less that over the rejected one."""
    check_shapes(values=values, chosen=chosen, sequence_ids=sequence_ids, group_ids=group_ids)
    sign = values.detach().new_ones(values.shape).masked_fill(chosen < 0.5, -1.0)
    lasts = sign * _is_last(sequence_ids)
    num_answers, balance = sequence_sum(lasts.abs(), group_ids), sequence_sum(lasts, group_ids)
    if ((num_answers != 2) | (balance != 0)).any():
        raise ShapeError(
            "a group is no pair of one chosen and one rejected answer",
            now="Make pairs with Dataset.pairs() or best_and_worst(responses, rewards), and filter whole groups.",
        )
    return sequence_sum(sign * values, group_ids)


def _is_last(sequence_ids: Tensor) -> Tensor:
    """Whether each token is the last of its sample, whose tokens lie together: bool [T]."""
    found = sequence_ids != sequence_ids.roll(-1)
    found[-1:] = True
    return found


def _per_token_of(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Values divided by the number of tokens of their sample."""
    return values / sequence_sum(values.detach().new_ones(values.shape), sequence_ids)


def _softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)), which is -log sigmoid(-values)."""
    return values.logaddexp(values.new_zeros(()))


def _preference_metrics(margin: Tensor) -> dict[str, Tensor]:
    margin = margin.detach()
    return {"margin": margin, "accuracy": (margin > 0).to(margin.dtype)}
