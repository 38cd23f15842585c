"""Which prompts a refilling generation starts, and when it has enough: the first B kept groups in the order of the source.

Groups run side by side and are judged as they finish, so later ones may be judged first; what counts is the shortest stretch of the
source in which B groups were kept, which is what drawing one prompt at a time would have used. Pure: it is told verdicts and
answers how far to go. Limit: how many groups it starts ahead follows the share kept so far, and is no optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from m2flow.errors import DatasetError, M2FlowError
from m2flow.macro.graph import Call


@dataclass(frozen=True)
class RefillEnd:
    """Nothing that is still to come can change what the refill gives."""

    last: int
    """Position of the last prompt that was needed."""
    kept: frozenset[int]
    """Positions of the groups that it gives; of no use with an error."""
    error: M2FlowError | None = None
    is_dry: bool = False
    """All candidates were judged, and too few kept."""


@final
class Refill:
    """One refilling generation."""

    def __init__(self, num_candidates: int, count: int) -> None:
        self._num_candidates = num_candidates
        self._count = count
        self._verdicts: dict[int, bool | M2FlowError] = {}
        self._settled = 0
        """Every earlier position is judged, and none of them is an error."""
        self._kept: list[int] = []
        """Positions kept among those."""
        self._num_allowed = min(count, num_candidates)

    @property
    def num_allowed(self) -> int:
        """How many prompts, from the source's first, may be started by now."""
        return self._num_allowed

    @property
    def count(self) -> int:
        """Groups that it is to give."""
        return self._count

    @property
    def num_rejected(self) -> int:
        """Groups that were judged, and are not kept."""
        return sum(verdict is not True for verdict in self._verdicts.values())

    def had_started(self, num_prompts: int) -> None:
        """An earlier process of the run had started so many prompts, from the source's first."""
        self._num_allowed = min(max(self._num_allowed, num_prompts), self._num_candidates)

    def judge(self, position: int, verdict: bool | M2FlowError) -> None:
        """A group was kept or not, or judging it failed. What is told twice stays as it was."""
        self._verdicts.setdefault(position, verdict)
        while isinstance(settled := self._verdicts.get(self._settled), bool) and len(self._kept) < self._count:
            if settled:
                self._kept.append(self._settled)
            self._settled += 1
        self._allow()

    def end(self) -> RefillEnd | None:
        """What it came to, if that is decided."""
        if len(self._kept) == self._count:
            return RefillEnd(self._kept[-1], frozenset(self._kept))
        verdict = self._verdicts.get(self._settled)
        if isinstance(verdict, M2FlowError):
            return RefillEnd(self._settled, frozenset(), error=verdict)
        if self._settled == self._num_candidates:
            return RefillEnd(self._num_candidates - 1, frozenset(self._kept), is_dry=True)
        return None

    def _allow(self) -> None:
        """Start as many as will be kept, if they are kept as often as those so far."""
        num_kept = sum(verdict is True for verdict in self._verdicts.values())
        share = (num_kept + 1) / (len(self._verdicts) + 1)
        missing = self._count - num_kept
        if missing > 0:
            wanted = len(self._verdicts) + math.ceil(missing / share)
            self._num_allowed = min(max(self._num_allowed, wanted), self._num_candidates)


def ran_dry(call: Call, num_kept: int, num_candidates: int) -> DatasetError:
    """The error of a refill that found too few groups."""
    return DatasetError(
        f"only {num_kept} of the {call.options['refill']} groups that generate(count=...) needs were kept among {num_candidates} prompts",
        where=call.site.describe(),
        now="Is `keep` too strict, or the task too easy or too hard by now? max_draws=... raises the number of prompts to try.",
    )
