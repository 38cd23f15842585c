"""Log-probabilities over a vocabulary that ranks have parts of, without the logits of all tokens.

    hidden states [T, H] --some tokens at a time--> logits of this rank's part of the vocabulary [t, v] --sums over the ranks--> [T]

Neither [T, V] nor [T, v] exists as a whole: the backward pass computes logits again, chunk by chunk. For each chunk the ranks exchange
three numbers a token (and those of `top_ids`), never logits.

Shapes: T tokens, t those of a chunk, H width, V vocabulary, v this rank's part of it, K further tokens.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, for the cross-entropy over a split vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class Vocabulary:
    """A rank's part of the vocabulary."""

    size: int
    """V. Rows of the weights beyond it fill up the last ranks' parts."""
    group: Any
    """The ranks that have the parts."""
    num_logits: int
    """How many logits a rank may have at a time."""
    is_exact: bool = False
    """Compute logits in float32 from hidden states and weights of any type."""

    def chunks(self, num_tokens: int, width: int) -> Iterator[slice]:
        size = max(1, self.num_logits // width)
        return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))

    def start(self, width: int) -> int:
        return int(dist.get_rank(self.group)) * width

    def num_real(self, width: int) -> int:
        """How many of this rank's rows are of tokens."""
        return min(max(self.size - self.start(width), 0), width)

    def scaled(self, hidden: Tensor, weight: Tensor, temperature: Tensor | None) -> Tensor:
        """Logits over temperature of some tokens, float32 [t, v]; those of no token are -inf."""
        logits = linear(hidden.float(), weight.float()) if self.is_exact else linear(hidden, weight).float()
        logits[:, self.num_real(len(weight)) :] = -math.inf
        return logits if temperature is None else logits / temperature[:, None]

    def total(self, values: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(values, how, group=self.group)
        return values


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, top_ids: Tensor | None, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities and entropies of softmax(hidden @ weight.T / temperature), as the embedded trainer's `logprobs_at` does.

    The gradient of `hidden` is this rank's part of a sum over the ranks; that of `weight` is whole.

    Args:
        hidden: [T, H]. weight: this rank's rows [v, H]. targets: int64 [T]. temperature: float32 [T]; None: 1. top_ids: int64 [T, K].
    Returns:
        float32 [T], [T] and, without `top_ids` empty, [T, K + 1], the last column that of all other tokens together.
    """
    found: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(hidden, weight, targets, temperature, top_ids, vocabulary)
    return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def most_likely(hidden: Tensor, weight: Tensor, temperature: Tensor | None, top_k: int, vocabulary: Vocabulary) -> Tensor:
    """Find the likeliest tokens, int64 [T, K], the same on every rank."""
    ids = torch.empty(len(hidden), top_k, dtype=torch.int64, device=hidden.device)
    start, size = vocabulary.start(len(weight)), dist.get_world_size(vocabulary.group)
    for rows in vocabulary.chunks(len(hidden), len(weight)):
        scaled = vocabulary.scaled(hidden[rows], weight, None if temperature is None else temperature[rows])
        best = scaled.topk(min(top_k, scaled.shape[1]), 1)
        pairs = [(torch.empty_like(best.values), torch.empty_like(best.indices)) for _ in range(size)]
        dist.all_gather([values for values, _ in pairs], best.values.contiguous(), group=vocabulary.group)
        dist.all_gather([numbers for _, numbers in pairs], (best.indices + start).contiguous(), group=vocabulary.group)
        values, numbers = (torch.cat(of_ranks, 1) for of_ranks in zip(*pairs, strict=True))
        ids[rows] = numbers.gather(1, values.topk(top_k, 1).indices)
    return ids


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        top_ids: Tensor | None,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, log_norm = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        top = logprobs.new_empty(len(hidden), 0 if top_ids is None else top_ids.shape[1] + 1)
        for rows in vocabulary.chunks(len(hidden), len(weight)):
            scaled = vocabulary.scaled(hidden[rows], weight, None if temperature is None else temperature[rows])
            largest = vocabulary.total(scaled.amax(1), dist.ReduceOp.MAX)
            exps = (scaled - largest[:, None]).exp()
            real = vocabulary.num_real(len(weight))
            summed = [exps.sum(1), (exps[:, :real] * scaled[:, :real]).sum(1), *_here(scaled, targets[rows, None], vocabulary).unbind(1)]
            if top_ids is not None:
                own, is_here = _own(top_ids[rows], scaled.shape[1], vocabulary)
                summed += [_without(exps, own, is_here).sum(1), *_here(scaled, top_ids[rows], vocabulary).unbind(1)]
            total, products, chosen, *more = vocabulary.total(torch.stack(summed))
            log_norm[rows] = largest + total.log()
            logprobs[rows] = chosen - log_norm[rows]
            entropy[rows] = log_norm[rows] - products / total
            if top_ids is not None:
                top[rows] = torch.stack([*more[1:], largest + more[0].log()], 1) - log_norm[rows, None]
        ctx.set_materialize_grads(False)
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(hidden, weight, targets, temperature, top_ids, log_norm, entropy, top)
        return logprobs, entropy, top

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_top: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, top_ids, log_norm, entropy, top = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        used = weight.float() if vocabulary.is_exact else weight
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        real = vocabulary.num_real(len(weight))
        for rows in vocabulary.chunks(len(hidden), len(weight)):
            logp = vocabulary.scaled(hidden[rows], weight, None if temperature is None else temperature[rows]) - log_norm[rows, None]
            grad = torch.zeros_like(logp)
            shift = torch.zeros_like(log_norm[rows, None])
            if grad_logprobs is not None:
                own, is_here = _own(targets[rows, None], len(weight), vocabulary)
                grad.scatter_add_(1, own, torch.where(is_here, grad_logprobs[rows, None], 0.0))
                shift = shift - grad_logprobs[rows, None]
            if grad_top is not None and top_ids is not None:
                own, is_here = _own(top_ids[rows], len(weight), vocabulary)
                grad.scatter_add_(1, own, torch.where(is_here, grad_top[rows, :-1], 0.0))
                # Of the others' log-probability: p / (their sum) for each of them.
                grad += _without((logp - top[rows, -1:]).exp(), own, is_here) * grad_top[rows, -1:]
                shift = shift - grad_top[rows].sum(1, keepdim=True)
            # d logprob / d logit = [is target] - p;  d entropy / d logit = -p (log p + entropy).
            if grad_entropy is not None:
                shift = shift - grad_entropy[rows, None] * (logp + entropy[rows, None])
            grad[:, :real] += (logp.exp() * shift)[:, :real]
            grad[:, real:] = 0.0
            if temperature is not None:
                grad /= temperature[rows, None]
            grad = grad.to(used.dtype)
            grad_hidden[rows] = (grad @ used).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows].to(used.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _own(ids: Tensor, width: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Places of tokens in this rank's part, and whether they are in it; others have place 0."""
    own = ids - vocabulary.start(width)
    is_here = (own >= 0) & (own < width)
    return own.where(is_here, torch.zeros_like(own)), is_here


def _here(scaled: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Logits of tokens [t, K] in this rank's part, and 0 for the others."""
    own, is_here = _own(ids, scaled.shape[1], vocabulary)
    return torch.where(is_here, scaled.gather(1, own), 0.0)


def _without(values: Tensor, own: Tensor, is_here: Tensor) -> Tensor:
    """Values [t, v] with 0 at these tokens."""
    taken = torch.zeros_like(values).scatter_add_(1, own, is_here.to(values.dtype))
    return torch.where(taken > 0, 0.0, values)
