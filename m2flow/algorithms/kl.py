"""Estimates of KL(policy || reference), token by token, from the log-probabilities of sampled tokens.

With r = log p_ref(x) - log p(x) for a token x drawn from the policy p:

    k1 = -r              unbiased, high variance, may be negative
    k2 = r^2 / 2         biased, low variance, never negative
    k3 = exp(r) - 1 - r  unbiased, low variance, never negative; r is taken as 20 where it is above

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. The properties are those of the
*values*. As losses they differ: the expected gradient of k2 is that of KL, the expected gradient of k1 is zero, and k3's is the
gradient of the reverse divergence KL(reference || policy). Used on tokens that older weights drew, all three are biased further.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from m2flow.errors import OptionError, ShapeError, did_you_mean

Estimator = Literal["k1", "k2", "k3"]

MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated, and have no gradient beyond: float32 has no exp(89), and the gradient of
what is not finite is NaN even where a clipped or zero factor should silence it.

Source: verl, `compute_policy_loss_vanilla` and `kl_penalty` in core_algos.py, which clamp to -20..20. TRL clamps none.
"""


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
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
    >>> [round(kl(policy, reference, k).item(), 4) for k in ("k1", "k2", "k3")]
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
    raise OptionError(f"there is no KL estimator {estimator!r}", now=did_you_mean(str(estimator), get_args(Estimator)))
