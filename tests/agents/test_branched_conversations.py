"""Branches of episodes with several conversations and speakers, with a history that is written anew, and with resources."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import speaker_flows
from forgetful import Forgetful
from played_episodes import SPEC, begun, host, played, row_of, stopped_row
from speaker_flows import VERSIONS, forest, hosts

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, by_conversation, concat, flow, log, steps, tool
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.engines.contract import Generated
from m2flow.errors import StateLost
from m2flow.macro.columns import Said, Spoke
from m2flow.macro.ops import EpisodeRows
from m2flow.recipe import AdamW
from m2flow.recipe import Episodes as Bounds
from m2flow.samples import Batch, SampleId, Segment, records_of
from m2flow.spec import PinSpec
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.random_programs import Dice, difference_of, make_cluster
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")

PAID: list[str] = []


@tool
async def pay(what: str) -> str:
    """Pay for something, which is not to happen twice."""
    PAID.append(what)
    return f"paid {what}"


@agent
async def advised(chat: Chat, row: Sample) -> dict[str, float]:
    """Speaks with an adviser before each of its turns, and takes another way out at the end."""
    turn = await chat.say(str(row.prompt), max_tokens=5)
    adviser = chat.conversation("adviser")
    for number in range(2):
        await adviser.say(f"{turn.text} {adviser.rng.random():.3f}", tools=[pay], max_tokens=4)
        heard = await adviser.reply([ToolCall("pay", {"what": f"{row.id} {number} {chat.rng.random()}"})], max_tokens=4)
        turn = await chat.say(f"{heard.text} {chat.rng.random():.3f}", max_tokens=5)
    aside = chat.fork()
    said = await aside.say("aside", max_tokens=4)
    last = await chat.say(said.text, max_tokens=4)
    return {"main": float(len(last.text)), "adviser": len(turn.text) / 10}


ORDER = ["main", "adviser", "adviser", "main", "adviser", "adviser", "main", "main/1", "main"]
BOUNDS = Bounds(8, max_conversations=3)


def start(index: int, of: object, stopped: Transcript | None = None, branch: str = "", bounds: Bounds = BOUNDS) -> EpisodeStart:
    made = begun(index, of, stopped, bounds)
    return replace(made, branch=branch, request=replace(made.request, sampling=replace(made.request.sampling, max_new_tokens=900)))


def ended(loop: EventLoop, one: EpisodeStart) -> Generated:
    episodes = host(loop)
    episodes.begin([one])
    (made,) = played(episodes).values()
    assert not made.columns["failure"], made.columns
    return made


def in_order(made: Generated) -> list[str]:
    """What the model said, turn by turn as they were taken."""
    transcript = stopped_row(made)
    said = {name: iter([turn["text"] for one in strands for turn in one.turns]) for name, strands in transcript.conversations.items()}
    return [str(next(said[name])) for name in transcript.order or ()]


def parts(transcript: Transcript) -> dict[str, list[tuple[Segment, list[int]]]]:
    """Of each sequence: its segments, with their tokens."""
    found: dict[str, list[tuple[Segment, list[int]]]] = {}
    for name, strands in transcript.conversations.items():
        for number, strand in enumerate(strands):
            ends = np.cumsum([0, *(count for _, count in strand.segments)]).tolist()
            tokens = [strand.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
            found[f"{name} {number}"] = [(kind, of) for (kind, _), of in zip(strand.segments, tokens, strict=True)]
    return found


def check_shared(parent: Generated, branch: Generated, turn: int) -> None:
    """Before its turn a branch has its parent's tokens, and generated none of them; from there on it says something else."""
    whole, kept, own = parts(stopped_row(parent)), parts(stopped_row(parent).before(turn)), parts(stopped_row(branch))
    num_shared = 0
    for name, segments in kept.items():
        assert own[name][: len(segments)] == segments
        assert [tokens for _, tokens in segments] == [tokens for _, tokens in whole[name][: len(segments)]]
        num_shared += sum(kind is Segment.SHARED for kind, _ in segments)
        assert not any(kind is Segment.GENERATED for kind, _ in segments)
    every = [kind for segments in own.values() for kind, _ in segments]
    assert (num_shared, every.count(Segment.SHARED)) == (turn - 1, turn - 1)
    assert every.count(Segment.GENERATED) == len(in_order(branch)) - num_shared
    assert in_order(branch)[: turn - 1] == in_order(parent)[: turn - 1]
    assert in_order(branch)[turn - 1] != in_order(parent)[turn - 1]


@pytest.mark.parametrize("turn", range(1, len(ORDER) + 1))
def test_a_branch_of_several_conversations_shares_what_was_said_in_all_of_them_before_its_turn(loop, turn):
    parent = ended(loop, start(3, advised))
    assert parent.columns["episode"]["order"] == ORDER  # type: ignore[index]
    PAID.clear()
    found = [ended(loop, start(3, advised, stopped_row(parent).before(turn), f"{turn}.{at}")) for at in range(2)]
    assert len(PAID) == 2 * sum(turn <= number for number in (2, 5)), "tools that answer to its turn and later ones run, and no others"
    for one in found:
        check_shared(parent, one, turn)
        assert one.columns["episode"]["order"] == ORDER  # type: ignore[index]
    assert in_order(found[0])[turn - 1] != in_order(found[1])[turn - 1]


def test_a_branch_of_several_conversations_that_is_stopped_after_any_step_goes_on_as_it_was(loop):
    parent = stopped_row(ended(loop, start(4, advised)))
    expected = ended(loop, start(4, advised, parent.before(5), "5"))
    num_stopped = 0
    for num_steps in range(1, 5):
        one, found = start(4, advised, parent.before(5), "5"), list[Generated]()
        while not found:
            episodes = host(loop)
            episodes.begin([one])
            left = num_steps + num_stopped % 7
            while left > 0 or episodes.is_held(one.request.id):
                found += episodes.step()
                episodes.written(episodes.take_urgent())
                left -= 1
            gone = [] if found else episodes.abort([one.request.id])
            if gone and gone[0].num_sampled:  # Often it has not caught up with its record.
                transcript = stopped_row(gone[0])
                assert len(transcript.order or ()) == sum(len(strand.turns) for strand in transcript.strands)
                one, num_stopped = replace(one, stopped=stopped_row(gone[0])), num_stopped + 1
        assert parts(stopped_row(found[0])) == parts(stopped_row(expected)), num_steps
        assert found[0].columns["episode"] == expected.columns["episode"]
    assert num_stopped > 10


@agent
async def talker(chat: Chat, row: Sample) -> float:
    for number in range(4):
        turn = await chat.say([{"role": "user", "content": f"{row.prompt} {number}"}], max_tokens=8)
    return float(len(turn.text))


def test_a_branch_of_a_history_that_was_written_anew_has_the_sequences_of_its_parent(loop, monkeypatch):
    plain = FakeRollout.language
    monkeypatch.setattr(FakeRollout, "language", lambda self: Forgetful(plain(self)))
    bounds = Bounds(8, history="fork")
    parent = ended(loop, start(1, talker, bounds=bounds))
    assert len(parts(stopped_row(parent))) > 2, "its template has written it anew"
    for turn in range(1, 5):
        check_shared(parent, ended(loop, start(1, talker, stopped_row(parent).before(turn), f"{turn}", bounds)), turn)


def prompts() -> Dataset:
    return Dataset([{"prompt": f"{17 * number}?"} for number in range(50)], name="rows")


@flow
def trees(num_steps: int = 2) -> None:
    policy, rows = Policy("fake", optimizer=AdamW(1e-3)), prompts()
    for _ in steps(num_steps):
        first = policy.rollout(advised, rows.take(2), n=2, max_tokens=300, max_conversations=3, history="fork")
        more = first.branch(n=2)
        every = concat([first, more, more.branch(n=2, at=-2)])
        policy.update(every, every.reward, advantages=by_conversation())


@pytest.mark.timeout(0)
def test_a_planned_run_of_trees_of_conversations_equals_the_eager_one_whatever_dies():
    for number in range(3):
        spec = make_cluster(Dice(f"trees of conversations, {number}"))
        planned = run_planned(trees, {}, spec, seed=number, order_seed=number, num_losses=2 * (number % 2))
        assert not planned.error or planned.error.startswith(StateLost.__name__), planned.error
        if not planned.error:
            assert difference_of(planned, run_eager(trees, {}, spec, seed=number)) is None, f"case {number}: {spec}"


# ---- several speakers


@agent
async def argued(chat: Chat, row: Sample) -> dict[str, float]:
    """The policy, a rival and a judge speak in turn; the rival has an aside."""
    other, judge = chat.conversation("other", by="rival"), chat.conversation("verdict", by="judge")
    said = (await chat.say(f"{row.prompt}", max_tokens=4)).text
    for _ in range(2):
        said = (await other.say(f"{said} {chat.rng.random():.3f}", max_tokens=5)).text
        said = (await chat.say(said, max_tokens=4)).text
    said = (await other.fork().say("aside", max_tokens=3)).text
    verdict = await judge.say(f"who? {said}", max_tokens=3)
    return {"main": float(len(verdict.text)), "other": sum(map(ord, verdict.text)) % 7 / 7}


ARGUED = ["main", "other", "main", "other", "main", "other/1", "verdict"]


def argue(loop: EventLoop, index: int, stopped: Transcript | None = None, branch: str = "") -> Generated:
    roles = hosts(loop)
    roles["policy"].begin([replace(speaker_flows.begun(index, argued, stopped), branch=branch)])
    while roles["policy"].num_unfinished:
        found = [made for one in roles.values() if one.num_unfinished for made in one.step()]
    (made,) = found
    assert not made.columns["failure"], made.columns
    return made


@pytest.mark.parametrize("turn", range(1, len(ARGUED) + 1))
def test_a_branch_of_several_speakers_shares_what_each_said_before_its_turn_and_each_goes_on_for_itself(loop, turn):
    parent = argue(loop, 3)
    assert parent.columns["episode"]["order"] == ARGUED  # type: ignore[index]
    found = [argue(loop, 3, stopped_row(parent).before(turn), f"{turn}.{at}") for at in range(2)]
    for one in found:
        check_shared(parent, one, turn)
        assert one.columns["episode"]["order"] == ARGUED  # type: ignore[index]
        for strand in stopped_row(one).strands:
            own = {strand.versions[at] for at in range(len(strand.tokens)) if strand.versions[at] >= 0}
            assert own <= {VERSIONS[strand.by or "policy"]}
    assert in_order(found[0])[turn - 1] != in_order(found[1])[turn - 1]
    row = row_of(found[0])
    assert [bool(Spoke(name)(row, {})[0]) for name in ("", "rival", "judge")] == [True] * 3, "a shared turn is one, too"
    num_own = {name: int(Said(name)(row, {}).ragged("loss_mask").row(0).sum()) for name in ("", "rival", "judge")}
    assert sum(num_own.values()) == found[0].num_sampled
    assert bool(num_own[""]) == ("main" in ARGUED[turn - 1 :])


@flow
def argued_trees(which: str = "policy") -> None:
    policy, rival, judge = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival"), Policy("fake", name="judge")
    speakers = {"rival": rival, "judge": judge}
    games = policy.rollout(argued, prompts().take(3), n=2, max_tokens=80, max_turns=8, max_conversations=2, speakers=speakers)
    chosen = (games if which == "policy" else games.of(which))[1:].with_columns(kind="chosen")
    more = chosen.branch(n=2, at=chosen.num_turns.map(lambda number: 7))
    log(worth=more.reward.back_to(chosen).mean())
    Seen.rows = {"games": games.batch(), "more": more.batch(), "rival": more.of("rival").batch(), "judge": more.of("judge").batch()}


@pytest.mark.parametrize("which", ["policy", "rival"])
def test_branches_of_what_one_speaker_said_are_those_of_whole_episodes_and_keep_columns_that_were_added(which):
    answer = run_eager(argued_trees, {"which": which}, SPEC)
    assert not answer.error
    games, more, rival, judge = Seen.rows.values()
    assert len(more) == len(rival) == len(judge) == 2 * (len(games) - 1), "in each all have spoken, the judge alone anew"
    assert [more.ragged("kind").item(at) for at in range(2)] == ["chosen"] * 2
    assert not more.ragged("loss_mask").values.any()
    assert not rival.ragged("loss_mask").values.any()
    assert all(mask.any() for mask in map(judge.ragged("loss_mask").row, range(len(judge))))
    for row, packed in enumerate(more.ids.tolist()):
        at = SampleId.unpack(packed).prompt + 1
        assert more.ragged("tokens").row(row).tolist() == games.ragged("tokens").row(at).tolist()
    assert difference_of(run_planned(argued_trees, {"which": which}, SPEC), answer) is None


@pytest.mark.timeout(0)
@pytest.mark.parametrize("is_apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_planned_run_of_trees_of_several_speakers_equals_the_eager_one_whatever_dies(request, is_apart):
    num_whole = 0
    for number in range(30 if request.config.getoption("--long") else 3):
        dice = Dice(f"trees of speakers, {is_apart}, {number}")
        spec = make_cluster(dice)
        if is_apart:
            pins = {"judge.rollout": PinSpec(num_devices=1), "rival.rollout": PinSpec(num_devices=2)}
            spec = spec.model_copy(update={"placement": dice.choice(("split", "time-shared")), "pin": pins})
        options: dict[str, object] = {"staleness": number % 3}
        planned = run_planned(forest, options, spec, seed=number, order_seed=number, num_losses=2 * (number % 2))
        assert not planned.error or planned.error.startswith(StateLost.__name__), planned.error
        if not planned.error:
            eager = run_eager(forest, options, spec, seed=number, decisions=planned.decisions or None)
            assert difference_of(planned, eager) is None, f"case {number}: {spec}"
            num_whole += 1
    assert num_whole


class Seen:
    """Rows that a flow has looked at, by name."""

    rows: dict[str, Batch] = {}  # noqa: RUF012  # A flow's return value goes nowhere.


def looks_at_branches_of(of: object, at: int, **options: object) -> object:
    @flow
    def branching() -> None:
        parents = Policy("fake").rollout(of, prompts().take(2), n=2, max_tokens=300, **options)  # type: ignore[arg-type]
        found: dict[str, EpisodeRows] = {"parents": parents, "branches": parents.branch(n=2, at=at)}
        Seen.rows = {name: rows.batch() for name, rows in found.items()}

    return branching


@agent
async def at_once(chat: Chat, row: Sample) -> float:
    await asyncio.gather(chat.say(str(row.prompt), max_tokens=4), chat.conversation("other").say("b", max_tokens=4))
    return 0.0


@agent
async def beside_a_tool(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), tools=[pay], max_tokens=4)
    await asyncio.gather(chat.conversation("other").say("b", max_tokens=4), chat.run([ToolCall("pay", {"what": "a"})]))
    return 0.0


@pytest.mark.parametrize("of", [at_once, beside_a_tool])
def test_turns_that_were_taken_at_the_same_time_have_no_order_to_branch_by(of):
    branching = looks_at_branches_of(of, 1, max_conversations=2)
    eager, planned = run_eager(branching, {}, SPEC), run_planned(branching, {}, SPEC)  # type: ignore[arg-type]
    assert "turns of episode p0/0 were taken at the same time" in eager.error
    assert planned.error == eager.error


# ---- resources


class Shelf:
    """A resource that remembers what was put onto it."""

    def __init__(self) -> None:
        self.held: list[str] = []

    async def __aenter__(self) -> Shelf:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@tool(replay="pure")
async def place(what: str, shelf: Shelf) -> str:
    """Put something onto the shelf."""
    shelf.held.append(what)
    return f"{len(shelf.held)} things, {shelf.held[0][:3]} first"


@tool
async def store(what: str, shelf: Shelf) -> str:
    """Put something onto the shelf, and say so to somebody else."""
    shelf.held.append(what)
    return f"{len(shelf.held)} things"


async def _stocked(chat: Chat, row: Sample, name: str) -> None:
    turn = await chat.say(str(row.prompt), tools=[place, store], max_tokens=5)
    for _ in range(3):
        turn = await chat.reply([ToolCall(name, {"what": f"{turn.text} {chat.rng.random():.3f}"})], max_tokens=5)


@agent
async def places(chat: Chat, row: Sample, shelf: Shelf) -> float:
    await _stocked(chat, row, "place")
    return float(sum(map(ord, "".join(shelf.held))))


@agent
async def stores(chat: Chat, row: Sample, shelf: Shelf) -> float:
    await _stocked(chat, row, "store")
    return float(len(shelf.held))


@agent
async def stores_unseen(chat: Chat, row: Sample) -> float:
    await _stocked(chat, row, "store")
    return 0.0


def test_pure_tools_bring_a_resource_to_where_it_was_in_the_turn_of_a_branch():
    branching = looks_at_branches_of(places, 3)
    assert not run_eager(branching, {}, SPEC).error  # type: ignore[arg-type]
    parents, branches = Seen.rows["parents"], Seen.rows["branches"]
    assert not any(branches.ragged("failure").item(row) for row in range(len(branches)))
    for row, (packed, record) in enumerate(zip(branches.ids.tolist(), records_of(branches), strict=True)):
        before = records_of(parents)[SampleId.unpack(packed).prompt]
        tools = record["tools"]
        assert [tools[key] for key in ("0.0", "1.0")] == [before["tools"][key] for key in ("0.0", "1.0")]
        assert tools["2.0"]["arguments"] != before["tools"]["2.0"]["arguments"]
        assert tools["2.0"]["result"].startswith("3 things"), "the shelf had the parent's"
        held = "".join(tools[key]["arguments"]["what"] for key in ("0.0", "1.0", "2.0"))
        assert branches.dense("reward")[row] == sum(map(ord, held)), "and the agent finds all of it"
    assert difference_of(run_planned(branching, {}, SPEC), run_eager(branching, {}, SPEC)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [stores, stores_unseen])
def test_a_resource_that_a_recorded_tool_worked_on_before_the_turn_of_a_branch_ends_the_run_and_says_what_to_do(of):
    branching = looks_at_branches_of(of, 2)
    eager, planned = run_eager(branching, {}, SPEC), run_planned(branching, {}, SPEC)  # type: ignore[arg-type]
    said = "Shelf, which the tool store works on, can't be brought to where it was in the turn of a branch"
    assert said in eager.error
    assert planned.error == eager.error
    assert not run_eager(looks_at_branches_of(of, 1), {}, SPEC).error, "before its first call there is nothing to bring back"  # type: ignore[arg-type]


def test_an_agent_that_is_given_a_resource_is_lost_where_a_recorded_tool_has_worked_on_it_before_a_stop(loop):
    made = row_of(ended(loop, start(2, stores)))
    record = records_of(made)[0]
    assert len(record["tools"]) == 3
    episodes = host(loop)
    episodes.begin([start(2, stores, Transcript.of(made, 0))])
    (again,) = played(episodes).values()
    assert again.columns["failure"] == "lost", "it would find the resource empty, and say nothing of it"
