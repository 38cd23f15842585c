"""Agents: async functions that converse with the model, and the `Chat` by which they do.

    @agent
    async def solver(chat: Chat, row: Sample) -> float:
        turn = await chat.say(row.prompt, tools=[python])
        while turn.calls:
            turn = await chat.reply(turn.calls)
        return float(turn.text == row.answer)

An agent is called once a sample. Each `say` and `reply` is a turn of the model: a request to the engine that the other episodes do not wait
for. What the agent returns is the episode's reward: a number, or a mapping with `reward` and its parts, or None where it is judged later.

Bounds. The episode's budget (`max_tokens`) counts all tokens after its first prompt. What does not fit is not appended: the turn is then
empty and `is_cut`, and the conversation ends where it was. Of a turn that is cut off no tool call is read. The last turn that an episode
may have (`max_turns`) has no calls either, so a loop over calls ends by itself; asking for more is a failure of the episode.

An agent is repeated where its worker was lost: what it does must follow from its row, from what the model and the tools say, and from
`chat.rng`. The clock and other random numbers do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final, overload

from m2flow.agents.conversation import Conversation
from m2flow.agents.parsers import FAMILIES, Family, Parser
from m2flow.agents.tools import EpisodeFailed, Outcome, Tool, ToolCall, parameters
from m2flow.errors import DatasetError, OptionError
from m2flow.samples import Finish, Message


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
        tool_calls: the form in which the model writes calls, `hermes`, `llama3` or `mistral`; by default what its chat template asks for.
            Or a function of the model's raw text, which returns the text without calls, and a list of `ToolCall`.
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


class Reply(NamedTuple):
    """A turn as the engine made it."""

    tokens: Sequence[int]
    text: str
    finish: Finish


class Known(NamedTuple):
    """What the record of a repeated episode has of a tool call."""

    outcome: Outcome | None
    """None: it had begun."""


class Link(Protocol):
    """What a chat asks of the process that it runs in."""

    threads: Executor

    async def turn(self, ids: Sequence[int], max_new_tokens: int, stop: tuple[str, ...], prompt_text: str | None) -> Reply | None:
        """Append tokens and have the model go on; None, and nothing appended: they fill its context."""

    def known(self, key: str) -> Known | None:
        """A tool call of the record; None: it is new."""

    async def began(self, key: str, call: ToolCall, *, has_effects: bool) -> None:
        """Note that a tool call begins; with effects, return when that is written down."""

    async def returned(self, key: str, outcome: Outcome, *, has_effects: bool) -> None:
        """Note what it gave, likewise."""


@dataclass(frozen=True)
class Turn:
    """What the model said in one turn."""

    text: str
    """Without its tool calls, and without special tokens."""
    calls: tuple[ToolCall, ...]
    is_cut: bool
    """It was cut off, by a limit of tokens."""
    num_tokens: int


@final
class Chat:
    """One conversation of an episode with the policy."""

    def __init__(
        self,
        link: Link,
        conversation: Conversation,
        max_tokens: int,
        max_turns: int,
        stop: tuple[str, ...],
        seed: int,
        resources: Resources,
    ) -> None:
        self._link = link
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._stop = stop
        self._tools: dict[str, Tool] = {}
        self._resources = resources
        self._is_busy = False
        self._num_runs = 0
        self._has_old_resources = False
        """A resource was used before, in the record: what it held is gone."""
        self.num_turns = 0
        """Turns of the model so far."""
        self.num_tokens = 0
        """Tokens after the first prompt, whoever they are of."""
        self.rng = random.Random(seed)
        """Random numbers of this episode, the same whenever it is repeated."""

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
            max_tokens: of the answer; by default what is left of the episode's.
            stop: texts that end the answer, in place of the rollout's.
        """
        for one in tools:
            if not isinstance(one, Tool):
                raise TypeError(f"tools={one!r:.60}: it is no function under @tool")
        self._tools |= {one.name: one for one in tools}
        new = [{"role": role, "content": content}] if isinstance(content, str) else list(content)
        if self._conversation.has_begun:
            return await self._turn(new, max_tokens, stop)
        first = content if role == "user" else new
        return await self._turn(first, max_tokens, stop)

    async def reply(self, calls: Sequence[ToolCall], *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None) -> Turn:
        """Run these calls, all at once, and have the model go on with their results. `max_tokens` and `stop` as in `say`."""
        outcomes = await self.run(calls)
        results = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": self._conversation.defused(outcome.text)}
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        return await self._turn(results, max_tokens, stop)

    async def run(self, calls: Sequence[ToolCall]) -> list[Outcome]:
        """Run calls, all at once, and return what came of each, in their order, without telling the model."""
        number = self._num_runs
        self._num_runs += 1
        tasks = [asyncio.ensure_future(self._run(call, f"{number}.{at}")) for at, call in enumerate(calls)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
            self._has_old_resources |= bool(found.resources)
            return known.outcome
        if known is not None and known.outcome is not None and not found.resources:
            return known.outcome
        if found.resources and self._has_old_resources:
            raise EpisodeFailed("lost", f"what {found.name} works on was in a worker that was lost")
        if known is None:
            await self._link.began(key, call, has_effects=not is_pure)
        opened = {name: await self._resources.get(kind) for name, kind in found.resources}
        outcome = await found.run(arguments, opened, self._link.threads)
        if known is None or known.outcome is None:
            await self._link.returned(key, outcome, has_effects=not is_pure)
        elif outcome != known.outcome:
            raise EpisodeFailed("diverged", f"the tool {found.name}, which is declared pure, gave another result when it was repeated")
        return outcome

    def _fault(self, call: ToolCall) -> str:
        known = ", ".join(self._tools) or "none"
        return "" if call.name in self._tools else f"there is no tool {call.name!r}; there are {known}"

    async def _turn(self, new: str | Sequence[Message], max_tokens: int | None, stop: str | Sequence[str] | None) -> Turn:
        if self._is_busy:
            raise RuntimeError("a chat has one turn at a time; this one has not ended")
        self._is_busy = True
        try:
            return await self._next(new, max_tokens, self._stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop))
        finally:
            self._is_busy = False

    async def _next(self, new: str | Sequence[Message], max_tokens: int | None, stop: tuple[str, ...]) -> Turn:
        if self.num_turns >= self._max_turns:
            raise EpisodeFailed("too_many_turns", f"the episode has had its {self._max_turns} turns")
        conversation, is_first = self._conversation, not self._conversation.has_begun
        try:
            if is_first:
                ids = conversation.begun(new, [one.description for one in self._tools.values()])
            else:
                ids = conversation.followed(_messages(new))
        except DatasetError as error:
            raise EpisodeFailed("invalid", f"{error.what} {error.now}".strip()) from error
        room = self._max_tokens - self.num_tokens - (0 if is_first else len(ids))
        limit = room if max_tokens is None else min(room, max_tokens)
        reply = await self._link.turn(ids, limit, stop, conversation.prompt_text if is_first else None) if limit > 0 else None
        self.num_turns += 1
        if reply is None and is_first:
            raise EpisodeFailed("invalid", f"the first prompt, of {len(ids)} tokens, leaves no room for a response")
        if reply is None:
            return Turn("", (), is_cut=True, num_tokens=0)
        if not is_first:
            conversation.accepted(_messages(new))
        self.num_tokens += len(reply.tokens) + (0 if is_first else len(ids))
        is_whole = reply.finish is Finish.STOP
        text, calls = conversation.heard(reply.tokens, reply.text, is_whole=is_whole, tools=self._fault)
        return Turn(text, calls if self.num_turns < self._max_turns else (), not is_whole, len(reply.tokens))


def _messages(new: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": new}] if isinstance(new, str) else list(new)


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
        try:
            return await self._stack.enter_async_context(typing.cast(Any, kind)())
        except Exception as error:
            raise EpisodeFailed("tool_failed", f"{kind.__name__} can't be opened: {type(error).__name__}: {error}") from error


def reward_of(value: object) -> tuple[float | None, Mapping[str, float]]:
    """Read what an agent returned: its reward, None for none, and the parts of it.

    Raises:
        EpisodeFailed: it is neither.
    """
    parts: Mapping[str, object] = {}
    if isinstance(value, Mapping) and "reward" in value:
        parts = {str(name): part for name, part in value.items() if name != "reward"}
        value = value["reward"]
    if value is None and not parts:
        return None, {}
    try:
        numbers = {name: float(typing.cast(Any, part)) for name, part in {"reward": value, **parts}.items()}
    except (TypeError, ValueError):
        numbers = {"reward": float("nan")}
    if isinstance(value, str) or any(number - number != 0 for number in numbers.values()):
        raise EpisodeFailed("invalid", f"the agent returned {value!r:.80}; a reward is a finite number")
    reward = numbers.pop("reward")
    return reward, numbers
