"""What a scheduling policy is asked, and what it may know; and several policies as one.

Seen --Policy--> what goes first, where, how much at once, what moves

A policy chooses order, place and time, and nothing else: whatever it says, each sample is generated once, by weights that its call may
use, and has the tokens that it would have had. So a bad policy costs time and no more. Samples and instances are numbers from 0 on.

A subclass answers the questions that it has an opinion on, and leaves the others alone; so several go together (`composed`): ranks
count in their order, a sample starts if all allow it, the first that hands samples out by itself does so, and any may move samples.
Pure: no input or output, no clock, no randomness but of a seed of its own.

ranks, compared one after the other  --heap-->  the next sample;   all must allow it;   the first who has his own queue is asked instead

A sample's place in the heap is that of the rank which it had last; policies say whose rank has changed. A change of many makes the heap
anew, so handing out n samples costs n log n and what the policies themselves take.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from m2flow.rollout_scheduling.decode_model import DecodeModel


class Move(NamedTuple):
    """A running sample goes on elsewhere."""

    sample: int
    to: int


@dataclass(frozen=True)
class MoveCost:
    """What it takes to go on elsewhere: nothing is copied, the prefix is computed again there, and stalls whatever else runs there.

    Source: 2 x 7e9 FLOP a token at 40% of an H100's 989 TFLOP/s (bf16) is 35 microseconds a token.
    """

    fixed_s: float = 0.05
    """Abort here, submit there; only the sample waits."""
    token_s: float = 35e-6
    """For each token of the prompt and of what was generated; the instance that takes it in does nothing else."""


class Load(NamedTuple):
    """How full an engine is, as it says itself now and then."""

    num_running: int
    num_queued: int
    """Samples that it has no room for yet."""
    kv_used: int
    """Tokens in its key/value cache, or reserved there."""
    kv_capacity: int
    """Tokens that the cache holds; 0: the engine does not say."""

    @property
    def kv_share(self) -> float:
        """Of the cache that is in use; 0 if the engine does not say."""
        return self.kv_used / self.kv_capacity if self.kv_capacity else 0.0


def _nothing_known(sample: int) -> int:
    return 0


@dataclass
class Seen:
    """What a policy may know of the samples that one call generates. Nothing here is to be changed by it."""

    model: DecodeModel
    num_instances: int
    prompts: Sequence[int]
    """[P], tokens."""
    groups: Sequence[int]
    """[N], the position of each sample's prompt."""
    members: Sequence[Sequence[int]]
    """[P], the samples of each prompt."""
    cap: int | None
    """Tokens at which an answer is cut."""
    earlier: Sequence[Sequence[int]]
    """[P], lengths of answers that the same prompts had in earlier epochs; empty where there were none."""
    move_cost: MoveCost
    difficulties: Sequence[str] = ()
    """[P], how hard prompts are said to be: the same words for the same difficulty, "" where nobody says; or empty: of none."""
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Samples that nobody has, in the order in which they were asked for; those that are to go on elsewhere are not among them."""
    finished: dict[int, int] = field(default_factory=dict)
    """Sample -> its length."""
    loads: list[int] = field(default_factory=list)
    """[n], samples on each instance, on their way to it included."""
    place: dict[int, int] = field(default_factory=dict)
    """Sample -> the instance where it runs."""
    oldest: Mapping[int, int] = field(default_factory=dict)
    """Sample -> the oldest version among its tokens, of one that an earlier call has left."""
    reports: dict[int, Load] = field(default_factory=dict)
    """Instance -> what its engine said last; empty where engines say nothing."""
    has_reports: bool = False
    """Whether engines will say how full they are: not in the study."""
    behind: int = 0
    """Versions that the trainer is behind what sequential execution would generate with; 0 without staleness."""
    num_wanted: int = 0
    """Groups that the call is to give."""
    num_rejected: int = 0
    """Groups that a filter has refused so far: as many more will have to begin."""
    lost: set[int] = field(default_factory=set)
    """Instances that are gone."""
    tokens_so_far: Callable[[int], int] = _nothing_known
    """Of a running sample; as of the last report."""
    known: Sequence[int] | None = None
    """[N], the lengths that samples will have; None but where a simulation asks what knowing them would be worth."""

    def running(self, instance: int) -> list[int]:
        """The samples of an instance."""
        return [sample for sample, where in self.place.items() if where == instance]

    @property
    def num_alive(self) -> int:
        return self.num_instances - len(self.lost)


class SchedulingPolicy:
    """Answers what it has an opinion on.

    It serves one call's samples at a time, from `begin` to `end`, and may learn from one to the next.
    """

    name: str
    needs_reports: bool = False
    """Whether it goes by what engines say of themselves while they run: `Seen.reports` and `Seen.tokens_so_far`."""
    seen: Seen

    def begin(self, seen: Seen) -> None:
        """Before the first sample; and again if samples join that an earlier call has left."""
        self.seen = seen

    def added(self, samples: Sequence[int]) -> None:
        """These wait too, from now on: their prompts have come, or who had them is lost."""

    def rank(self, sample: int) -> float | tuple[float, ...]:
        """What goes first: the lowest. Of equals, who was asked for first."""
        return 0.0

    def reranked(self) -> Iterable[int]:
        """Waiting samples whose rank is another than before; asked before ranks are used."""
        return ()

    def allows(self, sample: int, instance: int) -> bool:
        """Whether this sample may start there now. If not, the instance gets nothing until something changes."""
        return True

    def next_sample(self, instance: int) -> int | None:
        """Hand out by oneself: which waiting sample this instance takes next; None: none, until something changes.

        It may be asked again before the sample is gone from `seen.waiting`. Without this method ranks decide.
        """
        raise NotImplementedError

    def started(self, sample: int, instance: int) -> None:
        """A sample that waited is given to this instance."""

    def ended(self, sample: int, length: int) -> None:
        """A sample is done."""

    def reported(self, instance: int) -> None:
        """`seen.reports[instance]` is new."""

    def moves(self) -> Sequence[Move]:
        """After samples have ended, or engines have reported: which running samples go on elsewhere."""
        return ()

    def end(self) -> None:
        """After the last sample. Lengths of samples that were given up before their end are not known."""


def has_own(policy: SchedulingPolicy, question: str) -> bool:
    """Whether a policy answers a question by itself."""
    return getattr(type(policy), question) is not getattr(SchedulingPolicy, question)


_MANY = 8
"""If more than one in so many ranks has changed, the heap is made anew."""


def composed(policies: Sequence[SchedulingPolicy]) -> SchedulingPolicy:
    """One policy that hands out as these do together: itself, if there is one and it needs no queue."""
    if len(policies) == 1 and has_own(policies[0], "next_sample") and not has_own(policies[0], "allows"):
        return policies[0]
    return Composed(policies)


@final
class Composed(SchedulingPolicy):
    """Of any number, also of none: first come, first served."""

    def __init__(self, policies: Sequence[SchedulingPolicy]) -> None:
        self.parts = tuple(policies)
        self.name = ", ".join(part.name for part in policies) or "first-come-first-served"
        self.needs_reports = any(part.needs_reports for part in policies)
        self._ranking = [part for part in policies if has_own(part, "rank")]
        self._changing = [part for part in policies if has_own(part, "reranked")]
        self._allowing = [part for part in policies if has_own(part, "allows")]
        self._moving = [part for part in policies if has_own(part, "moves")]
        self._growing = [part for part in policies if has_own(part, "added")]
        self._starting = [part for part in policies if has_own(part, "started")]
        self._listening = [part for part in policies if has_own(part, "ended")]
        self._own = next((part for part in policies if has_own(part, "next_sample")), None)
        self._heap: list[tuple[tuple[float, ...], int, int]] | None = None
        """Rank, turn and sample; None: to be made. An entry counts if the rank is the sample's."""
        self._rank_of: dict[int, tuple[float, ...]] = {}
        self._turn: dict[int, int] = {}
        """Sample -> how many were asked for before it."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        for part in self.parts:
            part.begin(seen)
        self._heap, self._rank_of, self._turn = None, {}, {}

    def added(self, samples: Sequence[int]) -> None:
        for part in self._growing:
            part.added(samples)
        if self._heap is not None:
            for sample in samples:
                self._rank_of.pop(sample, None)  # It may have been here before, and its entry be gone.
                self._enter(sample)

    def next_sample(self, instance: int) -> int | None:
        sample = self._own.next_sample(instance) if self._own is not None else self._first()
        return sample if sample is not None and self.allows(sample, instance) else None

    def allows(self, sample: int, instance: int) -> bool:
        return all(part.allows(sample, instance) for part in self._allowing)

    def started(self, sample: int, instance: int) -> None:
        for part in self._starting:
            part.started(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        for part in self._listening:
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
            self._order()
        else:
            for sample in changed:
                if sample in waiting:
                    self._enter(sample)
        assert self._heap is not None
        while self._heap:
            rank, _, sample = self._heap[0]
            if sample in waiting and self._rank_of.get(sample) == rank:
                return sample
            heapq.heappop(self._heap)
        return None

    def _order(self) -> None:
        """All that wait, anew."""
        for sample in self.seen.waiting:
            self._turn.setdefault(sample, len(self._turn))
        self._rank_of = {sample: self._rank(sample) for sample in self.seen.waiting}
        self._heap = [(rank, self._turn[sample], sample) for sample, rank in self._rank_of.items()]
        heapq.heapify(self._heap)

    def _enter(self, sample: int) -> None:
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
