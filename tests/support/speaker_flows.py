"""Flows and processes in which several policies speak in an episode, for tests of speakers together and apart."""

from __future__ import annotations

import asyncio

from played_episodes import start_of

from m2flow import Chat, Dataset, Policy, Sample, agent, by_conversation, concat, flow, log, nll, steps
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.engines.contract import EngineSettings
from m2flow.recipe import AdamW, Model
from m2flow.recipe import Episodes as Bounds
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.fakes import FakeRollout

SPEC = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=FunctionSpec())


@agent
async def match(chat: Chat, row: Sample) -> dict[str, float]:
    """Two play, and a judge reads what they said; by what is said, one has more turns than the other, or none."""
    other, judge = chat.conversation("other", by="rival"), chat.conversation("verdict", by="judge")
    said = (await chat.say(f"{row.prompt} you begin", max_tokens=5)).text
    for _ in range(sum(map(ord, said)) % 3):
        (heard, aside) = await asyncio.gather(
            other.say(f"heard {said}", max_tokens=6), chat.say(f"think {chat.rng.random():.2f}", max_tokens=3)
        )
        said = (await chat.say(heard.text + aside.text, max_tokens=4)).text
    verdict = await judge.say(f"who won? {said}", max_tokens=3)
    points = sum(map(ord, verdict.text)) % 7
    return {"main": float(points), "other": -float(points) / 3}


@flow(staleness="staleness")
def contest(num_steps: int = 2, batch: int = 2, n: int = 3, how: str = "grpo", alone: int = 0, staleness: int = 0) -> None:
    policy, rival, judge = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival"), Policy("fake", name="judge")
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    shown = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(9)}?", "target": "!"}, 1000, seed=2, name="shown")
    for step in steps(num_steps):
        played = policy.rollout(match, rows.take(batch), n=n, max_tokens=80, max_turns=8, speakers={"rival": rival, "judge": judge})
        if alone:
            rival.update(shown.take(2), loss=nll())  # It has nothing to wait for but that the rival of these episodes is loaded.
        policy.update(played, played.reward, advantages=by_conversation(how))
        if step % 2 == alone % 2:
            theirs = played.of("rival")
            rival.update(theirs, theirs.reward, advantages=by_conversation(how), optimizer=AdamW(2e-3))
        if alone:
            answers = rival.generate(rows.take(batch), n=n, max_new_tokens=5)
            rival.update(answers, answers.length)
        log(judged=played.of("judge").length.mean())


@agent
async def debate(chat: Chat, row: Sample) -> dict[str, float]:
    """Two speak in turn, as often as the first says, and a judge at the end."""
    other, judge = chat.conversation("other", by="rival"), chat.conversation("verdict", by="judge")
    said = (await chat.say(f"{row.prompt} you begin", max_tokens=5)).text
    for _ in range(sum(map(ord, said)) % 3):
        heard = await other.say(f"heard {said} {chat.rng.random():.2f}", max_tokens=6)
        said = (await chat.say(heard.text, max_tokens=4)).text
    points = sum(map(ord, (await judge.say(f"who won? {said}", max_tokens=3)).text)) % 7
    return {"main": float(points), "other": -float(points) / 3}


@flow(staleness="staleness")
def forest(num_steps: int = 2, staleness: int = 0) -> None:
    """Trees of debates: branches, and branches of those from the judge's turn."""
    policy, rival, judge = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival"), Policy("fake", name="judge")
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    for _ in steps(num_steps):
        first = policy.rollout(debate, rows.take(2), n=2, max_tokens=80, max_turns=8, speakers={"rival": rival, "judge": judge})
        more = first.branch(n=3)
        last = more[more.num_turns >= 2].branch(n=2, at=-1)
        log(worth=more.reward.back_to(first).mean(), judged=last.of("judge").length.mean())
        every, theirs = concat([first, more, last]), concat([one.of("rival") for one in (first, more, last)])
        policy.update(every, every.reward, advantages=by_conversation())
        rival.update(theirs, theirs.reward, advantages=by_conversation(), optimizer=AdamW(2e-3))


VERSIONS = {"policy": 3, "rival": 5, "judge": 7}


def hosts(loop: EventLoop) -> dict[str, Episodes]:
    """A process with the rollout engines of three roles, of different weights."""
    found: dict[str, Episodes] = {}
    for role, version in VERSIONS.items():
        engine = FakeRollout(Model(role), EngineSettings())
        engine.start()
        engine._version = version
        found[role] = Episodes(engine, loop, found)
    return found


def begun(index: int, agent: object = match, stopped: Transcript | None = None) -> EpisodeStart:
    start = start_of(index, agent, stopped)  # type: ignore[arg-type]
    bounds = Bounds(8, max_conversations=2, speakers=(("rival", "rival"), ("judge", "judge")))
    return EpisodeStart(start.request, start.agent, start.row, bounds, stopped)
