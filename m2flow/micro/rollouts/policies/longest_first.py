"""The longest expected first, by what is known when a slot is free.

Source: Graham 1969 for machines whose speed does not go by their load; RhymeRL (survey notes) and Seer (arXiv 2511.14617) for rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.micro.rollouts.policies.predicted import Predicted


class LongestFirst(Predicted):
    name = "longest-first"

    def rank(self, sample: int) -> tuple[float, ...]:
        return -round(float(self._expected[sample]), 6), self._turn[sample]

    def reranked(self) -> Iterable[int]:
        return self.waiting_if_new()
