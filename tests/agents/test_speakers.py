"""Episodes in which several policies speak: each trains what it said, under every plan and after every loss."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from one_thread import Images, SteppedRun, resumed
from played_episodes import row_of, same, stopped_row
from resumed_runs import fake_cluster
from speaker_flows import SPEC, VERSIONS, begun, contest, hosts, match
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from m2flow import Chat, Dataset, Policy, Reference, Reward, Sample, agent, by_conversation, flow, log, op, steps
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes
from m2flow.agents.tools import EventLoop
from m2flow.engines.contract import Generated, Request
from m2flow.errors import OptionError, PlanError, SpecError, StateLost, TraceError
from m2flow.macro.columns import Said, Spoke
from m2flow.macro.graph import Effect, MacroGraph
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import update_semantics
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import Choice, Placement
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.recipe import AdamW, Sampling
from m2flow.samples import Batch, Ragged
from m2flow.spec import ClusterSpec, PinSpec, PoolSpec, RolloutSpec, RunSettings
from m2flow.testing.random_programs import ADVERSARIES, Dice, difference_of, make_cluster, make_policies, scheduled
from m2flow.testing.world import Answer, run_eager, run_planned
from m2flow.viewer.sample_pages import SamplePage, sample_page

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


def test_a_planned_run_of_several_speakers_equals_the_eager_one():
    planned = run_planned(contest, {}, SPEC)
    eager = run_eager(contest, {}, SPEC)
    assert not planned.error, planned.error
    assert not eager.error, eager.error
    assert difference_of(planned, eager) is None


@pytest.mark.timeout(0)
@pytest.mark.parametrize("loses", [0, 2])
def test_planned_equals_eager_under_random_plans_orders_and_losses(request, loses):
    for number in range(80 if request.config.getoption("--long") else 4):
        dice = Dice(f"speakers, {loses}, {number}")
        spec = make_cluster(dice)
        if number % 3 == 2:
            spec = scheduled(spec, make_policies(dice))
        options = {"alone": dice.choice((0, 1)), "how": dice.choice(("grpo", "rloo", "opo")), "num_steps": 3, "staleness": number % 3}
        planned = run_planned(contest, options, spec, seed=number, order_seed=dice.integer(0, 2**30), num_losses=dice.integer(0, loses))
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(contest, options, spec, seed=number, decisions=planned.decisions or None)
        assert not eager.error
        assert difference_of(planned, eager) is None, f"case {number}: {options} {spec}"


STOPS_MUCH = SPEC.model_copy(update={"placement": "split"})


def are_mixed(answer: Answer) -> int:
    """Episodes in which one who speaks has several versions of its weights: they were stopped, and went on with newer ones."""
    used = [{(version_span.by, version_span.version) for version_span in one.version_spans} for one in answer.decisions.values()]
    return sum(len(versions) > len({by for by, _ in versions}) for versions in used)


def test_stale_episodes_that_are_stopped_go_on_with_other_weights_of_each_speaker_and_eager_gives_the_same():
    num_mixed = num_apart = 0
    for number in (1, 3):
        rollout = RolloutSpec(engine="fake", workers=3, max_running=3, chunk=3, policy=(f"{ADVERSARIES}:Adversary:seed={number}",))
        spec, options = STOPS_MUCH.model_copy(update={"rollout": rollout}), {"alone": 1, "num_steps": 4, "staleness": 2}
        planned = run_planned(contest, options, spec, seed=number, order_seed=number)
        assert not planned.error
        num_mixed += are_mixed(planned)
        num_apart += sum(len({version_span.version for version_span in one.version_spans}) > 1 for one in planned.decisions.values())
        eager = run_eager(contest, options, spec, seed=number, decisions=planned.decisions)
        assert difference_of(planned, eager) is None
    assert num_mixed
    assert num_apart > num_mixed, "in some each speaker has one version, and they differ"


def test_the_viewer_says_of_each_run_of_tokens_who_said_it_and_by_whom_it_is_trained(tmp_path):
    run = SteppedRun(contest, {"num_steps": 1, "n": 2}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    with SampleQuery(run.run_dir) as query:
        ids = [entry.sample for entry in query.entries("ending = 'consumed'") if len(entry.conversations) == 3]
    assert ids
    for one in ids:
        page = sample_page(run.run_dir, *map(int, one.split("/")))
        assert [(block.start, block.end) for block in page.blocks] == list(pairwise([0, *(block.end for block in page.blocks)]))
        assert page.blocks[-1].end == len(page.pieces)
        assert [i for i, kind in enumerate(page.kinds) if kind == 1] == [i for b in page.blocks if b.is_turn for i in range(b.start, b.end)]
        said = {block.title.partition(" of ")[2]: block.trained for block in page.blocks if block.is_turn}
        assert said == {
            "main": "trained by policy.update",
            "other, by rival": "trained by rival.update",
            "verdict, by judge": "trained by nobody",
        }
        assert not any(block.trained for block in page.blocks if not block.is_turn)


def test_the_viewer_decodes_what_each_said_with_its_own_tokenizer(tmp_path):
    run = SteppedRun(contest, {"num_steps": 1, "n": 2}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    with SampleQuery(run.run_dir) as query:
        entry = next(entry for entry in query.entries("ending = 'consumed'") if len(entry.conversations) == 3)

    def page() -> SamplePage:
        return sample_page(run.run_dir, *map(int, entry.sample.split("/")))

    def saved(role: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Tokenizer(WordLevel({f"{role}{token}": token for token in range(300)}, unk_token=f"{role}0")).save(str(folder / "tokenizer.json"))

    tokens = [int(piece) for piece in page().pieces]
    assert not page().has_texts
    for role in ("policy", "rival"):
        saved(role, run.run_dir / "checkpoints" / "final" / role)
    numbered = page()
    assert numbered.has_texts
    saved("judge", tmp_path / "judge")
    config = json.loads((run.run_dir / "config.json").read_text())
    config["models"]["judge"]["path"] = str(tmp_path / "judge")  # It is not trained, so it has no checkpoint.
    (run.run_dir / "config.json").write_text(json.dumps(config))
    found, role_of = page(), {"main": "policy", "other, by rival": "rival", "verdict, by judge": "judge"}
    role = "policy"
    for block in found.blocks:
        role = next((role for whose, role in role_of.items() if f" of {whose}" in block.title), role)
        shown = [piece.strip() for piece in found.pieces[block.start : block.end]]
        assert shown == [f"{role}{token}" for token in tokens[block.start : block.end]]
        if role == "judge":
            assert numbered.pieces[block.start : block.end] == [f"[{token}]" for token in tokens[block.start : block.end]]
    assert role == "judge"


@pytest.mark.slow
def test_a_run_of_several_speakers_that_is_killed_and_resumed_at_any_commit_gives_the_same(tmp_path):
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"))
    images = Images(tmp_path / "images")
    images.run = SteppedRun(contest, {"alone": 1, "n": 2}, spec, settings, hook=images.take)
    expected = images.run.execute()
    assert len(images.paths) > 3
    for number, image in enumerate(images.paths[:: max(len(images.paths) // 4, 1)]):
        found = resumed(contest, {"alone": 1, "n": 2}, spec, settings, image, order_seed=number)
        assert (found.samples_sha256, found.weights_sha256) == (expected.samples_sha256, expected.weights_sha256)


# ---- what an episode's row has of each, and what is taken out of it


def stepped(found: dict[str, Episodes]) -> dict[int, Generated]:
    return {made.id: made for one in found.values() if one.num_unfinished for made in one.step()}


def played(found: dict[str, Episodes]) -> dict[int, Generated]:
    ended: dict[int, Generated] = {}
    while found["policy"].num_unfinished:
        ended |= stepped(found)
    return ended


def whole(loop: EventLoop, agent: object, index: int = 0) -> Batch:
    found = hosts(loop)
    found["policy"].begin([begun(index, agent)])
    (made,) = played(found).values()
    return row_of(made)


NUM = 10


def test_episodes_of_several_speakers_that_are_stopped_after_any_step_and_go_on_elsewhere_are_the_same(loop):
    together = hosts(loop)
    together["policy"].begin(begun(index) for index in range(NUM))
    expected = played(together)
    assert not any(made.columns["failure"] for made in expected.values())
    dice, num_resumed, num_elsewhere = random.Random(5), 0, 0
    for index in range(NUM):
        stopped: Transcript | None = None
        for _ in range(300):
            found = hosts(loop)
            episodes, start = found["policy"], begun(index, match, stopped)
            episodes.begin([start])
            ended: dict[int, Generated] = {}
            for _ in range(dice.randint(1, 8)):
                ended |= stepped(found)
                counts = episodes.progress()
                assert counts == {made.id: made.num_sampled for made in episodes.snapshot(counts)}
            if ended:
                break
            packed = start.request.id
            num_elsewhere += any(found[role].occupancy().num_running + found[role].occupancy().num_queued for role in ("rival", "judge"))
            assert not any(found[role].progress() or found[role].snapshot([packed]) for role in ("rival", "judge")), "it is the policy's"
            assert not found["rival"].abort([packed]), "it is not the rival's to give up"
            (seen,), (gone,) = episodes.snapshot([packed]), episodes.abort([packed])
            assert same(seen, gone)
            assert counts[packed] == gone.num_sampled
            assert not any(one.num_unfinished for one in found.values())
            stopped = stopped_row(gone) if gone.num_sampled else None
            num_resumed += stopped is not None
        assert same(ended[start.request.id], expected[start.request.id]), index
    assert num_resumed > NUM
    assert num_elsewhere > NUM / 2, "some were stopped in the turn of another than the policy"


@agent
async def fixed(chat: Chat, row: Sample) -> dict[str, float]:
    other, judge = chat.conversation("b", by="rival"), chat.conversation("a", by="judge")
    for number in range(2):
        await other.say(f"to the rival {number}", max_tokens=3)
        await chat.say(f"to the policy {number}", max_tokens=4)
    aside = other.fork()
    assert (aside.by, aside.name) == ("rival", "b/1")
    await aside.say("aside", max_tokens=2)
    await judge.say("to the judge", max_tokens=5)
    return {"main": 0.5, "b": -2.0, "b/1": 4.0}


def test_each_speaker_s_rows_have_its_own_turns_masks_versions_and_rewards(loop):
    row = whole(loop, fixed)
    sizes = {}
    for speaker, role in (("", "policy"), ("rival", "rival"), ("judge", "judge")):
        assert Spoke(speaker)(row, {}).tolist() == [True]
        own = Said(speaker)(row, {})
        assert set(own.columns) == set(row.columns)
        mask, versions = own.ragged("loss_mask").row(0), own.ragged("versions").row(0)
        assert set(versions[mask].tolist()) == {VERSIONS[role]}
        assert set(versions[~mask].tolist()) == {-1}
        assert np.all(own.ragged("logprobs").row(0)[~mask] == 0)
        text = bytes(max(0, token - 3) for token in own.ragged("tokens").row(0).tolist()).decode("latin-1")
        record = own.ragged("episode").item(0)
        assert int(own.dense("num_turns")[0]) == len(record["turns"])
        assert {one.get("by", "") for one in record["conversations"]} == {speaker}
        assert len(record["order"]) == len(record["turns"])
        assert set(record["order"]) == {one["name"] for one in record["conversations"]}
        assert own.ragged("text").item(0) == record["turns"][-1]["text"]
        sizes[speaker] = len(mask), int(mask.sum()), text
    assert sum(size for size, _, _ in sizes.values()) == len(row.ragged("tokens").row(0)), "every token is somebody's, once"
    assert [float(Said(one)(row, {}).dense("reward")[0]) for one in ("", "rival")] == [0.5, 1.0]
    assert np.isnan(Said("judge")(row, {}).dense("reward")[0]), "what nothing trains needs no reward"
    theirs = Said("rival")(row, {}).ragged("episode").item(0)
    assert (theirs["rewards"], theirs["rewarded"]) == ({"b": -2.0, "b/1": 4.0}, {"b": "b", "b/1": "b/1"})
    assert Said("judge")(row, {}).ragged("prompt_text").item(0) == "to the judge"


@agent
async def one_reward(chat: Chat, row: Sample) -> float:
    await chat.conversation("b", by="rival").say("x", max_tokens=3)
    return 2.5


def test_one_number_is_the_reward_of_all_who_spoke_and_who_said_nothing_has_no_row(loop):
    row = whole(loop, one_reward)
    assert Spoke("")(row, {}).tolist() == [False]
    assert float(Said("rival")(row, {}).dense("reward")[0]) == 2.5
    assert len(Said("rival")(row.take([]), {})) == 0


@agent
async def stranger(chat: Chat, row: Sample) -> float:
    await chat.conversation("b", by="nobody").say("x", max_tokens=3)
    return 1.0


@agent
async def partly(chat: Chat, row: Sample) -> dict[str, float]:
    for name in ("b", "c"):
        await chat.conversation(name, by="rival").say("x", max_tokens=3)
    return {"main": 1.0, "b": 1.0}


def test_a_speaker_that_the_rollout_does_not_name_and_a_reward_that_is_left_out_are_named(loop):
    for agent_, how, said in (
        (stranger, "unknown_speaker", "lets 'nobody' speak, and the rollout names rival, judge"),
        (partly, "invalid", "rewards of main, b, and none of the conversation c"),
    ):
        row = whole(loop, agent_)
        assert row.ragged("failure").item(0) == how
        assert said in row.ragged("episode").item(0)["error"]


@flow
def with_agent(which: str = "stranger", trains: bool = False) -> None:
    policy, rival = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival")
    rows = Dataset.generate(lambda rng: {"prompt": "?"}, 100, seed=1, name="rows")
    agents = {"stranger": stranger, "unrewarded": unrewarded}
    played = policy.rollout(agents[which], rows.take(2), n=2, max_tokens=20, speakers={"rival": rival})
    policy.update(played, played.reward)
    if trains:
        rival.update(played.of("rival"), played.of("rival").reward, optimizer=AdamW(1e-3))


@agent
async def unrewarded(chat: Chat, row: Sample) -> dict[str, float]:
    await chat.conversation("b", by="rival").say("x", max_tokens=3)
    await chat.say("y", max_tokens=2)
    return {"main": float(chat.rng.random())}


def test_an_unknown_speaker_ends_the_run_and_so_does_an_update_on_rewards_that_nobody_gave():
    for run in (run_planned, run_eager):
        assert "the rollout names rival: rollout(..., speakers=...)" in run(with_agent, {}, SPEC).error
        assert run(with_agent, {"which": "unrewarded"}, SPEC).error == ""
        assert "returned no reward" in run(with_agent, {"which": "unrewarded", "trains": True}, SPEC).error


# ---- each may be sampled in its own way


def test_each_speaker_s_turns_are_drawn_and_ended_by_its_own_options(loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    found, drawn = hosts(loop), dict[str, Sampling]()
    for role in VERSIONS:
        engine = found[role]._engine

        def note(requests: Iterable[Request], role: str = role, add: Callable[..., None] = engine.add) -> None:
            requests = list(requests)
            drawn.update((role, one.sampling) for one in requests)
            add(requests)

        monkeypatch.setattr(engine, "add", note)
    start = begun(0)
    cold = replace(start.request.sampling, temperature=0.0, top_k=3, stop=("so",))
    found["policy"].begin([replace(start, bounds=replace(start.bounds, drawn_by=(("judge", cold),)))])
    played(found)
    assert {role: (one.temperature, one.top_k, one.stop) for role, one in drawn.items()} == {
        "policy": (1.0, 0, ()),
        "rival": (1.0, 0, ()),
        "judge": (0.0, 3, ("so",)),
    }


@flow
def warmer(hot: float = 0.5) -> None:
    policy, rival, judge = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival"), Policy("fake", name="judge")
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    speakers = {"rival": {"policy": rival, "temperature": hot}, "judge": {"policy": judge, "temperature": 0}}
    for _ in steps(2):
        played = policy.rollout(match, rows.take(2), n=3, max_tokens=80, max_turns=8, temperature=0.7, speakers=speakers)
        theirs = played.of("rival")
        rival.update(theirs, theirs.reward, advantages=by_conversation())
        log(own=mean_temperature(played), rival=mean_temperature(theirs), judge=mean_temperature(played.of("judge")))


@op(granularity="batch")
def mean_temperature(samples: list[Sample]) -> float:
    return sum(sample.temperature for sample in samples) / len(samples)


def test_what_a_speaker_said_has_the_temperature_that_it_was_drawn_at_under_every_plan():
    planned, eager = run_planned(warmer, {}, SPEC), run_eager(warmer, {}, SPEC)
    assert not planned.error, planned.error
    assert not eager.error, eager.error
    assert difference_of(planned, eager) is None
    seen = {name: value for _, name, value in eager.logs if name in ("own", "rival", "judge")}
    assert seen == pytest.approx({"own": 0.7, "rival": 0.5, "judge": 1.0})  # Greedy turns are trained at 1, as those of generate.


def test_a_plan_shows_how_each_is_drawn_and_refuses_what_is_no_option():
    shown = str(trace(warmer, {})[0])
    assert "rival_temperature=0.5" in shown
    assert "judge_temperature=0" in shown
    with pytest.raises(OptionError, match="temperature"):
        trace(warmer, {"hot": -1.0})


# ---- what can't be, and where engines sit


@flow(staleness="staleness")
def wrong(which: str = "", staleness: int = 0) -> None:
    policy, rival = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="rival")
    rows = Dataset.generate(lambda rng: {"prompt": "?"}, 100, seed=1, name="rows")
    given = {"reference": Reference("fake"), "reward": Reward(len), "itself": policy, "": rival}.get(which, rival)
    for _ in steps(1):
        options = {"option": {"policy": rival, "temprature": 0}, "bound": {"policy": rival, "max_tokens": 9}, "nobody": {"temperature": 0}}
        speakers = {} if which == "none" else {"rival": options.get(which, given)}
        played = policy.rollout(fixed, rows.take(2), n=2, max_tokens=20, speakers=speakers)
        played.of("rivall" if which == "misspelt" else "rival")
        policy.update(played, played.reward)


@pytest.mark.parametrize(
    ("options", "what", "now"),
    [
        ({"which": "reference"}, "which has no rollout engine", "a frozen opponent"),
        ({"which": "reward"}, "which has no rollout engine", "Pass a Policy"),
        ({"which": "itself"}, "which plays these episodes", "chat.conversation"),
        ({"which": "none"}, "takes policies by name", "speakers="),
        ({"which": "misspelt"}, "of('rivall'): the speakers are rival", "rival"),
        ({"which": "option"}, "with the option 'temprature'", "'temperature'"),
        ({"which": "bound"}, "with the option 'max_tokens'", "chat.conversation"),
        ({"which": "nobody"}, "which has no rollout engine", "Pass a Policy"),
    ],
)
def test_what_can_t_speak_is_refused_by_name_and_line(options, what, now):
    with pytest.raises((TraceError, OptionError)) as refused:
        trace(wrong, options)
    assert what in refused.value.what
    assert now in refused.value.now
    assert "test_speakers.py" in refused.value.where


def test_engines_of_those_who_speak_in_an_episode_share_its_process():
    graph, models, _ = trace(contest, {})
    for placement in ("split", "time-shared"):
        plan = lower(graph, models, SPEC.model_copy(update={"placement": placement}))
        assert {slot.role for worker in plan.workers for slot in worker.engines if slot.kind == "rollout"} == set(VERSIONS)
    for left_out, what in (("judge", "no worker has a rollout engine for judge"), ("", "has none of rival that works in the same turn")):
        workers = tuple(
            msgspec.structs.replace(
                worker,
                engines=tuple(
                    msgspec.structs.replace(slot, turn="later") if (slot.role, slot.kind, left_out) == ("rival", "rollout", "") else slot
                    for slot in worker.engines
                    if slot.role != left_out
                ),
            )
            for worker in plan.workers
        )
        with pytest.raises(PlanError, match=what):
            lower(graph, models, SPEC, pinned=msgspec.structs.replace(plan, workers=workers))


POOLS = {"big": PoolSpec(device="h100", devices_per_node=4)}


def placement(role: str, kind: str, first: int, num: int, layout: Layout) -> Placement:
    engine = EngineId(role, kind)  # type: ignore[arg-type]
    return Placement(engine, (f"{role}.{kind}",), "big", first, num, layout, 0, Footprint())


def test_a_search_places_speakers_beside_the_episodes_and_a_pin_that_keeps_them_apart_is_refused():
    graph, models, _ = trace(contest, {})
    spec = ClusterSpec(pools=POOLS, rollout=SPEC.rollout, train=SPEC.train)
    placements = (
        placement("policy", "rollout", 0, 2, Layout(dp=2)),
        placement("policy", "train", 2, 1, Layout()),
        placement("rival", "train", 3, 1, Layout()),
    )
    choice = Choice("contest", "here", "split", placements, 1.0, (), (), True, 0.0, "", (), 0.0, {}, {})
    plan = lower(graph, models, spec, choice=choice)
    hosts = [worker for worker in plan.workers if any(slot.kind == "rollout" for slot in worker.engines)]
    assert [{slot.role for slot in worker.engines} for worker in hosts] == [set(VERSIONS)] * 2
    assert {(sync.role, sync.target) for sync in plan.syncs} == {(role, w.name) for role in ("policy", "rival") for w in hosts}
    assert any("rival speaks in the episodes of policy.rollout" in note and "neither its memory" in note for note in plan.notes)
    apart = spec.model_copy(update={"pin": {"rival.rollout": PinSpec(num_devices=1)}})
    with pytest.raises(SpecError, match=r"pin\.rival\.rollout .*policy and rival apart"):
        lower(graph, models, apart, choice=choice)


def sampled_by_others(graph: MacroGraph) -> list[tuple[str, bool]]:
    return [(call.role, bool(call.options.get("sampled_by_others"))) for call in graph.calls if call.method == "update"]


def test_an_update_on_what_another_role_sampled_compares_no_versions_of_its_weights_with_this_ones():
    """Versions count for each role: token log-probabilities of a rival at version 1 are not those of the policy at version 1."""

    @flow
    def crossed() -> None:
        policy, rival, judge = Policy("fake"), Policy("fake", name="rival"), Policy("fake", name="judge")
        prompts = Dataset([{"prompt": "1="}] * 4, shuffle=False)
        for _ in steps(1):
            games = policy.rollout(match, prompts.take(2), n=2, max_tokens=80, speakers={"rival": rival, "judge": judge})
            theirs = games.of("rival")
            policy.update(games, games.reward)
            rival.update(theirs, theirs.reward)
            policy.update(theirs, theirs.reward)
            taught = rival.generate(prompts.take(2), n=2, max_new_tokens=4)
            policy.update(taught, taught.map(share))
            own = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
            kept = own.filter(has_text)
            policy.update(kept, kept.map(share))

    graph, _, _ = trace(crossed, {})
    assert sampled_by_others(graph) == [("policy", False), ("rival", False), ("policy", True), ("policy", True), ("policy", False)]


def has_text(sample: Sample) -> bool:
    return bool(sample.text)


def share(sample: Sample) -> float:
    return len(sample.text) / 8


def test_rows_that_others_sampled_have_no_column_of_same_weights():
    versions = Ragged.of([np.array([0, 0], np.int32)], np.int32)
    rows = Batch(np.array([1], np.int64), {"versions": versions, "kv_stale": Ragged.of([np.zeros(2, np.bool_)], np.bool_)})
    writes = (Effect("policy.weights", 1),)
    own, others = (SimpleNamespace(options=options, writes=writes) for options in ({}, {"sampled_by_others": True}))
    assert update_semantics.with_same_weights(own, rows).ragged("same_weights").values.all()  # type: ignore[arg-type]
    assert "same_weights" not in update_semantics.with_same_weights(others, rows)  # type: ignore[arg-type]
