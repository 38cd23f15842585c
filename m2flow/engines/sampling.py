"""Draw one token a row: temperature, top-k, top-p, forbidden tokens, and random numbers that belong to the sample.

    logits [B, V], SamplingColumns, uniforms(seeds, positions) --draw--> tokens [B], logprobs [B]

Which log-probability: that of softmax(logits / temperature), over the whole vocabulary, before top-k, top-p and
`min_new_tokens` take tokens away; for temperature 0 that of softmax(logits). It is what a trainer that divides its logits by the same
temperature computes for the token, so that their ratio is 1 on equal weights.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position of the token in the response), and for nothing else. float64 [B].

    Source:
        SplitMix64: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195; here keyed by a mixed seed, so that neighbouring seeds
        do not share a sequence.

    >>> uniforms(np.array([7, 7, 8], np.uint64), np.array([0, 1, 0])).round(4).tolist()
    [0.5243, 0.3021, 0.9262]
    """
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64))
        bits = _mix(key + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


@dataclass(frozen=True)
class SamplingColumns:
    """How each row samples: arrays [B]."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_k: npt.NDArray[np.int64]
    """0 is off."""
    top_p: npt.NDArray[np.float64]
    """1 is off."""


def draw(logits: Tensor, columns: SamplingColumns, uniform: npt.NDArray[np.float64], forbidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw by inverting the cumulative distribution, in order of token id; nothing of one row reaches another.

    Top-k comes before top-p, which looks at what top-k left, renormalised, as in transformers. Of equal logits at top-k's edge the
    lower id stays.

    Args:
        logits: [B, V], on any device.
        uniform: float64 [B], from `uniforms`.
        forbidden: bool [B, V], tokens that can't be drawn; or None.
    Returns:
        int64 [B] and float32 [B], on the logits' device.
    """
    is_greedy = columns.temperature == 0
    scaled = logits.float()
    if bool((columns.temperature != 1).any()):
        divisor = np.where(is_greedy, np.float32(1), columns.temperature)
        scaled = scaled / torch.from_numpy(divisor).to(logits.device)[:, None]
    logprobs = scaled.log_softmax(-1)
    allowed = logprobs if forbidden is None else logprobs.masked_fill(forbidden, float("-inf"))
    if is_greedy.all():
        tokens = allowed.argmax(-1)
    else:
        tokens = _invert(_truncated(allowed, columns), torch.from_numpy(uniform).to(logits.device))
        if is_greedy.any():
            tokens = torch.where(torch.from_numpy(is_greedy).to(logits.device), allowed.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _invert(logprobs: Tensor, uniform: Tensor) -> Tensor:
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1]
    # The product may round up to the total, which no token exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True).squeeze(1)


def _truncated(logprobs: Tensor, columns: SamplingColumns) -> Tensor:
    num_tokens = logprobs.shape[1]
    top_k = np.where((columns.top_k > 0) & (columns.top_k < num_tokens), columns.top_k, num_tokens)
    has_k, has_p = bool((top_k < num_tokens).any()), bool((columns.top_p < 1).any())
    if not has_k and not has_p:
        return logprobs
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if has_k:
        rank = torch.arange(num_tokens, device=logprobs.device)
        ordered = ordered.masked_fill(rank >= torch.from_numpy(top_k).to(logprobs.device)[:, None], float("-inf"))
    if has_p:
        probabilities = ordered.softmax(-1, dtype=torch.float64)
        before = probabilities.cumsum(-1) - probabilities
        limit = torch.from_numpy(np.where(columns.top_p < 1, columns.top_p, 2.0)).to(logprobs.device)[:, None]
        ordered = ordered.masked_fill(before >= limit, float("-inf"))
    return torch.empty_like(ordered).scatter_(1, ids, ordered)
