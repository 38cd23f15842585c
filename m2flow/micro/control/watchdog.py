"""Notices that a run has come to a halt, and says why. Pure: told the time and who waits for whom, it answers when it is sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from m2flow.errors import InternalError
from m2flow.micro.scheduling.waiting import Wait, in_words, ring_of_waits

PATIENCE_S = 3.0
"""A ring that holds for so long, with nothing in it changed, is no moment between two messages."""


@final
class Watchdog:
    """Looks again and again."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._ring: list[Wait] = []
        self._since_s = 0.0

    def look(self, waits: Sequence[Wait], now_s: float) -> InternalError | None:
        """The ring of waits that has held for long enough, as an error; None if there is none."""
        ring = ring_of_waits(waits)
        if ring != self._ring:
            self._ring, self._since_s = ring, now_s
        if not ring or now_s - self._since_s < self._patience_s:
            return None
        return InternalError(
            f"the run has come to a halt, for {now_s - self._since_s:.0f} s now: {in_words(ring)}",
            now="Give the channels of the spec more room (`channels: max_samples, max_bytes`), and please report this plan.",
        )
