"""Episodes that wait for an engine go on where another has room, if waiting takes longer than reading their contexts again."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from cost_tables import PlainCosts
from resumed_runs import fake_cluster
from simulated import Given, Ran, cluster, ran, zero

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, by_conversation, flow, log, steps, tool
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import DecodeCost, EngineId, EpisodeCosts, EpisodeTurn, Layout
from m2flow.micro.protocol.events import CallAdded, Command, Event, FromWorker, Moved, Send, Sourced, WorkerJoined, WorkerLost
from m2flow.micro.protocol.plan import Pace
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler import scheduling_policy_dispatch
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.dispatch import RolloutDispatch
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.recipe import AdamW
from m2flow.samples import SampleId
from m2flow.testing.random_programs import difference_of
from m2flow.testing.world import run_eager, run_planned


@agent
async def looks(chat: Chat, row: Sample) -> float:
    return zero(row)


@flow
def looking(batch: int = 8) -> None:
    policy = Policy("fake")
    for _ in steps(1):
        played = policy.rollout(looks, Dataset([{"prompt": "a"}] * batch).take(batch), n=2, max_tokens=99)
        log(reward=played.reward.mean())


@dataclass
class OfLooks(PlainCosts):
    """Each turn has four tokens, and each episode looks something up after each of its turns."""

    read_s: float = 0.001
    look_s: float = 0.5

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return DecodeCost(0.1, 0.0, self.read_s, 4)

    def episodes(self) -> EpisodeCosts:
        look = ((("look", self.look_s),),)
        return EpisodeCosts(tuple((EpisodeTurn(0), *(EpisodeTurn(4, 0, look),) * (n // 4)) for n in (8, 400)))


def skewed(costs: OfLooks, *, batch: int = 8) -> Ran:
    """Two instances, which decode four at once: one gets eight short episodes, and the other eight long ones."""
    lengths = Given([[8]] * (batch // 2) + [[400]] * (batch // 2), prompt=10)
    return ran(looking, costs, lengths, cluster(instances=2, max_running=4), options={"batch": batch})


def moved(result: Ran) -> list[int]:
    """Episodes that were on both instances."""
    one, other = ({run.id for run in runs} for name, runs in result.history.sample_runs.items() if name.startswith("rollout"))
    return sorted(one & other)


def alone_s(costs: OfLooks) -> float:
    """What the long ones take on an instance."""
    return ran(looking, costs, Given([[400]], prompt=10), cluster(max_running=4), options={"batch": 4}).makespans[0]


@pytest.mark.parametrize("look_s", [0.0, 0.5])
def test_skewed_episodes_end_earlier_since_those_that_wait_go_to_the_idle_instance(look_s):
    costs = OfLooks(look_s=look_s)
    result = skewed(costs)
    assert moved(result)
    assert all(SampleId.unpack(row).prompt >= 4 for row in moved(result)), "a long one"
    assert result.makespans[0] < 0.75 * alone_s(costs)


def test_an_episode_stays_where_its_context_is_while_that_is_dearer_to_read_than_to_wait_for():
    assert moved(skewed(OfLooks(read_s=10.0))) == []


def test_none_moves_while_no_instance_has_room():
    """As many long ones as short ones on each: both are full until their ends."""
    lengths = Given([[400]], prompt=10)
    result = ran(looking, OfLooks(), lengths, cluster(instances=2, max_running=4), options={"batch": 8})
    assert moved(result) == []


# ---- the scheduler alone, and what an instance reports


def finished(task: m.Generate, ids: list[int]) -> m.Finished:
    nothing = [0] * len(ids)
    return m.Finished(task.number, task.call, ids, [20] * len(ids), [10] * len(ids), [], nothing, [], None, [], [])


class Two:
    """A scheduler with two instances that decode four at once, after one of them has ended its episodes but for some."""

    def __init__(self, num_left: int) -> None:
        graph, models, _ = trace(looking, {"batch": 8})
        spec = cluster(instances=2, max_running=4)
        plan = lower(graph, models, spec)
        self.scheduler, stages = Scheduler(plan), Lowering(plan, spec).stages(graph)
        sent = self.scheduler.handle(*[CallAdded(call, stage) for call, stage in zip(graph.calls, stages, strict=True)])
        source = next(call for call in graph.calls if call.engine == "source")
        sent += self.scheduler.handle(Sourced(source.ordinal, [SampleId(source.ordinal, at, 0).pack() for at in range(8)], [10] * 8))
        tasks = {one.worker: one.message for one in sent if isinstance(one, Send) and isinstance(one.message, m.Generate)}
        self.here, self.there = tasks["rollout-1"], tasks["rollout-0"]
        assert (len(self.here.ids), len(self.there.ids)) == (8, 8)
        self.scheduler.handle(FromWorker("rollout-0", finished(self.there, self.there.ids[num_left:])))

    def say(self, worker: str, message: m.WorkerReport) -> list[m.ToWorker]:
        commands = self.scheduler.handle(FromWorker(worker, message))
        return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, m.Preempt | m.Generate)]

    def queued(self, *, turn_tokens: float = 100.0, num_cached: int = 0, kv_capacity: int = 0) -> list[list[int]]:
        """What is to leave the other instance, where all but the first wait, the last at the front."""
        ids = self.here.ids[:0:-1]
        report = m.Queued(
            "policy", 4, turn_tokens, kv_capacity, ids, [50] * len(ids), [num_cached] * len(ids), [7 * row for row in range(len(ids))]
        )
        found = self.say("rollout-1", report)
        assert all(isinstance(one, m.Preempt) and one.queued for one in found)
        return [one.ids for one in found if isinstance(one, m.Preempt)]


@pytest.mark.parametrize(("num_left", "num_moved"), [(0, 4), (1, 3), (4, 0), (8, 0)])
def test_an_instance_gets_as_many_as_it_decodes_at_once_the_last_in_the_queue_first(num_left, num_moved):
    two = Two(num_left)
    assert two.queued() == ([two.here.ids[: -num_moved - 1 : -1]] if num_moved else [])


def test_an_instance_gets_no_more_than_its_cache_has_room_for():
    assert [len(ids) for ids in Two(0).queued(kv_capacity=149)] == [2]
    assert Two(1).queued(kv_capacity=99) == []


def test_those_move_that_would_wait_longer_than_their_contexts_take_to_read():
    """By the default pace a step of four takes 8.32 ms, a move 50 ms, and 10,000 tokens 350 ms to read."""
    assert Two(0).queued(turn_tokens=0.0) == []
    assert [len(ids) for ids in Two(0).queued(turn_tokens=5.0)] == [3], "of seven: the fourth waits for 42 ms"
    assert [len(ids) for ids in Two(0).queued(turn_tokens=35.0, num_cached=10_000)] == [2]


def test_what_was_stopped_begins_at_once_where_it_is_to_go_on_and_an_instance_is_asked_once_at_a_time():
    two = Two(1)
    (asked,) = two.queued()
    assert two.queued() == []
    begun = two.say("rollout-1", m.Preempted(two.here.call, asked[:2], [two.here.number] * 2))
    assert [(one.ids, one.waits_us) for one in begun if isinstance(one, m.Generate)] == [(asked[:2], [0, 7])]
    assert len(begun) == 1
    assert two.queued() == [[two.here.ids[5]]], "there is room for one more"
    assert two.say("rollout-1", m.Preempted(two.here.call, [], [])) == []
    assert two.queued() != []


def test_what_is_stopped_for_another_reason_answers_nothing():
    two = Two(0)
    (asked,) = two.queued()
    two.say("rollout-1", m.Preempted(two.here.call, two.here.ids[:1], [two.here.number]))
    assert two.queued() == [], "it is asked once at a time"
    begun = two.say("rollout-1", m.Preempted(two.here.call, asked, [two.here.number] * len(asked)))
    assert begun, "what was asked for goes on"


def test_an_episode_that_waits_wherever_it_goes_moves_ever_more_rarely():
    """As where few large contexts fill the caches of both instances, in which there seems to be room for more small ones."""
    two = Two(0)
    two.scheduler.handle(FromWorker("rollout-1", finished(two.here, two.here.ids[:6])))
    row, number = two.here.ids[-1], two.here.number
    asked = []
    for num_moves in range(4):
        name = f"rollout-{1 - num_moves % 2}"
        for turn_tokens in (23.0 * 2**num_moves, 25.0 * 2**num_moves):  # By the default pace 24 take as long as a move.
            asked.append(two.say(name, m.Queued("policy", 4, turn_tokens, 0, [row], [50], [0], [0])))
        begun = two.say(name, m.Preempted(two.here.call, [row], [number]))
        number = next(one.number for one in begun if isinstance(one, m.Generate))
    assert [[one.ids for one in sent if isinstance(one, m.Preempt)] for sent in asked] == [[], [[row]]] * 4


def test_nothing_is_asked_of_an_instance_that_is_lost_and_what_it_had_begins_elsewhere():
    two = Two(0)
    assert two.queued()
    two.scheduler.handle(WorkerLost("rollout-1", returns=True))
    two.scheduler.handle(WorkerJoined("rollout-1", 1))
    assert two.queued() == [], "it has none of them any more"


# ---- real workers on fake engines


@tool(replay="recorded")
async def note(text: str) -> str:
    """Write something down."""
    await asyncio.sleep(0.02)
    return text.upper()


@agent
async def one_of_two_speaks(chat: Chat, row: Sample) -> float:
    """While a tool with effects runs in one conversation, the other's turn may wait for the engine."""
    other = chat.conversation("other")

    async def noting() -> None:
        await chat.say(str(row.prompt), tools=[note], max_tokens=8)
        for number in range(row.rounds):
            await chat.reply([ToolCall("note", {"text": f"{number}"})], max_tokens=8)

    async def talking() -> None:
        for number in range(2 * row.rounds):
            await other.say(f"{number}", max_tokens=8)

    await asyncio.gather(noting(), talking())
    return float(row.rounds)


@flow
def unequal() -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i * 7919}?", "rounds": 1 if i < 4 else 6} for i in range(8)], name="rows", shuffle=False)
    for _ in steps(1):
        episodes = policy.rollout(one_of_two_speaks, rows.take(8), n=2, max_tokens=400, max_turns=30, max_conversations=2)
        policy.update(episodes, episodes.reward, advantages=by_conversation())


def test_what_moves_is_counted_and_changes_nothing_and_no_tool_with_effects_is_cut_off(monkeypatch):
    counted = Counter[str]()
    begun: list[int] = []
    handle, begin = Scheduler.handle, RolloutDispatch.begin_at

    def noted(self: Scheduler, *events: Event) -> list[Command]:
        commands = handle(self, *events)
        for command in commands:
            if isinstance(command, Moved):
                counted[command.cause] += len(command.ids)
        return commands

    def noted_too(self: RolloutDispatch, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        begun.extend(rows)
        begin(self, worker, call_state, rows)

    monkeypatch.setattr(Scheduler, "handle", noted)
    monkeypatch.setattr(RolloutDispatch, "begin_at", noted_too)
    monkeypatch.setattr(scheduling_policy_dispatch, "_DEFAULT_PACE", Pace("", 1.0, 0.0, 0.0, 0.0, "given"))
    spec = fake_cluster("split", workers=2)
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"max_running": 2})})
    for seed in range(4):
        planned = run_planned(unequal, {}, spec, order_seed=seed)
        assert difference_of(planned, run_eager(unequal, {}, spec, decisions=planned.decisions or None)) is None
        assert not planned.error
    assert begun
    assert counted["load"] > 0
