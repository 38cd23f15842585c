"""Versions of resources: which call writes each, which calls read it, and what a trainer's weights are now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import final

from m2flow.macro.graph import Call, Effect
from m2flow.micro.scheduling.tracking import CallState


@final
class Versions:
    """Calls are added in program order."""

    def __init__(self, restored: Mapping[str, int]) -> None:
        self._writers: dict[str, dict[int, int]] = {}
        """Resource -> version, in order -> the call that writes it, unless that is done and a newer one is known."""
        self._readers: dict[str, dict[int, CallState]] = {}
        """Resource -> calls, not over, that read it, in program order."""
        self._trained = dict(restored)
        """Role -> the newest version that is there; at first what its trainer was restored to."""
        self._known = dict(restored)
        """Role -> the version that the calls added so far come to."""
        self._replacing: set[str] = set()

    def written_for(self, call: Call) -> tuple[list[int], list[int]]:
        """Who writes what a call reads: the oldest versions that will do, and newer ones that it may do without.

        Whoever writes a version has read the one before, so it does not end, or fails, without those who wrote the older ones.
        """
        needed: list[int] = []
        newer: list[int] = []
        for effect in call.reads:
            writers = self._writers.get(effect.resource)
            if writers:
                first = effect.first
                if first in writers:
                    needed.append(writers[first])
                newer += [writers[version] for version in range(first + 1, effect.version + 1) if version in writers]
        return needed, newer

    def add(self, state: CallState, is_done: Callable[[int], bool]) -> None:
        """Take in what a call reads and writes."""
        for effect in state.call.reads:
            self._readers.setdefault(effect.resource, {})[state.call.ordinal] = state
        for effect in state.call.writes:
            if state.call.engine == "train":
                self._known[state.call.role] = effect.version
            known = self._writers.setdefault(effect.resource, {})
            while known and is_done(known[oldest := next(iter(known))]):
                del known[oldest]
            known[effect.version] = state.call.ordinal

    def over(self, state: CallState) -> None:
        """A call is over, well or not: nobody has to wait for its reads."""
        for effect in state.call.reads:
            self._readers[effect.resource].pop(state.call.ordinal, None)

    def done(self, call: Call) -> None:
        """A call is done: what it trained is the newest version."""
        if call.engine == "train":
            for effect in call.writes:
                self._trained[call.role] = effect.version
            self._replacing.discard(call.role)

    def known(self) -> dict[str, int]:
        """What the calls added so far come to, of each role that is trained or copied to."""
        return dict(self._known)

    def newest(self, role: str) -> int:
        """The role's newest version that is there."""
        return self._trained.get(role, 0)

    def behind(self, call: Call) -> int:
        """How many versions a generation's newest one is ahead of those that are there."""
        return max(call.reads[0].version - self.newest(call.role), 0) if call.reads else 0

    def trained(self, role: str) -> int | None:
        """The version that the role's trainer holds; None between the first optimiser step of an update and its last."""
        return None if role in self._replacing else self.newest(role)

    def replace_weights(self, role: str) -> None:
        """An optimiser step was given out: the trainer's weights are no version until the update is done."""
        self._replacing.add(role)

    def reads_before(self, call: Call) -> Iterator[CallState]:
        """Earlier calls, not over, that read a version which this call replaces."""
        for effect in call.writes:
            for state in self._readers.get(effect.resource, {}).values():
                if state.call.ordinal >= call.ordinal:
                    break
                if Effect(effect.resource, effect.version - 1) in state.call.reads:
                    yield state
