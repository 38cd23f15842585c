"""Continuous batching on one worker, from finish to finish: what decodes, what waits for room in the cache, and who ends when.

A turn decodes one token for each sample that runs; it takes `step_s + b sample_s` for each role with b samples, as in the worker's
own loop. While nobody joins or leaves, all turns are alike, so time goes on from one change to the next, however many tokens lie
between. Prefill comes first and holds up those that decode. Limits: a sample joins and leaves in the middle of a turn, so a turn may be
shared; the context does not grow; nobody is preempted for want of memory, since `max_running` is what fits at the mean length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from m2flow.micro import messages as m
from m2flow.micro.costs.terms import DecodeCost
from m2flow.micro.record.decisions import Stretch

_NEAR = 1e-9
"""Turns within which two samples end together."""


@dataclass
class Life:
    """A sample on a worker. Turns, not seconds: `begun` and `ended` say how many tokens lie between, also of a part of it."""

    id: int
    role: str
    call: int
    task: int
    num_tokens: int
    """To generate here."""
    prefill_tokens: int
    added_s: float
    begun: float = -1.0
    begun_s: float = 0.0
    ended: float = -1.0
    """-1: it runs."""
    ended_s: float = -1.0
    is_wasted: bool = False
    """What it has generated is for nothing."""
    num_kept: int = 0
    """Of a wasted one: tokens that another goes on from all the same."""
    version: int = 0
    """Of the weights that generate it."""
    before: tuple[Stretch, ...] = ()
    """Of its tokens from earlier lives, which it goes on from."""
    is_over: bool = False
    """Ended or given up."""

    def stretches(self, num_tokens: int) -> tuple[Stretch, ...]:
        """Of all its tokens, if it has made so many here."""
        *earlier, last = self.before or (Stretch(0, self.version),)
        if last.version == self.version:
            return *earlier, Stretch(last.num_tokens + num_tokens, self.version)
        return *self.before, Stretch(num_tokens, self.version)

    def tokens_until(self, turn: float) -> float:
        """Tokens that it had when the worker's count of turns stood here."""
        if self.begun < 0:
            return 0.0
        last = turn if self.ended < 0 else min(turn, self.ended)
        return min(max(last - self.begun, 0.0), float(self.num_tokens))


def report_of(role: str, lives: Sequence[Life], turns: float, kv_capacity: int) -> m.Load:
    """What an engine says of its samples when the worker's count of turns stands here."""
    tokens = [int(life.tokens_until(turns)) + sum(stretch.num_tokens for stretch in life.before) for life in lives]
    running = [life.begun >= 0 for life in lives]
    held = sum(life.prefill_tokens + count for life, count, runs in zip(lives, tokens, running, strict=True) if runs)
    return m.Load(role, sum(running), len(lives) - sum(running), held, kv_capacity, [life.id for life in lives], tokens)


@final
class Decoding:
    """The samples of one worker."""

    def __init__(self, costs: Mapping[str, DecodeCost]) -> None:
        self._costs = costs
        self.turns = 0.0
        """Up to the last change."""
        self._last_s = 0.0
        self._held_s = 0.0
        """Prefill, and other work of the process, that is still to be done before the next turn."""
        self._running: dict[str, list[tuple[float, int, Life]]] = {role: [] for role in costs}
        self._num_running = dict.fromkeys(costs, 0)
        self._waiting: dict[str, deque[Life]] = {role: deque() for role in costs}
        self._turn_s = 0.0
        self._pace = 1.0
        self._num_added = 0

    @property
    def num_running(self) -> int:
        return sum(self._num_running.values())

    @property
    def turn_s(self) -> float:
        """A turn lasts so long now; 0 if nobody decodes."""
        return self._turn_s

    @property
    def is_empty(self) -> bool:
        """Nobody decodes or waits to."""
        return not self.num_running and not any(self._waiting.values())

    def add(self, lives: Iterable[Life], now_s: float) -> None:
        """Samples come in; those that find room begin."""
        self.advance(now_s)
        for life in lives:
            self._waiting[life.role].append(life)
        self._admit(now_s)

    def hold(self, seconds: float, now_s: float) -> None:
        """The process does something else for so long."""
        if self.num_running:
            self.advance(now_s)
            self._held_s += seconds

    def set_pace(self, factor: float, now_s: float) -> None:
        """Turns take so many times as long from now on: others work beside it."""
        if factor != self._pace:
            self.advance(now_s)
            self._turn_s *= factor / self._pace
            self._pace = factor

    def turns_at(self, now_s: float) -> float:
        """The count of turns now."""
        self.advance(now_s)
        return self.turns

    def next_s(self) -> float | None:
        """When the next sample ends, if nothing changes."""
        nearest = min((heap[0][0] for heap in self._live_heaps()), default=None)
        return None if nearest is None else self._last_s + self._held_s + max(nearest - self.turns, 0.0) * self._turn_s

    def finished(self, now_s: float) -> list[Life]:
        """Those that end now, when `next_s` said that somebody would."""
        nearest = min(heap[0][0] for heap in self._live_heaps())
        self._last_s, self._held_s, self.turns = now_s, 0.0, max(nearest, self.turns)
        ended: list[tuple[int, Life]] = []
        for heap in self._running.values():
            while heap and (heap[0][2].is_over or heap[0][0] <= self.turns + _NEAR):
                _, number, life = heapq.heappop(heap)
                if not life.is_over:
                    self._end(life, now_s)
                    ended.append((number, life))
        self._admit(now_s)
        return [life for _, life in sorted(ended, key=lambda pair: pair[0])]

    def give_up(self, lives: Iterable[Life], now_s: float) -> None:
        """These are aborted: what they have is kept in `ended`."""
        self.advance(now_s)
        for life in lives:
            if life.begun >= 0:
                self._end(life, now_s)
            else:
                life.is_over = True
        for role, waiting in self._waiting.items():
            self._waiting[role] = deque(life for life in waiting if not life.is_over)
        self._admit(now_s)

    def advance(self, now_s: float) -> None:
        """Let the turns up to now go by."""
        passed = now_s - self._last_s
        self._last_s = now_s
        held = min(self._held_s, passed)
        self._held_s -= held
        if self._turn_s > 0:
            self.turns += (passed - held) / self._turn_s

    def _end(self, life: Life, now_s: float) -> None:
        life.ended, life.ended_s, life.is_over = self.turns, now_s, True
        self._num_running[life.role] -= 1

    def _admit(self, now_s: float) -> None:
        for role, waiting in self._waiting.items():
            cost = self._costs[role]
            while waiting and self._num_running[role] < cost.max_running:
                life = waiting.popleft()
                life.begun, life.begun_s = self.turns, now_s
                self._held_s += cost.enter_s + life.prefill_tokens * cost.prefill_token_s
                self._num_added += 1
                self._num_running[role] += 1
                heapq.heappush(self._running[role], (self.turns + life.num_tokens, self._num_added, life))
        self._turn_s = self._pace * sum(self._costs[role].seconds(count) for role, count in self._num_running.items() if count)
        if not self._turn_s:
            self._held_s = 0.0  # Prefill for samples that were all given up.

    def _live_heaps(self) -> list[list[tuple[float, int, Life]]]:
        for heap in self._running.values():
            while heap and heap[0][2].is_over:
                heapq.heappop(heap)
        return [heap for heap in self._running.values() if heap]
