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
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from m2flow.agents.chat import Agent, Asked, Chat, Known, Passed, Pieces, Reply, Resources, Rewards, Table, not_recorded, reward_of
from m2flow.agents.conversation import Conversation, Strand, not_sampled
from m2flow.agents.remote_speakers import RemoteSpeaker
from m2flow.agents.tools import EpisodeFailed, Outcome, Threads, ToolCall
from m2flow.engines import lines_of
from m2flow.engines.contract import Generated, Language, Occupancy, Request, RolloutEngine
from m2flow.errors import InternalError, M2FlowError, OpError, PromptTooLong
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Sampling
from m2flow.samples import MAIN, Batch, Finish, Sample, SampleId, Segment, keyed_bits

_PATIENCE_S = 0.01
"""Longest that a step waits for agents where the engine has nothing to do."""
_PATIENCE_FOR_SPEAKERS_S = 0.001
"""The same where a speaker in another process has its turn."""
_MOST_THREADS, _MOST_GIVEN_UP = 64, 512
"""Plain functions of agents that run at once; and those that were given up and have not ended, above which the next ones fail."""
_GRACE_S = 6.0
"""What an agent that runs, or a resource of one, may take to end with its worker: a server that must be killed takes four seconds."""
_MOST_BLOCKED_S = 60.0
"""How long code of an agent may keep the event loop while nothing else can go on: it waits for an answer that only the loop can give."""
_MOST_SHOWN = 3
"""Failures of agents that are printed with traceback."""


# ---- what an episode has said and done


class BranchPoint(NamedTuple):
    """Where an episode left the one that it is a branch of."""

    turn: int
    """The first that is its own, from 1."""
    rng_seed: int
    """The seed of `chat.rng`, which goes on as in the parent: that of the episode that begins the line of parents."""


def _place(name: str) -> tuple[object, ...]:
    """The place of a conversation in the row: the first one is first, forks follow what they were forked from; never by time."""
    parts = [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in name.split("/")]
    return (parts[0] != (1, 0, MAIN), *parts)


@final
class Transcript:
    """The tokens of an episode, and its record. Worker's side only."""

    def __init__(self) -> None:
        self.conversations: dict[str, list[Strand]] = {}
        """By name: the sequences of each, of which the last goes on."""
        self.tools: dict[str, dict[str, object]] = {}
        """Key of a tool call -> what it was and what it gave."""
        self.kept_turns: int | None = None
        """Turns of a branch's record after which the episode goes another way, so what tools gave later is not known."""
        self.point: BranchPoint | None = None
        """Where a branch left its parent."""
        self.row: int | None = None
        """Identity of the row that its agent is given, in branches and wherever it goes on too; None: its record does not say."""

    def branched(self, turn: int, seed: int) -> Transcript:
        """What a branch of an episode of this seed shares, which goes on from a turn. Raises `ValueError` as `before`.

        Of an episode in which the model never spoke the first turn is its beginning.
        """
        if turn == 1 and not any(strand.tokens for strand in self.strands):
            found = Transcript()
            found.tools, found.kept_turns, found.point, found.row = self.tools, 0, self.point, self.row
        else:
            found = self.before(turn)
        found.point = BranchPoint(turn, self.rng_seed(seed))
        return found

    def rng_seed(self, seed: int) -> int:
        """The seed of `chat.rng` in an episode of this transcript, whose own seed that is."""
        return seed if self.point is None else self.point.rng_seed

    def before(self, turn: int) -> Transcript:
        """The record up to the turn of this number, from 1, of an episode of one conversation: what an episode that branches there shares.

        Raises:
            ValueError: it has no such turn, or several conversations.
        """
        if set(self.conversations) - {MAIN}:
            raise ValueError(f"it has several conversations: {', '.join(sorted(self.conversations))}")
        strands = self.conversations.get(MAIN, [])
        num_turns = sum(len(strand.turns) for strand in strands)
        if not 1 <= turn <= num_turns:
            raise ValueError(f"it has turns 1 to {num_turns}")
        found, left = Transcript(), turn - 1
        found.tools, found.kept_turns, found.point, found.row = self.tools, left, self.point, self.row
        kept = found.conversations[MAIN] = []
        for strand in strands:
            if not left:
                break
            copy, at, num = Strand(strand.name, strand.prompt_text, strand.parent, strand.by), 0, min(left, len(strand.turns))
            for kind, count in strand.segments:
                if len(copy.turns) == num:
                    break
                is_turn = kind in (Segment.GENERATED, Segment.SHARED)
                copy.extend(Segment.SHARED if is_turn else kind, strand.tokens[at : at + count], *not_sampled(count))
                at += count
                if is_turn:
                    copy.turns.append(strand.turns[len(copy.turns)])
            kept.append(copy)
            left -= num
        if not kept:
            del found.conversations[MAIN]
        return found

    @classmethod
    def of(cls, rows: Batch, row: int) -> Transcript:
        """The transcript of a row that was stopped."""
        found = cls()
        columns = [rows.ragged(name).row(row).tolist() for name in ("tokens", "logprobs", "versions", "kv_stale")]
        kinds, lengths = rows.ragged("segment_kinds").row(row).tolist(), rows.ragged("segment_lengths").row(row).tolist()
        record: Any = rows.ragged("episode").item(row)
        found.tools, found.row = record["tools"], record.get("row")
        if "branch" in record:
            found.point = BranchPoint(**record["branch"])
        named, turns, at = deque(record.get("conversations") or [_ALONE]), deque(record["turns"]), 0
        strand = Strand(MAIN)
        for kind, count in zip(kinds, lengths, strict=True):
            if kind == Segment.PROMPT:
                one = named.popleft()
                strand = Strand(one["name"], one["prompt"], one["parent"], one.get("by", ""))
                num_turns = len(turns) if one["num_turns"] is None else one["num_turns"]
                strand.turns = [turns.popleft() for _ in range(num_turns)]
                found.conversations.setdefault(strand.name, []).append(strand)
            strand.extend(Segment(kind), *(column[at : at + count] for column in columns))
            at += count
        return found

    @property
    def strands(self) -> list[Strand]:
        """All sequences, in the order of the row."""
        if len(self.conversations) == 1:
            return list(next(iter(self.conversations.values())))
        return [strand for name in sorted(self.conversations, key=_place) for strand in self.conversations[name]]

    @property
    def num_sampled(self) -> int:
        return sum(strand.num_sampled for strand in self.strands)

    def admitted(self, asked: Asked) -> Strand:
        """Add what comes before a turn of a conversation; returns its sequence."""
        of = self.conversations.setdefault(asked.name, [])
        if asked.begins:
            of.append(Strand(asked.name, asked.prompt_text, asked.parent, asked.by))
        of[-1].append(asked.ids)
        return of[-1]

    def generated(self, packed: int, finish: Finish, text: str, columns: Mapping[str, object]) -> Generated:
        """The sample that these tokens are."""
        strands = self.strands or [Strand(MAIN)]
        num_prompt = strands[0].segments[0][1] if strands[0].segments else 0
        tokens, logprobs, versions, kv_stale = (
            strands[0].arrays() if len(strands) == 1 else map(np.concatenate, zip(*(strand.arrays() for strand in strands), strict=True))
        )
        segments = [segment for strand in strands for segment in strand.segments]
        turns = [turn for strand in strands for turn in strand.turns]
        record: dict[str, object] = {"turns": turns, "tools": dict(sorted(self.tools.items()))}
        if len(strands) > 1 or strands[0].name != MAIN:
            record["conversations"] = [strand.described for strand in strands]
        if self.point is not None:
            record["branch"] = self.point._asdict()
        if self.row is not None:
            record["row"] = self.row

        return Generated(
            id=packed,
            prompt_tokens=tokens[:num_prompt],
            tokens=tokens[num_prompt:],
            logprobs=logprobs[num_prompt:],
            versions=versions[num_prompt:],
            kv_stale=kv_stale[num_prompt:],
            finish=finish,
            text=text,
            prompt_text=strands[0].prompt_text,
            segments=tuple(segments[1:]) or ((Segment.GENERATED, 0),),
            columns={"reward": math.nan, "failure": "", "num_turns": len(turns), "episode": record} | dict(columns),
        )


_ALONE = {"name": MAIN, "num_turns": None, "prompt": None, "parent": ""}
"""What a record that names no conversations has: all turns are one conversation's."""


@final
class _Recorded:
    """The part of a stopped conversation that has not been asked for yet."""

    def __init__(self, strands: Sequence[Strand]) -> None:
        self._strands = strands
        self._strand = 0
        self._at = 0
        """Segments of the strand that were asked for."""
        self._position = 0
        self._num_turns = 0

    @property
    def is_used_up(self) -> bool:
        return self._strand == len(self._strands) - 1 and self._at >= len(self._strands[-1].segments)

    def take(self, asked: Asked, request: Request) -> tuple[Generated, Segment] | None:
        """The turn that followed these tokens, or what there was of it, and its kind. None: the agent does something else than before."""
        if asked.begins and self._at:
            if self._at < len(self._strands[self._strand].segments):
                return None
            self._strand, self._at, self._position, self._num_turns = self._strand + 1, 0, 0, 0
        of, start, ids = self._strands[self._strand], self._position, asked.ids
        if of.by != asked.by:
            return None
        if (
            self._at >= len(of.segments)
            or of.segments[self._at][1] != len(ids)
            or of.tokens[start : start + len(ids)].tolist() != list(ids)
        ):
            return None
        self._at += 1
        self._position += len(ids)
        if self._at >= len(of.segments):  # It was stopped before the first token of the turn.
            return replace(_none_of(request), finish=Finish.ABORT), Segment.GENERATED
        kind, count = of.segments[self._at]
        end = self._position + count
        rows = [values[self._position : end] for values in (of.tokens, of.logprobs, of.versions, of.kv_stale)]
        self._at, self._position = self._at + 1, end
        is_whole = self._num_turns < len(of.turns)
        known: Any = of.turns[self._num_turns] if is_whole else {"finish": Finish.ABORT, "text": ""}
        self._num_turns += 1
        types: list[Any] = [np.int32, np.float32, np.int32, np.bool_]
        tokens, logprobs, versions, kv_stale = (np.array(values, kind) for values, kind in zip(rows, types, strict=True))
        made = replace(_none_of(request), tokens=tokens, logprobs=logprobs, versions=versions, kv_stale=kv_stale)
        return replace(made, finish=Finish(known["finish"]), text=str(known["text"])), kind


def _none_of(request: Request) -> Generated:
    none, logprobs, stale = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.bool_)
    return Generated(request.id, none, none, logprobs, none, stale, Finish.STOP, "")


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


@dataclass(eq=False)
class _Turn:
    """A turn that an agent waits for."""

    episode: _Episode
    asked: Asked
    answer: asyncio.Future[Reply | None]
    engine: Episodes
    """The engine of who speaks, which takes the turn."""
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
        stopped = start.stopped.conversations if start.stopped is not None else {}
        # One that was stopped before its first turn has a row without a token.
        self.recorded = {name: _Recorded(strands) for name, strands in stopped.items() if strands[0].tokens}
        """The conversations that have not caught up with their record yet."""
        self.known_tools = dict(start.stopped.tools) if start.stopped is not None else {}
        self.kept_turns = start.stopped.kept_turns if start.stopped is not None else None
        self.used_tools: dict[str, dict[str, object]] = {}
        """What a branch's agent has asked for of the record."""
        if start.stopped is not None and self.kept_turns is None:
            self.transcript.tools = dict(self.known_tools)
        self.transcript.point = start.stopped.point if start.stopped is not None else None
        self.transcript.row = start.row.id.pack()
        self.waiting: _Turn | None = None
        """The turn that an engine works on."""
        self.queued: deque[_Turn] = deque()
        """Turns of other conversations meanwhile: an engine knows a sample by its identity, once."""
        self.occurrences: Counter[int] = Counter()
        self.num_effects = 0
        """Tools with effects that run now."""
        self.task: asyncio.Task[None] | None = None
        self.host = host
        self.threads: Executor = host.threads

    # What the agent's chats call, on the loop's thread

    async def turn(self, asked: Asked) -> Reply | None:
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        turn = _Turn(self, asked, answer, self.host.engine_of(self, asked.by))
        self.host.post(lambda: self.host.take_turn(self, turn))
        limit = asyncio.timeout(self.start.bounds.turn_timeout_s)
        try:
            async with limit:
                return await answer
        except TimeoutError:
            if limit.expired():
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

    # The agent

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
        except asyncio.CancelledError:
            return
        except Exception as error:
            columns, added = {"failure": "raised"}, {"error": f"{type(error).__name__}: {error}"}
            self.host.show(self.id, traceback.format_exc())
        self.host.post(lambda: self.host.end(self, columns, added))

    async def _played(self) -> Rewards:
        limit = asyncio.timeout(self.start.bounds.timeout_s)
        try:
            async with limit, contextlib.AsyncExitStack() as stack:
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
                )
                chat = Chat(table, table.make(""), MAIN)
                opened = {name: await resources.get(kind) for name, kind in agent.resources}
                return reward_of(await agent.function(chat, self.start.row, **opened), table)  # type: ignore[misc]
        except TimeoutError:
            if limit.expired():
                raise EpisodeFailed("timed_out", f"it took longer than {self.start.bounds.timeout_s} s") from None
            raise


# ---- the event loop


@final
class EventLoop:
    """The event loop of a process's episodes, on a thread of its own."""

    def __init__(self) -> None:
        self.threads = Threads(_MOST_THREADS, _MOST_GIVEN_UP)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self.threads)  # asyncio's own has a few threads more than there are cores.
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._asked_at: float | None = None
        """Since when the loop has not answered `check`; None: it has."""
        self._thread.start()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call a function. What is asked for before the loop gets to it wakes it once."""
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._is_woken = False  # Before the first is taken: one that comes from now on is taken below, or wakes the loop again.
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"{function!r} raised", "exception": error})

    def check(self) -> None:
        """Check that the loop goes round. To be called now and then while nothing but agents can go on.

        Raises:
            OpError: code of an agent has kept it for `_MOST_BLOCKED_S`.
        """
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.call(self._answers)
        elif time.monotonic() - self._asked_at > _MOST_BLOCKED_S:
            raise OpError(
                f"an agent has blocked the event loop of all episodes for {_MOST_BLOCKED_S:g} s: {self._place()}",
                now="Await the client's asynchronous form (AsyncOpenAI, httpx.AsyncClient), or what blocks in `asyncio.to_thread(...)`.",
            )

    def _answers(self) -> None:
        self._asked_at = None

    def _place(self) -> str:
        """The line of a user's file that the loop's thread is in."""
        lines = lines_of(self._thread.ident or 0)
        libraries = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
        own = [line for line in lines if "-packages" not in line.file and not line.file.startswith(libraries)]
        return "{}:{}".format(*(own or lines)[0]) if lines else "where it is, is not known"

    def begin(self, episode: _Episode) -> None:
        """Begin an episode; to be called by the loop."""
        episode.task = self._loop.create_task(episode.run())

    def close(self) -> None:
        """End the loop, and what runs on it."""

        def stop() -> None:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            ended = asyncio.gather(*tasks, return_exceptions=True)
            ended.add_done_callback(lambda _: self._loop.stop())

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(stop)
        self._thread.join(_GRACE_S)
        self.threads.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()


# ---- the episodes of an engine


@final
class Episodes:
    """A rollout engine together with the episodes of its role. What is no episode goes to the engine as it is."""

    def __init__(self, engine: RolloutEngine | RemoteSpeaker, loop: EventLoop, roles: Mapping[str, Episodes] | None = None) -> None:
        """
        Args:
            roles: those of the process by role, this one included. Those that speak in its episodes must be there when these begin.
        """
        self.language: Language = engine.language()
        self.threads = loop.threads
        self._engine = engine
        self._is_remote = isinstance(engine, RemoteSpeaker)
        self._loop = loop
        self._roles = {} if roles is None else roles
        self._episodes: dict[int, _Episode] = {}
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
            self._loop.call(self._loop.begin, episode)

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

    def _ask(self) -> None:
        """Give the engines all turns that were asked for since the last time."""
        while sum(one._ask_engine() for one in self._all):
            pass  # One that does not fit is followed by another of its episode.

    @property
    def _all(self) -> Sequence[Episodes]:
        """The engines of the process, this one first."""
        return (self, *(one for one in self._roles.values() if one is not self))

    def _ask_engine(self) -> bool:
        asked = [turn for packed, turn in self._asked.items() if packed not in turn.episode.host._urgent]
        for turn in asked:
            del self._asked[turn.episode.id]
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
        if turn.asked.heard is not None:
            self._listened[turn.episode.id] = turn.asked
        if not self._is_remote:  # Whether it fits is known with the answer: until then it is not in the transcript.
            self._admitted(turn.episode, turn)

    def _given_up(self, turns: Iterable[_Turn]) -> dict[int, Generated]:
        """Take turns back from their engines; by episode what there is of each, of those that an engine had."""
        had: dict[Episodes, list[int]] = {}
        for turn in turns:
            turn.engine._asked.pop(turn.episode.id, None)
            if turn.engine._turns.pop(turn.episode.id, None) is not None:
                had.setdefault(turn.engine, []).append(turn.episode.id)
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
        turn.strand.append_turn(made, kind=kind)
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
                    turn.strand.append_turn(made)
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
        self._forget(episode.id)
        self._urgent.pop(episode.id, None)
        strands = episode.transcript.strands
        said = [strand.turns for strand in strands if strand.turns]
        of_first = [strand.turns for strand in episode.transcript.conversations.get(MAIN, []) if strand.turns]
        last: Any = (of_first or said)[-1][-1] if said else {"finish": Finish.STOP, "text": ""}
        made = episode.transcript.generated(episode.id, Finish(last["finish"]), str(last["text"]), columns)
        record: Any = made.columns["episode"]
        if speakers := episode.start.bounds.speakers:
            record = {**record, "speakers": dict(speakers)}
        self._ended.append(replace(made, columns={**made.columns, "episode": {**record, **added}}))

    def _forget(self, packed: int) -> _Episode:
        self._num_sampled.pop(packed, None)
        self._changed.discard(packed)
        self._catching_up.discard(packed)
        return self._episodes.pop(packed)

    # What stands for the engine where samples are generated

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished + len(self._asked) + self.num_away + len(self._ended)

    @property
    def num_away(self) -> int:
        """Episodes that wait for a tool, or for another's turn, or whose agent computes."""
        here = (self._turns, self._asked)
        num_here = sum(map(len, here)) if len(self._roles) < 2 else sum(turn.episode.host is self for of in here for turn in of.values())
        return len(self._episodes) - num_here

    def step(self) -> list[Generated]:
        """Do what the agents have asked for, decode one token, and return samples and episodes that finished.

        Waits a moment where no engine has anything to do and no agent has asked for anything.
        """
        self.hear()
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
            if turn.strand is None:
                self._admitted(turn.episode, turn)
            self._answered(turn, made)
            self._go_on(turn.episode)
        if self._listened:
            self._listened = {packed: turn.asked for packed in self._listened if (turn := self._turns.get(packed)) is not None}
            self._pieces.tell(self._listened.items(), self._engine.snapshot, self._loop.call)
        for packed, error in self._engine.refused() if isinstance(self._engine, RemoteSpeaker) else ():
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
        so_far = Transcript()
        so_far.tools, so_far.point, so_far.row = dict(episode.transcript.tools), episode.transcript.point, episode.transcript.row
        for name, strands in episode.transcript.conversations.items():
            so_far.conversations[name] = list(strands)
        if turn is not None and episode.waiting is not None and episode.waiting.strand is not None:
            so_far.conversations[episode.waiting.asked.name][-1] = episode.waiting.strand.with_turn(turn)
        for name in episode.recorded:
            assert episode.start.stopped is not None
            so_far.conversations[name] = episode.start.stopped.conversations[name]
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
        """How full the engine is; episodes between two turns count as running."""
        found = self._engine.occupancy()
        return found._replace(num_running=found.num_running + self.num_away)


@functools.lru_cache(maxsize=4096)
def _sampling_of(drawn: Sampling, max_new_tokens: int, stop: tuple[str, ...]) -> Sampling:
    """How a turn is drawn. Kept, since checking the options takes longer than all else that a turn needs here."""
    return replace(drawn, max_new_tokens=max_new_tokens, min_new_tokens=min(drawn.min_new_tokens, max_new_tokens), stop=stop)


def _request_of(turn: _Turn) -> Request:
    assert turn.request is not None
    return turn.request


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
