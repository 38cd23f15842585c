"""Log-probabilities of given tokens, and the entropy of what they were drawn from, without keeping a second copy of the logits.

    logits [T, V], targets [T], temperature [T] --> logprobs [T], entropy [T]

Computed in float32, some rows at a time: forward keeps the logits alone, backward makes their gradient from them. Plain
autograd would keep a log-softmax beside the logits, and two gradients of that size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Shapes: T predicted tokens, V vocabulary.

_CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at a time: 4 MiB of float32, which a last-level cache holds."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and entropies, of softmax(logits / temperature).

    Args:
        logits: float [T, V]. targets: int64 [T]. temperature: float32 [T], positive; None is 1 everywhere.
    Returns:
        Two float32 [T], in nats, differentiable in the logits.

    >>> logprobs, entropy = token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)
    (-1.3863, 1.3863)
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(logits.shape[0], device=logits.device)
        log_normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(logits):
            scaled = _scaled(logits[rows], temperature, rows)
            log_normaliser[rows] = scaled.logsumexp(1)
            logprobs[rows] = scaled.gather(1, targets[rows, None])[:, 0] - log_normaliser[rows]
            probabilities = (scaled - log_normaliser[rows, None]).exp_()
            entropy[rows] = log_normaliser[rows] - probabilities.mul_(scaled).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, temperature, log_normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, temperature, log_normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = _scaled(logits[rows], temperature, rows) - log_normaliser[rows, None]
            weight = torch.zeros_like(log_normaliser[rows, None])
            if grad_logprobs is not None:
                weight = weight - grad_logprobs[rows, None]
            # d logprob / d logit = [is target] - p;  d entropy / d logit = -p (log p + entropy).
            if grad_entropy is None:
                grad = logp.exp_().mul_(weight)
            else:
                grad = logp.exp() * (weight - grad_entropy[rows, None] * (logp + entropy[rows, None]))
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if temperature is not None:
                grad.div_(temperature[rows, None])
            grad_logits[rows] = grad
        return grad_logits, None, None


def _scaled(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    logits = logits.float()
    return logits if temperature is None else logits / temperature[rows, None]


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]
