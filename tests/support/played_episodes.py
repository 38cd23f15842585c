"""Episodes of agents on a fake engine: how they begin, are played to their end or stopped, and the rows that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from m2flow import Chat, Sample, ToolCall, agent, tool
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.micro.protocol import call_semantics
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Model, Sampling
from m2flow.samples import Batch, Ragged, SampleId
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.fakes import FakeRollout

SPEC = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=FunctionSpec())


@tool(replay="pure")
async def shout(text: str, wait: float = 0.0) -> str:
    """Say it louder."""
    await asyncio.sleep(wait)
    return text.upper()


@tool(replay="pure", timeout_s=0.02)
async def sleepy(text: str) -> str:
    """Never come to an end."""
    await asyncio.sleep(30)
    return text


@tool(replay="pure")
def broken(text: str) -> str:
    """Raise."""
    raise ValueError(f"no {text[:3]}")


@agent
async def wanderer(chat: Chat, row: Sample) -> float:
    """Do something else after each turn, as what the model said decides."""
    turn = await chat.say(str(row.prompt), tools=[shout, sleepy, broken], max_tokens=12)
    for _ in range(4):
        what = sum(map(ord, turn.text)) % 9
        if what == 0:
            break
        if what == 1:
            turn = await chat.say(f"again {chat.rng.random():.3f}", max_tokens=6)
        elif what == 2:
            calls = [ToolCall("shout", {"text": turn.text[:2], "wait": 0.002 * at}) for at in range(3)]
            turn = await chat.reply(calls, max_tokens=9)
        elif what == 3:
            turn = await chat.reply([ToolCall("sleepy", {"text": ""}), ToolCall("broken", {"text": turn.text})], max_tokens=9)
        elif what == 4:
            raise ValueError("the agent gives up")
        elif what == 5:
            turn = await chat.reply([ToolCall("missing", {}), ToolCall("shout", {"wrong": 1})], max_tokens=5)
        else:
            await asyncio.sleep(0.001)
            turn = await chat.say("go on", max_tokens=4)
    return len(turn.text) / 10 + chat.num_turns


def host(loop: EventLoop) -> Episodes:
    engine = FakeRollout(Model("fake"), EngineSettings())
    engine.start()
    return Episodes(engine, loop)


def start_of(index: int, played: Callable[..., object], stopped: Transcript | None = None) -> EpisodeStart:
    row = Batch(np.array([index], np.int64), {"prompt": Ragged.texts([f"{index * 37}?"])})
    request = Request(SampleId(0, 0, index).pack(), "", 1000 + index, Sampling(120))
    return EpisodeStart(request, lambda: played, next(row.rows()), Bounds(8), stopped)


def row_of(made: Generated) -> Batch:
    call = type("Call", (), {"options": {"sampling": Sampling(120)}})()
    prompts = Batch(np.array([made.id], np.int64), {"prompt": Ragged.texts(["?"])})
    return call_semantics.responses([call], [made], prompts, {made.id: 1})


def stopped_row(made: Generated) -> Transcript:
    """What another worker reads from the row of a stopped episode."""
    return Transcript.of(row_of(made), 0)


def played(episodes: Episodes, seconds: float = 20.0) -> dict[int, Generated]:
    found = {}
    while episodes.num_unfinished:
        found.update({made.id: made for made in episodes.step()})
    return found


def same(one: Generated, other: Generated) -> bool:
    arrays = ("prompt_tokens", "tokens", "logprobs", "versions", "kv_stale")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and (
        (one.segments, one.finish, one.text, repr(one.columns)) == (other.segments, other.finish, other.text, repr(other.columns))
    )


def begun(index: int, played: object, stopped: Transcript | None = None, bounds: Bounds | None = None) -> EpisodeStart:
    start = start_of(index, played, stopped)  # type: ignore[arg-type]
    return EpisodeStart(start.request, start.agent, start.row, bounds or Bounds(8, max_conversations=6), stopped)


def whole(loop: EventLoop, index: int, agent: object, bounds: Bounds | None = None) -> Batch:
    episodes = host(loop)
    episodes.begin([begun(index, agent, bounds=bounds)])
    (made,) = played(episodes).values()
    return row_of(made)
