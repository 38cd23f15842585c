"""A flow with an agent, for runs of real processes that are killed: its tool takes a moment, and writes each of its calls to a file."""

import asyncio
import os
import uuid

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, flow, steps, tool

PAID = "M2FLOW_TEST_PAID"
TICKETS = "M2FLOW_TEST_TICKETS"
"""Set: who is paid gives a receipt that nobody else has."""


async def _note(text: str) -> str:
    with open(os.environ[PAID], "a") as file:
        file.write(f"{text}\n")
    await asyncio.sleep(0.02)
    return text[::-1]


@tool(replay="pure")
async def look(text: str) -> str:
    """Look something up."""
    return await _note(text)


@tool(replay="recorded")
async def pay(text: str) -> str:
    """Pay somebody, which is not to happen twice."""
    return await _note(text) + (uuid.uuid4().hex if TICKETS in os.environ else "")


@agent
async def looker(chat: Chat, row: Sample) -> float:
    return await _converse(chat, row, "look")


@agent
async def payer(chat: Chat, row: Sample) -> float:
    return await _converse(chat, row, "pay")


async def _converse(chat: Chat, row: Sample, name: str) -> float:
    turn = await chat.say(str(row.prompt), tools=[look, pay], max_tokens=10)
    for number in range(4):
        calls = [ToolCall(name, {"text": f"{row.prompt}/{chat.rng.random()}/{number}/{at}"}) for at in range(2)]
        turn = await chat.reply(calls, max_tokens=10)
    return float(len(turn.text))


@flow
def play(num_steps: int = 4, effects: bool = False) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i}?"} for i in range(32)])
    for _ in steps(num_steps):
        episodes = policy.rollout(payer if effects else looker, rows.take(4), n=4, max_tokens=1000)
        policy.update(episodes, episodes.reward)
