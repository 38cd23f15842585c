"""Agents: async functions that converse with the model, and the `Chat` by which they do.

    @agent
    async def solver(chat: Chat, row: Sample) -> float:
        turn = await chat.say(row.prompt, tools=[python])
        while turn.calls:
            turn = await chat.reply(turn.calls)
        return float(turn.text == row.answer)

An agent is called once a sample. Each `say` and `reply` is a turn of the model: a request to the engine that the other episodes do not wait
for. What the agent returns is the episode's reward: a number, or a mapping with `reward` and its parts, or a mapping from the names of its
conversations to a reward of each, or None where it is judged later.

The chat is the episode's conversation `main`. `chat.conversation("black")` is another one with the same weights, which begins empty, and
`chat.fork()` one that goes on from what was said so far. Each has its own turns, tools and limits, and its random numbers are keyed by its
name; what the model said in any of them is trained, once. Conversations may go on at the same time.

`chat.conversation("white", by="opponent")` is one in which another of the rollout's `speakers` takes the model's turns: a rival, a judge.
Tokens, chat template and tool calls in it are those of that model.

Bounds. A conversation's budget (`max_tokens`) counts all tokens after its first prompt. What does not fit is not appended: the turn is then
empty and `is_cut`, and the conversation ends where it was. Of a turn that is cut off no tool call is read. The last turn that a
conversation may have (`max_turns`) has no calls either, so a loop over calls ends by itself; asking for more is a failure of the episode.

An agent is repeated where its worker was lost: what it does must follow from its row, from what the model and the tools say, and from
`chat.rng`. The clock and other random numbers do not.

An eager run that repeats the decisions of another one (`Told`) does not call a tool whose result that one recorded: the result may be the
clock's. Pure tools are called, and so are those that work on a resource which the agent is given, too, and would find as it was: another
result than the recorded one ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import random
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final, overload

from m2flow.agents.conversation import Conversation
from m2flow.agents.tools import (
    FAMILIES,
    EpisodeFailed,
    Family,
    MessagesRefused,
    Outcome,
    Parser,
    Tool,
    ToolCall,
    is_stopped,
    parameters,
)
from m2flow.engines.contract import Generated
from m2flow.errors import DatasetError, M2FlowError, MissingExtra, MissingTier, OpError, OptionError, SpecError, described
from m2flow.recipe import EpisodeFailure, Sampling, check_count
from m2flow.samples import MAIN, Finish, Message, keyed_bits


@final
@dataclass(frozen=True)
class Agent:
    """A function under `@agent`."""

    function: Callable[..., object]
    resources: tuple[tuple[str, type], ...]
    tool_calls: Family | Parser | None = None
    __name__: str = field(default="agent", compare=False)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    @classmethod
    def of(cls, function: Callable[..., object]) -> Agent:
        """The agent itself, or one of a plain async function."""
        return function if isinstance(function, Agent) else _agent(function, None)


@overload
def agent(function: Callable[..., object], /) -> Agent: ...
@overload
def agent(*, tool_calls: Family | Parser | None = None) -> Callable[[Callable[..., object]], Agent]: ...
def agent(
    function: Callable[..., object] | None = None, /, *, tool_calls: Family | Parser | None = None
) -> Agent | Callable[[Callable[..., object]], Agent]:
    """Decorator: make an async function an agent, for `policy.rollout`. Its first parameters are the `Chat` and the row of its prompt.

    A further parameter whose type is an async context manager is a resource of the episode (a sandbox), which the tools share.

    Args:
        tool_calls: the form in which the model writes calls: `hermes`, `qwen3_coder`, `glm45`, `llama3`, `mistral`, `deepseek_v3`,
            `kimi_k2`, `harmony`, `phi4_mini` or `gemma`; by default what its chat template asks for, and a template that presents tools in
            none of these forms is refused. Or a function of the model's raw text, which returns the text without calls, and a list of
            `ToolCall`.
    """
    if not (tool_calls is None or callable(tool_calls) or tool_calls in FAMILIES):
        raise OptionError(f"@agent(tool_calls={tool_calls!r:.60}); known are {', '.join(FAMILIES)}, or a function of the model's text")

    def decorate(function: Callable[..., object]) -> Agent:
        return _agent(function, tool_calls)

    return decorate if function is None else decorate(function)


def _agent(function: Callable[..., object], tool_calls: Family | Parser | None) -> Agent:
    name = str(getattr(function, "__name__", "agent"))
    if not inspect.iscoroutinefunction(function):
        raise OptionError(f"@agent {name} is no async function", now=f"Write it: async def {name}(chat, row): ...")
    first_two = list(inspect.signature(function).parameters)[:2]
    if len(first_two) < 2:
        raise OptionError(f"@agent {name} takes {len(first_two)} parameters", now=f"Write it: async def {name}(chat, row): ...")
    hints, _, resources = parameters(function, "@agent", first_two)
    if hints:
        raise OptionError(
            f"@agent {name}: nothing gives it the parameter {hints[0][0]!r}", now="Close over it, or take it from the row: row.answer."
        )
    return Agent(function, resources, tool_calls, name)


def may_use_tools(function: Callable[..., object]) -> bool:
    """Whether an agent's code, or that of a function that it calls by name, gives tools to a chat, or opens an endpoint to others'."""
    waiting, seen = [function], set[object]()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if (code := getattr(function, "__code__", None)) is None or code in seen:
            continue
        seen.add(code)
        names = _names_in(code)
        if not names.isdisjoint(("tools", "endpoint")):
            return True
        cells = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False))
        for name in names:
            with contextlib.suppress(ValueError):  # A cell that is empty still.
                found = cells[name].cell_contents if name in cells else getattr(function, "__globals__", {}).get(name)
                waiting += [found] if inspect.isfunction(found) else []
    return False


def _names_in(code: types.CodeType) -> set[str]:
    """The names in a function's code: variables, attributes, and those by which it gives arguments."""
    found = {*code.co_names, *code.co_freevars}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _names_in(one)
        elif isinstance(one, tuple):
            found |= {name for name in one if isinstance(name, str)}
    return found


class Reply(NamedTuple):
    """A turn as the engine made it."""

    tokens: Sequence[int]
    text: str
    finish: Finish
    logprobs: Sequence[float] = ()
    num_known: int = 0
    """Tokens of it that the record of a repeated episode had."""
    num_cached: int = 0
    """Tokens before it that the engine found in its prefix cache, where it says so."""
    at_ns: int = 0
    """When the engine had made it."""


class Asked(NamedTuple):
    """A turn that the model is to take."""

    name: str
    """The conversation's name."""
    ids: Sequence[int]
    """What comes before the turn: since the one before it, or all, where a sequence begins."""
    begins: bool
    """Whether a sequence of tokens begins, of which these are the prompt."""
    max_new_tokens: int
    stop: tuple[str, ...]
    prompt_text: str | None = None
    """The first prompt of a conversation, as the model sees it."""
    parent: str = ""
    """The conversation that one which begins was forked from."""
    by: str = ""
    """Who speaks, of the rollout's `speakers`; empty: the policy."""
    heard: Callable[[Sequence[int], str], None] | None = None
    """Is called now and then with the tokens and the text so far, on the loop's thread. None: nobody listens."""


class Known(NamedTuple):
    """What the record of a repeated episode has of a tool call."""

    outcome: Outcome | None
    """None: it had begun."""


class Told(NamedTuple):
    """What is on record of an episode in the run whose decisions are repeated."""

    sample: str
    """Its identity."""
    tools: Mapping[str, Mapping[str, Any]]
    """Key of a tool call -> what it was, and what it gave, if it came to that."""
    failure: str
    """How it failed; empty if it did not."""
    error: str


Passed = Callable[[int, str, int, int, Mapping[str, object]], None]
"""Takes what passed in an episode and has ended: the episode, `turn` or `tool`, its start and end in ns, attributes of its span."""


def not_recorded(*_: object) -> None:
    """Take what passed, and forget it."""


_PIECE_S = 0.05
"""Least time between two pieces of a turn that somebody hears while it is generated."""
_SHARE = 10
"""A piece comes at the earliest after so many times what the last one took."""


@final
class Pieces:
    """Has those who listen hear how far the turns are that an engine works on."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def tell(
        self, turns: Iterable[tuple[int, Asked]], snapshot: Callable[[Iterable[int]], list[Generated]], call: Callable[..., None]
    ) -> None:
        """Have the loop `call` the listeners of these turns of an engine, if it is time."""
        if (began_s := time.monotonic()) < self._next_s:
            return
        listeners = {packed: asked.heard for packed, asked in turns if asked.heard is not None}
        for made in snapshot(listeners) if listeners else ():
            call(listeners[made.id], made.tokens.tolist(), made.text)
        now_s = time.monotonic()
        self._next_s = now_s + max(_PIECE_S, _SHARE * (now_s - began_s))


class Link(Protocol):
    """What a chat asks of the process that it runs in."""

    threads: Executor

    async def turn(self, asked: Asked) -> Reply | None:
        """Append tokens and have the model go on; None, and nothing appended: they fill its context."""

    def known(self, key: str) -> Known | None:
        """A tool call of the record; None: it is new."""

    @property
    def lost_resources(self) -> bool:
        """Whether the record has a tool call with effects on a resource of the episode, which is gone."""

    async def began(self, key: str, call: ToolCall, *, has_effects: bool, opens: bool) -> None:
        """Note that a tool call begins, on resources of the episode or not; with effects, return when that is written down."""

    async def returned(self, key: str, outcome: Outcome, *, has_effects: bool) -> None:
        """Note what it gave, likewise."""

    def passed(self, name: str, start_ns: int, end_ns: int, about: Mapping[str, object]) -> None:
        """Take a turn or a tool call that has ended, for the trace."""

    def stuck_after(self, seconds: float, what: str) -> asyncio.TimerHandle:
        """Have the episode fail where this, which may take so long, has not ended well after that: its cancellation was caught."""


@dataclass(frozen=True)
class Turn:
    """What the model said in one turn."""

    text: str
    """Without its tool calls, and without special tokens."""
    calls: tuple[ToolCall, ...]
    is_cut: bool
    """It was cut off, by a limit of tokens."""
    num_tokens: int
    raw: str = ""
    """All that it said, as text: with what was written of tool calls, and the special tokens among that."""
    num_context: int = 0
    """Tokens before it, of which it is the continuation."""
    tokens: Sequence[int] = field(default=(), repr=False)
    """Those that were sampled."""
    logprobs: Sequence[float] = field(default=(), repr=False)
    """The log-probability of each of them, under the weights that sampled it."""


@final
@dataclass(eq=False)
class Table:
    """What the conversations of one episode share, and their bounds."""

    link: Link
    resources: Resources
    seed: int
    max_tokens: int
    max_turns: int
    max_conversations: int
    stop: tuple[str, ...]
    make: Callable[[str], Conversation]
    """What gives an empty conversation of one who speaks."""
    speakers: Sequence[str] = ()
    """Who may speak beside the policy."""
    stop_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What ends the turns of speakers with sampling options of their own, in place of `stop`."""
    parents: dict[str, str] = field(default_factory=lambda: {MAIN: ""})
    """Conversation -> the one that it was forked from; empty: none."""
    by: dict[str, str] = field(default_factory=lambda: {MAIN: ""})
    """Conversation -> who speaks in it; empty: the policy."""
    begun: set[str] = field(default_factory=set)
    """Conversations in which the model was asked for a turn."""
    has_old_resources: bool = False
    """A resource was used before, in the record: what it held is gone."""
    told: Told | None = None
    """What tools gave in another run, where this one repeats its decisions."""
    shared: Sequence[type] = ()
    """Resources that the agent is given."""
    untouched: set[type] = field(default_factory=set)
    """Resources for which tools were answered from that run, and which so are not as they were there."""
    end_run: Callable[[M2FlowError], None] = not_recorded
    is_branch: bool = False
    """Whether the episode goes on from a turn of another."""
    at_once: Callable[[], None] = not_recorded
    """Is called where two conversations are at work at the same time."""
    at_work: dict[str, int] = field(default_factory=dict)
    """The conversations of which a turn or a tool is waited for. Seen from here, as the agent asks, it does not depend on time."""
    worked_s: float = field(default_factory=time.monotonic)
    """When the last turn or tool call ended, or else the episode began."""

    @property
    def idle_s(self) -> float:
        """For how long no turn and no tool call has been under way; 0 where one is, or waits for an engine. Any thread may ask."""
        return 0.0 if self.at_work else time.monotonic() - self.worked_s

    def begins_work(self, name: str) -> None:
        """Note that something of a conversation is waited for, until `ends_work`."""
        self.at_work[name] = self.at_work.get(name, 0) + 1
        if len(self.at_work) > 1:
            self.at_once()

    def ends_work(self, name: str) -> None:
        """Note that something of a conversation is waited for no more."""
        if self.at_work[name] > 1:
            self.at_work[name] -= 1
        else:
            self.worked_s = time.monotonic()
            del self.at_work[name]

    def take(self, name: str, parent: str, by: str) -> None:
        """Note a new conversation.

        Raises:
            ValueError: it can't have this name. EpisodeFailed: nobody of the name `by` speaks in the rollout.
        """
        if not isinstance(name, str) or not name or name == "reward" or (not parent and "/" in name):
            raise ValueError(f"a conversation can't be named {name!r:.60}; a name is a text without a slash, and not 'reward'")
        if name in self.parents:
            raise ValueError(f"the episode has a conversation {name!r} already")
        if by and by not in self.speakers:
            known = f"names {', '.join(self.speakers)}" if self.speakers else "names none"
            raise EpisodeFailed("unknown_speaker", f"the agent lets {by!r:.60} speak, and the rollout {known}: rollout(..., speakers=...)")
        self.parents[name], self.by[name] = parent, by

    def begin(self, name: str) -> None:
        """Note that the model is asked for a turn. Raises `EpisodeFailed`: in too many conversations."""
        self.begun.add(name)
        by = self.by[name]
        of_one = sorted(other for other in self.begun if self.by[other] == by)
        if len(of_one) > self.max_conversations:
            raise EpisodeFailed(
                "too_many_conversations",
                f"the agent has {by or 'the model'} speak in {', '.join(of_one)}, and the rollout allows {self.max_conversations}: "
                "rollout(..., max_conversations=...)",
            )


@final
class Chat:
    """One conversation of an episode with the policy, or with another speaker of the rollout."""

    def __init__(self, table: Table, conversation: Conversation, name: str) -> None:
        self._table = table
        self._link = table.link
        self._conversation = conversation
        self._max_tokens = table.max_tokens
        self._max_turns = table.max_turns
        self._tools: dict[str, Tool] = {}
        self._is_busy = False
        self._broken = ""
        """Why a turn was broken off, of which nobody knows how far it came."""
        self._num_runs = 0
        self._num_forks = 0
        self._context: list[int] = []
        """The tokens of the sequence that goes on."""
        self._branches_off = False
        """What goes on is another conversation's still: the next turn begins a sequence, whose prompt is that."""
        self.name = name
        """`main` is the one that the agent was given."""
        self.by = table.by[name]
        """Who speaks in it, of the rollout's `speakers`; empty: the policy."""
        self.num_turns = 0
        """Turns of the model so far; in a fork with those before it."""
        self.num_tokens = 0
        """Tokens after the first prompt, whoever they are of."""
        self.rng = random.Random(keyed_bits(table.seed, "rng", *(() if name == MAIN else (name,))))
        """Random numbers of this conversation, the same whenever it is repeated."""
        self.on_text: Callable[[int, str], None] | None = None
        """Is called while a turn is generated: with the number of tokens before it, and the beginning of its text that is sure by now."""

    def conversation(self, name: str, *, by: str = "", max_tokens: int | None = None, max_turns: int | None = None) -> Chat:
        """Make a further conversation of the episode, which begins empty.

        Args:
            name: by which the episode's rewards and the sample's record know it, different from all others of the episode.
            by: who speaks in it: a name of the rollout's `speakers`; empty: the policy.
            max_tokens, max_turns: its bounds, where they are to be lower than the rollout's.
        """
        made = self._another(name, "", by)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
            made._max_tokens = min(max_tokens, made._max_tokens)
        if max_turns is not None:
            check_count("max_turns", max_turns)
            made._max_turns = min(max_turns, made._max_turns)
        return made

    def beside(self, name: str) -> Chat:
        """Make a further conversation, which begins empty and goes by the reward of this one, unless it has its own.

        Args:
            name: gets a number, by how many there are of it.
        """
        name, number = name if self.name == MAIN else f"{self.name}/{name}", 1
        while f"{name}-{number}" in self._table.parents:
            number += 1
        return self._another(f"{name}-{number}", self.name, self.by)

    def _another(self, name: str, parent: str, by: str) -> Chat:
        self._table.take(name, parent, by)
        return Chat(self._table, self._table.make(by), name)

    def fork(self, name: str = "") -> Chat:
        """Make a conversation that goes on from this one as it is now: its messages, tokens, tools and bounds. This one may go on, too.

        What was said before the fork is trained once, as this conversation's.

        Args:
            name: as of `conversation`; by default this one's with a number: `main/1`.
        """
        if self._is_busy:
            raise RuntimeError("a chat can't be forked in the middle of a turn")
        self._check_whole()
        self._num_forks += 1
        name = name or f"{self.name}/{self._num_forks}"
        self._table.take(name, self.name, self.by)
        made = Chat(self._table, self._conversation.copy(), name)
        made._max_tokens, made._max_turns, made._tools = self._max_tokens, self._max_turns, dict(self._tools)
        made._context, made._branches_off = list(self._context), True
        made.num_turns, made.num_tokens = self.num_turns, self.num_tokens
        return made

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return list(self._conversation.messages)

    async def say(
        self,
        content: str | Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        role: str = "user",
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Turn:
        """Say something, and have the model answer.

        Args:
            content: a text, or messages; the first ones may begin with a system message.
            tools: what the model may call, from here on. The chat template presents those of the first `say`.
            role: of a text.
            max_tokens: of the answer; by default what is left of the conversation's.
            stop: texts that end the answer, in place of the rollout's.
        """
        if not isinstance(content, str) and not (isinstance(content, list | tuple) and all(isinstance(one, Mapping) for one in content)):
            raise TypeError(
                f'chat.say({content!r:.60}): it takes a text, or a list of messages like {{"role": "user", "content": "Hello"}}'
            )
        for one in tools:
            if not isinstance(one, Tool):
                raise TypeError(f"tools={one!r:.60}: it is no function under @tool")
        named = {one.name: one for one in tools}
        if twice := [one.name for one in tools if one is not named[one.name]]:
            said = f"two of the tools are named {twice[0]}, and a call has no more than the name"
            raise OptionError(said, now="Offer one of them: of an MCP server's tools, mcp_tools(names=...); one's own, @tool(name=...).")
        before, self._tools = self._tools, self._tools | named
        new = [{"role": role, "content": content}] if isinstance(content, str) else [self._defused(one) for one in content]
        first = content if role == "user" and not self._conversation.has_begun else new
        try:
            return await self._turn(first, max_tokens, stop)
        except MessagesRefused:
            self._tools = before
            raise

    async def reply(self, calls: Sequence[ToolCall], *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None) -> Turn:
        """Run these calls, all at once, and have the model go on with their results. `max_tokens` and `stop` as in `say`."""
        self._table.begins_work(self.name)
        try:
            outcomes = await self.run(calls)
            results = [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": self._conversation.defused(outcome.text)}
                for call, outcome in zip(calls, outcomes, strict=True)
            ]
            return await self._turn(results, max_tokens, stop)
        finally:
            self._table.ends_work(self.name)

    async def run(self, calls: Sequence[ToolCall]) -> list[Outcome]:
        """Run calls, all at once, and return what came of each, in their order, without telling the model."""
        number = self._num_runs
        self._num_runs += 1
        own = "" if self.name == MAIN else f"{self.name}: "
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._run(call, f"{own}{number}.{at}")) for at, call in enumerate(calls)]
        self._table.begins_work(self.name)
        try:
            # The loop goes round twice less for a task that is awaited than for a group of one.
            return [await tasks[0]] if len(tasks) == 1 else list(await asyncio.gather(*tasks))
        finally:
            self._table.ends_work(self.name)
            if left := [task for task in tasks if not task.done()]:
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def _run(self, call: ToolCall, key: str) -> Outcome:
        found = self._tools.get(call.name)
        fault = call.fault or self._fault(call)
        if fault or found is None:
            return Outcome(f"Error: {fault}", is_error=True)
        arguments, fault = found.checked(call)
        if fault:
            return Outcome(f"Error: {fault}", is_error=True)
        known, is_pure = self._link.known(key), found.replay == "pure"
        if not is_pure and not self.num_tokens:
            raise EpisodeFailed("invalid", f"the tool {found.name} is not declared pure: it can't run before the model's first turn")
        if known is not None and not is_pure:
            if known.outcome is None:
                raise EpisodeFailed("lost", f"the tool {found.name} had begun when its worker was lost, and may not run twice")
            self._table.has_old_resources |= bool(found.resources)
            if any(kind in self._table.shared for _, kind in found.resources):
                self._lost(found)
            return known.outcome
        if known is not None and known.outcome is not None and not found.resources:
            return known.outcome
        if found.resources and (self._table.has_old_resources or (known is None and self._link.lost_resources)):
            self._lost(found)
        if known is None:
            await self._link.began(key, call, has_effects=not is_pure, opens=bool(found.resources))
        outcome = await (self._called(found, arguments) if self._table.told is None else self._told(found, call, arguments, key))
        if known is None or known.outcome is None:
            await self._link.returned(key, outcome, has_effects=not is_pure)
        elif outcome != known.outcome:
            raise EpisodeFailed("diverged", f"the tool {found.name}, which is declared pure, gave another result when it was repeated")
        return outcome

    def _lost(self, found: Tool) -> typing.NoReturn:
        """End an episode whose resources are not where its record left them; of a branch, which would always be so, the run."""
        names = " and ".join(kind.__name__ for _, kind in found.resources)
        if self._table.is_branch:
            what = f"{names}, which the tool {found.name} works on, can't be brought to where it was in the turn of a branch"
            now = 'Declare tools that only change such resources @tool(replay="pure"): they are run again. Or branch before they are used.'
            self._table.end_run(OpError(what, now=now))
        raise EpisodeFailed("lost", f"what {found.name} works on was in a worker that was lost")

    async def _told(self, found: Tool, call: ToolCall, arguments: Mapping[str, object], key: str) -> Outcome:
        """What a tool gave in the run whose decisions are repeated, or gives now, where it may be called again."""
        table = self._table
        assert table.told is not None
        kinds = {kind for _, kind in found.resources}
        known = table.told.tools.get(key)
        outcome = Outcome(str(known["result"]), bool(known["is_error"])) if known is not None and "result" in known else None
        is_anew = (found.replay == "pure" or not kinds.isdisjoint(table.shared)) and kinds.isdisjoint(table.untouched)
        if known is None and not is_anew and not table.told.failure:
            self._ends_run(SpecError, f"the tool {found.name} is called, and the record of decisions has no such call", _OTHER_FLOW)
        if known is not None and (then := _shown(known["name"], known["arguments"])) != (now := _shown(call.name, call.arguments)):
            self._ends_run(SpecError, f"the agent calls {now}, and in the record of decisions {then}", _OTHER_FLOW)
        if is_anew and outcome != found.overdue:  # Time has decided that.
            gave = await self._called(found, arguments)
            if outcome is not None and gave != outcome:
                said = f"the tool {found.name} gave {gave.text!r:.200}, and {outcome.text!r:.200} in the run whose decisions are repeated"
                self._ends_run(OpError, said, 'Declare it @tool(replay="recorded"): its result does not depend on its arguments alone.')
            return gave
        table.untouched |= kinds
        if outcome is None:
            raise EpisodeFailed(typing.cast(EpisodeFailure, table.told.failure or "tool_failed"), table.told.error)
        return outcome

    def _ends_run(self, kind: type[M2FlowError], what: str, now: str) -> typing.NoReturn:
        assert self._table.told is not None
        what = f"sample {self._table.told.sample}: {what}"
        self._table.end_run(kind(what, now=now))
        raise EpisodeFailed("diverged", what)

    async def _called(self, found: Tool, arguments: Mapping[str, object]) -> Outcome:
        """Run a tool, and have it recorded."""
        began, came = time.monotonic_ns(), "cancelled"
        runs: list[int] = []
        limits: list[asyncio.TimerHandle] = []

        def begins() -> None:
            runs.append(time.monotonic_ns())
            if found.timeout_s is not None and inspect.iscoroutinefunction(found.function):  # A plain one is given up.
                limits.append(self._link.stuck_after(found.timeout_s, f"the tool {found.name}"))

        try:
            opened = {name: await self._table.resources.get(kind) for name, kind in found.resources}
            outcome = await found.run(arguments, opened, self._link.threads, begins)
            came = "error" if outcome.is_error else "ok"
            return outcome
        except EpisodeFailed as error:
            came = "failed"
            if (lack := lack_of(error)) is not None:  # Here, since an agent may go on without the tool.
                self._table.end_run(lack)
            raise
        finally:
            for limit in limits:
                limit.cancel()
            if runs:
                about: dict[str, object] = {"label": found.name, "outcome": came}
                if slots := found.slots(self._link.threads):
                    about |= {"slots": slots, "own_slots": found.own_slots is not None, "waited_us": (runs[0] - began) // 1000}
                self._link.passed("tool", runs[0], time.monotonic_ns(), about)

    def _defused(self, message: Message) -> Message:
        """A tool's message in which no special token is written; any other one as it is."""
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, str):
            return message
        return {**message, "content": self._conversation.defused(content)}

    def _passed(self, asked: Asked, began: int, reply: Reply | None) -> None:
        """Have a turn recorded that has ended, unless all of it was on record."""
        made = 0 if reply is None else len(reply.tokens) - reply.num_known
        if reply is None or (not made and reply.num_known):
            return
        context = len(asked.ids) if asked.begins else len(self._context) + len(asked.ids)
        about: dict[str, object] = {"turn": self.num_turns + 1, "num_tokens": made, "num_prompt_tokens": context}
        about |= {"num_new_tokens": len(asked.ids) - (len(self._context) if self._branches_off else 0), "finish": reply.finish.name.lower()}
        about |= {key: value for key, value in (("conversation", self.name), ("speaker", self.by)) if value not in ("", MAIN)}
        if reply.num_cached:
            about["num_cached"] = reply.num_cached
        self._link.passed("turn", began, reply.at_ns, about)

    def _fault(self, call: ToolCall) -> str:
        known = ", ".join(self._tools) or "none"
        return "" if call.name in self._tools else f"there is no tool {call.name!r}; there are {known}"

    def _check_whole(self) -> None:
        if self._broken:
            said = f"the conversation {self.name} can't go on: a turn of it was broken off ({self._broken})"
            raise EpisodeFailed("invalid", said)

    async def _turn(self, new: str | Sequence[Message], max_tokens: int | None, stop: str | Sequence[str] | None) -> Turn:
        if self._is_busy:
            raise RuntimeError("a chat has one turn at a time; this one has not ended")
        self._check_whole()
        usual = self._table.stop_of.get(self.by, self._table.stop)
        texts = usual if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if stop is not None:
            Sampling(1, stop=texts)  # It raises here what would end the engine there.
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens <= 0):  # With these the turn is empty.
            check_count("max_tokens", max_tokens)
        self._is_busy = True
        self._table.begins_work(self.name)
        try:
            return await self._next(new, max_tokens, texts)
        finally:
            self._table.ends_work(self.name)
            self._is_busy = False

    async def _next(self, new: str | Sequence[Message], max_tokens: int | None, stop: tuple[str, ...]) -> Turn:
        if self.num_turns >= self._max_turns:
            raise EpisodeFailed("too_many_turns", f"the conversation {self.name} has had its {self._max_turns} turns")
        has_begun = self.name in self._table.begun
        self._table.begin(self.name)
        conversation, is_first = self._conversation, not self._conversation.has_begun
        written = None
        try:
            if is_first:
                ids = conversation.begun(new, [one.description for one in self._tools.values()])
            else:
                conversation.offer([one.description for one in self._tools.values() if one.name not in conversation.offered])
                written = conversation.rewritten(_messages(new))
                ids = conversation.followed(_messages(new)) if written is None else written.ids
        except DatasetError as error:
            if not has_begun:
                self._table.begun.discard(self.name)
            raise MessagesRefused(error) from error
        num_added = 0 if is_first else len(ids) if written is None else written.num_added
        begins = is_first or written is not None or self._branches_off
        if begins and written is None:
            ids = [*self._context, *ids]
        room = self._max_tokens - self.num_tokens - num_added
        limit = room if max_tokens is None else min(room, max_tokens)
        parent = self._table.parents[self.name] if self._branches_off else ""
        said = conversation.prompt_text or (new if isinstance(new, str) else None)
        heard = None if self.on_text is None else self._heard(len(ids) + (0 if begins else len(self._context)), stop, self.on_text)
        asked = Asked(self.name, ids, begins, limit, stop, said if is_first else None, parent, self.by, heard)
        began = time.monotonic_ns()
        try:
            reply = await self._link.turn(asked) if limit > 0 else None
            if limit > 0:
                self._passed(asked, began, reply)
            if reply is None and is_first:
                if max_tokens is not None and max_tokens <= 0:
                    raise EpisodeFailed("invalid", f"max_tokens={max_tokens} leaves no room for a response to the first prompt")
                raise EpisodeFailed("invalid", f"the first prompt, of {len(ids)} tokens, leaves no room for a response")
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        self.num_turns += 1
        if reply is None:
            return Turn("", (), is_cut=True, num_tokens=0)
        if not is_first:
            conversation.accepted(_messages(new))
        self._branches_off = False
        if begins:
            self._context = [*ids, *reply.tokens]
        else:
            self._context += ids
            self._context += reply.tokens
        self.num_tokens += len(reply.tokens) + num_added
        is_whole = reply.finish is Finish.STOP
        text, calls = conversation.heard(reply.tokens, reply.text, is_whole=is_whole, tools=self._fault)
        left = calls if self.num_turns < self._max_turns else ()
        context = len(self._context) - len(reply.tokens)
        return Turn(text, left, not is_whole, len(reply.tokens), conversation.raw, context, reply.tokens, reply.logprobs)

    def _heard(self, context: int, stop: tuple[str, ...], on_text: Callable[[int, str], None]) -> Callable[[Sequence[int], str], None]:
        """What hears of a turn: it holds back what may become a stop text, a tool call, or a whole character."""
        held = max((len(text) for text in stop), default=1) - 1

        def heard(tokens: Sequence[int], text: str) -> None:
            if sure := self._conversation.surely_said(tokens, text[: len(text) - held].rstrip("\ufffd")):
                on_text(context, sure)

        return heard

    def num_prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """How many tokens a conversation has that begins with this. Nothing is said.

        Args:
            tools: those that the model is shown.
        Raises:
            MessagesRefused: the chat template refuses it.
        """
        try:
            return len(self._table.make(self.by).begun(messages, [one.description for one in tools]))
        except DatasetError as error:
            raise MessagesRefused(error) from error

    def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return self._conversation.texts_of(tokens)


def idle_s_of(chat: Chat) -> float:
    """For how long no turn and no tool call has been under way in the episode of a chat."""
    return chat._table.idle_s


_OTHER_FLOW = "The record must be of a run of this flow, with the same options and seed."


def _shown(name: str, arguments: Mapping[str, object]) -> str:
    return f"{name}({json.dumps(dict(arguments))})"


def _messages(new: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": new}] if isinstance(new, str) else list(new)


def lack_of(error: BaseException | None) -> M2FlowError | None:
    """What the worker lacks, where an error comes of that: a package, or a sandbox's tier. Each episode that needs it would fail so."""
    while error is not None and not isinstance(error, MissingExtra | MissingTier):
        error = error.__cause__
    return error


@final
class Resources:
    """The resources of an episode: one object of each class, opened when it is first needed."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._opening: dict[type, asyncio.Future[object]] = {}
        stack.push_async_callback(self._give_up)

    async def get(self, kind: type) -> object:
        """The episode's object of a class.

        Raises:
            EpisodeFailed: it can't be opened.
        """
        if kind not in self._opening:
            self._opening[kind] = asyncio.ensure_future(self._open(kind))
        return await asyncio.shield(self._opening[kind])

    async def _give_up(self) -> None:
        """End what is being opened still: the episode is over."""
        opening = [one for one in self._opening.values() if not one.done()]
        for one in opening:
            one.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    async def _open(self, kind: type) -> object:
        own = asyncio.current_task()
        try:
            return await self._stack.enter_async_context(typing.cast(Any, kind)())
        except BaseException as error:
            if is_stopped(error, own):
                raise
            raise EpisodeFailed("tool_failed", f"{kind.__name__} can't be opened: {described(error)}") from error


class Rewards(NamedTuple):
    """What an agent returned."""

    reward: float | None
    """The episode's reward; None: it is judged later. Where conversations have their own, the mean of those that the policy's go by."""
    parts: Mapping[str, float]
    of: Mapping[str, float]
    """By the names that the agent gave; empty: the episode has one reward."""
    names: Mapping[str, str]
    """Conversation in which the model spoke -> the entry of these rewards that it goes by."""


def reward_of(value: object, table: Table) -> Rewards:
    """Read what an agent returned: its reward, None for none, and the parts of it, or the rewards of its conversations.

    Raises:
        EpisodeFailed: it is neither.
    """
    parts: Mapping[str, object] = {}
    if isinstance(value, Mapping) and value and "reward" not in value:
        return _of_conversations(value, table)
    if isinstance(value, Mapping) and "reward" in value:
        parts = {str(name): part for name, part in value.items() if name != "reward"}
        value = value["reward"]
    if value is None and not parts:
        return Rewards(None, {}, {}, {})
    numbers = _numbers({"reward": value, **parts})
    reward = numbers.pop("reward")
    return Rewards(reward, numbers, {}, {})


def _of_conversations(value: Mapping[Any, object], table: Table) -> Rewards:
    unknown = [name for name in value if name not in table.parents]
    if unknown:
        said = f"the agent returned a reward of {unknown[0]!r:.60}, and its conversations are {', '.join(table.parents)}"
        raise EpisodeFailed("invalid", said)
    numbers, names = _numbers(value), dict[str, str]()
    for name in table.begun:
        found = name
        while found and found not in numbers:
            found = table.parents[found]
        if found:
            names[name] = found
    judged = {"", *(table.by[name] for name in names)}  # Of the others, those that nothing trains need no reward.
    left = sorted(name for name in table.begun.difference(names) if table.by[name] in judged)
    if left:
        raise EpisodeFailed("invalid", f"the agent returned rewards of {', '.join(numbers)}, and none of the conversation {left[0]}")
    own = {found for name, found in names.items() if not table.by[name]}
    used = [numbers[name] for name in sorted(own or numbers)]
    return Rewards(sum(used) / len(used), {}, numbers, dict(sorted(names.items())))


def _numbers(given: Mapping[Any, object]) -> dict[str, float]:
    numbers = dict[str, float]()
    for name, part in given.items():
        try:
            number = math.nan if isinstance(part, str | bytes) else float(typing.cast(Any, part))
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            of = "" if name == "reward" else f" for {name!r:.60}"
            raise EpisodeFailed("invalid", f"the agent returned {part!r:.80}{of}; a reward, and each part of it, is a finite number")
        numbers[str(name)] = number
    return numbers
