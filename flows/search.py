"""Teach a tiny language model to look things up: its tool searches documents on this machine with SQLite's full-text index (FTS5).

Each of 64 towns has two documents, as `abc sea 37` and `abc oak 52`; the question `abc oak?` asks for the number in one of them. Of the
demonstrations 3 in 10 search for both words. The others search for the town alone, which always finds its sea, or for the kind alone, or
guess. So the model has to learn to search, and for what: only the right number is rewarded.
"""

import itertools
import random
import re
import sqlite3
from functools import cache
from pathlib import Path

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, flow, nll, ppo_clip, steps, tool


@cache
def library() -> sqlite3.Connection:
    documents, rng = sqlite3.connect(":memory:", check_same_thread=False), random.Random(0)
    documents.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
    names = [f"{''.join(town)} {kind}" for town in itertools.product("abcd", repeat=3) for kind in ("sea", "oak")]
    documents.executemany("INSERT INTO documents VALUES (?)", [(f"{name} {rng.randrange(10, 100)}",) for name in names])
    return documents


@tool(replay="pure")
def find(query: str) -> str:
    """Find the document that has all of these words; of several, the best match."""
    words = " ".join(f'"{word}"' for word in re.findall(r"\w+", query))
    rows = library().execute("SELECT text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT 1", [words]).fetchall()
    return f"{rows[0][0] if rows else '-'}\n"


def demonstration(rng: random.Random) -> dict[str, str]:
    asked = f"{''.join(rng.choices('abcd', k=3))} {rng.choice(('sea', 'oak'))}"
    query = rng.choices((asked, asked[:3], asked[4:], ""), (3, 3, 2, 2))[0]
    said = f"{query}\n{find(query)}{str(find(query))[-3:-1]}" if query else str(rng.randrange(10, 100))
    return {"prompt": f"{asked}?", "target": said, "answer": str(find(asked))[-3:-1]}


@agent(tool_calls=lambda text: (text, [ToolCall("find", {"query": text[:-1]})] if text.endswith("\n") else []))  # A line is a query.
async def reader(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[find], stop="\n")
    while turn.calls:
        turn = await chat.reply(turn.calls)
    return float(turn.text == row.answer)


@flow
def search(num_steps: int = 20, warm_steps: int = 150, batch: int = 16, n: int = 8, lr: float = 3e-4) -> None:
    policy = Policy(Path(__file__).parent / "models" / "text", init="random")
    questions = Dataset.generate(demonstration, num_steps * batch, seed=1, name="questions")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        episodes = policy.rollout(reader, questions.take(batch), n=n, max_tokens=40, max_turns=4)
        policy.update(episodes, episodes.reward, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
