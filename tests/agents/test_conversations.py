"""Episodes of several conversations: each is trained by what stands in it, once, under every plan and after every loss."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
from chat_codecs import codec_of
from click.testing import CliRunner
from forgetful import Forgetful, kept_of
from one_thread import Images, SteppedRun, resumed
from played_episodes import SPEC, begun, host, played, row_of, same, shout, stopped_row, whole
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, by_conversation, flow, gigpo, log, steps
from m2flow.agents.conversation import Conversation, Transcript
from m2flow.agents.tools import EventLoop
from m2flow.cli.main import cli
from m2flow.engines.registry import EngineInfo, engines
from m2flow.errors import OpError, OptionError, PlanError, StateLost, TraceError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering import capabilities
from m2flow.micro.lowering.passes import lower
from m2flow.micro.records.sample_query import RunTokenizers, SampleQuery, conversations_of
from m2flow.recipe import AdamW
from m2flow.recipe import Episodes as Bounds
from m2flow.samples import Batch, Segment, sequences_of
from m2flow.spec import RolloutSpec, RunSettings
from m2flow.testing.fakes import FakeRollout
from m2flow.testing.random_programs import ADVERSARIES, Dice, difference_of, make_cluster, make_policies, scheduled
from m2flow.testing.world import run_eager, run_planned
from m2flow.viewer.health import alerts_of
from m2flow.viewer.sample_pages import sample_page

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


def record_of(row: Batch) -> dict[str, object]:
    return row.ragged("episode").item(0)  # type: ignore[return-value]


def conversations(row: Batch) -> dict[str, list[tuple[Segment, list[int]]]]:
    """Of each sequence of a row: its segments, with their tokens."""
    tokens = row.ragged("tokens").row(0).tolist()
    found: list[list[tuple[Segment, list[int]]]] = []
    at = 0
    for kind, count in zip(row.ragged("segment_kinds").row(0).tolist(), row.ragged("segment_lengths").row(0).tolist(), strict=True):
        if kind == Segment.PROMPT:
            found.append([])
        found[-1].append((Segment(kind), tokens[at : at + count]))
        at += count
    names = [one["name"] for one in record_of(row)["conversations"]]  # type: ignore[attr-defined]
    assert len(names) == len(found)
    return dict(zip((f"{name} {names[:at].count(name)}" for at, name in enumerate(names)), found, strict=True))


def flat(segments: list[tuple[Segment, list[int]]]) -> list[int]:
    return [token for _, tokens in segments for token in tokens]


async def play(chat: Chat, rounds: int) -> int:
    turn = await chat.say(f"{chat.name}?", tools=[shout], max_tokens=5)
    for _ in range(rounds):
        what = sum(map(ord, turn.text)) % 3
        if what == 0:
            turn = await chat.reply(
                [ToolCall("shout", {"text": turn.text[:2], "wait": 0.001 * (sum(map(ord, turn.text)) % 4)})], max_tokens=9
            )
        elif what == 1:
            turn = await chat.say(f"again {chat.rng.random():.3f}", max_tokens=4)
        else:
            await asyncio.sleep(0.001)
            turn = await chat.say("go on", max_tokens=3)
    return len(turn.text)


@agent
async def players(chat: Chat, row: Sample) -> dict[str, float]:
    """Two players at the same time, one who looks at the first's thoughts, and one who takes another way out."""
    black, white = chat.conversation("black"), chat.conversation("white", max_turns=3)
    first, second = await asyncio.gather(play(black, 3), play(white, 2))
    branch = black.fork()
    await asyncio.gather(branch.say("other", max_tokens=4), black.say("one", max_tokens=4))
    return {"black": first / 10 + 1, "white": -second / 7}


NUM = 10


def test_conversations_that_are_stopped_after_any_step_and_go_on_elsewhere_are_the_same(loop):
    together = host(loop)
    together.begin(begun(index, players) for index in range(NUM))
    expected = played(together)
    assert not any(made.columns["failure"] for made in expected.values()), [made.columns for made in expected.values()]
    dice, how = random.Random(3), Counter[str]()
    for index in range(NUM):
        stopped: Transcript | None = None
        for _ in range(300):
            episodes = host(loop)
            start = begun(index, players, stopped)
            episodes.begin([start])
            found = {}
            for _ in range(dice.randint(1, 14)):
                found.update({made.id: made for made in episodes.step()})
                counts = episodes.progress()
                assert counts == {made.id: made.num_sampled for made in episodes.snapshot(counts)}
            if found:
                break
            (seen,), (gone,) = episodes.snapshot([start.request.id]), episodes.abort([start.request.id])
            assert same(seen, gone)
            assert counts[start.request.id] == gone.num_sampled
            assert stopped is None or gone.num_sampled >= stopped.num_sampled, "nothing that is written down is lost"
            assert not episodes.num_unfinished
            stopped = stopped_row(gone) if gone.num_sampled else None
            how["from its row" if stopped else "anew"] += 1
        assert same(found[start.request.id], expected[start.request.id]), index
    assert how["from its row"] > 20


def test_a_fork_goes_on_from_the_tokens_so_far_and_they_are_trained_once(loop):
    row = whole(loop, 0, players)
    found = conversations(row)
    assert list(found) == ["black 0", "black/1 0", "white 0"]
    branch, black = found["black/1 0"], found["black 0"]
    assert [kind for kind, _ in branch] == [Segment.PROMPT, Segment.GENERATED]
    (_, common), ((_, said), (_, one)) = branch[0], black[-2:]
    shared = flat(black[:-2])
    assert common[: len(shared)] == shared
    assert bytes(common[len(shared) :]) != bytes(said)
    assert branch[1][1] != one, "each goes on by random numbers of its own"
    mask, versions = row.ragged("loss_mask").values, row.ragged("versions").values
    generated = sum(len(tokens) for of in found.values() for kind, tokens in of if kind is Segment.GENERATED)
    assert mask.sum() == (versions >= 0).sum() == generated
    record = record_of(row)
    assert record["rewarded"] == {"black": "black", "black/1": "black", "white": "white"}
    assert record["rewards"] == {"black": 1.0 + record["rewards"]["black"] - 1.0, "white": record["rewards"]["white"]}  # type: ignore[index]


def test_two_conversations_that_begin_alike_are_of_other_random_numbers_and_an_order_in_time_changes_nothing(loop):
    def both(delays: tuple[float, float]) -> object:
        @agent
        async def twins(chat: Chat, row: Sample) -> float:
            async def one(name: str, delay: float) -> str:
                await asyncio.sleep(delay)
                return (await chat.conversation(name).say("same", max_tokens=30)).text

            texts = await asyncio.gather(*(one(name, delay) for name, delay in zip("ab", delays, strict=True)))
            assert texts[0] != texts[1]
            return 1.0

        return twins

    one, other = whole(loop, 1, both((0.0, 0.05))), whole(loop, 1, both((0.05, 0.0)))
    assert record_of(one).get("error") is None
    assert np.array_equal(one.ragged("tokens").values, other.ragged("tokens").values)


def test_more_conversations_than_the_rollout_allows_end_the_run_and_say_how_many(loop):
    row = whole(loop, 0, players, Bounds(8, max_conversations=2))
    assert row.ragged("failure").item(0) == "too_many_conversations"

    @flow
    def narrow() -> None:
        policy = Policy("fake", optimizer=AdamW(1e-3))
        rows = Dataset([{"prompt": "1?"}], name="rows")
        for _ in steps(1):
            episodes = policy.rollout(players, rows.take(1), n=2, max_tokens=80)
            policy.update(episodes, episodes.reward, advantages=by_conversation())

    answer = run_eager(narrow, {}, SPEC)
    assert "too_many_conversations" in answer.error
    assert "max_conversations=" in answer.error


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        ({"black": 1, "white": -1}, ""),
        ({"black": 1}, "invalid"),
        ({"black": 1, "white": -1, "red": 0}, "invalid"),
        ({"black": 1, "white": float("nan")}, "invalid"),
        ({"reward": 1, "black": 3}, ""),
    ],
)
def test_rewards_by_name_are_of_conversations_that_there_are(loop, returned, failure):
    @agent
    async def two(chat: Chat, row: Sample) -> object:
        for name in ("black", "white"):
            await chat.conversation(name).say("?", max_tokens=4)
        return returned

    row = whole(loop, 0, two)
    assert row.ragged("failure").item(0) == failure
    if not failure:
        assert row.dense("reward")[0] == (1.0 if "reward" in returned else 0.0)


def test_a_thought_that_the_template_drops_is_out_of_what_follows_and_in_what_is_trained(tmp_path):
    codec = codec_of(tmp_path, "Qwen3")
    conversation = Conversation(codec, "fork")
    conversation.begun("2+2?", [])

    def hear(text: str) -> None:
        ids = [*codec.encode_target(text), *sorted(codec.eos_ids)[:1]]
        conversation.heard(ids, text, is_whole=True, tools=lambda call: "")

    hear("<think>\nhm\n</think>\n\n4")
    tool = [{"role": "tool", "content": "yes"}]
    assert conversation.rewritten(tool) is None, "after a tool's message the template writes the thought"
    conversation.accepted(tool)
    hear("<think>\nso\n</think>\n\n4")
    user = [{"role": "user", "content": "and?"}]
    written = conversation.rewritten(user)
    assert written is not None
    assert written.ids == codec.encode_target(codec.conversation([*conversation.messages, *user], []))
    assert "hm" not in codec.decode_all(written.ids)
    assert "so" not in codec.decode_all(written.ids)
    conversation.accepted(user)
    hear("<think>\nok\n</think>\n\n5")
    assert conversation.rewritten(tool) is None, "what it was rewritten to is extended"
    assert conversation.rewritten(user) is not None
    for history in ("append", "refuse"):
        other = Conversation(codec, history)
        other.begun("?", [])
        other.heard(codec.encode_target("<think>a</think>b"), "<think>a</think>b", is_whole=True, tools=lambda call: "")
        assert other.rewritten(user) is None


@agent
async def forgetting(chat: Chat, row: Sample) -> float:
    """Two turns with a tool between them, then a user who says more, and a fork from there."""
    turn = await chat.say([{"role": "user", "content": str(row.prompt)}], tools=[shout], max_tokens=5)
    turn = await chat.reply([ToolCall("shout", {"text": turn.text[:2]}, id="a")], max_tokens=5)
    await chat.say("more", max_tokens=5)
    branch = chat.fork()
    await asyncio.gather(branch.say("other", max_tokens=4), chat.reply([ToolCall("shout", {"text": "b"}, id="b")], max_tokens=4))
    return 1.0


def test_a_conversation_whose_template_rewrites_goes_on_in_a_sequence_written_anew(loop, monkeypatch):
    plain = FakeRollout.language
    monkeypatch.setattr(FakeRollout, "language", lambda self: Forgetful(plain(self)))
    bounds = Bounds(8, history="fork", max_conversations=2)
    together = host(loop)
    together.begin(begun(index, forgetting, bounds=bounds) for index in range(NUM))
    expected = played(together)
    language = together.language
    num_written_anew = 0
    for made in expected.values():
        assert not made.columns["failure"], made.columns
        texts = [turn["text"] for turn in made.columns["episode"]["turns"]]  # type: ignore[index]
        found = conversations(row_of(made))
        if all(kept_of({"content": text}) == "".join(text.split()) for text in texts[:2]):
            assert list(found) == ["main 0", "main/1 0"], "the template extends what is there"
            continue
        num_written_anew += 1
        first, second, branch = found.values()
        assert list(found) == ["main 0", "main 1", "main/1 0"]
        assert [int(kind) for kind, _ in first] == [0, 1, 2, 1], "after a tool nothing is dropped"
        assert [int(kind) for kind, _ in second] == [0, 1, 2, 1]
        assert [int(kind) for kind, _ in branch] == [0, 1]
        said = [{"role": "assistant", "content": text} for text in texts[:2]]
        for number, one in enumerate((second, branch)):
            prompt = language.decode_all(one[0][1])
            assert ("more" in prompt, "other" in prompt) == (True, bool(number))
            assert all(f"<assistant>{kept_of(turn)}<eos>" in prompt for turn in said), prompt
    assert num_written_anew > NUM / 2
    for index in range(4):
        stopped: Transcript | None = None
        dice = random.Random(index)
        for _ in range(100):
            episodes = host(loop)
            start = begun(index, forgetting, stopped, bounds)
            episodes.begin([start])
            ended = {}
            for _ in range(dice.randint(1, 8)):
                ended.update({made.id: made for made in episodes.step()})
            if ended:
                break
            (gone,) = episodes.abort([start.request.id])
            stopped = stopped_row(gone) if gone.num_sampled else None
        assert same(ended[start.request.id], expected[start.request.id])


def test_every_sequence_of_an_episode_has_the_tokens_that_the_template_would_write_at_once(loop):
    row, language = whole(loop, 2, players), host(loop).language
    by_name = {name: flat(segments) for name, segments in conversations(row).items()}
    assert len(by_name) == 3
    for name, tokens in by_name.items():
        text = language.decode_all(tokens)
        assert language.encode_target(text) == tokens, name
        assert text.count(f"{name.split(' ')[0].split('/')[0]}?") == 1, "the first prompt of its own, and of no other conversation"


@flow(staleness="staleness")
def self_play(num_steps: int = 2, batch: int = 2, n: int = 3, how: str = "grpo", staleness: int = 0) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    for _ in steps(num_steps):
        episodes = policy.rollout(players, rows.take(batch), n=n, max_tokens=80, max_turns=6, max_conversations=4)
        policy.update(episodes, episodes.reward, advantages=by_conversation(how))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("loses", [0, 2])
def test_a_planned_run_of_several_conversations_equals_the_eager_one_under_random_plans_orders_and_losses(request, loses):
    for number in range(8 * (10 if request.config.getoption("--long") else 1)):
        dice = Dice(f"conversations, {loses}, {number}")
        spec = make_cluster(dice)
        if number % 3 == 2:
            spec = scheduled(spec, make_policies(dice))
        options = {"staleness": dice.choice((0, 0, 1)), "how": dice.choice(("grpo", "rloo", "opo"))}
        planned = run_planned(self_play, options, spec, seed=number, order_seed=dice.integer(0, 2**30), num_losses=dice.integer(0, loses))
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(self_play, options, spec, seed=number, decisions=planned.decisions or None)
        assert not eager.error
        assert difference_of(planned, eager) is None, f"case {number}: {options} {spec}"


def test_stale_conversations_that_are_stopped_and_go_on_with_newer_weights_are_given_again_by_eager():
    """They lie in the row by name, and were sampled in turn: so newer weights may stand before older ones there."""
    num_mixed = 0
    for number in range(1, 31, 2):  # How many are stopped between two versions of the weights depends on how busy the machine is.
        rollout = RolloutSpec(engine="fake", workers=3, max_running=3, chunk=3, policy=(f"{ADVERSARIES}:Adversary:seed={number}",))
        spec, options = fake_cluster("split").model_copy(update={"rollout": rollout}), {"num_steps": 4, "staleness": 2}
        planned = run_planned(self_play, options, spec, seed=number, order_seed=number)
        assert not planned.error
        num_mixed += sum(len({version_span.version for version_span in one.version_spans}) > 1 for one in planned.decisions.values())
        assert difference_of(planned, run_eager(self_play, options, spec, seed=number, decisions=planned.decisions)) is None
        if num_mixed > 2:
            break
    assert num_mixed > 2


@agent
async def says_nothing(chat: Chat, row: Sample) -> float:
    if int(str(row.prompt)[:-1]) % 2:
        raise ValueError("it gives up")
    await chat.say(row.prompt, max_tokens=5)
    return 1.0


@flow(staleness=1)
def often_silent() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    for _ in steps(3):
        episodes = policy.rollout(says_nothing, rows.take(4), n=2, max_tokens=80)
        policy.update(episodes, episodes.reward)


def test_stale_episodes_in_which_the_model_never_spoke_are_given_again_by_eager():
    planned = run_planned(often_silent, {}, fake_cluster("split"))
    assert any(not one.version_spans for one in planned.decisions.values())
    assert difference_of(planned, run_eager(often_silent, {}, fake_cluster("split"), decisions=planned.decisions)) is None


def test_a_run_of_several_conversations_that_is_killed_and_resumed_at_any_commit_gives_the_same(tmp_path):
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"))
    images = Images(tmp_path / "images")
    images.run = SteppedRun(self_play, {}, spec, settings, hook=images.take)
    expected = images.run.execute()
    assert len(images.paths) > 3
    for number, image in enumerate(images.paths[:: max(len(images.paths) // 6, 1)]):
        found = resumed(self_play, {}, spec, settings, image, order_seed=number)
        assert (found.samples_sha256, found.weights_sha256) == (expected.samples_sha256, expected.weights_sha256)


def test_what_takes_one_reward_or_turns_that_follow_each_other_is_refused(loop):
    @flow
    def refused(advantages: object) -> None:
        policy = Policy("fake", optimizer=AdamW(1e-3))
        rows = Dataset([{"prompt": "1?"}], name="rows")
        for _ in steps(1):
            episodes = policy.rollout(players, rows.take(1), n=2, max_tokens=80, max_conversations=4)
            policy.update(episodes, episodes.reward, advantages=advantages)  # type: ignore[arg-type]

    with pytest.raises(TraceError, match="compares turns that follow each other"):
        run_eager(refused, {"advantages": gigpo()}, SPEC)
    for one in ("grpo", "reinforce_pp"):
        assert OpError.__name__ in (error := run_eager(refused, {"advantages": one}, SPEC).error), error
        assert "have rewards of their own" in error
    with pytest.raises(OptionError, match="compares turns"):
        by_conversation(gigpo())


def test_all_turns_of_a_single_conversation_are_shown(loop):
    @agent
    async def asks(chat: Chat, row: Sample) -> float:
        for question in ("?", " and then?"):
            await chat.say(question, max_tokens=5)
        return 1.0

    row = whole(loop, 0, asks)
    (shown,) = conversations_of(row)
    assert (shown.name, shown.prompt) == ("main", "?")
    assert shown.turns == [turn["text"] for turn in record_of(row)["turns"]]
    assert len(shown.turns) == 2


def test_of_rows_with_one_sequence_each_none_is_cut(loop):
    @agent
    async def alone(chat: Chat, row: Sample) -> float:
        await chat.say("?", max_tokens=5)
        return 1.0

    row = whole(loop, 0, alone)
    assert sequences_of(row) is None
    assert "conversations" not in record_of(row)
    assert not conversations_of(row)
    offsets, of = sequences_of(Batch.concat([whole(loop, 0, players), whole(loop, 1, players)])) or ([], [])
    assert list(of) == [0, 0, 0, 1, 1, 1]
    assert len(offsets) == 7


def test_samples_show_what_the_model_was_told_before_each_turn(loop, tmp_path, monkeypatch):
    row, language = whole(loop, 2, players), host(loop).language
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: language.decode_all(tokens))
    found = conversations_of(row, lambda by: tokenizer)
    for one, (first, *segments) in zip(found, conversations(row).values(), strict=True):
        assert first[0] == Segment.PROMPT
        whole_text = language.decode_all([token for _, tokens in segments for token in tokens])
        turns = [language.decode_all(tokens) for kind, tokens in segments if kind == Segment.GENERATED]
        assert "".join(told + said for told, said in zip_longest(one.told, turns, fillvalue="")) == whole_text
        assert not one.told[0], "the prompt stands by itself"
    assert any(text for one in found for text in one.told)
    assert not any(one.told for one in conversations_of(row)), "nobody knows its tokenizer"

    run = SteppedRun(self_play, {"num_steps": 1, "batch": 1, "n": 2}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    asked = []
    monkeypatch.setattr(RunTokenizers, "of", lambda self, role: asked.append(role) or tokenizer)
    shown = CliRunner().invoke(cli, ["samples", str(run.run_dir), "--limit", "1"]).output.splitlines()
    assert set(asked) == {"policy"}
    assert [line for line in shown if line.startswith("    told:    ")], shown


def test_samples_read_as_separate_conversations_in_the_terminal_and_in_the_viewer(tmp_path):
    spec, settings = fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs"))
    run = SteppedRun(self_play, {"num_steps": 1, "batch": 1, "n": 2}, spec, settings)
    run.execute()
    shown = CliRunner().invoke(cli, ["samples", str(run.run_dir), "--limit", "1", "--where", "ending = 'consumed'"])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    black, white = (next(at for at, line in enumerate(lines) if line.startswith(f"  {name}, reward ")) for name in ("black", "white"))
    assert "black?" in lines[black + 1]
    assert "white?" in lines[white + 1]
    assert lines[black + 2].startswith("    turn 1:  ")
    with SampleQuery(run.run_dir) as query:
        entries = list(query.entries(""))
    page = sample_page(run.run_dir, *map(int, entries[0].sample.split("/")))
    assert [one.name for one in page.conversations] == [one.name for one in entries[0].conversations]
    assert page.conversations[0].start == 0
    for one in page.conversations:
        assert page.kinds[one.start] == 0
        assert one.start == 0 or page.kinds[one.start - 1] != 0, "a prompt begins there"


@agent
async def one_wins(chat: Chat, row: Sample) -> dict[str, float]:
    for name in ("black", "white"):
        await chat.conversation(name).say(f"{name} {row.prompt}", max_tokens=4)
    won = chat.rng.choice((1.0, -1.0))
    return {"black": won, "white": -won}


@flow
def zero_sum() -> None:
    policy, rows = Policy("fake"), Dataset([{"prompt": f"{i}?"} for i in range(6)])
    episodes = policy.rollout(one_wins, rows.all(), n=6, max_tokens=20, max_conversations=3)
    log(flat=policy.update(episodes, episodes.reward, advantages=by_conversation())["groups_without_advantage"])


def test_groups_of_a_zero_sum_game_whose_conversations_differ_are_not_said_to_have_no_advantage(tmp_path):
    run = SteppedRun(zero_sum, {}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [found for line in lines if (found := json.loads(line)["values"].get("flat")) is not None] == [0.0]
    assert not [alert for alert in alerts_of(run.run_dir, None) if alert.title.startswith("groups without")]


@agent
async def forks(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), max_tokens=6)
    aside = chat.fork()
    await aside.say("aside", max_tokens=6)
    await chat.say("on", max_tokens=6)
    return 1.0


@flow
def forked() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    for _ in steps(1):
        episodes = policy.rollout(forks, Dataset([{"prompt": "begin"}], name="rows").take(1), n=2, max_tokens=80, max_conversations=2)
        policy.update(episodes, episodes.reward)


def test_the_viewer_tells_what_a_fork_goes_on_from_from_what_is_its_own(tmp_path):
    run = SteppedRun(forked, {}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    with SampleQuery(run.run_dir) as query:
        entry = next(iter(query.entries("")))
    page = sample_page(run.run_dir, *map(int, entry.sample.split("/")))
    titles = [(block.title.partition(",")[0], block.trained) for block in page.blocks]
    update = "trained by policy.update"
    assert titles == [
        ("Prompt of main", ""), ("Turn 1 of main", update), ("Tools", ""), ("Turn 2 of main", update),
        ("What was said in main before", "trained there"), ("Prompt of main/1", ""), ("Turn 1 of main/1", update),
    ]  # fmt: skip
    shared = page.blocks[4]
    first_two = page.blocks[1].end
    assert (shared.end - shared.start) >= first_two
    assert page.pieces[shared.start : shared.start + first_two] == page.pieces[:first_two]


@pytest.mark.parametrize("more", [{"max_conversations": 2}, {"history": "fork"}, {}])
def test_a_trainer_that_does_not_declare_that_it_reads_rows_of_several_sequences_is_refused_by_the_plan(monkeypatch, more):
    @flow
    def plain() -> None:
        policy = Policy("fake", optimizer=AdamW(1e-3))
        rows = Dataset([{"prompt": "1?"}], name="rows")
        for _ in steps(1):
            episodes = policy.rollout(players, rows.take(1), n=2, max_tokens=80, **more)
            policy.update(episodes, episodes.reward)

    def without() -> list[EngineInfo]:
        return [replace(info, capabilities=replace(info.capabilities, sequences=info.name == "embedded")) for info in engines()]

    graph, models, _ = trace(plain, {})
    lower(graph, models, SPEC)
    monkeypatch.setattr(capabilities, "engines", without)
    if not more:
        lower(graph, models, SPEC)
        return
    with pytest.raises(PlanError, match="the train engine 'fake' reads a sample as one sequence") as caught:
        lower(graph, models, SPEC)
    assert "Take one of embedded as" in str(caught.value)


# ---- what is broken off


def outcome(loop: EventLoop, agent: object) -> tuple[str, str]:
    """How an episode failed, beside one that goes on."""
    episodes = host(loop)
    episodes.begin([begun(0, agent), begun(1, players)])
    first, other = (made.columns for _, made in sorted(played(episodes).items()))
    assert not other["failure"]
    return str(first["failure"]), str(first["episode"].get("error"))  # type: ignore[attr-defined]


def test_a_conversation_whose_first_turn_was_given_up_can_t_go_on_and_harms_no_other_episode(loop):
    @agent
    async def impatient(chat: Chat, row: Sample) -> float:
        one, other = chat.conversation("one"), chat.conversation("other")
        first, second = asyncio.ensure_future(one.say("x")), asyncio.ensure_future(other.say("y"))
        await asyncio.sleep(0)
        second.cancel()  # It has not been begun.
        await asyncio.gather(first, second, return_exceptions=True)
        return float(len((await other.say("y again")).text))

    assert outcome(loop, impatient) == ("invalid", "the conversation other can't go on: a turn of it was broken off (CancelledError)")


def test_a_stop_text_that_can_t_be_ends_its_episode_alone(loop):
    @agent
    async def stops(chat: Chat, row: Sample) -> float:
        return float(len((await chat.say("x", stop="")).text))

    @agent
    async def limits(chat: Chat, row: Sample) -> float:
        return float(len((await chat.say("x", max_tokens=2.5)).text))  # type: ignore[arg-type]

    for odd, words in ((stops, "stop is ('',)"), (limits, "max_tokens is 2.5")):
        failure, said = outcome(loop, odd)
        assert failure == "raised"
        assert words in said


def test_names_of_the_same_number_have_one_order_whichever_was_first(loop):
    rows = []

    def asking(names: tuple[str, ...]) -> object:
        @agent
        async def asks(chat: Chat, row: Sample) -> float:
            for name in names:
                await chat.conversation(name).say("x", max_tokens=4)
            return 0.0

        return asks

    for names in (("1", "01"), ("01", "1")):
        rows.append(whole(loop, 3, asking(names)))
    assert rows[0].ragged("tokens").values.tolist() == rows[1].ragged("tokens").values.tolist()
