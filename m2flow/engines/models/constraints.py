"""Which tokens may come next: so that a response matches an expression, a JSON schema or a grammar; and what the trainer knows of it.

    Sampling.regex | json_schema | grammar --Constraint.of--> Constraint --allowed(tokens so far)--> bool [V]
    the column `sampling_mask` --SamplingMask.of--> what each token was drawn from --among_left--> log-probabilities and entropies

What may come next depends on the constraint and the sample's tokens alone, so a sample that is aborted and resumed, or decoded beside
others, goes on as it would alone. The package llguidance does the matching, byte by byte over the tokenizer's vocabulary.

Legend: V vocabulary, T tokens under the loss mask, K most tokens that one of them was drawn from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from m2flow.engines.models.model_files import TextCodec
from m2flow.engines.models.packing import num_masked
from m2flow.errors import EngineError, MissingExtra
from m2flow.recipe import TOP_LOGPROBS, Sampling
from m2flow.samples import SAMPLING_MASK, Batch, unpacked_masks


@final
class Constraint:
    """The constraint of one sample; it remembers how far the sample's tokens are matched."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._matched: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    @classmethod
    def of(cls, sampling: Sampling, codec: TextCodec, vocab_size: int) -> Constraint | None:
        """The constraint of these parameters; None if they have none.

        Raises:
            EngineError: it can't be read, or the tokenizer has no end-of-sequence token. MissingExtra: llguidance is not installed.
        """
        if not sampling.is_constrained:
            return None
        if not codec.eos_ids:
            raise EngineError(
                "a constraint ends a response by an end-of-sequence token, and the tokenizer has none",
                now="Set eos_token in the tokenizer, or leave the constraint out.",
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            now = "Run: pip install 'm2flow[grammar]'."
            raise MissingExtra("regex=, json_schema= and grammar= need the package llguidance, which is not installed", now=now) from None
        try:
            matcher = LLMatcher(_tokenizer_of(codec, vocab_size), _grammar(sampling), log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # Of the package's own kinds, bare `Exception` included.
            problem = str(error)
        if problem:
            option = next(name for name in ("regex", "json_schema", "grammar") if getattr(sampling, name))
            raise EngineError(
                f"{option}={getattr(sampling, option)!r:.80} can't be read: {problem.strip().splitlines()[0]}",
                now="Mend the schema, grammar or pattern where it says.",
            )
        return cls(matcher, vocab_size)

    def allowed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which tokens may follow these, all of the sample's so far: bool [V].

        Raises:
            EngineError: the tokens do not match, or nothing may follow them.
        """
        num_matched = len(self._matched)
        if num_matched > len(tokens) or not np.array_equal(self._matched, tokens[:num_matched]):
            self._matcher.reset()
            num_matched = 0
        if not self._matcher.consume_tokens(tokens[num_matched:].tolist()):
            raise EngineError(f"a sample does not match its constraint: {self._matcher.get_error()}")
        self._matched = tokens.copy()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if not mask.any():
            raise EngineError(f"no token may follow in a constrained sample: {self._matcher.get_error() or 'its text is at an end'}")
        return mask


def _grammar(sampling: Sampling) -> str:
    """The constraint in llguidance's own form."""
    from llguidance import LLMatcher, gbnf_to_lark

    if sampling.regex:
        return str(LLMatcher.grammar_from_regex(sampling.regex))
    if sampling.json_schema:
        return str(LLMatcher.grammar_from_json_schema(sampling.json_schema))
    return str(LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(sampling.grammar)))


def forbidden_by(
    rows: Iterable[tuple[int, Constraint | None, npt.NDArray[np.int32]]], forbidden: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Add what constraints do not allow to the forbidden tokens: bool [B, V] like the logits, or None if nothing is forbidden.

    Args:
        rows: row, its constraint if it has one, and its tokens so far.
    """
    for row, constraint, tokens in rows:
        if constraint is not None:
            forbidden = torch.zeros(like.shape, dtype=torch.bool, device=like.device) if forbidden is None else forbidden
            forbidden[row] |= torch.from_numpy(~constraint.allowed(tokens)).to(like.device)
    return forbidden


# ---- in the trainer


class SamplingMask(NamedTuple):
    """What the tokens of a batch were drawn from, where top-k, top-p, min-p, a constraint or a ban on early ends left some out.

    Log-probabilities and entropies among what is left are those of the distribution that was sampled, so that a trainer's ratio is 1 on
    equal weights, and no gradient goes to tokens that could not have come.

    Source:
        DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".
    """

    ids: torch.Tensor
    """int64 [T, K], filled up with 0."""
    is_left: torch.Tensor
    """bool [T, K], False where `ids` is filled up. A row without True: the token was drawn from the whole vocabulary."""

    @classmethod
    def of(cls, batch: Batch, device: str) -> SamplingMask | None:
        """The masks of a batch's masked tokens. None: there are none."""
        if SAMPLING_MASK not in batch:
            return None
        counts = num_masked(batch.ragged("loss_mask")).tolist()
        column = batch.ragged(SAMPLING_MASK)
        masks = [mask for row, count in enumerate(counts) for mask in unpacked_masks(column.row(row).astype(np.int32), count)]
        lengths = np.array([len(mask) for mask in masks], np.int64)
        if not lengths.any():
            return None
        is_left = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(is_left.shape, np.int64)
        ids[is_left] = np.concatenate(masks)
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(is_left).to(device))

    def among_left(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Condition outputs over the whole vocabulary on the token being one that was left.

        Args:
            outputs: `logprobs` and `entropy` [T], and `top_logprobs` [T, K + 1], the log-probabilities of `ids` and of all others.
        Returns:
            `logprobs` and `entropy`, differentiable.

        >>> mask = SamplingMask(torch.tensor([[0, 2]]), torch.tensor([[True, True]]))
        >>> p = torch.tensor([0.2, 0.5, 0.3]).log()
        >>> found = mask.among_left({"logprobs": p[2:], "entropy": p[:1], "top_logprobs": p[None, [0, 2, 1]]})
        >>> {name: round(values.item(), 4) for name, values in found.items()}
        {'logprobs': -0.5108, 'entropy': 0.673}
        """
        left = torch.where(self.is_left, outputs[TOP_LOGPROBS][:, :-1], _NEVER)
        total = left.logsumexp(1, keepdim=True)
        among = left - total
        is_cut = self.is_left.any(1)
        entropy = -(among.exp() * torch.where(self.is_left, among, 0.0)).sum(1)
        return {
            "logprobs": torch.where(is_cut, outputs["logprobs"] - total[:, 0], outputs["logprobs"]),
            "entropy": torch.where(is_cut, entropy, outputs["entropy"]),
        }


_NEVER = -1e30
"""A log-probability whose exponential is 0. (Infinity would make gradients that are none.)"""


# ---- tokenizers


@functools.lru_cache(maxsize=4)
def _tokenizer_of(codec: TextCodec, vocab_size: int) -> Any:
    """Prepare a tokenizer for matching, which takes about a second for 150,000 tokens."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(codec.fast, n_vocab=vocab_size, eos_token=sorted(codec.eos_ids))
    except ValueError as error:
        raise EngineError(
            f"constraints need a fast tokenizer that llguidance reads: {error}",
            now="Take a model with a tokenizer.json, or leave the constraint out.",
        ) from None
