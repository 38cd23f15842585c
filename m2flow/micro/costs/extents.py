"""How long samples are, as far as mean costs need to know it: a few numbers of a distribution of lengths.

responses of earlier steps, or sampling limits --> Extent --> decode cost at the mean context, bytes of a sample's cache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Extent:
    """Tokens of the samples of a role."""

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    position: float
    """Mean over generated tokens of how many the response had before: half of the mean length where all are equally long, and more
    where they are not, since long responses have more of the tokens."""
    longest: int
    """Of prompt and response together, at most."""

    @property
    def context(self) -> float:
        """Tokens in the cache of a sample, when one more is generated: mean over the generated tokens."""
        return self.prompt + self.position

    @property
    def sample(self) -> float:
        """Tokens of a whole sample: mean."""
        return self.prompt + self.response

    @classmethod
    def of(cls, responses: Sequence[int], *, prompt: float = 0.0, longest: int = 0) -> Extent:
        """Of responses that were seen.

        >>> Extent.of([1, 3])
        Extent(prompt=0.0, response=2.0, position=0.75, longest=3)
        """
        lengths = np.asarray(responses, dtype=np.float64)
        total = float(lengths.sum())
        position = float((lengths * (lengths - 1) / 2).sum()) / total if total else 0.0
        return cls(prompt, total / max(len(lengths), 1), position, max(longest, int(prompt + lengths.max(initial=0.0))))

    @classmethod
    def up_to(cls, max_new_tokens: int, *, prompt: float = 0.0) -> Extent:
        """Nothing is known but the limit: half of it on average, and the squares of lengths uniform up to it."""
        return cls(prompt, max_new_tokens / 2, max_new_tokens / 3, int(prompt) + max_new_tokens)
