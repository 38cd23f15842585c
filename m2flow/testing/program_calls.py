"""Interpret random programs inside a flow: user functions, agents, the calls that statements make, and control flow.

`Player` does what an agent does in one episode, `Calls` makes the calls of statements, `Interpreter` runs control flow; what a program
counts for itself is in `programs.Account`. A statement names its operands by counting back from the newest. One that has nothing to work
on makes no call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from m2flow.agents.chat import Agent, Chat, Turn, agent
from m2flow.agents.tools import EpisodeFailed, ToolCall, tool
from m2flow.errors import DatasetError, OpError
from m2flow.macro.critics import Critic, gae
from m2flow.macro.datasets import Dataset
from m2flow.macro.flow import Flow
from m2flow.macro.handles import Metrics, Rows, concat, where
from m2flow.macro.loss_declarations import nll, ppo_clip
from m2flow.macro.number import Number
from m2flow.macro.ops import Role, call, log, op, steps
from m2flow.macro.refill import Keep, informative
from m2flow.macro.roles import Policy, Reference, Reward
from m2flow.recipe import AdamW, by_conversation
from m2flow.samples import Finish, Sample
from m2flow.testing import programs as p
from m2flow.testing.fakes import fake_hash
from m2flow.testing.programs import Account, Lag, Leave, Look, OnStep, Program, Refer, Repeat, Statement, Try

# ---- user functions: rewards, ops, roles, filters and keeps


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def length_penalty(sample: Sample) -> float | dict[str, float]:
    """A reward that returns its parts for some samples."""
    penalty = -sample.num_tokens / 64
    return {"reward": penalty, "tokens": sample.num_tokens, "cut": sample.finish is Finish.LENGTH} if _hash(sample) % 3 else penalty


def at_random(sample: Sample) -> float:
    return float(_hash(sample) % 2)


def raises_on_some(sample: Sample) -> float:
    if _hash(sample) % 3 == 0:
        raise ValueError("no verdict")
    return float(_hash(sample) % 2)


def raises_on_few(sample: Sample) -> float:
    if _hash(sample) % 11 == 0:
        raise ValueError("no verdict")
    return at_random(sample)


def no_number_on_some(sample: Sample) -> object:
    return "none" if _hash(sample) % 3 == 0 else 0.5


def _hash(sample: Sample) -> int:
    return fake_hash(*(ord(c) for c in str(sample.text)))


@op()
def doubled_length(sample: Sample) -> float:
    return 2.0 * sample.num_tokens


@op(granularity="group")
def rank_in_group(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


@op(granularity="minibatch", size=2)
def place_in_minibatch(samples: list[Sample]) -> list[float]:
    return [place + len(samples) / 16 for place in range(len(samples))]


@op(granularity="batch")
def digest_of_all(samples: list[Sample]) -> float:
    return float(fake_hash(len(samples), *(_hash(sample) & 0xFFFF for sample in samples)) % 997)


@op()
def raising_op(sample: Sample) -> float:
    return raises_on_some(sample)


@op(granularity="group")
def raising_on_groups(samples: list[Sample]) -> list[int]:
    if _hash(samples[0]) % 4 == 0:
        raise KeyError(samples[0].text)
    return [len(samples)] * len(samples)


@op()
def weighed(sample: Sample, number: float, whole: float, factor: float, rng: random.Random) -> float:
    return round(number * factor + _finite(whole) / (1 + sample.num_tokens) + rng.random(), 6)


@op(granularity="group")
def against(numbers: list[float], samples: list[Sample], others: list[float], *, whole: float) -> list[float]:
    return [round(a - place * b + _finite(whole) % 1, 6) for place, (a, b) in enumerate(zip(numbers, others, strict=True))]


@op(granularity="batch")
def tied(samples: list[Sample], numbers: list[float], others: list[float], whole: float) -> float:
    ranks = sorted(range(len(samples)), key=lambda i: (numbers[i], others[i], i))
    return float(fake_hash(*ranks) % 997) + round(_finite(whole), 3)


def _finite(number: float) -> float:
    """Replace NaN, the mean of no samples, by a number."""
    return number if math.isfinite(number) else 0.0


BOARD: list[int] = []
"""State outside of the program. Whoever runs a program in this process clears it first."""


@op(writes=["board"])
def posted(sample: Sample) -> float:
    last = BOARD[-1:] or [0]
    BOARD.append(sample.num_tokens + 3 * last[0] % 101)
    return float(last[0])


@op(granularity="batch", reads=["board"])
def board_digest() -> float:
    return float(fake_hash(*BOARD) % 997)


class Keeper(Role):
    """A role that remembers what it has seen, so that each of its numbers shows the order of its calls and samples."""

    def __init__(self, first: int, *, fails: bool) -> None:
        self.seen = [first]
        self.fails = fails

    @call(returns="reward", writes=["keeper.seen"])
    def note(self, sample: Sample) -> float:
        novelty = sum(abs(length - sample.num_tokens) for length in self.seen[-3:])
        self.seen.append(sample.num_tokens)
        return raises_on_few(sample) if self.fails else float(novelty)

    @call(granularity="batch", reads=["keeper.seen"])
    def digest(self) -> float:
        return float(fake_hash(*self.seen) % 997)

    @call(granularity="group", reads=["keeper.seen"], returns=["rank", "last"])
    async def compare(self, samples: list[Sample], numbers: list[float]) -> list[dict[str, float]]:
        await asyncio.sleep(0)
        return [{"rank": sorted(numbers).index(number), "last": self.seen[-1]} for number in numbers]

    @call(granularity="batch", writes=["keeper.seen"])
    def forget(self, keep: int) -> None:
        self.seen = self.seen[-keep:]

    @call(granularity="sample")
    def plain(self, sample: Sample, rng: random.Random) -> float:
        return round(rng.random() * sample.num_tokens + len(self.seen), 6)


def longest_differs(group: list[Sample]) -> bool:
    return max(sample.num_tokens for sample in group) % 3 != 0


def every_second(group: list[Sample]) -> bool:
    return bool(_hash(group[0]) % 2)


def keep_raises(group: list[Sample]) -> bool:
    if _hash(group[0]) % 6 == 0:
        raise RuntimeError("can't say")
    return bool(_hash(group[0]) % 2)


def is_odd_text(sample: Sample) -> bool:
    return bool(_hash(sample) % 2)


def lengths_differ(samples: list[Sample]) -> bool:
    return len({s.num_tokens for s in samples}) > 1


REWARDS = (digit_share, length_penalty, at_random, raises_on_some, no_number_on_some, raises_on_few)
KEEPS: tuple[Keep, ...] = (informative, longest_differs, every_second, keep_raises)
NUM_SAFE = 3
"""How many of the first rewards, and of the first keeps, never raise."""


# ---- agents


@tool(replay="pure")
async def echo(text: str, wait: float = 0.0) -> str:
    """Say it louder."""
    await asyncio.sleep(wait)
    return text.upper()


@tool(replay="pure")
def count(text: str, wait: float = 0.0) -> int:
    """Count on a thread."""
    return fake_hash(*map(ord, text)) % 100


@tool(replay="pure", timeout_s=0.005)
async def endless(text: str, wait: float = 0.0) -> str:
    """Never come to an end."""
    await asyncio.sleep(3600)
    return text


@tool(replay="pure")
async def refuse(text: str, wait: float = 0.0) -> str:
    """Raise on every other text."""
    await asyncio.sleep(wait)
    if fake_hash(*map(ord, text)) % 2:
        raise ValueError(f"no {text}")
    return "yes"


@tool(replay="pure", on_error="fail")
def insist(text: str, wait: float = 0.0) -> str:
    """End the episode on some texts."""
    if fake_hash(*map(ord, text)) % 4 == 0:
        raise KeyError(text)
    return "<eos>"


@tool(replay="recorded", max_chars=12, slots=2)
async def spend(text: str, wait: float = 0.0) -> str:
    """Do what may not be done twice."""
    await asyncio.sleep(wait)
    return text * 9


TOOLS = (echo, count, refuse, spend, insist, endless)


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """Take some texts of a model for one or two tool calls."""
    kind = fake_hash(*map(ord, text)) % 5
    return text, [ToolCall(TOOLS[(kind + i) % 3].name, {"text": text[:3]}) for i in range(kind % 3)]


_MOST_FOLLOWED = 3


@dataclass(eq=False)
class _Scope:
    """What one line of an agent's work may use: no other one uses its conversations at the same time."""

    name: str
    chats: list[Chat]
    heard: str = ""
    turn: Turn | None = None
    is_error: bool = False
    """Whether the latest call of a tool went wrong."""
    num_begun: int = field(default=0)


@final
class Player:
    """Does what a random agent does in one episode."""

    def __init__(self, chat: Chat, row: Sample, of: p.Rollout, speaker: str) -> None:
        self._row = row
        self._of = of
        self._speaker = speaker
        """Who may speak beside the policy; empty: nobody."""
        self._begun = [chat.name]
        self._scope = _Scope("", [chat])

    async def play(self) -> object:
        """Play the episode; returns what the agent returns."""
        scope = self._scope
        await self._do_all(self._of.agent, scope)
        number = fake_hash(*map(ord, scope.heard)) % 64 / 8
        match self._of.returns:
            case "parts":
                return {"reward": number, "heard": len(scope.heard), "turns": scope.chats[0].num_turns}
            case "named":
                return {name: number - place for place, name in enumerate(sorted(self._begun))}
            case "broken" if number > 5:
                return math.nan if number > 6 else "none"
        return number

    async def _do_all(self, acts: Sequence[p.Act], scope: _Scope) -> None:
        for act in acts:
            await self._do(act, scope)

    async def _do(self, act: p.Act, scope: _Scope) -> None:
        match act:
            case p.Say() | p.Work() | p.Follow():
                await self._speak(act, _at(scope.chats, act.chat), scope)
            case p.Branch(on=on, then=then, otherwise=otherwise):
                await self._do_all(then if _is_so(on, scope) else otherwise, scope)
            case p.Times(times=times, body=body):
                for _ in range(times):
                    await self._do_all(body, scope)
            case p.Gather():
                await self._gather(act, scope)
            case p.Attempt(body=body, otherwise=otherwise):
                try:
                    await self._do_all(body, scope)
                except (ValueError, TimeoutError, EpisodeFailed) as error:
                    if isinstance(error, EpisodeFailed) and error.how in ("lost", "diverged"):
                        raise
                    scope.heard += type(error).__name__
                    await self._do_all(otherwise, scope)
            case p.Fail(how=how):
                await _fail(how)
            case p.Pause(wait=wait):
                await asyncio.sleep(wait / 1000)

    async def _speak(self, act: p.Say | p.Work | p.Follow, chat: Chat, scope: _Scope) -> None:
        match act:
            case p.Say(what=what, longest=longest):
                said = {"row": str(self._row.prompt), "random": f"{chat.rng.random():.3f}", "heard": scope.heard[-5:]}.get(what, "?")
                content = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}][chat.num_turns > 0 :]
                tools, stop = TOOLS if act.offers else (), ["e", "th"] if act.stops else None
                turn = await chat.say(content if what == "messages" else said, tools=tools, max_tokens=longest, stop=stop)
                self._heard(turn, scope)
            case p.Work(uses=uses, longest=longest):
                calls = [_call(use, f"{scope.heard[-2:]}{at}") for at, use in enumerate(uses)]
                if act.is_told:
                    self._heard(await chat.reply(calls, max_tokens=longest), scope)
                else:
                    outcomes = await chat.run(calls)
                    scope.heard += "".join(outcome.text[:3] for outcome in outcomes)
                    scope.is_error = any(outcome.is_error for outcome in outcomes)
            case p.Follow(longest=longest):
                for _ in range(_MOST_FOLLOWED):
                    if scope.turn is None or not scope.turn.calls:
                        break
                    self._heard(await chat.reply(scope.turn.calls, max_tokens=longest), scope)

    def _heard(self, turn: Turn, scope: _Scope) -> None:
        scope.turn = turn
        scope.heard += turn.text

    async def _gather(self, act: p.Gather, scope: _Scope) -> None:
        first, second = (self._scope_of(act, scope, of_second=which == 1) for which in range(2))
        works = [self._do_all(act.first, first), self._do_all(act.second, second)]
        ended = await asyncio.gather(*works, return_exceptions=True)
        for each in (first, second):
            scope.chats += each.chats
            scope.heard += each.heard
        for error in ended:
            if error is not None:
                raise error

    def _scope_of(self, act: p.Gather, scope: _Scope, *, of_second: bool) -> _Scope:
        name = f"{scope.name}c{scope.num_begun}"
        scope.num_begun += 1
        chat = _at(scope.chats, act.chat)
        if act.apart == "forked":
            return _Scope(name, [chat.fork()], scope.heard[-9:], scope.turn)
        made = chat.conversation(name, by=self._speaker if act.apart == "spoken" and of_second else "", max_tokens=60)
        self._begun.append(name)
        return _Scope(name, [made])


def _is_so(on: str, scope: _Scope) -> bool:
    match on:
        case "tokens":
            return scope.turn is not None and sum(scope.turn.tokens) % 2 == 1
        case "cut":
            return scope.turn is not None and scope.turn.is_cut
        case "result":
            return scope.is_error
        case "random":
            return scope.chats[0].rng.random() < 0.5
    return fake_hash(*map(ord, scope.heard)) % 2 == 1


def _call(use: p.Use, text: str) -> ToolCall:
    arguments: dict[str, object] = {"text": text, "wait": use.wait / 1000}
    return ToolCall(_at(TOOLS, use.tool).name, arguments if use.fits else {"words": text})


async def _fail(how: str) -> None:
    match how:
        case "fails":
            raise EpisodeFailed("tool_failed", "the machine is gone")
        case "times out":
            async with asyncio.timeout(0.002):
                await asyncio.sleep(3600)
        case "is cancelled":
            task = asyncio.ensure_future(asyncio.sleep(3600))
            task.cancel()
            await task
        case "exits":
            raise SystemExit(2)
    raise ValueError("no more")


def agent_of(of: p.Rollout, speaker: str) -> Agent:
    """Make the agent of a rollout."""

    async def player(chat: Chat, row: Sample) -> object:
        return await Player(chat, row, of, speaker).play()

    return agent(tool_calls=calls_in)(player) if of.reads else agent(player)


MOST_CONVERSATIONS = 64
"""More than any agent begins: which is the first too many would depend on time."""

MOST_VARIABLES = 3
"""The number of results of each kind that a program can reach; older ones are released."""
MOST_SAMPLES = 18
"""The most samples of a generation: small enough to run thousands of programs."""

CARRIED_N = 2
"""Samples of a prompt in the calls that carry late samples over (partial rollouts)."""

ROWS = [{"prompt": f"{i * 7919 % 1000}=", "target": str(i)} for i in range(5)]

T = TypeVar("T")


# ---- the calls that statements make


@dataclass(eq=False)
class _Samples:
    rows: Rows
    n: int
    """Samples of a prompt; 1 where updates can't compare them."""
    most: int
    made_by: frozenset[int]
    """Calls that made them."""
    parents: tuple[_Samples, ...] = ()
    """The samples that these were filtered from: what has rows of these has rows of the parents."""
    is_union: bool = False
    by_conversation: bool = False
    """Episodes whose conversations have rewards of their own."""


@dataclass(eq=False)
class _Numbers:
    rows: Rows
    of: _Samples
    is_returned: bool = False
    """Rewards that an agent returned."""


ReferenceMaker = Callable[[Policy, str], Reference]
"""Make a reference of a policy, with a name."""


def _recent() -> deque[T]:
    return deque(maxlen=MOST_VARIABLES)


@final
class Calls:
    """The roles, datasets and results of one run of a program; makes its calls."""

    step = -1
    """The step that the program is in."""

    def __init__(self, program: p.Program, account: Account, make_reference: ReferenceMaker | None = None) -> None:
        statements = list(program.statements())
        self._program = program
        self._make_reference = make_reference
        self._account = account
        self._samples: deque[_Samples] = _recent()
        self._numbers: deque[_Numbers] = _recent()
        self._values: deque[Number] = _recent()
        self._metrics: deque[Metrics] = _recent()
        self._policies = [Policy("fake", name=f"policy_{i}") for i in range(program.num_policies)]
        uses = {s.form for s in statements if isinstance(s, p.Update)}
        self._heldout = Dataset(ROWS[:3], name="heldout", shuffle=False)
        self._datasets = [Dataset(ROWS), self._heldout]
        self._demonstrations = Dataset(ROWS, name="demonstrations", shuffle=False)
        self._heldout.take(1)  # A flow must make at least one call.
        self._reference = Reference(self._policies[0]) if "reference" in uses else None
        has_critic = any(isinstance(s, p.Actor | p.Values) for s in statements)
        self._critic = Critic(self._policies[0]) if has_critic else None
        rewards = REWARDS if program.fails else REWARDS[:NUM_SAFE]
        self._rewards = [Reward(function) for function in rewards]
        self._keeps = KEEPS if program.fails else KEEPS[:NUM_SAFE]
        names = ("keeper", "other") if any(isinstance(s, p.Ask) for s in statements) else ()
        self._keepers = [Keeper(place, name=name, fails=program.fails) for place, name in enumerate(names)]  # type: ignore[call-arg]
        BOARD.clear()
        if any(isinstance(s, p.OnStep | p.Lag) for s in statements):
            len(self._heldout.all())  # What the first step does not use is placed only if it may be called after a look.

    def log_values(self) -> None:
        log(**{f"value_{i}": value for i, value in enumerate(self._values)})

    def make(self, statement: p.Statement) -> None:  # One case for each kind of statement.
        """Make the calls of a statement that is no control flow."""
        match statement:
            case p.Generate():
                self._generate(statement)
            case p.Refill(n=n, count=count):
                policy = _at(self._policies, statement.policy)
                rows = policy.generate(
                    _at(self._datasets, statement.dataset),
                    n=n,
                    max_new_tokens=14,
                    count=count,
                    score=_at(self._rewards, statement.reward),
                    keep=_at(self._keeps, statement.keep),
                    max_draws=statement.most,
                )
                self._generated(policy, rows, n, n * count)
            case p.Rollout():
                self._play(statement)
            case p.Union():
                self._unite(statement)
            case p.Combine():
                self._combine(statement)
            case p.Demonstrate(minibatch=minibatch):
                trained = _at(self._policies, statement.policy)
                passes = {"minibatch_size": minibatch or None, "optimizer": AdamW(1e-3)}
                self._updated(trained, trained.update(self._demonstrations.all(), loss=nll(), **passes))  # type: ignore[arg-type]
            case p.Log(which=which):
                if self._values and (which % 2 or not self._metrics):
                    log(value=_back(self._values, which // 2))
                elif self._metrics:
                    log(metric=_back(self._metrics, which // 2)["num_tokens"])
            case p.Ask(how="digest"):
                self._values.append(Number(_at(self._keepers, statement.role).digest()))
            case p.Ask(how="forget"):
                _at(self._keepers, statement.role).forget(2)
            case p.Post(is_read=True):
                self._values.append(Number(board_digest()))
            case p.Refer():
                self._refer(statement)
            case _ if self._samples:
                self._work_on(statement, _back(self._samples, statement.samples))  # type: ignore[union-attr]

    def _work_on(self, statement: p.Statement, samples: _Samples) -> None:
        match statement:
            case p.Score(reward=reward):
                self._score(_at(self._rewards, reward), samples)
            case p.ApplyOp(unit=unit):
                self._apply(unit, samples)
            case p.Logprobs(policy=policy):
                self._said(_at(self._policies, policy).logprobs(samples.rows))
            case p.Values() if self._critic is not None:
                self._said(self._critic.values(samples.rows))
            case p.Compare() if self._reference is not None:
                self._said(self._reference.logprobs(samples.rows))
            case p.Filter(how=how):
                parents = (samples, *samples.parents)
                rows = self._filtered(samples, how)
                self._samples.append(dataclasses.replace(samples, rows=rows, parents=parents))
            case p.Update():
                self._update(statement, samples)
            case p.Actor():
                self._act(statement, samples)
            case p.Mix():
                self._mix(statement, samples)
            case p.Ask():
                self._ask(statement, samples)
            case p.Post():
                self._numbered(posted(samples.rows), samples)  # type: ignore[arg-type]
                self._values.append(Number(board_digest()))

    # ---- samples

    def _generate(self, statement: p.Generate) -> None:
        policy, n = _at(self._policies, statement.policy), statement.n
        if statement.source == "samples":
            asked = [samples for samples in self._samples if not samples.is_union and samples.most * n <= MOST_SAMPLES]
            if not asked:
                return
            samples = _back(asked, statement.which)
            rows = policy.generate(samples.rows, n=n, max_new_tokens=statement.longest)
            self._generated(policy, rows, n, samples.most * n)
            return
        dataset, count, late = _at(self._datasets, statement.which), statement.count, "drop"
        may_be_stale = self.step >= 0 and self._program.staleness > 0 and not statement.is_exact
        options: dict[str, object] = {"max_new_tokens": statement.longest, "staleness": 0 if statement.is_exact else None}
        options |= {"kv": "keep"} if statement.keeps and may_be_stale else {}
        options |= {"stop": ["e", "th"]} if statement.longest % 3 == 0 else {}
        if statement.source == "all":
            rows = policy.generate(dataset.all(), n=n, **options)  # type: ignore[arg-type]
        elif statement.more and statement.defers:
            options |= {"oversample": 1 + statement.more / count, "late": "defer"}
            rows = policy.generate(dataset, count=count, n=n, **options)  # type: ignore[arg-type]
        elif statement.more:
            if statement.carries and may_be_stale:
                n, late = CARRIED_N, "carry"  # All calls here are at one line, whose groups must have one size.
            options |= {"oversample": 1 + statement.more / count, "late": late}
            rows = policy.generate(dataset.take(count + statement.more), n=n, **options)  # type: ignore[arg-type]
        else:
            rows = policy.generate(dataset.take(count), n=n, **options)  # type: ignore[arg-type]
        self._generated(policy, rows, n, rows.call.most_rows, is_exact=statement.is_exact, carries=late == "carry")

    def _play(self, statement: p.Rollout) -> None:
        policy, n = _at(self._policies, statement.policy), statement.n
        others = [other for other in self._policies if other is not policy] if statement.speaks else []
        episodes = policy.rollout(
            agent_of(statement, "other" if others else ""),
            _at(self._datasets, statement.dataset).take(statement.count),
            n=n,
            max_tokens=statement.longest,
            max_turns=statement.max_turns,
            failed=statement.failed,
            max_conversations=MOST_CONVERSATIONS,
            speakers={"other": others[0]} if others else None,
        )
        self._generated(policy, episodes, n, n * statement.count, speakers=[other.name for other in others])
        self._samples[-1].by_conversation = statement.returns == "named"
        self._numbered(episodes.reward, self._samples[-1]).is_returned = True

    def _generated(
        self,
        policy: Policy,
        rows: Rows,
        n: int,
        most: int,
        *,
        is_exact: bool = False,
        carries: bool = False,
        speakers: Sequence[str] = (),
    ) -> None:
        staleness = self._program.staleness if self.step >= 0 and not is_exact else 0
        self._account.generated(policy.name, rows.maker.ordinal, staleness, carries=carries, speakers=speakers)
        self._samples.append(_Samples(rows, n, most, frozenset({rows.call.ordinal})))

    def _filtered(self, samples: _Samples, how: str) -> Rows:
        match how:
            case "numbers":
                numbers = self._numbers_of(samples, 0).rows
                return samples.rows.select(numbers > numbers.mean())
            case "lengths":
                return samples.rows.filter(samples.rows.length > 2)
            case "samples":
                return samples.rows.filter(is_odd_text)
            case "groups":
                return samples.rows.filter_groups(lengths_differ)
        return samples.rows.filter(samples.rows.length < 0)

    def _unite(self, statement: p.Union) -> None:
        if not self._samples:
            return
        first = _back(self._samples, statement.first)
        others = [
            other
            for other in self._samples
            if other.by_conversation == first.by_conversation
            and not other.made_by & first.made_by
            and "reward" not in _columns(other, first)
        ]
        if not others:
            return
        second = _back(others, statement.second)
        rows = concat([first.rows, second.rows])
        most, n = first.most + second.most, min(first.n, second.n)
        made_by = first.made_by | second.made_by
        self._samples.append(_Samples(rows, n, most, made_by, is_union=True, by_conversation=first.by_conversation))

    # ---- numbers

    def _score(self, reward: Reward, samples: _Samples) -> _Numbers:
        return self._numbered(reward.score(samples.rows), samples)

    def _numbered(self, rows: Rows, samples: _Samples) -> _Numbers:
        self._numbers.append(_Numbers(rows, samples))
        self._values.append(rows.mean())
        return self._numbers[-1]

    def _numbers_of(self, samples: _Samples, which: int) -> _Numbers:
        fitting = [numbers for numbers in self._numbers if numbers.of in (samples, *samples.parents)]
        return _back(fitting, which) if fitting else self._score(self._rewards[0], samples)

    def _apply(self, unit: str, samples: _Samples) -> None:
        fails = self._program.fails
        functions = {"sample": raising_op if fails else doubled_length, "group": raising_on_groups if fails else rank_in_group}
        functions["minibatch"] = place_in_minibatch
        result = functions.get(unit, digest_of_all)(samples.rows)
        if isinstance(result, Rows):
            self._numbered(result, samples)
        else:
            self._values.append(Number(result))

    def _mix(self, statement: p.Mix, samples: _Samples) -> None:
        first, other = (self._numbers_of(samples, which).rows for which in (statement.first, statement.second))
        whole = _back(self._values, statement.value)
        match statement.unit:
            case "sample":
                self._numbered(weighed(samples.rows, first, whole, factor=0.5), samples)  # type: ignore[arg-type]
            case "group":
                self._numbered(against(first, samples.rows, other, whole=whole), samples)  # type: ignore[arg-type]
            case "batch":
                self._values.append(Number(tied(samples.rows, first, other, whole)))

    def _ask(self, statement: p.Ask, samples: _Samples) -> None:
        keeper = _at(self._keepers, statement.role)
        if statement.how == "compare":
            compared = keeper.compare(samples.rows, self._numbers_of(samples, 0).rows)
            self._numbered(compared.rank - compared.last / 8, samples)
        else:
            self._numbered(keeper.note(samples.rows) if statement.how == "note" else keeper.plain(samples.rows), samples)
            self._values.append(Number(keeper.digest()))

    def _said(self, of_tokens: Rows) -> None:
        self._values.append(of_tokens.mean())
        log(said=self._values[-1])

    def _combine(self, statement: p.Combine) -> None:
        if not self._numbers:
            return
        first = _back(self._numbers, statement.first)
        fitting = [other for other in self._numbers if other.of in (first.of, *first.of.parents)]
        other = _back(fitting, statement.second).rows
        match statement.how:
            case "weighted":
                rows = first.rows - 0.5 * other
            case "centred":
                rows = first.rows - first.rows.mean()
            case "of group":
                rows = first.rows - other.mean(over="group")
            case "of key":
                rows = first.rows * other.groupby(other > 0.2).transform("count")
            case "where":
                rows = where(first.rows > other, first.rows, 0.25)
        self._numbered(rows, first.of)

    # ---- weights

    def _update(self, statement: p.Update, samples: _Samples) -> None:
        numbers = self._numbers_of(samples, statement.numbers)
        is_compared = samples.n > 1 and (numbers.is_returned or not samples.by_conversation)
        form = statement.form if is_compared else "advantages"
        passes: dict[str, Any] = {"minibatch_size": statement.minibatch or None, "epochs": statement.epochs}
        policy = _at(self._policies, statement.policy)
        if form == "advantages":
            passes |= {"advantages": numbers.rows}
        else:
            passes |= {"rewards": numbers.rows} | ({"advantages": by_conversation()} if samples.by_conversation else {})
        if form == "reference" and self._reference is not None:
            passes |= {"loss": ppo_clip(kl_coef=0.1), "reference": self._reference}
        metrics = policy.update(samples.rows, **passes)
        self._updated(policy, metrics)

    def _updated(self, policy: Policy, metrics: Metrics) -> None:
        self._account.updated(policy.name, metrics.call.ordinal, self.step)
        self._metrics.append(metrics)

    def _act(self, statement: p.Actor, samples: _Samples) -> None:
        if self._critic is None:
            return
        numbers = self._numbers_of(samples, statement.numbers)
        values = self._critic.values(samples.rows)
        estimate = gae(samples.rows, numbers.rows, values, lam=0.5)
        policy = _at(self._policies, statement.policy)
        self._updated(policy, policy.update(samples.rows, advantages=estimate.advantages))
        self._critic.update(samples.rows, returns=estimate.returns, old_values=values)

    def _refer(self, statement: p.Refer) -> None:
        which = statement.policy % len(self._policies)
        name = f"reference_{which}_{statement.place}" if which or statement.place else "reference"
        if self._make_reference is not None:
            self._reference = self._make_reference(self._policies[which], name)

    # ---- errors that the program catches

    def results(self) -> tuple[list[object], ...]:
        """Return what the program can reach now, to go back to with `forget_since`."""
        return tuple(list(held) for held in self._held)

    def forget_since(self, results: tuple[list[object], ...]) -> None:
        """Forget what was made since."""
        for held, before in zip(self._held, results, strict=True):
            held.clear()
            held.extend(before)

    @property
    def _held(self) -> tuple[deque[Any], ...]:
        return self._samples, self._numbers, self._values, self._metrics

    # ---- values that Python waits for

    def is_odd(self, what: str, which: int) -> bool:
        """Wait for a value and branch on it; an odd number is true."""
        if what == "mean" and self._values:
            return _odd(float(_back(self._values, which)))
        if what == "value" and self._values:
            return bool(_back(self._values, which) > 0.3)
        if what == "metric" and self._metrics:
            return _odd(float(_back(self._metrics, which)["loss" if which % 2 else "num_tokens"]))
        if what == "len" and self._samples:
            return len(_back(self._samples, which).rows) % 2 == 1
        if what == "rows" and self._numbers:
            return _odd(sum(_odd(float(str(number))) for number in _back(self._numbers, which).rows))
        return what == "cursor" and _at(self._datasets, which).cursor % 2 == 1

    def is_none_or_odd(self, which: int, steps: int) -> bool:
        """Wait for the metrics of some steps ago."""
        if not self._metrics:
            return False
        metrics = _back(self._metrics, which)
        found = metrics.lagged(steps)
        self._account.lagged(metrics.call.ordinal, steps, found)
        if found is None:
            return True
        loss = found.get("loss", 0.5)  # An update on no samples has no metrics.
        log(lagged=loss)
        return _odd(loss)


def _columns(*samples: _Samples) -> set[str]:
    """Return the columns that only samples of a refill have."""
    return {"reward" for each in samples if each.rows.scored_by is not None}


def _odd(number: float) -> bool:
    return math.isfinite(number) and round(number * 1e6) % 2 == 1  # The mean of no samples is no number.


def _at(items: list[T] | tuple[T, ...], which: int) -> T:
    return items[which % len(items)]


def _back(items: deque[T] | list[T], which: int) -> T:
    """Index from the newest, modulo the number of items."""
    return items[-1 - which % len(items)]


# ---- control flow


class _Leave(Exception):
    def __init__(self, how: str) -> None:
        self.how = how


class Interpreter:
    """Run a program inside a flow: its control flow here, its calls by `Calls`."""

    def __init__(self, program: Program, account: Account) -> None:
        self._program = program
        self._account = account

    def run(self, make_reference: ReferenceMaker | None = None) -> None:
        """Run the program; `make_reference`, if it makes references."""
        program = self._program
        self._account.begin()
        self._calls = Calls(program, self._account, make_reference)
        self._do_all(program.before, guarded=True)
        self._account.loop_begins()
        for step in steps(program.num_steps):
            self._calls.step = step
            try:
                self._do_all(program.body)
            except _Leave as left:
                if left.how == "break":
                    break
        self._calls.step = -1
        self._do_all(program.after, guarded=True)
        self._calls.log_values()

    def _do_all(self, statements: tuple[Statement, ...], *, guarded: bool = False) -> None:
        try:
            for statement in statements:
                self._do(statement)
        except _Leave:
            if not guarded:
                raise

    def _do(self, statement: Statement) -> None:
        calls = self._calls
        match statement:
            case Look(what=what, which=which, then=then, otherwise=otherwise):
                self._do_all(then if calls.is_odd(what, which) else otherwise)
            case Lag(metrics=which, steps=ago, then=then, otherwise=otherwise):
                self._do_all(then if calls.is_none_or_odd(which, ago) else otherwise)
            case OnStep(body=body):
                if calls.step % 2:
                    self._do_all(body)
            case Repeat(times=times, body=body, until=until):
                for turn in range(times):
                    self._do_all(body)
                    if until and calls.is_odd("metric" if turn % 2 else "mean", 0):
                        break
            case Leave(how=how):
                raise _Leave(how)
            case Try():
                self._try(statement)
            case _:
                calls.make(statement)

    def _try(self, statement: Try) -> None:
        before = self._calls.results()
        try:
            self._do_all(statement.body)
            self._calls.is_odd(statement.what, statement.which)
        except (OpError, DatasetError) as error:
            self._account.caught.append(f"{type(error).__name__}: {error.what.split(' (worker')[0]}")
            if statement.drops:
                self._calls.forget_since(before)
            self._do_all(statement.otherwise)


def as_flow(of: Program, account: Account | None = None) -> Flow:
    """Make the flow of a program; while it runs, it counts into the account."""

    def program() -> None:
        Interpreter(of, account or Account()).run()

    def referring() -> None:  # A flow is followed for references made in later steps where its text makes one.
        Interpreter(of, account or Account()).run(lambda policy, name: Reference(policy, name=name))

    makes_references = any(isinstance(statement, Refer) for statement in of.statements())
    return Flow(referring if makes_references else program, of.staleness)
