"""An episode goes on from one of its turns in other ways: what came before is the record's, what comes after is made anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from played_episodes import host, start_of, stopped_row

from m2flow import Chat, Sample, ToolCall, agent, tool
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.cli.main import cli
from m2flow.engines.contract import EngineSettings, Generated, RolloutEngine
from m2flow.recipe import Episodes as Bounds
from m2flow.recipe import Model, Sampling
from m2flow.runs import branching
from m2flow.runs.branching import play_on
from m2flow.samples import SampleId, Segment

ROOT = Path(__file__).parents[2]
PAID: list[str] = []


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@tool
async def pay(what: str) -> str:
    """Pay for something."""
    PAID.append(what)
    return f"paid {what}, {len(PAID)} times in all"


@agent
async def shopper(chat: Chat, row: Sample) -> float:
    await chat.say(f"first {chat.rng.random():.3f}", tools=[pay], max_tokens=6)
    for number in range(4):
        (outcome,) = await chat.run([ToolCall("pay", {"what": f"{number}"})])
        await chat.say(f"{outcome.text} {chat.rng.random():.3f}", max_tokens=6)
    return float(len(chat.messages))


@agent
async def divided(chat: Chat, row: Sample) -> float:
    await asyncio.gather(chat.say("one", max_tokens=4), chat.conversation("other").say("two", max_tokens=4))
    return 0.0


def start(index: int, of: object, stopped: Transcript | None = None) -> EpisodeStart:
    """With room for all turns."""
    made = start_of(index, of, stopped)  # type: ignore[arg-type]
    return replace(made, request=replace(made.request, sampling=Sampling(2000)), bounds=Bounds(8, max_conversations=2))


def whole(loop: EventLoop, index: int, of: object = shopper) -> Generated:
    (made,) = ended(host(loop), [start(index, of)])
    return made


def ended(episodes: Episodes, starts: Sequence[EpisodeStart]) -> list[Generated]:
    episodes.begin(starts)
    found: dict[int, Generated] = {}
    while len(found) < len(starts):
        found.update({one.id: one for one in episodes.step()})
        episodes.written(episodes.take_urgent())
    return [found[one.request.id] for one in starts]


def branches(loop: EventLoop, made: Generated, turn: int, num: int) -> list[Generated]:
    index = SampleId.unpack(made.id).index
    starts = [replace(start(index, shopper, stopped_row(made).before(turn)), branch=f"{turn}.{at}") for at in range(num)]
    starts = [replace(one, request=replace(one.request, id=SampleId(0, 1, at).pack())) for at, one in enumerate(starts)]
    return ended(host(loop), starts)


def tokens_before(made: Generated, turn: int) -> list[int]:
    """The tokens before a turn: with what stands between it and the one before, for what stands there is the agent's."""
    row = stopped_row(made).before(turn)
    return [token for strand in row.strands for token in strand.tokens]


def turns_of(made: Generated) -> list[str]:
    return [str(one["text"]) for one in made.columns["episode"]["turns"]]  # type: ignore[index]


@pytest.mark.parametrize("turn", [1, 2, 4, 5])
def test_a_branch_shares_what_came_before_its_turn_and_no_tool_of_that_runs_again(loop: EventLoop, turn: int) -> None:
    made = whole(loop, 3)
    PAID.clear()
    found = branches(loop, made, turn, 6)
    assert len(PAID) == 6 * (5 - turn), "tools in answer to the turn and to later ones run anew, in each branch"
    shared = tokens_before(made, turn)
    every = [[*one.prompt_tokens.tolist(), *one.tokens.tolist()] for one in found]
    assert all(tokens[: len(shared)] == shared for tokens in every)
    assert all(turns_of(one)[: turn - 1] == turns_of(made)[: turn - 1] for one in found)
    assert len({tuple(tokens) for tokens in every}) == 6
    assert all(turns_of(one)[turn - 1 :] != turns_of(made)[turn - 1 :] for one in found)
    assert all(len(turns_of(one)) == 5 and not one.columns["failure"] for one in found)
    tools = [one.columns["episode"]["tools"] for one in found]  # type: ignore[index]
    original = made.columns["episode"]["tools"]  # type: ignore[index]
    assert all(list(each) == list(original) for each in tools)
    assert all({key: each[key] for key in list(original)[: turn - 1]} == dict(list(original.items())[: turn - 1]) for each in tools)


def test_the_same_branch_is_the_same_again(loop: EventLoop) -> None:
    made = whole(loop, 5)

    def tried() -> list[list[str]]:
        PAID.clear()
        return [turns_of(one) for one in branches(loop, made, 5, 3)]

    assert tried() == tried()


def test_what_an_agent_does_otherwise_before_the_turn_is_found_out(loop: EventLoop) -> None:
    @agent
    async def other(chat: Chat, row: Sample) -> float:
        await chat.say("something else", max_tokens=6)
        return 0.0

    stopped = stopped_row(whole(loop, 1)).before(3)
    (one,) = play_on(host(loop), [replace(start(1, other, stopped), branch="3.0")])
    assert (one.failure, one.reward) == ("diverged", None)


def test_a_transcript_ends_before_the_turn(loop: EventLoop) -> None:
    row = stopped_row(whole(loop, 2))
    kinds = [kind for kind, _ in row.before(3).strands[0].segments]
    assert kinds == [Segment.PROMPT, Segment.SHARED, Segment.TOOL, Segment.SHARED]
    assert not row.before(1).strands
    for turn in (0, 6):
        with pytest.raises(ValueError, match="turns 1 to 5"):
            row.before(turn)
    with pytest.raises(ValueError, match="turns of main, other were taken at the same time, so none of them is turn 2"):
        stopped_row(whole(loop, 2, divided)).before(2)


@pytest.mark.slow
def test_an_episode_of_a_run_is_played_on_by_the_command(tmp_path: Path) -> None:
    small = {"num_steps": "1", "warm_steps": "4", "batch": "3"}
    options = [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    made = CliRunner().invoke(cli, ["run", str(ROOT / "flows" / "tool_use.py"), "--eager", "--runs-dir", str(tmp_path), *options])
    assert made.exit_code == 0, made.output
    run = str(next(tmp_path.iterdir()))
    asked = CliRunner().invoke(cli, ["samples", run, "--json", "--limit", "1", "--where", "call like '%rollout'"])
    sample = json.loads(asked.output)["sample"]
    told = CliRunner().invoke(cli, ["branch", run, sample, "--turn", "1", "-n", "3", "--json", "--threads", "1"])
    assert told.exit_code == 0, told.output
    found = [json.loads(line) for line in told.output.splitlines()]
    assert [one["branch"] for one in found] == [0, 1, 2]
    assert all(one["turns"] and not one["failure"] for one in found)
    shown = CliRunner().invoke(cli, ["branch", run, sample, "--turn", "1", "-n", "3", "--threads", "1"])
    assert "mean reward" in shown.output
    num = json.loads(asked.output)["turns"]
    assert f", {num} turn{'s' * (num != 1)}; from turn 1 " in shown.output
    for wrong, message in {sample: "no branch at turn 99", "1/2": "no identity", "99/0/0": "has no sample"}.items():
        refused = CliRunner().invoke(cli, ["branch", run, wrong, "--turn", "99"])
        assert refused.exit_code == 2, refused.output
        assert message in refused.output


DEBATE = """
from m2flow import AdamW, Chat, Dataset, Policy, Sample, agent, by_conversation, flow

DIGITS = "{digits}"


@agent
async def debate(chat: Chat, row: Sample) -> dict[str, float]:
    other, judge = chat.conversation("against", by="rival"), chat.conversation("verdict", by="judge")
    said = ""
    for _ in range(2):
        said = (await chat.say(f"{{row.prompt}}{{said}}=", max_tokens=2)).text
        said = (await other.say(f"{{row.prompt}}{{said}}=", max_tokens=2)).text
    points = float(len((await judge.say(f"{{said}}=", max_tokens=3)).text))
    return {{"main": points, "against": -points}}


@flow
def debates() -> None:
    policy, rival, judge = (Policy(DIGITS, name=name, init="random") for name in ("policy", "rival", "judge"))
    rows = Dataset([{{"prompt": f"{{at}}"}} for at in range(9)], name="rows")
    games = policy.rollout(debate, rows.take(2), n=2, max_tokens=40, max_turns=9, speakers={{"rival": rival, "judge": judge}})
    theirs = games.of("rival")
    policy.update(games, games.reward, advantages=by_conversation(), optimizer=AdamW(1e-3))
    rival.update(theirs, theirs.reward, advantages=by_conversation(), optimizer=AdamW(1e-3))
"""


@pytest.mark.slow
def test_an_episode_of_several_speakers_is_played_on_with_the_weights_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = ROOT / "flows" / "models" / "digits"
    (tmp_path / "debates.py").write_text(DEBATE.format(digits=digits))
    made = CliRunner().invoke(cli, ["run", str(tmp_path / "debates.py"), "--eager", "--runs-dir", str(tmp_path / "runs")])
    assert made.exit_code == 0, made.output
    run = str(next((tmp_path / "runs").iterdir()))
    asked = CliRunner().invoke(cli, ["samples", run, "--json", "--limit", "1", "--where", "call like '%rollout'"])
    sample = json.loads(asked.output)
    paths: dict[str, str] = {}
    made_rollout = branching.make_rollout

    def noted(name: str, model: Model, settings: EngineSettings) -> RolloutEngine:
        paths[Path(model.path).name] = model.init
        return made_rollout(name, model, settings)

    monkeypatch.setattr(branching, "make_rollout", noted)
    said = {one["name"]: one["turns"] for one in sample["conversations"]}
    told = CliRunner().invoke(cli, ["branch", run, sample["sample"], "--turn", "3", "-n", "4", "--json", "--threads", "1"])
    assert told.exit_code == 0, told.output
    assert paths == {"policy": "pretrained", "rival": "pretrained", "digits": "random"}, "nothing has trained the judge"
    for one in map(json.loads, told.output.splitlines()):
        assert one["speakers"] == ["", "rival", "", "rival", "judge"]
        assert one["turns"][:2] == [said["main"][0], said["against"][0]]
        assert not one["failure"]
        assert one["rewards"] == {"main": one["reward"], "against": -one["reward"]}
    shown = CliRunner().invoke(cli, ["branch", run, sample["sample"], "--turn", "5", "-n", "2", "--threads", "1"])
    assert shown.exit_code == 0, shown.output
    assert "(judge)" in shown.output
    points, _ = sample["rewards"].values()
    assert f", reward {points:g}, 5 turns" in shown.output, "the policy's, though the rival's was given after it"
    assert "; against " in shown.output
