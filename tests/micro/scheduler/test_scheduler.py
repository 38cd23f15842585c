"""The scheduler, driven by events alone: what it must never tell a worker, whatever comes first, twice or late.

`Rig` plays the workers: it checks each command against what the workers have, and answers in an order that a seed decides. Each
worker does its tasks in order, except that generation goes on beside them.
"""

from collections import Counter
from types import SimpleNamespace
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig, program

import m2flow
from m2flow import Chat, Dataset, Policy, Role, Sample, agent, flow, op
from m2flow.errors import EngineError, RewardError, StateLost
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    CallAdded,
    Event,
    FromWorker,
    Released,
    Send,
    Sourced,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Pace
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.scheduling_policy_dispatch import PolicyDispatch
from m2flow.micro.scheduler.state import RowLocations
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

many = settings(max_examples=150, deadline=None)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    return ClusterSpec(
        placement=draw(st.sampled_from(["time-shared", "split"])),
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=draw(st.integers(1, 3)), max_running=draw(st.sampled_from([1, 3, 64]))),
        train=TrainSpec(engine="fake", token_budget=draw(st.sampled_from([1, 30, 4096]))),
        functions=FunctionSpec(workers=draw(st.integers(1, 2)), chunk=draw(st.sampled_from([1, 64]))),
    )


@many
@given(clusters(), st.integers(0, 2**30), st.booleans())
def test_every_rule_holds_in_every_order_and_nothing_is_left_in_the_end(cluster, seed, repeats):
    rig = Rig(cluster, seed, repeats=repeats)
    rig.run()
    assert rig.scheduler.is_idle, rig.scheduler.waiting()
    assert rig.resolved == set(rig.calls)
    assert rig.forgotten == set(rig.calls)
    assert not any(rows for rows in rig.at.values()), "rows are kept that nobody can ask for"
    updates = [call for call in rig.calls.values() if call.method == "update"]
    expected = [len(rig.calls[c.inputs[0][1].call].options.get("rows", range(6))) * c.options["epochs"] for c in updates]
    assert len(rig.accumulated) == len(set(rig.accumulated)) == sum(expected)


def dependents(calls: dict[int, Call], failed: int) -> set[int]:
    """What fails with a call: by data, or because it reads what the call should have written."""
    found = {failed}
    for call in calls.values():
        written = {effect for other in found for effect in calls[other].writes}
        if any(ref.call in found for _, ref in call.inputs) or any(effect in written for effect in call.reads):
            found.add(call.ordinal)
    return found


@many
@given(clusters(), st.integers(0, 2**30), st.booleans(), st.data())
def test_a_failed_task_fails_its_call_and_exactly_what_depends_on_it(cluster, seed, repeats, data):
    failing = data.draw(st.sampled_from([o for o, c in Rig(cluster).calls.items() if c.engine != "source"]))
    rig = Rig(cluster, seed, repeats=repeats, fails=(failing,))
    rig.run()
    assert set(rig.rejected) == dependents(rig.calls, failing)
    assert rig.resolved == set(rig.calls) - set(rig.rejected)
    assert all(f"call {failing} failed" in error for error in rig.rejected.values())
    assert rig.scheduler.is_idle
    assert rig.forgotten == set(rig.calls) - set(rig.rejected)  # An earlier failure might still have reached those.


def test_everything_that_changes_is_in_the_state_and_deciders_have_nothing_besides():
    graph, models, _ = trace(program, {})
    scheduler = Scheduler(lower(graph, models, ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"))))
    state = scheduler._state
    parts = [state, *vars(state).values()]
    todo: list[object] = [value for name, value in vars(scheduler).items() if not name.startswith("_dispatches")]
    seen = 0
    while todo:
        found = todo.pop()
        if any(found is part for part in parts) or callable(found):
            continue
        assert type(found).__module__.startswith("m2flow.micro.scheduler."), f"a decider has {found!r}"
        todo += vars(found).values()
        seen += 1
    assert seen >= 10, "the deciders, and those that they ask"


def first(rig: Rig, method: str, role: str = "") -> int:
    return next(o for o, c in rig.calls.items() if c.method == method and role in c.role)


SPLIT = ClusterSpec(placement="split", device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def test_a_call_added_after_what_it_depends_on_has_failed_fails_at_once_with_the_place_of_that():
    rig = Rig(SPLIT, fails=(1,))
    rig.add(0)
    rig.add(1)
    while rig.act():
        pass
    rig.add(2)
    assert set(rig.rejected) == {1, 2}
    assert "policy.update(demos.all()" in rig.rejected[2]


def test_what_fails_is_given_up_wherever_it_runs():
    cluster = SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", workers=2)})
    rig = Rig(cluster, seed=3)
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    while any(rig.queues.values()):
        name = next(name for name, queue in rig.queues.items() if queue)
        rig.do(name, rig.queues[name].popleft())
    (number,) = rig.generating["rollout-0"]
    rig.say("rollout-0", m.TaskFailed(number, generate, RewardError("no").to_record()))
    assert generate in rig.aborted["rollout-1"]
    rig.do("rollout-1", rig.queues["rollout-1"].popleft())  # The end of what was given up.
    assert rig.rejected.keys() == {generate}
    assert rig.scheduler.is_idle


@agent
async def speaker(chat: Chat, row: Sample) -> float:
    await chat.say("go on")
    return 1.0


@flow
def samples_and_episodes() -> None:
    policy, prompts = Policy("fake"), Dataset([{"prompt": "a"}] * 64)
    policy.generate(prompts.take(8), max_new_tokens=3).length.mean()
    policy.rollout(speaker, prompts.take(40), max_tokens=5, max_turns=2).length.mean()


def test_episodes_of_a_later_call_take_no_room_from_an_earlier_one_s_samples(monkeypatch):
    monkeypatch.setattr("scheduler_rig.program", samples_and_episodes)
    rig = Rig(SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=2)}))
    begun: list[str] = []
    told = rig.told

    def note(worker: str, message: m.ToWorker) -> None:
        if isinstance(message, m.Generate):
            begun.extend([rig.calls[message.call].method] * len(message.ids))
        told(worker, message)

    monkeypatch.setattr(rig, "told", note)
    for ordinal in rig.calls:
        rig.add(ordinal)
    most = 0
    while rig.act():
        most = max(most, rig.num_out("rollout-0"))
    assert begun[:8] == ["generate"] * 8
    assert begun[8:] == ["rollout"] * 40
    assert most >= 14, "an instance holds eight episodes for each sample that it decodes at once"


def test_policies_take_an_instance_to_decode_no_more_at_once_than_it_does():
    dispatch = object.__new__(PolicyDispatch)
    dispatch.call_state = SimpleNamespace(stage=SimpleNamespace(chunk=64))
    for most, expected in ((8, 8), (0, 64), (100, 64)):
        dispatch._pace = Pace("policy", 0.01, 0.001, 0.0, 0.0, "modelled", most)
        assert dispatch._decode_model().max_batch == expected


def test_wanted_rows_come_to_the_controller_once_they_are_there_and_only_once():
    rig = Rig(SPLIT)
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    rig.tell(Wanted(generate))
    assert not any(call == generate for call, _ in rig.at[CONTROLLER])
    while rig.act():
        pass
    assert sum(call == generate for call, _ in rig.at[CONTROLLER]) == rig.scheduler.num_rows(generate)
    rig.tell(Wanted(generate))  # The judge in `told` refuses a second push.


def test_a_released_call_is_kept_until_who_reads_it_is_done():
    rig = Rig(SPLIT)
    generate, score = first(rig, "generate"), first(rig, "score")
    for ordinal in range(score + 1):
        rig.add(ordinal)
    rig.tell(Released(generate))
    while score not in rig.resolved:
        assert generate not in rig.forgotten
        rig.act()
    assert generate in rig.forgotten


def test_what_waits_is_said_in_words():
    rig = Rig(SPLIT)
    for ordinal in range(3):
        rig.add(ordinal)
    assert any("reference.copy_of" in line and "after policy.update" in line for line in rig.scheduler.waiting())
    assert rig.scheduler.running() == {"train-0": "policy.update"}


@pytest.mark.parametrize("kind", [m.TaskDone(77), m.TaskFailed(77, 0, RewardError("late").to_record())], ids=["done", "failed"])
def test_the_end_of_a_task_that_nobody_has_changes_nothing(kind):
    assert Rig(SPLIT).scheduler.handle(FromWorker("train-0", kind)) == []


def test_a_failure_that_belongs_to_no_call_ends_the_run():
    rig = Rig(SPLIT)
    for ordinal in range(first(rig, "generate") + 1):
        rig.add(ordinal)
    while not any(isinstance(task, m.LoadWeights) for task in rig.queues["rollout-0"]):
        rig.act()
    load = rig.queues["rollout-0"].popleft()
    with pytest.raises(EngineError, match="the weights differ"):
        rig.say("rollout-0", m.TaskFailed(load.number, -1, EngineError("the weights differ").to_record()))


@pytest.mark.parametrize("returns", [False, True], ids=["for good", "until it is restarted"])
def test_a_worker_that_is_lost_with_samples_of_weights_that_the_others_have_replaced_ends_the_run(returns):
    rig = Rig(SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", workers=2)}))
    generate = first(rig, "generate")
    for ordinal in range(generate + 1):
        rig.add(ordinal)
    while not rig.generating["rollout-0"]:
        rig.act()
    rig.generating["rollout-0"].clear()  # It never ends these.
    for ordinal in range(generate + 1, len(rig.calls)):
        rig.add(ordinal)
    while rig.act():
        pass
    assert [rig.held[name, "policy"] for name in ("rollout-0", "rollout-1")] == [1, 2]
    with pytest.raises(StateLost, match=r"no other has the weights that policy\.generate began with"):
        rig.tell(WorkerLost("rollout-0", returns=returns))


@op(writes=["notes"])
def noted(sample: Sample) -> float:
    return 1.0


@flow
def notes() -> None:
    noted(Dataset([{"prompt": "a"}] * 3).take(3)).mean()


def test_what_a_call_that_writes_had_not_reported_when_its_worker_was_lost_is_run_in_one_piece_when_it_is_back():
    graph, models, _ = trace(notes, {}, steps=1)
    spec = ClusterSpec(device="cpu", cores=2)
    plan = lower(graph, models, spec)
    scheduler, worker = Scheduler(plan), "functions-0"
    calls = {call.role: call for call in graph.calls}
    stages = Lowering(plan, spec).stages(graph)
    rows = calls["dataset"].options["rows"].ids.tolist()

    def tasks(*events: Event) -> list[list[int]]:
        sent = [command for event in events for command in scheduler.handle(event) if isinstance(command, Send)]
        return [to.message.ids for to in sent if isinstance(to.message, m.RunFunction) and to.message.call == calls["noted"].ordinal]

    added = [CallAdded(call, stage) for call, stage in zip(graph.calls, stages, strict=True)]
    assert tasks(*added, Sourced(calls["dataset"].ordinal, rows, [1] * 3)) == [rows]
    assert tasks(FromWorker(worker, m.Finished(1, calls["noted"].ordinal, rows[:1], [1], [0], [], [0], [], None))) == []
    assert tasks(WorkerLost(worker, returns=True), WorkerJoined(worker, 1)) == [rows[1:]]


@flow
def six() -> None:
    Policy("fake").generate(Dataset([{"prompt": str(i)} for i in range(6)]).take(6), n=2, max_new_tokens=4)


@pytest.mark.parametrize("can", [True, False], ids=["all are embedded", "some engines could not"])
def test_the_prompts_of_a_lost_worker_are_embedded_by_another_before_any_sample_begins(can):
    graph, models, _ = trace(six, {}, steps=1)
    rollout = RolloutSpec(engine="fake", workers=3, policy=("longest-first",), predictor="learned", difficulty="prefill")
    spec = ClusterSpec(placement="split", cores=2, device="cpu", rollout=rollout)
    plan = lower(graph, models, spec)
    scheduler, stages = Scheduler(plan), Lowering(plan, spec).stages(graph)
    source, generate = graph.calls
    rows = source.options["rows"].ids.tolist()
    at: dict[str, m.EmbedPrompts] = {}

    def tell(*events: Event) -> list[tuple[str, list[int]]]:
        """The worker and the prompts, or samples, of each new task."""
        found = []
        for sent in [one for event in events for one in scheduler.handle(event) if isinstance(one, Send)]:
            if isinstance(task := sent.message, m.EmbedPrompts):
                at[sent.worker] = task
                found.append((sent.worker, task.prompts))
            elif isinstance(task, m.Generate):
                found.append((sent.worker, task.ids))
        return found

    def done(worker: str) -> FromWorker:
        return FromWorker(
            worker, m.TaskDone(at[worker].number, embeddings=[[float(row), 0.5] for row in at[worker].prompts] if can else [])
        )

    added = [CallAdded(call, stage) for call, stage in zip(graph.calls, stages, strict=True)]
    assert tell(*added, Sourced(source.ordinal, rows, [1] * 6)) == [(f"rollout-{i}", rows[2 * i : 2 * i + 2]) for i in range(3)]
    late = done("rollout-1")
    assert tell(WorkerLost("rollout-1", returns=False), late) == []
    assert tell(done("rollout-0")) == [("rollout-0", rows[2:4])]
    assert tell(done("rollout-2")) == []
    begun = tell(done("rollout-0"))
    assert {worker for worker, _ in begun} == {"rollout-0", "rollout-2"}
    assert sum(len(ids) for _, ids in begun) == 12
    told = scheduler._state.policies.of_call[generate.ordinal].seen.difficulties
    assert list(told) == ([f"[{float(row)}, 0.5]" for row in rows] if can else [])


def test_rows_that_a_lost_worker_made_are_nobodys_until_they_are_made_again():
    rows = RowLocations()
    rows.made(1, [10, 11], "functions-0", ["functions-1"])
    rows.made(1, [12], "functions-1", [])
    assert rows.makers(1, [10, 11, 12]) == {"functions-0": [10, 11], "functions-1": [12]}
    rows.lost("functions-0")
    assert rows.owners(1, [10, 11, 12]) == {"functions-1": [10, 11, 12]}, "it has a copy"
    assert rows.makers(1, [10, 11, 12]) == {"functions-1": [12]}
    rows.made(1, [10], "functions-1", [])
    assert rows.makers(1, [10, 11]) == {"functions-1": [10]}


@final
class Plays(Role):
    @m2flow.call(granularity="sample")
    def start(self, lane: Sample) -> str:
        return ""

    @m2flow.call(granularity="sample")
    def play(self, past: str) -> str:
        return past


@flow
def lanes() -> None:
    plays = Plays()
    played = plays.start(Dataset([{"prompt": "a"}] * 8).take(8))
    for _ in range(2):
        played = plays.play(played)


@pytest.mark.parametrize("come_at_once", [True, False])
def test_a_worker_gets_no_more_than_its_share_of_the_rows_that_it_has_made(come_at_once):
    """One that was away has made none of them, and is there again."""
    graph, models, _ = trace(lanes, {}, steps=1)
    spec = ClusterSpec(device="cpu", cores=2, functions=FunctionSpec(workers=2, chunk=64))
    plan = lower(graph, models, spec)
    scheduler, stages = Scheduler(plan), Lowering(plan, spec).stages(graph)
    start, first, second = (one.ordinal for one in graph.calls if one.engine == "function")
    rows = next(one for one in graph.calls if one.engine == "source").options["rows"].ids.tolist()
    got: dict[int, list[tuple[str, list[int]]]] = {start: [], first: [], second: []}
    numbers: dict[tuple[int, int], int] = {}

    def tell(*events: Event) -> None:
        for sent in [one for event in events for one in scheduler.handle(event) if isinstance(one, Send)]:
            if isinstance(task := sent.message, m.RunFunction):
                got[task.call].append((sent.worker, task.ids))
                numbers.update({(task.call, row): task.number for row in task.ids})

    def done(worker: str, ordinal: int, ids: list[int], *, ends: bool = True) -> FromWorker:
        nothing = [0] * len(ids)
        number = numbers[ordinal, ids[0]]
        return FromWorker(worker, m.Finished(number, ordinal, ids, nothing, nothing, [], nothing, [], None, ends=ends))

    tell(WorkerLost("functions-1", returns=True))
    tell(*[CallAdded(one, stage) for one, stage in zip(graph.calls, stages, strict=True)], Sourced(graph.calls[0].ordinal, rows, [1] * 8))
    assert got[start] == [("functions-0", rows)]
    tell(WorkerJoined("functions-1", 1))
    if come_at_once:
        tell(done("functions-0", start, rows))
    else:
        for row in rows:
            tell(done("functions-0", start, [row], ends=row == rows[-1]))
    counts = Counter(worker for worker, ids in got[first] for _ in ids)
    assert counts == {"functions-0": 4, "functions-1": 4 if come_at_once else 2}, "of tasks with one row two wait, and the rest for them"
    for worker, ids in got[first]:  # It grows.
        tell(done(worker, first, ids))
    assert sorted(row for _, ids in got[first] for row in ids) == rows
    made = {row: worker for worker, ids in got[first] for row in ids}
    where = {row: worker for worker, ids in got[second] for row in ids}
    assert len(where) >= 7, "one has made five, of which the last may wait"
    assert where.items() <= made.items()
