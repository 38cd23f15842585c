"""Run the episodes of a rollout engine: agents on an event loop, their turns as requests to the engine, beside its other samples.

    a worker's thread                                the event loop's thread, one a process
    Episodes.begin ------------------------------->  agent(chat, row)
    Episodes.step: engine.add  <---- turn ---------  await chat.say(...)
                   engine.step ----- reply ------->  goes on
    a finished row             <---- end ----------  returns its reward

An episode is one sample to all that knows samples: it is placed, preempted, resumed and reported as one, and its row has one reward. All
its turns go to the engine that holds its prefix. While an agent waits for a tool, the engine decodes the others.

All tokens are kept on the worker's side (`Transcript`). Each turn's random numbers are keyed by its path: the sample's seed, a hash of all
ids before it, and how often the episode has been just there. So a turn that is asked for again gives the same tokens, whatever else runs.

Conversations. The tokens of each lie together in the row (`Strand`), in the order of their names, so nothing depends on which was first. Of
one episode an engine has one turn at a time; those that are asked for meanwhile wait, and other episodes fill its batch.

Order. An engine that is given all turns as they come evicts each context from its KV cache before its next turn, where there are more
episodes than the cache has room for, and reads it again. So `TurnQueue` gives an engine no more turns than it decodes at once, those
whose context it still has first, and begins no more episodes than the cache holds, unless the batch would not be full.

Speakers. A turn of another role goes to that role's engine, in this process beside what it has of its own, or in another one
(`m2flow.agents.remote_speakers`). The episode stays one sample, and its row has what each of them said.

Repetition. A stopped episode's row has its tokens, and the record of its turns and tool calls (the column `episode`). It goes on from there
anywhere: the agent is called again, what it asks is answered from the row as long as that has an answer, and a turn that was cut off
midway continues from its tokens. So a turn is written down before its agent hears it, a tool's result before an engine is given it, and
that a tool with effects begins before it does (`take_urgent`): one record for all episodes of a pass that have something to write.

Branches. An episode that goes on from a turn of another (`Transcript.before`) is repeated likewise up to there. What the model said in
those turns is in its row as `Segment.SHARED`, like a tool's text: no loss sees it, and it is no token that this episode generated. One
that is stopped before a token of its own begins anew, from its parent's row.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import math
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from m2flow.agents.chat import Agent, Asked, Chat, Known, Passed, Pieces, Reply, Resources, Rewards, Table, Told, not_recorded, reward_of
from m2flow.agents.conversation import Conversation, Recorded, Strand, Transcript
from m2flow.agents.remote_speakers import RemoteSpeaker
from m2flow.agents.tools import EpisodeFailed, EventLoop, Outcome, ToolCall
from m2flow.engines.contract import Generated, Language, Occupancy, Request, RolloutEngine
from m2flow.errors import InternalError, M2FlowError, NoReward, PromptTooLong
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Sampling
from m2flow.samples import MAIN, Finish, Prompt, Sample, SampleId, Segment, keyed_bits

_PATIENCE_S = 0.01
"""Longest that a step waits for agents where the engine has nothing to do."""
_PATIENCE_FOR_SPEAKERS_S = 0.001
"""The same where a speaker in another process has its turn."""
_READY_SHARE = 8
"""An engine that decodes by itself gets one turn more for so many that it decodes at once."""
_MOST_SHOWN = 3
"""Failures of agents that are printed with traceback."""


# ---- one episode


@dataclass(frozen=True)
class EpisodeStart:
    """An episode that is to begin, or to go on."""

    request: Request
    """The sample's; its prompt is not used: the agent says the first word."""
    agent: Callable[[], Callable[..., object]]
    """What gives the agent when called without arguments, fresh for this episode."""
    row: Sample
    bounds: Bounds
    stopped: Transcript | None = None
    branch: str = ""
    """A word that the random numbers of turns depend on, too, where an episode goes another way than its record."""
    told: Told | None = None


@dataclass(eq=False)
class _Turn:
    """A turn that an agent waits for."""

    episode: _Episode
    asked: Asked
    answer: asyncio.Future[Reply | None]
    engine: Episodes
    """The engine of who speaks, which takes the turn."""
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    """Of the time that it may take, from when the engine has it."""
    request: Request | None = None
    strand: Strand | None = None
    """Where its tokens go, once the engine has it."""


class TurnPlace(NamedTuple):
    """Where in its episode a turn is."""

    by: str
    """Who speaks, of the rollout's `speakers`; empty: the policy."""
    sequence: tuple[str, int]
    """Its conversation, and how many sequences this has before the turn's."""
    num_sampled: int
    """Tokens that were sampled in the sequence by now."""


@final
class _Episode:
    """One episode, on the worker's side. What its agent calls only posts messages to that."""

    def __init__(self, start: EpisodeStart, host: Episodes) -> None:
        self.start = start
        self.id = start.request.id
        self.transcript = Transcript()
        stopped = start.stopped or Transcript()
        # One that was stopped before its first turn has a row without a token.
        self.recorded = {name: Recorded(strands) for name, strands in stopped.conversations.items() if strands[0].tokens}
        """The conversations that have not caught up with their record yet."""
        self.known_tools, self.kept_turns = dict(stopped.tools), stopped.kept_turns
        self.used_tools: dict[str, dict[str, object]] = {}
        """What a branch's agent has asked for of the record."""
        if self.kept_turns is None:
            self.transcript.tools = dict(self.known_tools)
        self.transcript.point, self.transcript.row = stopped.point, start.row.id.pack()
        self.transcript.order = None if stopped.order is None else []
        self.waiting: _Turn | None = None
        """The turn that an engine works on."""
        self.queued: deque[_Turn] = deque()
        """Turns of other conversations meanwhile: an engine knows a sample by its identity, once."""
        self.occurrences: Counter[int] = Counter()
        self.num_effects = 0
        """Tools with effects that run now."""
        num_recorded = sum(len(strands[-1].tokens) for strands in stopped.conversations.values() if strands)
        self.num_tokens = max(num_recorded, _size_of(start.request.prompt))
        """About the tokens of the context that its next turn follows."""
        self.task: asyncio.Task[None] | None = None
        self.limit = asyncio.Timeout(None)
        self.left_s: float | None = None
        """Seconds that it may take yet, while a turn of it waits for an engine."""
        self.host = host
        self.threads: Executor = host.threads

    # What the agent's chats call, on the loop's thread

    async def turn(self, asked: Asked) -> Reply | None:
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        turn = _Turn(self, asked, answer, self.host.engine_of(self, asked.by))
        self.host.post(lambda: self.host.take_turn(self, turn))
        try:
            async with turn.limit as limit:
                return await answer
        except TimeoutError:
            if limit.expired():
                raise EpisodeFailed("turn_timed_out", f"a turn took longer than {self.start.bounds.turn_timeout_s} s") from None
            raise
        finally:
            if answer.cancelled():
                self.host.post(lambda: self.host.drop_turn(self, turn))

    @property
    def is_limited(self) -> bool:
        """Whether it, or a turn of it, may take only so long."""
        bounds = self.start.bounds
        return bounds.timeout_s is not None or bounds.turn_timeout_s is not None

    @property
    def lost_resources(self) -> bool:
        before = self.known_tools if self.kept_turns is None else self.used_tools
        return any(one.get("opens") and "result" in one for one in before.values())

    def known(self, key: str) -> Known | None:
        found: Any = self.known_tools.get(key)
        if found is None:
            return None
        if self.kept_turns is not None:
            if sum(len(strand.turns) for strand in self.transcript.strands) > self.kept_turns:
                return None
            self.used_tools[key] = found
            self.host.post(lambda: self.transcript.tools.update({key: found}))
        return Known(Outcome(str(found["result"]), bool(found["is_error"])) if "result" in found else None)

    async def began(self, key: str, call: ToolCall, *, has_effects: bool, opens: bool) -> None:
        what = {"name": call.name, "arguments": dict(call.arguments)} | ({"opens": True} if opens and has_effects else {})
        await self._noted(key, what, has_effects)

    async def returned(self, key: str, outcome: Outcome, *, has_effects: bool) -> None:
        await self._noted(key, {"result": outcome.text, "is_error": outcome.is_error}, has_effects)

    def passed(self, name: str, start_ns: int, end_ns: int, about: Mapping[str, object]) -> None:
        self.host.record(self.id, name, start_ns, end_ns, about)

    async def _noted(self, key: str, what: Mapping[str, object], has_effects: bool) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.host.post(lambda: self.host.note(self, key, what, done, has_effects=has_effects))
        if has_effects:
            await done

    def waits(self) -> None:
        """Stop the clock: a turn waits until an engine takes it."""
        if (until := self.limit.when()) is not None:
            with contextlib.suppress(RuntimeError):  # It is over.
                self.limit.reschedule(None)
                self.left_s = until - asyncio.get_running_loop().time()

    def waits_no_more(self, turn: _Turn) -> None:
        """Have the clock go on."""
        now = asyncio.get_running_loop().time()
        with contextlib.suppress(RuntimeError):
            if (seconds := self.start.bounds.turn_timeout_s) is not None:
                turn.limit.reschedule(now + seconds)
        with contextlib.suppress(RuntimeError):
            if self.left_s is not None:
                self.limit.reschedule(now + self.left_s)
                self.left_s = None

    # The agent

    def begin(self) -> None:
        """Begin the episode; to be called by the loop."""
        self.task = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        """Run the agent to its end, and report it."""
        columns: dict[str, object] = {}
        added: dict[str, object] = {}
        try:
            found = await self._played()
            columns = {"reward": math.nan if found.reward is None else found.reward}
            added = {"parts": dict(found.parts)} if found.parts else {}
            added |= {"rewards": dict(found.of), "rewarded": dict(found.names)}
        except EpisodeFailed as failed:
            columns, added = {"failure": failed.how}, {"error": str(failed)}
        except NoReward as error:
            columns, added = {"failure": "no_reward"}, {"error": str(error)}
        except asyncio.CancelledError:
            return
        except Exception as error:
            columns, added = {"failure": "raised"}, {"error": f"{type(error).__name__}: {error}"}
            self.host.show(self.id, traceback.format_exc())
        self.host.post(lambda: self.host.end(self, columns, added))

    async def _played(self) -> Rewards:
        self.limit = asyncio.timeout(self.start.bounds.timeout_s)
        try:
            async with self.limit, contextlib.AsyncExitStack() as stack:
                agent = Agent.of(self.start.agent())
                resources, sampling, bounds = Resources(stack), self.start.request.sampling, self.start.bounds
                table = Table(
                    self,
                    resources,
                    self.transcript.rng_seed(self.start.request.seed),
                    max_tokens=sampling.max_new_tokens,
                    max_turns=bounds.max_turns,
                    max_conversations=bounds.max_conversations,
                    stop=sampling.stop,
                    stop_of={name: own.stop for name, own in bounds.drawn_by},
                    make=lambda by: Conversation(self.host.engine_of(self, by).language, bounds.history, agent.tool_calls),
                    speakers=[name for name, _ in bounds.speakers],
                    told=self.start.told,
                    shared=[kind for _, kind in agent.resources],
                    end_run=self.host.end_run,
                    is_branch=self.kept_turns is not None,
                    at_once=lambda: self.host.post(self.transcript.lose_order),
                )
                chat = Chat(table, table.make(""), MAIN)
                opened = {name: await resources.get(kind) for name, kind in agent.resources}
                return reward_of(await agent.function(chat, self.start.row, **opened), table)  # type: ignore[misc]
        except TimeoutError:
            if self.limit.expired():
                raise EpisodeFailed("timed_out", f"it took longer than {self.start.bounds.timeout_s} s") from None
            raise


# ---- which turns an engine is given, and which episodes begin


class _Context(NamedTuple):
    """What the next turn of an episode follows."""

    num_tokens: int
    num_turns: int
    """Turns that the engine has answered."""


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
    all others (`_OVERTAKEN`).

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
        self._asked_at: dict[int, tuple[int, int]] = {}
        """Episode -> how many they were when it asked for its turn, and how many were asked for before that."""
        self._num_asked = 0
        self._waiting: dict[int, dict[int, None]] = {}
        """The episodes whose turn waits, as they asked, by the turns that they had: all are not to be sorted in each step."""
        self._expected: dict[int, float] = {}
        """Episodes that are likely to ask for a turn at once, and until when that is so."""
        self._capacity, self._looked_at = 0, -math.inf

    def look(self, occupancy: Callable[[], Occupancy]) -> None:
        """See how large the engine's cache is, from time to time."""
        if self._limit and time.monotonic() - self._looked_at > _LOOKED_S:
            self._capacity, self._looked_at = occupancy().kv_capacity, time.monotonic()

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

    def begun(self, packed: int, num_tokens: int) -> None:
        """Note that an episode has begun, whose first context will have about so many tokens."""
        self._follows(packed, num_tokens, 0)
        self._expected[packed] = time.monotonic() + _OPENS_S

    def asked(self, packed: int, num_tokens: int) -> None:
        """Note a turn that an episode asks for, behind a context of so many tokens."""
        self._expected.pop(packed, None)
        known = self._contexts.get(packed)
        num_turns = 0 if known is None else known.num_turns
        self._num_continued[num_turns] += 1
        self._asked_at[packed] = self._num_given, self._num_asked
        self._num_asked += 1
        self._follows(packed, num_tokens, num_turns)
        of_same = self._waiting.setdefault(num_turns, {})
        of_same.pop(packed, None)  # A turn that was given up.
        of_same[packed] = None

    def _follows(self, packed: int, num_tokens: int, num_turns: int) -> None:
        self._num_tokens += num_tokens - (self._contexts[packed].num_tokens if packed in self._contexts else 0)
        self._contexts[packed] = _Context(num_tokens, num_turns)

    def given(self, packed: int, num_tokens: int) -> None:
        """Note that the engine has been given a turn."""
        self._num_held += num_tokens - self._cached.pop(packed, 0)
        self._running[packed] = num_tokens
        self._waits_no_more(packed)
        self._num_given += 1
        self._evict()

    def answered(self, packed: int, num_tokens: int) -> None:
        """Note that the engine has ended a turn, after which its cache has a context of so many tokens."""
        self._leave(packed, num_tokens)
        if packed in self._contexts:
            self._follows(packed, num_tokens, self._contexts[packed].num_turns + 1)
            self._expected[packed] = time.monotonic() + _REPLIES_S

    def taken_back(self, packed: int) -> None:
        """Note that the engine has a turn no more."""
        self._leave(packed, self._running.get(packed, 0))

    def _waits_no_more(self, packed: int) -> None:
        if packed in self._contexts:
            self._waiting.get(self._contexts[packed].num_turns, {}).pop(packed, None)

    def _leave(self, packed: int, num_tokens: int) -> None:
        if packed in self._running:
            self._num_held += num_tokens - self._running.pop(packed)
            self._cached[packed] = num_tokens
            self._evict()

    def _evict(self) -> None:
        while self._cached and self._num_held > self._capacity:
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
        tokens_left = (self._capacity or math.inf) - sum(max(one.num_tokens, mean) for one in self._contexts.values())
        count = 0
        for size in sizes:
            tokens_left -= max(size, mean)
            if tokens_left < 0 and count >= num_free:
                break
            count += 1
        return count

    def chosen(self, asked: Mapping[int, _Turn], num_free: int) -> list[_Turn]:
        """Choose the turns that the engine is given now, in that order, of those by episode that were asked for, as they were.

        Beyond a first one, their contexts and those that it works on fit into its cache: what waits inside the engine evicts others.
        """
        if not self._limit:
            return list(asked.values())
        found: list[_Turn] = []
        held = sum(self._running.values())
        for packed in itertools.islice(self._in_order(asked, num_free), max(num_free, 0)):
            held += self._contexts[packed].num_tokens
            if 0 < self._capacity < held and (found or self._running):
                break
            found.append(asked[packed])
        return found

    def _in_order(self, asked: Mapping[int, _Turn], num_free: int) -> Iterator[int]:
        is_known = sum(self._num_ended.values()) >= _LEAST_ENDED
        if not self._is_over and (len(asked) <= num_free or not is_known):
            yield from asked
            return
        least = self._num_given - max(_OVERTAKEN * len(self._contexts), _LEAST_OVERTAKEN)
        first = dict.fromkeys(itertools.takewhile(lambda packed: self._asked_at[packed][0] <= least, asked))
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
        return 0 < self._capacity < self._num_tokens

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


# ---- the episodes of an engine


@final
class Episodes:
    """A rollout engine together with the episodes of its role. What is no episode goes to the engine as it is."""

    def __init__(
        self, engine: RolloutEngine | RemoteSpeaker, loop: EventLoop, roles: Mapping[str, Episodes] | None = None, num_slots: int = 0
    ) -> None:
        """
        Args:
            roles: those of the process by role, this one included. Those that speak in its episodes must be there when these begin.
            num_slots: samples that the engine decodes at once; 0: it is given all that there are.
        """
        self.language: Language = engine.language()
        self.threads = loop.threads
        self._engine = engine
        self._is_remote = isinstance(engine, RemoteSpeaker)
        self._loop = loop
        self._roles = {} if roles is None else roles
        is_paced = not isinstance(engine, RemoteSpeaker) and engine.capabilities.self_paced
        self._queue = TurnQueue(0 if self._is_remote else num_slots, max(num_slots // _READY_SHARE, 1) * is_paced)
        self._episodes: dict[int, _Episode] = {}
        self._starts: dict[int, _Episode] = {}
        """Those that have not begun."""
        self._asked: dict[int, _Turn] = {}
        """Turns that the engine has not been given yet, by episode; between two steps those of episodes that are to be written down."""
        self._turns: dict[int, _Turn] = {}
        """Those that it has: of its role's episodes, and of others in which the role speaks."""
        self._posted: deque[Callable[[], None]] = deque()
        self._has_posted = threading.Event()
        self._ended: list[Generated] = []
        self._num_sampled: dict[int, int] = {}
        """Episode -> its tokens without those of the turn that an engine works on, as far as it is not in `_changed`."""
        self._changed: set[int] = set()
        """Episodes whose number is to be counted anew: counting all of them in each step would take longer than the step."""
        self._catching_up: set[int] = set()
        """Episodes with a conversation that is not at the end of its record."""
        self._listened: dict[int, Asked] = {}
        """Turns that somebody hears while an engine works on them, by episode; of those that it has no more until that is noticed."""
        self.is_recorded = False
        """Whether somebody writes episodes down (`take_urgent`), so that they wait for it."""
        self._urgent: dict[int, list[tuple[asyncio.Future[Any], object]]] = {}
        """Episodes whose record is to be written down; with what waits for it, and the answer that it gets then."""
        self._num_shown = 0
        self.before_turn: Callable[[TurnPlace], None] | None = None
        """Is called with each turn of this role's episodes before an engine is given it."""
        self.stepped = (0, 0)
        """When the engine was last asked to decode, in ns, and how many it had then."""
        self._pieces = Pieces()
        self.record: Passed = not_recorded
        """Is called with each turn and tool call that has ended, on the loop's thread."""

    def begin(self, starts: Iterable[EpisodeStart]) -> None:
        """Begin episodes, or go on with stopped ones."""
        for start in starts:
            if start.request.id in self._episodes:
                raise InternalError(f"episode {SampleId.unpack(start.request.id)} runs already")
            episode = self._episodes[start.request.id] = _Episode(start, self)
            self._changed.add(episode.id)
            if episode.recorded:
                self._catching_up.add(episode.id)
            self._starts[episode.id] = episode
        self._begin_some()

    def _begin_some(self) -> None:
        """Begin episodes as long as their contexts fit into the engine's cache, or it would not decode as many as it can."""
        if not self._starts:
            return
        self._queue.look(self._engine.occupancy)
        num_free = self._queue.num_free(self._engine.num_unfinished) - len(self._asked)
        num = self._queue.num_to_begin((episode.num_tokens for episode in self._starts.values()), num_free)
        for episode in list(itertools.islice(self._starts.values(), num)):
            del self._starts[episode.id]
            self._queue.begun(episode.id, episode.num_tokens)
            self._loop.call(episode.begin)

    def cache_lost(self) -> None:
        """Note that the engine has other weights, or gives its cache back: it has no context in it any more."""
        self._queue.cache_lost()

    def engine_of(self, episode: _Episode, by: str) -> Episodes:
        """The engine of one who speaks in an episode."""
        return self._roles[dict(episode.start.bounds.speakers)[by]] if by else self

    def lets_speak(self, role: str) -> bool:
        """Whether an episode runs in which this role, another than its own, may speak."""
        return any(role == other for episode in self._episodes.values() for _, other in episode.start.bounds.speakers)

    # What the loop's thread posts, and this one does in `step`

    def post(self, message: Callable[[], None]) -> None:
        """Have the worker's thread do something at its next step. Any thread may call this."""
        self._posted.append(message)
        if not self._has_posted.is_set():  # It is cleared before what was posted is read.
            self._has_posted.set()

    def end_run(self, error: M2FlowError) -> None:
        """Have the worker's thread raise an error. Any thread may call this."""

        def fail() -> None:
            raise error

        self.post(fail)

    def show(self, packed: int, trace: str) -> None:
        """Print the first few errors of agents."""
        self._num_shown += 1
        if self._num_shown <= _MOST_SHOWN:
            print(f"the agent raised on sample {SampleId.unpack(packed)}:\n{trace}", file=sys.stderr, flush=True)

    def take_turn(self, episode: _Episode, turn: _Turn) -> None:
        """Give a turn to the engine, or answer it from the record."""
        if self._episodes.get(episode.id) is not episode or turn.answer.cancelled():
            return
        asked = turn.asked
        strands = episode.transcript.conversations.get(asked.name, [])
        context = (*(() if asked.begins else strands[-1].tokens), *asked.ids)
        path = (Strand(asked.name) if asked.begins else strands[-1]).path(asked.ids)
        branch = (episode.start.branch,) if episode.start.branch else ()
        seed = keyed_bits(episode.start.request.seed, path, episode.occurrences[path], *branch)
        episode.occurrences[path] += 1
        drawn = dict(episode.start.bounds.drawn_by).get(asked.by, episode.start.request.sampling)
        sampling = _sampling_of(drawn, asked.max_new_tokens, asked.stop)
        turn.request = request = Request(episode.id, context, seed, sampling, keeps_kv=True)
        recorded = episode.recorded.get(asked.name)
        if recorded is not None and not recorded.is_used_up:
            found = recorded.take(asked, request)
            if found is None:
                failed = EpisodeFailed("diverged", "the agent did something else when it was repeated; take random numbers from chat.rng")
                self._loop.call(_answer, turn.answer, failed)
                return
            known, kind = found
            if known.finish is not Finish.ABORT:
                self._admitted(episode, turn)
                self._answered(turn, known, kind, is_known=True)
                return
            columns = [tuple(column.tolist()) for column in (known.tokens, known.logprobs, known.versions, known.kv_stale)]
            turn.request = replace(
                request, prefix=columns[0], prefix_logprobs=columns[1], prefix_versions=columns[2], prefix_kv_stale=columns[3]
            )
        episode.queued.append(turn)
        self._go_on(episode)

    def _go_on(self, episode: _Episode) -> None:
        """Have an engine asked for the next turn of an episode, if none works on one."""
        if episode.waiting is None and episode.queued:
            turn = episode.waiting = episode.queued.popleft()
            turn.engine._asked[episode.id] = turn
            turn.engine._queue.asked(episode.id, _num_tokens_before(turn))
            if episode.is_limited:
                self._loop.call(episode.waits)

    def _ask(self) -> None:
        """Give the engines all turns that were asked for since the last time."""
        while sum(one._ask_engine() for one in self._all):
            pass  # One that does not fit is followed by another of its episode.

    @property
    def _all(self) -> Sequence[Episodes]:
        """The engines of the process, this one first."""
        return (self, *(one for one in self._roles.values() if one is not self))

    def _ask_engine(self) -> bool:
        num_free = self._queue.num_free(self._engine.num_unfinished) if self._asked else 0
        if num_free <= 0:
            return False
        self._queue.look(self._engine.occupancy)
        held = {packed for one in self._all for packed in one._urgent if packed in self._asked}
        waiting = {packed: turn for packed, turn in self._asked.items() if packed not in held} if held else self._asked
        asked = self._queue.chosen(waiting, num_free)
        for turn in asked:
            del self._asked[turn.episode.id]
            if turn.episode.is_limited:
                self._loop.call(turn.episode.waits_no_more, turn)
            if (before_turn := turn.episode.host.before_turn) is not None:
                before_turn(_place_of(turn))
        if asked:
            self._add(asked)
        return bool(asked)

    def _add(self, turns: Sequence[_Turn]) -> None:
        try:
            self._engine.add([_request_of(turn) for turn in turns])
        except M2FlowError as error:  # None of them was taken.
            if len(turns) == 1:
                self._refused(turns[0], error)
            else:
                for turn in turns:
                    self._add([turn])
        else:
            for turn in turns:
                self._taken(turn)

    def _refused(self, turn: _Turn, error: M2FlowError) -> None:
        turn.episode.waiting = None
        if isinstance(error, PromptTooLong):
            self._loop.call(_answer, turn.answer, None)
        else:
            self._loop.call(_answer, turn.answer, EpisodeFailed("invalid", error.what))
        self._go_on(turn.episode)

    def _taken(self, turn: _Turn) -> None:
        self._turns[turn.episode.id] = turn
        self._queue.given(turn.episode.id, _num_tokens_before(turn))
        if turn.asked.heard is not None:
            self._listened[turn.episode.id] = turn.asked
        if not self._is_remote:  # Whether it fits is known with the answer: until then it is not in the transcript.
            self._admitted(turn.episode, turn)

    def _given_up(self, turns: Iterable[_Turn]) -> dict[int, Generated]:
        """Take turns back from their engines; by episode what there is of each, of those that an engine had."""
        had: dict[Episodes, list[int]] = {}
        for turn in turns:
            if turn.engine._asked.pop(turn.episode.id, None) is not None and turn.episode.is_limited:
                self._loop.call(turn.episode.waits_no_more, turn)
            if turn.engine._turns.pop(turn.episode.id, None) is not None:
                had.setdefault(turn.engine, []).append(turn.episode.id)
                turn.engine._queue.taken_back(turn.episode.id)
        return {made.id: made for one, ids in had.items() for made in one._engine.abort(ids)}

    def _admitted(self, episode: _Episode, turn: _Turn) -> None:
        name = turn.asked.name
        turn.strand = episode.transcript.admitted(turn.asked)
        episode.host._changed.add(episode.id)
        if name in episode.recorded and episode.recorded[name].is_used_up:
            del episode.recorded[name]
            if not episode.recorded:
                episode.host._catching_up.discard(episode.id)

    def _answered(self, turn: _Turn, made: Generated, kind: Segment = Segment.GENERATED, *, is_known: bool = False) -> None:
        assert turn.strand is not None
        turn.episode.transcript.ended(turn.strand, made, kind)
        turn.episode.host._changed.add(turn.episode.id)
        had = len(made.tokens) if is_known else len(_request_of(turn).prefix)
        reply = Reply(made.tokens.tolist(), made.text, made.finish, made.logprobs.tolist(), had, made.num_cached, time.monotonic_ns())
        if is_known:
            self._loop.call(_answer, turn.answer, reply)
        else:
            turn.episode.host._hold(turn.episode.id, turn.answer, reply)

    def _hold(self, packed: int, answer: asyncio.Future[Any], value: object) -> None:
        """Answer once the episode's record is written down, and have an engine asked for no turn of it before."""
        self._urgent.setdefault(packed, []).append((answer, value))
        if not self.is_recorded:
            self.written([packed])

    def drop_turn(self, episode: _Episode, turn: _Turn) -> None:
        """Give up a turn that is not waited for any longer; its tokens so far stay in the episode."""
        if self._episodes.get(episode.id) is not episode:
            return
        if turn in episode.queued:
            episode.queued.remove(turn)
        elif turn is episode.waiting:
            for made in self._given_up([turn]).values():
                if turn.strand is not None:
                    episode.transcript.ended(turn.strand, made)
                    self._changed.add(episode.id)
            episode.waiting = None
            self._go_on(episode)

    def note(self, episode: _Episode, key: str, what: Mapping[str, object], done: asyncio.Future[None], *, has_effects: bool) -> None:
        """Take what a tool call was, or gave, into the record. That one without effects begins need not be written at once."""
        if self._episodes.get(episode.id) is not episode:
            return
        episode.transcript.tools[key] = {**episode.transcript.tools.get(key, {}), **what}
        if has_effects:
            episode.num_effects += -1 if "result" in what else 1
        if has_effects or "result" in what:
            self._hold(episode.id, done, None)

    def end(self, episode: _Episode, columns: Mapping[str, object], added: Mapping[str, object]) -> None:
        """Make the row of an episode that is over, with what is added to its record."""
        if self._episodes.get(episode.id) is not episode:
            return
        episode.queued.clear()
        if episode.waiting is not None:
            self.drop_turn(episode, episode.waiting)
        self._forget(episode.id, is_over=True)
        self._urgent.pop(episode.id, None)
        made = episode.transcript.generated(episode.id, *episode.transcript.end, columns)
        record: Any = made.columns["episode"]
        if speakers := episode.start.bounds.speakers:
            record = {**record, "speakers": dict(speakers)}
        self._ended.append(replace(made, columns={**made.columns, "episode": {**record, **added}}))

    def _forget(self, packed: int, *, is_over: bool = False) -> _Episode:
        self._starts.pop(packed, None)
        for one in self._all:
            one._queue.ended(packed, is_over=is_over)
        self._num_sampled.pop(packed, None)
        self._changed.discard(packed)
        self._catching_up.discard(packed)
        return self._episodes.pop(packed)

    # What stands for the engine where samples are generated

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished + len(self._asked) + len(self._starts) + self.num_away + len(self._ended)

    @property
    def num_away(self) -> int:
        """Episodes that have begun and wait for a tool, or for another's turn, or whose agent computes."""
        here = (self._turns, self._asked)
        num_here = sum(map(len, here)) if len(self._roles) < 2 else sum(turn.episode.host is self for of in here for turn in of.values())
        return len(self._episodes) - len(self._starts) - num_here

    def step(self) -> list[Generated]:
        """Do what the agents have asked for, decode one token, and return samples and episodes that finished.

        Waits a moment where no engine has anything to do and no agent has asked for anything.
        """
        self.hear()
        self._begin_some()
        is_busy = any(one._asked or one._urgent or (one._engine.num_unfinished and not one._is_remote) for one in self._all)
        if self._episodes and not self._ended and not is_busy:
            is_away = any(one._turns for one in self._all if one._is_remote)
            if not self._has_posted.wait(_PATIENCE_FOR_SPEAKERS_S if is_away else _PATIENCE_S) and not is_away:
                self._loop.check()
            self.hear()
        self._ask()
        finished = []
        self.stepped = time.monotonic_ns(), self._engine.num_unfinished
        for made in self._engine.step() if self._engine.num_unfinished else ():
            if (turn := self._turns.pop(made.id, None)) is None:
                finished.append(made)
                continue
            turn.episode.waiting = None
            self._queue.answered(made.id, len(_request_of(turn).prompt) + len(made.tokens))
            if turn.strand is None:
                self._admitted(turn.episode, turn)
            self._answered(turn, made)
            self._go_on(turn.episode)
        if self._listened:
            self._listened = {packed: turn.asked for packed in self._listened if (turn := self._turns.get(packed)) is not None}
            self._pieces.tell(self._listened.items(), self._engine.snapshot, self._loop.call)
        for packed, error in self._engine.refused() if isinstance(self._engine, RemoteSpeaker) else ():
            self._queue.taken_back(packed)
            self._refused(self._turns.pop(packed), error)
        self._ask()
        finished += self._ended
        self._ended = []
        return finished

    def hear(self) -> None:
        """Take in what agents have asked for, and noted."""
        self._has_posted.clear()
        while self._posted:
            self._posted.popleft()()

    def take_urgent(self) -> list[int]:
        """The episodes whose record must be written down before they go on, as far as they can be resumed from it."""
        return list(self._urgent)

    def written(self, ids: Iterable[int]) -> None:
        """Note that these episodes' records are written down."""
        for packed in ids:
            for answer, value in self._urgent.pop(packed, ()):
                self._loop.call(_answer, answer, value)

    def is_held(self, packed: int) -> bool:
        """Whether an episode should not be stopped now: a tool with effects runs, and could not be repeated."""
        return packed in self._episodes and self._episodes[packed].num_effects > 0

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        """Give up samples and episodes; these with their tokens so far, to go on from."""
        wanted = self._own(ids)
        gone = [self._forget(packed) for packed in wanted if packed in self._episodes]
        turns = self._given_up(episode.waiting for episode in gone if episode.waiting is not None)
        found = {made.id: made for made in self._engine.abort([packed for packed in wanted if packed not in turns])}
        for episode in gone:
            self._urgent.pop(episode.id, None)
            self._loop.call(_cancel, episode)
            found[episode.id] = self._so_far(episode, turns.get(episode.id))
        return list(found.values())

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        """What `abort` would return, without stopping anything."""
        wanted = self._own(ids)
        found = {made.id: made for made in self._engine.snapshot(wanted)}
        for episode in [self._episodes[packed] for packed in wanted if packed in self._episodes]:
            turn, made = episode.waiting, found.get(episode.id)
            if turn is not None and turn.engine is not self:
                made = next(iter(turn.engine._engine.snapshot([episode.id])), None)
            found[episode.id] = self._so_far(episode, made)
        return list(found.values())

    def turn_of(self, packed: int) -> TurnPlace | None:
        """The turn of an episode that an engine works on, with its tokens so far; None: none does."""
        episode = self._episodes.get(packed)
        if (turn := None if episode is None else episode.waiting) is None or turn.strand is None:
            return None
        return _place_of(turn)._replace(num_sampled=turn.strand.num_sampled + turn.engine._engine.progress().get(packed, 0))

    def _own(self, ids: Iterable[int]) -> list[int]:
        """Return the ids of this role's own episodes; those of other roles only speak here."""
        return [packed for packed in ids if packed not in self._turns or packed in self._episodes]

    def _so_far(self, episode: _Episode, turn: Generated | None) -> Generated:
        """The row of an episode that is not over. A conversation that has not caught up with its record is what that says."""
        so_far = episode.transcript.copy()
        if turn is not None and episode.waiting is not None and episode.waiting.strand is not None:
            so_far.conversations[episode.waiting.asked.name][-1] = episode.waiting.strand.with_turn(turn)
        for name in episode.recorded:
            assert episode.start.stopped is not None
            so_far.conversations[name], so_far.order = episode.start.stopped.conversations[name], episode.start.stopped.order
        return so_far.generated(episode.id, Finish.ABORT, "", {})

    def progress(self) -> dict[int, int]:
        """Generated tokens so far of each sample and episode."""
        for packed in self._changed:
            episode = self._episodes[packed]
            known, stopped = episode.transcript.conversations, episode.start.stopped
            if stopped is not None:
                known = {**known, **{name: stopped.conversations[name] for name in episode.recorded}}
            self._num_sampled[packed] = sum(strand.num_sampled for of in known.values() for strand in of)
        self._changed.clear()
        counts = dict(self._num_sampled)
        if len(self._roles) < 2 and not self._catching_up:
            for packed, count in self._engine.progress().items():
                if count or packed not in counts:  # Most of many wait for their first token.
                    counts[packed] = counts.get(packed, 0) + count
            return counts
        for one in self._all if self._episodes else (self,):
            for packed, count in one._engine.progress().items():
                if not count and packed in counts:
                    continue  # Most of many wait for their first token.
                if (turn := one._turns.get(packed)) is None:
                    if one is self:
                        counts[packed] = count
                elif turn.episode.host is self and turn.asked.name not in turn.episode.recorded:
                    counts[packed] += count
        return counts

    def occupancy(self) -> Occupancy:
        """How full the engine is; episodes between two turns count as running, and what waits here as queued."""
        found, num_waiting = self._engine.occupancy(), len(self._asked) + len(self._starts)
        return found._replace(num_running=found.num_running + self.num_away, num_queued=found.num_queued + num_waiting)


@functools.lru_cache(maxsize=4096)
def _sampling_of(drawn: Sampling, max_new_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """How a turn is drawn. Kept, since checking the options takes longer than all else that a turn needs here."""
    return replace(drawn, max_new_tokens=max_new_tokens, min_new_tokens=min(drawn.min_new_tokens, max_new_tokens), stop=stop)


def _size_of(prompt: Prompt | tuple[int, ...]) -> int:
    """About the tokens of a prompt: the characters of a text, or of messages."""
    return sum(len(str(part.get("content") or "")) if isinstance(part, Mapping) else 1 for part in prompt)


def _request_of(turn: _Turn) -> Request:
    assert turn.request is not None
    return turn.request


def _num_tokens_before(turn: _Turn) -> int:
    """The tokens of a turn's context, with those that it has of itself already."""
    request = _request_of(turn)
    return len(request.prompt) + len(request.prefix)


def _place_of(turn: _Turn) -> TurnPlace:
    """Where a turn is that no engine has begun, or whose engine's tokens do not count."""
    asked, strands = turn.asked, turn.episode.transcript.conversations.get(turn.asked.name, [])
    begins = asked.begins and turn.strand is None
    num_sampled = 0 if begins else strands[-1].num_sampled
    return TurnPlace(asked.by, (asked.name, len(strands) - (not begins)), num_sampled + len(_request_of(turn).prefix))


def _answer(future: asyncio.Future[Any], value: object) -> None:
    if isinstance(value, Exception) and not future.done():
        future.set_exception(value)
    elif not future.done():
        future.set_result(value)


def _cancel(episode: _Episode) -> None:
    if episode.task is not None:
        episode.task.cancel()
