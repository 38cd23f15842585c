"""Branches of episodes in a flow: what they share is their parents', what they say is theirs, and every plan gives the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from one_thread import Images, SteppedRun, commit_every, resumed
from played_episodes import host, row_of, same, start_of, stopped_row
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, concat, flow, log, steps, tool
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.engines.contract import Generated
from m2flow.errors import M2FlowError, StateLost, TraceError
from m2flow.macro.ops import EpisodeRows
from m2flow.macro.tracing import trace
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.worker.engine_host import episodes_of
from m2flow.recipe import AdamW
from m2flow.recipe import Episodes as Bounds
from m2flow.samples import Batch, SampleId, Segment
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.random_programs import ADVERSARIES, Dice, difference_of, make_cluster
from m2flow.testing.world import Answer, run_eager, run_planned
from m2flow.viewer.sample_pages import sample_page

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")

CALLED = "M2FLOW_TEST_CALLED"
"""Environment variable with the file that the tool writes to: what a function captures is a copy."""


@tool(replay="pure")
async def weigh(what: str) -> str:
    """Weigh something."""
    if CALLED in os.environ:
        with open(os.environ[CALLED], "a") as file:
            file.write(what + "\n")
    return f"{len(what)} {what[:3]}"


@agent
async def walker(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[weigh], max_tokens=5)
    for number in range(chat.rng.randint(1, 3)):
        turn = await chat.reply([ToolCall("weigh", {"what": f"{number} {chat.rng.random():.4f} {turn.text}"})], max_tokens=5)
    return len(turn.text) / 10 + chat.num_turns


def prompts(count: int = 50) -> Dataset:
    return Dataset([{"prompt": f"{17 * number}?"} for number in range(count)], name="rows")


@flow
def trees(num_steps: int = 2, batch: int = 2, n: int = 2) -> None:
    policy, rows = Policy("fake", optimizer=AdamW(1e-3)), prompts()
    for _ in steps(num_steps):
        first = policy.rollout(walker, rows.take(batch), n=n, max_tokens=200)
        more = first.branch(n=3)
        last = more[more.num_turns >= 2].branch(n=2, at=-1)
        log(worth=more.reward.back_to(first).mean())
        every = concat([first, more, last])
        policy.update(every, every.reward)


SMALL: dict[str, object] = {"num_steps": 1, "batch": 2}
SPEC = ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


class Seen:
    """Rows that a flow has looked at, by name."""

    rows: dict[str, Batch] = {}  # noqa: RUF012  # A flow's return value goes nowhere.


def seen(name: str, handle: EpisodeRows) -> None:
    Seen.rows[name] = handle.batch()


def looked_at(of: object, **options: object) -> dict[str, Batch]:
    """What a flow looks at, of an eager run."""
    Seen.rows = {}
    answer = run_eager(of, options, SPEC)  # type: ignore[arg-type]
    assert not answer.error, answer.error
    return Seen.rows


@flow
def two(n: int = 2, first: int = 0, at: str = "random", branches: int = 3) -> None:
    policy = Policy("fake")
    parents = policy.rollout(walker, prompts().take(4), n=2, max_tokens=200)
    chosen = parents[first:]
    turn = chosen.num_turns if at == "column" else "random" if at == "random" else int(at)
    seen("parents", parents)
    seen("branches", chosen.branch(n=branches, at=turn))
    if at == "random":
        seen("again", chosen.branch(n=branches))


def parts(rows: Batch, row: int) -> list[tuple[Segment, list[int]]]:
    tokens, at, found = rows.ragged("tokens").row(row).tolist(), 0, []
    for kind, count in zip(rows.ragged("segment_kinds").row(row).tolist(), rows.ragged("segment_lengths").row(row).tolist(), strict=True):
        found.append((Segment(kind), tokens[at : at + count]))
        at += count
    return found


def test_a_branch_begins_with_its_parents_tokens_and_a_loss_sees_only_its_own(tmp_path, monkeypatch):
    called = tmp_path / "called"
    monkeypatch.setenv(CALLED, str(called))
    rows = looked_at(two)
    parents, branches = rows["parents"], rows["branches"]
    turns = branches.dense("branch_turn").tolist()
    assert len(set(turns)) > 2
    assert len(branches) == 3 * len(parents)
    own_tools = 0
    for row, packed in enumerate(branches.ids.tolist()):
        who = SampleId.unpack(packed)
        parent, mine = parts(parents, who.prompt), parts(branches, row)
        num_shared = 2 * (turns[row] - 1)  # A prompt or a tool's text, and a turn.
        assert [tokens for _, tokens in mine[:num_shared]] == [tokens for _, tokens in parent[:num_shared]]
        assert [kind for kind, _ in mine[1:num_shared:2]] == [Segment.SHARED] * (turns[row] - 1)
        assert [kind for kind, _ in mine[num_shared + 1 :: 2]] == [Segment.GENERATED] * (len(mine) // 2 - turns[row] + 1)
        assert mine[num_shared][1] == parent[num_shared][1], "what tools gave before its turn is in the record"
        is_own = np.repeat([kind is Segment.GENERATED for kind, _ in mine], [len(tokens) for _, tokens in mine])
        assert np.array_equal(branches.ragged("loss_mask").row(row), is_own)
        assert np.array_equal(branches.ragged("versions").row(row) >= 0, is_own)
        assert np.array_equal(branches.ragged("logprobs").row(row) != 0, is_own)
        own_tools += len(mine) // 2 - turns[row]
    of_parents = sum(int(count) - 1 for count in parents.dense("num_turns"))
    of_second = sum(int(a) - int(b) for a, b in zip(rows["again"].dense("num_turns"), rows["again"].dense("branch_turn"), strict=True))
    assert len(called.read_text().splitlines()) == of_parents + own_tools + of_second, "no tool of a shared turn has run again"


def texts(rows: Batch) -> list[list[int]]:
    return [rows.ragged("tokens").row(row).tolist() for row in range(len(rows))]


def test_a_branch_depends_on_its_parent_its_turn_and_its_number_alone():
    rows = looked_at(two, at="2")
    branches = texts(rows["branches"])
    assert len({tuple(tokens) for tokens in branches}) == len(branches)
    more = texts(looked_at(two, at="2", branches=5)["branches"])
    assert [tokens for at, tokens in enumerate(more) if at % 5 < 3] == branches
    assert texts(looked_at(two, at="2", first=3)["branches"]) == branches[3 * 3 :]


def test_branches_that_are_asked_for_again_take_other_turns_and_say_something_else():
    rows = looked_at(two)
    assert rows["branches"].dense("branch_turn").tolist() != rows["again"].dense("branch_turn").tolist()
    assert not {tuple(t) for t in texts(rows["branches"])} & {tuple(t) for t in texts(rows["again"])}


@agent
async def names_its_row(chat: Chat, row: Sample) -> float:
    turn = await chat.say(f"{row.id} {row.prompt}", max_tokens=5)
    turn = await chat.reply([ToolCall("weigh", {"what": f"{row.id} {turn.text}"})], max_tokens=5)
    turn = await chat.say(f"{row.id}", max_tokens=5)
    return len(turn.text) / 10


@flow
def named() -> None:
    policy, rows = Policy("fake"), prompts()
    rows.take(3)
    parents = policy.rollout(names_its_row, rows.take(4), n=2, max_tokens=300)
    branches = parents.branch(n=2, at=-1)
    seen("branches", branches)
    seen("further", branches.branch(n=2, at=3))


def test_an_agent_that_names_its_row_says_the_same_of_it_in_a_branch():
    rows = looked_at(named)
    assert (len(rows["branches"]), len(rows["further"])) == (16, 32), "no branch has failed"
    assert run_planned(named, {}, SPEC).error == ""


def test_an_agent_that_names_its_row_says_the_same_of_it_where_it_goes_on(loop):
    start = start_of(5, names_its_row)
    start = replace(start, request=replace(start.request, id=SampleId(1, 2, 3).pack()))
    whole = host(loop)
    whole.begin([start])
    ((_, made),) = played_on(whole).items()
    call = type("Call", (), {"options": {"agent": names_its_row, "episodes": Bounds(8)}})()
    (again,) = episodes_of(call, [start.request], row_of(made), is_stopped=True)
    assert again.row.id == start.row.id != SampleId.unpack(made.id)


def test_the_turn_is_a_number_from_either_end_or_a_column():
    for at, expected in {"1": [1] * 8, "-1": None, "column": None}.items():
        rows = looked_at(two, at=at, branches=1)
        assert rows["branches"].dense("branch_turn").tolist() == (expected or rows["parents"].dense("num_turns").tolist())


@agent
async def reads_its_columns(chat: Chat, row: Sample) -> float:
    for _ in range(2):
        await chat.say(f"{row.prompt} {row.at} {row.rows}", max_tokens=5)
    return 0.0


@flow
def of_columns() -> None:
    rows = Dataset([{"prompt": f"{at}?", "at": 7, "rows": 8} for at in range(2)], name="rows")
    first = Policy("fake").rollout(reads_its_columns, rows.take(2), max_tokens=200)
    more = first.branch(n=2, at=first.num_turns)
    seen("more", more)
    seen("further", more.branch(n=1, at=more.branch_turn))


def test_columns_of_any_name_stay_with_the_branches_whose_turn_is_a_column():
    rows = looked_at(of_columns)
    assert (len(rows["more"]), len(rows["further"])) == (4, 4)
    assert all(rows[name].dense("at").tolist() == [7] * 4 for name in rows)
    assert all(rows[name].dense("branch_turn").tolist() == [2] * 4 for name in rows)


def test_a_turn_that_an_episode_does_not_have_is_said_with_the_episode():
    answer = run_eager(two, {"at": "4"}, SPEC)
    assert "has no turn 4: it has turns 1 to" in answer.error
    assert run_planned(two, {"at": "4"}, SPEC).error == answer.error


@agent
async def often_silent(chat: Chat, row: Sample) -> float:
    if int(str(row.prompt)[:-1]) % 2:
        return -1.0
    return len((await chat.say(str(row.prompt), max_tokens=5)).text)


@flow
def of_silent_ones(at: str = "random") -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    for _ in steps(1):
        first = policy.rollout(often_silent, prompts().take(4), n=2, max_tokens=50)
        more = first.branch(n=3, at="random" if at == "random" else int(at))
        seen("first", first)
        seen("more", more)
        log(worth=more.reward.back_to(first).mean())
        every = concat([first, more])
        policy.update(every, every.reward)


def test_episodes_in_which_the_model_never_spoke_are_played_again_by_branches_at_random_turns_and_are_counted():
    planned, eager = run_planned(of_silent_ones, {}, SPEC), run_eager(of_silent_ones, {}, SPEC)
    assert not eager.error
    assert difference_of(planned, eager) is None
    assert [value for _, name, value in eager.logs if name == "episodes/silent_parents"] == [4]
    first, more = Seen.rows["first"], Seen.rows["more"]
    is_silent = np.repeat(first.dense("num_turns") == 0, 3)
    assert is_silent.any()
    assert np.array_equal(more.dense("num_turns") == 0, is_silent)
    assert np.array_equal(more.dense("reward") == -1, is_silent)
    assert not more.ragged("tokens").lengths[is_silent].any()
    refused = run_eager(of_silent_ones, {"at": "1"}, SPEC).error
    assert "has no turn 1: it has no whole turn" in refused
    assert run_planned(of_silent_ones, {"at": "1"}, SPEC).error == refused


def test_the_viewer_tells_turns_of_a_branch_from_those_of_the_episode_that_it_is_a_branch_of(tmp_path):
    run = SteppedRun(trees, SMALL, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    num_shared = 0
    with SampleQuery(run.run_dir) as query:
        branches = [entry.sample for entry in query.entries("ending = 'consumed'") if entry.call == "policy.branch"]
    for one in branches:
        page = sample_page(run.run_dir, *map(int, one.split("/")))
        turns = [block for block in page.blocks if block.title.startswith("Turn ")]
        is_own = [block.is_turn for block in turns]
        assert is_own == sorted(is_own), "its own are the last"
        assert all(block.trained == ("trained by policy.update" if block.is_turn else "trained there") for block in turns)
        assert all(("a branch of" in block.title) is not block.is_turn for block in turns)
        num_shared += is_own.count(False)
    assert num_shared


def test_a_branch_that_is_stopped_after_any_step_and_goes_on_elsewhere_is_the_same(loop):
    whole = host(loop)
    whole.begin(start_of(index, walker) for index in range(6))
    parents = played_on(whole)

    def start(index: int) -> EpisodeStart:
        begun = start_of(index, walker)
        (parent,) = (made for packed, made in parents.items() if packed == begun.request.id)
        point = stopped_row(parent).branched(2, 1000 + index)
        return replace(begun, request=replace(begun.request, seed=77 + index), stopped=point, branch="2")

    once = host(loop)
    once.begin(start(index) for index in range(6))
    expected = played_on(once)
    num_stopped = 0
    for index in range(6):
        begun, found, had = start(index), dict[int, Generated](), 0
        while not found:
            episodes = host(loop)
            episodes.begin([begun])
            packed, least = begun.request.id, had + 1 + num_stopped % 3
            while not found and (episodes.progress()[packed] < least or episodes.is_held(packed)):
                found = {made.id: made for made in episodes.step()}
                episodes.written(episodes.take_urgent())
            if not found:
                (gone,) = episodes.abort([packed])
                had, num_stopped = gone.num_sampled, num_stopped + 1
                begun = replace(start(index), stopped=stopped_row(gone))
        assert same(found[begun.request.id], expected[begun.request.id]), index
    assert num_stopped > 10


def test_a_branch_that_is_stopped_before_a_token_of_its_own_begins_anew(loop):
    whole = host(loop)
    whole.begin([start_of(0, walker)])
    ((_, parent),) = played_on(whole).items()
    point = stopped_row(parent).branched(2, 1000)
    episodes = host(loop)
    episodes.begin([replace(start_of(0, walker), stopped=point, branch="2")])
    (gone,) = episodes.abort([parent.id])
    assert gone.num_sampled == 0


def played_on(episodes: Episodes) -> dict[int, Generated]:
    found = {}
    while episodes.num_unfinished:
        found.update({made.id: made for made in episodes.step()})
        episodes.written(episodes.take_urgent())
    return found


@pytest.mark.timeout(0)
def test_a_planned_run_of_trees_equals_the_eager_one_whatever_dies(request):
    for number in range(30 if request.config.getoption("--long") else 2):
        dice = Dice(f"trees, {number}")
        spec = make_cluster(dice)
        planned = run_planned(trees, SMALL, spec, seed=number, order_seed=number, num_losses=2 * (number % 2))
        assert not planned.error or planned.error.startswith(StateLost.__name__), planned.error
        if not planned.error:
            assert difference_of(planned, run_eager(trees, SMALL, spec, seed=number)) is None, f"case {number}: {spec}"


@flow(staleness=2)
def stale_trees(num_steps: int = 4) -> None:
    policy, rows = Policy("fake", optimizer=AdamW(1e-3)), prompts()
    for _ in steps(num_steps):
        first = policy.rollout(walker, rows.take(2), n=2, max_tokens=200)
        policy.update(first, first.reward)
        more = first.branch(n=6, at=1)
        for _ in range(2):
            policy.update(first, first.reward)
        policy.update(more, more.reward)
        last = more[more.num_turns >= 2][:8].branch(n=2, at=-1)
        policy.update(last, last.reward)


@pytest.mark.timeout(0)
def test_stale_branches_that_are_stopped_go_on_with_other_weights_and_eager_gives_the_same():
    graph, *_ = trace(stale_trees, {}, steps=4)
    branches = {call.ordinal for call in graph.calls if call.name == "policy.branch"}
    for number in (5, 6, 4, 3, 1, 2):  # When a sample is stopped depends on the agents' thread.
        rollout = RolloutSpec(engine="fake", workers=3, max_running=3, chunk=3, policy=(f"{ADVERSARIES}:Adversary:seed={number}",))
        spec = SPEC.model_copy(update={"placement": "split", "rollout": rollout})
        planned = run_planned(stale_trees, {}, spec, seed=number, order_seed=number)
        assert not planned.error
        assert difference_of(planned, run_eager(stale_trees, {}, spec, seed=number, decisions=planned.decisions)) is None
        of_branches = [decision.version_spans for decision in planned.decisions.values() if decision.call in branches]
        if any(len({one.version for one in version_spans}) > 1 for version_spans in of_branches):
            return
    pytest.fail("no branch was stopped and went on with newer weights")


@pytest.mark.slow
def test_a_run_of_trees_that_is_killed_at_any_time_and_resumed_has_the_same_answer(tmp_path, monkeypatch):
    commit_every(monkeypatch, 0.0)
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"))
    images = Images(tmp_path / "images")
    images.run = SteppedRun(trees, {"num_steps": 1, "batch": 1}, spec, settings, hook=images.take)
    whole = images.run.execute()
    tried = images.paths[:: max(len(images.paths) // 5, 1)]
    for number, image in enumerate(tried):
        again = resumed(trees, {"num_steps": 1, "batch": 1}, spec, settings, image, order_seed=number)
        assert (again.samples_sha256, again.weights_sha256) == (whole.samples_sha256, whole.weights_sha256), image
    assert len(tried) > 4, "from its beginning to its end"


def test_a_worker_takes_first_the_branches_whose_parents_it_has_played(monkeypatch, moved):
    at: dict[int, int] = {}
    branches: list[tuple[int, int]] = []
    begin = Episodes.begin

    def noted(self: Episodes, starts: Iterator[EpisodeStart]) -> None:
        starts = list(starts)
        for start in starts:
            if start.branch:
                branches.append((SampleId.unpack(start.request.id).prompt, id(self)))
            else:
                at[start.request.id] = id(self)
        begin(self, starts)

    monkeypatch.setattr(Episodes, "begin", noted)
    spec = ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=3),
        train=TrainSpec(engine="fake"),
        functions=FunctionSpec(workers=1),
    )
    answer: Answer = run_planned(two, {}, spec)
    assert not answer.error
    of_parents = [at[packed] for packed in sorted(at)]
    near = [of_parents[parent % len(at)] == played for parent, played in branches]
    assert (len(at), len(near)) == (8, 48)
    assert np.mean(near) >= 0.75, "the third worker played none, and takes its share of the others'"
    assert {one.cause for one in moved} == {"load"}
    assert sum(len(one.ids) for one in moved) == near.count(False) > 0


# ---- what can't be branched


def refused(*, at: object = 1, n: object = 2) -> str:
    """The error of a flow that branches so."""

    @flow
    def branching() -> None:
        policy = Policy("fake")
        for _ in steps(1):
            parents = policy.rollout(walker, prompts().take(2), n=2, max_tokens=50)
            if at == "two rollouts":
                concat([parents, policy.rollout(walker, prompts().take(2), max_tokens=50)]).branch(n=2)
            parents.branch(n=n, at=at)

    with pytest.raises(M2FlowError) as error:
        trace(branching, {})
    assert Path(__file__).name in str(error.value), "it has the line"
    return str(error.value)


@flow
def of_a_column() -> None:
    rows = Dataset([{"prompt": "7?", "branch_turn": 2}], name="rows")
    Policy("fake").rollout(walker, rows.take(1), max_tokens=50).branch(n=2)


def test_what_can_not_be_branched_is_refused_before_the_run_with_what_to_do():
    assert "Branch those of each" in refused(at="two rollouts")
    with pytest.raises(TraceError, match="they have a column 'branch_turn' already"):
        trace(of_a_column, {})
    for wrong in (0, True, 1.5, "first", None, [1]):
        assert "that is no turn" in refused(at=wrong)
    for wrong in (0, True, 2.0, 5000, "2"):
        assert "an episode has from 1 to 4096 branches" in refused(n=wrong)


def test_a_rollout_and_its_branches_have_these_bounds_in_the_plan():
    graph, *_ = trace(trees, {"num_steps": 1})
    made = [call for call in graph.calls if call.engine == "rollout"]
    assert [(call.name, call.options["n"]) for call in made] == [("policy.rollout", 2), ("policy.branch", 3), ("policy.branch", 2)]
    assert len({id(call.options["agent"]) for call in made}) == 1
    assert all(isinstance(call.options["episodes"], Bounds) for call in made)
    assert [call.most_rows for call in made] == [4, 12, 24]
