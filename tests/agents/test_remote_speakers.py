"""Speakers in processes of their own: their turns are asked for over channels, and nothing that is said depends on where they are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
from one_thread import Images, SteppedRun, resumed
from played_episodes import row_of, same, stopped_row
from resumed_runs import fake_cluster
from speaker_flows import SPEC, VERSIONS, begun, contest, hosts

from m2flow import Chat, Dataset, Policy, Sample, agent, flow, log, steps
from m2flow.agents.conversation import Transcript
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.agents.tools import EventLoop
from m2flow.agents.turn_requests import Guests, RemoteSpeaker, Window
from m2flow.channels.channel import Parcel
from m2flow.channels.codec import decode, encode
from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.errors import InternalError, PlanError, StateLost, WorkerError
from m2flow.macro.columns import Said
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.events import CallAdded, WorkerLost
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.micro.protocol.worker_state import TaskState
from m2flow.micro.records.ledger import read_roles
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.worker_failure import Recovery
from m2flow.observe.store import read_spans
from m2flow.planner.measuring import Observed
from m2flow.planner.planning import question_of
from m2flow.recipe import AdamW, Model, Sampling
from m2flow.runner.probing import measured_run
from m2flow.runner.run import Run
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, PinSpec, PoolSpec, RolloutSpec, RunSettings
from m2flow.testing import world
from m2flow.testing.fakes import FAKE_CONTEXT, FakeLanguage, FakeRollout
from m2flow.testing.random_programs import Dice, difference_of, make_cluster, make_policies, make_tight_cluster, scheduled
from m2flow.testing.world import WorkerFailures, run_eager, run_planned
from m2flow.viewer.sample_pages import sample_page

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


@pytest.fixture
def begun_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The role of each turn that was begun for a process that asked for it."""
    roles: list[str] = []
    begins = Guests._begin

    def note(self: Guests, guest: Any, *arguments: Any) -> None:
        roles.append(guest.role)
        begins(self, guest, *arguments)

    monkeypatch.setattr(Guests, "_begin", note)
    return roles


JUDGE_APART = {"judge.rollout": PinSpec(num_devices=1)}
BOTH_APART = {**JUDGE_APART, "rival.rollout": PinSpec(num_devices=2)}


def apart(spec: ClusterSpec = SPEC, *, placement: str = "split", pins: dict[str, PinSpec] = BOTH_APART) -> ClusterSpec:
    return spec.model_copy(update={"placement": placement, "pin": pins})


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize("pins", [JUDGE_APART, BOTH_APART])
def test_a_planned_run_with_speakers_in_processes_of_their_own_equals_the_eager_one(placement, pins, begun_elsewhere):
    spec = apart(placement=placement, pins=pins)
    graph, models, _ = trace(contest, {})
    hosts = [{slot.role for slot in worker.engines if slot.kind == "rollout"} for worker in lower(graph, models, spec).workers]
    assert {"judge"} in hosts
    assert not any({"policy", "judge"} <= roles for roles in hosts)
    planned, eager = run_planned(contest, {}, spec), run_eager(contest, {}, spec)
    assert not planned.error, planned.error
    assert not eager.error, eager.error
    assert difference_of(planned, eager) is None
    assert {f"{role}.rollout" for role in begun_elsewhere} == set(pins)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("loses", [0, 2])
def test_planned_equals_eager_under_random_plans_orders_and_losses(request, loses):
    for number in range(80 if request.config.getoption("--long") else 6):
        dice = Dice(f"remote speakers, {loses}, {number}")
        spec = apart(make_cluster(dice), placement=dice.choice(("split", "time-shared")), pins=dice.choice((JUDGE_APART, BOTH_APART)))
        if number % 3 == 2:
            spec = scheduled(spec, make_policies(dice))
        options = {"alone": dice.choice((0, 1)), "how": dice.choice(("grpo", "rloo", "opo")), "num_steps": 3, "staleness": number % 3}
        planned = run_planned(contest, options, spec, seed=number, order_seed=dice.integer(0, 2**30), num_losses=dice.integer(0, loses))
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(contest, options, spec, seed=number, decisions=planned.decisions or None)
        assert not eager.error
        assert difference_of(planned, eager) is None, f"case {number}: {options} {spec}"


def slot(role: str, kind: Literal["rollout", "train"], turn: str = "") -> EngineSlot:
    return EngineSlot(role, kind, "fake", turn)


FUNCTIONS = WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))
TWO_LEASES = (
    WorkerPlan("device-0", "cpu", 1, (slot("policy", "rollout"), slot("policy", "train")), "one"),
    WorkerPlan("device-1", "cpu", 1, (slot("rival", "rollout"), slot("rival", "train")), "two"),
    WorkerPlan("rollout-2", "cpu", 1, (slot("judge", "rollout"),)),
    FUNCTIONS,
)
"""Self-play of two policies on two devices, each of which its engines share in turns, and a judge on a third."""
ONE_LEASE = (
    WorkerPlan("rollout-0", "cpu", 1, (slot("policy", "rollout"),), "one"),
    WorkerPlan("rollout-1", "cpu", 1, (slot("rival", "rollout"), slot("judge", "rollout")), "one"),
    WorkerPlan("rollout-2", "cpu", 1, (slot("rival", "rollout"),), "one"),
    WorkerPlan("train-0", "cpu", 1, (slot("policy", "train"), slot("rival", "train")), "one"),
    FUNCTIONS,
)
"""All devices are generation's or training's together."""


def pinned_to(workers: tuple[WorkerPlan, ...], options: dict[str, object], spec: ClusterSpec) -> Callable[[Plan], Plan]:
    graph, models, _ = trace(contest, options)
    return lambda plan: lower(graph, models, spec, pinned=msgspec.structs.replace(plan, workers=workers))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", [TWO_LEASES, ONE_LEASE], ids=["two leases", "one lease"])
def test_speakers_on_devices_that_engines_take_turns_with_have_their_turn_while_episodes_run(request, workers):
    for number in range(40 if request.config.getoption("--long") else 3):
        options: dict[str, object] = {"alone": number % 2, "num_steps": 3, "staleness": number % 3}
        dice = Dice(f"leases, {number}")
        spec = SPEC.model_copy(update={"channels": make_tight_cluster(dice).channels, "rollout": make_cluster(dice).rollout})
        placed = pinned_to(workers, options, spec)
        planned = run_planned(contest, options, spec, seed=number, order_seed=number, placed=placed, num_losses=number % 2)
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(contest, options, spec, seed=number, decisions=planned.decisions or None)
        assert not planned.error, planned.error
        assert not eager.error, eager.error
        assert difference_of(planned, eager) is None, f"case {number}"


def test_a_plan_in_which_speakers_would_never_have_a_turn_together_is_refused():
    graph, models, _ = trace(contest, {})
    plan = lower(graph, models, SPEC)
    for lease in ("one", "two"):
        own_turn = WorkerPlan("device-1", "cpu", 1, (slot("rival", "rollout", "rollout rival"), slot("rival", "train")), lease)
        workers = (TWO_LEASES[0], own_turn, *TWO_LEASES[2:])
        with pytest.raises(PlanError, match="has none of rival that works in the same turn, nor is there one elsewhere that can"):
            lower(graph, models, SPEC, pinned=msgspec.structs.replace(plan, workers=workers))


def test_a_pin_gives_a_speaker_workers_of_its_own_and_on_gpus_the_pinned_ones():
    graph, models, _ = trace(contest, {})
    for device, devices in (("cpu", ["cpu", "cpu"]), ("cuda:0", ["cuda:2", "cuda:3"])):
        spec = SPEC.model_copy(update={"device": device, "placement": "split", "pin": {"judge.rollout": PinSpec(devices=(2, 4))}})
        workers = lower(graph, models, spec).workers
        hosts = {worker.name: worker.device for worker in workers if any(slot.role == "judge" for slot in worker.engines)}
        assert hosts == {"rollout-1": devices[0], "rollout-2": devices[1]}
        assert [slot.role for slot in workers[0].engines] == ["policy", "rival"]


@pytest.mark.parametrize("pins", [{"policy.rollout": PinSpec(num_devices=1)}, {"rollout": PinSpec(num_devices=1)}])
def test_a_pin_of_another_role_does_not_part_a_speaker_from_the_episodes(pins):
    graph, models, _ = trace(contest, {})
    workers = lower(graph, models, apart(pins=pins)).workers
    assert {slot.role for slot in workers[0].engines} == {"policy", "rival", "judge"}
    searched = ClusterSpec(pools=POOLS, shapes=SHAPES, pin=pins)
    plan = lower(graph, models, searched, choice=question_of(graph, models, searched).choose())
    assert {slot.role for slot in plan.workers[0].engines if slot.kind == "rollout"} == {"policy", "rival", "judge"}


POOLS = {"big": PoolSpec(device="h100", devices_per_node=8)}
SHAPES = {"policy": "Qwen2.5-1.5B", "rival": "Qwen2.5-1.5B", "judge": "Qwen2.5-7B"}


@pytest.mark.parametrize("pins", [JUDGE_APART, {"judge.rollout": PinSpec(devices=(6, 8))}, BOTH_APART])
def test_a_search_places_what_is_pinned_apart_beside_the_rollout_and_counts_its_turns(pins):
    graph, models, _ = trace(contest, {"batch": 16, "n": 8})
    spec = ClusterSpec(pools=POOLS, shapes=SHAPES, pin=pins)
    choice = question_of(graph, models, spec).choose()
    found = {str(placement.engine): placement for placement in choice.placements}
    for name, pin in pins.items():
        assert pin.num_devices in (None, found[name].num_devices)
        assert pin.devices in (None, (found[name].first_device, found[name].devices.stop))
        assert found[name].calls == (f"policy.rollout by {name.partition('.')[0]}",)
        assert not set(found[name].devices) & set(found["policy.rollout"].devices), "they are needed at the same time"
    plan = lower(graph, models, spec, choice=choice)
    hosts = [{slot.role for slot in worker.engines if slot.kind == "rollout"} for worker in plan.workers]
    assert not any("policy" in roles and name.partition(".")[0] in roles for roles in hosts for name in pins)
    assert "policy.rollout by judge" in str(choice)
    assert any("judge speaks in the episodes of policy.rollout" in note and "a generation beside them" in note for note in plan.notes)


# ---- the two sides of a turn


class TwoProcesses:
    """Episodes of a policy in one process, and the engine of a rival that speaks in them in another; what is sent goes as bytes."""

    def __init__(self, loop: EventLoop, *, version: int = 5, num_slots: int = 0) -> None:
        self.rival = FakeRollout(Model("rival"), EngineSettings())
        self.rival.start()
        self.rival._version = version
        self.fault = ""
        self.there = Episodes(self.rival, loop, num_slots=num_slots)
        self.guests = Guests(lambda role: self.there, lambda role, window: self.fault)
        self.speaker = RemoteSpeaker("rival", FakeLanguage(), lambda packed: "there", lambda packed: Window(0, 9), lambda packed: True)
        self.here: dict[str, Episodes] = {}
        policy = FakeRollout(Model("policy"), EngineSettings())
        policy.start()
        policy._version = VERSIONS["policy"]
        self.here["policy"] = Episodes(policy, loop, self.here)
        self.here["rival"] = Episodes(self.speaker, loop, self.here)
        self.num_asked = 0
        self.theirs: list[Generated] = []
        """Episodes of the rival that have ended."""

    @property
    def episodes(self) -> Episodes:
        return self.here["policy"]

    def ask(self) -> None:
        for place, rows in self.speaker.take_asked():
            assert place == "there"
            self.num_asked += len(rows)
            self.guests.take("here", sent(rows))

    def work_here(self) -> dict[int, Generated]:
        """Have the process of the episodes work alone."""
        made = [one for host in self.here.values() for one in host.step()]
        self.ask()
        return {one.id: one for one in made}

    def answer(self) -> None:
        self.theirs += self.guests.keep(self.there.step())
        for place, rows in self.guests.take_answers():
            assert place == "here"
            for row in range(len(rows)):
                record = rows.ragged("turn").item(row)
                self.speaker.answered(sent(rows), row, record)  # type: ignore[arg-type]

    def turn(self) -> dict[int, Generated]:
        made = self.work_here()
        self.answer()
        return made

    def play(self, *starts: EpisodeStart) -> dict[int, Generated]:
        self.episodes.begin(starts)
        ended: dict[int, Generated] = {}
        while self.episodes.num_unfinished:
            ended |= self.turn()
        return ended

    def until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            assert not self.turn()


def sent(rows: Batch) -> Batch:
    return decode(encode(Parcel(-1, rows, "here"))).batch


def beginning(index: int, played: object, stopped: Transcript | None = None, **more: float) -> EpisodeStart:
    start = begun(index, played, stopped)
    start = replace(start, request=replace(start.request, sampling=Sampling(3 * FAKE_CONTEXT)))
    return replace(start, bounds=replace(start.bounds, speakers=(("rival", "rival"),), **more))


@agent
async def duet(chat: Chat, row: Sample) -> float:
    other, said = chat.conversation("other", by="rival"), str(row.prompt)
    for number in range(3):
        heard, aside = await asyncio.gather(other.say(f"{said} {number}", max_tokens=12), chat.say(f"think {number}", max_tokens=3))
        said = heard.text[:5] + aside.text
    return float(len(said))


@agent
async def monologue(chat: Chat, row: Sample) -> float:
    for number in range(3):
        await chat.say(f"{number}", max_tokens=8)
    return 0.0


def expected_of(loop: EventLoop, index: int, played: object = duet) -> Generated:
    """The same episode with both engines in one process."""
    found = hosts(loop)
    found["policy"].begin([beginning(index, played)])
    while found["policy"].num_unfinished:
        for host in found.values():
            for made in host.step() if host.num_unfinished else ():
                return made
    raise AssertionError("it did not end")


def test_an_episode_is_the_same_wherever_its_speaker_is_and_wherever_it_is_stopped(loop):
    dice, num_away = random.Random(3), 0
    for index in range(8):
        expected, stopped = expected_of(loop, index), None
        for _ in range(200):
            pair = TwoProcesses(loop)
            pair.episodes.begin([beginning(index, duet, stopped)])
            ended: dict[int, Generated] = {}
            for _ in range(dice.randint(3, 25)):
                ended |= pair.turn()
                counts = pair.episodes.progress()
                assert counts == {made.id: made.num_sampled for made in pair.episodes.snapshot(counts)}
            if ended:
                break
            num_away += pair.rival.num_unfinished
            (seen,), (gone,) = pair.episodes.snapshot([expected.id]), pair.episodes.abort([expected.id])
            assert same(seen, gone)
            pair.ask()
            assert not pair.rival.num_unfinished, "a turn that nobody waits for is given up"
            assert not len(pair.guests)
            stopped = stopped_row(gone) if gone.num_sampled else None
        assert same(ended[expected.id], expected), index
    assert num_away > 3, "some were stopped in the rival's turn"


def test_what_a_remote_speaker_said_has_the_versions_of_its_own_weights(loop):
    pair = TwoProcesses(loop, version=7)
    (made,) = pair.play(beginning(0, duet)).values()
    row = row_of(made)
    for speaker, version in (("", VERSIONS["policy"]), ("rival", 7)):
        own = Said(speaker)(row, {})
        assert set(own.ragged("versions").row(0)[own.ragged("loss_mask").row(0)].tolist()) == {version}


def test_a_remote_speaker_s_turns_are_drawn_by_its_own_options(loop, monkeypatch):
    pair, drawn = TwoProcesses(loop), list[Sampling]()
    add = pair.rival.add

    def note(requests: Sequence[Request]) -> None:
        drawn.extend(one.sampling for one in requests)
        add(requests)

    monkeypatch.setattr(pair.rival, "add", note)
    own = Sampling(100, temperature=0.5, top_k=3, stop=("so", "\N{SNOWMAN}"), logit_bias=((7, -2.5),), min_p=0.1, stop_token_ids=(5, 9))
    start = beginning(0, duet)
    pair.play(replace(start, bounds=replace(start.bounds, drawn_by=(("rival", own),))))
    assert drawn == [replace(own, max_new_tokens=12)] * 3


def test_what_the_record_has_is_not_asked_for_again(loop):
    pair = TwoProcesses(loop)
    pair.episodes.begin([beginning(0, duet)])
    packed = next(iter(pair.episodes.progress()))
    said = pair.episodes._episodes[packed].transcript.conversations
    pair.until(lambda: len(said.get("other", [])) == 1 and len(said["other"][0].turns) == 2)
    (gone,) = pair.episodes.abort([packed])
    again = TwoProcesses(loop)
    (made,) = again.play(beginning(0, duet, stopped_row(gone))).values()
    assert same(made, expected_of(loop, 0))
    assert again.num_asked == 1


def test_a_turn_that_takes_too_long_is_given_up_where_it_is_played(loop):
    pair = TwoProcesses(loop)
    pair.episodes.begin([beginning(0, duet, turn_timeout_s=0.2)])
    pair.until(lambda: pair.rival.num_unfinished > 0)
    ended: dict[int, Generated] = {}
    while not ended:  # The other process has stopped to work.
        ended = pair.work_here()
    assert next(iter(ended.values())).columns["failure"] == "turn_timed_out"
    assert not pair.rival.num_unfinished


def test_the_time_of_a_turn_that_waits_for_an_engine_elsewhere_does_not_pass(loop):
    pair = TwoProcesses(loop, num_slots=1)
    pair.episodes.begin(beginning(index, duet, turn_timeout_s=0.3, timeout_s=100.0) for index in range(2))
    pair.until(lambda: len(pair.guests) == 2)
    assert pair.rival.num_unfinished == 1
    (waiting,) = [guest.episode for own, guest in pair.guests._here.items() if own in pair.there._guests]
    ended: dict[int, Generated] = {}
    while not ended:  # The other process has stopped to work.
        ended = pair.work_here()
    assert next(iter(ended.values())).columns["failure"] == "turn_timed_out"
    assert waiting not in ended, "it was asked for as early"
    episode = pair.episodes._episodes[waiting]
    assert episode.left_s is not None
    pair.until(lambda: pair.rival.num_unfinished > 0)
    pair.until(lambda: episode.left_s is None)
    (gone,) = pair.episodes.abort([waiting])
    assert gone.columns.get("failure", "") == ""


@pytest.mark.parametrize("num_slots", [1, 2])
def test_turns_of_other_processes_and_an_engine_s_own_wait_in_one_queue(loop, num_slots):
    pair, given = TwoProcesses(loop, num_slots=num_slots), list[int]()
    pair.there.begin([beginning(9, monologue)])
    pair.episodes.begin(beginning(index, duet) for index in range(4))
    ended: dict[int, Generated] = {}
    own = next(iter(pair.there.progress()))
    while len(ended) < 4 or pair.there.num_unfinished:
        ended |= pair.turn()
        given.append(pair.rival.num_unfinished)
    assert max(given) == num_slots
    assert set(pair.there._queue._contexts) == set(), "those that are over are forgotten"
    assert [made.id for made in pair.theirs] == [own]
    for index, made in sorted(ended.items()):
        assert made.columns["failure"] == "", index
    assert same(ended[min(ended)], expected_of(loop, 0))


@agent
async def lengthy(chat: Chat, row: Sample) -> float:
    other = chat.conversation("other", by="rival")
    turns = [await other.say("so", max_tokens=3), await other.say("x" * FAKE_CONTEXT), await other.say("then", max_tokens=3)]
    assert [turn.num_tokens > 0 for turn in turns] == [True, False, True]
    return float(turns[1].is_cut)


def test_a_message_that_does_not_fit_a_remote_speaker_s_context_is_an_empty_turn_that_was_cut_off(loop):
    (made,) = TwoProcesses(loop).play(beginning(0, lengthy)).values()
    assert (made.columns["failure"], made.columns["reward"]) == ("", 1.0)
    assert same(made, expected_of(loop, 0, lengthy))
    assert b"xxx" not in bytes(max(token - 3, 0) for token in made.tokens)


def test_an_answer_to_a_turn_that_was_given_up_is_ignored_and_one_that_should_have_been_played_is_a_mistake(loop):
    pair = TwoProcesses(loop)
    pair.episodes.begin([beginning(0, duet)])
    pair.until(lambda: pair.rival.num_unfinished > 0)
    packed = next(iter(pair.episodes.progress()))
    pair.episodes.abort([packed])
    pair.guests.send_away("its engine gets other weights")
    pair.answer()
    pair.fault = "its engine has version 3"
    pair.episodes.begin([beginning(0, duet)])
    with pytest.raises(InternalError, match="a turn of rival in p0/0 could not be played: its engine has version 3"):
        pair.until(lambda: False)


def test_an_answer_that_has_come_when_its_turn_is_given_up_answers_no_later_one(loop):
    pair, expected = TwoProcesses(loop), expected_of(loop, 0)
    pair.episodes.begin([beginning(0, duet)])
    pair.until(lambda: bool(pair.speaker._made))
    (gone,) = pair.episodes.abort(list(pair.episodes.progress()))
    assert not pair.speaker.num_unfinished
    ended: dict[int, Generated] = {}
    pair.episodes.begin([beginning(0, duet, stopped_row(gone) if gone.num_sampled else None)])
    while not ended:
        ended |= pair.turn()
        assert set(pair.speaker._asked) <= set(pair.here["rival"]._turns)
    assert same(ended[gone.id], expected)


def test_turns_of_a_process_that_is_gone_are_given_up(loop):
    pair = TwoProcesses(loop)
    pair.episodes.begin(beginning(index, duet) for index in range(4))
    pair.until(lambda: pair.rival.num_unfinished == 4)
    pair.guests.lost("another")
    assert pair.rival.num_unfinished == 4
    pair.guests.lost("here")
    assert not pair.rival.num_unfinished


# ---- losses, the record, and what is shown of it


@agent
async def judged(chat: Chat, row: Sample) -> float:
    verdict = chat.conversation("verdict", by="judge")
    said = (await chat.say(row.prompt, max_tokens=6)).text
    return float(sum(map(ord, (await verdict.say(f"good? {said}", max_tokens=20)).text)) % 7)


@flow
def scored(num_steps: int = 2) -> None:
    policy, judge = Policy("fake", optimizer=AdamW(1e-3)), Policy("fake", name="judge")
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    for _ in steps(num_steps):
        played = policy.rollout(judged, rows.take(4), n=4, max_tokens=40, speakers={"judge": judge})
        policy.update(played, played.reward)


class Deaths(WorkerFailures):
    """Has one worker die, in the middle of the run."""

    victim = "rollout-1"

    def next_dead(self, candidates: Sequence[str]) -> str | None:
        return super().next_dead([name for name in candidates if name == self.victim])


def test_episodes_whose_speaker_is_lost_are_played_on_when_it_is_back(monkeypatch, moved):
    silenced = []
    noted = Recovery._silenced

    def note(self: Recovery, number: int, task: TaskState, event: WorkerLost) -> None:
        silenced.append(event.worker)
        noted(self, number, task, event)

    monkeypatch.setattr(world, "WorkerFailures", Deaths)
    monkeypatch.setattr(Recovery, "_silenced", note)
    spec = apart(pins=JUDGE_APART)
    eager = run_eager(scored, {}, spec)
    for seed in range(6):
        planned = run_planned(scored, {}, spec, order_seed=seed, num_losses=1)
        assert not planned.error, planned.error
        assert difference_of(planned, eager) is None, seed
    assert set(silenced) == {"rollout-1"}
    assert {(one.worker, one.cause) for one in moved} == {("rollout-1", "gone")}, "the speaker's context; the episodes' own stays"


def test_a_run_whose_only_speaker_does_not_come_back_ends_with_its_name():
    graph, models, _ = trace(scored, {})
    plan = lower(graph, models, apart(pins=JUDGE_APART))
    scheduler = Scheduler(plan)
    for call, stage in zip(graph.calls, plan.stages, strict=False):
        scheduler.handle(CallAdded(call, stage))
    with pytest.raises(
        WorkerError, match=r"the worker rollout-1 is lost, and no other can speak as judge in the episodes of policy\.rollout"
    ):
        scheduler.handle(WorkerLost("rollout-1"))


def apart_on_disk(placement: str = "split") -> ClusterSpec:
    return apart(fake_cluster(placement), placement=placement, pins=JUDGE_APART)


def test_a_run_with_a_remote_speaker_that_is_killed_and_resumed_gives_the_same_and_asks_for_no_turn_again(tmp_path, begun_elsewhere):
    spec, settings = apart_on_disk(), RunSettings(runs_dir=str(tmp_path / "runs"))
    images = Images(tmp_path / "images")
    images.run = SteppedRun(scored, {}, spec, settings, hook=images.take)
    expected = images.run.execute()
    counts = []
    for image in (images.paths[0], images.paths[len(images.paths) // 2], images.paths[-2]):
        begun_elsewhere.clear()
        found = resumed(scored, {}, spec, settings, image)
        assert (found.samples_sha256, found.weights_sha256) == (expected.samples_sha256, expected.weights_sha256)
        counts.append(len(begun_elsewhere))
    assert counts[0] == 32, "16 episodes in each of 2 steps"
    assert counts[0] > counts[1] > counts[2]


def test_the_viewer_shows_what_a_remote_speaker_said(tmp_path):
    run = SteppedRun(scored, {"num_steps": 1}, apart_on_disk(), RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    with SampleQuery(run.run_dir) as query:
        entry = next(iter(query.entries("ending = 'consumed'")))
    page = sample_page(run.run_dir, *map(int, entry.sample.split("/")))
    said = {block.title.partition(" of ")[2]: block.trained for block in page.blocks if block.is_turn}
    assert said == {"main": "trained by policy.update", "verdict, by judge": "trained by nobody"}


def test_the_span_of_a_turn_says_whose_engine_played_it_and_where_and_a_profile_knows(tmp_path):
    spec = apart_on_disk().model_copy(update={"shapes": {"policy": "Qwen2.5-1.5B", "judge": "Qwen2.5-1.5B"}})
    run = Run(scored, {"num_steps": 1}, spec, RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    turns = [span.attributes for span in read_spans(run.run_dir) if span.name == "turn"]
    assert len(turns) == 32
    graph, models, _ = trace(scored, {"num_steps": 1})
    (judges,) = [worker.name for worker in lower(graph, models, spec).workers if [slot.role for slot in worker.engines] == ["judge"]]
    assert {(one.get("role", ""), one.get("worker", "")) for one in turns} == {("", ""), ("judge", judges)}
    episodes = measured_run(run.run_dir, scored, {"num_steps": 1}).episodes.episodes
    assert len(episodes) == 16
    assert all([turn.role for turn in one] == ["", "", "judge"] for one in episodes), "before the first turn nobody speaks"


@agent
async def alone(chat: Chat, row: Sample) -> float:
    return float(len((await chat.say(row.prompt, max_tokens=9)).text))


@flow
def both() -> None:
    """A judge judges, and plays episodes of its own."""
    policy, judge = Policy("fake"), Policy("fake", name="judge")
    rows = Dataset.generate(lambda rng: {"prompt": f"{rng.randrange(1000)}?"}, 1000, seed=1, name="rows")
    for _ in steps(1):
        theirs = policy.rollout(judged, rows.take(4), n=2, max_tokens=40, speakers={"judge": judge})
        own = judge.rollout(alone, rows.take(4), n=2, max_tokens=40)
        log(theirs=theirs.reward.mean(), own=own.reward.mean())


def test_a_profile_counts_what_a_role_says_in_its_own_episodes_and_in_others(tmp_path):
    spec = fake_cluster().model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=40)})
    run = Run(both, {}, spec, RunSettings(runs_dir=str(tmp_path / "runs")))
    run.execute()
    roles = read_roles(run.run_dir)
    turns = [span.attributes for span in read_spans(run.run_dir) if span.name == "turn"]
    said = [int(str(one["num_tokens"])) for one in turns if one.get("role", roles[int(str(one["call"]))]) == "judge"]
    assert len(said) == 16, "eight in its own episodes, eight in others'"
    (found,) = [steps for (role, _), steps in Observed.of_run(run.run_dir).decode.items() if role == "judge"]
    assert int(found.decoding.sum() + found.entered.sum()) == sum(said), "each token of each step"
