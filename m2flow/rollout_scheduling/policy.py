"""Define the interface of a scheduling policy, what it may know (`Seen`), and how several policies combine into one.

    Seen --SchedulingPolicy--> order, admission, instance and migration of the samples of one `generate` call

A policy chooses order, place and time only. Whatever it answers, each sample is generated once, by weights that its call may use, and has
the tokens that it would have had, so a bad policy costs time and nothing else. Samples and instances are numbers from 0 on.

A subclass overrides the methods on which it has an opinion; the defaults leave the rest open. `composed` combines policies: ranks compare
in the order of the policies, a sample starts if all policies allow it, the first policy with `next_sample` dispatches, any may migrate.
Policies are pure: no input or output, no clock, no randomness except from a seed of their own.

Waiting samples are kept in a heap by the rank that they had last; policies report whose rank has changed (`reranked`). Many changes at
once rebuild the heap, so dispatching n samples costs O(n log n) and the policies' own time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from m2flow.rollout_scheduling.decode_model import DecodeModel


class Move(NamedTuple):
    """Migrate a running sample to another instance."""

    sample: int
    to: int


@dataclass(frozen=True)
class MoveCost:
    """The cost of migrating a sample: no KV cache is copied; the target repeats the prefill, which stalls whatever runs there.

    Source: 2 x 7e9 FLOP a token at 40% of an H100's 989 TFLOP/s (bf16) is 35 microseconds a token.
    """

    fixed_s: float = 0.05
    """Abort at the source and submit to the target; only this sample waits."""
    token_s: float = 35e-6
    """For each token of the prompt and of the response so far; the target does nothing else meanwhile."""


class Load(NamedTuple):
    """The load of an engine, as of its last report."""

    num_running: int
    num_queued: int
    """Samples that wait inside the engine for room."""
    kv_used: int
    """Tokens in its KV cache, or reserved there."""
    kv_capacity: int
    """Tokens that the cache holds; 0 if the engine does not report it."""

    @property
    def kv_share(self) -> float:
        """The share of the cache in use; 0 if the engine does not report its capacity."""
        return self.kv_used / self.kv_capacity if self.kv_capacity else 0.0


def _nothing_known(sample: int) -> int:
    return 0


@dataclass
class Seen:
    """The state of one call's samples, as far as a policy may know it. Policies read it and never change it."""

    model: DecodeModel
    num_instances: int
    prompts: Sequence[int]
    """[P], tokens."""
    groups: Sequence[int]
    """[N], the position of each sample's prompt."""
    members: Sequence[Sequence[int]]
    """[P], the samples of each prompt."""
    cap: int | None
    """Tokens at which a response is truncated."""
    earlier: Sequence[Sequence[int]]
    """[P], lengths of the responses to the same prompts in earlier epochs; empty where there were none."""
    move_cost: MoveCost
    difficulties: Sequence[str] = ()
    """[P], what is said of each prompt: a label, a number or a JSON list of numbers, "" where nothing is; empty if nothing is of any."""
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Samples on no instance, in the order of arrival; migrating samples are not among them."""
    finished: dict[int, int] = field(default_factory=dict)
    """Sample -> its length."""
    loads: list[int] = field(default_factory=list)
    """[n], samples on each instance, including those that migrate to it."""
    place: dict[int, int] = field(default_factory=dict)
    """Sample -> the instance where it runs."""
    oldest: Mapping[int, int] = field(default_factory=dict)
    """Partial rollout of an earlier call -> the oldest weight version among its tokens."""
    reports: dict[int, Load] = field(default_factory=dict)
    """Instance -> its last load report; empty where engines report nothing."""
    has_reports: bool = False
    """Whether engines report their load; they do not in the study."""
    behind: int = 0
    """Weight versions by which the trainer lags behind sequential execution; 0 without staleness."""
    num_wanted: int = 0
    """Groups that the call returns."""
    num_rejected: int = 0
    """Groups that a filter has rejected so far; as many more have to begin."""
    lost: set[int] = field(default_factory=set)
    """Instances that have failed."""
    tokens_so_far: Callable[[int], int] = _nothing_known
    """Tokens of a running sample, as of the last report."""
    known: Sequence[int] | None = None
    """[N], the lengths that samples will have; None except in a simulation with an oracle."""

    def running(self, instance: int) -> list[int]:
        """The samples that run on an instance."""
        return [sample for sample, where in self.place.items() if where == instance]

    @property
    def num_alive(self) -> int:
        return self.num_instances - len(self.lost)


class SchedulingPolicy:
    """Base class of scheduling policies: override what the policy decides.

    A policy serves one call's samples at a time, from `begin` to `end`, and may learn from one call for the next.
    """

    name: str
    needs_reports: bool = False
    """Whether it reads the engines' load reports: `Seen.reports` and `Seen.tokens_so_far`."""
    seen: Seen

    def begin(self, seen: Seen) -> None:
        """Called before the first sample, and again if partial rollouts of an earlier call join."""
        self.seen = seen

    def added(self, samples: Sequence[int]) -> None:
        """Called when samples start to wait: their prompts have arrived, or their instance has failed."""

    def rank(self, sample: int) -> float | tuple[float, ...]:
        """The priority of a waiting sample: the lowest starts first, ties in the order of arrival."""
        return 0.0

    def reranked(self) -> Iterable[int]:
        """Waiting samples whose rank has changed; called before ranks are used."""
        return ()

    def allows(self, sample: int, instance: int) -> bool:
        """Whether the sample may start on the instance now. If not, the instance stays as it is until something changes."""
        return True

    def next_sample(self, instance: int) -> int | None:
        """Choose the waiting sample that the instance runs next; None leaves the slot free until something changes.

        It may be called again before the sample has left `seen.waiting`. Policies without this method are dispatched by rank.
        """
        raise NotImplementedError

    def started(self, sample: int, instance: int) -> None:
        """Called when a waiting sample is dispatched to the instance."""

    def ended(self, sample: int, length: int) -> None:
        """Called when a sample has ended."""

    def reported(self, instance: int) -> None:
        """Called when `seen.reports[instance]` is new."""

    def moves(self) -> Sequence[Move]:
        """Running samples to migrate; called after samples have ended or engines have reported."""
        return ()

    def end(self) -> None:
        """Called after the last sample. Lengths of samples aborted before their end are not known."""


def has_own(policy: SchedulingPolicy, method: str) -> bool:
    """Whether a policy overrides this method."""
    return getattr(type(policy), method) is not getattr(SchedulingPolicy, method)


_MANY = 8
"""If more than one in this many ranks has changed, the heap is rebuilt."""


def composed(policies: Sequence[SchedulingPolicy]) -> SchedulingPolicy:
    """Combine policies into one; a single policy that dispatches by itself is returned as it is."""
    if len(policies) == 1 and has_own(policies[0], "next_sample") and not has_own(policies[0], "allows"):
        return policies[0]
    return Composed(policies)


@final
class Composed(SchedulingPolicy):
    """Several policies as one; none at all is first come, first served."""

    def __init__(self, policies: Sequence[SchedulingPolicy]) -> None:
        self.parts = tuple(policies)
        self.name = ", ".join(part.name for part in policies) or "first-come-first-served"
        self.needs_reports = any(part.needs_reports for part in policies)
        self._ranking = [part for part in policies if has_own(part, "rank")]
        self._changing = [part for part in policies if has_own(part, "reranked")]
        self._allowing = [part for part in policies if has_own(part, "allows")]
        self._moving = [part for part in policies if has_own(part, "moves")]
        self._adding = [part for part in policies if has_own(part, "added")]
        self._starting = [part for part in policies if has_own(part, "started")]
        self._ending = [part for part in policies if has_own(part, "ended")]
        self._dispatching = next((part for part in policies if has_own(part, "next_sample")), None)
        self._heap: list[tuple[tuple[float, ...], int, int]] | None = None
        """(rank, turn, sample); None until it is built. An entry is valid if its rank is the sample's current one."""
        self._rank_of: dict[int, tuple[float, ...]] = {}
        self._turn: dict[int, int] = {}
        """Sample -> its position in the order of arrival."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        for part in self.parts:
            part.begin(seen)
        self._heap, self._rank_of, self._turn = None, {}, {}

    def added(self, samples: Sequence[int]) -> None:
        for part in self._adding:
            part.added(samples)
        if self._heap is not None:
            for sample in samples:
                self._rank_of.pop(sample, None)  # It may have waited before, and its entry have been popped.
                self._push(sample)

    def next_sample(self, instance: int) -> int | None:
        sample = self._dispatching.next_sample(instance) if self._dispatching is not None else self._first()
        return sample if sample is not None and self.allows(sample, instance) else None

    def allows(self, sample: int, instance: int) -> bool:
        return all(part.allows(sample, instance) for part in self._allowing)

    def started(self, sample: int, instance: int) -> None:
        for part in self._starting:
            part.started(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        for part in self._ending:
            part.ended(sample, length)

    def reported(self, instance: int) -> None:
        for part in self.parts:
            part.reported(instance)

    def moves(self) -> Sequence[Move]:
        moves: dict[int, Move] = {}
        for part in self._moving:
            for move in part.moves():
                moves.setdefault(move.sample, move)
        return list(moves.values())

    def end(self) -> None:
        for part in self.parts:
            part.end()

    def _first(self) -> int | None:
        waiting = self.seen.waiting
        if not self._ranking:
            return next(iter(waiting), None)
        changed: set[int] = set()
        for part in self._changing:
            changed.update(part.reranked())
        if self._heap is None or len(changed) * _MANY > len(waiting):
            self._rebuild()
        else:
            for sample in changed:
                if sample in waiting:
                    self._push(sample)
        assert self._heap is not None
        while self._heap:
            rank, _, sample = self._heap[0]
            if sample in waiting and self._rank_of.get(sample) == rank:
                return sample
            heapq.heappop(self._heap)
        return None

    def _rebuild(self) -> None:
        """Rebuild the heap from all waiting samples."""
        for sample in self.seen.waiting:
            self._turn.setdefault(sample, len(self._turn))
        self._rank_of = {sample: self._rank(sample) for sample in self.seen.waiting}
        self._heap = [(rank, self._turn[sample], sample) for sample, rank in self._rank_of.items()]
        heapq.heapify(self._heap)

    def _push(self, sample: int) -> None:
        assert self._heap is not None
        rank = self._rank(sample)
        if self._rank_of.get(sample) != rank:
            self._rank_of[sample] = rank
            heapq.heappush(self._heap, (rank, self._turn.setdefault(sample, len(self._turn)), sample))

    def _rank(self, sample: int) -> tuple[float, ...]:
        found: list[float] = []
        for part in self._ranking:
            rank = part.rank(sample)
            found.extend(rank) if isinstance(rank, tuple) else found.append(rank)
        return tuple(found)
