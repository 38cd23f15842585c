"""When which rows of which call are where: what a task waits for, with the time that rows need on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from m2flow.errors import InternalError

Hop = Callable[[int, str, str], float]
"""Seconds for so many bytes from one worker to another."""

TOKEN_BYTES = 16
"""Of a sample's columns: id, log-probability and version 4 each, two masks, and about 2 of text."""
ROW_BYTES = 32
"""Of a row besides its tokens: identity and a number or two."""


@final
class Rows:
    """By call, place and identity: the time from which a row is there."""

    def __init__(self, hop_s: Hop) -> None:
        self._hop_s = hop_s
        self._there: dict[int, dict[str, dict[int, float]]] = {}

    def made(self, call: int, ids: Iterable[int], place: str, now_s: float) -> None:
        """A call's rows come into being."""
        self._there.setdefault(call, {}).setdefault(place, {}).update(dict.fromkeys(ids, now_s))

    def adopted(self, call: int, drawn: int, ids: Iterable[int], place: str) -> None:
        """Rows of one call are another's too."""
        here = self._at(drawn, place)
        self._there.setdefault(call, {}).setdefault(place, {}).update((row, here[row]) for row in ids)

    def send(self, call: int, ids: Iterable[int], source: str, target: str, now_s: float, num_tokens: Callable[[int], int]) -> None:
        """Rows go from one place to another; what is still on its way to the source goes on from there."""
        if source == target:
            return
        ids = list(ids)
        here, there = self._at(call, source), self._there.setdefault(call, {}).setdefault(target, {})
        try:
            start_s = max([now_s, *[here[row] for row in ids]])
        except KeyError as missing:
            raise InternalError(f"the scheduler lets {source} send row {missing} of call {call}, which it does not have") from None
        num_bytes = sum(ROW_BYTES + TOKEN_BYTES * num_tokens(row) for row in ids)
        there.update(dict.fromkeys(ids, start_s + self._hop_s(num_bytes, source, target)))

    def ready_s(self, call: int, ids: Iterable[int], place: str) -> float:
        """When all of these are there.

        Raises:
            InternalError: one was never sent.
        """
        here = self._at(call, place)
        try:
            return max((here[row] for row in ids), default=0.0)
        except KeyError as missing:
            raise InternalError(f"a task on {place} needs row {missing} of call {call}, which nobody sent there") from None

    def forget(self, call: int, place: str) -> None:
        self._there.get(call, {}).pop(place, None)

    def written_down(self, place: str, ledger: str, now_s: float) -> None:
        """What is at a place can be read back from where it wrote it down."""
        for places in self._there.values():
            here = [row for row, since_s in places.get(place, {}).items() if since_s <= now_s]
            places.setdefault(ledger, {}).update(dict.fromkeys(here, now_s))

    def lost(self, place: str) -> None:
        """All that was at a place is gone."""
        for places in self._there.values():
            places.pop(place, None)

    def _at(self, call: int, place: str) -> dict[int, float]:
        return self._there.get(call, {}).get(place, {})
