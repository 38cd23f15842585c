"""Turns as requests: the queue in which they wait for an engine, and those that an engine in another process plays.

`TurnQueue` says which of the turns that wait an engine is given, and which episodes begin. A turn of a speaker whose engine is in another
process is asked for by who plays the episode, and answered by who has the engine:

    the process of the episodes                          the process of the speaker's engine
    Episodes -> RemoteSpeaker.add   ---- asked ------->  Guests.take -> Episodes.ask_for -> engine.add
    Episodes <- RemoteSpeaker.begun <--- begun --------  (of a turn whose time is limited)
                                                         engine.step -> Guests.keep
    Episodes <- RemoteSpeaker.step  <--- answered -----  Guests.take_answers

There the turn waits in the queue of that engine, with those of the role's own episodes. To its episodes a `RemoteSpeaker` is an engine
like any other; what it asks for and gives up leaves in batches (`take_asked`), a row for each turn. To the engine a turn is a request like
any other, under an id of its own: the process may have that sample itself by now. Random numbers are in the request, so the tokens are
those that an engine beside the agent would give.

Loss. A turn is asked for once and answered once, each by its number; an answer to a turn that was given up is ignored. Nothing here waits
for a process that is gone: who plays the episode stops it, and plays it again from the record, without this turn.

A turn that does not fit the model's context, or that the engine refuses, is answered by its fault. So is one that comes when it can't be
played: that was given up before the engine's weights or turn changed, and is ignored by who asked, or is a mistake of the scheduler.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, final

import msgspec
import numpy as np

from m2flow.engines.contract import Generated, Language, Occupancy, Request
from m2flow.errors import EngineError, InternalError, M2FlowError, PromptTooLong
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Sampling
from m2flow.samples import Batch, Finish, Ragged, SampleId

# ---- which turns an engine is given, and which episodes begin


T = TypeVar("T")


class _Context(NamedTuple):
    """What the next turn of an episode follows."""

    num_tokens: int
    num_turns: int
    """Turns that it has had."""
    num_elsewhere: int
    """Those of them that another engine has answered."""


class _Place(NamedTuple):
    """Where an episode's turn stands among those that wait."""

    since_s: float
    number: int
    """Turns that were asked for before it."""
    num_given: int
    """Turns that the engine had been given when it was asked for."""


class Waiting(NamedTuple):
    """An episode that waits for an engine."""

    episode: int
    num_tokens: int
    """About the tokens of its context."""
    num_cached: int
    """Those of them that the engine's cache still has."""


_OVERTAKEN, _LEAST_OVERTAKEN = 2, 64
"""A turn goes first once the engine was given so many turns before it for each episode that has begun, and at least so many."""
_LEAST_ENDED = 16
"""Episodes that must have ended before the order of turns follows how many turns they took."""
_OPENS_S, _REPLIES_S = 1.0, 0.005
"""How long an episode that has begun, and one that has had a turn, is expected to ask for the next one at once."""
_LOOKED_S = 1.0
"""How long the size of an engine's cache is believed."""


@final
class TurnQueue:
    """The turns that wait for an engine, and the order in which it gets them.

    While the contexts of all episodes fit into the engine's KV cache, the turn goes first whose episode is expected to have the most turns
    left (longest processing time first), by the share of episodes that ended after as many turns; before enough have ended, and among
    equals, the one that has waited longest. Once they do not fit, those turns go first whose context is among what was used last, as
    the cache keeps it. An engine whose cache's size is not known has room for all. A turn that was passed over often goes before
    all others (`_OVERTAKEN`). An episode that was moved here has waited since it asked where it was.

    Source:
        Graham 1969 (longest processing time); Kaplan and Meier 1958 (of episodes that have not ended, too, it is known how many turns they
        had). That agents' contexts are lost while tools run, and that turns should go where they are: Continuum (arXiv 2511.02230).
    """

    def __init__(self, num_slots: int, num_ready: int = 0) -> None:
        """
        Args:
            num_slots: turns that the engine decodes at once; 0: as many as it is given.
            num_ready: turns that it has beyond these, to replace those that end, where it decodes while nobody asks it to.
        """
        self._limit = num_slots and num_slots + num_ready
        self._contexts: dict[int, _Context] = {}
        """Of the episodes that have begun and are not over."""
        self._num_tokens = 0
        """Of all of them."""
        self._running: dict[int, int] = {}
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Episode -> tokens of the context that the engine works on, and that its cache has; those used last at the end."""
        self._num_held = 0
        """Tokens of both."""
        self._num_ended: Counter[int] = Counter()
        self._num_continued: Counter[int] = Counter()
        """Episodes by the turns after which they ended, and after which they went on."""
        self._ended_tokens = 0
        self._num_given = 0
        """Turns that the engine was given."""
        self._asked_at: dict[int, _Place] = {}
        self._num_asked = 0
        self._moved: set[int] = set()
        """Episodes that have waited elsewhere for the turn that waits here now."""
        self._waiting: dict[int, dict[int, None]] = {}
        """The episodes whose turn waits, as they asked, by the turns that they had: all are not to be sorted in each step."""
        self._expected: dict[int, float] = {}
        """Episodes that are likely to ask for a turn at once, and until when that is so."""
        self._num_generated, self._num_answered = 0, 0
        self.capacity = 0
        """Tokens that the engine's cache holds; 0: not known."""
        self._looked_at = -math.inf

    def look(self, occupancy: Callable[[], Occupancy]) -> None:
        """See how large the engine's cache is, from time to time."""
        if self._limit and time.monotonic() - self._looked_at > _LOOKED_S:
            self.capacity, self._looked_at = occupancy().kv_capacity, time.monotonic()

    def cache_lost(self) -> None:
        """Note that the engine's cache is empty, but for what it works on, and may have another size."""
        self._cached.clear()
        self._num_held, self._looked_at = sum(self._running.values()), -math.inf

    def num_free(self, num_unfinished: int) -> int:
        """Count the turns that an engine with so many unfinished requests may be given now. Others of these leave turns half its places."""
        num_running = len(self._running)
        of_half = min(num_unfinished - num_running, -(-self._limit // 2) - num_running)
        return max(self._limit - num_unfinished, of_half) if self._limit else sys.maxsize

    # What happens to episodes

    def begun(self, packed: int, num_tokens: int, num_turns: int = 0) -> None:
        """Note that an episode has begun, or goes on after so many turns; its first context here will have about so many tokens."""
        self._num_tokens += num_tokens
        self._contexts[packed] = _Context(num_tokens, num_turns, num_turns)
        self._expected[packed] = time.monotonic() + _OPENS_S

    def asked(self, packed: int, num_tokens: int, waited_s: float = 0.0) -> None:
        """Note a turn that an episode asks for, behind a context of so many tokens, and for which it has waited elsewhere."""
        self._expected.pop(packed, None)
        known = self._contexts.get(packed)
        num_turns = 0 if known is None else known.num_turns
        self._num_continued[num_turns] += 1
        place = self._asked_at[packed] = _Place(time.monotonic() - waited_s, self._num_asked, self._num_given)
        self._num_asked += 1
        self._follows(packed, num_tokens, num_turns)
        of_same = self._waiting.setdefault(num_turns, {})
        of_same.pop(packed, None)  # A turn that was given up.
        of_same[packed] = None
        if waited_s:
            later = [one for of in self._waiting.values() for other in of if other != packed and (one := self._asked_at[other]) > place]
            self._asked_at[packed] = place._replace(num_given=min((one.num_given for one in later), default=self._num_given))
            self._moved.add(packed)
            self._waiting[num_turns] = dict.fromkeys(self.as_asked(of_same))

    def waited_s(self, packed: int) -> float:
        """How long a turn that waits has done so, here and elsewhere."""
        return time.monotonic() - self._asked_at[packed].since_s

    def _follows(self, packed: int, num_tokens: int, num_turns: int) -> None:
        known = self._contexts.get(packed)
        self._num_tokens += num_tokens - (0 if known is None else known.num_tokens)
        self._contexts[packed] = _Context(num_tokens, num_turns, 0 if known is None else known.num_elsewhere)

    def given(self, packed: int, num_tokens: int) -> None:
        """Note that the engine has been given a turn."""
        self._num_held += num_tokens - self._cached.pop(packed, 0)
        self._running[packed] = num_tokens
        self._waits_no_more(packed)
        self._num_given += 1
        self._evict()

    def answered(self, packed: int, num_tokens: int) -> None:
        """Note that the engine has ended a turn, after which its cache has a context of so many tokens."""
        self._num_generated += num_tokens - self._running.get(packed, num_tokens)
        self._num_answered += 1
        self._leave(packed, num_tokens)
        if packed in self._contexts:
            self._follows(packed, num_tokens, self._contexts[packed].num_turns + 1)
            self._expected[packed] = time.monotonic() + _REPLIES_S

    def taken_back(self, packed: int) -> None:
        """Note that the engine has a turn no more."""
        self._leave(packed, self._running.get(packed, 0))

    def _waits_no_more(self, packed: int) -> None:
        self._moved.discard(packed)
        if packed in self._contexts:
            self._waiting.get(self._contexts[packed].num_turns, {}).pop(packed, None)

    def _leave(self, packed: int, num_tokens: int) -> None:
        if packed in self._running:
            self._num_held += num_tokens - self._running.pop(packed)
            self._cached[packed] = num_tokens
            self._evict()

    def _evict(self) -> None:
        while self._cached and self._num_held > self.capacity:
            self._num_held -= self._cached.popitem(last=False)[1]

    def ended(self, packed: int, *, is_over: bool) -> None:
        """Forget an episode that is over, or goes on elsewhere. Its context stays in the cache, as long as that has room."""
        self._expected.pop(packed, None)
        self._asked_at.pop(packed, None)
        self._waits_no_more(packed)
        known = self._contexts.pop(packed, None)
        self._num_tokens -= 0 if known is None else known.num_tokens
        if is_over and known is not None and known.num_turns:
            self._num_ended[known.num_turns] += 1
            self._ended_tokens += known.num_tokens

    # Decisions

    def num_to_begin(self, sizes: Iterable[int], num_free: int) -> int:
        """Count the episodes that begin now, of those that wait, by the tokens of their first contexts.

        Args:
            num_free: further turns that the engine could be given, beside all that were asked for.
        """
        if not self._limit:
            return sum(1 for _ in sizes)
        now = time.monotonic()
        self._expected = {packed: until for packed, until in self._expected.items() if until > now}
        num_free -= len(self._expected)
        if self._is_over:
            return sum(1 for _ in itertools.islice(sizes, max(num_free, 0)))
        mean = self._mean_tokens
        tokens_left = (self.capacity or math.inf) - sum(max(one.num_tokens, mean) for one in self._contexts.values())
        count = 0
        for size in sizes:
            tokens_left -= max(size, mean)
            if tokens_left < 0 and count >= num_free:
                break
            count += 1
        return count

    def chosen(self, asked: Mapping[int, T], num_free: int) -> list[T]:
        """Choose the turns that the engine is given now, in that order, of those by episode that were asked for, as they were.

        Beyond a first one, their contexts and those that it works on fit into its cache: what waits inside the engine evicts others.
        """
        if not self._limit:
            return list(asked.values())
        if self._moved:
            asked = {packed: asked[packed] for packed in self.as_asked(asked)}
        found: list[T] = []
        held = sum(self._running.values())
        for packed in itertools.islice(self._in_order(asked, num_free), max(num_free, 0)):
            held += self._contexts[packed].num_tokens
            if 0 < self.capacity < held and (found or self._running):
                break
            found.append(asked[packed])
        return found

    def last(self, asked: Iterable[int]) -> list[Waiting]:
        """Of turns that wait, by episode, what each has of the cache: those that have nothing of it first, of these the latest."""
        found = []
        for packed in asked:
            context = self._contexts[packed]
            kept = self._cached.get(packed, 0) if self.capacity else context.num_tokens * (context.num_turns > context.num_elsewhere)
            found.append(Waiting(packed, context.num_tokens, min(kept, context.num_tokens)))
        found.sort(key=lambda one: self._asked_at[one.episode], reverse=True)
        return sorted(found, key=lambda one: one.num_cached > 0)

    @property
    def turn_tokens(self) -> float:
        """Mean number of tokens that were generated in a turn; 0: none has ended."""
        return self._num_generated / max(self._num_answered, 1)

    def as_asked(self, asked: Iterable[int]) -> list[int]:
        """These episodes in the order in which they asked for their turns."""
        return sorted(asked, key=self._asked_at.__getitem__)

    def _in_order(self, asked: Mapping[int, T], num_free: int) -> Iterator[int]:
        is_known = sum(self._num_ended.values()) >= _LEAST_ENDED
        if not self._is_over and (len(asked) <= num_free or not is_known):
            yield from asked
            return
        least = self._num_given - max(_OVERTAKEN * len(self._contexts), _LEAST_OVERTAKEN)
        first = dict.fromkeys(itertools.takewhile(lambda packed: self._asked_at[packed].num_given <= least, asked))
        yield from first
        if self._is_over:
            there = self._cached.keys() & asked.keys()
            yield from sorted(there - first.keys(), key=self._asked_at.__getitem__)
            yield from (packed for packed in asked if packed not in there and packed not in first)
            return
        rest = self._expected_rest()
        rank: Callable[[int], float] = lambda num_turns: -rest[min(num_turns, len(rest) - 1)]  # noqa: E731
        for _, alike in itertools.groupby(sorted(self._waiting, key=rank), key=rank):
            waiting = heapq.merge(*(self._waiting[num_turns] for num_turns in alike), key=self._asked_at.__getitem__)
            yield from (packed for packed in waiting if packed in asked and packed not in first)

    @property
    def _is_over(self) -> bool:
        """Whether the contexts of all episodes do not fit into the cache."""
        return 0 < self.capacity < self._num_tokens

    @property
    def _mean_tokens(self) -> float:
        """The context with which episodes end, on average; 0: not known."""
        return self._ended_tokens / max(sum(self._num_ended.values()), 1)

    def _expected_rest(self) -> list[float]:
        """Turns that an episode is expected to have yet, by how many it has had."""
        rest = [0.0] * (max(itertools.chain(self._num_ended, self._num_continued)) + 1)
        for had in reversed(range(len(rest) - 1)):
            ended, continued = self._num_ended[had], self._num_continued[had]
            rest[had] = (1 + rest[had + 1]) * continued / max(ended + continued, 1)
        return rest


# ---- turns that cross processes


def is_limited(bounds: Bounds) -> bool:
    """Whether an episode, or a turn of it, may take only so long."""
    return bounds.timeout_s is not None or bounds.turn_timeout_s is not None


class Window(NamedTuple):
    """The oldest and the newest version of the speaker's weights that the episode may use."""

    oldest: int
    newest: int


class Fault(NamedTuple):
    """Why a turn was not played."""

    kind: str
    """`too_long`, `invalid`, or `gone`: the engine had other weights, or was off its devices."""
    what: str


BEGUN = "begun"
"""In place of what came of a turn: its engine has it now, and its time begins."""


_TOKENS: Mapping[str, type] = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "kv_stale": np.bool_}
"""Columns of generated tokens: of a turn that is asked for, those that it goes on from."""


_read_sampling = msgspec.json.Decoder(Sampling).decode


def _batch(ids: Sequence[int], tokens: Sequence[Sequence[Any]], texts: Sequence[str], records: Sequence[object], **more: Ragged) -> Batch:
    columns = {name: Ragged.of([row[at] for row in tokens], kind) for at, (name, kind) in enumerate(_TOKENS.items())}
    return Batch(np.array(ids, np.int64), {**columns, "text": Ragged.texts(texts), "turn": Ragged.json(records), **more})


# ---- who asks


@final
class RemoteSpeaker:
    """A role's rollout engine in other processes, for the episodes of this one."""

    def __init__(
        self,
        role: str,
        language: Language,
        place_of: Callable[[int], str],
        window_of: Callable[[int], Window],
        is_limited: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """
        Args:
            place_of: the process that takes an episode's turns.
            window_of: the versions of the weights that it may use.
            is_limited: whether it is to be told when an episode's turn begins, since that may take only so long.
        """
        self._is_limited = is_limited
        self._role = role
        self._language = language
        self._place_of, self._window_of = place_of, window_of
        self._asked: dict[int, tuple[int, Request]] = {}
        """Episode -> number of its turn, and the turn."""
        self._leaving: dict[str, list[tuple[Request, Mapping[str, object]]]] = {}
        """Process -> what to tell it: a turn, and what of it."""
        self._made: list[Generated] = []
        self._refused: list[tuple[int, M2FlowError]] = []
        self._begun: list[int] = []
        self._num_asked = 0

    def language(self) -> Language:
        return self._language

    def add(self, requests: Sequence[Request]) -> None:
        """Ask for turns."""
        for request in requests:
            self._num_asked += 1
            self._asked[request.id] = self._num_asked, request
            how = {"seed": request.seed, "sampling": msgspec.json.encode(request.sampling).decode(), "window": self._window_of(request.id)}
            how |= {"tells": True} if self._is_limited(request.id) else {}
            self._tell(self._num_asked, request, how)

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        """Give up turns; each as it was asked for, without the tokens that it has by now elsewhere. An answer that has come is dropped."""
        found, gone = [], set(ids)
        self._made = [one for one in self._made if one.id not in gone]
        self._refused = [one for one in self._refused if one[0] not in gone]
        self._begun = [packed for packed in self._begun if packed not in gone]
        for packed in sorted(gone):
            if packed in self._asked:
                number, request = self._asked.pop(packed)
                self._tell(number, request, {})
                found.append(_begun(request))
        return found

    def _tell(self, number: int, request: Request, what: Mapping[str, object]) -> None:
        record = {"role": self._role, "number": number, **what}
        self._leaving.setdefault(self._place_of(request.id), []).append((request, record))

    def take_asked(self) -> list[tuple[str, Batch]]:
        """What is to be sent: the process, and the turns to ask it for or to give up, in their order."""
        leaving, self._leaving = self._leaving, {}
        found = []
        for place, told in leaving.items():
            prefixes = [(r.prefix, r.prefix_logprobs, r.prefix_versions, r.prefix_kv_stale) for r, _ in told]
            contexts: list[Any] = [r.prompt for r, _ in told]
            more = {"context": Ragged.of(contexts, np.int32)}
            found.append((place, _batch([r.id for r, _ in told], prefixes, [""] * len(told), [record for _, record in told], **more)))
        return found

    def answered(self, rows: Batch, row: int, record: Mapping[str, Any]) -> None:
        """Take in what came of a turn. Raises `InternalError`: it should have been played, and could not be."""
        packed = int(rows.ids[row])
        number, request = self._asked.get(packed, (0, None))
        if request is None or number != record["number"]:
            return
        if BEGUN in record:
            self._begun.append(packed)
            return
        fault = record["fault"]
        if fault is not None and fault[0] == "gone":
            raise InternalError(f"a turn of {self._role} in {SampleId.unpack(packed)} could not be played: {fault[1]}")
        del self._asked[packed]
        if fault is not None:
            self._refused.append((packed, (PromptTooLong if fault[0] == "too_long" else EngineError)(fault[1])))
            return
        columns: Any = {name: np.array(rows.ragged(name).row(row), kind) for name, kind in _TOKENS.items()}
        self._made.append(replace(_begun(request), **columns, finish=Finish(record["finish"]), text=str(rows.ragged("text").item(row))))

    def refused(self) -> list[tuple[int, M2FlowError]]:
        """The turns that were not played, since they do not fit or can't be, by episode."""
        refused, self._refused = self._refused, []
        return refused

    def begun(self) -> list[int]:
        """The episodes whose turn its engine has now, of those whose time is limited."""
        begun, self._begun = self._begun, []
        return begun

    def step(self) -> list[Generated]:
        made, self._made = self._made, []
        return made

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        return [_begun(self._asked[packed][1]) for packed in ids if packed in self._asked]

    def progress(self) -> dict[int, int]:
        return {packed: len(request.prefix) for packed, (_, request) in self._asked.items()}

    @property
    def num_unfinished(self) -> int:
        return len(self._asked) + len(self._made) + len(self._refused)

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._asked), 0, 0, 0)


def _begun(request: Request) -> Generated:
    """A turn with the tokens that it was asked to go on from."""
    given = [request.prefix, request.prefix_logprobs, request.prefix_versions, request.prefix_kv_stale]
    columns: Any = {name: np.array(values, kind) for (name, kind), values in zip(_TOKENS.items(), given, strict=True)}
    return Generated(request.id, np.array(request.prompt, np.int32), **columns, finish=Finish.ABORT, text="")


# ---- who answers


@dataclass(frozen=True)
class _Guest:
    """A turn of another process's episode."""

    sender: str
    role: str
    number: int
    episode: int


@dataclass(frozen=True)
class GuestTurn:
    """A turn of another process's episode, as the engine's queue has it."""

    request: Request
    begins: Callable[[], None]
    """Is called when the engine has it."""
    refused: Callable[[M2FlowError], None]
    """Is called where the engine does not take it."""


class TakesTurns(Protocol):
    """An engine with its queue (`m2flow.agents.episodes.Episodes`)."""

    def ask_for(self, turn: GuestTurn) -> None: ...

    def abort(self, ids: Iterable[int]) -> Sequence[Generated]: ...


_MOST_KNOWN = 1 << 16
"""Episodes of others whose contexts are known by an id."""


@final
class Guests:
    """The turns that this process's engines play for episodes of others."""

    def __init__(self, engine_of: Callable[[str], TakesTurns], fault_of: Callable[[str, Window], str]) -> None:
        """
        Args:
            fault_of: why a role's engine can't play a turn now, with weights of that window; empty: it can.
        """
        self._engine_of, self._fault_of = engine_of, fault_of
        self._here: dict[int, _Guest] = {}
        """By the request's id in its engine."""
        self._id_of: dict[tuple[str, str, int], int] = {}
        self._answers: dict[str, list[tuple[_Guest, Generated | Fault | None]]] = {}
        self._num_ids = 0
        self._own: dict[tuple[str, str, int], int] = {}
        """Process, role and episode -> id of its requests, by which the queue knows what the cache has of it."""

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, request: int) -> bool:
        return request in self._here

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take(self, sender: str, rows: Batch) -> None:
        """Begin the turns that a process asks for, and give up those that it does not want any more."""
        for row in range(len(rows)):
            record: Any = rows.ragged("turn").item(row)
            guest = _Guest(sender, record["role"], record["number"], int(rows.ids[row]))
            if "seed" in record:
                self._begin(guest, rows, row, record)
            elif (own := self._id_of.get((sender, guest.role, guest.number))) is not None:
                self._leaves(own)
                self._engine_of(guest.role).abort([own])

    def _begin(self, guest: _Guest, rows: Batch, row: int, record: Mapping[str, Any]) -> None:
        if fault := self._fault_of(guest.role, Window(*record["window"])):
            self._answer(guest, Fault("gone", fault))
            return
        prefix: Any = [tuple(rows.ragged(name).row(row).tolist()) for name in _TOKENS]
        own = self._id_for(guest)
        context = tuple(rows.ragged("context").row(row).tolist())
        request = replace(Request(own, context, record["seed"], _read_sampling(record["sampling"]), *prefix), keeps_kv=True)
        self._here[own] = guest
        self._id_of[guest.sender, guest.role, guest.number] = own

        def begins() -> None:
            if record.get("tells"):
                self._answer(guest, None)

        def refused(error: M2FlowError) -> None:
            kind = "too_long" if isinstance(error, PromptTooLong) else "invalid"
            what = error.what.replace(str(SampleId.unpack(own)), str(SampleId.unpack(guest.episode)))
            self._answer(self._leaves(own), Fault(kind, what))

        self._engine_of(guest.role).ask_for(GuestTurn(request, begins, refused))

    def _id_for(self, guest: _Guest) -> int:
        """An id that no sample has here: samples of this process, and of another that went on with the episode, may be in the engine."""
        whose = guest.sender, guest.role, guest.episode
        if whose not in self._own:
            if len(self._own) >= _MOST_KNOWN:
                self._own.clear()
            self._num_ids += 1
            self._own[whose] = -self._num_ids
        return self._own[whose]

    def keep(self, made: Iterable[Generated]) -> list[Generated]:
        """Keep the turns of others among what an engine has finished, to be answered; returns the rest."""
        rest = []
        for one in made:
            if one.id in self._here:
                self._answer(self._leaves(one.id), one)
            else:
                rest.append(one)
        return rest

    def send_away(self, what: str, role: str | None = None) -> None:
        """Give up all turns, of a role or of all: its engine gets other weights, or leaves its devices. Who asked has given them up too."""
        for own, guest in list(self._here.items()):
            if role in (None, guest.role):
                self._leaves(own)
                self._engine_of(guest.role).abort([own])
                self._answer(guest, Fault("gone", what))

    def lost(self, sender: str) -> None:
        """Give up the turns of a process that is gone."""
        self._answers.pop(sender, None)
        for own in [own for own, guest in self._here.items() if guest.sender == sender]:
            self._engine_of(self._leaves(own).role).abort([own])

    def take_answers(self) -> list[tuple[str, Batch]]:
        """What is to be sent: the process that asked, and what came of its turns."""
        answers, self._answers = self._answers, {}
        return [(sender, _answer_of(told)) for sender, told in answers.items()]

    def _leaves(self, own: int) -> _Guest:
        guest = self._here.pop(own)
        del self._id_of[guest.sender, guest.role, guest.number]
        return guest

    def _answer(self, guest: _Guest, what: Generated | Fault | None) -> None:
        """Tell who asked what came of a turn; None: its engine has it."""
        self._answers.setdefault(guest.sender, []).append((guest, what))


def _answer_of(told: Sequence[tuple[_Guest, Generated | Fault | None]]) -> Batch:
    tokens: list[Sequence[Any]] = []
    texts: list[str] = []
    records: list[object] = []
    for guest, what in told:
        record: dict[str, object] = {"role": guest.role, "number": guest.number}
        if not isinstance(what, Generated):
            tokens.append([()] * len(_TOKENS))
            record |= {BEGUN: True} if what is None else {}
        else:
            tokens.append([what.tokens, what.logprobs, what.versions, what.kv_stale])
            record["finish"] = int(what.finish)
        texts.append(what.text if isinstance(what, Generated) else "")
        records.append({**record, "fault": what if isinstance(what, Fault) else None})
    return _batch([guest.episode for guest, _ in told], tokens, texts, records)
