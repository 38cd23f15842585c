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
(`m2flow.agents.turn_requests`); it waits with that engine's own. The episode stays one sample, and its row has what each of them said.

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
import itertools
import math
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from m2flow.agents.chat import (
    Agent,
    Asked,
    Chat,
    Known,
    Passed,
    Pieces,
    Reply,
    Resources,
    Rewards,
    Table,
    Told,
    lack_of,
    not_recorded,
    reward_of,
)
from m2flow.agents.conversation import Conversation, Recorded, Strand, Transcript
from m2flow.agents.tools import EpisodeFailed, EventLoop, Outcome, ToolCall, is_stopped
from m2flow.agents.turn_requests import GuestTurn, RemoteSpeaker, TurnQueue, Waiting, is_limited
from m2flow.engines.contract import Generated, Language, Occupancy, Request, RolloutEngine
from m2flow.engines.registry import StepCheck
from m2flow.errors import InternalError, M2FlowError, NoReward, PromptTooLong, described
from m2flow.recipe import EpisodeFailure, Sampling
from m2flow.recipe import Episodes as Bounds
from m2flow.samples import MAIN, Finish, Prompt, Sample, SampleId, Segment, keyed_bits

_PATIENCE_S = 0.01
"""Longest that a step waits for agents where the engine has nothing to do."""
_PATIENCE_FOR_SPEAKERS_S = 0.001
"""The same where a speaker in another process has its turn."""
_READY_SHARE = 8
"""An engine that decodes by itself gets one turn more for so many that it decodes at once."""
_STUCK_S = 30.0
"""How long an episode or an asynchronous tool may go on behind its time limit, to clean up; then the episode is given up."""
_SILENT_S = 600.0
"""An episode that nothing is known of for so long is reported."""
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
    waited_s: float = 0.0
    """How long it has waited for its next turn in another process, which it was moved away from."""


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
    stops_clock: bool = False
    """Whether the time of its episode stands, since no engine has it."""


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
        self.table: Table | None = None
        """None: its agent has not begun."""
        self.task: asyncio.Task[None] | None = None
        self.limit = asyncio.Timeout(None)
        self.left_s: float | None = None
        """Seconds that it may take yet, while a turn of it waits for an engine."""
        self.host = host
        self.threads: Executor = host.threads
        self.waits_since_s = time.monotonic() - start.waited_s
        self.has_asked = False

    # What the agent's chats call, on the loop's thread

    async def turn(self, asked: Asked) -> Reply | None:
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        turn = _Turn(self, asked, answer, self.host.engine_of(self, asked.by))
        self.host.post(lambda: self.host.take_turn(self, turn))
        try:
            if self.start.bounds.turn_timeout_s is None:
                return await answer
            async with turn.limit:
                return await answer
        except TimeoutError:
            if turn.limit.expired():
                raise EpisodeFailed("turn_timed_out", f"a turn took longer than {self.start.bounds.turn_timeout_s} s") from None
            raise
        finally:
            if answer.cancelled():
                self.host.post(lambda: self.host.drop_turn(self, turn))

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
        if self.start.bounds.timeout_s is not None:
            self._check_end()

    def _check_end(self) -> None:
        """Give the episode up if it has gone on for long behind its time limit; look again when that may be."""
        loop, limit = asyncio.get_running_loop(), self.limit
        assert self.task is not None
        until = (limit.when() or loop.time() + (self.start.bounds.timeout_s or 0)) + _STUCK_S
        if limit.expired() and loop.time() >= until:
            self._give_up("timed_out", f"it took longer than {self.start.bounds.timeout_s} s")
            return
        # A clock may read a little less than it was to be called at.
        timer = loop.call_at(max(until, loop.time() + 0.01), self._check_end)
        self.task.add_done_callback(lambda _: timer.cancel())

    def stuck_after(self, seconds: float, what: str) -> asyncio.TimerHandle:
        said = f"{what} took longer than {seconds:g} s"
        return asyncio.get_running_loop().call_later(seconds + _STUCK_S, self._give_up, "tool_failed", said)

    def _give_up(self, how: EpisodeFailure, what: str) -> None:
        """End the episode while its agent still runs: nothing waits for what does not end when it is cancelled."""
        said = f"{what}, and did not end when it was cancelled: something in it catches CancelledError, as a bare `except:` does"
        self.host.post(lambda: self.host.end(self, {"failure": how}, {"error": said}))
        if self.task is not None:
            self.task.cancel()

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
            self._end_run_if_lacking(failed)
            columns, added = {"failure": failed.how}, {"error": str(failed)}
        except NoReward as error:
            columns, added = {"failure": "no_reward"}, {"error": str(error)}
        except BaseException as error:
            if is_stopped(error, self.task) and not self.host.has(self):
                return
            self._end_run_if_lacking(error)
            columns, added = {"failure": "raised"}, {"error": described(error)}
            if not is_stopped(error, self.task):  # Else it has cancelled itself, or the run ends.
                self.host.show(self.id, traceback.format_exc())
        self.host.post(lambda: self.host.end(self, columns, added))

    def _end_run_if_lacking(self, error: BaseException) -> None:
        if (lack := lack_of(error)) is not None:
            self.host.end_run(lack)

    async def _played(self) -> Rewards:
        self.limit = asyncio.timeout(self.start.bounds.timeout_s)
        try:
            async with self.limit, contextlib.AsyncExitStack() as stack:
                agent = Agent.of(self.start.agent())
                resources, sampling, bounds = Resources(stack), self.start.request.sampling, self.start.bounds
                self.table = table = Table(
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
                returned = await agent.function(chat, self.start.row, **opened)  # type: ignore[misc]
                if self.limit.expired():  # It has caught its cancellation.
                    raise TimeoutError
                return reward_of(returned, table)
        except TimeoutError:
            if self.limit.expired():
                raise EpisodeFailed("timed_out", f"it took longer than {self.start.bounds.timeout_s} s") from None
            raise


# ---- the episodes of an engine


@final
class Episodes:
    """A rollout engine together with the episodes of its role. What is no episode goes to the engine as it is."""

    def __init__(
        self,
        engine: RolloutEngine | RemoteSpeaker,
        loop: EventLoop,
        roles: Mapping[str, Episodes] | None = None,
        num_slots: int = 0,
        check: StepCheck | None = None,
    ) -> None:
        """
        Args:
            roles: those of the process by role, this one included. Those that speak in its episodes must be there when these begin.
            num_slots: samples that the engine decodes at once; 0: it is given all that there are.
            check: of what the engine returns; None: another process checks it.
        """
        self.language: Language = engine.language()
        self.threads = loop.threads
        self._engine, self._check = engine, check
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
        self._guests: dict[int, GuestTurn] = {}
        """Turns of other processes' episodes that the engine has not been given yet, by the id of their request."""
        self._guests_there: dict[int, Request] = {}
        """Those that it has."""
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
            if start.waited_s:
                self._starts = dict(sorted(self._starts.items(), key=lambda one: one[1].waits_since_s))
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
            stopped = episode.start.stopped
            num_turns = 0 if stopped is None else sum(len(strand.turns) for strand in stopped.strands if not strand.by)
            self._queue.begun(episode.id, episode.num_tokens, num_turns)
            self._loop.call(episode.begin)

    def cache_lost(self) -> None:
        """Note that the engine has other weights, or gives its cache back: it has no context in it any more."""
        self._queue.cache_lost()

    def engine_of(self, episode: _Episode, by: str) -> Episodes:
        """The engine of one who speaks in an episode."""
        return self._roles[dict(episode.start.bounds.speakers)[by]] if by else self

    def has(self, episode: _Episode) -> bool:
        """Whether an episode runs here, and was not given up. Any thread may call this."""
        return self._episodes.get(episode.id) is episode

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
        if not self.has(episode) or turn.answer.cancelled():
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
            waited_s = 0.0 if episode.has_asked or not episode.start.waited_s else time.monotonic() - episode.waits_since_s
            episode.has_asked = True
            turn.engine._queue.asked(episode.id, _num_tokens_before(turn), waited_s)
            if is_limited(episode.start.bounds):
                turn.stops_clock = True
                self._loop.call(episode.waits)

    def _no_longer_stops(self, turn: _Turn) -> None:
        if turn.stops_clock:
            turn.stops_clock = False
            self._loop.call(turn.episode.waits_no_more, turn)

    def ask_for(self, turn: GuestTurn) -> None:
        """Queue a turn of another process's episode."""
        self._guests[turn.request.id] = turn
        self._queue.asked(turn.request.id, len(turn.request.prompt) + len(turn.request.prefix))

    def _guest_left(self, packed: int) -> None:
        """Note that a turn of another process's episode is not here any more. The queue hears of the next one as of a new episode's."""
        del (self._guests_there if packed in self._guests_there else self._guests)[packed]
        self._queue.ended(packed, is_over=False)

    def _ask(self) -> None:
        """Give the engines all turns that were asked for since the last time."""
        while sum(one._ask_engine() for one in self._all):
            pass  # One that does not fit is followed by another of its episode.

    @property
    def _all(self) -> Sequence[Episodes]:
        """The engines of the process, this one first."""
        return (self, *(one for one in self._roles.values() if one is not self))

    def _ask_engine(self) -> bool:
        num_free = self._queue.num_free(self._engine.num_unfinished) if self._asked or self._guests else 0
        if num_free <= 0:
            return False
        self._queue.look(self._engine.occupancy)
        held = {packed for one in self._all for packed in one._urgent if packed in self._asked}
        waiting = {packed: turn for packed, turn in self._asked.items() if packed not in held} if held else self._asked
        if self._guests:
            both: dict[int, _Turn | GuestTurn] = {**waiting, **self._guests}
            chosen: list[_Turn | GuestTurn] = self._queue.chosen({packed: both[packed] for packed in self._queue.as_asked(both)}, num_free)
            self._add_guests(turn for turn in chosen if isinstance(turn, GuestTurn))
        else:
            chosen = list(self._queue.chosen(waiting, num_free))
        asked = [turn for turn in chosen if isinstance(turn, _Turn)]
        for turn in asked:
            del self._asked[turn.episode.id]
            if not self._is_remote:  # Else it waits there yet.
                self._no_longer_stops(turn)
            if (before_turn := turn.episode.host.before_turn) is not None:
                before_turn(_place_of(turn))
        if asked:
            self._add(asked)
        return bool(chosen)

    def _add_guests(self, turns: Iterable[GuestTurn]) -> None:
        for turn in turns:
            packed = turn.request.id
            try:
                self._engine.add([turn.request])
            except M2FlowError as error:
                self._guest_left(packed)
                turn.refused(error)
            else:
                self._guests_there[packed] = self._guests.pop(packed).request
                self._queue.given(packed, len(turn.request.prompt) + len(turn.request.prefix))
                turn.begins()

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
        self._no_longer_stops(turn)
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
            turn.engine._asked.pop(turn.episode.id, None)
            self._no_longer_stops(turn)
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
        if not self.has(episode):
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
        if not self.has(episode):
            return
        episode.transcript.tools[key] = {**episode.transcript.tools.get(key, {}), **what}
        if has_effects:
            episode.num_effects += -1 if "result" in what else 1
        if has_effects or "result" in what:
            self._hold(episode.id, done, None)

    def end(self, episode: _Episode, columns: Mapping[str, object], added: Mapping[str, object]) -> None:
        """Make the row of an episode that is over, with what is added to its record."""
        if not self.has(episode):
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
        return self._engine.num_unfinished + len(self._asked) + len(self._guests) + len(self._starts) + self.num_away + len(self._ended)

    @property
    def num_away(self) -> int:
        """Episodes that have begun and wait for a tool, or for another's turn, or whose agent computes."""
        here = (self._turns, self._asked)
        num_here = sum(map(len, here)) if len(self._roles) < 2 else sum(turn.episode.host is self for of in here for turn in of.values())
        return len(self._episodes) - len(self._starts) - num_here

    @property
    def num_silent(self) -> int:
        """Episodes that have had no turn and no tool call under way for `_SILENT_S`: their agents wait for something else."""
        return sum(episode.table is not None and episode.table.idle_s > _SILENT_S for episode in self._episodes.values())

    def step(self) -> list[Generated]:
        """Do what the agents have asked for, decode one token, and return samples and episodes that finished.

        Waits a moment where no engine has anything to do and no agent has asked for anything.
        """
        self.hear()
        self._begin_some()
        is_busy = any(one._asked or one._guests or one._urgent or (one._engine.num_unfinished and not one._is_remote) for one in self._all)
        if self._episodes and not self._ended and not is_busy:
            is_away = any(one._turns for one in self._all if one._is_remote)
            if not self._has_posted.wait(_PATIENCE_FOR_SPEAKERS_S if is_away else _PATIENCE_S) and not is_away:
                self._loop.check()
            self.hear()
        self._ask()
        finished = []
        self.stepped = time.monotonic_ns(), self._engine.num_unfinished
        if isinstance(self._engine, RemoteSpeaker):
            for packed in self._engine.begun():
                self._no_longer_stops(self._turns[packed])
        stepped = self._engine.step() if self._engine.num_unfinished else []
        self._check_stepped(stepped)
        for made in stepped:
            if (turn := self._turns.pop(made.id, None)) is None:
                if made.id in self._guests_there:
                    self._queue.answered(made.id, len(self._guests_there[made.id].prompt) + len(made.tokens))
                    self._guest_left(made.id)
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

    def _check_stepped(self, stepped: Sequence[Generated]) -> None:
        """Check what the engine has returned, and which turns. Its samples that are no turns are told apart by who gave them to it."""
        if self._check is None:
            return
        given: Mapping[int, _Turn | Request] = {**self._turns, **self._guests_there} if self._guests_there else self._turns

        def most_of(packed: int) -> int:
            turn = given.get(packed)
            return sys.maxsize if turn is None else (turn if isinstance(turn, Request) else _request_of(turn)).sampling.max_new_tokens

        self._check.made(stepped, most_of)
        turns = [made.id for made in stepped if made.id in given or made.id in self._episodes]
        if turns or given:
            self._check.ids(turns, given, is_idle=not self._engine.num_unfinished)

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

    def is_queued(self, packed: int) -> bool:
        """Whether an episode has not begun, or waits for this engine and for nothing else."""
        if packed in self._starts:
            return True
        return packed in self._asked and packed in self._episodes and not any(packed in one._urgent for one in self._all)

    def queued(self) -> list[Waiting]:
        """The episodes for which `is_queued` holds, those that lose least by going on elsewhere first."""
        begin = [Waiting(packed, episode.num_tokens, 0) for packed, episode in reversed(self._starts.items())]
        return begin + self._queue.last([packed for packed in self._asked if self.is_queued(packed)])

    def waited_us(self, packed: int) -> int:
        """How long an episode for which `is_queued` holds has waited for its turn, wherever."""
        start = self._starts.get(packed)
        return int(1e6 * (self._queue.waited_s(packed) if start is None else time.monotonic() - start.waits_since_s))

    @property
    def turn_tokens(self) -> float:
        """Mean number of tokens that the engine has generated in a turn; 0: none has ended."""
        return self._queue.turn_tokens

    @property
    def kv_capacity(self) -> int:
        """Tokens that the engine's cache holds; 0: not known."""
        return self._queue.capacity

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        """Give up samples and episodes; these with their tokens so far, to go on from."""
        wanted = self._own(ids)
        gone = [self._forget(packed) for packed in wanted if packed in self._episodes]
        turns = self._given_up(episode.waiting for episode in gone if episode.waiting is not None)
        for packed in wanted:
            if packed in self._guests_there or packed in self._guests:
                self._queue.taken_back(packed)
                self._guest_left(packed)
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
        if turn is None and not episode.recorded:  # Most of those that are written down have just ended a turn or a tool call.
            return episode.transcript.generated(episode.id, Finish.ABORT, "", {})
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
        found, num_waiting = self._engine.occupancy(), len(self._asked) + len(self._guests) + len(self._starts)
        return found._replace(num_running=found.num_running + self.num_away, num_queued=found.num_queued + num_waiting)


@functools.lru_cache(maxsize=4096)
def _sampling_of(drawn: Sampling, max_new_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """How a turn is drawn. Kept, since checking the options takes longer than all else that a turn needs here."""
    return replace(drawn, max_new_tokens=max_new_tokens, min_new_tokens=min(drawn.min_new_tokens, max_new_tokens), stop=stop)


def _size_of(prompt: Prompt | tuple[int, ...]) -> int:
    """About the tokens of a prompt: the characters of a text, or of messages."""
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping):
        return len(prompt)
    return sum(len(str(part.get("content") or "")) for part in prompt if isinstance(part, Mapping))


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
